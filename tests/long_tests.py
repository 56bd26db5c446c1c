"""List of the tests that take long, which `make test` leaves out and `make test-all` runs.

    make test-all PYTEST_ADDOPTS=--junitxml=tests.xml
    python -m tests.long_tests tests.xml

writes the list anew from the measured seconds of each test, to ``long_tests.txt``.
"""

from __future__ import annotations

import argparse
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_suffix(".txt")

LONGEST = 0.7
"""Seconds of the longest case of a test function that `make test` runs, on a busy machine."""


def read_list() -> frozenset[str]:
    """Return the functions on the list, such as ``tests/core/test_rng.py::test_keys``."""
    return frozenset(FILE.read_text(encoding="utf-8").split())


def find_long_functions(report: Path, longest: float) -> list[str]:
    """Return the test functions of a JUnit report that take long.

    A function takes long if one of its cases takes more than ``longest`` seconds, and an average
    case more than half of that.
    """
    seconds: dict[str, list[float]] = defaultdict(list)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        module = case.attrib["classname"].replace(".", "/")
        function = case.attrib["name"].partition("[")[0]
        seconds[f"{module}.py::{function}"].append(float(case.attrib["time"]))
    return sorted(
        function
        for function, times in seconds.items()
        if max(times) > longest and sum(times) / len(times) > longest / 2
    )


def main() -> None:
    """Write the list."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path, help="JUnit report of all tests")
    parser.add_argument("--longest", type=float, default=LONGEST, help="seconds")
    arguments = parser.parse_args()
    functions = find_long_functions(arguments.report, arguments.longest)
    FILE.write_text("\n".join(functions) + "\n", encoding="utf-8")
    print(f"{len(functions)} functions take more than {arguments.longest} s")


if __name__ == "__main__":
    main()
