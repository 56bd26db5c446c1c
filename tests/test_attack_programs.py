"""The attack programs of ``benchmarks/attacks``: none may succeed, and each is able to."""

# The programs are on the path of pytest, not on that of pyright.
# pyright: reportMissingImports=false, reportUnknownParameterType=false

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import common
import over_tls
import over_tls_app
import pytest
import table

from fedclade import DifferentialPrivacy, load_federation
from fedclade.channel import Budget
from fedclade.core import FedcladeError
from fedclade.flower.secure import member
from fedclade.flower.secure.member import Member

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "attacks"
STEERED = ["ifca", "pacfl", "--defended"]
"""Options of ``lies.py``: the two methods that a single client once steered most, instead of all for ten minutes."""

LONG = 3600
"""Seconds that a program may take on a busy machine."""


@pytest.fixture(scope="module")
def unprotected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, common.Row]:
    """The rows of an attack on clients without protection."""
    rows = over_tls.attack_in_process(tmp_path_factory.mktemp("open"), protected=False)
    return {row.attack: row for row in rows}


def test_each_program_of_the_folder_is_run_by_one_of_these_tests():
    programs = {path.stem for path in FOLDER.glob("*.py")} - {*table.PARTS}
    assert programs == {*table.PROGRAMS, *table.APART}
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert not [name for name in (*programs, *table.PARTS) if f"`{name}.py`" not in listed]


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        # The same attack on nodes in one process is run by other tests of this file.
        pytest.param(each, marks=pytest.mark.scheduled) if each == "over_tls" else each
        for each in (*table.PROGRAMS, *table.APART)
    ],
)
def test_no_attack_of_a_program_succeeds(program: str, tmp_path: Path):
    file = tmp_path / "rows.json"
    options = STEERED if program in table.APART else []
    command = [sys.executable, str(FOLDER / f"{program}.py"), "--json", str(file), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LONG, check=False
    )
    assert file.exists(), done.stderr
    rows = json.loads(file.read_text(encoding="utf-8"))
    assert rows
    assert [row for row in rows if row["succeeded"] or not row["budget"]] == []
    assert done.returncode == 0


def test_no_attack_on_protected_nodes_succeeds_in_one_process(tmp_path: Path):
    rows = over_tls.attack_in_process(tmp_path, protected=True)
    assert [row for row in rows if row.succeeded] == []
    booked = rows[-1]
    assert (booked.attack, booked.detail) == ("booked", "4 of 4 requests in the client's ledger")
    assert booked.budget == "4 requests, ε 0.0097 of 0.5"
    assert {row.attack: row.budget for row in rows[:3]} == {
        "update alone": "1 request",
        "sum of one, uncounted colluder": "1 request in 1 sum",
        "sum of one, counted colluder": "2 requests in 1 sum",
    }


@pytest.mark.parametrize(
    "attack",
    [
        "update alone",
        "sum of one, uncounted colluder",
        "evaluate, on train data",
        "evaluate, on test data",
        "own loss",
        "refusals, usual",
        "refusals, overlong update",
        "refusals, diverging",
        "refusals, NaN",
        "booked",
    ],
)
def test_an_attack_on_unprotected_nodes_succeeds(attack: str, unprotected: dict[str, common.Row]):
    assert unprotected[attack].succeeded, unprotected[attack].detail


def test_unprotected_nodes_reveal_an_update_and_its_norm(unprotected: dict[str, common.Row]):
    for attack in ("update alone", "sum of one, uncounted colluder"):
        assert unprotected[attack].detail == "cosine with the update 1.0000"
    assert "16 entries of the update 1.0000" in unprotected["evaluate, on train data"].detail
    assert re.search(
        r"norm 1\.\d+e\+25, more than 1e\+18", unprotected["refusals, overlong update"].detail
    )


