"""Training of a block of clients: a group of clients that train at the same time.

An engine trains the block; if it cannot, the loop does. The module also scales up updates that
are trained on a part of a client's data.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from fedclade.core import (
    STEPS_TAKEN,
    ClientTrainer,
    ConfigError,
    FunctionTrainer,
    Layout,
    LocalRule,
    LocalTraining,
    Made,
    Round,
    SplitPart,
    TrainQuery,
    make_usable,
    trainer_function,
    trainer_name,
)
from fedclade.data import Federation
from fedclade.tasks import FittedTask
from fedclade.training.auto import ChosenEngine
from fedclade.training.batch_rule import BatchRule
from fedclade.training.jobs import (
    CannotTrainTogether,
    Engine,
    Job,
    PrivateSteps,
    Workload,
    full,
    generator_of,
)
from fedclade.training.loop import LoopEngine
from fedclade.training.memory import MODULE_ERRORS, model_error
from fedclade.training.stages import Trained
from fedclade.training.store import ClientStore, Start, WholeModels
from fedclade.training.threads import threads_of_step, using_threads

# Scaling of updates that are trained on a part of a client's data, if that lowers the loss on the
# part.

JUDGED = 256
"""Largest number of examples of a part on which the loss decides whether an update is scaled."""


def stretch(work: Workload, moved: Tensor, times: float, chunk: int) -> None:
    """Scale updates ``[n, S]`` from parts of clients' data in place, if that lowers the loss.

    A part is a subset of a client's data. Training on a part takes as many steps as training on all
    data of the client, but with smaller batches, and its update has a smaller norm. Since a scaled
    update may overshoot, it replaces the original update only if it gives a lower loss on some
    examples of the same part. The decision uses no other part of the data, so the updates of
    different parts remain comparable. The loss is computed in evaluation mode.

    Parameters
    ----------
    work
        Training of n parts of clients' data, each with the model from which it starts.
    moved
        Updates of the parts, ``[n, S]``. Only parameters are scaled, not buffers.
    times
        Factor by which the parameters of an update are multiplied.
    chunk
        Number of examples in a forward pass.
    """
    parameters = slice(work.layout.n_parameters)
    for update, job in zip(moved, work.jobs, strict=True):
        start = work.models[job.row]
        longer = update.clone()
        longer[parameters] *= times
        batches = _draw_examples(job, chunk)
        with using_threads(threads_of_step(work.module, batches[0][0], len(batches[0][1]))):
            if _compute_loss(work, start + longer, batches) < _compute_loss(
                work, start + update, batches
            ):
                update.copy_(longer)


def _draw_examples(job: Job, chunk: int) -> list[tuple[Tensor, Tensor]]:
    """Return up to 256 random examples of a job, in batches of ``chunk`` examples.

    Examples may be sorted by label, so the first ones would not be representative. The function
    creates its own random generator: if it used the job's generator, the order of the training
    batches would change.
    """
    generator = torch.Generator().manual_seed(job.generator.initial_seed() + 1)
    places = torch.randperm(job.size, generator=generator)[:JUDGED].to(job.targets.device)
    return [(job.inputs[some], job.targets[some]) for some in places.split(chunk)]


def _compute_loss(work: Workload, model: Tensor, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the total loss of a model, given as a parameter vector, on batches of examples."""
    work.layout.load(model, work.module)
    work.module.eval()
    with torch.no_grad():
        return sum(float(work.task.total_loss(full(work.module(x)), y)) for x, y in batches)


# Training of a block.


