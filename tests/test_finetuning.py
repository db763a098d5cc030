"""Training a part of the backbone: what stays bit for bit, what moves, and learning rates of its own."""

import pytest
import torch
from torch import Tensor, nn

from secu.base.errors import UserError
from secu.config import EncoderConfig
from secu.nets.backbones import BasicBlock, Bottleneck, ResNet, build_backbone
from secu.nets.encoder import Encoder
from secu.nets.lite0 import Lite0
from secu.nets.norm import ViewNorm
from secu.registry import BACKBONES
from secu.train.listener import Listener
from secu.train.optim import build_optimizer, learning_rates
from small_runs import Interrupting, assert_same, config_of, digits, open_session, trained

COUNT = 60


@pytest.fixture(autouse=True)
def staged(monkeypatch):
    """Register a backbone of three stages that is small enough for a test."""
    monkeypatch.setitem(
        BACKBONES._parts, "staged", lambda config, channels: ResNet(BasicBlock, (1, 1, 1), config.stem, channels)
    )


def settings(*more: str, epochs: int = 2):
    return config_of(
        "encoder.backbone=staged", f"optim.epochs={epochs}", "optim.warmup_epochs=0", "optim.batch_size=30", *more
    )


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    """Return the names of the tensors that are not the same bit for bit."""
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


class Modes(Listener):
    """Notes after each step which norms of the backbone are in training mode."""

    def __init__(self) -> None:
        self.session = None
        self.seen: list[set[str]] = []

    def stepped(self) -> None:
        norms = self.session.method.encoder.backbone.named_modules()
        self.seen.append({name for name, module in norms if isinstance(module, ViewNorm) and module.training})


def train_and_compare(path, config) -> tuple[set[str], set[str], list[set[str]], set[str]]:
    """Return all names of the encoder, those that moved, the norms in training mode after each step, and all norms."""
    from secu.train.clock import Clock
    from secu.train.loop import train

    listener = Modes()
    session = open_session(path, config, digits(COUNT), listener=listener)
    listener.session = session
    encoder = session.method.encoder
    before = state(encoder)
    session.begin()
    train([session], Clock(1e9), None)
    norms = {name for name, module in encoder.backbone.named_modules() if isinstance(module, ViewNorm)}
    return set(before), moved(before, state(encoder)), listener.seen, norms


# Stages


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50", "staged", "lite0"])
def test_stages_have_every_parameter_and_buffer_exactly_once(name):
    net = Lite0() if name == "lite0" else build_backbone(EncoderConfig(backbone=name), 3)
    stages = net.stages()
    assert len(stages) == {"lite0": 5, "staged": 3}.get(name, 4)
    for kind in ("parameters", "buffers"):
        parts = [id(tensor) for stage in stages for tensor in getattr(stage, kind)()]
        assert len(parts) == len(set(parts))
        assert set(parts) == {id(tensor) for tensor in getattr(net, kind)()}


@pytest.mark.parametrize(("block", "depths"), [(BasicBlock, (2, 1, 1)), (Bottleneck, (1, 2)), (BasicBlock, (1,))])
def test_stages_one_after_the_other_are_the_network(block, depths):
    net = ResNet(block, depths, "cifar", 3).eval()
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    y = x
    sizes = []
    for stage in net.stages():
        y = stage(y)
        sizes.append(y.shape[-1])
    torch.testing.assert_close(y.mean((2, 3)), net(x))
    assert sizes == [8 >> stage for stage in range(len(depths))]  # one for each resolution


# What is trained


def test_all_of_the_backbone_is_trained_by_default(tmp_path):
    names, changed, modes, norms = train_and_compare(tmp_path / "run", settings())
    assert changed == names
    assert all(mode == norms for mode in modes)


def test_the_last_stage_is_trained_alone(tmp_path):
    names, changed, modes, norms = train_and_compare(tmp_path / "run", settings("encoder.trainable=last"))
    last = {name for name in names if name.startswith(("backbone.blocks.2.", "projection."))}
    assert changed == last
    assert any(name.endswith("running_mean") for name in names - last)  # statistics are among what stays
    in_last = {name for name in norms if name.startswith("blocks.2.")}
    assert in_last
    assert len(modes) == 6
    assert all(mode == in_last for mode in modes)


def test_only_what_is_trained_has_momentum(tmp_path):
    last = open_session(tmp_path / "a", settings("encoder.trainable=last"), digits(COUNT))
    weights, _ = last.method.trained_parameters()
    encoder = last.method.encoder
    expected = {id(w) for w in (*encoder.backbone.stages()[-1].parameters(), *encoder.projection.parameters())}
    assert {id(weight) for weight in weights} == expected
    assert len(last.step.momentum()) == len(expected) + 1  # and the centers


def test_nothing_of_the_backbone_is_trained():
    encoder = Encoder(EncoderConfig(backbone="staged", trainable="nothing", dim=4), 1).train()
    assert not any(module.training for module in encoder.backbone.modules())
    assert all(module.training for module in encoder.projection.modules())
    before = state(encoder)
    trainable = [weight for weight in encoder.parameters() if weight.requires_grad]
    assert {id(w) for w in trainable} == {id(w) for w in encoder.projection.parameters()}
    optimizer = torch.optim.SGD(trainable, 0.1, weight_decay=0.1)
    for seed in range(2):
        x = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
        encoder(x)[..., 0].sum().backward()
        optimizer.step()
    changed = moved(before, state(encoder))
    assert changed
    assert all(name.startswith("projection.") for name in changed)
    assert {"projection.1.running_mean", "projection.0.weight"} <= changed


