"""A partition: a function of a pool, a number of clients and a seed.

Its keyword parameters are keys of ``[data]``. It returns an array for each client with indices of
examples in the pool. Each index is in ``pool.train``, and no index occurs twice.
"""

import numpy as np

from fedclade import Pool


def by_distance(pool: Pool, clients: int, seed: int, *, shuffled: float = 0.0) -> list[np.ndarray]:
    """Sort examples by distance from the origin, and give each client one of the equal parts.

    ``shuffled`` is the expected share of examples that are at random places instead.
    """
    draw = np.random.default_rng(seed)
    distance = pool.inputs(pool.train).flatten(1).norm(dim=1).numpy()
    some = draw.random(len(distance)) < shuffled
    distance[some] = draw.permutation(distance[some])
    return np.array_split(pool.train[np.argsort(distance)], clients)
