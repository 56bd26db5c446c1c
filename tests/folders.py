"""Run folders that are changed on purpose: as somebody would who means it, or as older versions wrote them."""

from __future__ import annotations

import json
from pathlib import Path

from fedclade.runs.store.manifest import write_manifest
from fedclade.runs.store.run import FORMAT


def resealed(folder: Path) -> Path:
    """Return a run folder that was changed, with the sums of what is in it now."""
    (folder / "manifest.json").unlink(missing_ok=True)
    write_manifest(folder / "manifest.json", FORMAT)
    return folder


def unsealed(folder: Path) -> Path:
    """Return a run folder as format 2 was: without sums."""
    (folder / "manifest.json").unlink()
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "format": 2}))
    return folder
