"""Assignment of newcomers and members to leaves, by similarity of updates or by lowest loss.

A newcomer is a client that joins after training. It receives the model of the leaf to which it is
assigned (CFL Algorithm 4). Whether the newcomer fits into this leaf is reported as well, and on
request the newcomer receives the deepest model that fits. The papers do not define when a newcomer
fits. The rules were chosen on MNIST with four label swaps, 20 members with 300 images each, and 20
newcomers for each of three seeds: honest newcomers with 300 or 40 images, and strangers, which
permute all labels (``benchmarks/newcomers.py``).

- *By similarity.* The similarity of a client to a branch is its largest similarity to a member of
  the branch other than itself. The *range* of a branch extends from the smallest to the largest
  similarity of its members to the branch. Newcomers are less similar to members than members are to
  each other, because the members' updates were made from a model that had been trained on the
  members' examples: honest newcomers had similarities of 0.20 and above, and the lower ends of
  ranges were 0.31 to 0.42. A rule that accepts only the range would therefore reject honest
  newcomers. Strangers are nearly at right angles to all clients (similarities of at most 0.19 at
  the root), whatever the number of their examples. A newcomer therefore fits if its similarity is
  at least half of the range's lower end, midway between a member and a stranger. This rule detected
  every stranger, and rejected one of 240 honest newcomers, which had 40 images.
- *By loss.* The losses of members are no yardstick, since the model has memorized their examples. A
  newcomer fits into a leaf if the leaf's model predicts the labels better than a model of zeros,
  for which all labels are equally likely: the loss of that model is ln 10 = 2.3, the loss of honest
  newcomers was at most 1.9, and the loss of strangers at least 7.5. A model that overfits may have
  a large loss although most of its predictions are right. A newcomer therefore also fits if its
  loss is at most half of the loss with the next best leaf.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

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

if TYPE_CHECKING:
    from torch import Tensor

MIDWAY = 0.5
"""Factor of the bounds on similarity and loss with which a newcomer fits.

It multiplies the smallest similarity of a member, or the loss with the next best leaf.
"""


@dataclass(frozen=True, eq=False)
class LossEstimate:
    """Assignment of clients to leaves by their training losses, with the mean losses.

    Parameters
    ----------
    tree
        The parameter tree with each client in its leaf.
    mean
        Mean of the clients' losses with the models of their leaves.
    trimmed
        Mean without the lowest and the highest losses. The share removed at each end is the share
        of clients that may report false losses (:attr:`~fedclade.core.Evaluation.byzantine`).
    """

    tree: ParameterTree
    mean: float
    trimmed: float


@dataclass(frozen=True)
class Step:
    """Choice of a branch at one node of a newcomer's path down the parameter tree."""

    node: int
    # A larger cosine similarity is better; a smaller loss (in nats) or distance is better.
    by: Literal["similarity", "loss", "distance"]
    scores: Mapping[int, float]  # score of each branch, by the node that the branch leads to
    taken: int  # node of the chosen branch
    fits: bool  # whether the newcomer fits into the chosen branch

    @property
    def score(self) -> float:
        """Score of the chosen branch: a similarity, a loss or a distance, as :attr:`by` states."""
        return self.scores[self.taken]

    @property
    def other(self) -> float | None:
        """Best score of the branches that were not chosen; None if there is only one branch."""
        others = [score for branch, score in self.scores.items() if branch != self.taken]
        if self.by == "similarity":
            return max(others, default=None)
        return min(others, default=None)

    @property
    def margin(self) -> float | None:
        """Difference between the score of the chosen branch and that of the best other branch.

        It is positive if the chosen branch is better, and None if there is only one branch.
        """
        if self.other is None:
            return None
        if self.by == "similarity":
            return self.score - self.other
        return self.other - self.score


