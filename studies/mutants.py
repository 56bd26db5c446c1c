"""Mutants of a module: small changes of its text, each of which a test should detect."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}

OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}

SYMMETRIC = {"allclose", "equal", "gcd", "isclose", "max", "maximum", "min", "minimum"}
"""Functions that do not distinguish their first two arguments."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutant:
    """A change of one piece of a file.

    Parameters
    ----------
    path
        Path of the file, relative to the repository.
    line
        Number of the first line that changes, from 1.
    start, end
        Range of the bytes of the file that are replaced.
    kind
        Kind of the change, such as ``comparison`` or ``dropped statement``.
    old, new
        The replaced text, and its replacement.
    function
        Qualified name of the innermost function that contains the change; empty outside of
        functions.
    name
        Outside of functions: the name that the changed statement assigns. Otherwise empty.
    """

    path: str
    line: int
    start: int
    end: int
    kind: str
    old: str
    new: str
    function: str = ""
    name: str = ""

    @property
    def key(self) -> str:
        """Unique key of the mutant among all mutants of the same sources."""
        return f"{self.path}:{self.start}-{self.end}:{self.kind}:{self.new}"

    def apply(self, source: bytes) -> bytes:
        """Return the text of the file with the change."""
        return source[: self.start] + self.new.encode() + source[self.end :]


