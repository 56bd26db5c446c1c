"""Use a client's own limits, and the gaps between them, against it: attacks that must stay unsuccessful.

- ``size``: a closed client reports a power of two for its number of examples. The server bisects the largest part,
  number of parts, batch or number of epochs that the client does not refuse. The attack succeeds if these differ
  between clients that report the same.
- ``decay``: weight decay of 1/lr, or a proximal term of that weight, with the last batch of one example. Each step
  takes back those before it, so the update is the gradient of the last example alone, and its weights over its bias are
  the image. With an optimizer that divides gradients by their size, ``eps`` makes steps of SGD of it; pFedMe lets each
  step outweigh those before it by a large λ. The attack succeeds if one of the client's training images is found.
- ``bystanders``: a sum of a client that insists on sums and of honest ones that do not. These answer the same training
  without masks, and their updates are taken off the sum. The attack succeeds if the client takes part.

    python benchmarks/attacks/limits.py [--json FILE]
"""

from __future__ import annotations

# Before torch, whose threads then sleep while they wait.
import fedclade  # noqa: F401  # isort: skip  # pyright: ignore[reportUnusedImport]

import json
import logging
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import (
    MODEL,
    REST,
    AttackedClient,
    Requests,
    Row,
    cosine,
    parser,
    refused,
    report,
    training,
    used_equations,
)
from flwr.app import RecordDict

from fedclade import DifferentialPrivacy, load_federation
from fedclade.channel import Budget
from fedclade.core import FedcladeError
from fedclade.data import Federation
from fedclade.flower import wire
from fedclade.flower.policy import Policy
from fedclade.flower.secure.terms import Terms
from fedclade.flower.signing import Key
from fedclade.flower.wire import Content

SIZES = (64, 81, 127)
"""Numbers of examples that are reported as 64."""

LARGEST = 256
FOUND = 0.999
"""Cosine with a training image from which on it counts as found."""

CLIENTS = 5


def question(spec: Mapping[str, Any], **values: Any) -> Content:
    """Return a question for training."""
    asked = training(what="train", spec=json.dumps(spec), **values)
    return Content.of(wire.record(asked, {"model": wire.raw_vector(MODEL)}))


def plain(**changes: Any) -> dict[str, Any]:
    """Return local training by steps of SGD."""
    return {"epochs": 1, "batch_size": 64, "lr": 0.1, **changes}


PROBES: dict[str, tuple[Policy, Callable[[int], Content]]] = {
    "part size": (Policy(min_part=1), lambda k: question(plain(), replicates=2, part_size=k)),
    "number of parts": (
        Policy(min_part=1, max_replicates=LARGEST),
        lambda k: question(plain(), replicates=k),
    ),
    "parts of all": (Policy(max_replicates=LARGEST), lambda k: question(plain(), replicates=k)),
    "epochs": (Policy(max_steps=400), lambda k: question(plain(epochs=k, batch_size=16))),
    "batches": (
        Policy(max_epochs=5),
        lambda k: question(plain(epochs=None, steps=k, batch_size=16)),
    ),
}
"""Of each probe the client's policy, and a question that it refuses beyond some k."""


def first_examples(federation: Federation, count: int) -> Federation:
    """Return a federation of one client with its first training examples."""
    client = federation.clients[0]
    return replace(federation, clients=(replace(client, train=client.train[:count]),))


def client_of(federation: Federation, folder: Path, kind: str, policy: Policy) -> AttackedClient:
    """Return a client that is closed by a privacy budget, or by insisting on sums."""
    if kind == "budget":
        privacy = DifferentialPrivacy(clip_norm=1.0, noise_multiplier=9.0)
        return AttackedClient(
            federation,
            number=0,
            folder=folder,
            policy=policy,
            privacy=privacy,
            budget=Budget(epsilon=math.inf),
        )
    values = {
        name: getattr(policy, name)
        for name in ("min_part", "max_replicates", "max_steps", "max_epochs")
    }
    secure = Policy(secure_aggregation=True, trust_server_keys=True, **values)
    return AttackedClient(federation, number=0, folder=folder, policy=secure)


def answers(client: AttackedClient, kind: str, content: Content) -> bool:
    """Return whether a client answers a question; one that insists on sums is asked for a model that it keeps."""
    if kind != "budget":
        content = Content({**content.values, "own": True}, content.vectors)
    try:
        client.answer(content)
    except FedcladeError:
        return False
    return True


def largest_answered(is_answered: Callable[[int], bool]) -> int:
    """Return the largest number up to which questions are answered, by bisection."""
    low, high = 0, LARGEST
    while high - low > 1:
        middle = (low + high) // 2
        if is_answered(middle):
            low = middle
        else:
            high = middle
    return low


