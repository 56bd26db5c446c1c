"""BibTeX entries for everything that a run used: method, data, mechanisms and software."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import PurePath
from typing import Any

from fedclade.algorithms import METHODS
from fedclade.report.citations import CITATIONS, read_entry
from fedclade.runs import Run

_BY_CHOICE: Mapping[tuple[str, str], Mapping[str, Sequence[str]]] = {
    ("aggregate", "rule"): {
        "median": ("yin2018byzantine",),
        "trimmed_mean": ("yin2018byzantine",),
        "krum": ("blanchard2017krum",),
        "multi_krum": ("blanchard2017krum", "elmhamdi2018bulyan"),
        "bulyan": ("elmhamdi2018bulyan",),
        "geometric_median": ("pillutla2022rfa",),
        "centred_clipping": ("karimireddy2021history",),
    },
    ("server", "optimizer"): {
        "fedavgm": ("hsu2019fedavgm",),
        "fedadagrad": ("reddi2021fedopt",),
        "fedadam": ("reddi2021fedopt",),
        "fedyogi": ("reddi2021fedopt",),
    },
    ("adversary", "kind"): {
        "alie": ("baruch2019alie",),
        "ipm": ("xie2019ipm",),
        "minmax": ("shejwalkar2021manipulating",),
        "minsum": ("shejwalkar2021manipulating",),
        "backdoor": ("bagdasaryan2020backdoor",),
    },
    ("signature", "kind"): {"projected": ("weinberger2009hashing",)},
}
"""Keys of BibTeX entries by section and key of a config, and by the chosen value."""


def cite_runs(runs: Sequence[Run]) -> str:
    """Return the BibTeX entries of everything that runs used, each with a comment on its use.

    The entries are those of fedclade itself, the method, the data set with its partition and shift,
    the model, robust aggregation, optimizers, attacks, differential privacy with its accountant,
    secure aggregation and the software that computed the run. Each entry occurs once. A comment at
    the end names parts of the run for which no entry is known, such as a user's own data. No code
    that a run folder names is imported.

    Parameters
    ----------
    runs
        Runs, at least one; finished or not.
    """
    uses: dict[str, list[str]] = {}
    unknown: dict[str, None] = {}
    for run in runs:
        for what, keys in _list_uses(run):
            if not keys:
                unknown[what] = None
            for key in keys:
                reasons = uses.setdefault(key, [])
                if what not in reasons:
                    reasons.append(what)
    blocks: list[str] = []
    for key, reasons in uses.items():
        comment = "\n".join(f"% {_in_one_line(reason)}" for reason in reasons)
        blocks.append(f"{comment}\n{read_entry(key)}")
    if unknown:
        names = "; ".join(_in_one_line(what) for what in unknown)
        blocks.append(f"% Without an entry here, cite what they come from: {names}")
    return "\n\n".join(blocks)


def _in_one_line(text: str) -> str:
    """Return a text as one line, so that it stays in a comment of BibTeX."""
    return " ".join(text.replace("@", "(at)").split())


def _list_uses(run: Run) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield what a run used, with keys of BibTeX entries; without keys if none are known."""
    config = run.config
    version = config.get("versions", {}).get("fedclade", "")
    yield f"software: fedclade {version}".rstrip(), ("fedclade",)
    yield "software: PyTorch", ("paszke2019pytorch",)
    yield from _list_of_method(run)
    yield from _list_of_data(run)
    yield from _list_of_model(run)
    for (section, key), choices in _BY_CHOICE.items():
        value = config.get(section, {}).get(key)
        if value in choices:
            yield f"{section}.{key}: {value}", choices[value]
    if config.get("aggregate", {}).get("mixing"):
        yield "aggregate.mixing", ("allouah2023mixing",)
    yield from _list_of_privacy(run)
    if "network" in config:
        yield "software: Flower", ("beutel2020flower",)
        if config["network"].get("secure_aggregation"):
            # Masks and stages; the graph of neighbours; the rotation before rounding.
            keys = ("bonawitz2017secagg", "bell2020secaggplus", "suresh2017mean")
            yield "secure aggregation", keys
    if config.get("engine") == "ray":
        yield "software: Ray", ("moritz2018ray",)


def _list_of_method(run: Run) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the method of a run, and the proximal term of its clients."""
    name = run.summary["algorithm"]
    records = {method.name: method for method in METHODS}
    if name not in records:
        yield f"method: {name}", ()
    elif records[name].citations:  # a baseline such as local has none
        yield f"method: {name}", records[name].citations
    if run.config.get("algorithm", {}).get("criterion") == "replicated":
        yield f"method: {name} with replicated tests", ("fedclade",)
    if run.config.get("local", {}).get("mu"):
        yield "proximal term: local.mu", ("li2020fedprox",)


def _list_of_data(run: Run) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the data set of a run, with its partition and its shift."""
    section: Mapping[str, Any] = run.config.get("data", {})
    name = _name_of_data(section)
    description = str(run.summary["data"])
    yield f"data: {name or description}", CITATIONS.get(name, ())
    for kind in ("partition", "shift"):
        value = section.get(kind)
        if value is None:  # a run of Python code records the description alone
            found = re.search(rf"\b{kind} (\w+)", description)
            value = found[1] if found else None
        if isinstance(value, str) and value in CITATIONS:
            yield f"{kind}: {value}", CITATIONS[value]


def _name_of_data(section: Mapping[str, Any]) -> str:
    """Return the name of a run's data set; for files of the suite natural, the name there."""
    files = section.get("files")
    if isinstance(files, str):
        parts = PurePath(files).parts
        for folder, name in pairwise(parts):
            if folder == "natural" and name in CITATIONS:
                return name
        return files
    return str(section.get("name", ""))


def _list_of_model(run: Run) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the model of a run, unless it is a linear one, and its adapters."""
    name = str(run.summary["model"])
    if name in CITATIONS:
        yield f"model: {name}", CITATIONS[name]
    elif ":" in name:
        yield f"model: {name}", ()
    if run.config.get("model", {}).get("adapter"):
        yield "adapters: LoRA", ("hu2022lora",)


def _list_of_privacy(run: Run) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the mechanism of differential privacy of a run, and the accountant that states ε."""
    privacy = run.summary.get("privacy")
    if not privacy:
        return
    if privacy.get("level") == "example":
        yield "differential privacy of examples (DP-SGD)", ("abadi2016dpsgd",)
    else:
        yield "differential privacy of clients", ("mcmahan2018dpfedavg",)
    if privacy.get("epsilon") is not None:
        yield "privacy accountant: dp-accounting", ("dpaccounting", "doroshenko2022dots")
