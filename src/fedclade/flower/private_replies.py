"""Errors of clients with differential privacy, in a form that does not depend on their data.

Noise protects the updates that a client sends, but a missing reply, or an error text with a number,
could still reveal something about the data. So every accepted training query results in a clipped,
noisy and counted reply, whatever the data is, and errors have one of a few fixed texts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from fedclade.channel import Middleware
from fedclade.core import (
    FORBIDS,
    KEEPS_NONE,
    Ask,
    ConfigError,
    FedcladeError,
    Layout,
    PolicyError,
    PrivacyError,
    TrainQuery,
    UpdateError,
    Updates,
)
from fedclade.flower.policy import NotDisclosedError

_log = logging.getLogger(__name__)

FORBIDDEN = f"{FORBIDS} this query; the client's log has the details"
BUDGET_SPENT = (
    "the privacy budget of this client allows no further update; the client's log has the details"
)
NOT_POSSIBLE = "this client cannot reply to such a query; the client's log has the details"
FAILED = "this client could not compute a reply; the client's log has the details"


@dataclass(frozen=True)
class ErrorShield(Middleware):
    """Middleware that replaces an update by zeros if training fails.

    A missing reply would reveal something about the data. The middleware acts before the update is
    clipped and noise is added: it is the innermost middleware of a client in a network with
    client-level privacy. Errors that the query alone causes, such as a local rule that does not fit
    the model, are the same for all data and are raised as usual.

    Parameters
    ----------
    layout
        Layout of the model, for the number of entries of an update.
    size
        Number of training examples of the client, |D_i|.
    key
        The client's key, by which its examples are assigned to parts if it trains on parts.
    """

    layout: Layout
    size: int
    key: int

    queries = (TrainQuery,)

    def around(self, query: TrainQuery, ask: Ask) -> Updates:
        """Return the client's update, or zeros if training fails for a reason in the data."""
        try:
            return ask(query)
        except (ConfigError, UpdateError):
            raise
        except Exception:
            # A mixture has several models, and the form of their update depends on the method.
            if query.work.mixture is not None:
                raise
            _log.exception(
                "training failed; the reply consists of noise only, since a missing reply would "
                "reveal data"
            )
            return self._zero_update(query)

    def _zero_update(self, query: TrainQuery) -> Updates:
        """Return the reply to a training query with an update of zeros."""
        count = self.layout.size if query.work.sends_update else 0
        examples = len(query.examples(self.size, self.key))
        return Updates.received(
            query.ids,
            sizes=[examples],
            deltas=torch.zeros(1, count, dtype=self.layout.dtype),
            n_parameters=min(count, self.layout.n_parameters),
            losses=torch.zeros(1, dtype=torch.float64),
            number=query.round.number,
        )


def without_details(error: Exception) -> FedcladeError:
    """Return the error that a client with differential privacy reports in place of another error.

    The text of the original error may contain numbers that were computed from the client's data, so
    it is replaced by one of a few fixed texts. Errors of the types ConfigError and
    NotDisclosedError are returned unchanged, since their texts depend only on the query and on
    settings.
    """
    if isinstance(error, ConfigError | NotDisclosedError):
        return error
    if isinstance(error, PolicyError):
        return PolicyError(FORBIDDEN)
    if isinstance(error, PrivacyError):
        return PrivacyError(BUDGET_SPENT)
    if isinstance(error, UpdateError):
        # The server reacts to a client that has lost its own model, so it must know. Whether a
        # model is stored does not depend on the data.
        return UpdateError(KEEPS_NONE if str(error).startswith(KEEPS_NONE) else NOT_POSSIBLE)
    return UpdateError(FAILED)
