"""A ServerApp that attacks its clients: the app of ``over_tls.py``, which says what it tries.

The clients are those of the project, as their node configs and the run config make them. The ServerApp has the key of
one more client, which colludes with it. It writes its rows to ``network.out`` of the run config.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    DIGITS,
    LAYOUT,
    MODEL,
    REST,
    SIMILAR,
    Requests,
    Row,
    cosine,
    refused,
    training,
    update_of,
    used_epsilon,
    vector_of,
    write_rows,
)
from flwr.app import Context, RecordDict
from flwr.serverapp import Grid, ServerApp
from lying_server import LyingServer, View, views_of_neighbourhoods

from fedclade.channel import Budget, Meter
from fedclade.core.updates import DROPPED_OUT, TOO_LATE
from fedclade.data import Federation
from fedclade.flower import client_app_from_config, wire
from fedclade.flower.exchange import UNREACHED, Exchange
from fedclade.flower.from_config import RunConfig
from fedclade.flower.signing import Key, key_of
from fedclade.flower.wire import Content

NEAR, HELPERS = (1, 2), (3, 4, 5, 6)
"""Clients whom the server shows a longer list than the victim, and those whom it shows a list without the victim.

With fewer helpers, there would be too few shares of the neighbours' keys, even if no client checked anything.
"""

HONEST = 1 + len(NEAR) + len(HELPERS)
"""Number of honest clients of a sum. The first is the victim."""

COLLUDER = HONEST
"""Number of the client that colludes with the server. It has a key and no SuperNode."""

PRIVATE = HONEST
"""Number of the client with a privacy budget, which takes part in no sum."""

DEADLINE = 600.0
"""Seconds for a reply, on a busy machine."""

LARGEST = 10**7
"""Bytes of the vectors of a reply."""

STEP = 0.05
"""Distance of two models whose losses give one entry of an update."""

ENTRIES = 16
"""Number of entries that are read in this way."""

BUDGET = Budget(epsilon=0.5)
"""Privacy budget of the private client."""

REQUESTS_TO_PRIVATE = ("usual", "overlong update", "diverging", "NaN")

client = client_app_from_config()


class Network:
    """The SuperNodes by their clients' numbers, and requests to them."""

    def __init__(self, grid: Grid, config: RunConfig) -> None:
        self._exchange = Exchange(grid, Meter(), DEADLINE)
        self.data: Federation = config.config.federation()
        greeting = wire.record({"what": "hello", "run": "attack"})
        greetings = self._exchange.ask(dict.fromkeys(grid.get_node_ids(), greeting), "train", "0")
        introduced = {node: reply for node, reply in greetings if isinstance(reply, Content)}
        self.nodes = {reply.get("number", int): node for node, reply in introduced.items()}
        signers = {number: introduced[node].signer for number, node in self.nodes.items()}
        self.keys = {number: signer.key for number, signer in signers.items() if signer is not None}
        self.queries: defaultdict[int, Requests] = defaultdict(Requests)
        """Queries to each client since the last attack has begun."""

    def ask(self, contents: Mapping[int, RecordDict]) -> dict[int, Content | str]:
        """Send requests to clients by their numbers; return the replies, or why a client refuses.

        Raises
        ------
        TimeoutError
            If a client does not reply at all: that is no refusal, and says nothing on an attack.
        """
        numbers = {self.nodes[number]: number for number in contents}
        sent = {self.nodes[number]: content for number, content in contents.items()}
        replies: dict[int, Content | str] = {}
        for node, reply in self._exchange.ask(sent, "train", "0", LARGEST):
            if isinstance(reply, str) and reply.startswith(
                (TOO_LATE, DROPPED_OUT, UNREACHED, "error ")
            ):
                raise TimeoutError(f"client {numbers[node]}: {reply}")
            replies[numbers[node]] = reply
        return replies

    def query(
        self, number: int, kind: str, models: Mapping[str, torch.Tensor], **values: Any
    ) -> Content | str:
        """Send one query with models to one client."""
        self.queries[number].count(kind)
        vectors = {name: wire.raw_vector(model) for name, model in models.items()}
        return self.ask({number: wire.record(training(what=kind, **values), vectors)})[number]

    def truth(self, number: int, **values: Any) -> np.ndarray:
        """Return the update of a client, by a copy of it without protection."""
        return update_of(self.data.alone(number), MODEL, **values)


