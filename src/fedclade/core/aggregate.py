"""Aggregation of the clients' model updates into one update of a cluster's model.

The module contains the weighted mean (FedAvg) and robust aggregation rules, which tolerate some
malicious clients. Tensors of updates have one row per client: ``[n, S]`` for n clients and vectors
of S entries, of which the first D are parameters and the other S - D are buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import TYPE_CHECKING

import torch

from fedclade.core.updates import Aggregation, Updates, row_norms

if TYPE_CHECKING:
    from torch import Tensor

# Robust rules combine the updates of a cluster's n clients, of which f may be arbitrary.
#
# - ``median``: the median of each coordinate. Yin, Chen, Ramchandran, Bartlett 2018, definition 1.
#   For an even number of clients it is the mean of the two middle values.
# - ``trimmed_mean``: the mean of each coordinate without the f largest and the f smallest values.
#   The same paper, definition 2; 2f < n.
# - ``krum``: Blanchard, El Mhamdi, Guerraoui, Stainer 2017, section 4. The update with the least
#   sum of squared distances to its n − f − 2 nearest updates; n ≥ 2f + 3. ``multi_krum`` is the
#   mean of the n − f − 2 updates with the best scores: the paper leaves their number m open, and
#   this is the largest m of El Mhamdi et al. 2018.
# - ``bulyan``: El Mhamdi, Guerraoui, Rouault 2018, section 4. Krum selects n − 2f updates, one
#   at a time from the remaining ones; then each coordinate is the mean of the n − 4f selected
#   values nearest to their median; n ≥ 4f + 3.
# - ``geometric_median``: RFA of Pillutla, Kakade, Harchaoui 2019, by their smoothed Weiszfeld
#   algorithm with ν = 1e-6. Like all rules here, it weighs clients equally, not by |D_i| as in the
#   paper: sizes are only claimed, and a third of the clients, if each claims twice the median size,
#   would have half of the weight.
# - ``centred_clipping``: Karimireddy, He, Jaggi 2021, section 4: v ← v + 1/n Σ (g_i − v) min(1,
#   τ/‖g_i − v‖).
# - Nearest-neighbour mixing before any of them: Allouah, Farhadkhani, Guerraoui, Gupta, Pinot,
#   Stephan 2023.
#
# The papers leave some choices open. This file decides as follows:
#
# - Clients send updates of a model from which all clients of the cluster start, so the zero update
#   stands for that model. Distances and norms are computed from the parameters alone. Buffers, such
#   as BatchNorm's statistics, are aggregated by the coordinate-wise median with every rule: a
#   client whose parameters a rule accepts may still have sent arbitrary buffers.
# - f is a share of the clients that replied, rounded down, and at most the number that the rule
#   allows. In a small cluster f is therefore smaller, and Bulyan has f = 0 for fewer than seven
#   clients. For one or two clients the result is the mean, since no rule could tell which of two
#   is wrong.
# - Two clients that are nearest to each other have equal scores if only one neighbour counts. The
#   update with the smaller sum of distances to all others is then better, so that the order of the
#   clients does not matter; Krum's paper takes the first.
# - In the last selections of Bulyan fewer than n − f − 2 neighbours are left: all of them count, at
#   least one.
# - Weiszfeld's algorithm begins at the coordinate-wise median, and ends when the result moves by
#   less than a millionth of its length, or after 100 steps. The paper takes 3 steps, since there
#   each costs a round of secure aggregation.
# - Centred clipping starts from v = 0, the cluster's last model, in every round and has no state:
#   clusters change, and updates have no momentum from round to round. It takes five steps. τ is the
#   paper's only if it is set; otherwise it is the median of the distances ‖g_i − v‖ in each step,
#   so that it does not depend on the scale of updates.

AT_ONCE = 2**22
"""Number of entries of updates that are copied at a time, which bounds the memory in use."""

NU = 1e-6  # smoothing ν of the geometric median (RFA), the smallest distance that is divided by
WEISZFELD_STEPS = 100  # largest number of steps of Weiszfeld's algorithm
CLIPPING_STEPS = 5  # number of steps of centred clipping in each round


def robust(rows: Tensor, n_parameters: int, how: Aggregation) -> Tensor:
    """Combine the updates of n clients into one update by a robust aggregation rule.

    All clients have the same weight. Fewer than three updates are averaged, since no rule could
    tell which of two updates is wrong.

    Parameters
    ----------
    rows
        The updates ``[n, S]``: one row per client, one column per entry of the model's vector.
    n_parameters
        Number D of leading columns that are parameters; the remaining columns are buffers, which
        every rule aggregates by the coordinate-wise median.
    how
        The rule and its settings.

    Returns
    -------
    Tensor
        The aggregated update ``[S]``.
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
    """Return the coordinate-wise median ``[m]`` of n vectors, the rows of ``[n, m]``.

    For an even n, it is the mean of the two middle values of each coordinate. As an aggregation
    rule, the median is due to Yin et al. 2018 (definition 1).
    """
    half = len(rows) // 2
    middle = slice(half, half + 1) if len(rows) % 2 else slice(half - 1, half + 1)
    return torch.cat([some.sort(0).values[middle].mean(0) for some in _split_columns(rows)])