def find_mutants(path: str, source: bytes) -> list[Mutant]:
    """Return all mutants of a file, in the order of its text.

    There are no mutants of annotations, docstrings, imports, strings (except defaults),
    ``__all__``, and blocks under ``TYPE_CHECKING``.
    """
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return sorted(
        finder.found, key=lambda mutant: (mutant.start, mutant.end, mutant.kind, mutant.new)
    )


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, source: bytes) -> None:
        self.found: list[Mutant] = []
        self._path = path
        self._source = source
        self._line_starts = [0]
        for line in source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))
        self._scopes: list[str] = []
        self._in_function = 0
        self._name = ""

    def _add(self, node: ast.expr | ast.stmt, kind: str, new: ast.AST | str) -> None:
        """Add a mutant that replaces a node's text."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._line_starts[node.lineno - 1] + node.col_offset
        end = self._line_starts[node.end_lineno - 1] + node.end_col_offset
        self.found.append(
            Mutant(
                path=self._path,
                line=node.lineno,
                start=start,
                end=end,
                kind=kind,
                old=self._source[start:end].decode(),
                new=new if isinstance(new, str) else ast.unparse(new),
                function=".".join(self._scopes) if self._in_function else "",
                name="" if self._in_function else self._name,
            )
        )

    # Nodes without mutants

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip f-strings: before Python 3.12, the positions of their parts are wrong."""

    def visit_Import(self, node: ast.Import) -> None:
        """Skip imports."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Skip imports."""

    # Scopes

    def visit_FunctionDef(self, node: Function) -> None:
        """Visit the defaults and the body.

        Defaults belong to the scope of the function, because tests that call the function use them.
        """
        for decorator in node.decorator_list:
            self.visit(decorator)
        self._scopes.append(node.name)
        self._in_function += 1
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self._visit_default(default)
        self._visit_body(node.body)
        self._in_function -= 1
        self._scopes.pop()

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        """Visit the defaults and the body."""
        self.visit_FunctionDef(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Visit the body of a class."""
        for decorator in node.decorator_list:
            self.visit(decorator)
        self._scopes.append(node.name)
        self._visit_body(node.body)
        self._scopes.pop()

    def visit_Module(self, node: ast.Module) -> None:
        """Visit the body of a module."""
        self._visit_body(node.body)

    def _visit_body(self, body: list[ast.stmt]) -> None:
        for statement in body:
            is_docstring = isinstance(statement, ast.Expr) and isinstance(
                statement.value, ast.Constant
            )
            if not is_docstring:
                self.visit(statement)

    # Statements

    def visit_Assign(self, node: ast.Assign) -> None:
        """Visit the value, and record the name to which a module or class assigns it."""
        if isinstance(node.targets[0], ast.Name):
            self._name = node.targets[0].id
        if self._name != "__all__":
            self.generic_visit(node)
        self._name = ""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Visit the value and not the annotation; in a class, the value is a field's default."""
        if isinstance(node.target, ast.Name):
            self._name = node.target.id
        if node.value is not None:
            is_field = bool(self._scopes) and not self._in_function
            if is_field:
                self._visit_default(node.value)
            else:
                self.visit(node.value)
        self._name = ""

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Drop the statement."""
        self._add(node, "dropped statement", "pass")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        """Drop a statement that is only a call."""
        if isinstance(node.value, ast.Call):
            self._add(node, "dropped statement", "pass")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Drop the statement."""
        self._add(node, "dropped raise", "pass")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        """Return None instead of the result."""
        if node.value is not None and not _is_none(node.value):
            self._add(node, "dropped result", "return None")
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        """Replace continue by break."""
        self._add(node, "loop", "break")

    def visit_Break(self, node: ast.Break) -> None:
        """Replace break by continue."""
        self._add(node, "loop", "continue")

    def visit_If(self, node: ast.If) -> None:
        """Negate the condition."""
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        self._negate(node.test)
        self.visit(node.test)
        self._visit_body(node.body)
        self._visit_body(node.orelse)

    # Expressions

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """Negate the condition."""
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        """Negate the conditions of a comprehension."""
        for condition in node.ifs:
            self._negate(condition)
        self.generic_visit(node)

    def _negate(self, condition: ast.expr) -> None:
        is_negated = isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not)
        new = condition.operand if is_negated else ast.UnaryOp(ast.Not(), condition)
        self._add(condition, "negated condition", f"({ast.unparse(new)})")

    def visit_Compare(self, node: ast.Compare) -> None:
        """Change each comparison of a chain."""
        for index, operator in enumerate(node.ops):
            changed = copy.copy(node)
            changed.ops = [*node.ops[:index], COMPARISONS[type(operator)](), *node.ops[index + 1 :]]
            self._add(node, "comparison", f"({ast.unparse(changed)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Replace the operator by another."""
        if type(node.op) in OPERATORS:
            changed = ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
            self._add(node, "arithmetic", f"({ast.unparse(changed)})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Exchange ``and`` and ``or``."""
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._add(node, "boolean", f"({ast.unparse(ast.BoolOp(other, node.values))})")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Swap the first two arguments."""
        self.visit(node.func)
        self._swap(node)
        for argument in node.args:
            self.visit(argument)
        for keyword in node.keywords:
            self.visit(keyword.value)

    def _swap(self, node: ast.Call) -> None:
        if (
            len(node.args) < 2
            or isinstance(node.args[0], ast.Starred)
            or isinstance(node.args[1], ast.Starred)
        ):
            return
        first, second = ast.unparse(node.args[0]), ast.unparse(node.args[1])
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        if first != second and name not in SYMMETRIC:
            swapped = ast.Call(
                node.func, [node.args[1], node.args[0], *node.args[2:]], node.keywords
            )
            self._add(node, "swapped arguments", swapped)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Change a number or a truth value."""
        new = _other_constant(node.value)
        if new is not None and not isinstance(node.value, str):
            self._add(node, "constant", new)

    def _visit_default(self, default: ast.expr) -> None:
        new = _other_constant(default.value) if isinstance(default, ast.Constant) else None
        if new is None:
            self.visit(default)
        else:
            self._add(default, "default", new)


def _other_constant(value: object) -> str | None:
    """Return the text of another constant of the same type, or None for a type that has no mutants."""
    if isinstance(value, bool):
        return str(not value)
    if isinstance(value, int | float):
        # Adding 1 to a very large float does not change it.
        return repr(value + 1 if value + 1 != value else value / 2)
    if isinstance(value, str):
        return repr(f"other {value}")
    return None


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


# Which functions a test calls

HIT = "_fedclade_hit"


def instrument(source: bytes, names: dict[str, int], path: str) -> str:
    """Return the text of a module whose functions report their numbers when they are called.

    ``names`` maps functions, as ``path::qualified name``, to numbers. The functions of this module
    are added to it.
    """
    tree = ast.parse(source)
    for qualified, node in list(functions_of(tree)):
        number = names.setdefault(f"{path}::{qualified}", len(names))
        first = 1 if ast.get_docstring(node, clean=False) is not None else 0
        node.body.insert(first, ast.parse(f"{HIT}({number})").body[0])
    first = 1 if ast.get_docstring(tree, clean=False) is not None else 0
    while first < len(tree.body) and _is_from_future(tree.body[first]):
        first += 1
    tree.body.insert(first, ast.parse(f"from fedclade_hits import hit as {HIT}").body[0])
    return ast.unparse(ast.fix_missing_locations(tree))


def functions_of(tree: ast.AST, scopes: tuple[str, ...] = ()) -> Iterator[tuple[str, Function]]:
    """Yield the functions of a module, with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield ".".join([*scopes, node.name]), node
        if isinstance(node, Function | ast.ClassDef):
            yield from functions_of(node, (*scopes, node.name))
        else:
            yield from functions_of(node, scopes)


def _is_from_future(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
