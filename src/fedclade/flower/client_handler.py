"""Client of a network, which replies to the server's queries from its own data.

Each query is first checked against the client's policy and counted. A reply contains only the
values that the query requests.
"""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from flwr.app import RecordDict
from torch import Tensor, nn

from fedclade.channel import (
    SENSITIVITY,
    Budget,
    Channel,
    DifferentialPrivacy,
    ExamplePrivacy,
    Ledger,
    Mechanism,
    Middleware,
    Permutation,
    PrivateExamples,
    Privatizing,
    Signature,
    SignSketch,
    Sketch,
    StepLedger,
    booked,
    booked_steps,
    check_encoding,
    check_local,
    client_side,
    is_repeatable,
    multiplier_for,
    pack_parts,
    refusal_to_reveal,
)
from fedclade.core import (
    FORBIDS,
    OWN,
    OWN_COLUMNS,
    STEPS_TAKEN,
    ChoiceQuery,
    ConfigError,
    DataError,
    EvaluationQuery,
    FedcladeError,
    Layout,
    PolicyError,
    RowQuery,
    Split,
    UpdateError,
    Updates,
    importing_only,
    installed,
)
from fedclade.data import (
    DataSchema,
    Federation,
    StatisticsQuery,
    rescale_federation,
    undo_default_scaling,
)
from fedclade.flower import wire
from fedclade.flower.closed_scores import ClosedScores, ScoreNoise, is_mean
from fedclade.flower.data_splits import SplitLog
from fedclade.flower.kinds import KINDS
from fedclade.flower.models_sent import models_of_mixture, read_mixture, read_model
from fedclade.flower.node_store import NodeStore, Residuals, uses_kept
from fedclade.flower.policy import NotDisclosedError, Policy, Usage, UsageLog, cost_of
from fedclade.flower.private_replies import ErrorShield, without_details
from fedclade.flower.registration import schema_values
from fedclade.flower.replies import as_values, read_statistics, size_class
from fedclade.flower.row_messages import read_query, reply_with
from fedclade.flower.schema_exchange import encoding_digest
from fedclade.flower.secure.member import Member, training_of
from fedclade.flower.signing import Key, secret_digest, secret_model, seed_of
from fedclade.flower.sketch_log import Projection, Sketched, SketchLog
from fedclade.flower.stored_reply import StoredReply
from fedclade.flower.training_asked import TrainingAsked, TrainingFailedError
from fedclade.flower.wire import Content, shown
from fedclade.models import Parts
from fedclade.runs import (
    PRIVATE_CLIENTS,
    Maker,
    check_inputs_apart,
    module_for,
    target_scale_of,
    with_targets_for,
)
from fedclade.tasks import FittedTask, Task
from fedclade.training import (
    PrivateSteps,
    SimulatedClients,
    note_unsent_buffers,
    return_freed_memory,
    split_batches,
    unpack_inputs,
)

# Model and sketches, which a client builds itself. A sketch is a random projection of an update, by
# which the server compares clients.


def maker_of(model: nn.Module | str | Maker, federation: Federation, parts: Parts) -> Maker:
    """Return a function that makes a client's model from a seed.

    Parameters
    ----------
    model
        A module, which the function returns for every seed; or the name of a model; or a function
        that makes a module from a seed.
    federation
        Data of the client. The structure of a named model depends on the shape of the data.
    parts
        Frozen and personal parts and adapters, which the function applies to the model.
    """
    schema = federation.pool.schema

    def make(seed: int) -> nn.Module:
        if isinstance(model, str):
            return module_for(model, schema, seed)
        if isinstance(model, nn.Module):
            # Hooks for inputs of several tensors must not change the user's own module.
            return model if schema.structure is None else copy.deepcopy(model)
        return model(seed)

    return lambda seed: unpack_inputs(parts.applied(make(seed), seed), schema.structure)


def read_sketch(content: Content, seed: int, layout: Layout, permuted: bool) -> Sketch | None:
    """Return the kind of sketch by which a training query compares updates.

    A sketch is a random projection of an update, or only the signs of the projection. The server
    compares updates by their sketches.

    Parameters
    ----------
    content
        Content of the query, with the dimension of the sketch and the patterns of the compared
        parameters.
    seed
        Seed of the random projection.
    layout
        Layout of the model.
    permuted
        Whether the client permutes its updates.

    Returns
    -------
    Sketch or None
        The sketch; None if whole updates are compared.
    """
    dim = content.get("dim", int)
    of = read_patterns(content, permuted)
    if content.values.get("compared") == "signs":
        return read_signs(content, seed, layout, permuted)
    kind = "projected" if dim else "full"
    return Signature(kind=kind, dim=max(dim, 1), of=of).sketch(seed, layout)


def read_signs(content: Content, seed: int, layout: Layout, permuted: bool) -> SignSketch:
    """Return the sketch that contains only the signs of a random projection of an update.

    Signs are compared if updates are masked by secure aggregation. They are also compared if a
    query requests them for the updates from disjoint parts of a client's data. See
    :func:`read_sketch` for the parameters.

    Raises
    ------
    UpdateError
        If the dimension of the projection in the query is less than 1.
    """
    dim = content.get("dim", int)
    of = read_patterns(content, permuted)
    if dim < 1:
        raise UpdateError(
            "the query requests the signs of a projection without dimensions; the server should "
            "send a value 'dim' of at least 1"
        )
    return Signature(kind="signs", dim=dim, of=of).signs(seed, layout)


