"""The class :class:`Config`, a checked config, and the classes of its sections.

A config describes a run: it can build the run's data, model and algorithm, and simulate the run.
The functions that do this are called as ``runs.simulate``, so that they are imported at their first
use: a config is checked without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_type_hints

from fedclade import runs
from fedclade.algorithms import Algorithm, build_algorithm
from fedclade.channel import (
    Adversary,
    CentralPrivacy,
    Faults,
    Mechanism,
    Signature,
    build_middleware,
    mechanism_of,
)
from fedclade.config.data import load_data, open_files, without_later_keys
from fedclade.config.toml_files import Section
from fedclade.core import (
    Aggregation,
    DataSpec,
    LocalTraining,
    ServerOptimizer,
    as_section,
    check_settings,
    document_settings,
    require,
    setting,
    values_of,
    with_settings_of,
)
from fedclade.models import PARTS, Parts
from fedclade.runs import Churn, EarlyStopping, RunSettings, TopSettings
from fedclade.tasks import Task, build_task

if TYPE_CHECKING:
    from torch import nn

    from fedclade.data import Federation, TableSource
    from fedclade.runs import Callback, OnRound, Run
    from fedclade.training import Actors


@document_settings
@dataclass(frozen=True, kw_only=True)
class TopLevel(TopSettings):
    """Top-level settings of a config, which belong to no section.

    See :class:`fedclade.RunSettings` and :func:`fedclade.simulate`.
    """

    engine: str = setting(
        "auto",
        doc="""Method by which clients are trained, one of
        :data:`~fedclade.training.ENGINES` or ``ray``. ``auto`` takes the fastest.""",
    )
    tf32: bool = setting(
        False, doc="Let a GPU round the factors of float32 products to 10 bits, which is faster."
    )

    @property
    def shared(self) -> dict[str, Any]:
        """The top-level settings that simulations and runs over a network have in common."""
        return values_of(self, TopSettings)


@document_settings
@dataclass(frozen=True, kw_only=True)
class TaskSection:
    """The ``[task]`` section: loss and metrics of the model.

    See :func:`fedclade.tasks.build_task`.
    """

    name: str | None = setting(
        None,
        doc="""Name of the task, or ``module:factory``; if left out, the data determines it. The
        other keys replace parts of it, see :class:`~fedclade.tasks.Task`.""",
    )
    loss: str | None = setting(None, doc="Name of the loss, or ``module:function``.")
    metrics: tuple[str, ...] = setting((), doc="Names of the metrics; the first counts.")
    class_weights: str | tuple[float, ...] | None = setting(
        None, doc="A weight for each label, or ``balanced``."
    )
    loss_over: str | None = setting(
        None, doc="``batch`` for a loss in which the examples of a batch depend on each other."
    )
    output: int | str | None = setting(
        None,
        doc="""Entry of the model's output that is scored, if the model returns a tuple, a dict or an
        object: its position or its name. By default the entry ``logits``, or the only tensor.""",
    )

    @property
    def task(self) -> Task:
        """The task (loss and metrics of the model) that the section describes.

        Raises
        ------
        ConfigError
            If a name is unknown.
        """
        return build_task(**asdict(self))


@document_settings
@with_settings_of(RunSettings, "privacy")
@with_settings_of(CentralPrivacy)
@dataclass(frozen=True, kw_only=True)
class Privacy:
    """The ``[privacy]`` section of a config: settings of differential privacy.

    They are clipping, noise, and the size of the smallest cluster that may be reported.
    """

    model: str = setting(
        "local",
        doc="Place of the noise: at clients, ``local``, or on sums, ``central``, in a simulation.",
        later=True,
    )
    level: str = setting(
        "client",
        doc="Object of protection: a ``client`` with its data, or each ``example``, by DP-SGD.",
        later=True,
    )

    def __post_init__(self) -> None:
        check_settings(self, "privacy")
        mechanism_of(asdict(self))

    @property
    def mechanism(self) -> Mechanism | None:
        """Settings of clipping and noise; None if both are unset.

        Depending on ``model`` and ``level``, they apply to the updates of clients, to the gradients
        of examples, or to sums of updates.
        """
        return mechanism_of(asdict(self))


@document_settings
@with_settings_of(EarlyStopping)
@dataclass(frozen=True, kw_only=True)
class StopSection:
    """The ``[stop]`` section of a config: conditions for ending a run before its last round.

    See :class:`fedclade.EarlyStopping`.
    """

    patience: int | None = setting(
        None,
        doc="""Number of evaluations in a row without an improvement after which the run finishes,
        at least 1. If left out, the run has all its rounds.""",
    )

    def __post_init__(self) -> None:
        others = [each for each in fields(self) if each.name != "patience"]
        is_set = any(getattr(self, each.name) != each.default for each in others)
        rule = "a number of evaluations if other keys of [stop] are set"
        require(("stop.patience", self.patience, self.patience is not None or not is_set, rule))
        _ = self.early_stopping

    @property
    def early_stopping(self) -> EarlyStopping | None:
        """The callback that ends a run early; None if ``patience`` is unset."""
        return None if self.patience is None else EarlyStopping(**asdict(self))


MOST_CLIENTS = 100
MOST_ROWS = 100_000
"""Largest numbers of clients and of training rows for which ``references = "auto"`` has an effect.

