"""A browser for tests: Chromium without a window, watched for errors and for requests that leave the page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
)

HOW = "install one, such as with: apt-get install chromium; or name one in the environment variable CHROME"


def find_chromium() -> str:
    """Return the path of a Chromium; without one, tests are skipped, or fail if ``CHROME`` says there is one."""
    named = [os.environ["CHROME"]] if "CHROME" in os.environ else []
    found = next((path for name in (*named, *NAMES) if (path := shutil.which(name))), None)
    if found is None:
        told = f"no Chromium was found under {', '.join((*named, *NAMES))}; {HOW}"
        pytest.fail(told) if named else pytest.skip(told)
    return found


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a browser."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_chromium(), args=[*QUIET, "--disable-sync", "--no-first-run"]
        )
        yield browser
        browser.close()


@dataclass
class Watched:
    """A page, and what went wrong on it."""

    page: Page
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def drawn(self, scheme: str, width: int) -> Page:
        """Return the page once all figures are drawn by day or by night, and at some width."""
        self.page.wait_for_selector(f'html[data-drawn="{scheme} {width}"]', state="attached")
        return self.page

    def check(self) -> None:
        """Check that nothing went wrong, and that the page fetched nothing but itself."""
        assert self.errors == []
        assert self.requests == [self.page.url]


@contextmanager
def visit(
    browser: Browser, url: str, *, width: int = 1280, scheme: str = "light"
) -> Iterator[Watched]:
    """Open a page at some width, by day or by night."""
    narrow = width < 600
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if scheme == "dark" else "light",
        reduced_motion="reduce",
        has_touch=narrow,
        is_mobile=narrow,
    )
    watched = Watched(context.new_page())

    def note(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            watched.errors.append(message.text)

    def ask(request: Request) -> None:
        if not request.url.startswith(("data:", "blob:")):
            watched.requests.append(request.url)

    watched.page.on("console", note)
    watched.page.on("pageerror", lambda error: watched.errors.append(str(error)))
    watched.page.on("request", ask)
    watched.page.goto(url)
    yield watched
    context.close()
