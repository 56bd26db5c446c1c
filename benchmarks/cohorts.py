"""Compare clustered methods when each round samples a small part of many clients.

Most clients take part at most once. There are four true clusters, each with a linear concept of its
own. Each client has inputs with a random shift, 10 to 200 training examples (Zipf), of which a
tenth have a random label, and 10 test examples. Scores are over the clients that ever took part.
The predicted cluster of a client is its cluster at the end; clients without a cluster count as one
further cluster. Times are CPU seconds of a whole round, with training.

Each run is stored as one line of a JSON file, and an interrupted call continues where it stopped.

    python benchmarks/cohorts.py --out cohorts.jsonl
    python benchmarks/cohorts.py --out cohorts.jsonl --clients 30000 --cohort 1000 --seeds 1
    python benchmarks/cohorts.py --out cohorts.jsonl --table
    python benchmarks/cohorts.py --error     # the error if only a sample is clustered
    python benchmarks/cohorts.py --server --clients 1000000 --cohort 1000     # the server alone
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from time import process_time
from typing import Any

import jsonl
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedclade import IFCA, Federation, FedGroup, FeSEM, LocalTraining, ReplicatedCFL, simulate
from fedclade.algorithms import Algorithm, State, build_algorithm
from fedclade.clustering import agglomerate, compute_distances, cut
from fedclade.core import (
    Clients,
    Evaluation,
    EvaluationQuery,
    Query,
    Round,
    RoundPlan,
    Sink,
    TrainQuery,
    Updates,
)
from fedclade.data import ClientData, Pool
from fedclade.runs import Backend
from fedclade.tasks import cluster_scores

Line = dict[str, Any]

CLUSTERS, FEATURES, LABELS = 4, 20, 5
SMALLEST, LARGEST, TEST = 10, 200, 10
NOISE, SHIFT = 0.1, 0.5
"""Share of random labels; and standard deviation of clients' shifts of each feature, in units of
the feature's standard deviation."""

SAMPLES = (32, 100, 300, 1000, 3000)

LOCAL = LocalTraining(epochs=5, batch_size=10, lr=0.1)

METHODS: Mapping[str, Callable[[], Algorithm]] = {
    "fedavg": lambda: build_algorithm("fedavg"),
    "rcfl": ReplicatedCFL,
    "rcfl, sample 64": lambda: ReplicatedCFL(sample=64),
    "ifca": lambda: IFCA(clusters=CLUSTERS),
    "ifca, 4 starts": lambda: IFCA(clusters=CLUSTERS, restarts=4, restart_rounds=3),
    "fedgroup": lambda: FedGroup(groups=CLUSTERS, cold_start="sampled", eta_g=0.0),
    "fedgroup, position": lambda: FedGroup(
        groups=CLUSTERS, cold_start="sampled", eta_g=0.0, direction="position"
    ),
    "fesem": lambda: FeSEM(clusters=CLUSTERS),
    "fl_hc": lambda: build_algorithm(
        "fl_hc",
        {"rounds_before": 3, "metric": "cosine", "linkage": "average", "cohort": "of_cluster"},
    ),
    "cfl": lambda: build_algorithm("cfl", {"eps2": 0.1}),
}


def federation(clients: int, seed: int) -> Federation:
    """Return a federation whose true clusters are about equally large."""
    draw = np.random.default_rng([seed, clients])
    some = np.arange(SMALLEST, LARGEST + 1)
    sizes = draw.choice(some, clients, p=(1 / some) / (1 / some).sum())
    truth = draw.integers(CLUSTERS, size=clients)
    concepts = draw.standard_normal((CLUSTERS, FEATURES, LABELS), dtype=np.float32)
    owner = np.repeat(np.arange(clients), sizes + TEST)
    x = draw.standard_normal((len(owner), FEATURES), dtype=np.float32)
    x += (SHIFT * draw.standard_normal((clients, FEATURES), dtype=np.float32))[owner]
    y = np.empty(len(owner), dtype=np.int64)
    for cluster, concept in enumerate(concepts):
        mine = truth[owner] == cluster
        y[mine] = (x[mine] @ concept).argmax(1)
    odd = draw.random(len(owner)) < NOISE
    y[odd] = draw.integers(LABELS, size=int(odd.sum()))
    none, ends = np.arange(0), np.cumsum(sizes + TEST).tolist()
    held = tuple(
        ClientData(
            k,
            f"client-{k}",
            k,
            np.arange(end - TEST - n, end - TEST),
            none,
            np.arange(end - TEST, end),
        )
        for k, (n, end) in enumerate(zip(sizes.tolist(), ends, strict=True))
    )
    pool = Pool(
        "cohorts", torch.from_numpy(x), torch.from_numpy(y), y, np.arange(len(y)), none, LABELS
    )
    return Federation(pool, held, dict(enumerate(truth.tolist())))


