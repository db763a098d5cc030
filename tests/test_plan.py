"""From four facts to a complete config: each rule with its reason, its constants, and what overrides change."""

import itertools

import numpy as np
import pytest
import torch

from secu.apps.fit import SCRATCH, FitRequest, prepare
from secu.apps.plan import Facts, Plan, estimate, make_plan
from secu.base.errors import UserError
from secu.config import Config, NeighborsConfig
from secu.data import ArraySource

PHOTOS = Facts(images=10_000, side=500, channels=3, device="cpu")


def plan(images=1797, side=8, channels=1, device="cpu", clusters=10, balance=0.9, **overrides) -> Plan:
    return make_plan(Facts(images, side, channels, device), clusters, balance, overrides)


def reason(found: Plan, start: str) -> str:
    """Return the one reason that starts like this."""
    (text,) = [text for text in found.reasons if text.startswith(start)]
    return text


# The rules


@pytest.mark.parametrize(
    ("device", "side", "expected"),
    [
        ("cpu", 1, 1),
        ("cpu", 8, 8),
        ("cpu", 16, 16),
        ("cpu", 20, 20),
        ("cpu", 21, 16),
        ("cpu", 23, 16),
        ("cpu", 24, 12),
        ("cpu", 28, 14),
        ("cpu", 31, 15),
        ("cpu", 32, 16),
        ("cpu", 41, 20),
        ("cpu", 42, 16),
        ("cpu", 4000, 16),
        ("cuda", 8, 8),
        ("cuda", 31, 31),
        ("cuda", 32, 32),
        ("cuda", 63, 32),
        ("cuda", 64, 64),
        ("cuda", 95, 64),
        ("cuda", 96, 96),
        ("cuda", 127, 96),
        ("cuda", 128, 128),
        ("cuda", 4000, 128),
        ("mps", 500, 128),
    ],
)
def test_images_keep_their_size_or_shrink_to_one_that_the_device_can_train_on(device, side, expected):
    found = plan(side=side, device=device)
    assert found.config.data.image_size == expected
    line = reason(found, f"data.image_size={expected}: ")
    assert ("original size" in line) is (side == expected)
    assert (f"scaled from {side}" in line) is (side != expected)


@pytest.mark.parametrize(
    ("device", "side", "backbone", "stem"),
    [
        ("cpu", 32, "small", "cifar"),
        ("cuda", 32, "resnet18", "cifar"),
        ("cuda", 64, "resnet18", "stl"),
        ("cuda", 96, "resnet18", "stl"),
        ("cuda", 300, "resnet18", "imagenet"),
        ("mps", 8, "resnet18", "cifar"),
    ],
)
def test_the_encoder_follows_the_device_and_the_size(device, side, backbone, stem):
    found = plan(side=side, device=device)
    assert (found.config.encoder.backbone, found.config.encoder.stem) == (backbone, stem)
    assert reason(found, f"encoder.backbone={backbone}")


@pytest.mark.parametrize(
    ("size", "stem", "crop"),
    [
        (1, "cifar", 0.3),
        (40, "cifar", 0.3),
        (41, "stl", 0.2),
        (112, "stl", 0.2),
        (113, "imagenet", 0.2),
    ],
)
@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_stem_and_crop_change_at_40_and_112_pixels(device, size, stem, crop):
    found = plan(side=500, channels=3, device=device, data={"image_size": size})
    assert (found.config.encoder.stem, found.config.augment.crop_min) == (stem, crop)
    assert reason(found, f"encoder.backbone=resnet18, stem {stem}: for {size} pixels")
    assert f"crops from {crop:.0%}" in reason(found, "augment: ")


def test_the_small_network_has_64_dimensions_and_a_resnet_the_default():
    assert plan().config.encoder.dim == 64
    assert plan(device="cuda").config.encoder.dim == 128
    assert "need a GPU" in reason(plan(), "encoder.backbone=small")
    assert reason(plan(device="cuda", encoder={"backbone": "small"}), "encoder.backbone=small: the fastest")