def read_patterns(content: Content, permuted: bool) -> tuple[str, ...]:
    """Return the name patterns of the parameters by which a query compares updates.

    The patterns are the value ``of`` of the query. The result is empty if the query compares
    updates by all parameters.

    Raises
    ------
    UpdateError
        If ``of`` is not a list of texts, or if it selects parameters although the client permutes
        its updates.
    """
    of = content.values.get("of", [])
    if not isinstance(of, list) or not all(isinstance(pattern, str) for pattern in of):
        raise UpdateError(
            f"'of' in a query should be a list of name patterns of parameters, got {shown(of)}; "
            "install the same version of fedclade on server and clients"
        )
    if of and permuted:
        raise UpdateError(
            "the query compares the updates of selected parameters ('of'), but this client "
            "permutes its updates to hide their parameters; leave signature.of out of the run "
            "config"
        )
    return tuple(of)


# Privacy of a client in a network: noise that no other party knows, and a ledger, which records the
# privacy cost of every reply.

SCORES_SHARE = 0.1
"""Share of the client's ε that its scores may cost, unless its policy sets ``scores-epsilon``."""

SCORES_EPSILON = 1.0
"""Privacy cost ε of a client's scores if the ε of its privacy budget is infinite."""


def privatizing_of(
    privacy: Mechanism | None, budget: Budget | None, folder: Path | None, sizes: Mapping[int, int]
) -> Privatizing | PrivateExamples | None:
    """Return the middleware that adds noise to a client's replies and records their privacy cost.

    The result is None for a client without differential privacy.

    Parameters
    ----------
    privacy
        Mechanism of the run; None if the run adds no noise.
    budget
        Privacy budget of the client; None if the client has no budget.
    folder
        Folder for the client's privacy ledger; None if the client has no folder.
    sizes
        Number of training examples, by client.

    Raises
    ------
    ConfigError
        If the client has a budget and the run adds no noise, or if the run adds noise and the
        client has no budget, no folder, or a budget of another level. Without these errors the
        author of the run's config could turn off the client's protection, or weaken the protection
        from the whole client to single examples.
    """
    privacy = check_local(privacy)
    if privacy is None:
        if budget is not None:  # otherwise the author of the run's config could turn the noise off
            raise ConfigError(
                f"this client has a privacy budget of ε = {budget.epsilon:g}, and an update "
                "without noise has no bounded privacy cost; set privacy.clip_norm and "
                "privacy.noise_multiplier in the run config"
            )
        return None
    if folder is None:
        raise ConfigError(
            "a client with differential privacy needs a folder for its privacy ledger; set folder "
            "in its node config"
        )
    # The run's config sets the noise, so without a budget of its own a client has no guarantee.
    if budget is None:
        raise ConfigError(
            "the run sets privacy.clip_norm, and this client has no privacy budget; set epsilon in "
            "its node config, or epsilon=inf for an unlimited budget"
        )
    level = "client"
    if isinstance(privacy, ExamplePrivacy):
        level = privacy.level
    if budget.level != level:
        raise ConfigError(
            f"this client has a privacy budget of ε = {budget.epsilon:g} of level "
            f"{budget.level!r}, and the run's privacy.level is {level!r}; to join the run, set "
            f"level={level!r} in the client's node config"
        )
    if isinstance(privacy, ExamplePrivacy):
        return booked_steps(privacy, _step_ledger(folder, budget), "network", sizes)
    return booked(privacy, _ledger(folder, budget), "network")


def score_noise_of(
    budget: Budget, folder: Path, *, most: int, epsilon: float | None = None, examples: int = 1
) -> ScoreNoise:
    """Return the noise with which ``most`` scores together have a given privacy cost ε.

    A score is in [0, 1]. If all data of the client is replaced, a score can change to any other
    number in this range, so its sensitivity is 1. If one of ``examples`` held-out examples is added
    or removed, a mean over these examples changes by at most 1/``examples``, which is the
    sensitivity for a budget of level ``example``.

    Parameters
    ----------
    budget
        Privacy budget of the client.
    folder
        Folder with the client's privacy ledgers.
    most
        Largest number of scores that the client reports over its lifetime.
    epsilon
        Privacy cost ε of all scores together; None for :data:`SCORES_SHARE` of the budget.
    examples
        Smallest number of held-out examples over which a score is a mean; 1 if a score is not a
        mean over examples.
    """
    if epsilon is None:
        epsilon = _default_scores_epsilon(budget)
    z = multiplier_for(epsilon, most, budget.delta)
    multiplier = z / SENSITIVITY  # standard deviation for a sensitivity of 1
    if budget.level == "example":
        steps = _step_ledger(folder, budget)
        book = lambda count: steps.book(multiplier, {1.0: count}, "scores", 0)  # noqa: E731
        return ScoreNoise(multiplier / max(1, examples), book)
    releases = _ledger(folder, budget)
    return ScoreNoise(multiplier, lambda count: releases.book(z, "scores", 0, count))


