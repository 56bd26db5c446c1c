"""What is written to a folder is the federation that is read from it; what is damaged is told."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pytest
import torch
from tests.tiny import federation_of, task_federation

from fedclade import load_federation, simulate
from fedclade.core import DataError, Split
from fedclade.data import (
    ClientBlock,
    ClientTable,
    Federation,
    Pool,
    open_folder,
    write_federation,
    write_folder,
)
from fedclade.training.data import ClientsData

TRUTH, SIZES = [0, 1, 2, 0], [24, 7, 30, 12]


def written(federation: Federation, folder: Path) -> Federation:
    write_federation(federation, folder)
    return open_folder(folder)


def same_examples(one: Federation, other: Federation) -> None:
    assert list(one.ids) == list(other.ids)
    assert dict(one.keys) == dict(other.keys)
    assert dict(one.roster.names) == dict(other.roster.names)
    assert dict(one.true_clusters or {}) == dict(other.true_clusters or {})
    for client in one.ids:
        for split in get_args(Split):
            for mine, theirs in zip(
                one.examples(client, split), other.examples(client, split), strict=True
            ):
                assert torch.equal(mine, theirs)


def test_clients_see_the_same_examples(tmp_path: Path):
    plain = federation_of(TRUTH, SIZES)
    found = written(plain, tmp_path / "out")
    same_examples(plain, found)
    assert str(found) == "tiny"
    assert isinstance(found.clients, ClientTable)
    assert found.clients.lies_in_order
    assert [path.name for path in sorted((tmp_path / "out").iterdir())] == [
        "clients.arrow",
        "examples.arrow",
        "federation.json",
    ]


def test_images_are_turned_and_scaled_as_before(tmp_path: Path):
    plain = load_federation(
        "digits",
        clients=6,
        shift="rotation",
        clusters=3,
        newcomers=2,
        test_samples=5,
        validation_fraction=0.1,
    )
    found = written(plain, tmp_path / "out")
    same_examples(plain, found)
    assert plain.newcomers is not None
    assert found.newcomers is not None
    same_examples(plain.newcomers, found.newcomers)
    assert found.pool.x.dtype == torch.uint8
    assert found.pool.schema == plain.pool.schema


@pytest.mark.parametrize("task", ["regression", "multilabel"])
def test_targets_of_any_task_are_kept(task: Any, tmp_path: Path):
    plain = task_federation(task, TRUTH, outputs=3)
    found = written(plain, tmp_path / "out")
    same_examples(plain, found)
    assert found.pool.schema == plain.pool.schema


@pytest.mark.parametrize("source", ["labels", "turns"])
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_run_from_files_is_that_in_memory_bit_for_bit(source: str, engine: str, tmp_path: Path):
    plain = federation_of(TRUTH, SIZES)
    # products round alike where rows are of 16 bytes or more
    wide = torch.cat([plain.pool.x, plain.pool.x[:, :2]], 1)
    plain = replace(plain, pool=replace(plain.pool, x=wide))
    if source == "turns":
        plain = load_federation(
            "digits", clients=4, shift="rotation", clusters=2, partition="power_law", seed=1
        )
    runs = [
        simulate(
            "ifca", "mclr", federation, rounds=3, client_fraction=0.5, engine=engine, device="cpu"
        )
        for federation in (plain, written(plain, tmp_path / "out"))
    ]
    mine, theirs = (
        [{k: v for k, v in row.items() if "seconds" not in k} for row in run.metric_rows]
        for run in runs
    )
    assert mine == theirs
    for one, other in zip(runs[0].tree.nodes, runs[1].tree.nodes, strict=True):
        assert torch.equal(one.params, other.params)


@pytest.mark.parametrize("budget", [0, 2**30])
def test_what_clients_train_on_is_the_same_kept_or_fetched(budget: int, tmp_path: Path):
    plain = load_federation(
        "digits", clients=4, shift="rotation", clusters=2, partition="power_law"
    )
    data = ClientsData(written(plain, tmp_path / "out"), torch.device("cpu"), budget)
    assert (data.bytes_kept > 0) == (budget > 0)
    for client in plain.ids:
        for mine, theirs in zip(data.of(client), plain.examples(client, "train"), strict=True):
            assert torch.equal(mine, theirs)


def test_plain_arrow_reads_the_files(tmp_path: Path):
    plain = federation_of(TRUTH, SIZES)
    write_federation(plain, tmp_path / "out")
    with pa.OSFile(str(tmp_path / "out/examples.arrow")) as file:
        examples = pa.ipc.open_file(file).read_all()
    assert examples["y"].to_pylist() == plain.pool.y.tolist()
    assert np.allclose(examples["x"].to_pylist(), plain.pool.x.numpy())


def test_what_is_written_into_the_memory_does_not_reach_the_file(tmp_path: Path):
    first = written(federation_of(TRUTH, SIZES), tmp_path / "out")
    first.pool.x.zero_()
    again = open_folder(tmp_path / "out")
    assert again.pool.x.any()
    assert again.pool.x.data_ptr() % 64 == 0
    assert again.fingerprint == first.fingerprint


def test_the_fingerprint_is_that_of_the_data(tmp_path: Path):
    plain = federation_of(TRUTH, SIZES)
    one, same = written(plain, tmp_path / "one"), written(plain, tmp_path / "same")
    y = plain.pool.y.clone()
    y[-1] = (y[-1] + 1) % 4
    other = written(replace(plain, pool=replace(plain.pool, y=y)), tmp_path / "other")
    assert one.fingerprint == same.fingerprint != other.fingerprint
    changed = replace(one, pool=replace(one.pool, x=one.pool.x * 2))
    assert changed.pool.digest is None
    assert changed.fingerprint != one.fingerprint


def test_a_folder_that_is_there_is_not_touched(tmp_path: Path):
    with pytest.raises(DataError, match="already exists; choose another folder"):
        write_federation(federation_of(TRUTH), tmp_path)


def test_nothing_is_left_of_a_build_that_fails(tmp_path: Path):
    def blocks() -> Iterator[ClientBlock]:
        yield ClientBlock(torch.ones(3, 2), torch.tensor([0, 1, 1]), np.array([[2, 0, 1]]))
        yield ClientBlock(torch.ones(3, 2), torch.tensor([0, 1, 5]), np.array([[2, 0, 1]]))

    like = Pool(
        "two",
        torch.empty(0, 2),
        torch.empty(0, dtype=torch.int64),
        *[np.empty(0, np.int64)] * 3,
        outputs=2,
    )
    with pytest.raises(
        DataError, match=r"labels of the block of client 1 should lie in 0 .. 1, got 5"
    ):
        write_folder(tmp_path / "out", like, blocks(), description="two")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("block", "told"),
    [
        (
            ClientBlock(torch.ones(3, 3), torch.tensor([0, 1, 1]), np.array([[2, 0, 1]])),
            "inputs of .* got torch.float32",
        ),
        (
            ClientBlock(torch.ones(3, 2) / 0, torch.tensor([0, 1, 1]), np.array([[2, 0, 1]])),
            "NaN or infinite",
        ),
        (
            ClientBlock(torch.ones(3, 2), torch.tensor([0, 1, 1]), np.array([[2, 0, 2]])),
            "3 inputs, 3 targets and counts of 4",
        ),
        (
            ClientBlock(torch.ones(3, 2), torch.tensor([0, 1, 1]), np.array([[2, 1, 0]])),
            r"client 0 should have .* \[2, 1, 0\]",
        ),
    ],
)
def test_blocks_of_no_use_are_refused(block: ClientBlock, told: str, tmp_path: Path):
    like = Pool(
        "two",
        torch.empty(0, 2),
        torch.empty(0, dtype=torch.int64),
        *[np.empty(0, np.int64)] * 3,
        outputs=2,
    )
    with pytest.raises(DataError, match=told):
        write_folder(tmp_path / "out", like, [block], description="two")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def spoil(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        (
            "federation.json",
            Path.unlink,
            "is not the folder of a federation, as it has no federation.json; create such a",
        ),
        ("federation.json", cut, "cannot read .*federation.json"),
        ("clients.arrow", Path.unlink, "cannot read .*clients.arrow: No such file"),
        ("clients.arrow", flip, "clients.arrow is damaged: its SHA-256"),
        (
            "examples.arrow",
            cut,
            r"examples.arrow should have \d+ bytes, got \d+; build the folder again",
        ),
        ("examples.arrow", spoil, "examples.arrow is damaged"),
    ],
)
def test_damage_is_told_by_file(name: str, damage: Any, told: str, tmp_path: Path):
    write_federation(federation_of(TRUTH), tmp_path / "out")
    damage(tmp_path / "out" / name)
    with pytest.raises(DataError, match=told):
        open_folder(tmp_path / "out")


def test_another_format_is_refused(tmp_path: Path):
    write_federation(federation_of(TRUTH), tmp_path / "out")
    header = tmp_path / "out/federation.json"
    header.write_text(json.dumps({**json.loads(header.read_text()), "format": 9}))
    with pytest.raises(
        DataError, match="has format 9, but this version of fedclade reads format 1"
    ):
        open_folder(tmp_path / "out")


def test_to_another_process_travels_the_path_and_not_the_examples(tmp_path: Path):
    found = written(federation_of(TRUTH, SIZES), tmp_path / "out")
    sent = pickle.dumps(found)
    assert len(sent) < len(pickle.dumps(federation_of(TRUTH, SIZES).pool))
    again = pickle.loads(sent)
    same_examples(found, again)
    assert again.fingerprint == found.fingerprint
    write_federation(federation_of(TRUTH, [9, 9, 9, 9]), tmp_path / "other")
    (tmp_path / "out").rename(tmp_path / "away")
    with pytest.raises(
        DataError, match=r"out does not exist on this machine; a run from a data folder needs the"
    ):
        pickle.loads(sent)
    (tmp_path / "other").rename(tmp_path / "out")
    with pytest.raises(DataError, match="has other data than on the machine that started the run"):
        pickle.loads(sent)
