"""A trained model as one ONNX graph, for programs that know nothing of this one."""

import logging
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from secu.checkpoint import load_trained
from secu.errors import UserError
from secu.evaluate import Predictor
from secu.files import write_atomically
from secu.run import Run


class Exported(nn.Module):
    """uint8 images (N, C, H, W) → their cluster (N,) int64 and its confidence (N,) float32."""

    def __init__(self, predictor: Predictor, temperature: float) -> None:
        super().__init__()
        self.predictor, self.temperature = predictor, temperature

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return cluster and confidence of each image."""
        chances_NK = torch.softmax(self.predictor(images) / self.temperature, -1)
        confidence_N, cluster_N = chances_NK.max(-1)
        return cluster_N, confidence_N


def export_onnx(run: Run, path: Path) -> None:
    """Write preprocessing, encoder and head as one graph with a free batch size, weights inside."""
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise UserError("export: needs the packages onnx and onnxscript: pip install 'secu[onnx]'") from None
    if not path.parent.is_dir():
        raise UserError(f"export: there is no folder {path.parent} for {path.name}")
    config = run.config()
    shape = config.data.shape
    if shape is None:
        raise UserError(f"run: {run.path} was trained on {config.data.name}; export needs a run of secu fit")
    model = load_trained(run, shape, torch.device("cpu"))
    predictor = Predictor(model.augmentation, model.encoder, model.clustering.head())
    module = Exported(predictor, config.loss.prediction_temperature).eval()
    example = torch.randint(0, 256, (2, *shape), dtype=torch.uint8)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore"):  # what torch says to itself
        program = torch.onnx.export(
            module,
            (example,),
            input_names=["images"],
            output_names=["cluster", "confidence"],
            dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    how = "shorter side scaled to the size with an antialiased bilinear filter, then the middle square"
    program.model.metadata_props["preprocessing"] = f"uint8 {'grey' if shape[0] == 1 else 'RGB'} 0 to 255; {how}"
    write_atomically(path, lambda temporary: program.save(temporary, external_data=False))
