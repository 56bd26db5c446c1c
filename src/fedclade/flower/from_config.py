"""Apps that read their settings from Flower's run config.

The run config is a fedclade config with the additional section ``[network]``.
"""

from __future__ import annotations

import glob
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, get_args

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fedclade.algorithms import ALGORITHMS, Algorithm, algorithm_class
from fedclade.channel import Budget, ExamplePrivacy, check_encoding, check_local
from fedclade.config import SECTIONS, Config, TopLevel, check_config
from fedclade.core import (
    ConfigError,
    DataError,
    ParameterTree,
    RowQuery,
    UntrustedNameError,
    check_arguments,
    checked,
    importing_only,
    installed,
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
    read_declared,
)
from fedclade.flower.client_app import NodeSettings, app_for, node_settings
from fedclade.flower.client_handler import ClientHandler
from fedclade.flower.federate import MakeAlgorithm, ModelFor, Network, federate
from fedclade.flower.kinds import register_query
from fedclade.flower.schema_exchange import Proposer, SchemaSharing
from fedclade.flower.secure.terms import check_sums, with_signs
from fedclade.models import Preset, model_factory
from fedclade.report import Terminal, add_figures, count, show_run
from fedclade.runs import Callback, Maker, Row, Run, counting, read_run_config
from fedclade.training import REMOTE, choose_device

# A Flower ``ServerApp`` that runs a clustered algorithm.

WIDTH = 100  # characters of a table's row: the output of a ServerApp is a log without a width


@checked()
def server_app(
    algorithm: Algorithm | str | MakeAlgorithm, model: nn.Module | str | Maker, **settings: Any
) -> ServerApp:
    """Make the app that the server runs.

    It prints one line for each round, and the tables of the run at its end. With a ``folder`` it
    also draws the figures of the run.

    Parameters
    ----------
    algorithm
        Algorithm or its name, such as ``CFL(eps2=0.8)`` or ``"cfl"``.
    model
        Model in a form that :func:`fedclade.simulate` accepts; the same as in
        :func:`fedclade.flower.client_app`.
    **settings
        Settings of :func:`fedclade.flower.federate`; with a ``folder`` the run survives a restart
        of its server.

    Returns
    -------
    ServerApp
        App that continues the run if it is started again with the same folder.
    """
    if isinstance(algorithm, str):
        algorithm_class(algorithm)  # fails early, and suggests the nearest name
    if isinstance(model, str):
        model_factory(model)
    settings.setdefault("on_round", print_round)

    def run(grid: Grid, context: Context) -> tuple[Run, Path | None]:
        folder = settings.get("folder")
        run = federate(grid, algorithm, model, **settings)
        return run, None if folder is None else Path(folder)

    return app_of(run)


def app_of(run: Callable[[Grid, Context], tuple[Run, Path | None]]) -> ServerApp:
    """Return a ServerApp around a function that runs a federation.

    The function returns the run and its folder.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:  # pyright: ignore[reportUnusedFunction]  (Flower calls it)
        show(*run(grid, context))

    return app


def show(run: Run, folder: Path | None = None) -> None:
    """Print the results of a run, and draw its figures in its folder."""
    console = Terminal(width=WIDTH, highlight=False)
    if folder is not None:
        add_figures(run, folder, console)
    show_run(run, console)
    if folder is not None:
        console.print(f"run folder: {folder}", soft_wrap=True, markup=False)


def print_round(row: Row, tree: ParameterTree) -> None:
    """Print a line about a round."""
    (metric, score), ari = counting(row), row["ari"]
    parts = [
        f"round {row['round']}",
        f"{count(row['clients_trained'], 'client')} trained",
        count(row["clusters"], "cluster"),
        *([] if score is None else [f"{metric} {score:.3f}"]),
        *([] if ari is None else [f"ARI {ari:.2f}"]),
        f"{row['seconds']:.1f} s",
    ]
    print(", ".join(parts), flush=True)


SIMULATED = ("faults", "newcomers", "presence", "adversary")
"""Sections of a config for simulations only.

In a network clients fail, join and leave by themselves.
"""

LISTS = (
    "data.inputs",
    "data.drop",
    "task.metrics",
    "task.class_weights",
    "model.freeze",
    "model.personal",
    "model.common",
    "signature.of",
)
"""Keys of a config with lists, which are strings with commas in a run config: it has no lists."""

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
        *("schema", "standardize", "max_words", "inputs_are"),
    }
)
"""Keys of ``[data]`` that a run config may set.

