"""Parts that all attack programs share: the model, the attacked client, and rows of results.

A program runs by itself or through ``table.py``, which may name the source of an earlier version of
fedclade. So nothing is imported here that this version does not have.
"""

# The budget of an attack is read from the records of the attacked client, which are private.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import ArrayLike
from torch import Tensor

from fedclade.channel import Budget, Ledger, StepLedger
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
    budget
        What the attack has used up, as measured by the program: the number of requests to the
        attacked client, of sums for which it was asked, and the used share of the limits that this
        client sets. For an attack by malicious clients, the number of their messages.
    """

    attack: str
    succeeded: bool
    detail: str
    budget: str


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


@dataclass
class Requests:
    """Counts of an attacker's requests to one client.

    Parameters
    ----------
    sent
        Number of requests.
    sums
        Number of requests among them that begin a new sum of secure aggregation.
    """

    sent: int = 0
    sums: int = 0

    def count(self, kind: str) -> None:
        """Count a request of a kind. The kind ``keys`` begins a sum."""
        self.sent += 1
        self.sums += kind == "keys"

    def __str__(self) -> str:
        text = counted(self.sent, "request")
        return f"{text} in {counted(self.sums, 'sum')}" if self.sums else text


def counted(number: int, noun: str) -> str:
    """Return a number with a noun, such as "2 requests"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class AttackedClient:
    """A client under attack, which counts the requests that it receives.

    Parameters
    ----------
    data
        The client's data, a federation of one client.
    folder
        Folder of the client; None if it has no folder.
    budget
        Privacy budget of the client; None if it has no budget.
    settings
        Further arguments of :class:`~fedclade.flower.client_handler.ClientHandler`.
    """

    def __init__(
        self,
        data: Federation,
        *,
        folder: Path | None = None,
        budget: Budget | None = None,
        **settings: Any,
    ) -> None:
        self.handler = ClientHandler(data, make_model, folder=folder, budget=budget, **settings)
        self.requests = Requests()
        self._folder = folder
        self._budget = budget

    def answer(self, content: Content) -> RecordDict:
        """Count a request, and return the client's reply."""
        self.requests.count(content.get("what", str))
        return self.handler.answer(content)

    def used(self, *limits: Callable[[ClientHandler], str]) -> str:
        """Return what the attacker has used up so far.

        Parameters
        ----------
        limits
            Functions that return the used share of a limit in the client's policy. A limit that an
            earlier version of fedclade does not have is left out.
        """
        parts = [str(self.requests)]
        for limit in limits:
            try:
                parts.append(limit(self.handler))
            except (AttributeError, ImportError):
                continue
        if self._folder is not None and self._budget is not None:
            parts.append(used_epsilon(self._folder, self._budget))
        return ", ".join(parts)


def used_epsilon(folder: Path, budget: Budget) -> str:
    """Return the ε that the ledgers in a client's folder have booked, and the ε of its budget."""
    ledger = Ledger(folder / "privacy.json")
    if budget.level == "example":
        ledger = StepLedger(folder / "example-privacy.json", None, ledger)
    most = "an unlimited budget" if math.isinf(budget.epsilon) else f"{budget.epsilon:g}"
    return f"ε {ledger.spent(budget.delta):.2g} of {most}"


def used_equations(client: ClientHandler) -> str:
    """Return how many linear equations in single examples a server has, and how many are allowed.

    A server gets them from updates on parts of the client's data.
    """
    # An earlier version, whose clients do not count equations, does not have these names.
    from fedclade.flower.policy import EXAMPLES_AN_EQUATION, MOST_EQUATIONS

    allowed = client._policy.max_partings
    if allowed is None:
        allowed = min(client._reported_examples // EXAMPLES_AN_EQUATION, MOST_EQUATIONS)
    return f"{client._usage_log.usage().partings} of {allowed} equations"


def used_scores(client: ClientHandler) -> str:
    """Return how many models a client has scored, and how many it is willing to score."""
    allowed = client._policy.most_scores(private=client._is_private)
    return f"{client._usage_log.usage().evaluations} of {allowed} scores"


def used_signs(client: ClientHandler) -> str:
    """Return of how many projections a client has sent signs, and how many are allowed.

    The projections are random projections of the client's updates, which form its sketches.
    """
    allowed = client._policy.most_clear(client._layout.n_parameters)
    return f"{client._sketch_log._record.read().directions} of {allowed} signs"


def sent_by_clients(what: str, senders: Collection[int], clients: int) -> str:
    """Return the budget of an attack by malicious clients.

    Parameters
    ----------
    what
        Name of their messages, such as "false update".
    senders
        The sender of each of these messages.
    clients
        Number of all clients, including the honest ones.
    """
    return f"{counted(len(senders), what)} from {len({*senders})} of {clients} clients"


def query(
    client: ClientHandler | AttackedClient, kind: str, models: Mapping[str, Tensor], **values: Any
) -> Content:
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


def try_query(
    attack: str,
    client: AttackedClient,
    kind: str,
    models: Mapping[str, Tensor],
    *,
    field: str,
    limits: Sequence[Callable[[ClientHandler], str]] = (),
    **values: Any,
) -> Row:
    """Send a query that a client should refuse, or reply to without a certain field.

    Parameters
    ----------
    attack
        Name of the attack.
    client, kind, models, values
        Arguments of :func:`query`.
    field
        Name of a value or vector of the reply; if the reply has it, the attack succeeds.
    limits
        Arguments of :meth:`AttackedClient.used`.
    """
    try:
        reply = query(client, kind, models, **values)
    except FedcladeError as error:
        return Row(attack, False, refused(error), budget=client.used(*limits))
    succeeded = field in reply.values or field in reply.vectors
    detail = f"answered {field}" if succeeded else f"answered without {field}"
    return Row(attack, succeeded, detail, budget=client.used(*limits))


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
        print(f"{row.attack:<45} {outcome:<9} {row.detail}; used {row.budget}", flush=True)
    if file is not None:
        write_rows(known, file)
    return int(any(row.succeeded for row in known))


def write_rows(rows: Sequence[Row], file: Path) -> None:
    """Write rows as JSON."""
    file.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


def read_rows(file: Path) -> list[Row]:
    """Read the rows that :func:`write_rows` wrote. Older files have rows without a budget."""
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return [Row(**{**row, "budget": row.get("budget", "")}) for row in rows]
