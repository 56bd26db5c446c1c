"""HTML page of one run: main results as cards, sections, and the command that repeats the run."""

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
from fedclade.report.page.faults import (
    adversaries_section,
    divergence_section,
    faults_section,
    newcomers_section,
    warnings_section,
)
from fedclade.report.page.gains import distinction_section, gain_cards, gains_section
from fedclade.report.page.sankey import sankey_section
from fedclade.report.page.section import Card, Page, Section, Table, write_page
from fedclade.report.page.served import served_section
from fedclade.report.page.tree import tree_section
from fedclade.report.queries import personal_part, waits_for_nodes
from fedclade.report.run_view import RunView
from fedclade.report.score import Score
from fedclade.runs import ADVICE, CONFIG, Run, to_toml

# The config with every default, and the command that repeats the run.

LONGEST_LIST = 80
"""Largest number of characters of a list that is written in one line."""


def setting_section(view: RunView) -> Section:
    """Return the page section with the resolved config, versions, and command to repeat the run."""
    run = view.run
    versions = run.config.get("versions", {})
    tables: list[Table] = []
    if versions:
        rows = [[name, str(version)] for name, version in versions.items()]
        tables.append(Table("Versions", ["package", "version"], rows))
    texts: dict[str, str] = {}
    command = repeat_command(view)
    if command is not None:
        texts["The command that repeats the run"] = command
        caption = "The complete configuration of the run. The same seed gives the same run."
    else:
        caption = (
            "The complete configuration of the run. It was started from Python, and the same call "
            "repeats it."
        )
    texts["Config, with every default filled in"] = _SPREAD_LIST.sub(_join_lines, _as_toml(run))
    return Section("config", "Config", caption, tables=tables, texts=texts)


def repeat_command(view: RunView) -> str | None:
    """Return the command that repeats a run; None for a run that no config describes completely.

    A run that was started from Python, for example with a user's own model, may have no such
    config.
    """
    if not _is_config(_as_toml(view.run)):
        return None
    if view.folder is None:
        config = CONFIG
    else:
        config = str(view.folder / CONFIG)
    return f"fedclade run {shlex.quote(config)}"


_SPREAD_LIST = re.compile(r"\[\n((?: {4}[^\n]*[^\n\[{],\n)+)\]")
"""Pattern of a list in TOML that has one line for each entry."""


def _join_lines(found: re.Match[str]) -> str:
    """Return a matched list in one line if it is short, and unchanged otherwise.

    It is the replacement function for the pattern ``_SPREAD_LIST``.
    """
    entries = [line.strip().removesuffix(",") for line in found[1].splitlines()]
    line = f"[{', '.join(entries)}]"
    return line if len(line) <= LONGEST_LIST else found[0]


def _as_toml(run: Run) -> str:
    """Return a run's config as TOML, without the keys that only run folders have."""
    config = {key: value for key, value in run.config.items() if key not in WRITTEN_ONLY}
    return to_toml(config).strip()


@lru_cache
def _is_config(toml: str) -> bool:
    """Return whether a text in TOML is a valid config, from which a run can be started.

    A config that names code of a user as ``module:name`` counts as valid, as this code is not
    imported for the check.

    The result is cached because the page of a run in progress is built often.
    """
    try:
        # Building a page must not run code that the author of the run folder named in its config,
        # as importing ``module:name`` would.
        with reading_folder(trust=False):
            check_config(tomllib.loads(toml))
    except UntrustedNameError:
        return True
    except ConfigError:
        return False
    return True


def as_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a config as texts, by dotted names.

    >>> as_texts({"seed": 1, "model": {"freeze": ["conv1.*", "conv2.*"], "adapter": {"rank": 8}}})
    {'seed': '1', 'model.freeze': 'conv1.*, conv2.*', 'model.adapter.rank': '8'}
    """
    settings = flat({key: value for key, value in config.items() if key not in WRITTEN_ONLY})
    return {key: _write_setting(value) for key, value in settings.items()}


def _write_setting(value: object) -> str:
    """Return the value of a setting as text; the entries of a list are separated by commas."""
    if isinstance(value, list):
        entries = [str(entry) for entry in cast("list[Any]", value)]
        return ", ".join(entries) or NONE
    return str(value)


# Cards with the main results, at the head of a page.


def run_cards(view: RunView) -> list[Card]:
    """Return cards with a run's main results: scores, clusters, traffic, time and privacy."""
    summary = view.run.summary
    return [
        *_score_cards(view),
        *gain_cards(view),
        *_round_cards(view),
        *_cluster_cards(summary),
        *_model_cards(view),
        *_cost_cards(view.run),
    ]


