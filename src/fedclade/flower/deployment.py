"""Adapter by which a run trains on the clients of a Flower grid.

:class:`NetworkedClients` connects clients, checks that the run is possible with them, and builds
the server's side of the exchange with them.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import MessageType
from flwr.serverapp import Grid
from torch import Tensor, nn

from fedclade.algorithms import Algorithm, build_algorithm
from fedclade.channel import (
    Channel,
    ExamplePrivacy,
    Limiting,
    Meter,
    NoSketch,
    Retrying,
    StepCounting,
    Streaming,
    Timing,
)
from fedclade.core import (
    LARGEST_NORM,
    ClientRegistry,
    ConfigError,
    DataSpec,
    FedcladeError,
    Layout,
    UpdateError,
    memory_bytes,
    owner_only,
    require,
)
from fedclade.data import DataSchema, StatisticsQuery
from fedclade.flower import wire
from fedclade.flower.exchange import Exchange
from fedclade.flower.grid_clients import ConnectedClients, GridClients, StreamSwitch
from fedclade.flower.network import MakeAlgorithm, ModelFor, Network
from fedclade.flower.network_gains import measure_network_gains
from fedclade.flower.newcomers import NewcomerLimit
from fedclade.flower.node_registry import NodeRegistry
from fedclade.flower.secure.norms import NormsByRound
from fedclade.flower.secure.terms import SecureAggregation, announcement, check_sums, with_signs
from fedclade.flower.signing import read_keys
from fedclade.flower.wire import Content
from fedclade.runs import (
    SHARE_OF_UPDATES,
    AssembledRun,
    Backend,
    Connected,
    Deployment,
    Maker,
    Run,
    RunSettings,
    ServerEnd,
    StreamChoice,
    choose_network_stream,
    clip_by_default,
    initial_models,
    model_name,
    store_gains,
)
from fedclade.tasks import FittedTask
from fedclade.training import default_memory, smallest_batch_for

_log = logging.getLogger(__name__)

# Initial models that clients draw from their shared secret. The server does not know these models.


def drawn_by_clients(clients: GridClients, count: int) -> Tensor:
    """Return the initial models that clients draw from their shared secret.

    The server does not know the secret, so it does not know the models before their permutation.
    All honest clients draw the same models. Each client first sends a digest of its models. Then
    one client of the largest group with equal digests is requested to send the models themselves,
    so a client that draws other models has no influence.

    Parameters
    ----------
    clients
        Clients of the run.
    count
        Number of initial models.

    Returns
    -------
    Tensor
        Models ``[count, S]``, each with S entries in permuted order.

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
                    "%d of %d clients draw the same initial models, which the run uses; clients %s "
                    "draw other models: they have another version of fedclade or are malicious",
                    *(agreeing, len(drawn), ", ".join(map(str, others))),
                )
            return models
    reasons = "; ".join(f"client {client}: {reason}" for client, reason in sorted(why.items()))
    raise UpdateError(
        f"the run cannot start, since no client has sent the initial models: {reasons}; remove "
        "these causes, and start the run again"
    )


def _drawn_by(client: int, clients: GridClients, count: int, digest: str) -> Tensor:
    """Request the initial models from one client, and return them as ``[count, S]``.

    Raises
    ------
    UpdateError
        If the client does not reply, or if its models do not have the given digest or have entries
        that are too large or not finite.
    """
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
            raise UpdateError(
                "the client has sent other initial models than those that it had announced (digest "
                f"{sent}, announced {digest}); all clients should build the same model"
            )
        vectors = zip(names, data, strict=True)
        models = torch.stack(
            [wire.read_vector(each, shape, dtype, f"model {name}") for name, each in vectors]
        )
        if not bool((models.norm(dim=1) <= LARGEST_NORM).all()):  # false for NaN, too
            raise UpdateError(
                f"the initial models are not finite, or have norms above {LARGEST_NORM:g}; "
                "initialise the model of all clients with smaller, finite numbers"
            )
        return models

    why: dict[int, str] = {}
    for _, models in clients.request(
        contents, MessageType.QUERY, "initial models", read, why, largest
    ):
        return models
    raise UpdateError(why[client])


