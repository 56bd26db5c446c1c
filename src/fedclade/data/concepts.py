"""Synthetic data: SEA, SINE and CIRCLE, whose concepts drift, and planted clusters.

In every time step each client draws new examples of the concept that a pattern gives it, and is
tested on those that it trains on in the next step, as in the authors' code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade.core import checked, require, rng
from fedclade.data.client_data import ClientData, Stage
from fedclade.data.drift import read_concepts
from fedclade.data.federation import Federation
from fedclade.data.folder_writing import ClientBlock, OnClients, write_folder
from fedclade.data.pool import Pool

# Planted clusters at any scale: made up block by block, so that a million clients need no more
# memory than a few.

BLOCK = 4096
"""Clients that are made up together, from a key of their own."""


@dataclass(frozen=True, kw_only=True)
class PlantedSettings:
    """Clients in clusters, each with a linear concept of its own.

    A client of cluster ``k`` has inputs ``x ~ N(0, I)``, float32 ``[features]``, and labels
    ``argmax(W_k x)``, of which a ``noise`` part is replaced by labels drawn at random; ``W_k
    [labels, features] ~ N(0, 1)``. Its number of training examples is ``⌊least · u^(-1 / (zipf -
    1))⌋``, ``u`` uniform in (0, 1], and at most ``most``: the continuous Zipf law, of which client
    sizes have a share falling as ``size^-zipf``.

    Parameters
    ----------
    clients, clusters
        How many; each client's cluster is drawn.
    features, labels
        Length of an input, and number of labels.
    least, most, zipf
        Training examples of a client, and the exponent of their law, above 1.
    test, validation
        Test and validation examples of each client.
    noise
        In [0, 1).

    Raises
    ------
    ConfigError
        If a number is out of range.
    """

    clients: int = 1000
    clusters: int = 4
    features: int = 20
    labels: int = 10
    least: int = 10
    most: int = 200
    zipf: float = 2.5
    test: int = 5
    validation: int = 0
    noise: float = 0.05

    def __post_init__(self) -> None:
        require(
            ("clients", self.clients, self.clients >= 1, "at least 1"),
            ("clusters", self.clusters, self.clusters >= 1, "at least 1"),
            ("features", self.features, self.features >= 1, "at least 1"),
            ("labels", self.labels, self.labels >= 2, "at least 2"),
            ("least", self.least, self.least >= 1, "at least 1"),
            ("most", self.most, self.most >= self.least, f"at least {self.least}, as data.least"),
            ("zipf", self.zipf, self.zipf > 1, "greater than 1"),
            ("test", self.test, self.test >= 1, "at least 1"),
            ("validation", self.validation, self.validation >= 0, "at least 0"),
            ("noise", self.noise, 0 <= self.noise < 1, "in [0, 1)"),
        )

    @property
    def pool(self) -> Pool:
        """An empty pool of such examples."""
        none = np.empty(0, dtype=np.int64)
        x, y = torch.empty(0, self.features), torch.empty(0, dtype=torch.int64)
        return Pool("planted", x, y, none, none, none, outputs=self.labels)

    def concepts(self, seed: int) -> NDArray[np.float32]:
        """Return the concept of each cluster, ``W [clusters, labels, features]``."""
        shape = self.clusters, self.labels, self.features
        return rng.generator(seed, "planted concepts").standard_normal(shape, dtype=np.float32)

    def blocks(self, seed: int) -> Iterator[ClientBlock]:
        """Make the clients up; client ``i`` is the same however many there are."""
        concepts = self.concepts(seed)
        for number, first in enumerate(range(0, self.clients, BLOCK)):
            draws = partial(_draws, seed, number)
            yield self._block(min(BLOCK, self.clients - first), concepts, draws)

    def _block(
        self,
        clients: int,
        concepts: NDArray[np.float32],
        draws: Callable[[str], np.random.Generator],
    ) -> ClientBlock:
        # How much each has is drawn for the whole block, and cut, so that the last block's are
        # those of a full one.
        clusters = draws("planted clusters").integers(self.clusters, size=BLOCK)[:clients]
        u = 1 - draws("planted sizes").random(BLOCK)[:clients]
        train = np.minimum(self.least * u ** (-1 / (self.zipf - 1)), self.most).astype(np.int64)
        counts = np.stack(
            [train, np.full(clients, self.validation), np.full(clients, self.test)], axis=1
        )
        total, draw = int(counts.sum()), draws("planted examples")
        x = draw.standard_normal((total, self.features), dtype=np.float32)
        cluster = clusters.repeat(counts.sum(1))
        y = np.empty(total, dtype=np.int64)
        for k, concept in enumerate(concepts):
            mine = cluster == k
            y[mine] = (x[mine] @ concept.T).argmax(1)
        chance = draws("planted noise").random((total, 2))
        odd = chance[:, 0] < self.noise
        y[odd] = (chance[odd, 1] * self.labels).astype(np.int64)
        return ClientBlock(torch.from_numpy(x), torch.from_numpy(y), counts, clusters=clusters)


def _draws(seed: int, block: int, what: str) -> np.random.Generator:
    return rng.generator(seed, what, block)


def write_planted(
    folder: str | Path,
    settings: PlantedSettings,
    seed: int = 0,
    on_clients: OnClients | None = None,
) -> str:
    """Write planted clusters to a folder, and return their description."""
    clusters = f"{settings.clusters} cluster{'s' if settings.clusters > 1 else ''}"
    description = f"planted, {settings.clients} clients, {clusters}"
    write_folder(
        folder, settings.pool, settings.blocks(seed), description=description, on_clients=on_clients
    )
    return description


Points = NDArray[np.float64]

THRESHOLDS = (8.0, 9.0, 7.0, 9.5)
"""θ of SEA's concepts (Street and Kim 2001). To the authors' files 8, 9, 7 and 9 fit best: their
fourth is the second.
"""

CIRCLES = ((0.2, 0.5, 0.15), (0.6, 0.5, 0.25))
"""Centre and radius of CIRCLE's concepts."""


