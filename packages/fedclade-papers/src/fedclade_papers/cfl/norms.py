"""Figure 7 of the CFL paper: norm of the mean update and largest norm of two clients' updates.

*Congruent* clients are clients for which one model is good; *incongruent* clients disagree, so that
no single model is good for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fedclade import FedAvg
from fedclade_papers.cache import ResultCache, Settings, maker_of
from fedclade_papers.experiment import Paper
from fedclade_papers.outcome import Claim, Outcome, Row

KINDS: dict[str, dict[str, Any]] = {
    "incongruent": {"partition": "iid", "shift": "label_swap", "clusters": 2},
    "congruent": {"partition": "label_groups", "clusters": 2},
}
"""Options for the data of the two clients, by kind.

Incongruent clients each have a random half of the data, with different pairs of labels swapped. Of
the congruent clients, one has the digits 0 to 4 and the other the digits 5 to 9.
"""

NORMS = {
    "mean_norm": "norm of the mean update (eq. 32)",
    "max_norm": "largest norm of a client's update (eq. 33)",
}

NormsByKind = Mapping[str, Sequence[Mapping[str, list[float]]]]
"""Results of runs by kind of clients: for each seed the norms of every round and final loss."""

POINTS = 100
"""Number of points of a line in the figure; each point is the mean over a block of rounds."""

EARLY = 0.2
"""Share of the rounds that count as early.

The early norm is the mean over the second half of the early rounds.
"""
LATE = 0.1
"""Share of the rounds, at the end, over which the late norm is averaged."""

FEWEST_ROUNDS = 100
"""Smallest number of rounds that can show whether norms stagnate."""

VANISHED = 0.1
"""Largest ratio of late norm to early norm at which a norm counts as vanished."""

STAGNANT = 0.8
"""Smallest ratio of late norm to early norm at which a norm counts as stagnant."""

APART = 1.5
"""Smallest ratio between the late largest norms of incongruent and of congruent clients.

A smaller ratio does not count as a difference between the two kinds of clients.
"""


def measure(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Measure figure 7: norms of two congruent and of two incongruent clients over many rounds."""
    found = {
        kind: cache.by_seed(kind, settings["seeds"], partial(_train, cache, settings, kind))
        for kind in KINDS
    }
    change = _compare_early_with_late(found)
    rows = [
        Row.of(f"{kind}: {what}, end against early on", None, change[kind, norm], "×")
        for kind in KINDS
        for norm, what in NORMS.items()
    ]
    stays = change["incongruent", "max_norm"]
    falls = change["congruent", "max_norm"]
    along = change["congruent", "mean_norm"]
    server = change["incongruent", "mean_norm"] + along
    loss = np.mean([run["train_loss"] for run in found["incongruent"]])
    apart = min(
        _average_late(a["max_norm"]) / _average_late(b["max_norm"])
        for a, b in zip(found["incongruent"], found["congruent"], strict=True)
    )
    staying = (
        f"×{min(stays):.2f} to ×{max(stays):.2f} from the first fifth of the rounds to the last "
        f"tenth; clients' training ends at a loss of {loss:.2g} nats, and near 0 they know the "
        "swapped labels by heart"
    )
    ratio = f"in the end the incongruent one is at least {apart:.1f} times the congruent one"
    claims = (
        paper.claim("stagnates", _check_stagnation(stays, settings), staying, min(stays) > 1),
        paper.claim("vanishes", *check_vanishing(falls, along)),
        paper.claim(
            "mean",
            max(server) < 1,
            f"×{min(server):.2g} to ×{max(server):.2g}",
            max(server) < VANISHED,
        ),
        paper.claim("apart", apart > APART, ratio),
    )
    sentence = (
        f"From early on to the end the mean update falls to ×{min(server):.2g} to "
        f"×{max(server):.2g}, the largest to ×{max(falls):.2g} of congruent clients, and to "
        f"×{min(stays):.2g} of incongruent ones."
    )
    series = {"rounds": settings["rounds"], **_collect_series(found)}
    because = _explain_differences(claims)
    return paper.outcome(rows, claims, series, sentence, because=because)


