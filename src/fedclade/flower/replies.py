"""Parsers and checks of replies: a client that sends an invalid reply is left out of the round."""

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
from fedclade.core import Evaluation, UpdateError, UpdateQuery
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
        Number of training examples |D_i|.
    loss
        Mean training loss; None if the client withholds it.
    update
        Update Δθ_i, or signatures.
    component
        The component of a mixture with the largest weight at the client; None without a mixture.
    """

    size: int
    loss: float | None
    update: Tensor
    component: int | None = None


def examples(content: Content, name: str) -> int:
    """Return a number of examples of a reply; raise an UpdateError if it is not possible."""
    count = content.get(name, int)
    if not 1 <= count <= MOST_EXAMPLES:
        raise UpdateError(f"{name} of {count} examples, expected 1 to 2**53")
    return count


def size_class(count: int) -> int:
    """Return the largest power of two that is not above a number of examples.

    A client with a privacy budget or secure aggregation reports the power in place of the number.
    """
    return 1 << (count.bit_length() - 1)


def largest_of_class(registered: int) -> int:
    """Return the largest number of examples of a client, given its registered number.

    That number may be a size class.
    """
    return 2 * registered - 1 if size_class(registered) == registered else registered


def fits_size(count: int, registered: int) -> bool:
    """Return whether ``count`` examples fit the number or size class that a client registered."""
    return registered <= count <= largest_of_class(registered)


def examples_trained_on(query: UpdateQuery, joined_with: int) -> int:
    """Return the number of training examples that a client's update should be from.

    Splits of equal size leave some of its examples out.
    """
    in_parts = query.round.replicates * query.round.part_size if query.kind == "train" else 0
    return in_parts or joined_with


def read_repeated(content: Content, size: int, expected: Mapping[str, Any]) -> float | None:
    """Check the values that a reply repeats from its query; return its loss.

    Parameters
    ----------
    content
        Content of the reply.
    size
        Number of training examples that the update must be from.
    expected
        Values that the reply must repeat, by name.

    Returns
    -------
    float | None
        Loss of the reply; None if the client withholds it.

    Raises
    ------
    UpdateError
        If the reply is to another query or from another number of examples.
    """
    for name, sent in expected.items():
        if (got := content.get(name, type(sent))) != sent:
            raise UpdateError(f"answer of {name} {shown(got)}, expected {sent!r}")
    if (reported := examples(content, "size")) != size:
        raise UpdateError(
            f"update from {reported} training examples, expected {size} by what it joined with"
        )
    loss = content.get("loss", float) if "loss" in content.values else None
    if loss is not None and not abs(loss) <= LARGEST_LOSS:  # true for NaN, too
        raise UpdateError(f"loss {loss:g}, expected one of at most {LARGEST_LOSS:g}")
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
    """Check and read an update.

    Parameters
    ----------
    content
        Content of the reply.
    length
        Number of entries of the update; 0 if the client stores the model and sends no update.
    n_parameters
        Number of parameters of the model.
    dtype
        Type of the model, which the update gets.
    size
        Number of training examples that the update must be from.
    expected
        Values that the reply must repeat from the query: the round, the number of the query, the
        model.
    components
        Number of models of a mixture, of which the reply names one; 0 without a mixture.

    Raises
    ------
    UpdateError
        If the reply is invalid.
    """
    loss = read_repeated(content, size, expected)
    encoding = content.get("encoding", str)
    if encoding not in ENCODINGS:
        raise UpdateError(f"update in the unknown encoding {shown(encoding)}")
    component = content.get("component", int) if components else None
    if component is not None and not 0 <= component < components:
        raise UpdateError(f"component {component}, expected one of {components}, from 0")
    content.has_only(("update",) if length else ())
    data = content.vector("update") if length else b""
    return UpdateReply(
        size, loss, decode(data, length, encoding, n_parameters).to(dtype), component
    )


def read_choice(content: Content, models: int) -> int:
    """Check and read the model that a client has chosen; raise an UpdateError if invalid."""
    choice = content.get("choice", int)
    if not 0 <= choice < models:
        raise UpdateError(f"choice of model {shown(choice)}, expected one of {models}, from 0")
    content.has_only(())
    return choice


def read_wins(content: Content, models: int, examples: int) -> list[int]:
    """Check and read the number of examples for which each model is best.

    Raises
    ------
    UpdateError
        If the numbers are invalid.
    """
    wins = content.values.get("wins")
    if not isinstance(wins, list) or not all(type(each) is int and each >= 0 for each in wins):
        raise UpdateError(f"expected how often each of {models} models is best, got {shown(wins)}")
    found = cast("list[int]", wins)
    if len(found) != models or not 0 < sum(found) <= examples:
        raise UpdateError(
            f"{shown(found)} as how often each of {models} models is best of {examples} examples"
        )
    return found


def evaluation_of(
    ids: Sequence[int],
    scores: Mapping[int, list[Scores]],
    wins: Mapping[int, list[int]],
    metrics: Sequence[Metric],
    left_out: Mapping[int, str],
) -> Evaluation:
    """Return the scores of the clients that replied, in the order of a query's ``ids``.

    Wins are included if clients compared models.
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
    """Check and read the scores of ``models`` models.

    A score is NaN if the metric is undefined for the client's examples, which a mean over examples
    never is. A client with a privacy budget or secure aggregation reports neither a loss nor a
    number of examples.

    Parameters
    ----------
    content
        Content of the reply.
    models
        Number of models.
    metrics
        Metrics of the task.
    known
        Number of the client's examples in this split, if known; it is the same for all models.
    smallest_loss
        Lower bound of the task's losses.

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
                f"expected scores by {len(metrics)} metrics, losses and numbers of examples of "
                f"{models} models, got {shown(columns)}"
            )
    flat, losses, counts = cast("tuple[list[float], list[float], list[int]]", tuple(columns))
    scores = [flat[start : start + len(metrics)] for start in range(0, len(flat), len(metrics))]
    for mine, loss, count in zip(scores, losses, counts, strict=True):
        for metric, score in zip(metrics, mine, strict=True):
            _check_score(score, metric)
        if not (smallest_loss <= loss <= LARGEST_LOSS and 1 <= count <= MOST_EXAMPLES):
            raise UpdateError(
                f"loss {loss:g} of {count} examples, expected a loss of at most {LARGEST_LOSS:g}, "
                f"and of at least {smallest_loss:g}, of at least 1 example"
            )
    if len(set(counts)) > 1 or not set(counts) <= {known or min(counts)}:
        raise UpdateError(
            f"scores of {shown(sorted(set(counts)))} examples, expected "
            f"{known or 'one number of them'}"
        )
    return list(zip(scores, losses, counts, strict=True))


def _read_closed_scores(content: Content, models: int, metrics: Sequence[Metric]) -> list[Scores]:
    """Check and read the scores of a client that reports only one number for each model.

    Its scores by other metrics are NaN. It counts as one example, since it does not report its
    number of examples.
    """
    scores = content.values.get("scores")
    if (
        not isinstance(scores, list)
        or len(scores) != models
        or not all(type(score) is float for score in scores)
    ):
        raise UpdateError(f"expected one score for each of {models} models, got {shown(scores)}")
    for score in cast("list[float]", scores):
        _check_score(score, metrics[0])
    others = [nan] * (len(metrics) - 1)
    return [([score, *others], nan, 1) for score in cast("list[float]", scores)]


def _check_score(score: float, metric: Metric) -> None:
    if isnan(score) and metric.whole is not None:  # undefined for the client's examples
        return
    if not (0 <= score <= 1 if metric.share else abs(score) <= LARGEST_SCORE):
        expected = "in [0, 1]" if metric.share else f"of at most {LARGEST_SCORE:g}"
        raise UpdateError(f"{metric.name} {score:g}, expected one {expected}")


# Statistics of clients' training examples, in messages and in a run's folder: each client reports
# its own, and all receive the sum.

TYPES: Mapping[str, tuple[type, torch.dtype]] = {
    "means": (float, torch.float64),
    "squares": (float, torch.float64),
    "numbers": (bool, torch.bool),
    "labels": (int, torch.int64),
}
"""Python and tensor type of each list of the statistics."""

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
    """Check and read the statistics of training examples.

    Parameters
    ----------
    values
        Values of a message or of a run's folder.
    columns
        Number of columns that statistics have.
    labels
        Number of labels that are counted.

    Raises
    ------
    UpdateError
        If the values are malformed or not possible.
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
                f"expected {length} {name} of type {kind.__name__}, got {shown(found)}"
            )
        lists[name] = torch.tensor(found, dtype=dtype)
    read = Statistics(count, **lists)
    counted = sum(read.labels.tolist())  # the tensor's own sum might overflow
    possible = 1 <= count <= MOST_EXAMPLES and bool((read.labels >= 0).all()) and counted <= count
    if not possible or not bool(
        (read.means.isfinite() & (read.squares >= 0) & read.squares.isfinite()).all()
    ):
        raise UpdateError(
            f"sums of {count} training examples that no examples come to: {shown(as_values(read))}"
        )
    return read


