"""Forward passes of an evaluation: which inputs go through which model together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fedclade.core import Indices
from fedclade.training.split_inputs import SplitInputs
from fedclade.training.threads import WORTH_SHARING

LARGEST_PASS = 1024
"""Examples in a forward pass, at most."""

TOLERANCE = 5e-3
"""How far outputs may depend on the size of a pass, relative to the largest: convolutions on a GPU keep 10 bits."""


@dataclass(frozen=True)
class Pass:
    """A forward pass: the model of a row, on the inputs at some places."""

    row: int
    places: Indices


@dataclass(frozen=True, eq=False)
class Block:
    """Passes behind each other, at least one, and the examples that are scored by them."""

    passes: list[Pass]
    examples: Indices
    at: Indices  #: of each example, which of the inputs of these passes is its own


class Examples:
    """The examples of some queries, and the distinct pairs of model and input that they come down to.

    Each of q queries has the row of a model and a set of inputs, and they are sorted by the first, then by the second.
    If ``apart``, a pass holds inputs of one set only. ``query`` and ``place`` are of each example, int64 ``[m]``: the
    query it belongs to, and its input; ``largest_group`` is how many inputs may pass together at most.
    """

    def __init__(self, rows: Indices, sets: Indices, held: SplitInputs, apart: bool) -> None:
        sizes = held.sizes[sets]
        self.query = np.arange(len(sets)).repeat(sizes)
        before = sizes.cumsum() - sizes
        self.place = held.at(np.arange(len(self.query)) + (held.starts[sets] - before)[self.query])
        # Pairs of the same group may pass together.
        other = (np.diff(rows) != 0) | (apart & (np.diff(sets) != 0))
        group = np.concatenate([[0], other.cumsum()])
        pairs = group[self.query] * len(held) + self.place
        self._by_pair = np.argsort(pairs, kind="stable")  # which takes little where they are sorted already
        pairs = pairs[self._by_pair]
        is_new = np.diff(pairs, prepend=-1) > 0
        self._pair_of = is_new.cumsum() - 1
        groups, self._places = np.divmod(pairs[is_new], len(held))
        self._edges = np.flatnonzero(np.diff(groups, prepend=-1, append=groups[-1] + 1)).tolist()
        self._rows = rows[np.flatnonzero(np.diff(group, prepend=-1))].tolist()
        self.largest_group = int(np.diff(self._edges).max())

    def blocks(self, pass_size: int, block_size: int) -> Iterator[Block]:
        """Cut the pairs into passes of at most ``pass_size`` inputs, and put these into blocks of one or several."""
        passes: list[Pass] = []
        start = stop = 0
        for row, (first, last) in zip(self._rows, pairwise(self._edges), strict=True):
            for begin in range(first, last, pass_size):
                end = min(begin + pass_size, last)
                if passes and end - start > block_size:
                    yield self._block(passes, start, stop)
                    passes, start = [], begin
                passes.append(Pass(row, self._places[begin:end]))
                stop = end
        yield self._block(passes, start, stop)

    def _block(self, passes: list[Pass], start: int, stop: int) -> Block:
        there = slice(*np.searchsorted(self._pair_of, (start, stop)))
        return Block(passes, self._by_pair[there], self._pair_of[there] - start)


@dataclass(frozen=True)
class Traits:
    """What a module's forward pass is like."""

    entries: int  #: of its largest tensor, for each example
    operations: float  #: in floating point, for each example
    mixes: bool  #: whether what it gives for an example depends on the others in the pass, or on the passes before

    @classmethod
    @torch.no_grad()
    def of(cls, module: nn.Module, inputs: Tensor) -> Traits:
        """Try a module in evaluation mode on four inputs; fewer are repeated, and would not show that it mixes them."""
        four = inputs[torch.arange(4) % len(inputs)]
        two, others = four.split(2)
        with FlopCounterMode(display=False) as counter:
            with _Sizes() as of_four:
                together = module(four)
            with _Sizes() as of_two:
                first = module(two)
        # What does not grow with the inputs does not count, such as a copy of a parameter.
        growth = max(large - small for large, small in zip(of_four.sizes, of_two.sizes, strict=False)) // 2
        apart = torch.cat([first, module(others)])
        # Outputs of a model that has diverged are NaN or infinite; those in half precision keep fewer digits.
        relative = max(TOLERANCE, 4 * torch.finfo(together.dtype).eps)
        tolerance = relative * float(together.abs().nan_to_num(0.0, 0.0).max())
        mixes = not torch.allclose(together, apart, rtol=0, atol=tolerance, equal_nan=True)
        return cls(max(growth, four[0].numel()), counter.get_total_flops() / (4 + 2), mixes)

    def pass_size(self, entries: int) -> int:
        """Return how many inputs to pass together, so that no tensor has more than so many entries."""
        return max(1, min(LARGEST_PASS, entries // self.entries))

    def threads(self, inputs: int) -> int:
        """Return how many threads a pass of so many inputs is worth."""
        return torch.get_num_threads() if inputs * self.operations >= WORTH_SHARING else 1


class _Sizes(TorchDispatchMode):
    """Notes how many entries the results of all operations have."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else (results,):
            if isinstance(result, Tensor):
                self.sizes.append(result.untyped_storage().nbytes() // result.element_size())
        return results
