"""The page of one run, from its numbers to the command that repeats it."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from fedclade.config import WRITTEN_ONLY, check_config
from fedclade.core import ConfigError, UntrustedNameError, flat, reading_folder
from fedclade.report.formats import NONE, count, duration, number, percent, shortened, traffic
from fedclade.report.page.curves import (
    checks_section,
    dendrogram_section,
    norms_section,
    scores_section,
    similarity_section,
    spread_section,
)
from fedclade.report.page.faults import adversaries_section, faults_section, newcomers_section
from fedclade.report.page.sankey import sankey_section
from fedclade.report.page.section import Card, Page, Section, Table, write_page
from fedclade.report.page.tree import tree_section
from fedclade.report.queries import personal_part
from fedclade.report.run_view import Outcome, RunView
from fedclade.report.score import Score
from fedclade.runs import CONFIG, Run, to_toml

# What was run: the config with every default, and the command that repeats it.

LONGEST_LIST = 80
"""Letters of a list in one line."""


def setting_section(view: RunView) -> Section:
    """Return the resolved config, the versions, and the command that repeats the run."""
    run = view.run
    versions = run.config.get("versions", {})
    tables = [Table("Versions", ["package", "version"], [[name, str(of)] for name, of in versions.items()])]
    texts = {"Config, with every default filled in": _SPREAD_LIST.sub(_in_one_line, _as_toml(run))}
    if (command := repeat_command(view)) is not None:
        texts = {"The command that repeats the run": command, **texts}
        caption = "Everything that the run was made from. The same seed gives the same run."
    else:
        caption = "Everything that the run was made from; it is repeated by the same call, as it came from no config."
    return Section("config", "Config", caption, tables=tables if versions else [], texts=texts)


def repeat_command(view: RunView) -> str | None:
    """Return the command that repeats a run; None for one that was not made from a config."""
    if not _is_config(_as_toml(view.run)):
        return None
    config = CONFIG if view.folder is None else str(view.folder / CONFIG)
    return f"fedclade run {shlex.quote(config)}"


_SPREAD_LIST = re.compile(r"\[\n((?: {4}[^\n]*[^\n\[{],\n)+)\]")
"""A list as it is written with an entry a line, none of which has lines of its own."""


def _in_one_line(found: re.Match[str]) -> str:
    """Return a list in one line, if it is short."""
    entries = [line.strip().removesuffix(",") for line in found[1].splitlines()]
    line = f"[{', '.join(entries)}]"
    return line if len(line) <= LONGEST_LIST else found[0]


def _as_toml(run: Run) -> str:
    """Return a run's config without what only a run folder has."""
    config = {key: value for key, value in run.config.items() if key not in WRITTEN_ONLY}
    return to_toml(config).strip()


@lru_cache
def _is_config(toml: str) -> bool:
    """Return whether a run can be made from a config; cached, as the page of a run in progress is built often."""
    try:
        with reading_folder(trust=False):  # to show a page must run no code of whoever wrote the folder
            check_config(tomllib.loads(toml))
    except UntrustedNameError:
        return True
    except ConfigError:
        return False
    return True


