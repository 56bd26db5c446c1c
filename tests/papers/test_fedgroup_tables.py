"""FedGroup's tables: what they show at the smallest scale, and what their claims say of made-up runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedclade import FedGroup
from fedclade_papers import EXPERIMENTS, Claim, Outcome, ResultCache
from fedclade_papers.fedgroup import EXPERIMENTS as OF_PAPER
from fedclade_papers.fedgroup import classes, methods
from fedclade_papers.fedgroup.methods import METHODS
from fedclade_papers.fedgroup.runs import method
from fedclade_papers.fedgroup.tasks import TABLES, TASKS, absent, federation_of, tasks_at_hand
from fedclade_papers.result import Result

Smoke = Callable[[str], Result]

NAMES = [each.name for each in OF_PAPER]


def claim(outcome: Outcome, text: str) -> Claim:
    """Return the one claim that has this in its text."""
    (found,) = (each for each in outcome.claims if text in each.text)
    return found


def test_the_papers_settings_name_every_row_of_its_tables():
    assert [
        *("fedgroup-table1", "fedgroup-fig1", "fedgroup-table2", "fedgroup-table3"),
        *("fedgroup-eq10", "fedgroup-fig3-4", "fedgroup-fig5-edc"),
    ] == NAMES
    assert [f"{n}" for n in EXPERIMENTS["fedgroup-table1"].paper["classes"]] == list(
        TABLES["fedgroup-table1"]["numbers"]
    )
    table = TABLES["fedgroup-table3"]["numbers"]
    assert EXPERIMENTS["fedgroup-table3"].paper["tasks"] == list(table)
    assert all(len(row) == len(METHODS) for row in table.values())


@pytest.mark.parametrize(("name", "axes"), list(zip(NAMES, (8, 8, 1, 1, 1, 4, 1), strict=True)))
def test_figures_have_a_panel_for_all_there_is(name: str, axes: int, smoke: Smoke):
    assert len(EXPERIMENTS[name].draw(smoke(name).outcome, smoke(name).settings).axes) == axes


def test_panels_name_their_axes_once(smoke: Smoke):
    result = smoke("fedgroup-fig1")
    axes = EXPERIMENTS["fedgroup-fig1"].draw(result.outcome, result.settings).axes
    names = [each.get_ylabel() for each in axes]
    left, right = names[: len(names) // 2], names[len(names) // 2 :]
    assert left == ["accuracy (black)", *[""] * (len(left) - 1)]
    assert right == [*[""] * (len(right) - 1), "discrepancy (blue)"]


def test_more_classes_make_a_better_model(smoke: Smoke):
    found = smoke("fedgroup-table1").outcome
    rows = {row.what: row for row in found.rows}
    assert rows["5 classes · accuracy, maximum"].ours > rows["1 class · accuracy, maximum"].ours
    assert claim(found, "the maximum accuracy rises").holds
    assert rows["1 class · discrepancy, variance"].paper == 46.42


def test_groups_beat_one_model_for_all(smoke: Smoke):
    found = smoke("fedgroup-table3").outcome
    assert [row.what for row in found.rows] == [
        f"Digits-MCLR · {which}, best round" for which in METHODS
    ]
    assert claim(found, "FedGroup and FedGrouProx beat FedAvg and FedProx").holds
    assert claim(found, "RAC").holds is None  # too few rounds to tell


def test_figures_share_the_runs_of_their_tables(smoke: Smoke):
    table, figure = smoke("fedgroup-table1"), smoke("fedgroup-fig1")
    assert [row.ours for row in figure.outcome.rows] == [row.ours for row in table.outcome.rows]
    assert {row.repeats for row in figure.outcome.rows} == {"fedgroup-table1"}
    assert figure.seconds == table.seconds
    found = smoke("fedgroup-fig3-4").outcome
    assert claim(found, "the proximal term reduces the divergence").holds
    assert found.series["Digits-MCLR"].keys() == {"FedAvg", "FedProx", "FedGroup", "FedGrouProx"}
    assert smoke("fedgroup-fig3-4").seconds == smoke("fedgroup-table3").seconds


def test_groups_are_told_round_by_round(smoke: Smoke):
    found = smoke("fedgroup-fig3-4").outcome.series["Digits-MCLR"]
    assert len(found["FedGroup"]["groups"]) == 3
    assert list(found["FedAvg"]["groups"].values()) == [
        pytest.approx(found["FedAvg"]["accuracy"], abs=0.02)
    ]


def test_distances_are_compared_pair_by_pair(smoke: Smoke):
    found = smoke("fedgroup-fig5-edc").outcome
    rows = {row.what: row.ours for row in found.rows}
    sample = found.series["Digits-MCLR"]
    # 300 of the 60 · 59 / 2 = 1,770 pairs of all clients, not of the 18 that pre-train alone.
    assert len(sample["full"]) == len(sample["ternary"]) == 300
    assert np.corrcoef(sample["full"], sample["ternary"])[0, 1] == pytest.approx(
        rows["Digits-MCLR · correlation of the distances"], abs=0.1
    )


def test_the_methods_are_those_of_the_table():
    settings, task = {"pretrain_scale": 7, "eta_g": 0.5}, TASKS["Sent140-LSTM"]
    found = {name: method(name, task, settings) for name in METHODS}
    assert {name: mu for name, (_, mu) in found.items() if mu} == {"FedProx": 0.01}
    algorithm: Any = found["FedGrouProx"][0]
    assert (algorithm.mu, algorithm.groups, algorithm.pretrain_scale, algorithm.eta_g) == (
        0.01,
        5,
        7,
        0.5,
    )
    assert [name for name, (each, _) in found.items() if getattr(each, "rcc", False)] == [
        "FedGroup-RCC"
    ]
    assert [name for name, (each, _) in found.items() if getattr(each, "rac", False)] == [
        "FedGroup-RAC"
    ]


def test_nearly_all_digits_are_shared_out_and_clients_tested_on_a_tenth_of_their_own():
    clients = federation_of("digits", {"clients": {"digits": 60}}, ResultCache({}), 0, 1).clients
    held = np.concatenate([np.concatenate([client.train, client.test]) for client in clients])
    assert len(set(held)) == len(held)
    assert 1797 - 60 <= len(held) <= 1797  # shares are rounded down
    assert all(
        len(client.test) == round((len(client.train) + len(client.test)) / 10) for client in clients
    )


def test_every_model_has_the_parameters_of_table_ii(smoke: Smoke):
    table = TABLES["fedgroup-table2"]["numbers"]
    assert {name: [TASKS[name].parameters] for name in table} == {
        name: row[2:] for name, row in table.items()
    }
    rows = {row.what: row.ours for row in smoke("fedgroup-table2").outcome.rows}
    assert rows["Digits-MCLR · parameters"] == 64 * 10 + 10
    assert rows["digits · devices"] == 60


def test_every_reading_of_equation_10_has_a_row(smoke: Smoke):
    found = smoke("fedgroup-eq10").outcome
    ways = ("FedGroup", "FedGroup, sampled, by latest update", "FedGroup, sampled, by position")
    assert [row.what for row in found.rows] == [f"Digits-MCLR · {way}, best round" for way in ways]
    assert found.claims[0].holds is None  # no figure of the paper's to compare with
    algorithms = [
        method(way, TASKS["MNIST-MCLR"], EXPERIMENTS["fedgroup-eq10"].paper)[0] for way in ways
    ]
    assert [
        (each.cold_start, each.direction) for each in algorithms if isinstance(each, FedGroup)
    ] == [("start", "update"), ("sampled", "update"), ("sampled", "position")]


def test_tasks_whose_data_is_missing_are_named(tmp_path: Path):
    cache, settings = (
        ResultCache({}, data_dir=tmp_path),
        {"tasks": ["Synthetic(1,1)-MCLR", "FEMNIST-MLP"]},
    )
    assert list(tasks_at_hand(cache, settings)) == ["Synthetic(1,1)-MCLR"]
    assert absent(cache, settings) == ["FEMNIST-MLP was not measured: its data is not at hand."]


def test_letters_of_nist_are_shared_out_as_the_authors_do(tmp_path: Path):
    """Ten of the 26 lower-case letters, three of them a client, as Li et al.'s generator has them."""
    letters = list(range(36, 46))  # in FEMNIST's 62 classes
    user = {"x": [[0.1] * 784] * 400, "y": (letters * 40)}
    leaf = {"users": ["ann"], "num_samples": [400], "user_data": {"ann": user}}
    (tmp_path / "femnist").mkdir()
    (tmp_path / "femnist" / "data.json").write_text(json.dumps(leaf))
    federation = federation_of(
        "femnist", {"clients": {"femnist": 20}}, ResultCache({}, data_dir=tmp_path), 0
    )
    assert federation.pool.outputs == 26
    labels = [set(federation.examples(client, "train")[1].tolist()) for client in range(20)]
    assert labels == [{(client + step) % 10 for step in range(3)} for client in range(20)]


