from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch

from fedclade import CFL, LocalTraining, MissingExtraError, ParameterTree, Run, RunError, simulate
from fedclade.channel.signature import CountSketch
from fedclade.runs.store import run as run_module
from fedclade.runs.store.run import FORMAT, check_free
from fedclade.runs.store.tree_files import read_tree, write_tree
from tests.folders import resealed
from tests.tiny import federation_of, linear


@pytest.fixture(scope="module")
def finished() -> Run:
    algorithm = CFL(eps2=1e-3, split_rounds=(2,))
    settings = {"local": LocalTraining(batch_size=10), "rounds": 3, "evaluate_every": 2}
    return simulate(algorithm, linear(), federation_of([0, 1, 0, 1]), **settings)


def assert_same_tree(ours, theirs):
    assert len(ours.nodes) == len(theirs.nodes)
    for a, b in zip(ours.nodes, theirs.nodes, strict=True):
        assert (a.id, a.parent, a.members, a.born, a.split_in) == (
            b.id,
            b.parent,
            b.members,
            b.born,
            b.split_in,
        )
        assert dict(a.criteria) == dict(b.criteria)
        assert torch.equal(a.params, b.params)
        assert (a.cached is None) == (b.cached is None)
        assert a.cached is None or torch.equal(a.cached, b.cached)


def test_a_saved_run_reads_back_the_same(finished, tmp_path):
    folder = finished.save(tmp_path / "deep" / "run")
    assert folder == tmp_path / "deep" / "run"
    again = Run.load(folder)
    assert again.summary == finished.summary
    assert again.metric_rows == finished.metric_rows
    assert again.cluster_rows == finished.cluster_rows
    assert again.client_rows == finished.client_rows
    assert again.events == finished.events
    assert len(again.events) == 1
    assert again.config["algorithm"]["split_rounds"] == [2]
    assert "accuracy" not in again.config["target"], "TOML has no null"
    assert "options" not in again.config["local"], "which nobody has set"
    assert again.config["signature"] == {"kind": "full", "dim": 1024}
    assert_same_tree(again.tree, finished.tree)
    assert len(again.similarities) == 3
    for ours, theirs in zip(finished.similarities, again.similarities, strict=True):
        assert (ours.node, ours.round, ours.clients) == (theirs.node, theirs.round, theirs.clients)
        np.testing.assert_allclose(theirs.alpha, ours.alpha, atol=1e-7)


def test_the_folder_holds_what_the_contract_names(finished, tmp_path):
    folder = finished.save(tmp_path / "run")
    expected = {
        "config.toml",
        "summary.json",
        "events.jsonl",
        "metrics.parquet",
        "clusters.parquet",
        "clients.parquet",
    }
    assert {path.name for path in folder.iterdir()} == expected | {
        "similarities.npz",
        "tree",
        "manifest.json",
        "gains.json",
    }
    assert {path.name for path in (folder / "tree").iterdir()} == {"tree.json", "tree.safetensors"}


def test_extra_files_are_there_when_the_folder_appears(finished, tmp_path):
    seen = []

    def extra(folder):
        seen.append((tmp_path / "run").exists())
        (folder / "figure.txt").write_text("a figure")

    finished.save(tmp_path / "run", extra)
    assert seen == [False]
    assert (tmp_path / "run" / "figure.txt").read_text() == "a figure"


