"""Synthetic(α, β): clients whose models and inputs differ by two knobs (Li et al. 2018, arXiv:1812.06127, 5.1)."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade.core import Indices, require, rng
from fedclade.data.pool import Pool

FEATURES = 60
LABELS = 10


def load_synthetic(
    _data_dir: Path | None,
    seed: int,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    clients: int = 100,
    max_samples: int | None = None,
) -> Pool:
    """Return Synthetic(α, β), without a test split; the natural owners are the clients it was made for.

    Client ``k`` has ``50 + ⌊LogNormal(4, 2)⌋`` examples ``y = argmax(softmax(W_k x + b_k))`` with

    - ``W_k [10, 60], b_k [10] ~ N(u_k, 1)``, ``u_k ~ N(0, α)``, meant to say how far the clients' models differ;
    - ``x ~ N(v_k, Σ)``, ``Σ`` diagonal with ``Σ_jj = j^-1.2``, ``v_k [60] ~ N(B_k, 1)``, ``B_k ~ N(0, β)``: β says
      how far their inputs differ.

    As the generator is defined, α changes no label: ``u_k`` adds the same number to all ten scores of an example. The
    clients' models differ all the same, since each draws its own ``W_k`` and ``b_k``.

    α and β are variances here, read as in the paper's ``N(v_k, Σ)``. The authors' script takes them as standard
    deviations: the same for Synthetic(0, 0) and Synthetic(1, 1); for their Synthetic(0.5, 0.5) give 0.25 twice.

    Parameters
    ----------
    seed
        Of all draws; client ``k`` is the same whatever the number of clients.
    alpha, beta
        Variances, at least 0.
    clients
        How many natural owners to make.
    max_samples
        Cut off the log-normal's long tail, which reaches into the hundreds of thousands; None, as in the generator,
        does not.
    """
    require(
        ("alpha", alpha, 0 <= alpha < math.inf, "at least 0"),
        ("beta", beta, 0 <= beta < math.inf, "at least 0"),
        ("clients", clients, clients >= 1, "at least 1"),
        ("max_samples", max_samples, max_samples is None or max_samples >= 2, "at least 2"),
    )
    draws = [_draw_client(rng.generator(seed, "synthetic", k), alpha, beta, max_samples) for k in range(clients)]
    y = np.concatenate([labels for _, labels in draws])
    width = len(str(clients - 1))
    return Pool(
        name="synthetic",
        x=torch.from_numpy(np.concatenate([x for x, _ in draws])),
        y=torch.from_numpy(y),
        groups=y,
        train=np.arange(len(y)),
        test=np.arange(0),
        outputs=LABELS,
        natural=np.repeat([f"client-{k:0{width}d}" for k in range(clients)], [len(labels) for _, labels in draws]),
    )


def _draw_client(
    draw: np.random.Generator, alpha: float, beta: float, max_samples: int | None
) -> tuple[NDArray[np.float32], Indices]:
    samples = 50 + int(draw.lognormal(4, 2))
    samples = samples if max_samples is None else min(samples, max_samples)
    u, B = draw.normal(0, math.sqrt(alpha)), draw.normal(0, math.sqrt(beta))
    W, b = draw.normal(u, 1, (LABELS, FEATURES)), draw.normal(u, 1, LABELS)
    v = draw.normal(B, 1, FEATURES)
    deviations = np.arange(1, FEATURES + 1) ** (-1.2 / 2)
    x = draw.normal(v, deviations, (samples, FEATURES))
    return x.astype(np.float32), np.argmax(x @ W.T + b, axis=1)  # the softmax keeps the order
