"""Evaluation of clients after a round, with the model that is deployed to each client."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedclade.algorithms import Algorithm, EvaluatedModels, State
from fedclade.channel import Channel
from fedclade.core import (
    FORBIDS,
    OWN,
    Clients,
    ConfigError,
    Evaluation,
    ParameterTree,
    id_array,
    rng,
)
from fedclade.runs.backend import Backend
from fedclade.runs.churn import ComingAndGoing
from fedclade.runs.reference_log import RunLog
from fedclade.runs.settings import RunSettings

_log = RunLog(logging.getLogger(__name__))


@dataclass(frozen=True, eq=False)
class RoundScores:
    """Scores of the clients after one round.

    Parameters
    ----------
    test, validation
        Scores on test data and on validation data; None if clients were not evaluated, or no client
        replied.
    nodes
        For each client, the node of the parameter tree whose model was evaluated.
    own
        Clients that were evaluated with a model of their own.
    success
        Success of a backdoor attack, see :meth:`Adversaries.attacked
        <fedclade.runs.adversaries.Adversaries.attacked>`; None without a backdoor.
    without_validation
        For each client that sent no scores on validation data, the reason.
    """

    test: Evaluation | None = None
    validation: Evaluation | None = None
    nodes: Mapping[int, int] = field(default_factory=dict[int, int])
    own: Collection[int] = ()
    success: float | None = None
    without_validation: Mapping[int, str] = field(default_factory=dict[int, str])

    @property
    def are_refused(self) -> bool:
        """Whether the policies of all clients forbid scores on validation data.

        If so, no later round will have such scores either.
        """
        reasons = self.without_validation.values()
        return len(reasons) > 0 and all(why.startswith(FORBIDS) for why in reasons)

    def check_validation(self, number: int, needs: str, metric: str | None = None) -> None:
        """Check that at least one client has reported scores on validation data.

        The check is skipped in a round in which no client has reported any score, not even on test
        data. It is not skipped if the policies of all clients forbid scores on validation data.

        Parameters
        ----------
        number
            Number of the round, from 1.
        needs
            The setting that needs scores on validation data, for the error message.
        metric
            Name of the metric that the setting uses; None for the first metric of the task.

        Raises
        ------
        ConfigError
            If no client has reported such scores, or clients do not report the metric. The message
            names the setting and the first client's reason.
        """
        if (found := self.validation) is not None:
            if metric is not None and found.without_loss.issuperset(found.ids):
                raise ConfigError(
                    f"round {number}: {needs} needs the {metric} on validation data (stop.metric = "
                    f"{metric!r}), but clients with a privacy budget or secure aggregation report "
                    "only one number, the score by the first metric; leave out stop.metric"
                )
            return
        if self.test is None and not self.are_refused:
            return
        client, why = next(iter(self.without_validation.items()), (None, "no reason was reported"))
        says = why if client is None else f"client {client}: {why}"
        raise ConfigError(
            f"round {number}: {needs} needs scores on validation data, but no client has sent any "
            f"({says}); give clients validation data, for example by data.validation_fraction = "
            "0.2, or leave out the setting"
        )


def evaluate_round(
    algorithm: Algorithm,
    backend: Backend,
    clients: ComingAndGoing,
    state: State,
    settings: RunSettings,
    number: int,
) -> RoundScores:
    """Evaluate clients after a round, with the model that is deployed to each client.

    Parameters
    ----------
    algorithm
        The algorithm, which selects the model for each client.
    backend
        The backend of the run.
    clients
        The clients that can be queried in the round.
    state
        State of the algorithm after the round.
    settings
        Settings of the run.
    number
        Number of the round, from 1.
    """
    asked = panel(state.tree, clients.ids, settings.evaluate_clients, settings.seed)
    evaluated = algorithm.models_for(state, _Panel(clients, asked))
    _check_declared(algorithm, evaluated)
    models, rows = state.tree.models([evaluated.nodes[client] for client in asked], served=True)
    own = set(evaluated.own)
    rows = [OWN if client in own else row for client, row in zip(asked, rows, strict=True)]
    together: dict[str, Any] = {}
    if evaluated.mixture is not None:
        together = {"mixture": evaluated.mixture}
        models = state.tree.models([leaf.id for leaf in state.tree.leaves])[0]
        rows = [0] * len(asked)
    test = clients.evaluate(asked, models, rows, "test", **together)
    validation: Evaluation | None = None
    without_validation: Mapping[int, str] = {}
    if settings.needs_validation:
        found = clients.evaluate(asked, models, rows, "validation", **together)
        validation = found if found.ids else None
        without_validation = found.left_out
    success: float | None = None
    if (adversaries := backend.adversaries) is not None:
        success = adversaries.attacked(clients, asked, models, rows, together.get("mixture"))
    _warn_of_losses(number, test)
    return RoundScores(
        test if test.ids else None,
        validation,
        evaluated.nodes,
        own,
        success=success,
        without_validation=without_validation,
    )


class _Panel(Channel):
    """All clients of a run, some of which are evaluated.

    Parameters
    ----------
    clients
        All clients.
    evaluated
        Ids of the clients that are evaluated.
    """

    def __init__(self, clients: Clients, evaluated: Sequence[int]) -> None:
        super().__init__(clients)
        self._evaluated = evaluated

    @property
    def evaluated(self) -> Sequence[int]:
        """Ids of the clients that are being evaluated."""
        return self._evaluated

    @property
    def reachable(self) -> Sequence[int]:
        """Ids of the clients that are available in this round."""
        return self._clients.reachable

    @property
    def stage(self) -> int:
        """Number of times that the clients' data has changed so far."""
        return self._clients.stage


