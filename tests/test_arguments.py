"""Options are checked against the signature of what takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from fedclade.arguments import check_arguments, defaults, known_arguments
from fedclade.errors import ConfigError, MissingExtraError
from fedclade.extras import import_extra


def function(
    pool: str,
    *,
    alpha: float = 1.0,
    count: int | None = None,
    task: Literal["a", "b"] = "a",
    name: str = "",
    on: bool = True,
    rounds: tuple[int, ...] = (),
    eps: float | Literal["auto"] = "auto",
) -> None: ...


def open_ended(width: int, **anything: Any) -> None: ...


@dataclass(kw_only=True)
class Hyper:
    lr: float = 0.1


@pytest.mark.parametrize(
    ("given", "fitted"),
    [
        ({}, {}),
        ({"alpha": 2}, {"alpha": 2.0}),
        ({"count": None}, {"count": None}),
        ({"count": 3}, {"count": 3}),
        ({"task": "b"}, {"task": "b"}),
        ({"rounds": [1, 2]}, {"rounds": (1, 2)}),
        ({"eps": "auto"}, {"eps": "auto"}),
        ({"eps": 1}, {"eps": 1.0}),
    ],
)
def test_accepts_what_the_function_takes_and_gives_it_its_type(given: dict[str, Any], fitted: dict[str, Any]):
    result = check_arguments("it", function, given)
    assert result == fitted
    assert [type(value) for value in result.values()] == [type(value) for value in fitted.values()]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"alhpa": 1}, "unknown key of it: 'alhpa'; did you mean 'alpha'"),
        ({"pool": "x"}, "unknown key of it: 'pool'"),
        ({"alpha": "x"}, "alpha of it should be a number, got 'x'"),
        ({"alpha": True}, "alpha of it should be a number, got True"),
        ({"count": 0.5}, "count of it should be a whole number or left out, got 0.5"),
        ({"task": "c"}, "task of it should be 'a' or 'b', got 'c'"),
        ({"name": 1}, "name of it should be a string, got 1"),
        ({"on": "x"}, "on of it should be true or false, got 'x'"),
        ({"rounds": [1, "x"]}, "rounds of it should be a list, each of it a whole number, got [1, 'x']"),
        ({"eps": "atuo"}, "eps of it should be a number or 'auto', got 'atuo'"),
    ],
)
def test_names_what_is_wrong(given: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as caught:
        check_arguments("it", function, given)
    assert message in str(caught.value)


def test_reports_every_problem_at_once():
    with pytest.raises(ConfigError) as caught:
        check_arguments("it", function, {"alpha": "x", "beta": 1})
    assert len(str(caught.value).splitlines()) == 2


def test_options_of_several_takers_are_taken_together():
    assert set(known_arguments((function, Hyper), besides=("on",))) == {
        *("alpha", "count", "task", "name", "rounds", "eps", "lr")
    }
    assert check_arguments("both", (function, Hyper), {"alpha": 1, "lr": 2}) == {"alpha": 1.0, "lr": 2.0}
    assert defaults(Hyper) == {"lr": 0.1}


def test_positional_parameters_are_options_where_that_is_asked_for():
    assert set(known_arguments(open_ended)) == set()
    assert set(known_arguments(open_ended, positional=True)) == {"width"}


def test_a_function_that_takes_anything_is_given_anything():
    assert check_arguments("it", open_ended, {"depth": "x"}, positional=True) == {"depth": "x"}


def test_missing_extra_says_what_to_install():
    with pytest.raises(MissingExtraError, match=r"doing this needs the package 'no-such'; .*fedclade\[data\]"):
        import_extra("no_such_module", "no-such", "data", "doing this")
