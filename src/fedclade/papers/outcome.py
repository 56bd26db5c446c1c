"""What an experiment of a paper came to: the paper's figures beside ours, its claims, and what is drawn of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fedclade.tasks import mean_and_interval

Wanted = Literal["near", "at least", "at most"]

FEWEST_SEEDS = 3
"""Fewer tell too little of how much seeds differ."""

AS_SEEDS_DIFFER = ", as seeds differ"
"""Of a figure of the paper, from one run, that could as well be one of ours."""


@dataclass(frozen=True)
class Row:
    """One figure of a paper, and ours.

    Parameters
    ----------
    what
        What is measured: ``"MNIST, C = 0.1 · FL+HC"``.
    paper
        The paper's figure; None where it shows none.
    ours
        The mean over the seeds.
    unit
        Of both: ``"%"`` (0 to 100), ``"rounds"``, ...
    seeds
        Ours, seed by seed.
    wanted
        Which side of the paper's figure is as good or better.
    within
        What difference does not count.
    told
        How the paper puts its figure, where it prints none: ``"≈ 1"``.
    """

    what: str
    paper: float | None
    ours: float
    unit: str = "%"
    seeds: tuple[float, ...] = ()
    wanted: Wanted = "near"
    within: float = 1.0
    told: str = ""

    @property
    def verdict(self) -> str:
        """Return ``reached``, ``exceeded``, ``short by X`` or, where either side may be wrong, ``off by X``.

        The last two with ``, as seeds differ`` if the seeds spread as far.
        """
        if self.paper is None:
            return ""
        difference = self.ours - self.paper
        if abs(difference) <= self.within:
            return "reached"
        if self.wanted == "near":
            return f"off by {difference:+.3g}{self._spread}"
        better = (difference > 0) == (self.wanted == "at least")
        return "exceeded" if better else f"short by {abs(difference):.3g}{self._spread}"

    @property
    def _spread(self) -> str:
        """Tell if the paper's figure lies where one more seed of ours would, with 95 % (Student's t)."""
        half = mean_and_interval(self.seeds)[1] if len(self.seeds) >= FEWEST_SEEDS else None
        assert self.paper is not None
        as_far = half is not None and abs(self.ours - self.paper) <= half * math.sqrt(len(self.seeds) + 1)
        return AS_SEEDS_DIFFER if as_far else ""


@dataclass(frozen=True)
class Claim:
    """Something that a paper says, and whether it was seen.

    Parameters
    ----------
    text
        In short, with its place: ``"FL stagnates near 20 % (section VI-B)"``.
    holds
        Whether it was seen; None where the scale is too small to tell.
    measured
        What was measured, in words and numbers.
    as_large
        Where the text says how much: whether it was seen to be so much, by :func:`as_told`; None where it does not.
    """

    text: str
    holds: bool | None
    measured: str
    as_large: bool | None = None

    @property
    def seen(self) -> str:
        """Say whether it was seen: ``yes``, ``direction only``, ``no``, or ``not tested``."""
        if self.holds is None:
            return "not tested"
        if not self.holds:
            return "no"
        return "direction only" if self.as_large is False else "yes"


TOLERANCE = 0.2
"""How far from a magnitude that a paper tells ours may be, as a share of it, to be as large."""


def as_told(values: Iterable[float], low: float, high: float | None = None) -> bool:
    """Tell whether all of ours lie within a fifth of the magnitude that a paper tells, or of the ends of its range.

    >>> as_told([1.1, 2.2], 1.3, 1.9), as_told([5.5], 1.3, 1.9), as_told([3.5], 4.0)
    (True, False, True)
    """
    high = low if high is None else high
    return all(low - TOLERANCE * abs(low) <= value <= high + TOLERANCE * abs(high) for value in values)


@dataclass(frozen=True)
class Summary:
    """What an experiment comes to, for those who read no tables.

    Parameters
    ----------
    shows
        What the paper shows, in a sentence.
    found
        What was measured here, in a sentence with its numbers.
    because
        Where the two differ, why, as far as it is known: scale, data, settings that the paper does not tell, or
        disagreement. Empty where they do not.
    """

    shows: str = ""
    found: str = ""
    because: str = ""


def untold(claims: Iterable[Claim]) -> tuple[Claim, ...]:
    """Return claims that the scale is too small to tell, with what was measured all the same."""
    return tuple(replace(claim, holds=None) for claim in claims)


@dataclass(frozen=True)
class Outcome:
    """All that an experiment came to.

    Parameters
    ----------
    rows, claims
        See there.
    series
        What the picture shows, as JSON has it: lists and mappings of numbers and strings, a few kilobytes.
    remarks
        What a reader should know: what departs from the paper, and what was found out on the way.
    summary
        What it comes to.
    """

    rows: tuple[Row, ...] = ()
    claims: tuple[Claim, ...] = ()
    series: Mapping[str, Any] = field(default_factory=dict[str, Any])
    remarks: tuple[str, ...] = ()
    summary: Summary = Summary()

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Outcome:
        """Return what :func:`dataclasses.asdict` made JSON of."""
        return cls(
            rows=tuple(_row(row) for row in found["rows"]),
            claims=tuple(Claim(**claim) for claim in found["claims"]),
            series=found["series"],
            remarks=tuple(found["remarks"]),
            summary=Summary(**found["summary"]),
        )


def _row(found: dict[str, Any]) -> Row:
    found["seeds"] = tuple(found["seeds"])
    return Row(**found)
