"""What mkdocs calls while it builds the site: pages that are made from the code, and files that pages link to.

A page of ``docs/`` may link to any file of the repository, as it does when it is read there. On the site such a link
leads to a page that shows the file.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import generated
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from plotly.offline import get_plotlyjs

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
"""Where a link of Markdown leads to: a path, and an anchor."""

SCRIPT = re.compile(r"<script\b([^>]*)>(.*?)</script>", re.DOTALL)
OUTPUT = 'class="jp-OutputArea-child'
"""The start of an output on the page of a notebook."""

LOG = get_plugin_logger("fedclade")
"""Log of the build, where a warning is an error with ``--strict``."""

PLOTLY = "assets/plotly.min.js"
"""What the figures of notebooks need, where these are executed."""

LANGUAGES = {
    ".py": "python",
    ".toml": "toml",
    ".sh": "bash",
    ".yml": "yaml",
    ".yaml": "yaml",
    ".json": "json",
}
PLAIN = ("", ".txt", ".bib", ".in", ".cff", ".conf", ".example")
LARGEST = 100_000
"""Bytes of a file that is shown whole."""


def made() -> dict[str, Callable[[], str]]:
    """Return what writes each page that is made from the code, by where the page is."""
    return generated.pages()


def on_startup(command: str, dirty: bool) -> None:
    """Let figures of notebooks, if these are executed, name their script rather than hold four megabytes of it."""
    os.environ.setdefault("PLOTLY_RENDERER", "notebook_connected")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    if config.plugins["mkdocs-jupyter"].config["execute"]:
        files.append(File.generated(config, PLOTLY, content=get_plotlyjs()))
    for page, write in made().items():
        files.append(File.generated(config, page, content=write()))
    wanted = [
        target
        for file in files.documentation_pages()
        if file.src_uri.endswith(".md")
        for target in _outside(file)
    ]
    there = set[str]()
    while wanted:
        path = wanted.pop()
        text = None if path in there else source_page(path)
        there.add(path)
        if text is not None:
            files.append(File.generated(config, page_of(path), content=text))
            wanted += _children(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files of the repository lead to their pages, and put a method's file beside it."""
    uri = page.file.src_uri
    name = posixpath.splitext(posixpath.basename(uri))[0]
    if posixpath.dirname(uri) == "methods" and name != "index":
        markdown = generated.with_file(name, markdown)
        page.meta["hide"] = ["navigation", "toc"]
    return (
        markdown if uri.startswith("source/") else LINK.sub(lambda link: _led(link, uri), markdown)
    )


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leave out what the page of a notebook would load from elsewhere; its figures take the site's own plotly."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    if config.plugins["mkdocs-jupyter"].config["execute"] and OUTPUT not in html:
        LOG.warning("%s was executed, but its page has no output", page.file.src_uri)
    plotly = posixpath.relpath(PLOTLY, posixpath.dirname(page.file.src_uri))

    def kept(script: re.Match[str]) -> str:
        about, text = script.groups()
        if "cdn.plot.ly" in script[0]:
            return f'<script src="{plotly}"></script>'
        outside = re.search(r'src="(https?:|")|mathjax', about) or re.search(
            r"""import\s*\(?["']https?:""", text
        )
        return "" if outside else script[0]

    return SCRIPT.sub(kept, html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Name the dialog of the search for screen readers, which the theme leaves without a name."""
    search = 'data-md-component="search" role="dialog"'
    return output.replace(search, f'{search} aria-label="Search"')


def page_of(path: str) -> str:
    """Return where the page of a file or folder of the repository is."""
    return f"source/{path.replace('/.', '/dot-')}.md"


def source_page(path: str) -> str | None:
    """Return a page that shows a file, or what a folder holds; None if there is none."""
    place = ROOT / path
    head = f"---\nsearch:\n  exclude: true\nhide: [navigation, toc]\n---\n# {path}\n\n"
    if place.is_dir():
        here = posixpath.dirname(page_of(path))
        listed = [(child, posixpath.relpath(page_of(child), here)) for child in _children(path)]
        return (
            head
            + "\n".join(f"- [{posixpath.relpath(child, path)}]({link})" for child, link in listed)
            + "\n"
        )
    if not place.is_file():
        return None
    text = place.read_text(encoding="utf-8")
    if len(text) > LARGEST:
        text = f"{text[:LARGEST]}\n…\n"
    return f"{head}`````{LANGUAGES.get(place.suffix, 'markdown' if place.suffix == '.md' else 'text')}\n{text}\n`````\n"


def _children(path: str) -> Iterator[str]:
    """Yield the files that a folder's page lists."""
    place = ROOT / path
    for child in sorted(place.iterdir()) if place.is_dir() else ():
        shown = child.suffix in (*LANGUAGES, *PLAIN, ".md") and not child.name.startswith(
            (".", "__pycache__")
        )
        if child.is_file() and shown:
            yield f"{path}/{child.name}"


def _outside(file: File) -> Iterator[str]:
    """Yield the files of the repository, outside ``docs``, that a page links to."""
    for target, _ in _targets(file.content_string, file.src_uri):
        if target.startswith("../"):
            yield target.removeprefix("../")


def _targets(text: str, uri: str) -> Iterator[tuple[str, str]]:
    """Yield where the links of a page lead to, seen from ``docs``, and their anchors."""
    for link in LINK.finditer(text):
        yield posixpath.normpath(posixpath.join(posixpath.dirname(uri), link[1])), link[2] or ""


def _led(link: re.Match[str], uri: str) -> Any:
    target = posixpath.normpath(posixpath.join(posixpath.dirname(uri), link[1]))
    if not target.startswith("../"):
        return link[0]
    path = target.removeprefix("../")
    page = "index.md" if path == "README.md" else page_of(path)
    return posixpath.relpath(page, posixpath.dirname(uri) or ".")
