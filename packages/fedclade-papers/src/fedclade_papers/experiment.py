"""An experiment of a paper: settings, the paper's statements, and functions to measure and draw."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedclade import ConfigError
from fedclade.core import unknown
from fedclade_papers.cache import ResultCache, Settings
from fedclade_papers.outcome import NONE, Claim, Outcome, Row, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Scale = Literal["smoke", "laptop", "paper"]

Draw = Callable[[Outcome, Settings], "Figure"]


@dataclass(frozen=True, eq=False)
class Experiment:
    """A table or figure of a paper.

    Raises
    ------
    ConfigError
        If a scale changes a key that is not among the paper's settings.
    """

    #: Name on the command line: ``cfl-fig5-data``.
    name: str
    #: Paper and place: ``"Sattler et al. 2019, figure 5"``.
    source: str
    #: Title of one line.
    title: str
    #: The paper's own settings, in JSON's types. The list ``seeds`` repeats the experiment with
    #: other random draws.
    paper: Settings
    #: Settings that the scales ``smoke`` (under 20 seconds) and ``laptop`` (under 10 minutes on 2
    #: cores) change.
    changes: Mapping[Literal["smoke", "laptop"], Settings]
    #: Function that measures the outcome for settings.
    measure: Callable[[ResultCache, Settings], Outcome]
    #: Function that draws the outcome like the paper's figure, only with matplotlib's object
    #: interface.
    draw: Draw
    #: Names of the data sets that the experiment needs, as in ``fedclade ls datasets``.
    data: tuple[str, ...] = ()
    #: Folder of pieces shared with other experiments, see :meth:`ResultCache.within`; empty for a
    #: separate folder.
    pieces: str = ""
    #: Names of the data sets that the scale ``smoke`` needs; None for the same ones.
    smoke_data: tuple[str, ...] | None = None
    #: Cells or tasks for which the paper prints or draws a result. Names of our rows begin with the
    #: cell's name.
    cells: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for scale, changes in self.changes.items():
            if odd := sorted(set(changes) - set(self.paper)):
                raise ConfigError(
                    f"{self.name}: the scale {scale!r} changes {odd}, which the paper's settings "
                    "have not; add them there"
                )

    def needs(self, scale: Scale) -> tuple[str, ...]:
        """Return the data sets that a scale needs."""
        return self.smoke_data if scale == "smoke" and self.smoke_data is not None else self.data

    def settings(self, scale: Scale, changed: Settings | None = None) -> Settings:
        """Return the settings of a scale, with further changes.

        Raises
        ------
        ConfigError
            If a key of ``changed`` is not a setting, or its value is of another kind.
        """
        for key, value in (changed or {}).items():
            if key not in self.paper:
                raise ConfigError(unknown(f"setting of {self.name}", key, self.paper))
            if not _is_alike(value, usual := self.paper[key]):
                raise ConfigError(f"{self.name}: {key} should be like {usual!r}, got {value!r}")
        return {
            **self.paper,
            **({} if scale == "paper" else self.changes[scale]),
            **(changed or {}),
        }

    def differences(self, settings: Settings) -> Mapping[str, tuple[Any, Any]]:
        """Return the settings that differ from the paper's, as the paper's value and ours."""
        return {
            key: (value, settings[key])
            for key, value in self.paper.items()
            if settings[key] != value
        }


def _is_alike(value: object, usual: object) -> bool:
    """Return whether a value is of the same kind as a setting; an integer may replace a float."""
    if isinstance(usual, list) and isinstance(value, list):
        return not usual or all(_is_alike(each, usual[0]) for each in value)
    numbers = (int, float)
    if isinstance(usual, float) or (isinstance(usual, int) and not isinstance(usual, bool)):
        return isinstance(value, int if isinstance(usual, int) else numbers) and not isinstance(
            value, bool
        )
    return usual is None or isinstance(value, type(usual))


@dataclass(frozen=True)
class Paper:
    """Statements of a paper on an experiment, and remarks on it."""

    #: The paper's result, in a sentence.
    shows: str = ""
    #: Reasons why our result may differ.
    because: str = ""
    #: Remarks for the reader.
    remarks: Sequence[str] = ()
    #: The paper's claims by key, with fields in braces.
    claims: Mapping[str, str] = field(default_factory=dict[str, str])
    #: The figures that the paper prints, by row.
    numbers: Mapping[str, Any] = field(default_factory=dict[str, Any])
    #: Other sentences by key.
    texts: Mapping[str, str] = field(default_factory=dict[str, str])

    def claim(
        self, key: str, holds: object, measured: str, as_large: bool | None = None, **named: object
    ) -> Claim:
        """Return one of the claims with its result; ``holds`` is None if it was not tested."""
        return Claim(
            self.claims[key].format(**named),
            None if holds is None else bool(holds),
            measured,
            as_large,
        )

    def outcome(
        self,
        rows: Sequence[Row],
        claims: Sequence[Claim],
        series: Mapping[str, Any],
        found: str,
        *,
        because: str | None = None,
        remarks: Sequence[str] = (),
        tested: bool = True,
    ) -> Outcome:
        """Return an outcome with the paper's summary and remarks.

        Parameters
        ----------
        rows, claims, series
            Fields of the outcome.
        found
            Our result, in a sentence.
        because
            Reasons for a difference. None: those of the paper.
        remarks
            Further remarks, after those of the paper.
        tested
            Whether the scale is large enough to test claims.
        """
        summary = Summary(self.shows, found, self.because if because is None else because)
        claims = claims if tested else [replace(claim, holds=None) for claim in claims]
        return Outcome(tuple(rows), tuple(claims), series, (*self.remarks, *remarks), summary)


Measure = Callable[[Paper, ResultCache, Settings], Outcome]


def read_tables(file: Path) -> dict[str, Any]:
    """Return the tables of a TOML file.

    ``use`` names tables of ``[shared]`` whose entries are inserted first, and "–" stands for None.
    """
    tables = tomllib.loads(file.read_text(encoding="utf-8"))

    def resolved(value: Any) -> Any:
        if isinstance(value, list):
            return [resolved(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(value, dict):
            return None if value == NONE else value
        table: dict[str, Any] = {}
        for name in value.get("use", ()):
            table |= resolved(tables["shared"][name])
        return table | {key: resolved(each) for key, each in value.items() if key != "use"}

    return resolved(tables)


def _cells_of(paper: Paper, settings: Settings) -> tuple[str, ...]:
    """Return the cells of the paper's table, the panels of its figure, or its tasks."""
    printed: Mapping[str, Sequence[float | None]] = paper.numbers.get("cells", {})
    if printed:
        return tuple(
            cell for cell, figures in printed.items() if any(value is not None for value in figures)
        )
    panels = settings.get("figures", settings.get("tasks", ()))
    return tuple(panels)


def experiments_of(
    tables: Mapping[str, Any], functions: Mapping[str, tuple[Measure, Draw]]
) -> tuple[Experiment, ...]:
    """Return the experiments of :func:`read_tables`, each with its functions."""
    found: list[Experiment] = []
    for name, (measure, draw) in functions.items():
        table = tables[name]
        said = Paper(
            **{each.name: table[each.name] for each in fields(Paper) if each.name in table}
        )
        smoke_data = table.get("smoke_data")
        found.append(
            Experiment(
                name=name,
                source=f"{tables['authors']}, {table['place']}",
                title=table["title"],
                paper=table["settings"],
                changes={"smoke": table["smoke"], "laptop": table["laptop"]},
                measure=partial(measure, said),
                draw=draw,
                data=tuple(table.get("data", ())),
                pieces=table.get("pieces", ""),
                smoke_data=None if smoke_data is None else tuple(smoke_data),
                cells=_cells_of(said, table["settings"]),
            )
        )
    return tuple(found)
