"""Planted clusters at any scale: made up block by block, so that a million clients need no more memory than a few."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade.core import require, rng
from fedclade.data.folder_writing import ClientBlock, OnClients, write_folder
from fedclade.data.pool import Pool

BLOCK = 4096
"""Clients that are made up together, from a key of their own."""


@dataclass(frozen=True, kw_only=True)
class PlantedSettings:
    """Clients in clusters, each with a linear concept of its own.

    A client of cluster ``k`` has inputs ``x ~ N(0, I)``, float32 ``[features]``, and labels ``argmax(W_k x)``, of which
    a ``noise`` part is replaced by labels drawn at random; ``W_k [labels, features] ~ N(0, 1)``. Its number of training
    examples is ``⌊least · u^(-1 / (zipf - 1))⌋``, ``u`` uniform in (0, 1], and at most ``most``: the continuous Zipf
    law, of which client sizes have a share falling as ``size^-zipf``.

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
        self, clients: int, concepts: NDArray[np.float32], draws: Callable[[str], np.random.Generator]
    ) -> ClientBlock:
        # How much each has is drawn for the whole block, and cut, so that the last block's are those of a full one.
        clusters = draws("planted clusters").integers(self.clusters, size=BLOCK)[:clients]
        u = 1 - draws("planted sizes").random(BLOCK)[:clients]
        train = np.minimum(self.least * u ** (-1 / (self.zipf - 1)), self.most).astype(np.int64)
        counts = np.stack([train, np.full(clients, self.validation), np.full(clients, self.test)], axis=1)
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
    folder: str | Path, settings: PlantedSettings, seed: int = 0, on_clients: OnClients | None = None
) -> str:
    """Write planted clusters to a folder, see :func:`~fedclade.data.write_folder`; return their description."""
    clusters = f"{settings.clusters} cluster{'s' if settings.clusters > 1 else ''}"
    description = f"planted, {settings.clients} clients, {clusters}"
    write_folder(folder, settings.pool, settings.blocks(seed), description=description, on_clients=on_clients)
    return description