@dataclass(frozen=True)
class _Kind:
    """Data set with inputs in a cube; a concept determines the inputs with label 1."""

    features: int
    largest: float
    concepts: int
    noise: float
    is_one: Callable[[Points, int], NDArray[np.bool_]]


def _sea(x: Points, concept: int) -> NDArray[np.bool_]:
    return x[:, 1] + x[:, 2] > THRESHOLDS[concept]


def _sine(x: Points, concept: int) -> NDArray[np.bool_]:
    return (x[:, 1] <= np.sin(x[:, 0])) != bool(concept)


def _circle(x: Points, concept: int) -> NDArray[np.bool_]:
    first, second, radius = CIRCLES[concept]
    return (x[:, 0] - first) ** 2 + (x[:, 1] - second) ** 2 > radius**2


KINDS: Mapping[str, _Kind] = {
    "sea": _Kind(3, 10, len(THRESHOLDS), 0.1, _sea),
    "sine": _Kind(2, 1, 2, 0.0, _sine),
    "circle": _Kind(2, 1, len(CIRCLES), 0.0, _circle),
}


@checked()
def concepts(
    *,
    kind: Literal["sea", "sine", "circle"] = "sea",
    clients: int = 10,
    samples: int = 100,
    steps: int = 10,
    step_rounds: int = 200,
    pattern: str | tuple[tuple[int, ...], ...] = "A",
    noise: float | None = None,
    seed: int = 0,
) -> Federation:
    """Return clients whose concepts drift; in a config it is ``name = "fedclade.data:concepts"``.

    - ``sea``: three numbers uniform in [0, 10], of label 1 if the second and the third come to more
      than θ; four concepts, each with a θ of its own.
    - ``sine``: points of the unit square, of label 1 up to the curve x₂ = sin x₁; in the second
      concept reversed.
    - ``circle``: points of the unit square, of label 1 outside a circle, another one in each of two
      concepts.

    Parameters
    ----------
    kind
        Which of them.
    clients, samples
        How many clients, and how many training examples each has in a time step.
    steps, step_rounds
        How many time steps, each a stage, and how many communication rounds each lasts.
    pattern
        The concept of each client in each step: as in :class:`~fedclade.data.Drift`, with one more
        row than steps, for the tests of the last.
    noise
        Share of the labels that are flipped, in [0, 1); by default a tenth for ``sea``, as in the
        authors' files, and none for the others.

    Raises
    ------
    ConfigError
        If a value is out of range, or the pattern has too few rows.
    """
    require(
        ("kind", kind, kind in KINDS, ", ".join(map(repr, KINDS))),
        ("clients", clients, clients >= 1, "at least 1"),
        ("samples", samples, samples >= 1, "at least 1"),
        ("steps", steps, steps >= 1, "at least 1"),
        ("step_rounds", step_rounds, step_rounds >= 1, "at least 1"),
        ("noise", noise, noise is None or 0 <= noise < 1, "in [0, 1)"),
    )
    made, rows = KINDS[kind], read_concepts(pattern, steps + 1, clients)[: steps + 1]
    flips = made.noise if noise is None else noise
    largest = max(map(max, rows))
    require(
        (
            "pattern",
            pattern,
            largest < made.concepts,
            f"of the {made.concepts} concepts of {kind!r}",
        )
    )
    x, y = (
        np.empty((steps + 1, clients, samples, made.features)),
        np.empty((steps + 1, clients, samples), dtype=bool),
    )
    for step, row in enumerate(rows):
        for client, concept in enumerate(row):
            draw = rng.generator(seed, kind, step, client)
            x[step, client] = draw.uniform(0, made.largest, (samples, made.features))
            y[step, client] = made.is_one(x[step, client], concept) != (
                draw.random(samples) < flips
            )
    labels, place = y.reshape(-1).astype(np.int64), np.arange(y.size).reshape(y.shape)
    points = torch.from_numpy(x.reshape(-1, made.features).astype(np.float32))
    pool = Pool(kind, points, torch.from_numpy(labels), labels, np.arange(y.size), np.arange(0), 2)

    def held(step: int) -> tuple[tuple[ClientData, ...], dict[int, int]]:
        none, now, ahead = np.arange(0), place[step], place[step + 1]
        members = (ClientData(i, f"client-{i}", i, now[i], none, ahead[i]) for i in range(clients))
        return tuple(members), dict(enumerate(rows[step]))

    stages = tuple(Stage(1 + step * step_rounds, *held(step)) for step in range(1, steps))
    return Federation(
        pool, *held(0), f"{kind}, {clients} clients, {steps} time steps", stages=stages
    )
