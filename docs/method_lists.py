"""Write the lists of methods in texts from the records of the methods.

    python docs/method_lists.py           # writes them
    python docs/method_lists.py --check   # names the files that are not as they would be written

The lists are the table of the README, the index of the methods' pages, their navigation on the
site, and the tables ``[algorithms]`` of the scenarios in ``configs``. Each stands between two
comments, and the rest of a file is left alone. A scenario may have lines of its own after the
second comment: for a method whose settings there are special, and for variants of a method.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from fedclade.algorithms import METHODS, TRUTH, Family, Method

ROOT = Path(__file__).parents[1]

FINDS_BY: Mapping[Family, str] = {
    "updates": "updates",
    "models": "models or losses",
    "data": "data",
    "given": "nothing: they are known, or there is one",
    "personal": "nothing: every client has a model, or a part of one",
}
"""What methods of a family find clusters by, in the order of the lists."""

MARKED = re.compile(
    r"(?P<begin>^[ ]*(?:<!--|#) methods: written by docs/method_lists\.py(?: for (?P<clusters>\d+) clusters)?[^\n]*\n)"
    r"(?P<list>.*?)"
    r"(?P<end>^[ ]*(?:<!--|#) methods: end)",
    re.DOTALL | re.MULTILINE,
)
"""A list between its two comments. That of a scenario says how many clusters its methods are given."""


def main() -> None:
    """Write all lists, or check them."""
    written = {path: written_list(path) for path in list_files()}
    stale = [path for path, text in written.items() if text != path.read_text(encoding="utf-8")]
    for path in stale:
        if "--check" not in sys.argv[1:]:
            path.write_text(written[path], encoding="utf-8")
        print(path.relative_to(ROOT))
    if "--check" in sys.argv[1:] and stale:
        raise SystemExit(
            "these differ from the methods' records; write them with: python docs/method_lists.py"
        )


def list_files() -> list[Path]:
    """Return the files that have a list of methods."""
    texts = [ROOT / "README.md", ROOT / "docs" / "methods" / "index.md", ROOT / "mkdocs.yml"]
    return texts + scenario_files()


def scenario_files() -> list[Path]:
    """Return the shipped scenarios."""
    return sorted((ROOT / "configs").glob("*/*.toml"))


def written_list(path: Path) -> str:
    """Return the text of a file with its list as the records have it."""
    text = path.read_text(encoding="utf-8")
    found = MARKED.search(text)
    if found is None:
        raise SystemExit(
            f"{path.relative_to(ROOT)} has no comments around a list of methods; see {Path(__file__).name}"
        )
    if path.suffix == ".toml":
        clusters = None if found["clusters"] is None else int(found["clusters"])
        lines = scenario_lines(path, text[found.end("end") :], clusters)
    elif path.suffix == ".yml":
        lines = [f"      - {method.name}: {method.page}" for method in by_family(METHODS)]
    elif path.name == "README.md":
        lines = readme_table()
    else:
        lines = family_table()
    # or Markdown takes the comment for a part of the table
    blank = "\n" if path.suffix == ".md" else ""
    body = blank + "".join(f"{line}\n" for line in lines) + blank
    return text[: found.start("list")] + body + text[found.start("end") :]


def by_family(methods: Iterable[Method]) -> list[Method]:
    """Return methods in the order of their families, and within a family in that of their records."""
    order = list(FINDS_BY)
    return sorted(methods, key=lambda method: order.index(family_of(method)))


def family_of(method: Method) -> Family:
    """Return the family of a method of fedclade, whose record has to name it."""
    if method.family is None:
        raise SystemExit(
            f"the record of {method.name} has no family: one of {', '.join(get_args(Family))}"
        )
    return method.family


def readme_table() -> list[str]:
    """Return the README's table: config name, papers, and a line about each method."""
    rows = ["| config | paper | what it does |", "|:--|:--|:--|"]
    for method in by_family(METHODS):
        papers = "; ".join(paper.short for paper in method.papers)
        if not papers and "fedclade" in method.citations:
            papers = "ours"
        limit = "; simulations only" if method.requires.simulation else ""
        rows.append(
            f"| [`{method.name}`](docs/{method.page}) | {papers} | {method.description}{limit} |"
        )
    return rows


def family_table() -> list[str]:
    """Return the table of the index of methods' pages: a row for each family."""
    rows = ["| finds clusters by | methods |", "| :-- | :-- |"]
    for family, finds_by in FINDS_BY.items():
        members = [method for method in METHODS if family_of(method) == family]
        links = ", ".join(f"[{method.name}]({Path(method.page).name})" for method in members)
        rows.append(f"| {finds_by} | {links} |")
    return rows


def scenario_lines(path: Path, rest: str, clusters: int | None) -> list[str]:
    """Return the lines of a scenario's table ``[algorithms]`` for methods without a line of their own in the file.

    Parameters
    ----------
    path
        The scenario.
    rest
        Its text behind the list.
    clusters
        Number of clusters that is given to methods that need one; None leaves their default.
    """
    own = re.findall(r"^(\w+) *=", rest.partition("\n[")[0], re.MULTILINE)
    # the data of named sets, which are real, has no true clusters
    data = tomllib.loads(path.read_text(encoding="utf-8")).get("data", {})
    name = path.relative_to(ROOT / "configs").with_suffix("").as_posix()
    lines: list[str] = []
    for method in METHODS:
        belongs = is_compared(method, name) and method.name not in own
        if belongs and (knows_clusters(data) or not needs_truth(method)):
            given = (
                {method.clusters_as: clusters}
                if method.clusters_as and clusters is not None
                else {}
            )
            lines.append(f"{method.name} = {inline_table({**given, **method.options})}")
    return lines


def is_compared(method: Method, scenario: str) -> bool:
    """Return whether a method's record names a scenario, such as ``arena/mnist``, or its folder."""
    return any(scenario in (named, f"{named}/{Path(scenario).name}") for named in method.scenarios)


def knows_clusters(data: Mapping[str, Any]) -> bool:
    """Return whether the true clusters of a scenario's clients are known."""
    return data.get("shift", "none") != "none" or data.get("partition") == "label_groups"


def needs_truth(method: Method) -> bool:
    """Return whether a method is built from the true clusters."""
    return TRUTH[0] in {each.name for each in fields(method.algorithm)}


def inline_table(options: Mapping[str, Any]) -> str:
    """Return options as a table in one line of TOML, whose numbers, texts and lists are written as in JSON."""
    entries: Sequence[str] = [f"{name} = {json.dumps(value)}" for name, value in options.items()]
    return f"{{ {', '.join(entries)} }}" if entries else "{}"


if __name__ == "__main__":
    main()
