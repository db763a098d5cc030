"""The report without a browser: its numbers against slow oracles, its size, and what is (not) in the file."""

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from secu.base.names import escape
from secu.cluster.metrics import score
from secu.data import Images
from secu.methods.predictor import Predictions
from secu.results.found import Results
from secu.results.pictures import Pictures
from secu.results.report import Report, ReportData, build, cards, layout, limits, page, truth
from secu.results.report.values import floats
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


def make_metrics(epochs=12, labels=True):
    """Return a record per epoch; true labels are scored in every fourth one."""
    return [
        {"epoch": e, "loss": 2 / (e + 1), "center_loss": 1 / (e + 1), "lr": 0.1, "largest": 20, "smallest": 10 - e % 3}
        | {"changed": 0.5 / (e + 1), "epoch_seconds": 1.0, "seconds": 1.0 * e}
        | ({"acc": 0.5 + e / 40, "nmi": 0.5, "ari": 0.4} if labels and e % 4 == 3 else {})
        for e in range(epochs)
    ]


def make_results(count=60, clusters=4, *, side=8, channels=1, dim=6, labels=True, images=None, seed=0, **changes):
    """Return points around centers; every picture is a different pattern. ``changes`` replace columns."""
    draw = torch.Generator().manual_seed(seed)
    centers = normalize(torch.randn(clusters, dim, generator=draw), dim=1)
    targets = torch.arange(count) % clusters
    embeddings = normalize(centers[targets] + 0.35 * torch.randn(count, dim, generator=draw), dim=1)
    cosines = embeddings @ centers.T
    top = torch.softmax(cosines / 0.1, 1).topk(2)
    columns = {
        "cluster": top.indices[:, 0],
        "confidence": top.values[:, 0],
        "second": top.indices[:, 1],
        "second_confidence": top.values[:, 1],
        "cosine": cosines.gather(1, top.indices[:, :1])[:, 0],
    }
    columns |= {name: changes[name] for name in columns if name in changes}
    if images is None:
        images = Images(
            torch.randint(0, 256, (count, channels, side, side), dtype=torch.uint8, generator=draw),
            changes.get("targets", targets) if labels else None,
            changes.get("class_names", tuple(f"kind {number}" for number in range(clusters))) if labels else (),
            ids=changes.get("ids") or [f"folder/picture {i:05d}.png" for i in range(count)],
        )
    limit = columns["cosine"].nan_to_num().quantile(0.1) if count < 100_000 else torch.tensor(0.5)
    return Results(
        images=images,
        embeddings=changes.get("embeddings", embeddings),
        centers=centers,
        predictions=Predictions(**columns),
        limits=limit.expand(clusters),
        scores=score(targets.numpy(), columns["cluster"].numpy()) if labels else None,
        warnings=(),
    )


def make_data(count=60, clusters=4, *, title="Test run", metrics=None, facts=None, warnings=(), labels=True, **options):
    """Return what a small report is made from."""
    return ReportData(
        title=title,
        results=make_results(count, clusters, labels=labels, **options),
        metrics=make_metrics(labels=labels) if metrics is None else metrics,
        config=load_config("digits", [f"heads=[{clusters}]"]),
        facts={"device": "cpu", "engine": "eager"} if facts is None else facts,
        warnings=warnings,
    )


def render(data):
    report = Report(data)
    return report.render(Pictures(data.results.images, report.on_cards, report.on_map))


def write_page(path, data):
    path.write_text(render(data), encoding="utf-8")


def hostile_ids(images):
    return [*HOSTILE, *(f"{i}.png" for i in range(len(HOSTILE), images))]


@pytest.fixture(scope="module")
def data():
    return make_data()


@pytest.fixture(scope="module")
def results(data):
    return data.results


@pytest.fixture(scope="module")
def found(results):
    return results.predictions


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


def members_of(found, cluster):
    return [i for i, number in enumerate(found.cluster.tolist()) if number == cluster]


