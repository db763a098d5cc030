"""How a batch's inputs reach the training step: they reside on the device, or are copied there ahead of time."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from secu.base.errors import UserError
from secu.data import Images
from secu.views.originals import VIEWS, OriginalCrops

AHEAD = 2  # batches in progress; while the last images of one are decoded, the other keeps all cores busy
RESIDENT_SHARE = 0.5  # of free GPU memory; larger data sets stay on the host


class ResidentFeed:
    """All inputs on the device: a batch is a gather, which a graph captures with the rest of the step."""

    def __init__(self, inputs: Tensor) -> None:
        self.all_inputs = inputs

    def start(self, batches: Sequence[Tensor], seed: int = 0) -> None:
        """Begin an epoch: nothing to do."""

    def next(self) -> None:
        """Prepare the next batch: nothing to do."""

    def inputs(self, index_B: Tensor) -> Tensor:
        """Return the inputs of this step."""
        return self.all_inputs.index_select(0, index_B)


class HostFeed:
    """Inputs that stay on the host: threads fetch and copy the next batches during the current step."""

    batch_axis = 0

    def __init__(self, images: Images, largest: int, device: torch.device) -> None:
        self.images = images
        self.device = device
        self.seed = 0
        self.buffer = torch.empty(largest, *images.shape, dtype=images.dtype, device=device)
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.threads = ThreadPoolExecutor(AHEAD)
        self.pending: deque[Future[Tensor]] = deque()

    def start(self, batches: Sequence[Tensor], seed: int = 0) -> None:
        """Begin an epoch: fetch its first batches."""
        self.seed = seed
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
        self._first_of_buffer(inputs.shape[self.batch_axis]).copy_(inputs)

    def inputs(self, index_B: Tensor) -> Tensor:
        """Return the inputs of this step."""
        return self._first_of_buffer(len(index_B))

    def _first_of_buffer(self, count: int) -> Tensor:
        return self.buffer.narrow(self.batch_axis, 0, count)

    def _fetch_ahead(self) -> None:
        index_B = next(self.batches, None)
        if index_B is not None:
            self.pending.append(self.threads.submit(self._fetch, index_B))

    def _fetch(self, index_B: Tensor) -> Tensor:
        inputs = self._read(index_B)
        if self.stream is None:
            return inputs
        with torch.cuda.stream(self.stream):
            return inputs.pin_memory().to(self.device, non_blocking=True)

    def _read(self, index_B: Tensor) -> Tensor:
        return self.images.fetch(index_B)


class CropFeed(HostFeed):
    """Random crops of the original pictures, one for each view (2, B, …), taken while they are decoded."""

    batch_axis = 1

    def __init__(self, images: Images, largest: int, device: torch.device, crops: OriginalCrops) -> None:
        super().__init__(images, 0, device)
        if not images.has_originals:
            raise UserError("augment.crop_from: original needs one file per image, or tar shards; use square")
        self.crops = crops
        shape = (VIEWS, largest, images.shape[0], crops.size, crops.size)
        self.buffer = torch.empty(shape, dtype=torch.uint8, device=device)

    def _read(self, index_B: Tensor) -> Tensor:
        choose = [partial(self.crops.boxes, self.seed, i) for i in index_B.tolist()]
        return self.images.crops(index_B, choose, self.crops.size)


Feed = ResidentFeed | HostFeed


def build_feed(images: Images, largest: int, device: torch.device, crops: OriginalCrops | None = None) -> Feed:
    """Put the inputs on the device if they are in memory and fit there; otherwise stream them.

    With ``crops``, the inputs are random crops of the original pictures, which are always streamed.
    """
    if crops is not None:
        return CropFeed(images, largest, device, crops)
    inputs = images.tensor
    if inputs is None:
        return HostFeed(images, largest, device)
    if device.type == "cuda" and inputs.nbytes > RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0]:
        return HostFeed(images, largest, device)
    return ResidentFeed(inputs.to(device))
