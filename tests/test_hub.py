"""Models of the Hugging Face hub: tiny random ones in their real classes, read from disk, and all that can be wrong."""

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from secu.base.errors import UserError
from secu.config import EncoderConfig
from secu.nets.hub import FAMILIES, Hub, hub
from secu.nets.pretrained import describe, missing_extra, weights_id

COMMAND = 'pip install "secu[hub]"'
installed = find_spec("transformers") is not None
needs_hub = pytest.mark.skipif(not installed, reason=f"the extra is not installed: {COMMAND}")

SIDE = 32
TRANSFORMER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 8,
}
CONVOLUTIONAL = {"hidden_sizes": [8, 12, 16], "depths": [1, 1, 1]}
TEXT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
# Type → class that is saved, its settings, and the processor that such models come with.
MODELS = {
    "vit": ("ViTModel", TRANSFORMER, "ViTImageProcessorPil"),
    "dinov2": ("Dinov2Model", TRANSFORMER, "BitImageProcessorPil"),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", TRANSFORMER, "BitImageProcessorPil"),
    "dinov3_vit": ("DINOv3ViTModel", TRANSFORMER, "ViTImageProcessorPil"),
    "dinov3_convnext": ("DINOv3ConvNextModel", CONVOLUTIONAL, "ViTImageProcessorPil"),
    "clip": ("CLIPModel", {"vision_config": TRANSFORMER, "text_config": TEXT}, "CLIPImageProcessorPil"),
    "clip_vision_model": ("CLIPVisionModel", TRANSFORMER, "CLIPImageProcessorPil"),
    "siglip": ("SiglipModel", {"vision_config": TRANSFORMER, "text_config": TEXT}, "SiglipImageProcessorPil"),
    "siglip_vision_model": ("SiglipVisionModel", TRANSFORMER, "SiglipImageProcessorPil"),
    "resnet": (
        "ResNetModel",
        CONVOLUTIONAL | {"embedding_size": 8, "layer_type": "basic"},
        "ConvNextImageProcessorPil",
    ),
    "convnext": ("ConvNextModel", CONVOLUTIONAL | {"num_stages": 3}, "ConvNextImageProcessorPil"),
    "convnextv2": ("ConvNextV2Model", CONVOLUTIONAL | {"num_stages": 3}, "ConvNextImageProcessorPil"),
}
SIZES = {
    "BitImageProcessorPil": {"size": {"shortest_edge": 40}, "crop_size": {"height": SIDE, "width": SIDE}},
    "CLIPImageProcessorPil": {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}},
    "ConvNextImageProcessorPil": {
        "size": {"shortest_edge": SIDE},
        "crop_pct": 0.875,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    },
}


def make(kind: str) -> tuple[torch.nn.Module, object]:
    """Return a small random model and its processor."""
    import transformers

    name, settings, processor = MODELS[kind]
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**settings)).eval()
    for parameter in model.parameters():  # some start at zero
        parameter.data.add_(torch.randn(parameter.shape) * 0.02)
    sizes = SIZES.get(processor, {"size": {"height": SIDE, "width": SIDE}})
    return model, getattr(transformers, processor)(**sizes)


def write(kind: str, folder: Path) -> Path:
    model, processor = make(kind)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def load(folder: Path | str, channels: int = 3) -> Hub:
    # Not checked against the registry, which is not what is tested here.
    return hub(EncoderConfig.model_construct(backbone=f"hf:{folder}"), channels)


