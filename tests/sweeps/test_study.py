"""What trials draw: by the seed, by what was told before, and by nothing else."""

from __future__ import annotations

import math

import pytest

from fedclade import RunError
from fedclade.sweeps import Parameter
from fedclade.sweeps.study import JOURNAL, Study

pytest.importorskip("optuna")

SPACE = [
    Parameter("local.lr", 0.01, 0.3, log=True),
    Parameter("model.name", values={"a": "a", "b": "b"}),
]
TRIALS = 14
"""The last four of them are drawn by what those before came to."""


def study(folder, sampler="tpe", seed=0, parameters=SPACE, **of) -> Study:
    folder.mkdir(exist_ok=True)
    return Study(folder, parameters, sampler, seed, higher_is_better=True, of=of)


def run(found: Study, until: int, side_by_side: int = 1, killed_at: int = TRIALS) -> list[dict]:
    """Draw and tell as a sweep does."""
    drawn: list[dict] = []
    for told in range(min(until, killed_at)):
        while len(drawn) < min(until, told + side_by_side):
            drawn.append(found.drawn(len(drawn)))
        if not found.has_ended(told):
            found.tell(told, -abs(math.log(drawn[told]["local.lr"] / 0.1)))
    return drawn


@pytest.mark.parametrize("side_by_side", [1, 3])
def test_an_interruption_changes_nothing(tmp_path, side_by_side):
    whole = run(study(tmp_path / "whole"), TRIALS, side_by_side)
    run(study(tmp_path / "parts"), TRIALS, side_by_side, killed_at=12)
    with (tmp_path / "parts" / JOURNAL).open("a") as journal:
        journal.write('{"op_code": 5, "study')  # of a process that was killed
    assert run(study(tmp_path / "parts"), TRIALS, side_by_side) == whole
    assert all(0.01 <= drawn["local.lr"] <= 0.3 for drawn in whole)


def test_a_trial_that_drew_and_did_not_end_is_not_drawn_again(tmp_path):
    before = study(tmp_path / "s").drawn(0)
    again = study(tmp_path / "s")
    assert not again.has_ended(0)
    assert again.drawn(0) == before
    assert len(again.trials) == 1


def test_another_seed_draws_otherwise_and_random_regardless_of_scores(tmp_path):
    first = run(study(tmp_path / "a"), 2)
    assert run(study(tmp_path / "b", seed=1), 2) != first
    one, other = study(tmp_path / "c", "random"), study(tmp_path / "d", "random")
    for number in range(TRIALS):
        assert one.drawn(number) == other.drawn(number)
        one.tell(number, 1.0)
        other.tell(number, float(-number))


def test_a_grid_has_each_combination_once(tmp_path):
    parameters = [Parameter("local.epochs", 1, 3), SPACE[1]]
    found = study(tmp_path / "s", "grid", parameters=parameters)
    drawn = []
    for number in range(6):
        drawn.append(found.drawn(number))
        found.tell(number, 0.0)
    expected = [{"local.epochs": n, "model.name": name} for n in (1, 2, 3) for name in "ab"]
    assert drawn == expected


def test_why_a_trial_failed_is_kept(tmp_path):
    found = study(tmp_path / "s")
    found.drawn(0)
    found.tell(0, None, "it diverged")
    again = study(tmp_path / "s")
    assert again.has_ended(0)
    assert again.failure(0) == "it diverged"


def test_a_trial_that_was_killed_while_it_drew_has_failed(tmp_path):
    study(tmp_path / "s").study.ask()
    found = study(tmp_path / "s")
    assert found.drawn(0) == {}
    assert found.failure(0) == "interrupted while its values were drawn"
    assert set(found.drawn(1)) == {"local.lr", "model.name"}


def test_a_journal_of_another_sweep_or_of_nothing_is_refused(tmp_path):
    study(tmp_path / "s", rounds=3)
    study(tmp_path / "s", rounds=3)
    with pytest.raises(
        RunError,
        match="contains a sweep with other settings: its rounds is 3, not 4; use the same command",
    ):
        study(tmp_path / "s", rounds=4)
    (tmp_path / "s" / JOURNAL).write_text("nothing\n")
    with pytest.raises(RunError, match=r"cannot read or write .*trials\.journal"):
        study(tmp_path / "s", rounds=3)
