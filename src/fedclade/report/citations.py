"""BibTeX entries for what people use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
"""Keys in ``citations.bib`` of data sets, partitions, shifts and models, by name; methods' records have theirs."""


def cite_name(name: str) -> str:
    """Return the BibTeX of an algorithm, data set, partition, shift or model.

    A method's record names its citations. Anything else that is not fedclade's own, from an installed package or by
    ``module:name``, has an attribute ``citation``.

    Raises
    ------
    ConfigError
        If there is no entry of that name.
    """
    if name in CITATIONS:
        return _bibtex(CITATIONS[name])
    if name in ALGORITHMS:
        return _cite_method(ALGORITHMS[name])
    kinds = [kind for kind in KINDS if kind != "commands"]  # which no result depends on
    added = {name: point for kind in kinds for name, point in installed(kind).items()}
    if name not in added and ":" not in name:
        citable = (method.name for method in METHODS if method.citations)
        raise ConfigError(unknown("name to cite", name, {*CITATIONS, *citable, *added}))
    found = loaded(added[name], "what to cite,") if name in added else imported(name, "what to cite,")
    if isinstance(found, Method):
        return _cite_method(found)
    citation = getattr(found, "citation", None)
    if not isinstance(citation, str) or not citation:
        raise ConfigError(f"{name} does not say how to cite it: it has no citation, which would be BibTeX")
    return dedent(citation).strip()


def _cite_method(method: Method) -> str:
    """Return the BibTeX of the citations of a method's record."""
    if not method.citations:
        raise ConfigError(f"{method.name} does not say how to cite it: its record has no citations")
    return _bibtex(method.citations)


def _bibtex(citations: Sequence[str]) -> str:
    """Return the BibTeX of citations: entries, or keys in ``citations.bib``."""
    entries = _own_entries()
    if unknown_keys := [each for each in citations if "@" not in each and each not in entries]:
        raise ConfigError(unknown("key of fedclade's citations", unknown_keys[0], entries) + "; or give BibTeX")
    return "\n\n".join(entries.get(each) or dedent(each).strip() for each in citations)


def _own_entries() -> Mapping[str, str]:
    """Return the entries of ``citations.bib`` by their keys."""
    text = files("fedclade.report").joinpath("citations.bib").read_text(encoding="utf-8")
    return {entry.split("{")[1].split(",")[0]: entry for entry in text.strip().split("\n\n")}
