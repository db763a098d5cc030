"""What a finished run leaves behind: tables, the sheet of exemplars, the report; and what it is made from."""

import csv
import html
import json
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch.nn.functional import normalize

from secu.base.errors import UserError
from secu.cluster.metrics import score
from secu.data import Images
from secu.methods.base import build_method
from secu.methods.predictor import Predictions, choose, outlier_limits
from secu.results import exemplars
from secu.results.exemplars import choose_exemplars, draw_exemplars, nearest_to_center, square
from secu.results.pictures import LARGE, SMALL, Pictures
from secu.results.reading import read_assignments
from secu.results.report import Report, ReportData
from secu.results.results import ROUNDING, _cluster_table, find_results, write_report, write_results
from secu.settings import load_config
from secu.train.run import Run
from small_runs import new_run

CPU = torch.device("cpu")
SETTINGS = ["heads=[4,6]", "optim.epochs=2", "encoder.dim=16"]
RECORD = {"device": "cpu", "engine": "eager", "versions": {"torch": "9.9"}, "seed": 0, "finished": True}


@dataclass(frozen=True, eq=False)
class Counting(Images):
    """Counts how often each picture is decoded."""

    decoded: Counter = field(default_factory=Counter, kw_only=True)

    def iter_pictures(self, sides):
        self.decoded.update(sides.items())
        return super().iter_pictures(sides)


@pytest.fixture(scope="module")
def digits():
    everything = load_digits()
    pixels = torch.from_numpy(everything.images[:120] * 255 / 16).to(torch.uint8)
    return Counting(pixels[:, None], torch.from_numpy(everything.target[:120]).long())


def make_run(folder, *changes, record=RECORD):
    """Return a run folder as training leaves it, but for the model."""
    run = new_run(folder, load_config("digits", [*SETTINGS, *changes]))
    if record is not None:
        (run.path / "run.json").write_text(json.dumps(record))
    (run.path / "metrics.jsonl").write_text(
        json.dumps({"epoch": 0, "loss": 1.0, "changed": 0.0, "seconds": 3.0}) + "\n"
    )
    return run


def predictor_of(run):
    return build_method(run.config(), 120, (1, 8, 8), CPU).predictor()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("results") / "run")


@pytest.fixture(scope="module")
def results(run, digits):
    return find_results(run, predictor_of(run), digits)


@pytest.fixture(scope="module")
def written(run, results):
    """Return the folder with everything in it."""
    write_results(run, results)
    return run.path


class Fixed:
    """A predictor whose embeddings are given."""

    def __init__(self, embeddings_ND, centers_KD):
        self.embeddings = embeddings_ND
        self.centers = centers_KD

    def embed(self, images):
        return self.embeddings

    def compare(self, embeddings_ND):
        return embeddings_ND @ self.centers.T

    def choose(self, cosines_NK):
        return choose(cosines_NK, 0.05)


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# Results


def test_every_image_gets_its_nearest_center(run, results, digits):
    predictor = predictor_of(run)
    cosines = predictor.embed(digits) @ predictor.centers.T
    assert torch.equal(results.predictions.cluster, cosines.argmax(1))
    assert torch.equal(results.centers, predictor.centers)
    torch.testing.assert_close(results.embeddings.norm(dim=1), torch.ones(120))
    assert torch.equal(results.limits, outlier_limits(results.predictions, 4) - ROUNDING)
    assert results.scores == score(digits.targets.numpy(), results.predictions.cluster.numpy())
    assert results.ids == digits.ids
    assert results.labels == [str(target) for target in digits.targets.tolist()]


def test_labels_have_names_and_are_empty_where_unknown(results, digits):
    targets = torch.tensor([0, 1, -1, 2])
    images = Images(torch.zeros(4, 1, 8, 8), targets, ("cat", "dog"))
    some = replace(results.predictions, **{name: column[:4] for name, column in vars(results.predictions).items()})
    assert replace(results, images=images, embeddings=results.embeddings[:4], predictions=some).labels == [
        "cat",
        "dog",
        "",
        "2",
    ]
    assert replace(results, images=Images(digits.tensor)).labels is None


def test_there_are_no_scores_without_true_labels(run, digits):
    assert find_results(run, predictor_of(run), Images(digits.tensor)).scores is None


@pytest.mark.parametrize("column", ["cluster", "second", "cosine", "embeddings"])
def test_columns_of_another_length_are_refused(results, column):
    if column == "embeddings":
        change = {"embeddings": results.embeddings[:-1]}
    else:
        values = getattr(results.predictions, column)[:-1]
        change = {"predictions": replace(results.predictions, **{column: values})}
    with pytest.raises(AssertionError, match=f"{column}: 119 rows for 120 images"):
        replace(results, **change)