def test_a_card_has_its_members_size_cohesion_and_confidence(results, found):
    for number, card in enumerate(cards.cluster_cards(results)):
        members = members_of(found, number)
        cosine = sum(float(found.cosine[i]) for i in members) / len(members)
        confidence = sum(float(found.confidence[i]) for i in members) / len(members)
        assert card["size"] == len(members)
        assert card["cohesion"] == pytest.approx(cosine, abs=1e-4)
        assert card["confidence"] == pytest.approx(confidence, abs=1e-4)
        assert card["outliers"] == sum(bool(results.outlier[i]) for i in members)
    assert results.outlier.sum() == 6


def test_pictures_on_a_card_are_the_most_typical_the_least_confident_and_outliers(results, found):
    for number, card in enumerate(cards.cluster_cards(results)):
        members = members_of(found, number)
        typical = sorted(members, key=lambda i: -float(found.cosine[i]))[:12]
        others = sorted(set(members) - set(typical), key=lambda i: float(found.confidence[i]))
        outlying = sorted((i for i in members if results.outlier[i]), key=lambda i: float(found.cosine[i]))
        assert card["typical"] == typical
        assert card["uncertain"] == others[:6]
        assert card["outlying"] == outlying[:6]


def test_similar_clusters_have_the_nearest_centers_and_count_second_choices(results, found):
    centers = results.centers
    for number, card in enumerate(cards.cluster_cards(results)):
        others = [k for k in range(4) if k != number]
        nearest = sorted(others, key=lambda k: -float(centers[number] @ centers[k]))[:3]
        assert [other["cluster"] for other in card["similar"]] == nearest
        for other in card["similar"]:
            pairs = zip(found.cluster.tolist(), found.second.tolist(), strict=True)
            assert other["second"] == sum(pair == (number, other["cluster"]) for pair in pairs)
            cosine = float(centers[number] @ centers[other["cluster"]])
            assert other["cosine"] == pytest.approx(cosine, abs=1e-4)


def test_an_empty_cluster_has_a_card_without_numbers_and_is_similar_to_none():
    cluster = make_results(clusters=3).predictions.cluster
    data = make_data(clusters=3, cluster=torch.where(cluster == 2, 1, cluster))
    shown = cards.cluster_cards(data.results)
    empty = shown[2]
    assert (empty["size"], empty["cohesion"], empty["confidence"], empty["typical"]) == (0, None, None, [])
    assert all(other["cluster"] != 2 for card in shown for other in card["similar"])
    assert content_of(render(data))["clusters"][2]["size"] == 0


def test_the_main_classes_of_a_cluster_are_counted(results, found):
    for number, card in enumerate(cards.cluster_cards(results)):
        targets = results.images.targets[found.cluster == number].tolist()
        assert card["classes"] == [
            [f"kind {target}", targets.count(target)]
            for target in sorted(set(targets), key=lambda target: (-targets.count(target), target))[:3]
        ]


def test_the_overview_counts_images_sizes_and_confidence(results, found):
    summary = build.summarize(results)
    sizes = [found.cluster.tolist().count(k) for k in range(4)]
    assert (summary["images"], summary["clusters"]) == (60, 4)
    assert (summary["smallest"], summary["largest"]) == (min(sizes), max(sizes))
    assert summary["outliers"] == int(results.outlier.sum())
    assert summary["confidence"] == pytest.approx(float(found.confidence.mean()))
    tenths = [min(int(confidence * 10), 9) for confidence in found.confidence.tolist()]
    assert summary["histogram"] == [tenths.count(tenth) for tenth in range(10)]


def test_classes_are_matched_as_the_accuracy_matches_them(results, found):
    compared = truth.compare_to_classes(results)
    targets = results.images.targets
    assert sum(compared["found"]) / 60 == pytest.approx(results.scores.acc)
    for target in range(4):
        for place, cluster in enumerate(compared["order"]):
            both = int(((targets == target) & (found.cluster == cluster)).sum())
            assert compared["table"][target][place] == both
    assert [compared["order"].index(cluster) for cluster in compared["match"]] == [0, 1, 2, 3]
    for target, cluster, many in compared["mixups"]:
        assert many == int(((targets == target) & (found.cluster == cluster)).sum())
        assert compared["match"][target] != cluster


