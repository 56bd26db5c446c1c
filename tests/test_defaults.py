"""A default that changes is noticed."""

from __future__ import annotations

from tests.defaults import HEAD, TABLE, default_lines


def test_defaults_are_those_of_the_table():
    """``python -m tests.defaults`` writes the table anew after a change that is meant."""
    text = TABLE.read_text()
    assert text.startswith(HEAD)
    listed = [line for line in text.splitlines() if not line.startswith("#")]
    found = default_lines()
    assert len(found) > 500
    assert [line for line in found if line not in listed] == [], "not in the table"
    assert [line for line in listed if line not in found] == [], "only in the table"