def test_strange_images_are_outliers(tmp_path):
    """Two clusters of similar images, and in each one that resembles neither its cluster nor the other."""
    run = make_run(tmp_path / "run", "heads=[2]")
    draw = torch.Generator().manual_seed(0)
    centers = torch.eye(2, 4)
    usual = normalize(centers.repeat_interleave(40, 0) + 0.1 * torch.randn(80, 4, generator=draw), dim=1)
    strange = normalize(torch.tensor([[1.0, 0.0, 5.0, 0.0], [0.0, 1.0, 0.0, 5.0]]), dim=1)
    images = Images(torch.zeros(82, 1, 8, 8, dtype=torch.uint8))
    results = find_results(run, Fixed(torch.cat([usual, strange]), centers), images)
    assert results.outlier[-2:].all()
    assert results.predictions.cluster[-2:].tolist() == [0, 1]
    assert results.outlier[:-2].float().mean() < 0.05
    write_results(run, results)
    rows = rows_of(run.path / "assignments.csv")
    assert [row["outlier"] for row in rows[-2:]] == ["True", "True"]
    assert [row["outlier"] == "True" for row in rows] == results.outlier.tolist()


def test_copies_of_an_image_are_never_outliers(tmp_path):
    """Their limit is their own cosine, which differs in the last bits from batch to batch."""
    run = make_run(tmp_path / "run", "heads=[2]")
    centers = torch.eye(2, 4)
    copies = normalize(torch.tensor([[3.0, 1.0, 1.0, 1.0]]), dim=1).repeat(40, 1)
    copies[::3] *= 1 - 3e-5
    results = find_results(run, Fixed(copies, centers), Images(torch.zeros(40, 1, 8, 8)))
    assert not results.outlier.any()
    copies[0] *= 1 - 3e-4
    assert find_results(run, Fixed(copies, centers), Images(torch.zeros(40, 1, 8, 8))).outlier.tolist()[0]


def test_the_head_that_answers_is_the_one_of_the_config(tmp_path, digits):
    run = make_run(tmp_path / "run", "head=1")
    results = find_results(run, predictor_of(run), digits)
    assert results.centers.shape == (6, 16)
    write_results(run, results, pictures=False)
    assert [row["cluster"] for row in rows_of(run.path / "clusters.csv")] == [*"012345"]


