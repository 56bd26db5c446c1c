"""Reply that a client of a network stores, to answer a repeated query without training again."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from fedclade.channel import ReplyMemory, build_remembered
from fedclade.core import Layout, Updates, appear, write_tensors
from fedclade.data import Federation
from fedclade.flower.data_splits import digest_of_query
from fedclade.flower.wire import Content

FILE = "reply.safetensors"  # in the client's folder

_log = logging.getLogger(__name__)


class StoredReply:
    """The latest reply of one client to a query that the server may repeat.

    The reply is in a file in the client's folder, or in memory if the client has no folder.
    :class:`~fedclade.channel.ReplyMemory` limits its size. It is used again only for the same
    query, the same data and the same task. A damaged or missing file does no harm: the client then
    trains again.

    Parameters
    ----------
    folder
        Folder of the client; None if the client has no folder.
    federation
        Data of the client.
    task
        Description of the client's loss and metrics.
    layout
        Layout of the model.
    """

    def __init__(
        self, folder: Path | None, federation: Federation, task: str, layout: Layout
    ) -> None:
        self._path = None if folder is None else folder / FILE
        self._federation = federation
        self._task = task
        self._layout = layout
        self._memory = ReplyMemory()

    def recall(self, content: Content) -> Updates | None:
        """Return the update in the client's reply to the same query; None if it is not stored."""
        self._read()
        client = self._federation.clients[0].id
        reply = self._memory.recall(client, self._digest(content))
        if reply is None:
            return None
        return build_remembered({client: reply}, torch.device("cpu"), self._layout.n_parameters)

    def store(self, content: Content, updates: Updates) -> None:
        """Store the client's update that results from a query."""
        reply = {name: column[0] for name, column in updates.columns.items()}
        self._memory.store(updates.ids[0], self._digest(content), reply)
        if self._path is not None:
            tensors = self._memory.tensors()
            appear(self._path, lambda beside: write_tensors(beside, tensors), private=True)

    def _digest(self, content: Content) -> str:
        """Return a digest of a query and of the data and the task of the client."""
        found = hashlib.sha256(digest_of_query(content).encode())
        found.update(self._task.encode())
        if self._path is not None:  # another process may have written the file, with other data
            found.update(self._federation.fingerprint.encode())
        return found.hexdigest()

    def _read(self) -> None:
        """Read the stored reply from the client's folder, if it has one."""
        if self._path is None:
            return
        try:
            self._memory.load(load_file(self._path))
        except FileNotFoundError:
            self._memory.load({})
        except (SafetensorError, ValueError, OSError) as error:
            _log.warning("%s is damaged, so the client trains again (%s)", self._path, error)
            self._memory.load({})
