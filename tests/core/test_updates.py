from __future__ import annotations

import math
import re

import pytest
import torch

from fedclade.core.errors import UpdateError
from fedclade.core.updates import CONVERTED_AT_A_TIME, LONGEST_CONVERTED, Sums, Updates, row_norms


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
def test_an_update_that_is_not_finite_is_left_out(bad):
    updates = received([[bad, 4, bad], [1, 2, 3]])
    assert updates.ids == (7,)
    assert updates.deltas.tolist() == [[1, 2, 3]]
    assert updates.sizes.tolist() == [30]
    assert updates.losses.tolist() == [0.25]
    assert updates.norms.tolist() == [math.hypot(1, 2)]
    assert updates.left_out == {4: "2 of 3 entries of the update are NaN or infinite"}


def test_an_update_too_large_to_be_compared_is_left_out_even_for_its_buffers():
    updates = received([[1, 2, 3], [1, 2, 2e18]])
    assert (updates.ids, updates.left_out) == ((4,), {7: "norm 2e+18, more than 1e+18"})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_update_whose_loss_is_not_finite_is_left_out(bad):
    updates = Updates.received((4, 7), [10, 30], torch.ones(2, 3), 2, torch.tensor([0.5, bad]), 3)
    assert (updates.ids, updates.left_out) == ((4,), {7: f"loss {bad}"})


def test_who_is_left_out_may_be_everybody():
    updates = received([[math.nan, 2, 3], [1, 2, math.inf]])
    assert updates.ids == ()
    assert updates.deltas.shape == (0, 3)
    assert set(updates.left_out) == {4, 7}


def test_an_update_of_another_shape_is_left_out():
    rows = [
        torch.ones(2),
        torch.tensor([3.0, 4.0, 9.0]),
        torch.tensor([1.0, math.nan, 1.0]),
        torch.ones(1, 3),
    ]
    updates = Updates.received_singly(
        [4, 7, 5, 2], [10, 30, 20, 40], rows, 3, 2, torch.arange(4.0), 3
    )
    assert updates.ids == (7,)
    assert (updates.sizes.tolist(), updates.losses.tolist(), updates.norms.tolist()) == (
        [30],
        [1],
        [5],
    )
    assert updates.left_out == {
        4: "update of shape (2,), expected (3,)",
        5: "1 of 3 entries of the update are NaN or infinite",
        2: "update of shape (1, 3), expected (3,)",
    }
    assert Updates.received_singly([4], [10], rows[:1], 3, 2, torch.zeros(1), 3).deltas.shape == (
        0,
        3,
    )


def test_the_answer_of_nobody_fits_the_models():
    updates = Updates.of_nobody({4: "dropped out"}, torch.zeros(2, 3), 2)
    assert (updates.ids, updates.left_out) == ((), {4: "dropped out"})
    assert (updates.deltas.shape, updates.signatures.shape) == ((0, 3), (0, 2))


def test_who_is_left_out_stays_so_until_an_answer_is_joined():
    updates = received([[1, 2], [math.nan, 4]])
    assert updates.select([7]).left_out == updates.left_out
    assert updates.select([4]).left_out == {}
    assert updates.select([4, 7]) is updates
    again = received([[5, 6], [math.inf, 8]], ids=(7, 2))
    both = updates.concat(again)
    assert both.ids == (4, 7)
    assert both.deltas.tolist() == [[1, 2], [5, 6]]
    assert both.left_out == {2: "1 of 2 entries of the update are NaN or infinite"}


def test_norms_are_of_the_parameters_alone():
    updates = received([[3, 4, 9], [0, 0, 9]])
    assert updates.norms.tolist() == [5, 0]
    assert updates.norms.dtype == torch.float64


@pytest.mark.parametrize(
    "columns", [1, 3, CONVERTED_AT_A_TIME // 2 - 1, CONVERTED_AT_A_TIME + 1, LONGEST_CONVERTED + 3]
)
def test_row_norms_are_exact_however_long_the_rows(columns):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, columns, generator=generator)
    expected = rows.double().square().sum(1).sqrt()
    torch.testing.assert_close(row_norms(rows), expected, rtol=1e-12, atol=0)
    centre = torch.randn(columns, generator=generator)
    distances = (rows - centre).double().square().sum(1).sqrt()
    torch.testing.assert_close(row_norms(rows, centre), distances, rtol=1e-12, atol=0)


