"""Encoders: the paper's numbers of parameters, shapes, statistics of each view, and initial weights."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secu.cluster.clustering import Clustering
from secu.config import Config, EncoderConfig
from secu.nets.backbones import BasicBlock, Bottleneck, ResNet, SmallNet, build_backbone, stem
from secu.nets.encoder import Encoder, projection
from secu.nets.norm import ViewNorm
from secu.registry import BACKBONES

TABLE_1 = [  # layers of projection and prediction, parameters in millions
    (0, 0, 11.45),
    (1, 0, 11.30),
    (2, 0, 11.57),
    (3, 0, 11.83),
    (3, 2, 11.97),
]
SMALL = EncoderConfig(backbone="small", dim=16)


def images(count: int, channels: int, size: int, seed: int = 0) -> Tensor:
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("projected", "predicted", "millions"), TABLE_1)
def test_parameters_are_those_of_table_1(projected, predicted, millions):
    """ResNet-18 for CIFAR-10 with the centers of all ten heads, 10 to 100 clusters."""
    config = Config(encoder={"projection_layers": projected, "prediction_layers": predicted})
    with torch.device("meta"):
        encoder = Encoder(config.encoder, channels=3)
    clustering = Clustering(config, 10, encoder.dim)
    centers = sum(clustering.head(number).numel() for number in range(10))
    assert centers == 550 * (128 if projected else 512)
    assert round((sum(p.numel() for p in encoder.parameters()) + centers) / 1e6, 2) == millions


@pytest.mark.parametrize(
    ("name", "parameters"), [("resnet18", 11_176_512), ("resnet34", 21_284_672), ("resnet50", 23_508_032)]
)
def test_backbones_have_the_published_number_of_parameters(name, parameters):
    """He et al.'s networks for ImageNet, without the classifier of 1000 classes."""
    with torch.device("meta"):
        backbone = build_backbone(EncoderConfig(backbone=name, stem="imagenet"), 3)
    assert sum(p.numel() for p in backbone.parameters()) == parameters


SHAPES = [  # backbone, stem, side of the image, side of the last feature map, features
    ("resnet18", "cifar", 32, 4, 512),
    ("resnet18", "stl", 32, 3, 512),
    ("resnet18", "imagenet", 64, 2, 512),
    ("resnet34", "cifar", 16, 2, 512),
    ("resnet50", "imagenet", 32, 1, 2048),
    ("resnet50", "cifar", 16, 2, 2048),
]


@pytest.mark.parametrize(("name", "kind", "size", "last", "features"), SHAPES)
def test_resnets_embed_on_the_unit_sphere(name, kind, size, last, features):
    encoder = Encoder(EncoderConfig(backbone=name, stem=kind, dim=24), channels=3)
    maps = []
    vectors = []
    encoder.backbone.blocks.register_forward_hook(lambda module, given, output: maps.append(output))
    encoder.backbone.register_forward_hook(lambda module, given, output: vectors.append(output))
    with torch.no_grad():
        embeddings = encoder(images(4, 3, size))
    assert maps[0].shape == (4, features, last, last)
    assert encoder.backbone.features == features
    torch.testing.assert_close(vectors[0], maps[0].mean((2, 3)))
    assert embeddings.shape == (2, 2, 24)
    assert embeddings.dtype == torch.float32
    torch.testing.assert_close(embeddings.norm(dim=-1), torch.ones(2, 2))


@pytest.mark.parametrize(("projected", "predicted", "outputs", "dim"), [(0, 0, 2, 96), (1, 0, 2, 16), (3, 2, 4, 16)])
def test_projection_and_prediction_give_two_or_four_embeddings(projected, predicted, outputs, dim):
    config = EncoderConfig(backbone="small", dim=16, projection_layers=projected, prediction_layers=predicted)
    encoder = Encoder(config, channels=1)
    embeddings = encoder(images(10, 1, 8))
    assert encoder.dim == dim
    assert embeddings.shape == (outputs, 5, dim)
    torch.testing.assert_close(embeddings.norm(dim=-1), torch.ones(outputs, 5))


def test_the_first_outputs_are_the_projection_and_the_others_its_prediction():
    torch.manual_seed(0)
    encoder = Encoder(EncoderConfig(backbone="small", dim=16, projection_layers=3, prediction_layers=2), channels=1)
    views = images(10, 1, 8)
    embeddings = encoder(views)
    projected = encoder.projection(encoder.backbone(views))
    predicted = encoder.prediction(projected)
    for s, expected in enumerate([projected[:5], projected[5:], predicted[:5], predicted[5:]]):
        torch.testing.assert_close(embeddings[s], F.normalize(expected, dim=-1))


def test_embeddings_are_float32_under_mixed_precision():
    encoder = Encoder(SMALL, channels=1)
    with torch.autocast("cpu", torch.bfloat16):
        assert encoder.projection(encoder.backbone(images(4, 1, 8))).dtype == torch.bfloat16
        embeddings = encoder(images(4, 1, 8))
        single = encoder.eval().embed(images(4, 1, 8))
    for given in (embeddings, single):
        assert given.dtype == torch.float32
        torch.testing.assert_close(given.norm(dim=-1), torch.ones(given.shape[:-1]))


