"""A shift: a function of a pool, a number of clusters and a seed.

Its keyword parameters are keys of ``[data]``. It returns a ``View`` for each cluster, which
describes the examples that clients of the cluster see. For example, they see label ``label_map[y]``
in place of the pool's label y, or images that are rotated by 90° ``quarter_turns`` times.
"""

import torch

from fedclade import Pool, View


def label_roll(pool: Pool, clusters: int, seed: int, *, step: int = 1) -> list[View]:
    """Shift the labels of cluster k by ``k * step``, modulo the number of labels."""
    labels = torch.arange(pool.outputs)
    return [View(label_map=(labels + k * step) % pool.outputs) for k in range(clusters)]
