"""Measure what published clusters reveal about clients, and which ε the attacks refute.

The run folder, the report and the server have the clusters. Clients do not get them, only a model.
The study has four parts:

- ``probes``: the attacker takes part with one client, a *probe*, of each possible distribution. It
  guesses that every other client has the distribution of the probe in the same cluster. With
  several probes in the cluster, it guesses one of them at random; with none, one of all.
- ``canary``: a client with permuted labels takes part in a run or does not. The attacker guesses
  which, by the number of clusters of the *other* clients and a threshold that is chosen on every
  second run.
- ``coins``: 18 clients each toss a coin for one of two label swaps, and have differential privacy.
  The attacker has a probe of each swap. It guesses the coins by the clusters, and also by the noisy
  updates: by their inner products with the difference of the probes' updates without noise. The
  bound on ε is that of Steinke, Nasr, Jagielski (2023).
- ``mechanism``: fedclade's noise is added to the two updates that are most difficult to hide, C·u
  and −C·u for a vector u of length 1, in 20,000 trials for each. There are two bounds on ε: that of
  Jagielski, Ullman, Oprea (2020), and that of Nasr et al. (2023), which assumes that the noise is
  Gaussian and should be just below the stated ε.

    python studies/audit_clusters.py --data-dir DIR --minutes 5
    python studies/audit_clusters.py --table
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any

import jsonl
import numpy as np
import torch
from audit_scores import (
    epsilon_of_guesses,
    epsilon_of_rates,
    epsilon_of_scores,
    mu_of_rates,
    share_bounds,
)
from rcfl import LOCAL, as_table
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fedclade import CFL, FLHC, DifferentialPrivacy, ReplicatedCFL, load_federation, simulate
from fedclade.algorithms import Algorithm
from fedclade.channel import Channel, Middleware
from fedclade.channel.accounting import SENSITIVITY, epsilon_of
from fedclade.channel.privacy import system_noise
from fedclade.core import TrainQuery, Updates
from fedclade.core.queries import Round, RoundPlan
from fedclade.data import Federation, Pool, load_pool
from fedclade.runs.backend import Backend

Line = dict[str, Any]

CLUSTERS, VICTIMS, ROUNDS, DELTA, CLIP = 4, 20, 8, 1e-5, 2.0
METHODS: Mapping[str, Algorithm] = {
    "rcfl": ReplicatedCFL(),
    "cfl": CFL(eps1=0.4, eps2=0.6),
    "fl_hc": FLHC(rounds_before=3, metric="l2", linkage="ward"),
}
KINDS: Mapping[str, Mapping[str, Any]] = {
    **{shift: {"shift": shift} for shift in ("label_swap", "rotation")},
    "label_groups": {"partition": "label_groups"},
}
NOISE = (0.03, 0.1, 0.3, 1.0, 3.0)
COINS = 18
CLAIMS = ((8.0, 1), (4.0, 1), (2.0, 1), (1.0, 1), (6.0, 10))
"""Pairs of a noise multiplier and a number of releases, for the part ``mechanism``."""

TRIALS, ENTRIES = 20_000, 100
BOUNDS = ("epsilon", "bound", "bound_of_gaussian")


@cache
def mnist(data_dir: Path | None) -> Pool:
    return load_pool("mnist", data_dir=data_dir)


def federation_of(
    clients: int, images: int, seed: int, data_dir: Path | None, **kind: Any
) -> Federation:
    held = {"clients": clients, "samples_per_client": images, "test_samples": 50}
    return load_federation(mnist(data_dir), **held, seed=seed, **kind)


def found_by(method: str, federation: Federation, seed: int) -> Mapping[int, int]:
    """Run a method; return the leaf of each client after the last round."""
    options = {
        "local": LOCAL,
        "rounds": ROUNDS,
        "seed": seed,
        "evaluate_every": ROUNDS,
        "engine": "stacked",
    }
    return simulate(METHODS[method], "mlp", federation, **options).tree.leaf_of


def guessed(
    leaves: Mapping[int, int], truth: Mapping[int, int], probes: Sequence[int]
) -> list[float]:
    """Return the probability of a correct guess for each client that is not a probe.

    Parameters
    ----------
    leaves
        Leaf of each client.
    truth
        Distribution of each client.
    probes
        Clients of the attacker.
    """
    right: list[float] = []
    for client in leaves.keys() - set(probes):
        near = [truth[probe] for probe in probes if leaves[probe] == leaves[client]]
        near = near or [truth[probe] for probe in probes]
        right.append(near.count(truth[client]) / len(near))
    return right


def probes(case: str, method: str, seed: int, *, data_dir: Path | None) -> Line:
    """Attack a run with a probe of each distribution; ``case`` is a kind and a number of images."""
    kind, images = case.split()
    federation = federation_of(
        CLUSTERS + VICTIMS, int(images), seed, data_dir, clusters=CLUSTERS, **KINDS[kind]
    )
    truth = federation.true_clusters or {}
    joined = [
        next(client for client in truth if truth[client] == cluster) for cluster in range(CLUSTERS)
    ]
    leaves = found_by(method, federation, seed)
    return {"right": mean(guessed(leaves, truth, joined)), "clusters": len(set(leaves.values()))}


def canary(case: str, method: str, seed: int, *, data_dir: Path | None) -> Line:
    """Run with and without a client with permuted labels; count the clusters of the others."""
    kind = {"clusters": 3, **KINDS["label_swap"]} if case == "three swaps" else {}
    federation = federation_of(13, 100, seed, data_dir, **kind)
    order = torch.from_numpy(np.random.default_rng([13, seed]).permutation(10))
    *others, last = federation.clients
    truth = None if federation.true_clusters is None else dict.fromkeys(federation.ids, 0)
    there = replace(
        federation, clients=(*others, replace(last, label_map=order)), true_clusters=truth
    )
    away = there.shard([client.id for client in others])
    counts = []
    for each in (there, away):
        leaves = found_by(method, each, seed)
        counts.append(len({leaves[client.id] for client in others}))
    return {"in": counts[0], "out": counts[1]}


@dataclass(frozen=True)
class Watching(Middleware):
    """Middleware that records the updates that a server receives."""

    queries = (TrainQuery,)

    seen: list[Updates]

    def after(self, query: TrainQuery, reply: Updates) -> Updates:
        """Record the updates, and return them unchanged."""
        self.seen.append(reply)
        return reply


def coins(case: str, method: str, seed: int, *, data_dir: Path | None) -> Line:
    """Guess which of two label swaps each client has; ``case`` is the noise multiplier."""
    privacy = DifferentialPrivacy(clip_norm=CLIP, noise_multiplier=float(case), delta=DELTA)
    federation = federation_of(COINS + 2, 300, seed, data_dir, clusters=2, **KINDS["label_swap"])
    draw = np.random.default_rng([17, seed])
    tossed = [0, 1, *draw.integers(2, size=COINS).tolist()]
    views = [client.label_map for client in federation.clients[:2]]
    clients = [
        replace(client, label_map=views[side])
        for client, side in zip(federation.clients, tossed, strict=True)
    ]
    federation = replace(federation, clients=tuple(clients), true_clusters=dict(enumerate(tossed)))
    algorithm = FLHC(rounds_before=2, n_clusters=2, metric="cosine", linkage="average")
    seen: dict[bool, list[Updates]] = {True: [], False: []}
    leaves: Mapping[int, int] = {}
    for private in (False, True):
        world = Backend.simulated_by(
            federation,
            "mclr",
            algorithm,
            seed=seed,
            engine="stacked",
            privacy=privacy if private else None,
        )
        watched = Channel(world.clients, Watching(seen[private]))
        state = algorithm.init(world.initial, watched)
        for number in (1, 2, 3):
            state, _ = algorithm.step(state, watched.ids, watched, RoundPlan(number, LOCAL, seed))
        leaves = state.tree.leaf_of

    def products(updates: Updates, clean: Updates) -> Tensor:
        mine, own = updates.required_deltas.double(), clean.required_deltas.double()
        return (mine - own.mean(0)) @ (own[1] - own[0])

    score = sum(products(*both) for both in zip(seen[True], seen[False], strict=True))
    assert isinstance(score, Tensor)
    by_updates = (score[2:] > 0).long()
    by_clusters = guessed(leaves, dict(enumerate(tossed)), (0, 1))
    return {
        "by_updates": int((by_updates == torch.tensor(tossed[2:])).sum()),
        "by_clusters": sum(by_clusters),
        "epsilon": privacy.epsilon(len(seen[True])),
    }


def mechanism(case: str, method: str, seed: int, *, data_dir: Path | None) -> Line:
    """Release the two most different updates; ``case`` is an index of ``CLAIMS``."""
    z, releases = CLAIMS[int(case)]
    privacy = DifferentialPrivacy(clip_norm=CLIP, noise_multiplier=z, delta=DELTA)
    unit = torch.ones(ENTRIES, dtype=torch.float32) / ENTRIES**0.5
    scores: list[np.ndarray] = []
    for side in (1.0, -1.0):
        noise = system_noise(TRIALS * releases * ENTRIES, 0, Round(1, LOCAL), "updates").view(
            TRIALS, releases, ENTRIES
        )
        released = [
            sum(float(privacy.released(side * 9 * CLIP * unit, n) @ unit) for n in trial)
            for trial in noise
        ]
        scores.append(np.array(released))
    mu = mu_of_rates(int((scores[0] > 0).sum()), TRIALS, int((scores[1] > 0).sum()), TRIALS)
    return {
        **{"z": z, "releases": releases, "epsilon": privacy.epsilon(releases)},
        "bound": epsilon_of_scores(scores[0], scores[1], DELTA),
        "bound_of_gaussian": epsilon_of({SENSITIVITY / mu: 1}, DELTA) if mu else 0.0,
    }


PARTS: Mapping[str, Callable[..., Line]] = {
    "mechanism": mechanism,
    "probes": probes,
    "canary": canary,
    "coins": coins,
}


def jobs(seeds: int, trials: int) -> Iterator[Line]:
    """Yield all jobs."""
    for k in range(len(CLAIMS)):
        yield {"part": "mechanism", "case": str(k), "method": "", "seed": 0}
    for seed, method, kind in itertools.product(range(seeds), METHODS, KINDS):
        yield {"part": "probes", "case": f"{kind} 40", "method": method, "seed": seed}
    for seed, method in itertools.product(range(seeds), METHODS):
        yield {"part": "probes", "case": "label_swap 300", "method": method, "seed": seed}
    for seed, z in itertools.product(range(trials), NOISE):
        yield {"part": "coins", "case": f"{z:g}", "method": "fl_hc", "seed": seed}
    for seed, method, case in itertools.product(
        range(trials), ("rcfl", "fl_hc"), ("one distribution", "three swaps")
    ):
        yield {"part": "canary", "case": case, "method": method, "seed": seed}


def work(part: str, case: str, method: str, seed: int, *, data_dir: Path | None) -> Line:
    return PARTS[part](case, method, seed, data_dir=data_dir)


def threshold_bound(inside: Sequence[int], outside: Sequence[int]) -> tuple[float, float, float]:
    """Return TPR, FPR and a bound on ε of a threshold on the number of clusters.

    The threshold is chosen on every second run, and the rates are those in the other runs.
    """
    tried, judged = (tuple(zip(inside[k::2], outside[k::2], strict=True)) for k in (0, 1))
    rules = [(sign, level) for sign in (1, -1) for level in {*inside, *outside}]

    def rates(rule: tuple[int, int], runs: Sequence[tuple[int, int]]) -> tuple[int, int]:
        sign, level = rule
        return sum(sign * i >= sign * level for i, _ in runs), sum(
            sign * o >= sign * level for _, o in runs
        )

    best = max(rules, key=lambda rule: rates(rule, tried)[0] - rates(rule, tried)[1])
    hits, false = rates(best, judged)
    n = len(judged)
    return hits / n, false / n, epsilon_of_rates(hits, n, false, n, DELTA)


def tables(lines: Sequence[Line]) -> Iterator[Table]:
    """Yield a table for each part."""
    by_case: dict[tuple[str, str, str], list[Line]] = {}
    for line in lines:
        by_case.setdefault((line["part"], line["case"], line["method"]), []).append(line)
    rows: dict[str, list[list[str]]] = {part: [] for part in PARTS}
    for (part, case, method), runs in by_case.items():
        head = [case, method, str(len(runs))]
        if part == "mechanism":
            one = runs[0]
            cells = [f"{one['z']:g}", str(one["releases"]), *(f"{one[key]:.2f}" for key in BOUNDS)]
        elif part == "probes":
            cells = [
                f"{100 * mean(run['right'] for run in runs):.1f}",
                f"{mean(run['clusters'] for run in runs):.1f}",
            ]
        elif part == "coins":
            cells = [f"{runs[0]['epsilon']:,.1f}"]
            for key in ("by_updates", "by_clusters"):
                right, guesses = int(sum(run[key] for run in runs)), COINS * len(runs)
                low, high = share_bounds(right, guesses)
                bound = epsilon_of_guesses(right, guesses, guesses, DELTA)
                cells += [f"{right / guesses:.3f} ({low:.3f} to {high:.3f})", f"{bound:.2f}"]
        else:
            found = [[run[side] for run in runs] for side in ("in", "out")]
            cells = [str(dict(sorted(Counter(each).items()))) for each in found]
            cells += [
                f"{value:.2f}" for value in (threshold_bound(*found) if len(runs) > 3 else ())
            ]
        rows[part].append(head + cells)
    columns = {
        "mechanism": ("z", "releases", "ε", "refuted ε", "refuted ε of Gaussian noise"),
        "probes": ("correct, %", "clusters"),
        "canary": ("others' clusters with canary", "without canary", "TPR", "FPR", "refuted ε"),
        "coins": ("ε", "correct by updates", "refuted ε", "correct by clusters", "refuted ε"),
    }
    for part, found in rows.items():
        yield as_table(part, ("case", "method", "runs", *columns[part]), found)


def main() -> None:
    """Make missing runs, and print the tables."""
    parser = jsonl.parser(__doc__, "audit_clusters.jsonl")
    parser.add_argument(
        "--seeds", type=int, default=3, help="number of seeds of the part probes (default: 3)"
    )
    parser.add_argument(
        "--trials", type=int, default=12, help="runs of the parts coins and canary (default: 12)"
    )
    parser.add_argument(
        "--parts",
        nargs="*",
        default=list(PARTS),
        choices=list(PARTS),
        help="parts of the study to run (default: all)",
    )
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="start no run after this time (default: 5)"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    if not given.table:
        wanted = (job for job in jobs(given.seeds, given.trials) if job["part"] in given.parts)
        jsonl.run_missing(given.out, wanted, partial(work, data_dir=given.data_dir), given.minutes)
    for table in tables(jsonl.read(given.out)):
        Console(width=150).print(table)


if __name__ == "__main__":
    main()
