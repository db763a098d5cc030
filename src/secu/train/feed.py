"""How a batch's inputs reach the training step: they reside on the device, or are copied there ahead of time."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from secu.data import Images

AHEAD = 2  # batches in progress; while the last images of one are decoded, the other keeps all cores busy
RESIDENT_SHARE = 0.5  # of free GPU memory; larger data sets stay on the host


class ResidentFeed:
    """All inputs on the device: a batch is a gather, which a graph captures with the rest of the step."""

    def __init__(self, inputs: Tensor) -> None:
        self.all_inputs = inputs

    def start(self, batches: Sequence[Tensor]) -> None:
        """Begin an epoch: nothing to do."""

    def next(self) -> None:
        """Prepare the next batch: nothing to do."""

    def inputs(self, index_B: Tensor) -> Tensor:
        """Return the inputs of this step."""
        return self.all_inputs.index_select(0, index_B)


class HostFeed:
    """Inputs that stay on the host: threads fetch and copy the next batches during the current step."""

    def __init__(self, images: Images, largest: int, device: torch.device) -> None:
        self.images = images
        self.device = device
        self.buffer = torch.empty(largest, *images.shape, dtype=images.dtype, device=device)
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.threads = ThreadPoolExecutor(AHEAD)
        self.pending: deque[Future[Tensor]] = deque()

    def start(self, batches: Sequence[Tensor]) -> None:
        """Begin an epoch: fetch its first batches."""
        self.batches = iter(batches)
        self.pending.clear()  # of an epoch that was interrupted
        for _ in range(AHEAD):
            self._fetch_ahead()

    def next(self) -> None:
        """Wait for the next batch, start to fetch another one, and copy it to the buffer that the step reads."""
        inputs = self.pending.popleft().result()
        self._fetch_ahead()
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            inputs.record_stream(torch.cuda.current_stream())
        self.buffer[: len(inputs)].copy_(inputs)

    def inputs(self, index_B: Tensor) -> Tensor:
        """Return the inputs of this step."""
        return self.buffer[: len(index_B)]

    def _fetch_ahead(self) -> None:
        index_B = next(self.batches, None)
        if index_B is not None:
            self.pending.append(self.threads.submit(self._fetch, index_B))

    def _fetch(self, index_B: Tensor) -> Tensor:
        inputs = self.images.fetch(index_B)
        if self.stream is None:
            return inputs
        with torch.cuda.stream(self.stream):
            return inputs.pin_memory().to(self.device, non_blocking=True)


Feed = ResidentFeed | HostFeed


def build_feed(images: Images, largest: int, device: torch.device) -> Feed:
    """Put the inputs on the device if they are in memory and fit there; otherwise stream them."""
    inputs = images.tensor
    if inputs is None:
        return HostFeed(images, largest, device)
    if device.type == "cuda" and inputs.nbytes > RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0]:
        return HostFeed(images, largest, device)
    return ResidentFeed(inputs.to(device))