def run(method: str, made: Federation, cohort: int, rounds: int, seed: int) -> Line:
    """Run a method; return its scores over the clients that took part."""
    algorithm, took = METHODS[method](), set[int]()
    kind = type(algorithm)
    step = kind.step

    def noting(
        self: Any, state: State, ids: Sequence[int], clients: Clients, this_round: RoundPlan
    ) -> Any:
        took.update(ids)
        return step(self, state, ids, clients, this_round)

    kind.step = noting  # a run does not store which clients were sampled
    try:
        start = process_time()
        done = simulate(
            algorithm, "mclr", made, rounds=rounds, seed=seed, client_fraction=cohort / len(made),
            evaluate_every=rounds, local=LOCAL, engine="stacked",
        )  # fmt: skip
        seconds = (process_time() - start) / rounds
    finally:
        kind.step = step
    leaf_of = done.tree.leaf_of
    scores = [row["accuracy"] for row in done.client_rows if row["client"] in took]
    found, last = {client: leaf_of[client] for client in sorted(took)}, done.metric_rows[-1]
    truth = made.true_clusters
    return {
        **{
            "took_part": len(took),
            "ari": cluster_scores(found, truth)["ari"],
            "ari_assigned": last["ari_assigned"],
        },
        **{"accuracy": mean(scores), "clusters": last["clusters"], "seconds": seconds},
    }


@dataclass
class Scripted(Clients):
    """Clients without data, whose updates point to the centres of their clusters.

    They record the CPU time of their replies.
    """

    count: int
    size: int = 105
    seconds: float = 0.0
    many: dict[int, int] = field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        self.many = dict.fromkeys(range(self.count), 40)
        self.corners = 3 * torch.eye(CLUSTERS, self.size)

    @property
    def ids(self) -> Sequence[int]:
        """Ids of all clients."""
        return range(self.count)

    @property
    def sizes(self) -> Mapping[int, int]:
        """Number of examples of each client, which is the same for all."""
        return self.many

    def ask(self, query: Query[Any], /, sink: Sink | None = None) -> Any:
        """Reply to a query, and record the time."""
        start = process_time()
        if isinstance(query, TrainQuery):
            answer: Any = self.updates(query)
        else:
            assert isinstance(query, EvaluationQuery)
            answer = self.evaluation(query)
        self.seconds += process_time() - start
        return answer

    def updates(self, query: TrainQuery) -> Updates:
        """Return updates that move half of the way to the clusters' centres, plus noise."""
        splits = query.work.splits
        n, parts, this_round = len(query.ids), splits.count if splits else 1, query.round
        draw = torch.Generator().manual_seed(this_round.number)
        corners = self.corners[torch.tensor(query.ids) % CLUSTERS]
        start = query.models.vectors[torch.tensor(query.models.start)]
        made = (corners - start)[:, None] / 2 + 0.3 * torch.randn(
            n, parts, self.size, generator=draw
        )
        sizes, losses = [40] * n, torch.zeros(n, dtype=torch.float64)
        updates = Updates.received(
            query.ids, sizes, made.mean(1), self.size, losses, this_round.number
        )
        return updates if parts == 1 else updates.with_columns(parts=made)

    def evaluation(self, query: EvaluationQuery) -> Evaluation:
        """Return the distances of models from the clusters' centres as losses."""
        corners = self.corners[torch.tensor(query.ids) % CLUSTERS]
        losses: Tensor = (
            (corners - query.models[torch.tensor(query.assignment)]).norm(dim=1).double()
        )
        return Evaluation(
            tuple(query.ids), -losses[:, None], losses, torch.full((len(losses),), 40)
        )


def server(method: str, clients: int, cohort: int, rounds: int) -> Line:
    """Return mean and largest CPU seconds of the server in a round, without the clients' time."""
    algorithm, scripted = METHODS[method](), Scripted(clients)
    initial = torch.randn(
        algorithm.requires.initial_models, scripted.size, generator=torch.Generator().manual_seed(1)
    )
    state = algorithm.init(
        initial if algorithm.requires.initial_models > 1 else initial[0], scripted
    )
    spent = list[float]()
    for number in range(1, rounds + 1):
        this_round, before, start = RoundPlan(number, LOCAL), scripted.seconds, process_time()
        ids = algorithm.sample_cohort(state, cohort / clients, this_round.generator("cohort"))
        state, _ = algorithm.step(state, ids, scripted, this_round)
        spent.append(process_time() - start - (scripted.seconds - before))
    assigned = {client: leaf.id for leaf in state.tree.leaves for client in leaf.members}
    ari = cluster_scores(assigned, {client: client % CLUSTERS for client in assigned})["ari"]
    return {
        "method": method,
        "mean": mean(spent),
        "worst": max(spent),
        "assigned": len(assigned),
        "ari": ari,
    }


