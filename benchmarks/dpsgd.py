"""Measure DP-SGD on clients: agreement of the engines, time, and accuracy of clustered methods.

- *agreement*: updates of the engines ``stacked`` and ``vmap`` are compared with those of ``loop``,
  with the same random draws, on random images.
- *time*: samples per second of CPU time, with and without DP-SGD.
- *accuracy*: MNIST with four label swaps. For each ε, the script computes the noise multiplier σ
  for a client that trains in every round. The table also has the ε that the run states. The methods
  know the number of clusters, or the rounds in which to split, so that only the effect of noise is
  measured.

    python benchmarks/dpsgd.py --only agreement
    python benchmarks/dpsgd.py --only time
    python benchmarks/dpsgd.py --only accuracy --data-dir DIR
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean
from time import process_time
from typing import Any

import torch
from torch import nn

from fedclade import LocalTraining, Run
from fedclade.channel import sampling_rate
from fedclade.channel.example_privacy import epsilon_of_steps
from fedclade.config import check_config
from fedclade.core import Layout, rng
from fedclade.models import build_model
from fedclade.training.jobs import Engine, Job, PrivateSteps, Workload
from fedclade.training.loop import LoopEngine
from fedclade.training.stacked import StackedEngine
from fedclade.training.vmap import VmapEngine

ENGINES: Mapping[str, Callable[[], Engine]] = {
    "loop": LoopEngine,
    "stacked": StackedEngine,
    "vmap": VmapEngine,
}
PRIVATE = PrivateSteps(clip_norm=1.0, noise_multiplier=1.0)
METHODS: Mapping[str, dict[str, Any]] = {
    "fedavg": {},
    "oracle": {},
    "fl_hc": {"rounds_before": 5, "n_clusters": 4},
    "fedgroup": {"groups": 4, "pretrain_scale": 20},
    "cfl": {"split_rounds": [5, 10], "eps2": 1e-6},
    "rcfl": {},
}
DELTA = 1e-5


def group_norm() -> nn.Module:
    """Return a model of two convolutions, each followed by GroupNorm, and a dense layer."""
    torch.manual_seed(0)
    body = (
        nn.Conv2d(1, 8, 5, stride=2),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 5, stride=2),
    )
    return nn.Sequential(*body, nn.GroupNorm(4, 16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "mclr": lambda: build_model("mclr", input_shape=(1, 28, 28), outputs=10),
    "mlp": lambda: build_model("mlp", input_shape=(1, 28, 28), outputs=10),
    "cnn": lambda: build_model("cnn", input_shape=(1, 28, 28), outputs=10),
    "GroupNorm": group_norm,
}


def workload(module: nn.Module, clients: int, examples: int, double: bool = False) -> Workload:
    """Return the work of clients with random images: an epoch of plain SGD."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(
        clients * examples,
        1,
        28,
        28,
        generator=draw,
        dtype=torch.float64 if double else torch.float32,
    )
    y = torch.randint(10, (clients * examples,), generator=draw)
    module = module.double() if double else module
    layout = Layout.of(module)
    each = zip(x.split(examples), y.split(examples), strict=True)
    jobs = [
        Job(k, 0, xs, ys, rng.torch_generator(0, "benchmark", k)) for k, (xs, ys) in enumerate(each)
    ]
    return Workload(
        module,
        layout,
        layout.flatten(module)[None],
        jobs,
        LocalTraining(batch_size=20, lr=0.1),
        0.1,
    )


def agreement(_: argparse.Namespace) -> Iterator[list[str]]:
    """Yield the differences between engines, relative to the largest entry of an update.

    In float64, differences by rounding do not change the sign of a ReLU's input.
    """
    yield ["model", "engine", "float32", "float64"]
    for name, make in MODELS.items():
        for engine in ("stacked", "vmap"):
            row = [name, engine]
            for double in (False, True):
                work = replace(workload(make(), 3, 45, double), private=PRIVATE)
                expected, found = (
                    ENGINES[each]().train(work.redrawn())[0] for each in ("loop", engine)
                )
                row.append(f"{float((found - expected).abs().max() / expected.abs().max()):.0e}")
            yield row


def samples_per_second(engine: Engine, work: Workload, repeats: int) -> float:
    """Return the samples per second of the fastest repeat, after a warm-up."""
    engine.train(work.redrawn())
    seconds: list[float] = []
    for _ in range(repeats):
        start = process_time()
        engine.train(work.redrawn())
        seconds.append(process_time() - start)
    return sum(job.size for job in work.jobs) / min(seconds)


