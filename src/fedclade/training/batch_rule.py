"""Smallest batch on which a model can train, and training of clients with fewer examples.

Some models, such as models with BatchNorm, cannot train on a batch of one example. If the last
batch of an epoch would have a single example, this example is added to the batch before
(``LocalTraining.smallest_batch``). A client that has only one example trains with the normalisation
layers in evaluation mode: they normalise by the running statistics in the model that the client
received, and do not update these statistics.

One example is passed through the model to find out whether it needs larger batches. The result
depends only on the model and on the shape of its inputs, so simulations and networks use the same
rule.
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
"""Largest number of examples on which a model is tried before it counts as not trainable."""


@dataclass(frozen=True, eq=False)
class BatchRule:
    """Rule for the batches on which a model can train.

    Parameters
    ----------
    smallest
        Number of examples in the smallest batch: 1 or 2.
    layout
        Layout of the whole model, with shared and personal parameters.
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
        """Find out which batches a model needs, and check that it can train on a federation's data.

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
            Whether to check the data and to raise errors. False for a client with differential
            privacy, since an error would reveal something about its data.

        Raises
        ------
        ModelError
            If the model fails in training on every batch, or on the batches of a client with one
            example.
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
                    f"the model accepts inputs of shape {pool.input_shape} ({pool.name}), but "
                    f"cannot be trained on them: {why}{_advise_on_norm(module)}"
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
        """Raise a ModelError if the model cannot be trained on a client's only training example."""
        its = federation.by_id[client]
        inputs = federation.pool.inputs(its.train).to(device)
        if why := training_failure(module, self.frozen_layout(module), inputs, finite=False):
            raise ModelError(
                f"client {client} ({its.name!r}) has one training example, on which the model "
                f"cannot be trained, even with its normalisation layers in evaluation mode: {why}; "
                "give the client more examples, or leave it out"
            )

    def frozen_layout(self, module: nn.Module) -> Layout:
        """Return the layout for clients with too few examples to train normalisation layers.

        With this layout, layers that have running statistics stay in evaluation mode.
        """
        names = [name for name, layer in module.named_modules() if _keeps_statistics(layer)]
        return replace(self.layout, resting=(*self.layout.resting, *names))

    def train(
        self, engine: Engine, work: Workload, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Train clients by an engine, and clients with too few examples for the engine by the loop.

        The loop trains with the normalisation layers in evaluation mode. Parameters and results are
        described in :meth:`fedclade.training.jobs.Engine.train`.
        """
        # Clients with too few examples train with the normalisation layers in evaluation mode, and
        # so with another layout.
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

    The result is 2 if the model can train on both rows of the inputs ``[2, ...]`` together, but not
    on the first row alone. Otherwise it is 1.
    """
    if training_failure(module, layout, inputs[:1]) is None:
        return 1
    if training_failure(module, layout, inputs) is None:
        return 2
    return 1  # it fails on both, and a later check reports the error


def smallest_batch_for(module: nn.Module, layout: Layout, schema: DataSpec) -> int:
    """Return the smallest batch on which a model can train, given only the data's schema.

    The server of a network calls this function, since it has no inputs. The model is tried on
    random inputs; if it fails, it is tried on zeros, which an embedding of a categorical column
    needs.
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
    """Return the reason why a model fails on a batch in training mode, or None if it does not fail.

    With ``finite``, outputs that are NaN or infinite count as a failure, too: the variance of a
    single example, for instance, is NaN. The model's buffers are restored.
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
    """Check that a model can be trained by DP-SGD, which needs the gradient of single examples.

    Raises
    ------
    ConfigError
        If the model cannot be trained on one example.
    """
    if rule.smallest > 1:
        raise ConfigError(
            f"privacy.level = 'example' needs a separate gradient for each example, but "
            f"{type(module).__name__} cannot be trained on one example at a time; use a model that "
            "does not normalise over the batch, such as a model with GroupNorm"
        )


def _keeps_statistics(layer: nn.Module) -> bool:
    """Return whether a layer is a normalisation layer with running statistics."""
    is_norm = isinstance(layer, nn.modules.batchnorm._NormBase)  # pyright: ignore[reportPrivateUsage]
    return is_norm and layer.running_mean is not None


def _advise_on_norm(module: nn.Module) -> str:
    """Return advice, to be appended to an error, for a model with an InstanceNorm layer.

    InstanceNorm normalises over the positions of one example, and fails if there is only one
    position. Without such a layer the advice is an empty string.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.instancenorm._InstanceNorm):  # pyright: ignore[reportPrivateUsage]
            return (
                f"; layer {name!r} ({type(layer).__name__}) normalises over the positions of an "
                "example, and needs more than one position; use GroupNorm or LayerNorm instead"
            )
    return ""
