"""Warning about methods that compare clients by sparse updates: in the log, summary and report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedclade import Run
from fedclade.algorithms import CFL, FedAvg
from fedclade.core import UpdateError
from fedclade.flower.deployment import warn_of_encodings
from fedclade.flower.node_registry import CLIENTS
from fedclade.flower.registration import read_client
from fedclade.report.page.one_run import run_page
from fedclade.report.run_view import RunView
from fedclade.report.tables import facts
from tests.tiny import federation_of

from .grids import CFL_OF_TWO, FOUR, federated, grid_of, housed, spoil, worded

WORDS = "4 of 4 clients send updates as topk, a twentieth of the entries, but CFL compares clients"


def test_a_run_that_compares_sparse_updates_warns_everywhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    grid = housed(grid_of(federation_of(FOUR), encoding="topk"), tmp_path / "clients")
    folder = tmp_path / "run"
    federated(grid, CFL_OF_TWO, rounds=1, folder=folder)
    assert WORDS in caplog.text
    run = Run.load(folder)
    [warning] = run.summary["warnings"]
    assert warning.startswith(WORDS)
    assert ("warning", warning) in list(facts(run))
    [section] = [each for each in run_page(RunView(run)).sections if each.id == "warnings"]
    assert section.caption == f"{warning}."
    # A continued run knows the clients from its folder.
    assert json.loads((folder / CLIENTS).read_text())["clients"]["0"]["sends"] == "topk"
    continued = federated(grid, CFL_OF_TWO, rounds=2, folder=folder)
    assert continued.summary["warnings"] == [warning]


@pytest.mark.parametrize(
    ("algorithm", "encodings"),
    [
        (FedAvg(), {"topk": 3}),
        (CFL(), {"float32": 3}),
        (CFL(), {"float16": 2, "int8": 1}),
        (CFL(), {}),
    ],
)
def test_other_runs_do_not_warn(algorithm, encodings, caplog: pytest.LogCaptureFixture):
    assert warn_of_encodings(algorithm, encodings) == ()
    assert not caplog.text


def test_the_warning_counts_the_clients():
    [warning] = warn_of_encodings(CFL(), {"topk": 1, "float32": 2})
    assert warning.startswith("1 of 3 clients send updates as topk")


def test_a_client_of_an_earlier_version_sends_float32():
    grid = grid_of(federation_of(FOUR), encoding="topk")
    for client in range(4):
        spoil(grid, client, "hello", worded(sends=None))
    assert "warnings" not in federated(grid, CFL_OF_TWO, rounds=1).summary


def test_an_unknown_encoding_is_refused(caplog: pytest.LogCaptureFixture):
    grid = grid_of(federation_of(FOUR))
    spoil(grid, 3, "hello", worded(sends="zip"))
    with pytest.raises(UpdateError, match=r"'sends' should be one of float32, .*, got 'zip'"):
        federated(grid, CFL_OF_TWO, rounds=1)


def test_a_saved_encoding_should_be_a_text():
    with pytest.raises(TypeError, match="texts name, key and sends, and truth values"):
        read_client({"node": 1, "name": "a", "size": 3, "sends": 5})