class ServerOfNetwork(LyingServer):
    """A lying server of SuperNodes."""

    def __init__(self, network: Network, colluder: Key, *, claimed: int) -> None:
        self._network = network
        keys = {number: network.keys[number] for number in range(HONEST)}
        super().__init__(keys, {COLLUDER: colluder}, training(signs=False), MODEL, claimed=claimed)

    def deliver(
        self, kind: str, requests: Mapping[int, Mapping[str, Any]]
    ) -> dict[int, Content | str]:
        """Ask all clients at once."""
        vectors = self.vectors if kind == "masked" else None
        return self._network.ask(
            {number: wire.record(values, vectors) for number, values in requests.items()}
        )


def read_update(network: Network, colluder: Key) -> Iterator[Row]:
    """Try to read the update of client 0: without a sum, from a sum of its own, and by views that do not fit."""
    network.queries.clear()
    reply = network.query(0, "train", {"model": MODEL})
    used = str(network.queries[0])
    if isinstance(reply, str):
        yield Row("update alone", False, refused(reply), budget=used)
    else:
        found = cosine(vector_of(reply, "update"), network.truth(0))
        detail = f"cosine with the update {found:.4f}"
        yield Row("update alone", found > SIMILAR, detail, budget=used)
    for claimed, variant in enumerate(("uncounted colluder", "counted colluder")):
        server = ServerOfNetwork(network, colluder, claimed=claimed)
        server.seed += 10 * claimed  # each sum is about a question of its own
        server.begin()
        server.play({0: View.honest((0, COLLUDER))})
        yield row_of_sum(f"sum of one, {variant}", network, server)
    server = ServerOfNetwork(network, colluder, claimed=1)
    server.seed += 20
    server.begin()
    server.play(views_of_neighbourhoods(NEAR, HELPERS, (COLLUDER,)))
    yield row_of_sum("neighbourhoods", network, server)


def row_of_sum(attack: str, network: Network, server: LyingServer) -> Row:
    """Return the row of an attack on a sum; it succeeds if the update of client 0 is opened."""
    opened = server.open_update(0, parameters=LAYOUT.n_parameters)
    if opened is None:
        return Row(attack, False, f"not opened{server.why_stopped()}", budget=server.used())
    found = cosine(opened, network.truth(0, seed=server.seed))
    detail = f"cosine with the update {found:.4f}"
    return Row(attack, found > SIMILAR, detail, budget=server.used())


def ask_for_losses(network: Network) -> Iterator[Row]:
    """Ask client 0, which insists on sums, for scores and losses of models that are made to read its update."""
    drawn = np.random.default_rng(0).choice(LAYOUT.n_parameters, ENTRIES, replace=False)
    places = [int(place) for place in drawn]
    shifts = [sign * STEP * torch.eye(LAYOUT.size)[place] for place in places for sign in (1, -1)]
    models = {str(k): MODEL + shift for k, shift in enumerate(shifts)}
    for split in ("train", "test"):
        attack = f"evaluate, on {split} data"
        network.queries.clear()
        reply = network.query(0, "evaluate", models, split=split, compares=False)
        used = str(network.queries[0])
        if isinstance(reply, str):
            yield Row(attack, False, refused(reply), budget=used)
        elif "losses" not in reply.values:
            scores = reply.values["scores"]
            exact = any(round(score, DIGITS) != score for score in scores)
            detail = f"{len(scores)} scores without losses, {'exact' if exact else 'rounded'}"
            yield Row(attack, exact, detail, budget=used)
        else:
            losses = np.array(reply.values["losses"])
            found = cosine(losses[1::2] - losses[::2], network.truth(0)[places])
            detail = f"{len(losses)} losses, cosine of {ENTRIES} entries of the update {found:.4f}"
            yield Row(attack, True, detail, budget=used)
    network.queries.clear()
    reply = network.query(0, "train", {"model": MODEL}, own=True)
    used = str(network.queries[0])
    if isinstance(reply, str):
        yield Row("own loss", False, refused(reply), budget=used)
    else:
        succeeded = "loss" in reply.values
        detail = "its exact training loss" if succeeded else "answered without loss"
        yield Row("own loss", succeeded, detail, budget=used)


