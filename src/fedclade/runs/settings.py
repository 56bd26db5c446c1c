"""What a run over simulated clients and one over a network have in common: their settings, checked in one place."""

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
    """The settings of a run, those that :func:`fedclade.simulate` and :func:`fedclade.flower.federate` share.

    Parameters
    ----------
    local
        Local training.
    rounds
        Communication rounds, at least 1.
    seed
        Keys every random draw: the same seed gives the same run, bit for bit on the same machine.
    client_fraction
        Share of every cluster that trains in a round, in (0, 1]; C of FedAvg.
    evaluate_every
        Evaluate on the clients' test data after every so many rounds, and after the last.
    evaluate_clients
        How many clients an evaluation is of, at least 1: a fixed sample of them, drawn by the seed,
        of those in a cluster before those that no cluster holds. None: all. Scores, counts and
        tables of clients are of the sample.
    evaluate_validation
        Evaluate on the clients' validation data too, wherever they are evaluated on test data.
        Summaries and tables then say both the last round's test score and that of the round with
        the best mean score on validation data. Every client must have validation data, which it
        never trains on: see ``validation_fraction`` of :func:`fedclade.load_federation` and
        :func:`fedclade.federation`. Training does not depend on it.
    early_stopping
        When to finish the run before its last round, by scores on validation data; by default
        never. It can be given as one of the ``callbacks`` too.
    keep_best
        Keep the models of the round with the best mean score on validation data, the first of
        equals, rather than those of the last round: the tree, the models that clients keep, and the
        tables of clients, clusters and events are then of that round. The score is by the metric of
        ``early_stopping``, or the first of the task. It needs validation data of every client. Not
        over a network where clients keep a part of their model, or a model of their own: they keep
        that of their last round only.
    target
        What to reach of the metric that counts, such as 0.9; or of another, by its name. The run
        reports when it was.
    task
        The loss and the metrics, by default the data's own; as an option of a function it may be a
        task's name.
    freeze, personal
        Patterns over the names of a model's parameters and buffers, such as ``head.*``: what is the
        same everywhere and never sent, and what stays with each client; that may also be one word,
        ``head``, ``body`` or ``norm``, and if left out it is as the algorithm has it. See
        :class:`~fedclade.models.Parts`.
    common
        What all clusters have in common, as patterns or one of these words: averaged over all of
        them, in every round, while the rest is each cluster's own. By default nothing.
    adapter
        Low-rank pairs, :class:`~fedclade.models.LoRA`, that are trained in place of the model.
    signature
        What clients are compared by; the whole update by default.
    stream
        Whether the server keeps no updates, only their sums and signatures, which must then be
        projected where the algorithm compares them. Results do not depend on it beyond rounding.
        ``auto``: if the algorithm can do with that, and the updates of all clients would take more
        than a quarter of ``memory``, or come from the actors of engine ``ray``.
    memory
        What the data and the training of a round may take, in bytes or as ``"2GB"``; by default a
        quarter of the machine's or the GPU's memory. Where clients need more, they train in several
        blocks. In a network: what the updates may take.
    aggregate
        How the updates of each cluster become one: by their mean, or by a robust rule, and within
        which limits; see :class:`~fedclade.Aggregation`.
    min_clients
        A cluster of which fewer clients answer in a round keeps its model, and is not split.
    permute
        Let clients shuffle what they send by a permutation that the server does not know (CFL eqs.
        45, 46). In a network: whether the clients share a secret that gives the permutation.
    privacy
        How clients clip their updates, and how much noise they add; None for neither. In a network
        only clients can do that, and the run notes it. :class:`~fedclade.ExamplePrivacy` in place
        of :class:`~fedclade.DifferentialPrivacy` lets them train by DP-SGD, which protects each of
        their examples. Or, in a simulation, :class:`~fedclade.channel.CentralPrivacy`: noise on
        sums alone. Clients are then sampled one by one, each with probability ``client_fraction``.
    min_cluster_size
        Clusters with fewer members are merged into others, and nothing is released or reported of
        them.
    checkpoint_every
        Rounds between checkpoints in the run's folder. ``auto``: as often as costs less than 2 % of
        the run; 0: only when the run stops early.

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
        """Whether the server gets sums with noise, and no updates."""
        return isinstance(self.privacy, CentralPrivacy)

    @property
    def needs_validation(self) -> str:
        """The setting that needs scores on validation data, as in a config; empty if none does."""
        if self.early_stopping is not None:
            return f"stop.patience = {self.early_stopping.patience}"
        if self.keep_best:
            return "keep_best = true"
        return "evaluate_validation = true" if self.evaluate_validation else ""

    @property
    def chosen_by(self) -> str | None:
        """The name of the metric that chooses a round; None for the first of the task."""
        return None if self.early_stopping is None else self.early_stopping.metric

    @property
    def stopping_noted(self) -> dict[str, Any]:
        """What a config notes of early stopping and of the round that is kept; nothing by default."""
        noted: dict[str, Any] = {"keep_best": True} if self.keep_best else {}
        return (
            noted if self.early_stopping is None else {**noted, "stop": self.early_stopping.section}
        )

    def followed_by(self, callbacks: Sequence[Callback]) -> Sequence[Callback]:
        """Return the callbacks with the early stopping of the settings, where it is not among them."""
        stopping = self.early_stopping
        if stopping is None or any(each is stopping for each in callbacks):
            return callbacks
        return [*callbacks, stopping]

    def completed(self, algorithm: Algorithm) -> RunSettings:
        """Return the settings with what an algorithm says that they leave out: which parameters are personal."""
        return (
            self
            if self.personal or not algorithm.personal
            else replace(self, personal=algorithm.personal)
        )

    @property
    def parts(self) -> Parts:
        """Which parts the model has."""
        return Parts(
            freeze=self.freeze, personal=self.personal, common=self.common, adapter=self.adapter
        )

    def check_algorithm(self, algorithm: Algorithm, clients: int = 0) -> None:
        """Check that an algorithm can run with these settings, with so many clients if that is known.

        Raises
        ------
        ConfigError
            If the algorithm cannot go with the local training or the rule of aggregation; if the
            run should stream, and the algorithm or the rule needs the updates of single clients, or
            full ones are compared; if clients are private, and the algorithm or the weights of
            labels ask them for more than updates. One line for each.
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
        """Check that so many clients, 0 if not known, are enough for clusters and rounds; a ConfigError if not."""
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
        """Return what is noted as the config of a run that was given none: these settings, and sections besides."""
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
    """The fields of :class:`RunSettings` as options of a function; None is as if left out."""

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
    """Return settings with what was given besides as options, which come first, and an EarlyStopping among callbacks.

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
