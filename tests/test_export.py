"""The exported graph gives the answers of the model, in a program that knows nothing of this package."""

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from own_images import SHORT, fitted, tree, write_folder
from secu.apps.export import export_onnx
from secu.base.errors import UserError
from secu.methods.predictor import Predictions, Predictor
from secu.settings import load_config, merge
from secu.train.checkpoint import load_predictor
from secu.train.run import Run
from small_runs import new_run

CPU = torch.device("cpu")

KINDS = {
    "gray": (1, {}),
    "color": (3, {}),
    "cropped": (3, {"augment": {"size": 6}, "data": {"image_size": 8}}),
    "whole": (3, {"augment": {"size": 6, "plain": "whole"}, "data": {"image_size": 8}}),
    "resnet": (3, {"encoder": {"backbone": "resnet18"}, "optim": {"epochs": 0}}),
}


class Exported(NamedTuple):
    """A run, its predictor, images with their predictions, and a session of onnxruntime with the run's graph."""

    run: Run
    predictor: Predictor
    images: np.ndarray
    found: Predictions
    session: Any
    folder: Path


def session_of(path):
    """Return a session of onnxruntime with a graph."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module", params=list(KINDS))
def exported(request, tmp_path_factory):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    channels, asked = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    pictures = write_folder(folder / "p", 60, color=channels == 3)
    run = fitted(folder, pictures, overrides=merge(SHORT, asked))
    export_onnx(run, folder / "m.onnx")
    arrays = [np.asarray(Image.open(path)) for path in sorted(pictures.rglob("*.png"))]
    images = np.stack(arrays)[:, None] if channels == 1 else np.stack(arrays).transpose(0, 3, 1, 2)
    images = np.ascontiguousarray(images)
    predictor = load_predictor(run, CPU)
    return Exported(run, predictor, images, expected(predictor, images), session_of(folder / "m.onnx"), folder)


def expected(predictor, images):
    with torch.inference_mode():
        return predictor.choose(predictor(torch.from_numpy(images)))


def agrees(session, images, found):
    """Check clusters and confidence of the graph against those of the model."""
    cluster, confidence = session.run(None, {"images": images})
    assert (cluster.dtype, confidence.dtype) == (np.int64, np.float32)
    np.testing.assert_allclose(confidence, found.confidence.numpy(), atol=2e-5)
    clear = (found.confidence - found.second_confidence).numpy() > 1e-4
    assert (cluster == found.cluster.numpy())[clear].all()


def test_the_graph_describes_what_it_takes(exported):
    described = exported.session.get_modelmeta().custom_metadata_map["preprocessing"]
    assert described.startswith(f"uint8 {'gray' if exported.images.shape[1] == 1 else 'RGB'} 0 to 255; ")
    assert exported.session.get_inputs()[0].shape[1:] == list(exported.run.input_shape())


@pytest.mark.parametrize("batch", [1, 2, 3, 17, 60])
def test_the_graph_gives_the_answers_of_the_model(exported, batch):
    for start in range(0, len(exported.images), batch):
        rows = slice(start, start + batch)
        found = Predictions(*(getattr(exported.found, field.name)[rows] for field in fields(Predictions)))
        agrees(exported.session, exported.images[rows], found)


def test_the_graph_takes_any_pixels(exported):
    noise = np.random.default_rng(0).integers(0, 256, (9, *exported.images.shape[1:]), dtype=np.uint8)
    _, confidence = exported.session.run(None, {"images": noise})
    np.testing.assert_allclose(confidence, expected(exported.predictor, noise).confidence.numpy(), atol=2e-5)


def test_the_graph_names_its_ends_and_has_a_free_batch(exported):
    (images,) = exported.session.get_inputs()
    assert (images.name, images.type) == ("images", "tensor(uint8)")
    assert images.shape[1:] == list(exported.run.input_shape())
    assert isinstance(images.shape[0], str)
    assert [(output.name, output.type) for output in exported.session.get_outputs()] == [
        ("cluster", "tensor(int64)"),
        ("confidence", "tensor(float)"),
    ]
    assert not list(exported.folder.glob("*.onnx.*"))  # weights inside
    assert not list(exported.folder.glob(".*"))


# Mistakes


def test_exporting_is_silent(tiny_fit, tmp_path, capfd, recwarn):
    pytest.importorskip("onnxscript")
    capfd.readouterr()
    recwarn.clear()
    export_onnx(tiny_fit, tmp_path / "m.onnx")
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list


def test_a_missing_package_is_reported(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UserError, match=r"export: needs the packages onnx and onnxscript: pip install 'secu\[onnx\]'"):
        export_onnx(Run(tmp_path / "run"), tmp_path / "m.onnx")
    assert tree(tmp_path) == []


def test_a_missing_folder_is_reported_before_any_work(tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    monkeypatch.setattr("secu.apps.export.load_predictor", lambda *a: pytest.fail("work was started"))
    with pytest.raises(UserError, match=r"export: folder .*nowhere does not exist"):
        export_onnx(Run(tmp_path), tmp_path / "nowhere" / "m.onnx")


def test_an_unfinished_run_is_refused(tmp_path):
    pytest.importorskip("onnxscript")
    run = new_run(tmp_path / "run", load_config("digits"))
    with pytest.raises(UserError, match="has no model yet"):
        export_onnx(run, tmp_path / "m.onnx")
    assert tree(tmp_path) == ["run", "run/config.yaml"]


class Branching(torch.nn.Module):
    """Decides by its input, which a graph cannot; or runs out of memory."""

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self.predictor = predictor

    def forward(self, images):
        return (images, images) if images.sum() > 0 else (-images, images)


class Starved(Branching):
    def forward(self, images):
        raise MemoryError


def test_what_cannot_be_converted_is_reported_in_one_line(tiny_fit, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    monkeypatch.setattr("secu.apps.export.Exported", Branching)
    with pytest.raises(UserError, match=r"^export: torch \S+ cannot convert this model, or has too little memory \(\w"):
        export_onnx(tiny_fit, tmp_path / "model.onnx")
    assert tree(tmp_path) == []


def test_an_export_without_memory_says_so(tiny_fit, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    monkeypatch.setattr("secu.apps.export.Exported", Starved)
    with pytest.raises(MemoryError):
        export_onnx(tiny_fit, tmp_path / "model.onnx")
