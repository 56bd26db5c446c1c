"""A method that serves every client with the model that suits it best: from one for all to its own.

Most federations of real data have no clear groups of clients: all clients differ, by more or less.
What a client should be served with then depends on the client. This method therefore trains several
candidates, which form a ladder from general to special:

1. *one model*, trained by all clients;
2. the model of the client's *cluster*, as replicated clustering finds it
   (:mod:`fedclade.algorithms.rcfl`);
3. a *personal head*: the cluster's model, whose last layer the client has trained on its own data;
4. a *fine-tuned* copy of the model for all clients, or of the cluster's model;
5. the client's *own* model: a copy of the cluster's model that the client has then trained alone
   for several rounds.

Losses on validation data decide which client is served with which candidate
(:mod:`fedclade.algorithms.auto.choice`).

**Cost.** The candidates share their training: personal models start from models that exist. The
number of training steps of all clients together stays below ``budget`` times that of FedAvg. To
this end the candidates other than the clusters' models are trained as far as the budget allows, in
this order: the copies of the last round, the model for all clients (by a quarter of the clients in
each round), and own models, whose training begins in the earliest round from which on it can
continue to the end. In the second half of a run, a candidate that serves few clients, and from which
little improvement is expected, is trained no further. Own models then train twice in a round as
long as the budget allows, until they have been trained as often as with training alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from fedclade.algorithms.auto.budget import CountingClients
from fedclade.algorithms.auto.choice import Choice, Losses, choose_candidates
from fedclade.algorithms.base import Algorithm, RoundLog, sample
from fedclade.algorithms.fallback import train_beside
from fedclade.algorithms.rcfl.method import (
    EARLY_ROUNDS,
    ReplicatedCFL,
    ReplicatedState,
    populated_leaves,
)
from fedclade.algorithms.requires import EvaluatedModels, Requires, RunFacts
from fedclade.clustering import Assignment
from fedclade.core import (
    KEEPS_NONE,
    OWN,
    Clients,
    ClientWork,
    ConfigError,
    Evaluation,
    Event,
    FromStored,
    LastLayer,
    LocalModel,
    LocalTraining,
    NoReply,
    ParameterTree,
    Round,
    RoundPlan,
    Served,
    Splits,
    checked,
    count_steps,
    require,
)

if TYPE_CHECKING:
    from torch import Tensor

REVIEW_EVERY = 6
"""Number of rounds between reviews, in which models are chosen even if the round is not evaluated."""

SHARE_BESIDE = 0.25
"""Share of each cluster's clients that train the model for all clients in a round."""

LEAST_OWN_ROUNDS = 3
"""Number of rounds for which own models are trained before a review may give them up."""

LEAST_IMPROVEMENT = 0.01
"""Smallest improvement for which a candidate is trained on: 0.01 is a loss that is 1 % lower."""

FEW_SERVED = 0.125
"""Share of the clients up to which a model that several clients share is said to serve few."""


class Rung(IntEnum):
    """Candidates for a client, from general to special."""

    ONE_MODEL = 0
    CLUSTER = 1
    HEAD = 2
    TUNED_ONE = 3
    TUNED = 4
    OWN = 5


COPIES = (Rung.TUNED, Rung.HEAD, Rung.TUNED_ONE)
"""Candidates that are made only when models are chosen, in the order in which they are preferred if
the budget does not suffice for all of them."""

MODEL_KINDS: Mapping[Rung, str] = {
    Rung.ONE_MODEL: "one model",
    Rung.CLUSTER: "cluster",
    Rung.HEAD: "personal head",
    Rung.TUNED_ONE: "fine-tuned one model",
    Rung.TUNED: "fine-tuned",
    Rung.OWN: "own",
}
"""Names of the candidates in events and reports."""

PERSONAL = (Rung.HEAD, Rung.TUNED_ONE, Rung.TUNED, Rung.OWN)
"""Candidates that a client stores itself."""


