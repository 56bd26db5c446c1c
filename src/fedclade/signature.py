"""What the server sees of an update: all of it, or all of it shuffled by a permutation that only the clients know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedclade import rng
from fedclade.clients import Clients, ClientsWrapper, Evaluation, Round, Split, Updates


class Permutation:
    """The orthonormal operator P of CFL's eqs. 45 and 46: a random order of the entries, by a seed that clients share.

    Parameters are shuffled among parameters and buffers among buffers, so that a server can still tell which entries
    are compared.

    Parameters
    ----------
    seed
        The clients' secret. The server never holds it.
    size, n_parameters
        Length S of a model vector, and how many of its first entries are parameters.
    """

    def __init__(self, seed: int, size: int, n_parameters: int) -> None:
        draw = rng.torch_generator(seed, "permutation")
        parameters = torch.randperm(n_parameters, generator=draw)
        buffers = n_parameters + torch.randperm(size - n_parameters, generator=draw)
        self._forward = torch.cat([parameters, buffers])
        self._inverse = torch.argsort(self._forward)

    def apply(self, vectors: Tensor) -> Tensor:
        """Return P·v for vectors ``[..., S]``, or for their parameters alone, ``[..., D]``."""
        return vectors[..., self._forward[: vectors.shape[-1]].to(vectors.device)]

    def invert(self, vectors: Tensor) -> Tensor:
        """Return P⁻¹·v for vectors ``[..., S]``, or for their parameters alone, ``[..., D]``."""
        return vectors[..., self._inverse[: vectors.shape[-1]].to(vectors.device)]


class PermutedClients(ClientsWrapper):
    """Clients that speak to the server in permuted vectors only (CFL Algorithm 5, lines 7 and 8).

    They undo P on every model that they receive and apply it to every update that they send. Means, norms and cosine
    similarities are what they were (eqs. 45, 46), so an algorithm runs on them unchanged.

    Parameters
    ----------
    clients
        Those who do the work.
    permutation
        P, built on the clients' side from the seed that they share.
    """

    def __init__(self, clients: Clients, permutation: Permutation) -> None:
        super().__init__(clients)
        self._permutation = permutation

    def train(self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], this_round: Round) -> Updates:
        """Let each client train from its model; return P·Δθ_i."""
        return self._sent(self._clients.train(ids, self._permutation.invert(models), assignment, this_round))

    def gradients(self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], this_round: Round) -> Updates:
        """Return P times the negative full-batch gradients."""
        return self._sent(self._clients.gradients(ids, self._permutation.invert(models), assignment, this_round))

    def evaluate(self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], split: Split) -> Evaluation:
        """Let each client evaluate its model on a split of its own data."""
        return self._clients.evaluate(ids, self._permutation.invert(models), assignment, split)

    def _sent(self, updates: Updates) -> Updates:
        deltas = self._permutation.apply(updates.deltas)
        return replace(updates, deltas=deltas, signatures=deltas[:, : updates.signatures.shape[1]])
