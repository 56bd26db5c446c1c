"""Flower apps of server and clients that read their settings from Flower's run config.

The run config is a fedclade config with the additional section ``[network]``. It is written by the
party that starts the run, which clients need not trust, so clients check every key and path.
"""

from __future__ import annotations

import glob
import logging
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, get_args

from flwr.app import Context
from flwr.clientapp import ClientApp

from fedclade.algorithms import ALGORITHMS
from fedclade.channel import Budget, ExamplePrivacy, check_encoding, check_local
from fedclade.config import SECTIONS, Config, TopLevel, check_config
from fedclade.core import (
    ConfigError,
    DataError,
    RowQuery,
    check_arguments,
    document_settings,
    importing_only,
    installed,
    setting,
    shown,
    unknown,
)
from fedclade.data import (
    PARTITIONS,
    SHIFTS,
    SOURCES,
    DataSchema,
    Federation,
    FilesSettings,
    TableSource,
    encode_federation,
)
from fedclade.flower.client_app import NodeSettings, app_for, node_settings
from fedclade.flower.client_handler import ClientHandler
from fedclade.flower.kinds import register_query
from fedclade.flower.network import Network
from fedclade.flower.schema_exchange import Proposer, SchemaSharing
from fedclade.flower.secure.terms import check_sums, with_signs
from fedclade.models import Preset
from fedclade.training import REMOTE, choose_devices

_log = logging.getLogger(__name__)

SIMULATED = ("faults", "newcomers", "presence", "adversary")
"""Sections of a config that are for simulations only.

In a network clients really fail, join, leave and attack, so their behaviour is no setting.
"""

OF_MIDDLEWARE = "middleware."
"""Prefix of the keys that set up middleware on the server, such as ``middleware.NAME.KEY``."""

LISTS = (
    "data.inputs",
    "data.drop",
    "data.exclude",
    "data.categorical",
    "task.metrics",
    "task.class_weights",
    "model.freeze",
    "model.personal",
    "model.common",
    "signature.of",
)
"""Keys of a config whose values are lists. In a run config they are strings with commas."""

DATA_KEYS = frozenset(
    {
        # keys of data sets that are divided among clients
        *(
            "name",
            "clients",
            "samples_per_client",
            "partition",
            "shift",
            "clusters",
            "validation_fraction",
        ),
        *("test_samples", "test_fraction", "scaling", "augment", "drift", "views"),
        # keys of single data sets
        *(
            "characters",
            "task",
            "sequence_length",
            "vocabulary_size",
            "vectors",
            "alpha",
            "beta",
            "max_samples",
        ),
        # keys of partitions and shifts
        *(
            "tests",
            "labels_per_client",
            "min_samples",
            "balanced",
            "shards_per_client",
            "exponent",
            "sigma",
        ),
        *("strength", "kind", "level", "owners"),
        # keys of clients' own files
        *(
            "files",
            "folder",
            "target",
            "client",
            "inputs",
            "text",
            "drop",
            "separator",
            "decimal",
            "encoding",
            "dates",
        ),
        *("exclude", "categorical", "missing", "fewest_rows"),
        *("schema", "standardize", "standardize_target", "max_words", "inputs_are"),
        *("test", "order", "groups", "stratify"),
    }
)
"""Keys of ``[data]`` that a run config may set.

Data sets in a user's own code or in an installed package have other keys.
"""

DATA_PATHS = {"files": "pattern", "folder": "path", "vectors": "path"}
"""Keys of ``[data]`` that name files. A client reads them only from its own data folder."""

UserConfig = Mapping[str, bool | float | int | str]  # Flower's run config: values by section.key


