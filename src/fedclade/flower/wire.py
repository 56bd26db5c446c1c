"""What travels between server and clients: questions and answers, each checked where it arrives. No pickle anywhere.

A message holds a ``ConfigRecord`` named ``fedclade``, of plain values, and an ``ArrayRecord`` named ``vectors``, whose
arrays are raw little-endian bytes. How long they must be is known to the receiver beforehand, so that nothing is
allocated by what a message claims. What is told of a message that is refused is short and printable, whatever it held.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from reprlib import repr as shown
from typing import Any, TypeVar, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedclade.channel import (
    ENCODINGS,
    decode,
)
from fedclade.core import Layout, UpdateError

PROTOCOL = 3
"""Of these messages; both sides must speak the same."""

RAW = "fedclade.raw"
"""Flower's ``stype`` of an array that is raw little-endian bytes, in place of NumPy's own format."""

LONGEST_JSON = 10_000
"""Characters of a value that is JSON; a schema and a local training take a few hundred."""

LARGEST_WORDS = 2**20
"""Bytes of all that a message says besides its vectors; lists of scores take some ten for each model."""

LONGEST_REASON = 300
"""Characters of what somebody else gives as a reason."""

MOST_EXAMPLES = 2**53
"""That a client may say it has: beyond it float64, in which updates are weighted, cannot count."""

LARGEST_LOSS = 1e18
"""That a client may say it has: sums of larger ones could overflow."""

Scores = tuple[float, float, int]
"""Accuracy, loss, examples."""

T = TypeVar("T", str, int, float, bool)

_WORDS, _VECTORS = "fedclade", "vectors"


@dataclass(frozen=True)
class Words:
    """The plain values of a message.

    Parameters
    ----------
    values
        By name.
    """

    values: Mapping[str, Any]

    def get(self, name: str, kind: type[T]) -> T:
        """Return a value, which must be there and of a kind.

        Raises
        ------
        UpdateError
            If it is not.
        """
        value = self.values.get(name)
        if type(value) is not kind:  # True is an int, to isinstance
            raise UpdateError(f"{name!r} should be of type {kind.__name__}, got {shown(value)}")
        return cast(T, value)

    def json(self, name: str) -> dict[str, Any]:
        """Return a value that is a JSON object.

        Raises
        ------
        UpdateError
            If it is none.
        """
        text = self.get(name, str)
        if len(text) > LONGEST_JSON:
            raise UpdateError(f"{name!r} has {len(text)} characters, more than {LONGEST_JSON}")
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UpdateError(f"{name!r} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise UpdateError(f"{name!r} should be a JSON object, got {shown(found)}")
        return found


@dataclass(frozen=True)
class Signer:
    """Who signed an answer.

    Parameters
    ----------
    key
        The public key, in hexadecimal.
    lasts
        Whether the client keeps it in its folder, by its own account.
    """

    key: str
    lasts: bool


@dataclass(frozen=True, eq=False)
class Content:
    """What a message says.

    Parameters
    ----------
    words
        Plain values.
    vectors
        Bytes by name.
    signer
        Whose signature an answer has, once that is checked.
    """

    words: Words
    vectors: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    signer: Signer | None = None

    @classmethod
    def of(cls, record: RecordDict) -> Content:
        """Read a message.

        Raises
        ------
        UpdateError
            If it is none of fedclade's, speaks another version of the protocol, or holds arrays of another kind.
        """
        words, vectors = record.get(_WORDS), record.get(_VECTORS, ArrayRecord())
        if not isinstance(words, ConfigRecord) or not isinstance(vectors, ArrayRecord):
            raise UpdateError(f"a message of fedclade has the record {_WORDS!r}, this one has {shown(sorted(record))}")
        if (theirs := words.get("protocol")) != PROTOCOL:
            raise UpdateError(
                f"version {shown(theirs)} of the protocol is spoken there, and {PROTOCOL} here; install the same "
                "version of fedclade on both sides"
            )
        for name, array in vectors.items():
            if array.stype != RAW:
                raise UpdateError(f"array {shown(name)} is of type {shown(array.stype)}, expected {RAW!r}")
        return cls(Words(dict(words)), {name: array.data for name, array in vectors.items()})

    def has_only(self, names: Collection[str]) -> None:
        """Check that there are vectors of these names and no others.

        Raises
        ------
        UpdateError
            If there are others.
        """
        if more := sorted(set(self.vectors).difference(names)):
            raise UpdateError(f"{len(more)} vectors that nobody asked for: {shown(more)}")

    def vector(self, name: str) -> bytes:
        """Return the bytes of a vector.

        Raises
        ------
        UpdateError
            If it is not there.
        """
        if name not in self.vectors:
            raise UpdateError(f"there is no vector {name!r}, only {shown(sorted(self.vectors))}")
        return self.vectors[name]

    @property
    def size(self) -> int:
        """How many bytes the vectors take."""
        return sum(map(len, self.vectors.values()))


def record(values: Mapping[str, Any], vectors: Mapping[str, Array] | None = None) -> RecordDict:
    """Return what a message of plain values and vectors holds."""
    content = RecordDict({_WORDS: ConfigRecord({"protocol": PROTOCOL, **values})})
    if vectors:
        content[_VECTORS] = ArrayRecord(dict(vectors))
    return content


@contextmanager
def distrusting() -> Generator[None]:
    """Read what somebody else sent: whatever reading it trips over becomes an :class:`UpdateError`."""
    try:
        yield
    except UpdateError:
        raise
    except Exception as error:  # of whatever kind: one client's message must not end the run of the others
        raise UpdateError(f"cannot be read: {type(error).__name__}: {clean(str(error))}") from error


def refusal(why: str) -> RecordDict:
    """Return the answer of a client that does not answer, and says why."""
    return record({"refused": why})


def clean(text: str, longest: int = LONGEST_REASON) -> str:
    """Return a text that somebody else wrote as one for tables and logs: cut short, without control characters."""
    kept = text if len(text) <= longest else f"{text[: longest - 1]}…"
    return "".join(letter if letter.isprintable() else " " for letter in kept)


def raw(data: bytes, kind: str, entries: int) -> Array:
    """Return bytes as an array of Flower's."""
    return Array(kind, (entries,), RAW, data)


