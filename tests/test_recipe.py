"""Recipes from their data to finished runs: one, several side by side, many seeds, and the summary of all of them."""

import html
import shutil
import statistics

import pytest

from own_images import contents, rows_of, write_folder
from secu.apps.pipeline import Request
from secu.apps.recipe import parse_seeds, repeat, run_recipes, summary
from secu.base.errors import UserError
from secu.settings import load_config
from secu.train.listener import Listener
from secu.train.run import Run
from small_runs import new_run

TINY = ["heads=[10]", "optim.epochs=1", "optim.batch_size=256", "encoder.dim=8"]  # 8 steps per epoch

pytestmark = pytest.mark.usefixtures("own_cache", "quick_map")


def train(out, *overrides, listener=None, **options):
    """Run the recipe ``digits``, shortened, and return what it came to."""
    request = Request(load_config("digits", [*TINY, *overrides]), out, listener or Listener())
    return run_recipes([request], device="cpu", **options)[0]


def repeat_digits(out, seeds, listener=lambda seed, first: Listener(), overrides=(), **options):
    return repeat("digits", [*TINY, *overrides], seeds, out, device="cpu", listener=listener, **options)


@pytest.fixture(scope="module")
def seed_1(tmp_path_factory):
    """Return the run of seed 1 alone, without interruption."""
    return train(tmp_path_factory.mktemp("alone") / "run", "seed=1", report=False).run


# One recipe


class Warnings(Listener):
    """Collects warnings."""

    def __init__(self):
        self.texts = []

    def warned(self, warning):
        self.texts.append(warning)


def test_doubts_about_the_clusters_of_a_recipe_are_reported(tmp_path):
    """Without a learning rate nothing is learned, and clusters are arbitrary."""
    listener = Warnings()
    finished = train(tmp_path / "run", "optim.lr=0", "centers.lr=0", "optim.epochs=0", listener=listener)
    assert listener.texts
    assert tuple(listener.texts) == finished.warnings == finished.results.warnings
    page = html.unescape((tmp_path / "run" / "report.html").read_text())
    assert all(warning in page for warning in listener.texts)


def test_a_data_set_can_be_decoded_to_another_shape(tmp_path):
    finished = train(tmp_path / "run", "data.image_size=6", "data.channels=3", "optim.epochs=0", report=False)
    assert finished.run.input_shape() == (3, 6, 6)
    assert finished.results.images.shape == (3, 6, 6)
    assert len(rows_of(tmp_path / "run" / "assignments.csv")) == 1797


def test_a_recipe_may_name_a_folder_and_its_labels(tmp_path):
    folder = write_folder(tmp_path / "pictures", 60)
    own = [f"data.source={folder}", "data.labels=folder", "data.image_size=8", "data.channels=1", "heads=[3]"]
    finished = train(tmp_path / "run", *own, "optim.epochs=0", report=False)
    rows = rows_of(tmp_path / "run" / "assignments.csv")
    assert sorted(row["id"] for row in rows) == sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.png"))
    assert "acc" in finished.run.metrics()[-1]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.source=null", "data.source: must be dataset:NAME"),
        ("data.source=dataset:digit", "unknown data set 'digit'; did you mean digits"),
        ("data.source=/nowhere", "data.image_size: must be a number|/nowhere does not exist"),
        ("data.train=valid", "digits has no split 'valid'"),
        ("data.test=valid", "digits has no split 'valid'"),
        ("data.mean=[0.5,0.5,0.5]", "data.mean: 3 values"),
        ("engine=graph", "engine: graph needs"),
        ("heads=[1798]", "1798 clusters need at least 1798 images, got 1797"),
        ("init_from=/nowhere", "/nowhere is not a run folder"),
    ],
)
def test_a_mistake_leaves_no_folder(tmp_path, override, message):
    with pytest.raises(UserError, match=message):
        train(tmp_path / "run", override)
    assert not list(tmp_path.iterdir())


def test_the_run_to_start_from_is_not_the_one_that_is_replaced(tiny_digits, tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    for name in ("config.yaml", "run.json", "model.safetensors", "clusters.csv"):  # no checkpoint that would protect it
        (path / name).write_bytes((tiny_digits.path / name).read_bytes())
    before = contents(path)
    with pytest.raises(UserError, match=r"init_from: .*run is the run that would be replaced"):
        train(path, f"init_from={path}", force=True)
    assert contents(path) == before


# Seeds


def test_seeds_are_a_range_or_a_list():
    assert parse_seeds("0..3") == [0, 1, 2, 3]
    assert parse_seeds("4..4") == [4]
    assert parse_seeds("9,1,9") == [9, 1]
    assert len(parse_seeds("5..1004")) == 1000


@pytest.mark.parametrize("text", ["", "3..1", "a", "1,,2", "-1", "0...3", "1.5", "0..1000", "0..99999999999"])
def test_other_seeds_are_refused_in_one_line(text):
    with pytest.raises(UserError, match=r"must be a rising range like 0\.\.7, of at most 1,000, or a list"):
        parse_seeds(text)


@pytest.mark.parametrize(
    ("overrides", "out", "message"),
    [
        (["seed=3"], "new", "seed: 3 has no effect here; list the seeds with --seeds"),
        ([], "run", "out: .*run is a run folder; choose a folder for the runs of all seeds"),
    ],
)
def test_seeds_have_one_place_and_a_folder_of_their_own(tmp_path, overrides, out, message):
    new_run(tmp_path / "run", load_config("digits"))
    with pytest.raises(UserError, match=message):
        repeat_digits(tmp_path / out, [0], overrides=overrides)
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "config.yaml"]


