"""Report of a run, or of several, as one HTML page without other files."""

from fedclade.report.page.comparison import REPORT, comparison_page, run_labels
from fedclade.report.page.dashboard import PORT, Dashboard
from fedclade.report.page.one_run import run_page, write_report
from fedclade.report.page.section import (
    Card,
    Page,
    Section,
    Table,
    page_html,
    section_html,
    state_json,
    write_page,
)
from fedclade.report.run_view import RunView

__all__ = [
    "PORT",
    "REPORT",
    "Card",
    "Dashboard",
    "Page",
    "RunView",
    "Section",
    "Table",
    "comparison_page",
    "page_html",
    "run_labels",
    "run_page",
    "section_html",
    "state_json",
    "write_page",
    "write_report",
]
