"""Functions that read and check a config, and report all of its problems in one error."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedclade.algorithms import (
    TRUTH,
    Algorithm,
    RunFacts,
    algorithm_class,
    build_algorithm,
    options_of,
)
from fedclade.channel import check_middleware
from fedclade.config.data import check_own_data, is_own_data, with_files_found
from fedclade.config.settings import FIXED, SECTIONS, Config, TopLevel, options
from fedclade.config.toml_files import Section, apply_overrides, find_config, read_toml
from fedclade.core import (
    Aggregation,
    ConfigError,
    ServerOptimizer,
    UntrustedNameError,
    check_arguments,
    checked,
    defaults,
    known_arguments,
    shown,
    unknown,
)
from fedclade.data import (
    SOURCES,
    check_data_settings,
    check_newcomers,
    find_partition,
    find_shift,
    load_federation,
    resolve_augment,
)
from fedclade.models import FROM_DATA, PARTS, Parts, check_widths, model_factory
from fedclade.runs import RunSettings, by_own_examples
from fedclade.tasks import is_share
from fedclade.training import check_engine

_NOT_IN_DATA = (
    *("seed", "data_dir", "newcomers", "newcomer_samples"),
    *("source_arguments", "partition_arguments", "shift_arguments"),
)
"""Arguments of ``load_federation`` that cannot be set by keys of the ``[data]`` section."""

MANY = 2**31
"""Number of clients to assume in checks if the number is unknown; any large number would do."""

WRITTEN_ONLY = ("versions", "network")
"""Sections that fedclade adds to the config in a run folder, and that users do not write.

A check ignores them, so that the config of a run folder can be run again unchanged, even in a
simulation if the original run was over a network.
"""


@checked()
def read_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read and check a config.

    Parameters
    ----------
    path
        A TOML file. A string may also be a name listed by ``fedclade ls configs``.
    overrides
        Changes that take precedence over the file, in the form of the command-line option
        ``--set``: ``key=value`` or ``section.key=value``, such as ``["rounds=5",
        "local.lr=0.05"]``.

    Raises
    ------
    ConfigError
        If the file is missing or not TOML, or if the config is invalid; the message has a line for
        each problem.
    """
    path = find_config(path) if isinstance(path, str) else path
    raw = read_toml(path)
    if "algorithms" in raw:
        raise ConfigError(
            f"{path} is a scenario: it has several [algorithms]; run it with 'fedclade compare'"
        )
    apply_overrides(raw, overrides)
    try:
        return check_config(with_files_found(raw, path.parent))
    except ConfigError as error:
        raise type(error)(
            "\n".join(f"{path}: {line}" for line in str(error).splitlines())
        ) from error


@checked()
def check_config(raw: Mapping[str, Any], *, on_network: bool = False) -> Config:
    """Check a config and fill in its defaults.

    Parameters
    ----------
    raw
        The config as nested dictionaries, as read from TOML.
    on_network
        Whether each client runs on a node of a network. The data may then be a single file.

    Raises
    ------
    ConfigError
        If the config is invalid; the message has a line for each problem.
    """
    problems = _Problems()
    top_settings = {
        key: value
        for key, value in raw.items()
        if key not in SECTIONS and not isinstance(value, Mapping)
    }
    for key in raw:
        if key not in (*SECTIONS, *WRITTEN_ONLY) and key not in top_settings:
            problems.add(unknown("section", key, SECTIONS))
    sections = {name: _get_section(raw, name, problems) for name in SECTIONS}
    right: dict[str, Any] = {"top": problems.building("", TopLevel, top_settings)}
    data, data_is_right = _check_data(sections["data"], problems, on_network=on_network)
    model = _check_model(sections["model"], problems)
    algorithm, built = _check_algorithm(sections["algorithm"], problems)
    right |= {name: problems.building(name, kind, sections[name]) for name, kind in FIXED.items()}
    right["target"] = _check_target(sections["target"], problems)
    right["middleware"] = _fill_middleware(sections["middleware"], problems)
    report = right["report"]
    if on_network and report is not None and report.references is True:
        problems.add(
            "report.references should be false or left out over a network, got true: a reference "
            "needs the data of all clients; run fedavg and local over the same network, and "
            "compare the runs with: fedclade report RUN --against OTHER_RUN"
        )
    _check_together(problems, built, data if data_is_right else None, right)
    problems.report()
    return Config(data=data, model=model, algorithm=algorithm, **right)


