"""What is lost of a client's updates when they are encoded, and added to its next ones."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Array
from torch import Tensor

from fedclade.channel import ErrorFeedback, encode
from fedclade.core import Layout
from fedclade.flower import wire

MOST_RESIDUALS = 16  # kinds of answers of which a client keeps what encoding lost; no algorithm queries as many


class Residuals:
    """Encodes a client's updates together with what the encoding lost of earlier ones; a folder makes that last.

    ``mechanism`` describes the differential privacy of the updates; it is empty for updates without noise.
    """

    def __init__(self, folder: Path | None, encoding: str, layout: Layout, mechanism: str = "") -> None:
        self._folder, self.encoding, self._mechanism = folder, encoding, mechanism
        self._sizes = layout.size, layout.n_parameters
        self._kept: dict[str, ErrorFeedback] = {}

    def encoded(self, update: Tensor, kind: str, sizes: tuple[int, int] | None = None) -> Array:
        """Return an update of a kind of answer as it travels; ``sizes`` are its S and D, if not those of one model."""
        exact, sizes = self.encoding == "float32", sizes or self._sizes
        data = encode(update, "float32", len(update)) if exact else self._with_feedback(update, kind, sizes)
        return wire.raw(data, self.encoding, len(update))

    def _with_feedback(self, update: Tensor, kind: str, sizes: tuple[int, int]) -> bytes:
        # A residual of updates without noise must never be added to a private update, whose noise it
        # would bypass: each mechanism has residuals of its own. The server chooses ``kind``, and it
        # must not name a file: hence the digest.
        name = wire.digest(f"{self._mechanism} {kind}".encode() if self._mechanism else kind.encode())
        path = None if self._folder is None else self._folder / f"residual-{name}.safetensors"
        kept = self._kept if self._folder is None else list(self._folder.glob("residual-*.safetensors"))
        new = name not in self._kept if path is None else not path.exists()
        if new and len(kept) >= MOST_RESIDUALS:
            return encode(update, self.encoding, sizes[1])
        if path is None:
            return self._kept.setdefault(name, ErrorFeedback(self.encoding, *sizes)).encode(update)
        feedback = ErrorFeedback.load(path, self.encoding, *sizes)
        data = feedback.encode(update)
        feedback.save(path)
        return data
