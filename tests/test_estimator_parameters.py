"""Wrong parameters and wrong X of the estimator: one line that names the value, before anything is done."""

from pathlib import Path

import numpy as np
import pytest
import torch

from own_images import tree
from secu import SeCu
from secu.base.errors import UserError


class Odd:
    """An object that cannot even describe itself."""

    def __repr__(self):
        raise RuntimeError("no words")


NAN = float("nan")
LONG = "x" * 10_000
WRONG = {
    "n_clusters": [
        "10",
        "many",
        "5..3",
        "1..4",
        "5..",
        None,
        NAN,
        -1,
        0,
        1,
        True,
        [3],
        2.5,
        Odd(),
        10**30,
        np.array([3]),
        np.float64(3),
    ],
    "epochs": ["5", NAN, -1, True, [3], 2.5, Odd(), 10**30, np.array(3)],
    "random_state": ["5", NAN, -1, 2.5, [3], Odd(), 2**32, True, np.random.default_rng(0)],
    "balance": ["0.5", NAN, -1, 1.5, True, [0.5], Odd(), float("inf"), 10**400, np.array([0.5])],
    "device": [None, 5, ["cpu"], Odd(), NAN, torch.device("cpu"), "gpu", ""],
    "encoder": [5, ["lite0"], Odd(), True, "", NAN, "bogus", "hf:"],
    "self_label": ["yes", None, 5, [1], Odd(), NAN, LONG],
    "settings": [LONG, 5, [1], Odd(), True, {"bogus": 1}, {1: 2}, {"optim.lr": NAN}, {"optim.lr": Odd}],
    "out": [5, [1], Odd(), True, "", NAN, "a\0b", b"bytes"],
    "allow_bad": ["x", None, 5, Odd(), [1]],
    "callback": [5, "x", [1], Odd()],
    "verbose": ["x", None, -1, [1], Odd(), NAN],
}
IMAGES = np.random.default_rng(0).integers(0, 256, (20, 8, 8), np.uint8)


@pytest.fixture(autouse=True)
def untouched(tmp_path, monkeypatch):
    """Nothing is trained, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("secu.estimator.fit", None)
    yield
    assert tree(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in WRONG for value in WRONG[name]],
    ids=lambda value: type(value).__name__,
)
def test_a_wrong_parameter_is_named_in_one_line_and_nothing_is_written(name, value):
    model = SeCu(**{"n_clusters": 2, "encoder": "scratch", "device": "cpu", name: value})  # __init__ only stores
    assert getattr(model, name) is value
    with pytest.raises(UserError) as caught:
        model.fit(IMAGES)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    settings = {"settings": ("bogus", "1: unknown", "optim.lr"), "encoder": ("encoder.backbone: ",)}
    settings["n_clusters"] = ("clusters: ",)
    assert message.startswith((f"{name}: ", *settings.get(name, ())))
    if not isinstance(value, dict | Odd):
        assert str(value)[:50] in message or repr(value)[:50] in message


OBJECTS = {
    "nothing": None,
    "number": 5,
    "nan": NAN,
    "switch": True,
    "dict": {"a": 1},
    "set": {1},
    "object": object(),
    "bytes": b"bytes",
    "empty list": [],
    "numbers": [1, 2],
    "ragged": [[1, 2], [3]],
    "objects": [object()] * 3,
    "0-d": np.array(3.0),
    "0-d text": np.array("x"),
    "1-d": np.zeros(5),
    "5-d": np.zeros((2, 2, 2, 2, 2)),
    "no images": np.zeros((0, 8, 8), np.uint8),
    "no pixels": np.zeros((20, 8, 0), np.uint8),
    "no features": np.zeros((20, 0)),
    "seven channels": np.zeros((20, 8, 8, 7), np.uint8),
    "complex": np.zeros((20, 8, 8), complex),
    "dates": np.zeros((20, 8, 8), "datetime64[s]"),
    "nan pixels": np.full((20, 8, 8), np.nan),
    "infinite features": np.full((20, 5), np.inf),
    "negative": torch.zeros((20, 8, 8), dtype=torch.int64) - 5,
    "no such file": "nofile",
    "no such files": ["nofile.png"],
    "null": "a\0b",
    "empty path": "",
}


@pytest.mark.parametrize("name", OBJECTS)
def test_a_wrong_x_is_reported_in_one_line_and_nothing_is_written(name):
    with pytest.raises((ValueError, TypeError)) as caught:
        SeCu(2, encoder="scratch", device="cpu").fit(OBJECTS[name])
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(("X", "source: "))
    assert "valid: " in message or "X" in message or "expected" in message or "Reshape" in message


@pytest.mark.parametrize("path", [None, 5, "", b"bytes", "a\0b", NAN, Odd()], ids=lambda value: type(value).__name__)
def test_load_and_save_need_a_path(tiny_fit, path):
    with pytest.raises(UserError, match=r"^path: .* must be the path of a folder$"):
        SeCu.load(path)
    model = SeCu.load(tiny_fit.path, device="cpu")
    with pytest.raises(UserError, match=r"^path: .* must be the path of a folder$"):
        model.save(path)


def test_true_labels_that_cannot_be_compared_are_refused(tiny_fit, tiny_pictures):
    model = SeCu.load(tiny_fit.path, device="cpu")
    paths = sorted(map(str, Path(tiny_pictures).rglob("*.png")))
    with pytest.raises(UserError, match="y: true labels must be numbers or texts"):
        model.score(paths, [None] * len(paths))
