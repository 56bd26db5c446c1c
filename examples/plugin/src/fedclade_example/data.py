"""A data source: a function whose parameters are keys of ``[data]``; ``seed`` and ``data_dir`` are the run's.

It returns a pool of examples, which a partition shares out, or clients with data of their own: a ``Federation``, or a
mapping of names to ``(train, test)``.
"""

import numpy as np

from fedclade import Pool


def blobs(*, labels: int = 4, examples: int = 2000, seed: int = 0) -> Pool:
    """Points of a plane around one centre for each label."""
    draw = np.random.default_rng(seed)
    y = draw.integers(labels, size=examples)
    angles = 2 * np.pi * y / labels
    x = 3 * np.stack([np.cos(angles), np.sin(angles)], axis=1) + draw.normal(size=(examples, 2))
    numbers = np.arange(examples)
    return Pool.of_examples(
        "blobs", x, y, numbers[: examples * 4 // 5], numbers[examples * 4 // 5 :], outputs=labels
    )
