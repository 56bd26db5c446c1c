"""Profile the loop with the recurrent model ``lstm`` on one CPU thread, for several batch sizes.

The table shows why small batches are slower than large batches: the time per sample in the kernels
of the recurrent layer, and in all other operations. Samples per second are by CPU time, the best of
the repeats.

    python benchmarks/recurrent.py
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
from time import thread_time

import torch
from engine import LR, SUBJECTS
from torch.profiler import ProfilerActivity, profile

from fedclade import LocalTraining
from fedclade.core.params import Layout
from fedclade.tasks import FittedTask
from fedclade.training import loop

BATCHES = {10: 250, 32: 256, 128: 512, 512: 512}
"""Number of examples to train on, by batch size."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3, help="number of repeats (default: 3)")
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    module = SUBJECTS["lstm"].module("lstm")
    layout = Layout.of(module)
    model = layout.flatten(module)
    inputs, targets = SUBJECTS["lstm"].examples(max(BATCHES.values()), "cpu")

    def train(batch_size: int, examples: int) -> None:
        spec = LocalTraining(batch_size=batch_size, lr=LR)
        data = inputs[:examples], targets[:examples]
        draws = torch.Generator().manual_seed(0)
        loop.train(module, layout, model, data, spec, LR, FittedTask(), draws)

    print("| batch | samples/s of CPU time | in the LSTM's kernels, ms per sample | in all else |")
    print("|--:|--:|--:|--:|")
    for batch_size, examples in BATCHES.items():
        train(batch_size, batch_size)  # warm-up
        best = float("inf")
        kernels = others = float("inf")
        for _ in range(repeats):
            start = thread_time()
            train(batch_size, examples)
            best = min(best, thread_time() - start)
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                train(batch_size, examples)
            events = profiled.key_averages()
            inside = sum(e.self_cpu_time_total for e in events if "rnn_layer" in e.key)
            outside = sum(e.self_cpu_time_total for e in events if "rnn_layer" not in e.key)
            if inside + outside < kernels + others:
                kernels, others = inside, outside
        per_sample = f"{kernels / examples / 1e3:.2f} | {others / examples / 1e3:.2f}"
        print(f"| {batch_size} | {examples / best:,.0f} | {per_sample} |")


if __name__ == "__main__":
    main()