def _score_cards(view: RunView) -> list[Card]:
    """Return cards with the mean score, the worst tenth of the clients, and all other metrics."""
    summary = view.run.summary
    score, *others = Score.all_of(summary)
    n_worst = -(-len(view.scores) // 10)
    worst = f"mean {score.label} of the worst {count(n_worst, 'client')}"
    cards = [_mean_card(view), Card("Worst tenth", score.text(score.worst_tenth(summary)), worst)]
    for other in others:
        value = other.text(other.mean(summary))
        cards.append(Card(other.title, value, _describe_spread(other, summary)))
    return cards


def _mean_card(view: RunView) -> Card:
    """Return a card with the mean score and, if set, the difference to the run to compare with."""
    summary = view.run.summary
    score = view.score
    mean = score.mean(summary)
    difference, trend = view.difference
    if difference:
        return Card(score.title, score.text(mean), difference, trend)
    return Card(score.title, score.text(mean), _describe_spread(score, summary))


def _describe_spread(score: Score, summary: Mapping[str, Any]) -> str:
    """Return a text with the standard deviation of a score over the clients.

    If no client has a score, the text states so.
    """
    scored = score.clients(summary)
    if score.mean(summary) is None:
        return f"undefined for {count(scored.without, 'client')}"
    clients = scored.of_clients if scored.without else "clients"
    return f"std {score.text(summary[score.name]['std'])} over {clients}"


def _round_cards(view: RunView) -> list[Card]:
    """Return cards with the round that is best on validation data, and the round of an early stop.

    Empty for a run with neither.
    """
    summary = view.run.summary
    score = Score.all_of(summary)[0]
    cards: list[Card] = []
    if chosen := summary.get("chosen"):
        validation = score.text(score.of_chosen(summary, "validation"))
        note = f"test {score.label} of round {chosen['round']}; {validation} on validation data"
        if last := summary.get("last"):
            last_score = score.text(last["test"].get(score.name))
            note += f"; its models are stored. Round {last['round']}: {last_score}"
        cards.append(Card("Chosen round", score.text(score.of_chosen(summary)), note))
    if progress := summary.get("unfinished"):
        note = f"of {progress['of']}; the page shows the newest checkpoint"
        cards.append(Card("Unfinished", f"round {progress['round']}", note))
    if stopped := summary.get("stopped"):
        planned = view.run.config.get("rounds")
        note = f"of {planned}: {stopped['why']}"
        cards.append(Card("Stopped", f"round {stopped['round']}", note))
    return cards


def _cluster_cards(summary: Mapping[str, Any]) -> list[Card]:
    """Return cards with the number of clusters and their agreement with the true clusters.

    If the true clusters are unknown, the agreement is left out. For a run that diverged, there is
    only one card, with the number of diverged clients.
    """
    if diverged := summary.get("diverged"):
        note = f"of {count(diverged['of'], 'client')}, from round {diverged['round']} on: {ADVICE}"
        return [Card("Diverged", f"{diverged['clients']:,}", note, "bad")]
    clusters = summary["clusters"]
    sizes = clusters["sizes"]
    notes: list[str] = []
    if clusters["true"] is not None:
        notes.append(f"{clusters['true']} true")
    if len(set(sizes)) == 1 and len(sizes) > 1:
        notes.append(f"{count(sizes[0], 'client')} each")
    else:
        notes.append(f"largest {max(sizes, default=0)}")
    cards = [Card("Clusters", f"{clusters['found']:,}", ", ".join(notes))]
    if clusters.get("stability") is not None:
        note = f"stability {number(clusters['stability'])}"
        cards.append(Card("Stable groups", str(len(clusters["stable_sizes"]) or "none"), note))
    ari = clusters["ari"]
    if ari is None:
        return cards
    ari_clustered = clusters.get("ari_assigned")
    if sum(sizes) < summary["clients"] and ari_clustered is not None:
        note = f"of {sum(sizes):,} clients in a cluster; {number(ari)} of all"
        cards.append(Card("ARI", number(ari_clustered), note))
    else:
        cards.append(Card("ARI", number(ari), f"NMI {number(clusters['nmi'])}; 1 is the truth"))
    return cards


def _model_cards(view: RunView) -> list[Card]:
    """Return cards on models, or parts of models, that belong to single clients.

    If a part of the model is personal, a card has its share of the model's parameters. If clients
    have models of their own, a card has the number of these clients.
    """
    summary = view.run.summary
    cards: list[Card] = []
    if personal := personal_part(view.run):
        note = f"{personal.numbers} of a model: {shortened(personal.names, limit=3)}"
        cards.append(Card("Stays on clients", percent(personal.share), note))
    if own := summary.get("own_models"):
        note = f"of {summary['clients']:,}, evaluated with it"
        cards.append(Card("Clients with an own model", f"{own:,}", note))
    return cards


def _cost_cards(run: Run) -> list[Card]:
    """Return cards with traffic, time and, if there is a privacy budget, privacy."""
    summary = run.summary
    up = summary["bytes_up"]
    down = summary["bytes_down"]
    seconds = summary["seconds"]
    time_label = "Time of the rounds" if waits_for_nodes(run) else "Time"
    time_note = f"{duration(seconds['train'])} training, on {summary['device']}"
    cards = [
        Card("Traffic", traffic(up + down), f"{traffic(up)} up, {traffic(down)} down"),
        Card(time_label, duration(seconds["total"]), time_note),
    ]
    if fallback := summary.get("engine_fallback"):
        engine, _, reason = fallback.partition(", because ")
        cards.append(Card("Engine", engine, f"because {reason}"))
    if steps := summary.get("steps"):
        note = "" if steps["ratio"] is None else f"{steps['ratio']:.2f} × FedAvg's"
        cards.append(Card("Training steps", f"{steps['total']:,}", note))
    privacy = summary.get("privacy")
    if privacy and privacy["epsilon"] is not None:
        note = f"at δ = {privacy['delta']:g}, {privacy.get('level', 'client')} level"
        cards.append(Card("Privacy", f"ε = {privacy['epsilon']:.3g}", note))
    return cards


SECTIONS = (
    warnings_section,
    divergence_section,
    gains_section,
    distinction_section,
    scores_section,
    served_section,
    tree_section,
    similarity_section,
    dendrogram_section,
    sankey_section,
    spread_section,
    norms_section,
    checks_section,
    adversaries_section,
    faults_section,
    newcomers_section,
    setting_section,
)
"""Functions that return the sections, in the order of the page; None for an empty section."""


CLUSTER_SECTIONS = (
    distinction_section,
    tree_section,
    similarity_section,
    dendrogram_section,
    sankey_section,
    checks_section,
)
"""Functions that return sections about clusters, which the page of a diverged run leaves out."""


def run_page(view: RunView) -> Page:
    """Return the HTML page of a run; sections without content are left out."""
    summary = view.run.summary
    name, _, details = summary["data"].partition(", ")
    parts = [
        details,
        summary["model"],
        count(summary["rounds"], "round"),
        f"seed {summary['seed']}",
        summary["device"],
    ]
    has_clusters = not view.run.has_diverged
    sections = [make(view) for make in SECTIONS if has_clusters or make not in CLUSTER_SECTIONS]
    return Page(
        title=f"{summary['algorithm']} on {name}",
        subtitle=", ".join(part for part in parts if part),
        cards=run_cards(view),
        sections=[section for section in sections if section is not None],
    )


def write_report(run: Run, path: str | Path = "report.html") -> Path:
    """Write the report of a run as one HTML page that needs no network connection.

    Parameters
    ----------
    run
        The run.
    path
        File to write; an existing file is replaced.

    Returns
    -------
    Path
        The written file.

    Raises
    ------
    RunError
        If the file cannot be written.
    MissingExtraError
        If jinja2 or plotly is not installed.
    """
    return write_page(run_page(RunView(run)), Path(path))
