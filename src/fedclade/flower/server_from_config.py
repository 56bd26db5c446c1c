"""Flower apps of the server: with settings from Python, or from Flower's run config.

Apps of clients do not import this module, since a process that only answers a request would import
all algorithms, the report, and Flower's server in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fedclade.algorithms import Algorithm, algorithm_class
from fedclade.channel import build_middleware
from fedclade.config import check_config
from fedclade.core import ConfigError, UntrustedNameError, checked
from fedclade.data import read_declared
from fedclade.flower.federate import federate
from fedclade.flower.from_config import RunConfig, read_network
from fedclade.flower.network import LogFormat, MakeAlgorithm, ModelFor, Network
from fedclade.flower.server_log import log_round, print_round, server_log, show_end
from fedclade.models import model_factory
from fedclade.runs import Callback, Maker, OnRound, Run, read_run_config

AT_ONCE = 1e-3
"""Seconds to wait for clients when a run is finished without further training.

A small positive number, since the setting must be greater than 0.
"""

ON_ROUND: Mapping[LogFormat, OnRound] = {"text": print_round, "json": log_round}
"""Function that reports a finished round, by the format of the log."""


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
    log = (settings.get("network") or Network()).log
    settings.setdefault("on_round", ON_ROUND[log])

    def run(grid: Grid, context: Context) -> None:
        folder = settings.get("folder")
        with server_log(log):
            finished = federate(grid, algorithm, model, **settings)
            show_end(finished, None if folder is None else Path(folder), log)

    return app_of(run)


def app_of(run: Callable[[Grid, Context], object]) -> ServerApp:
    """Return a Flower ServerApp that runs a federation.

    Parameters
    ----------
    run
        Function that runs the federation on a grid, given Flower's context, and shows its results.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:  # pyright: ignore[reportUnusedFunction]  (Flower calls it)
        run(grid, context)

    return app


def server_app_from_config(callbacks: Sequence[Callback] = ()) -> ServerApp:
    """Make a Flower ServerApp that takes all settings from the run config.

    See :func:`fedclade.flower.client_app_from_config` for the app of the clients.

    Parameters
    ----------
    callbacks
        Callbacks of the run, see :func:`fedclade.simulate`.
    """

    def run(grid: Grid, context: Context) -> None:
        read = RunConfig.read(context.run_config)
        log = read.network.log
        with server_log(log):
            finished = start(grid, read)
            show_end(finished, Path(read.apps.out), log)

    def start(grid: Grid, read: RunConfig) -> Run:
        config = read.config
        return federate(
            grid,
            config.built_algorithm,
            ModelFor(config.built_model, config.model["name"]),
            config.settings,
            network=read.network,
            middleware=build_middleware(config.middleware),
            callbacks=callbacks,
            on_round=ON_ROUND[read.network.log],
            config=read.as_dict(),
            folder=Path(read.apps.out),
            finish=read.apps.finish,
            schema=read_declared(config.data.get("schema")) if "files" in config.data else None,
        )

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
