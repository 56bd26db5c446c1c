"""Metrics in reports: their names, and the format of scores."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedclade.core import ConfigError
from fedclade.report.formats import NONE, number, significant
from fedclade.report.picture import Axis
from fedclade.runs import Row, Run
from fedclade.tasks import Metric, perplexity, read_metrics

CAPITALS = (
    *("auc", "auroc", "bleu", "cer", "crps", "f1", "fid", "iou", "mae", "mape", "mase", "mcc"),
    *("mse", "msle", "nll", "psnr", "r2", "rmse", "rmsle", "smape", "ssim", "wer"),
)
"""Abbreviations in names of metrics."""


@dataclass(frozen=True)
class Scored:
    """Number of clients with a score by a metric, and of those for which it is undefined."""

    clients: int = 0
    without: int = 0

    def __add__(self, other: Scored) -> Scored:
        return Scored(self.clients + other.clients, self.without + other.without)

    @property
    def text(self) -> str:
        """Clients with a score among all, such as ``18 of 20``; empty if all have one."""
        if not self.without:
            return ""
        return f"{self.clients:,} of {self.clients + self.without:,}"

    @property
    def of_clients(self) -> str:
        """Phrase for the clients with a score: ``18 of 20 clients``, or ``the clients``."""
        return f"{self.text} clients" if self.without else "the clients"

    def after(self, written: str) -> str:
        """Return a written score, followed by the number of clients with one if some have none."""
        return f"{written} ({self.text})" if self.without else written


@dataclass(frozen=True)
class Score:
    """A metric in reports."""

    metric: Metric

    @classmethod
    def of_run(cls, run: Run) -> Score:
        """Return the main metric of a run."""
        return cls.all_of(run.summary)[0]

    @classmethod
    def all_of(cls, summary: Mapping[str, Any]) -> tuple[Score, ...]:
        """Return all metrics of a run, the main one first."""
        return tuple(cls(Metric(**metric.noted)) for metric in read_metrics(summary))

    @classmethod
    def named(cls, name: str, summary: Mapping[str, Any]) -> Score:
        """Return a metric of a run by its name."""
        return next(score for score in cls.all_of(summary) if score.name == name)

    @property
    def name(self) -> str:
        """Name of the metric in files, such as ``accuracy`` or ``mae``."""
        return self.metric.name

    @property
    def label(self) -> str:
        """Name of the metric in text; see :func:`label_of`."""
        return label_of(self.name)

    @property
    def title(self) -> str:
        """Name of the metric at the beginning of a line."""
        return self.label[:1].upper() + self.label[1:]

    @property
    def heading(self) -> str:
        """Heading of a column of scores, with the unit."""
        return f"{self.label}, %" if self.share else self.label

    @property
    def file(self) -> str:
        """Metric name in a form that is safe for file names."""
        return re.sub(r"\W+", "_", self.name)

    @property
    def sign(self) -> int:
        """1 if higher scores are better, else -1."""
        return 1 if self.metric.higher_is_better else -1

    @property
    def remark(self) -> str:
        """Sentence for captions if lower scores are better; empty otherwise."""
        return "" if self.metric.higher_is_better else " Lower is better."

    @property
    def share(self) -> bool:
        """Whether scores are written in per cent."""
        return self.metric.share

    def is_of(self, *summaries: Mapping[str, Any]) -> bool:
        """Return whether all runs with these summaries have the metric."""
        return all(self in Score.all_of(summary) for summary in summaries)

    def of(self, row: Row) -> float:
        """Return a client's score from its row of ``clients.parquet``; NaN if it has none."""
        if self.name in row:
            return row[self.name]
        return perplexity(row["loss"])  # earlier versions stored only the loss of language models

    def by_client(self, rows: Iterable[Row]) -> dict[int, float]:
        """Return the score of each client that has one, from rows of ``clients.parquet``."""
        scores = {row["client"]: self.of(row) for row in rows}
        return {client: score for client, score in scores.items() if not math.isnan(score)}

    def mean(self, summary: Mapping[str, Any]) -> float | None:
        """Return the mean score of a run's clients that have one; None if no client has."""
        return summary[self.name]["mean"]

    def clients(self, summary: Mapping[str, Any]) -> Scored:
        """Return the numbers of clients with and without a score; 0 in runs of earlier versions."""
        spread = summary[self.name]
        return Scored(spread.get("clients", 0), spread.get("without_score", 0))

    def of_chosen(self, summary: Mapping[str, Any], split: str = "test") -> float | None:
        """Return the mean score of the round that is best on validation data; None without one."""
        return summary.get("chosen", {}).get(split, {}).get(self.name)

    def of_honest(self, summary: Mapping[str, Any]) -> float | None:
        """Return the mean score of honest clients; None for a run without adversaries."""
        return summary.get("adversary", {}).get("scores", {}).get(self.name, {}).get("honest")

    def worst_tenth(self, summary: Mapping[str, Any]) -> float | None:
        """Return the mean score of the worst tenth of the clients."""
        return summary[self.name]["worst10_mean"]

    def digits(self, value: float | None, like: float | None = None) -> str:
        """Write a score without a unit, as in a column with :attr:`heading`.

        Parameters
        ----------
        value
            The score.
        like
            Another score, whose number of decimals is used.
        """
        if self.share:
            return number(None if value is None else 100 * value, 1)
        return significant(value, like)

    def text(self, value: float | None) -> str:
        """Write a score with its unit."""
        digits = self.digits(value)
        return f"{digits} %" if self.share and digits != NONE else digits

    def gain(self, mean: float, other: float) -> tuple[str, str]:
        """Compare a mean score with another.

        Returns
        -------
        tuple of str
            The difference with its sign, and its trend: ``good``, ``bad``, or empty if it is
            negligible.
        """
        difference = mean - other
        sign = "−" if difference < 0 else "+"
        text = f"{sign}{self.digits(abs(difference))}"
        if self.share:
            text += " points"
        threshold = 5e-4 if self.share else 5e-4 * abs(other)
        # Written so that a difference of NaN is negligible, too.
        is_relevant = difference != 0 and abs(difference) >= threshold
        if not is_relevant:
            return text, ""
        return text, "good" if difference * self.sign > 0 else "bad"

    def hover(self, axis: str = "y") -> str:
        """Return Plotly's template of a score at the pointer, on one axis of a picture."""
        form = ".1%" if self.share else ",.4~r"
        return f"%{{{axis}:{form}}}"

    def axis(self, what: str) -> Axis:
        """Return an axis of scores, whose title begins with ``what``, such as ``mean test``."""
        form = "share" if self.share else "number"
        return Axis(f"{what} {self.label}", form, log=self.name == "perplexity")


