"""Attack clients that permute the entries of their updates by a secret (``[privacy] permute``).

The attacker is the server. It has the permuted updates that it receives in every round, and knows
the model, here multinomial logistic regression on images. The secret is used only to measure the
success of the attack.

In every step, the gradient is Σ over examples of (p_c − y_c)·x_pixel for the weight of a pixel and
class c, and Σ of (p_c − y_c) for the bias of class c. Two properties follow:

- If a pixel is black in all images, its weight for class c changes by −0.42 times the change of the
  bias of c. So entries whose changes are always proportional to each other belong to one class, and
  the bias is the entry that changes 2.4 times as much as the others. The changes of the biases
  reveal the shares of labels of each client, except for the names of the labels: the server trains
  clients of its own, with images that no client has, to learn how biases depend on label shares.
  In a multi-layer perceptron (mlp), the same property identifies the entries of each neuron of the
  first layer.
- Σ_c (p_c − y_c) = 0, so the changes of the ten weights of a pixel add up to 0 in every update. If
  there are more updates than entries, the null space of all updates is spanned by one vector for
  each pixel, and these vectors have no entries in common. The projector on the null space therefore
  shows which entries belong to the same pixel. The weights of adjacent pixels for the same class
  change similarly, which identifies the classes of the entries.

    python studies/audit_permutation.py --data-dir DIR
    python studies/audit_permutation.py --table
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import jsonl
import numpy as np
import torch
from audit_scores import Floats
from numpy.typing import NDArray
from rcfl import LOCAL, as_table
from rich.console import Console
from scipy.linalg import eigh
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components
from sklearn.cluster import DBSCAN
from sklearn.linear_model import RidgeCV
from torch.nn import functional

from fedclade import FedAvg, load_federation
from fedclade.core.queries import Round
from fedclade.data import Federation, load_pool
from fedclade.runs.backend import Backend

Ints = NDArray[np.int64]

LABELS, HIDDEN = 10, 128
ALIKE = 1e-3
"""Largest distance of entries with proportional changes; float32 rounds changes by about 1e-5."""

SAME_PIXEL = 0.5


@dataclass(frozen=True)
class Case:
    """Numbers of clients, images per client and rounds; the model, the partition and the attack."""

    clients: int
    images: int
    rounds: int
    model: str = "mclr"
    partition: str = "dirichlet"
    pixels: bool = False
    halved: bool = False  # images of 14 × 14 pixels, each the mean of four pixels


CASES: Mapping[str, Case] = {
    "labels, 300 images, 20 rounds": Case(20, 300, 20),
    "labels, 40 images, 20 rounds": Case(20, 40, 20),
    "labels, 40 images, 1 round": Case(20, 40, 1),
    "neurons of mlp": Case(20, 300, 3, model="mlp"),
    "pixels, 14 × 14": Case(40, 100, 50, partition="iid", pixels=True, halved=True),
    "pixels, 28 × 28": Case(100, 60, 75, partition="iid", pixels=True),
}


@dataclass(frozen=True)
class Seen:
    """Updates that a server has received, and the true meaning of their entries.

    Parameters
    ----------
    updates
        The updates of T rounds and n clients, ``[T, n, D]``.
    classes
        For each entry the output of the first layer to which it belongs (a class of mclr, a neuron
        of mlp), ``[D]``; -1 in later layers.
    pixels
        For each entry the input to which it belongs, ``[D]``; -1 for biases and later layers.
    """

    updates: Floats
    classes: Ints
    pixels: Ints


def watched(
    federation: Federation, rounds: int, seed: int, *, model: str = "mclr", permute: bool = True
) -> Seen:
    """Train by FedAvg with equal weights; return the updates that the server receives."""
    world = Backend.simulated_by(
        federation, model, FedAvg(), seed=seed, engine="stacked", permute=permute
    )
    params, seen = world.initial.clone(), list[torch.Tensor]()
    for number in range(1, rounds + 1):
        ids = world.clients.ids
        updates = world.clients.train(
            ids, params[None], [0] * len(ids), Round(number, LOCAL, seed)
        ).required_deltas
        seen.append(updates.clone())
        params = params + updates.mean(0)
    place = torch.arange(len(params))
    place = (world.permutation.apply(place) if world.permutation else place).numpy()
    inputs = int(np.prod(federation.pool.input_shape))
    outputs = LABELS if model == "mclr" else HIDDEN
    weights = place < inputs * outputs
    first = place < (inputs + 1) * outputs
    classes = np.where(weights, place // inputs, np.where(first, place - inputs * outputs, -1))
    return Seen(torch.stack(seen).double().numpy(), classes, np.where(weights, place % inputs, -1))


def moves(updates: Floats) -> Floats:
    """Return the changes of each entry in all clients and rounds, of length 1, ``[T·n, D]``."""
    flat = updates.reshape(-1, updates.shape[-1])
    return flat / np.maximum(np.linalg.norm(flat, axis=0), 1e-30)


def alike(moved: Floats, least: int = 15) -> Ints:
    """Group the entries whose changes are always proportional to each other.

    Returns
    -------
    numpy.ndarray
        The group of each entry, ``[D]``; -1 for entries without a group of at least ``least``.
    """
    draw = np.random.default_rng(0)
    seen = draw.normal(size=(8, len(moved))) @ moved
    return DBSCAN(eps=ALIKE, min_samples=least).fit_predict((seen * np.sign(seen[:1])).T)


def biases(groups: Ints, updates: Floats) -> list[int]:
    """Return the entry of each group that changes most."""
    lengths = np.linalg.norm(updates.reshape(-1, updates.shape[-1]), axis=0)
    return [
        int(np.flatnonzero(groups == g)[lengths[groups == g].argmax()])
        for g in range(groups.max() + 1)
    ]


def pixel_groups(moved: Floats, live: Ints) -> Ints:
    """Group entries by pixels.

    Parameters
    ----------
    moved
        The result of :func:`moves`.
    live
        Entries that are in no group of :func:`alike`.

    Returns
    -------
    numpy.ndarray
        The number of a pixel, from 0, for each entry of ``live``.
    """
    some = moved[:, live]
    dimension = round(len(live) / LABELS)
    _, vectors = eigh(some.T @ some, subset_by_index=[0, dimension - 1])
    projector = np.abs(vectors @ vectors.T)
    diagonal = np.sqrt(np.diag(projector))
    near = projector / np.maximum(np.outer(diagonal, diagonal), 1e-30) > SAME_PIXEL
    return connected_components(csr_matrix(near), directed=False)[1].astype(np.int64)


def classes_of(moved: Floats, live: Ints, pixels: Ints, known: Ints, biases: Sequence[int]) -> Ints:
    """Assign a class to each entry, pixel by pixel.

    In each step, the pixel is taken whose entries are most similar to entries with known classes.
    The entries of a pixel are assigned to different classes.

    Parameters
    ----------
    moved
        The result of :func:`moves`.
    live
        Entries that are in no group of :func:`alike`.
    pixels
        The result of :func:`pixel_groups`.
    known
        The groups of :func:`alike`, ``[D]``, which are the classes.
    biases
        The bias of each class.
    """
    found, labels = known.copy(), known.max() + 1
    groups = [live[pixels == each] for each in range(pixels.max() + 1)]
    groups = [group for group in groups if 1 < len(group) <= labels]
    # The weights of dark pixels change in the opposite direction of the bias.
    best = [-moved[:, group].T @ moved[:, biases] for group in groups]
    left = set(range(len(groups)))

    def fit(k: int) -> tuple[float, Any]:
        chosen = linear_sum_assignment(best[k], maximize=True)
        return float(best[k][chosen].mean()), chosen

    fits = {k: fit(k) for k in left}
    while left:
        k = max(left, key=lambda each: fits[each][0])
        left.remove(k)
        rows, columns = fits[k][1]
        found[groups[k][rows]] = columns
        joined = moved[:, groups[k][rows]]
        for other in left:
            near = moved[:, groups[other]].T @ joined
            if (near > best[other][:, columns]).any():
                best[other][:, columns] = np.maximum(best[other][:, columns], near)
                fits[other] = fit(other)
    return found


def named(found: Ints, right: Ints) -> tuple[float, Ints]:
    """Match found classes with true classes as well as possible.

    Returns
    -------
    tuple
        The share of entries in the correct class, and the true class of each found class.
    """
    table = np.zeros((max(found.max() + 1, LABELS), LABELS))
    np.add.at(table, (found[found >= 0], right[found >= 0]), 1)
    rows, columns = linear_sum_assignment(table, maximize=True)
    return float(table[rows, columns].sum() / len(right)), columns.astype(np.int64)


def shares_of(federation: Federation) -> Floats:
    """Return the share of each label in each client's examples, ``[n, 10]``."""
    y = federation.pool.y.numpy()
    return np.stack(
        [
            np.bincount(y[client.train], minlength=LABELS) / len(client.train)
            for client in federation.clients
        ]
    )


