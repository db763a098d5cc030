"""From four facts to a whole config: each rule, what it says for itself, and what the user's word changes."""

import itertools

import pytest

from secu.config import Config
from secu.errors import UserError
from secu.plan import FEWEST_EPOCHS, HOPELESS_HOURS, MOST_EPOCHS, Facts, Plan, estimate, make_plan

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
        *[("cpu", 1, 1), ("cpu", 8, 8), ("cpu", 16, 16), ("cpu", 20, 20), ("cpu", 21, 16), ("cpu", 28, 14)],
        *[("cpu", 31, 15), ("cpu", 32, 16), ("cpu", 41, 20), ("cpu", 42, 16), ("cpu", 4000, 16)],
        *[("cuda", 8, 8), ("cuda", 32, 32), ("cuda", 50, 32), ("cuda", 64, 64)],
        *[("cuda", 96, 96), ("cuda", 127, 96), ("cuda", 4000, 128), ("mps", 500, 128)],
    ],
)
def test_images_keep_their_size_or_shrink_to_one_that_the_device_can_train_on(device, side, expected):
    found = plan(side=side, device=device)
    assert found.config.data.image_size == expected
    line = reason(found, f"data.image_size={expected}: ")
    assert ("as they are" in line) is (side == expected)
    assert (f"scaled from {side}" in line) is (side != expected)


@pytest.mark.parametrize(
    ("device", "side", "backbone", "stem"),
    [
        *[("cpu", 32, "small", "cifar"), ("cuda", 32, "resnet18", "cifar"), ("cuda", 64, "resnet18", "stl")],
        *[("cuda", 96, "resnet18", "stl"), ("cuda", 300, "resnet18", "imagenet"), ("mps", 8, "resnet18", "cifar")],
    ],
)
def test_the_encoder_follows_the_device_and_the_size(device, side, backbone, stem):
    found = plan(side=side, device=device)
    assert (found.config.encoder.backbone, found.config.encoder.stem) == (backbone, stem)
    assert reason(found, f"encoder.backbone={backbone}")


@pytest.mark.parametrize(("images", "batch"), [(20, 32), (4_999, 32), (5_000, 64), (19_999, 64), (20_000, 128)])
def test_more_images_mean_larger_batches_and_the_learning_rate_follows(images, batch):
    found = plan(images=images)
    assert found.config.optim.batch_size == batch
    assert found.config.optim.lr == pytest.approx(0.2 * batch / 128)
    assert reason(found, f"optim.batch_size={batch}, optim.lr={found.config.optim.lr}: ")


@pytest.mark.parametrize(
    ("images", "clusters", "device", "heads"),
    [
        *[(1797, 10, "cpu", 5), (1797, 10, "cuda", 8), (100_000, 10, "cpu", 5), (100_000, 10, "cuda", 10)],
        *[(399, 10, "cpu", 1), (400, 10, "cpu", 2), (20, 20, "cuda", 1), (100_000, 10, "mps", 10)],
    ],
)
def test_finer_heads_come_where_there_are_images_for_them(images, clusters, device, heads):
    found = plan(images=images, clusters=clusters, device=device)
    assert found.config.heads == tuple(clusters * number for number in range(1, heads + 1))
    assert reason(found, f"heads={list(found.config.heads)}: ")


