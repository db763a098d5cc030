"""The label-free score: how stable labels are under random changes of the images."""

import math

import pytest
import torch
from sklearn.metrics import mutual_info_score

from secu.methods import Method, predictor
from secu.methods.outcome import consistency
from secu.methods.predictor import evaluation_mode
from secu.settings import load_config
from small_runs import digits, trained


@pytest.fixture(scope="module")
def method(tmp_path_factory) -> Method:
    """Train a small run."""
    config = load_config("digits", ["heads=[4,6]", "optim.epochs=2", "encoder.dim=16"])
    return trained(tmp_path_factory.mktemp("consistency") / "run", config, digits(120)).method


@pytest.mark.parametrize("numbers", [(0, 1), (1,)])
def test_each_image_is_compared_with_its_views(method, monkeypatch, numbers):
    """Image by image and view by view, with the random numbers drawn in their order, and the same ones every time."""
    monkeypatch.setitem(predictor.BATCH_IMAGES, "cpu", 20)
    images = digits(120)
    index = torch.arange(0, 120, 3)
    model = method.predictor()
    found = consistency(model, method.views, images, index, numbers)
    plain = []
    seen = []
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(), evaluation_mode(method.encoder):
        for batch in index.split(20):
            pixels = images.tensor[batch]
            views = method.views.render(pixels, method.views.draw(len(batch), generator))
            for number in numbers:
                plain += (method.encoder.embed(method.views.plain(pixels)) @ model.centers.T).argmax(-1).tolist()
                seen += (method.encoder.embed(views[number]) @ model.centers.T).argmax(-1).tolist()
    same = sum(a == b for a, b in zip(plain, seen, strict=True))
    assert found.agreement == pytest.approx(same / (40 * len(numbers)))
    assert found.information == pytest.approx(mutual_info_score(plain, seen) / math.log(4), abs=1e-9)
    assert 0 < found.agreement < 1
    assert consistency(model, method.views, images, index, numbers) == found


def test_looking_changes_no_state(method):
    before = {key: value.clone() for key, value in method.state_dict().items()}
    method.train()
    consistency(method.predictor(), method.views, digits(120), torch.arange(120))
    assert method.encoder.training
    assert all(torch.equal(value, before[key]) for key, value in method.state_dict().items())
