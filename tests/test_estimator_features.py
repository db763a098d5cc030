"""The estimator on feature vectors, given or of a pretrained network."""

import pickle
import re

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.cluster import KMeans
from sklearn.pipeline import make_pipeline

from feature_runs import COUNT, blobs, use_quarters
from secu import SeCu
from secu.base.errors import UserError
from secu.cluster.metrics import accuracy

SMALL = {"encoder.dim": 8, "encoder.hidden_dim": 16, "optim.batch_size": 40}


def estimator(**more) -> SeCu:
    return SeCu(3, **{"epochs": 4, "device": "cpu", "settings": SMALL, **more})


def colored(count: int = 42) -> np.ndarray:
    """Return images of 24 pixels in three colors, with noise, as uint8 (N, H, W, 3)."""
    numbers = np.random.default_rng(0)
    colors = np.array([[200, 40, 40], [40, 200, 40], [40, 40, 200]])[np.arange(count) % 3]
    return np.clip(colors[:, None, None] + numbers.integers(-30, 31, (count, 24, 24, 3)), 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def fitted():
    return estimator().fit(blobs()[0])


@pytest.fixture
def quarters(monkeypatch):
    return use_quarters(monkeypatch)


# A float matrix


def test_what_a_fit_of_vectors_leaves(fitted):
    assert fitted.labels_.shape == (COUNT,)
    assert set(fitted.labels_) == {0, 1, 2}
    assert fitted.ids_.tolist() == [str(i) for i in range(COUNT)]
    assert (fitted.n_features_in_, fitted.cluster_centers_.shape) == (16, (3, 8))
    assert np.linalg.norm(fitted.cluster_centers_, axis=1) == pytest.approx(np.ones(3), abs=1e-5)
    assert fitted.config_.encoder.backbone == "none"
    assert fitted.config_.data.features == 16
    assert len(fitted.history_) == 5


def test_predictions_agree_with_one_another(fitted):
    vectors, groups = blobs()
    assert np.array_equal(fitted.predict(vectors), fitted.labels_)
    embeddings = fitted.transform(vectors)
    assert (embeddings.shape, embeddings.dtype) == ((COUNT, 8), np.float32)
    assert np.linalg.norm(embeddings, axis=1) == pytest.approx(np.ones(COUNT), abs=1e-5)
    chances = fitted.predict_proba(vectors)
    assert chances.sum(1) == pytest.approx(np.ones(COUNT), abs=1e-5)
    assert np.array_equal(chances.argmax(1), fitted.labels_)
    assert fitted.score(vectors, groups) == accuracy(groups, fitted.labels_)
    assert fitted.predict(vectors[7:8])[0] == fitted.labels_[7]


def test_clear_groups_are_found():
    vectors, groups = blobs()
    found = estimator(epochs=30, settings={**SMALL, "optim.lr": 0.1}).fit(vectors)
    assert found.score(vectors, groups) > 0.95
    others, their_groups = blobs(seed=1)
    assert found.score(others, their_groups) > 0.95


def test_few_vectors_lose_no_cluster():
    """With all images in one batch, they would all move to the smallest cluster at once."""
    generator = np.random.default_rng(0)
    kind = np.repeat(range(3), 20)
    vectors = generator.normal(size=(3, 64))[kind] + generator.normal(size=(60, 64))
    found = SeCu(3).fit_predict(vectors)
    assert sorted(np.bincount(found, minlength=3)) == [20, 20, 20]


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: x.astype(np.float64),
        lambda x: torch.from_numpy(x),
        lambda x: np.asfortranarray(x),
        lambda x: x[::-1][::-1],
    ],
    ids=["float64", "tensor", "columns", "strides"],
)
def test_all_kinds_of_matrices_are_the_same(fitted, convert):
    vectors = blobs()[0]
    again = estimator().fit(convert(vectors))
    assert np.array_equal(again.labels_, fitted.labels_)
    assert np.array_equal(fitted.transform(convert(vectors)), fitted.transform(vectors))


def test_the_matrix_is_not_changed(fitted):
    vectors = blobs()[0]
    vectors.flags.writeable = False
    assert np.array_equal(estimator().fit(vectors).labels_, fitted.labels_)
    assert np.array_equal(vectors, blobs()[0])


@pytest.mark.parametrize("features", [2, 15, 17])
@pytest.mark.parametrize("method", ["predict", "transform", "predict_proba"])
def test_another_number_of_features(fitted, features, method):
    with pytest.raises(UserError, match=rf"^X has {features} features, but SeCu is expecting 16 features as input$"):
        getattr(fitted, method)(np.ones((4, features), np.float32))


@pytest.mark.parametrize(
    "images",
    [np.zeros((4, 8, 8), np.uint8), np.zeros((4, 4, 4), np.uint8), np.zeros((4, 16), np.uint8)],
    ids=["other size", "as many values", "squares"],
)
def test_images_for_an_estimator_of_vectors_are_one_line(fitted, images):
    with pytest.raises(UserError, match=r"^source: .* has images, but the run was trained on given feature vectors$"):
        fitted.predict(images)


def test_vectors_for_an_estimator_of_images_are_one_line():
    images = np.random.default_rng(0).integers(0, 256, (30, 8, 8), np.uint8)
    found = SeCu(3, epochs=0, device="cpu").fit(images)
    with pytest.raises(UserError, match=r"^source: .* vectors of 64 features, but the run was trained on images of 8"):
        found.predict(np.random.default_rng(0).random((4, 64), np.float32))


