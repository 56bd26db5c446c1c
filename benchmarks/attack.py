"""Measure how much accuracy one malicious client costs the honest clients, over Flower's messages.

Each client is an app on a ``LocalGrid``, so every message is serialised as in a network. The server
has the default limits (``network.largest_weight``, ``network.largest_norm``), or no limits with
``--open``. The data are scikit-learn's digits; in each of two groups of clients, another pair of
labels is swapped. The malicious client has the data of one group and trains on it, but sends a
false reply:

- ``size``: it claims 10⁹ examples, and sends its update with the sign flipped;
- ``scale``: it sends 1,000 times its update;
- ``norm``: it sends an update of norm 10¹⁷;
- ``forge``: it replies in the name of another client, with the sign of the update flipped, before
  the other client can reply;
- ``garble``: its reply has values of wrong types and half of an update;
- ``bloat``: its reply has the update repeated 200 times.

With ``--sizes`` no client is malicious, and the clients' numbers of examples follow a power law.
This measures what the limit on weights costs.

    python benchmarks/attack.py
    python benchmarks/attack.py --open --methods cfl ifca --seeds 1
    python benchmarks/attack.py --sizes
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from fedclade import LocalTraining, load_federation
from fedclade.algorithms import CFL, FLHC, IFCA, Algorithm, ReplicatedCFL
from fedclade.data.federation import Federation
from fedclade.flower import LocalGrid, LocalNode, Network, federate, wire
from fedclade.flower.client_app import app_for
from fedclade.flower.client_handler import ClientHandler
from fedclade.flower.wire import Content

SAMPLES = 50
"""Number of examples of a client."""

LIAR, VICTIM, NODE = 6, 4, 100
MODEL = "mclr"
MANY = 10**9
WITHIN = 2.0
"""Percentage points of accuracy that honest clients may lose."""

METHODS: Mapping[str, Algorithm] = {
    "cfl": CFL(eps1=0.3, eps2=0.3),
    "rcfl": ReplicatedCFL(),
    "fl_hc": FLHC(rounds_before=3, metric="cosine", linkage="average"),
    "ifca": IFCA(clusters=2, restarts=4),
}


def flipped(update: np.ndarray) -> np.ndarray:
    return -update


def thousandfold(update: np.ndarray) -> np.ndarray:
    return 1000 * update


def huge(update: np.ndarray) -> np.ndarray:
    return update * np.float32(1e17 / max(float(np.linalg.norm(update)), 1e-9))


@dataclass(frozen=True)
class Lie:
    """Changes that a malicious client makes to its honest replies.

    Parameters
    ----------
    change
        Change of the update.
    words
        False values that replace values of the reply.
    forges
        Whether the client sends the false reply in the name of :data:`VICTIM`, and replies honestly
        in its own name.
    """

    change: Callable[[np.ndarray], np.ndarray]
    words: Mapping[str, Any] = field(default_factory=dict[str, Any])
    forges: bool = False


def halved(update: np.ndarray) -> np.ndarray:
    return update[: len(update) // 2]


def repeated(update: np.ndarray) -> np.ndarray:
    return np.tile(update, 200)


LIES: Mapping[str, Lie] = {
    "size": Lie(flipped, {"size": MANY}),
    "scale": Lie(thousandfold),
    "norm": Lie(huge),
    "forge": Lie(flipped, forges=True),
    "garble": Lie(halved, {"loss": "many", "encoding": b"\xff", "accuracies": "all"}),
    "bloat": Lie(repeated),
}


class Liar(ClientHandler):
    """Client that sends false replies, signed with its own key."""

    lie = Lie(flipped)

    def answer(self, content: Content, state: RecordDict | None = None) -> RecordDict:
        """Compute the reply of an honest client, and change it as ``lie`` states."""
        answer = super().answer(content, state)
        words, sent = (
            dict(Content.of(answer).values),
            dict(answer.array_records.get("vectors", {})),
        )
        words |= {name: value for name, value in self.lie.words.items() if name in words}
        if "update" in sent:
            update = self.lie.change(np.frombuffer(sent["update"].data, dtype="<f4"))
            sent["update"] = wire.raw(update.astype("<f4").tobytes(), "float32", len(update))
        records = {
            "fedclade": wire.record(words)["fedclade"],
            **({"vectors": ArrayRecord(sent)} if sent else {}),
        }
        return RecordDict(records)


def forging(app: ClientApp) -> Callable[[Message, Context], Message]:
    """Return the victim's app, in whose name the malicious client replies to training requests.

    The malicious client signs these replies with its own key.
    """
    kept = RecordDict()

    def answer(message: Message, context: Context) -> Message:
        if message.metadata.message_type != MessageType.TRAIN:
            return app(message, context)
        return app(
            message, Context(context.run_id, context.node_id, {"partition-id": LIAR}, kept, {})
        )

    return answer


def accuracy(
    method: str,
    federation: Federation,
    rounds: int,
    seed: int,
    lie: Lie | None,
    present: bool,
    network: Network,
) -> float:
    """Return the mean accuracy of the honest clients after the last round, in percent.

    Parameters
    ----------
    method
        Name of the method.
    federation
        Data of all clients.
    rounds, seed
        Number of rounds and seed of the run.
    lie
        Behaviour of the malicious client; None if it is honest.
    present
        Whether the malicious client takes part.
    network
        Settings of the network.
    """

    def client(context: Context, _agreed: object) -> ClientHandler:
        number = int(context.node_config["partition-id"])
        lies = (
            lie is not None
            and number == LIAR
            and (not lie.forges or context.node_id == NODE + VICTIM)
        )
        made = (Liar if lies else ClientHandler)(federation.alone(number), MODEL, number=number)
        if isinstance(made, Liar) and lie is not None:
            made.lie = lie
        return made

    app, there = app_for(client), [number for number in federation.ids if present or number != LIAR]
    nodes = {NODE + number: LocalNode(app, {"partition-id": number}) for number in there}
    if lie is not None and lie.forges:
        nodes[NODE + VICTIM].app = forging(app)
    run = federate(
        LocalGrid(nodes),
        METHODS[method],
        MODEL,
        network=replace(network, clients=len(nodes)),
        local=LocalTraining(epochs=3, batch_size=10, lr=0.1),
        rounds=rounds,
        seed=seed,
        evaluate_every=rounds,
    )
    return 100 * mean(row["accuracy"] for row in run.client_rows if row["client"] != LIAR)


def main() -> int:
    """Print a row for each method; return 1 if honest clients lose more than ``WITHIN`` points."""
    arguments = parse()
    logging.getLogger("fedclade").setLevel(logging.ERROR)
    limits = {"largest_weight": math.inf, "largest_norm": math.inf} if arguments.open else {}
    limits |= (
        {} if arguments.largest_weight is None else {"largest_weight": arguments.largest_weight}
    )
    if arguments.sizes:
        return compare_sizes(
            arguments.methods, arguments.clients, arguments.rounds, arguments.seeds
        )
    network, lies = Network(**limits), {name: LIES[name] for name in arguments.lies}
    print(
        f"honest clients' accuracy in %, mean of {arguments.seeds} seeds; limits {'off' if arguments.open else 'on'}"
    )
    print(
        f"{'':8}{'without attacker':>18}{'all honest':>14}" + "".join(f"{name:>9}" for name in lies)
    )
    lost = 0.0
    for method in arguments.methods:
        columns: list[list[float]] = []
        for seed in range(arguments.seeds):
            federation = load_federation(
                "digits",
                clients=arguments.clients,
                samples_per_client=SAMPLES,
                shift="label_swap",
                clusters=2,
                seed=seed,
            )
            cases: list[tuple[Lie | None, bool]] = [
                (None, False),
                (None, True),
                *((lie, True) for lie in lies.values()),
            ]
            columns.append(
                [
                    accuracy(method, federation, arguments.rounds, seed, lie, there, network)
                    for lie, there in cases
                ]
            )
        without, honest, *lied_to = (mean(column) for column in zip(*columns, strict=True))
        print(
            f"{method:8}{without:18.1f}{honest:14.1f}"
            + "".join(f"{each:9.1f}" for each in lied_to),
            flush=True,
        )
        lost = max(lost, *(without - each for each in lied_to))
    print(f"at most {lost:.1f} points lost")
    return int(lost > WITHIN)


def compare_sizes(methods: Sequence[str], clients: int, rounds: int, seeds: int) -> int:
    """Print the accuracy of honest clients of different sizes, with and without the limits."""
    print(f"accuracy in %, mean of {seeds} seeds; sizes of clients from a power law, all honest")
    print(f"{'':8}{'limits off':>12}{'limits on':>12}")
    networks = Network(largest_weight=math.inf, largest_norm=math.inf), Network()
    lost = 0.0
    for method in methods:
        rows: list[list[float]] = []
        for seed in range(seeds):
            federation = load_federation(
                "digits",
                partition="quantity_skew",
                clients=clients,
                shift="label_swap",
                clusters=2,
                seed=seed,
            )
            rows.append(
                [
                    accuracy(method, federation, rounds, seed, None, True, network)
                    for network in networks
                ]
            )
        apart, shut = (mean(column) for column in zip(*rows, strict=True))
        print(f"{method:8}{apart:12.1f}{shut:12.1f}", flush=True)
        lost = max(lost, apart - shut)
    print(f"at most {lost:.1f} points lost")
    return int(lost > WITHIN)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=tuple(METHODS),
        default=tuple(METHODS),
        help="methods to run (default: all)",
    )
    parser.add_argument(
        "--lies",
        nargs="+",
        choices=tuple(LIES),
        default=tuple(LIES),
        help="false replies to try (default: all)",
    )
    parser.add_argument(
        "--largest-weight", type=float, help="value of network.largest_weight, if not the default"
    )
    parser.add_argument(
        "--clients", type=int, default=28, help="clients, in two equal groups (default: 28)"
    )
    parser.add_argument("--rounds", type=int, default=20, help="rounds of a run (default: 20)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument("--open", action="store_true", help="run without the limits")
    parser.add_argument(
        "--sizes",
        action="store_true",
        help="measure what the limit on weights costs if all clients are honest",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
