"""Read and spoil sums of secure aggregation: attacks that must stay unsuccessful.

- ``clear``: a server that keeps what a client sends in addition to its masked numbers, and compares two clients whose
  data differ in one example, or whose training fails. The attack succeeds if any field but keys, signatures and
  the masked numbers differs, any length does, or one of the two does not reply.
- ``norm``: once, the exact norm of an update was a field. The server reads every number of a reply and looks for the
  norm, the loss and the number of examples of the update. The attack succeeds if it finds one of them.
- ``liar_sum``: one malicious client of 12 sends what it likes under its masks. ``huge`` sends random numbers in place
  of its vector, ``clipped`` an update of norm C against the others', and ``strong`` one that is as long as a sum
  allows and turns the mean as far as it can. With one sum for each cluster the attack succeeds if the accuracy of the
  others falls by more than 10 points and the events of the run do not show it, neither as a rejected sum nor as a
  cluster that is not guarded; with ``secure_parts = 3`` if it falls by so much at all.

It prints for each the accuracy of honest clients without and with the malicious one.

    python benchmarks/attacks/masked_sums.py [--rounds N] [--json FILE]
"""

from __future__ import annotations

# Before torch, whose threads then sleep while they wait.
import fedclade  # noqa: F401  # isort: skip  # pyright: ignore[reportUnusedImport]

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from common import (
    MODEL,
    REST,
    SPEC,
    Requests,
    Row,
    make_model,
    parser,
    report,
    sent_by_clients,
    training,
)
from flwr.app import RecordDict

from fedclade import LocalTraining, Run, load_federation
from fedclade.data import Federation
from fedclade.flower import LocalGrid, LocalNode, Network, client_app, federate, wire
from fedclade.flower.client_handler import ClientHandler
from fedclade.flower.policy import Policy
from fedclade.flower.secure import member
from fedclade.flower.secure.adverts import Advert, told
from fedclade.flower.secure.encoding import bitmap
from fedclade.flower.secure.member import SumState
from fedclade.flower.secure.secrets import MODULUS, TAIL, Contribution, Masked, Numbers
from fedclade.flower.secure.terms import Terms, anchor_of, digest_of, model_of, question_of
from fedclade.flower.signing import Key
from fedclade.flower.wire import Content

CLIENTS = 12
MALICIOUS = 6
FRESH = ("instance", "signature")
"""Fields of a masked reply that are drawn or signed anew each time."""

FALL = 0.10
"""Accuracy that an attack has to cost the others to succeed."""


def masked_reply(
    federation: Federation, model: torch.Tensor, lr: float, requests: Requests
) -> Content | str:
    """Return what client 0 replies to the masked stage of a sum of three; or why it does not.

    The requests to the client are counted in ``requests``.
    """
    asked = training(signs=False, spec=json.dumps({**SPEC, "lr": lr}))
    vectors = {"model": wire.raw_vector(model)}
    question = Content.of(wire.record({"what": "masked", **asked}, vectors))
    terms = Terms(
        instance="sum",
        clients=4,
        colluders=1,
        neighbours=0,
        norm=5.0,
        norm_of_buffers=5.0,
        weight=60,
        training=digest_of(question.values),
        question=question_of(question.values, question.vectors),
        model=model_of(question.vectors),
        anchor=anchor_of(question.vectors),
    )
    with TemporaryDirectory() as name:
        policy = Policy(secure_aggregation=True, trust_server_keys=True)
        client = ClientHandler(federation, make_model, number=0, folder=Path(name), policy=policy)
        key, state = Key.new(), RecordDict()

        def ask(what: str, **values: Any) -> Content:
            requests.count(what)
            sent = vectors if what == "masked" else None
            values = {
                "what": what,
                "layout": asked["layout"],
                "run": "attack",
                "instance": "sum",
                **values,
            }
            return Content.of(client.answer(Content.of(wire.record(values, sent)), state, key))

        try:
            first = ask("keys", client=0, terms=terms.text)
            victim = Advert(
                0,
                masking=first.get("masking", bytes),
                sealing=first.get("sealing", bytes),
                signer=key.public,
                signature=first.get("signature", bytes),
                min_honest=first.get("min_honest", int),
            )
            adverts = [victim, *(colluder(number, terms) for number in range(1, 4))]
            ask("shares", **told(adverts, has_signers=True))
            dealt = bitmap({0, 1, 2, 3}, [0, 1, 2, 3])
            unread = {"ciphertexts": [b"x"] * 3, "promises": [b"x"] * 3}
            return ask("masked", **{**asked, "dealt": dealt, "sources": [1, 2, 3], **unread})
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def colluder(number: int, terms: Terms) -> Advert:
    """Return the keys of a client that is the server's."""
    key = Key.new()
    masking, sealing = (member.public_of(member.new_key()) for _ in range(2))
    advert = Advert(number, masking, sealing, key.public, min_honest=2)
    return advert.signed(terms.context, key)