@pytest.mark.parametrize(("images", "batch"), [(20, 32), (4_999, 32), (5_000, 64), (19_999, 64), (20_000, 128)])
def test_more_images_mean_larger_batches_and_the_learning_rate_follows(images, batch):
    found = plan(images=images)
    assert found.config.optim.batch_size == batch
    assert found.config.optim.lr == pytest.approx(0.2 * batch / 128)
    assert reason(found, f"optim.batch_size={batch}, optim.lr={found.config.optim.lr}: ")


@pytest.mark.parametrize(
    ("images", "clusters", "device", "heads"),
    [
        (1797, 10, "cpu", 5),
        (1797, 10, "cuda", 8),
        (100_000, 10, "cpu", 5),
        (100_000, 10, "cuda", 10),
        (100_000, 10, "mps", 10),
        (399, 10, "cpu", 1),
        (400, 10, "cpu", 2),
        (20, 20, "cuda", 1),
    ],
)
def test_finer_heads_come_where_there_are_images_for_them(images, clusters, device, heads):
    found = plan(images=images, clusters=clusters, device=device)
    assert found.config.heads == tuple(clusters * number for number in range(1, heads + 1))
    line = reason(found, f"heads={list(found.config.heads)}: ")
    assert ("too few images for finer ones" in line) is (heads == 1)
    assert ("the first is the answer, finer ones support it" in line) is (heads > 1)


