"""New images through a trained model: the answers of training, in every format, without holding them all."""

import csv
import io
import json
import shutil
import threading
import time

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from own_images import SHORT, digits, fitted, rows_of, tree, write_folder, write_manifest, write_zip
from secu.apps import predict
from secu.apps.predict import limits_of, predict_source
from secu.base.errors import UserError
from secu.data import ArraySource, open_source, stream
from secu.data.decoding import workers
from secu.settings import merge
from secu.train.listener import Listener
from secu.train.run import Run


@pytest.fixture(scope="module")
def pictures(tiny_pictures):
    return tiny_pictures


@pytest.fixture(scope="module")
def run(tmp_path_factory, pictures):
    asked = merge(SHORT, {"optim": {"epochs": 6}})
    return fitted(tmp_path_factory.mktemp("fitted"), pictures, overrides=asked)


def predicted(run, source, path, **more):
    """Return the rows for a source, as text, and how many images were left out."""
    opened = source if hasattr(source, "decode") else open_source(str(source))
    skipped = predict_source(run, opened, str(path), "cpu", **more)
    return rows_of(path), len(skipped)


def as_predicted(rows):
    """Return the rows without the columns that predict does not write."""
    return [{name: value for name, value in row.items() if name not in ("duplicate_of", "leaf")} for row in rows]


# The same answers


def test_the_images_of_training_get_the_rows_of_training(run, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "AT_ONCE", 120)  # as many as training looks at together: digit for digit
    assert predict_source(run, open_source(pictures), str(tmp_path / "p.csv"), "cpu") == []
    assert rows_of(tmp_path / "p.csv") == as_predicted(rows_of(run.path / "assignments.csv"))


