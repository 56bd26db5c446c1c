"""Mixtures of models: all clients share K models (components), weighted differently by each client.

A client has a weight π_m for each component m, and predicts with the weighted mean of the
predictions of all components. FedEM and FedRC train mixtures. The responsibility of a component for
an example is the probability that the component generated the example.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LEAST_MASS = 1e-8
"""Lower bound on the number of examples of a label in a component (FedRC's official code).

The bound prevents divisions by zero.
"""


@dataclass(frozen=True, eq=False)
class Mixture:
    """Settings of a query whose K models are the components of one mixture (FedEM, FedRC).

    Parameters
    ----------
    by_label
        Whether clients also send the sum of each component's responsibilities for their examples
        of each label, see :meth:`tables`.
    rates
        Frequencies P̂ of the C labels in each of the K components, ``[K, C]``. Responsibilities are
        divided by them (FedRC). If None, responsibilities are not divided (FedEM).
    """

    by_label: bool = False
    rates: torch.Tensor | None = None

    def responsibilities(
        self, weights: torch.Tensor, losses: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """Return the components' responsibilities for a client's n examples (the E-step of EM).

        The responsibility of component m for example j is q_j(m) ∝ π_m exp(−ℓ_jm) / P̂_m(y_j); the
        division applies only if :attr:`rates` is set.

        Parameters
        ----------
        weights
            The client's weights π of the K components, ``[K]``.
        losses
            Loss ℓ of each component on each example, in nats, ``[n, K]``.
        targets
            Labels y of the examples, ``[n]``.

        Returns
        -------
        Tensor
            The responsibilities, float64 ``[n, K]``; each row sums to 1.
        """
        scores = weights.double().log() - losses.double()
        if self.rates is not None:
            scores = scores - self.rates.to(scores).log().t()[targets.long()]
        return scores.softmax(1)

    def tables(
        self, responsibilities: torch.Tensor, targets: torch.Tensor, labels: int
    ) -> torch.Tensor:
        """Return a client's sums of responsibilities for each label, divided by its n examples.

        Parameters
        ----------
        responsibilities
            Responsibilities of the K components for the n examples, ``[n, K]``.
        targets
            Labels of the examples, ``[n]``.
        labels
            Number C of labels.

        Returns
        -------
        Tensor
            The table ``[K, C]``: a row for each component, a column for each label.
        """
        n, components = responsibilities.shape
        sums = responsibilities.new_zeros(labels, components)
        sums.index_add_(0, targets.long(), responsibilities)
        return sums.t() / n


def label_rates(mean: torch.Tensor, examples: float) -> torch.Tensor:
    """Return the frequencies P̂ ``[K, C]`` of the C labels in each of the K components (FedRC).

    Parameters
    ----------
    mean
        Mean of the clients' tables ``[K, C]`` (:meth:`Mixture.tables`), weighted by the clients'
        numbers of examples.
    examples
        Total number of examples of all clients. Multiplied by it, the mean is a number of examples.
    """
    counts = (mean.double() * examples).clamp(min=LEAST_MASS)
    return counts / counts.sum(1, keepdim=True)


def packed(
    deltas: torch.Tensor, n_parameters: int, tables: torch.Tensor | None = None
) -> torch.Tensor:
    """Concatenate each client's updates of the K components of a mixture to one update vector.

    The vector has all parameters, then all buffers, then the tables. Buffers and tables come last,
    since they are averaged like parameters, but clients are compared by their parameters alone.

    Parameters
    ----------
    deltas
        Updates of the K components, ``[..., K, S]``.
    n_parameters
        Number of leading entries of each update that are parameters; the others are buffers.
    tables
        Tables of responsibilities by label (:meth:`Mixture.tables`), ``[..., K, C]``; None: none.
    """
    parts = [deltas[..., :n_parameters], deltas[..., n_parameters:]]
    if tables is not None:
        parts.append(tables.to(deltas))
    return torch.cat([part.flatten(-2) for part in parts], -1)


def unpacked(
    vectors: torch.Tensor, components: int, size: int, n_parameters: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split vectors made by :func:`packed` into the updates and tables of the K components.

    Parameters
    ----------
    vectors
        One vector for each client, or their mean.
    components
        Number K of components.
    size, n_parameters
        Numbers of entries and of parameters of one component's update.

    Returns
    -------
    tuple
        The updates ``[..., K, S]`` and the tables ``[..., K, C]``; C is 0 if the vectors have no
        tables.
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