@dataclass(frozen=True)
class Assignment:
    """Path of one newcomer from the root of the parameter tree to a leaf, with all choices.

    ``client`` is the newcomer's id, ``path`` the ids of the nodes from the root to the leaf, and
    ``steps`` the choices of branches on this path.
    """

    client: int
    path: tuple[int, ...]
    steps: tuple[Step, ...] = ()

    @property
    def node(self) -> int:
        """Leaf to which the newcomer is assigned (CFL Algorithm 4, line 14), even without a fit."""
        return self.path[-1]

    @property
    def fits(self) -> bool:
        """Whether the newcomer fits into the chosen branch at every node of its path."""
        return all(step.fits for step in self.steps)

    @property
    def fitting(self) -> tuple[int, ...]:
        """Beginning of the newcomer's path, before the first branch into which it does not fit."""
        misfit = next(
            (place for place, step in enumerate(self.steps) if not step.fits), len(self.steps)
        )
        return self.path[: len(self.path) - len(self.steps) + misfit]

    @property
    def margin(self) -> float | None:
        """Smallest margin of all steps on the path; None if no step had more than one branch.

        A margin is the difference between the chosen and the best other branch.
        """
        return min((step.margin for step in self.steps if step.margin is not None), default=None)

    @classmethod
    def along(cls, tree: ParameterTree, client: int, steps: Sequence[Step]) -> Assignment:
        """Return the assignment of a newcomer that results from its choices of branches.

        Parameters
        ----------
        tree
            The parameter tree.
        client
            Id of the newcomer.
        steps
            Choices in order from the root; empty if the newcomer stays at the root.
        """
        leaf = steps[-1].taken if steps else 0
        return cls(client, tuple(node.id for node in tree.above(leaf)), tuple(steps))


def assign_to_root(ids: Sequence[int]) -> list[Assignment]:
    """Assign all newcomers to the root, the only node of a tree without clusters."""
    return [Assignment(client, (0,)) for client in ids]


def route(
    tree: ParameterTree, ids: Sequence[int], clients: Clients, this_round: Round
) -> list[Assignment]:
    """Assign newcomers to leaves by similarity if updates are cached, otherwise by lowest loss.

    Parameters
    ----------
    tree
        The parameter tree of the run.
    ids
        Ids of the newcomers.
    clients
        Clients that include the newcomers.
    this_round
        Settings of the newcomers' local training. If updates are cached, the newcomers train as in
        the round of the cached updates, so that both are comparable.
    """
    if len(tree.nodes) == 1:
        return assign_to_root(ids)
    if all(node.cached is not None for node in tree.nodes[1:]):
        return assign_by_similarity(tree, ids, clients, this_round)
    return assign_by_loss(tree, ids, clients)


def assign_by_similarity(
    tree: ParameterTree, ids: Sequence[int], clients: Clients, this_round: Round
) -> list[Assignment]:
    """Assign newcomers by traversing the parameter tree (CFL Algorithm 4).

    At each node, a newcomer chooses the branch with the most similar cached update. In contrast to
    the paper, a node may have any number of branches. All newcomers at a node train in one query,
    as in the round of the members' updates.
    """
    steps: dict[int, list[Step]] = {client: [] for client in ids}
    pending = {0: list(ids)}  # line 2
    while pending:  # line 3
        here, standing = pending.popitem()
        node = tree.nodes[here]  # line 4
        branches = _list_branches(tree, here)
        training = replace(this_round, number=node.split_in or this_round.number)
        # Line 5.
        updates = clients.train(standing, node.params[None], [0] * len(standing), training)
        updates = require_updates(standing, updates)
        similarities = compute_branch_similarities(updates.signatures, branches)  # lines 6 and 7
        least = {branch.id: find_least_similarity(branch) for branch in branches}
        for client, of_client in zip(updates.ids, similarities.tolist(), strict=True):
            scores = {branch.id: alpha for branch, alpha in zip(branches, of_client, strict=True)}
            # Lines 8 to 12. Of equal branches, line 8 takes the last.
            taken = max(scores, key=lambda branch: (scores[branch], branch))
            fits = scores[taken] >= least[taken]
            steps[client].append(Step(here, "similarity", scores, taken=taken, fits=fits))
            if _list_branches(tree, taken):
                pending.setdefault(taken, []).append(client)  # lines 9 and 11
    return [Assignment.along(tree, client, steps[client]) for client in ids]  # line 14