def test_an_existing_folder_is_left_as_it_is(finished, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    text = re.escape(
        f"{tmp_path / 'run'} exists already; name another folder (on the command line with --out), "
        "or remove it"
    )
    with pytest.raises(RunError, match=text):
        finished.save(tmp_path / "run")
    with pytest.raises(RunError, match=text):
        check_free(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine.txt"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_finished_run_is_replaced_on_request_and_nothing_else(finished, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    finished.save(folder)
    (folder / "old.txt").write_text("of the old run")
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "write_tree", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            finished.save(folder, replace=True)
    assert (folder / "old.txt").exists()
    finished.save(folder, replace=True)
    assert not (folder / "old.txt").exists()
    assert Run.load(folder).summary == finished.summary
    (folder / "summary.json").unlink()
    with pytest.raises(RunError, match="contains an unfinished run"):
        finished.save(folder, replace=True)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunError, match="exists already"):
        finished.save(tmp_path / "file", replace=True)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_is_free_is_returned_as_a_path(tmp_path):
    assert check_free(str(tmp_path / "new")) == tmp_path / "new"


@pytest.mark.parametrize("writer", ["write_tree", "write_rows", "write_similarities"])
def test_a_disk_that_fills_up_leaves_nothing_half_written(finished, tmp_path, monkeypatch, writer):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_module, writer, full)
    text = re.escape(
        f"cannot write the run folder {tmp_path / 'run'}: [Errno 28] No space left on device"
    )
    with pytest.raises(RunError, match=text):
        finished.save(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_figure_that_fails_leaves_nothing_half_written(finished, tmp_path):
    def extra(folder):
        raise ZeroDivisionError("in a figure")

    with pytest.raises(ZeroDivisionError, match="in a figure"):
        finished.save(tmp_path / "run", extra)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_below_a_file_cannot_be_written(finished, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RunError, match=re.escape(f"cannot write the run folder {tmp_path / 'file' / 'run'}: ")
    ):
        finished.save(tmp_path / "file" / "run")


def test_what_is_no_run_folder_is_refused(tmp_path):
    with pytest.raises(RunError, match=re.escape(f"there is no folder {tmp_path / 'none'};")):
        Run.load(tmp_path / "none")
    with pytest.raises(
        RunError, match=re.escape(f"{tmp_path} is not a run folder: it has no summary.json")
    ):
        Run.load(tmp_path)


def test_another_format_is_refused(finished, tmp_path):
    folder = finished.save(tmp_path / "run")
    (folder / "summary.json").write_text(json.dumps({**finished.summary, "format": 99}))
    text = re.escape(
        f"{folder} has format 99, but this version of fedclade reads formats 1, 2 and {FORMAT}"
    )
    with pytest.raises(RunError, match=text):
        Run.load(folder)


FILES = [
    "config.toml",
    "events.jsonl",
    "metrics.parquet",
    "clusters.parquet",
    "clients.parquet",
    "similarities.npz",
]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(finished, tmp_path, name):
    folder = finished.save(tmp_path / "run")
    (folder / name).unlink()
    with pytest.raises(
        RunError, match=f"the run folder {re.escape(str(folder))} is damaged: .*{re.escape(name)}"
    ):
        Run.load(folder)


GARBAGE = [
    (name, content)
    for name in ["summary.json", *FILES]
    for content in [b"", b"\xff\xfe\x00 not this", b"PK\x03\x04 cut off"]
    if content or name not in ("config.toml", "events.jsonl")  # which may be empty
]


@pytest.mark.parametrize(("name", "content"), GARBAGE)
def test_a_damaged_file_is_one_clear_error(finished, tmp_path, name, content):
    folder = finished.save(tmp_path / "run")
    (folder / name).write_bytes(content)
    with pytest.raises(
        RunError, match=f"the run folder {re.escape(str(folder))} is damaged: "
    ) as told:
        Run.load(folder)
    assert name in str(told.value)
    assert "restore it from a copy, or run its config again" in str(told.value)


@pytest.mark.parametrize("cut", [0.3, 0.9])
@pytest.mark.parametrize("name", ["metrics.parquet", "similarities.npz", "summary.json"])
def test_a_file_cut_off_is_one_clear_error(finished, tmp_path, name, cut):
    folder = finished.save(tmp_path / "run")
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: int(cut * len(whole))])
    with pytest.raises(RunError, match=f"the run folder {re.escape(str(folder))} is damaged: "):
        Run.load(folder)


def test_a_summary_that_is_no_table_is_one_clear_error(finished, tmp_path):
    folder = finished.save(tmp_path / "run")
    (folder / "summary.json").write_text("[1, 2]")
    with pytest.raises(RunError, match="is damaged: "):
        Run.load(folder)


def test_a_tree_reads_back_the_same(finished, tmp_path):
    write_tree(finished.tree, tmp_path / "tree")
    assert_same_tree(read_tree(tmp_path / "tree"), finished.tree)


def test_a_tree_with_an_empty_leaf_and_clients_in_none_reads_back_the_same(tmp_path):
    tree = ParameterTree.star([(2,), ()], torch.ones(3), unassigned=[0, 1]).trained(
        1, torch.arange(3.0)
    )
    tree = tree.continued(torch.full((3,), 5.0))
    write_tree(tree, tmp_path / "tree")
    again = read_tree(tmp_path / "tree")
    assert_same_tree(again, tree)
    assert again.leaf_of == {0: 0, 1: 0, 2: 1}
    assert again.nodes[1].trained_from.tolist() == [1, 1, 1]
    assert again.nodes[2].trained_from is None
    assert again.nodes[0].params.tolist() == [1, 1, 1]
    assert again.nodes[0].model.tolist() == [5, 5, 5]


@pytest.mark.parametrize(
    "damage",
    [
        lambda tree: (tree / "tree.json").unlink(),
        lambda tree: (tree / "tree.safetensors").unlink(),
        lambda tree: (tree / "tree.safetensors").write_bytes(b"cut"),
        lambda tree: (tree / "tree.json").write_text("{}"),
        lambda tree: (tree / "tree.json").write_text("[]"),
        lambda tree: (tree / "tree.json").write_text('{"nodes": [3]}'),
        lambda tree: (tree / "tree.json").write_text('{"nodes": [{"id": 0, "members": [1]}]}'),
        lambda tree: (tree / "tree.json").write_text(
            (tree / "tree.json").read_text().replace('"id": 2', '"id": 9')
        ),
    ],
)
def test_a_damaged_tree_is_one_clear_error(finished, tmp_path, damage):
    write_tree(finished.tree, tmp_path / "tree")
    damage(tmp_path / "tree")
    with pytest.raises(
        RunError, match=f"the parameter tree in {re.escape(str(tmp_path / 'tree'))} is damaged: "
    ):
        read_tree(tmp_path / "tree")


