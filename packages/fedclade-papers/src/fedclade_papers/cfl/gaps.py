"""CFL's figures 5 and 6: the separation gap of weight updates and of gradients.

Both are measured at the same models of plain federated learning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedclade import FedAvg, Federation, ParameterTree, Round, Updates
from fedclade.clustering import cosine_similarity, find_optimal_bipartition, separation_gap
from fedclade.runs import Maker
from fedclade.training import SimulatedClients, choose_device
from fedclade_papers.cache import ResultCache, Settings, local_of, maker_of
from fedclade_papers.experiment import Paper
from fedclade_papers.outcome import Claim, Outcome, Row

KINDS = {"updates": "weight updates", "gradients": "gradients"}
"""Vectors by which clients are compared: eq. 51 and eq. 50."""

FEWEST_ROUNDS = 20
"""Smallest number of rounds that can show the paper's claims on 50 rounds."""

Gaps = dict[str, list[dict[str, Any]]]
"""By kind: ``gap`` and ``right`` at each chosen round, see :func:`separation`."""

Curves = Mapping[str, Mapping[str, NDArray[np.float64]]]
"""By kind, then ``gap`` or ``right``: ``[seeds, n]``."""


def separation(updates: Updates, truth: Sequence[int]) -> dict[str, Any]:
    """Return measures of how well updates or gradients separate the true clusters.

    Parameters
    ----------
    updates
        Updates or gradients of n clients.
    truth
        The true cluster of each client, ``[n]``.

    Returns
    -------
    dict
        ``gap`` is the separation gap g(α) (Definition 2). ``right`` is whether the optimal
        bi-partition separates no two clients of one cluster (Definition 1), which is possible
        without a gap.
    """
    alpha = cosine_similarity(updates.signatures)
    split = find_optimal_bipartition(alpha, range(len(truth)))
    first, second = ({truth[place] for place in part} for part in (split.first, split.second))
    return {"gap": separation_gap(alpha, truth, split.alpha_cross_max), "right": not first & second}


def gaps_over_rounds(
    cache: ResultCache,
    federation: Federation,
    make_model: Maker,
    settings: Settings,
    at: Collection[int],
    seed: int,
) -> Gaps:
    """Return the separation at the joint model after each chosen round of federated learning.

    Rounds are counted from 1.
    """
    assert federation.true_clusters is not None  # the federation has a shift
    ids, rows = federation.ids, [0] * len(federation)
    truth = [federation.true_clusters[client] for client in ids]
    clients = SimulatedClients(federation, make_model(seed), choose_device(cache.device))
    found: Gaps = {kind: [] for kind in KINDS}

    def on_round(row: Mapping[str, Any], tree: ParameterTree) -> None:
        if row["round"] in at:
            model = tree.nodes[0].params[None]
            next_round = Round(row["round"] + 1, local_of(settings), seed, purpose="separation")
            found["updates"].append(separation(clients.train(ids, model, rows, next_round), truth))
            found["gradients"].append(
                separation(clients.gradients(ids, model, rows, next_round), truth)
            )

    last: dict[str, Any] = {"rounds": max(at), "evaluate_every": max(at), "on_round": on_round}
    cache.simulate(FedAvg(), make_model, federation, settings, seed, **last)
    return found


