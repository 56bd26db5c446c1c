"""A shift: a function of a pool, a number of clusters and a seed; what it takes by name are keys of ``[data]``.

It returns a ``View`` for each cluster: where the pool has label y, its clients see ``label_map[y]``; or they see images
turned by so many ``quarter_turns``.
"""

import torch

from fedclade import Pool, View


def label_roll(pool: Pool, clusters: int, seed: int, *, step: int = 1) -> list[View]:
    """Each cluster counts its labels from another one on."""
    labels = torch.arange(pool.outputs)
    return [View(label_map=(labels + k * step) % pool.outputs) for k in range(clusters)]
