"""Replicated clustering: clustered federated learning without thresholds.

Clients make several updates at one model, each from one split of their data. What the splits of
different clients have in common tells the server which clusters there are, and whether they are
real. The tree is a star, since all clients are compared at once: a check splits clusters, merges
them, and moves single clients.

**First rounds.** In the first three rounds all clients train on equal splits of their data, and the
model moves by the mean of the splits' updates. The updates of the third round are tested
(:mod:`fedclade.clustering.part_test`), at no further cost, and clients separate into the clusters
that are found. If these clients are few, every cluster is tested by itself in the round after
(:func:`look_inside`). If not all clients take part in a round, all of them are queried in the first
round, which is tested. If there are more than a thousand of them, only clients of the cohort are
queried, from the first round to the last (:mod:`fedclade.algorithms.rcfl.cohorts`), and nothing of
what follows is done.

**Later checks.** Every few rounds a check queries all clients. It alternates between updates from
two halves of the data, at the mean of the clusters' models (:mod:`fedclade.clustering.split_half`),
and updates from the first round's equal splits, at the initial model. The latter are the same as in
the first round unless the data of some client changed; only then they are tested again.

**Levels.** Half of the level is for the first rounds, a quarter for halves, and a quarter for
splits that have changed: the j-th test of a kind has 1/(j(j + 1)) of it, which add up to all of it.
So the chance that clients of one distribution are ever separated is at most the level, however long
the run. Splits that have not changed are not tested, and take nothing of it. Inside clusters that
were found, each test except those of :func:`look_inside` has the whole level.

**Present clusters** stay unless others gain more. If they gain nothing any more, they become one.

**Models of new clusters.** A new cluster starts from the models of the clusters that most members
of which it took over, weighted by these members. If there is none, it starts from the model of the
cluster that most of its members come from. For a while the models of new clusters are pulled
towards their mean (:func:`share_models`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedclade.algorithms.base import Algorithm, RoundLog, State
from fedclade.algorithms.cluster_update import (
    ClusterUpdate,
    by_cluster,
    log_of,
    move_clusters,
    place_stragglers,
    train_clusters,
)
from fedclade.algorithms.fallback import LEAF, ROOT, best_on_validation, keep_better, train_beside
from fedclade.algorithms.rcfl.cohorts import CohortTests, run_cohort_round
from fedclade.algorithms.rcfl.data_splits import HALVES, DataSplits
from fedclade.algorithms.rcfl.replicate_test import (
    Verdict,
    cluster_by_halves,
    cluster_by_splits,
    compute_cosines,
    examine_node,
    list_clusters,
    postpone_if_too_few,
)
from fedclade.clustering import is_same_partition
from fedclade.core import (
    Checked,
    Clients,
    Event,
    Group,
    Node,
    ParameterTree,
    Regrouped,
    Round,
    Tested,
    Updates,
    checked,
    require,
    row_norms,
)

EARLY_ROUNDS = 3
"""Number of rounds in splits; the updates of the last of them are tested.

Some clusters, such as those of swapped labels, can be found only once labels have been learnt.
"""

MANY_CLIENTS = 1000
"""Largest number of clients that are all queried where a round has only some of them."""

FEW_CLIENTS = 12
"""With fewer clients, shuffling clients has too few outcomes, and all checks are by splits."""

LARGEST_EXTRA = 0.15
"""Share of the training so far that checks may add to it, where a round has only some clients."""

LEVEL_SHARE_INSIDE = 0.01
"""Share of the level that each test of :func:`look_inside` has.

As a rule clusters are right already, and were tested from inside in the round before. Differences
that are left show at far lower p-values, and right clusters stay whole.
"""

SHARING_FADES = 0.9
"""Factor of the sharing between new clusters from one round to the next."""

LEAST_SHARING = 1e-3
"""Smallest share of the way to the mean that models are moved; less has no effect."""

TOO_FAR = 3.0
"""Largest move of a cluster's model, in moves of the median cluster, that counts in a joint model.

