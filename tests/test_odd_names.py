"""Names that are not UTF-8, look like escapes or like formulas, from the folder to every file that is written."""

import csv
import io
import json
import os
import shutil
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from own_images import rows_of
from secu import SeCu, cli
from secu.base.names import unescape
from secu.results.reading import read_assignments

SHORT = ("optim.epochs=2", "optim.warmup_epochs=0", "encoder.dim=8", "--from-scratch", "--device", "cpu")
PICTURES = os.fsdecode(b"pictures\xff")
ODD = [
    b"byte\xff.png",
    b"byte\\xff.png",
    b"=1+1.png",
    b"'=1+1.png",
    b"\x80.png",
    "\u0080.png".encode(),
    b"two\nlines.png",
    "smile\U0001f600.png".encode(),
    b"-rf.png",
    b"a\\new.png",
]
NAMES = sorted(map(os.fsdecode, [*ODD, *(b"kind\xfe/%d.png" % number for number in range(10))]))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder whose own name is odd, with odd pictures in odd folders."""
    home = tmp_path_factory.mktemp("odd") / os.fsdecode(b"home\xfe")
    (home / PICTURES / os.fsdecode(b"kind\xfe")).mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in NAMES:
        pixels = Image.fromarray(random.integers(0, 256, (8, 8), np.uint8))
        pixels.save(home / PICTURES / name)
    (home / PICTURES / os.fsdecode(b"=bad\xff.png")).write_bytes(b"no picture")
    return home


@pytest.fixture
def secu(home, monkeypatch, capsys, quick_map):
    """Call the program in this process on a console of some encoding; return what it prints."""
    monkeypatch.chdir(home)
    monkeypatch.setenv("SECU_DATA", str(home / "data"))

    def call(*arguments, encoding="utf-8"):
        monkeypatch.setattr(sys, "argv", ["secu", *map(str, arguments)])
        streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="") for _ in range(2)]
        monkeypatch.setattr(sys, "stdout", streams[0])
        monkeypatch.setattr(sys, "stderr", streams[1])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        for stream in streams:
            stream.flush()
        out, err = (stream.buffer.getvalue() for stream in streams)
        assert ended.value.code == 0, err
        return out.decode(encoding)

    return call


@pytest.fixture
def run(secu, home):
    out = home / os.fsdecode(b"run\xff\n")
    if not out.exists():
        fit = ("fit", PICTURES, "-k", 2, "--out", out, "--labels", "folder", *SHORT)
        secu(*fit)
        (out / "assignments.parquet").unlink()
        secu(*fit, "--resume")  # writes all results again
    return out


def test_every_table_of_a_run_holds_every_name(run):
    texts = [row["id"] for row in rows_of(run / "assignments.csv")]
    assert len(set(texts)) == len(NAMES)
    assert sorted(read_assignments(run / "assignments.csv")["id"]) == NAMES
    assert sorted(map(unescape, pq.read_table((run / "assignments.parquet").open("rb"))["id"].to_pylist())) == NAMES
    assert sorted(json.loads((run / "images.json").read_text())) == sorted([*NAMES, os.fsdecode(b"=bad\xff.png")])
    assert [row["id"] for row in rows_of(run / "skipped.csv")] == ["'=bad\\xff.png"]
    assert {row["label"] for row in rows_of(run / "assignments.csv")} == {"kind\\xfe", ""}
    for line in (run / "assignments.csv").read_text(encoding="utf-8").splitlines():
        assert line[0] not in "=+-@"


def test_the_estimator_loads_it_with_the_names_themselves(run, home):
    model = SeCu.load(run)
    assert sorted(model.ids_) == NAMES
    assert len(model.predict([str(home / PICTURES / name) for name in NAMES])) == len(NAMES)
    model.save(home / os.fsdecode(b"saved\xff"))
    assert sorted(SeCu.load(home / os.fsdecode(b"saved\xff")).ids_) == NAMES


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_predictions_go_to_a_file_of_any_name(secu, run, home, kind):
    path = home / f"found\udcff.{kind}"
    secu("predict", run, PICTURES, "-o", path)
    if kind == "csv":
        assert sorted(read_assignments(path)["id"]) == NAMES
        return
    if kind == "jsonl":
        ids = [json.loads(line)["id"] for line in path.read_text(encoding="utf-8").splitlines()]
    else:
        ids = pq.read_table(path.open("rb"))["id"].to_pylist()
    assert sorted(map(unescape, ids)) == NAMES
    assert "=1+1.png" in ids


def test_raw_predictions_have_no_apostrophes(secu, run):
    lines = secu("predict", run, PICTURES, "--raw").splitlines()
    assert sorted(unescape(row["id"]) for row in csv.DictReader(lines)) == NAMES


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_every_console_can_show_every_name(secu, run, home, encoding):
    printed = secu("predict", run, PICTURES, "--raw", encoding=encoding)
    assert sorted(unescape(row["id"]) for row in csv.DictReader(printed.splitlines())) == NAMES
    secu("report", run, encoding=encoding)
    secu("evaluate", run, encoding=encoding)
    printed = secu("sort", run, home / f"sorted-\U0001f600-{encoding}", encoding=encoding)
    assert ("sorted-\U0001f600" if encoding == "utf-8" else "sorted-\\U0001f600") in printed
    fit = ("fit", PICTURES, "-k", 2, "--out", home / "again\U0001f600", *SHORT, "--force")
    secu(*fit, encoding=encoding)
    secu(*fit[:-1], "--dry-run", encoding=encoding)


def test_a_sorted_folder_has_every_picture(secu, run, home):
    place = home / os.fsdecode(b"sorted\xff")
    secu("sort", run, place)
    found = [os.readlink(path) for path in place.rglob("*.png")]
    assert sorted(os.path.relpath(path, home / PICTURES) for path in found) == NAMES


def test_marks_in_the_downloaded_table_find_their_picture(secu, run, home):
    marked = os.fsdecode(b"byte\xff.png")
    with (home / "names.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "cluster", "name", "merged_cluster", "marked_wrong"])
        for row in rows_of(run / "assignments.csv"):  # the report disarms ids in the same way
            wrong = unescape(row["id"]) in (marked, "'=1+1.png")
            writer.writerow([row["id"], row["cluster"], "", row["cluster"], "yes" if wrong else "no"])
    shutil.rmtree(home / "named", ignore_errors=True)
    secu("sort", run, home / "named", "--names", home / "names.csv")
    wrong = [os.path.basename(os.readlink(path)) for path in (home / "named" / "marked-as-wrong").iterdir()]
    assert sorted(wrong) == sorted([marked, "=1+1.png"])


def test_the_report_has_every_name(run):
    page = (run / "report.html").read_text(encoding="utf-8")
    content = json.loads(page.split('id="content">')[1].split("</script>")[0])
    assert sorted(map(unescape, content["ids"])) == NAMES
