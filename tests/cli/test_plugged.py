"""Commands that installed packages add, and those whose package is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedclade.cli import main, plugged
from fedclade.core import installed

SOURCE = '''
import typer

from fedclade import ConfigError

def brew(cups: int, sugar: bool = False) -> None:
    """Brew some tea."""
    if cups > 9:
        raise ConfigError(f"cups should be at most 9, got {cups}")
    print(f"{cups} cups of tea{' with sugar' if sugar else ''}")

group = typer.Typer(help="Look after the leaves.")

@group.command()
def dry() -> None:
    """Dry them."""
    print("dried")

@group.command()
def roll() -> None:
    """Roll them."""
    print("rolled")

leaves = 3
'''

ENTRY_POINTS = """\
[fedclade.commands]
brew = tea_commands:brew
leaf = tea_commands:group
spill = tea_commands:nothing
count = tea_commands:leaves
ls = tea_commands:brew
"""

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Call]:
    """Call the command line where a package with commands is installed."""
    (tmp_path / "tea_commands.py").write_text(SOURCE)
    info = tmp_path / "tea-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tea\nVersion: 1.0\nSummary: Everything about tea\n"
    )
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    installed.cache_clear()

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedclade", *arguments])
        code = 0
        try:
            main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    yield call
    installed.cache_clear()
    sys.modules.pop("tea_commands", None)


def test_a_function_is_a_command_with_its_arguments_and_options(call: Call):
    assert call("brew", "2", "--sugar") == (0, "2 cups of tea with sugar\n", "")
    code, out, _ = call("brew", "--help")
    assert code == 0
    assert "Brew some tea." in out
    assert "--no-sugar" in out


def test_an_error_of_fedclade_in_an_added_command_is_one_line(call: Call):
    assert call("brew", "12") == (2, "", "error: cups should be at most 9, got 12\n")


def test_a_typer_app_is_a_group_of_commands(call: Call):
    assert call("leaf", "roll") == (0, "rolled\n", "")
    assert "Dry them." in call("leaf", "--help")[1]


def test_help_lists_added_commands_after_those_of_fedclade(call: Call):
    code, out, _ = call("--help")
    assert code == 0
    assert 0 < out.index("│ data ") < out.index("│ brew ") < out.index("│ leaf ")
    assert out.count("(package tea).") == 4, "also a command that cannot be imported"
    assert "Everything about tea" in out
    assert "tea_commands" not in sys.modules


def test_a_package_is_not_imported_for_other_commands(call: Call):
    assert call("--version")[0] == 0
    assert call("ls", "engines")[0] == 0
    assert "tea_commands" not in sys.modules


def test_no_package_replaces_a_command_of_fedclade(call: Call):
    assert "stacked" in call("ls", "engines")[1]


def test_a_command_that_cannot_be_imported_says_why(call: Call):
    code, _, err = call("spill", "--all")
    assert code == 2
    assert err.startswith(
        "error: command 'spill' of package tea cannot be imported (tea_commands:nothing): module"
    )
    assert err.count("\n") == 1


def test_a_command_that_is_neither_a_function_nor_an_app_is_refused(call: Call):
    code, _, err = call("count")
    assert (code, err) == (
        2,
        "error: the entry point of command 'count' should name a function or a typer.Typer, got 3\n",
    )


@pytest.mark.parametrize("arguments", [(), ("--help",), ("cfl-fig3-theory", "--scale", "smoke")])
def test_without_its_package_reproduce_says_in_one_line_what_to_install(
    call: Call, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
):
    monkeypatch.setattr(plugged, "installed", lambda _: {})
    needed = "needs the package 'fedclade-papers'; install it with: pip install fedclade-papers"
    assert call("reproduce", *arguments) == (2, "", f"error: fedclade reproduce {needed}\n")
    assert "reproduce" not in call("--help")[1]
