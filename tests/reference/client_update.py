"""CLIENTUPDATE of the FL+HC paper (Briggs, Fan, Andras 2020, Algorithm 1, lines 26 to 34), in NumPy's float64.

The model is multinomial logistic regression, whose gradient is written out. Only the order of the examples is the
library's draw: line 27 splits them into batches once, and every epoch passes through the same batches.
"""

from __future__ import annotations

import numpy as np
import torch

Vector = np.ndarray


def client_update(
    w: Vector,
    x: Vector,
    y: Vector,
    *,
    B: int,
    E: int,
    eta: float,
    labels: int,
    generator: torch.Generator,
) -> Vector:
    order = torch.randperm(len(x), generator=generator).numpy()
    batches = [order[start : start + B] for start in range(0, len(x), B)]  # line 27
    for _ in range(E):  # line 28
        for b in batches:  # line 29
            w = w - eta * gradient(w, x[b], y[b], labels)  # line 30
    return w  # line 33


def gradient(w: Vector, x: Vector, y: Vector, labels: int) -> Vector:
    """Return the gradient of the mean cross-entropy; w has the weights ``[labels, d]``, then the biases."""
    d = x.shape[1]
    weights, biases = w[: labels * d].reshape(labels, d), w[labels * d :]
    logits = x @ weights.T + biases
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    error = exponentials / exponentials.sum(axis=1, keepdims=True) - np.eye(labels)[y]
    return np.concatenate([(error.T @ x).ravel(), error.sum(axis=0)]) / len(x)
