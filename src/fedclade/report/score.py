"""What clients are scored by: accuracy, or perplexity where the model predicts words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedclade.report.formats import number, percent
from fedclade.report.picture import Axis
from fedclade.runs import Row, Run
from fedclade.tasks import perplexity


@dataclass(frozen=True)
class Score:
    """Accuracy, or for language models perplexity, of which less is more."""

    language: bool

    @classmethod
    def of_run(cls, run: Run) -> Score:
        """Return what the clients of a run are scored by."""
        return cls("perplexity" in run.summary)

    @property
    def name(self) -> str:
        """``accuracy`` or ``perplexity``."""
        return "perplexity" if self.language else "accuracy"

    @property
    def sign(self) -> int:
        """1 if more is better, else -1."""
        return -1 if self.language else 1

    def of(self, row: Row) -> float:
        """Return a client's score from its row of ``clients.parquet``; accuracy is in [0, 1]."""
        return perplexity(row["loss"]) if self.language else row["accuracy"]

    def mean(self, summary: Mapping[str, Any]) -> float:
        """Return the mean score of a run."""
        return summary[self.name]["mean"]

    def text(self, value: float | None) -> str:
        """Write a score for people."""
        return number(value, 1) if self.language else percent(value)

    def hover(self, axis: str = "y") -> str:
        """Return the form of a score at the pointer, on one axis of a picture."""
        return f"%{{{axis}:.1f}}" if self.language else f"%{{{axis}:.1%}}"

    def axis(self, what: str) -> Axis:
        """Return an axis of scores, such as of ``mean test`` ones."""
        return Axis(f"{what} {self.name}", "number" if self.language else "share", log=self.language)
