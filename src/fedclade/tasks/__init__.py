"""Tasks, losses and metrics of models, and the scores of clients and clusters.

A task states what a model predicts (its targets), the loss on which it trains, and the metrics by
which it is evaluated. The package imports only :mod:`fedclade.core`.
"""

from typing import TYPE_CHECKING

from fedclade.core import lazy_names

if TYPE_CHECKING:
    from fedclade.tasks.intervals import (
        GROUPS,
        Interval,
        jackknife_interval,
        mean_interval,
        paired_share_interval,
        share_interval,
    )
    from fedclade.tasks.losses import (
        LOSSES,
        SHAPES,
        Loss,
        count_targets,
        cross_entropy,
        mix_outputs,
    )
    from fedclade.tasks.metrics import (
        OLD_METRIC,
        RIGHT,
        SPREAD,
        Metric,
        PairCounts,
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
    from fedclade.tasks.target_scale import SCALED_LOSSES, TargetScale
    from fedclade.tasks.task import SUMMARIES, TASKS, FittedTask, Task, build_task

__all__ = [
    "GROUPS",
    "LOSSES",
    "OLD_METRIC",
    "RIGHT",
    "SCALED_LOSSES",
    "SHAPES",
    "SPREAD",
    "SUMMARIES",
    "TASKS",
    "FittedTask",
    "Interval",
    "Loss",
    "Metric",
    "ModelMixture",
    "PairCounts",
    "TargetScale",
    "Task",
    "build_task",
    "cluster_scores",
    "count_targets",
    "cross_entropy",
    "gap_closed",
    "is_share",
    "jackknife_interval",
    "mean_and_interval",
    "mean_interval",
    "mean_score",
    "metric",
    "mix_outputs",
    "paired_share_interval",
    "perplexity",
    "read_metrics",
    "share_interval",
    "spread",
]

if not TYPE_CHECKING:  # a type checker knows the names from the imports above
    __getattr__ = lazy_names(__name__)
