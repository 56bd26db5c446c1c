"""Format of the messages between server and clients, and checks of received messages.

A message has a ``ConfigRecord`` named ``fedclade``, which contains plain values as one map in the
format MessagePack, and an ``ArrayRecord`` named ``vectors`` with arrays of raw little-endian bytes.
Flower converts and checks each value of a record by itself, which takes much longer than to pack
all of them. Over a network, each record is one more request to the SuperLink. Nothing is pickled,
since unpickling data of an untrusted sender could run code. The receiver knows the lengths of all
arrays beforehand, so it allocates no memory for a length that a message claims. Error texts about a
message are short and printable, whatever the message contains.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from reprlib import repr as shown
from typing import Any, TypeVar, cast

import msgpack
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedclade.channel import tensor_from_bytes
from fedclade.core import OWN, Layout, UpdateError, version_of

PROTOCOL = 13  # version of the message format; server and clients must have the same version
# Version of fedclade, which every message states. Versions with the same format work together.
RELEASE = version_of("fedclade")
# Flower's stype of an array that is raw little-endian bytes, in place of NumPy's own format.
RAW = "fedclade.raw"
# Characters of a JSON value; a data spec and a local training take a few hundred.
LONGEST_JSON = 10_000
# Name that stands for the tensors of a model that a message does not describe.
CUT = "..."
# Bytes of a message without its vectors; lists of scores take about ten bytes for each model.
LARGEST_VALUES = 2**20
LONGEST_REASON = 600  # characters of an error text that another party has sent
LONGEST_LOG_LINE = 4000  # characters of a line in a client's log

T = TypeVar("T", str, int, float, bool, bytes)

# Names of the records of a message, and of the values and the proof in the first record.
_PLAIN = "fedclade"
_VALUES = "values"
_PROOF = "proof"
_VECTORS = "vectors"


@dataclass(frozen=True)
class Signer:
    """Signer of a reply, as verified by its signature.

    Parameters
    ----------
    key
        Public key of the client, in hexadecimal.
    lasts
        Whether the client reports that it stores the key in a folder, so that the key is the same
        after a restart.
    """

    key: str
    lasts: bool


@dataclass(frozen=True, eq=False)
class Content:
    """Content of a received message.

    Parameters
    ----------
    values
        Plain values by name.
    vectors
        Raw bytes of vectors by name.
    packed
        The plain values as the message contains them.
    proof
        What the sender of a reply adds to prove who it is, see :mod:`fedclade.flower.signing`;
        empty in a request.
    signer
        Signer of the message; None if no signature was verified.
    owns_vectors
        Whether no other object needs the vectors, so that :meth:`release` may free them.
    """

    values: Mapping[str, Any]
    vectors: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    packed: bytes = b""
    proof: bytes = b""
    signer: Signer | None = None
    owns_vectors: bool = False

    @classmethod
    def of(cls, record: RecordDict) -> Content:
        """Return the content of a Flower record that was received as a message.

        Raises
        ------
        UpdateError
            If the record is not a message of fedclade, or has another version of the format.
        """
        plain = record.get(_PLAIN)
        vectors = record.get(_VECTORS, ArrayRecord())
        if not isinstance(plain, ConfigRecord) or not isinstance(vectors, ArrayRecord):
            raise UpdateError(
                f"a message of fedclade should have the record {_PLAIN!r}, got the records "
                f"{shown(sorted(record))}; run both sides with the apps of fedclade.flower"
            )
        if (theirs := plain.get("protocol")) != PROTOCOL:
            release = plain.get("fedclade", "of an earlier version")
            raise UpdateError(
                f"the sender uses version {shown(theirs)} of the message format, and the receiver "
                f"uses version {PROTOCOL}: the sender's fedclade is {clean(str(release), 40)}, the "
                f"receiver's is {RELEASE}; install the same version of fedclade on server and "
                "clients"
            )
        for name, array in vectors.items():
            if array.stype != RAW:
                raise UpdateError(
                    f"vector {shown(name)} of the message has the type {shown(array.stype)}, "
                    f"expected {RAW!r}"
                )
        packed = typed(dict(plain), _VALUES, bytes)
        proof = typed(dict(plain), _PROOF, bytes) if _PROOF in plain else b""
        arrays = {name: array.data for name, array in vectors.items()}
        return cls(unpack(packed), arrays, packed, proof)

    def taken_from(self, record: RecordDict) -> Content:
        """Return the content as the only owner of its vectors, which are removed from their record.

        The caller of a ClientApp refers to the message until the app has replied, so vectors in the
        record would take memory until then.

        Parameters
        ----------
        record
            The record of which this is the content.
        """
        record.pop(_VECTORS, None)
        return replace(self, owns_vectors=True)

    def release(self) -> None:
        """Remove all vectors if no other object needs them, so that their memory is freed."""
        if self.owns_vectors and isinstance(self.vectors, dict):
            self.vectors.clear()

    def get(self, name: str, kind: type[T]) -> T:
        """Return a plain value; raise an UpdateError if it is missing or not of type ``kind``."""
        return typed(self.values, name, kind)

    def json(self, name: str, longest: int = LONGEST_JSON) -> dict[str, Any]:
        """Return a value that is a JSON object in text form, of at most ``longest`` characters.

        Raises
        ------
        UpdateError
            If the value is missing, too long, or not a JSON object.
        """
        text = self.get(name, str)
        if len(text) > longest:
            raise UpdateError(
                f"{name!r} in the message has {len(text)} characters, expected at most {longest}"
            )
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UpdateError(f"{name!r} in the message is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise UpdateError(
                f"{name!r} in the message should be a JSON object, got {shown(found)}"
            )
        return found

    def has_only(self, names: Collection[str]) -> None:
        """Raise an UpdateError if the message contains a vector whose name is not in ``names``."""
        if more := sorted(set(self.vectors).difference(names)):
            raise UpdateError(f"the message contains {len(more)} unexpected vectors: {shown(more)}")

    def vector(self, name: str) -> bytes:
        """Return the bytes of a vector; raise an UpdateError if it is missing."""
        if name not in self.vectors:
            raise UpdateError(
                f"the message has no vector {name!r}, only {shown(sorted(self.vectors))}"
            )
        return self.vectors[name]

    @property
    def size(self) -> int:
        """Total number of bytes of the vectors."""
        return sum(map(len, self.vectors.values()))


def typed(values: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """Return the value ``name`` of a message; raise an UpdateError if not of type ``kind``."""
    value = values.get(name)
    if type(value) is not kind:  # for isinstance, True is an int
        raise UpdateError(
            f"a value that was received or stored is malformed: {name!r} should be of type "
            f"{kind.__name__}, got {shown(value)}"
        )
    return cast(T, value)


def record(values: Mapping[str, Any], vectors: Mapping[str, Array] | None = None) -> RecordDict:
    """Return a message as a Flower record, from plain values and vectors by name."""
    versions = {"protocol": PROTOCOL, "fedclade": RELEASE}
    content = RecordDict({_PLAIN: ConfigRecord({**versions, _VALUES: pack(values)})})
    if vectors:
        # Flower stores the hash of an array with the array, so the arrays of a model are hashed
        # once for all messages that contain them. The constructor of a record would copy them.
        content[_VECTORS] = arrays = ArrayRecord()
        for name, array in vectors.items():
            arrays[name] = array
    return content


def with_proof(content: RecordDict, proof: bytes) -> RecordDict:
    """Return a reply with a proof of who has sent it; ``content`` is not changed."""
    plain = content[_PLAIN]
    assert isinstance(plain, ConfigRecord)  # made by record
    return RecordDict({**content, _PLAIN: ConfigRecord({**plain, _PROOF: proof})})


def pack(values: Mapping[str, Any]) -> bytes:
    """Return plain values by name in the format MessagePack, in the order of their names.

    A value is a text, a number, a truth value, bytes, or a list of these.
    """
    packed = msgpack.packb(dict(sorted(values.items())))
    return cast(bytes, packed)  # None only if a packer collects several values


def unpack(packed: bytes) -> dict[str, Any]:
    """Return the plain values in a received message: the inverse of :func:`pack`.

    Raises
    ------
    UpdateError
        If the bytes are not a map in the format MessagePack whose keys are texts.
    """
    try:
        found = msgpack.unpackb(packed)
    except (ValueError, msgpack.UnpackException) as error:
        raise UpdateError(
            f"the values of the message are not in the format MessagePack: {clean(str(error))}"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise UpdateError(
            f"the values of the message should be a map from names to values, got {shown(found)}"
        )
    return cast("dict[str, Any]", found)


@contextmanager
def untrusted() -> Generator[None]:
    """Return a context that turns every error in reading a received message into an UpdateError."""
    try:
        yield
    except UpdateError:
        raise
    except Exception as error:
        # Every kind of error is caught, since one client's message must not end the whole run.
        raise UpdateError(
            f"the message cannot be read: {type(error).__name__}: {clean(str(error))}"
        ) from error


def refusal(why: str) -> RecordDict:
    """Return the message by which a client refuses a request for the reason ``why``."""
    return record({"refused": why})


def clean(text: str, longest: int = LONGEST_REASON) -> str:
    """Return a text from an untrusted sender in a form that is safe for tables and logs.

    The text is cut to ``longest`` characters, and control characters are replaced by spaces.
    """
    kept = text if len(text) <= longest else f"{text[: longest - 1]}…"
    return "".join(letter if letter.isprintable() else " " for letter in kept)


def raw(data: bytes, kind: str, entries: int) -> Array:
    """Return bytes as a Flower array of ``entries`` numbers of the type ``kind``."""
    return Array(kind, (entries,), RAW, data)


def raw_vector(vector: Tensor) -> Array:
    """Return a float32 or float64 tensor ``[n]`` as a Flower array, without loss of precision."""
    array = vector.detach().cpu().numpy()
    return raw(
        array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes(),
        array.dtype.name,
        len(array),
    )


def raw_vectors(models: Tensor, rows: Iterable[int]) -> dict[int, Array]:
    """Return the models in some rows of ``models`` as Flower arrays, by row.

    Each row is encoded once, and the row ``OWN``, which stands for a model that a client stores, is
    skipped.
    """
    return {row: raw_vector(models[row]) for row in dict.fromkeys(rows) if row != OWN}


def read_vector(
    data: bytes, shape: tuple[int, ...], dtype: torch.dtype, name: str, *, copies: bool = True
) -> Tensor:
    """Return a received vector as a tensor.

    Parameters
    ----------
    data
        Raw little-endian bytes.
    shape
        Expected shape.
    dtype
        Expected type of the entries.
    name
        Description of the vector, for the error.
    copies
        Whether the tensor has memory of its own. If not, it has the memory of ``data`` where that
        is possible, and must not be changed.

    Raises
    ------
    UpdateError
        If the number of bytes does not fit the shape and the type.
    """
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise UpdateError(
            f"{name} has {len(data)} bytes, expected {expected} for shape {shape} of {dtype}"
        )
    return tensor_from_bytes(data, dtype, copies=copies).view(shape)


def digest(data: bytes) -> str:
    """Return a BLAKE2b digest of 16 bytes in hexadecimal, such as the name of a sent model."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def layout_digest(layout: Layout) -> str:
    """Return a short digest of a model's structure, by which server and clients compare models.

    The digest depends on the names, shapes and types of the model's tensors, and on its frozen
    values.
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


def layout_arrays(layout: Layout) -> str:
    """Return names, shapes and types of a model's tensors as JSON, for the registration of a client.

    By them, the server names the first difference between two models. The text has as many tensors
    as fit into :data:`LONGEST_JSON` characters, and the entry :data:`CUT` if there are more.
    """
    arrays: dict[str, str] = {}
    left = LONGEST_JSON - 2 - len(json.dumps({CUT: ""}))
    for slot in (*layout.parameters, *layout.buffers):
        described = f"{list(slot.shape)} {str(slot.dtype).removeprefix('torch.')}"
        left -= len(json.dumps({slot.name: described}))
        if left < 0:
            arrays[CUT] = ""
            break
        arrays[slot.name] = described
    return json.dumps(arrays)


def first_difference(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Return the first difference between the tensors of two models, as a text for messages.

    The tensors are compared in their order, since later tensors may be unknown on one side only:
    each side describes as many as fit into a message. The text is empty if the known tensors are
    equal.
    """
    for mine, other in zip_longest(ours.items(), theirs.items()):
        if mine == other:
            continue
        if CUT in ((mine or ("",))[0], (other or ("",))[0]):
            return ""
        if other is None or (mine is not None and other[0] in ours and mine[0] not in theirs):
            assert mine is not None  # the longer one of the two has an entry
            return f"{mine[0]!r} is missing, which is {mine[1]} in the others"
        if mine is None or (mine[0] in theirs and other[0] not in ours):
            return f"{other[0]!r} is unknown to the others"
        if mine[0] == other[0]:
            return f"{mine[0]!r} is {other[1]}, and {mine[1]} in the others"
        return f"{other[0]!r} is in the place of {mine[0]!r} of the others"
    return ""


def _digest_of(tensor: Tensor) -> str:
    """Return a digest of the entries of a tensor."""
    return digest(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def to_json(value: Any) -> str:
    """Return a dataclass as the text of a JSON object."""
    return json.dumps(asdict(value))
