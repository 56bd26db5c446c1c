"""The command ``export``: a model of a run for plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedclade.cli.console import new_console
from fedclade.cli.look import RunFolder
from fedclade.runs import (
    Run,
    export_model,
)


def export(
    folder: RunFolder,
    out: Annotated[Path, typer.Option("--out", metavar="FILE.safetensors", help="File to make; must not exist yet.")],
    client: Annotated[int | None, typer.Option("--client", metavar="ID", help="Whose model to export.")] = None,
    node: Annotated[int | None, typer.Option("--node", metavar="ID", help="Or which node's of the tree.")] = None,
    level: Annotated[
        int | None,
        typer.Option("--level", help="On the client's path: 0 is the root, -1 its leaf, which is the default."),
    ] = None,
) -> None:
    """Write one model of a run as a state dict for plain PyTorch, with a model card beside it.

    Example: fedclade export RUN --client 3 --out client-3.safetensors; then, in Python,
    model.load_state_dict(safetensors.torch.load_file("client-3.safetensors"))
    """
    written = export_model(Run.load(folder), out, client=client, node=node, level=level)
    cards = " and ".join(str(written.with_suffix(suffix)) for suffix in (".json", ".md"))
    new_console().print(f"model: {written}; its card: {cards}", soft_wrap=True, markup=False)
