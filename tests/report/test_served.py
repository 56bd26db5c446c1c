"""The models with which clients are served: in the summary, on the terminal and on the page."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fedclade import FINISH, Auto, Callback, FedAvg, LocalTraining, simulate
from fedclade.core import Served
from fedclade.report.page.one_run import run_page
from fedclade.report.page.section import page_html
from fedclade.report.run_view import RunView
from fedclade.report.tables import facts
from tests.tiny import federation_of, linear

LOCAL = LocalTraining(batch_size=10, lr=0.3)
FEDERATION = federation_of([0, 1] * 3, [30] * 6)
EARLY = Served(
    0, common="cluster", clients={"cluster": (0, 1, 2, 3, 4, 5)}, gains=dict.fromkeys(range(6), 0.0)
)
CHOICE = Served(
    0,
    common="cluster",
    clients={"one model": (3,), "cluster": (0, 1), "own": (2, 4, 5)},
    gains={3: 0.015, 0: 0.0, 1: 0.0, 2: 0.1, 4: 0.3, 5: 0.2},
)


@pytest.fixture(scope="module")
def run():
    """A run of two rounds, with choices of models that are written by hand."""
    found = simulate(FedAvg(), linear(), FEDERATION, local=LOCAL, rounds=2, engine="loop")
    events = [json.loads(json.dumps(each.to_row(n))) for n, each in ((1, EARLY), (2, CHOICE))]
    served = {"one model": 1, "cluster": 2, "own": 3}
    return replace(found, events=events, summary=found.summary | {"served": served})


def test_the_terminal_has_one_line(run):
    assert dict(facts(run))["served"] == "one model 1, cluster 2, own 3 clients"


def test_one_client_is_no_clients(run):
    shown = dict(facts(replace(run, summary=run.summary | {"served": {"own": 1}})))
    assert shown["served"] == "own 1 client"


def test_the_page_has_the_last_choice(run):
    (section,) = [each for each in run_page(RunView(run)).sections if each.id == "served"]
    assert section.title == "What each client is served with"
    assert "in round 2" in section.caption
    assert "“cluster”" in section.caption
    (table,) = section.open_tables
    assert table.rows == [
        ["one model", "1", "c3", "1.5 %"],
        ["cluster", "2", "c0, c1", "–"],
        ["own", "3", "c2, c4, c5", "20.0 % (10.0 % to 30.0 %)"],
    ]
    assert "expected reduction of validation loss" in page_html(run_page(RunView(run)))


def test_other_runs_have_no_such_line_or_section(run):
    plain = simulate(FedAvg(), linear(), FEDERATION, local=LOCAL, rounds=1, engine="loop")
    assert "served" not in plain.summary
    assert "served" not in dict(facts(plain))
    assert "served" not in [each.id for each in run_page(RunView(plain)).sections]


class FinishAt(Callback):
    """Finishes a run after a round."""

    def on_round(self, record, /):
        return FINISH if record.round == 4 else None


@pytest.mark.parametrize("callbacks", [[], [FinishAt()]], ids=["planned", "finished early"])
def test_the_summary_counts_the_clients_of_the_last_choice(callbacks):
    rounds = 6 if callbacks else 4
    found = simulate(
        Auto(budget=6.0),
        linear(),
        FEDERATION,
        local=LOCAL,
        rounds=rounds,
        evaluate_every=5,
        engine="loop",
        callbacks=callbacks,
    )
    last = [event for event in found.events if event["kind"] == "served"][-1]
    assert last["round"] == 4
    assert found.summary["served"] == {kind: len(ids) for kind, ids in last["clients"].items()}
    assert sum(found.summary["served"].values()) == 6
