"""Trials of a second stage: the semi-supervised method against slow references, and the harness on tiny runs."""

import copy
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from second_runs import COUNT, STEPS, few_digits, make_first
from secu.base.errors import UserError
from secu.cluster.metrics import accuracy
from secu.config import Config
from secu.data import Images
from secu.methods import build_method
from secu.methods.confident import most_confident
from secu.registry import METHODS
from secu.settings import merge
from secu.train.checkpoint import load_method
from secu.train.run import Run
from secu.train.step import Step
from small_runs import CPU
from test_clustering import DIM, draw_embeddings, softmax

ROOT = Path(__file__).resolve().parent.parent
CLUSTERS = 4
PLAIN_VIEWS = {"augment": {"flip_prob": 0}, "selflabel": {"operations": 0, "cutout": 0, "crop_padding": 0}}


@pytest.fixture(scope="module")
def benchmark():
    """Import both files; their methods are registered only for the tests of this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(METHODS, "_parts", dict(METHODS._parts))
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        patch.setattr("secu.apps.images.open_inputs", lambda *_, **__: few_digits())
        import second_stage

        yield second_stage
        for name in second_stage.FILES:
            sys.modules.pop(name)


@pytest.fixture(scope="module")
def trusted(benchmark):
    import trusted_labels

    return trusted_labels


@pytest.fixture(scope="module")
def scoring(benchmark):
    import second_stage_scores

    return second_stage_scores


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Run:
    """Make the run to start from."""
    return make_first(tmp_path_factory.mktemp("first") / "run")


@pytest.fixture(scope="module")
def start(benchmark, first):
    return benchmark.begin(first, None, CPU)


def semi(benchmark, start, settings: dict | None = None, words: str = "semi method=semi"):
    """Return the method, prepared, and a step of it."""
    config = benchmark.config_of(start, words)
    config = Config.model_validate(merge(config.model_dump(), settings or {}))
    method = build_method(config, COUNT, start.images.shape, CPU)
    method.prepare(start.images, load_method(start.run, CPU), resumed=False)
    return method, Step(method, start.images, CPU)


# Whom to trust


def test_support_is_the_mean_probability_of_the_neighbors(trusted):
    numbers = torch.Generator().manual_seed(0)
    p_NK = torch.rand(9, 3, generator=numbers).softmax(-1)
    neighbors = torch.randint(9, (9, 4), generator=numbers)
    labels = torch.randint(3, (9,), generator=numbers)
    expected = [sum(float(p_NK[j, labels[i]]) for j in neighbors[i].tolist()) / 4 for i in range(9)]
    assert trusted.support(p_NK, neighbors, labels).tolist() == pytest.approx(expected)


def test_images_whose_neighbors_agree_are_trusted(benchmark, start):
    """A loop over all images: cosines in the first run's embeddings, the 7 largest, and their probabilities."""
    method, _ = semi(benchmark, start, {"neighbors": {"count": 7}, "selflabel": {"kept": 0.3}})
    cosines_NN = start.embeddings_ND @ start.embeddings_ND.T
    p_NK = (load_method(start.run, CPU).predictor().compare(start.embeddings_ND) / 0.05).softmax(-1)
    score = []
    for i, label in enumerate(start.found.cluster.tolist()):
        others = [j for j in cosines_NN[i].argsort(descending=True).tolist() if j != i][:7]
        score.append(sum(float(p_NK[j, label]) for j in others) / 7)
    found = method.clustering
    assert torch.equal(found.first_labels, start.found.cluster)
    for cluster in range(CLUSTERS):
        members = (start.found.cluster == cluster).nonzero()[:, 0].tolist()
        inside = [score[i] for i in members if found.kept[i]]
        outside = [score[i] for i in members if not found.kept[i]]
        assert len(inside) == math.ceil(0.3 * len(members))
        assert min(inside) >= max(outside) - 1e-5
    assert not torch.equal(found.kept, most_confident(start.found.cluster, start.found.confidence, 0.3))


def test_without_neighbors_the_most_confident_images_are_trusted(benchmark, start):
    method, _ = semi(benchmark, start, {"neighbors": {"count": 0}, "selflabel": {"kept": 0.3}})
    expected = most_confident(start.found.cluster, start.found.confidence, 0.3)
    assert torch.equal(method.clustering.kept, expected)


