"""Clusters in the formats of other tools: complete or not there, and opened by the tools where they are installed.

A tool may be in an environment of its own, as some need other versions of our libraries: ``SECU_TEST_FIFTYONE`` names
the Python that has FiftyOne, and likewise ``SECU_TEST_EMBEDDING_ATLAS`` and ``SECU_TEST_LABEL_STUDIO_SDK``.
"""

import base64
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from PIL import Image

from feature_runs import blobs, paint, write_npy, write_table
from own_images import SHORT, contents, digits, fitted, rows_of, tree, write_folder, write_manifest, write_zip
from secu.apps import originals as pictures_of
from secu.apps.exports import atlas, content, places, writing
from secu.apps.exports import parquet as parquet_files
from secu.apps.exports.content import Request, gather
from secu.apps.exports.writing import FORMATS, export_to
from secu.base import files
from secu.base.errors import UserError
from secu.base.names import unescape
from secu.data import Images
from secu.results.report.build import MAP_UNITS, map_points
from secu.settings import merge
from secu.train.checkpoint import load_predictor
from shard_files import pictures as encoded_pictures
from test_sort import HOSTILE, write_names

pytestmark = pytest.mark.usefixtures("own_cache", "quick_map")

TOOLS = ["fiftyone", "embedding-atlas", "huggingface", "labelstudio"]
WITH_FILES = ["fiftyone", "labelstudio"]


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("originals") / "digits", 120)


@pytest.fixture(scope="module")
def run(tmp_path_factory, originals):
    longer = merge(SHORT, {"optim": {"epochs": 12}})
    made = fitted(tmp_path_factory.mktemp("run"), originals, labels="folder", overrides=longer)
    sizes = [int(row["size"]) for row in rows_of(made.path / "clusters.csv")]
    assert sum(size >= 5 for size in sizes) > 1, "one cluster has all images: nothing to compare"
    return made


def export(run, tool, folder, **more):
    """Export a run and return where it is."""
    force = more.pop("force", False)
    folder.mkdir(exist_ok=True)
    path = folder / ("out.parquet" if tool == "embedding-atlas" else "out")
    export_to(tool, Request(run, device="cpu", **more), path, force=force)
    return path


def vector_of(packed):
    """Return an array that FiftyOne has stored."""
    return np.load(io.BytesIO(zlib.decompress(base64.b64decode(packed))))


def read_fiftyone(path):
    rows = []
    for sample in json.loads((path / "samples.json").read_text())["samples"]:
        row = {name: sample[name] for name in ("cosine", "outlier", "x", "y")}
        row |= {"id": sample["secu_id"], "cluster": sample["cluster_number"], "label": None}
        row |= {"cluster_name": sample["cluster"]["label"], "confidence": sample["cluster"]["confidence"]}
        row |= {"second_name": sample["second"]["label"], "second_confidence": sample["second"]["confidence"]}
        row |= {"label": sample["ground_truth"]["label"]} if "ground_truth" in sample else {}
        row |= {"wrong": "marked wrong" in sample["tags"]}
        row["embedding"] = vector_of(sample["embedding"]["$binary"]["base64"])
        row["picture"] = (path / sample["filepath"]).read_bytes()
        rows.append(row)
    return rows


def read_labelstudio(path):
    rows = []
    names = [choice.get("value") for choice in ElementTree.parse(path / "interface.xml").iter("Choice")]
    for task in json.loads((path / "tasks.json").read_text()):
        row = dict(task["data"])
        url = unquote(row.pop("image"))
        row["picture"] = (path.parent / url.removeprefix("/data/local-files/?d=")).read_bytes()
        (prediction,) = task["predictions"]
        assert prediction["score"] == row["confidence"]
        assert prediction["result"][0]["value"]["choices"] == [row["cluster_name"]]
        assert row["cluster_name"] in names
        row["wrong"] = row.pop("marked_wrong", False)
        rows.append(row)
    return rows


def read_parquet(files):
    rows = []
    for file in files:
        for row in parquet.read_table(io.BytesIO(file.read_bytes())).to_pylist():  # its name may not be UTF-8
            row["picture"] = row.pop("image", {"bytes": None})["bytes"]
            row["wrong"] = row.pop("marked_wrong", False)
            rows.append(row)
    return rows


