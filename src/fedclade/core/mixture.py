"""Mixtures of models: each client has a weight π_m for every model m, and predicts with the weighted mean of all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_MASS = 1e-8
"""Of a label in a component, in examples: no label is so rare that it is divided by less (FedRC's official code)."""


@dataclass(frozen=True, eq=False)
class Mixture:
    """That all models of a query are the K components of one mixture.

    Parameters
    ----------
    by_label
        Whether clients send besides, for each component, how their examples of each label lean towards it.
    rates
        P̂ ``[K, C]``: how common each label is in each component; by it responsibilities are divided (FedRC). None: they
        are not.
    """

    by_label: bool = False
    rates: Tensor | None = None

    def responsibilities(self, weights: Tensor, losses: Tensor, targets: Tensor) -> Tensor:
        """Return q_j(m) ∝ π_m exp(−ℓ_jm) / P̂_m(y_j), float64 ``[n, K]``, of a client's n examples (E-step).

        ``weights`` is π ``[K]``, ``losses`` are ℓ ``[n, K]`` in nats and ``targets`` y ``[n]``.
        """
        scores = weights.double().log() - losses.double()
        if self.rates is not None:
            scores = scores - self.rates.to(scores).log().t()[targets.long()]
        return scores.softmax(1)

    def tables(self, leaning: Tensor, targets: Tensor, labels: int) -> Tensor:
        """Return Σ q_j(m) over the examples of each label, over n: ``[K, C]``, of responsibilities ``[n, K]``."""
        sums = leaning.new_zeros(labels, leaning.shape[1]).index_add_(0, targets.long(), leaning)
        return sums.t() / len(leaning)


def label_rates(mean: Tensor, examples: float) -> Tensor:
    """Return P̂ ``[K, C]`` of the clients' mean table, weighted by their examples, and how many these are in all."""
    counts = (mean.double() * examples).clamp(min=LEAST_MASS)
    return counts / counts.sum(1, keepdim=True)


def packed(deltas: Tensor, n_parameters: int, tables: Tensor | None = None) -> Tensor:
    """Return the updates ``[..., K, S]`` of K models as one vector each: parameters, then buffers, then the tables.

    Tables ``[..., K, C]`` come where buffers do: both are averaged, and compared by nobody.
    """
    parts = [deltas[..., :n_parameters], deltas[..., n_parameters:], *([] if tables is None else [tables.to(deltas)])]
    return torch.cat([part.flatten(-2) for part in parts], -1)


def unpacked(vectors: Tensor, components: int, size: int, n_parameters: int) -> tuple[Tensor, Tensor]:
    """Return the updates ``[..., K, S]`` and tables ``[..., K, C]`` that :func:`packed` has joined; C may be 0."""
    K, D, end = components, n_parameters, components * size
    shape = vectors.shape[:-1]
    parameters = vectors[..., : K * D].reshape(*shape, K, D)
    buffers = vectors[..., K * D : end].reshape(*shape, K, size - D)
    tables = vectors[..., end:].reshape(*shape, K, (vectors.shape[-1] - end) // K)
    return torch.cat([parameters, buffers], -1), tables