def scripted(monkeypatch: pytest.MonkeyPatch, module: Any, best: dict[Any, float]) -> None:
    """Let runs of a module come to the accuracy that their method or number of classes is given."""

    def runs_of(_: Any, settings: Any, __: Any, name: str, **how: Any) -> list[dict[str, Any]]:
        accuracy = best[how.get("labels_per_client", name)]
        run = {"accuracy": [0.5, accuracy], "discrepancy": [1.0, 10 * accuracy], "groups": {}}
        return [run] * len(settings["seeds"])

    monkeypatch.setattr(module, "runs_of", runs_of)


def measured(name: str, **changes: Any) -> Outcome:
    return EXPERIMENTS[name].measure(
        ResultCache({}), {**EXPERIMENTS[name].settings("laptop"), **changes}
    )


def test_rounds_to_a_target_that_was_missed_are_left_out(monkeypatch: pytest.MonkeyPatch):
    scripted(monkeypatch, classes, {1: 0.8, 2: 0.85, 3: 0.9, 5: 0.95})
    found = measured("fedgroup-table1")
    rounds = {row.what: row.ours for row in found.rows if "rounds" in row.what}
    assert rounds == {f"{n} classes · rounds to 85 %": 2.0 for n in (2, 3, 5)}
    assert found.remarks[-1] == "With 1 classes 85 % were not reached in all runs."
    assert claim(found, "in fewer rounds").holds is None
    assert claim(found, "the maximum accuracy rises").holds
    falls = claim(found, "the discrepancy falls")
    assert (falls.holds, falls.measured) == (
        False,
        "discrepancy, variance: 24.5 with 1, 36.1 with 5",
    )