def error(made: Federation, seed: int) -> Line:
    """Return the ARI if all clients are clustered, and if only a sample is clustered.

    In the second case, all other clients join the nearest cluster. Clients are clustered by the
    directions of their updates at the initial model, by Ward's method and into the true number of
    clusters.
    """
    backend = Backend.simulated_by(
        made, "mclr", METHODS["fedavg"](), seed=seed, local=LOCAL, engine="stacked"
    )
    ids, truth = list(made.ids), made.true_clusters
    updates = backend.clients.train(
        ids, backend.initial[None], [0] * len(ids), Round(1, LOCAL, seed)
    )
    unit = functional.normalize(updates.signatures, dim=1)
    draw, line = np.random.default_rng(seed), Line(seed=seed)
    for size in (*(n for n in SAMPLES if n < len(ids)), len(ids)):
        some = np.sort(draw.choice(len(ids), size, replace=False))
        labels = cut(agglomerate(compute_distances(unit[some], "l2"), "ward"), CLUSTERS)
        means = torch.stack([unit[some[labels == k]].mean(0) for k in range(CLUSTERS)])
        nearest = (unit @ functional.normalize(means, dim=1).T).argmax(1)
        line[f"nearest to {size}"] = cluster_scores(
            dict(zip(ids, nearest.tolist(), strict=True)), truth
        )["ari"]
    line["all at once"] = cluster_scores(dict(zip(ids, labels.tolist(), strict=True)), truth)["ari"]
    return line


def table(lines: Sequence[Line]) -> str:
    """Return a Markdown table of means over seeds, with the lowest ARI."""
    of: dict[tuple[int, int, int, str], list[Line]] = defaultdict(list)
    for line in lines:
        of[line["clients"], line["cohort"], line["rounds"], line["method"]].append(line)
    head = [
        "clients",
        "cohort",
        "rounds",
        "method",
        "runs",
        "took part",
        "ARI",
        "lowest ARI",
        "accuracy, %",
        "clusters",
        "CPU time of a round, s",
    ]
    text = [f"| {' | '.join(head)} |", "| --: | --: | --: | :-- |" + " --: |" * (len(head) - 4)]
    for (clients, cohort, rounds, method), mine in sorted(of.items(), key=lambda each: each[0][:3]):
        averages = {
            name: mean(line[name] for line in mine)
            for name in ("took_part", "ari", "accuracy", "seconds")
        }
        cells = [
            f"{clients:,}",
            f"{cohort:,}",
            str(rounds),
            method,
            str(len(mine)),
            f"{averages['took_part']:,.0f}",
        ]
        cells += [f"{averages['ari']:.3f}", f"{min(line['ari'] for line in mine):.3f}"]
        cells += [
            f"{100 * averages['accuracy']:.1f}",
            ", ".join(str(line["clusters"]) for line in mine),
        ]
        cells.append(f"{averages['seconds']:.2f}")
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def missing(done: Sequence[Line], given: argparse.Namespace) -> Iterator[Line]:
    """Yield the settings of each run that is missing."""
    for seed in range(given.seeds):
        for method in given.methods or METHODS:
            keys = {"clients": given.clients, "cohort": given.cohort, "rounds": given.rounds}
            keys |= {"method": method, "seed": seed}
            if not any(all(line[name] == value for name, value in keys.items()) for line in done):
                yield keys


def main() -> None:
    """Make missing runs, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("cohorts.jsonl"),
        help="JSON file, one line per run (default: cohorts.jsonl)",
    )
    parser.add_argument(
        "--clients", type=int, default=10_000, help="number of clients (default: 10000)"
    )
    parser.add_argument("--cohort", type=int, default=100, help="clients of a round (default: 100)")
    parser.add_argument("--rounds", type=int, default=50, help="number of rounds (default: 50)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, help="methods to run (default: all)"
    )
    parser.add_argument(
        "--server",
        action="store_true",
        help="measure only the CPU time of the server, with clients without data",
    )
    parser.add_argument(
        "--error",
        action="store_true",
        help="measure only the error if a sample of the clients is clustered",
    )
    parser.add_argument("--table", action="store_true", help="run nothing, only print the table")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.server:
        for method in given.methods or ("rcfl", "ifca", "fedgroup, position", "fesem"):
            print(server(method, given.clients, given.cohort, given.rounds), flush=True)
        return
    if given.error:
        for seed in range(given.seeds):
            print(error(federation(given.clients, seed), seed), flush=True)
        return
    made: tuple[int, Federation] | None = None
    for keys in [] if given.table else list(missing(jsonl.read(given.out), given)):
        if made is None or made[0] != keys["seed"]:
            made = keys["seed"], federation(given.clients, keys["seed"])
        line = keys | run(keys["method"], made[1], given.cohort, given.rounds, keys["seed"])
        with given.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)
    print(table(jsonl.read(given.out)))


if __name__ == "__main__":
    main()
