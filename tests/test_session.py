"""One run while it is trained: what it records and leaves, when it is scored, and what it refuses."""

import math

import numpy as np
import pytest
import torch

from secu.base.errors import UserError
from secu.cluster.constraints import NO_LABEL
from secu.data import Images, load
from secu.settings import load_config
from secu.train.device import choose_device
from secu.train.run import Run
from small_runs import assert_same, config_of, digits, model_bytes, open_session, records, trained

SCORES = ("acc", "nmi", "ari")


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Run:
    """Train a run that others start from."""
    config = config_of("heads=[3,5,7]", "optim.epochs=1")
    return trained(tmp_path_factory.mktemp("first") / "first", config, digits(100)).run


# True labels


@pytest.mark.parametrize("kind", ["size", "entropy"])
def test_true_labels_do_not_reach_the_model(tmp_path, kind):
    """Shuffled labels, other labels or none change the scores, and not one bit of the model."""
    pixels = digits(100).tensor
    true = digits(100).targets
    shuffle = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    runs = {}
    for name, targets in {"true": true, "shuffled": true[shuffle], "other": true % 2, "none": None}.items():
        config = config_of(f"constraint.kind={kind}", "evaluate_every=1", "optim.epochs=2")
        images = Images(pixels, targets)
        runs[name] = trained(tmp_path / name, config, images, test=images).run
    assert len({model_bytes(run) for run in runs.values()}) == 1
    blind = [{key: value for key, value in record.items() if key not in SCORES} for record in records(runs["true"])]
    assert blind == records(runs["none"])  # only the scores depend on labels, and there are none without labels
    assert all(name in record for name in SCORES for record in runs["true"].metrics())
    assert runs["true"].metrics()[-1]["acc"] != runs["other"].metrics()[-1]["acc"]


def test_scoring_does_not_change_the_model(tmp_path):
    images = digits(100)
    often = trained(tmp_path / "often", config_of("evaluate_every=1"), images, test=images).run
    never = trained(tmp_path / "never", config_of(), images).run
    assert model_bytes(often) == model_bytes(never)


def test_images_without_a_label_are_left_out_of_the_scores(tmp_path):
    half = digits().targets.clone()
    half[100:] = -1
    config = config_of("optim.epochs=0")
    run = trained(tmp_path / "half", config, digits(), test=Images(digits().tensor, half)).run
    same = trained(tmp_path / "same", config, digits(), test=digits(100)).run
    assert run.metrics()[-1]["acc"] == same.metrics()[-1]["acc"]


def test_no_known_label_means_no_scores(tmp_path):
    session = open_session(tmp_path / "run", config_of(), digits(48))
    assert session.scores_on(None) == {}
    assert session.scores_on(Images(digits(48).tensor)) == {}
    assert session.scores_on(Images(digits(48).tensor, torch.full((48,), -1))) == {}
    assert set(session.scores_on(digits(48))) == set(SCORES)


@pytest.mark.parametrize(("every", "scored"), [(0, [3]), (1, [0, 1, 2, 3]), (2, [1, 3]), (3, [2, 3]), (50, [3])])
def test_scores_are_computed_every_few_epochs_and_at_the_end(tmp_path, every, scored):
    run = trained(tmp_path / "run", config_of(f"evaluate_every={every}"), digits(48), test=digits(48)).run
    assert [record["epoch"] for record in run.metrics() if "acc" in record] == scored


# What a run leaves


def test_opening_a_session_writes_nothing(tmp_path):
    open_session(tmp_path / "run", config_of(), digits(48))
    assert list(tmp_path.iterdir()) == []


def test_finished_run_is_complete(tmp_path):
    run = trained(tmp_path / "run", config_of(), digits(), test=digits()).run
    names = sorted(path.name for path in run.path.iterdir())
    assert names == ["config.yaml", "metrics.jsonl", "model.safetensors", "run.json", "state.safetensors"]
    metrics = run.metrics()
    fields = ["epoch", "loss", "center_loss", "lr", "largest", "smallest", "changed", "crowded"]
    assert [list(record) for record in metrics[:-1]] == [[*fields, "epoch_seconds", "seconds"]] * 3
    assert [record["epoch"] for record in metrics] == [0, 1, 2, 3]
    assert all(math.isfinite(record["loss"]) and math.isfinite(record["center_loss"]) for record in metrics)
    assert metrics[0]["lr"] == 0
    assert metrics[0]["changed"] == 1
    assert metrics[1]["lr"] > 0
    assert all(0 <= record["smallest"] <= 200 / 3 <= record["largest"] <= 200 for record in metrics)
    facts = run.record()
    assert (facts["finished"], facts["epochs_done"], facts["engine"]) == (True, 4, "eager")
    assert (facts["command"], facts["beside"], facts["threads"]) == ("train digits", 0, torch.get_num_threads())
    assert facts["last_epoch"] == metrics[-1]


