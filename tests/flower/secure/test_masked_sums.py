"""Attacks on what is in a sum and beside it: those of a benchmark program, which must stay unsuccessful."""

from __future__ import annotations

from functools import cache

import masked_sums
import numpy as np
import pytest
import torch

from fedclade import load_federation
from fedclade.data import Federation
from fedclade.flower.secure.secrets import Contribution, Numbers, RejectedSumError


@cache
def client() -> Federation:
    return load_federation("digits", clients=2, samples_per_client=20, seed=0).alone(0)


@pytest.mark.parametrize("attack", ["clear", "norm"])
def test_nothing_in_clear_depends_on_the_data_of_a_client(attack: str):
    outcome = getattr(masked_sums, f"try_{attack}")(client())
    assert outcome.attack == attack
    assert not outcome.succeeded, outcome.detail


@pytest.mark.parametrize("attack", ["huge", "clipped", "strong"])
def test_no_vector_of_the_attacks_moves_a_mean_further_than_c(attack: str):
    """The others' updates have half the norm C, as C is twice that of the rounds before."""
    numbers = Numbers(
        clients=12,
        parameters=200,
        buffers=0,
        clip=2.0,
        clip_of_buffers=1.0,
        largest_weight=60,
        key=b"question",
    )
    update = torch.ones(200) / np.sqrt(200)
    honest = numbers.encode(Contribution(update=update, examples=60))
    sent = masked_sums.spoiled(attack, honest, numbers, update)
    total = (11 * honest.astype(np.int64) + sent) % 2**24
    if attack == "huge":
        with pytest.raises(
            RejectedSumError,
            match="8 of the 8 check entries of the sum do not equal its number of clients, 12",
        ):
            numbers.decode(total.astype(np.uint32), 12)
        return
    mean = numbers.decode(total.astype(np.uint32), 12)
    found = float((mean.total / mean.weight) @ update.double())
    assert found == pytest.approx({"clipped": 0.75, "strong": (11 - 10 * 2) / 12}[attack], abs=1e-3)