@pytest.mark.parametrize("classes", [3, 8])
def test_more_or_fewer_classes_than_clusters_leave_some_unmatched(classes):
    compared = truth.compare_to_classes(make_results(targets=torch.arange(60) % classes, class_names=()))
    assert sum(cluster is not None for cluster in compared["match"]) == min(classes, 4)
    assert sorted(compared["order"]) == [0, 1, 2, 3]
    assert compared["classes"] == [str(target) for target in range(classes)]


@pytest.mark.parametrize(("clusters", "readable"), [(40, True), (41, False)])
def test_a_large_confusion_matrix_is_left_out(clusters, readable):
    compared = truth.compare_to_classes(make_results(200, clusters))
    assert (compared["table"] is not None) is readable
    assert len(compared["mixups"]) <= truth.MIX_UPS == 8


def test_unknown_labels_are_left_out():
    targets = torch.where(torch.arange(60) < 30, torch.arange(60) % 4, -1)
    assert sum(truth.compare_to_classes(make_results(targets=targets))["totals"]) == 30
    for unknown in (make_results(targets=torch.full((60,), -1)), make_results(labels=False)):
        assert truth.compare_to_classes(unknown) is None
        assert not truth.has_truth(unknown)


def test_curves_have_a_list_per_quantity_and_gaps_where_an_epoch_has_none():
    curves = build.curves(make_metrics())
    assert curves["epoch"] == list(range(12))
    assert curves["loss"][1] == 1.0
    assert [value is None for value in curves["acc"]] == [e % 4 != 3 for e in range(12)]
    assert "acc" not in build.curves(make_metrics(labels=False))
    assert build.curves([{"epoch": 0, "loss": math.nan}]) == {"epoch": [0]}
    assert build.curves([]) == {"epoch": []}


def test_every_loss_of_a_method_has_a_curve():
    records = [{"epoch": 0, "pull": 1.0, "push": 2.0, "spread": 3.0, "lr": 0.1}]
    assert list(build.curves(records, ("pull", "push", "spread"))) == ["epoch", "pull", "push", "spread", "lr"]


@pytest.mark.parametrize(
    ("clusters", "pictures"),
    [
        (2, (12, 6, 6)),
        (40, (12, 6, 6)),
        (41, (6, 3, 3)),
        (200, (6, 3, 3)),
        (201, (6, 2, 1)),
        (1000, (6, 2, 1)),
        (1001, (8, 0, 0)),
        (3000, (3, 0, 0)),
        (20_000, (1, 0, 0)),
    ],
)
def test_many_clusters_show_fewer_pictures_each(clusters, pictures):
    assert cards.pictures_per_card(clusters) == pictures
    assert clusters > cards.MOST_PICTURES or clusters * sum(pictures) <= cards.MOST_PICTURES == 9000


def test_the_fingerprint_depends_on_names_and_clusters_alone(data, found):
    assert build.fingerprint(data) == build.fingerprint(make_data(title="another", metrics=[]))
    assert build.fingerprint(data) != build.fingerprint(make_data(cluster=found.cluster.flip(0)))
    assert build.fingerprint(data) != build.fingerprint(make_data(ids=[f"x{name}" for name in data.ids]))


def test_ids_are_those_of_the_table():
    data = make_data(ids=hostile_ids(60))
    assert data.ids[: len(HOSTILE)] == [escape(name) for name in HOSTILE]
    assert build.content(data)["ids"] == data.ids


# Map


def test_the_map_holds_all_images_or_a_sample_that_never_changes():
    assert layout.sample(5).tolist() == [0, 1, 2, 3, 4]
    first = layout.sample(10_000)
    assert len(first) == len(set(first.tolist())) == 2000
    assert (first == layout.sample(10_000)).all()
    assert (np.diff(first) > 0).all()


