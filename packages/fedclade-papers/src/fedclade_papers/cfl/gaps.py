"""Figures 5 and 6 of the CFL paper: the separation gap of weight updates and of gradients.

The *separation gap* g(α) is the smallest similarity within a true cluster minus the largest
similarity across the split; if it is positive, the split is correct. Updates and gradients are
compared at the same models, which plain federated learning has trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedclade import ClientWork, FedAvg, Federation, Nothing, ParameterTree, Round, Updates
from fedclade.clustering import cosine_similarity, find_optimal_bipartition, separation_gap
from fedclade.runs import Maker
from fedclade.training import SimulatedClients, choose_device
from fedclade_papers.cache import ResultCache, Settings, local_of, maker_of
from fedclade_papers.experiment import Paper
from fedclade_papers.outcome import Claim, Outcome, Row

KINDS = {"updates": "weight updates", "gradients": "gradients"}
"""Kinds of vectors by which clients are compared: weight updates (eq. 51), gradients (eq. 50)."""

FEWEST_ROUNDS = 20
"""Smallest number of rounds that can show the paper's claims on 50 rounds."""

Gaps = dict[str, list[dict[str, Any]]]
"""Results of :func:`separation` (``gap`` and ``right``) at each chosen round, by kind of vector."""

Curves = Mapping[str, Mapping[str, NDArray[np.float64]]]
"""Arrays ``[seeds, n]`` by kind of vector, then by ``gap`` or ``right``.

n is the number of points of the curve.
"""


def separation(updates: Updates, truth: Sequence[int]) -> dict[str, Any]:
    """Measure how well clients' updates or gradients separate the true clusters.

    Parameters
    ----------
    updates
        Updates or gradients of n clients.
    truth
        The true cluster of each client, ``[n]``.

    Returns
    -------
    dict
        ``gap``: the separation gap g(α) (Definition 2); ``right``: whether the optimal
        bi-partition separates no two clients of one true cluster (Definition 1), which is also
        possible without a positive gap.
    """
    alpha = cosine_similarity(updates.signatures)
    split = find_optimal_bipartition(alpha, range(len(truth)))
    first = {truth[place] for place in split.first}
    second = {truth[place] for place in split.second}
    return {"gap": separation_gap(alpha, truth, split.alpha_cross_max), "right": not first & second}


def gaps_over_rounds(
    cache: ResultCache,
    federation: Federation,
    make_model: Maker,
    settings: Settings,
    at: Collection[int],
    seed: int,
) -> Gaps:
    """Train one model for all clients, and measure the separation gaps after chosen rounds.

    Parameters
    ----------
    cache, federation, make_model, settings, seed
        Cache, clients, function that builds the model from a seed, settings, and seed of the run.
    at
        Numbers of the rounds, from 1, after which the gaps are measured.
    """
    assert federation.true_clusters is not None  # the federation has a shift
    ids = federation.ids
    rows = [0] * len(federation)  # all clients train row 0 of the models, the joint one
    truth = [federation.true_clusters[client] for client in ids]
    clients = SimulatedClients(federation, make_model(seed), choose_device(cache.device))
    found: Gaps = {kind: [] for kind in KINDS}

    def on_round(row: Mapping[str, Any], tree: ParameterTree) -> None:
        if row["round"] in at:
            model = tree.nodes[0].params[None]
            next_round = Round(row["round"] + 1, local_of(settings), seed, purpose="separation")
            work = ClientWork(store=Nothing())
            updates = clients.train(
                ids, models=model, assignment=rows, this_round=next_round, work=work
            )
            gradients = clients.gradients(ids, model, rows, next_round)
            found["updates"].append(separation(updates, truth))
            found["gradients"].append(separation(gradients, truth))

    cache.simulate(
        FedAvg(),
        make_model,
        federation,
        settings=settings,
        seed=seed,
        rounds=max(at),
        evaluate_every=max(at),
        on_round=on_round,
    )
    return found


