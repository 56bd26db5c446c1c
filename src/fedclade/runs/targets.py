"""What a run is to reach of a metric."""

from __future__ import annotations

from collections.abc import Mapping

from fedclade.core import ConfigError, require, unknown
from fedclade.runs.settings import RunSettings
from fedclade.tasks import FittedTask


def target_of(settings: RunSettings, task: FittedTask) -> tuple[str, float] | None:
    """Return which metric should reach what; a ConfigError if there is no such metric, or it cannot be reached."""
    if settings.target is None:
        return None
    given = settings.target if isinstance(settings.target, Mapping) else {task.metrics[0].name: settings.target}
    if not given:
        return None
    if len(given) > 1:
        raise ConfigError(f"[target] should name one metric, got {', '.join(given)}")
    ((name, score),) = given.items()
    known = {metric.name: metric for metric in task.metrics}
    if name not in known:
        raise ConfigError(f"{unknown('metric in [target]:', name, known)}; others can be added to task.metrics")
    if known[name].share:
        require((f"target.{name}", score, 0 < score <= 1, "greater than 0 and at most 1"))
    return name, float(score)
