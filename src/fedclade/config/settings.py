"""Configs: TOML files that say what to run. They are read, checked and taken apart here; nothing else knows of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from fedclade.algorithms import ALGORITHMS, Algorithm, Oracle, build_algorithm
from fedclade.channel import DifferentialPrivacy, Faults, Signature
from fedclade.config.toml_files import Section, apply_overrides, read_toml
from fedclade.core import (
    ConfigError,
    DataSpec,
    LocalSpec,
    check_arguments,
    defaults,
    known_arguments,
    shown,
    unknown,
)
from fedclade.data import PARTITIONS, SOURCES, Federation, check_data_settings, check_newcomers, load_federation
from fedclade.models import FROM_DATA, model_factory
from fedclade.runs import Churn, Every, Follow, OnRound, Run, RunSettings, Stream, module_for, simulate
from fedclade.training import check_engine

T = TypeVar("T")

_NOT_IN_DATA = ("seed", "data_dir", "source_arguments", "partition_arguments", "newcomers", "newcomer_samples")
"""Arguments of ``load_federation`` that are no keys of the ``[data]`` section."""

SECTIONS = ("data", "model", "local", "algorithm", "signature", "target", "privacy", "faults", "newcomers")
WRITTEN_ONLY = ("versions", "network")
"""What a run folder's config has besides, so that it can be run again as it is: in a simulation, if it was not one."""


@dataclass(frozen=True, kw_only=True)
class TopLevel:
    """The settings above the sections; see :class:`fedclade.RunSettings` and :func:`fedclade.simulate`."""

    seed: int = 0
    rounds: int = 20
    client_fraction: float = 1.0
    evaluate_every: int = 1
    min_clients: int = 1
    engine: str = "auto"
    stream: Stream = "auto"
    checkpoint_every: Every = "auto"
    tf32: bool = False

    @property
    def shared(self) -> dict[str, Any]:
        """Those of them that a simulation shares with a network."""
        return {key: value for key, value in asdict(self).items() if key not in ("engine", "tf32")}


@dataclass(frozen=True, kw_only=True)
class Target:
    """The ``[target]`` section: the accuracy that clients should reach."""

    accuracy: float | None = None


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """The ``[privacy]`` section: what clients do to an update before they send it."""

    permute: bool = False
    clip_norm: float | None = None
    noise_multiplier: float = 0.0
    delta: float = 1e-5

    def __post_init__(self) -> None:
        DifferentialPrivacy.of(asdict(self))


@dataclass(frozen=True, kw_only=True)
class Newcomers:
    """The ``[newcomers]`` section: clients who are held back from training, or join it late.

    See :func:`fedclade.load_federation` and :class:`fedclade.runs.churn.Churn`.
    """

    clients: int = 0
    samples_per_client: int | None = None
    join_round: int | None = None
    leave_round: int | None = None

    @property
    def presence(self) -> Churn:
        """When they join, and when as many clients leave."""
        return Churn(join_round=self.join_round, leave_round=self.leave_round)


