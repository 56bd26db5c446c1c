"""The thresholds in the report are those that CFL has split by."""

from __future__ import annotations

from dataclasses import asdict, replace

from fedclade import CFL, LocalTraining, load_federation, simulate
from fedclade.report import queries


def test_clusters_are_split_where_their_mean_norm_falls_below_the_threshold_that_is_drawn():
    algorithm = CFL(eps1="auto", eps2=0.6)
    federation = load_federation("digits", clients=12, shift="label_swap", clusters=3)
    local = LocalTraining(epochs=3, batch_size=20, lr=0.1)
    run = simulate(
        algorithm,
        "mlp",
        federation,
        local=local,
        rounds=30,
        seed=0,
        evaluate_every=30,
        engine="stacked",
    )
    run = replace(run, config={"algorithm": asdict(algorithm)})
    eps2, eps1 = queries.norm_thresholds(run)
    assert isinstance(eps1, dict)
    below: dict[int, list[int]] = {}
    for row in run.cluster_rows:
        series = eps1[row["node"]]
        threshold = series.values[series.rounds.index(row["round"])]
        if (
            len(run.tree.nodes[row["node"]].members) > 1
            and row["mean_norm"] < threshold
            and row["max_norm"] > eps2
        ):
            below.setdefault(row["node"], []).append(row["round"])
    split = {node.id: [node.split_in] for node in run.tree.nodes if node.split_in is not None}
    assert split
    assert below == split
