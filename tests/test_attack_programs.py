"""The attack programs of ``benchmarks/attacks``: none may succeed, and each is able to."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import common
import over_tls
import over_tls_app
import pytest
import table

from fedclade.core import FedcladeError
from fedclade.flower.secure import member
from fedclade.flower.secure.member import Member

FOLDER = Path(table.__file__).parent
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
@pytest.mark.parametrize("program", [*table.PROGRAMS, *table.APART])
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
    assert [row for row in rows if row["succeeded"]] == []
    assert done.returncode == 0


def test_no_attack_on_protected_nodes_succeeds_in_one_process(tmp_path: Path):
    rows = over_tls.attack_in_process(tmp_path, protected=True)
    assert [row for row in rows if row.succeeded] == []
    assert [row.detail for row in rows if row.attack == "booked"] == [
        "4 of 4 requests in the client's ledger"
    ]


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


def test_a_program_reports_each_row_and_ends_with_1_if_an_attack_succeeds(tmp_path: Path, capsys):
    rows = [
        common.Row("first", False, "refused | why"),
        common.Row("second", True, "read 3 images"),
    ]
    file = tmp_path / "rows.json"
    assert common.report(rows, file) == 1
    assert common.read_rows(file) == rows
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in lines] == ["fails", "SUCCEEDS"]
    assert common.report(rows[:1], None) == 0


def test_the_table_counts_the_variants_of_an_attack_and_cuts_details():
    after = [
        {
            "program": "p",
            "attack": "p norm, loop",
            "succeeded": False,
            "detail": "refused: at once | norm 3",
        },
        {"program": "p", "attack": "p norm, vmap", "succeeded": True, "detail": "read"},
        {"program": "p", "attack": "new", "succeeded": False, "detail": "refused"},
    ]
    before = [{**row, "succeeded": True} for row in after[:2]]
    assert table.markdown(before, after).splitlines()[2:] == [
        "| `p` | norm | 2 of 2 | 1 of 2 | refused: at once |",
        "| `p` | new | – | 0 of 1 | refused |",
    ]


def test_a_refusal_is_cut_and_a_field_that_should_be_missing_counts():
    def refuse() -> common.Content:
        raise FedcladeError(300 * "x")

    row = common.try_query("a", refuse, "loss")
    assert (row.succeeded, row.detail) == (False, f"refused | {110 * 'x'}")
    reply = common.Content({"loss": 1.0})
    assert common.try_query("a", lambda: reply, "loss") == common.Row("a", True, "answered loss")
    assert common.try_query("a", lambda: reply, "norm") == common.Row(
        "a", False, "answered without norm"
    )


def test_the_private_node_is_none_of_a_sum():
    assert over_tls_app.PRIVATE == over_tls.NODES - 1 == over_tls_app.HONEST
