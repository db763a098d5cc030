"""The benchmarks run on the CPU at tiny sizes, so that no first trial fails on a GPU; tables follow kept results."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from own_images import write_folder
from secu.apps.selflabel import second_config
from secu.base.errors import UserError
from secu.base.files import write_json
from secu.data import Images
from secu.nets.pretrained import missing_extra
from secu.settings import load_config, resolve, with_shape
from small_runs import new_run

ROOT = Path(__file__).resolve().parent.parent
TINY = ["encoder.backbone=small", "heads=[4,6]", "optim.batch_size=16"]


def run(script: str, *arguments: str) -> dict:
    report = Path(arguments[-1])
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments[:-1], "--json", str(report)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=280)
    return json.loads(report.read_text())


def test_step(tmp_path):
    report = run("step.py", "--device", "cpu", "--images", "70", "--epochs", "1", *TINY, str(tmp_path / "a.json"))
    assert report["epoch_seconds"] > 0
    assert report["images_per_second"] == pytest.approx(70 / report["epoch_seconds"], rel=0.05)
    assert 0 <= report["share_of_floor"] < 2  # of two timings, on a machine that may be busy in between
    assert set(report["part_milliseconds"]) >= {"augment", "encoder forward and backward", "heads", "optimiser"}


def test_step_of_imagenet(tmp_path):
    """As on a GPU, but for the sizes: its recipe takes crops from files, and there are none."""
    tiny = ["data.image_size=40", "augment.size=32", "heads=[10,20,30]", "optim.batch_size=8"]
    narrow = ["encoder.backbone=small", "encoder.dim=16", "encoder.prediction_dim=32"]
    sizes = ["--recipe", "imagenet", "--images", "24", "--epochs", "1"]
    report = run("step.py", "--device", "cpu", *sizes, *tiny, *narrow, str(tmp_path / "a.json"))
    assert report["images_per_second"] == pytest.approx(8000 / report["step_milliseconds"], rel=0.05, abs=1)
    assert report["share_of_heads"] == pytest.approx(
        report["part_milliseconds"]["heads"] / report["step_milliseconds"], abs=0.01
    )
    assert report["share_of_floor"] > 0
    assert report["gpu_memory_gb"] == 0


def test_report(tmp_path):
    """Building needs no browser; where there is one, the page is opened once."""
    small = ["--clusters", "3", "--images", "300", "--repeats", "1"]
    script = [sys.executable, str(ROOT / "benchmarks" / "report.py")]
    subprocess.run([*script, "build", str(tmp_path), *small], check=True, capture_output=True, timeout=280)
    size = (tmp_path / "3.html").stat().st_size
    assert 100_000 < size < 10_000_000
    if not Path("/usr/bin/chromedriver").exists():
        pytest.skip("no /usr/bin/chromedriver: apt-get install chromium chromium-driver")
    pytest.importorskip("selenium", reason="selenium is not installed: pip install selenium")
    times = run("report.py", "measure", str(tmp_path), *small, str(tmp_path / "a.json"))["clusters"]["3"]
    assert times["bytes"] == size
    assert 0 < times["first_paint_ms"]["median"] <= times["first_paint_ms"]["most"]
    assert set(times) == {"bytes", "first_paint_ms", "answers_ms", "search_ms", "cut_ms"}


def test_the_arithmetic_of_a_step_is_proportional_to_its_images(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import step as benchmark

    config = load_config("cifar10", TINY)
    images = Images(torch.zeros(32, 3, 32, 32, dtype=torch.uint8))
    work = benchmark.make_step(config, images, torch.device("cpu"), "eager")
    few = benchmark.arithmetic(work, torch.device("cpu"))
    monkeypatch.setattr(benchmark, "COUNTED", 16)
    assert few == pytest.approx(benchmark.arithmetic(work, torch.device("cpu")))


def test_steps_side_by_side(tmp_path):
    sizes = ["--images", "40", "--epochs", "1", "--beside", "1"]
    report = run("step.py", "--device", "cpu", *sizes, *TINY, str(tmp_path / "a.json"))
    assert report["trainings_side_by_side"] == 2
    assert report["epoch_seconds"] > 0


def test_evaluate(tmp_path):
    sizes = ["--images", "24", "--different", "5", "--repeats", "1"]
    tiny = ["encoder.backbone=small", "heads=[4,6]", "data.image_size=40", "augment.size=32"]
    report = run("evaluate.py", "--device", "cpu", "--cheap", *sizes, *tiny, str(tmp_path / "a.json"))
    rate = report["evaluate_images_per_second"]
    assert report["evaluate_seconds"] == pytest.approx(24 / rate, abs=0.01)
    assert report["share"] == pytest.approx(rate / report["decoding_alone"], rel=0.02)


def test_predict(tmp_path):
    report = run("predict.py", "--device", "cpu", "--images", "600", *TINY[:1], str(tmp_path / "a.json"))
    assert report["share"] == pytest.approx(
        report["predict_images_per_second"] / report["encoder_images_per_second"], rel=0.05
    )


@pytest.mark.skipif(missing_extra("lite0") is not None, reason="the extra pretrained is not installed")
def test_embed(tmp_path):
    write_folder(tmp_path / "p", 12, color=True)
    report = run("embed.py", str(tmp_path / "p"), "--sizes", "32", "--device", "cpu", str(tmp_path / "a.json"))
    assert report["images"] == 12
    assert report["original_side"] == 8
    rates = report["rates"]["32"]
    assert 0 < rates["images_per_second"] < rates["decoding_alone"]


def test_heads(tmp_path):
    sizes = ["--clusters", "4", "--heads", "3", "--batch", "8", "--dim", "16", "--images", "100"]
    report = run("heads.py", "--device", "cpu", *sizes, str(tmp_path / "a.json"))
    assert all(report["constraints"][kind][0] > 0 for kind in ("none", "size", "entropy"))


def test_ordinary_pipeline(tmp_path):
    sizes = ["--images", "64", "--steps", "2", "--workers", "0"]
    report = run("ordinary.py", "--device", "cpu", *sizes, *TINY, str(tmp_path / "a.json"))
    assert report["epoch_seconds"] == pytest.approx(4 * report["step_milliseconds"] / 1000, rel=0.1, abs=0.01)
    assert report["times_faster"] == pytest.approx(report["epoch_seconds"] / report["engine_epoch_seconds"], rel=0.5)


@pytest.fixture
def results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import results

    return results


def test_nothing_is_rounded_up(results):
    assert [results.spread([share]) for share in (0.8775, 0.979999, 0.29, 1.0)] == ["87.75", "97.99", "29.00", "100.00"]
    assert results.spread([0.9, 0.90009]) == "90.00 ± 0.01"


def test_minutes_are_rounded_up(results):
    assert [results.minutes([seconds]) for seconds in (738.947, 60.0, 60.1)] == ["12.4", "1.0", "1.1"]
    assert results.minutes([6.0, 12.0]) == "0.2"


def test_minutes_are_those_of_runs_that_had_the_device_to_themselves(results):
    common = {"acc": 0.5, "nmi": 0.5, "ari": 0.5, "device": "cuda", "config": {"paper": None}}
    alone = common | {"seed": 0, "seconds": 600.0, "shared": False}
    beside = common | {"seed": 1, "seconds": 600.0, "shared": False, "beside": 1}
    shared = common | {"seed": 2, "seconds": 6000.0, "shared": True}
    tables = [results.as_table({"a": records}) for records in ([alone, beside, shared], [shared])]
    assert [table.splitlines()[-1].split(" | ")[-2] for table in tables] == ["7.5", "100.0, shared"]


def test_readme_and_csv_are_made_from_the_kept_runs(results):
    runs = results.kept()
    readme = (ROOT / "README.md").read_text()
    assert runs
    assert results.with_table(readme, results.as_table(runs)) == readme
    assert (results.KEPT / "results.csv").read_text() == results.as_csv(runs)


def test_the_settings_of_kept_runs_are_still_read(results):
    """They are spelled as they were when the run was made."""
    for records in results.kept().values():
        for record in records:
            config = resolve(record["config"])
            assert config.method == ("selflabel" if record["recipe"].endswith("-selflabel") else "secu")
            assert config.data.source == f"dataset:{record['recipe'].partition('-')[0]}"


def test_the_picture_shows_every_run_that_was_alone_on_a_gpu(results, tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    epochs = [{"seconds": 60.0, "acc": 0.5}, {"seconds": 120.0, "acc": 0.6}]
    common = {"acc": 0.6, "device": "cuda (x)", "epochs": epochs, "seconds": 120.0, "shared": False}
    first = common | {"seed": 1}
    second = common | {"seed": 2, "first_seed": 1, "shared": True}
    other = common | {"seed": 3, "beside": 1}
    slow = common | {"seed": 4, "device": "cpu (x)"}
    drawn = []
    plot = pyplot.Axes.plot

    def noted(axes, *values, **style):
        drawn.append((values, style["label"]))
        return plot(axes, *values, **style)

    monkeypatch.setattr(pyplot.Axes, "plot", noted)
    results.draw({"a": [first, other, slow], "a-selflabel": [second]}, tmp_path / "picture.png")
    assert [label for _, label in drawn] == ["a, seed 1: 60.00", "a-selflabel, seed 2 from 1: 60.00, GPU shared"]
    assert drawn[0][0] == ([1.0, 2.0], [50.0, 60.0], "-")
    assert drawn[1][0][0] == [3.0, 4.0]  # after its first run
    assert (tmp_path / "picture.png").is_file()


PLACE = {"device": "cpu (one)", "engine": "graph", "versions": {}, "seconds": 60.0, "threads": 1}
SIZES = {"largest": 900, "smallest": 897}
LAST = {"epoch": 99, "seconds": 60.0, "acc": 0.9, "nmi": 0.8, "ari": 0.7, "loss": 0.1, **SIZES}


def test_only_a_finished_run_of_the_recipe_is_kept(results, monkeypatch, tmp_path):
    monkeypatch.setattr(results, "KEPT", tmp_path)
    run = new_run(tmp_path / "run", load_config("digits", ["optim.lr=0.7"]))
    with pytest.raises(UserError, match=r"not finished: it has no run\.json"):
        results.keep("digits", run.path, "abc")
    write_json(run.path / "run.json", {"finished": False, "epochs_done": 3})
    with pytest.raises(UserError, match="not made by recipe digits"):
        results.keep("digits", run.path, "abc")
    # A run states the shape of its images, a recipe leaves it to the data.
    run = new_run(tmp_path / "other", with_shape(load_config("digits"), (1, 8, 8)))
    write_json(run.path / "run.json", {"finished": False, "epochs_done": 3})
    with pytest.raises(UserError, match="not finished: 3 epochs"):
        results.keep("digits", run.path, "abc")
    run.add_metrics(LAST)
    write_json(run.path / "run.json", {"finished": True, "seed": 0, **PLACE})
    path = results.keep("digits", run.path, "abc", whole=70.0)
    assert path == tmp_path / "digits-0.json"
    kept = json.loads(path.read_text())
    old = json.loads((ROOT / "benchmarks" / "results" / "digits-0.json").read_text())
    assert list(kept) == list(old)
    assert kept["epochs"][0].keys() == old["epochs"][0].keys()
    assert (kept["acc"], kept["whole_seconds"], kept["commit"]) == (0.9, 70.0, "abc")
    assert kept["command"] == "export OMP_NUM_THREADS=1; secu train digits --seed 0"


def test_self_labeling_is_kept_with_both_seeds_and_only_with_its_usual_settings(results, monkeypatch, tmp_path):
    monkeypatch.setattr(results, "KEPT", tmp_path)
    first = new_run(tmp_path / "first", load_config("digits", ["seed=1"]))

    def second(name, settings, outcome="outcome.json"):
        run = new_run(tmp_path / name, second_config(first.config(), first.path, 1797, settings))
        run.amend({"loss": {"confidence_temperature": 0.07}})  # as self-labeling does when it has calibrated the model
        run.add_metrics(LAST)
        write_json(run.path / "run.json", {"finished": True, "seed": run.config().seed, **PLACE})
        write_json(run.path / outcome, {"after": {"sizes": [900, 897], **SIZES}})
        return run.path

    one = second("seed-1", {"seed": 1}, "selflabel.json")  # its name in runs of version 0.1
    two = second("seed-2", {"seed": 2})
    paths = [results.keep("digits", path, "abc") for path in (one, two)]
    assert [path.name for path in paths] == ["digits-selflabel-1.json", "digits-selflabel-1-2.json"]
    kept = results.kept()["digits-selflabel"]
    assert [results.seed_of(record) for record in kept] == ["1", "2 from 1"]
    both = "secu train digits --seed 1 && secu selflabel runs/digits seed=2"
    assert kept[1]["command"] == f"export OMP_NUM_THREADS=1; {both}"
    assert kept[1]["config"]["init_from"] == "runs/digits"
    with pytest.raises(UserError, match="not made by secu selflabel"):
        results.keep("digits", second("other", {"optim": {"lr": 0.2}}), "abc")


def test_feed(tmp_path, monkeypatch):
    monkeypatch.setenv("SECU_DATA", str(tmp_path / "data"))
    sizes = ["--images", "6", "--sizes", "32", "--batch", "4", "--repeats", "2"]
    report = run("feed.py", "--device", "cpu", *sizes, str(tmp_path / "a.json"))
    rates = report["rates"]["32"]
    assert list(rates) == ["decoding_alone", "files", "shards"]
    assert rates["decoding_alone"]["share_of_decoding_alone"] == 1
    assert all(value > 0 for found in rates.values() for value in found.values())