@dataclass(frozen=True, eq=False)
class Block:
    """Clients that train at the same time, with the models from which they start.

    Parameters
    ----------
    clients
        The k clients, with the examples on which they train.
    models
        Whole models as parameter vectors, ``[m, F]``.
    rows
        For each client, the row of the model from which it starts, ``[k]``.
    anchors
        For each client, the row of the model to which the proximal term pulls, ``[k]``; None for
        the model from which the client starts.
    """

    clients: Sequence[Trained]
    models: Tensor
    rows: Sequence[int]
    anchors: Sequence[int | None]

    def each(self) -> Iterable[Block]:
        """Yield a block for each client of this block."""
        for client, row, anchor in zip(self.clients, self.rows, self.anchors, strict=True):
            yield Block([client], self.models, [row], [anchor])

    def starting_from(self, models: Tensor) -> Block:
        """Return the block with other models from which the k clients start, ``[k, F]``.

        The anchors, to which the proximal term pulls, stay unchanged.
        """
        k = len(self.clients)
        anchored = [place for place, anchor in enumerate(self.anchors) if anchor is not None]
        if not anchored:
            return replace(self, models=models, rows=range(k))
        rows_of_anchors = [self.anchors[place] for place in anchored]
        anchors: list[int | None] = [None] * k
        for number, place in enumerate(anchored):
            anchors[place] = k + number
        together = torch.cat([models, self.models[rows_of_anchors]])
        return replace(self, models=together, rows=range(k), anchors=anchors)


@dataclass(frozen=True)
class Settings:
    """Settings of one training of a block of clients.

    Parameters
    ----------
    round
        The round, which determines the random numbers.
    local
        Settings of local training.
    rule
        Local rule that replaces plain steps; None for plain steps.
    trainer
        A user's own code that replaces plain steps; None for plain steps, or for the code that the
        settings of local training name.
    state
        Prefix of the names under which the states of optimizers or local rules are stored. None:
        training starts with a new optimizer, whose state is not stored.
    fixed
        Names of parameters that are not trained.
    longest
        Factor by which an update from a part of a client's data may be scaled, see
        :attr:`~fedclade.core.SplitPart.longest`; 1 for no scaling.
    """

    round: Round
    local: LocalTraining
    rule: LocalRule | None = None
    trainer: ClientTrainer | None = None
    state: str | None = None
    fixed: frozenset[str] = frozenset()
    longest: float = 1.0


