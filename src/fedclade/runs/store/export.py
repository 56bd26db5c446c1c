"""Export of a run's model as a file for plain PyTorch, with a model card.

A model card describes an exported model: its node in the parameter tree, its training, its scores,
and how to load it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

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
    find_client,
    served_node,
    serves_mixtures,
    serves_own,
)
from fedclade.runs.store.staging import Writer, write_together
from fedclade.tasks import ModelMixture, read_metrics, spread

# Model card of an exported model: its place in the tree, training, scores, and how to load it.

CARD_FORMAT = 1
"""Version of the keys of a model card, recorded in each card as ``format``."""

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
    """Build the model card of an exported model, as values for JSON.

    Parameters
    ----------
    run
        The run.
    node
        The node of the tree whose model is exported, or the client's node.
    layout
        Mapping between the entries of a model vector and the module's tensors.
    client
        The client for which the model is exported; None if it is exported for a node.
    own
        Whether the exported model is the client's own whole model, not the node's model.
    mixture
        The client's mixture of several nodes' models; None if a single model is exported.
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
    exported_for: Card = {}
    if client is not None:
        name = last[client]["name"] if client in last else None
        exported_for = {"client": client, "name": name}
    if own:
        exported_for["own"] = True
    # A model that only this client uses gets this client's score, not the score of all members.
    scored = client if own or run.parted or mixture is not None else None
    card: Card = {
        "format": CARD_FORMAT,
        "node": node.id,
        "path": [each.id for each in path],
        "level": len(path) - 1,
        "leaf": not run.tree.children(node.id),
        "exported_for": exported_for or None,
    }
    if mixture is not None:
        card["mixture"] = mixture.described
    return card | {
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
        metric.name: _score_node(run, node, metric.name, scored),
        "algorithm": run.config["algorithm"],
        "model": {**run.config["model"], "parameters": layout.n_parameters},
        "tensors": {
            name: {"shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
            for name, shape, dtype in tensors
        },
        "config": {key: value for key, value in run.config.items() if key != "versions"},
        "versions": run.config.get("versions", {}),
    }


def _trained_until(run: Run, node: Node) -> int | None:
    """Return the last round in which a node's model was trained.

    A cluster that is split keeps the model of the round before the split. A root that is trained
    further in parallel to its clusters is trained until the end of the run. The result is None for
    any other root whose clusters existed from the start: only the algorithm knows whether the
    root's model was trained at all.
    """
    if node.split_in is None or node.continued is not None:
        return run.model_round
    if not node.split_in:
        return None
    return node.split_in - 1


def _score_node(run: Run, node: Node, metric: str, client: int | None = None) -> Card | None:
    """Summarize the test scores of the clients that were last evaluated with a node's model.

    Parameters
    ----------
    run, node
        The run, and the node whose model is scored.
    metric
        Name of the metric.
    client
        The only client to include; None for all clients.

    Returns
    -------
    dict or None
        Mean, smallest and largest score, number of clients, and the round of the evaluation. If the
        model's last round was not evaluated, the evaluation is from an earlier round. None if no
        client was evaluated with the node's model alone, as in a run with mixtures of models.
    """
    if client is None and serves_mixtures(run):  # no client was evaluated with one model alone
        return None
    served = [
        row
        for row in run.client_rows
        if row["served_by"] == node.id and client in (None, row["client"])
    ]
    # Over a network the run does not record which clients have a model of their own.
    if client is None and serves_own(run):
        known = "network" not in run.config
        served = [row for row in served if known and "model" not in run.kept.get(row["client"], {})]
    if not served:
        return None
    number = max(row["round"] for row in served)
    scores = spread([row[metric] for row in served if row["round"] == number])
    shown = ["mean", "min", "max", "clients"]
    if scores["without_score"]:
        shown.append("without_score")
    return {**{name: scores[name] for name in shown}, "round": number}


def as_markdown(card: Card, file: str) -> str:
    """Return a model card as a Markdown page, with code that loads the model from a file."""
    rows = "".join(
        f"| {name} | {_escape_cell(value)} |\n" for name, value in _list_facts(card).items()
    )
    tensors = "".join(
        f"| `{name}` | {each['shape']} | {each['dtype']} |\n"
        for name, each in card["tensors"].items()
    )
    name = f"Node {card['node']}"
    if nodes := card.get("mixture", {}).get("nodes", ()):
        name = f"Mixture of nodes {', '.join(map(str, nodes))}"
    return f"""# {name} of a {card["algorithm"]["name"]} run

| | |
| :-- | :-- |
{rows}
## Loading it

{_describe_loading(card, file)}

| tensor | shape | type |
| :-- | :-- | :-- |
{tensors}"""


def _describe_loading(card: Card, file: str) -> str:
    """Return the section of the Markdown page with code that loads the model in plain PyTorch."""
    if "mixture" not in card:
        return f"""```python
from safetensors.torch import load_file
model.load_state_dict(load_file("{file}"))
```

`model` is a module with the tensors below: {card["model"]["name"]}, as it was trained.{_describe_unit(card)}"""
    mixture = card["mixture"]
    count = len(mixture["nodes"])
    return f"""The client is evaluated with a mixture of {count} models, weighted by its own weights. The
mixture is a module of the class `fedclade.ModelMixture`. Without fedclade, define the class first:

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

`model` is a module like each of these models: {card["model"]["name"]}, as it was trained.{_describe_unit(card)}"""


def _describe_unit(card: Card) -> str:
    """Return a note on the unit of predictions, for a model trained on standardized targets.

    The note is empty for other models.
    """
    if not card["data"].get("target_mean"):
        return ""
    return """

It was trained on standardized targets. A prediction in the unit of the data is computed from an
output as the row *targets* above says; `fedclade.load_export` returns a model that predicts in this
unit."""


def _escape_cell(text: str) -> str:
    """Escape text, so that Markdown shows it unchanged in one cell of a table."""
    return " ".join(text.replace("](", "]\\(").replace("<", "\\<").replace("|", "\\|").split())


def _list_facts(card: Card) -> Mapping[str, str]:
    """Return the rows of the first table of the Markdown page, as texts by title."""
    data = card["data"]
    path = " → ".join(map(str, card["path"]))
    facts = {"place": f"level {card['level']} of the path {path}"}
    if card["leaf"]:
        facts["place"] += ", a leaf"
    if card["exported_for"] is not None:
        facts["exported for"] = _describe_client(card)
    members = card["members"]
    facts["members"] = "none"
    if members:
        facts["members"] = f"{len(members)} clients: {', '.join(map(str, members))}"
    facts["rounds"] = _describe_rounds(card["rounds"])
    facts["data"] = (
        f"{data['description']}; {data['training_examples']:,} training examples of the members"
    )
    if data.get("scaled") is not None:
        facts["inputs"] = (
            f"shape {data['shape']}, pixels as (x / 255 − {data['scaled'][0]}) / "
            f"{data['scaled'][1]}"
        )
    elif "structure" in data:
        facts["inputs"] = data["structure"]
    elif card["config"].get("data", {}).get("scaling") == "pixel":
        facts["inputs"] = (
            f"shape {data['shape']}, each pixel standardised over the images of the source"
        )
    if columns := data.get("columns"):
        scaled = zip(columns, data.get("mean", []), data.get("std", []), strict=False)
        facts["columns"] = ", ".join(
            [f"({name} − {mean:g}) / {std:g}" for name, mean, std in scaled] or columns
        )
    if target_mean := data.get("target_mean"):
        scales = zip(target_mean, data["target_std"], strict=True)
        facts["targets"] = ", ".join(f"output × {std:g} + {mean:g}" for mean, std in scales)
    metric = card["metric"]
    facts[metric["name"]] = _describe_score(card[metric["name"]], metric["share"])
    facts["algorithm"] = _format_settings(card["algorithm"])
    facts["model"] = _format_settings(card["model"])
    facts["local training"] = _format_settings(card["config"].get("local", {}))
    facts["versions"] = _format_settings(card["versions"])
    return facts


def _describe_client(card: Card) -> str:
    """Describe the client for which a model was exported, and whether the model is its own."""
    client = card["exported_for"]
    text = f"client {client['client']}"
    if client["name"]:
        text += f" ({client['name']})"
    if client.get("own"):
        text += "; a model of its own"
    if (mixture := card.get("mixture")) is not None:
        weighed = zip(mixture["nodes"], mixture["weights"], strict=True)
        text += "; a mixture of "
        text += ", ".join(f"{weight:.3g} × node {node}" for node, weight in weighed)
    return text


def _describe_rounds(rounds: Mapping[str, Any]) -> str:
    """Describe in which rounds a model existed and was trained."""
    if rounds["trained_until"] is None:
        return f"root of a star, in a run of {rounds['run']}"
    return (
        f"as after round {rounds['trained_until']} of {rounds['run']}; "
        f"there since round {rounds['born'] + 1}"
    )


def _describe_score(score: Row | None, share: bool) -> str:
    """Describe clients' scores as text; ``share`` is whether to write scores in per cent."""
    if score is None:
        return "no client was evaluated with it"
    if score["mean"] is None:
        return (
            f"undefined for the test data of {score['without_score']} clients after round "
            f"{score['round']}"
        )
    numbers = [score[key] for key in ("mean", "min", "max")]
    if share:
        mean, low, high = (f"{100 * number:.1f}" for number in numbers)
        mean += " %"
    else:
        mean, low, high = (f"{number:.4g}" for number in numbers)
    return (
        f"{mean} ({low} to {high}), {score['clients']} clients on their test data after round "
        f"{score['round']}"
    )


def _format_settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in settings.items() if value is not None)