def summed(
    query: StatisticsQuery,
    sizes: Mapping[int, int],
    columns: int,
    content: RecordDict,
    ask: Request,
) -> Statistics:
    """Request statistics of all clients, bound them, and add them up in the query's order.

    Parameters
    ----------
    query
        Query with the clients and the largest weight of a client.
    sizes
        Number of training examples that each client registered with.
    columns
        Number of columns of the inputs.
    content
        Content of the request.
    ask
        Function that sends the requests, such as ``GridClients.request``.

    Raises
    ------
    UpdateError
        If at most half of the clients reply. Otherwise a few clients could determine the scale of
        all inputs; and because most replies suffice, a few clients cannot end every run.
    """
    left_out: dict[int, str] = {}

    def read(client: int, content: Content) -> Statistics:
        content.has_only(())
        found = read_statistics(content.values, columns if query.inputs else 0, query.labels)
        if not fits_size(found.count, sizes[client]):
            raise UpdateError(
                f"sums of {found.count} training examples, but the client joined with "
                f"{sizes[client]}"
            )
        return found

    found = dict(
        ask(dict.fromkeys(query.ids, content), MessageType.QUERY, "statistics", read, left_out)
    )
    if left_out:
        told = f"{len(found)} of {len(query.ids)} clients tell what their examples come to, by which all scale or weigh"
        why = "; ".join(f"client {client}: {why}" for client, why in sorted(left_out.items()))
        # Statistics of two clients cannot bound one another.
        needed = max(len(query.ids) // 2 + 1, min(3, len(query.ids)))
        if len(found) < needed:
            raise UpdateError(f"{told}, and {needed} are needed: {why}")
        _log.warning("%s: %s", told, why)
    of_most = [found[client] for client in query.ids if client in found]
    return reduce(Statistics.plus, bounded(of_most, query.largest_weight))
