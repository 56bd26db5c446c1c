"""Measure the gain of each speed-up of local training, on one thread.

The same training runs alternately with and without the speed-up, in one process. The table has the
samples per second of CPU time of the fastest repeat.

    OMP_NUM_THREADS=1 python benchmarks/gains.py
    OMP_NUM_THREADS=1 python benchmarks/gains.py --only attention
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import thread_time
from unittest.mock import patch

import torch
from engine_models import OwnMLP
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fedclade import LocalTraining
from fedclade.core.params import Layout
from fedclade.models import build_model
from fedclade.training.channels_last import ChannelsLastLoop
from fedclade.training.jobs import Engine, Job, Workload
from fedclade.training.loop import LoopEngine
from fedclade.training.memory import keep_freed_memory
from fedclade.training.stacked import StackedEngine

CLIENTS, STEPS, BATCH, LR = 20, 5, 10, 0.05
IMAGE, COLOUR, WORDS = (1, 28, 28), (3, 32, 32), (25,)
VOCABULARY = 1000

Way = tuple[Callable[[], Engine], Callable[[], AbstractContextManager[object]]]
"""An engine, and a context in which it trains, which may disable a speed-up."""


class Transformer(nn.Module):
    """A classifier of texts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True) for _ in "12"
        )
        self.output = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the labels."""
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.output(x.mean(1))


def paper(name: str, shape: tuple[int, ...], **arguments: int) -> Callable[[], nn.Module]:
    words = VOCABULARY if shape == WORDS else 0
    outputs = 2 if words else 10
    return lambda: build_model(
        name, input_shape=shape, outputs=outputs, vocabulary_size=words, arguments=arguments
    )


LOOP: Way = LoopEngine, nullcontext
STACKED: Way = StackedEngine, nullcontext
NO_TAPE: Way = (
    StackedEngine,
    lambda: patch("fedclade.training.stacking.tape.Tape.of", lambda module: None),
)
NO_NUMPY: Way = StackedEngine, lambda: patch("fedclade.training.stacking.functions.TINY", 0)
NO_COLUMNS: Way = StackedEngine, lambda: patch("fedclade.training.stacking.loss.REGISTER", 0)
CHANNELS_LAST: Way = ChannelsLastLoop, nullcontext

SUBJECTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Way, Way]] = {
    "tape: mclr": (paper("mclr", IMAGE), IMAGE, STACKED, NO_TAPE),
    "tape: mlp": (paper("mlp", IMAGE), IMAGE, STACKED, NO_TAPE),
    "tape: own mlp": (OwnMLP, IMAGE, STACKED, NO_TAPE),
    "NumPy's products: mclr": (paper("mclr", IMAGE), IMAGE, STACKED, NO_NUMPY),
    "NumPy's products: mlp": (paper("mlp", IMAGE), IMAGE, STACKED, NO_NUMPY),
    "loss by column: mclr": (paper("mclr", IMAGE), IMAGE, STACKED, NO_COLUMNS),
    "loss by column: mlp": (paper("mlp", IMAGE), IMAGE, STACKED, NO_COLUMNS),
    "channels last: cnn": (paper("cnn", IMAGE), IMAGE, CHANNELS_LAST, LOOP),
    "channels last: cifar_cnn": (paper("cifar_cnn", COLOUR), COLOUR, CHANNELS_LAST, LOOP),
    "attention: width 16": (lambda: Transformer(16), WORDS, STACKED, LOOP),
    "attention: width 64": (lambda: Transformer(64), WORDS, STACKED, LOOP),
    **{
        f"recurrent: lstm, hidden {hidden}": (
            paper("lstm", WORDS, embedding=hidden // 2, hidden=hidden), WORDS, STACKED, LOOP
        )
        for hidden in (16, 32, 128)
    },
}  # fmt: skip
"""Speed-ups: each with a model, the shape of its inputs, and training with and without it."""


def speeds(subject: str, repeats: int) -> tuple[float, float]:
    """Return the samples per second with a speed-up and without it."""
    build, shape, *ways = SUBJECTS[subject]
    draw = torch.Generator().manual_seed(0)
    each = STEPS * BATCH
    inputs = (
        torch.randint(1, VOCABULARY, (CLIENTS, each, *shape), generator=draw)
        if shape == WORDS
        else torch.randn(CLIENTS, each, *shape, generator=draw)
    )
    module = build()
    layout = Layout.of(module)
    models = layout.flatten(module)[None]
    targets = torch.randint(2, (CLIENTS, each), generator=draw)
    engines = [engine() for engine, _ in ways]
    seconds: list[list[float]] = [[], []]
    for _ in range(repeats + 1):
        for engine, (_, without), took in zip(engines, ways, seconds, strict=True):
            jobs = [
                Job(k, 0, x, y, torch.Generator().manual_seed(k))
                for k, (x, y) in enumerate(zip(inputs, targets, strict=True))
            ]
            task = Workload(
                module, layout, models, jobs, LocalTraining(batch_size=BATCH, lr=LR), LR
            )
            with without():
                start = thread_time()
                engine.train(task)
                took.append(thread_time() - start)
    with_it, without_it = (CLIENTS * each / min(took[1:]) for took in seconds)
    return with_it, without_it


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="measure only speed-ups whose names contain this text"
    )
    parser.add_argument("--repeats", type=int, default=7, help="number of repeats (default: 7)")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="do not return freed memory to the system, as in worker processes",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.keep:
        keep_freed_memory()
    table = Table(title="samples/s on one thread")
    for column in ("speed-up: model", "with it", "without", "gain"):
        table.add_column(column, justify="left" if ":" in column else "right")
    for subject in SUBJECTS:
        if arguments.only in subject:
            with_it, without_it = speeds(subject, arguments.repeats)
            table.add_row(
                subject, f"{with_it:,.0f}", f"{without_it:,.0f}", f"{with_it / without_it:.2f}"
            )
    Console().print(table)


if __name__ == "__main__":
    main()