def kinds_of(module: nn.Module) -> list[str]:
    return [type(layer).__name__ for layer in module]


def test_layers_of_the_mlps():
    """Only the deepest projection has a norm after every layer."""
    layer = ["Linear", "ViewNorm", "ReLU"]
    assert isinstance(projection(96, 40, 16, 0), nn.Identity)
    assert isinstance(projection(96, 40, 16, 1), nn.Linear)
    assert kinds_of(projection(96, 40, 16, 2)) == [*layer, "Linear"]
    assert kinds_of(projection(96, 40, 16, 3)) == [*layer, *layer, "Linear", "ViewNorm"]
    encoder = Encoder(EncoderConfig(backbone="small", dim=16, prediction_layers=2, prediction_dim=30), channels=1)
    assert kinds_of(encoder.prediction) == [*layer, "Linear"]
    assert encoder.prediction[0].weight.shape == (30, 16)
    assert encoder.prediction[3].weight.shape == (16, 30)
    assert encoder.projection[0].weight.shape == (96, 96)  # as wide as the backbone's features
    wide = Encoder(EncoderConfig(backbone="small", dim=16, hidden_dim=50), channels=1)
    assert [wide.projection[0].weight.shape, wide.projection[3].weight.shape] == [(50, 96), (16, 50)]


# Stems and blocks


def test_stems_reduce_the_resolution():
    assert stem("cifar", 3, 64)(images(2, 3, 32)).shape == (2, 64, 32, 32)
    assert stem("stl", 3, 64)(images(2, 3, 96)).shape == (2, 64, 49, 49)
    assert stem("imagenet", 3, 64)(images(2, 3, 64)).shape == (2, 64, 16, 16)
    for kind, size, pool in (("cifar", 3, []), ("stl", 3, ["MaxPool2d"]), ("imagenet", 7, ["MaxPool2d"])):
        layers = stem(kind, 3, 64)
        assert kinds_of(layers) == ["Conv2d", "ViewNorm", "ReLU", *pool]
        assert layers[0].weight.shape == (64, 3, size, size)


def test_small_net_halves_the_image_once():
    backbone = build_backbone(SMALL, 1)
    maps = backbone.layers(images(2, 1, 8))
    assert maps.shape == (2, 96, 4, 4)
    torch.testing.assert_close(backbone(images(2, 1, 8)), maps.mean((2, 3)))


def norm_oracle(x: Tensor, norm: ViewNorm) -> Tensor:
    return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)


