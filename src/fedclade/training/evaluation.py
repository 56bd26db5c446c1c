"""Evaluation of models on the data of simulated clients.

All clients that evaluate the same model are evaluated together, with one forward pass per distinct
pair of model and input. In this module, a query is a distinct combination of a model, a set of
inputs and a label map, which several clients may share; a set is the inputs of one client in a data
split (training, validation or test data).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fedclade.core import (
    IGNORED,
    DataError,
    Evaluation,
    EvaluationQuery,
    Indices,
    Layout,
    Split,
    restore_buffer,
)
from fedclade.data import ClientTable, Federation
from fedclade.tasks import FittedTask, Metric, count_targets, mix_outputs
from fedclade.training.data import ClientsData, SplitInputs
from fedclade.training.jobs import full
from fedclade.training.threads import WORTH_SHARING, using_threads

# Forward passes of an evaluation: batches of inputs for one model.

LARGEST_PASS = 1024
"""Largest number of examples in a forward pass."""

TOLERANCE = 5e-3
"""Largest difference of outputs between passes of different size, relative to the largest output.

It allows for the rounding of convolutions on a GPU, which may use 10 bits of mantissa (TF32).
"""


@dataclass(frozen=True)
class Pass:
    """Forward pass of one model on some inputs.

    The model is given by its row among the models, and the inputs by their places in
    :class:`~fedclade.training.data.SplitInputs`.
    """

    row: int
    places: Indices


@dataclass(frozen=True, eq=False)
class Block:
    """Forward passes whose outputs are concatenated, and the examples to score by these outputs."""

    passes: list[Pass]
    examples: Indices
    at: Indices  #: for each example, the index of its input among the passes' concatenated inputs


class Examples:
    """Examples of an evaluation's queries, and the distinct pairs of model and input among them.

    Clients often share inputs, so an example is a use of an input by one query, and several
    examples may need the same forward pass.

    Parameters
    ----------
    rows
        For each of q queries, the row of its model, int64 ``[q]``. Queries are sorted by model,
        then by set.
    sets
        For each query, the number of its set of inputs, int64 ``[q]``.
    held
        The inputs of the data split.
    apart
        Whether a forward pass must not mix inputs of different sets.

    Attributes
    ----------
    query
        For each of m examples, the number of its query, int64 ``[m]``.
    place
        For each example, the place of its input in ``held``, int64 ``[m]``.
    largest_group
        Largest number of inputs that may share a forward pass.
    """

    def __init__(self, rows: Indices, sets: Indices, held: SplitInputs, apart: bool) -> None:
        sizes = held.sizes[sets]
        self.query = np.arange(len(sets)).repeat(sizes)
        before = sizes.cumsum() - sizes
        self.place = held.at(np.arange(len(self.query)) + (held.starts[sets] - before)[self.query])
        # A pair is a model and an input. Pairs of the same group may share a forward pass.
        other = (np.diff(rows) != 0) | (apart & (np.diff(sets) != 0))
        group = np.concatenate([[0], other.cumsum()])
        pairs = group[self.query] * len(held) + self.place
        # A stable sort is fast if the pairs are sorted already, which is the common case.
        self._by_pair = np.argsort(pairs, kind="stable")
        pairs = pairs[self._by_pair]
        is_new = np.diff(pairs, prepend=-1) > 0
        self._pair_of = is_new.cumsum() - 1
        groups, self._places = np.divmod(pairs[is_new], len(held))
        self._edges = np.flatnonzero(np.diff(groups, prepend=-1, append=groups[-1] + 1)).tolist()
        self._rows = rows[np.flatnonzero(np.diff(group, prepend=-1))].tolist()
        self.largest_group = int(np.diff(self._edges).max())

    def blocks(self, pass_size: int, block_size: int) -> Iterator[Block]:
        """Cut the pairs of model and input into forward passes, and yield passes in blocks.

        A pass has at most ``pass_size`` inputs. A block has at most ``block_size`` inputs, unless
        it consists of a single pass.
        """
        passes: list[Pass] = []
        start = stop = 0
        for row, (first, last) in zip(self._rows, pairwise(self._edges), strict=True):
            for begin in range(first, last, pass_size):
                end = min(begin + pass_size, last)
                if passes and end - start > block_size:
                    yield self._block(passes, start, stop)
                    passes = []
                    start = begin
                passes.append(Pass(row, self._places[begin:end]))
                stop = end
        yield self._block(passes, start, stop)

    def _block(self, passes: list[Pass], start: int, stop: int) -> Block:
        """Return the block of passes for the pairs from ``start`` to ``stop``."""
        there = slice(*np.searchsorted(self._pair_of, (start, stop)))
        return Block(passes, self._by_pair[there], self._pair_of[there] - start)


@dataclass(frozen=True)
class Traits:
    """Properties of a module's forward pass, by which inputs are divided into passes."""

    entries: int  #: entries of the largest tensor, per example
    operations: float  #: floating-point operations, per example
    #: whether the output for an example depends on other examples of the pass, or on earlier passes
    mixes: bool

    @classmethod
    @torch.no_grad()
    def of(cls, module: nn.Module, inputs: Tensor) -> Traits:
        """Measure the properties of a module's forward pass, in evaluation mode, on four inputs.

        If there are fewer than four inputs, they are repeated. Whether the module mixes the inputs
        of a pass can be detected only if the inputs differ.
        """
        four = inputs[torch.arange(4) % len(inputs)]
        two, others = four.split(2)
        with FlopCounterMode(display=False) as counter:
            with _Sizes() as of_four:
                together = module(four)
            with _Sizes() as of_two:
                first = module(two)
        # Tensors that do not grow with the number of inputs, such as a copy of a parameter, do not
        # count.
        growth = (
            max(large - small for large, small in zip(of_four.sizes, of_two.sizes, strict=False))
            // 2
        )
        apart = torch.cat([first, module(others)])
        # Outputs of a model that has diverged are NaN or infinite. Outputs in half precision have
        # fewer digits, so they get a larger tolerance.
        relative = max(TOLERANCE, 4 * torch.finfo(together.dtype).eps)
        tolerance = relative * float(together.abs().nan_to_num(0.0, 0.0).max())
        mixes = not torch.allclose(together, apart, rtol=0, atol=tolerance, equal_nan=True)
        return cls(max(growth, four[0].numel()), counter.get_total_flops() / (4 + 2), mixes)

    def pass_size(self, entries: int) -> int:
        """Return the number of inputs up to which no tensor of a pass exceeds ``entries`` entries.

        The result is at least 1, and at most :data:`LARGEST_PASS`.
        """
        return max(1, min(LARGEST_PASS, entries // self.entries))

    def threads(self, inputs: int) -> int:
        """Return the number of CPU threads for a forward pass of ``inputs`` inputs.

        The number is 1 unless the pass has so many operations that more threads make it faster.
        """
        if inputs * self.operations < WORTH_SHARING:
            return 1
        return torch.get_num_threads()


class _Sizes(TorchDispatchMode):
    """Dispatch mode of torch that records the size of every result, to estimate a pass's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        several = results if isinstance(results, tuple | list) else (results,)
        for result in several:
            if isinstance(result, Tensor):
                self.sizes.append(result.untyped_storage().nbytes() // result.element_size())
        return results


# Scores of examples, computed from the models' outputs, and of clients, from all their examples.

_log = logging.getLogger(__name__)


class Whole:
    """Collector of outputs for metrics and losses that need all outputs of a client at once.

    Parameters
    ----------
    task
        The metrics, and the loss if it is a loss over a whole batch.
    warned
        Names of metrics whose errors have already been logged. When this object logs the error of
        another metric, it adds that metric's name.
    """

    def __init__(self, task: FittedTask, warned: set[str]) -> None:
        self.task = task
        self._warned = warned
        self._metrics = {
            row: metric for row, metric in enumerate(task.metrics) if metric.whole is not None
        }
        self._examples: list[Indices] = []
        self._outputs: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._device = torch.device("cpu")

    @property
    def _is_needed(self) -> bool:
        """Whether the task has a metric or a loss that needs all outputs of a client at once."""
        return bool(self._metrics) or self.task.over_batch

    def keep(self, examples: Indices, outputs: Tensor, at: Tensor, seen: Tensor) -> None:
        """Store the outputs and targets of some examples for the scores over whole clients.

        Parameters
        ----------
        examples
            Numbers of the m examples, int64 ``[m]``.
        outputs
            Outputs for the distinct inputs, ``[b, ...]``.
        at
            For each example, the index of its input among these outputs, int64 ``[m]``.
        seen
            Targets of the examples, ``[m, ...]``, with the client's label map applied.
        """
        if self._is_needed:
            self._examples.append(examples)
            self._device = outputs.device
            self._outputs.append(outputs[at.to(outputs.device)].cpu())
            self._targets.append(seen.cpu())

    def of_queries(
        self, query: Indices, clients: Sequence[int]
    ) -> Iterator[tuple[int, dict[int, float]]]:
        """Yield each query's scores by the metrics that need all outputs of a client at once.

        Parameters
        ----------
        query
            For each of m examples, the number of its query, int64 ``[m]``.
        clients
            For each query, the id of one of the clients that make the query, for warnings.

        Yields
        ------
        tuple
            The number of a query, and a dict of its scores. The key of a score is the number of the
            metric. If the loss is defined over a whole batch, the dict also has the loss times the
            number of targets; its key is the number of metrics.
        """
        if not self._is_needed:
            return
        order = np.argsort(np.concatenate(self._examples))
        outputs = torch.cat(self._outputs)[order]
        targets = torch.cat(self._targets)[order]
        outputs = like_targets(self.task, outputs, targets)
        predictions = self.task.predictions(outputs)
        counts = np.bincount(query, minlength=len(clients)).tolist()
        splits = (tensor.split(counts) for tensor in (outputs, predictions, targets))
        for k, (mine, predicted, seen) in enumerate(zip(*splits, strict=True)):
            numbers = {
                row: self._number(metric, predicted, seen, clients[k])
                for row, metric in self._metrics.items()
            }
            if self.task.over_batch:
                there = mine.to(self._device), seen.to(self._device)
                numbers[len(self.task.metrics)] = float(self.task.total_loss(*there))
            yield k, numbers

    def _number(self, metric: Metric, outputs: Tensor, targets: Tensor, client: int) -> float:
        """Return a client's score by a metric that needs all of the client's outputs.

        The score is the metric's worst value if an output is not finite, and NaN if the metric
        returns None or raises an exception.
        """
        assert metric.whole is not None  # so are all metrics in self._metrics
        if not bool(outputs.isfinite().all()):
            return metric.worst
        try:
            # Copies, since a user's own metric may work in place, and the next metric gets the same
            # tensors.
            score = metric.whole(outputs.clone(), targets.clone())
            if score is None:  # pyright: ignore[reportUnnecessaryComparison]  (of users)
                return math.nan
            return float(score)
        except Exception as error:  # an error of a user's metric must not end the run
            if metric.name not in self._warned:
                _log.warning(
                    "client %d, and possibly other clients, get no score from metric %s, which "
                    "raised %s: %s",
                    client,
                    metric.name,
                    type(error).__name__,
                    error,
                )
            self._warned.add(metric.name)
            return math.nan


def like_targets(task: FittedTask, outputs: Tensor, targets: Tensor) -> Tensor:
    """Reshape outputs ``[n, ...]`` like the targets, for tasks with one output per target.

    Binary, multi-label and regression tasks have one output per target. The outputs of other tasks
    are unchanged, as are outputs of another size, for a loss and metrics of the user's own.
    """
    if task.has_own_widths and outputs.numel() * len(targets) != targets.numel() * len(outputs):
        return outputs
    if task.kind in ("binary", "multilabel", "regression"):
        return outputs.reshape(len(outputs), *targets.shape[1:])
    return outputs


def score(task: FittedTask, outputs: Tensor, at: Tensor, seen: Tensor) -> Tensor:
    """Compute each example's contribution to the metrics and to the loss, from a model's outputs.

    The contributions, called terms, can be summed over the examples of a client.

    Parameters
    ----------
    task
        The metrics and the loss.
    outputs
        Outputs for the b distinct inputs, ``[b, ...]``.
    at
        For each of m examples, the index of its input among these outputs, int64 ``[m]``.
    seen
        Targets of the examples, ``[m, ...]``, with the client's label map applied.

    Returns
    -------
    Tensor
        For each of m examples: its terms of the M metrics (0 for a metric that needs all outputs of
        a client at once), its loss, and its number of targets that are not ignored, float64
        ``[M + 2, m]``.
    """
    at = at.to(outputs.device)
    seen = seen.to(outputs.device)
    counts = count_targets(seen).double()
    outputs = like_targets(task, outputs, seen)
    if task.is_plain:
        losses = _sum_cross_entropy(outputs, at, seen)
    elif task.over_batch:  # computed from all examples of a client at once, see Whole
        losses = torch.zeros_like(counts)
    else:
        losses = task.losses(outputs[at], seen).double() * counts
    predictions = task.predictions(outputs)
    terms = [_compute_terms(metric, predictions, at, seen, losses) for metric in task.metrics]
    return torch.stack([*terms, losses, counts])


def _sum_cross_entropy(logits: Tensor, at: Tensor, seen: Tensor) -> Tensor:
    """Return the cross-entropy of each example, summed over its targets, float64 ``[m]``.

    Examples with the same input share its log-probabilities, so no copy of the logits is made for
    each example.
    """
    at = at.unsqueeze(1)
    seen = seen.view(len(seen), -1)
    logits = logits.reshape(len(logits), seen.shape[1], -1)
    counts = seen != IGNORED
    place = torch.arange(seen.shape[1], device=seen.device)
    nats = -functional.log_softmax(logits, -1)[at, place, seen.where(counts, 0)]
    return nats.where(counts, 0).sum(1, dtype=torch.float64)


def _compute_terms(
    metric: Metric, outputs: Tensor, at: Tensor, seen: Tensor, losses: Tensor
) -> Tensor:
    """Return each example's contribution (term) to a metric, float64 ``[m]``.

    If the metric defines no terms, the terms are the losses. If the metric needs all outputs of a
    client at once, the terms are 0.
    """
    if metric.whole is not None:
        return torch.zeros_like(losses)
    if metric.terms is None:
        return losses
    if metric.predict is not None:
        outputs = metric.predict(outputs)
    return metric.terms(outputs[at], seen)


def wins_of(ids: Sequence[int], losses: Sequence[NDArray[Any]]) -> Tensor:
    """Count the examples on which each model has a lower loss than its client's other models.

    Each client evaluates one or several models on all of its examples.

    Parameters
    ----------
    ids
        The client that evaluates each model; equal ids are adjacent.
    losses
        Losses of each of n models on all examples of its client.

    Returns
    -------
    Tensor
        Numbers of examples, int64 ``[n]``. If losses are equal, the first model wins; a loss of NaN
        counts as infinite.
    """
    wins = torch.zeros(len(ids), dtype=torch.int64)
    first = 0
    while first < len(ids):
        stop = next(
            (place for place in range(first, len(ids)) if ids[place] != ids[first]), len(ids)
        )
        # A model with a loss of NaN must not win, but argmin would return its row.
        table = np.nan_to_num(np.stack(losses[first:stop]), nan=np.inf)
        wins[first:stop] = torch.from_numpy(
            np.bincount(table.argmin(axis=0), minlength=stop - first)
        )
        first = stop
    return wins


ENTRIES_AT_A_TIME = 2**24
ENTRIES_AT_A_TIME_ON_CPU = 2**22
"""Largest number of entries of a tensor in a forward pass, and of logits scored at once.

The limit on a CPU is 16 MiB in float32: such tensors stay in the CPU's caches, and their memory is
reused without being mapped again for every pass.
"""

EXAMPLES_AT_A_TIME = 2**20
"""Number of the clients' examples that are looked up at once, unless a single client has more."""


class Evaluator:
    """Evaluator of models for the simulated clients of a federation.

    All clients that are evaluated with the same model are evaluated together. The model computes its
    output for each distinct input once, in forward passes with inputs of several clients, and each
    client's examples are then scored with the client's own labels. There is one exception: if the
    output for an example depends on other examples of the pass, or on earlier passes, each client
    gets forward passes of its own. The evaluator loads the models into its module, which is on the
    device of the data.

    Parameters
    ----------
    federation
        The clients.
    module
        The model's structure.
    layout
        Layout of the whole model.
    data
        The clients' data on the device.
    task
        The metrics and the loss.
    """

    def __init__(
        self,
        federation: Federation,
        module: nn.Module,
        layout: Layout,
        data: ClientsData,
        task: FittedTask,
    ) -> None:
        self._module = module
        self._layout = layout
        self._data = data
        self.task = task
        self._traits: Traits | None = None
        self._warned = set[str]()  # names of metrics whose errors have been logged
        pool = federation.pool
        self._logits_each = pool.outputs_each
        self._view_of, self._maps = _number_label_maps(federation)

    def evaluate(
        self, query: EvaluationQuery, part: slice, models: Tensor, assignment: Sequence[int]
    ) -> Evaluation:
        """Evaluate one model for each client in a part of an evaluation query.

        Parameters
        ----------
        query
            The evaluation query.
        part
            The part, as a slice of the query's clients.
        models
            Whole models as parameter vectors, ``[m, F]``.
        assignment
            For each client of the part, the row of the model that it evaluates.
        """
        ids = query.ids[part]
        split = query.split
        compares = query.compares
        if compares:
            self.task.check_losses_of_examples()
        queries, query_of, makes, held = self._queries(ids, assignment, split, len(models))
        scores = np.empty((len(self.task.metrics) + 2, len(queries[0])))
        # Losses of the examples of each query; None if no losses are compared.
        losses: list[NDArray[Any]] | None = [] if compares else None
        for part in _cut_queries(queries, held):
            clients = [ids[place] for place in makes[part].tolist()]
            scores[:, part] = self._scores(
                queries[:, part], models, held, clients=clients, losses=losses
            )
        wins: Tensor | None = None
        if losses is not None:
            wins = wins_of(ids, [losses[query] for query in query_of.tolist()])
        return self._evaluation(ids, scores[:, query_of], wins)

    def evaluate_mixture(
        self, ids: Sequence[int], models: Tensor, weights: Tensor, split: Split
    ) -> Evaluation:
        """Evaluate, for each client, the mixture of all models by the client's weights.

        The output of a mixture is the weighted mean of the models' predictions.

        Parameters
        ----------
        ids
            The clients.
        models
            The K models of the mixture as parameter vectors, ``[K, S]``.
        weights
            The weights π of each of n clients, ``[n, K]``.
        split
            Data split on which to evaluate: ``train``, ``validation`` or ``test``.
        """
        scores = np.empty((len(self.task.metrics) + 2, len(ids)))
        for places, outputs, seen, counts in self.outputs(ids, models, split):
            query = np.arange(len(places)).repeat(counts)
            everything = torch.arange(len(seen))
            predicted = mix_outputs(
                self.task.kind, outputs, weights[places][query].to(outputs.device)
            )
            passed = [(everything.numpy(), predicted, everything, seen)]
            scores[:, places] = self._sum_scores(query, [ids[place] for place in places], passed)
        return self._evaluation(ids, scores)

    def outputs(
        self, ids: Sequence[int], models: Tensor, split: Split
    ) -> Iterator[tuple[list[int], Tensor, Tensor, Indices]]:
        """Yield the outputs of all models ``[K, S]`` for the examples of a few clients at a time.

        Yields
        ------
        tuple
            Places of some clients in ``ids``; the K models' outputs ``[K, m, ...]`` for the m
            examples of these clients, concatenated; targets ``[m, ...]``, mapped by the label map
            of each client; and the number of examples of each client.
        """
        held = self._held(ids, split)
        clients = self._data.places(ids)
        order = np.argsort(held.set_of[clients], kind="stable")
        sets = held.set_of[clients][order]
        views = self._view_of[clients[order]]
        queries = np.stack([np.zeros_like(sets), sets, views])
        # An input that several clients have passes through each model once.
        at_a_time = max(1, ENTRIES_AT_A_TIME // (len(models) * self._logits_each))
        for part in _cut_queries(queries, held, at_a_time):
            each: list[Tensor] = []
            for row in range(len(models)):
                some = queries[:, part] + np.array([[row], [0], [0]])
                examples = self._examples(some, models, held)
                passed = [*self._pass_examples(examples, some, models, held)]
                back = torch.from_numpy(np.concatenate([where for where, *_ in passed]).argsort())
                rows = torch.cat([outputs[at.to(outputs.device)] for _, outputs, at, _ in passed])
                each.append(rows[back.to(rows.device)])
                if row == 0:
                    seen = torch.cat([mine for *_, mine in passed])[back]
            yield order[part].tolist(), torch.stack(each), seen, held.sizes[queries[1, part]]  # pyright: ignore[reportPossiblyUnboundVariable]  (a mixture has a model)

    def losses(self, outputs: Tensor, seen: Tensor) -> Tensor:
        """Return the losses of m examples by K models, ``[K, m]``.

        ``outputs`` and ``seen`` are outputs and targets that :meth:`outputs` has yielded.
        """
        return torch.stack([self.task.losses(each, seen.to(each.device)) for each in outputs])

    def _evaluation(
        self, ids: Sequence[int], scores: NDArray[Any], wins: Tensor | None = None
    ) -> Evaluation:
        """Return the evaluation of some clients, given an array ``scores`` ``[M + 2, n]``.

        The rows of the array are the scores of the n clients by each of M metrics, the summed
        losses, and the numbers of targets.
        """
        *by_metric, losses, counts = torch.from_numpy(scores)
        return Evaluation(
            tuple(ids),
            scores=torch.stack(by_metric, dim=1),
            losses=losses / counts,
            examples=counts.to(torch.int64),
            higher_is_better=self.task.metrics[0].higher_is_better,
            wins=wins,
        )

    def _held(self, ids: Sequence[int], split: Split) -> SplitInputs:
        """Return the inputs of a data split; check that all clients have examples in the split.

        Raises
        ------
        DataError
            If a client has no examples in the split.
        """
        held = self._data.splits[split]
        sets = held.set_of[self._data.places(ids)]
        without = np.flatnonzero(held.sizes[sets] == 0).tolist()
        if without:
            advice = ""
            if split == "validation":
                advice = "; set data.validation_fraction above 0"
            raise DataError(f"client {ids[without[0]]} has no {split} examples{advice}")
        return held

    def _queries(
        self, ids: Sequence[int], assignment: Sequence[int], split: Split, models: int
    ) -> tuple[Indices, Indices, Indices, SplitInputs]:
        """Return the distinct queries of some clients, sorted, and how they relate to the clients.

        Returns
        -------
        tuple
            The q queries, ``[3, q]``: row of the model, number of the set of inputs, and number of
            the label map; for each of n clients, the number of its query, ``[n]``; for each query,
            the place in ``ids`` of one client that makes the query, ``[q]``; and the inputs of the
            data split.
        """
        held = self._held(ids, split)
        rows = np.array([row for _, row in zip(ids, assignment, strict=True)], dtype=np.int64)
        clients = self._data.places(ids)
        sets = held.set_of[clients]
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
        *,
        clients: Sequence[int],
        losses: list[NDArray[Any]] | None = None,
    ) -> NDArray[Any]:
        """Score queries, and return an array ``[M + 2, q]`` for M metrics and q queries.

        The rows of the array are the scores by each metric, the summed losses, and the numbers of
        targets. ``clients`` has, for each query, the id of one of the clients that make it, for
        warnings. The losses of each query's examples are appended to the list ``losses``, if given.
        """
        examples = self._examples(queries, models, held)
        passed = self._pass_examples(examples, queries, models, held)
        return self._sum_scores(examples.query, clients, passed, losses=losses)

    def _sum_scores(
        self,
        query: Indices,
        clients: Sequence[int],
        passed: Iterable[tuple[Indices, Tensor, Tensor, Tensor]],
        *,
        losses: list[NDArray[Any]] | None = None,
    ) -> NDArray[Any]:
        """Compute the scores of q queries from the models' outputs for their examples.

        The result is an array ``[M + 2, q]``, as described in :meth:`_scores`. ``passed`` contains
        the outputs, as :meth:`_pass_examples` yields them.
        """
        metrics = self.task.metrics
        terms = np.empty((len(metrics) + 2, len(query)))
        whole = Whole(self.task, self._warned)
        diverged = np.zeros(len(clients), dtype=bool)
        for some, outputs, at, seen in passed:
            terms[:, some] = score(self.task, outputs, at, seen).cpu()
            whole.keep(some, outputs, at, seen)
            if np.isnan(terms[: len(metrics), some]).any():
                broken = ~outputs.flatten(1).isfinite().all(1).cpu()[at.cpu()].numpy()
                diverged[query[some][broken]] = True
        # The examples of a query are adjacent, in the order of its inputs.
        if losses is not None:
            counts = np.bincount(query, minlength=len(clients))
            losses += np.split(terms[-2], counts.cumsum()[:-1])
        scores = np.stack([np.bincount(query, of_term, len(clients)) for of_term in terms])
        for row, metric in enumerate(metrics):
            scores[row] /= scores[-1]
            if metric.final is not None:
                scores[row] = [metric.final(mean) for mean in scores[row].tolist()]
            scores[row, np.isnan(scores[row]) & diverged] = metric.worst
        for place, numbers in whole.of_queries(query, clients):
            for row, number in numbers.items():
                scores[row, place] = number
        return scores

    @torch.inference_mode()
    def _examples(self, queries: Indices, models: Tensor, held: SplitInputs) -> Examples:
        """Return the examples of some queries, sorted for forward passes.

        The first call also measures the properties of the module's forward pass.
        """
        rows, sets, _ = queries
        if self._traits is None:
            module = _Loader(self._module, self._layout, models)(int(rows[0]))
            self._traits = Traits.of(module, held.inputs(np.arange(min(4, len(held)))))
        return Examples(rows, sets, held, apart=self._traits.mixes)

    @torch.inference_mode()
    def _pass_examples(
        self, examples: Examples, queries: Indices, models: Tensor, held: SplitInputs
    ) -> Iterator[tuple[Indices, Tensor, Tensor, Tensor]]:
        """Pass examples through the models, block by block.

        Yields
        ------
        tuple
            Numbers of the m examples of a block; outputs for the b distinct inputs, ``[b, ...]``;
            for each example, the index of its input among the outputs, ``[m]``; and the targets,
            ``[m, ...]``.
        """
        assert self._traits is not None  # _examples has set them
        load = _Loader(self._module, self._layout, models)
        traits = self._traits
        views = queries[2]
        entries = ENTRIES_AT_A_TIME
        if models.device.type == "cpu":
            entries = ENTRIES_AT_A_TIME_ON_CPU
        pass_size = traits.pass_size(entries)
        with using_threads(traits.threads(min(pass_size, examples.largest_group))):
            for block in examples.blocks(pass_size, entries // self._logits_each):
                passed = [
                    load(one.row, traits.mixes)(held.inputs(one.places)) for one in block.passes
                ]
                logits = full(torch.cat(passed))
                some = block.examples
                seen = self._map_targets(
                    held.targets(examples.place[some]), views[examples.query[some]]
                )
                yield some, logits, torch.from_numpy(block.at), seen

    def _map_targets(self, targets: Tensor, views: Indices) -> Tensor:
        """Return targets ``[m, ...]`` mapped by the label map of each example's client.

        ``views`` has the number of each example's label map, ``[m]``. Targets that are not labels,
        and targets that are ignored, stay unchanged.
        """
        if targets.is_floating_point():
            return targets
        counts = targets != IGNORED
        view = torch.from_numpy(views).view(-1, *(1,) * (targets.dim() - 1))
        return torch.where(counts, self._maps[view, targets.where(counts, 0)], IGNORED)


class _Loader:
    """Function that loads one of the models ``[K, S]`` into a module, in evaluation mode.

    ``load(row)`` returns the module with the parameters and buffers of a row.
    """

    def __init__(self, module: nn.Module, layout: Layout, models: Tensor) -> None:
        layout.load(models[0], module)  # also checks the length
        self._module = module.eval()
        self._row = -1
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self._values = [
            (tensors[name], values) for name, values in layout.unflatten(models).items()
        ]
        self._unsent = layout.unsent

    def __call__(self, row: int, anew: bool = True) -> nn.Module:
        """Return the module with the parameters and buffers of the model in a row.

        With ``anew``, the model is loaded even if it was also the last model that was loaded, since
        a forward pass may have changed the module's buffers.
        """
        if anew or row != self._row:
            for tensor, values in self._values:
                tensor.copy_(values[row])
            for name, value in self._unsent.items():
                restore_buffer(self._module, name, value)
            self._row = row
        return self._module


def _number_label_maps(federation: Federation) -> tuple[Indices, Tensor]:
    """Return the number of each client's label map, ``[n]``, and all distinct label maps.

    A label map assigns to each label of the data the label that a client uses.
    """
    plain = torch.arange(federation.pool.outputs)
    if isinstance(table := federation.clients, ClientTable):
        # Map 0 leaves labels unchanged. The table numbers its label maps from 0, and uses -1 for
        # clients without a label map.
        view_of_client = np.broadcast_to(np.int64(0), len(table))
        if table.view is not None:
            view_of_client = table.view + 1
        label_maps = plain[None]
        if table.label_maps is not None:
            label_maps = torch.cat([label_maps, table.label_maps])
        return view_of_client, label_maps
    maps = {id(client.label_map): client.label_map for client in federation.clients}
    view_of = {key: view for view, key in enumerate(maps)}
    views = np.array([view_of[id(client.label_map)] for client in federation.clients])
    label_maps = [plain if label_map is None else label_map for label_map in maps.values()]
    return views, torch.stack(label_maps)


def _cut_queries(
    queries: Indices, held: SplitInputs, examples: int | None = None
) -> Iterator[slice]:
    """Cut queries into slices with about ``examples`` examples each, to limit the memory.

    None: slices of about :data:`EXAMPLES_AT_A_TIME` examples.
    """
    part = held.sizes[queries[1]].cumsum() // (examples or EXAMPLES_AT_A_TIME)
    for start, stop in pairwise([*np.unique(part, return_index=True)[1].tolist(), len(part)]):
        yield slice(start, stop)
