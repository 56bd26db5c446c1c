"""Where newcomers go: down the parameter tree by their updates, or to the leaf whose model has the lowest loss.

A newcomer is served with the model of the leaf that it comes to (CFL Algorithm 4). Besides it learns whether it fits
there, and on request gets the deepest model that fits. The papers know of no such thing. The rules were chosen on
MNIST with four label swaps, 20 members with 300 images each, and 20 newcomers for each of three seeds, honest ones with
300 or 40 images, and strangers who permute all labels (``benchmarks/newcomers.py``):

- By similarity, the range seen inside a branch is: for each member, its largest similarity to another member. Newcomers
  are less similar to members than these are to each other, since the model at which the members' updates were made had
  learnt their examples: honest ones down to 0.20, where ranges end at 0.31 to 0.42. Taken to the letter, a range would
  turn them away. Strangers are nearly at right angles to everybody (at the root at most 0.19), whatever the number of
  their examples. So a newcomer fits down to half of the range's lower end, midway between a member and a stranger. That
  found every stranger, and turned away one of 240 honest newcomers, with 40 images.
- By loss, members are no measure, as they know their examples by heart. A leaf fits a newcomer whose labels it predicts
  better than a model of zeros, to which all labels are alike: its loss is ln 10 = 2.3, that of honest newcomers was at
  most 1.9, of strangers at least 7.5. Models that overfit can lose more than that where they are wrong, however often
  they are right; so a leaf fits as well if its loss is at most half of the next leaf's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedclade.clustering.similarity import Similarity, compute_cosines, cosine_similarity
from fedclade.core import (
    DROPPED_OUT,
    ChoiceQuery,
    Clients,
    Evaluation,
    Node,
    ParameterTree,
    Round,
    UpdateError,
    Updates,
)

MIDWAY = 0.5
"""How far down, from a member's similarity to a stranger's, which is 0, a newcomer still fits."""


@dataclass(frozen=True, eq=False)
class LossEstimate:
    """The cluster of each client by its training losses, and how low these are.

    Parameters
    ----------
    tree
        With each client in the leaf that it takes.
    mean
        Mean of the clients' losses with the models that they take.
    trimmed
        The same without the lowest and the highest losses, each the share of the clients whose statements may be false
        (:attr:`~fedclade.core.Evaluation.byzantine`).
    """

    tree: ParameterTree
    mean: float
    trimmed: float


@dataclass(frozen=True)
class Step:
    """One choice on a newcomer's way down the tree, at ``node``, and whether it fits into the branch ``taken``."""

    node: int
    by: Literal["similarity", "loss", "distance"]  # cosine, the larger the better; loss in nats, or else, the smaller
    scores: Mapping[int, float]  # of each branch, by the node that it leads to
    taken: int
    fits: bool

    @property
    def score(self) -> float:
        """Score of the branch taken."""
        return self.scores[self.taken]

    @property
    def other(self) -> float | None:
        """Score of the best of the other branches; None if there was none."""
        others = [score for branch, score in self.scores.items() if branch != self.taken]
        return (max if self.by == "similarity" else min)(others, default=None)

    @property
    def margin(self) -> float | None:
        """By how much the branch taken was better than the best of the others."""
        if self.other is None:
            return None
        return self.score - self.other if self.by == "similarity" else self.other - self.score


@dataclass(frozen=True)
class Assignment:
    """Where one newcomer goes: the nodes from the root to a leaf, and the choices that led there."""

    client: int
    path: tuple[int, ...]
    steps: tuple[Step, ...] = ()

    @property
    def node(self) -> int:
        """The leaf that its choices lead to (CFL Algorithm 4, line 14), whether or not it fits there."""
        return self.path[-1]

    @property
    def fits(self) -> bool:
        """Whether it fits all the way down."""
        return all(step.fits for step in self.steps)

    @property
    def fitting(self) -> tuple[int, ...]:
        """The part of its path that fits it: from the root to the deepest node before a step that does not."""
        misfit = next((place for place, step in enumerate(self.steps) if not step.fits), len(self.steps))
        return self.path[: len(self.path) - len(self.steps) + misfit]

    @property
    def margin(self) -> float | None:
        """The smallest margin on its way; None where there was nothing to choose."""
        return min((step.margin for step in self.steps if step.margin is not None), default=None)

    @classmethod
    def along(cls, tree: ParameterTree, client: int, steps: Sequence[Step]) -> Assignment:
        """Return the assignment that some choices make."""
        leaf = steps[-1].taken if steps else 0
        return cls(client, tuple(each.id for each in tree.above(leaf)), tuple(steps))


