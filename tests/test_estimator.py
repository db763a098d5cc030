"""SeCu as a scikit-learn estimator: the contract, the same results as the command line, and bad input."""

import errno
import json
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from typer.testing import CliRunner

import secu
from secu import SeCu
from secu.apps.fit import FitRequest, prepare
from secu.apps.fit import fit as run_fit
from secu.apps.images import images_of
from secu.apps.selflabel import self_label
from secu.base.errors import UserError
from secu.cli import app
from secu.cluster.metrics import accuracy
from secu.config import Config
from secu.data import load_images, open_images
from secu.results.reading import read_assignments
from secu.train.listener import Listener
from secu.train.run import Run
from small_runs import new_run

DIGITS = load_digits()
X = (DIGITS.images[:60] * 15).astype(np.uint8)
Y = DIGITS.target[:60]


def small(clusters=4, **more):
    return SeCu(clusters, **{"epochs": 1, "device": "cpu", **more})


def same(one, other):
    return np.array_equal(one.labels_, other.labels_) and np.array_equal(one.cluster_centers_, other.cluster_centers_)


@pytest.fixture(scope="module")
def fitted():
    return small().fit(X)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SECU_DATA", str(tmp_path / "data"))


def as_files(folder, mode="L"):
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{i:03d}.png" for i in range(len(X))]
    for path, image in zip(paths, X, strict=True):
        Image.fromarray(image).convert(mode).save(path)
    return paths


# ---- the contract


def test_importing_the_package_does_not_import_torch():
    code = "import secu, sys; print(secu.__version__, 'SeCu' in dir(secu), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [secu.__version__, "True", "False"]
    with pytest.raises(AttributeError, match="no attribute 'SeCuu'"):
        secu.SeCuu  # noqa: B018


def test_what_a_fit_leaves(fitted):
    assert fitted.labels_.shape == (60,)
    assert fitted.labels_.dtype == np.int64
    assert set(fitted.labels_) <= set(range(4))
    assert fitted.cluster_centers_.shape == (4, fitted.config_.encoder.dim)
    assert np.allclose(np.linalg.norm(fitted.cluster_centers_, axis=1), 1, atol=1e-5)
    assert fitted.n_features_in_ == 64
    assert fitted.ids_.tolist() == [str(i) for i in range(60)]
    assert isinstance(fitted.config_, Config)
    assert fitted.config_.clusters == 4
    assert [record["epoch"] for record in fitted.history_] == [0, 1]
    assert any("train longer" in warning for warning in fitted.warnings_)


def test_predictions_agree_with_one_another(fitted):
    found = fitted.predict(X)
    probabilities = fitted.predict_proba(X)
    embeddings = fitted.transform(X)
    assert np.array_equal(found, fitted.labels_)
    assert (found.dtype, probabilities.dtype, embeddings.dtype) == (np.int64, np.float32, np.float32)
    assert np.array_equal(probabilities.argmax(1), found)
    assert np.allclose(probabilities.sum(1), 1, atol=1e-5)
    assert np.allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-5)
    assert np.array_equal((embeddings @ fitted.cluster_centers_.T).argmax(1), found)
    assert fitted.score(X, Y) == accuracy(Y, found)
    names = np.array([f"class {y}" for y in Y])
    assert fitted.score(X, names) == fitted.score(X, Y)


def test_one_image_is_predicted_as_it_is_among_many(fitted):
    alone = np.concatenate([fitted.transform(X[i : i + 1]) for i in range(5)])
    assert np.allclose(alone, fitted.transform(X[:5]), atol=1e-5)


def test_fit_predict_and_fit_transform(fitted):
    assert np.array_equal(small().fit_predict(X, Y), fitted.labels_)
    assert np.array_equal(small().fit_transform(X), fitted.transform(X))


def test_a_refit_gives_the_same_and_another_seed_something_else(fitted):
    again = small()
    assert same(again.fit(X[::-1].copy()).fit(X), fitted)
    assert not same(small(random_state=1).fit(X), fitted)


def test_a_random_state_may_be_missing_or_numpys():
    free = small(random_state=None).fit(X)
    drawn = small(random_state=np.random.RandomState(5)).fit(X)
    assert same(small(random_state=free.config_.seed).fit(X), free)
    assert drawn.config_.seed == np.random.RandomState(5).randint(2**31)
    with pytest.raises(ValueError, match="random_state: -1 must be a whole number"):
        small(random_state=-1).fit(X)