@dataclass(frozen=True, eq=False)
class SelectedModel:
    """Model of a run that a user selected by a client or a node, as state dicts for PyTorch.

    Parameters
    ----------
    node
        The node with the model, or the client's node.
    layout
        Layout of the model; for a client, with its personal parameters.
    client
        Id of the client; None if a node was selected.
    is_own
        Whether the model is a whole model of the client's own.
    mixture
        The client's mixture of several models; None for a single model.
    """

    node: Node
    layout: Layout
    client: int | None
    is_own: bool
    mixture: ClientMixture | None
    _vector: Tensor

    @property
    def states(self) -> list[dict[str, Tensor]]:
        """State dict of the model, or of each model of the mixture."""
        if self.mixture is not None:
            return [self.layout.state_dict(node.model) for node in self.mixture.nodes]
        return [self.layout.state_dict(self._vector)]


def select_model(
    run: Run, *, client: int | str | None = None, node: int | None = None, level: int | None = None
) -> SelectedModel:
    """Select a model of a run: of a node, or the model with which a client was evaluated.

    See :func:`export_model` for the parameters and the errors.
    """
    number = None if client is None else find_client(run, client)
    chosen, layout = find_node_and_layout(run, number, node, level)
    mixture = find_mixture(run, number, level)
    own = find_own_model(run, number, level)
    vector = chosen.model
    if own is not None:
        vector = own
    elif mixture is None and number is not None:
        # Raises an error if the personal parameters are not stored here, as the client's model
        # cannot be assembled without them.
        run.personal(number)
        if layout.personal:
            personal = run.kept[number]["personal"]
            vector = layout.joined(vector, personal.to(vector))
    if number is not None:
        layout = layout.full
    return SelectedModel(
        node=chosen,
        layout=layout,
        client=number,
        is_own=own is not None,
        mixture=mixture,
        _vector=vector,
    )


