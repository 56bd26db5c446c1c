"""The report of a run by a method of one's own, whose events share the names of others and tell something else."""

from collections.abc import Sequence
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedclade import Algorithm, Run, simulate
from fedclade.algorithms import State, log_of, train_clusters
from fedclade.algorithms import move_clusters as moved
from fedclade.cli import app
from fedclade.core.events import ClusterSplit, Event
from fedclade.core.tree import ParameterTree
from fedclade.report.page import RunView, run_page
from fedclade.runs import events_of
from tests.tiny import federation_of, linear

KINDS = (
    "split",
    "rejected",
    "checked",
    "regrouped",
    "clustered",
    "left_out",
    "retried",
    "joined",
    "left",
)
KINDS += (
    "disconnected",
    "reconnected",
    "refused",
    "released",
    "too_few",
    "postponed",
    "empty",
    "mine",
)


def event_of(kind: str, details: dict[str, object]) -> Event:
    fields = [(name, object) for name in details]
    return make_dataclass("Told", fields, bases=(Event,), frozen=True, namespace={"kind": kind})(
        0, *details.values()
    )


@dataclass(frozen=True, kw_only=True)
class Mine(Algorithm):
    """Federated averaging that tells of events with details of its own, and of no losses."""

    details: Sequence[dict[str, object]]

    def init(self, params, clients):
        return State(ParameterTree.root_only(clients.ids, params))

    def step(self, state, cohort, clients, this_round):
        parts = train_clusters(state, cohort, clients, this_round)
        tree = moved(state.tree, parts)
        log = log_of(parts, [event_of(kind, details) for kind in KINDS for details in self.details])
        if this_round.number == 1:
            members = tree.nodes[0].members
            halves = [members[:2], members[2:]]
            cached = [torch.zeros(2, 1) for _ in halves]
            tree = tree.split(
                0,
                halves,
                params=tree.nodes[0].params,
                cached=cached,
                round_number=1,
                criteria={"mine": 1.0},
            )
            log = replace(log, losses={}, criteria={})
        return State(tree), replace(log, losses={})


@pytest.mark.parametrize(
    "details",
    [
        {},
        dict.fromkeys(
            (
                "children",
                "clusters",
                "because",
                "clients",
                "nodes",
                "merges",
                "threshold",
                "p_value",
            ),
            1,
        ),
        {
            key: [1]
            for key in (
                "children",
                "clusters",
                "because",
                "clients",
                "nodes",
                "merges",
                "gamma",
                "level",
            )
        },
    ],
)
def test_the_report_of_a_method_of_ones_own_is_written_whatever_its_events_tell(details, tmp_path):
    folder = tmp_path / "run"
    run = simulate(
        Mine(details=[details]),
        linear(),
        federation_of([0, 1, 0, 1]),
        rounds=2,
        engine="loop",
        folder=folder,
    )
    assert {event["kind"] for event in Run.load(folder).events} == set(KINDS)
    assert CliRunner().invoke(app, ["report", str(folder)], catch_exceptions=False).exit_code == 0
    assert {path.name for path in (folder / "figures").iterdir()} == {"accuracy.png", "norms.png"}
    page = (folder / "report.html").read_text()
    accuracy = f"{100 * run.summary['accuracy']['mean']:.1f} %"
    tables = tables_of(run)
    assert ["2", "–", accuracy, accuracy] in tables["Mean accuracy by cluster"]
    assert accuracy in page
    assert all(title in page for title in tables)
    silent = simulate(
        Mine(details=[]), linear(), federation_of([0, 1, 0, 1]), rounds=2, engine="loop"
    )
    assert silent.events == []
    moved = tables.pop("Clients that joined or left", [])
    assert {row[1] for row in moved} <= {"joined", "left"}
    assert tables == tables_of(silent), (
        "what events of a method of one's own tell changes no number of the report"
    )


def tables_of(run: Run) -> dict[str, list[list[str]]]:
    """Return the tables of a run's page by their titles."""
    tables = [table for section in run_page(RunView(run)).sections for table in section.tables]
    return {table.title: [list(row) for row in table.rows] for table in tables}


def test_details_that_are_numbers_of_numpy_and_torch_are_written_as_json(tmp_path: Path):
    told = {
        "array": np.arange(2),
        "number": np.float64(0.5),
        "tensor": torch.ones(2),
        "what": KINDS[:1],
        "path": Path("a"),
    }
    run = simulate(
        Mine(details=[told]), linear(), federation_of([0, 1, 0, 1]), rounds=1, engine="loop"
    )
    assert events_of(Run.load(run.save(tmp_path / "run")).events, ClusterSplit) == []
    (event,) = (event for event in Run.load(tmp_path / "run").events if event["kind"] == "mine")
    assert {key: event[key] for key in told} == {
        **{"array": [0, 1], "number": 0.5, "tensor": [1.0, 1.0], "what": ["split"], "path": "a"}
    }