@pytest.mark.parametrize(("trainable", "fixed"), [("all", 0), ("last", 2), ("nothing", 1)])
def test_the_mode_follows_every_switch(trainable, fixed):
    encoder = Encoder(EncoderConfig(backbone="staged", trainable=trainable), 1)
    assert len(encoder.fixed) == fixed
    for mode in (True, False, True):
        assert encoder.train(mode) is encoder
        assert encoder.training is mode
        assert encoder.projection.training is mode
        assert all(not module.training for part in encoder.fixed for module in part.modules())
        assert encoder.backbone.blocks[2].norm1.training is (mode and trainable != "nothing")
    encoder.eval()
    assert not any(module.training for module in encoder.modules())


def test_a_backbone_without_stages(tmp_path):
    with pytest.raises(UserError, match=r"^encoder.trainable: last needs a backbone with stages, which small does not"):
        trained(tmp_path / "run", config_of("encoder.trainable=last", "encoder.backbone=small"), digits(COUNT))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("more", [(), ("optim.backbone_lr=0.01",), ("optim.name=lars", "optim.backbone_lr=0.01")])
def test_resuming_equals_not_stopping(tmp_path, more):
    config = settings("encoder.trainable=last", *more)
    whole = trained(tmp_path / "whole", config, digits(COUNT))
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "run", config, digits(COUNT), listener=Interrupting(step=5))
    assert_same(trained(tmp_path / "run", config, digits(COUNT), resume=True).run, whole.run)


# Learning rates


@pytest.mark.parametrize("optimizer", ["sgd", "lars"])
def test_a_rate_of_zero_keeps_the_weights_of_the_backbone(tmp_path, optimizer):
    asked = ("optim.backbone_lr=0", f"optim.name={optimizer}", "optim.weight_decay=0.1")
    names, changed, _, _ = train_and_compare(tmp_path / "run", settings(*asked))
    statistics = {name for name in names if "running_" in name}
    backbone = {name for name in names if name.startswith("backbone.")}
    assert changed == (names - backbone) | statistics  # batch-norm still follows the images


def test_a_rate_of_its_own_that_is_the_same_changes_nothing(tmp_path):
    plain = trained(tmp_path / "a", settings("optim.lr=0.1"), digits(COUNT)).run
    same = trained(tmp_path / "b", settings("optim.lr=0.1", "optim.backbone_lr=0.1"), digits(COUNT)).run
    assert not moved(plain.load_model(), same.load_model())
    other = trained(tmp_path / "c", settings("optim.lr=0.1", "optim.backbone_lr=0.01"), digits(COUNT)).run
    assert moved(plain.load_model(), other.load_model())


@pytest.mark.parametrize("schedule", ["constant", "rising"])
@pytest.mark.parametrize(("rate", "ratio"), [(None, 1.0), (0.2, 1.0), (0.02, 0.1), (0.0, 0.0), (0.6, 3.0)])
def test_the_rate_of_the_backbone_is_in_proportion_to_that_of_the_encoder(schedule, rate, ratio):
    config = settings("optim.lr=0.2", "optim.warmup_epochs=2", f"centers.schedule={schedule}", epochs=5)
    config = config.model_copy(update={"optim": config.optim.model_copy(update={"backbone_lr": rate})})
    without = config.model_copy(update={"optim": config.optim.model_copy(update={"backbone_lr": None})})
    for epoch in range(6):
        rates = learning_rates(config, epoch, 7)
        assert rates.shape == (7, 3)
        assert rates[:, 2].tolist() == pytest.approx([ratio * value for value in rates[:, 0].tolist()])
        assert torch.equal(rates[:, :2], learning_rates(without, epoch, 7)[:, :2])
    assert (rates[:, 0] > 0).all()


def test_without_a_rate_of_the_encoder_the_backbone_has_none_either():
    rates = learning_rates(settings("optim.lr=0", "optim.backbone_lr=0.1"), 1, 4)
    assert rates[:, [0, 2]].tolist() == [[0, 0]] * 4


@pytest.mark.parametrize("name", ["sgd", "lars"])
def test_each_weight_has_the_rate_of_its_part(name):
    backbone, projection, frozen = (nn.Parameter(torch.ones(2, 3)) for _ in range(3))
    centers = nn.Parameter(torch.ones(4, 2))
    config = settings(f"optim.name={name}", "optim.weight_decay=0", "optim.momentum=0").optim
    rates = torch.tensor([0.1, 0.2, 0.05])
    encoder_lr, center_lr, backbone_lr = rates.unbind()
    encoder = [backbone, projection]  # the frozen weight is of the backbone, but not trained
    optimizer = build_optimizer(config, encoder, [centers], encoder_lr, center_lr, [frozen, backbone], backbone_lr)
    for weight in (*encoder, centers):
        weight.grad = torch.ones_like(weight)
    frozen.grad = torch.ones_like(frozen)
    optimizer.step()
    trust = 1e-3 if name == "lars" else 1.0  # the norms of weights and gradients are the same
    expected = [1 - 0.05 * trust, 1 - 0.1 * trust, 1 - 0.2, 1.0]
    for weight, value in zip((backbone, projection, centers, frozen), expected, strict=True):
        torch.testing.assert_close(weight.detach(), torch.full_like(weight, value))