SUFFIX = ".safetensors"


@checked()
def export_model(
    run: Run,
    out: str | Path,
    *,
    client: int | str | None = None,
    node: int | None = None,
    level: int | None = None,
) -> Path:
    """Write one model of a run as a state dict for PyTorch, with a model card.

    The card is written as ``.json`` and as ``.md`` next to the file, and into the header of the
    file under ``fedclade``.

    For a client without a level, the exported model is the model with which the client was
    evaluated. This is the cluster's model with the client's personal parameters; or a model of the
    client's own (Ditto, local training, ...); or, in FedEM and FedRC, a mixture of all models, as a
    state dict of :class:`~fedclade.ModelMixture`. The exported model of a node has the shared
    parameters only. :func:`~fedclade.load_export` loads any of these files.

    Parameters
    ----------
    run
        The run.
    out
        Path of the new file, which ends in ``.safetensors``.
    client, node
        The client (its id or its name) or the node whose model is exported; give one of the two.
    level
        Level of a node on the client's path from the root (0) to its leaf (-1). The model of this
        node is exported. If left out, the model with which the client was evaluated is exported.

    Raises
    ------
    ConfigError
        If not exactly one of client and node is given, a level is given with a node, or the file's
        name does not end in ``.safetensors``.
    TreeError
        If the tree has no such client, node or level.
    RunError
        If the run folder does not contain the layout of the model or is damaged; the models are
        permuted by the clients; only the client stores its personal parameters or mixture weights;
        or a file exists already or cannot be written.
    """
    run.check_readable()
    target = Path(out)
    if target.suffix != SUFFIX:
        raise ConfigError(f"the file to export to should end in {SUFFIX}, got {str(out)!r}")
    chosen = select_model(run, client=client, node=node, level=level)
    if chosen.mixture is not None:
        tensors = chosen.mixture.state_dict(chosen.layout)
    else:
        (tensors,) = chosen.states
    card = model_card(
        run, chosen.node, chosen.layout, chosen.client, own=chosen.is_own, mixture=chosen.mixture
    )
    _write_export(card, tensors, target)
    return target


