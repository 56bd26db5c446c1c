"""Policy of a client: its own limits on the server's queries, which no run can change."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from flwr.app import RecordDict

from fedclade.core import (
    FORBIDS,
    ConfigError,
    DataSpec,
    LocalRule,
    LocalTraining,
    MetaLearning,
    MoreauEnvelope,
    PolicyError,
    RowQuery,
    UpdateError,
    check_declared,
    optimizer_class,
    require,
    unknown,
)
from fedclade.flower.kinds import ALWAYS, KINDS, SKETCH, allowable, disclosures, load_installed
from fedclade.flower.lasting_record import LastingRecord, RecordKind
from fedclade.flower.models_sent import models_of_mixture
from fedclade.flower.wire import Content, shown

# Counts of the queries that a client has accepted, over all its runs.

FILE = "policy.json"  # in the client's folder


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Counts of a client's replies so far; ``policy.json`` has these fields."""

    # updates, gradients, subspaces and descriptors; each replicate counts separately
    releases: int = 0
    partings: int = 0  # equations from sums over splits of the data, as SplitLog counts them
    # scored models, bits of a choice among models, models trained for the client itself, and
    # reports of shifts
    evaluations: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


class UsageLog:
    """Record of a client's usage, over all its runs.

    A query is counted when it is accepted, before anything is computed for it. So a query that is
    refused later, that fails, or that a crash ends counts like a query with a reply.

    Parameters
    ----------
    folder
        Folder of the client; None if it has none.
    """

    def __init__(self, folder: Path | None) -> None:
        self._record = LastingRecord(folder, _KIND)

    def usage(self, state: RecordDict | None = None) -> Usage:
        """Return the usage so far; raise a PolicyError if the file is damaged."""
        return self._record.read(state)

    def book(
        self, cost: Usage, check: Callable[[Usage], object], state: RecordDict | None = None
    ) -> None:
        """Count an accepted query.

        There must be no reply if this fails, or if ``check`` rejects the new total.
        """
        with self._record.alone():  # another process may have counted a query meanwhile
            usage = self.usage(state) + cost
            check(usage)
            self._record.write(usage, state)


def cost_of(kind: str, content: Content, *, is_closed: bool = False) -> Usage:
    """Return the usage that the reply to a query costs.

    A client that ``is_closed`` withholds the losses of models that it stores.
    """
    if kind in ("train", "gradients"):
        # If the client stores the model, only the loss leaves it, as when a model is scored.
        if kind == "train" and content.get("own", bool) and not content.get("shares", bool):
            return Usage(evaluations=0 if is_closed else 1)
        replicates = max(1, content.get("replicates", int))  # the query counts before it is checked
        models = max(1, models_of_mixture(content))  # one update leaves for each model
        return Usage(releases=replicates * models)
    if kind == "evaluate":
        # without a vector the client scores its own model
        return Usage(evaluations=max(1, len(content.vectors)))
    if kind == "choose":
        return Usage(evaluations=bits_of_choice(len(content.vectors)))
    rows = KINDS[kind].row_query
    return Usage() if rows is None else Usage(**{rows.counts_as: 1})


def bits_of_choice(models: int) -> int:
    """Return the number of bits that a choice among models reveals; at least 1, as for a score."""
    return max(1, (models - 1).bit_length())


def _decoded(stored: Mapping[str, Any]) -> Usage:
    if any(type(value) is not int or value < 0 for value in stored.values()):
        raise ValueError(f"{shown(dict(stored))} is no count")
    return Usage(**stored)


def _larger(one: Usage, other: Usage) -> Usage:
    """Return the larger of two counts, separately for each field."""
    return Usage(**{name: max(value, getattr(other, name)) for name, value in asdict(one).items()})


_KIND = RecordKind(
    file=FILE,
    what="the count of what this client has answered",
    consequence="nothing leaves it",
    empty=Usage,
    encoded=asdict,
    decoded=_decoded,
    combined=_larger,
)

QUERIES = allowable()
"""Kinds of queries about a client's data, which need its permission."""

