"""CFL's figures 8 and 9: federated learning stagnates, and splits at fixed rounds help.

They are compared with rcfl, which needs no such rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fedclade import CFL, Algorithm, ReplicatedCFL
from fedclade_papers.cache import ResultCache, Settings, maker_of
from fedclade_papers.cfl.series import Series, WatchedCFL, pairs_of, series_of
from fedclade_papers.experiment import Paper
from fedclade_papers.outcome import Claim, Outcome, Row, within_printed

Values = Sequence[float]

FEWEST_ROUNDS = 30
"""Smallest number of rounds that can show claims on the final result."""

METHODS = {"fl": "FL", "cfl": "CFL by dates", "own": "CFL by its criteria", "rcfl": "rcfl"}
"""Names of the methods. ``own`` is omitted if no suitable ε₁, ε₂ and γ_max are known."""

BEYOND = ("own", "rcfl")
"""Methods that the paper's figures do not contain."""


def measure_cifar(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Train on permuted labels (figure 8)."""
    found = _train_all(cache, settings)
    first = settings["split_rounds"][0]
    numbers = paper.numbers
    stagnation, end = _scores(found, first)
    settled = [series["settled"] for series in found["rcfl"]]
    jumps = [series["jump"] for series in found["cfl"]]
    at_least: dict[str, Any] = {"wanted": "at least", "within": 2}
    rows = [
        Row.of("FL when CFL splits first", numbers["stagnation"], stagnation, within=3),
        Row.of("FL at the end", numbers["stagnation"], end["fl"], within=3),
        Row.of(
            "rise of those whom the first split parts from all others",
            numbers["rise"],
            jumps,
            **at_least,
        ),
        Row.of("CFL at the end, after three splits", numbers["end"], end["cfl"], **at_least),
        *(Row.of(f"{METHODS[key]} at the end", None, end[key]) for key in BEYOND if key in end),
        Row.of("rcfl: round after which its clusters stay the true ones", None, settled, "rounds"),
    ]
    more = np.array(end["cfl"]) / np.array(stagnation)
    gain_late = np.array(end["fl"]) - np.array(stagnation)
    late = f"{gain_late.mean():+.1f} points from round {first} to {settings['rounds']}"
    gain = np.mean(end["cfl"]) - np.mean(stagnation)
    from_round = f"its clusters are the true ones from round {_listed(settled)} on"
    calendar = f"CFL's calendar splits first in {first}"
    before, after = (
        [series[key] for series in found["cfl"]] for key in ("gap_at_split", "gap_at_end")
    )
    claims = [
        paper.claim(
            "stagnates",
            gain_late.max() < 0.25 * np.mean(stagnation),
            f"{late}, while CFL gains {gain:+.1f}",
        ),
        paper.claim("separated", *_separated(found["cfl"])),
        paper.claim("gap", min(before) > 0, f"g(α) {_listed(before)}"),
        paper.claim("no_gap", max(after) < 0, f"largest g(α) of a cluster {_listed(after)}"),
        paper.claim("norms", *_norms_tell(found["cfl"])),
        paper.claim(
            "doubled",
            more.min() > 2,
            f"×{more.min():.2f} to ×{more.max():.2f} of the FL solution's",
        ),
        *_on_criteria(paper, found, settings),
        *_on_pairs(paper, found["cfl"]),
        replace(
            paper.claim(
                "rcfl", 0 < min(settled) <= max(settled) < first, f"{from_round}; {calendar}"
            ),
            own=True,
        ),
    ]
    sentence = (
        f"FL {np.mean(stagnation):.1f} % when CFL splits first and {np.mean(end['fl']):.1f} % at "
        f"the end; {_ends(found, end, ' %')}."
    )
    because = _because(paper, settings, found)
    remarks = [_dates(paper, settings)]
    tested = settings["rounds"] >= FEWEST_ROUNDS
    return paper.outcome(
        rows, claims, _first(found), sentence, because=because, remarks=remarks, tested=tested
    )


def measure_agnews(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Train next-word prediction on articles of one topic for each client (figure 9)."""
    found = _train_all(cache, settings)
    stagnation, end = _scores(found, settings["split_rounds"][0])
    numbers = paper.numbers
    after = "perplexity of CFL at the end, after the splits (the paper: below this)"
    rows = [
        Row.of("perplexity of FL when CFL splits first", numbers["stagnation"], stagnation, ""),
        Row.of("perplexity of FL at the end", numbers["fl"], end["fl"], ""),
        Row.of(after, numbers["cfl"], end["cfl"], ""),
        *(
            Row.of(f"perplexity of {METHODS[key]} at the end", None, end[key], "")
            for key in BEYOND
            if key in end
        ),
    ]
    gain = [100 * (1 - cfl / fl) for fl, cfl in zip(end["fl"], end["cfl"], strict=True)]
    claims = [
        paper.claim(
            "below",
            min(gain) > 0,
            f"{np.mean(gain):.1f} % less",
            within_printed(gain, numbers["gain"]),
        ),
        paper.claim("discovered", *_separated(found["cfl"])),
        *_on_criteria(paper, found, settings),
    ]
    articles = found["fl"][0]["examples"]
    words = settings["source_arguments"]["vocabulary_size"]
    texts = {
        key: paper.texts[key].format(articles=articles, words=words)
        for key in ("articles", "vocabulary")
    }
    remarks = [texts["articles"], paper.texts["no_vocabulary"], _dates(paper, settings)]
    sentence = f"FL {np.mean(end['fl']):.1f} at the end; {_ends(found, end, '')}."
    because = f"{texts['vocabulary']} {_because(paper, settings, found)}"
    tested = settings["rounds"] >= FEWEST_ROUNDS
    return paper.outcome(
        rows, claims, _first(found), sentence, because=because, remarks=remarks, tested=tested
    )


def _train_all(cache: ResultCache, settings: Settings) -> dict[str, list[Series]]:
    """Return the results of every method for each seed."""
    return {
        method: cache.by_seed(name, settings["seeds"], partial(_train, cache, settings, method))
        for method, name in METHODS.items()
        if method != "own" or settings["criteria"]
    }


def _train(cache: ResultCache, settings: Settings, method: str, seed: int) -> Series:
    makers: Mapping[str, Callable[[], Algorithm]] = {
        # Bit-identical to FedAvg, but it also computes the similarities from which the gap follows.
        "fl": lambda: CFL(split_rounds=(settings["rounds"] + 1,)),
        "cfl": lambda: WatchedCFL(
            split_rounds=tuple(settings["split_rounds"]), **settings["at_dates"]
        ),
        "own": lambda: WatchedCFL(**settings["criteria"]),
        "rcfl": lambda: ReplicatedCFL(),
    }
    algorithm = makers[method]()
    federation = cache.federation(settings["data"], settings, seed, **settings["distribution"])
    model = maker_of(federation, settings["model"], settings["model_arguments"])
    how: dict[str, Any] = {
        "key": f"{METHODS[method]}, seed {seed}",
        "evaluate_every": settings["evaluate_every"],
    }
    run = cache.simulate(algorithm, model, federation, settings, seed, **how)
    series = series_of(run, settings)
    truth = federation.true_clusters
    return (
        {**series, "pairs": pairs_of(run, truth)}
        if isinstance(algorithm, CFL) and truth
        else series
    )


def _scores(found: Mapping[str, Sequence[Series]], first: int) -> tuple[Values, dict[str, Values]]:
    """Return FL's scores when CFL splits first, and all methods' final scores, for each seed."""
    stagnation = [series["scores"][series["rounds"].index(first)] for series in found["fl"]]
    return stagnation, {
        method: [series["scores"][-1] for series in runs] for method, runs in found.items()
    }


def _first(found: Mapping[str, Sequence[Series]]) -> dict[str, Series]:
    """Return the results of the first seed, which the figure shows."""
    return {method: runs[0] for method, runs in found.items()}


def _separated(runs: Sequence[Series]) -> tuple[bool, str]:
    """Return whether the clusters are the true ones at the end, and their ARI as text."""
    ari = [series["ari"][-1] for series in runs]
    return all(each == 1 for each in ari), f"ARI {_listed(ari)}"


def _norms_tell(runs: Sequence[Series]) -> tuple[bool | None, str]:
    """Return whether all largest norms of mixed clusters exceed those of pure clusters.

    The norms are returned as text.
    """
    mixed, pure = (
        [norm for series in runs for norm in series["norms"][kind]] for kind in ("mixed", "pure")
    )
    return (
        min(mixed) > max(pure) if mixed and pure else None,
        f"in the rounds of the splits {_listed(sorted(mixed))} of clusters of several "
        f"distributions, {_listed(sorted(pure)) or 'none'} of those of one",
    )


def _on_criteria(
    paper: Paper, found: Mapping[str, Sequence[Series]], settings: Settings
) -> list[Claim]:
    """Return the claim on CFL with splits by eqs. 32, 33 and 39, if thresholds are known."""
    if "own" not in found:
        return []
    holds, measured = _separated(found["own"])
    splits = "; ".join(", ".join(map(str, series["splits"])) or "none" for series in found["own"])
    rule = _rule(settings["criteria"])
    return [
        paper.claim(
            "criteria",
            holds,
            f"{measured}, splits in rounds {splits}, by {rule}, chosen on other seeds",
        )
    ]


def _on_pairs(paper: Paper, runs: Sequence[Series]) -> list[Claim]:
    """Return the claim on the right part of the workshop paper's figure 3, if runs stored pairs."""
    apart: list[float] = []
    for series in runs:
        same, other = (
            {number: mean for number, _, mean, _ in series["pairs"][kind]}
            for kind in ("same", "other")
        )
        apart += [same[number] - other[number] for number in same.keys() & other.keys()]
    differ = f"mean similarities differ by {min(apart):.2f} to {max(apart):.2f}" if apart else ""
    return [paper.claim("alike", min(apart) > 0, differ)] if apart else []


def _dates(paper: Paper, settings: Settings) -> str:
    known = "found" if settings["criteria"] else "not_found"
    return paper.texts["dates"].format(rule=_rule(settings["at_dates"])) + paper.texts[known]


def _ends(found: Mapping[str, Sequence[Series]], end: Mapping[str, Values], unit: str) -> str:
    """Return the final results of every method but FL as text."""
    return ", ".join(
        f"{METHODS[method]} {np.mean(end[method]):.1f}{unit} (ARI "
        f"{np.mean([each['ari'][-1] for each in runs]):.2f})"
        for method, runs in found.items()
        if method != "fl"
    )


def _because(paper: Paper, settings: Settings, found: Mapping[str, Sequence[Series]]) -> str:
    """Return the differences from the paper and their consequences as text."""
    scale = f"{settings['rounds']} rounds, dates {', '.join(map(str, settings['split_rounds']))}"
    missed = {method: any(each["ari"][-1] < 1 for each in runs) for method, runs in found.items()}
    parts = [paper.texts["ours"].format(scale=scale)]
    parts += (
        [paper.texts["pure_norms"]]
        if missed["cfl"] and _norms_tell(found["cfl"])[0] is False
        else []
    )
    parts += [paper.texts["other_seeds"]] if missed.get("own") else []
    return " ".join(parts)


def _rule(criteria: Settings) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in criteria.items())


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)