@checked()
def export_adapter(
    run: Run,
    out: str | Path,
    *,
    client: int | str | None = None,
    node: int | None = None,
    level: int | None = None,
    alpha: float | None = None,
) -> Path:
    """Write the adapter of one model of a run as a folder in the format of the library peft.

    An adapter is the trained low-rank part of a model. See :func:`fedclade.models.save_adapter`.

    Parameters
    ----------
    run, client, node, level
        See :func:`export_model`.
    out
        Path of the new folder.
    alpha
        Scaling factor α of the adapter, if the run's config does not state it, such as for a module
        that already had an adapter when it was passed to the run.

    Raises
    ------
    ConfigError
        If not exactly one of client and node is given, a level is given with a node, or neither
        ``alpha`` nor the config states α.
    TreeError
        If the tree has no such client, node or level.
    ModelError
        If the run did not train an adapter.
    RunError
        If the run cannot be read, the client was evaluated with a mixture of models, or the folder
        exists already or cannot be written.
    """
    if client is not None:
        client = find_client(run, client)
    chosen, layout = find_node_and_layout(run, client, node, level)
    if find_mixture(run, client, level) is not None:
        raise RunError(
            f"client {client} is evaluated with a mixture of {len(run.tree.leaves)} models, which "
            "cannot be exported as a single adapter; export the adapter of one model with --node, "
            "or the mixture as a state dict, without --adapter"
        )
    target = Path(out)
    if target.exists():
        raise RunError(f"{target} exists already; name another folder with --out, or remove it")
    if alpha is None:
        alpha = run.config["model"].get("adapter", {}).get("alpha")
    if alpha is None:
        raise ConfigError(
            "the run's config has no model.adapter, so α of the adapter is unknown; pass it as "
            "export_adapter(alpha=)"
        )
    own = find_own_model(run, client, level)
    card = json.dumps(model_card(run, chosen, layout, client, own=own is not None))
    if own is not None:
        tensors = layout.full.unflatten(own)
    else:
        tensors = dict(layout.unflatten(chosen.model))
        if client is not None:
            tensors |= run.personal(client)
    try:
        make_folder(target.parent)
        appear(
            target, lambda beside: save_adapter(beside, tensors, float(alpha), {"fedclade": card})
        )
        return target
    except OSError as error:
        raise RunError(f"cannot write {target}: {error}") from error


