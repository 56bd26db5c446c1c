from __future__ import annotations

import pytest

from fedclade.core import ConfigError, matching

NAMES = (
    "0.weight",
    "1.0.weight",
    "blocks.0.q.lora_A.weight",
    "blocks.0.q.lora_B.weight",
    "head.bias",
    "head.weight",
)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("head.*", ("head.bias", "head.weight")),
        ("head", ("head.bias", "head.weight")),
        ("*.bias", ("head.bias",)),
        ("0", ("0.weight",)),  # not "1.0.weight": as the beginning of a name it fits already
        ("lora_B", ("blocks.0.q.lora_B.weight",)),
        ("q.lora_?", ("blocks.0.q.lora_A.weight", "blocks.0.q.lora_B.weight")),
    ],
)
def test_names_that_a_pattern_matches(pattern: str, expected: tuple[str, ...]):
    assert matching([pattern], NAMES, "model.personal") == expected


def test_names_keep_their_order_and_come_once():
    assert matching(["head.weight", "head", "0"], NAMES, "model.freeze") == (
        "0.weight",
        "head.bias",
        "head.weight",
    )


def test_a_pattern_for_nothing_is_refused_with_the_nearest_name():
    with pytest.raises(
        ConfigError,
        match=r"model.freeze = 'hed' matches no parameter of the model; did you mean 'head",
    ):
        matching(["0", "hed"], NAMES, "model.freeze")


def test_a_part_of_a_word_is_no_match():
    with pytest.raises(ConfigError, match="'lora' matches no parameter"):
        matching(["lora"], NAMES, "signature.of")
