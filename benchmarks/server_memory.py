"""Measure memory and CPU time of a networked server, and memory of a networked client.

The server's clients are scripted, as in ``federation.py``: they reply at once with an update of
their true cluster plus noise. Memory is the peak of the process during a run, minus its memory
before, in multiples of all updates (clients × entries of a model × 4 bytes). It includes pages of
files that are mapped into memory, which the system can drop. CPU time is the time
per round without the clients' own code, also as a multiple of the time of Flower's FedAvg on the
same kind of grid, with replies of the same size. Both train and evaluate all clients in each round.
By default the grid is a ``LocalGrid``, which converts each message to bytes and back, so the figures
contain what is done on both sides of the network. With ``--superlink``, it is Flower's ``HttpGrid``
for a SuperLink that runs with its nodes in another process, so the figures contain what a server
does in a network.

The client is real, and trains a large MLP on a few examples. Its memory is the peak of the process
while it replies, with the received message, minus the memory before the client was built, in
multiples of its model. A server in another process has recorded the messages before.

Each case runs in a separate process, which has loaded the libraries by a short run before.

    python benchmarks/server_memory.py
    python benchmarks/server_memory.py --clients 200 --hidden 126     # 100,000 parameters
    python benchmarks/server_memory.py --only "fedavg, stores all" "client, float32"
    python benchmarks/server_memory.py --superlink
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
import json
import logging
import multiprocessing
import platform
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import federation
import numpy as np
import torch
from federation import CLUSTERS, SCHEMA, ScriptedClients, TimedGrid, status
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from scripted_superlink import App, scripted_superlink

from fedclade import CFL, Federation, Signature, one_client
from fedclade import FedAvg as OurFedAvg
from fedclade.algorithms import Algorithm
from fedclade.core.local import LocalTraining
from fedclade.flower import LocalNode, Network, client_app, federate
from fedclade.flower.local_grid import LocalGrid
from fedclade.flower.wire import Content
from fedclade.models import build_model
from fedclade.runs.settings import Stream

CLIENTS, HIDDEN, ROUNDS = 60, 629, 5
CLIENT_HIDDEN, CLIENT_EXAMPLES = 6290, 30
"""Hidden units of the client's MLP, which has 5 million parameters, and its number of examples."""

SPLITS = (2, 3)
"""Rounds in which every cluster of ``cfl`` splits: one cluster into two, then two into four."""

TINY = 16
"""Hidden units of the model with which a client first runs, to load the libraries."""

FLOWER = "Flower's FedAvg"
COLUMNS = ("", "memory, MB", "of all updates, or of the model", "server, s a round", "of Flower's")
Measured = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One run of a server: the method, and whether the server stores all updates."""

    method: Callable[[], Algorithm]
    stream: Stream
    sketches: int = 0  # numbers of a sketch; 0 to compare whole updates
    saves: bool = False  # whether the run has a folder, with a checkpoint after each round
    limit: str | None = None  # memory limit of the run; None for the default


def cfl(splits: Sequence[int]) -> Algorithm:
    return CFL(eps2=0.1, split_rounds=tuple(splits), min_cluster_size=2)


SERVERS = {
    "fedavg, stores all": Case(OurFedAvg, stream=False),
    "fedavg, streams": Case(OurFedAvg, stream=True),
    "fedavg, default": Case(OurFedAvg, stream="auto"),
    "cfl before splits, stores all": Case(partial(cfl, (100,)), stream=False),
    "cfl after splits, stores all": Case(partial(cfl, SPLITS), stream=False),
    "cfl after splits, checkpoints": Case(partial(cfl, SPLITS), stream=False, saves=True),
    "cfl after splits, in a file": Case(partial(cfl, SPLITS), stream=False, limit="64MB"),
    "cfl after splits, default": Case(partial(cfl, SPLITS), stream="auto"),
    "cfl after splits, streams sketches": Case(partial(cfl, SPLITS), stream=True, sketches=1024),
}
CLIENT_ENCODINGS = {"client, float32": "float32", "client, int8": "int8"}
NAMES = (*SERVERS, FLOWER, *CLIENT_ENCODINGS)


def reset_peak() -> int:
    """Reset the peak of this process's memory, and return its present memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def per_round(seen: Sequence[tuple[float, ...]]) -> float:
    """Return the median CPU seconds of a round without the clients, except the first round."""
    spent = [now - own for now, own in seen]
    return median(np.diff(spent).tolist())


# fedclade's server.


def grid_of(
    app: App, make_app: Callable[[int], App], clients: int, superlink: bool
) -> AbstractContextManager[Grid]:
    """Return a context with a grid: a LocalGrid with ``app``, or a grid for a SuperLink.

    The process of the SuperLink makes an app of its own with ``make_app``.
    """
    if superlink:
        return scripted_superlink(make_app, clients)
    return nullcontext(
        TimedGrid({1 + k: LocalNode(app, {"partition-id": k}) for k in range(clients)})
    )


