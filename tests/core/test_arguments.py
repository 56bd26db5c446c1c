"""Options are checked against the signature of what takes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pytest

from fedclade.core import check_extra, import_extra
from fedclade.core.arguments import check_arguments, checked, defaults, is_choice, known_arguments
from fedclade.core.errors import ArgumentError, ConfigError, MissingExtraError


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
def test_accepts_what_the_function_takes_and_gives_it_its_type(
    given: dict[str, Any], fitted: dict[str, Any]
):
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
        (
            {"rounds": [1, "x"]},
            "rounds of it should be a list with entries that are each a whole number, got [1, 'x']",
        ),
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
    assert check_arguments("both", (function, Hyper), {"alpha": 1, "lr": 2}) == {
        "alpha": 1.0,
        "lr": 2.0,
    }
    assert defaults(Hyper) == {"lr": 0.1}


def test_positional_parameters_are_options_where_that_is_asked_for():
    assert set(known_arguments(open_ended)) == set()
    assert set(known_arguments(open_ended, positional=True)) == {"width"}


def test_types_that_are_not_those_of_options_are_not_looked_up():
    """Looking them up could import torch."""

    def train(model: Unknown, *, steps: int = 1) -> Unknown:  # type: ignore[name-defined]  # noqa: F821
        return model

    assert check_arguments("[x]", train, {"steps": 3}) == {"steps": 3}
    with pytest.raises(ConfigError, match=r"steps of \[x\] should be a whole number, got 'many'"):
        check_arguments("[x]", train, {"steps": "many"})


def test_a_function_may_wrap_an_object():
    class Train:
        def __call__(self, steps: int = 1) -> int:
            return steps

    @wraps(Train())
    def train(*, steps: int = 1) -> int:
        return steps

    train.__annotations__ = {"steps": int}
    assert check_arguments("[x]", train, {"steps": 2}, positional=True) == {"steps": 2}


def test_a_function_that_takes_anything_is_given_anything():
    assert check_arguments("it", open_ended, {"depth": "x"}, positional=True) == {"depth": "x"}


class Kind:
    """A class of its own."""


@checked("anything")
def door(
    kind: Kind,
    on_round: Callable[[int], None] | None = None,
    *,
    count: int = 1,
    anything: int = 0,
    **more: Any,
):
    return kind, on_round, count, anything, more


@checked()
@dataclass(frozen=True, kw_only=True)
class Setting:
    lr: float = 0.1
    rounds: tuple[int, ...] = ()
    on: bool | Literal["auto"] = "auto"


def test_what_fits_is_let_in_as_pythons_own():
    kind = Kind()
    assert door(kind, print, count=np.int64(3), anything="x", further=1) == (
        kind,
        print,
        3,
        "x",
        {"further": 1},
    )
    made = Setting(lr=np.float32(0.5), rounds=[np.int64(1), 2], on=np.bool_(True))
    assert made == Setting(lr=0.5, rounds=(1, 2), on=True)
    assert [type(value) for value in (made.lr, made.rounds[0], made.on)] == [float, int, bool]
    assert replace(made, lr=1).lr == 1.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: door(3), "kind of door should be of type Kind, got 3"),
        (lambda: door(Kind(), "x"), "on_round of door should be a function or left out, got 'x'"),
        (lambda: door(Kind(), count="5"), "count of door should be a whole number, got '5'"),
        (
            lambda: door(Kind(), count=np.float64(5)),
            "count of door should be a whole number, got np.float64(5.0)",
        ),
        (lambda: door(Kind(), count=True), "count of door should be a whole number, got True"),
        (lambda: Setting(lr=None), "lr of Setting should be a number, got None"),
        (
            lambda: Setting(rounds=(1, None)),
            "rounds of Setting should be a list with entries that are each a whole number, got (1, None)",
        ),
        (
            lambda: Setting(on=np.arange(2)),
            "on of Setting should be true or false or 'auto', got array([0, 1])",
        ),
    ],
)
def test_what_does_not_fit_is_refused_at_the_door(call: Callable[[], Any], message: str):
    with pytest.raises(ConfigError) as caught:
        call()
    assert str(caught.value) == message


def test_all_that_does_not_fit_is_told_at_once_and_not_at_length():
    with pytest.raises(ConfigError) as caught:
        door("x" * 1000, 2)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) < 300


def test_arguments_that_are_missing_or_unknown_are_named_and_stay_type_errors():
    with pytest.raises(
        ArgumentError, match=r"^door: missing a required argument: 'kind'$"
    ) as caught:
        door()
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, ConfigError)
    with pytest.raises(
        ArgumentError, match=r"^unknown argument of Setting: 'lrr'; did you mean 'lr'\? \(known: "
    ):
        Setting(lrr=1)
    with pytest.raises(ArgumentError, match=r"^Setting: too many positional arguments$"):
        Setting(*range(20))


@checked()
def entries(
    table: Mapping[int, str] | None = None, texts: Sequence[str] = (), where: str | Path = "."
) -> str:
    return "right"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"table": {1: "a", "x": "b"}},
            "each key of table of entries should be a whole number, got 'x'",
        ),
        ({"table": {1: "a", 2: None}}, "table[2] of entries should be a string, got None"),
        ({"texts": ["a", 3]}, "texts[1] of entries should be a string, got 3"),
        (
            {"texts": range(3)},
            "texts of entries should be a list with entries that are each a string, got range(0, 3)",
        ),
        (
            {"texts": "abc"},
            "texts of entries should be a list with entries that are each a string, got 'abc'",
        ),
        (
            {"where": "a\0b"},
            "where of entries should be a valid file path, got 'a\\x00b': the path contains a null",
        ),
        (
            {"where": "\ud800"},
            "where of entries should be a valid file path, got '\\ud800': the path contains",
        ),
        (
            {"where": "runs/" + "x" * 300},
            ": a name in the path has 300 bytes, but file systems allow at most 255",
        ),
        (
            {"where": Path("x/" * 3000)},
            ": the path has 5,999 bytes, but file systems allow at most 4,095",
        ),
    ],
)
def test_entries_of_tables_and_lists_and_paths_are_checked_in_a_call(given, told):
    with pytest.raises(ConfigError) as caught:
        entries(**given)
    assert told in str(caught.value)
    assert entries({1: "a", np.int64(2): "b"}, ("a", "b"), Path("x")) == "right"


def test_what_is_checked_looks_as_before():
    assert list(inspect.signature(Setting).parameters) == ["lr", "rounds", "on"]
    assert check_arguments("it", Setting, {"lr": 1}) == {"lr": 1.0}
    assert door.__name__ == "door"


def test_missing_extra_says_what_to_install():
    with pytest.raises(
        MissingExtraError, match=r"doing this needs the package 'no-such'; .*fedclade\[data\]"
    ):
        import_extra("no_such_module", "no-such", "data", "doing this")
    with pytest.raises(MissingExtraError, match="doing this needs the package 'no-such'"):
        check_extra("no_such_module", "no-such", "data", "doing this")
    check_extra("json", "no-such", "data", "doing this")


class Own(Protocol):
    """A user's own function."""

    def __call__(self, x: int) -> int: ...