@pytest.mark.parametrize("batch", [1, 7, 119, 120, 1000])
def test_the_answers_do_not_depend_on_the_batch(run, pictures, tmp_path, monkeypatch, batch):
    monkeypatch.setattr(predict, "batch_size", lambda *_, batch=batch: batch)
    found, _ = predicted(run, pictures, tmp_path / "p.csv")
    expected = rows_of(run.path / "assignments.csv")
    assert [row["id"] for row in found] == [row["id"] for row in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert float(ours["confidence"]) == pytest.approx(float(theirs["confidence"]), abs=3e-6)
        assert float(ours["cosine"]) == pytest.approx(float(theirs["cosine"]), abs=3e-6)
        if float(theirs["confidence"]) - float(theirs["second_confidence"]) > 1e-4:
            assert ours["cluster"] == theirs["cluster"]
    assert [row["outlier"] for row in found] == [row["outlier"] for row in expected]


def test_one_image_alone_gets_the_same_answer(run, pictures, tmp_path):
    expected = rows_of(run.path / "assignments.csv")[5]
    (found,), _ = predicted(run, pictures / expected["id"], tmp_path / "p.csv")
    assert found["cluster"] == expected["cluster"]
    assert float(found["confidence"]) == pytest.approx(float(expected["confidence"]), abs=3e-6)


def test_every_kind_of_source_gives_the_same_clusters(run, pictures, tmp_path):
    expected = rows_of(run.path / "assignments.csv")
    shutil.copytree(pictures, tmp_path / "p")
    np.save(tmp_path / "a.npy", np.stack([np.asarray(Image.open(pictures / row["id"])) for row in expected]))
    answers = {row["id"]: row["cluster"] for row in expected}
    for source in (write_zip(tmp_path / "a.zip", pictures), f"{pictures}/**/*.png"):
        found, _ = predicted(run, source, tmp_path / "p.csv")
        assert {row["id"]: row["cluster"] for row in found} == answers
    found, _ = predicted(run, tmp_path / "a.npy", tmp_path / "p.csv")
    assert [row["cluster"] for row in found] == [row["cluster"] for row in expected]
    table = write_manifest(tmp_path / "t.csv", tmp_path / "p", note=["a,b", "c"])
    found, _ = predicted(run, table, tmp_path / "p.csv")
    assert {row["id"].removeprefix("p/"): row["cluster"] for row in found} == answers
    assert list(found[0])[-2:] == ["digit", "note"]
    assert {row["note"] for row in found} == {"a,b", "c"}


def test_images_of_any_size_and_color_are_fitted_to_the_model(run, tmp_path):
    (tmp_path / "p").mkdir()
    for number, side in enumerate((1, 3, 8, 100)):
        Image.new("RGB" if number % 2 else "L", (side, 2 * side)).save(tmp_path / "p" / f"{side}.png")
    found, skipped = predicted(run, tmp_path / "p", tmp_path / "p.csv")
    assert ([row["id"] for row in found], skipped) == (["1.png", "3.png", "8.png", "100.png"], 0)
    assert len({row["cosine"] for row in found}) == 1  # black is black


def test_a_color_model_takes_gray_images(tmp_path):
    color = fitted(tmp_path, write_folder(tmp_path / "color", 40, color=True))
    found, _ = predicted(color, write_folder(tmp_path / "gray", 10), tmp_path / "p.csv")
    assert len(found) == 10


def test_strange_images_are_outliers(run, tmp_path):
    """The limits of the run's own images judge new ones."""
    limits = limits_of(run)
    assert limits.shape == (3,)
    found, _ = predicted(run, ArraySource("x", np.tile(np.eye(8, dtype=np.uint8) * 255, (5, 1, 1))), tmp_path / "p.csv")
    for row in found:
        assert (row["outlier"] == "True") == (float(row["cosine"]) < float(limits[int(row["cluster"])]))


def test_twins_of_the_images_of_training_are_no_outliers(tmp_path, monkeypatch):
    """Their limit is their own cosine, which is rounded in clusters.csv and differs by a bit in another batch."""
    np.save(tmp_path / "twins.npy", np.repeat(digits(1)[0], 20, 0))
    twins = fitted(tmp_path, tmp_path / "twins.npy", 2)
    limits = limits_of(twins)
    for batch in (1, 3, 64):
        monkeypatch.setattr(predict, "batch_size", lambda *_, batch=batch: batch)
        found, _ = predicted(twins, tmp_path / "twins.npy", tmp_path / "p.csv")
        assert {row["outlier"] for row in found} == {"False"}
        assert all(float(row["cosine"]) - limits[int(row["cluster"])] > 5e-5 for row in found)


# The scale of arrays


def test_new_arrays_are_on_the_scale_of_the_run(tmp_path):
    """Dark images alone look like another scale: they must not be brightened."""
    deep = digits(40)[0].astype(np.uint16) * 256
    deep[:5] //= 300
    np.save(tmp_path / "deep.npy", deep)
    run = fitted(tmp_path, tmp_path / "deep.npy")
    np.save(tmp_path / "dark.npy", deep[:5])
    found, _ = predicted(run, tmp_path / "dark.npy", tmp_path / "p.csv")
    for ours, theirs in zip(found, rows_of(run.path / "assignments.csv"), strict=False):
        assert float(ours["cosine"]) == pytest.approx(float(theirs["cosine"]), abs=3e-6)


def test_new_arrays_on_another_scale_are_refused(tmp_path):
    np.save(tmp_path / "unit.npy", digits(40)[0] / 255)
    run = fitted(tmp_path, tmp_path / "unit.npy")
    np.save(tmp_path / "new.npy", digits(40)[0].astype(np.float32))
    message = (
        r"new.npy contains values from 0 to \d+, which are taken as float 0..255; the run was trained on float 0..1"
    )
    with pytest.raises(UserError, match=message):
        predicted(run, tmp_path / "new.npy", tmp_path / "p.csv")
    assert not (tmp_path / "p.csv").exists()
    np.save(tmp_path / "bytes.npy", digits(40)[0])
    found, _ = predicted(run, tmp_path / "bytes.npy", tmp_path / "p.csv")
    assert [row["cluster"] for row in found] == [row["cluster"] for row in rows_of(run.path / "assignments.csv")]


# Formats


def test_all_formats_have_the_same_content(run, pictures, tmp_path, capsys):
    source = open_source(pictures)
    for name in ("p.csv", "p.jsonl", "p.parquet"):
        predict_source(run, source, str(tmp_path / name), "cpu")
    predict_source(run, source, "-", "cpu")
    printed = list(csv.DictReader(io.StringIO(capsys.readouterr().out, newline="")))
    lines = (tmp_path / "p.jsonl").read_text(encoding="utf-8").splitlines()
    objects = [json.loads(line) for line in lines]
    text = rows_of(tmp_path / "p.csv")
    assert printed == text
    assert objects == pq.read_table(tmp_path / "p.parquet").to_pylist()
    assert [{key: str(value) for key, value in row.items()} for row in objects] == text
    assert {key: type(value) for key, value in objects[0].items()} == {
        "id": str,
        "cluster": int,
        "confidence": float,
        "second": int,
        "second_confidence": float,
        "cosine": float,
        "outlier": bool,
    }
    assert tree(tmp_path) == ["p.csv", "p.jsonl", "p.parquet"]


# Bad images


def test_bad_images_are_left_out_and_counted(run, pictures, tmp_path):
    shutil.copytree(pictures, tmp_path / "p")
    for number in range(30):  # more than 5%: there is nothing to stop here
        (tmp_path / "p" / "0" / f"bad{number}.png").write_text("x")
    found, skipped = predicted(run, tmp_path / "p", tmp_path / "p.csv")
    assert (len(found), skipped) == (120, 30)
    assert not any("bad" in row["id"] for row in found)


def test_what_was_refused_while_listing_is_counted_too(run, pictures, tmp_path):
    shutil.copytree(pictures, tmp_path / "p")
    table = write_manifest(tmp_path / "t.csv", tmp_path / "p")
    with table.open("a") as file:
        file.write(",4\np/nowhere.png,4\n")
    found, skipped = predicted(run, table, tmp_path / "p.csv")
    assert (len(found), skipped) == (120, 2)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_nothing_but_bad_images_is_an_error_and_leaves_nothing(run, tmp_path, kind):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "a.png").write_text("x")
    with pytest.raises(UserError, match=r"none of the 1 images in .*p can be read"):
        predict_source(run, open_source(tmp_path / "p"), str(tmp_path / f"out.{kind}"), "cpu")
    assert tree(tmp_path) == ["p", "p/a.png"]


