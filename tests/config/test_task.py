"""The sections ``[task]`` and ``[target]``."""

from __future__ import annotations

from typing import Any

import pytest

from fedclade import ConfigError
from fedclade.config import check_config


def test_a_task_and_its_target_reach_the_settings():
    section = {"name": "binary", "metrics": ["auroc", "f1"], "class_weights": [1, 3]}
    config = check_config({"task": section, "target": {"f1": 0.8}})
    assert config.settings.task.described == {**section, "loss": None}
    assert config.settings.target == {"f1": 0.8}
    assert check_config(config.as_dict()).settings.task == config.settings.task


def test_without_a_section_the_data_says():
    config = check_config({})
    assert config.settings.task.described["name"] is None
    assert "task" not in config.as_dict()


def test_all_that_is_wrong_is_said_at_once():
    section: dict[str, Any] = {
        "loss": "mes",
        "metrics": ["acuracy", "mae"],
        "class_weights": "even",
    }
    with pytest.raises(ConfigError) as caught:
        check_config({"rounds": -1, "task": section, "target": {"mae": "low"}})
    told = [
        "mae of [target] should be a number, got 'low'",
        "rounds should be at least 0, got -1",
        "task.class_weights should be 'balanced' or a list of numbers, got 'even'",
        "unknown loss in [task]: 'mes'; did you mean 'mse'?",
        "unknown metric in [task]: 'acuracy'; did you mean 'accuracy'?",
    ]
    for line, expected in zip(sorted(str(caught.value).splitlines()), told, strict=True):
        assert line.startswith(expected)


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"nmae": "binary"}, "unknown key of [task]: 'nmae'; did you mean 'name'?"),
        (
            {"metrics": "auroc"},
            "metrics of [task] should be a list with entries that are each a string, got 'auroc'",
        ),
        ({"class_weights": [1, "x"]}, "class_weights of [task] should be a string, or a list"),
        ({"name": "binary", "metrics": ["r2"]}, "in task.metrics, 'r2' does not fit a binary task"),
    ],
)
def test_a_section_that_is_wrong(section: dict[str, Any], told: str):
    with pytest.raises(ConfigError) as caught:
        check_config({"task": section})
    assert told in str(caught.value)
