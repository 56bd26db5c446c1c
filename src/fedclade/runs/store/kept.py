"""What the clients of a simulated run keep for themselves, on disk: ``personal.safetensors``, by client and name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from fedclade.core import Layout, write_tensors

KEPT = "personal.safetensors"
"""The file; there is none where clients keep nothing."""


def write_kept(path: Path, kept: Mapping[int, Mapping[str, Tensor]], private: bool = False) -> None:
    """Write what clients keep into a new file, if they keep anything."""
    if kept:
        tensors = {f"{client}/{name}": t.cpu().clone() for client, mine in kept.items() for name, t in mine.items()}
        write_tensors(path, tensors, private=private)


def read_kept(path: Path, layout: Layout | None) -> dict[int, dict[str, Tensor]]:
    """Read what clients keep, of models of a layout; raises one of the errors of damaged files.

    Weights of mixtures, float64, are as many as there are models.
    """
    kept: dict[int, dict[str, Tensor]] = {}
    lengths = {} if layout is None else {"personal": layout.personal_size, "model": layout.full.size}
    for key, tensor in (load_file(path) if path.exists() else {}).items():
        client, _, name = key.partition("/")
        if name == "mixture":
            lengths["mixture"] = len(tensor) if tensor.dim() else 0
        if tensor.shape != (lengths.get(name),) or not tensor.is_floating_point():
            raise ValueError(f"{key} in {path.name} should be of shape [{lengths.get(name)}], got {list(tensor.shape)}")
        kept.setdefault(int(client), {})[name] = tensor
    return kept
