"""The training loop, on small real runs: repeatable, resumable, blind to true labels."""

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import secu.train
import secu.training
from secu.constraints import NO_LABEL
from secu.data import FolderImages, Images, load
from secu.errors import UserError
from secu.run import Run
from secu.settings import load_config
from secu.train import choose_device, train
from secu.training import Listener, is_due

TINY = ("heads=[3,5]", "optim.epochs=3", "optim.warmup_epochs=1", "optim.batch_size=48", "encoder.dim=16")


STEPS = 5  # of an epoch of 200 images


@pytest.fixture(scope="module")
def digits():
    everything = load("digits", "all")
    return Images(everything.pixels[:200], everything.targets[:200])


@pytest.fixture(scope="module")
def whole(tmp_path_factory, digits):
    """Train the tiny config in one go."""
    return trained(tmp_path_factory.mktemp("whole") / "run", config_of(), digits)


def config_of(*overrides, recipe="digits"):
    return load_config(recipe, (*TINY, *overrides))


def new_run(path, config):
    return Run.create(path, config)


def trained(path, config, images, **options):
    """Train in a new folder and return the run."""
    run = Run.create(path, config)
    train(config, images, run, device="cpu", **options)
    return run


def records(run):
    """Return the run's metrics without what the clock decides."""
    return [{k: v for k, v in record.items() if "seconds" not in k} for record in run.metrics()]


def assert_same(ours, theirs):
    """Compare two runs bit for bit: the model, what resuming needs, and what was written down on the way."""
    assert (ours.path / "model.safetensors").read_bytes() == (theirs.path / "model.safetensors").read_bytes()
    ours_state, theirs_state = ours.load_state(), theirs.load_state()
    for part in ("tensors", "momentum"):
        assert ours_state[part].keys() == theirs_state[part].keys()
        for key, value in ours_state[part].items():
            assert torch.equal(value, theirs_state[part][key]), key
    assert ours_state["epochs_done"] == theirs_state["epochs_done"]
    assert records(ours) == records(theirs)


class Interrupting(Listener):
    """Presses Ctrl-C in the middle of an epoch, or at its end, before a checkpoint can be written."""

    def __init__(self, *, step=None, epoch=None):
        self.step, self.epoch, self.steps = step, epoch, 0

    def stepped(self):
        self.steps += 1
        if self.steps == self.step:
            raise KeyboardInterrupt

    def epoch_ended(self, record):
        if record["epoch"] == self.epoch:
            raise KeyboardInterrupt


# Repeatable


def test_the_same_seed_gives_the_same_bits_and_another_does_not(tmp_path, digits):
    first = trained(tmp_path / "first", config_of(), digits, test=digits)
    torch.manual_seed(12345)
    torch.rand(7)  # what happened to the global generator before must not matter
    assert_same(trained(tmp_path / "second", config_of(), digits, test=digits), first)
    other = trained(tmp_path / "other", config_of("seed=1"), digits, test=digits)
    assert (other.path / "model.safetensors").read_bytes() != (first.path / "model.safetensors").read_bytes()
    assert records(other) != records(first)


def test_the_seed_decides_the_augmentation_too(tmp_path, digits):
    """From the same weights, on copies of one image, so that their order cannot matter: only the views are left."""
    first = trained(tmp_path / "first", config_of("optim.epochs=0"), digits)
    copies = Images(digits.pixels[:1].repeat(200, 1, 1, 1), None)
    losses = []
    for seed in range(2):
        config = config_of("optim.epochs=0", f"init_from={first.path}", f"seed={seed}")
        losses.append(trained(tmp_path / str(seed), config, copies).metrics()[0]["loss"])
    assert losses[0] != losses[1]


def test_training_leaves_the_global_generator_alone(tmp_path, digits):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    trained(tmp_path / "run", config_of("optim.epochs=1"), digits)
    assert torch.equal(torch.rand(2), expected)


