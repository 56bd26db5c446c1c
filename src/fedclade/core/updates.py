"""Updates of clients in one round: checked on arrival, then selected and concatenated."""

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

# Settings of the ``[aggregate]`` section: the aggregation rule and the limits on single updates.

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
"""Rules that combine the updates of a cluster into one update; see ``core/aggregate.py``."""

Limit = float | Literal["auto"]

CLIP_ABOVE = 2.0
"""Value of ``clip_above`` if it is ``auto`` and some clients may be malicious.

If a third of a cluster sends five times its updates, the steps of the cluster are too long to
learn; with updates clipped at twice the median norm they are not. Few updates of honest clients are
shortened at this value (``benchmarks/limits.py``).
"""


@dataclass(frozen=True)
class Limits:
    """Limits on the weight and the norm of a single update, as resolved for a run.

    ``largest_weight`` is a multiple of the median number of training examples; ``largest_norm`` and
    ``clip_above`` are multiples of the median norm. Infinity means no limit. See
    :class:`Aggregation`.
    """

    largest_weight: float = math.inf
    largest_norm: float = math.inf
    clip_above: float = math.inf

    @property
    def limits(self) -> bool:
        """Whether at least one limit is set."""
        return self != Limits()


@checked()
@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """The ``[aggregate]`` section: settings that combine the updates of each cluster into one.

    Parameters
    ----------
    rule
        ``mean`` by default. ``median``, ``trimmed_mean``, ``krum``, ``multi_krum``, ``bulyan``,
        ``geometric_median`` and ``centred_clipping`` are robust: they tolerate some clients that
        send arbitrary updates.
    byzantine
        Share of a cluster's clients that may send arbitrary updates, in [0, 0.5). If n clients
        reply, the rule tolerates f of them: this share of n, rounded down, and at most the largest
        number that the rule allows for n.
    mixing
        Whether each update is replaced by the mean of the n − f updates nearest to it before the
        rule is applied (nearest-neighbour mixing), since the data of clients differ.
    radius
        τ of ``centred_clipping``, in parameter units; by default the median of the distances from
        the centre.
    largest_weight
        Upper bound on the number of training examples that a client is weighted by, as a multiple
        of the median client's number.
    largest_norm
        An update is left out if its norm exceeds this multiple of the median norm in its cluster.
    clip_above
        An update is scaled down to this multiple of the median norm in its cluster if it is longer.
        Infinity is no limit. For this parameter and the two before, ``auto`` sets no limit in a
        simulation whose clients are all honest. If some may be malicious, the values are 2
        (``largest_weight``), 20 (``largest_norm``) and 2 (``clip_above``); over a network the first
        two are those of the ``[network]`` section. ``auto`` clips nothing if there is no largest
        norm, nor with a robust rule: a malicious update that has been shortened is harder to tell
        from honest ones.
    leave_out_opposed
        Whether an update is left out if it moves a model against the other clients that chose the
        same model. It applies to methods whose clients state the cluster that they belong to
        (``ifca``). ``auto``: true if some clients may be malicious, as over a network. The papers
        have no such rule; honest clients hardly ever trigger it, and each case is an event.
        ``ifca`` with ``restarts`` then does not choose the set of models with the lowest mean loss
        if another set is clearly better when a share ``byzantine`` of the lowest losses and of the
        highest is left out.

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
        """The settings as saved in a run's config.

        A key that earlier versions did not have (``leave_out_opposed``) is left out if it has its
        default.
        """
        settings = asdict(self)
        if self.leave_out_opposed == "auto":
            del settings["leave_out_opposed"]
        return settings

    @property
    def is_robust(self) -> bool:
        """Whether the rule is robust, and so needs the updates of single clients."""
        return self.rule != "mean"

    def limits(
        self, *, untrusted: bool, largest_weight: float = 2.0, largest_norm: float = 20.0
    ) -> Limits:
        """Return the limits of a run.

        Parameters
        ----------
        untrusted
            Whether clients may be malicious. Limits set to ``auto`` apply only in this case.
        largest_weight, largest_norm
            Values that ``auto`` stands for in this case.
        """
        auto = (largest_weight, largest_norm) if untrusted else (math.inf, math.inf)
        weight = auto[0] if isinstance(self.largest_weight, str) else self.largest_weight
        norm = auto[1] if isinstance(self.largest_norm, str) else self.largest_norm
        clip = CLIP_ABOVE if untrusted and not self.is_robust and math.isfinite(norm) else math.inf
        return Limits(weight, norm, clip if isinstance(self.clip_above, str) else self.clip_above)

    @property
    def looks_at_updates(self) -> bool:
        """Whether the settings include a rule or a limit that needs the updates of single clients.

        Limits that only ``auto`` would set do not count.
        """
        return (
            self.is_robust or self.limits(untrusted=False).limits or self.leave_out_opposed is True
        )

    def looks_for_opposed(self, *, untrusted: bool, clients_choose: bool) -> bool:
        """Return whether opposed updates are left out of a run.

        Parameters
        ----------
        untrusted
            Whether the run's clients may be malicious.
        clients_choose
            Whether each client chooses its cluster itself.
        """
        if self.leave_out_opposed == "auto":
            return untrusted and clients_choose
        return self.leave_out_opposed

    def tolerated(self, clients: int, most: int) -> int:
        """Return f, the number of n = ``clients`` clients that the rule tolerates.

        It is the share ``byzantine`` of n, rounded down, at most ``most`` (the rule's own bound)
        and at least 0.
        """
        # Rounded first, since 0.29 * 100 is 28.999999999999996 in floating point.
        return max(0, min(math.floor(round(self.byzantine * clients, 9)), most))


LARGEST_NORM = 1e18
"""Largest norm of a usable update.

The product of two longer ones overflows float32, so that no similarity could be computed.
"""

DROPPED_OUT = "dropped out"
"""Reason for leaving out a client that was sent a model and did not reply."""

TOO_LATE = "too late"
"""Reason for leaving out a client that the server did not wait for."""

FORBIDS = "the client's policy forbids"
"""First words of a refusal by a client's policy.

They tell the server that the client will not reply to this query, however often it is repeated.
"""

KEEPS_NONE = "keeps no model of its own"
"""First words of the reason for leaving out a client that should use a local model and has none."""

NOT_ASKED = "not asked"
"""First words of the reason for leaving out a client that was sent nothing."""

REJECTED_SUM = "sum rejected"
"""First words of the reason for leaving out a client whose update is part of a rejected sum."""

CONVERTED_AT_A_TIME = 2**17
"""Entries of updates converted to float64 at once: 1 MiB, which fits a processor's cache."""


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums of updates, stored in a streaming run in place of single updates.

    A sum is Σ |D_i| Δθ_i over the clients of one of G groups.
    """

    groups: Tensor  # the sums, [G, S]
    group: Tensor  # group of each client, a row of ``groups``, int64 [n]
    noise: float = 0.0  # standard deviation of the privacy noise added to each entry of a sum

    def select(self, rows: Tensor) -> tuple[Sums, Tensor]:
        """Return the sums that include some clients.

        Returns
        -------
        tuple
            The sums of these clients' groups, and the rows of the other clients in the same groups,
            whose updates cannot be separated from theirs.
        """
        kept, group = torch.unique(self.group[rows], return_inverse=True)
        besides = torch.isin(self.group, kept)
        besides[rows] = False
        return Sums(self.groups[kept], group, self.noise), besides.nonzero().flatten()


@dataclass(frozen=True, eq=False, kw_only=True)
class Updates:
    """Updates of n clients in one round, of a model with D parameters and S entries in all.

    Parameters
    ----------
    ids
        The clients, ``[n]``.
    sizes
        Numbers |D_i| of training examples, float64 ``[n]``.
    losses
        Mean training loss of each client in the round, ``[n]``.
    norms
        ‖Δθ_i‖ of the parameters, in parameter units, float64 ``[n]``.
    n_parameters
        D. The other S − D entries are buffers.
    deltas
        Weight updates Δθ_i (CFL eq. 1), ``[n, S]``. None in a streaming run, which has ``sums``
        instead.
    sums
        Sums of weight updates, one for each model that was sent out; in a streaming run only.
    sketches
        Signatures by which clients are compared, ``[n, R]``, if these differ from the updates;
        always set in a streaming run.
    parts
        Signatures of each part, ``[n, m, R]``, if clients trained on m parts of their data
        separately; ``deltas`` are then the means over the parts. None otherwise.
    components
        If clients trained the components of a mixture: the component with the largest weight of
        each client, int64 ``[n]``. If the query contained a question that calls for a choice: the
        choice of each client.
    left_out
        Reason for each queried client that is not among ``ids``.
    limited
        Description of what was limited in each client's update or weight, and why.
    aggregation
        Settings of a robust rule by which the updates of a cluster are aggregated; None: by their
        mean.
    uncapped
        Number of training examples that each client claims, float64 ``[n]``, if some are weighted
        by a smaller number.
    shortened
        Factor by which the parameters of each update were multiplied, float64 ``[n]``, if some
        updates were too long.
    events
        Events of the query for the run's log, such as a rejected sum.
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
        """Return received updates without those that are unusable.

        A client is left out if its loss or update is not finite, or if its update is longer than
        :data:`LARGEST_NORM`.

        Parameters
        ----------
        ids, sizes
            The clients, ``[n]``, and their numbers of training examples.
        deltas
            Updates ``[n, S]``.
        n_parameters
            Number D of parameters.
        losses
            Training losses ``[n]``.
        number
            Number of the round, for error messages.

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
        # A comparison with NaN is false, so a NaN norm is not usable either.
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
        """Return updates that arrived one by one, without those that are unusable.

        As :meth:`received`, but ``rows`` may have any shapes. A client whose row does not have S =
        ``size`` entries is left out.
        """
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
        """Return an empty result for a query for models ``[K, S]`` to which no client replied."""
        none = torch.zeros(0, dtype=torch.float64)
        deltas = models.new_zeros(0, models.shape[1])
        empty = cls(
            ids=(), sizes=none, losses=none, norms=none, n_parameters=n_parameters, deltas=deltas
        )
        return replace(empty, left_out=left_out)

    @property
    def required_deltas(self) -> Tensor:
        """The update of each client, ``[n, S]``.

        Raises
        ------
        UpdateError
            If the run streams, and so stores no single updates.
        """
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
        """Vectors by which clients are compared, ``[n, R]``.

        By default a signature is the update without its buffers, ``[n, D]``.

        Raises
        ------
        UpdateError
            If the run streams and stores no signatures.
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
        """Return the updates of those ``members`` that replied, in the order of ``members``.

        Raises
        ------
        UpdateError
            If the run streams, and the members share a sum with other clients.
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
        """Return the signatures ``[m, R]`` of the members that replied, in the order given."""
        return self.signatures[self._rows(members)]

    def concat(self, other: Updates) -> Updates:
        """Return these updates and the ``other`` ones, of other clients, concatenated.

        Both must come from the same models in the same round. A client that is left out of one and
        replied in the other is not left out of the result.
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
    """Concatenate two optional columns, each given with its default; None if neither is set."""
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
    """Change updates and losses in place so that :meth:`Updates.received` accepts all of them.

    Of the updates ``[n, S]``, one with an entry that is not finite becomes zeros, and one that is
    too long is scaled down. Every loss ``[n]`` becomes 0. This is for clients with differential
    privacy: clipping and noise are applied afterwards, so any change of the update is allowed here,
    while a missing reply would reveal something about the data without any noise.
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
    """Return the norm of each row of ``[n, m]``, float64 ``[n]`` on the CPU.

    If a point ``from_ [m]`` is given, return the distance of each row from it.
    """
    at_once = max(1, CONVERTED_AT_A_TIME // max(1, rows.shape[1]))
    parts = (some if from_ is None else some - from_ for some in rows.split(at_once))
    return torch.cat(
        [torch.linalg.vector_norm(some, dim=1, dtype=torch.float64) for some in parts]
    ).cpu()
