"""What a model is for, and how well it does it: the scores of clients and of clusters.

It imports :mod:`fedclade.core` alone.
"""

from fedclade.tasks.scores import (
    SPREAD,
    cluster_scores,
    gap_closed,
    mean_and_interval,
    perplexity,
    share_at_target,
    spread,
)

__all__ = ["SPREAD", "cluster_scores", "gap_closed", "mean_and_interval", "perplexity", "share_at_target", "spread"]
