"""Tiny runs that are trained by one process and by several, for test_processes.py, which runs this file."""

import multiprocessing
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from feature_runs import blobs, use_quarters
from secu.base import processes
from secu.cli import app
from secu.config import Config
from secu.data import Images
from secu.data.hints import Hints
from secu.results.report import layout
from secu.settings import load_config
from small_runs import config_of, digits, trained

COUNT = 195  # four batches of 48 and one of 3, which has fewer images than four processes
SHORT = ("optim.epochs=1", "optim.batch_size=48")  # 2 epochs of 5 steps

CASES: dict[str, tuple[str, ...]] = {
    "size": ("constraint.upper=1.1", "constraint.dual_schedule=falling", "optim.epochs=5"),  # 30 steps
    "entropy": (  # as on ImageNet
        "constraint.kind=entropy",
        "constraint.alpha_over=seen",
        "optim.name=lars",
        "centers.optimizer=lars",
        "encoder.prediction_layers=2",
    ),
    "closed-form": ("centers.kind=closed_form",),
    "kmeans": ("centers.kind=kmeans",),
    "ce": ("loss.name=ce", "encoder.projection_layers=3", "optim.batch_size=65"),  # 65, 65, 65
    "hints": ("hints.weight=10", "heads=[3,5,3]"),
    "average": ("optim.average_from=0.3", "centers.schedule=settling"),
    "own-neighbors": ("neighbors.count=3", "neighbors.start=0.3", "neighbors.every=2"),
}


# Two names, a group without a name, and an image that is kept apart from it.
HINTS = Hints(np.array([0, 0, 1, 2, 2, 3, *[-1] * (COUNT - 7), 1]), ("a", "b"), ((2, 3),))


def exactly() -> None:
    """Compute in double precision, so that rounding does not decide about labels: tiny runs amplify it quickly."""
    layout.LEAST_POINTS = 10**9  # t-SNE would take longer than training
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign,assignment]


def vectors() -> Images:
    """Return feature vectors around three points."""
    return Images(torch.from_numpy(blobs()[0]))


def run_case(name: str, folder: Path, first: Path, **options: Any) -> Any:
    """Train a case in a folder and return its session; ``first`` is a run to start self-labeling from."""
    if name == "features":
        config = load_config("digits", FEATURES)
        return trained(folder / name, config, vectors(), **options)
    if name.startswith("selflabel"):
        return trained(folder / name, second(first, careful=name == "selflabel"), digits(COUNT), **options)
    if name == "hints":
        images = replace(digits(COUNT), hints=HINTS)
        checksum = f"hints.checksum={HINTS.checksum(images.ids)}"
        return trained(folder / name, config_of(*SHORT, *CASES[name], checksum), images, **options)
    return trained(folder / name, config_of(*SHORT, *CASES[name]), digits(COUNT), **options)


FEATURES = (
    "heads=[3,5]",
    "optim.epochs=3",
    "optim.warmup_epochs=0",
    "optim.batch_size=40",
    "encoder.backbone=none",
    "encoder.dim=8",
    "encoder.hidden_dim=16",
    "neighbors.count=4",
)


def second(first: Path, *, careful: bool) -> Config:
    """Return the settings of self-labeling, with a teacher or without."""
    from secu.apps.selflabel import second_config
    from secu.train.run import Run

    settings: dict[str, Any] = {"optim": {"epochs": 2, "batch_size": 48}, "selflabel": {"warmup_epochs": 1}}
    if not careful:
        settings["selflabel"] |= {"decay": 0.0, "uncertain": "nothing", "kept": 0.0, "smallest": 0.95}
    return second_config(Run.open(first).config(), first, COUNT, settings)


def states_of(session: Any) -> dict[str, torch.Tensor]:
    """Return everything that must be the same in all processes."""
    momentum = {f"momentum.{name}": tensor for name, tensor in session.step.momentum().items()}
    return {**session.method.state_dict(), **momentum}


