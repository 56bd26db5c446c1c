"""Synthetic data: planted clusters, and the drifting data sets SEA, SINE and CIRCLE.

A *concept* is a rule that determines the label of an input; clients with the same concept form a
true cluster. For SEA, SINE and CIRCLE, a pattern states the concept of each client in each time
step, and each client draws new examples in each time step. As in the code of FedDrift, a client is
tested on the examples on which it trains in the next time step.
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

from fedclade.core import DataError, checked, require, rng
from fedclade.data.client_data import ClientData, Stage
from fedclade.data.drift import read_concepts
from fedclade.data.federation import Federation
from fedclade.data.folder_writing import ClientBlock, OnClients, write_folder
from fedclade.data.pool import Pool

# Planted clusters at any scale, generated block by block, so that a million clients need no more
# memory than a few.

BLOCK = 4096
"""Number of clients that are generated together, with one key for their random draws."""


@dataclass(frozen=True, kw_only=True)
class PlantedSettings:
    """Settings of synthetic data with planted clusters.

    Each true cluster has its own linear concept. A client of cluster ``k`` has inputs ``x ~ N(0,
    I)``, float32 ``[features]``, and labels ``argmax(W_k x)``, where ``W_k [labels, features] ~
    N(0, 1)``. A fraction ``noise`` of the labels is replaced by labels drawn at random. The number
    of training examples of a client is ``⌊least · u^(-1 / (zipf - 1))⌋``, with ``u`` uniform in (0,
    1], and at most ``most``. This is a continuous Zipf law: the density of client sizes is
    proportional to ``size^-zipf``.

    Parameters
    ----------
    clients, clusters
        Number of clients and of clusters; each client's cluster is drawn.
    features, labels
        Length of an input, and number of labels.
    least, most, zipf
        Smallest and largest number of training examples of a client, and the exponent of their
        distribution, above 1.
    test, validation
        Number of test examples and of validation examples of each client.
    noise
        Fraction of the labels that are replaced by random labels, in [0, 1).

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
        """A pool without examples that states the types and shapes of planted data."""
        nothing = np.empty(0, dtype=np.int64)
        return Pool(
            "planted",
            x=torch.empty(0, self.features),
            y=torch.empty(0, dtype=torch.int64),
            groups=nothing,
            train=nothing,
            test=nothing,
            outputs=self.labels,
        )

    def concepts(self, seed: int) -> NDArray[np.float32]:
        """Draw the concept of each cluster: the weights ``W [clusters, labels, features]``."""
        shape = self.clusters, self.labels, self.features
        return rng.generator(seed, "planted concepts").standard_normal(shape, dtype=np.float32)

    def blocks(self, seed: int) -> Iterator[ClientBlock]:
        """Generate the clients in blocks, so that memory is needed only for one block at a time.

        The data of client ``i`` does not depend on the number of clients.
        """
        concepts = self.concepts(seed)
        for number, first in enumerate(range(0, self.clients, BLOCK)):
            make_generator = partial(_make_generator, seed, number)
            clients = min(BLOCK, self.clients - first)
            yield self._generate_block(clients, concepts, make_generator)

    def _generate_block(
        self,
        clients: int,
        concepts: NDArray[np.float32],
        make_generator: Callable[[str], np.random.Generator],
    ) -> ClientBlock:
        """Generate the examples of one block of clients.

        ``make_generator`` returns the random generator of the block for a named kind of draws.
        """
        # Clusters and sizes are drawn for a full block and cut, so that they are the same in a
        # shorter last block.
        clusters = make_generator("planted clusters").integers(self.clusters, size=BLOCK)
        clusters = clusters[:clients]
        u = 1 - make_generator("planted sizes").random(BLOCK)[:clients]
        sizes = self.least * u ** (-1 / (self.zipf - 1))
        train = np.minimum(sizes, self.most).astype(np.int64)
        validation = np.full(clients, self.validation)
        test = np.full(clients, self.test)
        counts = np.stack([train, validation, test], axis=1)
        total = int(counts.sum())
        draw = make_generator("planted examples")
        x = draw.standard_normal((total, self.features), dtype=np.float32)
        cluster_of = clusters.repeat(counts.sum(1))
        y = np.empty(total, dtype=np.int64)
        for cluster, concept in enumerate(concepts):
            rows = cluster_of == cluster
            y[rows] = (x[rows] @ concept.T).argmax(1)
        chance = make_generator("planted noise").random((total, 2))
        is_noise = chance[:, 0] < self.noise
        y[is_noise] = (chance[is_noise, 1] * self.labels).astype(np.int64)
        return ClientBlock(torch.from_numpy(x), torch.from_numpy(y), counts, clusters=clusters)


def _make_generator(seed: int, block: int, what: str) -> np.random.Generator:
    """Return the random generator of one kind of draws (``what``) in a block of clients."""
    return rng.generator(seed, what, block)


def write_planted(
    folder: str | Path,
    settings: PlantedSettings,
    seed: int = 0,
    on_clients: OnClients | None = None,
) -> str:
    """Generate planted clusters and write the federation to a folder.

    Parameters
    ----------
    folder
        Path of the folder, which must not exist.
    settings
        Settings of the planted clusters.
    seed
        Seed of all draws.
    on_clients
        Function that is called with the number of written clients after each block.

    Returns
    -------
    str
        Description of the federation.
    """
    clusters = f"{settings.clusters} cluster{'s' if settings.clusters > 1 else ''}"
    description = f"planted, {settings.clients} clients, {clusters}"
    write_folder(
        folder, settings.pool, settings.blocks(seed), description=description, on_clients=on_clients
    )
    return description


