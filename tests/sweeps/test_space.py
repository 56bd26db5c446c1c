"""What follows ``--over``: ranges, lists, and what is wrong with them."""

from __future__ import annotations

import re

import pytest

from fedclade import ConfigError
from fedclade.config import check_config
from fedclade.sweeps import Parameter, parse_over
from fedclade.sweeps.space import check_values, fitted


@pytest.mark.parametrize(
    ("text", "parameter"),
    [
        ("local.lr=0.01..0.3(log)", Parameter("local.lr", 0.01, 0.3, log=True)),
        ("local.lr=1e-3..1", Parameter("local.lr", 0.001, 1.0)),
        ("local.epochs = 1..5", Parameter("local.epochs", 1, 5)),
        ("model.name=mlp,cnn", Parameter("model.name", values={"mlp": "mlp", "cnn": "cnn"})),
        ("local.lr=0.1,1", Parameter("local.lr", values={"0.1": 0.1, "1": 1})),
        (
            "algorithm.eps1='auto',0.4",
            Parameter("algorithm.eps1", values={"auto": "auto", "0.4": 0.4}),
        ),
        ("m.hidden=[8,8],[4]", Parameter("m.hidden", values={"[8, 8]": [8, 8], "[4]": [4]})),
    ],
)
def test_a_range_or_a_list_of_values(text, parameter):
    assert parse_over([text]) == [parameter]


def test_a_mapping_has_texts_or_lists():
    found = parse_over({"local.lr": "0.1..1", "local.epochs": [1, 5]})
    assert found == [
        Parameter("local.lr", 0.1, 1.0),
        Parameter("local.epochs", values={"1": 1, "5": 5}),
    ]


@pytest.mark.parametrize(
    ("over", "why"),
    [
        ([], "a sweep needs at least one setting to vary; give --over, such as local.lr="),
        (["local.lr"], "--over takes key=low..high or key=a,b,c, such as local.lr=0.01..0.3(log)"),
        (["local.lr=1..0.5"], "local.lr=1..0.5: low should be less than high, got 1.0 and 0.5"),
        (
            ["local.lr=0..1(log)"],
            "a logarithmic range should begin above 0, got 0; leave out (log)",
        ),
        (["local.lr=a..1"], "low should be a number, got 'a'"),
        (["local.lr=0..inf"], "high should be a number, got 'inf'"),
        (["local.lr=0.1..1(ln)"], "a range should be low..high or low..high(log)"),
        (["local.lr=0.1"], "give at least 2 different values, key=a,b,c, or a range"),
        (
            ["local.lr=1..2", "local.lr=3..4"],
            "--over local.lr is given more than once; give each key once",
        ),
        (
            ["seed=1..9"],
            "seed cannot be varied; use --seeds to set the number of runs of each trial",
        ),
    ],
)
def test_what_is_wrong_is_named(over, why):
    with pytest.raises(ConfigError, match=re.escape(why)):
        parse_over(over)


def check(overrides):
    key, _, value = overrides[0].partition("=")
    section, name = key.split(".")
    check_config({section: {name: float(value) if "." in value else int(value)}})


def test_whole_ends_make_a_range_of_floats_where_the_config_has_floats():
    lr, epochs, clip = fitted(
        parse_over(["local.lr=1..2", "local.epochs=1..2", "local.clip_norm=1..5"]), check
    )
    assert (lr.whole, epochs.whole, clip.whole) == (False, True, False)


def test_the_config_has_to_take_the_ends():
    with pytest.raises(ConfigError) as caught:
        check_values(parse_over(["local.lrr=0.5..1.5", "local.epochs=0..3"]), check)
    first, second = str(caught.value).splitlines()
    assert first.startswith(
        "--over local.lrr=0.5: unknown key of [local]: 'lrr'; did you mean 'lr'?"
    )
    assert second == "--over local.epochs=0: local.epochs should be greater than 0, got 0"
