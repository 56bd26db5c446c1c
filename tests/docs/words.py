"""The commands that pages show: of each first word, how it is checked without running it."""

from __future__ import annotations

import ast
import io
import re
import shutil
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from fedclade.cli import app
from fedclade.cli.example import EXAMPLES
from fedclade.config import (
    Building,
    check_config,
    find_config,
    find_configs,
    is_scenario,
    read_config,
    read_scenarios,
)
from fedclade.config.toml_files import apply_overrides
from fedclade.report import cite_name
from fedclade_papers import EXPERIMENTS
from tests.docs.blocks import ROOT

LET_THROUGH = {
    *("cat", "cd", "chmod", "cp", "curl", "echo", "export", "mkdir", "sleep", "tail"),
    *("openssl", "pytest", "ray", "scontrol", "sed", "sh", "ssh", "ssh-keygen", "twine"),
}
"""Words of other programs, which no test knows the options of."""

INSTALLED = {"build", "flwr", "twine"}
"""What pip installs besides fedclade and folders."""

OURS = {"fedclade": ROOT, "fedclade-papers": ROOT / "packages/fedclade-papers"}
"""The folder of what pip installs of this repository."""

BEFORE_OTHERS = {"nohup", "srun", "sudo"}
"""Words that run the command behind their own options."""

PLACEHOLDER = re.compile(r"[A-Z_]+|.*\$.*|(?!/)(?!.*benchmarks/|.*examples/).*\.toml")
"""What stands for something of the reader's: ``CONFIG``, ``$name-digits``, ``my.toml``."""


def check_command(command: Sequence[str]) -> None:
    """Check the words of a command."""
    if command[0] in BEFORE_OTHERS:
        known = [k for k, word in enumerate(command) if word in CHECKS or word in LET_THROUGH]
        assert known, f"{command[0]} runs no command that tests/docs/words.py knows"
        command = command[known[0] :]
    word, *arguments = command
    if word in LET_THROUGH:
        return
    word = Path(word).name
    assert word in CHECKS, (
        f"tests/docs/words.py does not know the command {word!r}: give it a check in CHECKS, or a place in LET_THROUGH"
    )
    CHECKS[word](arguments)


def parsed(arguments: Sequence[str]) -> tuple[str, Mapping[str, Any]]:
    """Return the command and the parameters that the command line itself reads from its arguments."""
    command = typer.main.get_command(app)
    path, rest, context = "", list(arguments), None
    try:
        while isinstance(command, click.Group):
            context = command.make_context(path or "fedclade", rest, parent=context)
            name, command, rest = command.resolve_command(
                context, [*context._protected_args, *context.args]
            )
            assert command is not None
            path = f"{path} {name}".strip()
        return path, command.make_context(path, rest, parent=context).params
    except click.exceptions.Exit:  # --help and --version
        return path, {}
    except click.ClickException as error:
        raise AssertionError(f"fedclade {' '.join(arguments)}: {error.format_message()}") from error


def check_fedclade(arguments: Sequence[str]) -> None:
    """Check the options and arguments, and the configs and names that these stand for."""
    command, given = parsed(arguments)
    changes = [*(given.get("override") or [])]
    changes += [
        f"{key}={given[key]}" for key in ("seed", "rounds", "engine") if given.get(key) is not None
    ]
    if command in ("data build", "data schema"):
        shutil.copytree(EXAMPLES / "hospitals", "hospitals", dirs_exist_ok=True)
        Building.read(given["source"], changes)
    elif command in ("run", "validate", "sweep"):
        check_settings(given["config"], changes)
    elif command == "compare":
        for name in given["configs"]:
            check_settings(name, changes, given["scale"])
    elif command == "cite":
        if not PLACEHOLDER.fullmatch(given["name"]):  # or it stands for a run folder
            cite_name(given["name"])
    elif command == "reproduce":
        unknown = {*(given["names"] or [])} - {*EXPERIMENTS, "all"}
        assert not unknown, f"there is no experiment {unknown}"


def check_settings(name: str, changes: Sequence[str], scale: str | None = None) -> None:
    """Check a config with what overrides it, or these alone if the config is the reader's own."""
    if PLACEHOLDER.fullmatch(name) and not Path(name).is_file():
        raw: dict[str, Any] = {"data": {"name": "digits", "clients": 40}}
        apply_overrides(raw, changes)
        check_config(raw)
        return
    for path in (
        find_configs(name) if scale is not None or not Path(name).suffix else [find_config(name)]
    ):
        check_file(path, tuple(changes), scale)


