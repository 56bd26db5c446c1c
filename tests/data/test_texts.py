from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedclade.core import IGNORED
from fedclade.core.errors import ConfigError, DataError
from fedclade.data import load_pool
from fedclade.data.tables import HubTables
from fedclade.data.texts import PAD, UNKNOWN

Write = Callable[..., Path]


def words(pool: Any, row: int) -> list[str]:
    return [pool.vocabulary[token] for token in pool.x[row].tolist() if token != PAD]


def test_ag_news_is_next_word_prediction_by_topic(write_parquet: Write, tmp_path: Path) -> None:
    write_parquet(
        "ag_news/train.parquet", {"text": ["a b a c", "single", "b a"], "label": [3, 0, 1]}
    )
    write_parquet("ag_news/test.parquet", {"text": ["a z"], "label": [2]})
    pool = load_pool("ag_news", data_dir=tmp_path / "data", sequence_length=3)
    assert pool.vocabulary == ("<pad>", "<unk>", "a", "b", "c"), (
        "of the training texts that are kept"
    )
    assert pool.x.tolist() == [[2, 3, 2], [3, PAD, PAD], [2, PAD, PAD]], (
        "the text of one word is left out"
    )
    assert pool.y.tolist() == [[3, 2, 4], [2, IGNORED, IGNORED], [UNKNOWN, IGNORED, IGNORED]]
    assert (pool.task, pool.outputs, pool.groups.tolist()) == ("language", 5, [3, 1, 2])
    assert (pool.train.tolist(), pool.test.tolist()) == ([0, 1], [2])
    logits = torch.zeros(3, 5, 3)  # the loss leaves out the padded places
    assert float(torch.nn.functional.cross_entropy(logits, pool.y)) == pytest.approx(np.log(5))


