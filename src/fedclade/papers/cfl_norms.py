"""CFL's figure 7: mean and largest norm of two clients' updates, congruent and incongruent."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fedclade.algorithms import FedAvg
from fedclade.core import LocalSpec
from fedclade.data import load_federation
from fedclade.papers.drawing import head, legend, panels
from fedclade.papers.experiment import ResultCache, Settings
from fedclade.papers.outcome import Claim, Outcome, Row, Summary
from fedclade.report import style
from fedclade.runs import simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS: dict[str, dict[str, Any]] = {
    "incongruent": {"partition": "iid", "shift": "label_swap", "clusters": 2},
    "congruent": {"partition": "label_groups", "clusters": 2},
}
"""What two clients hold: both a random half, with other labels swapped; or digits 0 to 4, and 5 to 9."""

NORMS = {"mean_norm": "norm of the mean update (eq. 32)", "max_norm": "largest norm of a client's update (eq. 33)"}

POINTS = 100
"""Rounds that the figure shows, means of the rounds between them."""

EARLY, LATE = 0.2, 0.1
"""Shares of the rounds whose mean is compared: the end of the first fifth, and the last tenth."""

BECAUSE = (
    "The paper gives neither network, nor step size, nor batch size: at a constant step size updates of small batches "
    "keep a norm from the noise of the batches alone, and a network that knows swapped labels by heart has none left."
)

FEWEST_ROUNDS = 100
"""Fewer do not tell what stagnates."""

VANISHED = 0.1
"""What norm has gone to zero: one that keeps less than this of what it was early on."""

STAGNANT = 0.8
"""What norm has stagnated: one that keeps so much of what it was early on."""

APART = 1.5
"""How many times the congruent clients' largest norm the incongruent ones' must be in the end, to be told apart."""


def measure(bench: ResultCache, settings: Settings) -> Outcome:
    """Train two clients of either kind for many rounds."""
    found = {
        kind: [
            bench.piece(f"{kind}, seed {seed}", partial(_norms, bench, settings, kind, seed))
            for seed in settings["seeds"]
        ]
        for kind in KINDS
    }
    change = {kind: [{norm: _change(run[norm]) for norm in NORMS} for run in runs] for kind, runs in found.items()}
    rows = tuple(
        Row(f"{kind}: {what}, end against early on", None, float(np.mean(seeds)), "×", seeds=seeds)
        for kind in KINDS
        for norm, what in NORMS.items()
        for seeds in [tuple(each[norm] for each in change[kind])]
    )
    stays = [each["max_norm"] for each in change["incongruent"]]
    falls = [each["max_norm"] for each in change["congruent"]]
    loss = float(np.mean([each["train_loss"] for each in found["incongruent"]]))
    server = [each["mean_norm"] for kind in KINDS for each in change[kind]]
    parted = min(_last(a["max_norm"]) / _last(b["max_norm"]) for a, b in zip(*found.values(), strict=True))
    claims = (
        Claim(
            "Incongruent: the largest norm stagnates and even increases (fig. 7 left)",
            min(stays) >= STAGNANT if settings["rounds"] >= FEWEST_ROUNDS else None,
            f"×{min(stays):.2f} to ×{max(stays):.2f} from the first fifth of the rounds to the last tenth; clients' "
            f"training ends at a loss of {loss:.2g} nats, and near 0 they know the swapped labels by heart",
        ),
        Claim(
            "Congruent: the largest norm goes to zero along with the mean (fig. 7 right)",
            max(falls) < 1,
            f"×{min(falls):.2g} to ×{max(falls):.2g}",
            max(falls) < VANISHED,
        ),
        Claim(
            "In both cases the norm of the mean tends to zero (fig. 7)",
            max(server) < 1,
            f"×{min(server):.2g} to ×{max(server):.2g}",
            max(server) < VANISHED,
        ),
        Claim(
            "So the largest norm tells the two cases apart (eq. 33)",
            parted > APART,
            f"in the end the incongruent one is at least {parted:.1f} times the congruent one",
        ),
    )
    summary = Summary(
        "In both cases the mean update goes to zero; the largest one goes with it only if clients are congruent.",
        f"From early on to the end the mean update falls to ×{min(server):.2g} to ×{max(server):.2g}, the largest to "
        f"×{max(falls):.2g} of congruent clients, and to ×{min(stays):.2g} of incongruent ones.",
        BECAUSE if any(claim.seen in ("no", "direction only") for claim in claims) else "",
    )
    series = {kind: {norm: _thinned(runs[0][norm]) for norm in NORMS} for kind, runs in found.items()}
    remarks = (
        "The paper does not give the step size, the batch size or the network of this figure. 'Early on' is the end of "
        "the first fifth of the rounds.",
    )
    return Outcome(rows, claims, {"rounds": settings["rounds"], **series}, remarks, summary)


def _norms(bench: ResultCache, settings: Settings, kind: str, seed: int) -> dict[str, list[float]]:
    federation = load_federation(
        settings["data"],
        clients=2,
        samples_per_client=settings["samples_per_client"],
        test_samples=settings["test_samples"],
        seed=seed,
        data_dir=bench.data_dir,
        **KINDS[kind],
    )
    run = simulate(
        *(FedAvg(), settings["model"], federation),
        local=LocalSpec(epochs=settings["epochs"], batch_size=settings["batch_size"], lr=settings["lr"]),
        rounds=settings["rounds"],
        seed=seed,
        evaluate_every=settings["rounds"],
        device=bench.device,
        folder=bench.folder_for(f"{kind}-seed-{seed}"),
        stop=bench.stop,
    )
    norms = {norm: [float(f"{row[norm]:.4g}") for row in run.clusters] for norm in NORMS}
    return {**norms, "train_loss": [row["train_loss"] for row in run.metrics[-1:]]}


def _change(norms: list[float]) -> float:
    """Return the mean over the last rounds, as a multiple of that at the end of the first fifth."""
    early = max(1, round(EARLY * len(norms)))
    return _last(norms) / float(np.mean(norms[early // 2 : early]))


def _last(norms: list[float]) -> float:
    return float(np.mean(norms[-max(1, round(LATE * len(norms))) :]))


def _thinned(norms: list[float]) -> list[float]:
    return [float(f"{part.mean():.3g}") for part in np.array_split(np.asarray(norms), min(POINTS, len(norms)))]


def draw(outcome: Outcome, settings: Settings) -> Figure:
    """Draw both norms over the rounds, incongruent at the left."""
    title = "The largest norm of an update tells whether one model suits both clients"
    figure, axes = panels(2, title, f"after Sattler et al. 2019, figure 7 · {settings['data']}, two clients")
    for axis, kind in zip(axes, KINDS, strict=True):
        for (norm, name), color in zip(NORMS.items(), (style.INK, style.CLUSTERS[1]), strict=True):
            values = outcome.series[kind][norm]
            axis.plot(np.linspace(1, outcome.series["rounds"], len(values)), values, color=color, label=name)
        style.label(axis, x="communication rounds", y="norm of the update")
        head(axis, kind)
    style.log_scale(axes[0])
    style.log_scale(axes[1])
    legend(axes[1])
    return figure
