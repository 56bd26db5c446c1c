"""What a run folder is worth when it is read: what is not what was written is found, and said in one line."""

from __future__ import annotations

import io
import json
import math
import os
import re
import stat
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fedclade import CFL, LocalTraining, Run, RunError, simulate
from fedclade.runs.newcomers import Newcomers
from fedclade.runs.store.contents import check_shape
from fedclade.runs.store.manifest import read_run_config, write_config
from fedclade.runs.store.newcomers import read_newcomers, score_columns
from fedclade.runs.store.tree_files import read_tree
from tests.folders import resealed, unsealed
from tests.tiny import federation_of, linear

FILES = (
    *(
        "config.toml",
        "summary.json",
        "events.jsonl",
        "metrics.parquet",
        "clusters.parquet",
        "clients.parquet",
    ),
    *("similarities.npz", "tree/tree.json", "tree/tree.safetensors"),
)


@pytest.fixture(scope="module")
def run() -> Run:
    algorithm = CFL(eps2=1e-3, split_rounds=(2,))
    return simulate(
        algorithm,
        linear(),
        federation_of([0, 1, 0, 1]),
        local=LocalTraining(batch_size=10),
        rounds=3,
    )


@pytest.fixture
def folder(run: Run, tmp_path: Path) -> Path:
    return run.save(tmp_path / "run")


def assert_damaged(folder: Path, told: str) -> None:
    with pytest.raises(RunError, match=re.escape(told)) as caught:
        Run.load(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0.0, 0.3, 0.6, 0.97])
def test_one_flipped_bit_is_found_in_every_file(folder, name, place):
    content = bytearray((folder / name).read_bytes())
    content[int(place * len(content))] ^= 0x40
    (folder / name).write_bytes(content)
    assert_damaged(folder, f"the run folder {folder} is damaged")


def test_one_flipped_bit_in_a_weight_is_not_exported(folder):
    """The highest bit of an exponent makes 10³⁷ of a small weight, which no structure would tell."""
    path = folder / "tree/tree.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x40
    path.write_bytes(content)
    assert_damaged(
        folder,
        f"{path} is damaged: its SHA-256 differs from the one in manifest.json; restore it from a copy",
    )


@pytest.mark.parametrize("name", [*FILES[1:], "manifest.json"])
def test_a_missing_file_is_found(folder, name):
    (folder / name).unlink()
    told = "is not a run folder" if name == "summary.json" else f"{folder / name}"
    with pytest.raises(RunError, match=re.escape(told if name != "summary.json" else "unfinished")):
        Run.load(folder)


