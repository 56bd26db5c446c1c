"""Settings that runs over simulated clients and runs over a network share, checked in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypedDict

from fedclade.algorithms import Algorithm, describe
from fedclade.channel import (
    CentralPrivacy,
    DifferentialPrivacy,
    ExamplePrivacy,
    Mechanism,
    Signature,
    refusal,
)
from fedclade.core import Aggregation, ConfigError, LocalTraining, checked, require
from fedclade.models import LoRA, Parts, Preset
from fedclade.runs.callbacks import Callback
from fedclade.runs.early_stopping import EarlyStopping
from fedclade.tasks import FittedTask, Task, build_task

Stream = bool | Literal["auto"]
Every = int | Literal["auto"]


@checked()
@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of a run, shared by :func:`fedclade.simulate` and :func:`fedclade.flower.federate`.

    Parameters
    ----------
    local
        Local training.
    rounds
        Number of communication rounds, at least 1.
    seed
        Seed of every random draw: the same seed gives the same run, bit for bit on the same
        machine.
    client_fraction
        Share of every cluster that trains in a round, in (0, 1]; C of FedAvg.
    evaluate_every
        Evaluate on the clients' test data after every multiple of this number of rounds, and after
        the last round.
    evaluate_clients
        Number of clients to evaluate, at least 1: a fixed sample, drawn by the seed. Clients in a
        cluster are drawn before clients in none. None: all clients. Scores, counts and tables of
        clients are then about the sample.
    evaluate_validation
        Whether to evaluate on the clients' validation data too, whenever clients are evaluated on
        test data. Summaries and tables then report both the test score of the last round and that
        of the round with the best mean score on validation data. Every client must have validation
        data, which it never trains on: see ``validation_fraction`` of
        :func:`fedclade.load_federation` and :func:`fedclade.federation`. Training does not depend
        on it.
    early_stopping
        Rule that finishes the run before its last round, by scores on validation data; by default
        none. It can be given as one of the ``callbacks`` too.
    keep_best
        Whether to store the models of the round with the best mean score on validation data, the
        first of equals, rather than those of the last round: the tree, the models that clients
        store, and the tables of clients, clusters and events are then of that round. The score is
        by the metric of ``early_stopping``, or by the first metric of the task. Every client must
        have validation data. Not available over a network where clients store a personal part of
        their model, or a whole model: they have that of their last round only.
    target
        Score to reach by the metric that counts, such as 0.9; or, as a mapping, by a metric of
        another name. The run reports the round that reaches it.
    task
        The loss and the metrics, by default the data's own; as an option of a function it may be a
        task's name.
    freeze, personal
        Patterns over the names of a model's parameters and buffers, such as ``head.*``. Frozen ones
        are the same everywhere and never sent; personal ones stay with each client. ``personal``
        may also be one word, ``head``, ``body`` or ``norm``; if left out, the algorithm decides.
        See :class:`~fedclade.models.Parts`.
    common
        Parts of the model that all clusters share, as patterns or as the word ``head``, ``body`` or
        ``norm``: they are averaged over all clusters in every round, while all other parts differ
        between clusters. By default none.
    adapter
        Low-rank pairs, :class:`~fedclade.models.LoRA`, that are trained in place of the model.
    signature
        Representation of updates by which clients are compared; by default the whole update.
    stream
        Whether the server stores no single updates, only their sums and signatures. Signatures must
        then be projected if the algorithm compares them. Results do not depend on it beyond
        rounding. ``auto``: if the algorithm permits it, and the updates of all clients would take
        more than a quarter of ``memory``, or come from the actors of engine ``ray``.
    memory
        Memory for the data and the training of a round, in bytes or as ``"2GB"``; by default a
        quarter of the machine's or the GPU's memory. If clients need more, they train in several
        blocks. In a network: memory for the updates.
    aggregate
        Aggregation of the updates of each cluster: by their mean or a robust rule, and with which
        limits; see :class:`~fedclade.Aggregation`.
    min_clients
        Smallest number of clients of a cluster that must reply in a round, at least 1. With fewer
        replies the cluster keeps its model, and is not split.
    permute
        Whether clients permute the entries of their updates by a permutation that the server does
        not know (CFL eqs. 45, 46). In a network: whether the clients share a secret that determines
        the permutation.
    privacy
        Privacy mechanism; None for none. :class:`~fedclade.DifferentialPrivacy`: clients clip their
        updates and add noise. :class:`~fedclade.ExamplePrivacy`: clients train by DP-SGD, which
        protects each of their examples. In a network only the clients can enforce either, and the
        run records it. In a simulation also :class:`~fedclade.channel.CentralPrivacy`: noise on
        sums only. Clients are then sampled one by one, each with probability ``client_fraction``.
    min_cluster_size
        Clusters with fewer members are merged into others, and nothing is released or reported of
        them.
    checkpoint_every
        Rounds between checkpoints in the run's folder. ``auto``: as often as costs less than 2 % of
        the run's time; 0: only when the run stops early.

    Raises
    ------
    ConfigError
        If a value is out of range; one line for each.
    """

    local: LocalTraining = field(default_factory=LocalTraining)
    rounds: int = 20
    seed: int = 0
    client_fraction: float = 1.0
    evaluate_every: int = 1
    evaluate_clients: int | None = None
    evaluate_validation: bool = False
    early_stopping: EarlyStopping | None = None
    keep_best: bool = False
    target: float | Mapping[str, float] | None = None
    task: Task = field(default_factory=Task)
    freeze: tuple[str, ...] = ()
    personal: tuple[str, ...] | Preset = ()
    common: tuple[str, ...] | Preset = ()
    adapter: LoRA | None = None
    signature: Signature = field(default_factory=Signature)
    stream: Stream = "auto"
    memory: int | str | None = None
    aggregate: Aggregation = field(default_factory=Aggregation)
    min_clients: int = 1
    permute: bool = False
    privacy: Mechanism | None = None
    min_cluster_size: int = 1
    checkpoint_every: Every = "auto"

    def __post_init__(self) -> None:
        share = "greater than 0 and at most 1"
        every = self.checkpoint_every
        require(
            ("rounds", self.rounds, self.rounds >= 1, "at least 1"),
            ("seed", self.seed, self.seed >= 0, "at least 0"),
            ("client_fraction", self.client_fraction, 0 < self.client_fraction <= 1, share),
            ("evaluate_every", self.evaluate_every, self.evaluate_every >= 1, "at least 1"),
            (
                *("evaluate_clients", self.evaluate_clients),
                self.evaluate_clients is None or self.evaluate_clients >= 1,
                "at least 1, or left out for all",
            ),
            ("min_clients", self.min_clients, self.min_clients >= 1, "at least 1"),
            (
                "privacy.min_cluster_size",
                self.min_cluster_size,
                self.min_cluster_size >= 1,
                "at least 1",
            ),
            (
                "privacy.permute",
                self.permute,
                not (self.permute and self.is_central),
                "false with central privacy",
            ),
            (
                *(
                    "signature.of",
                    list(self.signature.of),
                    not (self.permute and self.signature.of),
                ),
                "left out where clients permute their updates: the server cannot know which "
                "entries are whose",
            ),
            (
                *("model.common", self.common, not (self.permute and self.common)),
                "left out where clients permute their updates: the server cannot know which "
                "entries are whose",
            ),
            ("stream", self.stream, self.stream in (True, False, "auto"), "true, false or 'auto'"),
            (
                *("checkpoint_every", every),
                every == "auto" if isinstance(every, str) else every >= 0,
                "a number of rounds, 0 for none, or 'auto'",
            ),
        )

    @property
    def is_central(self) -> bool:
        """Whether the server receives sums with noise only, and no updates."""
        return isinstance(self.privacy, CentralPrivacy)

    @property
    def needs_validation(self) -> str:
        """Setting that needs scores on validation data, as in a config; empty if none does."""
        if self.early_stopping is not None:
            return f"stop.patience = {self.early_stopping.patience}"
        if self.keep_best:
            return "keep_best = true"
        return "evaluate_validation = true" if self.evaluate_validation else ""

    @property
    def chosen_by(self) -> str | None:
        """Name of the metric that chooses a round; None for the first of the task."""
        return None if self.early_stopping is None else self.early_stopping.metric

    @property
    def stopping_noted(self) -> dict[str, Any]:
        """Config entries about early stopping and the stored round; empty by default."""
        noted: dict[str, Any] = {"keep_best": True} if self.keep_best else {}
        return (
            noted if self.early_stopping is None else {**noted, "stop": self.early_stopping.section}
        )

    def followed_by(self, callbacks: Sequence[Callback]) -> Sequence[Callback]:
        """Return the callbacks, with the early stopping of the settings if it is missing."""
        stopping = self.early_stopping
        if stopping is None or any(each is stopping for each in callbacks):
            return callbacks
        return [*callbacks, stopping]

    def completed(self, algorithm: Algorithm) -> RunSettings:
        """Return the settings with the algorithm's personal parameters if none are set."""
        return (
            self
            if self.personal or not algorithm.personal
            else replace(self, personal=algorithm.personal)
        )

    @property
    def parts(self) -> Parts:
        """Frozen, personal and common parts of the model, and adapters."""
        return Parts(
            freeze=self.freeze, personal=self.personal, common=self.common, adapter=self.adapter
        )

    def check_algorithm(self, algorithm: Algorithm, clients: int = 0) -> None:
        """Check that an algorithm can run with these settings.

        Parameters
        ----------
        algorithm
            The algorithm.
        clients
            Number of clients; 0 if it is not known.

        Raises
        ------
        ConfigError
            If the algorithm is not compatible with the local training or the aggregation rule; if
            the run should stream, and the algorithm or the rule needs the updates of single
            clients, or full ones are compared; if clients are private, and the algorithm or
            balanced class weights request more than updates from them. One line for each.
        MissingExtraError
            If clients are private and ``dp-accounting`` is not installed.
        """
        name = type(algorithm).__name__
        problems: list[str] = []
        try:
            algorithm.check_training(self.local)
        except ConfigError as error:
            problems.append(str(error))
        if self.aggregate.is_robust and (
            why := algorithm.needs_mean(clients, self.client_fraction)
        ):
            problems.append(f"aggregate.rule = '{self.aggregate.rule}': {why}")
        if self.aggregate.leave_out_opposed is True and not algorithm.clients_choose:
            problems.append(
                f"aggregate.leave_out_opposed = true: clients of {name} do not choose a cluster; "
                "leave it out"
            )
        elif self.aggregate.leave_out_opposed is True and self.stream is True:
            problems.append(
                "stream = true: aggregate.leave_out_opposed = true needs the updates of single "
                "clients; set stream = false"
            )
        if self.stream is True and self.aggregate.is_robust:
            rule = self.aggregate.rule
            problems.append(
                f"stream = true: aggregate.rule = '{rule}' needs the updates of single clients; "
                "set stream = false"
            )
        elif self.stream is True and algorithm.needs_updates:
            problems.append(
                f"stream = true: {name} needs the updates of single clients; set stream = false"
            )
        if self.stream is True and self.signature.kind == "full" and algorithm.compares:
            problems.append(
                "stream = true: signatures of kind 'full' take as much memory as the updates; set "
                "signature.kind = 'projected'"
            )
        if self.min_cluster_size > 1 and algorithm.is_soft:
            problems.append(
                f"privacy.min_cluster_size = {self.min_cluster_size}: every client trains all "
                f"models of {name}, so no cluster has members that could be counted; leave it out, "
                "or take an algorithm with clusters"
            )
        if self.is_central and (algorithm.needs_updates or algorithm.compares):
            problems.append(
                f'privacy.model = "central": {name} looks at updates of single clients, and the server has none; take '
                "private_choice, or an algorithm that compares none"
            )
        if self.is_central and algorithm.trains_outside_cohort:
            problems.append(
                f'privacy.model = "central": {name} with last_fit trains all clients in one round, and the accounting '
                "is of the clients that a round draws; leave out algorithm.last_fit"
            )
        if self.is_central and self.stream is False:
            problems.append(
                'privacy.model = "central" gives the server sums alone; set stream = true, or '
                "leave it out"
            )
        if self.is_central and self.aggregate.looks_at_updates:
            problems.append(
                'privacy.model = "central": rules and limits of [aggregate] look at updates of single clients, and the '
                f"server has none; leave them out, rule = '{self.aggregate.rule}' among them"
            )
        if self.privacy and (what := algorithm.asks(clients, self.client_fraction)):
            problems.append(str(refusal(f"{what} that {name} asks for")))
        if self.privacy and self.task.class_weights == "balanced":
            problems.append(
                str(
                    refusal(
                        "how many examples of each label they have (task.class_weights = "
                        "'balanced')"
                    )
                )
            )
        if problems:
            raise ConfigError("\n".join(problems))
        if isinstance(self.privacy, ExamplePrivacy):
            self.privacy.epsilon({})
        elif isinstance(self.privacy, DifferentialPrivacy):
            self.privacy.epsilon(1)
        elif self.privacy:
            self.privacy.spent([])

    def check_enough(self, clients: int) -> None:
        """Check that there are enough clients for the required members of clusters and replies.

        Parameters
        ----------
        clients
            Number of clients; 0 if it is not known, then nothing is checked.

        Raises
        ------
        ConfigError
            If ``min_cluster_size`` or ``min_clients`` can never be reached.
        """
        least = self.min_cluster_size
        cohort = max(1, round(self.client_fraction * clients))
        require(
            (
                *("privacy.min_cluster_size", least),
                not clients or least <= clients,
                f"at most the number of clients, {clients}",
            ),
            (
                *("min_clients", self.min_clients),
                not clients or self.min_clients <= cohort,
                f"at most the clients of a round, {cohort} of {clients}, or no model ever moves",
            ),
        )

    def as_config(
        self,
        algorithm: Algorithm,
        task: FittedTask,
        engine: str,
        data: Mapping[str, Any],
        model: str,
        **more: Any,
    ) -> dict[str, Any]:
        """Return the config to record for a run that was given none.

        Parameters
        ----------
        algorithm
            The algorithm.
        task
            Loss and metrics of the run.
        engine
            Engine of the run, or ``auto``.
        data
            The ``[data]`` section.
        model
            Name of the model.
        **more
            Further sections.
        """
        top = (
            "rounds",
            "seed",
            "client_fraction",
            "evaluate_every",
            "evaluate_clients",
            "min_clients",
        )
        return {
            **{name: getattr(self, name) for name in top},
            **({"evaluate_validation": True} if self.evaluate_validation else {}),
            **self.stopping_noted,
            "engine": engine,
            "stream": self.stream,
            "local": asdict(self.local),
            "algorithm": describe(algorithm),
            "data": data,
            "model": {"name": model, **self.parts.as_dict()},
            "signature": asdict(self.signature),
            **({} if self.aggregate == Aggregation() else {"aggregate": self.aggregate.described}),
            "target": dict(self.target)
            if isinstance(self.target, Mapping)
            else {task.metrics[0].name: self.target},
            **({} if self.task == Task() else {"task": self.task.described}),
            "privacy": self._privacy_section(),
            **more,
        }

    def _privacy_section(self) -> dict[str, Any]:
        least = {"min_cluster_size": self.min_cluster_size} if self.min_cluster_size > 1 else {}
        noted = {} if self.privacy is None else self.privacy.section
        return {"permute": self.permute, **noted, **least}


