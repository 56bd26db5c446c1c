"""Training steps on a GPU that are recorded once as CUDA graphs, and then launched as a whole.

A step of a small model has dozens of kernels (GPU programs), which the GPU executes faster than the
CPU can launch them one by one. A recording is tried, and its speed measured, before it is used.
On one NVIDIA H200 with 100 clients, recordings make ``mlp`` 2.0 times and ``cnn`` 1.5 times as fast;
``benchmarks/gpu.sh`` repeats the measurement.
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
"""Least number of steps of the same kind in a round for which a recording is worthwhile."""

MOST_KINDS = 16
"""Largest number of kinds of steps that are recorded in a round: the most frequent kinds."""

MOST_RECORDINGS = 4 * MOST_KINDS
"""Largest number of recordings in memory; the least recently used recordings are deleted."""

MOST_MET = 4 * MOST_RECORDINGS
"""Largest number of steps without a recording whose first occurrence is remembered."""

Run = Callable[[Step, Tensor, Tensor], Tensor]
"""Function that trains on the inputs and targets of a step, and returns the losses of the rows."""

Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Function that records a function without executing it.

Its results are a function that executes the recording each time it is called, and the tensor to
which the recording writes its result.
"""


class _Recording(NamedTuple):
    """Recorded step: memory for its targets, a function that launches it, and its losses."""

    targets: Tensor
    launch: Callable[[], None]
    losses: Tensor


class Replay:
    """Recordings of training steps, which are reused in later rounds.

    A recording contains memory addresses and numbers, not tensors. A recording is valid for a step
    only if parameters, gradients, momentum, anchors and inputs are at the same addresses, and
    clients, width of the batches and kind of the optimizer are the same. A step is recorded when it
    occurs again in a later round with the same addresses and properties. Step size, momentum factor
    and μ are read from the device's memory (:class:`~fedclade.training.optimizer.Factors`), so they
    may differ from round to round.

    Parameters
    ----------
    record
        Function that records a step, see :data:`Record`; None to record CUDA graphs.
    """

    def __init__(self, record: Record | None = None) -> None:
        self._record = CudaGraphs() if record is None else record
        self._recordings: OrderedDict[Hashable, _Recording] = OrderedDict()
        self._met: OrderedDict[Hashable, int] = OrderedDict()  # round of the first occurrence
        self._rounds = 0

    def of_round(self, run: Run, stacked: StackedModule, plan: Plan, fixed: Hashable) -> Run:
        """Return a function that runs the steps of a round, or launches recordings of these steps.

        Parameters
        ----------
        run
            Function that runs a step.
        stacked
            The stacked module, with the memory that a step uses.
        plan
            The steps of the round.
        fixed
            All other properties on which a step depends, and which do not change in a round.
        """
        kinds = {kind for kind, count in plan.kinds.most_common(MOST_KINDS) if count >= OFTEN}
        self._rounds += 1
        addresses: tuple[int, ...] = ()

        def run_or_launch(step: Step, x: Tensor, y: Tensor) -> Tensor:
            nonlocal addresses
            if not addresses:  # the first step allocates missing buffers
                losses = run(step, x, y)
                addresses = stacked.addresses()
                return losses
            # The weights of a ragged batch are computed on the CPU, so it cannot be recorded.
            if step.kind not in kinds or step.own is not None:
                return run(step, x, y)
            key = (addresses, fixed, step.kind, x.data_ptr(), x.shape, x.dtype, y.shape)
            if key not in self._recordings and self._first_met(key) == self._rounds:
                return run(step, x, y)
            return self._launch_recording(key, lambda kept: run(step, x, kept), y)

        return run_or_launch

    def _first_met(self, key: Hashable) -> int:
        """Return the round in which a step first occurred; the current round for a new step."""
        first = self._met.setdefault(key, self._rounds)
        if len(self._met) > MOST_MET:
            self._met.popitem(last=False)
        return first

    def _launch_recording(
        self, key: Hashable, run: Callable[[Tensor], Tensor], targets: Tensor
    ) -> Tensor:
        """Launch the recording of a step, which is recorded first if needed; return its losses."""
        if key not in self._recordings:
            kept = targets.clone()
            self._recordings[key] = _Recording(kept, *self._record(lambda: run(kept)))
            if len(self._recordings) > MOST_RECORDINGS:
                self._recordings.popitem(last=False)
        self._recordings.move_to_end(key)
        recording = self._recordings[key]
        recording.targets.copy_(targets)
        recording.launch()
        return recording.losses.clone()  # the next launch overwrites this memory


def can_record(device: torch.device) -> bool:
    """Return whether steps on a device can be recorded as CUDA graphs.

    A single operation may still prevent a recording, which a trial detects.
    """
    return device.type == "cuda"


class CudaGraphs:
    """Function that records the kernels of another function on a GPU; see :data:`Record`.

    All recordings share their working memory, since they are executed one after another.

    Raises
    ------
    RuntimeError
        If an operation cannot be recorded.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Record the kernels that a function launches, as a CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            losses = run()
        self._pool = graph.pool()
        return graph.replay, losses
