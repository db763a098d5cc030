"""Precision of the encoder: the scale of the losses, TF32, and 16 bits, as far as a CPU can show them."""

from unittest.mock import Mock, PropertyMock

import pytest
import torch
from torch import Tensor

from secu.base.errors import UserError
from secu.methods import Method, build_method
from secu.methods.base import HALF
from secu.settings import load_config
from secu.train import precision
from secu.train.engine import Engine
from secu.train.precision import LOSS_SCALE, convolutions, divide_gradients, loss_scale
from secu.train.step import Step
from small_runs import CPU, config_of, digits, trained

IMAGES = 100


def make_step(*overrides: str, scale: float = 1.0) -> Step:
    few = digits(IMAGES)
    step = Step(build_method(config_of(*overrides), IMAGES, few.shape, CPU), few, CPU)
    step.loss_scale = scale
    return step


def state_after_epochs(step: Step, epochs: int = 3) -> dict[str, Tensor]:
    """Train, and return everything that it changed, and the losses."""
    engine = Engine([step], "eager")
    losses = [engine.epoch(number)[0] for number in range(epochs)]
    values = {f"{name} {epoch}": torch.tensor(loss[name]) for epoch, loss in enumerate(losses) for name in loss}
    momentum = {f"momentum {name}": value for name, value in step.momentum().items()}
    return {**values, **momentum, **step.method.state_dict()}


def gradients_of(step: Step) -> Tensor:
    """Return the gradients of the first step, flat; its learning rate is 0."""
    step.start_epoch(0)
    step.run(step.sizes[0])
    return torch.cat([weight.grad.flatten() for weight in step.method.encoder.parameters()])


@pytest.fixture
def half_on_cpu(monkeypatch):
    """Let the CPU compute in the 16 bits of the config, as CUDA does."""

    def autocast(self: Method) -> torch.autocast:
        half = HALF.get(self.config.optim.precision)
        return torch.autocast("cpu", half, enabled=half is not None)

    monkeypatch.setattr(Method, "autocast", autocast)


# Scale of the losses


@pytest.mark.parametrize("scale", [LOSS_SCALE, 2.0**-6])
@pytest.mark.parametrize(
    "overrides",
    [(), ("optim.name=lars", "optim.lr=1"), ("optim.name=lars", "centers.optimizer=lars"), ("loss.name=ce",)],
    ids=["sgd", "lars", "lars-centers", "ce"],
)
def test_a_scale_changes_no_bit_of_a_run_in_float32(scale, overrides):
    plain = state_after_epochs(make_step(*overrides))
    scaled = state_after_epochs(make_step(*overrides, scale=scale))
    assert plain.keys() == scaled.keys()
    assert [name for name in plain if not torch.equal(plain[name], scaled[name])] == []


def test_a_scale_that_is_no_power_of_two_would_be_noticed():
    """Guards the test above: the scale reaches the backward pass."""
    plain = state_after_epochs(make_step())
    scaled = state_after_epochs(make_step(scale=1000.1))
    assert not torch.equal(plain["encoder.projection.0.weight"], scaled["encoder.projection.0.weight"])


def test_gradients_are_scaled_in_the_backward_pass_and_divided_after_it(monkeypatch):
    norms = []
    divide = precision.divide_gradients

    def spy(optimizer: torch.optim.Optimizer, scale: float) -> None:
        norms.append([group["params"][0].grad.norm() for group in optimizer.param_groups])
        divide(optimizer, scale)
        norms.append([group["params"][0].grad.norm() for group in optimizer.param_groups])

    monkeypatch.setattr("secu.train.step.divide_gradients", spy)
    gradients_of(make_step(scale=LOSS_SCALE))
    before, after = norms
    assert len(before) == 2  # encoder and centers
    assert before == [LOSS_SCALE * norm for norm in after]
    assert all(norm > 0 for norm in after)


def test_weights_without_gradient_are_left_out_of_the_division():
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    weights[0].grad = torch.full((3,), 8.0)
    weights[2].grad = torch.tensor([4.0, 0.0, -2.0])
    optimizer = torch.optim.SGD([{"params": weights[:2]}, {"params": weights[2:]}])
    divide_gradients(optimizer, 4)
    assert weights[0].grad.tolist() == [2, 2, 2]
    assert weights[1].grad is None
    assert weights[2].grad.tolist() == [1, 0, -0.5]