def test_parameters_clone_and_repr():
    estimator = SeCu(5, balance=0.5, settings={"optim.lr": 0.1})
    assert repr(estimator) == "SeCu(balance=0.5, n_clusters=5, settings={'optim.lr': 0.1})"
    assert repr(SeCu()) == "SeCu()"
    assert clone(estimator).get_params() == estimator.get_params()
    assert estimator.set_params(n_clusters=7, epochs=3).get_params()["n_clusters"] == 7
    with pytest.raises(ValueError, match="Invalid parameter 'clusters'"):
        estimator.set_params(clusters=3)


def test_a_clone_is_not_fitted(fitted):
    with pytest.raises(NotFittedError):
        clone(fitted).predict(X)


@pytest.mark.parametrize("method", ["predict", "predict_proba", "transform", "save"])
def test_what_is_not_fitted_says_so(method, tmp_path):
    with pytest.raises(NotFittedError):
        getattr(SeCu(), method)(tmp_path / "run" if method == "save" else X)
    with pytest.raises(NotFittedError):
        SeCu().score(X, Y)
    assert not (tmp_path / "run").exists()


def test_pickles(fitted):
    assert pickle.loads(pickle.dumps(SeCu(3))).get_params() == SeCu(3).get_params()
    before = fitted.transform(X)
    copy = pickle.loads(pickle.dumps(fitted))
    assert not copy._predictors  # tensors of a GPU would not load where there is none
    assert "_predictors" not in pickle.loads(pickle.dumps(SeCu(3))).__dict__
    assert same(copy, fitted)
    assert np.array_equal(copy.transform(X), before)
    assert copy.config_ == fitted.config_


def test_within_a_pipeline(fitted):
    flat = X.reshape(60, -1)
    pipe = Pipeline([("scale", StandardScaler()), ("cluster", small())])
    assert pipe.fit_predict(flat).shape == (60,)
    assert pipe.score(flat, Y) <= 1
    front = make_pipeline(small(), LogisticRegression(max_iter=20)).fit(X, Y)
    assert front.predict(X).shape == (60,)
    assert list(front[:-1].get_feature_names_out()[:2]) == ["secu0", "secu1"]


def test_numbers_may_come_from_numpy(tmp_path):
    settings = {"optim.lr": np.float32(0.1), "heads": np.array([3, 6]), "optim": {"momentum": 0.8}}
    estimator = SeCu(np.int64(3), epochs=np.int64(1), balance=np.float64(0.5), random_state=np.int64(2), device="cpu")
    estimator.set_params(settings=settings).fit(X).save(tmp_path / "run")
    config = SeCu.load(tmp_path / "run").config_
    assert config.heads == (3, 6)
    assert (config.optim.epochs, config.optim.momentum, config.constraint.lower, config.seed) == (1, 0.8, 0.5, 2)


class Table(SeCu):
    """SeCu for scikit-learn's checks, some of which ask for one cluster; their tables are feature vectors."""

    def _request(self, source):
        request = super()._request(source)
        return replace(request, clusters=max(2, request.clusters))


NOT_FOR_US = {
    "check_fit2d_1sample": "wants the word sample; ours are images",
    "check_estimators_dtypes": "has rows of zeros, which have no direction",
}


@parametrize_with_checks([Table(2, epochs=1, device="cpu")], expected_failed_checks=lambda _: NOT_FOR_US)
@pytest.mark.filterwarnings("ignore::Warning")
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


def test_another_number_of_features(fitted):
    flat = X.reshape(60, -1)
    assert np.array_equal(fitted.predict(flat), fitted.labels_)
    with pytest.raises(ValueError, match="X has 49 features, but SeCu is expecting 64 features as input"):
        fitted.predict(flat[:, :49])
    assert fitted.predict(np.zeros((3, 20, 30), np.uint8)).shape == (3,)  # images are scaled, as files are


# ---- the same as the command line


