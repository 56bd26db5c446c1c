"""Readability study: figures of the source, and random samples for readers.

``python studies/readability.py figures src/fedclade`` counts things that make code hard to read.
``python studies/readability.py draw --seed 1`` prints a random sample of docstrings and errors, and
names random pages. Two readers who have not seen the code mark each as clear at first reading or
not. README.md in this folder explains the study.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import copy
import json
import random
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

REPOSITORY = Path(__file__).parents[1]

MOST_POSITIONAL = 4
"""Largest number of positional arguments that a reader can match with parameters."""

LONGEST_LINE = 100
"""Largest number of characters of a line that is not counted as long."""

HIGHEST_COMPLEXITY = 12
"""Largest complexity (McCabe) of a function that is not counted as complex."""

VERBS = frozenset(Path(__file__).with_name("readability_verbs.txt").read_text("utf-8").split())
"""First words of function names that count as verbs."""

RELATIVE_CLAUSE = re.compile(
    r"^(return )?(what|who|whom|whose|how|where|when|which|those|that)\b", re.IGNORECASE
)

Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = Function | ast.ClassDef | ast.Module


@dataclass(frozen=True)
class Finding:
    """A place in the source that counts against readability."""

    kind: str
    path: Path
    line: int


@dataclass
class Measurement:
    """Counts of a source tree, and the findings behind them."""

    counts: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Return the figures by name, in the order of the table."""
        counts = self.counts
        of_kind = Counter(finding.kind for finding in self.findings)

        def per_thousand(kind: str) -> float:
            return round(1000 * of_kind[kind] / max(counts["code lines"], 1), 1)

        def per_cent(part: int, whole: int) -> float:
            return round(100 * part / max(whole, 1), 1)

        functions = counts["functions"]
        return {
            "modules": counts["modules"],
            "lines": counts["lines"],
            "lines of code": counts["code lines"],
            "comment lines, %": per_cent(counts["comment lines"], counts["lines"]),
            "nested comprehensions per 1,000 lines of code": per_thousand("nested comprehension"),
            "conditional expressions per 1,000": per_thousand("conditional expression"),
            "packed assignments per 1,000": per_thousand("packed assignment"),
            "calls with 5 or more positional arguments per 1,000": per_thousand("long call"),
            "lines over 100 characters, %": per_cent(of_kind["long line"], counts["lines"]),
            "functions of complexity 13 or more, %": per_cent(of_kind["complex"], functions),
            "names that begin with a verb, %": per_cent(counts["verb first"], functions),
            "names of one word, %": per_cent(counts["one word"], functions),
            "docstrings that begin with a relative clause, %": per_cent(
                of_kind["relative clause"], counts["docstrings"]
            ),
        }


def complexity_of(function: ast.AST) -> int:
    """Return McCabe's complexity of a function, without the functions that it defines."""
    total = 1
    pending = list(ast.iter_child_nodes(function))
    while pending:
        node = pending.pop()
        if isinstance(node, Function | ast.Lambda):
            continue
        if isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            total += 1 + len(node.ifs)
        elif isinstance(
            node,
            ast.If
            | ast.For
            | ast.While
            | ast.ExceptHandler
            | ast.IfExp
            | ast.Assert
            | ast.match_case,
        ):
            total += 1
        pending.extend(ast.iter_child_nodes(node))
    return total


