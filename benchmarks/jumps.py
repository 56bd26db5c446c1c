"""Print how splits change the accuracy of clients, and the separation gaps of the clusters.

For each cluster that was split, the script prints the gap in the round of the split. For each
final cluster, it prints the accuracy of its clients before and after the cluster was formed, and
the gap after the last round. RUN is a run folder.

python benchmarks/jumps.py RUN
"""

from __future__ import annotations

import sys

from fedclade import Node, Run


def mean_accuracy(run: Run, node: Node, number: int) -> float:
    """Return the mean accuracy after a round of the clients that are in a cluster at the end."""
    values = [
        r["accuracy"]
        for r in run.client_rows
        if r["round"] == number and r["client"] in node.members
    ]
    return sum(values) / len(values)


def main() -> None:
    run = Run.load(sys.argv[1])
    gaps = {(row["node"], row["round"]): row["separation_gap"] for row in run.cluster_rows}
    for node in run.tree.nodes:
        if node.split_in:
            print(
                f"cluster {node.id}: split in round {node.split_in}, separation gap {gaps[node.id, node.split_in]:.2f}"
            )
    last = run.summary["rounds"]
    for leaf in run.tree.leaves:
        before, after = (mean_accuracy(run, leaf, number) for number in (leaf.born, leaf.born + 1))
        gap = gaps[leaf.id, last]
        print(
            f"cluster {leaf.id}: {before:.1%} to {after:.1%} after round {leaf.born}, "
            f"gap {gap:.2f} at the end"
        )


if __name__ == "__main__":
    main()