def check_file(path: Path, changes: tuple[str, ...], scale: str | None) -> None:
    """Check a file, and one of the repository, of which several pages tell, once."""
    (check_once if path.resolve().is_relative_to(ROOT) else read_all)(
        path.resolve(), changes, scale
    )


def read_all(path: Path, changes: tuple[str, ...], scale: str | None) -> None:
    """Read the configs of a file."""
    if is_scenario(path):
        read_scenarios(path, changes, scale)
    else:
        read_config(path, changes)


check_once = cache(read_all)


def check_make(arguments: Sequence[str]) -> None:
    """Check that there are the targets, and that the file uses the variables."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for argument in arguments:
        name, is_set, _ = argument.partition("=")
        pattern = rf"\$\((?:or \$\()?{name}\)" if is_set else rf"^{name}:"
        found = re.search(pattern, makefile, flags=re.MULTILINE) or (
            is_set and f"{name} ?=" in makefile
        )
        assert found, f"the Makefile has no {name}"


def check_python(arguments: Sequence[str]) -> None:
    """Check the code, or that there is such a module, or a script that knows all the options."""
    if arguments[0] == "-c":
        compile(arguments[1], "python -c", "exec")
    elif arguments[0] == "-m" and arguments[1] == "pip":
        check_pip(arguments[2:])
    elif arguments[0] == "-m" and arguments[1] == "fedclade":
        check_fedclade(arguments[2:])
    elif arguments[0] == "-m":
        assert find_spec(arguments[1]), f"there is no module {arguments[1]}"
    else:
        script = ROOT / arguments[0]
        assert script.is_file(), f"there is no {arguments[0]}"
        known = options_of(script)
        for option in options_in(arguments):
            assert option in known, f"{arguments[0]} knows no {option}"


def options_in(arguments: Sequence[str]) -> list[str]:
    return [argument.partition("=")[0] for argument in arguments if re.match(r"--?[a-z]", argument)]


def options_of(script: Path, seen: frozenset[Path] = frozenset()) -> set[str]:
    """Return all options that a script may read: its own, and those of the modules beside it that it imports."""
    tree = ast.parse(script.read_text(encoding="utf-8"))
    found = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and str(node.value).startswith("--")
    }
    names = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    names |= {
        node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
    }
    for other in {script.with_name(f"{name}.py") for name in names} - seen:
        if other.is_file():
            found |= options_of(other, seen | {script, other})
    return found


def check_pip(arguments: Sequence[str]) -> None:
    """Check that there is what is installed: fedclade or the package of a folder, and its extras."""
    for before, argument in pairwise(arguments):
        name, _, extras = argument.partition("[")
        if name in INSTALLED or name.startswith("-"):
            continue
        if before in ("-c", "--constraint"):
            assert (ROOT / name).is_file(), f"there is no {name}"
            continue
        folder = OURS.get(name, Path(name))
        here = (
            folder / "pyproject.toml"
        ).is_file()  # else it is of the repository, where the reader is
        file = (folder if here else ROOT / folder) / "pyproject.toml"
        assert file.is_file(), (
            f"{argument} is neither fedclade nor a folder with a package, nor in tests/docs/words.py"
        )
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        unknown = set(extras.rstrip("]").split(",")) - {
            "",
            *project.get("optional-dependencies", ()),
        }
        assert not unknown, f"{file} has no extras {unknown}"


def check_flower(word: str) -> Callable[[Sequence[str]], None]:
    """Return the check of a program of Flower's: its own help has all the options, and every command."""

    def check(arguments: Sequence[str]) -> None:
        (program,) = entry_points(group="console_scripts", name=word)
        commands = (
            list(arguments[: 2 if arguments[0] in ("supernode", "federation") else 1])
            if word == "flwr"
            else []
        )
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as heard:
            patch.setenv("COLUMNS", "200")
            patch.setattr(sys, "argv", [word, *commands, "--help"])
            with pytest.raises(SystemExit) as left:
                program.load()()
        assert not left.value.code, f"{word} has no command {' '.join(commands)}"
        known = set(re.findall(r"--[a-z][a-z0-9-]*", heard.getvalue()))
        for option in options_in(arguments):
            assert option in known, f"{word} knows no {option}"

    return check


def check_docker(arguments: Sequence[str]) -> None:
    """Check that the files that are named are there."""
    for option, name in pairwise(arguments):
        if option in ("-f", "--file"):
            assert (ROOT / name).is_file(), f"there is no {name}"


CHECKS: Mapping[str, Callable[[Sequence[str]], None]] = {
    "docker": check_docker,
    "fedclade": check_fedclade,
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
    **{
        word: check_flower(word)
        for word in ("flwr", "flower-superexec", "flower-superlink", "flower-supernode")
    },
}
