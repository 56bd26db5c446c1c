"""What a run runs on: the clients and their middleware, initial models, and how much of it is decided."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fedclade.algorithms import Algorithm
from fedclade.channel import (
    Absence,
    Aggregating,
    Channel,
    FaultInjection,
    Faults,
    Meter,
    Nothing,
    Permutation,
    Retrying,
    Sketch,
    Streaming,
    Timing,
    Traffic,
    client_side,
    keyed_noise,
    received,
    server_side,
    simulated_privacy,
)
from fedclade.core import (
    Clients,
    ConfigError,
    DataSpec,
    FedcladeError,
    Layout,
    ModelError,
    ParameterTree,
    StatisticsQuery,
    Workers,
    check_module,
    rng,
)
from fedclade.data import Federation, statistics
from fedclade.models import Parts, build_model
from fedclade.runs.settings import RunOptions, RunSettings, settings_from
from fedclade.tasks import FittedTask
from fedclade.training import (
    Actors,
    ClientStore,
    RayClients,
    Setup,
    SimulatedClients,
    choose_device,
    default_memory,
    memory_bytes,
    taken_by,
    updates_at_once,
)

Maker = Callable[[int], nn.Module]
"""Makes a module whose initial parameters depend on a seed alone."""

SHARE_OF_UPDATES = 4
"""A run streams by itself if the updates of all clients would take more than one part in so many of its memory."""

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
    sketch: Sketch | None
    streams: bool  #: whether the server keeps no updates
    device: str  #: ``cpu`` or ``cuda``
    memory: int  #: bytes that the data and the training of a round may take
    task: FittedTask
    absence: Absence | None = None  #: in a simulation: which clients are away
    common: Tensor | None = None  #: which entries of a model all clusters have in common, ``[S]``
    aggregating: Aggregating | None = None  #: what puts noise on sums, in a simulation

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
        **options: Unpack[RunOptions],
    ) -> Backend:
        """Simulate the clients of a federation; see :func:`fedclade.simulate`.

        ``taken`` is the engine of a run that is continued, see :attr:`SimulatedClients.engine_taken
        <fedclade.training.clients.SimulatedClients.engine_taken>`.
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
        if privacy and layout.size > layout.n_parameters:
            _log.warning(
                "noise is put on %d buffers of the model too, and can turn BatchNorm's variances negative; take a "
                "model without buffers, such as one with GroupNorm",
                layout.size - layout.n_parameters,
            )
        sketch = signature.sketch(seed, layout)
        bytes_each = layout.size * initial.itemsize
        streams = decide_stream(settings, algorithm, len(federation) * bytes_each, budget, remote)
        # An algorithm that compares has a sketch; under central privacy there is none.
        compared = Nothing() if settings.is_central or (streams and sketch is None) else sketch
        at_once = updates_at_once(bytes_each, initial.device, budget)
        streaming = Streaming(federation.sizes, at_once) if streams else None
        private, answering, aggregating = simulated_privacy(privacy, keyed_noise(keys), settings.client_fraction)
        retrying = Retrying(tells_releases=private is not None)
        of_clients = [
            *client_side(private, permutation, signature.sketch_of_parts(seed, layout), answering),
            *([FaultInjection(faults, keys, layout.n_parameters)] if faults else []),
        ]
        meter, taken, absence = Meter(), taken_by(engine, taken), Absence(layout.n_parameters)
        if remote:  # all that makes a reply small is done where it is made
            counted = Meter()
            inside = [*of_clients, Traffic(counted), *received(compared, streaming)]
            memory = None if settings.memory is None else budget
            setup = Setup(federation, module, task, personal, inside, counted, memory)
            workers: Workers = RayClients(setup, actors, asked, taken, meter)
            clients = Channel(workers, Timing(meter), absence, retrying, aggregating)
        else:
            workers = SimulatedClients(federation, module, device, engine, budget, taken, task, personal)
            arrival = Timing(meter), Traffic(meter), absence, *server_side(retrying, compared, streaming)
            clients = Channel(workers, *of_clients, *arrival, aggregating)
        initial = permutation.apply(initial) if permutation else initial
        common = settings.parts.common_entries(module)
        of_run = meter, retrying, permutation, sketch, streams, device, budget, task, absence, common
        return cls(clients, initial, workers, *of_run, aggregating)

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