def walk_down(
    tree: ParameterTree, ids: Sequence[int], clients: Clients, this_round: Round
) -> tuple[ParameterTree, dict[int, list[int]]]:
    """Move clients from the nodes that they are members of down to leaves (CFL Algorithm 4).

    Only nodes whose branches have cached updates are passed. At each node the clients train as in
    the round of the cached updates. A client that does not reply stays at its node.

    Returns
    -------
    tuple of ParameterTree and dict
        The tree with the clients in all nodes on their paths, and the clients that joined each
        node, by node.
    """
    joined: dict[int, list[int]] = {}
    moving = set(ids)
    while pending := _list_movable(tree, moving):
        for here, standing in pending.items():
            node = tree.nodes[here]
            training = replace(this_round, number=node.split_in or this_round.number)
            updates = clients.train(standing, node.params[None], [0] * len(standing), training)
            moving -= set(standing) - set(updates.ids)
            tree, newly_joined = place_in_branches(tree, here, updates)
            joined |= newly_joined
    return tree, joined


def _list_movable(tree: ParameterTree, moving: set[int]) -> dict[int, list[int]]:
    """Return the clients that can move further down the tree, by their present node.

    A client can move if it is in ``moving`` and its node has branches with cached updates.
    """
    movable: dict[int, list[int]] = {}
    for node, waiting in tree.stragglers.items():
        here = [client for client in waiting if client in moving]
        if here and _has_cached_branches(tree, node):
            movable[node] = here
    return movable


def place_in_branches(
    tree: ParameterTree, node: int, updates: Updates
) -> tuple[ParameterTree, dict[int, list[int]]]:
    """Move each client into the branch of a node that has the most similar cached update.

    This is CFL Algorithm 4, lines 6 to 12. The clients' updates are added to the cached updates of
    their branches.

    Parameters
    ----------
    tree
        The parameter tree.
    node
        Node whose branches the clients may join.
    updates
        Updates of the clients, made from the node's model.

    Returns
    -------
    tuple of ParameterTree and dict
        The changed tree, and the clients that joined each branch, by branch.
    """
    branches = _list_branches(tree, node)
    joined: dict[int, list[int]] = {}
    if not branches or not updates.ids:
        return tree, joined
    scores = compute_branch_similarities(updates.signatures, branches)
    # Of equal branches, line 8 takes the last.
    nearest = len(branches) - 1 - scores[:, ::-1].argmax(axis=1)
    for place, branch in enumerate(branches):
        rows = np.flatnonzero(nearest == place).tolist()
        if rows:
            joined[branch.id] = [updates.ids[row] for row in rows]
            tree = tree.with_members(branch.id, joined[branch.id], updates.signatures[rows])
    return tree, joined


def _has_cached_branches(tree: ParameterTree, node: int) -> bool:
    """Return whether a node has branches with members, and all these branches cache updates."""
    branches = _list_branches(tree, node)
    return bool(branches) and all(branch.cached is not None for branch in branches)


def require_updates(ids: Sequence[int], updates: Updates) -> Updates:
    """Return the updates of newcomers, or raise an error if some are missing.

    Raises
    ------
    UpdateError
        If a newcomer did not reply with a usable update. The message names each such newcomer with
        the reason.
    """
    missing = sorted(set(ids).difference(updates.ids))
    if not missing:
        return updates
    reasons = [
        f"newcomer {client}: {updates.left_out.get(client, DROPPED_OUT)}" for client in missing
    ]
    raise UpdateError(
        "newcomers without a usable update cannot be assigned to a cluster: "
        f"{'; '.join(reasons)}; remove these newcomers or, if their training diverged, lower "
        "local.lr"
    )


def compute_branch_similarities(signatures: Tensor, branches: Sequence[Node]) -> Similarity:
    """Return the similarity of n newcomers to k branches, ``[n, k]``.

    It is the largest cosine of the newcomer's signature with a signature that is cached in the
    branch.

    Parameters
    ----------
    signatures
        Signatures of the newcomers' updates, ``[n, R]``.
    branches
        The branches, which all have cached signatures.
    """
    columns = [compute_cosines(signatures, _get_cached(b)).max(axis=1) for b in branches]
    return np.stack(columns, axis=1)