def test_a_failure_leaves_an_old_table_as_it_was(run, tmp_path):
    class Breaking(ArraySource):
        def ready(self, rows, shape, values=None):
            if rows.stop > 30:
                raise KeyboardInterrupt
            return super().ready(rows, shape, values)

    (tmp_path / "p.csv").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        predict_source(run, Breaking("x", digits(60)[0]), str(tmp_path / "p.csv"), "cpu")
    assert {name: (tmp_path / name).read_text() for name in tree(tmp_path)} == {"p.csv": "old"}


def test_files_of_16_bits_after_files_of_8(run, tmp_path):
    """The run has seen no 16-bit file, so a sample of them is measured: 12 of the bits are used."""
    for folder, times in (("shallow", 1), ("deep", 16)):
        (tmp_path / folder).mkdir()
        for number, image in enumerate(digits(40)[0]):
            levels = image.astype(np.uint16) * times if times > 1 else image
            Image.fromarray(levels).save(tmp_path / folder / f"{number}.png")
    source = open_source(tmp_path / "deep")
    deep, _ = predicted(run, source, tmp_path / "deep.csv")
    assert [row["cluster"] for row in deep] == [
        row["cluster"] for row in predicted(run, tmp_path / "shallow", tmp_path / "shallow.csv")[0]
    ]
    assert "taken as int 0..4095" in source.note(source.values_of(run.config().data.values, new=True))
    brighter = copied(run, tmp_path / "run")
    brighter.amend({"data": {"values": "int 0..1023"}})
    expected = r"hold values up to 4,080; the run was trained on int 0..1023: scale them to the same range"
    with pytest.raises(UserError, match=expected):
        predict_source(brighter, open_source(tmp_path / "deep"), str(tmp_path / "p.csv"), "cpu")


# Memory


class Counting(ArraySource):
    """Counts how many images were read and how many rows were written by then."""

    def __init__(self, count, side):
        image = np.pad(digits(1)[0], ((0, 0), (0, side - 8), (0, 0)))
        super().__init__("many", np.broadcast_to(image, (count, side, 8)))
        self.reads = 0
        self.written = 0
        self.ahead = 0  # images read but not written yet, at most

    def count(self, images):
        self.reads += images
        self.ahead = max(self.ahead, self.reads - self.written)

    def read(self, i, values=None):
        self.count(1)
        return super().read(i, values)

    def ready(self, rows, shape, values=None):
        self.count(rows.stop - rows.start if self.array.shape[1] == shape[1] else 0)
        return super().ready(rows, shape, values)


@pytest.mark.parametrize("side", [8, 9])
def test_memory_does_not_grow_with_the_number_of_images(run, tmp_path, monkeypatch, side):
    """No image is read long before the table has the row of an earlier one, whether in slices or one by one."""
    monkeypatch.setattr(predict, "batch_size", lambda *_: 16)
    monkeypatch.setattr(stream, "cores", lambda: 2)
    reach = []
    for count in (400, 4_000):
        source = Counting(count, side)
        usual = predict.Stream._write_one

        def write_one(self, writer, numbers, found, arrival, source=source, usual=usual):
            usual(self, writer, numbers, found, arrival)
            source.written += len(numbers)

        with monkeypatch.context() as patch:
            patch.setattr(predict.Stream, "_write_one", write_one)
            found, _ = predicted(run, source, tmp_path / "p.csv")
        assert len(found) == source.written == source.reads == count
        reach.append(source.ahead)
    assert max(reach) < 400  # how far exactly depends on the thread that reads


