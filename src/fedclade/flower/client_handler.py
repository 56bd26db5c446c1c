"""One client of a network: it replies to the server's queries from its own data.

Only what a query requests leaves the client.
"""

from __future__ import annotations

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
    multiplier_for,
    refusal,
)
from fedclade.core import (
    FORBIDS,
    OWN,
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
)
from fedclade.data import DataSchema, Federation, StatisticsQuery, rescale_federation
from fedclade.flower import wire
from fedclade.flower.closed_scores import ClosedScores, ScoreNoise, is_mean
from fedclade.flower.data_splits import SplitLog
from fedclade.flower.kinds import KINDS
from fedclade.flower.models_sent import models_of_mixture, read_mixture
from fedclade.flower.node_store import NodeStore, Residuals, uses_kept
from fedclade.flower.policy import NotDisclosedError, Policy, Usage, UsageLog, cost_of
from fedclade.flower.private_replies import ErrorShield, without_details
from fedclade.flower.replies import as_values, read_statistics, size_class
from fedclade.flower.row_messages import read_query, reply_with
from fedclade.flower.schema_exchange import encoding_digest
from fedclade.flower.secure.member import Member, joined, training_of
from fedclade.flower.signing import Key, secret_digest, secret_model, seed_of
from fedclade.flower.sketch_log import Projection, Sketched, SketchLog
from fedclade.flower.training_asked import TrainingAsked, TrainingFailedError
from fedclade.flower.wire import Content, shown
from fedclade.models import Parts
from fedclade.runs import Maker, check_inputs_apart, module_for
from fedclade.tasks import FittedTask, Task
from fedclade.training import PrivateSteps, SimulatedClients, note_unsent_buffers

# Objects that a client makes itself for a query: its model and sketches.


def maker_of(model: nn.Module | str | Maker, federation: Federation, parts: Parts) -> Maker:
    """Return a function that makes a model with the given parts from a seed.

    If ``model`` is a module, the result is the same for every seed.
    """

    def make(seed: int) -> nn.Module:
        if isinstance(model, str):
            return module_for(model, federation.pool.schema, seed)
        return model if isinstance(model, nn.Module) else model(seed)

    return lambda seed: parts.applied(make(seed), seed)


def read_sketch(content: Content, seed: int, layout: Layout, permuted: bool) -> Sketch | None:
    """Return the sketch by which the server compares updates, as a query requests it."""
    dim = content.get("dim", int)
    of = read_patterns(content, permuted)
    if content.values.get("compared") == "signs":
        return read_signs(content, seed, layout, permuted)
    kind = "projected" if dim else "full"
    return Signature(kind=kind, dim=max(dim, 1), of=of).sketch(seed, layout)


def read_signs(content: Content, seed: int, layout: Layout, permuted: bool) -> SignSketch:
    """Return the sketch of a masked update, or of a split's update; it has only signs."""
    dim = content.get("dim", int)
    of = read_patterns(content, permuted)
    if dim < 1:
        raise UpdateError("asked for the signs of no projection of an update")
    return Signature(kind="signs", dim=dim, of=of).signs(seed, layout)


def read_patterns(content: Content, permuted: bool) -> tuple[str, ...]:
    """Return the patterns of the parameters that are compared."""
    of = content.values.get("of", [])
    if not isinstance(of, list) or not all(isinstance(pattern, str) for pattern in of):
        raise UpdateError(f"'of' should be a list of patterns, got {shown(of)}")
    if of and permuted:
        raise UpdateError(
            "asked for the updates of single parameters, which its permutation is there to hide"
        )
    return tuple(of)


# Privacy of a real client: noise that no other party knows, and a ledger of all that leaves the
# client.

SCORES_SHARE = 0.1
"""Share of a client's ε that its scores may cost, unless its policy sets their cost."""

SCORES_EPSILON = 1.0
"""Privacy cost ε of a client's scores if the client's own ε has no bound."""