def test_lists_that_do_not_fit_open_an_update_if_clients_do_not_bind_what_they_sign_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The hole of an earlier protocol, whose clients did not compare their lists."""
    import lying_server

    for module in (member, lying_server):
        monkeypatch.setattr(module, "digest_of_list", lambda *_: bytes(32))
    monkeypatch.setattr(Member, "_check_masked_alike", lambda *_: None)
    monkeypatch.setattr(Member, "_check_agreements", lambda *_: None)
    rows = {row.attack: row for row in over_tls.attack_in_process(tmp_path, protected=True)}
    assert rows["neighbourhoods"].succeeded, rows["neighbourhoods"].detail
    assert rows["neighbourhoods"].detail == "cosine with the update 1.0000"


def test_a_program_reports_each_row_and_ends_with_1_if_an_attack_succeeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rows = [
        common.Row("first", False, "refused | why", budget="1 request"),
        common.Row("second", True, "read 3 images", budget="2 requests"),
    ]
    file = tmp_path / "rows.json"
    assert common.report(rows, file) == 1
    assert common.read_rows(file) == rows
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed] == ["fails", "SUCCEEDS"]
    assert [line.partition("; used ")[2] for line in printed] == ["1 request", "2 requests"]
    assert common.report(rows[:1], None) == 0


def test_rows_of_an_older_file_have_no_budget(tmp_path: Path):
    file = tmp_path / "rows.json"
    file.write_text('[{"attack": "first", "succeeded": false, "detail": "refused"}]')
    assert common.read_rows(file) == [common.Row("first", False, "refused", budget="")]


def row_of(program: str, attack: str, budget: str, *, succeeded: bool = False) -> dict[str, Any]:
    """Return a made-up row of a file that ``table.py`` has written."""
    detail = "refused: at once | norm 3"
    row = {"program": program, "attack": attack, "succeeded": succeeded, "detail": detail}
    return {**row, "budget": budget}


RESULT = [
    row_of("partings", "partings parts, loop", "9 requests, 3 of 5 equations"),
    row_of("partings", "partings parts, vmap", "8 requests, 2 of 5 equations", succeeded=True),
    row_of("limits", "size, epochs", "12 requests, ε 0.31 of 1"),
    row_of("secure_sums", "grind", "13 requests in 11 sums"),
]


def test_the_table_counts_the_variants_of_an_attack_and_cuts_details():
    before = [{**row, "succeeded": True} for row in RESULT[:2]]
    assert table.markdown(before, RESULT).splitlines()[2:] == [
        "| `partings` | parts | 2 of 2 | 1 of 2 | 9 requests, 3 of 5 equations | refused: at once |",
        "| `limits` | size | – | 0 of 1 | 12 requests, ε 0.31 of 1 | refused: at once |",
        "| `secure_sums` | grind | – | 0 of 1 | 13 requests in 11 sums | refused: at once |",
    ]


def test_the_summary_has_the_largest_budget_of_each_goal():
    before = [{**row, "succeeded": True} for row in RESULT[:2]]
    after = [*RESULT[:1], row_of("partings", "partings steps", "10 requests"), *RESULT[1:]]
    rows = [line.split(" | ", 1)[1] for line in table.summary(before, after).splitlines()[2:]]
    assert rows == [
        "`limits` | – | 0 of 1 | 12 requests, ε 0.31 of 1 |",
        "`partings` | 2 of 2 | 1 of 3 | 10 requests |",
        "`secure_sums` | – | 0 of 1 | 13 requests in 11 sums |",
    ]


def test_tables_accept_rows_without_a_budget_and_programs_that_could_not_run():
    older = [{name: value for name, value in row.items() if name != "budget"} for row in RESULT]
    failed = [{**row_of("partings", "", ""), "succeeded": None}]
    assert "| – | 1 of 2 |  |" in table.markdown(failed, older)
    assert "| – | 1 of 2 |  |" in table.summary(failed, older)


def cells_of(page: str, heads: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the cells of a table on a page of the documentation, found by its columns."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    head = f"| {' | '.join(heads)} |\n"
    assert text.count(head) == 1, f"docs/{page} should have a table with the columns {heads}"
    lines = text.partition(head)[2].partition("\n\n")[0].splitlines()[1:]
    return [tuple(line[2:-2].split(" | ")) for line in lines]


def test_the_pages_have_the_tables_that_the_program_writes():
    assert [cells[0] for cells in goals_on_page()] == [goal.text for goal in table.GOALS]
    attacks = cells_of("attack-tests.md", table.HEADS)
    assert all(cells[4] for cells in attacks)
    for program, attack, *_ in attacks:
        fitting = [goal for goal in table.GOALS if goal.includes(program.strip("`"), attack)]
        assert len(fitting) == 1, (program, attack)


@pytest.mark.parametrize("column", ["successes before", "successes now"])
def test_the_summary_on_its_page_adds_up_the_table_of_attacks(column: str):
    attacks = cells_of("attack-tests.md", table.HEADS)
    outcomes = [cells[table.SUMMARY_HEADS.index(column)] for cells in goals_on_page()]
    for goal, stated in zip(table.GOALS, outcomes, strict=True):
        cells = [
            row[table.HEADS.index(column)]
            for row in attacks
            if goal.includes(row[0].strip("`"), row[1])
        ]
        counts = [[int(number) for number in cell.split(" of ")] for cell in cells if cell != "–"]
        total = " of ".join(str(sum(numbers)) for numbers in zip(*counts, strict=True))
        assert stated == (total or "–"), goal.text


def goals_on_page() -> list[tuple[str, ...]]:
    return cells_of("robustness.md", table.SUMMARY_HEADS)


def test_requests_are_counted_and_those_for_keys_begin_a_sum():
    requests = common.Requests()
    requests.count("train")
    assert str(requests) == "1 request"
    for kind in ("keys", "shares", "keys"):
        requests.count(kind)
    assert str(requests) == "4 requests in 2 sums"
    sent = common.sent_by_clients("false update", [3, 3, 4], 12)
    assert sent == "3 false updates from 2 of 12 clients"


def test_an_attacked_client_states_what_its_attacker_has_used_up(tmp_path: Path):
    data = load_federation("digits", clients=2, samples_per_client=40, seed=0).alone(0)
    model = {"model": common.MODEL}
    client = common.AttackedClient(data, folder=tmp_path)
    common.query(client, "train", model, replicates=2, compares_parts=True)
    common.query(client, "evaluate", {"0": common.MODEL}, split="test", compares=False)
    limits = (common.used_equations, common.used_scores, common.used_signs)
    assert client.used(*limits) == (
        "2 requests, 1 of 5 equations, 1 of 50000 scores, 0 of 325 signs"
    )
    noise = DifferentialPrivacy(clip_norm=1.0, noise_multiplier=1000.0)
    private = common.AttackedClient(
        data, folder=tmp_path / "private", budget=Budget(epsilon=0.5), privacy=noise
    )
    common.query(private, "train", model)
    assert private.used() == "1 request, ε 0.0044 of 0.5"


def test_a_refusal_is_cut_and_a_field_that_should_be_missing_counts(
    monkeypatch: pytest.MonkeyPatch,
):
    data = load_federation("digits", clients=2, samples_per_client=20, seed=0).alone(0)
    client = common.AttackedClient(data)

    def try_query(field: str) -> common.Row:
        return common.try_query("a", client, "train", {"model": common.MODEL}, field=field)

    assert try_query("loss") == common.Row("a", True, "answered loss", budget="1 request")
    assert try_query("norm") == common.Row("a", False, "answered without norm", budget="2 requests")

    def refuse(*_: object) -> None:
        raise FedcladeError(300 * "x")

    monkeypatch.setattr(client.handler, "answer", refuse)
    row = try_query("loss")
    assert (row.succeeded, row.detail) == (False, f"refused | {110 * 'x'}")
    assert row.budget == "3 requests"


def test_the_private_node_is_none_of_a_sum():
    assert over_tls_app.PRIVATE == over_tls.NODES - 1 == over_tls_app.HONEST
