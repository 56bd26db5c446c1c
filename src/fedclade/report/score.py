"""What clients are scored by: the metric that counts, and how a score is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedclade.report.formats import number, percent
from fedclade.report.picture import Axis
from fedclade.runs import Row, Run
from fedclade.tasks import Metric, noted_metrics, perplexity


@dataclass(frozen=True)
class Score:
    """The metric that counts."""

    metric: Metric

    @classmethod
    def of_run(cls, run: Run) -> Score:
        """Return what the clients of a run are scored by."""
        return cls(noted_metrics(run.summary)[0])

    @property
    def name(self) -> str:
        """Its name, such as ``accuracy`` or ``mae``."""
        return self.metric.name

    @property
    def sign(self) -> int:
        """1 if more is better, else -1."""
        return 1 if self.metric.higher_is_better else -1

    @property
    def share(self) -> bool:
        """Whether it is written in per cent."""
        return self.metric.share

    def of(self, row: Row) -> float:
        """Return a client's score from its row of ``clients.parquet``."""
        return row[self.name] if self.name in row else perplexity(row["loss"])  # of language in earlier versions

    def mean(self, summary: Mapping[str, Any]) -> float:
        """Return the mean score of a run."""
        return summary[self.name]["mean"]

    def text(self, value: float | None) -> str:
        """Write a score for people."""
        return percent(value) if self.share else number(value, 1 if self.name == "perplexity" else 3)

    def hover(self, axis: str = "y") -> str:
        """Return the form of a score at the pointer, on one axis of a picture."""
        form = ".1%" if self.share else ".1f" if self.name == "perplexity" else ".4~g"
        return f"%{{{axis}:{form}}}"

    def axis(self, what: str) -> Axis:
        """Return an axis of scores, such as of ``mean test`` ones."""
        form = "share" if self.share else "number"
        return Axis(f"{what} {self.name}", form, log=self.name == "perplexity")