def test_a_run_folder_with_a_damaged_tree_names_the_tree(finished, tmp_path):
    folder = finished.save(tmp_path / "run")
    (folder / "tree" / "tree.json").write_text("{}")
    with pytest.raises(
        RunError, match=r"the parameter tree in .* is damaged: ValueError: tree\.json lacks nodes"
    ):
        Run.load(resealed(folder))


def test_the_tree_of_1000_clients_with_600000_parameters_and_sketches_of_1024_is_below_50_mb(
    tmp_path,
):
    """Four clusters by three splits. With whole updates on its edges the same tree would take 4.8 GB."""
    D, R = 600_000, 1024
    sketch = CountSketch(0, D, R)
    one = torch.randn(1, D, generator=torch.Generator().manual_seed(0))

    def split(tree: ParameterTree, node: int) -> ParameterTree:
        members = tree.nodes[node].members
        parts = [members[: len(members) // 2], members[len(members) // 2 :]]
        cached = [sketch.apply(one).expand(len(part), R) for part in parts]
        return tree.split(node, parts, params=one[0], cached=cached, round_number=1, criteria={})

    tree = split(split(split(ParameterTree.root_only(range(1000), one[0]), 0), 1), 2)
    assert len(tree.leaves) == 4
    cached = sum(node.cached.nbytes for node in tree.nodes if node.cached is not None)
    assert cached == 2 * 1000 * R * 4, "every client once on each of two levels"
    assert cached + sum(node.params.nbytes for node in tree.nodes) < 50e6
    write_tree(tree, tmp_path / "tree")
    assert sum(file.stat().st_size for file in (tmp_path / "tree").iterdir()) < 50e6
    assert torch.equal(read_tree(tmp_path / "tree").nodes[6].cached[7], sketch.apply(one[0]))


FORMAT_1 = Path(__file__).parents[2] / "data" / "old_runs" / "format-1"
SUM_OF_ITS_ROOT = 1.7563740517944098


def test_a_folder_of_format_1_is_read_correctly():
    """``tests/data/old_runs/format-1`` was made by the last commit that wrote format 1, with

    ``simulate(CFL(eps2=1e-3, split_rounds=(2,)), linear(), federation_of([0, 1, 0, 1]),
    local=LocalTraining(batch_size=10), rounds=3, engine="loop").save("tests/data/old_runs/format-1")``.
    """
    run = Run.load(FORMAT_1)
    assert (run.summary["format"], run.summary["rounds"], run.config["seed"]) == (1, 3, 0)
    assert [row["round"] for row in run.metric_rows] == [1, 2, 3]
    assert len(run.client_rows) == 3 * 4
    assert [(event["round"], event["kind"], event["children"]) for event in run.events] == [
        (2, "split", [1, 2])
    ]
    assert [node.members for node in run.tree.nodes] == [(0, 1, 2, 3), (0, 2), (1, 3)]
    assert [node.params.shape for node in run.tree.nodes] == [(28,)] * 3
    assert [None if node.cached is None else node.cached.shape for node in run.tree.nodes] == [
        None,
        (2, 28),
        (2, 28),
    ]
    assert {s.node: s.round for s in run.similarities} == {0: 2, 1: 3, 2: 3}
    assert float(run.tree.nodes[0].params.double().sum()) == pytest.approx(
        SUM_OF_ITS_ROOT, rel=1e-12
    )


def test_an_unfinished_run_says_how_to_continue_it(finished, tmp_path):
    folder = finished.save(tmp_path / "run")
    (folder / "summary.json").unlink()
    text = re.escape(f"the run in {folder} is unfinished; continue with: fedclade resume {folder}")
    with pytest.raises(RunError, match=text):
        Run.load(folder)
    text = re.escape(
        f"{folder} contains an unfinished run; continue it with: fedclade resume {folder}, or name another"
    )
    with pytest.raises(RunError, match=text):
        finished.save(folder)


def test_the_tables_are_data_frames_as_their_files_are(finished, tmp_path):
    folder = finished.save(tmp_path / "run")
    for name, rows in (("metrics", finished.metric_rows), ("clusters", finished.cluster_rows)):
        frame = getattr(finished, name)
        pandas.testing.assert_frame_equal(frame, pandas.read_parquet(folder / f"{name}.parquet"))
        assert frame["round"].tolist() == [row["round"] for row in rows]
    assert finished.metrics["accuracy_mean"].isna().tolist() == [True, False, False]
    assert finished.clients.groupby("round").size().to_dict() == {2: 4, 3: 4}
    assert finished.clients is finished.clients, "made once"
    assert Run.load(folder).clients.equals(finished.clients)


def test_a_table_without_rows_is_a_data_frame_without_rows(finished):
    assert len(replace(finished, cluster_rows=[]).clusters) == 0


def test_without_pandas_the_rows_are_there_and_the_frames_say_what_they_need(finished, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    run = replace(finished)
    assert len(run.metric_rows) == 3
    with pytest.raises(
        MissingExtraError,
        match=r"Run\.clients, unlike Run\.client_rows, needs .*fedclade\[notebook\]",
    ):
        _ = run.clients