@dataclass(frozen=True)
class Config:
    """A checked config.

    Parameters
    ----------
    top, local, signature, target, privacy, faults, newcomers
        Sections with fixed keys.
    data, model, algorithm
        Sections whose keys depend on ``name``; defaults filled in.
    """

    top: TopLevel
    data: Section
    model: Section
    local: LocalSpec
    algorithm: Section
    signature: Signature
    target: Target
    privacy: Privacy
    faults: Faults
    newcomers: Newcomers = field(default_factory=Newcomers)

    def as_dict(self) -> Section:
        """Return the config with every default filled in, as a TOML file has it."""
        return {
            **asdict(self.top),
            "data": self.data,
            "model": self.model,
            "local": asdict(self.local),
            "algorithm": self.algorithm,
            "signature": asdict(self.signature),
            "target": asdict(self.target),
            "privacy": asdict(self.privacy),
            "faults": asdict(self.faults),
            "newcomers": asdict(self.newcomers),
        }

    @property
    def settings(self) -> RunSettings:
        """Those settings that do not depend on where the clients are."""
        return RunSettings(
            **self.top.shared,
            local=self.local,
            signature=self.signature,
            target=self.target.accuracy,
            permute=self.privacy.permute,
            privacy=DifferentialPrivacy.of(asdict(self.privacy)),
        )

    def federation(self, data_dir: str | Path | None = None) -> Federation:
        """Load the data and share it out; raises what :func:`fedclade.load_federation` raises."""
        settings = {key: value for key, value in self.data.items() if key in known_arguments(load_federation)}
        extra = {key: value for key, value in self.data.items() if key not in settings and key != "name"}
        partition = known_arguments(PARTITIONS[self.data["partition"]].split)
        return load_federation(
            self.data["name"],
            **settings,
            newcomers=self.newcomers.clients,
            newcomer_samples=self.newcomers.samples_per_client,
            seed=self.top.seed,
            data_dir=data_dir,
            partition_arguments={key: value for key, value in extra.items() if key in partition},
            source_arguments={key: value for key, value in extra.items() if key not in partition},
        )

    def run(
        self,
        federation: Federation,
        *,
        device: str = "auto",
        memory: int | str | None = None,
        on_round: OnRound | None = None,
        folder: Path | None = None,
        stop: Callable[[], bool] | None = None,
        follow: Follow | None = None,
    ) -> Run:
        """Run it over a federation; see :func:`fedclade.simulate` for the rest, and for what it raises."""
        return simulate(
            self.built_algorithm(self.newcomers.presence.everybody(federation).true_clusters),
            lambda seed: self.built_model(federation.pool.schema, seed),
            federation,
            replace(self.settings, memory=memory),
            device=device,
            engine=self.top.engine,
            tf32=self.top.tf32,
            faults=self.faults,
            presence=self.newcomers.presence,
            on_round=on_round,
            config=self.as_dict(),
            folder=folder,
            stop=stop,
            follow=follow,
        )

    def built_algorithm(self, true_clusters: Mapping[int, int] | None) -> Algorithm:
        """Build the algorithm; the oracle needs the true clusters, and raises a ConfigError without them."""
        options = {key: value for key, value in self.algorithm.items() if key != "name"}
        return build_algorithm(self.algorithm["name"], options, true_clusters)

    def built_model(self, schema: DataSpec, seed: int) -> nn.Module:
        """Build the model for some data, drawn from a seed; raises what :func:`fedclade.models.build_model` raises."""
        arguments = {key: value for key, value in self.model.items() if key != "name"}
        return module_for(self.model["name"], schema, seed, arguments)