def test_ag_news_as_classification(write_parquet: Write, tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_parquet(f"ag_news/{split}.parquet", {"text": ["a b a c", "b a"], "label": [3, 1]})
    pool = load_pool(
        "ag_news",
        data_dir=tmp_path / "data",
        task="classification",
        sequence_length=3,
        vocabulary_size=4,
    )
    assert pool.x[:2].tolist() == [[2, 3, 2], [3, 2, PAD]]
    assert (pool.y.tolist(), pool.outputs, pool.task) == ([3, 1, 3, 1], 4, "classification")


def test_ag_news_holds_out_a_tenth_if_there_is_no_training_split(
    write_parquet: Write, tmp_path: Path
) -> None:
    texts = [f"word{i} follows" for i in range(40)]
    write_parquet("ag_news/test.parquet", {"text": texts, "label": [i % 4 for i in range(40)]})
    pool = load_pool("ag_news", data_dir=tmp_path / "data")
    assert (len(pool.train), len(pool.test)) == (36, 4)
    assert not {words(pool, row)[0] for row in pool.test} & {
        words(pool, row)[0] for row in pool.train
    }
    for row in pool.train:
        assert int(words(pool, row)[0].removeprefix("word")) % 4 == pool.groups[row]
    again = load_pool("ag_news", data_dir=tmp_path / "data", seed=9)
    assert (again.x == pool.x).all(), "the same for every seed"


PLAY = """Prologue without a speaker.

First Citizen:
Before we proceed, hear me.
He said:

All:
Speak, speak.

First Citizen:
You are all resolved.

Mute:
"""


def write_play(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "data" / "tiny_shakespeare" / "input.txt"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return file


def test_tiny_shakespeare_by_speaker(tmp_path: Path) -> None:
    write_play(tmp_path, PLAY)
    pool = load_pool("tiny_shakespeare", data_dir=tmp_path / "data", sequence_length=8)
    assert pool.natural is not None
    assert pool.natural.tolist() == ["First Citizen", "First Citizen", "All"]
    assert words(pool, 0) == ["before", "we", "proceed", ",", "hear", "me", ".", "he"]
    assert words(pool, 1) == ["said", ":", "you", "are", "all", "resolved"], (
        "its last word is a target only"
    )
    assert words(pool, 2) == ["speak", ",", "speak"]
    assert (len(pool.train), len(pool.test), pool.groups.tolist()) == (3, 0, [0, 0, 0])


def test_tiny_shakespeare_from_the_hub_is_its_splits_in_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    splits = {"train": PLAY[:70], "validation": PLAY[70:90], "test": PLAY[90:]}
    monkeypatch.setattr(HubTables, "_splits", splits)
    monkeypatch.setattr(HubTables, "read", lambda self, split, columns: {"text": [splits[split]]})
    pool = load_pool("tiny_shakespeare")
    assert pool.natural is not None
    assert sorted(set(pool.natural)) == ["All", "First Citizen"]


def test_tiny_shakespeare_that_is_missing_not_text_or_without_speakers(tmp_path: Path) -> None:
    file = write_play(tmp_path, "no speakers\nat all\n")
    with pytest.raises(DataError) as caught:
        load_pool("tiny_shakespeare", data_dir=tmp_path / "data")
    assert (
        str(caught.value)
        == f"{file} should have a line 'Speaker:' above each speech, got no such line"
    )
    file.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(DataError, match="which should be a text in UTF-8"):
        load_pool("tiny_shakespeare", data_dir=tmp_path / "data")
    file.unlink()
    with pytest.raises(DataError) as caught:
        load_pool("tiny_shakespeare", data_dir=tmp_path / "data")
    assert f"there is no file {file}, which should be a text" in str(caught.value)


def test_sent140_in_the_hubs_layout(write_parquet: Write, tmp_path: Path) -> None:
    write_parquet(
        "sent140/train.parquet",
        {"text": ["So sad", "so GOOD"], "user": ["u", "v"], "sentiment": [0, 4]},
    )
    write_parquet(
        "sent140/test.parquet", {"text": ["meh", "good"], "user": ["w", "w"], "sentiment": [2, 4]}
    )
    pool = load_pool("sent140", data_dir=tmp_path / "data", sequence_length=2)
    assert pool.natural is not None
    assert pool.natural.tolist() == ["u", "v", "w"]
    assert (pool.y.tolist(), pool.test.tolist(), pool.outputs) == ([0, 1, 1], [2], 2)
    assert [words(pool, row) for row in range(3)] == [["so", "sad"], ["so", "good"], ["good"]]


def tweet(text: Any) -> list[Any]:
    return ["1", "Mon", "NO_QUERY", "u", text, "training"]


def leaf(x: list[Any], y: list[Any]) -> dict[str, Any]:
    return {"users": ["u"], "num_samples": [len(y)], "user_data": {"u": {"x": x, "y": y}}}


def test_sent140_with_word_vectors(write_parquet: Write, tmp_path: Path) -> None:
    write_parquet(
        "sent140/train.parquet",
        {"text": ["so sad", "so good!"], "user": ["u", "v"], "sentiment": [0, 4]},
    )
    (tmp_path / "data/sent140/small.txt").write_text("so 1 2\nother 9 9\ngood -3 0.5\n")
    plain = load_pool("sent140", data_dir=tmp_path / "data", sequence_length=3)
    pool = load_pool("sent140", data_dir=tmp_path / "data", sequence_length=3, vectors="small.txt")
    assert pool.x.dtype == torch.float32
    assert pool.x.tolist() == [[[1, 2], [0, 0], [0, 0]], [[1, 2], [-3, 0.5], [0, 0]]], (
        "sad, ! and padding have none"
    )
    assert (pool.vocabulary, pool.task, pool.outputs) == ((), "classification", 2)
    assert pool.y.tolist() == plain.y.tolist()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot read word vectors: there is no file .*small.txt; make this file"),
        (
            "so 1 2\nsad 1\n",
            "line 2: 'sad' should have 2 finite numbers, got 1 numbers, of which 1 are finite",
        ),
        (
            "so 1 nan\n",
            "small.txt, line 1: 'so' should have 2 finite numbers, got 2 numbers, of which 1 are finite",
        ),
        ("so 1 x\n", "cannot read the word vectors in .*small.txt: could not convert"),
        (
            "other 1 2\n",
            "small.txt should have vectors of the 4 words of the data, got no vector of these words",
        ),
    ],
)
def test_word_vectors_that_cannot_be_used(
    content: str | None, told: str, write_parquet: Write, tmp_path: Path
) -> None:
    write_parquet("sent140/train.parquet", {"text": ["so sad"], "user": ["u"], "sentiment": [0]})
    if content is not None:
        (tmp_path / "data/sent140/small.txt").write_text(content)
    with pytest.raises(DataError, match=told):
        load_pool("sent140", data_dir=tmp_path / "data", vectors="small.txt")


def test_sent140_in_leafs_layout(write_json: Write, tmp_path: Path) -> None:
    write_json("sent140/train/a.json", leaf([tweet("so sad"), tweet("good")], [0, 1]))
    write_json("sent140/test/a.json", leaf([tweet("good")], [4]))
    pool = load_pool("sent140", data_dir=tmp_path / "data")
    assert pool.x.shape == (3, 25)
    assert (pool.y.tolist(), pool.test.tolist()) == ([0, 1, 1], [2])
    assert words(pool, 0) == ["so", "sad"]


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (tweet("a"), 3, "column 'y' should have 0, 2 or 4, got 3 in row 0"),
        (
            ["1", "Mon"],
            0,
            "x should be [id, date, query, user, text, ...] for each tweet, got ['1', 'Mon']",
        ),
        (tweet(None), 0, "column 'x' should have texts, got None in row 0"),
    ],
)
def test_bad_tweets(write_json: Write, tmp_path: Path, x: Any, y: Any, message: str) -> None:
    write_json("sent140/train/a.json", leaf([x], [y]))
    with pytest.raises(DataError) as caught:
        load_pool("sent140", data_dir=tmp_path / "data")
    assert message in str(caught.value)


def test_lengths_out_of_range(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(ConfigError) as caught:
        load_pool("ag_news", data_dir=tmp_path / "data", sequence_length=0, vocabulary_size=2)
    assert str(caught.value).splitlines() == [
        "sequence_length should be at least 1, got 0",
        "vocabulary_size should be above 2, got 2",
    ]
