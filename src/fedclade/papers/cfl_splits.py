"""CFL's figures 8 and 9: federated learning stagnates, splits by calendar help; and rcfl, which needs no calendar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from fedclade.algorithms import CFL, Algorithm, FedAvg, ReplicatedCFL
from fedclade.core import LocalSpec
from fedclade.data import Federation, load_federation
from fedclade.papers.cfl_course import Series, course_of
from fedclade.papers.cfl_pairs import WatchedCFL, draw_pairs, pairs_of
from fedclade.papers.drawing import head, legend, panels
from fedclade.papers.experiment import ResultCache, Settings
from fedclade.papers.outcome import Claim, Outcome, Row, Summary, as_told, untold
from fedclade.report import style
from fedclade.runs import module_for, simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Courses = dict[str, list[Series]]
"""By method, seed by seed."""

FEWEST_ROUNDS = 30
"""Fewer tell nothing of what holds in the end."""

METHODS = {"fl": "FL", "cfl": "CFL by dates", "own": "CFL by its criteria", "rcfl": "rcfl"}
"""``own`` is left out where no ε₁, ε₂ and γ_max are known that serve."""


def measure_cifar(bench: ResultCache, settings: Settings) -> Outcome:
    """Train on permuted labels (figure 8)."""
    found = _courses(bench, settings)
    first = settings["split_rounds"][0]
    stagnation = _each(found["fl"], lambda course: _score(course, first))
    end = {method: _each(courses, lambda course: course["scores"][-1]) for method, courses in found.items()}
    jumps = _each(found["cfl"], lambda course: course["jump"])
    settled = _each(found["rcfl"], lambda course: course["settled"])
    rows = (
        _row("FL when CFL splits first", 20.0, stagnation, within=3),
        _row("FL at the end", 20.0, end["fl"], within=3),
        _row("rise of those whom the first split parts from all others", 25.0, jumps, wanted="at least", within=2),
        _row("CFL at the end, after three splits", 60.0, end["cfl"], wanted="at least", within=2),
        *_rows_beyond_the_paper(end, "{} at the end", "%"),
        _row("rcfl: round after which its clusters stay the true ones", None, settled, unit="rounds"),
    )
    more = np.array(end["cfl"]) / np.array(stagnation)
    gain_late = np.array(end["fl"]) - np.array(stagnation)
    gaps = [[course["gap_at_split"], course["gap_at_end"]] for course in found["cfl"]]
    claims = (
        Claim(
            "FL has converged and stagnates: more rounds help it little (section VI-C)",
            bool(gain_late.max() < 0.25 * np.mean(stagnation)),
            f"{gain_late.mean():+.1f} points from round {first} to {settings['rounds']}, while CFL gains "
            f"{np.mean(end['cfl']) - np.mean(stagnation):+.1f}",
        ),
        _separated(found["cfl"], "All clusters have been separated after the third split (fig. 8)"),
        Claim(
            "The separation gap is positive before the first split (fig. 8, 1)",
            all(gap[0] > 0 for gap in gaps),
            f"g(α) {_listed(gap[0] for gap in gaps)}",
        ),
        Claim(
            "... and below zero in all clusters in the end (fig. 8, 3)",
            all(gap[1] < 0 for gap in gaps),
            f"largest g(α) of a cluster {_listed(gap[1] for gap in gaps)}",
        ),
        _norms_tell(found["cfl"]),
        Claim(
            "The accuracy of all clients has more than doubled (fig. 8, 4)",
            bool(more.min() > 2),
            f"×{more.min():.2f} to ×{more.max():.2f} of the FL solution's",
        ),
        *_told_of_criteria(found, settings),
        *_told_of_pairs(found["cfl"]),
        Claim(
            "rcfl needs no 50 rounds to split (not in the paper)",
            all(0 < round_ < first for round_ in settled),
            f"its clusters are the true ones from round {_listed(settled)} on; CFL's calendar splits first in {first}",
        ),
    )
    summary = Summary(
        "Where labels are permuted FL stagnates at 20 %; splits in rounds 50, 100 and 150 find the four clusters, "
        "which go on to 60 % and more.",
        f"FL {_percent(stagnation)} when CFL splits first and {_percent(end['fl'])} at the end; "
        f"{_ends(found, end, '%')}.",
        _because(settings, found),
    )
    return _outcome(rows, claims, found, settings, (CIFAR_REMARK, _of_criteria(settings)), summary)


CIFAR_REMARK = "The paper gives neither the step size nor the layers of its 5-layer network, nor ε₂."


def measure_agnews(bench: ResultCache, settings: Settings) -> Outcome:
    """Train next-word prediction on articles of one topic for each client (figure 9)."""
    found = _courses(bench, settings)
    first = settings["split_rounds"][0]
    stagnation = _each(found["fl"], lambda course: _score(course, first))
    end = {method: _each(courses, lambda course: course["scores"][-1]) for method, courses in found.items()}
    rows = (
        _row("perplexity of FL when CFL splits first", 43.0, stagnation, unit=""),
        _row("perplexity of FL at the end", 42.0, end["fl"], unit=""),
        _row("perplexity of CFL at the end, after the splits (the paper: below this)", 36.0, end["cfl"], unit=""),
        *_rows_beyond_the_paper(end, "perplexity of {} at the end", ""),
    )
    gain = [100 * (1 - cfl / fl) for fl, cfl in zip(end["fl"], end["cfl"], strict=True)]
    claims = (
        Claim(
            "After the splits CFL's perplexity is below FL's of the same rounds (fig. 9: 36 against 42, 14 % less)",
            min(gain) > 0,
            f"{np.mean(gain):.1f} % less",
            as_told(gain, 14.0),
        ),
        _separated(found["cfl"], "The four true clusters are discovered (section VI-C)"),
        *_told_of_criteria(found, settings),
    )
    articles = found["fl"][0]["examples"]
    remarks = (
        f"The paper has 120,000 articles; here {articles:,} were trained on (the data at hand is the test split of "
        "7,600), so that perplexities do not compare with the paper's; the relation between the methods does.",
        "The paper gives neither the vocabulary, nor the size of the layers, nor the step size, nor ε₂.",
        _of_criteria(settings),
    )
    summary = Summary(
        "On news of one topic a client CFL's perplexity falls to 36 after the splits, where FL stays at 42.",
        f"FL {np.mean(end['fl']):.1f} at the end; {_ends(found, end, '')}.",
        f"{articles:,} articles in place of 120,000, and a vocabulary of "
        f"{settings['source_arguments']['vocabulary_size']:,} words; the paper does not tell its own. "
        + _because(settings, found),
    )
    return _outcome(rows, claims, found, settings, remarks, summary)


def _outcome(
    rows: Sequence[Row],
    claims: Sequence[Claim],
    found: Courses,
    settings: Settings,
    remarks: Sequence[str],
    summary: Summary,
) -> Outcome:
    told = claims if settings["rounds"] >= FEWEST_ROUNDS else untold(claims)
    series = {method: courses[0] for method, courses in found.items()}
    return Outcome(tuple(rows), tuple(told), series, tuple(remarks), summary)


def _rows_beyond_the_paper(end: Mapping[str, tuple[float, ...]], what: str, unit: str) -> list[Row]:
    return [
        _row(what.format(METHODS[method]), None, values, unit=unit)
        for method, values in end.items()
        if method in ("own", "rcfl")
    ]


def _separated(courses: Sequence[Series], text: str) -> Claim:
    return Claim(
        text,
        all(course["ari"][-1] == 1 for course in courses),
        f"ARI {_listed(course['ari'][-1] for course in courses)}",
    )


def _told_of_criteria(found: Courses, settings: Settings) -> list[Claim]:
    """Return the claim on CFL that splits by eqs. 32, 33 and 39, where some ε₁, ε₂ and γ_max serve."""
    if "own" not in found:
        return []
    claim = _separated(found["own"], "By its criteria CFL splits and stops by itself (eqs. 32 to 34, and 39)")
    splits = "; ".join(", ".join(map(str, course["splits"])) or "none" for course in found["own"])
    rule = ", ".join(f"{key} {value:g}" for key, value in settings["criteria"].items())
    return [replace(claim, measured=f"{claim.measured}, splits in rounds {splits}, by {rule}, chosen on other seeds")]


def _of_criteria(settings: Settings) -> str:
    rule = ", ".join(f"{key} {value:g}" for key, value in settings["at_dates"].items())
    told = f"At the dates clusters are split by {rule}; a cluster may be split down to single clients."
    if settings["criteria"]:
        return told + " The criteria were chosen on other seeds (benchmarks/criteria.py)."
    return told + (
        " No ε₁, ε₂ and γ_max were found on another seed that split every mixed cluster and no pure one "
        "(benchmarks/criteria.py), so that there is no row for CFL without dates."
    )


def _told_of_pairs(courses: Sequence[Series]) -> list[Claim]:
    """Return what the right part of the workshop paper's figure 3 shows, if the runs kept it."""
    apart: list[float] = []
    for course in courses:
        same, other = ({number: mean for number, _, mean, _ in course["pairs"][kind]} for kind in ("same", "other"))
        apart += [same[number] - other[number] for number in same.keys() & other.keys()]
    if not apart:
        return []
    return [
        Claim(
            "Clients of one distribution are more alike than those of two, in every round (workshop, fig. 3 right)",
            min(apart) > 0,
            f"mean similarities differ by {min(apart):.2f} to {max(apart):.2f}",
        )
    ]


