"""Callbacks: who is called with what, in which order, and what happens when one fails."""

from __future__ import annotations

import re
from dataclasses import fields, replace

import pytest
import torch

from fedclade import (
    CFL,
    FLHC,
    IFCA,
    PACFL,
    Callback,
    ConfigError,
    EndRecord,
    FedGroup,
    FeSEM,
    LocalTraining,
    ReplicatedCFL,
    RoundRecord,
    Run,
    RunError,
    RunInterrupted,
    SplitRecord,
    UpdateError,
    simulate,
)
from fedclade.core import Clustered, ClusterSplit, ParameterTree, Regrouped
from fedclade.runs.splits import splits_of
from tests.tiny import federation_of, linear

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2)
SPLITS = CFL(eps2=1e-3, split_rounds=(2,))


class Heard(Callback):
    """Keeps all that it hears."""

    def __init__(self) -> None:
        self.splits, self.rounds, self.ends = (
            list[SplitRecord](),
            list[RoundRecord](),
            list[EndRecord](),
        )
        self.order: list[str] = []

    def on_split(self, record: SplitRecord, /) -> None:
        self.splits.append(record)
        self.order.append(f"split {record.round}")

    def on_round(self, record: RoundRecord, /) -> bool | None:
        self.rounds.append(record)
        self.order.append(f"round {record.round}")

    def on_end(self, record: EndRecord, /) -> None:
        self.ends.append(record)
        self.order.append(record.reason)


class Failing(Heard):
    """Fails whatever it hears, by an error of a kind."""

    def __init__(self, kind: type[Exception], *arguments: str) -> None:
        super().__init__()
        self.error = kind, arguments

    def on_round(self, record: RoundRecord, /) -> None:
        super().on_round(record)
        raise self.error[0](*self.error[1])

    def on_end(self, record: EndRecord, /) -> None:
        super().on_end(record)
        raise self.error[0](*self.error[1])


def run_of(algorithm="fedavg", *callbacks: Callback, truth=(0, 1, 0, 1), **settings) -> Run:
    settings = {"local": SPEC, "rounds": 3, "engine": "loop"} | settings
    return simulate(algorithm, linear(), federation_of(truth), callbacks=callbacks, **settings)


def assert_same_but_for_gains(ended: Run | None, run: Run) -> None:
    """Check that a run is the run at its end; the gains of clients are measured after that."""
    assert ended is not None
    for field in fields(Run):
        if field.name != "gains":
            assert getattr(ended, field.name) is getattr(run, field.name)


def test_splits_rounds_and_the_end_are_heard_in_order():
    heard = Heard()
    run = run_of(SPLITS, heard)
    assert heard.order == ["round 1", "split 2", "round 2", "round 3", "finished"]
    assert [record.metrics for record in heard.rounds] == run.metric_rows
    assert [len(record.tree.leaves) for record in heard.rounds] == [1, 2, 2]
    assert [[event.kind for event in record.events] for record in heard.rounds] == [
        [],
        ["split"],
        [],
    ]
    assert [record.last for record in heard.rounds] == [False, False, True]
    (end,) = heard.ends
    assert_same_but_for_gains(end.run, run)
    assert (end.error, end.folder) == (None, None)
    assert end.config["algorithm"]["split_rounds"] == (2,)


def test_a_split_says_which_members_go_where_and_why():
    heard = Heard()
    run_of(SPLITS, heard)
    (split,) = heard.splits
    assert (split.round, split.node, split.children) == (2, 0, {1: (0, 2), 2: (1, 3)})
    assert isinstance(split.event, ClusterSplit)
    assert split.criteria["max_norm"] == split.event.max_norm
    assert set(split.criteria) == {"mean_norm", "max_norm", "alpha_cross_max", "gamma_bound"}