With ``"auto"``, runs with more clients or rows train no reference models.
"""


@document_settings
@dataclass(frozen=True, kw_only=True)
class ReportSection:
    """The ``[report]`` section of a config: additional measurements that the report needs."""

    references: bool | Literal["auto"] = setting(
        "auto",
        doc="""Whether each client also trains alone, and one model for all, to be compared with;
        see :func:`fedclade.simulate`. ``auto``: for own files of at most 100 clients with together
        at most 100,000 training rows.""",
    )

    def wants_references(self, data: Section, federation: Federation, engine: str) -> bool:
        """Return whether a run trains reference models, given its data and engine.

        References are a model that each client trains alone, and a single model for all clients.
        """
        if self.references != "auto":
            return self.references
        if "files" not in data or engine == "ray" or len(federation) > MOST_CLIENTS:
            return False
        return sum(federation.sizes[client] for client in federation.ids) <= MOST_ROWS


@document_settings
@with_settings_of(Churn, "newcomers")
@dataclass(frozen=True, kw_only=True)
class Newcomers:
    """The ``[newcomers]`` section of a config: clients that do not take part from the start.

    Newcomers are excluded from the run, to be assigned to its clusters afterwards (see
    :func:`fedclade.load_federation`), or join the run in a later round.
    """

    clients: int = setting(
        0, doc="Number of further clients that are held back as newcomers, made from the same data."
    )
    samples_per_client: int | None = setting(
        None, doc="Number of examples of each newcomer; by default as many as of the other clients."
    )
    without_labels: bool = setting(
        False,
        doc="Whether ``fedclade assign`` assigns newcomers without using their labels.",
        later=True,
    )

    @property
    def presence(self) -> Churn:
        """Schedule by which newcomers join the run while the same number of clients leave."""
        return Churn(**values_of(self, Churn))


@document_settings
@with_settings_of(Churn, "presence")
@dataclass(frozen=True, kw_only=True)
class Presence:
    """The ``[presence]`` section of a config: when clients are available (simulated absences).

    See :class:`~fedclade.runs.Churn`.
    """

    def __post_init__(self) -> None:
        Churn(**asdict(self))


@dataclass(frozen=True)
class Config:
    """Checked config of a run, with all defaults filled in.

    ``top`` has the top-level settings; each other field is a section. A section with a fixed set of
    keys is an object of its settings class. The other sections are mappings, whose possible keys
    depend on the value of the key ``name``.
    """

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
    server: ServerOptimizer
    stop: StopSection
    report: ReportSection
    middleware: Mapping[str, Section] = field(default_factory=dict[str, Section])

    def as_dict(self) -> Section:
        """Return the config as nested dictionaries, in the structure of a TOML file.

        Sections and keys that earlier versions did not have are left out if they are unset.
        """
        sections: Section = as_section(self.top)
        for name, each in FIXED.items():
            section = getattr(self, name)
            if name not in LATER or section != each():
                sections[name] = as_section(section)
        sections["data"] = without_later_keys(deepcopy(self.data))
        for name in ("model", "algorithm", "target"):
            sections[name] = deepcopy(getattr(self, name))
        if self.middleware:
            sections["middleware"] = deepcopy(dict(self.middleware))
        return sections

    @property
    def parts(self) -> Parts:
        """Patterns for the model's frozen, personal and other special parameters.

        If ``[model]`` specifies no personal parameters, the algorithm's personal parameters apply.
        """
        parts = Parts.of(self.model)
        if parts.personal:
            return parts
        # The oracle's requirements do not depend on the true clusters.
        personal = self.built_algorithm({}).requires.personal
        return replace(parts, personal=personal) if personal else parts

    @property
    def settings(self) -> RunSettings:
        """Run settings that apply to simulations and to runs over a network."""
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
            server=self.server,
            target=self.target or None,
            task=self.task.task,
            privacy=self.privacy.mechanism,
            **values_of(self.privacy, RunSettings),
        )

    def federation(self, data_dir: str | Path | None = None) -> Federation:
        """Load the data, distribute it to clients, and add the attributes of clients if given.

        ``data_dir`` is the folder with the files of the data set; by default, the folder that
        ``FEDCLADE_DATA_DIR`` names. Raises the errors of :func:`fedclade.load_federation` and of
        :meth:`Federation.with_attributes <fedclade.data.Federation.with_attributes>`.
        """
        late = {
            "newcomers": self.newcomers.clients,
            "newcomer_samples": self.newcomers.samples_per_client,
        }
        data = {key: value for key, value in self.data.items() if key != "attributes"}
        found = load_data(data, self.task.task.kind, data_dir, seed=self.top.seed, **late)
        attributes = self.data.get("attributes")
        return found if attributes is None else found.with_attributes(attributes)

    def own_files(self, data_dir: str | Path | None = None) -> TableSource:
        """Open the files that the section ``[data]`` names, without encoding their contents yet."""
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
        references: bool | None = None,
    ) -> Run:
        """Simulate the run that the config describes, with the data of a federation.

        See :func:`fedclade.simulate` for the other parameters and for the errors that it raises. If
        ``references`` is None, the section ``[report]`` decides about reference models.
        """
        if references is None:
            references = self.report.wants_references(self.data, federation, self.top.engine)
        return runs.simulate(
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
            middleware=build_middleware(self.middleware),
            callbacks=callbacks,
            on_round=on_round,
            config=self.as_dict(),
            folder=folder,
            stop=stop,
            finish=finish,
            progress=progress,
            references=references,
        )

    def built_algorithm(
        self,
        true_clusters: Mapping[int, int] | None,
        later: Mapping[int, Mapping[int, int]] | None = None,
    ) -> Algorithm:
        """Build the algorithm that the section ``[algorithm]`` describes.

        Parameters
        ----------
        true_clusters
            True cluster of each client at the start, by client id; None if unknown. It is used only
            by the oracle, a baseline that trains with the true clusters.
        later
            True clusters that apply in later rounds, by the first round in which they apply.

        Raises
        ------
        ConfigError
            If the algorithm is the oracle and the true clusters are unknown.
        """
        return build_algorithm(
            self.algorithm["name"], options(self.algorithm), true_clusters, later
        )

    def built_model(self, schema: DataSpec, seed: int) -> nn.Module:
        """Build the whole model, including frozen and personal parameters, for given data.

        ``schema`` describes the examples, such as the shape of inputs. The initial parameters are
        drawn with ``seed``. Raises the errors of :func:`fedclade.models.build_model`.
        """
        arguments = {key: value for key, value in options(self.model).items() if key not in PARTS}
        return runs.module_for(self.model["name"], schema, seed, arguments)


FIXED: Mapping[str, type[Any]] = {
    name: cast("type[Any]", kind)
    for name, kind in get_type_hints(Config).items()
    if is_dataclass(kind) and name != "top"
}
"""Settings class of each section with a fixed set of keys, by the section's name."""

LATER = ("task", "presence", "adversary", "aggregate", "server", "stop", "report")
"""Names of sections that earlier versions did not have."""

SECTIONS = ("data", "model", "algorithm", "target", "middleware", *FIXED)


def options(section: Section) -> Section:
    """Return a section's keys and values without the key ``name``."""
    return {key: value for key, value in section.items() if key != "name"}
