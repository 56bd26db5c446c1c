"""Clients that are simulated in this process: the ``Clients`` protocol over a federation's data."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from fedclade.core import (
    ConfigError,
    DataQuery,
    Evaluation,
    EvaluationQuery,
    Indices,
    Layout,
    R,
    Round,
    UpdateQuery,
    Updates,
    Workers,
    make_usable,
)
from fedclade.data import Federation
from fedclade.tasks import FittedTask, Task
from fedclade.training import loop
from fedclade.training.auto import build_engine
from fedclade.training.batch_rule import BatchRule, check_examples_alone
from fedclade.training.data import ClientsData, augmented
from fedclade.training.evaluation import Evaluator
from fedclade.training.input_hooks import with_input_hooks
from fedclade.training.jobs import (
    CannotTrainTogether,
    Engine,
    Job,
    PrivateSteps,
    Workload,
    check_private,
    full,
    generator_of,
)
from fedclade.training.local_data import SimulatedData
from fedclade.training.loop import LoopEngine
from fedclade.training.loss_check import try_loss
from fedclade.training.memory import (
    MODULE_ERRORS,
    Blocks,
    check_model_fits,
    default_memory,
    model_error,
)
from fedclade.training.mixtures import Mixtures
from fedclade.training.stages import Stages, Trained
from fedclade.training.store import PERSONAL, ClientStore, Start, WholeModels
from fedclade.training.threads import threads_of_step, using_threads

# Scaling of updates from parts of a client's data, where that lowers the loss on the part.

JUDGED = 256
"""Largest number of examples of a part by whose loss a scaled update is accepted."""


def stretch(work: Workload, moved: Tensor, times: float, chunk: int) -> None:
    """Scale updates ``[n, S]`` of parts of the data in place, where that lowers the loss.

    A part takes as many steps as all data of the client would, but its batches are smaller, so the
    steps are shorter, and so is its update. A scaled update may overshoot, so it is accepted only
    if the loss on some of the part's own examples is lower than with the original update. The
    update therefore still depends on nothing but the part and the model from which it starts, and
    parts stay exchangeable. The loss is that of the model in evaluation mode.

    Parameters
    ----------
    work
        The parts and the models from which they start.
    moved
        Updates ``[n, S]``. Only parameters are scaled, not buffers.
    times
        The factor.
    chunk
        Number of examples in a forward pass.
    """
    parameters = slice(work.layout.n_parameters)
    for update, job in zip(moved, work.jobs, strict=True):
        start = work.models[job.row]
        longer = update.clone()
        longer[parameters] *= times
        batches = _drawn(job, chunk)
        with using_threads(threads_of_step(work.module, batches[0][0], len(batches[0][1]))):
            if _loss(work, start + longer, batches) < _loss(work, start + update, batches):
                update.copy_(longer)


def _drawn(job: Job, chunk: int) -> list[tuple[Tensor, Tensor]]:
    """Draw some of a job's examples, by a generator of its own.

    Examples may be sorted by label, so the first ones would not be representative. The job's
    generator orders its batches, so it is not used here.
    """
    generator = torch.Generator().manual_seed(job.generator.initial_seed() + 1)
    places = torch.randperm(job.size, generator=generator)[:JUDGED].to(job.targets.device)
    return [(job.inputs[some], job.targets[some]) for some in places.split(chunk)]


def _loss(work: Workload, model: Tensor, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    work.layout.load(model, work.module)
    work.module.eval()
    with torch.no_grad():
        return sum(float(work.task.total_loss(full(work.module(x)), y)) for x, y in batches)


Block = Sequence[tuple[Trained, int, int | None]]
"""Clients that train at the same time, with the row of the model and of the anchor of each.

