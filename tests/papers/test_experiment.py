"""Experiments: what a scale changes of the paper's settings, what data it needs, and the tables they are read from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedclade.core.errors import ConfigError
from fedclade_papers.experiment import Paper, read_tables
from tests.papers.examples import TINY


def test_a_scale_changes_the_papers_settings_where_it_says_so():
    assert TINY.settings("laptop") == {"seeds": [1, 3], "rounds": 10, "data": "mnist"}
    assert TINY.differences(TINY.settings("laptop")) == {
        "seeds": ([0, 1, 2], [1, 3]),
        "rounds": (100, 10),
    }
    assert TINY.settings("paper") == TINY.paper
    assert TINY.differences(TINY.settings("paper")) == {}


def test_a_scale_can_be_changed_by_settings_that_there_are():
    changed = TINY.settings("laptop", {"rounds": 100, "seeds": [7]})
    assert changed == {"seeds": [7], "rounds": 100, "data": "mnist"}
    assert TINY.differences(changed) == {"seeds": ([0, 1, 2], [7])}
    with pytest.raises(ConfigError, match=r"unknown setting of tiny 'round'.*rounds"):
        TINY.settings("laptop", {"round": 100})


def test_a_change_of_a_setting_that_the_paper_has_not_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"experiment tiny: the scale 'smoke' changes \['lr'\], which are not among the paper's",
    ):
        replace(TINY, changes={"smoke": {"lr": 1}, "laptop": {}})


def test_the_smallest_scale_may_need_other_data():
    experiment = replace(TINY, data=("mnist",))
    assert experiment.needs("smoke") == experiment.needs("laptop") == ("mnist",)
    alone = replace(experiment, smoke_data=())
    assert (alone.needs("smoke"), alone.needs("paper")) == ((), ("mnist",))


def test_tables_begin_with_those_that_they_use_and_dashes_stand_for_none(tmp_path: Path):
    (tmp_path / "some.toml").write_text("""
        shared.base = { a = 1, b = "–" }
        shared.more = { use = ["base"], a = 2, c = [1, "–"] }
        [experiment.settings]
        use = ["more"]
        b = { use = ["base"] }
    """)
    found = read_tables(tmp_path / "some.toml")["experiment"]["settings"]
    assert found == {"a": 2, "b": {"a": 1, "b": None}, "c": [1, None]}
    assert list(found) == ["a", "b", "c"]


def test_claims_are_named_by_key_and_remarks_follow_those_of_the_paper():
    paper = Paper("It rises.", "Other data.", ["first"], {"rises": "{what} rises"})
    claim = paper.claim("rises", 1 > 0, "+1", what="the accuracy")
    assert (claim.text, claim.holds, claim.measured) == ("the accuracy rises", True, "+1")
    outcome = paper.outcome([], [claim], {}, "+1 %.", remarks=["second"])
    assert (outcome.remarks, outcome.summary.because) == (("first", "second"), "Other data.")
    assert paper.outcome([], [claim], {}, "+1 %.", because="").summary.because == ""