def free_port() -> int:
    """Return a port that nobody listens to."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def environment(world: int, port: int) -> dict[str, str]:
    """Return what torchrun tells all of its processes."""
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return common | ({"TORCHELASTIC_RUN_ID": "test"} if world > 1 else {})


def start(world: int, *words: str) -> list[subprocess.Popen[str]]:
    """Start processes as torchrun does."""
    common = os.environ | environment(world, free_port())
    return [popen(words, common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(world)]


def start_jobs(world: int, folder: Path, first: Path, jobs: list[str]) -> subprocess.Popen[str]:
    """Start this file, which does jobs in one process or in several."""
    return popen(["process_cases.py", str(world), str(folder), str(first), *jobs], {**os.environ, **environment(1, 0)})


def popen(words: Sequence[str], variables: dict[str, str]) -> subprocess.Popen[str]:
    """Start Python in the folder of the tests."""
    pipe = subprocess.PIPE
    here = Path(__file__).parent
    return subprocess.Popen([sys.executable, *words], env=variables, stdout=pipe, stderr=pipe, text=True, cwd=here)


def run_job(job: str, folder: Path, first: Path) -> None:
    """Do a job in a folder: ``CASE``, ``stop:CASE`` after one epoch, ``resume:CASE``, ``embed``, or ``secu …``.

    ``undo:selflabel`` trains, and returns to the first run's model.
    """
    kind, _, name = job.rpartition(":")
    if kind in ("stop", "resume"):
        folder = folder / "stopped"
        folder.mkdir(exist_ok=True)
    if job == "embed":
        embed(folder)
    elif kind == "undo":
        undo(name, folder, first)
    elif job.startswith("secu "):
        app(shlex.split(job)[1:], standalone_mode=False)
    else:
        options = {"stop": {"time_limit": 0.0}, "resume": {"resume": True}}.get(kind, {})
        session = run_case(name, folder, first, **options)
        states = {key: tensor.clone() for key, tensor in states_of(session).items()}
        torch.save(states, folder / f"{name}-{processes.rank()}.pt")


def undo(name: str, folder: Path, first: Path) -> None:
    """Self-label, and doubt the result."""
    import pytest

    session = run_case(name, folder / "undone", first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secu.methods.selflabel.doubts", lambda before, after: ["worse"])
        session.conclude(session.images)
    states = {key: tensor.clone() for key, tensor in session.method.encoder.state_dict().items()}
    torch.save(states | {"kept": session.kept}, folder / f"undone-{processes.rank()}.pt")


def embed(folder: Path) -> None:
    """Write features of pictures, which are computed by a network that stands in for a pretrained one."""
    import pytest

    from secu.apps.embed import embed_source
    from secu.data import open_source

    with pytest.MonkeyPatch.context() as patch:
        net = use_quarters(patch)
        patch.setattr("secu.apps.embed.require_extra", lambda name: None)
        embed_source(open_source(str(folder.parent / "pictures")), folder / "features.npy", device="cpu")
    (folder / f"embedded-{processes.rank()}").write_text(str(net.seen))


def do_jobs(folder: Path, first: Path, jobs: list[str]) -> None:
    """Do jobs as one of several processes, or as the only one."""
    if processes.launched():
        processes.start()
    os.environ["SECU_DATA"] = str(folder / "data")
    for job in jobs:
        run_job(job, folder, first)


def be_rank(rank: int, world: int, port: int, *work: Any) -> None:
    """Do jobs as one of several processes that this file forks."""
    os.environ.update(environment(world, port), RANK=str(rank), LOCAL_RANK=str(rank))
    do_jobs(*work)
    processes.barrier()
    os._exit(0)  # as secu does: the threads of a process group may abort while Python ends


def main(world: int, *work: Any) -> int:
    """Do jobs in one process, or in several copies of it; return 1 if one of them failed.

    Copies have imported everything already. Four interpreters would take longer to start than all cases to train.
    """
    import torch._dynamo  # otherwise imported at the first step of each

    torch.set_num_threads(1)
    exactly()
    if world == 1:
        do_jobs(*work)
        return 0
    port = free_port()
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=be_rank, args=(rank, world, port, *work)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return int(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
