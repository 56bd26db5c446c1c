"""BibTeX entries of algorithms, data sets, models and more."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint
from importlib.resources import files
from textwrap import dedent

from fedclade.core import KINDS, ConfigError, imported, installed, loaded, unknown

CITED: Mapping[str, str] = {
    "fedclade": "fedclade",
    "cfl": "sattler2021cfl",
    "rcfl": "fedclade sattler2021cfl",
    "private_choice": "fedclade",
    "fl_hc": "briggs2020flhc",
    "fedavg": "mcmahan2017fedavg",
    "fedprox": "li2020fedprox",
    "fedgroup": "duan2020fedgroup",
    "flexcfl": "duan2021flexcfl",
    "fedbuff": "nguyen2022fedbuff",
    "finetune": "mcmahan2017fedavg",
    "ifca": "ghosh2020ifca",
    "fedsoft": "ruan2022fedsoft",
    "fesem": "xie2020fesem",
    "feddrift": "jothimurugesan2023feddrift",
    "fedem": "marfoq2021fedem",
    "fedrc": "guo2024fedrc",
    "pacfl": "vahidian2023pacfl",
    "flux": "fenoglio2025flux",
    "stocfl": "zeng2023stocfl",
    "ditto": "li2021ditto",
    "apfl": "deng2020apfl",
    "pfedme": "dinh2020pfedme",
    "per_fedavg": "fallah2020perfedavg",
    "scaffold": "karimireddy2020scaffold",
    "fedper": "arivazhagan2019fedper",
    "fedrep": "collins2021fedrep",
    "lg_fedavg": "liang2020lgfedavg",
    "fedbn": "li2021fedbn",
    "digits": "alpaydin1998digits",
    "mnist": "lecun1998mnist",
    "cifar10": "krizhevsky2009cifar",
    "ag_news": "zhang2015agnews",
    "tiny_shakespeare": "karpathy2015charrnn",
    "femnist": "caldas2018leaf",
    "sent140": "go2009sent140 caldas2018leaf",
    "synthetic": "li2020fedprox duan2020fedgroup",
    "label_swap": "sattler2021cfl",
    "label_permutation": "sattler2021cfl",
    "pathological": "mcmahan2017fedavg",
    "shards": "mcmahan2017fedavg",
    "mlp": "mcmahan2017fedavg",
    "cnn": "briggs2020flhc",
    "cifar_cnn": "sattler2021cfl",
}
"""Keys of the sources in ``citations.bib``, by the name of what is cited."""


def cite_name(name: str) -> str:
    """Return the BibTeX of an algorithm, data set, partition, shift or model.

    Entries of installed packages, and of ``module:name``, are read from their ``citation``.

    Raises
    ------
    ConfigError
        If there is no entry of that name.
    """
    if name not in CITED:
        return _read_citation(name)
    text = files("fedclade.report").joinpath("citations.bib").read_text(encoding="utf-8")
    entries = {entry.split("{")[1].split(",")[0]: entry for entry in text.strip().split("\n\n")}
    return "\n\n".join(entries[key] for key in CITED[name].split())


def _read_citation(name: str) -> str:
    """Return the ``citation`` of a package's entry, or of ``module:name``."""
    entry_points: dict[str, EntryPoint] = {}
    for kind in KINDS:
        if kind != "commands":  # no result depends on a command
            entry_points.update(installed(kind))
    if name in entry_points:
        cited = loaded(entry_points[name], "what to cite,")
    elif ":" in name:
        cited = imported(name, "what to cite,")
    else:
        raise ConfigError(unknown("name to cite", name, {*CITED, *entry_points}))
    citation = getattr(cited, "citation", None)
    if not isinstance(citation, str) or not citation:
        raise ConfigError(f"{name} has no citation; it should be a string with BibTeX")
    return dedent(citation).strip()