def scripted_clients(hidden: int, clients: int) -> ScriptedClients:
    federation.HIDDEN = hidden
    return ScriptedClients(clients, "float32")


def measure_server(name: str, clients: int, hidden: int, rounds: int, superlink: bool) -> Measured:
    """Run a case with fedclade's server; return its memory and CPU seconds per round."""
    case = SERVERS[name]
    scripted = scripted_clients(hidden, clients)
    make_app = partial(scripted_clients, hidden)
    signature = Signature()
    if case.sketches:
        signature = Signature(kind="projected", dim=case.sketches)
    seen: list[tuple[float, float]] = []

    def play(clients: int, rounds: int) -> Any:
        with (
            grid_of(scripted, make_app, clients, superlink) as grid,
            tempfile.TemporaryDirectory() as folder,
        ):
            return federate(
                grid,
                case.method(),
                federation.model,
                network=Network(clients=clients),
                rounds=rounds,
                signature=signature,
                stream=case.stream,
                memory=case.limit,
                folder=Path(folder, "run") if case.saves else None,
                checkpoint_every=1 if case.saves else "auto",
                on_round=lambda *_: seen.append((process_time(), scripted.seconds)),
            )

    play(2 * CLUSTERS, max(SPLITS) + 1)
    seen.clear()
    before = reset_peak()
    run = play(clients, rounds)
    return {
        "peak": status("VmHWM") - before,
        "seconds": per_round(seen),
        "ari": run.metric_rows[-1]["ari"],
    }


# Flower's server, with replies of the same size.


class FlowerClients:
    """App of all clients of Flower's strategy, which reply with a model of their own."""

    def __init__(self, count: int) -> None:
        self._scripted = ScriptedClients(count, "float32")
        self.seconds = 0.0

    def __call__(self, message: Message, context: Context) -> Message:
        """Reply to a message with a model of the client's own, or with a loss."""
        start = process_time()
        content: dict[str, Any] = {"metrics": MetricRecord({"num-examples": 100, "loss": 1.0})}
        if message.metadata.message_type == "train":
            client = int(context.node_config["partition-id"])
            update = self._scripted._update(client)  # pyright: ignore[reportPrivateUsage]
            content["arrays"] = ArrayRecord([update.numpy()])
        self.seconds += process_time() - start
        return Message(RecordDict(content), reply_to=message)


class TimedFedAvg(FedAvg):
    """Flower's FedAvg, which records the CPU time after each round."""

    def __init__(self, app: FlowerClients, clients: int) -> None:
        super().__init__(min_available_nodes=clients)
        self._app = app
        self.seen: list[tuple[float, float]] = []

    def aggregate_evaluate(self, *arguments: Any, **named: Any) -> MetricRecord | None:
        """Aggregate the metrics, then record the time."""
        result = super().aggregate_evaluate(*arguments, **named)
        self.seen.append((process_time(), self._app.seconds))
        return result


def flower_clients(hidden: int, clients: int) -> FlowerClients:
    federation.HIDDEN = hidden
    return FlowerClients(clients)


def measure_flower(clients: int, hidden: int, rounds: int, superlink: bool) -> Measured:
    """Run Flower's FedAvg; return its memory and CPU seconds per round."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    app = flower_clients(hidden, clients)
    make_app = partial(flower_clients, hidden)

    def play(clients: int, rounds: int) -> TimedFedAvg:
        strategy = TimedFedAvg(app, clients)
        size = app._scripted.layout.size  # pyright: ignore[reportPrivateUsage]
        start = ArrayRecord([np.zeros(size, dtype=np.float32)])
        with grid_of(app, make_app, clients, superlink) as grid:
            strategy.start(grid, start, num_rounds=rounds, train_config=ConfigRecord())
        return strategy

    play(2 * CLUSTERS, 2)
    before = reset_peak()
    strategy = play(clients, rounds)
    return {"peak": status("VmHWM") - before, "seconds": per_round(strategy.seen)}


# A real client. A first process records the messages of a server, and a second replays them, since
# the memory of a server in the same process would count as the client's.


def build_mlp(hidden: int, seed: int = 0) -> torch.nn.Module:
    return build_model(
        "mlp", input_shape=SCHEMA.input_shape, outputs=SCHEMA.outputs, arguments={"hidden": hidden}
    )


def client_data(context: Context) -> Federation:
    """Return the client's few examples."""
    pixels = torch.rand(
        CLIENT_EXAMPLES, *SCHEMA.input_shape, generator=torch.Generator().manual_seed(0)
    )
    labels = torch.arange(CLIENT_EXAMPLES) % SCHEMA.outputs
    data = torch.utils.data.TensorDataset(pixels, labels)
    return one_client(data, data, labels=SCHEMA.outputs)


def app_of(encoding: str, hidden: int) -> Any:
    return client_app(partial(build_mlp, hidden), client_data, encoding=encoding)


