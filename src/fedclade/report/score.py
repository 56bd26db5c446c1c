"""What clients are scored by: a metric, what it is called, and how a score is written."""

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
    *("auc", "auroc", "bleu", "cer", "crps", "f1", "fid", "iou", "mae", "mape", "mase", "mcc", "mse", "msle", "nll"),
    *("psnr", "r2", "rmse", "rmsle", "smape", "ssim", "wer"),
)
"""Words in names of metrics that are abbreviations."""


@dataclass(frozen=True)
class Scored:
    """How many clients have a score by a metric, and for how many it is undefined."""

    clients: int = 0
    without: int = 0

    def __add__(self, other: Scored) -> Scored:
        return Scored(self.clients + other.clients, self.without + other.without)

    @property
    def text(self) -> str:
        """The clients with a score among all, such as ``18 of 20``; nothing if none lacks one."""
        return f"{self.clients:,} of {self.clients + self.without:,}" if self.without else ""

    @property
    def of_clients(self) -> str:
        """The same as part of a sentence: ``18 of 20 clients``, or ``the clients``."""
        return f"{self.text} clients" if self.without else "the clients"

    def after(self, written: str) -> str:
        """Return a score as written, with this number behind it if a client lacks one."""
        return f"{written} ({self.text})" if self.without else written


@dataclass(frozen=True)
class Score:
    """A metric as reports show it."""

    metric: Metric

    @classmethod
    def of_run(cls, run: Run) -> Score:
        """Return what the clients of a run are scored by: the metric that counts."""
        return cls.all_of(run.summary)[0]

    @classmethod
    def all_of(cls, summary: Mapping[str, Any]) -> tuple[Score, ...]:
        """Return all metrics of a run, the one that counts first."""
        return tuple(cls(Metric(**metric.noted)) for metric in read_metrics(summary))

    @classmethod
    def named(cls, name: str, summary: Mapping[str, Any]) -> Score:
        """Return one of a run's metrics by its name."""
        return next(score for score in cls.all_of(summary) if score.name == name)

    @property
    def name(self) -> str:
        """Its name in files, such as ``accuracy`` or ``mae``."""
        return self.metric.name

    @property
    def label(self) -> str:
        """Its name for people; see :func:`label_of`."""
        return label_of(self.name)

    @property
    def title(self) -> str:
        """The same at the beginning of a line."""
        return self.label[:1].upper() + self.label[1:]

    @property
    def heading(self) -> str:
        """The same over a column of numbers."""
        return f"{self.label}, %" if self.share else self.label

    @property
    def file(self) -> str:
        """The same as a file can be called."""
        return re.sub(r"\W+", "_", self.name)

    @property
    def sign(self) -> int:
        """1 if more is better, else -1."""
        return 1 if self.metric.higher_is_better else -1

    @property
    def remark(self) -> str:
        """What to add to a caption: the direction, if it is the less usual one."""
        return "" if self.metric.higher_is_better else " Lower is better."

    @property
    def share(self) -> bool:
        """Whether it is written in per cent."""
        return self.metric.share

    def is_of(self, *summaries: Mapping[str, Any]) -> bool:
        """Whether all of some runs have it."""
        return all(self in Score.all_of(summary) for summary in summaries)

    def of(self, row: Row) -> float:
        """Return a client's score from its row of ``clients.parquet``; NaN if it has none."""
        return row[self.name] if self.name in row else perplexity(row["loss"])  # of language in earlier versions

    def by_client(self, rows: Iterable[Row]) -> dict[int, float]:
        """Return the score of each client that has one, given rows of ``clients.parquet``."""
        scores = {row["client"]: self.of(row) for row in rows}
        return {client: score for client, score in scores.items() if not math.isnan(score)}

    def mean(self, summary: Mapping[str, Any]) -> float | None:
        """Return the mean score of a run's clients that have one; None if none has."""
        return summary[self.name]["mean"]

    def clients(self, summary: Mapping[str, Any]) -> Scored:
        """Return how many of a run's clients have a score; unknown of runs of earlier versions."""
        spread = summary[self.name]
        return Scored(spread.get("clients", 0), spread.get("without_score", 0))

    def of_chosen(self, summary: Mapping[str, Any], split: str = "test") -> float | None:
        """Return the mean score of the round that validation data chose, on one split; None without such a round."""
        return summary.get("chosen", {}).get(split, {}).get(self.name)

    def of_honest(self, summary: Mapping[str, Any]) -> float | None:
        """Return the mean score of a run's honest clients; None of a run without adversaries."""
        return summary.get("adversary", {}).get("scores", {}).get(self.name, {}).get("honest")

    def worst_tenth(self, summary: Mapping[str, Any]) -> float | None:
        """Return the mean score of the worst tenth of a run's clients."""
        return summary[self.name]["worst10_mean"]

    def digits(self, value: float | None, like: float | None = None) -> str:
        """Write a score without a unit, as under a :attr:`heading`; with as many decimals as another has."""
        if self.share:
            return number(None if value is None else 100 * value, 1)
        return significant(value, like)

    def text(self, value: float | None) -> str:
        """Write a score for people."""
        written = self.digits(value)
        return f"{written} %" if self.share and written != NONE else written

    def gain(self, mean: float, other: float) -> tuple[str, str]:
        """Say how far a mean score is from another, and whether that is ``good``, ``bad``, or next to nothing."""
        gain = mean - other
        small = 5e-4 if self.share else 5e-4 * abs(other)
        trend = "" if not abs(gain) >= small or gain == 0 else "good" if gain * self.sign > 0 else "bad"
        return f"{'−' if gain < 0 else '+'}{self.digits(abs(gain))}{' points' if self.share else ''}", trend

    def hover(self, axis: str = "y") -> str:
        """Return the form of a score at the pointer, on one axis of a picture."""
        return f"%{{{axis}:{'.1%' if self.share else ',.4~r'}}}"

    def axis(self, what: str) -> Axis:
        """Return an axis of scores, such as of ``mean test`` ones."""
        return Axis(f"{what} {self.label}", "share" if self.share else "number", log=self.name == "perplexity")


def label_of(metric: str) -> str:
    """Return a metric's name for people, without what could be markup.

    >>> label_of("mae"), label_of("average_precision"), label_of("binary_auroc")
    ('MAE', 'average precision', 'binary AUROC')
    """
    words = re.sub(r"[^\w .+@/()-]", "", metric).split("_")
    return " ".join(word.upper() if word.lower() in CAPITALS else word for word in words)


def compared_by(summaries: Sequence[Mapping[str, Any]]) -> tuple[Score, ...]:
    """Return all metrics of some runs; in front those that all runs have, in the order of the first run."""
    found = list(dict.fromkeys(score for summary in summaries for score in Score.all_of(summary)))
    return tuple(sorted(found, key=lambda score: not score.is_of(*summaries)))


def in_common(summaries: Sequence[Mapping[str, Any]]) -> Score:
    """Return the first metric that all of some runs have; a ConfigError if there is none."""
    score = compared_by(summaries)[0]
    if not score.is_of(*summaries):
        names = dict.fromkeys(", ".join(each.name for each in Score.all_of(summary)) for summary in summaries)
        raise ConfigError(f"runs should have a metric in common to be compared, got {' against '.join(names)}")
    return score