def privatizing_of(
    privacy: Mechanism | None, budget: Budget | None, folder: Path | None, sizes: Mapping[int, int]
) -> Privatizing | PrivateExamples | None:
    """Return the middleware that makes a client's replies private; None if it is not private.

    Parameters
    ----------
    privacy
        Mechanism of the run; None if the run adds no noise.
    budget
        Budget of the client; None if the client has none.
    folder
        Folder for the client's ledger.
    sizes
        Number of the client's training examples, by client.

    Raises
    ------
    ConfigError
        If the client has a budget and the run adds no noise, or if the run adds noise and the
        client has no budget, no folder, or a budget of another level. Otherwise the author of the
        run's config could turn off the client's protection, or weaken it to single examples.
    """
    privacy = check_local(privacy)
    if privacy is None:
        if budget is not None:  # otherwise the author of the run's config could turn the noise off
            raise ConfigError(
                f"this client may spend ε = {budget.epsilon:g}, and an update without noise has no "
                "bound; set privacy.clip_norm and privacy.noise_multiplier"
            )
        return None
    if folder is None:
        raise ConfigError(
            "a private client needs a folder for its ledger; set folder in its node config"
        )
    # The run's config sets the noise, so without a budget of its own a client has no guarantee.
    if budget is None:
        raise ConfigError(
            "privacy.clip_norm is set, and this client does not say what it may spend; set "
            "epsilon in its node config, or epsilon=inf for no bound"
        )
    level = privacy.level if isinstance(privacy, ExamplePrivacy) else "client"
    if budget.level != level:
        raise ConfigError(
            f"this client may spend ε = {budget.epsilon:g} of level {budget.level!r}, and the "
            f"run's privacy.level is {level!r}; to take part, set level={level!r} in its node "
            "config"
        )
    if isinstance(privacy, ExamplePrivacy):
        return booked_steps(privacy, _step_ledger(folder, budget), "network", sizes)
    return booked(privacy, _ledger(folder, budget), "network")


def score_noise_of(
    budget: Budget, folder: Path, *, most: int, epsilon: float | None = None, examples: int = 1
) -> ScoreNoise:
    """Return the noise with which ``most`` scores together cost a client an ε.

    A score is in [0, 1]. If all data of the client were replaced, a score could change to any other
    number in this range. If one of the ``examples`` of held-out data is added or removed, a mean
    over them changes by at most 1/``examples``.

    Parameters
    ----------
    budget
        Budget of the client.
    folder
        Folder with the client's ledgers.
    most
        Largest number of scores that leave the client.
    epsilon
        Privacy cost of all scores; None for :data:`SCORES_SHARE` of the budget.
    examples
        Smallest number of held-out examples in a mean.
    """
    if epsilon is None:
        epsilon = SCORES_EPSILON if math.isinf(budget.epsilon) else SCORES_SHARE * budget.epsilon
    z = multiplier_for(epsilon, most, budget.delta)
    multiplier = z / SENSITIVITY  # standard deviation for a sensitivity of 1
    if budget.level == "example":
        steps = _step_ledger(folder, budget)
        book = lambda count: steps.book(multiplier, {1.0: count}, "scores", 0)  # noqa: E731
        return ScoreNoise(multiplier / max(1, examples), book)
    releases = _ledger(folder, budget)
    return ScoreNoise(multiplier, lambda count: releases.book(z, "scores", 0, count))


def _ledger(folder: Path, budget: Budget) -> Ledger:
    return Ledger(folder / "privacy.json", budget, folder / "example-privacy.json")


def _step_ledger(folder: Path, budget: Budget) -> StepLedger:
    return StepLedger(
        folder / "example-privacy.json", budget, beside=Ledger(folder / "privacy.json")
    )


# Training and evaluation of one client. Its inputs and its loss may depend on statistics of all
# clients' examples.


class Trainer:
    """Trainer and evaluator of one client, with its own SimulatedClients.

    It rebuilds its :class:`~fedclade.training.SimulatedClients` when the statistics of all clients
    change.

    Columns with means were scaled by the means of the clients whose data is on this machine. The
    other clients are elsewhere, so scaled columns need the statistics of all clients. Balanced
    weights of labels need them, too.
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
        self.task = task.of(schema)
        self.workers = make(federation, self.task)
        labels = (schema.labels or 0) if self.task.balanced else 0
        self.needs = StatisticsQuery(
            federation.ids, columns is not None and columns.mean is not None, labels
        )
        self._taken: Mapping[str, Any] = {}

    @property
    def needs_all(self) -> bool:
        """Whether the client needs the statistics of all clients' examples."""
        return self.needs.inputs or self.needs.labels > 0

    def take(self, values: Mapping[str, Any]) -> None:
        """Apply the statistics of all clients' examples from the values of a query.

        Raises
        ------
        UpdateError
            If the statistics are missing or malformed.
        """
        columns = self._federation.pool.x.shape[1] if self.needs.inputs else 0
        found = read_statistics(values, columns, self.needs.labels)
        if as_values(found) == self._taken:
            return
        federation = rescale_federation(self._federation, found) if columns else self._federation
        self.task = self._asked.of(
            federation.pool.schema, found.labels if self.needs.labels else None
        )
        self.workers, self._taken = self._make(federation, self.task), as_values(found)


