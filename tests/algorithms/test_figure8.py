"""The course of the CFL paper's figure 8, on digits: splits by calendar, and what follows each."""

from __future__ import annotations

import pytest

from fedclade import CFL, LocalTraining, Run, load_federation, simulate

SPLITS = (8, 12, 16)


@pytest.fixture(scope="module")
def run() -> Run:
    federation = load_federation(
        "digits", clients=20, shift="label_permutation", clusters=4, seed=0
    )
    local = LocalTraining(epochs=3, batch_size=20, lr=0.1)
    return simulate(
        CFL(split_rounds=SPLITS, eps2=0.7), "mlp", federation, local=local, rounds=20, seed=0
    )


def mean_accuracy(run: Run, members: tuple[int, ...], number: int) -> float:
    rows = [
        row["accuracy"]
        for row in run.client_rows
        if row["round"] == number and row["client"] in members
    ]
    return sum(rows) / len(rows)


def test_clusters_split_in_the_given_rounds_and_only_then(run: Run):
    assert {event["round"] for event in run.events if event["kind"] == "split"} == set(SPLITS)
    assert run.summary["clusters"]["ari"] == 1.0


def test_accuracy_jumps_for_the_clients_that_were_separated(run: Run):
    """Figure 8 (2): an immediate increase of 25 points there; here, too, within two rounds."""
    truth = {row["client"]: row["true_cluster"] for row in run.client_rows}
    separated = [
        n for n in run.tree.nodes if n.born and len({truth[client] for client in n.members}) == 1
    ]
    assert len(separated) == 4
    for node in separated:
        before, after = (
            mean_accuracy(run, node.members, number) for number in (node.born, node.born + 2)
        )
        assert after - before > 0.25


def test_the_separation_gap_is_positive_before_each_split_and_negative_in_the_end(run: Run):
    """Figure 8 (1) and (3)."""
    gaps = {(row["node"], row["round"]): row["separation_gap"] for row in run.cluster_rows}
    splits = [(event["node"], event["round"]) for event in run.events if event["kind"] == "split"]
    assert all(gaps[split] > 0 for split in splits)
    assert all(gaps[leaf.id, 20] < 0 for leaf in run.tree.leaves)
