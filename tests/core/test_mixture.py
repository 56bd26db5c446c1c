"""Mixtures: how updates of several models travel as one, and what tables of labels come to."""

from __future__ import annotations

import pytest
import torch

from fedclade.core import Mixture, label_rates, packed, unpacked


@pytest.mark.parametrize("labels", [0, 4])
def test_updates_and_tables_come_back_as_they_were_packed(labels):
    deltas, tables = torch.randn(5, 3, 7), torch.randn(5, 3, labels)
    together = packed(deltas, 6, tables if labels else None)
    assert together.shape == (5, 3 * (7 + labels))
    # parameters first: those are compared
    assert torch.equal(together[:, :18], deltas[:, :, :6].flatten(1))
    back, theirs = unpacked(together, 3, 7, 6)
    assert torch.equal(back, deltas)
    assert torch.equal(theirs, tables)


def test_tables_sum_responsibilities_by_label_and_rates_are_shares():
    q = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]], dtype=torch.float64)
    table = Mixture(by_label=True).tables(q, torch.tensor([2, 2, 0]), 4)
    assert (3 * table).tolist() == [[0.25, 0.0, 1.5, 0.0], [0.75, 0.0, 0.5, 0.0]]
    rates = label_rates(table, 3)
    torch.testing.assert_close(rates.sum(1), torch.ones(2, dtype=torch.float64))
    assert float(rates[0, 2] / rates[0, 0]) == pytest.approx(6)
    assert float(rates[0, 1]) == pytest.approx(1e-8 / 1.75)  # no label is rarer
