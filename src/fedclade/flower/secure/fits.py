"""Which runs secure aggregation fits: those whose algorithm needs sums of updates, and no single one."""

from __future__ import annotations

import math

from fedclade.algorithms import Algorithm
from fedclade.core import ConfigError
from fedclade.runs import RunSettings


def check_sums(settings: RunSettings, algorithm: Algorithm, parts: int = 1) -> None:
    """Check that a run can do with sums of updates, and with sketches where it compares; a ConfigError otherwise.

    ``parts`` is the number of sums for each cluster, if these are enough for robust rules.
    """
    name, problems = type(algorithm).__name__, list[str]()
    if algorithm.needs_updates:
        problems.append(f"{name} needs the updates of single clients; take another algorithm, or leave it out")
    elif algorithm.compares and settings.signature.kind == "full":
        problems.append(f"{name} compares whole updates, which would be sent; set signature.kind = 'projected'")
    if settings.aggregate.is_robust and parts == 1:
        rule = settings.aggregate.rule
        problems.append(
            f"aggregate.rule = {rule!r} needs the updates of single clients, or several sums for each cluster; set "
            "network.secure_parts to at least 3, or leave it out"
        )
    if settings.aggregate.clip_above not in ("auto", math.inf):
        problems.append("nobody can shorten an update that is part of a sum; leave aggregate.clip_above out")
    if settings.stream is False:
        problems.append("the server has sums alone, as a run that streams; leave out stream = false")
    if problems:
        raise ConfigError("\n".join(f"network.secure_aggregation = true: {problem}" for problem in problems))