The row of the anchor is None if the anchor is the model itself.
"""

MODELS_AT_A_TIME = 8
"""Divisor of the memory for models of clients that are evaluated with personal parameters."""

_log = logging.getLogger(__name__)


class SimulatedClients(Workers):
    """Clients of a federation that are trained in this process.

    Parameters
    ----------
    federation
        The clients and their data.
    module
        The model. Only its structure is used: every call specifies the parameters.
    device
        ``cpu`` or ``cuda``.
    engine
        The engine that trains them: one of :data:`~fedclade.training.ENGINES`. Updates do not
        depend on it beyond rounding.
    memory
        Bytes that the data and the training of a round may take; by default a quarter of the
        machine's or the GPU's memory. It determines how many clients train at the same time, and
        nothing else.
    resolved
        The engine of a run that is continued, see :attr:`engine_taken`.
    task
        The loss and the metrics; by default the data's own.
    personal
        Patterns over the names of parameters and buffers that stay with each client, see
        :meth:`fedclade.core.Layout.of`. All clients start from the module's values.
    private
        Settings of DP-SGD for all local training, or None. Training of models that clients do not
        share is private as well, since what they share later depends on them.
    always_replies
        Whether every client replies to every training query, with zeros in place of an update that
        is not finite, with a shorter update in place of one that is too long, and without losses.
        Clients with differential privacy do so: whether a reply is missing, and why, would reveal
        something about the data without any noise.

    Raises
    ------
    ConfigError
        If the engine is unknown, or a pattern matches nothing; if a user's own loss fails on some
        examples, or makes them depend on each other without being declared so; if training is
        private, and the module mixes examples, the loss is over the batch, or the data changes
        during a run.
    ModelError
        If the module does not take the federation's inputs, cannot be trained on them, or gives
        another number of outputs than there are labels.
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
    ) -> None:
        self._federation = federation
        self._always_replies = always_replies
        self._device = torch.device(device)
        module = augmented(module.to(self._device), federation.augment)
        self.layout = Layout.of(module, personal)
        self._module = module = with_input_hooks(module, self.layout, federation, self._device)
        self.store = ClientStore()
        self.whole = WholeModels(self.layout, self.layout.flatten_personal(module), self.store)
        pool = federation.pool
        self._chunk = loop.chunk(pool.outputs * (pool.y[0].numel() if len(pool.y) else 1))
        check_model_fits(module, federation, self._device)
        fitted = Task().of(federation.pool.schema) if task is None else task
        try:
            self._task = try_loss(fitted, module, federation, self._device)
        except ConfigError as error:
            if not always_replies:
                raise
            # The message quotes losses, which a private client must not send to a server.
            _log.error("%s", error)
            raise ConfigError(
                f"task.loss = {fitted.loss_name} does not fit the model, or lets examples depend "
                "on each other; the log of the client has the details"
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
        self._memory = default_memory(self._device) if memory is None else memory

        def judge(federation: Federation, data: ClientsData) -> Evaluator:
            return Evaluator(federation, self._module, self.layout.full, data, self._task)

        self._stages = Stages(
            federation, self._device, self._memory // 2, judge, alone=private is not None
        )
        self._blocks = Blocks(
            federation, self._module, self.layout.full, self._stages, self._memory
        )
        self._mixtures = Mixtures(self.store, self.layout, pool.schema.labels)
        self._warned: set[str] = set()

    @property
    def engine(self) -> str:
        """Name of the engine; ``auto`` until it has chosen, in the first round."""
        return self._engine.name

    @property
    def engine_taken(self) -> str | None:
        """Engine that trains, with the one inside worker processes; None before the first round.

        Rounding depends on it.
        """
        return self._engine.resolved

    @property
    def module(self) -> nn.Module:
        """The model's structure; its parameters have arbitrary values."""
        return self._module

    @property
    def smallest_batch(self) -> int:
        """Number of examples in the smallest batch on which the model can be trained."""
        return self._batch_rule.smallest

    @property
    def ids(self) -> Sequence[int]:
        """Ids of all clients, in a fixed order."""
        return self._federation.ids

    @property
    def sizes(self) -> Mapping[int, int]:
        """Number of training examples of each client, in the latest stage of any query so far."""
        return self._stages.now.federation.sizes

    @property
    def kept(self) -> dict[int, dict[str, Tensor]]:
        """Personal parameters ``[P]`` and models ``[F]`` that clients store, by client and name."""
        return self.whole.kept(self.ids)

    def handle_updates(self, query: UpdateQuery) -> Updates:
        """Let each client train its model, or compute a gradient; leave out updates that diverge.

        Raises
        ------
        ModelError
            If the model fails on a client's data.
        """
        if query.kind == "gradients":
            return self._gradients(query)
        return self._trained(query) if query.mixture is None else self._trained_mixture(query)

    def _trained(self, query: UpdateQuery) -> Updates:
        ids = query.ids
        held = self._stages.of(query)
        size = 0 if query.is_secret else self.layout.size
        deltas = torch.empty(len(ids), size, dtype=self.layout.dtype, device=self._device)
        losses = torch.empty(len(ids), dtype=torch.float64)
        sizes = self._stages.sizes(query, held)
        blocks = self._blocks.of(sizes, query.round, held)
        blocks = [range(len(ids))] if len(blocks) == 1 else blocks
        out = deltas if len(blocks) == 1 and not query.own and not self.layout.personal else None
        for places in blocks:
            start = self.whole.start(query, places)
            moved, mean_losses = self._moved(
                self._stages.trained(query, places, held), start, query.round, out
            )
            if out is None:
                deltas[places] = self.whole.settle(query, places, start, moved, mean_losses)
            losses[places] = mean_losses
        return self._received(ids, sizes, deltas, losses, query.round)

    def _trained_mixture(self, query: UpdateQuery) -> Updates:
        held = self._stages.of(query)
        sizes = self._stages.sizes(query, held)
        clients = self._stages.trained(query, range(len(query.ids)), held)
        blocks = self._blocks.of(sizes, query.round, held, len(query.models))
        deltas, losses, components = self._mixtures.trained(
            query, clients, blocks, held.evaluator, self._train_block
        )
        updates = self._received(query.ids, sizes, deltas, losses, query.round, len(query.models))
        component_of = dict(zip(query.ids, components.tolist(), strict=True))
        return replace(
            updates, components=torch.tensor([component_of[client] for client in updates.ids])
        )

    def _moved(
        self, clients: Sequence[Trained], start: Start, this_round: Round, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Train some clients; return the updates of their whole models, ``[k, F]``, and losses."""
        block = list(zip(clients, start.rows, start.anchors, strict=True))
        if this_round.personal_epochs == 0:
            return self._train_block(block, start.models, this_round, start.optimizer, out=out)
        own = frozenset(slot.name for slot in self.layout.personal)
        shared = frozenset(slot.name for slot in self.layout.full.parameters) - own
        spec = this_round.spec.in_epochs(this_round.personal_epochs)
        first = replace(
            this_round, spec=spec, longest=1.0, purpose=f"{this_round.purpose} personal"
        )
        moved, _ = self._train_block(block, start.models, first, start.optimizer, shared)
        # Buffers of the shared part have changed as well, and must not be kept.
        moved = self.whole.only(PERSONAL, moved)
        models = torch.cat([start.models[: len(block)] + moved, start.models[len(block) :]])
        then, losses = self._train_block(block, models, this_round, start.optimizer, own)
        return moved + self.whole.only("shared", then), losses

    def _gradients(self, query: UpdateQuery) -> Updates:
        held = self._stages.of(query)
        answers = list[tuple[Tensor, float]]()
        for place, row in enumerate(query.assignment):
            client, inputs, targets = self._stages.trained(query, [place], held)[0]
            whole = self.whole.of(query.round, client, query.models[row])
            of_client = whole, (inputs, targets), self._task, self._chunk
            answers.append(loop.gradient(self._module, self.layout.full, *of_client))
        deltas, _ = self.layout.parted(torch.stack([delta for delta, _ in answers]))
        losses = torch.tensor([loss for _, loss in answers], dtype=torch.float64)
        return self._received(
            query.ids, self._stages.sizes(query, held), deltas, losses, query.round
        )

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
        """Let each client reply to a query about its own data."""
        held = self._stages.in_round(query.data_round or query.round_number)
        return query.answer_all(SimulatedData(held, self.whole, self._module, self.store))

    def _train_block(
        self,
        block: Block,
        models: Tensor,
        this_round: Round,
        optimizer: str | None,
        fixed: frozenset[str] = frozenset(),
        out: Tensor | None = None,
        weights: Mapping[int, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        def trained_by(engine: Engine) -> tuple[Tensor, Tensor]:
            work = replace(self._workload(block, models, this_round), fixed=fixed).weighted(
                weights or {}
            )
            # Training for another purpose begins with a new optimizer, and its state is not stored.
            if optimizer is None:
                once = replace(work, spec=replace(work.spec, keep_state=False))
                moved, losses = self._batch_rule.train(engine, once, out)
                if self._always_replies:
                    make_usable(moved, losses)
            else:
                work = self.store.with_states(work, this_round.number, optimizer)
                moved, losses = self._batch_rule.train(engine, work, out)
                if self._always_replies:
                    make_usable(moved, losses)
                    _make_states_finite(work)
                self.store.keep_states(work, this_round.number, optimizer, moved, losses)
            # With DP-SGD, accepting a scaled update by the loss on examples would not be private.
            if this_round.longest > 1 and self._private is None:
                stretch(work, moved, this_round.longest, self._chunk)
            return moved, losses

        try:
            try:
                return trained_by(self._engine)
            except CannotTrainTogether as reason:
                # The engine could train the clients of its trial, but not these.
                warning = f"engine {self.engine} cannot train some clients together: {reason}; using the loop"
                if warning not in self._warned:
                    _log.warning(warning)
                    self._warned.add(warning)
                return trained_by(LoopEngine())
        except ConfigError:  # an engine that the user chose; the message has the reason
            raise
        except MODULE_ERRORS as error:
            each = ((one[0][0], self._workload([one], models, this_round)) for one in block)
            of_round = self._federation, this_round.number, self.engine
            one_by_one = partial(self._batch_rule.train, LoopEngine())
            raise model_error(error, each, *of_round, one_by_one) from error

    def _workload(self, block: Block, models: Tensor, this_round: Round) -> Workload:
        jobs: list[Job] = []
        for (client, inputs, targets), row, anchor in block:
            generator = generator_of(this_round, self._federation.keys[client], self._private)
            jobs.append(Job(client, row, inputs, targets, generator, anchor))
        spec = this_round.spec.with_smallest_batch(self.smallest_batch)
        rule = this_round.rule
        private = self._private
        of_all = spec, this_round.lr, self._task
        return Workload(
            self._module, self.layout.full, models, jobs, *of_all, rule=rule, private=private
        )

    def _received(
        self,
        ids: Sequence[int],
        sizes: Indices,
        deltas: Tensor,
        losses: Tensor,
        this_round: Round,
        models: int = 1,
    ) -> Updates:
        keys = self._federation.keys
        if self._always_replies:
            make_usable(deltas, losses)
        trained = [
            len(this_round.examples(int(n), keys[client]))
            for client, n in zip(ids, sizes, strict=True)
        ]
        # Updates are ``[n, 0]`` if clients train models that they do not share.
        n_parameters = min(deltas.shape[1], models * self.layout.n_parameters)
        return Updates.received(ids, trained, deltas, n_parameters, losses, this_round.number)


def _make_states_finite(work: Workload) -> None:
    """Make the states that clients store finite.

    Otherwise whether a state is stored would depend on the data of a private client.
    """
    for job in work.jobs:
        state = work.states.get(job.client, {})
        work.states[job.client] = {name: tensor.nan_to_num() for name, tensor in state.items()}
