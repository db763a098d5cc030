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
    """Everything a report shows."""

    title: str  # name of the run
    results: Results
    metrics: Sequence[Mapping[str, Any]]  # as in metrics.jsonl
    config: Config
    facts: Mapping[str, str] = field(default_factory=dict)  # how the run was made, shown as given
    warnings: Sequence[str] = ()
    number: Sequence[str] = ()  # why the run has its number of clusters; empty if the user gave it
    losses: Sequence[str] = LOSSES  # their names in the metrics

    @cached_property
    def ids(self) -> list[str]:
        """The id of each image as in assignments.csv, which the page can read."""
        return [escape(name) for name in self.results.ids]
