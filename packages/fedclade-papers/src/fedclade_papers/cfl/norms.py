"""CFL's figure 7: mean and largest norm of two clients' updates, congruent and incongruent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fedclade import FedAvg
from fedclade_papers.cache import ResultCache, Settings, maker_of
from fedclade_papers.experiment import Paper
from fedclade_papers.outcome import Outcome, Row

KINDS: dict[str, dict[str, Any]] = {
    "incongruent": {"partition": "iid", "shift": "label_swap", "clusters": 2},
    "congruent": {"partition": "label_groups", "clusters": 2},
}
"""Data of the two clients.

Incongruent clients have a random half each, with different labels swapped. Congruent clients have
the digits 0 to 4, and 5 to 9.
"""

NORMS = {
    "mean_norm": "norm of the mean update (eq. 32)",
    "max_norm": "largest norm of a client's update (eq. 33)",
}

POINTS = 100
"""Number of points that the figure shows, each the mean of a block of rounds."""

EARLY = 0.2
"""Share of the rounds that are early. The early norm is the mean over their second half."""
LATE = 0.1
"""Share of the rounds, at the end, over which the late norm is averaged."""

FEWEST_ROUNDS = 100
"""Smallest number of rounds that can show whether norms stagnate."""

VANISHED = 0.1
"""Largest ratio of the late to the early norm of a norm that has vanished."""

STAGNANT = 0.8
"""Smallest ratio of the late to the early norm of a norm that has stagnated."""

APART = 1.5
"""Smallest ratio of final largest norms, incongruent to congruent, that counts as a difference."""


def measure(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Train two clients of either kind for many rounds."""
    found = {
        kind: cache.by_seed(kind, settings["seeds"], partial(_norms, cache, settings, kind))
        for kind in KINDS
    }
    change = {
        kind: [{norm: _change(run[norm]) for norm in NORMS} for run in runs]
        for kind, runs in found.items()
    }
    rows = [
        Row.of(
            f"{kind}: {what}, end against early on",
            None,
            [each[norm] for each in change[kind]],
            "×",
        )
        for kind in KINDS
        for norm, what in NORMS.items()
    ]
    stays, falls = ([each["max_norm"] for each in change[kind]] for kind in KINDS)
    loss = np.mean([each["train_loss"] for each in found["incongruent"]])
    server = [each["mean_norm"] for kind in KINDS for each in change[kind]]
    apart = min(
        _last(a["max_norm"]) / _last(b["max_norm"]) for a, b in zip(*found.values(), strict=True)
    )
    staying = (
        f"×{min(stays):.2f} to ×{max(stays):.2f} from the first fifth of the rounds to the last "
        f"tenth; clients' training ends at a loss of {loss:.2g} nats, and near 0 they know the "
        "swapped labels by heart"
    )
    parted = f"in the end the incongruent one is at least {apart:.1f} times the congruent one"
    claims = (
        paper.claim("stagnates", _stagnates(stays, settings), staying, min(stays) > 1),
        paper.claim(
            "vanishes",
            max(falls) < 1,
            f"×{min(falls):.2g} to ×{max(falls):.2g}",
            max(falls) < VANISHED,
        ),
        paper.claim(
            "mean",
            max(server) < 1,
            f"×{min(server):.2g} to ×{max(server):.2g}",
            max(server) < VANISHED,
        ),
        paper.claim("apart", apart > APART, parted),
    )
    sentence = (
        f"From early on to the end the mean update falls to ×{min(server):.2g} to "
        f"×{max(server):.2g}, the largest to ×{max(falls):.2g} of congruent clients, and to "
        f"×{min(stays):.2g} of incongruent ones."
    )
    series = {
        kind: {norm: _thinned(runs[0][norm]) for norm in NORMS} for kind, runs in found.items()
    }
    because = None if any(claim.seen in ("no", "direction only") for claim in claims) else ""
    return paper.outcome(
        rows, claims, {"rounds": settings["rounds"], **series}, sentence, because=because
    )