def test_the_same_as_fit_of_a_file(tmp_path):
    np.save(tmp_path / "x.npy", X)
    overrides = {"seed": 3, "optim": {"epochs": 1, "lr": 0.02}}
    prepared = prepare(FitRequest(str(tmp_path / "x.npy"), 4, 0.8, None, overrides, "cpu"))
    finished = run_fit(prepared, tmp_path / "run", report=False)
    results = finished.results
    ours = small(balance=0.8, random_state=3, settings={"optim.lr": 0.02}).fit(X)
    assert np.array_equal(ours.labels_, results.predictions.cluster.numpy())
    assert np.array_equal(ours.cluster_centers_, results.centers.numpy())
    assert np.array_equal(ours.transform(X), results.embeddings.numpy())
    assert ours.warnings_ == results.warnings
    for (key, theirs), (_, value) in zip(finished.run.config(), ours.config_, strict=True):
        assert theirs == value or key == "data"


def test_the_same_as_the_command_line(tmp_path):
    np.save(tmp_path / "x.npy", X)
    options = ["-k", "4", "--out", str(tmp_path / "run"), "--device", "cpu", "--seed", "3", "optim.epochs=1"]
    done = CliRunner().invoke(app, ["fit", str(tmp_path / "x.npy"), *options])
    assert done.exit_code == 0, done.output
    theirs = SeCu.load(tmp_path / "run", device="cpu")
    ours = small(random_state=3).fit(X)
    assert same(ours, theirs)
    assert np.array_equal(ours.predict_proba(X), theirs.predict_proba(X))
    assert ours.warnings_ == theirs.warnings_
    assert (theirs.n_clusters, theirs.balance, theirs.random_state) == (4, None, 3)
    timeless = [{key: r[key] for key in ("epoch", "loss", "changed")} for r in ours.history_]
    assert timeless == [{key: r[key] for key in ("epoch", "loss", "changed")} for r in theirs.history_]


def test_the_command_line_uses_what_was_saved(fitted, tmp_path):
    np.save(tmp_path / "x.npy", X)
    fitted.save(tmp_path / "run")
    table = tmp_path / "found.csv"
    done = CliRunner().invoke(app, ["predict", str(tmp_path / "run"), str(tmp_path / "x.npy"), "-o", str(table)])
    assert done.exit_code == 0, done.output
    assert np.array_equal(np.genfromtxt(table, delimiter=",", skip_header=1, usecols=1, dtype=int), fitted.labels_)


# ---- what X may be


def test_all_kinds_of_gray_images_are_the_same(fitted, tmp_path):
    paths = as_files(tmp_path / "photos")
    np.save(tmp_path / "x.npy", X)
    kinds = {
        "channel last": X[..., None],
        "channel first": X[:, None],
        "rows": X.reshape(60, -1),
        "lists": X.tolist(),
        "list of arrays": list(X),
        "integers": X.astype(np.int64),
        "floats to 1": X / 255,
        "floats to 255": X.astype(np.float32),
        "tensor": torch.from_numpy(X),
        "float tensor": (torch.from_numpy(X) / 255).requires_grad_(),
        "pictures": [Image.fromarray(image) for image in X],
        "paths": paths,
        "array of paths": np.array([str(path) for path in paths]),
        "folder": tmp_path / "photos",
        "glob": str(tmp_path / "photos" / "*.png"),
        "file": str(tmp_path / "x.npy"),
    }
    for name, kind in kinds.items():
        assert np.array_equal(fitted.transform(kind), fitted.transform(X)), name
    for name in ("rows", "floats to 1", "float tensor", "pictures", "paths", "folder"):
        assert same(small().fit(kinds[name]), fitted), name


def test_color():
    color = np.random.default_rng(0).integers(0, 255, (40, 10, 12, 3), np.uint8)
    fitted = small(2).fit(color)
    assert fitted.n_features_in_ == 360
    assert len(fitted.config_.data.mean) == 3
    assert same(small(2).fit(color.transpose(0, 3, 1, 2)), fitted)
    assert same(small(2).fit([Image.fromarray(image) for image in color]), fitted)
    assert fitted.predict(X).shape == (60,)  # gray ones are shown to it in color


