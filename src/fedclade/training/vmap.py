"""Engine by ``torch.func.vmap``, for modules with layers that the stacked engine does not support.

The parameters of n clients are stacked, ``[n, ...]``. The module is turned into a function of its
parameters, and ``vmap`` computes the gradients of this function for several clients in one call.
Only clients with batches of equal length share a call, so that no batch has to be padded.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.utils.rnn import pad_sequence

from fedclade.core import Layout
from fedclade.training.jobs import (
    CannotTrainTogether,
    Draws,
    Job,
    Places,
    PrivateSteps,
    Workload,
    batches,
    by_length,
    full,
    precision,
    refuse_half_precision,
    refuse_own_code,
    refuse_rules,
)
from fedclade.training.local_rules import train_by_rule
from fedclade.training.optimizer import LocalOptimizer
from fedclade.training.stacking.batches import joined

# DP-SGD of all clients by ``torch.func``: the gradient of one example, mapped over examples and
# clients.

GRADIENTS_AT_A_TIME = 2**25
"""Largest number of entries of single examples' gradients in memory: 128 MiB in float32."""

SMALLEST = 8
STEP = 8
"""Samples are padded to ``SMALLEST`` or a larger multiple of ``STEP`` examples.

So tensors of few different shapes occur.
"""


class Samples:
    """Random samples of k clients in each step of DP-SGD, stacked and padded.

    The clients with the most steps come first.
    """

    def __init__(self, private: PrivateSteps, jobs: Sequence[Job], batch_size: int) -> None:
        self.draws: list[Draws] = [private.draws(job, batch_size) for job in jobs]

    def drawn(self, clients: int) -> tuple[Tensor, Tensor]:
        """Draw the samples of a step for the first ``clients`` clients.

        Returns
        -------
        tuple
            Indices of the sampled examples, padded to the same number, int64 ``[k, B]``; and a mask
            that is False for padding, ``[k, B]``.
        """
        samples = [draws.sample() for draws in self.draws[:clients]]
        examples = pad_sequence(samples, batch_first=True)
        width = max(SMALLEST, -(-examples.shape[1] // STEP) * STEP)
        examples = torch.nn.functional.pad(examples, (0, width - examples.shape[1]))
        sizes = torch.tensor([len(sample) for sample in samples])
        return examples, torch.arange(width) < sizes[:, None]


class NoisyGradients:
    """Function that returns the noisy gradients of k clients (DP-SGD).

    Parameters and gradients are named tensors, ``[k, ...]``.
    """

    def __init__(self, work: Workload, private: PrivateSteps) -> None:
        self._private = private
        self._layout = work.layout
        module = work.module
        task = work.task

        def loss(trained: Named, others: Named, x: Tensor, y: Tensor) -> Tensor:
            with precision(work.spec, x.device):
                outputs = functional_call(module, {**trained, **others}, (x[None],))
            return task.mean_loss(full(outputs), y[None])

        of_examples = vmap(grad_and_value(loss), in_dims=(None, None, 0, 0))
        self._of_clients = cast("Callable[..., tuple[Named, Tensor]]", vmap(of_examples))

    def __call__(
        self,
        trained: Named,
        others: Named,
        x: Tensor,
        y: Tensor,
        counts: Tensor,
        draws: Sequence[Draws],
    ) -> tuple[Named, Tensor]:
        """Compute the gradients of k clients, clipped by example, summed, and with noise.

        Parameters
        ----------
        trained
            Parameters, ``[k, ...]`` each, by name.
        others
            Buffers, ``[k, ...]`` each, by name.
        x, y
            Inputs and targets of the sampled examples, ``[k, B, ...]``.
        counts
            Mask of the examples that are not padding, ``[k, B]``.
        draws
            Random noise of each client.

        Returns
        -------
        tuple
            Gradients by name of the parameter. And ``[k, 2]``: for each client, the sum of the
            losses of its sampled examples with finite gradients, and the number of these examples.
        """
        size = max(1, self._layout.n_parameters)
        clients = max(1, GRADIENTS_AT_A_TIME // (size * x.shape[1]))
        examples = max(1, min(x.shape[1], GRADIENTS_AT_A_TIME // size))
        found = {name: torch.empty_like(p) for name, p in trained.items()}
        losses = torch.zeros(len(x), 2, dtype=torch.float64, device=x.device)
        for first in range(0, len(x), clients):
            here = slice(first, first + clients)
            some_trained = {name: tensor[here] for name, tensor in trained.items()}
            some_others = {name: tensor[here] for name, tensor in others.items()}
            for start in range(0, x.shape[1], examples):
                some = slice(start, start + examples)
                sums, lost = self._clipped(
                    some_trained,
                    some_others,
                    x=x[here, some],
                    y=y[here, some],
                    counts=counts[here, some],
                )
                for name, tensor in sums.items():
                    if start > 0:
                        tensor = found[name][here] + tensor
                    found[name][here] = tensor
                losses[here] += lost
        return self._with_noise(found, draws), losses

    def _clipped(
        self, trained: Named, others: Named, x: Tensor, y: Tensor, counts: Tensor
    ) -> tuple[Named, Tensor]:
        """Return sums of clipped gradients without noise, and sums and numbers of losses.

        Parameters and results are described in :meth:`__call__`.
        """
        gradients, losses = self._of_clients(trained, others, x, y)
        # The shape is [k, B, entries], also for a parameter that is a single number.
        flat = {name: g.reshape(*g.shape[:2], -1) for name, g in gradients.items()}
        squares = torch.stack([g.square().sum(2) for g in flat.values()]).sum(0)
        factors = torch.where(counts, self._private.factors(squares), 0.0)
        # Gradients with factor 0 may be infinite, and 0·∞ would be NaN.
        left_out = (factors == 0)[..., None]
        sums = {
            n: torch.bmm(factors.unsqueeze(1), g.masked_fill(left_out, 0)) for n, g in flat.items()
        }
        named = {name: tensor.view_as(trained[name]) for name, tensor in sums.items()}
        seen = torch.stack([losses.masked_fill(left_out[..., 0], 0), (factors > 0).to(losses)], 2)
        return named, seen.double().sum(1)

    def _with_noise(self, sums: Named, draws: Sequence[Draws]) -> Named:
        """Divide sums of gradients by the expected size of a sample, and add noise."""
        noise = torch.empty(len(draws), self._layout.n_parameters)
        for row, mine in zip(noise, draws, strict=True):
            mine.noise(row)
        for slot in self._layout.parameters:
            tensor = sums[slot.name]
            expected = tensor.new_tensor([mine.expected for mine in draws])
            tensor.div_(expected.view(-1, *(1,) * (tensor.dim() - 1)))
            tensor.add_(noise[:, slot.start : slot.stop].to(tensor).view_as(tensor))
        return sums


Named = dict[str, Tensor]


class CannotMapError(CannotTrainTogether):
    """Error for a model that ``torch.func.vmap`` cannot train for several clients in one call.

    The message gives the reason.
    """


class VmapEngine:
    """Engine that trains all clients at once, by ``torch.func.vmap``.

    The engine refuses modules whose forward pass changes buffers or is random, such as modules with
    BatchNorm or dropout.
    """

    def train(self, work: Workload, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Train every client from its model; see :meth:`fedclade.training.jobs.Engine.train`.

        Raises
        ------
        CannotTrainTogether
            If the engine does not support the settings of the training, such as parameters that are
            not trained.
        CannotMapError
            If ``vmap`` does not support the module or the optimizer.
        """
        if work.fixed:
            raise CannotTrainTogether(
                "engine vmap cannot exclude parameters from training, but this method's steps do so "
                "(engine loop can)"
            )
        module = work.module
        layout = work.layout
        models = work.models
        jobs = work.jobs
        spec = work.spec
        refuse_half_precision(work)
        _refuse_what_cannot_be_mapped(module, layout)
        optimizer = LocalOptimizer.of(spec, work.lr)
        if not optimizer.is_plain:
            raise CannotMapError(
                f"optimizer {spec.optimizer} changes parameters in place; engine vmap supports "
                "only plain SGD (engine loop supports every optimizer)"
            )
        if work.private is not None:
            return self._privately(work, work.private, out)
        refuse_own_code(work)
        if work.rule is not None:
            return self._by_rule(work, out)
        plans = [[*batches(job.size, spec, job.generator)] for job in jobs]
        # The clients with the most steps come first.
        order = sorted(range(len(jobs)), key=lambda k: -len(plans[k]))
        ordered = [jobs[k] for k in order]
        plans = [plans[k] for k in order]
        start = models[torch.tensor([job.row for job in ordered], device=models.device)]
        anchors = start
        if spec.mu:
            anchors = models[torch.tensor([job.anchor_row for job in ordered], device=start.device)]
        reached = _reached(work, start[0], ordered[0])
        clients = _Stacked(
            work, start, anchors, sgd=optimizer, reached=reached, mapped=_Mapped(work)
        )
        layout.set_training(module)
        inputs, first_inputs = joined([job.inputs for job in ordered])
        targets, first_targets = joined([job.targets for job in ordered])
        first_x = torch.tensor(first_inputs)[:, None]
        first_y = torch.tensor(first_targets)[:, None]
        # Either all jobs have weights, or none has.
        weights: Tensor | None = None
        first_weight = first_x
        given = [job.weights for job in ordered if job.weights is not None]
        if given:
            weights, first_weights = joined(given)
            first_weight = torch.tensor(first_weights)[:, None]
        totals = torch.zeros(len(jobs), dtype=torch.float64, device=models.device)
        for step in range(len(plans[0])):
            for places, batch in by_length(plans, step):
                x = (first_x[places] + batch).to(inputs.device)
                y = (first_y[places] + batch).to(inputs.device)
                of_batch: list[Tensor] = []
                if weights is not None:
                    of_batch.append(weights[first_weight[places] + batch])
                losses = clients.step(places, inputs[x], targets[y], *of_batch)
                totals[places] += losses.to(torch.float64) * batch.shape[1]
        updates = work.room(out)
        updates[torch.tensor(order)] = clients.models - start
        seen = torch.tensor([spec.passed(job.size) for job in ordered], dtype=torch.float64)
        losses = torch.empty(len(jobs), dtype=torch.float64)
        losses[torch.tensor(order)] = totals.cpu() / seen
        return updates, losses

    def _privately(
        self, work: Workload, private: PrivateSteps, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Train clients by DP-SGD, with the samples of all clients padded to the largest sample."""
        refuse_rules(work)
        models = work.models
        spec = work.spec
        steps = [spec.steps_with(job.size) for job in work.jobs]
        order = sorted(range(len(steps)), key=lambda k: -steps[k])
        jobs = [work.jobs[k] for k in order]
        start = models[torch.tensor([job.row for job in jobs], device=models.device)]
        anchors = models[torch.tensor([job.anchor_row for job in jobs], device=models.device)]
        names = {slot.name for slot in work.layout.parameters}
        clients = _Stacked(
            work,
            start,
            anchors,
            sgd=LocalOptimizer.of(spec, work.lr),
            reached=names,
            mapped=NoisyGradients(work, private),
        )
        work.layout.set_training(work.module)
        inputs, first_inputs = joined([job.inputs for job in jobs])
        targets, first_targets = joined([job.targets for job in jobs])
        first_x = torch.tensor(first_inputs)[:, None]
        first_y = torch.tensor(first_targets)[:, None]
        samples = Samples(private, jobs, spec.batch_size)
        totals = torch.zeros(len(jobs), 2, dtype=torch.float64)  # sums and numbers of losses
        for number in range(max(steps)):
            active = sum(count > number for count in steps)
            examples, counts = samples.drawn(active)
            x = (first_x[:active] + examples).to(inputs.device)
            y = (first_y[:active] + examples).to(inputs.device)
            of_batch = counts.to(inputs.device), samples.draws[:active]
            losses = clients.step(slice(0, active), inputs[x], targets[y], *of_batch)
            totals[:active] += losses.cpu()
        back = torch.tensor(order).argsort()
        updates = torch.index_select(
            clients.models - start, 0, back.to(models.device), out=work.room(out)
        )
        return updates, (totals[:, 0] / totals[:, 1].clamp(min=1))[back]

    def _by_rule(self, work: Workload, out: Tensor | None) -> tuple[Tensor, Tensor]:
        """Train clients by the local rule of the workload."""
        order = sorted(
            range(len(work.jobs)), key=lambda k: -work.spec.steps_with(work.jobs[k].size)
        )
        ordered = [work.jobs[k] for k in order]
        back = torch.tensor(order).argsort()
        gradients = _Gradients(work, ordered)
        work.layout.set_training(work.module)
        moved, losses = train_by_rule(work, ordered, gradients)
        return torch.index_select(moved, 0, back.to(moved.device), out=work.room(out)), losses[back]


def _refuse_what_cannot_be_mapped(module: nn.Module, layout: Layout) -> None:
    """Refuse a module with a layer that changes its buffers in training.

    Layers that stay in evaluation mode are accepted.

    Raises
    ------
    CannotMapError
        If the module has such a layer.
    """
    for name, layer in module.named_modules():
        changes = isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats  # pyright: ignore[reportPrivateUsage]
        if changes and name not in layout.resting:
            raise CannotMapError(
                f"layer {name!r} ({type(layer).__name__}) changes its buffers in training, which "
                "engine vmap does not support (engine loop does)"
            )


class _Gradients:
    """Function that returns the gradients of k clients at any models, by ``torch.func.vmap``.

    See :data:`~fedclade.training.local_rules.Gradients`.
    """

    def __init__(self, work: Workload, jobs: Sequence[Job]) -> None:
        self._layout = work.layout
        self._module = work.module
        self._mapped = _Mapped(work)
        inputs, first_inputs = joined([job.inputs for job in jobs])
        targets, first_targets = joined([job.targets for job in jobs])
        self._inputs = inputs
        self._targets = targets
        device = inputs.device
        self._first = torch.tensor([first_inputs, first_targets], device=device)[:, :, None]
        self._reached = torch.zeros(work.layout.n_parameters, dtype=torch.bool, device=device)
        names = _reached(work, work.models[jobs[0].row], jobs[0])
        for slot in work.layout.parameters:
            self._reached[slot.start : slot.stop] = slot.name in names

    def __call__(
        self, models: Tensor, places: Places, batch: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients at models ``[k, S]`` of k clients, on batches ``[k, B]`` of examples.

        ``places`` selects the clients.

        Returns
        -------
        tuple
            Gradients ``[k, D]`` for D parameters; losses ``[k]``; and a mask ``[D]`` of the entries
            on which the losses depend.
        """
        x, y = (first[places] + batch for first in self._first)
        tensors = self._layout.unflatten(models)
        trained = {slot.name: tensors[slot.name] for slot in self._layout.parameters}
        others = {slot.name: tensors[slot.name] for slot in self._layout.buffers}
        with _refusing(self._module, others):
            gradients, losses = self._mapped(trained, others, self._inputs[x], self._targets[y])
        flat = [gradients[slot.name].reshape(len(models), -1) for slot in self._layout.parameters]
        return torch.cat(flat, 1), losses, self._reached


class _Mapped:
    """Function that returns the losses and gradients of k clients' modules.

    Parameters and gradients are named tensors, ``[k, ...]``.
    """

    def __init__(self, work: Workload) -> None:
        module = work.module
        task = work.task

        def loss(
            trained: Named, others: Named, inputs: Tensor, targets: Tensor, *weights: Tensor
        ) -> Tensor:
            with precision(work.spec, inputs.device):
                outputs = functional_call(module, {**trained, **others}, (inputs,))
            return task.mean_loss(full(outputs), targets, *weights)

        self._gradients = cast("Callable[..., tuple[Named, Tensor]]", vmap(grad_and_value(loss)))

    def __call__(
        self, trained: Named, others: Named, inputs: Tensor, targets: Tensor, *weights: Tensor
    ) -> tuple[Named, Tensor]:
        """Return the gradients ``[k, ...]`` by name of the parameter, and the losses ``[k]``."""
        return self._gradients(trained, others, inputs, targets, *weights)


@contextmanager
def _refusing(module: nn.Module, others: Named) -> Generator[None]:
    """Raise a CannotMapError if ``torch.func`` fails, or buffers change, in a ``with`` block.

    Raises
    ------
    CannotMapError
        If the block raises an error, or changes a buffer.
    """
    kind = type(module).__name__
    before = _versions(module, others)
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        first_line = str(error).partition("\n")[0] or type(error).__name__
        raise CannotMapError(
            f"{kind} cannot be trained for several clients at once by torch.func.vmap: {first_line} "
            "(engine loop trains one client at a time)"
        ) from error
    if before != _versions(module, others):
        raise CannotMapError(
            f"{kind} changes its buffers in training, which engine vmap does not support (engine loop "
            "does)"
        )


def _versions(module: nn.Module, others: Named) -> list[tuple[int, int]]:
    """Return the identity and the number of in-place changes of each buffer, to detect changes."""
    return [(id(buffer), buffer._version) for buffer in (*module.buffers(), *others.values())]


class _Stacked:
    """Models and anchors of n clients, as named tensors ``[n, ...]``, and the clients' SGD steps.

    Parameters
    ----------
    work
        The workload.
    start
        Models from which the n clients start, ``[n, S]``.
    anchors
        Models to which the proximal term pulls each client, ``[n, S]``.
    sgd
        The optimizer.
    reached
        Names of the parameters on which the loss depends. Other parameters stay unchanged, also by
        weight decay.
    mapped
        Function that returns the gradients and losses of k clients' models.
    """

    def __init__(
        self,
        work: Workload,
        start: Tensor,
        anchors: Tensor,
        sgd: LocalOptimizer,
        reached: set[str],
        mapped: _Mapped | NoisyGradients,
    ) -> None:
        layout = work.layout
        self.models = start.clone()
        self._sgd = sgd
        self._reached = reached
        self._mapped = mapped
        self._module = work.module
        tensors = layout.unflatten(self.models)
        self._anchors = layout.unflatten(anchors)
        # Views of self.models, so that steps change it.
        self._trained = {slot.name: tensors[slot.name] for slot in layout.parameters}
        self._others = {slot.name: tensors[slot.name] for slot in layout.buffers}
        self._velocity: Named = {}
        if sgd.momentum:
            self._velocity = {name: torch.zeros_like(p) for name, p in self._trained.items()}

    def step(self, places: Places, inputs: Tensor, targets: Tensor, *more: Any) -> Tensor:
        """Take an SGD step of k clients, and return the losses before the step, ``[k]``.

        ``places`` selects the clients. The inputs and targets are batches ``[k, B, ...]``. Further
        arguments, such as weights of examples ``[k, B]``, are passed to the function that returns
        the gradients.
        """
        sgd = self._sgd
        trained = {name: p[places] for name, p in self._trained.items()}
        others = {name: b[places] for name, b in self._others.items()}
        with _refusing(self._module, others):
            gradients, losses = self._mapped(trained, others, inputs, targets, *more)
        gradients = {name: gradients[name] for name in self._reached}
        if mu := sgd.mu:
            gradients = {
                name: g + mu * (trained[name] - self._anchors[name][places])
                for name, g in gradients.items()
            }
        scales = sgd.scales(gradients.values())
        for name, gradient in gradients.items():
            velocity = self._velocity[name][places] if sgd.momentum else None
            self._trained[name][places] = sgd.stepped(trained[name], gradient, velocity, scales)
            if velocity is not None:
                self._velocity[name][places] = velocity
        return losses


def _reached(work: Workload, model: Tensor, job: Job) -> set[str]:
    """Return the names of the parameters on which the loss depends.

    The names are found by a backward pass on one or two examples.
    """
    module = work.module
    work.layout.load(model, module)
    module.eval()  # in evaluation mode, the forward pass draws nothing
    module.zero_grad(set_to_none=True)
    with torch.backends.cudnn.flags(enabled=False):
        work.task.mean_loss(module(job.inputs[:2]), job.targets[:2]).backward()
    reached = {name for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return reached
