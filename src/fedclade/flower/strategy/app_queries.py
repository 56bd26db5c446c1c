"""Queries that a plain ClientApp answers, and the check of an algorithm before round 1.

A plain ClientApp trains a model that it receives, and evaluates a model that it receives. Methods
that need more are refused before round 1.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedclade.algorithms import Algorithm, Requires
from fedclade.channel import Channel, Replicating
from fedclade.core import (
    OWN,
    AllData,
    ConfigError,
    DataQuery,
    Delta,
    DistanceToAnchor,
    Evaluation,
    EvaluationQuery,
    FromServer,
    LocalModel,
    LocalTraining,
    Proximal,
    Query,
    R,
    RoundPlan,
    Sgd,
    Sink,
    SplitPart,
    Splits,
    TrainQuery,
    Updates,
    Workers,
)

WORKING = (
    "cfl",
    "clove",
    "fedavg",
    "feddrift",
    "fedgroup",
    "fesem",
    "fl_hc",
    "ifca",
    "ocfl",
    "oracle",
    "rcfl",
    "stocfl",
)
"""Methods that run with plain ClientApps, with their default settings or those of :data:`PLAIN`."""

PLAIN: Mapping[str, Mapping[str, Any]] = {"stocfl": {"mu": 0.0}}
"""Settings of methods by name that differ from their defaults, so that plain ClientApps suffice.

