"""A step without values: on the meta device, whatever waits for a value or mixes two devices is an error.

So it is in a step that is captured as a CUDA graph, which tests without a GPU do not see. Random numbers, autocast and
the optimizer itself, whose fused kernels need a real device, are left out.
"""

from contextlib import nullcontext

import pytest
import torch

from secu.cluster.clustering import Clustering
from secu.methods import Method, build_method
from secu.methods.average import move_towards, values_of
from secu.methods.confident import ConfidentLabels
from secu.settings import merge, resolve
from small_runs import CPU

IMAGES = 32
BATCH = 8
FEATURES = 24
PIXELS = {
    "heads": [4, 4, 9],
    "data": {"image_size": 16, "channels": 3},
    "encoder": {"backbone": "resnet18", "dim": 8},
    "optim": {"epochs": 2, "batch_size": BATCH},
}
SECOND = {"method": "selflabel", "heads": [4], "constraint": {"kind": "none"}}
VECTORS = {
    "data": {"features": FEATURES, "image_size": None, "channels": None},
    "encoder": {"backbone": "none", "trainable": "nothing"},
    "features": {"components": FEATURES},
}
STEPS = {
    "pixels": {},
    "gray": {"data": {"channels": 1}, "augment": {"affine": {}}, "encoder": {"backbone": "small"}},
    "neighbors": {"neighbors": {"count": 3}},
    "both bounds": {"constraint": {"upper": 1.5, "score": "log_prob"}},
    "entropy": {"constraint": {"kind": "entropy", "alpha_over": "seen"}},
    "closed form": {"centers": {"kind": "closed_form"}},
    "k-means": {"centers": {"kind": "kmeans"}},
    "cross-entropy": {"loss": {"name": "ce"}},
    "prediction": {"encoder": {"projection_layers": 3, "prediction_layers": 2}},
    "vectors": VECTORS,
    "neighbors of vectors": merge(VECTORS, {"neighbors": {"count": 3}, "constraint": {"kind": "entropy"}}),
    "self-labeling": merge(SECOND, {"selflabel": {}}),
    "teacher": merge(SECOND, {"selflabel": {"decay": 0.9, "uncertain": "probabilities", "kept": 0.5}}),
    "separate": merge(SECOND, {"selflabel": {"statistics": "separate", "strong_style": "scan"}}),
}


@pytest.fixture(autouse=True)
def _without_autocast(monkeypatch):
    monkeypatch.setattr(Method, "autocast", lambda method: nullcontext())


def without_values(settings: dict) -> Method:
    """Return a method on the meta device, in the middle of a run."""
    config = resolve(merge(PIXELS, settings))
    shape = (FEATURES,) if config.data.features else (config.data.channels, 16, 16)
    method = build_method(config, IMAGES, shape, CPU)
    if isinstance(method.clustering, ConfidentLabels):
        method.clustering.begin(torch.arange(IMAGES) % 4, torch.rand(IMAGES))
    method.train()
    method.start_epoch(0, 0.0)  # which may read values
    method.generator = None
    return method.to("meta")


def step(method: Method) -> dict[str, torch.Tensor]:
    """Do what a step does, except for the optimizer."""
    config = method.config
    shape = (FEATURES,) if config.data.features else (config.data.channels, 16, 16)
    views = (2,) if config.neighbors.count else ()
    inputs = torch.zeros(*views, BATCH, *shape, dtype=torch.float32 if config.data.features else torch.uint8)
    losses = method.losses(inputs.to("meta"), torch.arange(BATCH, device="meta"))
    torch.stack(list(losses.values())).sum().backward()
    method.after_step()
    return losses


@pytest.mark.parametrize("name", STEPS)
def test_a_step_reads_no_value_and_stays_on_its_device(name):
    method = without_values(STEPS[name])
    losses = step(method)
    weights = [weight for weights in method.trained_parameters() for weight in weights]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    assert gradients
    assert {tensor.device.type for tensor in (*losses.values(), *gradients)} == {"meta"}


def test_an_average_of_models_stays_on_its_device():
    method = without_values({"optim": {"average_from": 0.5}})
    average = method.epoch_average
    centers = method.clustering.centers
    with torch.no_grad():
        move_towards([*values_of(average.encoder), average.centers], [*values_of(method.encoder), centers.unit()], 0.5)
    average.put_into(method.encoder, centers)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda labels: labels.sum().item(),
        lambda labels: labels[labels > 0],
        lambda labels: labels + torch.ones(labels.shape, dtype=torch.int64),
    ],
    ids=["value", "shape", "device"],
)
def test_a_mistake_is_noticed(monkeypatch, mistake):
    assign = Clustering.assign

    def with_mistake(clustering, *arguments):
        labels_BH = assign(clustering, *arguments)
        mistake(labels_BH)
        return labels_BH

    monkeypatch.setattr(Clustering, "assign", with_mistake)
    method = without_values({})
    with pytest.raises((RuntimeError, NotImplementedError)):
        step(method)
