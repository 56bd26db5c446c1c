"""The ``[data]`` section: its check, and the loading of data.

Data is one of fedclade's data sets, clients' own files, a folder, or the result of a user's
function.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

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
    FilesSettings,
    OwnSettings,
    Pool,
    TableSource,
    federation,
    find_partition,
    find_shift,
    load_federation,
    match_files,
    open_folder,
    pool_from_torch,
    resolve_augment,
)

FROM_CONFIG = ("seed", "newcomers", "newcomer_samples", "data_dir")
"""Data settings that come from other sections or from the command line."""

_FOR_POOLS = ("source", "source_arguments", "partition_arguments", "shift_arguments", "pool")
"""Arguments of functions that distribute a pool that are not keys of the section."""


def is_own_data(section: Section) -> bool:
    """Return whether clients have their own data, rather than parts of a data set of fedclade."""
    # the name may be of any type here
    return (
        "files" in section or "folder" in section or section.get("name", "digits") not in [*SOURCES]
    )


def with_files_found(raw: Section, folder: Path) -> Section:
    """Return a config in which relative paths of files and folders are replaced by absolute ones.

    Paths are looked up in the current folder, then in the config's ``folder``; those that are found
    nowhere do not change.
    """
    raw = _with_file_found(raw, folder, "presence", "trace")
    return _with_data_found(_with_file_found(raw, folder, "data", "schema"), folder)


def _with_file_found(raw: Section, folder: Path, name: str, key: str) -> Section:
    """Return a config with an absolute path in one key, if the file exists."""
    section = raw.get(name)
    file = section.get(key) if isinstance(section, Mapping) else None
    if not isinstance(file, str):
        return raw
    for place in (Path(), folder):
        if (place / file).is_file():
            return {**raw, name: {**raw[name], key: str((place / file).absolute())}}
    return raw


def _with_data_found(raw: Section, folder: Path) -> Section:
    """Return a config with absolute paths in ``data.files`` or ``data.folder``, if they exist."""
    section = raw.get("data")
    files, built = (
        section.get(key) if isinstance(section, Mapping) else None for key in ("files", "folder")
    )
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
    """Return the ``[data]`` section of clients' own data with its defaults.

    Parameters
    ----------
    section
        The section.
    on_network
        Whether each client runs on a node of a network, and so may have a single file.

    Raises
    ------
    ConfigError
        If a key is unknown, or a value is of the wrong type or out of range; one line for each.
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
        The section, with its defaults.
    task
        Kind of the targets; None if the data determines it.
    data_dir
        Folder with the data; by default ``FEDCLADE_DATA_DIR``.
    from_config
        The other settings in :data:`FROM_CONFIG`.

    Raises
    ------
    ConfigError
        If a setting does not fit the result of the user's function.
    DataError
        If data is missing or unusable, or the function fails.
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
    """Open the files that a section names, without encoding their contents yet."""
    files, settings = _files_settings(section, from_config)
    return files.source(settings, task, data_dir)


def _files_settings(
    section: Section, from_config: Mapping[str, Any]
) -> tuple[FilesSettings, OwnSettings]:
    files = FilesSettings(**_those_of(section, known_arguments(FilesSettings)))
    return files, OwnSettings(**_those_of(section, known_arguments(OwnSettings)), **from_config)


def _shared_out(source: str | Pool, section: Section, from_config: Mapping[str, Any]) -> Federation:
    """Distribute a data set to clients; options that no other function takes go to the source."""
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
    """A federation's folder, as written by ``fedclade data build``.

    See :func:`fedclade.data.open_folder`.
    """

    folder: str
    name: str | None = None
    augment: Augment | str | None = None


