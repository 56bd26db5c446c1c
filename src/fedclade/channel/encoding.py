"""Encoding of updates as bytes (float32, 16-bit or 8-bit codes, or sparse), and error feedback.

The parameters of an update ``[S]``, its first D entries, are cut into blocks of :data:`BLOCK`
entries; the last block may be shorter. A block has one scale, which is its largest magnitude
divided by the largest code. Each entry is divided by the scale and rounded to the nearest code. A
float16 code is a number of up to 2¹⁵, so that no entry overflows. Compared with the usual rounding
to float16, only entries below 2⁻²⁹ of the largest entry in their block lose more digits. An int8
code is a whole number from −127 to 127. Of two equally near codes, the even one is chosen. Since
this rule uses no random numbers, the same update always gives the same bytes.

The encoding ``topk`` sends the one in :data:`SPARSITY` parameters with the largest magnitudes, as
float32: first their places (32-bit whole numbers, increasing), then their values. All other
parameters are zero after decoding, and error feedback adds them to the next update.

Error feedback adds the rounding error of each update (the residual) to the next update.

The S − D buffers after the parameters remain float32. BatchNorm's running statistics are few and
differ by orders of magnitude, and a running variance that rounding made negative would result in
NaN.

The encoded update, little-endian and without a header, consists of the scales (float32), the codes,
and the buffers (float32). Its length follows from S, D and the encoding, so a receiver never
reserves memory for a length that the sender claims. A block with an entry that is not finite
decodes to entries that are all not finite, which the receiver's own check detects.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad

from fedclade.core import ConfigError, UpdateError, appear, unknown, write_tensors

BLOCK = 256
"""Number of parameters that share a scale: 4 bytes of scale for 256 or 512 bytes of codes."""

PIECE = 2**10 * BLOCK
"""Number of parameters that are encoded or decoded at a time, which bounds the memory in use."""

_SMALLEST = float(np.finfo(np.float32).tiny)
"""Smallest scale, for a block of zeros or of numbers below float32's full precision."""

_CODES = {"float16": (torch.float16, 2.0**15), "int8": (torch.int8, 127.0)}
"""Type of the codes of each encoding, and the largest code; float32 is not encoded."""

DENSE_ENCODINGS = ("float32", *_CODES)
"""Encodings that send every entry, which also suit models."""

SPARSITY = 20
"""The encoding ``topk`` sends one in this number of parameters."""

ENCODINGS = (*DENSE_ENCODINGS, "topk")
"""Encodings of updates. With ``topk``, all parameters but the largest are zero."""

_PLACES = np.dtype("<u4")
"""Type of the places of parameters in the encoding ``topk``."""

_log = logging.getLogger(__name__)


def check_encoding(encoding: str) -> None:
    """Check that an encoding of this name exists; raise a ConfigError otherwise."""
    if encoding not in ENCODINGS:
        raise ConfigError(unknown("encoding", encoding, ENCODINGS))


def encoded_bytes(size: int, encoding: str, n_parameters: int) -> int:
    """Return the number of bytes of an encoded update, without any header.

    Parameters
    ----------
    size, n_parameters
        Number S of entries of the update, and number D of parameters among them; the other entries
        are buffers.
    encoding
        One of :data:`ENCODINGS`.
    """
    check_encoding(encoding)
    if encoding == "topk":
        return 8 * _count_largest(n_parameters) + 4 * (size - n_parameters)
    if encoding not in _CODES:
        return 4 * size
    dtype, _ = _CODES[encoding]
    return (
        4 * _count_blocks(n_parameters) + dtype.itemsize * n_parameters + 4 * (size - n_parameters)
    )


def encode(vector: Tensor, encoding: str, n_parameters: int) -> bytes:
    """Encode an update as bytes, in the format that this module's docstring describes.

    Parameters
    ----------
    vector
        The update, ``[S]`` (one number for each parameter, then each buffer).
    encoding
        One of :data:`ENCODINGS`.
    n_parameters
        Number of parameters.
    """
    check_encoding(encoding)
    vector = vector.detach().to("cpu", torch.float32)
    parameters, buffers = vector.split([n_parameters, len(vector) - n_parameters])
    if encoding == "topk":
        places = parameters.abs().topk(_count_largest(n_parameters)).indices.sort().values
        coded_places = places.numpy().astype(_PLACES).tobytes()
        return b"".join([coded_places, _bytes_of(parameters[places]), _bytes_of(buffers)])
    if encoding not in _CODES:
        return _bytes_of(vector)
    dtype, largest = _CODES[encoding]
    all_scales: list[bytes] = []
    all_codes: list[bytes] = []
    for some in parameters.split(PIECE):
        blocks = pad(some, (0, -len(some) % BLOCK)).view(-1, BLOCK)
        scales = (blocks.abs().amax(dim=1, keepdim=True) / largest).clamp_min(_SMALLEST)
        scaled = (blocks / scales).flatten()[: len(some)]
        # The cast to float16 rounds halves to even, too.
        codes = (scaled if dtype.is_floating_point else scaled.round()).to(dtype)
        all_scales.append(_bytes_of(scales.flatten()))
        all_codes.append(_bytes_of(codes))
    return b"".join([*all_scales, *all_codes, _bytes_of(buffers)])