def without_one(federation: Federation) -> Federation:
    """Return the same client with another example in place of one."""
    client = federation.clients[0]
    train = client.train.copy()
    train[7] = train[0]
    return replace(federation, clients=(replace(client, train=train),))


def shown(reply: Content | str) -> str:
    """Return all of a reply that a server can compare."""
    if isinstance(reply, str):
        return reply
    values = {name: value for name, value in reply.values.items() if name not in FRESH}
    lengths = {name: len(data) for name, data in reply.vectors.items()}
    return f"{sorted(values.items())} {lengths}"


def try_clear(federation: Federation) -> Row:
    """Compare what two clients with other data send in clear, also for models that make training fail."""
    models = {
        "plain": (MODEL, 0.1),
        "huge steps": (MODEL, 1e30),
        "nan": (torch.full_like(MODEL, torch.nan), 0.1),
        "overflow": (torch.full_like(MODEL, 2e38), 0.1),
    }
    requests = Requests()

    def replies_of(client: Federation, requests: Requests) -> dict[str, str]:
        return {
            name: shown(masked_reply(client, model, lr, requests))
            for name, (model, lr) in models.items()
        }

    seen = replies_of(federation, requests)
    others = replies_of(without_one(federation), Requests())
    differing = [name for name in models if seen[name] != others[name] or "Error" in seen[name]]
    found = (
        f"replies differ: {', '.join(differing)}" if differing else "no field and no length differs"
    )
    detail = f"{found}{REST}{len(models)} models; {seen['plain'][:120]}"
    return Row("clear", bool(differing), detail, budget=str(requests))


def try_norm(federation: Federation) -> Row:
    """Look for the norm, the loss and the size of an update among the numbers of a masked reply."""
    requests = Requests()
    reply = masked_reply(federation, MODEL, 1.0, requests)
    if isinstance(reply, str):
        return Row("norm", True, reply, budget=str(requests))
    numbers = {name: value for name, value in reply.values.items() if isinstance(value, float)}
    sizes = [
        name for name, value in reply.values.items() if value == len(federation.clients[0].train)
    ]
    telling = sorted([*numbers, *sizes])
    found = (
        f"numbers in {', '.join(telling)}" if telling else "no field holds a norm, loss or count"
    )
    detail = f"{found}{REST}fields {sorted(reply.values)}"
    return Row("norm", bool(telling), detail, budget=str(requests))


