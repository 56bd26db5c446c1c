"""Adapter by which a run trains on the nodes of a grid that run a plain ClientApp."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, MessageType, RecordDict
from torch import Tensor

from fedclade.algorithms import Algorithm, build_algorithm, describe
from fedclade.channel import Channel, Meter, Replicating, Retrying, StepCounting, Streaming, Timing
from fedclade.core import (
    ClientRegistry,
    ConfigError,
    DataSpec,
    SplitPart,
    UpdateError,
    memory_bytes,
    owner_only,
)
from fedclade.flower.grid_clients import StreamSwitch
from fedclade.flower.strategy.app_clients import (
    AppClients,
    AppMembers,
    MessageFormat,
    read_metrics,
    read_size,
)
from fedclade.flower.strategy.app_exchange import AppExchange, AppRequest, only_record
from fedclade.flower.strategy.app_nodes import AppNodes
from fedclade.flower.strategy.app_queries import PLAIN, Rehearsal, rehearse
from fedclade.flower.strategy.array_model import ArrayModel
from fedclade.flower.strategy.parts import PartSent
from fedclade.flower.strategy.score_keys import ScoreKeys
from fedclade.runs import (
    SHARE_OF_UPDATES,
    AssembledRun,
    Backend,
    Connected,
    Deployment,
    RunSettings,
    ServerEnd,
    choose_network_stream,
)
from fedclade.tasks import FittedTask
from fedclade.training import default_memory

PROBED = 3
"""Number of nodes that evaluate the initial model before round 1, to learn the metrics' names."""

FindKeys = Callable[[Mapping[str, Any]], ScoreKeys]
"""Function that finds the score and the loss among a client's metrics."""

MakeModels = Callable[[int], ArrayRecord]
"""Function that makes a further initial model from its number, from 1."""


class AppMeter(Meter):
    """Counter that states no training steps: a plain ClientApp takes as many as it likes."""

    def readings(self) -> dict[str, float]:
        """Return the current counts, without those of steps."""
        counts = super().readings()
        del counts["steps"], counts["cohort_steps"]
        return counts


@dataclass(frozen=True, kw_only=True)
class AppOptions:
    """Algorithm and further arguments of a strategy that a deployment needs.

    Parameters
    ----------
    options
        Hyper-parameters of an algorithm that is given by its name.
    buffers
        Patterns over the names of arrays that are running statistics.
    initial_models
        Function that makes further initial models; None to redraw the first one.
    find_keys
        Function that finds the score and the loss among a client's metrics.
    evaluates
        Whether clients are evaluated after rounds.
    """

    options: Mapping[str, Any]
    buffers: Sequence[str]
    initial_models: MakeModels | None
    find_keys: FindKeys
    evaluates: bool


