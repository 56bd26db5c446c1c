"""Compare the clusters that methods find by sketches with those that they find by whole updates.

The data are scikit-learn's digits on 12 clients with 110 images each. In two of three groups of
clients, two labels are swapped, so that the true clusters are known. The model is an MLP with
D = 17,110 parameters. For each method and signature, a row has the adjusted Rand index of the
clusters with the true ones (ARI), its mean and its smallest value over all seeds, and the number of
seeds in which the clusters are exactly those by whole updates.

    python studies/sketched_clusters.py
    python studies/sketched_clusters.py --seeds 20 --methods cfl
"""

from __future__ import annotations

import fedclade  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
import logging
from collections.abc import Callable, Mapping
from statistics import mean

import torch
from sklearn.metrics import adjusted_rand_score

from fedclade import CFL, FLHC, FedGroup, LocalTraining, Signature
from fedclade.algorithms import Algorithm
from fedclade.models import build_model

CLIENTS, GROUPS, HIDDEN = 12, 3, 228

METHODS: Mapping[str, tuple[Callable[[], Algorithm], int]] = {
    "cfl": (lambda: CFL(split_rounds=(3, 4), eps2=1e-6, min_cluster_size=2), 5),
    "fl_hc": (lambda: FLHC(rounds_before=2, n_clusters=GROUPS, metric="cosine"), 4),
    "fl_hc, l2": (lambda: FLHC(rounds_before=2, n_clusters=GROUPS, metric="l2"), 4),
    "fedgroup": (lambda: FedGroup(groups=GROUPS), 4),
}
"""Methods, each with its number of rounds."""

SIGNATURES: Mapping[str, Signature] = {
    "whole updates": Signature(),
    "sketches of 8,192": Signature(kind="projected", dim=8192),
    "sketches of 4,096": Signature(kind="projected", dim=4096),
    "sketches of 1,024": Signature(kind="projected", dim=1024),
    "sketches of 256": Signature(kind="projected", dim=256),
    "sketches of 64": Signature(kind="projected", dim=64),
}


def build(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return build_model("mlp", input_shape=(1, 8, 8), outputs=10, arguments={"hidden": HIDDEN})


def find_clusters(
    make: Callable[[], Algorithm], rounds: int, signature: Signature, seed: int
) -> tuple[list[int], list[int]]:
    """Run a method; return the found cluster and the true cluster of each client."""
    data = fedclade.load_federation(
        "digits",
        clients=CLIENTS,
        samples_per_client=110,
        shift="label_swap",
        clusters=GROUPS,
        seed=seed,
    )
    run = fedclade.simulate(
        make(),
        build,
        data,
        rounds=rounds,
        seed=seed,
        signature=signature,
        local=LocalTraining(epochs=2, batch_size=20, lr=0.1),
        evaluate_every=100,
        progress=False,
    )
    leaf_of = run.tree.leaf_of
    truth = data.true_clusters
    assert truth is not None
    ids = sorted(leaf_of)
    return [leaf_of[client] for client in ids], [truth[client] for client in ids]


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (default: 5)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    arguments = parser.parse_args()
    seeds = range(arguments.seeds)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    print("| method | signatures | ARI, mean | ARI, least | clusters as by whole updates |")
    print("|:--|:--|--:|--:|--:|")
    for method in arguments.methods:
        make, rounds = METHODS[method]
        by_whole: dict[int, list[int]] = {}
        for name, signature in SIGNATURES.items():
            scores: list[float] = []
            same = 0
            for seed in seeds:
                found, truth = find_clusters(make, rounds, signature, seed)
                whole = by_whole.setdefault(seed, found)
                scores.append(adjusted_rand_score(truth, found))
                same += adjusted_rand_score(whole, found) == 1
            shown = f"{mean(scores):.2f} | {min(scores):.2f} | {same} of {len(seeds)}"
            print(f"| {method} | {name} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
