"""Jobs of clients of different sizes, and modules that are awkward to train together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedclade import LocalTraining
from fedclade.core import rng
from fedclade.core.params import Layout
from fedclade.training.jobs import Job, Workload

FEATURES, LABELS, TOKENS = 6, 4, 9
SIZES = (24, 31, 7, 1, 40)
"""Of clients, against a batch size of 10: two with ragged batches, two with a single one."""

SPECS = {
    "plain": LocalTraining(epochs=2, batch_size=10, lr=0.2),
    "momentum": LocalTraining(epochs=2, batch_size=10, lr=0.1, momentum=0.9, weight_decay=0.05),
    "proximal": LocalTraining(epochs=2, batch_size=10, lr=0.2, mu=0.5),
    "clipped": LocalTraining(epochs=2, batch_size=10, lr=0.2, clip_norm=0.5),
    "everything": LocalTraining(
        epochs=3, batch_size=10, lr=0.1, momentum=0.9, weight_decay=0.05, mu=0.5, clip_norm=0.5
    ),
}


def task_of(
    module: nn.Module,
    inputs: Tensor,
    outputs: int,
    spec: LocalTraining,
    sizes: Sequence[int] = SIZES,
    anchors: Sequence[int] | None = None,
) -> Workload:
    """Return clients of these sizes who share out the inputs ``[sum of the sizes, ...]``, with models in turn of two.

    Calling it again gives the same clients with fresh draws.
    """
    layout = Layout.of(module)
    draw = torch.Generator().manual_seed(5)
    first = layout.flatten(module)
    second = first + 0.02 * torch.rand(len(first), generator=draw, dtype=first.dtype)
    targets = torch.randint(outputs, (sum(sizes),), generator=draw)
    jobs = [
        Job(
            k,
            k % 2,
            x,
            y,
            rng.torch_generator(3, "test", k),
            None if anchors is None else anchors[k],
        )
        for k, (x, y) in enumerate(
            zip(inputs.split(list(sizes)), targets.split(list(sizes)), strict=True)
        )
    ]
    return Workload(module, layout, torch.stack([first, second]), jobs, spec, spec.lr)


def features(sizes: Sequence[int] = SIZES, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(
        sum(sizes), FEATURES, generator=torch.Generator().manual_seed(1), dtype=dtype
    )


def perceptron(*layers: nn.Module) -> nn.Module:
    """Return a perceptron with further layers in the middle."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), *layers, nn.Tanh(), nn.Linear(8, LABELS))


class Mixes(nn.Module):
    """Centres a batch: what one example gives depends on the others."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


class Tied(nn.Module):
    """One matrix used twice around a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.output = nn.Linear(FEATURES, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(x + self.second(torch.relu(self.first(x))))


class Scaled(nn.Module):
    """A layer of the user's own: a parameter of its own, and no engine knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Counts(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x