def test_an_untouched_start_differs_from_the_end(tmp_path, digits):
    """Guards the tests above: bits that never move are always the same."""
    start = trained(tmp_path / "start", config_of("optim.epochs=0"), digits).load_model()
    end = trained(tmp_path / "end", config_of(), digits).load_model()
    weights = [key for key in end if "running" not in key and "batches" not in key]
    assert all(not torch.equal(start[key], end[key]) for key in weights)


# Resumable

VARIANTS = {
    "size-sgd": (),
    "size-upper": ("constraint.upper=1.2",),
    "entropy-sgd": ("constraint.kind=entropy",),
    "size-closed-form": ("centers.kind=closed_form",),
    "entropy-closed-form": ("constraint.kind=entropy", "centers.kind=closed_form"),
    "lars-rising": ("optim.name=lars", "optim.lr=1", "centers.schedule=rising"),
}


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_run_stopped_by_the_time_limit_and_resumed_equals_one_in_one_go(tmp_path, digits, overrides):
    config = config_of(*overrides)
    whole = trained(tmp_path / "whole", config, digits, test=digits)
    run = new_run(tmp_path / "parts", config)
    stops, centers = 0, None
    while not train(
        config, digits, run, test=digits, device="cpu", resume=stops > 0, time_limit=1e-9
    ).finished:  # one epoch a call
        stops += 1
        state = run.load_state()
        assert state["epochs_done"] == stops == len(run.metrics())
        # The encoder learns against the centers as they stood at the start of the epoch.
        if centers is not None:
            assert torch.equal(state["tensors"]["clustering.epoch_centers"], centers)
        centers = torch.nn.functional.normalize(state["tensors"]["clustering.centers.weight"], dim=-1)
    assert stops == 3
    assert_same(run, whole)