@dataclass(frozen=True, eq=False)
class BlockTraining:
    """Training of blocks of clients by an engine, or by the loop if the engine cannot.

    Parameters
    ----------
    federation
        The clients.
    module, layout, task
        The model, the layout of the whole model, and the loss.
    engine
        The engine. A block that the engine cannot train is trained by the loop.
    batch_rule
        Rule for the smallest batches on which the model can train.
    store
        State that clients store between rounds.
    private
        Settings of DP-SGD; None for plain steps.
    always_replies
        Whether every client replies to every query, see
        :class:`~fedclade.training.SimulatedClients`.
    chunk
        Number of examples in a forward pass without gradients.
    log
        Logger for warnings.
    returns_memory
        Whether the engine ``loop`` returns the memory of large gradients to the system, see
        :class:`~fedclade.training.jobs.Workload`.
    """

    federation: Federation
    module: nn.Module
    layout: Layout
    task: FittedTask
    engine: ChosenEngine
    batch_rule: BatchRule
    store: ClientStore
    private: PrivateSteps | None
    always_replies: bool
    chunk: int
    log: logging.Logger
    returns_memory: bool = False
    #: steps that a user's own code has taken since they were last read, by client id
    taken: dict[int, int] = field(default_factory=dict[int, int], init=False)
    _warned: set[str] = field(default_factory=set[str], init=False)

    def train(
        self,
        block: Block,
        settings: Settings,
        *,
        out: Tensor | None = None,
        weights: Mapping[int, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Train the clients of a block, and return their updates.

        Parameters
        ----------
        block
            The block of k clients.
        settings
            Settings of the training.
        out
            Memory for the updates, ``[k, F]``; None for new memory.
        weights
            Weights of each client's examples, ``[n_i]``, by client id; None if all weigh 1.

        Returns
        -------
        tuple
            Updates ``[k, F]`` and mean losses, float64 ``[k]``.

        Raises
        ------
        ModelError
            If the model fails on a client's data.
        """
        try:
            try:
                return self._train_by(self.engine, block, settings, out=out, weights=weights)
            except CannotTrainTogether as reason:
                # The engine could train the clients of its trial, but not all clients of the block.
                self._warn_once(reason)
                return self._train_by(LoopEngine(), block, settings, out=out, weights=weights)
        except ConfigError:  # the user named an engine that cannot train the model
            raise
        except MODULE_ERRORS as error:
            one_by_one = (
                (alone.clients[0][0], self._workload(alone, settings)) for alone in block.each()
            )
            raise model_error(
                error,
                one_by_one,
                self.federation,
                number=settings.round.number,
                engine=self.engine.name,
                train=lambda work: self.batch_rule.train(LoopEngine(), work),
            ) from error

    def _train_by(
        self,
        engine: Engine,
        block: Block,
        settings: Settings,
        *,
        out: Tensor | None,
        weights: Mapping[int, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        """Train a block by an engine, with the states that clients store, and scale the updates."""
        work = self._workload(block, settings).weighted(weights or {})
        if settings.state is None:
            # A change of the settings repeats their checks, so they are changed only if needed.
            if work.spec.keep_state:
                work = replace(work, spec=replace(work.spec, keep_state=False))
            moved, losses = self.batch_rule.train(engine, work, out)
            if self.always_replies:
                make_usable(moved, losses)
        else:
            number = settings.round.number
            work = self.store.with_states(work, number, settings.state)
            moved, losses = self.batch_rule.train(engine, work, out)
            if self.always_replies:
                make_usable(moved, losses)
                _make_states_finite(work)
            self.store.keep_states(work, number, settings.state, deltas=moved, losses=losses)
        self.taken.update(work.taken)
        # The loss on examples decides about scaling, which would reveal something about the
        # examples without noise, so updates by DP-SGD are not scaled.
        if settings.longest > 1 and self.private is None:
            stretch(work, moved, settings.longest, self.chunk)
        return moved, losses

    def _workload(self, block: Block, settings: Settings) -> Workload:
        """Return the workload of an engine for a block of clients."""
        this_round = settings.round
        jobs: list[Job] = []
        for (client, inputs, targets), row, anchor in zip(
            block.clients, block.rows, block.anchors, strict=True
        ):
            generator = generator_of(this_round, self.federation.keys[client], self.private)
            job = Job(client, row, inputs, targets, generator=generator, anchor=anchor)
            jobs.append(job)
        return Workload(
            self.module,
            self.layout,
            block.models,
            jobs,
            spec=settings.local.with_smallest_batch(self.batch_rule.smallest),
            lr=settings.local.lr_at(this_round.number),
            task=self.task,
            fixed=settings.fixed,
            rule=settings.rule,
            trainer=_find_trainer(settings),
            number=this_round.number,
            private=self.private,
            returns_memory=self.returns_memory,
        )

    def _warn_once(self, reason: CannotTrainTogether) -> None:
        """Log that an engine cannot train some clients together, once for each reason."""
        warning = (
            f"engine {self.engine.name} cannot train some clients together: {reason}; "
            "these clients are trained by engine loop"
        )
        if warning not in self._warned:
            self.log.warning(warning)
            self._warned.add(warning)
            self.engine.fallback = f"loop for some clients, because {reason}"


class BlockTrainer:
    """Object by which a method's own steps train one block of clients in one round.

    A method defines its steps in :meth:`Steps.run <fedclade.core.Steps.run>`, and receives this
    object as the argument: each call of :meth:`train` trains all clients of the block once. The
    class implements the protocol :class:`~fedclade.core.Trainer`.

    Parameters
    ----------
    training
        Executes the local training, for any block and any round.
    whole
        Assembles the clients' whole models from the shared and the personal part.
    query
        The training query of the round.
    clients
        The clients of the block, with the examples on which they train.
    start
        Models from which the clients start.
    out
        Memory for the updates of the first training, ``[k, F]``; None for new memory.
    """

    def __init__(
        self,
        training: BlockTraining,
        whole: WholeModels,
        query: TrainQuery,
        clients: Sequence[Trained],
        *,
        start: Start,
        out: Tensor | None = None,
    ) -> None:
        self._training = training
        self._whole = whole
        self._query = query
        self._start = start
        self._block = Block(clients, start.models, start.rows, start.anchors)
        self._out = out
        self.local = query.local

    @property
    def models(self) -> Tensor:
        """Whole models from which the k clients of the block start, ``[k, F]``."""
        return self._block.models[list(self._block.rows)]

    @property
    def ids(self) -> Sequence[int]:
        """Ids of the clients of the block."""
        return [client for client, *_ in self._block.clients]

    @property
    def anchors(self) -> Tensor:
        """Models to which the proximal term pulls each client, ``[k, F]``.

        A client without an anchor is pulled to the model from which it starts.
        """
        rows: list[int] = []
        for row, anchor in zip(self._block.rows, self._block.anchors, strict=True):
            rows.append(row if anchor is None else anchor)
        return self._block.models[rows]

    @property
    def personal_names(self) -> frozenset[str]:
        """Names of the personal parameters and buffers, which stay with each client."""
        return self._whole.personal_names

    @property
    def shared_names(self) -> frozenset[str]:
        """Names of the parameters that clients share with the server."""
        return self._whole.shared_names

    @property
    def last_layer_names(self) -> frozenset[str]:
        """Names of the parameters of the last layer that is trained."""
        return self._whole.last_layer_names

    def train(
        self,
        local: LocalTraining | None = None,
        *,
        models: Tensor | None = None,
        draws: str = "",
        fixed: frozenset[str] = frozenset(),
        stretches: bool = True,
    ) -> Made:
        """Train all clients of the block once; a method's steps may call this method several times.

        The parameters are described in :class:`~fedclade.core.Trainer`.
        """
        this_round = self._query.round
        if draws:
            this_round = replace(this_round, purpose=f"{this_round.purpose} {draws}")
        data = self._query.work.data
        steps = self._query.work.steps
        max_scale = 1.0
        if stretches and isinstance(data, SplitPart):
            max_scale = data.longest
        settings = Settings(
            this_round,
            self.local if local is None else local,
            rule=steps if isinstance(steps, LocalRule) else None,
            trainer=steps if isinstance(steps, ClientTrainer) else None,
            state=self._start.optimizer,
            fixed=fixed,
            longest=max_scale,
        )
        block = self._block
        if models is not None:
            block = block.starting_from(models)
        # Another training of the block must not overwrite the updates of the first.
        out = self._out
        self._out = None
        moved, losses = self._training.train(block, settings, out=out)
        taken = [self._training.taken.pop(client, None) for client in self.ids]
        counts = [steps for steps in taken if steps is not None]
        # The updates of several parts of a client's data are combined without further columns.
        if len(counts) < len(taken) or isinstance(data, SplitPart):
            return Made(moved, losses)
        return Made(moved, losses, columns={STEPS_TAKEN: torch.tensor(counts)})

    def stored(self, name: str) -> Sequence[Tensor | None]:
        """Return the tensor that each client had stored under a name before the round.

        The result is None for a client that had not stored such a tensor.
        """
        store = self._training.store
        number = self._query.round.number
        return [store.before(number, client).get(name) for client in self.ids]

    def keep_part(self, part: Literal["personal", "shared"], vectors: Tensor) -> Tensor:
        """Return a copy of vectors ``[k, F]`` with zeros outside one part of the model.

        The part is ``personal`` or ``shared``.
        """
        return self._whole.only(part, vectors)

    def keep_last_layer(self, vectors: Tensor) -> Tensor:
        """Return a copy of vectors ``[k, F]`` with zeros outside the parameters of the last layer."""
        return self._whole.only_last_layer(vectors)


def _find_trainer(settings: Settings) -> ClientTrainer | None:
    """Return the user's own code that trains the clients; None if no such code is set.

    Raises
    ------
    ConfigError
        If the settings of local training name a function, and the algorithm has steps of its own.
    """
    function = settings.local.trainer
    if function is None:
        return settings.trainer
    for steps in (settings.rule, settings.trainer):
        if steps is not None:
            raise ConfigError(
                f"local.trainer should be left out with an algorithm whose clients take steps of "
                f"its own ({type(steps).__name__}), got {trainer_name(function)!r}"
            )
    return FunctionTrainer(trainer_function(function))


def _make_states_finite(work: Workload) -> None:
    """Replace NaN and infinity by finite numbers in the states of optimizers that clients store.

    A state that is not finite would not be stored. For a client with differential privacy, a
    missing state would reveal something about its data.
    """
    for job in work.jobs:
        state = work.states.get(job.client, {})
        work.states[job.client] = {name: tensor.nan_to_num() for name, tensor in state.items()}
