"""Steer clusters by false statements: an attack by a client, or by twelve that join at once, on each method.

Twelve honest clients hold 60 digits each, of two distributions that differ in a swap of labels, and run on an
in-process grid for twelve rounds. Client 6 may be an adversary: ``fedclade.Adversary`` says what its lies are. Flipped
updates are three times as long as its honest ones. ``sybils`` are twelve more clients that join in round 3 and send
such updates. Each attack is run against open methods, with every defence against false statements off, and as they are.
The numbers are the change of the honest clients' mean accuracy, in points, beside a run in which all are honest. An
attack succeeds if the honest clients lose more than ten points with the defences on.

    python benchmarks/attacks/lies.py [METHOD ...] [--defended] [--json FILE]

With ``--defended`` it leaves the runs without defences out, which halves the time.
"""

from __future__ import annotations

# Before torch, whose threads then sleep while they wait.
import fedclade  # noqa: F401  # isort: skip  # pyright: ignore[reportUnusedImport]

import logging
import math
import sys
import warnings
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from common import Row, parser, report, sent_by_clients
from flwr.app import Context, Message

from fedclade import (
    CFL,
    FLUX,
    IFCA,
    PACFL,
    Adversary,
    Aggregation,
    FlexCFL,
    LocalTraining,
    ReplicatedCFL,
    Run,
    load_federation,
)
from fedclade.algorithms import Algorithm, FedAvg, FedDrift, flux
from fedclade.channel import lying, matching_parts
from fedclade.core import Evaluation
from fedclade.flower import LocalGrid, LocalNode, Network, client_app, federate

CLIENTS, SYBILS, ADVERSARY = 12, 12, 6
ROUNDS, JOIN_AFTER = 12, 2
FLIPPED: dict[str, Any] = {"kind": "scaled", "factor": -3.0}
INVERTED_FROM = 100.0
"""Nats from which inverted losses are taken off."""

LOST = 10.0
"""Points of accuracy that an attack must cost to succeed."""

DATA = load_federation(
    "digits", clients=CLIENTS, samples_per_client=60, shift="label_swap", clusters=2
)
NODE_CONFIG = {"allow": "train evaluate statistics gradients subspaces shifts descriptors"}


@dataclass(frozen=True)
class Attack:
    """An attack on a method."""

    method: str
    name: str
    adversary: Adversary
    joins: bool = False  # as twelve new clients
    inverts: bool = False  # whether false losses are small where the true ones are large


ATTACKS = (
    Attack("ifca", "flipped updates", Adversary(**FLIPPED)),
    Attack("ifca", "losses", Adversary(lies="losses")),
    Attack("ifca", "losses, flipped updates", Adversary(**FLIPPED, lies="losses")),
    Attack(
        "ifca",
        "inverted losses, flipped updates",
        Adversary(**FLIPPED, lies="losses"),
        inverts=True,
    ),
    Attack("feddrift", "losses, flipped updates", Adversary(**FLIPPED, lies="losses")),
    Attack("pacfl", "subspaces", Adversary(lies="subspaces")),
    Attack("pacfl", "subspaces, flipped updates", Adversary(**FLIPPED, lies="subspaces")),
    Attack("flux", "descriptors", Adversary(lies="descriptors")),
    Attack("flux", "descriptors, flipped updates", Adversary(**FLIPPED, lies="descriptors")),
    Attack("flexcfl", "shifts, flipped updates", Adversary(**FLIPPED, lies="shifts")),
    Attack("rcfl", "signatures, flipped updates", Adversary(**FLIPPED, lies="signatures")),
    *(
        Attack(method, "sybils", Adversary(**FLIPPED), joins=True)
        for method in ("fedavg", "ifca", "pacfl", "flux", "cfl", "rcfl")
    ),
)


def algorithm_of(method: str, *, defended: bool) -> Algorithm:
    """Return a method, with the defences that are its own on or off."""
    methods: Mapping[str, Any] = {
        "fedavg": FedAvg,
        "cfl": lambda: CFL(split_rounds=(5,), eps2=1e-6),
        "rcfl": ReplicatedCFL,
        "ifca": lambda: IFCA(clusters=2, restarts=4),
        "feddrift": lambda: FedDrift(step_rounds=2, delta=0.1),
        "flexcfl": lambda: FlexCFL(groups=2),
        "flux": FLUX,
        "pacfl": lambda: PACFL(distance="per_label", set_apart=None if defended else 0.0),
    }
    return methods[method]()


@contextmanager
def undefended() -> Generator[None]:
    """Switch off the defences that have no setting, as they cost honest clients nothing."""
    far, rounding = flux.FAR, matching_parts.ROUNDING
    flux.FAR = matching_parts.ROUNDING = math.inf
    try:
        yield
    finally:
        flux.FAR, matching_parts.ROUNDING = far, rounding


