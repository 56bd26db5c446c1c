"""Answers to queries, checked as they are read: a client that sends something else is left out of the round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedclade.channel import ENCODINGS, decode
from fedclade.core import UpdateError
from fedclade.flower.wire import Content, shown

MOST_EXAMPLES = 2**53  # that a client may say it has: beyond it float64, in which updates are weighted, cannot count
LARGEST_LOSS = 1e18  # that a client may report: sums of larger ones could overflow
Scores = tuple[float, float, int]  # accuracy, loss, examples


@dataclass(frozen=True, eq=False)
class UpdateReply:
    """A client's training examples |D_i|, mean training loss (None if it withholds it), and Δθ_i or signatures."""

    size: int
    loss: float | None
    update: Tensor


def examples(content: Content, name: str) -> int:
    """Return a number of examples, which must be possible."""
    count = content.get(name, int)
    if not 1 <= count <= MOST_EXAMPLES:
        raise UpdateError(f"{name} of {count} examples, expected 1 to 2**53")
    return count


def read_update(
    content: Content, length: int, n_parameters: int, dtype: torch.dtype, size: int, expected: Mapping[str, Any]
) -> UpdateReply:
    """Check and read an update of ``length`` entries, from ``size`` training examples; else it is an UpdateError.

    ``expected`` is what the answer must repeat of the query: the round, the number of the query, the model.
    """
    for name, sent in expected.items():
        if (got := content.get(name, type(sent))) != sent:
            raise UpdateError(f"answer of {name} {shown(got)}, expected {sent!r}")
    encoding = content.get("encoding", str)
    if encoding not in ENCODINGS:
        raise UpdateError(f"update in the unknown encoding {shown(encoding)}")
    if (reported := examples(content, "size")) != size:
        raise UpdateError(f"update from {reported} training examples, but the client joined with {size}")
    loss = content.get("loss", float) if "loss" in content.values else None
    if loss is not None and not 0 <= loss <= LARGEST_LOSS:
        raise UpdateError(f"loss {loss:g}, expected 0 to {LARGEST_LOSS:g}")
    content.has_only(("update",))
    return UpdateReply(size, loss, decode(content.vector("update"), length, encoding, n_parameters).to(dtype))


def read_scores(content: Content, models: int, known: int | None = None) -> list[Scores]:
    """Check and read the scores of so many models; anything else is an UpdateError.

    ``known`` is the number of the client's examples in that split, where it is known; it is the same for all models.
    """
    content.has_only(())
    columns = [content.values.get(name) for name in ("accuracies", "losses", "examples")]
    for column, kind in zip(columns, (float, float, int), strict=True):
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