@dataclass(eq=False)
class NetworkedClients(Deployment):
    """Deployment of a run on the clients of a Flower grid.

    Parameters
    ----------
    exchange
        Sender of requests to nodes and receiver of their replies.
    meter
        Counter of the bytes of messages and of the seconds that clients take.
    registry
        Registry of the run's clients and their nodes.
    network
        Settings for waiting times, admission and limits of clients.
    folder
        Folder of the run; None if the run has no folder.
    """

    exchange: Exchange
    meter: Meter
    registry: NodeRegistry
    network: Network
    folder: Path | None
    _module: nn.Module = field(init=False)
    _initial: Tensor = field(init=False)
    _layout: Layout = field(init=False)
    _name: str = field(init=False)
    _warnings: tuple[str, ...] = ()

    @classmethod
    def connected_to(
        cls,
        grid: Grid,
        network: Network,
        folder: Path | None,
        declared: DataSchema | None,
        settings: RunSettings,
    ) -> NetworkedClients:
        """Return a deployment on the clients of a grid, once enough clients are connected.

        Parameters
        ----------
        grid
            Grid of Flower.
        network
            Settings of the network, such as the number of clients to wait for.
        folder
            Folder of the run, with a list of the clients of a run that is continued; None if the
            run has no folder.
        declared
            Schema by which clients encode their data; None if the clients should agree on a schema.
        settings
            Settings of the run.

        Raises
        ------
        ConfigError
            If models should be permuted and clients share no secret, or the reverse.
        UpdateError
            If too few clients connect in time.
        """
        meter = Meter()
        exchange = Exchange(grid, meter, network.deadline)
        registry = _registry(exchange, network, folder, declared)
        if settings.permute != bool(registry.secret):
            rule = (
                "false, since the clients share no secret (secret-file in their node configs)"
                if settings.permute
                else "true, since the clients share a secret (secret-file in their node configs)"
            )
            require(("privacy.permute", settings.permute, False, rule))
        return cls(exchange, meter, registry, network, folder)

    @property
    def roster(self) -> ClientRegistry:
        """Names, sizes and data shapes of all clients that ever joined, for the run's history."""
        return self.registry.clients

    @property
    def spec(self) -> DataSpec:
        """Specification of the clients' data: shapes of inputs and outputs, and the task."""
        return self.roster.schema

    @property
    def data_schema(self) -> DataSchema | None:
        """Schema that the clients agreed on; None if their data has no named columns or texts."""
        return self.registry.agreed

    @property
    def warnings(self) -> Sequence[str]:
        """Warnings about the clients' encodings."""
        return self._warnings

    @property
    def size(self) -> int:
        """Number of clients that have joined the run so far."""
        return len(self.roster)

    def build_algorithm(self, algorithm: Algorithm | str | MakeAlgorithm) -> Algorithm:
        """Return the algorithm, given itself, its name, or a function that makes it.

        The function receives the true clusters of the clients.
        """
        truth = self.roster.true_clusters
        if isinstance(algorithm, Algorithm):
            return algorithm
        if isinstance(algorithm, str):
            return build_algorithm(algorithm, true_clusters=truth)
        return algorithm(truth)

    def prepare(
        self, settings: RunSettings, algorithm: Algorithm, model: nn.Module | str | Maker | ModelFor
    ) -> tuple[RunSettings, FittedTask]:
        """Check that the run is possible with the clients of the network.

        The checks compare the algorithm, the task, the structure of the model and secure
        aggregation with the clients' registrations.

        Returns
        -------
        tuple[RunSettings, FittedTask]
            The settings, with sketches replaced by signs under secure aggregation; and the task,
            fitted to the clients' data.

        Raises
        ------
        ConfigError
            If the algorithm, a setting or the task is not possible.
        ModelError
            If the server's model differs in structure from the clients' model.
        """
        requires = algorithm.requires
        if requires.simulation:
            raise ConfigError(
                f"{type(algorithm).__name__} runs only in a simulation, since "
                f"{requires.simulation}; choose another algorithm, or run a simulation"
            )
        network = self.network
        registry = self.registry
        if network.secure_aggregation:
            settings = with_signs(settings)
            check_sums(settings, algorithm, self.size, parts=network.secure_parts)
            weighs = settings.task.class_weights == "balanced"
            is_summed = registry.scaled or registry.scaled_targets > 0 or weighs
            if disclosed := announcement(settings, algorithm, statistics=is_summed):
                _log.warning(disclosed)
        task = settings.task.of(self.spec)
        registry.check_task(task.described)
        self._make_models(settings, algorithm, model)
        self._warnings = warn_of_encodings(algorithm, registry.encodings)
        _check_keeps_best(settings, algorithm, self._layout)
        return settings, task

    def _make_models(
        self, settings: RunSettings, algorithm: Algorithm, model: nn.Module | str | Maker | ModelFor
    ) -> None:
        """Make the initial models, and check that the clients' model has the same structure."""
        self._name, maker = _name_model(model, self.spec, settings.seed)
        self._module, self._initial = initial_models(
            maker, self.spec, settings.seed, algorithm, parts=settings.parts
        )
        self._layout = settings.parts.layout(self._module)
        self.registry.check_layout(wire.layout_digest(self._layout))
        if self._layout.dtype == torch.float64:
            _log.warning(
                "the model has type float64, in which clients train, but updates are sent in "
                "float32, so only about 7 significant digits of each entry reach the server"
            )

    def describe(
        self, settings: RunSettings, algorithm: Algorithm, task: FittedTask, model: Any
    ) -> dict[str, Any]:
        """Return a config that describes a run whose caller did not pass a config."""
        data = {"name": self.roster.schema.data, "description": self.roster.description}
        return settings.as_config(algorithm, task, "auto", data=data, model=self._name)

    def complete_config(self, config: dict[str, Any], settings: RunSettings) -> dict[str, Any]:
        """Return a run's config with the network settings added.

        The section ``signature`` states how the server compares updates. Under secure aggregation
        it is replaced by the settings in use, since the server can then compare only signs.
        """
        config = {"network": self.network.described, **config}
        if self.network.secure_aggregation:
            config["signature"] = asdict(settings.signature)
        return config

    def fingerprint(self) -> str:
        """Return a digest of the data's specification and the model's layout.

        A checkpoint can be continued only with the same fingerprint.
        """
        described = [asdict(self.spec), wire.layout_digest(self._layout)]
        return wire.digest(json.dumps(described).encode())

    def wait(self, *, finish: bool) -> None:
        """Wait until enough clients are connected for the next round.

        When a run is continued, the clients that its folder lists may not have reconnected yet. If
        ``finish`` is True, the run ends without further rounds, so there is no wait.
        """
        if not finish:
            self.registry.wait(self.network.clients, self.network.wait)

    def connect(
        self, assembled: AssembledRun, settings: RunSettings, device: str, engine: str | None
    ) -> Connected:
        """Build the server's side of the exchange; return the clients, ready for the next round.

        Parameters
        ----------
        assembled
            The checked run.
        settings
            Settings of the run.
        device
            Device of the server's tensors.
        engine
            Ignored, since each client chooses its own engine.
        """
        algorithm = assembled.algorithm
        network = self.network
        joined = self.roster
        layout = self._layout
        budget = (
            default_memory(torch.device(device))
            if settings.memory is None
            else memory_bytes(settings.memory)
        )
        streams = StreamChoice(True)
        if not network.secure_aggregation:
            streams = choose_network_stream(
                settings,
                algorithm,
                joined=len(joined),
                bytes_each=layout.size * self._initial.itemsize,
                budget=budget,
                may_change=assembled.settings.stream == "auto",
            )
        limits = settings.aggregate.limits(
            untrusted=True, largest_weight=network.largest_weight, largest_norm=network.largest_norm
        )
        by_example = isinstance(settings.privacy, ExamplePrivacy)
        server = ServerEnd.assemble(
            settings,
            algorithm,
            layout,
            lambda: joined.sizes,
            retrying=Retrying(
                tells_releases=settings.privacy is not None,
                sizes=joined.sizes if by_example else None,
            ),
            streaming=Streaming() if streams.active else None,
            limits=limits,
            untrusted=True,
            names=lambda: joined.names,
        )
        grid_clients = GridClients(
            self.exchange,
            self.registry,
            layout,
            assembled.task,
            server.sketch_of_parts,
            network.wait,
            self._secure_aggregation(settings, algorithm, server),
            download=network.download,
            stream_buffer=memory_bytes(network.stream_buffer),
            largest_in_memory=budget // SHARE_OF_UPDATES,
        )
        task = self._fit_task(settings, assembled.task, grid_clients, limits.largest_weight)
        if self.registry.target_scale is not None:
            settings = replace(settings, local=clip_by_default(settings.local, algorithm))
        joined.columns = self.registry.columns
        counting = StepCounting(self.meter, lambda _: grid_clients.sizes)

        def build_channel(server: ServerEnd) -> Channel:
            # Middleware that changes single updates needs updates that arrive unmasked.
            seen = [server.retrying] if network.secure_aggregation else server.middleware
            return Channel(grid_clients, Timing(self.meter), counting, *seen, *assembled.middleware)

        initial = self._initial
        if self.registry.secret and not assembled.finish:
            # The server knows models that are drawn from its own seed. Clients with a shared secret
            # must therefore draw the initial models themselves.
            count = algorithm.requires.initial_models
            drawn = drawn_by_clients(grid_clients, count)
            initial = drawn[0] if count == 1 else drawn
        clients = ConnectedClients(
            build_channel(server),
            self.registry,
            self.folder,
            network.wait,
            switch=StreamSwitch(streams, lambda: build_channel(server.streaming_from_now())),
        )
        backend = Backend(
            clients=clients,
            initial=initial,
            workers=grid_clients,
            meter=self.meter,
            counting=counting,
            retrying=server.retrying,
            permutation=None,
            sketch=server.sketch,
            streams=streams,
            device=device,
            memory=budget,
            task=task,
            common=settings.parts.common_entries(self._module),
            smallest_batch=1
            if by_example
            else smallest_batch_for(self._module, layout.full, joined.schema),
        )
        return Connected(backend, clients, task, settings)

    def _secure_aggregation(
        self, settings: RunSettings, algorithm: Algorithm, server: ServerEnd
    ) -> SecureAggregation | None:
        """Return the secure aggregation of the run; None if the run does not use it."""
        network = self.network
        if not network.secure_aggregation or network.secure_norm is None:
            return None
        joined = self.roster
        # The server cannot scale down an update that is part of a sum. Each client clips its own
        # update to a norm that depends on the round, so the server's norm limits are switched off.
        weights_alone = replace(server.limits, largest_norm=math.inf, clip_above=math.inf)
        compares = algorithm.requires.signatures and server.sketch is not None
        return SecureAggregation(
            network.rules,
            compared=server.sketch if compares and server.sketch else NoSketch(),
            limiting=Limiting(weights_alone, self._layout.n_parameters, lambda: joined.sizes),
            norms=NormsByRound(network.secure_norm, self.folder),
            rule=settings.aggregate,
            withholds_losses=settings.privacy is not None,
        )

    def _fit_task(
        self, settings: RunSettings, task: FittedTask, clients: GridClients, largest_weight: float
    ) -> FittedTask:
        """Return the run's task, fitted to the clients' statistics if the task depends on them.

        The statistics are requested from the clients once per run: means and squared deviations for
        scaling, and label counts for balanced class weights.
        """
        registry = self.registry
        labels = (self.spec.labels or 0) if task.balanced else 0
        if registry.statistics is None and (registry.scaled or registry.scaled_targets or labels):
            query = StatisticsQuery(
                registry.connected,
                registry.scaled,
                labels,
                largest_weight,
                targets=registry.scaled_targets,
            )
            registry.statistics = clients.ask(query)
        if registry.statistics is None:
            return task
        counts = registry.statistics.labels if labels else None
        return settings.task.of(self.spec, counts, registry.target_scale)

    def execution(self) -> AbstractContextManager[object]:
        """Return a context in which files are readable by their owner only.

        Models reveal something about the clients' data, and the machine may have other users.
        """
        return owner_only()

    def complete_run(self, assembled: AssembledRun, connected: Connected, run: Run) -> Run:
        """Return the finished run with the gains of its clients, if the clients may report them.

        A client's gain is how much better its model is than simpler models on its own test data.
        Clients with differential privacy or secure aggregation do not report gains.
        """
        is_private = connected.settings.privacy is not None
        if assembled.finish or self.network.secure_aggregation or is_private:
            return run
        try:
            gains = measure_network_gains(
                run, connected.clients, self.registry.connected, connected.task
            )
        except FedcladeError as error:  # the results of the run are complete without gains
            _log.warning("the gains of clients could not be measured: %s", error)
            return run
        return store_gains(run, gains, self.folder)


