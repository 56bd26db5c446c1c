"""Conversion between Flower's array records and the flat vectors that algorithms compute with.

The server of a :class:`~fedclade.flower.ClusteredStrategy` has no model, only the named arrays that
a strategy of Flower starts from. So it works with clients of any framework.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core import Layout, ModelError, Slot, UpdateError, fitting, rng
from fedclade.flower.wire import untrusted

BUFFERS = ("*running_mean", "*running_var", "*moving_mean", "*moving_variance", "*batch_stats*")
"""Patterns over the names of arrays that are running statistics in PyTorch, Keras and Flax."""

Numbers = NDArray[np.generic]


@dataclass(frozen=True)
class ArrayModel:
    """Names, shapes and types of the arrays of a model, and their positions in a flat vector.

    Floating-point arrays are parameters, by which clients are compared. Arrays of whole numbers or
    truth values, such as BatchNorm's ``num_batches_tracked``, and floating-point arrays whose names
    match patterns of running statistics are buffers: they are averaged, and then rounded if they
    are no floating-point numbers, but clients are not compared by them.

    Parameters
    ----------
    names
        Names of the arrays, in the order of the initial record.
    dtypes
        NumPy types of the arrays, by name.
    layout
        Positions of the arrays in a vector.
    """

    names: tuple[str, ...]
    dtypes: Mapping[str, np.dtype[np.generic]]
    layout: Layout

    @classmethod
    def of(cls, arrays: ArrayRecord, buffers: Sequence[str] = BUFFERS) -> ArrayModel:
        """Return the model of an array record.

        Parameters
        ----------
        arrays
            The initial arrays of a strategy.
        buffers
            Patterns over the names of floating-point arrays that are running statistics, see
            :func:`fedclade.core.matching`. A pattern may match no name.

        Raises
        ------
        ModelError
            If an array does not contain real numbers, or there are no parameters.
        """
        values = {name: _to_native(array.numpy()) for name, array in arrays.items()}
        for name, value in values.items():
            if value.dtype.kind not in "fiub" or value.dtype.itemsize > 8:
                raise ModelError(
                    f"the initial array {name!r} has the type {value.dtype}, expected real numbers "
                    "of at most 64 bits or truth values; leave the array out, or convert it"
                )
        statistics = {name for pattern in buffers for name in fitting(pattern, values)}
        parameters = [n for n, v in values.items() if v.dtype.kind == "f" and n not in statistics]
        if not sum(values[name].size for name in parameters):
            raise ModelError(
                "the initial arrays should have at least one array of floating-point numbers that "
                f"is trained, got {_describe(values)}; pass the parameters of the model as "
                "initial_arrays"
            )
        dtype = torch.float64 if any(map(_needs_float64, values.values())) else torch.float32
        of_parameters, end = _place(parameters, values, 0)
        of_buffers, _ = _place([n for n in values if n not in parameters], values, end)
        layout = Layout(of_parameters, of_buffers, dtype)
        return cls(tuple(values), {n: v.dtype for n, v in values.items()}, layout)

    def flatten(self, values: Mapping[str, Numbers]) -> Tensor:
        """Return the vector ``[S]`` of arrays, which have this model's names and shapes."""
        vector = torch.empty(self.layout.size, dtype=self.layout.dtype)
        for slot in (*self.layout.parameters, *self.layout.buffers):
            numbers = torch.from_numpy(np.array(values[slot.name]))
            vector[slot.start : slot.stop] = numbers.reshape(-1).to(vector.dtype)
        return vector

    def record(self, vector: Tensor) -> ArrayRecord:
        """Return the array record of a vector ``[S]``, with the names, order and types of before."""
        tensors = self.layout.unflatten(vector.cpu())
        arrays = {n: Array(tensors[n].numpy().astype(self.dtypes[n])) for n in self.names}
        return ArrayRecord(arrays)

    def read(self, arrays: ArrayRecord) -> Tensor:
        """Return the vector ``[S]`` of a client's arrays, after checks.

        Floating-point numbers of another precision are converted. The order of arrays is free.

        Raises
        ------
        UpdateError
            If an array is missing, unknown, or has another shape or kind of numbers, or is not
            finite. The message names the first such array.
        """
        return self.flatten(self.checked(arrays))

    def checked(self, arrays: ArrayRecord) -> dict[str, Numbers]:
        """Check a client's arrays against this model, and return them by name; see :meth:`read`."""
        missing = [name for name in self.names if name not in arrays]
        if missing:
            raise UpdateError(
                f"the array {missing[0]!r} is missing in the reply, which has "
                f"{list(arrays)[:8]}; return all arrays that the client received"
            )
        unknown = [name for name in arrays if name not in self.dtypes]
        if unknown:
            raise UpdateError(
                f"the reply has an array {unknown[0]!r} that the client did not receive; return "
                f"the arrays {list(self.names)[:8]}, under their names"
            )
        shapes = {slot.name: slot.shape for slot in (*self.layout.parameters, *self.layout.buffers)}
        values: dict[str, Numbers] = {}
        for name in self.names:
            if tuple(arrays[name].shape) != shapes[name]:
                raise UpdateError(
                    f"the array {name!r} has the shape {tuple(arrays[name].shape)}, expected "
                    f"{shapes[name]}; build the same model on server and clients"
                )
            # The shape above is only a statement of the client, and reading the numbers may fail.
            with untrusted():
                value = _to_native(cast("Numbers", arrays[name].numpy()))
            if value.shape != shapes[name]:
                raise UpdateError(
                    f"the array {name!r} has numbers of the shape {value.shape}, expected "
                    f"{shapes[name]}; build the same model on server and clients"
                )
            _check_values(name, value, self.dtypes[name])
            values[name] = value
        return values

    def redrawn(self, vector: Tensor, seed: int, number: int) -> Tensor:
        """Return another initial model: the entries of each parameter in random order.

        For parameters whose entries were drawn independently from one distribution, the result is
        another draw. An array of equal entries, such as zeros, does not change.

        Parameters
        ----------
        vector
            An initial model ``[S]``.
        seed
            Seed of the run.
        number
            Number of the further model, from 1.
        """
        draw = rng.generator(seed, "initial model", number)
        drawn = vector.clone()
        for slot in self.layout.parameters:
            order = torch.from_numpy(draw.permutation(slot.stop - slot.start))
            drawn[slot.start : slot.stop] = vector[slot.start : slot.stop][order]
        return drawn


