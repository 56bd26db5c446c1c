"""One checkpoint: what is written is read, and what is not what was written is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from fedclade import CheckpointError, ParameterTree
from fedclade.core.files import sha256_of
from fedclade.runs.store import Checkpoint, RunFolder, SimilarityMatrix
from fedclade.runs.store import checkpoint as members
from fedclade.runs.store import checkpoint as segments
from fedclade.runs.store.checkpoint import FORMAT

FILES = [
    *("checkpoint.json", "run.json", "record/000001-000007.jsonl", "tensors.safetensors"),
    *("tree/tree.json", "tree/tree.safetensors"),
]


def a_checkpoint(number: int = 7) -> Checkpoint:
    draw = torch.Generator().manual_seed(number)
    tree = ParameterTree.root_only([0, 1, 2], torch.randn(5, generator=draw))
    cached = [torch.randn(n, 5, generator=draw) for n in (2, 1)]
    criteria = {"mean_norm": 0.1 + 0.2, "gamma_bound": 1 / 3}
    split = tree.split(
        0,
        [[0, 2], [1]],
        params=tree.nodes[0].params,
        cached=cached,
        round_number=3,
        criteria=criteria,
    )
    return Checkpoint(
        round=number,
        config={"seed": 1, "rounds": 9, "algorithm": {"name": "cfl", "eps1": None}},
        made_with={"engine": "workers, loop", "device": "cpu"},
        fingerprint="ab12",
        tree=split,
        memory={
            "peaks": torch.randn(3, generator=draw, dtype=torch.float64),
            "leaves": torch.tensor([[1, 2]]),
        },
        on_cpu=frozenset({"peaks"}),
        rows={
            "metrics": [{"round": 1, "ari": 0.1 + 0.2, "loss": math.inf, "gap": None}],
            "events": [{"round": 2, "node": 0}],
        },
        similarities=(SimilarityMatrix(0, 3, (0, 1, 2), np.random.default_rng(0).random((3, 3))),),
    )


@pytest.fixture
def written(tmp_path: Path) -> Path:
    folder = tmp_path / "round-000007"
    a_checkpoint().write(folder)
    return folder


def test_a_checkpoint_reads_back_to_the_last_bit(written):
    check_same(a_checkpoint(), Checkpoint.read(written))


def check_same(ours: Checkpoint, theirs: Checkpoint) -> None:
    for name in ("round", "config", "made_with", "fingerprint", "on_cpu", "rows"):
        assert getattr(theirs, name) == getattr(ours, name)
    assert theirs.memory.keys() == ours.memory.keys()
    for name, tensor in ours.memory.items():
        assert theirs.memory[name].dtype == tensor.dtype
        assert torch.equal(theirs.memory[name], tensor)
    for a, b in zip(ours.tree.nodes, theirs.tree.nodes, strict=True):
        assert torch.equal(a.params, b.params)
        assert (a.members, a.born, a.split_in, dict(a.criteria)) == (
            b.members,
            b.born,
            b.split_in,
            dict(b.criteria),
        )
        assert (a.cached is None and b.cached is None) or torch.equal(a.cached, b.cached)
    (before,), (after,) = ours.similarities, theirs.similarities
    assert (after.node, after.round, after.clients) == (before.node, before.round, before.clients)
    assert after.alpha.dtype == np.float64
    np.testing.assert_array_equal(after.alpha, before.alpha)


def test_a_checkpoint_is_safetensors_and_json_alone(written):
    assert {str(path.relative_to(written)) for path in written.rglob("*") if path.is_file()} == set(
        FILES
    )
    texts = [(written / name).read_text() for name in FILES if name.endswith(".json")]
    texts += [
        line
        for name in FILES
        if name.endswith(".jsonl")
        for line in (written / name).read_text().splitlines()
    ]
    assert all(json.loads(text) for text in texts)


def test_tensors_that_share_memory_are_written(tmp_path):
    """Models of a star are rows of one tensor, and the root's is its first leaf's."""
    whole = torch.arange(6.0).view(2, 3)
    tree = ParameterTree.star([[0], [1]], whole)
    checkpoint = dataclasses.replace(
        a_checkpoint(), tree=tree, memory={"models": whole, "first": whole[0]}
    )
    checkpoint.write(tmp_path / "round-000001")
    again = Checkpoint.read(tmp_path / "round-000001")
    assert [node.params.tolist() for node in again.tree.nodes] == [[0, 1, 2], [0, 1, 2], [3, 4, 5]]
    assert again.memory["first"].tolist() == [0, 1, 2]


def test_what_is_kept_on_the_cpu_stays_there(written):
    """The meta device stands for a GPU."""
    moved = Checkpoint.read(written).moved("meta")
    assert {name: tensor.device.type for name, tensor in moved.memory.items()} == {
        "peaks": "cpu",
        "leaves": "meta",
    }
    assert {node.params.device.type for node in moved.tree.nodes} == {"meta"}
    assert {node.cached.device.type for node in moved.tree.nodes if node.cached is not None} == {
        "meta"
    }


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(written, name):
    (written / name).unlink()
    with pytest.raises(CheckpointError, match=re.escape(str(written / name))):
        Checkpoint.read(written)


@pytest.mark.parametrize("name", FILES[1:])
def test_a_file_cut_off_is_named(written, name):
    whole = (written / name).read_bytes()
    (written / name).write_bytes(whole[:-1])
    text = f"{written / name} is damaged: its SHA-256 differs from the one in checkpoint.json"
    with pytest.raises(CheckpointError, match=re.escape(text)):
        Checkpoint.read(written)


@pytest.mark.parametrize("name", FILES[1:])
@pytest.mark.parametrize("place", [0.0, 0.5, 0.99])
def test_one_flipped_bit_is_found(written, name, place):
    content = bytearray((written / name).read_bytes())
    content[int(place * len(content))] ^= 1
    (written / name).write_bytes(content)
    with pytest.raises(
        CheckpointError, match=re.escape(f"{written / name} is damaged: its SHA-256 differs")
    ):
        Checkpoint.read(written)


def test_a_stray_file_is_no_part_of_a_checkpoint(written):
    """Systems leave such files in folders that are looked at, shared, or deleted while they are read."""
    for name in ("record/.DS_Store", "record/.nfs0001", "tree/Thumbs.db", "notes.txt"):
        (written / name).write_bytes(b"\xff\xfe not ours")
    (written / "record/folder").mkdir()
    check_same(a_checkpoint(), Checkpoint.read(written))


def test_a_file_of_another_checkpoint_is_no_part_of_it(written, tmp_path):
    """As a copy over an older folder leaves it: only what the manifest names is read."""
    other = tmp_path / "round-000009"
    dataclasses.replace(a_checkpoint(9), rows={"metrics": [{"round": 9, "ari": 1.0}]}).write(other)
    (newer,) = (other / "record").iterdir()
    shutil.copy(newer, written / "record" / newer.name)
    shutil.copy(other / "tensors.safetensors", written / "memory.safetensors")
    assert newer.name not in {Path(name).name for name in FILES}
    check_same(a_checkpoint(), Checkpoint.read(written))


def test_every_flipped_byte_of_the_manifest_is_found(written):
    """But for white space: whatever else it turns into, it is no manifest, or not of these files."""
    path = written / "checkpoint.json"
    whole = path.read_bytes()
    assert len(whole) > 100
    for place in range(len(whole.rstrip())):
        content = bytearray(whole)
        content[place] ^= 1
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=re.escape(str(written))):
            Checkpoint.read(written)


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[]", b"3", b"{}", b'{"format": 2, "sha256": 5}']
)
def test_what_is_no_manifest_is_one_clear_error(written, content):
    (written / "checkpoint.json").write_bytes(content)
    with pytest.raises(
        CheckpointError, match=re.escape(f"{written / 'checkpoint.json'} cannot be read: ")
    ):
        Checkpoint.read(written)


def test_a_format_of_the_future_is_refused(written):
    manifest = json.loads((written / "checkpoint.json").read_text())
    (written / "checkpoint.json").write_text(json.dumps({**manifest, "format": FORMAT + 1}))
    text = f"{written} has format {FORMAT + 1}, but this version of fedclade reads format {FORMAT}"
    with pytest.raises(CheckpointError, match=re.escape(text)):
        Checkpoint.read(written)


def test_files_that_are_whole_but_make_no_checkpoint_are_one_clear_error(written):
    (written / "run.json").write_text("[]")
    manifest = json.loads((written / "checkpoint.json").read_text())
    manifest["sha256"]["run.json"] = sha256_of(written / "run.json")
    (written / "checkpoint.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=re.escape(f"{written} cannot be read: TypeError: ")):
        Checkpoint.read(written)


def rows_of(rounds: int) -> dict[str, list[dict]]:
    """Return a row of metrics for each round, two of clients, and an event every third round."""
    numbers = range(1, rounds + 1)
    return {
        "metrics": [{"round": n, "loss": 1 / n} for n in numbers],
        "clients": [{"round": n, "client": client} for n in numbers for client in (0, 1)],
        "events": [{"round": n, "kind": "split"} for n in numbers if n % 3 == 0],
        "clusters": [],
    }


def saved(folder: Path, rounds: int) -> Path:
    """Save a run in a folder after each of its rounds."""
    for number in range(1, rounds + 1):
        RunFolder(folder).save(dataclasses.replace(a_checkpoint(number), rows=rows_of(number)))
    return folder / "checkpoints" / f"round-{rounds:06d}"


@pytest.mark.parametrize("rounds", [1, 2, 3, 7, 8, 21])
def test_rows_that_are_written_bit_by_bit_read_back_the_same(tmp_path, rounds):
    newest = saved(tmp_path, rounds)
    folders = sorted(newest.parent.iterdir())
    assert newest in folders
    for folder in folders:
        checkpoint = Checkpoint.read(folder)
        assert checkpoint.rows == rows_of(checkpoint.round)


def test_a_checkpoint_writes_the_rows_of_new_rounds_and_little_else(tmp_path, monkeypatch):
    """Over 64 rounds, one that writes all rows each time would write 64 * 65 / 2 = 2080 rounds."""
    written: list[int] = []
    dumps = json.dumps

    def counted(value, **options):
        if isinstance(value, list) and value[0] == "metrics":
            written.append(value[1]["round"])
        return dumps(value, **options)

    monkeypatch.setattr(segments.json, "dumps", counted)
    newest = saved(tmp_path, 64)
    assert len(written) < 2080 / 4
    assert len(list((newest / "record").iterdir())) <= 7, "which is log2 of 64, and 1"


def test_the_two_checkpoints_that_are_kept_share_no_file(tmp_path):
    """Or one damaged place on a disk could spoil both."""
    saved(tmp_path, 21)
    inodes = [path.stat().st_ino for path in tmp_path.rglob("*") if path.is_file()]
    assert len(set(inodes)) == len(inodes) > 10


def test_what_is_damaged_in_a_checkpoint_is_not_taken_for_right_in_a_later_one(tmp_path):
    newest = saved(tmp_path, 9)
    (shared, *_) = sorted((newest.with_name("round-000008") / "record").iterdir())
    shared.write_bytes(shared.read_bytes().replace(b"0.5", b"0.6"))
    RunFolder(tmp_path).save(dataclasses.replace(a_checkpoint(10), rows=rows_of(10)))
    name = newest.with_name("round-000010") / "record" / shared.name
    with pytest.raises(
        CheckpointError, match=re.escape(f"{name} is damaged: its SHA-256 differs from the one in")
    ):
        Checkpoint.read(newest.with_name("round-000010"))
    assert Checkpoint.read(newest).rows == rows_of(9)


@pytest.mark.parametrize("spoil", ["checkpoint.json", "record"])
def test_rows_are_written_anew_where_the_earlier_ones_are_not_whole(tmp_path, spoil):
    newest = saved(tmp_path, 9)
    earlier = newest.with_name("round-000008") / spoil
    (sorted(earlier.iterdir())[0] if earlier.is_dir() else earlier).unlink()
    RunFolder(tmp_path).save(dataclasses.replace(a_checkpoint(10), rows=rows_of(10)))
    assert Checkpoint.read(newest.with_name("round-000010")).rows == rows_of(10)


def test_files_are_copied_where_they_cannot_be_linked(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(segments.os, "link", refused)
    assert Checkpoint.read(saved(tmp_path, 9)).rows == rows_of(9)


def test_members_of_large_clusters_are_written_once(tmp_path, monkeypatch):
    monkeypatch.setattr(members, "MANY_IDS", 2)
    before = {path.name for path in (saved(tmp_path, 8) / "members").iterdir()}
    tree = a_checkpoint(9).tree.reassigned({0: 2})  # of the leaves (0, 2) and (1,)
    saving: list[str] = []
    save = np.save
    monkeypatch.setattr(
        members.np, "save", lambda path, array: saving.append(path.name) or save(path, array)
    )
    RunFolder(tmp_path).save(dataclasses.replace(a_checkpoint(9), tree=tree, rows=rows_of(9)))
    (now,) = tmp_path.rglob("round-000009")
    files = {path.name for path in (now / "members").iterdir()}
    assert len(before) == len(files) == 2
    assert set(saving) == files - before, "the root has the members that it had"
    assert len(saving) == 1
    assert [node.members for node in Checkpoint.read(now).tree.nodes] == [(0, 1, 2), (2,), (0, 1)]
    described = json.loads((now / "tree" / "tree.json").read_text())["nodes"]
    assert [type(node["members"]) for node in described] == [str, list, str]


@pytest.mark.parametrize("name", ["../../x.npy", "0" * 32 + ".npy"])
def test_members_that_are_not_there_are_refused(written, name):
    path = written / "tree" / "tree.json"
    content = json.loads(path.read_text())
    content["nodes"][0]["members"] = name
    path.write_text(json.dumps(content))
    manifest = json.loads((written / "checkpoint.json").read_text())
    manifest["sha256"]["tree/tree.json"] = sha256_of(path)
    (written / "checkpoint.json").write_text(json.dumps(manifest))
    with pytest.raises(
        CheckpointError,
        match=r"members should be a list of client ids, or the name of a file|No such file",
    ):
        Checkpoint.read(written)
