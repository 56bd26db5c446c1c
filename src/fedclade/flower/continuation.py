"""Continuation of a finished or interrupted run of a network by ``flwr run``.

Only a ServerApp can reach the clients of a network, and only the command ``flwr`` starts a
ServerApp. :func:`continue_run` calls this command with the settings of the run's folder, so that
the run continues after its last checkpoint.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedclade.core import ConfigError, RunError, flat
from fedclade.flower.from_config import RunConfig
from fedclade.runs import is_finished, read_run_config

_MAY_DIFFER = ("engine", "stream", "network.out", "network.finish", "rounds")
"""Keys of a run config that are not taken from the run's folder.

The first two are recorded as they were chosen for ``auto``; the others are set for the
continuation.
"""


def continue_run(folder: Path, app: Path, rounds: int | None, connection: str | None) -> None:
    """Start the ServerApp of a run again, and wait until the run has ended.

    The log of the ServerApp is shown.

    Parameters
    ----------
    folder
        Folder of the run, on the machine of the ServerApp.
    app
        Folder of the Flower app that began the run, with its ``pyproject.toml``.
    rounds
        New total number of rounds; None for the number in the run's config.
    connection
        Name of the SuperLink in Flower's ``config.toml``; None for Flower's default.

    Raises
    ------
    ConfigError
        If the app has no readable run config, or its run config lacks a key that the continued run
        needs.
    RunError
        If ``flwr`` cannot be started, or the run has not finished.
    """
    settings = continued_settings(folder, app, rounds)
    command = [_find_flwr(), "run", str(app)]
    if connection is not None:
        command.append(connection)
    with TemporaryDirectory() as temporary:
        # A file, since the option's own syntax has no quotes inside of texts.
        file = Path(temporary) / "settings.toml"
        file.write_text(as_toml(settings), encoding="utf-8")
        command += ["--run-config", str(file), "--stream"]
        try:
            code = subprocess.run(command, check=False).returncode
        except OSError as error:
            raise RunError(
                f"cannot start {command[0]}: {error}; install Flower with: pip install "
                "fedclade[flower]"
            ) from error
    # The exit status of `flwr run --stream` does not show whether the ServerApp has succeeded.
    total = settings["rounds"]
    if code != 0 or not is_finished(folder) or read_run_config(folder).get("rounds") != total:
        raise RunError(
            f"the run in {folder} has not reached the end of {total} rounds: `flwr run {app}` ended "
            f"with exit status {code}; see its log above, and repeat the command to continue"
        )


def continued_settings(folder: Path, app: Path, rounds: int | None) -> dict[str, Any]:
    """Return the keys of a run config that continue a run, as ``SECTION.KEY`` with values.

    These are the number of rounds, the path of the folder, and all settings in which the run
    differs from the run config in the app's ``pyproject.toml``.

    Parameters
    ----------
    folder, app, rounds
        See :func:`continue_run`.
    """
    noted = flat(read_run_config(folder))
    file = app / "pyproject.toml"
    in_app = _read_app_config(file)
    of_app = flat(RunConfig.read(in_app).as_dict())
    settings: dict[str, Any] = {
        "rounds": noted["rounds"] if rounds is None else rounds,
        "network.out": str(folder.resolve()),
    }
    for key in settings:
        if key not in in_app:
            section, _, name = key.rpartition(".")
            table = f"[tool.flwr.app.config{'.' + section if section else ''}]"
            raise ConfigError(
                f"{file} has no key {name} in {table}, and `flwr run` can change only keys that "
                f"are listed there; add a line: {name} = {json.dumps(settings[key])}"
            )
    differing = {
        key: value
        for key, value in noted.items()
        if key in in_app and key not in _MAY_DIFFER and value != of_app.get(key)
    }
    return {**settings, **differing}


def as_toml(settings: Mapping[str, Any]) -> str:
    """Return settings as the lines of a TOML file for ``flwr run --run-config``.

    Flower's run config has no lists, so a list is written as text.
    """

    def written(value: Any) -> str:
        text = json.dumps(value, ensure_ascii=False)
        return json.dumps(text, ensure_ascii=False) if isinstance(value, list | dict) else text

    return "".join(f"{json.dumps(key)} = {written(value)}\n" for key, value in settings.items())


def _read_app_config(file: Path) -> dict[str, Any]:
    """Return the run config in an app's ``pyproject.toml``, with keys such as ``local.lr``.

    Raises
    ------
    ConfigError
        If the file cannot be read, or contains no run config.
    """
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
        config = found["tool"]["flwr"]["app"]["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file} should be the pyproject.toml of a Flower app, with the run config in "
            f"[tool.flwr.app.config], got {type(error).__name__}: {error}; with --app, name the "
            "folder of the app that began the run"
        ) from error
    return flat(config)


def _find_flwr() -> str:
    """Return the command ``flwr`` of this Python environment, which need not be active."""
    beside = Path(sys.executable).with_name("flwr")
    return str(beside) if beside.exists() else "flwr"