def test_run_knows_the_shape_of_its_inputs(tmp_path):
    run = trained(tmp_path / "run", config_of("optim.epochs=0"), digits(48)).run
    assert (run.config().data.channels, run.config().data.image_size) == (1, 8)
    assert run.input_shape() == (1, 8, 8)


@pytest.mark.parametrize(("images", "batch"), [(200, 48), (97, 48), (200, 500), (65, 32)])
def test_every_image_gets_a_label_also_in_a_small_last_batch(tmp_path, images, batch):
    config = config_of("optim.epochs=1", f"optim.batch_size={batch}")
    labels = trained(tmp_path / "run", config, digits(images)).run.load_state()["tensors"]["clustering.labels"]
    assert labels.shape == (images, 2)
    assert labels.min() > NO_LABEL
    assert (labels.amax(0) < torch.tensor([3, 5])).all()


# Every part trains

PARTS = {
    "prediction-head": ("encoder.projection_layers=3", "encoder.prediction_layers=2"),
    "no-projection": ("encoder.projection_layers=0",),
    "one-layer": ("encoder.projection_layers=1",),
    "lars": ("optim.name=lars", "optim.lr=1.6", "optim.weight_decay=1e-6"),
    "kmeans": ("centers.kind=kmeans",),
    "closed-form": ("centers.kind=closed_form",),
    "cross-entropy": ("loss.name=ce",),
    "log-prob": ("constraint.score=log_prob",),
    "log-prob-entropy": ("constraint.score=log_prob", "constraint.kind=entropy"),
    "upper-bound": ("constraint.upper=1.1",),
    "equality": ("constraint.lower=1",),
    "no-constraint": ("constraint.kind=none",),
    "rising": ("centers.schedule=rising",),
    "settling": ("centers.schedule=settling",),
    "averaged": ("optim.average_from=0.4",),
    "heads-of-other-order": ("heads=[5,3,7]",),
    "other-head": ("heads=[5,3,7]", "head=1"),
    "color-crops": ("augment.crop_min=0.3", "augment.blur_prob=[1,0.1]", "augment.solarize_prob=[0,0.2]"),
}


@pytest.mark.parametrize("overrides", PARTS.values(), ids=PARTS.keys())
def test_every_part_trains(tmp_path, overrides):
    images = digits(100)
    session = trained(tmp_path / "run", config_of("optim.epochs=2", *overrides), images, test=images)
    metrics = session.run.metrics()
    assert len(metrics) == 3
    assert all(math.isfinite(record["loss"]) and math.isfinite(record["center_loss"]) for record in metrics)
    for key, value in session.run.load_state()["tensors"].items():
        assert value.isfinite().all(), key
    assert len(session.method.predictor().centers) == session.config.clusters


# From one run to the next


def test_run_starts_from_the_encoder_and_heads_of_another(tmp_path, first):
    theirs = first.load_model()
    # A learning rate of almost nothing: what the second run ends with is what it started from.
    still = ("centers.lr=1e-30", "optim.epochs=0", "optim.weight_decay=0")
    ours = trained(tmp_path / "second", config_of("heads=[7,3]", f"init_from={first.path}", *still), digits(100)).run
    model = ours.load_model()
    weights = [key for key in theirs if key.startswith("encoder.") and "running" not in key and "batches" not in key]
    assert weights
    assert all(torch.equal(model[key], theirs[key]) for key in weights)
    centers = "clustering.centers.weight"
    assert model[centers].shape == (2, 7, 16)
    assert torch.equal(model[centers][0], theirs[centers][2])
    assert torch.equal(model[centers][1, :3], theirs[centers][0, :3])


def test_labels_are_not_taken_from_another_run(tmp_path, first):
    """The second run may have other images, and its initial epoch assigns them."""
    second = trained(tmp_path / "second", config_of(f"init_from={first.path}"), digits(50)).run
    assert second.metrics()[0]["changed"] == 1
    assert second.load_state()["tensors"]["clustering.labels"].shape == (50, 2)


