"""Text to numbers: words, vocabularies, and token sequences of one length."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fedclade.core import IGNORED

T = TypeVar("T")
Tokens = NDArray[np.int64]

PAD, UNKNOWN = 0, 1
SPECIALS = ("<pad>", "<unk>")

_WORD = re.compile(r"\w+(?:'\w+)*|[^\w\s]")


def split_words(text: str) -> list[str]:
    """Split a text into lower-case words and single punctuation marks.

    >>> split_words("We know't, we KNOW!")
    ['we', "know't", ',', 'we', 'know', '!']
    """
    return [sys.intern(word) for word in _WORD.findall(text.lower())]  # a million tweets share their words' memory


def build_vocabulary(texts: Iterable[Sequence[str]], size: int) -> tuple[str, ...]:
    """Return the specials and the most frequent words, at most ``size`` in all; ties in alphabetical order."""
    counts = Counter(word for words in texts for word in words)
    frequent = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return (*SPECIALS, *(word for word, _ in frequent[: size - len(SPECIALS)]))


def encode(texts: Iterable[Sequence[str]], vocabulary: Sequence[str]) -> list[list[int]]:
    """Replace words by their places in the vocabulary, and words that are not in it by ``<unk>``."""
    place = {word: number for number, word in enumerate(vocabulary)}
    return [[place.get(word, UNKNOWN) for word in words] for words in texts]


def pad(sequences: Sequence[Sequence[int]], length: int, filler: int = PAD) -> Tokens:
    """Return sequences cut or filled up at the end to one length: int64 ``[N, length]``."""
    tokens = np.full((len(sequences), length), filler, dtype=np.int64)
    for row, sequence in enumerate(sequences):
        cut = sequence[:length]
        tokens[row, : len(cut)] = cut
    return tokens


def next_words(sequences: Sequence[Sequence[int]], length: int) -> tuple[Tokens, Tokens]:
    """Return inputs and targets of next-word prediction, each int64 ``[N, length]``.

    The target at each place is the token at the next place of the input; where there is none, it is :data:`IGNORED`.
    Sequences should have at least two tokens: shorter ones have no target, and a batch of them no loss.
    """
    x = pad([sequence[: min(length, len(sequence) - 1)] for sequence in sequences], length)
    return x, pad([sequence[1:] for sequence in sequences], length, filler=IGNORED)


def windows(sequence: list[T], length: int) -> list[list[T]]:
    """Cut a long sequence into runs of ``length`` targets; a run starts with the last token of the run before it.

    So every token but the first is a target exactly once. A sequence of fewer than two tokens has no runs.
    """
    return [sequence[start : start + length + 1] for start in range(0, len(sequence) - 1, length)]