def images(count: int = 2, side: int = SIDE, channels: int = 3) -> Tensor:
    return torch.randn(count, channels, side, side, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A function that returns the folder of a model, which must not be changed."""
    root = tmp_path_factory.mktemp("models")

    def folder(kind: str) -> Path:
        return root / kind if (root / kind).exists() else write(kind, root / kind)

    return folder


@pytest.fixture
def vit(models, tmp_path):
    """The folder of a ViT, which may be changed."""
    return Path(shutil.copytree(models("vit"), tmp_path / "vit"))


def change(path: Path, **settings: object) -> None:
    """Change entries of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | settings
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_every_family_is_tested():
    assert set(MODELS) == set(FAMILIES)


@needs_hub
@pytest.mark.parametrize("kind", MODELS)
def test_features_are_what_the_model_pools(kind, models):
    """The class token of transformers; of towers and convolutional networks the model's own pooled output."""
    net = load(models(kind))
    model, _ = make(kind)
    tower = getattr(model, "vision_model", model)
    with torch.no_grad():
        output = tower(pixel_values=images())
        features = net(images())
    if kind == "vit" or kind.startswith("dinov2") or kind == "dinov3_vit":
        expected = output.last_hidden_state[:, 0]
    elif kind in ("resnet", "convnext", "convnextv2"):
        expected = output.pooler_output.flatten(1)
        if kind == "resnet":
            assert torch.allclose(expected, output.last_hidden_state.mean((2, 3)), atol=1e-6)
    else:
        expected = output.pooler_output
    assert features.shape == (2, 16)
    assert torch.allclose(features, expected, atol=1e-5)
    assert not torch.allclose(features[0], features[1], atol=1e-3)
    assert net.features == 16
    assert not net.training


@needs_hub
@pytest.mark.parametrize("kind", MODELS)
def test_preprocessing_is_that_of_the_models_processor(kind, models):
    """On an image that needs no scaling; ImageNet's, CLIP's and other statistics, with and without a crop."""
    pretraining = describe(f"hf:{models(kind)}")
    assert pretraining.size == SIDE
    _, processor = make(kind)
    side = 36 if MODELS[kind][2] == "ConvNextImageProcessorPil" else 40 if "Bit" in MODELS[kind][2] else SIDE
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    theirs = torch.from_numpy(np.asarray(processor(pixels)["pixel_values"][0]))
    margin = (side - SIDE) // 2
    ours = torch.from_numpy(pixels).permute(2, 0, 1)[:, margin : margin + SIDE, margin : margin + SIDE] / 255
    mean, std = pretraining.normalization(3)
    ours = (ours - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    assert torch.allclose(ours, theirs, atol=1e-5)


@needs_hub
@pytest.mark.parametrize("kind", ["clip", "dinov2", "resnet"])
def test_gray_images_count_as_colored_ones(kind, models):
    """They are normalized once, by the first channel's statistics; the other channels' differ."""
    pretraining = describe(f"hf:{models(kind)}")
    pixels = torch.rand(2, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))

    def normalized(pixels: Tensor, channels: int) -> Tensor:
        mean, std = pretraining.normalization(channels)
        return (pixels - torch.tensor(mean).view(1, -1, 1, 1)) / torch.tensor(std).view(1, -1, 1, 1)

    with torch.no_grad():
        gray = load(models(kind), 1)(normalized(pixels, 1))
        color = load(models(kind), 3)(normalized(pixels.repeat(1, 3, 1, 1), 3))
    assert torch.allclose(gray, color, atol=1e-5)
    assert len(set(pretraining.mean)) == 3


@needs_hub
@pytest.mark.parametrize("kind", MODELS)
def test_other_sizes_work(kind, models):
    with torch.no_grad():
        assert load(models(kind))(images(side=48)).shape == (2, 16)


@needs_hub
@pytest.mark.parametrize("kind", MODELS)
def test_stages_hold_every_parameter_once(kind, models):
    net = load(models(kind))
    stages = net.stages()
    held = [id(p) for stage in stages for p in stage.parameters()]
    assert len(stages) > 2
    assert len(held) == len(set(held))
    left = [name for name, p in net.named_parameters() if id(p) not in held]
    assert all(name.endswith("mask_token") for name in left)


@needs_hub
def test_the_last_stage_trains_alone(models):
    net = load(models("clip")).requires_grad_(False)
    net.stages()[-1].requires_grad_(True)
    net(images()).sum().backward()
    trained = [name for name, p in net.named_parameters() if p.grad is not None]
    assert "model.post_layernorm.weight" in trained
    assert all(name.startswith(("model.encoder.layers.2.", "model.post_layernorm.")) for name in trained)


@needs_hub
def test_only_the_vision_tower_is_loaded(models):
    names = [name for name, _ in load(models("clip")).named_parameters()]
    assert not any("text" in name for name in names)


@needs_hub
def test_weights_are_float32_whatever_was_saved(models, tmp_path):
    model, processor = make("dinov2")
    model.half().save_pretrained(tmp_path / "half")
    processor.save_pretrained(tmp_path / "half")
    assert {p.dtype for p in load(tmp_path / "half").parameters()} == {torch.float32}


@needs_hub
def test_a_classifier_is_loaded_without_its_head_and_a_missing_pooler_is_no_loss(tmp_path):
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(**TRANSFORMER)).eval()
    model.save_pretrained(tmp_path)
    make("vit")[1].save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model.vit(images()).last_hidden_state[:, 0]
        assert torch.allclose(load(tmp_path)(images()), expected, atol=1e-6)


