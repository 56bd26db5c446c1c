"""Records that last as long as a client: whole, for their owner alone, and over processes and runs."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from filelock import FileLock, Timeout
from flwr.app import RecordDict

from fedclade.core import PolicyError
from fedclade.flower.lasting_record import LastingRecord, RecordKind

NAMES = RecordKind[list[str]](
    file="names.json",
    what="the list of names",
    consequence="no name leaves",
    empty=list[str],
    encoded=lambda names: {"names": names},
    decoded=lambda stored: [name.lower() for name in stored["names"]],
    combined=lambda stored, known: [*stored, *(name for name in known if name not in stored)],
)

OTHERS = [
    ('{"format": 2, "names": []}', "has format 2, but this version of fedclade reads format 1"),
    (
        '{"format": true, "names": []}',
        "has format True, but this version of fedclade reads format 1",
    ),
    (
        '{"format": 1, "names": [], "more": 1}',
        r"the list of names should have the keys \['format', 'names'\], got \['format', 'more', 'names'\]",
    ),
    ("[" * 100_000, "RecursionError"),
]
"""Damaged records, and what is said of them."""


def test_a_file_has_its_format_and_is_its_owners_alone(tmp_path: Path):
    LastingRecord(tmp_path, NAMES).write(["ada"])
    file = tmp_path / "names.json"
    assert json.loads(file.read_text()) == {"format": 1, "names": ["ada"]}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert LastingRecord(tmp_path, NAMES).read() == ["ada"]


def test_without_a_folder_it_is_in_the_state_and_in_memory():
    state, other = RecordDict(), RecordDict()
    record = LastingRecord(None, NAMES)
    assert record.read(state) == []
    record.write(["ada"], state)
    assert LastingRecord(None, NAMES).read(state) == ["ada"]
    assert record.read(other) == ["ada"]
    LastingRecord(None, NAMES).write(["emmy"], other)
    assert record.read(other) == ["emmy", "ada"]


def test_a_folder_in_place_of_the_file_is_a_damaged_record(tmp_path: Path):
    (tmp_path / "names.json").mkdir()
    with pytest.raises(
        PolicyError,
        match=r"names.json, the list of names, is damaged, so no name leaves; .*IsADirectory",
    ):
        LastingRecord(tmp_path, NAMES).read()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "AttributeError"),
        ('{"format": 1}', r"should have the keys \['format', 'names'\], got \['format'\]"),
        *OTHERS,
    ],
)
def test_a_damaged_record_is_an_error_that_says_what_follows(text: str, why: str, tmp_path: Path):
    (tmp_path / "names.json").write_text(text)
    with pytest.raises(
        PolicyError, match=rf"names.json, the list of names, is damaged, so no name leaves; .*{why}"
    ):
        LastingRecord(tmp_path, NAMES).read()
    state = RecordDict()
    LastingRecord(None, NAMES).write(["ada"], state)
    state.config_records["fedclade.names"]["record"] = text
    with pytest.raises(
        PolicyError, match=rf"Flower's state of this client, the list of names, is damaged, .*{why}"
    ):
        LastingRecord(None, NAMES).read(state)


def test_others_wait_while_it_is_read_and_written(tmp_path: Path):
    with LastingRecord(tmp_path, NAMES).alone(), pytest.raises(Timeout):
        FileLock(tmp_path / ".names.json.lock").acquire(timeout=0)
    with LastingRecord(None, NAMES).alone():
        assert not list(tmp_path.glob("*.json"))