def work(case: str, seed: int, *, data_dir: Path | None) -> dict[str, Any]:
    """Attack one federation; return the results."""
    chosen = CASES[case]
    pool = load_pool("mnist", data_dir=data_dir)
    if chosen.halved:
        pool = replace(pool, x=functional.avg_pool2d(pool.x.float(), 2).to(torch.uint8))
    dealt = {
        "clients": chosen.clients,
        "samples_per_client": chosen.images,
        "partition": chosen.partition,
    }
    federation = load_federation(pool, **dealt, test_samples=100, seed=seed)
    seen = watched(federation, chosen.rounds, seed, model=chosen.model)
    moved = moves(seen.updates)
    groups = alike(moved)
    pure = [len(np.unique(seen.classes[groups == g])) == 1 for g in range(groups.max() + 1)]
    line = {"groups": len(pure), "pure": sum(pure), "in_a_group": float((groups >= 0).mean())}
    found = biases(groups, seen.updates)
    line["biases"] = sum(int(seen.pixels[entry] == -1) for entry in found)
    if chosen.model != "mclr" or len(pure) != LABELS:
        return line
    if not chosen.pixels:
        return line | label_shares(federation, seen, found, chosen.rounds, seed)
    live = np.flatnonzero(groups < 0)
    pixels = pixel_groups(moved, live)
    sizes = np.bincount(seen.pixels[live])
    whole = [
        len(set(seen.pixels[live[pixels == g]])) == 1
        and (pixels == g).sum() == sizes[seen.pixels[live[pixels == g][0]]]
        for g in pixels
    ]
    classes = classes_of(moved, live, pixels, groups, found)
    return line | {
        "whole_pixels": float(np.mean(whole)),
        "classes": named(classes, seen.classes)[0],
        "classes_of_live": named(classes[live], seen.classes[live])[0],
    }


