"""The check of dependency bounds knows every package, and constrains it to its lowest version."""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.versions.check_versions import (
    ROOT,
    TESTS,
    lowest_constraints,
    lowest_version,
    requirements,
)


def test_every_package_that_a_user_can_install_has_tests_that_exist():
    assert set(TESTS) == {required.name for required in requirements()}
    for tests in TESTS.values():
        assert tests
        for test in tests:
            assert (ROOT / test).exists(), test


@pytest.mark.parametrize("required", requirements(), ids=lambda required: required.name)
def test_the_lowest_version_is_within_the_bounds(required: Requirement):
    lowest = lowest_version(required)
    if lowest is None:
        assert required.name == "click", "each package has a lower bound, but one that others need"
    else:
        assert required.specifier.contains(lowest)
        assert not required.specifier.contains(Version(f"{lowest}.dev0"), prereleases=True)


def test_constraints_are_the_lowest_versions_but_for_those_to_keep():
    required = [
        Requirement("torch>=2.11"),
        Requirement("flwr>=1.41,<1.43"),
        Requirement("click<8.5"),
    ]
    assert lowest_constraints(required, ["torch==2.13.0"]) == ["torch==2.13.0", "flwr==1.41"]
    assert lowest_constraints(required, []) == ["torch==2.11", "flwr==1.41"]
