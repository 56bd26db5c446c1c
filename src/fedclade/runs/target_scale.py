"""Scale of the targets of a regression, as the data of a run defines it.

The scale is the mean and the standard deviation by which targets are standardized for training.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from fedclade.algorithms import RunFacts
from fedclade.core import ConfigError, LocalTraining
from fedclade.data import Federation, replace_pool
from fedclade.tasks import SCALED_LOSSES, TargetScale, Task

if TYPE_CHECKING:
    from fedclade.algorithms import Algorithm

CLIP_NORM = 1.0
"""Default limit on the norm of the gradient in SGD on standardized targets.

The gradient of a squared error is unbounded, so that training with the default step size could
diverge because of a single outlier.
"""

_log = logging.getLogger(__name__)


def target_scale_of(federation: Federation) -> TargetScale | None:
    """Return the mean and standard deviation of a federation's targets.

    The result is None if targets are not standardized.
    """
    columns = federation.pool.columns
    if columns is None or columns.target_mean is None or columns.target_std is None:
        return None
    return TargetScale(columns.target_mean, columns.target_std)


def with_targets_for(task: Task, federation: Federation) -> Federation:
    """Return a federation without standardization of targets if the task's loss does not permit it.

    If standardization is removed, a warning is logged.
    """
    columns = federation.pool.columns
    if columns is None or columns.target_mean is None or task.can_scale_targets:
        return federation
    _log.warning(
        "targets are not standardized, since the loss is not one of %s", ", ".join(SCALED_LOSSES)
    )
    columns = replace(columns, target_mean=None, target_std=None)
    return replace_pool(federation, replace(federation.pool, columns=columns))


def clip_by_default(local: LocalTraining, algorithm: Algorithm) -> LocalTraining:
    """Return local training with gradients clipped to :data:`CLIP_NORM`, for standardized targets.

    The settings do not change if the user has set a limit on the gradient, the optimizer is not
    SGD, or the algorithm does not support the limit.
    """
    if local.clip_norm is not None or local.optimizer != "sgd":
        return local
    clipped = replace(local, clip_norm=CLIP_NORM)
    try:
        algorithm.check(RunFacts(local=clipped))
    except ConfigError:
        return local
    return clipped
