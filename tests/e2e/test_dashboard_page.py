"""The dashboard in a browser: opened late, reloaded, and opened on runs that have ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page
from tests.browser import chromium, visit

from fedclade.config import check_config
from fedclade.core import RunInterrupted, UpdateError
from fedclade.report.page import dashboard as dashboard_module
from fedclade.report.page.dashboard import HOST, Dashboard
from fedclade.runs import Callback, FollowedRun, LiveLog, RoundRecord
from fedclade.runs.store import Run

SPLITTING = {
    "rounds": 3,
    "data": {
        "name": "digits",
        "clients": 12,
        "samples_per_client": 40,
        "shift": "label_permutation",
        "clusters": 4,
    },
    "model": {"name": "mclr"},
    "algorithm": {"name": "cfl", "eps1": 100.0, "eps2": 1e-6, "gamma_max": 0.0},
}
"""A run that splits its clusters in every round, so that pages have a menu of several figures."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def rounds() -> list[Run]:
    """Return the run after each of its rounds."""
    runs: list[Run] = []

    class Keeping(Callback):
        def on_round(self, record: RoundRecord, /) -> None:
            run = record.so_far()
            assert run is not None
            runs.append(run)

    config = check_config(SPLITTING)
    config.run(config.federation(), callbacks=[Keeping()])
    return runs


@pytest.fixture(autouse=True)
def _nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_module, "PATIENCE", 0.0)


def wait_for_round(page: Page, number: int) -> None:
    """Wait until the page shows a round, with the sections of a page whose cluster has split."""
    page.wait_for_selector(f'html[data-round="{number}"]', state="attached")
    page.wait_for_selector("#sections section#tree svg, #sections section#tree .plot")
    headings = page.locator("#sections section h2").all_inner_texts()
    assert len(headings) == page.locator("#links li").count() >= 3
    assert page.locator(".choice select").count() >= 1, "no menu: the test shows nothing"


def test_a_page_that_is_opened_after_the_first_split_shows_the_run(
    browser: Browser, rounds: list[Run], tmp_path: Path
):
    with Dashboard("mine", 3, tmp_path, 0) as dashboard:
        dashboard.show(rounds[1])
        with visit(browser, f"http://{HOST}:{dashboard.port}/") as watched:
            wait_for_round(watched.page, 2)
            watched.page.reload()
            wait_for_round(watched.page, 2)
            dashboard.show(rounds[2])
            wait_for_round(watched.page, 3)
            assert watched.errors == []


@pytest.mark.parametrize("over", [True, False], ids=["finished", "interrupted"])
def test_a_page_that_is_opened_on_the_last_round_shows_the_run(
    browser: Browser, rounds: list[Run], tmp_path: Path, over: bool
):
    with Dashboard("mine", 3, tmp_path, 0) as dashboard:
        dashboard.show(rounds[2], over=over)
        with visit(browser, f"http://{HOST}:{dashboard.port}/") as watched:
            wait_for_round(watched.page, 3)
            assert watched.errors == []
            text = watched.page.locator("#status").inner_text()
            assert text.startswith("Finished after 3 rounds" if over else "Round 3 of 3")


class Ending(Callback):
    """Ends the run after round 2, by an error or an interruption; or does not."""

    def __init__(self, state: str) -> None:
        self.state = state

    def on_round(self, record: RoundRecord, /) -> bool:
        if record.round == 2 and self.state == "failed":
            raise UpdateError("no client has replied")
        return record.round == 2 and self.state == "interrupted"


def run_to_its_end(state: str, *callbacks: Callback, **settings: Any) -> None:
    config = check_config({**SPLITTING, "checkpoint_every": 1})
    with suppress(UpdateError, RunInterrupted):
        config.run(config.federation(), callbacks=[*callbacks, Ending(state)], **settings)


ENDS = {
    "finished": "Finished after 3 rounds, accuracy ",
    "failed": "Failed after 2 of 3 rounds: no client has replied (accuracy ",
    "interrupted": "Interrupted after 2 of 3 rounds (accuracy ",
}


@pytest.mark.parametrize("state", ENDS)
def test_a_page_shows_how_the_run_of_its_process_ended(
    browser: Browser, tmp_path: Path, state: str
):
    with Dashboard("mine", 3, tmp_path, 0) as dashboard:
        run_to_its_end(state, dashboard)
        with visit(browser, dashboard.url) as watched:
            for _ in range(2):
                wait_for_round(watched.page, 3 if state == "finished" else 2)
                assert watched.page.locator("#status").inner_text().startswith(ENDS[state])
                watched.page.reload()
            assert watched.errors == []


@pytest.mark.parametrize("state", ENDS)
def test_a_page_shows_how_the_run_in_a_folder_ended(browser: Browser, tmp_path: Path, state: str):
    folder = tmp_path / "run"
    run_to_its_end(state, LiveLog(), folder=folder)
    with Dashboard("run", 0, folder, 0) as dashboard:
        dashboard.follow(FollowedRun(folder))
        with visit(browser, dashboard.url) as watched:
            for _ in range(2):
                wait_for_round(watched.page, 3 if state == "finished" else 2)
                assert watched.page.locator("#status").inner_text().startswith(ENDS[state])
                watched.page.reload()
            if state != "finished":  # the run is continued, and the open page goes on with it
                run_to_its_end("finished", LiveLog(), folder=folder)
                dashboard.follow(FollowedRun(folder))
                wait_for_round(watched.page, 3)
                assert watched.page.locator("#status").inner_text().startswith(ENDS["finished"])
            assert watched.errors == []
