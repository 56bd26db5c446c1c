"""Gradients of rows of tables, some of which occur several times, are added to the tables exactly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedclade.core import Slot
from fedclade.training.optimizer import Factors, LocalOptimizer
from fedclade.training.stacking.stacked_parameter import StackedParameter
from fedclade.training.threads import using_threads

CLIENTS, ROWS, WIDTH = 3, 7, 4


def tables(
    optimizer: LocalOptimizer, values: Tensor, *, recorded: bool = False
) -> StackedParameter:
    """Return the tables of all clients, ready for a step."""
    parameter = StackedParameter(Slot("table", (ROWS, WIDTH), values.dtype, 0), trained=True)
    parameter.allocate(values.clone())
    factors = None
    if recorded:
        factors = Factors.on_device(optimizer, torch.empty(5, dtype=values.dtype))
    parameter.begin(optimizer, None, factors)
    parameter.bind(0, CLIENTS)
    return parameter


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("optimizer", [{}, {"weight_decay": 0.1}, {"momentum": 0.9}])
def test_rows_change_as_by_a_gradient_of_the_whole_table(
    optimizer: dict[str, float], recorded: bool
):
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(CLIENTS, ROWS, WIDTH, dtype=torch.float64, generator=draw)
    index = torch.randint(CLIENTS * ROWS, (40,), generator=draw)
    gradients = torch.randn(40, WIDTH, dtype=torch.float64, generator=draw)
    rule = LocalOptimizer(0.3, **optimizer)
    parameter = tables(rule, values, recorded=recorded)
    parameter.add_rows(index, gradients)
    parameter.complete()
    parameter.step(None)
    whole = torch.zeros_like(values).view(-1, WIDTH).index_add_(0, index, gradients)
    expected = values - 0.3 * (whole.view_as(values) + rule.weight_decay * values)
    torch.testing.assert_close(parameter.everyone, expected, rtol=1e-12, atol=1e-12)


def test_gradients_of_one_row_are_summed_before_the_table_rounds_them():
    values = torch.full((CLIENTS, ROWS, WIDTH), 1e8)
    parameter = tables(LocalOptimizer(1.0), values)
    parameter.add_rows(torch.full((1000,), 5), torch.ones(1000, WIDTH))
    assert torch.equal(parameter.everyone[0, 5], torch.full((WIDTH,), 1e8 - 1000))
    assert torch.equal(parameter.everyone[1:], values[1:])


def test_the_number_of_threads_changes_nothing():
    draw = torch.Generator().manual_seed(1)
    values = torch.randn(CLIENTS, ROWS, WIDTH, generator=draw)
    index = torch.randint(CLIENTS * ROWS, (20_000,), generator=draw)
    gradients = torch.randn(20_000, WIDTH, generator=draw)
    found: list[Tensor] = []
    for threads in (1, 2):
        with using_threads(threads):
            parameter = tables(LocalOptimizer(0.1), values)
            parameter.add_rows(index, gradients)
        found.append(parameter.everyone)
    assert torch.equal(*found)


def test_anchors_of_the_caller_are_only_read():
    """A recorded training that follows one without recordings copies its anchors elsewhere."""
    rule = LocalOptimizer(0.3, mu=0.1)
    values = torch.zeros(CLIENTS, ROWS, WIDTH)
    parameter = tables(rule, values)
    anchors = torch.ones(CLIENTS, ROWS, WIDTH)
    parameter.begin(rule, anchors)
    parameter.begin(rule, torch.zeros_like(anchors), Factors.on_device(rule, torch.empty(5)))
    assert torch.equal(anchors, torch.ones_like(anchors))
