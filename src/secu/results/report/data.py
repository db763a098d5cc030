"""The input of a report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from secu.base.names import escape
from secu.config import Config
from secu.results.found import Results

LOSSES = ("loss", "center_loss")  # of runs that do not name theirs


@dataclass(frozen=True, eq=False, kw_only=True)
class ReportData:
    """Everything a report shows.

    Attributes:
        title: Name of the run.
        results: The clusters of all images.
        metrics: One record per epoch, as in metrics.jsonl.
        losses: Names of the losses in these records.
        config: The settings of the run.
        facts: How the run was made (device, engine, versions, ...), shown as given.
        warnings: Problems of the run, with suggested fixes.
        number: Why the run has its number of clusters; empty if the user gave it.
    """

    title: str
    results: Results
    metrics: Sequence[Mapping[str, Any]]
    config: Config
    facts: Mapping[str, str] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    number: Sequence[str] = ()
    losses: Sequence[str] = LOSSES

    @cached_property
    def ids(self) -> list[str]:
        """The id of each image as in assignments.csv, which the page can read."""
        return [escape(name) for name in self.results.ids]