def test_nobody_to_trust_is_an_error(benchmark, start):
    _, step = semi(benchmark, start, {"selflabel": {"kept": 0}})
    with pytest.raises(UserError, match=r"selflabel\.kept: 0\.0 leaves no image to trust"):
        step.start_epoch(0)


# What is learned


@pytest.mark.parametrize("uncertain", ["nothing", "probabilities"])
@pytest.mark.parametrize("aligned", [False, True])
def test_losses_follow_the_docstrings(trusted, uncertain, aligned):
    """Number by number, for three batches: the moving average of shares changes between them."""
    chosen = {"confidence": 0.7, "uncertain": uncertain, "smallest": 0, "sharpen": False}
    base = {"method": "selflabel", "heads": [CLUSTERS], "loss": {"temperature": 0.3}}
    config = Config.model_validate(base | {"selflabel": chosen})
    torch.manual_seed(3)
    labels = trusted.TrustedLabels(config, config.selflabel, 16, DIM, aligned=aligned)
    labels.begin(torch.tensor([0] * 7 + [1] * 4 + [2] * 3 + [3] * 2), torch.ones(16))
    centers = labels.head().tolist()
    usual = [1 / CLUSTERS] * CLUSTERS
    labels.start_epoch()
    confident = 0
    for turn in range(3):
        index = torch.arange(5 * turn, 5 * turn + 5)
        weak, strong = draw_embeddings(2, index, turn)
        gentle = draw_embeddings(1, index[:2], 9)[0]
        label = torch.tensor([1, 3])
        found = {name: float(loss.detach()) for name, loss in labels.learn(gentle, weak, strong, label, index).items()}

        def probabilities(x: list[float]) -> list[float]:
            return softmax([sum(a * b for a, b in zip(x, w, strict=True)) / 0.3 for w in centers])

        p = [probabilities(x) for x in weak.tolist()]
        if aligned:
            mean = [sum(row[k] for row in p) / 5 for k in range(CLUSTERS)]
            usual = [0.99 * old + 0.01 * new for old, new in zip(usual, mean, strict=True)]
            scaled = [[row[k] * (7, 4, 3, 2)[k] / 16 / usual[k] for k in range(CLUSTERS)] for row in p]
            p = [[value / sum(row) for value in row] for row in scaled]
        loss = 0.0
        for row, x in zip(p, strong.tolist(), strict=True):
            best = row.index(max(row))
            q = probabilities(x)
            if row[best] > 0.7:
                loss -= math.log(q[best]) / 5
                confident += 1
            elif uncertain == "probabilities":
                loss -= sum(a * math.log(b) for a, b in zip(row, q, strict=True)) / 5
        expected = -sum(math.log(probabilities(x)[y]) for x, y in zip(gentle.tolist(), (1, 3), strict=True)) / 2
        assert found["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
        assert found["trusted_loss"] == pytest.approx(expected, rel=1e-4)
        assert labels.labels[index, 0].tolist() == [row.index(max(row)) for row in p]
    assert 0 < confident < 15
    assert int(labels.taught) == int(labels.confident) == confident
    assert labels.log_sharpness == 0
    assert not labels.bonus.any()


def test_soft_weights_grow_with_the_confidence(trusted):
    """A normal density below the moving mean, with half of the moving standard deviation, and 1 above it."""
    config = Config.model_validate({"method": "selflabel", "heads": [CLUSTERS], "selflabel": {}})
    labels = trusted.TrustedLabels(config, config.selflabel, 16, DIM, aligned=True, soft=True)
    mean, variance = 1 / CLUSTERS, 1.0
    numbers = torch.Generator().manual_seed(5)
    below = 0
    for _ in range(3):
        confidence = torch.rand(6, generator=numbers)
        values = confidence.tolist()
        middle = sum(values) / 6
        mean = 0.99 * mean + 0.01 * middle
        variance = 0.99 * variance + 0.01 * sum((c - middle) ** 2 for c in values) / 5
        expected = [1.0 if c >= mean else math.exp(-2 * (c - mean) ** 2 / variance) for c in values]
        below += sum(c < mean for c in values)
        assert labels._weigh(confidence).tolist() == pytest.approx(expected)
    assert 0 < below < 18


def test_trusted_images_are_chosen_again(benchmark, start):
    method, step = semi(benchmark, start, {"optim": {"epochs": 6}}, "renewed method=semi-renewed")
    first = method.clustering
    share = first.first_share.clone()
    kept = first.kept.clone()
    changed = []
    for epoch in range(6):
        with torch.no_grad():
            method.encoder.projection[0].weight.add_(0.1 * torch.randn_like(method.encoder.projection[0].weight))
        step.start_epoch(epoch)
        changed.append(not torch.equal(first.kept, kept))
        kept = first.kept.clone()
        assert method.clustering.kept[step.partners].all()
    assert changed == [False, False, True, False, True, False]
    assert torch.equal(first.first_share, share)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_step_trains_on_trusted_images_with_their_labels(benchmark, start, decay):
    """Views without augmentation, so that a loop over the steps can fetch the images by their index."""
    method, step = semi(benchmark, start, merge(PLAIN_VIEWS, {"selflabel": {"decay": decay}}))
    step.start_epoch(0)
    assert method.clustering.kept[step.partners].all()
    assert len(step.partners.unique()) > 10
    done = 0
    for size in step.sizes:
        step.feed.next()
        index_B = step.order[done : done + size]
        partners_L = step.partners[done : done + max(1, size // 7)]
        oracle = copy.deepcopy(method.learner)
        assert oracle.training
        before = step.loss_sums.clone() if step.loss_names else torch.zeros(2)
        step.run(size)
        count = len(partners_L)
        plain = method.views.plain(start.images.tensor[torch.cat([partners_L, index_B, index_B])])
        x = oracle.embed(plain)
        logits = x[:count] @ method.clustering.head().T / method.config.loss.temperature
        expected = F.cross_entropy(logits, start.found.cluster[partners_L])
        assert step.loss_names == ("trusted_loss", "loss")
        torch.testing.assert_close((step.loss_sums - before)[0] / size, expected.detach(), rtol=1e-4, atol=1e-5)
        done += size
    assert len(step.sizes) == STEPS
    assert torch.equal(method.clustering.head(), load_method(start.run, CPU).clustering.head())


def test_final_model_is_the_moving_average(benchmark, start):
    method, step = semi(benchmark, start, {"selflabel": {"decay": 0.5}})
    step.start_epoch(0)
    mean = method.encoder.projection[0].weight.clone()
    for size in step.sizes[:3]:
        step.feed.next()
        step.run(size)
        mean = (mean + method.student.projection[0].weight.detach()) / 2
    assert method.predictor().encoder is method.encoder
    torch.testing.assert_close(method.encoder.projection[0].weight, mean)
    assert not torch.equal(mean, method.student.projection[0].weight)


# The harness


def test_variants_are_recorded_one_after_the_other(benchmark, first, tmp_path, monkeypatch, capsys):
    variants = [
        "ours optim.epochs=3 selflabel.operations=0",
        "typo optim.lrr=1",
        "too-fast as-published optim.epochs=1 optim.lr=1e30",
        "aligned method=semi-aligned optim.epochs=1 selflabel.operations=0",
    ]
    out = tmp_path / "trials.json"
    options = ["--json", str(out), "--every", "2", "--device", "cpu", "--commit", "abc"]
    monkeypatch.setattr(sys, "argv", ["second_stage.py", str(first.path), *variants, *options])
    benchmark.main()
    report = json.loads(out.read_text())
    assert report["commit"] == "abc"
    assert report["hardware"]["device"] == "cpu"
    trials = report["trials"]
    assert [trial["variant"] for trial in trials] == variants
    assert [trial["error"] and trial["error"][:22] for trial in trials] == [
        None,
        "UserError: optim.lrr: ",
        "UserError: loss: {'los",
        None,
    ]
    assert [[line["epoch"] for line in trial["evaluations"]] for trial in trials] == [[0, 2, 3], [], [0], [0, 1]]
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == [line for trial in trials for line in trial["evaluations"]]
    assert trials[3]["settings"]["method"] == "semi-aligned"
    assert trials[3]["settings"]["selflabel"]["confidence"] == 0.95
    optim = trials[3]["settings"]["optim"]
    assert optim["lr"] == pytest.approx(0.03 * optim["batch_size"] / 448)
    before, after = trials[0]["evaluations"][0], trials[0]["evaluations"][-1]
    assert before["moved"] == 0
    assert before["acc"] == before["acc_train"]
    assert {"loss", "information", "neighbor_agreement", "silhouette", "silhouette_first"} <= after.keys()
    names = ("information", "agreement_strong", "neighbor_agreement", "silhouette_first", "acc")
    unlike = [name for name in names if trials[3]["evaluations"][0][name] != before[name]]
    assert unlike == []  # the first run is described by the same numbers in all variants


def test_an_average_of_epochs_is_evaluated_at_the_end(benchmark, first, tmp_path, monkeypatch):
    built = []

    def build(*arguments):
        built.append(build_method(*arguments))
        return built[-1]

    monkeypatch.setattr(benchmark, "build_method", build)
    words = "mean optim.epochs=2 optim.average_from=0 selflabel.keep_best=false selflabel.operations=0"
    options = ["--json", str(tmp_path / "trials.json"), "--device", "cpu", "--commit", "abc"]
    monkeypatch.setattr(sys, "argv", ["second_stage.py", str(first.path), words, *options])
    benchmark.main()
    (method,) = built
    assert int(method.epoch_average.count) == 2
    pairs = zip(method.encoder.parameters(), method.epoch_average.encoder.parameters(), strict=True)
    assert all(torch.equal(weight, mean) for weight, mean in pairs)


def test_time_limit_ends_a_variant(benchmark, first, tmp_path, monkeypatch):
    out = tmp_path / "trials.json"
    options = ["--json", str(out), "--every", "9", "--device", "cpu", "--commit", "abc", "--seconds", "0"]
    words = "ours optim.epochs=9 selflabel.operations=0"
    monkeypatch.setattr(sys, "argv", ["second_stage.py", str(first.path), words, *options])
    benchmark.main()
    (trial,) = json.loads(out.read_text())["trials"]
    assert [line["epoch"] for line in trial["evaluations"]] == [0, 2]  # the first epoch is not counted


def test_scores_without_labels_against_loops(benchmark, scoring, start):
    method, _ = semi(benchmark, start)
    labels = (torch.arange(COUNT) * 7 % 5 % CLUSTERS).tolist()
    found = replace(start.found, cluster=torch.tensor(labels))
    scores = scoring.without_labels(method, start, start.embeddings_ND, found)
    cosines_NN = start.embeddings_ND @ start.embeddings_ND.T - 3 * torch.eye(COUNT)
    pairs = [(i, j) for i in range(COUNT) for j in cosines_NN[i].topk(scoring.NEIGHBORS).indices.tolist()]
    agree = sum(labels[i] == labels[j] for i, j in pairs) / len(pairs)
    assert scores["neighbor_agreement"] == pytest.approx(agree)
    before = start.found.cluster.tolist()
    assert scores["moved"] == pytest.approx(sum(a != b for a, b in zip(labels, before, strict=True)) / COUNT)
    sizes = [labels.count(cluster) for cluster in range(CLUSTERS)]
    assert (scores["model_largest"], scores["model_smallest"]) == (max(sizes), min(sizes))
    assert scores["silhouette"] == scores["silhouette_first"]
    assert scoring.silhouette(start.embeddings_ND, torch.zeros(COUNT, dtype=torch.int64)) is None


def test_accuracy_of_the_trusted_images_is_that_of_the_first_run(benchmark, scoring, start):
    method, _ = semi(benchmark, start)
    scores = scoring.evaluate(method, start)
    assert scores["acc_train"] == pytest.approx(
        accuracy(start.images.targets.numpy(), start.found.cluster.numpy()), abs=1e-4
    )
    # Few images confuse classes here, so that the best matching is the same for all images and for the trusted ones.
    kept = method.clustering.kept
    targets, clusters = start.images.targets[kept].numpy(), start.found.cluster[kept].numpy()
    assert scores["acc_trusted"] == pytest.approx(accuracy(targets, clusters), abs=1e-4)


def test_images_of_unknown_class_are_not_scored(benchmark, scoring, start):
    """All that are in the wrong cluster are of unknown class, so that the others are all right."""
    targets = start.images.targets.clone()
    everything = torch.ones(COUNT, dtype=torch.bool)
    targets[~scoring.right_in(start.images, start.found.cluster, everything)] = -1
    assert 0 < int((targets < 0).sum()) < COUNT / 2
    images = Images(start.images.tensor, targets)
    method, _ = semi(benchmark, start)
    scores = scoring.evaluate(method, replace(start, images=images, test=images))
    assert scores["acc"] == scores["acc_train"] == scores["acc_trusted"] == 1
    blind = scoring.evaluate(method, replace(start, images=Images(images.tensor), test=None))
    assert scores.keys() - blind.keys() == {"acc", "nmi", "ari", "calibration_error", "acc_train", "acc_trusted"}