def assign_to_root(ids: Sequence[int]) -> list[Assignment]:
    """Assign every newcomer to the root: there is nothing else that it could share."""
    return [Assignment(client, (0,)) for client in ids]


def route(tree: ParameterTree, ids: Sequence[int], clients: Clients, this_round: Round) -> list[Assignment]:
    """Assign newcomers, who are among the clients, by what the tree has: cached updates, or its leaves' models.

    They train as ``this_round`` says; where updates are cached, in the round in which these were made.
    """
    if len(tree.nodes) == 1:
        return assign_to_root(ids)
    if all(node.cached is not None for node in tree.nodes[1:]):
        return assign_by_similarity(tree, ids, clients, this_round)
    return assign_by_loss(tree, ids, clients)


def assign_by_similarity(
    tree: ParameterTree, ids: Sequence[int], clients: Clients, this_round: Round
) -> list[Assignment]:
    """Let newcomers traverse the tree (CFL Algorithm 4), with any number of branches at a node.

    All newcomers at a node train together. They do so as in the round in which the members' updates were made.
    """
    steps: dict[int, list[Step]] = {client: [] for client in ids}
    pending = {0: list(ids)}  # line 2
    while pending:  # line 3
        here, standing = pending.popitem()
        node, branches = tree.nodes[here], _peopled(tree, here)  # line 4
        training = replace(this_round, number=node.split_in or this_round.number)
        updates = require_updates(
            standing, clients.train(standing, node.params[None], [0] * len(standing), training)
        )  # line 5
        best = compute_branch_similarities(updates.signatures, branches)  # lines 6 and 7
        least = {branch.id: find_least_similarity(branch) for branch in branches}
        for client, similar in zip(updates.ids, best.tolist(), strict=True):
            scores = {branch.id: alpha for branch, alpha in zip(branches, similar, strict=True)}
            taken = max(scores, key=lambda branch: (scores[branch], branch))  # lines 8 to 12: of equals the last
            steps[client].append(Step(here, "similarity", scores, taken, scores[taken] >= least[taken]))
            if _peopled(tree, taken):
                pending.setdefault(taken, []).append(client)  # lines 9 and 11
    return [Assignment.along(tree, client, steps[client]) for client in ids]  # line 14


def walk_down(
    tree: ParameterTree, ids: Sequence[int], clients: Clients, this_round: Round
) -> tuple[ParameterTree, dict[int, list[int]]]:
    """Send clients, each a member of some node, down to the leaves, where updates are cached (CFL Algorithm 4).

    At each node they train as in the round in which the cached updates were made. Return the tree with the clients in
    all nodes that they came through, and those that joined each node. A client that does not answer stays where it is.
    """
    joined: dict[int, list[int]] = {}
    moving = set(ids)
    while pending := {
        node: here
        for node, waiting in tree.stragglers.items()
        if (here := [client for client in waiting if client in moving]) and _cached_below(tree, node)
    }:
        for here, standing in pending.items():
            node = tree.nodes[here]
            training = replace(this_round, number=node.split_in or this_round.number)
            updates = clients.train(standing, node.params[None], [0] * len(standing), training)
            moving.intersection_update({*updates.ids, *(moving - set(standing))})
            tree, came = place_in_branches(tree, here, updates)
            joined |= came
    return tree, joined


