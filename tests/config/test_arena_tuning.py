"""The settings of ``studies/arena_tuning.py``, and the choice among them, on scores that are made up."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from fedclade.core import ConfigError

STUDIES = Path(__file__).parents[2] / "studies"


@pytest.fixture
def tuning(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(STUDIES))
    return importlib.import_module("arena_tuning")


def test_every_setting_is_a_config_of_the_arena_with_as_many_steps(tuning):
    """A quarter of 6,000 examples, in batches of 16 in place of 64."""
    (task,) = tuning.tasks(["mnist P(X) 5"], None).values()
    assert (task.top.evaluate_validation, task.local.batch_size) == (True, 64)
    for method, settings in tuning.SETTINGS.items():
        assert len(settings) <= tuning.MOST
        for setting in settings:
            config = tuning.configured(task, method, setting)
            # with lists, as the settings have them
            options = json.loads(json.dumps(config.algorithm))
            assert {**options, **setting, "name": method} == options
            assert (
                config.data["samples_per_client"],
                config.local.batch_size,
                config.top.seed,
            ) == (1_500, 16, 100)


def test_a_setting_that_is_no_config_is_told(tuning):
    (task,) = tuning.tasks(["mnist P(X) 8"], "smoke").values()
    with pytest.raises(ConfigError, match="at most the number of clients, 6, got 8"):
        tuning.configured(task, "ifca", {"clusters": 8})


def test_the_best_mean_over_the_cells_wins_and_the_first_of_equals(tuning):
    scores = {"a": (0.7, 0.6, 0.9), "b": (0.7, 0.8, 0.4)}  # means 0.70, 0.70, 0.65

    def line(number: int, cell: str) -> dict:
        setting = tuning.SETTINGS["ifca"][number]
        return {
            "method": "ifca",
            "setting": setting,
            "cell": cell,
            "validation": scores[cell][number],
            "clusters": 2,
        }

    runs = [line(number, cell) for number in (2, 1, 0) for cell in scores]
    assert tuning.chosen(runs[:-1], ["a", "b"]) == []
    assert tuning.chosen(runs, ["a", "b"]) == ["ifca = { clusters = 4 }"]
    assert tuning.table(runs, ["a", "b"]).row_count == 3