@contextmanager
def claims_of(attack: Attack | None) -> Generator[None]:
    """Let an adversary invert its losses, if the attack says so.

    Adversaries of the library swap their losses for those of other models. Inverted ones favour that set of models,
    among those that ``ifca`` starts with, which the adversary has spoiled.
    """
    swapped = lying.reversed_claims
    if attack is not None and attack.inverts:
        lying.reversed_claims = inverted_claims
    try:
        yield
    finally:
        lying.reversed_claims = swapped


def inverted_claims(found: Evaluation, adversaries: Collection[int]) -> Evaluation:
    """Return scores in which adversaries report a constant minus each of their losses."""
    is_false = torch.tensor([client in adversaries for client in found.ids])
    return replace(found, losses=torch.where(is_false, INVERTED_FROM - found.losses, found.losses))


def run(method: str, attack: Attack | None, *, defended: bool = True) -> tuple[Run, str]:
    """Run a method over the grid, with an attack on it if there is one.

    Returns
    -------
    tuple
        The run, and what the attack has used up.
    """
    honest = client_app("mclr", data_of, device="cpu")
    adversary = None if attack is None else attack.adversary
    malicious = client_app("mclr", data_of, device="cpu", adversary=adversary)
    senders: list[int] = []

    def attacking(message: Message, context: Context) -> Message:
        senders.append(context.node_id)
        return malicious(message, context)

    joins = attack is not None and attack.joins
    nodes: dict[int, LocalNode] = {}
    for client in range(CLIENTS):
        is_adversary = attack is not None and not joins and client == ADVERSARY
        app = attacking if is_adversary else honest
        nodes[100 + client] = LocalNode(
            app, {"data": client, "partition-id": client, **NODE_CONFIG}
        )
    grid = LocalGrid(nodes)

    def after(row: Mapping[str, Any], tree: object) -> None:
        if joins and row["round"] == JOIN_AFTER:
            for k in range(SYBILS):
                grid.nodes[500 + k] = LocalNode(
                    attacking, {"data": k, "partition-id": 1000 + k, **NODE_CONFIG}
                )

    with claims_of(attack):
        result = federate(
            grid,
            algorithm_of(method, defended=defended),
            "mclr",
            network=Network(
                clients=CLIENTS,
                wait=10.0,
                deadline=60.0,
                newcomers=Network.newcomers if defended else math.inf,
            ),
            aggregate=Aggregation(leave_out_opposed="auto" if defended else False),
            local=LocalTraining(epochs=3, batch_size=10, lr=0.1),
            rounds=ROUNDS,
            seed=0,
            evaluate_every=ROUNDS,
            on_round=after,
        )
    return result, sent_by_clients("message", senders, len(grid.nodes))


def data_of(context: Any) -> Any:
    """Return the data of a node."""
    return DATA.alone(int(context.node_config["data"]))


def accuracy(found: Run, *, without: bool) -> float:
    """Return the mean accuracy of the first twelve clients in percent, ``without`` the one that may be an adversary."""
    left_out = {ADVERSARY} if without else set[int]()
    scores = [row["accuracy"] for row in found.client_rows if row["client"] < CLIENTS]
    clients = [row["client"] for row in found.client_rows if row["client"] < CLIENTS]
    honest = [
        score for client, score in zip(clients, scores, strict=True) if client not in left_out
    ]
    return 100 * sum(honest) / len(honest)


def rows(methods: Sequence[str], *, only_defended: bool) -> Iterator[Row]:
    """Run the attacks on some methods, or on all if none is given."""
    honest: dict[str, Run] = {}
    for attack in ATTACKS:
        if methods and attack.method not in methods:
            continue
        if attack.method not in honest:
            honest[attack.method], _ = run(attack.method, None)
        usual = accuracy(honest[attack.method], without=not attack.joins)
        attacked, used = run(attack.method, attack)
        after = accuracy(attacked, without=not attack.joins) - usual
        detail = f"{after:+.1f} points with the defences"
        if not only_defended:
            with undefended():
                open_run, _ = run(attack.method, attack, defended=False)
            before = accuracy(open_run, without=not attack.joins) - usual
            detail += f", {before:+.1f} without them"
        detail = f"{detail}; honest {usual:.1f} %"
        yield Row(f"{attack.method}: {attack.name}", after < -LOST, detail, budget=used)


def main() -> int:
    """Run the attacks; return 1 if one of them succeeds."""
    options = parser(__doc__)
    options.add_argument("methods", nargs="*", help="only these")
    options.add_argument(
        "--defended", action="store_true", help="leave the runs without defences out"
    )
    arguments = options.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    return report(rows(arguments.methods, only_defended=arguments.defended), arguments.json)


if __name__ == "__main__":
    sys.exit(main())
