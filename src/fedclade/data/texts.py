"""Loaders of text data sets (ag_news, tiny_shakespeare, sent140), and their tokenization.

Tokens are positions of words in a vocabulary, as int64 tensors ``[N, T]``: N examples of T tokens.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade.core import IGNORED, DataError, TaskKind, require, rng
from fedclade.data.arrays import Arrays, load_cached, stamp_files
from fedclade.data.pool import Pool
from fedclade.data.tables import (
    HubTables,
    LeafFiles,
    Tables,
    find_leaf,
    open_hub,
    open_tables,
    read_leaf,
    require_values,
    to_labels,
    to_texts,
)

# Text to numbers: words, vocabularies, and token sequences of one length.

T = TypeVar("T")
Tokens = NDArray[np.int64]

PAD = 0
UNKNOWN = 1
SPECIALS = ("<pad>", "<unk>")

_WORD = re.compile(r"\w+(?:'\w+)*|[^\w\s]")


def split_words(text: str) -> list[str]:
    """Split a text into lower-case words and single punctuation marks.

    >>> split_words("We know't, we KNOW!")
    ['we', "know't", ',', 'we', 'know', '!']
    """
    # Interned words share memory, which matters for a million tweets.
    return [sys.intern(word) for word in _WORD.findall(text.lower())]


def build_vocabulary(texts: Iterable[Sequence[str]], size: int) -> tuple[str, ...]:
    """Return a vocabulary of the special tokens and the most frequent words of texts.

    The vocabulary has at most ``size`` entries, and ``texts`` are sequences of words. Words of
    equal frequency are in alphabetical order.
    """
    counts = Counter(word for words in texts for word in words)
    frequent = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return (*SPECIALS, *(word for word, _ in frequent[: size - len(SPECIALS)]))


def encode(texts: Iterable[Sequence[str]], vocabulary: Sequence[str]) -> list[list[int]]:
    """Replace the words of texts by their positions in a vocabulary, and unknown words by 1.

    Position 1 of the vocabulary is the special token ``<unk>``.
    """
    place = {word: number for number, word in enumerate(vocabulary)}

    def encode_words(words: Sequence[str]) -> list[int]:
        return [place.get(word, UNKNOWN) for word in words]

    return [encode_words(words) for words in texts]


def pad(sequences: Sequence[Sequence[int]], length: int, filler: int = PAD) -> Tokens:
    """Cut or pad N sequences of tokens at the end to one length, int64 ``[N, length]``."""
    tokens = np.full((len(sequences), length), filler, dtype=np.int64)
    for row, sequence in enumerate(sequences):
        cut = sequence[:length]
        tokens[row, : len(cut)] = cut
    return tokens


def next_words(sequences: Sequence[Sequence[int]], length: int) -> tuple[Tokens, Tokens]:
    """Return inputs and targets of next-word prediction, each int64 ``[N, length]``.

    The target at each position is the token at the next position of the sequence, or
    :data:`IGNORED` if the sequence has no next token. Sequences should have at least two tokens:
    shorter sequences have no target, and a batch without any target has no loss.
    """
    x = pad([sequence[: min(length, len(sequence) - 1)] for sequence in sequences], length)
    return x, pad([sequence[1:] for sequence in sequences], length, filler=IGNORED)


def cut_windows(sequence: list[T], length: int) -> list[list[T]]:
    """Cut a sequence into windows of ``length`` targets for next-word prediction.

    A window starts at the last token of the previous window, so that every token except the first
    is a target exactly once. A sequence of fewer than two tokens has no windows.
    """
    return [sequence[start : start + length + 1] for start in range(0, len(sequence) - 1, length)]


# A corpus: texts with labels and owners, and the way from there to a pool of token sequences.


@dataclass(frozen=True)
class Corpus:
    """Texts with their labels and owners, before conversion to tokens.

    Parameters
    ----------
    texts
        Words of each text.
    labels
        Topic or sentiment of each text, ``[N]``; 0 for data without topics and sentiments.
    train
        Number of texts for training. The first texts are for training, the remaining for testing.
    owners
        Owner of each text; None if unknown.
    """

    texts: list[list[str]]
    labels: NDArray[np.int64]
    train: int
    owners: list[str] | None = None


def join(parts: list[Corpus]) -> Corpus:
    """Concatenate a corpus of training texts and corpora of test texts."""
    texts = [text for part in parts for text in part.texts]
    owners = [owner for part in parts for owner in part.owners or []]
    return Corpus(
        texts, np.concatenate([part.labels for part in parts]), len(parts[0].texts), owners or None
    )


def pool_from_corpus(
    name: str,
    key: object,
    read: Callable[[], Corpus],
    task: TaskKind,
    *,
    sequence_length: int,
    vocabulary_size: int,
    labels: int = 1,
) -> Pool:
    """Read a corpus and convert it to a pool of tokens, or load the tokens from the cache.

    Parameters
    ----------
    name
        Name of the source.
    key
        Key of the content of the source, for the cache.
    read
        Function that reads the corpus; not called if the tokens are in the cache.
    task
        ``classification`` or ``language``.
    sequence_length
        Number of tokens of an example.
    vocabulary_size
        Largest number of words, including the special tokens.
    labels
        Number of labels, for ``classification``.

    Raises
    ------
    ConfigError
        If a number is out of range.
    """
    require(
        ("sequence_length", sequence_length, sequence_length >= 1, "at least 1"),
        (
            "vocabulary_size",
            vocabulary_size,
            vocabulary_size > len(SPECIALS),
            f"above {len(SPECIALS)}",
        ),
    )
    options = [task, sequence_length, vocabulary_size]
    arrays = load_cached(
        name,
        {"source": key, "options": options},
        lambda: _build_arrays(read(), task, sequence_length, vocabulary_size),
    )
    vocabulary = tuple(arrays["vocabulary"].tolist())
    if task == "language":
        outputs = len(vocabulary)
    else:
        outputs = labels
    return Pool.of_arrays(
        name,
        arrays,
        arrays["labels"],
        outputs,
        task=task,
        natural=arrays.get("owners"),
        vocabulary=vocabulary,
    )


def _build_arrays(
    corpus: Corpus, task: TaskKind, sequence_length: int, vocabulary_size: int
) -> Arrays:
    """Convert a corpus to arrays of tokens, with the vocabulary of the training texts."""
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
        arrays["x"] = pad(tokens, sequence_length)
        arrays["y"] = corpus.labels
    return arrays


# Pretrained word vectors, such as GloVe's, as the frozen first layer of a model of texts.


def with_vectors(pool: Pool, file: Path) -> Pool:
    """Replace the tokens ``[N, T]`` of a pool by pretrained word vectors, float32 ``[N, T, d]``.

    The words are replaced once, before training, so that a model needs no embedding layer: the
    vectors are neither trained nor sent nor aggregated. Padding, and words without a vector, become
    zeros. As in GloVe's files, each line of the file has a word and the d numbers of its vector,
    separated by spaces.
    """
    embedding = read_vectors(file, pool.vocabulary)
    return replace(pool, x=torch.from_numpy(embedding)[pool.x], vocabulary=())


def read_vectors(file: Path, vocabulary: tuple[str, ...]) -> NDArray[np.float32]:
    """Read the word vectors of a vocabulary's V words from a file, float32 ``[V, d]``.

    Words without a vector in the file become zeros. :func:`with_vectors` describes the file.

    Raises
    ------
    DataError
        If the file cannot be read, or has no vector of any word.
    """
    place = {word: number for number, word in enumerate(vocabulary)}
    found: dict[int, NDArray[np.float32]] = {}
    width: int | None = None
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                word, *numbers = line.rstrip("\n").split(" ")
                if word in place:
                    found[place[word]] = np.asarray(numbers, dtype=np.float32)
                    width = width or len(numbers)
                    if len(numbers) != width or not np.isfinite(found[place[word]]).all():
                        raise DataError(
                            f"{file}, line {number}: {word!r} should have {width} finite numbers, "
                            f"got {len(numbers)} numbers, of which "
                            f"{int(np.isfinite(found[place[word]]).sum())} are finite"
                        )
    except FileNotFoundError:
        raise DataError(
            f"cannot read word vectors: there is no file {file}; make this file, with a word and "
            "the numbers of its vector in each line, or name another file"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read the word vectors in {file}: {error}; each line should have a word and the "
            "numbers of its vector, separated by spaces, in UTF-8"
        ) from error
    if width is None:
        raise DataError(
            f"{file} should have vectors of the {len(vocabulary)} words of the data, got no vector "
            "of these words; choose another file of word vectors"
        )
    embedding = np.zeros((len(vocabulary), width), dtype=np.float32)
    for row, vector in found.items():
        embedding[row] = vector
    return embedding


TOPICS = 4
HELD_OUT_FRACTION = 0.1
LEAF_TEXT = 4  # place of the text in LEAF's [id, date, query, user, text, ...]
NEGATIVE = 0
NEUTRAL = 2
POSITIVE = 4


def load_ag_news(
    data_dir: Path | None,
    _seed: int,
    *,
    task: Literal["classification", "language"] = "language",
    sequence_length: int = 32,
    vocabulary_size: int = 10_000,
) -> Pool:
    """Load AG News: short news articles on four topics (Zhang, Zhao, LeCun 2015).

    With the task ``language``, a model predicts each next word of an article, and the topics are
    the ``groups`` of the pool, by which data can be divided among clients. With ``classification``,
    a model predicts the topic. If the data has no training split, a tenth of the test split is used
    for testing, and the rest for training.
    """
    tables = open_tables("ag_news", data_dir)
    return pool_from_corpus(
        "ag_news",
        tables.key,
        partial(_read_ag_news, tables),
        task,
        sequence_length=sequence_length,
        vocabulary_size=vocabulary_size,
        labels=TOPICS,
    )


def load_tiny_shakespeare(
    data_dir: Path | None, _seed: int, *, sequence_length: int = 32, vocabulary_size: int = 10_000
) -> Pool:
    """Load the tiny Shakespeare corpus by speaker, for next-word prediction, without test split.

    All lines of a speaker form one text, which is cut into sequences. The file is
    ``tiny_shakespeare/input.txt``, with a line ``Speaker:`` above each speech.
    """
    if data_dir is None:
        tables = open_hub("tiny_shakespeare")
        key = tables.key
        where = tables.hub
        read_text = partial(_read_hub_text, tables)
    else:
        file = data_dir / "tiny_shakespeare" / "input.txt"
        key = stamp_files([file] if file.exists() else [])
        where = str(file)
        read_text = partial(_read_text_file, file)
    return pool_from_corpus(
        "tiny_shakespeare",
        key,
        partial(_read_shakespeare, read_text, where, sequence_length),
        "language",
        sequence_length=sequence_length,
        vocabulary_size=vocabulary_size,
    )


def load_sent140(
    data_dir: Path | None,
    _seed: int,
    *,
    sequence_length: int = 25,
    vocabulary_size: int = 10_000,
    vectors: str | None = None,
) -> Pool:
    """Load Sentiment140: tweets by user, with labels negative (0) and positive (1).

    Neutral tweets, which the Hub's test split contains, are left out. Tweets are cut or padded to
    one length, which is 25 words in LEAF. With ``vectors``, the name of a file in the folder of the
    data such as ``glove.6B.300d.txt``, each word is replaced by its vector, as in FedProx and
    FedGroup.
    """
    leaf = find_leaf(data_dir, "sent140")
    if leaf:
        key = stamp_files(leaf.files)
        read = partial(_read_sent140_leaf, leaf)
    else:
        tables = open_tables("sent140", data_dir)
        key = tables.key
        read = partial(_read_sent140, tables)
    pool = pool_from_corpus(
        "sent140",
        key,
        read,
        "classification",
        sequence_length=sequence_length,
        vocabulary_size=vocabulary_size,
        labels=2,
    )
    if vectors is None:
        return pool
    if data_dir is None:
        raise DataError(
            f"vectors = {vectors!r} needs a data folder that has sent140/{vectors}; set --data-dir"
        )
    return with_vectors(pool, data_dir / "sent140" / vectors)


def _read_ag_news(tables: Tables) -> Corpus:
    if tables.has("train"):
        return join([_read_ag_news_split(tables, split) for split in ("train", "test")])
    whole = _read_ag_news_split(tables, "test")
    # The seed is fixed, so that the test examples are the same in every run.
    order = rng.generator(0, "ag_news held out").permutation(len(whole.texts))
    train = len(order) - max(1, round(HELD_OUT_FRACTION * len(order)))
    return Corpus([whole.texts[row] for row in order], whole.labels[order], train)


def _read_ag_news_split(tables: Tables, split: str) -> Corpus:
    columns = tables.read(split, ["text", "label"])
    labels = to_labels(columns["label"], TOPICS, tables.where(split), "label")
    texts = [split_words(text) for text in to_texts(columns["text"], tables.where(split), "text")]
    # A single word has no next word to predict.
    long_enough = [row for row, words in enumerate(texts) if len(words) >= 2]
    return Corpus([texts[row] for row in long_enough], labels[long_enough], len(long_enough))


def _read_text_file(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(
            f"there is no file {file}, which should be a text with lines 'Speaker:'; check "
            "--data-dir / FEDCLADE_DATA_DIR"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {file}, which should be a text in UTF-8: {error}") from error


def _read_hub_text(tables: HubTables) -> str:
    texts: list[str] = []
    # The three splits are consecutive parts of one text.
    for split in ("train", "validation", "test"):
        if tables.has(split):
            texts += to_texts(tables.read(split, ["text"])["text"], tables.where(split), "text")
    return "".join(texts)


def _read_shakespeare(text: Callable[[], str], where: str, sequence_length: int) -> Corpus:
    said = _group_by_speaker(text())
    runs = [
        (speaker, run)
        for speaker, words in said.items()
        for run in cut_windows(words, sequence_length)
    ]
    if not runs:
        raise DataError(
            f"{where} should have a line 'Speaker:' above each speech, got no such line"
        )
    speakers, texts = zip(*runs, strict=True)
    return Corpus(list(texts), np.zeros(len(runs), dtype=np.int64), len(runs), list(speakers))


def _group_by_speaker(text: str) -> dict[str, list[str]]:
    """Collect the words of each speaker of a play, in order of appearance.

    Text before the first speaker is left out.
    """
    said: dict[str, list[str]] = {}
    speaker: str | None = None
    # A speaker's name follows an empty line, so that "He said:" in a speech is not mistaken for
    # a speaker.
    above = ""
    for line in text.splitlines():
        if line.endswith(":") and not above.strip():
            speaker = line.removesuffix(":").strip()
        elif speaker is not None:
            said.setdefault(speaker, []).extend(split_words(line))
        above = line
    return said


def _read_sent140(tables: Tables) -> Corpus:
    """Read the tweets of Sentiment140 from tables in the layout of the Hugging Face Hub."""
    splits = ["train"]
    if tables.has("test"):
        splits.append("test")
    parts: list[Corpus] = []
    for split in splits:
        where = tables.where(split)
        columns = tables.read(split, ["text", "user", "sentiment"])
        texts = to_texts(columns["text"], where, "text")
        sentiments = columns["sentiment"]
        part = _select_tweets(texts, columns["user"], sentiments, where=where, column="sentiment")
        parts.append(part)
    return join(parts)


def _read_sent140_leaf(leaf: LeafFiles) -> Corpus:
    parts: list[Corpus] = []
    splits = [leaf.train]
    if leaf.test:
        splits.append(leaf.test)
    for files in splits:
        where = f"the LEAF files in {files[0].parent}"
        examples = read_leaf(files)
        for x in examples.x:
            if not isinstance(x, list) or len(x) <= LEAF_TEXT:
                raise DataError(
                    f"{where}: x should be [id, date, query, user, text, ...] for each tweet, got "
                    f"{x!r}"
                )
        # LEAF encodes positive as 1, Sentiment140 itself as 4.
        sentiments = [POSITIVE if y == 1 else y for y in examples.y]
        texts = to_texts([x[LEAF_TEXT] for x in examples.x], where, "x")
        parts.append(_select_tweets(texts, examples.users, sentiments, where=where, column="y"))
    return join(parts)


def _select_tweets(
    texts: list[str], users: list[Any], sentiments: list[Any], *, where: str, column: str
) -> Corpus:
    """Select the negative and positive tweets, with labels 0 and 1.

    ``where`` and ``column`` name the source of the sentiments in errors.
    """
    known = (NEGATIVE, NEUTRAL, POSITIVE)
    rule = f"{NEGATIVE}, {NEUTRAL} or {POSITIVE}"
    require_values(sentiments, lambda value: value in known, where, column=column, rule=rule)
    rows = [row for row, sentiment in enumerate(sentiments) if sentiment != NEUTRAL]
    labels = [sentiments[row] == POSITIVE for row in rows]
    return Corpus(
        [split_words(texts[row]) for row in rows],
        np.asarray(labels, dtype=np.int64),
        len(rows),
        [str(users[row]) for row in rows],
    )