def measure_data(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Measure figure 5: the separation gap after the last round, for each number of data points."""
    at = [settings["rounds"]]
    curves: dict[str, Curves] = {}
    for name, task in settings["tasks"].items():
        curves[name] = _measure_curves(cache, settings, name, points=task["points"], at=at)
    x = {name: task["points"] for name, task in settings["tasks"].items()}
    return _make_outcome(
        paper,
        settings,
        curves,
        x=x,
        enough=settings["enough_points"],
        unit="data points",
        what="data",
    )


def measure_rounds(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Measure figure 6: the separation gap at the model after each chosen round."""
    tasks: dict[str, Any] = settings["tasks"]
    at: list[int] = settings["rounds"]
    enough: int = settings["enough_rounds"]
    curves: dict[str, Curves] = {}
    for name, task in tasks.items():
        curves[name] = _measure_curves(cache, settings, name, points=[task["points"]], at=at)
    return _make_outcome(
        paper,
        settings,
        curves,
        x=dict.fromkeys(tasks, at),
        enough=dict.fromkeys(tasks, enough),
        unit="rounds",
        what="rounds",
    )


def _measure_curves(
    cache: ResultCache, settings: Settings, name: str, *, points: Sequence[int], at: Sequence[int]
) -> Curves:
    """Measure the separation gaps of one data set for every seed.

    The second dimension of the arrays has, for each number of data points in turn, an entry for
    each chosen round.
    """
    task = settings["tasks"][name]
    found: list[Gaps] = []
    for seed in task.get("seeds", settings["seeds"]):
        of_seed: Gaps = {kind: [] for kind in KINDS}
        for n in points:
            measure = partial(
                _measure_gaps, cache, settings, name, points=n, chosen_rounds=at, seed=seed
            )
            gaps: Gaps = cache.piece(f"{name}, {n} data points, seed {seed}", measure)
            for kind in KINDS:
                of_seed[kind] += gaps[kind]
        found.append(of_seed)
    curves: dict[str, dict[str, NDArray[np.float64]]] = {}
    for kind in KINDS:
        measures = [of_seed[kind] for of_seed in found]
        curves[kind] = {
            "gap": _stack_seeds(measures, "gap"),
            "right": _stack_seeds(measures, "right"),
        }
    return curves


def _stack_seeds(found: Sequence[Sequence[Mapping[str, Any]]], what: str) -> NDArray[np.float64]:
    """Stack a quantity of :func:`separation`, ``gap`` or ``right``, as an array ``[seeds, n]``."""
    array = np.empty((len(found), len(found[0])))
    for row, of_seed in enumerate(found):
        values = [measures[what] for measures in of_seed]
        array[row] = np.array(values, dtype=float)
    return array


def _measure_gaps(
    cache: ResultCache,
    settings: Settings,
    name: str,
    *,
    points: int,
    chosen_rounds: Sequence[int],
    seed: int,
) -> Gaps:
    task = settings["tasks"][name]
    federation = cache.federation(
        task.get("data", name),
        settings,
        seed,
        samples_per_client=points,
        shift="label_swap",
        clusters=settings["clusters"],
    )
    make = maker_of(federation, task["model"], task.get("model_arguments"))
    return gaps_over_rounds(
        cache,
        federation,
        make_model=make,
        settings={**settings, **task},
        at=chosen_rounds,
        seed=seed,
    )


def _make_outcome(
    paper: Paper,
    settings: Settings,
    curves: Mapping[str, Curves],
    *,
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
        claims += _check_claims(
            partial(paper.claim, **named), curve, x=x[name], enough=enough[name], unit=unit
        )
        for kind, of_kind in KINDS.items():
            for n, place in enumerate(x[name]):
                gaps_of_seeds = curve[kind]["gap"][:, n]
                row_name = f"{name}, {unit} = {place} · {of_kind}: g(α)"
                rows.append(Row.of(row_name, None, gaps_of_seeds, ""))
        gaps = curve["updates"]["gap"].mean(0)
        ends.append(f"{name} {gaps[0]:+.2f} at {x[name][0]} to {gaps[-1]:+.2f} at {x[name][-1]}")
    series: dict[str, dict[str, Any]] = {}
    for name, curve in curves.items():
        series[name] = {"x": list(x[name])}
        for kind in KINDS:
            series[name][kind] = np.round(curve[kind]["gap"], 4).tolist()
    seen = Counter(claim.seen for claim in claims if tested and claim.holds is not None)
    counted = ""
    if seen:
        counted = f"; {seen['yes']} of {seen.total()} claims were seen"
    sentence = f"Mean gap by {unit}: {'; '.join(ends)}{counted}."
    because = None if seen["no"] else ""
    return paper.outcome(rows, claims, series, sentence, because=because, tested=tested)


def _check_claims(
    claim: Callable[..., Claim], curve: Curves, *, x: Sequence[int], enough: int, unit: str
) -> list[Claim]:
    """Return the paper's claims on one data set.

    The paper regards a correct split as a positive gap; but a split can be correct without a
    positive gap (figure 3). ``x``, the values of the horizontal axis, increases. "Fewer data
    points" and "a greater distance to a stationary solution" (section VI-A) are read as the lower
    half of ``x``. ``enough`` is the value of ``x`` from which on the paper claims a correct split.
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
    is_right = None
    is_positive = None
    if beyond.any():
        is_right = right[beyond].min() == 100
        is_positive = gaps[beyond].min() > 0
    grows = None
    if len(steps):
        grows = gaps[-1] > gaps[0]
    return [
        claim("right", is_right, f"share of the seeds, by {unit}: {shares}"),
        claim("positive", is_positive, f"mean gap, by {unit}: {means}"),
        claim("grows", grows, f"{ends}; {back}", bool((steps >= 0).all())),
        claim("updates", few.all(), f"{where}; {against}"),
    ]
