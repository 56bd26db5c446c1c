"""What a model is for, and how well it does it: tasks, losses, metrics, and the scores of clients and of clusters.

It imports :mod:`fedclade.core` alone.
"""

from fedclade.tasks.losses import LOSSES, SHAPES, Loss, counted, cross_entropy, mixed
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
    noted_metrics,
    perplexity,
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
    "counted",
    "cross_entropy",
    "gap_closed",
    "is_share",
    "mean_and_interval",
    "mean_score",
    "metric",
    "mixed",
    "noted_metrics",
    "perplexity",
    "spread",
]