@document_settings
@dataclass(frozen=True, kw_only=True)
class AppSettings:
    """Settings of the ``[network]`` section that only the Flower apps use.

    All other settings of the section are in :class:`~fedclade.flower.Network`.
    """

    out: str = setting(
        "runs/federation",
        doc="""Path of the run folder on the server. With the folder of an earlier run, that run
        continues.""",
    )
    encoding: str = setting(
        "float32",
        doc="""Encoding of updates in messages: ``float32``, ``float16``, ``int8``, or ``topk``, the
        largest twentieth of the parameters.""",
    )
    finish: bool = setting(
        False, doc="Finish the run in the folder in its current state, without further rounds."
    )

    def __post_init__(self) -> None:
        check_encoding(self.encoding)


@dataclass(frozen=True)
class RunConfig:
    """Run config of Flower, checked and split into its parts.

    The parts are the fedclade config, and two groups of settings from the ``[network]`` section:
    the settings of the network, and the settings of the apps.
    """

    config: Config
    network: Network
    apps: AppSettings

    @classmethod
    def read(cls, run_config: UserConfig) -> RunConfig:
        """Check and convert Flower's run config, with keys such as ``algorithm.name``.

        Raises
        ------
        ConfigError
            If the config is invalid; the error has one line for each problem.
        """
        check_keys(run_config)
        raw: dict[str, Any] = {}
        for key, value in run_config.items():
            section_name, _, name = key.rpartition(".")
            if section_name.startswith(OF_MIDDLEWARE):
                own = section_name.removeprefix(OF_MIDDLEWARE)
                raw.setdefault("middleware", {}).setdefault(own, {})[name] = _unpacked(value)
            elif section_name:
                raw.setdefault(section_name, {})[name] = _split_list(key, _unpacked(value))
            else:
                raw[name] = value
        section = raw.pop("network", {})
        problems: list[str] = []
        found: list[Any] = []
        for check in (lambda: check_config(raw, on_network=True), lambda: read_network(section)):
            try:
                found.append(check())
            except ConfigError as error:
                problems.append(str(error))
        problems += [
            f"network.encoding = {apps.encoding!r} is not possible with network.secure_aggregation "
            "= true, which encodes all updates as 24-bit integers; leave network.encoding out"
            for network, apps in (each for each in found if isinstance(each, tuple))
            if network.secure_aggregation and apps.encoding != "float32"
        ]
        if problems:
            raise ConfigError("\n".join(problems))
        read = cls(found[0], *found[1])
        if read.network.secure_aggregation:
            config = _without_default_scaling(read.config)
            read = replace(read, config=config)
            check_sums(
                with_signs(config.settings),
                config.built_algorithm({}),
                config.data.get("clients") or 0,
                parts=read.network.secure_parts,
            )
        return read

    def as_dict(self) -> dict[str, Any]:
        """Return the config with all defaults filled in, as it is saved in a run folder."""
        apps = {name: value for name, value in asdict(self.apps).items() if name != "finish"}
        return {**self.config.as_dict(), "network": {**self.network.described, **apps}}


def _without_default_scaling(config: Config) -> Config:
    """Return a config in which tables are scaled only if the user has chosen a scaling.

    Scaling needs statistics of every client in clear. With secure aggregation some clients may
    refuse to report statistics, and all clients of a run must scale in the same way. So the default
    ``auto`` is replaced by ``none``.
    """
    unscaled = {
        key: "none"
        for key in ("standardize", "standardize_target")
        if config.data.get(key) == "auto"
    }
    if not unscaled:
        return config
    _log.warning(
        "inputs and targets of tables are not scaled in this run, since scaling needs statistics "
        "that clients do not disclose with network.secure_aggregation; to scale them, set %s",
        " and ".join(f"data.{key} = 'federated'" for key in unscaled),
    )
    return replace(config, data={**config.data, **unscaled})


def check_keys(run_config: UserConfig) -> None:
    """Check that a run config contains only known and permitted keys.

    The check neither opens files nor imports code that the config names. A value may be a table
    that is written as text, but a whole section may not, since its keys would escape this check.

    Raises
    ------
    ConfigError
        If the config contains another key; the error has one line for each such key.
    """
    problems: dict[str, None] = {}  # an ordered set
    for key in run_config:
        if problem := _key_problem(key, run_config):
            problems[problem] = None
    if problems:
        raise ConfigError("\n".join(problems))


