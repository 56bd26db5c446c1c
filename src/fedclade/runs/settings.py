"""Settings that runs over simulated clients and runs over a network share, with their checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypedDict

from fedclade.algorithms import Algorithm, Requires, RunFacts, describe
from fedclade.channel import (
    CentralPrivacy,
    ExamplePrivacy,
    Mechanism,
    Signature,
    check_accounting,
    refusal_to_reveal,
)
from fedclade.core import (
    Aggregation,
    ConfigError,
    LocalTraining,
    Range,
    ServerOptimizer,
    as_section,
    at_least,
    check_settings,
    checked,
    document_settings,
    in_range,
    one_of,
    require,
    setting,
)
from fedclade.models import LoRA, Parts, Preset
from fedclade.runs.callbacks import Callback
from fedclade.runs.early_stopping import EarlyStopping
from fedclade.tasks import FittedTask, Task, build_task

Stream = bool | Literal["auto"]
Every = int | Literal["auto"]


@document_settings
@dataclass(frozen=True, kw_only=True)
class TopSettings:
    """Settings of a run that are top-level keys of a config, outside its sections."""

    seed: int = setting(
        0,
        at_least(0),
        doc="""Seed of every random draw: the same seed gives the same run, bit for bit on the same
        machine.""",
    )
    rounds: int = setting(
        20,
        at_least(0),
        doc="""Number of communication rounds, at least 0. With 0, no client trains, and the initial
        models are evaluated, for example a pretrained model.""",
    )
    client_fraction: float = setting(
        1.0,
        in_range("(0, 1]", "greater than 0 and at most 1"),
        doc="""Share of every cluster's clients that train in a round, in (0, 1]; C of FedAvg. It is
        a share of the available clients: over a network, of those that are connected when the round
        begins, but with central privacy of all clients.""",
    )
    evaluate_every: int = setting(
        1,
        at_least(1),
        doc="""Evaluate on the clients' test data after every multiple of this number of rounds, and
        after the last round.""",
    )
    evaluate_clients: int | None = setting(
        None,
        at_least(1, "at least 1, or left out for all"),
        doc="""Number of clients to evaluate, at least 1: a fixed sample, drawn by the seed. Clients
        in a cluster are drawn before clients that are in no cluster. Scores, counts and tables of
        clients are then about the sample. None: all clients are evaluated.""",
    )
    evaluate_validation: bool = setting(
        False,
        doc="""Whether to evaluate on the clients' validation data too, whenever clients are
        evaluated on test data. Summaries and tables then report the test scores of two rounds: the
        last, and the round with the best mean score on validation data. Every client must have
        validation data, which it never trains on: see ``validation_fraction`` of
        :func:`fedclade.load_federation` and :func:`fedclade.federation`. Training does not depend
        on it.""",
        later=True,
    )
    keep_best: bool = setting(
        False,
        doc="""Whether to store the models of the round with the best mean score on validation data
        (the first of equal rounds) instead of the models of the last round. The tree, the models
        that clients store, and the tables of clients, clusters and events are then from the best
        round. The score is by the metric of ``early_stopping``, or by the first metric of the task.
        Every client must have validation data. Not available over a network if clients store a
        personal part of their model, or a whole model: clients store it for their last round
        only.""",
        later=True,
    )
    min_clients: int = setting(
        1,
        at_least(1),
        doc="""Smallest number of clients of a cluster that must reply in a round, at least 1. With
        fewer replies the cluster's model does not change, and the cluster is not split.""",
    )
    stream: Stream = setting(
        "auto",
        one_of(True, False, "auto", text="true, false or 'auto'"),
        doc="""Whether the server stores no single updates, only their sums and signatures.
        Signatures must then be projected if the algorithm compares them. The setting changes
        results by rounding only. ``auto``: true if the algorithm permits it, and the updates of all
        clients would take more than a quarter of ``memory``, or come from the actors of engine
        ``ray``; over a network also if the updates of 100 clients, or of all if there are more,
        would take more than 64 MiB. A server of a network that does not stream decides again when
        more clients have joined.""",
    )
    checkpoint_every: Every = setting(
        "auto",
        Range(
            "a number of rounds, 0 for none, or 'auto'",
            lambda every: every == "auto" if isinstance(every, str) else every >= 0,
        ),
        doc="""Rounds between checkpoints in the run's folder. ``auto``: as often as costs less than
        2 % of the run's time; 0: only when the run ends or is interrupted.""",
    )


