"""Steps on a GPU, recorded once as a CUDA graph and then launched as one.

A step of a small model is dozens of kernels that take the GPU less time than it takes the CPU to
launch them. It is tried, and measured, before it is used; ``benchmarks/gpu.sh`` measures what it
gains, which has not been done yet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedclade.training.stacking.batches import Plan, Step
from fedclade.training.stacking.stacked_module import StackedModule

OFTEN = 2
"""How many steps of a kind a round has to have, so that they are worth a recording."""

MOST_KINDS = 16
"""How many kinds of a round are recorded: those that it has most of."""

MOST_RECORDINGS = 4 * MOST_KINDS
"""How many recordings are kept: those that were used last."""

MOST_MET = 4 * MOST_RECORDINGS
"""How many steps are remembered that have been met and not recorded."""

Run = Callable[[Step, Tensor, Tensor], Tensor]
"""Trains on a step's inputs and targets; returns what :class:`~fedclade.training.stacking.loss.Losses` is to note."""

Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Runs something without effect; returns what has the effect, as often as it is called, and where its result is."""


class _Recording(NamedTuple):
    targets: Tensor
    launch: Callable[[], None]
    losses: Tensor


class Replay:
    """Recordings of steps, kept from round to round.

    A recording holds addresses and numbers, not tensors. So it stands for a step only where
    parameters, gradients, momentum, anchors and inputs lie where they lay, and clients, width and
    optimizer are the same. It is made when a round has a step that an earlier one had, too: where,
    say, the step size falls in every round, none is.
    """

    def __init__(self, record: Record | None = None) -> None:
        self._record = CudaGraphs() if record is None else record
        self._recordings: OrderedDict[Hashable, _Recording] = OrderedDict()
        self._met: OrderedDict[Hashable, int] = OrderedDict()  # in which round for the first time
        self._rounds = 0

    def of_round(self, run: Run, stacked: StackedModule, plan: Plan, fixed: Hashable) -> Run:
        """Return what runs the steps of a round, or launches their recordings.

        ``fixed`` is whatever of a step, besides what the plan says, does not change in a round.
        """
        kinds = {kind for kind, count in plan.kinds.most_common(MOST_KINDS) if count >= OFTEN}
        self._rounds += 1
        addresses: tuple[int, ...] = ()

        def run_or_launch(step: Step, x: Tensor, y: Tensor) -> Tensor:
            nonlocal addresses
            if not addresses:  # the first step makes the buffers that are missing
                losses = run(step, x, y)
                addresses = stacked.addresses()
                return losses
            # the weights of a ragged batch come from the CPU
            if step.kind not in kinds or step.own is not None:
                return run(step, x, y)
            key = (addresses, fixed, step.kind, x.data_ptr(), x.shape, x.dtype, y.shape)
            if key not in self._recordings and self._first_met(key) == self._rounds:
                return run(step, x, y)
            return self._launched(key, lambda kept: run(step, x, kept), y)

        return run_or_launch

    def _first_met(self, key: Hashable) -> int:
        """Return in which round a step was met first: this one if it is new."""
        first = self._met.setdefault(key, self._rounds)
        if len(self._met) > MOST_MET:
            self._met.popitem(last=False)
        return first

    def _launched(self, key: Hashable, run: Callable[[Tensor], Tensor], targets: Tensor) -> Tensor:
        if key not in self._recordings:
            kept = targets.clone()
            self._recordings[key] = _Recording(kept, *self._record(lambda: run(kept)))
            if len(self._recordings) > MOST_RECORDINGS:
                self._recordings.popitem(last=False)
        self._recordings.move_to_end(key)
        recording = self._recordings[key]
        recording.targets.copy_(targets)
        recording.launch()
        return recording.losses.clone()  # the next launch writes there again


def can_record(device: torch.device) -> bool:
    """Return whether steps on this device can be recorded, unless something in them resists."""
    return device.type == "cuda"


class CudaGraphs:
    """Records what is launched on the GPU; see :data:`Record`. Raises RuntimeError for what cannot be recorded.

    All recordings share their working memory, as one runs after another.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Record."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            losses = run()
        self._pool = graph.pool()
        return graph.replay, losses