def raw_vector(vector: Tensor) -> Array:
    """Return a vector as it is, of float32 or float64."""
    array = vector.detach().cpu().numpy()
    return raw(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes(), array.dtype.name, len(array))


def read_vector(data: bytes, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Tensor:
    """Return a vector, or several in a row, of known shape.

    Raises
    ------
    UpdateError
        If the bytes are more or fewer.
    """
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise UpdateError(f"{name} of {len(data)} bytes, expected {expected} for shape {shape} of {dtype}")
    little = torch.empty((), dtype=dtype).numpy().dtype.newbyteorder("<")
    return torch.from_numpy(np.frombuffer(data, little).astype(little.newbyteorder("="))).view(shape)


def digest(data: bytes) -> str:
    """Return a short name of some bytes, by which a client says which model it trained from."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def layout_digest(layout: Layout) -> str:
    """Return a short name of a model's structure: the names, shapes and types of its tensors, and its frozen values."""
    slots = [[s.name, list(s.shape), str(s.dtype)] for s in (*layout.parameters, *layout.buffers)]
    frozen = [[name, list(p.shape), str(p.dtype), _digest_of(p)] for name, p in layout.frozen.items()]
    return digest(json.dumps([slots, layout.n_parameters, str(layout.dtype), *frozen]).encode())


def _digest_of(tensor: Tensor) -> str:
    return digest(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def to_json(value: Any) -> str:
    """Return a dataclass as a JSON object."""
    return json.dumps(asdict(value))


@dataclass(frozen=True, eq=False)
class Answer:
    """A client's update, as it came and was found to be one.

    Parameters
    ----------
    size
        Training examples |D_i|.
    loss
        Mean training loss; None if the client keeps it to itself.
    update
        Δθ_i, ``[S]``, or signatures of several.
    """

    size: int
    loss: float | None
    update: Tensor


def examples(words: Words, name: str) -> int:
    """Return a number of examples.

    Raises
    ------
    UpdateError
        If there are none, or too many to be counted.
    """
    count = words.get(name, int)
    if not 1 <= count <= MOST_EXAMPLES:
        raise UpdateError(f"{name} of {count} examples, expected 1 to 2**53")
    return count


def read_answer(
    content: Content, length: int, n_parameters: int, dtype: torch.dtype, size: int, expected: Mapping[str, Any]
) -> Answer:
    """Check and read the answer to a question for an update.

    Parameters
    ----------
    content
        The message.
    length, n_parameters
        Of the update: its entries, and how many of them are compared.
    dtype
        Of the model.
    size
        Training examples that the client said it has when it joined.
    expected
        What the answer must repeat of the question: the round, the query, the model.

    Raises
    ------
    UpdateError
        If it is the answer to another question, from another model, of a wrong size, or malformed.
    """
    words = content.words
    for name, asked in expected.items():
        if (got := words.get(name, type(asked))) != asked:
            raise UpdateError(f"answer of {name} {shown(got)}, expected {asked!r}")
    encoding = words.get("encoding", str)
    if encoding not in ENCODINGS:
        raise UpdateError(f"update in the unknown encoding {shown(encoding)}")
    if (told := examples(words, "size")) != size:
        raise UpdateError(f"update from {told} training examples, but the client joined with {size}")
    loss = words.get("loss", float) if "loss" in words.values else None
    if loss is not None and not 0 <= loss <= LARGEST_LOSS:
        raise UpdateError(f"loss {loss:g}, expected 0 to {LARGEST_LOSS:g}")
    content.has_only(("update",))
    return Answer(size, loss, decode(content.vector("update"), length, encoding, n_parameters).to(dtype))


def read_scores(content: Content, models: int, known: int | None = None) -> list[Scores]:
    """Check and read the answer to a question for the scores of so many models.

    Parameters
    ----------
    content
        The message.
    models
        How many were sent.
    known
        How many examples the client has in that split, where it is known; they are the same for all models.

    Raises
    ------
    UpdateError
        If there are more or fewer, or some cannot be.
    """
    content.has_only(())
    values = content.words.values
    columns = [values.get(name) for name in ("accuracies", "losses", "examples")]
    kinds = (float, float, int)
    for column, kind in zip(columns, kinds, strict=True):
        if not isinstance(column, list) or len(column) != models or not all(type(value) is kind for value in column):
            raise UpdateError(f"expected {models} accuracies, losses and numbers of examples, got {shown(columns)}")
    scores: list[Scores] = list(zip(*columns, strict=True))  # pyright: ignore[reportArgumentType]  (they are lists)
    for accuracy, loss, count in scores:
        if not (0 <= accuracy <= 1 and 0 <= loss <= LARGEST_LOSS and 1 <= count <= MOST_EXAMPLES):
            raise UpdateError(
                f"accuracy {accuracy:g} and loss {loss:g} of {count} examples, expected an accuracy in [0, 1] and a "
                f"loss of at most {LARGEST_LOSS:g} of at least 1 example"
            )
    counts = {count for *_, count in scores}
    if len(counts) > 1 or not counts <= {known or min(counts)}:
        raise UpdateError(f"scores of {shown(sorted(counts))} examples, expected {known or 'one number of them'}")
    return scores
