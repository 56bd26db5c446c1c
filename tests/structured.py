"""Federations and models of examples with several tensors, for tests of all packages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedclade import Federation, federation

WORDS, LENGTH, NUMBERS, LABELS = 30, 5, 3, 2


def examples(client: int, n: int = 24) -> tuple[dict[str, Tensor], Tensor]:
    """Return a client's tokens, their mask and numbers, and labels that depend on all of them."""
    draw = torch.Generator().manual_seed(client)
    ids = torch.randint(WORDS, (n, LENGTH), generator=draw)
    mask = torch.rand(n, LENGTH, generator=draw) > 0.3
    numbers = torch.randn(n, NUMBERS, generator=draw)
    labels = ((ids * mask).sum(1) / WORDS + numbers[:, 0] + client % 2 > 1.5).long()
    return {"ids": ids, "mask": mask, "numbers": numbers}, labels


def named(clients: int = 4, **options: Any) -> Federation:
    """Return a federation whose inputs are dicts."""
    return federation({f"c{k}": examples(k) for k in range(clients)}, labels=LABELS, **options)


def by_place(clients: int = 4) -> Federation:
    """Return the same federation with tuples as inputs."""
    data = {f"c{k}": examples(k) for k in range(clients)}
    return federation({k: (tuple(x.values()), y) for k, (x, y) in data.items()}, labels=LABELS)


class Reader(nn.Module):
    """Model of three inputs: a masked mean of embedded tokens, next to numbers."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 4)
        self.output = nn.Linear(4 + NUMBERS, LABELS)

    def forward(self, ids: Tensor, mask: Tensor, numbers: Tensor) -> Any:
        assert ids.dtype == torch.int64
        assert mask.dtype == torch.bool
        weights = mask.unsqueeze(-1).to(numbers)
        words = (self.embedding(ids) * weights).sum(1) / weights.sum(1).clamp(min=1)
        return self.output(torch.cat([words, numbers], 1))


class OfDict(Reader):
    """The same model, whose forward method takes one dict."""

    def forward(self, inputs: dict[str, Tensor]) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(**inputs)
