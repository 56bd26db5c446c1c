"""The separation gap on the way: of weight updates and of gradients at the same models of plain federated learning."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import nn

from fedclade.algorithms import FedAvg
from fedclade.clustering import cosine_similarity, optimal_bipartition, separation_gap
from fedclade.core import LocalSpec, ParameterTree, Round, Updates
from fedclade.data import Federation
from fedclade.runs import Row, simulate
from fedclade.training import SimulatedClients, choose_device

KINDS = ("updates", "gradients")
"""What clients are compared by: eq. 51 and eq. 50 of the CFL paper."""

Gaps = dict[str, list[dict[str, Any]]]
"""By kind: at each chosen round ``gap`` and ``right``, see :func:`separation`."""


def separation(updates: Updates, truth: Sequence[int]) -> dict[str, Any]:
    """Return how well clients' updates or gradients tell their clusters apart.

    Parameters
    ----------
    updates
        Of n clients.
    truth
        Their clusters, ``[n]``.

    Returns
    -------
    dict
        ``gap``, the separation gap g(α) (CFL Definition 2); ``right``, whether the optimal bi-partition parts no two
        clients of one cluster (Definition 1), which it can do without a gap.
    """
    alpha = cosine_similarity(updates.signatures)
    split = optimal_bipartition(alpha, range(len(truth)))
    first, second = ({truth[place] for place in part} for part in (split.first, split.second))
    return {"gap": separation_gap(alpha, truth, split.alpha_cross_max), "right": not first & second}


def gaps_over_rounds(
    federation: Federation,
    make_model: Callable[[int], nn.Module],
    local: LocalSpec,
    at: Collection[int],
    *,
    seed: int,
    device: str = "auto",
    stop: Callable[[], bool] | None = None,
) -> Gaps:
    """Return the separation at the joint model after each chosen round of federated learning.

    Parameters
    ----------
    federation
        Its true clusters are what the gap is measured against.
    make_model
        Makes the model of a seed.
    local
        Local training.
    at
        Rounds, from 1 on.
    seed
        Of the run.
    device, stop
        As of :func:`fedclade.simulate`.
    """
    assert federation.true_clusters is not None  # the caller's federation has a shift
    truth = [federation.true_clusters[client] for client in federation.ids]
    ids, rows = federation.ids, [0] * len(federation)
    clients = SimulatedClients(federation, make_model(seed), choose_device(device))
    found: Gaps = {kind: [] for kind in KINDS}

    def on_round(row: Row, tree: ParameterTree) -> None:
        if row["round"] in at:
            model, asked = tree.nodes[0].params[None], Round(row["round"] + 1, local, seed, purpose="separation")
            found["updates"].append(separation(clients.train(ids, model, rows, asked), truth))
            found["gradients"].append(separation(clients.gradients(ids, model, rows, asked), truth))

    last = max(at)
    simulate(
        *(FedAvg(), make_model, federation),
        local=local,
        rounds=last,
        seed=seed,
        evaluate_every=last,
        device=device,
        on_round=on_round,
        stop=stop,
    )
    return found
