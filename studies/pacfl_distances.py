"""Clusters that PACFL finds with each of its distances, in the scenarios of a folder of configs.

PACFL clusters clients once, before they train, by their data alone. So its clusters are found here without any
training: by the options that a scenario has for it, with the distance of the paper, of its authors' code, and by label,
the variant of fedclade. Where it finds one cluster it is federated averaging.

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
    """Return the clusters found of the true ones, the ARI, and the clients that were set apart, as text."""
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
    """Yield the scenario, the seed, and what each distance finds, for scenarios whose name matches a pattern."""
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
    """Print a table: a line for each scenario and seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configs", help="folder of scenarios, such as suite")
    parser.add_argument("--only", default="*", help="pattern over the scenarios' names")
    parser.add_argument("--scale", help="scale of the scenarios that have it, such as laptop")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--data-dir", type=Path)
    given = parser.parse_args()
    print("| scenario | seed | paper | code | per label (ours) |\n|:--|--:|--:|--:|--:|")
    options = {"scale": given.scale, "seeds": given.seeds, "data_dir": given.data_dir}
    for row in scenario_rows(given.configs, given.only, **options):
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
