"""BibTeX entries of algorithms, data sets, models and more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    "synthetic": ("li2020fedprox", "duan2020fedgroup"),
    "label_swap": ("sattler2021cfl",),
    "label_permutation": ("sattler2021cfl",),
    "pathological": ("mcmahan2017fedavg",),
    "shards": ("mcmahan2017fedavg",),
    "mlp": ("mcmahan2017fedavg",),
    "cnn": ("briggs2020flhc",),
    "cifar_cnn": ("sattler2021cfl",),
}
"""Keys in ``citations.bib`` by name of a data set, partition, shift or model.

The record of a method contains its own keys.
"""


def cite_name(name: str) -> str:
    """Return the BibTeX of an algorithm, data set, partition, shift or model.

    A method's record names its citations. Anything else from an installed package, or by
    ``module:name``, has an attribute ``citation``.

    Raises
    ------
    ConfigError
        If there is no entry of that name.
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
        raise ConfigError(f"{name} has no citation; it should be a string with BibTeX")
    return dedent(citation).strip()


def _load_cited(name: str) -> object:
    """Return an installed package's entry, or the object of ``module:name``."""
    entry_points: dict[str, EntryPoint] = {}
    for kind in KINDS:
        if kind != "commands":  # No result depends on a command.
            entry_points.update(installed(kind))
    if name in entry_points:
        return loaded(entry_points[name], "what to cite,")
    if ":" in name:
        return imported(name, "what to cite,")
    methods = {method.name for method in METHODS if method.citations}
    raise ConfigError(unknown("name to cite", name, {*CITATIONS, *methods, *entry_points}))


def _cite_method(method: Method) -> str:
    """Return the BibTeX of the citations of a method's record."""
    if not method.citations:
        raise ConfigError(f"{method.name} does not say how to cite it: its record has no citations")
    return _read_entries(method.citations)


def _read_entries(citations: Sequence[str]) -> str:
    """Return the BibTeX of citations: entries, or keys in ``citations.bib``."""
    entries = _read_bibliography()
    for citation in citations:
        is_entry = "@" in citation
        if not is_entry and citation not in entries:
            raise ConfigError(
                unknown("key of fedclade's citations", citation, entries) + "; or give BibTeX"
            )
    return "\n\n".join(entries.get(citation) or dedent(citation).strip() for citation in citations)


def _read_bibliography() -> Mapping[str, str]:
    """Return the entries of ``citations.bib`` by their keys."""
    text = files("fedclade.report").joinpath("citations.bib").read_text(encoding="utf-8")
    return {entry.split("{")[1].split(",")[0]: entry for entry in text.strip().split("\n\n")}
