"""Federations and runs of FL+HC's tables and figures, and the stored results of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedclade import FLHC, Algorithm, Federation, Run, load_federation
from fedclade.clustering import LINKAGES, METRICS, agglomerate, compute_distances, cut
from fedclade.core import rng
from fedclade.runs import Maker
from fedclade.training import SimulatedClients, choose_device
from fedclade_papers.cache import ResultCache, Settings, maker_of

Found = dict[str, Any]
"""Stored results of a run, in JSON's types."""

Merges = Mapping[str, Sequence[Sequence[float]]]
"""Merges of the clients, by ``"metric linkage"``.

The format ``[m-1, 4]`` is that of :func:`fedclade.clustering.agglomerate`.
"""

CLUSTERS = 4
"""Number of groups of clients that swap two labels each (section II-A)."""

DIGITS = 4
"""Number of decimals of a stored share."""

WAYS = [
    (metric, linkage)
    for metric in METRICS
    for linkage in LINKAGES
    if linkage != "ward" or metric == "l2"
]
"""All combinations of distance metric and linkage."""

OF_A_RUN = (
    *(
        "setting",
        "images",
        "scaling",
        "clients",
        "samples_per_client",
        "test_samples",
        "model",
        "model_arguments",
    ),
    *("rounds", "epochs", "batch_size", "lr", "target", "engine"),
)
"""Settings on which a run depends. Tables and figures with equal ones share runs."""


class Runs:
    """Runs in a setting of section II-A.

    Settings are ``iid``, ``pathological``, ``label-swapped``, and ``by writer``.
    """

    def __init__(self, cache: ResultCache, settings: Settings) -> None:
        self.settings = settings
        self.cache = cache.within({key: settings[key] for key in OF_A_RUN})

    def federation(self, seed: int) -> Federation:
        """Return the clients.

        With FEMNIST each writer is a client. If ``images`` names a data set without writers, sizes
        follow a power law instead.
        """
        settings = self.settings
        images = settings["images"]
        tested = settings["test_samples"]
        common: dict[str, Any] = {key: settings[key] for key in ("clients", "scaling")}
        common |= {"seed": seed, "data_dir": self.cache.data_dir}
        if settings["setting"] == "by writer":
            return load_federation(
                images, partition="natural" if images == "femnist" else "quantity_skew", **common
            )
        common["samples_per_client"] = settings["samples_per_client"]
        if settings["setting"] == "pathological":
            return load_federation(images, partition="shards", test_samples=tested, **common)
        shift = (
            {"shift": "label_swap", "clusters": CLUSTERS}
            if settings["setting"] == "label-swapped"
            else {}
        )
        return _tested_apart(load_federation(images, **shift, **common), tested, seed)

    def maker(self, federation: Federation) -> Maker:
        """Return a function that builds the model from a seed."""
        return maker_of(federation, self.settings["model"], self.settings["model_arguments"])

    def of(self, algorithm: Algorithm, fraction: float) -> list[Found]:
        """Return the results of :meth:`run` for every seed."""
        return [self.run(algorithm, fraction, seed) for seed in self.settings["seeds"]]

    def run(self, algorithm: Algorithm, fraction: float, seed: int) -> Found:
        """Run FL or FL+HC once at a client fraction (α of Algorithm 1).

        The clustering step is a round by itself here, but not in the paper's count of rounds.

        Returns
        -------
        dict
            ``rounds`` of training, with ``accuracy`` (mean of the clients) and ``reached`` (the
            share of clients at the target); number of ``clusters``; ``ari``, None if true clusters
            are unknown; and ``at_the_mean``, the accuracy if every cluster began at the mean of the
            updates by which it was found.
        """
        key = key_of(algorithm, fraction, seed)

        def make() -> Found:
            federation = self.federation(seed)
            settings = self.settings
            pause = algorithm.rounds_before + 1 if isinstance(algorithm, FLHC) else 0
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
        """Return the accuracy if each cluster's model is moved by the mean of its cached updates.

        None if no updates are cached. It shows the result of the paper's round after the clustering
        step if the updates of that step are used.
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
        """Merge the clients with every metric and linkage, for each seed, from the same updates.

        The updates are those after ``rounds_before`` rounds.

        Returns
        -------
        list
            Merges by ``"metric linkage"`` of :data:`WAYS`; and by ``"cosine complete,
            parameters"``, for which the trained models are compared instead of the updates (section
            I-C).
        """

        def make(seed: int) -> Merges:
            updates, w = self._updates(rounds_before, fraction, seed)
            apart = {metric: compute_distances(updates, metric) for metric in METRICS}
            ways = {f"{metric} {linkage}": (apart[metric], linkage) for metric, linkage in WAYS}
            ways["cosine complete, parameters"] = (
                compute_distances(updates + w, "cosine"),
                "complete",
            )
            return {
                way: [
                    [int(a), int(b), float(f"{height:.7g}"), int(size)]
                    for a, b, height, size in merged.tolist()
                ]
                for way, (between, linkage) in ways.items()
                for merged in [agglomerate(between, linkage)]
            }

        return self.cache.by_seed(
            f"merges, n {rounds_before}, cf {fraction:.1f}", self.settings["seeds"], make
        )

    def _updates(self, rounds_before: int, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
        """Return all clients' updates ``[m, D]`` after some rounds of FL, and the joint model."""
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


def _tested_apart(federation: Federation, samples: int, seed: int) -> Federation:
    """Give every client its own test images, so that each client can reach a target by itself."""
    order = rng.generator(seed, "test images of clients").permutation(federation.pool.test)
    parts = [
        order[start : start + samples] for start in range(0, samples * len(federation), samples)
    ]
    clients = (
        replace(client, test=part) for client, part in zip(federation.clients, parts, strict=True)
    )
    return replace(federation, clients=tuple(clients))


def key_of(algorithm: Algorithm, fraction: float, seed: int) -> str:
    """Return the key of a run."""
    how = "FL"
    if isinstance(algorithm, FLHC):
        at = (
            f"T {algorithm.threshold}"
            if algorithm.n_clusters is None
            else f"{algorithm.n_clusters} clusters"
        )
        how = f"{algorithm.metric} {algorithm.linkage}, {at}, n {algorithm.rounds_before}, K {algorithm.cohort}"
    return f"{how}, cf {fraction:.1f}, seed {seed}"


def labels_of(merges: Sequence[Sequence[float]], n_clusters: int) -> list[int]:
    """Return the cluster of each client; equal clusterings have equal numbers."""
    return cut(np.asarray(merges), n_clusters).tolist()


def clusters_at(merges: Sequence[Sequence[float]], threshold: float) -> int:
    """Return the number of clusters if merging stops at a threshold T."""
    return 1 + sum(height > threshold for _, _, height, _ in merges)
