"""Initial models of a run, built from a name, a module, or a function of a seed.

The module also contains the automatic choice of streaming, and the target score of a run.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedclade.core import (
    ConfigError,
    DataSpec,
    FedcladeError,
    ModelError,
    check_module,
    require,
    rng,
    unknown,
)
from fedclade.models import Parts, build_model
from fedclade.tasks import FittedTask
from fedclade.training import note_unsent_buffers, unpack_inputs

if TYPE_CHECKING:  # a network's client makes models, but needs no settings of a run
    from fedclade.algorithms import Algorithm
    from fedclade.runs.settings import RunSettings

# Automatic choice of streaming.

SHARE_OF_UPDATES = 4
"""Divisor of a run's memory that gives the limit for updates in it.

With ``stream = "auto"``, a run streams if the updates of all clients take more than this limit.
"""

LARGEST_STORED = 2**26
"""Bytes of updates above which the server of a network streams if it can, whatever its memory.

These are 64 MiB. With fewer the memory does not matter, and the run has the same results as a
simulation, bit by bit.
"""

EXPECTED_CLIENTS = 100
"""Smallest number of clients that the server of a network assumes to choose whether it streams.

Further clients may join during the run.
"""

_log = logging.getLogger(__name__)


class StreamChoice:
    """Whether the server of a run streams, which may begin during a run of a network.

    Parameters
    ----------
    active
        Whether the server streams now.
    decide
        Function that returns whether a server with a number of clients should stream; None if the
        choice never changes. A server that streams never stops doing so.
    """

    def __init__(self, active: bool, decide: Callable[[int], bool] | None = None) -> None:
        self.active = active
        self._decide = None if active else decide
        self._most = 0  # the largest number of clients so far

    def begins(self, clients: int) -> bool:
        """Return whether the server begins to stream now, since it has this number of clients."""
        if self._decide is None or clients <= self._most:
            return False
        self._most = clients
        if not self._decide(clients):
            return False
        self.active = True
        self._decide = None
        return True


def choose_network_stream(
    settings: RunSettings,
    algorithm: Algorithm,
    *,
    joined: int,
    bytes_each: int,
    budget: int,
    may_change: bool,
) -> StreamChoice:
    """Choose whether the server of a network streams, now and when more clients have joined.

    Parameters
    ----------
    settings, algorithm, joined, bytes_each, budget
        As in :func:`decide_network_stream`. The settings of a continued run state whether it
        streamed before.
    may_change
        Whether the choice may change during the run: the user has set ``stream`` to ``auto``.
    """
    auto = replace(settings, stream="auto")

    def decide(clients: int) -> bool:
        return decide_network_stream(auto, algorithm, clients, bytes_each, budget)

    now = decide_network_stream(settings, algorithm, joined, bytes_each, budget)
    return StreamChoice(now, decide if may_change else None)


def decide_network_stream(
    settings: RunSettings, algorithm: Algorithm, joined: int, bytes_each: int, budget: int
) -> bool:
    """Decide whether the server of a network streams.

    With ``stream = "auto"``, it streams if the algorithm, the signatures and the aggregation rule
    permit it, and the updates of :data:`EXPECTED_CLIENTS` clients, or of those that have joined if
    they are more, take more than :data:`LARGEST_STORED` bytes. A run that leaves out updates that
    oppose others compares single updates, so it streams only above the limit of a simulation.

    Parameters
    ----------
    settings, algorithm, budget
        As in :func:`decide_stream`.
    joined
        Number of clients that have joined.
    bytes_each
        Size of an update, in bytes.
    """
    compares = settings.aggregate.looks_for_opposed(
        untrusted=True, clients_choose=algorithm.requires.clients_choose
    )
    is_large = max(joined, EXPECTED_CLIENTS) * bytes_each > LARGEST_STORED
    whenever_possible = is_large and not compares
    return decide_stream(settings, algorithm, joined * bytes_each, budget, remote=whenever_possible)


def decide_stream(
    settings: RunSettings, algorithm: Algorithm, size: int, budget: int, remote: bool = False
) -> bool:
    """Decide whether a run streams.

    The server of a run that streams adds up updates as they arrive, and stores no single update.

    Parameters
    ----------
    settings
        Settings of the run, whose ``stream`` is True, False or ``auto``.
    algorithm
        The algorithm of the run, which may need the updates of single clients.
    size
        Size of the updates of all clients together, in bytes.
    budget
        Memory that the run may occupy, in bytes.
    remote
        Whether updates are computed by Ray actors, or are large and come over a network. With
        ``auto``, the run then streams whenever the algorithm, the signatures and the aggregation
        rule permit it.
    """
    if settings.is_central:
        return True
    if settings.stream != "auto":
        return settings.stream
    needs_updates = algorithm.requires.updates or settings.aggregate.is_robust
    needs_updates |= settings.aggregate.leave_out_opposed is True
    if needs_updates or (size <= budget // SHARE_OF_UPDATES and not remote):
        return False
    can = settings.signature.kind != "full" or not algorithm.requires.signatures
    if not can and size > budget // SHARE_OF_UPDATES:
        _log.warning(
            "the updates of all clients take %.1f GB of memory, but the run is limited to %.1f GB; "
            "with signature.kind = 'projected' and signature.dim = 4096 the server would sum "
            "updates and store none of them",
            size / 1e9,
            budget / 1e9,
        )
    return can


# Target score of a run.


def target_of(settings: RunSettings, task: FittedTask) -> tuple[str, float] | None:
    """Return the run's target: the name of a metric, and the score to reach by it.

    The result is None if the settings have no target.

    Raises
    ------
    ConfigError
        If several metrics are named, the task lacks the named metric, or the score is out of range.
    """
    if settings.target is None:
        return None
    given = (
        settings.target
        if isinstance(settings.target, Mapping)
        else {task.metrics[0].name: settings.target}
    )
    if not given:
        return None
    if len(given) > 1:
        raise ConfigError(f"[target] should name only one metric, got {', '.join(given)}")
    ((name, score),) = given.items()
    known = {metric.name: metric for metric in task.metrics}
    if name not in known:
        raise ConfigError(
            f"{unknown('metric in [target]:', name, known)}; to use another metric, add it to "
            "task.metrics"
        )
    if known[name].share:
        require((f"target.{name}", score, 0 < score <= 1, "greater than 0 and at most 1"))
    return name, float(score)


Maker = Callable[[int], nn.Module]
"""Function that makes a module whose initial parameters depend on a seed only."""


def model_name(model: nn.Module | str | Maker, seed: int) -> str:
    """Return the name of a model for a run's config: its given name, or the name of its class."""
    if isinstance(model, str):
        return model
    return type(model if isinstance(model, nn.Module) else _call_maker(model, seed)).__name__