def time(arguments: argparse.Namespace) -> Iterator[list[str]]:
    """Yield samples per second of CPU time without and with DP-SGD."""
    yield ["model", "engine", "plain", "DP-SGD", "ratio"]
    for name in ("mclr", "mlp", "cnn"):
        for engine in ("stacked", "vmap", "loop"):
            work = workload(MODELS[name](), 20 if engine != "loop" else 2, 100)
            plain, private = (
                samples_per_second(
                    ENGINES[engine](), replace(work, private=each), arguments.repeats
                )
                for each in (None, PRIVATE)
            )
            yield [name, engine, f"{plain:,.0f}", f"{private:,.0f}", f"{plain / private:.1f}"]


def noise_for(epsilon: float, arguments: argparse.Namespace) -> float:
    """Return the σ, to 1 %, with which a client that trains in every round spends at most ε."""
    spec = LocalTraining(epochs=arguments.epochs, batch_size=arguments.batch_size)
    rate = sampling_rate(spec.batch_size, arguments.samples)
    steps = arguments.rounds * spec.steps_with(arguments.samples)
    low, high = 0.3, 100.0
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        spent = epsilon_of_steps({(rate, middle): steps}, DELTA)
        low, high = (middle, high) if spent > epsilon else (low, middle)
    return high


def run(method: str, noise: float | None, seed: int, arguments: argparse.Namespace) -> Run:
    """Run a method with a noise multiplier, or without privacy."""
    config: dict[str, Any] = {
        **{
            "seed": seed,
            "rounds": arguments.rounds,
            "evaluate_every": arguments.rounds,
            "engine": "stacked",
        },
        "data": {
            **{
                "name": "mnist",
                "clients": arguments.clients,
                "samples_per_client": arguments.samples,
            },
            **{"shift": "label_swap", "clusters": 4},
        },
        "model": {"name": arguments.model},
        "local": {
            "epochs": arguments.epochs,
            "batch_size": arguments.batch_size,
            "lr": arguments.lr,
        },
        "algorithm": {"name": method, **METHODS[method]},
    }
    if noise is not None:
        config["privacy"] = {
            "level": "example",
            "clip_norm": arguments.clip,
            "noise_multiplier": noise,
            "delta": DELTA,
        }
    checked = check_config(config)
    return checked.run(checked.federation(arguments.data_dir))


def accuracy(arguments: argparse.Namespace) -> Iterator[list[str]]:
    """Yield ε, ARI and accuracy of each method at each level."""
    yield ["requested ε", "σ", "method", "stated ε", "ARI by seed", "accuracy, %"]
    for level in arguments.epsilon:
        noise = None if level == float("inf") else noise_for(level, arguments)
        for method in arguments.methods:
            runs = [run(method, noise, seed, arguments) for seed in range(arguments.seeds)]
            spent = runs[0].summary.get("privacy", {}).get("epsilon")
            yield [
                f"{level:g}",
                "–" if noise is None else f"{noise:.2f}",
                method,
                "∞" if spent is None else f"{spent:.2f}",
                " ".join(f"{each.summary['clusters']['ari']:.2f}" for each in runs),
                f"{100 * mean(each.summary['accuracy']['mean'] for each in runs):.1f}",
            ]


PARTS = {"agreement": agreement, "time": time, "accuracy": accuracy}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", choices=PARTS, nargs="*", default=list(PARTS), help="parts to run (default: all)"
    )
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of time (default: 3)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of accuracy (default: 3)")
    parser.add_argument("--clients", type=int, default=20, help="number of clients (default: 20)")
    parser.add_argument(
        "--samples", type=int, default=300, help="images of each client (default: 300)"
    )
    parser.add_argument("--rounds", type=int, default=20, help="number of rounds (default: 20)")
    parser.add_argument("--epochs", type=int, default=1, help="local epochs (default: 1)")
    parser.add_argument("--batch-size", type=int, default=60, help="batch size (default: 60)")
    parser.add_argument("--lr", type=float, default=0.1, help="step size (default: 0.1)")
    parser.add_argument(
        "--clip", type=float, default=1.0, metavar="C", help="clipping norm (default: 1)"
    )
    parser.add_argument("--model", default="mclr", help="model of accuracy (default: mclr)")
    parser.add_argument(
        "--epsilon",
        type=float,
        nargs="*",
        default=[float("inf"), 8.0, 2.0],
        help="values of ε; inf for no privacy (default: inf 8 2)",
    )
    parser.add_argument(
        "--methods",
        nargs="*",
        default=["oracle", "fl_hc", "fedavg"],
        help="methods of accuracy (default: oracle fl_hc fedavg)",
    )
    arguments = parser.parse_args()
    for part in arguments.only:
        for number, row in enumerate(PARTS[part](arguments)):
            print("|", " | ".join(row), "|", flush=True)
            if number == 0:
                print("|" + " --: |" * len(row))
        print()
    print(
        f"{torch.get_num_threads()} thread(s), torch {torch.__version__}, Python {platform.python_version()}"
    )


if __name__ == "__main__":
    main()
