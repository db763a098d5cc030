"""The report without a browser: its numbers against slow oracles, its size, and what is (not) in the file."""

import base64
import hashlib
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import normalize

from secu.data import Images
from secu.metrics import score
from secu.report import ReportData, build, layout, page, thumbnails, write_report
from secu.settings import load_config

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "a \"quoted\" 'name', with commas.jpg",
    "two\nlines\r\n.png",
    "=cmd|' /C calc'!A0",
    "-1+2.png",
    "@sum.png",
    "+49.png",
    "<!-- comment -->",
    "&amp; {{ 7 * 7 }} ${7*7} \u2028.jpg",
    "日本/写真.jpg",
    "broken-\udcff.jpg",
)


def make_data(count=60, clusters=4, *, side=8, channels=1, dim=6, ids=None, labels=True, seed=0, epochs=12, **changes):
    """A small report: points around centers, every picture a different pattern."""
    draw = torch.Generator().manual_seed(seed)
    centers = normalize(torch.randn(clusters, dim, generator=draw), dim=1)
    truth = torch.arange(count) % clusters
    embeddings = normalize(centers[truth] + 0.35 * torch.randn(count, dim, generator=draw), dim=1)
    cosines = embeddings @ centers.T
    top = torch.softmax(cosines / 0.1, 1).topk(2)
    cluster = top.indices[:, 0]
    cosine = cosines.gather(1, cluster[:, None])[:, 0]
    pixels = torch.randint(0, 256, (count, channels, side, side), dtype=torch.uint8, generator=draw)
    names = tuple(f"kind {number}" for number in range(clusters))
    metrics = [
        {"epoch": e, "loss": 2 / (e + 1), "center_loss": 1 / (e + 1), "lr": 0.1, "largest": 20, "smallest": 10 - e % 3}
        | {"changed": 0.5 / (e + 1), "epoch_seconds": 1.0, "seconds": 1.0 * e}
        | ({"acc": 0.5 + e / 40, "nmi": 0.5, "ari": 0.4} if labels and e % 4 == 3 else {})
        for e in range(epochs)
    ]
    values = {
        "title": "Test run",
        "ids": ids or [f"folder/picture {i:05d}.png" for i in range(count)],
        "images": Images(pixels, truth if labels else None, names if labels else ()),
        "embeddings": embeddings,
        "centers": centers,
        "cluster": cluster,
        "confidence": top.values[:, 0],
        "second": top.indices[:, 1],
        "second_confidence": top.values[:, 1],
        "cosine": cosine,
        "outlier": cosine < cosine.quantile(0.1),
        "targets": truth if labels else None,
        "class_names": names if labels else (),
        "metrics": metrics,
        "config": load_config("digits", [f"heads=[{clusters}]"]),
        "facts": {"device": "cpu", "engine": "eager"},
        "scores": score(truth.numpy(), cluster.numpy()) if labels else None,
    }
    return ReportData(**(values | changes))


def hostile_ids(images):
    return [*HOSTILE, *(f"{i}.png" for i in range(len(HOSTILE), images))]


@pytest.fixture(scope="module")
def data():
    return make_data()


