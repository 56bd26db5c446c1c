"""A run as pictures and pages show it, and what stands beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedclade.report.colours import ClusterColours
from fedclade.report.outcome import Outcome
from fedclade.report.score import Score
from fedclade.runs import Run


@dataclass(frozen=True, eq=False)
class RunView:
    """A run to be shown, finished or as far as it has come."""

    run: Run
    against: Run | None = None
    """A run of the same clients that it is measured by."""
    against_label: str = ""
    newcomers: Mapping[str, Any] | None = None
    """What ``fedclade assign`` wrote of it, as in ``newcomers.json``."""
    folder: Path | None = None
    """Where the run is kept."""

    @cached_property
    def colours(self) -> ClusterColours:
        """The colours of the run's clusters."""
        return ClusterColours(self.run)

    @cached_property
    def outcome(self) -> Outcome:
        """How the run ended for its clients."""
        return Outcome.of(self.run)

    @property
    def rounds(self) -> int:
        """How many rounds there were."""
        return self.run.summary["rounds"]

    @property
    def model_round(self) -> int:
        """The round that the tree and its models are of."""
        return self.run.model_round

    @property
    def score(self) -> Score:
        """What clients are scored by."""
        return self.outcome.score

    @cached_property
    def scores(self) -> dict[int, float]:
        """The last score of each client that has one."""
        return self.score.by_client(self.outcome.rows.values())

    @cached_property
    def before(self) -> tuple[str, dict[int, float]] | None:
        """The name of what clients are compared with, and their scores there: the other run, or else the root's model.

        The root's model is that of the last evaluation in which the root served a client that another node serves now.
        """
        if self.against is not None:
            rows = Outcome.of(self.against).rows
            return self.against_label, self.score.by_client(rows.values())
        last = {client: row["served_by"] for client, row in self.outcome.rows.items() if "served_by" in row}
        rounds = [
            row["round"]
            for row in self.run.client_rows
            if row.get("served_by") == 0 and last.get(row["client"], 0) != 0
        ]
        if not rounds:
            return None
        at = max(rounds)
        rows = [row for row in self.run.client_rows if row["round"] == at and row["served_by"] == 0]
        return f"the root’s model of round {at}", self.score.by_client(rows)
