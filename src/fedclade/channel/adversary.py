"""Which clients of a simulation lie, and how: the settings of adversaries.

Sources: Blades' ``adversaries/`` and ByzFL's ``attacks.py``, whose defaults these are but where
:data:`KINDS` says otherwise; formulas are in ``attacks.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import scipy
import torch
from torch import Tensor

from fedclade.core import ConfigError, checked, require, row_norms, unknown

# What adversaries send in place of their updates, where that is made of the updates of others.
#
# ALIE (Baruch, Baruch, Goldberg 2019), IPM (Xie, Koyejo, Gupta 2019), min-max and min-sum
# (Shejwalkar and Houmansadr 2021), as in Blades' ``adversaries/`` and ByzFL's ``attacks.py``.
# Updates are rows of ``[h, D]``, and weigh alike. Where Blades bisects γ of min-max in [0, 5], and
# may end on the side where the constraint does not hold, the largest γ is computed: it solves a
# quadratic equation for each update.


def alie_z(n: int, f: int) -> float:
    """Return z = Φ⁻¹((n − f − s) / (n − f)) with s = ⌊n/2 + 1⌋ − f, of n clients of which f are adversaries.

    s is how many honest clients must prefer the lie to the mean. Where adversaries have the
    majority by themselves one is taken, since z would have no bound; with fewer than two honest
    clients nothing deviates, and z is 0.
    """
    if n - f < 2:
        return 0.0
    s = max(1, n // 2 + 1 - f)
    return float(scipy.special.ndtri((n - f - s) / (n - f)))


def deviation(updates: Tensor) -> Tensor:
    """Return the standard deviation σ of each entry, ``[D]``, with ddof 1 as in Blades; of one update zeros."""
    return updates.std(0) if len(updates) > 1 else torch.zeros_like(updates[0])


def alie(updates: Tensor, z: float) -> Tensor:
    """Return μ + zσ, ``[D]``."""
    return updates.mean(0) + z * deviation(updates)


def ipm(updates: Tensor, epsilon: float) -> Tensor:
    """Return −εμ, ``[D]``."""
    return -epsilon * updates.mean(0)


DIRECTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "std": lambda updates: -deviation(updates),
    "sign": lambda updates: -updates.mean(0).sign(),
    "unit": lambda updates: (
        -torch.nn.functional.normalize(updates.mean(0), dim=0, eps=0.0).nan_to_num()
    ),
}
"""The ways in which min-max and min-sum leave the mean: −σ, −sign(μ) and −μ/‖μ‖."""


def min_max(updates: Tensor, direction: str) -> Tensor:
    """Return μ + γd with the largest γ whose distance from every update is at most that of the two furthest."""
    mean = updates.mean(0)
    d = DIRECTIONS[direction](updates)
    a = mean - updates
    along, squared = _along(a, d)
    most = max(float(row_norms(updates, row).max()) for row in updates)
    if squared == 0:
        return mean
    # ‖aᵢ + γd‖² = T² for the largest γ; the mean lies within T of every update, so the root is
    # real.
    inside = (along**2 + squared * (most**2 - row_norms(a) ** 2)).clamp(min=0)
    return mean + float(((inside.sqrt() - along) / squared).min()) * d


def min_sum(updates: Tensor, direction: str) -> Tensor:
    """Return μ + γd with the largest γ whose summed squared distance from all updates is at most that of any of them.

    Since Σ(μ − gᵢ) = 0, Σ‖μ + γd − gᵢ‖² = Σ‖μ − gᵢ‖² + hγ²‖d‖².
    """
    mean = updates.mean(0)
    d = DIRECTIONS[direction](updates)
    squared = float(row_norms(d[None])[0] ** 2)
    most = max(float((row_norms(updates, row) ** 2).sum()) for row in updates)
    room = max(0.0, most - float((row_norms(updates, mean) ** 2).sum()))
    return mean if squared == 0 else mean + (room / (len(updates) * squared)) ** 0.5 * d


def _along(a: Tensor, d: Tensor) -> tuple[Tensor, float]:
    """Return aᵢ·d of each row, ``[h]``, and ‖d‖²."""
    exact = d.double()
    return torch.stack([row.double() @ exact for row in a]).cpu(), float(exact @ exact)


KINDS: Mapping[str, Mapping[str, Any]] = {
    "label_flip": {},
    "sign_flip": {},
    "scaled": {"factor": 10.0},
    "gaussian": {"mean": 0.1, "std": 0.1},
    "alie": {"z": None, "knows": "honest"},
    "ipm": {"epsilon": 2.0, "knows": "honest"},
    "minmax": {"direction": "std", "knows": "honest"},
    "minsum": {"direction": "std", "knows": "honest"},
    "backdoor": {"target": 0, "patch": 3, "poisoned": 0.3, "factor": None},
    "false_size": {},
    "copy": {"std": 0.0},
    "sybil": {"factor": 1.0},
}
"""The kinds of adversaries, with the options of each and their defaults."""

LIES: Mapping[str, str] = {
    "losses": "reports the loss of the model that suits its training data least for the one that suits them best",
    "scores": "reports its scores on validation data in the same way",
    "subspaces": "sends random subspaces",
    "descriptors": "sends a descriptor of huge numbers",
    "shifts": "reports in every round that its labels have shifted",
    "statistics": "reports that all its examples have the label that it has least of, and inputs that are far off",
    "signatures": "sends honest signatures of the parts of its data beside a false update",
}
"""The false statements of adversaries besides their updates, and what each of them does."""

POISONING = ("label_flip", "backdoor")
"""Kinds that train on data that they have changed."""

CHANGING = tuple(kind for kind in KINDS if kind not in (*POISONING, "false_size"))
"""Kinds that send another update than the one that they have trained."""

KNOWING = ("alie", "ipm", "minmax", "minsum", "copy")
"""Kinds that see the updates of others."""

FALSE_SIZE = 10**9

LARGEST_SIZE = 2**53


@checked()
@dataclass(frozen=True, kw_only=True)
class Adversary:
    """Which clients are adversaries, and what they do; without a share there are none.

    An option that a kind does not take is an error; left out, it is the kind's own.

    Parameters
    ----------
    kind
        ``label_flip``, ``sign_flip``, ``scaled``, ``gaussian``, ``alie``, ``ipm``, ``minmax``,
        ``minsum``, ``backdoor``, ``false_size``, ``copy`` or ``sybil``. May be left out where there
        are ``lies``: updates are honest then.
    lies
        False statements besides updates, any of :data:`LIES`: ``losses``, ``scores``,
        ``subspaces``, ``descriptors``, ``shifts``, ``statistics`` and ``signatures``. A method that
        does not request a statement is not affected.
    share
        Of all clients, how many are adversaries: drawn by the seed, and at least one unless it is
        0.
    cluster
        They are drawn from the members of this true cluster alone, and ``share`` is of these.
    from_round
        Until this round they behave; sybils are not there before.
    sleeper
        Besides, an adversary behaves as long as its cluster has all clients: until the model that
        it is sent is no longer everyone's.
    evasive
        Besides, an adversary answers truthfully where updates of parts of its data are compared, as
        in a check of ``rcfl``, and lies in all that only goes into models. Other methods compare
        every update, or none.
    size
        How many training examples it claims to have; the truth, if left out, and of ``false_size``
        10⁹.
    factor
        What an update is multiplied by: 10 of ``scaled``. Of ``backdoor`` γ, by default the number
        of clients over that of adversaries, so that the mean becomes the adversary's model. Of
        ``sybil`` the length, in those of its honest update: 1.
    mean, std
        Of each parameter of what ``gaussian`` sends, 0.1 and 0.1. ``copy`` puts noise of ``std`` on
        its copy: 0.
    z
        Of ``alie``; by default the largest with which enough honest clients lie further from the
        mean.
    epsilon
        ε of ``ipm``: 2.
    direction
        In which ``minmax`` and ``minsum`` leave the mean: ``std``, ``sign`` or ``unit``.
    knows
        Whose updates ``alie``, ``ipm``, ``minmax`` and ``minsum`` start from: those of the
        ``honest`` clients that were sent the same model, or those that the adversaries among them
        would send, their ``own``.
    target
        The label that a ``backdoor`` leads to: 0.
    patch
        Its trigger is a bright square of so many pixels in the lower right corner: 3.
    poisoned
        The share of a backdoor's training examples that have the trigger and the target: 0.3.

    Raises
    ------
    ConfigError
        If the kind is unknown, an option is not one of the kind's, or a value is out of range; one
        line for each.
    """

    kind: str = ""
    lies: tuple[str, ...] | str = ()
    share: float = 0.0
    cluster: int | None = None
    from_round: int = 1
    sleeper: bool = False
    evasive: bool = False
    size: int | None = None
    factor: float | None = None
    mean: float | None = None
    std: float | None = None
    z: float | None = None
    epsilon: float | None = None
    direction: str | None = None
    knows: str | None = None
    target: int | None = None
    patch: int | None = None
    poisoned: float | None = None

    def __post_init__(self) -> None:
        lies = (self.lies,) if isinstance(self.lies, str) else tuple(self.lies)
        object.__setattr__(self, "lies", lies)
        needs_kind = bool(self.share) and not self.lies
        if (self.kind or needs_kind) and self.kind not in KINDS:
            raise ConfigError(unknown("adversary.kind:", self.kind, KINDS))
        for lie in self.lies:
            if lie not in LIES:
                raise ConfigError(unknown("adversary.lies:", lie, LIES))
        takes = KINDS.get(self.kind, {})
        given = {name: getattr(self, name) for name in OPTIONS if getattr(self, name) is not None}
        takes_what = (
            f"left out of kind {self.kind!r}, which takes {', '.join(takes) or 'no options'}"
        )
        size = self.size
        false_update = "signatures" not in self.lies or self.kind in CHANGING
        beside_rule = f"one of {', '.join(CHANGING)} with lies = 'signatures', which stand beside a false update"
        require(
            ("adversary.kind", self.kind, false_update, beside_rule),
            ("adversary.share", self.share, 0 <= self.share <= 1, "in [0, 1]"),
            ("adversary.from_round", self.from_round, self.from_round >= 1, "at least 1"),
            ("adversary.size", size, size is None or 1 <= size <= LARGEST_SIZE, "from 1 to 2**53"),
            *(
                (f"adversary.{name}", value, name in takes, takes_what)
                for name, value in given.items()
            ),
            *((f"adversary.{name}", value, *_RULES[name](value)) for name, value in given.items()),
        )

    def __bool__(self) -> bool:
        """Whether there are any."""
        return self.share > 0

    def option(self, name: str) -> Any:
        """Return an option of the kind, or its default."""
        given = getattr(self, name)
        return KINDS[self.kind][name] if given is None else given

    @property
    def described(self) -> dict[str, Any]:
        """The settings as a run's config notes them: without ``lies`` where there are none, as in earlier versions."""
        settings = asdict(self)
        if not self.lies:
            del settings["lies"]
        return settings

    def states_falsely(self, lie: str) -> bool:
        """Return whether a false statement of :data:`LIES` is one of theirs."""
        return lie in self.lies

    @property
    def poisons(self) -> bool:
        """Whether they train on data that they have changed."""
        return self.kind in POISONING

    @property
    def knowing(self) -> bool:
        """Whether they see the updates of others."""
        return self.kind in KNOWING

    @property
    def claims(self) -> int | None:
        """How many training examples they claim to have, if not the truth."""
        return FALSE_SIZE if self.size is None and self.kind == "false_size" else self.size

    def check_stream(self, stream: object, *, central: bool = False) -> None:
        """Check that they see all updates of a round together: a ConfigError if they need to, and the run streams.

        Or if privacy is ``central``, where nobody sees single updates.
        """
        rule = f"false or 'auto' with adversaries of kind {self.kind!r}, which see the updates of others"
        require(("stream", stream, not (self and self.knowing and stream is True), rule))
        if central and self and self.knowing:
            raise ConfigError(
                f'privacy.model = "central": adversaries of kind {self.kind!r} see the updates of others, and nobody '
                "does; take another adversary.kind"
            )


def _finite(value: float) -> tuple[bool, str]:
    return math.isfinite(value), "finite"


def _not_negative(value: float) -> tuple[bool, str]:
    return 0 <= value < math.inf, "at least 0 and finite"


_RULES: Mapping[str, Any] = {
    **{
        "factor": _finite,
        "mean": _finite,
        "std": _not_negative,
        "z": _finite,
        "epsilon": _not_negative,
    },
    "direction": lambda value: (value in ("std", "sign", "unit"), "'std', 'sign' or 'unit'"),
    "knows": lambda value: (value in ("honest", "own"), "'honest' or 'own'"),
    "target": lambda value: (value >= 0, "at least 0"),
    "patch": lambda value: (value >= 1, "at least 1"),
    "poisoned": lambda value: (0 < value <= 1, "greater than 0 and at most 1"),
}
"""Of each option, whether a value holds, and the rule."""

OPTIONS = tuple(field.name for field in fields(Adversary) if field.name in _RULES)