def test_few_images_are_seen_more_often_within_limits():
    epochs = [plan(images=images).config.optim.epochs for images in (20, 500, 1_797, 4_000, 15_000, 100_000, 2_000_000)]
    assert epochs == sorted(epochs, reverse=True)
    assert (epochs[0], epochs[-1]) == (MOST_EPOCHS, FEWEST_EPOCHS)
    for images in (20, 1_797, 2_000_000):
        optim = plan(images=images).config.optim
        steps = -(-images // optim.batch_size) * optim.epochs
        assert reason(plan(images=images), f"optim.epochs={optim.epochs}: {steps:,} steps")
        assert 0 < optim.warmup_epochs <= 10
        assert optim.warmup_epochs < optim.epochs


def test_grey_images_may_be_writing_and_are_not_mirrored():
    grey, colour = plan(channels=1).config.augment, plan(channels=3, side=32).config.augment
    assert (grey.flip_prob, grey.crop_min, grey.grey_prob, grey.solarize_prob) == (0, 1, 0, (0, 0))
    assert grey.affine is not None
    assert colour.affine is None
    assert colour.flip_prob == 0.5
    assert "no mirror" in reason(plan(channels=1), "augment: ")
    assert "flip" in reason(plan(channels=3), "augment: ")


def test_large_pictures_are_cut_more_boldly():
    assert plan(channels=3, side=32, device="cuda").config.augment.crop_min == 0.3
    assert plan(channels=3, side=96, device="cuda").config.augment.crop_min == 0.2


@pytest.mark.parametrize(
    ("side", "device", "radius"), [(32, "cuda", 2), (96, "cuda", 2), (24, "cuda", 1.5), (32, "cpu", 1)]
)
def test_small_images_are_blurred_less(side, device, radius):
    """On a CPU an image of 32 pixels is scaled to 16."""
    found = plan(channels=3, side=side, device=device)
    assert found.config.augment.blur_radius == pytest.approx((radius / 20, radius))
    assert f"blur of up to {radius:g} pixels" in reason(found, "augment")
    assert ("smaller than 32" in reason(found, "augment")) == (radius < 2)


def test_on_a_gpu_as_many_steps_as_the_paper_takes():
    assert plan(50_000, 32, 3, "cuda").config.optim.epochs == 400  # CIFAR-10's
    assert plan(200_000, 32, 3, "cuda").config.optim.epochs == 100
    assert plan(5_000, 32, 3, "cuda").config.optim.epochs == 400


@pytest.mark.parametrize("balance", [0, 0.35, 1])
def test_balance_is_the_smallest_share(balance):
    found = plan(balance=balance)
    assert (found.config.constraint.kind, found.config.constraint.lower) == ("size", balance)
    assert f"{balance:.0%} of an equal share (balance)" in reason(found, f"constraint.lower={balance}: ")


def test_every_plan_is_possible():
    sides, counts = (
        (1, 2, 7, 15, 16, 17, 28, 32, 33, 64, 100, 128, 129, 500, 4_000),
        (20, 100, 1_797, 60_000, 2_000_000),
    )
    for images, side, channels, device in itertools.product(counts, sides, (1, 3), ("cpu", "cuda", "mps")):
        for clusters in (2, 10, 20):
            found = plan(images, side, channels, device, clusters)
            assert isinstance(found.config, Config)
            assert found.config.heads[0] == clusters
            assert found.config.data.name == "own"
            assert found.config.data.image_size <= side
            assert found.config.data.channels == channels
            assert found.seconds > 0
            assert len(found.reasons) == 9
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
    setting, asked = found.config, overrides
    while isinstance(asked, dict):
        ((name, asked),) = asked.items()
        setting = getattr(setting, name)
    assert setting == value


def test_the_plan_says_what_was_asked_for():
    found = plan(optim={"epochs": 3, "batch_size": 50}, data={"image_size": 5}, augment={"flip_prob": 0.5}, seed=1)
    for line in ("optim.epochs=3", "optim.batch_size=50", "data.image_size=5", "augment.flip_prob=0.5"):
        assert f"{line}: as you asked" in found.reasons
    assert reason(found, "optim.epochs=3: 108 steps")
    assert not any("400" in text for text in found.reasons)
    assert not any(text.startswith("seed") for text in found.reasons)


def test_later_rules_see_what_was_asked_for():
    assert plan(6_000, 500, 3, "cuda", data={"image_size": 32}).config.encoder.stem == "cifar"
    assert plan(6_000, 500, 3, "cuda", data={"image_size": 96}).config.encoder.stem == "stl"
    assert plan(6_000, 500, 3, "cuda", data={"image_size": 32}).config.augment.crop_min == 0.3
    usual, larger = (plan(6_000, 32, 3, optim=asked).config.optim for asked in ({}, {"batch_size": 256}))
    assert larger.epochs > usual.epochs
    assert larger.lr == pytest.approx(0.4)
    assert plan(optim={"epochs": 5}).config.optim.warmup_epochs == 1
    asked = {"encoder": {"backbone": "resnet18"}, "data": {"image_size": 64}}
    assert plan(side=64, device="cpu", **asked).config.encoder.stem == "stl"
    grey = plan(6_000, 32, 3, data={"channels": 1}).config
    assert (grey.data.channels, grey.augment.flip_prob) == (1, 0)


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
        ({"balance": -0.01}, r"balance: -0.01 must be from 0 \(groups of any size\) to 1"),
        ({"balance": 1.01}, "balance: 1.01 must be"),
        ({"balance": float("nan")}, "balance: nan must be"),
        ({"optim": {"epoch": 1}}, "optim.epoch: unknown setting; did you mean epochs"),
        ({"optim": {"batch_size": 0}}, "optim.batch_size: 0: .*greater than or equal to 2"),
        ({"optim": {"batch_size": "many"}}, "optim.batch_size: 'many': .*integer"),
        ({"optim": 3}, "optim: 3: input should be optim.SETTING=VALUE"),
        ({"data": {"image_size": None}}, "data.image_size: null must be a number of pixels"),
        ({"data": {"channels": None}}, "data.channels: null must be 1 .grey. or 3"),
        ({"data": {"channels": 2}}, "data.channels: 2: input should be 1 or 3"),
        ({"data": {"image_size": "large"}}, "data.image_size: 'large': .*integer"),
        ({"data": {"image_size": 0}}, "data.image_size: 0: .*greater"),
        ({"heads": [1]}, "heads"),
        ({"heads": 3}, r"heads: 3: input should be a list in \[brackets\]"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_mistake_is_named(device, asked, message):
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


def test_a_gpu_is_faster_than_two_cores():
    asked = {"encoder": {"backbone": "resnet18"}, "optim": {"epochs": 10}, "data": {"image_size": 32}}
    cpu, mps, cuda = (plan(50_000, 32, 3, device, **asked).seconds for device in ("cpu", "mps", "cuda"))
    assert cpu > mps > cuda


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
def test_a_plan_nobody_would_wait_for_says_so(facts, overrides, hopeless):
    found = make_plan(facts, 10, 0.9, overrides)
    assert found.hopeless is hopeless
    assert (found.seconds > HOPELESS_HOURS * 3600) is hopeless


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
    asked = make_plan(facts, 10, 0.9, {"centers": {"kind": "closed_form"}})
    assert asked.config.centers.kind == "closed_form"
    assert "centers.kind=closed_form: as you asked" in asked.reasons


def test_reasons_are_those_of_what_is_done():
    assert "few images" in reason(plan(1_000), "optim.batch_size")
    assert "as in the paper" in reason(plan(60_000), "optim.batch_size=128")
    asked = plan(heads=[10], optim={"batch_size": 40}, constraint={"lower": 0.8})
    assert "heads=[10]: as you asked" in asked.reasons
    assert any(text.startswith("optim.batch_size=40, optim.lr=0.0625: as you asked") for text in asked.reasons)
    assert any(text.startswith("constraint.lower=0.8: every group gets at least 80%") for text in asked.reasons)
    assert not any("90%" in text for text in asked.reasons)


@pytest.mark.parametrize("asked", [{"centers": {"lr": 0.3}}, {"loss": {"name": "ce"}}])
def test_what_needs_gradients_gets_them_at_any_balance(asked):
    assert plan(balance=0.5).config.centers.kind == "closed_form"
    assert plan(balance=0.5, **asked).config.centers.kind == "sgd"
