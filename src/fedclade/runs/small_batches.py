"""Smallest batch of local training, for models that cannot be trained on one example."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from fedclade.core import LocalTraining
from fedclade.runs.settings import RunSettings

_log = logging.getLogger(__name__)


def with_smallest_batch(
    settings: RunSettings, smallest: int, sizes: Mapping[int, int]
) -> RunSettings:
    """Return settings whose batches have at least as many examples as a model needs.

    A warning reports the number of clients whose batches change, and of those with fewer examples
    than one such batch.

    Parameters
    ----------
    settings
        Settings of the run.
    smallest
        Examples of the smallest batch that the model can be trained on.
    sizes
        Number of training examples of each client.

    Raises
    ------
    ConfigError
        If all batches have fewer examples.
    """
    local = settings.local.with_smallest_batch(smallest)
    if local is settings.local:
        return settings
    joined = [client for client, size in sizes.items() if _changes(settings.local, local, size)]
    alone = [client for client, size in sizes.items() if size < smallest]
    told: list[str] = []
    if joined:
        told.append(
            "the last example of an epoch is joined to the batch before, at "
            f"{_count(joined, len(sizes))} with local.batch_size = {local.batch_size}"
        )
    if alone:
        told.append(
            "normalisation layers keep the statistics that they are sent, at "
            f"{_count(alone, len(sizes))} with one training example"
        )
    if told:
        _log.warning("the model cannot be trained on a batch of one example: %s", "; ".join(told))
    return replace(settings, local=local)


def _changes(before: LocalTraining, after: LocalTraining, size: int) -> bool:
    """Return whether a client of this size has other batches after than before."""
    return before.batches_per_epoch(size) != after.batches_per_epoch(size)


def _count(clients: list[int], of: int) -> str:
    return f"{len(clients)} of {of} clients (the first is client {clients[0]})"
