"""Clients of a federation that are simulated in this process.

The module implements the protocol :class:`~fedclade.core.Workers`, by which algorithms send
training, evaluation and data queries to clients.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from fedclade.core import (
    OWN_COLUMNS,
    ConfigError,
    DataQuery,
    Evaluation,
    EvaluationQuery,
    Indices,
    Layout,
    R,
    Sink,
    TrainQuery,
    Updates,
    Workers,
    make_usable,
)
from fedclade.data import Federation
from fedclade.tasks import FittedTask, Task
from fedclade.training import loop
from fedclade.training.auto import build_engine
from fedclade.training.batch_rule import BatchRule, check_examples_alone
from fedclade.training.blocks import BlockTrainer, BlockTraining
from fedclade.training.data import ClientsData, augmented
from fedclade.training.evaluation import Evaluator
from fedclade.training.input_hooks import with_input_hooks
from fedclade.training.jobs import PrivateSteps, check_private
from fedclade.training.local_data import SimulatedData
from fedclade.training.loss_check import try_loss
from fedclade.training.memory import Blocks, check_model_fits, default_memory
from fedclade.training.mixtures import Mixtures
from fedclade.training.stages import Stages
from fedclade.training.store import ClientStore, WholeModels

MODELS_AT_A_TIME = 8
"""Divisor of the memory that gives the share for whole models of clients in an evaluation.

