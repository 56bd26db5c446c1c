"""Records of methods: all that lists and documentation need to know of a method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from fedclade.algorithms.base import Algorithm
from fedclade.core import require, summary_of

Family = Literal["updates", "models", "data", "given", "personal"]
"""Basis on which a method finds clusters: ``updates``, ``models`` or losses, or ``data``.

Other methods find no clusters. Clusters are ``given``, or there is one; or models, or parts of
models, are ``personal``.
"""


@dataclass(frozen=True)
class Paper:
    """The paper that describes a method.

    Parameters
    ----------
    authors
        Family names, in the paper's order.
    year
        Year of the first version.
    title
        Title as printed.

    Raises
    ------
    ConfigError
        If ``authors`` is not a tuple of names, or is empty.
    """

    authors: tuple[str, ...]
    year: int
    title: str

    def __post_init__(self) -> None:
        holds = _is_tuple_of(str, self.authors) and len(self.authors) > 0
        require(("authors of a Paper", self.authors, holds, "a tuple of family names"))

    @property
    def short(self) -> str:
        """Short citation, such as ``Dinh et al. 2020``."""
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

    The records of fedclade's methods are in :data:`METHODS`. A package names its record in an entry
    point ``fedclade.algorithms``, under the method's name.

    Parameters
    ----------
    name
        Name in configs, ``fedclade ls`` and ``fedclade cite``.
    algorithm
        The class: a frozen dataclass whose fields are the hyper-parameters.
    description
        One line about the method. If empty: the ``summary`` of the class, or the first line of its
        docstring.
    papers
        The papers that describe the method. If there is only one, :attr:`summary` names it.
    citations
        Output of ``fedclade cite``: BibTeX entries, or keys of fedclade's own entries, such as
        ``fedclade``.
    family
        Basis on which the method finds clusters, if documentation groups it by that.
    options
        Hyper-parameters in the shipped scenarios, where they differ from the defaults of the class.
    clusters_as
        Hyper-parameter that a scenario sets to its number of clusters; empty if none.
    scenarios
        Shipped scenarios with this method: folders of ``configs``, or files in them without their
        suffix.
    config
        Name of a shipped config with this method; empty if there is none.
    page
        Documentation of the method: a page of fedclade's ``docs``, or an address.

    Raises
    ------
    ConfigError
        If papers, citations or scenarios are not tuples. The class is checked when the method is
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
        """Return a record made from the attributes of a class that comes without one."""
        citations = (algorithm.citation,) if algorithm.citation else ()
        return cls(name=name, algorithm=algorithm, citations=citations)

    @property
    def summary(self) -> str:
        """Line of ``fedclade ls``: the description, and the paper if there is exactly one."""
        line = self.description or summary_of(self.algorithm)
        return f"{line} ({self.papers[0].short})" if len(self.papers) == 1 else line


def _is_tuple_of(kind: type, value: object) -> bool:
    """Return whether a value is a tuple of instances of ``kind``.

    A single string would otherwise pass as a sequence of its characters.
    """
    return isinstance(value, tuple) and all(isinstance(each, kind) for each in value)