def block_oracle(x: Tensor, block: BasicBlock | Bottleneck, stride: int) -> Tensor:
    """He et al., figures 2 and 5, in evaluation mode; the stride is in the (first) 3x3 convolution."""
    layers = ["1", "2"] if isinstance(block, BasicBlock) else ["1", "2", "3"]
    change = x
    strides = {"1": stride} if len(layers) == 2 else {"2": stride}
    for number in layers:
        weight = getattr(block, f"conv{number}").weight
        norm = getattr(block, f"norm{number}")
        change = F.conv2d(change, weight, stride=strides.get(number, 1), padding=weight.shape[-1] // 2)
        change = norm_oracle(change, norm)
        if number != layers[-1]:
            change = change.clamp(min=0)
    if not isinstance(block.shortcut, nn.Identity):
        x = norm_oracle(F.conv2d(x, block.shortcut[0].weight, stride=stride), block.shortcut[1])
    return (x + change).clamp(min=0)


@pytest.mark.parametrize("kind", [BasicBlock, Bottleneck])
@pytest.mark.parametrize(("inputs", "stride", "resized"), [(8, 1, False), (8, 2, True), (6, 1, True)])
def test_blocks_are_those_of_the_residual_network(kind, inputs, stride, resized):
    torch.manual_seed(0)
    block = kind(inputs, 8 // kind.expansion, stride)
    for norm in (m for m in block.modules() if isinstance(m, ViewNorm)):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    block.eval()
    x = images(3, inputs, 6)
    assert isinstance(block.shortcut, nn.Identity) != resized
    torch.testing.assert_close(block(x), block_oracle(x, block, stride))


def test_convolutions_are_initialized_kaiming_normal_by_fan_out():
    """σ = √(2/(outputs · side²)); no bias anywhere."""
    torch.manual_seed(0)
    for config in (EncoderConfig(), EncoderConfig(backbone="resnet50", stem="imagenet"), SMALL):
        convolutions = [m for m in build_backbone(config, 3).modules() if isinstance(m, nn.Conv2d)]
        for layer in convolutions:
            weight = layer.weight.detach()
            expected = math.sqrt(2 / (weight.shape[0] * weight.shape[2] * weight.shape[3]))
            slack = 5 / math.sqrt(2 * weight.numel())  # five standard deviations of a measured σ
            assert weight.std().item() == pytest.approx(expected, rel=slack)
            assert abs(weight.mean().item()) < 5 * expected / math.sqrt(weight.numel())
            assert layer.bias is None
        largest = max(convolutions, key=lambda layer: layer.weight.numel()).weight.detach().flatten()
        kurtosis = ((largest - largest.mean()) ** 4).mean() / largest.var() ** 2
        assert kurtosis.item() == pytest.approx(3, abs=0.2)  # that of a normal distribution; a uniform one has 1.8


def test_backbones_initialize_themselves_with_the_same_draws_as_always():
    """All layers are created first, each with torch's default draws; then all convolutions are drawn again in order."""
    for ours in (lambda: SmallNet(3), lambda: ResNet(BasicBlock, (1, 1), "cifar", 3)):
        torch.manual_seed(0)
        net = ours()
        after = torch.get_rng_state()
        torch.manual_seed(0)
        convolutions = [module for module in net.modules() if isinstance(module, nn.Conv2d)]
        for layer in convolutions:
            nn.Conv2d(layer.in_channels, layer.out_channels, layer.kernel_size, bias=False)
        for layer in convolutions:
            expected = torch.empty_like(layer.weight)
            nn.init.kaiming_normal_(expected, mode="fan_out", nonlinearity="relu")
            assert torch.equal(layer.weight, expected)
        assert torch.equal(torch.get_rng_state(), after)


def test_a_backbone_from_outside_is_chosen_by_name(monkeypatch):
    """A function of config and channels; all it owes the encoder is ``features``."""
    monkeypatch.setattr(BACKBONES, "_parts", dict(BACKBONES._parts))

    @BACKBONES.register("mean")
    def mean(config: EncoderConfig, channels: int) -> nn.Module:
        net = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())
        net.features = 4 * channels
        return net

    encoder = Encoder(EncoderConfig(backbone="mean", dim=16), channels=3)
    assert encoder.projection[0].weight.shape == (12, 12)
    assert encoder(images(4, 3, 8)).shape == (2, 2, 16)
    with pytest.raises(ValueError, match="unknown 'man'; did you mean mean"):
        EncoderConfig(backbone="man")


# Batch-norm


def with_library_norms(encoder: Encoder) -> Encoder:
    """Return a copy with torch's batch-norm in place of ours."""
    encoder = copy.deepcopy(encoder)
    for name, ours in [(n, m) for n, m in encoder.named_modules() if isinstance(m, ViewNorm)]:
        parent = encoder.get_submodule(name.rpartition(".")[0])
        in_backbone = name.startswith("backbone")
        library = (nn.BatchNorm2d if in_backbone else nn.BatchNorm1d)(len(ours.weight))
        library.load_state_dict(ours.state_dict(), strict=False)
        setattr(parent, name.rpartition(".")[2], library)
    return encoder


def test_both_views_in_one_pass_equal_two_passes():
    """Outputs, gradients and running statistics, with views of very different statistics."""
    torch.manual_seed(0)
    ours = Encoder(EncoderConfig(backbone="small", dim=16, projection_layers=3, prediction_layers=2), channels=1)
    theirs = with_library_norms(ours)
    first = images(6, 1, 8)
    second = 3 * images(6, 1, 8, seed=1) + 2
    embeddings = ours(torch.cat([first, second]))
    passes = []
    for view in (first, second):
        projected = theirs.projection(theirs.backbone(view))
        passes.append((F.normalize(projected, dim=-1), F.normalize(theirs.prediction(projected), dim=-1)))
    expected = torch.stack([passes[0][0], passes[1][0], passes[0][1], passes[1][1]])
    torch.testing.assert_close(embeddings, expected)
    slope = torch.randn_like(expected)
    embeddings.backward(slope)
    expected.backward(slope)
    theirs_grads = {name: weight.grad for name, weight in theirs.named_parameters()}
    for name, weight in ours.named_parameters():
        torch.testing.assert_close(weight.grad, theirs_grads[name], rtol=1e-3, atol=1e-4, msg=name)
    theirs_buffers = dict(theirs.named_buffers())
    for name, value in ours.named_buffers():
        torch.testing.assert_close(value, theirs_buffers[name], msg=name)


def test_embed_in_evaluation_is_the_projection_with_running_statistics():
    torch.manual_seed(0)
    encoder = Encoder(EncoderConfig(backbone="small", dim=16, prediction_layers=2), channels=1)
    encoder(images(40, 1, 8))  # changes the running statistics from 0 and 1
    encoder.eval()
    library = with_library_norms(encoder).eval()
    given = images(5, 1, 8, seed=1)
    state = copy.deepcopy(encoder.state_dict())
    embeddings = encoder.embed(given)
    assert embeddings.shape == (5, 16)
    torch.testing.assert_close(embeddings, F.normalize(library.projection(library.backbone(given)), dim=-1))
    for position in range(5):  # the embedding of an image does not depend on its batch
        torch.testing.assert_close(encoder.embed(given[position : position + 1])[0], embeddings[position])
    assert all(torch.equal(value, state[name]) for name, value in encoder.state_dict().items())
