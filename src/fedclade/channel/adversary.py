"""Settings of adversaries in a simulation, and the attacks that use other clients' updates.

An adversary is a malicious simulated client. The attacks and their defaults follow Blades'
``adversaries/`` and ByzFL's ``attacks.py``, except where :data:`KINDS` has another default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fedclade.core import (
    ConfigError,
    as_section,
    at_least,
    check_settings,
    checked,
    document_settings,
    in_range,
    one_of,
    require,
    row_norms,
    setting,
    unknown,
)

if TYPE_CHECKING:
    from torch import Tensor

# Attacks that are computed from the updates of other clients:
#
# ALIE (Baruch, Baruch, Goldberg 2019), IPM (Xie, Koyejo, Gupta 2019), min-max and min-sum
# (Shejwalkar and Houmansadr 2021), as in Blades' ``adversaries/`` and ByzFL's ``attacks.py``.
# Updates are rows of ``[h, D]`` with equal weights. Blades bisects γ of min-max in [0, 5], and may
# end on the side where the constraint does not hold. Here the largest γ is computed: it solves a
# quadratic equation for each update.


def alie_z(n: int, f: int) -> float:
    """Return z of the attack ALIE: the false update is the mean plus z standard deviations.

    ALIE ("a little is enough", Baruch et al. 2019) uses z = Φ⁻¹((n − f − s) / (n − f)), where Φ is
    the standard normal distribution function, and s = ⌊n/2 + 1⌋ − f is the number of honest clients
    that must be farther from the mean than the false update. If this s is less than 1, because the
    adversaries are a majority, s = 1 is used, so that z remains finite. With fewer than two honest
    clients, the honest updates do not deviate from their mean, and z is 0.

    Parameters
    ----------
    n
        Number of clients.
    f
        Number of adversaries among them.
    """
    if n - f < 2:
        return 0.0
    from scipy.special import ndtri

    s = max(1, n // 2 + 1 - f)
    return float(ndtri((n - f - s) / (n - f)))


def deviation(updates: Tensor) -> Tensor:
    """Return the standard deviation σ of each entry over h updates ``[h, D]``, as ``[D]``.

    The divisor is h − 1 (ddof 1), as in Blades. For a single update all deviations are 0.
    """
    return updates.std(0) if len(updates) > 1 else torch.zeros_like(updates[0])


def alie(updates: Tensor, z: float) -> Tensor:
    """Return the false update of the attack ALIE: μ + zσ.

    Parameters
    ----------
    updates
        Updates of h clients, ``[h, D]``, with mean μ and standard deviation σ of each entry.
    z
        Number of standard deviations, see :func:`alie_z`.

    Returns
    -------
    torch.Tensor
        The false update, ``[D]``.
    """
    return updates.mean(0) + z * deviation(updates)


def ipm(updates: Tensor, epsilon: float) -> Tensor:
    """Return the false update of the attack IPM (inner product manipulation): −ε times the mean.

    Parameters
    ----------
    updates
        Updates of h clients, ``[h, D]``.
    epsilon
        Factor ε, at least 0.

    Returns
    -------
    torch.Tensor
        The false update, ``[D]``.
    """
    return -epsilon * updates.mean(0)


DIRECTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "std": lambda updates: -deviation(updates),
    "sign": lambda updates: -updates.mean(0).sign(),
    "unit": lambda updates: (
        -torch.nn.functional.normalize(updates.mean(0), dim=0, eps=0.0).nan_to_num()
    ),
}
"""Directions d in which the attacks min-max and min-sum leave the mean μ of updates, by name.

