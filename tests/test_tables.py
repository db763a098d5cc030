"""The table of assignments: the same content in three formats, whatever the user's columns hold; and read back."""

import csv
import io
import json
import math

import pyarrow.parquet as pq
import pytest
import torch

from secu.base.errors import UserError
from secu.methods.predictor import Predictions
from secu.results.reading import read_assignments, read_limits
from secu.results.tables import OURS, CsvWriter, format_of, make_table, table_writer

COLUMNS = ["id", "cluster", "confidence", "second", "second_confidence", "cosine", "outlier"]


def predictions(count=3):
    numbers = torch.arange(count)
    return Predictions(numbers % 2, 0.9 - numbers / 30, 1 - numbers % 2, numbers / 30, 0.8 - numbers / 3)


def table(columns=None, labels=None, ids=("a", "b", "c")):
    return make_table(ids, predictions(len(ids)), torch.arange(len(ids)) == 1, columns or {}, labels)


def rows(*arguments, **options):
    content = table(*arguments, **options)
    return [dict(zip(content, values, strict=True)) for values in zip(*content.values(), strict=True)]


def part(content, *which):
    return {name: values[slice(*which)] for name, values in content.items()}


def write(path, kind, *batches):
    with table_writer(path, kind) as writer:
        for batch in batches:
            writer.write(batch)
    return path


