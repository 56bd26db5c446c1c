from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from fedclade.errors import UpdateError
from fedclade.updates import CONVERTED_AT_A_TIME, Sums, Updates, row_norms


def received(deltas, ids=(4, 7), number=3) -> Updates:
    deltas = torch.as_tensor(deltas, dtype=torch.float32)
    return Updates.received(ids, [10, 30], deltas, 2, torch.tensor([0.5, 0.25]), number)


def test_received_keeps_what_came_and_cuts_signatures_to_the_parameters():
    updates = received([[1, 2, 9], [3, 4, 9]])
    assert updates.ids == (4, 7)
    assert updates.sizes.tolist() == [10, 30]
    assert updates.sizes.dtype == torch.float64
    assert updates.signatures.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_an_update_that_is_not_finite_names_client_round_and_how_much_of_it(bad):
    text = (
        "round 3: the update of client 7 has 2 of 3 entries that are NaN or infinite; its training diverged: "
        "lower local.lr, or look at the client's data"
    )
    with pytest.raises(UpdateError, match=text):
        received([[1, 2, 3], [bad, 4, bad]])


def test_an_update_too_large_to_be_compared_is_named_even_for_its_buffers():
    with pytest.raises(UpdateError, match=r"the update of client 7 has norm 2e\+18, more than 1e\+18"):
        received([[1, 2, 3], [1, 2, 2e18]])


def test_norms_are_of_the_parameters_alone():
    updates = received([[3, 4, 9], [0, 0, 9]])
    assert updates.norms.tolist() == [5, 0]
    assert updates.norms.dtype == torch.float64


@pytest.mark.parametrize("columns", [1, 3, CONVERTED_AT_A_TIME // 2 - 1, CONVERTED_AT_A_TIME + 1])
def test_row_norms_are_exact_however_long_the_rows(columns):
    rows = torch.randn(5, columns, generator=torch.Generator().manual_seed(0))
    expected = rows.double().square().sum(1).sqrt()
    torch.testing.assert_close(row_norms(rows), expected, rtol=1e-12, atol=0)


def test_rows_without_entries_have_norm_zero():
    assert row_norms(torch.zeros(2, 0)).tolist() == [0, 0]


@pytest.mark.parametrize(("shape", "shown"), [((3, 2), r"\(3, 2\)"), ((2,), r"\(2,\)"), ((2, 2, 1), r"\(2, 2, 1\)")])
def test_there_must_be_one_row_for_each_client(shape, shown):
    with pytest.raises(UpdateError, match=f"round 3: expected 2 updates, got a tensor of shape {shown}"):
        received(torch.zeros(shape))


def test_of_picks_members_in_their_order_and_leaves_out_who_did_not_answer():
    part = received([[1, 2], [3, 4]]).of([7, 5, 4])
    assert part.ids == (7, 4)
    assert part.deltas.tolist() == [[3, 4], [1, 2]]
    assert part.signatures.tolist() == [[3, 4], [1, 2]]
    assert part.sizes.tolist() == [30, 10]
    assert part.losses.tolist() == [0.25, 0.5]
    assert part.norms.tolist() == [5, math.hypot(1, 2)]


def test_of_everyone_is_no_copy():
    updates = received([[1, 2], [3, 4]])
    assert updates.of([4, 5, 7]) is updates
    assert updates.of([7, 4]) is not updates


def test_signatures_of_picks_members_in_their_order():
    assert received([[1, 2, 9], [3, 4, 9]]).signatures_of([7, 5, 4]).tolist() == [[3, 4], [1, 2]]


def test_of_nobody_is_empty():
    assert received([[1, 2], [3, 4]]).of([5]).ids == ()


def test_joined_puts_others_behind():
    both = received([[1, 2], [3, 4]]).joined(received([[5, 6], [7, 8]], ids=(1, 2)))
    assert both.ids == (4, 7, 1, 2)
    assert both.deltas.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert both.signatures.shape == (4, 2)
    assert both.sizes.tolist() == [10, 30, 10, 30]
    assert both.losses.tolist() == [0.5, 0.25, 0.5, 0.25]
    assert both.norms.tolist() == [math.hypot(1, 2), 5, math.hypot(5, 6), math.hypot(7, 8)]


def streamed(sums, group, ids) -> Updates:
    """Return clients of one example each, whose updates have been summed; each is compared by its id."""
    n = torch.ones(len(ids), dtype=torch.float64)
    kept = Sums(torch.tensor(sums, dtype=torch.float32), torch.tensor(group))
    sketches = torch.tensor(ids, dtype=torch.float32)[:, None]
    return Updates(ids=ids, sizes=n, losses=n, norms=n, n_parameters=2, sums=kept, sketches=sketches)


def test_of_a_stream_there_are_the_sums_of_all_clients_of_a_model():
    """Groups 1 and 2 are taken, and numbered anew; client 9 did not answer."""
    updates = streamed([[1, 1], [3, 4], [5, 6]], [2, 0, 1, 2], ids=(4, 7, 5, 2))
    part = updates.of([5, 9, 4, 2])
    assert part.ids == (5, 4, 2)
    assert part.sums.groups.tolist() == [[3, 4], [5, 6]]
    assert part.sums.group.tolist() == [0, 1, 1]
    assert part.signatures.tolist() == [[5], [4], [2]]
    assert part.deltas is None
    assert updates.of([]).sums.groups.shape == (0, 2)


def test_of_a_stream_a_part_of_the_clients_of_a_model_cannot_be_had():
    updates = streamed([[1, 1], [3, 4]], [0, 1, 1, 1], ids=(4, 7, 5, 2))
    text = re.escape(
        "the updates of clients [4, 5] cannot be told from those of clients [7, 2]: this run streams, and keeps only "
        "sums over all clients of a model; set stream = false"
    )
    with pytest.raises(UpdateError, match=text):
        updates.of([4, 5])
    assert updates.signatures_of([5, 4]).tolist() == [[5], [4]]


def test_of_a_stream_there_are_no_single_updates():
    text = "the updates of 2 clients are needed one by one, but this run streams and keeps only their sums; set stream"
    with pytest.raises(UpdateError, match=text):
        _ = streamed([[1, 1]], [0, 0], ids=(4, 7)).each


def test_streams_are_joined_with_their_sums_side_by_side():
    both = streamed([[1, 1], [2, 2]], [1, 0], ids=(4, 7)).joined(streamed([[3, 4]], [0, 0], ids=(5, 2)))
    assert both.sums.groups.tolist() == [[1, 1], [2, 2], [3, 4]]
    assert both.sums.group.tolist() == [1, 0, 2, 2]
    assert both.signatures.tolist() == [[4], [7], [5], [2]]
    assert both.deltas is None
    assert both.of([2, 4, 5]).sums.groups.tolist() == [[2, 2], [3, 4]]


def test_sketches_stay_with_their_clients():
    sketches = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])]
    ours, theirs = (
        replace(received([[1, 2], [3, 4]], ids=ids), sketches=sketch)
        for ids, sketch in zip([(4, 7), (1, 2)], sketches, strict=True)
    )
    assert ours.of([7]).signatures.tolist() == [[2]]
    assert ours.of([7]).deltas.tolist() == [[3, 4]]
    assert ours.joined(theirs).signatures.tolist() == [[1], [2], [3], [4]]
