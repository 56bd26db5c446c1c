"""Compare the models of the root and of the leaves, and the choice between them (fall-back).

CFL runs with four label swaps and several numbers of examples; a fifth of each client's examples is
validation data. Clusters are split in fixed rounds, so that all trees have the same depth. ``EPS2``
prevents splits of clusters whose members agree; it depends on the length of updates, and so on the
number of examples. The root's model continues to train in addition to the clusters' models. The
tables have the mean score over clients on their test data, averaged over seeds, with its 95 %
interval.

    python benchmarks/specificity.py --data-dir DIR
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter

from fedclade import CFL, Federation, LocalTraining, ParameterTree, load_federation, simulate
from fedclade.algorithms.fallback import best_on_validation
from fedclade.core.queries import Evaluation
from fedclade.runs import module_for
from fedclade.tasks.metrics import mean_and_interval
from fedclade.training import SimulatedClients

EPS2 = {20: 0.25, 100: 0.3, 500: 0.5}
SPLIT_ROUNDS, ROUNDS = (20, 30, 40), 60
SPEC = LocalTraining(epochs=3, batch_size=20, lr=0.1)
WAYS = ("root", "leaf", "fallback")


def evaluations(tree: ParameterTree, clients: SimulatedClients) -> Iterator[Evaluation]:
    """Yield the evaluation on test data of the root's model, the leaves' models and the choice."""
    chosen: Sequence[Mapping[int, int]] = (
        {client: tree.node_for(client, 0).id for client in clients.ids},
        tree.leaf_of,
        best_on_validation(tree, clients),
    )
    for node_of in chosen:
        models, rows = tree.models([node_of[client] for client in clients.ids], served=True)
        yield clients.evaluate(clients.ids, models, rows, "test")


def measured(federation: Federation, eps2: float, seed: int) -> tuple[list[Evaluation], float]:
    """Run CFL; return the evaluations, and the ARI of the clusters."""
    algorithm = CFL(eps2=eps2, split_rounds=SPLIT_ROUNDS, fallback=True)
    settings = {"rounds": ROUNDS, "evaluate_every": ROUNDS, "seed": seed, "engine": "stacked"}
    run = simulate(algorithm, "mlp", federation, local=SPEC, **settings)
    clients = SimulatedClients(federation, module_for("mlp", federation.pool.schema, seed))
    return list(evaluations(run.tree, clients)), run.summary["clusters"]["ari"]


def told(values: Sequence[float], digits: int) -> str:
    """Return the mean and its 95 % interval as text."""
    mean, half = mean_and_interval(values)
    return f"{mean:.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")


def table(title: str, rows: Mapping[int, Sequence[str]], columns: Sequence[str]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(['examples', *columns])} |", "|" + " --: |" * (1 + len(columns))]
    lines += [f"| {size} | {' | '.join(row)} |" for size, row in rows.items()]
    return "\n".join([f"\n{title}\n", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST")
    parser.add_argument(
        "--examples",
        nargs="+",
        type=int,
        choices=EPS2,
        default=list(EPS2),
        help="numbers of examples of each client (default: all)",
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    arguments = parser.parse_args()
    accuracies: dict[int, list[str]] = {}
    losses: dict[int, list[str]] = {}
    start = perf_counter()
    for size in arguments.examples:
        runs: list[tuple[list[Evaluation], float]] = []
        for seed in range(arguments.seeds):
            federation = load_federation(
                "mnist",
                clients=20,
                samples_per_client=size,
                shift="label_swap",
                clusters=4,
                validation_fraction=0.2,
                seed=seed,
                data_dir=arguments.data_dir,
            )
            runs.append(measured(federation, EPS2[size], seed))
        ways = list(zip(*(found for found, _ in runs), strict=True))
        accuracies[size] = [told([ari for _, ari in runs], 2)]
        scores = [[100 * float(each.scores[:, 0].mean()) for each in way] for way in ways]
        gains = [fallback - leaf for fallback, leaf in zip(scores[-1], scores[1], strict=True)]
        accuracies[size] += [*(told(each, 1) for each in scores), told(gains, 1)]
        losses[size] = [told([float(each.losses.mean()) for each in way], 3) for way in ways]
    print(table("Accuracy, %", accuracies, ("ARI", *WAYS, "fallback − leaf")))
    print(table("Loss, nats", losses, WAYS))
    print(f"\n{perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