def _check_together(
    problems: _Problems, algorithm: Algorithm | None, data: Section | None, right: Mapping[str, Any]
) -> None:
    """Check that the settings of different sections are consistent with each other.

    Problems are added to ``problems``. A section with problems of its own is None and is not
    checked. ``right`` has the valid sections by name, except algorithm and data.
    """
    top = right["top"]
    privacy = right["privacy"]
    _check_newcomers_section(problems, data, right)
    if algorithm is not None and data is not None and data.get("clients") is not None:
        problems.collect("", algorithm.check, RunFacts(clients=data["clients"]))
    if algorithm is not None and right["local"] is not None:
        problems.collect("", algorithm.check, RunFacts(local=right["local"]))
    if right["task"] is not None:
        problems.collect("task", lambda: right["task"].task)
    if top is not None:
        problems.collect("", RunSettings, **top.shared)
        problems.collect("", check_engine, top.engine)
        if right["adversary"] is not None:
            central = privacy is not None and privacy.model == "central"
            problems.collect("", right["adversary"].check_stream, top.stream, central=central)
    if (
        privacy is not None
        and privacy.level == "example"
        and data is not None
        and data.get("standardize") == "client"
    ):
        problems.add(by_own_examples("client"))
    if top is not None and right["signature"] is not None and algorithm is not None:
        _check_run_settings(problems, algorithm, data, right)


def _check_newcomers_section(
    problems: _Problems, data: Section | None, right: Mapping[str, Any]
) -> None:
    """Check that the ``[newcomers]`` section fits the number of clients and of rounds."""
    newcomers = right["newcomers"]
    top = right["top"]
    if newcomers is None:
        return
    clients = MANY if data is None else data.get("clients", MANY)
    problems.collect("", check_newcomers, newcomers.clients, newcomers.samples_per_client, clients)
    presence = problems.collect("", lambda: newcomers.presence)
    if presence is not None and top is not None and data is not None:
        problems.collect("", presence.check, newcomers.clients, clients or 0, top.rounds)


def _check_run_settings(
    problems: _Problems, algorithm: Algorithm, data: Section | None, right: Mapping[str, Any]
) -> None:
    """Check that the settings of a run fit the algorithm and the number of clients."""
    top = right["top"]
    privacy = right["privacy"]
    settings = RunSettings(
        stream=top.stream,
        signature=right["signature"],
        privacy=None if privacy is None else privacy.mechanism,
        min_cluster_size=1 if privacy is None else privacy.min_cluster_size,
        aggregate=right["aggregate"] or Aggregation(),
        server=right["server"] or ServerOptimizer(),
    )
    clients = 0 if data is None else data.get("clients") or 0
    rounds = replace(settings, min_clients=top.min_clients, client_fraction=top.client_fraction)
    problems.collect("", rounds.check_enough, clients)
    problems.collect("", settings.check_algorithm, algorithm)


