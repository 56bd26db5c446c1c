from __future__ import annotations

from dataclasses import fields
from typing import get_type_hints

import pytest

import fedclade
from fedclade import ConfigError, FeSEM, LocalTraining, RunSettings, Signature
from fedclade.runs.settings import RunOptions, settings_from
from tests.tiny import federation_of, linear


def test_options_are_the_fields_of_the_settings():
    """Of the same types; what has a default that is an object may also be None; a task may be a name.

    The option ``trainer`` is a field of the settings of local training.
    """
    hints, options = get_type_hints(RunSettings), get_type_hints(RunOptions)
    assert options.pop("trainer") == get_type_hints(LocalTraining)["trainer"]
    hints["task"] |= str
    assert list(options) == [field.name for field in fields(RunSettings)]
    assert {name: hint | None for name, hint in hints.items()} == {
        name: hint | None for name, hint in options.items()
    }


def test_options_win_over_settings_and_none_is_as_if_left_out():
    settings = RunSettings(rounds=5, seed=3, local=LocalTraining(epochs=2), target=0.5)
    merged = settings_from(settings, {"seed": 4, "local": None, "target": None})
    assert merged == RunSettings(rounds=5, seed=4, local=LocalTraining(epochs=2), target=0.5)
    assert settings_from(None, {}) == RunSettings()


def test_settings_and_options_give_the_same_run():
    given = {
        "rounds": 2,
        "seed": 1,
        "local": LocalTraining(epochs=2),
        "signature": Signature(kind="projected", dim=8),
    }
    runs = [
        fedclade.simulate("cfl", linear(), federation_of([0, 1]), *settings, **options)
        for settings, options in [
            ((RunSettings(**given),), {}),
            ((), given),
            ((RunSettings(rounds=9, seed=1),), given),
        ]
    ]
    assert [run.config for run in runs] == [runs[0].config] * 3
    assert (runs[0].summary["rounds"], runs[0].config["local"]["epochs"]) == (2, 2)


def test_an_unknown_option_is_refused_by_name():
    with pytest.raises(
        TypeError, match="unknown argument of simulate: 'round'; did you mean 'rounds'"
    ):
        fedclade.simulate("fedavg", linear(), federation_of([0, 1]), round=3)  # pyright: ignore[reportCallIssue]


def test_all_that_an_algorithm_cannot_do_is_told_at_once():
    with pytest.raises(
        ConfigError, match=r"(?s)stream = true: FeSEM needs the updates.*signatures of kind 'full'"
    ):
        RunSettings(stream=True).check_algorithm(FeSEM())