Data sets in a user's own code or in an installed package have other keys.
"""

DATA_PATHS = {"files": "pattern", "folder": "path", "vectors": "path"}
"""Keys of ``[data]`` that name files. A client reads them only from its own data folder."""

AT_ONCE = 1e-3
"""Seconds to wait for clients when a run is finished without any."""

UserConfig = Mapping[str, bool | float | int | str]  # Flower's run config: values by section.key


@dataclass(frozen=True, kw_only=True)
class AppSettings:
    """Settings of the ``[network]`` section in addition to :class:`~fedclade.flower.Network`."""

    # path of the run folder on the server; with the folder of an earlier run, that run continues
    out: str = "runs/federation"
    encoding: str = "float32"  # encoding of updates in messages: float32, float16 or int8
    finish: bool = False  # run no further round, and finish the run in the folder as it is

    def __post_init__(self) -> None:
        check_encoding(self.encoding)


@dataclass(frozen=True)
class RunConfig:
    """Checked run config: its sections, and the two parts of its ``[network]`` section."""

    config: Config
    network: Network
    apps: AppSettings

    @classmethod
    def read(cls, run_config: UserConfig) -> RunConfig:
        """Check a run config of ``rounds``, ``algorithm.name`` and so on.

        Raises
        ------
        ConfigError
            If the config is not valid; the error lists all problems.
        """
        check_keys(run_config)
        raw: dict[str, Any] = {}
        for key, value in run_config.items():
            section_name, _, name = key.rpartition(".")
            if section_name:
                raw.setdefault(section_name, {})[name] = _listed(key, _unpacked(value))
            else:
                raw[name] = value
        section = raw.pop("network", {})
        problems: list[str] = []
        found: list[Any] = []
        for check in (lambda: check_config(raw, on_network=True), lambda: _network(section)):
            try:
                found.append(check())
            except ConfigError as error:
                problems.append(str(error))
        problems += [
            f"network.encoding = {apps.encoding!r} is for updates that are sent one by one, and "
            "those of network.secure_aggregation = true are whole numbers of 24 bits; leave it out"
            for network, apps in (each for each in found if isinstance(each, tuple))
            if network.secure_aggregation and apps.encoding != "float32"
        ]
        if problems:
            raise ConfigError("\n".join(problems))
        read = cls(found[0], *found[1])
        if read.network.secure_aggregation:
            config = read.config
            check_sums(
                with_signs(config.settings),
                config.built_algorithm({}),
                config.data.get("clients") or 0,
                parts=read.network.secure_parts,
            )
        return read

    def as_dict(self) -> dict[str, Any]:
        """Return the config with every default filled in, in the form saved in a run folder."""
        apps = {name: value for name, value in asdict(self.apps).items() if name != "finish"}
        return {**self.config.as_dict(), "network": {**self.network.described, **apps}}


def check_keys(run_config: UserConfig) -> None:
    """Check that a run config sets only keys that it may set.

    Nothing that the config names is opened or imported. A table given as text is the value of one
    key, and never a whole section, since the keys in it would escape this check.

    Raises
    ------
    ConfigError
        If another key is set; one line for each such key.
    """
    top = [field.name for field in fields(TopLevel)]
    allowed = [name for name in (*SECTIONS, "network") if name not in SIMULATED]
    problems: dict[str, None] = {}  # an ordered set
    for key in run_config:
        *sections, name = key.split(".")
        if len(sections) > 1 or (not sections and name in (*allowed, *SIMULATED)):
            problems[f"the run config takes section.key, got {key!r}"] = None
        elif not sections and name not in top:
            problems[f"the run config: {unknown('key', name, top)}"] = None
        elif sections and sections[0] in SIMULATED:
            why = f"[{sections[0]}] is for simulations, where clients only act; leave it out"
            problems[why] = None
        elif sections and sections[0] not in allowed:
            problems[unknown("section", sections[0], allowed)] = None
        elif sections == ["data"] and name not in DATA_KEYS and not _has_own_data_code(run_config):
            problems[f"[data] of a run config: {unknown('key', name, DATA_KEYS)}"] = None
    if problems:
        raise ConfigError("\n".join(problems))


def _has_own_data_code(run_config: UserConfig) -> bool:
    """Return whether data, partition or shift are in a user's or a package's code.

    Only that code knows the keys of its settings.
    """
    known = {"name": SOURCES, "partition": PARTITIONS, "shift": SHIFTS}
    return any(
        run_config.get(f"data.{key}", next(iter(names))) not in names
        for key, names in known.items()
    )


def _listed(key: str, value: object) -> object:
    """Return the list in a string with commas if a config has a list there; else the value.

    Class weights become numbers.
    """
    if key not in LISTS or not isinstance(value, str) or value.startswith("["):
        return value
    # names of presets, each of which stands for a list
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
    """Return a list or a table that is given as text, such as ``'["head.*"]'``.

    Flower's run config has neither lists nor tables.
    """
    if not isinstance(value, str) or not value.startswith(("[", "{")):
        return value
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value  # the later check of the value's type reports the problem


def _network(section: Mapping[str, Any]) -> tuple[Network, AppSettings]:
    fitted = check_arguments("[network]", (Network, AppSettings), dict(section))
    ours = {field.name for field in fields(AppSettings)}
    return (
        Network(**{key: value for key, value in fitted.items() if key not in ours}),
        AppSettings(**{key: value for key, value in fitted.items() if key in ours}),
    )


def server_app_from_config(callbacks: Sequence[Callback] = ()) -> ServerApp:
    """Make a ServerApp with the settings of the run config.

    See :func:`fedclade.flower.client_app_from_config` for the clients' side.

    Parameters
    ----------
    callbacks
        Callbacks of the run, see :func:`fedclade.simulate`.
    """

    def run(grid: Grid, context: Context) -> tuple[Run, Path]:
        read = RunConfig.read(context.run_config)
        config = read.config
        folder = Path(read.apps.out)
        run = federate(
            grid,
            config.built_algorithm,
            ModelFor(config.built_model, config.model["name"]),
            config.settings,
            network=read.network,
            callbacks=callbacks,
            on_round=print_round,
            config=read.as_dict(),
            folder=folder,
            finish=read.apps.finish,
            schema=read_declared(config.data.get("schema")) if "files" in config.data else None,
        )
        return run, folder

    return app_of(run)


def finish_run(folder: Path) -> Run:
    """Finish an unfinished run of a server in its current state, on the server alone.

    Parameters
    ----------
    folder
        Folder of the run.

    Raises
    ------
    ConfigError
        If the run was not begun by :func:`server_app_from_config`.
    UpdateError
        If the last round of the run was not evaluated, which requires clients.
    RunError, CheckpointError
        If the folder is damaged or has no checkpoint.
    """
    # imported here: it needs parts of Flower that no app needs
    from fedclade.flower.local_grid import LocalGrid

    noted = read_run_config(folder)
    then = "start its ServerApp again with network.finish = true, or finish = True in Python"
    try:
        sections = {
            key: value for key, value in noted.items() if key not in ("network", "versions")
        }
        config = check_config(sections, on_network=True)
        network, _ = _network(noted["network"])
    except UntrustedNameError:
        raise
    except ConfigError as error:
        raise ConfigError(
            f"{error}\nthe run cannot be finished by its config alone; {then}"
        ) from error
    return federate(
        LocalGrid({}),
        config.built_algorithm,
        ModelFor(config.built_model, config.model["name"]),
        config.settings,
        network=replace(network, wait=AT_ONCE),
        config=config.as_dict(),
        folder=folder,
        finish=True,
    )


def client_app_from_config(
    imports: Sequence[str] = (), queries: Sequence[type[RowQuery]] = ()
) -> ClientApp:
    """Make a ClientApp with the settings of the run config; see :func:`fedclade.flower.client_app`.

    The data set is specified by the run config and divided among its ``data.clients``; a node owns
    the share of its ``partition-id``. The data folder is ``data-dir`` in the node config, or the
    environment variable FEDCLADE_DATA_DIR. If ``data.files`` match the file of one client in that
    folder, the file is the node's own data, and ``partition-id`` is only its number; ``data-files``
    in the node config names another file. The privacy budget of a client is ``epsilon`` and
    ``delta`` in the node config.

    The run's config is written by the party that starts the run, which clients need not trust. So a
    client imports an object that the config names by ``module:name`` only if the app allows it in
    ``imports``, or the client itself in ``imports`` of its node config, and it reads ``data.files``
    and a ``data.folder`` only from its own data folder. A client need not have the algorithm, which
    runs on the server.

    Parameters
    ----------
    imports
        Objects ``module:name`` that a run config may name.
    queries
        Classes of queries that a method outside of fedclade needs.
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
        place = context.node_config.get("data-dir") or os.environ.get("FEDCLADE_DATA_DIR")
        folder = None if place is None else str(place)
        is_declared = _drop_schema(run_config)
        check_keys(run_config)
        _confine_paths(run_config, folder, context.node_config.get("data-files"))
        read = RunConfig.read(run_config)
        if (number := settings["number"]) is None:
            raise DataError(
                "a node of this app needs partition-id in its node config, to know whose data it "
                "has"
            )
        privacy = check_local(read.config.privacy.mechanism)
        budget = budget_of(context)
        by_example = isinstance(privacy, ExamplePrivacy)
        sharing = SchemaSharing(
            settings["policy"], privacy is not None or budget is not None, by_example
        )
        declared = agreed if is_declared else None
        data = sharing.encode(partial(_load, tuple(run_config.items()), folder, declared))
        if isinstance(data, TableSource):
            source = data.with_key(number)
            if agreed is None:
                proposal = source.propose()
                sharing.check(proposal, sum(len(table) for table in source.rows.tables))
                return Proposer(proposal, number)
            mine = sharing.encode(partial(source.encode, agreed))
        else:
            is_own = data.encoding is not None and data.encoding.source is not None
            mine = data if is_own else data.alone(number)
            if agreed is not None:
                mine = sharing.encode(partial(encode_federation, mine, agreed))
            elif mine.encoding is not None:
                sharing.check(mine.encoding.proposal, len(mine.pool.x))
                return Proposer(mine.encoding.proposal, number)
        return ClientHandler(
            mine,
            lambda seed: read.config.built_model(mine.pool.schema, seed),
            engine="loop"
            if read.config.top.engine in ("auto", *REMOTE)
            else read.config.top.engine,
            device=choose_device("auto"),
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
    """Remove a declared schema from a run config; return whether there was one.

    The server sends the schema to its clients.
    """
    keys = [key for key in run_config if key == "data.schema" or key.startswith("data.schema.")]
    for key in keys:
        del run_config[key]
    return bool(keys)


def _confine_paths(run_config: dict[str, Any], folder: str | None, own_files: object) -> None:
    """Replace the paths of :data:`DATA_PATHS` in a run config by paths in a node's data folder.

    The node config may name the node's own file by ``data-files``.
    """
    for name, rule in DATA_PATHS.items():
        key = f"data.{name}"
        if key not in run_config:
            continue
        path = str(run_config[key])
        if name == "files":
            title = FilesSettings(files=path, target="").title
            # the name is the run's, and must not depend on the node's folder
            run_config.setdefault("data.name", title)
            path = path if own_files is None else str(own_files)
        place = str(_data_folder(folder, path, f"{key} should be a {rule}"))
        if name == "files":
            run_config[key] = str(Path(glob.escape(place)) / path)
        elif name == "folder":
            run_config[key] = str(Path(place) / path)


def _data_folder(folder: str | None, path: str, rule: str) -> Path:
    """Return a node's data folder; a DataError, which begins with a rule, if a path leaves it."""
    if folder is None or Path(path).is_absolute() or ".." in Path(path).parts:
        raise DataError(
            f"{rule} inside a node's data folder ({folder or 'no data-dir in the node config'}), "
            f"got {shown(path)}"
        )
    return Path(folder).expanduser().absolute()


def budget_of(context: Context) -> Budget | None:
    """Return a client's privacy budget; None if its node config has no ``epsilon``.

    The budget is ``epsilon`` at ``delta`` (1e-5 if unset) in the node config. It is for the client
    with all its data, or for each of its examples if ``level`` is ``example``.

    Both numbers are the client's to choose. If δ were in the run's config, its author could set it
    near 1, at which any number of releases costs almost no ε.

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
def _load(
    items: tuple[tuple[str, Any], ...], data_dir: str | None, declared: DataSchema | None
) -> Federation | TableSource:
    """Return the tables of one client, or the federation of all clients with data here.

    The data is encoded by the declared schema. A process that is many clients in turn, as in
    Flower's simulation, loads it once.
    """
    config = RunConfig.read(dict(items)).config
    if "files" not in config.data:
        return config.federation(data_dir)
    source = replace(config.own_files(data_dir), schema=declared)
    return source if len(source.client_names) == 1 else source.federation()