def _ends(found: Courses, end: Mapping[str, tuple[float, ...]], unit: str) -> str:
    """Say how every method but FL ends."""
    return ", ".join(
        f"{METHODS[method]} {np.mean(values):.1f}{unit and ' ' + unit} "
        f"(ARI {np.mean([course['ari'][-1] for course in found[method]]):.2f})"
        for method, values in end.items()
        if method != "fl"
    )


def _because(settings: Settings, found: Courses) -> str:
    """Say what differs from the paper, and what came of it."""
    scale = f"{settings['rounds']} rounds, dates {', '.join(map(str, settings['split_rounds']))}"
    parts = [f"Our network, step size and ε₂ are our own, as the paper tells none of them; {scale}."]
    if any(course["ari"][-1] < 1 for course in found["cfl"]) and _norms_tell(found["cfl"]).holds is False:
        parts.append(
            "At a date every cluster whose largest norm is above ε₂ is split, and at this scale the norms of pure "
            "clusters are not below those of mixed ones."
        )
    if "own" in found and any(course["ari"][-1] < 1 for course in found["own"]):
        parts.append("The ε₁, ε₂ and γ_max that serve the seeds that they were chosen on do not quite serve this one.")
    return " ".join(parts)


def _percent(values: Sequence[float]) -> str:
    return f"{np.mean(values):.1f} %"


