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
from fedclade.channel import (
    Channel,
    Meter,
    Replicating,
    Retrying,
    Streaming,
    Timing,
    Traffic,
    Unpacking,
)
from fedclade.core import (
    OWN,
    ClusterSplit,
    Evaluation,
    EvaluationQuery,
    Event,
    Query,
    R,
    Round,
    RowQuery,
    Split,
    TaskKind,
    UpdateQuery,
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
    own: bool = False
    round: Round | None = None
    """Of training."""


class Fake(Clients):
    """Clients that answer by methods of their own; what is not overridden goes to others."""

    clients: Clients
    ids: Sequence[int] = ()
    sizes: Mapping[int, int] = {}

    def ask(self, query: Query[R], /) -> R:
        if isinstance(query, EvaluationQuery):
            return self.evaluate(
                query.ids, query.models, query.assignment, query.split, **only_asked(query)
            )
        if not isinstance(query, UpdateQuery):
            return self.data(query)
        if query.kind == "gradients":
            return self.gradients(query.ids, query.models, query.assignment, query.round)
        return self.train(
            query.ids,
            query.models,
            query.assignment,
            query.round,
            query.anchors,
            **only_asked(query),
        )

    def train(self, *args, **kwargs) -> Updates:
        return self.clients.train(*args, **kwargs)

    def gradients(self, *args) -> Updates:
        return self.clients.gradients(*args)

    def evaluate(self, *args, **kwargs) -> Evaluation:
        return self.clients.evaluate(*args, **kwargs)

    def data(self, query: Query[R]) -> R:
        return self.clients.ask(query)


def only_asked(query: UpdateQuery | EvaluationQuery) -> dict[str, Any]:
    """Return the arguments that only some queries need: about clients' own models, or mixtures, or who is best."""
    names = ("own", "shares", "compares")
    asked = {name: True for name in names if getattr(query, name, False)}
    return asked if query.mixture is None else {**asked, "mixture": query.mixture}


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
class SpyClients(Fake):
    """Clients that note what they were asked, and what they answered."""

    clients: Clients
    calls: list[Asked] = field(default_factory=list)

    @property
    def ids(self) -> Sequence[int]:
        return self.clients.ids

    @property
    def sizes(self) -> Mapping[int, int]:
        return self.clients.sizes

    def train(
        self,
        ids: Sequence[int],
        models: Tensor,
        assignment: Sequence[int],
        this_round: Round,
        anchors: Sequence[int] | None = None,
        *,
        own: bool = False,
        **more: Any,
    ) -> Updates:
        more |= {"own": True} if own else {}
        answer = self.clients.train(ids, models, assignment, this_round, anchors, **more)
        self._note(
            "train",
            ids,
            models,
            assignment,
            this_round.number,
            answer=answer,
            anchors=anchors,
            own=own,
        )
        self.calls[-1].round = this_round
        return answer

    def gradients(
        self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], this_round: Round
    ) -> Updates:
        answer = self.clients.gradients(ids, models, assignment, this_round)
        self._note("gradients", ids, models, assignment, this_round.number, answer=answer)
        return answer

    def evaluate(
        self,
        ids: Sequence[int],
        models: Tensor,
        assignment: Sequence[int],
        split: Split,
        **more: Any,
    ) -> Evaluation:
        self._note("evaluate", ids, models, assignment, 0, split)
        return self.clients.evaluate(ids, models, assignment, split, **more)

    def data(self, query: Query[R]) -> R:
        if isinstance(query, RowQuery):
            self.calls.append(Asked(query.kind, tuple(query.ids), {}, 0))
        return self.clients.ask(query)

    def asked(self, what: str, number: int) -> list[Asked]:
        return [call for call in self.calls if call.what == what and call.number == number]

    def _note(
        self, what, ids, models, assignment, number, split="", answer=None, anchors=None, own=False
    ) -> None:
        def of_each(rows):
            return {
                client: models[row].clone()
                for client, row in zip(ids, rows, strict=True)
                if row != OWN
            }

        pulled = {} if anchors is None else of_each(anchors)
        self.calls.append(
            Asked(what, tuple(ids), of_each(assignment), number, split, answer, pulled, own)
        )


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
        anchors: Sequence[int] | None = None,
        *,
        own: bool = False,
    ) -> Updates:
        deltas = torch.tensor(
            [[] if own else self.deltas[client] for client in ids], dtype=torch.float32
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
        this_round = Round(number, spec or LocalTraining(), seed)
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
    return Channel(clients, Replicating(None), Unpacking()), params
