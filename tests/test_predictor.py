"""What a trained model is used for: embeddings, the two best clusters, confidence and outliers."""

import math
import pickle

import pytest
import torch
import torch.nn.functional as F

from feature_runs import use_quarters
from secu.data import Images
from secu.methods import Method, predictor
from secu.methods.predictor import (
    Predictions,
    batch_size,
    batches_of,
    best_two,
    choose,
    evaluation_mode,
    outlier_limits,
)
from secu.nets.front import Front
from secu.settings import load_config, resolve
from small_runs import CPU, digits, trained

IMAGES = 120


@pytest.fixture(scope="module")
def method(tmp_path_factory) -> Method:
    """Train a small run."""
    config = load_config("digits", ["heads=[4,6]", "optim.epochs=2", "encoder.dim=16"])
    return trained(tmp_path_factory.mktemp("predictor") / "run", config, digits(IMAGES)).method


@pytest.fixture(scope="module")
def cosines():
    """Draw unit embeddings of 40 images and seven centers, and return their cosines."""
    numbers = torch.Generator().manual_seed(0)
    embeddings = F.normalize(torch.randn(40, 5, generator=numbers), dim=1)
    centers = F.normalize(torch.randn(7, 5, generator=numbers), dim=1)
    return embeddings @ centers.T


# The two best clusters


def test_best_cluster_and_its_confidence_against_a_loop(cosines):
    found = choose(cosines, 0.05)
    for image, row in enumerate(cosines.tolist()):
        best = max(range(7), key=lambda cluster: row[cluster])
        total = sum(math.exp(cosine / 0.05) for cosine in row)
        assert int(found.cluster[image]) == best
        assert float(found.cosine[image]) == pytest.approx(row[best], abs=1e-6)
        assert float(found.confidence[image]) == pytest.approx(math.exp(row[best] / 0.05) / total, abs=1e-5)


def test_second_choice_is_the_next_best(cosines):
    found = choose(cosines, 0.05)
    for image, row in enumerate(cosines):
        probabilities = torch.softmax(row / 0.05, 0)
        _, second = row.argsort(descending=True)[:2].tolist()
        assert int(found.second[image]) == second
        assert float(found.second_confidence[image]) == pytest.approx(float(probabilities[second]), abs=1e-6)


def test_predictions_are_in_host_memory(cosines):
    for found in (choose(cosines, 0.05), best_two(cosines, 0.05).to_host()):
        assert {column.device.type for column in vars(found).values()} == {"cpu"}
        assert {len(column) for column in vars(found).values()} == {40}


def test_limit_of_outliers_is_three_robust_deviations_below_the_median():
    cosines = [0.1, 0.80, 0.82, 0.84, 0.86, 0.88, 0.90]  # median 0.84, median distance 0.04
    zeros = torch.zeros(len(cosines))
    limits = outlier_limits(Predictions(zeros.long(), zeros, zeros, zeros, torch.tensor(cosines)), 2)
    assert limits.tolist() == pytest.approx([0.84 - 3 * 1.4826 * 0.04, -1])


# The predictor


def test_embeddings_are_unit_and_do_not_depend_on_the_batch(method, monkeypatch):
    model = method.predictor()
    images = digits(IMAGES)
    embeddings = model.embed(images)
    assert embeddings.shape == (IMAGES, 16)
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(IMAGES))
    monkeypatch.setitem(predictor.BATCH_IMAGES, "cpu", 7)
    torch.testing.assert_close(model.embed(images), embeddings)
    torch.testing.assert_close(model.embed(Images(images.tensor[5:6])), embeddings[5:6])


def test_embedding_is_unaugmented_repeatable_and_changes_no_state(method):
    model = method.predictor()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.encoder.train()
    first, second = (model.embed(digits(IMAGES)) for _ in range(2))
    assert torch.equal(first, second)
    assert model.encoder.training
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_mode_ends_with_the_previous_mode_also_after_an_error(method, training):
    method.encoder.train(training)
    seen = []

    def fail() -> None:
        with evaluation_mode(method.encoder):
            seen.append(method.encoder.training)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen == [False]
    assert method.encoder.training is training


def test_forward_is_preprocessing_embedding_and_cosine_in_one(method):
    model = method.predictor().eval()
    with torch.inference_mode():
        cosines = model(digits(IMAGES).tensor)
    assert torch.allclose(cosines, model.embed(digits(IMAGES)) @ method.clustering.head().T, atol=1e-6)
    assert torch.equal(model.cosines(digits(IMAGES)), model.embed(digits(IMAGES)) @ model.centers.T)
    assert model.centers.shape == (4, 16)  # of the head that answers


def test_predict_is_choose_with_the_temperature_of_the_run(method):
    model = method.predictor()
    assert model.temperature == method.config.loss.prediction_temperature
    expected = choose(model.cosines(digits(IMAGES)), model.temperature)
    found = model.predict(digits(IMAGES))
    for name, column in vars(expected).items():
        assert torch.equal(getattr(found, name), column)
    model.temperature = 1.0
    assert model.predict(digits(IMAGES)).confidence.mean() < found.confidence.mean()


@pytest.mark.parametrize(
    ("side", "most", "most_on_a_gpu"),
    [(8, 512, 2048), (32, 512, 2048), (96, 56, 910), (224, 10, 167), (256, 8, 128), (4000, 1, 1)],
)
def test_fewer_large_images_are_held_at_once(side, most, most_on_a_gpu):
    assert batch_size((3, side, side), torch.device("cuda")) == most_on_a_gpu
    images = Images(torch.zeros(1, 1, 1, 1, dtype=torch.uint8).expand(1100, 1, side, side))
    parts = batches_of(torch.arange(1100), images, CPU)
    assert {len(part) for part in parts[:-1]} == {most}
    assert torch.equal(torch.cat(parts), torch.arange(1100))


def test_features_come_in_full_batches():
    parts = batches_of(torch.arange(9000), Images(torch.zeros(9000, 7)), CPU)
    assert [len(part) for part in parts] == [4096, 4096, 808]


def test_a_pickled_predictor_is_as_small_as_its_weights_and_predicts_the_same(method):
    trained_model = method.predictor()
    content = pickle.dumps(trained_model)
    weights = sum(tensor.nbytes for tensor in (*trained_model.parameters(), *trained_model.buffers()))
    assert len(content) < weights + 32_000
    images = torch.randint(0, 256, (7, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.equal(pickle.loads(content)(images), trained_model(images))


def test_a_pickled_front_is_without_its_network(monkeypatch):
    use_quarters(monkeypatch)
    front = Front(resolve({"encoder": {"backbone": "lite0", "trainable": "nothing"}}), 3)
    images = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = front(images)
    again = pickle.loads(pickle.dumps(front))
    assert front.network is not None
    assert again.network is None
    assert torch.equal(again(images), expected)
