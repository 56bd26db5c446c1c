"""Run a federated algorithm on the clients of a Flower grid: ``simulate`` for a real network."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import torch
from flwr.app import MessageType
from flwr.serverapp import Grid
from torch import Tensor, nn

from fedclade.algorithms import Algorithm, build_algorithm
from fedclade.channel import (
    Channel,
    ExamplePrivacy,
    Limiting,
    MatchingParts,
    Meter,
    Nothing,
    OpposingUpdates,
    Retrying,
    Streaming,
    Timing,
    check_local,
    server_side,
)
from fedclade.core import (
    LARGEST_NORM,
    ConfigError,
    DataSpec,
    Layout,
    UpdateError,
    checked,
    owner_only,
    require,
)
from fedclade.data import DataSchema, StatisticsQuery, read_declared
from fedclade.flower import wire
from fedclade.flower.exchange import Exchange
from fedclade.flower.grid_clients import ConnectedClients, GridClients
from fedclade.flower.newcomers import NewcomerLimit
from fedclade.flower.node_registry import NodeRegistry
from fedclade.flower.registration import Identity
from fedclade.flower.secure.norms import NormsByRound
from fedclade.flower.secure.terms import (
    SecureAggregation,
    SecureRules,
    announcement,
    check_sums,
    with_signs,
)
from fedclade.flower.signing import read_keys
from fedclade.flower.wire import Content
from fedclade.runs import (
    Backend,
    Callback,
    Callbacks,
    Checkpointer,
    History,
    Maker,
    OnRound,
    Run,
    RunOptions,
    RunSettings,
    decide_stream,
    initial_models,
    metric_named,
    model_name,
    run_rounds,
    settings_from,
    target_of,
)
from fedclade.training import default_memory, float32_products, memory_bytes, smallest_batch_for

# Initial models that clients draw from their shared secret, so that the server does not know them.


def drawn_by_clients(clients: GridClients, count: int) -> Tensor:
    """Return the initial models ``[count, S]`` that clients draw from their shared secret.

    All honest clients draw the same models. Each client first sends a digest of its draw. One
    client of the largest group with equal digests is then requested to send the models themselves,
    so a client that draws other models has no influence.

    Raises
    ------
    UpdateError
        If no client sends the models.
    """
    why: dict[int, str] = {}
    contents = dict.fromkeys(
        clients.ids, clients.content("initial", {"models": count, "digest": True})
    )

    def read(client: int, content: Content) -> str:
        return content.get("digest", str)

    drawn = dict(clients.request(contents, MessageType.QUERY, "initial models", read, why))
    votes = Counter(drawn[client] for client in sorted(drawn))
    # Among digests with equally many votes, the one of the client with the lowest number is first.
    for digest, agreeing in votes.most_common():
        for client in sorted(client for client in drawn if drawn[client] == digest):
            try:
                models = _drawn_by(client, clients, count, digest)
            except UpdateError as error:
                why[client] = str(error)
                continue
            if others := sorted(other for other in drawn if drawn[other] != digest):
                _log.warning(
                    "%d of %d clients draw the same initial model, which is taken; clients %s "
                    "draw another: they run another version, or do not tell the truth",
                    *(agreeing, len(drawn), ", ".join(map(str, others))),
                )
            return models
    reasons = "; ".join(f"client {client}: {reason}" for client, reason in sorted(why.items()))
    raise UpdateError(f"no client sent the initial model: {reasons}")


def _drawn_by(client: int, clients: GridClients, count: int, digest: str) -> Tensor:
    """Return the initial models of one client; check that they are finite and have the digest."""
    shape, dtype, names = (
        (clients.layout.size,),
        clients.layout.dtype,
        [str(k) for k in range(count)],
    )
    contents = {client: clients.content("initial", {"models": count, "digest": False})}
    largest = count * clients.layout.size * dtype.itemsize

    def read(client: int, content: Content) -> Tensor:
        content.has_only(names)
        data = [content.vector(name) for name in names]
        if (sent := wire.digest(b"".join(data))) != digest:
            raise UpdateError(f"initial models of digest {sent}, said to be {digest}")
        vectors = zip(names, data, strict=True)
        models = torch.stack(
            [wire.read_vector(each, shape, dtype, f"model {name}") for name, each in vectors]
        )
        if not bool((models.norm(dim=1) <= LARGEST_NORM).all()):  # false for NaN, too
            raise UpdateError(
                f"initial models that are not finite, or of norms above {LARGEST_NORM:g}"
            )
        return models

    why: dict[int, str] = {}
    for _, models in clients.request(
        contents, MessageType.QUERY, "initial models", read, why, largest
    ):
        return models
    raise UpdateError(why[client])


_log = logging.getLogger(__name__)

MakeAlgorithm = Callable[[Mapping[int, int] | None], Algorithm]
"""Function that makes an algorithm from the clients' true clusters, or None if not reported.