@pytest.mark.parametrize(
    "interruption",
    [{"step": 12}, {"step": 1}, {"epoch": 1}, {"epoch": 3}, {"epoch": 0}],
    ids=["mid-epoch", "first-step", "before-checkpoint", "before-last-checkpoint", "before-first-checkpoint"],
)
@pytest.mark.parametrize("often", [True, False], ids=["checkpoint-an-epoch", "no-checkpoint-yet"])
def test_a_run_interrupted_anywhere_and_resumed_equals_one_in_one_go(
    tmp_path, digits, whole, monkeypatch, interruption, often
):
    if often:
        monkeypatch.setattr(secu.train, "CHECKPOINT_SECONDS", 0)
    config = config_of()
    run = new_run(tmp_path / "interrupted", config)
    with pytest.raises(KeyboardInterrupt):
        train(config, digits, run, device="cpu", listener=Interrupting(**interruption))
    done = interruption.get("epoch", (interruption.get("step", 0) - 1) // STEPS)
    assert (run.load_state()["epochs_done"] if run.has_checkpoint() else 0) == done
    if done:  # what the run says of itself is what was saved
        told = json.loads((run.path / "run.json").read_text())
        assert (told["epochs_done"], told["finished"], told["last_epoch"]["epoch"]) == (done, False, done - 1)
    assert not any(path.name.startswith(".") for path in run.path.iterdir())
    train(config, digits, run, device="cpu", resume=True)
    assert_same(run, whole)
    assert json.loads((run.path / "run.json").read_text())["finished"] is True


def test_resuming_a_finished_run_changes_nothing(tmp_path, digits):
    run = trained(tmp_path / "run", config_of("optim.epochs=1"), digits)
    before = {name: (run.path / name).read_bytes() for name in ("model.safetensors", "state.pt", "metrics.jsonl")}
    model = train(run.config(), digits, run, device="cpu", resume=True)
    assert model.finished
    assert {name: (run.path / name).read_bytes() for name in before} == before


def test_resuming_with_other_images_is_refused(tmp_path, digits):
    run = trained(tmp_path / "run", config_of("optim.epochs=1"), digits)
    fewer = Images(digits.pixels[:150], None)
    with pytest.raises(UserError, match="holds another clustering than its data and config ask for"):
        train(run.config(), fewer, run, device="cpu", resume=True)


# True labels


@pytest.mark.parametrize("kind", ["size", "entropy"])
def test_true_labels_do_not_reach_the_model(tmp_path, digits, kind):
    """Shuffled labels, others, or none change the scores and not one bit of the model."""
    config = config_of(f"constraint.kind={kind}", "evaluate_every=1", "optim.epochs=2")
    shuffle = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    targets = {"true": digits.targets, "shuffled": digits.targets[shuffle], "others": digits.targets % 2, "none": None}
    runs = {}
    for name, labels in targets.items():
        images = Images(digits.pixels, labels)
        runs[name] = trained(tmp_path / name, config, images, test=images)
    assert len({(run.path / "model.safetensors").read_bytes() for run in runs.values()}) == 1
    scores = ("acc", "nmi", "ari")
    blind = [{k: v for k, v in record.items() if k not in scores} for record in records(runs["true"])]
    assert blind == records(runs["none"])  # nothing but the scores depends on labels, and without labels there is none
    assert all(name in record for name in scores for record in runs["true"].metrics())
    assert runs["true"].metrics()[-1]["acc"] != runs["others"].metrics()[-1]["acc"]


def test_scoring_does_not_change_the_model(tmp_path, digits):
    config = config_of()
    often = trained(tmp_path / "often", config_of("evaluate_every=1"), digits, test=digits)
    never = trained(tmp_path / "never", config, digits)
    assert (often.path / "model.safetensors").read_bytes() == (never.path / "model.safetensors").read_bytes()


def test_images_without_a_label_are_left_out_of_the_scores(tmp_path, digits):
    half = digits.targets.clone()
    half[100:] = -1
    run = trained(tmp_path / "half", config_of("optim.epochs=0"), digits, test=Images(digits.pixels, half))
    first = Images(digits.pixels[:100], digits.targets[:100])
    same = trained(tmp_path / "first", config_of("optim.epochs=0"), digits, test=first)
    assert run.metrics()[-1]["acc"] == same.metrics()[-1]["acc"]


@pytest.mark.parametrize(("every", "scored"), [(0, [3]), (1, [0, 1, 2, 3]), (2, [1, 3]), (3, [2, 3]), (50, [3])])
def test_scores_come_every_so_many_epochs_and_at_the_end(tmp_path, digits, every, scored):
    run = trained(tmp_path / "run", config_of(f"evaluate_every={every}"), digits, test=digits)
    assert [record["epoch"] for record in run.metrics() if "acc" in record] == scored
    assert [is_due(run.config(), done) for done in range(1, 5)] == [epoch in scored for epoch in range(4)]


# What a run leaves


def test_a_finished_run_is_complete(tmp_path, digits):
    run = trained(tmp_path / "run", config_of(), digits, test=digits)
    assert sorted(path.name for path in run.path.iterdir()) == [
        *("config.yaml", "metrics.jsonl", "model.safetensors", "run.json", "state.pt")
    ]
    metrics = run.metrics()
    assert [record["epoch"] for record in metrics] == [0, 1, 2, 3]
    assert all(math.isfinite(record["loss"]) and math.isfinite(record["center_loss"]) for record in metrics)
    assert metrics[0]["lr"] == 0
    assert metrics[0]["changed"] == 1
    assert metrics[1]["lr"] > 0
    assert all(0 <= r["smallest"] <= 200 / 3 <= r["largest"] <= 200 for r in metrics)
    summary = json.loads((run.path / "run.json").read_text())
    assert (summary["finished"], summary["epochs_done"], summary["engine"]) == (True, 4, "eager")
    assert summary["last_epoch"] == metrics[-1]


def test_the_encoder_stands_still_in_the_initial_epoch(tmp_path, digits):
    """Only batch-norm's statistics move, and the centers."""
    first = trained(tmp_path / "a", config_of("optim.epochs=0"), digits).load_model()
    second = trained(tmp_path / "b", config_of("optim.epochs=0", "optim.initial_epochs=2"), digits).load_model()
    for key, value in first.items():
        moves = "running" in key or "batches_tracked" in key or key.startswith("clustering")
        assert torch.equal(value, second[key]) is not moves, key


@pytest.mark.parametrize(("images", "batch"), [(200, 48), (97, 48), (200, 500), (65, 32)])
def test_every_image_gets_a_label_also_in_a_last_small_batch(tmp_path, digits, images, batch):
    few = Images(digits.pixels[:images], digits.targets[:images])
    run = trained(tmp_path / "run", config_of("optim.epochs=1", f"optim.batch_size={batch}"), few)
    labels = run.load_state()["tensors"]["clustering.labels"]
    assert labels.shape == (images, 2)
    assert labels.min() > NO_LABEL
    assert (labels.amax(0) < torch.tensor([3, 5])).all()


def test_a_time_limit_stops_with_a_checkpoint_and_says_so(tmp_path, digits):
    config = config_of("optim.epochs=1000")
    run = new_run(tmp_path / "run", config)
    model = train(config, digits, run, device="cpu", time_limit=0.3)
    assert not model.finished
    assert 0 < model.epochs_done < 1000
    assert run.load_state()["epochs_done"] == model.epochs_done == len(run.metrics())
    assert load_file(run.path / "model.safetensors")
    assert json.loads((run.path / "run.json").read_text())["finished"] is False


class Clock:
    """A clock that goes on by two seconds with every training step."""

    def __init__(self):
        self.seconds = 0.0

    def monotonic(self):
        return self.seconds

    def listener(self):
        class Ticking(Listener):
            def stepped(_):
                self.seconds += 2

        return Ticking()


@pytest.mark.parametrize(("limit", "epochs"), [(1, 1), (19, 1), (20, 2), (25, 2), (30, 3), (1000, 4)])
def test_no_epoch_is_begun_that_would_end_after_the_time_limit(tmp_path, digits, monkeypatch, limit, epochs):
    """An epoch takes 10 seconds of this clock; the first is always trained."""
    clock = Clock()
    monkeypatch.setattr(secu.train, "time", clock)
    config = config_of()
    run = new_run(tmp_path / "run", config)
    model = train(config, digits, run, device="cpu", time_limit=limit, listener=clock.listener())
    assert model.epochs_done == epochs == run.load_state()["epochs_done"]
    assert model.seconds == epochs * 10


@pytest.mark.parametrize(("limit", "epochs"), [(19, 1), (42, 1), (44, 2), (53, 2), (65, 2), (66, 3), (1000, 4)])
def test_scores_and_checkpoints_take_their_share_of_the_time_limit(tmp_path, digits, monkeypatch, limit, epochs):
    """An epoch takes 10 seconds of this clock, its scores 7 and a checkpoint 5; one comes after each epoch."""
    clock = Clock()

    def taking(seconds, real):
        def slow(*arguments):
            clock.seconds += seconds
            return real(*arguments)

        return slow

    monkeypatch.setattr(secu.train, "time", clock)
    monkeypatch.setattr(secu.train, "CHECKPOINT_SECONDS", -1)
    monkeypatch.setattr(secu.training, "scores_on", taking(7, secu.training.scores_on))
    monkeypatch.setattr(Run, "save", taking(5, Run.save))
    config = config_of("evaluate_every=1")
    run = new_run(tmp_path / "run", config)
    options = {"test": digits, "device": "cpu", "time_limit": limit, "listener": clock.listener()}
    assert train(config, digits, run, **options).epochs_done == epochs
    assert clock.seconds == 22 * epochs
    assert epochs == 1 or clock.seconds <= limit


def test_a_checkpoint_comes_every_minute(tmp_path, digits, monkeypatch):
    clock, saved = Clock(), []
    monkeypatch.setattr(secu.train, "time", clock)
    real = Run.save
    monkeypatch.setattr(Run, "save", lambda *parts: (saved.append(clock.seconds), real(*parts)))
    config = config_of("optim.epochs=8")
    train(config, digits, new_run(tmp_path / "run", config), device="cpu", listener=clock.listener())
    assert saved == [70, 90]


def test_without_resume_training_starts_over(tmp_path, digits):
    class Starting(Listener):
        def started(self, *, engine, device, model, steps):
            self.epochs_done = model.epochs_done

    config, listener = config_of(), Starting()
    run = new_run(tmp_path / "run", config)
    for resume, done in ((False, 0), (True, 1), (False, 0)):
        train(config, digits, run, device="cpu", resume=resume, time_limit=1e-9, listener=listener)
        assert listener.epochs_done == done
    assert [record["epoch"] for record in run.metrics()] == [0]


def test_seconds_add_up_over_a_resumed_run(tmp_path, digits):
    config = config_of()
    run = new_run(tmp_path / "run", config)
    train(config, digits, run, device="cpu", time_limit=1e-9)
    train(config, digits, run, device="cpu", resume=True)
    seconds = [record["seconds"] for record in run.metrics()]
    assert seconds == sorted(seconds)
    assert sum(record["epoch_seconds"] for record in run.metrics()) <= seconds[-1] + 0.01


def test_a_listener_hears_every_step_and_epoch(tmp_path, digits):
    class Counting(Listener):
        def __init__(self):
            self.heard = []

        def started(self, *, engine, device, model, steps):
            self.heard.append((engine, device, model.epochs_done, steps))

        def stepped(self):
            self.heard.append("step")

        def epoch_ended(self, record):
            self.heard.append(record["epoch"])

    listener = Counting()
    trained(tmp_path / "run", config_of("optim.epochs=1"), digits, listener=listener)
    assert listener.heard == [("eager", "cpu", 0, 5), *["step"] * 5, 0, *["step"] * 5, 1]


# Mistakes


def test_a_loss_that_is_not_finite_stops_with_advice(tmp_path, digits):
    config = config_of("optim.lr=1e30", "optim.warmup_epochs=0")
    run = new_run(tmp_path / "run", config)
    with pytest.raises(UserError, match=r"loss: nan after epoch \d of .* is not finite; lower optim.lr or centers.lr"):
        train(config, digits, run, device="cpu")
    assert not run.has_checkpoint()


def test_more_clusters_than_images_is_an_error(tmp_path, digits):
    config = config_of("heads=[20]")
    few = Images(digits.pixels[:12], None)
    with pytest.raises(UserError, match="20 clusters need at least 20 images, got 12"):
        train(config, few, new_run(tmp_path / "run", config), device="cpu")


def test_as_many_clusters_as_images_is_possible(tmp_path, digits):
    few = Images(digits.pixels[:12], None)
    run = trained(tmp_path / "run", config_of("heads=[12]", "optim.epochs=1", "optim.batch_size=4"), few)
    assert math.isfinite(run.metrics()[-1]["loss"])


def test_statistics_for_three_channels_do_not_fit_grey_images(tmp_path, digits):
    config = config_of("data.mean=[0.1,0.2,0.3]")
    with pytest.raises(UserError, match=r"data.mean: 3 values, but the images have 1 channels"):
        train(config, digits, new_run(tmp_path / "run", config), device="cpu")


def test_an_unavailable_device_names_those_there_are():
    with pytest.raises(UserError, match=r"device: 'tpu' is not available here; valid: auto, .*cpu"):
        choose_device("tpu")
    assert choose_device("cpu") == torch.device("cpu")


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
    "heads-of-other-order": ("heads=[5,3,7]",),
    "colour-crops": ("augment.crop_min=0.3", "augment.blur_prob=[1,0.1]", "augment.solarize_prob=[0,0.2]"),
}


