"""Which runs secure aggregation fits: those whose algorithm needs sums of updates, and no single one."""

from __future__ import annotations

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
    if settings.stream is False:
        problems.append("the server has sums alone, as a run that streams; leave out stream = false")
    if problems:
        raise ConfigError("\n".join(f"network.secure_aggregation = true: {problem}" for problem in problems))
