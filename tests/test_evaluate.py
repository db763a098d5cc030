"""Embedding, predicting and what a person looks at afterwards: the table and the picture."""

import csv
import math

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import mutual_info_score

from secu import evaluate, results
from secu.checkpoint import build, load_trained
from secu.data import Images, load
from secu.evaluate import (
    Predictions,
    Predictor,
    batches_of,
    consistency,
    embed,
    evaluation_mode,
    find_temperature,
    mutual_information,
    outlier_limits,
    predict,
    score_clusters,
)
from secu.metrics import score
from secu.results import draw_exemplars, nearest_to_center, tile, write_results
from secu.run import Run
from secu.settings import load_config
from secu.train import train

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def digits():
    everything = load("digits", "all")
    return Images(everything.pixels[:120], everything.targets[:120])


@pytest.fixture(scope="module")
def finished(tmp_path_factory, digits):
    """Train a small run, and return its folder and its model."""
    config = load_config("digits", ["heads=[4,6]", "optim.epochs=2", "encoder.dim=16"])
    run = Run.create(tmp_path_factory.mktemp("evaluate") / "run", config)
    return run, train(config, digits, run, device="cpu")


def random_predictions(images, clusters, seed=0):
    numbers = torch.Generator().manual_seed(seed)
    embeddings = torch.nn.functional.normalize(torch.randn(images, 5, generator=numbers), dim=1)
    centers = torch.nn.functional.normalize(torch.randn(clusters, 5, generator=numbers), dim=1)
    return embeddings, centers, predict(embeddings, centers, 0.05)


# Predictions


def test_predictions_against_a_loop(digits):
    embeddings, centers, found = random_predictions(40, 7)
    for i in range(40):
        cosines = [sum(float(a) * float(b) for a, b in zip(embeddings[i], w, strict=True)) for w in centers]
        best = max(range(7), key=lambda k: cosines[k])
        total = sum(math.exp(c / 0.05) for c in cosines)
        assert int(found.cluster[i]) == best
        assert float(found.cosine[i]) == pytest.approx(cosines[best], abs=1e-6)
        assert float(found.confidence[i]) == pytest.approx(math.exp(cosines[best] / 0.05) / total, abs=1e-5)


def test_embeddings_are_unit_and_do_not_depend_on_the_batch(finished, digits, monkeypatch):
    _, model = finished
    whole = embed(model.encoder, model.augmentation, digits)
    assert whole.shape == (120, 16)
    torch.testing.assert_close(whole.norm(dim=1), torch.ones(120))
    monkeypatch.setattr(evaluate, "BATCH", 7)
    torch.testing.assert_close(embed(model.encoder, model.augmentation, digits), whole)
    single = Images(digits.pixels[5:6], None)
    torch.testing.assert_close(embed(model.encoder, model.augmentation, single), whole[5:6])


def test_embedding_is_unaugmented_repeatable_and_changes_no_state(finished, digits):
    _, model = finished
    before = {key: value.clone() for key, value in model.encoder.state_dict().items()}
    model.encoder.train()
    first, second = (embed(model.encoder, model.augmentation, digits) for _ in range(2))
    assert torch.equal(first, second)
    assert model.encoder.training
    for key, value in model.encoder.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_mode_is_left_as_it_was_entered_also_after_an_error(finished, training):
    _, model = finished
    model.encoder.train(training)
    seen = []

    def fail():
        with evaluation_mode(model.encoder):
            seen.append(model.encoder.training)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen == [False]
    assert model.encoder.training is training


def test_scores_are_of_known_labels_only_and_none_without_any(digits):
    cluster = torch.arange(120) % 4
    assert score_clusters(digits, cluster) == score(digits.targets.numpy(), cluster.numpy())
    half = digits.targets.clone()
    half[::2] = -1
    assert score_clusters(Images(digits.pixels, half), cluster) == score(half[1::2].numpy(), cluster[1::2].numpy())
    assert score_clusters(Images(digits.pixels, None), cluster) is None
    assert score_clusters(Images(digits.pixels, torch.full((120,), -1)), cluster) is None


def test_a_model_read_back_predicts_the_same(finished, digits):
    run, model = finished
    again = load_trained(run, digits.shape, CPU)
    ours, theirs = (embed(m.encoder, m.augmentation, digits) for m in (model, again))
    assert torch.equal(ours, theirs)
    assert torch.equal(model.clustering.head(), again.clustering.head())
    assert model.clustering.head().shape == (4, 16)


def test_the_second_choice_is_the_next_best():
    embeddings, centers, found = random_predictions(40, 7)
    for i, cosines in enumerate(embeddings @ centers.T):
        chances = torch.softmax(cosines / 0.05, 0)
        _, second = cosines.argsort(descending=True)[:2].tolist()
        assert int(found.second[i]) == second
        assert float(found.second_confidence[i]) == pytest.approx(float(chances[second]), abs=1e-6)


