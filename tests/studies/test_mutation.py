"""The mutation study: which mutants there are, and what becomes of them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

STUDIES = Path(__file__).parents[2] / "studies"
sys.path.insert(0, str(STUDIES))

import mutation  # noqa: E402
from mutants import HIT, Mutant, find_mutants, instrument  # noqa: E402

SOURCE = '''
"""A module, with 3 words."""
from __future__ import annotations
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    limit = 3
__all__ = ["x", 1]
α: float = 1.5

class Rule:
    """A class."""
    lr: float = 0.1
    name: str = "sgd"
    on: bool = True

    def step(self, x: int = 2, *, y: Literal[4] = None) -> int:
        """Take a step of 7."""
        if not self.on and x <= y:
            raise ValueError(f"{x + 1} is too much")
        print(x, y)
        for each in (v for v in self.all if v):
            if each is None:
                continue
            x += each
        return max(x, y) // αβγ(y, x) if x else None
'''

EXPECTED = {
    ("constant", "1.5", "2.5"),
    ("default", "0.1", "1.1"),
    ("default", '"sgd"', "'other sgd'"),
    ("default", "True", "False"),
    ("default", "2", "3"),
    ("negated condition", "not self.on and x <= y", "(not (not self.on and x <= y))"),
    ("boolean", "not self.on and x <= y", "(not self.on or x <= y)"),
    ("comparison", "x <= y", "(x < y)"),
    ("dropped raise", 'raise ValueError(f"{x + 1} is too much")', "pass"),
    ("dropped statement", "print(x, y)", "pass"),
    ("swapped arguments", "print(x, y)", "print(y, x)"),
    ("negated condition", "v", "(not v)"),
    ("negated condition", "each is None", "(not each is None)"),
    ("comparison", "each is None", "(each is not None)"),
    ("loop", "continue", "break"),
    ("dropped statement", "x += each", "pass"),
    ("dropped result", "return max(x, y) // αβγ(y, x) if x else None", "return None"),
    ("negated condition", "x", "(not x)"),
    ("arithmetic", "max(x, y) // αβγ(y, x)", "(max(x, y) / αβγ(y, x))"),
    ("swapped arguments", "αβγ(y, x)", "αβγ(x, y)"),
}


def mutants() -> list[Mutant]:
    return find_mutants("src/fedclade/rule.py", SOURCE.encode())


def test_every_kind_of_mutant_is_found_and_nothing_else_is_changed():
    """Neither docstrings, annotations, imports, f-strings, ``__all__`` nor what only type checkers read."""
    assert {(mutant.kind, mutant.old, mutant.new) for mutant in mutants()} == EXPECTED


def test_a_mutant_changes_its_own_piece_of_the_text():
    """Places are in bytes, of which a Greek letter has two."""
    found = mutants()
    assert len({mutant.key for mutant in found}) == len(found)
    for mutant in found:
        changed = mutant.apply(SOURCE.encode()).decode()
        compile(changed, "rule.py", "exec")
        assert SOURCE.splitlines()[mutant.line - 1] != changed.splitlines()[mutant.line - 1]
        before, after = SOURCE.encode()[: mutant.start], SOURCE.encode()[mutant.end :]
        assert changed == f"{before.decode()}{mutant.new}{after.decode()}"


def test_a_mutant_knows_its_function_or_the_name_that_it_is_given():
    by_text = {mutant.old: mutant for mutant in mutants()}
    assert (by_text["each is None"].function, by_text["each is None"].name) == ("Rule.step", "")
    assert (by_text["2"].function, by_text["0.1"].function, by_text["0.1"].name) == (
        "Rule.step",
        "",
        "lr",
    )


def test_instrumented_functions_report_their_calls():
    names: dict[str, int] = {"other": 0}
    text = instrument(SOURCE.encode(), names, "src/fedclade/rule.py")
    assert names == {"other": 0, "src/fedclade/rule.py::Rule.step": 1}
    assert f"{HIT}(1)" in text
    lines = text.splitlines()
    assert lines.index("from __future__ import annotations") + 1 == lines.index(
        f"from fedclade_hits import hit as {HIT}"
    )
    compile(text, "rule.py", "exec")


def test_a_sample_is_drawn_by_its_seed_and_says_what_it_skips(monkeypatch: pytest.MonkeyPatch):
    only = ["core/rng.py"]
    monkeypatch.setattr(mutation, "read_rules", list)
    first, skipped, count = mutation.draw(5, 1, only)
    assert len(first) == 5 < count
    assert skipped == []
    assert mutation.draw(5, 1, only)[0] == first != mutation.draw(5, 2, only)[0]
    assert {mutant.path for mutant in first} == {"src/fedclade/core/rng.py"}
    rule = mutation.Rule("core/*", "for a test", kind=first[0].kind)
    monkeypatch.setattr(mutation, "read_rules", lambda: [rule])
    others, skipped, _ = mutation.draw(5, 1, only)
    assert first[0] in [mutant for mutant, _ in skipped]
    assert rule.kind not in {mutant.kind for mutant in others}


def test_every_rule_of_the_committed_list_has_a_reason_and_covers_something():
    rules = mutation.read_rules()
    assert rules
    package = mutation.REPOSITORY / mutation.PACKAGE
    for rule in rules:
        assert len(rule.reason) > 10
        paths = (path for path in sorted(package.rglob("*.py")) if path.match(rule.path))
        assert any(covers_something(rule, path) for path in paths), rule


def covers_something(rule: mutation.Rule, path: Path) -> bool:
    found = find_mutants(str(path.relative_to(mutation.REPOSITORY)), path.read_bytes())
    return any(rule.covers(mutant, mutation.line_of(mutant)) for mutant in found)


TOY = """def larger(a, b):
    while a < b:
        a += 1
    if a == 77:
        return a - 1
    return a