def test_ids_and_images_that_cannot_be_read(tmp_path):
    paths = as_files(tmp_path / "photos")
    paths[7].write_bytes(b"no image")
    fitted = small().fit(tmp_path / "photos")
    assert fitted.labels_.shape == (59,)
    assert fitted.ids_.tolist() == [path.name for path in paths if path != paths[7]]
    assert fitted.n_features_in_ == 64
    for images in (paths, tmp_path / "photos"):
        with pytest.raises(UserError, match=r"007.png cannot be read: not an image"):
            fitted.predict(images)
    with pytest.raises(UserError, match=r"007.png cannot be read"):
        small().fit(paths)
    lines = [str(path) for path in (paths[0], paths[1], paths[0])]
    (tmp_path / "twice.csv").write_text("\n".join(["path", *lines]))
    with pytest.raises(UserError, match=r"X: .*000.png: .*; predict needs every image"):
        fitted.predict(tmp_path / "twice.csv")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "HSV", "exif", "transparent"])
def test_pictures_are_decoded_as_their_files_are(mode, tmp_path):
    noise = np.random.default_rng(1).integers(0, 255, (20, 30, 4), np.uint8)
    picture = Image.fromarray(noise, "RGBA")
    path = tmp_path / "x.png"
    options = {}
    if mode == "exif":
        picture = picture.convert("RGB")
        path = tmp_path / "x.tiff"
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = 6
    elif mode == "transparent":
        picture = picture.convert("RGB").quantize(8)
        options["transparency"] = 2
    elif mode == "I;16":
        picture = Image.fromarray(noise[..., 0].astype(np.uint16) * 256)
    else:
        picture = picture.convert("RGB").convert(mode) if mode != "RGBA" else picture
        path = tmp_path / "x.tiff" if mode == "CMYK" else path
    (picture.convert("RGB") if mode == "HSV" else picture).save(path, **options)
    given = picture if mode not in ("exif", "transparent") else Image.open(path)
    for channels in (1, 3):
        in_memory = load_images(open_images([given]), (channels, 8, 8))
        from_file = load_images(open_images([path]), (channels, 8, 8))
        assert torch.equal(in_memory.tensor, from_file.tensor)


def test_dark_images_alone_are_on_the_scale_that_fit_saw(tmp_path):
    deep = X.astype(np.uint16) * 257
    deep[:5] //= 300
    fitted = small().fit(deep)
    fitted.save(tmp_path / "run")
    assert deep[:5].max() < 256
    for estimator in (fitted, SeCu.load(tmp_path / "run")):
        assert np.allclose(estimator.transform(deep[:5]), fitted.transform(deep)[:5], atol=1e-5)


def test_another_scale_than_that_of_fit_is_refused(tmp_path):
    fitted = small().fit(X / 255)
    fitted.save(tmp_path / "run")
    for estimator in (fitted, SeCu.load(tmp_path / "run")):
        with pytest.raises(UserError, match=r"X contains values from 0 to 240.* the run was trained on float 0..1"):
            estimator.predict(X.astype(np.float32))
        assert np.array_equal(estimator.predict(X), fitted.labels_)  # bytes have a scale of their own


def test_what_was_fitted_to_a_folder_knows_its_images(tmp_path):
    paths = as_files(tmp_path / "photos")
    small().fit(tmp_path / "photos").save(tmp_path / "run")
    (tmp_path / "photos" / "new.png").write_bytes(paths[0].read_bytes())
    assert len(images_of(Run.open(tmp_path / "run"), Listener())) == len(X)


# ---- what is reported, and what is left


def test_the_callback_receives_each_epoch():
    records = []
    fitted = small(callback=records.append).fit(X)
    assert records == fitted.history_
    assert {"epoch", "loss", "center_loss", "largest", "smallest", "changed", "seconds"} <= records[0].keys()


def test_silent_and_verbose(capfd):
    small(callback=lambda record: print("mine")).fit(X).predict(X)
    assert capfd.readouterr() == ("mine\nmine\n", "")
    small(verbose=1).fit(X)
    out, err = capfd.readouterr()
    assert out == ""
    assert "training on cpu" in err
    assert "warning: " in err