@dataclass(frozen=True, eq=False)
class AutoState(ReplicatedState):
    """State of the method between rounds.

    Parameters
    ----------
    steps, steps_of_fedavg
        Number of training steps of all clients so far, and the number that FedAvg would have taken.
    own
        Ids of the clients that store an own model.
    clients, rungs, gains
        Ids of the clients for which a model was chosen, the rung of each client's model, and the
        logarithm of the ratio of the validation losses with the common rung and with this rung, as
        estimated; NaN for a client that has sent no losses.
    common
        The rung that suits all clients best together.
    own_rounds
        Number of times that clients have trained their own models for a round.
    beside_stopped, own_stopped
        Whether the model for all clients, and own models, are trained no further.
    shared_stopped
        Whether the clusters' models, too, are trained no further: until the next review, or until
        the clients' data changes.
    stage
        Stage of the clients' data at the last review.
    """

    steps: int = 0
    steps_of_fedavg: int = 0
    own: tuple[int, ...] = ()
    clients: tuple[int, ...] = ()
    rungs: tuple[int, ...] = ()
    gains: tuple[float, ...] = ()
    common: int = 0
    own_rounds: int = 0
    beside_stopped: bool = False
    own_stopped: bool = False
    shared_stopped: bool = False
    stage: int = 0

    @property
    def rung_of(self) -> dict[int, Rung]:
        """Rung of each client's model, for the clients for which a model was chosen."""
        return {client: Rung(rung) for client, rung in zip(self.clients, self.rungs, strict=True)}


