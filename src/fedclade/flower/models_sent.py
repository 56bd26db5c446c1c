"""Contents of training queries in messages: models, and the settings of local training.

The name of a model is the digest of its vector. A client's reply repeats the name of the model that
the client has trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from flwr.app import Array
from torch import Tensor

from fedclade.channel import DENSE_ENCODINGS, Sketch, decode, encode
from fedclade.core import (
    OWN,
    ConfigError,
    HeadThenBody,
    LastLayer,
    Layout,
    LocalTraining,
    Mixture,
    Splits,
    TrainQuery,
    UpdateError,
    check_arguments,
    torch_optimizers,
    unknown,
)
from fedclade.flower import wire
from fedclade.flower.own_steps import code_values, code_vectors
from fedclade.flower.wire import Content
from fedclade.flower.work_sent import shares_model, stores_model

# Local training that a server requests. A client refuses settings that it does not know.


def read_spec(content: Content) -> LocalTraining:
    """Read the local training (optimizer, epochs, batch size) that a query requests.

    Raises
    ------
    UpdateError
        If the query has a setting that this version does not know, or requests dampened momentum.
    """
    kept = content.json("spec")
    optimizer = kept.get("optimizer", "sgd")
    # A name such as module:name would import code of the server's choice.
    known = torch_optimizers()
    if not isinstance(optimizer, str) or optimizer not in known:
        raise UpdateError(unknown("optimizer in a query for local training:", optimizer, known))
    if kept.get("lr_schedule") is not None:
        raise UpdateError(
            "the query names a schedule of the step size, although the server of a run computes "
            "the step size of each round; send it as lr"
        )
    options = kept.get("options")
    if isinstance(options, dict) and cast("dict[str, Any]", options).get("dampening"):
        raise UpdateError(
            "the query requests momentum with dampening, by which a server could obtain an update "
            "from only a few examples; leave dampening out of local.options"
        )
    try:
        return LocalTraining(**check_arguments("its local training", LocalTraining, kept))
    except (ConfigError, OverflowError) as error:
        # for example, a key of another version of fedclade, or a value of another type
        raise UpdateError(
            f"the query requests local training that this client does not know: {error}"
        ) from error


Vectors = Mapping[str, Array]


@dataclass(frozen=True, eq=False)
class ModelsSent:
    """Models of a training query as they are sent.

    The fields contain, by client, the vectors of the client's message and the name of the model
    from which the client starts training; and the encoding of the models. Clients that receive the
    same vectors have the same object.
    """

    vectors: Mapping[int, Vectors]
    names: Mapping[int, str]
    encoding: str = "float32"

    @classmethod
    def of(cls, query: TrainQuery, encoding: str = "float32", n_parameters: int = 0) -> Self:
        """Return the vectors and the names of the models in a training query.

        Parameters
        ----------
        query
            Training query.
        encoding
            Encoding of the models, one of :data:`~fedclade.channel.DENSE_ENCODINGS`. The models of
            a mixture are always sent without loss.
        n_parameters
            Number of parameters of a model, which a lossy encoding needs.
        """
        if query.work.mixture is not None:
            vectors = of_mixture(query.models.vectors, query.work.mixture)
            models = [vectors[str(row)].data for row in range(len(query.models.vectors))]
            name = wire.digest(b"".join(models))
            return cls(dict.fromkeys(query.ids, vectors), dict.fromkeys(query.ids, name))
        rows = query.models.start
        anchors = anchors_of(query)
        arrays = encoded_models(query.models.vectors, [*rows, *anchors], encoding, n_parameters)
        name_of = {row: wire.digest(array.data) for row, array in arrays.items()}
        name_of[OWN] = wire.digest(b"")
        of_steps = code_vectors(query)
        vectors_of: dict[tuple[int, int], Vectors] = {}
        for row, anchor in set(zip(rows, anchors, strict=True)):
            places = {"model": row} if anchor == row else {"model": row, "anchor": anchor}
            models = {name: arrays[place] for name, place in places.items() if place != OWN}
            vectors_of[row, anchor] = {**models, **of_steps}
        starts = zip(query.ids, rows, anchors, strict=True)
        sent = {client: vectors_of[row, anchor] for client, row, anchor in starts}
        names = {client: name_of[row] for client, row in zip(query.ids, rows, strict=True)}
        return cls(sent, names, encoding)

    @property
    def different(self) -> list[Vectors]:
        """Vectors of all messages, where vectors that clients have in common occur once."""
        return list({id(vectors): vectors for vectors in self.vectors.values()}.values())

    @property
    def values(self) -> dict[str, str]:
        """Plain values of the messages that describe the encoding; empty without a lossy one."""
        return {} if self.encoding == "float32" else {"download": self.encoding}


def encoded_models(
    models: Tensor, rows: Sequence[int], encoding: str, n_parameters: int
) -> dict[int, Array]:
    """Return the models in some rows of ``models`` as arrays in an encoding, by row.

    Each row is encoded once, and the row ``OWN``, which stands for a model that a client stores, is
    skipped. With ``float32``, the models are sent in their own type and without loss.
    """
    if encoding == "float32":
        return wire.raw_vectors(models, rows)
    size = models.shape[-1]
    return {
        row: wire.raw(encode(models[row], encoding, n_parameters), encoding, size)
        for row in dict.fromkeys(rows)
        if row != OWN
    }


def read_model(content: Content, name: str, layout: Layout, *, copies: bool = True) -> Tensor:
    """Read a model from a query, ``[S]``, and decode it if the query names an encoding.

    Without ``copies``, a model that is not encoded has the memory of the message, and must not be
    changed.

    Raises
    ------
    UpdateError
        If the encoding is unknown, or the number of bytes does not fit the layout.
    """
    data = content.vector(name)
    encoding = "float32"
    if "download" in content.values:
        encoding = content.get("download", str)
    if encoding == "float32":
        what = f"model {name!r}"
        return wire.read_vector(data, (layout.size,), layout.dtype, what, copies=copies)
    if encoding not in DENSE_ENCODINGS:
        raise UpdateError(
            f"the models of the query have the unknown encoding {wire.shown(encoding)}, expected "
            f"one of {', '.join(DENSE_ENCODINGS)}"
        )
    return decode(data, layout.size, encoding, layout.n_parameters).to(layout.dtype)


def anchors_of(query: TrainQuery) -> Sequence[int]:
    """Return, for each client of a training query, the row of its anchor among the query's models.

    The anchor is the model towards which a proximal term pulls. If the clients' work uses no
    anchor, the result contains the row of the model from which each client starts.
    """
    anchors = query.models.anchor
    if anchors is None or not query.work.needs_anchor:
        return query.models.start
    return anchors


def of_mixture(models: Tensor, mixture: Mixture) -> Vectors:
    """Return the vectors of a query about a mixture of models, by name.

    The models have their numbers as names. The table P̂ of label frequencies by model is named
    ``rates``, if the mixture has such a table.
    """
    vectors = {
        str(row): array for row, array in wire.raw_vectors(models, range(len(models))).items()
    }
    if mixture.rates is not None:
        vectors["rates"] = wire.raw_vector(mixture.rates.flatten())
    return vectors


def as_values(models: Tensor, mixture: Mixture | None) -> dict[str, int | bool]:
    """Return the plain values of a message that describe a mixture of models.

    The result is empty if the query has no mixture.
    """
    if mixture is None:
        return {}
    return {"mixture": len(models), "by_label": mixture.by_label}


def training_values(query: TrainQuery, sketch: Sketch | None) -> dict[str, Any]:
    """Return the plain values of the message for a training query, by name.

    Parameters
    ----------
    query
        Training query.
    sketch
        Sketch (random projection) by which the updates from disjoint parts of a client's data are
        compared; None if whole updates are compared.
    """
    this_round = query.round
    work = query.work
    splits = work.splits or Splits(1)
    return {
        "round": this_round.number,
        "query": this_round.query,
        "purpose": this_round.purpose,
        "seed": this_round.seed,
        "spec": json.dumps(query.local.described),
        "replicates": splits.count,
        "part_size": splits.size,
        "compares_parts": splits.compared,
        "dim": 0,
        **(sketch.described if sketch else {}),
        "own": stores_model(work),
        "shares": shares_model(work),
        "personal_epochs": work.steps.epochs if isinstance(work.steps, HeadThenBody) else 0,
        **({"last_layer": True} if isinstance(work.steps, LastLayer) else {}),
        **as_values(query.models.vectors, work.mixture),
        **code_values(query),
    }


def models_of_mixture(content: Content) -> int:
    """Return the number of models of the mixture in a message; 0 if the message has no mixture."""
    return content.get("mixture", int) if "mixture" in content.values else 0


def read_mixture(content: Content, labels: int | None) -> tuple[list[str], Mixture | None]:
    """Read the mixture of models in a message.

    Parameters
    ----------
    content
        Content of the message.
    labels
        Number of labels of the task; None if examples do not have one label each.

    Returns
    -------
    tuple[list[str], Mixture | None]
        Names of the mixture's models in the message, and the mixture; an empty list and None if the
        message has no mixture.

    Raises
    ------
    UpdateError
        If the mixture is malformed or does not fit the task.
    """
    if (models := models_of_mixture(content)) == 0:
        return [], None
    if not 0 < models <= len(content.vectors):
        raise UpdateError(
            f"the query is about a mixture of {models} models, but contains "
            f"{len(content.vectors)} vectors; expected at least 1 model, and one vector for each"
        )
    names = [str(row) for row in range(models)]
    by_label = content.get("by_label", bool)
    if "rates" not in content.vectors:
        return names, Mixture(by_label)
    if labels is None:
        raise UpdateError(
            "the query contains label frequencies ('rates'), but the examples of this client's "
            "task do not have one label each; use fedem in place of fedrc"
        )
    return names, Mixture(
        by_label,
        wire.read_vector(content.vector("rates"), (models, labels), torch.float64, "rates"),
    )


def length_of(query: TrainQuery, layout: Layout, labels: int | None) -> tuple[int, int]:
    """Return the numbers of entries and of parameters in an update of all models of a mixture.

    Parameters
    ----------
    query
        Training query with a mixture of K models.
    layout
        Layout of a single model.
    labels
        Number of labels of the task; None if examples do not have one label each.

    Returns
    -------
    tuple[int, int]
        Number of entries of the update, with label counts if the mixture needs them; and its number
        of parameters.

    Raises
    ------
    ConfigError
        If the mixture needs label counts, but examples do not have one label each.
    """
    K = len(query.models.vectors)
    mixture = query.work.mixture
    by_label = mixture is not None and mixture.by_label
    if by_label and labels is None:
        raise ConfigError(
            "the algorithm needs counts of labels, but the examples of this task do not have one "
            "label each; use fedem in place of fedrc"
        )
    return K * (layout.size + ((labels or 0) if by_label else 0)), K * layout.n_parameters
