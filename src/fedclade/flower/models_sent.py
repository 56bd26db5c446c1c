"""Models of a query in messages: the vectors for each client, and the models' names.

A client reports the model that it trained from by the model's name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from flwr.app import Array

from fedclade.channel import Sketch
from fedclade.core import (
    OF_TORCH,
    OWN,
    ConfigError,
    EvaluationQuery,
    Layout,
    LocalRule,
    LocalTraining,
    Mixture,
    UpdateError,
    UpdateQuery,
    check_arguments,
    local_rule,
    unknown,
)
from fedclade.flower import wire
from fedclade.flower.wire import Content

# The local training that a server requests. The client reads it, and refuses settings that it does
# not know.


def read_spec(content: Content) -> LocalTraining:
    """Return the local training that a query requests; raise an UpdateError if unknown here."""
    kept = content.json("spec")
    optimizer = kept.get("optimizer", "sgd")
    # A name such as module:name would import code of the server's choice.
    if not isinstance(optimizer, str) or optimizer not in OF_TORCH:
        raise UpdateError(unknown("optimizer of its local training:", optimizer, OF_TORCH))
    options = kept.get("options")
    if isinstance(options, dict) and cast("dict[str, Any]", options).get("dampening"):
        raise UpdateError(
            "asked for dampened momentum, by which an update may be made from a few examples alone"
        )
    try:
        return LocalTraining(**check_arguments("its local training", LocalTraining, kept))
    except (ConfigError, OverflowError) as error:
        # a key that another version has, or a value of another type
        raise UpdateError(f"asked for local training that is not known here: {error}") from error


def read_rule(content: Content) -> LocalRule | None:
    """Return the local rule of a query, None if it has none; an UpdateError if unknown here."""
    if "rule" not in content.values:
        return None
    try:
        return local_rule(content.json("rule"))
    except (ConfigError, OverflowError) as error:
        raise UpdateError(f"asked for a local rule that is not known here: {error}") from error


Vectors = Mapping[str, Array]


@dataclass(frozen=True, eq=False)
class ModelsSent:
    """Vectors of each client's message, and name of the model that it trains from, by client."""

    vectors: Mapping[int, Vectors]
    names: Mapping[int, str]

    @classmethod
    def of(cls, query: UpdateQuery) -> Self:
        """Return the vectors and names of a query to train models."""
        models = query.models
        rows = dict(zip(query.ids, query.assignment, strict=True))
        if query.mixture is not None:
            vectors = of_mixture(query)
            name = wire.digest(b"".join(vectors[str(k)].data for k in range(len(models))))
            return cls(dict.fromkeys(rows, vectors), dict.fromkeys(rows, name))
        needs = query.round.uses_anchors or query.shares
        anchors = query.anchors if query.anchors is not None and needs else query.assignment
        arrays = wire.raw_vectors(models, [*query.assignment, *anchors])
        names = {row: wire.digest(array.data) for row, array in arrays.items()} | {
            OWN: wire.digest(b"")
        }
        sent: dict[int, Vectors] = {}
        for (client, row), anchor in zip(rows.items(), anchors, strict=True):
            places = {"model": row, **({"anchor": anchor} if anchor != row else {})}
            sent[client] = {name: arrays[place] for name, place in places.items() if place != OWN}
        return cls(sent, {client: names[row] for client, row in rows.items()})


def of_mixture(query: UpdateQuery | EvaluationQuery) -> Vectors:
    """Return the vectors of a query about a mixture.

    They are its models by their numbers, and P̂ as ``rates`` if the mixture has it.
    """
    vectors = {
        str(row): array
        for row, array in wire.raw_vectors(query.models, range(len(query.models))).items()
    }
    if query.mixture is not None and query.mixture.rates is not None:
        vectors["rates"] = wire.raw_vector(query.mixture.rates.flatten())
    return vectors


def as_values(query: UpdateQuery | EvaluationQuery) -> dict[str, int | bool]:
    """Return a message's values on the mixture that its models form; empty without a mixture."""
    return (
        {"mixture": len(query.models), "by_label": query.mixture.by_label} if query.mixture else {}
    )


def training_values(query: UpdateQuery, sketch: Sketch | None) -> dict[str, Any]:
    """Return the values of a query to train.

    The updates from splits of the data are compared by ``sketch``.
    """
    this_round = query.round
    return {
        **{"round": this_round.number, "query": this_round.query, "purpose": this_round.purpose},
        **{"seed": this_round.seed, "spec": wire.to_json(this_round.spec)},
        **{
            "replicates": this_round.replicates,
            "part_size": this_round.part_size,
            "compares_parts": this_round.compares_parts,
            "dim": 0,
            **(sketch.described if sketch else {}),
            **{
                "own": query.own,
                "shares": query.shares,
                "personal_epochs": this_round.personal_epochs,
            },
        },
        **as_values(query),
        **({} if this_round.rule is None else {"rule": json.dumps(this_round.rule.described())}),
    }


def models_of_mixture(content: Content) -> int:
    """Return the number of models of the mixture in a message; 0 without a mixture."""
    return content.get("mixture", int) if "mixture" in content.values else 0


def read_mixture(content: Content, labels: int | None) -> tuple[list[str], Mixture | None]:
    """Return the names of the models of a mixture, and the mixture.

    Without a mixture the result is an empty list and None.

    Parameters
    ----------
    content
        Content of the message.
    labels
        Number of labels; None if examples do not have one label each.

    Raises
    ------
    UpdateError
        If the mixture cannot be read.
    """
    if (models := models_of_mixture(content)) == 0:
        return [], None
    if not 0 < models <= len(content.vectors):
        raise UpdateError(
            f"asked about a mixture of {models} models, got {len(content.vectors)} vectors"
        )
    names = [str(row) for row in range(models)]
    by_label = content.get("by_label", bool)
    if "rates" not in content.vectors:
        return names, Mixture(by_label)
    if labels is None:
        raise UpdateError("asked how common labels are, and its examples do not have one each")
    return names, Mixture(
        by_label,
        wire.read_vector(content.vector("rates"), (models, labels), torch.float64, "rates"),
    )


def length_of(query: UpdateQuery, layout: Layout, labels: int | None) -> tuple[int, int]:
    """Return the length of an update of all models of a mixture, and its number of parameters.

    Raises
    ------
    ConfigError
        If the update should include a table of labels, and examples do not have one label each.
    """
    K = len(query.models)
    by_label = query.mixture is not None and query.mixture.by_label
    if by_label and labels is None:
        raise ConfigError(
            "labels cannot be counted in a task whose examples do not have one label each; take "
            "fedem in place of fedrc"
        )
    return K * (layout.size + ((labels or 0) if by_label else 0)), K * layout.n_parameters
