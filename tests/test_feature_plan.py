"""Which images are clustered by features of a pretrained network, and the rules for feature vectors."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from calls import caller
from feature_runs import paint, write_npy
from secu.apps import durations
from secu.apps import feature_plan as rules
from secu.apps.feature_plan import Facts, batch_size, choose_backbone, neighbor_count
from secu.apps.fit import FitRequest, prepare
from secu.apps.plan import Plan, make_plan
from secu.base.errors import UserError
from secu.nets.pretrained import LITE0

COMMAND = 'pip install "secu[pretrained]"'


@pytest.fixture(autouse=True)
def extra(monkeypatch):
    """Let the package of lite0 be installed, until a test says otherwise; return how to say so."""

    def install(missing: str | None) -> None:
        for module in ("fit", "feature_plan"):
            monkeypatch.setattr(f"secu.apps.{module}.missing_extra", lambda name: missing)

    install(None)
    monkeypatch.setattr("secu.apps.fit.require_extra", lambda name: None)
    return install


def vectors(images: int = 2_000, clusters: int = 10, balance: float | None = None, features: int = 64, **overrides):
    return make_plan(Facts(images, 0, 0, "cpu", features), clusters, balance, overrides)


def photos(images: int = 2_000, clusters: int = 10, balance: float | None = None, device: str = "cpu", **overrides):
    return make_plan(Facts(images, 500, 3, device, frozen="lite0"), clusters, balance, overrides)


def reason(found: Plan, start: str) -> str:
    """Return the one reason that starts like this."""
    (text,) = [text for text in found.reasons if text.startswith(start)]
    return text


# The route


@pytest.mark.parametrize(
    ("images", "side", "device", "expected"),
    [
        (500, 1, "cpu", ""),
        (500, 20, "cpu", ""),
        (500, 21, "cpu", "lite0"),
        (50_000, 20, "cuda", ""),
        (500, 20, "mps", ""),
        (500, 21, "mps", "lite0"),
        (500, 500, "cpu", "lite0"),
        (19_999, 64, "cuda", "lite0"),
        (20_000, 64, "cuda", ""),
        (20_000, 65, "cuda", "lite0"),
        (20_000, 21, "cuda", ""),
        (19_999, 21, "cuda", "lite0"),
        (20_000, 64, "cpu", "lite0"),
        (20_000, 64, "mps", "lite0"),
        (10**7, 4_000, "cuda", "lite0"),
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_the_route_follows_the_size_the_number_and_the_device(images, side, device, expected, channels):
    backbone, why = choose_backbone(Facts(images, side, channels, device))
    assert backbone == expected
    assert ("--from-scratch" in why) is bool(expected)
    assert ("from scratch" in why) or expected


def test_without_the_package_images_are_learned_from_scratch(extra):
    extra(COMMAND)
    backbone, why = choose_backbone(Facts(500, 500, 3, "cpu"))
    assert backbone == ""
    assert why.endswith(COMMAND)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return paint(tmp_path_factory.mktemp("plans") / "pictures", 12)


def prepared(source, *, encoder: str | None = None, **overrides):
    return prepare(FitRequest(str(source), 3, overrides=overrides, device="cpu", encoder=encoder))


def route(source, **more) -> tuple[str, str]:
    config = prepared(source, **more).plan.config
    return config.encoder.backbone, config.encoder.trainable


def test_pictures_are_clustered_by_pretrained_features(pictures):
    found = prepared(pictures)
    config = found.plan.config
    assert (config.encoder.backbone, config.encoder.trainable) == ("lite0", "nothing")
    assert (config.data.image_size, config.data.channels) == (LITE0.size, 3)
    assert (config.data.mean, config.data.std) == (LITE0.mean, LITE0.std)
    assert found.notes == ()


def test_a_missing_package_is_a_note_with_the_command(pictures, extra):
    extra(COMMAND)
    found = prepared(pictures)
    assert found.plan.config.encoder.backbone == "small"
    (note,) = found.notes
    assert COMMAND in note
    assert "\n" not in note


@pytest.mark.parametrize(
    "more",
    [
        {"encoder": "scratch"},
        {"data": {"image_size": 16}},  # would be learned from scratch anyway
        {"data": {"image_size": 20}},
        {"encoder": "small"},
    ],
    ids=str,
)
def test_a_missing_package_that_is_not_wanted_is_not_mentioned(pictures, extra, more):
    extra(COMMAND)
    found = prepared(pictures, **more)
    assert found.plan.config.encoder.backbone == "small"
    assert found.notes == ()


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"encoder": "scratch"}, ("small", "all")),
        ({"encoder": "lite0"}, ("lite0", "nothing")),
        ({"encoder": "small"}, ("small", "all")),
        ({"data": {"image_size": 20}}, ("small", "all")),
        ({"data": {"image_size": 21}}, ("lite0", "nothing")),
    ],
    ids=str,
)
def test_the_encoder_that_is_asked_for(pictures, more, expected):
    assert route(pictures, **more) == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"backbone": "lite0"}, ("lite0", "nothing")),
        ({"backbone": "lite0", "trainable": "nothing"}, ("lite0", "nothing")),
        ({"backbone": "lite0", "trainable": "last"}, ("lite0", "last")),
        ({"backbone": "lite0", "trainable": "all"}, ("lite0", "all")),
        ({"backbone": "small"}, ("small", "all")),
        ({"backbone": "resnet18", "trainable": "all"}, ("resnet18", "all")),
        ({"trainable": "all"}, ("small", "all")),
    ],
    ids=str,
)
def test_explicit_settings_of_the_encoder(pictures, asked, expected):
    config = prepare(FitRequest(str(pictures), 3, overrides={"encoder": asked}, device="cpu")).plan.config
    assert (config.encoder.backbone, config.encoder.trainable) == expected
    assert (config.neighbors.count > 0) is (expected[1] == "nothing")


def test_fine_tuning_has_a_tenth_of_the_learning_rate(pictures):
    for trainable in ("last", "all"):
        asked = {"encoder": {"backbone": "lite0", "trainable": trainable}}
        optim = prepare(FitRequest(str(pictures), 3, overrides=asked, device="cpu")).plan.config.optim
        assert optim.backbone_lr == pytest.approx(optim.lr / 10)


@pytest.mark.parametrize(
    ("encoder", "asked", "message"),
    [
        ("lite0", {"backbone": "small"}, "encoder: lite0 contradicts encoder.backbone=small; give one of them"),
        ("scratch", {"backbone": "lite0"}, "encoder: scratch contradicts encoder.backbone=lite0; give one of them"),
        (None, {"trainable": "last"}, "encoder.trainable: last needs a pretrained encoder.backbone, got None"),
        (None, {"trainable": "nothing"}, "encoder.trainable: nothing needs a pretrained encoder.backbone, got None"),
        (
            None,
            {"backbone": "small", "trainable": "nothing"},
            "encoder.trainable: nothing needs a pretrained encoder.backbone, got small",
        ),
    ],
)
def test_contradictions_are_one_line(pictures, encoder, asked, message):
    request = FitRequest(str(pictures), 3, overrides={"encoder": asked}, device="cpu", encoder=encoder)
    with pytest.raises(UserError) as error:
        prepare(request)
    assert str(error.value) == message


def test_an_unknown_encoder_is_one_line(pictures):
    with pytest.raises(UserError, match=r"^encoder.backbone: unknown 'lite1'"):
        prepared(pictures, encoder="lite1")


def test_an_encoder_whose_package_is_missing(pictures, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr("secu.nets.pretrained.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^encoder.backbone: lite0 needs the package .* pip install"):
        prepared(pictures, encoder="lite0")


@pytest.mark.parametrize("encoder", ["scratch", "lite0", "small"])
def test_vectors_need_no_encoder(tmp_path, encoder):
    source = write_npy(tmp_path / "f.npy")
    assert route(source) == ("none", "nothing")
    assert route(source, encoder="none") == ("none", "nothing")
    with pytest.raises(UserError, match=f"^encoder: {encoder} needs images, got feature vectors$"):
        prepared(source, encoder=encoder)


def test_a_missing_package_does_not_matter_to_vectors(tmp_path, extra):
    extra(COMMAND)
    assert prepared(write_npy(tmp_path / "f.npy")).notes == ()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--from-scratch",), "encoder.backbone=small"),
        (("--encoder", "lite0"), "encoder.backbone=lite0, frozen"),
        ((), "encoder.backbone=lite0, frozen"),
    ],
)
def test_options_of_the_command_line(pictures, tmp_path, monkeypatch, capsys, options, expected):
    code, out, _ = call(monkeypatch, capsys, tmp_path, "fit", pictures, "-k", 3, "--dry-run", *options)
    assert code == 0
    assert expected in " ".join(out.split())


def test_contradicting_options_of_the_command_line(pictures, tmp_path, monkeypatch, capsys):
    asked = ("fit", pictures, "-k", 3, "--dry-run", "--from-scratch", "--encoder", "lite0")
    code, _, err = call(monkeypatch, capsys, tmp_path, *asked)
    assert code != 0
    assert "--from-scratch: contradicts --encoder lite0; give one of them" in " ".join(err.split())


def call(monkeypatch, capsys, folder: Path, *arguments):
    """Call the program in this process; return exit code, output and errors."""
    monkeypatch.chdir(folder)
    return caller(monkeypatch, capsys)(*arguments, "--device", "cpu")


# The rules


@pytest.mark.parametrize(
    ("images", "clusters", "expected"),
    [
        (10_000, 10, 20),  # groups of 1,000
        (2_000, 10, 20),
        (1_990, 10, 19),
        (1_000, 10, 10),
        (400, 10, 10),  # groups of 40
        (360, 10, 9),
        (200, 10, 5),
        (100, 10, 5),  # groups of 10: never fewer than 5
        (20, 10, 5),
        (5, 2, 4),  # all others
        (2, 2, 1),
    ],
)
def test_the_number_of_neighbors(images, clusters, expected):
    assert neighbor_count(images, clusters) == expected
    found = vectors(images, clusters)
    assert found.config.neighbors.count == expected
    assert reason(found, f"neighbors.count={expected}: ")


@pytest.mark.parametrize(
    ("images", "batch"),
    [(2, 8), (35, 8), (36, 9), (255, 63), (256, 64), (1_499, 64), (1_500, 128), (4_999, 128), (5_000, 256)],
)
def test_more_images_mean_larger_batches_and_the_learning_rates_follow(images, batch):
    assert batch_size(images, 2) == batch
    found = vectors(images, 2).config
    assert found.optim.batch_size == batch
    assert found.optim.lr == pytest.approx(0.2 * batch / 256)
    assert (found.centers.kind, found.centers.lr) == ("sgd", pytest.approx(0.8 * batch / 256))


@pytest.mark.parametrize(
    ("images", "finer"), [(49, []), (99, []), (100, [20]), (149, [20]), (150, [20, 30]), (10**6, [20, 30])]
)
def test_finer_heads_come_where_there_are_images_for_them(images, finer):
    assert vectors(images, 10).config.heads == (10, 10, 10, 10, *finer)


@pytest.mark.parametrize(
    ("images", "epochs"),
    [
        (30, 200),  # 4 steps per epoch, of 8 images
        (640, 200),  # 10 steps
        (641, 182),  # 11 steps
        (1_499, 83),  # 24 steps
        (1_500, 167),  # 12 steps of 128
        (4_999, 50),  # 40 steps
        (5_000, 100),  # 20 steps of 256
        (50_000, 10),  # 196 steps
        (46_848, 11),  # 183 steps
        (10**6, 10),
    ],
)
def test_epochs_are_2000_steps_but_from_10_to_200(images, epochs):
    found = vectors(images, 10)
    assert found.config.optim.epochs == epochs
    assert found.config.optim.warmup_epochs == min(10, epochs // 10)
    steps = -(-images // found.config.optim.batch_size)
    assert reason(found, f"optim.epochs={epochs}: {epochs * steps:,} steps")


def test_the_constants():
    values = (rules.PRETRAINED, rules.SMALL_IMAGES, rules.MANY_IMAGES, rules.MANY_SIDE, rules.TWINS, rules.FINER)
    assert values == ("lite0", 20, 20_000, 64, 4, (2, 3))
    found = vectors().config.encoder
    assert (found.hidden_dim, found.dim) == (512, 128)
    assert (photos().config.encoder.hidden_dim, photos().config.encoder.dim) == (512, 128)


def test_vectors_and_photos_differ_in_the_encoder_alone():
    given, photo = vectors().config, photos().config
    assert (given.encoder.backbone, given.data.features, given.data.image_size) == ("none", 64, None)
    assert (photo.encoder.backbone, photo.data.features, photo.data.image_size) == ("lite0", None, 224)
    for section in ("heads", "optim", "centers", "constraint", "neighbors", "answer"):
        assert getattr(given, section) == getattr(photo, section), section


@pytest.mark.parametrize(("channels", "asked", "expected"), [(3, {}, 3), (1, {}, 1), (3, {"channels": 1}, 1)])
def test_pixels_are_normalized_as_the_network_expects(channels, asked, expected):
    data = make_plan(Facts(500, 300, channels, "cpu", frozen="lite0"), 5, None, {"data": asked}).config.data
    assert data.channels == expected
    assert (data.mean, data.std) == (LITE0.mean[:expected], LITE0.std[:expected])


# Sizes of groups, and the answer


def test_without_a_balance_the_run_chooses():
    found = vectors()
    assert (found.config.constraint.kind, found.config.answer) == ("entropy", "auto")
    assert reason(found, "constraint.kind=entropy: ")
    assert reason(found, "answer=auto: ")


@pytest.mark.parametrize("balance", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("make", [vectors, photos])
def test_a_balance_is_held_by_the_size_constraint_and_the_head_answers(make, balance):
    found = make(balance=balance)
    assert (found.config.constraint.kind, found.config.constraint.lower) == ("size", balance)
    assert found.config.answer == "head"
    assert reason(found, f"constraint.lower={balance}: ")
    assert reason(found, "answer=head: clusters are held as equal as requested")


def test_an_answer_that_is_asked_for():
    assert vectors(answer="tree").config.answer == "tree"
    assert vectors(answer="head").config.answer == "head"
    assert vectors(balance=0.9, answer="auto").config.answer == "auto"
    assert vectors(head=2).config.answer == "head"
    assert "answer=tree: as requested" in vectors(answer="tree").reasons


def test_a_single_head_is_the_answer():
    assert vectors(heads=[10]).config.answer == "head"
    assert vectors(heads=[10, 10]).config.answer == "auto"
    assert vectors(heads=[10, 20]).config.answer == "auto"


# What is asked for


def test_what_is_asked_for_wins():
    found = vectors(
        neighbors={"count": 3},
        optim={"batch_size": 40, "lr": 0.01, "epochs": 7},
        heads=[10, 15],
        encoder={"dim": 9},
        constraint={"kind": "none"},
    )
    config = found.config
    assert (config.neighbors.count, config.heads, config.encoder.dim) == (3, (10, 15), 9)
    assert (config.optim.batch_size, config.optim.lr, config.optim.epochs) == (40, 0.01, 7)
    assert (config.centers.lr, config.constraint.kind) == (pytest.approx(0.04), "none")
    assert "heads=[10, 15]: as requested" in found.reasons
    assert reason(found, "optim.batch_size=40, optim.lr=0.01, centers.lr=0.04: ")


def test_other_batches_change_the_learning_rate_and_the_epochs():
    found = vectors(1_000, optim={"batch_size": 128}).config
    assert found.optim.lr == pytest.approx(0.1)
    assert found.optim.epochs == 200
    assert vectors(10_000, optim={"batch_size": 1_000}).config.optim.epochs == 200


def test_there_is_one_reason_for_each_rule():
    starts = ("constraint.", "encoder.backbone=", "neighbors.count=", "heads=", "optim.batch_size=", "optim.epochs=")
    for found in (vectors(), photos(), vectors(balance=0.5)):
        assert [text.split("=")[0] + "=" for text in found.reasons][1:] == [*starts[1:], "answer="]
        assert found.reasons[0].startswith(starts[0])
    assert "2,000" not in reason(vectors(features=1_024), "encoder.backbone=none: given vectors of 1,024 features")
    assert "Apache-2.0" in reason(photos(), "encoder.backbone=lite0, frozen, at 224 pixels: ")
    more = vectors(seed=3, loss={"temperature": 0.1})
    assert len(more.reasons) == len(vectors().reasons) + 1  # the seed is not shown
    assert more.reasons[-1] == "loss.temperature=0.1: as requested"


# Estimates


@pytest.mark.parametrize("device", ["cpu", "mps", "cuda"])
def test_the_estimate_grows_with_the_images(device):
    counts = (5_000, 50_000, 200_000, 1_000_000)
    facts = [Facts(count, 300, 3, device, frozen="lite0") for count in counts]
    plans = [make_plan(fact, 10, None, {}) for fact in facts]
    for times in ([plan.seconds for plan in plans], [plan.other_seconds for plan in plans]):
        assert times == sorted(set(times))
        assert times[0] > 0


def test_the_estimate_grows_with_everything_else():
    usual = vectors().seconds
    assert vectors(features=512, optim={"batch_size": 128, "epochs": 125}).seconds > usual
    assert vectors(optim={"epochs": 1_000}).seconds > 4 * usual
    assert vectors(heads=[10, 500]).seconds > usual


def test_embedding_takes_time_by_the_number_and_size_of_images(monkeypatch):
    monkeypatch.setattr(durations, "cores", lambda: 2)
    config = photos().config
    facts = Facts(1_000, 500, 3, "cpu", frozen="lite0")
    two = durations.embedding_seconds(config, facts)
    assert 1_000 / 500 < two < 1_000 / 50  # on two cores, between 50 and 500 images a second
    monkeypatch.setattr(durations, "cores", lambda: 8)
    assert durations.embedding_seconds(config, facts) == pytest.approx(two / 4)
    half = photos(data={"image_size": 112}).config
    assert durations.embedding_seconds(half, facts) == pytest.approx(two / 16)
    cuda = [durations.embedding_seconds(config, Facts(n, 500, 3, "cuda", frozen="lite0")) for n in (1_000, 2_000)]
    assert cuda[1] == pytest.approx(2 * cuda[0])
    assert cuda[0] < two


def test_every_plan_resolves():
    sizes = (2, 3, 7, 40, 1_499, 1_500, 5_000, 10**6)
    clusters = (2, 3, 10, 100)
    routes = ({"features": 2}, {"features": 2_048}, {"frozen": "lite0"})
    number = 0
    for images, k, device, balance, more in itertools.product(
        sizes, clusters, ("cpu", "mps", "cuda"), (None, 0.9), routes
    ):
        if k > images:
            continue
        config = make_plan(Facts(images, 300, 3, device, **more), k, balance, {}).config
        assert config.clusters == k
        assert set(config.heads) <= {k, 2 * k, 3 * k}
        assert all(head * 5 <= images for head in config.heads if head > k)
        assert 1 <= config.neighbors.count < images
        assert 10 <= config.optim.epochs <= 200
        assert np.isfinite(config.optim.lr)
        number += 1
    assert number > 300