def place_in_branches(tree: ParameterTree, node: int, updates: Updates) -> tuple[ParameterTree, dict[int, list[int]]]:
    """Put clients into that branch of a node whose cached updates hold the one most like theirs.

    CFL Algorithm 4, lines 6 to 12. Their updates, made at the node's model, are cached beside the others. Return the
    tree and, by branch, those that joined it.
    """
    branches, joined = _peopled(tree, node), dict[int, list[int]]()
    if not branches or not updates.ids:
        return tree, joined
    scores = compute_branch_similarities(updates.signatures, branches)
    nearest = len(branches) - 1 - scores[:, ::-1].argmax(axis=1)  # of equals the last (line 8)
    for place, branch in enumerate(branches):
        if mine := np.flatnonzero(nearest == place).tolist():
            joined[branch.id] = [updates.ids[i] for i in mine]
            tree = tree.with_members(branch.id, joined[branch.id], updates.signatures[mine])
    return tree, joined


def _cached_below(tree: ParameterTree, node: int) -> bool:
    branches = _peopled(tree, node)
    return bool(branches) and all(branch.cached is not None for branch in branches)


def require_updates(ids: Sequence[int], updates: Updates) -> Updates:
    """Return the updates of newcomers; raises UpdateError if one did not answer with a usable one."""
    if absent := sorted(set(ids).difference(updates.ids)):
        why = "; ".join(f"newcomer {client}: {updates.left_out.get(client, DROPPED_OUT)}" for client in absent)
        raise UpdateError(f"a newcomer without an update cannot be assigned: {why}; take it out, or lower local.lr")
    return updates


def compute_branch_similarities(signatures: Tensor, branches: Sequence[Node]) -> Similarity:
    """Return the largest cosine of each of n signatures with those cached for each of k branches, ``[n, k]``."""
    return np.stack([compute_cosines(signatures, _cached(branch)).max(axis=1) for branch in branches], axis=1)


def find_least_similarity(branch: Node) -> float:
    """Return how similar a newcomer must be to some member of a branch to fit there; see the top of this file."""
    if len(branch.members) < 2:  # one member alone shows no range
        return 0.0
    alpha = cosine_similarity(_cached(branch))
    np.fill_diagonal(alpha, -1.0)
    lowest = float(alpha.max(axis=1).min())
    return min(lowest, MIDWAY * lowest)


def assign_by_loss(tree: ParameterTree, ids: Sequence[int], clients: Clients) -> list[Assignment]:
    """Assign newcomers to the leaf whose model has the lowest loss on their training data; of equals the first.

    A leaf without members is no choice: nobody has trained its model. Who does not answer is not assigned.
    """
    losses = compute_leaf_losses(tree, ids, clients)
    steps = {client: Step(0, "loss", mine, min(mine, key=mine.__getitem__), False) for client, mine in losses.items()}
    fitting = check_fit_by_loss(losses, {client: step.taken for client, step in steps.items()}, tree, clients)
    return [Assignment.along(tree, c, [replace(step, fits=fitting[c])]) for c, step in steps.items()]


def compute_leaf_losses(tree: ParameterTree, ids: Sequence[int], clients: Clients) -> dict[int, dict[int, float]]:
    """Return each newcomer's training loss with the model of each leaf that has members, by client and leaf."""
    leaves = [leaf.id for leaf in tree.leaves if leaf.members]
    models, rows = tree.models(leaves)
    losses = compute_training_losses(models, rows, ids, clients)
    return {client: dict(zip(leaves, mine.tolist(), strict=True)) for client, mine in losses.items()}


def check_fit_by_loss(
    losses: Mapping[int, Mapping[int, float]], taken: Mapping[int, int], tree: ParameterTree, clients: Clients
) -> dict[int, bool]:
    """Return for each newcomer whether the leaf that it takes fits it, given its :func:`compute_leaf_losses`."""
    zeros = torch.zeros_like(tree.nodes[0].params)[None]
    guessed = {client: float(loss) for client, loss in compute_training_losses(zeros, [0], [*losses], clients).items()}

    def fits(client: int) -> bool:
        mine = losses[client]
        others = [loss for leaf, loss in mine.items() if leaf != taken[client]]
        return mine[taken[client]] <= max(guessed[client], MIDWAY * min(others, default=0.0))

    return {client: fits(client) for client in losses}


