"""Evaluation of simulated clients, with one forward pass per distinct pair of model and input."""

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

# Forward passes of an evaluation: the inputs that go through a model together.

LARGEST_PASS = 1024
"""Largest number of examples in a forward pass."""

TOLERANCE = 5e-3
"""Largest difference of outputs between passes of different size, relative to the largest output.

Convolutions on a GPU keep 10 bits.
"""


@dataclass(frozen=True)
class Pass:
    """A forward pass of one model, given by its row, on the inputs at some places."""

    row: int
    places: Indices


@dataclass(frozen=True, eq=False)
class Block:
    """One or more passes, concatenated, and the examples that are scored by their outputs."""

    passes: list[Pass]
    examples: Indices
    at: Indices  #: index, among the concatenated inputs of the passes, of each example's input


class Examples:
    """Examples of some queries, and the distinct pairs of model and input that they need.

    Parameters
    ----------
    rows
        Row of the model of each of q queries, int64 ``[q]``. Queries are sorted by model, then by
        set.
    sets
        Number of the set of inputs of each query, int64 ``[q]``.
    held
        The inputs of the split.
    apart
        Whether a pass must not mix inputs of different sets.

    Attributes
    ----------
    query
        Number of the query of each of m examples, int64 ``[m]``.
    place
        Place of the input of each example, int64 ``[m]``.
    largest_group
        Largest number of inputs that may share a pass.
    """

    def __init__(self, rows: Indices, sets: Indices, held: SplitInputs, apart: bool) -> None:
        sizes = held.sizes[sets]
        self.query = np.arange(len(sets)).repeat(sizes)
        before = sizes.cumsum() - sizes
        self.place = held.at(np.arange(len(self.query)) + (held.starts[sets] - before)[self.query])
        # Pairs of the same group may share a pass.
        other = (np.diff(rows) != 0) | (apart & (np.diff(sets) != 0))
        group = np.concatenate([[0], other.cumsum()])
        pairs = group[self.query] * len(held) + self.place
        # A stable sort is fast where pairs are sorted already.
        self._by_pair = np.argsort(pairs, kind="stable")
        pairs = pairs[self._by_pair]
        is_new = np.diff(pairs, prepend=-1) > 0
        self._pair_of = is_new.cumsum() - 1
        groups, self._places = np.divmod(pairs[is_new], len(held))
        self._edges = np.flatnonzero(np.diff(groups, prepend=-1, append=groups[-1] + 1)).tolist()
        self._rows = rows[np.flatnonzero(np.diff(group, prepend=-1))].tolist()
        self.largest_group = int(np.diff(self._edges).max())

    def blocks(self, pass_size: int, block_size: int) -> Iterator[Block]:
        """Cut the pairs into passes of at most ``pass_size`` inputs, and group passes into blocks.

        A block has at most ``block_size`` inputs, or one pass.
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
        there = slice(*np.searchsorted(self._pair_of, (start, stop)))
        return Block(passes, self._by_pair[there], self._pair_of[there] - start)


@dataclass(frozen=True)
class Traits:
    """Properties of a module's forward pass."""

    entries: int  #: entries of the largest tensor, per example
    operations: float  #: floating-point operations, per example
    #: whether the output for an example depends on other examples of the pass, or on earlier passes
    mixes: bool

    @classmethod
    @torch.no_grad()
    def of(cls, module: nn.Module, inputs: Tensor) -> Traits:
        """Measure the traits of a module in evaluation mode on four inputs.

        If there are fewer inputs they are repeated; equal inputs would not show that a module mixes
        them.
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
        """Return the largest size of a pass in which no tensor exceeds ``entries`` entries.

        It is at least 1, and at most :data:`LARGEST_PASS`.
        """
        return max(1, min(LARGEST_PASS, entries // self.entries))

    def threads(self, inputs: int) -> int:
        """Return the number of threads for a pass of ``inputs`` inputs.

        It is 1 unless the pass has enough operations to be faster with all threads.
        """
        return torch.get_num_threads() if inputs * self.operations >= WORTH_SHARING else 1


class _Sizes(TorchDispatchMode):
    """Dispatch mode that records the number of entries of the results of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else (results,):
            if isinstance(result, Tensor):
                self.sizes.append(result.untyped_storage().nbytes() // result.element_size())
        return results


# Scores of examples by the models' outputs, and of clients by all of their examples.

_log = logging.getLogger(__name__)


class Whole:
    """Metrics, and a loss, that need all outputs of a client at once; collects the outputs.

    Parameters
    ----------
    task
        The metrics, and the loss if it is a loss over a whole batch.
    warned
        Names of metrics whose errors have already been logged; names are added.
    """

    def __init__(self, task: FittedTask, warned: set[str]) -> None:
        self._task = task
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
        return bool(self._metrics) or self._task.over_batch

    def keep(self, examples: Indices, outputs: Tensor, at: Tensor, seen: Tensor) -> None:
        """Store the outputs for some examples, given the arguments of :func:`score`."""
        if self._is_needed:
            self._examples.append(examples)
            self._device = outputs.device
            self._outputs.append(outputs[at.to(outputs.device)].cpu())
            self._targets.append(seen.cpu())

    def of_queries(
        self, query: Indices, clients: Sequence[int]
    ) -> Iterator[tuple[int, dict[int, float]]]:
        """Yield the number of each query and its scores, by row of the metric.

        Parameters
        ----------
        query
            Number of the query of each example, int64 ``[m]``.
        clients
            The client of each query.

        Yields
        ------
        tuple
            The number of a query and its scores by row. A loss over the batch is in the row after
            those of the metrics, times the number of targets.
        """
        if not self._is_needed:
            return
        order = np.argsort(np.concatenate(self._examples))
        outputs = torch.cat(self._outputs)[order]
        targets = torch.cat(self._targets)[order]
        outputs = like_targets(self._task, outputs, targets)
        counts = np.bincount(query, minlength=len(clients)).tolist()
        for k, (mine, seen) in enumerate(
            zip(outputs.split(counts), targets.split(counts), strict=True)
        ):
            numbers = {
                row: self._number(metric, mine, seen, clients[k])
                for row, metric in self._metrics.items()
            }
            if self._task.over_batch:
                there = mine.to(self._device), seen.to(self._device)
                numbers[len(self._task.metrics)] = float(self._task.total_loss(*there))
            yield k, numbers

    def _number(self, metric: Metric, outputs: Tensor, targets: Tensor, client: int) -> float:
        """Return the score of a client; NaN if it has none."""
        assert metric.whole is not None  # so are all metrics in self._metrics
        if not bool(outputs.isfinite().all()):
            return metric.worst
        try:
            # Copies, since a user's own metric may work in place, and the next metric gets the same
            # tensors.
            score = metric.whole(outputs.clone(), targets.clone())
            return math.nan if score is None else float(score)  # pyright: ignore[reportUnnecessaryComparison]  (of users)
        except Exception as error:  # an error of a user's metric must not end the run
            if metric.name not in self._warned:
                _log.warning(
                    "client %d, and perhaps others, have no score by %s: %s: %s",
                    *(client, metric.name, type(error).__name__, error),
                )
            self._warned.add(metric.name)
            return math.nan


def like_targets(task: FittedTask, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return outputs ``[n, ...]`` in the shape of targets, if targets are numbers, or 0 and 1."""
    if task.kind in ("binary", "multilabel", "regression"):
        return outputs.reshape(len(outputs), *targets.shape[1:])
    return outputs


def score(task: FittedTask, outputs: Tensor, at: Tensor, seen: Tensor) -> Tensor:
    """Score examples by the outputs of the distinct inputs.

    Parameters
    ----------
    task
        The metrics and the loss.
    outputs
        Outputs for the distinct inputs, ``[b, ...]``.
    at
        Index of each example's input among these outputs, int64 ``[m]``.
    seen
        Targets ``[m, ...]`` of the examples, with each client's own label map.

    Returns
    -------
    Tensor
        For each example the terms of each of M metrics (0 for metrics of all outputs together), its
        loss, and its number of targets that count, float64 ``[M + 2, m]``.
    """
    at = at.to(outputs.device)
    seen = seen.to(outputs.device)
    counts = count_targets(seen).double()
    outputs = like_targets(task, outputs, seen)
    if task.is_plain:
        losses = _nats(outputs, at, seen)
    elif task.over_batch:  # computed from all examples of a client at once, see Whole
        losses = torch.zeros_like(counts)
    else:
        losses = task.losses(outputs[at], seen).double() * counts
    terms = [_terms(metric, outputs, at, seen, losses) for metric in task.metrics]
    return torch.stack([*terms, losses, counts])


def _nats(logits: Tensor, at: Tensor, seen: Tensor) -> Tensor:
    """Return the summed cross-entropy of each example, without a copy of the logits for each."""
    at = at.unsqueeze(1)
    seen = seen.view(len(seen), -1)
    logits = logits.view(len(logits), seen.shape[1], -1)
    counts = seen != IGNORED
    place = torch.arange(seen.shape[1], device=seen.device)
    nats = -functional.log_softmax(logits, -1)[at, place, seen.where(counts, 0)]
    return nats.where(counts, 0).sum(1, dtype=torch.float64)


def _terms(metric: Metric, outputs: Tensor, at: Tensor, seen: Tensor, losses: Tensor) -> Tensor:
    if metric.whole is not None:
        return torch.zeros_like(losses)
    if metric.terms is None:
        return losses
    predicted = outputs if metric.predict is None else metric.predict(outputs)
    return metric.terms(predicted[at], seen)


def wins_of(ids: Sequence[int], losses: Sequence[NDArray[Any]]) -> Tensor:
    """Return, for each model, the number of its client's examples on which it has the least loss.

    Parameters
    ----------
    ids
        The client that evaluates each model; equal ids are adjacent.
    losses
        Losses of each model on all examples of its client.

    Returns
    -------
    Tensor
        Numbers of examples, int64 ``[n]``. The first model wins if losses are equal; NaN counts as
        infinite.
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

On a CPU this is 16 MiB in float32: such tensors stay in its caches, and in memory that need not be
mapped again each time.
"""

EXAMPLES_AT_A_TIME = 2**20
"""Number of the clients' examples that are looked up at once, unless a single client has more."""


class Evaluator:
    """Evaluates models for the clients of a federation.

    All clients of a model are evaluated together: an input that several clients have passes through
    the model once, and inputs of different clients fill a pass. Each example of each client is then
    scored with its label, mapped by the client's label map. Only if the output for an example
    depends on other examples of the pass, or on earlier passes, do clients with different inputs
    get separate passes. The state of the module, which is on the device of the data, is
    overwritten.

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
        self._task = task
        self._traits: Traits | None = None
        self._warned = set[str]()  # names of metrics whose errors have been logged
        pool = federation.pool
        self._logits_each = pool.outputs * max(1, pool.y[:1].numel())
        self._view_of, self._maps = _views(federation)

    def evaluate(
        self, query: EvaluationQuery, part: slice, models: Tensor, assignment: Sequence[int]
    ) -> Evaluation:
        """Evaluate each client's model, for the clients in a part of a query.

        Parameters
        ----------
        query
            The evaluation query.
        part
            The part, as a slice of the query's clients.
        models
            Models ``[m, F]``.
        assignment
            Row of the model of each client in the part.
        """
        ids = query.ids[part]
        split = query.split
        compares = query.compares
        if compares:
            self._task.check_losses_of_examples()
        queries, query_of, makes, held = self._queries(ids, assignment, split, len(models))
        scores = np.empty((len(self._task.metrics) + 2, len(queries[0])))
        # Losses of the examples of each query.
        each: list[NDArray[Any]] | None = [] if compares else None
        for part in _parts(queries, held):
            of_whom = [ids[place] for place in makes[part].tolist()]
            scores[:, part] = self._scores(queries[:, part], models, held, of_whom, each)
        wins = None if each is None else wins_of(ids, [each[query] for query in query_of.tolist()])
        return self._evaluation(ids, scores[:, query_of], wins)

    def evaluate_mixture(
        self, ids: Sequence[int], models: Tensor, weights: Tensor, split: Split
    ) -> Evaluation:
        """Evaluate, for each client, the mixture of all models by the client's weights.

        Parameters
        ----------
        ids
            The clients.
        models
            The models of the mixture, ``[K, S]``.
        weights
            Each client's weights π, ``[n, K]``.
        split
            Split of the clients' data.
        """
        scores = np.empty((len(self._task.metrics) + 2, len(ids)))
        for places, outputs, seen, counts in self.outputs(ids, models, split):
            query = np.arange(len(places)).repeat(counts)
            everything = torch.arange(len(seen))
            predicted = mix_outputs(
                self._task.kind, outputs, weights[places][query].to(outputs.device)
            )
            passed = [(everything.numpy(), predicted, everything, seen)]
            scores[:, places] = self._tallied(query, [ids[place] for place in places], passed)
        return self._evaluation(ids, scores)

    def outputs(
        self, ids: Sequence[int], models: Tensor, split: Split
    ) -> Iterator[tuple[list[int], Tensor, Tensor, Indices]]:
        """Yield the outputs of all models ``[K, S]`` for the examples of a few clients at a time.

        Yields
        ------
        tuple
            Places of these clients in ``ids``; outputs ``[K, m, ...]`` for their examples,
            concatenated; targets ``[m, ...]``, mapped by the label map of each client; and the
            number of examples of each client.
        """
        held = self._held(ids, split)
        clients = self._data.places(ids)
        order = np.argsort(held.set_of[clients], kind="stable")
        sets = held.set_of[clients][order]
        views = self._view_of[clients[order]]
        queries = np.stack([np.zeros_like(sets), sets, views])
        # an input that many clients have passes once
        at_a_time = max(1, ENTRIES_AT_A_TIME // (len(models) * self._logits_each))
        for part in _parts(queries, held, at_a_time):
            each: list[Tensor] = []
            for row in range(len(models)):
                some = queries[:, part] + np.array([[row], [0], [0]])
                examples = self._examples(some, models, held)
                passed = [*self._passed(examples, some, models, held)]
                back = torch.from_numpy(np.concatenate([where for where, *_ in passed]).argsort())
                rows = torch.cat([outputs[at.to(outputs.device)] for _, outputs, at, _ in passed])
                each.append(rows[back.to(rows.device)])
                if row == 0:
                    seen = torch.cat([mine for *_, mine in passed])[back]
            yield order[part].tolist(), torch.stack(each), seen, held.sizes[queries[1, part]]  # pyright: ignore[reportPossiblyUnboundVariable]  (a mixture has a model)

    def losses(self, outputs: Tensor, seen: Tensor) -> Tensor:
        """Return the loss of each example by each model, ``[K, m]``; see :meth:`outputs`."""
        return torch.stack([self._task.losses(each, seen.to(each.device)) for each in outputs])

    def _evaluation(
        self, ids: Sequence[int], scores: NDArray[Any], wins: Tensor | None = None
    ) -> Evaluation:
        *by_metric, losses, counts = torch.from_numpy(scores)
        of_all = torch.stack(by_metric, dim=1), losses / counts, counts.to(torch.int64)
        return Evaluation(
            tuple(ids), *of_all, higher_is_better=self._task.metrics[0].higher_is_better, wins=wins
        )

    def _held(self, ids: Sequence[int], split: Split) -> SplitInputs:
        """Return the inputs of a split; raise a DataError if one of the clients has none."""
        held = self._data.splits[split]
        sets = held.set_of[self._data.places(ids)]
        for k in np.flatnonzero(held.sizes[sets] == 0).tolist():
            raise DataError(
                f"client {ids[k]} has no {split} examples"
                + ("; set data.validation_fraction above 0" if split == "validation" else "")
            )
        return held

    def _queries(
        self, ids: Sequence[int], assignment: Sequence[int], split: Split, models: int
    ) -> tuple[Indices, Indices, Indices, SplitInputs]:
        """Return the distinct queries ``[3, q]``, sorted, and their relation to the clients.

        The rows of the queries are: row of the model, number of the set of inputs, and view of the
        labels. The other results are the query of each client, ``[n]``, the place of a client that
        makes each query, ``[q]``, and the inputs.
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
        clients: Sequence[int],
        each: list[NDArray[Any]] | None = None,
    ) -> NDArray[Any]:
        """Return scores by metric, summed losses, and numbers of targets, ``[M + 2, q]``.

        ``clients`` has one client that makes each query. The losses of each query's examples are
        appended to ``each``.
        """
        examples = self._examples(queries, models, held)
        return self._tallied(
            examples.query, clients, self._passed(examples, queries, models, held), each
        )

    def _tallied(
        self,
        query: Indices,
        clients: Sequence[int],
        passed: Iterable[tuple[Indices, Tensor, Tensor, Tensor]],
        each: list[NDArray[Any]] | None = None,
    ) -> NDArray[Any]:
        """Return the results of :meth:`_scores`, given the outputs of :meth:`_passed`."""
        metrics = self._task.metrics
        terms = np.empty((len(metrics) + 2, len(query)))
        whole = Whole(self._task, self._warned)
        diverged = np.zeros(len(clients), dtype=bool)
        for some, outputs, at, seen in passed:
            terms[:, some] = score(self._task, outputs, at, seen).cpu()
            whole.keep(some, outputs, at, seen)
            if np.isnan(terms[: len(metrics), some]).any():
                broken = ~outputs.flatten(1).isfinite().all(1).cpu()[at.cpu()].numpy()
                diverged[query[some][broken]] = True
        # The examples of a query are adjacent, in the order of its inputs.
        if each is not None:
            each += np.split(terms[-2], np.bincount(query, minlength=len(clients)).cumsum()[:-1])
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
        rows, sets, _ = queries
        if self._traits is None:
            module = _Loader(self._module, self._layout, models)(int(rows[0]))
            self._traits = Traits.of(module, held.inputs(np.arange(min(4, len(held)))))
        return Examples(rows, sets, held, apart=self._traits.mixes)

    @torch.inference_mode()
    def _passed(
        self, examples: Examples, queries: Indices, models: Tensor, held: SplitInputs
    ) -> Iterator[tuple[Indices, Tensor, Tensor, Tensor]]:
        """Pass examples through the models; yield their indices, and arguments of :func:`score`."""
        assert self._traits is not None  # _examples has set them
        load = _Loader(self._module, self._layout, models)
        traits = self._traits
        views = queries[2]
        entries = ENTRIES_AT_A_TIME_ON_CPU if models.device.type == "cpu" else ENTRIES_AT_A_TIME
        pass_size = traits.pass_size(entries)
        with using_threads(traits.threads(min(pass_size, examples.largest_group))):
            for block in examples.blocks(pass_size, entries // self._logits_each):
                passed = [
                    load(one.row, traits.mixes)(held.inputs(one.places)) for one in block.passes
                ]
                logits = full(torch.cat(passed))
                some = block.examples
                seen = self._seen(held.targets(examples.place[some]), views[examples.query[some]])
                yield some, logits, torch.from_numpy(block.at), seen

    def _seen(self, targets: Tensor, views: Indices) -> Tensor:
        """Return targets ``[m, ...]`` with the label map of each example's client applied."""
        if targets.is_floating_point():
            return targets
        counts = targets != IGNORED
        view = torch.from_numpy(views).view(-1, *(1,) * (targets.dim() - 1))
        return torch.where(counts, self._maps[view, targets.where(counts, 0)], IGNORED)


class _Loader:
    """Loads a model of ``[K, S]`` into the module, in evaluation mode: ``load(row)(inputs)``."""

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
        """Return the module with the model of a row; with ``anew`` reload it in any case.

        A forward pass may have changed the buffers of a model that is already loaded.
        """
        if anew or row != self._row:
            for tensor, values in self._values:
                tensor.copy_(values[row])
            for name, value in self._unsent.items():
                restore_buffer(self._module, name, value)
            self._row = row
        return self._module


def _views(federation: Federation) -> tuple[Indices, Tensor]:
    """Return the number of each client's label map, ``[n]``, and all label maps."""
    plain = torch.arange(federation.pool.outputs)
    if isinstance(table := federation.clients, ClientTable):
        view = np.broadcast_to(np.int64(0), len(table)) if table.view is None else table.view + 1
        return view, plain[None] if table.label_maps is None else torch.cat(
            [plain[None], table.label_maps]
        )
    maps = {id(client.label_map): client.label_map for client in federation.clients}
    view_of = {key: view for view, key in enumerate(maps)}
    views = np.array([view_of[id(client.label_map)] for client in federation.clients])
    return views, torch.stack([plain if m is None else m for m in maps.values()])


def _parts(queries: Indices, held: SplitInputs, examples: int | None = None) -> Iterator[slice]:
    """Cut queries into parts of about ``examples`` examples."""
    part = held.sizes[queries[1]].cumsum() // (examples or EXAMPLES_AT_A_TIME)
    for start, stop in pairwise([*np.unique(part, return_index=True)[1].tolist(), len(part)]):
        yield slice(start, stop)
