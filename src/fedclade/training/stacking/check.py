"""A trial on two clients: the stacked module should give what the module gives to each of them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedclade.core import Layout
from fedclade.training.jobs import Job
from fedclade.training.stacking.stacked_module import CannotStack, StackedModule

ROWS = 3
"""Examples of each client in the trial, at most: few, but not one."""


@torch.no_grad()
def check(stacked: StackedModule, module: nn.Module, layout: Layout, models: Tensor, jobs: Sequence[Job]) -> None:
    """Compare the stacked module with the module itself.

    A forward may do what stacking does not survive: take a mean over the batch, read a layer's weights, put another
    dimension first. That cannot be seen from the layers, but from the outputs.

    Raises
    ------
    CannotStack
        If the stacked module fails where the module does not, or they differ.
    """
    some = [jobs[0].inputs[:ROWS], jobs[-1].inputs[-ROWS:]]
    width = min(map(len, some))
    inputs = [x[:width] for x in some]
    two = _apart(models[jobs[0].row], layout)
    module.eval()
    expected: list[Tensor] = []
    with _without_shortcuts():
        for model, x in zip(two, inputs, strict=True):
            layout.load(model, module)
            expected.append(module(x))
        stacked.module.eval()
        stacked.load(two, [0, 1])
        stacked.bind(0, 2)
        try:
            got = stacked.module(torch.cat(inputs))
        except Exception as error:  # whatever a user's forward raises
            raise CannotStack.of("", module, f"fails when it is folded: {error}") from error
    wanted = torch.cat(expected)
    largest = float(wanted.abs().nan_to_num(0.0, 0.0).max())  # numbers, even of a model that has diverged
    tolerance = 1e3 * torch.finfo(wanted.dtype).eps * largest
    if got.shape != wanted.shape or not torch.allclose(got, wanted, rtol=0, atol=tolerance, equal_nan=True):
        raise CannotStack.of(
            "",
            module,
            "gives something else when it is folded: its forward mixes the examples of a batch, or gives a layer "
            "something else than the batch, such as positions that are not expanded to it",
        )


@contextmanager
def _without_shortcuts() -> Generator[None]:
    """Let transformers compute as they do in training: their shortcut without gradients reads the layers' weights."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _apart(model: Tensor, layout: Layout) -> Tensor:
    """Return two models near this one ``[2, S]``: clients of the same model would hide that they are mixed up."""
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(2, layout.n_parameters, generator=draw, dtype=model.dtype).to(model.device)
    two = model.repeat(2, 1)
    two[:, : layout.n_parameters] += 0.1 * noise
    return two