def _default_scores_epsilon(budget: Budget) -> float:
    """Return the privacy cost ε of all of a client's scores if its policy does not set the cost."""
    if math.isinf(budget.epsilon):
        return SCORES_EPSILON
    return SCORES_SHARE * budget.epsilon


def _ledger(folder: Path, budget: Budget) -> Ledger:
    """Return the ledger of a client with client-level privacy, from the files in its folder."""
    return Ledger(folder / "privacy.json", budget, folder / "example-privacy.json")


def _step_ledger(folder: Path, budget: Budget) -> StepLedger:
    """Return the ledger of a client with example-level privacy, from the files in its folder."""
    return StepLedger(
        folder / "example-privacy.json", budget, beside=Ledger(folder / "privacy.json")
    )


# Training and evaluation of one client. The scaling of its inputs and the weights of its loss may
# depend on statistics of all clients' examples.


class Trainer:
    """Trainer and evaluator of one client, by a simulation that consists of this client.

    Scaled columns need the mean and standard deviation of all clients' examples, but when the data
    was loaded, only the statistics of the examples on this machine were known. In addition, label
    weights for ``class_weights = "balanced"`` need the label counts of all clients. The attribute
    ``needs`` states which statistics of all clients the trainer needs. Whenever the server sends
    new statistics, :meth:`take` rebuilds the simulation
    (:class:`~fedclade.training.SimulatedClients`).

    Parameters
    ----------
    federation
        Data of the client.
    task
        Task of the run, not yet fitted to the data.
    make
        Function that makes the simulation of the client from its data and the fitted task.
    """

    def __init__(
        self,
        federation: Federation,
        task: Task,
        make: Callable[[Federation, FittedTask], SimulatedClients],
    ):
        self._federation = federation
        self._asked = task
        self._make = make
        schema = federation.pool.schema
        columns = federation.pool.columns
        self.task = task.of(schema, target_scale=target_scale_of(federation))
        self.workers = make(federation, self.task)
        labels = 0
        if self.task.balanced and schema.labels is not None:
            labels = schema.labels
        targets = 0
        if columns is not None and columns.target_mean is not None:
            targets = schema.outputs
        self.needs = StatisticsQuery(
            federation.ids,
            inputs=columns is not None and columns.mean is not None,
            labels=labels,
            targets=targets,
        )
        self._taken: Mapping[str, Any] = {}

    @property
    def needs_all(self) -> bool:
        """Whether training or evaluation needs the statistics of all clients' examples."""
        return self.needs.inputs or self.needs.labels > 0 or self.needs.targets > 0

    def take(self, values: Mapping[str, Any]) -> None:
        """Scale the data, and weight the loss, by statistics of all clients' examples.

        The statistics are among the values of a query, ``values``.

        Raises
        ------
        UpdateError
            If the statistics are missing or malformed.
        """
        columns = self.needs.targets
        if self.needs.inputs:
            columns += self._federation.pool.x.shape[1]
        found = read_statistics(values, columns, self.needs.labels)
        if as_values(found) == self._taken:
            return
        federation = self._federation
        if columns:
            federation = rescale_federation(federation, found)
        self.task = self._asked.of(
            federation.pool.schema,
            found.labels if self.needs.labels else None,
            target_scale_of(federation),
        )
        self.workers = self._make(federation, self.task)
        self._taken = as_values(found)


_log = logging.getLogger(__name__)


