"""Whether a registration is admitted as a client of the run: it must fit the others, and be who it says."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from fedclade.flower.keys import KEY_FILE
from fedclade.flower.registration import RegisteredClient, Registration
from fedclade.flower.wire import shown

Identity = Literal["node", "number"]


@dataclass(frozen=True)
class Admission:
    """The rules of a run; see :class:`~fedclade.flower.node_registry.NodeRegistry` for its parameters."""

    identity: Identity
    keys: Mapping[str, int] | None

    def number_of(self, key: str, registered: Mapping[int, RegisteredClient]) -> int | None:
        """Return the number that goes with a key, if one does."""
        if self.keys is not None:
            return self.keys.get(key)
        return next((client for client, one in registered.items() if one.key == key), None)

    def numbered(self, one: Registration, registered: Mapping[int, RegisteredClient]) -> Registration:
        """Return a registration with the number that goes with its key, if it gives none."""
        known = self.number_of(one.client.key, registered)
        return replace(one, number=known) if one.number is None and known is not None else one

    def objection(
        self,
        one: Registration,
        client: int,
        common: Registration,
        registered: Mapping[int, RegisteredClient],
        connected: Collection[int],
    ) -> str | None:
        """Say why a registration cannot be admitted under a number; None if it can.

        ``common`` is what all clients have in common, and ``connected`` are nodes.
        """
        if one.layout != common.layout:
            return "its model is not built like the others'"
        if one.shape != common.shape:
            return f"its examples look like {shown(one.shape)}, and the others' like {shown(common.shape)}"
        if common.task and one.task != common.task:
            return f"its task is {one.task!r}, and the others' is {common.task!r}; give all clients the same"
        if one.encoding != common.encoding:
            return "its columns, labels or words are encoded otherwise than the others'"
        if one.secret != common.secret:
            return "it does not share the secret of the others; give all clients the same file, or none"
        known = self.number_of(one.client.key, registered)
        if self.keys is not None and known is None:
            return f"its key {one.client.key} is none of network.keys"
        if known is not None and known != client:
            return f"it says it is client {client}, and its key is that of client {known}"
        owner = next((number for number, each in registered.items() if each.node == one.client.node), client)
        if owner != client:
            return f"it says it is client {client}, and its node is that of client {owner}"
        if client not in registered:
            return None
        if registered[client].node in connected:
            node = registered[client].node
            return f"it says it is client {client}, which node {node} is, and that is connected"
        return self._is_another(one.client, client, registered[client])

    def _is_another(self, one: RegisteredClient, client: int, before: RegisteredClient) -> str | None:
        """Say why this is not the client that was registered under a number before."""
        if one.size != before.size:
            return f"it says it has {one.size} training examples, and client {client} joined with {before.size}"
        if self.keys is not None or one.key == before.key:
            return None
        if before.lasts:
            return f"it says it is client {client}, and has another key; give it the folder of that client's {KEY_FILE}"
        if self.identity == "node" and one.node != before.node:
            return (
                f"it says it is client {client}, which was node {before.node}; start it with the key of that node, or, "
                "where nodes have no keys, set network.identity = 'number'"
            )
        return None
