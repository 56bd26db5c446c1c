"""The format of a CSV file, detected from its bytes: its encoding and its separator."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedclade.core import DataError

DEFAULT_SEPARATORS = {".csv": ",", ".tsv": "\t"}
"""Default separator by the ending of a file's name. Only these text files can be read."""

SEPARATORS = (",", ";", "\t", "|")
"""Separators that are detected."""

DEFAULT_ENCODING = "utf-8"
FALLBACK_ENCODING = "cp1252"
"""Encoding of Western Windows, in which spreadsheets there write files that are not in UTF-8."""

SAMPLE_CHARACTERS = 1 << 14
"""Beginning of a file from which the separator is detected."""

_CHUNK_BYTES = 1 << 20

# The marks of UTF-32 begin with those of UTF-16, so their order matters.
_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: DEFAULT_ENCODING,
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}

_SEPARATOR_LINE = re.compile(r"\ufeff?\"?sep=(.)\"?\r?\n", re.IGNORECASE)
"""First line that spreadsheets write and read, but do not show."""

_LOOKS_LIKE_A_NUMBER = re.compile(r"\s*[-+]?\d+([.,]\d+)*\s*")


@dataclass(frozen=True)
class CsvFormat:
    """Format of the bytes of a CSV file.

    Parameters
    ----------
    separator
        Character between two cells of a row.
    encoding
        Name of Python's codec.
    skipped_lines
        Lines before the header.
    """

    separator: str
    encoding: str = DEFAULT_ENCODING
    skipped_lines: int = 0


@dataclass(frozen=True)
class CsvFile:
    """A CSV file and its format; its cells can be read as typed values or as texts."""

    path: Path
    format: CsvFormat
    # Assumptions about the format, in words: values that were detected and are not the default.
    assumed: tuple[str, ...] = ()

    @classmethod
    def detect(
        cls, path: Path, separator: str | None = None, encoding: str | None = None
    ) -> CsvFile:
        """Detect the unknown parts of a file's format; a byte order mark overrides an encoding.

        Raises
        ------
        DataError
            If the file cannot be read or decoded, or two separators fit it equally well.
        """
        try:
            codec = _marked_encoding(path) or encoding or detect_encoding(path)
            detected = _detect_format(path, separator, codec)
        except UnicodeError as error:
            raise _undecodable(path, encoding) from error
        except OSError as error:
            raise DataError(f"cannot read {path}: {error}") from error
        assumed: list[str] = []
        if detected.separator not in (separator, DEFAULT_SEPARATORS[path.suffix.lower()]):
            assumed.append(f"separator {detected.separator!r}")
        if codec not in (encoding, DEFAULT_ENCODING):
            assumed.append(f"encoding {codec}")
        return cls(path, detected, tuple(assumed))

    def read(self, as_text: Sequence[str] = ()) -> Any:
        """Return the file as an Arrow table, with the columns of ``as_text`` as texts.

        Raises
        ------
        DataError
            If the file cannot be decoded, or a row has too many or too few cells.
        """
        import pyarrow as pa
        import pyarrow.csv as pyarrow_csv

        codec = self.format.encoding
        skipped = self.format.skipped_lines
        try:
            table = pyarrow_csv.read_csv(
                self.path,
                pyarrow_csv.ReadOptions(encoding=codec, skip_rows=skipped),
                pyarrow_csv.ParseOptions(delimiter=self.format.separator, newlines_in_values=True),
                pyarrow_csv.ConvertOptions(column_types=dict.fromkeys(as_text, pa.string())),
            )
        except UnicodeError as error:
            raise _undecodable(self.path, codec) from error
        except pa.ArrowInvalid as error:
            hint = ""
            if "Expected" in str(error) and "columns" in str(error):
                hint = (
                    f"; cells are separated by {self.format.separator!r}, unless 'separator' says "
                    "otherwise"
                )
            raise DataError(f"cannot read {self.path}: {error}{hint}") from error
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"cannot read {self.path}: {error}") from error
        if any(pa.types.is_binary(kind) for kind in table.schema.types):  # bytes that are no UTF-8
            raise _undecodable(self.path, codec)
        return table


