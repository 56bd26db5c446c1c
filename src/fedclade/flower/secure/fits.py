"""Which runs secure aggregation fits: those whose algorithm needs sums of updates, and no single one."""

from __future__ import annotations

import math

from fedclade.algorithms import Algorithm
from fedclade.core import ConfigError
from fedclade.runs import RunSettings


def check_sums(settings: RunSettings, algorithm: Algorithm) -> None:
    """Check that a run can do with sums of updates, and with sketches where it compares; a ConfigError otherwise."""
    name, problems = type(algorithm).__name__, list[str]()
    if algorithm.needs_updates:
        problems.append(f"{name} needs the updates of single clients; take another algorithm, or leave it out")
    elif algorithm.compares and settings.signature.kind == "full":
        problems.append(f"{name} compares whole updates, which would be sent; set signature.kind = 'projected'")
    if settings.aggregate.is_robust:
        rule = settings.aggregate.rule
        problems.append(f"aggregate.rule = {rule!r} needs the updates of single clients; leave it out")
    if settings.aggregate.leave_out_opposed is True:
        problems.append("aggregate.leave_out_opposed = true needs the updates of single clients; leave it out")
    if settings.aggregate.clip_above not in ("auto", math.inf):
        problems.append("nobody can shorten an update that is part of a sum; leave aggregate.clip_above out")
    if settings.stream is False:
        problems.append("the server has sums alone, as a run that streams; leave out stream = false")
    if problems:
        raise ConfigError("\n".join(f"network.secure_aggregation = true: {problem}" for problem in problems))
