"""What private clients do not tell, however it is asked for: all of their training data that no noise is put on."""

from __future__ import annotations

from torch import Tensor

from fedclade.channel.middleware import Middleware
from fedclade.core import (
    Ask,
    ConfigError,
    DescriptorQuery,
    Evaluation,
    EvaluationQuery,
    ShiftQuery,
    Statistics,
    StatisticsQuery,
    SubspaceQuery,
)


class Withholding(Middleware):
    """Lets clients give updates, and scores on validation or test data; what else is asked for is refused."""

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


def refusal(what: str) -> ConfigError:
    """Return the error of asking private clients for what no noise is put on."""
    return ConfigError(
        f"clients with differential privacy do not tell {what}, since no noise is put on that; take an algorithm that "
        "goes by updates alone, or leave out privacy.clip_norm"
    )
