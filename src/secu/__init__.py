"""SeCu: deep clustering of images without labels (stable cluster discrimination).

The package is a stack of layers, each of which imports only those before it: ``data`` (images), ``views``
(augmentation), ``nets`` (encoders), ``cluster`` (losses, constraints, centers), ``methods`` (SeCu, self-labeling),
``train`` (loop, checkpoints, run folder), ``results`` (tables and report) and ``apps`` (implementation of the
commands). ``config``, ``settings`` and ``registry`` define the settings of a run, and ``base`` holds what every layer
uses.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from secu.estimator import SeCu

__version__ = "0.2.0"
__all__ = ["SeCu", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the estimator, and with it torch, on first use, so that ``secu --help`` stays fast."""
    if name != "SeCu":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from secu.base.threads import wait_briefly

    wait_briefly()
    return import_module("secu.estimator").SeCu


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
