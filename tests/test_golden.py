"""The golden runs: they cover all methods, repeat to the last bit, and notice errors."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, RecordDict

from fedclade.algorithms import ALGORITHMS
from fedclade.channel.adversary import KINDS, LIES
from fedclade.channel.example_privacy import mechanism_of
from fedclade.core.updates import Rule
from fedclade.flower import wire
from fedclade.flower.signing import Key
from fedclade.training import ENGINES

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import golden  # noqa: E402
from golden_runs import cases, digest, running  # noqa: E402
from golden_runs.planted import PLANTED, PlantedError  # noqa: E402

CASES = {case.name: case for case in cases.all_cases()}
FIGURES = json.loads(golden.FIGURES.read_text())

HERE = [case for case in CASES.values() if case.kind == "simulation"]
NETWORK = [case for case in CASES.values() if case.kind == "network"]
RAY = [case for case in CASES.values() if case.kind == "ray"]


@pytest.fixture(autouse=True)
def _one_thread_and_no_log() -> Iterator[None]:
    """Sums of several threads are rounded differently; and adversaries fill the log."""
    threads, level = torch.get_num_threads(), logging.getLogger("fedclade").level
    torch.set_num_threads(1)
    logging.getLogger("fedclade").setLevel(logging.ERROR)
    yield
    torch.set_num_threads(threads)
    logging.getLogger("fedclade").setLevel(level)


def settings_with(key: str) -> set[Any]:
    """Return the values that any case has for a setting."""
    return {case.settings[key] for case in CASES.values() if key in case.settings}


def test_every_registered_method_has_a_case():
    assert set(cases.METHODS) == set(ALGORITHMS)
    for name, settings in cases.METHODS.items():
        assert settings["algorithm.name"] == name


def test_every_method_of_a_network_has_a_case_there():
    alone = {name for name, entry in ALGORITHMS.items() if entry.requires.simulation}
    over_network = {case.settings["algorithm.name"] for case in NETWORK}
    assert not alone & over_network
    assert over_network >= {"cfl", "rcfl", "fedem", "scaffold", "ditto", "pacfl", "flux", "flexcfl"}


def test_every_rule_engine_adversary_and_lie_has_a_case():
    assert {"mean", *settings_with("aggregate.rule")} == set(get_args(Rule))
    assert {cases.BASE["engine"], *settings_with("engine")} - {"ray"} == set(ENGINES) - {"auto"}
    assert settings_with("adversary.kind") == set(KINDS)
    assert set(cases.LIES) == set(LIES)


def test_every_kind_of_privacy_has_a_case():
    kinds: set[str] = set()
    for settings in (*cases.PRIVACY.values(), *cases.METHODS.values()):
        section = running.sections(settings).get("privacy", {})
        mechanism = mechanism_of(section)
        kinds.add("none" if mechanism is None else type(mechanism).__name__)
    assert kinds == {"none", "DifferentialPrivacy", "ExamplePrivacy", "CentralPrivacy"}


@pytest.mark.parametrize(
    "key",
    [
        *(
            "data.drift",
            "presence.trace",
            "newcomers.join_round",
            "newcomers.leave_round",
            "stream",
        ),
        *("model.adapter", "model.freeze", "model.personal", "model.common", "local.keep_state"),
        *("network.secure_aggregation", "network.encoding", "privacy.permute", "faults.dropout"),
        *("aggregate.mixing", "aggregate.leave_out_opposed", "task.class_weights", "keep_best"),
    ],
)
def test_every_part_of_a_run_has_a_case(key):
    assert any(key in case.settings for case in CASES.values())


def test_names_are_unique_and_all_have_figures():
    names = [case.name for case in cases.all_cases()]
    assert len(names) == len(set(names))
    assert sorted(FIGURES) == sorted(names)


def test_the_last_bit_of_a_number_counts_and_the_clock_does_not():
    row = {"round": 1, "loss": 0.1, "seconds_train": 2.0}
    assert digest.digest_of(row) != digest.digest_of({**row, "loss": np.nextafter(0.1, 1)})
    later = digest.without_clock([{**row, "seconds_train": 3.0}])
    assert later == digest.without_clock([row])
    without = digest.without_clock([{"round": 1, "loss": 0.1}])
    assert digest.digest_of(without) != digest.digest_of(later)
    assert digest.vector_digest(torch.zeros(3)) != digest.vector_digest(torch.zeros(3, 1))


def test_a_value_of_an_unknown_type_is_an_error():
    with pytest.raises(TypeError, match="a digest cannot contain a object: <object object at"):
        digest.digest_of({"value": object()})


def message_of(nonce: str, **values: Any) -> RecordDict:
    """Return a signed message with a vector."""
    content = wire.record(values, {"0": wire.raw_vector(torch.ones(2))})
    return wire.with_proof(content, wire.pack({"nonce": nonce, "key": Key.new().public}))


def test_a_message_counts_but_for_what_is_drawn_by_chance():
    one = running.describe_message(message_of("ab", round=1, shares=False, signers=["x", "y"]))
    same = running.describe_message(message_of("cd", round=1, shares=False, signers=["v", "w"]))
    assert one == same
    for other in (
        message_of("ab", round=2, shares=False, signers=["x", "y"]),
        message_of("ab", round=1, shares=True, signers=["x", "y"]),
        message_of("ab", round=1, shares=False, signers=["x"]),
        message_of("abc", round=1, shares=False, signers=["x", "y"]),
    ):
        assert running.describe_message(other) != one
    moved = message_of("ab", round=1, shares=False, signers=["x", "y"])
    moved["vectors"] = ArrayRecord({"0": wire.raw_vector(torch.tensor([1.0, 2.0]))})
    assert running.describe_message(moved) != one


def run_golden(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["golden.py", *map(str, arguments)])
    return golden.main()


def test_check_names_the_parts_that_differ(tmp_path, monkeypatch, capsys):
    file = tmp_path / "golden.json"
    only = ["--only", "method: fedbuff"]
    assert run_golden(monkeypatch, "write", file, *only) == 0
    assert run_golden(monkeypatch, "check", file, *only) == 0
    digests = json.loads(file.read_text())
    digests["method: fedbuff"]["tree"] = "another"
    file.write_text(json.dumps(digests))
    capsys.readouterr()
    assert run_golden(monkeypatch, "check", file, *only) == 1
    assert "DIFFERS: tree" in capsys.readouterr().out
    assert run_golden(monkeypatch, "check", file, *only, "--ignore", "tree") == 0


def test_a_case_that_the_file_lacks_differs():
    assert golden.changed_parts(None, {"tree": "a"}, []) == ["all: the case is not in the file"]
    assert golden.changed_parts({"tree": "a"}, {"tree": "a", "kept": "b"}, []) == ["kept"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["write"], "write needs a FILE"),
        (["check"], "check needs a FILE or --against COMMIT"),
        (["check", "golden.json", "--against", "HEAD"], "check needs a FILE or --against COMMIT"),
        (["write", "golden.json", "--source", "elsewhere"], "fedclade comes from "),
        (
            ["write", "golden.json", "--only", "no such case"],
            "no case has 'no such case' in its name",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments, why, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run_golden(monkeypatch, *arguments)
    assert why in capsys.readouterr().err


@cache
def result_of(name: str) -> golden.Result:
    """Return the result of a case, which is run once for all tests."""
    return golden.result_of(CASES[name])


def assert_figures(name: str) -> None:
    """Check the loss, score, clusters and bytes of a case against the committed ones."""
    figures, expected = result_of(name)["figures"], FIGURES[name]
    for column in ("clusters", "bytes_up", "bytes_down"):
        assert figures[column] == expected[column], column
    assert figures["loss"] == pytest.approx(expected["loss"], rel=0.02, abs=0.01)
    assert figures["accuracy"] == pytest.approx(expected["accuracy"], abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("case", HERE, ids=lambda case: case.name)
def test_an_interrupted_run_ends_as_the_whole_one_does(case, tmp_path):
    assert_figures(case.name)
    resumed = digest.digests_of(running.resume_case(case, tmp_path))
    assert golden.changed_parts(result_of(case.name)["digests"], resumed, []) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", NETWORK, ids=lambda case: case.name)
def test_a_run_over_a_network_repeats(case):
    assert_figures(case.name)
    again = golden.result_of(case)["digests"]
    assert golden.changed_parts(result_of(case.name)["digests"], again, []) == []


@pytest.mark.slow
def test_runs_on_two_ray_actors_repeat(monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # by default actors wait for all other processes
    with running.ray_cluster():
        for case in RAY:
            assert_figures(case.name)
            again = golden.result_of(case)["digests"]
            assert golden.changed_parts(result_of(case.name)["digests"], again, []) == []


@pytest.mark.slow
@pytest.mark.parametrize("error", PLANTED, ids=lambda error: error.name)
def test_an_error_that_is_planted_is_noticed(error: PlantedError):
    with error.plant():
        digests = golden.result_of(CASES[error.case])["digests"]
    changed = golden.changed_parts(result_of(error.case)["digests"], digests, [])
    assert error.part in changed


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the commit is made in a clone of git")
def test_the_source_of_another_commit_is_compared(monkeypatch, capfd):
    before = git("worktree", "list", "--porcelain")
    arguments = ["check", "--against", "HEAD", "--only", "method: fedbuff"]
    assert run_golden(monkeypatch, *arguments) == 0
    assert "1 of 1 the same" in capfd.readouterr().out
    assert git("worktree", "list", "--porcelain") == before  # the temporary one is gone


def git(*arguments: str) -> str:
    """Return the output of git, run in this repository."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout
