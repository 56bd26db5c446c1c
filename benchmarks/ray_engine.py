"""Compare the engine ``ray`` with training without Ray: samples per second, overhead of a round.

- *Throughput*: clients train the model ``cnn`` in batches of 10 for a round, alternately on two
  processes of the engine ``workers`` and on two Ray actors with one core each. The ratio is that of
  the medians.
- *Overhead*: rounds of tiny clients with the model ``mclr``. The overhead is the median time of a
  round (training and evaluation) on actors minus that in this process, with the same engine.

Other processes on the machine affect both, but not equally, so run the script on an idle machine.

    python benchmarks/ray_engine.py --json ray_engine.json
    python benchmarks/ray_engine.py --quick
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch
from torch import nn

from fedclade import Federation, LocalTraining, Pool
from fedclade.core import Clients, Round
from fedclade.data import ClientData
from fedclade.models import build_model
from fedclade.tasks import Task
from fedclade.training import Actors, RayClients, Setup, SimulatedClients
from fedclade.training.remote import clients as placement

BATCH, LR, LABELS = 10, 0.05, 10


def federation_of(clients: int, examples: int, shape: tuple[int, ...]) -> Federation:
    """Return clients with random data: ``examples`` training and 10 test examples each."""
    each = examples + 10
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(clients * each, *shape, generator=draw)
    y = torch.randint(LABELS, (len(x),), generator=draw)
    everything, none = np.arange(len(x)), np.arange(0)
    parts = np.split(everything, clients)
    data = tuple(
        ClientData(k, f"c{k}", k, part[:examples], none, part[examples:])
        for k, part in enumerate(parts)
    )
    return Federation(Pool("made up", x, y, y.numpy(), everything, none, LABELS), data)


def module_of(name: str, shape: tuple[int, ...]) -> nn.Module:
    return build_model(name, input_shape=shape, outputs=LABELS, seed=0)


def on_actors(
    federation: Federation, module: nn.Module, actors: int, engine: str = "auto"
) -> RayClients:
    return RayClients(
        Setup(federation, module, Task().of(federation.pool.schema)),
        Actors(count=actors, engine=engine),
    )


def seconds(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def throughput(clients: int, steps: int, repeats: int, actors: int) -> dict[str, object]:
    """Return the samples per second of ``workers`` and of Ray actors, measured alternately."""
    federation = federation_of(clients, steps * BATCH, (1, 28, 28))
    local, module = LocalTraining(batch_size=BATCH, lr=LR), module_of("cnn", (1, 28, 28))
    torch.set_num_threads(actors)
    here = SimulatedClients(federation, module, engine="workers")
    there = on_actors(federation, module_of("cnn", (1, 28, 28)), actors)
    model = here.layout.flatten(module)[None]

    def round_of(which: Clients, number: int) -> Callable[[], object]:
        return lambda: which.train(federation.ids, model, [0] * clients, Round(number, local))

    contestants = {"workers": here, "ray": there}
    for which in contestants.values():
        for number in (1, 2):  # warm-up: engines are chosen, and data is fetched
            round_of(which, number)()
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(3, 3 + repeats):
        for name, which in sorted(contestants.items(), reverse=bool(number % 2)):
            found[name].append(clients * steps * BATCH / seconds(round_of(which, number)))
    engines = {name: which.engine_taken for name, which in contestants.items()}
    there.close()
    ratios = [ray / workers for ray, workers in zip(found["ray"], found["workers"], strict=True)]
    medians = {name: median(speeds) for name, speeds in found.items()}
    ratio = {
        "ratio": medians["ray"] / medians["workers"],
        "of each turn": [min(ratios), median(ratios), max(ratios)],
    }
    return {**medians, **ratio, "engines": engines}


def overhead(clients: int, rounds: int, actors: int) -> dict[str, float]:
    """Return the milliseconds of a round of tiny clients, on actors and in this process."""
    shape = (20,)
    federation = federation_of(clients, BATCH, shape)
    local, module = LocalTraining(batch_size=BATCH, lr=LR), module_of("mclr", shape)
    torch.set_num_threads(1)
    here = SimulatedClients(federation, module, engine="stacked")
    there = on_actors(federation, module_of("mclr", shape), actors, "stacked")
    model = here.layout.flatten(module)[None]

    def round_of(which: Clients, number: int) -> None:
        which.train(federation.ids, model, [0] * clients, Round(number, local))
        which.evaluate(federation.ids, model, [0] * clients, "test")

    found: dict[str, list[float]] = {"here": [], "there": []}
    for number in range(1, rounds + 11):
        for name, which in (("here", here), ("there", there)):
            found[name].append(seconds(lambda which=which, number=number: round_of(which, number)))
    there.close()
    medians = {f"{name}, ms": 1000 * median(each[10:]) for name, each in found.items()}
    return {**medians, "overhead, ms": medians["there, ms"] - medians["here, ms"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--actors", type=int, default=2, help="number of actors and of processes (default: 2)"
    )
    parser.add_argument("--clients", type=int, default=20, help="number of clients (default: 20)")
    parser.add_argument(
        "--repeats", type=int, help="repeats of throughput (default: 9, with --quick 3)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps, repeats and rounds")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    placement.ENOUGH_SECONDS = float("inf")  # actors must not exchange clients during the benchmark
    repeats, quick = arguments.repeats or (3 if arguments.quick else 9), arguments.quick
    results = {
        "cnn, samples/s": throughput(
            arguments.clients, 3 if quick else 20, repeats, arguments.actors
        ),
        "round": overhead(arguments.clients, 50 if quick else 200, arguments.actors),
        "load": os.getloadavg(),
    }
    print(json.dumps(results, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