They are −σ (standard deviations of the entries), −sign(μ) and −μ/‖μ‖.
"""


def min_max(updates: Tensor, direction: str) -> Tensor:
    """Return the false update of the attack min-max: μ + γd, as far from the mean μ as possible.

    γ is the largest value for which the false update is not further from any update than the
    largest distance between two updates.

    Parameters
    ----------
    updates
        Updates of h clients, ``[h, D]``.
    direction
        Name of the direction d in :data:`DIRECTIONS`.

    Returns
    -------
    torch.Tensor
        The false update, ``[D]``.
    """
    mean = updates.mean(0)
    d = DIRECTIONS[direction](updates)
    a = mean - updates
    along, squared = _project_on_direction(a, d)
    most = max(float(row_norms(updates, row).max()) for row in updates)
    if squared == 0:
        return mean
    # ‖aᵢ + γd‖² = T² for the largest γ. The mean lies within T of every update, so the root is
    # real.
    inside = (along**2 + squared * (most**2 - row_norms(a) ** 2)).clamp(min=0)
    return mean + float(((inside.sqrt() - along) / squared).min()) * d


def min_sum(updates: Tensor, direction: str) -> Tensor:
    """Return the false update of the attack min-sum: μ + γd, as far from the mean μ as possible.

    γ is the largest value for which the sum of squared distances of the false update from all h
    updates gᵢ is at most the largest sum of squared distances of any update from all updates. Since
    Σ(μ − gᵢ) = 0, Σ‖μ + γd − gᵢ‖² = Σ‖μ − gᵢ‖² + hγ²‖d‖².

    Parameters
    ----------
    updates
        Updates of h clients, ``[h, D]``.
    direction
        Name of the direction d in :data:`DIRECTIONS`.

    Returns
    -------
    torch.Tensor
        The false update, ``[D]``.
    """
    mean = updates.mean(0)
    d = DIRECTIONS[direction](updates)
    squared = float(row_norms(d[None])[0] ** 2)
    most = max(float((row_norms(updates, row) ** 2).sum()) for row in updates)
    room = max(0.0, most - float((row_norms(updates, mean) ** 2).sum()))
    return mean if squared == 0 else mean + (room / (len(updates) * squared)) ** 0.5 * d


def _project_on_direction(a: Tensor, d: Tensor) -> tuple[Tensor, float]:
    """Return the inner products ``[h]`` of the rows of ``a [h, D]`` with ``d [D]``, and ‖d‖²."""
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

OPTIONS = frozenset(name for options in KINDS.values() for name in options)
"""Settings that only some kinds have."""

LIES: Mapping[str, str] = {
    "losses": "swaps the losses of models on its training data, the lowest with the highest",
    "scores": "swaps the scores of models on its validation data in the same way as losses",
    "subspaces": "sends random subspaces",
    "descriptors": "sends a descriptor of huge numbers",
    "shifts": "reports in every round that its labels have shifted",
    "statistics": "reports its rarest label for all its examples, and inputs that are far off",
    "signatures": "sends honest signatures of the parts of its data with a false update",
}
"""Names of the false statements that adversaries may send in addition to updates, described."""

POISONING = ("label_flip", "backdoor")
"""Kinds of adversaries that train on data that they have changed."""

CHANGING = tuple(kind for kind in KINDS if kind not in (*POISONING, "false_size"))
"""Kinds of adversaries that replace the update that they have trained."""

KNOWING = ("alie", "ipm", "minmax", "minsum", "copy")
"""Kinds of adversaries that use the updates of other clients."""

FALSE_SIZE = 10**9

LARGEST_SIZE = 2**53

FINITE = in_range("(-inf, inf)", "finite")
NOT_NEGATIVE = in_range("[0, inf)", "at least 0 and finite")


@checked()
@document_settings
@dataclass(frozen=True, kw_only=True)
class Adversary:
    """Settings of the simulated adversaries: which clients attack, and how.

    With a ``share`` of 0 there are no adversaries. An option that is left out has the default of
    the adversary's kind (:data:`KINDS`). An option that the kind does not have is an error.

    Raises
    ------
    ConfigError
        If the kind is unknown, the kind does not have a given option, or a value is out of range;
        one line for each problem.
    """

    kind: str = setting(
        "",
        doc="""``label_flip``, ``sign_flip``, ``scaled``, ``gaussian``, ``alie``, ``ipm``,
        ``minmax``, ``minsum``, ``backdoor``, ``false_size``, ``copy`` or ``sybil``. May be left out
        if ``lies`` are set: updates are honest then.""",
    )
    lies: tuple[str, ...] | str = setting(
        (),
        doc="""False statements in addition to updates, any of :data:`LIES`: ``losses``, ``scores``,
        ``subspaces``, ``descriptors``, ``shifts``, ``statistics`` and ``signatures``. A method that
        does not request a statement is not affected. Losses and scores of several models are
        exchanged between these models, so a report about a single model, as for early stopping, is
        true.""",
        later=True,
    )
    share: float = setting(
        0.0,
        in_range("[0, 1]"),
        doc="""Share of all clients that are adversaries. They are drawn by the seed, and at least
        one is drawn unless the share is 0.""",
    )
    cluster: int | None = setting(
        None,
        doc="""True cluster from whose members alone the adversaries are drawn. ``share`` is then
        the share of these members.""",
    )
    from_round: int = setting(
        1,
        at_least(1),
        doc="""First round in which adversaries attack. Before it they are honest, and sybils are
        absent.""",
    )
    sleeper: bool = setting(
        False,
        doc="""Whether adversaries also stay honest as long as a single cluster has all clients, so
        that all clients receive the same model.""",
    )
    evasive: bool = setting(
        False,
        doc="""Whether adversaries reply truthfully if updates of parts of the data are compared, as
        in a check of ``rcfl``, and attack only in queries whose updates just move models. Other
        methods compare every update, or none.""",
    )
    size: int | None = setting(
        None,
        in_range(f"[1, {LARGEST_SIZE}]", "from 1 to 2**53"),
        doc="""Number of training examples that an adversary claims to have. If left out: the truth,
        and 10⁹ for ``false_size``.""",
    )
    factor: float | None = setting(
        None,
        FINITE,
        doc="""Factor of the update: 10 for ``scaled``. For ``backdoor``: γ, by default the number
        of clients divided by the number of adversaries, so that the mean becomes the adversary's
        model. For ``sybil``: length of the update in multiples of the length of the honest one, 1.""",
    )
    mean: float | None = setting(
        None, FINITE, doc="Mean of each parameter that ``gaussian`` sends: 0.1."
    )
    std: float | None = setting(
        None,
        NOT_NEGATIVE,
        doc="""Standard deviation of each parameter that ``gaussian`` sends, 0.1, and of the noise
        that ``copy`` adds to its copy, 0.""",
    )
    z: float | None = setting(
        None,
        FINITE,
        doc="""z of ``alie``; by default the largest with which enough honest clients lie further
        from the mean.""",
    )
    epsilon: float | None = setting(None, NOT_NEGATIVE, doc="ε of ``ipm``: 2.")
    direction: str | None = setting(
        None,
        one_of("std", "sign", "unit", text="'std', 'sign' or 'unit'"),
        doc="""Direction in which ``minmax`` and ``minsum`` leave the mean: ``std``, ``sign`` or
        ``unit``.""",
    )
    knows: str | None = setting(
        None,
        one_of("honest", "own"),
        doc="""Updates from which ``alie``, ``ipm``, ``minmax`` and ``minsum`` start. ``honest``:
        the updates of the honest clients that received the same model. ``own``: the honest updates
        of the adversaries that received it.""",
    )
    target: int | None = setting(None, at_least(0), doc="Label to which a ``backdoor`` leads: 0.")
    patch: int | None = setting(
        None,
        at_least(1),
        doc="""Side in pixels of the trigger of a ``backdoor``, a bright square in the lower right
        corner: 3.""",
    )
    poisoned: float | None = setting(
        None,
        in_range("(0, 1]", "greater than 0 and at most 1"),
        doc="Share of a backdoor's training examples that have the trigger and the target: 0.3.",
    )

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
        given = {
            name: getattr(self, name) for name in sorted(OPTIONS) if getattr(self, name) is not None
        }
        takes_what = (
            f"left out with kind {self.kind!r}, which has {', '.join(takes) or 'no options'}"
        )
        false_update = "signatures" not in self.lies or self.kind in CHANGING
        beside_rule = (
            f"one of {', '.join(CHANGING)} with lies = 'signatures', since honest signatures are "
            "an attack only in addition to a false update"
        )
        check_settings(
            self,
            "adversary",
            ("adversary.kind", self.kind, false_update, beside_rule),
            *(
                (f"adversary.{name}", value, name in takes, takes_what)
                for name, value in given.items()
            ),
        )

    def __bool__(self) -> bool:
        """Whether any client is an adversary."""
        return self.share > 0

    def option(self, name: str) -> Any:
        """Return the value of an option, or the default of the adversary's kind if unset."""
        given = getattr(self, name)
        return KINDS[self.kind][name] if given is None else given

    @property
    def described(self) -> dict[str, Any]:
        """Settings of the adversaries as stored in a run's config."""
        return as_section(self)

    def states_falsely(self, lie: str) -> bool:
        """Return whether the adversaries make the false statement named ``lie`` in :data:`LIES`."""
        return lie in self.lies

    @property
    def poisons(self) -> bool:
        """Whether the adversaries train on data that they have changed."""
        return self.kind in POISONING

    @property
    def knowing(self) -> bool:
        """Whether the adversaries compute their update from the updates of other clients."""
        return self.kind in KNOWING

    @property
    def claims(self) -> int | None:
        """Number of training examples that the adversaries claim to have; None for the truth."""
        return FALSE_SIZE if self.size is None and self.kind == "false_size" else self.size

    def check_stream(self, stream: object, *, central: bool = False) -> None:
        """Check that adversaries can use the updates of other clients, if their attack needs them.

        An attack that needs the other updates needs all updates of a round together, so the run
        must not stream (add up updates as they arrive). With central privacy no party receives
        single updates.

        Parameters
        ----------
        stream
            Setting ``stream`` of the run.
        central
            Whether the run has central privacy.

        Raises
        ------
        ConfigError
            If the adversaries need the updates of other clients, and the run streams or has central
            privacy.
        """
        rule = (
            f"false or 'auto' with adversaries of kind {self.kind!r}, which need the single "
            "updates of other clients"
        )
        require(("stream", stream, not (self and self.knowing and stream is True), rule))
        if central and self and self.knowing:
            raise ConfigError(
                f"adversaries of kind {self.kind!r} need the single updates of other clients, "
                'which no party receives with privacy.model = "central"; choose another '
                "adversary.kind"
            )
