"""Clients that live in this process: the ``Clients`` protocol over a federation's data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedclade import rng
from fedclade.clients import Evaluation, Round, Split, Updates
from fedclade.data.federation import ClientData, Federation
from fedclade.engine import loop
from fedclade.engine.threads import threads_for, using_threads
from fedclade.errors import ConfigError, DataError, ModelError
from fedclade.params import Layout

LOGITS_AT_A_TIME = 2**24
"""How many logits evaluation holds at once: 64 MiB in float32."""


class SimulatedClients:
    """The clients of a federation, trained one after another.

    Parameters
    ----------
    federation
        Their data.
    module
        The model; only its structure is used, every call says with which parameters.
    device
        ``cpu`` or ``cuda``.

    Raises
    ------
    ModelError
        If the module does not take the federation's inputs, or gives another number of outputs than there are labels.
    """

    def __init__(self, federation: Federation, module: nn.Module, device: str = "cpu") -> None:
        self._federation = federation
        self._device = torch.device(device)
        self._module = module.to(self._device)
        self.layout = Layout.of(module)
        pool = federation.pool
        logits_each = pool.outputs * (pool.y[0].numel() if len(pool.y) else 1)
        self._chunk = max(1, min(1024, LOGITS_AT_A_TIME // logits_each))
        self._threads_by_batch_size: dict[int, int] = {}
        check_model(module, federation, self._device)

    @property
    def ids(self) -> Sequence[int]:
        """All clients, in a fixed order."""
        return self._federation.ids

    @property
    def sizes(self) -> Mapping[int, int]:
        """Number of training examples of each client."""
        return {client.id: len(client.train) for client in self._federation.clients}

    def train(self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], this_round: Round) -> Updates:
        """Let each client train from its model; return the updates Δθ_i.

        Raises
        ------
        ModelError
            If the model fails on a client's data.
        UpdateError
            If a client's training diverges.
        """
        with using_threads(self._threads(this_round.spec.batch_size)):
            answers = [self._answer(c, models[row], this_round) for c, row in zip(ids, assignment, strict=True)]
        return self._received(ids, answers, this_round)

    def gradients(self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], this_round: Round) -> Updates:
        """Return the negative full-batch gradients at each client's model, as updates."""
        answers = [
            loop.gradient(self._module, self.layout, models[row], self._examples(client, "train"), self._chunk)
            for client, row in zip(ids, assignment, strict=True)
        ]
        return self._received(ids, answers, this_round)

    def evaluate(self, ids: Sequence[int], models: Tensor, assignment: Sequence[int], split: Split) -> Evaluation:
        """Let each client evaluate its model on a split of its own data.

        Clients that share a model and the inputs of the split share the forward pass: they differ only in their labels.

        Raises
        ------
        DataError
            If a client has no examples in the split.
        """
        groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for place, (client, row) in enumerate(zip(ids, assignment, strict=True)):
            data = self._client(client)
            indices = getattr(data, split)
            if len(indices) == 0:
                raise DataError(
                    f"client {client} has no {split} examples"
                    + ("; set data.validation_fraction above 0" if split == "validation" else "")
                )
            groups[row, id(indices), data.quarter_turns].append(place)
        scores = torch.zeros(3, len(ids), dtype=torch.float64)
        for (row, _, turns), places in groups.items():
            members = [self._client(ids[place]) for place in places]
            indices = getattr(members[0], split)
            pool = self._federation.pool
            scores[:, places] = torch.stack(
                loop.evaluate(
                    self._module,
                    self.layout,
                    models[row],
                    pool.inputs(indices, turns).to(self._device),
                    [member.labels for member in members],
                    pool.y[torch.from_numpy(indices)],
                    self._chunk,
                )
            )
        right, nats, counted = scores
        return Evaluation(tuple(ids), right / counted, nats / counted, counted.to(torch.int64))

    def _answer(self, client: int, model: Tensor, this_round: Round) -> tuple[Tensor, float]:
        data = self._client(client)
        draw = rng.torch_generator(this_round.seed, this_round.purpose, this_round.number, data.key)
        examples = self._examples(client, "train")
        try:
            return loop.train(self._module, self.layout, model, examples, this_round.spec, this_round.lr, draw)
        except (RuntimeError, ValueError, IndexError) as error:
            raise ModelError(
                f"round {this_round.number}: the model fails on the data of client {client} ({data.name!r}): {error}"
            ) from error

    def _threads(self, batch_size: int) -> int:
        if batch_size not in self._threads_by_batch_size:
            some = np.resize(self._federation.clients[0].train, batch_size)
            batch = self._federation.pool.inputs(some).to(self._device)
            self._threads_by_batch_size[batch_size] = threads_for(self._module, batch)
        return self._threads_by_batch_size[batch_size]

    def _client(self, client: int) -> ClientData:
        return self._federation.by_id[client]

    def _examples(self, client: int, split: Split) -> tuple[Tensor, Tensor]:
        inputs, targets = self._federation.examples(client, split)
        return inputs.to(self._device), targets.to(self._device)

    def _received(self, ids: Sequence[int], answers: Sequence[tuple[Tensor, float]], this_round: Round) -> Updates:
        deltas = torch.stack([delta for delta, _ in answers])
        losses = torch.tensor([loss for _, loss in answers], dtype=torch.float64)
        sizes = [len(self._client(client).train) for client in ids]
        return Updates.received(ids, sizes, deltas, self.layout.n_parameters, losses, this_round.number)


def choose_device(device: str) -> str:
    """Return ``cpu`` or ``cuda`` for ``auto``, ``cpu``, ``cuda``.

    Raises
    ------
    ConfigError
        If the name is unknown, or there is no such device.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device should be auto, cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for, but torch sees no CUDA device; use --device cpu")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def check_model(module: nn.Module, federation: Federation, device: torch.device) -> None:
    """Run two examples through the model and compare its outputs with the labels.

    Raises
    ------
    ModelError
        If the model fails on the inputs, or its outputs do not match the labels.
    """
    inputs = federation.pool.inputs(federation.clients[0].train[:2])
    module.eval()
    try:
        with torch.inference_mode():
            logits = module(inputs.to(device))
    except Exception as error:
        raise ModelError(
            f"the model cannot take inputs of shape {federation.pool.input_shape} ({federation.pool.name}): {error}"
        ) from error
    labels = federation.pool.outputs
    targets = federation.pool.y[:1].shape[1:]
    expected = (len(inputs), *targets, labels)
    got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if got != expected:
        raise ModelError(
            f"the model should give {expected} outputs for {labels} labels of {federation.pool.name}, got {got}"
        )