def test_a_fit_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    torch.manual_seed(0)
    state = torch.get_rng_state()
    pickle.loads(pickle.dumps(small().fit(X))).predict(X)
    assert not list((tmp_path / "temporary").iterdir())
    assert not (tmp_path / "data").exists()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_run_may_be_kept(fitted, tmp_path):
    estimator = small(out=tmp_path / "run").fit(X)
    assert same(estimator, fitted)
    assert {"report.html", "assignments.csv", "clusters.csv", "state.safetensors"} <= {
        p.name for p in (tmp_path / "run").iterdir()
    }
    assert same(SeCu.load(tmp_path / "run"), fitted)
    with pytest.raises(UserError, match="exists"):
        estimator.fit(X)


def test_save_and_load(fitted, tmp_path, monkeypatch):
    estimator = small(settings={"optim.lr": 0.02}, balance=0.7).fit(X)
    estimator.save(tmp_path / "run")
    for name in ("torch.load", "pickle.load", "pickle.loads", "pickle.Unpickler"):
        monkeypatch.setattr(name, None)
    loaded = SeCu.load(tmp_path / "run", device="cpu")
    assert loaded.get_params() == estimator.get_params()
    assert same(loaded, estimator)
    assert np.array_equal(loaded.transform(X), estimator.transform(X))
    for name in ("config_", "history_", "warnings_", "n_features_in_"):
        assert getattr(loaded, name) == getattr(estimator, name)
    assert same(loaded.fit(X), estimator)
    with pytest.raises(UserError, match="exists"):
        fitted.save(tmp_path / "run")
    fitted.save(tmp_path / "run", force=True)
    assert same(SeCu.load(tmp_path / "run"), fitted)


