"""Read a client's data off what leaves it in clear: attacks on everything but updates, which must stay unsuccessful.

A lying server asks clients with secure aggregation, or with differential privacy (ε = 0.1), for what no mask and no
noise is put on, as their default policies allow it:

- ``own loss``: the client is told to keep what it trains, so that nothing is masked, and answers its exact loss. Two
  losses give one entry of its update.
- ``evaluate``: losses of models of the server's choice, on test and on training data: a few hundred are an image.
- ``scores``: the same where the policy discloses scores. The attack succeeds by exact numbers, losses, without end, or
  unbooked.
- ``sketches``: under three seeds, each of half as many numbers as there are parameters, solved for the whole update.
- ``data``: subspaces, descriptors, shifts, and sums of one client's examples.
- ``new kind``: a kind of query that nobody has thought about, to a client with privacy.
- ``own scaling``: example-level privacy with inputs that are scaled by the client's own examples, so that one of them
  moves all gradients.

    python benchmarks/attacks/disclosures.py [--json FILE]
"""

# Parts of a client are called directly here that no message of the network reaches.
# pyright: reportPrivateUsage=false

from __future__ import annotations

# Before torch, whose threads then sleep while they wait.
import fedclade  # noqa: F401  # isort: skip  # pyright: ignore[reportUnusedImport]

import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    DIGITS,
    LAYOUT,
    MODEL,
    SIMILAR,
    AttackedClient,
    Requests,
    Row,
    cosine,
    counted,
    make_model,
    parser,
    query,
    refused,
    report,
    training,
    try_query,
    update_of,
    used_scores,
    used_signs,
)
from torch import Tensor

from fedclade import DifferentialPrivacy, ExamplePrivacy, federation, load_federation, simulate
from fedclade.channel import Budget, Channel, client_side, privatizing
from fedclade.channel.signature import CountSketch
from fedclade.core import FedcladeError, Query, Updates
from fedclade.data import Federation
from fedclade.flower import wire
from fedclade.flower.client_handler import ClientHandler
from fedclade.flower.policy import Policy
from fedclade.flower.wire import Content
from fedclade.tasks import Task

MOST_SCORES = 100
"""Scores that a client may disclose by default."""

PRIVATE = DifferentialPrivacy(clip_norm=1.0, noise_multiplier=1000.0)


def policy_of(**settings: Any) -> Policy:
    """Return a policy; what this version does not know is left out."""
    known = {field.name for field in fields(Policy)}
    settings = {"trust_server_keys": True, **settings}
    return Policy(**{name: value for name, value in settings.items() if name in known})


def own_loss(data: Federation) -> Iterator[Row]:
    """Train a model that the client keeps."""
    client = AttackedClient(
        data, policy=policy_of(secure_aggregation=True, allow=("train",), max_clear=0)
    )
    yield try_query("own loss", client, "train", {"model": MODEL}, field="loss", own=True)


def evaluations(data: Federation) -> Iterator[Row]:
    """Score a model under default policies."""
    for split in ("test", "train"):
        secure = AttackedClient(data, policy=policy_of(secure_aggregation=True))
        yield try_evaluation(f"evaluate on {split} data, secure aggregation", secure, split)
    with tempfile.TemporaryDirectory() as folder:
        private = AttackedClient(
            data, privacy=PRIVATE, budget=Budget(epsilon=0.1), folder=Path(folder)
        )
        yield try_evaluation("evaluate on test data, epsilon = 0.1", private, "test")


def try_evaluation(attack: str, client: AttackedClient, split: str) -> Row:
    """Ask a client for the score of a model on a split of its data."""
    return try_query(
        attack,
        client,
        "evaluate",
        {"0": MODEL},
        field="scores",
        limits=(used_scores,),
        split=split,
        compares=False,
    )


def disclosed_scores(data: Federation) -> Iterator[Row]:
    """Score models until the client refuses, where its policy discloses scores."""
    for name, private in (("scores, secure aggregation", None), ("scores, epsilon = 0.1", PRIVATE)):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            client = AttackedClient(
                data,
                folder=folder,
                privacy=private,
                budget=Budget(epsilon=0.1) if private else None,
                policy=policy_of(secure_aggregation=private is None, disclose=("scores",)),
            )
            told: list[float] = []
            losses = False
            try:
                for _ in range(4 * MOST_SCORES):
                    reply = query(client, "evaluate", {"0": MODEL}, split="test", compares=False)
                    told += reply.values["scores"]
                    losses = losses or "losses" in reply.values
            except FedcladeError:
                pass
            exact = any(round(score, DIGITS) != score for score in told)
            free = private is not None and not (folder / "privacy.json").exists()
            used = client.used(used_scores)
        succeeded = exact or losses or free or len(told) > MOST_SCORES
        told_by = "with losses" if losses else "without losses"
        booked = "" if private is None else f", {'not ' if free else ''}booked"
        yield Row(name, succeeded, f"{len(told)} scores {told_by}{booked}", budget=used)


