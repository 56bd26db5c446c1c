"""What private clients do not tell, however it is asked for: all of their training data that no noise is put on."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedclade.channel.middleware import Middleware
from fedclade.core import (
    Ask,
    ConfigError,
    DescriptorQuery,
    Evaluation,
    EvaluationQuery,
    Query,
    R,
    ShiftQuery,
    Statistics,
    StatisticsQuery,
    SubspaceQuery,
    check_declared,
)


class Withholding(Middleware):
    """Lets clients give updates, and scores on validation or test data; what else is asked for is refused.

    So is every class of queries that does not declare what its replies reveal.
    """

    def __call__(self, query: Query[R], ask: Ask) -> R:
        """Put a query; raise a ConfigError if its class does not declare what it discloses."""
        check_declared(type(query))
        return super().__call__(query, ask)

    def evaluation(self, query: EvaluationQuery, ask: Ask) -> Evaluation:
        """Return scores on validation or test data; raise a ConfigError on training data."""
        if query.split == "train":
            raise refusal("training losses")
        return ask(query)

    def subspaces(self, query: SubspaceQuery, ask: Ask) -> Tensor:
        """Raise a ConfigError: these are directions of the data."""
        raise refusal("subspaces of their data")

    def descriptors(self, query: DescriptorQuery, ask: Ask) -> Tensor:
        """Raise a ConfigError: these are means of the data, as a model sees it."""
        raise refusal("descriptors of their data")

    def shifts(self, query: ShiftQuery, ask: Ask) -> Tensor:
        """Raise a ConfigError: that tells of the labels."""
        raise refusal("shifts of their data")

    def statistics(self, query: StatisticsQuery, ask: Ask) -> Statistics:
        """Raise a ConfigError: they are exact."""
        raise refusal("sums of their data (standardize = 'federated', class_weights = 'balanced')")

    def other(self, query: Query[Any], ask: Ask) -> Any:
        """Return a reply that does not depend on anybody's data; raise a ConfigError for any other."""
        if query.mechanism != "public":
            raise refusal(f"{query.discloses} (a {type(query).__name__})")
        return ask(query)


def refusal(what: str) -> ConfigError:
    """Return the error of asking private clients for what no noise is put on."""
    return ConfigError(
        f"clients with differential privacy do not tell {what}, since no noise is put on that; take an algorithm that "
        "goes by updates alone, or leave out privacy.clip_norm"
    )
