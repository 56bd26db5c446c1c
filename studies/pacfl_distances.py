"""Compare the clusters that PACFL finds with each of its distances, in a folder of scenarios.

PACFL clusters clients once, by their data, before any training. So this study needs no training. In
each scenario it clusters the clients with the scenario's options of PACFL and with three distances:
the distance of the paper, the distance of its authors' code, and the distance by label, a variant
of fedclade. If PACFL finds one cluster, it is equal to federated averaging.

    python studies/pacfl_distances.py suite --scale laptop --seeds 3 --data-dir DIR
    python studies/pacfl_distances.py arena --only '*8' --data-dir DIR
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

import torch

from fedclade import PACFL, Federation, LocalTraining
from fedclade.config import Config, find_configs, read_scenarios
from fedclade.config.scenario import known_scales
from fedclade.core import RoundPlan, SetApart
from fedclade.runs import module_for
from fedclade.tasks.metrics import cluster_scores
from fedclade.training import SimulatedClients

Distance = Literal["paper", "code", "per_label"]
DISTANCES: Sequence[Distance] = ("paper", "code", "per_label")
METHOD = "pacfl"
"""Name of the method in the scenarios."""


def clusters_found(federation: Federation, method: PACFL, seed: int) -> str:
    """Return a text with the numbers of found and true clusters, the ARI, and clients set apart.

    Clients that are *set apart* are far from all others, and become separate clusters.
    """
    clients = SimulatedClients(
        federation, module_for("mclr", federation.pool.schema, seed), engine="loop"
    )
    state = method.init(torch.zeros(clients.layout.size), clients)
    state, log = method.step(state, [], clients, RoundPlan(1, LocalTraining(), seed))
    text = str(len(state.tree.leaves))
    if federation.true_clusters:
        scores = cluster_scores(state.tree.leaf_of, federation.true_clusters)
        text += f"/{len({*federation.true_clusters.values()})} ({scores['ari']:.2f})"
    set_apart = [event for event in log.events if isinstance(event, SetApart)]
    if set_apart:
        text += f", {sum(len(event.clients) for event in set_apart)} set apart"
    return text


def with_distance(method: PACFL, distance: Distance) -> PACFL:
    """Return the method with another distance."""
    return replace(method, distance=distance)


def scenario_rows(
    name: str, only: str, *, scale: str | None, seeds: int, data_dir: Path | None
) -> Iterator[list[str]]:
    """Yield a row for each seed of each scenario whose name matches the pattern ``only``.

    A row has the scenario's name, the seed, and the result of each distance.
    """
    for path in find_configs(name):
        fitting_scale = scale if scale in known_scales(path) else None
        for scenario in read_scenarios(path, scale=fitting_scale):
            if not fnmatch(scenario.name, only):
                continue
            config: Config = scenario.configs[METHOD]
            for seed in range(seeds):
                of_seed = replace(config, top=replace(config.top, seed=seed))
                federation = of_seed.federation(data_dir)
                method = of_seed.built_algorithm(federation.true_clusters)
                if not isinstance(method, PACFL):
                    raise TypeError(
                        f"{path}: {METHOD} should be PACFL, got {type(method).__name__}"
                    )
                found = [
                    clusters_found(federation, with_distance(method, distance), seed)
                    for distance in DISTANCES
                ]
                yield [scenario.name, str(seed), *found]


def main() -> None:
    """Print a table with a line for each scenario and seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configs", help="folder of scenarios, such as suite")
    parser.add_argument(
        "--only", default="*", help="pattern of the names of scenarios to use (default: all)"
    )
    parser.add_argument(
        "--scale", help="scale, such as laptop; used in the scenarios that have this scale"
    )
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds (default: 1)")
    parser.add_argument("--data-dir", type=Path, help="folder with the data sets")
    given = parser.parse_args()
    print("| scenario | seed | `paper` | `code` | `per_label` |\n|:--|--:|--:|--:|--:|")
    options = {"scale": given.scale, "seeds": given.seeds, "data_dir": given.data_dir}
    for row in scenario_rows(given.configs, given.only, **options):
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
