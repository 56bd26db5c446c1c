"""The list of tests that take long names tests that exist, and comes from measured seconds."""

from __future__ import annotations

from pathlib import Path

from tests.long_tests import ROOT, find_long_functions, read_list

REPORT = """<testsuites><testsuite>
<testcase classname="tests.core.test_a" name="test_x[1]" time="0.2"/>
<testcase classname="tests.core.test_a" name="test_x[2]" time="3.0"/>
<testcase classname="tests.core.test_a" name="test_y" time="0.9"/>
<testcase classname="tests.core.test_a" name="test_z[1]" time="1.2"/>
<testcase classname="tests.core.test_a" name="test_z[2]" time="0.1"/>
<testcase classname="tests.core.test_a" name="test_z[3]" time="0.1"/>
</testsuite></testsuites>"""


def test_every_function_on_the_list_exists():
    functions = read_list()
    assert functions
    for function in functions:
        file, _, name = function.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), function


def test_functions_take_long_by_their_longest_and_their_average_case(tmp_path: Path):
    report = tmp_path / "tests.xml"
    report.write_text(REPORT, encoding="utf-8")
    assert find_long_functions(report, longest=1.0) == ["tests/core/test_a.py::test_x"]
    assert find_long_functions(report, longest=0.5) == [
        "tests/core/test_a.py::test_x",
        "tests/core/test_a.py::test_y",
        "tests/core/test_a.py::test_z",
    ]
