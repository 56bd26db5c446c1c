"""Function that runs a federated algorithm on the clients of a Flower grid.

:func:`federate` is the counterpart of :func:`fedclade.simulate` for a real network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Unpack

from flwr.serverapp import Grid
from torch import nn

from fedclade.algorithms import Algorithm
from fedclade.channel import Middleware, check_local
from fedclade.core import checked
from fedclade.data import DataSchema, read_declared
from fedclade.flower.deployment import NetworkedClients
from fedclade.flower.network import MakeAlgorithm, ModelFor, Network
from fedclade.runs import (
    Callback,
    Callbacks,
    LiveLog,
    Maker,
    OnRound,
    Run,
    RunOptions,
    RunSettings,
    assemble_run,
    settings_from,
)
from fedclade.trackers import PrometheusExporter


@checked("grid")
def federate(
    grid: Grid,
    algorithm: Algorithm | str | MakeAlgorithm,
    model: nn.Module | str | Maker | ModelFor,
    settings: RunSettings | None = None,
    *,
    network: Network | None = None,
    middleware: Sequence[Middleware] = (),
    callbacks: Sequence[Callback] = (),
    on_round: OnRound | None = None,
    config: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    finish: bool = False,
    schema: DataSchema | str | Path | None = None,
    **options: Unpack[RunOptions],
) -> Run:
    """Run a federated algorithm on the clients of a grid.

    The round loop is the same as in :func:`fedclade.simulate`. With a ``folder`` a run survives a
    restart of its server: another call with the same folder continues the run after its last
    checkpoint, with clients that reconnect and with new clients.

    Parameters
    ----------
    grid
        Grid of Flower, with nodes that run :func:`fedclade.flower.client_app`.
    algorithm
        An algorithm, or the name of an algorithm with default settings, or a function that makes
        an algorithm from the true clusters.
    model
        Model in a form that :func:`fedclade.simulate` accepts, or a :class:`ModelFor`. If clients
        share a secret, only the model's structure is used: the clients draw its parameters.
    settings
        Rounds, seed, local training and all other settings, as in a simulation.
    network
        Number of clients to wait for, waiting times, and limits of clients.
    middleware, callbacks, on_round, config, folder, finish
        See :func:`fedclade.simulate`.
    schema
        Columns, categories, labels and words by which all clients encode their tables or texts:
        a :class:`~fedclade.DataSchema`, or the path of a JSON file with a schema. By default the
        first clients agree on a schema, for which they disclose their columns, categories, labels
        and words. The schema is saved in the folder as ``schema.json``.
    **options
        Single fields of :class:`~fedclade.RunSettings`, such as ``rounds=40, seed=1``; they
        override ``settings``.

    Returns
    -------
    Run
        Result of the run, as a simulation returns it. If clients share a secret, the models are
        permuted, so the server cannot use them.

    Raises
    ------
    ConfigError
        If an argument is out of range or a name is unknown.
    ModelError
        If the model cannot be built for the clients' data, or has another structure than the
        clients' model.
    UpdateError
        If too few clients connect in time, or no client replies in a round.
    RunError, CheckpointError
        If the folder contains another run or damaged files, or cannot be written; or the port
        ``network.metrics`` is in use.
    MissingExtraError
        If ``network.metrics`` is set, and prometheus-client is not installed.
    """
    settings = settings_from(settings, options, callbacks)
    network = network or Network()
    check_local(settings.privacy)
    path = None if folder is None else Path(folder)
    with ExitStack() as stack:
        followers = Callbacks(settings.followed_by(callbacks), on_round).joined(LiveLog())
        if network.metrics is not None:
            # Before clients are waited for: a port that is in use should be reported at once.
            exporter = PrometheusExporter(network.metrics, network.metrics_address)
            followers = followers.joined(stack.enter_context(exporter))
        deployment = NetworkedClients.connected_to(
            grid, network, path, read_declared(schema), settings
        )
        assembled = assemble_run(
            deployment,
            algorithm,
            model,
            settings,
            callbacks=followers,
            middleware=middleware,
            config=config,
            folder=path,
            finish=finish,
        )
        finished = assembled.checkpointer.finished()
        return assembled.run() if finished is None else finished