class Tags(HTMLParser):
    """Collects what an HTML parser sees: tags, and the text of elements whose content is not markup."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.raw, self.inside = [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag in ("script", "style"):
            self.raw.append((tag, dict(attributes), ""))

    def handle_data(self, text):
        if self.cdata_elem:
            tag, attributes, before = self.raw[-1]
            self.raw[-1] = (tag, attributes, before + text)


def content_of(html):
    ((_, _, text),) = [item for item in Tags(html).raw if item[1].get("id") == "content"]
    return json.loads(text)


# Numbers


def test_a_card_has_its_members_size_cohesion_and_certainty(data):
    for number, card in enumerate(build.cluster_cards(data)):
        members = [i for i in range(len(data.ids)) if int(data.cluster[i]) == number]
        assert card["size"] == len(members)
        assert card["cohesion"] == pytest.approx(sum(float(data.cosine[i]) for i in members) / len(members), abs=1e-4)
        assert card["sure"] == pytest.approx(sum(float(data.confidence[i]) for i in members) / len(members), abs=1e-4)
        assert card["outliers"] == sum(bool(data.outlier[i]) for i in members)


def test_pictures_on_a_card_are_the_most_typical_the_least_certain_and_outliers(data):
    for number, card in enumerate(build.cluster_cards(data)):
        members = [i for i in range(len(data.ids)) if int(data.cluster[i]) == number]
        typical = sorted(members, key=lambda i: -float(data.cosine[i]))[:12]
        others = sorted(set(members) - set(typical), key=lambda i: float(data.confidence[i]))
        strange = sorted((i for i in members if data.outlier[i]), key=lambda i: float(data.cosine[i]))
        assert card["typical"] == typical
        assert card["uncertain"] == others[:6]
        assert card["strange"] == strange[:6]


def test_look_alikes_are_the_nearest_centers_with_the_images_that_waver(data):
    for number, card in enumerate(build.cluster_cards(data)):
        others = [k for k in range(4) if k != number]
        nearest = sorted(others, key=lambda k: -float(data.centers[number] @ data.centers[k]))[:3]
        assert [other["cluster"] for other in card["alike"]] == nearest
        for other in card["alike"]:
            pairs = zip(data.cluster.tolist(), data.second.tolist(), strict=True)
            assert other["second"] == sum(pair == (number, other["cluster"]) for pair in pairs)
            cosine = float(data.centers[number] @ data.centers[other["cluster"]])
            assert other["cosine"] == pytest.approx(cosine, abs=1e-4)


def test_an_empty_cluster_has_a_card_without_numbers_and_is_nobodys_look_alike():
    data = make_data(clusters=3)
    cluster = torch.where(data.cluster == 2, 1, data.cluster)
    cards = build.cluster_cards(make_data(clusters=3, cluster=cluster))
    assert (cards[2]["size"], cards[2]["cohesion"], cards[2]["sure"], cards[2]["typical"]) == (0, None, None, [])
    assert all(other["cluster"] != 2 for card in cards for other in card["alike"])
    assert content_of(page.render(make_data(clusters=3, cluster=cluster)))["clusters"][2]["size"] == 0


def test_the_main_classes_of_a_cluster_are_counted(data):
    for number, card in enumerate(build.cluster_cards(data)):
        found = data.targets[data.cluster == number].tolist()
        assert card["classes"] == [
            [f"kind {target}", found.count(target)]
            for target in sorted(set(found), key=lambda target: (-found.count(target), target))[:3]
        ]


def test_the_overview_counts_pictures_sizes_and_certainty(data):
    summary = build.summarize(data)
    sizes = [data.cluster.tolist().count(k) for k in range(4)]
    assert (summary["images"], summary["clusters"]) == (60, 4)
    assert (summary["smallest"], summary["largest"]) == (min(sizes), max(sizes))
    assert summary["outliers"] == int(data.outlier.sum())
    assert summary["sure"] == pytest.approx(float(data.confidence.mean()))
    assert summary["histogram"] == [sum(min(int(p * 10), 9) == b for p in data.confidence.tolist()) for b in range(10)]


def test_classes_are_matched_as_the_accuracy_matches_them(data):
    truth = build.compare_to_classes(data)
    assert sum(truth["found"]) / 60 == pytest.approx(data.scores.acc)
    for target in range(4):
        for place, cluster in enumerate(truth["order"]):
            both = int(((data.targets == target) & (data.cluster == cluster)).sum())
            assert truth["table"][target][place] == both
    assert [truth["order"].index(cluster) for cluster in truth["match"]] == [0, 1, 2, 3]
    for target, cluster, many in truth["mixups"]:
        assert many == int(((data.targets == target) & (data.cluster == cluster)).sum())
        assert truth["match"][target] != cluster


@pytest.mark.parametrize("classes", [3, 8])
def test_more_or_fewer_classes_than_clusters_leave_some_unmatched(classes):
    targets = torch.arange(60) % classes
    truth = build.compare_to_classes(make_data(targets=targets, class_names=()))
    assert sum(cluster is not None for cluster in truth["match"]) == min(classes, 4)
    assert sorted(truth["order"]) == [0, 1, 2, 3]
    assert truth["classes"] == [str(target) for target in range(classes)]


def test_unknown_labels_are_left_out():
    targets = torch.where(torch.arange(60) < 30, torch.arange(60) % 4, -1)
    truth = build.compare_to_classes(make_data(targets=targets))
    assert sum(truth["totals"]) == 30
    assert build.compare_to_classes(make_data(targets=torch.full((60,), -1))) is None
    assert build.compare_to_classes(make_data(labels=False)) is None


def test_curves_have_a_list_a_quantity_and_gaps_where_an_epoch_has_none(data):
    curves = build.curves(data.metrics)
    assert curves["epoch"] == list(range(12))
    assert curves["loss"][1] == 1.0
    assert [value is None for value in curves["acc"]] == [e % 4 != 3 for e in range(12)]
    assert "acc" not in build.curves(make_data(labels=False).metrics)
    assert build.curves([{"epoch": 0, "loss": math.nan}]) == {"epoch": [0]}
    assert build.curves([]) == {"epoch": []}


def test_many_clusters_show_fewer_pictures_each():
    assert build.pictures_a_card(10) == (12, 6, 6)
    for clusters in (10, 100, 1000, 1001, 4000, 9000):
        assert 0 < sum(build.pictures_a_card(clusters)) * clusters <= 9000
    assert build.pictures_a_card(20_000) == (1, 0, 0)


def test_the_fingerprint_depends_on_names_and_clusters_alone(data):
    same = make_data(title="another", metrics=[])
    assert build.fingerprint(data) == build.fingerprint(same)
    assert build.fingerprint(data) != build.fingerprint(make_data(cluster=data.cluster.flip(0)))
    assert build.fingerprint(data) != build.fingerprint(make_data(ids=[f"x{name}" for name in data.ids]))


# Map


def test_the_map_holds_all_images_or_a_sample_that_never_changes():
    assert layout.sample(5).tolist() == [0, 1, 2, 3, 4]
    first = layout.sample(10_000)
    assert len(first) == len(set(first.tolist())) == 2000
    assert (first == layout.sample(10_000)).all()
    assert (np.diff(first) > 0).all()


def test_the_layout_is_deterministic_and_keeps_groups_together():
    data = make_data(200, 4, dim=16)
    embeddings = build.floats(data.embeddings)
    points, method = layout.lay_out(embeddings)
    assert method == "t-SNE"
    assert points.min() >= 0
    assert points.max() <= 1
    assert (points == layout.lay_out(embeddings).points).all()
    distance = np.linalg.norm(points[:, None] - points[None], axis=-1) + np.eye(200) * 9
    nearest = distance.argmin(1)
    cluster = data.cluster.numpy()
    assert (cluster[nearest] == cluster).mean() > 0.8


@pytest.mark.parametrize(
    "embeddings", [np.ones((50, 4)), np.eye(3), np.full((30, 4), np.nan), np.ones((1, 2)), np.ones((40, 1))]
)
def test_the_layout_survives_what_cannot_be_laid_out(embeddings):
    points, _ = layout.lay_out(embeddings)
    assert points.shape == (len(embeddings), 2)
    assert np.isfinite(points).all()


def test_principal_components_keep_distances(data):
    embeddings = build.floats(data.embeddings)
    components = layout.principal_components(embeddings)
    assert np.linalg.norm(components[3] - components[8]) == pytest.approx(np.linalg.norm(embeddings[3] - embeddings[8]))
    assert (np.diff(components.std(0)) < 1e-9).all()


# Thumbnails


def cell(sheets, number):
    """Cut a thumbnail out of its sheet, as the script does."""
    per_sheet = sheets.columns * sheets.rows
    image = np.asarray(Image.open(io.BytesIO(sheets.jpegs[number // per_sheet])))
    left = number % per_sheet % sheets.columns * sheets.pitch[0]
    top = number % per_sheet // sheets.columns * sheets.pitch[1]
    return image[top : top + sheets.height, left : left + sheets.width]


@pytest.mark.parametrize(
    ("shape", "count"), [((1, 8, 8), 300), ((3, 28, 28), 1200), ((3, 60, 90), 150), ((1, 1, 1), 3)]
)
def test_every_thumbnail_is_found_in_its_cell_and_shows_its_image(shape, count):
    flat = torch.randint(0, 256, (count, shape[0], 1, 1), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    images = Images(flat.expand(count, *shape).contiguous())
    sheets, _, level = thumbnails.make_sheets(images, range(count), [], 10**8)
    assert level == thumbnails.LEVELS[0]
    for number in (0, 1, count // 2, count - 1):
        wanted = flat[number, :, 0, 0].numpy().astype(int)
        got = cell(sheets, number).astype(int).reshape(shape[1] * shape[2], -1)
        assert np.abs(got - wanted).max() <= 6, number
    assert all(max(Image.open(io.BytesIO(jpeg)).size) <= thumbnails.SHEET for jpeg in sheets.jpegs)


def test_thumbnails_keep_their_aspect_and_are_never_enlarged():
    wide = thumbnails.shrink(Images(torch.zeros(1, 3, 100, 400, dtype=torch.uint8)), [0], 96)[0]
    assert wide.shape == (24, 96, 3)
    assert thumbnails.shrink(Images(torch.zeros(1, 1, 8, 8, dtype=torch.uint8)), [0], 96)[0].shape == (8, 8)
    assert thumbnails.shrink(Images(torch.zeros(1, 1, 1, 900, dtype=torch.uint8)), [0], 96)[0].shape == (1, 96)


def test_detail_is_given_up_until_the_budget_is_kept():
    images = Images(torch.randint(0, 256, (80, 3, 96, 96), dtype=torch.uint8))
    rich = thumbnails.make_sheets(images, range(40), range(40, 80), 10**8)
    poor = thumbnails.make_sheets(images, range(40), range(40, 80), 40_000)
    assert poor[0].size + poor[1].size <= 40_000 < rich[0].size
    assert thumbnails.make_sheets(images, range(40), range(40, 80), 0)[2] == thumbnails.LEVELS[-1]
    assert thumbnails.make_sheets(images, [], [], 0)[0].jpegs == ()


# The file


class Noise:
    """Photos of pure noise, the worst case for JPEG, made when they are fetched."""

    targets, class_names = None, ()

    def __init__(self, count, side):
        self.count, self.shape = count, (3, side, side)

    def __len__(self):
        return self.count

    def fetch(self, index):
        draw = torch.Generator().manual_seed(int(index[0]))
        return torch.randint(0, 256, (len(index), *self.shape), dtype=torch.uint8, generator=draw)


@pytest.mark.parametrize(("clusters", "side"), [(10, 32), (1000, 32), (100, 256)])
def test_ten_thousand_images_stay_under_ten_megabytes(tmp_path, clusters, side):
    ids = [f"a/rather/long/folder/name/for/pictures/{i:032d}.jpeg" for i in range(10_000)]
    data = make_data(10_000, clusters, side=1, dim=16, ids=ids, labels=False, images=Noise(10_000, side))
    write_report(tmp_path / "report.html", data)
    assert 1_000_000 < (tmp_path / "report.html").stat().st_size <= 10_000_000


@pytest.mark.parametrize(("count", "length", "held"), [(60_000, 12, True), (60_000, 80, False), (1_000_000, 12, False)])
def test_the_file_does_not_grow_with_the_number_of_images(tmp_path, count, length, held):
    ids = [f"{i:0{length}d}" for i in range(count)]
    data = make_data(count, 10, side=1, dim=6, ids=ids, labels=False, images=Noise(count, 32))
    write_report(tmp_path / "report.html", data)
    assert 1_000_000 < (tmp_path / "report.html").stat().st_size <= 10_000_000
    content = content_of((tmp_path / "report.html").read_text())
    assert (content["ids"] == ids) is held
    assert (content["cluster"] is not None) is held
    assert content["images"] == count
    assert sum(card["size"] for card in content["clusters"]) == count
    pictures = content["pictures"]
    assert len(pictures["index"]) <= 2000 + 240
    assert pictures["name"] == [ids[i] for i in pictures["index"]]
    assert pictures["cluster"] == data.cluster[pictures["index"]].tolist()


def test_no_picture_is_stored_twice(data):
    content = content_of(page.render(data))
    index = content["pictures"]["index"]
    assert len(index) == len(set(index)) == 60
    parts = ("typical", "uncertain", "strange")
    assert content["onCards"] == len({i for card in content["clusters"] for part in parts for i in card[part]})


def test_every_script_and_the_style_are_in_the_file(data):
    html = page.render(data)
    folder = Path(page.__file__).parent
    assert {path.name for path in folder.glob("*.js")} == set(page.SCRIPTS)
    assert all(path.read_text(encoding="utf-8") in html for path in [*folder.glob("*.js"), folder / "style.css"])


def test_the_file_asks_nobody_for_anything(data):
    html = page.render(data)
    assert not re.search(r"(https?:)?//[a-z]", re.sub(r"(?m)^\s*//.*$", "", html), re.IGNORECASE)
    for tag, attributes in Tags(html).tags:
        assert tag not in ("iframe", "object", "embed", "base", "form", "img")
        assert "src" not in attributes
        assert not any(name.startswith("on") or name == "style" for name in attributes)
        assert attributes.get("href", "#").startswith(("#", "data:,"))


def test_the_policy_allows_our_script_and_style_alone(data):
    html = page.render(data)
    parsed = Tags(html)
    (policy,) = [a["content"] for _, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["img-src"] == "data:"
    for tag, attributes, text in parsed.raw:
        if attributes.get("id") != "content":
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert rules[f"{tag}-src"] == f"'sha256-{digest}'"


def test_hostile_text_is_text_everywhere():
    nasty = HOSTILE[:2]
    data = make_data(
        ids=hostile_ids(60),
        title=nasty[1],
        class_names=tuple(nasty * 2),
        warnings=nasty,
        facts=dict([nasty, nasty[::-1]]),
    )
    html = page.render(data)
    plain = page.render(make_data(warnings=("a", "b"), facts={"a": "b", "c": "d"}))
    assert [tag for tag, _ in Tags(html).tags] == [tag for tag, _ in Tags(plain).tags]
    assert "<img" not in html
    assert "<!--" not in html
    content = content_of(html)
    assert content["ids"][: len(HOSTILE)] == list(HOSTILE)
    assert content["truth"]["classes"] == list(nasty * 2)
    html.encode("utf-8")


def test_numbers_that_are_none_do_not_break_the_file():
    nothing = torch.full((60,), math.nan)
    data = make_data(confidence=nothing, cosine=nothing, embeddings=torch.full((60, 6), math.nan), metrics=[])
    content = content_of(page.render(data))
    assert content["clusters"][0]["cohesion"] is None
    assert content["curves"] == {"epoch": []}


def test_the_report_is_written_atomically_and_the_same_every_time(tmp_path, data):
    path = tmp_path / "report.html"
    path.write_text("old")
    write_report(path, data)
    first = path.read_bytes()
    write_report(path, data)
    assert path.read_bytes() == first
    assert list(tmp_path.iterdir()) == [path]


def test_warnings_settings_facts_and_scores_are_told(data):
    html = page.render(make_data(warnings=["The loss is not finite: lower optim.lr."]))
    assert "The loss is not finite: lower optim.lr." in html
    assert "Healthy run" not in html
    assert "Healthy run" in page.render(data)
    assert "ACC" in page.render(data)
    bare = page.render(make_data(labels=False))
    assert 'id="truth"' not in bare
    assert "eager" in bare
    assert "temperature: " in bare


def test_settings_and_times_are_said_in_plain_words():
    assert page.settings(load_config("digits"))["Balance"].startswith("groups held at 90%")
    assert page.settings(load_config("digits", ["constraint.upper=1.5"]))["Balance"].endswith("none over 150%")
    free = load_config("cifar10", ["constraint={kind: none}"])
    assert page.settings(free)["Balance"] == "groups may be of any size"
    assert [page.duration(s) for s in (None, 12.4, 600, 7200)] == [None, "12 s", "10 min", "2.0 h"]


@pytest.mark.parametrize("column", ["cluster", "targets", "embeddings"])
def test_columns_of_another_length_are_refused(data, column):
    with pytest.raises(AssertionError, match=column):
        make_data(**{column: getattr(data, column)[:-1]})
