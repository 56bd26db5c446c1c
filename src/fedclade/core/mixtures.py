"""Mixtures of models: all clients weight the same K models, each with its own weights.

A client has a weight π_m for every model m, and predicts with the weighted mean of all models.
FedEM and FedRC train such mixtures.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_MASS = 1e-8
"""Smallest mass of a label in a component, in examples (FedRC's official code).

It is a lower bound on divisors.
"""


@dataclass(frozen=True, eq=False)
class Mixture:
    """Declaration that all models of a query are the K components of one mixture.

    Parameters
    ----------
    by_label
        Whether clients also send, for each component, its responsibilities for their examples of
        each label, see :meth:`tables`.
    rates
        P̂ ``[K, C]``: frequency of each label in each component. Responsibilities are divided by it
        (FedRC). None: they are not divided.
    """

    by_label: bool = False
    rates: Tensor | None = None

    def responsibilities(self, weights: Tensor, losses: Tensor, targets: Tensor) -> Tensor:
        """Return q_j(m) ∝ π_m exp(−ℓ_jm) / P̂_m(y_j) of a client's n examples (the E-step).

        Parameters
        ----------
        weights
            π ``[K]``.
        losses
            ℓ ``[n, K]``, in nats.
        targets
            y ``[n]``.

        Returns
        -------
        Tensor
            float64 ``[n, K]``.
        """
        scores = weights.double().log() - losses.double()
        if self.rates is not None:
            scores = scores - self.rates.to(scores).log().t()[targets.long()]
        return scores.softmax(1)

    def tables(self, responsibilities: Tensor, targets: Tensor, labels: int) -> Tensor:
        """Return a client's sums of responsibilities by label, divided by n: ``[K, C]``.

        Parameters
        ----------
        responsibilities
            q_j(m) of its n examples, ``[n, K]``.
        targets
            Their labels, ``[n]``.
        labels
            Number C of labels.
        """
        n, components = responsibilities.shape
        sums = responsibilities.new_zeros(labels, components)
        sums.index_add_(0, targets.long(), responsibilities)
        return sums.t() / n


def label_rates(mean: Tensor, examples: float) -> Tensor:
    """Return P̂ ``[K, C]``, the label frequencies of each component.

    Parameters
    ----------
    mean
        Mean of the clients' tables ``[K, C]`` (:meth:`Mixture.tables`), weighted by their numbers
        of examples.
    examples
        Total number of examples.
    """
    counts = (mean.double() * examples).clamp(min=LEAST_MASS)
    return counts / counts.sum(1, keepdim=True)


def packed(deltas: Tensor, n_parameters: int, tables: Tensor | None = None) -> Tensor:
    """Concatenate the updates ``[..., K, S]`` of K models to one vector for each client.

    A vector has all parameters, then all buffers, then the tables ``[..., K, C]``: buffers and
    tables are averaged, and clients are never compared by them.
    """
    parts = [deltas[..., :n_parameters], deltas[..., n_parameters:]]
    if tables is not None:
        parts.append(tables.to(deltas))
    return torch.cat([part.flatten(-2) for part in parts], -1)


def unpacked(
    vectors: Tensor, components: int, size: int, n_parameters: int
) -> tuple[Tensor, Tensor]:
    """Split :func:`packed` vectors into updates ``[..., K, S]`` and tables ``[..., K, C]``.

    C may be 0.
    """
    K = components
    end_of_parameters = K * n_parameters
    end_of_buffers = K * size
    shape = vectors.shape[:-1]
    parameters = vectors[..., :end_of_parameters].reshape(*shape, K, n_parameters)
    buffers = vectors[..., end_of_parameters:end_of_buffers]
    buffers = buffers.reshape(*shape, K, size - n_parameters)
    labels = (vectors.shape[-1] - end_of_buffers) // K
    tables = vectors[..., end_of_buffers:].reshape(*shape, K, labels)
    return torch.cat([parameters, buffers], -1), tables