def is_packed(node: ast.AST) -> bool:
    """Return whether a node assigns a tuple of values to several names; a swap does not count."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple):
        return False
    return {ast.unparse(name) for name in target.elts} != {ast.unparse(v) for v in node.value.elts}


def nested_comprehensions(tree: ast.AST) -> set[int]:
    """Return the lines of comprehensions that are inside another comprehension."""
    lines: set[int] = set()
    for outer in ast.walk(tree):
        if not isinstance(outer, Comprehension):
            continue
        for inner in ast.walk(outer):
            if inner is not outer and isinstance(inner, Comprehension):
                lines.add(inner.lineno)
    return lines


def is_long_call(node: ast.AST) -> bool:
    """Return whether a node is a call with more than ``MOST_POSITIONAL`` positional arguments."""
    if not isinstance(node, ast.Call):
        return False
    return sum(not isinstance(value, ast.Starred) for value in node.args) > MOST_POSITIONAL


def findings_in(path: Path, text: str) -> Iterator[Finding]:
    """Yield all findings of one module."""
    tree = ast.parse(text)
    for number, line in enumerate(text.splitlines(), start=1):
        if len(line) > LONGEST_LINE:
            yield Finding("long line", path, number)
    for number in sorted(nested_comprehensions(tree)):
        yield Finding("nested comprehension", path, number)
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            yield Finding("conditional expression", path, node.lineno)
        if is_packed(node):
            yield Finding("packed assignment", path, node.lineno)  # type: ignore[attr-defined]
        if is_long_call(node):
            yield Finding("long call", path, node.lineno)  # type: ignore[attr-defined]
        if isinstance(node, Function) and complexity_of(node) > HIGHEST_COMPLEXITY:
            yield Finding("complex", path, node.lineno)
        if isinstance(node, Documented) and RELATIVE_CLAUSE.match(ast.get_docstring(node) or ""):
            yield Finding("relative clause", path, getattr(node, "lineno", 1))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the numbers of all lines of docstrings, those of attributes included."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and _is_text(node.value):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def count_module(text: str) -> Counter[str]:
    """Count lines, functions and docstrings of one module."""
    tree = ast.parse(text)
    documented = docstring_lines(tree)
    counts: Counter[str] = Counter(modules=1)
    for number, line in enumerate(text.splitlines(), start=1):
        counts["lines"] += 1
        if number in documented or not line.strip():
            continue
        counts["comment lines" if line.strip().startswith("#") else "code lines"] += 1
    for node in ast.walk(tree):
        if isinstance(node, Documented):
            counts["docstrings"] += bool(ast.get_docstring(node))
        if isinstance(node, Function) and not node.name.startswith("__"):
            words = node.name.strip("_").split("_")
            counts["functions"] += 1
            counts["verb first"] += words[0] in VERBS
            counts["one word"] += len(words) == 1
    return counts


def measure(roots: Sequence[Path]) -> Measurement:
    """Measure all modules below some folders."""
    measured = Measurement()
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            measured.counts.update(count_module(text))
            measured.findings.extend(findings_in(path, text))
    return measured


@dataclass(frozen=True)
class Sample:
    """A text that a reader judges, and its place in the source."""

    place: str
    text: str


def _place(path: Path, line: int) -> str:
    return f"{path.relative_to(REPOSITORY)}:{line}"


def docstrings_below(root: Path) -> list[Sample]:
    """Return the docstring of each class, function and module, with its signature."""
    samples: list[Sample] = []
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, Documented):
                continue
            docstring = ast.get_docstring(node)
            if docstring:
                line = getattr(node, "lineno", 1)
                head = "" if isinstance(node, ast.Module) else _signature_of(node, lines) + "\n"
                samples.append(Sample(_place(path, line), head + docstring))
    return samples


def _signature_of(node: Function | ast.ClassDef, lines: Sequence[str]) -> str:
    """Return the lines of a function or class before its docstring, without their common indentation."""
    return textwrap.dedent("\n".join(lines[node.lineno - 1 : node.body[0].lineno - 1]))


def errors_below(root: Path) -> list[Sample]:
    """Return each statement that raises an error of the project with a text.

    Constants in a text are replaced by their values, since users never see the names. Errors of
    Python's own classes are left out, since users do not see them alone: a caller inserts their
    text into an error of the project, which adds the file and the remedy.
    """
    trees = {
        path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(root.rglob("*.py"))
    }
    everywhere: dict[str, str] = {}
    for tree in trees.values():
        everywhere |= _text_constants(tree)
    samples: list[Sample] = []
    for path, tree in trees.items():
        insert = _InsertConstants(everywhere | _text_constants(tree))
        for node in filter(_has_text, ast.walk(tree)):
            statement = ast.fix_missing_locations(insert.visit(copy.deepcopy(node)))
            samples.append(Sample(_place(path, node.lineno), ast.unparse(statement)))
    return samples


def _text_constants(module: ast.Module) -> dict[str, str]:
    """Return the texts that a module assigns to names in capital letters."""
    constants: dict[str, str] = {}
    for node in module.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        name = node.targets[0].id
        if name.isupper() and isinstance(node.value, ast.Constant) and _is_text(node.value):
            constants[name] = str(node.value.value)
    return constants


class _InsertConstants(ast.NodeTransformer):
    """Replace names of constants in formatted texts by the constants' values."""

    def __init__(self, constants: Mapping[str, str]) -> None:
        self._constants = constants

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.expr:
        if isinstance(node.value, ast.Name) and node.value.id in self._constants:
            return ast.Constant(self._constants[node.value.id])
        return node


