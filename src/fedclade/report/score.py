"""Metrics in reports: their names, units and formats, and the scores in the records of a run."""

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
from fedclade.tasks import Interval, Metric, mean_interval, perplexity, read_metrics

CAPITALS = (
    *("auc", "auroc", "bleu", "cer", "crps", "f1", "fid", "iou", "mae", "mape", "mase", "mcc"),
    *("mse", "msle", "nll", "psnr", "r2", "rmse", "rmsle", "smape", "ssim", "wer"),
)
"""Abbreviations that are written in capitals in the names of metrics."""


@dataclass(frozen=True)
class Scored:
    """Numbers of clients with and without a score by a metric.

    A client has no score if the metric is undefined for its test data.
    """

    clients: int = 0
    without: int = 0

    def __add__(self, other: Scored) -> Scored:
        """Add the numbers of two groups of clients, separately with and without a score."""
        return Scored(self.clients + other.clients, self.without + other.without)

    @property
    def text(self) -> str:
        """Number of clients with a score, such as ``18 of 20``; empty if all clients have one."""
        if not self.without:
            return ""
        return f"{self.clients:,} of {self.clients + self.without:,}"

    @property
    def of_clients(self) -> str:
        """Phrase for the clients with a score: ``18 of 20 clients``, or ``the clients`` for all."""
        if self.without:
            return f"{self.text} clients"
        return "the clients"

    def after(self, written: str) -> str:
        """Append the number of clients with a score to a written score, if some have no score."""
        if self.without:
            return f"{written} ({self.text})"
        return written


@dataclass(frozen=True)
class Score:
    """Metric in reports: its name, unit and format, and access to scores in records of a run."""

    metric: Metric

    @classmethod
    def of_run(cls, run: Run) -> Score:
        """Return the main metric of a run."""
        return cls.all_of(run.summary)[0]

    @classmethod
    def all_of(cls, summary: Mapping[str, Any]) -> tuple[Score, ...]:
        """Return all metrics of a run, the main metric first, from the run's ``summary.json``."""
        return tuple(cls(Metric(**metric.noted)) for metric in read_metrics(summary))

    @classmethod
    def named(cls, name: str, summary: Mapping[str, Any]) -> Score:
        """Return the metric with this name from a run's ``summary.json``."""
        return next(score for score in cls.all_of(summary) if score.name == name)

    @property
    def name(self) -> str:
        """Name of the metric in files, such as ``accuracy`` or ``mae``."""
        return self.metric.name

    @property
    def label(self) -> str:
        """Name of the metric in text, such as ``average precision``; see :func:`label_of`."""
        return label_of(self.name)

    @property
    def title(self) -> str:
        """Name of the metric with a capital letter, for the beginning of a line."""
        return self.label[:1].upper() + self.label[1:]

    @property
    def heading(self) -> str:
        """Heading of a column of scores: the name of the metric, with ``%`` for shares."""
        if self.share:
            return f"{self.label}, %"
        return self.label

    @property
    def file(self) -> str:
        """Name of the metric in a form that is safe for file names."""
        return re.sub(r"\W+", "_", self.name)

    @property
    def sign(self) -> int:
        """Direction of the metric: 1 if higher scores are better, else -1."""
        return 1 if self.metric.higher_is_better else -1

    @property
    def remark(self) -> str:
        """Sentence for captions that lower scores are better; empty if higher scores are better."""
        return "" if self.metric.higher_is_better else " Lower is better."

    @property
    def share(self) -> bool:
        """Whether scores of this metric are shares, which are written in per cent."""
        return self.metric.share

    def is_of(self, *summaries: Mapping[str, Any]) -> bool:
        """Return whether all runs with these summaries have been evaluated by the metric."""
        return all(self in Score.all_of(summary) for summary in summaries)

    def of(self, row: Row) -> float:
        """Return a client's score from its row of ``clients.parquet``; NaN if it has no score."""
        if self.name in row:
            return row[self.name]
        # Earlier versions of fedclade stored only the loss of language models.
        return perplexity(row["loss"])

    def by_client(self, rows: Iterable[Row]) -> dict[int, float]:
        """Return the score of each client that has a score, from rows of ``clients.parquet``."""
        scores = {row["client"]: self.of(row) for row in rows}
        return {client: score for client, score in scores.items() if not math.isnan(score)}

    def mean(self, summary: Mapping[str, Any]) -> float | None:
        """Return the mean score over the clients from a run's summary; None without scores."""
        return summary[self.name]["mean"]

    def clients(self, summary: Mapping[str, Any]) -> Scored:
        """Return the numbers of clients with and without a score, from a run's summary.

        Both are 0 for runs of earlier versions of fedclade, which did not record them.
        """
        spread = summary[self.name]
        return Scored(spread.get("clients", 0), spread.get("without_score", 0))

    def of_chosen(self, summary: Mapping[str, Any], split: str = "test") -> float | None:
        """Return the mean score of the round that is best on validation data, from a run's summary.

        None for a run without validation data. ``split`` is the data of the score: ``test`` or
        ``validation``.
        """
        return summary.get("chosen", {}).get(split, {}).get(self.name)

    def of_honest(self, summary: Mapping[str, Any]) -> float | None:
        """Return honest clients' mean score from a run's summary; None without adversaries."""
        return summary.get("adversary", {}).get("scores", {}).get(self.name, {}).get("honest")

    def worst_tenth(self, summary: Mapping[str, Any]) -> float | None:
        """Return the mean score of the worst tenth of the clients from a run's summary."""
        return summary[self.name]["worst10_mean"]

    def digits(self, value: float | None, like: float | None = None) -> str:
        """Return a score as text without a unit, for a table whose :attr:`heading` has the unit.

        Parameters
        ----------
        value
            The score; a missing score is written as a dash.
        like
            Another score; the text has the number of decimals that this score would have.
        """
        if self.share:
            return number(None if value is None else 100 * value, 1)
        return significant(value, like)

    def text(self, value: float | None) -> str:
        """Return a score as text with its unit; a dash if the score is missing."""
        digits = self.digits(value)
        if self.share and digits != NONE:
            return f"{digits} %"
        return digits

    def signed(self, value: float) -> str:
        """Return a difference of two scores as text with its sign and without a unit."""
        if math.isnan(value):
            return NONE
        sign = "−" if value < 0 else "+"
        return f"{sign}{self.digits(abs(value))}"

    def with_ends(self, text: str, interval: Interval) -> str:
        """Append the ends of an interval to the text of a score: ``78.5 [70.1, 85.0]``.

        The text is unchanged if the interval has no ends.
        """
        if interval.low is None or interval.high is None:
            return text
        low = self.digits(interval.low, like=interval.value)
        high = self.digits(interval.high, like=interval.value)
        return f"{text} [{low}, {high}]"

    def compare(self, now: Mapping[int, float], before: Mapping[int, float]) -> tuple[str, str]:
        """Compare clients' scores with other scores of the same clients.

        Parameters
        ----------
        now, before
            Scores by client id. Clients that are in only one of the two are left out.

        Returns
        -------
        tuple of str
            First, the mean difference ``now`` - ``before`` as text with its sign and its 95 %
            interval over the clients. Second, ``good`` if ``now`` is better and the interval
            excludes 0, ``bad`` if ``now`` is worse and the interval excludes 0, or else empty. Both
            texts are empty if no client has both scores.
        """
        differences = [score - before[client] for client, score in now.items() if client in before]
        if not differences:
            return "", ""
        mean = mean_interval(differences)
        text = self.signed(mean.value)
        if self.share:
            text += " points"
        gain = mean_interval([self.sign * difference for difference in differences])
        return self.with_ends(text, mean), gain.trend

    def hover(self, axis: str = "y") -> str:
        """Return Plotly's template that formats a score in the text at the mouse pointer.

        The score is the coordinate of the point on the given axis, ``x`` or ``y``.
        """
        form = ".1%" if self.share else ",.4~r"
        return f"%{{{axis}:{form}}}"

    def axis(self, what: str) -> Axis:
        """Return an axis for scores, whose title begins with ``what``, such as ``mean test``."""
        form = "share" if self.share else "number"
        return Axis(f"{what} {self.label}", form, log=self.name == "perplexity")


