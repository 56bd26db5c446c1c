"""A checked config: its top-level settings, its sections, and the run that it describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from fedclade.algorithms import Algorithm, algorithm_class, build_algorithm
from fedclade.channel import Adversary, Faults, Mechanism, Signature, mechanism_of
from fedclade.config.data import load_data, open_files
from fedclade.config.toml_files import Section
from fedclade.core import Aggregation, DataSpec, LocalTraining, require
from fedclade.data import Federation, TableSource
from fedclade.models import PARTS, Parts
from fedclade.runs import (
    Callback,
    Churn,
    EarlyStopping,
    Every,
    OnRound,
    Run,
    RunSettings,
    Stream,
    module_for,
    simulate,
)
from fedclade.tasks import Task, build_task
from fedclade.training import Actors


@dataclass(frozen=True, kw_only=True)
class TopLevel:
    """Settings above the sections.

    See :class:`fedclade.RunSettings` and :func:`fedclade.simulate`.
    """

    seed: int = 0
    rounds: int = 20
    client_fraction: float = 1.0
    evaluate_every: int = 1
    evaluate_clients: int | None = None
    evaluate_validation: bool = False
    keep_best: bool = False
    min_clients: int = 1
    engine: str = "auto"
    stream: Stream = "auto"
    checkpoint_every: Every = "auto"
    tf32: bool = False

    @property
    def shared(self) -> dict[str, Any]:
        """The settings that apply to simulations and networks alike."""
        return {key: value for key, value in asdict(self).items() if key not in ("engine", "tf32")}


@dataclass(frozen=True, kw_only=True)
class TaskSection:
    """The ``[task]`` section: loss and metrics of the model.

    See :func:`fedclade.tasks.build_task`.
    """

    name: str | None = None
    loss: str | None = None
    metrics: tuple[str, ...] = ()
    class_weights: str | tuple[float, ...] | None = None
    loss_over: str | None = None

    @property
    def task(self) -> Task:
        """The task that the section describes.

        Raises
        ------
        ConfigError
            If a name is unknown.
        """
        return build_task(**asdict(self))


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """The ``[privacy]`` section: clipping, noise, and the smallest cluster that is reported."""

    permute: bool = False
    model: str = "local"
    clip_norm: float | None = None
    noise_multiplier: float = 0.0
    signature_noise: float | None = None
    signature_epsilon: float | None = None
    delta: float = 1e-5
    level: str = "client"
    min_cluster_size: int = 1

    def __post_init__(self) -> None:
        least = self.min_cluster_size
        require(("privacy.min_cluster_size", least, least >= 1, "at least 1"))
        mechanism_of(asdict(self))

    @property
    def mechanism(self) -> Mechanism | None:
        """Settings of clipping and noise; None if there is neither.

        They apply to updates, to the gradients of examples, or to sums.
        """
        return mechanism_of(asdict(self))


@dataclass(frozen=True, kw_only=True)
class StopSection:
    """The ``[stop]`` section: when a run ends before its last round.

    See :class:`fedclade.EarlyStopping`.
    """

    patience: int | None = None
    metric: str | None = None
    min_delta: float = EarlyStopping.min_delta
    start_round: int = EarlyStopping.start_round

    def __post_init__(self) -> None:
        others = {name: value for name, value in asdict(self).items() if name != "patience"}
        is_set = others != {name: getattr(EarlyStopping, name) for name in others}
        rule = "a number of evaluations, where the section has other keys"
        require(("stop.patience", self.patience, self.patience is not None or not is_set, rule))
        _ = self.early_stopping

    @property
    def early_stopping(self) -> EarlyStopping | None:
        """The callback that stops the run; None if ``patience`` is unset."""
        if self.patience is None:
            return None
        return EarlyStopping(
            self.metric, self.patience, self.min_delta, start_round=self.start_round
        )


LATER_OF_PRIVACY = ("model", "signature_noise", "signature_epsilon", "level", "min_cluster_size")
"""Keys of ``[privacy]`` that configs of runs by earlier versions do not have."""


@dataclass(frozen=True, kw_only=True)
class Newcomers:
    """The ``[newcomers]`` section: clients that are held back or join late.

    For clients that are held back, see :func:`fedclade.load_federation`. ``without_labels`` is
    whether ``fedclade assign`` assigns newcomers without using their labels.
    """

    clients: int = 0
    samples_per_client: int | None = None
    join_round: int | None = None
    leave_round: int | None = None
    without_labels: bool = False

    @property
    def presence(self) -> Churn:
        """The rounds in which newcomers join, and in which the same number of clients leave."""
        return Churn(join_round=self.join_round, leave_round=self.leave_round)


@dataclass(frozen=True, kw_only=True)
class Presence:
    """The ``[presence]`` section: the hours at which clients are available.

    See :class:`~fedclade.runs.Churn`.
    """

    trace: str | None = None
    round_seconds: float = Churn.round_seconds
    trace_period: float | None = None

    def __post_init__(self) -> None:
        Churn(**asdict(self))


FIXED: Mapping[str, type[Any]] = {
    "local": LocalTraining,
    "signature": Signature,
    "task": TaskSection,
    "privacy": Privacy,
    "faults": Faults,
    "newcomers": Newcomers,
    "presence": Presence,
    "adversary": Adversary,
    "aggregate": Aggregation,
    "stop": StopSection,
}
"""Sections whose keys are fixed. In the other sections, the keys depend on ``name``."""

SECTIONS = ("data", "model", "algorithm", "target", *FIXED)


@dataclass(frozen=True)
class Config:
    """A checked config with all defaults filled in: its top-level settings and its sections."""

    top: TopLevel
    data: Section
    model: Section
    local: LocalTraining
    algorithm: Section
    signature: Signature
    target: Mapping[str, float]  # value to reach, by the name of the metric
    task: TaskSection
    privacy: Privacy
    faults: Faults
    newcomers: Newcomers
    presence: Presence
    adversary: Adversary
    aggregate: Aggregation
    stop: StopSection

    def as_dict(self) -> Section:
        """Return the config in the form of a TOML file.

        Sections and keys that earlier versions did not have are left out if they are unset.
        """
        sections = asdict(self)
        if self.task == TaskSection():  # the data determines the task
            del sections["task"]
        if self.presence == Presence():  # all clients are always available
            del sections["presence"]
        if self.aggregate == Aggregation():  # earlier versions do not have this section
            del sections["aggregate"]
        else:
            sections["aggregate"] = self.aggregate.described
        if self.adversary == Adversary():
            del sections["adversary"]
        else:
            sections["adversary"] = self.adversary.described
        if self.stop == StopSection():
            del sections["stop"]
        if not self.newcomers.without_labels:  # earlier versions do not have this key
            del sections["newcomers"]["without_labels"]
        top = sections.pop("top")
        sections["privacy"] = {  # keys that earlier versions do not have only if they are set
            name: value
            for name, value in sections["privacy"].items()
            if name not in LATER_OF_PRIVACY or value != getattr(Privacy(), name)
        }
        if not self.top.evaluate_validation:  # earlier versions do not have this key
            del top["evaluate_validation"]
        if not self.top.keep_best:
            del top["keep_best"]
        return {**top, **sections}

    @property
    def parts(self) -> Parts:
        """Names of the model's frozen, personal and other special parts.

        If ``[model]`` has no personal parts, they are those of the algorithm.
        """
        parts = Parts.of(self.model)
        of_algorithm = algorithm_class(self.algorithm["name"]).personal
        return (
            parts if parts.personal or not of_algorithm else replace(parts, personal=of_algorithm)
        )

    @property
    def settings(self) -> RunSettings:
        """Run settings that do not depend on where the clients run."""
        return RunSettings(
            **self.top.shared,
            early_stopping=self.stop.early_stopping,
            local=self.local,
            freeze=self.parts.freeze,
            personal=self.parts.personal,
            common=self.parts.common,
            adapter=self.parts.adapter,
            signature=self.signature,
            aggregate=self.aggregate,
            target=self.target or None,
            task=self.task.task,
            permute=self.privacy.permute,
            privacy=self.privacy.mechanism,
            min_cluster_size=self.privacy.min_cluster_size,
        )

    def federation(self, data_dir: str | Path | None = None) -> Federation:
        """Load the data and distribute it to clients.

        Raises the errors of :func:`fedclade.load_federation`.
        """
        late = {
            "newcomers": self.newcomers.clients,
            "newcomer_samples": self.newcomers.samples_per_client,
        }
        return load_data(self.data, self.task.task.kind, data_dir, seed=self.top.seed, **late)

    def own_files(self, data_dir: str | Path | None = None) -> TableSource:
        """Open the files that ``[data]`` names, without encoding their contents yet."""
        return open_files(self.data, self.task.task.kind, data_dir, seed=self.top.seed)

    def run(
        self,
        federation: Federation,
        *,
        device: str = "auto",
        actors: Actors | None = None,
        memory: int | str | None = None,
        callbacks: Sequence[Callback] = (),
        on_round: OnRound | None = None,
        folder: Path | None = None,
        stop: Callable[[], bool] | None = None,
        finish: bool = False,
        progress: bool | None = None,
    ) -> Run:
        """Simulate the run with a federation.

        See :func:`fedclade.simulate` for the other parameters and for the errors that it raises.
        """
        return simulate(
            self.built_algorithm(*self.newcomers.presence.everybody(federation).truth),
            lambda seed: self.built_model(federation.pool.schema, seed),
            federation,
            replace(self.settings, memory=memory),
            device=device,
            engine=self.top.engine,
            actors=actors,
            tf32=self.top.tf32,
            faults=self.faults,
            adversary=self.adversary,
            presence=replace(self.newcomers.presence, **asdict(self.presence)),
            callbacks=callbacks,
            on_round=on_round,
            config=self.as_dict(),
            folder=folder,
            stop=stop,
            finish=finish,
            progress=progress,
        )

    def built_algorithm(
        self,
        true_clusters: Mapping[int, int] | None,
        later: Mapping[int, Mapping[int, int]] | None = None,
    ) -> Algorithm:
        """Build the algorithm.

        Parameters
        ----------
        true_clusters
            True cluster of each client at the start; None if unknown. Only the oracle uses it.
        later
            True clusters that apply from some rounds on, by round.

        Raises
        ------
        ConfigError
            If the algorithm is the oracle and the true clusters are unknown.
        """
        return build_algorithm(
            self.algorithm["name"], options(self.algorithm), true_clusters, later
        )

    def built_model(self, schema: DataSpec, seed: int) -> nn.Module:
        """Build the model for some data, before its parts are separated.

        Its initial parameters are drawn from ``seed``. Raises the errors of
        :func:`fedclade.models.build_model`.
        """
        arguments = {key: value for key, value in options(self.model).items() if key not in PARTS}
        return module_for(self.model["name"], schema, seed, arguments)


def options(section: Section) -> Section:
    """Return the keys of a section except ``name``."""
    return {key: value for key, value in section.items() if key != "name"}
