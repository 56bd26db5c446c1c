"""Measure the CPU time of local training of small models of Hugging Face, by engine.

The models are a BERT and a GPT-2 of two layers with random parameters, trained by ten clients with
32 examples each. The table has the CPU seconds of a round, the fastest of three, on one thread.

    OMP_NUM_THREADS=1 python benchmarks/hugging_face.py
"""

from __future__ import annotations

import fedclade  # isort: skip  (before torch, whose threads then sleep while they wait)

from collections.abc import Callable
from itertools import pairwise
from time import process_time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

CLIENTS, EXAMPLES, LENGTH, WORDS = 10, 32, 16, 100
LOCAL = fedclade.LocalTraining(batch_size=8, lr=0.1)
ENGINES = ("loop", "stacked")


def bert(seed: int) -> nn.Module:
    """Return a BERT that classifies texts."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return BertForSequenceClassification(
        BertConfig(vocab_size=WORDS, num_attention_heads=2, **sizes)
    )


def gpt2(seed: int) -> nn.Module:
    """Return a GPT-2 that predicts the next token."""
    torch.manual_seed(seed)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, bos_token_id=1, eos_token_id=1, **sizes))


def tokens(client: int, length: int) -> torch.Tensor:
    """Return the random tokens of a client."""
    draw = torch.Generator().manual_seed(client)
    return torch.randint(WORDS, (EXAMPLES, length), generator=draw)


def texts() -> fedclade.Federation:
    """Return texts with labels."""
    data: dict[str, Any] = {}
    for client in range(CLIENTS):
        ids = tokens(client, LENGTH)
        rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "label": ids[:, 0] % 2}
        data[f"client {client}"] = rows
    return fedclade.federation(data)


def continued() -> fedclade.Federation:
    """Return texts with the next token at each place."""
    data: dict[str, Any] = {}
    for client in range(CLIENTS):
        ids = tokens(client, LENGTH + 1)
        data[f"client {client}"] = ids[:, :-1], ids[:, 1:]
    return fedclade.federation(data, "language", labels=WORDS)


def seconds(make: Callable[[int], nn.Module], data: fedclade.Federation, engine: str) -> float:
    """Return the CPU seconds of the fastest round after the first, in which engines are tried."""
    ends: list[float] = []
    fedclade.simulate(
        "fedavg",
        make,
        data,
        rounds=4,
        engine=engine,
        local=LOCAL,
        evaluate_every=4,
        references=False,
        on_round=lambda *_: ends.append(process_time()),
    )
    return min(end - start for start, end in pairwise(ends))


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    table = Table("model", *(f"{engine}, CPU seconds a round" for engine in ENGINES))
    for name, make, data in (("BERT", bert, texts()), ("GPT-2", gpt2, continued())):
        table.add_row(name, *(f"{seconds(make, data, engine):.3f}" for engine in ENGINES))
    Console().print(table)


if __name__ == "__main__":
    main()
