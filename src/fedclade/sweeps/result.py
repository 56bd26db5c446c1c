"""Result of a sweep: its trials from best to worst, their comparison, and the best config.

A trial is a set of drawn values for the varied settings, with a run for each seed.
"""

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
from fedclade.runs import Row, Run, chosen_round, column_of, to_toml
from fedclade.sweeps.space import Parameter

BEST = "best.toml"
PICTURE = "trials.html"
"""Files in the sweep's folder."""

SHOWN = 10
"""Largest number of trials in the table."""


@dataclass(frozen=True)
class TrialRow:
    """Finished trial of a sweep: its drawn values, and its mean scores over the seeds."""

    number: int
    label: str
    values: Mapping[str, Any]
    """Drawn values by key of the config."""
    validation: float
    """Validation score of the round with the best validation score, by which trials are ranked."""
    test: float
    """Test score of the round with the best validation score."""
    last: float | None
    """Test score of the last round; None if no client has a score in it."""


@dataclass(frozen=True, eq=False)
class SweepResult:
    """Result of a sweep.

    Parameters
    ----------
    folder
        Folder of the sweep.
    parameters
        The varied parameters.
    score
        Metric by which trials are ranked, on validation data.
    configs
        Config of each finished trial, by the trial's label.
    runs
        Runs of each finished trial, one for each seed, by the trial's label.
    drawn
        For each trial, by its label: the drawn values, by the keys of the settings.
    failures
        Error of each failed trial, by the trial's label.
    study
        Optuna's study, for example for its figures.
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
        """Comparison of the runs of all finished trials, the best trial first."""
        return Comparison({row.label: self.runs[row.label] for row in self.trials})

    @cached_property
    def trials(self) -> tuple[TrialRow, ...]:
        """Finished trials, the best on validation data first; equal trials by their numbers."""
        rows: list[TrialRow] = []
        for number, label in enumerate(self.drawn):
            if label in self.runs:
                rows.append(self._average_runs(number, label))
        rows.sort(key=lambda row: (-self.score.sign * row.validation, row.number))
        return tuple(rows)

    @property
    def best(self) -> TrialRow:
        """Trial with the best score on validation data."""
        return self.trials[0]

    @property
    def best_config(self) -> Config:
        """Config of the best trial."""
        return self.configs[self.best.label]

    def table(self) -> Table:
        """Return a table of the best trials, to be printed in the terminal."""
        title = f"Best {min(SHOWN, len(self.trials))} of {count(len(self.drawn), 'trial')}"
        if self.failures:
            title += f", {len(self.failures)} failed"
        mean = "mean of the clients"
        if len(self.runs[self.best.label]) > 1:
            mean += " and seeds"
        caption = (
            f"Ranked by the score on validation data of each run's best round there, {mean}; test "
            "scores were not used."
        )
        table = new_table(title, caption=caption, collapse_padding=True)
        heading = self.score.heading
        keys = [parameter.key for parameter in self.parameters]
        for name in ("trial", *keys):
            table.add_column(name, justify="right", overflow="fold")
        for name in (f"validation {heading}", f"test {heading}", "test, last round"):
            table.add_column(fill(name, 12, break_long_words=False), justify="right", no_wrap=True)
        for row in self.trials[:SHOWN]:
            values = [escape(short(row.values[key])) for key in keys]
            scores = [self.score.digits(score) for score in (row.validation, row.test, row.last)]
            table.add_row(str(row.number), *values, *scores)
        return table

    def save(self) -> None:
        """Write ``best.toml`` and the comparison into the sweep's folder.

        Raises
        ------
        RunError
            If the folder cannot be written.
        """
        result = f"{self.score.label} {self.score.text(self.best.validation)}"
        comment = f"# Trial {self.best.number} of a sweep: {result} on validation data.\n"
        try:
            write_text(self.folder / BEST, f"{comment}{to_toml(self.best_config.as_dict())}")
        except OSError as error:
            raise RunError(
                f"cannot write the sweep to {self.folder}: {error}; make the folder writable, and "
                "continue with --resume"
            ) from error
        self.comparison.save(self.folder, figure=False)

    def save_pictures(self) -> None:
        """Write figures of the comparison, and Optuna's figures of the trials as ``trials.html``.

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
        figures = [visual.plot_slice(self.study, target_name=name)]
        if len(self.parameters) > 1:
            figures.append(visual.plot_parallel_coordinate(self.study, target_name=name))
        # Plotly's script is large: only the first figure includes it.
        html = [
            figure.to_html(full_html=False, include_plotlyjs=i == 0)
            for i, figure in enumerate(figures)
        ]
        page = f'<!doctype html><meta charset="utf-8"><title>Trials</title>{"".join(html)}'
        try:
            write_text(self.folder / PICTURE, page)
        except OSError as error:
            raise RunError(
                f"cannot write the sweep to {self.folder}: {error}; make the folder writable, and "
                "continue with --resume"
            ) from error
        self.comparison.save(self.folder)

    def _average_runs(self, number: int, label: str) -> TrialRow:
        """Return a trial with its mean scores over the runs of all seeds."""
        score = self.score
        chosen: list[Row] = []
        last: list[float] = []
        for run in self.runs[label]:
            row = chosen_round(run.metric_rows, score.metric)
            if row is not None:
                chosen.append(row)
            last_score = _read_last_score(score, run)
            if last_score is not None:
                last.append(last_score)
        return TrialRow(
            number,
            label,
            self.drawn[label],
            validation=fmean(row[column_of(score.name)] for row in chosen),
            test=fmean(row[f"{score.name}_mean"] for row in chosen),
            last=fmean(last) if last else None,
        )


def _read_last_score(score: Score, run: Run) -> float | None:
    """Return a run's mean test score in its last round; None if the run has no such score.

    A run may store the models of an earlier, better round. The score of that round is not returned.
    """
    last = run.summary.get("last", {}).get("test", {})
    return last[score.name] if score.name in last else score.mean(run.summary)


def short(value: Any) -> str:
    """Return a value of a config as a text for tables; floats have four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
