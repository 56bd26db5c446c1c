"""A corpus: texts with labels and owners, and the way from there to a pool of token sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedclade.core import TaskKind, require
from fedclade.data.cache import Arrays, cached
from fedclade.data.pool import Pool
from fedclade.data.words import SPECIALS, build_vocabulary, encode, next_words, pad


@dataclass(frozen=True)
class Corpus:
    """Texts, and what is known of each; the lists run in parallel."""

    texts: list[list[str]]  # the words of each
    labels: NDArray[np.int64]  # topic or sentiment of each; 0 where there is none
    train: int  # how many of them, from the first on, are for training
    owners: list[str] | None = None  # of each, where they are known


def join(parts: list[Corpus]) -> Corpus:
    """Return training and test texts as one corpus."""
    texts = [text for part in parts for text in part.texts]
    owners = [owner for part in parts for owner in part.owners or []]
    return Corpus(texts, np.concatenate([part.labels for part in parts]), len(parts[0].texts), owners or None)


def pool_from_corpus(
    name: str,
    key: object,
    read: Callable[[], Corpus],
    task: TaskKind,
    sequence_length: int,
    vocabulary_size: int,
    labels: int = 1,
) -> Pool:
    """Read a corpus and turn it into tokens, or take that from the cache."""
    require(
        ("sequence_length", sequence_length, sequence_length >= 1, "at least 1"),
        ("vocabulary_size", vocabulary_size, vocabulary_size > len(SPECIALS), f"above {len(SPECIALS)}"),
    )
    options = [task, sequence_length, vocabulary_size]
    key = {"source": key, "options": options}
    arrays = cached(name, key, lambda: _arrays(read(), task, sequence_length, vocabulary_size))
    vocabulary = tuple(arrays["vocabulary"].tolist())
    more = {"task": task, "natural": arrays.get("owners"), "vocabulary": vocabulary}
    return Pool.of_arrays(name, arrays, arrays["labels"], len(vocabulary) if task == "language" else labels, **more)


def _arrays(corpus: Corpus, task: TaskKind, sequence_length: int, vocabulary_size: int) -> Arrays:
    """Turn texts into tokens; the vocabulary is that of the training texts."""
    vocabulary = build_vocabulary(corpus.texts[: corpus.train], vocabulary_size)
    tokens = encode(corpus.texts, vocabulary)
    arrays: dict[str, NDArray[Any]] = {
        "labels": corpus.labels,
        "train": np.asarray(corpus.train),
        "vocabulary": np.asarray(vocabulary, dtype=np.str_),
    }
    if corpus.owners is not None:
        arrays["owners"] = np.asarray(corpus.owners, dtype=np.str_)
    if task == "language":
        arrays["x"], arrays["y"] = next_words(tokens, sequence_length)
    else:
        arrays["x"], arrays["y"] = pad(tokens, sequence_length), corpus.labels
    return arrays