def _key_problem(key: str, run_config: UserConfig) -> str:
    """Return the reason why a run config may not contain a key; empty if it may."""
    if key.startswith(OF_MIDDLEWARE):
        return ""  # checked by the settings of the middleware, on the server
    top = [field.name for field in fields(TopLevel)]
    allowed = [name for name in (*SECTIONS, "network") if name not in SIMULATED]
    *sections, name = key.split(".")
    if len(sections) > 1 or (not sections and name in (*allowed, *SIMULATED)):
        return f"a key of the run config should be KEY or SECTION.KEY, got {key!r}"
    if not sections:
        return "" if name in top else f"run config: {unknown('key', name, top)}"
    section = sections[0]
    if section in SIMULATED:
        return f"section [{section}] of the run config is for simulations only; leave it out"
    if section not in allowed:
        return unknown("section", section, allowed)
    if section == "data" and name not in DATA_KEYS and not _has_own_data_code(run_config):
        return f"section [data] of the run config: {unknown('key', name, DATA_KEYS)}"
    return ""


def _has_own_data_code(run_config: UserConfig) -> bool:
    """Return whether the data set, the partition or the shift is the user's own code.

    The settings of such code are unknown to fedclade, so the keys of ``[data]`` cannot be checked.
    """
    known = {"name": SOURCES, "partition": PARTITIONS, "shift": SHIFTS}
    return any(
        run_config.get(f"data.{key}", next(iter(names))) not in names
        for key, names in known.items()
    )


def _split_list(key: str, value: object) -> object:
    """Convert a value with commas to a list if the config needs a list for the key.

    Flower's run config has no lists. Class weights are also converted to numbers. All other values
    are returned unchanged.
    """
    if key not in LISTS or not isinstance(value, str) or value.startswith("["):
        return value
    # These names are presets for whole lists.
    if value in ("balanced", *get_args(Preset)):
        return value
    entries = [entry.strip() for entry in value.split(",") if entry.strip()]
    if key != "task.class_weights":
        return entries
    try:
        return [float(entry) for entry in entries]
    except ValueError:
        return value


def _unpacked(value: bool | float | int | str) -> Any:
    """Convert a value that is a TOML list or table in text form, such as ``'["head.*"]'``.

    Flower's run config has neither lists nor tables. All other values are returned unchanged.
    """
    if not isinstance(value, str) or not value.startswith(("[", "{")):
        return value
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value  # the later check of the value's type reports the problem


def read_network(section: Mapping[str, Any]) -> tuple[Network, AppSettings]:
    """Check the ``[network]`` section; return the settings of the network and of the apps."""
    fitted = check_arguments("[network]", (Network, AppSettings), dict(section))
    ours = {field.name for field in fields(AppSettings)}
    return (
        Network(**{key: value for key, value in fitted.items() if key not in ours}),
        AppSettings(**{key: value for key, value in fitted.items() if key in ours}),
    )


