"""The page on stability states the versions of formats that the code has."""

from __future__ import annotations

import re

import pytest

from fedclade.channel import accounting
from fedclade.data import folder
from fedclade.flower import lasting_record, wire
from fedclade.runs.store import checkpoint, export, gains, run
from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs/stability.md").read_text(encoding="utf-8")
FORMATS = {
    "run folder": run.FORMAT,
    "checkpoint": checkpoint.FORMAT,
    "model card": export.CARD_FORMAT,
    "built data folder": folder.FORMAT,
    "privacy ledger": accounting.FORMAT,
    "gains": gains._FORMAT,
}


@pytest.mark.parametrize("file", FORMATS)
def test_the_page_states_the_format_of_a_file(file: str):
    (row,) = re.findall(rf"^\| {file}[^|]*\| (\d+)", PAGE, flags=re.MULTILINE)
    assert int(row) == FORMATS[file]


def test_the_page_states_the_formats_of_run_folders_that_are_read():
    first, *_, last = run.READABLE
    assert f"formats {first} to {last} are read" in PAGE


def test_the_page_states_the_protocol_and_the_format_of_a_clients_files():
    assert f"at present {wire.PROTOCOL}." in PAGE
    assert lasting_record.FORMAT == accounting.FORMAT  # one row for both
