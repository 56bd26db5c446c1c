"""Large matrices in files: the same entries as in memory, and no copy of them in memory."""

from __future__ import annotations

import gc
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fedclade import (
    CFL,
    LocalTraining,
    ParameterTree,
    Run,
    RunInterrupted,
    load_federation,
    simulate,
)
from fedclade.core import (
    copy_rows,
    empty_rows,
    file_rows,
    files_of_rows_in,
    is_in_file,
    release_pages,
    write_tensors,
)
from fedclade.core.file_rows import merge_rows
from fedclade.runs import Churn
from fedclade.runs.store import tree_files

MATRIX = torch.arange(12.0).view(4, 3)


@pytest.fixture
def always_in_files(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(file_rows, "LARGEST_IN_MEMORY", 0)


class Watched(torch.Tensor):
    """Matrix that records the bytes of each tensor that an operation on it has returned."""

    taken: ClassVar[list[int]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and record the bytes of its result."""
        found = super().__torch_function__(func, types, args, kwargs)
        if isinstance(found, torch.Tensor):
            cls.taken.append(found.numel() * found.itemsize)
        return found


@pytest.mark.usefixtures("always_in_files")
def test_rows_in_a_file_are_those_in_memory_and_survive_the_release_of_their_pages(tmp_path: Path):
    with files_of_rows_in(tmp_path):
        copied = copy_rows(MATRIX, [3, 1])
    assert is_in_file(copied)
    assert not is_in_file(copied[1:])
    assert not is_in_file(MATRIX)
    assert not list(tmp_path.iterdir()), "the file has no name"
    release_pages()
    assert torch.equal(copied, MATRIX[[3, 1]])
    merged = merge_rows(copied, MATRIX[:1], [2, 0, 1])
    assert torch.equal(merged, MATRIX[[0, 3, 1]])
    assert is_in_file(merged)


@pytest.mark.usefixtures("always_in_files")
def test_a_file_disappears_with_its_tensor():
    copied = copy_rows(MATRIX)
    place = copied.data_ptr(), copied.nbytes
    assert place in file_rows._mapped.values()  # pyright: ignore[reportPrivateUsage]
    del copied
    gc.collect()
    assert place not in file_rows._mapped.values()  # pyright: ignore[reportPrivateUsage]


def test_small_matrices_lie_in_memory():
    assert not is_in_file(copy_rows(MATRIX))
    large = file_rows.LARGEST_IN_MEMORY // MATRIX.itemsize + 1
    assert is_in_file(empty_rows(1, large, MATRIX))
    assert not is_in_file(empty_rows(1, large - 1, MATRIX))
    assert not is_in_file(empty_rows(1, large, MATRIX, in_file=False))


def test_a_large_matrix_is_copied_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch):
    matrix = torch.rand(64, 1000)
    monkeypatch.setattr(file_rows, "LARGEST_IN_MEMORY", 8 * 4000)
    watched = matrix.as_subclass(Watched)
    Watched.taken.clear()
    copied = copy_rows(watched, list(range(63, -1, -1)))
    assert torch.equal(copied, matrix.flip(0))
    assert max(Watched.taken) == 8 * 4000


@pytest.mark.usefixtures("always_in_files")
def test_without_space_on_the_disk_rows_lie_in_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file_rows.os, "posix_fallocate", no_space)
    copied = copy_rows(MATRIX)
    assert torch.equal(copied, MATRIX)
    assert not is_in_file(copied)
    assert re.search(r"0\.0 GB of updates are stored in memory, .*No space left", caplog.text)


@pytest.mark.usefixtures("always_in_files")
def test_a_tree_is_written_without_a_copy_of_rows_in_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    tree = ParameterTree.root_only([0, 1, 2], torch.zeros(3)).split(
        0,
        [[0, 2], [1]],
        params=torch.zeros(3),
        cached=[copy_rows(MATRIX, [0, 2]), copy_rows(MATRIX, [1]).flip(0)],
        round_number=1,
        criteria={},
    )
    written: dict[str, torch.Tensor] = {}

    def write(path: Path, tensors: Mapping[str, torch.Tensor], *, private: bool) -> None:
        write_tensors(path, tensors, private=private)
        written.update(tensors)

    monkeypatch.setattr(tree_files, "write_tensors", write)
    tree_files.write_tree(tree, tmp_path / "tree")
    assert written["1/cached"] is tree.nodes[1].cached
    assert written["2/cached"] is not tree.nodes[2].cached, "it is in memory"
    assert written["1/params"].data_ptr() != written["2/params"].data_ptr()
    read = tree_files.read_tree(tmp_path / "tree")
    cached = read.nodes[1].cached
    assert cached is not None
    assert torch.equal(cached, MATRIX[[0, 2]])


# Runs whose stored updates lie in files. Four clients join before round 5, so that they are compared
# with the stored updates of the splits in rounds 2 and 3.

FEDERATION = load_federation(
    "digits", clients=8, samples_per_client=40, shift="label_swap", clusters=2, newcomers=4
)
SPLITTING = CFL(split_rounds=(2, 3), eps2=1e-6)


def play(folder: Path, rounds: int = 6, stop_after: int | None = None) -> Run:
    seen: list[int] = []
    return simulate(
        SPLITTING,
        "mclr",
        FEDERATION,
        rounds=rounds,
        local=LocalTraining(epochs=1, batch_size=20, lr=0.2),
        presence=Churn(join_round=5),
        engine="loop",
        evaluate_every=6,
        folder=folder,
        stop=lambda: seen.append(1) or len(seen) == stop_after,
        progress=False,
    )


def test_runs_assign_newcomers_and_continue_as_with_rows_in_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    expected = play(tmp_path / "memory").tree
    assert len(expected.nodes) > 3
    assert len(expected.leaf_of) == 12
    monkeypatch.setattr(file_rows, "LARGEST_IN_MEMORY", 0)
    with pytest.raises(RunInterrupted):
        play(tmp_path / "files", stop_after=4)
    run = play(tmp_path / "files")
    for found in (run.tree, Run.load(tmp_path / "files").tree):
        assert [node.members for node in found.nodes] == [node.members for node in expected.nodes]
        for ours, theirs in zip(found.nodes, expected.nodes, strict=True):
            assert torch.equal(ours.params, theirs.params)
            assert (ours.cached is None) == (theirs.cached is None)
            if ours.cached is not None and theirs.cached is not None:
                assert torch.equal(ours.cached, theirs.cached)
    assert all(is_in_file(node.cached) for node in run.tree.nodes if node.cached is not None)
