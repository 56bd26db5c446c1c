"""The record of a method: everything that lists and documentation need to know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from fedclade.algorithms.base import Algorithm
from fedclade.core import require, summary_of

Family = Literal["updates", "models", "data", "given", "personal"]
"""What a method finds clusters by: ``updates``, ``models`` or losses, or ``data``.

The others find none: clusters are ``given``, or there is one; or models, or parts of them, are
``personal``.
"""


@dataclass(frozen=True)
class Paper:
    """The paper that describes a method.

    Parameters
    ----------
    authors
        Family names, in the paper's order.
    year
        Of its first version.
    title
        As it is printed.

    Raises
    ------
    ConfigError
        If the authors are no tuple of names, or there are none.
    """

    authors: tuple[str, ...]
    year: int
    title: str

    def __post_init__(self) -> None:
        holds = _is_tuple_of(str, self.authors) and len(self.authors) > 0
        require(("authors of a Paper", self.authors, holds, "a tuple of family names"))

    @property
    def short(self) -> str:
        """The paper as a text cites it, such as ``Dinh et al. 2020``."""
        first, *others = self.authors
        if not others:
            names = first
        elif len(others) == 1:
            names = f"{first} and {others[0]}"
        else:
            names = f"{first} et al."
        return f"{names} {self.year}"


@dataclass(frozen=True, kw_only=True)
class Method:
    """The record of a method, from which every list of methods is made.

    The methods of fedclade have theirs in :data:`METHODS`. A package names its record in an entry
    point ``fedclade.algorithms``, under the method's name.

    Parameters
    ----------
    name
        As configs, ``fedclade ls`` and ``fedclade cite`` have it.
    algorithm
        The class: a frozen dataclass whose fields are the hyper-parameters.
    description
        A line about it. If empty: the ``summary`` of the class, or the first line of its docstring.
    papers
        Those that describe it. A single one is named in :attr:`summary`.
    citations
        What ``fedclade cite`` prints: BibTeX entries, or keys of fedclade's own, such as
        ``fedclade``.
    family
        What it finds clusters by, if documentation groups methods by that.
    options
        Hyper-parameters of the shipped scenarios, where they differ from the defaults of the class.
    clusters_as
        Hyper-parameter that a scenario sets to the number of clusters that it has; empty if none.
    scenarios
        Shipped scenarios with this method: folders of ``configs``, or files of them without their
        ending.
    config
        Name of a shipped config with this method; empty if there is none.
    page
        Its documentation: a page of fedclade's ``docs``, or an address.

    Raises
    ------
    ConfigError
        If papers, citations or scenarios are no tuples. The class is checked where the method is
        looked up.
    """

    name: str
    algorithm: type[Algorithm]
    description: str = ""
    papers: tuple[Paper, ...] = ()
    citations: tuple[str, ...] = ()
    family: Family | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    clusters_as: str = ""
    scenarios: tuple[str, ...] = ()
    config: str = ""
    page: str = ""

    def __post_init__(self) -> None:
        require(
            (
                "papers of a Method",
                self.papers,
                _is_tuple_of(Paper, self.papers),
                "a tuple of Paper",
            ),
            (
                "citations of a Method",
                self.citations,
                _is_tuple_of(str, self.citations),
                "a tuple of texts",
            ),
            (
                "scenarios of a Method",
                self.scenarios,
                _is_tuple_of(str, self.scenarios),
                "a tuple of names",
            ),
        )

    @classmethod
    def of_class(cls, name: str, algorithm: type[Algorithm]) -> Self:
        """Return the record of a class that comes without one: what its attributes say."""
        citations = (algorithm.citation,) if algorithm.citation else ()
        return cls(name=name, algorithm=algorithm, citations=citations)

    @property
    def summary(self) -> str:
        """The line of ``fedclade ls``: the description, and the paper."""
        line = self.description or summary_of(self.algorithm)
        return f"{line} ({self.papers[0].short})" if len(self.papers) == 1 else line


def _is_tuple_of(kind: type, value: object) -> bool:
    """Return whether a value is a tuple of such things, rather than a single one, whose parts would be taken."""
    return isinstance(value, tuple) and all(isinstance(each, kind) for each in value)
