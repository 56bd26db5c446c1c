"""Solve for single examples by sums over parts of a client's data: an attack that must stay unsuccessful.

A server asks a client without differential privacy for replicates: updates from disjoint parts of its examples. All
models are zero and every part takes one step, so a reply is a set of sums of gradients, and the server knows which
example is in which part. It tries what once worked:

- ``parts``: a quarter as many queries for eight replicates as there are examples, each over new parts. They are more
  equations than unknowns, and least squares return every image.
- ``halves``: as many queries for two replicates as there are examples.
- ``sizes``: parts of 10 and of 11 examples in the same order; the difference is one example.
- ``seeds``: two seeds by which two halves differ in one pair of examples; the difference is that pair.
- ``steps``: no parts at all, but training that ends after a step with a batch of one example.

The attack succeeds if an image that it reads differs from one of the client's by less than 0.01 in every pixel.

    python benchmarks/attacks/partings.py [--json FILE]
"""

from __future__ import annotations

# Before torch, whose threads then sleep while they wait.
import fedclade  # noqa: F401  # isort: skip  # pyright: ignore[reportUnusedImport]

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from common import (
    LABELS,
    LAYOUT,
    AttackedClient,
    Row,
    parser,
    query,
    report,
    used_equations,
    vector_of,
)
from numpy.typing import NDArray

from fedclade import load_federation
from fedclade.core import FedcladeError, rng
from fedclade.data import Federation

Vector = NDArray[np.float64]

CLOSE = 0.01
"""Largest error of a pixel of an image that counts as read."""


class Target:
    """A client under attack, and how a server queries it."""

    def __init__(self, examples: int, folder: Path) -> None:
        data = load_federation("digits", clients=2, samples_per_client=examples, seed=0)
        self.federation = data.alone(0)
        self.examples = examples
        self.client = AttackedClient(self.federation, number=0, folder=folder)

    def parts(self, replicates: int, number: int = 1, seed: int = 0, part_size: int = 0) -> Vector:
        """Return the updates of the parts, ``[replicates, D]``; no rows if the client refuses."""
        update = self._train(
            {"replicates": replicates, "part_size": part_size, "round": number, "seed": seed}
        )
        return (
            update[LAYOUT.size :].reshape(replicates, -1)
            if len(update)
            else np.empty((0, LAYOUT.size))
        )

    def one_step(self, number: int) -> Vector:
        """Return the update of one step with one example, ``[D]``; nothing if the client refuses."""
        return self._train(
            {"spec": json.dumps({"steps": 1, "batch_size": 1, "lr": 1.0}), "round": number}
        )

    def _train(self, changes: Mapping[str, object]) -> Vector:
        spec = json.dumps({"epochs": 1, "batch_size": 1_000_000, "lr": 1.0})
        values = {"spec": spec, "compares_parts": True, **changes}
        try:
            reply = query(self.client, "train", {"model": torch.zeros(LAYOUT.size)}, **values)
        except FedcladeError:
            return np.empty(0)
        return vector_of(reply, "update")

    def count_read(self, gradients: Vector) -> int:
        """Return how many of the client's images are among those that some gradients ``[k, D]`` contain."""
        images = [image for gradient in gradients for image in images_in(gradient)]
        if not images:
            return 0
        x = np.asarray(self.federation.examples(0, "train")[0], dtype=np.float64).reshape(
            self.examples, -1
        )
        errors = np.abs(np.array(images)[:, None] - x[None]).max(2)
        return int((errors.min(0) < CLOSE).sum())


def images_in(gradient: Vector) -> list[Vector]:
    """Return images that explain the gradient of one example, or the difference of two, at a model of zeros.

    All labels have the same probability there. So the rows of other labels are equal, and the row of an example's own
    label differs from them by its image, as the bias does by one.
    """
    weights, bias = gradient[:-LABELS].reshape(LABELS, -1), gradient[-LABELS:]
    weights, bias = weights - np.median(weights, axis=0), bias - np.median(bias)
    largest = np.abs(bias).max()
    if largest == 0:
        return []
    return [weights[row] / bias[row] for row in range(LABELS) if abs(bias[row]) > largest / 2]


def equal_order(seed: int, federation: Federation, examples: int) -> NDArray[np.int64]:
    """Return the order in which a client puts its examples into equal parts."""
    return rng.generator(seed, "equal parts", federation.keys[0]).permutation(examples)


def order_of_round(
    seed: int, number: int, federation: Federation, examples: int
) -> NDArray[np.int64]:
    """Return the order in which a client deals its examples to the parts of a round."""
    return rng.generator(seed, "parts", number, federation.keys[0]).permutation(examples)


def solve(target: Target, replicates: int, queries: int) -> int:
    """Ask for new parts again and again, and solve for every example."""
    rows = list[Vector]()
    sums = list[Vector]()
    for number in range(1, queries + 1):
        parts = target.parts(replicates, number=number)
        order = order_of_round(0, number, target.federation, target.examples)
        for k, update in enumerate(parts):
            row = np.zeros(target.examples)
            row[order[k::replicates]] = 1 / len(order[k::replicates])
            rows.append(row)
            sums.append(update)
    if not rows:
        return 0
    gradients = np.linalg.lstsq(np.array(rows), np.array(sums), rcond=None)[0]
    return target.count_read(gradients.astype(np.float64))


def subtract_sizes(target: Target) -> int:
    """Ask for parts of 10 examples, and for parts of 11."""
    ten, eleven = target.parts(2, part_size=10), target.parts(2, part_size=11)
    if not len(ten) or not len(eleven):
        return 0
    return target.count_read((11 * eleven[0] - 10 * ten[0])[None])


def subtract_seeds(target: Target) -> int:
    """Look for two seeds by which halves differ in one pair, and ask for both."""
    known: dict[frozenset[int], int] = {}
    half = target.examples // 2
    for seed in range(100_000):
        order = order_of_round(seed, 1, target.federation, target.examples)
        first = frozenset(order[::2].tolist())
        for away in first:
            for other in range(target.examples):
                near = (first - {away}) | {other}
                if other not in first and near in known:
                    here, there = target.parts(2, seed=seed), target.parts(2, seed=known[near])
                    return (
                        target.count_read((half * (here[0] - there[0]))[None])
                        if len(here) and len(there)
                        else 0
                    )
        known[first] = seed
    return 0


def take_one_step(target: Target) -> int:
    """Ask for one step with one example, in several rounds."""
    updates = [update for number in range(1, 11) if len(update := target.one_step(number))]
    return target.count_read(np.array(updates)) if updates else 0


ATTACKS: Mapping[str, tuple[int, Callable[[Target], int]]] = {
    "parts": (88, lambda target: solve(target, replicates=8, queries=22)),
    "halves": (40, lambda target: solve(target, replicates=2, queries=40)),
    "sizes": (40, subtract_sizes),
    "seeds": (20, subtract_seeds),
    "steps": (40, take_one_step),
}
"""By name: how many examples the client has, and the attack."""


def rows() -> Iterator[Row]:
    """Run all attacks."""
    for name, (examples, attack) in ATTACKS.items():
        with tempfile.TemporaryDirectory() as folder:
            target = Target(examples, Path(folder))
            read = attack(target)
            used = target.client.used(used_equations)
        queries = target.client.requests.sent
        detail = f"{read} of {examples} images from {queries} queries"
        yield Row(f"partings {name}", read > 0, detail, budget=used)


def main() -> int:
    """Run all attacks; return 1 if one of them succeeds."""
    arguments = parser(__doc__).parse_args()
    return report(rows(), arguments.json)


if __name__ == "__main__":
    sys.exit(main())
