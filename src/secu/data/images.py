"""Images with a stable index: the representation of data in all other layers.

torch is imported only where a tensor is created, since ``secu data`` and ``secu --help`` do not need it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from secu.base.errors import UserError
from secu.data.broken import Broken
from secu.data.decoding.cutting import Choose
from secu.data.decoding.image_files import BadImage
from secu.data.rows import FileRows
from secu.data.sources.base import FileSource, Shape, Skipped, Source
from secu.data.sources.shards import ShardSource
from secu.data.stream import crop_now, decoded, decoded_ahead
from secu.data.strings import pick, picked_ids

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from secu.data.hints import Hints

CHUNK = 128  # inputs that are fetched at a time, to limit memory for large ones


@dataclass(frozen=True, eq=False)
class Images:
    """Inputs of a model, by index; row ``i`` of every attribute refers to the same image.

    Attributes:
        tensor: All inputs (N, …); None if they do not fit into memory, or are decoded on demand.
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
        rows: All inputs in a cache file, if they do not fit into memory.
        checksums: A checksum of the pixels of each image, if the inputs are not pixels.
        broken: The images of the source that could not be read on demand; None for images in memory.
        hints: The user's hints, to train on; None if there are none.
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
    rows: FileRows | None = None
    checksums: NDArray[np.uint32] | None = None
    broken: Broken | None = None
    hints: Hints | None = None

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
        if self.rows is None:
            return next(self.fetch_ahead([index]))
        return _tensor(self.rows[index.numpy()])

    def fetch_ahead(self, batches: Iterable[Tensor]) -> Generator[Tensor]:
        """Yield the inputs of successive batches; images that are decoded on demand are decoded ahead.

        Close the iterator (``contextlib.closing``) when leaving it early.
        """
        if self.tensor is not None or self.rows is not None:
            yield from map(self.fetch, batches)
            return
        assert self.broken is not None
        numbers = ([self.numbers[i] for i in index.tolist()] for index in batches)
        with closing(decoded_ahead(self.broken, numbers, self.shape, self.values)) as decoded_batches:
            for pixels in decoded_batches:
                yield _tensor(pixels)

    @property
    def has_originals(self) -> bool:
        """Whether ``crops`` can be used: the originals can be read in any order, by several threads at once."""
        return self.source is not None and (self.source.on_demand or isinstance(self.source, FileSource | ShardSource))

    def crops(self, index: Tensor, choose: Sequence[Choose], size: int) -> Tensor:
        """Cut boxes out of the original pictures and scale them, uint8 (boxes, B, C, size, size).

        Args:
            index: Indices of the images (B,).
            choose: Returns the boxes of each image, given width and height of the picture.
            size: Side of the results.
        """
        assert self.broken is not None
        numbers = [self.numbers[i] for i in index.tolist()]
        return _tensor(crop_now(self.broken, numbers, choose, (self.shape[0], size, size), self.values))

    def pictures(self, index: Tensor, side: int) -> Tensor:
        """Return images for display, uint8 (B, C, S, S): see ``iter_pictures``."""
        found = dict(self.iter_pictures(dict.fromkeys(index.tolist(), side)))
        return _tensor(np.stack([found[i] for i in index.tolist()]))

    def iter_pictures(self, sides: Mapping[int, int]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yield images for display, each at its own size; the source is read only once, in its fastest order.

        If the originals are larger than the model's inputs, or the inputs are not pixels, they are decoded again;
        missing ones are upscaled, or white.

        Args:
            sides: The side of each picture by the index of its image.

        Yields:
            The index of an image, and uint8 (C, S, S), where S is at most its side but at least the stored size.
        """
        stored = self.shape[-1] if len(self.shape) == 3 else 0
        order = sorted(sides, key=self.position)
        sides = {i: min(sides[i], self.original_side) if self.source else 0 for i in order}
        at_hand = [i for i, side in sides.items() if stored and side <= stored]
        for first in range(0, len(at_hand), CHUNK):
            part = at_hand[first : first + CHUNK]
            yield from zip(part, self.fetch(_tensor(part)).numpy(), strict=True)
        if again := {i: side or 1 for i, side in sides.items() if not stored or side > stored}:
            yield from self._decoded_again(again, stored)

    def _decoded_again(self, sides: Mapping[int, int], stored: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yield images from their originals, if possible."""
        if self.source is None:
            yield from ((i, np.full((1, 1, 1), 255, np.uint8)) for i in sides)
            return
        channels = self.shape[0] if stored else self.source.probe().channels or 1  # 0: there are no pictures
        wanted: dict[int, list[int]] = {}  # number in the source → indices: a selection may repeat an image
        for i in sides:
            wanted.setdefault(self.numbers[i], []).append(i)
        shapes = {number: (channels, sides[same[0]], sides[same[0]]) for number, same in wanted.items()}
        with closing(decoded(self.source, shapes, self.values)) as outcomes:
            for number, outcome in outcomes:
                for i in wanted[number]:
                    if not isinstance(outcome, BadImage):
                        yield i, outcome
                    elif stored:
                        yield i, _enlarged(self.fetch(_tensor([i]))[0].numpy(), sides[i])
                    else:
                        yield i, np.full((channels, sides[i], sides[i]), 255, np.uint8)

    @cached_property
    def original_side(self) -> int:
        """The shorter side of the originals, as the median of a sample; 0 if they are not available."""
        with suppress(UserError):
            return self.source.probe().side if self.source else 0
        return 0

    def position(self, i: int) -> int:
        """Return a sort key for reading originals in the fastest order; a .tar.gz can only be read forward."""
        return self.source.position(self.numbers[i]) if self.source else i

    def original(self, i: int) -> Path | bytes | NDArray[np.uint8]:
        """Return image ``i`` as stored in the source: its file, its bytes, or its pixels (H, W) or (H, W, 3)."""
        if self.source is not None:
            raw = self.source.read(self.numbers[i], self.values)
            return Path(raw) if isinstance(raw, str) else raw
        pixels: NDArray[np.uint8] = self.fetch(_tensor([i]))[0].permute(1, 2, 0).squeeze(-1).contiguous().numpy()
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
            rows=None if self.rows is None else self.rows.select(rows),
            targets=targets,
            class_names=names,
            ids=picked_ids(self.ids, rows),
            columns={name: pick(column, rows) for name, column in self.columns.items()},
            numbers=[self.numbers[i] for i in rows],
            checksums=None if self.checksums is None else self.checksums[rows],
            hints=None if self.hints is None else self.hints.select(rows),
        )


def _tensor(values: NDArray[Any] | list[int]) -> Tensor:
    """Return values as a tensor, which shares the memory of an array."""
    import torch

    return torch.as_tensor(values)


def _enlarged(pixels_CHW: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    rows = np.arange(side) * pixels_CHW.shape[-1] // side
    return pixels_CHW[:, rows][:, :, rows]
