"""What an algorithm carries from round to round, and how a checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from types import UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor
from typing_extensions import TypeVar

from fedclade.core import KEEPS_NONE, OWN, CheckpointError, ParameterTree, Updates


@dataclass(frozen=True, eq=False)
class State:
    """All that an algorithm carries from round to round. Immutable.

    An algorithm that keeps more than the tree has a frozen subclass, whose fields are tensors, numbers, tuples of
    numbers, or true or false. Those that may be missing from a checkpoint have a default.

    Parameters
    ----------
    tree
        The clusters and their models; its leaves are what clients train on.
    """

    tree: ParameterTree

    def tensors(self) -> dict[str, Tensor]:
        """Return all fields but the tree as tensors by name; what is None or False is left out."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "tree"}
        return {name: _tensor_of(value) for name, value in values.items() if value is not None and value is not False}

    @classmethod
    def from_tensors(cls, tree: ParameterTree, tensors: Mapping[str, Tensor]) -> Self:
        """Return the state whose :meth:`tensors` these are.

        Raises
        ------
        CheckpointError
            If they are those of another class.
        """
        hints = get_type_hints(cls)
        needed = {each.name for each in fields(cls) if each.name != "tree" and each.default is MISSING}
        if odd := sorted(needed - set(tensors) | set(tensors) - set(hints)):
            raise CheckpointError(
                f"the state in the checkpoint is not a {cls.__name__}, which differs in {', '.join(odd)}"
            )
        return cls(tree, **{name: _value_of(hints[name], tensor) for name, tensor in tensors.items()})


@dataclass(frozen=True, eq=False)
class OwnState(State):
    """Of a method whose clients each keep a model of their own: which do, in ascending order."""

    keepers: tuple[int, ...]

    def rows(self, clients: Sequence[int]) -> list[int]:
        """Return what clients go on from: those without a model of their own from the first that they are sent."""
        keepers = set(self.keepers)
        return [OWN if client in keepers else 0 for client in clients]

    def keepers_after(self, updates: Updates) -> tuple[int, ...]:
        """Return who keeps a model after some were trained, without those who say that they have lost it."""
        lost = {client for client, why in updates.left_out.items() if why.startswith(KEEPS_NONE)}
        return tuple(sorted({*self.keepers, *updates.ids} - lost))


S = TypeVar("S", bound=State, default=Any)
"""The state of an algorithm."""

OwnS = TypeVar("OwnS", bound=OwnState, default=OwnState)
"""That of one whose clients keep models of their own."""


def _tensor_of(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.from_numpy(np.atleast_1d(value))  # numbers in all their digits, or a resumed run would be another


def _value_of(hint: Any, tensor: Tensor) -> Any:
    hint = get_args(hint)[0] if isinstance(hint, UnionType) else hint  # of what may be None
    if hint in (bool, int, float):
        return hint(tensor.item())
    return tuple(tensor.tolist()) if get_origin(hint) is tuple else tensor