def test_resumed_run_does_not_need_the_one_it_started_from(tmp_path, first):
    """Nor does it start over from it."""
    config = config_of(f"init_from={first.path}", "seed=5")
    uninterrupted = trained(tmp_path / "whole", config, digits(48)).run
    gone = tmp_path / "gone"
    gone.symlink_to(first.path)
    config = config_of(f"init_from={gone}", "seed=5")
    trained(tmp_path / "parts", config, digits(48), time_limit=1e-9)
    gone.unlink()
    assert_same(trained(tmp_path / "parts", config, digits(48), resume=True).run, uninterrupted)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["heads=[3,4]"], r"init_from: .*first has no head of 4 clusters; valid: \[3, 5, 7\]"),
        (["encoder.dim=8"], r"init_from: the encoder of .*first does not match these settings"),
        (["encoder.backbone=resnet18"], r"init_from: the encoder of .*first does not match"),
        (["init_from=/nowhere"], r"/nowhere is not a run folder"),
    ],
)
def test_start_that_does_not_fit_is_reported(tmp_path, first, overrides, message):
    config = config_of("optim.epochs=0", f"init_from={first.path}", *overrides)
    with pytest.raises(UserError, match=message) as error:
        trained(tmp_path / "second", config, digits(48))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "second").exists()


def test_run_does_not_replace_the_one_it_starts_from(tmp_path, first):
    before = model_bytes(first)
    with pytest.raises(UserError, match=r"init_from: .* is the run that would be replaced; choose another folder"):
        trained(first.path, config_of(f"init_from={first.path}"), digits(48), force=True)
    assert model_bytes(first) == before


def test_both_stages_of_stl10(tmp_path):
    """The two recipes themselves, on a few images in STL-10's own format."""
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    numbers = np.random.default_rng(0)
    for split, count in (("train", 30), ("test", 20), ("unlabeled", 40)):
        numbers.integers(0, 256, (count, 3, 96, 96), np.uint8).tofile(folder / f"{split}_X.bin")
        if split != "unlabeled":
            (np.arange(count) % 10 + 1).astype(np.uint8).tofile(folder / f"{split}_y.bin")
    small = ("encoder.backbone=small", "optim.epochs=1", "optim.batch_size=32", "data.image_size=16")
    stages = {"stl10": (*small, "heads=[10,20]"), "stl10-stage2": (*small, f"init_from={tmp_path / 'stl10'}")}
    runs = {}
    for recipe, overrides in stages.items():
        config = load_config(recipe, overrides)
        images = load(config.data, root=tmp_path)
        test = load(config.data, config.data.test, tmp_path)
        runs[recipe] = trained(tmp_path / recipe, config, images, test=test).run
        assert len(images) == (70 if recipe == "stl10" else 30)
        assert len(test) == 20
    assert runs["stl10"].load_state()["tensors"]["clustering.labels"].shape == (70, 2)
    assert runs["stl10-stage2"].load_state()["tensors"]["clustering.labels"].shape == (30, 1)
    assert "acc" in runs["stl10-stage2"].metrics()[-1]


# Mistakes


def test_loss_that_is_not_finite_stops_with_advice(tmp_path):
    config = config_of("optim.lr=1e30", "optim.warmup_epochs=0")
    with pytest.raises(UserError, match=r"loss: nan after epoch \d of .* is not finite; lower optim.lr or centers.lr"):
        trained(tmp_path / "run", config, digits())
    assert not Run(tmp_path / "run").has_checkpoint()


def test_more_clusters_than_images_is_an_error(tmp_path):
    with pytest.raises(UserError, match="20 clusters need at least 20 images, got 12"):
        open_session(tmp_path / "run", config_of("heads=[20]"), digits(12))


def test_as_many_clusters_as_images_is_possible(tmp_path):
    config = config_of("heads=[12]", "optim.epochs=1", "optim.batch_size=4")
    assert math.isfinite(trained(tmp_path / "run", config, digits(12)).run.metrics()[-1]["loss"])


def test_statistics_for_three_channels_do_not_fit_gray_images(tmp_path):
    with pytest.raises(UserError, match=r"data.mean: 3 values, but the images have 1 channels"):
        open_session(tmp_path / "run", config_of("data.mean=[0.1,0.2,0.3]"), digits(48))


def test_unavailable_device_is_reported_with_those_that_are():
    with pytest.raises(UserError, match=r"device: 'tpu' is not available here; valid: auto, .*cpu"):
        choose_device("tpu")
    assert choose_device("cpu") == torch.device("cpu")
