"""Run a federation on this machine: a server and several clients, as processes that use TLS.

``make federation`` calls this script; ``python examples/flower/federation.py --help`` lists its
options.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from deployment import Deployment
from processes import DeploymentError

from fedclade.cli.arguments import target_folder
from fedclade.cli.options import new_console
from fedclade.core.errors import FedcladeError

APP = Path(__file__).parent
DATA = {"digits": {}, "mnist": {"data.name": "mnist", "data.samples_per_client": 500}}
"""Changes to the app's config, by the name of the data."""


def main() -> int:
    """Start a federation, run the app, and stop everything; return the exit status."""
    arguments = parse()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    start = time.monotonic()
    try:
        folder = target_folder(arguments.out, "federation")
        settings = {
            **DATA[arguments.data],
            "privacy.permute": arguments.permute,
            "data.clients": arguments.nodes,
            "network.clients": arguments.nodes,
            "network.out": str((folder / "run").resolve()),
        }
        federate(folder, arguments.nodes, settings)
    except FedcladeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"took {time.monotonic() - start:.0f} s, from the first process to the last")
    return 0


def federate(folder: Path, nodes: int, settings: dict[str, Any]) -> None:
    """Start the processes of a federation and run the app on it.

    The log of the ServerApp is shown, which ends with the tables of the run.

    Parameters
    ----------
    folder
        Folder for keys and logs.
    nodes
        Number of SuperNodes.
    settings
        Changes to the app's config.

    Raises
    ------
    DeploymentError
        If a process does not start, or the run fails.
    """
    console = new_console()
    console.print(
        f"starting a SuperLink and {nodes} SuperNodes; keys and logs are in {folder}",
        soft_wrap=True,
    )
    with Deployment(folder, APP, nodes, share_secret=settings["privacy.permute"]) as deployment:
        console.print(f"all {nodes} SuperNodes have joined over TLS, each by its own key\n")
        deployment.run(settings)
    run = Path(settings["network.out"])
    if not (run / "summary.json").exists():
        raise DeploymentError(
            f"the run ended, but wrote no results to {run}; see the logs in {deployment.logs}"
        )


def leave(number: int, frame: FrameType | None) -> None:
    """Handle a signal: end this script, which stops all processes, and ignore further signals."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    print("\nstopping every process", file=sys.stderr)
    raise SystemExit(128 + number)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--nodes", type=int, default=4, help="number of SuperNodes, each one client (default: 4)"
    )
    parser.add_argument(
        "--data",
        choices=tuple(DATA),
        default="digits",
        help="data of the clients; mnist is read from FEDCLADE_DATA_DIR (default: digits)",
    )
    parser.add_argument(
        "--permute",
        action="store_true",
        help="let clients permute models and updates by a secret that they share",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="new folder for keys, logs and results (default: a folder under runs)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
