"""How a batch's inputs reach the training step: they reside on the device, or are copied there ahead of time."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from secu.data import Images

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
    """Inputs that stay on the host: a thread fetches and copies the next batch during the current step."""

    def __init__(self, images: Images, largest: int, device: torch.device) -> None:
        self.images = images
        self.device = device
        self.buffer = torch.empty(largest, *images.shape, dtype=images.dtype, device=device)
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.thread = ThreadPoolExecutor(1)
        self.pending: Future[Tensor] | None = None

    def start(self, batches: Sequence[Tensor]) -> None:
        """Begin an epoch: fetch its first batch."""
        self.batches = iter(batches)
        self._fetch_ahead()

    def next(self) -> None:
        """Wait for the prefetched batch, copy it to the buffer that the step reads, and prefetch the next one."""
        assert self.pending is not None
        inputs = self.pending.result()
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            inputs.record_stream(torch.cuda.current_stream())
        self.buffer[: len(inputs)].copy_(inputs)
        self._fetch_ahead()

    def inputs(self, index_B: Tensor) -> Tensor:
        """Return the inputs of this step."""
        return self.buffer[: len(index_B)]

    def _fetch_ahead(self) -> None:
        index_B = next(self.batches, None)
        self.pending = None if index_B is None else self.thread.submit(self._fetch, index_B)

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