def as_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a config as text, by dotted names.

    >>> as_texts({"seed": 1, "model": {"freeze": ["conv1.*", "conv2.*"], "adapter": {"rank": 8}}})
    {'seed': '1', 'model.freeze': 'conv1.*, conv2.*', 'model.adapter.rank': '8'}
    """
    settings = flat({key: value for key, value in config.items() if key not in WRITTEN_ONLY})
    return {
        key: (", ".join(map(str, cast("list[Any]", value))) or NONE) if isinstance(value, list) else str(value)
        for key, value in settings.items()
    }


# The numbers at the head of a page.


def run_cards(view: RunView) -> list[Card]:
    """Return what a run comes to: scores, clusters, recovery of the true ones, bytes, time, privacy if it has any."""
    s = view.run.summary
    clusters, seconds = s["clusters"], s["seconds"]
    known = "" if clusters["true"] is None else f"{clusters['true']} true"
    score, *others = Score.all_of(s)
    worst = f"mean {score.label} of the worst {count(-(-len(view.scores) // 10), 'client')}"
    cards = [_score(view), Card("Worst tenth", score.text(score.worst_tenth(s)), worst)]
    cards += [Card(each.title, each.text(each.mean(s)), _std(each, s)) for each in others]
    if chosen := s.get("chosen"):
        there = f"{score.text(score.of_chosen(s, 'validation'))} on validation data"
        if last := s.get("last"):
            there += f"; its models are kept. Round {last['round']}: {score.text(last['test'].get(score.name))}"
        cards.append(
            Card("Chosen round", score.text(score.of_chosen(s)), f"{score.label} of round {chosen['round']}; {there}")
        )
    if stopped := s.get("stopped"):
        cards.append(
            Card("Stopped", f"round {stopped['round']}", f"of {view.run.config.get('rounds')}: {stopped['why']}")
        )
    sizes = clusters["sizes"]
    each = (
        f"{count(sizes[0], 'client')} each"
        if len(set(sizes)) == 1 and len(sizes) > 1
        else f"largest {max(sizes, default=0)}"
    )
    cards.append(Card("Clusters", f"{clusters['found']:,}", ", ".join(filter(None, [known, each]))))
    if clusters["ari"] is not None:
        ari, below = clusters["ari"], f"NMI {number(clusters['nmi'])}; 1 is the truth"
        if sum(sizes) < s["clients"] and (assigned := clusters.get("ari_assigned")) is not None:
            ari, below = assigned, f"of {sum(sizes):,} clients in a cluster; {number(ari)} of all"
        cards.append(Card("ARI", number(ari), below))
    if personal := personal_part(view.run):
        what = f"{personal.numbers} of a model: {shortened(personal.names, limit=3)}"
        cards.append(Card("Stays with clients", percent(personal.share), what))
    if own := s.get("own_models"):
        cards.append(
            Card("Served with their own", count(own, "client"), f"of {s['clients']:,}, by models of their own")
        )
    both = f"{traffic(s['bytes_up'])} up, {traffic(s['bytes_down'])} down"
    cards.append(Card("Traffic", traffic(s["bytes_up"] + s["bytes_down"]), both))
    cards.append(Card("Time", duration(seconds["total"]), f"{duration(seconds['train'])} training, on {s['device']}"))
    if (privacy := s.get("privacy")) and privacy["epsilon"] is not None:
        level = privacy.get("level", "client")
        cards.append(Card("Privacy", f"ε = {privacy['epsilon']:.3g}", f"at δ = {privacy['delta']:g}, {level} level"))
    return cards


def _score(view: RunView) -> Card:
    """Return the card of the mean score, with the difference to the run that it is compared with."""
    summary, score = view.run.summary, view.score
    mean = score.mean(summary)
    if view.against is not None:
        base = Outcome.of(view.against)
        if mean is not None and (other := base.mean_score(base.rows)) is not None:
            gain, trend = score.gain(mean, other)
            return Card(score.title, score.text(mean), f"{gain} against {view.against_label}", trend)
    return Card(score.title, score.text(mean), _std(score, summary))


def _std(score: Score, summary: Mapping[str, Any]) -> str:
    scored = score.clients(summary)
    if score.mean(summary) is None:
        return f"undefined for {count(scored.without, 'client')}"
    over = scored.of_clients if scored.without else "clients"
    return f"std {score.text(summary[score.name]['std'])} over {over}"


SECTIONS = (
    *(scores_section, tree_section, similarity_section, dendrogram_section, sankey_section, spread_section),
    *(norms_section, checks_section, adversaries_section, faults_section, newcomers_section, setting_section),
)
"""In the order of the page. One that has nothing to show of a run returns None."""


def run_page(view: RunView) -> Page:
    """Return the page of a run; sections without data are left out."""
    s = view.run.summary
    name, _, details = s["data"].partition(", ")
    parts = [details, s["model"], count(s["rounds"], "round"), f"seed {s['seed']}", f"{s['device']}"]
    found = [section for make in SECTIONS if (section := make(view)) is not None]
    return Page(f"{s['algorithm']} on {name}", ", ".join(filter(None, parts)), run_cards(view), found)


def write_report(run: Run, path: str | Path = "report.html") -> Path:
    """Write the report of a run as one HTML page that needs no network; return where it is.

    Raises
    ------
    RunError
        If it cannot be written.
    MissingExtraError
        If jinja2 or plotly is not installed.
    """
    return write_page(run_page(RunView(run)), Path(path))