GOOD = dict(zip(METHODS, (0.89, 0.90, 0.93, 0.88, 0.95, 0.96), strict=True))
BAD = dict(zip(METHODS, (0.89, 0.90, 0.90, 0.90, 0.89, 0.88), strict=True))


@pytest.mark.parametrize(("best", "holds"), [(GOOD, [True] * 4), (BAD, [False] * 4)])
def test_claims_on_methods(
    monkeypatch: pytest.MonkeyPatch, best: dict[str, float], holds: list[bool]
):
    scripted(monkeypatch, methods, best)
    found = measured("fedgroup-table3", tasks=["MNIST-MCLR"])
    assert [each.holds for each in found.claims] == holds
    rows = [(row.paper, row.ours) for row in found.rows]
    assert rows[0] == (89.3, pytest.approx(89))
    assert rows[4] == (95.7, pytest.approx(100 * best["FedGroup"]))
    assert any(
        "mean of the last ten rounds in %: FedAvg 69.5" in remark for remark in found.remarks
    )


def test_random_centers_may_win_on_synthetic_data_alone(monkeypatch: pytest.MonkeyPatch):
    scripted(monkeypatch, methods, {**GOOD, "FedGroup-RCC": 0.97})
    found = measured("fedgroup-table3", tasks=["Synthetic(1,1)-MCLR", "MNIST-MCLR"])
    assert [each.holds for each in found.claims if "RCC" in each.text] == [True, False]
    assert [each.text[:10] for each in found.claims if "RAC" in each.text] == ["MNIST-MCLR"]
