"""A model of the tree as a file for plain PyTorch, with a card that says what it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from fedclade.core import ConfigError, Layout, Node, RunError, TreeError, appear, checked, make_folder, write_tensors
from fedclade.models import save_adapter
from fedclade.runs.small_clusters import is_withheld
from fedclade.runs.store.card import Card, as_markdown, model_card, serves_own
from fedclade.runs.store.run import Run
from fedclade.runs.store.served_models import ClientMixture, client_mixture, served_node
from fedclade.runs.store.staging import Writer, write_together

SUFFIX = ".safetensors"


@checked()
def export_model(
    run: Run, out: str | Path, *, client: int | None = None, node: int | None = None, level: int | None = None
) -> Path:
    """Write one model of a run as a state dict, with its card beside it: ``.json`` for programs, ``.md`` for people.

    The card is in the header of the file too, under ``fedclade``. For a client it is what the client was served with,
    unless a level is given: its cluster's model with the client's personal parameters, a model of its own (Ditto, local
    training, ...), or, in FedEM and FedRC, a mixture of all models as a state dict of :class:`~fedclade.ModelMixture`.
    A node's model has what is shared. :func:`~fedclade.load_export` loads any of them.

    Parameters
    ----------
    run
        The run.
    out
        The file to make; ends in ``.safetensors``.
    client, node
        Whose model: a client's, or a node's.
    level
        Of the client's path from the root, 0, to its leaf, -1; if left out, what the client was served with.

    Raises
    ------
    ConfigError
        If not just one of client and node is given, or a level with a node, or the file's name ends otherwise.
    TreeError
        If the tree has no such client, node or level.
    RunError
        If the run was saved without the layout of its model or is damaged, its models are permuted by its clients, the
        client keeps a part of its model for itself, or the weights of its mixture, or a file exists already or cannot
        be written.
    """
    run.check_readable()
    target = Path(out)
    if target.suffix != SUFFIX:
        raise ConfigError(f"the file to export to should end in {SUFFIX}, got {str(out)!r}")
    chosen, layout = _node_and_layout(run, client, node, level)
    mixture, own = _mixture(run, client, level), _own_model(run, client, level)
    if mixture is not None:
        tensors = mixture.state_dict(layout)
    elif own is not None:
        tensors = layout.full.state_dict(own)
    else:
        if client is not None:
            run.personal(client)  # which is there, or nobody here could put the client's model together
        tensors = layout.state_dict(chosen.model, None if client is None else run.kept.get(client, {}).get("personal"))
    layout = layout if client is None else layout.full
    _write(model_card(run, chosen, layout, client, own=own is not None, mixture=mixture), tensors, target)
    return target


@checked()
def export_adapter(
    run: Run,
    out: str | Path,
    *,
    client: int | None = None,
    node: int | None = None,
    level: int | None = None,
    alpha: float | None = None,
) -> Path:
    """Write the adapter of one model of a run as a folder in peft's format, see :func:`fedclade.models.save_adapter`.

    Parameters
    ----------
    run, client, node, level
        See :func:`export_model`.
    out
        The folder to make.
    alpha
        α of the low-rank pairs, where the run's config does not say it, as with a model that came with its own.

    Raises
    ------
    ConfigError
        If not just one of client and node is given, or a level with a node, or nobody says α.
    TreeError
        If the tree has no such client, node or level.
    ModelError
        If what the run trained is no adapter.
    RunError
        If the run cannot be read, the client is served with a mixture of models, or the folder exists already or cannot
        be written.
    """
    chosen, layout = _node_and_layout(run, client, node, level)
    if _mixture(run, client, level) is not None:
        raise RunError(
            f"client {client} is served with a mixture of {len(run.tree.leaves)} models, which no one adapter is; "
            "export that of one model with --node, or the mixture as a state dict, without --adapter"
        )
    target = Path(out)
    if target.exists():
        raise RunError(f"{target} exists already; name another folder with --out, or remove it")
    alpha = run.config["model"].get("adapter", {}).get("alpha") if alpha is None else alpha
    if alpha is None:
        raise ConfigError("the run's config has no model.adapter; say what α its adapters have: export_adapter(alpha=)")
    own = _own_model(run, client, level)
    card = json.dumps(model_card(run, chosen, layout, client, own=own is not None))
    if own is not None:
        tensors = layout.full.unflatten(own)
    else:
        tensors = {**layout.unflatten(chosen.model), **({} if client is None else run.personal(client))}
    try:
        make_folder(target.parent)
        appear(target, lambda beside: save_adapter(beside, tensors, float(alpha), {"fedclade": card}))
        return target
    except OSError as error:
        raise RunError(f"cannot write {target}: {error}") from error


def _mixture(run: Run, client: int | None, level: int | None) -> ClientMixture | None:
    """Return the mixture that a client was served with, if it was, unless a node's model is asked for."""
    return None if client is None or level is not None else client_mixture(run, client)