@pytest.mark.parametrize("overrides", PARTS.values(), ids=PARTS.keys())
def test_every_part_trains(tmp_path, digits, overrides):
    run = trained(tmp_path / "run", config_of("optim.epochs=2", *overrides), digits, test=digits)
    metrics = run.metrics()
    assert len(metrics) == 3
    assert all(math.isfinite(record["loss"]) and math.isfinite(record["center_loss"]) for record in metrics)
    for key, value in run.load_state()["tensors"].items():
        assert value.isfinite().all(), key


# From one run to the next


def test_a_run_starts_from_the_encoder_and_heads_of_another(tmp_path, digits):
    first = trained(tmp_path / "first", config_of("heads=[3,5,7]"), digits)
    theirs = first.load_model()
    # A learning rate of almost nothing: what the second run ends with is what it started from.
    config = config_of(
        "heads=[7,3]", f"init_from={first.path}", "centers.lr=1e-30", "optim.epochs=0", "optim.weight_decay=0"
    )
    ours = trained(tmp_path / "second", config, digits).load_model()
    weights = [key for key in theirs if key.startswith("encoder.") and "running" not in key and "batches" not in key]
    assert weights
    assert all(torch.equal(ours[key], theirs[key]) for key in weights)
    centers = "clustering.centers.weight"
    assert ours[centers].shape == (2, 7, 16)
    assert torch.equal(ours[centers][0], theirs[centers][2])
    assert torch.equal(ours[centers][1, :3], theirs[centers][0, :3])