def label_shares(
    federation: Federation, seen: Seen, found: Sequence[int], rounds: int, seed: int
) -> dict[str, Any]:
    """Estimate shares of labels from the changes of the biases, and compare them with the truth.

    A ridge regression on clients of the server's own learns how the changes of a bias depend on the
    share of its label. For the comparison, classes have their true names.
    """
    pool, images = federation.pool, len(federation.clients[0].train)
    own = load_federation(
        replace(pool, train=pool.test, test=pool.train[:1000]),
        **{
            "clients": 30,
            "samples_per_client": images,
            "partition": "dirichlet",
            "seed": 1000 + seed,
        },
    )

    def features(updates: Floats) -> Floats:
        return (
            (updates - updates.mean(1, keepdims=True)).transpose(1, 2, 0).reshape(-1, len(updates))
        )

    learnt = watched(own, rounds, 1000 + seed, permute=False).updates[:, :, -LABELS:]
    fitted = RidgeCV(np.logspace(-6, 2, 15)).fit(
        features(learnt), shares_of(own).ravel() - 1 / LABELS
    )
    told = fitted.predict(features(seen.updates[:, :, found])).reshape(-1, LABELS) + 1 / LABELS
    told = np.clip(told, 1e-9, None)
    told /= told.sum(1, keepdims=True)
    right = shares_of(federation)[:, seen.classes[found]]
    guess = right.mean(0, keepdims=True)
    return {
        "misplaced": float(np.abs(told - right).sum(1).mean() / 2),
        "misplaced_by_guess": float(np.abs(guess - right).sum(1).mean() / 2),
        "correlation": float(np.corrcoef(told.ravel(), right.ravel())[0, 1]),
        "commonest": float((told.argmax(1) == right.argmax(1)).mean()),
        "commonest_by_guess": float((guess.argmax(1) == right.argmax(1)).mean()),
    }


def rows(lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a row for each case, with means over seeds."""
    keys = (
        "groups",
        "pure",
        "biases",
        "in_a_group",
        "misplaced",
        "misplaced_by_guess",
        "correlation",
    )
    keys = (*keys, "commonest", "commonest_by_guess", "whole_pixels", "classes", "classes_of_live")
    made = []
    for case in CASES:
        runs = [line for line in lines if line["case"] == case]
        cells = [[line[key] for line in runs if key in line] for key in keys]
        if runs:
            made.append(
                [case, str(len(runs)), *(f"{mean(each):.3g}" if each else "" for each in cells)]
            )
    return made


def main() -> None:
    """Make missing runs, and print the table."""
    parser = jsonl.parser(__doc__, "audit_permutation.jsonl")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument(
        "--cases",
        nargs="*",
        default=list(CASES),
        choices=list(CASES),
        help="cases to run (default: all)",
    )
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="start no run after this time (default: 5)"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    if not given.table:
        jobs = ({"case": case, "seed": seed} for seed in range(given.seeds) for case in given.cases)
        jsonl.run_missing(given.out, jobs, partial(work, data_dir=given.data_dir), given.minutes)
    columns = (
        "case",
        "runs",
        "groups",
        "of one class",
        "biases",
        "in a group",
        "wrong labels",
        "by a guess",
        "correlation",
    )
    columns = (
        *columns,
        "most frequent label",
        "by a guess",
        "whole pixels",
        "correct class",
        "without groups",
    )
    Console(width=170).print(as_table("permuted updates", columns, rows(jsonl.read(given.out))))


if __name__ == "__main__":
    main()