# D / CLEAR_SHARE is the largest number of directions in which signs of updates with D parameters
# may leave unmasked, see ``max_clear`` of :class:`Policy`.
CLEAR_SHARE = 2
EXAMPLES_AN_EQUATION = 8  # training examples for each equation: see :class:`Policy`
MOST_EQUATIONS = 64  # unless max_partings is set: checking all equations takes time
# Largest share of one example in a combination of sums, in squared weights: see :class:`Policy`.
LARGEST_SHARE = 0.25

MOST_SCORES = 50_000
"""Largest number of models that a client scores in all, unless its policy sets another."""

MOST_CLOSED_SCORES = 100
"""Default limit on scored models of a client with a privacy budget or ``secure-aggregation``.

It is low because each score reveals some bits of the client's data.
"""

_NAMES = {
    "allow": "names of questions",
    "imports": "names such as 'my_models:resnet'",
    "disclose": "names of what leaves it in clear",
}

_FLAGS = ("secure-aggregation", "share-schema", "trust-server-keys")

_LOWEST = {"max_clear": 0, "max_colluders": 0, "max_sketches": 0, "min_honest": 2}

_NUMBERS = ("scores-epsilon",)

MOST_STEPS_WEIGHED = 1_000
LARGEST_WEIGHT = 1e100  # weight of a step relative to the last step

_FADING = {"sgd": ("dampening",), "adagrad": ("lr_decay",)}
"""Options of optimizers that give some steps of a round a much larger weight than others."""

_UNEVEN = ("adafactor", "asgd", "rprop")
"""Optimizers with steps that shrink or grow, by a factor that the server can choose."""

_DECOUPLED = ("adamw", "muon")
"""Optimizers that multiply the model by 1 − η · weight_decay, independent of the gradients."""

_FLOORS = ("eps", "initial_accumulator_value")
"""Options of optimizers that divide by the size of gradients.

Values above the usual ones determine the step size.
"""

NEARLY = 0.9
"""Tolerance for the number of examples in an update.

An ordinary weight decay undoes a little of each step. It must not lead to a refusal where there
are just enough examples.
"""

LARGEST_PULL = 2.0
"""Limit on ηλ in pFedMe: from ηλ = 2 on its steps diverge, each longer than the one before."""

_IN_ALL = {
    "max_releases": "updates in all",
    "max_partings": "equations from sums over parts of its examples in all",
    "max_evaluations": "scored models in all",
}


_IN_A_ROW = {"max_vectors": "vectors of its data", "max_components": "components of a descriptor"}
"""Limits on the amounts in a row query, see :meth:`RowQuery.amounts <fedclade.RowQuery>`."""