def test_the_layout_is_deterministic_and_keeps_groups_together():
    results = make_results(200, 4, dim=16)
    embeddings = floats(results.embeddings)
    points, method = layout.lay_out(embeddings)
    assert method == "t-SNE"
    assert points.min() >= 0
    assert points.max() <= 1
    assert (points == layout.lay_out(embeddings).points).all()
    distance = np.linalg.norm(points[:, None] - points[None], axis=-1) + np.eye(200) * 9
    nearest = distance.argmin(1)
    cluster = results.predictions.cluster.numpy()
    assert (cluster[nearest] == cluster).mean() > 0.8


@pytest.mark.parametrize(
    "embeddings", [np.ones((50, 4)), np.eye(3), np.full((30, 4), np.nan), np.ones((1, 2)), np.ones((40, 1))]
)
def test_the_layout_survives_what_cannot_be_laid_out(embeddings):
    points, _ = layout.lay_out(embeddings)
    assert points.shape == (len(embeddings), 2)
    assert np.isfinite(points).all()


def test_principal_components_keep_distances(results):
    embeddings = floats(results.embeddings)
    components = layout.principal_components(embeddings)
    assert np.linalg.norm(components[3] - components[8]) == pytest.approx(np.linalg.norm(embeddings[3] - embeddings[8]))
    assert (np.diff(components.std(0)) < 1e-9).all()


# The file


class Noise(Images):
    """Photos of pure noise, the worst case for JPEG, made when they are shown."""

    def iter_pictures(self, sides):
        draw = np.random.default_rng(0)
        return ((i, draw.integers(0, 256, self.shape, np.uint8)) for i in sides)


def make_noise(ids, side):
    return Noise(None, ids=ids, numbers=range(len(ids)), shape=(3, side, side))


@pytest.mark.parametrize(("clusters", "side"), [(10, 32), (1000, 32), (100, 256)])
def test_ten_thousand_images_stay_under_ten_megabytes(tmp_path, clusters, side):
    ids = [f"a/rather/long/folder/name/for/pictures/{i:032d}.jpeg" for i in range(10_000)]
    data = make_data(10_000, clusters, dim=16, labels=False, images=make_noise(ids, side))
    write_page(tmp_path / "report.html", data)
    assert 1_000_000 < (tmp_path / "report.html").stat().st_size <= 10_000_000


@pytest.mark.parametrize(("count", "length", "held"), [(60_000, 12, True), (60_000, 80, False), (1_000_000, 12, False)])
def test_the_file_does_not_grow_with_the_number_of_images(tmp_path, count, length, held):
    ids = [f"{i:0{length}d}" for i in range(count)]
    data = make_data(count, 10, labels=False, images=make_noise(ids, 32))
    write_page(tmp_path / "report.html", data)
    assert 1_000_000 < (tmp_path / "report.html").stat().st_size <= 10_000_000
    content = content_of((tmp_path / "report.html").read_text())
    assert (content["ids"] == ids) is held
    assert (content["cluster"] is not None) is held
    assert content["images"] == count
    assert sum(card["size"] for card in content["clusters"]) == count
    pictures = content["pictures"]
    assert len(pictures["index"]) <= 2000 + 240
    assert pictures["name"] == [ids[i] for i in pictures["index"]]
    assert pictures["cluster"] == data.results.predictions.cluster[pictures["index"]].tolist()


LONG = "<é\\xff" * 10_000  # 60,000 characters, of which JSON escapes some


def written_size(path, data):
    write_page(path / "report.html", data)
    return (path / "report.html").stat().st_size


@pytest.mark.usefixtures("quick_map")
@pytest.mark.parametrize(("count", "clusters"), [(3_000, 10), (4_000, 1000)])
def test_long_paths_do_not_make_the_file_larger(tmp_path, count, clusters):
    ids = [f"{i:08d}/{LONG[:30_000]}/{i:08d}.png" for i in range(count)]
    data = make_data(count, clusters, labels=False, images=make_noise(ids, 32))
    assert 1_000_000 < written_size(tmp_path, data) <= 10_000_000
    content = content_of((tmp_path / "report.html").read_text())
    assert content["ids"] is None
    length = content["pictures"]["nameLength"]
    shown = dict(zip(content["pictures"]["index"], content["pictures"]["name"], strict=True))
    assert all(len(name) == length for name in shown.values())
    assert all(name[:8] == name[-12:-4] == f"{index:08d}" for index, name in shown.items())


