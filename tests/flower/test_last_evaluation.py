"""Clients that do not tell how they fare, or lie about it: a run of so many rounds is not lost in the last of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message, RecordDict
from flwr.app.error import Error
from flwr.common.constant import ErrorCode
from typer.testing import CliRunner

from fedclade.cli.app import app as cli
from fedclade.flower import LocalGrid
from fedclade.flower.server_log import show_end
from fedclade.flower.signing import key_of
from fedclade.flower.wire import Content
from fedclade.runs.store import Run
from tests.flower.grids import CFL_OF_TWO, FOUR, answered, federated, grid_of, node_of, worded
from tests.tiny import federation_of

BAD = 2
ROUNDS = 3


def spoil_evaluations(
    grid: LocalGrid, client: int, first: int, change: Callable[[RecordDict], RecordDict]
) -> None:
    """Let a client answer all evaluations from the n-th wrongly."""
    node = grid.nodes[node_of(client)]
    honest, asked = node.app, 0

    def app(message: Message, context: Any) -> Message:
        nonlocal asked
        reply = honest(message, context)
        if Content.of(message.content).values["what"] != "evaluate":
            return reply
        asked += 1
        if asked < first:
            return reply
        if change is late:
            return Message(Error(ErrorCode.NODE_UNAVAILABLE, "gone"), reply_to=message)
        return answered(message, change(reply.content), key_of(context))

    node.app = app


def late(honest: RecordDict) -> RecordDict:
    return honest


@pytest.mark.parametrize(
    ("first", "change"),
    [(1, late), (ROUNDS, worded(losses=[1e300]))],
    ids=["never", "a lie in the last round"],
)
def test_a_client_that_is_late_or_lies_in_the_last_evaluation_ends_nothing(
    first: int, change: Callable[[RecordDict], RecordDict], tmp_path: Path
):
    grid, folder = grid_of(federation_of(FOUR)), tmp_path / "run"
    spoil_evaluations(grid, BAD, first, change)
    run = federated(grid, CFL_OF_TWO, rounds=ROUNDS, folder=folder)
    show_end(run, folder)
    assert sorted(row["client"] for row in run.client_rows if row["round"] == ROUNDS) == [0, 1, 3]
    assert sorted(run.tree.leaf_of) == [0, 1, 2, 3]
    assert math.isfinite(run.summary["accuracy"]["mean"])
    # a run that goes on ends as well
    show_end(federated(grid, CFL_OF_TWO, rounds=ROUNDS + 1, folder=folder))
    command("report", folder)


def command(name: str, *folders: Path) -> None:
    result = CliRunner().invoke(cli, [name, *map(str, folders)])
    assert result.exception is None, result.output


def test_nobody_who_tells_how_it_fares_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    grid, folder = grid_of(federation_of(FOUR)), tmp_path / "run"
    for client in range(4):
        spoil_evaluations(grid, client, 1, late)
    run = federated(grid, CFL_OF_TWO, rounds=ROUNDS, folder=folder)
    show_end(run, folder)
    assert run.client_rows == []
    assert run.summary["accuracy"]["mean"] is None
    assert "no score: no client was evaluated" in capsys.readouterr().out
    assert {frozenset(leaf.members) for leaf in run.tree.leaves} == {
        frozenset({0, 2}),
        frozenset({1, 3}),
    }
    assert json.loads((folder / "summary.json").read_text())["rounds"] == ROUNDS
    # a run that goes on ends as well
    show_end(federated(grid, CFL_OF_TWO, rounds=ROUNDS + 1, folder=folder))
    show_end(Run.load(folder))
    command("report", folder)