class NotDisclosedError(PolicyError):
    """Refusal of a query that discloses data not named by the client's policy.

    It depends on the client's node config alone.
    """


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Rules on what one client allows. They belong to the client: no run can change them.

    With the defaults every algorithm can run with its own defaults, except algorithms that query
    gradients (CFL with ``similarity = "gradients"``, IFCA with ``average = "gradients"``),
    subspaces (PACFL), shifts (FlexCFL) or descriptors (FLUX).

    A server that queries replicates receives sums over splits of the data, and knows which examples
    are in which split. From as many independent sums as there are examples it could compute the
    contribution of every single example. So ``max_partings`` limits the number of equations, and
    in no combination of all sums may one example have more than a quarter of the squared weights
    (:data:`LARGEST_SHARE`, or 2/``min_part`` if that is more). Splits that were used before add no
    equation; see :mod:`fedclade.flower.data_splits`.

    A client with ``secure_aggregation`` or a privacy budget is closed: in addition to masked or
    noisy updates, only what ``disclose`` names leaves it.

    Raises
    ------
    ConfigError
        If a value is out of range or a name is unknown; one line for each.
    """

    # kinds of queries, of QUERIES, that the client replies to
    allow: tuple[str, ...] = ("train", "evaluate", "statistics")
    # objects ``module:name`` that a run may name, which the client then imports
    imports: tuple[str, ...] = ()
    max_epochs: int = 100  # epochs of local training
    max_steps: int = 50_000  # local steps, over all replicates or all models of a mixture
    max_models: int = 64  # models that one query has scored or drawn, or models of a mixture
    max_replicates: int = 8  # replicates in one query
    min_part: int = 10  # fewest training examples for a replicate or a sum
    # equations in all; None: one for EXAMPLES_AN_EQUATION examples, at most MOST_EQUATIONS
    max_partings: int | None = None
    max_vectors: int = 5  # vectors of a subspace
    max_components: int = 100  # components of a descriptor
    max_releases: int = 5_000  # updates that leave the client, in all
    # models that are scored, or trained for the client itself, in all
    max_evaluations: int | None = None
    secure_aggregation: bool = False  # whether updates leave only under masks, for a sum
    # clients of a sum that may collude with the server, without learning more than the sum
    max_colluders: int = 1
    min_honest: int = 3  # fewest clients of a sum, this one included, that do not collude
    # whether other clients' keys may come from the server: no guarantee against a malicious server
    trust_server_keys: bool = False
    # whether categories, labels and words leave; None: only without differential privacy
    share_schema: bool | None = None
    # data, of ``disclosures()``, that may leave a closed client in clear
    disclose: tuple[str, ...] = ()
    # directions whose signs leave with masked updates; None: D / CLEAR_SHARE, or 0
    max_clear: int | None = None
    max_sketches: int = 1_000  # sketches of masked updates, and of splits of them, in all
    # privacy cost ε of all scores; None: SCORES_SHARE of the client's budget
    scores_epsilon: float | None = None

    def __post_init__(self) -> None:
        load_installed(self.allow)
        known = {
            "question in allow:": (self.allow, allowable()),
            "name in disclose:": (self.disclose, disclosures()),
        }
        problems = [
            unknown(what, name, possible)
            for what, (names, possible) in known.items()
            for name in names
            if name not in possible
        ]
        if problems:
            raise ConfigError("\n".join(problems))
        texts = {*_NAMES, *(name.replace("-", "_") for name in (*_FLAGS, *_NUMBERS))}
        limits = {
            name: value
            for name, value in asdict(self).items()
            if name not in texts and value is not None
        }
        lowest = {name: _LOWEST.get(name, 0 if name in _IN_ALL else 1) for name in limits}
        epsilon = self.scores_epsilon
        require(
            *(
                (_key(n), value, value >= lowest[n], f"at least {lowest[n]}")
                for n, value in limits.items()
            ),
            ("scores-epsilon", epsilon, epsilon is None or epsilon > 0, "greater than 0"),
        )

    @classmethod
    def of(cls, node_config: Mapping[str, Any]) -> Policy:
        """Return the policy that a node config sets: keys are field names with ``-`` for ``_``.

        Raises
        ------
        ConfigError
            If a value has a wrong type, or if an unknown key begins with ``max-`` or ``min-``,
            since a misspelt limit must not be ignored.
        """
        names = {_key(field.name): field.name for field in fields(cls)}
        given: dict[str, Any] = {}
        problems: list[str] = []
        for key, value in node_config.items():
            if key in _NAMES:
                if isinstance(value, str):
                    given[key] = tuple(value.replace(",", " ").split())
                else:
                    problems.append(
                        f"{key} in the node config should be {_NAMES[key]}, got {shown(value)}"
                    )
            elif key in _NUMBERS and type(value) in (int, float):
                given[names[key]] = float(value)
            elif (
                key in names
                and key not in _NUMBERS
                and type(value) is (bool if key in _FLAGS else int)
            ):
                given[names[key]] = value
            elif key in names:
                kind = "a number" if key in _NUMBERS else "a whole number"
                kind = "true or false" if key in _FLAGS else kind
                problems.append(f"{key} in the node config should be {kind}, got {shown(value)}")
            elif key == "min-group":
                problems.append(
                    "min-group in the node config is gone: a sum is of at least max-colluders + "
                    "min-honest clients; set these"
                )
            elif key.startswith(("max-", "min-")):
                problems.append(
                    unknown(
                        "limit in the node config:",
                        key,
                        names.keys() - {*_NAMES, *_FLAGS, *_NUMBERS},
                    )
                )
        if problems:
            raise ConfigError("\n".join(problems))
        return cls(**given)

    def is_closed(self, *, private: bool) -> bool:
        """Return whether only what ``disclose`` names leaves the client in clear.

        This holds with a privacy budget, if ``private``, or with secure aggregation.
        """
        return private or self.secure_aggregation

    def most_scores(self, *, private: bool) -> int:
        """Return the largest number of models that may be scored in all."""
        if self.max_evaluations is not None:
            return self.max_evaluations
        return MOST_CLOSED_SCORES if self.is_closed(private=private) else MOST_SCORES

    def discloses_scores(self, *, private: bool) -> bool:
        """Return whether the client reports scores on held-out data."""
        return "evaluate" in self.allow and (
            not self.is_closed(private=private) or "scores" in self.disclose
        )

    def check_kind(self, kind: str) -> None:
        """Check that a kind of query is allowed.

        Raises
        ------
        PolicyError
            If it is not; as in all these checks, the error reports how to allow it.
        """
        name = KINDS[kind].allowed_as
        if name and name not in self.allow:
            allowed = " ".join([*self.allow, name])
            raise PolicyError(
                f'{FORBIDS} the question {name!r}; to allow it, set allow="{allowed}" in its node '
                "config"
            )

    def check_declared(self, kind: str, *, private: bool) -> None:
        """Check that the class of a query declares what it discloses, if the client is closed."""
        query = KINDS[kind].query
        if query is None or not self.is_closed(private=private):
            return
        try:
            check_declared(query)
        except ConfigError as error:
            raise NotDisclosedError(f"{FORBIDS} the question {kind!r}: {error}") from None

    def check_disclosed(self, name: str, what: str, *, private: bool) -> None:
        """Check that data may leave the client in clear.

        Parameters
        ----------
        name
            Name of the data in ``disclose``.
        what
            Description of the query for it, for the error.
        private
            Whether the client has a privacy budget.
        """
        if not self.is_closed(private=private) or name in (*ALWAYS, *self.disclose):
            return
        because = (
            "a client with a privacy budget" if private else "a client with secure-aggregation"
        )
        named = " ".join([*self.disclose, name])
        raise NotDisclosedError(
            f"{FORBIDS} {what}: {because} discloses only what its policy names; to allow it, set "
            f'disclose="{named}" in its node config'
        )

    def check_masked(self, kind: str) -> None:
        """Check that an update may leave without masks."""
        if self.secure_aggregation and kind in ("train", "gradients"):
            raise NotDisclosedError(
                f"{FORBIDS} updates outside of a sum (secure-aggregation in its node config); set "
                "network.secure_aggregation = true in the run config"
            )

    def check_sums_possible(self, *, has_peers: bool, has_folder: bool) -> None:
        """Check that a client that insists on secure sums has the files that protect it in them.

        Raises
        ------
        ConfigError
            If it has no list of peers or no folder.
        """
        if not self.secure_aggregation or self.trust_server_keys:
            return
        if not has_peers:
            raise ConfigError(
                "secure-aggregation=true in the node config needs a peers-file, a list of the "
                "other clients' keys from elsewhere than from the server, which could otherwise "
                "play them all; or set trust-server-keys=true, which protects from no server that "
                "lies"
            )
        if not has_folder:
            raise ConfigError(
                "secure-aggregation=true in the node config needs a folder: a server may put two "
                "questions of a sum at once, and only there can the client note that it has "
                "answered one; set folder in the node config"
            )

    def check_colluders(self, colluders: int) -> None:
        """Check that a sum copes with as many colluding clients as this client demands."""
        if colluders < self.max_colluders:
            raise PolicyError(
                f"this client takes part in sums that cope with {self.max_colluders} colluding "
                "clients (max-colluders in its node config), and is asked for one that copes with "
                f"{colluders}; set network.secure_colluders = {self.max_colluders}"
            )

    def check_group(self, clients: int, colluders: int) -> None:
        """Check that a sum has enough clients for this client's update."""
        least = colluders + self.min_honest
        if clients < least:
            raise PolicyError(
                f"this client takes part in sums of at least {least} clients (min-honest in its "
                f"node config, and {colluders} that may collude), and is asked for one of {clients}"
            )

    def check_clear(self, count: int, n_parameters: int) -> None:
        """Check the number of signs, of a compared sketch, that leave unmasked with an update.

        Parameters
        ----------
        count
            Number of signs.
        n_parameters
            Number of parameters D of the model.
        """
        if count:
            self.check_disclosed(SKETCH, "sketches of its updates", private=False)
        most = self.most_clear(n_parameters)
        if count > most:
            raise PolicyError(
                f"{FORBIDS} to send {count} numbers unmasked beside an update of {n_parameters} "
                f"parameters, at most {most} (max-clear in its node config)"
            )

    def most_clear(self, n_parameters: int) -> int:
        """Return the largest number of directions in which signs of updates may leave, in all.

        The default depends on the number of parameters D, ``n_parameters``.
        """
        if self.secure_aggregation and SKETCH not in self.disclose:
            return 0
        return n_parameters // CLEAR_SHARE if self.max_clear is None else self.max_clear

    def check_sketches(self, directions: int, sketches: int, n_parameters: int) -> None:
        """Check that the policy allows so many sketches, and directions of all of them together."""
        most = self.most_clear(n_parameters)
        if directions > most:
            raise PolicyError(
                f"{FORBIDS} sketches by another projection: with it signs of updates in "
                f"{directions} directions would have left, at most {most} (max-clear in its node "
                "config)"
            )
        self._check("sketches in all", sketches, "max_sketches")

    def check_training(
        self,
        spec: LocalTraining,
        replicates: int,
        examples: int,
        personal_epochs: int = 0,
        times: int = 1,
        *,
        leaves: bool = True,
    ) -> None:
        """Check the local training of a client with ``examples`` training examples.

        Parameters
        ----------
        spec
            Optimizer, epochs and batch size of local training.
        replicates
            Number of splits of the data that are trained on separately; see
            :class:`~fedclade.core.Round`.
        examples
            Number of training examples.
        personal_epochs
            Epochs of training only the personal parameters; see :class:`~fedclade.core.Round`.
        times
            Factor on the number of steps: the gradients that a local rule takes in a step, times
            the models of a mixture.
        leaves
            Whether an update leaves the client, now or later. If none does, the steps may use
            fewer than ``min_part`` examples.
        """
        parts = [
            len(range(part, examples, replicates)) for part in range(min(replicates, examples))
        ]
        own = spec.in_epochs(max(1, personal_epochs))
        before = sum(map(own.steps_with, parts)) if personal_epochs else 0
        self._check("replicates", replicates, "max_replicates")
        if replicates > 1 and examples // replicates < self.min_part:
            raise PolicyError(
                f"{FORBIDS} {replicates} replicates from {examples} training examples, since each "
                f"must be made from at least {self.min_part} (min-part in its node config)"
            )
        seen = min(min(part, spec.passed(part)) for part in parts)
        if leaves and seen < min(self.min_part, *parts):
            raise PolicyError(
                f"{FORBIDS} an update from {seen} training examples, since its steps must take at "
                f"least {self.min_part} (min-part in its node config)"
            )
        self._check("epochs", max(map(spec.epochs_with, parts)) + personal_epochs, "max_epochs")
        self._check("steps", times * (sum(map(spec.steps_with, parts)) + before), "max_steps")

    def check_retention(
        self,
        spec: LocalTraining,
        round_number: int,
        examples: int,
        last_batch: int,
        *,
        rule: LocalRule | None = None,
    ) -> None:
        """Check that an update retains enough of its earlier steps, despite the later ones.

        A step of size η adds the gradient of its batch to a model of which weight decay and the
        proximal term keep a share of 1 − η(weight_decay + μ). With a share of 0 an update is the
        gradient of the last batch, regardless of the number of earlier examples. So the examples of
        each batch count by the squared weight of its step in the update, relative to the largest;
        the last batch may be smaller than others.

        If an optimizer divides gradients by their size, the server can choose a model at which that
        size is arbitrary. So with weight decay or a proximal term only the last batch counts,
        unless the decay is decoupled from gradients.

        Parameters
        ----------
        spec
            Optimizer, epochs and batch size of local training.
        round_number
            Number of the round, which the step size may depend on.
        examples
            Number of training examples that the update is made from.
        last_batch
            Number of examples in the last batch.
        rule
            Local rule, such as :class:`~fedclade.core.MoreauEnvelope`; None for ordinary training.
        """
        steps = spec.steps_with(examples)
        if steps == 1:
            return
        decay = _decay_of(spec, round_number, rule)
        if _may_keep_last_alone(spec):
            squares = [1.0]
        elif isinstance(rule, MoreauEnvelope):
            squares = squared_weights_of_envelope(rule, spec, round_number, steps)
        elif decay == 0:
            return
        else:
            squares = _squared_weights(decay, spec.momentum or 0.0, steps)
        counted = (
            squares[0] * last_batch + sum(squares[1:]) * min(spec.batch_size, examples)
        ) / max(squares)
        least = min(self.min_part, examples)
        if counted < NEARLY * least:
            raise PolicyError(
                f"{FORBIDS} steps that undo those before them, since an update would be made from "
                f"about {counted:.2g} training examples, and must be from at least {least} "
                "(min-part in its node config); lower local.weight_decay, local.mu or the "
                "optimizer's own decay in local.options, take the optimizer sgd or adamw, or "
                "raise local.batch_size or local.smallest_batch"
            )

    def check_share(self, share: float, besides: float = 0.0) -> None:
        """Check the largest share of one example in a combination of sums over splits.

        Shares refer to squared weights. ``besides`` is added to the limit.
        """
        most = max(LARGEST_SHARE, 2 / self.min_part) + besides
        if share > most:
            raise PolicyError(
                f"{FORBIDS} a split of its examples by which one example has a share of "
                f"{share:.2f} in a combination of sums, at most {most:.2f} (min-part in its node "
                "config)"
            )

    def check_sum(self, examples: int, what: str = "sums") -> None:
        """Check that a client has enough training examples for sums of them or similar values."""
        if examples < self.min_part:
            raise PolicyError(
                f"{FORBIDS} {what} of {examples} training examples, of which there must be at "
                f"least {self.min_part} (min-part in its node config)"
            )

    def check_models(self, count: int) -> None:
        """Check the number of models in one query."""
        self._check("models in one question", count, "max_models")

    def check_rows(self, query: RowQuery, spec: DataSpec, examples: int) -> None:
        """Check a query for a row of numbers about a client's data."""
        if query.needs_min_part:
            self.check_sum(examples, query.kind)
        for limit, amount in query.amounts(spec).items():
            if limit not in _IN_A_ROW:
                known = ", ".join(_IN_A_ROW)
                raise ConfigError(
                    f"amounts of {type(query).__name__} should be of limits of a policy ({known}), "
                    f"got {limit!r}"
                )
            self._check(_IN_A_ROW[limit], amount, limit)

    def check_usage(self, after: Usage, examples: int, *, private: bool = False) -> None:
        """Check the usage of a client with ``examples`` training examples, after a reply."""
        allowed = replace(self, max_evaluations=self.most_scores(private=private))
        if self.max_partings is None:
            allowed = replace(
                allowed, max_partings=min(examples // EXAMPLES_AN_EQUATION, MOST_EQUATIONS)
            )
        for limit, what in _IN_ALL.items():
            allowed._check(what, getattr(after, limit.removeprefix("max_")), limit)

    def _check(self, what: str, value: int, limit: str) -> None:
        most = getattr(self, limit)
        if value > most:
            raise PolicyError(
                f"{FORBIDS} {shown(value)} {what}, at most {most} ({_key(limit)} in its node "
                "config)"
            )


def check_allowed(
    kind: str, ids: Sequence[int], left_out: Mapping[int, str], connected: int
) -> None:
    """End a run if clients forbid its query, since repeating the query would change nothing.

    It ends if all clients of the query forbid it and are more than half of the connected clients,
    since otherwise a few clients could end every run.

    Parameters
    ----------
    kind
        Kind of the query.
    ids
        Clients of the query.
    left_out
        Reason of each client that is left out.
    connected
        Number of connected clients.

    Raises
    ------
    UpdateError
        If the run has to end.
    """
    forbidding = [client for client in ids if left_out.get(client, "").startswith(FORBIDS)]
    if len(forbidding) == len(ids) and 2 * len(ids) > connected:
        raise UpdateError(
            f"none of {len(ids)} clients answers the question {kind!r}; client {ids[0]} says: "
            f"{left_out[ids[0]]}"
        )


def _may_keep_last_alone(spec: LocalTraining) -> bool:
    """Return whether the server's choices allow an update that is made from only the last batch."""
    name = str(spec.optimizer)
    if name in _UNEVEN or any(spec.options.get(option) for option in _FADING.get(name, ())):
        return True
    if name == "sgd":
        return False
    defaults = inspect.signature(optimizer_class(name)).parameters
    if any(
        spec.options[option] != defaults[option].default
        for option in _FLOORS
        if option in spec.options
    ):
        return True
    is_decoupled = name in _DECOUPLED or bool(spec.options.get("decoupled_weight_decay"))
    return spec.mu > 0 or ((spec.weight_decay or 0.0) > 0 and not is_decoupled)


def _decay_of(spec: LocalTraining, round_number: int, rule: LocalRule | None) -> float:
    """Return the share of a model by which weight decay and proximal term shrink it in one step."""
    decay = (spec.weight_decay or 0.0) + spec.mu
    # Meta-learning takes the gradient after another step, which has weight decay, too.
    if isinstance(rule, MetaLearning):
        decay *= (1 - rule.alpha * decay) ** (2 if rule.hessian else 1)
    return spec.lr_at(round_number) * decay


def squared_weights_of_envelope(
    rule: MoreauEnvelope, spec: LocalTraining, round_number: int, steps: int
) -> list[float]:
    """Return the squared weights of the gradients of pFedMe's steps in the final model.

    The last step's weight is first. With the weight decay κ, a step is K times
    θ ← θ − η_θ(g + κθ + λ(θ − w)), and then w ← w − ηv with v ← βv + λ(w − θ). The weights of w, θ
    and v in the final w are computed from the last step back to the first.
    """
    lr = spec.lr_at(round_number)
    momentum = spec.momentum or 0.0
    pull = rule.lr * rule.lam
    kept = 1 - pull - rule.lr * (spec.weight_decay or 0.0)
    if lr * rule.lam >= LARGEST_PULL or abs(kept) >= 1:
        return [1.0]
    of_w = 1.0
    of_theta = 0.0
    of_velocity = 0.0
    squares: list[float] = []
    for _ in range(min(steps, MOST_STEPS_WEIGHED)):
        of_next = of_velocity - lr * of_w
        of_w += rule.lam * of_next
        of_theta -= rule.lam * of_next
        of_velocity = momentum * of_next
        square = 0.0
        for _ in range(rule.steps):
            square += of_theta**2
            of_w += pull * of_theta
            of_theta *= kept
        squares.append(square)
        if abs(of_w) > LARGEST_WEIGHT:
            break
    return squares if max(squares) > 0 else [1.0]


def _squared_weights(decay: float, momentum: float, steps: int) -> list[float]:
    """Return the squared weights of the gradients of SGD's steps in the final model.

    The last step's weight is first. ``decay`` is η(weight_decay + μ). The computation stops after
    :data:`MOST_STEPS_WEIGHED` steps, or at a weight above :data:`LARGEST_WEIGHT`, since the steps
    before do not change the result.
    """
    weight = 1.0
    velocity = 1.0
    squares: list[float] = []
    for _ in range(min(steps, MOST_STEPS_WEIGHED)):
        squares.append(weight**2)
        velocity = momentum * velocity - decay * weight
        weight += velocity
        if abs(weight) > LARGEST_WEIGHT:
            break
    return squares


def _key(name: str) -> str:
    return name.replace("_", "-")