def test_a_manifest_that_lacks_a_file_is_found(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]["tree/tree.safetensors"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert_damaged(
        folder,
        f"the run folder {folder} is damaged: manifest.json should list tree/tree.safetensors, a file of every run "
        "folder",
    )


def test_files_that_are_put_beside_are_no_hindrance(folder):
    (folder / "figures").mkdir()
    (folder / "figures/accuracy.png").write_bytes(b"a picture")
    (folder / ".DS_Store").write_bytes(b"a system's")
    assert Run.load(folder).summary["rounds"] == 3


def test_a_folder_without_sums_is_read_as_it_was(folder):
    assert Run.load(unsealed(folder)).summary["format"] == 2


def test_the_config_of_an_unfinished_run_is_checked(tmp_path):
    write_config(tmp_path / "config.toml", {"seed": 0, "rounds": 3, "algorithm": {"name": "cfl"}})
    assert read_run_config(tmp_path)["seed"] == 0
    text = (tmp_path / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(text.replace("seed = 0", "seed = 4"))
    with pytest.raises(
        RunError,
        match=r"config\.toml was changed: its SHA-256 differs from the SHA-256 in its last",
    ):
        read_run_config(tmp_path)


def test_a_config_without_a_sum_is_read(tmp_path):
    (tmp_path / "config.toml").write_text("seed = 4\nrounds = 3\n")
    assert read_run_config(tmp_path) == {"seed": 4, "rounds": 3}


def json_change(name: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return damage


def text(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(content) and None


def event(**changes) -> Callable[[Path], None]:
    split = {
        "round": 2,
        "kind": "split",
        "node": 0,
        "children": [1, 2],
        "clusters": [[0, 2], [1, 3]],
    }
    wanted = {key: value for key, value in (split | changes).items() if value is not ...}
    return text("events.jsonl", json.dumps(wanted) + "\n")


def table(name: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        rows = pq.read_table(folder / f"{name}.parquet").to_pylist()
        for row in rows:
            change(row)
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")

    return damage


def similarities(**arrays: np.ndarray) -> Callable[[Path], None]:
    return lambda folder: np.savez_compressed(
        folder / "similarities.npz",
        **{key.replace("_", "/"): value for key, value in arrays.items()},
    )


def node(place: int, **changes) -> Callable[[Path], None]:
    return json_change("tree/tree.json", lambda tree: tree["nodes"][place].update(changes))


DAMAGES = {
    "summary lacks accuracy": (
        json_change("summary.json", lambda s: s.pop("accuracy")),
        "summary.json lacks accuracy",
    ),
    "summary with words": (
        json_change("summary.json", lambda s: s.update(rounds="[/]")),
        "summary.json: rounds should be a whole number of at least 0, got '[/]'",
    ),
    "an infinite time": (
        json_change("summary.json", lambda s: s["seconds"].update(total=math.inf)),
        "summary.json: seconds: total should be a finite number, got inf",
    ),
    "a negative size": (
        json_change("summary.json", lambda s: s["clusters"].update(sizes=[-1])),
        "summary.json: clusters: sizes[0] should be a whole number of at least 0, got -1",
    ),
    "a list for a summary": (text("summary.json", "[]"), "summary.json should be a table, got []"),
    "deep nesting": (text("events.jsonl", "[" * 100_000), "RecursionError"),
    "an event without a kind": (event(kind=...), "line 1 of events.jsonl lacks kind"),
    "an event of no node": (
        event(node=99),
        "line 1 of events.jsonl: node should be the id of a node, from 0 to 2, got 99",
    ),
    "an event with words": (
        event(round="[bold]"),
        "line 1 of events.jsonl: round should be a whole number",
    ),
    "an event that is none": (
        text("events.jsonl", "3\n"),
        "line 1 of events.jsonl should be a table, got 3",
    ),
    "a config of words": (
        text("config.toml", 'algorithm = "cfl"'),
        "config.toml: algorithm should be a table",
    ),
    "a config of nothing": (text("config.toml", "rounds = 3"), "config.toml lacks algorithm"),
    "a config without a name": (
        text("config.toml", "[algorithm]"),
        "config.toml: algorithm lacks name",
    ),
    "a table without a column": (
        table("clients", lambda row: row.pop("name")),
        "clients.parquet lacks the column name",
    ),
    "a table of words": (
        table("clusters", lambda row: row.update(node="0")),
        "clusters.parquet: node should be int64, got string",
    ),
    "a table with holes": (
        table("clients", lambda row: row.update(loss=None if row["client"] else row["loss"])),
        "row 1 of clients.parquet lacks loss",
    ),
    "rows of no node": (
        table("clients", lambda row: row.update(cluster=7)),
        "should be the id of a node, from 0 to 2, got 7",
    ),
    "too many rows": (
        lambda folder: pq.write_table(pa.table({"round": [1] * 1000}), folder / "metrics.parquet"),
        "metrics.parquet should have at most 3 rows, got 1000",
    ),
    "a similarity of no node": (
        similarities(**{"9_1_clients": np.arange(2), "9_1_alpha": np.eye(2)}),
        "9/1/alpha.npy should be the only matrix of its node, and the node should be from 0 to 2",
    ),
    "a similarity of other clients": (
        similarities(**{"0_1_clients": np.arange(3), "0_1_alpha": np.eye(2)}),
        "0/1/alpha.npy should have a row and a column for each of 3 clients, got the shape [2, 2]",
    ),
    "a similarity of one client twice": (
        similarities(**{"0_1_clients": np.array([1, 1]), "0_1_alpha": np.eye(2)}),
        "the clients of 0/1/alpha.npy should have distinct ids of at least 0",
    ),
    "a circle of parents": (
        node(1, parent=2),
        "the parent of node 1 should be a node with a smaller id, got 2",
    ),
    "a node of itself": (
        node(2, parent=2),
        "the parent of node 2 should be a node with a smaller id, got 2",
    ),
    "two roots": (
        node(1, parent=None),
        "the parent of node 1 should be a node with a smaller id, got None",
    ),
    "a root with a parent": (
        node(0, parent=0),
        "the parent of node 0 should be a node with a smaller id, got 0",
    ),
    "nodes in disorder": (node(1, id=2), "the node at index 1 should have the id 1, got 2"),
    "a member twice": (
        node(1, members=[0, 0]),
        "the members of node 1 should be distinct and in ascending order",
    ),
    "a member that is none": (
        node(1, members=[True, 2]),
        "nodes[1]: members[0] should be a whole number of at least 0",
    ),
    "criteria of words": (
        node(0, criteria={"p": "x"}),
        "nodes[0]: criteria: p should be a number or nothing, got 'x'",
    ),
    "no nodes": (
        json_change("tree/tree.json", lambda tree: tree.update(nodes=[])),
        "the parameter tree should have at least one node, the root, got no node",
    ),
    "cached of others": (
        node(1, members=[0, 1, 2]),
        "tensor 'cached' of node 1 of the parameter tree should be a matrix with a row for each member, got the shape "
        "[2, 28]",
    ),
    "a layout of words": (
        json_change("tree/tree.json", lambda tree: tree.update(layout="flat")),
        "tree.json: layout should be a table, got 'flat'",
    ),
    "a layout twice in a place": (
        json_change("tree/tree.json", lambda tree: tree["layout"]["tied"].update(a="b")),
        "the tensors of a layout should have distinct names, and each tied tensor should refer to one",
    ),
}


@pytest.mark.parametrize("seal", [resealed, unsealed])
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_has_another_structure_is_one_clear_error_with_sums_and_without(folder, damage, seal):
    change, told = DAMAGES[damage]
    if seal is unsealed:
        unsealed(folder)
    change(folder)
    if seal is resealed:
        resealed(folder)
    assert_damaged(folder, told)


def test_a_circle_of_parents_does_not_hang(folder):
    node(1, parent=2)(folder)
    with pytest.raises(
        RunError, match="the parent of node 1 should be a node with a smaller id, got 2"
    ):
        read_tree(folder / "tree")


def test_a_small_file_that_unpacks_to_gigabytes_is_refused_before(folder):
    with zipfile.ZipFile(folder / "similarities.npz", "w", zipfile.ZIP_DEFLATED) as arrays:
        clients = io.BytesIO()
        np.save(clients, np.arange(2))
        arrays.writestr("0/1/clients.npy", clients.getvalue())
        with arrays.open("0/1/alpha.npy", "w") as big:
            for _ in range(9):
                big.write(bytes(2**20))
    assert (folder / "similarities.npz").stat().st_size < 20_000
    assert_damaged(
        resealed(folder),
        "0/1/alpha.npy should have at most 8,004,096 bytes, for 1,000 clients, got 9,437,184 bytes",
    )


def test_an_array_that_says_to_be_larger_than_it_is_is_refused(folder):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": (10**6, 10**6)}
    )
    clients = io.BytesIO()
    np.save(clients, np.arange(2))
    with zipfile.ZipFile(folder / "similarities.npz", "w") as arrays:
        arrays.writestr("0/1/clients.npy", clients.getvalue())
        arrays.writestr("0/1/alpha.npy", header.getvalue() + bytes(16))
    assert_damaged(resealed(folder), "cannot reshape array of size 4 into shape (1000000,1000000)")


def test_tensors_of_another_size_are_refused(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "tree/tree.safetensors")
    save_file({**tensors, "1/params": torch.zeros(5)}, folder / "tree/tree.safetensors")
    assert_damaged(
        resealed(folder),
        "tensor 'params' of node 1 of the parameter tree should be floating-point numbers of the shape [28], got the "
        "shape [5]",
    )


@pytest.mark.parametrize(
    ("value", "shape", "told"),
    [
        (True, int, "it should be a whole number of at least 0, got True"),
        (10**400, float, "it should be a number, got 1000"),
        (math.nan, complex, "it should be a finite number, got nan"),
        (1.0, (int, None), "it should be a whole number of at least 0 or nothing, got 1.0"),
        ([1, "a"], [int], "it[1] should be a whole number of at least 0, got 'a'"),
        ({"a": 1}, {"a": str}, "it: a should be a text, got 1"),
        (
            {"a": 1, "b": "x"},
            {"a": int, ...: int},
            "it: b should be a whole number of at least 0, got 'x'",
        ),
        ({}, {"a": int}, "it lacks a"),
        ([], {"a?": int}, "it should be a table, got []"),
        ("x", [str], "it should be a list, got 'x'"),
    ],
)
def test_another_shape_is_told_with_its_place_and_what_is_there(value, shape, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        check_shape(value, shape, "it")


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        (1, float),
        (math.nan, float),
        (None, (int, None)),
        ({"b": 1}, {"a?": str}),
        ([], [int]),
        (object(), object),
    ],
)
def test_what_has_its_shape_is_taken(value, shape):
    check_shape(value, shape, "it")


@pytest.mark.parametrize(("config", "mode"), [({}, 0o640), ({"network": {"deadline": 60}}, 0o600)])
def test_models_of_a_network_are_private_and_others_as_readable_as_the_folder(
    run, tmp_path, config, mode
):
    before = os.umask(0o027)
    try:
        folder = replace(run, config={**run.config, **config}).save(tmp_path / "run")
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "tree/tree.safetensors").stat().st_mode) == mode
    assert stat.S_IMODE((folder / "summary.json").stat().st_mode) == 0o640


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda rows: rows["newcomers"][0].update(accuracy=0.9),
            "newcomers.json was changed: its SHA-256 differs from the recorded SHA-256",
        ),
        (lambda rows: rows["newcomers"][0].pop("path"), "newcomers.json: newcomers[0] lacks path"),
        (lambda rows: rows.update(summary=3), "newcomers.json: summary should be a table, got 3"),
    ],
)
def test_what_became_of_newcomers_is_checked(tmp_path, change, told):
    row = {
        "name": "n",
        "path": [0, 1],
        "fits": True,
        "right": None,
        "margin": 0.25,
        **dict.fromkeys(score_columns("accuracy"), 0.5),
    }
    path = Newcomers([], [row], 3).save(tmp_path / "newcomers.json")
    assert read_newcomers(path)["newcomers"] == [row]
    json_change("newcomers.json", change)(tmp_path)
    with pytest.raises(
        RunError, match=re.escape(f"{path} is damaged: {told}; make it again with: fedclade assign")
    ):
        read_newcomers(path)
