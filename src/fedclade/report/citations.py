"""BibTeX entries for algorithms, data sets, partitions, shifts, models and installed plug-ins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint
from importlib.resources import files
from textwrap import dedent

from fedclade.algorithms import ALGORITHMS, METHODS, Method
from fedclade.core import KINDS, ConfigError, imported, installed, loaded, unknown

CITATIONS: Mapping[str, Sequence[str]] = {
    "fedclade": ("fedclade",),
    "fedprox": ("li2020fedprox",),
    "digits": ("alpaydin1998digits",),
    "mnist": ("lecun1998mnist",),
    "cifar10": ("krizhevsky2009cifar",),
    "ag_news": ("zhang2015agnews",),
    "tiny_shakespeare": ("karpathy2015charrnn",),
    "femnist": ("caldas2018leaf",),
    "sent140": ("go2009sent140", "caldas2018leaf"),
    "heart": ("janosi1989heart",),
    "student": ("cortez2008student",),
    "tcga_brca": ("duterrail2022flamby",),
    "exam": ("goldstein1993exam",),
    "parkinsons": ("tsanas2010parkinsons",),
    "landmine": ("xue2007landmine",),
    "wisdm": ("kwapisz2011wisdm",),
    "synthetic": ("li2020fedprox", "duan2020fedgroup"),
    "label_swap": ("sattler2021cfl",),
    "label_permutation": ("sattler2021cfl",),
    "pathological": ("mcmahan2017fedavg",),
    "shards": ("mcmahan2017fedavg",),
    "dirichlet": ("yurochkin2019bayesian",),
    "power_law": ("li2020fedprox",),
    "rotation": ("ghosh2020ifca",),
    "anda": ("fenoglio2025flux",),
    "mlp": ("mcmahan2017fedavg",),
    "cnn": ("briggs2020flhc",),
    "lenet": ("lecun1998mnist",),
    "cifar_cnn": ("sattler2021cfl",),
}
"""Keys of BibTeX entries in ``citations.bib``, by name of a data set, partition, shift or model.

Algorithms are not listed here: the record of an algorithm (``Method.citations``) contains its keys.
"""


def cite_name(name: str) -> str:
    """Return the BibTeX entries of an algorithm, data set, partition, shift or model.

    Entries of fedclade's own data sets, partitions, shifts and models are listed in
    :data:`CITATIONS`. The record of an algorithm names its entries (``Method.citations``). Any
    other component, from an installed package or with an import path ``module:name``, has its
    entries in its attribute ``citation``.

    Parameters
    ----------
    name
        Name of a built-in or installed component, or an import path ``module:name``.

    Raises
    ------
    ConfigError
        If no component has this name, the component cannot be imported, or it has no citation.
    """
    if name in CITATIONS:
        return _read_entries(CITATIONS[name])
    if name in ALGORITHMS:
        return _cite_method(ALGORITHMS[name])
    cited = _load_cited(name)
    if isinstance(cited, Method):
        return _cite_method(cited)
    citation = getattr(cited, "citation", None)
    if not isinstance(citation, str) or not citation:
        raise ConfigError(
            f"the attribute citation of {name} should be a string with BibTeX entries, but it is "
            "missing, empty or not a string"
        )
    return dedent(citation).strip()


def known_citations() -> set[str]:
    """Return all names that :func:`cite_name` knows, without names with an import path."""
    names = {*CITATIONS, *ALGORITHMS}
    for kind in KINDS:
        if kind != "commands":
            names.update(installed(kind))
    return names


def _load_cited(name: str) -> object:
    """Load a component by name from an installed package, or by an import path ``module:name``."""
    entry_points: dict[str, EntryPoint] = {}
    for kind in KINDS:
        if kind != "commands":  # Results do not depend on commands, so commands are not cited.
            entry_points.update(installed(kind))
    if name in entry_points:
        return loaded(entry_points[name], "cited component")
    if ":" in name:
        return imported(name, "cited component")
    methods = {method.name for method in METHODS if method.citations}
    raise ConfigError(
        unknown(
            "algorithm, data set or other component", name, {*CITATIONS, *methods, *entry_points}
        )
    )


def _cite_method(method: Method) -> str:
    """Return the BibTeX entries that an algorithm's record names in its field ``citations``."""
    if not method.citations:
        raise ConfigError(
            f"the record of algorithm {method.name} should name its citations, but its field "
            "citations is empty"
        )
    return _read_entries(method.citations)


def _read_entries(citations: Sequence[str]) -> str:
    """Return the BibTeX entries of citations, joined by empty lines.

    Each citation is either a BibTeX entry itself (it contains ``@``) or a key in ``citations.bib``.
    """
    return "\n\n".join(read_entry(citation) for citation in citations)


def read_entry(citation: str) -> str:
    """Return the BibTeX entry of a citation: a key in ``citations.bib``, or an entry itself."""
    entries = _read_bibliography()
    if citation in entries:
        return entries[citation]
    if "@" not in citation:
        raise ConfigError(
            unknown("BibTeX key", citation, entries)
            + "; a citation should be a key in fedclade's citations.bib or a BibTeX entry"
        )
    return dedent(citation).strip()


@cache
def _read_bibliography() -> Mapping[str, str]:
    """Return the BibTeX entries of the file ``citations.bib`` by their keys."""
    text = files("fedclade.report").joinpath("citations.bib").read_text(encoding="utf-8")
    return {entry.split("{")[1].split(",")[0]: entry for entry in text.strip().split("\n\n")}
