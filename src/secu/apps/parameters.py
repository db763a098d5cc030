"""The estimator's parameters: what is valid, the request that they amount to, and what run.json keeps of them.

A wrong type or value is reported in one line that says what is valid.
"""

import numbers
import operator
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.utils import check_random_state

from secu.apps.fit import FitRequest
from secu.apps.ranges import AUTO, parse_clusters
from secu.base.errors import UserError
from secu.data import Source
from secu.settings import flatten, merge, nest

LONGEST = 100  # characters of a value that a message repeats
MOST_EPOCHS = 1_000_000
NOTED = ("n_clusters", "epochs", "settings", "encoder", "balance", "self_label")  # parameters in run.json


def check_parameters(parameters: Mapping[str, Any]) -> None:
    """Raise ``UserError`` if a parameter of ``SeCu`` has a wrong type or an impossible value.

    What depends on other parameters or on the images is checked where it is used.
    """
    for name, valid, test in RULES:
        value = parameters[name]
        if not test(value) and not (value is None and valid.endswith("or None")):
            raise UserError(f"{name}: {shown(value)} must be {valid}")


def request_of(parameters: Mapping[str, Any], source: Source) -> FitRequest:
    """Return the ``secu fit`` request that is equivalent to the parameters."""
    state = parameters["random_state"]
    seed = check_random_state(state).randint(2**31) if state is None or hasattr(state, "randint") else state
    settings = merge({"seed": int(seed)}, nested(parameters["settings"] or {}))
    second = second_stage(parameters["self_label"], parameters["settings"])
    if settings.pop("selflabel", None) is not None and second is None:
        raise UserError("settings: selflabel is only read with self_label=True")
    if second is not None:  # which cannot continue from merged clusters
        settings = merge({"answer": "head"}, settings)
    if parameters["epochs"] is not None:
        settings = merge(settings, {"optim": {"epochs": operator.index(parameters["epochs"])}})
    wanted = parameters["n_clusters"]
    if second is not None and isinstance(wanted, str):
        raise UserError(f"self_label: needs one number of clusters, got n_clusters={wanted!r}")
    return FitRequest(
        source,
        clusters=parse_clusters(wanted) if isinstance(wanted, str) else operator.index(wanted),
        balance=_plain(parameters["balance"]),
        overrides=settings,
        encoder=parameters["encoder"],
        device=parameters["device"],
        allow_bad=parameters["allow_bad"],
    )


def second_stage(self_label: Any, settings: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the settings of self-labeling; None if it is disabled."""
    if not isinstance(self_label, Mapping) and not self_label:
        return None
    asked = nested(self_label) if isinstance(self_label, Mapping) else {}
    return merge({"selflabel": nested(settings or {}).get("selflabel", {})}, asked)


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Turn ``{"optim.lr": 0.1}`` into ``{"optim": {"lr": 0.1}}``; values may be numpy's."""
    if not isinstance(settings, Mapping):
        raise UserError(f'settings: {settings!r} must be a dict such as {{"optim.lr": 0.1}}')
    result: dict[str, Any] = {}
    for key, value in settings.items():
        plain = value.tolist() if isinstance(value, np.generic | np.ndarray) else value
        result = merge(result, nest(str(key), plain))
    return result


def noted(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that run.json keeps, as plain values."""
    epochs = parameters["epochs"]
    note: dict[str, Any] = {
        "epochs": epochs and int(epochs),
        "settings": flatten(nested(parameters["settings"] or {})) or None,
    }
    if isinstance(parameters["n_clusters"], str):
        note["n_clusters"] = parameters["n_clusters"]
    taught = parameters["self_label"]
    note["encoder"] = parameters["encoder"]
    note["balance"] = _plain(parameters["balance"])
    note["self_label"] = flatten(nested(taught)) if isinstance(taught, Mapping) else bool(taught)
    return note


def _plain(value: Any) -> float | None:
    return None if value is None else float(value)


def check_path(name: str, value: Any) -> Path:
    """Return the path of a folder; raise ``UserError`` if it is not a path."""
    if not _is_path(value):
        raise UserError(f"{name}: {shown(value)} must be the path of a folder")
    return Path(value)


def check_whole(name: str, value: Any) -> int:
    """Return a whole number; raise ``UserError`` if it is not one."""
    if not _is_whole(value, -(2**31), 2**31):
        raise UserError(f"{name}: {shown(value)} must be a whole number")
    return operator.index(value)


def shown(value: Any) -> str:
    """Return a value for a message, on one line and of bounded length."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # the repr of a user's object may fail
        text = f"a {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _is_whole(value: Any, least: int, most: int) -> bool:
    if isinstance(value, bool | np.bool_ | np.ndarray):
        return False
    try:
        return least <= operator.index(value) <= most
    except TypeError:
        return False


def _is_number_or_range(value: Any) -> bool:
    return value == AUTO or ".." in value if isinstance(value, str) else _is_whole(value, -(2**31), 2**31)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_share(value: Any) -> bool:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_)
    return is_number and bool(0 <= value <= 1)


def _is_seed(value: Any) -> bool:
    return isinstance(value, np.random.RandomState) or _is_whole(value, 0, 2**32 - 1)


def _is_path(value: Any) -> bool:
    try:
        path = os.fspath(value)
    except TypeError:
        return False
    return isinstance(path, str) and bool(path) and "\0" not in path


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool | np.bool_)


def _is_dict(value: Any) -> bool:
    return isinstance(value, Mapping)


# The name of each parameter, what is valid, and whether a value is; None is valid where the text says so.
RULES: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("n_clusters", "a whole number of at least 2, 'auto' or a range such as '5..40'", _is_number_or_range),
    ("encoder", "a name such as 'scratch', 'lite0' or 'hf:NAME-OR-FOLDER', or None", _is_name),
    ("balance", "a number from 0 to 1, or None", _is_share),
    ("random_state", "a whole number from 0 to 4294967295, a numpy RandomState, or None", _is_seed),
    ("epochs", f"a whole number from 0 to {MOST_EPOCHS}, or None", lambda value: _is_whole(value, 0, MOST_EPOCHS)),
    ("self_label", "True, False or the settings of the second run", lambda value: _is_switch(value) or _is_dict(value)),
    ("device", "auto, cuda, mps or cpu", lambda value: isinstance(value, str)),
    ("settings", 'a dict such as {"optim.lr": 0.1}, or None', _is_dict),
    ("out", "the path of a new folder, or None", _is_path),
    ("allow_bad", "True or False", _is_switch),
    ("callback", "a function, or None", callable),
    ("verbose", "0 or 1", lambda value: _is_switch(value) or _is_whole(value, 0, 2**31)),
)
