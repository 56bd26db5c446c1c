"""Export of a model of the tree as a file for plain PyTorch, with a model card."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fedclade.algorithms import FedSoft, OwnModels, method_of_run
from fedclade.core import (
    ConfigError,
    Layout,
    Node,
    RunError,
    TreeError,
    appear,
    checked,
    make_folder,
    write_tensors,
)
from fedclade.models import save_adapter
from fedclade.runs.small_clusters import is_withheld
from fedclade.runs.store.run import Row, Run
from fedclade.runs.store.served_models import (
    ClientMixture,
    client_mixture,
    served_node,
    serves_mixtures,
)
from fedclade.runs.store.staging import Writer, write_together
from fedclade.tasks import ModelMixture, read_metrics, spread

# Model card of an exported model: its place in the tree, training, scores, and how to load it.

CARD_FORMAT = 1
"""Version of the keys of a card, which each card states."""

Card = dict[str, Any]


def model_card(
    run: Run,
    node: Node,
    layout: Layout,
    client: int | None = None,
    *,
    own: bool = False,
    mixture: ClientMixture | None = None,
) -> Card:
    """Return the model card of a node's model, as values for JSON.

    Parameters
    ----------
    run
        The run.
    node
        The node.
    layout
        Layout of the model's entries.
    client
        The client for which the model is exported; None if it is exported for a node.
    own
        Whether the exported model is not the node's, but a whole model of the client.
    mixture
        The client's mixture of several nodes' models, if that is exported.
    """
    last = {row["client"]: row for row in run.client_rows}
    sizes = [last[member]["n_train"] for member in node.members if member in last]
    path = run.tree.above(node.id)
    metric = read_metrics(run.summary)[0]
    tensors = [(s.name, s.shape, s.dtype) for s in (*layout.parameters, *layout.buffers)]
    tensors += [(name, p.shape, p.dtype) for name, p in layout.frozen.items()]
    if mixture is not None:
        of_models = range(len(mixture.nodes))
        tensors = [
            (f"models.{k}.{name}", shape, dtype)
            for k in of_models
            for name, shape, dtype in tensors
        ]
        tensors.append(("weights", mixture.weights.shape, mixture.weights.dtype))
    asked = (
        {}
        if client is None
        else {"client": client, "name": last[client]["name"] if client in last else None}
    )
    asked |= {"own": True} if own else {}
    return {
        "format": CARD_FORMAT,
        "node": node.id,
        "path": [each.id for each in path],
        "level": len(path) - 1,
        "leaf": not run.tree.children(node.id),
        "exported_for": asked or None,
        **({} if mixture is None else {"mixture": mixture.described}),
        "members": list(node.members),
        "rounds": {
            "run": run.summary["rounds"],
            "born": node.born,
            "trained_until": _trained_until(run, node),
        },
        "data": {
            "description": run.summary["data"],
            "training_examples": sum(sizes),
            **run.summary.get("inputs", {}),
        },
        "metric": metric.noted,
        metric.name: _score(
            run, node, metric.name, client if own or run.parted or mixture is not None else None
        ),
        "algorithm": run.config["algorithm"],
        "model": {**run.config["model"], "parameters": layout.n_parameters},
        "tensors": {
            name: {"shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
            for name, shape, dtype in tensors
        },
        "config": {key: value for key, value in run.config.items() if key != "versions"},
        "versions": run.config.get("versions", {}),
    }


def serves_own(run: Run) -> bool:
    """Whether some clients were evaluated with own models, which are not models of the tree."""
    method = method_of_run(run.config["algorithm"]["name"])
    personalized = bool(run.config["algorithm"].get("personalize"))
    return personalized or (
        method is not None and issubclass(method.algorithm, OwnModels | FedSoft)
    )


def _trained_until(run: Run, node: Node) -> int | None:
    """Return the round after which a node's model no longer changed.

    A split leaves the node the model of the round before. A root that continues beside its clusters
    is trained to the end. None for the root of a star that existed from the start: the algorithm
    decides whether its model is anything but an initial one.
    """
    if node.split_in is None or node.continued is not None:
        return run.model_round
    return node.split_in - 1 if node.split_in else None


def _score(run: Run, node: Node, metric: str, client: int | None = None) -> Card | None:
    """Return the scores of clients, or of one, when they were last evaluated with a node's model.

    None if no client ever was. An inner node's model was that of its members until the split. If
    the last round of the model was not evaluated, the scores are of the model of an earlier round,
    which ``round`` states.
    """
    if client is None and serves_mixtures(run):  # no client was evaluated with one model alone
        return None
    served = [
        row
        for row in run.client_rows
        if row["served_by"] == node.id and client in (None, row["client"])
    ]
    # Over a network it is not known here which clients have a model of their own.
    if client is None and serves_own(run):
        known = "network" not in run.config
        served = [row for row in served if known and "model" not in run.kept.get(row["client"], {})]
    if not served:
        return None
    number = max(row["round"] for row in served)
    scores = spread([row[metric] for row in served if row["round"] == number])
    shown = (
        "mean",
        "min",
        "max",
        "clients",
        *(["without_score"] if scores["without_score"] else []),
    )
    return {**{name: scores[name] for name in shown}, "round": number}


def as_markdown(card: Card, file: str) -> str:
    """Return a card as a Markdown page, with code that loads the model from a file."""
    rows = "".join(f"| {name} | {_plain(value)} |\n" for name, value in _facts(card).items())
    tensors = "".join(
        f"| `{name}` | {each['shape']} | {each['dtype']} |\n"
        for name, each in card["tensors"].items()
    )
    nodes = card.get("mixture", {}).get("nodes", ())
    name = f"Mixture of nodes {', '.join(map(str, nodes))}" if nodes else f"Node {card['node']}"
    return f"""# {name} of a {card["algorithm"]["name"]} run