def sizes() -> Iterator[Row]:
    """Bisect the number of a client's examples."""
    federation = load_federation("digits", clients=1, samples_per_client=200, seed=0).alone(0)
    for kind in ("budget", "sums"):
        for name, (policy, ask) in PROBES.items():
            found: list[int] = []
            used: list[str] = []
            for size in SIZES:
                with tempfile.TemporaryDirectory() as folder:
                    client = client_of(first_examples(federation, size), Path(folder), kind, policy)
                    found.append(largest_answered(lambda k: answers(client, kind, ask(k))))  # noqa: B023
                    used.append(client.used(used_equations))
            differ = len(set(found)) > 1
            limits, examples = (", ".join(map(str, numbers)) for numbers in (found, SIZES))
            detail = f"the limits {'differ' if differ else 'are the same'}{REST}{limits} with {examples} examples"
            yield Row(f"size, {name}, {kind}", differ, detail, budget=used[0])


def decays() -> Iterator[Row]:
    """Read the last example off an update whose steps undo each other."""
    federation = load_federation("digits", clients=1, samples_per_client=60, seed=0).alone(0)
    images = federation.examples(0, "train")[0].flatten(1).double()
    raw = {"lr": 100.0, "batch_size": len(images) - 1}
    adam = {**raw, "optimizer": "adam", "options": {"betas": [0.0, 0.0], "eps": 1e3}}
    rmsprop = {**raw, "optimizer": "rmsprop", "options": {"alpha": 0.0, "eps": 1e3}}
    adagrad = {**raw, "optimizer": "adagrad", "options": {"initial_accumulator_value": 1e6}}
    envelope = {"name": "moreau_envelope", "lam": 5e4, "steps": 1, "lr": 1e-5, "served": "theta"}
    for name, changes in {
        "weight decay": {"weight_decay": 10.0},
        "proximal term": {"mu": 10.0},
        "weight decay, last batch of one": {"weight_decay": 10.0, "batch_size": len(images) - 1},
        "weight decay, Adam": {**adam, "weight_decay": 10.0},
        "proximal term, Adam": {**adam, "mu": 10.0},
        "weight decay, RMSprop": {**rmsprop, "weight_decay": 10.0},
        "weight decay, Adagrad": {**adagrad, "weight_decay": 10.0},
        "pFedMe": {"epochs": None, "steps": 10, "lr": 31 / 5e4},
    }.items():
        client = AttackedClient(federation, number=0)
        rule = {"rule": json.dumps(envelope)} if name == "pFedMe" else {}
        try:
            reply = Content.of(
                client.answer(question(plain(**{"batch_size": 1, **changes}), **rule))
            )
        except FedcladeError as error:
            yield Row(f"decay, {name}", False, refused(error), budget=client.used())
            continue
        update = torch.frombuffer(bytearray(reply.vector("update")), dtype=torch.float32).double()
        start = MODEL.double() if "weight_decay" in changes else torch.zeros_like(update)
        gradient = update + start  # but for the factor -lr
        weights, bias = gradient[:640].view(10, 64), gradient[640:650]
        image = weights[int(bias.abs().argmax())] / bias[int(bias.abs().argmax())]
        nearest = max(cosine(image, each) for each in images)
        detail = f"cosine with a training image {nearest:.4f}, 1 update"
        yield Row(f"decay, {name}", nearest >= FOUND, detail, budget=client.used())


def bystanders() -> Iterator[Row]:
    """Put one client that insists on sums together with others that do not."""
    from fedclade.flower.secure import member
    from fedclade.flower.secure.adverts import Advert, told

    policies = [
        Policy(secure_aggregation=True, trust_server_keys=True),
        *[Policy()] * (CLIENTS - 1),
    ]
    clients = [member.Member(policy) for policy in policies]
    keys, states = [Key.new() for _ in clients], [RecordDict() for _ in clients]
    terms = Terms(
        instance="sum",
        clients=CLIENTS,
        colluders=1,
        neighbours=0,
        norm=5.0,
        norm_of_buffers=5.0,
        weight=60,
        training="t",
        question="q",
        model="m",
        anchor="",
    )
    adverts: list[Advert] = []
    requests = Requests()  # to the first client
    for number, (client, key, state) in enumerate(zip(clients, keys, states, strict=True)):
        content = Content.of(
            wire.record({"client": number, "instance": "sum", "terms": terms.text})
        )
        if number == 0:
            requests.count("keys")
        shown = Content.of(client.keys(content, state, key)).values
        public = shown["masking"], shown["sealing"], key.public, shown["signature"]
        given = {"min_honest": shown["min_honest"]} if "min_honest" in shown else {}
        adverts.append(Advert(number, *public, **given))
    listing = Content.of(
        wire.record({"what": "shares", "instance": "sum", **told(adverts, has_signers=True)})
    )
    requests.count("shares")
    try:
        clients[0].shares(listing, states[0], keys[0])
        detail = f"takes part with {CLIENTS - 1} others that answer without masks, too"
        succeeded = True
    except FedcladeError as error:
        detail, succeeded = refused(error), False
    yield Row("bystanders", succeeded, detail, budget=str(requests))


ATTACKS = (sizes, decays, bystanders)


def main() -> int:
    """Run all attacks; return 1 if one of them succeeds."""
    arguments = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    return report((row for attack in ATTACKS for row in attack()), arguments.json)


if __name__ == "__main__":
    sys.exit(main())