@pytest.mark.usefixtures("quick_map")
def test_long_names_of_classes_titles_and_facts_do_not_make_the_file_larger(tmp_path):
    data = make_data(
        3_000,
        300,
        class_names=tuple(f"{number}{LONG}{number}" for number in range(300)),
        title=LONG,
        warnings=[LONG] * 100,
        facts={LONG: LONG, "device": LONG},
    )
    data = replace(data, config=data.config.model_copy(update={"description": LONG * 20}))
    assert written_size(tmp_path, data) <= 10_000_000
    content = content_of((tmp_path / "report.html").read_text())
    assert content["truth"]["classes"][7].startswith("7<é")
    assert content["truth"]["classes"][7].endswith("xff7")
    assert max(len(name) for card in content["clusters"] for name, _ in card["classes"]) <= 200


@pytest.mark.usefixtures("quick_map")
def test_a_class_for_every_image_does_not_make_the_file_larger(tmp_path):
    count = 20_000
    names = tuple(f"{number:09d}" * 10 for number in range(count))
    data = make_data(count, 600, targets=torch.arange(count), class_names=names)
    assert written_size(tmp_path, data) <= 10_000_000
    content = content_of((tmp_path / "report.html").read_text())
    assert content["truth"] is None
    assert content["pictures"]["target"] == []
    assert "Comparison with true labels" not in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("quick_map")
def test_very_many_clusters_do_not_make_the_file_larger(tmp_path):
    ids = [f"{i:05d}/{LONG[:300]}/{i:05d}.png" for i in range(9_000)]
    assert written_size(tmp_path, make_data(9_000, 8_000, labels=False, images=make_noise(ids, 32))) <= 10_000_000
    content = content_of((tmp_path / "report.html").read_text())
    assert len(content["clusters"]) == 8_000
    assert not any(card["similar"] for card in content["clusters"])


@pytest.mark.usefixtures("quick_map")
def test_very_many_epochs_do_not_make_the_file_larger(tmp_path):
    assert written_size(tmp_path, make_data(metrics=make_metrics(100_001))) <= 2_000_000
    epochs = content_of((tmp_path / "report.html").read_text())["curves"]["epoch"]
    assert len(epochs) <= 2_000
    assert epochs[-1] == 100_000
    assert len(set(np.diff(epochs))) == 1


@pytest.mark.parametrize(("count", "most"), [(0, 5), (1, 5), (5, 5), (6, 5), (11, 5), (1000, 7)])
def test_epochs_are_thinned_evenly_up_to_the_last(count, most):
    kept = limits.thin(count, most)
    assert len(kept) <= most
    assert len(kept) >= min(count, most) // 2
    assert kept[-1:] == [count - 1][:count]
    assert len(set(np.diff(kept))) <= 1


def test_short_names_are_not_shortened_and_long_ones_keep_both_ends():
    assert limits.shorten("a" * 32, 32) == "a" * 32
    assert limits.shorten("a" * 40 + "b" * 40, 32) == "a" * 15 + "…" + "b" * 16
    assert limits.fit_names(["a", "b"]) == (["a", "b"], None)


def test_no_picture_is_stored_twice(data):
    content = content_of(render(data))
    index = content["pictures"]["index"]
    assert len(index) == len(set(index)) == 60
    kinds = ("typical", "uncertain", "outlying")
    assert content["onCards"] == len({i for card in content["clusters"] for kind in kinds for i in card[kind]})


def test_every_script_and_every_style_is_in_the_file(data):
    html = render(data)
    folder = Path(page.__file__).parent
    assert {path.name for path in folder.glob("*.js")} == set(page.SCRIPTS)
    assert {path.name for path in folder.glob("*.css")} == set(page.STYLES)
    assert all(page.asset(name) in html for name in (*page.SCRIPTS, *page.STYLES))


