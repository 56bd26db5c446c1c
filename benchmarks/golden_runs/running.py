"""Run a case in a simulation, over a network in this process, or on Ray actors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict

import fedclade
from fedclade import Run
from fedclade.config import check_config
from fedclade.core import RunInterrupted
from fedclade.flower import LocalGrid, LocalNode, client_app_from_config, server_app_from_config
from fedclade.flower.wire import Content, unpack
from golden_runs.cases import BASE, Case

FIRST_NODE = 100
"""First node id; node ids differ from the numbers of clients."""

RANDOM_VALUES = frozenset(
    {
        # in every run: signed messages, and the name of the run
        "nonce",
        "key",
        "signature",
        "run",
        # with secure aggregation: keys, shares of secrets, and signed or encrypted values
        "instance",
        "training",  # a hash of the request, which contains the name of the run
        "masking",
        "maskings",
        "sealing",
        "sealings",
        "signatures",
        "signers",
        "promises",
        "ciphertexts",
        "commitment",
        "digests",
        "shares",
    }
)
"""Random texts and bytes in messages, of which only the lengths are compared."""

RANDOM_VECTORS = frozenset({"masked"})
"""Random vectors in messages, of which only types and shapes are compared."""

RAY_CORES = 2


@dataclass(frozen=True, eq=False)
class Outcome:
    """Results of a case.

    Parameters
    ----------
    run
        The run.
    messages
        Queries and replies of a network, in the order in which they were sent; empty for other
        runs.
    newcomers
        Table of scores of the newcomers that were assigned after the run, with a row for each.
    """

    run: Run
    messages: list[Any] = field(default_factory=list)
    newcomers: list[Mapping[str, Any]] = field(default_factory=list)


def run_case(case: Case, folder: Path) -> Outcome:
    """Run a case from its start, in an empty folder."""
    if case.kind == "network":
        return run_on_network(case, folder)
    if case.kind == "ray":
        return run_on_ray(case, folder)
    return run_in_simulation(case, folder)


def resume_case(case: Case, folder: Path) -> Outcome:
    """Run half of the rounds of a simulation, stop, and continue from the checkpoint."""
    rounds = (dict(BASE) | dict(case.settings))["rounds"]
    count = iter(range(1, rounds))

    def stop() -> bool:
        return next(count) == rounds // 2

    try:
        run_in_simulation(case, folder, stop=stop)
    except RunInterrupted:
        return run_in_simulation(case, folder)
    raise AssertionError(
        f"case {case.name!r} has not stopped after {rounds // 2} of {rounds} rounds"
    )


def run_in_simulation(case: Case, folder: Path, stop: Callable[[], bool] | None = None) -> Outcome:
    """Run a case in this process; ``stop`` is called after each round, and may interrupt it."""
    config = check_config(sections(dict(BASE) | dict(case.settings)))
    federation = config.federation()
    run = config.run(federation, folder=folder / "run", stop=stop)
    if not case.assigns:
        return Outcome(run)
    assigned = fedclade.assign(run, federation.newcomers)
    return Outcome(run, newcomers=list(assigned.rows))


def run_on_ray(case: Case, folder: Path) -> Outcome:
    """Run a case on two actors of a Ray cluster that :func:`ray_cluster` has started."""
    config = check_config(sections(dict(BASE) | dict(case.settings)))
    actors = fedclade.Actors(count=2, cores=1, engine="loop")
    return Outcome(config.run(config.federation(), folder=folder / "run", actors=actors))


@contextmanager
def ray_cluster() -> Iterator[None]:
    """Start Ray on this machine with two cores, and stop it at the end."""
    import ray

    ray.init(
        address="local",  # without it, Ray would join a cluster that another program has started
        num_cpus=RAY_CORES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        yield
    finally:
        ray.shutdown()


def run_on_network(case: Case, folder: Path) -> Outcome:
    """Run a case over Flower's messages in this process, and record them."""
    settings: dict[str, Any] = dict(BASE) | dict(case.settings)
    del settings["engine"]  # a network has none
    clients = settings["data.clients"]
    settings |= {"network.clients": clients, "network.out": str(folder / "run")}
    messages: list[Any] = []
    app = record_messages(client_app_from_config(), messages)
    nodes = {
        FIRST_NODE + number: LocalNode(app, {"partition-id": number, **case.node})
        for number in range(clients)
    }
    context = Context(1, 0, {}, RecordDict(), settings)
    with redirect_stdout(StringIO()):
        server_app_from_config()(LocalGrid(nodes, settings), context)
    return Outcome(Run.load(folder / "run"), messages)


def record_messages(
    app: Callable[[Message, Context], Message], messages: list[Any]
) -> Callable[[Message, Context], Message]:
    """Return an app that calls ``app``, and appends each query and reply to a list."""

    def recorded(message: Message, context: Context) -> Message:
        reply = app(message, context)
        if Content.of(message.content).values["what"] == "gains":
            return reply  # this query is sent after the last round; older versions do not have it
        node = message.metadata.dst_node_id
        messages.append([node, "query", describe_message(message.content)])
        messages.append([node, "reply", describe_message(reply.content)])
        return reply

    return recorded


def describe_message(content: RecordDict) -> dict[str, Any]:
    """Return the records of a message by name, without random values."""
    described: dict[str, Any] = {}
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            described[name] = {key: describe_array(key, array) for key, array in record.items()}
        else:
            values = dict(record)
            for packed in (values.pop("values", None), values.pop("proof", None)):
                if isinstance(packed, bytes):
                    values |= unpack(packed)
            described[name] = {key: describe_value(key, value) for key, value in values.items()}
    return described


def describe_array(name: str, array: Array) -> list[Any]:
    """Return type and shape of a vector in a message, and a hash of its values."""
    described: list[Any] = [array.dtype, list(array.shape), array.stype]
    if name not in RANDOM_VECTORS:
        described.append(hashlib.sha256(array.data).hexdigest())
    return described


def describe_value(name: str, value: Any) -> Any:
    """Return a value of a message: parsed if it is a JSON text, and only its length if random."""
    if isinstance(value, str) and value.startswith("{"):
        entries = json.loads(value)
        return {key: describe_value(key, entry) for key, entry in entries.items()}
    if name not in RANDOM_VALUES:
        return value
    if isinstance(value, str | bytes):
        return [type(value).__name__, len(value)]
    if isinstance(value, list):
        return [describe_value(name, entry) for entry in value]
    return value


def sections(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings with keys ``section.key`` to nested sections, as in a TOML file."""
    nested: dict[str, Any] = {}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        if section:
            nested.setdefault(section, {})[name] = value
        else:
            nested[name] = value
    return nested
