"""What passes between the server's process and the actors: objects whose large arrays are not copied to be pickled.

Ray lays arrays of NumPy in its object store so that processes of a machine read them where they lie; tensors it would
copy three times. So a tensor is packed as an array of bytes with its type and shape.
"""

from __future__ import annotations

import io
import pickle
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SMALL = 2**16
"""Bytes below which an array is copied into the message: the object store aligns each that is not."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Packed:
    """An object as a message, and the large arrays that it has."""

    message: bytes
    arrays: tuple[Bytes, ...]


def packed(thing: object, pickler: Any) -> Packed:
    """Return an object packed by a pickler such as Ray's, which also pickles what ``__main__`` defines."""
    arrays: list[Bytes] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= SMALL:
            arrays.append(np.frombuffer(raw, dtype=np.uint8))
        return raw.nbytes < SMALL  # then it goes with the message

    with io.BytesIO() as file:
        _packer(pickler)(file, protocol=5, buffer_callback=is_small).dump(thing)
        return Packed(file.getvalue(), tuple(arrays))


def unpacked(packed: Packed, *, copies: bool = False) -> Any:
    """Return the object; its large arrays lie where those of the message do, and are read-only, unless ``copies``."""
    arrays = [array.copy() for array in packed.arrays] if copies else packed.arrays
    return pickle.loads(packed.message, buffers=arrays)


@cache
def _packer(pickler: Any) -> Any:
    class Packer(pickler):
        def reducer_override(self, obj: Any) -> Any:
            return _reduced(obj) if type(obj) is Tensor else super().reducer_override(obj)

    return Packer


def _reduced(tensor: Tensor) -> Any:
    flat = tensor.detach().cpu().reshape(-1)
    if flat.stride(0) != 1:  # as a single entry may have it
        flat = torch.empty_like(flat, memory_format=torch.contiguous_format).copy_(flat)
    data: Any = flat.view(torch.uint8).numpy() if len(flat) else np.empty(0, np.uint8)
    return _tensor, (pickle.PickleBuffer(data), tensor.dtype, tuple(tensor.shape))


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of memory that cannot be written, and nothing writes to it
        return torch.frombuffer(data, dtype=dtype).view(shape)
