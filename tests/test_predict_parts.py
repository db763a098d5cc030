"""Predictions in a folder of parts: complete, continued after an interruption, and never mixed with others."""

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from secu.apps import predict_parts as parts
from secu.apps.predict import predict_source
from secu.apps.predict_parts import is_folder, predict_parts
from secu.base.errors import UserError
from secu.data import open_source


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(parts, "PART", 50)


def table_of(folder):
    return pa.concat_tables(parquet.read_table(path) for path in sorted(folder.glob("part-*.parquet")))


def test_the_parts_together_are_the_table(tiny_fit, tiny_pictures, tmp_path, small_parts):
    source = open_source(str(tiny_pictures))
    assert predict_parts(tiny_fit, source, tmp_path / "out", "cpu") == []
    predict_source(tiny_fit, source, str(tmp_path / "all.parquet"), "cpu")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["part-00000.parquet", "part-00001.parquet", "part-00002.parquet", "predictions.json"]
    assert table_of(tmp_path / "out").equals(parquet.read_table(tmp_path / "all.parquet"))


def test_only_missing_parts_are_computed(tiny_fit, tiny_pictures, tmp_path, small_parts, monkeypatch):
    source = open_source(str(tiny_pictures))
    predict_parts(tiny_fit, source, tmp_path, "cpu")
    expected = table_of(tmp_path)
    (tmp_path / "part-00001.parquet").unlink()
    seen = []
    write = parts.Stream.write_part
    monkeypatch.setattr(
        parts.Stream, "write_part", lambda self, writer, part: (seen.append(part), write(self, writer, part))
    )
    predict_parts(tiny_fit, source, tmp_path, "cpu")
    assert seen == [range(50, 100)]
    assert table_of(tmp_path).equals(expected)


def test_a_part_without_readable_images_has_no_rows_and_a_list_of_reasons(tiny_fit, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART", 2)
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number in range(3):
        (pictures / f"{number}.png").write_bytes(b"this is no picture")
    skipped = predict_parts(tiny_fit, open_source(str(pictures)), tmp_path / "out", "cpu")
    assert [name for name, _ in skipped] == ["0.png", "1.png", "2.png"]
    assert len(table_of(tmp_path / "out")) == 0
    assert "cluster" in table_of(tmp_path / "out").column_names
    assert (tmp_path / "out" / "skipped-00001.csv").read_text().startswith("id,reason\n2.png,")


def test_a_folder_of_others_is_refused(tiny_fit, tiny_pictures, tmp_path, small_parts):
    source = open_source(str(tiny_pictures))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="taken holds other files"):
        predict_parts(tiny_fit, source, tmp_path / "taken", "cpu")
    with pytest.raises(UserError, match="nowhere does not exist"):
        predict_parts(tiny_fit, source, tmp_path / "nowhere" / "out", "cpu")
    predict_parts(tiny_fit, source, tmp_path / "out", "cpu")
    some = open_source(str(tiny_pictures / "0"))
    with pytest.raises(UserError, match="predictions of another run or of other images"):
        predict_parts(tiny_fit, some, tmp_path / "out", "cpu")


@pytest.mark.parametrize(("output", "expected"), [("out/", True), ("out", False), ("out.csv", False), ("-", False)])
def test_a_folder_is_what_exists_or_ends_with_a_slash(output, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_folder(output) == expected
    (tmp_path / "out").mkdir()
    assert is_folder("out")


def test_a_process_killed_before_anything_was_written_does_not_block_the_folder(
    tiny_fit, tiny_pictures, tmp_path, small_parts
):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".predictions.json.0123abcd.tmp").write_text("{")
    predict_parts(tiny_fit, open_source(str(tiny_pictures)), tmp_path / "out", "cpu")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["part-00000.parquet", "part-00001.parquet", "part-00002.parquet", "predictions.json"]