def test_a_full_disk_neither_costs_the_old_run_nor_leaves_half_a_new_one(fitted, tmp_path, monkeypatch):
    fitted.save(tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    write = Path.write_bytes

    def full(path, content):
        write(path, content[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    for name in ("run", "other"):
        with pytest.raises(OSError, match="No space left"):
            fitted.save(tmp_path / name, force=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_cannot_be_loaded(fitted, tmp_path):
    with pytest.raises(UserError, match="is not a run folder"):
        SeCu.load(tmp_path)
    no = "no .*/assignments.csv; was it stopped early"
    for name, match in {
        "model.safetensors": "has no model",
        "assignments.csv": no,
        "run.json": "no .*/run.json",
    }.items():
        fitted.save(tmp_path / name)
        (tmp_path / name / name).unlink()
        with pytest.raises(UserError, match=match):
            SeCu.load(tmp_path / name)
    for name, text in {
        "run.json": "[]",
        "assignments.csv": "id,cluster\n1,x\n",
        "model.safetensors": "cos\nsystem",
    }.items():
        fitted.save(tmp_path / "bad", force=True)
        (tmp_path / "bad" / name).write_text(text)
        with pytest.raises(UserError, match="run: "):
            SeCu.load(tmp_path / "bad")
    unknown = fitted.config_.model_copy(update={"data": fitted.config_.data.model_copy(update={"image_size": None})})
    fitted.save(tmp_path / "unknown")
    new_run(tmp_path / "other", unknown)
    for name in ("run.json", "metrics.jsonl", "model.safetensors", "assignments.csv", "clusters.csv"):
        shutil.copy(tmp_path / "unknown" / name, tmp_path / "other")
    with pytest.raises(UserError, match=r"data\.image_size: must be a number of pixels"):
        SeCu.load(tmp_path / "other")


def test_a_run_of_a_recipe_is_loaded(tiny_digits, tmp_path):
    """A run knows its input, so that one of a named data set, like that of ``secu demo``, is used like any other."""
    loaded = SeCu.load(tiny_digits.path, device="cpu")
    table = read_assignments(tiny_digits.path / "assignments.csv")
    assert (loaded.n_clusters, loaded.n_features_in_, loaded.balance) == (10, 64, None)
    assert loaded.labels_.tolist() == table["cluster"]
    assert loaded.ids_.tolist() == table["id"]
    assert np.array_equal(loaded.predict(DIGITS.images), loaded.labels_)
    assert loaded.transform(DIGITS.images[:3]).shape == (3, 8)
    loaded.save(tmp_path / "saved")
    assert same(SeCu.load(tmp_path / "saved", device="cpu"), loaded)
    assert Run.open(tmp_path / "saved").config() == tiny_digits.config()


def test_the_head_that_answers_is_loaded(tiny_digits, tmp_path):
    """Not always the first one."""
    shutil.copytree(tiny_digits.path, tmp_path / "run")
    Run(tmp_path / "run").amend({"head": 1})
    loaded = SeCu.load(tmp_path / "run", device="cpu")
    assert loaded.n_clusters == 20
    assert loaded.cluster_centers_.shape == (20, 8)
    assert loaded.predict_proba(X).shape == (60, 20)


def test_the_columns_of_the_table_may_be_in_any_order(fitted, tmp_path):
    """Labels are read by the names of the columns, and with their types."""
    fitted.save(tmp_path / "run")
    path = tmp_path / "run" / "assignments.csv"
    rows = [line.split(",") for line in path.read_text().splitlines()]
    path.write_text("".join(",".join(["more", *row[::-1]]) + "\n" for row in rows))
    loaded = SeCu.load(tmp_path / "run", device="cpu")
    assert np.array_equal(loaded.labels_, fitted.labels_)
    assert loaded.labels_.dtype == np.int64
    assert loaded.ids_.tolist() == fitted.ids_.tolist()
    assert loaded.warnings_ == fitted.warnings_


def test_another_device_needs_no_file(fitted, monkeypatch):
    """The model is in memory: what is asked for later is built from it, on the device that is wanted then."""
    copy = pickle.loads(pickle.dumps(fitted))
    places = []
    build = secu.estimator.method_of

    def noted(config, tensors, device, name):
        places.append(device)
        return build(config, tensors, torch.device("cpu"), name)

    monkeypatch.setattr("secu.estimator.method_of", noted)
    monkeypatch.setattr("secu.estimator.choose_device", torch.device)
    monkeypatch.setattr("secu.estimator.TemporaryDirectory", None)
    monkeypatch.setattr("tempfile.mkdtemp", None)
    for device in ("cpu", "meta", "cpu"):
        assert np.array_equal(copy.set_params(device=device).predict(X), fitted.labels_)
    assert places == [torch.device("cpu"), torch.device("meta")]  # each is built once


def test_a_loaded_estimator_of_the_command_line_has_no_note(fitted, tmp_path):
    fitted.save(tmp_path / "run")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    del record["estimator"]
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    loaded = SeCu.load(tmp_path / "run")
    assert (loaded.n_features_in_, loaded.epochs, loaded.settings) == (64, None, None)
    assert np.array_equal(loaded.predict(X), fitted.labels_)


# ---- bad input

NAN = np.where(np.arange(60)[:, None, None] == 7, np.nan, X / 255)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (X[:0], "0 sample"),
        ([], "0 sample"),
        (X[:1], "2 clusters need at least 2 images, got 1"),
        (X[0, 0], r"Reshape your data to \(N, H, W\)"),
        (np.zeros((5, 63), np.uint8), "rows of 63 bytes are not squares"),
        (np.zeros((5, 3072), np.uint8), "rows of 3072 bytes are not squares"),
        (np.zeros((5, 63)), "vectors of zeros, which have no direction, first in row 0"),
        (np.zeros((5, 8, 8, 4)), r"shape \(5, 8, 8, 4\)"),
        (np.zeros((5, 2, 2, 2, 2)), "shape"),
        (np.zeros((5, 0, 8)), "shape"),
        (NAN, "NaN or infinite values in 1 of 60 images, first in 7"),
        (np.where(np.isnan(NAN), np.inf, NAN), "NaN or infinite"),
        (X - 100.0, "valid: 0 to 1, 0 to 16 or 0 to 255"),
        (X + 0j, "Complex data not supported"),
        ([X[0], X[1, :4]], "inhomogeneous"),
        (["nowhere.png"] * 5, "none of 5 images tried in X can be read"),
        ("nowhere", "nowhere does not exist"),
    ],
)
def test_bad_images_are_one_line(images, message):
    with pytest.raises(UserError, match=message) as caught:
        small(2).fit(images)
    assert "\n" not in str(caught.value)


def test_an_empty_folder(fitted, tmp_path):
    for method in (small().fit, fitted.predict):
        with pytest.raises(UserError, match="no images"):
            method(tmp_path)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"n_clusters": 1}, "1 must be at least 2"),
        ({"n_clusters": 61}, "61 clusters need at least 61 images, got 60"),
        ({"n_clusters": 2.5}, "n_clusters: 2.5 must be a whole number"),
        ({"n_clusters": None}, "n_clusters: None must be a whole number"),
        ({"balance": 1.5}, "balance: 1.5 must be a number from 0 to 1"),
        ({"balance": "much"}, "balance: 'much' must be a number"),
        ({"epochs": "all"}, "epochs: 'all' must be a whole number"),
        ({"epochs": -1}, "epochs: -1 must be a whole number from 0"),
        ({"device": "abacus"}, "device: 'abacus' is not available"),
        ({"settings": ["optim.lr=1"]}, "settings: .* must be a dict"),
        ({"settings": {"optim.lrr": 1}}, "optim.lrr: unknown setting; did you mean lr"),
        ({"settings": {"heads": [5, 10]}}, r"heads: \[5, 10\] must start with the requested 4 clusters"),
        ({"settings": {"optim.lr": 1e38, "optim.initial_epochs": 0}}, "is not finite; lower optim.lr"),
        ({"self_label": "no"}, "self_label: 'no' must be True, False or the settings"),
        ({"self_label": True, "settings": {"selflabel.kept": 7}}, "selflabel.kept: 7: input should be less than"),
        ({"self_label": {"optim.epoch": 7}}, "optim.epoch: unknown setting; did you mean epochs"),
        ({"self_label": {"heads": [3]}}, r"heads: self-labeling continues .*, so it must be \[4\], got \[3\]"),
        ({"self_label": {"engine": "graph"}}, "engine: graph needs a CUDA device"),
        ({"self_label": {"data.mean": [0.1]}}, "data.mean: self-labeling continues"),
        ({"settings": {"selflabel.kept": 0.7}}, "settings: selflabel is only read with self_label=True"),
    ],
)
def test_bad_parameters_are_one_line_and_leave_no_run(parameters, message, tmp_path):
    with pytest.raises(UserError, match=message) as caught:
        small(out=tmp_path / "run").set_params(**parameters).fit(X)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_wrong_labels_for_the_score(fitted):
    for labels in (None, Y[:10], Y[:, None]):
        with pytest.raises(UserError, match=r"y: expected one true label per image \(60\), got shape"):
            fitted.score(X, labels)


