"""Parsers and checks of clients' replies.

A client that sends an invalid reply is left out of the round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import isnan, nan
from typing import Any, cast

import torch
from flwr.app import MessageType, RecordDict
from torch import Tensor

from fedclade.channel import ENCODINGS, decode
from fedclade.core import Evaluation, TrainQuery, UpdateError
from fedclade.data import Statistics, StatisticsQuery, bounded
from fedclade.flower.wire import Content, shown, typed
from fedclade.tasks import Metric

# Largest number of examples that a client may report: updates are weighted in float64, which cannot
# represent all larger integers.
MOST_EXAMPLES = 2**53
LARGEST_SCORE = 1e308  # largest score that a client may report: it has to be finite
# Largest magnitude of a loss that a client may report: sums of larger losses could overflow.
LARGEST_LOSS = 1e18
Scores = tuple[list[float], float, int]  # score by each metric, loss, number of examples


@dataclass(frozen=True, eq=False)
class UpdateReply:
    """Client's reply to a query for an update.

    Parameters
    ----------
    size
        Number of training examples |D_i| of client i.
    loss
        Mean training loss; None if the client withholds its loss.
    update
        Update Δθ_i as a vector, which must not be changed, since it may have the memory of the
        received message. If the query compares the updates from disjoint parts of each client's
        data, the values for the comparison are appended.
    component
        Index of the mixture's model that has the largest weight for the client; None without a
        mixture.
    remembered
        Whether the client has answered a repeated query from memory, and has not trained.
    """

    size: int
    loss: float | None
    update: Tensor
    component: int | None = None
    remembered: bool = False


def examples(content: Content, name: str) -> int:
    """Return a number of examples in a reply; raise an UpdateError if it is out of range."""
    count = content.get(name, int)
    if not 1 <= count <= MOST_EXAMPLES:
        raise UpdateError(f"{name!r} should be 1 to 2**53 examples, got {count}")
    return count


def size_class(count: int) -> int:
    """Return the size class of a number of examples: the largest power of two not above it.

    A client with a privacy budget or secure aggregation reports only the size class.
    """
    return 1 << (count.bit_length() - 1)


def largest_of_class(registered: int) -> int:
    """Return the largest number of examples that a client may have, given its registered number.

    A registered number that is a power of two may be a size class, which stands for all numbers
    below the next power of two.
    """
    return 2 * registered - 1 if size_class(registered) == registered else registered


def fits_size(count: int, registered: int) -> bool:
    """Return whether ``count`` examples are possible for a client.

    ``registered`` is the number of examples, or the size class, that the client registered with.
    """
    return registered <= count <= largest_of_class(registered)


def examples_trained_on(query: TrainQuery, joined_with: int) -> int:
    """Return the number of training examples from which a client's update must be computed.

    The server compares this number with the number in the client's reply. It is ``joined_with``,
    the number that the client registered with, unless the query requests training on several parts
    of a fixed size. Such parts may leave some examples out, so the number is the size of a part
    times the number of parts.
    """
    splits = None if query.work.is_gradient else query.work.splits
    return joined_with if splits is None else splits.count * splits.size or joined_with


def read_repeated(content: Content, size: int, expected: Mapping[str, Any]) -> float | None:
    """Check the values that a reply must repeat from its query, and return the reply's loss.

    Parameters
    ----------
    content
        Content of the reply.
    size
        Number of training examples from which the update must be computed.
    expected
        Values that the reply must repeat, by name.

    Returns
    -------
    float | None
        Mean training loss; None if the client withholds its loss.

    Raises
    ------
    UpdateError
        If the reply is to another query, or reports another number of examples.
    """
    for name, sent in expected.items():
        if (got := content.get(name, type(sent))) != sent:
            raise UpdateError(
                f"the reply has the {name} {shown(got)}, expected {sent!r} as in the request, so the "
                "server ignores it"
            )
    if (reported := examples(content, "size")) != size:
        raise UpdateError(
            f"the update is from {reported} training examples, expected {size} by the query and "
            "the client's registration"
        )
    loss = content.get("loss", float) if "loss" in content.values else None
    if loss is not None and not abs(loss) <= LARGEST_LOSS:  # true for NaN, too
        raise UpdateError(
            f"the training loss is {loss:g}, expected a magnitude of at most {LARGEST_LOSS:g}; if "
            "training diverges, lower local.lr"
        )
    return loss


def read_update(
    content: Content,
    length: int,
    n_parameters: int,
    dtype: torch.dtype,
    size: int,
    expected: Mapping[str, Any],
    components: int = 0,
) -> UpdateReply:
    """Check and read the reply to a query for an update.

    Parameters
    ----------
    content
        Content of the reply.
    length
        Number of entries of the update; 0 if the client stores the model and sends no update.
    n_parameters
        Number of parameters of the model.
    dtype
        Floating-point type of the model, to which the update is converted.
    size
        Number of training examples from which the update must be computed.
    expected
        Values that the reply must repeat from the query: the round, the number of the query, and
        the name of the model.
    components
        Number of models of a mixture, one of which the reply names; 0 without a mixture.

    Raises
    ------
    UpdateError
        If the reply is invalid.
    """
    loss = read_repeated(content, size, expected)
    encoding = content.get("encoding", str)
    if encoding not in ENCODINGS:
        raise UpdateError(
            f"the update has the unknown encoding {shown(encoding)}, expected one of "
            f"{', '.join(ENCODINGS)}"
        )
    component = content.get("component", int) if components else None
    if component is not None and not 0 <= component < components:
        raise UpdateError(
            f"the reply names component {component} of the mixture, expected 0 to {components - 1}"
        )
    content.has_only(("update",) if length else ())
    data = content.vector("update") if length else b""
    return UpdateReply(
        size,
        loss,
        decode(data, length, encoding, n_parameters, copies=False).to(dtype),
        component=component,
        remembered="remembered" in content.values and content.get("remembered", bool),
    )


def read_choice(content: Content, models: int) -> int:
    """Check and read which of ``models`` models a client has chosen; return its number, from 0.

    Raises
    ------
    UpdateError
        If the reply is invalid.
    """
    choice = content.get("choice", int)
    if not 0 <= choice < models:
        raise UpdateError(
            f"the reply names model {shown(choice)} as the best, expected 0 to {models - 1}"
        )
    content.has_only(())
    return choice


def read_wins(content: Content, models: int, examples: int) -> list[int]:
    """Check and read a client's wins: the number of its examples for which each model is best.

    Parameters
    ----------
    content
        Content of the reply.
    models
        Number of models.
    examples
        Number of examples of the client, which is the largest possible sum of the wins.

    Raises
    ------
    UpdateError
        If the numbers are invalid.
    """
    wins = content.values.get("wins")
    if not isinstance(wins, list) or not all(type(each) is int and each >= 0 for each in wins):
        raise UpdateError(
            f"'wins' should be a list of how often each of {models} models is best, got "
            f"{shown(wins)}"
        )
    found = cast("list[int]", wins)
    if len(found) != models or not 0 < sum(found) <= examples:
        raise UpdateError(
            f"'wins' should state how often each of {models} models is best: {models} numbers with "
            f"a sum from 1 to {examples}, got {shown(found)}"
        )
    return found


def evaluation_of(
    ids: Sequence[int],
    scores: Mapping[int, list[Scores]],
    wins: Mapping[int, list[int]],
    metrics: Sequence[Metric],
    left_out: Mapping[int, str],
) -> Evaluation:
    """Combine the scores of the clients that replied into one evaluation.

    Parameters
    ----------
    ids
        Client of each evaluated model in the query, so that a client of several models is repeated.
        The result has the same order, without clients that have not replied.
    scores
        Scores, loss and number of examples for each model, by client.
    wins
        Number of examples for which each model is best, by client; empty if the query did not
        compare models.
    metrics
        Metrics of the task.
    left_out
        Reason of each client that has not replied.
    """
    left = {client: iter(mine) for client, mine in scores.items()}
    answered = [(client, next(left[client])) for client in ids if client in left]
    scored, losses, examples = (
        zip(*(mine for _, mine in answered), strict=True) if answered else ((), (), ())
    )
    most = {client: iter(mine) for client, mine in wins.items()}
    return Evaluation(
        ids=tuple(client for client, _ in answered),
        scores=torch.tensor(scored, dtype=torch.float64).view(-1, len(metrics)),
        losses=torch.tensor(losses, dtype=torch.float64),
        examples=torch.tensor(examples, dtype=torch.int64),
        left_out=left_out,
        higher_is_better=metrics[0].higher_is_better,
        wins=torch.tensor([next(most[client]) for client, _ in answered]) if wins else None,
        without_loss=frozenset(client for client, (_, loss, _) in answered if isnan(loss)),
    )


def read_scores(
    content: Content,
    models: int,
    metrics: Sequence[Metric],
    known: int | None = None,
    smallest_loss: float = -LARGEST_LOSS,
) -> list[Scores]:
    """Check and read a client's scores of ``models`` models.

    A score is NaN if the metric is undefined for the client's examples. This is possible only for
    metrics that are not a mean over examples. A client with a privacy budget or secure aggregation
    reports neither a loss nor a number of examples.

    Parameters
    ----------
    content
        Content of the reply.
    models
        Number of models.
    metrics
        Metrics of the task.
    known
        Number of the client's examples in this split of its data, which must be the same for all
        models; None if unknown.
    smallest_loss
        Lower bound of the task's losses.

    Returns
    -------
    list[Scores]
        For each model: the score by each metric, the loss, and the number of examples.

    Raises
    ------
    UpdateError
        If the reply is invalid.
    """
    content.has_only(())
    if "losses" not in content.values:
        return _read_closed_scores(content, models, metrics)
    columns = [content.values.get(name) for name in ("scores", "losses", "examples")]
    lengths = models * len(metrics), models, models
    for column, length, kind in zip(columns, lengths, (float, float, int), strict=True):
        if (
            not isinstance(column, list)
            or len(column) != length
            or not all(type(value) is kind for value in column)
        ):
            raise UpdateError(
                f"a reply with scores should have three lists for {models} models, scores of "
                f"{lengths[0]} numbers, losses of {models} numbers and examples of {models} whole "
                f"numbers, got {shown(columns)}"
            )
    flat, losses, counts = cast("tuple[list[float], list[float], list[int]]", tuple(columns))
    scores = [flat[start : start + len(metrics)] for start in range(0, len(flat), len(metrics))]
    for mine, loss, count in zip(scores, losses, counts, strict=True):
        for metric, score in zip(metrics, mine, strict=True):
            _check_score(score, metric)
        if not (smallest_loss <= loss <= LARGEST_LOSS and 1 <= count <= MOST_EXAMPLES):
            raise UpdateError(
                f"a model has loss {loss:g} on {count} examples, expected a loss of at most "
                f"{LARGEST_LOSS:g} and at least {smallest_loss:g}, on at least 1 example"
            )
    if len(set(counts)) > 1 or not set(counts) <= {known or min(counts)}:
        raise UpdateError(
            f"the client reports scores of the models on {shown(sorted(set(counts)))} examples, "
            f"expected {known or 'the same number'} for all models, since all are scored on the same "
            "data"
        )
    return list(zip(scores, losses, counts, strict=True))


def _read_closed_scores(content: Content, models: int, metrics: Sequence[Metric]) -> list[Scores]:
    """Check and read the scores of a client that reports only one number for each model.

    Clients with a privacy budget or secure aggregation do so. In the result, their scores by all
    further metrics and their losses are NaN. They do not report their number of examples, so the
    result has one example for each client.
    """
    scores = content.values.get("scores")
    if (
        not isinstance(scores, list)
        or len(scores) != models
        or not all(type(score) is float for score in scores)
    ):
        raise UpdateError(
            f"'scores' should be a list of one number for each of {models} models, got "
            f"{shown(scores)}"
        )
    for score in cast("list[float]", scores):
        _check_score(score, metrics[0])
    others = [nan] * (len(metrics) - 1)
    return [([score, *others], nan, 1) for score in cast("list[float]", scores)]


def _check_score(score: float, metric: Metric) -> None:
    """Raise an UpdateError if a reported score is impossible for the metric."""
    if isnan(score) and metric.whole is not None:  # undefined for the client's examples
        return
    if not (0 <= score <= 1 if metric.share else abs(score) <= LARGEST_SCORE):
        expected = "in [0, 1]" if metric.share else f"of at most {LARGEST_SCORE:g}"
        raise UpdateError(f"the score by {metric.name} is {score:g}, expected a number {expected}")


# Statistics of clients' training examples, in messages and in a run's folder. Each client reports
# the statistics of its own examples, and all clients receive the sum.

TYPES: Mapping[str, tuple[type, torch.dtype]] = {
    "means": (float, torch.float64),
    "squares": (float, torch.float64),
    "numbers": (bool, torch.bool),
    "labels": (int, torch.int64),
}
"""Python type and tensor type of the entries of each list in the statistics."""

_log = logging.getLogger(__name__)

Request = Callable[
    [Mapping[int, RecordDict], str, str, Callable[[int, Content], Statistics], dict[int, str]],
    Iterator[tuple[int, Statistics]],
]


def as_values(found: Statistics) -> dict[str, Any]:
    """Return statistics as plain values for a message or JSON, without empty lists."""
    lists = {name: getattr(found, name).tolist() for name in TYPES}
    return {"count": found.count, **{name: values for name, values in lists.items() if values}}


def read_statistics(values: Mapping[str, Any], columns: int, labels: int) -> Statistics:
    """Check and read statistics of training examples.

    The statistics are the mean of each column, the sum of squared deviations from the mean, and the
    number of examples with each label.

    Parameters
    ----------
    values
        Values of a message or of a run's folder.
    columns
        Number of columns of inputs and targets with a mean and a sum of squared deviations.
    labels
        Number of labels that are counted; 0 without label counts.

    Raises
    ------
    UpdateError
        If the values are malformed, or no examples can have these statistics.
    """
    count = typed(values, "count", int)
    lists = dict[str, Tensor]()
    for name, (kind, dtype) in TYPES.items():
        found = values.get(name, [])
        length = labels if name == "labels" else columns
        if (
            not isinstance(found, list)
            or len(found) != length
            or not all(type(each) is kind for each in found)
        ):
            raise UpdateError(
                f"{name!r} should be a list of {length} values of type {kind.__name__}, got "
                f"{shown(found)}"
            )
        lists[name] = torch.tensor(found, dtype=dtype)
    read = Statistics(count, **lists)
    counted = sum(read.labels.tolist())  # the tensor's own sum might overflow
    possible = 1 <= count <= MOST_EXAMPLES and bool((read.labels >= 0).all()) and counted <= count
    if not possible or not bool(
        (read.means.isfinite() & (read.squares >= 0) & read.squares.isfinite()).all()
    ):
        raise UpdateError(
            f"{count} training examples cannot have these statistics: {shown(as_values(read))}; "
            "means should be finite, sums of squares finite and at least 0, and counts of labels at "
            "least 0 and together at most the number of examples"
        )
    return read


def summed(
    query: StatisticsQuery,
    sizes: Mapping[int, int],
    columns: int,
    content: RecordDict,
    ask: Request,
) -> Statistics:
    """Request the statistics of all clients' examples, limit them, and return their sum.

    The statistics are limited so that a single client cannot dominate the sum, and added up in the
    order of the query's clients.

    Parameters
    ----------
    query
        Query for statistics, with the clients and the largest weight of a client.
    sizes
        Number of training examples that each client registered with.
    columns
        Number of columns of the inputs and targets that are summed up.
    content
        Content of the request.
    ask
        Function that sends the requests, such as ``GridClients.request``.

    Raises
    ------
    UpdateError
        If at most half of the clients of the query reply, since a few clients could then determine
        the scale of all inputs. Also if fewer than 3 of 3 or more clients reply, since the
        statistics of only two clients cannot limit one another. Replies of all clients are not
        required, so that a few clients cannot end every run.
    """
    left_out: dict[int, str] = {}

    def read(client: int, content: Content) -> Statistics:
        content.has_only(())
        found = read_statistics(content.values, columns, query.labels)
        if not fits_size(found.count, sizes[client]):
            raise UpdateError(
                f"the statistics are of {found.count} training examples, but the client registered "
                f"with {sizes[client]}"
            )
        return found

    found = dict(
        ask(dict.fromkeys(query.ids, content), MessageType.QUERY, "statistics", read, left_out)
    )
    if left_out:
        told = f"{len(found)} of {len(query.ids)} clients report statistics for scaling or class weights"
        why = "; ".join(f"client {client}: {why}" for client, why in sorted(left_out.items()))
        # Statistics of two clients cannot bound one another.
        needed = max(len(query.ids) // 2 + 1, min(3, len(query.ids)))
        if len(found) < needed:
            raise UpdateError(
                f"{told}, but at least {needed} are needed: {why}; without scaling "
                "(data.standardize = 'none', data.standardize_target = 'none') and without "
                "task.class_weights = 'balanced', no statistics are needed"
            )
        _log.warning("%s: %s", told, why)
    of_most = [found[client] for client in query.ids if client in found]
    return reduce(Statistics.plus, bounded(of_most, query.largest_weight))