"""
TEST = """import toy

def test_larger():
    assert toy.larger(1, 3) == 3
    assert toy.larger(5, 3) == 5
"""
TRY = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import mutation
from mutants import find_mutants
tree, folder = Path(sys.argv[2]), Path(sys.argv[3])
for mutant in find_mutants("src/toy.py", (tree / "src/toy.py").read_bytes()):
    if mutant.old not in ("a < b", "a += 1", "return a", "77"):
        continue
    tests = ["tests/test_toy.py::test_larger"]
    limit = 2.0 if mutant.old == "a += 1" else 600.0
    verdict = mutation.try_mutant(mutant, tests, limit, tree, folder)
    print(json.dumps([mutant.kind, mutant.old, verdict.outcome, verdict.by]))
"""


@pytest.mark.slow
def test_mutants_are_killed_or_survive_and_leave_the_copy_as_it_was(tmp_path: Path):
    tree, folder = tmp_path / "tree", tmp_path / "results"
    for path, text in (("src/toy.py", TOY), ("tests/test_toy.py", TEST)):
        (tree / path).parent.mkdir(parents=True)
        (tree / path).write_text(text)
    (tree / "pytest.ini").touch()
    folder.mkdir()
    command = [sys.executable, "-c", TRY, str(STUDIES), str(tree), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    outcomes = {(kind, old): (outcome, by) for kind, old, outcome, by in verdicts}
    killer = "tests/test_toy.py::test_larger"
    assert outcomes["comparison", "a < b"] == ("killed", killer)
    assert outcomes["dropped statement", "a += 1"] == ("killed", "it hangs")
    assert outcomes["dropped result", "return a"] == ("killed", killer)
    assert outcomes["constant", "77"] == ("survived", "")
    assert (tree / "src/toy.py").read_text() == TOY


def test_a_mutant_that_nothing_calls_is_untested(tmp_path: Path):
    assert mutation.try_mutant(mutants()[0], [], 1.0, tmp_path, tmp_path) == mutation.Verdict(
        "untested", "", 0.0, 0
    )


def test_tests_that_call_a_function_are_chosen_before_others():
    """The file that is named as the module comes first, and tests that cannot be relied on never."""
    path = "src/fedclade/core/rng.py"
    function = f"{path}::draw"

    def known(**tests: list[str]) -> dict[str, object]:
        return {
            "tests": {
                name: {"seconds": 1.0, "wall": 1.0, "calls": calls} for name, calls in tests.items()
            },
            "shared": [],
        }

    files = {
        "tests/a/test_whole.py": known(
            **{"tests/a/test_whole.py::x": [function, "more", "and more"]}
        ),
        "tests/core/test_rng.py": known(
            **{
                "tests/core/test_rng.py::idle": [],
                "tests/core/test_rng.py::draws": [function],
                "tests/core/test_rng.py::flaky": [function],
            }
        ),
        "tests/b/test_other.py": known(**{"tests/b/test_other.py::y": ["more"]}),
    }
    choice = mutation.Choice(files, {"tests/core/test_rng.py::flaky"})
    mutant = replace(mutants()[0], path=path, function="draw")
    expected = [
        "tests/core/test_rng.py::draws",
        "tests/a/test_whole.py::x",
        "tests/core/test_rng.py::idle",
    ]
    assert choice.tests(mutant) == expected
    assert choice.remaining_tests(mutant) == []


def test_a_survivor_has_to_survive_the_callers_that_the_budget_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = "src/fedclade/core/rng.py"
    name = "tests/core/test_rng.py"
    calls = {"quick": ["draw"], "slow": ["draw"], "slowest": ["draw"], "idle": []}
    seconds = {"quick": 1.0, "slow": 200.0, "slowest": 2000.0, "idle": 200.0}
    tests = {
        f"{name}::{test}": {
            "seconds": seconds[test],
            "wall": seconds[test],
            "calls": [f"{path}::{function}" for function in called],
        }
        for test, called in calls.items()
    }
    choice = mutation.Choice({name: {"tests": tests, "shared": []}}, set())
    mutant = replace(mutants()[0], path=path, function="draw")
    assert choice.tests(mutant) == [f"{name}::quick"]
    assert choice.remaining_tests(mutant) == [f"{name}::slow"]

    tried: list[tuple[list[str], bool]] = []

    def try_all(mutants: list[Mutant], choose: object, *_: object, longer: bool = False) -> None:
        assert callable(choose)
        for each in mutants:
            tried.append((choose(each), longer))
            row = {"key": each.key, "outcome": "survived", "longer": longer}
            mutation.append(results, [row])

    folder = tmp_path
    results = folder / "results.jsonl"
    monkeypatch.setattr(mutation, "try_all", try_all)
    monkeypatch.setattr(mutation, "read_map", lambda _: {name: {"tests": tests, "shared": []}})
    for _ in range(2):  # the second time everything is known
        mutation.judge([mutant], folder, results, jobs=1)
    assert tried == [([f"{name}::quick"], False), ([f"{name}::slow"], True)]


def test_tests_are_chosen_within_a_budget():
    seconds = {"a": 3.0, "b": 9.0, "c": 2.0}
    assert list(mutation.within(seconds, ["a", "b", "c"], 5.0)) == ["a", "c"]