@pytest.mark.parametrize(
    ("device", "images", "epochs"),
    [
        ("cpu", 20, 400),
        ("cpu", 736, 391),
        ("cpu", 1_536, 188),  # 9,000 steps, 187.5 epochs: one step fewer would give 187 epochs
        ("cpu", 1_797, 158),
        ("cpu", 2_560, 112),  # 112.5 epochs: one step more would give 113
        ("cpu", 4_999, 57),
        ("cpu", 15_000, 38),
        ("cpu", 55_000, 21),
        ("cpu", 100_000, 20),
        ("cpu", 2_000_000, 20),
        ("mps", 1_797, 400),
        ("mps", 3_072, 312),  # 30,000 steps, 312.5 epochs
        ("mps", 10_240, 188),  # 187.5 epochs
        ("cuda", 5_000, 400),
        ("cuda", 50_000, 400),  # the 156,400 steps that the paper takes on CIFAR-10
        ("cuda", 69_632, 288),  # 287.5 epochs
        ("cuda", 94_208, 212),  # 212.5 epochs
        ("cuda", 200_000, 100),
        ("cuda", 2_000_000, 20),
    ],
)
def test_few_images_are_seen_more_often_within_limits(device, images, epochs):
    found = plan(images=images, device=device)
    optim = found.config.optim
    assert optim.epochs == epochs
    steps = -(-images // optim.batch_size) * epochs
    assert reason(found, f"optim.epochs={epochs}: {steps:,} steps")


@pytest.mark.parametrize(
    ("epochs", "warmup"), [(0, 0), (4, 0), (5, 1), (9, 1), (10, 2), (49, 9), (50, 10), (54, 10), (55, 10), (400, 10)]
)
def test_a_fifth_of_the_epochs_but_at_most_ten_are_a_warm_up(epochs, warmup):
    assert plan(optim={"epochs": epochs}).config.optim.warmup_epochs == warmup


def test_the_warm_up_of_the_shortest_plan():
    assert plan(images=2_000_000).config.optim.warmup_epochs == 4


def test_gray_images_may_be_writing_and_are_not_mirrored():
    gray = plan(channels=1).config.augment
    color = plan(channels=3, side=32).config.augment
    assert (gray.flip_prob, gray.crop_min, gray.gray_prob) == (0, 1, 0)
    assert (gray.blur_prob, gray.solarize_prob) == ((0, 0), (0, 0))
    assert (gray.jitter_prob, gray.brightness, gray.contrast) == (1, 0.3, 0)
    assert gray.affine is not None
    assert gray.affine.model_dump() == {"scale": 0.3, "aspect": 0.3, "rotation": 0.375, "shear": 0.3, "shift": 0.3}
    assert color.affine is None
    assert color.flip_prob == 0.5
    assert "no flip" in reason(plan(channels=1), "augment: ")
    assert "color, flip, as in the paper" in reason(plan(channels=3), "augment: ")


@pytest.mark.parametrize(
    ("side", "device", "radius"),
    [(32, "cuda", 2), (96, "cuda", 2), (24, "cuda", 1.5), (32, "cpu", 1), (11, "cpu", 0.6875)],
)
def test_small_images_are_blurred_less(side, device, radius):
    """On a CPU an image of 32 pixels is scaled to 16."""
    found = plan(channels=3, side=side, device=device)
    assert found.config.augment.blur_radius == (round(radius / 20, 4), radius)
    assert f"blur up to {radius:g} pixels" in reason(found, "augment")
    assert ("smaller than 32" in reason(found, "augment")) == (radius < 2)


@pytest.mark.parametrize(
    ("images", "clusters", "device", "count"),
    [
        (50_000, 10, "cuda", 10),
        (20_000, 500, "cuda", 10),
        (20_000, 700, "cuda", 7),
        (20_000, 5_000, "cuda", 5),
        (19_999, 10, "cuda", 0),
        (50_000, 10, "cpu", 0),
        (50_000, 10, "mps", 0),
    ],
)
def test_with_many_images_on_a_gpu_the_second_view_is_of_a_neighbor_of_the_same_group(images, clusters, device, count):
    found = plan(images=images, clusters=clusters, device=device)
    assert found.config.neighbors == NeighborsConfig(count=count, start=0.5, every=10)
    assert ("in the run's embeddings" in reason(found, f"neighbors.count={count}: ")) == (count > 0)


@pytest.mark.parametrize(
    "overrides",
    [
        {"data": {"on_demand": True}},
        {"augment": {"crop_from": "original"}},
        {"neighbors": {"count": 0}},
        {"encoder": {"backbone": "lite0", "trainable": "all"}},
    ],
)
def test_neighbors_are_not_used_where_they_would_have_to_be_decoded_too_or_are_not_wanted(overrides):
    found = plan(images=50_000, device="cuda", **overrides)
    assert found.config.neighbors.count == 0
    assert "of the image itself" in reason(found, "neighbors.count=0: both")


@pytest.mark.parametrize(("asked", "count"), [(None, 0), (False, 10)])
def test_neighbors_are_not_used_either_if_the_source_itself_prefers_to_decode_images_again(asked, count):
    facts = Facts(50_000, 32, 3, "cuda", on_demand=True)
    data = {} if asked is None else {"data": {"on_demand": asked}}
    assert make_plan(facts, 10, None, data).config.neighbors.count == count


@pytest.mark.parametrize(("device", "steps"), [("cpu", 5_000), ("cuda", 5_000)])
def test_a_pretrained_network_is_trained_for_fewer_steps(device, steps):
    encoder = {"backbone": "lite0", "trainable": "all"}
    found = plan(5_000, 32, 3, device, encoder=encoder).config.optim
    assert found.epochs == round(steps / -(-5_000 // found.batch_size))
    assert plan(5_000, 32, 3, device).config.optim.epochs > found.epochs


@pytest.mark.parametrize("balance", [0, 0.35, 1])
def test_balance_is_the_smallest_share(balance):
    found = plan(balance=balance)
    assert (found.config.constraint.kind, found.config.constraint.lower) == ("size", balance)
    assert f"{balance:.0%} of an equal share" in reason(found, f"constraint.lower={balance}: ")


def test_every_plan_is_possible():
    sides = (1, 2, 7, 15, 16, 17, 28, 32, 33, 64, 100, 128, 129, 500, 4_000)
    counts = (20, 100, 1_797, 60_000, 2_000_000)
    for images, side, channels, device in itertools.product(counts, sides, (1, 3), ("cpu", "cuda", "mps")):
        for clusters in (2, 10, 20):
            found = plan(images, side, channels, device, clusters)
            assert isinstance(found.config, Config)
            assert found.config.clusters == found.config.heads[0] == clusters
            assert found.config.data.image_size <= side
            assert found.config.data.channels == channels
            assert found.seconds > 0
            assert len(found.reasons) == 12
            assert all(": " in text and "\n" not in text for text in found.reasons)


# What the user asks for


@pytest.mark.parametrize(
    ("overrides", "value"),
    [
        ({"data": {"image_size": 12}}, 12),
        ({"encoder": {"backbone": "resnet34"}}, "resnet34"),
        ({"encoder": {"dim": 17}}, 17),
        ({"optim": {"batch_size": 48}}, 48),
        ({"optim": {"lr": 0.017}}, 0.017),
        ({"optim": {"epochs": 3}}, 3),
        ({"optim": {"epochs": 0}}, 0),
        ({"heads": [10, 99]}, (10, 99)),
        ({"augment": {"flip_prob": 0.25}}, 0.25),
        ({"augment": {"affine": {"shear": 0.111}}}, 0.111),
        ({"constraint": {"lower": 0.123}}, 0.123),
        ({"centers": {"kind": "kmeans"}}, "kmeans"),
        ({"seed": 7}, 7),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_asked_for_wins(device, overrides, value):
    found = plan(device=device, **overrides)
    setting = found.config
    asked = overrides
    while isinstance(asked, dict):
        ((name, asked),) = asked.items()
        setting = getattr(setting, name)
    assert setting == value


def test_the_plan_reports_what_was_asked_for():
    found = plan(optim={"epochs": 3, "batch_size": 50}, data={"image_size": 5}, augment={"flip_prob": 0.5}, seed=1)
    for line in ("optim.epochs=3", "optim.batch_size=50", "data.image_size=5", "augment.flip_prob=0.5"):
        assert f"{line}: as requested" in found.reasons
    assert reason(found, "optim.epochs=3: 108 steps")
    assert not any("400" in text for text in found.reasons)
    assert not any(text.startswith("seed") for text in found.reasons)


def test_later_rules_see_what_was_asked_for():
    assert plan(6_000, 500, 3, "cuda", data={"image_size": 32}).config.encoder.stem == "cifar"
    assert plan(6_000, 500, 3, "cuda", data={"image_size": 96}).config.encoder.stem == "stl"
    assert plan(6_000, 500, 3, "cuda", data={"image_size": 32}).config.augment.crop_min == 0.3
    usual = plan(6_000, 32, 3).config.optim
    larger = plan(6_000, 32, 3, optim={"batch_size": 256}).config.optim
    assert larger.epochs > usual.epochs
    assert larger.lr == pytest.approx(0.4)
    asked = {"encoder": {"backbone": "resnet18"}, "data": {"image_size": 64}}
    assert plan(side=64, device="cpu", **asked).config.encoder.stem == "stl"
    gray = plan(6_000, 32, 3, data={"channels": 1}).config
    assert (gray.data.channels, gray.augment.flip_prob) == (1, 0)


def test_the_plan_reports_whether_images_are_read_as_gray_or_color():
    assert "data.channels=1: images are read as gray" in plan(channels=1).reasons
    assert "data.channels=3: images are read as color" in plan(channels=3).reasons


def test_the_overrides_stay_as_they_were():
    overrides = {"optim": {"epochs": 3}, "heads": (10, 20)}
    make_plan(PHOTOS, 10, 0.9, overrides)
    assert overrides == {"optim": {"epochs": 3}, "heads": (10, 20)}


# Mistakes


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"clusters": 1}, "clusters: 1 must be at least 2"),
        ({"clusters": 0}, "clusters: 0 must be at least 2"),
        ({"clusters": -3}, "clusters: -3 must be at least 2"),
        ({"clusters": 20, "images": 12}, "clusters: 20 clusters need at least 20 images, got 12"),
        (
            {"images": 300, "neighbors": {"count": 300}},
            "neighbors.count: 300 neighbors need more than 300 images, got 300",
        ),
        ({"balance": -0.01}, r"balance: -0.01 must be from 0 \(groups of any size\) to 1"),
        ({"balance": 1.01}, "balance: 1.01 must be"),
        ({"balance": float("nan")}, "balance: nan must be"),
        ({"optim": {"epoch": 1}}, "optim.epoch: unknown setting; did you mean epochs"),
        ({"optim": {"batch_size": 0}}, "optim.batch_size: 0: .*greater than or equal to 2"),
        ({"optim": {"batch_size": "many"}}, "optim.batch_size: 'many': .*integer"),
        ({"optim": 3}, "optim: 3: input should be optim.SETTING=VALUE"),
        ({"data": {"image_size": None}}, "data.image_size: must be a number of pixels, got null"),
        ({"data": {"channels": None}}, "data.channels: must be 1 .gray. or 3 .color., got null"),
        ({"data": {"channels": 2}}, "data.channels: 2: input should be 1 or 3"),
        ({"data": {"image_size": "large"}}, "data.image_size: 'large': .*integer"),
        ({"data": {"image_size": 0}}, "data.image_size: 0: .*greater"),
        ({"heads": [1]}, "heads"),
        ({"heads": 3}, r"heads: 3: input should be a list in \[brackets\]"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_mistake_is_reported(device, asked, message):
    with pytest.raises(UserError, match=message):
        plan(device=device, **asked)


def test_as_many_clusters_as_images_are_possible():
    assert plan(images=12, clusters=12).config.heads == (12,)


# Time


def test_more_images_and_larger_ones_take_longer():
    config = plan(images=1000).config
    times = [estimate(config, Facts(images, 8, 1, "cpu")) for images in (100, 1_000, 10_000)]
    assert times == sorted(times)
    assert times[2] == pytest.approx(100 * times[0])
    large = [plan(images=1000, side=500, channels=3, data={"image_size": size}).seconds for size in (16, 32, 64, 256)]
    assert large == sorted(large)


def seconds(images: int, side: int, device: str, backbone: str, **overrides) -> float:
    """Return the estimate for nine epochs and the initial one, of images that keep their size."""
    asked = {"encoder": {"backbone": backbone}, "optim": {"epochs": 9}, "data": {"image_size": side}}
    return plan(images, side, 3, device, **asked, **overrides).seconds


@pytest.mark.parametrize(
    ("device", "backbone", "speed"),
    [
        ("cpu", "small", 300),
        ("cpu", "resnet18", 14),
        ("cpu", "resnet50", 14),
        ("mps", "resnet18", 800),
        ("mps", "small", 800),
        ("cuda", "resnet18", 28_000),
        ("cuda", "resnet34", 28_000),
    ],
)
def test_each_device_trains_so_many_images_a_second(device, backbone, speed):
    assert seconds(50_000, 32, device, backbone) == pytest.approx(10 * 50_000 / speed)


@pytest.mark.parametrize(
    ("side", "pixels"), [(1, 0.08), (8, 0.08), (9, 0.08), (10, (10 / 32) ** 2), (16, 0.25), (32, 1), (40, 1.5625)]
)
def test_the_time_falls_with_the_number_of_pixels_down_to_a_floor(side, pixels):
    """Below 0.08 of 32 x 32 pixels, what remains is the work per image."""
    assert seconds(1_000, side, "cpu", "small") == pytest.approx(10 * 1_000 * pixels / 300)


@pytest.mark.parametrize(("side", "pixels"), [(40, 1.5625), (64, 1), (96, 2.25), (128, 1), (224, 3.0625)])
def test_a_stem_that_shrinks_the_image_saves_time(side, pixels):
    assert seconds(28_000, side, "cuda", "resnet18") == pytest.approx(10 * pixels)


def test_an_unknown_device_is_taken_for_a_slow_one():
    config = plan(1_000, 32, 3, "cuda", optim={"epochs": 9}).config
    assert estimate(config, Facts(1_400, 32, 3, "another")) == pytest.approx(10 * 1_400 / 14)


def test_views_smaller_than_the_image_save_time():
    whole = seconds(1_000, 32, "cpu", "small")
    assert seconds(1_000, 32, "cpu", "small", augment={"size": 16}) == pytest.approx(whole / 4)


@pytest.mark.parametrize(
    ("facts", "overrides", "hopeless"),
    [
        (Facts(1_797, 8, 1, "cpu"), {}, False),
        (Facts(50_000, 32, 3, "cuda"), {}, False),
        (PHOTOS, {}, False),
        (PHOTOS, {"encoder": {"backbone": "resnet18"}, "data": {"image_size": 224}}, True),
        (Facts(5_000_000, 500, 3, "cpu"), {}, True),
    ],
)
def test_a_plan_nobody_would_wait_for_is_marked(facts, overrides, hopeless):
    assert make_plan(facts, 10, 0.9, overrides).hopeless is hopeless


@pytest.mark.parametrize(("hours", "hopeless"), [(12, False), (12.001, True)])
def test_nobody_waits_longer_than_12_hours(hours, hopeless):
    assert Plan(Config(), (), hours * 3600).hopeless is hopeless


# Centers and reasons


def test_centers_are_the_papers_unless_groups_may_differ_or_another_kind_is_asked_for():
    facts = Facts(1_000, 8, 1, "cpu")
    found = make_plan(facts, 10, 0.9, {})
    assert (found.config.centers.kind, found.config.centers.lr) == ("sgd", pytest.approx(4 * 0.05))
    assert make_plan(facts, 10, 0.9, {"optim": {"lr": 0.01}}).config.centers.lr == pytest.approx(0.04)
    assert make_plan(facts, 10, 0.9, {"centers": {"kind": "sgd"}}).config == found.config
    rate = make_plan(facts, 10, 0.9, {"centers": {"lr": 0.3}})
    assert rate.config.centers.lr == 0.3
    assert "centers.kind=sgd, centers.lr=0.3: moved by gradient, as in the paper" in rate.reasons
    assert found.config.constraint.dual_schedule == "falling"
    for loose in ({}, {"constraint": {"kind": "entropy"}}):
        assert make_plan(facts, 10, 0.5, loose).config.centers.kind == "closed_form"
    assert make_plan(facts, 10, 0.7, {}).config.centers.kind == "sgd"
    permitted = make_plan(facts, 10, 0.699, {})
    assert permitted.config.centers.kind == "closed_form"
    assert "which balance permits" in reason(permitted, "centers.kind=closed_form: recomputed every epoch")
    unbounded = make_plan(facts, 10, 0.9, {"constraint": {"kind": "none"}})
    assert "which no lower bound prevents" in reason(unbounded, "centers.kind=closed_form: recomputed every epoch")
    assert reason(unbounded, "balance: not used, because constraint.kind is not size")
    asked = make_plan(facts, 10, 0.9, {"centers": {"kind": "closed_form"}})
    assert asked.config.centers.kind == "closed_form"
    assert "centers.kind=closed_form: as requested" in asked.reasons


def test_reasons_are_those_of_what_is_done():
    assert "few images" in reason(plan(1_000), "optim.batch_size")
    assert "as in the paper" in reason(plan(60_000), "optim.batch_size=128")
    asked = plan(heads=[10], optim={"batch_size": 40}, constraint={"lower": 0.8})
    assert "heads=[10]: as requested" in asked.reasons
    assert any(text.startswith("optim.batch_size=40, optim.lr=0.0625: as requested") for text in asked.reasons)
    assert any(text.startswith("constraint.lower=0.8: every cluster gets at least 80%") for text in asked.reasons)
    assert not any("90%" in text for text in asked.reasons)


@pytest.mark.parametrize("asked", [{"centers": {"lr": 0.3}}, {"loss": {"name": "ce"}}])
def test_what_needs_gradients_gets_them_at_any_balance(asked):
    assert plan(balance=0.5).config.centers.kind == "closed_form"
    assert plan(balance=0.5, **asked).config.centers.kind == "sgd"


@pytest.mark.parametrize(("streamed", "count"), [(True, 0), (False, 5)])
def test_a_fit_plans_for_a_source_that_prefers_to_decode_images_again(monkeypatch, streamed, count):
    monkeypatch.setattr("secu.apps.fit.choose_device", torch.device)
    monkeypatch.setattr("secu.apps.view_plan.MANY_IMAGES", 30)
    images = np.random.default_rng(0).integers(0, 256, (30, 8, 8), dtype=np.uint8)
    source = ArraySource("X", images).replaced(on_demand=streamed)
    prepared = prepare(FitRequest(source, 3, device="cuda", encoder=SCRATCH))
    assert prepared.plan.config.neighbors.count == count
