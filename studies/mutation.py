"""Mutation study: count how many small faults in the library its tests detect.

``python studies/mutation.py --sample 100 --seed 1`` draws mutants of ``src/fedclade``, which are
copies with one small fault (``mutants.py`` lists the kinds). For each mutant, it runs the tests
that call the changed function. It prints the rate of killed mutants (mutants with which a test
fails or does not end), and the survivors.

The first run, and each run after a test file has changed, also records which test calls which
function. All results are written to the folder ``.mutation``, and the same command continues where
it stopped. Mutants are made in copies of the repository, never in the checkout. README.md in this
folder explains the study.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import fnmatch
import hashlib
import importlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mutants import Mutant, find_mutants, functions_of, instrument

REPOSITORY = Path(__file__).parents[1]
PACKAGE = "src/fedclade"
EQUIVALENTS = Path(__file__).with_name("mutation_equivalents.toml")

BUDGET = 120.0
"""Processor seconds, measured without a mutant, of the tests that first run on a mutant."""

LONGER_BUDGET = 1200.0
"""Processor seconds of the further tests that run on a mutant that survived the first tests."""

PATIENCE = 15.0
"""A mutant counts as killed if its tests take this many times as long as without a mutant.

The factor is large because other programs may use the machine at the same time."""

START = 60.0
"""Seconds that a process may take in addition to its tests."""

MEMORY = 12 * 2**30
"""Bytes of data that a process may have, because some mutants allocate memory without end."""

DEFAULTS = "tests/test_defaults.py"
"""The test that lists the default of every public parameter."""

LARGEST = 4 * 2**30
"""Bytes that a test may write to one file."""

HITS = '''"""Written by studies/mutation.py: the calls of functions, noted by process."""
import os
import sys

seen = set()
_file = None
_process = None


def hit(number):
    if number in seen:
        return
    seen.add(number)
    folder = os.environ.get("FEDCLADE_HITS")
    test = os.environ.get("PYTEST_CURRENT_TEST")
    if folder is None or test is None:
        return
    global _file, _process
    if _process != os.getpid():
        _process = os.getpid()
        path = os.path.join(folder, str(_process))
        _file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.write(_file, f"{number}\\t{test}\\n".encode())
'''


# Processes: libraries such as torch are imported once, and each task runs in a fork of this process


def preload() -> None:
    """Import the modules of other packages that fedclade and pytest import, but not fedclade."""
    os.environ["OMP_NUM_THREADS"] = "1"
    listing = "import sys, pytest, hypothesis, fedclade, fedclade.cli; print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    listed = subprocess.run(
        [sys.executable, "-c", listing], env=environment, stdout=subprocess.PIPE, check=True
    )
    for name in listed.stdout.decode().split():
        if name.partition(".")[0] not in ("fedclade", "tests", "__main__", "__mp_main__"):
            with suppress(Exception):
                importlib.import_module(name)


def start(work: Callable[[], int], tree: Path, log: Path, environment: dict[str, str]) -> int:
    """Fork a process that calls ``work`` in a copy of the repository; return its id.

    The process is in a process group of its own.

    Parameters
    ----------
    work
        Function that returns the exit code of the process.
    tree
        The copy of the repository.
    log
        File for the output of the process.
    environment
        Further environment variables.
    """
    process = os.fork()
    if process:
        return process
    code = 70
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for stream, target in ((0, nothing), (1, output), (2, output)):
            os.dup2(target, stream)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, LARGEST))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.dont_write_bytecode = True
        os.environ.update(environment)
        os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree / "src")}
        os.chdir(tree)
        sys.path[:0] = [str(tree / "src"), str(tree)]
        code = work()
    finally:
        sys.stdout.flush()
        os._exit(code)


def wait(process: int, limit: float) -> int | None:
    """Wait for a process, and then end its process group.

    Returns
    -------
    int or None
        The exit code; None if the process was still running after ``limit`` seconds.
    """
    began = time.monotonic()
    pause = 0.01
    code: int | None = None
    try:
        while code is None and time.monotonic() - began < limit:
            time.sleep(pause)
            pause = min(0.2, pause * 1.5)
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        if code is None:
            os.waitpid(process, 0)
    return code


def spread(work: Callable[[int, list[Any]], None], items: list[Any], jobs: int) -> None:
    """Call ``work(slot, items)`` in several processes, each with a share of the items."""
    processes: list[int] = []
    for slot in range(1, jobs):
        process = os.fork()
        if not process:
            code = 1
            try:
                work(slot, items[slot::jobs])
                code = 0
            finally:
                sys.stdout.flush()
                os._exit(code)
        processes.append(process)
    work(0, items[::jobs])
    for process in processes:
        os.waitpid(process, 0)


def make_copy(folder: Path) -> Path:
    """Copy the present files of the repository to a folder; return the folder."""
    if folder.exists():
        shutil.rmtree(folder)
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = (
        subprocess.run(listing, cwd=REPOSITORY, stdout=subprocess.PIPE, check=True)
        .stdout.decode()
        .split("\0")
    )
    for name in filter(None, names):
        source, target = REPOSITORY / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    for name in (".venv", ".git"):
        if (REPOSITORY / name).exists():
            (folder / name).symlink_to((REPOSITORY / name).resolve())
    shared = REPOSITORY.parent / "shared"
    beside = folder.parent / "shared"
    if shared.exists() and not beside.exists():
        beside.symlink_to(shared.resolve())
    return folder


def compile_sources(tree: Path) -> None:
    """Compile the sources of a copy once, rather than in each process."""
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(tree / "src")], check=True)


# Which test calls which function


class Recorder:
    """Pytest plugin that records the time of each test, and whether it passes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.wall: dict[str, float] = {}
        self.failed: set[str] = set()
        self._began = (0.0, 0.0)

    def pytest_runtest_logstart(self) -> None:
        """Clear the set of called functions, and start the clock."""
        sys.modules["fedclade_hits"].seen.clear()
        self._began = (processor_seconds(), time.monotonic())

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Record the duration of a test, and its processor time, which varies less."""
        cpu, wall = self._began
        self.seconds[nodeid] = processor_seconds() - cpu
        self.wall[nodeid] = time.monotonic() - wall

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Record whether a test passes."""
        if report.outcome != "passed":  # a skipped test cannot kill a mutant either
            self.failed.add(report.nodeid)