def _courses(bench: ResultCache, settings: Settings) -> Courses:
    return {
        method: [
            bench.piece(f"{name}, seed {seed}", partial(_train, bench, settings, method, seed))
            for seed in settings["seeds"]
        ]
        for method, name in METHODS.items()
        if method != "own" or settings["criteria"]
    }


def _train(bench: ResultCache, settings: Settings, method: str, seed: int) -> Series:
    algorithm: Algorithm = {
        "fl": lambda: FedAvg(),
        "cfl": lambda: WatchedCFL(split_rounds=tuple(settings["split_rounds"]), **settings["at_dates"]),
        "own": lambda: WatchedCFL(**settings["criteria"]),
        "rcfl": lambda: ReplicatedCFL(),
    }[method]()
    federation = federation_of(settings, bench, seed)
    run = simulate(
        *(algorithm, model_of(settings, federation, seed), federation),
        local=local_of(settings),
        rounds=settings["rounds"],
        seed=seed,
        evaluate_every=settings["evaluate_every"],
        device=bench.device,
        folder=bench.folder_for(f"{method}-seed-{seed}"),
        stop=bench.stop,
    )
    course = course_of(run, settings)
    truth = federation.true_clusters
    return {**course, "pairs": pairs_of(run, truth)} if isinstance(algorithm, CFL) and truth else course


def local_of(settings: Settings) -> LocalSpec:
    """Return the local training of a figure."""
    return LocalSpec(**{key: settings[key] for key in ("epochs", "batch_size", "lr", "momentum", "lr_decay")})


