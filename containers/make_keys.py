"""Make the keys of a federation in containers, and give each service those that it may see: one volume each.

What is there already stays, so that every client keeps its key when the federation is started again.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(
    0, os.environ.get("APP", "/app")
)  # the example of a federation, which makes them too

from credentials import make_certificates, make_node_key, write_private


def main() -> None:
    """Write the keys below the folder of all volumes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="with the volume of each service by name"
    )
    parser.add_argument(
        "--server", required=True, nargs="+", help="the names under which the server is reached"
    )
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--owner", type=int, help="number of the user that the services run as")
    arguments = parser.parse_args()
    folder, nodes = arguments.folder, [f"node-{number}" for number in range(arguments.nodes)]
    if (folder / "superlink/server.key").exists():
        print("the keys are there already")
        return
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary)
        make_certificates(made, (*arguments.server, "localhost", "127.0.0.1"))
        for service in ("superlink", "proxy", "superexec", "operator", *nodes):
            shutil.copy(made / "ca.crt", folder / service)
        for service in ("superlink", "proxy"):
            shutil.copy(made / "server.pem", folder / service)
        secret = secrets.token_bytes(32)
        for service in ("superlink", "superexec"):
            write_private(folder / service / "superexec.secret", secret)
        for node in nodes:
            public = make_node_key(folder / node / "node.key")
            shutil.copy(public, folder / "operator" / f"{node}.pub")
        for service in (
            "proxy",
            "superlink",
        ):  # the SuperLink's is the last file: then all is there
            write_private(folder / service / "server.key", (made / "server.key").read_bytes())
    if arguments.owner is not None:
        for path in (*folder.iterdir(), *folder.glob("*/*")):
            os.chown(path, arguments.owner, arguments.owner)
    print(f"made keys for the server and {arguments.nodes} clients")


if __name__ == "__main__":
    main()
