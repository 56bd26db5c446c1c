"""What came of a sweep: its trials from best to worst, their comparison, and the config of the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any

from rich.markup import escape
from rich.table import Table

from fedclade.config import Config
from fedclade.core import RunError, import_extra, write_text
from fedclade.report import Comparison, Score, count, new_table
from fedclade.runs import Run, chosen_round, column_of, to_toml
from fedclade.sweeps.space import Parameter

BEST, PICTURE = "best.toml", "trials.html"

SHOWN = 10
"""So many trials are in the table."""


@dataclass(frozen=True)
class TrialRow:
    """One trial that finished: what it drew, and its mean scores over the seeds."""

    number: int
    label: str
    values: Mapping[str, Any]
    """By key of the config."""
    validation: float
    """On validation data, of each run's best round there: what the sweep goes by."""
    test: float
    """On test data, of those rounds."""
    last: float | None
    """On test data, of the last round; None if no client has a score there."""


@dataclass(frozen=True, eq=False)
class SweepResult:
    """What came of a sweep.

    Parameters
    ----------
    folder
        Of the sweep.
    parameters
        What was varied.
    score
        The metric that it goes by.
    configs
        By label: the config of each trial that finished.
    runs
        By label: its runs, one for each seed.
    drawn
        By label: what it drew, by key.
    failures
        By label: why a trial failed.
    study
        Optuna's study, such as for its pictures.
    """

    folder: Path
    parameters: Sequence[Parameter]
    score: Score
    configs: Mapping[str, Config]
    runs: Mapping[str, Sequence[Run]]
    drawn: Mapping[str, Mapping[str, Any]]
    failures: Mapping[str, str]
    study: Any

    @cached_property
    def comparison(self) -> Comparison:
        """The trials side by side, each a configuration, best first."""
        return Comparison({row.label: self.runs[row.label] for row in self.trials})

    @cached_property
    def trials(self) -> tuple[TrialRow, ...]:
        """The trials that finished, best first on validation data; equal ones by number."""
        rows = [self._row(number, label) for number, label in enumerate(self.drawn) if label in self.runs]
        return tuple(sorted(rows, key=lambda row: (-self.score.sign * row.validation, row.number)))

    @property
    def best(self) -> TrialRow:
        """The trial with the best score on validation data."""
        return self.trials[0]

    @property
    def best_config(self) -> Config:
        """Its config."""
        return self.configs[self.best.label]

    def table(self) -> Table:
        """Return the best trials for the terminal."""
        title = f"Best {min(SHOWN, len(self.trials))} of {count(len(self.drawn), 'trial')}"
        title += f", {len(self.failures)} failed" if self.failures else ""
        caption = (
            "By the score on validation data of each run's best round there, mean of the clients"
            f"{' and seeds' if len(self.runs[self.best.label]) > 1 else ''}; test scores had no part in it."
        )
        table = new_table(title, caption=caption, collapse_padding=True)
        heading = self.score.heading
        for name in ("trial", *(p.key for p in self.parameters)):
            table.add_column(name, justify="right", overflow="fold")
        for name in (f"validation {heading}", f"test {heading}", "test, last round"):
            table.add_column(fill(name, 12, break_long_words=False), justify="right", no_wrap=True)
        for row in self.trials[:SHOWN]:
            cells = [str(row.number), *(escape(short(row.values[p.key])) for p in self.parameters)]
            table.add_row(*cells, *map(self.score.digits, (row.validation, row.test, row.last)))
        return table

    def save(self) -> None:
        """Write ``best.toml`` and the comparison into the sweep's folder.

        Raises
        ------
        RunError
            If the folder cannot be written.
        """
        best, config = self.best, self.best_config.as_dict()
        reached = f"{self.score.label} {self.score.text(best.validation)}"
        said = f"# Trial {best.number} of a sweep: {reached} on validation data.\n"
        try:
            write_text(self.folder / BEST, f"{said}{to_toml(config)}")
        except OSError as error:
            raise RunError(f"cannot write the sweep to {self.folder}: {error}") from error
        self.comparison.save(self.folder, figure=False)

    def save_pictures(self) -> None:
        """Draw the comparison into the sweep's folder, and Optuna's pictures of the trials as ``trials.html``.

        Raises
        ------
        MissingExtraError
            If matplotlib or plotly is not installed.
        RunError
            If the folder cannot be written.
        """
        import_extra("plotly", "plotly", "report", "a picture of a sweep")
        visual = import_extra("optuna.visualization", "optuna", "sweep", "a sweep")
        name = f"{self.score.label} on validation data"
        draw = [visual.plot_slice, *([visual.plot_parallel_coordinate] if len(self.parameters) > 1 else [])]
        figures = [each(self.study, target_name=name) for each in draw]
        html = [each.to_html(full_html=False, include_plotlyjs=i == 0) for i, each in enumerate(figures)]
        page = f'<!doctype html><meta charset="utf-8"><title>Trials</title>{"".join(html)}'
        try:
            write_text(self.folder / PICTURE, page)
        except OSError as error:
            raise RunError(f"cannot write the sweep to {self.folder}: {error}") from error
        self.comparison.save(self.folder)

    def _row(self, number: int, label: str) -> TrialRow:
        score, runs = self.score, self.runs[label]
        rows = [chosen_round(run.metric_rows, score.metric) for run in runs]
        column = column_of(score.name), f"{score.name}_mean"
        validation, test = (fmean(row[name] for row in rows if row is not None) for name in column)
        means = [mean for run in runs if (mean := _last_score(score, run)) is not None]
        last = fmean(means) if means else None
        return TrialRow(number, label, self.drawn[label], validation, test, last)


def _last_score(score: Score, run: Run) -> float | None:
    """Return the mean test score of the last round, also of a run that keeps the models of another."""
    last = run.summary.get("last", {}).get("test", {})
    return last[score.name] if score.name in last else score.mean(run.summary)


def short(value: Any) -> str:
    """Write a value of a config for people."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
