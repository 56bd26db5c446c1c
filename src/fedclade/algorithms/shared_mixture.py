"""What FedEM and FedRC share: clients train all models, and are served with a mixture of their own of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedclade.algorithms.base import OneCohort, RoundLog
from fedclade.algorithms.cluster_update import membership_events
from fedclade.algorithms.state import S
from fedclade.clustering import SplitCriteria
from fedclade.core import Clients, ConfigError, ParameterTree, Round, TooFew, Updates, mean, unpacked


class SharedMixture(OneCohort[S]):
    """An algorithm whose clients train and are served with a mixture of all the leaves' models.

    ``clusters`` is their number.
    """

    is_soft = True

    clusters: int

    @property
    def needs_updates(self) -> bool:
        """Whether a step works on the updates of single clients."""
        return False

    @property
    def compares(self) -> bool:
        """Whether a step looks at signatures of updates."""
        return False

    @property
    def initial_models(self) -> int:
        """How many initial models, each drawn by itself, ``init`` starts from."""
        return self.clusters

    def star(self, params: Tensor, clients: Clients) -> ParameterTree:
        """Return a tree with a leaf for each initial model, rows of ``[K, S]``, which must differ; all are empty."""
        models = params.view(-1, params.shape[-1])
        if (found := len(models.unique(dim=0))) < self.clusters:
            name = type(self).__name__.lower()
            raise ConfigError(
                f"{name} needs {self.clusters} different initial models, got {found}; let them depend on the seed"
            )
        return ParameterTree.star([()] * self.clusters, models, clients.ids)

    def trained(
        self, state: S, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[ParameterTree, Updates, Tensor, RoundLog]:
        """Let a cohort train; return the tree after the round, the updates, the mean table ``[K, C]``, and the log.

        With too few answers all stays as it is.
        """
        tree, K = state.tree, self.clusters
        models, _ = tree.models(leaves := [leaf.id for leaf in tree.leaves])
        updates = clients.train(cohort, models, [0] * len(cohort), this_round, mixture=self.mixture(state))
        updates = updates.select(sorted(cohort))
        losses = dict(zip(updates.ids, updates.losses.tolist(), strict=True))
        if not updates.ids or len(updates.ids) < this_round.min_clients or updates.components is None:
            events = [TooFew(leaf, len(updates.ids)) for leaf in leaves]
            return tree, updates, models.new_zeros(K, 0), RoundLog({}, losses, events=tuple(events))
        D = updates.n_parameters // K
        steps, tables = unpacked(mean(updates), K, models.shape[1], D)
        component_of = dict(zip(updates.ids, updates.components.tolist(), strict=True))
        after = tree.reassigned({client: leaves[component] for client, component in component_of.items()})
        criteria = dict[int, SplitCriteria]()
        for component, leaf in enumerate(leaves):
            after = after.moved(leaf, steps[component])
            if members := tuple(sorted(c for c, theirs in component_of.items() if theirs == component)):
                norm = torch.linalg.vector_norm(steps[component, :D], dtype=torch.float64)
                largest = updates.norms[updates.components == component].max()
                criteria[leaf] = SplitCriteria(members, float(norm), float(largest), None)
        return after, updates, tables, RoundLog(criteria, losses, events=tuple(membership_events(tree, after)))
