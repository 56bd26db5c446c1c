"""Clients that live in this process: the ``Clients`` protocol over a federation's data."""

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

# Longer updates of parts of a client's data, where the loss of the part says that they are no
# worse.

JUDGED = 256
"""Examples of a part, at most, whose loss decides."""


def stretch(work: Workload, moved: Tensor, times: float, chunk: int) -> None:
    """Multiply those updates ``[n, S]`` that lower the loss then, in place; the parameters alone, not the buffers.

    A part takes as many steps as all data would, but shorter ones, as its batches are smaller; so
    its update is shorter, too. Made as long as by steps of full length it may overshoot, which the
    loss on some of the part's own examples decides: so the update still depends on nothing but the
    part and the model that it starts from, and parts stay exchangeable. The loss is that of the
    model as it is served, ``chunk`` examples at a time.
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
    """Draw some of a job's examples, which may be in the order of their labels; its own draws order batches."""
    generator = torch.Generator().manual_seed(job.generator.initial_seed() + 1)
    places = torch.randperm(job.size, generator=generator)[:JUDGED].to(job.targets.device)
    return [(job.inputs[some], job.targets[some]) for some in places.split(chunk)]


def _loss(work: Workload, model: Tensor, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    work.layout.load(model, work.module)
    work.module.eval()
    with torch.no_grad():
        return sum(float(work.task.total_loss(full(work.module(x)), y)) for x, y in batches)


Block = Sequence[tuple[Trained, int, int | None]]
"""Clients that train at the same time, each with the row of its model, and of its anchor if that is another."""

MODELS_AT_A_TIME = 8
"""Of the memory, one part in so many is for the models of clients that are evaluated with parameters of their own."""

_log = logging.getLogger(__name__)


class SimulatedClients(Workers):
    """The clients of a federation, trained in this process.

    Parameters
    ----------
    federation
        Their data.
    module
        The model; only its structure is used, every call says with which parameters.
    device
        ``cpu`` or ``cuda``.
    engine
        How they are trained: one of :data:`~fedclade.training.ENGINES`. Updates do not depend on it
        beyond rounding.
    memory
        Bytes that the data and the training of a round may take; by default a quarter of the
        machine's or the GPU's memory. It decides how many clients train at the same time, and
        nothing else.
    resolved
        The engine of a run that is continued, see :attr:`engine_taken`.
    task
        The loss and the metrics; by default the data's own.
    personal
        Patterns over the names of parameters and buffers that stay with each client, see
        :meth:`fedclade.core.Layout.of`. All start from the module's.
    private
        That all local training is DP-SGD, also of what clients keep: what they share later depends
        on that.
    always_replies
        Whether every client replies to every training query, with zeros in place of an update that
        is not finite, with a shorter update in place of one that is too long, and without losses.
        Clients with differential privacy do: whether a reply is missing, and why, would reveal
        something about the data without any noise.

    Raises
    ------
    ConfigError
        If the engine is unknown, or a pattern matches nothing; if a loss of the user's own fails on
        some examples, or lets them depend on each other without being declared so; if training is
        private, and the module mixes examples, the loss is one over the batch, or the data changes
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
            # it quotes losses, which a private client must not send to a server
            _log.error("%s", error)
            raise ConfigError(
                f"task.loss = {fitted.loss_name} does not fit the model, or lets examples depend "
                "on each other; the log of the client has the details"
            ) from None
        if self._task.over_batch:  # of which a part of a client's examples has another
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
        """What rounding depends on of the engine: also the way inside worker processes. None before the first round."""
        return self._engine.resolved

    @property
    def module(self) -> nn.Module:
        """The model's structure; its parameters are whatever was computed last."""
        return self._module

    @property
    def smallest_batch(self) -> int:
        """Examples of the smallest batch that the model can train on."""
        return self._batch_rule.smallest

    @property
    def ids(self) -> Sequence[int]:
        """All clients, in a fixed order."""
        return self._federation.ids

    @property
    def sizes(self) -> Mapping[int, int]:
        """Number of training examples of each client, in the latest stage that was asked about."""
        return self._stages.now.federation.sizes

    @property
    def kept(self) -> dict[int, dict[str, Tensor]]:
        """The personal parameters ``[P]`` and models ``[F]`` that clients keep now, by client and name."""
        return self.whole.kept(self.ids)

    def handle_updates(self, query: UpdateQuery) -> Updates:
        """Let each client train from its model, or take the gradient at it; return the updates that do not diverge.

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
        """Train some clients; return what their whole models moved by, ``[k, F]``, and their losses."""
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
        moved = self.whole.only(PERSONAL, moved)  # buffers of the other part have changed too
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
        """Let each client answer a query from its own data."""
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
            # what is trained for another purpose begins with a new one, and leaves nothing
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
            if this_round.longest > 1 and self._private is None:  # private examples choose nothing
                stretch(work, moved, this_round.longest, self._chunk)
            return moved, losses

        try:
            try:
                return trained_by(self._engine)
            except CannotTrainTogether as reason:
                # though it could train those that it was tried on
                warning = f"engine {self.engine} cannot train some clients together: {reason}; using the loop"
                if warning not in self._warned:
                    _log.warning(warning)
                    self._warned.add(warning)
                return trained_by(LoopEngine())
        except ConfigError:  # of an engine that the user chose, and that names what prevents it
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
        # none of models that clients keep
        n_parameters = min(deltas.shape[1], models * self.layout.n_parameters)
        return Updates.received(ids, trained, deltas, n_parameters, losses, this_round.number)


def _make_states_finite(work: Workload) -> None:
    """Make what clients store of their training finite, so that whether it is stored does not depend on their data."""
    for job in work.jobs:
        state = work.states.get(job.client, {})
        work.states[job.client] = {name: tensor.nan_to_num() for name, tensor in state.items()}