def _check_folder(section: Section) -> Section:
    others = {*known_arguments(load_federation), *known_arguments((FilesSettings, OwnSettings))}
    shared = [
        key for key in section if key in others and key not in known_arguments(FolderSettings)
    ]
    if shared:
        why = "whose clients have their data already"
        raise ConfigError(
            "\n".join(
                f"data.{key} makes no sense with a folder, {why}; leave it out" for key in shared
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
    found = open_folder(settings.folder, settings.augment)
    _check_held_back(found, f"in {settings.folder}", from_config)
    return found


def _check_held_back(found: Federation, which: str, from_config: Mapping[str, Any]) -> None:
    held_back = 0 if found.newcomers is None else len(found.newcomers)
    rule = f"{held_back}, as the Federation {which} has"
    require(
        (
            "newcomers.clients",
            from_config["newcomers"],
            from_config["newcomers"] in (0, held_back),
            rule,
        )
    )


def _check_files(section: Section, *, on_network: bool) -> Section:
    takers = FilesSettings, OwnSettings
    known = [key for key in known_arguments(takers) if key not in FROM_CONFIG]
    shared = [
        key for key in section if key not in known and key in known_arguments(load_federation)
    ]
    if shared:
        raise ConfigError(
            "\n".join(
                f"data.{key} makes no sense with files, {_WHY}; leave it out" for key in shared
            )
        )
    fitted = check_arguments("[data]", takers, section, FROM_CONFIG)
    if "target" not in fitted:
        raise ConfigError("data.target should name the column to predict, got none")
    found = FilesSettings(**_those_of(fitted, known_arguments(FilesSettings)))
    if not on_network:
        found.check_clients()
    OwnSettings(**_those_of(fitted, known_arguments(OwnSettings)))
    return {**defaults(takers, FROM_CONFIG), **fitted, "name": found.title}


_WHY = "whose rows belong to clients already"


def _check_function(section: Section) -> Section:
    name = section["name"]
    function = _function(name)
    partition = find_partition(section.get("partition", "iid"))
    shift = find_shift(section.get("shift", "none"))
    takers = partition.split, shift.views, function, OwnSettings, load_federation
    besides = (*FROM_CONFIG, *_FOR_POOLS)
    given = {key: value for key, value in section.items() if key != "name"}
    fitted = check_arguments("[data]", takers, given, besides, positional=True)
    OwnSettings(**_those_of(fitted, known_arguments(OwnSettings)))
    return {"name": name, **defaults(function, FROM_CONFIG, positional=True), **fitted}


def _function(name: object) -> Callable[..., Any]:
    found = named("data", name, SOURCES, "dataset in [data]:")
    return check_function(found, f"data.name = {name!r}", "clients' data")


def _federation_of(
    section: Section,
    task: TaskKind | None,
    data_dir: str | Path | None,
    from_config: Mapping[str, Any],
) -> Federation:
    """Call the user's function, and make a federation of its result."""
    name = section["name"]
    function = _function(section["name"])
    takes = known_arguments(function, positional=True)
    there = {**section, "seed": from_config["seed"], "data_dir": data_dir}
    returned = call_own(f"data {name!r}", function, **_those_of(there, takes))
    title = str(name).rpartition(":")[2]
    left = {key: value for key, value in section.items() if key not in takes and key != "name"}
    if isinstance(returned, Pool | Dataset):
        pool = (
            returned
            if isinstance(returned, Pool)
            else pool_from_torch(returned, None, title, task or "classification")
        )
        pool = pool.with_inputs_as(left.pop("inputs_are", "auto"))
        return _shared_out(pool, {**_those_of(section, ("clients",)), **left}, from_config)
    if isinstance(returned, Mapping):
        _refuse(
            [key for key in left if key not in known_arguments(OwnSettings)],
            name,
            "a mapping of clients",
        )
        return federation(returned, task, name=title, **left, **from_config)
    if not isinstance(returned, Federation):
        raise DataError(
            f"data {name!r} should return a Federation, or a mapping of client names to (train, "
            f"test), got {type(returned).__name__}"
        )
    _refuse([key for key in left if key != "augment"], name, "a Federation")
    _check_held_back(returned, f"that {name!r} returns", from_config)
    return (
        replace(returned, augment=resolve_augment(left["augment"]))
        if "augment" in left
        else returned
    )


def _refuse(keys: Sequence[str], name: object, returned: str) -> None:
    if keys:
        raise ConfigError(
            "\n".join(
                f"data.{key} makes no sense with {name!r}, which returns {returned}; leave it out"
                for key in keys
            )
        )


def _those_of(section: Mapping[str, Any], names: Collection[str]) -> Section:
    return {key: value for key, value in section.items() if key in names}
