"""Updates of clients in a round: checked where they arrive, then selected and concatenated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fedclade.core.arguments import checked
from fedclade.core.errors import UpdateError, require
from fedclade.core.events import Event

# How updates of a cluster are aggregated: by which rule, and within which limits; the
# ``[aggregate]`` section.

Rule = Literal[
    "mean",
    "median",
    "trimmed_mean",
    "krum",
    "multi_krum",
    "bulyan",
    "geometric_median",
    "centred_clipping",
]
"""How one update is made of those of a cluster; see ``core/aggregate.py``."""

Limit = float | Literal["auto"]

CLIP_ABOVE = 2.0
"""What ``clip_above`` is where some clients may lie.

A third of a cluster that sends five times its updates makes steps too long to learn by; at twice it
does not. Of honest clients it shortens few (``benchmarks/limits.py``).
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
        ``mean`` by default; ``median``, ``trimmed_mean``, ``krum``, ``multi_krum``, ``bulyan``,
        ``geometric_median`` or ``centred_clipping`` hold where some clients send anything at all.
    byzantine
        Share of a cluster's clients that may do so, in [0, 0.5). Of n that answer, f are cut, or
        not relied on: this share, rounded down, and at most what the rule allows for n.
    mixing
        Whether each update is replaced by the mean of the n − f nearest to it before the rule
        (nearest-neighbour mixing), since clients differ.
    radius
        τ of ``centred_clipping``, in parameter units; by default the median of the distances from
        the centre.
    largest_weight
        How many times as many training examples as the median client one counts with at most.
    largest_norm
        An update that is more than so many times as long as the median of its cluster is left out.
    clip_above
        One that is more than so many times as long is shortened to that. Infinity is no limit;
        ``auto`` is none in a simulation whose clients are all honest. Where some may lie it is 2,
        20 and 2; over a network the first two are those of the ``[network]`` section. Without a
        largest norm, ``auto`` clips nothing, nor with a robust rule: a lie that is shortened stands
        out less.
    leave_out_opposed
        Whether an update that moves a model against the other clients that chose this model is left
        out, where clients state which cluster they belong to (``ifca``). ``auto``: where some
        clients may lie, as over a network. The papers know of no such rule, and honest clients
        hardly ever meet it; each case is an event. ``ifca`` with ``restarts`` then does not go on
        with a set of models that is clearly worse than another, if a share ``byzantine`` of the
        lowest losses and of the highest is left out.

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
            (
                "aggregate.byzantine",
                self.byzantine,
                0 <= self.byzantine < 0.5,
                "at least 0 and below 0.5",
            ),
            (
                "aggregate.mixing",
                self.mixing,
                not self.mixing or self.is_robust,
                "false where the rule is 'mean'",
            ),
            (
                "aggregate.radius",
                self.radius,
                self.radius is None or self.radius > 0,
                "greater than 0, or left out",
            ),
            (
                "aggregate.leave_out_opposed",
                self.leave_out_opposed,
                self.leave_out_opposed in (True, False, "auto"),
                "true, false or 'auto'",
            ),
            *(
                (
                    f"aggregate.{name}",
                    value,
                    value == "auto" if isinstance(value, str) else value >= 1,
                    rule,
                )
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

    def limits(
        self, *, untrusted: bool, largest_weight: float = 2.0, largest_norm: float = 20.0
    ) -> Limits:
        """Return the limits of a run; what is left to ``auto`` acts where clients are ``untrusted``, that may lie."""
        auto = (largest_weight, largest_norm) if untrusted else (math.inf, math.inf)
        weight = auto[0] if isinstance(self.largest_weight, str) else self.largest_weight
        norm = auto[1] if isinstance(self.largest_norm, str) else self.largest_norm
        clip = CLIP_ABOVE if untrusted and not self.is_robust and math.isfinite(norm) else math.inf
        return Limits(weight, norm, clip if isinstance(self.clip_above, str) else self.clip_above)

    @property
    def looks_at_updates(self) -> bool:
        """Whether a rule or a limit that was asked for needs the updates of single clients."""
        return (
            self.is_robust or self.limits(untrusted=False).limits or self.leave_out_opposed is True
        )

    def looks_for_opposed(self, *, untrusted: bool, clients_choose: bool) -> bool:
        """Return whether opposed updates are left out of a run, by whether its clients may lie and choose a cluster."""
        if self.leave_out_opposed == "auto":
            return untrusted and clients_choose
        return self.leave_out_opposed

    def tolerated(self, clients: int, most: int) -> int:
        """Return f of so many clients: the share of them, rounded down, at most what a rule allows, at least 0."""
        return max(0, min(math.floor(round(self.byzantine * clients, 9)), most))


LARGEST_NORM = 1e18
"""Of an update: the product of two larger ones overflows float32, and no similarity could be computed."""

DROPPED_OUT = "dropped out"
"""Why a client is left out that was sent a model and sent nothing back."""

TOO_LATE = "too late"
"""Why a client is left out that was not waited for."""

FORBIDS = "the client's policy forbids"
"""How a refusal begins by which the server sees that it will not get this answer, however often it asks."""

KEEPS_NONE = "keeps no model of its own"
"""How the reason begins why a client is left out that should go on with its own model, and has lost it."""

NOT_ASKED = "not asked"
"""How the reason begins why a client is left out that was sent nothing."""

REJECTED_SUM = "sum rejected"
"""How the reason begins why a client is left out whose update is in a sum that is not used."""

CONVERTED_AT_A_TIME = 2**17
"""Entries of updates that are converted to float64 at once: 1 MiB, which stays in a processor's cache."""


@dataclass(frozen=True, eq=False)
class Sums:
    """What a run that streams keeps of updates: Σ |D_i| Δθ_i over each of G groups of clients."""

    groups: Tensor  # the sums, [G, S]
    group: Tensor  # which of them each client is part of, int64 [n]
    noise: float = 0.0  # standard deviation of what was added to each number of a sum, for privacy

    def select(self, rows: Tensor) -> tuple[Sums, Tensor]:
        """Return the sums of the groups of some clients, and the rows of the other clients in these groups."""
        kept, group = torch.unique(self.group[rows], return_inverse=True)
        besides = torch.isin(self.group, kept)
        besides[rows] = False
        return Sums(self.groups[kept], group, self.noise), besides.nonzero().flatten()


@dataclass(frozen=True, eq=False, kw_only=True)
class Updates:
    """Updates of n clients in one round, of a model with D parameters and S = D + buffers entries.

    Parameters
    ----------
    ids
        The clients, ``[n]``.
    sizes
        Their training examples |D_i|, float64 ``[n]``.
    losses
        Mean training loss of each client in the round, ``[n]``.
    norms
        ‖Δθ_i‖ of the parameters, in parameter units, float64 ``[n]``.
    n_parameters
        D.
    deltas
        Weight updates Δθ_i (CFL eq. 1), ``[n, S]``. None in a run that streams, which has ``sums``
        in their place.
    sums
        Sums of weight updates, one for each model that was sent out.
    sketches
        What clients are compared by, ``[n, R]``, where it is not the update itself; always there in
        a stream.
    parts
        Where clients trained on m parts of their data one by one, what these are compared by, ``[n,
        m, R]``; ``deltas`` are the means of their updates then.
    components
        Where clients trained the components of a mixture, which of them each weighs most, int64
        ``[n]``; where they were asked for a choice, what each says.
    left_out
        Why each client that was queried, and is not among ``ids``, is left out.
    limited
        What was limited of each client's update or weight, and why.
    aggregation
        How updates of a cluster are aggregated, where that is robust; None: they have a mean.
    uncapped
        The training examples that each client says it has trained on, float64 ``[n]``, where some
        count with fewer.
    shortened
        What the parameters of each update were multiplied by, float64 ``[n]``, where some were too
        long.
    events
        What happened on the way and belongs in the log of the run, such as a sum that was rejected.
    """

    ids: tuple[int, ...]
    sizes: Tensor
    losses: Tensor
    norms: Tensor
    n_parameters: int
    deltas: Tensor | None = None
    sums: Sums | None = None
    sketches: Tensor | None = None
    parts: Tensor | None = None
    components: Tensor | None = None
    left_out: Mapping[int, str] = field(default_factory=dict[int, str])
    limited: Mapping[int, str] = field(default_factory=dict[int, str])
    aggregation: Aggregation | None = None
    uncapped: Tensor | None = None
    shortened: Tensor | None = None
    events: tuple[Event, ...] = ()

    @classmethod
    def received(
        cls,
        ids: Sequence[int],
        sizes: Sequence[int],
        deltas: Tensor,
        n_parameters: int,
        losses: Tensor,
        number: int,
    ) -> Updates:
        """Leave out clients whose loss or update is not finite, or whose update is longer than LARGEST_NORM.

        Raises
        ------
        UpdateError
            If there is not one row for each client; names the round.
        """
        if deltas.ndim != 2 or len(deltas) != len(ids):
            shape = tuple(deltas.shape)
            raise UpdateError(
                f"round {number}: expected {len(ids)} updates, got a tensor of shape {shape}"
            )
        norms = row_norms(deltas[:, :n_parameters])
        whole = torch.hypot(norms, row_norms(deltas[:, n_parameters:]))
        # NaN is not less than anything
        usable = (whole <= LARGEST_NORM) & torch.isfinite(losses).cpu()
        left_out = {
            ids[i]: _what_is_wrong(deltas[i], float(whole[i]), float(losses[i]))
            for i in (~usable).nonzero().flatten().tolist()
        }
        weights = torch.tensor(sizes, dtype=torch.float64)
        each = cls(
            ids=tuple(ids),
            sizes=weights,
            losses=losses,
            norms=norms,
            n_parameters=n_parameters,
            deltas=deltas,
        )
        return replace(each.select([c for c in ids if c not in left_out]), left_out=left_out)

    @classmethod
    def received_singly(
        cls,
        ids: Sequence[int],
        sizes: Sequence[int],
        rows: Sequence[Tensor],
        size: int,
        n_parameters: int,
        losses: Tensor,
        number: int,
    ) -> Updates:
        """Check updates that came one by one, each of any shape, for a model of S = ``size`` entries."""
        fit = [i for i, row in enumerate(rows) if row.shape == (size,)]
        shapes = {
            client: tuple(row.shape)
            for client, row in zip(ids, rows, strict=True)
            if row.shape != (size,)
        }
        left_out = {
            client: f"update of shape {shape}, expected ({size},)"
            for client, shape in shapes.items()
        }
        deltas = torch.stack([rows[i] for i in fit]) if fit else rows[0].new_empty(0, size)
        named = [ids[i] for i in fit]
        weights = [sizes[i] for i in fit]
        received = cls.received(named, weights, deltas, n_parameters, losses[fit], number)
        return replace(received, left_out={**left_out, **received.left_out})

    @classmethod
    def of_nobody(cls, left_out: Mapping[int, str], models: Tensor, n_parameters: int) -> Updates:
        """Return the updates of no client, where none answered, to models ``[K, S]``."""
        none = torch.zeros(0, dtype=torch.float64)
        deltas = models.new_zeros(0, models.shape[1])
        empty = cls(
            ids=(), sizes=none, losses=none, norms=none, n_parameters=n_parameters, deltas=deltas
        )
        return replace(empty, left_out=left_out)

    @property
    def required_deltas(self) -> Tensor:
        """The update of each client, ``[n, S]``; an UpdateError if the run streams."""
        if self.deltas is None:
            raise UpdateError(
                f"the updates of {len(self.ids)} clients are needed one by one, but this run "
                "streams and keeps only their sums; set stream = false"
            )
        return self.deltas

    @property
    def senders(self) -> tuple[int, ...]:
        """The clients that sent an update, usable or not."""
        silent = (DROPPED_OUT, NOT_ASKED)
        return (
            *self.ids,
            *(client for client, why in self.left_out.items() if not why.startswith(silent)),
        )

    @property
    def signatures(self) -> Tensor:
        """What clients are compared by, ``[n, R]``: by default the update without its buffers, ``[n, D]``.

        An UpdateError is raised if the run streams and keeps none.
        """
        if self.deltas is None and self.sketches is not None and self.sketches.shape[1] == 0:
            raise UpdateError(
                f"the signatures of {len(self.ids)} clients are needed, but this run streams, and "
                "keeps none where an algorithm's compares is False; let it be True, or set stream "
                "= false"
            )
        return (
            self.required_deltas[:, : self.n_parameters] if self.sketches is None else self.sketches
        )

    def select(self, members: Sequence[int]) -> Updates:
        """Return the updates of those members that answered, in the order of the members.

        An UpdateError is raised if the run streams, and the members share a sum with others.
        """
        rows = self._rows(members)
        named = set(members)
        left_out = {client: why for client, why in self.left_out.items() if client in named}
        if torch.equal(rows, torch.arange(len(self.ids))) and len(left_out) == len(self.left_out):
            return self
        sums = None
        if self.sums is not None:
            sums, besides = self.sums.select(rows)
            if len(besides):
                raise UpdateError(
                    f"the updates of clients {self._named(rows)} cannot be told from those of "
                    f"clients {self._named(besides)}: this run streams, and keeps only sums over "
                    "all clients of a model; set stream = false"
                )
        return replace(
            self,
            ids=tuple(self._named(rows)),
            sizes=self.sizes[rows],
            losses=self.losses[rows],
            norms=self.norms[rows],
            deltas=None if self.deltas is None else self.deltas[rows],
            sums=sums,
            sketches=None if self.sketches is None else self.sketches[rows],
            parts=None if self.parts is None else self.parts[rows],
            components=None if self.components is None else self.components[rows],
            uncapped=None if self.uncapped is None else self.uncapped[rows],
            shortened=None if self.shortened is None else self.shortened[rows],
            left_out=left_out,
            limited={client: what for client, what in self.limited.items() if client in named},
        )

    def signatures_of(self, members: Sequence[int]) -> Tensor:
        """Return the signatures of those members that answered, ``[m, R]`` in the order of the members."""
        return self.signatures[self._rows(members)]

    def concat(self, other: Updates) -> Updates:
        """Return these updates and those of other clients, made at the same models in the same round.

        Clients that are left out of one and answered in the other are no longer left out.
        """
        left_out = {
            c: why
            for c, why in {**self.left_out, **other.left_out}.items()
            if c not in self.ids + other.ids
        }
        limited = {**self.limited, **other.limited}
        events = self.events + other.events
        if not self.ids or not other.ids:
            return replace(
                self if self.ids else other, left_out=left_out, limited=limited, events=events
            )
        if (sketches := self.sketches) is not None:
            sketches = torch.cat(
                [sketches, other.signatures if other.sketches is None else other.sketches]
            )
        sums = None
        if self.sums is not None and other.sums is not None:
            behind = other.sums.group + len(self.sums.groups)
            groups = torch.cat([self.sums.groups, other.sums.groups])
            sums = Sums(
                groups, torch.cat([self.sums.group, behind]), max(self.sums.noise, other.sums.noise)
            )
        return Updates(
            ids=self.ids + other.ids,
            sizes=torch.cat([self.sizes, other.sizes]),
            losses=torch.cat([self.losses, other.losses]),
            norms=torch.cat([self.norms, other.norms]),
            n_parameters=self.n_parameters,
            deltas=None
            if sums is not None
            else torch.cat([self.required_deltas, other.required_deltas]),
            sums=sums,
            sketches=sketches,
            parts=_joined(self.parts, other.parts),
            components=_joined(self.components, other.components),
            left_out=left_out,
            limited=limited,
            aggregation=self.aggregation,
            uncapped=_filled((self.uncapped, self.sizes), (other.uncapped, other.sizes)),
            shortened=_filled(
                *((each.shortened, torch.ones_like(each.sizes)) for each in (self, other))
            ),
            events=events,
        )

    @cached_property
    def _row_of(self) -> Mapping[int, int]:
        return {client: row for row, client in enumerate(self.ids)}

    def _rows(self, members: Sequence[int]) -> Tensor:
        return torch.tensor(
            [self._row_of[m] for m in members if m in self._row_of], dtype=torch.int64
        )

    def _named(self, rows: Tensor) -> list[int]:
        return [self.ids[row] for row in rows.tolist()]


def _joined(mine: Tensor | None, others: Tensor | None) -> Tensor | None:
    return None if mine is None or others is None else torch.cat([mine, others])


def _filled(
    mine: tuple[Tensor | None, Tensor], others: tuple[Tensor | None, Tensor]
) -> Tensor | None:
    """Return the rows of both, those of one that has none from what stands for them; None if neither has any."""
    if mine[0] is None and others[0] is None:
        return None
    return torch.cat([rows if rows is not None else instead for rows, instead in (mine, others)])


def _what_is_wrong(delta: Tensor, norm: float, loss: float) -> str:
    if entries := int((~torch.isfinite(delta)).sum()):
        return f"{entries} of {len(delta)} entries are NaN or infinite"
    return (
        f"loss {loss}" if norm <= LARGEST_NORM else f"norm {norm:.3g}, more than {LARGEST_NORM:.3g}"
    )


def make_usable(deltas: Tensor, losses: Tensor) -> None:
    """Change updates ``[n, S]`` and losses ``[n]`` in place so that :meth:`Updates.received` leaves none out.

    An update with an entry that is not finite becomes zeros, one that is too long is scaled down,
    and every loss becomes 0. This is for clients with differential privacy: clipping and noise come
    afterwards, so any change of the update is allowed here, while a reply that is missing would
    reveal something about the data without any noise.
    """
    is_finite = torch.isfinite(deltas).all(dim=1)
    deltas[~is_finite] = 0
    norms = row_norms(deltas)
    longest = LARGEST_NORM / 2  # well below the limit, so that rounding cannot exceed it
    scale = (longest / norms.clamp(min=longest)).to(deltas)
    is_too_long = (norms > longest).to(deltas.device)
    deltas[is_too_long] *= scale[is_too_long, None]
    losses.zero_()


def row_norms(rows: Tensor, from_: Tensor | None = None) -> Tensor:
    """Return the norm of each row of ``[n, m]``, float64 ``[n]``, or its distance from a point ``[m]``."""
    at_once = max(1, CONVERTED_AT_A_TIME // max(1, rows.shape[1]))
    parts = (some if from_ is None else some - from_ for some in rows.split(at_once))
    return torch.cat(
        [torch.linalg.vector_norm(some, dim=1, dtype=torch.float64) for some in parts]
    ).cpu()
