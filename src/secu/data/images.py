"""Images with a stable index: the representation of data in all other layers.

torch is imported only where a tensor is created, since ``secu data`` and ``secu --help`` do not need it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from secu.data.broken import Broken
from secu.data.decode import BadImage
from secu.data.source import Shape, Skipped, Source
from secu.data.stream import decode_now, decoded
from secu.data.strings import pick, picked_ids
from secu.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Images:
    """Inputs of a model, by index; row ``i`` of every attribute refers to the same image.

    Attributes:
        tensor: All inputs (N, …), in memory or memory-mapped; None if they are decoded on demand.
        targets: True labels, int64 (N,), -1 where unknown; None if there are none.
        class_names: The name of each target.
        ids: The name of each image; by default its index.
        columns: Additional columns of the source, by name.
        skipped: Id and reason of each image that could not be read.
        repeated: Id and reason of each image that was left out because it is a duplicate.
        source: The source of the images; None if there are only inputs.
        numbers: The index of each image in the source.
        values: How the source's values are interpreted.
        shape: Shape of one input: channels, height and width of images, or (D,) of features.
        checksums: A checksum of the pixels of each image, if the inputs are not pixels.
        broken: The images that could not be read, if they are decoded on demand.
    """

    tensor: Tensor | None
    targets: Tensor | None = None
    class_names: tuple[str, ...] = ()
    _: KW_ONLY
    ids: Sequence[str] = ()
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    skipped: Sequence[Skipped] = ()
    repeated: Sequence[Skipped] = ()
    source: Source | None = None
    numbers: Sequence[int] = ()
    values: str | None = None
    shape: Shape = (0, 0, 0)  # set from the tensor, if there is one
    checksums: NDArray[np.uint32] | None = None
    broken: Broken | None = None

    def __post_init__(self) -> None:
        if self.tensor is not None:
            if self.tensor.ndim < 2:
                raise UserError(f"images: must have shape (N, …), got {tuple(self.tensor.shape)}")
            object.__setattr__(self, "shape", tuple(self.tensor.shape[1:]))
            object.__setattr__(self, "numbers", self.numbers or range(len(self.tensor)))
        object.__setattr__(self, "ids", self.ids or tuple(map(str, range(len(self)))))
        if self.targets is None:
            return
        import torch

        if self.targets.shape != (len(self),) or self.targets.dtype != torch.int64:
            got = f"{self.targets.dtype} of shape {tuple(self.targets.shape)}"
            raise UserError(f"targets: must be torch.int64 of shape ({len(self)},), got {got}")

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the inputs; images that are decoded on demand are uint8."""
        import torch

        return torch.uint8 if self.tensor is None else self.tensor.dtype

    def fetch(self, index: Tensor) -> Tensor:
        """Return the inputs at ``index`` (B,) as (B, …)."""
        if self.tensor is not None:
            return self.tensor[index]
        import torch

        assert self.broken is not None
        numbers = [self.numbers[i] for i in index.tolist()]
        return torch.from_numpy(decode_now(self.broken, numbers, self.shape, self.values))

    def pictures(self, index: Tensor, side: int) -> Tensor:
        """Return images for display, uint8 (B, C, S, S), where S is at most ``side`` but at least the stored size.

        If the originals are larger than the model's inputs, or the inputs are not pixels, they are decoded again;
        missing ones are upscaled, or white.
        """
        import torch

        stored = self.shape[-1] if len(self.shape) == 3 else 0
        if stored and (self.source is None or min(side, self._original_side) <= stored):
            return self.fetch(index)
        if self.source is None:
            return torch.full((len(index), 1, 1, 1), 255, dtype=torch.uint8)
        side = min(side, self._original_side) or 1
        channels = self.shape[0] if stored else self.source.probe().channels or 1  # 0: there are no pictures
        numbers = [self.numbers[i] for i in index.tolist()]
        with closing(decoded(self.source, (channels, side, side), self.values, only=numbers)) as outcomes:
            found = {number: image for number, image in outcomes if not isinstance(image, BadImage)}
        for row, number in enumerate(numbers):
            if number not in found and stored and self.tensor is not None:
                found[number] = _enlarged(self.fetch(index[row : row + 1])[0].numpy(), side)
        white = np.full((channels, side, side), 255, np.uint8)
        return torch.from_numpy(np.stack([found.get(number, white) for number in numbers]))

    @cached_property
    def _original_side(self) -> int:
        """The shorter side of the originals, as the median of a sample; 0 if they are not available."""
        try:
            return self.source.probe().side if self.source else 0
        except UserError:
            return 0

    def position(self, i: int) -> int:
        """Return a sort key for reading originals in the fastest order; a .tar.gz can only be read forward."""
        return self.source.position(self.numbers[i]) if self.source else i

    def original(self, i: int) -> Path | bytes | NDArray[np.uint8]:
        """Return image ``i`` as stored in the source: its file, its bytes, or its pixels (H, W) or (H, W, 3)."""
        if self.source is not None:
            raw = self.source.read(self.numbers[i], self.values)
            return Path(raw) if isinstance(raw, str) else raw
        import torch

        pixels: NDArray[np.uint8] = self.fetch(torch.tensor([i]))[0].permute(1, 2, 0).squeeze(-1).contiguous().numpy()
        return pixels

    def readable_rows(self) -> Sequence[int]:
        """Return the rows of all images but those that could not be read on demand when they were last tried."""
        everything = range(len(self))
        bad = self.broken.reasons if self.broken else {}
        return [row for row in everything if self.numbers[row] not in bad] if bad else everything

    def without_broken(self) -> Images:
        """Return the images of ``readable_rows``; the others are listed as skipped."""
        bad = self.broken.reasons if self.broken else {}
        if not bad or self.source is None:
            return self
        skipped = [(self.source.ids[i], bad[i]) for i in sorted(bad)]
        return replace(self.select(self.readable_rows()), skipped=(*self.skipped, *skipped))

    def select(self, rows: Sequence[int]) -> Images:
        """Return the images in the given rows, in this order, with the remaining classes."""
        rows = list(rows)
        targets = None if self.targets is None else self.targets[rows]
        names = self.class_names
        if targets is not None and names:
            left, numbers = targets[targets >= 0].unique(return_inverse=True)
            targets = targets.clone()
            targets[targets >= 0] = numbers
            names = tuple(names[i] for i in left.tolist())
        return replace(
            self,
            tensor=None if self.tensor is None else self.tensor[rows],
            targets=targets,
            class_names=names,
            ids=picked_ids(self.ids, rows),
            columns={name: pick(column, rows) for name, column in self.columns.items()},
            numbers=[self.numbers[i] for i in rows],
            checksums=None if self.checksums is None else self.checksums[rows],
        )


def _enlarged(pixels_CHW: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    rows = np.arange(side) * pixels_CHW.shape[-1] // side
    return pixels_CHW[:, rows][:, :, rows]
