"""A federation of processes on this machine: a SuperLink, and SuperNodes that use TLS."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from credentials import make_certificates, make_node_key, write_private
from flower_command import FlowerCommand, program
from processes import DeploymentError, Process

HOST = "127.0.0.1"
CONNECTION = "deployment"
"""Name of the SuperLink in the connections of the command ``flwr``."""
START = 180.0
"""Seconds within which a process must be ready."""
STOP = 8.0
"""Seconds that processes have to end by themselves before they are killed."""
HEARTBEATS = 75.0
"""Seconds within which a SuperLink detects that a node was killed.

It detects this after two missed heartbeats of 30 seconds each; 15 seconds are a margin.
"""
OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Environment variables that keep Flower from accessing the internet."""


class Deployment:
    """A SuperLink and its SuperNodes, as a context manager.

    Entering the context starts all processes. Leaving it stops them, also after an error.

    Each process has its own session, and its log in ``folder/logs``. A separate SuperExec starts
    the ServerApps (Flower's isolation mode "process"). Therefore ServerApps belong to the process
    group of the SuperExec and end with it, and only a process that knows the SuperExec's secret can
    run in place of a ServerApp.

    Parameters
    ----------
    folder
        Folder for keys, logs, the SuperLink's database, and the folders of the clients. Files of an
        earlier deployment are used again, so that each node has the same id as before.
    app
        Folder of the Flower app.
    nodes
        Number of SuperNodes.
    share_secret
        Whether clients get a secret that the server does not have, by which they permute models and
        updates.
    node_config
        Text to add to the config of every node, such as ``"min-honest=2"``; or a list with a text
        for each node. ``{node}`` in a text is replaced by the node's number.

    Raises
    ------
    DeploymentError
        If the number of texts differs from the number of nodes.
    """

    def __init__(
        self,
        folder: Path,
        app: Path,
        nodes: int = 4,
        *,
        share_secret: bool = False,
        node_config: str | Sequence[str] = "",
    ) -> None:
        self.folder, self.app, self.nodes = folder.resolve(), app.resolve(), nodes
        self._share_secret = share_secret
        self._node_configs = (
            [node_config] * nodes if isinstance(node_config, str) else list(node_config)
        )
        if len(self._node_configs) != nodes:
            raise DeploymentError(
                f"node_config has {len(self._node_configs)} texts, and there are {nodes} nodes; give one for each, or "
                "one for all"
            )
        self.keys, self.logs = self.folder / "keys", self.folder / "logs"
        programs = Path(sys.executable).parent
        self.environment = {
            **os.environ,
            **OFFLINE,
            "FLWR_HOME": str(self.folder / "flower"),
            # Flower starts its programs by name
            "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": os.environ.get(
                "OMP_NUM_THREADS", "1"
            ),  # the nodes share this machine's cores
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # seconds, instead of 1
        }
        self.flwr = FlowerCommand(CONNECTION, self.environment)
        self._processes: dict[str, Process] = {}
        self._ports: list[int] = []

    def __enter__(self) -> Deployment:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Make missing keys, start the SuperLink and all nodes, and wait until all have connected.

        Raises
        ------
        DeploymentError
            If a process ends, or is not ready in time.
        """
        self._ports = free_ports(self.nodes + 1)
        self._make_folder()
        self._start_superlink()
        for node in range(self.nodes):
            self.flwr.register(self.key(node).with_suffix(".pub"))
            self._launch_node(node, self.key(node))
        for node in range(self.nodes):
            self._insist(node)

    def stop(self) -> None:
        """Stop all processes: terminate them, and kill those that have not ended after a while."""
        nodes = [process for name, process in self._processes.items() if name.startswith("node-")]
        others = [process for process in self._processes.values() if process not in nodes]
        try:
            # Nodes first, so that they can sign off at the SuperLink.
            for processes in (nodes, others):
                for process in processes:
                    process.terminate()
                end = time.monotonic() + STOP
                for process in processes:
                    process.wait(max(0.0, end - time.monotonic()))
        finally:  # also if the user interrupts the waiting
            for process in self._processes.values():
                process.kill()
            self._processes.clear()

    def key(self, node: int) -> Path:
        """Return the path of a node's private key."""
        return self.keys / f"node-{node}"

    def node_folder(self, node: int) -> Path:
        """Return the folder of a node's persistent files."""
        return self.folder / f"node-{node}"

    def node_ids(self) -> dict[int, int]:
        """Return the SuperLink's id of each node that has connected, by node number."""
        found = {node: _NODE_ID.search(self.log(_node_name(node))) for node in range(self.nodes)}
        return {node: int(match[1]) for node, match in found.items() if match is not None}

    def log(self, name: str) -> str:
        """Return the output of a process since its start.

        The name of a process is ``superlink``, ``superexec``, or for example ``node-0``.
        """
        return self._processes[name].output()

    def start_node(self, node: int, key: Path | None = None) -> int:
        """Start a node that is not running; return the SuperLink's id of the node.

        If the node was killed a short time ago, the SuperLink refuses it until it has detected that
        the node is offline. The node is started again until it is accepted.

        Parameters
        ----------
        node
            Number of the node, from 0.
        key
            Private key to use instead of the node's own. With such a key the node is started only
            once.

        Raises
        ------
        DeploymentError
            If the SuperLink refuses the node.
        """
        self._launch_node(node, key or self.key(node))
        return self._wait_for_node(node) if key else self._insist(node)

    def kill_node(self, node: int) -> None:
        """Kill a node and all its child processes, without giving them time to sign off."""
        self._processes.pop(_node_name(node)).kill()

    def kill_server_app(self) -> None:
        """Kill the running ServerApp and the SuperExec that started it; start a new SuperExec."""
        self._processes.pop("superexec").kill()
        self._start_superexec()

    def submit(self, settings: Mapping[str, Any]) -> str:
        """Start a run of the app; return the id of the run. See :meth:`FlowerCommand.submit`."""
        return self.flwr.submit(self.app, settings)

    def run(self, settings: Mapping[str, Any]) -> None:
        """Run the app to its end, and show its log.

        Raises
        ------
        DeploymentError
            If the run fails. The exit status of ``flwr run --stream`` would not show this, so the
            status of the run is requested.
        """
        run = self.submit(settings)
        while not (status := self.flwr.status(run)).startswith("finished"):
            self.flwr.follow(run)  # on a busy machine this may return before the run has ended
        if status != "finished:completed":
            raise DeploymentError(
                f"run {run} ended as {status!r}; its log is above, those of the nodes are in {self.logs}"
            )

    def _make_folder(self) -> None:
        for folder in (self.keys, self.logs, self.folder / "flower"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (self.keys / "ca.crt").exists():
            make_certificates(self.keys, (HOST, "localhost"))
            write_private(self.keys / "superexec.secret", secrets.token_bytes(32))
            write_private(self.keys / "clients.secret", secrets.token_hex(32).encode())
        for node in range(self.nodes):
            self.node_folder(node).mkdir(exist_ok=True, mode=0o700)
            if not self.key(node).exists():
                make_node_key(self.key(node))
        connection = {"address": self._address, "root-certificates": str(self.keys / "ca.crt")}
        (self.folder / "flower" / "config.toml").write_text(
            f"[superlink]\ndefault = {CONNECTION!r}\n\n[superlink.{CONNECTION}]\n"
            + "".join(f"{key} = {json.dumps(value)}\n" for key, value in connection.items())
        )

    @property
    def _address(self) -> str:
        return f"{HOST}:{self._ports[-1]}"

    def _start(self, name: str, *command: str) -> Process:
        if name in self._processes:
            self._processes[name].kill()  # child processes of an earlier start may still run
        process = Process(
            name, [program(command[0]), *command[1:]], self.logs / f"{name}.log", self.environment
        )
        self._processes[name] = process
        return process

    def _start_superlink(self) -> None:
        superlink = self._start(
            "superlink",
            "flower-superlink",
            *("--host", HOST, "--port", str(self._ports[-1])),
            *("--ssl-ca-certfile", str(self.keys / "ca.crt")),
            *(
                "--ssl-certfile",
                str(self.keys / "server.pem"),
                "--ssl-keyfile",
                str(self.keys / "server.key"),
            ),
            *("--enable-supernode-auth", "--database", str(self.folder / "superlink.db")),
            *(
                "--isolation",
                "process",
                "--superexec-auth-secret-file",
                str(self.keys / "superexec.secret"),
            ),
            "--disable-runtime-dependency-installation",
        )
        superlink.wait_until(self._superlink_answers, "answers", START)
        self._start_superexec()

    def _start_superexec(self) -> None:
        self._start(
            "superexec",
            "flower-superexec",
            *(
                "--runtime-api-address",
                self._address,
                "--root-certificates",
                str(self.keys / "ca.crt"),
            ),
            *("--superexec-auth-secret-file", str(self.keys / "superexec.secret")),
        )

    def _superlink_answers(self) -> bool:
        """Return whether the SuperLink responds over TLS; raise an error for a bad certificate."""
        context = ssl.create_default_context(cafile=str(self.keys / "ca.crt"))
        try:
            with urllib.request.urlopen(
                f"https://{self._address}/health", context=context, timeout=5
            ):
                return True
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            if isinstance(getattr(error, "reason", None), ssl.SSLCertVerificationError):
                raise
            return False  # not yet

    def _launch_node(self, node: int, key: Path) -> None:
        config = (
            f'partition-id={node} num-partitions={self.nodes} folder="{self.node_folder(node)}"'
        )
        if self._share_secret:
            config += f' secret-file="{self.keys / "clients.secret"}"'
        if added := self._node_configs[node]:
            config += " " + added.replace("{node}", str(node))
        self._start(
            _node_name(node),
            "flower-supernode",
            *("--superlink", self._address, "--root-certificates", str(self.keys / "ca.crt")),
            *("--auth-supernode-private-key", str(key), "--port", str(self._ports[node])),
            *("--node-config", config),
        )

    def _insist(self, node: int) -> int:
        """Wait for a node, and start it again while the SuperLink takes it to be connected."""
        end = time.monotonic() + HEARTBEATS
        while True:
            try:
                return self._wait_for_node(node)
            except DeploymentError as error:
                if _REFUSED not in str(error) or time.monotonic() > end:
                    raise
            time.sleep(5)  # each attempt starts a process
            self._launch_node(node, self.key(node))

    def _wait_for_node(self, node: int) -> int:
        process = self._processes[_node_name(node)]
        process.wait_until(
            lambda: _NODE_ID.search(process.output()) is not None, "joined the SuperLink", START
        )
        return self.node_ids()[node]


_NODE_ID = re.compile(r"SuperNode ID: (\d+)")
_REFUSED = "Failed to activate SuperNode"
"""Reply of a SuperLink if a key is unknown, or if its node seems to be connected already."""


def _node_name(node: int) -> str:
    return f"node-{node}"


def free_ports(count: int) -> list[int]:
    """Return ``count`` different ports of this machine that no process listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]
