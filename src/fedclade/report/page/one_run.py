"""The page of one run, from its numbers to the command that repeats it."""

from __future__ import annotations

from pathlib import Path

from fedclade.report.formats import count
from fedclade.report.page.adversaries import adversaries_section
from fedclade.report.page.cards import run_cards
from fedclade.report.page.checks import checks_section
from fedclade.report.page.curves import norms_section, scores_section
from fedclade.report.page.dendrogram import dendrogram_section
from fedclade.report.page.document import write_page
from fedclade.report.page.faults import faults_section
from fedclade.report.page.newcomers import newcomers_section
from fedclade.report.page.sankey import sankey_section
from fedclade.report.page.section import Page
from fedclade.report.page.setting import setting_section
from fedclade.report.page.similarity import similarity_section
from fedclade.report.page.spread import spread_section
from fedclade.report.page.tree import tree_section
from fedclade.report.run_view import RunView
from fedclade.runs import Run

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
