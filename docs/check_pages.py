"""Check pages of the built site in a browser: ``python docs/check_pages.py [SITE] [PAGE ...]``.

Each page is opened on a phone and on a desktop, in light and in dark mode. The script fails on
findings of axe-core (https://github.com/dequelabs/axe-core) that are serious or critical, on a page
that is wider than the window, on errors of scripts, and on requests that leave the site. SITE is
``site`` by default, which ``make docs`` writes; PAGE is a page of it, such as ``faq.html``.

The script needs the extra ``dev`` and the browser Chromium, whose path may be in the environment
variable ``CHROME``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from gallery import browser
from playwright.sync_api import Browser, Page

PAGES = (
    "index.html",
    "quick-start.html",
    "faq.html",
    "glossary.html",
    "which-tool.html",
    "own-data.html",
    "monitoring.html",
    "federation.html",
    "report.html",
    "rcfl.html",
    "natural.html",
    "methods/cfl.html",
    "reference/algorithms.html",
    "notebooks/quick-start.html",
)
"""A page of each kind."""

WIDTHS = (390, 1280)
SCHEMES = ("light", "dark")
FAILING = ("serious", "critical")
EXAMPLES = 3
"""Places of a page that are named for each finding."""


class Handler(SimpleHTTPRequestHandler):
    """Handler of a web server that does not log."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log nothing."""


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve a folder on this machine; yield the address."""
    handler = partial(Handler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def main() -> None:
    """Check pages, print what is found, and exit with 1 if anything is."""
    site = Path(sys.argv[1] if len(sys.argv) > 1 else "site")
    pages = sys.argv[2:] or PAGES
    findings: dict[str, list[str]] = {}
    with served(site) as address, browser() as chromium:
        for page in pages:
            print(page, flush=True)
            for width in WIDTHS:
                for scheme in SCHEMES:
                    for finding, place in check(chromium, f"{address}{page}", width, scheme):
                        shown = f"{page} ({width}, {scheme}): {place}"
                        findings.setdefault(finding, []).append(shown)
    for finding, places in findings.items():
        print("\n    ".join([finding, *places]))
    print(f"{len(pages)} pages, {len(findings)} findings")
    sys.exit(1 if findings else 0)


def check(chromium: Browser, url: str, width: int, scheme: str) -> Iterator[tuple[str, str]]:
    """Yield findings on a page at a width, in light or dark mode: what is wrong, and where."""
    page = chromium.new_page(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if scheme == "dark" else "light",
        reduced_motion="reduce",
    )
    errors: list[tuple[str, str]] = []
    requests: list[str] = []
    page.on("pageerror", lambda error: errors.append(("error of a script", str(error))))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(url)
    page.wait_for_load_state("networkidle")
    yield from overflow(page)
    for violation in Axe().run(page).response["violations"]:
        if violation["impact"] in FAILING:
            targets = [str(node["target"][0]) for node in violation["nodes"]]
            name = f"{violation['impact']}: {violation['id']}: {violation['help']}"
            yield name, f"{len(targets)} times, such as {', '.join(targets[:EXAMPLES])}"
    yield from errors
    origin = "/".join(url.split("/")[:3]) + "/"
    for request in requests:
        if not request.startswith((origin, "data:", "blob:")):
            yield "a request leaves the site", request
    page.close()


def overflow(page: Page) -> Iterator[tuple[str, str]]:
    """Yield a finding if the page is wider than the window."""
    widths = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    content, window = page.evaluate(widths)
    if content > window:
        yield "the page is wider than the window", f"{content} pixels"


if __name__ == "__main__":
    main()
