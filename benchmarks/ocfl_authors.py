"""Run the authors' code of OCFL on fixed updates, and write its results for the tests.

    python benchmarks/ocfl_authors.py FOLDER

FOLDER is a clone of github.com/MKZuziak/Clustered-Federated-Learning (MIT licence). The script gives
the updates of two consecutive rounds to its method ``Simulation.energy_oneshot``, and writes the
temperatures and clusters to ``tests/vectors/ocfl.json``. ``tests/algorithms/test_ocfl.py`` compares
fedclade with them. The updates are drawn from three groups of clients whose directions move apart
from the first round to the second.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections import OrderedDict
from contextlib import chdir
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from sklearn.cluster import HDBSCAN, MeanShift

VECTORS = Path(__file__).parents[1] / "tests" / "vectors" / "ocfl.json"
GROUPS = (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2)
ENTRIES = 30


def draw_updates(seed: int) -> list[np.ndarray]:
    """Return the updates ``[n, ENTRIES]`` of two rounds; groups differ more in the second."""
    draw = np.random.default_rng(seed)
    common = draw.normal(size=ENTRIES)
    own = draw.normal(size=(3, ENTRIES))
    rounds = []
    for share in (0.3, 1.0):
        noise = 0.3 * draw.normal(size=(len(GROUPS), ENTRIES))
        rounds.append(np.round(common + share * own[list(GROUPS)] + noise, 4))
    return rounds


def import_simulation(folder: Path) -> tuple[Any, Any]:
    """Import the authors' simulation and clusters, without the modules for data and models."""
    sys.path.insert(0, str(folder))
    for name in ("FedCL.model.federated_model", "FedCL.node.federated_node"):
        stand_in = ModuleType(name)
        stand_in.FederatedModel = stand_in.FederatedNode = object  # pyright: ignore
        sys.modules[name] = stand_in
    simulation = import_module("FedCL.simulation.simulation")
    return simulation, simulation.Cluster_Structure


def run_authors_code(
    simulation: Any, structure: Any, updates: list[np.ndarray], algorithm: Any
) -> dict[str, Any]:
    """Return the temperatures and the clusters that the authors' code finds."""
    run = simulation.Simulation.__new__(simulation.Simulation)
    root = structure(population=np.arange(len(GROUPS)), model=None, iteration=0)
    run.current_clusters = OrderedDict(A=root)
    run.all_clusters = {"A": root}
    run.clusters_namespace = list("ABCDEFGHIJKLMN")
    run.flattened_model_length = ENTRIES
    last, fired = math.inf, False
    with tempfile.TemporaryDirectory() as place:
        for iteration, rows in enumerate(updates):
            gradients = OrderedDict(
                (client, {"w": torch.from_numpy(row)}) for client, row in enumerate(rows)
            )
            fired, last = run.energy_oneshot(
                clustering_algorithm=algorithm,
                last_temperature=last,
                iteration=iteration,
                gradients=gradients,
                sim_mat_savepath=place,
                temperature_save_path=place,
                clustering_shot=fired,
            )
        text = (Path(place) / "clusters_temperature.csv").read_text()
    temperatures = [float(line.rsplit(",", 1)[1]) for line in text.split()]
    clusters = sorted(sorted(map(int, c.nodes)) for c in run.current_clusters.values())
    return {"temperatures": temperatures, "clusters": clusters}


def main() -> None:
    """Write the results of the authors' code for both clustering algorithms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="clone of the authors' repository")
    folder = parser.parse_args().folder.resolve()
    with tempfile.TemporaryDirectory() as place, chdir(place):  # the code opens a log file here
        code = import_simulation(folder)
    updates = draw_updates(5)
    hdbscan = HDBSCAN(min_cluster_size=3, metric="precomputed")
    written = {
        "updates": [rows.tolist() for rows in updates],
        "mean_shift": run_authors_code(*code, updates, MeanShift()),
        "hdbscan": run_authors_code(*code, updates, hdbscan),
    }
    VECTORS.write_text(json.dumps(written) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