def label_of(metric: str) -> str:
    """Return a metric's name in text, without characters that could be markup.

    >>> label_of("mae"), label_of("average_precision"), label_of("binary_auroc")
    ('MAE', 'average precision', 'binary AUROC')
    """
    words = re.sub(r"[^\w .+@/()-]", "", metric).split("_")
    return " ".join(word.upper() if word.lower() in CAPITALS else word for word in words)


def compared_by(summaries: Sequence[Mapping[str, Any]]) -> tuple[Score, ...]:
    """Return all metrics of some runs, beginning with the metrics that all runs have."""
    scores: dict[Score, None] = {}
    for summary in summaries:
        scores.update(dict.fromkeys(Score.all_of(summary)))
    return tuple(sorted(scores, key=lambda score: not score.is_of(*summaries)))


def in_common(summaries: Sequence[Mapping[str, Any]]) -> Score:
    """Return the first metric that all runs have.

    Raises
    ------
    ConfigError
        If there is none.
    """
    score = compared_by(summaries)[0]
    if score.is_of(*summaries):
        return score
    names = dict.fromkeys(_list_names(summary) for summary in summaries)
    raise ConfigError(
        f"runs should have a metric in common to be compared, got {' against '.join(names)}"
    )


def _list_names(summary: Mapping[str, Any]) -> str:
    return ", ".join(score.name for score in Score.all_of(summary))
