"""Tasks, losses, metrics, and the scores of clients and clusters.

It imports :mod:`fedclade.core` alone.
"""

from fedclade.tasks.losses import LOSSES, SHAPES, Loss, count_targets, cross_entropy, mix_outputs
from fedclade.tasks.metrics import (
    OLD_METRIC,
    RIGHT,
    SPREAD,
    Metric,
    cluster_scores,
    gap_closed,
    is_share,
    mean_and_interval,
    mean_score,
    metric,
    perplexity,
    read_metrics,
    spread,
)
from fedclade.tasks.model_mixture import ModelMixture
from fedclade.tasks.task import SUMMARIES, TASKS, FittedTask, Task, build_task

__all__ = [
    "LOSSES",
    "OLD_METRIC",
    "RIGHT",
    "SHAPES",
    "SPREAD",
    "SUMMARIES",
    "TASKS",
    "FittedTask",
    "Loss",
    "Metric",
    "ModelMixture",
    "Task",
    "build_task",
    "cluster_scores",
    "count_targets",
    "cross_entropy",
    "gap_closed",
    "is_share",
    "mean_and_interval",
    "mean_score",
    "metric",
    "mix_outputs",
    "perplexity",
    "read_metrics",
    "spread",
]
