"""A Flower ``ServerApp`` that runs a clustered algorithm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fedclade.algorithms import Algorithm, algorithm_class
from fedclade.core import ParameterTree, checked
from fedclade.flower.federate import MakeAlgorithm, federate
from fedclade.models import model_factory
from fedclade.report import Terminal, add_figures, count, show_run
from fedclade.runs import Maker, Row, Run, counting

WIDTH = 100  # of the tables: the output of a ServerApp is a log, which has no width


@checked()
def server_app(
    algorithm: Algorithm | str | MakeAlgorithm, model: nn.Module | str | Maker, **settings: Any
) -> ServerApp:
    """Make the app that the server runs; it prints a line a round, and ends with the tables and figures of a run.

    Parameters
    ----------
    algorithm
        Such as ``CFL(eps2=0.8)`` or ``"cfl"``.
    model
        As :func:`fedclade.simulate` takes it, and the same as in :func:`fedclade.flower.client_app`.
    **settings
        Of :func:`fedclade.flower.federate`; name a ``folder`` for a run that outlives its server.

    Returns
    -------
    ServerApp
        Started again with the same folder, it goes on where it stood.
    """
    if isinstance(algorithm, str):
        algorithm_class(algorithm)  # which names the nearest one if there is none of this name
    if isinstance(model, str):
        model_factory(model)
    settings.setdefault("on_round", print_round)

    def run(grid: Grid, context: Context) -> tuple[Run, Path | None]:
        folder = settings.get("folder")
        run = federate(grid, algorithm, model, **settings)
        return run, None if folder is None else Path(folder)

    return app_of(run)


def app_of(run: Callable[[Grid, Context], tuple[Run, Path | None]]) -> ServerApp:
    """Return a ServerApp around a function that runs a federation; it returns the run and its folder."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:  # pyright: ignore[reportUnusedFunction]  (Flower calls it)
        show(*run(grid, context))

    return app


def show(run: Run, folder: Path | None = None) -> None:
    """Print the results of a run, and draw its figures in its folder."""
    console = Terminal(width=WIDTH, highlight=False)
    if folder is not None:
        add_figures(run, folder, console)
    show_run(run, console)
    if folder is not None:
        console.print(f"run folder: {folder}", soft_wrap=True, markup=False)


def print_round(row: Row, tree: ParameterTree) -> None:
    """Print a line about a round."""
    (metric, score), ari = counting(row), row["ari"]
    parts = [
        f"round {row['round']}",
        f"{count(row['clients_trained'], 'client')} trained",
        count(row["clusters"], "cluster"),
        *([] if score is None else [f"{metric} {score:.3f}"]),
        *([] if ari is None else [f"ARI {ari:.2f}"]),
        f"{row['seconds']:.1f} s",
    ]
    print(", ".join(parts), flush=True)
