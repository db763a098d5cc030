"""Conversion of tensors to arrays, and of numbers to JSON-serializable values."""

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def floats(values: Tensor) -> Floats:
    """Return a tensor as an array of doubles."""
    return np.asarray(values.detach().cpu().double().numpy())


def ints(values: Tensor) -> Ints:
    """Return a tensor as an array of integers."""
    return np.asarray(values.detach().cpu().long().numpy())


def number(value: float, digits: int = 4) -> float | None:
    """Round a number for JSON; NaN and infinity, which JSON does not support, become None."""
    return round(float(value), digits) if math.isfinite(value) else None


def numbers(values: Iterable[float], digits: int = 4) -> list[float | None]:
    """Round each number for JSON."""
    return [number(value, digits) for value in values]


def mean_of(values: Floats, index: Ints) -> float | None:
    """Return the mean over some images; None if there are none."""
    return number(values[index].mean()) if len(index) else None
