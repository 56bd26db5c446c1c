"""Deployment whose ClientApps start at once: they are forked from a process that has imported torch.

Flower starts a process for each message to a client. It imports torch, Flower and fedclade, which
takes a core 2 to 3 seconds. A federation of tests sends dozens of messages, so most of its time would
be these imports. Here one process, the *nursery*, imports them once. In place of Flower's command
``flwr-clientapp``, a SuperNode starts a small program of the same name, which lets the nursery fork a
process that runs Flower's command with the same arguments, environment variables and outputs. All
else is as usual: the app is installed and loaded, replies, and its process ends.

The nursery ends with the process that started it. Tests of how processes start and end use Flower's
own command.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from deployment import Deployment

COMMAND = "flwr-clientapp"

# The small program. It starts fast, since it imports no packages of the environment. If Flower ends
# it, the connection closes, and the nursery ends the app.
PROGRAM = """\
#!{python} -IS
import json, os, socket, sys

with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
    connection.connect({address!r})
    request = {{"arguments": sys.argv, "environment": dict(os.environ), "folder": os.getcwd()}}
    socket.send_fds(connection, [json.dumps(request).encode()], [1, 2])
    status = connection.recv(16)
sys.exit(int(status) if status else 1)
"""


class WarmDeployment(Deployment):
    """Deployment whose SuperNodes find the small program in place of Flower's command."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.environment["PATH"] = f"{start_nursery()}{os.pathsep}{self.environment['PATH']}"


@cache
def start_nursery() -> Path:
    """Start the nursery; return the folder of the small program."""
    folder = Path(tempfile.mkdtemp(prefix="nursery"))
    address = str(folder / "socket")
    program = folder / COMMAND
    program.write_text(PROGRAM.format(python=sys.executable, address=address))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    nursery = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("nursery.py")), address],
        stdin=subprocess.PIPE,  # closes when this process ends, even if it is killed
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"},
        start_new_session=True,
    )
    assert nursery.stdout is not None
    assert nursery.stdout.readline() == b"ready\n"
    return folder