def client_app_from_config(
    imports: Sequence[str] = (), queries: Sequence[type[RowQuery]] = ()
) -> ClientApp:
    """Make a Flower ClientApp that takes its settings from the run config and the node config.

    The run config specifies the data set, which is divided among ``data.clients`` clients; a node
    trains on the data of the client ``partition-id``. The data folder is ``data-dir`` in the node
    config, or the environment variable FEDCLADE_DATA_DIR. If ``data.files`` matches the file of a
    single client in this folder, that file is the node's data, and ``partition-id`` is only the
    number of the client; ``data-files`` in the node config may name another file. The privacy
    budget of a client is ``epsilon`` and ``delta`` in the node config. All other settings of the
    node config are documented at :func:`fedclade.flower.client_app`.

    The run config is written by the party that starts the run, which clients need not trust. So a
    client imports an object ``module:name`` from the run config only if the app allows the name in
    ``imports``, or the node config does in its own ``imports``. A client reads ``data.files`` and
    ``data.folder`` only from its own data folder. The algorithm runs on the server, so clients need
    not have its code.

    Parameters
    ----------
    imports
        Objects ``module:name`` that a run config may name and clients then import.
    queries
        Classes of queries that a method outside of fedclade needs, see :class:`fedclade.RowQuery`.
    """
    for query in queries:
        register_query(query)

    def make(context: Context, agreed: DataSchema | None) -> ClientHandler | Proposer:
        settings = node_settings(context)
        settings["policy"] = replace(
            settings["policy"], imports=(*settings["policy"].imports, *imports)
        )
        with importing_only(settings["policy"].imports):
            return built(context, settings, agreed)

    def built(
        context: Context, settings: NodeSettings, agreed: DataSchema | None
    ) -> ClientHandler | Proposer:
        run_config = dict(context.run_config)
        known = {*ALGORITHMS, *installed("algorithms"), *settings["policy"].imports}
        if run_config.get("algorithm.name") not in known:
            run_config = {
                key: value for key, value in run_config.items() if not key.startswith("algorithm.")
            }
        run_config = {
            key: value for key, value in run_config.items() if not key.startswith(OF_MIDDLEWARE)
        }
        # A training query names the trainer again, and the client then checks its policy.
        run_config.pop("local.trainer", None)
        place = context.node_config.get("data-dir") or os.environ.get("FEDCLADE_DATA_DIR")
        folder = None if place is None else str(place)
        is_declared = _drop_schema(run_config)
        check_keys(run_config)
        _confine_paths(run_config, folder, context.node_config.get("data-files"))
        read = RunConfig.read(run_config)
        if (number := settings["number"]) is None:
            raise DataError(
                "partition-id is missing in the node config of this client; set the number of the "
                "client whose data the node has, from 0"
            )
        privacy = check_local(read.config.privacy.mechanism)
        budget = budget_of(context)
        by_example = isinstance(privacy, ExamplePrivacy)
        sharing = SchemaSharing(
            settings["policy"], privacy is not None or budget is not None, by_example
        )
        declared = agreed if is_declared else None
        data = sharing.encode(partial(_load_data, tuple(run_config.items()), folder, declared))
        if isinstance(data, TableSource):
            source = data.with_key(number)
            if agreed is None:
                proposal = source.propose()
                examples = sum(len(table) for table in source.rows.tables)
                sharing.check(proposal, examples)
                proposal = sharing.limit(proposal, examples)
                return Proposer(proposal, number)
            mine = sharing.encode(partial(source.encode, agreed))
        else:
            is_own = data.encoding is not None and data.encoding.source is not None
            mine = data if is_own else data.alone(number)
            if agreed is not None:
                mine = sharing.encode(partial(encode_federation, mine, agreed))
            elif mine.encoding is not None:
                proposal = mine.encoding.proposal
                sharing.check(proposal, len(mine.pool.x))
                return Proposer(sharing.limit(proposal, len(mine.pool.x)), number)
        return ClientHandler(
            mine,
            lambda seed: read.config.built_model(mine.pool.schema, seed),
            engine="loop"
            if read.config.top.engine in ("auto", *REMOTE)
            else read.config.top.engine,
            device=choose_devices(str(context.node_config.get("device", "auto"))),
            encoding=read.apps.encoding,
            privacy=privacy,
            budget=budget,
            task=read.config.task.task,
            parts=read.config.parts,
            seed=read.config.top.seed,
            agreed=agreed,
            **settings,
        )

    return app_for(make)


def _drop_schema(run_config: dict[str, Any]) -> bool:
    """Remove the data schema from a run config; return whether the config contained a schema.

    Clients do not need the schema of the run config, since the server sends it in every request.
    """
    keys = [key for key in run_config if key == "data.schema" or key.startswith("data.schema.")]
    for key in keys:
        del run_config[key]
    return bool(keys)


