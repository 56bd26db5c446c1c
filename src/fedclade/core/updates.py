"""Model updates of clients in one round, and the ``[aggregate]`` settings for aggregating them.

Updates are checked on arrival, and can then be selected by client and concatenated. A run "streams"
if the server adds arriving updates to sums and does not store the updates of single clients. A
signature is the vector by which a client is compared with other clients, such as a random
projection of its update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from fedclade.core.arguments import checked
from fedclade.core.errors import UpdateError
from fedclade.core.file_rows import copy_rows
from fedclade.core.settings import (
    Check,
    as_section,
    at_least,
    check_settings,
    document_settings,
    greater_than,
    in_range,
    one_of,
    setting,
)

if TYPE_CHECKING:  # clients report no events, and their processes start sooner without them
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
"""Names of the rules that combine a cluster's updates into one; see ``core/aggregate.py``."""

Limit = float | Literal["auto"]

CLIP_ABOVE = 2.0
"""Value of the setting ``clip_above`` if it is ``auto`` and some clients may be malicious.

If a third of a cluster sends five times its updates, the steps of the cluster are too long to
learn; with updates clipped at twice the median norm they are not. Few updates of honest clients are
shortened at this value (``benchmarks/limits.py``).
"""


@dataclass(frozen=True)
class Limits:
    """Limits on the weight and the norm of a client's update, with the values used in a run.

    ``largest_weight`` is a multiple of the median number of training examples. ``largest_norm``,
    above which an update is left out, and ``clip_above``, above which it is scaled down, are
    multiples of the median norm. Infinity means no limit. See :class:`Aggregation`.
    """

    largest_weight: float = math.inf
    largest_norm: float = math.inf
    clip_above: float = math.inf

    @property
    def limits(self) -> bool:
        """Whether at least one limit is set."""
        return self != Limits()


WEIGHTS = ("auto", "examples", "uniform")
"""Values of ``aggregate.weights``, besides a table of weights."""