@needs_hub
def test_what_a_model_is(vit):
    (vit / "README.md").write_text("---\ntags:\n- vision\nlicense: apache-2.0\n---\n# A model\nlicense: none\n")
    pretraining = describe(f"hf:{vit}")
    assert (pretraining.features, pretraining.license) == (16, "apache-2.0")
    assert pretraining.weights == f"vit from {vit}"
    (vit / "README.md").write_text("# A model\n")
    assert describe(f"hf:{vit}").license == "not stated in its files; see the model card"
    assert all("\n" not in family.taught for family in FAMILIES.values())


@needs_hub
def test_defaults_that_a_config_leaves_out_are_the_librarys(vit):
    """The published SigLIP states next to nothing in its config.json."""
    (vit / "config.json").write_text('{"model_type": "siglip", "vision_config": {"model_type": "siglip_vision_model"}}')
    assert describe(f"hf:{vit}").features == 768


@needs_hub
@pytest.mark.parametrize(
    ("settings", "mean", "std"),
    [
        ({"size": SIDE, "image_mean": 0.25, "image_std": 0.5}, 0.25, 0.5),  # old files have plain numbers
        ({"do_normalize": False}, 0, 1),
        ({"do_rescale": False, "image_mean": [127.5] * 3, "image_std": [51] * 3}, 0.5, 0.2),
        ({"rescale_factor": 1 / 127.5, "image_mean": [1] * 3, "image_std": [1] * 3}, 0.5, 0.5),
    ],
)
def test_other_forms_of_preprocessing(vit, settings, mean, std):
    change(vit / "preprocessor_config.json", **settings)
    pretraining = describe(f"hf:{vit}")
    assert (pretraining.size, pretraining.mean, pretraining.std) == (SIDE, (mean,) * 3, (std,) * 3)


@needs_hub
def test_a_processor_may_contain_the_preprocessor(vit):
    expected = describe(f"hf:{vit}")
    settings = json.loads((vit / "preprocessor_config.json").read_text())
    (vit / "preprocessor_config.json").unlink()
    (vit / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    assert describe(f"hf:{vit}") == expected


def refusal(folder: Path | str, use=describe) -> str:
    """Return the one line with which a folder is refused."""
    with pytest.raises(UserError) as caught:
        use(f"hf:{folder}")
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"encoder.backbone: hf:{folder}")
    return text


def build(backbone: str) -> Hub:
    return load(backbone.removeprefix("hf:"))


