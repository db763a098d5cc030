"""Recipes: a stored snapshot of every one, and the values of the paper and its code written down a second time.

The snapshot is there so that no default changes an experiment silently. After a change that is meant, look at the
difference that this prints, and store it with

    python tests/test_recipes.py
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from secu.settings import flatten, load_config, load_recipe, merge, nest, recipe_names, resolve

SNAPSHOT = Path(__file__).with_name("recipes_snapshot.json")
OLD_SNAPSHOT = Path(__file__).with_name("old_runs") / "recipes_snapshot.json"  # of version 0.1
RENAMED = {"augment.grey_prob": "augment.gray_prob", "optim.mixed_precision": "optim.precision"}
NEW = {
    "method": "secu",
    "head": 0,
    "answer": "head",
    "data.max_pixels": 100_000_000,
    "data.features": None,
    "data.on_demand": None,
    "data.strict": False,
    "encoder.trainable": "all",
    "neighbors.count": 0,
    "neighbors.start": 0.5,
    "neighbors.every": 10,
    "hints.checksum": None,
    "hints.weight": 50,
    "features.components": 256,
    "features.dropout": 0.1,
    "optim.backbone_lr": None,
    "optim.schedule": "cosine",
    "optim.average_from": None,
    "constraint.alpha_over": "all",
    "centers.optimizer": "sgd",
    "augment.crop_from": "square",
}
# Version 0.1 differed from the published experiments on ImageNet.
CORRECTED = {
    "imagenet": {
        "centers.optimizer": "lars",
        "encoder.prediction_dim": 2048,
        "augment.crop_from": "original",
    }
}
CORRECTED["imagenet-entropy"] = CORRECTED["imagenet"] | {"constraint.alpha_over": "seen"}


def resolved() -> dict[str, Any]:
    """Return the settings of every recipe, dotted, so that a difference reads like the override that makes it."""
    return {name: flatten(load_config(name).model_dump(mode="json")) for name in recipe_names()}


def text_of(recipes: dict[str, Any]) -> str:
    """Return one line per setting, short enough to review as a diff."""
    parts = [
        f'  "{name}": {{\n'
        + ",\n".join(f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in settings.items())
        + "\n  }"
        for name, settings in recipes.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def test_no_recipe_changed_silently():
    stored = json.loads(SNAPSHOT.read_text())
    now = resolved()
    assert sorted(now) == sorted(stored)
    changed = [
        f"{name} {key}: stored {stored[name].get(key, 'nothing')}, now {now[name].get(key, 'nothing')}"
        for name in now
        for key in {**stored[name], **now[name]}
        if stored[name].get(key, "nothing") != now[name].get(key, "nothing")
    ]
    assert not changed, "\n".join(changed)


def test_the_snapshot_is_stored_as_this_file_writes_it():
    assert SNAPSHOT.read_text() == text_of(resolved())


@pytest.mark.parametrize("name", json.loads(OLD_SNAPSHOT.read_text()))
def test_the_settings_of_version_0_1_resolve_to_the_same_recipe_but_for_corrections(name):
    settings: dict[str, Any] = {}
    for key, value in (json.loads(OLD_SNAPSHOT.read_text())[name] | CORRECTED.get(name, {})).items():
        settings = merge(settings, nest(key, value))
    assert resolve(settings) == load_config(name)


def test_nothing_but_names_and_corrections_changed_since_version_0_1():
    stored = json.loads(SNAPSHOT.read_text())
    for name, settings in json.loads(OLD_SNAPSHOT.read_text()).items():
        expected = {RENAMED.get(key, key): value for key, value in settings.items()} | NEW | CORRECTED.get(name, {})
        expected["data.source"] = f"dataset:{expected.pop('data.name')}"
        expected["optim.precision"] = {True: "bf16"}[expected["optim.precision"]]
        expected["augment.plain"] = expected["augment.plain"].replace("centre", "center")
        assert stored[name] == expected


def test_all_recipes_are_there():
    names = (
        "cifar10 cifar10-ce cifar10-closed-form cifar10-coke cifar10-entropy cifar10-fast cifar10-neighbors cifar100 "
        "cifar100-20 cifar100-20-entropy cifar100-20-neighbors cifar100-entropy digits imagenet imagenet-entropy stl10 "
        "stl10-entropy stl10-stage2"
    )
    assert recipe_names() == names.split()


def test_a_recipe_states_only_what_differs_from_the_defaults():
    """Naming the data set and its split makes a file clearer, so that is excepted."""
    from secu.config import Config

    default = flatten(Config().model_dump(mode="json"))
    for name in recipe_names():
        for key, value in flatten(load_recipe(name)).items():
            if not key.startswith(("data.", "paper", "augment.affine")):
                assert value != default[key], f"{name}: {key} is the default anyway"


def test_every_recipe_starts_with_its_command():
    folder = Path(__file__).parents[1] / "src" / "secu" / "recipes"
    for name in recipe_names():
        first = (folder / f"{name}.yaml").read_text().splitlines()[0]
        assert first == f"# secu train {name} --out runs/{name}"


# Typed in from the paper and its code, not from the recipes.

CIFAR10_STATISTICS = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
CIFAR100_STATISTICS = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)
IMAGENET_STATISTICS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the paper and its code state for one data set."""

    data: str
    split: str = "train"
    images: int
    statistics: tuple[tuple[float, ...], tuple[float, ...]]
    clusters: int
    heads: int = 10
    epochs: int
    center_lr: float
    temperatures: tuple[float, float] = (0.05, 0.05)
    size: tuple[float, float] = (0.9, 0.1)  # lower bound and dual learning rate
    alpha: float
    crop: float = 0.2
    crop_from: str = "square"
    encoder: tuple[str, str, int, int] = ("resnet18", "cifar", 2, 0)
    prediction_dim: int = 512
    optimizer: tuple[str, float, float, int] = ("sgd", 0.2, 1e-4, 128)