def _has_text(node: ast.AST) -> TypeGuard[ast.Raise]:
    if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
        return False
    raised = node.exc.func
    if isinstance(raised, ast.Name) and hasattr(builtins, raised.id) and raised.id != "type":
        return False
    return any(_is_text(part) or isinstance(part, ast.JoinedStr) for part in ast.walk(node.exc))


def pages_below(root: Path) -> list[Sample]:
    """Return all pages, except the generated pages of reproduced results."""
    paths = [path for path in sorted(root.rglob("*.md")) if "reproduce" not in path.parts]
    return [Sample(_place(path, 1), path.read_text(encoding="utf-8")) for path in paths]


def draw(samples: Sequence[Sample], size: int, seed: int) -> list[Sample]:
    """Draw some samples without replacement; the same seed draws the same ones."""
    return random.Random(seed).sample(samples, min(size, len(samples)))


def print_figures(roots: Sequence[Path], worst: int, as_json: bool) -> None:
    """Print the figures of folders as a table or as JSON, and the files with the most findings."""
    measured = measure(roots)
    figures = measured.figures()
    if as_json:
        json.dump(figures, sys.stdout, indent=1)
        print()
        return
    width = max(map(len, figures))
    for name, value in figures.items():
        print(f"{name:{width}} {value:>10,}")
    by_file = Counter(finding.path for finding in measured.findings)
    for path, count in by_file.most_common(worst):
        print(f"{count:6} {path}")


def print_samples(seed: int, docstrings: int, errors: int, pages: int) -> None:
    """Print the texts that readers judge, as Markdown with a number for each."""
    source = REPOSITORY / "src/fedclade"
    parts = {
        "Docstrings": draw(docstrings_below(source), docstrings, seed),
        "Errors": draw(errors_below(source), errors, seed),
    }
    for title, samples in parts.items():
        print(f"## {title}\n")
        for number, sample in enumerate(samples, start=1):
            print(f"{number}. {sample.place}\n\n```python\n{sample.text}\n```\n")
    print("## Pages\n")
    for number, sample in enumerate(draw(pages_below(REPOSITORY / "docs"), pages, seed), start=1):
        print(f"{number}. {sample.place}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    figures = commands.add_parser("figures", help="count things that make code hard to read")
    figures.add_argument("roots", nargs="+", type=Path, help="folders of Python modules")
    figures.add_argument(
        "--worst", type=int, default=0, help="number of files with the most findings to list"
    )
    figures.add_argument("--json", action="store_true", help="print JSON in place of a table")
    drawing = commands.add_parser("draw", help="print a random sample for readers")
    drawing.add_argument(
        "--seed", type=int, required=True, help="seed of the sample; the same seed repeats it"
    )
    drawing.add_argument(
        "--docstrings", type=int, default=60, help="number of docstrings (default: 60)"
    )
    drawing.add_argument(
        "--errors", type=int, default=40, help="number of error messages (default: 40)"
    )
    drawing.add_argument("--pages", type=int, default=6, help="number of pages (default: 6)")
    chosen = parser.parse_args(arguments)
    if chosen.command == "figures":
        missing = [str(root) for root in chosen.roots if not root.is_dir()]
        if missing:
            parser.error(f"no such folder: {', '.join(missing)}")
        print_figures(chosen.roots, chosen.worst, chosen.json)
    else:
        print_samples(chosen.seed, chosen.docstrings, chosen.errors, chosen.pages)


if __name__ == "__main__":
    main()
