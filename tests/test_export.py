"""The exported graph says what the model says, in a program that knows nothing of this one."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from own_images import SHORT, fitted, tree, write_folder
from secu.checkpoint import load_trained
from secu.errors import UserError
from secu.evaluate import Predictor, choose
from secu.export import export_onnx
from secu.run import Run
from secu.settings import load_config, merge

CPU = torch.device("cpu")

KINDS = {
    "grey": (1, {}),
    "colour": (3, {}),
    "cropped": (3, {"augment": {"size": 6}, "data": {"image_size": 8}}),
    "whole": (3, {"augment": {"size": 6, "plain": "whole"}, "data": {"image_size": 8}}),
    "resnet": (3, {"encoder": {"backbone": "resnet18"}, "optim": {"epochs": 0}}),
}


@pytest.fixture(scope="module", params=list(KINDS))
def exported(request, tmp_path_factory):
    """Return a run, what its model says of images, and a session of onnxruntime with its graph."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    channels, asked = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    pictures = write_folder(folder / "p", 60, colour=channels == 3)
    run = fitted(folder, pictures, overrides=merge(SHORT, asked))
    export_onnx(run, folder / "m.onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(folder / "m.onnx", options, providers=["CPUExecutionProvider"])
    arrays = [np.asarray(Image.open(path)) for path in sorted(pictures.rglob("*.png"))]
    images = np.stack(arrays)[:, None] if channels == 1 else np.stack(arrays).transpose(0, 3, 1, 2)
    return run, np.ascontiguousarray(images), session, folder


def expected(run, images):
    model = load_trained(run, images.shape[1:], CPU)
    predictor = Predictor(model.augmentation, model.encoder.eval(), model.clustering.head())
    with torch.inference_mode():
        return choose(predictor(torch.from_numpy(images)), model.config.loss.temperature)


def test_the_graph_says_what_it_takes(exported):
    run, images, session, _ = exported
    told = session.get_modelmeta().custom_metadata_map["preprocessing"]
    assert told.startswith(f"uint8 {'grey' if images.shape[1] == 1 else 'RGB'} 0 to 255; ")
    assert session.get_inputs()[0].shape[1:] == list(run.config().data.shape)


@pytest.mark.parametrize("batch", [1, 2, 3, 17, 60])
def test_the_graph_says_what_the_model_says(exported, batch):
    run, images, session, _ = exported
    found = expected(run, images)
    for start in range(0, len(images), batch):
        cluster, confidence = session.run(None, {"images": images[start : start + batch]})
        there = slice(start, start + len(cluster))
        assert (cluster.dtype, confidence.dtype) == (np.int64, np.float32)
        np.testing.assert_allclose(confidence, found.confidence[there].numpy(), atol=2e-5)
        sure = (found.confidence - found.second_confidence)[there].numpy() > 1e-4
        assert (cluster == found.cluster[there].numpy())[sure].all()


def test_random_pixels_too(exported):
    run, images, session, _ = exported
    noise = np.random.default_rng(0).integers(0, 256, (9, *images.shape[1:]), dtype=np.uint8)
    _, confidence = session.run(None, {"images": noise})
    np.testing.assert_allclose(confidence, expected(run, noise).confidence.numpy(), atol=2e-5)


def test_the_graph_names_its_ends_and_has_a_free_batch(exported):
    run, _, session, folder = exported
    (images,) = session.get_inputs()
    channels, side = len(run.config().data.mean), run.config().data.image_size
    assert (images.name, images.type) == ("images", "tensor(uint8)")
    assert images.shape[1:] == [channels, side, side]
    assert isinstance(images.shape[0], str)
    assert [(output.name, output.type) for output in session.get_outputs()] == [
        ("cluster", "tensor(int64)"),
        ("confidence", "tensor(float)"),
    ]
    assert not list(folder.glob("*.onnx.*"))  # weights inside
    assert not list(folder.glob(".*"))


# Mistakes


def test_exporting_is_silent(tmp_path, capfd, recwarn):
    pytest.importorskip("onnxscript")
    run = fitted(tmp_path, write_folder(tmp_path / "p", 20))
    capfd.readouterr()
    recwarn.clear()
    export_onnx(run, tmp_path / "m.onnx")
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UserError, match=r"export: needs the packages onnx and onnxscript: pip install 'secu\[onnx\]'"):
        export_onnx(Run(tmp_path / "run"), tmp_path / "m.onnx")
    assert tree(tmp_path) == []


def test_a_folder_that_is_not_there_is_named_before_any_work(tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    monkeypatch.setattr("secu.export.load_trained", lambda *a: pytest.fail("work was begun"))
    with pytest.raises(UserError, match=r"export: there is no folder .*nowhere for m.onnx"):
        export_onnx(Run(tmp_path), tmp_path / "nowhere" / "m.onnx")


def test_a_run_of_a_data_set_says_what_it_needs(tmp_path):
    pytest.importorskip("onnxscript")
    run = Run.create(tmp_path / "run", load_config("digits"))
    with pytest.raises(UserError, match="was trained on digits; export needs a run of secu fit"):
        export_onnx(run, tmp_path / "m.onnx")


def test_an_unfinished_run_says_so(tmp_path):
    pytest.importorskip("onnxscript")
    run = Run.create(tmp_path / "run", load_config("digits", ["data.image_size=8"]))
    with pytest.raises(UserError, match="has no model yet"):
        export_onnx(run, tmp_path / "m.onnx")
    assert tree(tmp_path) == ["run", "run/config.yaml"]