@pytest.mark.parametrize("rows", [1, 4, 5, 9])
def test_row_norms_have_the_bits_of_the_norms_of_single_rows(rows):
    matrix = torch.randn(rows, CONVERTED_AT_A_TIME // 4, generator=torch.Generator().manual_seed(0))
    each = [torch.linalg.vector_norm(row.double()[None], dim=1) for row in matrix]
    assert torch.equal(row_norms(matrix), torch.cat(each))


def test_there_may_be_no_rows_to_measure():
    assert row_norms(torch.zeros(0, 3)).tolist() == []
    assert row_norms(torch.zeros(0, 3), torch.ones(3)).tolist() == []


def test_selected_rows_are_copied_only_if_others_lie_between_them():
    deltas = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    updates = Updates.received((0, 1, 2), [10, 10, 10], deltas, 2, torch.zeros(3), 1)
    assert updates.deltas is not None
    behind = updates.select([1, 2])
    assert behind.required_deltas.tolist() == [[3, 4], [5, 6]]
    assert behind.required_deltas.data_ptr() == updates.deltas[1:].data_ptr()
    apart = updates.select([0, 2])
    assert apart.required_deltas.tolist() == [[1, 2], [5, 6]]
    assert apart.required_deltas.data_ptr() != updates.deltas.data_ptr()
    turned = updates.select([2, 1])
    assert turned.required_deltas.tolist() == [[5, 6], [3, 4]]


def test_rows_without_entries_have_norm_zero():
    assert row_norms(torch.zeros(2, 0)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("shape", "shown"), [((3, 2), r"\(3, 2\)"), ((2,), r"\(2,\)"), ((2, 2, 1), r"\(2, 2, 1\)")]
)
def test_there_must_be_one_row_for_each_client(shape, shown):
    with pytest.raises(
        UpdateError,
        match=f"round 3: updates should be a tensor with one row for each of 2 clients, got shape {shown}; correct",
    ):
        received(torch.zeros(shape))


def test_of_picks_members_in_their_order_and_leaves_out_who_did_not_answer():
    part = received([[1, 2], [3, 4]]).select([7, 5, 4])
    assert part.ids == (7, 4)
    assert part.deltas.tolist() == [[3, 4], [1, 2]]
    assert part.signatures.tolist() == [[3, 4], [1, 2]]
    assert part.sizes.tolist() == [30, 10]
    assert part.losses.tolist() == [0.25, 0.5]
    assert part.norms.tolist() == [5, math.hypot(1, 2)]


def test_of_everyone_is_no_copy():
    updates = received([[1, 2], [3, 4]])
    assert updates.select([4, 5, 7]) is updates
    assert updates.select([7, 4]) is not updates


def test_signatures_of_picks_members_in_their_order():
    assert received([[1, 2, 9], [3, 4, 9]]).signatures_of([7, 5, 4]).tolist() == [[3, 4], [1, 2]]


def test_of_nobody_is_empty():
    assert received([[1, 2], [3, 4]]).select([5]).ids == ()


def test_joined_puts_others_behind():
    both = received([[1, 2], [3, 4]]).concat(received([[5, 6], [7, 8]], ids=(1, 2)))
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
    return Updates.of(
        ids=ids, sizes=n, losses=n, norms=n, n_parameters=2, sums=kept, sketches=sketches
    )


def test_of_a_stream_there_are_the_sums_of_all_clients_of_a_model():
    """Groups 1 and 2 are taken, and numbered anew; client 9 did not answer."""
    updates = streamed([[1, 1], [3, 4], [5, 6]], [2, 0, 1, 2], ids=(4, 7, 5, 2))
    part = updates.select([5, 9, 4, 2])
    assert part.ids == (5, 4, 2)
    assert part.sums.groups.tolist() == [[3, 4], [5, 6]]
    assert part.sums.group.tolist() == [0, 1, 1]
    assert part.signatures.tolist() == [[5], [4], [2]]
    assert part.deltas is None
    assert updates.select([]).sums.groups.shape == (0, 2)


def test_of_a_stream_a_part_of_the_clients_of_a_model_cannot_be_had():
    updates = streamed([[1, 1], [3, 4]], [0, 1, 1, 1], ids=(4, 7, 5, 2))
    text = re.escape(
        "the updates of clients [4, 5] cannot be separated from the updates of clients [7, 2], since this run streams, "
        "and so stores only sums over all clients of a model; set stream = false"
    )
    with pytest.raises(UpdateError, match=text):
        updates.select([4, 5])
    assert updates.signatures_of([5, 4]).tolist() == [[5], [4]]


def test_of_a_stream_there_are_no_single_updates():
    text = "the individual updates of 2 clients are required, but this run streams, and so stores only sums of updates"
    with pytest.raises(UpdateError, match=text):
        _ = streamed([[1, 1]], [0, 0], ids=(4, 7)).required_deltas


def test_streams_are_joined_with_their_sums_side_by_side():
    both = streamed([[1, 1], [2, 2]], [1, 0], ids=(4, 7)).concat(
        streamed([[3, 4]], [0, 0], ids=(5, 2))
    )
    assert both.sums.groups.tolist() == [[1, 1], [2, 2], [3, 4]]
    assert both.sums.group.tolist() == [1, 0, 2, 2]
    assert both.signatures.tolist() == [[4], [7], [5], [2]]
    assert both.deltas is None
    assert both.select([2, 4, 5]).sums.groups.tolist() == [[2, 2], [3, 4]]


def test_sketches_stay_with_their_clients():
    sketches = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])]
    ours, theirs = (
        received([[1, 2], [3, 4]], ids=ids).with_columns(sketches=sketch)
        for ids, sketch in zip([(4, 7), (1, 2)], sketches, strict=True)
    )
    assert ours.select([7]).signatures.tolist() == [[2]]
    assert ours.select([7]).deltas.tolist() == [[3, 4]]
    assert ours.concat(theirs).signatures.tolist() == [[1], [2], [3], [4]]