def test_the_file_makes_no_request(data):
    html = render(data)
    assert not re.search(r"(https?:)?//[a-z]", re.sub(r"(?m)^\s*//.*$", "", html), re.IGNORECASE)
    for tag, attributes in Tags(html).tags:
        assert tag not in ("iframe", "object", "embed", "base", "form", "img")
        assert "src" not in attributes
        assert not any(name.startswith("on") or name == "style" for name in attributes)
        assert attributes.get("href", "#").startswith(("#", "data:,"))


def test_the_policy_allows_our_script_and_style_alone(data):
    html = render(data)
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
    names = (*nasty, HOSTILE[-1], HOSTILE[3])
    data = make_data(
        ids=hostile_ids(60),
        title=nasty[1] + HOSTILE[-1],
        class_names=names,
        warnings=[*nasty, HOSTILE[-1]],
        facts=dict([nasty, nasty[::-1]]),
    )
    html = render(data)
    plain = render(make_data(warnings=("a", "b", "c"), facts={"a": "b", "c": "d"}))
    assert [tag for tag, _ in Tags(html).tags] == [tag for tag, _ in Tags(plain).tags]
    assert "<img" not in html
    assert "<!--" not in html
    content = content_of(html)
    assert content["ids"][: len(HOSTILE)] == [escape(name) for name in HOSTILE]
    assert content["truth"]["classes"] == list(names)
    html.encode("utf-8")


def test_json_is_safe_inside_a_script_and_reads_back_the_same():
    text = page.to_json(HOSTILE)
    assert not set(text) & set("<>&\u2028\u2029\udcff")
    assert json.loads(text) == list(HOSTILE)


def test_numbers_that_do_not_exist_do_not_break_the_file():
    nothing = torch.full((60,), math.nan)
    data = make_data(confidence=nothing, cosine=nothing, embeddings=torch.full((60, 6), math.nan), metrics=[])
    content = content_of(render(data))
    assert content["clusters"][0]["cohesion"] is None
    assert content["curves"] == {"epoch": []}


def test_the_page_is_always_the_same(data):
    assert render(data) == render(make_data())


def test_warnings_settings_facts_and_scores_are_shown(data):
    html = render(make_data(warnings=["The loss is not finite: lower optim.lr."]))
    assert "The loss is not finite: lower optim.lr." in html
    assert "Healthy run" not in html
    assert "Healthy run" in render(data)
    assert "ACC" in render(data)
    bare = render(make_data(labels=False))
    assert 'id="truth"' not in bare
    assert "eager" in bare
    assert "temperature: " in bare
    assert "60 images in 4 clusters" in bare


def test_settings_are_in_plain_words():
    shown = page.settings(load_config("digits", ["heads=[30,10,20]", "head=1"]))
    assert list(shown) == ["Clusters", "Balance", "Network", "Epochs", "Batch size", "Learning rate", "Random seed"]
    assert shown["Clusters"] == "10"
    assert shown["Epochs"] == str(load_config("digits").optim.total_epochs)


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ("{kind: size, lower: 0.9}", "every cluster has at least 90% of an equal share"),
        ("{kind: size, lower: 0.5, upper: 1.5}", "every cluster has at least 50% of an equal share and at most 150%"),
        ("{kind: none}", "clusters may be of any size"),
        ("{kind: entropy}", "clusters are encouraged to be equal in size"),
    ],
)
def test_the_constraint_is_in_plain_words(constraint, words):
    assert page.balance(load_config("cifar10", [f"constraint={constraint}"])) == words


def test_a_constraint_from_outside_has_its_name():
    config = load_config("digits")
    outside = config.model_copy(update={"constraint": config.constraint.model_copy(update={"kind": "sinkhorn"})})
    assert page.balance(outside) == "sinkhorn"


def test_times_have_the_unit_that_suits_them():
    times = (None, 12.4, 59, 60, 600, 5399, 5400, 7200)
    shown = [None, "12 s", "59 s", "1 min", "10 min", "90 min", "1.5 h", "2.0 h"]
    assert [page.duration(seconds) for seconds in times] == shown
