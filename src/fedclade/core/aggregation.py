"""How updates of a cluster are aggregated: by which rule, and within which limits; the ``[aggregate]`` section."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from fedclade.core.arguments import checked
from fedclade.core.errors import require

Rule = Literal["mean", "median", "trimmed_mean", "krum", "multi_krum", "bulyan", "geometric_median", "centred_clipping"]
"""How one update is made of those of a cluster; see ``core/robust.py``."""

Limit = float | Literal["auto"]

CLIP_ABOVE = 2.0
"""What ``clip_above`` is where some clients may lie.

A third of a cluster that sends five times its updates makes steps too long to learn by; at twice it does not. Of honest
clients it shortens few (``benchmarks/limits.py``).
"""


@dataclass(frozen=True)
class Limits:
    """What a single client may do, as settled for a run; infinity is no limit."""

    largest_weight: float = math.inf
    largest_norm: float = math.inf
    clip_above: float = math.inf

    @property
    def limits(self) -> bool:
        """Whether there is any limit."""
        return self != Limits()


@checked()
@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """The ``[aggregate]`` section: how the updates of each cluster become one.

    Parameters
    ----------
    rule
        ``mean`` by default; ``median``, ``trimmed_mean``, ``krum``, ``multi_krum``, ``bulyan``, ``geometric_median`` or
        ``centred_clipping`` hold where some clients send anything at all.
    byzantine
        Share of a cluster's clients that may do so, in [0, 0.5). Of n that answer, f are cut, or not relied on: this
        share, rounded down, and at most what the rule allows for n.
    mixing
        Whether each update is replaced by the mean of the n − f nearest to it before the rule (nearest-neighbour
        mixing), since clients differ.
    radius
        τ of ``centred_clipping``, in parameter units; by default the median of the distances from the centre.
    largest_weight
        How many times as many training examples as the median client one counts with at most.
    largest_norm
        An update that is more than so many times as long as the median of its cluster is left out.
    clip_above
        One that is more than so many times as long is shortened to that. Infinity is no limit; ``auto`` is none in a
        simulation whose clients are all honest. Where some may lie it is 2, 20 and 2; over a network the first two are
        those of the ``[network]`` section. Without a largest norm, ``auto`` clips nothing, nor with a robust rule: a
        lie that is shortened stands out less.
    leave_out_opposed
        Whether an update that moves a model against the other clients that chose this model is left out, where clients
        state which cluster they belong to (``ifca``). ``auto``: where some clients may lie, as over a network. The
        papers know of no such rule, and honest clients hardly ever meet it; each case is an event. ``ifca`` with
        ``restarts`` then does not go on with a set of models that is clearly worse than another, if a share
        ``byzantine`` of the lowest losses and of the highest is left out.

    Raises
    ------
    ConfigError
        If a value is out of range; one line for each.
    """

    rule: Rule = "mean"
    byzantine: float = 0.2
    mixing: bool = False
    radius: float | None = None
    largest_weight: Limit = "auto"
    largest_norm: Limit = "auto"
    clip_above: Limit = "auto"
    leave_out_opposed: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        rules = get_args(Rule)
        require(
            ("aggregate.rule", self.rule, self.rule in rules, " or ".join(map(repr, rules))),
            ("aggregate.byzantine", self.byzantine, 0 <= self.byzantine < 0.5, "at least 0 and below 0.5"),
            ("aggregate.mixing", self.mixing, not self.mixing or self.is_robust, "false where the rule is 'mean'"),
            ("aggregate.radius", self.radius, self.radius is None or self.radius > 0, "greater than 0, or left out"),
            (
                "aggregate.leave_out_opposed",
                self.leave_out_opposed,
                self.leave_out_opposed in (True, False, "auto"),
                "true, false or 'auto'",
            ),
            *(
                (f"aggregate.{name}", value, value == "auto" if isinstance(value, str) else value >= 1, rule)
                for name, value, rule in (
                    ("largest_weight", self.largest_weight, "at least 1, or 'auto'"),
                    ("largest_norm", self.largest_norm, "at least 1, or 'auto'"),
                    ("clip_above", self.clip_above, "at least 1, or 'auto'"),
                )
            ),
        )

    @property
    def described(self) -> dict[str, Any]:
        """The settings as a run's config notes them; what earlier versions did not know is left out if not set."""
        settings = asdict(self)
        if self.leave_out_opposed == "auto":
            del settings["leave_out_opposed"]
        return settings

    @property
    def is_robust(self) -> bool:
        """Whether the rule needs the updates of single clients."""
        return self.rule != "mean"

    def limits(self, *, untrusted: bool, largest_weight: float = 2.0, largest_norm: float = 20.0) -> Limits:
        """Return the limits of a run; what is left to ``auto`` acts where clients are ``untrusted``, that may lie."""
        auto = (largest_weight, largest_norm) if untrusted else (math.inf, math.inf)
        weight = auto[0] if isinstance(self.largest_weight, str) else self.largest_weight
        norm = auto[1] if isinstance(self.largest_norm, str) else self.largest_norm
        clip = CLIP_ABOVE if untrusted and not self.is_robust and math.isfinite(norm) else math.inf
        return Limits(weight, norm, clip if isinstance(self.clip_above, str) else self.clip_above)

    @property
    def looks_at_updates(self) -> bool:
        """Whether a rule or a limit that was asked for needs the updates of single clients."""
        return self.is_robust or self.limits(untrusted=False).limits or self.leave_out_opposed is True

    def looks_for_opposed(self, *, untrusted: bool, clients_choose: bool) -> bool:
        """Return whether opposed updates are left out of a run, by whether its clients may lie and choose a cluster."""
        if self.leave_out_opposed == "auto":
            return untrusted and clients_choose
        return self.leave_out_opposed

    def tolerated(self, clients: int, most: int) -> int:
        """Return f of so many clients: the share of them, rounded down, at most what a rule allows, at least 0."""
        return max(0, min(math.floor(round(self.byzantine * clients, 9)), most))