def detect_encoding(path: Path) -> str:
    """Return the encoding of a text file.

    A byte order mark decides, then the zero bytes of UTF-16; a file that is valid UTF-8 is in
    UTF-8, and any other in the encoding of Western Windows, which UTF-8 cannot be mistaken for.
    """
    marked = _marked_encoding(path)
    if marked is not None:
        return marked
    with path.open("rb") as file:
        head = file.read(4096)
        if b"\0" in head:
            # In UTF-16, characters of Western languages have a zero byte: the second byte if the
            # order is little-endian.
            return "utf-16-le" if head[1::2].count(0) > head[::2].count(0) else "utf-16-be"
        file.seek(0)
        if _is_utf_8(iter(lambda: file.read(_CHUNK_BYTES), b"")):
            return DEFAULT_ENCODING
        return FALLBACK_ENCODING


def is_separator(separator: str) -> bool:
    """Return whether a text can separate cells: one character, not of numbers or quotes."""
    is_possible = len(separator) == 1 and separator.isascii() and not separator.isalnum()
    return is_possible and separator not in '"\r\n.+-\0'


def is_encoding(encoding: str) -> bool:
    """Return whether Python has an encoding of this name for texts."""
    try:
        "".encode(encoding)
    except (LookupError, ValueError):
        return False
    return True


def _marked_encoding(path: Path) -> str | None:
    """Return the encoding of the byte order mark of a file; None if there is no mark."""
    with path.open("rb") as file:
        head = file.read(4)
    return next(
        (encoding for mark, encoding in _BYTE_ORDER_MARKS.items() if head.startswith(mark)), None
    )


def _is_utf_8(chunks: Iterator[bytes]) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for chunk in chunks:
            decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _undecodable(path: Path, encoding: str | None) -> DataError:
    tried = f"encoding {encoding!r}" if encoding else "UTF-8 or Windows-1252"
    return DataError(
        f"{path} is not a text in {tried}; set 'encoding', such as 'cp1250' or "
        "'utf-16', or save it as UTF-8"
    )


def _detect_format(path: Path, separator: str | None, encoding: str) -> CsvFormat:
    sample = _read_sample(path, encoding)
    announced = _SEPARATOR_LINE.match(sample)
    if announced:
        return CsvFormat(separator or announced[1], encoding, skipped_lines=1)
    if separator is None:
        separator = _detect_separator(sample, path)
    return CsvFormat(separator, encoding)


def _read_sample(path: Path, encoding: str) -> str:
    """Return the beginning of a text file, up to the end of a line."""
    with path.open(encoding=encoding, newline="") as file:
        sample = file.read(SAMPLE_CHARACTERS)
    if len(sample) == SAMPLE_CHARACTERS:
        sample = sample[: sample.rfind("\n") + 1] or sample
    return sample.removeprefix("\ufeff")


def _detect_separator(sample: str, path: Path) -> str:
    """Return the separator with most rows as long as the header, then with most numbers."""
    regular = {separator: _regular_rows(sample, separator) for separator in SEPARATORS}
    shares = {separator: share for separator, (share, _) in regular.items()}
    best = max(shares.values())
    fitting = [separator for separator in SEPARATORS if shares[separator] == best]
    if best == 0:
        return DEFAULT_SEPARATORS[path.suffix.lower()]
    if len(fitting) > 1:
        numbers = {separator: _share_of_numbers(regular[separator][1]) for separator in fitting}
        fitting = [
            separator for separator in fitting if numbers[separator] == max(numbers.values())
        ]
    if len(fitting) > 1:
        raise DataError(
            f"{path} may be separated by {' or '.join(map(repr, fitting))}; set 'separator'"
        )
    return fitting[0]


def _regular_rows(sample: str, separator: str) -> tuple[float, list[list[str]]]:
    """Return the share of rows that have as many cells as the header, and these rows.

    The share is 0 if it is below one half or there is only one column; but a quarter if all rows
    agree and only the header differs, so that the error of the reader is about the right separator.
    """
    try:
        rows = [
            row for row in csv.reader(io.StringIO(sample, newline=""), delimiter=separator) if row
        ]
    except csv.Error:
        return 0.0, []
    if not rows or len(rows[0]) < 2:
        return 0.0, []
    header, *rest = rows
    regular = [row for row in rest if len(row) == len(header)]
    if not rest:
        return 1.0, []
    share = len(regular) / len(rest)
    if share >= 0.5:
        return share, regular
    lengths = {len(row) for row in rest}
    has_other_header = len(lengths) == 1 and 1 not in lengths
    return (0.25 if has_other_header else 0.0), rest


def _share_of_numbers(rows: Sequence[Sequence[str]]) -> float:
    cells = [cell for row in rows for cell in row]
    return sum(_LOOKS_LIKE_A_NUMBER.fullmatch(cell) is not None for cell in cells) / max(
        1, len(cells)
    )
