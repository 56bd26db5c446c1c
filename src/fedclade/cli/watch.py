"""Who looks on while a run goes on: a dashboard, event files."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedclade.cli.dashboard import PORT, Dashboard
from fedclade.core import ParameterTree
from fedclade.report import TensorBoardLog
from fedclade.runs import (
    Follow,
    OnRound,
    Row,
    Run,
)


class LogKind(StrEnum):
    """What rounds can be logged to."""

    TENSORBOARD = "tensorboard"


DashboardOption = Annotated[
    bool, typer.Option("--dashboard", help="Serve the report of the run while it goes on, to this machine alone.")
]
PortOption = Annotated[int, typer.Option("--port", min=0, max=65535, help="Of the dashboard; 0 for any free one.")]
LogOption = Annotated[
    LogKind | None, typer.Option("--log", help="Write every round as event files into RUN/tensorboard.")
]


@dataclass(frozen=True)
class Watching:
    """Who is to look on.

    Parameters
    ----------
    dashboard
        Whether to serve one.
    port
        Where.
    log
        What to log to.
    """

    dashboard: bool = False
    port: int = PORT
    log: LogKind | None = None

    @contextmanager
    def begun(self, name: str, rounds: int, folder: Path, console: Console) -> Generator[Onlookers]:
        """Let them look on while the block runs."""
        with ExitStack() as stack:
            log = None if self.log is None else TensorBoardLog(folder)
            if log is not None:
                stack.callback(log.close)
            dashboard = None
            if self.dashboard:
                dashboard = stack.enter_context(Dashboard(name, rounds, folder, self.port))
                console.print(f"dashboard: {dashboard.url}", soft_wrap=True)
            yield Onlookers(dashboard, log)


@dataclass(frozen=True)
class Onlookers:
    """Those who look on."""

    dashboard: Dashboard | None
    log: TensorBoardLog | None

    def with_log(self, on_round: OnRound) -> OnRound:
        """Return what to call after every round: what is given, and the log."""
        if (log := self.log) is None:
            return on_round

        def both(row: Row, tree: ParameterTree) -> None:
            on_round(row, tree)
            log(row, tree)

        return both

    @property
    def follow(self) -> Follow | None:
        """What is to be told how far the run has come."""
        if (dashboard := self.dashboard) is None:
            return None

        def follow(so_far: Callable[[], Run]) -> None:
            dashboard.show(so_far())

        return follow

    def finished(self, run: Run) -> None:
        """Tell them how the run ended."""
        if self.dashboard is not None:
            self.dashboard.show(run, over=True)