@pytest.mark.parametrize(
    ("algorithm", "at", "event"),
    [
        (FLHC(rounds_before=1, n_clusters=2), 2, ClusterSplit),
        (PACFL(n_clusters=2), 1, Clustered),
        (FedGroup(groups=2), 1, None),
        (IFCA(clusters=2), 1, None),
        (FeSEM(clusters=2), 1, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_clusters_that_are_found_at_once_are_one_split(algorithm, at, event):
    heard = Heard()
    model = linear if isinstance(algorithm, IFCA | FeSEM) else linear()
    run = simulate(
        algorithm,
        model,
        federation_of((0, 1, 0, 1)),
        local=SPEC,
        rounds=3,
        engine="loop",
        callbacks=[heard],
    )
    peopled = [leaf for leaf in heard.rounds[at - 1].tree.leaves if leaf.members]
    assert len(peopled) == 2, "or this shows nothing"
    (split,) = heard.splits
    assert (split.round, split.node) == (at, 0)
    assert split.children == {leaf.id: leaf.members for leaf in peopled}
    assert split.event is None if event is None else isinstance(split.event, event)
    assert run.summary["rounds"] == 3


@pytest.mark.parametrize("algorithm", ["fedavg", "local", "oracle", "finetune"])
def test_methods_that_find_no_clusters_split_nothing(algorithm):
    heard = Heard()
    run_of(algorithm, heard)
    assert heard.order == ["round 1", "round 2", "round 3", "finished"]


def test_clusters_found_anew_are_a_split_if_one_is_new():
    heard = Heard()
    run = run_of(ReplicatedCFL(), heard, truth=[0] * 6 + [1] * 6, rounds=4)
    assert len(run.tree.leaves) == 2, "or this shows nothing"
    (split,) = heard.splits
    assert (split.round, split.node) == (3, 0)
    assert split.children == {leaf.id: leaf.members for leaf in run.tree.leaves}
    assert set(split.children.values()) == {tuple(range(6)), tuple(range(6, 12))}
    assert isinstance(split.event, Regrouped)
    assert split.criteria["p_value"] <= 0.01
    tree, event = run.tree, split.event
    assert splits_of(tree, tree, [event]) == [], "clients only moved"
    alone = ParameterTree.root_only(range(12), tree.nodes[0].params)
    assert splits_of(alone, tree, [event]) == [(0, split.children, event)]


def test_clusters_that_go_apart_further_in_one_round_are_a_split_each():
    before = ParameterTree.star([(0, 1), (2, 3)], torch.zeros(1))
    after = ParameterTree.star([(0,), (2,), (1,), (3,)], torch.zeros(1))
    first = Regrouped(1, 0.001, 1.0, 0.0, 0.01, None, ((0,), (1,)))
    second = replace(first, node=2, clusters=((2,), (3,)))
    found = [(1, {1: (0,), 3: (1,)}, first), (2, {2: (2,), 4: (3,)}, second)]
    assert splits_of(before, after, [first, second]) == found


def test_the_run_so_far_is_there_from_the_first_evaluation_on():
    heard, seen = Heard(), list[Run | None]()

    class Looks(Callback):
        def on_round(self, record: RoundRecord, /) -> None:
            seen.append(record.so_far())

    run = run_of("local", Looks(), heard, rounds=4, evaluate_every=2)
    none, *some = seen
    assert none is None
    assert [early.summary["rounds"] for early in some] == [2, 3, 4]
    assert [len(early.metric_rows) for early in some] == [2, 3, 4], "and no later round changes it"
    assert some[1].summary["accuracy"] == some[0].summary["accuracy"], "that of the last evaluation"
    assert some[2].client_rows == run.client_rows
    assert some[2].tree.leaf_of == run.tree.leaf_of


def test_a_callback_that_fails_costs_a_warning_for_each_moment_and_not_the_run(caplog):
    failing, heard = Failing(ZeroDivisionError, "in a callback"), Heard()
    run = run_of("local", failing, heard)
    assert failing.order == heard.order == ["round 1", "round 2", "round 3", "finished"]
    assert run.summary["rounds"] == 3
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "callback Failing.on_round failed in round 1; the run continues",
        "callback Failing.on_end failed",
    ]
    assert "ZeroDivisionError: in a callback" in caplog.text


def test_an_error_of_fedclades_own_ends_the_run_and_all_hear_of_it(tmp_path, caplog):
    heard, failing = Heard(), Failing(UpdateError, "enough")
    with pytest.raises(UpdateError, match="enough"):
        run_of("local", heard, failing, folder=tmp_path / "run")
    assert heard.order == failing.order == ["round 1", "failed"]
    (end,) = heard.ends
    assert isinstance(end.error, UpdateError)
    assert end.run is not None
    assert (end.run.summary["rounds"], end.folder) == (1, tmp_path / "run")
    assert "Failing.on_end failed: enough" in caplog.text, "and does not hide why the run ended"
    assert run_of("local", folder=tmp_path / "run").summary["rounds"] == 3, "the round was saved"


def test_an_error_at_the_end_is_raised_once_all_have_heard_and_the_run_is_kept(tmp_path):
    class Refuses(Callback):
        def on_end(self, record: EndRecord, /) -> None:
            raise RunError("no results wanted")

    heard = Heard()
    with pytest.raises(RunError, match="no results wanted"):
        run_of("local", Refuses(), heard, folder=tmp_path / "run")
    assert heard.order[-1] == "finished"
    assert Run.load(tmp_path / "run").summary["rounds"] == 3


def test_a_run_that_fails_before_its_first_evaluation_has_no_run_to_show():
    heard = Heard()
    with pytest.raises(UpdateError):
        run_of("fedavg", heard, local=LocalTraining(lr=1e30))
    assert heard.order == ["failed"]
    assert heard.ends[0].run is None


def test_a_callback_may_end_the_run_and_what_is_continued_is_heard_from_there_on(tmp_path):
    class Enough(Heard):
        def on_round(self, record: RoundRecord, /) -> bool:
            super().on_round(record)
            return record.round == 2

    enough, first, second, third = Enough(), Heard(), Heard(), Heard()
    with pytest.raises(RunInterrupted, match="interrupted after round 2"):
        run_of(SPLITS, enough, first, folder=tmp_path / "run", rounds=4)
    assert enough.order == first.order == ["round 1", "split 2", "round 2", "interrupted"]
    assert isinstance(first.ends[0].error, RunInterrupted)
    run = run_of(SPLITS, second, folder=tmp_path / "run", rounds=4)
    assert second.order == ["round 3", "round 4", "finished"]
    assert_same_but_for_gains(second.ends[0].run, run)
    run_of(SPLITS, third, folder=tmp_path / "run", rounds=4)
    assert third.order == [], "it had finished"


def test_no_callback_stops_a_run_after_its_last_round_and_only_true_stops_it():
    class Says(Heard):
        def on_round(self, record: RoundRecord, /) -> bool | None:
            super().on_round(record)
            return True if record.last else 1  # pyright: ignore[reportReturnType]

    says = Says()
    assert run_of("local", says, stop=lambda: False).summary["rounds"] == 3
    assert says.order == ["round 1", "round 2", "round 3", "finished"]


def test_who_presses_ctrl_c_interrupts():
    class Pressed(Heard):
        def on_round(self, record: RoundRecord, /) -> None:
            super().on_round(record)
            raise KeyboardInterrupt

    pressed = Pressed()
    with pytest.raises(KeyboardInterrupt):
        run_of("local", pressed)
    assert pressed.order == ["round 1", "interrupted"]


def test_results_that_cannot_be_written_are_a_failure(tmp_path, monkeypatch):
    def full(run, folder):
        raise RunError("no space left")

    heard = Heard()
    monkeypatch.setattr(Run, "finish", full)
    with pytest.raises(RunError, match="no space left"):
        run_of("local", heard, folder=tmp_path / "run")
    assert heard.order[-1] == "failed"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([Heard], "callbacks[0] of simulate should be of type Callback, got <class"),
        ([Heard], "; give an instance, such as Heard(...)"),
        (["mlflow"], "callbacks[0] of simulate should be of type Callback, got 'mlflow'"),
        (
            Heard(),
            "callbacks of simulate should be a list with entries that are each of type Callback, got <",
        ),
    ],
)
def test_what_is_no_callback_is_refused(given, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        simulate("local", linear(), federation_of((0, 1)), callbacks=given)
