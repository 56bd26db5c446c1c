"""What an exported model is: where it stands in the tree, what trained it, how it did, how to load it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from fedclade.algorithms import ALGORITHMS, FedSoft, OwnModels
from fedclade.core import Layout, Node
from fedclade.runs.store.run import Row, Run
from fedclade.runs.store.served_models import ClientMixture, serves_mixtures
from fedclade.tasks import ModelMixture, noted_metrics, spread

CARD_FORMAT = 1
"""Version of the card's keys, in each card."""

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
    """Return all that there is to say about a node's model, exported for a client if one is given, ready for JSON.

    Whether it is not the node's, but the client's ``own``, or its ``mixture`` of several nodes' models.
    """
    last = {row["client"]: row for row in run.client_rows}
    sizes = [last[member]["n_train"] for member in node.members if member in last]
    path, metric = run.tree.above(node.id), noted_metrics(run.summary)[0]
    tensors = [(s.name, s.shape, s.dtype) for s in (*layout.parameters, *layout.buffers)]
    tensors += [(name, p.shape, p.dtype) for name, p in layout.frozen.items()]
    if mixture is not None:
        of_models = range(len(mixture.nodes))
        tensors = [(f"models.{k}.{name}", shape, dtype) for k in of_models for name, shape, dtype in tensors]
        tensors.append(("weights", mixture.weights.shape, mixture.weights.dtype))
    asked = {} if client is None else {"client": client, "name": last[client]["name"] if client in last else None}
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
        "rounds": {"run": run.summary["rounds"], "born": node.born, "trained_until": _trained_until(run, node)},
        "data": {"description": run.summary["data"], "training_examples": sum(sizes), **run.summary.get("inputs", {})},
        "metric": metric.noted,
        metric.name: _score(run, node, metric.name, client if own or run.parted or mixture is not None else None),
        "algorithm": run.config["algorithm"],
        "model": {**run.config["model"], "parameters": layout.n_parameters},
        "tensors": {
            name: {"shape": list(shape), "dtype": str(dtype).removeprefix("torch.")} for name, shape, dtype in tensors
        },
        "config": {key: value for key, value in run.config.items() if key != "versions"},
        "versions": run.config.get("versions", {}),
    }


def serves_own(run: Run) -> bool:
    """Whether clients, or some of them, were served with models of their own, which are none of the tree's."""
    entry = ALGORITHMS.get(run.config["algorithm"]["name"])
    personalized = bool(run.config["algorithm"].get("personalize"))
    return personalized or (entry is not None and issubclass(entry.algorithm, OwnModels | FedSoft))


def _trained_until(run: Run, node: Node) -> int | None:
    """Return the round after which the model was as it is: a split leaves its node that of the round before.

    A root that goes on beside its clusters is trained to the end.
    None for the root of a star that there was from the start: what it holds, if anything but an initial model, is the
    algorithm's own affair.
    """
    if node.split_in is None or node.continued is not None:
        return run.model_round
    return node.split_in - 1 if node.split_in else None


def _score(run: Run, node: Node, metric: str, client: int | None = None) -> Card | None:
    """Return how clients, or one, did with this model when they were last served with it; None if nobody ever was.

    An inner node served its members until it was split. Where its last round was not evaluated, what was evaluated is
    the model of an earlier round, and ``round`` tells which.
    """
    if client is None and serves_mixtures(run):  # with none of their models alone
        return None
    served = [row for row in run.client_rows if row["served_by"] == node.id and client in (None, row["client"])]
    if client is None and serves_own(run):  # over a network nobody here knows who was
        known = "network" not in run.config
        served = [row for row in served if known and "model" not in run.kept.get(row["client"], {})]
    if not served:
        return None
    number = max(row["round"] for row in served)
    scores = spread([row[metric] for row in served if row["round"] == number])
    shown = ("mean", "min", "max", "clients", *(["without_score"] if scores["without_score"] else []))
    return {**{name: scores[name] for name in shown}, "round": number}


def as_markdown(card: Card, file: str) -> str:
    """Return a card as a page for people, with the lines that load the model from a file of this name."""
    rows = "".join(f"| {name} | {_plain(value)} |\n" for name, value in _facts(card).items())
    tensors = "".join(f"| `{name}` | {each['shape']} | {each['dtype']} |\n" for name, each in card["tensors"].items())
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
    """Return how to load the model in plain PyTorch."""
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
    """Return a text that Markdown shows as it is: no link, no tag, and in one cell of a table."""
    return " ".join(text.replace("](", "]\\(").replace("<", "\\<").replace("|", "\\|").split())


def _facts(card: Card) -> Mapping[str, str]:
    rounds, data, asked = card["rounds"], card["data"], card["exported_for"]
    path = " → ".join(map(str, card["path"]))
    facts = {"place": f"level {card['level']} of the path {path}" + (", a leaf" if card["leaf"] else "")}
    if asked is not None:
        facts["exported for"] = f"client {asked['client']}" + (f" ({asked['name']})" if asked["name"] else "")
        facts["exported for"] += "; a model of its own" if asked.get("own") else ""
        if (mixture := card.get("mixture")) is not None:
            weighed = zip(mixture["nodes"], mixture["weights"], strict=True)
            facts["exported for"] += "; a mixture of " + ", ".join(f"{pi:.3g} × node {node}" for node, pi in weighed)
    members = card["members"]
    facts["members"] = f"{len(members)} clients: {', '.join(map(str, members))}" if members else "none"
    when = f"as after round {rounds['trained_until']} of {rounds['run']}; there since round {rounds['born'] + 1}"
    facts["rounds"] = when if rounds["trained_until"] is not None else f"root of a star, in a run of {rounds['run']}"
    facts["data"] = f"{data['description']}; {data['training_examples']:,} training examples of the members"
    if data.get("scaled") is not None:
        facts["inputs"] = f"shape {data['shape']}, pixels as (x / 255 − {data['scaled'][0]}) / {data['scaled'][1]}"
    elif card["config"].get("data", {}).get("scaling") == "pixel":
        facts["inputs"] = f"shape {data['shape']}, each pixel standardised over the images of the source"
    if columns := data.get("columns"):
        scaled = zip(columns, data.get("mean", []), data.get("std", []), strict=False)
        facts["columns"] = ", ".join([f"({name} − {mean:g}) / {std:g}" for name, mean, std in scaled] or columns)
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
    mean, low, high = (f"{100 * score[key]:.1f}" if share else f"{score[key]:.4g}" for key in ("mean", "min", "max"))
    return (
        f"{mean}{' %' if share else ''} ({low} to {high}), {score['clients']} clients on their test data after round "
        f"{score['round']}"
    )


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in settings.items() if value is not None)
