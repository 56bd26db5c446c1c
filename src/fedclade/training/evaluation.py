"""Evaluation of simulated clients: each model sees each input once, and all clients' scores come from that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from fedclade.core import IGNORED, DataError, Evaluation, EvaluationQuery, Indices, Layout, Split
from fedclade.data import ClientTable, Federation
from fedclade.tasks import FittedTask, Metric, counted
from fedclade.training.data import ClientsData
from fedclade.training.passes import Examples, Traits
from fedclade.training.split_inputs import SplitInputs
from fedclade.training.threads import using_threads

ENTRIES_AT_A_TIME, ENTRIES_AT_A_TIME_ON_CPU = 2**24, 2**22
"""Of the largest tensor in a forward pass, and of the logits that are scored in one go.

16 MiB on a CPU, in float32: they stay in its caches, and in memory that need not be mapped anew each time.
"""

EXAMPLES_AT_A_TIME = 2**20
"""How many of the clients' examples are looked up in one go, unless a single client has more."""


class Evaluator:
    """Evaluates models for the clients of a federation.

    All clients of a model are evaluated together: an input that several of them hold passes through the model once, and
    inputs of different clients fill a pass. Each example of each client is then scored by the label that the client
    sees. Only if what a module gives for an example depends on the others in the pass, or on the passes before, clients
    that do not hold the same inputs have passes of their own. The state of the module, which is on the device of the
    data, is overwritten.
    """

    def __init__(
        self, federation: Federation, module: nn.Module, layout: Layout, data: ClientsData, task: FittedTask
    ) -> None:
        self._module, self._layout, self._data, self._task = module, layout, data, task
        self._traits: Traits | None = None
        pool = federation.pool
        self._logits_each = pool.outputs * max(1, pool.y[:1].numel())
        self._view_of, self._maps = _views(federation)

    def evaluate(self, query: EvaluationQuery, part: slice, models: Tensor, assignment: Sequence[int]) -> Evaluation:
        """Let each client of a part of a query evaluate its model, by its row of ``[m, F]``."""
        ids, split, compares = query.ids[part], query.split, query.compares
        queries, query_of, makes, held = self._queries(ids, assignment, split, len(models))
        scores = np.empty((len(self._task.metrics) + 2, len(queries[0])))
        each: list[NDArray[Any]] | None = [] if compares else None  # the losses of the examples of each query
        for part in _parts(queries, held):
            of_whom = [ids[place] for place in makes[part].tolist()]
            scores[:, part] = self._scores(queries[:, part], models, held, of_whom, each)
        *by_metric, losses, counts = torch.from_numpy(scores[:, query_of])
        of_all = torch.stack(by_metric, dim=1), losses / counts, counts.to(torch.int64)
        wins = None if each is None else _wins(ids, [each[query] for query in query_of.tolist()])
        return Evaluation(tuple(ids), *of_all, higher_is_better=self._task.metrics[0].higher_is_better, wins=wins)

    def _queries(
        self, ids: Sequence[int], assignment: Sequence[int], split: Split, models: int
    ) -> tuple[Indices, Indices, Indices, SplitInputs]:
        """Return the distinct queries ``[3, q]``, sorted: row of the model, set of inputs, view of the labels.

        Besides, which of them each client makes, ``[n]``, the first place among the clients of one that makes each,
        ``[q]``, and the inputs.
        """
        held = self._data.splits[split]
        rows = np.array([row for _, row in zip(ids, assignment, strict=True)], dtype=np.int64)
        clients = self._data.places(ids)
        sets = held.set_of[clients]
        for k in np.flatnonzero(held.sizes[sets] == 0).tolist():
            raise DataError(
                f"client {ids[k]} has no {split} examples"
                + ("; set data.validation_fraction above 0" if split == "validation" else "")
            )
        # Clients with the same model, inputs and labels make the same query.
        bounds = models, len(held.sizes), len(self._maps)
        of_clients = np.ravel_multi_index((rows, sets, self._view_of[clients]), bounds)
        numbers, makes, query_of = np.unique(of_clients, return_index=True, return_inverse=True)
        return np.stack(np.unravel_index(numbers, bounds)), query_of, makes, held

    def _scores(
        self,
        queries: Indices,
        models: Tensor,
        held: SplitInputs,
        clients: Sequence[int],
        each: list[NDArray[Any]] | None = None,
    ) -> NDArray[Any]:
        """Return the scores of queries by each metric, their summed losses, and how many targets count, ``[M + 2, q]``.

        ``clients`` has one that makes each query. The loss of each example goes to ``each``, query by query.
        """
        examples, metrics = self._examples(queries, models, held), self._task.metrics
        terms, whole = np.empty((len(metrics) + 2, len(examples.place))), _Whole(metrics)
        for some, outputs, at, seen in self._passed(examples, queries, models, held):
            terms[:, some] = score(self._task, outputs, at, seen).cpu()
            whole.keep(some, outputs, at, seen)
        if each is not None:  # the examples of a query stand side by side, in the order of its inputs
            each += np.split(terms[-2], np.bincount(examples.query, minlength=len(queries[0])).cumsum()[:-1])
        scores = np.stack([np.bincount(examples.query, each, len(queries[0])) for each in terms])
        for row, metric in enumerate(metrics):
            scores[row] /= scores[-1]
            if metric.final is not None:
                scores[row] = [metric.final(mean) for mean in scores[row].tolist()]
        for query, numbers in whole.of_queries(examples.query, clients):
            for row, number in numbers.items():
                scores[row, query] = number
        return scores

    @torch.inference_mode()
    def _examples(self, queries: Indices, models: Tensor, held: SplitInputs) -> Examples:
        rows, sets, _ = queries
        if self._traits is None:
            module = _Loader(self._module, self._layout, models)(int(rows[0]))
            self._traits = Traits.of(module, held.inputs(np.arange(min(4, len(held)))))
        return Examples(rows, sets, held, apart=self._traits.mixes)

    @torch.inference_mode()
    def _passed(
        self, examples: Examples, queries: Indices, models: Tensor, held: SplitInputs
    ) -> Iterator[tuple[Indices, Tensor, Tensor, Tensor]]:
        """Pass examples through the models, and yield for some at a time what :func:`score` takes."""
        assert self._traits is not None  # of _examples
        load, traits, views = _Loader(self._module, self._layout, models), self._traits, queries[2]
        entries = ENTRIES_AT_A_TIME_ON_CPU if models.device.type == "cpu" else ENTRIES_AT_A_TIME
        pass_size = traits.pass_size(entries)
        with using_threads(traits.threads(min(pass_size, examples.largest_group))):
            for block in examples.blocks(pass_size, entries // self._logits_each):
                logits = torch.cat([load(one.row, traits.mixes)(held.inputs(one.places)) for one in block.passes])
                some = block.examples
                seen = self._seen(held.targets(examples.place[some]), views[examples.query[some]])
                yield some, logits, torch.from_numpy(block.at), seen

    def _seen(self, targets: Tensor, views: Indices) -> Tensor:
        """Return targets ``[m, ...]`` as clients with these views of the labels see them."""
        if targets.is_floating_point():
            return targets
        counts = targets != IGNORED
        view = torch.from_numpy(views).view(-1, *(1,) * (targets.dim() - 1))
        return torch.where(counts, self._maps[view, targets.where(counts, 0)], IGNORED)


class _Whole:
    """Metrics of all outputs of a client together: keeps the outputs until it has them all."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = {row: metric.whole for row, metric in enumerate(metrics) if metric.whole is not None}
        self._examples: list[Indices] = []
        self._outputs: list[Tensor] = []
        self._targets: list[Tensor] = []

    def keep(self, examples: Indices, outputs: Tensor, at: Tensor, seen: Tensor) -> None:
        """Keep the outputs for some examples; see :func:`score`."""
        if self._metrics:
            self._examples.append(examples)
            self._outputs.append(outputs[at.to(outputs.device)].cpu())
            self._targets.append(seen.cpu())

    def of_queries(self, query: Indices, clients: Sequence[int]) -> Iterator[tuple[int, dict[int, float]]]:
        """Yield the numbers of each query, by the rows of the metrics; ``query`` is of each example."""
        if not self._metrics:
            return
        order = np.argsort(np.concatenate(self._examples))
        outputs, targets = torch.cat(self._outputs)[order], torch.cat(self._targets)[order]
        counts = np.bincount(query, minlength=len(clients)).tolist()
        for k, (mine, seen) in enumerate(zip(outputs.split(counts), targets.split(counts), strict=True)):
            try:
                yield k, {row: whole(mine, seen) for row, whole in self._metrics.items()}
            except DataError as error:
                raise DataError(f"client {clients[k]}: {error}") from None


class _Loader:
    """Makes the module one of the models ``[K, S]``, in evaluation mode: ``load(row)(inputs)``."""

    def __init__(self, module: nn.Module, layout: Layout, models: Tensor) -> None:
        layout.load(models[0], module)  # which checks the length
        self._module, self._row = module.eval(), -1
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self._values = [(tensors[name], values) for name, values in layout.unflatten(models).items()]

    def __call__(self, row: int, anew: bool = True) -> nn.Module:
        """Return the module; ``anew`` undoes what forward may have done to buffers of the same model."""
        if anew or row != self._row:
            for tensor, values in self._values:
                tensor.copy_(values[row])
            self._row = row
        return self._module


def score(task: FittedTask, outputs: Tensor, at: Tensor, seen: Tensor) -> Tensor:
    """Score examples by the outputs ``[b, ...]`` of the distinct inputs.

    ``at`` is which of these is the input of each example, int64 ``[m]``, and ``seen`` its targets ``[m, ...]``, as its
    client sees them. Returns for each example the terms of each metric (0 for those of all outputs together), its loss,
    and how many of its targets count, float64 ``[M + 2, m]``.
    """
    at, seen = at.to(outputs.device), seen.to(outputs.device)
    counts = counted(seen).double()
    losses = _nats(outputs, at, seen) if task.is_plain else task.losses(outputs[at], seen).double() * counts
    terms = [_terms(metric, outputs, at, seen, losses) for metric in task.metrics]
    return torch.stack([*terms, losses, counts])


def _nats(logits: Tensor, at: Tensor, seen: Tensor) -> Tensor:
    """Return the summed cross-entropy of each example, without a copy of the logits for each."""
    at, seen = at.unsqueeze(1), seen.view(len(seen), -1)
    logits = logits.view(len(logits), seen.shape[1], -1)
    counts, place = seen != IGNORED, torch.arange(seen.shape[1], device=seen.device)
    nats = -functional.log_softmax(logits, -1)[at, place, seen.where(counts, 0)]
    return nats.where(counts, 0).sum(1, dtype=torch.float64)


def _terms(metric: Metric, outputs: Tensor, at: Tensor, seen: Tensor, losses: Tensor) -> Tensor:
    if metric.whole is not None:
        return torch.zeros_like(losses)
    if metric.terms is None:
        return losses
    predicted = outputs if metric.predict is None else metric.predict(outputs)
    return metric.terms(predicted[at], seen)


def _wins(ids: Sequence[int], losses: Sequence[NDArray[Any]]) -> Tensor:
    """Return of how many examples of its client each model has the least loss; those of a client stand side by side."""
    wins, first = torch.zeros(len(ids), dtype=torch.int64), 0
    while first < len(ids):
        stop = next((place for place in range(first, len(ids)) if ids[place] != ids[first]), len(ids))
        table = np.nan_to_num(np.stack(losses[first:stop]), nan=np.inf)
        wins[first:stop] = torch.from_numpy(np.bincount(table.argmin(axis=0), minlength=stop - first))
        first = stop
    return wins


def _views(federation: Federation) -> tuple[Indices, Tensor]:
    """Return the view that each client has of the labels, ``[n]``, and the label map of each view."""
    plain = torch.arange(federation.pool.outputs)
    if isinstance(table := federation.clients, ClientTable):
        view = np.broadcast_to(np.int64(0), len(table)) if table.view is None else table.view + 1
        return view, plain[None] if table.label_maps is None else torch.cat([plain[None], table.label_maps])
    maps = {id(client.label_map): client.label_map for client in federation.clients}
    view_of = {key: view for view, key in enumerate(maps)}
    views = np.array([view_of[id(client.label_map)] for client in federation.clients])
    return views, torch.stack([plain if m is None else m for m in maps.values()])


def _parts(queries: Indices, held: SplitInputs) -> Iterator[slice]:
    """Cut queries into parts of some examples."""
    part = held.sizes[queries[1]].cumsum() // EXAMPLES_AT_A_TIME
    for start, stop in pairwise([*np.unique(part, return_index=True)[1].tolist(), len(part)]):
        yield slice(start, stop)
