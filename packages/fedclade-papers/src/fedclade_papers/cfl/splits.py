"""Figures 8 and 9 of the CFL paper: accuracy stagnates until clusters are split in fixed rounds.

With the setting ``with_rcfl`` the runs are compared with ``rcfl``, fedclade's own method, which
needs no fixed rounds.
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
"""Names of the methods: federated learning (FL), CFL with fixed rounds, CFL with criteria, rcfl.

``own``, CFL with the criteria ε₁, ε₂ and γ_max, is omitted if no suitable values are known, and
``rcfl`` without the setting ``with_rcfl``.
"""

BEYOND = ("own", "rcfl")
"""Keys of the methods that the paper's figures do not contain."""


def measure_cifar(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Measure figure 8: all methods on images whose labels are permuted in each cluster."""
    found = _train_all(cache, settings)
    first = settings["split_rounds"][0]
    numbers = paper.numbers
    stagnation, end = _collect_scores(found, first)
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
    ]
    if "rcfl" in found:
        settled = [series["settled"] for series in found["rcfl"]]
        what = "rcfl: round after which its clusters stay the true ones"
        rows.append(Row.of(what, None, settled, "rounds"))
    more = compare_by_cluster(found, first)
    gain_late = np.array(end["fl"]) - np.array(stagnation)
    late = f"{gain_late.mean():+.1f} points from round {first} to {settings['rounds']}"
    gain = np.mean(end["cfl"]) - np.mean(stagnation)
    before = [series["gap_at_split"] for series in found["cfl"]]
    after = [series["gap_at_end"] for series in found["cfl"]]
    claims = [
        paper.claim(
            "stagnates",
            gain_late.max() < 0.25 * np.mean(stagnation),
            f"{late}, while CFL gains {gain:+.1f}",
        ),
        paper.claim("separated", *_check_clusters(found["cfl"])),
        paper.claim("gap", min(before) > 0, f"g(α) {_join_numbers(before)}"),
        paper.claim("no_gap", max(after) < 0, f"largest g(α) of a cluster {_join_numbers(after)}"),
        paper.claim("norms", *_compare_norms(found["cfl"])),
        paper.claim(
            "doubled",
            min(more) > 2,
            f"by true cluster ×{min(more):.2f} to ×{max(more):.2f} of the FL solution's",
        ),
        *_check_criteria(paper, found, settings),
        *_check_pairs(paper, found["cfl"]),
        *_check_rcfl(paper, found, first),
    ]
    sentence = (
        f"FL {np.mean(stagnation):.1f} % when CFL splits first and {np.mean(end['fl']):.1f} % at "
        f"the end; {_write_final_scores(found, end, ' %')}."
    )
    because = _explain_differences(paper, settings, found)
    remarks = [_describe_dates(paper, settings)]
    tested = settings["rounds"] >= FEWEST_ROUNDS
    return paper.outcome(
        rows,
        claims,
        _get_first_runs(found),
        sentence,
        because=because,
        remarks=remarks,
        tested=tested,
    )


def measure_agnews(paper: Paper, cache: ResultCache, settings: Settings) -> Outcome:
    """Measure figure 9: next-word prediction on articles of one topic for each client."""
    found = _train_all(cache, settings)
    stagnation, end = _collect_scores(found, settings["split_rounds"][0])
    numbers = paper.numbers
    after = "perplexity of CFL at the end, after the splits (the paper: below this)"
    rows = [
        Row.of("perplexity of FL when CFL splits first", numbers["stagnation"], stagnation, ""),
        Row.of("perplexity of FL at the end", numbers["fl"], end["fl"], ""),
        Row.of(after, numbers["cfl"], end["cfl"], ""),
    ]
    rows += [
        Row.of(f"perplexity of {METHODS[key]} at the end", None, end[key], "")
        for key in BEYOND
        if key in end
    ]
    gain = [100 * (1 - cfl / fl) for fl, cfl in zip(end["fl"], end["cfl"], strict=True)]
    below, rounds = count_rounds_below(found, settings["split_rounds"][-1])
    claims = [
        paper.claim(
            "below",
            below == rounds,
            f"in {below} of {rounds} evaluated rounds from the last split on; at the end "
            f"{np.mean(gain):.1f} % less",
            within_printed(gain, numbers["gain"]),
        ),
        paper.claim("discovered", *_check_clusters(found["cfl"])),
        *_check_criteria(paper, found, settings),
    ]
    articles = found["fl"][0]["examples"]
    words = settings["source_arguments"]["vocabulary_size"]
    texts = {
        key: paper.texts[key].format(articles=articles, words=words)
        for key in ("articles", "vocabulary")
    }
    remarks = [texts["articles"], paper.texts["no_vocabulary"], _describe_dates(paper, settings)]
    sentence = f"FL {np.mean(end['fl']):.1f} at the end; {_write_final_scores(found, end, '')}."
    because = f"{texts['vocabulary']} {_explain_differences(paper, settings, found)}"
    tested = settings["rounds"] >= FEWEST_ROUNDS
    return paper.outcome(
        rows,
        claims,
        _get_first_runs(found),
        sentence,
        because=because,
        remarks=remarks,
        tested=tested,
    )


def _train_all(cache: ResultCache, settings: Settings) -> dict[str, list[Series]]:
    """Run every method with every seed, and return the stored results by method."""
    is_included = {"own": bool(settings["criteria"]), "rcfl": settings["with_rcfl"]}
    return {
        method: cache.by_seed(name, settings["seeds"], partial(_train, cache, settings, method))
        for method, name in METHODS.items()
        if is_included.get(method, True)
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
    run = cache.simulate(
        algorithm,
        model,
        federation,
        settings=settings,
        seed=seed,
        key=f"{METHODS[method]}, seed {seed}",
        evaluate_every=settings["evaluate_every"],
    )
    series = series_of(run, settings)
    truth = federation.true_clusters
    if isinstance(algorithm, CFL) and truth:
        return {**series, "pairs": pairs_of(run, truth)}
    return series


def _collect_scores(
    found: Mapping[str, Sequence[Series]], first: int
) -> tuple[Values, dict[str, Values]]:
    """Collect scores for each seed.

    Returns
    -------
    tuple
        The scores of FL in round ``first``, in which CFL splits first; and the scores of every
        method in the last round, by method.
    """
    stagnation = [series["scores"][series["rounds"].index(first)] for series in found["fl"]]
    end: dict[str, Values] = {}
    for method, runs in found.items():
        end[method] = [series["scores"][-1] for series in runs]
    return stagnation, end


def compare_by_cluster(found: Mapping[str, Sequence[Series]], first: int) -> list[float]:
    """Return the ratios of CFL's accuracy at the end to FL's in round ``first``.

    There is a ratio for each seed and true cluster.
    """
    ratios = list[float]()
    for cfl, fl in zip(found["cfl"], found["fl"], strict=True):
        place = fl["rounds"].index(first)
        for ours, averaged in zip(cfl["by_cluster"], fl["by_cluster"], strict=True):
            ratios.append(ours[-1] / averaged[place])
    return ratios


def count_rounds_below(found: Mapping[str, Sequence[Series]], last: int) -> tuple[int, int]:
    """Count the evaluated rounds, from the last split on, in which CFL's score is below FL's.

    Returns
    -------
    tuple
        The number of these rounds, and the number of all evaluated rounds from round ``last`` on,
        over all seeds.
    """
    is_below = list[bool]()
    for cfl, fl in zip(found["cfl"], found["fl"], strict=True):
        scores = zip(cfl["rounds"], cfl["scores"], fl["scores"], strict=True)
        is_below += [ours < averaged for number, ours, averaged in scores if number >= last]
    return sum(is_below), len(is_below)


def _get_first_runs(found: Mapping[str, Sequence[Series]]) -> dict[str, Series]:
    """Return the results of each method for the first seed, which the figure shows."""
    return {method: runs[0] for method, runs in found.items()}


def _check_clusters(runs: Sequence[Series]) -> tuple[bool, str]:
    """Return whether all runs end with the true clusters, and the runs' final ARI as text."""
    ari = [series["ari"][-1] for series in runs]
    return all(each == 1 for each in ari), f"ARI {_join_numbers(ari)}"


def _compare_norms(runs: Sequence[Series]) -> tuple[bool | None, str]:
    """Compare the largest update norms of mixed and of pure clusters.

    Mixed clusters contain clients of several true clusters, pure clusters of one.

    Returns
    -------
    tuple
        Whether the norms of all mixed clusters exceed the norms of all pure clusters (None if one
        kind of cluster is missing), and the norms as text.
    """
    mixed = [norm for series in runs for norm in series["norms"]["mixed"]]
    pure = [norm for series in runs for norm in series["norms"]["pure"]]
    exceeds = None
    if mixed and pure:
        exceeds = min(mixed) > max(pure)
    return (
        exceeds,
        f"in the rounds of the splits {_join_numbers(sorted(mixed))} of clusters of several "
        f"distributions, {_join_numbers(sorted(pure)) or 'none'} of those of one",
    )


def _check_criteria(
    paper: Paper, found: Mapping[str, Sequence[Series]], settings: Settings
) -> list[Claim]:
    """Return the claim on CFL that splits by the criteria of eqs. 32, 33 and 39.

    The list is empty if no suitable thresholds are known.
    """
    if "own" not in found:
        return []
    holds, measured = _check_clusters(found["own"])
    splits = "; ".join(", ".join(map(str, series["splits"])) or "none" for series in found["own"])
    rule = _write_rule(settings["criteria"])
    return [
        paper.claim(
            "criteria",
            holds,
            f"{measured}, splits in rounds {splits}, by {rule}, chosen on other seeds",
        )
    ]


def _check_rcfl(paper: Paper, found: Mapping[str, Sequence[Series]], first: int) -> list[Claim]:
    """Return our own statement on ``rcfl``; the list is empty if ``rcfl`` has not run.

    ``first`` is the round in which CFL first splits.
    """
    if "rcfl" not in found:
        return []
    settled = [series["settled"] for series in found["rcfl"]]
    measured = (
        f"its clusters are the true ones from round {_join_numbers(settled)} on; CFL's calendar "
        f"splits first in {first}"
    )
    claim = paper.claim("rcfl", 0 < min(settled) <= max(settled) < first, measured)
    return [replace(claim, own=True)]


def _check_pairs(paper: Paper, runs: Sequence[Series]) -> list[Claim]:
    """Return the claim on similarities of pairs of clients (workshop paper, figure 3, right).

    The list is empty if no run has pairs of both kinds in one round.
    """
    gaps: list[float] = []
    for series in runs:
        same = {number: mean for number, _, mean, _ in series["pairs"]["same"]}
        other = {number: mean for number, _, mean, _ in series["pairs"]["other"]}
        gaps += [same[number] - other[number] for number in same.keys() & other.keys()]
    if not gaps:
        return []
    measured = f"mean similarities differ by {min(gaps):.2f} to {max(gaps):.2f}"
    return [paper.claim("alike", min(gaps) > 0, measured)]


def _describe_dates(paper: Paper, settings: Settings) -> str:
    known = "found" if settings["criteria"] else "not_found"
    return paper.texts["dates"].format(rule=_write_rule(settings["at_dates"])) + paper.texts[known]


def _write_final_scores(
    found: Mapping[str, Sequence[Series]], end: Mapping[str, Values], unit: str
) -> str:
    """Write the final score and ARI of every method except FL as text."""
    texts = list[str]()
    for method, runs in found.items():
        if method != "fl":
            ari = np.mean([series["ari"][-1] for series in runs])
            texts.append(f"{METHODS[method]} {np.mean(end[method]):.1f}{unit} (ARI {ari:.2f})")
    return ", ".join(texts)


def _explain_differences(
    paper: Paper, settings: Settings, found: Mapping[str, Sequence[Series]]
) -> str:
    """Write the reasons for which results differ from the paper as text."""
    scale = f"{settings['rounds']} rounds, dates {', '.join(map(str, settings['split_rounds']))}"
    parts = [paper.texts["ours"].format(scale=scale)]
    if _miss_clusters(found["cfl"]) and _compare_norms(found["cfl"])[0] is False:
        parts.append(paper.texts["pure_norms"])
    if _miss_clusters(found.get("own", [])):
        parts.append(paper.texts["other_seeds"])
    return " ".join(parts)


def _miss_clusters(runs: Sequence[Series]) -> bool:
    """Return whether at least one run ends with clusters that are not the true clusters."""
    return any(series["ari"][-1] < 1 for series in runs)


def _write_rule(criteria: Settings) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in criteria.items())


def _join_numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)
