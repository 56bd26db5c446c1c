"""The models of a query as they travel: what each client is sent, and by which name it says what it trained from."""

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

# The local training that a server asks for: read by the client, and refused where it is not known
# there.


def read_spec(content: Content) -> LocalTraining:
    """Return the local training that a query names; an UpdateError if there is none like that here."""
    kept = content.json("spec")
    optimizer = kept.get("optimizer", "sgd")
    # a module:name imports what the server likes
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
    """Return the local rule that a query names, if it does; an UpdateError if there is none like that here."""
    if "rule" not in content.values:
        return None
    try:
        return local_rule(content.json("rule"))
    except (ConfigError, OverflowError) as error:
        raise UpdateError(f"asked for a local rule that is not known here: {error}") from error


Vectors = Mapping[str, Array]


@dataclass(frozen=True, eq=False)
class ModelsSent:
    """By client: the vectors of its message, and the name of the model that it trains from."""

    vectors: Mapping[int, Vectors]
    names: Mapping[int, str]

    @classmethod
    def of(cls, query: UpdateQuery) -> Self:
        """Return what a query to train models sends."""
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
    """Return the vectors of a query about a mixture: its models by their numbers, and P̂ as ``rates`` if it has that."""
    vectors = {
        str(row): array
        for row, array in wire.raw_vectors(query.models, range(len(query.models))).items()
    }
    if query.mixture is not None and query.mixture.rates is not None:
        vectors["rates"] = wire.raw_vector(query.mixture.rates.flatten())
    return vectors


def as_values(query: UpdateQuery | EvaluationQuery) -> dict[str, int | bool]:
    """Return what a message says of the mixture that its models are: of how many; nothing if they are none."""
    return (
        {"mixture": len(query.models), "by_label": query.mixture.by_label} if query.mixture else {}
    )


def training_values(query: UpdateQuery, sketch: Sketch | None) -> dict[str, Any]:
    """Return what a query to train says; the sketch is what updates of parts of the data are compared by."""
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
    """Return of how many models a mixture is that a message is about; 0 if of none."""
    return content.get("mixture", int) if "mixture" in content.values else 0


def read_mixture(content: Content, labels: int | None) -> tuple[list[str], Mixture | None]:
    """Return the names of the models of a mixture, and the mixture; none and None if a message is about something else.

    ``labels`` is how many there are, or None where examples do not have one each. An UpdateError if
    it cannot be read.
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
    """Return how long the update of all models of a mixture is, and how much of it are parameters.

    A ConfigError is raised if it should come with a table of labels, and examples do not have one
    each.
    """
    K = len(query.models)
    by_label = query.mixture is not None and query.mixture.by_label
    if by_label and labels is None:
        raise ConfigError(
            "labels cannot be counted in a task whose examples do not have one label each; take "
            "fedem in place of fedrc"
        )
    return K * (layout.size + ((labels or 0) if by_label else 0)), K * layout.n_parameters
