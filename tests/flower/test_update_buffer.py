"""Updates that arrive one by one, in whatever order."""

from __future__ import annotations

import math

import torch

from fedclade.flower.exchange import AT_ONCE
from fedclade.flower.network import STREAM_BUFFER
from fedclade.flower.replies import UpdateReply
from fedclade.flower.update_buffer import ReusedMemory, UpdateBuffer, streamed_at_once

MODELS = torch.zeros(1, 3)
PARAMETERS = 2
"""Of three entries in a model; the last is a buffer."""


def answer(value: float, size: int = 5, loss: float | None = 0.5) -> UpdateReply:
    return UpdateReply(size, loss, torch.full((3,), value))


def test_updates_lie_in_the_rows_that_they_were_put_in():
    buffer = UpdateBuffer(3, 3, MODELS)
    buffer.put(30, answer(3.0, size=7), 2)
    buffer.put(10, answer(1.0), 0)
    assert not buffer.full
    buffer.put(20, answer(2.0, loss=0.25), 1)
    assert buffer.full
    updates = buffer.checked(PARAMETERS, 1)
    assert updates.ids == (10, 20, 30)
    assert updates.required_deltas[:, 0].tolist() == [1.0, 2.0, 3.0]
    assert updates.signatures.shape == (3, PARAMETERS)
    assert updates.sizes.tolist() == [5, 5, 7]
    assert updates.losses.tolist() == [0.5, 0.25, 0.5]


def test_without_rows_updates_lie_in_the_order_in_which_they_came():
    buffer = UpdateBuffer(3, 3, MODELS)
    buffer.put(30, answer(3.0))
    buffer.put(10, answer(1.0))
    updates = buffer.checked(PARAMETERS, 1)
    assert updates.ids == (30, 10)
    assert updates.required_deltas.tolist() == [[3.0] * 3, [1.0] * 3]


def test_whose_rows_stay_empty_is_not_there():
    buffer = UpdateBuffer(3, 3, MODELS)
    buffer.put(30, answer(3.0), 2)
    assert buffer.checked(PARAMETERS, 1).ids == (30,)
    assert buffer.checked(PARAMETERS, 1).required_deltas.tolist() == [[3.0] * 3]
    nobody = UpdateBuffer(3, 3, MODELS).checked(PARAMETERS, 1)
    assert (nobody.ids, nobody.required_deltas.shape) == ((), (0, 3))


def test_an_update_that_cannot_be_used_is_left_out_alone():
    buffer = UpdateBuffer(2, 3, MODELS)
    buffer.put(10, answer(math.nan))
    buffer.put(20, answer(2.0))
    updates = buffer.checked(PARAMETERS, 1)
    assert updates.ids == (20,)
    assert updates.left_out == {10: "3 of 3 entries of the update are NaN or infinite"}


def test_losses_that_clients_keep_to_themselves_are_nan_and_no_reason_to_leave_them_out():
    buffer = UpdateBuffer(3, 3, MODELS)
    buffer.put(10, answer(1.0, loss=None))
    buffer.put(20, answer(math.inf, loss=None))
    buffer.put(30, answer(3.0))
    updates = buffer.checked(PARAMETERS, 1)
    assert updates.ids == (10, 30)
    assert math.isnan(updates.losses[0])
    assert updates.losses[1] == 0.5


def test_rows_without_an_update_are_closed_up_in_place():
    buffer = UpdateBuffer(4, 3, MODELS)
    buffer.put(40, answer(4.0), 3)
    buffer.put(20, answer(2.0), 1)
    updates = buffer.checked(PARAMETERS, 1)
    assert updates.ids == (20, 40)
    assert updates.required_deltas.tolist() == [[2.0] * 3, [4.0] * 3]


def test_a_stream_collects_few_updates_and_few_bytes():
    assert streamed_at_once(0) == AT_ONCE
    assert streamed_at_once(STREAM_BUFFER // AT_ONCE) == AT_ONCE
    assert streamed_at_once(STREAM_BUFFER // 3) == 3
    assert streamed_at_once(10 * STREAM_BUFFER) == 1


# Memory that is used again.


def test_memory_is_used_again_once_no_tensor_lies_in_it():
    memory = ReusedMemory()
    first = memory.rows(4, 3, MODELS)
    place = first.data_ptr()
    part = first[1:, :2].T  # what is made of a tensor uses its memory, too
    del first
    second = memory.rows(4, 3, MODELS)
    assert second.data_ptr() != place
    del part
    place = second.data_ptr()
    del second
    assert memory.rows(4, 3, MODELS).data_ptr() == place


def test_memory_in_use_keeps_its_numbers():
    memory = ReusedMemory()
    kept = memory.rows(2, 3, MODELS).fill_(1.0)[0]
    memory.rows(2, 3, MODELS).fill_(2.0)
    memory.rows(2, 3, MODELS).fill_(3.0)
    assert kept.tolist() == [1.0] * 3


def test_memory_is_new_for_a_matrix_that_is_too_large_or_far_smaller():
    memory = ReusedMemory()
    for rows, length in ((4, 3), (8, 3), (5, 3), (1, 3), (0, 3), (3, 0), (3, 3)):
        matrix = memory.rows(rows, length, MODELS.double())
        assert (matrix.shape, matrix.dtype) == ((rows, length), torch.float64)
        assert matrix.untyped_storage().nbytes() <= 2 * matrix.nbytes
        matrix.fill_(1.0)


def test_memory_of_another_device_is_left_to_pytorch():
    assert ReusedMemory().rows(2, 3, MODELS.to("meta")).device.type == "meta"


def test_rounds_share_the_memory_of_their_buffers():
    memory = ReusedMemory()
    places: set[int] = set()
    for number in (1, 2, 3):
        buffer = UpdateBuffer(2, 3, MODELS, memory=memory)
        buffer.put(10, answer(float(number)))
        updates = buffer.checked(PARAMETERS, number)
        assert updates.required_deltas.tolist() == [[float(number)] * 3]
        places.add(updates.required_deltas.data_ptr())
        del buffer, updates
    assert len(places) == 1