def warn_of_encodings(algorithm: Algorithm, encodings: Mapping[str, int]) -> tuple[str, ...]:
    """Log a warning if an algorithm compares clients by updates of which a part is missing.

    Parameters
    ----------
    algorithm
        Algorithm of the run.
    encodings
        Number of clients by the encoding of their updates.

    Returns
    -------
    tuple[str, ...]
        The warning; empty if there is none.
    """
    sparse = encodings.get("topk", 0)
    if not sparse or not algorithm.requires.signatures:
        return ()
    warning = (
        f"{sparse} of {sum(encodings.values())} clients send updates as topk, a twentieth of the "
        f"entries, but {type(algorithm).__name__} compares clients by their updates, so it can find "
        "wrong clusters or none; set network.encoding = 'int8' (encoding='int8' in client_app), or "
        "choose a method that does not compare updates, such as ifca"
    )
    _log.warning(warning)
    return (warning,)


def _registry(
    exchange: Exchange, network: Network, folder: Path | None, declared: DataSchema | None
) -> NodeRegistry:
    """Return the registry of the run's clients and their nodes.

    The clients are read from the run's folder if the run is continued; else the registry waits for
    the first clients to connect.
    """
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
    """Check that the server can restore the models of the best round, if ``keep_best`` is set.

    Raises
    ------
    ConfigError
        If clients store some of the models or parts of models, which the server cannot restore.
    """
    if not settings.keep_best:
        return
    name = type(algorithm).__name__
    if layout.personal:
        what = f"a part of their model (model.personal = {settings.personal!r})"
    elif algorithm.requires.own_models:
        what = f"models of their own with {name}"
    elif algorithm.requires.mixture is not None:
        what = f"the weights of their mixture with {name}"
    else:
        return
    raise ConfigError(
        f"keep_best = true is not possible: over a network clients store {what}, of which only the "
        "state after the last round exists, so the server cannot restore the best round; leave "
        "keep_best out, or run a simulation"
    )


def _name_model(
    model: nn.Module | str | Maker | ModelFor, schema: DataSpec, seed: int
) -> tuple[str, nn.Module | str | Maker]:
    """Return the name of a model for the run's config, and the model in a form for simulations.

    A :class:`~fedclade.flower.network.ModelFor` is converted to a function that makes the model for
    the clients' data from a seed.
    """
    if isinstance(model, ModelFor):
        make = model.make
        return model.name, lambda seed: make(schema, seed)
    return model_name(model, seed), model