def test_labels_are_not_taken_from_another_run(tmp_path, digits):
    """The second run may have other images, and its initial epoch assigns them anew."""
    first = trained(tmp_path / "first", config_of(), digits)
    few = Images(digits.pixels[:50], None)
    second = trained(tmp_path / "second", config_of(f"init_from={first.path}"), few)
    assert second.metrics()[0]["changed"] == 1
    assert second.load_state()["tensors"]["clustering.labels"].shape == (50, 2)


def test_a_resumed_run_does_not_start_over_from_another(tmp_path, digits):
    first = trained(tmp_path / "first", config_of(), digits)
    config = config_of(f"init_from={first.path}", "seed=5")
    whole = trained(tmp_path / "whole", config, digits)
    parts = new_run(tmp_path / "parts", config)
    train(config, digits, parts, device="cpu", time_limit=1e-9)
    train(config, digits, parts, device="cpu", resume=True)
    assert_same(parts, whole)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["heads=[3,4]"], r"init_from: .*first has no head of 4 clusters; valid: \[3, 5\]"),
        (["encoder.dim=8"], r"first holds another encoder"),
        (["encoder.backbone=resnet18"], r"first holds another encoder"),
        (["init_from=/nowhere"], r"/nowhere is not a run folder"),
    ],
)
def test_a_start_that_does_not_fit_is_named(tmp_path, digits, overrides, message):
    first = trained(tmp_path / "first", config_of("optim.epochs=0"), digits)
    config = config_of("optim.epochs=0", f"init_from={first.path}", *overrides)
    with pytest.raises(UserError, match=message):
        train(config, digits, new_run(tmp_path / "second", config), device="cpu")