def record(file: str, tree: Path, folder: Path, names: list[str]) -> Callable[[], int]:
    """Return a function that runs a test file, and writes which functions its tests call.

    Parameters
    ----------
    file
        The test file, relative to the repository.
    tree
        Copy of the repository whose functions report their calls.
    folder
        Working folder of the study.
    names
        Names of functions, by their numbers.
    """

    def work() -> int:
        import pytest

        hits = folder / "hits" / file.replace("/", "-")
        shutil.rmtree(hits, ignore_errors=True)
        hits.mkdir(parents=True)
        os.environ["FEDCLADE_HITS"] = str(hits)
        importlib.import_module("fedclade_hits")
        recorder = Recorder()
        code = pytest.main(
            [file, "-q", "-m", "not slow", "-p", "no:cacheprovider"], plugins=[recorder]
        )
        called: dict[str, set[str]] = defaultdict(set)
        shared: set[str] = set()
        for path in hits.iterdir():
            for line in path.read_text().splitlines():
                number, _, test = line.partition("\t")
                node, _, phase = test.rpartition(" ")
                called[node].add(names[int(number)])
                if phase == "(setup)":  # a fixture may be shared by all tests of the file
                    shared.add(names[int(number)])
        shutil.rmtree(hits)
        found = {
            "file": file,
            "digest": digest_of(tree / file),
            "code": int(code),
            "failed": sorted(recorder.failed),
            "shared": sorted(shared),
            "tests": {
                node: {
                    "seconds": round(seconds, 3),
                    "wall": round(recorder.wall[node], 3),
                    "calls": sorted(called[node] - shared),
                }
                for node, seconds in recorder.seconds.items()
                if node not in recorder.failed
            },
        }
        target = folder / "map" / f"{file.replace('/', '-')}.json"
        target.write_text(json.dumps(found))
        return 0

    return work