def test_a_limit_is_three_robust_deviations_under_the_median():
    cosines = [0.1, 0.80, 0.82, 0.84, 0.86, 0.88, 0.90]  # median 0.84, median distance 0.04
    zeros = torch.zeros(len(cosines))
    limits = outlier_limits(Predictions(zeros.long(), zeros, zeros, zeros, torch.tensor(cosines)), 2)
    assert limits.tolist() == pytest.approx([0.84 - 3 * 1.4826 * 0.04, -1])


def test_the_predictor_is_embedding_and_cosine_in_one(finished, digits):
    _, model = finished
    predictor = Predictor(model.augmentation, model.encoder.eval(), model.clustering.head())
    with torch.inference_mode():
        cosines = predictor(digits.pixels)
    expected = embed(model.encoder, model.augmentation, digits) @ model.clustering.head().T
    assert torch.allclose(cosines, expected, atol=1e-6)


# Consistency and temperature


def test_mutual_information_is_that_of_scikit_learn_over_log_k():
    numbers = np.random.default_rng(0)
    for clusters in (2, 5, 9):
        weak = numbers.integers(0, clusters, 500)
        strong = np.where(numbers.random(500) < 0.6, weak, numbers.integers(0, clusters, 500))
        table = torch.zeros(clusters, clusters)
        for a, b in zip(weak, strong, strict=True):
            table[a, b] += 1
        assert mutual_information(table) == pytest.approx(mutual_info_score(weak, strong) / math.log(clusters))


def test_mutual_information_is_one_for_a_diagonal_and_nothing_for_collapsed_or_independent_labels():
    assert mutual_information(7 * torch.eye(6)) == pytest.approx(1)
    assert mutual_information(torch.eye(6).flip(0)) == pytest.approx(1)
    collapsed, independent = torch.zeros(6, 6), torch.outer(torch.arange(1, 7.0), torch.arange(2, 8.0))
    collapsed[2, 2] = 300
    for table in (collapsed, independent, torch.zeros(6, 6)):
        assert mutual_information(table) == pytest.approx(0, abs=1e-12)
    lost = torch.diag(torch.tensor([50.0, 50, 0, 0]))  # all views agree, but two clusters are gone
    assert mutual_information(lost) == pytest.approx(0.5)


def test_consistency_compares_each_image_with_its_views(finished, digits, monkeypatch):
    """Image by image and view by view, with the numbers drawn in their order, and the same ones every time."""
    _, model = finished
    monkeypatch.setattr(evaluate, "BATCH", 20)
    centers, index = model.clustering.head(), torch.arange(0, 120, 3)
    parts = (model.encoder, model.augmentation, centers, digits, index)
    found, plain, seen = consistency(*parts), [], []
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(), evaluation_mode(model.encoder):
        for batch in index.split(20):
            clean = model.augmentation.normalize(digits.pixels[batch])
            for view in model.augmentation(digits.pixels[batch], generator):
                plain += (model.encoder.embed(clean) @ centers.T).argmax(-1).tolist()
                seen += (model.encoder.embed(view) @ centers.T).argmax(-1).tolist()
    assert found.agreement == pytest.approx(sum(a == b for a, b in zip(plain, seen, strict=True)) / 80)
    assert found.information == pytest.approx(mutual_info_score(plain, seen) / math.log(len(centers)), abs=1e-9)
    assert 0 < found.agreement < 1
    assert consistency(*parts) == found


@pytest.mark.parametrize(("side", "most"), [(8, 512), (32, 512), (96, 56), (224, 10), (2000, 1)])
def test_fewer_large_images_are_held_at_once(side, most):
    images = Images(torch.zeros(1, 1, 1, 1, dtype=torch.uint8).expand(1100, 1, side, side))
    parts = batches_of(torch.arange(1100), images)
    assert {len(part) for part in parts[:-1]} == {most}
    assert torch.equal(torch.cat(parts), torch.arange(1100))


@pytest.mark.parametrize("wanted", [0.35, 0.6, 0.8, 0.95])
def test_at_the_temperature_found_the_mean_confidence_is_the_one_wanted(wanted):
    embeddings, centers, _ = random_predictions(300, 7)
    temperature = find_temperature(embeddings @ centers.T, wanted)
    confidence = predict(embeddings, centers, temperature).confidence
    assert float(confidence.mean()) == pytest.approx(wanted, abs=1e-5)


def test_a_temperature_that_no_model_should_have_is_not_returned():
    embeddings, centers, _ = random_predictions(300, 7)
    assert find_temperature(embeddings @ centers.T, 1.0) == pytest.approx(0.003)
    assert find_temperature(embeddings @ centers.T, 0.0) == pytest.approx(1.0)


# assignments.csv


