"""Check of the ``[data]`` section of a config, and loading of the data that it describes.

The data is one of fedclade's data sets, files of the clients' own, a folder written by ``fedclade
data build``, or the result of a user's function.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedclade.config.toml_files import Section
from fedclade.core import (
    ConfigError,
    DataError,
    TaskKind,
    call_own,
    check_arguments,
    check_function,
    defaults,
    known_arguments,
    named,
    require,
)
from fedclade.data import (
    SOURCES,
    Augment,
    Federation,
    Pool,
    find_partition,
    find_shift,
    load_federation,
    resolve_augment,
)

if TYPE_CHECKING:
    from fedclade.data import FilesSettings, OwnSettings, TableSource

FROM_CONFIG = ("seed", "newcomers", "newcomer_samples", "data_dir")
"""Arguments of data functions that are set by other sections or by the command line."""

_FOR_POOLS = ("source", "source_arguments", "partition_arguments", "shift_arguments", "pool")
"""Arguments of functions that distribute a pool, which keys of ``[data]`` cannot set."""


def is_own_data(section: Section) -> bool:
    """Return whether a ``[data]`` section describes a user's data rather than a fedclade data set.

    A user's data is in files, in a folder, or the result of the user's function.
    """
    # the name may be of any type here
    return (
        "files" in section or "folder" in section or section.get("name", "digits") not in [*SOURCES]
    )


def with_files_found(raw: Section, folder: Path) -> Section:
    """Return a config in which relative paths of existing files and folders are made absolute.

    A relative path is looked up in the current folder, and then in ``folder``, the folder of the
    config. A path that exists in neither folder does not change.
    """
    raw = _with_file_found(raw, folder, "presence", "trace")
    for key in ("schema", "attributes"):
        raw = _with_file_found(raw, folder, "data", key)
    return _with_data_found(raw, folder)


def _with_file_found(raw: Section, folder: Path, name: str, key: str) -> Section:
    """Return a config in which one relative path, ``key`` of section ``name``, is made absolute.

    See :func:`with_files_found`. A path of a file that does not exist does not change.
    """
    section = raw.get(name)
    file = section.get(key) if isinstance(section, Mapping) else None
    if not isinstance(file, str):
        return raw
    for place in (Path(), folder):
        if (place / file).is_file():
            return {**raw, name: {**raw[name], key: str((place / file).absolute())}}
    return raw


def _with_data_found(raw: Section, folder: Path) -> Section:
    """Return a config in which the path in ``data.files`` or ``data.folder`` is made absolute.

    See :func:`with_files_found`. A path that does not exist does not change.
    """
    section = raw.get("data")
    files, built = (
        section.get(key) if isinstance(section, Mapping) else None for key in ("files", "folder")
    )
    if not isinstance(files, str) and not isinstance(built, str):
        return raw
    from fedclade.data import match_files

    for place in (Path(), folder):
        if isinstance(built, str) and (place / built).is_dir():
            return {**raw, "data": {**raw["data"], "folder": str((place / built).absolute())}}
        if isinstance(files, str) and match_files(files, place):
            return {
                **raw,
                "data": {
                    **raw["data"],
                    "files": str(Path(glob.escape(str(place.absolute())), files)),
                },
            }
    return raw


def check_own_data(section: Section, *, on_network: bool = False) -> Section:
    """Check a ``[data]`` section that describes a user's data, and return it with its defaults.

    Parameters
    ----------
    section
        The section.
    on_network
        Whether each client runs on a node of a network. The data may then be a single file.

    Raises
    ------
    ConfigError
        If a key is unknown, or a value has the wrong type or is out of range; the message has a
        line for each problem.
    """
    if "folder" in section:
        return _check_folder(section)
    return (
        _check_files(section, on_network=on_network)
        if "files" in section
        else _check_function(section)
    )


def load_data(
    section: Section, task: TaskKind | None, data_dir: str | Path | None, **from_config: Any
) -> Federation:
    """Load the federation that a ``[data]`` section describes.

    Parameters
    ----------
    section
        The section, completed by defaults.
    task
        Kind of the task, which determines the targets; None if the data determines the task.
    data_dir
        Folder with the files of the data set; by default the environment variable
        ``FEDCLADE_DATA_DIR``.
    from_config
        Arguments that are set by other sections of the config, such as the seed and the number of
        newcomers: all of :data:`FROM_CONFIG` except ``data_dir``.

    Raises
    ------
    ConfigError
        If a setting does not apply to the result of the user's function.
    DataError
        If data is missing or unusable, or if the user's function fails.
    """
    if not is_own_data(section):
        return _shared_out(section["name"], {**section, "data_dir": data_dir}, from_config)
    if "folder" in section:
        return _from_folder(FolderSettings(**section), from_config)
    if "files" not in section:
        return _federation_of(section, task, data_dir, from_config)
    files, settings = _files_settings(section, from_config)
    return files.federation(settings, task, data_dir)


def open_files(
    section: Section, task: TaskKind | None, data_dir: str | Path | None, **from_config: Any
) -> TableSource:
    """Open the files that a ``[data]`` section names, without encoding their contents yet.

    The parameters are as for :func:`load_data`.
    """
    files, settings = _files_settings(section, from_config)
    return files.source(settings, task, data_dir)


def _files_settings(
    section: Section, from_config: Mapping[str, Any]
) -> tuple[FilesSettings, OwnSettings]:
    from fedclade.data import FilesSettings, OwnSettings

    files = FilesSettings(**_those_of(section, known_arguments(FilesSettings)))
    return files, OwnSettings(**_those_of(section, known_arguments(OwnSettings)), **from_config)


def _shared_out(source: str | Pool, section: Section, from_config: Mapping[str, Any]) -> Federation:
    """Distribute a data set to clients, as :func:`load_federation` does.

    The keys of ``section`` are passed to the functions that have them as arguments:
    ``load_federation``, the partition and the shift. All other keys are passed to the source.
    """
    settings = _those_of(section, known_arguments(load_federation))
    extra = {key: value for key, value in section.items() if key not in settings and key != "name"}
    partition = known_arguments(find_partition(section.get("partition", "iid")).split)
    shift = (
        known_arguments(find_shift(section.get("shift", "none")).views).keys() - partition.keys()
    )
    return load_federation(
        source,
        **settings,
        **from_config,
        partition_arguments={key: value for key, value in extra.items() if key in partition},
        shift_arguments={key: value for key, value in extra.items() if key in shift},
        source_arguments={
            key: value for key, value in extra.items() if key not in {*partition, *shift}
        },
    )


@dataclass(frozen=True, kw_only=True)
class FolderSettings:
    """Settings of the ``[data]`` section for a folder that ``fedclade data build`` has written.

    See :func:`fedclade.data.open_folder`.
    """

    folder: str
    name: str | None = None
    augment: Augment | str | None = None


def _check_folder(section: Section) -> Section:
    from fedclade.data import FilesSettings, OwnSettings

    others = {*known_arguments(load_federation), *known_arguments((FilesSettings, OwnSettings))}
    shared = [
        key for key in section if key in others and key not in known_arguments(FolderSettings)
    ]
    if shared:
        why = "in which the data is divided among the clients already"
        raise ConfigError(
            "\n".join(
                f"data.{key} cannot be combined with data.folder, {why}; remove the key"
                for key in shared
            )
        )
    fitted = check_arguments("[data]", FolderSettings, section)
    resolve_augment(fitted.get("augment"))
    return {
        **defaults(FolderSettings),
        **fitted,
        "name": fitted.get("name") or Path(fitted["folder"]).name,
    }


def _from_folder(settings: FolderSettings, from_config: Mapping[str, Any]) -> Federation:
    from fedclade.data import open_folder

    found = open_folder(settings.folder, settings.augment)
    _check_held_back(found, f"in {settings.folder}", from_config)
    return found


def _check_held_back(found: Federation, which: str, from_config: Mapping[str, Any]) -> None:
    held_back = 0 if found.newcomers is None else len(found.newcomers)
    rule = f"{held_back}, the number of newcomers of the Federation {which}"
    require(
        (
            "newcomers.clients",
            from_config["newcomers"],
            from_config["newcomers"] in (0, held_back),
            rule,
        )
    )


_NO_VALUE = object()
"""Marker that is different from every value of a key."""


def _check_files(section: Section, *, on_network: bool) -> Section:
    from fedclade.data import FilesSettings, OwnSettings

    takers = FilesSettings, OwnSettings
    known = [key for key in known_arguments(takers) if key not in FROM_CONFIG]
    shared = [
        key for key in section if key not in known and key in known_arguments(load_federation)
    ]
    if shared:
        raise ConfigError(
            "\n".join(
                f"data.{key} cannot be combined with data.files, {_WHY}; remove the key"
                for key in shared
            )
        )
    fitted = check_arguments("[data]", takers, section, FROM_CONFIG)
    if fitted.keys() >= SAVED_KEYS:
        fitted = {**SAVED_WITHOUT, **fitted}
    if "target" not in fitted:
        raise ConfigError("data.target should name the column to predict, got none")
    fitted = _with_one_name(fitted)
    found = FilesSettings(**_those_of(fitted, known_arguments(FilesSettings)))
    if not on_network:
        found.check_clients()
    OwnSettings(**_those_of(fitted, known_arguments(OwnSettings)))
    filled = {**defaults(takers, FROM_CONFIG), **fitted, "name": found.title}
    # Keys that earlier versions lack are left out if they have their defaults, so that earlier
    # versions can read the config of a run that does not use these keys.
    without = {key: value for key, value in defaults(FilesSettings).items() if key in _LATER}
    return {key: value for key, value in filled.items() if without.get(key, _NO_VALUE) != value}


_LATER = ("exclude", "categorical", "missing", "fewest_rows")
"""Keys for data in files that earlier versions did not have."""


def _with_one_name(section: Section) -> Section:
    """Return a ``[data]`` section in which the columns to leave out are under the key ``drop``.

    The input may have them under ``drop`` or under ``exclude``, the newer name of the same key. The
    result always has the older name, which earlier versions can read as well.
    """
    from fedclade.data import choose_excluded

    dropped = choose_excluded(section.get("exclude", ()), section.get("drop", ()))
    others = {key: value for key, value in section.items() if key not in ("exclude", "drop")}
    return {**others, "drop": dropped} if dropped else others


SAVED_KEYS = frozenset(
    {"standardize", "test_fraction", "validation_fraction", "inputs_are", "max_words"}
)
"""Keys by which a ``[data]`` section that a run has saved is recognized.