def processor_seconds() -> float:
    """Return the processor time of this process and of its ended child processes."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def digest_of(path: Path) -> str:
    """Return a digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def read_map(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the recorded calls and times of each test file that has not changed since."""
    known = {}
    for path in sorted((folder / "map").glob("*.json")):
        found = json.loads(path.read_text())
        file = REPOSITORY / found["file"]
        if file.exists() and found["digest"] == digest_of(file):
            known[found["file"]] = found
    return known


def update_map(folder: Path, jobs: int) -> None:
    """Run test files without valid records, in a copy whose functions report their calls."""
    (folder / "map").mkdir(parents=True, exist_ok=True)
    known = read_map(folder)
    files = [
        str(path.relative_to(REPOSITORY))
        for path in sorted((REPOSITORY / "tests").rglob("test_*.py"))
    ]
    missing = [file for file in files if file not in known]
    if not missing:
        return
    print(
        f"running {len(missing)} of {len(files)} test files once to record the functions they call",
        flush=True,
    )
    tree = make_copy(folder / "calls")
    numbers: dict[str, int] = {}
    for path in sorted((tree / PACKAGE).rglob("*.py")):
        path.write_text(instrument(path.read_bytes(), numbers, str(path.relative_to(tree))))
    (tree / "src" / "fedclade_hits.py").write_text(HITS)
    compile_sources(tree)
    names = list(numbers)

    def work(slot: int, files: list[str]) -> None:
        for file in files:
            began = time.monotonic()
            code = wait(
                start(record(file, tree, folder, names), tree, folder / f"map-{slot}.log", {}), 1800
            )
            found = read_map(folder).get(file) if code == 0 else None
            state = (
                f"{len(found['tests'])} tests, {len(found['failed'])} failed or skipped"
                if found
                else f"failed ({code})"
            )
            print(f"  {file}: {state}, {time.monotonic() - began:.0f} s", flush=True)

    # A child process imports the copy of fedclade once for all test files. This process must not.
    process = os.fork()
    if process == 0:
        try:
            sys.path.insert(0, str(tree / "src"))
            importlib.import_module("fedclade.cli")
            spread(work, missing, jobs)
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.waitpid(process, 0)


# Choice of the tests that could detect a mutant


class Choice:
    """Choice of the tests for each mutant.

    Parameters
    ----------
    known
        The result of :func:`read_map`.
    unreliable
        Tests that are not chosen, because they sometimes fail without a mutant.
    """

    def __init__(self, known: dict[str, dict[str, Any]], unreliable: set[str]) -> None:
        self._unreliable = unreliable
        self.seconds: dict[str, float] = {}
        self.wall: dict[str, float] = {}
        self._file_of: dict[str, str] = {}
        self._of_file: dict[str, list[str]] = {}
        self._callers: dict[str, set[str]] = defaultdict(set)
        self._sharers: dict[str, set[str]] = defaultdict(set)
        self._breadth: dict[str, int] = {}
        for file, found in known.items():
            for test, measured in found["tests"].items():
                if test in unreliable:
                    continue
                self.seconds[test] = measured["seconds"]
                self.wall[test] = measured["wall"]
                self._file_of[test] = file
                self._of_file.setdefault(file, []).append(test)
                self._breadth[test] = len(measured["calls"])
                for function in measured["calls"]:
                    self._callers[function].add(test)
            for function in found["shared"]:
                self._sharers[function].add(file)

    @cached_property
    def _mentions(self) -> dict[str, set[str]]:
        """Functions that contain a name, as a variable, an attribute or a keyword; by this name."""
        mentions: dict[str, set[str]] = defaultdict(set)
        for path in sorted((REPOSITORY / PACKAGE).rglob("*.py")):
            for qualified, node in functions_of(ast.parse(path.read_bytes())):
                function = f"{path.relative_to(REPOSITORY)}::{qualified}"
                for part in ast.walk(node):
                    name = (
                        getattr(part, "id", None)
                        or getattr(part, "attr", None)
                        or getattr(part, "arg", None)
                    )
                    if isinstance(name, str):
                        mentions[name].add(function)
        return mentions

    def functions(self, mutant: Mutant) -> set[str]:
        """Return the function that contains a mutant, or those that use the name it assigns."""
        if mutant.function:
            return {f"{mutant.path}::{mutant.function}"}
        mentioned = self._mentions.get(mutant.name, set())
        beside = {function for function in mentioned if function.startswith(f"{mutant.path}::")}
        return beside or mentioned

    def tests(self, mutant: Mutant) -> list[str]:
        """Return the tests to run within the budget, sorted by how likely they detect the mutant.

        Tests of one file stay together. Tests that call the function come first: first those in
        files that are named like the module, then those that call few other functions. Then come
        the other tests of these files, which may check a result that another test computed. For a
        mutant outside of functions, tests in files that are named like the module are added, since
        importing the module may fail.
        """
        callers, others = self._candidates(mutant)
        return list(within(self.seconds, [*callers, *others], BUDGET))

    def remaining_tests(self, mutant: Mutant) -> list[str]:
        """Return the tests that call the function and that did not fit into the first budget."""
        callers, _ = self._candidates(mutant)
        taken = set(self.tests(mutant))
        remaining = [test for test in callers if test not in taken]
        return list(within(self.seconds, remaining, LONGER_BUDGET))

    def _candidates(self, mutant: Mutant) -> tuple[list[str], list[str]]:
        """Return tests that call a mutant's function, and other tests of their files, sorted."""
        functions = self.functions(mutant)
        direct = set().union(*(self._callers[function] for function in functions))
        files = set().union(*(self._sharers[function] for function in functions))
        named = {file for file in self._of_file if is_named_after(file, mutant.path)}
        if not mutant.function or not (direct or files):
            files |= named
        if mutant.kind == "default":
            files |= {file for file in self._of_file if file == DEFAULTS}
        by_file: dict[str, list[str]] = defaultdict(list)
        for test in direct:
            by_file[self._file_of[test]].append(test)
        for file in files:
            by_file[file] = list(self._of_file.get(file, []))

        def rank(file: str) -> tuple[bool, bool, float]:
            narrowest = min((self._breadth[test] for test in by_file[file]), default=0)
            return file != DEFAULTS, file not in named, narrowest

        order = sorted(filter(by_file.get, by_file), key=rank)
        chosen = [
            test for file in order for test in sorted(by_file[file], key=self._of_file[file].index)
        ]
        taken = set(chosen)
        others = [test for file in order for test in self._of_file[file] if test not in taken]
        return chosen, others


def is_named_after(file: str, module: str) -> bool:
    """Return whether a test file is named like a module.

    It is if its name is ``test_MODULE.py``; or if it is in the folder of tests of the module's
    package, and its name contains the module's name.
    """
    stem = Path(module).stem.strip("_")
    room = Path(module).relative_to(PACKAGE).parts[0]
    return Path(file).stem == f"test_{stem}" or (
        Path(file).parts[1] == room and stem in Path(file).stem
    )


def within(seconds: dict[str, float], tests: list[str], budget: float) -> Iterator[str]:
    """Yield tests whose total time is within a budget; a test that no longer fits is skipped."""
    left = budget
    for test in tests:
        if seconds[test] <= left:
            left -= seconds[test]
            yield test


# Mutants


class Selection:
    """Pytest plugin that runs given tests in their order, and records failures."""

    def __init__(self, tests: list[str]) -> None:
        self._place = {test: place for place, test in enumerate(tests)}
        self.failed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Select the given tests, in their order."""
        chosen = [item for item in items if item.nodeid in self._place]
        items[:] = sorted(chosen, key=lambda item: self._place[item.nodeid])

    def pytest_collectreport(self, report: Any) -> None:
        """Record a test file that cannot be imported."""
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Record a failure."""
        if report.failed:
            self.failed.append(report.nodeid)


def run_tests(tests: list[str], result: Path, *, first: bool) -> Callable[[], int]:
    """Return a function that runs tests and writes the names of failed tests to a file.

    Parameters
    ----------
    tests
        Tests, in the order in which they run.
    result
        JSON file for the exit code and the failed tests.
    first
        Whether to stop at the first failure.
    """

    def work() -> int:
        import pytest

        selection = Selection(tests)
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        options = ["-q", "-p", "no:cacheprovider", "--tb=short", *(["-x"] if first else [])]
        code = int(pytest.main([*files, *options], plugins=[selection]))
        result.write_text(json.dumps({"code": code, "failed": selection.failed}))
        return code

    return work


@dataclass(frozen=True)
class Verdict:
    """Result of a mutant.

    Parameters
    ----------
    outcome
        ``killed``, ``survived``, or ``untested`` if no test calls it.
    by
        The first test that failed, or another reason why the mutant is killed.
    seconds
        Duration of the tests.
    tests
        Number of chosen tests.
    """

    outcome: str
    by: str
    seconds: float
    tests: int


def try_mutant(mutant: Mutant, tests: list[str], limit: float, tree: Path, folder: Path) -> Verdict:
    """Run tests on a mutant, in a copy of the repository that is restored afterwards."""
    if not tests:
        return Verdict("untested", "", 0.0, 0)
    began = time.monotonic()
    path, result = tree / mutant.path, folder / f"{tree.name}.json"
    source, times = path.read_bytes(), path.stat()
    result.unlink(missing_ok=True)
    try:
        path.write_bytes(mutant.apply(source))
        # The time differs from that of the original, so that its compiled file is not used.
        os.utime(path, (began, began))
        code = wait(
            start(run_tests(tests, result, first=True), tree, folder / f"{tree.name}.log", {}),
            limit,
        )
    finally:
        path.write_bytes(source)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    seconds = round(time.monotonic() - began, 1)
    if code == 0:
        return Verdict("survived", "", seconds, len(tests))
    if code == 5:
        return Verdict("untested", "", seconds, 0)
    if code is None:
        return Verdict("killed", "it hangs", seconds, len(tests))
    failed = json.loads(result.read_text())["failed"] if result.exists() else []
    return Verdict("killed", failed[0] if failed else f"exit code {code}", seconds, len(tests))


@dataclass(frozen=True)
class Rule:
    """A rule to skip mutants that are equivalent, or whose change no test should detect.

    Parameters
    ----------
    path
        Pattern of the file, relative to ``src/fedclade``.
    reason
        Reason to skip the mutants.
    kind
        Pattern of the kind of the mutant.
    line
        Pattern of the first changed line.
    """

    path: str
    reason: str
    kind: str = "*"
    line: str = "*"

    def covers(self, mutant: Mutant, text: str) -> bool:
        """Return whether the rule skips a mutant whose first changed line is ``text``."""
        return (
            fnmatch.fnmatchcase(mutant.path.removeprefix(f"{PACKAGE}/"), self.path)
            and fnmatch.fnmatchcase(mutant.kind, self.kind)
            and fnmatch.fnmatchcase(text.strip(), self.line)
        )


def read_rules() -> list[Rule]:
    """Return the rules in ``mutation_equivalents.toml``."""
    return [Rule(**rule) for rule in tomllib.loads(EQUIVALENTS.read_text())["rule"]]


def line_of(mutant: Mutant) -> str:
    """Return the first line that a mutant changes."""
    return (REPOSITORY / mutant.path).read_text().splitlines()[mutant.line - 1]


def draw(
    sample: int, seed: int, only: list[str]
) -> tuple[list[Mutant], list[tuple[Mutant, Rule]], int]:
    """Draw a sample of mutants.

    Parameters
    ----------
    sample
        Number of mutants.
    seed
        Seed of the draw.
    only
        Patterns of files, relative to ``src/fedclade``.

    Returns
    -------
    tuple
        The mutants; the mutants that were drawn but skipped, with their rules; and the number of
        all mutants of these files.
    """
    mutants: list[Mutant] = []
    for path in sorted((REPOSITORY / PACKAGE).rglob("*.py")):
        name = str(path.relative_to(REPOSITORY))
        if any(fnmatch.fnmatchcase(name.removeprefix(f"{PACKAGE}/"), pattern) for pattern in only):
            mutants += find_mutants(name, path.read_bytes())
    count = len(mutants)
    random.Random(seed).shuffle(mutants)
    rules, chosen, skipped = read_rules(), [], []
    for mutant in mutants:
        if len(chosen) == sample:
            break
        rule = next((rule for rule in rules if rule.covers(mutant, line_of(mutant))), None)
        if rule is None:
            chosen.append(mutant)
        else:
            skipped.append((mutant, rule))
    return chosen, skipped, count


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a JSONL file, without an incomplete last line."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def diff_of(mutant: Mutant) -> str:
    """Return the change as a diff without context."""
    source = (REPOSITORY / mutant.path).read_bytes()
    before, after = source.decode().splitlines(), mutant.apply(source).decode().splitlines()
    lines = list(difflib.unified_diff(before, after, lineterm="", n=0))[3:]
    return "\n".join(f"    {line}" for line in lines)


def judge(mutants: list[Mutant], folder: Path, results: Path, jobs: int) -> None:
    """Test the mutants that have no verdict yet; append each verdict to the results.

    First all mutants are tested within the first budget, then the survivors with further tests.
    """
    unreliable = {line["test"] for line in read_lines(folder / "unreliable.jsonl")}
    choice = Choice(read_map(folder), unreliable)
    verdicts = {line["key"]: line for line in read_lines(results)}
    new = [mutant for mutant in mutants if mutant.key not in verdicts]
    try_all(new, choice.tests, choice, folder, results, jobs)
    verdicts = {line["key"]: line for line in read_lines(results)}
    alive = [
        mutant
        for mutant in mutants
        if verdicts[mutant.key]["outcome"] == "survived" and not verdicts[mutant.key]["longer"]
    ]
    survivors = [mutant for mutant in alive if choice.remaining_tests(mutant)]
    if survivors:
        print(f"running further tests on {len(survivors)} survivors", flush=True)
    try_all(survivors, choice.remaining_tests, choice, folder, results, jobs, longer=True)


def try_all(
    mutants: list[Mutant],
    choose: Callable[[Mutant], list[str]],
    choice: Choice,
    folder: Path,
    results: Path,
    jobs: int,
    *,
    longer: bool = False,
) -> None:
    """Test mutants with the tests that ``choose`` returns; append each verdict to the results.

    If a mutant has several verdicts, the last of them is valid. ``longer`` is stored with the
    verdicts; it states whether the tests are the further tests of survivors.
    """
    keys = {mutant.key for mutant in mutants}

    def work(slot: int, share: list[Mutant]) -> None:
        tree = make_copy(folder / f"tree-{slot}")
        compile_sources(tree)
        for mutant in share:
            tests = choose(mutant)
            limit = START + PATIENCE * sum(choice.wall[test] for test in tests)
            verdict = try_mutant(mutant, tests, limit, tree, folder)
            row = {"key": mutant.key, **asdict(mutant), **asdict(verdict), "longer": longer}
            append(results, [row])
            done = sum(
                line["key"] in keys and line["longer"] == longer for line in read_lines(results)
            )
            told = f"{verdict.outcome} {mutant.path}:{mutant.line} {mutant.kind}"
            print(
                f"  {done}/{len(mutants)} {told}, {verdict.tests} tests, {verdict.seconds} s {verdict.by}",
                flush=True,
            )

    if mutants:
        spread(work, mutants, jobs)


def confirm(mutants: list[Mutant], folder: Path, results: Path) -> bool:
    """Run the tests that killed mutants again, without a mutant; return whether all of them pass.

    A test that fails without a mutant is unreliable. Its verdicts are deleted, and it is not chosen
    again.
    """
    keys = {mutant.key for mutant in mutants}
    lines = read_lines(results)
    confirmed = {line["test"] for line in read_lines(folder / "confirmed.jsonl")}
    killers = sorted(
        {line["by"] for line in lines if line["key"] in keys and "::" in line["by"]} - confirmed
    )
    if not killers:
        return True
    print(f"running the {len(killers)} tests that killed mutants without a mutant", flush=True)
    tree, result = make_copy(folder / "clean"), folder / "clean.json"
    result.unlink(missing_ok=True)
    code = wait(
        start(run_tests(killers, result, first=False), tree, folder / "clean.log", {}), 3600
    )
    if not result.exists():
        sys.exit(
            f"the tests did not run without a mutant (exit code {code}); see {folder / 'clean.log'}"
        )
    failed = set(json.loads(result.read_text())["failed"])
    append(folder / "confirmed.jsonl", [{"test": test} for test in killers if test not in failed])
    append(folder / "unreliable.jsonl", [{"test": test} for test in sorted(failed)])
    kept = [line for line in lines if line["by"] not in failed]
    results.write_text("".join(json.dumps(line) + "\n" for line in kept))
    for test in sorted(failed):
        print(f"  {test} fails without a mutant", flush=True)
    return not failed


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows to a JSONL file."""
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def report(
    mutants: list[Mutant], skipped: list[tuple[Mutant, Rule]], count: int, results: Path
) -> float:
    """Print the survivors, the skipped mutants and the rate of killed mutants; return the rate."""
    verdicts = {line["key"]: line for line in read_lines(results)}
    alive = [mutant for mutant in mutants if verdicts[mutant.key]["outcome"] != "killed"]
    for mutant in alive:
        outcome = verdicts[mutant.key]["outcome"]
        print(
            f"\n{outcome}: {mutant.path}:{mutant.line} ({mutant.kind}), {verdicts[mutant.key]['tests']} tests"
        )
        print(diff_of(mutant))
    if skipped:
        print("\nskipped, because they are equivalent or no test should detect the change:")
    for mutant, rule in skipped:
        print(f"  {mutant.path}:{mutant.line} ({mutant.kind}): {rule.reason}")
    rate = 1 - len(alive) / len(mutants)
    killed = len(mutants) - len(alive)
    print(
        f"\n{killed} of {len(mutants)} mutants killed ({rate:.0%}), drawn from {count}; {len(skipped)} skipped"
    )
    return rate


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(
        description="Count how many small faults in the library its tests detect."
    )
    parser.add_argument("--sample", type=int, default=100, help="number of mutants (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (default: 0)")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="number of mutants, or test files, that run at the same time (default: 1)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=["*"],
        help="draw only mutants of these files of src/fedclade: patterns such as 'core/*'",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=REPOSITORY / ".mutation",
        help="working folder (default: .mutation in the repository)",
    )
    parser.add_argument(
        "--least",
        type=float,
        default=0.92,
        help="lowest rate of killed mutants with which the command succeeds (default: 0.92)",
    )
    parser.add_argument(
        "--map", action="store_true", help="only record which test calls which function"
    )
    parser.add_argument(
        "--known",
        action="store_true",
        help="do not use test files without a record of the functions that they call",
    )
    chosen = parser.parse_args()
    folder: Path = chosen.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    preload()
    if not chosen.known:
        update_map(folder, chosen.jobs)
    if chosen.map:
        return
    mutants, skipped, count = draw(chosen.sample, chosen.seed, chosen.only)
    results = folder / f"seed-{chosen.seed}.jsonl"
    judge(mutants, folder, results, chosen.jobs)
    while not confirm(mutants, folder, results):
        judge(mutants, folder, results, chosen.jobs)
    rate = report(mutants, skipped, count, results)
    if rate < chosen.least:
        sys.exit(1)


if __name__ == "__main__":
    main()
