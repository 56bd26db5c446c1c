"""Check pages of the built site in a browser: ``python docs/check_pages.py [SITE] [PAGE ...]``.

Each page is opened on a phone and on a desktop, in light and in dark mode. The script fails on
findings of axe-core (https://github.com/dequelabs/axe-core) that are serious or critical, on a page
that is wider than the window, on parts that the Tab key does not reach, on a focus that is not
seen, on errors of scripts, and on requests that leave the site. SITE is
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
    "secure-aggregation-protocol.html",
    "natural.html",
    "methods/cfl.html",
    "reference/algorithms.html",
    "notebooks/quick-start.html",
)
"""A page of each kind."""

WIDTHS = (390, 1280)
SCHEMES = {"light": "default", "dark": "slate"}
"""Colours that a browser asks for, and the name of the theme's colours for them."""

FAILING = ("serious", "critical")
EXAMPLES = 3
"""Places of a page that are named for each finding."""

PLACES = 3
"""Elements of the same kind whose contrast is measured.

axe-core needs about ten milliseconds for the contrast of an element, and pages of the reference
have thousands of elements that look the same.
"""

RUN = """
({contrast, places}) => {
  if (!contrast) {
    return axe.run({resultTypes: ["violations"], rules: {"color-contrast": {enabled: false}}});
  }
  const name = element => element.tagName + "." + [...element.classList].sort().join(".");
  const seen = new Map();
  const chosen = [];
  for (const element of document.body.querySelectorAll("*")) {
    const texts = [...element.childNodes].filter(node => node.nodeType === Node.TEXT_NODE);
    if (!texts.some(node => node.data.trim()) || !element.checkVisibility()) continue;
    const colours = getComputedStyle(element);
    const parents = [element, element.parentElement, element.parentElement.parentElement];
    const kind = [colours.color, colours.fontSize, ...parents.filter(Boolean).map(name)].join(" ");
    seen.set(kind, (seen.get(kind) ?? 0) + 1);
    if (seen.get(kind) <= places) chosen.push(element);
  }
  return axe.run(chosen, {resultTypes: ["violations"], runOnly: ["color-contrast"]});
}
"""
"""Function of JavaScript that runs axe-core.

It runs the rule for contrast, on some elements of each kind, or all other rules on the whole page.
"""


PATIENCE = 180_000
"""Milliseconds after which a step fails: a busy machine is slow, which is no finding."""

EMPTY_INDEX = {
    "config": {"lang": ["en"], "separator": " ", "pipeline": [], "fields": {}},
    "docs": [],
}
"""An index for the search without pages: a browser needs seconds to read the site's own one."""

STEPS = 10
"""Presses of the Tab key from the top of a page, by which the navigation must be reached."""

FOCUS = """
() => {
  const parts = {
    ".md-search": "search", ".md-tabs, .md-sidebar--primary": "navigation", ".md-content": "text",
  };
  const focused = document.activeElement;
  const part = Object.keys(parts).find(selector => focused.closest(selector));
  const shown = focused.matches(".md-option")
    ? focused.parentElement.querySelector("label:not([hidden])") : focused;
  const {outlineStyle, outlineWidth} = getComputedStyle(shown);
  const box = shown.getBoundingClientRect();
  const inside = box.width > 0 && box.right > 0 && box.left < innerWidth
    && box.bottom > 0 && box.top < innerHeight;
  const marked = outlineStyle !== "none" && parseFloat(outlineWidth) > 0;
  const name = `${focused.tagName} ${focused.className}`;
  return [parts[part] ?? "", name, inside && (marked || focused.matches("input[type=text]"))];
}
"""
"""Function of JavaScript that returns the part of the page with the focus, its element, and whether the focus is seen.

A text field shows the focus by its cursor, and the switch of colours by the outline of its label.
"""


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
                for finding, place in check(chromium, f"{address}{page}", width):
                    findings.setdefault(finding, []).append(f"{page} ({width}): {place}")
    for finding, places in findings.items():
        print("\n    ".join([finding, *places]))
    print(f"{len(pages)} pages, {len(findings)} findings")
    sys.exit(1 if findings else 0)


def check(chromium: Browser, url: str, width: int) -> Iterator[tuple[str, str]]:
    """Yield findings on a page at a width, in light and dark mode: what is wrong, and where."""
    page = chromium.new_page(
        viewport={"width": width, "height": 900}, color_scheme="light", reduced_motion="reduce"
    )
    page.set_default_timeout(PATIENCE)
    errors: list[tuple[str, str]] = []
    requests: list[str] = []
    page.on("pageerror", lambda error: errors.append(("error of a script", str(error))))
    page.on("request", lambda request: requests.append(request.url))
    page.route("**/search_index.json", lambda route: route.fulfill(json=EMPTY_INDEX))
    page.goto(url)
    yield from overflow(page)
    yield from keyboard(page)
    page.evaluate(Axe().axe_script)
    yield from violations(page, contrast=False)
    for scheme, name in SCHEMES.items():
        page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        page.evaluate(
            f"document.querySelector('[name=__palette][data-md-color-scheme={name}]').click()"
        )
        page.wait_for_selector(f'body[data-md-color-scheme="{name}"]', state="attached")
        for finding, place in violations(page, contrast=True):
            yield finding, f"in {scheme} mode, {place}"
    yield from errors
    origin = "/".join(url.split("/")[:3]) + "/"
    for request in requests:
        if not request.startswith((origin, "data:", "blob:")):
            yield "a request leaves the site", request
    page.close()


def keyboard(page: Page) -> Iterator[tuple[str, str]]:
    """Yield findings if the Tab key leads past the search, the navigation or the text, or the focus is not seen."""
    reached: set[str] = set()
    for _ in range(STEPS):
        page.keyboard.press("Tab")
        part, name, visible = page.evaluate(FOCUS)
        reached.add(part)
        if not visible:
            yield "the focus of the keyboard is not seen", name
        if part == "navigation":
            break
    page.locator(".md-skip").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    part, name, visible = page.evaluate(FOCUS)
    reached.add(part)
    if not visible:
        yield "the focus of the keyboard is not seen", name
    for missing in sorted({"search", "navigation", "text"} - reached):
        yield "the Tab key does not reach a part of the page", missing


def violations(page: Page, *, contrast: bool) -> Iterator[tuple[str, str]]:
    """Yield serious findings of axe-core on the contrast of texts, or by all other rules."""
    result = page.evaluate(RUN, {"contrast": contrast, "places": PLACES})
    for violation in result["violations"]:
        if violation["impact"] in FAILING:
            targets = [str(node["target"][0]) for node in violation["nodes"]]
            name = f"{violation['impact']}: {violation['id']}: {violation['help']}"
            yield name, f"{len(targets)} times, such as {', '.join(targets[:EXAMPLES])}"


def overflow(page: Page) -> Iterator[tuple[str, str]]:
    """Yield a finding if the page is wider than the window."""
    widths = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    content, window = page.evaluate(widths)
    if content > window:
        yield "the page is wider than the window", f"{content} pixels"


if __name__ == "__main__":
    main()
