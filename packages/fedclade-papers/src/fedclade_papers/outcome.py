"""Outcome of an experiment: numbers and claims of the paper next to our measurements.

A *row* compares one number of the paper with ours. A *claim* is a statement of the paper in words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

from fedclade.tasks import mean_and_interval

Wanted = Literal["near", "at least", "at most"]

FEWEST_SEEDS = 3
"""Smallest number of seeds from which their spread is estimated."""

NONE = "–"
"""Placeholder for a missing figure, in tables and in ``experiments.toml``."""

AS_SEEDS_DIFFER = ", as seeds differ"
"""Suffix of a verdict if the paper's number could be the result of one more seed of ours."""


@dataclass(frozen=True)
class Row:
    """One number of a paper, and the number that we measured for the same quantity."""

    #: The measured quantity: ``"MNIST, C = 0.1 · FL+HC"``.
    what: str
    #: The paper's figure; None if it has none.
    paper: float | None
    #: Our figure: the mean over the seeds.
    ours: float
    #: Unit of both figures: ``"%"`` (0 to 100), ``"rounds"``, ...
    unit: str = "%"
    #: Our figure for each seed.
    seeds: tuple[float, ...] = ()
    #: The side of the paper's figure on which ours is at least as good.
    wanted: Wanted = "near"
    #: Largest difference that counts as none.
    within: float = 1.0
    #: The paper's wording if it prints no number: ``"≈ 1"``.
    told: str = ""
    #: Whether the quantity is not one of the paper's, even if it is compared with one of its
    #: figures. Such rows, and rows without a figure of the paper, are listed separately and have no
    #: verdict.
    own: bool = False
    #: The earlier row with the same run, since a run counts only once. Empty if there is no such
    #: row.
    repeats: str = ""

    @classmethod
    def of(
        cls, what: str, paper: float | None, seeds: Iterable[float], unit: str = "%", **more: Any
    ) -> Row:
        """Return a row whose number is the mean over the seeds.

        Parameters
        ----------
        what
            Name of the measured quantity.
        paper
            The paper's number. None: the paper has none.
        seeds
            Our number for each seed.
        unit
            Unit of all numbers.
        **more
            Further fields of the row.
        """
        values = tuple(float(value) for value in seeds)
        return cls(what, paper, ours=fmean(values), unit=unit, seeds=values, **more)

    @property
    def is_of_paper(self) -> bool:
        """Whether the paper has a number for the quantity of this row."""
        return self.paper is not None and not self.own

    @property
    def counts(self) -> bool:
        """Whether the row is included when the verdicts of an experiment are counted.

        This is the case if the paper has a number for the quantity, and if no earlier row shows the
        same run.
        """
        return self.is_of_paper and not self.repeats

    @property
    def verdict(self) -> str:
        """Comparison with the paper: ``reached``, ``exceeded``, ``short by X``, or ``off by X``.

        The verdict is ``reached`` if the difference is at most :attr:`within`. Otherwise it is
        ``exceeded`` if our number is better, ``short by X`` if our number is worse, and ``off by
        X`` if neither direction is better (``wanted = "near"``). The last two have the suffix
        ``, as seeds differ`` if the paper's number could be the result of one more seed. A row that
        shows the run of an earlier row names the earlier row. The verdict is empty if the paper has
        no number for the quantity.
        """
        if self.paper is None or self.own:
            return ""
        if self.repeats:
            return f"the run of {self.repeats}"
        difference = self.ours - self.paper
        if abs(difference) <= self.within:
            return "reached"
        # One more seed of ours would lie this far from the mean, with 95 % (Student's t).
        if len(self.seeds) >= FEWEST_SEEDS:
            half = mean_and_interval(self.seeds)[1]
        else:
            half = None
        as_far = half is not None and abs(difference) <= half * math.sqrt(len(self.seeds) + 1)
        spread = AS_SEEDS_DIFFER if as_far else ""
        if self.wanted == "near":
            return f"off by {difference:+.3g}{spread}"
        better = (difference > 0) == (self.wanted == "at least")
        if better:
            return "exceeded"
        return f"short by {abs(difference):.3g}{spread}"


@dataclass(frozen=True)
class Claim:
    """A statement of a paper in words, and whether our measurements confirm the statement."""

    #: The statement in short, with its place: ``"FL stagnates near 20 % (section VI-B)"``.
    text: str
    #: Whether it was seen; None if the scale is too small to decide.
    holds: bool | None
    #: The measurement, in words and numbers.
    measured: str
    #: Whether the effect is as large or as steady as the text states, see :func:`within_printed`;
    #: None if the text states no size.
    as_large: bool | None = None
    #: Whether the statement is ours and not the paper's; such claims are listed separately.
    own: bool = False

    @property
    def seen(self) -> str:
        """Whether the claim was observed: ``yes``, ``direction only``, ``no``, or ``not tested``.

        ``direction only`` means that the effect has the stated direction, but not the stated size.
        """
        if self.holds is None:
            return "not tested"
        if not self.holds:
            return "no"
        return "direction only" if self.as_large is False else "yes"


def within_printed(values: Iterable[float], low: float, high: float | None = None) -> bool:
    """Return whether all values agree with a number or a range that the paper prints.

    The values are rounded to the number of decimals that the paper prints. ``high`` is the upper
    end of the range. None: ``low`` is a single number.

    >>> within_printed([1.26, 1.94], 1.3, 1.9), within_printed([0.97], 1.2, 2.1)
    (True, False)
    >>> within_printed([14.4], 14)
    True
    """
    if high is None:
        high = low
    digits = max(_count_decimals(low), _count_decimals(high))
    return all(low <= round(value, digits) <= high for value in values)


def _count_decimals(number: float) -> int:
    """Return the number of decimals with which a number is printed: 1 for 4.0, 0 for 36."""
    return len(str(number).partition(".")[2])


@dataclass(frozen=True)
class Summary:
    """Summary of an experiment in sentences: the paper's result, our result, and reasons."""

    #: The paper's result.
    shows: str = ""
    #: Our result, with its numbers.
    found: str = ""
    #: Known reasons for a difference: scale, data, settings that the paper omits, or disagreement.
    because: str = ""


@dataclass(frozen=True)
class Outcome:
    """Complete outcome of an experiment: rows, claims, data of the figure, remarks and summary."""

    rows: tuple[Row, ...] = ()
    claims: tuple[Claim, ...] = ()
    #: Data of the figure, in JSON's types: lists and mappings of numbers and strings, a few
    #: kilobytes.
    series: Mapping[str, Any] = field(default_factory=dict[str, Any])
    #: Departures from the paper, and further observations.
    remarks: tuple[str, ...] = ()
    summary: Summary = Summary()

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Outcome:
        """Return an outcome from its JSON form, which :func:`dataclasses.asdict` produces."""
        return cls(
            rows=tuple(Row(**(row | {"seeds": tuple(row["seeds"])})) for row in found["rows"]),
            claims=tuple(Claim(**claim) for claim in found["claims"]),
            series=found["series"],
            remarks=tuple(found["remarks"]),
            summary=Summary(**found["summary"]),
        )
