"""Draw the two figures of docs/rcfl.md: the gain of more and more clusters, and power against noise.

python benchmarks/rcfl_figures.py --data-dir DIR --out docs
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch

from fedclade import FedAvg, LocalTraining, ReplicatedCFL, load_federation
from fedclade.algorithms.replicated_checks import signatures_of_parts
from fedclade.clustering.split_half import Replicates, find_clusters, same_partition
from fedclade.core.queries import Round
from fedclade.runs.backend import Backend

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "fedclade"  # or the same picture would be another file each time
from matplotlib import pyplot as plt  # noqa: E402  (after the choice of how to draw)

LOCAL = LocalTraining(epochs=3, batch_size=20, lr=0.1)
TASKS = {
    "label swap, 300 images": {"samples_per_client": 300, "shift": "label_swap", "clusters": 4},
    "label swap, 40 images": {"samples_per_client": 40, "shift": "label_swap", "clusters": 4},
    "iid, 300 images": {"samples_per_client": 300},
    "iid, 40 images": {"samples_per_client": 40},
}
ROUND = ReplicatedCFL().check_every
NOISES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
REPEATS = 50


def replicates_of(settings: dict[str, object], data_dir: Path | None) -> Replicates:
    """Return the replicates of the first check of a run."""
    federation = load_federation("mnist", clients=20, test_samples=200, seed=0, data_dir=data_dir, **settings)
    algorithm = FedAvg()
    world = Backend.simulated_by(federation, "mlp", algorithm, engine="stacked")
    state = algorithm.init(world.initial, world.clients)
    for number in range(1, ROUND):
        state, _ = algorithm.step(state, federation.ids, world.clients, Round(number, LOCAL))
    model, rows = state.tree.nodes[0].params[None], [0] * len(federation)
    this_round = Round(ROUND, LOCAL)
    asked = replace(this_round, replicates=2, purpose="replicate")
    return Replicates(*signatures_of_parts(world.clients.train(federation.ids, model, rows, asked)).unbind(1))


def draw_gains(data_dir: Path | None, path: Path) -> None:
    """Draw G against the number of clusters."""
    figure, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    for name, settings in TASKS.items():
        gains = find_clusters(replicates_of(settings, data_dir)).across.gains(np.arange(20)[None])[0]
        axes.plot(range(1, len(gains) + 1), gains, marker="o", markersize=3, label=name)
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.axvline(4, color="0.6", linewidth=0.8, linestyle=":")
    axes.set(
        xticks=range(2, 21, 2),
        xlabel="clusters",
        ylabel="gain G, judged across halves",
        title=f"MNIST, 20 clients, round {ROUND}",
    )
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def power(truth: Sequence[int], noise: float) -> float:
    """Return how often all clusters are found, and real at level 0.005; means at right angles, noise of this γ."""
    dim, found = 200, 0
    means = torch.eye(dim)[torch.tensor(truth)] * dim**0.5
    for seed in range(REPEATS):
        draw = torch.Generator().manual_seed(seed)
        halves = [means + 2**0.5 * noise * torch.randn(len(truth), dim, generator=draw) for _ in range(2)]
        finding = find_clusters(Replicates(*halves))
        right = same_partition(finding.labels, np.array(truth))
        found += right and finding.p_value(0.005, np.random.default_rng(seed)) <= 0.005
    return found / REPEATS


def draw_power(path: Path) -> None:
    """Draw the share of federations whose clusters are all found against γ."""
    figure, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    cases = {"2 × 10": [0, 1] * 10, "4 × 5": [0, 1, 2, 3] * 5, "17 and 3": [0] * 17 + [1] * 3, "8 × 5": [*range(8)] * 5}
    for name, truth in cases.items():
        axes.plot(NOISES, [power(truth, noise) for noise in NOISES], marker="o", markersize=3, label=f"{name} clients")
    axes.set(
        xlabel="γ of a whole update: noise over signal",
        ylabel=f"share found, of {REPEATS}",
        title="Scripted updates, R = 200",
    )
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    arguments = parser.parse_args()
    draw_gains(arguments.data_dir, arguments.out / "rcfl-gain.svg")
    draw_power(arguments.out / "rcfl-power.svg")


if __name__ == "__main__":
    main()
