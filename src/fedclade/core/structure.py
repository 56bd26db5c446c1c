"""Structure of examples that consist of several tensors, and their storage as rows of numbers.

An input may be a dict or a tuple of tensors, such as ``{"input_ids": ..., "attention_mask": ...}``.
It is stored as one row of numbers, as a row of a structured NumPy array is, so that everything that
moves examples (files, engines, worker processes, networks) handles a single tensor ``[N, W]``. The
row is divided into the original tensors where a model is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal, get_args

import torch

from fedclade.core.errors import DataError, shown

FieldKind = Literal["float", "int", "bool"]
"""Kind of the numbers of a field: float32, int64 or truth values."""

Tensors = Mapping[str, "torch.Tensor"] | tuple["torch.Tensor", ...]
"""Several tensors with the same number of examples: by name, or by position."""

LARGEST_EXACT = 2**24
"""Whole numbers up to this size are exact in float32."""

MOST_FIELDS = 256
"""Largest number of tensors in an example."""


@dataclass(frozen=True)
class Field:
    """One tensor of an example.

    Parameters
    ----------
    name
        Name of the tensor in a dict; its position as a text, such as ``"0"``, in a tuple.
    kind
        Kind of its numbers.
    shape
        Shape of the tensor of one example; empty for a single number.
    """

    name: str
    kind: FieldKind
    shape: tuple[int, ...]

    @property
    def described(self) -> str:
        """Text for messages, such as ``ids: int [16]``."""
        return f"{self.name}: {self.kind} {list(self.shape)}"


@dataclass(frozen=True)
class Structure:
    """Structure of an example that consists of several tensors.

    Parameters
    ----------
    fields
        The tensors of an example, in the order in which a row stores them.
    is_named
        Whether an example is a dict of tensors; otherwise it is a tuple.

    Examples
    --------
    >>> ids, mask = torch.tensor([[5, 3, 0]]), torch.tensor([[True, True, False]])
    >>> structure = Structure.of({"ids": ids, "mask": mask}, "inputs")
    >>> structure.pack({"ids": ids, "mask": mask})
    tensor([[5, 3, 0, 1, 1, 0]])
    """

    fields: tuple[Field, ...]
    is_named: bool = True

    @classmethod
    def of(cls, tensors: Tensors, what: str) -> Structure:
        """Return the structure of examples ``[N, ...]`` that are given as several tensors.

        Parameters
        ----------
        tensors
            The tensors of N examples by name, or as a tuple. Bytes count as pixels, which become
            floats.
        what
            Name of the tensors in error messages.

        Raises
        ------
        DataError
            If there is no tensor, a name is not a text, or the tensors differ in their number of
            examples.
        """
        named = _by_name(tensors)
        if not 1 <= len(named) <= MOST_FIELDS:
            raise DataError(
                f"{what} should have from 1 to {MOST_FIELDS} tensors for each example, got "
                f"{len(named)}"
            )
        odd = [name for name in named if not isinstance(name, str) or not name]  # pyright: ignore[reportUnnecessaryIsInstance]
        if odd:
            raise DataError(f"the names of {what} should be texts, got {shown(odd[0])}")
        scalars = [name for name, tensor in named.items() if tensor.dim() == 0]
        if scalars:
            raise DataError(
                f"{scalars[0]!r} of {what} should have an entry for each example, got one number"
            )
        lengths = {name: len(tensor) for name, tensor in named.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(
                f"{what} should have the same number of examples in all tensors, got {lengths}"
            )
        fields = [
            Field(name, _kind_of(tensor), tuple(tensor.shape[1:])) for name, tensor in named.items()
        ]
        return cls(tuple(fields), isinstance(tensors, Mapping))

    @classmethod
    def read(cls, stated: Any) -> Structure:
        """Check and read a structure from the values of a JSON object.

        Raises
        ------
        TypeError, ValueError
            If the values are malformed.
        """
        fields = [_read_field(each) for each in stated["fields"]]
        for field in fields:
            is_shape = all(type(size) is int and size >= 0 for size in field.shape)
            if not isinstance(field.name, str) or field.kind not in get_args(FieldKind):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ValueError(f"a tensor of an example is {shown(field)}, with unknown values")
            if not is_shape or prod(field.shape) > LARGEST_EXACT:
                raise ValueError(f"the shape of {field.name!r} is {shown(field.shape)}")
        names = [field.name for field in fields]
        if not 1 <= len(fields) <= MOST_FIELDS or len(set(names)) < len(names):
            raise ValueError(f"the tensors of an example are {shown(names)}")
        if type(stated["is_named"]) is not bool:
            raise ValueError(f"'is_named' is {shown(stated['is_named'])}, expected a truth value")
        return cls(tuple(fields), stated["is_named"])

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors, or their positions as texts."""
        return tuple(field.name for field in self.fields)

    @cached_property
    def width(self) -> int:
        """Number W of numbers in the row of an example."""
        return sum(prod(field.shape) for field in self.fields)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Type of the rows: int64 if an example has no floats, otherwise float32."""
        if any(field.kind == "float" for field in self.fields):
            return torch.float32
        return torch.int64

    @property
    def has_whole_numbers(self) -> bool:
        """Whether a tensor of an example has whole numbers or truth values."""
        return any(field.kind != "float" for field in self.fields)

    @property
    def described(self) -> str:
        """Text for messages, such as ``{ids: int [16], mask: bool [16]}``."""
        listed = ", ".join(field.described for field in self.fields)
        return f"{{{listed}}}" if self.is_named else f"({listed})"

    def pack(self, tensors: Tensors) -> torch.Tensor:
        """Store examples as rows of numbers.

        Parameters
        ----------
        tensors
            The tensors ``[N, ...]`` of N examples, of this structure.

        Returns
        -------
        Tensor
            Rows ``[N, W]`` of type :attr:`dtype`. Pixels of type uint8 are divided by 255.

        Raises
        ------
        DataError
            If a whole number next to floats is too large for float32.
        """
        named = _by_name(tensors)
        rows: list[torch.Tensor] = []
        for field in self.fields:
            tensor = named[field.name]
            if field.kind == "int" and self.dtype == torch.float32:
                _check_exact(tensor, field.name)
            numbers = tensor.to(self.dtype)
            if tensor.dtype == torch.uint8:
                numbers = numbers / 255
            rows.append(numbers.reshape(len(tensor), prod(field.shape)))
        return torch.cat(rows, 1)

    def unpack(self, rows: torch.Tensor, dtype: torch.dtype | None = None) -> Tensors:
        """Divide rows of numbers into the tensors of the examples.

        Parameters
        ----------
        rows
            Rows ``[B, W]`` of B examples.
        dtype
            Type of the floats in the result; None for the type of the rows.

        Returns
        -------
        dict or tuple
            The tensors ``[B, ...]``: floats, int64 and truth values, as the structure states.
        """
        tensors: dict[str, torch.Tensor] = {}
        rows = rows.reshape(len(rows), self.width)  # targets of one number are stored as [N]
        start = 0
        for field in self.fields:
            stop = start + prod(field.shape)
            tensor = rows[:, start:stop].reshape(len(rows), *field.shape)
            start = stop
            if field.kind == "int":
                tensor = tensor.to(torch.int64)
            elif field.kind == "bool":
                tensor = tensor != 0
            elif dtype is not None:
                tensor = tensor.to(dtype)
            tensors[field.name] = tensor
        return tensors if self.is_named else tuple(tensors.values())


def _read_field(stated: Any) -> Field:
    """Read a field from the values of a JSON object, in which a shape is a list."""
    values: dict[str, Any] = {**stated, "shape": tuple(stated["shape"])}
    return Field(**values)


def _by_name(tensors: Tensors) -> Mapping[str, torch.Tensor]:
    """Return tensors by name; those of a tuple by their position."""
    if isinstance(tensors, Mapping):
        return tensors
    return {str(place): tensor for place, tensor in enumerate(tensors)}


def _kind_of(tensor: torch.Tensor) -> FieldKind:
    """Return the kind of a tensor's numbers; bytes are pixels, and so floats."""
    if tensor.dtype == torch.bool:
        return "bool"
    if tensor.is_floating_point() or tensor.dtype == torch.uint8:
        return "float"
    return "int"


def _check_exact(tensor: torch.Tensor, name: str) -> None:
    """Check that whole numbers that are stored next to floats are exact in float32."""
    if tensor.numel() and int(tensor.abs().max()) > LARGEST_EXACT:
        raise DataError(
            f"whole numbers {name!r} of examples that also have floats should be at most "
            f"{LARGEST_EXACT:,}, got {int(tensor.abs().max()):,}; number them from 0, or give them "
            "as floats"
        )
