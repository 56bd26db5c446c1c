"""Memory is kept as long as it fits."""

from __future__ import annotations

import torch

from fedclade.training.stacking.stacked_parameter import BufferPool


def test_the_same_memory_is_given_for_anything_that_fits():
    kept, like = BufferPool(), torch.empty(0)
    first = kept.room(like, 3, 4)
    assert first.shape == (3, 4)
    assert kept.room(like, 2, 2, 3).data_ptr() == first.data_ptr()
    larger = kept.room(like, 13)
    assert larger.shape == (13,)
    assert kept.room(like, 3, 4).data_ptr() == larger.data_ptr()


def test_another_type_gets_memory_of_its_own():
    kept = BufferPool()
    kept.room(torch.empty(0), 4)
    tokens = kept.room(torch.empty(0, dtype=torch.int64), 2)
    assert tokens.dtype == torch.int64
    assert kept.room(torch.empty(0), 4).dtype == torch.float32
