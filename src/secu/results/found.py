"""The results of a finished run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from secu.cluster.metrics import Scores
from secu.data import Images
from secu.methods.predictor import Predictions
from secu.results.duplicates import is_searched, kept_images
from secu.results.hashes import Ints
from secu.results.leaves import Leaves
from secu.results.words import captions_of, suggest_names


@dataclass(frozen=True, eq=False)
class Results:
    """The clusters of N images; K clusters, D dimensions."""

    images: Images
    embeddings: Tensor  # of unit length (N, D)
    centers: Tensor  # (K, D)
    predictions: Predictions
    limits: Tensor  # the cosine below which an image is an outlier of each cluster (K,)
    scores: Scores | None  # None if no true labels are known
    warnings: tuple[str, ...]
    leaves: Leaves | None = None  # the clusters of the finest head; None if hardly any, too many, or not known

    def __post_init__(self) -> None:
        for name, column in {"embeddings": self.embeddings, **vars(self.predictions)}.items():
            assert len(column) == len(self.images), f"{name}: {len(column)} rows for {len(self.images)} images"

    @property
    def outlier(self) -> Tensor:
        """Whether each image is too far from its center to belong to the cluster (N,)."""
        return self.predictions.cosine < self.limits[self.predictions.cluster]

    @property
    def ids(self) -> Sequence[str]:
        """The id of each image: its path, or its index in the data set."""
        return self.images.ids

    @cached_property
    def suggestions(self) -> list[list[str]]:
        """Words that set each cluster apart, from file names, folders, columns and captions; may be empty."""
        return suggest_names(self.ids, self.texts, self.predictions.cluster.cpu().numpy(), len(self.centers))

    @cached_property
    def texts(self) -> Mapping[str, Sequence[Any]]:
        """Text that names are suggested from, besides the ids: columns of the source, and captions in image files."""
        captions = captions_of(self.images)
        return {**self.images.columns, "caption in the file": captions} if any(captions) else self.images.columns

    @cached_property
    def kept(self) -> Ints | None:
        """The image to keep for every image (N,): itself, or a near-duplicate; None if they were not looked for."""
        return kept_images(self.images, self.embeddings) if is_searched(self.images) else None

    @property
    def duplicates(self) -> int:
        """The number of images that are near-duplicates of the one to keep."""
        return 0 if self.kept is None else int((self.kept != np.arange(len(self.kept))).sum())

    @property
    def labels(self) -> list[str] | None:
        """The name of each image's true class, empty where unknown; None if no image has one."""
        if self.images.targets is None:
            return None
        return [self.class_name(target) if target >= 0 else "" for target in self.images.targets.tolist()]

    def class_name(self, target: int) -> str:
        """Return the name of a true class, or its number if it has no name."""
        names = self.images.class_names
        return names[target] if target < len(names) else str(target)