def measure_data(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Measure the gap after the last round for every number of data points (figure 5)."""
    at = [settings["rounds"]]
    curves = {
        name: _curves(cache, settings, name, task["points"], at)
        for name, task in settings["tasks"].items()
    }
    x = {name: task["points"] for name, task in settings["tasks"].items()}
    return _outcome(paper, settings, curves, x, settings["enough_points"], "data points", "data")


def measure_rounds(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Measure the gap at the model after each chosen round (figure 6)."""
    tasks: dict[str, Any] = settings["tasks"]
    at: list[int] = settings["rounds"]
    enough: int = settings["enough_rounds"]
    curves = {
        name: _curves(cache, settings, name, [task["points"]], at) for name, task in tasks.items()
    }
    return _outcome(
        paper,
        settings,
        curves,
        dict.fromkeys(tasks, at),
        dict.fromkeys(tasks, enough),
        "rounds",
        "rounds",
    )


def _curves(
    cache: ResultCache, settings: Settings, name: str, points: Sequence[int], at: Sequence[int]
) -> Curves:
    """Return the data of a figure for one data set.

    For each number of points it contains the chosen rounds, concatenated.
    """
    task = settings["tasks"][name]
    found: list[list[Gaps]] = [
        [
            cache.piece(
                f"{name}, {n} data points, seed {seed}",
                partial(_gaps, cache, settings, name, n, at, seed),
            )
            for n in points
        ]
        for seed in task.get("seeds", settings["seeds"])
    ]
    return {
        kind: {
            what: np.array(
                [[at[what] for gaps in each for at in gaps[kind]] for each in found], dtype=float
            )
            for what in ("gap", "right")
        }
        for kind in KINDS
    }


def _gaps(
    cache: ResultCache, settings: Settings, name: str, points: int, at: Sequence[int], seed: int
) -> Gaps:
    task = settings["tasks"][name]
    more: dict[str, Any] = {
        "samples_per_client": points,
        "shift": "label_swap",
        "clusters": settings["clusters"],
    }
    federation = cache.federation(task.get("data", name), settings, seed, **more)
    make = maker_of(federation, task["model"], task.get("model_arguments"))
    return gaps_over_rounds(cache, federation, make, {**settings, **task}, at, seed)


def _outcome(
    paper: Paper,
    settings: Settings,
    curves: Mapping[str, Curves],
    x: Mapping[str, Sequence[int]],
    enough: Mapping[str, int],
    unit: str,
    what: str,
) -> Outcome:
    tested = bool(np.max(settings["rounds"]) >= FEWEST_ROUNDS)
    claims = list[Claim]()
    rows = list[Row]()
    ends = list[str]()
    for name, curve in curves.items():
        named = {"data": name, "enough": enough[name], "unit": unit, "what": what}
        claims += _claims(partial(paper.claim, **named), curve, x[name], enough[name], unit)
        rows += [
            Row.of(
                f"{name}, {unit} = {place} · {of_kind}: g(α)", None, curve[kind]["gap"][:, n], ""
            )
            for kind, of_kind in KINDS.items()
            for n, place in enumerate(x[name])
        ]
        gaps = curve["updates"]["gap"].mean(0)
        ends.append(f"{name} {gaps[0]:+.2f} at {x[name][0]} to {gaps[-1]:+.2f} at {x[name][-1]}")
    series = {
        name: {
            "x": list(x[name]),
            **{kind: np.round(curve[kind]["gap"], 4).tolist() for kind in KINDS},
        }
        for name, curve in curves.items()
    }
    seen = Counter(claim.seen for claim in claims if tested and claim.holds is not None)
    counted = f"; {seen['yes']} of {seen.total()} claims were seen" if seen else ""
    sentence = f"Mean gap by {unit}: {'; '.join(ends)}{counted}."
    because = None if seen["no"] else ""
    return paper.outcome(rows, claims, series, sentence, because=because, tested=tested)


def _claims(
    claim: Callable[..., Claim], curve: Curves, x: Sequence[int], enough: int, unit: str
) -> list[Claim]:
    """Return the claims on one data set.

    The paper regards a right split as a positive gap; but a split can be right without a gap
    (figure 3). ``x`` increases: "fewer data points" and "a greater distance to a stationary
    solution" (section VI-A) are its lower half.
    """
    gaps, of_gradients = (curve[kind]["gap"].mean(0) for kind in KINDS)
    right = 100 * curve["updates"]["right"].mean(0)
    beyond = np.asarray(x) >= enough
    steps = np.diff(gaps)
    better = np.asarray(x)[gaps > of_gradients].tolist()
    few = gaps[: (len(x) + 1) // 2] > of_gradients[: (len(x) + 1) // 2]
    shares = ", ".join(f"{n}: {share:.0f} %" for n, share in zip(x, right, strict=True))
    means = ", ".join(f"{n}: {gap:+.2f}" for n, gap in zip(x, gaps, strict=True))
    back = f"{(steps < 0).sum()} of {len(steps)} steps go down"
    where = f"at {', '.join(map(str, better)) or 'none'} of {', '.join(map(str, x))}"
    against = f"mean gap {gaps.mean():+.2f} against {of_gradients.mean():+.2f}"
    ends = f"{unit} {x[0]}: {gaps[0]:+.2f}, {x[-1]}: {gaps[-1]:+.2f}"
    is_right, is_positive = (
        (right[beyond].min() == 100, gaps[beyond].min() > 0) if beyond.any() else (None, None)
    )
    return [
        claim("right", is_right, f"share of the seeds, by {unit}: {shares}"),
        claim("positive", is_positive, f"mean gap, by {unit}: {means}"),
        claim(
            "grows",
            gaps[-1] > gaps[0] if len(steps) else None,
            f"{ends}; {back}",
            bool((steps >= 0).all()),
        ),
        claim("updates", few.all(), f"{where}; {against}"),
    ]
