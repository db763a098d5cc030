"""Choose a complete config for the user's images: a handful of rules, each with its reason.

The rules depend on a few facts: the number of images, their size, whether they are gray or color, the device, and
whether the encoder is pretrained (feature_plan.py). docs/lab/defaults.md shows the resulting accuracy. Every choice can
be overridden with ``key=value``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from secu.apps import feature_plan, view_plan
from secu.apps.durations import estimate, overhead
from secu.apps.feature_plan import Change, Facts, asked
from secu.apps.ranges import Range
from secu.apps.reading import reading
from secu.base.errors import UserError
from secu.config import Config
from secu.methods.number import candidates
from secu.nets.pretrained import describe
from secu.settings import flatten, merge, resolve

MOST_HEADS = {"cpu": 5, "mps": 10, "cuda": 10}
IMAGES_PER_CLUSTER = 20  # a head with fewer images per cluster learns noise
STEPS = {"cpu": 9_000, "mps": 30_000, "cuda": 156_400}  # training steps per run; cuda: as in the paper for CIFAR-10
FINE_TUNING_STEPS = 5_000  # at most, if the backbone is pretrained
FEWEST_EPOCHS = 20
MOST_EPOCHS = 400
GRADIENT_FROM = 0.7  # minimum balance for centers moved by gradient; below it, one cluster may absorb the others
FINE_TUNING = 0.1  # learning rate of a pretrained backbone, relative to that of the rest
CENTERS_RATE = 4  # ratio to the encoder's learning rate, as in the paper for CIFAR-100-20 and STL-10 (CIFAR-10: 6)
HOPELESS_HOURS = 12
BALANCE = 0.9  # the paper's lower bound on the size of a cluster, as a share of an equal size
# Settings omitted from the printed plan.
NOT_SHOWN = ("data.source", "data.labels", "data.values", "hints.checksum", "seed")


Rule = Callable[[Facts, int, dict[str, Any]], Change]


@dataclass(frozen=True)
class Plan:
    """A config, the reasons for it, and the estimated seconds of training and of everything else."""

    config: Config
    reasons: tuple[str, ...]
    seconds: float
    other_seconds: float = 0.0

    @property
    def most_clusters(self) -> int:
        """The largest number of clusters that the run may report."""
        config = self.config
        return max(config.heads[n] for n in candidates(config.heads)) if config.answer == "number" else config.clusters

    @property
    def hopeless(self) -> bool:
        """Whether training would take unreasonably long."""
        return self.seconds > HOPELESS_HOURS * 3600

    @property
    def total_seconds(self) -> float:
        """Estimated time of the whole command."""
        return self.seconds + self.other_seconds


def make_plan(facts: Facts, wanted: int | Range, balance: float | None, overrides: dict[str, Any]) -> Plan:
    """Return the config for these images and this many clusters, with overrides applied.

    Without a ``balance``, groups may be of any size: the run chooses between equal clusters and merged ones.
    """
    most = wanted.high if isinstance(wanted, Range) else wanted
    if most < 2:
        raise UserError(f"clusters: {most} must be at least 2")
    if most > facts.images:
        raise UserError(f"clusters: {most} clusters need at least {most} images, got {facts.images}")
    if balance is not None and not 0 <= balance <= 1:
        raise UserError(f"balance: {balance} must be from 0 (groups of any size) to 1 (all groups equally large)")
    settings: dict[str, Any] = {}
    reasons: list[str] = []
    overrides = _checked(overrides)
    rules: tuple[Rule, ...] = feature_plan.RULES if facts.on_features else RULES
    clusters = most
    if isinstance(wanted, Range):
        wanted.require_free(balance, overrides)
        clusters = wanted.sizes()[wanted.middle()]  # what the other rules go by
        rules = tuple(wanted.rule if rule in (_heads, feature_plan.heads) else rule for rule in rules)
    rules = (partial(_constraint, balance), *rules, partial(_answer, balance))
    for rule in rules:
        change, reason = rule(facts, clusters, merge(settings, overrides))
        settings = merge(settings, change)
        reasons.append(reason)
    reasons += [f"{key}={value}: as requested" for key, value in flatten(overrides).items() if key not in NOT_SHOWN]
    config = resolve(merge(settings, overrides))
    feature_plan.require_enough(config.neighbors.count, facts.images)
    return Plan(config, tuple(reasons), estimate(config, facts), overhead(config, facts))


def _checked(overrides: dict[str, Any]) -> dict[str, Any]:
    """Validate the overrides, so that the rules only see valid values."""
    checked = resolve(overrides).model_dump(mode="json", exclude_unset=True)
    for name, valid in (("image_size", "a number of pixels"), ("channels", "1 (gray) or 3 (color)")):
        if checked.get("data", {}).get(name, 1) is None:
            raise UserError(f"data.{name}: must be {valid}, got null")
    return checked


def _constraint(balance: float | None, facts: Facts, clusters: int, settings: dict[str, Any]) -> Change:
    kind = asked(settings, "constraint", "kind")
    bounds = ("lower", "upper", "dual_lr", "dual_schedule")
    bounded = balance is not None or any(asked(settings, "constraint", name) is not None for name in bounds)
    if kind is None and facts.on_features and not bounded:
        # The size constraint loses clusters where steps are few, the entropy does not.
        why = "keeps clusters from collapsing in short runs"
        return {"constraint": {"kind": "entropy"}}, f"constraint.kind=entropy: {why}"
    if kind not in (None, "size"):
        return {}, "balance: not used, because constraint.kind is not size"
    lower = asked(settings, "constraint", "lower", BALANCE if balance is None else balance)
    why = f"every cluster gets at least {lower:.0%} of an equal share"
    return (
        {"constraint": {"kind": "size", "lower": lower, "dual_schedule": "falling"}},
        f"constraint.lower={lower}: {why}; the dual step size decays to zero, so assignments settle",
    )


def _answer(balance: float | None, facts: Facts, clusters: int, settings: dict[str, Any]) -> Change:
    heads = settings["heads"]
    wanted = settings.get("answer")
    if wanted == "number":
        return {}, "answer=number: then clusters of equal size or merged ones, as the neighbors of images suggest"
    if wanted or "head" in settings:
        return {}, f"answer={wanted or 'head'}: as requested"
    if asked(settings, "hints", "checksum") is not None:
        return {"answer": "head"}, "answer=head: hints hold images in clusters of a head, not in merged ones"
    if balance is not None or (asked(settings, "constraint", "lower") != BALANCE and not facts.on_features):
        return {"answer": "head"}, "answer=head: clusters are held as equal as requested"
    if max(heads) <= clusters and heads.count(clusters) == 1:
        return {"answer": "head"}, "answer=head: there is no other head"
    why = "clusters of equal size or merged ones, as the neighbors of images suggest"
    return {"answer": "auto"}, f"answer=auto: {why}"


def _size(facts: Facts, clusters: int, settings: dict[str, Any]) -> Change:
    if facts.device == "cpu":
        half = facts.side // 2
        side = facts.side if facts.side <= 20 else half if 12 <= half <= 20 else 16
        why = "scaled from {}: the small network learns faster and better from small images"
    else:
        side = max([limit for limit in (32, 64, 96, 128) if limit <= facts.side], default=facts.side)
        why = "scaled from {}, which would take too long"
    why = "original size" if side == facts.side else why.format(facts.side)
    if pretraining := describe(asked(settings, "encoder", "backbone") or ""):
        side = pretraining.size
        why = "what the pretrained network was made for"
    if wanted := asked(settings, "data", "image_size"):
        side = wanted
        why = f"scaled from {facts.side}"
    why += "; non-square images are center-cropped"
    return {"data": {"image_size": side}}, f"data.image_size={side}: {why}"


def _channels(facts: Facts, clusters: int, settings: dict[str, Any]) -> Change:
    channels = asked(settings, "data", "channels", facts.channels)
    why = "gray" if channels == 1 else "color"
    return {"data": {"channels": channels}}, f"data.channels={channels}: images are read as {why}"


def _encoder(facts: Facts, clusters: int, settings: dict[str, Any]) -> Change:
    side = settings["data"]["image_size"]
    backbone = asked(settings, "encoder", "backbone", "small" if facts.device == "cpu" else "resnet18")
    if backbone == "small":
        why = "ResNets need a GPU" if facts.device == "cpu" else "the fastest"
        return {"encoder": {"backbone": "small", "dim": 64}}, f"encoder.backbone=small: {why}"
    if pretraining := describe(backbone):
        mean, std = pretraining.normalization(settings["data"]["channels"])
        known = f"{pretraining.weights} ({pretraining.license}), trained on {pretraining.taught}"
        change = {"encoder": {"backbone": backbone}, "data": {"mean": mean, "std": std}}
        part = "its last stage is" if asked(settings, "encoder", "trainable") == "last" else "all of it is"
        return change, f"encoder.backbone={backbone}: {known}; {part} trained further, at a tenth of the learning rate"
    stem = "cifar" if side <= 40 else "stl" if side <= 112 else "imagenet"
    return {
        "encoder": {"backbone": backbone, "stem": stem}
    }, f"encoder.backbone={backbone}, stem {stem}: for {side} pixels"


def _batch(facts: Facts, clusters: int, settings: dict[str, Any]) -> Change:
    batch = 32 if facts.images < 5_000 else 64 if facts.images < 20_000 else 128
    why = "few images need small batches to take enough steps" if batch < 128 else "as in the paper"
    if wanted := asked(settings, "optim", "batch_size"):
        batch = wanted
        why = "as requested"
    rate = 0.2 * batch / 128
    change: dict[str, Any] = {"batch_size": batch, "lr": rate}
    if describe(settings["encoder"]["backbone"]):
        change["backbone_lr"] = FINE_TUNING * asked(settings, "optim", "lr", rate)
    chosen = f", optim.lr={rate}" if asked(settings, "optim", "lr") is None else ""
    return {"optim": change}, f"optim.batch_size={batch}{chosen}: {why}"


def _centers(facts: Facts, clusters: int, settings: dict[str, Any]) -> Change:
    kind = asked(settings, "centers", "kind")
    rate = asked(settings, "centers", "lr")
    why = "as requested" if kind else "moved by gradient, as in the paper"
    lower = asked(settings, "constraint", "lower")
    needs_gradient = rate is not None or asked(settings, "loss", "name") == "ce"
    if not kind and not needs_gradient and (lower or 0) < GRADIENT_FROM:
        kind = "closed_form"
        allows = "no lower bound prevents" if lower is None else "balance permits"
        why = f"recomputed every epoch, so that no group swallows the others, which {allows}"
    if kind in ("closed_form", "kmeans"):
        return {"centers": {"kind": kind}}, f"centers.kind={kind}: {why}"
    rate = CENTERS_RATE * settings["optim"]["lr"] if rate is None else rate
    return {"centers": {"kind": "sgd", "lr": rate}}, f"centers.kind=sgd, centers.lr={rate:g}: {why}"


def _heads(facts: Facts, clusters: int, settings: dict[str, Any]) -> Change:
    room = max(1, facts.images // (IMAGES_PER_CLUSTER * clusters))
    number = min(MOST_HEADS[facts.device], room)
    heads = settings.get("heads") or [clusters * (position + 1) for position in range(number)]
    why = "the first is the answer, finer ones support it" if len(heads) > 1 else "too few images for finer ones"
    why = "as requested" if settings.get("heads") else why
    return {"heads": heads}, f"heads={heads}: {why}"


def _schedule(facts: Facts, clusters: int, settings: dict[str, Any]) -> Change:
    steps = -(-facts.images // settings["optim"]["batch_size"])
    most = STEPS[facts.device]
    if describe(settings["encoder"]["backbone"]):
        most = min(most, FINE_TUNING_STEPS)
    planned = min(MOST_EPOCHS, max(FEWEST_EPOCHS, round(most / steps)))
    epochs = asked(settings, "optim", "epochs", planned)
    change = {"epochs": epochs, "warmup_epochs": min(10, epochs // 5)}
    return {"optim": change}, f"optim.epochs={epochs}: {epochs * steps:,} steps"


RULES: tuple[Rule, ...] = (
    _size,
    _channels,
    reading,
    _encoder,
    _batch,
    _centers,
    _heads,
    _schedule,
    view_plan.neighbors,
    view_plan.augmentation,
)
