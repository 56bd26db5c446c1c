"""Data that a client of a network stores between rounds: in its folder, or in Flower's state."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Array, ArrayRecord, RecordDict
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedclade.channel import ErrorFeedback, encode
from fedclade.core import CheckpointError, Layout, appear, field_types
from fedclade.flower import wire
from fedclade.flower.kinds import KINDS
from fedclade.flower.models_sent import models_of_mixture
from fedclade.flower.wire import Content, raw
from fedclade.training import ClientStore

# Error feedback: the part of a client's update that encoding loses is added to its next update.

# Largest number of kinds of replies with stored residuals; no algorithm has as many kinds.
MOST_RESIDUALS = 16


class Residuals:
    """Encoder of a client's updates with error feedback.

    The residual, which encoding loses of an update, is added to the next update of the same kind.
    Residuals are stored in a folder, or without one in memory.

    Parameters
    ----------
    folder
        Folder of the client; None if it has none.
    encoding
        Encoding of updates: ``float32``, ``float16`` or ``int8``.
    layout
        Layout of the model.
    mechanism
        Description of the differential privacy of the updates; empty for updates without noise.
    """

    def __init__(
        self, folder: Path | None, encoding: str, layout: Layout, mechanism: str = ""
    ) -> None:
        self._folder = folder
        self.encoding = encoding
        self._mechanism = mechanism
        self._sizes = layout.size, layout.n_parameters
        self._kept: dict[str, ErrorFeedback] = {}

    def encoded(self, update: Tensor, kind: str, sizes: tuple[int, int] | None = None) -> Array:
        """Return the update of one kind of reply as an encoded array.

        ``sizes`` are its S and D, if they differ from those of one model.
        """
        exact = self.encoding == "float32"
        sizes = sizes or self._sizes
        data = (
            encode(update, "float32", len(update))
            if exact
            else self._with_feedback(update, kind, sizes)
        )
        return wire.raw(data, self.encoding, len(update))

    def _with_feedback(self, update: Tensor, kind: str, sizes: tuple[int, int]) -> bytes:
        # A residual of updates without noise must never be added to a private update, since it
        # would bypass the noise: each mechanism has its own residuals. The server chooses ``kind``,
        # and must not choose the name of a file, so the name is a digest.
        name = wire.digest(
            f"{self._mechanism} {kind}".encode() if self._mechanism else kind.encode()
        )
        path = None if self._folder is None else self._folder / f"residual-{name}.safetensors"
        kept = (
            self._kept
            if self._folder is None
            else list(self._folder.glob("residual-*.safetensors"))
        )
        new = name not in self._kept if path is None else not path.exists()
        if new and len(kept) >= MOST_RESIDUALS:
            return encode(update, self.encoding, sizes[1])
        if path is None:
            return self._kept.setdefault(name, ErrorFeedback(self.encoding, *sizes)).encode(update)
        feedback = ErrorFeedback.load(path, self.encoding, *sizes)
        data = feedback.encode(update)
        feedback.save(path)
        return data


FILE = "store.safetensors"  # in the client's folder

_STATE = "fedclade.store"


def uses_kept(kind: str, content: Content, personal: bool) -> bool:
    """Return whether a reply uses data that the client stores.

    Some parameters of its model may be ``personal``, and so stored by the client.
    """
    rows = KINDS[kind].row_query
    if rows is not None:
        return bool(rows.stores) or (personal and bool(field_types(rows).models))
    if kind in ("train", "gradients", "evaluate") and personal:
        return True
    if kind in ("train", "gradients", "evaluate") and content.get("own", bool):
        return True
    if kind == "train" and ("rule" in content.values or content.json("spec").get("keep_state")):
        return True
    return kind in ("train", "evaluate") and models_of_mixture(content) > 0


class NodeStore:
    """Persistent copy of a client's store, in a file in its folder or else in Flower's state.

    It belongs to one run, named by the run's server: another run begins with an empty store. A
    damaged file is not replaced.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / FILE
        self._store = ClientStore()
        self._run = ""

    def open(self, store: ClientStore, run: str, state: RecordDict | None = None) -> None:
        """Load the stored data of a run; raise a CheckpointError if it is damaged."""
        self._store, data = store, self._read(state)
        if data is None and run != self._run:
            self._store.clear()
        self._run = run
        if data is None:
            return
        try:
            kept = {
                name.partition("/")[2]: t
                for name, t in load(data).items()
                if name.partition("/")[0] == run
            }
            self._store.load(kept)
        except (SafetensorError, ValueError) as error:
            where = self._path or "Flower's state of this client"
            raise CheckpointError(
                f"{where}, which has the client's own parameters, is damaged ({error}); restore it "
                "from a backup, or remove it to begin anew"
            ) from error

    def close(self, state: RecordDict | None = None) -> None:
        """Save the store; call it before the reply that belongs to it leaves."""
        tensors = {
            f"{self._run}/{name}": t.cpu().contiguous()
            for name, t in self._store.tensors(before=True).items()
        }
        if not tensors:
            return
        data = save({name: tensor.clone() for name, tensor in tensors.items()})
        if self._path is not None:
            appear(self._path, lambda beside: beside.write_bytes(data), private=True)
        elif state is not None:
            state[_STATE] = ArrayRecord({"store": raw(data, "uint8", len(data))})

    def _read(self, state: RecordDict | None) -> bytes | None:
        if self._path is not None:
            return self._path.read_bytes() if self._path.exists() else None
        kept = (state or {}).get(_STATE)
        return kept["store"].data if isinstance(kept, ArrayRecord) else None
