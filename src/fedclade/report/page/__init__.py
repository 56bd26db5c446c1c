"""HTML reports: the page of a run, of a comparison of runs, of an inspection, and of a live run.

Each page is one HTML file that needs no other files and no network connection.
"""

from typing import TYPE_CHECKING

from fedclade.core import lazy_names

if TYPE_CHECKING:
    from fedclade.report.page.address import PORT
    from fedclade.report.page.comparison import REPORT, comparison_page, run_labels
    from fedclade.report.page.dashboard import Dashboard
    from fedclade.report.page.inspection import (
        describe_inspection,
        inspection_page,
        inspection_tables,
    )
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
    "describe_inspection",
    "inspection_page",
    "inspection_tables",
    "page_html",
    "run_labels",
    "run_page",
    "section_html",
    "state_json",
    "write_page",
    "write_report",
]

if not TYPE_CHECKING:  # a type checker knows the names from the imports above
    __getattr__ = lazy_names(__name__)