def test_assignments_hold_a_row_an_image_in_order(finished, digits):
    run, model = finished
    written = write_results(run, model, digits)
    with (run.path / "assignments.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["id", "cluster", "confidence", "second", "second_confidence", "cosine", "outlier", "label"]
    assert [int(row[0]) for row in rows[1:]] == list(range(120))
    embeddings = embed(model.encoder, model.augmentation, digits)
    cosines = embeddings @ model.clustering.head().T
    for row, cosine in zip(rows[1:], cosines, strict=True):
        chances = torch.softmax(cosine / 0.05, 0)
        best, second = chances.argsort(descending=True)[:2].tolist()
        assert (int(row[1]), int(row[3])) == (best, second)
        assert float(row[2]) == pytest.approx(float(chances[best]), abs=2e-6)
        assert float(row[4]) == pytest.approx(float(chances[second]), abs=2e-6)
        assert float(row[5]) == pytest.approx(float(cosine.max()), abs=2e-6)
    found = written.predictions
    assert found.cluster.tolist() == [int(row[1]) for row in rows[1:]]
    assert written.outlier.tolist() == [row[6] == "True" for row in rows[1:]]
    assert [int(row[7]) for row in rows[1:]] == digits.targets.tolist()
    assert written.scores == score(digits.targets.numpy(), found.cluster.numpy())
    with Image.open(run.path / "exemplars.png") as picture:
        assert picture.format == "PNG"
        assert picture.size == draw_exemplars(digits, found, 4).size


# exemplars.png


def test_exemplars_are_the_members_closest_to_their_center():
    embeddings, centers, found = random_predictions(60, 4)
    for cluster in range(4):
        members = [i for i in range(60) if int(found.cluster[i]) == cluster]
        expected = sorted(members, key=lambda i: -float(embeddings[i] @ centers[cluster]))[:5]
        assert nearest_to_center(found, cluster, 5).tolist() == expected


def test_a_small_or_empty_cluster_has_few_or_no_exemplars():
    none = torch.zeros(3)
    found = Predictions(torch.tensor([2, 0, 2]), none, none, none, torch.tensor([0.1, 0.9, 0.7]))
    assert nearest_to_center(found, 2, 12).tolist() == [2, 0]
    assert nearest_to_center(found, 1, 12).tolist() == []


def box(cluster, column):
    """Return where a tile of the picture lies."""
    left, top = (
        results.MARGIN + column * (results.TILE + results.GAP),
        results.GAP + cluster * (results.TILE + results.GAP),
    )
    return left, top, left + results.TILE, top + results.TILE


@pytest.mark.parametrize(("channels", "side"), [(1, 8), (3, 8), (3, 96), (1, 100)])
def test_the_picture_shows_the_closest_images_in_the_row_of_their_cluster(channels, side):
    """Every image is of one colour of its own, so that any mistake in place or channel shows."""
    numbers = np.random.default_rng(0)
    colours = numbers.permutation(256)[:40].reshape(40, 1)
    if channels == 3:
        colours = np.concatenate([colours, colours[::-1], (colours + 99) % 256], 1)
    pixels = torch.from_numpy(colours.astype(np.uint8))[..., None, None].expand(-1, -1, side, side).contiguous()
    _, _, found = random_predictions(40, 3)
    picture = draw_exemplars(Images(pixels), found, 3)
    assert picture.mode == "RGB"
    pitch = results.TILE + results.GAP
    assert picture.size == (results.MARGIN + results.COLUMNS * pitch + results.GAP, 3 * pitch + results.GAP)
    for cluster in range(3):
        index = nearest_to_center(found, cluster, results.COLUMNS).tolist()
        assert index
        for column in range(results.COLUMNS):
            shown = np.asarray(picture.crop(box(cluster, column)))
            expected = colours[index[column]] if column < len(index) else 255
            assert (shown == expected).all()


def test_the_picture_stays_small_with_many_clusters():
    _, _, found = random_predictions(80, 70)
    picture = draw_exemplars(Images(torch.zeros(80, 1, 8, 8, dtype=torch.uint8)), found, 70)
    assert picture.height == results.MOST_ROWS * (results.TILE + results.GAP) + results.GAP


def test_small_images_keep_their_pixels_in_a_tile():
    pixels = torch.arange(64, dtype=torch.uint8).view(1, 8, 8)
    shown = np.asarray(tile(pixels))
    assert shown.shape == (64, 64, 3)
    assert (shown[4::8, 4::8, 0] == pixels[0].numpy()).all()
    assert set(shown.ravel().tolist()) == set(range(64))


def test_an_untrained_model_has_the_same_weights_for_the_same_seed_alone():
    config = load_config("digits", ["heads=[3]"])
    first, second = (build(config, 10, (1, 8, 8), CPU) for _ in range(2))
    for ours, theirs in zip(first.encoder.parameters(), second.encoder.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(first.clustering.centers.weight, second.clustering.centers.weight)
    other = build(load_config("digits", ["heads=[3]", "seed=1"]), 10, (1, 8, 8), CPU)
    assert not torch.equal(next(first.encoder.parameters()), next(other.encoder.parameters()))
    assert not torch.equal(first.clustering.centers.weight, other.clustering.centers.weight)
