"""Calls of the command ``flwr``, which starts runs on a SuperLink and lists their status."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from processes import DeploymentError


class FlowerCommand:
    """The command ``flwr`` with the connection to one SuperLink.

    Parameters
    ----------
    connection
        Name of the SuperLink in Flower's ``config.toml``, which is in the folder ``FLWR_HOME``.
    environment
        All environment variables of the command, with ``FLWR_HOME``.
    """

    def __init__(self, connection: str, environment: Mapping[str, str]) -> None:
        self._connection, self._environment = connection, environment

    def register(self, public_key: Path) -> None:
        """Register a node by its public key, if the key is not registered yet.

        Raises
        ------
        DeploymentError
            If the SuperLink rejects the key.
        """
        try:
            self("supernode", "register", str(public_key), self._connection)
        except DeploymentError as error:
            if "already in use" not in str(error):
                raise

    def submit(self, app: Path, settings: Mapping[str, Any]) -> str:
        """Start a run of an app; return the id of the run.

        Parameters
        ----------
        app
            Folder of the app.
        settings
            Values that override the run config in the app's ``pyproject.toml``, such as
            ``{"local.lr": 0.1}``.
        """
        chosen = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
        answer = self(
            "run", str(app), self._connection, *(["--run-config", chosen] if chosen else [])
        )
        return str(answer["run-id"])

    def follow(self, run: str) -> None:
        """Show the log of a run until it has ended."""
        command = [program("flwr"), "log", run, self._connection, "--stream"]
        subprocess.run(command, env=self._environment, check=False)

    def stop(self, run: str) -> None:
        """Stop a run, also if some of its processes have ended already."""
        self("stop", run, self._connection)

    def status(self, run: str) -> str:
        """Return the status of a run in Flower's words.

        For example ``running``, ``finished:completed`` or ``finished:failed``.
        """
        return str(self("list", self._connection, "--run-id", run)["runs"][0]["status"])

    def __call__(self, *arguments: str) -> dict[str, Any]:
        """Call ``flwr`` with these arguments, and return its JSON output.

        Raises
        ------
        DeploymentError
            If the command fails.
        """
        command = [program("flwr"), *arguments, "--format", "json"]
        done = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, check=False
        )
        answer = _json_in(done.stdout)
        if done.returncode != 0 or not answer.get("success"):
            why = answer.get("error-message") or done.stdout + done.stderr
            raise DeploymentError(f"flwr {' '.join(arguments)}: {why}")
        return answer


def program(name: str) -> str:
    """Return the path of a program in the present Python environment, which need not be active."""
    return str(Path(sys.executable).parent / name)


def _json_in(text: str) -> dict[str, Any]:
    """Return the JSON object in the output of ``flwr``, or an empty dictionary."""
    begin = text.find("{")
    try:
        return json.JSONDecoder().raw_decode(text[begin:])[0] if begin >= 0 else {}
    except json.JSONDecodeError:
        return {}
