"""Registries of interchangeable parts by name, one for each kind of part.

A built-in part is given as ``module:attribute`` and imported on first use, so that reading a config does not import
torch. Register your own with, for example, ``@CONSTRAINTS.register("sinkhorn")``.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from secu.base.errors import UserError, nearest

Part = TypeVar("Part", bound=Callable[..., Any])


class Registry:
    """The parts of one kind.

    Args:
        setting: The setting that selects a part, used in error messages.
        built_in: The parts included in the package, each as ``module:attribute``.
    """

    def __init__(self, setting: str, **built_in: str) -> None:
        self.setting = setting
        self._parts: dict[str, Any] = dict(built_in)

    def register(self, name: str) -> Callable[[Part], Part]:
        """Return a decorator that adds a class or function under a new name."""

        def add(part: Part) -> Part:
            taken = self._parts.setdefault(name, part)
            if isinstance(taken, str) or _full_name(taken) != _full_name(part):
                raise ValueError(f"{self.setting}: {name!r} is already registered; choose another name")
            self._parts[name] = part  # a notebook cell may define the same class again
            return part

        return add

    def names(self) -> list[str]:
        """Return the names of all parts."""
        return sorted(self._parts)

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def __getitem__(self, name: str) -> Any:
        """Return a part, importing it on first use; ``KIND:rest`` names the part ``KIND``, which reads the rest."""
        kind = self.check(name).partition(":")[0]
        part = self._parts[kind]
        if isinstance(part, str):
            module, _, attribute = part.partition(":")
            part = self._parts[kind] = getattr(import_module(module), attribute)
        return part

    def check(self, name: str) -> str:
        """Return the name if there is such a part; otherwise raise ``UserError``."""
        if name.partition(":")[0] not in self._parts:
            raise UserError(f"{self.setting}: unknown {name!r}; {nearest(name, self._parts)}")
        return name


def _full_name(part: Callable[..., Any]) -> tuple[str | None, str]:
    return part.__module__, part.__qualname__


CONSTRAINTS = Registry(
    "constraint.kind",
    none="secu.cluster.constraints:Constraint",
    size="secu.cluster.constraints:SizeConstraint",
    entropy="secu.cluster.constraints:EntropyConstraint",
)
CENTERS = Registry(
    "centers.kind",
    sgd="secu.cluster.centers:GradientCenters",
    closed_form="secu.cluster.centers:ClosedFormCenters",
    kmeans="secu.cluster.centers:KMeansCenters",
)
BACKBONES = Registry(
    "encoder.backbone",
    none="secu.nets.backbones:no_backbone",
    small="secu.nets.backbones:small",
    resnet18="secu.nets.backbones:resnet18",
    resnet34="secu.nets.backbones:resnet34",
    resnet50="secu.nets.backbones:resnet50",
    lite0="secu.nets.lite0:lite0",
    hf="secu.nets.hub:hub",
)
METHODS = Registry(
    "method",
    secu="secu.methods.secu:StableClustering",
    selflabel="secu.methods.selflabel:SelfLabeling",
)
SOURCES = Registry(
    "data.source",
    dataset="secu.data.sources.datasets:open_dataset",
    hf="secu.data.sources.hub:open_hub",
)
