"""Number of clusters that FLUX finds, over draws of the directions along which it describes data.

FLUX takes components of the latent along the principal directions of random points. Its authors' code draws the points
from one fixed seed, so its results are those of one draw. Here one model is trained by federated averaging in some
cells of the arena (``configs/arena/mnist.toml``, with a quarter of the examples and of the batch size, as in
``benchmarks/arena_tuning.py``), until FLUX clusters at the latest, and clients are then clustered once for every draw.

    python studies/flux_directions.py --data-dir DIR --draws 20
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean

from torch import Tensor, nn

from fedclade import FLUX, Federation, LocalTraining, ParameterTree, simulate
from fedclade.algorithms.flux import FLUXState
from fedclade.config import find_configs, read_scenarios
from fedclade.core import Round
from fedclade.runs import module_for
from fedclade.tasks.scores import cluster_scores
from fedclade.training import SimulatedClients

CELLS = ("mnist P(Y|X) 3", "mnist P(X) 3", "mnist P(X|Y) 3", "mnist P(Y) 3")
IMAGES = 15_000
"""Of the 60,000 training images of MNIST, for all clients together."""

LOCAL = LocalTraining(epochs=2, batch_size=16, lr=0.005, momentum=0.9)


def clusters_of_draws(
    federation: Federation, module: nn.Module, params: Tensor, methods: Mapping[int, FLUX]
) -> list[tuple[int, float]]:
    """Return the number of clusters and the ARI, for each draw of the directions."""
    clients = SimulatedClients(federation, module, engine="loop")
    found: list[tuple[int, float]] = []
    for method in methods.values():
        state = FLUXState(ParameterTree.root_only(clients.ids, params))
        state, _ = method.step(state, [], clients, Round(method.latest + 1, LOCAL))
        clusters = [leaf for leaf in state.tree.leaves if leaf.members]
        ari = cluster_scores(state.tree.leaf_of, federation.true_clusters)["ari"]
        found.append((len(clusters), 0.0 if ari is None else ari))
    return found


def table_row(name: str, federation: Federation, found: list[tuple[int, float]]) -> str:
    """Return a line: the cell, its true clusters, and the spread over the draws."""
    true = len({*(federation.true_clusters or {}).values()})
    counts = Counter(count for count, _ in found)
    numbers = ", ".join(f"{count} ({times}x)" for count, times in sorted(counts.items()))
    scores = [ari for _, ari in found]
    return f"| {name} | {true} | {numbers} | {min(scores):.2f} | {mean(scores):.2f} | {max(scores):.2f} |"


def main() -> None:
    """Print a table: a line for each cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--cells", nargs="+", default=CELLS, metavar="CELL", help="cells of the arena")
    parser.add_argument("--seed", type=int, default=0, help="of data, model and training")
    given = parser.parse_args()
    (path,) = (each for each in find_configs("arena") if each.stem == "mnist")
    print("| cell | true clusters | clusters found (draws) | least ARI | mean ARI | largest ARI |")
    print("|:--|--:|:--|--:|--:|--:|", flush=True)
    for scenario in read_scenarios(path, ["rounds=8"]):
        if scenario.name not in given.cells:
            continue
        config = scenario.configs["flux"]
        data = {**config.data, "samples_per_client": IMAGES // config.data["clients"]}
        config = replace(config, data=data, top=replace(config.top, seed=given.seed))
        federation = config.federation(given.data_dir)
        method = config.built_algorithm(federation.true_clusters)
        assert isinstance(method, FLUX)
        module = module_for("lenet", federation.pool.schema, given.seed)
        settings = {"rounds": method.latest, "evaluate_every": method.latest, "seed": given.seed, "engine": "stacked"}
        run = simulate("fedavg", module, federation, local=LOCAL, **settings)
        methods = {draw: replace(method, directions=draw) for draw in range(given.draws)}
        found = clusters_of_draws(federation, module, run.tree.nodes[0].params, methods)
        print(table_row(scenario.name, federation, found), flush=True)


if __name__ == "__main__":
    main()