def test_self_label_is_fit_and_then_the_second_stage(tmp_path):
    """The estimator compared with the two functions by themselves: same clusters, and a model that gives them."""
    settings = {"encoder.dim": 16}
    records = []
    model = small(self_label=True, settings=settings, out=tmp_path / "run", callback=records.append).fit(X)
    assert len(records) == 2 + 100  # the initial epoch and one more, then those of the second stage
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith("run")} == {"run", "run-first"}
    assert model.config_.method == "selflabel"
    first = Run.open(tmp_path / "run-first")
    assert first.config().method == "secu"
    images = load_images(open_images(X), (1, 8, 8))
    finished = self_label(first, tmp_path / "other", images=images, device="cpu", report=False)
    expected = read_assignments(finished.run.path / "assignments.csv")["cluster"]
    assert model.labels_.tolist() == expected
    assert model.warnings_ == finished.warnings
    assert model.predict(X).tolist() == expected
    model.save(tmp_path / "saved")
    loaded = SeCu.load(tmp_path / "saved", device="cpu")
    assert same(model, loaded)
    assert loaded.get_params()["self_label"] is True
    assert loaded.warnings_ == model.warnings_
    assert loaded.predict_proba(X) == pytest.approx(model.predict_proba(X))
    with pytest.raises(UserError, match="already exists; choose a new folder"):
        small(self_label=True, out=tmp_path / "run").fit(X)


def test_the_second_run_has_settings_of_its_own(tmp_path):
    records = []
    asked = {"optim.epochs": 3, "selflabel.confidence": 0.8}
    model = small(self_label=asked, settings={"selflabel.kept": 0.3}, callback=records.append).fit(X)
    assert len(records) == 2 + 3
    settings = model.config_.selflabel
    assert (model.config_.optim.epochs, settings.confidence, settings.kept) == (3, 0.8, 0.3)
    model.save(tmp_path / "saved")
    assert SeCu.load(tmp_path / "saved", device="cpu").get_params()["self_label"] == asked