def initial_models(
    model: nn.Module | str | Maker,
    schema: DataSpec,
    seed: int,
    algorithm: Algorithm,
    budget: int | None = None,
    parts: Parts | None = None,
) -> tuple[nn.Module, Tensor]:
    """Build the module of a run and its initial models, drawn from the run's seed.

    Each initial model after the first is drawn from a separate seed. If ``model`` is a module, the
    returned module is a copy.

    Parameters
    ----------
    model
        Name of a model, a module, or a function that makes a module from a seed.
    schema
        Inputs and outputs of the data.
    seed
        Seed of the run.
    algorithm
        The algorithm, which defines the number of initial models.
    budget
        Bytes of memory that the models may occupy; None for no limit.
    parts
        Frozen, personal and common parts of the model, and adapters; none if left out.

    Returns
    -------
    tuple
        The module; and the initial model as a vector ``[S]`` of S entries, or several as the rows
        of ``[initial_models, S]``. The entries are not permuted.

    Raises
    ------
    ConfigError
        If the model's name is unknown, several initial models are needed but the given model is a
        module, or the models take more bytes than the ``budget``.
    """
    parts = parts or Parts()
    module = make_module(model, schema, seed, parts)
    note_unsent_buffers(module, schema)
    first = (layout := parts.layout(module)).flatten(module)
    count = algorithm.requires.initial_models
    if count == 1:
        return module, first
    if isinstance(model, nn.Module):
        raise ConfigError(
            f"{type(algorithm).__name__} starts from {count} different models, "
            "but the given module is only one model; pass the model's name, or a function that "
            "makes a module from a seed"
        )
    if parts.adapter is not None and not parts.adapter.train:
        raise ConfigError(
            f"{type(algorithm).__name__} starts from {count} different models, "
            "but models that differ only in LoRA adapters all start equal, since the matrix B of "
            "an adapter is initialized to zero; name further layers to train, such as the head, in "
            "model.adapter.train"
        )
    needed = count * first.numel() * first.itemsize
    if budget is not None and needed > budget:
        raise ConfigError(
            f"{type(algorithm).__name__} starts from {count} models, which take "
            f"{needed / 1e9:.1f} GB, but the run is limited to {budget / 1e9:.1f} GB; use fewer "
            "models, or raise the setting memory"
        )
    seeds = (rng.torch_seed(seed, "initial model", number) for number in range(1, count))
    others = (layout.flatten(make_module(model, schema, each, parts)).to(first) for each in seeds)
    return module, torch.stack([first, *others])


def make_module(
    model: nn.Module | str | Maker, schema: DataSpec, seed: int, parts: Parts
) -> nn.Module:
    """Build the module of a run, with its frozen parameters and adapters.

    If ``model`` is a module, the result is a copy. See :func:`initial_models` for the parameters.
    """
    if isinstance(model, str):
        module = module_for(model, schema, seed)
    elif isinstance(model, nn.Module):
        check_module(model)  # before it is copied, which can fail for the same reason
        module = copy.deepcopy(model)
    else:
        module = _call_maker(model, seed)
    return unpack_inputs(parts.applied(module, seed), schema.structure)


def _call_maker(make: Maker, seed: int) -> nn.Module:
    """Call a user's function that makes a module from a seed, and check the type of its result."""
    try:
        module: Any = make(seed)
    except FedcladeError:
        raise
    except Exception as error:
        raise ModelError(
            f"making the model from seed {seed} failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(module, nn.Module):
        raise ModelError(
            "the function that makes the model should return a torch.nn.Module, got "
            f"{type(module).__name__}"
        )
    return module


def module_for(
    name: str, schema: DataSpec, seed: int, arguments: Mapping[str, Any] | None = None
) -> nn.Module:
    """Build a model by its name, with inputs and outputs that fit the data.

    See :func:`fedclade.models.build_model` for the names and ``arguments``.
    """
    return build_model(
        name,
        input_shape=schema.input_shape,
        outputs=schema.outputs,
        task=schema.task,
        vocabulary_size=schema.vocabulary_size,
        seed=seed,
        arguments=arguments,
    )