def trimmed_mean(rows: Tensor, f: int) -> Tensor:
    """Return the coordinate-wise trimmed mean ``[m]`` of n vectors, the rows of ``[n, m]``.

    In each coordinate, the f largest and the f smallest values are left out of the mean (Yin et al.
    2018, definition 2).
    """
    return torch.cat(
        [some.sort(0).values[f : len(rows) - f].mean(0) for some in _split_columns(rows)]
    )


def multi_krum(rows: Tensor, f: int, keep: int) -> Tensor:
    """Return the mean ``[m]`` of the ``keep`` vectors with the best Krum scores (Multi-Krum).

    The vectors are the n rows of ``[n, m]``, of which f may be arbitrary. With ``keep`` = 1, the
    result is the single vector that Krum selects.
    """
    return rows[krum_order(squared_distances(rows), f)[:keep]].mean(dim=0)


def krum_order(squared: Tensor, f: int) -> list[int]:
    """Return the indices of n vectors in the order of their Krum scores, the best first.

    The Krum score of a vector is the sum of its squared distances to the n − f − 2 nearest other
    vectors. The lowest score is the best (Blanchard et al. 2017, section 4). If n − f − 2 is less
    than 1, the score is the squared distance to the single nearest vector.

    Parameters
    ----------
    squared
        Squared distances between the vectors, ``[n, n]``.
    f
        Number of vectors that may be arbitrary, since malicious clients sent them.
    """
    nearest = squared.sort(dim=1).values[:, 1:]  # the first is the row itself
    scores = nearest[:, : max(1, len(squared) - f - 2)].sum(1).tolist()
    # The sum of all distances decides between equal scores, so that the order of the clients does
    # not matter.
    over_all = nearest.sum(1).tolist()
    return sorted(range(len(squared)), key=lambda row: (scores[row], over_all[row]))


def bulyan(rows: Tensor, f: int) -> Tensor:
    """Return the aggregate ``[m]`` of n vectors, the rows of ``[n, m]``, by the rule Bulyan.

    Krum selects n − 2f of the vectors. Each coordinate of the result is the mean of the n − 4f
    selected values that are nearest to their median (El Mhamdi et al. 2018, section 4). At most f
    vectors may be arbitrary, and n must be at least 4f + 3.
    """
    squared = squared_distances(rows)
    left = list(range(len(rows)))
    selected = list[int]()
    while len(selected) < len(rows) - 2 * f:
        selected.append(left.pop(krum_order(squared[left][:, left], f)[0]))
    return torch.cat(
        [
            _nearest_to_median(some, len(rows) - 4 * f)
            for some in _split_columns(rows[sorted(selected)])
        ]
    )