def assign_to_lowest_loss(
    tree: ParameterTree, ids: Sequence[int], clients: Clients, *, by_choice: bool = False
) -> tuple[ParameterTree, float]:
    """Put each client in the leaf whose model has the lowest loss on its training data; return their mean as well.

    A client that does not reply stays where it is; if none does, the mean is infinite. With ``by_choice`` clients
    report which model that is, and no loss, so the mean is NaN.
    """
    estimate = estimate_by_loss(tree, ids, clients, by_choice=by_choice)
    return estimate.tree, estimate.mean


def estimate_by_loss(
    tree: ParameterTree, ids: Sequence[int], clients: Clients, *, by_choice: bool = False
) -> LossEstimate:
    """Put each client in the leaf whose model has the lowest loss, as :func:`assign_to_lowest_loss`; return all it knows."""
    models, rows = tree.models(leaves := [leaf.id for leaf in tree.leaves])
    if by_choice:
        chosen = find_chosen_models(models, rows, ids, clients)
        tree = tree.reassigned({client: leaves[place] for client, place in chosen.items()})
        return LossEstimate(tree, math.nan, math.nan)
    evaluation = _on_training_data(models, rows, ids, clients)
    losses = _losses_by_client(evaluation, len(rows))
    if not losses:
        return LossEstimate(tree, math.inf, math.inf)
    lowest, taken = torch.stack(list(losses.values())).min(dim=1)
    tree = tree.reassigned({c: leaves[i] for c, i in zip(losses, taken.tolist(), strict=True)})
    return LossEstimate(tree, float(lowest.mean()), _trimmed_mean(lowest, evaluation.byzantine))


def find_chosen_models(models: Tensor, rows: Sequence[int], ids: Sequence[int], clients: Clients) -> dict[int, int]:
    """Return which of k models, rows of ``[K, S]``, has the lowest loss on the training data of each client.

    Clients that do not reply are left out.
    """
    each = [client for client in ids for _ in rows]
    found = clients.ask(ChoiceQuery(each, models, [*rows] * len(ids), "train"))
    if found.wins is None:
        places = found.losses.view(-1, len(rows)).nan_to_num(torch.inf).argmin(dim=1)
    else:
        places = found.wins.view(-1, len(rows)).argmax(dim=1)
    return dict(zip(found.ids[:: len(rows)], places.tolist(), strict=True))


def compute_training_losses(
    models: Tensor, rows: Sequence[int], ids: Sequence[int], clients: Clients
) -> dict[int, Tensor]:
    """Return the loss of each of k models, rows of ``[K, S]``, on the training data of each client that answers.

    ``[k]`` in nats; that of a model that diverged is infinite.
    """
    return _losses_by_client(_on_training_data(models, rows, ids, clients), len(rows))


def _on_training_data(models: Tensor, rows: Sequence[int], ids: Sequence[int], clients: Clients) -> Evaluation:
    """Return the scores of each of k models on the training data of each client."""
    each = [client for client in ids for _ in rows]
    return clients.evaluate(each, models, [*rows] * len(ids), "train")


def _losses_by_client(evaluation: Evaluation, models: int) -> dict[int, Tensor]:
    """Return the losses of each client, given how many models it evaluated."""
    losses = evaluation.losses.view(-1, models).nan_to_num(torch.inf)
    return dict(zip(evaluation.ids[::models], losses, strict=True))


def _trimmed_mean(losses: Tensor, share: float) -> float:
    """Return the mean without a share of the lowest losses and the same share of the highest, rounded down."""
    cut = math.floor(round(share * len(losses), 9))  # 0.3 · 10 is 3, and not 2.9999999999999996
    return float(losses.sort().values[cut : len(losses) - cut].mean())


def _peopled(tree: ParameterTree, node: int) -> list[Node]:
    """Return the branches that have members."""
    return [branch for branch in tree.children(node) if branch.members]


def _cached(branch: Node) -> Tensor:
    assert branch.cached is not None  # route has looked
    return branch.cached
