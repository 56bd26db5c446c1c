"""Training of a ClientApp on one part of its data, which the config of a message names.

Replicated clustering compares the updates from several disjoint parts of each client's data. The
server names the part in the config of a request to train, and :func:`part_of` selects it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

import numpy as np
import torch

from fedclade.core import ConfigError, DataError, Indices, SplitPart, shown

PREFIX = "fedclade-part"
"""Beginning of the names of all values by which a config names a part."""


@dataclass(frozen=True)
class PartSent:
    """Part of a client's examples, as the config of a message names it.

    Parameters
    ----------
    part
        Number of the part, and number and size of all parts.
    key
        Number that seeds the client's draws.
    seed, number
        Seed and number of the round, which seed the draws, too.
    """

    part: SplitPart
    key: int
    seed: int
    number: int

    def values(self) -> dict[str, int]:
        """Return the values of a config that names this part."""
        seed, number = self.part.parts_from or (self.seed, self.number)
        return {
            PREFIX: self.part.place,
            f"{PREFIX}-count": self.part.count,
            f"{PREFIX}-size": self.part.size,
            f"{PREFIX}-client": self.key,
            f"{PREFIX}-seed": seed,
            f"{PREFIX}-round": number,
        }

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self | None:
        """Return the part that a config names; None if it names none.

        Raises
        ------
        ConfigError
            If a value is missing, or is not a whole number.
        """
        if PREFIX not in config:
            return None
        names = ("", "-count", "-size", "-client", "-seed", "-round")
        values = [config.get(f"{PREFIX}{name}") for name in names]
        if not all(isinstance(value, int) for value in values):
            raise ConfigError(
                f"the config names a part of the client's data by {shown(dict(config))}, expected "
                "whole numbers; install the same version of fedclade on server and clients"
            )
        place, count, size, key, seed, number = cast("list[int]", values)
        if not 0 <= place < count:
            raise ConfigError(
                f"{PREFIX} should be at least 0 and below {PREFIX}-count = {count}, got {place}; "
                "install the same version of fedclade on server and clients"
            )
        return cls(SplitPart(place, count, size), key, seed, number)

    def indices(self, count: int) -> Indices:
        """Return the ascending indices of the part, of ``count`` examples.

        Raises
        ------
        DataError
            If the client has fewer examples than the parts need.
        """
        needed = self.part.count * max(1, self.part.size)
        if count < needed:
            raise DataError(
                f"the client has {count} training examples, fewer than the {needed} that "
                f"{self.part.count} parts need"
            )
        return self.part.of_client(count, self.key, self.seed, self.number)


def part_of(dataset: Any, config: Mapping[str, Any]) -> Any:
    """Return the part of a client's training data that the config of a message names.

    A ClientApp calls this function when it trains, before it makes a loader of batches::

        trainset = part_of(trainset, msg.content["config"])

    The method ``rcfl`` needs it: it compares updates from disjoint parts of each client's data.
    With other methods, and with other strategies, the config names no part, and all data is
    returned.

    Parameters
    ----------
    dataset
        Training data: an array, a sparse matrix, a tuple or dict of these with an entry for each
        example, a list, a data frame, a data set of Hugging Face, or a PyTorch data set with a
        length.
    config
        Config of the message.

    Returns
    -------
    Any
        The examples of the part, in a form like the data's; for a PyTorch data set a
        ``torch.utils.data.Subset``.

    Raises
    ------
    ConfigError
        If the config is malformed, or the data set has no length or is a loader of batches.
    DataError
        If there are too few examples, or the arrays of a tuple or dict differ in length.

    Examples
    --------
    >>> part_of(["a", "b", "c"], {"lr": 0.1})
    ['a', 'b', 'c']
    """
    sent = PartSent.read(config)
    if sent is None:
        return dataset
    if isinstance(dataset, Mapping):
        arrays = cast("Mapping[str, Any]", dataset)
        indices = sent.indices(_common_length(tuple(arrays.values())))
        return {name: _select(array, indices) for name, array in arrays.items()}
    if isinstance(dataset, tuple):
        indices = sent.indices(_common_length(cast("tuple[Any, ...]", dataset)))
        return tuple(_select(array, indices) for array in cast("tuple[Any, ...]", dataset))
    if isinstance(dataset, torch.utils.data.DataLoader) or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"part_of needs the examples of a client, got a {type(dataset).__name__}; call it with "
            "the data set, before batches are made of it"
        )
    return _select(dataset, sent.indices(_length(dataset)))


def _length(data: Any) -> int:
    """Return the number of examples; a sparse matrix has a shape, but no length."""
    return data.shape[0] if hasattr(data, "tocsr") else len(data)


def _common_length(arrays: tuple[Any, ...]) -> int:
    """Return the length of arrays; raise a DataError if the arrays differ in length."""
    lengths = {_length(array) for array in arrays}
    if len(lengths) != 1:
        raise DataError(
            "the arrays of a client's data should have an entry for each example, got the lengths "
            f"{sorted(lengths)}"
        )
    return lengths.pop()


def _select(data: Any, indices: Indices) -> Any:
    """Return some examples of an array, a list, a data frame or a data set."""
    if isinstance(data, np.ndarray | torch.Tensor):
        return cast("Any", data)[indices]
    if isinstance(data, list):
        items = cast("list[Any]", data)
        return [items[place] for place in indices.tolist()]
    if hasattr(data, "iloc"):
        return data.iloc[indices]
    if hasattr(data, "tocsr"):
        return data.tocsr()[indices]
    # An array of JAX, for example, or a data frame of Polars, whose ``select`` selects columns.
    if hasattr(data, "__array__"):
        return data[indices]
    if hasattr(data, "select"):
        return data.select(indices.tolist())
    return torch.utils.data.Subset(data, indices.tolist())
