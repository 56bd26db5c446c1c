"""Clients whose data changed, known by their updates of the same splits: rounding is no change, other data is."""

from __future__ import annotations

import pytest
import torch

from fedclade.algorithms.rcfl.changed_data import SKETCHED, SplitSketches


def signatures_of(seed: int, clients: int = 6, splits: int = 3, length: int = 3000) -> torch.Tensor:
    """Return updates of splits that have half of their squared length in common within a client."""
    draw = torch.Generator().manual_seed(seed)
    own = torch.randn(clients, 1, length, generator=draw)
    return own + torch.randn(clients, splits, length, generator=draw)


def sketched(signatures: torch.Tensor, first: int = 0) -> SplitSketches:
    return SplitSketches.of(range(first, first + len(signatures)), signatures)


def test_a_sketch_is_short_and_keeps_distances():
    signatures = signatures_of(0)
    sketches = sketched(signatures).sketches
    assert sketches.shape == (6, 3, SKETCHED)
    unit = torch.nn.functional.normalize(signatures, dim=2)
    cosines, kept = unit @ unit.mT, sketches @ sketches.mT
    torch.testing.assert_close(kept, cosines, atol=0.15, rtol=0)
    short = sketched(signatures[:, :, :40]).sketches
    torch.testing.assert_close(short, torch.nn.functional.normalize(signatures[:, :, :40], dim=2))


@pytest.mark.parametrize("noise", [1e-6, 0.1, 0.3])
def test_rounding_and_what_training_makes_of_it_is_no_change(noise):
    signatures = signatures_of(1)
    moved = signatures + noise * torch.randn(signatures.shape, generator=torch.Generator())
    assert sketched(signatures).find_changed(sketched(moved)) == ()


def test_other_examples_of_the_same_distribution_are_a_change_of_that_client_alone():
    before = signatures_of(2)
    own = before.mean(1, keepdim=True)
    now = before.clone()
    now[3] = own[3] + torch.randn(3, 3000, generator=torch.Generator().manual_seed(9))
    assert sketched(before).find_changed(sketched(now)) == (3,)


def test_arrivals_count_and_clients_that_left_do_not():
    signatures = signatures_of(3)
    known = sketched(signatures)
    assert known.find_changed(sketched(signatures[:4])) == ()
    assert known.select([0, 1, 5]).find_changed(known) == (2, 3, 4)
    # other numbers of splits
    assert known.find_changed(sketched(signatures[:, :2])) == (0, 1, 2, 3, 4, 5)


def test_splits_that_all_make_the_same_update_change_by_more_than_rounding_only():
    same = torch.ones(2, 3, 50)
    assert sketched(same).find_changed(sketched(same * (1 + 1e-6))) == ()
    assert sketched(same).find_changed(sketched(-same)) == (0, 1)


def test_later_sketches_replace_those_of_the_same_clients():
    first, later = sketched(signatures_of(4)), sketched(signatures_of(5)[:3], first=4)
    both = first.update(later)
    assert both.ids == (0, 1, 2, 3, 4, 5, 6)
    assert torch.equal(both.sketches[:4], first.sketches[:4])
    assert torch.equal(both.sketches[4:], later.sketches)
    assert both.select([5]).ids == (5,)
