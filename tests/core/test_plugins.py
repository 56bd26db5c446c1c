"""Names of fedclade's own, of installed packages, and of a user's modules."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from fedclade.core import (
    ConfigError,
    check_function,
    imported,
    importing_only,
    installed,
    loaded,
    name_of,
    named,
    plugins,
    summary_of,
)

OWN = """
import sys

answer = 42

class Method:
    "A method. It does things."

    class Inner:
        pass

def run(a, b, *, c=1):
    return a
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's modules, and a package that registers names of them."""
    (tmp_path / "users_own.py").write_text(OWN)
    (tmp_path / "users_exit.py").write_text("import sys\nsys.exit(3)")
    (tmp_path / "users_key.py").write_text("{}['a']")
    info = tmp_path / "users_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: users-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[fedclade.algorithms]\nmethod = users_own:Method\nbroken = users_own:nothing\ncfl = users_own:run\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    installed.cache_clear()
    yield tmp_path
    installed.cache_clear()
    for name in ("users_own", "users_exit", "users_key"):
        sys.modules.pop(name, None)


def test_a_name_is_a_built_in_then_an_entry_point_then_imported():
    import users_own  # pyright: ignore[reportMissingImports]

    assert named("algorithms", "cfl", {"cfl": 1}, "algorithm") == 1, (
        "no package replaces what fedclade has"
    )
    assert named("algorithms", "method", {"cfl": 1}, "algorithm") is users_own.Method
    assert named("algorithms", "users_own:Method.Inner", {}, "algorithm") is users_own.Method.Inner
    with pytest.raises(ConfigError, match="unknown model 'method'"):
        named("models", "method", {"mlp": 1}, "model")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "methd",
            "unknown algorithm 'methd'; did you mean 'method'? (known: broken, cfl, method); for an object of your own",
        ),
        (3, "unknown algorithm 3 (known: "),
        (
            "broken",
            "algorithm 'broken' of package users-package cannot be imported (users_own:nothing): module",
        ),
        ("users_own:Methd", "module 'users_own' has no attribute 'Methd'; did you mean 'Method'?"),
        ("users_own:", "module 'users_own' has no attribute ''"),
        ("users_exit:run", "algorithm 'users_exit:run' cannot be imported: SystemExit: 3"),
        ("users_key:run", "cannot be imported: KeyError: 'a'"),
        ("no_such_module:run", "cannot be imported: No module named 'no_such_module'; run from"),
        (".users_own:run", "cannot be imported: TypeError: "),
    ],
)
def test_what_cannot_be_had_by_its_name_is_said_in_one_line(name: object, told: str):
    with pytest.raises(ConfigError, match=re.escape(told)) as error:
        named("algorithms", name, {"cfl": 1}, "algorithm")
    assert "\n" not in str(error.value)


def test_a_name_is_found_for_what_can_be_named_again():
    import users_own  # pyright: ignore[reportMissingImports]

    class Local:
        pass

    def known(thing: object) -> str:
        return name_of("algorithms", thing, {"ours": users_own.Method.Inner})

    assert known(users_own.Method.Inner) == "ours"
    assert known(users_own.Method) == "method"

    assert known(Local) == "Local"
    main = type("Mine", (), {"__module__": "__main__"})
    assert known(main) == "Mine"
    assert known(type("Gone", (), {"__module__": "users_own"})) == "Gone"


def test_a_name_that_a_package_shares_with_fedclade_is_not_given():
    import users_own  # pyright: ignore[reportMissingImports]

    assert name_of("algorithms", users_own.run, {"cfl": 1}) == "users_own:run"
    assert name_of("algorithms", users_own.run, {}) == "cfl"


def test_names_that_others_wrote_are_imported_only_if_they_are_allowed(module: Path):
    (module / "users_danger.py").write_text("raise AssertionError('imported')")
    told = "model 'users_danger:f' is not imported, because the server chose the name, "
    with importing_only(["users_own:run"]):
        assert imported("users_own:run", "model").__name__ == "run"
        assert named("algorithms", "method", {}, "algorithm").__name__ == "Method", (
            "its owner installed the package"
        )
        with pytest.raises(ConfigError, match=re.escape(told)):
            imported("users_danger:f", "model")
        with (
            importing_only([]),
            pytest.raises(ConfigError, match="is not imported, because the server"),
        ):
            imported("users_own:run", "model")
    with pytest.raises(ConfigError, match="AssertionError: imported"):
        imported("users_danger:f", "model")


def test_an_entry_point_without_a_package_is_said_to_be_broken_too():
    point = EntryPoint("x", "users_own:nothing", "fedclade.data")
    with pytest.raises(
        ConfigError, match=r"data source 'x' of a package cannot be imported \(users_own:nothing\)"
    ):
        loaded(point, "data source")


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (42, "partition 'm:f' should name a function that returns Parts, got 42"),
        (
            lambda pool: 1,
            "partition 'm:f' should have the parameters (pool, clients), and options after a *, got (pool)",
        ),
        (
            lambda pool, clients, seed: 1,
            "partition 'm:f' should have the parameters (pool, clients), and options after a *, got (p",
        ),
        (dict.fromkeys, None),
    ],
)
def test_a_function_is_checked_for_how_it_is_called(found: object, told: str | None):
    if told is None:
        assert check_function(found, "partition 'm:f'", "Parts") is found
        return
    with pytest.raises(ConfigError, match=re.escape(told)):
        check_function(found, "partition 'm:f'", "Parts", ("pool", "clients"))


def test_functions_may_have_options_and_take_whatever_comes():
    for found in (lambda a, b, *, c: 1, lambda *rest: 1, lambda a, b, c=3: 1):
        assert check_function(found, "partition 'm:f'", "Parts", ("pool", "clients")) is found


def test_a_line_about_a_thing_is_its_summary_or_the_first_of_its_docstring():
    class Told:
        """One line.

        And another.
        """

        summary = ""

    assert summary_of(Told) == "One line"
    Told.summary = "in short"
    assert summary_of(Told) == "in short"
    assert plugins.KINDS[0] == "algorithms"