def read_huggingface(path):
    """Read the files without the library: numbers are replaced by the names of classes."""
    files = sorted((path / "data").iterdir())
    metadata = parquet.read_schema(io.BytesIO(files[0].read_bytes())).metadata
    features = json.loads(metadata[b"huggingface"])["info"]["features"]
    rows = read_parquet(files)
    for row in rows:
        for name in features.keys() & {"label", "cluster_name", "second_name"}:
            row[name] = None if row[name] is None else features[name]["names"][row[name]]
    return rows


def read(tool, path):
    """Return the rows of an export by the id of the image."""
    rows = {
        "fiftyone": read_fiftyone,
        "labelstudio": read_labelstudio,
        "huggingface": read_huggingface,
        "embedding-atlas": lambda path: read_parquet([path]),
    }[tool](path)
    found = {unescape(row["id"]): row for row in rows}
    assert len(found) == len(rows)
    return found


# What is in an export


@pytest.mark.parametrize("tool", TOOLS)
def test_an_export_has_what_the_table_of_the_run_has(run, originals, tmp_path, tool):
    found = read(tool, export(run, tool, tmp_path))
    expected = rows_of(run.path / "assignments.csv")
    assert found.keys() == {row["id"] for row in expected}
    for row in expected:
        ours = found[row["id"]]
        assert ours["cluster"] == int(row["cluster"])
        assert ours["cluster_name"] == f"cluster-{row['cluster']}"
        assert ours["second_name"] == f"cluster-{row['second']}"
        assert ours["label"] == row["label"]
        assert str(ours["outlier"]) == row["outlier"]
        for name in ("confidence", "second_confidence", "cosine"):
            assert ours[name] == pytest.approx(float(row[name]), abs=1e-5)
        if tool != "embedding-atlas":
            assert ours["picture"] == (originals / row["id"]).read_bytes()
        else:
            pixels = np.asarray(Image.open(io.BytesIO(ours["picture"])))
            assert np.array_equal(pixels, np.asarray(Image.open(originals / row["id"])))


@pytest.mark.parametrize("tool", TOOLS)
def test_places_are_those_of_the_report_and_embeddings_those_of_the_model(run, tmp_path, tool):
    found = read(tool, export(run, tool, tmp_path))
    made = gather(Request(run, device="cpu"))
    points = map_points(made.results)
    for index, x, y in zip(points["index"], points["x"], points["y"], strict=True):
        row = found[made.images.ids[index]]
        assert abs(row["x"] * MAP_UNITS - x) <= 1
        assert abs(row["y"] * MAP_UNITS - y) <= 1
    embeddings = load_predictor(run, torch.device("cpu")).embed(made.images).numpy()
    for name, embedding in zip(made.images.ids, embeddings, strict=True):
        if tool != "labelstudio":  # it has no place for one
            assert np.allclose(found[name]["embedding"], embedding, atol=1e-5)


def test_an_image_outside_of_the_sample_lies_between_its_nearest_in_it():
    vectors = torch.nn.functional.normalize(torch.from_numpy(blobs(2_100)[0]).double(), dim=-1)
    found = places.place_all(vectors)
    chosen = places.sample(2_100)
    laid_out = places.lay_out(vectors[chosen].numpy()).points
    assert np.array_equal(found[chosen], laid_out)
    others = sorted(set(range(2_100)) - set(chosen.tolist()))
    assert len(others) == 100
    for i in others:
        cosines = [float(vectors[i] @ vectors[j]) for j in chosen]
        nearest = sorted(range(len(chosen)), key=lambda j: -cosines[j])[:3]
        weights = [1 / max(1 - cosines[j], 1e-6) for j in nearest]
        mean = sum(weight * laid_out[j] for weight, j in zip(weights, nearest, strict=True)) / sum(weights)
        assert np.allclose(found[i], mean, atol=1e-9)


def test_few_images_have_places_too():
    assert places.place_all(torch.eye(2)).shape == (2, 2)


def test_neighbors_are_the_nearest_rows(run, tmp_path, monkeypatch):
    monkeypatch.setattr(atlas, "NEIGHBORS", 4)
    rows = parquet.read_table(export(run, "embedding-atlas", tmp_path)).to_pylist()
    vectors = np.array([row["embedding"] for row in rows], np.float64)
    for i, row in enumerate(rows):
        distances = 1 - vectors @ vectors[i]
        distances[i] = np.inf
        assert i not in row["neighbors"]["ids"]
        assert len(set(row["neighbors"]["ids"])) == 4
        assert np.allclose(row["neighbors"]["distances"], np.sort(distances)[:4], atol=1e-5)
        assert np.allclose(distances[row["neighbors"]["ids"]], np.sort(distances)[:4], atol=1e-5)


