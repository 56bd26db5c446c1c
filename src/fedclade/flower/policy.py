"""Policy of a client: its own limits on the server's queries, which no run can change.

A client is called closed if it has a privacy budget or insists on secure aggregation: in addition
to masked or noisy updates, it sends only data that its policy names in ``disclose``.
"""

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
    """Counts of a client's replies over all its runs; ``policy.json`` has these fields."""

    # updates, gradients, subspaces and descriptors; the update of each split counts separately
    releases: int = 0
    # linear equations in the contributions of single examples, from updates of parts of the data;
    # see SplitLog
    partings: int = 0
    # scored models, bits of a choice among models, models trained for the client itself, and
    # reports of shifts
    evaluations: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


class UsageLog:
    """Record of the counts of a client's replies, over all its runs.

    A query is counted when it is accepted, before anything is computed for it. So a query that is
    refused later, that fails, or that ends in a crash counts like a query with a reply.

    Parameters
    ----------
    folder
        Folder of the client; None if the client has no folder.
    """

    def __init__(self, folder: Path | None) -> None:
        self._record = LastingRecord(folder, _KIND)

    def usage(self, state: RecordDict | None = None) -> Usage:
        """Return the counts of replies so far; raise a PolicyError if the record is damaged."""
        return self._record.read(state)

    def book(
        self, cost: Usage, check: Callable[[Usage], object], state: RecordDict | None = None
    ) -> None:
        """Count an accepted query; if this raises an error, the client must not reply.

        Parameters
        ----------
        cost
            Counts that the query adds.
        check
            Function that raises an error if the new counts exceed a limit.
        state
            Record that Flower stores for the client between two messages.
        """
        with self._record.alone():  # another process may have counted a query meanwhile
            usage = self.usage(state) + cost
            check(usage)
            self._record.write(usage, state)


def cost_of(kind: str, content: Content, *, is_closed: bool = False) -> Usage:
    """Return the counts that the reply to a query adds to a client's usage.

    A query to train the model that a client stores itself counts as one evaluation, since the reply
    contains only the training loss. For a closed client it counts as nothing, since a closed client
    does not report this loss.

    Parameters
    ----------
    kind
        Kind of the query.
    content
        Content of the query.
    is_closed
        Whether the client has a privacy budget or insists on secure aggregation.
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
    """Return how many bits of information a client's choice among ``models`` models reveals.

    This is the number of bits by which all possible choices can be distinguished, at least 1.
    """
    return max(1, (models - 1).bit_length())


def _decoded(stored: Mapping[str, Any]) -> Usage:
    """Read a client's counts of replies from JSON values; raise a ValueError if one is no count."""
    if any(type(value) is not int or value < 0 for value in stored.values()):
        raise ValueError(
            "the count of a client's replies should contain only whole numbers of at least 0, got "
            f"{shown(dict(stored))}"
        )
    return Usage(**stored)


def _larger_counts(one: Usage, other: Usage) -> Usage:
    """Return the larger value of two records of counts, separately for each field."""
    return Usage(**{name: max(value, getattr(other, name)) for name, value in asdict(one).items()})


_KIND = RecordKind(
    file=FILE,
    what="the count of this client's replies",
    consequence="this client sends no reply",
    empty=Usage,
    encoded=asdict,
    decoded=_decoded,
    combined=_larger_counts,
)

QUERIES = allowable()
"""Kinds of queries about a client's data, which need the permission of the client's policy."""

# D / CLEAR_SHARE is the largest number of directions (random projections) of which a client sends
# the signs unmasked, for a model with D parameters; see ``max_clear`` of :class:`Policy`.
CLEAR_SHARE = 2
EXAMPLES_AN_EQUATION = 8  # training examples for each equation: see :class:`Policy`
MOST_EQUATIONS = 64  # unless max_partings is set: checking all equations takes time
# Largest share of one example in a combination of sums, in squared weights: see :class:`Policy`.
LARGEST_SHARE = 0.25

