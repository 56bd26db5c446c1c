"""Flower apps of the server: with settings from Python, or from Flower's run config.

Apps of clients do not import this module, since a process that only answers a request would import
all algorithms, the report, and Flower's server in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fedclade.algorithms import Algorithm, algorithm_class
from fedclade.channel import build_middleware
from fedclade.config import check_config
from fedclade.core import ConfigError, ParameterTree, UntrustedNameError, checked
from fedclade.data import read_declared
from fedclade.flower.federate import federate
from fedclade.flower.from_config import RunConfig, read_network
from fedclade.flower.network import MakeAlgorithm, ModelFor
from fedclade.models import model_factory
from fedclade.report import Terminal, add_figures, count, show_run
from fedclade.runs import Callback, Maker, Row, Run, counting, read_run_config

AT_ONCE = 1e-3
"""Seconds to wait for clients when a run is finished without further training.

A small positive number, since the setting must be greater than 0.
"""

# A Flower ``ServerApp`` that runs a clustered algorithm.

WIDTH = 100  # characters of a printed line: a ServerApp prints to a log, which has no width


@checked()
def server_app(
    algorithm: Algorithm | str | MakeAlgorithm, model: nn.Module | str | Maker, **settings: Any
) -> ServerApp:
    """Make the Flower app that the server runs.

    The app prints one line for each round, and tables of results at the end of the run. With a
    ``folder`` it also writes figures to this folder.

    Parameters
    ----------
    algorithm
        Algorithm or its name, such as ``CFL(eps2=0.8)`` or ``"cfl"``.
    model
        Model in a form that :func:`fedclade.simulate` accepts; must equal the model in
        :func:`fedclade.flower.client_app`.
    **settings
        Settings of :func:`fedclade.flower.federate`; with a ``folder`` the run survives a restart
        of its server.

    Returns
    -------
    ServerApp
        App that continues the run if it is started again with the same folder.
    """
    if isinstance(algorithm, str):
        algorithm_class(algorithm)  # raises an error now, not in the run, if the name is unknown
    if isinstance(model, str):
        model_factory(model)
    settings.setdefault("on_round", print_round)

    def run(grid: Grid, context: Context) -> tuple[Run, Path | None]:
        folder = settings.get("folder")
        run = federate(grid, algorithm, model, **settings)
        return run, None if folder is None else Path(folder)

    return app_of(run)


def app_of(run: Callable[[Grid, Context], tuple[Run, Path | None]]) -> ServerApp:
    """Return a Flower ServerApp that runs a federation and prints its results.

    Parameters
    ----------
    run
        Function that runs the federation on a grid, given Flower's context. It returns the finished
        run, and the run folder or None.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:  # pyright: ignore[reportUnusedFunction]  (Flower calls it)
        show(*run(grid, context))

    return app


def show(run: Run, folder: Path | None = None) -> None:
    """Print the results of a run, and write figures to the run folder if there is a folder."""
    console = Terminal(width=WIDTH, highlight=False)
    if folder is not None:
        add_figures(run, folder, console)
    show_run(run, console)
    if folder is not None:
        console.print(f"run folder: {folder}", soft_wrap=True, markup=False)


def print_round(row: Row, tree: ParameterTree) -> None:
    """Print one line about a finished round.

    The line has the numbers of trained clients and clusters, the score, the adjusted Rand index
    (ARI) if true clusters are known, and the seconds.

    Parameters
    ----------
    row
        Row of the round in the table of rounds.
    tree
        Ignored: callbacks also receive the tree of clusters.
    """
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


def server_app_from_config(callbacks: Sequence[Callback] = ()) -> ServerApp:
    """Make a Flower ServerApp that takes all settings from the run config.

    See :func:`fedclade.flower.client_app_from_config` for the app of the clients.

    Parameters
    ----------
    callbacks
        Callbacks of the run, see :func:`fedclade.simulate`.
    """

    def run(grid: Grid, context: Context) -> tuple[Run, Path]:
        read = RunConfig.read(context.run_config)
        config = read.config
        folder = Path(read.apps.out)
        run = federate(
            grid,
            config.built_algorithm,
            ModelFor(config.built_model, config.model["name"]),
            config.settings,
            network=read.network,
            middleware=build_middleware(config.middleware),
            callbacks=callbacks,
            on_round=print_round,
            config=read.as_dict(),
            folder=folder,
            finish=read.apps.finish,
            schema=read_declared(config.data.get("schema")) if "files" in config.data else None,
        )
        return run, folder

    return app_of(run)


def finish_run(folder: Path) -> Run:
    """Finish an interrupted run in its current state, without clients and further rounds.

    Parameters
    ----------
    folder
        Folder of the run.

    Raises
    ------
    ConfigError
        If the run was not begun by :func:`server_app_from_config`.
    UpdateError
        If the last round was not evaluated yet, since evaluation requires clients.
    RunError, CheckpointError
        If the folder is damaged or contains no checkpoint.
    """
    # Import the local grid here, since it needs internals of Flower that no app needs.
    from fedclade.flower.local_grid import LocalGrid

    noted = read_run_config(folder)
    then = "start its ServerApp again with network.finish = true, or finish=True in Python"
    try:
        sections = {
            key: value for key, value in noted.items() if key not in ("network", "versions")
        }
        config = check_config(sections, on_network=True)
        network, _ = read_network(noted["network"])
    except UntrustedNameError:
        raise
    except ConfigError as error:
        raise ConfigError(
            f"{error}\nthe run cannot be finished from its saved config alone; {then}"
        ) from error
    return federate(
        LocalGrid({}),
        config.built_algorithm,
        ModelFor(config.built_model, config.model["name"]),
        config.settings,
        network=replace(network, wait=AT_ONCE),
        middleware=build_middleware(config.middleware),
        config=config.as_dict(),
        folder=folder,
        finish=True,
    )