def test_warnings_are_those_of_the_run_and_of_the_clusters(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", "heads=[2]")
    monkeypatch.setattr(Run, "warnings", lambda self: ("a doubt",))
    embeddings = torch.eye(2, 4)[:1].repeat(10, 1)
    results = find_results(run, Fixed(embeddings, torch.eye(2, 4)), Images(torch.zeros(10, 1, 8, 8)))
    assert results.warnings[0] == "a doubt"
    assert results.warnings[1].startswith("1 of 2 clusters are empty (1)")


# Files


def test_assignments_have_one_row_per_image_in_order(written, results, digits):
    table = read_assignments(written / "assignments.csv")
    header = [
        "id",
        "cluster",
        "confidence",
        "second",
        "second_confidence",
        "cosine",
        "outlier",
        "duplicate_of",
        "label",
    ]
    assert list(table) == header
    assert table["id"] == [str(number) for number in range(120)]
    for i, cosine in enumerate(results.embeddings @ results.centers.T):
        probabilities = torch.softmax(cosine / 0.05, 0)
        best, second = probabilities.argsort(descending=True)[:2].tolist()
        assert (table["cluster"][i], table["second"][i]) == (best, second)
        assert table["confidence"][i] == pytest.approx(float(probabilities[best]), abs=2e-6)
        assert table["second_confidence"][i] == pytest.approx(float(probabilities[second]), abs=2e-6)
        assert table["cosine"][i] == pytest.approx(float(cosine.max()), abs=2e-6)
    assert table["outlier"] == results.outlier.tolist()
    assert table["label"] == [str(target) for target in digits.targets.tolist()]


def test_clusters_have_size_cohesion_and_the_limit_of_outliers(written, results):
    rows = rows_of(written / "clusters.csv")
    assert [int(row["cluster"]) for row in rows] == [0, 1, 2, 3]
    for cluster, row in enumerate(rows):
        cosines = results.predictions.cosine[results.predictions.cluster == cluster]
        assert int(row["size"]) == len(cosines)
        assert float(row["cohesion"]) == pytest.approx(float(cosines.mean()) if len(cosines) else 0, abs=1e-6)
        assert float(row["outlier_below"]) == pytest.approx(float(results.limits[cluster]), abs=1e-6)
        assert row["suggested_name"] == ""  # digits have numbers for names


def test_clusters_have_suggested_names_where_columns_have_words(results):
    words = [("zero", "one", "two", "three")[cluster] for cluster in results.predictions.cluster.tolist()]
    images = replace(results.images, columns={"caption": [f"a picture of {word}" for word in words]})
    table = _cluster_table(replace(results, images=images))
    sizes = results.predictions.cluster.bincount(minlength=4).tolist()
    expected = [word if size >= 3 else "" for word, size in zip(("zero", "one", "two", "three"), sizes, strict=True)]
    assert table["suggested_name"] == expected


def test_all_files_are_written_and_nothing_else(written):
    expected = ["assignments.csv", "assignments.parquet", "clusters.csv", "config.yaml", "exemplars.png"]
    expected += ["metrics.jsonl", "report.html", "run.json", "skipped.csv"]
    assert sorted(path.name for path in written.iterdir()) == expected
    assert (written / "skipped.csv").read_text().splitlines() == ["id,reason"]


def test_images_that_were_left_out_are_listed_with_the_reason(tmp_path, results, digits):
    run = make_run(tmp_path / "run")
    images = Images(digits.tensor, skipped=[("a\nb.png", "cut short")], repeated=[("c.png", "row 2 is row 1")])
    write_results(run, replace(results, images=images), pictures=False)
    assert rows_of(run.path / "skipped.csv") == [
        {"id": "a\\x0ab.png", "reason": "cut short"},
        {"id": "c.png", "reason": "row 2 is row 1"},
    ]


def test_columns_of_the_source_are_carried_along(tmp_path, results, digits):
    run = make_run(tmp_path / "run")
    images = Images(digits.tensor, columns={"camera": [f"no {i}" for i in range(120)]})
    write_results(run, replace(results, images=images), pictures=False)
    assert read_assignments(run.path / "assignments.csv")["camera"][7] == "no 7"


def test_pictures_are_optional_and_progress_is_reported(tmp_path, results):
    run = make_run(tmp_path / "run", record=None)  # nothing but the report needs run.json
    reported = []
    write_results(run, results, pictures=False, busy=reported.append)
    assert reported == ["looking for near-duplicates", "writing the tables"]
    assert not (run.path / "report.html").exists()
    assert not (run.path / "exemplars.png").exists()
    whole = make_run(tmp_path / "whole")
    write_results(whole, results, busy=reported.append)
    assert reported[2:] == ["looking for near-duplicates", "writing the tables", "writing the report"]


def test_every_picture_is_decoded_at_most_once_for_sheet_and_report_together(tmp_path, run, results, digits):
    images = Counting(digits.tensor, digits.targets)
    data = ReportData(title="x", results=results, metrics=[], config=run.config())
    report = Report(data)
    typical = {i for row in choose_exemplars(results.predictions, 4) for i in row}
    write_results(make_run(tmp_path / "run"), replace(results, images=images))
    assert set(images.decoded.values()) == {1}
    assert {i for i, side in images.decoded if side == LARGE} == typical | set(report.on_cards)
    assert {i for i, side in images.decoded if side == SMALL} == set(report.on_map) - typical
    assert sorted(i for i, _ in images.decoded) == list(range(120))  # so few that all of them are on the map


def test_exemplars_that_no_card_shows_are_decoded_once_too(tmp_path, digits):
    """Of many clusters a card has fewer typical pictures than the sheet."""
    clusters = 41
    draw = torch.Generator().manual_seed(0)
    centers = normalize(torch.randn(clusters, 8, generator=draw), dim=1)
    embeddings = normalize(centers.repeat(20, 1) + 0.05 * torch.randn(clusters * 20, 8, generator=draw), dim=1)
    images = Counting(torch.zeros(len(embeddings), 1, 8, 8, dtype=torch.uint8))
    run = make_run(tmp_path / "run", f"heads=[{clusters}]")
    results = find_results(run, Fixed(embeddings, centers), images)
    report = Report(ReportData(title="x", results=results, metrics=[], config=run.config()))
    typical = {i for row in choose_exemplars(results.predictions, clusters) for i in row}
    assert typical - set(report.on_cards)
    write_results(run, results)
    assert set(images.decoded.values()) == {1}
    assert {i for i, side in images.decoded if side == LARGE} == typical | set(report.on_cards)


# report.html


def test_the_report_alone_is_the_same_and_written_atomically(tmp_path, written, results):
    run = make_run(tmp_path / "run")
    (run.path / "report.html").write_text("old")
    before = sorted(path.name for path in run.path.iterdir())
    assert write_report(run, results) == run.path / "report.html"
    assert sorted(path.name for path in run.path.iterdir()) == before
    assert (run.path / "report.html").read_bytes() == (written / "report.html").read_bytes()


def test_the_report_has_the_facts_of_the_run(written):
    page = html.unescape((written / "report.html").read_text())
    for words in ('<h1 id="overview-title">run</h1>', "torch 9.9", "eager", "<dd>3 s</dd>", "120 images in 4 clusters"):
        assert words in page


def test_a_run_that_is_not_finished_says_so_first(tmp_path, results):
    run = make_run(tmp_path / "run", record={**RECORD, "finished": False, "epochs_done": 1})
    shown = html.unescape(write_report(run, replace(results, warnings=("another",))).read_text())
    assert "Healthy run" not in shown
    assert shown.index("training stopped after 1 of") < shown.index("another")


def test_a_run_without_a_record_has_no_report(tmp_path, results):
    run = make_run(tmp_path / "run", record=None)
    with pytest.raises(UserError, match=r"run: .*run has no run\.json; was it stopped early\?"):
        write_report(run, results)


# exemplars.png


def random_predictions(images, clusters, seed=0):
    numbers = torch.Generator().manual_seed(seed)
    embeddings = normalize(torch.randn(images, 5, generator=numbers), dim=1)
    centers = normalize(torch.randn(clusters, 5, generator=numbers), dim=1)
    return embeddings, centers, choose(embeddings @ centers.T, 0.05)


def draw(images, found, clusters):
    rows = choose_exemplars(found, clusters)
    return draw_exemplars(found, rows, Pictures(images, [i for row in rows for i in row]))


def test_exemplars_are_the_members_closest_to_their_center():
    embeddings, centers, found = random_predictions(60, 4)
    for cluster in range(4):
        members = [i for i in range(60) if int(found.cluster[i]) == cluster]
        expected = sorted(members, key=lambda i: -float(embeddings[i] @ centers[cluster]))
        assert nearest_to_center(found, cluster, 5).tolist() == expected[:5]
        assert choose_exemplars(found, 4)[cluster] == expected[:12]


def test_a_small_or_empty_cluster_has_few_or_no_exemplars():
    none = torch.zeros(3)
    found = Predictions(torch.tensor([2, 0, 2]), none, none, none, torch.tensor([0.1, 0.9, 0.7]))
    assert nearest_to_center(found, 2, 12).tolist() == [2, 0]
    assert nearest_to_center(found, 1, 12).tolist() == []
    assert choose_exemplars(found, 3) == [[1], [], [2, 0]]


def box(cluster, column):
    """Return where a tile of the sheet is."""
    pitch = exemplars.TILE + exemplars.GAP
    left = exemplars.MARGIN + column * pitch
    top = exemplars.GAP + cluster * pitch
    return left, top, left + exemplars.TILE, top + exemplars.TILE


@pytest.mark.parametrize(("channels", "side"), [(1, 8), (3, 8), (3, 96), (1, 100), (3, 300)])
def test_the_sheet_shows_the_closest_images_in_the_row_of_their_cluster(channels, side):
    """Every image has a color of its own, so that any mistake in place or channel shows."""
    numbers = np.random.default_rng(0)
    colors = numbers.permutation(256)[:40].reshape(40, 1)
    if channels == 3:
        colors = np.concatenate([colors, colors[::-1], (colors + 99) % 256], 1)
    pixels = torch.from_numpy(colors.astype(np.uint8))[..., None, None].expand(-1, -1, side, side).contiguous()
    _, _, found = random_predictions(40, 3)
    sheet = draw(Images(pixels), found, 3)
    assert sheet.mode == "RGB"
    pitch = exemplars.TILE + exemplars.GAP
    assert sheet.size == (exemplars.MARGIN + exemplars.COLUMNS * pitch + exemplars.GAP, 3 * pitch + exemplars.GAP)
    for cluster in range(3):
        index = nearest_to_center(found, cluster, exemplars.COLUMNS).tolist()
        assert index
        for column in range(exemplars.COLUMNS):
            shown = np.asarray(sheet.crop(box(cluster, column)))
            expected = colors[index[column]] if column < len(index) else 255
            assert (shown == expected).all()


def test_the_sheet_in_the_folder_is_that_of_the_run(written, results, digits):
    with Image.open(written / "exemplars.png") as sheet:
        assert sheet.format == "PNG"
        assert (np.asarray(sheet) == np.asarray(draw(digits, results.predictions, 4))).all()


def test_the_sheet_stays_small_with_many_clusters():
    _, _, found = random_predictions(80, 70)
    sheet = draw(Images(torch.zeros(80, 1, 8, 8, dtype=torch.uint8)), found, 70)
    assert sheet.height == exemplars.MOST_ROWS * (exemplars.TILE + exemplars.GAP) + exemplars.GAP


def test_small_images_keep_their_pixels_visible():
    pixels = torch.arange(64, dtype=torch.uint8).view(8, 8).numpy()
    shown = np.asarray(square(pixels))
    assert shown.shape == (64, 64, 3)
    assert (shown[4::8, 4::8, 0] == pixels).all()
    assert set(shown.ravel().tolist()) == set(range(64))
