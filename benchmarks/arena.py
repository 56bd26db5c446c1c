"""Ten clients, ten rounds, four kinds of shift: how soon replicated clustering (rcfl) finds the right clusters.

The setting is that of FLUX (static mode, MNIST): all images dealt to ten clients, a fifth held out, LeNet-5, two epochs
of batches of 64, SGD with step size 0.005 and momentum 0.9, ten rounds. Shifts, by level:

- inputs: images turned by one of some angles, from level 5 on coloured as well;
- labels: only some classes, one of five sets of them;
- labels given inputs: a pool of labels, permuted by each client;
- inputs given labels: images of some classes turned by an angle each.

Clients that see data alike are a true cluster. Every run is one line of a JSON file, so that an interrupted call goes
on where it stopped.

    python benchmarks/arena.py --data-dir DIR --out arena.jsonl
    python benchmarks/arena.py --out arena.jsonl --table
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import jsonl
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from rcfl import as_table
from rich.console import Console
from rich.table import Table
from torch import nn

from fedclade import FedAvg, LocalTraining, Oracle, ReplicatedCFL, load_federation, simulate
from fedclade import federation as federation_of
from fedclade.data import Federation
from fedclade.tasks.scores import mean_and_interval

Line = dict[str, Any]
Pixels, Labels = NDArray[np.uint8], NDArray[np.int64]
Examples = tuple[Pixels, Labels]
Seen = Callable[[Examples], Examples]
"""How a client sees images ``[n, 28, 28]`` and labels ``[n]``; images may get three channels, ``[n, 3, 28, 28]``."""

CLIENTS, ROUNDS = 10, 10
LOCAL = LocalTraining(epochs=2, batch_size=64, lr=0.005, momentum=0.9)
METHODS = ("rcfl", "fedavg", "oracle")
LEVELS: Mapping[str, tuple[int, ...]] = {
    "inputs": (1, 3),
    "labels": (6,),
    "labels given inputs": (2,),
    "inputs given labels": (1,),
}
"""Some of those at which there are clients that are alike, and others that are not."""


def lenet(channels: int) -> Callable[[int], nn.Module]:
    """Return what makes LeNet-5 with average pooling from a seed."""

    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        maps = [nn.Conv2d(channels, 6, 5, padding=2), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU()]
        dense = [nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
        return nn.Sequential(*maps, nn.AvgPool2d(2), nn.Flatten(), *dense)

    return made


def turned(images: Pixels, degrees: float) -> Pixels:
    """Turn images as PIL does: nearest neighbour, black where there was nothing."""
    if not degrees or not len(images):
        return images
    return np.stack([np.asarray(Image.fromarray(image).rotate(degrees)) for image in images])


def coloured(images: Pixels, colour: int | None) -> Pixels:
    """Give images three channels: grey, or one of them full."""
    found = np.repeat(images[:, None], 3, axis=1)
    if colour is not None:
        found[:, colour] = 255
    return found


@dataclass(frozen=True)
class View:
    """How one client sees its data, and by what it is told from others."""

    kind: tuple[Any, ...]
    seen: Seen


def by_inputs(level: int, draw: np.random.Generator) -> View:
    """Draw an angle, and from level 5 on a colour, for all images."""
    angles, colours = (2, 3, 4, 5)[(level - 1) % 4], 1 if level < 5 else 3
    angle, colour = int(draw.integers(angles)), int(draw.integers(colours)) if colours > 1 else None
    return View((angle, colour), lambda of: (coloured(turned(of[0], angle * 360 / angles), colour), of[1]))


def by_labels(sets: Sequence[Labels], draw: np.random.Generator) -> View:
    """Draw one of some sets of classes: the others are left out, and images of these drawn again in their place."""
    which = int(draw.integers(len(sets)))
    classes, again = sets[which], int(draw.integers(2**31))

    def seen(of: Examples) -> Examples:
        kept = np.flatnonzero(np.isin(of[1], classes))
        more = np.random.default_rng(again).choice(kept, max(0, len(of[1]) - len(kept)))
        rows = np.concatenate([kept, more])
        return of[0][rows][:, None], of[1][rows]

    return View((tuple(sorted(classes.tolist())),), seen)


def by_labels_given_inputs(pool: Labels, draw: np.random.Generator) -> View:
    """Draw a permutation of some labels."""
    names = np.arange(10)
    names[pool] = draw.permutation(pool)
    return View(tuple(names.tolist()), lambda of: (of[0][:, None], names[of[1]]))


def by_inputs_given_labels(classes: Labels, draw: np.random.Generator) -> View:
    """Draw an angle for the images of each of some classes."""
    angles = {int(label): 90 * int(draw.integers(4)) for label in classes}

    def seen(of: Examples) -> Examples:
        images = of[0].copy()
        for label, angle in angles.items():
            rows = np.flatnonzero(of[1] == label)
            images[rows] = turned(images[rows], angle)
        return coloured(images, None), of[1]

    return View(tuple(angles.items()), seen)


def views_of(shift: str, level: int, fold: int) -> list[View]:
    """Draw how each client sees its data."""
    draw = np.random.default_rng([fold, level, *shift.encode()])
    if shift == "inputs":
        return [by_inputs(level, draw) for _ in range(CLIENTS)]
    if shift == "labels":
        sets = [np.sort(draw.permutation(10)[: 11 - level]) for _ in range(5)]
        return [by_labels(sets, draw) for _ in range(CLIENTS)]
    some = np.sort(draw.permutation(10)[:level])
    make = by_labels_given_inputs if shift == "labels given inputs" else by_inputs_given_labels
    return [make(some, draw) for _ in range(CLIENTS)]


def dealt(shift: str, level: int, fold: int, share: float, data_dir: Path | None) -> Federation:
    """Deal all of MNIST, or a share of it, to ten clients that see it in their own ways."""
    everything = load_federation("mnist", clients=1, seed=fold, data_dir=data_dir)
    pool, (client,) = everything.pool, everything.clients
    images, labels = pool.x.numpy().reshape(-1, 28, 28), pool.y.numpy()
    draw, parts = np.random.default_rng(fold), list[list[Examples]]()
    for indices, kept in ((client.train, 0.8), (client.test, 1.0)):
        hands = np.array_split(draw.permutation(np.asarray(indices)), CLIENTS)
        hands = [hand[: int(len(hand) * kept * share)] for hand in hands]
        parts.append([(images[hand], labels[hand]) for hand in hands])
    views = views_of(shift, level, fold)
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(view.kind for view in views))}
    held = {
        f"client-{i}": (_tensors(view.seen(train)), _tensors(view.seen(test)))
        for i, (view, train, test) in enumerate(zip(views, *parts, strict=True))
    }
    truth = {f"client-{i}": kinds[view.kind] for i, view in enumerate(views)}
    return federation_of(held, name="mnist", labels=10, true_clusters=truth)


def _tensors(examples: Examples) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(np.ascontiguousarray(examples[0])), torch.from_numpy(examples[1])


def run(method: str, federation: Federation, fold: int) -> Line:
    """Run a method; return accuracy and clusters at the end, and whether they were right after round 3."""
    truth = federation.true_clusters or {}
    made = {"rcfl": ReplicatedCFL(), "fedavg": FedAvg(), "oracle": Oracle(truth)}[method]
    channels = int(federation.pool.x.shape[1])
    done = simulate(made, lenet(channels), federation, local=LOCAL, rounds=ROUNDS, seed=fold, evaluate_every=ROUNDS)
    found = done.summary["clusters"]
    clusters = {"clusters": found["found"], "true": len(set(truth.values())), "ari": found["ari"]}
    return {"accuracy": done.summary["accuracy"]["mean"], **clusters, "ari_3": done.metric_rows[2]["ari"]}


def table(lines: Sequence[Line]) -> Table:
    """Return a row for each shift and level."""
    rows: dict[tuple[str, int], dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        rows[line["shift"], line["level"]][line["method"]].append(line)
    columns = (
        "shift",
        "level",
        "runs",
        "true clusters",
        "rcfl",
        "ARI",
        "right by round 3",
        "FedAvg",
        "oracle",
        "rcfl − oracle",
    )
    cells = [
        (shift, str(level), *_cells(rows[shift, level]))
        for shift in LEVELS
        for level in LEVELS[shift]
        if rows[shift, level]
    ]
    return as_table("ten clients, ten rounds", columns, cells)


def _cells(found: Mapping[str, list[Line]]) -> Iterator[str]:
    rcfl = found["rcfl"]
    yield str(len(rcfl))
    yield ", ".join(str(line["true"]) for line in rcfl)
    yield _accuracy(rcfl)
    yield f"{mean(line['ari'] for line in rcfl):.2f}" if rcfl else ""
    yield f"{sum(line['ari_3'] == 1 for line in rcfl)} of {len(rcfl)}"
    yield _accuracy(found["fedavg"])
    yield _accuracy(found["oracle"])
    known = {line["fold"]: line["accuracy"] for line in found["oracle"]}
    ahead = [100 * (line["accuracy"] - known[line["fold"]]) for line in rcfl if line["fold"] in known]
    middle, half = mean_and_interval(ahead) if ahead else (None, None)
    yield "" if middle is None else f"{middle:+.1f}" + ("" if half is None else f" ± {half:.1f}")


def _accuracy(lines: Sequence[Line]) -> str:
    return f"{100 * mean(line['accuracy'] for line in lines):.1f}" if lines else ""


def main() -> None:
    """Run what is missing, and print the table."""
    parser = jsonl.parser(__doc__, "arena.jsonl")
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="of each client's images")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=160)
    jobs = [
        (fold, shift, level, method)
        for fold in range(0 if given.table else given.folds)
        for method in given.methods
        for shift, levels in LEVELS.items()
        for level in levels
    ]
    done = {(line["fold"], line["shift"], line["level"], line["method"]) for line in jsonl.read(given.out)}
    for fold, shift, level, method in [job for job in jobs if job not in done]:
        federation = dealt(shift, level, fold, given.share, given.data_dir)
        head = {"shift": shift, "level": level, "fold": fold, "method": method, "share": given.share}
        line = {**head, **run(method, federation, fold)}
        jsonl.add(given.out, line)
        console.print(line)
    console.print(table(jsonl.read(given.out)))


if __name__ == "__main__":
    main()
