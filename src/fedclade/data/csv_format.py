"""Reading of CSV and TSV files, whose encoding and separator are detected from their bytes."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedclade.core import DataError, require
from fedclade.data.cell_values import Notation

DEFAULT_SEPARATORS = {".csv": ",", ".tsv": "\t"}
"""Default separator by the suffix of a file name. Text files with other suffixes are refused."""

SEPARATORS = (",", ";", "\t", "|")
"""Characters that can be detected as the separator between cells."""

DEFAULT_ENCODING = "utf-8"
FALLBACK_ENCODING = "cp1252"
"""Encoding (Western Windows) of files that are not valid UTF-8, as spreadsheets write them."""

SAMPLE_CHARACTERS = 1 << 14
"""Number of characters at the beginning of a file from which the separator is detected."""

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
"""First line such as ``sep=;``, by which spreadsheets declare the separator of a file."""

_LOOKS_LIKE_A_NUMBER = re.compile(r"\s*[-+]?\d+([.,]\d+)*\s*")


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """Format of CSV and TSV files as the user specifies it; unspecified (None) parts are detected.

    Parameters
    ----------
    encoding
        Name of a Python codec, such as ``cp1252``.
    separator
        Character between two cells of a row.
    decimal, dates
        Decimal mark of numbers and format of dates; see
        :class:`~fedclade.data.cell_values.Notation`.

    Raises
    ------
    ConfigError
        If the encoding is unknown, or the separator, the decimal mark or the date format is
        invalid.
    """

    encoding: str | None = None
    separator: str | None = None
    decimal: str | None = None
    dates: str | None = None

    def __post_init__(self) -> None:
        separator = self.separator
        encoding = self.encoding
        is_separate = separator is None or (is_separator(separator) and separator != self.decimal)
        is_known = encoding is None or is_encoding(encoding)
        separators = "a character such as ';' or '\\t', and not the decimal mark"
        encodings = "an encoding that Python knows, such as 'cp1252' or 'utf-16'"
        require(
            ("separator", separator, is_separate, separators),
            ("encoding", encoding, is_known, encodings),
            *Notation.checks(self.decimal, self.dates),
        )

    @property
    def notation(self) -> Notation:
        """Notation of numbers and dates: the decimal mark and the format of dates."""
        return Notation(decimal=self.decimal, dates=self.dates)


@dataclass(frozen=True)
class CsvFormat:
    """Separator and encoding by which the bytes of a CSV file are read.

    Parameters
    ----------
    separator
        Character between two cells of a row.
    encoding
        Name of a Python codec.
    skipped_lines
        Number of lines before the header.
    """

    separator: str
    encoding: str = DEFAULT_ENCODING
    skipped_lines: int = 0


@dataclass(frozen=True)
class CsvFile:
    """A CSV file and its format, from which cells are read as typed values or as texts."""

    path: Path
    format: CsvFormat
    # Detected parts of the format that are not the defaults, in words, for the log.
    assumed: tuple[str, ...] = ()

    @classmethod
    def detect(
        cls, path: Path, separator: str | None = None, encoding: str | None = None
    ) -> CsvFile:
        """Detect the parts of a CSV file's format that the user did not specify.

        A byte order mark in the file overrides the specified encoding.

        Raises
        ------
        DataError
            If the file cannot be read or decoded, or two separators fit it equally well.
        """
        try:
            codec = _marked_encoding(path) or encoding or detect_encoding(path)
            detected = _detect_format(path, separator, codec)
        except UnicodeError as error:
            raise _report_undecodable(path, encoding) from error
        except OSError as error:
            raise DataError(
                f"cannot read {path}: {error}; check the path and its permissions"
            ) from error
        assumed: list[str] = []
        if detected.separator not in (separator, DEFAULT_SEPARATORS[path.suffix.lower()]):
            assumed.append(f"separator {detected.separator!r}")
        if codec not in (encoding, DEFAULT_ENCODING):
            assumed.append(f"encoding {codec}")
        return cls(path, detected, tuple(assumed))

    def read(self, as_text: Sequence[str] = ()) -> Any:
        """Read the file as an Arrow table; columns in ``as_text`` remain texts.

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
            raise _report_undecodable(self.path, codec) from error
        except pa.ArrowInvalid as error:
            if not _read_sample(self.path, codec).strip():
                raise DataError(
                    f"{self.path} is empty; remove it, or write its header and rows"
                ) from error
            hint = "; correct the file"
            if "Expected" in str(error) and "columns" in str(error):
                hint = (
                    f"; cells are taken to be separated by {self.format.separator!r}; set "
                    "'separator' if this is wrong"
                )
            raise DataError(f"cannot read {self.path}: {error}{hint}") from error
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"cannot read {self.path}: {error}; check the file and its permissions"
            ) from error
        if any(pa.types.is_binary(kind) for kind in table.schema.types):  # bytes that are no UTF-8
            raise _report_undecodable(self.path, codec)
        return table


