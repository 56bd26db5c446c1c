"""Evaluation of clients after a round, with the models that are deployed to them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedclade.algorithms import Algorithm, State
from fedclade.core import FORBIDS, OWN, ConfigError, Evaluation, ParameterTree, rng
from fedclade.runs.backend import Backend
from fedclade.runs.churn import ComingAndGoing
from fedclade.runs.settings import RunSettings

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class RoundScores:
    """Scores of clients after a round.

    Parameters
    ----------
    test, validation
        Scores on test and on validation data; None if there was no evaluation, or no client
        replied.
    served
        For each client, the node whose model it was evaluated with.
    success
        Success of a backdoor, see :meth:`Adversaries.attacked
        <fedclade.runs.adversaries.Adversaries.attacked>`; None without a backdoor.
    without_validation
        For each client that sent no scores on validation data, the reason.
    """

    test: Evaluation | None = None
    validation: Evaluation | None = None
    served: Mapping[int, int] = field(default_factory=dict[int, int])
    success: float | None = None
    without_validation: Mapping[int, str] = field(default_factory=dict[int, str])

    @property
    def are_refused(self) -> bool:
        """Whether the policy of every client forbids scores on validation data.

        If so, there will never be any.
        """
        reasons = self.without_validation.values()
        return len(reasons) > 0 and all(why.startswith(FORBIDS) for why in reasons)

    def check_validation(self, number: int, needs: str, metric: str | None = None) -> None:
        """Check that at least one client has sent scores on validation data.

        Nothing is checked if no client has sent scores on test data either, unless the policies of
        all clients forbid scores on validation data.

        Parameters
        ----------
        number
            Number of the round, from 1.
        needs
            The setting that needs these scores, for the error message.
        metric
            Name of the metric that the setting uses; None for the first of the task.

        Raises
        ------
        ConfigError
            If no client has sent any; the message names the setting and the first client's reason.
            Also if the clients do not report the metric.
        """
        if (found := self.validation) is not None:
            if metric is not None and found.without_loss.issuperset(found.ids):
                raise ConfigError(
                    f"round {number}: {needs} needs the {metric} on validation data (stop.metric = "
                    f"{metric!r}), and clients with a privacy budget or secure aggregation tell "
                    "one number alone, by the first metric; leave stop.metric out"
                )
            return
        if self.test is None and not self.are_refused:
            return
        client, why = next(iter(self.without_validation.items()), (None, "there is none"))
        says = why if client is None else f"client {client}: {why}"
        raise ConfigError(
            f"round {number}: {needs} needs scores on validation data, and no client has sent any "
            f"({says}); let clients have validation data, such as by data.validation_fraction = "
            "0.2, or leave the setting out"
        )


def evaluate_round(
    algorithm: Algorithm,
    backend: Backend,
    clients: ComingAndGoing,
    state: State,
    settings: RunSettings,
    number: int,
) -> RoundScores:
    """Evaluate clients after a round, with the models that are deployed to them.

    Parameters
    ----------
    algorithm
        The algorithm, which chooses the model of each client.
    backend
        The backend of the run.
    clients
        The clients of the round.
    state
        State of the algorithm after the round.
    settings
        Settings of the run.
    number
        Number of the round, from 1.
    """
    served = algorithm.serve(state, clients)
    asked = panel(state.tree, clients.ids, settings.evaluate_clients, settings.seed)
    models, rows = state.tree.models([served[client] for client in asked], served=True)
    own = set(algorithm.keepers(state))
    rows = [OWN if client in own else row for client, row in zip(asked, rows, strict=True)]
    together = _together(algorithm, state)
    if together:
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
        served,
        success=success,
        without_validation=without_validation,
    )


def panel(tree: ParameterTree, ids: Sequence[int], most: int | None, seed: int) -> Sequence[int]:
    """Return the clients to evaluate.

    Parameters
    ----------
    tree
        The clusters.
    ids
        All clients.
    most
        Number of clients to evaluate; None for all. The seed draws them, and clients that are in a
        cluster come before others.
    seed
        Seed of the run.
    """
    if most is None or most >= len(ids):
        return ids
    order = rng.generator(seed, "evaluated clients").permutation(len(ids)).tolist()
    held = {client for leaf in tree.leaves for client in leaf.members}
    # The sort is stable: clients in a cluster come first, in both groups in random order.
    drawn = sorted(order, key=lambda place: ids[place] not in held)[:most]
    return [ids[place] for place in sorted(drawn)]


def _together(algorithm: Algorithm, state: State) -> dict[str, Any]:
    """Return the mixture to evaluate with as keyword argument; empty if the algorithm has none."""
    mixture = algorithm.mixture(state)
    return {} if mixture is None else {"mixture": mixture}


def _warn_of_losses(number: int, evaluation: Evaluation) -> None:
    finite = evaluation.losses.isfinite().tolist()
    told = [
        not holds and c not in evaluation.without_loss
        for c, holds in zip(evaluation.ids, finite, strict=True)
    ]
    if bad := [client for client, is_bad in zip(evaluation.ids, told, strict=True) if is_bad]:
        _log.warning(
            "round %d: the test losses of %d of %d clients are NaN or infinite, first of client "
            "%d; if training diverged, lower local.lr",
            number,
            len(bad),
            len(evaluation.ids),
            bad[0],
        )
