"""Replicated clustering: clustered federated learning without thresholds.

Clients make several updates at one model, each from a part of their data; from what the parts have in common the server
knows which clusters there are, and whether they are real. The tree is a star, since all clients are looked at at once:
a check splits clusters, merges them, and moves single clients.

- In the first three rounds everybody trains on equal parts of its data, and the model moves by the mean of the parts'
  updates. Those of the third are tested (:mod:`fedclade.clustering.part_test`), which costs nothing more, and the
  clients go apart into the clusters found; if they are few, these are looked into in the round after
  (:mod:`fedclade.algorithms.replicated_splits`). If not all clients take part in a round, all are asked in the first,
  which is tested then. If these are more than a thousand, nobody is asked but the cohort, from the first round to the
  last (:mod:`fedclade.algorithms.replicated_cohorts`), and nothing of what follows is done.
- Later on, every now and then, a check asks everybody: in turn for updates from two halves of the data, at the mean of
  the clusters' models (:mod:`fedclade.clustering.split_half`), and for those of the same equal parts at the initial
  model. These are the same as in the first round unless some client's data changed; then they are tested again.
- Half of the level is for the first rounds, a quarter for halves, and a quarter for parts that have changed: the j-th
  test of a kind has 1/(j(j + 1)) of it, which add up to all of it. So the chance that clients of one distribution are
  ever parted is at most the level, however long the run. Parts that have not changed are not tested, and take nothing
  of it. Inside clusters that were found, each test but that of a second look has the whole level.
- Clusters that there are already stay unless others gain more; if they gain nothing any more, they become one again.
- A new cluster goes on from the models of the clusters most of whose members it has, by the number of these; if there
  is none, from that of the cluster that most of its members come from. For a while new ones are drawn together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from fedclade.algorithms.base import Algorithm, RoundLog
from fedclade.algorithms.cluster_update import ClusterUpdate, log_of, move_clusters, place_stragglers, train_clusters
from fedclade.algorithms.fallback import LEAF, ROOT, best_on_validation, keep_better, train_beside
from fedclade.algorithms.replicated_checks import (
    HALVES,
    Parting,
    ReplicatedState,
    Verdict,
    by_halves,
    by_parts,
    clusters_of,
    cosines_of,
    drawn_together,
    joint_model,
    regrouped,
    too_few,
)
from fedclade.algorithms.replicated_cohorts import CohortTests, cohort_round
from fedclade.algorithms.replicated_splits import just_apart, look_inside
from fedclade.clustering import same_partition
from fedclade.core import (
    Checked,
    Clients,
    Event,
    Node,
    ParameterTree,
    Regrouped,
    Round,
    Tested,
    Updates,
    checked,
    require,
)

EARLY_ROUNDS = 3
"""In parts: some clusters, such as swapped labels, are told once labels were learnt."""

MANY_CLIENTS = 1000
"""More are not asked all at once where a round has only some of them."""

FEW_CLIENTS = 12
"""With fewer than so many, shuffling clients has too few outcomes, and all checks are by parts."""

MOST_EXTRA = 0.15
"""Share of the training so far that checks may add to it, where only some clients take part in a round."""


@checked()
@dataclass(frozen=True, kw_only=True)
class ReplicatedCFL(Algorithm[ReplicatedState]):
    """Clusters found by updates from parts of the clients' data.

    Parameters
    ----------
    level
        The chance of parting clients that all have one distribution, over the whole run.
    check_every
        Rounds between later checks, each of which costs every client the training of a round: by default they add a
        seventh. Where only some clients take part in a round, those that would add more than 15 % are left out.
    fallback
        Once there are clusters train a model for all beside theirs, and serve each client with that which validation
        data speaks for (:mod:`fedclade.algorithms.fallback`), so that clients fare at least about as well as with
        FedAvg where clusters that differ are better off together. From the first split on it takes twice the training
        and the bytes, and of private clients twice the releases.
    personalize
        In rounds that are evaluated each client fine-tunes its cluster's model by a round of local training, and keeps
        it for itself where validation data says that it is the better one; with ``fallback`` it may be the model for
        all that it fine-tunes (:mod:`fedclade.algorithms.fallback`). Clusters stay as they are without.
    sample
        Where a round has only some of more than a thousand clients: so many of its clients, at most, are tested
        (:mod:`fedclade.algorithms.replicated_cohorts`). The more there are, the finer are the differences found.
    sharing
        After each round the models of new clusters move a share of the way to their mean: this one in the round in
        which they were found, a tenth less in each further one. Not done where nobody is asked but the cohort.
    """

    state_type = ReplicatedState

    level: float = 0.01
    check_every: int = 7
    fallback: bool = False
    personalize: bool = False
    sample: int = 32
    sharing: float = 0.1

    def __post_init__(self) -> None:
        require(
            ("algorithm.level", self.level, 0 < self.level < 1, "greater than 0 and less than 1"),
            ("algorithm.check_every", self.check_every, self.check_every >= 1, "at least 1"),
            ("algorithm.sample", self.sample, self.sample >= 2, "at least 2"),
            ("algorithm.sharing", self.sharing, 0 <= self.sharing < 1, "at least 0 and less than 1"),
        )

    @property
    def needs_updates(self) -> bool:
        """Whether a step works on the updates of single clients."""
        return False

    def asks(self, clients: int, fraction: float) -> str:
        """Return what clients report besides updates: of many, a cohort tells losses of the clusters' models."""
        return "training losses" if clients > MANY_CLIENTS and fraction < 1 else ""

    def too_short(self, rounds: int) -> str:
        """Return what a run of so few rounds misses: to go apart."""
        if rounds >= EARLY_ROUNDS:
            return ""
        needed = f"rcfl lets clients go apart after {EARLY_ROUNDS} rounds, and this run has {rounds}"
        return f"{needed}: it will be federated averaging; set more rounds"

    def init(self, params: Tensor, clients: Clients) -> ReplicatedState:
        """Put all clients in one cluster, and choose the parts of their data."""
        state = ReplicatedState(ParameterTree.root_only(clients.ids, params))
        parting = Parting.to_test("rcfl", clients, self.level)
        if parting is None:
            return state
        return replace(state, parts=parting.parts, part_size=parting.size, initial=params.clone())

    def step(
        self, state: ReplicatedState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[ReplicatedState, RoundLog]:
        """Run a round of federated learning in every cluster; then make the models of the clients' own."""
        state, log = self._round(state, cohort, clients, this_round)
        if self.personalize:
            state = self.tuned(state, clients, this_round) if this_round.evaluated else replace(state, keepers=())
        return state, log

    def tuned(self, state: ReplicatedState, clients: Clients, this_round: Round) -> ReplicatedState:
        """Return the state after clients have fine-tuned models of their own, if the method is to have any."""
        if not self.personalize:
            return state
        starts = (ROOT, LEAF) if self.fallback and len(_clusters(state.tree)) > 1 else (LEAF,)
        return replace(state, keepers=keep_better(state.tree, starts, clients, this_round))

    def keepers(self, state: ReplicatedState) -> Sequence[int]:
        """Return the clients that keep a model of their own, and are served with that."""
        return state.keepers

    def _round(
        self, state: ReplicatedState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[ReplicatedState, RoundLog]:
        """Train: at first in parts, and now and then after a check."""
        number, together = this_round.number, len(state.tree.nodes) == 1
        if number == 1 and len(cohort) < len(state.tree.leaf_of) > MANY_CLIENTS:
            parting = Parting.of_cohorts(clients.sizes, self.level, self.sample) or HALVES
            state = replace(state, on_cohorts=True, parts=parting.parts, part_size=parting.size, initial=None)
        if state.on_cohorts:
            return self._round_of_cohort(state, cohort, clients, this_round)
        state = replace(state, trained=state.trained + len(cohort))
        everybody = len(cohort) == len(state.tree.leaf_of)
        early = EARLY_ROUNDS if everybody else 1
        if number <= early and state.parts and together:
            return self._round_in_parts(state, cohort, clients, this_round, early)
        events, before = list[Event](), state.tree
        if number % self.check_every == 0 and self._affordable(state):
            state, events = self._check(replace(state, checks=state.checks + 1), clients, this_round)
        parting = Parting(state.parts, state.part_size)
        looks = everybody and number == EARLY_ROUNDS + 1 and state.tree is before and just_apart(before, number)
        looks = looks and len(parting.able(clients.sizes, cohort)) < FEW_CLIENTS
        if self.fallback and len(_clusters(state.tree)) > 1:
            state = replace(state, tree=state.tree.continued(train_beside(state.tree, cohort, clients, this_round)))
        if looks:
            parts, tree, found = look_inside(state.tree, parting, cohort, clients, this_round, self.level)
            events += found
        else:
            parts = train_clusters(state, cohort, clients, this_round)
            tree = move_clusters(state.tree, parts)
        if events:  # criteria are for people: nothing is decided by them
            parts = [part.compared() for part in parts]
        tree, joined = place_stragglers(tree, parts)
        tree = drawn_together(tree, clients.sizes, number, self.sharing)
        if self.fallback and not together and len(one := _clusters(tree)) == 1:  # all became one again
            tree = tree.continued(one[0].params)
        return replace(state, tree=tree), log_of(parts, [*events, *joined], "check" if events else "train")

    def _round_of_cohort(
        self, state: ReplicatedState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[ReplicatedState, RoundLog]:
        """Run a round that asks nobody but the cohort."""
        tests = CohortTests(Parting(state.parts, state.part_size), self.sample, self.level, self.check_every)
        before, together = state.tree, len(state.tree.nodes) == 1
        tree, parts, events = cohort_round(before, state.early, cohort, tests, clients, this_round)
        if len(tree.nodes) == 1:
            state = replace(state, early=tuple(sorted({*state.early, *cohort})))
        elif self.fallback and not together:
            tree = tree.continued(train_beside(before, cohort, clients, this_round))
        elif self.fallback and (step := parts[0].step) is not None:
            tree = tree.continued(before.nodes[0].params + step)
        return replace(state, tree=tree), log_of(parts, events)

    def serve(self, state: ReplicatedState, clients: Clients) -> Mapping[int, int]:
        """Return the node whose model each client is served with."""
        return best_on_validation(state.tree, clients) if self.fallback else super().serve(state, clients)

    def _share(self, test: int) -> float:
        """Return the level of the j-th test of a kind, from 1; those of all tests add up to a quarter of the level."""
        return self.level / 4 / (test * (test + 1))

    def _affordable(self, state: ReplicatedState) -> bool:
        extra = max(MOST_EXTRA, 1.05 / self.check_every)  # 1.05: so that full rounds are checked as often as is said
        return state.asked + len(state.tree.leaf_of) <= extra * state.trained

    def _round_in_parts(
        self, state: ReplicatedState, cohort: Sequence[int], clients: Clients, this_round: Round, early: int
    ) -> tuple[ReplicatedState, RoundLog]:
        """Let everybody train on equal parts of its data, test these, and go apart after the last such round."""
        tree, parting = state.tree, Parting(state.parts, state.part_size)
        model, able = tree.nodes[0].params, parting.able(clients.sizes, tree.leaf_of)
        compares = this_round.number in (1, early)  # the first are kept, to tell later on whose parts have changed
        updates, in_parts = parting.train(tree, tree.leaf_of, cohort, clients, this_round, compares=compares)
        cluster, answered = ClusterUpdate.of(0, updates, this_round), in_parts.ids
        asked = state.asked + len(set(able).difference(cohort))
        state = replace(state, tree=move_clusters(tree, [cluster]), asked=asked)
        if this_round.number == 1 and answered:
            state = replace(state, tested=answered, cosines=cosines_of(in_parts))
        if this_round.number < early:
            return state, log_of([cluster])
        cluster = cluster.compared()
        if answered != state.tested:  # the next check of parts tests them, though they are as they were
            state = replace(state, tested=(), cosines=None)
        if waits := too_few(0, len(answered), this_round):
            return state, log_of([cluster], [waits], "check")
        level, draw = self.level / 2, this_round.generator("shuffles")
        together = np.zeros(len(answered), dtype=np.int64)
        verdict = by_parts(cosines_of(in_parts), state.parts, together, level, draw, level_inside=self.level)
        if not verdict.labels.any():
            return state, log_of([cluster], [verdict.event(Tested, 0, answered, level)], "check")
        state, events = self._decided(state, verdict, in_parts, model, level, this_round)
        return state, log_of([cluster], events, "check")

    def _check(
        self, state: ReplicatedState, clients: Clients, this_round: Round
    ) -> tuple[ReplicatedState, list[Event]]:
        """Ask everybody for updates of parts, and cluster by them: of halves, in turn with those of the first round."""
        tree, draw = state.tree, this_round.generator("shuffles")
        initial = state.initial
        again = initial is not None and (len(state.tested) < FEW_CLIENTS or state.checks % 2 == 0)
        parting = Parting(state.parts, state.part_size) if again else HALVES
        ids = parting.able(clients.sizes, tree.leaf_of)
        if waits := too_few(0, len(ids), this_round):
            return state, [waits]
        if again and initial is not None:
            model, asked = initial, replace(this_round, number=1)  # the draws of the first round
        else:  # the model of a single cluster is sent anyway
            model, travels = joint_model(tree, clients.sizes), "updates" if len(tree.leaves) == 1 else "all"
            asked = replace(this_round, purpose="replicate", communicates=travels)
        updates = parting.ask(clients, ids, model[None], asked)
        state = replace(state, asked=state.asked + len(ids))
        if waits := too_few(0, len(updates.ids), this_round):
            return state, [waits]
        now = np.unique([tree.leaf_of[client] for client in updates.ids], return_inverse=True)[1]
        level = self._share((state.changes if again else state.halves) + 1)
        if again:
            cosines, same = cosines_of(updates), updates.ids == state.tested
            known = state.cosines if same else None
            verdict = by_parts(cosines, state.parts, now, level, draw, level_inside=self.level, known=known)
            state = replace(state, tested=updates.ids, cosines=cosines, changes=state.changes + verdict.tested)
        else:
            verdict = by_halves(updates, now, level, draw)
            state = replace(state, halves=state.halves + 1)  # whether it comes to a test depends on what it would say
        return self._decided(state, verdict, updates, model, level, this_round)

    def _decided(
        self, state: ReplicatedState, verdict: Verdict, made: Updates, model: Tensor, level: float, this_round: Round
    ) -> tuple[ReplicatedState, list[Event]]:
        """Go on with the clusters of a verdict about those who made updates at a model."""
        before = np.array([state.tree.leaf_of[client] for client in made.ids])
        if same_partition(before, verdict.labels):
            return state, [verdict.event(Checked, 0, made.ids, level)]
        clusters, number = clusters_of(made.ids, verdict.labels), this_round.number
        tree = regrouped(state.tree, clusters, made, model, round_number=number, criteria=verdict.criteria)
        if self.fallback and len(state.tree.nodes) == 1:  # what all have trained goes on as the root's, too
            tree = tree.continued(tree.nodes[1].params)
        elif self.fallback and len(one := _clusters(tree)) == 1:  # and all go on with the root's when they join again
            tree = tree.with_model(one[0].id, tree.nodes[0].model)
        return replace(state, tree=tree), [verdict.event(Regrouped, 0, made.ids, level)]


def _clusters(tree: ParameterTree) -> list[Node]:
    return [leaf for leaf in tree.leaves if leaf.members]