def read_refusals(network: Network, folder: Path) -> Iterator[Row]:
    """Ask the private client to train in ways that once ended in refusals with the norm of its update.

    Replies are compared with one another: all of them are to be answers, with the same fields and
    lengths. The budget of each row is the sum of all requests so far. The folder of the client with
    its ledger is in ``folder``.
    """
    huge = torch.full_like(MODEL, 1e38)
    nan = torch.full_like(MODEL, torch.nan)
    requests = dict(
        zip(
            REQUESTS_TO_PRIVATE, ((MODEL, 0.1), (MODEL, 1e25), (huge, 0.1), (nan, 0.1)), strict=True
        )
    )
    client_folder = folder / f"node-{PRIVATE}"
    usual = ""
    for place, (name, (model, lr)) in enumerate(requests.items()):
        spec = json.dumps({"epochs": 1, "batch_size": 60, "lr": lr})
        reply = network.query(PRIVATE, "train", {"model": model}, spec=spec, round=place + 1)
        seen = shown(reply)
        usual = usual or seen
        differs, has_loss = seen != usual, isinstance(reply, Content) and "loss" in reply.values
        succeeded = differs or has_loss or isinstance(reply, str)
        detail = "differs from the usual answer" if differs else "as the usual answer"
        detail += ", with the loss" if has_loss else ""
        detail += f"{REST}{seen[:110]}"
        used = str(network.queries[PRIVATE])
        if (client_folder / "privacy.json").exists():
            used += f", {used_epsilon(client_folder, BUDGET)}"
        yield Row(f"refusals, {name}", succeeded, detail, budget=used)


def shown(reply: Content | str) -> str:
    """Return all that a server sees of a reply but noisy numbers, and what repeats the request."""
    if isinstance(reply, str):
        return f"refused: {reply}"
    values = {
        name: value
        for name, value in sorted(reply.values.items())
        if name not in ("round", "model")
    }
    return f"{values} { ({name: len(data) for name, data in reply.vectors.items()}) }"


def attack_sums(grid: Grid, context: Context) -> list[Row]:
    """Attack clients that insist on sums."""
    network = Network(grid, RunConfig.read(context.run_config))
    colluder = colluder_of(folder_of(context))
    return [*read_update(network, colluder), *ask_for_losses(network)]


def attack_privacy(grid: Grid, context: Context) -> list[Row]:
    """Attack the client with a privacy budget."""
    network = Network(grid, RunConfig.read(context.run_config))
    return list(read_refusals(network, folder_of(context)))


def folder_of(context: Context) -> Path:
    """Return the folder of the attack, which has the results and the folders of the clients."""
    return Path(str(context.run_config["network.out"])).parent


def colluder_of(folder: Path) -> Key:
    """Return the key of the colluding client, which lies in a folder beside the results; make it if it is missing."""
    node_config: dict[str, Any] = {"folder": str(folder / "colluder")}
    return key_of(
        Context(run_id=0, node_id=0, node_config=node_config, state=RecordDict(), run_config={})
    )


server_of_sums = ServerApp()
server_of_privacy = ServerApp()


@server_of_sums.main()
def main_of_sums(grid: Grid, context: Context) -> None:
    """Attack, and write the rows."""
    write_rows(attack_sums(grid, context), Path(str(context.run_config["network.out"])))


@server_of_privacy.main()
def main_of_privacy(grid: Grid, context: Context) -> None:
    """Attack, and write the rows."""
    write_rows(attack_privacy(grid, context), Path(str(context.run_config["network.out"])))
