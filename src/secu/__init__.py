"""SeCu: one-stage deep clustering of images without labels.

Read the package in the order in which an image passes through it: data, augment, backbones, model, losses,
constraints, centers, clustering, evaluate, train. The README has the tour.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from secu.estimator import SeCu

__version__ = "0.1.0"
__all__ = ["SeCu", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the estimator, and torch with it, when it is asked for: ``secu --help`` must not wait for it."""
    if name != "SeCu":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return import_module("secu.estimator").SeCu


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