Whole models are assembled for evaluation only if clients have personal parameters or own models.
"""

_log = logging.getLogger(__name__)


class SimulatedClients(Workers):
    """Clients of a federation that are trained and evaluated in this process.

    Parameters
    ----------
    federation
        The clients and their data.
    module
        The model's structure. Queries specify the values of all parameters except for personal
        parameters, whose first values are those of the module.
    device
        ``cpu`` or ``cuda``.
    engine
        The engine that trains the clients: one of :data:`~fedclade.training.ENGINES`. All engines
        give the same updates, up to rounding.
    memory
        Bytes that the data and the training of a round may take; by default a quarter of the
        machine's or the GPU's memory. The memory limits how many clients train at the same time,
        and does not change results.
    resolved
        The value of :attr:`engine_taken` in the earlier part of a run that is continued; None for a
        new run.
    task
        The loss and the metrics; None for the default task of the data.
    personal
        Patterns over the names of personal parameters and buffers, which stay with each client, see
        :meth:`fedclade.core.Layout.of`. For all clients, these parameters first have the module's
        values.
    private
        Settings of DP-SGD for all local training; None for plain training. Models that clients do
        not share are trained by DP-SGD as well, since later replies depend on these models.
    always_replies
        Whether every client replies to every training query. An update that is not finite is
        replaced by zeros, an update that is too long is shortened, and losses are left out. Clients
        with differential privacy need this: a missing reply, and its reason, would reveal something
        about the data without any noise.
    returns_memory
        Whether the engine ``loop`` returns the memory of large gradients to the system, see
        :class:`~fedclade.training.jobs.Workload`.

    Raises
    ------
    ConfigError
        If the engine is unknown, or a pattern matches nothing; if a user's own loss fails on some
        examples, or gives losses that depend on other examples of the batch although it is not
        declared as a loss over the batch; if training uses DP-SGD, and the module mixes examples,
        the loss is over the batch, or the data changes during a run.
    ModelError
        If the module fails on the federation's inputs, cannot be trained on them, or gives a number
        of outputs that differs from the number of labels.
    """

    def __init__(
        self,
        federation: Federation,
        module: nn.Module,
        device: str = "cpu",
        engine: str = "auto",
        memory: int | None = None,
        resolved: str | None = None,
        task: FittedTask | None = None,
        personal: Sequence[str] = (),
        private: PrivateSteps | None = None,
        always_replies: bool = False,
        returns_memory: bool = False,
    ) -> None:
        self._federation = federation
        self._always_replies = always_replies
        self._device = torch.device(device)
        module = augmented(module.to(self._device), federation.augment, federation.pool.structure)
        self.layout = Layout.of(module, personal)
        self._module = module = with_input_hooks(
            module, self.layout, federation, self._device, task
        )
        self.store = ClientStore()
        self.whole = WholeModels(self.layout, self.layout.flatten_personal(module), self.store)
        pool = federation.pool
        self._chunk = loop.chunk(pool.outputs_each)
        fitted = task
        if fitted is None:
            fitted = Task().of(pool.schema)
        check_model_fits(module, federation, self._device, fitted)
        try:
            self._task = try_loss(fitted, module, federation, self._device)
        except ConfigError as error:
            if not always_replies:
                raise
            # The message quotes losses, which a private client must not send to a server.
            _log.error("%s", error)
            raise ConfigError(
                f"task.loss = {fitted.loss_name} does not fit the model, or gives losses that "
                "depend on the other examples of a batch; see the log of the client for details"
            ) from None
        if self._task.over_batch:  # a loss over the batch cannot be computed in chunks
            self._chunk = max(self._chunk, len(pool.y))
        if private is not None:
            check_private(module, self.layout.full, federation, self._task)
        checks = not always_replies
        self._batch_rule = BatchRule.of(
            module, self.layout.full, federation, self._device, checks=checks
        )
        if private is not None:
            check_examples_alone(module, self._batch_rule)
        self._engine = build_engine(engine, resolved)
        self._private = private
        if memory is None:
            memory = default_memory(self._device)
        self._memory = memory

        def build_evaluator(federation: Federation, data: ClientsData) -> Evaluator:
            return Evaluator(federation, self._module, self.layout.full, data=data, task=self._task)

        self._stages = Stages(
            federation, self._device, self._memory // 2, build_evaluator, alone=private is not None
        )
        self._blocks = Blocks(
            federation, self._module, self.layout.full, stages=self._stages, memory=self._memory
        )
        self._mixtures = Mixtures(self.store, self.layout, pool.schema.labels)
        self._training = BlockTraining(
            federation=federation,
            module=module,
            layout=self.layout.full,
            task=self._task,
            engine=self._engine,
            batch_rule=self._batch_rule,
            store=self.store,
            private=private,
            always_replies=always_replies,
            chunk=self._chunk,
            log=_log,
            returns_memory=returns_memory,
        )

    @property
    def engine(self) -> str:
        """Name of the engine that trains; ``auto`` until the first round has chosen an engine."""
        return self._engine.name

    @property
    def engine_taken(self) -> str | None:
        """Name of the engine that trains, with its form; None before the first round.

        The form is, for example, the engine inside worker processes. Rounding depends on the
        engine, so a run that is continued uses the same engine again.
        """
        return self._engine.resolved

    @property
    def engine_fallback(self) -> str | None:
        """Engine that trains in place of a faster one, and the reason; None if there is none."""
        return self._engine.fallback

    @property
    def module(self) -> nn.Module:
        """The model's structure; the values of its parameters are arbitrary."""
        return self._module

    @property
    def smallest_batch(self) -> int:
        """Number of examples in the smallest batch on which the model can be trained: 1 or 2."""
        return self._batch_rule.smallest

    @property
    def ids(self) -> Sequence[int]:
        """Ids of all clients, in a fixed order."""
        return self._federation.ids

    @property
    def sizes(self) -> Mapping[int, int]:
        """Number of training examples of each client, by client id.

        If the data changes during the run, the numbers are those in the latest stage of the data
        that a query has used so far.
        """
        return self._stages.now.federation.sizes

    @property
    def undivided(self) -> Collection[int]:
        """Ids of the clients whose training examples cannot be divided into parts."""
        if self._private is not None:
            return frozenset()  # each example is then assigned to a part by itself
        return self._stages.now.federation.undivided

    @property
    def kept(self) -> dict[int, dict[str, Tensor]]:
        """Tensors of each client's deployed model that the client stores, by client id and name.

        The tensors are personal parameters ``[P]``, whole models ``[F]`` of clients, and weights of
        mixtures ``[K]``.
        """
        return self.whole.kept(self.ids)

    def handle_updates(self, query: TrainQuery, sink: Sink | None = None) -> Updates:
        """Let each client of a training query train, and return the updates.

        Updates that have diverged are left out. All simulated clients reply at the same time, so
        ``sink``, which would receive single replies early, is not used.

        Raises
        ------
        ModelError
            If the model fails on a client's data.
        """
        if query.work.is_gradient:
            return self._gradients(query)
        if query.work.mixture is not None:
            return self._trained_mixture(query)
        ids = query.ids
        held = self._stages.of(query)
        size = self.layout.size if query.work.sends_update else 0
        deltas = torch.empty(len(ids), size, dtype=self.layout.dtype, device=self._device)
        losses = torch.empty(len(ids), dtype=torch.float64)
        sizes = self._stages.sizes(query, held)
        blocks = self._blocks.of(sizes, query, held)
        # If clients store no part of the model and send all of it, the engine writes the updates
        # directly to the result.
        out: Tensor | None = None
        if len(blocks) == 1:
            blocks = [range(len(ids))]  # the clients of the only block are in the query's order
            if self.whole.sends_all(query.work):
                out = deltas
        columns: list[Mapping[str, Tensor]] = []
        for places in blocks:
            start = self.whole.start(query, places)
            trainer = BlockTrainer(
                self._training,
                self.whole,
                query,
                self._stages.trained(query, places, held),
                start=start,
                out=out,
            )
            made = query.work.steps.run(trainer)
            sent = self.whole.settle(query, places, start, made)
            if sent is not out:
                deltas[places] = sent
            losses[places] = made.losses
            columns.append(made.columns)
        updates = self._received(query, sizes, deltas, losses)
        return _with_columns(updates, query, blocks, columns)

    def _trained_mixture(self, query: TrainQuery) -> Updates:
        """Let each client train all models of a mixture (FedEM), and return the updates."""
        models = len(query.models.vectors)
        held = self._stages.of(query)
        sizes = self._stages.sizes(query, held)
        clients = self._stages.trained(query, range(len(query.ids)), held)
        blocks = self._blocks.of(sizes, query, held, models)
        deltas, losses, components = self._mixtures.trained(
            query, clients, blocks, evaluator=held.evaluator, training=self._training
        )
        updates = self._received(query, sizes, deltas, losses, models=models)
        component_of = dict(zip(query.ids, components.tolist(), strict=True))
        return updates.with_columns(
            components=torch.tensor([component_of[client] for client in updates.ids])
        )

    def _gradients(self, query: TrainQuery) -> Updates:
        """Return, as updates, the negative gradients of the clients' losses over all examples."""
        held = self._stages.of(query)
        gradients: list[Tensor] = []
        losses: list[float] = []
        for place, row in enumerate(query.models.start):
            client, inputs, targets = self._stages.trained(query, [place], held)[0]
            whole = self.whole.of(query.round, client, query.models.vectors[row])
            gradient, loss = loop.gradient(
                self._module,
                self.layout.full,
                whole,
                examples=(inputs, targets),
                task=self._task,
                chunk=self._chunk,
            )
            gradients.append(gradient)
            losses.append(loss)
        deltas, _ = self.layout.parted(torch.stack(gradients))
        sizes = self._stages.sizes(query, held)
        return self._received(query, sizes, deltas, torch.tensor(losses, dtype=torch.float64))

    def handle_evaluation(self, query: EvaluationQuery) -> Evaluation:
        """Let each client evaluate its model on a split of its own data.

        Raises
        ------
        DataError
            If a client has no examples in the split.
        """
        judge = self._stages.in_round(query.data_round).evaluator
        if query.mixture is not None:
            return self._mixtures.evaluated(query, judge)
        at_once = self._memory // (
            MODELS_AT_A_TIME * self.layout.full.size * self.layout.dtype.itemsize
        )
        parts = self.whole.evaluated(query, max(1, at_once))
        return Evaluation.concat([judge.evaluate(query, *part) for part in parts])

    def handle_data(self, query: DataQuery[R]) -> R:
        """Let each client compute its reply to a query about the client's own data."""
        held = self._stages.in_round(query.data_round or query.round_number)
        return query.answer_all(SimulatedData(held, self.whole, self._module, self.store))

    def _received(
        self, query: TrainQuery, sizes: Indices, deltas: Tensor, losses: Tensor, *, models: int = 1
    ) -> Updates:
        """Return the updates of a query, without updates that have diverged.

        Each client has trained ``models`` models. A client's update is the concatenation of the
        updates of these models.
        """
        keys = self._federation.keys
        if self._always_replies:
            make_usable(deltas, losses)
        trained = [
            len(query.examples(int(n), keys[client]))
            for client, n in zip(query.ids, sizes, strict=True)
        ]
        # Updates are ``[n, 0]`` if clients train models that they do not share.
        n_parameters = min(deltas.shape[1], models * self.layout.n_parameters)
        return Updates.received(
            query.ids,
            trained,
            deltas,
            n_parameters=n_parameters,
            losses=losses,
            number=query.round.number,
        )


def _with_columns(
    updates: Updates,
    query: TrainQuery,
    blocks: Sequence[Sequence[int]],
    columns: Sequence[Mapping[str, Tensor]],
) -> Updates:
    """Return updates with the columns (numbers for each client) that a method's steps add.

    Parameters
    ----------
    updates
        Updates of the clients whose training has not diverged.
    query
        The training query.
    blocks
        For each block of clients that trained at the same time, the positions of these clients in
        the query.
    columns
        For each block, the columns ``[k, ...]`` of its k clients, by name.
    """
    if not any(columns):
        return updates
    ids = [query.ids[place] for places in blocks for place in places]
    row_of = {client: row for row, client in enumerate(ids)}
    rows = [row_of[client] for client in updates.ids]
    together: dict[str, Tensor] = {}
    for name in columns[0]:
        if name in OWN_COLUMNS:
            raise ConfigError(
                f"the steps of a method cannot add a column named {name!r} to the updates, since "
                "the library uses this name; choose another name"
            )
        together[name] = torch.cat([of_block[name] for of_block in columns])[rows]
    return updates.with_columns(**together)