def panel(tree: ParameterTree, ids: Sequence[int], most: int | None, seed: int) -> Sequence[int]:
    """Select the clients to evaluate: all, or the same random sample in all rounds.

    Parameters
    ----------
    tree
        The clusters.
    ids
        All clients.
    most
        Number of clients to evaluate; None for all clients. Clients in a cluster are drawn before
        clients that are in no cluster.
    seed
        Seed of the run, by which the clients are drawn.
    """
    if most is None or most >= len(ids):
        return ids
    order = rng.generator(seed, "evaluated clients").permutation(len(ids))
    are_held = tree.has_leaf(ids)[order]
    # Clients in a cluster come first, in both groups in random order.
    drawn = np.concatenate([order[are_held][:most], order[~are_held][:most]])[:most]
    return id_array(ids)[np.sort(drawn)].tolist()


def _check_declared(algorithm: Algorithm, evaluated: EvaluatedModels) -> None:
    """Check that an algorithm declares clients' own models and mixtures, if it uses them.

    The declaration is ``algorithm.requires``. Continued runs, exports of models and runs over a
    network rely on it, so it must match the models that ``algorithm.models_for`` has returned.
    """
    name = type(algorithm).__name__
    requires = algorithm.requires
    if len(evaluated.own) > 0 and not requires.own_models:
        raise ConfigError(
            f"{name}.models_for() returns clients with models of their own, which the algorithm "
            f"does not declare; set own_models = True in {name}.requires"
        )
    if evaluated.mixture is not None and requires.mixture is None:
        raise ConfigError(
            f"{name}.models_for() returns a mixture of models, which the algorithm does not "
            f"declare; set mixture = Mixture(...) in {name}.requires"
        )


def _warn_of_losses(number: int, evaluation: Evaluation) -> None:
    """Log a warning if clients report test losses that are NaN or infinite."""
    finite = evaluation.losses.isfinite().tolist()
    told = [
        not holds and c not in evaluation.without_loss
        for c, holds in zip(evaluation.ids, finite, strict=True)
    ]
    if bad := [client for client, is_bad in zip(evaluation.ids, told, strict=True) if is_bad]:
        _log.warning(
            "round %d: the test losses of %d of %d clients are NaN or infinite, the first of them "
            "for client %d; if training diverged, lower local.lr",
            number,
            len(bad),
            len(evaluation.ids),
            bad[0],
        )
