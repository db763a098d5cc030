"""How training steps are executed: eagerly, with compiled parts, or as a captured CUDA graph."""

import importlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from secu.base.errors import UserError
from secu.train.step import Step

BatchShape = tuple[int, ...]  # number of images, and whether the batch of each run includes partners
WARM_UP = 3  # real steps on a side stream before a graph is captured: autotuning and lazy allocation happen there


def choose_engine(wanted: str, device: torch.device) -> str:
    """Return the engine to use: ``auto`` is the fastest that the device allows."""
    if wanted == "graph" and device.type != "cuda":
        raise UserError(f"engine: graph needs a CUDA device, got {device.type}; valid here: auto, eager, compiled")
    if wanted == "auto":
        return "graph" if device.type == "cuda" else "eager"
    return wanted


def load_compiler(engine: str) -> None:
    """Import torch's compiler in the background, if it will be needed, while the model is built."""
    if engine != "eager":
        threading.Thread(target=_import_compiler, daemon=True).start()


def _import_compiler() -> None:
    """Import modules that import each other, so that no other thread may import one of them at the same time."""
    for name in ("torch._dynamo", "torch._inductor.compile_fx"):
        importlib.import_module(name)


@contextmanager
def fastest_convolutions() -> Iterator[None]:
    """Let cuDNN benchmark convolution algorithms, since shapes never change within a run."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


class Engine:
    """Runs the epochs of one run, or of several runs side by side, which uses a GPU better."""

    def __init__(self, steps: Sequence[Step], kind: str) -> None:
        assert all(step.sizes == steps[0].sizes for step in steps)
        self.steps = steps
        self.replays = Replays(steps) if kind == "graph" else None

    def epoch(self, number: int, after_step: Callable[[], None] = lambda: None) -> list[dict[str, float]]:
        """Train every run for an epoch and return the mean losses of each."""
        for step in self.steps:
            step.start_epoch(number)
        for size in self.steps[0].sizes[self.steps[0].first :]:
            for step in self.steps:
                step.feed.next()
            if self.replays:
                self.replays(size)
            else:
                for step in self.steps:
                    step.run(size)
            after_step()
        for step in self.steps:
            step.equalize()
        return [step.mean_losses() for step in self.steps]


class Replays:
    """Runs steps a few times, then captures them as a CUDA graph, one per shape of a batch, and replays it.

    Each run's step is captured on its own stream, so that the kernels of different runs can overlap.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.runs: Counter[BatchShape] = Counter()
        self.graphs: dict[BatchShape, torch.cuda.CUDAGraph] = {}
        self.streams = [torch.cuda.Stream() for _ in steps]
        self.capture_stream = torch.cuda.Stream()

    def __call__(self, size: int) -> None:
        """Do one step on the next ``size`` images of each run."""
        shape = (size, *(step.has_partners for step in self.steps))
        self.runs[shape] += 1
        if self.runs[shape] <= WARM_UP:
            self._run(size)
            return
        if shape not in self.graphs:
            self.graphs[shape] = self._capture(size)
        self.graphs[shape].replay()

    def _run(self, size: int) -> None:
        """Do the steps, each on its own stream, which forks from the current stream and joins it again."""
        current = torch.cuda.current_stream()
        for step, stream in zip(self.steps, self.streams, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                step.run(size)
        for stream in self.streams:
            current.wait_stream(stream)

    def _capture(self, size: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        for step in self.steps:
            graph.register_generator_state(step.generator)
            step.optimizer.zero_grad(set_to_none=True)  # gradients must live in the graph's own memory
        # Another thread uses the device during the capture, to fetch the next batch.
        with torch.cuda.graph(graph, stream=self.capture_stream, capture_error_mode="thread_local"):
            self._run(size)
        return graph