class RunOptions(TypedDict, total=False):
    """Fields of :class:`RunSettings` as options of a function; None is the same as left out."""

    local: LocalTraining | None
    rounds: int
    seed: int
    client_fraction: float
    evaluate_every: int
    evaluate_clients: int | None
    evaluate_validation: bool
    early_stopping: EarlyStopping | None
    keep_best: bool
    target: float | Mapping[str, float] | None
    task: Task | str | None
    freeze: tuple[str, ...]
    personal: tuple[str, ...] | Preset
    common: tuple[str, ...] | Preset
    adapter: LoRA | None
    signature: Signature | None
    stream: Stream
    memory: int | str | None
    aggregate: Aggregation | None
    min_clients: int
    permute: bool
    privacy: Mechanism | None
    min_cluster_size: int
    checkpoint_every: Every


def settings_from(
    settings: RunSettings | None, options: RunOptions, callbacks: Sequence[Callback] = ()
) -> RunSettings:
    """Combine settings, options, and an EarlyStopping among callbacks.

    Parameters
    ----------
    settings
        Settings; if None, the defaults.
    options
        Fields that take precedence over ``settings``.
    callbacks
        Callbacks of the run.

    Raises
    ------
    ConfigError
        If an option is out of range, or there are several EarlyStoppings.
    """
    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    if "task" in given:
        given["task"] = build_task(given["task"])
    settings = replace(settings or RunSettings(), **given)
    stoppings = [each for each in callbacks if isinstance(each, EarlyStopping)]
    if not stoppings:
        return settings
    if settings.early_stopping not in (None, stoppings[0]) or len(stoppings) > 1:
        others = [] if settings.early_stopping is None else [settings.early_stopping]
        raise ConfigError(
            f"a run takes one EarlyStopping, or one section [stop], got {[*others, *stoppings]}"
        )
    return replace(settings, early_stopping=stoppings[0])