def read_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read and check a config.

    Parameters
    ----------
    path
        A TOML file.
    overrides
        ``section.key=value`` or ``key=value``, as after ``--set``; they win over the file.

    Raises
    ------
    ConfigError
        If the file is missing or no TOML, or with all problems of the config at once, a line for each.
    """
    raw = read_toml(path)
    if "algorithms" in raw:
        raise ConfigError(f"{path} is a scenario: it has several [algorithms]; run it with 'fedclade compare'")
    apply_overrides(raw, overrides)
    try:
        return check_config(raw)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from error


def check_config(raw: Mapping[str, Any]) -> Config:
    """Check a config and fill in its defaults.

    Raises
    ------
    ConfigError
        With all problems at once, a line for each.
    """
    problems = _Problems()
    top_settings = {key: value for key, value in raw.items() if key not in SECTIONS and not isinstance(value, Mapping)}
    for key in raw:
        if key not in (*SECTIONS, *WRITTEN_ONLY) and key not in top_settings:
            problems.add(unknown("section", key, SECTIONS))
    sections = {name: _section(raw, name, problems) for name in SECTIONS}
    top = problems.building("", TopLevel, top_settings)
    data, data_is_right = _data(sections["data"], problems)
    model = _model(sections["model"], problems)
    local = problems.building("local", LocalSpec, sections["local"])
    algorithm, built = _algorithm(sections["algorithm"], problems)
    signature = problems.building("signature", Signature, sections["signature"])
    target = problems.building("target", Target, sections["target"])
    privacy = problems.building("privacy", Privacy, sections["privacy"])
    faults = problems.building("faults", Faults, sections["faults"])
    newcomers = problems.building("newcomers", Newcomers, sections["newcomers"])
    clients = data["clients"] if data_is_right else 1  # any number will do where it is not known
    if newcomers is not None:
        problems.collect("", check_newcomers, newcomers.clients, newcomers.samples_per_client, clients)
        presence = problems.collect("", lambda: newcomers.presence)
        if presence is not None and top is not None and data_is_right:
            problems.collect("", presence.check, newcomers.clients, clients or 0, top.rounds)
    if built is not None and data_is_right and clients is not None:
        problems.collect("", built.check_clients, clients)
    if top is not None and target is not None:
        problems.collect("", RunSettings, **top.shared, target=target.accuracy)
        problems.collect("", check_engine, top.engine)
    if top is not None and signature is not None and built is not None:
        private = None if privacy is None else DifferentialPrivacy.of(asdict(privacy))
        settings = RunSettings(stream=top.stream, signature=signature, privacy=private)
        problems.collect("", settings.check_algorithm, built)
    problems.report()
    assert top is not None  # as all others: what could not be built has been reported
    assert local is not None
    assert signature is not None
    assert target is not None
    assert privacy is not None
    assert faults is not None
    assert newcomers is not None
    return Config(top, data, model, local, algorithm, signature, target, privacy, faults, newcomers)


class _Problems:
    """What is wrong with a config, gathered, so that it can be said all at once."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, problem: str) -> None:
        self._lines.append(problem)

    def name(self, kind: str, value: object, known: Collection[str]) -> str | None:
        """Return a name if it is a known one; note if it is not."""
        if isinstance(value, str) and value in known:
            return value
        self.add(unknown(f"{kind}:", value, known))
        return None

    def collect(self, section: str, check: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        """Call something that may raise a ConfigError, and note its lines; return what it returns, or None."""
        try:
            return check(*arguments, **settings)
        except ConfigError as error:
            for line in str(error).splitlines():
                placed = not section or line.startswith(f"{section}.") or f"[{section}]" in line
                self.add(line if placed else f"[{section}] {line}")
            return None

    def building(self, section: str, kind: type[T], settings: Section) -> T | None:
        """Build one section of fixed keys, if its keys and types are right."""
        fitted = self.collect(section, check_arguments, f"[{section}]" if section else "the config", kind, settings)
        return None if fitted is None else self.collect(section, kind, **fitted)

    def report(self) -> None:
        if self._lines:
            raise ConfigError("\n".join(self._lines))


def _section(raw: Mapping[str, Any], name: str, problems: _Problems) -> Section:
    section = raw.get(name, {})
    if isinstance(section, Mapping):
        return dict(section)
    problems.add(f"[{name}] should be a section, got {shown(section)}")
    return {}


def _data(section: Section, problems: _Problems) -> tuple[Section, bool]:
    """Check the data section; its keys are those of ``load_federation``, of the source and of the partition.

    Returns
    -------
    tuple
        The section, and whether all of it is right.
    """
    name = problems.name("dataset in [data]", section.get("name", "digits"), SOURCES)
    partition = problems.name("partition in [data]", section.get("partition", "iid"), PARTITIONS)
    if name is None or partition is None:
        return section, False
    functions = (SOURCES[name].load, PARTITIONS[partition].split, load_federation)
    settings = {key: value for key, value in section.items() if key != "name"}
    fitted = problems.collect("data", check_arguments, "[data]", functions, settings, besides=_NOT_IN_DATA)
    if fitted is None:
        return section, False
    filled = {**defaults(functions, besides=_NOT_IN_DATA), **fitted}
    fixed = {key: value for key, value in filled.items() if key in known_arguments(check_data_settings)}
    holds = problems.collect("data", lambda: check_data_settings(**fixed) or True)
    return {"name": name, **filled}, holds is not None


def _model(section: Section, problems: _Problems) -> Section:
    """Check the model section; its keys are the arguments of the factory that the data does not give."""
    name = section.get("name", "mlp")
    factory = problems.collect("model", model_factory, name)
    if factory is None:
        return section
    settings = {key: value for key, value in section.items() if key != "name"}
    fitted = problems.collect(
        "model", check_arguments, "[model]", factory, settings, besides=FROM_DATA, positional=True
    )
    return {"name": name, **defaults(factory, besides=FROM_DATA, positional=True), **(fitted or {})}


def _algorithm(section: Section, problems: _Problems) -> tuple[Section, Algorithm | None]:
    """Check the algorithm section, whose keys are the hyper-parameters; return it, and the algorithm if all is right.

    The oracle's truth is not known yet, and left empty.
    """
    name = problems.name("algorithm in [algorithm]", section.get("name", "fedavg"), ALGORITHMS)
    if name is None:
        return section, None
    kind = ALGORITHMS[name].algorithm
    settings = {key: value for key, value in section.items() if key != "name"}
    fitted = problems.collect("algorithm", check_arguments, "[algorithm]", kind, settings)
    given = {"true_clusters": {}} if kind is Oracle else fitted
    built = None if given is None else problems.collect("algorithm", kind, **given)
    return {"name": name, **defaults(kind), **(fitted or {})}, built