@needs_hub
@pytest.mark.parametrize("use", [describe, build])
def test_a_text_model_is_refused(tmp_path, use):
    from transformers import BertConfig, BertModel

    BertModel(BertConfig(**TEXT)).save_pretrained(tmp_path)
    assert "a model of type 'bert' is not an image encoder known here; valid: clip, " in refusal(tmp_path, use)


@needs_hub
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "the folder has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda f: (f / "config.json").write_text("[]"), "not a JSON object"),
        (lambda f: change(f / "config.json", model_type=None), "a model of type None is not"),
        (lambda f: change(f / "config.json", hidden_size="many"), "config.json cannot be used"),
        (lambda f: (f / "model.safetensors").unlink(), "the folder has no weights"),
        (lambda f: (f / "preprocessor_config.json").unlink(), "no preprocessor_config.json, which states size"),
        (lambda f: (f / "preprocessor_config.json").write_bytes(b"\xff"), "preprocessor_config.json cannot be read"),
        (lambda f: change(f / "preprocessor_config.json", image_mean=None), "missing or not valid: KeyError"),
        (lambda f: change(f / "preprocessor_config.json", image_std=[0, 1, 1]), "missing or not valid"),
        (lambda f: change(f / "preprocessor_config.json", image_std=[1]), "1 channels instead of 3"),
        (lambda f: change(f / "preprocessor_config.json", rescale_factor=0), "missing or not valid"),
        (lambda f: change(f / "preprocessor_config.json", size={"height": 8, "width": 9}), "not a square"),
        (lambda f: change(f / "preprocessor_config.json", size=0), "missing or not valid"),
    ],
)
def test_a_broken_folder_is_one_line(vit, damage, message):
    damage(vit)
    assert message in refusal(vit)
    assert message in refusal(vit, build)


@needs_hub
def test_broken_weights_are_one_line(vit):
    whole = (vit / "model.safetensors").read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"\xff" * 100):
        (vit / "model.safetensors").write_bytes(content)
        assert describe(f"hf:{vit}").features == 16  # reads no weights
        assert "cannot be loaded" in refusal(vit, build)


@needs_hub
def test_weights_that_are_not_all_there_are_not_made_up(vit):
    from safetensors.torch import load_file, save_file

    tensors = load_file(vit / "model.safetensors")
    del tensors[next(name for name in tensors if "layernorm" in name and "bias" in name)]
    save_file(tensors, vit / "model.safetensors", {"format": "pt"})
    assert "its weights lack 1 tensors, such as " in refusal(vit, build)


@needs_hub
def test_weights_of_other_shapes_than_the_config_says_are_one_line(vit):
    change(vit / "config.json", intermediate_size=24)
    assert "has shape (32,), but config.json says (24,)" in refusal(vit, build)


@needs_hub
def test_pickled_tensors_are_read_and_pickled_code_is_not_run(vit):
    expected = load(vit)
    (vit / "model.safetensors").unlink()
    torch.save(make("vit")[0].state_dict(), vit / "pytorch_model.bin")
    with torch.no_grad():
        assert torch.equal(load(vit)(images()), expected(images()))
    torch.save({"weight": Bomb()}, vit / "pytorch_model.bin")
    assert "cannot be loaded" in refusal(vit, build)
    assert not Bomb.exploded


class Bomb:
    exploded = False

    def __reduce__(self):
        return setattr, (Bomb, "exploded", True)


@needs_hub
def test_code_in_a_folder_is_never_run(vit):
    (vit / "modeling_mine.py").write_text("raise SystemExit('this code was run')\n")
    mapping = {"AutoConfig": "modeling_mine.MyConfig", "AutoModel": "modeling_mine.MyModel"}
    change(vit / "config.json", auto_map=mapping)
    assert load(vit).features == 16
    change(vit / "config.json", model_type="mine")
    assert "a model of type 'mine' is not an image encoder known here" in refusal(vit, build)