def decode(
    data: bytes, size: int, encoding: str, n_parameters: int, *, copies: bool = True
) -> Tensor:
    """Decode bytes to an update, float32 ``[S]``.

    With ``int8``, the error of a parameter is at most 1/254 of the largest magnitude in its block.
    With ``float16``, the error is at most 2⁻¹¹ of the parameter's own magnitude or 2⁻⁴⁰ of the
    largest magnitude in its block, whichever is larger. The rounding of float32 adds to this. With
    ``topk``, parameters that were not sent are zero.

    Parameters
    ----------
    data
        The bytes.
    size, encoding, n_parameters
        Number of entries S, encoding and number of parameters, as the receiver knows them, not as
        the sender reports them.
    copies
        Whether the update has memory of its own. If not, it has the memory of ``data`` where that
        is possible, as with ``float32``, and must not be changed.

    Raises
    ------
    UpdateError
        If the number of bytes does not match, or with ``topk``, if the places of the parameters are
        not increasing or there is no such place.
    """
    expected = encoded_bytes(size, encoding, n_parameters)
    if len(data) != expected:
        raise UpdateError(
            f"the update has {len(data)} bytes, expected {expected} bytes in the encoding "
            f"{encoding!r} for {size} entries, of which {n_parameters} are parameters; give client "
            "and server the same model and the same encoding"
        )
    if encoding == "topk":
        return _decode_largest(data, size, n_parameters)
    if encoding not in _CODES:
        return tensor_from_bytes(data, torch.float32, copies=copies)
    vector = torch.empty(size, dtype=torch.float32)
    for start, piece in _decoded_pieces(data, encoding, n_parameters):
        vector[start : start + len(piece)] = piece
    return vector


