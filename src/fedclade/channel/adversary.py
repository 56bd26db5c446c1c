"""Settings of adversaries in a simulation, and the attacks that use other clients' updates.

Sources: Blades' ``adversaries/`` and ByzFL's ``attacks.py``. Their defaults are used unless
:data:`KINDS` differs.
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

# Attacks that are computed from the updates of other clients:
#
# ALIE (Baruch, Baruch, Goldberg 2019), IPM (Xie, Koyejo, Gupta 2019), min-max and min-sum
# (Shejwalkar and Houmansadr 2021), as in Blades' ``adversaries/`` and ByzFL's ``attacks.py``.
# Updates are rows of ``[h, D]`` with equal weights. Blades bisects γ of min-max in [0, 5], and may
# end on the side where the constraint does not hold. Here the largest γ is computed: it solves a
# quadratic equation for each update.


def alie_z(n: int, f: int) -> float:
    """Return z = Φ⁻¹((n − f − s) / (n − f)) of ALIE, with s = ⌊n/2 + 1⌋ − f.

    s is the number of honest clients that must prefer the false update to the mean. If adversaries
    are the majority by themselves, s = 1 is used, since z would have no bound. With fewer than two
    honest clients nothing deviates, and z is 0.

    Parameters
    ----------
    n
        Number of clients.
    f
        Number of adversaries among them.
    """
    if n - f < 2:
        return 0.0
    s = max(1, n // 2 + 1 - f)
    return float(scipy.special.ndtri((n - f - s) / (n - f)))


def deviation(updates: Tensor) -> Tensor:
    """Return the standard deviation σ of each entry, ``[D]``; zeros for a single update.

    The divisor is h − 1 (ddof 1), as in Blades.
    """
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
"""Directions d in which min-max and min-sum leave the mean: −σ, −sign(μ) and −μ/‖μ‖."""


def min_max(updates: Tensor, direction: str) -> Tensor:
    """Return the min-max update μ + γd, ``[D]``.

    γ is the largest value for which no update is further away than the largest distance between two
    updates.
    """
    mean = updates.mean(0)
    d = DIRECTIONS[direction](updates)
    a = mean - updates
    along, squared = _along(a, d)
    most = max(float(row_norms(updates, row).max()) for row in updates)
    if squared == 0:
        return mean
    # ‖aᵢ + γd‖² = T² for the largest γ. The mean lies within T of every update, so the root is
    # real.
    inside = (along**2 + squared * (most**2 - row_norms(a) ** 2)).clamp(min=0)
    return mean + float(((inside.sqrt() - along) / squared).min()) * d


def min_sum(updates: Tensor, direction: str) -> Tensor:
    """Return the min-sum update μ + γd, ``[D]``.

    γ is the largest value for which the sum of squared distances from all updates is at most the
    largest such sum of any update. Since Σ(μ − gᵢ) = 0, Σ‖μ + γd − gᵢ‖² = Σ‖μ − gᵢ‖² + hγ²‖d‖².
    """
    mean = updates.mean(0)
    d = DIRECTIONS[direction](updates)
    squared = float(row_norms(d[None])[0] ** 2)
    most = max(float((row_norms(updates, row) ** 2).sum()) for row in updates)
    room = max(0.0, most - float((row_norms(updates, mean) ** 2).sum()))
    return mean if squared == 0 else mean + (room / (len(updates) * squared)) ** 0.5 * d


def _along(a: Tensor, d: Tensor) -> tuple[Tensor, float]:
    """Return the inner product aᵢ·d of each row, ``[h]``, and ‖d‖²."""
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
"""Kinds of adversaries, with the options of each kind and their defaults."""

LIES: Mapping[str, str] = {
    "losses": "reports the loss of the model that suits its training data least for the one that suits them best",
    "scores": "reports its scores on validation data in the same way",
    "subspaces": "sends random subspaces",
    "descriptors": "sends a descriptor of huge numbers",
    "shifts": "reports in every round that its labels have shifted",
    "statistics": "reports that all its examples have the label that it has least of, and inputs that are far off",
    "signatures": "sends honest signatures of the parts of its data beside a false update",
}
"""False statements of adversaries, in addition to updates, with a description of each."""

POISONING = ("label_flip", "backdoor")
"""Kinds that train on data that they have changed."""

CHANGING = tuple(kind for kind in KINDS if kind not in (*POISONING, "false_size"))
"""Kinds that replace the update that they have trained."""

KNOWING = ("alie", "ipm", "minmax", "minsum", "copy")
"""Kinds that see the updates of other clients."""

FALSE_SIZE = 10**9

LARGEST_SIZE = 2**53


@checked()
@dataclass(frozen=True, kw_only=True)
class Adversary:
    """Settings of adversaries: which clients attack, and how. With a share of 0 there are none.

    An option that is left out has the default of the kind. An option that the kind does not have is
    an error.

    Parameters
    ----------
    kind
        ``label_flip``, ``sign_flip``, ``scaled``, ``gaussian``, ``alie``, ``ipm``, ``minmax``,
        ``minsum``, ``backdoor``, ``false_size``, ``copy`` or ``sybil``. May be left out if ``lies``
        are set: updates are honest then.
    lies
        False statements in addition to updates, any of :data:`LIES`: ``losses``, ``scores``,
        ``subspaces``, ``descriptors``, ``shifts``, ``statistics`` and ``signatures``. A method that
        does not request a statement is not affected.
    share
        Share of all clients that are adversaries. They are drawn by the seed, and at least one is
        drawn unless the share is 0.
    cluster
        True cluster from whose members alone the adversaries are drawn. ``share`` is then the share
        of these members.
    from_round
        First round in which adversaries attack. Before it they are honest, and sybils are absent.
    sleeper
        Whether adversaries also stay honest as long as a single cluster has all clients, so that
        all clients receive the same model.
    evasive
        Whether adversaries reply truthfully if updates of parts of the data are compared, as in a
        check of ``rcfl``, and attack only in queries whose updates just move models. Other methods
        compare every update, or none.
    size
        Number of training examples that an adversary claims to have. If left out: the truth, and
        10⁹ for ``false_size``.
    factor
        Factor of the update: 10 for ``scaled``. For ``backdoor``: γ, by default the number of
        clients divided by the number of adversaries, so that the mean becomes the adversary's
        model. For ``sybil``: length of the update in multiples of the length of the honest one, 1.
    mean, std
        Mean and standard deviation of each parameter that ``gaussian`` sends, 0.1 and 0.1. ``copy``
        adds noise of standard deviation ``std`` to its copy: 0.
    z
        z of ``alie``; by default the largest with which enough honest clients lie further from the
        mean.
    epsilon
        ε of ``ipm``: 2.
    direction
        Direction in which ``minmax`` and ``minsum`` leave the mean: ``std``, ``sign`` or ``unit``.
    knows
        Updates from which ``alie``, ``ipm``, ``minmax`` and ``minsum`` start. ``honest``: the
        updates of the honest clients that received the same model. ``own``: the honest updates of
        the adversaries that received it.
    target
        Label to which a ``backdoor`` leads: 0.
    patch
        Side in pixels of the trigger of a ``backdoor``, a bright square in the lower right corner:
        3.
    poisoned
        Share of a backdoor's training examples that have the trigger and the target: 0.3.

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
        """Whether there are any adversaries."""
        return self.share > 0

    def option(self, name: str) -> Any:
        """Return an option of the kind, or its default."""
        given = getattr(self, name)
        return KINDS[self.kind][name] if given is None else given

    @property
    def described(self) -> dict[str, Any]:
        """Settings as stored in a run's config.

        An empty ``lies`` is left out, as in earlier versions.
        """
        settings = asdict(self)
        if not self.lies:
            del settings["lies"]
        return settings

    def states_falsely(self, lie: str) -> bool:
        """Return whether the adversaries make a false statement of :data:`LIES`."""
        return lie in self.lies

    @property
    def poisons(self) -> bool:
        """Whether the adversaries train on data that they have changed."""
        return self.kind in POISONING

    @property
    def knowing(self) -> bool:
        """Whether the adversaries see the updates of other clients."""
        return self.kind in KNOWING

    @property
    def claims(self) -> int | None:
        """Number of training examples that the adversaries claim, or None for the truth."""
        return FALSE_SIZE if self.size is None and self.kind == "false_size" else self.size

    def check_stream(self, stream: object, *, central: bool = False) -> None:
        """Check that adversaries can see the updates of other clients, if their kind needs to.

        They need all updates of a round together, so the run must not stream. With ``central``
        privacy no party sees single updates.

        Raises
        ------
        ConfigError
            If the adversaries need the updates of others, and the run streams or has central
            privacy.
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
"""Rule of each option: returns whether a value is valid, and the rule in words."""

OPTIONS = tuple(field.name for field in fields(Adversary) if field.name in _RULES)