@needs_hub
def test_an_id_follows_weights_and_preprocessing_alone(vit, models, tmp_path):
    before = weights_id(f"hf:{vit}")
    moved = vit.rename(tmp_path / "elsewhere")
    (moved / "README.md").write_text("# Something new\n")
    assert weights_id(f"hf:{moved}") == before
    assert weights_id(f"hf:{models('dinov2')}") != before
    change(moved / "preprocessor_config.json", image_mean=[0.1, 0.2, 0.3])
    other = weights_id(f"hf:{moved}")
    with (moved / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x42")
    assert len({before, other, weights_id(f"hf:{moved}")}) == 3


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the hub, and no network."""
    import huggingface_hub

    def offline(name, **options):
        if options.get("local_files_only"):
            return original(name, **options)
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network\nat all")

    original = huggingface_hub.snapshot_download
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    return tmp_path / "cache"


def put(cache: Path, folder: Path, commit: str) -> Path:
    """Lay a model into the cache as me/tiny."""
    place = cache / "models--me--tiny"
    (place / "refs").mkdir(parents=True, exist_ok=True)
    (place / "refs" / "main").write_text(commit)
    return Path(shutil.copytree(folder, place / "snapshots" / commit))


@needs_hub
def test_a_name_in_the_local_cache_needs_no_network(models, cache):
    put(cache, models("vit"), "a" * 40)
    assert describe("hf:me/tiny").weights == "vit from me/tiny of the Hugging Face hub, commit aaaaaaaaaaaa"
    with torch.no_grad():
        assert torch.equal(load("me/tiny")(images()), load(models("vit"))(images()))
    first = weights_id("hf:me/tiny")
    put(cache, models("vit"), "b" * 40)
    assert weights_id("hf:me/tiny") != first


@needs_hub
def test_a_name_without_weights_in_the_cache_is_described_but_not_loaded(models, cache):
    (put(cache, models("vit"), "a" * 40) / "model.safetensors").unlink()
    assert describe("hf:me/tiny").features == 16
    assert "the hub cannot be reached" in refusal("me/tiny", build)


@needs_hub
@pytest.mark.parametrize("use", [describe, weights_id, build])
def test_without_a_network_a_name_is_one_line(cache, use):
    assert refusal("me/tiny", use) == (
        "encoder.backbone: hf:me/tiny: neither a folder nor in the local cache, and cannot be downloaded: "
        "the hub cannot be reached; without a network, give the folder of a model"
    )


@needs_hub
@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("GatedRepoError", "accept its license at https://huggingface.co/me/tiny"),
        ("RepositoryNotFoundError", "the hub has no such model, or it is private"),
        ("HfHubHTTPError", "HfHubHTTPError: 500 oh no"),
    ],
)
def test_what_the_hub_answers_is_one_line(cache, monkeypatch, error, message):
    from unittest.mock import Mock

    import huggingface_hub

    failure = getattr(huggingface_hub.errors, error)("500\noh no", response=Mock())
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=failure))
    assert message in refusal("me/tiny")


@needs_hub
@pytest.mark.parametrize("name", ["", "./nowhere", "/no/such/folder", "../up", "a/b/c", "a b"])
def test_a_folder_that_is_not_there(name):
    assert refusal(name) == f"encoder.backbone: hf:{name}: no such folder"


@needs_hub
def test_a_home_folder_is_found(vit, monkeypatch):
    monkeypatch.setenv("HOME", str(vit.parent))
    assert describe("hf:~/vit").features == 16


@needs_hub
def test_the_library_is_quiet_and_stays_as_it_was(vit, capfd):
    from transformers.utils import logging

    before = (logging.get_verbosity(), logging.is_progress_bar_enabled())
    load(vit)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize("use", [describe, weights_id, build])
def test_a_missing_package_is_named_with_its_command(monkeypatch, tmp_path, use):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert missing_extra("hf:any") == COMMAND
    assert refusal(tmp_path, use).endswith(f" needs the package transformers; install it with: {COMMAND}")