@checked()
@document_settings
@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """Settings of the aggregation of each cluster's updates (section ``[aggregate]`` of a config).

    Raises
    ------
    ConfigError
        If a value is out of range; the message has a line for each setting.
    """

    rule: Rule = setting(
        "mean",
        one_of(*get_args(Rule)),
        doc="""``mean`` by default. ``median``, ``trimmed_mean``, ``krum``, ``multi_krum``,
        ``bulyan``, ``geometric_median`` and ``centred_clipping`` are robust: they tolerate some
        clients that send arbitrary updates.""",
    )
    byzantine: float = setting(
        0.2,
        in_range("[0, 0.5)", "at least 0 and below 0.5"),
        doc="""Share of a cluster's clients that may send arbitrary updates, in [0, 0.5). If n
        clients reply, the rule tolerates f of them: this share of n, rounded down, and at most the
        largest number that the rule allows for n.""",
    )
    mixing: bool = setting(
        False,
        doc="""Whether each update is replaced by the mean of the n − f updates nearest to it before
        the rule is applied (nearest-neighbour mixing), since the data of clients differ.""",
    )
    radius: float | None = setting(
        None,
        greater_than(0, "greater than 0, or left out"),
        doc="""τ of ``centred_clipping``, in parameter units; by default the median of the distances
        from the centre.""",
    )
    weights: str | Mapping[str, float] = setting(
        "auto",
        doc="""Weights of clients in means of updates. ``auto``: the method decides, usually by
        numbers of training examples. ``examples``: these numbers, and ``uniform``: equal weights,
        with every method. A table with weights of clients by their names or ids: a client that it
        does not list has weight 1.""",
        later=True,
    )
    largest_weight: Limit = setting(
        "auto",
        at_least(1).or_auto(),
        doc="""Upper bound on the number of training examples that a client is weighted by, as a
        multiple of the median client's number.""",
    )
    largest_norm: Limit = setting(
        "auto",
        at_least(1).or_auto(),
        doc="""An update is left out if its norm exceeds this multiple of the median norm in its
        cluster.""",
    )
    clip_above: Limit = setting(
        "auto",
        at_least(1).or_auto(),
        doc="""An update is scaled down to this multiple of the median norm in its cluster if it is
        longer. Infinity is no limit. For this limit, ``largest_weight`` and ``largest_norm``,
        ``auto`` sets no limit in a simulation whose clients are all honest. If some may be
        malicious, the values are 2 (``largest_weight``), 20 (``largest_norm``) and 2
        (``clip_above``); over a network the first two are those of the ``[network]`` section.
        ``auto`` clips nothing if there is no largest norm, nor with a robust rule: a malicious
        update that has been shortened is harder to tell from honest ones.""",
    )
    leave_out_opposed: bool | Literal["auto"] = setting(
        "auto",
        one_of(True, False, "auto", text="true, false or 'auto'"),
        doc="""Whether an update is left out if it moves a model against the other clients that
        chose the same model. It applies to methods whose clients state the cluster that they belong
        to (``ifca``). ``auto``: true if some clients may be malicious, as over a network. The
        papers have no such rule; honest clients hardly ever trigger it, and each case is an event.
        ``ifca`` with ``restarts`` then does not choose the set of models with the lowest mean loss
        if another set is clearly better when a share ``byzantine`` of the lowest losses and of the
        highest is left out.""",
        later=True,
    )

    def __post_init__(self) -> None:
        is_allowed = not self.mixing or self.is_robust
        rule = "false if the rule is 'mean'"
        checks = [("aggregate.mixing", self.mixing, is_allowed, rule), *self._check_weights()]
        check_settings(self, "aggregate", *checks)

    def _check_weights(self) -> list[Check]:
        """Return checks of ``weights``: a known word, or finite weights of at least 0."""
        name = "aggregate.weights"
        weights = self.weights
        unweighted = weights == "auto" or not self.is_robust
        robust = (name, weights, unweighted, "'auto' with a robust rule, which weighs all alike")
        if isinstance(weights, str):
            rule = f"{', '.join(map(repr, WEIGHTS))}, or a table of weights"
            return [(name, weights, weights in WEIGHTS, rule), robust]
        valid = all(math.isfinite(each) and each >= 0 for each in weights.values())
        return [(name, dict(weights), valid, "finite numbers of at least 0"), robust]

    @property
    def described(self) -> dict[str, Any]:
        """The settings as a dictionary, in the form in which a run's config stores them."""
        return as_section(self)

    @property
    def is_robust(self) -> bool:
        """Whether the rule is robust; a robust rule needs the updates of single clients."""
        return self.rule != "mean"

    def limits(
        self, *, untrusted: bool, largest_weight: float = 2.0, largest_norm: float = 20.0
    ) -> Limits:
        """Return the limits on updates in a run, with values in place of ``auto``.

        Parameters
        ----------
        untrusted
            Whether clients may be malicious. If not, ``auto`` means no limit.
        largest_weight, largest_norm
            Values that replace ``auto`` if clients may be malicious.
        """
        auto = (largest_weight, largest_norm) if untrusted else (math.inf, math.inf)
        weight = auto[0] if isinstance(self.largest_weight, str) else self.largest_weight
        norm = auto[1] if isinstance(self.largest_norm, str) else self.largest_norm
        clip = CLIP_ABOVE if untrusted and not self.is_robust and math.isfinite(norm) else math.inf
        return Limits(weight, norm, clip if isinstance(self.clip_above, str) else self.clip_above)

    @property
    def looks_at_updates(self) -> bool:
        """Whether the settings require the updates of single clients, rather than their sum.

        This is the case for a robust rule, for limits on updates, and if updates that oppose other
        clients' updates are left out. Limits that are set to ``auto`` do not count.
        """
        return (
            self.is_robust or self.limits(untrusted=False).limits or self.leave_out_opposed is True
        )

    def looks_for_opposed(self, *, untrusted: bool, clients_choose: bool) -> bool:
        """Return whether a run leaves out updates that move a model against other clients' updates.

        See :attr:`leave_out_opposed`.

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
        """Return the number f of malicious clients that the robust rule tolerates.

        f is the share ``byzantine`` of the clients that replied, rounded down, but at most
        ``most``.

        Parameters
        ----------
        clients
            Number of clients that replied.
        most
            Upper bound on f that the rule requires for this number of clients.
        """
        # Rounded first, since 0.29 * 100 is 28.999999999999996 in floating point.
        return max(0, min(math.floor(round(self.byzantine * clients, 9)), most))


LARGEST_NORM = 1e18
"""Largest norm of a usable update.

