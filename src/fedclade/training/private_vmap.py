"""DP-SGD of all clients by ``torch.func``: the gradient of every example, mapped over examples and over clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.utils.rnn import pad_sequence

from fedclade.training.jobs import Job, Workload
from fedclade.training.private_steps import Draws, PrivateSteps
from fedclade.training.steps import full, precision

Named = dict[str, Tensor]

GRADIENTS_AT_A_TIME = 2**25
"""Entries of examples' gradients that are held at once: 128 MiB in float32."""

SMALLEST, STEP = 8, 8
"""Samples are padded to a multiple of so many examples, so that few shapes occur."""


class Samples:
    """The samples of k clients in a step, side by side, those of the longest trainings first."""

    def __init__(self, private: PrivateSteps, jobs: Sequence[Job], batch_size: int) -> None:
        self.draws: list[Draws] = [private.draws(job, batch_size) for job in jobs]

    def drawn(self, clients: int) -> tuple[Tensor, Tensor]:
        """Return the examples of the first clients, int64 ``[k, B]``, and which of these count; the rest is padding."""
        samples = [draws.sample() for draws in self.draws[:clients]]
        examples = pad_sequence(samples, batch_first=True)
        width = max(SMALLEST, -(-examples.shape[1] // STEP) * STEP)
        examples = torch.nn.functional.pad(examples, (0, width - examples.shape[1]))
        sizes = torch.tensor([len(sample) for sample in samples])
        return examples, torch.arange(width) < sizes[:, None]


class NoisyGradients:
    """The noisy gradients of each client as functions of named tensors, ``[k, ...]``."""

    def __init__(self, work: Workload, private: PrivateSteps) -> None:
        self._private, self._layout = private, work.layout
        module, task = work.module, work.task

        def loss(trained: Named, others: Named, x: Tensor, y: Tensor) -> Tensor:
            with precision(work.spec, x.device):
                outputs = functional_call(module, {**trained, **others}, (x[None],))
            return task.mean_loss(full(outputs), y[None])

        of_examples = vmap(grad_and_value(loss), in_dims=(None, None, 0, 0))
        self._of_clients = cast("Callable[..., tuple[Named, Tensor]]", vmap(of_examples))

    def __call__(
        self, trained: Named, others: Named, x: Tensor, y: Tensor, counts: Tensor, draws: Sequence[Draws]
    ) -> tuple[Named, Tensor]:
        """Return gradients with noise; and of the examples ``[k, B]`` that count, losses' sum and number ``[k, 2]``."""
        size = max(1, self._layout.n_parameters)
        clients = max(1, GRADIENTS_AT_A_TIME // (size * x.shape[1]))
        examples = max(1, min(x.shape[1], GRADIENTS_AT_A_TIME // size))
        found = {name: torch.empty_like(p) for name, p in trained.items()}
        losses = torch.zeros(len(x), 2, dtype=torch.float64, device=x.device)
        for first in range(0, len(x), clients):
            here = slice(first, first + clients)
            mine, rest = ({n: t[here] for n, t in named.items()} for named in (trained, others))
            for start in range(0, x.shape[1], examples):
                some = slice(start, start + examples)
                sums, lost = self._clipped(mine, rest, x[here, some], y[here, some], counts[here, some])
                for name, tensor in sums.items():
                    found[name][here] = tensor if start == 0 else found[name][here] + tensor
                losses[here] += lost
        return self._with_noise(found, draws), losses

    def _clipped(self, trained: Named, others: Named, x: Tensor, y: Tensor, counts: Tensor) -> tuple[Named, Tensor]:
        gradients, losses = self._of_clients(trained, others, x, y)
        flat = {name: g.flatten(2) if g.dim() > 2 else g.unsqueeze(2) for name, g in gradients.items()}
        squares = torch.stack([g.square().sum(2) for g in flat.values()]).sum(0)
        factors = torch.where(counts, self._private.factors(squares), 0.0)
        left_out = (factors == 0)[..., None]  # whose gradients may be infinite
        sums = {n: torch.bmm(factors.unsqueeze(1), g.masked_fill(left_out, 0)) for n, g in flat.items()}
        named = {name: tensor.view_as(trained[name]) for name, tensor in sums.items()}
        seen = torch.stack([losses.masked_fill(left_out[..., 0], 0), (factors > 0).to(losses)], 2)
        return named, seen.double().sum(1)

    def _with_noise(self, sums: Named, draws: Sequence[Draws]) -> Named:
        noise = torch.empty(len(draws), self._layout.n_parameters)
        for row, mine in zip(noise, draws, strict=True):
            mine.noise(row)
        for slot in self._layout.parameters:
            tensor = sums[slot.name]
            expected = tensor.new_tensor([mine.expected for mine in draws])
            tensor.div_(expected.view(-1, *(1,) * (tensor.dim() - 1)))
            tensor.add_(noise[:, slot.start : slot.stop].to(tensor).view_as(tensor))
        return sums
