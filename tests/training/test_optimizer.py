from __future__ import annotations

import pytest
import torch
from torch import nn

from fedclade.training.optimizer import clipping, per_client


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("largest", [0.3, 2.5, 100.0])
def test_each_client_is_clipped_as_torch_clips_it(largest, dtype):
    """Over tensors of any shape, a single number included; the three clients' norms are around 0.2, 2 and 20."""
    draw = torch.Generator().manual_seed(0)
    gradients = [torch.randn(3, *shape, generator=draw, dtype=dtype) for shape in ((2, 3), (4,), ())]
    for gradient in gradients:
        gradient *= per_client(torch.tensor([0.1, 1.0, 10.0], dtype=dtype), gradient)
    scales = clipping(gradients, largest)
    for client in range(3):
        parameters = [nn.Parameter(torch.zeros_like(gradient[client])) for gradient in gradients]
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient[client].clone()
        nn.utils.clip_grad_norm_(parameters, largest)
        for p, gradient in zip(parameters, gradients, strict=True):
            torch.testing.assert_close(gradient[client] * scales[client], p.grad)


def test_what_is_not_finite_stays_with_its_client():
    scales = clipping([torch.tensor([[3.0, 4.0], [torch.nan, 1.0], [torch.inf, 1.0]])], 1.0)
    assert scales[0] == pytest.approx(1 / 5)
    assert scales[1].isnan()
    assert scales[2] == 0