The inner product of two longer updates overflows float32, so that their similarity could not be
computed.
"""

DROPPED_OUT = "dropped out"
"""Reason for leaving out a client that was sent a model and did not reply."""

TOO_LATE = "too late"
"""Reason for leaving out a client that the server did not wait for."""

FORBIDS = "the client's policy forbids"
"""First words of the reply of a client whose policy forbids a query.

By these words, the server recognizes that it is useless to repeat the query.
"""

KEEPS_NONE = "keeps no model of its own"
"""First words of the reason for leaving out a client that lacks the stored model it should use."""

NOT_ASKED = "not asked"
"""First words of the reason for leaving out a client that was not queried."""

REJECTED_SUM = "sum rejected"
"""First words of the reason for leaving out a client whose securely aggregated sum was rejected."""

CONVERTED_AT_A_TIME = 2**17
"""Number of entries converted to float64 at a time: 1 MiB, which fits into a processor's cache."""

LONGEST_CONVERTED = 2**20
"""Number of entries of a longer row that are converted to float64 at a time: 8 MiB.

The norm of a row with at most this many entries is one sum, whose rounding therefore does not
depend on the other rows.
"""


@dataclass(frozen=True, eq=False)
class Sums:
    """Weighted sums of updates, which a streaming run stores in place of single updates.

    Clients are divided into G groups. The sum of a group is Σ |D_i| Δθ_i over its clients i, where
    |D_i| is the client's number of training examples and Δθ_i its update.
    """

    groups: torch.Tensor  # the sums, [G, S]
    group: torch.Tensor  # group of each client, a row of ``groups``, int64 [n]
    noise: float = 0.0  # standard deviation of the privacy noise added to each entry of a sum

    def select(self, rows: torch.Tensor) -> tuple[Sums, torch.Tensor]:
        """Return the sums of the groups that the selected clients belong to.

        Parameters
        ----------
        rows
            Rows of the selected clients.

        Returns
        -------
        tuple
            The sums of the groups, and the rows of clients in these groups that are not selected.
            The updates of the latter clients cannot be separated from the sums.
        """
        kept, group = torch.unique(self.group[rows], return_inverse=True)
        besides = torch.isin(self.group, kept)
        besides[rows] = False
        return Sums(self.groups[kept], group, self.noise), besides.nonzero().flatten()


@dataclass(frozen=True, eq=False)
class Common:
    """Properties of a set of updates that do not belong to a single client.

    Parameters
    ----------
    n_parameters
        Number D of leading entries of an update that are parameters; the others are buffers.
    sums
        Weighted sums of the updates, one for each model that was sent out, in a streaming run; None
        in other runs.
    aggregation
        Settings of a robust rule by which updates are aggregated; None: updates are averaged.
    events
        Events of the query for the run's log, such as a rejected sum.
    """

    n_parameters: int
    sums: Sums | None = None
    aggregation: Aggregation | None = None
    events: tuple[Event, ...] = ()


STEPS_TAKEN = "steps_taken"
"""Name of the column with the number of steps that a user's own code has taken at each client.

Updates have the column only in simulations. It is not in :data:`OWN_COLUMNS`.
"""

