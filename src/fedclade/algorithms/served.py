"""Which of several models each client is served with, by validation data.

A client's few validation examples tell little: of 60 examples, two models that are right about 92 of 100 differ by up
to 5 points for no reason. So clients choose together first, then in groups, and at last each by itself. Who comes later
departs from what is chosen for more general models if these are better by a standard error of the difference, for
others by two, since what more clients have trained is more to be trusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from fedclade.core import Evaluation

UP, DOWN = 1.0, 2.0
"""By how many standard errors more general models, or others, must be better than what is served."""

Served = Mapping[int, int]
"""The model of each client, by a number: the greater, the more special."""


@dataclass(frozen=True)
class Scores:
    """How clients fare with several models: those that answered, with a score that is a number."""

    merits: Mapping[tuple[int, int], float]  # by client and model
    examples: Mapping[int, float]  # by client
    are_shares: bool  # of examples, or something like it

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, int]], answers: Sequence[Evaluation]) -> Scores:
        """Return the scores of clients with models, in the order of the answers, which are one behind the other."""
        found = Evaluation.concat(answers)
        merits = dict(zip(pairs, found.merit.tolist(), strict=True))
        unclear = {client for (client, _), merit in merits.items() if not isfinite(merit)}
        merits = {pair: merit for pair, merit in merits.items() if pair[0] not in unclear}
        examples = {c: n for c, n in zip(found.ids, found.examples.tolist(), strict=True) if c not in unclear}
        return cls(merits, examples, found.higher_is_better and all(0 <= merit <= 1 for merit in merits.values()))

    def total(self, way: Served) -> float:
        """Return the sum of the scores over all examples of some clients if they are served like this."""
        return sum(self.examples[c] * self.merits[c, model] for c, model in way.items() if c in self.examples)

    def error(self, way: Served, other: Served) -> float:
        """Return the standard error of the difference of two totals, at most.

        Examples about which two models differ are such that one of them gets wrong. Of scores that are no shares, the
        differences themselves show how much is chance; so one client alone never departs.
        """
        variance = 0.0
        for client in (c for c in way if c in self.examples and way[c] != other[c]):
            n, a, b = self.examples[client], self.merits[client, way[client]], self.merits[client, other[client]]
            variance += n * (2 - a - b) if self.are_shares else (n * (a - b)) ** 2
        return variance**0.5


def departed(served: Served, groups: Sequence[Sequence[Served]], scores: Scores) -> dict[int, int]:
    """Return what clients are served with after one group after the other has looked at its ways.

    Each of a group's ways names the models of the same clients; of equals the first is taken.
    """
    served = dict(served)
    for ways in groups:
        best = max(ways, key=scores.total)
        now = {client: served[client] for client in best}
        errors = UP if all(best[client] <= now[client] for client in best) else DOWN
        if scores.total(best) - scores.total(now) > errors * scores.error(best, now):
            served |= best
    return served