@pytest.mark.parametrize("tool", TOOLS)
def test_names_merges_and_marks_of_the_report(run, tmp_path, tool):
    table = rows_of(run.path / "assignments.csv")
    wrong = {row["id"] for row in table[:5]}
    given = ["big <cats> & 'dogs'", "", "big <cats> & 'dogs'"]
    names = write_names(tmp_path / "t.csv", run, given, [0, 1, 0], wrong)
    found = read(tool, export(run, tool, tmp_path / "e", names=names))
    for row in table:
        assert found[row["id"]]["cluster_name"] == (given[int(row["cluster"])] or "cluster-1")
        assert found[row["id"]]["cluster"] == int(row["cluster"])
        assert found[row["id"]]["wrong"] == (row["id"] in wrong)


def write_split_names(path, run, name_of):
    """Write what the report downloads if the first cluster was split: every other image of it has a name."""
    lines = ["id,cluster,name,merged_cluster,marked_wrong,leaf"]
    for number, row in enumerate(rows_of(run.path / "assignments.csv")):
        part = "ab"[number % 2] if row["cluster"] == "0" else ""
        name = "striped cats" if part == "a" else ""
        name_of[row["id"]] = name or f"cluster-{row['cluster']}{part}"
        lines.append(f"{row['id']},{row['cluster']},{name},{row['cluster']}{part},no,{number % 2}")
    path.write_text("\r\n".join(lines) + "\r\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("tool", TOOLS)
def test_parts_of_a_cluster_that_was_split_have_their_own_names(run, tmp_path, tool):
    name_of = {}
    names = write_split_names(tmp_path / "t.csv", run, name_of)
    found = read(tool, export(run, tool, tmp_path / "e", names=names))
    assert {name: row["cluster_name"] for name, row in found.items()} == name_of
    assert len(set(name_of.values())) > 3
    in_first = Counter(name for key, name in name_of.items() if found[key]["cluster"] == 0)
    second = {"cluster-1": "cluster-1", "cluster-2": "cluster-2", "cluster-0": in_first.most_common(1)[0][0]}
    for row in rows_of(run.path / "assignments.csv"):
        assert found[row["id"]]["second_name"] == second[f"cluster-{row['second']}"]


def test_a_table_of_a_split_without_some_images_is_refused(run, tmp_path):
    names = write_split_names(tmp_path / "t.csv", run, {})
    names.write_text("\n".join(names.read_text().splitlines()[:-1]) + "\n")
    with pytest.raises(UserError, match=r"names: there is no row for .*; download the table again"):
        export(run, "huggingface", tmp_path / "e", names=names)


def test_a_table_of_something_else_is_refused_before_images_are_read(run, tmp_path, monkeypatch):
    monkeypatch.setattr(content, "images_of", None)
    (tmp_path / "t.csv").write_text("id,cluster\n1,2\n")
    with pytest.raises(UserError, match=r"t.csv was not downloaded from the report"):
        export(run, "labelstudio", tmp_path / "e", names=tmp_path / "t.csv")
    assert tree(tmp_path / "e") == []


def test_names_are_suggested_if_none_are_given(run):
    made = gather(Request(run, device="cpu"))
    clusters = made.results.predictions.cluster.tolist()
    words = ["beach", "forest", "city"]
    named = replace(made.images, ids=tuple(f"{words[c]}/{i}.png" for i, c in enumerate(clusters)))
    names, wrong, name_of = content._names(replace(made.results, images=named), None)
    assert wrong is None
    assert name_of == {}
    sizes = np.bincount(clusters, minlength=3)
    assert max(sizes) >= 3
    for cluster, size in enumerate(sizes):
        assert names[cluster] == f"cluster-{cluster}" + (f": {words[cluster]}" if size >= 3 else "")


# Sources


def sources(folder):
    """Return pictures of every kind, and the encoded pictures by id; those of an array as pixels."""
    pictures = write_folder(folder / "p", 40)
    files = sorted(pictures.rglob("*.png"))
    by_path = {path.relative_to(pictures).as_posix(): path.read_bytes() for path in files}
    manifest = write_manifest(folder / "t.csv", pictures)
    packed = folder / "a.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        for path in reversed(files):  # can only be read forward, and is not in the order of the names
            archive.add(path, path.relative_to(pictures).as_posix())
    np.save(folder / "a.npy", digits(40)[0])
    return {
        "folder": (pictures, by_path),
        "zip": (write_zip(folder / "a.zip", pictures), by_path),
        "tar.gz": (packed, by_path),
        "table": (manifest, {f"p/{name}": stored for name, stored in by_path.items()}),
        "array": (folder / "a.npy", {str(i): pixels for i, pixels in enumerate(digits(40)[0])}),
    }


@pytest.mark.parametrize("kind", ["zip", "tar.gz", "table", "array"])
def test_pictures_of_every_source(tmp_path, kind):
    source, expected = sources(tmp_path)[kind]
    run = fitted(tmp_path, source)
    for tool in TOOLS:
        found = read(tool, export(run, tool, tmp_path / "out"))
        assert found.keys() == expected.keys()
        cluster = {row["id"]: int(row["cluster"]) for row in rows_of(run.path / "assignments.csv")}
        for name, wanted in expected.items():
            stored = found[name]["picture"]
            assert found[name]["cluster"] == cluster[name]
            if tool == "embedding-atlas" or kind == "array":
                shown = wanted if kind == "array" else np.asarray(Image.open(io.BytesIO(wanted)))
                assert np.array_equal(np.asarray(Image.open(io.BytesIO(stored))), shown)
            else:
                assert stored == wanted
        shutil.rmtree(tmp_path / "out")


def test_a_data_set_is_exported_as_png(tiny_digits, tmp_path):
    found = read("huggingface", export(tiny_digits, "huggingface", tmp_path))
    assert len(found) == 1797
    with Image.open(io.BytesIO(found["7"]["picture"])) as image:
        assert (image.format, image.size) == ("PNG", (8, 8))
    assert {row["label"] for row in found.values()} == {str(digit) for digit in range(10)}


def test_a_picture_without_an_ending_gets_one_by_its_content(tmp_path):
    jpeg = encoded_pictures(2)[1]

    class Rows:
        ids = ("7",)

        def original(self, i):
            return jpeg

    assert pictures_of.original(Rows(), 0, "export") == ("7.jpeg", jpeg)


def test_a_large_picture_is_small_in_the_file_for_a_browser(tmp_path):
    paint(tmp_path / "p", 12)
    for path in (tmp_path / "p").rglob("*.png"):
        Image.open(path).resize((150, 200)).save(path)
    run = fitted(tmp_path, tmp_path / "p", overrides=merge(SHORT, {"data": {"image_size": 16}}))
    found = read("embedding-atlas", export(run, "embedding-atlas", tmp_path / "e"))
    for row in found.values():
        with Image.open(io.BytesIO(row["picture"])) as image:
            assert (image.format, image.size) == ("JPEG", (128, 128))
    full = read("huggingface", export(run, "huggingface", tmp_path / "e"))
    assert {Image.open(io.BytesIO(row["picture"])).size for row in full.values()} == {(150, 200)}


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vectors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECU_DATA", str(folder / "cache"))
        return fitted(folder, write_npy(folder / "v.npy"))


@pytest.mark.parametrize("tool", TOOLS)
def test_vectors_without_pictures(vectors, tmp_path, tool):
    if tool in WITH_FILES:
        with pytest.raises(UserError, match=r"feature vectors without pictures; use --to huggingface or"):
            export(vectors, tool, tmp_path / "e")
        assert tree(tmp_path / "e") == []
        return
    path = export(vectors, tool, tmp_path / "e")
    assert len(read(tool, path)) == 121
    schema = parquet.read_schema(path if path.is_file() else next((path / "data").iterdir()))
    assert "image" not in schema.names
    assert "embedding" in schema.names


@pytest.mark.parametrize("tool", TOOLS)
def test_vectors_with_pictures(tmp_path, tool):
    pictures = write_folder(tmp_path / "p", 40)
    run = fitted(tmp_path, write_table(tmp_path / "v.parquet", pictures))
    found = read(tool, export(run, tool, tmp_path / "e"))
    assert len(found) == 40
    for name, row in found.items():
        wanted = Path(name).read_bytes()
        assert np.array_equal(*(np.asarray(Image.open(io.BytesIO(stored))) for stored in (row["picture"], wanted)))


@pytest.mark.parametrize("tool", TOOLS)
def test_hostile_names(tmp_path, tool):
    (tmp_path / "p").mkdir()
    names = [*HOSTILE, os.fsdecode(b"\xff\xfe.png"), "\\xff.png"]
    for name, pixels in zip(names, digits(20)[0], strict=False):
        Image.fromarray(pixels).save(tmp_path / "p" / name)
    run = fitted(tmp_path, tmp_path / "p", 2)
    found = read(tool, export(run, tool, tmp_path / os.fsdecode(b"\xfe&d=")))
    assert found.keys() == set(names)
    for name, row in found.items():
        assert np.array_equal(
            np.asarray(Image.open(io.BytesIO(row["picture"]))), np.asarray(Image.open(tmp_path / "p" / name))
        )


# Files


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("tool", WITH_FILES)
def test_pictures_are_links_or_copies(run, originals, tmp_path, tool, copy):
    path = export(run, tool, tmp_path, copy=copy)
    files = sorted(path.rglob("*.png"))
    assert len(files) == 120
    assert all(file.is_symlink() != copy for file in files)
    assert copy or {file.resolve() for file in files} == {file.resolve() for file in originals.rglob("*.png")}


def test_copies_inside_the_folder_of_the_pictures_are_refused(tmp_path):
    pictures = write_folder(tmp_path / "p", 30)
    run = fitted(tmp_path, pictures)
    with pytest.raises(UserError, match=r"out is inside .*p, so the next run would include the copies"):
        export(run, "fiftyone", pictures, copy=True)


def test_parts_are_written_one_row_group_at_a_time(run, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_files, "GROUP_ROWS", 16)
    size = sum(len(row["picture"]) for row in read("huggingface", export(run, "huggingface", tmp_path)).values())
    monkeypatch.setattr(parquet_files, "FILE_BYTES", size // 3)
    path = export(run, "huggingface", tmp_path, force=True)
    names = [file.name for file in sorted((path / "data").iterdir())]
    assert names == [f"train-{number:05d}-of-00003.parquet" for number in range(3)]
    assert len(read("huggingface", path)) == 120
    groups = [parquet.ParquetFile(file).metadata for file in sorted((path / "data").iterdir())]
    sizes = [group.row_group(i).num_rows for group in groups for i in range(group.num_row_groups)]
    assert sizes == [16] * 7 + [8]


def test_a_row_group_ends_when_its_pictures_are_large(monkeypatch):
    monkeypatch.setattr(parquet_files, "GROUP_BYTES", 10)
    rows = [{"image": {"bytes": bytes(size)}} for size in (3, 3, 3, 3, 20, 1)]
    assert [len(group) for group in parquet_files.groups_of(rows)] == [4, 1, 1]
    assert [len(group) for group in parquet_files.groups_of([{}, {}])] == [2]


# All or nothing


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("tool", TOOLS)
def test_nothing_is_left_after_an_error(run, tmp_path, monkeypatch, tool, error, before):
    """An earlier export stays until the new one is complete."""
    if before:
        export(run, tool, tmp_path)
    kept = {name: (tmp_path / name).read_bytes() for name in tree(tmp_path) if (tmp_path / name).is_file()}
    usual = content.Content.rows

    def full(made):
        for number, row in enumerate(usual(made)):
            if number == 50:
                raise error
            yield row

    monkeypatch.setattr(content.Content, "rows", full)
    expected = UserError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected, match=r"cannot write .*out.*: No space left" if expected is UserError else None):
        export(run, tool, tmp_path, force=True)
    assert {name: (tmp_path / name).read_bytes() for name in tree(tmp_path) if (tmp_path / name).is_file()} == kept


def test_an_earlier_export_comes_back_if_the_new_one_cannot_take_its_place(run, tmp_path, monkeypatch):
    path = export(run, "labelstudio", tmp_path)
    usual = Path.rename

    def rename(place, target):
        if target == path and place.parent.name != files.REPLACED:
            raise OSError(5, "Input/output error")
        return usual(place, target)

    before = tree(tmp_path)
    monkeypatch.setattr(files, "exchange", lambda first, second: False)
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(UserError, match=r"cannot write .*out: Input/output error"):
        export(run, "labelstudio", tmp_path, force=True)
    assert tree(tmp_path) == before


def test_an_export_that_a_killed_process_moved_aside_is_back_for_the_next_one(run, tmp_path):
    path = export(run, "labelstudio", tmp_path)
    before = tree(tmp_path)
    aside = tmp_path / ".out.01234567.tmp" / files.REPLACED
    aside.mkdir(parents=True)
    path.rename(aside / "out")
    with pytest.raises(UserError, match=r"out already exists; choose another name, or replace it with --force"):
        export(run, "labelstudio", tmp_path)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("tool", TOOLS)
def test_an_export_is_replaced_only_if_asked_for(run, tmp_path, tool):
    path = export(run, tool, tmp_path)
    before = tree(tmp_path)
    with pytest.raises(UserError, match=r"out.* already exists; choose another name, or replace it with --force"):
        export(run, tool, tmp_path)
    if path.is_dir():
        (path / "old").write_text("")
    export(run, tool, tmp_path, force=True)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("tool", TOOLS)
def test_what_is_not_an_export_is_never_replaced(run, tmp_path, tool):
    name = "out.parquet" if tool == "embedding-atlas" else "out"
    for make in (
        lambda path: shutil.copy(run.path / "assignments.parquet", path),
        lambda path: shutil.copytree(run.path, path),
        lambda path: path.write_text("mine"),
    ):
        folder = tmp_path / make.__code__.co_names[0]
        folder.mkdir()
        make(folder / name)
        before = tree(folder)
        with pytest.raises(UserError, match=r"is not an export of secu, so it will not be replaced"):
            export(run, tool, folder, force=True)
        assert tree(folder) == before
        shutil.rmtree(folder)


@pytest.mark.parametrize(("force", "message"), [(False, "already exists"), (True, "is not an export of secu")])
@pytest.mark.parametrize("tool", TOOLS)
def test_what_appears_during_an_export_is_not_replaced(run, tmp_path, monkeypatch, tool, force, message):
    name = "out.parquet" if tool == "embedding-atlas" else "out"
    gather = writing.gather

    def while_somebody_writes_there(*arguments, **named):
        (tmp_path / name).write_text("mine")
        return gather(*arguments, **named)

    monkeypatch.setattr(writing, "gather", while_somebody_writes_there)
    with pytest.raises(UserError, match=message):
        export(run, tool, tmp_path, force=force)
    assert contents(tmp_path) == {name: b"mine"}


def test_an_empty_folder_is_filled(run, tmp_path):
    (tmp_path / "out").mkdir()
    assert (export(run, "labelstudio", tmp_path) / "tasks.json").is_file()


@pytest.mark.parametrize(
    ("tool", "place", "message"),
    [
        ("fityone", "out", r"--to: unknown 'fityone'; did you mean fiftyone\? valid: embedding-atlas, fiftyone, hugg"),
        ("embedding-atlas", "out", r"out must end in .parquet"),
        ("fiftyone", "no/out", r"folder .*no does not exist"),
        ("fiftyone", "x" * 300, r"cannot write xxx.*: File name too long"),
        ("fiftyone", "", r"already exists"),
    ],
)
def test_a_destination_that_cannot_be_is_refused_before_images_are_read(
    run, tmp_path, monkeypatch, tool, place, message
):
    monkeypatch.setattr(content, "images_of", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        export_to(tool, Request(run), Path(place))
    assert tree(tmp_path) == []


def test_an_original_that_vanished_is_named_and_nothing_is_left(run, tmp_path, monkeypatch):
    usual = Images.original

    def moved(images, i):
        found = usual(images, i)
        return found.with_name("gone.png") if i == 7 else found

    monkeypatch.setattr(Images, "original", moved)
    for tool in (*WITH_FILES, "huggingface"):
        with pytest.raises(UserError, match=r"export: .*gone.png does not exist any more; restore it"):
            export(run, tool, tmp_path)
    monkeypatch.setattr(Images, "original", lambda *_: 1 // 0)
    with pytest.raises(UserError, match=r"export: cannot read 0/.*png: (integer )?division"):
        export(run, "labelstudio", tmp_path)
    assert tree(tmp_path) == []


def test_a_disk_without_links_is_reported_and_nothing_is_left(run, tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    with pytest.raises(UserError, match=r"export: this disk has no links \(Operation not permitted\); use --copy"):
        export(run, "fiftyone", tmp_path)
    assert tree(tmp_path) == []


# The command


@pytest.fixture
def secu(monkeypatch, capsys):
    """Call the program in this process."""
    from secu import cli

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["secu", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return call


@pytest.mark.parametrize("tool", TOOLS)
def test_the_command_prints_how_to_open_the_export(secu, run, tmp_path, tool):
    path = tmp_path / ("out.parquet" if tool == "embedding-atlas" else "out")
    code, out, _ = secu("export", run.path, path, "--to", tool, "--device", "cpu")
    assert code == 0
    first, second = out.splitlines()
    assert first == f"120 images in {path}"
    assert second.startswith("open it: ")
    assert str(path) in second
    code, out, err = secu("export", run.path, path, "--to", tool)
    assert (code, out) == (2, "")
    assert "replace it with --force" in err.splitlines()[-1]


def test_options_of_an_export_need_a_tool(secu, run, tmp_path):
    for option in (["--copy"], ["--force"], ["--names", "t.csv"]):
        code, _, err = secu("export", run.path, tmp_path / "m.onnx", *option)
        assert (code, err.strip()) == (2, "secu: export: --names, --copy and --force need --to")
    code, _, err = secu("export", run.path, tmp_path / "photos")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "photos must end in .onnx; to export the clusters, name a tool with --to" in err


def test_the_help_names_every_tool(secu):
    _, out, _ = secu("export", "--help")
    assert all(tool in " ".join(out.split()) for tool in FORMATS.names())
    assert sorted(TOOLS) == FORMATS.names()


# The tools themselves


def python_with(module):
    """Return a Python that has a module, or skip the test."""
    variable = f"SECU_TEST_{module.upper()}"
    if os.environ.get(variable):
        return os.environ[variable]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed, and {variable} names no Python that has it")
    return sys.executable


def run_tool(module, *arguments, **variables):
    """Run a script in a program of its own and return what it prints last, as JSON."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python_with(module), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**environment, **{name: str(value) for name, value in variables.items()}},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


FIFTYONE = """
import json, sys
import fiftyone as fo
made = fo.Dataset.from_dir(dataset_dir=sys.argv[1], dataset_type=fo.types.FiftyOneDataset)
places = made.load_brain_results("map")
made.compute_metadata(progress=False)
where = dict(zip(places.sample_ids.tolist(), places.points.tolist()))
print(json.dumps([
    dict(
        id=s.secu_id, cluster=s.cluster.label, confidence=s.cluster.confidence, second=s.second.label,
        label=s.ground_truth.label, outlier=s.outlier, embedding=s.embedding.tolist(), place=where[s.id],
        width=s.metadata.width, classes=made.classes["cluster"],
    )
    for s in made
]))
"""


def test_fiftyone_imports_it(run, tmp_path):
    python_with("fiftyone")
    path = export(run, "fiftyone", tmp_path)
    home = {"HOME": tmp_path, "FIFTYONE_DO_NOT_TRACK": "true", "FIFTYONE_DATABASE_DIR": tmp_path / "db"}
    printed = run_tool("fiftyone", "-c", FIFTYONE, path, **home)
    found = {row["id"]: row for row in json.loads(printed.splitlines()[-1])}
    ours = read("fiftyone", path)
    assert found.keys() == ours.keys()
    for name, row in found.items():
        assert row["cluster"] == ours[name]["cluster_name"]
        assert row["second"] == ours[name]["second_name"]
        assert (row["confidence"], row["outlier"]) == (ours[name]["confidence"], ours[name]["outlier"])
        assert row["label"] == name.partition("/")[0]
        assert row["embedding"] == ours[name]["embedding"].tolist()
        assert np.allclose(row["place"], [ours[name]["x"], ours[name]["y"]], atol=1e-5)
        assert row["width"] == 8
        assert row["classes"] == ["cluster-0", "cluster-1", "cluster-2"]


def test_embedding_atlas_makes_a_page_of_it(run, tmp_path):
    python_with("embedding_atlas")
    path = export(run, "embedding-atlas", tmp_path)
    columns = atlas.FORMAT.opening.partition("{quoted}")[2].split()
    arguments = ("-m", "embedding_atlas.cli", path, *columns, "--export-application", tmp_path / "page")
    run_tool("embedding_atlas", *arguments, HOME=tmp_path, HF_HUB_OFFLINE=1)
    shown = json.loads((tmp_path / "page" / "data" / "metadata.json").read_text())["props"]["data"]
    assert shown["projection"] == {"x": "x", "y": "y"}
    assert (shown["image"], shown["neighbors"]) == ("image", "neighbors")
    table = parquet.read_table(tmp_path / "page" / "data" / "dataset.parquet").to_pylist()
    ours = parquet.read_table(path).to_pylist()
    for theirs, row in zip(table, ours, strict=True):
        assert theirs["image"]["bytes"] == row["image"]["bytes"]
        assert list(theirs["neighbors"]["ids"]) == row["neighbors"]["ids"]
        assert (theirs["id"], theirs["cluster_name"]) == (row["id"], row["cluster_name"])
        assert theirs["pagerank"] > 0  # of the graph of neighbors


LABEL_STUDIO = """
import json, sys
from label_studio_sdk.label_interface import LabelInterface
interface = LabelInterface(open(sys.argv[1] + "/interface.xml").read())
interface.validate()
tasks = json.load(open(sys.argv[1] + "/tasks.json"))
wrong = json.loads(json.dumps(tasks[0]["predictions"][0]))
wrong["result"][0]["value"]["choices"] = ["x"]
print(json.dumps([
    [interface.validate_task({"data": task["data"]}) for task in tasks],
    [interface.validate_prediction(p, return_errors=True) for task in tasks for p in task["predictions"]],
    interface.validate_prediction(wrong, return_errors=True),
    interface.get_control("cluster").labels,
]))
"""


def test_label_studio_accepts_tasks_and_interface(run, tmp_path):
    python_with("label_studio_sdk")
    given = ['a <b> & "c"', "猫", ""]
    sizes = [int(row["size"]) for row in rows_of(run.path / "clusters.csv")]
    names = write_names(tmp_path / "t.csv", run, given, [0, 1, 2])
    path = export(run, "labelstudio", tmp_path / "e", names=names)
    tasks, errors, wrong, choices = json.loads(run_tool("label_studio_sdk", "-c", LABEL_STUDIO, path))
    assert tasks == [True] * 120
    assert errors == [[]] * 120
    assert "Invalid value for control 'cluster'" in wrong[0]  # so that the check can fail
    numbers = range(3)  # an empty cluster is not in the table
    assert choices == [given[k] if given[k] and sizes[k] else f"cluster-{k}" for k in numbers]
    assert set(choices) & set(given)


@pytest.mark.parametrize("kind", ["pictures", "vectors"])
def test_datasets_loads_it(run, vectors, tmp_path, monkeypatch, kind):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(parquet_files, "FILE_BYTES", 9_000)
    monkeypatch.setattr(parquet_files, "GROUP_ROWS", 50)
    path = export(run if kind == "pictures" else vectors, "huggingface", tmp_path)
    assert kind == "vectors" or len(list((path / "data").iterdir())) > 1
    loaded = datasets.load_dataset(str(path), cache_dir=str(tmp_path / "cache"))["train"]
    ours = read("huggingface", path)
    assert loaded.features["cluster_name"].names == ["cluster-0", "cluster-1", "cluster-2"]
    assert loaded.features["embedding"].length == 8
    if kind == "pictures":
        assert loaded.features["label"].names == ["0", "1", "4"]
        assert isinstance(loaded.features["image"], datasets.Image)
    assert len(loaded) == len(ours)
    for row in loaded:
        mine = ours[row["id"]]
        assert loaded.features["cluster_name"].int2str(row["cluster_name"]) == mine["cluster_name"]
        assert row["confidence"] == mine["confidence"]
        assert np.array_equal(np.float32(row["embedding"]), np.float32(mine["embedding"]))
        if kind == "pictures":
            assert loaded.features["label"].int2str(row["label"]) == mine["label"]
            assert np.array_equal(np.asarray(row["image"]), np.asarray(Image.open(io.BytesIO(mine["picture"]))))
    card = (path / "README.md").read_text()
    assert all(f"| `{name}` |" in card for name in loaded.features)
