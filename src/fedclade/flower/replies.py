"""Answers to queries, checked as they are read: a client that sends something else is left out of the round."""

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

# that a client may say it has: beyond it float64, in which updates are weighted, cannot count
MOST_EXAMPLES = 2**53
LARGEST_SCORE = 1e308  # that a client may report: it has to be finite
LARGEST_LOSS = 1e18  # that a client may report, either way: sums of larger ones could overflow
Scores = tuple[list[float], float, int]  # by each metric, loss, examples


@dataclass(frozen=True, eq=False)
class UpdateReply:
    """A client's training examples |D_i|, mean training loss (None if it withholds it), and Δθ_i or signatures.

    Of a mixture's models, also the component that it weighs most.
    """

    size: int
    loss: float | None
    update: Tensor
    component: int | None = None


def examples(content: Content, name: str) -> int:
    """Return a number of examples, which must be possible."""
    count = content.get(name, int)
    if not 1 <= count <= MOST_EXAMPLES:
        raise UpdateError(f"{name} of {count} examples, expected 1 to 2**53")
    return count


def size_class(count: int) -> int:
    """Return the largest power of two that is not above a number of examples.

    A client with a privacy budget, or with secure aggregation, reports it in place of the number.
    """
    return 1 << (count.bit_length() - 1)


def largest_of_class(registered: int) -> int:
    """Return the most examples that a client can have that registered with a number or with a size class."""
    return 2 * registered - 1 if size_class(registered) == registered else registered


def fits_size(count: int, registered: int) -> bool:
    """Return whether a client may have so many examples that registered with a number or with a size class."""
    return registered <= count <= largest_of_class(registered)


def examples_trained_on(query: UpdateQuery, joined_with: int) -> int:
    """Return from how many training examples a client's update should be: equal parts leave some of them out."""
    in_parts = query.round.replicates * query.round.part_size if query.kind == "train" else 0
    return in_parts or joined_with


def read_repeated(content: Content, size: int, expected: Mapping[str, Any]) -> float | None:
    """Check what an answer repeats of its query, and that it is from ``size`` training examples; return its loss.

    None if it withholds the loss; an UpdateError if it answers something else.
    """
    for name, sent in expected.items():
        if (got := content.get(name, type(sent))) != sent:
            raise UpdateError(f"answer of {name} {shown(got)}, expected {sent!r}")
    if (reported := examples(content, "size")) != size:
        raise UpdateError(
            f"update from {reported} training examples, expected {size} by what it joined with"
        )
    loss = content.get("loss", float) if "loss" in content.values else None
    if loss is not None and not abs(loss) <= LARGEST_LOSS:  # NaN is not less than anything
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
    """Check and read an update of ``length`` entries, from ``size`` training examples; else it is an UpdateError.

    One of no entries is not sent: it is of a model that the client keeps.

    ``expected`` is what the answer must repeat of the query: the round, the number of the query,
    the model. With ``components`` above 0 it names one of so many.
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
    """Check and read which of some models a client has chosen; anything else is an UpdateError."""
    choice = content.get("choice", int)
    if not 0 <= choice < models:
        raise UpdateError(f"choice of model {shown(choice)}, expected one of {models}, from 0")
    content.has_only(())
    return choice


def read_wins(content: Content, models: int, examples: int) -> list[int]:
    """Check and read of how many of its examples each model is best; anything else is an UpdateError."""
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
    """Return the scores of the clients that answered, in the order of a query's ``ids``, with wins if they compared."""
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
    """Check and read the scores of so many models; anything else is an UpdateError.

    A score is NaN where the metric is undefined for the client's examples, which a mean over
    examples never is. ``known`` is the number of the client's examples in that split, where it is
    known; it is the same for all models. No loss of the task is below ``smallest_loss``. A client
    with a privacy budget or secure aggregation tells no loss and no number of examples.
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
    """Check and read the scores of a client that tells one number for each model, and no more.

    By other metrics it has no score. It counts as one example: how many it has it does not tell.
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


# What clients' training examples come to, in messages and in a run's folder: each tells its own,
# all get the sum.

TYPES: Mapping[str, tuple[type, torch.dtype]] = {
    "means": (float, torch.float64),
    "squares": (float, torch.float64),
    "numbers": (bool, torch.bool),
    "labels": (int, torch.int64),
}
"""What statistics are lists of besides the count."""

_log = logging.getLogger(__name__)

Request = Callable[
    [Mapping[int, RecordDict], str, str, Callable[[int, Content], Statistics], dict[int, str]],
    Iterator[tuple[int, Statistics]],
]


def as_values(found: Statistics) -> dict[str, Any]:
    """Return statistics as plain values, of a message or of JSON; without the lists that are empty."""
    lists = {name: getattr(found, name).tolist() for name in TYPES}
    return {"count": found.count, **{name: values for name, values in lists.items() if values}}


def read_statistics(values: Mapping[str, Any], columns: int, labels: int) -> Statistics:
    """Check and read what training examples come to, of so many columns and labels; else it is an UpdateError."""
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
    counted = sum(read.labels.tolist())  # which the tensor's own sum might not hold
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
    """Ask clients for theirs, and add those, within bounds, in the query's order.

    An UpdateError unless most tell: a few could otherwise end every run, or set by what all scale.
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
        # of two nobody's can be bounded
        needed = max(len(query.ids) // 2 + 1, min(3, len(query.ids)))
        if len(found) < needed:
            raise UpdateError(f"{told}, and {needed} are needed: {why}")
        _log.warning("%s: %s", told, why)
    of_most = [found[client] for client in query.ids if client in found]
    return reduce(Statistics.plus, bounded(of_most, query.largest_weight))
