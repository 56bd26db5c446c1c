"""The command ``flwr``: it starts runs on a SuperLink and tells what became of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from processes import DeploymentError


class FlowerCommand:
    """Calls ``flwr`` for one SuperLink.

    Parameters
    ----------
    connection
        The SuperLink's name in Flower's own config, in the folder that the variable FLWR_HOME names.
    environment
        All environment variables.
    """

    def __init__(self, connection: str, environment: Mapping[str, str]) -> None:
        self._connection, self._environment = connection, environment

    def register(self, public_key: Path) -> None:
        """Let in the node that has this key, if it is not known yet.

        Raises
        ------
        DeploymentError
            If the SuperLink does not take it.
        """
        try:
            self("supernode", "register", str(public_key), self._connection)
        except DeploymentError as error:
            if "already in use" not in str(error):
                raise

    def submit(self, app: Path, settings: Mapping[str, Any]) -> str:
        """Start an app; return the id of its run.

        Parameters
        ----------
        app
            Its folder.
        settings
            What wins over the run config in the app's ``pyproject.toml``: ``{"local.lr": 0.1}``.
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
        """Stop a run, or what is left of it."""
        self("stop", run, self._connection)

    def status(self, run: str) -> str:
        """Return the state of a run as Flower names it: ``running``, ``finished:completed``, ``finished:failed``."""
        return str(self("list", self._connection, "--run-id", run)["runs"][0]["status"])

    def __call__(self, *arguments: str) -> dict[str, Any]:
        """Call it, and return what it answers.

        Raises
        ------
        DeploymentError
            If it fails.
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
    """Return the program of the environment that this runs in, whether or not that is activated."""
    return str(Path(sys.executable).parent / name)


def _json_in(text: str) -> dict[str, Any]:
    """Return the JSON in what ``flwr`` prints, or nothing."""
    begin = text.find("{")
    try:
        return json.JSONDecoder().raw_decode(text[begin:])[0] if begin >= 0 else {}
    except json.JSONDecodeError:
        return {}
