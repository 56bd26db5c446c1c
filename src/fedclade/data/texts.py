"""Text sources: ag_news, tiny_shakespeare and sent140 as int64 tokens ``[N, T]``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedclade.core import DataError, rng
from fedclade.data.cache import stamps
from fedclade.data.corpus import Corpus, join, pool_from_corpus
from fedclade.data.leaf import LeafFiles, find_leaf, read_leaf
from fedclade.data.pool import Pool
from fedclade.data.tables import HubTables, Tables, open_hub, open_tables, require_values, to_labels, to_texts
from fedclade.data.vectors import with_vectors
from fedclade.data.words import split_words, windows

TOPICS = 4
HELD_OUT_FRACTION = 0.1
LEAF_TEXT = 4  # place of the text in LEAF's [id, date, query, user, text, ...]
NEGATIVE, NEUTRAL, POSITIVE = 0, 2, 4


def load_ag_news(
    data_dir: Path | None,
    _seed: int,
    *,
    task: Literal["classification", "language"] = "language",
    sequence_length: int = 32,
    vocabulary_size: int = 10_000,
) -> Pool:
    """Return AG News: short articles on four topics (Zhang, Zhao, LeCun 2015).

    For ``language`` every article is one sequence whose next words are predicted, and the groups are the topics; for
    ``classification`` the topic is the label. Without a training split, a tenth of the test split is the test data.
    """
    tables = open_tables("ag_news", data_dir)
    read = partial(_read_ag_news, tables)
    return pool_from_corpus("ag_news", tables.key, read, task, sequence_length, vocabulary_size, labels=TOPICS)


def load_tiny_shakespeare(
    data_dir: Path | None, _seed: int, *, sequence_length: int = 32, vocabulary_size: int = 10_000
) -> Pool:
    """Return the tiny Shakespeare corpus by speaker, for next-word prediction; it has no test split.

    All that a speaker says is one text, cut into sequences. The file is ``tiny_shakespeare/input.txt``, with lines
    ``Speaker:`` above what they say.
    """
    if data_dir is None:
        tables = open_hub("tiny_shakespeare")
        key, text, where = tables.key, partial(_text_from_hub, tables), tables.hub
    else:
        file = data_dir / "tiny_shakespeare" / "input.txt"
        key, text, where = stamps([file] if file.exists() else []), partial(_text_from_file, file), str(file)
    read = partial(_read_shakespeare, text, where, sequence_length)
    return pool_from_corpus("tiny_shakespeare", key, read, "language", sequence_length, vocabulary_size)


def load_sent140(
    data_dir: Path | None,
    _seed: int,
    *,
    sequence_length: int = 25,
    vocabulary_size: int = 10_000,
    vectors: str | None = None,
) -> Pool:
    """Return Sentiment140: tweets by user, negative (0) or positive (1); the Hub's layout or LEAF's JSON.

    Neutral tweets (there are some in the Hub's test split) are left out. Tweets are cut or padded to one length; LEAF's
    is 25 words. With ``vectors``, the name of a file in the folder of the data such as ``glove.6B.300d.txt``, each word
    is given as its vector, as in FedProx and FedGroup.
    """
    leaf = find_leaf(data_dir, "sent140")
    if leaf:
        key, read = stamps(leaf.files), partial(_read_sent140_leaf, leaf)
    else:
        tables = open_tables("sent140", data_dir)
        key, read = tables.key, partial(_read_sent140, tables)
    pool = pool_from_corpus("sent140", key, read, "classification", sequence_length, vocabulary_size, labels=2)
    if vectors is None:
        return pool
    if data_dir is None:
        raise DataError(f"vectors = {vectors!r} needs a data folder that has sent140/{vectors}; set --data-dir")
    return with_vectors(pool, data_dir / "sent140" / vectors)


def _read_ag_news(tables: Tables) -> Corpus:
    if tables.has("train"):
        return join([_ag_news_split(tables, split) for split in ("train", "test")])
    whole = _ag_news_split(tables, "test")
    # What is held out is the same in every run: this seed is not the user's.
    order = rng.generator(0, "ag_news held out").permutation(len(whole.texts))
    train = len(order) - max(1, round(HELD_OUT_FRACTION * len(order)))
    return Corpus([whole.texts[row] for row in order], whole.labels[order], train)


def _ag_news_split(tables: Tables, split: str) -> Corpus:
    columns = tables.read(split, ["text", "label"])
    labels = to_labels(columns["label"], TOPICS, tables.where(split), "label")
    texts = [split_words(text) for text in to_texts(columns["text"], tables.where(split), "text")]
    long_enough = [row for row, words in enumerate(texts) if len(words) >= 2]  # one word alone has no next one
    return Corpus([texts[row] for row in long_enough], labels[long_enough], len(long_enough))


def _text_from_file(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(
            f"no data: expected the text file {file} with lines 'Speaker:'; check --data-dir / FEDCLADE_DATA_DIR"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {file}, which should be a text in UTF-8: {error}") from error


def _text_from_hub(tables: HubTables) -> str:
    texts: list[str] = []
    for split in ("train", "validation", "test"):  # three runs of the one text
        if tables.has(split):
            texts += to_texts(tables.read(split, ["text"])["text"], tables.where(split), "text")
    return "".join(texts)


def _read_shakespeare(text: Callable[[], str], where: str, sequence_length: int) -> Corpus:
    said = _by_speaker(text())
    runs = [(speaker, run) for speaker, words in said.items() for run in windows(words, sequence_length)]
    if not runs:
        raise DataError(f"{where} should have lines 'Speaker:' above what the speaker says, got none")
    speakers, texts = zip(*runs, strict=True)
    return Corpus(list(texts), np.zeros(len(runs), dtype=np.int64), len(runs), list(speakers))


def _by_speaker(text: str) -> dict[str, list[str]]:
    """Return the words of each speaker, in the order in which they first speak; any text above is left out."""
    said: dict[str, list[str]] = {}
    speaker: str | None = None
    above = ""  # a speaker's name follows an empty line, so that "He said:" within a speech is not taken for one
    for line in text.splitlines():
        if line.endswith(":") and not above.strip():
            speaker = line.removesuffix(":").strip()
        elif speaker is not None:
            said.setdefault(speaker, []).extend(split_words(line))
        above = line
    return said


def _read_sent140(tables: Tables) -> Corpus:
    def corpus(split: str) -> Corpus:
        columns, where = tables.read(split, ["text", "user", "sentiment"]), tables.where(split)
        texts = to_texts(columns["text"], where, "text")
        return _tweets(texts, columns["user"], columns["sentiment"], where, "sentiment")

    return join([corpus(split) for split in (["train", "test"] if tables.has("test") else ["train"])])


def _read_sent140_leaf(leaf: LeafFiles) -> Corpus:
    parts: list[Corpus] = []
    for files in [leaf.train, leaf.test] if leaf.test else [leaf.train]:
        where = f"the LEAF files in {files[0].parent}"
        examples = read_leaf(files)
        for x in examples.x:
            if not isinstance(x, list) or len(x) <= LEAF_TEXT:
                raise DataError(f"{where}: x should be [id, date, query, user, text, ...] for each tweet, got {x!r}")
        # LEAF writes positive as 1 where Sentiment140 itself writes 4.
        sentiments = [POSITIVE if y == 1 else y for y in examples.y]
        texts = to_texts([x[LEAF_TEXT] for x in examples.x], where, "x")
        parts.append(_tweets(texts, examples.users, sentiments, where, "y"))
    return join(parts)


def _tweets(texts: list[str], users: list[Any], sentiments: list[Any], where: str, column: str) -> Corpus:
    """Return the tweets that are negative or positive, with labels 0 and 1."""
    known = (NEGATIVE, NEUTRAL, POSITIVE)
    require_values(sentiments, lambda value: value in known, where, column, f"{NEGATIVE}, {NEUTRAL} or {POSITIVE}")
    rows = [row for row, sentiment in enumerate(sentiments) if sentiment != NEUTRAL]
    labels = np.asarray([sentiments[row] == POSITIVE for row in rows], dtype=np.int64)
    return Corpus([split_words(texts[row]) for row in rows], labels, len(rows), [str(users[row]) for row in rows])
