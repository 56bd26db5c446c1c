"""Query of FlexCFL whether the labels of clients' data have shifted.

Clients need this module, and nothing else of :mod:`fedclade.algorithms.flexcfl`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedclade.core import (
    IGNORED,
    ConfigError,
    DataSpec,
    LocalData,
    LocalStore,
    RowQuery,
    require,
    torch_type,
)

if TYPE_CHECKING:
    from torch import Tensor

LABELS = "labels"
"""Name under which a client stores its earlier numbers of examples of C labels, int64 ``[C]``."""


@dataclass(frozen=True, eq=False)
class ShiftQuery(RowQuery):
    """Query whether the labels of clients' training data have shifted since an earlier round.

    The reply of n clients is a boolean for each, ``[n]``. It is False for clients that do not
    reply.

    Each client compares its present numbers of examples of C labels with its earlier numbers, which
    are from the round in which it was first queried, or last reported a shift. Labels have shifted
    if the distance is above ``share · N/C``, where N is the client's earlier number of examples.
    The distance is Σ|a − b|/C over the two lists of counts, each in ascending order. This is
    SciPy's ``wasserstein_distance`` of counts that are treated as samples; it does not detect a
    permutation of the labels.

    Parameters
    ----------
    round
        Number of the round.
    share
        Share of N/C above which the distance counts as a shift, in [0, 2].
    by_label
        Whether counts are compared label by label, rather than in ascending order. A permutation of
        the labels is then detected, too.
    """

    kind = "shifts"
    mechanism = "none"
    discloses = "shifts"
    reveals = "shifts of their data"
    stores = (LABELS,)
    dtype = torch_type("bool")
    zeros_are_a_reply = True
    reply_name = "shifted"
    counts_as = "evaluations"
    needs_min_part = False

    round: int
    share: float
    by_label: bool

    def __post_init__(self) -> None:
        require(
            ("the round of a query for shifts", self.round, self.round >= 1, "at least 1"),
            ("algorithm.shift_share", self.share, 0 <= self.share <= 2, "in [0, 2]"),
        )

    def shape(self, spec: DataSpec) -> tuple[int, ...]:
        """Return the shape of a client's reply, which is ``()``: a single boolean.

        Raises
        ------
        ConfigError
            If examples have no label, or several labels, so that labels cannot be counted.
        """
        if spec.labels is None:
            raise ConfigError(
                f"the labels of a {spec.task} task cannot be counted, so FlexCFL cannot detect "
                "shifts of its data; set algorithm.migrate = false"
            )
        return ()

    def answer(self, data: LocalData, store: LocalStore) -> Tensor:
        """Compute, on the client, whether its labels have shifted.

        The client stores its present counts of labels for later queries if they have shifted, or if
        this is its first query.
        """
        seen = data.targets.long()
        now = torch.bincount(seen[seen != IGNORED], minlength=data.spec.labels or 0)
        before = store.get(LABELS)
        shifted = before is not None and self.have_shifted(before.to(now.device), now)
        if before is None or shifted:
            store.keep(LABELS, now)
        return torch.tensor(shifted)

    def have_shifted(self, before: Tensor, now: Tensor) -> bool:
        """Return whether the distance between two lists of label counts is above the query's limit.

        Parameters
        ----------
        before, now
            The earlier and the present number of examples of each of C labels, ``[C]``.
        """
        if not self.by_label:
            before = before.sort().values
            now = now.sort().values
        # Both sides are multiplied by C.
        return float((before - now).abs().sum()) > self.share * float(before.sum())

    def false_row(self, row: Tensor, key: int) -> Tensor:
        """Return the false reply of a simulated adversary, in place of the true reply ``row``.

        The adversary claims in every round that its labels have shifted.
        """
        return torch.ones_like(row)