@checked()
@document_settings
@dataclass(frozen=True, kw_only=True)
class RunSettings(TopSettings):
    """Settings of a run, shared by :func:`fedclade.simulate` and :func:`fedclade.flower.federate`.

    Raises
    ------
    ConfigError
        If settings are out of range; the message has a line for each of them.
    """

    local: LocalTraining = setting(factory=LocalTraining, doc="Local training.")
    early_stopping: EarlyStopping | None = setting(
        None,
        doc="""Rule that finishes the run before its last round, by scores on validation data; None
        by default. It can also be passed as one of the ``callbacks``.""",
    )
    target: float | Mapping[str, float] | None = setting(
        None,
        doc="""Score to reach by the first metric of the task, such as 0.9; or a mapping from the
        name of another metric to a score. The run reports the round that reaches the score.""",
    )
    task: Task = setting(
        factory=Task,
        doc="""The loss and the metrics, by default the data's own; as an option of a function it
        may be a task's name.""",
    )
    freeze: tuple[str, ...] = setting(
        (),
        doc="""Patterns for the names of a model's parameters and buffers, such as ``head.*``.
        Matching ones are frozen: equal at all clients, and never sent. See
        :class:`~fedclade.models.Parts`.""",
    )
    personal: tuple[str, ...] | Preset = setting(
        (),
        doc="""Patterns for the names of parameters and buffers that stay with each client, or one
        of the words ``head``, ``body`` and ``norm``. If left out, the algorithm decides.""",
    )
    common: tuple[str, ...] | Preset = setting(
        (),
        doc="""Parts of the model that all clusters share, as patterns for names or as one of the
        words ``head``, ``body`` and ``norm``. They are averaged over all clusters in every round,
        while all other parts differ between clusters. By default, no part is shared.""",
    )
    adapter: LoRA | None = setting(
        None,
        doc="""Low-rank adapters (:class:`~fedclade.models.LoRA`) that are trained in place of the
        model's own weights; None by default.""",
    )
    signature: Signature = setting(
        factory=Signature,
        doc="Representation of an update by which clients are compared; by default, the update.",
    )
    memory: int | str | None = setting(
        None,
        doc="""Memory for the data and the training of a round, in bytes or as text such as
        ``"2GB"``; by default a quarter of the memory of the machine or the GPU. If the clients of a
        round need more, they train in several groups, one after another. In a network: memory for
        the updates.""",
    )
    aggregate: Aggregation = setting(
        factory=Aggregation,
        doc="""Aggregation of the updates of each cluster: by their mean or a robust rule, with
        limits on single updates; see :class:`~fedclade.Aggregation`.""",
    )
    server: ServerOptimizer = setting(
        factory=ServerOptimizer,
        doc="""Optimizer by which each cluster's model moves; by default, a model moves by the mean
        update of its clients. See :class:`~fedclade.ServerOptimizer`.""",
    )
    permute: bool = setting(
        False,
        doc="""Whether clients permute the entries of their updates by a permutation that the server
        does not know (CFL eqs. 45, 46). In a network: whether the clients share a secret that
        determines the permutation.""",
        key="privacy.permute",
    )
    privacy: Mechanism | None = setting(
        None,
        doc="""Privacy mechanism; None for none. :class:`~fedclade.DifferentialPrivacy`: clients
        clip their updates and add noise. :class:`~fedclade.ExamplePrivacy`: clients train by
        DP-SGD, which protects each of their examples. In a network, only the clients can enforce
        these mechanisms, and the run records the setting. In a simulation also
        :class:`~fedclade.channel.CentralPrivacy`: noise is added to sums of updates only. Clients
        are then sampled independently, each with probability ``client_fraction``.""",
    )
    min_cluster_size: int = setting(
        1,
        at_least(1),
        doc="""Smallest number of members of a cluster. Smaller clusters are merged into other
        clusters, and no model or number of them is released or reported.""",
        key="privacy.min_cluster_size",
        later=True,
    )

    def __post_init__(self) -> None:
        hidden = (
            "left out with privacy.permute = true, since the server cannot know which layer the "
            "entries of a permuted update belong to"
        )
        trains_without_noise = self.local.trainer is not None and isinstance(
            self.privacy, ExamplePrivacy
        )
        has_no_noise = (
            "left out with privacy.level = 'example', which trains by DP-SGD and cannot add noise to "
            "the steps of own code; set privacy.level = 'client'"
        )
        of = list(self.signature.of)
        permutes_sums = self.permute and self.is_central
        check_settings(
            self,
            "",
            ("privacy.permute", self.permute, not permutes_sums, "false with central privacy"),
            ("signature.of", of, not (self.permute and of), hidden),
            ("model.common", self.common, not (self.permute and self.common), hidden),
            ("local.trainer", self.local.trainer, not trains_without_noise, has_no_noise),
        )

    @property
    def is_central(self) -> bool:
        """Whether the run uses central privacy: the server then receives only sums with noise."""
        return isinstance(self.privacy, CentralPrivacy)

    @property
    def needs_validation(self) -> str:
        """Setting that requires scores on validation data, as text such as ``keep_best = true``.

        The text is empty if no setting requires such scores.
        """
        if self.early_stopping is not None:
            return f"stop.patience = {self.early_stopping.patience}"
        if self.keep_best:
            return "keep_best = true"
        return "evaluate_validation = true" if self.evaluate_validation else ""

    @property
    def chosen_by(self) -> str | None:
        """Name of the metric that chooses the best round; None for the task's first metric."""
        return None if self.early_stopping is None else self.early_stopping.metric

    @property
    def stopping_noted(self) -> dict[str, Any]:
        """Config entries for early stopping and ``keep_best``; empty if neither is set."""
        noted: dict[str, Any] = {"keep_best": True} if self.keep_best else {}
        return (
            noted if self.early_stopping is None else {**noted, "stop": self.early_stopping.section}
        )

    def followed_by(self, callbacks: Sequence[Callback]) -> Sequence[Callback]:
        """Return the callbacks of a run, including the early stopping of these settings, if any."""
        stopping = self.early_stopping
        if stopping is None or any(each is stopping for each in callbacks):
            return callbacks
        return [*callbacks, stopping]

    def completed(self, algorithm: Algorithm) -> RunSettings:
        """Return settings in which ``personal`` has the algorithm's default if it was not set."""
        personal = algorithm.requires.personal
        return self if self.personal or not personal else replace(self, personal=personal)

    @property
    def parts(self) -> Parts:
        """Frozen, personal and common parts of the model, and its adapters."""
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
            the run should stream, and the algorithm or the rule needs the updates of single clients
            or compares full updates; or if clients are private, but the algorithm or balanced class
            weights need other numbers from clients than updates. The message has a line for each
            problem.
        MissingExtraError
            If clients are private and ``dp-accounting`` is not installed.
        """
        name = type(algorithm).__name__
        requires = algorithm.requires
        problems: list[str] = []
        run = RunFacts(
            clients=clients or None,
            client_fraction=self.client_fraction,
            local=self.local,
            aggregation=self.aggregate,
        )
        try:
            algorithm.check(run)
        except ConfigError as error:
            problems.append(str(error))
        if self.server.optimizer != "none" and not requires.server_steps:
            problems.append(
                f"server.optimizer = '{self.server.optimizer}' needs an algorithm that moves models "
                f"by mean updates, and {name} computes them anew in each round; leave out the "
                "section [server]"
            )
        if self.aggregate.leave_out_opposed is True and not requires.clients_choose:
            problems.append(
                "aggregate.leave_out_opposed = true needs an algorithm whose clients choose their "
                f"cluster, and clients of {name} do not; leave out the setting"
            )
        elif self.aggregate.leave_out_opposed is True and self.stream is True:
            problems.append(
                "stream = true: aggregate.leave_out_opposed = true needs the updates of single "
                "clients; set stream = false"
            )
        problems += self._list_streaming_problems(name, requires)
        if self.min_cluster_size > 1 and requires.soft_clusters:
            problems.append(
                f"privacy.min_cluster_size = {self.min_cluster_size}: every client trains all "
                f"models of {name}, so clusters have no members that could be counted; leave out "
                "the setting, or use an algorithm that assigns each client to one cluster"
            )
        problems += self._list_central_problems(name, requires)
        if self.privacy and (what := requires.reports_in(clients, self.client_fraction)):
            problems.append(str(refusal_to_reveal(f"{what} that {name} requests")))
        if self.privacy and self.task.class_weights == "balanced":
            problems.append(
                str(
                    refusal_to_reveal(
                        "how many examples of each label they have (task.class_weights = "
                        "'balanced')"
                    )
                )
            )
        if problems:
            raise ConfigError("\n".join(problems))
        if self.privacy:
            check_accounting()

    def _list_streaming_problems(self, name: str, requires: Requires) -> list[str]:
        """List the reasons why a run cannot stream, if the setting ``stream`` demands streaming.

        ``name`` is the name of the algorithm, ``requires`` its requirements.
        """
        if self.stream is not True:
            return []
        problems: list[str] = []
        if self.aggregate.is_robust:
            rule = self.aggregate.rule
            problems.append(
                f"stream = true: aggregate.rule = '{rule}' needs the updates of single clients; "
                "set stream = false"
            )
        elif requires.updates:
            problems.append(
                f"stream = true: {name} needs the updates of single clients; set stream = false"
            )
        if self.signature.kind == "full" and requires.signatures:
            problems.append(
                "stream = true: signatures of kind 'full' take as much memory as the updates; set "
                "signature.kind = 'projected'"
            )
        return problems

    def _list_central_problems(self, name: str, requires: Requires) -> list[str]:
        """List the reasons why a run cannot use central privacy, if the settings demand it.

        ``name`` is the name of the algorithm, ``requires`` its requirements.
        """
        if not self.is_central:
            return []
        problems: list[str] = []
        if requires.updates or requires.signatures:
            problems.append(
                f'privacy.model = "central": {name} needs the updates of single clients, but the '
                "server receives only sums of updates; use private_choice, or another algorithm "
                "that does not compare updates"
            )
        if requires.clients_outside_cohort:
            problems.append(
                f'privacy.model = "central": {name} with last_fit trains all clients in one round, '
                "but the privacy accounting assumes that a round trains a random sample of the "
                "clients; leave out algorithm.last_fit"
            )
        if self.stream is False:
            problems.append(
                'privacy.model = "central" allows only sums of updates; set stream = true, or '
                "leave out the setting stream"
            )
        if self.aggregate.weights != "auto":
            problems.append(
                'privacy.model = "central" weighs all clients alike, so that the noise suffices; '
                "leave out aggregate.weights"
            )
        if self.aggregate.looks_at_updates:
            problems.append(
                'privacy.model = "central": rules and limits of [aggregate] need the updates of '
                "single clients, but the server receives only sums of updates; leave out the "
                f"section, including rule = '{self.aggregate.rule}'"
            )
        return problems

    def check_enough(self, clients: int) -> None:
        """Check that a run has enough clients for ``min_cluster_size`` and ``min_clients``.

        The number of clients must be at least ``min_cluster_size``, and the number of clients that
        train in a round must be at least ``min_clients``, the required number of replies.

        Parameters
        ----------
        clients
            Number of clients; 0 if it is not known, so that nothing can be checked.

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
                f"at most the number of clients that train in a round ({cohort} of {clients}), "
                "since no model would ever change otherwise",
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
        """Build the config to record for a run whose caller passed no config.

        Parameters
        ----------
        algorithm
            The algorithm.
        task
            Loss and metrics of the run.
        engine
            Engine of the run, or ``auto``.
        data
            The section ``[data]``.
        model
            Name of the model.
        **more
            Further sections, by name.
        """
        top = as_section(self, TopSettings)
        del top["checkpoint_every"]  # no result depends on it
        return {
            **top,
            **self.stopping_noted,
            "engine": engine,
            "local": self.local.described,
            "algorithm": describe(algorithm),
            "data": data,
            "model": {"name": model, **self.parts.as_dict()},
            "signature": asdict(self.signature),
            **({} if self.aggregate == Aggregation() else {"aggregate": self.aggregate.described}),
            **({} if self.server == ServerOptimizer() else {"server": as_section(self.server)}),
            "target": dict(self.target)
            if isinstance(self.target, Mapping)
            else {task.metrics[0].name: self.target},
            **({} if self.task == Task() else {"task": self.task.described}),
            "privacy": self._privacy_section(),
            **more,
        }

    def _privacy_section(self) -> dict[str, Any]:
        """Return the section ``[privacy]`` of a config, as recorded for a run."""
        least = {"min_cluster_size": self.min_cluster_size} if self.min_cluster_size > 1 else {}
        noted = {} if self.privacy is None else self.privacy.section
        return {"permute": self.permute, **noted, **least}