def _nearest_to_median(rows: Tensor, count: int) -> Tensor:
    nearest = (rows - median(rows)).abs().sort(dim=0, stable=True).indices[:count]
    return rows.gather(0, nearest).mean(dim=0)


def geometric_median(
    rows: Tensor, start: Tensor, *, nu: float = NU, steps: int = WEISZFELD_STEPS
) -> Tensor:
    """Return the smoothed geometric median of n points by Weiszfeld's algorithm.

    The geometric median minimizes the sum of the distances to all points. Distances are smoothed:
    a distance below ν counts as ν. This is the rule RFA (Pillutla et al. 2019) with equal weights.

    Parameters
    ----------
    rows
        The points ``[n, m]``, one per row.
    start
        The point ``[m]`` from which the algorithm starts.
    nu
        The smoothing constant ν, in the unit of the points.
    steps
        Largest number of steps.

    Returns
    -------
    Tensor
        The median ``[m]``.
    """
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
    """Return a robust centre of n points by centred clipping (Karimireddy, He, Jaggi 2021).

    In each step, the centre moves by the mean of the differences between the points and the centre.
    Each difference is clipped to length τ before, so that no single point has a large influence.

    Parameters
    ----------
    rows
        The points ``[n, m]``, one per row.
    start
        The centre ``[m]`` before the first step.
    radius
        The clipping length τ, in the unit of the points. If None, τ is in each step the median
        distance of the points from the centre.
    steps
        Number of steps.

    Returns
    -------
    Tensor
        The centre ``[m]`` after the last step.
    """
    v = start
    for _ in range(steps):
        far = row_norms(rows, v)
        tau = float(far.quantile(0.5)) if radius is None else radius
        scales = (tau / far.clamp(min=torch.finfo(torch.float64).tiny)).clamp(max=1.0) / len(rows)
        v = v * (1 - float(scales.sum())) + scales.to(rows) @ rows
    return v


def mixed(rows: Tensor, f: int) -> Tensor:
    """Replace each of n vectors by the mean of the n − f vectors nearest to it.

    This is the nearest-neighbour mixing of Allouah et al. 2023, which precedes a robust rule. The
    vectors are the rows of ``[n, m]``. The vector itself counts as one of its n − f nearest
    vectors.
    """
    nearest = squared_distances(rows).sort(dim=1, stable=True).indices[:, : len(rows) - f]
    weights = torch.zeros(len(rows), len(rows), dtype=torch.float64).scatter_(
        1, nearest, 1 / (len(rows) - f)
    )
    return weights.to(rows) @ rows


def squared_distances(rows: Tensor) -> Tensor:
    """Return the squared Euclidean distances between n vectors, float64 ``[n, n]`` on the CPU.

    The vectors are the rows of ``[n, m]``. The matrix is exactly symmetric, and its diagonal is
    exactly 0.
    """
    products = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for some in _split_columns(rows):
        products += some.double() @ some.double().T
    # the sum is symmetric to the last bit, which a product need not be
    both = (products + products.T).cpu()
    own = products.diagonal().cpu()
    return (own[:, None] + own - both).clamp(min=0.0).fill_diagonal_(0.0)