OWN_COLUMNS = (
    "sizes",
    "losses",
    "norms",
    "deltas",
    "sketches",
    "parts",
    "components",
    "uncapped",
    "shortened",
    "remembered",
    "weights",
)
"""Names of the columns of :class:`Updates` that fedclade defines; each is also a property."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Updates:
    """Model updates of n clients in one round, with further numbers about each client.

    An update is a vector of S entries, of which the first D are parameters and the others buffers.

    Parameters
    ----------
    ids
        Ids of the clients, ``[n]``.
    columns
        Tensors ``[n, ...]`` by name, with a row for each client. Columns that fedclade defines,
        such as :attr:`deltas`, are properties of this class. The steps of a method may add further
        columns (:attr:`Made.columns <fedclade.core.Made>`).
    common
        Properties of the updates that do not belong to a single client.
    left_out
        For each queried client that is not in ``ids``, the reason, by client id.
    limited
        For each client whose update or weight was limited, a description with the reason, by
        client id.
    """

    ids: tuple[int, ...]
    columns: Mapping[str, torch.Tensor]
    common: Common
    left_out: Mapping[int, str] = field(default_factory=dict[int, str])
    limited: Mapping[int, str] = field(default_factory=dict[int, str])

    @classmethod
    def of(
        cls,
        *,
        ids: tuple[int, ...],
        sizes: torch.Tensor,
        losses: torch.Tensor,
        norms: torch.Tensor,
        n_parameters: int,
        deltas: torch.Tensor | None = None,
        sums: Sums | None = None,
        aggregation: Aggregation | None = None,
        events: tuple[Event, ...] = (),
        left_out: Mapping[int, str] | None = None,
        **columns: torch.Tensor | None,
    ) -> Updates:
        """Build updates from their columns and common properties, given as keyword arguments.

        Each parameter has the meaning of the property of the same name. Further keyword arguments
        are additional columns. A column that is None is left out.
        """
        given = {"sizes": sizes, "losses": losses, "norms": norms, "deltas": deltas, **columns}
        return cls(
            ids=ids,
            columns={name: column for name, column in given.items() if column is not None},
            common=Common(n_parameters, sums, aggregation, events),
            left_out={} if left_out is None else left_out,
        )

    def with_columns(self, **columns: torch.Tensor | None) -> Updates:
        """Return the updates with some columns replaced, or removed where the argument is None."""
        changed = {**self.columns, **columns}
        kept = {name: column for name, column in changed.items() if column is not None}
        return replace(self, columns=kept)

    def with_common(self, **changes: Any) -> Updates:
        """Return the updates with some properties of :class:`Common` replaced."""
        return replace(self, common=replace(self.common, **changes))

    def column(self, name: str) -> torch.Tensor:
        """Return a column ``[n, ...]`` by its name, such as a column that a method's steps added.

        Raises
        ------
        UpdateError
            If the updates have no such column.
        """
        if name not in self.columns:
            raise UpdateError(
                f"the updates have no column {name!r}; correct the name, or, if the algorithm adds "
                "this column, change the settings that make it unavailable: stream = true, "
                "training on several parts of a client's data, and differential privacy"
            )
        return self.columns[name]

    @property
    def sizes(self) -> torch.Tensor:
        """Number |D_i| of training examples of each client, float64 ``[n]``.

        It is the weight of the client's update in a mean.
        """
        return self.columns["sizes"]

    @property
    def losses(self) -> torch.Tensor:
        """Mean training loss of each client in the round, ``[n]``."""
        return self.columns["losses"]

    @property
    def norms(self) -> torch.Tensor:
        """Norm ‖Δθ_i‖ of each client's update without its buffers, float64 ``[n]``."""
        return self.columns["norms"]

    @property
    def deltas(self) -> torch.Tensor | None:
        """Model update Δθ_i of each client (CFL eq. 1), ``[n, S]``.

        None in a streaming run, which stores :attr:`sums` of updates instead.
        """
        return self.columns.get("deltas")

    @property
    def sketches(self) -> torch.Tensor | None:
        """Signatures by which clients are compared, ``[n, R]``: a row of R numbers per client.

        None if clients are compared by their updates. In a streaming run, the column is always set.
        """
        return self.columns.get("sketches")

    @property
    def parts(self) -> torch.Tensor | None:
        """Signatures of the updates from m parts of each client's data, ``[n, m, R]``.

        None unless clients trained on several parts of their data separately. :attr:`deltas` then
        has the mean over the parts.
        """
        return self.columns.get("parts")

    @property
    def components(self) -> torch.Tensor | None:
        """Index of the mixture component with the largest weight for each client, int64 ``[n]``.

        If the query contained a question that lets clients choose among options, the column has
        the option that each client chose. None if clients neither trained the components of a
        mixture nor made a choice.
        """
        return self.columns.get("components")

    @property
    def uncapped(self) -> torch.Tensor | None:
        """Number of training examples that each client claims to have, float64 ``[n]``.

        None unless the weights (:attr:`sizes`) of some clients were limited to a smaller number.
        """
        return self.columns.get("uncapped")

    @property
    def weights(self) -> torch.Tensor:
        """Weight of each client in means of updates, float64 ``[n]``.

        These are the numbers of training examples (:attr:`sizes`), unless ``aggregate.weights`` of
        the run sets other weights.
        """
        return self.columns.get("weights", self.sizes)

    @property
    def has_weights(self) -> bool:
        """Whether ``aggregate.weights`` of the run sets the weights, and not the method."""
        return "weights" in self.columns

    @property
    def shortened(self) -> torch.Tensor | None:
        """Factor by which the parameters of each update were scaled down, float64 ``[n]``.

        None unless some updates were scaled down because they were too long.
        """
        return self.columns.get("shortened")

    @property
    def remembered(self) -> torch.Tensor | None:
        """Whether each client sent a stored reply to a repeated query, bool ``[n]``.

        Such a client did not train. None if all clients trained.
        """
        return self.columns.get("remembered")

    @property
    def n_parameters(self) -> int:
        """Number D of leading entries of an update that are parameters; the rest are buffers."""
        return self.common.n_parameters

    @property
    def sums(self) -> Sums | None:
        """Weighted sums of updates, one for each model sent out; None without streaming."""
        return self.common.sums

    @property
    def aggregation(self) -> Aggregation | None:
        """Settings of the robust rule that aggregates the updates; None if they are averaged."""
        return self.common.aggregation

    @property
    def events(self) -> tuple[Event, ...]:
        """Events of the query for the run's log, such as a rejected sum."""
        return self.common.events

    @classmethod
    def received(
        cls,
        ids: Sequence[int],
        sizes: Sequence[int],
        deltas: torch.Tensor,
        n_parameters: int,
        losses: torch.Tensor,
        number: int,
    ) -> Updates:
        """Check received updates, and return the usable ones.

        A client is left out if its loss or update is not finite, or if the norm of its update
        exceeds :data:`LARGEST_NORM`.

        Parameters
        ----------
        ids, sizes
            Ids of the n clients, and their numbers of training examples.
        deltas
            The updates ``[n, S]``: one row per client.
        n_parameters
            Number D of leading entries of an update that are parameters.
        losses
            Training loss of each client, ``[n]``.
        number
            Number of the round, for error messages.

        Raises
        ------
        UpdateError
            If ``deltas`` does not have one row for each client; the message names the round.
        """
        if deltas.ndim != 2 or len(deltas) != len(ids):
            shape = tuple(deltas.shape)
            raise UpdateError(
                f"round {number}: updates should be a tensor with one row for each of {len(ids)} "
                f"clients, got shape {shape}; correct the training steps or the middleware that "
                "returned them"
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
        each = cls.of(
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
        rows: Sequence[torch.Tensor],
        size: int,
        n_parameters: int,
        losses: torch.Tensor,
        number: int,
    ) -> Updates:
        """Check updates that arrived as separate tensors, and return the usable ones.

        In contrast to :meth:`received`, the updates are separate tensors ``rows`` of any shapes. A
        client is also left out if its update does not have S = ``size`` entries.
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
    def of_nobody(
        cls, left_out: Mapping[int, str], models: torch.Tensor, n_parameters: int
    ) -> Updates:
        """Return an object without any updates, for a query to which no client replied.

        Parameters
        ----------
        left_out
            Reason for each queried client, by client id.
        models
            The models ``[K, S]`` of the query, which determine the length and type of updates.
        n_parameters
            Number D of leading entries of an update that are parameters.
        """
        none = torch.zeros(0, dtype=torch.float64)
        deltas = models.new_zeros(0, models.shape[1])
        return cls.of(
            ids=(),
            sizes=none,
            losses=none,
            norms=none,
            n_parameters=n_parameters,
            deltas=deltas,
            left_out=left_out,
        )

    @property
    def required_deltas(self) -> torch.Tensor:
        """Model update of each client, ``[n, S]``, for code that requires single updates.

        Raises
        ------
        UpdateError
            If the run streams, and so does not store single updates.
        """
        if self.deltas is None:
            raise UpdateError(
                f"the individual updates of {len(self.ids)} clients are required, but this run "
                "streams, and so stores only sums of updates; set stream = false"
            )
        return self.deltas

    @property
    def senders(self) -> tuple[int, ...]:
        """Ids of the clients that sent an update, including unusable updates."""
        silent = (DROPPED_OUT, NOT_ASKED)
        return (
            *self.ids,
            *(client for client, why in self.left_out.items() if not why.startswith(silent)),
        )

    @property
    def signatures(self) -> torch.Tensor:
        """Vectors by which clients are compared, ``[n, R]``: a row of R numbers per client.

        By default, a client's signature is its update without buffers, so that R = D.

        Raises
        ------
        UpdateError
            If the run streams and stores no signatures.
        """
        if self.deltas is None and self.sketches is not None and self.sketches.shape[1] == 0:
            raise UpdateError(
                f"the signatures of {len(self.ids)} clients are required, but this run streams, "
                "and so stores signatures only if the algorithm requires them; set signatures = "
                "True in the algorithm's requires, or stream = false in the config"
            )
        return (
            self.required_deltas[:, : self.n_parameters] if self.sketches is None else self.sketches
        )

    def select(self, members: Sequence[int]) -> Updates:
        """Return the updates of some clients, in the order of the ids in ``members``.

        Clients that have not replied are skipped. If the rows of the clients follow each other, the
        columns of the result are views of these rows, without a copy.

        Raises
        ------
        UpdateError
            If the run streams, and the members share a sum with other clients.
        """
        rows = self._find_rows(members)
        named = set(members)
        left_out = {client: why for client, why in self.left_out.items() if client in named}
        if torch.equal(rows, torch.arange(len(self.ids))) and len(left_out) == len(self.left_out):
            return self
        sums = None
        if self.sums is not None:
            sums, besides = self.sums.select(rows)
            if len(besides):
                raise UpdateError(
                    f"the updates of clients {self._ids_of_rows(rows)} cannot be separated from "
                    f"the updates of clients {self._ids_of_rows(besides)}, since this run streams, "
                    "and so stores only sums over all clients of a model; set stream = false"
                )
        return Updates(
            ids=tuple(self._ids_of_rows(rows)),
            columns={name: _take_rows(column, rows) for name, column in self.columns.items()},
            common=replace(self.common, sums=sums),
            left_out=left_out,
            limited={client: what for client, what in self.limited.items() if client in named},
        )

    def signatures_of(self, members: Sequence[int]) -> torch.Tensor:
        """Return the signatures ``[m, R]`` of the given clients, except clients without a reply.

        The rows are in the order of ``members``. They are a copy, which lies in a file if it is
        large (:mod:`fedclade.core.file_rows`), so that it can be stored for newcomers.
        """
        return copy_rows(self.signatures, self._find_rows(members).tolist())

    def concat(self, other: Updates) -> Updates:
        """Return the concatenation of these updates and of updates of other clients.

        All updates must be differences from the same models in the same round. A client that is
        left out of one object and has an update in the other object is not left out of the result.
        """
        left_out = {
            c: why
            for c, why in {**self.left_out, **other.left_out}.items()
            if c not in self.ids + other.ids
        }
        limited = {**self.limited, **other.limited}
        events = self.events + other.events
        if not self.ids or not other.ids:
            known = self if self.ids else other
            known = known.with_common(events=events)
            return replace(known, left_out=left_out, limited=limited)
        return Updates(
            ids=self.ids + other.ids,
            columns=self._joined_columns(other),
            common=replace(self.common, sums=_joined_sums(self.sums, other.sums), events=events),
            left_out=left_out,
            limited=limited,
        )

    def _joined_columns(self, other: Updates) -> dict[str, torch.Tensor]:
        """Return the columns of these updates, concatenated with the columns of other updates.

        A column that only one of the two objects has is left out, unless its values for the other
        clients can be derived from other columns.
        """
        mine = {**self.columns}
        theirs = {**other.columns}
        if self.sums is not None and other.sums is not None:
            mine.pop("deltas", None)
        else:
            mine["deltas"] = self.required_deltas
            theirs["deltas"] = other.required_deltas
        if self.sketches is not None and other.sketches is None:
            theirs["sketches"] = other.signatures
        # An object without these columns has not been limited: its clients claim exactly their
        # sizes, and its updates were scaled by the factor 1. All of its clients have trained.
        for columns, sizes in ((mine, self.sizes), (theirs, other.sizes)):
            if self.uncapped is not None or other.uncapped is not None:
                columns.setdefault("uncapped", sizes)
            if self.shortened is not None or other.shortened is not None:
                columns.setdefault("shortened", torch.ones_like(sizes))
            if self.remembered is not None or other.remembered is not None:
                columns.setdefault("remembered", torch.zeros(len(sizes), dtype=torch.bool))
        both = [name for name in mine if name in theirs]
        return {name: torch.cat([mine[name], theirs[name]]) for name in both}

    @cached_property
    def _row_of(self) -> Mapping[int, int]:
        return {client: row for row, client in enumerate(self.ids)}

    def _find_rows(self, members: Sequence[int]) -> torch.Tensor:
        return torch.tensor(
            [self._row_of[m] for m in members if m in self._row_of], dtype=torch.int64
        )

    def _ids_of_rows(self, rows: torch.Tensor) -> list[int]:
        """Return the client ids of some rows."""
        return [self.ids[row] for row in rows.tolist()]


def _take_rows(column: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return some rows of a column ``[n, ...]``: a view if they follow each other, else a copy."""
    if len(rows) == 0:
        return column[:0]
    first = int(rows[0])
    last = first + len(rows)
    if torch.equal(rows, torch.arange(first, last)):
        return column[first:last]
    return column[rows]


def _joined_sums(mine: Sums | None, theirs: Sums | None) -> Sums | None:
    """Return the concatenated sums of two disjoint sets of clients; None if one set has no sums."""
    if mine is None or theirs is None:
        return None
    behind = theirs.group + len(mine.groups)
    groups = torch.cat([mine.groups, theirs.groups])
    return Sums(groups, torch.cat([mine.group, behind]), max(mine.noise, theirs.noise))


def _what_is_wrong(delta: torch.Tensor, norm: float, loss: float) -> str:
    if entries := int((~torch.isfinite(delta)).sum()):
        return f"{entries} of {len(delta)} entries of the update are NaN or infinite"
    return (
        f"loss {loss}" if norm <= LARGEST_NORM else f"norm {norm:.3g}, more than {LARGEST_NORM:.3g}"
    )


def make_usable(deltas: torch.Tensor, losses: torch.Tensor) -> None:
    """Change unusable updates in place so that :meth:`Updates.received` accepts all updates.

    The function is for clients with differential privacy, for which a missing reply would reveal
    something about the data without any noise. Clipping and noise are applied afterwards, so an
    update may be changed in any way here. An update with an entry that is not finite is replaced by
    zeros. An update with a norm above half of :data:`LARGEST_NORM` is scaled down to this norm. All
    losses are set to 0.

    Parameters
    ----------
    deltas
        The updates ``[n, S]``: one row per client.
    losses
        The training losses ``[n]``.
    """
    is_finite = torch.isfinite(deltas).all(dim=1)
    deltas[~is_finite] = 0
    norms = row_norms(deltas)
    longest = LARGEST_NORM / 2  # well below the limit, so that rounding cannot exceed it
    scale = (longest / norms.clamp(min=longest)).to(deltas)
    is_too_long = (norms > longest).to(deltas.device)
    deltas[is_too_long] *= scale[is_too_long, None]
    losses.zero_()


def row_norms(rows: torch.Tensor, from_: torch.Tensor | None = None) -> torch.Tensor:
    """Return the Euclidean norm of each row of a matrix ``[n, m]``, float64 ``[n]`` on the CPU.

    If a vector ``from_ [m]`` is given, the result is the distance of each row from this vector.
    """
    n, m = rows.shape
    width = max(1, min(m, LONGEST_CONVERTED))
    at_once = max(1, min(n, CONVERTED_AT_A_TIME // width))
    # All memory is allocated once. If every conversion allocated its own, the small result of the
    # one before would lie in the gap that the conversion left, and the next would not fit into it.
    converted = torch.empty(at_once * width, dtype=torch.float64, device=rows.device)
    differences = None if from_ is None else rows.new_empty(at_once * width)
    pieces = [slice(start, start + width) for start in range(0, m, width)] or [slice(0)]
    norms = torch.empty(len(pieces), n, dtype=torch.float64, device=rows.device)
    for place, piece in enumerate(pieces):
        for start in range(0, n, at_once):
            some = rows[start : start + at_once, piece]
            if from_ is not None and differences is not None:
                there = differences[: some.numel()].view(some.shape)
                some = torch.sub(some, from_[piece], out=there)
            exact = converted[: some.numel()].view(some.shape).copy_(some)
            torch.linalg.vector_norm(exact, dim=1, out=norms[place, start : start + at_once])
    if len(pieces) == 1:
        return norms[0].cpu()
    return torch.linalg.vector_norm(norms.cpu(), dim=0)
