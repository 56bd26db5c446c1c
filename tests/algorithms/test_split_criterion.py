"""Criteria by which CFL splits clusters: the paper's as an object, and one outside the package."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import fedclade
from fedclade import CFL, ConfigError, LocalTraining, RunError, simulate
from fedclade.algorithms import (
    ExaminedCluster,
    ProposedSplit,
    SplitCriterion,
    build_algorithm,
    describe,
)
from fedclade.algorithms.cfl import Thresholds
from fedclade.report import queries
from fedclade.report.page import write_report
from tests.algorithms.test_cfl_switches import EPS, START, InClosedForm, OneReplies, clients_of
from tests.tiny import federation_of, linear, play


@dataclass(frozen=True)
class InRound(SplitCriterion):
    """Split clusters of two clients or more in one round, the clients with even ids from the others."""

    number: int = 2
    groups: tuple[tuple[int, ...], ...] = ()
    is_done: bool = False

    def examine(self, cluster, state, clients, this_round):
        assert not cluster.waits
        ids = cluster.updates.ids
        groups = self.groups or (ids[::2][::-1], ids[1::2])
        if this_round.number != self.number or len(ids) < 2:
            return ExaminedCluster(cluster, is_done=self.is_done)
        node = state.tree.nodes[cluster.node]
        return ExaminedCluster(
            cluster, ProposedSplit(node, cluster.updates, groups, {"own_number": 3.0})
        )


def played(algorithm, rounds=4, clients=None, **options):
    return play(
        algorithm,
        clients or InClosedForm(clients_of(0)),
        torch.from_numpy(START),
        rounds,
        **options,
    )


def test_the_papers_thresholds_as_an_object_give_the_same_run():
    by_options = played(CFL(**EPS, compared_at="stationary"), 40)
    by_object = played(CFL(criterion=Thresholds(**EPS, compared_at="stationary")), 40)
    assert len(by_options.splits()) >= 3
    assert by_object.splits() == by_options.splits()
    for ours, theirs in zip(
        by_object.states[-1].tree.nodes, by_options.states[-1].tree.nodes, strict=True
    ):
        assert torch.equal(ours.params, theirs.params)
        assert ours.criteria == theirs.criteria


def test_a_criterion_of_ones_own_splits_clusters():
    run = played(CFL(criterion=InRound()))
    tree = run.states[-1].tree
    assert [leaf.members for leaf in tree.leaves] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert tree.nodes[0].criteria == {"own_number": 3.0}
    assert run.logs[1].phase == "split"
    for child in tree.leaves:
        made = run.clients.asked("train", 2)[0].answer.signatures_of(child.members)
        assert torch.equal(child.cached, made), (
            "in the order of the members, whatever that of the group is"
        )


def test_stragglers_of_a_split_are_not_examined():
    """Of eight clients those outside of the cohort wait at the root; InRound fails if it sees them."""
    run = played(CFL(criterion=InRound()), 6, fraction=0.5)
    assert any(state.tree.stragglers for state in run.states)
    assert len(run.states[-1].tree.leaves) == 2


def test_small_groups_of_a_criterion_of_ones_own_are_rejected():
    run = played(CFL(criterion=InRound(groups=((3,), (0, 1, 2))), min_cluster_size=2))
    (event,) = (event for log in run.logs for event in log.events)
    assert (event.kind, event.because) == ("rejected", "fewer than 2 members")
    assert len(run.states[-1].tree.nodes) == 1


def test_a_criterion_of_ones_own_can_end_a_run():
    algorithm = CFL(criterion=InRound(number=0, is_done=True), stop_when_stationary=True)
    assert algorithm.finished(played(algorithm, 1).states[-1])


@pytest.mark.parametrize(
    "groups",
    [((0, 1), (2, 3), (4, 5)), ((0, 1), ()), ((0, 1), (1, 2)), ((0, 1), (2, 9))],
    ids=["three", "empty", "shared", "unknown"],
)
def test_a_proposal_that_is_no_two_groups_is_refused(groups):
    text = (
        "the split of cluster 0 by InRound should be two groups of clients of this cluster "
        "that replied, with no client in both, "
        f"got {groups}"
    )
    with pytest.raises(ConfigError, match=re.escape(text)):
        played(CFL(criterion=InRound(groups=groups)))


def test_clients_that_did_not_reply_cannot_be_split():
    with pytest.raises(
        ConfigError,
        match=re.escape(
            "by AllMembers should be two groups of clients of this cluster that replied"
        ),
    ):
        played(CFL(criterion=AllMembers()), 1, OneReplies(clients_of(0)))


class AllMembers(InRound):
    """A criterion that splits members, whether or not they replied."""

    def examine(self, cluster, state, clients, this_round):
        node = state.tree.nodes[cluster.node]
        groups = (node.members[:4], node.members[4:])
        return ExaminedCluster(cluster, ProposedSplit(node, cluster.updates, groups, {}))


@pytest.mark.parametrize(
    ("option", "value"),
    [("eps1", 0.1), ("eps2", 2.0), ("gamma_max", 0.1), ("split_rounds", (3,)), ("level", 0.5)],
)
def test_options_of_the_other_criteria_are_refused(option, value):
    text = f"algorithm.{option} should be left out, since the criterion InRound does not use it, "
    with pytest.raises(ConfigError, match=re.escape(f"{text}got {value!r}")):
        CFL(criterion=InRound(), **{option: value})


@pytest.mark.parametrize(
    ("value", "got"),
    [(3, "3"), (InRound, "InRound"), ("norms", "'norms'")],
    ids=["number", "class", "name"],
)
def test_what_is_no_criterion_is_refused(value, got):
    with pytest.raises(ConfigError, match=rf"criterion .*SplitCriterion.*got .*{got}"):
        CFL(criterion=value)


def test_a_criterion_states_what_it_needs():
    assert CFL(criterion=InRound()).requires.updates
    assert not CFL(criterion=Thresholds()).requires.updates
    assert not CFL(criterion="replicated").requires.updates
    assert CFL(criterion=Thresholds(similarity="gradients")).requires.gradients


def test_the_config_of_a_run_describes_the_criterion_and_a_config_cannot_name_it():
    described = f"{__name__}:InRound(number=5, groups=(), is_done=False)"
    config = describe(CFL(criterion=InRound(5)))
    assert config["criterion"] == described
    assert describe(CFL())["criterion"] == "thresholds"
    options = {name: value for name, value in config.items() if name != "name"}
    with pytest.raises(
        ConfigError, match=re.escape(f"or in Python a SplitCriterion, got {described!r}")
    ):
        build_algorithm("cfl", options)


def test_a_run_with_a_criterion_of_ones_own_is_saved_reported_and_resumed_by_the_same_call(
    tmp_path: Path,
):
    federation = federation_of([0, 1, 0, 1], [20] * 4)
    options = {"local": LocalTraining(epochs=1, batch_size=10, lr=0.1), "engine": "loop"}
    whole = simulate(CFL(criterion=InRound()), linear(), federation, rounds=4, **options)
    rounds = iter((False, False, True, True))
    with pytest.raises(fedclade.RunInterrupted):
        simulate(
            CFL(criterion=InRound()),
            linear(),
            federation,
            rounds=4,
            folder=tmp_path / "run",
            stop=lambda: next(rounds),
            **options,
        )
    with pytest.raises(RunError, match="criterion"):
        simulate(
            CFL(criterion=InRound(3)),
            linear(),
            federation,
            rounds=4,
            folder=tmp_path / "run",
            **options,
        )
    run = simulate(
        CFL(criterion=InRound()), linear(), federation, rounds=4, folder=tmp_path / "run", **options
    )
    assert run.tree.nodes[0].criteria == whole.tree.nodes[0].criteria == {"own_number": 3.0}
    for ours, theirs in zip(run.tree.leaves, whole.tree.leaves, strict=True):
        assert ours.members == theirs.members
        assert torch.equal(ours.params, theirs.params)
    assert queries.norm_thresholds(run) == (None, None)
    page = write_report(fedclade.Run.load(tmp_path / "run"), tmp_path / "report.html")
    assert "own number" in page.read_text(encoding="utf-8")


def test_numbers_of_numpy_can_name_the_clients_of_a_split():
    @dataclass(frozen=True)
    class ByNumPy(SplitCriterion):
        def examine(self, cluster, state, clients, this_round):
            ids = np.array(cluster.updates.ids)
            if this_round.number > 1:
                return ExaminedCluster(cluster)
            groups = (tuple(ids[:3]), tuple(ids[3:]))
            return ExaminedCluster(
                cluster,
                ProposedSplit(
                    state.tree.nodes[cluster.node], cluster.updates, groups, {"gain": 0.5}
                ),
            )

    run = played(CFL(criterion=ByNumPy()), 1)
    (event,) = run.logs[0].events
    assert event.gain == 0.5
    assert {type(client) for cluster in event.clusters for client in cluster} == {int}