MOST_SCORES = 50_000
"""Default limit on the number of models that a client evaluates in all."""

MOST_CLOSED_SCORES = 100
"""Default limit on the models that a client with a privacy budget or secure aggregation evaluates.

The limit is low because each score reveals some bits of information on the client's data.
"""

_NAMES = {
    "allow": "names of kinds of queries",
    "imports": "names such as 'my_models:resnet'",
    "trainers": "names such as 'moon' or 'my_training:train'",
    "disclose": "names of data that may leave the client in clear",
}

_FLAGS = ("secure-aggregation", "share-schema", "trust-server-keys")

_LOWEST = {"max_clear": 0, "max_colluders": 0, "max_sketches": 0, "min_honest": 2}

_NUMBERS = ("scores-epsilon",)

MOST_STEPS_WEIGHED = 1_000
LARGEST_WEIGHT = 1e100  # weight of a step relative to the last step

_FADING = {"sgd": ("dampening",), "adagrad": ("lr_decay",)}
"""Options of optimizers that give some steps of a round a much larger weight than other steps."""

_UNEVEN = ("adafactor", "asgd", "rprop")
"""Optimizers whose steps shrink or grow during a round, by a factor that a server can choose."""

_DECOUPLED = ("adamw", "muon")
"""Optimizers with decoupled weight decay.

They multiply the model by 1 − η · weight_decay (η: step size), independent of the gradients.
"""

_FLOORS = ("eps", "initial_accumulator_value")
"""Options that are added to the divisor of optimizers that divide by the size of gradients.

Values above the default make the step size depend on the size of the gradients again.
"""

NEARLY = 0.9
"""Tolerance for the number of examples in an update.

Ordinary weight decay undoes a little of each step, so an update counts slightly fewer examples than
it was computed from. This must not cause a refusal if there are just enough examples.
"""

LARGEST_PULL = 2.0
"""Limit on ηλ in pFedMe (η: step size, λ: weight of the proximal term).

From ηλ = 2 on, each step is longer than the step before, so training diverges.
"""

_IN_ALL = {
    "max_releases": "updates in all",
    "max_partings": "equations from sums over parts of its examples in all",
    "max_evaluations": "scored models in all",
}
"""Limits on the counts in :class:`Usage`, with descriptions for errors."""


_IN_A_ROW = {"max_vectors": "vectors of its data", "max_components": "components of a descriptor"}
"""Limits on the amounts in a row query, see :meth:`RowQuery.amounts <fedclade.RowQuery>`."""


class NotDisclosedError(PolicyError):
    """Refusal of a query that would disclose data that the client's policy does not name.

    The text of the error depends only on the query and the client's node config, so it may be sent
    to the server.
    """


