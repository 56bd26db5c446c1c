"""Records of methods: the facts about an algorithm that lists and documentation show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, cast

from fedclade.algorithms.base import Algorithm
from fedclade.algorithms.requires import Requires
from fedclade.core import require, summary_of

Family = Literal["updates", "models", "data", "given", "personal"]
"""Basis on which a method finds clusters, or the reason why it finds none.

``updates``: the method clusters clients by their updates. ``models``: by their models, or by the
losses of models. ``data``: by statistics of their data. ``given``: the method finds no clusters,
since they are known, or there is only one. ``personal``: the method finds no clusters, since every
client has a personal model, or a personal part of the model.
"""


@dataclass(frozen=True)
class Paper:
    """Citation of a paper that describes a method.

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
        """Short form of the citation: authors and year, such as ``Dinh et al. 2020``."""
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
    """Record of a federated method: its name, its class and the facts that lists of methods show.

    The records of fedclade's methods are in :data:`METHODS`. Another package provides its record by
    an entry point in the group ``fedclade.algorithms``, whose name is the method's name.

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
        Group of methods in the documentation, named after the basis on which they find clusters,
        such as ``updates`` or ``data``. None if the method is in no group.
    options
        Hyper-parameters in the shipped scenarios, where they differ from the defaults of the class.
    clusters_as
        Name of the hyper-parameter that scenarios set to their number of clusters; empty if there
        is none.
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
        """Return a record for an algorithm class that comes without a record of its own.

        The citation is the attribute ``citation`` of the class, if it has one.
        """
        citation = getattr(algorithm, "citation", "")
        return cls(name=name, algorithm=algorithm, citations=(citation,) if citation else ())

    @property
    def requires(self) -> Requires:
        """Needs of the method that a run checks, such as access to whole updates.

        If the needs depend on hyper-parameters, the result is for the default hyper-parameters.
        """
        of_class = cast("Requires | property", self.algorithm.requires)
        return of_class if isinstance(of_class, Requires) else self.algorithm().requires

    @property
    def summary(self) -> str:
        """Description of the method in one line, as ``fedclade ls`` prints it.

        If exactly one paper describes the method, the line ends with its short citation.
        """
        line = self.description or summary_of(self.algorithm)
        return f"{line} ({self.papers[0].short})" if len(self.papers) == 1 else line


def _is_tuple_of(kind: type, value: object) -> bool:
    """Return whether a value is a tuple of instances of ``kind``.

    The check for a tuple matters, since a single string is a sequence of strings, too.
    """
    return isinstance(value, tuple) and all(isinstance(each, kind) for each in value)