def read_csv(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# Rows


def test_a_row_holds_what_was_found():
    first, second, _ = rows()
    assert list(first) == list(OURS) == COLUMNS
    assert first == dict(zip(COLUMNS, ["a", 0, 0.9, 1, 0.0, 0.8, False], strict=True))
    assert second["cosine"] == round(0.8 - 1 / 3, 6)
    assert second["outlier"] is True


def test_the_true_label_and_carried_columns_come_last_and_in_order():
    found = rows({"z": ["1", "2", "3"], "a": [None, 2.5, "x"]}, labels=["cat", "", "dog"])
    assert list(found[0]) == [*COLUMNS, "label", "z", "a"]
    assert [row["label"] for row in found] == ["cat", "", "dog"]
    assert [row["a"] for row in found] == [None, 2.5, "x"]
    assert "label" not in rows()[0]


def test_carried_columns_never_hide_ours_or_each_other():
    mine = {"id": ["x"], "source_id": ["y"], "cluster": ["z"], "label": ["l"], "source_source_id": ["w"]}
    (row,) = rows(mine, ids=("a",))
    assert row["id"] == "a"
    assert row["cluster"] == 0
    assert sorted(str(value) for key, value in row.items() if key not in OURS) == ["l", "w", "x", "y", "z"]
    assert row["source_id"] == "x"
    assert row["source_cluster"] == "z"


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_carried_column_with_the_name_of_one_that_only_some_tables_have(tmp_path, kind):
    mine = {name: ["=oak", "b", "c"] for name in ("leaf", "duplicate_of", "label")}
    path = write(tmp_path / f"table.{kind}", kind, table(mine))
    found = read_csv(path) if kind == "csv" else pq.read_table(path).to_pylist()
    assert list(found[0]) == [*COLUMNS, "source_leaf", "source_duplicate_of", "source_label"]
    assert [row["source_leaf"] for row in found] == ["'=oak" if kind == "csv" else "=oak", "b", "c"]


def test_a_name_with_a_newline_or_foreign_bytes_is_one_line():
    found = rows(ids=("a\nb", "\udce4", "<b>ü,\"'", "\\xe4"))
    assert [row["id"] for row in found] == ["a\\x0ab", "\\xe4", "<b>ü,\"'", "\\x5cxe4"]


# Formats


HOSTILE = {
    "text": ['comma, "quote" and\nline', "ünï 猫", ""],
    "latin-1 st\udce4dte": ["K\udcf6ln", "plain", "=1+1"],
    "bytes": [b"cat", b"\xff", b""],
    "mixed": [None, 1.5, True],
}


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_whatever_the_columns_hold_can_be_written_and_read_back(tmp_path, kind):
    """A manifest that Excel saved is Latin-1: its text must not cost the user a trained run."""
    path = write(tmp_path / f"t.{kind}", kind, table(HOSTILE, labels=["\udcff", "b", "c"]))
    if kind == "csv":
        found = read_csv(path)
    elif kind == "jsonl":
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    else:
        found = pq.read_table(path).to_pylist()
    assert list(found[0]) == [*COLUMNS, "label", "text", "latin-1 st\\xe4dte", "bytes", "mixed"]
    assert [row["text"] for row in found] == HOSTILE["text"]
    assert found[0]["latin-1 st\\xe4dte"] == "K\\xf6ln"
    assert [row["bytes"] for row in found] == ["cat", "\\xff", ""]
    assert found[0]["label"] == "\\xff"


FORMULAS = ["=1+1", "'=x", "-2", "@a", "\tb", "+c", "\rd", "plain"]


def formulas():
    return table({"=column": FORMULAS, "-1": ["x"] * 8}, labels=["=cmd()"] * 8, ids=FORMULAS)


def test_no_cell_of_a_csv_file_is_a_formula_and_numbers_stay_numbers(tmp_path):
    content = formulas()
    content["cosine"] = [-0.25] * 8
    path = write(tmp_path / "t.csv", "csv", content)
    with path.open(newline="", encoding="utf-8") as file:
        header, *lines = csv.reader(file)
    assert header[len(COLUMNS) :] == ["label", "'=column", "-1"]
    for cell in (cell for line in [header, *lines] for cell in line):
        assert cell[:1] not in tuple("=+@\t\r")
        assert not cell.startswith("-") or float(cell) < 0
    assert {line[header.index("cosine")] for line in lines} == {"-0.25"}
    assert read_assignments(path) == content | {"id": FORMULAS}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_formulas_stay_exact_in_formats_that_no_spreadsheet_evaluates(tmp_path, kind):
    path = write(tmp_path / f"t.{kind}", kind, formulas())
    if kind == "jsonl":
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    else:
        found = pq.read_table(path).to_pylist()
    assert [row["=column"] for row in found] == FORMULAS
    assert found[0]["id"] == "=1+1"


def test_raw_csv_has_formulas_as_they_are(tmp_path):
    path = tmp_path / "t.csv"
    with table_writer(path, "csv", raw=True) as writer:
        writer.write(formulas())
    assert [row["=column"] for row in read_csv(path)] == FORMULAS


def test_names_that_look_alike_stay_apart_in_every_text_column(tmp_path):
    alike = ["\udcff", "\\xff", "a\nb", "a\\x0ab"]
    content = table({"note": alike}, labels=alike, ids=alike)
    assert len(set(content["id"])) == len(set(content["note"])) == len(set(content["label"])) == 4
    found = read_assignments(write(tmp_path / "t.csv", "csv", content))
    assert found["id"] == found["note"] == found["label"] == alike


def test_csv_and_parquet_have_the_same_content(tmp_path):
    content = table({"note": ["x", "y,z", ""], "number": [1, 2.5, -3]}, labels=["a", "b", "c"])
    text = read_csv(write(tmp_path / "t.csv", "csv", content))
    typed = pq.read_table(write(tmp_path / "t.parquet", "parquet", content))
    assert [{key: str(value) for key, value in row.items()} for row in typed.to_pylist()] == text
    types = {field.name: str(field.type) for field in typed.schema}
    assert [types[name] for name in COLUMNS] == ["string", "int64", "double", "int64", "double", "double", "bool"]
    assert types["number"] == "string"


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_batches_make_the_same_table_as_a_single_write(tmp_path, kind):
    content = table({"note": ["x", None, "z"]})
    whole = write(tmp_path / f"whole.{kind}", kind, content)
    parts = write(tmp_path / f"parts.{kind}", kind, part(content, 1), part(content, 1, 1), part(content, 1, None))
    if kind == "parquet":
        assert pq.read_table(parts).to_pylist() == pq.read_table(whole).to_pylist()
    else:
        assert parts.read_bytes() == whole.read_bytes()


def test_json_has_no_nan(tmp_path):
    path = write(tmp_path / "t.jsonl", "jsonl", table({"age": [math.nan, 3.5, None]}))
    found = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert [row["age"] for row in found] == [None, 3.5, None]
    assert found[0]["outlier"] is False


def test_csv_has_one_header():
    file = io.StringIO()
    writer = CsvWriter(file)
    assert file.getvalue() == ""
    writer.write(part(table(), 2))
    writer.write(part(table(), 2, None))
    lines = file.getvalue().splitlines()
    assert lines[0] == ",".join(COLUMNS)
    assert lines[1] == "a,0,0.9,1,0.0,0.8,False"
    assert len(lines) == 4


def test_a_parquet_file_is_closed_after_an_error(tmp_path):
    def fail():
        with table_writer(tmp_path / "t.parquet", "parquet") as writer:
            writer.write(table())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert pq.read_table(tmp_path / "t.parquet").num_rows == 3


@pytest.mark.parametrize(
    ("path", "kind"),
    [("-", "csv"), ("a.csv", "csv"), ("A.CSV", "csv"), ("x/b.jsonl", "jsonl"), ("c.d.parquet", "parquet")],
)
def test_the_name_decides_the_format(path, kind):
    assert format_of(path) == kind


@pytest.mark.parametrize("path", ["a.json", "a.xlsx", "results", "a.csv.gz", "", "a.csv/", "csv."])
def test_another_name_is_refused(path):
    with pytest.raises(UserError, match=r"output: .* must end in \.csv, \.jsonl or \.parquet$"):
        format_of(path)


# Reading back


CARRIED = {"z": ["1", "2", "3"], "a, b": ["x", 'quote " and\nline', ""]}


def test_assignments_are_read_back_with_their_types(tmp_path):
    content = table(CARRIED, labels=["cat", "", "dog"])
    path = write(tmp_path / "assignments.csv", "csv", content)
    found = read_assignments(path)
    assert found == content
    assert list(found) == [*COLUMNS, "label", *CARRIED]
    for name, kind in OURS.items():
        assert {type(value) for value in found[name]} == {kind}
    assert read_assignments(path.read_bytes()) == found


def test_columns_are_found_by_name_in_any_order(tmp_path):
    content = table(CARRIED)
    path = write(tmp_path / "t.csv", "csv", dict(reversed(content.items())))
    assert read_assignments(path) == content


def test_a_table_without_images_has_all_columns(tmp_path):
    assert read_assignments(write(tmp_path / "t.csv", "csv", part(table(), 0))) == {name: [] for name in COLUMNS}


HEADER = ",".join(COLUMNS)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it has no column 'id'"),
        ("id,cluster\na,0\n", "it has no column 'confidence'"),
        (f"{HEADER}\na,0,0.9\n", "line 2 has 3 values for 7 columns"),
        (f"{HEADER}\na,0,0.9,1,0.0,0.8,False,9\n", "line 2 has 8 values for 7 columns"),
        (f"{HEADER}\na,x,0.9,1,0.0,0.8,False\n", "column 'cluster': 'x' is not a cluster number"),
        (f"{HEADER}\na,0,high,1,0.0,0.8,False\n", "column 'confidence': 'high' is not a number"),
        (f"{HEADER}\na,0,0.9,1,0.0,0.8,no\n", "column 'outlier': 'no' is neither True nor False"),
        (f'{HEADER}\n"a"b,0,0.9,1,0.0,0.8,no\n', "expected after"),
        (b"\xff\xfe", "codec can't decode"),
    ],
)
def test_what_is_not_a_table_of_ours_is_refused_with_the_reason(tmp_path, text, reason):
    content = text if isinstance(text, bytes) else text.encode()
    path = tmp_path / "assignments.csv"
    path.write_bytes(content)
    for source, name in ((path, str(path)), (content, "assignments.csv")):
        with pytest.raises(UserError) as caught:
            read_assignments(source)
        assert str(caught.value).startswith(f"run: {name} is not a table of assignments: ")
        assert reason in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_missing_table_is_named(tmp_path):
    with pytest.raises(
        UserError, match=r"run: cannot read .*gone\.csv: No such file or directory; was the run stopped"
    ):
        read_assignments(tmp_path / "gone.csv")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("a,-1,0.9,1,0.0,0.8,False", "column 'cluster': '-1' is not a cluster number"),
        ("a,3,0.9,1,0.0,0.8,False", "column 'cluster': 3 is not one of 3 clusters"),
        ("a,0,0.9,7,0.0,0.8,False", "column 'second': 7 is not one of 3 clusters"),
        ("a,0,nan,1,0.0,0.8,False", "column 'confidence': 'nan' is not a number"),
        ("a,0,0.9,1,0.0,inf,False", "column 'cosine': 'inf' is not a number"),
        (f"a,{'9' * 400},0.9,1,0.0,0.8,False", "is not a cluster number"),
        (f"{'a' * 200_000},0,0.9,1,0.0,0.8,False", "field larger than field limit"),
    ],
)
def test_impossible_values_are_refused(row, reason):
    with pytest.raises(UserError, match=reason) as caught:
        read_assignments(f"{HEADER}\n{row}\n".encode(), 3)
    assert len(str(caught.value)) < 300


def test_limits_belong_to_their_cluster_in_whatever_order_a_spreadsheet_left_them(tmp_path):
    path = tmp_path / "clusters.csv"
    path.write_text("size,cluster,outlier_below\n5,1,-0.25\n7,0,0.5\n")
    assert read_limits(path, 2) == [0.5, -0.25]


@pytest.mark.parametrize(
    "text",
    [
        "cluster,outlier_below\n0,nan\n1,0.5\n",
        "cluster,outlier_below\n0,0.1\n0,0.5\n",
        "cluster,outlier_below\n0,0.1\n",
        "cluster,outlier_below\n-1,0.1\n0,0.5\n",
        "cluster,size\n0,1\n1,1\n",
        f"cluster,outlier_below\n0,{'1' * 200_000}\n1,0\n",
        "\udcff",
    ],
)
def test_limits_that_are_not_one_per_cluster_are_refused(tmp_path, text):
    path = tmp_path / "clusters.csv"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(UserError, match=r"clusters.csv does not contain outlier_below for 2 clusters: "):
        read_limits(path, 2)
