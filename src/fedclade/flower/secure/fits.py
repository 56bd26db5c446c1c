"""Which runs secure aggregation fits: those whose algorithm needs sums of updates, and no single one."""

from __future__ import annotations

from fedclade.algorithms import Algorithm
from fedclade.channel import Nothing, Sketch
from fedclade.core import ConfigError, Layout
from fedclade.flower.limits import UpdateLimits
from fedclade.flower.secure.setting import SecureAggregation
from fedclade.flower.secure.terms import CLEAR_SHARE, SecureRules
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


def secure_for(rules: SecureRules, sketch: Sketch | None, limits: UpdateLimits, layout: Layout) -> SecureAggregation:
    """Return the server's side for a run; a ConfigError if what is compared tells too much of an update."""
    compared = sketch or Nothing()
    if CLEAR_SHARE * compared.dim > layout.n_parameters:
        raise ConfigError(
            f"network.secure_aggregation = true: signatures of {compared.dim} numbers are sent as they are, and tell "
            f"too much of updates of {layout.n_parameters} parameters; set signature.dim to at most "
            f"{layout.n_parameters // CLEAR_SHARE}"
        )
    return SecureAggregation(rules, compared, limits)
