"""Pages to look into: the figures and tables of a section."""

from collections.abc import Callable
from typing import Any

import pytest

from fedclade.report.page import Page, RunView, Section, Table, run_page
from fedclade.runs.store.run import Run


@pytest.fixture
def page_of() -> Callable[..., Page]:
    def make(run: Run, *arguments: Any, **named: Any) -> Page:
        return run_page(RunView(run, *arguments, **named))

    return make


@pytest.fixture
def section() -> Callable[[Page, str], Section]:
    def find(page: Page, name: str) -> Section:
        return next(each for each in page.sections if each.id == name)

    return find


@pytest.fixture
def table() -> Callable[[Section, str], Table]:
    def find(section: Section, title: str) -> Table:
        return next(each for each in (*section.tables, *section.open_tables) if each.title == title)

    return find