def federation_of(settings: Settings, bench: ResultCache, seed: int) -> Federation:
    """Return the clients of a figure."""
    return load_federation(
        settings["data"],
        clients=settings["clients"],
        samples_per_client=settings["samples_per_client"],
        test_samples=settings["test_samples"],
        seed=seed,
        data_dir=bench.data_dir,
        source_arguments=settings.get("source_arguments"),
        **settings["distribution"],
    )


def model_of(settings: Settings, federation: Federation, seed: int) -> nn.Module:
    """Return the model of a figure, from a seed."""
    return module_for(settings["model"], federation.pool.schema, seed, settings["model_arguments"])


def _norms_tell(courses: Sequence[Series]) -> Claim:
    mixed, pure = ([norm for course in courses for norm in course["norms"][kind]] for kind in ("mixed", "pure"))
    return Claim(
        "The largest norm of a cluster tells whether it is to be split (eq. 33)",
        min(mixed) > max(pure) if mixed and pure else None,
        f"in the rounds of the splits {_listed(sorted(mixed))} of clusters of several distributions, "
        f"{_listed(sorted(pure)) or 'none'} of those of one",
    )


def _score(course: Series, number: int) -> float:
    return course["scores"][course["rounds"].index(number)]


def _each(courses: Sequence[Series], value: Any) -> tuple[float, ...]:
    return tuple(float(value(course)) for course in courses)


def _row(what: str, paper: float | None, seeds: tuple[float, ...], **more: Any) -> Row:
    return Row(what, paper, float(np.mean(seeds)), seeds=seeds, **more)


def _listed(values: Any) -> str:
    return ", ".join(f"{value:.3g}" for value in values)


def draw(outcome: Outcome, settings: Settings, *, place: str, score: str) -> Figure:
    """Draw the course of each true cluster's score beside FL's, the separation gaps, and how alike clients are.

    A column for each method; pairs of clients as in the workshop paper's figure 3, of the runs that kept them.
    """
    title = "Federated learning stagnates; after the splits every cluster goes on"
    methods = [method for method in METHODS if method != "fl" and method in outcome.series]
    columns = len(methods)
    subtitle = f"after Sattler et al. 2019, {place} · {settings['clients']} clients"
    figure, axes = panels(columns, title, subtitle, rows=3)
    for row in range(3):  # before anything is drawn, so that the limits hold it all
        for panel in axes[row * columns + 1 : (row + 1) * columns]:
            panel.sharey(axes[row * columns])
    fl: Mapping[str, Any] = outcome.series["fl"]
    for column, method in enumerate(methods):
        course, (above, middle, below) = outcome.series[method], axes[column::columns]
        for color, line in zip(style.CLUSTERS, course["by_cluster"], strict=False):
            above.plot(course["rounds"], line, color=color)
        above.plot(fl["rounds"], fl["scores"], color=style.INK, linestyle=":", label="FL, mean")
        for color, line in zip(style.CLUSTERS, course["gaps"].values(), strict=False):
            middle.plot(*np.asarray(line).T, color=color)
        middle.axhline(0, color=style.MUTED, linewidth=0.9)
        if "pairs" in course:
            draw_pairs(below, course["pairs"])
        else:
            below.set_axis_off()
        for panel in (above, middle, below):
            panel.set_xlim(1, settings["rounds"])
            for number in course["splits"] if panel.axison else ():
                panel.axvline(number, color=style.MUTED, linewidth=0.9, linestyle=(0, (1, 2)))
        head(above, f"{METHODS[method]}: true clusters")
        style.label(above, y=score if column == 0 else "")
        style.label(middle, y="separation gap g(α)" if column == 0 else "")
        style.label(below, x="communication rounds", y="similarity of pairs of clients" if column == 0 else "")
    legend(axes[0])
    below = axes[2 * columns]
    legend(axes[-1], loc="center left", title="pairs of clients of", handles=below.get_legend_handles_labels()[0])
    return figure


draw_cifar = partial(draw, place="figure 8; 2019 workshop, figure 3", score="test accuracy, %")
draw_agnews = partial(draw, place="figure 9", score="test perplexity")