def _split_columns(rows: Tensor) -> Iterator[Tensor]:
    """Yield blocks of the columns of a matrix ``[n, m]``, small enough to bound the memory."""
    yield from rows.split(max(1, AT_ONCE // max(1, len(rows))), dim=1)


def mean(updates: Updates, *, weighted: bool = True) -> Tensor:
    """Return the mean ``[S]`` of the model updates of some clients.

    If :attr:`Updates.aggregation` is set, its robust rule replaces the mean, and all clients have
    the same weight.

    Parameters
    ----------
    updates
        The updates of at least one client.
    weighted
        Whether client i has the weight |D_i|/|D|, its share of the training examples, so that the
        mean is Σ |D_i|/|D| Δθ_i (CFL eq. 2, FedAvg). If false, all clients have the same weight
        (CFL Algorithm 5, line 13; FedGroup Algorithm 4, line 7). Weights that the run sets
        (``aggregate.weights``) take precedence.

    Raises
    ------
    UpdateError
        If the run streams, and so stores only weighted sums of updates, although ``weighted`` is
        false or a robust rule is set.
    """
    if (how := updates.aggregation) is not None:
        return robust(updates.required_deltas, updates.n_parameters, how)
    if not weighted and not updates.has_weights:
        return updates.required_deltas.mean(dim=0)
    weights = updates.weights
    # Clients of weight 0 move no model, even if no other client has replied.
    total = weights.sum().clamp(min=torch.finfo(torch.float32).tiny)
    if updates.sums is not None:
        return updates.sums.groups.sum(0) / float(total)
    return (weights / total).to(updates.required_deltas) @ updates.required_deltas


def mean_of_all(parts: Sequence[Updates]) -> Tensor:
    """Return the mean update ``[S]`` of the clients in several :class:`Updates` objects.

    A method needs this function if it sends separate queries to groups of a cluster's members, so
    that each reply has the updates of one group. The weight of client i is its number |D_i| of
    training examples. No client may be in more than one group.

    If :attr:`Updates.aggregation` is set, its robust rule replaces the mean.
    """
    if parts[0].aggregation is not None:
        return mean(reduce(Updates.concat, parts))
    weights = [float(updates.weights.sum()) for updates in parts]
    each = [
        mean(updates) * (weight / sum(weights))
        for updates, weight in zip(parts, weights, strict=True)
    ]
    return torch.stack(each).sum(0)


def centre_of(updates: Updates, models: Tensor, members: Sequence[int], before: Tensor) -> Tensor:
    """Return a cluster's new centre, the aggregate of its members' trained models.

    The function is for methods whose clients do not start from the centre of their cluster, so that
    their updates are not differences from it. The aggregation rule is applied to the differences
    between the trained models and the centre ``before`` the round.

    Parameters
    ----------
    updates
        Updates of n clients, which also state the aggregation rule.
    models
        The trained models of the n clients, ``[n, S]``: one row per client, one column per entry of
        the model's vector.
    members
        Ids of the clients whose models are aggregated.
    before
        The centre ``[S]`` before the round.

    Returns
    -------
    Tensor
        The new centre ``[S]``.
    """
    return before + mean(updates.with_columns(deltas=models - before).select(members))


def inter_group(
    models: Tensor, eta_g: float, n_parameters: int, *, averages: bool = False
) -> Tensor:
    """Add the normalized models of all other groups to each group's model (FedGroup Algorithm 2).

    The new model of group j is w_j + η_g Σ_{l≠j} w_l/‖w_l‖. The entries after the first D
    parameters are buffers, which are statistics of a group's own data and do not change.

    Parameters
    ----------
    models
        The models w of the m groups, ``[m, S]``: one row per group.
    eta_g
        The inter-group learning rate η_g, in parameter units.
    n_parameters
        Number D of leading columns that are parameters.
    averages
        Whether the result is divided by the sum of all weights, 1 + Σ_{l≠j} η_g/‖w_l‖, as in the
        authors' code of FlexCFL.

    Returns
    -------
    Tensor
        The new models ``[m, S]``.
    """
    parameters = models[:, :n_parameters]
    # A model of zeros has no direction and adds zeros.
    directions = torch.nn.functional.normalize(parameters, dim=1)
    moved = parameters + eta_g * (directions.sum(0) - directions)
    if averages:
        weights = eta_g / torch.linalg.vector_norm(parameters, dim=1, keepdim=True)
        weights = weights.where(weights.isfinite(), 0.0)
        moved = moved / (1 + weights.sum() - weights)
    return torch.cat([moved, models[:, n_parameters:]], dim=1)