@dataclass(frozen=True, kw_only=True)
class _Clusters(ReplicatedCFL):
    """Replicated clustering whose model for all clients is trained by a part of each cohort."""

    def _train_beside(
        self, tree: ParameterTree, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> Tensor:
        return train_beside(tree, draw_part(tree, cohort, this_round), clients, this_round)


def draw_part(tree: ParameterTree, cohort: Sequence[int], this_round: Round) -> tuple[int, ...]:
    """Draw the clients of a cohort that train the model for all clients: a share of each cluster.

    Parameters
    ----------
    tree
        The clusters.
    cohort
        Ids of the clients sampled for the round.
    this_round
        The round, which seeds the draw.
    """
    draw = this_round.generator("clients for one model")
    drawn: list[int] = []
    for leaf in tree.leaves:
        members = [client for client in cohort if tree.leaf_of[client] == leaf.id]
        if members:
            drawn += sample(members, SHARE_BESIDE, draw)
    return tuple(sorted(drawn))


@checked()
@dataclass(frozen=True, kw_only=True)
class Auto(Algorithm[AutoState]):
    """Serve each client with the best of one model, its cluster's model, and personal models.

    Clusters are found by replicated clustering (``rcfl``). Losses on validation data decide which
    client is served with which model, so clients need validation data
    (``data.validation_fraction``).

    Parameters
    ----------
    budget
        Largest number of training steps of all clients together, as a multiple of FedAvg's, at
        least 1. With less budget there are fewer candidates; the training of the clusters'
        models and the checks of the clusters are not limited.
    level
        Upper bound on the probability that clients which all have the same distribution are ever
        separated, in (0, 1); as for ``rcfl``.
    check_every
        Number of rounds between occasions for later checks of the clusters.
    sharing, sample
        As for ``rcfl``.

    Raises
    ------
    ConfigError
        If options are out of range; one line for each of them.
    """

    state_type = AutoState

    budget: float = 2.5
    level: float = 0.01
    check_every: int = 14
    sharing: float = 0.1
    sample: int = 32

    def __post_init__(self) -> None:
        require(("algorithm.budget", self.budget, self.budget >= 1, "at least 1"))
        self._clusters(beside=True)  # checks the other options

    @property
    def requires(self) -> Requires:
        """Needs of the method that a run checks: those of ``rcfl``, and personal models."""
        return replace(self._clusters(beside=True).requires, own_models=True, plans_rounds=True)

    def _clusters(self, *, beside: bool) -> _Clusters:
        """Return the method that finds and trains the clusters.

        Parameters
        ----------
        beside
            Whether the model for all clients is trained, too.
        """
        return _Clusters(
            level=self.level,
            check_every=self.check_every,
            sharing=self.sharing,
            sample=self.sample,
            fallback=beside,
        )

    def check(self, run: RunFacts) -> Sequence[str]:
        """Return the warnings of ``rcfl``."""
        return self._clusters(beside=True).check(run)

    def init(self, params: Tensor, clients: Clients) -> AutoState:
        """Return the state before round 1: one cluster, and no personal models."""
        state = self._clusters(beside=True).init(params, clients)
        return AutoState(
            state.tree, parts=state.parts, part_size=state.part_size, initial=state.initial
        )

    def step(
        self, state: AutoState, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[AutoState, RoundLog]:
        """Run one round of ``rcfl``, train further candidates, and choose models if this is due."""
        steps = _RoundSteps.of(cohort, clients, this_round)
        if state.shared_stopped and clients.stage == state.stage:
            log = RoundLog({}, {})
        else:
            state = replace(state, shared_stopped=False)
            state, log = self._train_clusters(state, cohort, clients, steps, this_round)
        state = replace(state, steps_of_fedavg=state.steps_of_fedavg + steps.of_cohort)
        is_due = this_round.evaluated or this_round.number % REVIEW_EVERY == 0
        if is_due:
            state, losses, events = self._review(state, cohort, clients, steps, this_round)
            log = replace(log, events=(*log.events, *events))
        else:
            passes = self._count_own_passes(state, steps, this_round)
            state, losses = self._train_own(state, cohort, clients, this_round, passes)
        # If no clusters were trained, the round's training losses are those of the own models.
        return state, replace(log, losses=log.losses or losses)

    def _train_clusters(
        self,
        state: AutoState,
        cohort: Sequence[int],
        clients: Clients,
        steps: _RoundSteps,
        this_round: RoundPlan,
    ) -> tuple[AutoState, RoundLog]:
        """Run one round of ``rcfl``, in which the model for all clients may be trained, too."""
        counting = CountingClients(clients)
        beside = self._trains_beside(state, steps, this_round)
        inner, log = self._clusters(beside=beside).step(state, cohort, counting, this_round)
        assert isinstance(inner, AutoState)
        inner = _continue_with_last_cluster(inner)
        return replace(inner, steps=inner.steps + counting.steps), log

    def tune(self, state: AutoState, clients: Clients, this_round: RoundPlan) -> AutoState:
        """Choose a model for each client, in a last round that was not planned to be evaluated."""
        steps = _RoundSteps.of(clients.ids, clients, this_round)
        # Making copies would replace the clients' own models, which are not trained again here.
        copies = () if state.own else self._choose_copies(state, steps, this_round)
        counting = CountingClients(clients)
        made = self._make_copies(state, counting, this_round, copies)
        state = replace(state, steps=state.steps + counting.steps)
        return self._choose(state, clients, this_round, made)

    def tuning_events(self, state: AutoState) -> Sequence[Event]:
        """Return the event that reports the choice of models."""
        return _report(state)

    def models_for(self, state: AutoState, clients: Clients) -> EvaluatedModels:
        """Return the chosen model of each client: of the root, of its cluster, or its own."""
        nodes = dict(state.tree.leaf_of)
        for client, rung in state.rung_of.items():
            if rung == Rung.ONE_MODEL and client in nodes:
                nodes[client] = 0
        return EvaluatedModels(nodes=nodes, own=state.keepers)

    def join(
        self, state: AutoState, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[AutoState, list[Event]]:
        """Add clients that join during a run to the tree of clusters, as in ``rcfl``."""
        joined, events = self._clusters(beside=True).join(state, ids, clients, this_round)
        assert isinstance(joined, AutoState)
        return joined, events

    def assign(
        self, tree: ParameterTree, ids: Sequence[int], clients: Clients, this_round: Round
    ) -> Sequence[Assignment]:
        """Find the clusters of a finished run that suit new clients, as in ``rcfl``."""
        return self._clusters(beside=True).assign(tree, ids, clients, this_round)

    # Budget

    def _compute_spare(
        self, state: AutoState, steps: _RoundSteps, this_round: RoundPlan, *, is_before: bool
    ) -> float:
        """Return the number of steps that can be added now, so that the budget holds at the end.

        Steps that are needed for the clusters, for their checks and for the copies of the last
        round are reserved.

        Parameters
        ----------
        state
            The state.
        steps
            Numbers of steps in a round.
        this_round
            The round.
        is_before
            Whether the clusters have not been trained in this round yet.
        """
        last = this_round.rounds or this_round.number
        first = this_round.number if is_before else this_round.number + 1
        left = max(0, last - first + 1)
        total = self.budget * (state.steps_of_fedavg + left * steps.of_cohort)
        of_copies = self._count_reserved(state, steps)
        if state.shared_stopped:
            return total - state.steps - of_copies
        checks = sum(
            number % self.check_every == 0
            for number in range(max(first, EARLY_ROUNDS + 1), last + 1)
        )
        of_clusters = left * steps.of_cohort
        if state.parts and len(state.tree.nodes) == 1 and first <= EARLY_ROUNDS:
            early = min(last, EARLY_ROUNDS) - first + 1
            of_clusters += early * (steps.in_splits(state.parts, state.part_size) - steps.of_all)
        of_checks = checks * steps.in_splits(max(2, state.parts), state.part_size)
        return total - state.steps - of_clusters - of_checks - of_copies

    def _count_reserved(self, state: AutoState, steps: _RoundSteps) -> int:
        """Return the number of steps that are reserved for the last round.

        In the last round clients make up to three copies, and may make one of them again. Clients
        outside of the cohort train their own models, too.
        """
        copies = 4 if _has_clusters(state.tree) and not state.beside_stopped else 3
        of_own = steps.of_all - steps.of_cohort if state.own_rounds else 0
        return copies * steps.of_all + of_own

    def _trains_beside(self, state: AutoState, steps: _RoundSteps, this_round: RoundPlan) -> bool:
        """Return whether the model for all clients is trained in this round.

        Before the first review the budget has to suffice for the round; later, for all rounds until
        the end of the run. While there is one cluster, its model is the model for all clients, and
        this costs nothing.
        """
        if not _has_clusters(state.tree):
            return True
        if state.beside_stopped:
            return False
        last = this_round.rounds or this_round.number
        rounds = last - this_round.number + 1 if this_round.number > REVIEW_EVERY else 1
        spare = self._compute_spare(state, steps, this_round, is_before=True)
        return spare >= rounds * SHARE_BESIDE * steps.of_cohort

    def _count_own_passes(self, state: AutoState, steps: _RoundSteps, this_round: RoundPlan) -> int:
        """Return how often clients train their own models in this round: 0, 1 or 2 times.

        The training begins in the earliest round from which on the budget suffices for all rounds
        until the end of the run, and in which the model for all clients can be trained as well. So
        own models have usually been trained less often than with training alone. In the second half
        of a run they catch up with it as far as the budget allows.
        """
        if state.own_stopped or this_round.number <= EARLY_ROUNDS:
            return 0
        last = this_round.rounds or this_round.number
        rounds = last - this_round.number + 1
        spare = self._compute_spare(state, steps, this_round, is_before=False)
        if _has_clusters(state.tree) and not (state.beside_stopped or state.shared_stopped):
            spare -= (rounds - 1) * SHARE_BESIDE * steps.of_cohort
        of_all_rounds = rounds * steps.of_cohort
        if spare < (steps.of_cohort if state.own_rounds else of_all_rounds):
            return 0
        is_late = 2 * this_round.number >= last
        is_behind = 0 < state.own_rounds < this_round.number - 1
        return 2 if is_late and is_behind and spare >= of_all_rounds + steps.of_cohort else 1

    def _choose_copies(
        self, state: AutoState, steps: _RoundSteps, this_round: RoundPlan, reserved: int = 0
    ) -> tuple[Rung, ...]:
        """Return the copies that the budget still allows in the last round.

        ``reserved`` is the number of steps that clients take for their own models in this round.
        """
        possible = [rung for rung in COPIES if rung != Rung.TUNED_ONE]
        if _has_clusters(state.tree) and not state.beside_stopped:
            possible.append(Rung.TUNED_ONE)
        spare = self._compute_spare(state, steps, this_round, is_before=False) - reserved
        spare += self._count_reserved(state, steps)
        count = int(spare / steps.of_all) - 1  # a client may have to make a copy again
        return tuple(possible[: max(0, count)])

    # Training and choice of candidates

    def _train_own(
        self,
        state: AutoState,
        ids: Sequence[int],
        clients: Clients,
        this_round: RoundPlan,
        passes: int,
    ) -> tuple[AutoState, Mapping[int, float]]:
        """Let clients train their own models.

        The first training of an own model starts from the model of the client's cluster, and trains
        only the last layer: a last layer that does not fit the client's data would change the other
        layers for the worse (Kumar et al. 2022).

        Parameters
        ----------
        state
            The state.
        ids
            Ids of the clients.
        clients
            All clients of the run.
        this_round
            The round.
        passes
            How often each client trains its model as long as in a round. With 0 nothing happens.

        Returns
        -------
        tuple
            The next state, and the mean training loss of each client that has trained its model.
        """
        if not passes:
            return state, {}
        counting = CountingClients(clients)
        stored = set(state.own)
        models, rows = state.tree.models([state.tree.leaf_of[client] for client in ids])
        starts = [OWN if client in stored else row for client, row in zip(ids, rows, strict=True)]
        work = ClientWork(start=FromStored(), store=LocalModel(), reply=NoReply())
        if not state.own_rounds:
            work = replace(work, steps=LastLayer())
        longer = replace(this_round, local=this_round.local.repeated(passes))
        updates = counting.train(ids, models, starts, longer, work, sent_before=True)
        lost = {client for client, why in updates.left_out.items() if why.startswith(KEEPS_NONE)}
        state = replace(
            state,
            own=tuple(sorted({*state.own, *updates.ids} - lost)),
            own_rounds=state.own_rounds + passes,
            steps=state.steps + counting.steps,
        )
        return state, dict(zip(updates.ids, updates.losses.tolist(), strict=True))

    def _review(
        self,
        state: AutoState,
        cohort: Sequence[int],
        clients: Clients,
        steps: _RoundSteps,
        this_round: RoundPlan,
    ) -> tuple[AutoState, Mapping[int, float], list[Event]]:
        """Train own models, choose a model for each client, and give up candidates nobody needs.

        Returns
        -------
        tuple
            The next state, the mean training loss of each client that has trained its own model,
            and the events.
        """
        is_last = this_round.number == this_round.rounds
        # Clients outside of the cohort train own models only in the last round; some may have left.
        with_own = set(state.own).intersection(clients.ids)
        ids = tuple(sorted({*cohort, *with_own})) if is_last else tuple(cohort)
        passes = self._count_own_passes(state, steps, this_round)
        copies: tuple[Rung, ...] = ()
        if is_last:
            # Own models are never older than the copies with which they are compared.
            if not passes and state.own_rounds and not state.own_stopped:
                passes = 1
            reserved = passes * count_steps(ClientWork(), steps.local, steps.sizes, ids)
            copies = self._choose_copies(state, steps, this_round, reserved)
        # A copy replaces the client's own model. Clients train their own models after that, from
        # the state before the round, and so have them again.
        counting = CountingClients(clients)
        made = self._make_copies(state, counting, this_round, copies)
        state = replace(state, steps=state.steps + counting.steps)
        replaced = {client for copy in made.values() for client in copy.ids}
        kept = set(state.own) - replaced
        state, losses = self._train_own(state, ids, clients, this_round, passes)
        kept = set(state.own) & (kept | set(losses))
        state = replace(state, own=tuple(sorted(kept)))
        state = self._choose(state, clients, this_round, made)
        return state, losses, _report(state)

    def _make_copies(
        self, state: AutoState, clients: Clients, this_round: Round, copies: Sequence[Rung]
    ) -> dict[Rung, _Copy]:
        """Let all clients make copies of models, one after the other, and evaluate each of them.

        Only the last copy stays with the client.
        """
        made: dict[Rung, _Copy] = {}
        for rung in copies:
            ids = make_copy(state.tree, rung, clients.ids, clients, this_round)
            made[rung] = _Copy(ids, _evaluate_own(ids, state.tree, clients))
        return made

    def _choose(
        self, state: AutoState, clients: Clients, this_round: RoundPlan, made: Mapping[Rung, _Copy]
    ) -> AutoState:
        """Choose a model for each client by validation losses; return the next state.

        Parameters
        ----------
        state
            The state.
        clients
            All clients of the run.
        this_round
            The round.
        made
            Copies that clients have made in this round, in this order.
        """
        answers = {rung: copy.answer for rung, copy in made.items()}
        tree = state.tree
        answers[Rung.ONE_MODEL] = _evaluate_nodes(dict.fromkeys(clients.ids, 0), tree, clients)
        if _has_clusters(tree):
            answers[Rung.CLUSTER] = _evaluate_nodes(tree.leaf_of, tree, clients)
        if state.own:
            present = set(clients.ids)
            ids = [client for client in state.own if client in present]
            answers[Rung.OWN] = _evaluate_own(ids, tree, clients)
        rungs = sorted(answers)
        first = answers[rungs[0]]
        if not first.ids:
            if not state.clients:
                _check_left_out(first, this_round)
            return _forget_choice(state, {c for copy in made.values() for c in copy.ids})
        losses = Losses.of([answers[rung] for rung in rungs])
        choice = choose_candidates(losses)
        chosen = {
            client: rungs[k] for client, k in zip(losses.ids, choice.chosen.tolist(), strict=True)
        }
        # The last personal model that each client has made is the one that it stores.
        stored = {client: rung for rung, copy in made.items() for client in copy.ids}
        stored |= dict.fromkeys(state.own, Rung.OWN)
        default = rungs[choice.common] if rungs[choice.common] not in PERSONAL else rungs[0]
        counting = CountingClients(clients)
        for rung in made:
            again = [c for c in chosen if chosen[c] == rung and stored[c] != rung]
            if again:
                found = make_copy(tree, rung, again, counting, this_round)
                # Clients that did not reply this time do not have the copy any more.
                chosen |= dict.fromkeys(set(again).difference(found), default)
        gains = {
            client: float(choice.gains[row, rungs.index(chosen[client])])
            for row, client in enumerate(losses.ids)
        }
        for client in clients.ids:
            chosen.setdefault(client, default)
        ids = tuple(sorted(chosen))
        state = replace(
            state,
            clients=ids,
            rungs=tuple(int(chosen[client]) for client in ids),
            gains=tuple(gains.get(client, np.nan) for client in ids),
            common=int(rungs[choice.common]),
            keepers=tuple(client for client in ids if chosen[client] in PERSONAL),
            steps=state.steps + counting.steps,
        )
        if _is_review(this_round):
            state = replace(_give_up(state, choice, rungs), stage=clients.stage)
        return state


def make_copy(
    tree: ParameterTree, rung: Rung, ids: Sequence[int], clients: Clients, this_round: Round
) -> tuple[int, ...]:
    """Let clients make and store a copy of a model; return the ids of the clients that did.

    Parameters
    ----------
    tree
        The clusters with their models.
    rung
        Which copy: ``TUNED_ONE`` trains the model for all clients, ``TUNED`` the cluster's model,
        and ``HEAD`` the last layer of the cluster's model.
    ids
        Ids of the clients.
    clients
        All clients of the run.
    this_round
        Number, seed and local training of the round.
    """
    nodes = [0 if rung == Rung.TUNED_ONE else tree.leaf_of[client] for client in ids]
    models, rows = tree.models(nodes, served=True)
    work = ClientWork(start=FromStored(latest=True), store=LocalModel(state=False), reply=NoReply())
    if rung == Rung.HEAD:
        work = replace(work, steps=LastLayer())
    tuning = replace(this_round, purpose="finetune")
    return clients.train(ids, models, rows, tuning, work, sent_before=True).ids


def _evaluate_nodes(nodes: Mapping[int, int], tree: ParameterTree, clients: Clients) -> Evaluation:
    """Evaluate a node's model for each client on its validation data."""
    ids = [client for client in clients.ids if client in nodes]
    models, rows = tree.models([nodes[client] for client in ids], served=True)
    return clients.evaluate(ids, models, rows, "validation")


def _evaluate_own(ids: Sequence[int], tree: ParameterTree, clients: Clients) -> Evaluation:
    """Evaluate the personal models that clients store on their validation data."""
    return clients.evaluate(ids, tree.nodes[0].model[None], [OWN] * len(ids), "validation")


def _check_left_out(answer: Evaluation, this_round: Round) -> None:
    """Check that clients could have reported scores on validation data.

    Raises
    ------
    ConfigError
        If no client has validation data, or all policies forbid the scores.
    """
    reasons = list(answer.left_out.items())
    if not reasons:
        return
    client, why = reasons[0]
    raise ConfigError(
        f"round {this_round.number}: the algorithm auto chooses models by scores on validation "
        f"data, but no client has sent any (client {client}: {why}); give clients validation data, "
        "for example by data.validation_fraction = 0.2, or use the algorithm rcfl"
    )


def _is_review(this_round: RoundPlan) -> bool:
    """Return whether candidates may be given up in this round.

    In the first half of a run it is too early: a model may still learn more slowly than others, and
    be better in the end.
    """
    number, rounds = this_round.number, this_round.rounds or 0
    return number % REVIEW_EVERY == 0 and number != rounds and 2 * number >= rounds


def _give_up(state: AutoState, choice: Choice, rungs: Sequence[Rung]) -> AutoState:
    """Return the state in which candidates that suit hardly any client are trained no further.

    Models that are trained no further remain candidates, except for own models, which stop only if
    they serve no client.

    Parameters
    ----------
    state
        The state.
    choice
        The choice of models in this round.
    rungs
        The candidates in the choice.
    """
    served = [rungs[k] for k in choice.chosen.tolist()]

    def is_hopeless(rung: Rung, most_served: float) -> bool:
        if rung not in rungs or served.count(rung) > most_served:
            return False
        return choice.expect_improvement(rungs.index(rung)) < LEAST_IMPROVEMENT

    has_clusters = _has_clusters(state.tree)
    has_tried = state.own_rounds >= LEAST_OWN_ROUNDS
    gives_up_own = state.own_stopped or (has_tried and is_hopeless(Rung.OWN, 0))
    few = FEW_SERVED * len(served)
    gives_up_one = state.beside_stopped or (has_clusters and is_hopeless(Rung.ONE_MODEL, few))
    shared = Rung.CLUSTER if has_clusters else Rung.ONE_MODEL
    gives_up_shared = (
        has_tried
        and not gives_up_own
        and (gives_up_one or not has_clusters)
        and is_hopeless(shared, few)
    )
    return replace(
        state,
        beside_stopped=gives_up_one,
        own_stopped=gives_up_own,
        own=() if gives_up_own else state.own,
        shared_stopped=gives_up_shared,
    )


def _forget_choice(state: AutoState, clients: Collection[int]) -> AutoState:
    """Return the state in which no model is chosen for some clients.

    They are served with their clusters' models.
    """
    kept = [place for place, client in enumerate(state.clients) if client not in clients]
    return replace(
        state,
        clients=tuple(state.clients[place] for place in kept),
        rungs=tuple(state.rungs[place] for place in kept),
        gains=tuple(state.gains[place] for place in kept),
        keepers=tuple(client for client in state.keepers if client not in clients),
    )


def _report(state: AutoState) -> list[Event]:
    """Return the event that reports which client is served with which model, and why.

    Clients that have sent no losses are left out. Without any losses there is no event.
    """
    gains = {
        client: gain
        for client, gain in zip(state.clients, state.gains, strict=True)
        if not np.isnan(gain)
    }
    if not gains:
        return []
    rung_of = state.rung_of
    clients: dict[str, tuple[int, ...]] = {}
    for rung in sorted({rung_of[client] for client in gains}):
        clients[MODEL_KINDS[rung]] = tuple(client for client in gains if rung_of[client] == rung)
    lower = {client: round(float(-np.expm1(-gain)), 4) for client, gain in gains.items()}
    return [Served(0, common=MODEL_KINDS[Rung(state.common)], clients=clients, gains=lower)]


def _continue_with_last_cluster(state: AutoState) -> AutoState:
    """Return the state in which the model of a single cluster is the model for all clients.

    The model for all clients is old if it was not trained while there were several clusters.
    """
    populated = populated_leaves(state.tree)
    if len(state.tree.nodes) == 1 or len(populated) > 1:
        return state
    return replace(state, tree=state.tree.continued(populated[0].params))


@dataclass(frozen=True, eq=False)
class _Copy:
    """Copies of models that clients have made and stored, with their validation scores."""

    ids: tuple[int, ...]
    answer: Evaluation


def _has_clusters(tree: ParameterTree) -> bool:
    """Return whether the tree has more than one cluster with members."""
    return len(populated_leaves(tree)) > 1


@dataclass(frozen=True)
class _RoundSteps:
    """Numbers of training steps, of all clients together, in a round.

    Parameters
    ----------
    of_cohort
        Steps if the sampled clients train once.
    of_all
        Steps if all clients train once.
    local
        Settings of local training.
    sizes
        Number of training examples of each client.
    """

    of_cohort: int
    of_all: int
    local: LocalTraining
    sizes: Mapping[int, int]

    @classmethod
    def of(cls, cohort: Sequence[int], clients: Clients, this_round: Round) -> _RoundSteps:
        """Count the steps of a round, given the ids of the clients sampled for it."""
        local, sizes = this_round.local, clients.sizes
        of_cohort = count_steps(ClientWork(), local, sizes, cohort)
        of_all = count_steps(ClientWork(), local, sizes, clients.ids)
        return cls(of_cohort, of_all, local, sizes)

    def in_splits(self, count: int, size: int) -> int:
        """Return the number of steps if all clients train on ``count`` splits of their data."""
        work = ClientWork(data=Splits(count, size))
        return count_steps(work, self.local, self.sizes, list(self.sizes))
