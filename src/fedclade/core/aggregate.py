"""From updates to a new model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional

from fedclade.core.updates import Aggregation, Updates, row_norms

# Robust rules: one update of a cluster from those of its n clients, of whom f may send anything.
#
# - ``median``, of each coordinate: Yin, Chen, Ramchandran, Bartlett 2018, definition 1; of an even
#   number it is the mean of both in the middle.
# - ``trimmed_mean``, of each coordinate without the f largest and the f smallest: the same,
#   definition 2; 2f < n.
# - ``krum``: Blanchard, El Mhamdi, Guerraoui, Stainer 2017, section 4. The update with the least
#   sum of squared distances to its n − f − 2 nearest; n ≥ 2f + 3. ``multi_krum`` is the mean of the
#   n − f − 2 that score best: the paper leaves their number m open, this is the most of El Mhamdi
#   et al. 2018.
# - ``bulyan``: El Mhamdi, Guerraoui, Rouault 2018, section 4. Krum selects n − 2f updates, one
#   after the other from those that are left; then each coordinate is the mean of the n − 4f of them
#   nearest to their median; n ≥ 4f + 3.
# - ``geometric_median``: RFA of Pillutla, Kakade, Harchaoui 2019, by their smoothed Weiszfeld
#   algorithm with ν = 1e-6. It weighs clients alike, as all others do, and not by |D_i|, as there:
#   sizes are only claimed, and with twice the median each a third of the clients would be half of
#   the weight.
# - ``centred_clipping``: Karimireddy, He, Jaggi 2021, section 4: v ← v + 1/n Σ (g_i − v) min(1,
#   τ/‖g_i − v‖).
# - Nearest-neighbour mixing before any of them: Allouah, Farhadkhani, Guerraoui, Gupta, Pinot,
#   Stephan 2023.
#
# Where the papers leave a choice, this file makes it:
#
# - What clients send is an update, from a model that all of a cluster start from, so 0 is that
#   model. Distances and norms are those of the parameters. Buffers, such as BatchNorm's statistics,
#   are aggregated by the coordinate-wise median whatever the rule: one whose parameters a rule
#   trusts may have sent any buffers.
# - f is a share of the clients that answered, rounded down, and at most what the rule allows; so a
#   small cluster has fewer, and for Bulyan fewer than seven have none. Of one or two clients, which
#   cannot be told apart, it is the mean.
# - Of equal scores, which two clients have that are nearest to each other where one neighbour
#   counts, the better is that with the least sum over all others, so that clients' names do not
#   matter; Krum's paper takes the first.
# - In the last rounds of Bulyan fewer than n − f − 2 neighbours are left: those that there are
#   count, at least one.
# - Weiszfeld's algorithm begins at the coordinate-wise median, and ends when the result moves by
#   less than a millionth of its length, or after 100 steps; the paper takes 3, since there each
#   costs a round of secure aggregation.
# - Centred clipping starts from v = 0 in every round, the cluster's last model, and keeps no state:
#   clusters change, and updates have no momentum from round to round. It takes five steps. τ is the
#   paper's only if it is given; otherwise it is the median of the distances ‖g_i − v‖ in each step,
#   so that it needs no unit.

AT_ONCE = 2**22
"""Entries of updates that are copied at once."""

NU = 1e-6
WEISZFELD_STEPS = 100
CLIPPING_STEPS = 5


def robust(rows: Tensor, n_parameters: int, how: Aggregation) -> Tensor:
    """Return one update ``[S]`` from those of n clients, ``[n, S]``, who count alike.

    The first D = ``n_parameters`` entries are parameters, the others buffers.
    """
    if len(rows) < 3:
        return rows.mean(dim=0)
    parameters = rows[:, :n_parameters]
    buffers = rows[:, n_parameters:]
    if how.mixing:
        parameters = mixed(parameters, how.tolerated(len(rows), (len(rows) - 1) // 2))
    return torch.cat([_by_rule(parameters, how), median(buffers)])


def _by_rule(rows: Tensor, how: Aggregation) -> Tensor:
    n = len(rows)
    match how.rule:
        case "mean":
            return rows.mean(dim=0)
        case "median":
            return median(rows)
        case "trimmed_mean":
            return trimmed_mean(rows, how.tolerated(n, (n - 1) // 2))
        case "krum":
            return multi_krum(rows, how.tolerated(n, (n - 3) // 2), keep=1)
        case "multi_krum":
            return multi_krum(rows, f := how.tolerated(n, (n - 3) // 2), keep=n - f - 2)
        case "bulyan":
            return bulyan(rows, how.tolerated(n, (n - 3) // 4))
        case "geometric_median":
            return geometric_median(rows, median(rows))
        case "centred_clipping":
            return centred_clipping(rows, torch.zeros_like(rows[0]), how.radius)


def median(rows: Tensor) -> Tensor:
    """Return the coordinate-wise median ``[m]`` of rows ``[n, m]``."""
    half = len(rows) // 2
    middle = slice(half, half + 1) if len(rows) % 2 else slice(half - 1, half + 1)
    return torch.cat([some.sort(0).values[middle].mean(0) for some in _columns(rows)])


def trimmed_mean(rows: Tensor, f: int) -> Tensor:
    """Return the mean ``[m]`` of rows ``[n, m]`` without the f largest and the f smallest of each coordinate."""
    return torch.cat([some.sort(0).values[f : len(rows) - f].mean(0) for some in _columns(rows)])


def multi_krum(rows: Tensor, f: int, keep: int) -> Tensor:
    """Return the mean ``[m]`` of those of the rows ``[n, m]`` that Krum scores best."""
    return rows[krum_order(squared_distances(rows), f)[:keep]].mean(dim=0)


def krum_order(squared: Tensor, f: int) -> list[int]:
    """Return rows by their scores, the best first, given the squared distances between them, ``[n, n]``.

    A score is the sum of the distances to the n − f − 2 other rows that are nearest, at least one.
    """
    nearest = squared.sort(dim=1).values[:, 1:]  # the first is the row itself
    scores = nearest[:, : max(1, len(squared) - f - 2)].sum(1).tolist()
    over_all = nearest.sum(1).tolist()
    return sorted(range(len(squared)), key=lambda row: (scores[row], over_all[row]))


def bulyan(rows: Tensor, f: int) -> Tensor:
    """Return what Bulyan makes of rows ``[n, m]``, n ≥ 4f + 3: ``[m]``."""
    squared = squared_distances(rows)
    left = list(range(len(rows)))
    selected = list[int]()
    while len(selected) < len(rows) - 2 * f:
        selected.append(left.pop(krum_order(squared[left][:, left], f)[0]))
    return torch.cat(
        [_nearest_to_median(some, len(rows) - 4 * f) for some in _columns(rows[sorted(selected)])]
    )


def _nearest_to_median(rows: Tensor, count: int) -> Tensor:
    nearest = (rows - median(rows)).abs().sort(dim=0, stable=True).indices[:count]
    return rows.gather(0, nearest).mean(dim=0)


def geometric_median(
    rows: Tensor, start: Tensor, *, nu: float = NU, steps: int = WEISZFELD_STEPS
) -> Tensor:
    """Return the point ``[m]`` of the least sum of distances to the rows ``[n, m]``, each at least ν."""
    z = start
    for _ in range(steps):
        betas = 1 / row_norms(rows, z).clamp(min=nu)
        before = z
        z = (betas / betas.sum()).to(rows) @ rows
        if float(row_norms(z[None], before)) <= 1e-6 * float(row_norms(z[None])):
            break
    return z


def centred_clipping(
    rows: Tensor, start: Tensor, radius: float | None, *, steps: int = CLIPPING_STEPS
) -> Tensor:
    """Return a centre ``[m]`` of rows ``[n, m]`` that each pull it by no more than a radius, by default the median."""
    v = start
    for _ in range(steps):
        far = row_norms(rows, v)
        tau = float(far.quantile(0.5)) if radius is None else radius
        scales = (tau / far.clamp(min=torch.finfo(torch.float64).tiny)).clamp(max=1.0) / len(rows)
        v = v * (1 - float(scales.sum())) + scales.to(rows) @ rows
    return v


def mixed(rows: Tensor, f: int) -> Tensor:
    """Return the mean of the n − f nearest to each of the rows ``[n, m]``, itself among them."""
    nearest = squared_distances(rows).sort(dim=1, stable=True).indices[:, : len(rows) - f]
    weights = torch.zeros(len(rows), len(rows), dtype=torch.float64).scatter_(
        1, nearest, 1 / (len(rows) - f)
    )
    return weights.to(rows) @ rows


def squared_distances(rows: Tensor) -> Tensor:
    """Return the squared distances between rows ``[n, m]``: float64 ``[n, n]``, 0 from a row to itself."""
    products = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for some in _columns(rows):
        products += some.double() @ some.double().T
    # symmetric to the last bit
    both = (products + products.T).cpu()
    own = products.diagonal().cpu()
    return (own[:, None] + own - both).clamp(min=0.0).fill_diagonal_(0.0)


def _columns(rows: Tensor) -> Iterator[Tensor]:
    """Yield the rows ``[n, m]`` some columns at a time."""
    yield from rows.split(max(1, AT_ONCE // max(1, len(rows))), dim=1)


def mean(updates: Updates, *, weighted: bool = True) -> Tensor:
    """Return the mean update ``[S]`` of at least one client, by default Σ |D_i|/|D| Δθ_i (CFL eq. 2, FedAvg).

    Unweighted, all clients count alike (CFL Algorithm 5, line 13; FedGroup Algorithm 4, line 7). A
    run that streams cannot do that: it has sums of weighted updates alone, and an UpdateError is
    raised.

    Where :attr:`Updates.aggregation` names another rule, that takes the place of the mean, and
    counts clients alike.
    """
    if (how := updates.aggregation) is not None:
        return robust(updates.required_deltas, updates.n_parameters, how)
    if not weighted:
        return updates.required_deltas.mean(dim=0)
    total = updates.sizes.sum()
    if updates.sums is not None:
        return updates.sums.groups.sum(0) / float(total)
    return (updates.sizes / total).to(updates.required_deltas) @ updates.required_deltas


def mean_of_all(parts: Sequence[Updates]) -> Tensor:
    """Return the mean update ``[S]`` of clients that were queried apart, none of them twice, weighted by |D_i|."""
    if parts[0].aggregation is not None:
        return mean(reduce(Updates.concat, parts))
    weights = [float(updates.sizes.sum()) for updates in parts]
    each = [
        mean(updates) * (weight / sum(weights))
        for updates, weight in zip(parts, weights, strict=True)
    ]
    return torch.stack(each).sum(0)


def centre_of(updates: Updates, models: Tensor, members: Sequence[int], before: Tensor) -> Tensor:
    """Return what a robust rule makes of the models ``[n, S]`` that clients have reached, of some members: ``[S]``.

    For methods whose clients reach a centre from elsewhere. The rule is given how far they are from
    ``before``, where the centre was.
    """
    return before + mean(replace(updates, deltas=models - before).select(members))


def inter_group(
    models: Tensor, eta_g: float, n_parameters: int, *, averages: bool = False
) -> Tensor:
    """Return every group's model after a step along the others', w_j + η_g Σ_{l≠j} w_l/‖w_l‖ (FedGroup Algorithm 2).

    If it ``averages``, that is divided by the sum of the weights, 1 + Σ_{l≠j} η_g/‖w_l‖ (FlexCFL's
    code). ``models`` has a row for each group, ``[m, S]``; ``eta_g`` is η_g in parameter units. The
    buffers behind the first D = ``n_parameters`` entries are statistics of a group's own data, and
    stay as they are.
    """
    parameters = models[:, :n_parameters]
    directions = functional.normalize(parameters, dim=1)  # of a model of zeros: zeros
    moved = parameters + eta_g * (directions.sum(0) - directions)
    if averages:
        weights = eta_g / torch.linalg.vector_norm(parameters, dim=1, keepdim=True)
        weights = weights.where(weights.isfinite(), 0.0)
        moved = moved / (1 + weights.sum() - weights)
    return torch.cat([moved, models[:, n_parameters:]], dim=1)
