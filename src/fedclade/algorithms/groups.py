"""FedGroup's groups (Duan et al. 2020, Algorithms 3 and 4, eq. 10): how clients come into them, how they move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from fedclade.clustering import Assignment, Labels, Similarity, Step, all_of, cosines, fits_by_loss, leaf_losses
from fedclade.core import Clients, ParameterTree, Round, Updates, inter_group, mean, row_norms

GroupDirection = Literal["update", "position", "first"]
"""Of a group: its latest update, where its model is from the root's, or where the model that it began with is."""


def pretrain(
    ids: Sequence[int], tree: ParameterTree, clients: Clients, this_round: Round, steps: int | None = None
) -> Updates:
    """Let clients train from the root's model, by default for one epoch (Algorithm 3, lines 11 to 16)."""
    spec = replace(this_round.spec.in_epochs(1), mu=0.0)
    spec = spec if steps is None else replace(spec, epochs=None, steps=steps)
    return clients.train(ids, *tree.models([0] * len(ids)), replace(this_round, spec=spec, purpose="pretrain"))


def continued(begun: Updates, tree: ParameterTree, clients: Clients, this_round: Round) -> Updates:
    """Let clients that pre-trained for an epoch train for the other E − 1, each from where it is.

    Their updates are from the root's model, at which they began, to where they end (end of section III).
    """
    more_epochs = (this_round.spec.epochs or 1) - 1
    if more_epochs == 0:
        return begun
    n, root = len(begun.ids), tree.nodes[0].params
    models = torch.cat([root + begun.required_deltas, root[None]])
    go_on = replace(this_round, spec=this_round.spec.in_epochs(more_epochs), communicates="updates")
    anchors = [n] * n if this_round.uses_anchors else None
    more = clients.train(begun.ids, models, list(range(n)), go_on, anchors=anchors)
    deltas = begun.select(more.ids).required_deltas + more.required_deltas
    # The groups are trained by whole updates; sketches of the second part alone would be those of no update.
    return replace(more, deltas=deltas, norms=row_norms(deltas[:, : more.n_parameters]), sketches=None)


def with_groups(tree: ParameterTree, updates: Updates, groups: Labels, *, weighted: bool = False) -> ParameterTree:
    """Return a star with its groups' members and first models: w_0 and the mean of pre-training updates (line 7).

    ``groups`` has the group, from 0, of each of the n clients that pre-trained.
    """
    tree = tree.reassigned(dict(zip(updates.ids, (1 + groups).tolist(), strict=True)))
    for leaf in (leaf for leaf in tree.leaves if leaf.members):
        tree = tree.trained(leaf.id, mean(updates.select(leaf.members), weighted=weighted))
    return tree


def moved_together(tree: ParameterTree, eta_g: float, n_parameters: int) -> ParameterTree:
    """Return the tree with groups moved by each other, and the global model with them (Algorithm 2, lines 10, 11)."""
    models = inter_group(torch.stack([leaf.params for leaf in tree.leaves]), eta_g, n_parameters)
    for leaf, model in zip(tree.leaves, models, strict=True):
        tree = tree.with_model(leaf.id, model)
    return tree.with_model(0, models.mean(0))


def directions_to_groups(updates: Updates, tree: ParameterTree, by: GroupDirection) -> Similarity:
    """Return the cosine of each pre-training update with the direction of each group (eq. 10), ``[n, m]``."""
    known = any(leaf.trained_from is not None for leaf in tree.leaves)  # it is not in runs of earlier versions
    now = [leaf.params for leaf in tree.leaves]
    # A group that never had clients learnt nothing.
    began = [leaf.params if leaf.trained_from is None else leaf.trained_from for leaf in tree.leaves]
    root = [tree.nodes[0].params] * len(tree.leaves)
    ends, starts = (began, root) if by == "first" else (now, root if by == "position" or not known else began)
    of_groups = torch.stack([end - start for end, start in zip(ends, starts, strict=True)])
    return cosines(updates.required_deltas[:, : updates.n_parameters], of_groups[:, : updates.n_parameters])


def assigned(
    tree: ParameterTree,
    ids: Sequence[int],
    clients: Clients,
    this_round: Round,
    by: GroupDirection,
    steps: int | None = None,
) -> list[Assignment]:
    """Assign newcomers as cold clients are (eq. 10), from the root's model; a group without members is no choice.

    Their losses say whether they fit. The largest cosine of a newcomer with 40 images can be smaller than a
    stranger's: 0.04 and 0.12, measured as in :mod:`fedclade.clustering.routing`.
    """
    updates = all_of(ids, pretrain(ids, tree, clients, this_round, steps))
    losses = leaf_losses(tree, ids, clients)
    places = [place for place, leaf in enumerate(tree.leaves) if leaf.members]
    peopled = [tree.leaves[place].id for place in places]
    similar = directions_to_groups(updates, tree, by)[:, places].tolist()
    scores = {c: dict(zip(peopled, mine, strict=True)) for c, mine in zip(updates.ids, similar, strict=True)}
    taken = {client: max(mine, key=mine.__getitem__) for client, mine in scores.items()}
    fits = fits_by_loss(losses, taken, tree, clients)
    choices = {c: Step(0, "similarity", mine, taken[c], fits[c]) for c, mine in scores.items()}
    return [Assignment.along(tree, client, [choices[client]]) for client in ids]