class Interrupting(Listener):
    """Presses Ctrl-C in the middle of the second epoch."""

    def __init__(self):
        self.steps = 0

    def stepped(self):
        self.steps += 1
        if self.steps == 12:
            raise KeyboardInterrupt


def test_an_interrupted_repeat_continues_and_ends_as_an_uninterrupted_one(tmp_path, seed_1):
    listeners = {0: Listener(), 1: Interrupting()}
    with pytest.raises(KeyboardInterrupt):
        repeat_digits(tmp_path, [0, 1], lambda seed, first: listeners[seed])
    assert Run.open(tmp_path / "seed-0").finished
    assert not Run.open(tmp_path / "seed-1").finished
    first = (tmp_path / "seed-0" / "model.safetensors").stat().st_mtime_ns
    records = repeat_digits(tmp_path, [0, 1])
    assert (tmp_path / "seed-0" / "model.safetensors").stat().st_mtime_ns == first
    model = (tmp_path / "seed-1" / "model.safetensors").read_bytes()
    assert model == (seed_1.path / "model.safetensors").read_bytes()
    assert [record["seed"] for record in records] == [0, 1]
    assert records[1]["acc"] == seed_1.metrics()[-1]["acc"]
    assert Run.open(tmp_path / "seed-1").record()["command"] == "train"  # which can resume one seed


def test_seeds_side_by_side_end_as_each_alone_and_continue_after_an_interruption(tmp_path, seed_1):
    def listen(seed, first):
        assert first == (seed == 0)
        begun = (tmp_path / "seed-0" / "metrics.jsonl").exists()
        return Interrupting() if seed == 0 and not begun else Listener()

    with pytest.raises(KeyboardInterrupt):
        repeat_digits(tmp_path, [0, 1], listen, together=2)
    records = repeat_digits(tmp_path, [0, 1], listen, together=2)
    model = (tmp_path / "seed-1" / "model.safetensors").read_bytes()
    assert model == (seed_1.path / "model.safetensors").read_bytes()
    assert [record["seed"] for record in records] == [0, 1]
    beside = [run.record()["beside"] for run in (Run.open(tmp_path / "seed-1"), seed_1)]
    assert beside == [1, 0]


def test_a_seed_whose_report_is_missing_gets_it_without_training(tmp_path):
    repeat_digits(tmp_path, [0], overrides=["optim.epochs=0"])
    before = contents(tmp_path / "seed-0")
    (tmp_path / "seed-0" / "report.html").unlink()
    repeat_digits(tmp_path, [0], overrides=["optim.epochs=0"])
    after = contents(tmp_path / "seed-0")
    assert after.keys() == before.keys()
    for name in ("model.safetensors", "metrics.jsonl", "assignments.csv"):
        assert after[name] == before[name]


def test_seeds_with_other_settings_are_not_continued(tmp_path):
    repeat_digits(tmp_path, [0], overrides=["optim.epochs=0"])
    before = contents(tmp_path / "seed-0")
    with pytest.raises(UserError, match=r"was started with optim.epochs=0, got optim.epochs=1"):
        repeat_digits(tmp_path, [0])
    assert contents(tmp_path / "seed-0") == before


def test_runs_that_cannot_be_trained_side_by_side_are_refused_and_leave_nothing(tmp_path):
    usual = Request(load_config("digits", TINY), tmp_path / "a", Listener())
    longer = Request(load_config("digits", [*TINY, "optim.epochs=3"]), tmp_path / "b", Listener())
    with pytest.raises(UserError, match="same batch size, number of epochs and engine"):
        run_recipes([usual, longer], device="cpu")
    other = Request(load_config("digits", [*TINY, "data.train=all"]), tmp_path / "b", Listener())
    with pytest.raises(UserError, match="must train on the same data"):
        run_recipes([usual, other], device="cpu")
    assert not any(tmp_path.iterdir())
    with pytest.raises(UserError, match="together: 0 must be at least 1"):
        repeat_digits(tmp_path / "c", [0], together=0)


# The summary


def test_the_summary_has_mean_deviation_and_the_best_run():
    records = [
        {"acc": 0.80, "nmi": 0.70, "ari": 0.60, "largest": 12, "smallest": 4},
        {"acc": 0.90, "nmi": 0.65, "ari": 0.62, "largest": 2000, "smallest": 6},
    ]
    spread = statistics.stdev([80.0, 90.0])
    assert summary(records)[0] == ("ACC", f"85.00 ± {spread:.2f}", "90.00")
    assert summary(records)[1][2] == "65.00"
    assert summary(records)[3] == ("largest cluster", "1,006", "2,000")
    assert summary(records)[4] == ("smallest cluster", "5", "6")
    assert summary(records[:1])[0] == ("ACC", "80.00 ± 0.00", "80.00")


def test_the_summary_of_images_without_labels_has_sizes_only():
    records = [{"largest": 12, "smallest": 4}, {"largest": 2000, "smallest": 6}]
    assert summary(records) == [("largest cluster", "1,006", ""), ("smallest cluster", "5", "")]


def test_a_recipe_of_a_folder_refuses_to_resume_after_its_images_changed(tmp_path, tiny_pictures):
    photos = tmp_path / "photos"
    shutil.copytree(tiny_pictures, photos)
    settings = [f"data.source={photos}", "data.image_size=8", "data.channels=3", "heads=[2]", "optim.batch_size=8"]
    config = load_config("digits", [*settings, "optim.epochs=3", "evaluate_every=0"])
    request = Request(config, tmp_path / "run", Listener())
    run_recipes([request], device="cpu", time_limit=1e-6)
    assert (tmp_path / "run" / "images.json").is_file()
    next(path for path in photos.rglob("*") if path.is_file()).unlink()
    with pytest.raises(UserError, match=r"the images changed since .* 1 gone"):
        run_recipes([request], device="cpu", resume=True)
