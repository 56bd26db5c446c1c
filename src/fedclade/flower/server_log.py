"""Log of the server: a line for each round and the results at the end, as text or as JSON lines."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedclade.core import ParameterTree
from fedclade.flower.network import LogFormat
from fedclade.report import Terminal, add_figures, count, show_run, traffic
from fedclade.runs import Row, Run, counting, without_nan

_log = logging.getLogger(__name__)

WIDTH = 100
"""Characters of a printed line: a ServerApp prints to a log, which has no width."""

FIELDS = "fields"
"""Attribute of a log record with further fields of the JSON line."""

LOGGERS = ("fedclade", "flwr")
"""Loggers whose records become JSON lines."""


class JsonLines(logging.Formatter):
    """Formatter that writes each log record as one line with a JSON object.

    The object has the fields ``time`` (UTC, in the format of ISO 8601), ``level``, ``logger`` and
    ``message``; for an exception, also ``exception``. Lines about a round or the end of a run have
    further fields with numbers.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return a log record as one line with a JSON object."""
        content: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        return json.dumps(content, ensure_ascii=False, default=str)


@contextmanager
def server_log(log_format: LogFormat) -> Generator[None]:
    """Write the log records of fedclade and Flower in a format, while the ``with`` block runs.

    With ``json``, records go to the standard output as JSON lines, and so does an exception that
    ends the block. With ``text``, nothing changes.
    """
    if log_format == "text":
        yield
        return
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonLines())
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(each, each.handlers, each.level, each.propagate) for each in loggers]
    for each in loggers:
        each.handlers = [handler]
        each.propagate = False  # a handler of the root logger would write the record again
    logging.getLogger("fedclade").setLevel(logging.INFO)  # lines about rounds are informative
    try:
        yield
    except Exception:
        _log.exception("the run has ended by an error")
        raise
    finally:
        for each, handlers, level, propagate in before:
            each.handlers = handlers
            each.setLevel(level)
            each.propagate = propagate


def describe_round(row: Row) -> str:
    """Describe a finished round in one line.

    The line has the numbers of trained clients and clusters, the score, the adjusted Rand index
    (ARI) if true clusters are known, the number of connected clients, bytes and seconds.

    Parameters
    ----------
    row
        Row of the round in the table of rounds.
    """
    metric, score = counting(row)
    ari = row["ari"]
    parts = [
        f"round {row['round']}",
        f"{count(row['clients_trained'], 'client')} trained",
        count(row["clusters"], "cluster"),
    ]
    if score is not None:
        parts.append(f"{metric} {score:.3f}")
    if ari is not None:
        parts.append(f"ARI {ari:.2f}")
    if (present := row.get("clients_present")) is not None:
        parts.append(f"{present} connected")
    if "bytes_up" in row:
        parts.append(f"{traffic(row['bytes_up'])} up")
        parts.append(f"{traffic(row['bytes_down'])} down")
    parts.append(f"{row['seconds']:.1f} s")
    return ", ".join(parts)


def print_round(row: Row, tree: ParameterTree) -> None:
    """Print one line about a finished round, see :func:`describe_round`.

    Parameters
    ----------
    row
        Row of the round in the table of rounds.
    tree
        Ignored: callbacks also receive the tree of clusters.
    """
    print(describe_round(row), flush=True)


def log_round(row: Row, tree: ParameterTree) -> None:
    """Log one line about a finished round, with the round's metrics as further fields.

    Parameters
    ----------
    row
        Row of the round in the table of rounds.
    tree
        Ignored: callbacks also receive the tree of clusters.
    """
    _log.info("%s", describe_round(row), extra={FIELDS: {"event": "round", **_known(row)}})


def _known(row: Row) -> dict[str, Any]:
    """Return the metrics of a round that are known: neither None nor, as JSON has none, NaN."""
    return {name: value for name, value in without_nan(row).items() if value is not None}


def show_end(run: Run, folder: Path | None = None, log_format: LogFormat = "text") -> None:
    """Print or log the results of a finished run, and write figures to its folder, if any."""
    console = Terminal(width=WIDTH, highlight=False)
    if log_format == "json":
        if folder is not None:
            add_figures(run, folder, Terminal(width=WIDTH, file=sys.stderr))
        fields = {
            "event": "finished",
            "rounds": run.summary["rounds"],
            "clusters": run.summary["clusters"]["found"],
            "folder": None if folder is None else str(folder),
        }
        _log.info("the run has finished", extra={FIELDS: fields})
        return
    if folder is not None:
        add_figures(run, folder, console)
    show_run(run, console)
    if folder is not None:
        console.print(f"run folder: {folder}", soft_wrap=True, markup=False)
