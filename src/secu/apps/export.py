"""Export of a trained model as a single ONNX graph, for use without this package."""

import logging
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from secu.base.errors import UserError
from secu.base.files import write_atomically
from secu.data.text import one_line
from secu.methods.predictor import Predictor
from secu.train.checkpoint import load_predictor
from secu.train.run import Run


class Exported(nn.Module):
    """uint8 images (N, C, H, W), or feature vectors (N, D) → cluster (N,) int64 and its confidence (N,) float32."""

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self.predictor = predictor

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return cluster and confidence of each image."""
        probabilities_NK = torch.softmax(self.predictor(images) / self.predictor.temperature, -1)
        confidence_N, cluster_N = probabilities_NK.max(-1)
        return cluster_N, confidence_N


def export_onnx(run: Run, path: Path) -> None:
    """Write preprocessing, encoder and head as one graph with a dynamic batch size and embedded weights."""
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise UserError("export: needs the packages onnx and onnxscript: pip install 'secu[onnx]'") from None
    if not path.parent.is_dir():
        raise UserError(f"export: folder {path.parent} does not exist")
    shape = run.input_shape()
    predictor = load_predictor(run, torch.device("cpu"))
    if predictor.front is not None:
        predictor.front.load()
    module = Exported(predictor).eval()
    on_images = len(shape) == 3
    example = torch.randint(0, 256, (2, *shape), dtype=torch.uint8) if on_images else torch.rand(2, *shape)
    name = "images" if on_images else "features"
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns about its own internals
            program = torch.onnx.export(
                module,
                (example,),
                input_names=[name],
                output_names=["cluster", "confidence"],
                dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # any: a model of the hub may do what a graph cannot, or memory runs out somewhere
        raise _explained(error) from error
    assert program is not None
    how = "shorter side scaled to the size with an antialiased bilinear filter, then center-cropped"
    pixels = f"uint8 {'gray' if shape[0] == 1 else 'RGB'} 0 to 255; {how}"
    program.model.metadata_props["preprocessing"] = pixels if on_images else "none: feature vectors as in training"
    write_atomically(path, lambda temporary: program.save(temporary, external_data=False))


def _explained(error: BaseException) -> Exception:
    """Return the first cause of the exporter's error in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, MemoryError):
        return error
    cause = f"{type(error).__name__}: {one_line(error)}"
    return UserError(f"export: torch {torch.__version__} cannot convert this model, or has too little memory ({cause})")