_log = logging.getLogger(__name__)


class ClientHandler:
    """One client with its data; :func:`fedclade.flower.client_app` documents the settings.

    Raises
    ------
    ConfigError
        If a setting is not possible.
    DataError
        If the data is not that of one client, or changes during the run.
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
        device: str = "cpu",
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
    ) -> None:
        if len(federation) != 1:
            raise DataError(
                f"data_fn should return a federation of one client, got {len(federation)}; see "
                "alone()"
            )
        if federation.stages:
            raise DataError(
                f"{federation} changes during a run, which a network does not know of; leave "
                "data.drift out"
            )
        check_encoding(encoding)
        self._federation, self._data = federation, federation.clients[0]
        self._make = maker_of(model, federation, parts or Parts())
        self._number = number
        self._folder = folder
        self._secret = secret
        self._encoding = encoding_digest(federation.pool, agreed)
        self._policy, self._usage_log = policy or Policy(), UsageLog(folder)
        self._splits = SplitLog(folder, self._data.key, self._policy, self._usage_log)
        self._sketch_log = SketchLog(folder)
        # If true, nothing leaves the client in clear except what its policy names.
        self._is_closed = self._policy.is_closed(private=privacy is not None)
        self._policy.check_sums_possible(has_peers=peers is not None, has_folder=folder is not None)
        self._member = Member(self._policy, peers, folder)
        self._imports = {*self._policy.imports, *([model] if isinstance(model, str) else [])}
        module, parts = self._make(seed), parts or Parts()
        note_unsent_buffers(module, federation.pool.schema)
        personal = parts.personal_names(module)

        def workers(federation: Federation, task: FittedTask) -> SimulatedClients:
            private = (
                PrivateSteps.of(privacy, secret=True)
                if isinstance(privacy, ExamplePrivacy)
                else None
            )
            held = self._held(federation)
            return SimulatedClients(
                held,
                module,
                device,
                engine,
                task=task,
                personal=personal,
                private=private,
                always_replies=self._is_closed,
            )

        self._trainer = Trainer(federation, task or Task(), workers)
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
        mechanism = "" if privacy is None else str(privacy)
        self._residuals = Residuals(folder, encoding, self._layout, mechanism)
        self._exact = Residuals(folder, "float32", self._layout, mechanism)
        self._sums = self._clients().ask(self._trainer.needs) if self._trainer.needs_all else None
        self._kept = NodeStore(folder)
        self._scores = self._closed_scores(budget) if self._is_closed else None

    def _closed_scores(self, budget: Budget | None) -> ClosedScores | None:
        """Return the mechanism for reporting scores; None if the policy does not disclose them.

        Raises
        ------
        ConfigError
            If the metric has no bounds, so that no noise can hide its scores.
        """
        metric = self._trainer.task.metrics[0]
        if "scores" not in self._policy.disclose:
            return None
        if budget is None or self._folder is None:
            return ClosedScores(metric)
        if not metric.share:
            raise ConfigError(
                f"this client discloses its scores, and the first metric, {metric.name!r}, has no "
                "bounds, so no noise can hide what they tell; leave scores out of disclose in its "
                "node config, or set task.metrics to begin with one in [0, 1], such as 'accuracy'"
            )
        most = self._policy.most_scores(private=True)
        epsilon = self._policy.scores_epsilon
        examples = self._fewest_scored() if is_mean(metric, self._trainer.task.kind) else 1
        noise = score_noise_of(budget, self._folder, most=most, epsilon=epsilon, examples=examples)
        return ClosedScores(metric, noise)

    def _fewest_scored(self) -> int:
        """Return the smallest number of examples that the client is scored on."""
        return min(
            [len(rows) for rows in (self._data.test, self._data.validation) if len(rows)], default=1
        )

    def answer(
        self, content: Content, state: RecordDict | None = None, key: Key | None = None
    ) -> RecordDict:
        """Return the reply to a query.

        The query counts in the client's policy as soon as it is accepted.

        Parameters
        ----------
        content
            Content of the query.
        state
            Record that Flower stores for this client between two messages.
        key
            The client's own key, by which other clients know it.

        Raises
        ------
        FedcladeError
            If there is no reply, with the reason, such as a rule of the client's policy. Errors of
            a private client have no details, which are logged instead.
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
        if kind not in KINDS:
            raise PolicyError(
                f"{FORBIDS} the question {shown(kind)}, which it does not know; if it is that of a "
                "method of your own, pass its class to client_app(queries=[...]); it knows "
                f"{', '.join(KINDS)}"
            )
        entry = KINDS[kind]
        mine = wire.layout_digest(self._layout)
        if kind != "hello" and (theirs := content.get("layout", str)) != mine:
            raise UpdateError(
                f"asked about a model of structure {theirs}, and has one of structure {mine}"
            )
        self._policy.check_kind(kind)
        self._policy.check_declared(kind, private=self._is_private)
        self._check_disclosed(kind, content)
        rows = entry.row_query
        answered = answers[kind] if rows is None else partial(self._row, rows)
        # A request of the stage "masked" contains a training request, with the same rules and cost.
        if kind == "masked":
            kind = "train"
            content = training_of(content)
        elif not (kind == "train" and content.get("own", bool) and not content.get("shares", bool)):
            self._policy.check_masked(kind)
        if self._trainer.needs_all and entry.takes_sums:
            self._trainer.take(content.values)
        # Count the query before anything is computed: one that fails half-way must not be free.
        cost = cost_of(kind, content, is_closed=self._is_closed)
        # Training without noise is a function of the query, so a repeated query for replicates
        # reveals nothing new and is free. Every reply with noise is a new release.
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
        with importing_only(self._imports):
            answer = answered(content)
        if keeps and (kind == "train" or (rows is not None and rows.stores)):
            self._kept.close(state)
        return answer

    @property
    def _reported_examples(self) -> int:
        """Number of training examples that the client reports, and by which it refuses queries."""
        return self._reported_size(len(self._data.train))

    def _check_usage(self, usage: Usage) -> None:
        self._policy.check_usage(usage, self._reported_examples, private=self._is_private)

    def _check_disclosed(self, kind: str, content: Content) -> None:
        """Check that the data that a reply discloses may leave the client in clear."""
        query = KINDS[kind].query
        if query is None or not self._is_closed:
            return
        if self._is_private and query.mechanism == "none":
            rows = KINDS[kind].row_query
            if rows is not None:
                # Refused here, before the query counts: a server must not use up the policy.
                raise refusal(rows.reveals or f"{rows.discloses} (a {rows.__name__})")
            return  # the middleware Withholding refuses the query, and names what it withholds
        if kind == "evaluate":
            if self._is_private and content.get("split", str) == "train":
                return  # Withholding refuses these scores, too
            self._check_scores(content)
        self._policy.check_disclosed(
            query.discloses, f"the question {kind!r}", private=self._is_private
        )

    def _check_scores(self, content: Content) -> None:
        """Check that a query for scores is about held-out data, and requests only scores."""
        because = "a privacy budget" if self._is_private else "secure-aggregation"
        if content.get("split", str) == "train":
            raise NotDisclosedError(f"{FORBIDS} scores on training data to a client with {because}")
        if content.get("compares", bool):
            raise NotDisclosedError(
                f"{FORBIDS} to count for how many examples each model is best, with {because}"
            )

    def _held(self, federation: Federation) -> Federation:
        """Return the data that the client trains and evaluates on."""
        return federation

    def _register(self, content: Content) -> RecordDict:
        truth = self._federation.true_clusters
        encoding = self._federation.encoding
        is_own = encoding is not None and encoding.source is not None
        description = f"{self._federation.pool.name}, clients with data of their own"
        return wire.record(
            {
                "number": -1 if self._number is None else self._number,
                "name": self._data.name,
                "size": self._reported_size(self._clients().sizes[self._data.id]),
                "schema": wire.to_json(self._federation.pool.schema),
                "description": description if is_own else str(self._federation),
                "layout": wire.layout_digest(self._layout),
                "task": self._trainer.task.described,
                "scaled": self._trainer.needs.inputs,
                "encoding": self._encoding,
                "true_cluster": -1 if truth is None else truth[self._data.id],
                "secret": "" if self._secret is None else secret_digest(self._secret),
                "scores": self._policy.discloses_scores(private=self._is_private),
            }
        )

    def _reported_size(self, count: int) -> int:
        """Return the number of training examples to report; of a closed client, a size class."""
        return size_class(count) if self._is_closed else count

    def _initial(self, content: Content) -> RecordDict:
        """Draw initial models from the clients' shared secret.

        The server knows its own seeds, so it would know models that are drawn from them.
        """
        if self._secret is None or self._permutation is None:
            raise UpdateError("asked for initial models, which only clients with a secret draw")
        seed = seed_of(self._secret)
        count = content.get("models", int)
        self._policy.check_models(count)
        models = [
            self._permutation.apply(secret_model(self._make, self._layout, seed, k))
            for k in range(count)
        ]
        vectors = {str(k): wire.raw_vector(model) for k, model in enumerate(models)}
        digest = wire.digest(b"".join(vector.data for vector in vectors.values()))
        return wire.record({"digest": digest}, {} if content.get("digest", bool) else vectors)

    def _statistics(self, content: Content) -> RecordDict:
        """Return the statistics of the client's own examples, if it needs those of all clients."""
        if self._sums is None:
            raise UpdateError(
                "asked for sums of its examples, and neither its inputs nor its task need those "
                "of all"
            )
        self._policy.check_sum(self._reported_examples)
        return wire.record(as_values(self._sums))

    def _trained(
        self, content: Content, state: RecordDict | None, sketch: Sketch | None = None
    ) -> Updates:
        """Train, or compute a gradient, as a query requests; return one update.

        Updates from splits of the data are compared by a ``sketch``, or entirely without one. The
        compared values are appended to the update.
        """
        examples = self._reported_examples
        labels = self._federation.pool.schema.labels
        try:
            asked = TrainingAsked.read(
                content, self._policy, examples, labels, is_closed=self._is_closed
            )
            this_round = self._splits.admit(asked.round, examples, state)
            if self._is_closed and this_round.replicates > 1:
                this_round = replace(this_round, drawn_from=examples)
            asked = replace(asked, round=this_round)
        except FedcladeError as error:
            if not self._is_closed:
                raise
            _log.warning("a question for training was refused: %s", wire.clean(str(error)))
            raise without_details(
                error
            ) from None  # the error's text has the client's number of examples
        models = self._models(content, asked.sent)
        ids = [self._data.id]
        rows = [OWN if asked.goes_on else 0]
        if asked.kind == "train":
            sketch = sketch if asked.round.replicates > 1 else None
            anchors = [len(asked.sent) - 1] if asked.sent and asked.mixture is None else None
            updates = self._clients(sketch).train(
                ids,
                models,
                rows,
                asked.round,
                anchors,
                own=asked.own,
                shares=asked.shares,
                mixture=asked.mixture,
            )
        else:
            updates = self._clients().gradients(ids, models, [0], asked.round)
        if updates.left_out:
            raise TrainingFailedError(updates.left_out[self._data.id])
        return updates

    def _train(self, content: Content, state: RecordDict | None) -> RecordDict:
        in_parts = content.get("replicates", int) > 1
        sketch = self._sketch(content) if in_parts and content.get("what", str) == "train" else None
        updates = self._trained(content, state, sketch)
        mixture = models_of_mixture(content)
        # A closed client withholds the loss of a model that it stores: it depends on the training
        # data, and no mask hides it.
        loss = math.nan if self._is_closed else float(updates.losses[0])
        # With several replicates the vector has signatures after the update, so it is encoded in
        # float32.
        residuals = self._residuals if content.values["replicates"] == 1 else self._exact
        sizes = updates.required_deltas.shape[1], updates.n_parameters
        names = list(map(str, range(mixture))) or ["model"]
        trained = b"".join(content.vectors.get(name, b"") for name in names)
        what = f"{content.values['what']} {content.values['purpose']}"
        is_in_parts = content.values["what"] == "train" and content.values["part_size"] > 0
        return wire.record(
            {
                **{name: content.values[name] for name in ("what", "round", "query", "purpose")},
                "model": wire.digest(trained),
                # The query itself states the size of equal splits.
                "size": int(updates.sizes[0])
                if is_in_parts
                else self._reported_size(int(updates.sizes[0])),
                "encoding": residuals.encoding,
                **({} if loss != loss else {"loss": loss}),  # NaN means that the loss is withheld
                **({} if updates.components is None else {"component": int(updates.components[0])}),
            },
            {}
            if not updates.required_deltas.shape[1]
            else {
                "update": residuals.encoded(
                    updates.required_deltas[0], what, sizes if mixture else None
                )
            },
        )

    def _trained_for_sum(self, content: Content, state: RecordDict | None = None) -> Updates:
        """Train as :meth:`_trained` does, for a sum of updates.

        If whole updates are compared, the signs of a sketch of the update are appended.
        """
        if content.get("own", bool) or models_of_mixture(content):
            raise UpdateError(
                "asked to add up something else than the updates of one model that is sent"
            )
        replicates = content.get("replicates", int)
        signs = content.get("signs", bool)
        parts = replicates if replicates > 1 and content.get("compares_parts", bool) else 0
        sketch = self._signs(content, parts + signs, state) if parts or signs else None
        updates = self._trained(content, state, sketch)
        if self._is_private and not content.get("part_size", int):
            # Noise covers the update and not its weight, so the weight is the number of examples
            # that the client registered with.
            updates = replace(updates, sizes=torch.tensor([self._reported_examples]).double())
        if not signs or sketch is None:
            return updates
        update = updates.required_deltas[:, : updates.n_parameters]
        return joined(updates, sketch.apply(update))

    def _sketch(self, content: Content) -> Sketch | None:
        return read_sketch(
            content, content.get("seed", int), self._layout, self._permutation is not None
        )

    def _signs(self, content: Content, count: int, state: RecordDict | None) -> SignSketch:
        """Return the sketch of a masked update and its splits; count its ``count`` uses first."""
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
        split = content.get("split", str)
        if split not in get_args(Split):
            raise UpdateError(
                f"asked for the scores on {split!r} data, which is none of "
                f"{', '.join(get_args(Split))}"
            )
        names, mixture = read_mixture(content, self._federation.pool.schema.labels)
        rows = [OWN] if content.get("own", bool) else list(range(len(names or content.vectors)))
        if not rows:
            raise UpdateError("asked for the scores of no model")
        self._policy.check_models(len(rows))
        models = self._models(content, [str(row) for row in rows if row != OWN])
        rows = rows if mixture is None else [0]
        ids = [self._data.id] * len(rows)
        compares = content.get("compares", bool)
        query = EvaluationQuery(ids, models, rows, split, compares, mixture)  # pyright: ignore[reportArgumentType]  (checked)
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
        lists |= {} if scores.wins is None else {"wins": scores.wins}
        return wire.record({name: values.tolist() for name, values in lists.items()})

    def _choose(self, content: Content) -> RecordDict:
        """Choose the model with the lowest training loss.

        The loss of a model that diverged is infinite.
        """
        count = len(content.vectors)
        if not count:
            raise UpdateError("asked to choose from no model")
        self._policy.check_models(count)
        models = self._models(content, [str(row) for row in range(count)])
        query = ChoiceQuery([self._data.id] * count, models, range(count), "train")
        losses = self._clients().ask(query).losses.nan_to_num(math.inf)
        return wire.record({"choice": int(losses.argmin())})

    def _row(self, kind: type[RowQuery], content: Content) -> RecordDict:
        """Return one row of numbers about the client's data."""
        query = read_query(
            kind, self._data.id, content, lambda name: self._models(content, [name])[0]
        )
        self._policy.check_rows(query, self._federation.pool.schema, self._reported_examples)
        return reply_with(query, self._clients().ask(query)[0])

    def _clients(self, sketch: Sketch | None = None) -> Channel:
        return Channel(self._trainer.workers, *self._shields, *self._client_side(sketch))

    def _models(self, content: Content, names: Sequence[str]) -> Tensor:
        size = self._layout.size
        dtype = self._layout.dtype
        models = [
            wire.read_vector(content.vector(name), (size,), dtype, f"model {name!r}")
            for name in names
        ]
        return torch.stack(models) if models else torch.empty(0, size, dtype=dtype)