@pytest.mark.parametrize("side", [8, 9])
def test_a_table_that_cannot_be_written_ends_the_reading_too(run, tmp_path, monkeypatch, side):
    """While threads are at the next batch."""
    monkeypatch.setattr(predict, "batch_size", lambda *_: 16)
    monkeypatch.setattr(stream, "cores", lambda: 2)
    source = Counting(4_000, side)
    threads = set(threading.enumerate())

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(predict, "make_table", fail)
    with pytest.raises(OSError, match="disk full"):
        predict_source(run, source, str(tmp_path / "p.csv"), "cpu")
    assert source.reads < 400
    assert not set(threading.enumerate()) - threads
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("side", [8, 9])
def test_an_interruption_while_a_thread_starts(run, tmp_path, monkeypatch, side):
    """No pool knows of the thread then: nothing waits for it, and it must not be in anyone's way."""
    source = Counting(400, side)
    usual = threading.Thread.start
    at_work = threading.Event()

    def start(self):
        at_work.clear()
        usual(self)
        assert at_work.wait(10)
        raise KeyboardInterrupt

    def slow(read):
        def method(*arguments):
            at_work.set()
            time.sleep(0.2)
            return read(*arguments)

        return method

    monkeypatch.setattr(source, "ready", slow(source.ready))
    monkeypatch.setattr(workers, "decode", slow(workers.decode))
    monkeypatch.setattr(threading.Thread, "start", start)
    threads = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        predict_source(run, source, str(tmp_path / "p.csv"), "cpu")
    assert not list(tmp_path.iterdir())
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)
        assert not thread.is_alive()


def test_the_table_of_the_images_is_not_written_over(run, pictures, tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("path\n" + "".join(f"{path}\n" for path in sorted(pictures.rglob("*.png"))))
    before = table.read_bytes()
    with pytest.raises(UserError, match=r"output: .*table.csv is the source of the images; choose another file"):
        predict_source(run, open_source(str(table)), str(tmp_path / "." / "table.csv"), "cpu")
    assert table.read_bytes() == before


def test_progress_is_reported_image_by_image(run, pictures, tmp_path):
    class Progress(Listener):
        def __init__(self):
            self.done = []

        def reading(self, done, total):
            assert total == 121
            self.done.append(done)

    shutil.copytree(pictures, tmp_path / "p")
    (tmp_path / "p" / "bad.png").write_text("x")
    progress = Progress()
    predict_source(run, open_source(tmp_path / "p"), str(tmp_path / "p.csv"), "cpu", progress)
    assert progress.done == sorted(progress.done)
    assert progress.done[-1] == 121


# Runs that cannot predict


def copied(run, path):
    shutil.copytree(run.path, path)
    return Run.open(path)


def test_a_run_without_clusters_was_stopped_early(run, pictures, tmp_path):
    other = copied(run, tmp_path / "run")
    (other.path / "clusters.csv").unlink()
    with pytest.raises(UserError, match=r"has no clusters.csv; was it stopped early\?"):
        predict_source(other, open_source(pictures), str(tmp_path / "p.csv"), "cpu")
    (other.path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="has no model yet"):
        predict_source(other, open_source(pictures), str(tmp_path / "p.csv"), "cpu")
    assert not (tmp_path / "p.csv").exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "cluster,size\n0,1\n",
        "cluster,outlier_below\n0,0.5\n",
        "cluster,outlier_below\n0,x\n1,y\n2,z\n",
        "a,outlier_below\n0\n",
    ],
)
def test_a_damaged_table_of_clusters_is_named(run, pictures, tmp_path, text):
    other = copied(run, tmp_path / "run")
    (other.path / "clusters.csv").write_text(text)
    with pytest.raises(UserError, match=r"clusters.csv does not contain outlier_below for 3 clusters"):
        predict_source(other, open_source(pictures), str(tmp_path / "p.csv"), "cpu")


def test_a_model_of_another_run_is_refused(run, pictures, tmp_path):
    other = copied(run, tmp_path / "run")
    text = (other.path / "config.yaml").read_text()
    (other.path / "config.yaml").write_text(text.replace("dim: 8\n", "dim: 16\n"))
    with pytest.raises(UserError, match="does not match its data and config"):
        predict_source(other, open_source(pictures), str(tmp_path / "p.csv"), "cpu")


def test_nothing_is_unpickled_from_a_run_that_came_by_mail(run, pictures, tmp_path, monkeypatch):
    other = copied(run, tmp_path / "run")
    (other.path / "state.safetensors").write_bytes(b"\x80\x04cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    monkeypatch.setattr(torch, "load", lambda *a, **k: pytest.fail("torch.load was called"))
    found, _ = predicted(other, pictures, tmp_path / "p.csv")
    assert len(found) == 120


def test_a_wrong_output_is_reported_before_any_work(run, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(predict, "Stream", lambda *a: pytest.fail("work was started"))
    with pytest.raises(UserError, match=r"must end in .csv, .jsonl or .parquet"):
        predict_source(run, open_source(pictures), str(tmp_path / "p.txt"), "cpu")
    with pytest.raises(UserError, match=r"output: folder .*nowhere does not exist"):
        predict_source(run, open_source(pictures), str(tmp_path / "nowhere" / "p.csv"), "cpu")
