"""Checkpoints, from which a run resumes exactly as if it had not stopped, and loading of trained models."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from secu.base.errors import UserError
from secu.cluster.constraints import NO_LABEL
from secu.cluster.tree import Tree
from secu.config import Config
from secu.data import input_shape
from secu.methods import Method, Predictor, build_method
from secu.train.place import MODEL
from secu.train.run import Run
from secu.train.step import Step

TREE = ("tree.linkage", "tree.leaves", "tree.head")  # in a model file, if the run has a tree of clusters
FINEST = ("finest.linkage", "finest.leaves", "finest.head")  # likewise for that of the finest head, if it is another
OFFSETS = "offsets"  # likewise for the offsets of the main head's clusters
RENAMED = {"clustering.sure": "clustering.confident"}  # tensor names of version 0.1


@dataclass(frozen=True)
class Checkpoint:
    """A copy of the state of a run between two steps, unaffected by further training."""

    tensors: Mapping[str, Tensor]  # state of the method
    momentum: Mapping[str, Tensor]  # state of the optimizer
    epochs_done: int  # number of complete epochs
    seconds: float  # time that training took so far
    middle: Mapping[str, Tensor] = field(default_factory=dict)  # position in the epoch in progress, if in one

    @classmethod
    def take(
        cls, method: Method, step: Step, epochs_done: int, seconds: float, *, in_epoch: bool = False
    ) -> "Checkpoint":
        """Copy the state of a run, on its device."""
        middle = step.middle() if in_epoch else {}
        return cls(copied(method.state_dict()), copied(step.momentum()), epochs_done, seconds, middle)

    @property
    def place(self) -> tuple[int, int]:
        """Number of complete epochs, and of steps in the epoch in progress."""
        return self.epochs_done, int(self.middle["steps_done"]) if self.middle else 0

    def save(self, run: Run, trained: Iterable[str]) -> None:
        """Write the trained model, whose tensors' names start with ``trained``, then the state to resume from.

        In the opposite order, an interruption could leave a finished state with an outdated model.
        """
        tensors = on_host(self.tensors)
        run.save_model(MODEL, select(tensors, trained))
        run.save_state(
            {
                "epochs_done": self.epochs_done,
                "seconds": self.seconds,
                "momentum": on_host(self.momentum),
                "tensors": tensors,
                "middle": on_host(self.middle),
            }
        )

    @classmethod
    def load(cls, run: Run) -> "Checkpoint":
        """Read the last checkpoint of a run."""
        state = run.load_state()
        momentum = dict(state["momentum"])
        tensors = {RENAMED.get(name, name): tensor for name, tensor in state["tensors"].items()}
        for name in [name for name in momentum if not name.isdecimal()]:  # version 0.1 stored the student network here
            tensors[name] = momentum.pop(name)
        return cls(tensors, momentum, state["epochs_done"], state["seconds"], state.get("middle", {}))

    def restore(self, run: Run, method: Method, step: Step) -> None:
        """Load the state into a method and its step."""
        if not (_alike(method.state_dict(), self.tensors) and _alike(step.momentum(), self.momentum)):
            raise UserError(f"run: the model in {run.path} does not match its data and config")
        if self.middle and not step.fits(self.middle):
            raise UserError(f"run: the checkpoint in {run.path} is damaged: it is not in the middle of an epoch")
        tensors = {**self.tensors, **self.middle}
        for name, (least, limit) in _bounds(method.config, len(step.images)).items():
            if name in tensors and not ((tensors[name] >= least) & (tensors[name] < limit)).all():
                raise UserError(f"run: the checkpoint in {run.path} is damaged: {name} has values out of range")
        method.load_state_dict(dict(self.tensors))
        step.load_momentum(dict(self.momentum))
        if self.middle:
            step.resumed = self.tensors, self.middle


def _bounds(config: Config, images: int) -> dict[str, tuple[int, Tensor]]:
    """Return the least value and the limit of the tensors that are used as indices."""
    return {
        "clustering.labels": (NO_LABEL, torch.tensor(config.heads)),
        "buffer.clustering.guide.cluster": (NO_LABEL, torch.tensor(config.heads)),
        "clustering.first_labels": (0, torch.tensor(config.clusters)),
        "own_neighbors": (0, torch.tensor(images)),
    }


def load_method(run: Run, device: torch.device) -> Method:
    """Return the trained method of a run."""
    return method_of(run.config(), run.load_model(), device, str(run.path))


def load_predictor(run: Run, device: torch.device, level: int | None = None) -> Predictor:
    """Return the model of a run, ready to use; with a ``level``, for that cut of its tree of clusters."""
    return load_method(run, device).predictor(level)


def method_of(config: Config, tensors: Mapping[str, Tensor], device: torch.device, name: str) -> Method:
    """Build a method and load the tensors of its model file; ``name`` is used in error messages."""
    method = build_method(config, config.clusters, input_shape(config.data), device).eval()
    load_tensors(method, tensors, name)
    return method


def load_tensors(method: Method, tensors: Mapping[str, Tensor], name: str) -> None:
    """Load the tensors of a trained model into a method."""
    mine = select(method.state_dict(), method.trained_tensors)
    tree = _tree_of(method.config, tensors, TREE, name)
    finest = _tree_of(method.config, tensors, FINEST, name)
    offsets = _offsets_of(method.config, tensors, name)
    tensors = {key: tensor for key, tensor in tensors.items() if key not in (*TREE, *FINEST, OFFSETS)}
    if not select(tensors, method.trained_tensors):
        raise UserError(f"run: {name} is not a model written by secu")
    if not _alike(mine, tensors):
        raise UserError(f"run: the model in {name} does not match its data and config")
    with torch.no_grad():
        for key, tensor in mine.items():
            tensor.copy_(tensors[key])
    method.clustering.tree = tree
    method.clustering.finest = finest
    method.clustering.offsets = offsets


def _tree_of(config: Config, tensors: Mapping[str, Tensor], keys: Sequence[str], name: str) -> Tree | None:
    """Return a tree of clusters in a model file, if it has one under these keys."""
    if not any(key in tensors for key in keys):
        return None
    tree = Tree(*(tensors.get(key, torch.empty(0)) for key in keys))
    if not tree.is_valid(config.heads):
        raise UserError(f"run: the tree of clusters in {name} is damaged")
    return tree


def _offsets_of(config: Config, tensors: Mapping[str, Tensor], name: str) -> Tensor | None:
    """Return the offsets of the clusters in a model file, if it has them."""
    offsets = tensors.get(OFFSETS)
    if offsets is None:
        return None
    if offsets.shape != (config.clusters,) or offsets.dtype != torch.float32 or not offsets.isfinite().all():
        raise UserError(f"run: the offsets of the clusters in {name} are damaged")
    return offsets


def model_tensors(method: Method) -> dict[str, Tensor]:
    """Return the tensors of the trained model, in host memory."""
    tensors = on_host(select(method.state_dict(), method.trained_tensors))
    for keys, tree in ((TREE, method.clustering.tree), (FINEST, method.clustering.finest)):
        tensors |= dict(zip(keys, tree, strict=True)) if tree else {}
    if method.clustering.offsets is not None:
        tensors[OFFSETS] = method.clustering.offsets
    return tensors


def select(tensors: Mapping[str, Tensor], prefixes: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors whose names start with one of the prefixes."""
    starts = tuple(prefixes)
    return {name: tensor for name, tensor in tensors.items() if name.startswith(starts)}


def _alike(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Return whether two models have tensors of the same names, shapes and types."""
    return mine.keys() == theirs.keys() and all(
        mine[name].shape == theirs[name].shape and mine[name].dtype == theirs[name].dtype for name in mine
    )


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a copy on the same device."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors in host memory, as a file needs them."""
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
