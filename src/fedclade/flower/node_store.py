"""Data that a client of a network stores between rounds, in its folder or in Flower's state.

:class:`Residuals` stores the parts of updates that lossy encoding has dropped, and
:class:`NodeStore` the client's own model parameters and optimizer state.
"""

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

# Error feedback: the residual, which is the part of an update that lossy encoding drops, is added
# to the client's next update.

# Largest number of kinds of updates with stored residuals, so that a server cannot fill the disk.
# No algorithm uses as many kinds.
MOST_RESIDUALS = 16


class Residuals:
    """Encoder of a client's updates with error feedback.

    The residual, which is the part of an update that lossy encoding drops, is added to the next
    update of the same kind. Residuals are stored in the client's folder, or in memory if the client
    has no folder.

    Parameters
    ----------
    folder
        Folder of the client; None if the client has no folder.
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

    def encoded(
        self,
        update: Tensor,
        kind: str,
        sizes: tuple[int, int] | None = None,
        *,
        overwrites: bool = False,
    ) -> Array:
        """Return an update as an encoded array for a message.

        Parameters
        ----------
        update
            Update as a vector, ``[S]``.
        kind
            Kind of the update. Updates of different kinds have separate residuals.
        sizes
            Number S of entries and number D of parameters of the update; None for the numbers of a
            single model.
        overwrites
            Whether the update's memory may be used for the residual, until it is written into the
            client's folder. Without a folder, the residual has memory of its own.
        """
        exact = self.encoding == "float32"
        sizes = sizes or self._sizes
        data = (
            encode(update, "float32", len(update))
            if exact
            else self._with_feedback(update, kind, sizes, overwrites=overwrites)
        )
        return wire.raw(data, self.encoding, len(update))

    def _with_feedback(
        self, update: Tensor, kind: str, sizes: tuple[int, int], *, overwrites: bool
    ) -> bytes:
        """Encode an update plus the residual of its kind, and store the new residual."""
        # A residual of updates without noise must never be added to a noisy update, since it would
        # reach the server without noise. So each privacy mechanism has separate residuals. The
        # server chooses ``kind`` but must not choose the name of a file, so the name is a digest.
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
        data = feedback.encode(update, overwrites=overwrites)
        feedback.save(path)
        return data


FILE = "store.safetensors"  # in the client's folder

_STATE = "fedclade.store"


def uses_kept(kind: str, content: Content, personal: bool) -> bool:
    """Return whether the reply to a query uses data that the client has stored in earlier rounds.

    Such a reply is not a function of the query alone, and the stored data must be loaded first.

    Parameters
    ----------
    kind
        Kind of the query.
    content
        Content of the query.
    personal
        Whether the model has personal parameters, which each client stores itself.
    """
    rows = KINDS[kind].row_query
    if rows is not None:
        return bool(rows.stores) or (personal and bool(field_types(rows).models))
    if kind in ("train", "gradients", "evaluate") and personal:
        return True
    if kind in ("train", "gradients", "evaluate") and content.get("own", bool):
        return True
    if kind == "train" and "rule" in content.values:
        return True
    spec = content.json("spec") if kind == "train" else {}
    # A user's own training function need not give the same update again.
    if spec.get("keep_state") or spec.get("trainer"):
        return True
    return kind in ("train", "evaluate") and models_of_mixture(content) > 0


class NodeStore:
    """Persistent copy of the data that a client stores between rounds.

    The data, such as personal parameters, is in a file in the client's folder, or in Flower's state
    if the client has no folder. It belongs to a single run: another run begins without data. A
    damaged file is never overwritten.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / FILE
        self._store = ClientStore()
        self._run = ""

    def open(self, store: ClientStore, run: str, state: RecordDict | None = None) -> None:
        """Load the stored data of a run into the client's store in memory.

        Parameters
        ----------
        store
            The client's store in memory, which is changed in place.
        run
            Name of the run, chosen by its server.
        state
            Record that Flower stores for the client between two messages.

        Raises
        ------
        CheckpointError
            If the stored data is damaged.
        """
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
                f"{where}, which contains the client's own parameters, is damaged ({error}); "
                "restore it from a backup, or delete it to begin without stored parameters"
            ) from error

    def close(self, state: RecordDict | None = None) -> None:
        """Save the client's store; must be called before the reply that changed the store is sent.

        If saving fails, no reply is sent. So the server never uses a reply for which the client has
        not saved the change of its own data.
        """
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
        """Return the stored data as bytes; None if nothing is stored."""
        if self._path is not None:
            return self._path.read_bytes() if self._path.exists() else None
        kept = (state or {}).get(_STATE)
        return kept["store"].data if isinstance(kept, ArrayRecord) else None
