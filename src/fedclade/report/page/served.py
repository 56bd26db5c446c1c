"""Page section on the models with which clients are served, in a run that chooses among several."""

from __future__ import annotations

from statistics import mean

from fedclade.core import Served
from fedclade.report.formats import NONE, percent, shortened
from fedclade.report.page.section import Section, Table
from fedclade.report.run_view import RunView
from fedclade.runs import events_of

SERVED_COLUMNS = ("model", "clients", "names", "expected reduction of validation loss")
"""Headings of the table of models."""


def served_section(view: RunView) -> Section | None:
    """Return the page section with the kind of model that each client is served with.

    It has the last choice of the run; None for a run that does not choose models.
    """
    choices = events_of(view.run.events, Served)
    if not choices:
        return None
    round_number, choice = choices[-1]
    caption = (
        f"Kinds of models with which clients are served, chosen by losses on validation data in "
        f"round {round_number}. The kind that suits all clients best together is "
        f"“{choice.common}”. The reduction is the share by which the validation loss of a client "
        "is expected to be lower than with that kind: the mean over the clients of a row, and in "
        "brackets the smallest and the largest share."
    )
    rows = [
        [kind, f"{len(clients):,}", _names(view, clients), _describe_gain(choice, kind)]
        for kind, clients in choice.clients.items()
    ]
    table = Table("Models and clients", SERVED_COLUMNS, rows)
    title = "What each client is served with"
    return Section("served", title, caption, open_tables=[table])


def _names(view: RunView, clients: tuple[int, ...]) -> str:
    """Return the names of the first clients, and the number of the others."""
    return shortened([view.outcome.name(client) for client in clients])


def _describe_gain(choice: Served, kind: str) -> str:
    """Return the mean reduction of the loss of the clients of one kind of model, and its range.

    It is a dash for the kind with which the others are compared.
    """
    gains = [choice.gains[client] for client in choice.clients[kind]]
    if kind == choice.common:
        return NONE
    if len(gains) == 1:
        return percent(gains[0])
    return f"{percent(mean(gains))} ({percent(min(gains))} to {percent(max(gains))})"
