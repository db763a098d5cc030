"""What a report is made from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from secu.config import Config
from secu.data import ImageSource
from secu.metrics import Scores


@dataclass(frozen=True, eq=False, kw_only=True)
class ReportData:
    """Everything a report shows; N images, K clusters, D dimensions.

    Attributes:
        title: Name of the run.
        ids: What a person calls each image, mostly its path; any text at all.
        images: The pixels, fetched for the pictures that are shown and for no other.
        embeddings: Unit embeddings (N, D).
        centers: Cluster centers (K, D).
        cluster: The cluster of each image (N,).
        confidence: How sure that is (N,), 0 to 1.
        second: The second choice (N,).
        second_confidence: How likely that is (N,), 0 to 1.
        cosine: Cosine of each image to the center of its cluster (N,).
        outlier: True for an image that fits nowhere (N,).
        metrics: A record an epoch, as in metrics.jsonl.
        config: The settings of the run.
        targets: True labels (N,), -1 where unknown; None: none are known.
        class_names: The name of each target.
        facts: How the run was made (device, engine, versions, ...), shown as given.
        scores: ACC, NMI and ARI, where true labels are known.
        warnings: What is wrong with the run and what to do, in plain words.
    """

    title: str
    ids: Sequence[str]
    images: ImageSource
    embeddings: Tensor
    centers: Tensor
    cluster: Tensor
    confidence: Tensor
    second: Tensor
    second_confidence: Tensor
    cosine: Tensor
    outlier: Tensor
    metrics: Sequence[Mapping[str, Any]]
    config: Config
    targets: Tensor | None = None
    class_names: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    scores: Scores | None = None
    warnings: Sequence[str] = ()

    def __post_init__(self) -> None:
        count = len(self.ids)
        columns = ("cluster", "confidence", "second", "second_confidence", "cosine", "outlier")
        for name in ("images", "embeddings", *columns, *(() if self.targets is None else ("targets",))):
            assert len(getattr(self, name)) == count, f"{name}: {len(getattr(self, name))} rows for {count} ids"

    def class_name(self, target: int) -> str:
        """Return the name of a true label; its number where it has none."""
        return self.class_names[target] if target < len(self.class_names) else str(target)
