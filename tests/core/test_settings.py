"""Settings as fields of dataclasses."""

from __future__ import annotations

import inspect
import threading
from dataclasses import dataclass, field, fields
from typing import Any

import pytest

from fedclade.core import (
    ConfigError,
    about,
    as_section,
    at_least,
    check_arguments,
    check_settings,
    document_settings,
    greater_than,
    in_range,
    one_of,
    setting,
    setting_defaults,
    settings_of,
    values_of,
    with_settings_of,
)


@document_settings
@dataclass(frozen=True, kw_only=True)
class Wind:
    """Wind of a day.

    Raises
    ------
    ConfigError
        If a value is out of range.
    """

    speed: float = field(metadata=about("Speed in m/s.", at_least(0), key="air.speed"))
    gusts: int | None = setting(None, greater_than(2), doc="Number of gusts.", later=True)
    kind: str = setting("west", one_of("west", "east"), doc="Where it\n    comes from.")
    of: list[int] = setting(factory=list, doc="Hours.", later=True)
    noted: str = ""

    def __post_init__(self) -> None:
        check_settings(self, "wind", ("wind.kind", self.kind, self.speed < 9, "left out in storms"))


@document_settings
@with_settings_of(Wind, "air")
@dataclass(frozen=True, kw_only=True)
class Air:
    """Air."""

    damp: float = setting(0.5, doc="Share of water.")


@with_settings_of(Wind)
@dataclass(frozen=True, kw_only=True)
class Day:
    """A day."""

    kind: str = setting("work", doc="Kind of day.")


def test_all_problems_are_listed_with_keys_ranges_and_values():
    with pytest.raises(ConfigError) as error:
        Wind(speed=-1, gusts=2, kind="up")
    assert str(error.value).splitlines() == [
        "air.speed should be at least 0, got -1",
        "wind.gusts should be greater than 2, got 2",
        "wind.kind should be 'west' or 'east', got 'up'",
    ]
    with pytest.raises(ConfigError, match=r"wind\.kind should be left out in storms, got 'west'"):
        Wind(speed=10)


def test_what_is_left_out_is_in_every_range():
    assert Wind(speed=0).gusts is None


@pytest.mark.parametrize(
    ("interval", "inside", "outside"),
    [
        ("[0, 1]", (0, 0.5, 1), (-0.1, 1.1, float("nan"))),
        ("(0, 1)", (0.5,), (0, 1)),
        ("[0, 1)", (0,), (1,)),
        ("(0, inf)", (1e300,), (0, float("inf"))),
    ],
)
def test_an_interval_has_its_ends_or_not(interval, inside, outside):
    allowed = in_range(interval)
    assert allowed.text == f"in {interval}"
    assert [allowed.holds(value) for value in inside] == [True] * len(inside)
    assert [allowed.holds(value) for value in outside] == [False] * len(outside)
    assert in_range(interval, "a share").text == "a share"


def test_a_malformed_interval_is_a_mistake_of_the_programmer():
    with pytest.raises(
        ValueError, match=r"interval should have a form such as '\[0, 1\)', got '0..1'"
    ):
        in_range("0..1")


def test_the_word_auto_may_be_allowed():
    allowed = at_least(1).or_auto()
    assert allowed.text == "at least 1, or 'auto'"
    assert [allowed.holds(value) for value in ("auto", 1, "often", 0)] == [True, True, False, False]


def test_the_docstring_tells_all_settings_before_its_other_sections():
    assert inspect.getdoc(Wind) == (
        "Wind of a day.\n\nParameters\n----------\nspeed\n    Speed in m/s.\ngusts\n"
        "    Number of gusts.\nkind\n    Where it comes from.\nof\n    Hours.\n\n"
        "Raises\n------\nConfigError\n    If a value is out of range."
    )


def test_only_later_settings_with_their_default_are_not_recorded():
    assert as_section(Wind(speed=1)) == {"speed": 1, "kind": "west", "noted": ""}
    recorded = as_section(Wind(speed=1, gusts=3, of=[4]))
    assert (recorded["gusts"], recorded["of"]) == (3, [4])


def test_what_is_not_recorded_is_not_copied():
    """A user's object in another field, such as a loss with a lock, cannot be copied."""

    @dataclass(frozen=True, kw_only=True)
    class WithLoss(Wind):
        loss: Any = None

    settings = WithLoss(speed=1, loss=threading.Lock())
    assert as_section(settings, Wind) == as_section(Wind(speed=1))


def test_a_section_takes_settings_of_other_classes():
    assert [each.name for each in fields(Air)] == ["damp", "speed"]
    assert Air().speed is None  # pyright: ignore[reportAttributeAccessIssue]
    assert check_arguments("[air]", Air, {"speed": 2}) == {"speed": 2.0}
    assert "speed\n    Speed in m/s." in inspect.getdoc(Air)
    assert [each.name for each in fields(Day)] == ["kind", "speed", "gusts", "of"]
    assert Day().kind == "work"
    assert values_of(Day(), Air) == {"speed": None}


def test_other_fields_are_no_settings():
    assert list(settings_of(Wind)) == ["speed", "gusts", "kind", "of"]
    assert setting_defaults(Wind) == {"gusts": None, "kind": "west", "of": []}
    assert settings_of(int) == {}
