from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fedclade.core import IGNORED
from fedclade.data.texts import (
    PAD,
    UNKNOWN,
    build_vocabulary,
    cut_windows,
    encode,
    next_words,
    pad,
    split_words,
)


def test_split_words() -> None:
    assert split_words("We know't, we KNOW!\n#39; 2-1") == [
        *("we", "know't", ",", "we", "know", "!"),
        *("#", "39", ";", "2", "-", "1"),
    ]


def test_vocabulary_has_the_most_frequent_words_and_breaks_ties_by_alphabet() -> None:
    texts = [["c", "b", "d"], ["a", "b", "c"]]
    assert build_vocabulary(texts, 5) == ("<pad>", "<unk>", "b", "c", "a")
    assert build_vocabulary(texts, 100) == ("<pad>", "<unk>", "b", "c", "a", "d")


def test_encode_replaces_words_that_are_not_in_the_vocabulary() -> None:
    assert encode([["b", "x"], []], ("<pad>", "<unk>", "b")) == [[2, UNKNOWN], []]


def test_pad_cuts_and_fills() -> None:
    assert pad([[5, 6, 7], [8], []], 2).tolist() == [[5, 6], [8, PAD], [PAD, PAD]]


def test_next_words_of_short_fitting_and_long_sequences() -> None:
    x, y = next_words([[2, 3], [2, 3, 4, 5], [2, 3, 4, 5, 6]], 3)
    assert x.tolist() == [[2, PAD, PAD], [2, 3, 4], [2, 3, 4]]
    assert y.tolist() == [[3, IGNORED, IGNORED], [3, 4, 5], [3, 4, 5]]


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=12), min_size=1), st.integers(1, 8)
)
def test_every_target_is_the_next_input_and_every_sequence_has_one(
    sequences: list[list[int]], length: int
) -> None:
    x, y = next_words(sequences, length)
    assert x.shape == y.shape == (len(sequences), length)
    assert ((x == PAD) == (y == IGNORED)).all()
    assert (y[:, 0] != IGNORED).all()
    inner = y[:, :-1] != IGNORED
    follows = x[:, 1:] == y[:, :-1]
    assert (follows | ~inner | (x[:, 1:] == PAD)).all()


@given(st.lists(st.integers(), max_size=40), st.integers(1, 8))
def test_windows_make_every_token_but_the_first_a_target_once(
    tokens: list[int], length: int
) -> None:
    runs = cut_windows(tokens, length)
    assert [token for run in runs for token in run[1:]] == tokens[1:]
    assert all(2 <= len(run) <= length + 1 for run in runs)