class _Problems:
    """Collection of the problems found in a config, so that one error can report all of them."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._has_untrusted_name = False

    def add(self, problem: str) -> None:
        self._lines.append(problem)

    def name(self, kind: str, value: object, known: Collection[str]) -> str | None:
        """Return ``value`` if it is a known name; otherwise add a problem and return None.

        ``kind`` describes in the problem what the name stands for, such as "algorithm".
        """
        if isinstance(value, str) and value in known:
            return value
        self.add(unknown(f"{kind}:", value, known))
        return None

    def collect(
        self, section: str, check: Callable[..., Any], *arguments: Any, **settings: Any
    ) -> Any:
        """Call a function and return its result, or None if it raises a ConfigError.

        The lines of the error are added to the problems, with the name of the ``section`` in front
        if a line does not mention it.
        """
        try:
            return check(*arguments, **settings)
        except ConfigError as error:
            self._has_untrusted_name = self._has_untrusted_name or isinstance(
                error, UntrustedNameError
            )
            for line in str(error).splitlines():
                placed = not section or line.startswith(f"{section}.") or f"[{section}]" in line
                self.add(line if placed else f"[{section}] {line}")
            return None

    def building(self, section: str, kind: type[Any], settings: Section) -> Any:
        """Build the object of the class ``kind`` from a section, whose keys are its fields.

        If the section is invalid, add its problems and return None.
        """
        return self.made(section, lambda fitted: kind(**fitted), kind, settings)

    def made(
        self,
        section: str,
        make: Callable[[Section], Any],
        takers: Any,
        settings: Section,
        besides: Collection[str] = (),
        *,
        positional: bool = False,
    ) -> Any:
        """Return the result of ``make`` for a section's settings, or None if there are problems.

        Each setting is first checked by :func:`check_arguments`, which also explains the parameters
        ``takers``, ``besides`` and ``positional``. If some settings have a wrong type, ``make`` is
        nevertheless called with the other settings, to find values that are out of range as well.
        """
        owner = f"[{section}]" if section else "the config"
        right = dict[str, Any]()
        known = known_arguments(takers, besides, positional=positional)
        for key, value in settings.items():
            one = self.collect(
                section,
                check_arguments,
                owner,
                takers,
                {key: value},
                besides,
                positional=positional,
            )
            right |= one or {}
        if not (wrong := settings.keys() - right.keys()):
            return self.collect(section, make, right)
        # If a key is misspelt, the intended key is unknown, so further problems that the call of
        # make reports may not be real.
        if wrong <= known.keys():
            others = _Problems()
            others.collect(section, make, right)
            of_wrong = re.compile("|".join(rf"\b{re.escape(key)}\b" for key in wrong))
            self._lines += [
                line for line in others._lines if ", got" in line and not of_wrong.search(line)
            ]
        return None

    def report(self) -> None:
        if self._lines:
            kind = UntrustedNameError if self._has_untrusted_name else ConfigError
            raise kind("\n".join(self._lines))


def _get_section(raw: Mapping[str, Any], name: str, problems: _Problems) -> Section:
    section = raw.get(name, {})
    if isinstance(section, Mapping):
        return dict(section)
    problems.add(f"[{name}] should be a section, got {shown(section)}")
    return {}


def _check_target(section: Section, problems: _Problems) -> Section:
    """Check the ``[target]`` section, and return it.

    The section has values that metrics should reach, by the name of the metric.
    """
    for name, value in section.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            problems.add(f"{name} of [target] should be a number, got {shown(value)}")
        elif is_share(name) and not 0 < value <= 1:
            problems.add(f"target.{name} should be greater than 0 and at most 1, got {value}")
    return section


def _fill_middleware(section: Section, problems: _Problems) -> dict[str, Section]:
    """Check the ``[middleware]`` section, and return the settings of each middleware by its name.

    The settings are completed by defaults.
    """
    found: dict[str, Section] = {}
    for name, settings in section.items():
        if not isinstance(settings, Mapping):
            problems.add(
                f"[middleware] should have a section for each middleware, such as "
                f"[middleware.{name}], got {shown(settings)}"
            )
            continue
        filled = problems.collect(f"middleware.{name}", check_middleware, name, settings)
        found[name] = filled or dict(settings)
    return found


def _check_data(section: Section, problems: _Problems, *, on_network: bool) -> tuple[Section, bool]:
    """Check the ``[data]`` section, and return it with its defaults, and whether it is valid.

    The keys of the section are the arguments of ``load_federation``, of the data source, of the
    partition and of the shift, and ``attributes``, a file with attributes of the clients for the
    report.
    """
    section = dict(section)
    attributes = section.pop("attributes", None)
    if attributes is not None and not isinstance(attributes, str):
        problems.add(
            f"data.attributes should be a file with a row for each client, got {shown(attributes)}"
        )
    found, is_valid = _check_data_of_clients(section, problems, on_network=on_network)
    return (found if attributes is None else {**found, "attributes": attributes}), is_valid


def _check_data_of_clients(
    section: Section, problems: _Problems, *, on_network: bool
) -> tuple[Section, bool]:
    """Check all keys of a ``[data]`` section except ``attributes``, see :func:`_check_data`."""
    if is_own_data(section):
        own = problems.collect("data", check_own_data, section, on_network=on_network)
        return (section, False) if own is None else (own, True)
    name = str(section.get("name", "digits"))
    partition = problems.collect("data", find_partition, section.get("partition", "iid"))
    shift = problems.collect("data", find_shift, section.get("shift", "none"))
    if partition is None or shift is None:
        return section, False
    functions = (SOURCES[name].load, partition.split, shift.views, load_federation)

    def filled_in(fitted: Section) -> Section:
        filled = {**defaults(functions, _NOT_IN_DATA), **fitted}
        check_data_settings(
            **{key: filled[key] for key in filled if key in known_arguments(check_data_settings)}
        )
        resolve_augment(filled["augment"])
        for check in (partition.check, shift.check):
            if check is not None:
                check(**{key: filled[key] for key in known_arguments(check, positional=True)})
        return filled

    filled = problems.made("data", filled_in, functions, options(section), _NOT_IN_DATA)
    return (section, False) if filled is None else ({"name": name, **filled}, True)


def _check_model(section: Section, problems: _Problems) -> Section:
    """Check the ``[model]`` section, and return it with its defaults.

    The keys of the section specify parts of the model, such as personal parameters, or are
    arguments of the function that builds the model. Arguments that the data determines, such as the
    input shape, cannot be set.
    """
    name = section.get("name", "mlp")
    factory = problems.collect("model", model_factory, name)
    if factory is None:
        return section
    parts = problems.building(
        "model", Parts, {key: section[key] for key in PARTS if key in section}
    )
    arguments = {key: value for key, value in options(section).items() if key not in PARTS}
    fitted = problems.collect(
        "model", check_arguments, "[model]", factory, arguments, FROM_DATA, positional=True
    )
    problems.collect("", check_widths, str(name), fitted or {})
    filled = {**defaults(factory, FROM_DATA, positional=True), **(fitted or {})}
    return {"name": name, **filled, **({} if parts is None else parts.as_dict())}


def _check_algorithm(section: Section, problems: _Problems) -> tuple[Section, Algorithm | None]:
    """Check the ``[algorithm]`` section, and return it with its defaults, and the algorithm.

    The keys of the section are the algorithm's hyper-parameters. The returned algorithm is None if
    the section is invalid.
    """
    name = section.get("name", "fedavg")
    kind = problems.collect("algorithm", algorithm_class, name)
    if kind is None:
        return section, None

    def build(fitted: Section) -> Algorithm:
        return build_algorithm(name, fitted, {})  # true clusters are only known once data is loaded

    built = problems.made("algorithm", build, kind, options(section), TRUTH, positional=True)
    return (section, None) if built is None else ({"name": name, **options_of(built)}, built)
