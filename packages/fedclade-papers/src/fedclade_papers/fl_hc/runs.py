"""Data and runs for the tables and figures of the FL+HC paper, and the stored results of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedclade import FLHC, Algorithm, Federation, Run, load_federation
from fedclade.clustering import LINKAGES, METRICS, Distances, agglomerate, compute_distances, cut
from fedclade.core import rng
from fedclade.runs import Maker
from fedclade.training import SimulatedClients, choose_device
from fedclade_papers.cache import ResultCache, Settings, maker_of

Found = dict[str, Any]
"""Results of a run that are stored, in types that JSON has."""

Merges = Mapping[str, Sequence[Sequence[float]]]
"""Merges of m clients in hierarchical clustering, by names such as ``"l2 ward"``.

The name states the distance metric and the linkage. The merges are rows ``[m-1, 4]`` in the format
of :func:`fedclade.clustering.agglomerate`.
"""

CLUSTERS = 4
"""Number of true clusters, each of which has a different pair of labels swapped (section II-A)."""

DIGITS = 4
"""Number of decimals of a stored share."""

WAYS = [
    (metric, linkage)
    for metric in METRICS
    for linkage in LINKAGES
    if linkage != "ward" or metric == "l2"
]
"""All combinations of a distance metric and a linkage; Ward's linkage needs the metric l2."""

OF_A_RUN = (
    "setting",
    "images",
    "scaling",
    "clients",
    "samples_per_client",
    "test_samples",
    "model",
    "model_arguments",
    "rounds",
    "epochs",
    "batch_size",
    "lr",
    "target",
    "engine",
)
"""Settings on which a run depends.

Tables and figures with equal values of these settings share their runs.
"""


