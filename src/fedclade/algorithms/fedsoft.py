"""FedSoft: Ruan and Joe-Wong 2022 (AAAI; arXiv:2112.06053), Algorithm 1.

A client's data is a mixture of what K clusters have. Its importance weight u_ik is the share of its
examples for which the k-th centre has the least loss. In each round every cluster draws S clients
with probability v_ik = u_ik n_i / Σ_j u_jk n_j; each client that is drawn by any of them trains its
own model w_i once, held near all centres: min f_i(w) + λ/2 Σ_k u_ik ‖w − c_k‖². A centre becomes
the mean of the models of the clients that it drew.

Where paper and official code leave a choice, this file makes it:

- The centres are drawn one by one, and so is one model that all clients start from, as in the
  official code.
- The proximal terms are one, λ/2 ‖w − Σ_k u_ik c_k‖² and a constant, so one vector goes down in
  place of K. To that end the u_ik of a client, of which those of no example are σ, are divided by
  their sum; in the code that is up to 1 + (K − 1) σ.
- Importance is estimated in round 1 and every ``estimate_every`` rounds, by the clients of that
  round; who is met first in between estimates then. Where two centres have the same loss, the first
  has the example.
- Where a cluster would draw all clients of the round, or more than there are, they all take part,
  and the centre is their mean by v_ik (paper, "full participation"). In the code a draw of all has
  equal weights, which makes all centres one. A draw of more clients than a cluster has pulls its
  centre towards the others' for the same reason.
- w_i never leaves its client but as the difference to the point that it is held near. The client
  keeps it and is served with it. One that has not trained yet is served with the centre of its
  largest weight, and one that has no weights with the mean of the centres.
- A client is shown in the cluster of its largest weight. A newcomer to a running run estimates its
  importance, and trains from where all began; one to a finished run gets the centre of the lowest
  loss.
- The code shuffles no batches, and keeps a client's Adam from round to round; here local training
  is as it is configured (``local.keep_state``).
- Defaults are those of the official main program, for CIFAR-10; its solver for MNIST has λ = 0.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.algorithms.base import OneCohort, OwnState, RoundLog
from fedclade.algorithms.cluster_update import by_cluster, log_of, membership_events
from fedclade.core import (
    LARGEST,
    Clients,
    ConfigError,
    ParameterTree,
    Round,
    TooFew,
    Updates,
    centre_of,
    checked,
    require,
    row_norms,
)

Weights = NDArray[np.float64]
"""Of clients in clusters: u or v, ``[n, K]``."""

SIGMA = 1e-4
"""σ, of the official code: the share of a cluster that is best for no example."""


@dataclass(frozen=True, eq=False)
class FedSoftState(OwnState):
    """The importance weights u, float64 ``[m, K]``, and of which clients they are, in ascending order."""

    importance: Tensor | None = None
    ids: tuple[int, ...] = ()

    @property
    def weights(self) -> dict[int, Weights]:
        """The importance weights ``[K]`` by client."""
        return (
            {}
            if self.importance is None
            else dict(zip(self.ids, self.importance.numpy(), strict=True))
        )


@checked()
@dataclass(frozen=True, kw_only=True)
class FedSoft(OneCohort[FedSoftState]):
    """FedSoft (Ruan and Joe-Wong 2022): clients that belong to several clusters, each with a model of its own.

    Parameters
    ----------
    clusters
        Number K of centres.
    lam
        λ, at least 0: how strongly clients' models are held near the centres.
    selection
        S: how many clients each cluster draws in a round; if there are no more than that, all take
        part.
    estimate_every
        τ: after how many rounds clients estimate their importance again.
    """

    state_type = FedSoftState
    is_soft = True
    clusters_from = "clusters"
    asks_for = "for how many of their training examples each model is best"

    clusters: int = 2
    lam: float = 0.01
    selection: int = 15
    estimate_every: int = 2

    def __post_init__(self) -> None:
        require(
            ("algorithm.clusters", self.clusters, self.clusters >= 1, "at least 1"),
            ("algorithm.lam", self.lam, self.lam >= 0, "at least 0"),
            ("algorithm.lam", self.lam, not self.lam > LARGEST, f"at most {LARGEST:g}"),
            ("algorithm.selection", self.selection, self.selection >= 1, "at least 1"),
            (
                "algorithm.estimate_every",
                self.estimate_every,
                self.estimate_every >= 1,
                "at least 1",
            ),
        )

    @property
    def compares(self) -> bool:
        """Whether a step looks at signatures of updates."""
        return False

    @property
    def initial_models(self) -> int:
        """How many initial models, each drawn by itself, ``init`` starts from."""
        return self.clusters + 1

    def needs_mean(self, clients: int, fraction: float) -> str:
        """Return that where all clients take part in all centres, these differ by the weights of a mean alone."""
        in_round = round(fraction * clients)
        if not clients or self.selection < in_round:
            return ""
        return (
            "FedSoft draws clients for each centre, and with as many as there are each takes part "
            "in all, by weights that only a mean has; set algorithm.selection below the "
            f"{in_round} clients of a round"
        )

    def init(self, params: Tensor, clients: Clients) -> FedSoftState:
        """Take the centres and the clients' first model from ``params [K + 1, S]``; nobody has trained."""
        if (found := len(params.unique(dim=0))) < self.initial_models:
            needed = f"fedsoft needs {self.initial_models} different initial models"
            raise ConfigError(f"{needed}, got {found}; let them depend on the seed")
        tree = ParameterTree.star([()] * self.clusters, params[:-1], clients.ids).with_model(
            0, params[-1]
        )
        return FedSoftState(tree.continued(params[:-1].mean(0)), ())

    def step(
        self, state: FedSoftState, cohort: Sequence[int], clients: Clients, this_round: Round
    ) -> tuple[FedSoftState, RoundLog]:
        """Run one round: importance, where it is due, the draws, the local training, and the centres."""
        before = state.tree
        cohort = sorted(cohort)
        here = set(clients.ids)
        weights = {client: mine for client, mine in state.weights.items() if client in here}
        is_due = (this_round.number - 1) % self.estimate_every == 0
        if asked := [client for client in cohort if is_due or client not in weights]:
            weights |= self._importance(asked, before, clients)
        tree = before.reassigned(
            {client: 1 + int(mine.argmax()) for client, mine in weights.items()}
        )
        events = membership_events(before, tree)
        there = [client for client in cohort if client in weights]
        after = replace(state, tree=tree, **_kept(weights))
        if not there:
            return after, log_of([], events)
        u = np.stack([weights[client] for client in there])
        v = u * np.array([[clients.sizes[client]] for client in there])
        draws = self._draws(v / v.sum(0), this_round)
        centres = torch.stack([leaf.params for leaf in tree.leaves])
        near = torch.from_numpy(u).to(centres) @ centres  # of each client, [n, S]
        drawn = np.flatnonzero((draws > 0).any(1)).tolist()
        ids = [there[i] for i in drawn]
        models = torch.cat([tree.nodes[0].params[None], near[drawn]])
        held = replace(this_round, spec=replace(this_round.spec, mu=self.lam))
        anchors = range(1, 1 + len(ids))
        updates = clients.train(ids, models, state.rows(ids), held, anchors, own=True, shares=True)
        after = replace(after, keepers=state.keepers_after(updates))
        if not updates.ids:
            return after, log_of([], events)
        place_of = {client: place for place, client in enumerate(there)}
        places = [place_of[client] for client in updates.ids]
        local = near[places] + updates.required_deltas
        came = draws[places]
        for k, leaf in enumerate(tree.leaves):
            share = came[:, k] / max(came[:, k].sum(), 1e-300)
            answers = int((came[:, k] > 0).sum())
            if answers >= max(1, this_round.min_clients):
                tree = tree.with_model(leaf.id, _centre(leaf.params, local, share, updates))
            elif answers:
                events.append(TooFew(leaf.id, answers))
        tree = tree.continued(torch.stack([leaf.params for leaf in tree.leaves]).mean(0))
        log = log_of(by_cluster(tree, updates, replace(this_round, min_clients=0)), events)
        return replace(after, tree=tree), replace(
            log, discrepancy=_discrepancy(tree, updates, local)
        )

    def keepers(self, state: FedSoftState) -> Sequence[int]:
        """Return the clients that have a model of their own so far, and are served with it."""
        return state.keepers

    def _importance(
        self, ids: Sequence[int], tree: ParameterTree, clients: Clients
    ) -> Mapping[int, Weights]:
        """Return u of each client that answers, from how many of its examples each centre is best for."""
        models, rows = tree.models([leaf.id for leaf in tree.leaves])
        each = [client for client in ids for _ in rows]
        found = clients.evaluate(each, models, [*rows] * len(ids), "train", compares=True)
        if found.wins is None or not found.ids:
            return {}
        counts = found.wins.view(-1, len(rows)).numpy().astype(np.float64)
        shares = np.where(counts > 0, counts / counts.sum(1, keepdims=True), SIGMA)
        return dict(
            zip(found.ids[:: len(rows)], shares / shares.sum(1, keepdims=True), strict=True)
        )

    def _draws(self, v: Weights, this_round: Round) -> Weights:
        """Return how much each of n clients counts in each centre, ``[n, K]``: 1 or 0, or v where all take part."""
        if self.selection >= len(v):
            return v
        draw = this_round.generator("selection")
        counts = np.zeros_like(v)
        for k in range(v.shape[1]):
            counts[draw.choice(len(v), self.selection, replace=False, p=v[:, k]), k] = 1.0
        return counts


def _centre(before: Tensor, local: Tensor, share: Weights, updates: Updates) -> Tensor:
    """Return a centre ``[S]``: the mean of clients' models ``[n, S]`` by their shares in it.

    By a robust rule it moves by what that makes of how far those are from it that were drawn, all
    alike.
    """
    if updates.aggregation is None:
        return torch.from_numpy(share).to(local) @ local
    drawn = [client for client, mine in zip(updates.ids, share.tolist(), strict=True) if mine > 0]
    return centre_of(updates, local, drawn, before)


def _kept(weights: Mapping[int, Weights]) -> dict[str, Tensor | tuple[int, ...] | None]:
    """Return the fields of a state that keep importance weights."""
    ids = tuple(sorted(weights))
    return {
        "importance": torch.from_numpy(np.stack([weights[c] for c in ids])) if ids else None,
        "ids": ids,
    }


def _discrepancy(tree: ParameterTree, updates: Updates, local: Tensor) -> float:
    """Return Σ ‖w_i − c‖ over the clients that trained, from the centre of the cluster that each is shown in."""
    D = updates.n_parameters
    models = [tree.nodes[tree.leaf_of[client]].params for client in updates.ids]
    return float(row_norms((local - torch.stack(models))[:, :D]).sum())