class ClientHandler:
    """Client of a network, which owns data and replies to the server's queries.

    :func:`fedclade.flower.client_app` documents the settings.

    Raises
    ------
    ConfigError
        If a setting is invalid, or settings contradict one another.
    DataError
        If the federation does not have exactly one client, or its data changes during the run.
    ModelError
        If the model does not fit the data.
    """

    def __init__(
        self,
        federation: Federation,
        model: nn.Module | str | Maker,
        *,
        number: int | None = None,
        engine: str = "loop",
        device: str | Sequence[str] = "cpu",
        encoding: str = "float32",
        privacy: Mechanism | None = None,
        budget: Budget | None = None,
        folder: Path | None = None,
        secret: str | None = None,
        policy: Policy | None = None,
        peers: Mapping[str, int] | None = None,
        task: Task | None = None,
        parts: Parts | None = None,
        seed: int = 0,
        agreed: DataSchema | None = None,
        middleware: Sequence[Middleware] = (),
    ) -> None:
        if len(federation) != 1:
            raise DataError(
                f"data_fn should return a federation of one client, got {len(federation)} clients; "
                "select one with Federation.alone(number)"
            )
        if federation.stages:
            raise DataError(
                f"{federation} changes during a run, which only simulations support; leave "
                "data.drift out"
            )
        check_encoding(encoding)
        self._policy = policy or Policy()
        # If true, the client sends no data in clear except the kinds that its policy names.
        self._is_closed = self._policy.is_closed(private=privacy is not None)
        federation = self._scaled_if_disclosed(federation, private=privacy is not None)
        federation = with_targets_for(task or Task(), federation)
        self._federation = federation
        self._data = federation.clients[0]
        self._make = maker_of(model, federation, parts or Parts())
        self._number = number
        self._folder = folder
        self._secret = secret
        self._encoding = encoding_digest(federation.pool, agreed)
        self._usage_log = UsageLog(folder)
        groups = federation.find_related(self._data.id)
        if isinstance(privacy, ExamplePrivacy):
            groups = None  # training then assigns each example to a part by itself
        self._splits = SplitLog(
            folder, self._data.key, self._policy, self._usage_log, groups=groups
        )
        self._sketch_log = SketchLog(folder)
        self._policy.check_sums_possible(has_peers=peers is not None, has_folder=folder is not None)
        self._member = Member(self._policy, peers, folder)
        self._imports = set(self._policy.imports)
        if isinstance(model, str):
            self._imports.add(model)
        devices = [device] if isinstance(device, str) else list(device)
        if len(devices) > 1 and engine != "loop":
            raise ConfigError(
                f"device = {', '.join(devices)} splits each batch of a client among several "
                f"devices, which the engine {engine} does not do; set engine = 'loop', or name one "
                "device"
            )
        module = split_batches(self._make(seed), devices)
        parts = parts or Parts()
        note_unsent_buffers(module, federation.pool.schema)
        personal = parts.personal_names(module)

        def build_workers(federation: Federation, task: FittedTask) -> SimulatedClients:
            private = None
            if isinstance(privacy, ExamplePrivacy):
                private = PrivateSteps.of(privacy, secret=True)
            return SimulatedClients(
                self._held(federation),
                module,
                devices[0],
                engine,
                task=task,
                personal=personal,
                private=private,
                always_replies=self._is_closed,
                returns_memory=True,
            )

        self._trainer = Trainer(federation, task or Task(), build_workers)
        self._layout = self._trainer.workers.layout
        self._permutation = None
        if secret is not None:
            self._permutation = Permutation(
                seed_of(secret), self._layout.size, self._layout.n_parameters
            )
        private = privatizing_of(privacy, budget, folder, {self._data.id: len(self._data.train)})
        self._is_private = private is not None
        check_inputs_apart(privacy, federation, agreed=agreed is not None)
        self._shields: list[Middleware] = []
        if isinstance(privacy, DifferentialPrivacy):
            self._shields.append(ErrorShield(self._layout, len(self._data.train), self._data.key))
        self._client_side = partial(client_side, private, self._permutation)
        self._own_middleware = middleware
        mechanism = "" if privacy is None else str(privacy)
        self._residuals = Residuals(folder, encoding, self._layout, mechanism)
        self._exact = Residuals(folder, "float32", self._layout, mechanism)
        # Statistics of the client's own examples, for the statistics of all clients.
        self._sums = None
        if self._trainer.needs_all:
            self._sums = self._clients().ask(self._trainer.needs)
        self._kept = NodeStore(folder)
        # With noise, or with middleware of the user, a repeated query may have another reply.
        self._remembers = privacy is None and not middleware
        self._stored_reply = StoredReply(
            folder, federation, self._trainer.task.described, self._layout
        )
        self._scores = None
        if self._is_closed:
            self._scores = self._closed_scores(budget)

    def _scaled_if_disclosed(self, federation: Federation, *, private: bool) -> Federation:
        """Return the client's data; undo default scaling if the client reports no statistics.

        Default scaling requires the statistics of all clients, but a client with a privacy budget
        or secure aggregation may not report its statistics.
        """
        if private:
            return undo_default_scaling(federation, PRIVATE_CLIENTS)
        if self._is_closed and "statistics" not in self._policy.disclose:
            why = "with secure-aggregation this client discloses no sums of its data"
            return undo_default_scaling(federation, why)
        return federation

    def _closed_scores(self, budget: Budget | None) -> ClosedScores | None:
        """Return the mechanism by which a closed client reports scores.

        The result is None if the client's policy does not disclose scores. A client is closed if it
        has a privacy budget or insists on secure aggregation.

        Raises
        ------
        ConfigError
            If the client has a privacy budget and the metric is unbounded, so that no noise makes
            its scores private.
        """
        metric = self._trainer.task.metrics[0]
        if "scores" not in self._policy.disclose:
            return None
        if budget is None or self._folder is None:
            return ClosedScores(metric)
        if not metric.share:
            raise ConfigError(
                f"this client discloses its scores, and the first metric, {metric.name!r}, has no "
                "bounds, so no noise makes the scores private; leave scores out of disclose in the "
                "client's node config, or let task.metrics begin with a metric in [0, 1], such as "
                "'accuracy'"
            )
        most = self._policy.most_scores(private=True)
        epsilon = self._policy.scores_epsilon
        examples = 1
        if is_mean(metric, self._trainer.task.kind):
            examples = self._fewest_scored()
        noise = score_noise_of(budget, self._folder, most=most, epsilon=epsilon, examples=examples)
        return ClosedScores(metric, noise)

    def _fewest_scored(self) -> int:
        """Return the number of examples in the smaller of the test and validation data.

        Empty data is ignored. With n examples in the smaller data, a single example changes a mean
        score by at most 1/n.
        """
        return min(
            [len(rows) for rows in (self._data.test, self._data.validation) if len(rows)], default=1
        )

    def answer(
        self, content: Content, state: RecordDict | None = None, key: Key | None = None
    ) -> RecordDict:
        """Return the reply to a query.

        A query is counted towards the limits of the client's policy as soon as it is accepted.

        Parameters
        ----------
        content
            Content of the query.
        state
            Record that Flower stores for this client between two messages.
        key
            The client's own signature key, by which other clients recognize the client.

        Raises
        ------
        FedcladeError
            If the client cannot or may not reply; the text states the reason, such as a rule of the
            client's policy. If the client has differential privacy, details are only logged, since
            they may depend on its data.
        """
        if not self._is_private:
            return self._answer(content, state, key)
        try:
            return self._answer(content, state, key)
        except Exception as error:
            _log.warning(
                "a query was refused: %s",
                wire.clean(str(error)),
                exc_info=not isinstance(error, FedcladeError),
            )
            raise without_details(error) from None

    def _answer(self, content: Content, state: RecordDict | None, key: Key | None) -> RecordDict:
        """Check a query against the client's policy, count it, and return the reply.

        Errors keep their details; :meth:`answer` removes them for clients with differential
        privacy.
        """
        member = self._member
        whole = content
        answers: Mapping[str, Callable[[Content], RecordDict]] = {
            "hello": self._register,
            "initial": self._initial,
            "train": lambda content: self._train(content, state),
            "gradients": lambda content: self._train(content, state),
            "evaluate": self._evaluate,
            "choose": self._choose,
            "statistics": self._statistics,
            "keys": lambda content: member.keys(content, state, key),
            "shares": lambda content: member.shares(content, state, key),
            "masked": lambda _: member.masked(
                whole,
                state,
                key,
                train=partial(self._trained_for_sum, state=state),
                shape=(self._layout.n_parameters, self._layout.size),
            ),
            "agree": lambda content: member.agree(content, state, key),
            "unmask": lambda content: member.unmask(content, state),
        }
        kind = content.get("what", str)
        if kind not in KINDS and kind in installed("queries"):
            self._policy.check_kind(kind)
        if kind not in KINDS:
            raise PolicyError(
                f"{FORBIDS} the query {shown(kind)}, which is of an unknown kind; for a query of "
                "your own method, pass its class to client_app(queries=[...]); known kinds are "
                f"{', '.join(KINDS)}"
            )
        entry = KINDS[kind]
        mine = wire.layout_digest(self._layout)
        if kind != "hello" and (theirs := content.get("layout", str)) != mine:
            raise UpdateError(
                f"the query is about a model of structure {theirs}, and this client's model has "
                f"structure {mine}; give server and clients the same model"
            )
        self._policy.check_kind(kind)
        self._policy.check_declared(kind, private=self._is_private)
        self._check_disclosed(kind, content)
        rows = entry.row_query
        # All kinds of row queries, which request one row of numbers about the data, share a
        # handler.
        respond = partial(self._row, rows) if rows is not None else answers[kind]
        # The third request of secure aggregation, "masked", contains a training request, to which
        # the same rules and cost apply.
        if kind == "masked":
            kind = "train"
            content = training_of(content)
        elif not (kind == "train" and content.get("own", bool) and not content.get("shares", bool)):
            self._policy.check_masked(kind)
        if self._trainer.needs_all and entry.takes_sums:
            self._trainer.take(content.values)
        # Count the query before anything is computed, so that a query that fails half-way counts.
        cost = cost_of(kind, content, is_closed=self._is_closed)
        # Training without noise is a function of the query. So a repeated query for updates from
        # splits of the data reveals nothing new and is not counted again. Every reply with noise is
        # a new release.
        is_exact = whole.values["what"] == "train" and not self._is_private
        is_repeated = is_exact and self._splits.is_repeated(content, state)
        if cost != Usage() and not is_repeated:
            self._usage_log.book(cost, self._check_usage, state)
        keeps = uses_kept(kind, content, bool(self._layout.personal))
        # A reply that uses stored data is not a function of the query alone.
        if is_exact and not is_repeated and not keeps:
            self._splits.remember(content, state)
        if keeps:
            self._kept.open(self._trainer.workers.store, content.get("run", str), state)
        # Names in a server's message may cause no other import on this machine.
        with importing_only(self._imports | set(self._policy.trainers)):
            answer = respond(content)
        if keeps and (kind == "train" or (rows is not None and rows.stores)):
            self._kept.close(state)
        return answer

    @property
    def _reported_examples(self) -> int:
        """Number of training examples that the client reports, or their size class.

        Limits of the policy that depend on the number of examples use this reported number, so that
        a refusal reveals no more than the report.
        """
        return self._reported_size(len(self._data.train))

    def _check_usage(self, usage: Usage) -> None:
        """Check the counts of accepted queries against the client's policy."""
        self._policy.check_usage(usage, self._reported_examples, private=self._is_private)

    def _check_disclosed(self, kind: str, content: Content) -> None:
        """Check that the data that a reply contains may leave the client without noise or masks."""
        query = KINDS[kind].query
        if query is None or not self._is_closed:
            return
        if self._is_private and query.mechanism == "none":
            rows = KINDS[kind].row_query
            if rows is not None:
                # Refuse here, before the query is counted: queries that are always refused must not
                # use up the limits of the policy.
                raise refusal_to_reveal(
                    rows.reveals or f"the {rows.discloses} that a {rows.__name__} requests"
                )
            return  # the middleware Withholding refuses the query, and names the withheld data
        if kind == "evaluate":
            if self._is_private and content.get("split", str) == "train":
                return  # Withholding refuses these scores, too
            self._check_scores(content)
        self._policy.check_disclosed(
            query.discloses, f"the query {kind!r}", private=self._is_private
        )

    def _check_scores(self, content: Content) -> None:
        """Check that a query to a closed client requests only scores on held-out data.

        A client is closed if it has a privacy budget or insists on secure aggregation.
        """
        because = "a privacy budget" if self._is_private else "secure-aggregation=true"
        if content.get("split", str) == "train":
            raise NotDisclosedError(
                f"{FORBIDS} scores on training data, since the client has {because}; only scores on "
                "test and validation data are possible"
            )
        if content.get("compares", bool):
            raise NotDisclosedError(
                f"{FORBIDS} counts of the examples for which each model is best, since the client "
                f"has {because}; choose an algorithm that does not request these counts"
            )

    def _held(self, federation: Federation) -> Federation:
        """Return the data that the client trains and evaluates on; subclasses may poison it."""
        return federation

    def _register(self, content: Content) -> RecordDict:
        """Return the registration of the client: its number of examples, model, task and schema."""
        truth = self._federation.true_clusters
        encoding = self._federation.encoding
        is_own = encoding is not None and encoding.source is not None
        description = str(self._federation)
        if is_own:
            description = f"{self._federation.pool.name}, clients with data of their own"
        # A message cannot contain None: -1 and the empty text stand for "unknown" and "no secret".
        values: dict[str, Any] = {
            "number": -1 if self._number is None else self._number,
            "name": self._data.name,
            "size": self._reported_size(self._clients().sizes[self._data.id]),
            "schema": json.dumps(schema_values(self._federation.pool.schema)),
            "description": description,
            "layout": wire.layout_digest(self._layout),
            "arrays": wire.layout_arrays(self._layout),
            "task": self._trainer.task.described,
            "scaled": self._trainer.needs.inputs,
        }
        if self._trainer.needs.targets:
            values["scaled_targets"] = True
        values["encoding"] = self._encoding
        values["sends"] = self._residuals.encoding
        values["true_cluster"] = -1 if truth is None else truth[self._data.id]
        values["secret"] = ""
        if self._secret is not None:
            values["secret"] = secret_digest(self._secret)
        values["scores"] = self._policy.discloses_scores(private=self._is_private)
        return wire.record(values)

    def _reported_size(self, count: int) -> int:
        """Return the number of training examples in the form in which the client reports it.

        A closed client, which has a privacy budget or insists on secure aggregation, reports only
        the size class: the largest power of two that is not above the number.
        """
        if self._is_closed:
            return size_class(count)
        return count

    def _initial(self, content: Content) -> RecordDict:
        """Draw the initial models of the run from the clients' shared secret; return the reply.

        The reply contains the models in permuted form, or only their digest. The clients draw the
        models and not the server: if the server knew the parameters before the permutation, it
        could find the permutation.
        """
        if self._secret is None or self._permutation is None:
            raise UpdateError(
                "the query requests initial models from the clients' shared secret, but this "
                "client has no secret; set secret-file in its node config"
            )
        seed = seed_of(self._secret)
        count = content.get("models", int)
        self._policy.check_models(count)
        models = [
            self._permutation.apply(secret_model(self._make, self._layout, seed, k))
            for k in range(count)
        ]
        vectors = {str(k): wire.raw_vector(model) for k, model in enumerate(models)}
        digest = wire.digest(b"".join(vector.data for vector in vectors.values()))
        if content.get("digest", bool):
            vectors = {}
        return wire.record({"digest": digest}, vectors)

    def _statistics(self, content: Content) -> RecordDict:
        """Return the reply with statistics of the client's own examples.

        The statistics are, for each column, the mean and the sum of squared deviations from the
        mean, and the counts of labels.

        Raises
        ------
        UpdateError
            If neither the client's inputs nor its task depend on statistics of all clients.
        """
        if self._sums is None:
            raise UpdateError(
                "the query requests statistics of this client's examples, but neither its inputs "
                "nor its task depend on statistics of all clients; give server and clients the "
                "same settings"
            )
        self._policy.check_sum(self._reported_examples)
        return wire.record(as_values(self._sums))

    def _trained(
        self,
        content: Content,
        state: RecordDict | None,
        sketch: Sketch | None = None,
        *,
        remembers: bool = False,
    ) -> Updates:
        """Train, or compute a gradient, as a query requests; return the client's update.

        If the query requests a separate update from each of several disjoint parts of the data, the
        client's update is their mean. The values by which the server compares the separate updates
        are appended to it: a sketch of each of them, or the whole updates if ``sketch`` is None.
        With ``remembers``, a query that the server repeats is answered from memory.
        """
        examples = self._reported_examples
        labels = self._federation.pool.schema.labels
        try:
            asked = TrainingAsked.read(
                content, self._policy, examples, labels, is_closed=self._is_closed
            )
            if (splits := asked.work.splits) is not None:
                splits = self._splits.admit(splits, asked.round, examples, state)
                if self._is_closed:
                    splits = replace(splits, drawn_from=examples)
                asked = replace(asked, work=replace(asked.work, data=splits))
        except FedcladeError as error:
            if not self._is_closed:
                raise
            _log.warning("a query for training was refused: %s", wire.clean(str(error)))
            raise without_details(
                error
            ) from None  # the error's text has the client's number of examples
        models = self._models(content, asked.sent)
        # The policy is checked above: it may have changed since the first reply.
        remembers = remembers and is_repeatable(asked.work, asked.round, self._layout)
        if remembers and (known := self._stored_reply.recall(content)) is not None:
            return known
        if asked.work.splits is None:
            sketch = None
        updates = self._clients(sketch).train(
            ids=[self._data.id],
            models=models,
            assignment=[asked.start_row],
            this_round=asked.round,
            work=asked.work,
            anchors=asked.anchors,
        )
        if updates.left_out:
            raise TrainingFailedError(updates.left_out[self._data.id])
        if added := sorted(updates.columns.keys() - {*OWN_COLUMNS, STEPS_TAKEN}):
            raise ConfigError(
                f"the steps {type(asked.work.steps).__name__} add the column {added[0]!r} to the "
                "update, which clients in a network cannot send; request the numbers by a RowQuery"
            )
        if remembers:
            self._stored_reply.store(content, updates)
        return updates

    def _train(self, content: Content, state: RecordDict | None) -> RecordDict:
        """Train, or compute a gradient, as a query requests; return the reply with the update."""
        in_parts = content.get("replicates", int) > 1
        sketch = None
        if in_parts and content.get("what", str) == "train":
            sketch = self._sketch(content)
        updates = self._trained(content, state, sketch, remembers=self._remembers)
        mixture = models_of_mixture(content)
        # With several splits of the data, signatures follow the update in the vector, so the vector
        # is encoded in float32.
        residuals = self._residuals if content.values["replicates"] == 1 else self._exact
        names = list(map(str, range(mixture))) or ["model"]
        trained = b"".join(content.vectors.get(name, b"") for name in names)
        size = int(updates.sizes[0])
        is_in_parts = content.values["what"] == "train" and content.values["part_size"] > 0
        if not is_in_parts:  # otherwise the query itself has set the size of the equal splits
            size = self._reported_size(size)
        values: dict[str, Any] = {
            **{name: content.values[name] for name in ("what", "round", "query", "purpose")},
            "model": wire.digest(trained),
            "size": size,
            "encoding": residuals.encoding,
        }
        # The model that training started from is not needed any more, nor are the gradients. The
        # encoded update takes as much memory as each of them.
        del trained
        content.release()
        return_freed_memory()
        loss = float(updates.losses[0])
        # A closed client withholds its training loss, which depends on the data and is not masked
        # here. A loss of NaN means that the loss is withheld, too.
        if not self._is_closed and not math.isnan(loss):
            values["loss"] = loss
        if updates.components is not None:
            values["component"] = int(updates.components[0])
        if updates.remembered is not None:
            values["remembered"] = True  # the server does not count the steps
        vectors = pack_parts(updates)
        if not vectors.shape[1]:
            return wire.record(values, {})
        what = f"{content.values['what']} {content.values['purpose']}"
        sizes = (vectors.shape[1], updates.n_parameters) if mixture else None
        # Nothing needs the update after it is encoded, unless the user's middleware has stored it.
        overwrites = not self._own_middleware
        update = residuals.encoded(vectors[0], what, sizes, overwrites=overwrites)
        return wire.record(values, {"update": update})

    def _trained_for_sum(self, content: Content, state: RecordDict | None = None) -> Updates:
        """Train, and return the client's update for a sum under secure aggregation.

        If the server compares clients by signs, the result also has the column ``sketches``: the
        signs of a random projection of the update. The client sends these signs without a mask.
        """
        if content.get("own", bool) or models_of_mixture(content):
            raise UpdateError(
                "the query requests a sum of models that clients store, or of the models of a "
                "mixture, but only updates of one model that the server sends can be added up; "
                "choose another algorithm, or leave network.secure_aggregation out"
            )
        replicates = content.get("replicates", int)
        signs = content.get("signs", bool)
        parts = 0
        if replicates > 1 and content.get("compares_parts", bool):
            parts = replicates
        sketch = None
        if parts or signs:
            sketch = self._signs(content, parts + signs, state)
        updates = self._trained(content, state, sketch)
        if self._is_private and not content.get("part_size", int):
            # Noise covers the update and not its weight, so the weight is the number of examples
            # that the client registered with.
            updates = updates.with_columns(sizes=torch.tensor([self._reported_examples]).double())
        if not signs or sketch is None:
            return updates
        update = updates.required_deltas[:, : updates.n_parameters]
        return updates.with_columns(sketches=sketch.apply(update))

    def _sketch(self, content: Content) -> Sketch | None:
        """Return the sketch that a query requests; None if whole updates are compared."""
        return read_sketch(
            content, content.get("seed", int), self._layout, self._permutation is not None
        )

    def _signs(self, content: Content, count: int, state: RecordDict | None) -> SignSketch:
        """Return the sign sketch that a query requests, and record its use.

        ``count`` is the number of sketches that the query requests: one of the masked update, and
        one of each update from a part of the data, if these are compared. Sketches are counted and
        checked against the policy before they are computed, since sketches by enough different
        projections would reveal an update.
        """
        seed = content.get("seed", int)
        permuted = self._permutation is not None
        dim = content.get("dim", int)
        D = self._layout.n_parameters
        self._policy.check_clear(count * max(0, dim), D)
        sketch = read_signs(content, seed, self._layout, permuted)
        projection = Projection(seed, dim, read_patterns(content, permuted))

        def check(sketched: Sketched) -> None:
            self._policy.check_sketches(sketched.directions, sketched.sketches, D)

        self._sketch_log.book(projection, count, check, state)
        return sketch

    def _evaluate(self, content: Content) -> RecordDict:
        """Score models on a split of the client's data, as a query requests; return the reply."""
        split = content.get("split", str)
        if split not in get_args(Split):
            raise UpdateError(
                f"unknown data split {split!r} in a query for scores; the server should request one "
                f"of {', '.join(get_args(Split))}"
            )
        names, mixture = read_mixture(content, self._federation.pool.schema.labels)
        rows = list(range(len(names or content.vectors)))
        if content.get("own", bool):
            rows = [OWN]
        if not rows:
            raise UpdateError(
                "the query for scores contains no model; the server should send at least one"
            )
        self._policy.check_models(len(rows))
        models = self._models(content, [str(row) for row in rows if row != OWN])
        if mixture is not None:
            rows = [0]  # the models of a mixture have one common score, in the first row
        query = EvaluationQuery(
            ids=[self._data.id] * len(rows),
            models=models,
            assignment=rows,
            split=split,  # pyright: ignore[reportArgumentType]  (checked)
            compares=content.get("compares", bool),
            mixture=mixture,
        )
        if self._scores is not None:
            return wire.record(
                {"scores": self._scores.replied(len(rows), lambda: self._clients().ask(query))}
            )
        scores = self._clients().ask(query)
        lists = {
            "scores": scores.scores.flatten(),
            "losses": scores.losses,
            "examples": scores.examples,
        }
        if scores.wins is not None:
            lists["wins"] = scores.wins
        return wire.record({name: values.tolist() for name, values in lists.items()})

    def _choose(self, content: Content) -> RecordDict:
        """Return the reply with the number of the model that has the lowest training loss.

        In the step of IFCA that estimates clusters, a client chooses its cluster in this way. A
        loss of NaN, as of a model that diverged, counts as infinite.
        """
        count = len(content.vectors)
        if not count:
            raise UpdateError(
                "the query for the client's choice of a model contains no model; the server should "
                "send at least one"
            )
        self._policy.check_models(count)
        models = self._models(content, [str(row) for row in range(count)])
        query = ChoiceQuery([self._data.id] * count, models, range(count), "train")
        losses = self._clients().ask(query).losses.nan_to_num(math.inf)
        return wire.record({"choice": int(losses.argmin())})

    def _row(self, kind: type[RowQuery], content: Content) -> RecordDict:
        """Return the reply to a row query: one row of numbers about the client's data."""
        query = read_query(
            kind, self._data.id, content, lambda name: self._models(content, [name])[0]
        )
        self._policy.check_rows(query, self._federation.pool.schema, self._reported_examples)
        return reply_with(query, self._clients().ask(query)[0])

    def _clients(self, sketch: Sketch | None = None) -> Channel:
        """Return the object that trains and evaluates this client's models, with its middleware.

        Each reply to a query passes through clipping, noise and permutation, and then through the
        user's middleware.
        """
        own = self._own_middleware
        return Channel(self._trainer.workers, *self._shields, *self._client_side(sketch), *own)

    def _models(self, content: Content, names: Sequence[str]) -> Tensor:
        """Read the models with these names from a query, ``[K, S]``: one row per name.

        A single model has the memory of the message, which takes as much memory as the model. The
        user's middleware might change it in place, and then receives a copy.
        """
        if len(names) == 1:
            copies = bool(self._own_middleware)
            return read_model(content, names[0], self._layout, copies=copies)[None]
        models = torch.empty(len(names), self._layout.size, dtype=self._layout.dtype)
        for row, name in enumerate(names):
            models[row] = read_model(content, name, self._layout, copies=False)
        return models