def _own_model(run: Run, client: int | None, level: int | None) -> Tensor | None:
    """Return the model ``[F]`` of its own that a client was served with, unless a node's is asked for."""
    if client is None or level is not None:
        return None
    own = run.kept.get(client, {}).get("model")
    if own is None and "network" in run.config and serves_own(run):
        raise RunError(
            f"this run has no model of client {client}: over a network it stays with it; export the server's with "
            "--node 0"
        )
    return own


def _node_and_layout(run: Run, client: int | None, node: int | None, level: int | None) -> tuple[Node, Layout]:
    """Return a model of a run, and what its entries are."""
    run.check_readable()
    chosen = _chosen(run, client, node, level)
    least = run.config.get("privacy", {}).get("min_cluster_size", 1)
    if is_withheld(run.tree, chosen.id, least):
        raise RunError(
            f"node {chosen.id} has {len(chosen.members)} members, fewer than privacy.min_cluster_size, {least}, so its "
            "model is withheld"
        )
    if run.layout is None:
        raise RunError(
            "this run folder was written before the layout of the model was kept, and its models cannot be taken "
            "apart; run its config.toml again"
        )
    if run.layout.size != len(chosen.model):
        raise RunError(
            f"the run is damaged: its layout has {run.layout.size} entries, the model of node {chosen.id} "
            f"{len(chosen.model)}"
        )
    return chosen, run.layout


def _check_free(target: Path) -> None:
    """Check that no file of an export to ``target`` exists; a RunError if one does."""
    for path in (target, target.with_suffix(".json"), target.with_suffix(".md")):
        if path.exists():
            raise RunError(f"{path} exists already; name another file with --out, or remove it")


def _chosen(run: Run, client: int | None, node: int | None, level: int | None) -> Node:
    if (client is None) == (node is None):
        given = "neither" if client is None else f"client {client} and node {node}"
        raise ConfigError(f"export takes either --client or --node, got {given}")
    if client is not None:
        return served_node(run, client) if level is None else run.tree.node_for(client, level)
    if level is not None:
        raise ConfigError(f"--level {level} goes with --client; node {node} has one model only")
    assert node is not None  # as there is no client
    if not 0 <= node < len(run.tree.nodes):
        raise TreeError(f"node {node} is not in the parameter tree, which has the nodes 0 to {len(run.tree.nodes) - 1}")
    return run.tree.nodes[node]


def _write(card: Card, tensors: Mapping[str, Tensor], target: Path) -> None:
    """Write the three files, all of them or none; the model last, so that it never lacks its card."""
    text = json.dumps(card, indent=2)
    header = {"format": "pt", "fedclade": text}
    writers: Mapping[Path, Writer] = {
        target.with_suffix(".json"): lambda path: path.write_text(text + "\n"),
        target.with_suffix(".md"): lambda path: path.write_text(as_markdown(card, target.name), encoding="utf-8"),
        target: lambda path: write_tensors(path, tensors, header),
    }
    try:
        write_together(writers, lambda: _check_free(target))
    except OSError as error:
        raise RunError(f"cannot write {target}: {error}") from error
