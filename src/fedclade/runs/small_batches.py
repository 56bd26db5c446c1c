"""Smallest mini-batch of local training, for models that cannot be trained on a single example.

Batch normalization, for example, needs at least two examples to compute a variance.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from fedclade.core import LocalTraining
from fedclade.runs.reference_log import RunLog
from fedclade.runs.settings import RunSettings

_log = RunLog(logging.getLogger(__name__))


def with_smallest_batch(
    settings: RunSettings, smallest: int, sizes: Mapping[int, int]
) -> RunSettings:
    """Return settings whose mini-batches have at least as many examples as a model needs.

    A warning reports the number of clients whose mini-batches change, and the number of clients
    with fewer examples than one such mini-batch.

    Parameters
    ----------
    settings
        Settings of the run.
    smallest
        Number of examples of the smallest mini-batch on which the model can be trained.
    sizes
        Number of training examples of each client.

    Raises
    ------
    ConfigError
        If all mini-batches of the settings are smaller than ``smallest``.
    """
    local = settings.local.with_smallest_batch(smallest)
    if local is settings.local:
        return settings
    joined = [
        client for client, size in sizes.items() if _changes_batches(settings.local, local, size)
    ]
    alone = [client for client, size in sizes.items() if size < smallest]
    told: list[str] = []
    if joined:
        told.append(
            "the last example of an epoch is added to the batch before it at "
            f"{_describe_clients(joined, len(sizes))} with local.batch_size = {local.batch_size}"
        )
    if alone:
        told.append(
            "normalization layers do not update their statistics at "
            f"{_describe_clients(alone, len(sizes))} with one training example"
        )
    if told:
        _log.warning("the model cannot be trained on a batch of one example: %s", "; ".join(told))
    return replace(settings, local=local)


def _changes_batches(before: LocalTraining, after: LocalTraining, size: int) -> bool:
    """Return whether two settings divide ``size`` examples into different numbers of batches."""
    return before.batches_per_epoch(size) != after.batches_per_epoch(size)


def _describe_clients(clients: list[int], of: int) -> str:
    """Describe the affected clients, such as ``3 of 20 clients (the first is client 5)``.

    ``clients`` are the ids of the affected clients, and ``of`` is the number of all clients.
    """
    return f"{len(clients)} of {of} clients (the first is client {clients[0]})"
