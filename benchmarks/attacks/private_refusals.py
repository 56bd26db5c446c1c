"""Read a private client's data off its refusals, losses, and counters: an attack that must stay unsuccessful.

A server with full control of model and step size queries a client with differential privacy (ε = 0.5). It tries what
once worked:

- ``norm``: a step size of 1e25 makes the exact update longer than what clients accept. A refusal that quotes the norm
  is an exact function of the data; with a model of one neuron, a few hundred of them are a training image.
- ``divergence``: a model of which only the examples near a known one overflow. Whether the client replies tells for
  certain whether that example is among its data.
- ``crash``: a model of NaN. If a query that fails is not booked, questions are free.

For each it compares two data sets that differ in one example, by every field of the reply but the noisy numbers, by
the text of a refusal, and by what the client has booked. The attack succeeds if any of these differ, or if a query
was not booked.

    python benchmarks/attacks/private_refusals.py [--json FILE]
"""

from __future__ import annotations

# Before torch, whose threads then sleep while they wait.
import fedclade  # noqa: F401  # isort: skip  # pyright: ignore[reportUnusedImport]

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from common import LAYOUT, MODEL, REST, SPEC, AttackedClient, Row, parser, report
from common import query as ask
from torch import Tensor

from fedclade import DifferentialPrivacy, ExamplePrivacy, load_federation
from fedclade.channel import Budget
from fedclade.core import FedcladeError
from fedclade.data import Federation

LEVELS = {
    "client": DifferentialPrivacy(clip_norm=1.0, noise_multiplier=1000.0),
    "example": ExamplePrivacy(clip_norm=1.0, noise_multiplier=1000.0),
}
ENGINES = ("loop", "stacked", "vmap")
HUGE = 2e38
"""Logits of this size overflow a loss in float32, while the clipped gradient stays finite."""


@dataclass(frozen=True)
class Seen:
    """All that a server sees of one query but for the noisy numbers, and what the client has booked."""

    reply: str
    booked: str
    used: str = field(compare=False)  # budget that the query has used up


def without_one(federation: Federation) -> Federation:
    """Return the same client with another example in place of one."""
    client = federation.clients[0]
    train = client.train.copy()
    train[7] = train[0]
    return replace(federation, clients=(replace(client, train=train),))


def attacks(federation: Federation) -> Mapping[str, tuple[Tensor, float]]:
    """Return the model and the step size of each attack on example 7."""
    pool, client = federation.pool, federation.clients[0]
    target = int(client.train[7])
    image = pool.x[target].double().flatten() / 255
    if pool.schema.scaled is not None:
        mean, deviation = pool.schema.scaled
        image = (image - mean) / deviation
    label = int(client.labels(pool.y[target : target + 1])[0])
    weights = torch.zeros(10, 64, dtype=torch.float64)
    weights[:] = image / image.square().sum() * HUGE
    weights[label] *= -1
    overflowing = torch.zeros_like(MODEL)
    start = LAYOUT.parameters[0].start
    overflowing[start : start + 640] = weights.flatten().to(MODEL)
    nan = torch.full_like(MODEL, torch.nan)
    return {"norm": (MODEL, 1e25), "divergence": (overflowing, 0.1), "crash": (nan, 0.1)}


def query(federation: Federation, level: str, engine: str, model: Tensor, lr: float) -> Seen:
    """Put one training query to a fresh private client."""
    spec = json.dumps({**SPEC, "lr": lr})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        client = AttackedClient(
            federation,
            number=0,
            engine=engine,
            folder=folder,
            privacy=LEVELS[level],
            budget=Budget(epsilon=0.5, level=level),
        )
        try:
            reply = ask(client, "train", {"model": model}, spec=spec)
            lengths = {name: len(data) for name, data in reply.vectors.items()}
            seen = f"{sorted(reply.values.items())} {lengths}"
        except FedcladeError as error:
            seen = f"refused: {error}"
        files = ("privacy.json", "example-privacy.json", "policy.json")
        booked = [(folder / name).read_text() for name in files if (folder / name).exists()]
        used = client.used()
    return Seen(seen, "\n".join(booked), used)


def rows(federation: Federation) -> Iterator[Row]:
    """Run each attack at each level of privacy with each engine."""
    for name, (model, lr) in attacks(federation).items():
        for level in LEVELS:
            for engine in ENGINES:
                with_it = query(federation, level, engine, model, lr)
                without_it = query(without_one(federation), level, engine, model, lr)
                differs = with_it != without_it
                is_free = "releases" not in with_it.booked or with_it.booked.count("entries") != 1
                replies = "replies differ" if differs else "replies alike"
                booked = "not booked" if is_free else "booked"
                detail = f"{replies}, {booked}{REST}{with_it.reply[:60]}"
                attack = f"{name}, {level} level, engine {engine}"
                yield Row(attack, differs or is_free, detail, budget=with_it.used)


def main() -> int:
    """Run all attacks; return 1 if one of them succeeds."""
    arguments = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    federation = load_federation("digits", clients=2, samples_per_client=60, seed=0).alone(0)
    return report(rows(federation), arguments.json)


if __name__ == "__main__":
    sys.exit(main())
