"""Smallest batches on which a model can train, and training of clients with fewer examples.

Some models, such as those with BatchNorm, cannot train on a batch of one example. A last batch of
one example is joined to the batch before (``LocalTraining.smallest_batch``). A client that has only
one example trains with normalisation layers in evaluation mode: they normalise by the running
statistics that the client is sent, and leave these unchanged.

Whether a model is of this kind is found by passing one example through it. The result depends on
the model and the shape of its inputs alone, so it is the same in a simulation and in a network.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from fedclade.core import ConfigError, DataSpec, Layout, ModelError, rng, state_preserved
from fedclade.data import Federation
from fedclade.training.jobs import Engine, Workload
from fedclade.training.loop import LoopEngine

TRIED = 64
"""Largest number of examples on which a model is tried before it counts as failing in training."""


@dataclass(frozen=True, eq=False)
class BatchRule:
    """Batches on which a model can train.

    Parameters
    ----------
    smallest
        Number of examples in the smallest batch: 1 or 2.
    layout
        Layout of the whole model.
    """

    smallest: int
    layout: Layout

    @classmethod
    def of(
        cls,
        module: nn.Module,
        layout: Layout,
        federation: Federation,
        device: torch.device,
        *,
        checks: bool = True,
    ) -> BatchRule:
        """Return the rule for a model and the data of a federation.

        Parameters
        ----------
        module
            The model.
        layout
            Layout of the whole model.
        federation
            The clients.
        device
            Device of the model.
        checks
            Whether to raise errors. Without them, the reply of a private client does not depend on
            its data.

        Raises
        ------
        ModelError
            If the model fails in training on all batches, or on those of a client with one example.
        """
        pool = federation.pool
        first = next(
            (client for client in federation.clients if len(client.train) > 1),
            federation.clients[0],
        )
        some = np.resize(first.train, max(2, min(TRIED, len(first.train))))
        rule = cls(smallest_batch(module, layout, pool.inputs(some[:2]).to(device)), layout)
        if not checks:
            return rule
        if rule.smallest == 1:
            alone = training_failure(module, layout, pool.inputs(some[:1]).to(device))
            if alone and (why := training_failure(module, layout, pool.inputs(some).to(device))):
                raise ModelError(
                    f"the model takes inputs of shape {pool.input_shape} ({pool.name}), but cannot "
                    f"be trained on them: {why}{_remedy(module)}"
                )
            return rule
        if (
            client := next((client for client, size in federation.sizes.items() if size == 1), None)
        ) is not None:
            rule._check_alone(module, federation, client, device)
        return rule

    def _check_alone(
        self, module: nn.Module, federation: Federation, client: int, device: torch.device
    ) -> None:
        """Raise a ModelError if a model cannot be trained on the only example of a client."""
        its = federation.by_id[client]
        inputs = federation.pool.inputs(its.train).to(device)
        if why := training_failure(module, self.frozen_layout(module), inputs, finite=False):
            raise ModelError(
                f"client {client} ({its.name!r}) has one training example, on which the model "
                f"cannot be trained, even with its normalisation layers in evaluation mode: {why}; "
                "give the client more examples, or leave it out"
            )

    def frozen_layout(self, module: nn.Module) -> Layout:
        """Return the layout in which layers with running statistics stay in evaluation mode."""
        names = [name for name, layer in module.named_modules() if _keeps_statistics(layer)]
        return replace(self.layout, resting=(*self.layout.resting, *names))

    def train(
        self, engine: Engine, work: Workload, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Train clients by an engine, and clients with fewer examples than it needs by the loop.

        See :meth:`fedclade.training.jobs.Engine.train`.
        """
        # These train with their normalisation layers in evaluation mode, so with another layout.
        alone = [place for place, job in enumerate(work.jobs) if job.size < self.smallest]
        if not alone:
            return engine.train(work, out)
        together = [place for place, job in enumerate(work.jobs) if job.size >= self.smallest]
        updates = work.room(out)
        losses = torch.empty(len(work.jobs), dtype=torch.float64)
        if together:
            part = replace(work, jobs=[work.jobs[place] for place in together])
            updates[together], losses[together] = engine.train(part)
        part = replace(
            work, jobs=[work.jobs[place] for place in alone], layout=self.frozen_layout(work.module)
        )
        updates[alone], losses[alone] = LoopEngine().train(part)
        return updates, losses


def smallest_batch(module: nn.Module, layout: Layout, inputs: Tensor) -> int:
    """Return the number of examples in the smallest batch on which a model can train: 1 or 2.

    It is 2 if the model can train on both of the inputs ``[2, ...]``, but not on the first alone,
    and 1 otherwise.
    """
    fails_alone = training_failure(module, layout, inputs[:1]) is not None
    return 2 if fails_alone and training_failure(module, layout, inputs) is None else 1


def smallest_batch_for(module: nn.Module, layout: Layout, schema: DataSpec) -> int:
    """Return the smallest batch for a model without inputs, as on the server of a network.

    The model is tried on random inputs, or on zeros if it fails on random inputs, as an embedding
    of a column does.
    """
    draw = torch.Generator().manual_seed(0)
    shape = (2, *schema.input_shape)
    if schema.vocabulary_size:
        inputs = torch.randint(schema.vocabulary_size, shape, generator=draw)
    else:
        inputs = torch.randn(shape, generator=draw).to(layout.dtype)
    if training_failure(module, layout, inputs) is not None:
        inputs = torch.zeros_like(inputs)
    return smallest_batch(module, layout, inputs)


def training_failure(
    module: nn.Module, layout: Layout, inputs: Tensor, *, finite: bool = True
) -> str | None:
    """Return why a model fails on a batch in training mode, or None; its buffers stay unchanged.

    With ``finite``, outputs that are NaN or infinite also count as a failure, for example from the
    variance of one example.
    """
    with state_preserved(module), rng.seeded_globally(0, inputs.device), torch.no_grad():
        layout.set_training(module)
        try:
            outputs = module(inputs.clone())
        except Exception as error:  # a user's forward may raise any exception
            return str(error)
    if finite and isinstance(outputs, Tensor) and not bool(outputs.isfinite().all()):
        return "its outputs are NaN or infinite"
    return None


def check_examples_alone(module: nn.Module, rule: BatchRule) -> None:
    """Check that a model can be trained by DP-SGD, which takes one example at a time.

    Raises
    ------
    ConfigError
        If the model cannot be trained on one example.
    """
    if rule.smallest > 1:
        raise ConfigError(
            f"privacy.level = 'example': {type(module).__name__} cannot be trained on one example "
            "at a time, so none has a gradient of its own; take a model that does not normalise "
            "over the batch, such as one with GroupNorm"
        )


def _keeps_statistics(layer: nn.Module) -> bool:
    is_norm = isinstance(layer, nn.modules.batchnorm._NormBase)  # pyright: ignore[reportPrivateUsage]
    return is_norm and layer.running_mean is not None


def _remedy(module: nn.Module) -> str:
    """Return advice about a layer that normalises over positions where there may be only one."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.instancenorm._InstanceNorm):  # pyright: ignore[reportPrivateUsage]
            return (
                f"; layer {name!r} ({type(layer).__name__}) normalises over the places of an "
                "example, of which there must be more than one; take GroupNorm or LayerNorm in "
                "its place"
            )
    return ""