def _confine_paths(run_config: dict[str, Any], folder: str | None, own_files: object) -> None:
    """Replace the paths of :data:`DATA_PATHS` in a run config by paths in the node's data folder.

    The run config comes from the server, which must not choose files outside of that folder.

    Parameters
    ----------
    run_config
        Run config, which is changed in place.
    folder
        Data folder of the node; None if the node config sets no folder.
    own_files
        ``data-files`` in the node config, which replaces ``data.files``; None if it is unset.

    Raises
    ------
    DataError
        If there is no data folder, or a path leaves it.
    """
    for name, rule in DATA_PATHS.items():
        key = f"data.{name}"
        if key not in run_config:
            continue
        path = str(run_config[key])
        if name == "files":
            title = FilesSettings(files=path, target="").title
            # The name of the data is a property of the run, so it must not depend on the node's
            # folder.
            run_config.setdefault("data.name", title)
            path = path if own_files is None else str(own_files)
        place = str(_data_folder(folder, path, f"{key} should be a {rule}"))
        if name == "files":
            run_config[key] = str(Path(glob.escape(place)) / path)
        elif name == "folder":
            run_config[key] = str(Path(place) / path)


def _data_folder(folder: str | None, path: str, rule: str) -> Path:
    """Check that a path stays inside a node's data folder; return the folder's absolute path.

    Parameters
    ----------
    folder
        Data folder of the node; None if the node config sets no folder.
    path
        Path from the run config, relative to the data folder.
    rule
        First words of the error, such as "data.files should be a pattern".

    Raises
    ------
    DataError
        If there is no data folder, or the path leaves it.
    """
    if folder is None or Path(path).is_absolute() or ".." in Path(path).parts:
        place = folder or "not set"
        raise DataError(
            f"{rule} inside a node's data folder (data-dir in its node config: {place}), got "
            f"{shown(path)}; in the run config, give a path without '..' that is relative to this "
            "folder"
        )
    return Path(folder).expanduser().absolute()


def budget_of(context: Context) -> Budget | None:
    """Return the privacy budget in a client's node config; None if ``epsilon`` is unset.

    The budget is ``epsilon`` at ``delta`` (1e-5 if unset). It protects the client with all its
    data, or each single example if ``level`` is ``example``.

    The client itself chooses both numbers. If δ were in the run config, the author of the run could
    set it near 1, and any number of releases would cost almost no ε.

    Raises
    ------
    ConfigError
        If a value is not a number or out of range.
    """
    budget = {
        name: context.node_config[name]
        for name in ("epsilon", "delta")
        if name in context.node_config
    }
    for name, value in budget.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name} in the node config should be a number, got {value!r}")
    if "epsilon" not in budget:
        return None
    level = str(context.node_config.get("level", "client"))
    return Budget(**{name: float(value) for name, value in budget.items()}, level=level)


@lru_cache(maxsize=2)
def _load_data(
    items: tuple[tuple[str, Any], ...], data_dir: str | None, declared: DataSchema | None
) -> Federation | TableSource:
    """Load the data of a run config, and cache it.

    A process that runs many clients in turn, as in Flower's simulation, loads the data only once.

    Parameters
    ----------
    items
        Keys and values of the run config.
    data_dir
        Data folder of the node; None if the node config sets no folder.
    declared
        Schema by which the data is encoded; None if the server declares no schema.

    Returns
    -------
    Federation or TableSource
        Tables of a single client, not yet encoded, if the files on this machine belong to one
        client; else a federation of all clients with data on this machine.
    """
    config = RunConfig.read(dict(items)).config
    if "files" not in config.data:
        return config.federation(data_dir)
    source = replace(config.own_files(data_dir), schema=declared)
    return source if len(source.client_names) == 1 else source.federation()
