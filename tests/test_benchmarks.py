"""The benchmarks run on the CPU at tiny sizes, so that nobody's first try fails on a GPU; kept results stay true."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_steps_side_by_side(tmp_path):
    sizes = ["--images", "40", "--epochs", "1", "--beside", "1"]
    report = run("step.py", "--device", "cpu", *sizes, *TINY, str(tmp_path / "a.json"))
    assert report["trainings_side_by_side"] == 2
    assert report["epoch_seconds"] > 0


def test_predict(tmp_path):
    report = run("predict.py", "--device", "cpu", "--images", "600", *TINY[:1], str(tmp_path / "a.json"))
    assert report["share"] == pytest.approx(
        report["predict_images_per_second"] / report["encoder_images_per_second"], rel=0.05
    )


def test_heads(tmp_path):
    sizes = ["--clusters", "4", "--heads", "3", "--batch", "8", "--dim", "16", "--images", "100"]
    report = run("heads.py", "--device", "cpu", *sizes, str(tmp_path / "a.json"))
    assert all(report["constraints"][kind][0] > 0 for kind in ("none", "size", "entropy"))


def test_ordinary_pipeline(tmp_path):
    sizes = ["--images", "64", "--steps", "2", "--workers", "0"]
    report = run("ordinary.py", "--device", "cpu", *sizes, *TINY, str(tmp_path / "a.json"))
    assert report["epoch_seconds"] == pytest.approx(4 * report["step_milliseconds"] / 1000, rel=0.1, abs=0.01)
    assert report["times_faster"] == pytest.approx(report["epoch_seconds"] / report["engine_epoch_seconds"], rel=0.5)


def test_nothing_is_rounded_up(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import results

    assert [results.spread([share]) for share in (0.8775, 0.979999, 0.29, 1.0)] == ["87.75", "97.99", "29.00", "100.00"]
    assert results.spread([0.9, 0.90009]) == "90.00 ± 0.01"


def test_minutes_are_rounded_up(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import results

    assert [results.minutes([seconds]) for seconds in (738.947, 60.0, 60.1)] == ["12.4", "1.0", "1.1"]
    assert results.minutes([6.0, 12.0]) == "0.2"


def test_minutes_are_those_of_runs_that_had_the_device_to_themselves(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import results

    common = {"acc": 0.5, "nmi": 0.5, "ari": 0.5, "device": "cuda", "config": {"paper": None}}
    alone = common | {"seed": 0, "seconds": 600.0, "shared": False}
    beside = common | {"seed": 1, "seconds": 600.0, "shared": False, "beside": 1}
    shared = common | {"seed": 2, "seconds": 6000.0, "shared": True}
    tables = [results.as_table({"a": records}) for records in ([alone, beside, shared], [shared])]
    assert [table.splitlines()[-1].split(" | ")[-2] for table in tables] == ["7.5", "100.0, shared"]


def test_readme_and_csv_are_made_from_the_kept_runs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import results

    runs = results.kept()
    readme = (ROOT / "README.md").read_text()
    assert runs
    assert results.with_table(readme, results.as_table(runs)) == readme
    assert (results.KEPT / "results.csv").read_text() == results.as_csv(runs)


def test_only_a_finished_run_of_the_recipe_is_kept(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import results

    from secu.errors import UserError
    from secu.files import write_json
    from secu.run import Run
    from secu.settings import load_config

    run = Run.create(tmp_path / "run", load_config("digits", ["optim.lr=0.7"]))
    write_json(run.path / "run.json", {"finished": False, "epochs_done": 3})
    with pytest.raises(UserError, match="not made by recipe digits"):
        results.keep("digits", run.path, "abc")
    run = Run.create(tmp_path / "other", load_config("digits"))
    write_json(run.path / "run.json", {"finished": False, "epochs_done": 3})
    with pytest.raises(UserError, match="not finished: 3 epochs"):
        results.keep("digits", run.path, "abc")


def test_self_labeling_is_kept_with_both_seeds_and_only_with_its_usual_settings(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import results

    from secu.errors import UserError
    from secu.files import write_json
    from secu.run import Run
    from secu.second_stage import second_config
    from secu.settings import load_config

    monkeypatch.setattr(results, "KEPT", tmp_path)
    first = Run.create(tmp_path / "first", load_config("digits", ["seed=1"]))
    sizes = {"largest": 900, "smallest": 897}
    epoch = {"epoch": 99, "seconds": 60.0, "acc": 0.9, "nmi": 0.8, "ari": 0.7, "loss": 0.1, **sizes}
    place = {"device": "cpu (one)", "engine": "graph", "versions": {}, "seconds": 60.0, "threads": 1}

    def second(name, settings):
        run = Run.create(tmp_path / name, second_config(first.config(), first.path, 1797, settings))
        run.amend({"loss": {"confidence_temperature": 0.07}})  # as self-labeling does when it has calibrated the model
        run.add_metrics(epoch)
        write_json(run.path / "run.json", {"finished": True, "seed": run.config().seed, **place})
        write_json(run.path / "selflabel.json", {"after": {"sizes": [900, 897], **sizes}})
        return run.path

    paths = [results.keep("digits", second(f"seed-{seed}", {"seed": seed}), "abc") for seed in (1, 2)]
    assert [path.name for path in paths] == ["digits-selflabel-1.json", "digits-selflabel-1-2.json"]
    kept = results.kept()["digits-selflabel"]
    assert [results.seed_of(record) for record in kept] == ["1", "2 from 1"]
    both = "secu train digits --seed 1 && secu selflabel runs/digits seed=2"
    assert kept[1]["command"] == f"export OMP_NUM_THREADS=1; {both}"
    with pytest.raises(UserError, match="not made by secu selflabel"):
        results.keep("digits", second("other", {"optim": {"lr": 0.2}}), "abc")