def record_messages(encoding: str, hidden: int, folder: str) -> int:
    """Run FedAvg with one client; write each message to it, and return their number."""
    app = app_of(encoding, hidden)
    files: list[Path] = []

    def recording(message: Message, context: Context) -> Message:
        files.append(Path(folder, f"{len(files)}.message"))
        files[-1].write_bytes(message_to_proto(message).SerializeToString())
        return app(message, context)

    with tempfile.TemporaryDirectory() as own_folder:
        grid = LocalGrid({1: LocalNode(recording, {"partition-id": 0, "folder": own_folder})})
        federate(
            grid,
            OurFedAvg(),
            partial(build_mlp, hidden),
            network=Network(clients=1),
            rounds=2,
            local=LocalTraining(epochs=1, batch_size=10, lr=0.05),
        )
    return len(files)


def read_message(file: Path) -> Message:
    return message_from_proto(ProtoMessage.FromString(file.read_bytes()))


def replay_messages(encoding: str, hidden: int, folder: str, count: int) -> Measured:
    """Let a client reply to recorded messages; return its peak memory by kind of message."""
    peaks: dict[str, int] = {}
    before = reset_peak()
    app = app_of(encoding, hidden)
    with tempfile.TemporaryDirectory() as own_folder:
        node: dict[str, Any] = {"partition-id": 0, "folder": own_folder}
        context = Context(1, 1, node, RecordDict(), {})
        for place in range(count):
            message = read_message(Path(folder, f"{place}.message"))
            kind = message.metadata.message_type
            reset_peak()
            reply = app(message, context)
            refused = Content.of(reply.content).values.get("refused")
            if refused is not None:
                raise SystemExit(f"the client refuses a recorded message: {refused}")
            peaks[kind] = max(peaks.get(kind, 0), status("VmHWM") - before)
            del message, reply
    return {"peak": max(peaks.values()), "peaks": peaks}


def replay_twice(
    encoding: str, small: tuple[str, int], large: tuple[str, int], hidden: int
) -> Measured:
    """Replay the messages of a tiny model first, which loads the libraries, then of the model."""
    torch.set_num_threads(1)
    replay_messages(encoding, TINY, *small)
    return replay_messages(encoding, hidden, *large)


def measure_client(name: str, hidden: int) -> Measured:
    """Record the messages to a client, replay them in a fresh process, and return its memory."""
    encoding = CLIENT_ENCODINGS[name]
    with tempfile.TemporaryDirectory() as tiny, tempfile.TemporaryDirectory() as large:
        counts = [
            in_a_process(record_messages, encoding, size, folder)
            for size, folder in ((TINY, tiny), (hidden, large))
        ]
        return in_a_process(replay_twice, encoding, (tiny, counts[0]), (large, counts[1]), hidden)


def in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as processes:
        return processes.submit(function, *arguments).result()


def parameters(hidden: int) -> int:
    return sum(parameter.numel() for parameter in build_mlp(hidden).parameters())


def row(name: str, found: Measured, all_bytes: int, of_flower: float | None) -> str:
    """Return a row of the Markdown table."""
    seconds = found.get("seconds")
    cells = [
        name,
        f"{found['peak'] / 1e6:.0f}",
        f"{found['peak'] / all_bytes:.2f}",
        "" if seconds is None else f"{seconds:.2f}",
        "" if seconds is None or of_flower is None else f"{seconds / of_flower:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=CLIENTS, help="number of clients")
    parser.add_argument(
        "--hidden", type=int, default=HIDDEN, help="hidden units of the server's MLP"
    )
    parser.add_argument("--client-hidden", type=int, default=CLIENT_HIDDEN)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="number of rounds")
    parser.add_argument(
        "--superlink",
        action="store_true",
        help="measure servers with Flower's grid for a SuperLink, which is another process",
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="cases to measure")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    size = parameters(arguments.hidden)
    of_client = parameters(arguments.client_hidden)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "flwr"))
    print(
        f"Python {platform.python_version()}, {versions}; {arguments.clients} clients with "
        f"{size:,} parameters; at the client {of_client:,} parameters\n"
    )
    print(f"| {' | '.join(COLUMNS)} |\n|:--|{'--:|' * (len(COLUMNS) - 1)}")
    results: dict[str, Measured] = {}
    shape = arguments.clients, arguments.hidden, arguments.rounds, arguments.superlink
    for name in sorted(arguments.only, key=lambda name: name != FLOWER):
        if name in SERVERS:
            found = in_a_process(measure_server, name, *shape)
        elif name == FLOWER:
            found = in_a_process(measure_flower, *shape)
        else:
            found = measure_client(name, arguments.client_hidden)
        results[name] = found
        unit = 4 * of_client if name in CLIENT_ENCODINGS else 4 * size * arguments.clients
        of_flower = results.get(FLOWER, {}).get("seconds")
        print(row(name, found, unit, of_flower), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
