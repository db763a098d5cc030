"""How the pixels of a batch reach the training step: they live on the device, or are copied there ahead of time."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from secu.data import Images, ImageSource

RESIDENT_SHARE = 0.5  # of the free GPU memory: images that need more stay with the host


class ResidentFeed:
    """All images on the device: a batch is a gather, which a graph captures with the rest."""

    def __init__(self, images: Images, device: torch.device) -> None:
        self.images = images.pixels.to(device)

    def start(self, batches: Sequence[Tensor]) -> None:
        """Begin an epoch: nothing to do."""

    def next(self) -> None:
        """Make the next batch ready: nothing to do."""

    def pixels(self, index_B: Tensor) -> Tensor:
        """Return the images of this step."""
        return self.images.index_select(0, index_B)


class HostFeed:
    """Images that stay with the host: a thread fetches the next batch and copies it while this one is trained on."""

    def __init__(self, source: ImageSource, largest: int, device: torch.device) -> None:
        self.source, self.device = source, device
        self.buffer = torch.empty(largest, *source.shape, dtype=torch.uint8, device=device)
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.thread = ThreadPoolExecutor(1)
        self.pending: Future[Tensor] | None = None

    def start(self, batches: Sequence[Tensor]) -> None:
        """Begin an epoch: fetch its first batch."""
        self.batches = iter(batches)
        self._fetch_ahead()

    def next(self) -> None:
        """Wait for the batch fetched ahead, put it where the step reads, and fetch the one after."""
        assert self.pending is not None
        pixels = self.pending.result()
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            pixels.record_stream(torch.cuda.current_stream())
        self.buffer[: len(pixels)].copy_(pixels)
        self._fetch_ahead()

    def pixels(self, index_B: Tensor) -> Tensor:
        """Return the images of this step."""
        return self.buffer[: len(index_B)]

    def _fetch_ahead(self) -> None:
        index_B = next(self.batches, None)
        self.pending = None if index_B is None else self.thread.submit(self._fetch, index_B)

    def _fetch(self, index_B: Tensor) -> Tensor:
        pixels = self.source.fetch(index_B)
        if self.stream is None:
            return pixels
        with torch.cuda.stream(self.stream):
            return pixels.pin_memory().to(self.device, non_blocking=True)


def build_feed(source: ImageSource, largest: int, device: torch.device) -> ResidentFeed | HostFeed:
    """Put the images on the device if they are in memory and fit there, else stream them."""
    if not isinstance(source, Images):
        return HostFeed(source, largest, device)
    if device.type == "cuda" and source.pixels.nbytes > RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0]:
        return HostFeed(source, largest, device)
    return ResidentFeed(source, device)