The oracle needs the true clusters.
"""


@dataclass(frozen=True)
class ModelFor:
    """Model whose structure depends on the shape of the clients' examples.

    Parameters
    ----------
    make
        Function that makes the model from the data's specification and a seed.
    name
        Name of the model in the run's config.
    """

    make: Callable[[DataSpec, int], nn.Module]
    name: str


@checked()
@dataclass(frozen=True, kw_only=True)
class Network:
    """Settings of the ``[network]`` section: waiting times, admission and limits of clients.

    Parameters
    ----------
    clients
        Number of clients that must be connected before the first round.
    wait
        Seconds to wait for these clients, and later in the run for any client, if all are
        disconnected.
    deadline
        Seconds that a client has to reply; a later reply is too late for its round.
    identity
        Identity of a client that reconnects: the ``node`` id, which is stable if SuperNodes have
        keys, or the ``number`` (partition-id) that the client reports.
    keys
        Path of a file with the number and public key of each client; no other client is admitted.
        If unset, a key belongs to the client that first joins with it.
    newcomers
        Without ``keys``: largest number of newcomers at one time, as a share of the other
        connected clients, but at least two newcomers. A client is a newcomer for its first ten
        rounds, unless it was connected when the first round began. Further newcomers wait.
        Infinity means no limit, and 0 admits no newcomers.
    largest_weight, largest_norm
        Values of these two settings of :class:`~fedclade.Aggregation` over a network, unless they
        are set there.
    secure_aggregation
        Whether the server receives only sums of updates, one for each cluster
        (:mod:`fedclade.flower.secure`).
    secure_fewest
        Smallest number of clients in a sum; smaller clusters keep their model.
    secure_colluders
        Number c of clients of a sum that may collude with the server, which then still learns only
        the sum of the other clients. More than (n + c) / 2 of the n clients must stay connected, or
        the sum is lost.
    secure_neighbours
        Number of other clients to which each client deals shares of its secrets, in sums of more
        than 64 clients; 0 for all.
    secure_norm
        Largest norm of an update that a client may add to a sum, in parameter units; longer
        updates are scaled down. Required with ``secure_aggregation``. In later rounds the limit is
        twice the root mean square of the norms of earlier sums, and never above this value.
    secure_parts
        Number of disjoint sums into which the clients of a cluster are dealt, if the cluster has
        enough clients: 1, or at least 3. A malicious client can turn the mean of its sum to any
        direction; three or more sums are combined by a robust mean, ``aggregate.rule``, or by
        their median.

    Raises
    ------
    ConfigError
        If a value is out of range; one line for each such value.
    """

    clients: int = 2
    wait: float = 300.0
    deadline: float = 600.0
    identity: Identity = "node"
    keys: str | None = None
    newcomers: float = 0.25
    largest_weight: float = 2.0
    largest_norm: float = 20.0
    secure_aggregation: bool = False
    secure_fewest: int = 4
    secure_colluders: int = 1
    secure_neighbours: int = 0
    secure_norm: float | None = None
    secure_parts: int = 1

    def __post_init__(self) -> None:
        require(
            ("network.clients", self.clients, self.clients >= 1, "at least 1"),
            ("network.wait", self.wait, self.wait > 0, "greater than 0"),
            ("network.deadline", self.deadline, self.deadline > 0, "greater than 0"),
            (
                "network.identity",
                self.identity,
                self.identity in ("node", "number"),
                "'node' or 'number'",
            ),
            ("network.newcomers", self.newcomers, self.newcomers >= 0, "at least 0"),
            ("network.largest_weight", self.largest_weight, self.largest_weight >= 1, "at least 1"),
            ("network.largest_norm", self.largest_norm, self.largest_norm >= 1, "at least 1"),
            *self.rules.checks(self.clients if self.secure_aggregation else None),
        )

    @property
    def rules(self) -> SecureRules:
        """Rules of secure aggregation."""
        return SecureRules(
            fewest=self.secure_fewest,
            colluders=self.secure_colluders,
            neighbours=self.secure_neighbours,
            norm=self.secure_norm,
            parts=self.secure_parts,
        )

    @property
    def described(self) -> dict[str, Any]:
        """Settings as saved in a run's config.

        Settings that earlier versions did not have are included only if they are set.
        """
        told = asdict(self)
        if self.newcomers == Network.newcomers:
            del told["newcomers"]
        return {
            name: told[name]
            for name in told
            if self.secure_aggregation or not name.startswith("secure_")
        }


@checked("grid")
def federate(
    grid: Grid,
    algorithm: Algorithm | str | MakeAlgorithm,
    model: nn.Module | str | Maker | ModelFor,
    settings: RunSettings | None = None,
    *,
    network: Network | None = None,
    callbacks: Sequence[Callback] = (),
    on_round: OnRound | None = None,
    config: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    finish: bool = False,
    schema: DataSchema | str | Path | None = None,
    **options: Unpack[RunOptions],
) -> Run:
    """Run a federated algorithm on the clients of a grid.

    The round loop is the one of :func:`fedclade.simulate`. With a ``folder`` the run survives a
    restart of its server: when called again, it continues after the last checkpoint, with clients
    that reconnect and with new clients.

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
        Rounds, seed, local training and all other settings that simulations have, too.
    network
        Number of clients to wait for, waiting times, and limits of clients.
    callbacks, on_round, config, folder, finish
        See :func:`fedclade.simulate`.
    schema
        Columns, categories, labels and words by which all clients encode their tables or texts:
        a :class:`~fedclade.DataSchema`, or the path of a JSON file with one. By default the first
        clients agree on a schema, and disclose their columns, categories, labels and words for
        that. The schema is saved in the folder as ``schema.json``.
    **options
        Single fields of :class:`~fedclade.RunSettings`, such as ``rounds=40, seed=1``; they
        override ``settings``.

    Returns
    -------
    Run
        Result in the form that a simulation returns. If clients share a secret, its models are
        permuted, so the server cannot read them.

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
        If the folder has another run or damaged files, or cannot be written.
    """
    settings = settings_from(settings, options, callbacks)
    network = network or Network()
    check_local(settings.privacy)
    following = Callbacks(settings.followed_by(callbacks), on_round)
    path = None if folder is None else Path(folder)
    exchange = Exchange(grid, meter := Meter(), network.deadline)
    registry = _registry(exchange, network, path, read_declared(schema))
    if settings.permute != bool(registry.secret):
        rule = (
            "false, as no client has a secret"
            if settings.permute
            else "true, as the clients share a secret"
        )
        require(("privacy.permute", settings.permute, False, rule))
    joined = registry.clients
    algorithm = _built(algorithm, joined.true_clusters)
    algorithm.check_clients(len(joined))
    algorithm.check_data(joined.schema)
    if algorithm.simulated:
        raise ConfigError(
            f"{type(algorithm).__name__} runs in a simulation alone, since {algorithm.simulated}"
        )
    settings = settings.completed(algorithm)
    settings.check_algorithm(algorithm, len(joined))
    settings.check_enough(len(joined))
    if network.secure_aggregation:
        settings = with_signs(settings)
        check_sums(settings, algorithm, len(joined), parts=network.secure_parts)
        weighs = settings.task.class_weights == "balanced"
        if disclosed := announcement(settings, algorithm, statistics=registry.scaled or weighs):
            _log.warning(disclosed)
    task = settings.task.of(joined.schema)
    registry.check_task(task.described)
    metric_named(task.metrics, settings.chosen_by, "stop.metric")
    target = target_of(settings, task)
    name, model = _known(model, joined.schema, settings.seed)
    module, initial = initial_models(
        model, joined.schema, settings.seed, algorithm, parts=settings.parts
    )
    layout = settings.parts.layout(module)
    registry.check_layout(wire.layout_digest(layout))
    if layout.dtype == torch.float64:
        _log.warning(
            "the model is in float64, and clients train in it, but updates travel in float32: the "
            "first 7 digits of each entry arrive"
        )
    data = {"name": joined.schema.data, "description": joined.description}
    config = config or settings.as_config(algorithm, task, "auto", data=data, model=name)
    config = {"network": network.described, **config, **settings.stopping_noted}
    if network.secure_aggregation:
        config["signature"] = asdict(settings.signature)
    _check_keeps_best(settings, algorithm, layout)
    every = settings.checkpoint_every

    def fingerprint() -> str:
        """Return the digest that a continued run must have in common with its folder."""
        return _fingerprint(joined.schema, layout)

    checkpointer = Checkpointer(path, config, every, fingerprint, finish=finish)
    if (finished := checkpointer.finished()) is not None:
        return finished
    if not finish:
        # Clients that the folder lists may not have reconnected yet.
        registry.wait(network.clients, network.wait)
    settings, device, _ = checkpointer.resumed(settings, "cpu")
    budget = (
        default_memory(torch.device(device))
        if settings.memory is None
        else memory_bytes(settings.memory)
    )
    is_secure = network.secure_aggregation
    size = len(joined) * layout.size * initial.itemsize
    streams = is_secure or decide_stream(settings, algorithm, size, budget)
    sketch = settings.signature.sketch(settings.seed, layout)
    parted_by = settings.signature.sketch_of_parts(settings.seed, layout)
    of_network = {"largest_weight": network.largest_weight, "largest_norm": network.largest_norm}
    limits = settings.aggregate.limits(untrusted=True, **of_network)
    secure = None
    if network.secure_aggregation and network.secure_norm is not None:
        # The server cannot shorten an update in a sum: its client clips it, to a norm by round.
        weights_alone = replace(limits, largest_norm=math.inf, clip_above=math.inf)
        secure = SecureAggregation(
            network.rules,
            compared=sketch if algorithm.compares and sketch else Nothing(),
            limiting=Limiting(weights_alone, layout.n_parameters, lambda: joined.sizes),
            norms=NormsByRound(network.secure_norm, path),
            rule=settings.aggregate,
            withholds_losses=settings.privacy is not None,
        )
    grid_clients = GridClients(exchange, registry, layout, task, parted_by, network.wait, secure)
    labels = (joined.schema.labels or 0) if task.balanced else 0
    if registry.statistics is None and (registry.scaled or labels):
        query = StatisticsQuery(registry.connected, registry.scaled, labels, limits.largest_weight)
        registry.statistics = grid_clients.ask(query)
    if registry.statistics is not None and labels:
        task = settings.task.of(joined.schema, registry.statistics.labels)
    joined.columns = registry.columns
    by_example = isinstance(settings.privacy, ExamplePrivacy)
    retrying = Retrying(
        tells_releases=settings.privacy is not None, sizes=joined.sizes if by_example else None
    )
    # An algorithm that compares updates has a sketch.
    compared = Nothing() if streams and sketch is None else sketch
    limiting = Limiting.within(limits, layout.n_parameters, lambda: joined.sizes)
    streaming = Streaming() if streams else None
    opposed = settings.aggregate.looks_for_opposed(
        untrusted=True, clients_choose=algorithm.clients_choose
    )
    arrival = server_side(
        retrying,
        compared,
        streaming,
        limiting,
        settings.aggregate,
        matching=MatchingParts(parted_by),
        opposing=OpposingUpdates(settings.aggregate.byzantine) if opposed and not streams else None,
    )
    # Middleware on single updates needs updates that the server can see.
    middleware = [Timing(meter), *([retrying] if is_secure else arrival)]
    if registry.secret and not finish:
        # The server knows models drawn from its own seed, so those would be no secret.
        drawn = drawn_by_clients(grid_clients, algorithm.initial_models)
        initial = drawn[0] if algorithm.initial_models == 1 else drawn
    clients = ConnectedClients(Channel(grid_clients, *middleware), registry, path, network.wait)
    of_run = (
        meter,
        retrying,
        None,
        sketch,
        streams,
        device,
        budget,
        task,
        None,
        settings.parts.common_entries(module),
    )
    smallest = 1 if by_example else smallest_batch_for(module, layout.full, joined.schema)
    backend = Backend(clients, initial, grid_clients, *of_run, smallest_batch=smallest)
    history = History(
        joined, task, target, least=settings.min_cluster_size, chosen_by=settings.chosen_by
    )
    # Models reveal something about the clients' data, and the machine may have other users, so
    # files are readable by their owner only.
    with checkpointer, owner_only(), float32_products(False):
        return run_rounds(algorithm, backend, clients, checkpointer, history, settings, following)


def _registry(
    exchange: Exchange, network: Network, folder: Path | None, declared: DataSchema | None
) -> NodeRegistry:
    """Return the registry of the run's clients: from its folder, or of the first to connect."""
    keys = None if network.keys is None else read_keys(Path(network.keys))
    registry = NodeRegistry(
        exchange, network.identity, keys, declared, NewcomerLimit(network.newcomers)
    )
    if folder is not None:
        registry.load(folder)
    if not registry.settled:
        registry.wait(network.clients, network.wait)
    return registry