class CodeNotAllowedError(NotDisclosedError):
    """Refusal of a query that names training code outside of fedclade that the policy does not name.

    The text of the error depends only on the query and the client's node config.
    """


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Limits that a client sets on the server's queries. No run can change them.

    A policy with default limits allows the queries of every algorithm with default settings, except
    algorithms that request gradients (CFL with ``similarity = "gradients"``, IFCA with ``average =
    "gradients"``), subspaces (PACFL), shifts (FlexCFL) or descriptors (FLUX).

    Some algorithms request a separate update (a replicate) from each of several disjoint parts of a
    client's data. The server then knows a sum over the examples of each part, and which examples
    are in which part. From as many independent sums as there are examples it could compute the
    contribution of every single example. So ``max_partings`` limits the number of linear equations
    that the sums give. In addition, the policy limits how much a single example can stand out. A
    linear combination of the sums gives each example a weight, and the share of an example is its
    squared weight divided by the total of the squared weights. No example may have a share above
    1/4 (:data:`LARGEST_SHARE`, or 2/``min_part`` if that is more) in any combination. A division
    into parts that was used before adds no equation; see :mod:`fedclade.flower.data_splits`.

    A client with ``secure_aggregation`` or a privacy budget is closed: in addition to masked or
    noisy updates, it sends only data that ``disclose`` names.

    Raises
    ------
    ConfigError
        If a value is out of range or a name is unknown; the error has one line for each problem.
    """

    # kinds of queries, out of QUERIES, that the client replies to
    allow: tuple[str, ...] = ("train", "evaluate", "statistics")
    # objects ``module:name`` that a run may name, which the client then imports
    imports: tuple[str, ...] = ()
    # training code outside of fedclade that a query may name, and that the client then runs: entry
    # points of the group fedclade.trainers, and objects ``module:name``
    trainers: tuple[str, ...] = ()
    max_epochs: int = 100  # epochs of local training
    max_steps: int = 50_000  # local steps, over all replicates or all models of a mixture
    max_models: int = 64  # models to evaluate or to draw in one query, or models of a mixture
    max_replicates: int = 8  # replicates (splits of the data with separate updates) in one query
    min_part: int = 10  # fewest training examples for an update, a split or a sum
    # linear equations in single examples, in all; None: one for EXAMPLES_AN_EQUATION examples, at
    # most MOST_EQUATIONS
    max_partings: int | None = None
    max_vectors: int = 5  # vectors of a subspace
    max_components: int = 100  # components of a descriptor
    max_releases: int = 5_000  # updates that leave the client, in all
    # models that are scored, or trained for the client itself, in all
    max_evaluations: int | None = None
    secure_aggregation: bool = False  # whether the client sends updates only masked, for a sum
    # number of clients of a sum that may collude with the server and still learn only the sum
    max_colluders: int = 1
    min_honest: int = 3  # fewest clients of a sum, this one included, that do not collude
    # whether other clients' keys may come from the server; then there is no guarantee against a
    # malicious server
    trust_server_keys: bool = False
    # whether the client discloses categories, labels and words; None: only without differential
    # privacy
    share_schema: bool | None = None
    # kinds of data, out of ``disclosures()``, that a closed client may send in clear
    disclose: tuple[str, ...] = ()
    # directions of which signs are sent with masked updates, in all; None: D / CLEAR_SHARE, or 0 if
    # sketches may not be disclosed
    max_clear: int | None = None
    max_sketches: int = 1_000  # sketches of masked updates and of updates from splits, in all
    # privacy cost ε of all scores; None: SCORES_SHARE of the client's budget
    scores_epsilon: float | None = None

    def __post_init__(self) -> None:
        load_installed(self.allow)
        known = {
            "query in allow:": (self.allow, allowable()),
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
        """Return the policy that a node config sets.

        The keys of the node config are the field names of this class with ``-`` in place of ``_``.

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
                    "min-group in the node config is no longer supported; set max-colluders and "
                    "min-honest, whose sum is the smallest number of clients in a sum of updates"
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
        """Return whether the client is closed.

        A client is closed if it has a privacy budget (``private``) or insists on secure
        aggregation. Without masks or noise it sends only data that ``disclose`` names.
        """
        return private or self.secure_aggregation

    def most_scores(self, *, private: bool) -> int:
        """Return the largest number of models that the client evaluates over all its runs.

        The default is lower for a client with a privacy budget (``private``) or with secure
        aggregation.
        """
        if self.max_evaluations is not None:
            return self.max_evaluations
        return MOST_CLOSED_SCORES if self.is_closed(private=private) else MOST_SCORES

    def discloses_scores(self, *, private: bool) -> bool:
        """Return whether the client reports scores on held-out data.

        ``private`` is whether the client has a privacy budget.
        """
        return "evaluate" in self.allow and (
            not self.is_closed(private=private) or "scores" in self.disclose
        )

    def check_kind(self, kind: str) -> None:
        """Check that the policy allows a kind of query.

        Raises
        ------
        PolicyError
            If the kind is not allowed; the text reports how to allow it.
        """
        # A kind of an installed package is loaded only if the policy allows it.
        name = KINDS[kind].allowed_as if kind in KINDS else kind
        if name and name not in self.allow:
            allowed = " ".join([*self.allow, name])
            raise PolicyError(
                f'{FORBIDS} the query {name!r}; to allow it, set allow="{allowed}" in its node '
                "config"
            )

    def check_trainer(self, name: str) -> None:
        """Check that the client may run training code that is not part of fedclade.

        Raises
        ------
        PolicyError
            If the policy does not name the code; the text reports how to allow it.
        """
        if name not in self.trainers:
            allowed = " ".join([*self.trainers, name])
            raise CodeNotAllowedError(
                f"{FORBIDS} the training code {name!r}, which is not part of fedclade; if you trust "
                f'the code, allow it with trainers="{allowed}" in the client\'s node config'
            )

    def check_declared(self, kind: str, *, private: bool) -> None:
        """Check, for a closed client, that the class of a query declares what its replies disclose.

        A client is closed if it has a privacy budget (``private``) or insists on secure
        aggregation.

        Raises
        ------
        PolicyError
            If the class lacks the declaration.
        """
        query = KINDS[kind].query
        if query is None or not self.is_closed(private=private):
            return
        try:
            check_declared(query)
        except ConfigError as error:
            raise NotDisclosedError(f"{FORBIDS} the query {kind!r}: {error}") from None

    def check_disclosed(self, name: str, what: str, *, private: bool) -> None:
        """Check that the client may send a kind of data in clear.

        Parameters
        ----------
        name
            Name of the kind of data in ``disclose``.
        what
            Description of the query, for the error.
        private
            Whether the client has a privacy budget.

        Raises
        ------
        PolicyError
            If the client is closed and its policy does not name the data.
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
        """Check that the client may send an update without the masks of secure aggregation.

        Raises
        ------
        PolicyError
            If ``kind`` is a query for an update and the client insists on secure aggregation.
        """
        if self.secure_aggregation and kind in ("train", "gradients"):
            raise NotDisclosedError(
                f"{FORBIDS} updates without secure aggregation (secure-aggregation=true in its "
                "node config); set network.secure_aggregation = true in the run config"
            )

    def check_sums_possible(self, *, has_peers: bool, has_folder: bool) -> None:
        """Check that a client that insists on secure aggregation has the files that it needs.

        Parameters
        ----------
        has_peers
            Whether the client has a list of the other clients' public keys.
        has_folder
            Whether the client has a folder.

        Raises
        ------
        ConfigError
            If the list of keys or the folder is missing.
        """
        if not self.secure_aggregation or self.trust_server_keys:
            return
        if not has_peers:
            raise ConfigError(
                "secure-aggregation=true in the node config needs a peers-file, a list of the "
                "other clients' keys that does not come from the server, since a malicious server "
                "could impersonate all other clients; set peers-file, or set "
                "trust-server-keys=true, which gives no protection against a malicious server"
            )
        if not has_folder:
            raise ConfigError(
                "secure-aggregation=true in the node config needs a folder, in which the client "
                "records its replies, so that it never replies to two concurrent requests of the "
                "same sum; set folder in the node config"
            )

    def check_colluders(self, colluders: int) -> None:
        """Check that a sum tolerates as many colluding clients as this client demands.

        Raises
        ------
        PolicyError
            If ``colluders``, the number of colluding clients that the sum tolerates, is below
            ``max_colluders``, the number that the client demands.
        """
        if colluders < self.max_colluders:
            raise PolicyError(
                f"this client joins only sums that tolerate {self.max_colluders} colluding clients "
                "(max-colluders in its node config), and the requested sum tolerates "
                f"{colluders}; set network.secure_colluders = {self.max_colluders}"
            )

    def check_group(self, clients: int, colluders: int) -> None:
        """Check that a sum has enough clients to hide this client's update.

        Parameters
        ----------
        clients
            Number of clients in the sum.
        colluders
            Number of clients that may collude with the server.

        Raises
        ------
        PolicyError
            If fewer than ``min_honest`` clients would remain without the colluding clients.
        """
        least = colluders + self.min_honest
        if clients < least:
            raise PolicyError(
                f"this client joins only sums of at least {least} clients (min-honest in its node "
                f"config, and {colluders} that may collude), and the requested sum has {clients}; "
                "let more clients join, or lower min-honest"
            )

    def check_clear(self, count: int, n_parameters: int) -> None:
        """Check the number of signs that the client sends, unmasked, along with a masked update.

        The signs are those of random projections of the update, by which the server compares
        updates. All signs of one update are a sketch.

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
                f"{FORBIDS} {count} unmasked numbers in addition to a masked update of "
                f"{n_parameters} parameters; it allows at most {most} (max-clear in its node "
                "config)"
            )

    def most_clear(self, n_parameters: int) -> int:
        """Return the largest number of directions of which the client sends signs without a mask.

        A direction is one random projection in a sketch. The number limits the directions of all
        sketches over all runs. Its default depends on ``n_parameters``, the number D of parameters.
        """
        if self.secure_aggregation and SKETCH not in self.disclose:
            return 0
        return n_parameters // CLEAR_SHARE if self.max_clear is None else self.max_clear

    def check_sketches(self, directions: int, sketches: int, n_parameters: int) -> None:
        """Check the total numbers of sketches and of directions that the client has sent.

        Parameters
        ----------
        directions
            Number of directions (random projections) of which signs have been sent.
        sketches
            Number of sketches that have been sent.
        n_parameters
            Number of parameters D of the model.
        """
        most = self.most_clear(n_parameters)
        if directions > most:
            raise PolicyError(
                f"{FORBIDS} sketches by a further projection: signs of updates in {directions} "
                f"directions would be sent in all; it allows at most {most} (max-clear in its node "
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
        """Check the local training that a query requests against the limits of the policy.

        Parameters
        ----------
        spec
            Optimizer, epochs and batch size of local training.
        replicates
            Number of disjoint parts of its data on which the client trains separately, each with an
            update of its own; see :class:`~fedclade.core.Splits`.
        examples
            Number of training examples of the client.
        personal_epochs
            Epochs of training only the personal parameters; see
            :class:`~fedclade.core.HeadThenBody`.
        times
            Factor on the number of steps: the number of gradients in each step of a local rule,
            times the number of models of a mixture.
        leaves
            Whether the client will ever send an update. If not, the steps may use fewer than
            ``min_part`` examples.

        Raises
        ------
        PolicyError
            If the training exceeds a limit.
        """
        parts = [
            len(range(part, examples, replicates)) for part in range(min(replicates, examples))
        ]
        own = spec.in_epochs(max(1, personal_epochs))
        before = sum(map(own.steps_with, parts)) if personal_epochs else 0
        self._check("replicates", replicates, "max_replicates")
        if replicates > 1 and examples // replicates < self.min_part:
            raise PolicyError(
                f"{FORBIDS} {replicates} separate updates from {replicates} parts of {examples} "
                f"training examples, since each part needs at least {self.min_part} examples "
                "(min-part in its node config)"
            )
        seen = min(min(part, spec.passed(part)) for part in parts)
        if leaves and seen < min(self.min_part, *parts):
            raise PolicyError(
                f"{FORBIDS} an update from {seen} training examples, since an update needs at "
                f"least {self.min_part} (min-part in its node config)"
            )
        self._check("epochs", max(map(spec.epochs_with, parts)) + personal_epochs, "max_epochs")
        self._check("steps", times * (sum(map(spec.steps_with, parts)) + before), "max_steps")

    def check_steps(self, steps: int) -> None:
        """Check the number of steps of training code outside of fedclade, as the code states it."""
        self._check("steps", steps, "max_steps")

    def check_retention(
        self,
        spec: LocalTraining,
        round_number: int,
        examples: int,
        last_batch: int,
        *,
        rule: LocalRule | None = None,
    ) -> None:
        """Check that an update depends on enough training examples, and not only on its last steps.

        A step of size η adds the gradient of its mini-batch to a model that weight decay and the
        proximal term (with the factor μ) have multiplied by 1 − η(weight_decay + μ). If this factor
        is 0, the update is the gradient of the last mini-batch, regardless of all earlier examples.
        So the examples of each mini-batch count by the squared weight of its step in the update,
        relative to the largest squared weight. The last mini-batch may be smaller than the others.

        Some optimizers, such as Adam, divide gradients by their size. The server can choose a model
        at which this size is arbitrary, so the share of the model that a step removes is not known.
        With such an optimizer only the last mini-batch counts if there is a proximal term, or
        weight decay that is not decoupled from the gradients (it is decoupled in AdamW).

        Parameters
        ----------
        spec
            Optimizer, epochs and batch size of local training.
        round_number
            Number of the round, which the step size may depend on.
        examples
            Number of training examples from which the update is computed.
        last_batch
            Number of examples in the last mini-batch.
        rule
            Local rule, such as :class:`~fedclade.core.MoreauEnvelope`; None for ordinary training.

        Raises
        ------
        PolicyError
            If the update depends on fewer than about ``min_part`` examples.
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
                f"{FORBIDS} local training in which later steps undo earlier steps, since the "
                f"update would depend on only about {counted:.2g} training examples, and it needs "
                f"at least {least} (min-part in its node config); lower local.weight_decay, "
                "local.mu or the optimizer's own decay in local.options, use the optimizer sgd or "
                "adamw, or raise local.batch_size or local.smallest_batch"
            )

    def check_share(self, share: float, besides: float = 0.0) -> None:
        """Check that no example dominates a linear combination of sums over parts of the data.

        A linear combination gives each example a weight. The share of an example is its squared
        weight divided by the sum of all squared weights.

        Parameters
        ----------
        share
            Largest share of a single example in any combination.
        besides
            Number that is added to the limit of this example; 0 unless the example is in none of
            the parts.

        Raises
        ------
        PolicyError
            If the share exceeds the limit, since a server could then isolate the example.
        """
        most = max(LARGEST_SHARE, 2 / self.min_part) + besides
        if share > most:
            raise PolicyError(
                f"{FORBIDS} a further split of its examples into parts, since in a combination of "
                f"the sums over parts one example would have a share of {share:.2f}, so that the "
                f"server could isolate it; the policy allows at most {most:.2f} (min-part in its "
                "node config)"
            )

    def check_sum(self, examples: int, what: str = "sums") -> None:
        """Check that the client has enough training examples for sums or similar statistics.

        ``what`` describes the requested values, for the error.
        """
        if examples < self.min_part:
            raise PolicyError(
                f"{FORBIDS} {what} of {examples} training examples, since they need at least "
                f"{self.min_part} (min-part in its node config)"
            )

    def check_models(self, count: int) -> None:
        """Check the number of models in one query against ``max_models``."""
        self._check("models in one query", count, "max_models")

    def check_rows(self, query: RowQuery, spec: DataSpec, examples: int) -> None:
        """Check a row query, which requests one row of numbers about the client's data.

        Parameters
        ----------
        query
            The query.
        spec
            Specification of the client's data.
        examples
            Number of training examples of the client.

        Raises
        ------
        PolicyError
            If the query exceeds a limit of the policy.
        ConfigError
            If the class of the query declares an amount for a limit that policies do not have.
        """
        if query.needs_min_part:
            self.check_sum(examples, query.kind)
        for limit, amount in query.amounts(spec).items():
            if limit not in _IN_A_ROW:
                known = ", ".join(_IN_A_ROW)
                raise ConfigError(
                    f"amounts() of {type(query).__name__} should return limits of a policy "
                    f"({known}) as keys, got {limit!r}"
                )
            self._check(_IN_A_ROW[limit], amount, limit)

    def check_usage(self, after: Usage, examples: int, *, private: bool = False) -> None:
        """Check the counts of a client's replies, including the next reply, against the limits.

        Parameters
        ----------
        after
            Counts after the next reply.
        examples
            Number of training examples of the client, on which a default limit depends.
        private
            Whether the client has a privacy budget.

        Raises
        ------
        PolicyError
            If a count exceeds its limit.
        """
        allowed = replace(self, max_evaluations=self.most_scores(private=private))
        if self.max_partings is None:
            allowed = replace(
                allowed, max_partings=min(examples // EXAMPLES_AN_EQUATION, MOST_EQUATIONS)
            )
        for limit, what in _IN_ALL.items():
            allowed._check(what, getattr(after, limit.removeprefix("max_")), limit)

    def _check(self, what: str, value: int, limit: str) -> None:
        """Raise a PolicyError if a value, described by ``what``, exceeds the field ``limit``."""
        most = getattr(self, limit)
        if value > most:
            raise PolicyError(
                f"{FORBIDS} {shown(value)} {what}; it allows at most {most} ({_key(limit)} in its "
                "node config)"
            )


def check_allowed(
    kind: str, ids: Sequence[int], left_out: Mapping[int, str], connected: int
) -> None:
    """Raise an error that ends a run if the policies of most clients forbid a query.

    Repeating such a query would change nothing. The error is raised only if all clients of the
    query forbid it, and if they are more than half of all connected clients, so that a few clients
    cannot end every run.

    Parameters
    ----------
    kind
        Kind of the query.
    ids
        Clients that were queried.
    left_out
        Reason of each client without a usable reply.
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
            f"all {len(ids)} clients refuse the query {kind!r}; client {ids[0]} reports: "
            f"{left_out[ids[0]]}"
        )