def find_mixture(run: Run, client: int | None, level: int | None) -> ClientMixture | None:
    """Return the mixture of models with which a client was evaluated.

    The result is None if the client was evaluated with a single model, or a level of the tree is
    given. Then a single model is exported.
    """
    if client is None or level is not None:
        return None
    return client_mixture(run, client)


def find_own_model(run: Run, client: int | None, level: int | None) -> Tensor | None:
    """Return the client's own model as a vector ``[F]``, with shared and personal entries.

    The result is None if the client has no model of its own, or a level of the tree is given.

    Raises
    ------
    RunError
        If only the client stores its model, as in a network.
    """
    if client is None or level is not None:
        return None
    own = run.kept.get(client, {}).get("model")
    if own is None and "network" in run.config and serves_own(run):
        raise RunError(
            f"this run has no model of client {client}: over a network, only the client stores its "
            "own model; export the server's model with --node 0"
        )
    return own


def find_node_and_layout(
    run: Run, client: int | None, node: int | None, level: int | None
) -> tuple[Node, Layout]:
    """Return the node whose model is exported, and the layout of the model's entries.

    Raises
    ------
    RunError
        If the model must not be released, or the run folder is damaged or has no layout.
    """
    run.check_readable()
    chosen = _find_node(run, client, node, level)
    least = run.config.get("privacy", {}).get("min_cluster_size", 1)
    if is_withheld(run.tree, chosen.id, least):
        raise RunError(
            f"node {chosen.id} has {len(chosen.members)} members, fewer than "
            f"privacy.min_cluster_size, {least}, so its model is withheld; export the model of "
            "another node"
        )
    if run.layout is None:
        raise RunError(
            "this run folder was written by a version that did not record the layout of the model, "
            "so its models cannot be converted to tensors; run its config.toml again"
        )
    if run.layout.size != len(chosen.model):
        raise RunError(
            f"the run is damaged: its layout has {run.layout.size} entries, but the model of node "
            f"{chosen.id} has {len(chosen.model)}; restore the run folder from a copy"
        )
    return chosen, run.layout


def _check_free(target: Path) -> None:
    """Check that no file of an export to ``target`` exists yet.

    Raises
    ------
    RunError
        If the model file or one of its two cards exists.
    """
    for path in (target, target.with_suffix(".json"), target.with_suffix(".md")):
        if path.exists():
            raise RunError(f"{path} exists already; name another file with --out, or remove it")


def _find_node(run: Run, client: int | None, node: int | None, level: int | None) -> Node:
    """Return the node to export, given by its number, or by a client and a level of its path."""
    if (client is None) == (node is None):
        given = "neither" if client is None else f"client {client} and node {node}"
        raise ConfigError(f"a model is chosen by either --client or --node, got {given}")
    if client is not None:
        if level is None:
            return served_node(run, client)
        return run.tree.node_for(client, level)
    if level is not None:
        raise ConfigError(
            f"--level {level} can only be used with --client; leave it out, since node {node} has "
            "only one model"
        )
    assert node is not None  # since exactly one of client and node is given
    if not 0 <= node < len(run.tree.nodes):
        raise TreeError(
            f"node {node} is not in the parameter tree, which has the nodes 0 to "
            f"{len(run.tree.nodes) - 1}"
        )
    return run.tree.nodes[node]


def _write_export(card: Card, tensors: Mapping[str, Tensor], target: Path) -> None:
    """Write the model file and its two cards, or none of them.

    The model file appears last, so that it never exists without its card.
    """
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