| | |
| :-- | :-- |
{rows}
## Loading it

{_loading(card, file)}

| tensor | shape | type |
| :-- | :-- | :-- |
{tensors}"""


def _loading(card: Card, file: str) -> str:
    """Return instructions for loading the model in plain PyTorch."""
    if "mixture" not in card:
        return f"""```python
from safetensors.torch import load_file
model.load_state_dict(load_file("{file}"))
```

`model` is a module with the tensors below: {card["model"]["name"]}, as it was trained."""
    mixture = card["mixture"]
    count = len(mixture["nodes"])
    return f"""The client is served with a mixture of {count} models, by weights of its own. As a module that is
`fedclade.ModelMixture`, or without fedclade:

```python
import copy

import torch
from torch import Tensor, nn
from torch.nn import functional


{inspect.getsource(ModelMixture).rstrip()}
```

```python
from safetensors.torch import load_file
mixture = ModelMixture(model, {count}, task="{mixture["task"]}")
mixture.load_state_dict(load_file("{file}"))
```

`model` is a module as each of them: {card["model"]["name"]}, as it was trained."""


def _plain(text: str) -> str:
    """Escape a text so that Markdown shows it unchanged in one cell of a table."""
    return " ".join(text.replace("](", "]\\(").replace("<", "\\<").replace("|", "\\|").split())


def _facts(card: Card) -> Mapping[str, str]:
    rounds = card["rounds"]
    data = card["data"]
    asked = card["exported_for"]
    path = " → ".join(map(str, card["path"]))
    facts = {
        "place": f"level {card['level']} of the path {path}" + (", a leaf" if card["leaf"] else "")
    }
    if asked is not None:
        facts["exported for"] = f"client {asked['client']}" + (
            f" ({asked['name']})" if asked["name"] else ""
        )
        facts["exported for"] += "; a model of its own" if asked.get("own") else ""
        if (mixture := card.get("mixture")) is not None:
            weighed = zip(mixture["nodes"], mixture["weights"], strict=True)
            facts["exported for"] += "; a mixture of " + ", ".join(
                f"{pi:.3g} × node {node}" for node, pi in weighed
            )
    members = card["members"]
    facts["members"] = (
        f"{len(members)} clients: {', '.join(map(str, members))}" if members else "none"
    )
    when = f"as after round {rounds['trained_until']} of {rounds['run']}; there since round {rounds['born'] + 1}"
    facts["rounds"] = (
        when
        if rounds["trained_until"] is not None
        else f"root of a star, in a run of {rounds['run']}"
    )
    facts["data"] = (
        f"{data['description']}; {data['training_examples']:,} training examples of the members"
    )
    if data.get("scaled") is not None:
        facts["inputs"] = (
            f"shape {data['shape']}, pixels as (x / 255 − {data['scaled'][0]}) / "
            f"{data['scaled'][1]}"
        )
    elif card["config"].get("data", {}).get("scaling") == "pixel":
        facts["inputs"] = (
            f"shape {data['shape']}, each pixel standardised over the images of the source"
        )
    if columns := data.get("columns"):
        scaled = zip(columns, data.get("mean", []), data.get("std", []), strict=False)
        facts["columns"] = ", ".join(
            [f"({name} − {mean:g}) / {std:g}" for name, mean, std in scaled] or columns
        )
    facts[card["metric"]["name"]] = _in_words(card[card["metric"]["name"]], card["metric"]["share"])
    facts["algorithm"] = _settings(card["algorithm"])
    facts["model"] = _settings(card["model"])
    facts["local training"] = _settings(card["config"].get("local", {}))
    facts["versions"] = _settings(card["versions"])
    return facts


def _in_words(score: Row | None, share: bool) -> str:
    if score is None:
        return "nobody was served with it"
    if score["mean"] is None:
        return f"undefined for the test data of {score['without_score']} clients after round {score['round']}"
    mean, low, high = (
        f"{100 * score[key]:.1f}" if share else f"{score[key]:.4g}"
        for key in ("mean", "min", "max")
    )
    return (
        f"{mean}{' %' if share else ''} ({low} to {high}), {score['clients']} clients on their "
        f"test data after round {score['round']}"
    )


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in settings.items() if value is not None)


SUFFIX = ".safetensors"


@checked()
def export_model(
    run: Run,
    out: str | Path,
    *,
    client: int | None = None,
    node: int | None = None,
    level: int | None = None,
) -> Path:
    """Write one model of a run as a state dict, with its model card as ``.json`` and as ``.md``.

    The header of the file contains the card too, under ``fedclade``. For a client, it is the model
    that the client was evaluated with, unless a level is given: its cluster's model with the
    client's personal parameters, a model of its own (Ditto, local training, ...), or, in FedEM and
    FedRC, a mixture of all models as a state dict of :class:`~fedclade.ModelMixture`. The model of
    a node has the shared parameters only. :func:`~fedclade.load_export` loads any of them.

    Parameters
    ----------
    run
        The run.
    out
        The file to make; ends in ``.safetensors``.
    client, node
        The client or the node whose model is exported; give one of the two.
    level
        Level of a node on the client's path from the root, 0, to its leaf, -1; if left out, the
        model that the client was evaluated with.

    Raises
    ------
    ConfigError
        If not exactly one of client and node is given, or a level with a node, or the file's name
        has another ending.
    TreeError
        If the tree has no such client, node or level.
    RunError
        If the run was saved without the layout of its model or is damaged, its models are permuted
        by its clients, a part of the client's model or the weights of its mixture are stored by the
        client only, or a file exists already or cannot be written.
    """
    run.check_readable()
    target = Path(out)
    if target.suffix != SUFFIX:
        raise ConfigError(f"the file to export to should end in {SUFFIX}, got {str(out)!r}")
    chosen, layout = _node_and_layout(run, client, node, level)
    mixture = _mixture(run, client, level)
    own = _own_model(run, client, level)
    if mixture is not None:
        tensors = mixture.state_dict(layout)
    elif own is not None:
        tensors = layout.full.state_dict(own)
    else:
        if client is not None:
            # Raises an error if the personal parameters are not stored here, as the client's model
            # cannot be assembled without them.
            run.personal(client)
        tensors = layout.state_dict(
            chosen.model, None if client is None else run.kept.get(client, {}).get("personal")
        )
    layout = layout if client is None else layout.full
    _write(
        model_card(run, chosen, layout, client, own=own is not None, mixture=mixture),
        tensors,
        target,
    )
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
    """Write the adapter of one model of a run as a folder in peft's format.

    See :func:`fedclade.models.save_adapter`.

    Parameters
    ----------
    run, client, node, level
        See :func:`export_model`.
    out
        The folder to make.
    alpha
        α of the low-rank pairs, if the run's config does not state it, as for a model that was
        passed in with its own adapter.

    Raises
    ------
    ConfigError
        If not exactly one of client and node is given, or a level with a node, or neither ``alpha``
        nor the config states α.
    TreeError
        If the tree has no such client, node or level.
    ModelError
        If the run did not train an adapter.
    RunError
        If the run cannot be read, the client was evaluated with a mixture of models, or the folder
        exists already or cannot be written.
    """
    chosen, layout = _node_and_layout(run, client, node, level)
    if _mixture(run, client, level) is not None:
        raise RunError(
            f"client {client} is served with a mixture of {len(run.tree.leaves)} models, which no "
            "one adapter is; export that of one model with --node, or the mixture as a state "
            "dict, without --adapter"
        )
    target = Path(out)
    if target.exists():
        raise RunError(f"{target} exists already; name another folder with --out, or remove it")
    alpha = run.config["model"].get("adapter", {}).get("alpha") if alpha is None else alpha
    if alpha is None:
        raise ConfigError(
            "the run's config has no model.adapter; say what α its adapters have: "
            "export_adapter(alpha=)"
        )
    own = _own_model(run, client, level)
    card = json.dumps(model_card(run, chosen, layout, client, own=own is not None))
    if own is not None:
        tensors = layout.full.unflatten(own)
    else:
        tensors = {
            **layout.unflatten(chosen.model),
            **({} if client is None else run.personal(client)),
        }
    try:
        make_folder(target.parent)
        appear(
            target, lambda beside: save_adapter(beside, tensors, float(alpha), {"fedclade": card})
        )
        return target
    except OSError as error:
        raise RunError(f"cannot write {target}: {error}") from error


def _mixture(run: Run, client: int | None, level: int | None) -> ClientMixture | None:
    """Return the mixture of a client, if it has one and no level is given."""
    return None if client is None or level is not None else client_mixture(run, client)


def _own_model(run: Run, client: int | None, level: int | None) -> Tensor | None:
    """Return the client's own model ``[F]``, if it has one and no level is given.

    Raises a RunError if the client has one, but only stores it itself.
    """
    if client is None or level is not None:
        return None
    own = run.kept.get(client, {}).get("model")
    if own is None and "network" in run.config and serves_own(run):
        raise RunError(
            f"this run has no model of client {client}: over a network it stays with it; export "
            "the server's with --node 0"
        )
    return own


def _node_and_layout(
    run: Run, client: int | None, node: int | None, level: int | None
) -> tuple[Node, Layout]:
    """Return the node whose model is exported, and the layout of the model's entries."""
    run.check_readable()
    chosen = _chosen(run, client, node, level)
    least = run.config.get("privacy", {}).get("min_cluster_size", 1)
    if is_withheld(run.tree, chosen.id, least):
        raise RunError(
            f"node {chosen.id} has {len(chosen.members)} members, fewer than "
            f"privacy.min_cluster_size, {least}, so its model is withheld"
        )
    if run.layout is None:
        raise RunError(
            "this run folder was written before the layout of the model was kept, and its models "
            "cannot be taken apart; run its config.toml again"
        )
    if run.layout.size != len(chosen.model):
        raise RunError(
            f"the run is damaged: its layout has {run.layout.size} entries, the model of node "
            f"{chosen.id} {len(chosen.model)}"
        )
    return chosen, run.layout


def _check_free(target: Path) -> None:
    """Check that no file of an export to ``target`` exists; raises RunError if one does."""
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
    assert node is not None  # since exactly one of client and node is given
    if not 0 <= node < len(run.tree.nodes):
        raise TreeError(
            f"node {node} is not in the parameter tree, which has the nodes 0 to "
            f"{len(run.tree.nodes) - 1}"
        )
    return run.tree.nodes[node]


def _write(card: Card, tensors: Mapping[str, Tensor], target: Path) -> None:
    """Write all three files or none of them; the model last, so that it never lacks its card."""
    text = json.dumps(card, indent=2)
    header = {"format": "pt", "fedclade": text}
    writers: Mapping[Path, Writer] = {
        target.with_suffix(".json"): lambda path: path.write_text(text + "\n"),
        target.with_suffix(".md"): lambda path: path.write_text(
            as_markdown(card, target.name), encoding="utf-8"
        ),
        target: lambda path: write_tensors(path, tensors, header),
    }
    try:
        write_together(writers, lambda: _check_free(target))
    except OSError as error:
        raise RunError(f"cannot write {target}: {error}") from error
