"""What the operator of a federation in containers does: let in the clients' keys, start the app, show how it goes."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

sys.path.insert(
    0, os.environ.get("APP", "/app")
)  # the example of a federation, whose command this uses

from flower_command import FlowerCommand
from processes import DeploymentError


def main() -> int:
    """Register the keys, or run the app; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--superlink", required=True, metavar="HOST:PORT")
    parser.add_argument(
        "--folder", type=Path, required=True, help="with ca.crt, and the clients' public keys *.pub"
    )
    parser.add_argument("--register", action="store_true", help="let in the keys, and no more")
    parser.add_argument("--app", type=Path, help="the Flower app to run")
    parser.add_argument(
        "--out", default="run", help="the run folder, seen from where the SuperExec runs"
    )
    arguments = parser.parse_args()
    flwr = connected(arguments.folder, arguments.superlink)
    try:
        if arguments.register:
            keys = sorted(arguments.folder.glob("*.pub"))
            for key in keys:
                flwr.register(key)
            print(f"{len(keys)} keys are let in")
            return 0
        run = flwr.submit(
            arguments.app,
            {"network.out": arguments.out, **settings(os.environ.get("RUN_CONFIG", ""))},
        )
        flwr.follow(run)
        status = flwr.status(run)
    except DeploymentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"run {run}: {status}")
    return 0 if status == "finished:completed" else 1


def connected(folder: Path, superlink: str) -> FlowerCommand:
    """Return the command ``flwr`` for this SuperLink, which its config in the folder names."""
    home = folder / "flower"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "deployment"\n\n[superlink.deployment]\naddress = {json.dumps(superlink)}\n'
        f"root-certificates = {json.dumps(str(folder / 'ca.crt'))}\n"
    )
    return FlowerCommand("deployment", {**os.environ, "FLWR_HOME": str(home)})


def settings(text: str) -> dict[str, Any]:
    """Return what a run's config changes.

    >>> settings('rounds=10 local.lr=0.05 data.name="mnist"')
    {'rounds': 10, 'local.lr': 0.05, 'data.name': 'mnist'}
    """
    changed: dict[str, Any] = {}
    for setting in shlex.split(text):
        key, _, value = setting.partition("=")
        try:
            changed[key] = json.loads(value)
        except ValueError:
            changed[key] = value
    return changed


if __name__ == "__main__":
    sys.exit(main())