def find_least_similarity(branch: Node) -> float:
    """Return the smallest similarity to a branch with which a newcomer still fits into it.

    It is half of the lower end of the branch's range, the smallest of the members' largest
    similarities to other members. The module's docstring gives the reason.
    """
    if len(branch.members) < 2:  # one member alone shows no range
        return 0.0
    alpha = cosine_similarity(_get_cached(branch))
    np.fill_diagonal(alpha, -1.0)
    lowest = float(alpha.max(axis=1).min())
    # Halving would raise a negative bound.
    return min(lowest, MIDWAY * lowest)


def assign_by_loss(tree: ParameterTree, ids: Sequence[int], clients: Clients) -> list[Assignment]:
    """Assign each newcomer to the leaf whose model has the lowest loss on its training data.

    Of leaves with equal losses, the first is chosen. Leaves without members are excluded, because
    no client has trained their models. A newcomer that does not reply is not assigned.
    """
    losses = compute_leaf_losses(tree, ids, clients)
    taken = {client: min(by_leaf, key=by_leaf.__getitem__) for client, by_leaf in losses.items()}
    fits = check_fit_by_loss(losses, taken, tree, clients)
    assignments: list[Assignment] = []
    for client, scores in losses.items():
        step = Step(0, "loss", scores, taken=taken[client], fits=fits[client])
        assignments.append(Assignment.along(tree, client, [step]))
    return assignments


def compute_leaf_losses(
    tree: ParameterTree, ids: Sequence[int], clients: Clients
) -> dict[int, dict[int, float]]:
    """Return the training loss of each newcomer with the model of each leaf, by client and leaf.

    Leaves without members are left out.
    """
    leaves = [leaf.id for leaf in tree.leaves if leaf.members]
    models, rows = tree.models(leaves)
    losses = compute_training_losses(models, rows, ids, clients)
    return {client: dict(zip(leaves, row.tolist(), strict=True)) for client, row in losses.items()}


def check_fit_by_loss(
    losses: Mapping[int, Mapping[int, float]],
    taken: Mapping[int, int],
    tree: ParameterTree,
    clients: Clients,
) -> dict[int, bool]:
    """Return whether each newcomer fits into its leaf, judged by its training losses.

    Parameters
    ----------
    losses
        Loss of each newcomer with each leaf; see :func:`compute_leaf_losses`.
    taken
        Leaf of each newcomer.
    tree
        The parameter tree of the run.
    clients
        Clients that include the newcomers; they evaluate a model of zeros for comparison.

    Returns
    -------
    dict
        Whether the newcomer fits, by newcomer.
    """
    zeros = torch.zeros_like(tree.nodes[0].params)[None]
    of_zeros = compute_training_losses(zeros, [0], [*losses], clients)
    fits: dict[int, bool] = {}
    for client, by_leaf in losses.items():
        others = [loss for leaf, loss in by_leaf.items() if leaf != taken[client]]
        bound = max(float(of_zeros[client]), MIDWAY * min(others, default=0.0))
        fits[client] = by_leaf[taken[client]] <= bound
    return fits


def assign_to_lowest_loss(
    tree: ParameterTree, ids: Sequence[int], clients: Clients, *, by_choice: bool = False
) -> tuple[ParameterTree, float]:
    """Move each client to the leaf with the lowest loss on its training data.

    Parameters
    ----------
    tree
        The parameter tree; its leaves' models are evaluated.
    ids
        Clients to move. A client that does not reply stays where it is.
    clients
        Clients of the run.
    by_choice
        Whether clients report only which model has the lowest loss, and no losses.

    Returns
    -------
    tuple of ParameterTree and float
        The changed tree, and the mean of the lowest losses: infinite if no client replies, NaN with
        ``by_choice``.
    """
    estimate = estimate_by_loss(tree, ids, clients, by_choice=by_choice)
    return estimate.tree, estimate.mean


