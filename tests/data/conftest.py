"""Small data sets in the layouts that the sources read, and a cache folder for each test."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedclade.data import Pool


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCLADE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDCLADE_DATA_DIR", raising=False)


@pytest.fixture
def write_parquet(tmp_path: Path) -> Callable[[str, Mapping[str, Sequence[Any]]], Path]:
    """Write columns to a file under ``tmp_path/data``; returns its path."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def write(name: str, columns: Mapping[str, Sequence[Any]]) -> Path:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({column: list(values) for column, values in columns.items()}), path)
        return path

    return write


@pytest.fixture
def write_json(tmp_path: Path) -> Callable[[str, Any], Path]:
    """Write a value as JSON to a file under ``tmp_path/data``; returns its path."""

    def write(name: str, content: Any) -> Path:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
        return path

    return write


@pytest.fixture
def png() -> Callable[..., dict[str, Any]]:
    """Return pixels ``[H, W]`` or ``[H, W, 3]`` as a cell of the Hub's image columns."""
    from PIL import Image

    def encode(pixels: np.ndarray) -> dict[str, Any]:
        file = io.BytesIO()
        Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
        return {"bytes": file.getvalue(), "path": None}

    return encode


@pytest.fixture
def make_pool() -> Callable[..., Pool]:
    """Build a pool of ``train`` + ``test`` examples whose input is their own number and whose labels go round."""

    def make(
        train: int = 200,
        test: int = 50,
        labels: int = 5,
        owners: Sequence[str] | None = None,
        **more: Any,
    ) -> Pool:
        n = train + test
        y = np.arange(n) % labels
        return Pool(
            name="toy",
            x=torch.arange(n, dtype=torch.float32)[:, None],
            y=torch.from_numpy(y),
            groups=y,
            train=np.arange(train),
            test=np.arange(train, n),
            outputs=labels,
            natural=None if owners is None else np.asarray(owners, dtype=np.str_),
            **more,
        )

    return make