A section that a run has saved contains all keys with a default, including these.
"""

SAVED_WITHOUT = {"standardize_target": "none", "stratify": "none", "test": "random"}
"""Keys that are left out of a saved ``[data]`` section if they have these values.

Earlier versions did not have these keys, and behaved as with these values.
"""


def without_later_keys(section: Section) -> Section:
    """Return a ``[data]`` section in the form in which runs save it, for earlier versions to read.

    Earlier versions of fedclade refuse keys that they do not know. Such a key is left out if its
    value stands for the behaviour of earlier versions, see :data:`SAVED_WITHOUT`. A section without
    the key ``files`` is returned unchanged: its data may come from a user's function, and the same
    keys may be arguments of this function.
    """
    if "files" not in section:
        return section
    return {
        key: value for key, value in section.items() if SAVED_WITHOUT.get(key, _NO_VALUE) != value
    }


_WHY = "in which the rows are divided among the clients already"


def _check_function(section: Section) -> Section:
    from fedclade.data import NamedColumns, OwnSettings

    name = section["name"]
    function = _find_function(name)
    partition = find_partition(section.get("partition", "iid"))
    shift = find_shift(section.get("shift", "none"))
    takers = partition.split, shift.views, function, OwnSettings, NamedColumns, load_federation
    besides = (*FROM_CONFIG, *_FOR_POOLS)
    given = {key: value for key, value in section.items() if key != "name"}
    fitted = check_arguments("[data]", takers, given, besides, positional=True)
    OwnSettings(**_those_of(fitted, known_arguments(OwnSettings)))
    return {"name": name, **defaults(function, FROM_CONFIG, positional=True), **fitted}


def _find_function(name: object) -> Callable[..., Any]:
    """Return the user's function that ``data.name`` names."""
    found = named("data", name, SOURCES, "dataset in [data]:")
    return check_function(found, f"data.name = {name!r}", "clients' data")


