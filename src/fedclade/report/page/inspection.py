"""Inspection of data files before training: tables for the terminal and an HTML page.

An inspection describes how fedclade understands the files (clients, columns, target and task), and
lists problems in the data that can lead to wrong models or scores.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table as TerminalTable

from fedclade.data import ClientInfo, ColumnInfo, Inspection
from fedclade.report.formats import NONE, count
from fedclade.report.page.section import Card, Page, Section, Table
from fedclade.report.tables import new_table

SHOWN_LABELS = 6
"""Largest number of labels with one column each for the share of the label."""

SHOWN_CLIENTS = 40
"""Largest number of clients that are listed in the terminal."""


def inspection_tables(inspection: Inspection) -> list[TerminalTable]:
    """Return an inspection's tables of clients and of columns for the terminal."""
    clients = _client_table(inspection, inspection.clients[:SHOWN_CLIENTS])
    if len(inspection.clients) > SHOWN_CLIENTS:
        clients = Table(
            f"First {SHOWN_CLIENTS} of {len(inspection.clients):,} clients",
            clients.columns,
            clients.rows,
        )
    return [_as_terminal_table(table) for table in (clients, _column_table(inspection))]


def describe_inspection(inspection: Inspection) -> list[str]:
    """Describe in lines of text how the data is understood, and its problems."""
    if inspection.client is None:
        client = "each file"
    else:
        client = f"column {inspection.client!r}"
    lines = [
        f"clients: {client} ({inspection.reasons['client']})",
        f"target: {inspection.target!r} ({inspection.reasons['target']})",
        f"task: {inspection.task} ({inspection.reasons['task']})",
    ]
    if inspection.assumptions:
        lines.append(f"how the data is read: {'; '.join(inspection.assumptions)}")
    lines += [f"problem: {problem}" for problem in inspection.problems]
    if not inspection.problems:
        lines.append("no problems found")
    return lines


def inspection_page(inspection: Inspection, title: str) -> Page:
    """Return the HTML page of an inspection, with the title ``Contents of TITLE``."""
    used = inspection.columns_with("input") + inspection.columns_with("category")
    empty = sum(column.empty for column in used) / max(1, len(used))
    cards = [
        Card("Clients", f"{len(inspection.clients):,}", _row_range(inspection.clients)),
        Card("Rows", f"{inspection.rows:,}"),
        Card("Inputs", f"{len(used):,}", count(len(inspection.columns), "column")),
        Card("Empty cells", f"{empty:.1%}", "of the inputs"),
        Card("Problems", f"{len(inspection.problems):,}"),
    ]
    problems = [[problem] for problem in inspection.problems] or [["No problems found."]]
    assumed = [[line] for line in describe_inspection(inspection) if ": " in line]
    assumed = [row for row in assumed if not row[0].startswith("problem: ")]
    sections = [
        Section(
            "problems",
            "Problems",
            "Properties of the data that can lead to wrong models or scores.",
            open_tables=[Table("", ["problem"], problems)],
        ),
        Section(
            "assumptions",
            "Assumptions",
            "How the data is understood. Settings in a config override these assumptions.",
            open_tables=[Table("", ["assumption"], assumed)],
        ),
        Section(
            "clients",
            "Clients",
            "Rows, empty cells and targets of each client.",
            open_tables=[_client_table(inspection, inspection.clients, title="")],
        ),
        Section(
            "columns",
            "Columns",
            "Types, values and empty cells of each column, and its role.",
            open_tables=[_column_table(inspection, title="")],
        ),
    ]
    subtitle = f"{count(len(inspection.paths), 'file')}, {inspection.rows:,} rows"
    return Page(f"Contents of {title}", subtitle, cards, sections)


def _row_range(clients: Sequence[ClientInfo]) -> str:
    """Return the smallest and largest number of rows of a client, as text."""
    rows = [client.rows for client in clients]
    return f"{min(rows):,} to {max(rows):,} rows"


def _client_table(
    inspection: Inspection, clients: Sequence[ClientInfo], title: str = "Clients"
) -> Table:
    """Return a table of clients, with shares of labels or the mean of the target."""
    labels = inspection.labels
    if inspection.task == "regression":
        headings = [f"mean {inspection.target}", "std"]
    elif len(labels) <= SHOWN_LABELS:
        headings = [f"{inspection.target} {label}" for label in labels]
    else:
        headings = ["labels", "most frequent"]
    rows = [
        [client.name, f"{client.rows:,}", f"{client.empty:.1%}", *_target_cells(client, inspection)]
        for client in clients
    ]
    return Table(title, ["client", "rows", "empty cells", *headings], rows)


def _target_cells(client: ClientInfo, inspection: Inspection) -> list[str]:
    """Return the cells on a client's targets: shares of labels, or mean and standard deviation.

    For many labels, the cells are the number of labels and the most frequent label.
    """
    labels = inspection.labels
    if inspection.task == "regression":
        if client.mean is None or client.std is None:
            return [NONE, NONE]
        return [f"{client.mean:.4g}", f"{client.std:.4g}"]
    if len(labels) <= SHOWN_LABELS:
        return [f"{client.shares.get(label, 0):.0%}" for label in labels]
    if not client.shares:
        return ["0", NONE]
    most = max(client.shares, key=lambda label: client.shares[label])
    return [str(len(client.shares)), f"{most} {client.shares[most]:.0%}"]


def _column_table(inspection: Inspection, title: str = "Columns") -> Table:
    """Return a table of the columns of the data, with type, values and role."""
    rows = [_column_cells(column) for column in inspection.columns]
    return Table(title, ["column", "type", "empty", "different", "values", "role"], rows)


def _column_cells(column: ColumnInfo) -> list[str]:
    """Return the cells of one column of the data: name, type, empty cells, values and role."""
    role = column.role
    if column.role == "excluded":
        role = f"excluded: {column.why}"
    return [
        column.name,
        column.kind,
        f"{column.empty:.1%}",
        f"{column.different:,}",
        column.values,
        role,
    ]


def _as_terminal_table(table: Table) -> TerminalTable:
    """Convert a table of a page into a `rich` table for the terminal."""
    shown = new_table(table.title)
    for column in table.columns:
        shown.add_column(escape(column))
    for row in table.rows:
        texts = [cell if isinstance(cell, str) else cell.text for cell in row]
        shown.add_row(*[escape(text) for text in texts])
    return shown
