"""Starter configs: functions of ``fedclade init``, which writes a config for a user's tables."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fedclade.core import ConfigError, DataError
from fedclade.data import FEW_ROWS, Inspection, TextFormat, join_some, match_files

TABLES = (".csv", ".tsv", ".parquet")
"""File name endings of the supported table formats."""

WIDTH = 32
"""Column of the file in which comments begin, unless the text before them is longer."""

METHODS = {
    "auto": "chooses the best model for each client; 'fedclade ls' lists others",
    "rcfl": "finds clusters of clients; 'fedclade ls' lists others",
}
"""Methods that a config may name, with the comment of the line."""


@dataclass(frozen=True)
class TableFiles:
    """Files with tables that a user has named on the command line.

    Parameters
    ----------
    pattern
        A file name, or a pattern that matches all files, in the form of ``data.files`` of a config.
    paths
        Paths of the files.
    """

    pattern: str
    paths: tuple[Path, ...]

    @property
    def title(self) -> str:
        """Name for the data: the name of a single file, or of the folder of several files."""
        first = self.paths[0]
        if len(self.paths) == 1:
            return first.stem
        return first.absolute().parent.name or "files"

    @classmethod
    def find(cls, sources: Sequence[str]) -> TableFiles:
        """Find files with tables by their names, by a pattern, or by the name of their folder.

        Raises
        ------
        ConfigError
            If several files are named that are not all tables of a folder, so that no pattern
            matches exactly these files; or if the name of a file does not end as in :data:`TABLES`.
        DataError
            If there is no such file.
        """
        if len(sources) > 1:
            return cls._of_several([Path(source) for source in sources])
        (source,) = sources
        if Path(source).is_dir():
            return cls.of_folder(Path(source))
        paths = match_files(source, Path())
        if not paths:
            raise DataError(f"{source!r} matches no file in {Path().absolute()}; check the path")
        return cls(source, tuple(_check_tables(paths)))

    @classmethod
    def of_folder(cls, folder: Path) -> TableFiles:
        """Find the files with tables in a folder.

        All returned files have the same ending: the first of :data:`TABLES` with which the name of
        a file in the folder ends.

        Raises
        ------
        DataError
            If the folder has no table.
        """
        for suffix in TABLES:
            found = cls._with_ending(folder, suffix)
            if found.paths:
                return found
        raise DataError(
            f"folder {folder} contains no file that ends in {', '.join(TABLES)}; save the tables in "
            "one of these formats, or name another folder"
        )

    @classmethod
    def _of_several(cls, paths: Sequence[Path]) -> TableFiles:
        for path in paths:
            if not path.is_file():
                raise DataError(f"there is no file {path}; check the path")
        _check_tables(paths)
        first = paths[0]
        found = cls._with_ending(first.parent, first.suffix)
        if {*found.paths} != {*paths}:
            raise ConfigError(
                f"the {len(paths)} files should be all {first.suffix} files of the folder "
                f"{first.parent}, since a config names its files by one pattern; name all files "
                "of the folder, or pass a pattern in quotes that matches only the files to use, "
                f"such as '{first.parent}/a*{first.suffix}'"
            )
        return found

    @classmethod
    def _with_ending(cls, folder: Path, suffix: str) -> TableFiles:
        """Find the files of a folder whose names end with ``suffix``; there may be none."""
        pattern = os.path.join(glob.escape(str(folder)), f"*{suffix}")  # noqa: PTH118
        return cls(pattern, tuple(match_files(pattern, Path())))


def _check_tables(paths: Sequence[Path]) -> Sequence[Path]:
    for path in paths:
        if path.suffix.lower() not in TABLES:
            raise ConfigError(f"file {path} should have an ending of a table: {', '.join(TABLES)}")
    return paths


def write_starter(
    inspection: Inspection, files: TableFiles, out: Path, text_format: TextFormat | None = None
) -> str:
    """Return the text of a commented config for a user's tables.

    Each line of the config is an assumption about the tables, such as the column to predict, with
    the reason for it as a comment.

    Parameters
    ----------
    inspection
        Properties of the tables, such as their columns and the proposed target.
    files
        The files with the tables.
    out
        Path at which the config will be stored; paths in the config are relative to its folder.
    text_format
        Format of the files, such as the separator, as far as the user has specified it.
    """
    count = f"{len(files.paths)} files" if len(files.paths) > 1 else "1 file"
    small = [client.name for client in inspection.clients if client.rows < FEW_ROWS]
    are_all_small = len(small) == len(inspection.clients)
    # With few rows, a client would have one or two validation examples, or none.
    method = "rcfl" if are_all_small else "auto"
    lines = [
        f"# Made by 'fedclade init' from {count} with {inspection.rows:,} rows of "
        f"{len(inspection.clients)} clients.",
        "# Each line is an assumption: change it, or take it out.",
        "",
        _toml_line(f'algorithm.name = "{method}"', METHODS[method]),
        _toml_line(f"task.name = {_toml_string(inspection.task)}", inspection.reasons["task"]),
        "",
        "[data]",
        _toml_line(
            f"files = {_toml_string(_make_relative(files.pattern, out))}",
            _describe_files(inspection),
        ),
    ]
    if inspection.client is not None:
        lines.append(
            _toml_line(f"client = {_toml_string(inspection.client)}", inspection.reasons["client"])
        )
    lines.append(
        _toml_line(f"target = {_toml_string(inspection.target)}", inspection.reasons["target"])
    )
    stated = asdict(text_format or TextFormat())
    lines += [
        f"{key} = {_toml_string(value)}" for key, value in stated.items() if value is not None
    ]
    lines += _missing_lines(inspection)
    lines += _list_lines(
        "categorical",
        {column.name: column.why for column in inspection.columns_with("category")},
        "few different whole numbers: take out amounts and grades",
    )
    lines += _list_lines(
        "exclude",
        {column.name: column.why for column in inspection.columns_with("excluded")},
        "columns that are no inputs",
    )
    if not are_all_small:
        lines.append(
            _toml_line(
                "validation_fraction = 0.2",
                "share of the training examples by which models are chosen",
            )
        )
    if small and not are_all_small:
        lines.append(
            _toml_line(
                f"fewest_rows = {FEW_ROWS}", f"leaves out {len(small)} clients: {join_some(small)}"
            )
        )
    return "\n".join(lines) + "\n"


def _describe_files(inspection: Inspection) -> str:
    return "each file is a client" if inspection.client is None else ""


def _missing_lines(inspection: Inspection) -> list[str]:
    """Return the config line for missing values, or no line if no input cell is empty."""
    if not inspection.has_empty_inputs:
        return []
    used = inspection.columns_with("input") + inspection.columns_with("category")
    empty = sorted((column for column in used if column.empty), key=lambda column: -column.empty)
    named = join_some([f"{column.name} {column.empty:.0%}" for column in empty])
    return [_toml_line('missing = "mean"', f"or median, indicator, drop; empty cells: {named}")]


def _list_lines(key: str, entries: dict[str, str], comment: str) -> list[str]:
    """Return the config lines for a key whose value is a list of columns.

    Each column has its own line, with the reason as a comment. Without columns, there are no lines.
    """
    if not entries:
        return []
    rows = [_toml_line(f"    {_toml_string(name)},", why) for name, why in entries.items()]
    return [_toml_line(f"{key} = [", comment), *rows, "]"]


def _toml_line(text: str, comment: str) -> str:
    """Return a line of TOML with a comment; control characters in the comment become spaces."""
    if not comment:
        return text
    plain = "".join(character if character.isprintable() else " " for character in comment)
    return f"{text:<{WIDTH - 2}}  # {plain}"


def _toml_string(text: str) -> str:
    """Return a text as a quoted TOML string."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _make_relative(pattern: str, out: Path) -> str:
    """Rewrite a pattern of data files relative to the folder of the config ``out``.

    ``pattern`` is relative to the working directory; an absolute pattern does not change. On
    Windows no relative path leads to another drive. So the result is absolute if ``out`` and the
    working directory are on different drives.
    """
    if Path(pattern).is_absolute():
        return pattern
    try:
        relative = os.path.relpath(Path(pattern).absolute(), out.parent.absolute())
    except ValueError:  # another drive of Windows
        return str(Path(pattern).absolute())
    return Path(relative).as_posix()
