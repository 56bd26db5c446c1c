"""The ``[aggregate]`` section is checked, wherever it comes from."""

from __future__ import annotations

from typing import Any

import pytest

from fedclade import Aggregation
from fedclade.config import check_config
from fedclade.core import ConfigError


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"rule": "medain"},
            "rule.* should be 'mean' or 'median' or .*'centred_clipping', got 'medain'",
        ),
        (
            {"rule": "median", "byzantine": 0.5},
            "aggregate.byzantine should be at least 0 and below 0.5, got 0.5",
        ),
        (
            {"rule": "median", "byzantine": -0.1},
            "aggregate.byzantine should be at least 0 and below 0.5, got -0.1",
        ),
        ({"mixing": True}, "aggregate.mixing should be false if the rule is 'mean', got True"),
        ({"radius": 0.0}, "aggregate.radius should be greater than 0, or left out, got 0.0"),
        (
            {"largest_weight": 0.5},
            "aggregate.largest_weight should be at least 1, or 'auto', got 0.5",
        ),
        ({"largest_norm": 0}, "aggregate.largest_norm should be at least 1, or 'auto', got 0"),
        ({"clip_above": float("nan")}, "clip_above.* should be .*'auto'.*got nan"),
        ({"clip_above": "no"}, "clip_above.*'no'"),
        ({"ruel": "median"}, "ruel.*did you mean 'rule'"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, Any], told: str):
    with pytest.raises(ConfigError, match=told):
        check_config({"aggregate": given})
    if "ruel" not in given:
        with pytest.raises(ConfigError, match=told):
            Aggregation(**given)


def test_a_config_has_the_section_only_if_it_says_something():
    assert "aggregate" not in check_config({}).as_dict()
    assert "aggregate" not in check_config({"aggregate": {"rule": "mean"}}).as_dict()
    config = check_config({"aggregate": {"rule": "krum", "largest_norm": 3}})
    assert config.as_dict()["aggregate"]["rule"] == "krum"
    assert config.settings.aggregate == Aggregation(rule="krum", largest_norm=3.0)
    assert check_config(config.as_dict()) == config


def test_a_config_that_streams_by_a_rule_is_refused():
    told = "stream = true: aggregate.rule = 'median' needs the updates of single clients; set stream = false"
    with pytest.raises(ConfigError, match=told):
        check_config({"stream": True, "aggregate": {"rule": "median"}})