def _check_keeps_best(settings: RunSettings, algorithm: Algorithm, layout: Layout) -> None:
    """Check that the server has all models of a round, if the run should keep its best round.

    Raises
    ------
    ConfigError
        If clients store some of the models, or parts of them.
    """
    if not settings.keep_best:
        return
    name = type(algorithm).__name__
    if layout.personal:
        what = f"a part of their model (model.personal = {settings.personal!r})"
    elif type(algorithm).keepers is not Algorithm.keepers and getattr(
        algorithm, "personalize", True
    ):
        what = f"models of their own with {name}"
    elif algorithm.mixture(None) is not None:
        what = f"the weights of their mixture with {name}"
    else:
        return
    raise ConfigError(
        f"keep_best = true: over a network clients keep {what}, and keep it as it is after their "
        "last round; the server cannot bring that of an earlier round back. Leave keep_best out, "
        "or run a simulation"
    )


def _built(
    algorithm: Algorithm | str | MakeAlgorithm, truth: Mapping[int, int] | None
) -> Algorithm:
    if isinstance(algorithm, Algorithm):
        return algorithm
    return (
        build_algorithm(algorithm, true_clusters=truth)
        if isinstance(algorithm, str)
        else algorithm(truth)
    )


def _known(
    model: nn.Module | str | Maker | ModelFor, schema: DataSpec, seed: int
) -> tuple[str, nn.Module | str | Maker]:
    """Return a model's name, and the model in a form that a simulation takes."""
    if isinstance(model, ModelFor):
        make = model.make
        return model.name, lambda seed: make(schema, seed)
    return model_name(model, seed), model


def _fingerprint(schema: DataSpec, layout: Layout) -> str:
    """Return a digest of the data schema and the model layout of a run."""
    return wire.digest(json.dumps([asdict(schema), wire.layout_digest(layout)]).encode())