def detect_encoding(path: Path) -> str:
    """Return the encoding of a text file.

    A byte order mark determines the encoding. Without a mark, zero bytes indicate UTF-16, a file
    that is valid UTF-8 is in UTF-8, and any other file is in the encoding of Western Windows.
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
    """Return whether a text can be the separator of cells.

    A separator is a single ASCII character other than a letter, a digit, a point, a sign, a
    quotation mark, the end of a line or the character NUL.
    """
    is_possible = len(separator) == 1 and separator.isascii() and not separator.isalnum()
    return is_possible and separator not in '"\r\n.+-\0'


def is_encoding(encoding: str) -> bool:
    """Return whether Python has a text encoding of this name."""
    try:
        "".encode(encoding)
    except (LookupError, ValueError):
        return False
    return True


def _marked_encoding(path: Path) -> str | None:
    """Return the encoding that a file's byte order mark states; None if there is no mark."""
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


def _report_undecodable(path: Path, encoding: str | None) -> DataError:
    if encoding:
        tried = f"encoding {encoding!r}"
    else:
        tried = "UTF-8 or Windows-1252"
    return DataError(
        f"{path} cannot be decoded as {tried}; set 'encoding' to the encoding of the file, such as "
        "'cp1250' or 'utf-16', or save the file as UTF-8"
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
    """Return the first :data:`SAMPLE_CHARACTERS` characters of a text file, cut at a line end."""
    with path.open(encoding=encoding, newline="") as file:
        sample = file.read(SAMPLE_CHARACTERS)
    if len(sample) == SAMPLE_CHARACTERS:
        sample = sample[: sample.rfind("\n") + 1] or sample
    return sample.removeprefix("\ufeff")


def _detect_separator(sample: str, path: Path) -> str:
    """Choose the separator with which the largest share of rows has as many cells as the header.

    Among separators with equal shares, the one with the largest share of cells that are numbers is
    chosen. If no separator fits, the usual separator of files with this ending is chosen.

    Raises
    ------
    DataError
        If several separators are equal by both criteria.
    """
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
            f"the separator of cells in {path} is ambiguous: "
            f"{' or '.join(map(repr, fitting))} fits equally well; set 'separator'"
        )
    return fitting[0]


def _regular_rows(sample: str, separator: str) -> tuple[float, list[list[str]]]:
    """Measure how well a separator fits a sample of a CSV file.

    Returns
    -------
    tuple
        A score of the separator, from 0 (does not fit) to 1, and rows below the header. A row is
        regular if it has as many cells as the header.

        - If at least half of the rows are regular, the score is their share, and the regular rows
          are returned. Without rows below the header, the score is 1.
        - If all rows have the same number of cells, more than one, and only the header has another
          number, the score is 1/4, and all rows are returned. The separator can then still be
          chosen, and the reader reports the wrong header.
        - In all other cases the score is 0. All rows are returned, or no rows if the header has
          only one cell or the sample cannot be parsed.
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