def _federation_of(
    section: Section,
    task: TaskKind | None,
    data_dir: str | Path | None,
    from_config: Mapping[str, Any],
) -> Federation:
    """Call the user's function named in ``data.name``, and return its result as a federation.

    The result of the function may be a pool or torch data set, which is distributed to clients, a
    mapping of clients to their data, or a federation. The function gets those keys of ``section``
    that it has as parameters. All other keys are settings of the distribution or the federation.
    """
    from fedclade.data import NamedColumns, OwnSettings, federation, is_dataset, pool_from_torch

    name = section["name"]
    function = _find_function(section["name"])
    takes = known_arguments(function, positional=True)
    there = {**section, "seed": from_config["seed"], "data_dir": data_dir}
    returned = call_own(f"data {name!r}", function, **_those_of(there, takes))
    title = str(name).rpartition(":")[2]
    left = {key: value for key, value in section.items() if key not in takes and key != "name"}
    if isinstance(returned, Pool) or is_dataset(returned):
        pool = returned
        if not isinstance(returned, Pool):
            columns = {key: left.pop(key) for key in known_arguments(NamedColumns) if key in left}
            pool = pool_from_torch(returned, None, title, task or "classification", **columns)
        pool = pool.with_inputs_as(left.pop("inputs_are", "auto"))
        return _shared_out(pool, {**_those_of(section, ("clients",)), **left}, from_config)
    if isinstance(returned, Mapping):
        _refuse_keys(
            [key for key in left if key not in known_arguments((OwnSettings, NamedColumns))],
            name,
            "a mapping of clients to data",
        )
        return federation(returned, task, name=title, **left, **from_config)
    if not isinstance(returned, Federation):
        raise DataError(
            f"the function {name!r} of data.name should return a Federation, a Pool, a torch "
            f"Dataset, or a mapping of client names to (train, test), got {type(returned).__name__}"
        )
    _refuse_keys([key for key in left if key != "augment"], name, "a Federation")
    _check_held_back(returned, f"that {name!r} returns", from_config)
    return (
        replace(returned, augment=resolve_augment(left["augment"]))
        if "augment" in left
        else returned
    )


def _refuse_keys(keys: Sequence[str], name: object, returned: str) -> None:
    if keys:
        raise ConfigError(
            "\n".join(
                f"data.{key} cannot be combined with the function {name!r}, which returns "
                f"{returned} and has no such parameter; remove the key"
                for key in keys
            )
        )


def _those_of(section: Mapping[str, Any], names: Collection[str]) -> Section:
    return {key: value for key, value in section.items() if key in names}