The clusters of honest clients in one federation are closer to each other.
"""


@dataclass(frozen=True, eq=False)
class ReplicatedState(State):
    """State of replicated clustering between rounds.

    Parameters
    ----------
    checks
        Number of checks after the first rounds.
    halves
        Number of checks by halves.
    changes
        Number of tests of splits that had changed.
    trained
        Number of clients that trained, summed over all rounds.
    asked
        Number of clients that were queried in addition, summed over all rounds.
    parts, part_size
        How clients split their data: into ``parts`` splits of ``part_size`` examples. 0 where data
        cannot be split.
    initial
        Model ``[S]`` at which updates of the splits are requested again.
    tested
        Clients whose splits have the ``cosines`` at that model.
    cosines
        Cosines of all pairs of splits at that model, ``[n·r, n·r]``.
    keepers
        Clients that are evaluated with models of their own.
    on_cohorts
        Whether only clients of the cohort are queried.
    early
        With ``on_cohorts``, clients that trained before there were clusters.
    """

    checks: int = 0
    halves: int = 0
    changes: int = 0
    trained: int = 0
    asked: int = 0
    parts: int = 0
    part_size: int = 0
    initial: Tensor | None = None
    tested: tuple[int, ...] = ()
    cosines: Tensor | None = None
    keepers: tuple[int, ...] = ()
    on_cohorts: bool = False
    early: tuple[int, ...] = ()

    @property
    def splits(self) -> DataSplits:
        """Splits of each client's data."""
        return DataSplits(self.parts, self.part_size)


