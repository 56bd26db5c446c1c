"""The training data of simulated clients, where they train."""

from __future__ import annotations

import torch
from torch import Tensor

from fedclade.data.federation import Federation

Examples = tuple[Tensor, Tensor]
"""Inputs and targets of a client, ``[n, ...]``, as it sees them."""


class TrainingData:
    """What each client trains on, gathered from the pool once and kept on the device as long as all of it fits.

    The examples of all clients lie in one tensor, client behind client in the order of the federation, so that an
    engine can draw the batches of several clients in one go.

    Parameters
    ----------
    federation
        The clients.
    device
        Where they train.
    budget
        Bytes it may take. If the data of all clients is larger, nothing is kept, and every round gathers again.
    """

    def __init__(self, federation: Federation, device: torch.device, budget: int) -> None:
        self._federation = federation
        self._device = device
        self._kept: dict[int, Examples] = {}
        examples = sum(len(client.train) for client in federation.clients)
        first = federation.clients[0]
        self._one = federation.pool.inputs(first.train[:1]), federation.pool.y[:1]
        self.bytes_each = sum(tensor.nbytes for tensor in self._one)
        self._keeps = examples * self.bytes_each <= budget
        self.bytes_kept = examples * self.bytes_each if self._keeps else 0

    def of(self, client: int) -> Examples:
        """Return a client's training examples."""
        if not self._keeps:
            inputs, targets = self._federation.examples(client, "train")
            return inputs.to(self._device), targets.to(self._device)
        if not self._kept:
            self._gather()
        return self._kept[client]

    def _gather(self) -> None:
        clients = self._federation.clients
        total = sum(len(client.train) for client in clients)
        inputs, targets = (
            torch.empty(total, *one.shape[1:], dtype=one.dtype, device=self._device) for one in self._one
        )
        start = 0
        for client in clients:
            there = slice(start, start := start + len(client.train))
            for whole, part in zip((inputs, targets), self._federation.examples(client.id, "train"), strict=True):
                whole[there] = part
            self._kept[client.id] = inputs[there], targets[there]
