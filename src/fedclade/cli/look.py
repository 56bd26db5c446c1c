"""Commands that look at something, or hand it out: ``tree``, ``export``, ``validate``, ``cite``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedclade.cli import options
from fedclade.cli.console import new_console, say
from fedclade.config import find_config, is_scenario, known_scales, read_config, read_scenarios
from fedclade.report import cite_name, tree_view
from fedclade.runs import Run, export_adapter, export_model


def tree(folder: options.RunFolder) -> None:
    """Print the parameter tree of a run: its clusters, their members, and how they were split."""
    run = Run.load(folder)
    new_console().print(tree_view(run.tree, run))


def export(
    folder: options.RunFolder,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE.safetensors", help="File (or folder) to make; must not exist yet.")
    ],
    client: Annotated[int | None, typer.Option("--client", metavar="ID", help="Whose model to export.")] = None,
    node: Annotated[int | None, typer.Option("--node", metavar="ID", help="Or which node's of the tree.")] = None,
    level: Annotated[
        int | None,
        typer.Option(
            "--level",
            help="On the client's path: 0 is the root, -1 its leaf. Default: what the client was served with.",
        ),
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Its adapter alone, as a folder that peft and fedclade.load_adapter read.")
    ] = False,
) -> None:
    """Write one model of a run as a state dict for plain PyTorch, with a model card beside it.

    Example: fedclade export RUN --client 3 --out client-3.safetensors; then, in Python,
    model.load_state_dict(safetensors.torch.load_file("client-3.safetensors"))
    """
    if adapter:
        written = export_adapter(Run.load(folder), out, client=client, node=node, level=level)
        say(new_console(), f"adapter: {written}")
        return
    written = export_model(Run.load(folder), out, client=client, node=node, level=level)
    cards = " and ".join(str(written.with_suffix(suffix)) for suffix in (".json", ".md"))
    say(new_console(), f"model: {written}; its card: {cards}")


def validate(config: options.ConfigFile) -> None:
    """Check a config without running it, and say everything that is wrong with it at once."""
    path = find_config(config)
    if is_scenario(path):
        for scale in (None, *known_scales(path)):
            read_scenarios(path, scale=scale)
    else:
        read_config(path)
    say(new_console(), f"{path} is fine")


def cite(
    name: Annotated[str, typer.Argument(help="An algorithm, a dataset, a partition, a model, or fedclade.")],
) -> None:
    """Print the BibTeX entry of what you have used."""
    typer.echo(cite_name(name))