def label_of(metric: str) -> str:
    """Return a metric's name as it is written in text, without characters that could be markup.

    >>> label_of("mae"), label_of("average_precision"), label_of("binary_auroc")
    ('MAE', 'average precision', 'binary AUROC')
    """
    words = re.sub(r"[^\w .+@/()-]", "", metric).split("_")
    return " ".join(word.upper() if word.lower() in CAPITALS else word for word in words)


def compared_by(summaries: Sequence[Mapping[str, Any]]) -> tuple[Score, ...]:
    """Return all metrics of several runs, first the metrics that all runs have.

    Parameters
    ----------
    summaries
        Content of ``summary.json`` of each run.
    """
    scores: dict[Score, None] = {}
    for summary in summaries:
        scores.update(dict.fromkeys(Score.all_of(summary)))
    return tuple(sorted(scores, key=lambda score: not score.is_of(*summaries)))


def in_common(summaries: Sequence[Mapping[str, Any]]) -> Score:
    """Return the first metric that all of several runs have.

    Parameters
    ----------
    summaries
        Content of ``summary.json`` of each run.

    Raises
    ------
    ConfigError
        If the runs have no metric in common.
    """
    score = compared_by(summaries)[0]
    if score.is_of(*summaries):
        return score
    names = dict.fromkeys(_list_names(summary) for summary in summaries)
    raise ConfigError(
        "compared runs should have at least one metric in common, got runs with "
        f"{' against '.join(names)}"
    )


def _list_names(summary: Mapping[str, Any]) -> str:
    """Return the names of a run's metrics as text."""
    return ", ".join(score.name for score in Score.all_of(summary))
