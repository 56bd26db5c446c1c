"""The simulated world that an algorithm is given: clients in this process, and all that stands before them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedclade import rng
from fedclade.algorithms import Algorithm
from fedclade.attendance import AttendedClients
from fedclade.clients import Clients
from fedclade.data.federation import Federation
from fedclade.engine.clients import SimulatedClients, choose_device
from fedclade.engine.memory import default_memory, memory_bytes, updates_at_once
from fedclade.errors import ConfigError
from fedclade.faults import Faults, FaultyClients
from fedclade.meter import MeteredClients
from fedclade.models import build_model
from fedclade.signature import CountSketch, Permutation, PermutedClients, ProjectedClients, Signature
from fedclade.streaming import StreamedClients
from fedclade.tree import ParameterTree

Maker = Callable[[int], nn.Module]
"""Makes a module whose initial parameters depend on a seed alone."""

Stream = bool | Literal["auto"]

SHARE_OF_UPDATES = 4
"""A run streams by itself if the updates of all clients would take more than one part in so many of its memory."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class World:
    """What an algorithm is given, and how to look behind it.

    Parameters
    ----------
    clients
        The clients as the server sees them, through all that wraps them.
    initial
        The initial model ``[S]``, or ``[initial_models, S]``, as the server sees it.
    simulated
        Those who do the work.
    meter
        What travels, and how long it takes.
    attendance
        Who answered, and who was left out.
    permutation
        The clients' secret P, if they have one.
    sketch
        What the server projects updates with, if it does.
    streams
        Whether the server keeps no updates.
    device
        ``cpu`` or ``cuda``.
    memory
        Bytes that the data and the training of a round may take.
    """

    clients: Clients
    initial: Tensor
    simulated: SimulatedClients
    meter: MeteredClients
    attendance: AttendedClients
    permutation: Permutation | None
    sketch: CountSketch | None
    streams: bool
    device: str
    memory: int

    @classmethod
    def simulated_by(
        cls,
        federation: Federation,
        model: nn.Module | str | Maker,
        algorithm: Algorithm,
        *,
        seed: int = 0,
        permute: bool = False,
        device: str = "auto",
        engine: str = "auto",
        signature: Signature | None = None,
        stream: Stream = "auto",
        memory: int | str | None = None,
        taken: str | None = None,
        faults: Faults | None = None,
    ) -> World:
        """Simulate the clients of a federation; see :func:`fedclade.simulate` for the settings.

        ``taken`` is the engine of a run that is continued, see :attr:`SimulatedClients.engine_taken
        <fedclade.engine.clients.SimulatedClients.engine_taken>`.
        """
        device = choose_device(device)
        signature = signature or Signature()
        budget = default_memory(torch.device(device)) if memory is None else memory_bytes(memory)
        module = _module(model, federation, seed)
        simulated = SimulatedClients(federation, module, device, engine, budget, taken)
        layout = simulated.layout
        params = layout.flatten(module)
        secret = rng.torch_seed(seed, "the clients' secret")
        permutation = Permutation(secret, layout.size, layout.n_parameters) if permute else None
        there: Clients = PermutedClients(simulated, permutation) if permutation else simulated
        if faults:
            keys = {client.id: client.key for client in federation.clients}
            there = FaultyClients(there, faults, keys, layout.n_parameters)
        meter = MeteredClients(there)
        # From here on it is the server that works, on what it receives.
        sketch = signature.sketch(seed, layout.n_parameters)
        clients: Clients = ProjectedClients(meter, sketch) if sketch else meter
        streams = _streams(stream, algorithm, signature, len(federation) * params.nbytes, budget)
        if streams:
            clients = StreamedClients(clients, updates_at_once(params.nbytes, params.device, budget))
        attendance = AttendedClients(clients)
        if algorithm.initial_models > 1:
            others = _other_models(model, federation, seed, algorithm)
            params = torch.stack([params, *(layout.flatten(other).to(params) for other in others)])
        initial = permutation.apply(params) if permutation else params
        return cls(attendance, initial, simulated, meter, attendance, permutation, sketch, streams, device, budget)

    @property
    def settled(self) -> dict[str, Any]:
        """What a config may leave to ``auto``, as it was done: rounding depends on it, and it should repeat the run."""
        return {"engine": self.simulated.engine, "stream": self.streams}

    def opened(self, tree: ParameterTree) -> ParameterTree:
        """Return a tree as the clients see it: they open what only they can read, but no sketch can be opened."""
        if self.permutation is None:
            return tree
        return tree.map_vectors(self.permutation.invert, None if self.sketch else self.permutation.invert)

    def closed(self, tree: ParameterTree) -> ParameterTree:
        """Return a tree as the server sees it: what :meth:`opened` undoes."""
        if self.permutation is None:
            return tree
        return tree.map_vectors(self.permutation.apply, None if self.sketch else self.permutation.apply)


def model_name(model: nn.Module | str | Maker, seed: int) -> str:
    """Return the name that a model was asked for by, or that of its class."""
    if isinstance(model, str):
        return model
    return type(model if isinstance(model, nn.Module) else model(seed)).__name__


def _module(model: nn.Module | str | Maker, federation: Federation, seed: int) -> nn.Module:
    if isinstance(model, str):
        return module_for(model, federation, seed)
    return copy.deepcopy(model) if isinstance(model, nn.Module) else model(seed)


def _other_models(
    model: nn.Module | str | Maker, federation: Federation, seed: int, algorithm: Algorithm
) -> Iterator[nn.Module]:
    """Yield the initial models after the first, each drawn from a seed of its own."""
    if isinstance(model, nn.Module):
        raise ConfigError(
            f"{type(algorithm).__name__} starts from {algorithm.initial_models} different models, and a module is only "
            "one; give the model's name, or a function that makes a module from a seed"
        )
    for number in range(1, algorithm.initial_models):
        yield _module(model, federation, rng.torch_seed(seed, "initial model", number))


def module_for(name: str, federation: Federation, seed: int, arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """Build a model by name for a federation's data; see :func:`fedclade.models.build_model`."""
    pool = federation.pool
    return build_model(
        name,
        input_shape=pool.input_shape,
        outputs=pool.outputs,
        task=pool.task,
        vocabulary_size=len(pool.vocabulary),
        seed=seed,
        arguments=arguments,
    )


def _streams(stream: Stream, algorithm: Algorithm, signature: Signature, size: int, budget: int) -> bool:
    """Decide whether to stream, given the bytes of all clients' updates and those that may be taken."""
    if stream != "auto":
        return stream
    if algorithm.needs_updates or size <= budget // SHARE_OF_UPDATES:
        return False
    if signature.kind == "full":
        _log.warning(
            "the updates of all clients take %.1f GB, the run may take %.1f GB; with signature.kind = 'projected' it "
            "would stream and keep none of them",
            size / 1e9,
            budget / 1e9,
        )
    return signature.kind == "projected"