@checked()
@dataclass(frozen=True, kw_only=True)
class ReplicatedCFL(Algorithm[ReplicatedState]):
    """Clusters found by updates from parts of the clients' data.

    Parameters
    ----------
    level
        Chance of separating clients that all have one distribution, over the whole run, in (0, 1).
    check_every
        Number of rounds between later checks, each of which costs every client the training of a
        round: by default they add a seventh. Where only some clients take part in a round, checks
        that would add more than 15 % are left out.
    fallback
        Once there are clusters, train a model for all clients in addition to the clusters' models,
        and serve each client with the one that is best on validation data
        (:mod:`fedclade.algorithms.fallback`), so that clients fare at least about as well as with
        FedAvg where clusters that differ are better off together. From the first split on it takes
        twice the training and the bytes, and of private clients twice the releases.
    personalize
        In rounds that are evaluated each client fine-tunes its cluster's model by a round of local
        training, and keeps it for itself if it is better on validation data; with ``fallback`` it
        may fine-tune the model for all instead (:mod:`fedclade.algorithms.fallback`). Clusters are
        the same as without it.
    sample
        Where a round has only some of more than a thousand clients: largest number of its clients
        that are tested (:mod:`fedclade.algorithms.rcfl.cohorts`). The more there are, the finer are
        the differences that a test finds.
    sharing
        After each round the models of new clusters move a share of the way to their mean, in
        [0, 1): this one in the round in which they were found, a tenth less in each further one.
        Not done where only clients of the cohort are queried.

    Raises
    ------
    ConfigError
        If an option is out of range; one line for each.
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
            (
                "algorithm.sharing",
                self.sharing,
                0 <= self.sharing < 1,
                "at least 0 and less than 1",
            ),
        )

    @property
    def needs_updates(self) -> bool:
        """Return False: signatures and means of the updates suffice."""
        return False

    def asks(self, clients: int, fraction: float) -> str:
        """Return the information that clients report in addition to updates.

        With many clients, the clients of a cohort report losses.
        """
        return "training losses" if clients > MANY_CLIENTS and fraction < 1 else ""

    def too_short(self, rounds: int) -> str:
        """Return a warning if a run of this number of rounds ends before clients can separate."""
        if rounds >= EARLY_ROUNDS:
            return ""
        needed = (
            f"rcfl lets clients go apart after {EARLY_ROUNDS} rounds, and this run has {rounds}"
        )
        return f"{needed}: it will be federated averaging; set more rounds"

    def init(self, params: Tensor, clients: Clients) -> ReplicatedState:
        """Put all clients in one cluster, and choose the splits of their data."""
        state = ReplicatedState(ParameterTree.root_only(clients.ids, params))
        splits = DataSplits.choose_for_test("rcfl", clients, self.level)
        if splits is None:
            return state
        return replace(state, parts=splits.count, part_size=splits.size, initial=params.clone())

    def step(
        self, state: ReplicatedState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[ReplicatedState, RoundLog]:
        """Run one round of federated learning in every cluster, then personalize."""
        if this_round.number == 1 and len(cohort) < len(state.tree.leaf_of) > MANY_CLIENTS:
            state = self._choose_cohort_splits(state, clients)
        if state.on_cohorts:
            state, log = self._run_cohort_round(state, cohort, clients, this_round)
        else:
            state, log = self._run_round(state, cohort, clients, this_round)
        if not self.personalize:
            return state, log
        if this_round.evaluated:
            return self.tuned(state, clients, this_round), log
        return replace(state, keepers=()), log

    def tuned(self, state: ReplicatedState, clients: Clients, this_round: Round) -> ReplicatedState:
        """Return the state after clients have fine-tuned models of their own."""
        if not self.personalize:
            return state
        starts = (LEAF,)
        if self.fallback and len(_populated_leaves(state.tree)) > 1:
            starts = (ROOT, LEAF)
        return replace(state, keepers=keep_better(state.tree, starts, clients, this_round))

    def keepers(self, state: ReplicatedState) -> Sequence[int]:
        """Return the clients that store a model of their own and are evaluated with it."""
        return state.keepers

    def serve(self, state: ReplicatedState, clients: Clients) -> Mapping[int, int]:
        """Return for each client the node whose model it is evaluated with."""
        if self.fallback:
            return best_on_validation(state.tree, clients)
        return super().serve(state, clients)

    def _run_round(
        self, state: ReplicatedState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[ReplicatedState, RoundLog]:
        """Run a round: in splits at first, later on all data, in some rounds after a check."""
        number = this_round.number
        before = state.tree
        is_one_cluster = len(before.nodes) == 1
        state = replace(state, trained=state.trained + len(cohort))
        all_take_part = len(cohort) == len(before.leaf_of)
        last_in_splits = EARLY_ROUNDS if all_take_part else 1
        if number <= last_in_splits and state.parts and is_one_cluster:
            return self._run_round_in_splits(
                state, cohort, clients, this_round=this_round, last_in_splits=last_in_splits
            )

        events: list[Event] = []
        if number % self.check_every == 0 and self._can_afford_check(state):
            state = replace(state, checks=state.checks + 1)
            state, events = self._check(state, clients, this_round)
        looks_inside = (
            all_take_part
            and state.tree is before
            and self._looks_inside(state, cohort, clients, number)
        )
        if self.fallback and len(_populated_leaves(state.tree)) > 1:
            model = train_beside(state.tree, cohort, clients, this_round)
            state = replace(state, tree=state.tree.continued(model))

        if looks_inside:
            trained, tree, found = look_inside(
                state.tree,
                state.splits,
                cohort,
                clients=clients,
                this_round=this_round,
                level=self.level,
            )
            events += found
        else:
            trained = train_clusters(state, cohort, clients, this_round)
            tree = move_clusters(state.tree, trained)
        if events:  # for the report only: no decision depends on these similarities
            trained = [cluster.compared() for cluster in trained]
        tree, placements = place_stragglers(tree, trained)
        tree = share_models(tree, clients.sizes, number, self.sharing)
        populated = _populated_leaves(tree)
        # all have become one again
        if self.fallback and not is_one_cluster and len(populated) == 1:
            tree = tree.continued(populated[0].params)
        log = log_of(trained, [*events, *placements], "check" if events else "train")
        return replace(state, tree=tree), log

    def _looks_inside(
        self, state: ReplicatedState, cohort: Sequence[int], clients: Clients, number: int
    ) -> bool:
        """Return whether this is the round of :func:`look_inside`: few clients just separated."""
        if number != EARLY_ROUNDS + 1 or not _has_just_separated(state.tree, number):
            return False
        return len(state.splits.select_able(clients.sizes, cohort)) < FEW_CLIENTS

    def _run_round_in_splits(
        self,
        state: ReplicatedState,
        cohort: Sequence[int],
        clients: Clients,
        this_round: Round,
        last_in_splits: int,
    ) -> tuple[ReplicatedState, RoundLog]:
        """Train all clients on equal splits; in the last such round test them, and separate."""
        tree = state.tree
        model = tree.nodes[0].params
        able = state.splits.select_able(clients.sizes, tree.leaf_of)
        # The cosines of the first round are kept: later they tell whose data has changed.
        compares = this_round.number in (1, last_in_splits)
        updates, in_splits = state.splits.train(
            tree, tree.leaf_of, cohort, clients=clients, this_round=this_round, compares=compares
        )
        cluster = ClusterUpdate.of(0, updates, this_round)
        replied = in_splits.ids
        state = replace(
            state,
            tree=move_clusters(tree, [cluster]),
            asked=state.asked + len(set(able).difference(cohort)),
        )
        if this_round.number == 1 and replied:
            state = replace(state, tested=replied, cosines=compute_cosines(in_splits))
        if this_round.number < last_in_splits:
            return state, log_of([cluster])

        cluster = cluster.compared()
        if replied != state.tested:
            # These cosines would be compared with those of other clients. Without any, the next
            # check by splits tests them, even if no data has changed.
            state = replace(state, tested=(), cosines=None)
        postponed = postpone_if_too_few(0, len(replied), this_round)
        if postponed:
            return state, log_of([cluster], [postponed], "check")
        level = self.level / 2
        verdict = cluster_by_splits(
            compute_cosines(in_splits),
            state.parts,
            np.zeros(len(replied), dtype=np.int64),
            level=level,
            generator=this_round.generator("shuffles"),
            level_inside=self.level,
        )
        if not verdict.labels.any():
            event = verdict.make_event(Tested, 0, replied, level)
            return state, log_of([cluster], [event], "check")
        state, events = self._regroup(
            state, verdict, in_splits, model=model, level=level, this_round=this_round
        )
        return state, log_of([cluster], events, "check")

    def _check(
        self, state: ReplicatedState, clients: Clients, this_round: Round
    ) -> tuple[ReplicatedState, list[Event]]:
        """Query all clients for updates from splits of their data, and cluster them by these.

        The splits are halves in every other check; otherwise those of the first round.
        """
        tree = state.tree
        initial = state.initial
        few_clients = len(state.tested) < FEW_CLIENTS
        if initial is not None and (few_clients or state.checks % 2 == 0):
            by_splits = True
            splits = state.splits
            model = initial
            query = replace(this_round, number=1)  # with the random draws of the first round
            level = self._get_level(state.changes + 1)
        else:
            by_splits = False
            splits = HALVES
            model = average_models(tree, clients.sizes)
            # The model of a single cluster is sent for training in this round anyway.
            communicates = "updates" if len(tree.leaves) == 1 else "all"
            query = replace(this_round, purpose="replicate", communicates=communicates)
            level = self._get_level(state.halves + 1)

        able = splits.select_able(clients.sizes, tree.leaf_of)
        postponed = postpone_if_too_few(0, len(able), this_round)
        if postponed:
            return state, [postponed]
        updates = splits.request_updates(clients, able, model[None], query)
        state = replace(state, asked=state.asked + len(able))
        postponed = postpone_if_too_few(0, len(updates.ids), this_round)
        if postponed:
            return state, [postponed]

        leaves = [tree.leaf_of[client] for client in updates.ids]
        present = np.unique(leaves, return_inverse=True)[1]
        generator = this_round.generator("shuffles")
        if by_splits:
            cosines = compute_cosines(updates)
            verdict = cluster_by_splits(
                cosines,
                state.parts,
                present,
                level=level,
                generator=generator,
                level_inside=self.level,
                known=state.cosines if updates.ids == state.tested else None,
            )
            changes = state.changes + verdict.tested
            state = replace(state, tested=updates.ids, cosines=cosines, changes=changes)
        else:
            verdict = cluster_by_halves(updates, present, level, generator)
            # Every check by halves counts, since what it finds decides whether it is a test.
            state = replace(state, halves=state.halves + 1)
        return self._regroup(
            state, verdict, updates, model=model, level=level, this_round=this_round
        )

    def _regroup(
        self,
        state: ReplicatedState,
        verdict: Verdict,
        updates: Updates,
        model: Tensor,
        level: float,
        this_round: Round,
    ) -> tuple[ReplicatedState, list[Event]]:
        """Form the clusters of a verdict, which is about clients that made updates at a model."""
        before = np.array([state.tree.leaf_of[client] for client in updates.ids])
        if is_same_partition(before, verdict.labels):
            return state, [verdict.make_event(Checked, 0, updates.ids, level)]
        tree = regroup(
            state.tree,
            list_clusters(updates.ids, verdict.labels),
            updates,
            model,
            round_number=this_round.number,
            criteria=verdict.criteria,
        )
        if self.fallback:
            populated = _populated_leaves(tree)
            if len(state.tree.nodes) == 1:
                # What all clients have trained so far is also the start of the root's own model.
                tree = tree.continued(tree.nodes[1].params)
            elif len(populated) == 1:  # all have become one again, and go on with the root's model
                tree = tree.with_model(populated[0].id, tree.nodes[0].model)
        event = verdict.make_event(Regrouped, 0, updates.ids, level)
        return replace(state, tree=tree), [event]

    def _choose_cohort_splits(self, state: ReplicatedState, clients: Clients) -> ReplicatedState:
        """Choose the data splits of a run that queries the clients of the cohort only."""
        splits = DataSplits.choose_for_cohorts(clients.sizes, self.level, self.sample) or HALVES
        return replace(
            state, on_cohorts=True, parts=splits.count, part_size=splits.size, initial=None
        )

    def _run_cohort_round(
        self, state: ReplicatedState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[ReplicatedState, RoundLog]:
        """Run a round in which only clients of the cohort are queried."""
        tests = CohortTests(state.splits, self.sample, self.level, self.check_every)
        before = state.tree
        tree, trained, events = run_cohort_round(
            before, state.early, cohort, tests=tests, clients=clients, this_round=this_round
        )
        had_clusters = len(before.nodes) > 1
        if len(tree.nodes) == 1:
            state = replace(state, early=tuple(sorted({*state.early, *cohort})))
        elif self.fallback and had_clusters:
            tree = tree.continued(train_beside(before, cohort, clients, this_round))
        elif self.fallback and trained[0].step is not None:
            # In the round of its split the root has already been trained.
            tree = tree.continued(before.nodes[0].params + trained[0].step)
        return replace(state, tree=tree), log_of(trained, events)

    def _get_level(self, test: int) -> float:
        """Return the level of the j-th test of a kind, from 1; all add up to a quarter."""
        return self.level / 4 / (test * (test + 1))

    def _can_afford_check(self, state: ReplicatedState) -> bool:
        """Return whether a check would not add too much to the training so far."""
        # 1.05: if all clients take part in every round, checks are as frequent as specified.
        largest = max(LARGEST_EXTRA, 1.05 / self.check_every)
        return state.asked + len(state.tree.leaf_of) <= largest * state.trained


# Second look at new clusters, which may contain clients that should be separated, too.
#
# The first rounds find clusters once labels have been learnt; where a model learns slowly, some
# clusters are still together. If clients are many, later checks separate them. If they are few,
# shuffling whole updates has too few outcomes, and splits at the initial model show again what they
# showed before. So if clients are few and have just separated, they train in splits for one more
# round, each from its cluster's model, and every cluster is tested by itself. It costs no further
# training. Except for its choice of members, a cluster's model depends on all their splits alike.


def look_inside(
    tree: ParameterTree,
    splits: DataSplits,
    cohort: Sequence[int],
    clients: Clients,
    this_round: Round,
    *,
    level: float,
) -> tuple[list[ClusterUpdate], ParameterTree, list[Event]]:
    """Train clusters of several clients in splits, test each of them, and divide those that fail.

    Clusters of one client train on all data.

    Returns
    -------
    tuple
        The trained clusters, the tree after the round, and the result of each test.
    """
    several = [leaf for leaf in tree.leaves if len(leaf.members) > 1]
    members = [client for leaf in several for client in leaf.members]
    updates, in_splits = splits.train(
        tree, members, cohort, clients=clients, this_round=this_round, compares=True
    )
    trained = by_cluster(tree, updates, this_round)
    tree = move_clusters(tree, trained)
    level_inside = LEVEL_SHARE_INSIDE * level
    events: list[Event] = []
    for leaf in several:
        replied = [client for client in leaf.members if client in in_splits.ids]
        own_updates = in_splits.select(replied)
        postponed = postpone_if_too_few(leaf.id, len(own_updates.ids), this_round)
        if postponed:
            events.append(postponed)
            continue
        verdict = examine_node(
            leaf.id,
            own_updates,
            splits.count,
            level=level_inside,
            this_round=this_round,
            level_inside=level_inside,
        )
        is_divided = bool(verdict.labels.any())
        kind = Regrouped if is_divided else Tested
        event = verdict.make_event(kind, leaf.id, own_updates.ids, level_inside)
        events.append(event)
        if is_divided:
            tree = divide(tree, leaf.id, event.clusters, this_round.number)
    return trained, tree, events


def _has_just_separated(tree: ParameterTree, number: int) -> bool:
    """Return whether all clusters were found in the round before, and some have several clients."""
    are_new = all(leaf.born == number - 2 for leaf in tree.leaves)  # they trained in that round
    return are_new and any(len(leaf.members) > 1 for leaf in tree.leaves)


# Forming new clusters in the star, and their models.


def regroup(
    tree: ParameterTree,
    clusters: Sequence[tuple[int, ...]],
    updates: Updates,
    model: Tensor,
    *,
    round_number: int,
    criteria: Mapping[str, float],
) -> ParameterTree:
    """Return the tree with new clusters, found by updates that their members made at a model.

    Parameters
    ----------
    tree
        The star before.
    clusters
        Members of each cluster.
    updates
        The members' updates; their signatures are cached in the tree.
    model
        The model ``[S]`` at which they were made.
    round_number, criteria
        The round of the decision, and the numbers that decided.
    """
    groups: list[Group] = []
    for members in clusters:
        leaf, start = _find_start(tree, members)
        groups.append(Group(members, leaf, start, updates.signatures_of(members)))
    return tree.regrouped(groups, params=model, round_number=round_number, criteria=criteria)


def divide(
    tree: ParameterTree, node: int, clusters: Sequence[tuple[int, ...]], round_number: int
) -> ParameterTree:
    """Return the star after one of its leaves is divided; members keep their cached signatures.

    Members of the leaf that are in none of the clusters belong to the root alone.
    """
    others = [leaf for leaf in tree.leaves if leaf.id != node and leaf.members]
    groups = [Group(leaf.members, leaf.id, leaf.params, leaf.cached) for leaf in others]
    divided = tree.nodes[node]
    for members in clusters:
        cached = None
        if divided.cached is not None:
            cached = divided.cached[[divided.members.index(client) for client in members]]
        leaf, start = _find_start(tree, members)
        groups.append(Group(members, leaf, start, cached))
    return tree.regrouped(groups, round_number=round_number)


def _find_start(tree: ParameterTree, members: Sequence[int]) -> tuple[int, Tensor]:
    """Return the leaf that a new cluster continues, 0 for none, and its first model."""
    origins = Counter(tree.leaf_of[client] for client in members)
    taken_over = {
        leaf: n for leaf, n in origins.items() if leaf and 2 * n > len(tree.nodes[leaf].members)
    }
    if not taken_over:
        most_common = origins.most_common(1)[0][0]
        return 0, tree.nodes[most_common].params
    weights = torch.tensor([float(count) for count in taken_over.values()])
    models = torch.stack([tree.nodes[leaf].params for leaf in taken_over])
    largest = max(taken_over, key=lambda leaf: taken_over[leaf])
    return largest, (weights / weights.sum()).to(models) @ models


def average_models(tree: ParameterTree, sizes: Mapping[int, int]) -> Tensor:
    """Return the mean of the clusters' models ``[S]``, by the training examples of their members.

    A cluster whose model has moved more than :data:`TOO_FAR` times as far as that of the median
    cluster, since all had one model, is left out: the model of malicious clients has no bound where
    they have a cluster of their own, and no other cluster should learn from it. The median is over
    examples, and only over clusters that have moved.
    """
    leaves = _populated_leaves(tree)
    weights = torch.tensor([_sum_examples(leaf, sizes) for leaf in leaves])
    models = torch.stack([leaf.params for leaf in leaves])
    moved = row_norms(models, tree.nodes[0].params)
    distances, order = moved.sort()
    examples_up_to = weights.where(moved > 0, 0.0)[order].cumsum(0)
    below_median = int((2 * examples_up_to <= examples_up_to[-1]).sum())
    median = distances[min(below_median, len(leaves) - 1)]
    weights = weights.where(moved <= TOO_FAR * median, 0.0)
    return (weights / weights.sum()).to(models) @ models


def share_models(
    tree: ParameterTree, sizes: Mapping[int, int], number: int, sharing: float
) -> ParameterTree:
    """Move the models of new clusters towards the mean of all, after a round of separate training.

    For a while clusters so continue to learn together what they have in common, though it is not
    known which part of a model this is. In the round in which a cluster was found its model moves
    ``sharing`` of the way, in each further round a tenth less.

    Parameters
    ----------
    tree
        The tree after the round.
    sizes
        Training examples of each client.
    number
        Number of the round.
    sharing
        Share of the way, in [0, 1).
    """
    shares: dict[int, float] = {}
    for leaf in tree.leaves:
        if leaf.members and leaf.parent is not None:
            shares[leaf.id] = sharing * SHARING_FADES ** (number - leaf.born - 1)
    if len(shares) < 2 or max(shares.values()) < LEAST_SHARING:
        return tree
    joint = average_models(tree, sizes)
    for node, share in shares.items():
        model = tree.nodes[node].params
        tree = tree.with_model(node, model + share * (joint - model))
    return tree


def _sum_examples(leaf: Node, sizes: Mapping[int, int]) -> float:
    """Return the number of training examples of a cluster's members."""
    return float(sum(sizes[client] for client in leaf.members))


def _populated_leaves(tree: ParameterTree) -> list[Node]:
    """Return the leaves that have members."""
    return [leaf for leaf in tree.leaves if leaf.members]