class Runs:
    """Runs of FL and FL+HC with one way to divide the data among clients (section II-A).

    The way is given by the setting ``setting``: ``iid``, ``pathological``, ``label-swapped``, or
    ``by writer``.
    """

    def __init__(self, cache: ResultCache, settings: Settings) -> None:
        self.settings = settings
        self.cache = cache.within({key: settings[key] for key in OF_A_RUN})

    def federation(self, seed: int) -> Federation:
        """Load the data set and divide it among the clients.

        In the setting ``by writer`` each writer of FEMNIST is a client. If ``images`` names a data
        set without writers, the clients' numbers of examples follow a power law instead.
        """
        settings = self.settings
        images = settings["images"]
        tested = settings["test_samples"]
        common: dict[str, Any] = {key: settings[key] for key in ("clients", "scaling")}
        common |= {"seed": seed, "data_dir": self.cache.data_dir}
        if settings["setting"] == "by writer":
            if images == "femnist":
                partition = "natural"
            else:
                partition = "quantity_skew"
            return load_federation(images, partition=partition, **common)
        common["samples_per_client"] = settings["samples_per_client"]
        if settings["setting"] == "pathological":
            return load_federation(images, partition="shards", test_samples=tested, **common)
        shift = {}
        if settings["setting"] == "label-swapped":
            shift = {"shift": "label_swap", "clusters": CLUSTERS}
        return _give_own_test_images(load_federation(images, **shift, **common), tested, seed)

    def maker(self, federation: Federation) -> Maker:
        """Return a function that builds the experiment's model for a federation from a seed."""
        return maker_of(federation, self.settings["model"], self.settings["model_arguments"])

    def of(self, algorithm: Algorithm, fraction: float) -> list[Found]:
        """Run an algorithm with every seed, and return the results of :meth:`run`."""
        return [self.run(algorithm, fraction, seed) for seed in self.settings["seeds"]]

    def run(self, algorithm: Algorithm, fraction: float, seed: int) -> Found:
        """Run FL or FL+HC with one seed and a client fraction (α of Algorithm 1).

        In fedclade the clustering step takes a round. The paper does not count this step as a
        round, so the rounds in the result do not include it.

        Returns
        -------
        dict
            ``rounds``: numbers of the training rounds; ``accuracy``: mean accuracy over the clients
            in these rounds; ``reached``: share of clients at the target accuracy; ``clusters``:
            number of clusters; ``ari``: adjusted Rand index, None if the true clusters are unknown;
            ``at_the_mean``: accuracy if every cluster's model started from the mean of the updates
            by which the cluster was found, None without such updates.
        """
        key = key_of(algorithm, fraction, seed)

        def make() -> Found:
            federation = self.federation(seed)
            settings = self.settings
            # The clustering step is a round without training; 0 stands for none.
            pause = 0
            if isinstance(algorithm, FLHC):
                pause = algorithm.rounds_before + 1
            run = self.cache.simulate(
                *(algorithm, self.maker(federation), federation, settings, seed),
                key=key,
                rounds=settings["rounds"] + (pause > 0),
                client_fraction=fraction,
                target=settings["target"],
                engine=settings["engine"],
            )
            rows = [
                row
                for row in run.metric_rows
                if row["accuracy_mean"] is not None and row["round"] != pause
            ]
            return {
                "rounds": [row["round"] - (0 < pause < row["round"]) for row in rows],
                "accuracy": [round(row["accuracy_mean"], DIGITS) for row in rows],
                "reached": [round(row["share_at_target"], DIGITS) for row in rows],
                "clusters": run.summary["clusters"]["found"],
                "ari": run.metric_rows[-1]["ari"],
                "at_the_mean": self._at_the_mean(run, federation, seed),
            }

        return self.cache.piece(key, make)

    def _at_the_mean(self, run: Run, federation: Federation, seed: int) -> float | None:
        """Return the accuracy if each cluster's model is moved by the mean of its members' updates.

        The updates are those of the clustering step, which Algorithm 1 discards. The accuracy shows
        what the paper's first round after the clustering step would give if they were used. It is
        None if the run has stored no updates.
        """
        leaves = [
            (leaf.members, leaf.cached) for leaf in run.tree.leaves if leaf.cached is not None
        ]
        if not leaves:
            return None
        models = torch.stack([run.tree.nodes[0].params + cached.mean(0) for _, cached in leaves])
        row_of = {client: row for row, (members, _) in enumerate(leaves) for client in members}
        device = choose_device(self.cache.device)
        clients = SimulatedClients(federation, self.maker(federation)(seed), device)
        rows = [row_of[client] for client in federation.ids]
        evaluation = clients.evaluate(federation.ids, models.to(device), rows, "test")
        return round(float(evaluation.scores[:, 0].mean()), DIGITS)

    def merges(self, rounds_before: int, fraction: float) -> list[Merges]:
        """Cluster the clients hierarchically with every distance metric and linkage, for each seed.

        All clusterings of a seed use the same updates, computed after ``rounds_before`` rounds of
        FL with the client fraction ``fraction``.

        Returns
        -------
        list
            For each seed the merges by metric and linkage of :data:`WAYS`, such as ``"l2 ward"``.
            In addition, ``"cosine complete, parameters"`` has the merges if the clients' trained
            models are compared instead of their updates (section I-C).
        """

        def make(seed: int) -> Merges:
            updates, w = self._updates(rounds_before, fraction, seed)
            distances = {metric: compute_distances(updates, metric) for metric in METRICS}
            merges = {
                f"{metric} {linkage}": _merge_clients(distances[metric], linkage)
                for metric, linkage in WAYS
            }
            of_models = compute_distances(updates + w, "cosine")
            merges["cosine complete, parameters"] = _merge_clients(of_models, "complete")
            return merges

        return self.cache.by_seed(
            f"merges, n {rounds_before}, cf {fraction:.1f}", self.settings["seeds"], make
        )

    def _updates(self, rounds_before: int, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
        """Return the updates of all clients after some rounds of FL.

        Returns
        -------
        tuple
            The updates of the m clients, ``[m, D]``, where D is the number of parameters; and the
            parameters of the joint model from which the clients trained, ``[D]``.
        """
        federation = self.federation(seed)
        rounds = rounds_before + 1
        run = self.cache.simulate(
            FLHC(rounds_before=rounds_before, metric="l2", linkage="ward", n_clusters=2),
            *(self.maker(federation), federation, self.settings, seed),
            rounds=rounds,
            client_fraction=fraction,
            evaluate_every=rounds,
            engine=self.settings["engine"],
        )
        cached = [
            (leaf.members, leaf.cached) for leaf in run.tree.leaves if leaf.cached is not None
        ]
        order = np.argsort([client for members, _ in cached for client in members])
        updates = torch.cat([each for _, each in cached])[torch.from_numpy(order)]
        return updates, run.tree.nodes[0].params[: updates.shape[1]]


def _merge_clients(distances: Distances, linkage: str) -> list[list[float]]:
    """Return the merges of hierarchical clustering, with heights rounded to 7 digits."""
    return [
        [int(a), int(b), float(f"{height:.7g}"), int(size)]
        for a, b, height, size in agglomerate(distances, linkage).tolist()
    ]


def _give_own_test_images(federation: Federation, samples: int, seed: int) -> Federation:
    """Give every client different test images, so that clients reach the target independently."""
    order = rng.generator(seed, "test images of clients").permutation(federation.pool.test)
    parts = [
        order[start : start + samples] for start in range(0, samples * len(federation), samples)
    ]
    clients = (
        replace(client, test=part) for client, part in zip(federation.clients, parts, strict=True)
    )
    return replace(federation, clients=tuple(clients))


def key_of(algorithm: Algorithm, fraction: float, seed: int) -> str:
    """Return the key under which the results of a run are stored."""
    how = "FL"
    if isinstance(algorithm, FLHC):
        if algorithm.n_clusters is None:
            at = f"T {algorithm.threshold}"
        else:
            at = f"{algorithm.n_clusters} clusters"
        how = f"{algorithm.metric} {algorithm.linkage}, {at}, n {algorithm.rounds_before}, K {algorithm.cohort}"
    return f"{how}, cf {fraction:.1f}, seed {seed}"


def labels_of(merges: Sequence[Sequence[float]], n_clusters: int) -> list[int]:
    """Cut the dendrogram of the merges, and return the number of each client's cluster.

    Equal partitions of the clients give equal numbers.
    """
    return cut(np.asarray(merges), n_clusters).tolist()


def clusters_at(merges: Sequence[Sequence[float]], threshold: float) -> int:
    """Return the number of clusters if merging stops at a distance above the threshold T."""
    return 1 + sum(height > threshold for _, _, height, _ in merges)
