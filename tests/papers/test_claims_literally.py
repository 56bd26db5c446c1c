"""Every claim of every committed result against a literal reading of its sentence.

For each claim there is a function that reads the measured numbers and states what a reader of the
sentence would: ``yes``, ``direction only`` or ``no``. None of them uses the library's own checks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fedclade_papers import EXPERIMENTS, Claim, Result
from fedclade_papers.docs import read_results
from fedclade_papers.experiment import Paper

RESULTS = read_results(Path(__file__).parents[2] / "results")

Read = Callable[[list[float], Claim, Result], str]
"""Function of the numbers in the measurement, the claim and the result, that returns a verdict."""


def numbers_in(text: str) -> list[float]:
    """Return all numbers of a text; a minus sign counts if it stands directly before a digit.

    >>> numbers_in("−6.6 to +1.1 points, 1,000 of k > 10")
    [-6.6, 1.1, 1000.0, 10.0]
    """
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", text.replace("−", "-"))
    return [float(number) for number in re.findall(r"(?<![\w.])[-+]?\d+(?:\.\d+)?", plain)]


def if_all(*conditions: bool) -> str:
    """Return ``yes`` if all conditions hold, otherwise ``no``."""
    return "yes" if all(conditions) else "no"


def in_steps(direction: bool, size: bool) -> str:
    """Return the verdict on a sentence that states a direction and a size."""
    if not direction:
        return "no"
    return "yes" if size else "direction only"


def after(text: str, start: str) -> list[float]:
    """Return the numbers of the part of a text that follows some words."""
    assert start in text, text
    return numbers_in(text.partition(start)[2])


def between(text: str, start: str, end: str) -> list[float]:
    """Return the numbers of the part of a text between two words; all before ``end`` if empty."""
    rest = text.partition(start)[2] if start else text
    assert end in rest, text
    return numbers_in(rest.partition(end)[0])


def pairs_in(text: str) -> list[tuple[float, float]]:
    """Return the entries of a list such as ``10: -0.22, 20: +0.04``."""
    found = re.findall(r"(\d+): ([-+]?\d+(?:\.\d+)?)", text)
    return [(float(x), float(y)) for x, y in found]


def beyond(claim: Claim, result: Result) -> float:
    """Return the value of the horizontal axis from which figures 5 and 6 claim something."""
    if "enough_rounds" in result.settings:
        return result.settings["enough_rounds"]
    (name,) = (name for name in result.settings["tasks"] if claim.text.startswith(f"{name}: "))
    return result.settings["enough_points"][name]


def is_right(_: list[float], claim: Claim, result: Result) -> str:
    shares = [y for x, y in pairs_in(claim.measured) if x >= beyond(claim, result)]
    assert shares
    return if_all(all(share == 100 for share in shares))


def is_positive(_: list[float], claim: Claim, result: Result) -> str:
    gaps = [y for x, y in pairs_in(claim.measured) if x >= beyond(claim, result)]
    assert gaps
    return if_all(all(gap > 0 for gap in gaps))


def grows(_: list[float], claim: Claim, result: Result) -> str:
    name = claim.text.partition(": the gap")[0]
    curve = result.outcome.series[name]["updates"]
    gaps = [sum(at) / len(at) for at in zip(*curve, strict=True)]
    steps = list(pairwise(gaps))
    return in_steps(gaps[-1] > gaps[0], all(b >= a for a, b in steps))


def updates_separate_better(_: list[float], claim: Claim, result: Result) -> str:
    name = claim.text.partition(": weight updates")[0]
    series = result.outcome.series[name]
    means = {
        kind: [sum(at) / len(at) for at in zip(*series[kind], strict=True)]
        for kind in ("updates", "gradients")
    }
    lower_half = range((len(series["x"]) + 1) // 2)
    return if_all(all(means["updates"][n] > means["gradients"][n] for n in lower_half))


def norm_stagnates(x: list[float], claim: Claim, _: Result) -> str:
    ratios = numbers_in(claim.measured.partition(" from ")[0])
    return in_steps(min(ratios) >= 0.8, min(ratios) > 1)


def norms_vanish(x: list[float], _: Claim, __: Result) -> str:
    return in_steps(max(x) < 1, max(x) < 0.1)


def outperforms(x: list[float], _: Claim, __: Result) -> str:
    at_end, cells, after_clustering = x
    return if_all(at_end == cells, after_clustering == cells)


def jump(_: list[float], claim: Claim, __: Result) -> str:
    assert "1.3x to 1.9x" in claim.text
    first = between(claim.measured, "n = 1:", ", later")
    later = after(claim.measured, "later:")
    greatest = min(first) > max(later) and min(first) > 1
    return in_steps(greatest, all(1.25 <= ratio < 1.95 for ratio in first))


def more_clients(high: float) -> Read:
    def read(_: list[float], claim: Claim, __: Result) -> str:
        assert f"1.2x to {high}x" in claim.text
        ratios = numbers_in(claim.measured.partition(":")[0])
        return in_steps(min(ratios) > 1, all(1.15 <= ratio < high + 0.05 for ratio in ratios))

    return read


def within(low: float, high: float) -> Read:
    """Return a reading of "... has ``low`` to ``high`` %"."""

    def read(_: list[float], claim: Claim, __: Result) -> str:
        assert f"{low} to {high} %" in claim.text
        shares = numbers_in(re.split("[;:]", claim.measured)[0])
        return if_all(all(low - 0.05 <= share < high + 0.05 for share in shares))

    return read


def best_metric(*order: tuple[str, str]) -> Read:
    """Return a reading of an order of distance metrics by their accuracy."""

    def read(_: list[float], claim: Claim, result: Result) -> str:
        if "not measured" in claim.measured:
            return "not tested"
        cells = result.outcome.series["cells"]
        means = {
            metric: [cell["ours"][0] for how, cell in cells.items() if how.startswith(metric)]
            for metric in ("cosine", "l1", "l2")
        }
        mean = {metric: sum(values) / len(values) for metric, values in means.items()}
        return if_all(all(mean[first] > mean[second] for first, second in order))

    return read


def one_cluster(_: list[float], claim: Claim, result: Result) -> str:
    clusters = dict(pairs_in(claim.measured))
    later = {n: count for n, count in clusters.items() if n >= 3}
    return in_steps(all(count == 1 for count in later.values()), 3 in later)


def first_clusters(x: list[float], _: Claim, __: Result) -> str:
    *counts, lost = x
    return in_steps(min(counts) > 1 and lost > 0, lost < 1)


def only_l1_splits(_: list[float], claim: Claim, __: Result) -> str:
    l1, l2, cosine = (numbers_in(part.strip()[2:]) for part in claim.measured.split(";"))
    return if_all(min(l1) > 1, set(l2) == {1}, set(cosine) == {1})


def curve(x: list[float], _: Claim, __: Result) -> str:
    more, rounds, ours, averaged = x
    return in_steps(ours > averaged, more == rounds)


def sooner(_: list[float], claim: Claim, __: Result) -> str:
    averaged, *ours = after(claim.measured, "in round")
    return if_all(bool(ours) and ours[0] < averaged)


def classes(low: float, high: float, *, rises: bool, as_printed: Callable[..., bool]) -> Read:
    """Return a reading of a quantity that changes from the fewest to the most classes."""

    def read(_: list[float], claim: Claim, __: Result) -> str:
        first, n_first, last, n_last = after(claim.measured, ": ")
        assert (n_first, n_last) == (low, high)
        return in_steps((last > first) == rises, as_printed(first, last))

    return read


def groups_beat(x: list[float], _: Claim, __: Result) -> str:
    return if_all(x[0] > 0, x[1] > 0)


def random_centers(_: list[float], claim: Claim, __: Result) -> str:
    rcc, group, baseline = numbers_in(claim.measured)
    beats_group = "and FedGroup here" in claim.text
    return if_all(rcc > baseline, (rcc > group) == beats_group)


def random_assignment(x: list[float], _: Claim, __: Result) -> str:
    rac, averaged, proximal = x
    return if_all(rac < averaged, rac < proximal)


def ranks(_: list[float], claim: Claim, result: Result) -> str:
    """Compare every pair of methods that are more than 0.2 points apart in Table III."""
    task = claim.text.partition(": ")[0]
    of_task = [row for row in result.outcome.rows if row.what.startswith(f"{task} · ")]
    known = [row for row in of_task if row.paper is not None]
    wrong = [
        (a.what, b.what)
        for a in known
        for b in known
        if a.paper is not None and b.paper is not None
        if round(b.paper - a.paper, 6) > 0.2 and a.ours > b.ours
    ]
    return if_all(not wrong)


def join(_: list[float], claim: Claim, result: Result) -> str:
    printed = result.outcome.rows[0].paper
    assert printed is not None
    (accuracy,) = between(claim.measured, "sampled, by latest update:", "%")
    return if_all(accuracy > printed - 1)


def steady(_: list[float], claim: Claim, result: Result) -> str:
    task = claim.text.partition(": ")[0]
    means = {
        row.what.partition(" · ")[2].partition(",")[0]: sum(row.seeds) / len(row.seeds)
        for row in result.outcome.rows
        if row.what.startswith(f"{task} · ")
    }
    return if_all(means["FedProx"] < means["FedAvg"])


def below_in_all_rounds(_: list[float], claim: Claim, result: Result) -> str:
    assert "14 % less" in claim.text
    fl, cfl = (result.outcome.series[key] for key in ("fl", "cfl"))
    last_split = result.settings["split_rounds"][-1]
    later = [
        (ours, averaged)
        for number, ours, averaged in zip(fl["rounds"], cfl["scores"], fl["scores"], strict=True)
        if number >= last_split
    ]
    less = 100 * (1 - later[-1][0] / later[-1][1])
    return in_steps(all(ours < averaged for ours, averaged in later), round(less) == 14)


def doubled(_: list[float], claim: Claim, result: Result) -> str:
    fl, cfl = (result.outcome.series[key] for key in ("fl", "cfl"))
    place = fl["rounds"].index(result.settings["split_rounds"][0])
    before = [cluster[place] for cluster in fl["by_cluster"]]
    return if_all(
        all(ours[-1] > 2 * was for ours, was in zip(cfl["by_cluster"], before, strict=True))
    )


def norms_tell(_: list[float], __: Claim, result: Result) -> str:
    norms = result.outcome.series["cfl"]["norms"]
    return if_all(min(norms["mixed"]) > max(norms["pure"]))


def fl_stagnates(_: list[float], __: Claim, result: Result) -> str:
    fl = result.outcome.series["fl"]
    before = fl["scores"][fl["rounds"].index(result.settings["split_rounds"][0])]
    return if_all(fl["scores"][-1] - before < before / 4)


def more_alike(_: list[float], __: Claim, result: Result) -> str:
    pairs = result.outcome.series["cfl"]["pairs"]
    same, other = ({row[0]: row[2] for row in pairs[kind]} for kind in ("same", "other"))
    both = same.keys() & other.keys()
    assert both
    return if_all(all(same[number] > other[number] for number in both))


def right_beyond_ten(_: list[float], __: Claim, result: Result) -> str:
    """Each k above 10 should have a noise above 1 with P above 0.99."""
    cells = result.outcome.series["cells"]
    good = {c["k"] for c in cells if c["gamma"] > 1 and c["gap_positive"] > 0.99}
    return if_all({k for k in result.settings["ks"] if k > 10} <= good)


def last_is(condition: Callable[[float], bool]) -> Read:
    """Return a reading that only the last number of the measurement decides."""
    return lambda x, _, __: if_all(condition(x[-1]))


def each_is(condition: Callable[[float], bool]) -> Read:
    """Return a reading for which all numbers of the measurement must meet a condition."""
    return lambda x, _, __: if_all(all(condition(number) for number in x))


def first_is(condition: Callable[[float], bool]) -> Read:
    """Return a reading that only the first number of the measurement decides."""
    return lambda x, _, __: if_all(condition(x[0]))


def ari_is_one(_: list[float], claim: Claim, __: Result) -> str:
    values = numbers_in(claim.measured.partition(", splits")[0])
    return if_all(all(value == 1 for value in values))


def rises_by_four(first: float, last: float) -> bool:
    return round(last - first, 1) == 4.0


def falls_by_80(first: float, last: float) -> bool:
    return round(100 * (1 - last / first), 1) == 80.5


def takes_36_and_10(first: float, last: float) -> bool:
    return (round(first), round(last)) == (36, 10)


GAPS: dict[str, Read] = {
    "right": is_right,
    "positive": is_positive,
    "grows": grows,
    "updates": updates_separate_better,
}
NORMS: dict[str, Read] = {
    "stagnates": norm_stagnates,
    "vanishes": norms_vanish,
    "mean": norms_vanish,
}
SPLITS: dict[str, Read] = {
    "norms": norms_tell,
    "criteria": ari_is_one,
    "alike": more_alike,
    "stagnates": fl_stagnates,
    "separated": ari_is_one,
    "gap": each_is(lambda gap: gap > 0),
    "no_gap": each_is(lambda gap: gap < 0),
    "doubled": doubled,
    "rcfl": lambda x, _, __: if_all(0 < max(x[:-1]) < x[-1]),
    "below": below_in_all_rounds,
    "discovered": ari_is_one,
}

READINGS: dict[str, dict[str, Read]] = {
    "cfl-fig1-xor": {
        "simple": first_is(lambda best: best < 90),
        "diverging": last_is(lambda best: best < 60),
        "separated": last_is(lambda worst: worst > 95),
    },
    "cfl-fig2-paths": {
        "stationary": last_is(lambda left: left < 0.01),
        "incongruent": last_is(lambda left: left > 0),
        "congruent": last_is(lambda left: left < 0.01),
    },
    "cfl-fig3-theory": {
        "cross": last_is(lambda margin: margin >= 0),
        "intra": last_is(lambda margin: margin >= 0),
        "promised": first_is(lambda wrong: wrong == 0),
        "large": right_beyond_ten,
        "gap": first_is(lambda wrong: wrong == 0),
        "only": first_is(lambda without: without == 0),
    },
    "cfl-fig5-data": GAPS,
    "cfl-fig6-rounds": GAPS,
    "cfl-fig7-norms": {**NORMS, "apart": last_is(lambda ratio: ratio > 1.5)},
    "cfl-fig7-steps": {
        **NORMS,
        # η, norm of the mean and largest norm, at the small step size and at the large one
        "steps": lambda x, _, __: if_all(x[1] < 1, x[4] >= 1),
    },
    "cfl-fig8-cifar": SPLITS,
    "cfl-fig9-agnews": SPLITS,
    "flhc-iid": {"one": one_cluster, "first": first_clusters, "metrics": only_l1_splits},
    "flhc-table1": {"outperforms": outperforms, "jump": jump, "more_clients": more_clients(2.0)},
    "flhc-cohort": {
        "same": each_is(lambda gain: abs(gain) <= 1),
        "as_printed": within(97.1, 99.1),
        "jump": jump,
        "more_clients": more_clients(2.0),
    },
    "flhc-table2": {
        "ceiling": each_is(lambda best: best < 80.5),
        "finds": first_is(lambda ari: ari == 1),
        "better": each_is(lambda gain: gain > 5),
        "end": within(98.4, 99.2),
        "after": within(98.1, 98.6),
    },
    "flhc-table3": {"negative": lambda x, _, __: in_steps(2 * x[0] > x[1], 2 * x[2] > x[1])},
    "flhc-table4": {
        "better": each_is(lambda gain: gain > -1),
        "order": best_metric(("l1", "l2"), ("l2", "cosine")),
        "more_clients": more_clients(2.1),
    },
    "flhc-table5": {
        "better": lambda _, claim, __: if_all(
            min(numbers_in(claim.measured.partition(";")[0])) > 5
        ),
        "order": best_metric(("cosine", "l2"), ("cosine", "l1")),
        "ceiling": each_is(lambda best: best < 80.5),
        "end_of_cuts": within(98.3, 99.1),
    },
    "flhc-table6": {"degrades": each_is(lambda gain: gain < 0)},
    "flhc-fig1-6": {"curve": curve, "sooner": sooner},
    "fedgroup-table1": {
        "variance": classes(1, 5, rises=False, as_printed=falls_by_80),
        "maximum": classes(1, 5, rises=True, as_printed=rises_by_four),
        "rounds": classes(1, 5, rises=False, as_printed=takes_36_and_10),
    },
    "fedgroup-fig1": {"discrepancy": classes(1, 5, rises=False, as_printed=lambda *_: True)},
    "fedgroup-table2": {"exact": lambda x, _, __: if_all(x[0] == x[1])},
    "fedgroup-table3": {
        "groups": groups_beat,
        "rcc": random_centers,
        "rac": random_assignment,
        "rank": ranks,
    },
    "fedgroup-eq10": {"join": join},
    "fedgroup-fig3-4": {"stable": steady},
    "fedgroup-fig5-edc": {"linear": first_is(lambda correlation: correlation >= 0.9)},
}
"""For each experiment and key of a claim: what a reader of the sentence would conclude."""


def paper_of(name: str) -> Paper:
    """Return what the paper says of an experiment."""
    measure: Any = EXPERIMENTS[name].measure
    return measure.args[0]


def key_of(claim: Claim, name: str) -> str:
    """Return the key of a claim in ``experiments.toml``."""
    keys: Sequence[str] = [
        key
        for key, text in paper_of(name).claims.items()
        if re.fullmatch(re.sub(r"\\\{[^}]*\\\}", ".*", re.escape(text)), claim.text)
    ]
    (key,) = keys
    return key


CLAIMS = [
    pytest.param(result, claim, id=f"{result.stem}: {claim.text[:60]}")
    for result in RESULTS
    for claim in result.outcome.claims
]


def test_every_claim_of_every_experiment_has_a_literal_reading():
    assert len(CLAIMS) >= 95
    assert {name: set(paper_of(name).claims) for name in EXPERIMENTS} == {
        name: set(readings) for name, readings in READINGS.items()
    }


@pytest.mark.parametrize(("result", "claim"), CLAIMS)
def test_a_committed_claim_is_what_its_sentence_says_of_the_measured_numbers(
    result: Result, claim: Claim
):
    read = READINGS[result.name][key_of(claim, result.name)]
    assert claim.seen == read(numbers_in(claim.measured), claim, result), claim.measured


@pytest.mark.parametrize("name", ["flhc-table3", "flhc-table6"])
def test_claims_without_a_committed_result_are_read_literally_too(name: str):
    (read,) = READINGS[name].values()
    claim = Claim("", holds=None, measured="")
    (result, *_) = RESULTS
    if name == "flhc-table3":
        verdicts = [read(list(x), claim, result) for x in ((9, 16, 9), (9, 16, 8), (8, 16, 8))]
        assert verdicts == ["yes", "direction only", "no"]
    else:
        assert [read([gain], claim, result) for gain in (-0.1, 0.0)] == ["yes", "no"]