def measure_steps(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Measure figure 7 with full batches, which have no gradient noise, at several step sizes.

    Two congruent and two incongruent clients train with each step size.
    """
    found = {step: _train_at_step(cache, settings, step) for step in settings["step_sizes"]}
    rows = list[Row]()
    for step, kinds in found.items():
        rows += _make_step_rows(step, kinds, settings)
    change = {step: _compare_early_with_late(kinds) for step, kinds in found.items()}
    small = min(found)
    large = max(found)
    at_small = change[small]
    stays = at_small["incongruent", "max_norm"]
    falls = at_small["congruent", "max_norm"]
    along = at_small["congruent", "mean_norm"]
    server = at_small["incongruent", "mean_norm"] + along
    steps = "; ".join(
        f"η = {step:g} ×{np.mean(change[step]['incongruent', 'mean_norm']):.2g}, largest norm "
        f"×{np.mean(change[step]['incongruent', 'max_norm']):.2g}"
        for step in found
    )
    ratios = [float(np.mean(change[step]["incongruent", "mean_norm"])) for step in (small, large)]
    claims = (
        paper.claim(
            "stagnates",
            _check_stagnation(stays, settings),
            f"×{min(stays):.2f}",
            min(stays) > 1,
            step=small,
        ),
        paper.claim("vanishes", *check_vanishing(falls, along), step=small),
        paper.claim(
            "mean",
            max(server) < 1,
            f"×{max(server):.2g} at most",
            max(server) < VANISHED,
            step=small,
        ),
        replace(
            paper.claim(
                "steps", ratios[0] < 1 <= ratios[1], f"norm of the mean, incongruent: {steps}"
            ),
            own=True,
        ),
    )
    sentence = (
        f"Incongruent clients, from early on to the end, the norm of the mean update: {steps}."
    )
    steps_shown = {f"{step:g}": _collect_series(kinds) for step, kinds in found.items()}
    series = {"rounds": settings["rounds"], "steps": steps_shown}
    because = _explain_differences(claims)
    return paper.outcome(rows, claims, series, sentence, because=because)


def _make_step_rows(step: float, found: NormsByKind, settings: Settings) -> list[Row]:
    """Return rows with the early and the late norms of a step size, for both kinds of clients."""
    last_rounds = {"early on": _count_early_rounds(settings), "at the end": settings["rounds"]}
    rows = list[Row]()
    for kind, runs in found.items():
        for norm, what in NORMS.items():
            for when, last in last_rounds.items():
                norms = [_average_late(run[norm][:last]) for run in runs]
                rows.append(Row.of(f"η = {step:g}, {kind}: {what}, {when}", None, norms, ""))
    return rows


def _compare_early_with_late(found: NormsByKind) -> dict[tuple[str, str], list[float]]:
    """Return the ratio of late norm to early norm for each seed, by kind of clients and norm."""
    change: dict[tuple[str, str], list[float]] = {}
    for kind, runs in found.items():
        for norm in NORMS:
            change[kind, norm] = [_compute_change(run[norm]) for run in runs]
    return change


def _collect_series(found: NormsByKind) -> dict[str, dict[str, list[float]]]:
    """Collect the norms of the first seed that the figure shows, by kind of clients and norm."""
    series: dict[str, dict[str, list[float]]] = {}
    for kind, runs in found.items():
        series[kind] = {norm: _average_blocks(runs[0][norm]) for norm in NORMS}
    return series


def _explain_differences(claims: Sequence[Claim]) -> str | None:
    """Return an empty string if no tested claim failed; None to give the paper's reasons."""
    if any(claim.seen in ("no", "direction only") for claim in claims):
        return None
    return ""


def _train_at_step(cache: ResultCache, settings: Settings, step: float) -> NormsByKind:
    """Train both kinds of clients with a step size, and return the norms for each seed."""
    at_step = {**settings, "lr": step, "batch_size": settings["samples_per_client"]}
    found: dict[str, Sequence[Mapping[str, list[float]]]] = {}
    for kind in KINDS:
        train = partial(_train, cache, at_step, kind)
        found[kind] = cache.by_seed(f"η = {step:g}, {kind}", settings["seeds"], train)
    return found


def _count_early_rounds(settings: Settings) -> int:
    """Return the number of rounds at the start of a run that count as early."""
    return max(1, round(EARLY * settings["rounds"]))


def _check_stagnation(changes: Sequence[float], settings: Settings) -> bool | None:
    """Return whether norms have stagnated; None if a run has too few rounds to decide.

    ``changes`` has the ratio of late norm to early norm for each seed.
    """
    if settings["rounds"] >= FEWEST_ROUNDS:
        return min(changes) >= STAGNANT
    return None


def check_vanishing(largest: Sequence[float], of_mean: Sequence[float]) -> tuple[bool, str, bool]:
    """Check that the largest norm of congruent clients vanishes along with the norm of the mean.

    Parameters
    ----------
    largest, of_mean
        Ratio of late norm to early norm for each seed, of the largest norm of a client's update and
        of the norm of the mean update.

    Returns
    -------
    tuple
        Whether both norms fall, the measurement, and whether both vanish.
    """
    measured = (
        f"largest norm ×{min(largest):.2g} to ×{max(largest):.2g}, norm of the mean "
        f"×{min(of_mean):.2g} to ×{max(of_mean):.2g}"
    )
    slowest = max(*largest, *of_mean)
    return slowest < 1, measured, slowest < VANISHED


def _train(cache: ResultCache, settings: Settings, kind: str, seed: int) -> dict[str, list[float]]:
    """Train two clients with FedAvg; return norms of every round and final training loss."""
    federation = cache.federation(settings["data"], settings, seed, clients=2, **KINDS[kind])
    run = cache.simulate(
        FedAvg(),
        maker_of(federation, settings["model"], settings.get("model_arguments")),
        federation,
        settings=settings,
        seed=seed,
        key=f"{settings['lr']:g}, {kind}, seed {seed}",
        evaluate_every=settings["rounds"],
    )
    norms: dict[str, list[float]] = {}
    for norm in NORMS:
        norms[norm] = [float(f"{row[norm]:.4g}") for row in run.cluster_rows]
    return {**norms, "train_loss": [row["train_loss"] for row in run.metric_rows[-1:]]}


def _compute_change(norms: list[float]) -> float:
    """Return the ratio of the mean norm over the last rounds to the mean norm over early rounds."""
    early = max(1, round(EARLY * len(norms)))
    return _average_late(norms) / float(np.mean(norms[early // 2 : early]))


def _average_late(norms: list[float]) -> float:
    """Return the mean norm over the last rounds, a share :data:`LATE` of all rounds."""
    late = max(1, round(LATE * len(norms)))
    return float(np.mean(norms[-late:]))


def _average_blocks(norms: list[float]) -> list[float]:
    """Return the mean norm of each of at most :data:`POINTS` blocks of rounds."""
    blocks = np.array_split(np.asarray(norms), min(POINTS, len(norms)))
    return [float(f"{block.mean():.3g}") for block in blocks]