The proximal term of StoCFL needs clients that receive a second model.
"""


class UnansweredQueryError(ConfigError):
    """An algorithm sends a query that a plain ClientApp does not answer."""


def check_query(query: Query[Any]) -> None:
    """Check that plain ClientApps can answer a query.

    Raises
    ------
    UnansweredQueryError
        If they cannot. The message names the query and what it needs.
    """
    if isinstance(query, TrainQuery):
        problem = _find_problem(query)
    elif isinstance(query, EvaluationQuery):
        problem = _find_evaluation_problem(query)
    elif isinstance(query, DataQuery):
        kind = getattr(type(query), "kind", type(query).__name__)
        problem = f"a number or a row of numbers about their data ({kind})"
    else:
        problem = f"a reply to a {type(query).__name__}"
    if problem:
        raise UnansweredQueryError(f"a {type(query).__name__} requests {problem}")


def _find_problem(query: TrainQuery) -> str:
    """Return the part of a training query that a plain ClientApp cannot do; empty if there is none."""
    work = query.work
    if not isinstance(work.start, FromServer) or OWN in query.models.start:
        return "training from a model that the client stores itself"
    if not isinstance(work.data, AllData | Splits | SplitPart):
        return f"training on other data than the client's own, {type(work.data).__name__}"
    if isinstance(work.steps, Proximal):
        if work.steps.mu > 0:
            return f"a proximal term (mu = {work.steps.mu:g}) to a second model"
    elif type(work.steps) is not Sgd:
        return f"training steps of the kind {type(work.steps).__name__}"
    if isinstance(work.store, LocalModel):
        return "that the client stores a model"
    if not isinstance(work.reply, Delta | DistanceToAnchor):
        return f"a reply of the kind {type(work.reply).__name__} in place of the trained model"
    return ""


def _find_evaluation_problem(query: EvaluationQuery) -> str:
    """Return the part of an evaluation that a plain ClientApp cannot do; empty if there is none."""
    if query.split == "validation":
        return "scores on validation data, apart from the data of the other evaluations"
    if OWN in query.assignment:
        return "scores of a model that the client stores itself"
    if query.mixture is not None:
        return "scores of a mixture of models"
    if query.compares:
        return "the number of examples for which each of several models is best"
    return ""


@dataclass(frozen=True)
class Rehearsal:
    """Result of the check of an algorithm.

    Parameters
    ----------
    has_parts
        Whether clients have to train on parts of their data that the config names.
    has_choices
        Whether clients choose among several models by their losses.
    """

    has_parts: bool
    has_choices: bool


def rehearse(algorithm: Algorithm) -> Rehearsal:
    """Check before round 1 that plain ClientApps answer the queries of an algorithm.

    Requirements that the algorithm declares are checked first. Then its first rounds are run with a
    few imaginary clients and a model of a few numbers, to see the queries that it sends.

    Raises
    ------
    ConfigError
        If the algorithm needs more than training and evaluation. The message names the query or
        the requirement, and the methods that work.
    """
    name = type(algorithm).__name__
    if problem := _declared_problem(algorithm.requires):
        raise ConfigError(_refusal(name, problem))
    clients = _ImaginaryClients()
    try:
        with _silent():
            _run_rounds(algorithm, clients)
    except UnansweredQueryError as error:
        raise ConfigError(_refusal(name, str(error))) from error
    except Exception as error:
        # The imaginary clients may not suit the algorithm's settings. The run then checks each query
        # when it is sent.
        _log.debug("the rehearsal of %s ended: %s: %s", name, type(error).__name__, error)
    return Rehearsal(clients.has_parts, clients.has_choices)


_log = logging.getLogger(__name__)


def _refusal(name: str, problem: str) -> str:
    return (
        f"{name} does not run with a plain ClientApp, which only trains and evaluates models that "
        f"it receives: {problem}; choose one of {', '.join(WORKING)}, or let clients run "
        "fedclade.flower.client_app, which all methods work with"
    )


def _declared_problem(requires: Requires) -> str:
    """Return a requirement of an algorithm that plain ClientApps do not fulfil; empty if none."""
    if requires.simulation:
        return f"it runs only in a simulation, since {requires.simulation}"
    if requires.gradients:
        return "it requests full-batch gradients"
    if requires.own_models:
        return "clients store models of their own"
    if requires.personal:
        return f"the {requires.personal} of each client's model stays with the client"
    if requires.mixture is not None:
        return "clients train a mixture of models"
    if requires.data_queries:
        return f"clients report numbers about their data ({', '.join(requires.data_queries)})"
    return ""


ROUNDS = 3
"""Number of rounds of a rehearsal."""

CLIENTS = 12
EXAMPLES = 1000
ENTRIES = 8


class _ImaginaryClients(Workers):
    """Clients with random updates, which check each query.

    Attributes
    ----------
    has_parts
        Whether a query requested training on parts of the data.
    has_choices
        Whether a query requested losses in order to choose a model.
    """

    def __init__(self) -> None:
        self.has_parts = False
        self.has_choices = False
        self._draw = torch.Generator().manual_seed(0)

    @property
    def ids(self) -> Sequence[int]:
        """Ids of the clients."""
        return range(CLIENTS)

    @property
    def sizes(self) -> Mapping[int, int]:
        """Numbers of examples of the clients."""
        return dict.fromkeys(self.ids, EXAMPLES)

    @property
    def engine(self) -> str:
        """Name of the engine: none."""
        return "none"

    @property
    def engine_taken(self) -> str | None:
        """Engine in use: None."""
        return None

    def handle_updates(self, query: TrainQuery, sink: Sink | None = None) -> Updates:
        """Check a query, and return random updates."""
        check_query(query)
        self.has_parts |= isinstance(query.work.data, SplitPart)
        n = len(query.ids)
        return Updates.received(
            query.ids,
            [EXAMPLES] * n,
            torch.randn(n, ENTRIES, generator=self._draw),
            n_parameters=ENTRIES,
            losses=torch.ones(n, dtype=torch.float64),
            number=query.round.number,
        )

    def handle_evaluation(self, query: EvaluationQuery) -> Evaluation:
        """Check a query, and return random scores."""
        check_query(query)
        self.has_choices |= query.split != "test"
        n = len(query.ids)
        scores = torch.rand(n, 1, generator=self._draw, dtype=torch.float64)
        return Evaluation(tuple(query.ids), scores, 1 - scores[:, 0], torch.ones(n).long())

    def handle_data(self, query: DataQuery[R]) -> R:
        """Refuse a query about the clients' data."""
        check_query(query)
        raise UnansweredQueryError(f"a {type(query).__name__}")  # check_query has raised already


def _run_rounds(algorithm: Algorithm, workers: _ImaginaryClients) -> None:
    """Run a few rounds of an algorithm with imaginary clients."""
    clients = Channel(workers, Replicating(None))
    count = algorithm.requires.initial_models
    models: Tensor = torch.randn(count, ENTRIES, generator=torch.Generator().manual_seed(1))
    state = algorithm.init(models[0] if count == 1 else models, clients)
    for number in range(1, ROUNDS + 1):
        plan = RoundPlan(number, LocalTraining(), rounds=ROUNDS)
        state, _ = algorithm.step(state, list(clients.ids), clients, plan)
        algorithm.models_for(state, clients)


@contextmanager
def _silent() -> Generator[None]:
    """Let algorithms log nothing in this context: their warnings would be about imaginary clients."""
    logger = logging.getLogger("fedclade")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