def _decoded_pieces(data: bytes, encoding: str, n_parameters: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the entries of an encoded update in pieces, each with the index of its first entry.

    The encoding is ``float16`` or ``int8``, and ``data`` has the length that belongs to it.
    """
    dtype, _ = _CODES[encoding]
    view = memoryview(data)
    split = 4 * _count_blocks(n_parameters)
    end = split + dtype.itemsize * n_parameters
    for start in range(0, n_parameters, PIECE):
        stop = min(start + PIECE, n_parameters)
        codes = view[split + dtype.itemsize * start : split + dtype.itemsize * stop]
        scales = view[4 * (start // BLOCK) : 4 * _count_blocks(stop)]
        scale = tensor_from_bytes(scales, torch.float32).repeat_interleave(BLOCK)[: stop - start]
        yield start, tensor_from_bytes(codes, dtype).to(torch.float32).mul_(scale)
    yield n_parameters, tensor_from_bytes(view[end:], torch.float32)


def _decode_largest(data: bytes, size: int, n_parameters: int) -> Tensor:
    """Decode bytes of the encoding ``topk`` to an update, float32 ``[S]``."""
    split = 4 * _count_largest(n_parameters)
    places = torch.from_numpy(np.frombuffer(data[:split], _PLACES).astype(np.int64))
    is_increasing = bool((places.diff() > 0).all())
    if len(places) and not (is_increasing and int(places[-1]) < n_parameters):
        raise UpdateError(
            f"the places of the {len(places)} parameters in the update should increase and be less "
            f"than {n_parameters}, the number of parameters; give client and server the same "
            "version of fedclade"
        )
    update = torch.zeros(size)
    update[places] = tensor_from_bytes(data[split : 2 * split], torch.float32)
    update[n_parameters:] = tensor_from_bytes(data[2 * split :], torch.float32)
    return update


class ErrorFeedback:
    """Encoder with error feedback: the rounding error of each update is added to the next update.

    No part of an update is therefore lost permanently. Let Δ_t be the update of round t, e_t the
    rounding error of the last update (the residual), and C(p) the result of encoding and decoding
    p. The client sends p_t = Δ_t + e_t, which the server receives as C(p_t), and stores e_{t+1} =
    p_t − C(p_t). The sum of all decoded updates then equals the sum of all updates except for the
    last residual. Seide et al. 2014 ("1-bit stochastic gradient descent", section 3.1) found that
    1-bit gradients need error feedback. Karimireddy et al. 2019 (arXiv:1901.09847, Algorithm 2)
    prove that SGD with error feedback converges as fast as without compression.

    Use separate encoders for updates and for gradients of a full batch, since the residual of the
    one must not be added to the other.

    Parameters
    ----------
    encoding
        One of :data:`ENCODINGS`.
    size, n_parameters
        Number S of entries of an update, and number of parameters among them.

    A residual of another length (the model changed), or one that is not finite, is dropped with a
    warning in the log.
    """

    def __init__(self, encoding: str, size: int, n_parameters: int) -> None:
        check_encoding(encoding)
        self._encoding = encoding
        self._size = size
        self._n_parameters = n_parameters
        self._residual: Tensor | None = None

    @property
    def residual(self) -> Tensor:
        """Rounding error of the last update, float32 ``[S]``."""
        if self._residual is None:
            self._residual = torch.zeros(self._size)
        return self._residual

    @classmethod
    def load(cls, path: Path, encoding: str, size: int, n_parameters: int) -> ErrorFeedback:
        """Create an encoder with the residual from a file that :meth:`save` wrote.

        If the file is missing or damaged, the residual is zero.
        """
        feedback = cls(encoding, size, n_parameters)
        try:
            feedback._store_residual(load_file(path)["residual"])
        except FileNotFoundError:
            pass
        except (SafetensorError, KeyError, OSError) as error:
            _log.warning(
                "error feedback starts from zero; the residual in %s is dropped: %s", path, error
            )
        return feedback

    def save(self, path: Path) -> None:
        """Write the residual to a file, which is replaced as a whole or not at all."""
        appear(
            path, lambda beside: write_tensors(beside, {"residual": self.residual}, private=True)
        )

    def encode(self, update: Tensor, *, overwrites: bool = False) -> bytes:
        """Encode an update ``[S]`` plus the residual as bytes, and store the new residual.

        If this fails, the residual is as before. With ``overwrites``, the new residual takes the
        memory of the update, which must then not be used any more, and the residual is zero if this
        fails.
        """
        meant = update.detach().to("cpu", torch.float32)
        if not overwrites:
            meant = meant + self.residual
        elif self._residual is None:
            meant.add_(0.0)  # as the sum with a residual of zeros, which has no -0.0
        else:
            meant.add_(self._residual)
            self._residual = None  # frees its memory, before the update is encoded
        data = encode(meant, self._encoding, self._n_parameters)
        if self._encoding == "float32":  # nothing is lost
            meant.zero_()
        elif self._encoding == "topk":
            meant -= decode(data, len(meant), self._encoding, self._n_parameters)
        else:
            for start, piece in _decoded_pieces(data, self._encoding, self._n_parameters):
                meant[start : start + len(piece)] -= piece
        self._store_residual(meant)
        return data

    def _store_residual(self, residual: Tensor) -> None:
        """Store a residual; if it has a wrong shape or is not finite, warn and store zeros."""
        expected = (self._size,)
        if residual.shape != expected:
            why = f"it should have shape {expected}, got {tuple(residual.shape)}"
        elif not _is_finite(residual):
            bad = int((~residual.isfinite()).sum())
            why = f"{bad} of {len(residual)} entries are not finite"
        else:
            self._residual = residual.to(torch.float32)
            return
        _log.warning(
            "error feedback starts from zero; the residual of the last update is dropped: %s", why
        )
        self._residual = None


def _is_finite(vector: Tensor) -> bool:
    """Return whether all entries of a vector are finite; this takes no memory."""
    if len(vector) == 0:
        return True
    lowest, highest = vector.aminmax()  # both are NaN if any entry is NaN
    return bool(lowest.isfinite() and highest.isfinite())


def _count_largest(n_parameters: int) -> int:
    """Return the number of parameters that the encoding ``topk`` sends."""
    return -(-n_parameters // SPARSITY)


def _count_blocks(n_parameters: int) -> int:
    """Return the number of blocks into which parameters are cut."""
    return -(-n_parameters // BLOCK)


def _bytes_of(tensor: Tensor) -> bytes:
    """Return the numbers of a tensor as little-endian bytes."""
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def tensor_from_bytes(
    data: bytes | memoryview, dtype: torch.dtype, *, copies: bool = True
) -> Tensor:
    """Return the tensor of numbers that little-endian bytes encode, of one dimension.

    Parameters
    ----------
    data
        The bytes.
    dtype
        Type of the numbers.
    copies
        Whether the tensor has memory of its own. If not, it has the memory of ``data`` where that
        is possible, and must not be changed.
    """
    little = np.dtype(str(dtype).removeprefix("torch.")).newbyteorder("<")
    array = np.frombuffer(data, little).astype(little.newbyteorder("="), copy=copies)
    with warnings.catch_warnings():  # torch warns of memory that must not be changed
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)
