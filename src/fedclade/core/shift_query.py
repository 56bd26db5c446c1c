"""The query by which clients say whether their data has shifted."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedclade.core.errors import ConfigError
from fedclade.core.queries import Handlers, Query
from fedclade.core.registry import DataSpec


@dataclass(frozen=True, eq=False)
class ShiftQuery(Query[Tensor]):
    """Say whether the labels of the training data have shifted since one last said so; the reply is bool ``[n]``.

    Each client compares how often it has each of C labels with how often it had when it was first asked, or last said
    that they had shifted, n examples then. They have if the distance is above ``share · n/C``. It is Σ|a − b|/C over
    the two lists of counts, each in ascending order, which is SciPy's ``wasserstein_distance`` of counts that are taken
    for samples, and does not see that labels trade places; ``by_label`` leaves them in the order of the labels.
    Clients that do not reply have not shifted.
    """

    mechanism = "none"
    discloses = "shifts"

    round: int
    share: float
    by_label: bool

    def labels(self, spec: DataSpec) -> int:
        """Return C for some data; a ConfigError if examples have no label, or several."""
        if spec.labels is None:
            raise ConfigError(
                f"the labels of a {spec.task} task cannot be counted, so no shift is seen in its data; set "
                "algorithm.migrate = false"
            )
        return spec.labels

    def handled(self, handlers: Handlers) -> Tensor:
        """Return who has shifted."""
        return handlers.shifts(self)
