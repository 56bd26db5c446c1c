"""FlexCFL, FedGroup with clients that migrate between groups (Duan et al. 2021, TPDS).

Duan, Liu, Ji, Wu, Liang, Chen, Tan, arXiv:2108.09749.

The method is the successor of FedGroup, and finds groups as FedGroup does
(:mod:`~fedclade.algorithms.fedgroup`, with Algorithms 2 to 4 there). It differs in three points:

1. Clients that detect a shift of their labels leave their group and are cold (in no group) again.
2. Cold clients pre-train from the *initial* model, and join the group whose *first* update is most
   similar to theirs, by (1 − cos)/2.
3. A group's step along the other groups' models is an average, (w_j + Σ_{l≠j} η_G/‖w_l‖ w_l) / (1 +
   Σ_{l≠j} η_G/‖w_l‖), the paper's eq. 4.

Where the paper leaves a choice, this file follows the authors' code, marked "(code)", with the
departures that are named here:

- *Detection of shifts.* In every round all clients, in the cohort or not, compare the counts of
  their labels with earlier counts (:class:`~fedclade.algorithms.ShiftQuery`), and report only
  whether they have shifted. The distance treats the counts as samples (code), so it does not detect
  labels that trade places: a permutation of all labels goes unnoticed, as does any change of the
  images alone. ``by_label`` compares label by label.
- *Earlier counts* are those of the round in which the client was first queried, or in which it last
  reported a shift, so that many small shifts add up (code). The threshold depends on the number of
  examples at that time; in the code on the number at the first query.
- *Migration.* All clients that have shifted migrate at once, at the start of the round (code). A
  client that does not reply when it pre-trains is in no group until it is sampled.
- *Pre-training* takes 50 mini-batches (code; in the paper's earlier version one epoch). V, the
  matrix of directions to which updates are reduced, has as many columns as there are groups. A
  client that did not pre-train in the group cold start does so in the first round for which it is
  sampled (code).
- *Empty groups.* A group that all clients have left takes no part in eq. 4 and in the global model
  (code), which is the mean of the other groups' models. Clients without a group are evaluated with
  the global model.
- ``eta_g`` is 0 in the code, and 0.1 in its example.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from fedclade.algorithms.base import RoundLog
from fedclade.algorithms.cluster_update import ClusterUpdate, membership_events, move_clusters
from fedclade.algorithms.fedgroup import FedGroup, FedGroupState, GroupDirection
from fedclade.algorithms.requires import Requires, RunFacts
from fedclade.algorithms.shift_query import ShiftQuery
from fedclade.core import Clients, Event, ParameterTree, RoundPlan, checked, inter_group, require

if TYPE_CHECKING:
    from torch import Tensor


@checked()
@dataclass(frozen=True, kw_only=True)
class FlexCFL(FedGroup):
    """FlexCFL (Duan et al. 2021): FedGroup with clients that migrate when their labels shift.

    In the tree of clusters, the root's node stores the initial model as ``params``, and the global
    model as ``continued``. The attribute ``trained_from`` of each group's node is the group's first
    model. Further parameters are those of :class:`~fedclade.FedGroup`, with different defaults.

    Parameters
    ----------
    direction
        Direction of a group, with which clients' updates are compared: its ``first`` update, or its
        ``position`` relative to the initial model.
    migrate
        Whether clients are queried for shifts of their labels, and then change their groups.
    shift_share
        Share of the mean number of examples per label, above which the distance between label
        counts is a shift, in [0, 2]; see :class:`~fedclade.algorithms.ShiftQuery`.
    by_label
        Whether label counts are compared label by label, rather than in ascending order.
    """

    _directions: ClassVar[tuple[GroupDirection, ...]] = ("first", "position")

    pretrain_steps: int | None = 50
    eta_g: float = 0.0
    base_directions: int | None = None
    cold_start: Literal["start", "sampled"] = "sampled"
    direction: GroupDirection = "first"
    migrate: bool = True
    shift_share: float = 0.2
    by_label: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        redraws = (
            "false with migrate = true, since a client that changes to a random group in every "
            "round cannot stay in the group to which it migrated"
        )
        require(
            ("algorithm.shift_share", self.shift_share, 0 <= self.shift_share <= 2, "in [0, 2]"),
            (
                "algorithm.rac_redraws",
                self.rac_redraws,
                not (self.rac_redraws and self.migrate),
                redraws,
            ),
        )

    @property
    def requires(self) -> Requires:
        """Needs of FlexCFL: if clients may migrate, they report whether their labels shifted."""
        if not self.migrate:
            return Requires()
        return Requires(reports="whether their labels have shifted", data_queries=("shifts",))

    def check(self, run: RunFacts) -> Sequence[str]:
        """Check the clients and the training as FedGroup does, and that labels can be counted.

        Labels need not be counted if clients do not migrate.
        """
        warnings = super().check(run)
        if run.data is not None and self.migrate:
            ShiftQuery((), 1, self.shift_share, self.by_label).shape(run.data)
        return warnings

    def step(
        self, state: FedGroupState, cohort: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> tuple[FedGroupState, RoundLog]:
        """Run one round of FlexCFL: migration of clients, then a round as in FedGroup.

        In the migration, clients whose labels have shifted leave their groups, pre-train from the
        initial model, and join the most similar group.
        """
        if not self.migrate:
            return super().step(state, cohort, clients, this_round)
        before = state.tree
        ids = sorted(clients.ids)
        query = ShiftQuery(ids, this_round.number, self.shift_share, self.by_label)
        answers = clients.ask(query).tolist()
        shifted = [c for c, has in zip(ids, answers, strict=True) if has and before.leaf_of[c]]
        if shifted:
            left = replace(state, tree=before.reassigned(dict.fromkeys(shifted, 0)))
            # Migrating clients pre-train even with ``rac``, as in the authors' code.
            state, _ = self._client_cold_start(left, shifted, clients, this_round, at_random=False)
        migrated = [
            client for client in shifted if state.tree.leaf_of[client] != before.leaf_of[client]
        ]
        after, log = super().step(state, cohort, clients, this_round)
        events = membership_events(before, state.tree) if shifted else []
        numbers = {"clients_shifted": float(len(shifted)), "clients_migrated": float(len(migrated))}
        return after, replace(
            log, events=(*events, *log.events), numbers={**log.numbers, **numbers}
        )

    def _group_cold_start(
        self, state: FedGroupState, clients: Clients, this_round: RoundPlan
    ) -> tuple[FedGroupState, list[ClusterUpdate], list[Event]]:
        """Create the groups as FedGroup does, and store each group's first model in the tree."""
        founded, pretrained, events = super()._group_cold_start(state, clients, this_round)
        tree = founded.tree
        if tree is not state.tree:
            for leaf in tree.leaves:
                tree = tree.begun(leaf.id)
            tree = tree.continued(_mean_of_groups(tree))
        return replace(founded, tree=tree), pretrained, events

    def _move_groups(self, tree: ParameterTree, trained: Sequence[ClusterUpdate]) -> ParameterTree:
        """Move the groups' models by their mean updates, then towards each other (FlexCFL eq. 4).

        The models do not change if no group trained.
        """
        tree = move_clusters(tree, trained)
        if not any(part.enough for part in trained):
            return tree
        leaves = [leaf for leaf in tree.leaves if leaf.members]
        models = torch.stack([leaf.params for leaf in leaves])
        if self.eta_g:
            models = inter_group(models, self.eta_g, trained[0].updates.n_parameters, averages=True)
        for leaf, model in zip(leaves, models, strict=True):
            tree = tree.with_model(leaf.id, model)
        return tree.continued(_mean_of_groups(tree))


def _mean_of_groups(tree: ParameterTree) -> Tensor:
    """Return the global model ``[S]``: the mean of the models of all groups with members."""
    return torch.stack([leaf.params for leaf in tree.leaves if leaf.members]).mean(0)
