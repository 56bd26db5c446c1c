"""What a run runs on: the clients and their middleware, initial models, and how much of it is decided."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fedclade.algorithms import Algorithm
from fedclade.channel import (
    Absence,
    Answering,
    CentralPrivacy,
    Channel,
    DifferentialPrivacy,
    ExamplePrivacy,
    FaultInjection,
    Faults,
    Limiting,
    Meter,
    NoisySums,
    Nothing,
    Permutation,
    Retrying,
    Sketch,
    Streaming,
    Timing,
    Traffic,
    arrived,
    client_side,
    keyed_noise,
    privatizing,
    received,
    server_side,
)
from fedclade.core import Clients, Layout, ParameterTree, StatisticsQuery, Workers, rng
from fedclade.data import Federation, statistics
from fedclade.runs.adversaries import Adversaries
from fedclade.runs.models import Maker, initial_models
from fedclade.runs.settings import RunOptions, RunSettings, settings_from
from fedclade.runs.stream import decide_stream
from fedclade.tasks import FittedTask
from fedclade.training import (
    Actors,
    ClientStore,
    PrivateSteps,
    RayClients,
    Setup,
    SimulatedClients,
    choose_device,
    default_memory,
    memory_bytes,
    taken_by,
    updates_at_once,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Backend:
    """What an algorithm runs on: clients as a server sees them, and what stands behind them."""

    clients: Clients  #: through all that wraps them
    initial: Tensor  #: the initial model ``[S]``, or ``[initial_models, S]``, as the server sees it
    workers: Workers  #: what trains and evaluates
    meter: Meter
    retrying: Retrying
    permutation: Permutation | None  #: the clients' secret P, where it is known: in a simulation, not in a network
    sketch: Sketch | None  #: None: what clusters cache of updates is permuted as these are
    streams: bool  #: whether the server keeps no updates
    device: str  #: ``cpu`` or ``cuda``
    memory: int  #: bytes that the data and the training of a round may take
    task: FittedTask
    absence: Absence | None = None  #: in a simulation: which clients are away
    common: Tensor | None = None  #: which entries of a model all clusters have in common, ``[S]``
    adversaries: Adversaries | None = None  #: in a simulation that has some
    noisy_sums: NoisySums | None = None  #: what puts noise on sums, in a simulation with central privacy

    @classmethod
    def simulated_by(
        cls,
        federation: Federation,
        model: nn.Module | str | Maker,
        algorithm: Algorithm,
        settings: RunSettings | None = None,
        *,
        device: str = "auto",
        engine: str = "auto",
        taken: str | None = None,
        faults: Faults | None = None,
        actors: Actors | None = None,
        adversaries: Adversaries | None = None,
        **options: Unpack[RunOptions],
    ) -> Backend:
        """Simulate the clients of a federation; see :func:`fedclade.simulate`.

        ``taken`` is the engine of a run that is continued, see :attr:`SimulatedClients.engine_taken
        <fedclade.training.clients.SimulatedClients.engine_taken>`. With ``adversaries`` limits left to ``auto`` act.
        """
        settings = settings_from(settings, options).completed(algorithm)
        seed, signature, privacy = settings.seed, settings.signature, settings.privacy
        remote, asked = engine == "ray", device
        device = "cpu" if remote else choose_device(device)  # what actors send is added up here
        budget = default_memory(torch.device(device)) if settings.memory is None else memory_bytes(settings.memory)
        task = fitted_task(settings, federation)
        module, initial = initial_models(model, federation.pool.schema, seed, algorithm, budget, settings.parts)
        personal = settings.parts.personal_names(module)
        layout, initial = Layout.of(module, personal), initial.to(device)
        secret = rng.torch_seed(seed, "the clients' secret")
        permutation = Permutation(secret, layout.size, layout.n_parameters) if settings.permute else None
        keys = federation.keys
        if isinstance(privacy, DifferentialPrivacy) and layout.size > layout.n_parameters:
            _log.warning(
                "noise is put on %d buffers of the model too, and can turn BatchNorm's variances negative; take a "
                "model without buffers, such as one with GroupNorm",
                layout.size - layout.n_parameters,
            )
        sketch = signature.sketch(seed, layout)
        bytes_each = layout.size * initial.itemsize
        held, lying = (federation, None) if adversaries is None else (adversaries.federation, adversaries.lying)
        sheltered = remote and lying is None  # adversaries are one middleware: what actors send meets it here
        if adversaries is not None and adversaries.settings.knowing:
            settings = replace(settings, stream=False)
        streams = decide_stream(settings, algorithm, len(federation) * bytes_each, budget, sheltered)
        # An algorithm that compares has a sketch; under central privacy there is none.
        compared = Nothing() if settings.is_central or (streams and sketch is None) else sketch
        at_once = updates_at_once(bytes_each, initial.device, budget)
        streaming = Streaming(federation.sizes, at_once) if streams else None
        # Whom a limit leaves out depends on others' updates, which the guarantee of noise on sums does not allow.
        limits = settings.aggregate.limits(untrusted=lying is not None and not settings.is_central)
        told = (lambda: federation.sizes) if lying is None else (lambda: lying.weights(federation.sizes))
        limiting = Limiting.within(limits, layout.n_parameters, told)
        by_example = PrivateSteps.of(privacy) if isinstance(privacy, ExamplePrivacy) else None
        private = privatizing(privacy, federation.sizes, keys)
        central = privacy if isinstance(privacy, CentralPrivacy) else None
        answering = Answering(central, keyed_noise(keys))
        noisy_sums = NoisySums(central, settings.client_fraction)
        retrying = Retrying(
            tells_releases=private is not None and central is None, sizes=federation.sizes if by_example else None
        )
        of_clients = [
            *client_side(private, permutation, signature.sketch_of_parts(seed, layout), lying, answering),
            *([FaultInjection(faults, keys, layout.n_parameters)] if faults else []),
        ]
        meter, taken, absence = Meter(), taken_by(engine, taken), Absence(layout.n_parameters)
        if remote:
            counted = Meter()
            inside = [*of_clients, Traffic(counted), *received(compared, streaming, limiting if streams else None)]
            memory = None if settings.memory is None else budget
            setup = Setup(held, module, task, personal, inside if sheltered else (), counted, memory, by_example)
            workers: Workers = RayClients(setup, actors, asked, taken, meter)
        else:
            workers = SimulatedClients(held, module, device, engine, budget, taken, task, personal, by_example)
        if sheltered:  # all that makes a reply small is done where it is made
            last = arrived(retrying, settings.aggregate, None if streams else limiting)
            clients = Channel(workers, Timing(meter), absence, *last, noisy_sums)
        else:
            last = server_side(retrying, compared, streaming, limiting, settings.aggregate)
            clients = Channel(workers, *of_clients, Timing(meter), Traffic(meter), absence, *last, noisy_sums)
        initial = permutation.apply(initial) if permutation else initial
        common = settings.parts.common_entries(module)
        kept = sketch if algorithm.compares else Nothing()
        of_run = meter, retrying, permutation, kept, streams, device, budget, task, absence, common, adversaries
        return cls(clients, initial, workers, *of_run, noisy_sums)

    @property
    def settled(self) -> dict[str, Any]:
        """What a config may leave to ``auto``, as it was done, so that the noted config repeats the run."""
        return {"engine": self.workers.engine, "stream": self.streams}

    @property
    def store(self) -> ClientStore | None:
        """What clients keep, in a simulation; those of a network keep it themselves."""
        return self.workers.store if isinstance(self.workers, SimulatedClients | RayClients) else None

    @property
    def kept(self) -> dict[int, dict[str, Tensor]]:
        """The personal parameters and models that clients of a simulation keep, by client and name."""
        return self.workers.kept if isinstance(self.workers, SimulatedClients | RayClients) else {}

    def close(self) -> None:
        """End what runs beside this process."""
        if isinstance(self.workers, RayClients):
            self.workers.close()

    def opened(self, tree: ParameterTree) -> ParameterTree:
        """Return a tree as the clients see it, without their permutation; sketches of permuted updates stay."""
        if self.permutation is None:
            return tree
        return tree.map_vectors(self.permutation.invert, None if self.sketch else self.permutation.invert)

    def closed(self, tree: ParameterTree) -> ParameterTree:
        """Return a tree as the server sees it: what :meth:`opened` undoes."""
        if self.permutation is None:
            return tree
        return tree.map_vectors(self.permutation.apply, None if self.sketch else self.permutation.apply)


def fitted_task(settings: RunSettings, federation: Federation) -> FittedTask:
    """Return the task of a run for the data of all clients."""
    schema, counts = federation.pool.schema, None
    if settings.task.class_weights == "balanced":
        counts = statistics(federation, StatisticsQuery(federation.ids, labels=schema.labels or 0)).labels
    return settings.task.of(schema, counts)