@dataclass(eq=False)
class AppDeployment(Deployment):
    """Deployment of a run on nodes with a plain ClientApp.

    Parameters
    ----------
    exchange
        Sender of requests to nodes and receiver of their replies.
    meter
        Counter of the bytes of messages and of the seconds that clients take.
    nodes
        Registry of the clients and their nodes.
    messages
        Names in messages, and the user's configs.
    chosen
        Options of the algorithm, and further arguments of the strategy.
    true_clusters
        Whether the true clusters of the nodes are given.
    folder
        Folder of the run; None without a folder.
    """

    exchange: AppExchange
    meter: AppMeter
    nodes: AppNodes
    messages: MessageFormat
    chosen: AppOptions
    folder: Path | None
    model: ArrayModel = field(init=False)
    workers: AppClients = field(init=False)
    _initial: Tensor = field(init=False)
    _keys: ScoreKeys = field(init=False)
    _rehearsal: Rehearsal = field(init=False)

    @property
    def roster(self) -> ClientRegistry:
        """Names and numbers of examples of all clients that ever joined."""
        return self.nodes.clients

    @property
    def spec(self) -> DataSpec:
        """Specification of the clients' data, of which nothing is known."""
        return self.roster.schema

    @property
    def size(self) -> int:
        """Number of clients that have joined so far."""
        return len(self.nodes.ids)

    def build_algorithm(self, algorithm: Algorithm | str) -> Algorithm:
        """Return the algorithm, given itself or its name.

        Raises
        ------
        ConfigError
            If plain ClientApps do not suffice for the algorithm.
        """
        if not isinstance(algorithm, Algorithm):
            options = {**PLAIN.get(algorithm, {}), **self.chosen.options}
            algorithm = build_algorithm(algorithm, options, self.roster.true_clusters)
        self._rehearsal = rehearse(algorithm)
        return algorithm

    def prepare(
        self, settings: RunSettings, algorithm: Algorithm, model: ArrayRecord
    ) -> tuple[RunSettings, FittedTask]:
        """Check that the run is possible with plain ClientApps, and learn the metrics' names.

        A few nodes evaluate the initial model. If the algorithm compares updates from parts of
        clients' data, all nodes also train on all data and on a part, which is discarded: so the
        server learns the numbers of examples, and that parts are selected.

        Raises
        ------
        ConfigError
            If the metrics of clients cannot be identified, clients return no loss where the
            algorithm needs one, or a ClientApp trains on all of its data where the algorithm needs
            parts of it.
        ModelError
            If the initial arrays are no model.
        UpdateError
            If no node can evaluate the initial model.
        """
        self.model = ArrayModel.of(model, self.chosen.buffers)
        self._initial = self._make_initial(model, algorithm, settings.seed)
        self._keys = self._probe_scores(model)
        if self._rehearsal.has_choices and self._keys.loss is None:
            raise ConfigError(
                f"{type(algorithm).__name__} lets clients choose a model by its loss, but they return "
                "no loss when they evaluate; return a metric such as 'eval_loss', or name it as "
                "loss_key"
            )
        if self._rehearsal.has_parts:
            self._probe_parts(model, settings.seed)
        # Metric and direction are all that a run needs of the task; the loss is the clients' own.
        return settings, FittedTask(kind="regression", metrics=(self._keys.metric,))

    def _make_initial(self, arrays: ArrayRecord, algorithm: Algorithm, seed: int) -> Tensor:
        """Return the initial model ``[S]``, or ``[initial_models, S]`` for several models."""
        first = self.model.read(arrays)
        count = algorithm.requires.initial_models
        if count == 1:
            return first
        make = self.chosen.initial_models
        models = [first]
        for number in range(1, count):
            if make is None:
                models.append(self.model.redrawn(first, seed, number))
                continue
            try:
                models.append(self.model.read(make(number)))
            except UpdateError as error:
                raise ConfigError(f"initial_models({number}) does not fit: {error}") from error
        found = torch.stack(models)
        if len(found.unique(dim=0)) < count:
            raise ConfigError(
                f"{type(algorithm).__name__} starts from {count} different models, but those that "
                "follow from initial_arrays are equal, as every array has equal entries; pass "
                "initial_models, a function that returns the arrays of model number 1, 2, ..."
            )
        return found

    def _probe_scores(self, arrays: ArrayRecord) -> ScoreKeys:
        """Let a few nodes evaluate the initial model, and find the score among their metrics.

        If no client ever evaluates, the score has a name, but no values.
        """
        if not self.chosen.evaluates and not self._rehearsal.has_choices:
            return ScoreKeys("score", None, higher_is_better=True)
        content = self.messages.content(arrays, self.messages.evaluate_config, 0, {})
        requests = [
            AppRequest(client, self.nodes.node(client), content)
            for client in self.nodes.connected[:PROBED]
        ]
        reasons: list[str] = []
        for request, reply in self.exchange.ask(requests, MessageType.EVALUATE, "evaluate 0"):
            try:
                if isinstance(reply, str):
                    raise UpdateError(reply)
                metrics = read_metrics(reply)
                read_size(metrics, self.messages.weight)
            except UpdateError as error:
                reasons.append(f"node {request.node}: {error}")
                continue
            return self.chosen.find_keys(dict(metrics))
        raise UpdateError(
            "the run cannot start, since no node can evaluate the initial model: "
            f"{'; '.join(sorted(reasons))}; correct the ClientApp"
            + ("" if self._rehearsal.has_choices else ", or set fraction_evaluate=0")
        )

    def _probe_parts(self, arrays: ArrayRecord, seed: int) -> None:
        """Check that nodes train on the part of their data that the config names.

        Each node trains on all data, and on one of two parts. The part must be about half.

        Raises
        ------
        ConfigError
            If a node trains on all of its data.
        UpdateError
            If no node replies.
        """
        sizes = self._probe_sizes(arrays, None, seed)
        of_parts = self._probe_sizes(arrays, SplitPart(0, 2), seed)
        self.nodes.sizes.update(sizes)
        both = sorted(sizes.keys() & of_parts.keys())
        wrong = [client for client in both if not 0 < of_parts[client] < sizes[client]]
        if wrong:
            client = wrong[0]
            raise ConfigError(
                "the method compares updates from parts of each client's data, but node "
                f"{self.nodes.node(client)}, asked for one of two parts, reports "
                f"{of_parts[client]} of {sizes[client]} examples; in the ClientApp's function that "
                "trains, add the line: trainset = fedclade.flower.part_of(trainset, "
                "msg.content['config']), and report the number of examples in it"
            )
        if not both:
            raise UpdateError(
                "the run cannot start, since no node can train on a part of its data; see the log "
                "of the ClientApps for the cause"
            )

    def _probe_sizes(
        self, arrays: ArrayRecord, part: SplitPart | None, seed: int
    ) -> dict[int, int]:
        """Let all nodes train once, and return the numbers of examples that they report."""
        requests: list[AppRequest] = []
        for client in self.nodes.connected:
            values = {} if part is None else PartSent(part, client, seed, 0).values()
            content = self.messages.content(arrays, self.messages.train_config, 0, values)
            requests.append(AppRequest(client, self.nodes.node(client), content))
        sizes: dict[int, int] = {}
        for request, reply in self.exchange.ask(requests, MessageType.TRAIN, "parts"):
            if isinstance(reply, str):
                continue  # round 1 reports the reason
            try:
                sizes[request.client] = self._read_size(reply)
            except UpdateError:
                continue
        return sizes

    def _read_size(self, reply: RecordDict) -> int:
        """Return the number of examples of a reply to a request to train."""
        only_record(reply, "ArrayRecord")
        return read_size(read_metrics(reply), self.messages.weight)

    def describe(
        self, settings: RunSettings, algorithm: Algorithm, task: FittedTask, model: Any
    ) -> dict[str, Any]:
        """Build the config of the run.

        Local training is the ClientApps' own, so the config has no section about it. The section
        ``client_app`` has the user's configs of messages.
        """
        config = settings.as_config(
            algorithm, task, "auto", data={"name": "ClientApp"}, model="arrays"
        )
        del config["local"]
        return {**config, "algorithm": describe(algorithm)}

    def complete_config(self, config: dict[str, Any], settings: RunSettings) -> dict[str, Any]:
        """Return a run's config with the names and values in messages."""
        names = {
            "score_key": self._keys.score,
            "higher_is_better": self._keys.higher_is_better,
            "weighted_by_key": self.messages.weight,
            "train_config": _plain(self.messages.train_config),
            "evaluate_config": _plain(self.messages.evaluate_config),
        }
        if self._keys.loss is not None:
            names["loss_key"] = self._keys.loss
        return {**config, "client_app": names}

    def fingerprint(self) -> str:
        """Return a digest of the model's names, shapes and types."""
        slots = (*self.model.layout.parameters, *self.model.layout.buffers)
        described = [(slot.name, slot.shape, str(slot.dtype)) for slot in slots]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()

    def connect(
        self, assembled: AssembledRun, settings: RunSettings, device: str, engine: str | None
    ) -> Connected:
        """Build the server's side of the exchange; return the clients, ready for the next round."""
        algorithm = assembled.algorithm
        layout = self.model.layout
        budget = (
            default_memory(torch.device(device))
            if settings.memory is None
            else memory_bytes(settings.memory)
        )
        self.workers = AppClients(
            self.exchange,
            self.nodes,
            self.model,
            self.messages,
            self._keys,
            evaluates=self.chosen.evaluates,
            largest_in_memory=budget // SHARE_OF_UPDATES,
        )
        streams = choose_network_stream(
            settings,
            algorithm,
            joined=self.size,
            bytes_each=layout.size * self._initial.itemsize,
            budget=budget,
            may_change=assembled.settings.stream == "auto",
        )
        retrying = Retrying()
        server = ServerEnd.assemble(
            settings,
            algorithm,
            layout,
            lambda: self.nodes.sizes,
            retrying=retrying,
            streaming=Streaming() if streams.active else None,
            limits=settings.aggregate.limits(untrusted=False),
            untrusted=False,
            names=lambda: self.roster.names,
        )

        # The server computes the mean of the updates from parts itself, since a plain ClientApp
        # replies with the model that it trained on each part.
        def build_channel(server: ServerEnd) -> Channel:
            return Channel(
                self.workers,
                Replicating(server.sketch_of_parts),
                Timing(self.meter),
                *server.middleware,
                *assembled.middleware,
            )

        clients = AppMembers(
            build_channel(server),
            self.workers,
            self.nodes,
            self.folder,
            switch=StreamSwitch(streams, lambda: build_channel(server.streaming_from_now())),
        )
        backend = Backend(
            clients=clients,
            initial=self._initial,
            workers=self.workers,
            meter=self.meter,
            counting=StepCounting(self.meter, lambda _: self.nodes.sizes),
            retrying=retrying,
            permutation=None,
            sketch=server.sketch,
            streams=streams,
            device=device,
            memory=budget,
            task=assembled.task,
        )
        return Connected(backend, clients, assembled.task, settings)

    def execution(self) -> AbstractContextManager[object]:
        """Return a context in which files are readable by their owner only."""
        return owner_only()


def _plain(config: ConfigRecord) -> dict[str, Any]:
    """Return the values of a config for a file; bytes as their digest."""
    return {
        name: hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else value
        for name, value in config.items()
    }