FACTS = {
    "cifar10": Facts(
        data="cifar10",
        images=50_000,
        statistics=CIFAR10_STATISTICS,
        clusters=10,
        epochs=400,
        center_lr=1.2,
        alpha=6000,
        crop=0.3,
    ),
    "cifar100-20": Facts(
        data="cifar100-20",
        images=50_000,
        statistics=CIFAR100_STATISTICS,
        clusters=20,
        epochs=800,
        center_lr=0.8,
        alpha=6000,
    ),
    "cifar100": Facts(
        data="cifar100",
        images=50_000,
        statistics=CIFAR100_STATISTICS,
        clusters=100,
        epochs=800,
        center_lr=0.01,
        alpha=6000,
    ),
    "stl10": Facts(
        data="stl10",
        split="train+unlabeled",
        images=105_000,
        statistics=IMAGENET_STATISTICS,
        clusters=10,
        epochs=800,
        center_lr=0.8,
        temperatures=(0.05, 1),
        alpha=26_460,
        encoder=("resnet18", "stl", 2, 0),
    ),
    "stl10-stage2": Facts(
        data="stl10",
        images=5_000,
        statistics=IMAGENET_STATISTICS,
        clusters=10,
        heads=1,
        epochs=100,
        center_lr=0.8,
        temperatures=(0.05, 1),
        alpha=600,
        encoder=("resnet18", "stl", 2, 0),
        optimizer=("sgd", 0.002, 1e-4, 128),
    ),
    "imagenet": Facts(
        data="imagenet",
        images=1_281_167,
        statistics=IMAGENET_STATISTICS,
        clusters=1000,
        epochs=1000,
        center_lr=4.2,
        size=(0.4, 20),
        alpha=90_000,
        crop=0.08,
        crop_from="original",
        encoder=("resnet50", "imagenet", 3, 2),
        prediction_dim=2048,
        optimizer=("lars", 1.6, 1e-6, 1024),
    ),
}
SIZE = ["cifar10", "cifar100-20", "cifar100", "stl10", "stl10-stage2", "imagenet"]
ENTROPY = ["cifar10", "cifar100-20", "cifar100", "stl10", "imagenet"]


@pytest.mark.parametrize("name", [*SIZE, *(f"{name}-entropy" for name in ENTROPY)])
def test_recipes_have_the_values_of_the_facts(name):
    facts = FACTS[name.removesuffix("-entropy")]
    config = load_config(name)
    assert config.heads == tuple(facts.clusters * c for c in range(1, facts.heads + 1))
    assert config.data.source == f"dataset:{facts.data}"
    assert (config.data.train, config.data.test) == (facts.split, "test")
    assert (config.data.mean, config.data.std) == facts.statistics
    assert (config.optim.initial_epochs, config.optim.epochs, config.optim.warmup_epochs) == (1, facts.epochs, 10)
    assert (config.loss.temperature, config.loss.center_temperature) == facts.temperatures
    assert (config.augment.crop_min, config.augment.crop_from) == (facts.crop, facts.crop_from)
    encoder = config.encoder
    optim = config.optim
    layers = (encoder.projection_layers, encoder.prediction_layers)
    assert (encoder.backbone, encoder.stem, *layers, encoder.dim) == (*facts.encoder, 128)
    assert encoder.prediction_dim == facts.prediction_dim
    assert (optim.name, optim.lr, optim.weight_decay, optim.batch_size) == facts.optimizer
    assert config.centers.optimizer == optim.name  # one optimizer moves both
    assert optim.momentum == 0.9
    assert (config.loss.name, config.centers.kind, config.constraint.score) == ("secu", "sgd", "cosine")


@pytest.mark.parametrize("name", SIZE)
def test_size_recipes_have_the_bounds_of_the_facts(name):
    config = load_config(name)
    assert config.constraint.kind == "size"
    assert (config.constraint.lower, config.constraint.dual_lr) == FACTS[name].size
    assert config.constraint.upper is None
    assert (config.centers.lr, config.centers.schedule) == (FACTS[name].center_lr, "constant")


