"""Parts that all attack programs share: the model, queries to a client, and rows of results.

A program runs by itself or through ``table.py``, which may name the source of an earlier version of fedclade. So
nothing is imported here that this version does not have.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedclade.core import FedcladeError, Layout
from fedclade.data import Federation
from fedclade.flower import wire
from fedclade.flower.client_handler import ClientHandler
from fedclade.flower.wire import Content
from fedclade.models import build_model

LABELS = 10
REST = " | "
"""The table shows the detail of a row up to here; the rest is for a reader of the program's output."""

DIGITS = 2
"""Of a score that a client may disclose."""

SIMILAR = 0.9
"""Cosine of an update and a server's guess of it, from which on the update counts as read."""

SPEC = {"epochs": 1, "batch_size": 60, "lr": 0.1}
"""Local training with one step, as clients have at most 60 examples."""


@dataclass(frozen=True)
class Row:
    """Result of one attack.

    Parameters
    ----------
    attack
        Its name. Text after a comma names a variant.
    succeeded
        Whether the attack succeeded.
    detail
        What it got, or how it failed; see :data:`REST`.
    """

    attack: str
    succeeded: bool
    detail: str


def make_model(seed: int) -> torch.nn.Module:
    """Return a linear model for the digits."""
    return build_model("mclr", input_shape=(1, 8, 8), outputs=LABELS, seed=seed)


LAYOUT = Layout.of(make_model(0))
MODEL = LAYOUT.flatten(make_model(0))


def training(**changes: Any) -> dict[str, Any]:
    """Return the values of a request for training, with some changed or added."""
    return {
        "round": 1,
        "query": 0,
        "purpose": "train",
        "seed": 0,
        "spec": json.dumps(SPEC),
        "replicates": 1,
        "part_size": 0,
        "compares_parts": False,
        "dim": 0,
        "own": False,
        "shares": False,
        "personal_epochs": 0,
        "layout": wire.layout_digest(LAYOUT),
        "run": "attack",
        **changes,
    }


def query(client: ClientHandler, kind: str, models: Mapping[str, Tensor], **values: Any) -> Content:
    """Send one query with models to a client, and return the reply.

    Raises
    ------
    FedcladeError
        If the client refuses.
    """
    vectors = {name: wire.raw_vector(model) for name, model in models.items()}
    return Content.of(
        client.answer(Content.of(wire.record(training(what=kind, **values), vectors)))
    )


def update_of(data: Federation, model: Tensor, **values: Any) -> np.ndarray:
    """Return the update of a client without any protection, ``[S]``: the truth that an attack is after."""
    reply = query(ClientHandler(data, make_model), "train", {"model": model}, **values)
    return vector_of(reply, "update")


def vector_of(reply: Content, name: str) -> np.ndarray:
    """Return a vector of a reply, as float64."""
    return np.frombuffer(reply.vector(name), "<f4").astype(np.float64)


def cosine(guess: ArrayLike, truth: ArrayLike) -> float:
    """Return the cosine of two vectors; 0 if one of them is zero."""
    first, second = np.asarray(guess, np.float64), np.asarray(truth, np.float64)
    norms = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / norms if norms > 0 else 0.0


def refused(error: FedcladeError | str) -> str:
    """Return the detail of a row for a query that the client refused.

    Raises
    ------
    AssertionError
        If the query was refused for a missing field. This says nothing about the attack, whose program
        has to be adapted.
    """
    text = str(error)
    assert "should be of type" not in text, text
    return f"refused{REST}{text[:110]}"


def try_query(attack: str, send: Callable[[], Content], field: str) -> Row:
    """Send a query that a client should refuse; the attack succeeds if the reply has a certain field."""
    try:
        reply = send()
    except FedcladeError as error:
        return Row(attack, False, refused(error))
    succeeded = field in reply.values or field in reply.vectors
    return Row(attack, succeeded, f"answered {field}" if succeeded else f"answered without {field}")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser of a program's command line, with the option ``--json``."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    return made


def report(rows: Iterable[Row], file: Path | None) -> int:
    """Print each row as soon as it is known, and write all of them as JSON; return 1 if an attack succeeded."""
    known: list[Row] = []
    for row in rows:
        known.append(row)
        outcome = "SUCCEEDS" if row.succeeded else "fails"
        print(f"{row.attack:<45} {outcome:<9} {row.detail}", flush=True)
    if file is not None:
        write_rows(known, file)
    return int(any(row.succeeded for row in known))


def write_rows(rows: Sequence[Row], file: Path) -> None:
    """Write rows as JSON."""
    file.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


def read_rows(file: Path) -> list[Row]:
    """Read the rows that :func:`write_rows` wrote."""
    return [Row(**row) for row in json.loads(file.read_text(encoding="utf-8"))]
