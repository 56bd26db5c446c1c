"""Small worlds for tests: a federation built by hand, clients that follow a script, and clients that are watched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedclade import LocalTraining
from fedclade.algorithms import Algorithm, RoundLog, State
from fedclade.channel import Channel, Meter, Replicating, Retrying, Streaming, Timing, Traffic
from fedclade.core import (
    OWN,
    ClientWork,
    ClusterSplit,
    Evaluation,
    EvaluationQuery,
    Event,
    LocalModel,
    Query,
    R,
    Round,
    RoundPlan,
    RowQuery,
    Sink,
    Split,
    TaskKind,
    TrainQuery,
)
from fedclade.core.clients import Clients
from fedclade.core.updates import Updates
from fedclade.data.federation import ClientData, Federation, Pool
from fedclade.models import build_model
from fedclade.training import OWN_MODEL, SimulatedClients

FEATURES, LABELS = 6, 4

VIEWS = (None, (1, 0, 2, 3), (0, 1, 3, 2), (1, 0, 3, 2))
"""How the four true clusters see the labels: as they are, with one pair swapped, with the other, with both."""


def federation_of(
    truth: Sequence[int],
    sizes: Sequence[int] | None = None,
    seed: int = 0,
    validation: int = 10,
    test: int = 20,
) -> Federation:
    """Return a client for each entry of ``truth``, with the ids 0, 1, ... and labels seen as its true cluster does."""
    sizes = sizes or [24] * len(truth)
    draw = np.random.default_rng(seed)
    n = sum(sizes) + len(truth) * (validation + test)
    x = draw.normal(size=(n, FEATURES)).astype(np.float32)
    y = (x @ draw.normal(size=(FEATURES, LABELS))).argmax(1)
    clients: list[ClientData] = []
    start = 0
    for i, (cluster, size) in enumerate(zip(truth, sizes, strict=True)):
        indices = np.arange(start, start := start + size + validation + test)
        train, held_out, tested = np.split(indices, [size, size + validation])
        view = VIEWS[cluster]
        clients.append(
            ClientData(
                i, f"c{i}", i, train, held_out, tested, None if view is None else torch.tensor(view)
            )
        )
    everything = np.arange(n)
    pool = Pool(
        "tiny", torch.from_numpy(x), torch.from_numpy(y), y, everything, everything[:0], LABELS
    )
    return Federation(pool, tuple(clients), dict(enumerate(truth)), "tiny")


def task_federation(
    task: TaskKind,
    truth: Sequence[int],
    sizes: Sequence[int] | None = None,
    outputs: int = 0,
    seed: int = 0,
) -> Federation:
    """Return a client for each entry of ``truth``, whose targets are linear in its inputs, as in its true cluster.

    They are numbers (with a little noise), or 0 or 1 by their signs; ``outputs`` of them, or one without a dimension.
    """
    sizes, draw = sizes or [24] * len(truth), np.random.default_rng(seed)
    weights = draw.normal(size=(max(truth) + 1, FEATURES, max(outputs, 1)))
    x, y, clients = list[Any](), list[Any](), list[ClientData]()
    for i, (cluster, size) in enumerate(zip(truth, sizes, strict=True)):
        start = sum(map(len, x))
        x.append(draw.normal(size=(size + 30, FEATURES)).astype(np.float32))
        y.append(x[-1] @ weights[cluster] + 0.1 * draw.normal(size=(size + 30, max(outputs, 1))))
        clients.append(
            ClientData(
                i, f"c{i}", i, *np.split(np.arange(start, start + size + 30), [size, size + 10])
            )
        )
    targets = np.concatenate(y) if outputs else np.concatenate(y)[:, 0]
    targets = torch.from_numpy(targets if task == "regression" else targets > 0).float()
    everything = np.arange(len(targets))
    pool = Pool.of_examples(
        "tiny", torch.from_numpy(np.concatenate(x)), targets, everything, everything[:0], task=task
    )
    return Federation(pool, tuple(clients), dict(enumerate(truth)), "tiny")


def renamed(federation: Federation, new_ids: Mapping[int, int]) -> Federation:
    """Return the same clients under other ids, in the order of these; their keys stay with them."""
    clients = sorted((replace(c, id=new_ids[c.id]) for c in federation.clients), key=lambda c: c.id)
    truth = {
        new_ids[client]: cluster for client, cluster in (federation.true_clusters or {}).items()
    }
    return replace(federation, clients=tuple(clients), true_clusters=truth)


def linear(seed: int = 0) -> nn.Module:
    return build_model("mclr", input_shape=(FEATURES,), outputs=LABELS, seed=seed)


def perceptron(seed: int = 0) -> nn.Module:
    return build_model(
        "mlp", input_shape=(FEATURES,), outputs=LABELS, seed=seed, arguments={"hidden": 8}
    )


@dataclass
class Asked:
    """One call of a client method."""

    what: str
    ids: tuple[int, ...]
    models: dict[int, Tensor]
    number: int
    split: str = ""
    answer: Updates | None = None
    anchors: dict[int, Tensor] = field(default_factory=dict)
    """The models that the proximal term pulls to, where that was asked for."""
    query: TrainQuery | None = None
    """Of training, or of gradients."""

    @property
    def work(self) -> ClientWork:
        assert self.query is not None
        return self.query.work

    @property
    def round(self) -> Round:
        assert self.query is not None
        return self.query.round

    @property
    def own(self) -> bool:
        """Whether each client stores the model that it trains as its own."""
        return self.query is not None and isinstance(self.work.store, LocalModel)


class Fake(Clients):
    """Clients that answer by methods of their own; what is not overridden goes to others."""

    clients: Clients
    ids: Sequence[int] = ()
    sizes: Mapping[int, int] = {}

    def ask(self, query: Query[R], /, sink: Sink | None = None) -> R:
        if isinstance(query, EvaluationQuery):
            return self.evaluate(
                query.ids, query.models, query.assignment, query.split, **only_asked(query)
            )
        if not isinstance(query, TrainQuery):
            return self.data(query)
        sent = (query.ids, query.models.vectors, query.models.start, query.round)
        if query.kind == "gradients":
            return self.gradients(*sent)
        return self.train(*sent, query.work, **only_asked(query))

    def train(self, *args, **kwargs) -> Updates:
        return self.clients.train(*args, **kwargs)

    def gradients(self, *args, **kwargs) -> Updates:
        return self.clients.gradients(*args, **kwargs)

    def evaluate(self, *args, **kwargs) -> Evaluation:
        return self.clients.evaluate(*args, **kwargs)

    def data(self, query: Query[R]) -> R:
        return self.clients.ask(query)


def only_asked(query: TrainQuery | EvaluationQuery) -> dict[str, Any]:
    """Return the keyword arguments of ``train`` or ``evaluate`` that only some queries need."""
    if isinstance(query, TrainQuery):
        values = {
            "anchors": query.models.anchor,
            "sent_before": query.models.sent_before or None,
            "require_all": query.require_all or None,
        }
    else:
        values = {"compares": query.compares or None, "mixture": query.mixture}
    return {name: value for name, value in values.items() if value is not None}


class Around(Fake):
    """Clients around others."""

    def __init__(self, clients: Clients) -> None:
        self.clients = clients

    @property
    def ids(self) -> Sequence[int]:
        return self.clients.ids

    @property
    def sizes(self) -> Mapping[int, int]:
        return self.clients.sizes


class Metered(Channel):
    """Clients with a meter."""

    def __init__(self, clients: Clients) -> None:
        super().__init__(clients, Timing(meter := Meter()), Traffic(meter))
        self.meter = meter


class Attended(Channel):
    """Clients of whom it is counted who answers."""

    def __init__(self, clients: Clients, **settings) -> None:
        super().__init__(clients, retrying := Retrying(**settings))
        self.closed, self.told = retrying.closed, retrying.told


def streamed(clients: Clients, at_once: int) -> Channel:
    """Return clients who are asked so many at a time."""
    return Channel(clients, Streaming(clients.sizes, at_once))


@dataclass
class SpyClients(Clients):
    """Clients that note what they were asked, and what they answered."""

    clients: Clients
    calls: list[Asked] = field(default_factory=list)

    @property
    def ids(self) -> Sequence[int]:
        return self.clients.ids

    @property
    def sizes(self) -> Mapping[int, int]:
        return self.clients.sizes

    @property
    def undivided(self):
        return self.clients.undivided

    def ask(self, query: Query[R], /, sink: Sink | None = None) -> R:
        if isinstance(query, EvaluationQuery):
            models = _of_each(query.ids, query.models, query.assignment)
            self.calls.append(Asked("evaluate", tuple(query.ids), models, 0, query.split))
        elif isinstance(query, RowQuery):
            self.calls.append(Asked(query.kind, tuple(query.ids), {}, 0))
        answer = self.clients.ask(query) if sink is None else self.clients.ask(query, sink)
        if isinstance(query, TrainQuery):
            self._note(query, answer)
        return answer

    def asked(self, what: str, number: int) -> list[Asked]:
        return [call for call in self.calls if call.what == what and call.number == number]

    def _note(self, query: TrainQuery, answer: Updates) -> None:
        vectors, start, anchor = query.models.vectors, query.models.start, query.models.anchor
        self.calls.append(
            Asked(
                query.kind,
                tuple(query.ids),
                _of_each(query.ids, vectors, start),
                query.round.number,
                answer=answer,
                anchors={} if anchor is None else _of_each(query.ids, vectors, anchor),
                query=query,
            )
        )


def _of_each(ids: Sequence[int], models: Tensor, rows: Sequence[int]) -> dict[int, Tensor]:
    """Return the model of each client, except of clients that use one of their own."""
    return {
        client: models[row].clone() for client, row in zip(ids, rows, strict=True) if row != OWN
    }


@dataclass
class ScriptedClients(Fake):
    """Clients that answer with the updates that they are told to, whatever their model."""

    deltas: Mapping[int, Sequence[float]]
    sizes: Mapping[int, int] = field(default_factory=dict)
    right: Callable[[int, float], float] = lambda client, model: 0.0
    """Accuracy of a client by its id and the first entry of its model."""

    def __post_init__(self) -> None:
        self.sizes = dict(self.sizes) or dict.fromkeys(self.deltas, 1)

    @property
    def ids(self) -> Sequence[int]:
        return tuple(self.deltas)

    def train(
        self,
        ids: Sequence[int],
        models: Tensor,
        assignment: Sequence[int],
        this_round: Round,
        work: ClientWork | None = None,
        **more: Any,
    ) -> Updates:
        empty = work is not None and not work.sends_update
        deltas = torch.tensor(
            [[] if empty else self.deltas[client] for client in ids], dtype=torch.float32
        )
        sizes = [self.sizes[client] for client in ids]
        return Updates.received(
            ids, sizes, deltas, deltas.shape[1], torch.zeros(len(ids)), this_round.number
        )

    gradients = train

    def evaluate(
        self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], split: Split
    ) -> Evaluation:
        rows = zip(ids, assignment, strict=True)
        accuracies = torch.tensor(
            [self.right(client, float(models[row, 0])) for client, row in rows]
        )
        examples = torch.tensor([self.sizes[client] for client in ids])
        return Evaluation(tuple(ids), accuracies[:, None], torch.zeros(len(ids)), examples)


def splits_of(work: ClientWork | None) -> int:
    """Return the number of parts of its data on which each client trains separately."""
    return 1 if work is None or work.splits is None else work.splits.count


def details(event: Event) -> dict[str, Any]:
    """Return what an event holds besides its kind and node, as lists and dicts."""
    return {
        key: value for key, value in event.to_row(0).items() if key not in ("round", "kind", "node")
    }


@dataclass
class Played:
    """A run, round by round: states (one more than rounds), logs, and the clients that were watched."""

    states: list[State]
    logs: list[RoundLog]
    clients: SpyClients

    def splits(self) -> list[tuple[int, int, tuple[frozenset[int], ...]]]:
        """Return round, node and parts of every split."""
        return [
            (number, event.node, tuple(frozenset(part) for part in event.clusters))
            for number, log in enumerate(self.logs, start=1)
            for event in log.events
            if isinstance(event, ClusterSplit)
        ]


def play(
    algorithm: Algorithm,
    clients: Clients,
    params: Tensor,
    rounds: int,
    *,
    spec: LocalTraining | None = None,
    seed: int = 0,
    fraction: float = 1.0,
) -> Played:
    """Run an algorithm as ``simulate`` does, and keep what simulate lets go: states, logs, calls."""
    spy = SpyClients(clients)
    states, logs = [algorithm.init(params, spy)], list[RoundLog]()
    for number in range(1, rounds + 1):
        this_round = RoundPlan(number, spec or LocalTraining(), seed)
        cohort = algorithm.sample_cohort(states[-1], fraction, this_round.generator("cohort"))
        state, log = algorithm.step(states[-1], cohort, spy, this_round)
        states.append(state)
        logs.append(log)
    return Played(states, logs, spy)


def simulated(
    federation: Federation, module: nn.Module, engine: str = "loop"
) -> tuple[SimulatedClients, Tensor]:
    """Return the clients of a federation, trained one after another as the references do, and the model's vector."""
    clients = SimulatedClients(federation, module, engine=engine)
    return clients, clients.layout.flatten(module)


def own_models(played: Played) -> dict[int, Tensor]:
    """Return the model of its own of each client that keeps one."""
    store = played.clients.clients.store
    return {
        client: kept[OWN_MODEL]
        for client in played.clients.ids
        if OWN_MODEL in (kept := store.latest(client))
    }


def replicating(
    federation: Federation, module: nn.Module, engine: str = "loop"
) -> tuple[Channel, Tensor]:
    """Return the same, of whom several updates can be asked at once."""
    clients, params = simulated(federation, module, engine)
    return Channel(clients, Replicating(None)), params
