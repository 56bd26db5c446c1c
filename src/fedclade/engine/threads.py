"""How many threads a step of local training is worth."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

WORTH_SHARING = 5e7
"""Floating-point operations of a forward pass from which on several threads are faster than one."""


def threads_for(module: nn.Module, batch: Tensor) -> int:
    """Return how many threads to give a step on such a batch: one, unless there is work to share.

    Federated learning takes many tiny steps, and threads that meet after every operation of a few microseconds lose
    more time than they save. The work is counted, not timed, so that the choice, on which rounding depends, is the same
    in every run.
    """
    if torch.get_num_threads() == 1:  # nothing to choose, and the counter takes a second to import what it needs
        return 1
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(batch)
    return torch.get_num_threads() if counter.get_total_flops() >= WORTH_SHARING else 1


@contextmanager
def using_threads(count: int) -> Generator[None]:
    """Let torch use so many threads in the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