def test_only_fp16_on_cuda_has_a_scale_which_is_a_power_of_two():
    cuda = torch.device("cuda")
    scales = {kind: loss_scale(config_of(f"optim.precision={kind}"), cuda) for kind in ("bf16", "fp16", "tf32", "fp32")}
    assert scales == {"bf16": 1, "fp16": LOSS_SCALE, "tf32": 1, "fp32": 1}
    assert loss_scale(config_of("optim.precision=fp16"), CPU) == 1
    assert LOSS_SCALE == 2**12
    assert make_step("optim.precision=fp16").loss_scale == 1


# 16 bits


@pytest.mark.parametrize(
    ("kind", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("tf32", None), ("fp32", None)]
)
def test_encoder_uses_16_bits_on_cuda_only(monkeypatch, kind, dtype):
    method = make_step(f"optim.precision={kind}").method
    assert method.config.optim.precision == kind
    with method.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    autocast = Mock()
    monkeypatch.setattr(torch, "autocast", autocast)
    monkeypatch.setattr(Method, "device", PropertyMock(return_value=torch.device("cuda")))
    method.autocast()
    autocast.assert_called_once_with("cuda", dtype, enabled=dtype is not None)


def test_a_run_in_fp16_with_the_scale_trains(half_on_cpu):
    half = state_after_epochs(make_step("optim.precision=fp16", scale=LOSS_SCALE), 4)
    full = state_after_epochs(make_step("optim.precision=fp32", "optim.lr=0.05"), 1)
    assert all(value.isfinite().all() for value in half.values())
    assert half["loss 0"] == pytest.approx(float(full["loss 0"]), rel=0.02)
    assert half["encoder.projection.0.weight"].dtype == torch.float32


def test_small_gradients_survive_fp16_with_the_scale_only(half_on_cpu):
    """As if the losses were a thousand times smaller than they are, which they are per pixel of a real image."""

    def shrunk(step: Step) -> Step:
        losses = step.method.losses
        step.method.losses = lambda *batch: {name: 2.0**-14 * loss for name, loss in losses(*batch).items()}
        return step

    scaled = gradients_of(shrunk(make_step("optim.precision=fp16", scale=2.0**14)))
    plain = gradients_of(shrunk(make_step("optim.precision=fp16")))
    exact = gradients_of(shrunk(make_step("optim.precision=fp32")))
    errors = [float((found - exact).norm() / exact.norm()) for found in (scaled, plain)]
    assert errors[0] < 0.05
    assert errors[1] > 2 * errors[0]


def test_infinite_gradients_end_a_run_in_one_line_that_names_the_precision(tmp_path, half_on_cpu, monkeypatch):
    monkeypatch.setattr("secu.train.step.loss_scale", lambda config, device: 2.0**40)
    with pytest.raises(UserError, match=r"is not finite; lower optim.lr or centers.lr, or set optim.precision=bf16$"):
        trained(tmp_path / "run", config_of("optim.precision=fp16"), digits(IMAGES))


# TF32


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("kind", "inside"), [("bf16", None), ("fp16", None), ("tf32", True), ("fp32", False)])
def test_convolutions_use_tf32_as_set_and_the_process_is_left_as_it_was(monkeypatch, kind, inside, before):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", before)
    products = torch.backends.cuda.matmul.allow_tf32
    step = make_step(f"optim.precision={kind}")
    seen = []
    look = lambda *_: seen.append((torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32))  # noqa: E731
    step.method.encoder.register_forward_hook(look)
    next(step.method.encoder.parameters()).register_post_accumulate_grad_hook(look)  # the last of the backward pass
    gradients_of(step)
    assert seen == [(before if inside is None else inside, products)] * 2
    assert torch.backends.cudnn.allow_tf32 is before


def test_tf32_is_restored_after_an_error(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    config = load_config("digits", ["optim.precision=fp32"])
    with pytest.raises(ZeroDivisionError), convolutions(config):
        raise ZeroDivisionError
    assert torch.backends.cudnn.allow_tf32