def test_both_stages_of_stl10(tmp_path):
    """The two recipes themselves, on a handful of images in STL-10's own format."""
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    numbers = np.random.default_rng(0)
    for split, images in (("train", 30), ("test", 20), ("unlabeled", 40)):
        numbers.integers(0, 256, (images, 3, 96, 96), np.uint8).tofile(folder / f"{split}_X.bin")
        if split != "unlabeled":
            (np.arange(images) % 10 + 1).astype(np.uint8).tofile(folder / f"{split}_y.bin")
    small = ("encoder.backbone=small", "optim.epochs=1", "optim.batch_size=32", "data.image_size=16", "heads=[10,20]")
    runs = {}
    for recipe, overrides in {
        "stl10": small,
        "stl10-stage2": (*small[:-1], f"init_from={tmp_path / 'stl10'}"),
    }.items():
        config = load_config(recipe, overrides)
        images = load("stl10", config.data.train, tmp_path, config.data.image_size)
        test = load("stl10", config.data.test, tmp_path, config.data.image_size)
        runs[recipe] = trained(tmp_path / recipe, config, images, test=test)
        assert len(images) == (70 if recipe == "stl10" else 30)
        assert len(test) == 20
    assert runs["stl10"].load_state()["tensors"]["clustering.labels"].shape == (70, 2)
    assert runs["stl10-stage2"].load_state()["tensors"]["clustering.labels"].shape == (30, 1)
    assert "acc" in runs["stl10-stage2"].metrics()[-1]