@pytest.mark.parametrize(
    ("row", "message"), [(np.nan, "NaN, infinite or too large values, first in row 5"), (0, "first in row 5")]
)
def test_vectors_without_a_direction(fitted, row, message):
    vectors = blobs()[0]
    vectors[5] = row
    with pytest.raises(UserError, match=message):
        fitted.predict(vectors)
    with pytest.raises(UserError, match=message):
        estimator().fit(vectors)


# Parameters


@pytest.mark.parametrize("encoder", ["scratch", "lite0"])
def test_vectors_need_no_encoder(encoder):
    with pytest.raises(UserError, match=f"^encoder: {encoder} needs images, got feature vectors$"):
        estimator(encoder=encoder).fit(blobs()[0])


def test_images_from_scratch(quarters):
    found = estimator(encoder="scratch", epochs=0).fit(colored())
    assert found.config_.encoder.backbone == "small"
    assert found.config_.encoder.trainable == "all"
    assert quarters.seen == 0


@pytest.mark.parametrize("encoder", ["lite0", None])
def test_images_by_a_pretrained_network(quarters, encoder, tmp_path):
    images = colored()
    found = estimator(encoder=encoder).fit(images)
    assert found.config_.encoder.backbone == "lite0"
    assert found.n_features_in_ == 24 * 24 * 3
    assert quarters.seen == len(images)
    assert np.array_equal(found.predict(images), found.labels_)
    assert np.array_equal(found.predict(images[:1]), found.labels_[:1])
    found.save(tmp_path / "run")
    loaded = SeCu.load(tmp_path / "run", device="cpu")
    assert np.array_equal(loaded.predict(images), found.labels_)
    assert loaded.encoder == encoder
    with pytest.raises(UserError, match=r"^X has 12 features, but SeCu is expecting 1728 features as input$"):
        found.predict(np.ones((4, 12), np.float32))


def test_an_unknown_encoder():
    with pytest.raises(UserError, match=r"^encoder.backbone: unknown 'lite9'"):
        estimator(encoder="lite9").fit(colored())


@pytest.mark.parametrize("balance", [None, 0.0, 0.5, 1])
def test_the_balance_comes_back_from_a_file(tmp_path, balance):
    found = estimator(epochs=0, balance=balance).fit(blobs()[0])
    expected = ("entropy", "auto") if balance is None else ("size", "head")
    assert found.config_.constraint.kind == expected[0]
    assert (found.config_.answer in ("head", "tree")) if balance is None else found.config_.answer == "head"
    found.save(tmp_path / "run")
    loaded = SeCu.load(tmp_path / "run", device="cpu")
    assert loaded.balance == balance
    assert type(loaded.balance) is (float if balance is not None else type(None))
    assert loaded.settings == SMALL
    again = clone(loaded).fit(blobs()[0])
    assert again.config_ == found.config_
    assert np.array_equal(again.labels_, found.labels_)


def test_self_labeling_of_vectors_is_refused_before_training(monkeypatch):
    monkeypatch.setattr("secu.estimator.fit", lambda *_, **__: pytest.fail("training began"))
    for more in ({}, {"encoder.trainable": "all"}):
        with pytest.raises(UserError, match=r"^selflabel: .* clusters fixed features; self-labeling needs a run that"):
            estimator(self_label=True, settings={**SMALL, **more}).fit(blobs()[0])


def test_self_labeling_starts_from_a_head(monkeypatch):
    """Merged clusters cannot be taught; the first run must not end with them."""
    plans = []
    monkeypatch.setattr("secu.estimator.fit", lambda prepared, *_, **__: plans.append(prepared.plan.config) or stop())
    images = np.random.default_rng(0).integers(0, 256, (200, 8, 8), np.uint8)
    for self_label in (False, True):
        with pytest.raises(Stopped):
            SeCu(3, self_label=self_label, device="cpu").fit(images)
    assert [config.answer for config in plans] == ["auto", "head"]


class Stopped(Exception):
    """The plan has been seen."""


def stop():
    raise Stopped


# Merged clusters


@pytest.fixture(scope="module")
def merged():
    return estimator(settings={**SMALL, "answer": "tree"}).fit(blobs()[0])


def test_merged_clusters(merged, tmp_path):
    vectors = blobs()[0]
    assert merged.config_.answer == "tree"
    assert merged.cluster_centers_.shape == (3, 8)
    assert np.array_equal(merged.predict(vectors), merged.labels_)
    merged.save(tmp_path / "run")
    loaded = SeCu.load(tmp_path / "run", device="cpu")
    assert np.array_equal(loaded.predict(vectors), merged.labels_)
    assert np.array_equal(loaded.cluster_centers_, merged.cluster_centers_)


@pytest.mark.parametrize("kind", ["fitted", "merged"])
def test_pickles(request, kind):
    found = request.getfixturevalue(kind)
    vectors = blobs()[0]
    found.predict(vectors)  # so that there is a predictor that must not be pickled
    copy = pickle.loads(pickle.dumps(found))
    assert copy._predictors == {}
    assert np.array_equal(copy.predict(vectors), found.labels_)
    assert np.array_equal(copy.transform(vectors), found.transform(vectors))


def test_within_a_pipeline(fitted):
    vectors = blobs()[0]
    pipe = make_pipeline(estimator(), KMeans(3, n_init=1, random_state=0)).fit(vectors)
    assert pipe.predict(vectors).shape == (COUNT,)
    assert np.array_equal(pipe[0].labels_, fitted.labels_)
    assert re.match("secu0", pipe[0].get_feature_names_out()[0])
