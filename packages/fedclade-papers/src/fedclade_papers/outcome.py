"""What an experiment of a paper came to: the paper's figures beside ours, its claims, and what is drawn of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

from fedclade.tasks import mean_and_interval

Wanted = Literal["near", "at least", "at most"]

FEWEST_SEEDS = 3
"""Fewer seeds say too little about how much they differ."""

NONE = "–"
"""Stands where there is no figure, in tables and in ``experiments.toml``."""

AS_SEEDS_DIFFER = ", as seeds differ"
"""Of a figure of the paper, from one run, that could as well be one of ours."""


@dataclass(frozen=True)
class Row:
    """One figure of a paper, and ours."""

    #: What is measured: ``"MNIST, C = 0.1 · FL+HC"``.
    what: str
    #: The paper's figure; None where it shows none.
    paper: float | None
    #: The mean over the seeds.
    ours: float
    #: Of both: ``"%"`` (0 to 100), ``"rounds"``, ...
    unit: str = "%"
    #: Ours, seed by seed.
    seeds: tuple[float, ...] = ()
    #: Which side of the paper's figure is as good or better.
    wanted: Wanted = "near"
    #: What difference does not count.
    within: float = 1.0
    #: How the paper puts its figure, where it prints none: ``"≈ 1"``.
    told: str = ""
    #: Whether it is a quantity of ours, whatever figure of the paper it is beside: it is below a line of its own, and
    #: has no verdict. So are rows without a figure of the paper.
    own: bool = False
    #: The row whose run this row shows again: a run counts once. Empty for a run that no earlier row shows.
    repeats: str = ""

    @classmethod
    def of(
        cls, what: str, paper: float | None, seeds: Iterable[float], unit: str = "%", **more: Any
    ) -> Row:
        """Return the row of our values, seed by seed."""
        values = tuple(float(value) for value in seeds)
        return cls(what, paper, fmean(values), unit, values, **more)

    @property
    def is_of_paper(self) -> bool:
        """Whether the paper has this quantity, with a figure to compare ours with."""
        return self.paper is not None and not self.own

    @property
    def counts(self) -> bool:
        """Whether the row counts where reached rows are counted: as a quantity of the paper, from a run of its own."""
        return self.is_of_paper and not self.repeats

    @property
    def verdict(self) -> str:
        """Return ``reached``, ``exceeded``, ``short by X`` or, where either side may be wrong, ``off by X``.

        The last two with ``, as seeds differ`` if the seeds spread as far. Empty for a quantity of
        ours.
        """
        if self.paper is None or self.own:
            return ""
        if self.repeats:
            return f"the run of {self.repeats}"
        difference = self.ours - self.paper
        if abs(difference) <= self.within:
            return "reached"
        # One more seed of ours would lie this far from the mean, with 95 % (Student's t).
        half = mean_and_interval(self.seeds)[1] if len(self.seeds) >= FEWEST_SEEDS else None
        as_far = half is not None and abs(difference) <= half * math.sqrt(len(self.seeds) + 1)
        spread = AS_SEEDS_DIFFER if as_far else ""
        if self.wanted == "near":
            return f"off by {difference:+.3g}{spread}"
        better = (difference > 0) == (self.wanted == "at least")
        return "exceeded" if better else f"short by {abs(difference):.3g}{spread}"


@dataclass(frozen=True)
class Claim:
    """Something that a paper says, and whether it was seen."""

    #: In short, with its place: ``"FL stagnates near 20 % (section VI-B)"``.
    text: str
    #: Whether it was seen; None where the scale is too small to tell.
    holds: bool | None
    #: What was measured, in words and numbers.
    measured: str
    #: Where the text says how much, or how steadily: whether that was seen as well, see :func:`within_printed`; None
    #: where it does not.
    as_large: bool | None = None
    #: Whether it is a sentence of ours, which the paper does not have: it is below a line of its own.
    own: bool = False

    @property
    def seen(self) -> str:
        """Say whether it was seen: ``yes``, ``direction only``, ``no``, or ``not tested``."""
        if self.holds is None:
            return "not tested"
        if not self.holds:
            return "no"
        return "direction only" if self.as_large is False else "yes"


def within_printed(values: Iterable[float], low: float, high: float | None = None) -> bool:
    """Return whether all values, rounded as the paper prints, are the figure that it states, or in its range.

    >>> within_printed([1.26, 1.94], 1.3, 1.9), within_printed([0.97], 1.2, 2.1), within_printed([14.4], 14)
    (True, False, True)
    """
    high = low if high is None else high
    digits = max(_decimals(low), _decimals(high))
    return all(low <= round(value, digits) <= high for value in values)


def _decimals(number: float) -> int:
    """Return how many decimals a figure is printed with: 1 of 4.0, none of 36."""
    return len(str(number).partition(".")[2])


@dataclass(frozen=True)
class Summary:
    """What an experiment comes to, in sentences."""

    #: What the paper shows.
    shows: str = ""
    #: What was measured here, with its numbers.
    found: str = ""
    #: Why the two differ, as far as it is known: scale, data, settings that the paper leaves out, or disagreement.
    because: str = ""


@dataclass(frozen=True)
class Outcome:
    """All that an experiment came to."""

    rows: tuple[Row, ...] = ()
    claims: tuple[Claim, ...] = ()
    #: What the figure shows, as JSON has it: lists and mappings of numbers and strings, a few kilobytes.
    series: Mapping[str, Any] = field(default_factory=dict[str, Any])
    #: What departs from the paper, and what was found out on the way.
    remarks: tuple[str, ...] = ()
    summary: Summary = Summary()

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Outcome:
        """Return what :func:`dataclasses.asdict` made JSON of."""
        return cls(
            rows=tuple(Row(**(row | {"seeds": tuple(row["seeds"])})) for row in found["rows"]),
            claims=tuple(Claim(**claim) for claim in found["claims"]),
            series=found["series"],
            remarks=tuple(found["remarks"]),
            summary=Summary(**found["summary"]),
        )
