"""Damaged tables and records of a run: whatever reads them succeeds, or fails in one line with exit code 2."""

import shutil
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from secu import SeCu, cli
from secu.base.errors import UserError
from secu.results.edits import read_rows
from secu.results.reading import read_assignments, read_limits
from secu.train.run import Run

FILES = (
    "assignments.csv",
    "clusters.csv",
    "images.json",
    "metrics.jsonl",
    "outcome.json",
    "run.json",
    "selflabel.json",
    "skipped.csv",
    "summary.json",
)
CELLS = st.sampled_from(
    [
        "",
        "nan",
        "inf",
        "-1",
        "1e999",
        "9" * 400,
        "true",
        "None",
        "'=1",
        '"',
        "\n",
        "\0",
        "\\xff",
        "é",
        "x" * 140_000,
        "1_0",
    ]
)
VALUES = ["null", "[]", "{}", "true", "-1", "1e999", "NaN", "9" * 400, '"x"', "[[[[]]]]", '{"": null}']
WHOLE = st.sampled_from(
    [b"", b"\xff\xfe", b"\0" * 64, b"[" * 100_000, b"null", b"[]", b"{}", b"id\n", b"\xef\xbb\xbf", b"1,2"]
)
NAMES = b"id,cluster,name,merged_cluster,marked_wrong\na,0,x,0,no\nb,1,,1,yes\n"
QUICK = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
SLOW = settings(QUICK, max_examples=60)


@st.composite
def damaged(draw, content):
    """Return content in which bytes, cells, columns or values have been changed, or which is something else."""
    kind = draw(st.sampled_from(["whole", "cut", "bytes", "cell", "column", "line", "value"]))
    if kind == "whole" or not content:
        return draw(WHOLE)
    place = draw(st.integers(0, len(content) - 1))
    if kind == "cut":
        return content[:place]
    if kind == "bytes":
        return content[:place] + draw(st.binary(min_size=1, max_size=4)) + content[place + 1 :]
    lines = content.split(b"\n")
    row = draw(st.integers(0, len(lines) - 1))
    if kind == "line":
        return b"\n".join([*lines[:row], *lines[row + 1 :], *lines[:row][:2]])
    cells = lines[row].split(b"," if kind != "value" else b": ")
    column = draw(st.integers(0, len(cells) - 1))
    if kind == "column":
        return b"\n".join(b",".join(cell for i, cell in enumerate(line.split(b",")) if i != column) for line in lines)
    if kind == "value":
        cells[column] = draw(st.sampled_from(VALUES)).encode() + b","
        lines[row] = b": ".join(cells)
    else:
        cells[column] = draw(CELLS).encode()
        lines[row] = b",".join(cells)
    return b"\n".join(lines)


@pytest.fixture(scope="module")
def run(tiny_fit, tmp_path_factory):
    """Return a copy of a run that has every kind of file."""
    folder = tmp_path_factory.mktemp("fuzz") / "run"
    shutil.copytree(tiny_fit.path, folder)
    (folder / "outcome.json").write_text('{\n  "warnings": [\n    "small"\n  ],\n  "moved": 0.5\n}\n')
    (folder / "summary.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def kept(run):
    return {name: (run / name).read_bytes() for name in FILES if (run / name).is_file()}


def refused_in_one_line(call):
    """Call a function that may raise a ``UserError`` in one line, and nothing else."""
    message = ""
    try:
        call()
    except UserError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 2_000


@QUICK
@given(st.data())
def test_tables_are_read_or_refused(kept, tmp_path, data):
    content = data.draw(damaged(kept["assignments.csv"][:600]))
    refused_in_one_line(lambda: read_assignments(content, 3))
    path = tmp_path / "table.csv"
    path.write_bytes(data.draw(damaged(kept["clusters.csv"])))
    refused_in_one_line(lambda: read_limits(path, 3))
    path.write_bytes(data.draw(damaged(NAMES)))
    refused_in_one_line(lambda: read_rows(path, 3))


@QUICK
@given(st.data())
def test_records_are_read_or_refused(run, kept, data):
    name = data.draw(st.sampled_from(["images.json", "metrics.jsonl", "outcome.json", "run.json"]))
    (run / name).write_bytes(data.draw(damaged(kept[name])))
    try:
        opened = Run.open(run)
        for read in (opened.images, opened.metrics, opened.outcome, opened.warnings, opened.record, opened.unfinished):
            refused_in_one_line(read)
    finally:
        (run / name).write_bytes(kept[name])


@SLOW
@given(st.data())
def test_every_command_ends_in_one_line(run, kept, tmp_path, monkeypatch, capsys, own_cache, quick_map, data):
    name = data.draw(st.sampled_from(FILES))
    before = kept.get(name)
    content = data.draw(damaged(before or kept["outcome.json"]))
    (run / name).write_bytes(content)
    if name == "selflabel.json":
        (run / "outcome.json").unlink()
    source = Run.open(run).config().data.source
    commands = {
        "predict": (source,),
        "sort": (tmp_path / "sorted",),
        "report": (),
        "evaluate": (),
        "load": (),
    }
    command = data.draw(st.sampled_from(sorted(commands)))
    try:
        if command == "load":
            refused_in_one_line(lambda: SeCu.load(run, device="cpu"))
            return
        monkeypatch.setattr(sys, "argv", ["secu", command, str(run), *map(str, commands[command]), "--device", "cpu"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        errors = capsys.readouterr().err
        assert ended.value.code in (0, 2), errors
        assert ended.value.code == 0 or errors.splitlines()[-1].startswith("secu: ")
        assert "Traceback" not in errors
    finally:
        for file in FILES:
            (run / file).unlink(missing_ok=True)
        for file, original in kept.items():
            (run / file).write_bytes(original)
        shutil.rmtree(tmp_path / "sorted", ignore_errors=True)
