"""What an experiment of a paper came to: the paper's figures beside ours, its claims, and what is drawn of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Wanted = Literal["near", "at least", "at most"]


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
    """

    what: str
    paper: float | None
    ours: float
    unit: str = "%"
    seeds: tuple[float, ...] = ()
    wanted: Wanted = "near"
    within: float = 1.0

    @property
    def verdict(self) -> str:
        """Return ``reached``, ``exceeded``, ``short by X`` or, where either side may be wrong, ``off by X``."""
        if self.paper is None:
            return ""
        difference = self.ours - self.paper
        if abs(difference) <= self.within:
            return "reached"
        if self.wanted == "near":
            return f"off by {difference:+.3g}"
        better = (difference > 0) == (self.wanted == "at least")
        return "exceeded" if better else f"short by {abs(difference):.3g}"


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
    """

    text: str
    holds: bool | None
    measured: str


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
    """

    rows: tuple[Row, ...] = ()
    claims: tuple[Claim, ...] = ()
    series: Mapping[str, Any] = field(default_factory=dict[str, Any])
    remarks: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Outcome:
        """Return what :func:`dataclasses.asdict` made JSON of."""
        return cls(
            rows=tuple(_row(row) for row in found["rows"]),
            claims=tuple(Claim(**claim) for claim in found["claims"]),
            series=found["series"],
            remarks=tuple(found["remarks"]),
        )


def _row(found: dict[str, Any]) -> Row:
    found["seeds"] = tuple(found["seeds"])
    return Row(**found)
