"""Messages between server and clients, each checked by its receiver. No pickle anywhere.

A message has a ``ConfigRecord`` named ``fedclade`` with plain values, and an ``ArrayRecord`` named
``vectors`` with arrays that are raw little-endian bytes. The receiver knows their lengths
beforehand, so no memory is allocated because of a length that a message claims. The report on a
refused message is short and printable, regardless of the message.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from reprlib import repr as shown
from typing import Any, TypeVar, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedclade.core import OWN, Layout, UpdateError

PROTOCOL = 10  # version of these messages; both sides must use the same
# Flower's stype of an array that is raw little-endian bytes, in place of NumPy's own format.
RAW = "fedclade.raw"
# Characters of a JSON value; a data spec and a local training take a few hundred.
LONGEST_JSON = 10_000
# Bytes of a message without its vectors; lists of scores take about ten bytes for each model.
LARGEST_VALUES = 2**20
LONGEST_REASON = 300  # characters of a reason from the other side
LONGEST_LOG_LINE = 4000  # characters of a line in a client's log

T = TypeVar("T", str, int, float, bool, bytes)

_VALUES = "fedclade"
_VECTORS = "vectors"


@dataclass(frozen=True)
class Signer:
    """Signer of a reply.

    Parameters
    ----------
    key
        Public key of the client, in hexadecimal.
    lasts
        Whether the client reports that it stores the key in a folder.
    """

    key: str
    lasts: bool


@dataclass(frozen=True, eq=False)
class Content:
    """Content of a message.

    Parameters
    ----------
    values
        Plain values by name.
    vectors
        Bytes of vectors by name.
    signer
        Signer of the message, once the signature is verified.
    """

    values: Mapping[str, Any]
    vectors: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    signer: Signer | None = None

    @classmethod
    def of(cls, record: RecordDict) -> Content:
        """Read a message.

        Raises
        ------
        UpdateError
            If it is not a message of fedclade, or is of another version of the protocol.
        """
        values = record.get(_VALUES)
        vectors = record.get(_VECTORS, ArrayRecord())
        if not isinstance(values, ConfigRecord) or not isinstance(vectors, ArrayRecord):
            raise UpdateError(
                f"a message of fedclade has the record {_VALUES!r}, this one has "
                f"{shown(sorted(record))}"
            )
        if (theirs := values.get("protocol")) != PROTOCOL:
            raise UpdateError(
                f"version {shown(theirs)} of the protocol is spoken there, and {PROTOCOL} here; "
                "install the same version of fedclade on both sides"
            )
        for name, array in vectors.items():
            if array.stype != RAW:
                raise UpdateError(
                    f"array {shown(name)} is of type {shown(array.stype)}, expected {RAW!r}"
                )
        return cls(dict(values), {name: array.data for name, array in vectors.items()})

    def get(self, name: str, kind: type[T]) -> T:
        """Return a value; raise an UpdateError if it is missing or of another type."""
        return typed(self.values, name, kind)

    def json(self, name: str, longest: int = LONGEST_JSON) -> dict[str, Any]:
        """Return a value that must be a JSON object of at most ``longest`` characters."""
        text = self.get(name, str)
        if len(text) > longest:
            raise UpdateError(f"{name!r} has {len(text)} characters, more than {longest}")
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UpdateError(f"{name!r} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise UpdateError(f"{name!r} should be a JSON object, got {shown(found)}")
        return found

    def has_only(self, names: Collection[str]) -> None:
        """Check that the message has no vectors except those with these names."""
        if more := sorted(set(self.vectors).difference(names)):
            raise UpdateError(f"{len(more)} vectors that nobody asked for: {shown(more)}")

    def vector(self, name: str) -> bytes:
        """Return the bytes of a vector; raise an UpdateError if it is missing."""
        if name not in self.vectors:
            raise UpdateError(f"there is no vector {name!r}, only {shown(sorted(self.vectors))}")
        return self.vectors[name]

    @property
    def size(self) -> int:
        """Number of bytes of the vectors."""
        return sum(map(len, self.vectors.values()))


def typed(values: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """Return the value of a name; raise an UpdateError if it is missing or of another type."""
    value = values.get(name)
    if type(value) is not kind:  # for isinstance, True is an int
        raise UpdateError(f"{name!r} should be of type {kind.__name__}, got {shown(value)}")
    return cast(T, value)


def record(values: Mapping[str, Any], vectors: Mapping[str, Array] | None = None) -> RecordDict:
    """Return a message of plain values and vectors."""
    content = RecordDict({_VALUES: ConfigRecord({"protocol": PROTOCOL, **values})})
    if vectors:
        content[_VECTORS] = ArrayRecord(dict(vectors))
    return content


@contextmanager
def untrusted() -> Generator[None]:
    """Turn every error in reading a message of the other side into an :class:`UpdateError`."""
    try:
        yield
    except UpdateError:
        raise
    except Exception as error:
        # Every kind of error is caught: one client's message must not end the run of the others.
        raise UpdateError(f"cannot be read: {type(error).__name__}: {clean(str(error))}") from error


def refusal(why: str) -> RecordDict:
    """Return the reply of a client that refuses a request, with the reason."""
    return record({"refused": why})


def clean(text: str, longest: int = LONGEST_REASON) -> str:
    """Return a text from the other side in a form for tables and logs.

    It is cut to ``longest`` characters, and has no control characters.
    """
    kept = text if len(text) <= longest else f"{text[: longest - 1]}…"
    return "".join(letter if letter.isprintable() else " " for letter in kept)


def raw(data: bytes, kind: str, entries: int) -> Array:
    """Return bytes as one of Flower's arrays."""
    return Array(kind, (entries,), RAW, data)


def raw_vector(vector: Tensor) -> Array:
    """Return a vector of float32 or float64 as one of Flower's arrays, unchanged."""
    array = vector.detach().cpu().numpy()
    return raw(
        array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes(),
        array.dtype.name,
        len(array),
    )


def raw_vectors(models: Tensor, rows: Iterable[int]) -> dict[int, Array]:
    """Return the models of these rows as arrays, without repetition; skip clients' own models."""
    return {row: raw_vector(models[row]) for row in dict.fromkeys(rows) if row != OWN}


def read_vector(data: bytes, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Tensor:
    """Return a tensor of a given shape from the bytes of a vector.

    Raises
    ------
    UpdateError
        If the number of bytes does not fit the shape.
    """
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise UpdateError(
            f"{name} of {len(data)} bytes, expected {expected} for shape {shape} of {dtype}"
        )
    little = torch.empty((), dtype=dtype).numpy().dtype.newbyteorder("<")
    return torch.from_numpy(np.frombuffer(data, little).astype(little.newbyteorder("="))).view(
        shape
    )


def digest(data: bytes) -> str:
    """Return a short digest of some bytes, such as of the model that a client trained from."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def layout_digest(layout: Layout) -> str:
    """Return a short digest of a model's structure.

    It depends on the names, shapes and types of the model's tensors, and on its frozen values.
    """
    slots, personal = (
        [[s.name, list(s.shape), str(s.dtype)] for s in part]
        for part in ((*layout.parameters, *layout.buffers), layout.personal)
    )
    frozen = [
        [name, list(p.shape), str(p.dtype), _digest_of(p)] for name, p in layout.frozen.items()
    ]
    return digest(
        json.dumps([slots, layout.n_parameters, str(layout.dtype), personal, *frozen]).encode()
    )


def _digest_of(tensor: Tensor) -> str:
    return digest(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def to_json(value: Any) -> str:
    """Return a dataclass as the text of a JSON object."""
    return json.dumps(asdict(value))
