"""Measure how accurately newcomers are assigned to clusters.

Each algorithm runs on MNIST with four label swaps. Newcomers, which do not take part in the run,
are then assigned to the leaves of its tree: with 300 and with 40 images; as *strangers*, which are
the same clients with random permutations of all labels, so that they belong to no cluster; and by
signatures that are projected to 1024 numbers. The script also prints the ranges of the scores that
decide whether a newcomer fits: the scores of all steps of newcomers, and of the first steps of
strangers.

    python benchmarks/newcomers.py --data-dir DIR --algorithms cfl ifca --seeds 3
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from fedclade import Federation, Run, Signature
from fedclade.clustering.routing import Assignment, find_least_similarity
from fedclade.config import read_config
from fedclade.config.toml_files import find_config
from fedclade.runs.newcomers import Arrival

ALGORITHMS = ("cfl", "fl_hc", "fedgroup", "ifca")
SAMPLES = (300, 40)
PROJECTED = {"kind": "projected", "dim": 1024}


def place(run: Run, newcomers: Federation) -> Sequence[Assignment]:
    """Return the assignment of each newcomer in a run's tree."""
    return Arrival.of(run, newcomers).assignments()


def strangers(newcomers: Federation, seed: int) -> Federation:
    """Return the same clients, each with a random permutation of the labels."""
    draw = np.random.default_rng(seed)
    clients = [
        replace(c, label_map=torch.tensor(draw.permutation(newcomers.pool.outputs)))
        for c in newcomers.clients
    ]
    return replace(newcomers, clients=tuple(clients))


def projected(run: Run, n_parameters: int) -> Run:
    """Return the run with sketches in place of its cached signatures."""
    sketch = Signature(**PROJECTED).sketch(run.summary["seed"], n_parameters)
    assert sketch is not None
    return replace(
        run,
        tree=run.tree.map_vectors(lambda m: m, sketch.apply),
        config={**run.config, "signature": PROJECTED},
    )


def right(
    run: Run, members: Federation, newcomers: Federation, found: Sequence[Assignment]
) -> list[bool]:
    """Return whether each newcomer is assigned to its true cluster.

    A leaf belongs to the true cluster of most of its members.
    """
    truth, theirs = members.true_clusters, newcomers.true_clusters
    assert truth is not None
    assert theirs is not None
    majority = {
        leaf.id: Counter(truth[c] for c in leaf.members).most_common(1) for leaf in run.tree.leaves
    }
    return [majority[a.node][0][0] == theirs[a.client] for a in found]


def ranges(
    newcomers: str, found: Iterable[Assignment], run: Run, seen: dict[tuple[str, str], list[float]]
) -> None:
    """Add the scores of newcomers to ``seen``, and for similarities also the least that fits."""
    for each in found:
        for step in each.steps if newcomers == "honest" else each.steps[:1]:
            seen[newcomers, step.by].append(step.score)
            if step.by == "similarity" and run.tree.nodes[step.taken].cached is not None:
                seen["least that fits", step.by].append(
                    find_least_similarity(run.tree.nodes[step.taken])
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--algorithms",
        nargs="+",
        choices=ALGORITHMS,
        default=ALGORITHMS,
        help="algorithms to run (default: all)",
    )
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument(
        "--newcomers", type=int, default=20, help="number of newcomers (default: 20)"
    )
    arguments = parser.parse_args()

    table = Table(
        title=f"{arguments.newcomers} newcomers to MNIST label swap, seeds 0 to {arguments.seeds - 1}"
    )
    table.add_column("algorithm")
    table.add_column("ARI", justify="right")
    for samples in SAMPLES:
        table.add_column(f"{samples} images: right", justify="right")
        for column in ("do not fit", "strangers do not fit", "same by sketches"):
            table.add_column(column, justify="right")
    for algorithm in arguments.algorithms:
        seen: dict[tuple[str, str], list[float]] = defaultdict(list)
        counts: dict[tuple[int, str], list[bool]] = defaultdict(list)
        found_clusters: list[float] = []
        for seed in range(arguments.seeds):
            run: Run | None = None
            for samples in SAMPLES:
                settings = {"clients": arguments.newcomers, "samples_per_client": samples}
                changes = [
                    f"seed={seed}",
                    *(f"newcomers.{key}={value}" for key, value in settings.items()),
                ]
                config = read_config(find_config(f"{algorithm}-mnist-label-swap"), changes)
                config = replace(config, top=replace(config.top, evaluate_every=config.top.rounds))
                federation = config.federation(arguments.data_dir)
                # The members' data do not depend on the newcomers' number of images.
                run = run or config.run(federation)
                newcomers = federation.newcomers
                assert newcomers is not None
                honest = place(run, newcomers)
                alien = place(run, strangers(newcomers, seed))
                counts[samples, "right"] += right(run, federation, newcomers, honest)
                counts[samples, "fit nowhere"] += [not each.fits for each in honest]
                counts[samples, "told"] += [not each.fits for each in alien]
                if run.tree.nodes[-1].cached is not None:
                    by_sketch = place(projected(run, run.tree.nodes[-1].cached.shape[1]), newcomers)
                    counts[samples, "agree"] += [
                        a.path == b.path for a, b in zip(honest, by_sketch, strict=True)
                    ]
                ranges("honest", honest, run, seen)
                ranges("strangers", alien, run, seen)
            assert run is not None
            found_clusters.append(run.summary["clusters"]["ari"])
        cells = [algorithm, " ".join(f"{ari:.2f}" for ari in found_clusters)]
        for samples in SAMPLES:
            for column in ("right", "fit nowhere", "told", "agree"):
                each = counts[samples, column]
                cells.append(f"{np.mean(each):.3f}" if each else "–")
        table.add_row(*cells)
        for (who, by), scores in seen.items():
            print(f"{algorithm}: {by} of {who}: {min(scores):.3f} to {max(scores):.3f}", flush=True)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