def read_update(client: AttackedClient, data: Federation) -> tuple[float, int]:
    """Return the cosine of a client's update and of what three sketches tell of it, and how many were sent."""
    handler = client.handler
    update = update_of(data, MODEL)[: LAYOUT.n_parameters]
    D = LAYOUT.n_parameters
    rows: list[Tensor] = []
    told: list[Tensor] = []
    for seed in (1, 2, 3):
        values = training(what="train", seed=seed, dim=D // 2, signs=True)
        content = Content.of(wire.record(values, {"model": wire.raw_vector(MODEL)}))
        client.requests.count("masked")
        try:
            # what the client would mask, and what would leave beside it
            sent = handler._trained_for_sum(content)
        except FedcladeError:
            continue
        clear = sent_beside(sent)
        handler._policy.check_clear(len(clear), D)
        told.append(clear)
        rows.append(directions(seed, D))
    if not rows:
        return 0.0, 0
    found = np.linalg.lstsq(torch.cat(rows).numpy(), torch.cat(told).numpy(), rcond=None)[0]
    return cosine(found, update), len(rows)


def sent_beside(updates: Updates) -> Tensor:
    """Return the numbers that leave beside the masked update."""
    try:
        from fedclade.flower.secure.member import sent_in_clear
    except ImportError:  # an earlier version, which appends them to the update
        return updates.required_deltas[0, LAYOUT.size :]
    return sent_in_clear(updates)


def directions(seed: int, D: int) -> Tensor:
    """Return the directions that a sketch is by, ``[D/2, D]``: known to the server, who chooses the seed."""
    try:
        from fedclade.channel import SignSketch
    except ImportError:  # an earlier version, which sends the numbers themselves
        return CountSketch(seed, D, D // 2).apply(torch.eye(D)).T
    sketch = SignSketch(seed, D, D // 2)
    return sketch.project(torch.eye(D)).T.float()


def sketches(data: Federation) -> Iterator[Row]:
    """Ask for sketches under three seeds, by a default policy and by one that discloses them."""
    for name, disclose in (("sketches", ()), ("sketches, disclosed", ("sketch",))):
        client = AttackedClient(data, policy=policy_of(secure_aggregation=True, disclose=disclose))
        cosine, sent = read_update(client, data)
        detail = f"{sent} of 3 sketches, cosine with the update {cosine:.2f}"
        yield Row(name, cosine > SIMILAR, detail, budget=client.used(used_signs))


def data_of_one(data: Federation) -> Iterator[Row]:
    """Ask for what tells of a client's examples, where its policy allows the questions."""
    allow = ("train", "subspaces", "descriptors", "shifts", "statistics")
    policy = policy_of(secure_aggregation=True, allow=allow)
    task = Task(class_weights="balanced")
    sums = ClientHandler(data, make_model, policy=policy_of(), task=task)._sums
    assert sums is not None
    told = {"count": sums.count, "labels": sums.labels.tolist()}
    questions: dict[str, tuple[dict[str, Tensor], dict[str, Any], str]] = {
        "subspaces": ({}, {"vectors": 1, "per_label": False}, "subspaces"),
        "descriptors": ({"model": MODEL}, {"components": 2, "per_label": False}, "descriptor"),
        "shifts": ({}, {"share": 0.1, "by_label": True}, "shifted"),
        "statistics": ({}, {}, "labels"),
    }
    for kind, (sent, more, shows) in questions.items():
        client = AttackedClient(data, policy=policy, task=task)
        attack = f"{kind}, secure aggregation"
        yield try_query(attack, client, kind, sent, field=shows, **told, **more)


@dataclass(frozen=True, eq=False)
class LongestInput(Query[Tensor]):
    """A class of queries that no list knows."""

    def handled(self, handlers: object) -> Tensor:
        """Reply to the query in an earlier version of fedclade, which calls this method."""
        return torch.full((len(self.ids),), 7.0)


def new_kind(data: Federation) -> Iterator[Row]:
    """Put a new kind of query to simulated private clients."""
    from fedclade.core import Layout
    from fedclade.training import SimulatedClients

    workers = SimulatedClients(data, make_model(0), "cpu", "loop")
    assert isinstance(workers.layout, Layout)
    ids = list(data.ids)
    for name, privacy in (("client", PRIVATE), ("example", ExamplePrivacy(clip_norm=1.0))):
        private = privatizing(privacy, dict.fromkeys(ids, 60), dict.fromkeys(ids, 0))
        clients = Channel(workers, *client_side(private))
        requests = Requests()
        requests.count("longest input")
        try:
            detail, succeeded = f"answered {clients.ask(LongestInput(ids)).tolist()}", True
        except FedcladeError as error:
            detail, succeeded = refused(error), False
        yield Row(f"new kind, {name} level", succeeded, detail, budget=str(requests))


def own_scaling(data: Federation) -> Iterator[Row]:
    """Run example-level privacy on inputs scaled by each client's own examples."""
    table = torch.arange(120.0).reshape(40, 3).cos(), torch.arange(40) % 2
    clients = federation({"one": (table, table), "two": (table, table)}, standardize="client")
    rounds: list[Mapping[str, Any]] = []
    try:
        simulate(
            "fedavg",
            "mclr",
            clients,
            rounds=1,
            privacy=ExamplePrivacy(clip_norm=1.0),
            progress=False,
            on_round=lambda row, tree: rounds.append(row),
        )
        detail, succeeded = "ran, though one example moves the inputs of all", True
    except FedcladeError as error:
        detail, succeeded = refused(error), False
    used = counted(len(rounds), "round")
    yield Row("own scaling, example level", succeeded, detail, budget=used)


ATTACKS = (own_loss, evaluations, disclosed_scores, sketches, data_of_one, new_kind, own_scaling)


def main() -> int:
    """Run all attacks; return 1 if one of them succeeds."""
    arguments = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    data = load_federation("digits", clients=2, samples_per_client=60, seed=0).alone(0)
    return report((row for attack in ATTACKS for row in attack(data)), arguments.json)


if __name__ == "__main__":
    sys.exit(main())