Points = NDArray[np.float64]

THRESHOLDS = (8.0, 9.0, 7.0, 9.5)
"""Thresholds θ of SEA's concepts (Street and Kim 2001).

In the data files that the authors publish, the fourth concept equals the second: thresholds 8, 9, 7
and 9 fit these files best.
"""

CIRCLES = ((0.2, 0.5, 0.15), (0.6, 0.5, 0.25))
"""Centre (two coordinates) and radius of the circle of each concept of CIRCLE."""


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """Definition of a data set with inputs drawn uniformly from a cube and labels 0 and 1.

    Parameters
    ----------
    features, largest
        Number of inputs of an example, and their largest value.
    concepts
        Number of concepts.
    noise
        Default fraction of flipped labels.
    is_one
        Function of inputs ``[n, features]`` and the number of a concept that returns whether each
        input has label 1.
    """

    features: int
    largest: float
    concepts: int
    noise: float
    is_one: Callable[[Points, int], NDArray[np.bool_]]


def _label_by_sea(x: Points, concept: int) -> NDArray[np.bool_]:
    return x[:, 1] + x[:, 2] > THRESHOLDS[concept]


def _label_by_sine(x: Points, concept: int) -> NDArray[np.bool_]:
    return (x[:, 1] <= np.sin(x[:, 0])) != bool(concept)


def _label_by_circle(x: Points, concept: int) -> NDArray[np.bool_]:
    first, second, radius = CIRCLES[concept]
    return (x[:, 0] - first) ** 2 + (x[:, 1] - second) ** 2 > radius**2


KINDS: Mapping[str, _Kind] = {
    "sea": _Kind(features=3, largest=10, concepts=len(THRESHOLDS), noise=0.1, is_one=_label_by_sea),
    "sine": _Kind(features=2, largest=1, concepts=2, noise=0.0, is_one=_label_by_sine),
    "circle": _Kind(
        features=2, largest=1, concepts=len(CIRCLES), noise=0.0, is_one=_label_by_circle
    ),
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
    """Build a federation with drifting concepts, from one of three synthetic data sets.

    In a config, ``name = "fedclade.data:concepts"`` in the section ``[data]`` selects this function.

    - ``sea``: inputs are three numbers uniform in [0, 10]. The label is 1 if the sum of the second
      and the third is greater than a threshold θ. There are four concepts, each with its own θ.
    - ``sine``: inputs are points of the unit square. The label is 1 on and below the curve
      x₂ = sin x₁. There are two concepts; in the second concept labels are reversed.
    - ``circle``: inputs are points of the unit square. The label is 1 outside a circle. There are
      two concepts, each with its own circle.

    Parameters
    ----------
    kind
        Name of the data set.
    clients, samples
        Number of clients, and number of training examples of each client in a time step.
    steps, step_rounds
        Number of time steps, each a stage, and number of communication rounds in each step.
    pattern
        Concept of each client in each step, as in :class:`~fedclade.data.Drift`. The pattern has
        one more row than there are steps, for the test examples of the last step.
    noise
        Fraction of the labels that are flipped, in [0, 1); by default 0.1 for ``sea``, as in the
        published data files of SEA, and 0 for the other data sets.
    seed
        Seed of all draws.

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
    data_kind = KINDS[kind]
    rows = read_concepts(pattern, steps + 1, clients)[: steps + 1]
    largest = max(max(row) for row in rows)
    rule = f"of the {data_kind.concepts} concepts of {kind!r}"
    require(("pattern", pattern, largest < data_kind.concepts, rule))
    flipped = data_kind.noise if noise is None else noise
    try:
        x = np.empty((steps + 1, clients, samples, data_kind.features))
        y = np.empty((steps + 1, clients, samples), dtype=bool)
    except MemoryError as error:
        raise DataError(
            f"{clients} clients with {samples} examples in each of {steps + 1} steps do not fit into "
            "memory; lower clients, samples or steps"
        ) from error
    for step, row in enumerate(rows):
        for client, concept in enumerate(row):
            draw = rng.generator(seed, kind, step, client)
            points = draw.uniform(0, data_kind.largest, (samples, data_kind.features))
            is_flipped = draw.random(samples) < flipped
            x[step, client] = points
            y[step, client] = data_kind.is_one(points, concept) != is_flipped
    labels = y.reshape(-1).astype(np.int64)
    nothing = np.arange(0)
    pool = Pool(
        kind,
        x=torch.from_numpy(x.reshape(-1, data_kind.features).astype(np.float32)),
        y=torch.from_numpy(labels),
        groups=labels,
        train=np.arange(y.size),
        test=nothing,
        outputs=2,
    )
    places = np.arange(y.size).reshape(y.shape)

    def build_clients(step: int) -> tuple[ClientData, ...]:
        """Build the clients of a time step, with the examples of the next step as test data."""
        return tuple(
            ClientData(
                client,
                name=f"client-{client}",
                key=client,
                train=places[step, client],
                validation=nothing,
                test=places[step + 1, client],
            )
            for client in range(clients)
        )

    stages: list[Stage] = []
    for step in range(1, steps):
        first_round = 1 + step * step_rounds
        stages.append(Stage(first_round, build_clients(step), dict(enumerate(rows[step]))))
    return Federation(
        pool,
        build_clients(0),
        dict(enumerate(rows[0])),
        description=f"{kind}, {clients} clients, {steps} time steps",
        stages=tuple(stages),
    )
