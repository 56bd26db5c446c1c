"""A partition: a function of a pool, a number of clients and a seed; what it takes by name are keys of ``[data]``.

It returns indices into the pool for each client, all of them in ``pool.train``, and none twice.
"""

import numpy as np

from fedclade import Pool


def by_distance(pool: Pool, clients: int, seed: int, *, shuffled: float = 0.0) -> list[np.ndarray]:
    """Sort examples by their distance from the origin, some of them shuffled, and cut them into equal parts."""
    draw = np.random.default_rng(seed)
    distance = pool.inputs(pool.train).flatten(1).norm(dim=1).numpy()
    some = draw.random(len(distance)) < shuffled
    distance[some] = draw.permutation(distance[some])
    return np.array_split(pool.train[np.argsort(distance)], clients)