def model_name(model: nn.Module | str | Maker, seed: int) -> str:
    """Return the name that a model was asked for by, or that of its class."""
    if isinstance(model, str):
        return model
    return type(model if isinstance(model, nn.Module) else _made(model, seed)).__name__


def initial_models(
    model: nn.Module | str | Maker,
    schema: DataSpec,
    seed: int,
    algorithm: Algorithm,
    budget: int | None = None,
    parts: Parts | None = None,
) -> tuple[nn.Module, Tensor]:
    """Return a module of a run's own, and its initial models ``[S]`` or ``[initial_models, S]``, not permuted.

    Each model after the first is drawn from a seed of its own. Raises a ConfigError if the model is unknown, several
    are needed and the one given cannot be made anew, or they take more bytes than the ``budget``.
    """
    parts = parts or Parts()
    module = _module(model, schema, seed, parts)
    first = (layout := parts.layout(module)).flatten(module)
    if algorithm.initial_models == 1:
        return module, first
    if isinstance(model, nn.Module):
        raise ConfigError(
            f"{type(algorithm).__name__} starts from {algorithm.initial_models} different models, and a module is only "
            "one; give the model's name, or a function that makes a module from a seed"
        )
    if parts.adapter is not None and not parts.adapter.train:
        raise ConfigError(
            f"{type(algorithm).__name__} starts from {algorithm.initial_models} different models, and adapters all "
            "begin as the base, since B is zero; name what is trained besides, such as a head, in model.adapter.train"
        )
    if budget is not None and (needed := algorithm.initial_models * first.numel() * first.itemsize) > budget:
        raise ConfigError(
            f"{type(algorithm).__name__} starts from {algorithm.initial_models} models, which take "
            f"{needed / 1e9:.1f} GB, and the run may take {budget / 1e9:.1f} GB; ask for fewer, or raise the memory"
        )
    seeds = (rng.torch_seed(seed, "initial model", number) for number in range(1, algorithm.initial_models))
    others = (layout.flatten(_module(model, schema, each, parts)).to(first) for each in seeds)
    return module, torch.stack([first, *others])


def _module(model: nn.Module | str | Maker, schema: DataSpec, seed: int, parts: Parts) -> nn.Module:
    if isinstance(model, str):
        return parts.applied(module_for(model, schema, seed), seed)
    if isinstance(model, nn.Module):
        check_module(model)  # before it is copied, which can fail for the same reason
        model = copy.deepcopy(model)
    return parts.applied(model if isinstance(model, nn.Module) else _made(model, seed), seed)


def _made(make: Maker, seed: int) -> nn.Module:
    """Return the module that a user's function makes from a seed, checked."""
    try:
        module: Any = make(seed)
    except FedcladeError:
        raise
    except Exception as error:
        raise ModelError(f"making the model from seed {seed} failed: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise ModelError(f"a function that makes a model should return a torch.nn.Module, got {type(module).__name__}")
    return module


def module_for(name: str, schema: DataSpec, seed: int, arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """Build a model by name for some data; see :func:`fedclade.models.build_model`."""
    return build_model(
        name,
        input_shape=schema.input_shape,
        outputs=schema.outputs,
        task=schema.task,
        vocabulary_size=schema.vocabulary_size,
        seed=seed,
        arguments=arguments,
    )


def decide_stream(settings: RunSettings, algorithm: Algorithm, size: int, budget: int, remote: bool = False) -> bool:
    """Decide whether to stream, given the bytes of all clients' updates and those that may be taken.

    Updates that come from ``remote`` actors are only sent one by one if they have to be.
    """
    if settings.is_central:
        return True
    if settings.stream != "auto":
        return settings.stream
    if algorithm.needs_updates or (size <= budget // SHARE_OF_UPDATES and not remote):
        return False
    can = settings.signature.kind == "projected" or not algorithm.compares
    if not can and size > budget // SHARE_OF_UPDATES:
        _log.warning(
            "the updates of all clients take %.1f GB, the run may take %.1f GB; with signature.kind = 'projected' it "
            "would stream and keep none of them",
            size / 1e9,
            budget / 1e9,
        )
    return can
