"""Many seeds of a recipe: run one after the other, gone on with after an interruption, and summed up."""

import html
import json
import statistics

import pytest

from secu.errors import UserError
from secu.recipe_runs import is_finished, parse_seeds, repeat, run_recipe, run_side_by_side, summary
from secu.run import Run
from secu.settings import load_config
from secu.training import Listener

TINY = ["heads=[10]", "optim.epochs=2", "optim.batch_size=128"]


def test_seeds_are_a_range_or_a_list():
    assert parse_seeds("0..3") == [0, 1, 2, 3]
    assert parse_seeds("4..4") == [4]
    assert parse_seeds("9,1,9") == [9, 1]


@pytest.mark.parametrize("text", ["", "3..1", "a", "1,,2", "-1", "0...3", "1.5", "0..99999999999"])
def test_other_seeds_are_refused_in_one_line(text):
    with pytest.raises(UserError, match="must be a rising range like"):
        parse_seeds(text)


@pytest.mark.parametrize(
    ("overrides", "out", "message"),
    [
        (["seed=3"], "new", "seed: 3 is not read here; name all seeds with --seeds"),
        ([], "run", "out: .*run is a run; name a folder for the runs of all seeds"),
    ],
)
def test_seeds_have_one_place_and_a_folder_of_their_own(tmp_path, overrides, out, message):
    Run.create(tmp_path / "run", load_config("digits"))
    with pytest.raises(UserError, match=message):
        repeat(
            "digits", [*TINY, *overrides], [0], tmp_path / out, device="cpu", listener=lambda seed, first: Listener()
        )
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "config.yaml"]


class Interrupting(Listener):
    """Presses Ctrl-C in the middle of the second epoch."""

    def __init__(self):
        self.steps = 0

    def stepped(self):
        self.steps += 1
        if self.steps == 20:
            raise KeyboardInterrupt


def test_an_interrupted_repeat_goes_on_and_gives_what_an_uninterrupted_one_gives(tmp_path):
    listeners = {0: Listener(), 1: Interrupting()}
    with pytest.raises(KeyboardInterrupt):
        repeat("digits", TINY, [0, 1], tmp_path / "a", device="cpu", listener=lambda seed, first: listeners[seed])
    assert is_finished(Run.open(tmp_path / "a" / "seed-0"))
    assert not is_finished(Run.open(tmp_path / "a" / "seed-1"))
    first = (tmp_path / "a" / "seed-0" / "model.safetensors").stat().st_mtime_ns
    records = repeat("digits", TINY, [0, 1], tmp_path / "a", device="cpu", listener=lambda seed, first: Listener())
    assert (tmp_path / "a" / "seed-0" / "model.safetensors").stat().st_mtime_ns == first
    run_recipe(load_config("digits", [*TINY, "seed=1"]), tmp_path / "b", device="cpu")
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a/seed-1", "b")]
    assert models[0] == models[1]
    assert [record["seed"] for record in records] == [0, 1]
    last = json.loads((tmp_path / "b" / "metrics.jsonl").read_text().splitlines()[-1])
    assert records[1]["acc"] == last["acc"]


class Warned(Listener):
    """Remembers what it was warned of."""

    def __init__(self):
        self.heard = []

    def warned(self, warning):
        self.heard.append(warning)


def test_doubts_about_a_recipes_clusters_are_told(tmp_path):
    """Without a learning rate nothing is learned, and clusters are whatever they are."""
    listener = Warned()
    run_recipe(load_config("digits", [*TINY, "optim.lr=0", "centers.lr=0"]), tmp_path, listener=listener, device="cpu")
    assert listener.heard
    page = html.unescape((tmp_path / "report.html").read_text())
    assert all(warning in page for warning in listener.heard)


def test_settings_of_own_images_are_not_for_a_data_set(tmp_path):
    config = load_config("digits", [*TINY, "data.image_size=16", "data.channels=3"])
    with pytest.raises(UserError, match=r"data.channels: 3 is for own images \(secu fit\), got data.name=digits"):
        run_recipe(config, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_the_run_to_start_from_is_not_the_one_that_force_replaces(tmp_path):
    run_recipe(load_config("digits", TINY), tmp_path / "run", device="cpu")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    second = load_config("digits", [*TINY, f"init_from={tmp_path / 'run'}"])
    with pytest.raises(UserError, match=r"init_from: .*run is the run that force would replace"):
        run_recipe(second, tmp_path / "run", device="cpu", force=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_seeds_side_by_side_give_what_each_gives_alone_and_go_on_after_an_interruption(tmp_path):
    def listen(seed, first):
        assert first == (seed == 0)
        return (
            Interrupting() if seed == 0 and not (tmp_path / "a" / "seed-0" / "metrics.jsonl").exists() else Listener()
        )

    with pytest.raises(KeyboardInterrupt):
        repeat("digits", TINY, [0, 1], tmp_path / "a", together=2, device="cpu", listener=listen)
    records = repeat("digits", TINY, [0, 1], tmp_path / "a", together=2, device="cpu", listener=listen)
    run_recipe(load_config("digits", [*TINY, "seed=1"]), tmp_path / "b", device="cpu")
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a/seed-1", "b")]
    assert models[0] == models[1]
    assert [record["seed"] for record in records] == [0, 1]
    beside = [json.loads((tmp_path / name / "run.json").read_text())["beside"] for name in ("a/seed-1", "b")]
    assert beside == [1, 0]


def test_runs_that_cannot_go_side_by_side_are_refused_and_leave_nothing(tmp_path):
    long = load_config("digits", [*TINY, "optim.epochs=3"])
    wanted = [(load_config("digits", TINY), tmp_path / "a", Listener()), (long, tmp_path / "b", Listener())]
    with pytest.raises(UserError, match="same batch size, number of epochs and engine"):
        run_side_by_side(wanted, device="cpu")
    assert not any(tmp_path.iterdir())
    with pytest.raises(UserError, match="together: 0 must be at least 1"):
        repeat("digits", TINY, [0], tmp_path / "c", together=0, device="cpu", listener=lambda seed, first: Listener())


def test_summary_has_mean_deviation_and_the_best_run():
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