def spoiled(attack: str, honest: Masked, numbers: Numbers, update: torch.Tensor) -> Masked:
    """Return what a malicious client sends in place of its numbers."""
    draw = np.random.default_rng(0)
    if attack == "huge":
        return draw.integers(MODULUS, size=len(honest), dtype=np.uint32)
    against = numbers.encode(Contribution(update=-1e6 * update.double(), examples=10**6))
    if attack == "clipped":
        return against
    # The others' mean has about the direction of its own update, and half the norm C or less.
    signed = (against[:-TAIL].astype(np.int64) + MODULUS // 2) % MODULUS - MODULUS // 2
    against[:-TAIL] = (signed * round(0.8 * numbers.clients) % MODULUS).astype(np.uint32)
    return against


def run_with(attack: str, federation: Federation, parts: int, rounds: int) -> tuple[Run, list[int]]:
    """Run federated averaging with secure aggregation and one malicious client, or none.

    Returns
    -------
    tuple
        The run, and the sender of each false update.
    """
    masking, encode = member.add_masks, Numbers.encode
    last: dict[str, Any] = {}
    senders: list[int] = []

    def note(numbers: Numbers, contribution: Contribution) -> Masked:
        last.update(numbers=numbers, update=contribution.update)
        return encode(numbers, contribution)

    def mask(kept: SumState, numbers: Masked) -> Masked:
        if attack and kept.client == MALICIOUS:
            senders.append(kept.client)
            numbers = spoiled(attack, numbers, last["numbers"], last["update"])
        return masking(kept, numbers)

    app = client_app(
        make_model, lambda context: federation.alone(int(context.node_config["partition-id"]))
    )
    nodes = {100 + client: LocalNode(app, {"partition-id": client}) for client in range(CLIENTS)}
    member.add_masks, Numbers.encode = mask, note  # pyright: ignore[reportAttributeAccessIssue]
    try:
        run = federate(
            LocalGrid(nodes),
            "fedavg",
            make_model,
            local=LocalTraining(epochs=3, batch_size=10, lr=0.1),
            rounds=rounds,
            seed=0,
            evaluate_every=rounds,
            network=Network(
                clients=CLIENTS,
                wait=5.0,
                deadline=60.0,
                secure_aggregation=True,
                secure_norm=3.5,
                secure_parts=parts,
            ),
        )
    finally:
        member.add_masks, Numbers.encode = masking, encode
    return run, senders


def accuracy(run: Run) -> float:
    """Return the mean accuracy of the honest clients."""
    return float(
        np.mean([row["accuracy"] for row in run.client_rows if row["client"] != MALICIOUS])
    )


def try_liar(federation: Federation, attack: str, parts: int, rounds: int, honest: float) -> Row:
    """Let one client lie to its sum; return what that costs the others, and what the run says of it."""
    run, senders = run_with(attack, federation, parts, rounds)
    found = accuracy(run)
    kinds = [event["kind"] for event in run.events]
    events: Mapping[str, int] = {
        kind: kinds.count(kind) for kind in ("sum_rejected", "sum_clipped", "sum_unguarded")
    }
    falls = honest - found > FALL
    is_seen = events["sum_rejected"] + events["sum_unguarded"] > 0
    succeeded = falls and (parts > 1 or not is_seen)
    said = ", ".join(f"{kind} {count}" for kind, count in events.items() if count) or "no event"
    detail = f"accuracy {honest:.3f} honest, {found:.3f} with it; {said}"
    used = sent_by_clients("false update", senders, CLIENTS)
    return Row(f"liar_sum {attack} m={parts}", succeeded, detail, budget=used)


def rows(federation: Federation, rounds: int) -> Iterator[Row]:
    """Run all attacks."""
    alone = federation.alone(0)
    yield try_clear(alone)
    yield try_norm(alone)
    for parts in (1, 3):
        honest = accuracy(run_with("", federation, parts, rounds)[0])
        for attack in ("huge", "clipped", "strong"):
            yield try_liar(federation, attack, parts, rounds, honest)


def main() -> int:
    """Run all attacks; return 1 if one of them succeeds."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=8)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR)
    federation = load_federation("digits", clients=CLIENTS, samples_per_client=60, seed=0)
    return report(rows(federation, arguments.rounds), arguments.json)


if __name__ == "__main__":
    sys.exit(main())
