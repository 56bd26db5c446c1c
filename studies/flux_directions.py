"""Measure how much the clusters of FLUX depend on its random directions.

FLUX describes data by components of the latent representation along the principal directions of
random points. The authors' code draws these points with one fixed seed, so its results are those of
a single draw. This study trains one model by federated averaging, for as many rounds as FLUX trains
at most before it clusters, and then clusters the clients once for each draw. Without MNIST it uses
the digits that come with scikit-learn; with ``--data-dir`` also some cells of the arena
(``configs/arena/mnist.toml``, with a quarter of the examples and of the batch size, as in
``studies/arena_tuning.py``).

    python studies/flux_directions.py --draws 20
    python studies/flux_directions.py --draws 20 --data-dir DIR
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import mean

from torch import Tensor

from fedclade import FLUX, Federation, LocalTraining, ParameterTree, load_federation, simulate
from fedclade.algorithms.flux import FLUXState
from fedclade.config import find_configs, read_scenarios
from fedclade.core import RoundPlan
from fedclade.runs import module_for
from fedclade.tasks.metrics import cluster_scores
from fedclade.training import SimulatedClients

CELLS = ("mnist P(Y|X) 3", "mnist P(X) 3", "mnist P(X|Y) 3", "mnist P(Y) 3")
IMAGES = 15_000
"""Number of training images of all clients together, of the 60,000 of MNIST."""

IN_CELLS = LocalTraining(epochs=2, batch_size=16, lr=0.005, momentum=0.9)
ON_DIGITS = LocalTraining(epochs=2, batch_size=20, lr=0.1)
SHIFTS = ("rotation", "label_swap", "label_permutation")
"""Shifts of the digits, by which twelve clients form three clusters."""


@dataclass(frozen=True)
class Case:
    """Clients, and the model, training and method that cluster them."""

    name: str
    federation: Federation
    model: str
    local: LocalTraining
    method: FLUX


def digits_cases(seed: int) -> Iterator[Case]:
    """Yield a case with scikit-learn's digits for each shift."""
    for shift in SHIFTS:
        federation = load_federation("digits", clients=12, shift=shift, clusters=3, seed=seed)
        yield Case(f"digits, {shift}", federation, "mlp", ON_DIGITS, FLUX())


def arena_cases(data_dir: Path, cells: Sequence[str], seed: int) -> Iterator[Case]:
    """Yield a case for each of these cells of the arena, with fewer examples."""
    (path,) = (each for each in find_configs("arena") if each.stem == "mnist")
    for scenario in read_scenarios(path):
        if scenario.name not in cells:
            continue
        config = scenario.configs["flux"]
        data = {**config.data, "samples_per_client": IMAGES // config.data["clients"]}
        config = replace(config, data=data, top=replace(config.top, seed=seed))
        federation = config.federation(data_dir)
        method = config.built_algorithm(federation.true_clusters)
        assert isinstance(method, FLUX)
        yield Case(scenario.name, federation, "lenet", IN_CELLS, method)


def clusters_of_draws(case: Case, draws: int, seed: int) -> list[tuple[int, float]]:
    """Return the number of clusters and the ARI, for each draw of the directions."""
    params = trained_model(case, seed)
    module = module_for(case.model, case.federation.pool.schema, seed)
    clients = SimulatedClients(case.federation, module, engine="loop")
    found: list[tuple[int, float]] = []
    for draw in range(draws):
        method = replace(case.method, directions=draw)
        state = FLUXState(ParameterTree.root_only(clients.ids, params))
        state, _ = method.step(state, [], clients, RoundPlan(method.latest + 1, case.local))
        clusters = [leaf for leaf in state.tree.leaves if leaf.members]
        ari = cluster_scores(state.tree.leaf_of, case.federation.true_clusters)["ari"]
        found.append((len(clusters), 0.0 if ari is None else ari))
    return found


def trained_model(case: Case, seed: int) -> Tensor:
    """Return FedAvg's model ``[S]`` after the last round after which FLUX may cluster."""
    rounds = case.method.latest
    settings = {"rounds": rounds, "evaluate_every": rounds, "seed": seed, "engine": "stacked"}
    run = simulate("fedavg", case.model, case.federation, local=case.local, **settings)
    return run.tree.nodes[0].params


def table_row(case: Case, found: Sequence[tuple[int, float]]) -> str:
    """Return a line of the table: the case, its true clusters, and the results of the draws."""
    true = len({*(case.federation.true_clusters or {}).values()})
    counts = Counter(count for count, _ in found)
    numbers = ", ".join(f"{count} ({times}x)" for count, times in sorted(counts.items()))
    scores = [ari for _, ari in found]
    return f"| {case.name} | {true} | {numbers} | {min(scores):.2f} | {mean(scores):.2f} | {max(scores):.2f} |"


def main() -> None:
    """Print a table with a line for each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data-dir", type=Path, help="folder with MNIST; without it only the digits are used"
    )
    parser.add_argument(
        "--draws", type=int, default=20, help="number of draws of the directions (default: 20)"
    )
    parser.add_argument(
        "--cells", nargs="+", default=CELLS, metavar="CELL", help="cells of the arena to use"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of data, model and training (default: 0)"
    )
    given = parser.parse_args()
    print(
        "| clients | true clusters | clusters found (draws) | least ARI | mean ARI | largest ARI |"
    )
    print("|:--|--:|:--|--:|--:|--:|", flush=True)
    cases = [digits_cases(given.seed)]
    if given.data_dir is not None:
        cases.append(arena_cases(given.data_dir, given.cells, given.seed))
    for case in chain.from_iterable(cases):
        print(table_row(case, clusters_of_draws(case, given.draws, given.seed)), flush=True)


if __name__ == "__main__":
    main()
