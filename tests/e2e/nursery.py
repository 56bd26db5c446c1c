"""Process that imports what a ClientApp needs, and forks the ClientApps of tests; see ``warm_deployment.py``.

    python nursery.py SOCKET

It ends when its standard input is closed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from typing import Any, NoReturn

from flwr.supernode.cli import flwr_clientapp

from fedclade.flower import client_app

MOST_BYTES = 2**17
"""Bytes of a request, with all environment variables: more than any process here has."""

PATIENCE = 5.0
"""Seconds that an app has to end after SIGTERM, before it is killed."""


def main() -> None:
    """Import the rest, then fork a process for each request."""
    client_app("mlp", lambda context: None)  # imports all that a reply needs
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no handler is waited for
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(sys.argv[1])
        listening.listen(64)
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([listening, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            connection, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                handle(connection)
            connection.close()


def handle(connection: socket.socket) -> NoReturn:
    """Fork the app of a request, and send its exit status; end it if the connection closes."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, outputs, _, _ = socket.recv_fds(connection, MOST_BYTES, 2)
    app = os.fork()
    if app == 0:
        connection.close()
        run_app(json.loads(message), outputs)
    ended = os.pidfd_open(app)
    ready, _, _ = select.select([connection, ended], [], [])
    if ended not in ready:
        os.kill(app, signal.SIGTERM)
        if not select.select([ended], [], [], PATIENCE)[0]:
            os.kill(app, signal.SIGKILL)
    _, status = os.waitpid(app, 0)
    if ended in ready:
        connection.send(str(max(os.waitstatus_to_exitcode(status), 0)).encode())
    os._exit(0)


def run_app(request: dict[str, Any], outputs: list[int]) -> NoReturn:
    """Become the process that Flower would have started: run its command, and end."""
    for target, output in zip((1, 2), outputs, strict=True):
        os.dup2(output, target)
        os.close(output)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = request["arguments"]
    flwr_clientapp()
    sys.exit(0)


if __name__ == "__main__":
    main()
