"""A data source: a function whose parameters are keys of ``[data]``.

The parameters ``seed`` and ``data_dir``, if the function has them, are the seed and the data folder
of the run. The function returns a pool of examples, which a partition distributes among clients; or
clients with their data: a ``Federation``, or a mapping of names to ``(train, test)``.
"""

import numpy as np

from fedclade import Pool


def blobs(*, labels: int = 4, examples: int = 2000, seed: int = 0) -> Pool:
    """Return points of a plane, which are normally distributed around a centre for each label."""
    draw = np.random.default_rng(seed)
    y = draw.integers(labels, size=examples)
    angles = 2 * np.pi * y / labels
    x = 3 * np.stack([np.cos(angles), np.sin(angles)], axis=1) + draw.normal(size=(examples, 2))
    numbers = np.arange(examples)
    return Pool.of_examples(
        "blobs", x, y, numbers[: examples * 4 // 5], numbers[examples * 4 // 5 :], outputs=labels
    )