def measure_steps(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Train two clients of either kind with full batches, at several step sizes.

    Full batches have no gradient noise.
    """
    found = {step: _trained(cache, settings, step) for step in settings["step_sizes"]}
    rows = [
        Row.of(
            f"η = {step:g}, {kind}: {NORMS[norm]}, {when}",
            None,
            [_last(run[norm][:last]) for run in runs],
            "",
        )
        for step, kinds in found.items()
        for kind, runs in kinds.items()
        for norm in NORMS
        for when, last in (("early on", _early(settings)), ("at the end", settings["rounds"]))
    ]
    change = {
        step: {
            (kind, norm): [_change(run[norm]) for run in runs]
            for kind, runs in kinds.items()
            for norm in NORMS
        }
        for step, kinds in found.items()
    }
    small = min(found)
    large = max(found)
    at_small = change[small]
    stays = at_small["incongruent", "max_norm"]
    falls = at_small["congruent", "max_norm"]
    server = at_small["incongruent", "mean_norm"] + at_small["congruent", "mean_norm"]
    steps = "; ".join(
        f"η = {step:g} ×{np.mean(change[step]['incongruent', 'mean_norm']):.2g}, largest norm "
        f"×{np.mean(change[step]['incongruent', 'max_norm']):.2g}"
        for step in found
    )
    ratios = [float(np.mean(change[step]["incongruent", "mean_norm"])) for step in (small, large)]
    claims = (
        paper.claim(
            "stagnates",
            _stagnates(stays, settings),
            f"×{min(stays):.2f}",
            min(stays) > 1,
            step=small,
        ),
        paper.claim(
            "vanishes", max(falls) < 1, f"×{max(falls):.2g}", max(falls) < VANISHED, step=small
        ),
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
    series = {
        f"{step:g}": {
            kind: {norm: _thinned(runs[0][norm]) for norm in NORMS} for kind, runs in kinds.items()
        }
        for step, kinds in found.items()
    }
    because = None if any(claim.seen in ("no", "direction only") for claim in claims) else ""
    return paper.outcome(
        rows, claims, {"rounds": settings["rounds"], "steps": series}, sentence, because=because
    )


def _trained(
    cache: ResultCache, settings: Settings, step: float
) -> dict[str, list[dict[str, list[float]]]]:
    """Return the norms of both kinds of clients at a step size, for each seed."""
    at_step = {**settings, "lr": step, "batch_size": settings["samples_per_client"]}
    return {
        kind: cache.by_seed(
            f"η = {step:g}, {kind}", settings["seeds"], partial(_norms, cache, at_step, kind)
        )
        for kind in KINDS
    }


def _early(settings: Settings) -> int:
    """Return the last round of the early part of a run."""
    return max(1, round(EARLY * settings["rounds"]))


def _stagnates(changes: Sequence[float], settings: Settings) -> bool | None:
    """Return whether norms have stagnated; None if the rounds are too few to decide."""
    return min(changes) >= STAGNANT if settings["rounds"] >= FEWEST_ROUNDS else None


def _norms(cache: ResultCache, settings: Settings, kind: str, seed: int) -> dict[str, list[float]]:
    federation = cache.federation(settings["data"], settings, seed, clients=2, **KINDS[kind])
    how: dict[str, Any] = {
        "key": f"{settings['lr']:g}, {kind}, seed {seed}",
        "evaluate_every": settings["rounds"],
    }
    model = maker_of(federation, settings["model"], settings.get("model_arguments"))
    run = cache.simulate(FedAvg(), model, federation, settings, seed, **how)
    norms = {norm: [float(f"{row[norm]:.4g}") for row in run.cluster_rows] for norm in NORMS}
    return {**norms, "train_loss": [row["train_loss"] for row in run.metric_rows[-1:]]}


def _change(norms: list[float]) -> float:
    """Return the ratio of the mean norm over the last rounds to the early norm."""
    early = max(1, round(EARLY * len(norms)))
    return _last(norms) / float(np.mean(norms[early // 2 : early]))


def _last(norms: list[float]) -> float:
    return float(np.mean(norms[-max(1, round(LATE * len(norms))) :]))


def _thinned(norms: list[float]) -> list[float]:
    return [
        float(f"{part.mean():.3g}")
        for part in np.array_split(np.asarray(norms), min(POINTS, len(norms)))
    ]
