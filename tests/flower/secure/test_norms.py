"""C, the longest update in a sum: it follows earlier sums within bounds, and a resumed run goes on with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedclade.core.errors import RunError
from fedclade.flower.secure.norms import NORMS, Norms, NormsByRound
from fedclade.flower.secure.secrets import ClusterSum


def sum_with(norm: float, norm_of_buffers: float = 1.0) -> ClusterSum:
    return ClusterSum(
        total=torch.zeros(1),
        weight=1.0,
        clients=3,
        loss=0.0,
        norm=norm,
        norm_of_buffers=norm_of_buffers,
        clipped=0,
    )


@pytest.mark.parametrize(
    ("norms", "wanted"),
    [
        ([3.0], 6.0),  # twice the root mean square
        ([0.1], 4.0),  # at most half as long as before
        ([7.0], 12.0),  # at most one and a half times as long
        ([3.0, 3.2, 8.0], 6.4),  # of three sums one may be a lie
        ([0.0, 3.0, 3.2], 6.0),
        ([], 8.0),
    ],
)
def test_c_follows_the_typical_sum(norms: list[float], wanted: float):
    assert Norms(8.0, 8.0).follow([sum_with(norm, norm) for norm in norms]) == Norms(wanted, wanted)


def test_lies_about_norms_move_c_between_two_bounds_alone():
    norms = NormsByRound(10.0)
    for number in range(1, 30):
        now = norms.in_round(number, 2.0)
        norms.take(number, now, [sum_with(now.parameters, now.buffers)])
    assert norms.in_round(30, 2.0) == Norms(10.0, 2.0)
    for number in range(30, 60):
        norms.take(number, norms.in_round(number, 2.0), [sum_with(0.0, 0.0)])
    assert norms.in_round(60, 2.0) == Norms(0.1, 0.02)


def test_all_queries_of_a_round_count():
    norms = NormsByRound(10.0)
    for _ in range(2):
        norms.take(1, norms.in_round(1, 1.0), [sum_with(1.0)])
    assert norms.in_round(2, 1.0).parameters == 2.5


def test_replicates_have_a_c_of_their_own(tmp_path: Path):
    """Training in parts takes fewer steps, and must not shorten the updates of training on all examples."""
    norms = NormsByRound(10.0, tmp_path)
    norms.take(1, norms.in_round(1, 1.0, 2), [sum_with(1.0)], 2)
    assert norms.in_round(2, 1.0, 2).parameters == 5.0
    assert norms.in_round(2, 1.0).parameters == 10.0
    assert NormsByRound(10.0, tmp_path).in_round(2, 1.0, 2).parameters == 5.0


def test_buffers_grow_with_those_of_the_models():
    norms = NormsByRound(10.0)
    assert norms.in_round(1, 3.0).buffers == 3.0
    norms.take(1, norms.in_round(1, 3.0), [sum_with(1.0, 3.0)])
    assert norms.in_round(2, 100.0).buffers == 4.5
    assert NormsByRound(10.0).in_round(1, 0.0).buffers == 10.0


def test_a_resumed_run_goes_on_with_c_of_its_next_round(tmp_path: Path):
    norms, seen = NormsByRound(10.0, tmp_path), list[Norms]()
    for number in range(1, 6):
        seen.append(norms.in_round(number, 1.0))
        norms.take(number, seen[-1], [sum_with(1.0 + number)])
    for number in range(1, 6):
        assert NormsByRound(10.0, tmp_path).in_round(number, 1.0) == seen[number - 1]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"replicates": {"1": {"1": [2.0]}}}',
        '{"replicates": {"1": {"one": [2.0, 1.0]}}}',
        '{"replicates": []}',
    ],
)
def test_a_damaged_file_is_an_error(tmp_path: Path, text: str):
    (tmp_path / NORMS).write_text(text)
    with pytest.raises(
        RunError, match=rf"{NORMS} is damaged .*; restore it, or name another run folder"
    ):
        NormsByRound(10.0, tmp_path)


def test_what_cannot_be_written_is_an_error(tmp_path: Path):
    norms = NormsByRound(10.0, tmp_path / "missing")
    with pytest.raises(RunError, match=rf"cannot write .*{NORMS}"):
        norms.take(1, norms.in_round(1, 1.0), [sum_with(1.0)])