class RunOptions(TypedDict, total=False):
    """Fields of :class:`RunSettings` as keyword arguments of a function.

    None means the same as leaving an argument out. In addition, ``trainer`` is the field
    :attr:`LocalTraining.trainer` of the local training.
    """

    seed: int
    rounds: int
    client_fraction: float
    evaluate_every: int
    evaluate_clients: int | None
    evaluate_validation: bool
    keep_best: bool
    min_clients: int
    stream: Stream
    checkpoint_every: Every
    local: LocalTraining | None
    early_stopping: EarlyStopping | None
    target: float | Mapping[str, float] | None
    task: Task | str | None
    freeze: tuple[str, ...]
    personal: tuple[str, ...] | Preset
    common: tuple[str, ...] | Preset
    adapter: LoRA | None
    signature: Signature | None
    memory: int | str | None
    aggregate: Aggregation | None
    server: ServerOptimizer | None
    permute: bool
    privacy: Mechanism | None
    min_cluster_size: int
    trainer: str | Callable[..., Any] | None


def settings_from(
    settings: RunSettings | None, options: RunOptions, callbacks: Sequence[Callback] = ()
) -> RunSettings:
    """Combine settings with single options, and with an EarlyStopping among the callbacks.

    Parameters
    ----------
    settings
        Settings of the run; None for the default settings.
    options
        Single fields, which take precedence over ``settings``.
    callbacks
        Callbacks of the run.

    Raises
    ------
    ConfigError
        If an option is out of range, or more than one EarlyStopping is given.
    """
    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    if "task" in given:
        given["task"] = build_task(given["task"])
    trainer = given.pop("trainer", None)
    settings = replace(settings or RunSettings(), **given)
    if trainer is not None:
        settings = replace(settings, local=replace(settings.local, trainer=trainer))
    stoppings = [each for each in callbacks if isinstance(each, EarlyStopping)]
    if not stoppings:
        return settings
    if settings.early_stopping not in (None, stoppings[0]) or len(stoppings) > 1:
        others = [] if settings.early_stopping is None else [settings.early_stopping]
        raise ConfigError(
            "a run can have only one EarlyStopping (as a callback, as the setting early_stopping, "
            f"or as the section [stop] of its config), got {[*others, *stoppings]}"
        )
    return replace(settings, early_stopping=stoppings[0])