def estimate_by_loss(
    tree: ParameterTree, ids: Sequence[int], clients: Clients, *, by_choice: bool = False
) -> LossEstimate:
    """Move each client to the leaf with the lowest loss, and return statistics of the losses.

    The parameters are the same as for :func:`assign_to_lowest_loss`. With ``by_choice``, the mean
    losses are NaN.
    """
    leaves = [leaf.id for leaf in tree.leaves]
    models, rows = tree.models(leaves)
    if by_choice:
        chosen = find_chosen_models(models, rows, ids, clients)
        tree = tree.reassigned({client: leaves[place] for client, place in chosen.items()})
        return LossEstimate(tree, math.nan, math.nan)
    evaluation = _evaluate_on_training_data(models, rows, ids, clients)
    losses = _group_losses(evaluation, len(rows))
    if not losses:
        return LossEstimate(tree, math.inf, math.inf)
    lowest, taken = torch.stack(list(losses.values())).min(dim=1)
    places = zip(losses, taken.tolist(), strict=True)
    tree = tree.reassigned({client: leaves[place] for client, place in places})
    return LossEstimate(tree, float(lowest.mean()), _trimmed_mean(lowest, evaluation.byzantine))


def find_chosen_models(
    models: Tensor, rows: Sequence[int], ids: Sequence[int], clients: Clients
) -> dict[int, int]:
    """Query each client for the model with the lowest loss on its training data.

    Parameters
    ----------
    models
        Parameter vectors of K models, ``[K, S]``.
    rows
        Rows of the k models that are compared, ``[k]``.
    ids
        Ids of the clients. Clients that do not reply are left out of the result.
    clients
        Clients of the run.

    Returns
    -------
    dict
        Index of the model in ``rows``, by client.
    """
    repeated_ids = [client for client in ids for _ in rows]
    reply = clients.ask(ChoiceQuery(repeated_ids, models, [*rows] * len(ids), "train"))
    if reply.wins is None:
        places = reply.losses.view(-1, len(rows)).nan_to_num(torch.inf).argmin(dim=1)
    else:
        places = reply.wins.view(-1, len(rows)).argmax(dim=1)
    return dict(zip(reply.ids[:: len(rows)], places.tolist(), strict=True))


def compute_training_losses(
    models: Tensor, rows: Sequence[int], ids: Sequence[int], clients: Clients
) -> dict[int, Tensor]:
    """Return the losses of k models on each client's training data, by client.

    The losses ``[k]`` of a client are in nats, and infinite for a model that diverged. Clients that
    do not reply are left out.

    Parameters
    ----------
    models
        Parameter vectors of K models, ``[K, S]``.
    rows
        Rows of the k models to evaluate.
    ids
        Ids of the clients.
    clients
        Clients of the run.
    """
    evaluation = _evaluate_on_training_data(models, rows, ids, clients)
    return _group_losses(evaluation, len(rows))


def _evaluate_on_training_data(
    models: Tensor, rows: Sequence[int], ids: Sequence[int], clients: Clients
) -> Evaluation:
    """Query each client for the scores of several models on its training data."""
    repeated_ids = [client for client in ids for _ in rows]
    return clients.evaluate(repeated_ids, models, [*rows] * len(ids), "train")


def _group_losses(evaluation: Evaluation, models: int) -> dict[int, Tensor]:
    """Return the losses of each client with k models ``[k]``, by client.

    Parameters
    ----------
    evaluation
        Scores with k consecutive rows for each client.
    models
        Number k of models.
    """
    losses = evaluation.losses.view(-1, models).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return dict(zip(evaluation.ids[::models], losses, strict=True))


def _trimmed_mean(losses: Tensor, share: float) -> float:
    """Return the trimmed mean of losses.

    The given share of the lowest and of the highest losses, each rounded down to whole losses, is
    left out.
    """
    # Round first: 0.3 · 10 is 2.9999999999999996 in floating point, and should cut 3.
    cut = math.floor(round(share * len(losses), 9))
    return float(losses.sort().values[cut : len(losses) - cut].mean())


def _list_branches(tree: ParameterTree, node: int) -> list[Node]:
    """Return the children of a node that have members."""
    return [branch for branch in tree.children(node) if branch.members]


def _get_cached(branch: Node) -> Tensor:
    """Return the signatures that are cached at a branch, which must have some."""
    assert branch.cached is not None  # callers have checked this
    return branch.cached
