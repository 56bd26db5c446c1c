"""Experiments of papers: settings, the paper's statements, and functions that measure and draw.

An experiment is a table, a figure or a statement of a paper that can be measured again.
"""

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
    """A table or figure of a paper, with its settings and functions to measure and draw it again.

    Raises
    ------
    ConfigError
        If a scale changes a setting that is not among the paper's settings.
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
    #: Settings that the scales ``smoke`` (under 20 seconds) and ``laptop`` (10 seconds to 1.5 hours on 2
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
                    f"experiment {self.name}: the scale {scale!r} changes {odd}, which are not "
                    "among the paper's settings; add them to the paper's settings"
                )

    def needs(self, scale: Scale) -> tuple[str, ...]:
        """Return the names of the data sets that the experiment needs at a scale."""
        if scale == "smoke" and self.smoke_data is not None:
            return self.smoke_data
        return self.data

    def settings(self, scale: Scale, changed: Settings | None = None) -> Settings:
        """Return the settings of the experiment at a scale, with further changes by the user.

        Raises
        ------
        ConfigError
            If a key of ``changed`` is not a setting of the experiment, or if its value is not of
            the same kind as the paper's value, such as a string in place of a number.
        """
        for key, value in (changed or {}).items():
            if key not in self.paper:
                raise ConfigError(unknown(f"setting of {self.name}", key, self.paper))
            if not _is_alike(value, usual := self.paper[key]):
                raise ConfigError(
                    f"experiment {self.name}: the setting {key} should be a value like {usual!r}, "
                    f"got {value!r}"
                )
        settings = dict(self.paper)
        if scale != "paper":
            settings |= self.changes[scale]
        return settings | dict(changed or {})

    def differences(self, settings: Settings) -> Mapping[str, tuple[Any, Any]]:
        """Return the settings that differ from the paper, by name: the paper's value and ours."""
        return {
            key: (value, settings[key])
            for key, value in self.paper.items()
            if settings[key] != value
        }


def _is_alike(value: object, usual: object) -> bool:
    """Return whether a new value of a setting is of the same kind as the usual value.

    An integer may replace a float. Lists are compared by their entries.
    """
    if isinstance(usual, list) and isinstance(value, list):
        return not usual or all(_is_alike(each, usual[0]) for each in value)
    if usual is None:
        return True
    # Python's truth values are integers, too, but must not replace numbers.
    if isinstance(usual, bool) or isinstance(value, bool):
        return isinstance(usual, bool) and isinstance(value, bool)
    if isinstance(usual, float):
        return isinstance(value, int | float)
    return isinstance(value, type(usual))


@dataclass(frozen=True)
class Paper:
    """Statements of a paper on one experiment: claims, numbers and remarks."""

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
        """Return one of the paper's claims together with the result of our measurement.

        Parameters
        ----------
        key
            Key of the claim in :attr:`claims`.
        holds
            Whether the claim was observed. None: the claim was not tested.
        measured
            Our measurement, in words and numbers.
        as_large
            Whether the effect is as large as the claim states. None: the claim states no size.
        **named
            Values for the fields in braces of the claim's text.
        """
        return Claim(
            text=self.claims[key].format(**named),
            holds=None if holds is None else bool(holds),
            measured=measured,
            as_large=as_large,
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
        """Return the outcome of an experiment, with the paper's summary and remarks.

        Parameters
        ----------
        rows, claims, series
            Fields of the outcome.
        found
            Our result, in a sentence.
        because
            Reasons for a difference from the paper. None: the reasons in :attr:`because`.
        remarks
            Further remarks, which follow the remarks in :attr:`remarks`.
        tested
            Whether the scale is large enough to test claims. False: all claims are marked as not
            tested.
        """
        if because is None:
            because = self.because
        summary = Summary(self.shows, found, because)
        if not tested:
            claims = [replace(claim, holds=None) for claim in claims]
        return Outcome(
            rows=tuple(rows),
            claims=tuple(claims),
            series=series,
            remarks=(*self.remarks, *remarks),
            summary=summary,
        )


Measure = Callable[[Paper, ResultCache, Settings], Outcome]


def read_tables(file: Path) -> dict[str, Any]:
    """Read the tables of a TOML file of experiments.

    If a table has the key ``use``, the entries of the named tables of ``[shared]`` are inserted
    first. The value "–" stands for None.
    """
    tables = tomllib.loads(file.read_text(encoding="utf-8"))

    def resolve(value: Any) -> Any:
        if isinstance(value, list):
            return [resolve(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(value, dict):
            return None if value == NONE else value
        table: dict[str, Any] = {}
        for name in value.get("use", ()):
            table |= resolve(tables["shared"][name])
        return table | {key: resolve(each) for key, each in value.items() if key != "use"}

    return resolve(tables)


def _list_cells(paper: Paper, settings: Settings) -> tuple[str, ...]:
    """Return the names of a table's cells, of a figure's panels, or of an experiment's tasks."""
    printed: Mapping[str, Sequence[float | None]] = paper.numbers.get("cells", {})
    if printed:
        return tuple(cell for cell, figures in printed.items() if _is_printed(figures))
    panels = settings.get("figures", settings.get("tasks", ()))
    return tuple(panels)


def _is_printed(figures: Sequence[float | None]) -> bool:
    """Return whether the paper prints at least one number of a cell of its table."""
    return any(figure is not None for figure in figures)


def experiments_of(
    tables: Mapping[str, Any], functions: Mapping[str, tuple[Measure, Draw]]
) -> tuple[Experiment, ...]:
    """Return the experiments that a TOML file describes.

    Parameters
    ----------
    tables
        Tables of the file, from :func:`read_tables`.
    functions
        For each experiment, by name: the function that measures it and the function that draws it.
    """
    found: list[Experiment] = []
    for name, (measure, draw) in functions.items():
        table = tables[name]
        statements = {each.name: table[each.name] for each in fields(Paper) if each.name in table}
        paper = Paper(**statements)
        smoke_data = table.get("smoke_data")
        found.append(
            Experiment(
                name=name,
                source=f"{tables['authors']}, {table['place']}",
                title=table["title"],
                paper=table["settings"],
                changes={"smoke": table["smoke"], "laptop": table["laptop"]},
                measure=partial(measure, paper),
                draw=draw,
                data=tuple(table.get("data", ())),
                pieces=table.get("pieces", ""),
                smoke_data=None if smoke_data is None else tuple(smoke_data),
                cells=_list_cells(paper, table["settings"]),
            )
        )
    return tuple(found)