@checked()
def applied(function: Own | None = None) -> str:
    return "right"


def test_a_protocol_of_a_call_takes_functions():
    assert applied(lambda x: x) == applied() == "right"
    with pytest.raises(
        ConfigError, match=r"^function of applied should be a function or left out, got 3$"
    ):
        applied(3)


@pytest.mark.parametrize("value", ["sudden", 3, ["examples"]])
def test_a_section_that_is_no_table_is_refused(value):
    with pytest.raises(ConfigError) as refused:
        check_arguments("[data.drift]", function, value)
    message = f"[data.drift] should be a table of settings with their names, got {value!r}"
    assert str(refused.value) == message


def test_only_the_texts_of_a_literal_are_choices():
    kinds = Literal["a", "b"]
    assert is_choice("a", kinds)
    for other in ("c", "", 1, None, ["a"], np.array(["a", "b"])):
        assert not is_choice(other, kinds)


class Factory:
    def __call__(self, *, width: int = 3) -> None: ...

    def make(self, *, width: int = 3) -> None: ...


@pytest.mark.parametrize("taker", [partial(function, "pool"), Factory(), Factory().make])
def test_options_of_all_that_can_be_called_are_checked(taker: Callable[..., None]):
    name = "count" if "count" in known_arguments(taker) else "width"
    assert check_arguments("[model]", taker, {name: 4}) == {name: 4}
    with pytest.raises(ConfigError, match=rf"{name} of \[model\] should be a whole number"):
        check_arguments("[model]", taker, {name: "wide"})


def undefined(*, width: NoSuchType) -> None: ...  # type: ignore[name-defined]  # noqa: F821


def test_types_that_cannot_be_read_are_an_error_of_the_section():
    with pytest.raises(ConfigError) as refused:
        check_arguments("[model]", undefined, {"width": 4})
    assert str(refused.value) == (
        "[model]: the types of the arguments of undefined cannot be read: NameError: name "
        "'NoSuchType' is not defined; import these types also when the program runs, or leave the "
        "annotations out"
    )