# Images that stay on disk


@pytest.fixture
def folders(tmp_path):
    """Write class folders of small colour images, as ImageNet has them."""
    numbers = np.random.default_rng(1)
    for split, images in (("train", 12), ("val", 4)):
        for name in ("n01", "n02", "n03"):
            folder = tmp_path / "imagenet" / split / name
            folder.mkdir(parents=True)
            for image in range(images):
                pixels = numbers.integers(0, 256, (24, 20 + image, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{image}.png")
    return tmp_path


SMALL_IMAGENET = (
    *("encoder.backbone=small", "encoder.dim=16", "encoder.prediction_dim=16", "heads=[3,6]", "optim.epochs=1"),
    *("optim.batch_size=8", "data.image_size=20", "augment.size=16", "evaluate_every=1"),
)


@pytest.mark.parametrize("recipe", ["imagenet", "imagenet-entropy"])
def test_imagenet_trains_from_folders(tmp_path, folders, recipe):
    config = load_config(recipe, SMALL_IMAGENET)
    images, test = (load("imagenet", split, folders, 20) for split in ("train", "test"))
    assert isinstance(images, FolderImages)
    run = trained(tmp_path / "run", config, images, test=test)
    assert all(math.isfinite(record["loss"]) for record in run.metrics())
    assert "acc" in run.metrics()[-1]
    assert run.load_state()["tensors"]["clustering.labels"].min() >= 0


def test_images_from_disk_train_the_same_model_as_from_memory(tmp_path, folders):
    config = load_config("imagenet", SMALL_IMAGENET)
    streamed = load("imagenet", "train", folders, 20)
    resident = Images(streamed.fetch(torch.arange(len(streamed))), streamed.targets)
    assert_same(
        trained(tmp_path / "streamed", config, streamed, test=streamed),
        trained(tmp_path / "resident", config, resident, test=resident),
    )


def test_an_image_that_breaks_between_two_epochs_is_named(tmp_path, folders):
    config = load_config("imagenet", SMALL_IMAGENET)
    images = load("imagenet", "train", folders, 20)
    broken = folders / "imagenet" / "train" / "n02" / "3.png"

    class Breaking(Listener):
        def epoch_ended(self, record):
            broken.write_bytes(b"no image")

    run = new_run(tmp_path / "run", config)
    with pytest.raises(UserError, match=r"n02/3.png: cannot be read as an image"):
        train(config, images, run, device="cpu", listener=Breaking())


def test_an_interrupted_stream_can_be_resumed(tmp_path, folders):
    config = load_config("imagenet", SMALL_IMAGENET)
    images = load("imagenet", "train", folders, 20)
    whole = trained(tmp_path / "whole", config, images)
    run = new_run(tmp_path / "run", config)
    with pytest.raises(KeyboardInterrupt):
        train(config, images, run, device="cpu", listener=Interrupting(step=2))
    train(config, images, run, device="cpu", resume=True)
    assert_same(run, whole)