def _place(
    names: Sequence[str], values: Mapping[str, Numbers], start: int
) -> tuple[tuple[Slot, ...], int]:
    """Return slots for arrays one after the other from ``start`` on, and the position after them."""
    slots: list[Slot] = []
    for name in names:
        shape = values[name].shape
        dtype = torch.from_numpy(np.empty(0, dtype=values[name].dtype)).dtype
        slots.append(Slot(name, shape, dtype, start))
        start = slots[-1].stop
    return tuple(slots), start


def _to_native(value: Numbers) -> Numbers:
    """Return an array in the byte order of this machine, since torch reads no other order."""
    return value.astype(value.dtype.newbyteorder("="), copy=False)


def _needs_float64(value: Numbers) -> bool:
    """Return whether the entries of an array need float64 to be represented without loss."""
    if value.dtype.kind == "f":
        return value.dtype.itemsize > 4
    if not value.size or value.dtype.kind == "b":
        return False
    return max(abs(int(value.min())), abs(int(value.max()))) > 2**24


def _describe(values: Mapping[str, Numbers]) -> str:
    """Return names and types of arrays, for a message."""
    if not values:
        return "no arrays"
    return ", ".join(f"{name}: {value.dtype}" for name, value in list(values.items())[:8])


def _check_values(name: str, value: Numbers, expected: np.dtype[np.generic]) -> None:
    """Check that an array of a reply has finite numbers of the expected kind.

    Numbers in place of whole numbers are accepted, since mods that clip updates return such numbers
    for every array.

    Raises
    ------
    UpdateError
        If it does not.
    """
    kinds = "f" if expected.kind == "f" else "fiub"
    if value.dtype.kind not in kinds or value.dtype.itemsize > 8:
        raise UpdateError(
            f"the array {name!r} has the type {value.dtype}, expected {expected}; return arrays of "
            "the type that the client received"
        )
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        raise UpdateError(
            f"the array {name!r} has entries that are NaN or infinite; if training diverged, lower "
            "the step size of the clients"
        )