@pytest.mark.parametrize("name", ENTROPY)
def test_entropy_recipes_have_the_alpha_of_the_facts(name):
    import torch

    from secu.cluster.constraints import EntropyConstraint, build_constraint

    config = load_config(f"{name}-entropy")
    facts = FACTS[name]
    constraint = build_constraint(config.constraint, torch.tensor([2]), facts.images)
    assert isinstance(constraint, EntropyConstraint)
    assert constraint.alpha == facts.alpha
    rising = name == "imagenet"
    assert config.centers.schedule == ("rising" if rising else "constant")
    assert config.centers.lr == (5.6 if rising else facts.center_lr)


def test_entropy_in_the_second_stage_of_stl10_has_the_alpha_of_the_facts():
    import torch

    from secu.cluster.constraints import build_constraint

    config = load_config("stl10-stage2", ["constraint.kind=entropy"])
    assert build_constraint(config.constraint, torch.tensor([10]), 5_000).alpha == FACTS["stl10-stage2"].alpha


def test_an_entropy_recipe_differs_from_its_size_recipe_in_the_constraint_alone():
    for name in ENTROPY:
        ours, theirs = (flatten(load_config(n).model_dump()) for n in (name, f"{name}-entropy"))
        different = {k for k in ours if not k.startswith(("desc", "paper")) and ours[k] != theirs[k]}
        allowed = {"constraint.kind", "constraint.alpha"}
        if name == "imagenet":
            allowed |= {"constraint.lower", "constraint.dual_lr", "centers.lr", "centers.schedule"}
            allowed |= {"constraint.alpha_over"}
        assert {"constraint.kind"} <= different <= allowed


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("cifar10-ce", {"loss.name": "ce"}),
        ("cifar10-closed-form", {"centers.kind": "closed_form"}),
        ("cifar10-coke", {"centers.kind": "kmeans"}),
    ],
)
def test_an_ablation_is_cifar10_with_one_thing_changed(name, changed):
    base, config = (flatten(load_config(n).model_dump()) for n in ("cifar10", name))
    assert {k: v for k, v in config.items() if not k.startswith(("desc", "paper")) and v != base[k]} == changed


def test_what_the_paper_reaches_by_self_labeling_is_better_than_without():
    """One row for each data set, under the name of the run that it starts from."""
    found = {name: load_config(name) for name in recipe_names() if load_config(name).paper_selflabel}
    assert set(found) == {"cifar10", "cifar100-20", "cifar100", "stl10-stage2", "imagenet"}
    for config in found.values():
        assert all(b > a for a, b in zip(config.paper, config.paper_selflabel, strict=True) if a[0] == b[0])
    assert found["cifar10"].paper_selflabel.model_dump() == {"acc": 93.0, "nmi": 86.1, "ari": 85.7}


def test_the_second_stage_starts_from_the_first_and_shares_its_network():
    first = load_config("stl10")
    second = load_config("stl10-stage2")
    assert second.init_from == "runs/stl10"
    assert second.encoder == first.encoder
    assert second.heads == first.heads[:1]


@pytest.mark.parametrize(
    ("name", "scores"),
    [
        ("cifar10", (88.1, 79.3, 77.5)),
        ("cifar10-entropy", (88.0, 79.2, 77.2)),
        ("cifar10-closed-form", (87.4, 78.5, 76.4)),
        ("cifar10-ce", (51.6, 50.2, 35.0)),
        ("cifar10-coke", (85.7, 76.6, 73.2)),
        ("cifar100-20", (50.0, 50.7, 35.0)),
        ("cifar100-20-entropy", (49.9, 50.6, 34.1)),
        ("cifar100", (46.4, 61.7, 32.3)),
        ("cifar100-entropy", (45.3, 60.7, 31.5)),
        ("stl10", (80.2, 69.4, 63.9)),
        ("stl10-entropy", (79.5, 68.7, 63.0)),
        ("stl10-stage2", (80.2, 69.4, 63.9)),
        ("imagenet", (51.4, 78.0, 39.7)),
        ("imagenet-entropy", (51.1, 77.5, 39.1)),
    ],
)
def test_a_recipe_quotes_the_tables_of_the_paper(name, scores):
    paper = load_config(name).paper
    assert paper is not None
    assert (paper.acc, paper.nmi, paper.ari) == scores


def test_digits_are_not_in_the_paper():
    assert load_config("digits").paper is None


@pytest.mark.parametrize(
    ("projection", "prediction", "millions"),
    [(0, 0, 11.45), (1, 0, 11.30), (2, 0, 11.57), (3, 0, 11.83), (3, 2, 11.97)],
)
def test_models_have_the_sizes_of_table_1(projection, prediction, millions):
    from secu.nets.encoder import Encoder

    layers = [f"encoder.projection_layers={projection}", f"encoder.prediction_layers={prediction}"]
    config = load_config("cifar10", layers)
    encoder = Encoder(config.encoder, channels=3)
    weights = sum(weight.numel() for weight in encoder.parameters())
    centers = sum(config.heads) * encoder.dim  # as the paper counts them: without our padding
    assert round((weights + centers) / 1e6, 2) == millions


if __name__ == "__main__":
    SNAPSHOT.write_text(text_of(resolved()))
    print(f"stored {SNAPSHOT}")
