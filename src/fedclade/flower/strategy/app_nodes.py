"""Nodes of a grid, and the client that each of them runs.

A plain ClientApp does not register. The server numbers the clients in the order in which it first
finds their nodes in the grid.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from fedclade.core import ClientRegistry, ConfigError, DataSpec, RunError, shown, write_text

FILE = "nodes.json"
"""File in a run's folder with the nodes of its clients."""

SETTLE = 1.0
"""Seconds between two looks at the grid before round 1, between which no node joins."""

LOG_EVERY = 10
"""Number of looks at the grid between two log lines about the nodes that are missing."""

_log = logging.getLogger(__name__)


class AppNodes:
    """Registry of the clients of a run and their nodes.

    Parameters
    ----------
    grid
        Grid of Flower.
    true_clusters
        True cluster of each client by the id of its node, for scoring and for ``oracle``; None if
        unknown.
    sleep
        Function that pauses for a number of seconds.

    Attributes
    ----------
    first
        Number of clients that were connected before round 1. A continued run has the same number.
    """

    def __init__(
        self, grid: Grid, true_clusters: Mapping[int, int] | None, sleep: Callable[[float], None]
    ) -> None:
        self._grid = grid
        self._truth = true_clusters
        self._sleep = sleep
        self._node_of: dict[int, int] = {}  # by client
        self._names: dict[int, str] = {}
        self._connected: set[int] = set()  # clients
        self._unknown: set[int] = set()  # nodes that joined later, without a true cluster
        self.first: int | None = None
        self.sizes: dict[int, int] = {}
        """Number of training examples that each client has last reported, 1 before its first reply.
        """
        truth: dict[int, int] | None = None if true_clusters is None else {}
        spec = DataSpec("ClientApp", (), outputs=0, task="regression")
        self.clients = ClientRegistry(spec, "data of Flower ClientApps", self._names, self.sizes)
        self.clients.true_clusters = truth
        self._truth_of = truth

    @property
    def ids(self) -> Sequence[int]:
        """Ids of all clients that ever joined."""
        return tuple(self._node_of)

    @property
    def connected(self) -> Sequence[int]:
        """Ids of the clients whose nodes were connected at the last look at the grid."""
        return tuple(client for client in self._node_of if client in self._connected)

    def node(self, client: int) -> int:
        """Return the id of a client's node."""
        return self._node_of[client]

    def look(self) -> None:
        """Look which nodes are connected, and number the new ones.

        Raises
        ------
        ConfigError
            If true clusters are given, but not for a node that is connected before round 1. A node
            that joins later does not take part.
        """
        nodes = set(self._grid.get_node_ids())
        for node in sorted(nodes.difference(self._node_of.values(), self._unknown)):
            if self.first is not None and self._truth is not None and node not in self._truth:
                _log.warning("node %d does not take part, as true_clusters does not name it", node)
                self._unknown.add(node)
                continue
            self._add(node)
        self._connected = {client for client, node in self._node_of.items() if node in nodes}

    def wait(self, least: int, *, settled: bool = False) -> None:
        """Wait until enough nodes are connected.

        Parameters
        ----------
        least
            Number of nodes to wait for.
        settled
            Whether to wait, in addition, until no node joins any more: a simulation's nodes, for
            example, appear one after the other.
        """
        self.look()
        looks = 0
        before = -1
        while len(self._connected) < least or (settled and len(self._connected) != before):
            if looks % LOG_EVERY == 0 and len(self._connected) < least:
                _log.warning(
                    "waiting for nodes: %d connected, %d needed", len(self._connected), least
                )
            looks += 1
            before = len(self._connected)
            self._sleep(SETTLE)
            self.look()
        if self.first is None:
            self.first = len(self._connected)

    def save(self, folder: Path) -> None:
        """Write the clients and their nodes to the run's folder."""
        clients = {
            str(client): {"node": node, "size": self.sizes[client]}
            for client, node in self._node_of.items()
        }
        saved = {"connected_before_round_1": self.first, "clients": clients}
        write_text(folder / FILE, json.dumps(saved, indent=1))

    def load(self, folder: Path) -> None:
        """Read the clients of a run that is continued; do nothing if the folder has none.

        Raises
        ------
        RunError
            If the file is damaged.
        """
        path = folder / FILE
        if not path.exists():
            return
        try:
            saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            clients: dict[str, Any] = saved["clients"]
            self.first = int(saved["connected_before_round_1"])
            for number, (client, each) in enumerate(clients.items()):
                if int(client) != number:
                    raise ValueError(f"client {client} is in place {number}")
                self._add(int(each["node"]), int(each["size"]))
        except ConfigError:  # the file is fine, but true_clusters is not
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"{path} is damaged ({type(error).__name__}: {error}); restore it from a backup, or "
                "start the run in another folder"
            ) from error

    def _add(self, node: int, size: int = 1) -> None:
        """Add the client of a node."""
        client = len(self._node_of)
        if self._truth is not None and self._truth_of is not None:
            if node not in self._truth:
                raise ConfigError(
                    f"true_clusters should have the cluster of every node, but node {node} is not "
                    f"among {shown(sorted(self._truth))}; add it, or leave out true_clusters"
                )
            self._truth_of[client] = self._truth[node]
        self._node_of[client] = node
        self._names[client] = str(node)
        self.sizes[client] = size
