"""Stable groups in the events and the summary of a run, and runs from before they were measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fedclade import LocalTraining, ReplicatedCFL, Run, load_federation, simulate
from fedclade.algorithms.rcfl.replicate_test import cluster_by_splits
from fedclade.clustering import compute_part_similarity
from fedclade.core import Checked, Regrouped
from fedclade.report.page import write_report
from fedclade.report.tables import facts
from fedclade.runs.stable_groups import find_stable_groups, summarize_stable_groups
from fedclade.runs.store.event_rows import event_of


def verdict_of(truth: list[int]):
    """Return the verdict of a test of clients with these groups."""
    draw = np.random.default_rng(0)
    rows = np.eye(30)[truth][:, None] + 0.5 * draw.normal(size=(len(truth), 3, 30)) / 30**0.5
    cosines = torch.from_numpy(compute_part_similarity(torch.from_numpy(rows)))
    return cluster_by_splits(cosines, 3, 0.01, draw, level_inside=0.01)


def test_the_event_of_a_check_has_the_stable_groups_by_their_clients():
    ids = [10 + client for client in range(12)]
    event = verdict_of([0] * 6 + [1] * 6).make_event(Regrouped, 0, ids)
    assert event.clusters == (tuple(ids[:6]), tuple(ids[6:]))
    assert event.stable_groups == event.clusters
    assert event.stability == pytest.approx(1)


def test_the_event_of_a_check_with_one_cluster_has_no_stability():
    event = verdict_of([0] * 12).make_event(Checked, 0, range(12))
    assert len(event.clusters) == 1
    assert {"stability", "stable_groups"}.isdisjoint(event.to_row(3))


def test_events_are_read_with_and_without_the_stable_groups():
    event = verdict_of([0] * 6 + [1] * 6).make_event(Regrouped, 0, range(12))
    row = json.loads(json.dumps(event.to_row(3)))
    assert event_of(row, Regrouped) == event
    older = {key: row[key] for key in row if key not in ("stability", "stable_groups")}
    found = event_of(older, Regrouped)
    assert found is not None
    assert (found.stability, found.stable_groups) == (None, None)
    none = event_of({**row, "stable_groups": []}, Regrouped)
    assert none is not None
    assert none.stable_groups == ()
    assert event_of({**row, "stable_groups": 3}, Regrouped) is None


def regrouped(node: int, stability: float | None, *groups: list[int]) -> dict:
    row = {"round": 3, "kind": "regrouped", "node": node}
    return row if stability is None else {**row, "stability": stability, "stable_groups": groups}


def test_of_the_checks_of_the_last_clusters_the_one_with_the_highest_stability_counts():
    first = regrouped(0, 0.9, [0, 1], [2, 3])
    checked = {**regrouped(0, 0.1), "kind": "checked"}
    not_measured = {**regrouped(0, None), "kind": "checked"}
    stable = (0.9, [[0, 1], [2, 3]])
    assert find_stable_groups([first, checked, not_measured]) == stable
    clearer = {**first, "kind": "checked"}
    assert find_stable_groups([regrouped(0, 0.3), clearer]) == stable
    assert find_stable_groups([clearer, regrouped(0, 0.3)]) == (0.3, [])
    assert find_stable_groups([first, regrouped(0, 0.2)]) == (0.2, [])
    assert find_stable_groups([first, regrouped(0, None)]) is None, "one cluster again"
    assert find_stable_groups([]) is None


def test_groups_inside_a_stable_group_replace_it():
    first = regrouped(0, 0.9, [0, 1, 2], [3, 4])
    divided = [first, regrouped(1, 0.8, [0], [1, 2])]
    assert find_stable_groups(divided) == (0.8, [[3, 4], [0], [1, 2]])
    assert summarize_stable_groups(divided) == {"stability": 0.8, "stable_sizes": [2, 2, 1]}
    not_stable = regrouped(1, 0.3)
    part_of_a_group = regrouped(1, 0.8, [0], [1])
    for later in (not_stable, part_of_a_group):
        assert find_stable_groups([first, later]) == (0.9, [[0, 1, 2], [3, 4]])


def test_nothing_is_told_of_clusters_that_the_log_withholds():
    withheld = {"round": 4, "kind": "withheld", "node": 0, "clusters": 1, "least": 3}
    assert summarize_stable_groups([regrouped(0, 0.9, [0, 1], [2, 3]), withheld]) == {}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    federation = load_federation(
        "digits", clients=8, samples_per_client=100, shift="label_permutation", clusters=2
    )
    folder = tmp_path_factory.mktemp("runs") / "stable"
    simulate(
        ReplicatedCFL(),
        "mlp",
        federation,
        local=LocalTraining(epochs=3, batch_size=20, lr=0.1),
        rounds=4,
        folder=folder,
        progress=False,
    )
    return folder


def test_a_run_tells_its_stable_groups_in_summary_terminal_and_report(run_folder, tmp_path):
    run = Run.load(run_folder)
    clusters = run.summary["clusters"]
    assert clusters["stable_sizes"] == [4, 4]
    found = find_stable_groups(run.events)
    assert found is not None
    assert found[1] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    sentence = f"Stable groups: 2 (stability {clusters['stability']:.2f})."
    assert sentence in [text for _, text in facts(run)]
    assert sentence in write_report(run, tmp_path / "report.html").read_text()


def test_a_run_from_before_stable_groups_still_opens(run_folder, tmp_path):
    run = Run.load(run_folder)
    summary = {**run.summary, "clusters": dict(run.summary["clusters"])}
    for name in ("stability", "stable_sizes"):
        del summary["clusters"][name]
    events = [
        {key: row[key] for key in row if key not in ("stability", "stable_groups")}
        for row in run.events
    ]
    older = Run(
        summary,
        run.config,
        run.tree,
        run.metric_rows,
        run.cluster_rows,
        run.client_rows,
        events,
        run.similarities,
    )
    older.save(tmp_path / "older")
    assert "stab" not in (tmp_path / "older" / "events.jsonl").read_text()
    opened = Run.load(tmp_path / "older")
    assert not [text for _, text in facts(opened) if "table groups" in text]
    page = write_report(opened, tmp_path / "report.html").read_text()
    assert "Stable groups: " not in page
