"""Compare clusters by the signs of sketches with clusters by sketches and by whole updates.

Secure aggregation compares clients by the signs of sketches. The data are scikit-learn's digits on
8 clients with 150 images each; in each half of the clients, another pair of labels is swapped. The
model is linear (D = 650). A cell has the adjusted Rand index, and in brackets the number of
clusters.

    python benchmarks/signs.py
"""

from __future__ import annotations

import fedclade  # isort: skip  (before torch, whose threads then sleep while they wait)

import logging
from collections.abc import Callable, Mapping

import torch

from fedclade import LocalTraining, Signature
from fedclade.algorithms import CFL, FLHC, Algorithm, ReplicatedCFL, StoCFL

METHODS: Mapping[str, tuple[Callable[[], Algorithm], int]] = {
    "cfl": (lambda: CFL(split_rounds=(3,), eps2=1e-6), 6),
    "fl_hc": (lambda: FLHC(rounds_before=2, n_clusters=2, metric="cosine"), 6),
    "stocfl": (StoCFL, 6),
    "rcfl": (ReplicatedCFL, 10),
}
"""Methods, each with its number of rounds."""

SIGNATURES: Mapping[str, Signature] = {
    "whole updates": Signature(),
    "sketches, R = 325": Signature(kind="projected", dim=325),
    "signs, R = 325": Signature(kind="signs", dim=325),
    "signs, R = 128": Signature(kind="signs", dim=128),
    "signs, R = 64": Signature(kind="signs", dim=64),
}


def main() -> None:
    """Print a table for each seed."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    local = LocalTraining(epochs=2, batch_size=20, lr=0.1)
    for seed in range(3):
        print(f"seed {seed:<5}", *(f"{name:>18}" for name in SIGNATURES))
        data = fedclade.load_federation(
            "digits", clients=8, samples_per_client=150, shift="label_swap", clusters=2, seed=seed
        )
        for name, (make, rounds) in METHODS.items():
            cells: list[str] = []
            for signature in SIGNATURES.values():
                run = fedclade.simulate(
                    make(),
                    "mclr",
                    data,
                    rounds=rounds,
                    seed=seed,
                    signature=signature,
                    local=local,
                    evaluate_every=100,
                    progress=False,
                )
                found = run.summary["clusters"]
                cells.append(f"{found['ari']:.2f} ({found['found']})")
            print(f"{name:<10}", *(f"{cell:>18}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