def _may_keep_last_alone(spec: LocalTraining) -> bool:
    """Return whether an update might depend on only the last mini-batch of local training.

    The server chooses the optimizer, its options and the model. See :meth:`Policy.check_retention`.
    """
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
    """Return the share of a model that weight decay and the proximal term remove in one step."""
    decay = (spec.weight_decay or 0.0) + spec.mu
    # Meta-learning takes the gradient after another step, which has weight decay, too.
    if isinstance(rule, MetaLearning):
        decay *= (1 - rule.alpha * decay) ** (2 if rule.hessian else 1)
    return spec.lr_at(round_number) * decay


def squared_weights_of_envelope(
    rule: MoreauEnvelope, spec: LocalTraining, round_number: int, steps: int
) -> list[float]:
    """Return the squared weight of each pFedMe step's gradients in the final model.

    The weights show how many steps, and so how many examples, an update effectively depends on. One
    step consists of K inner steps θ ← θ − η_θ(g + κθ + λ(θ − w)), and then w ← w − ηv with v ← βv +
    λ(w − θ). Here w is the model, θ the personal model, g a gradient, κ the weight decay, β the
    momentum, and η, η_θ the step sizes. The weights of w, θ and v in the final w are computed from
    the last step back to the first.

    Returns
    -------
    list[float]
        Squared weights, those of the last step first.
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
    """Return the squared weight of each SGD step's gradient in the final model, last step first.

    The weights show how many steps, and so how many examples, an update effectively depends on.
    They are computed from the last step back to the first, until :data:`MOST_STEPS_WEIGHED` steps
    are done or a weight exceeds :data:`LARGEST_WEIGHT`.

    Parameters
    ----------
    decay
        Share of the model that weight decay and the proximal term remove in one step:
        η(weight_decay + μ), with the step size η and the factor μ of the proximal term.
    momentum
        Momentum of SGD: the share of the previous step that each step repeats.
    steps
        Number of steps.
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
    """Return the key in the node config for a field of :class:`Policy`."""
    return name.replace("_", "-")
