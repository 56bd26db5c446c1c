"""Replies of clients with differential privacy in a form that does not depend on their data.

The rule: every accepted training query results in a clipped, noisy and counted reply, for all data.
A reply that is missing, or an error text with a number in it, would reveal something about the data
that no noise protects.
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
    UpdateError,
    UpdateQuery,
    Updates,
)
from fedclade.flower.policy import NotDisclosedError

_log = logging.getLogger(__name__)

FORBIDDEN = f"{FORBIDS} this query; the client's log has the details"
BUDGET_SPENT = (
    "the privacy budget of this client allows no further update; the client's log has the details"
)
NOT_POSSIBLE = "this client cannot answer such a query; the client's log has the details"
FAILED = "this client could not compute a reply; the client's log has the details"


@dataclass(frozen=True)
class ErrorShield(Middleware):
    """Middleware that replaces an update by zeros if it could not be computed.

    It acts before the update is clipped and noise is added: it is the innermost middleware of a
    real client with client-level privacy. Errors that the query alone causes, such as a local rule
    that does not fit the model, are the same for all data and are not replaced.

    Parameters
    ----------
    layout
        Layout of the model, for the number of entries of an update.
    size
        Number of training examples of the client, |D_i|.
    key
        The client's key, by which the splits of its data are drawn.
    """

    layout: Layout
    size: int
    key: int

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return the client's update, or zeros if training fails for a reason that may be data."""
        try:
            return ask(query)
        except (ConfigError, UpdateError):
            raise
        except Exception:
            # A mixture has several models, and the form of their update depends on the method.
            if query.mixture is not None:
                raise
            _log.exception(
                "training failed; the reply is noise alone, since a missing reply would reveal data"
            )
            return self._zeros(query)

    def _zeros(self, query: UpdateQuery) -> Updates:
        count = 0 if query.is_secret else self.layout.size
        examples = len(query.round.examples(self.size, self.key))
        return Updates.received(
            query.ids,
            sizes=[examples],
            deltas=torch.zeros(1, count, dtype=self.layout.dtype),
            n_parameters=min(count, self.layout.n_parameters),
            losses=torch.zeros(1, dtype=torch.float64),
            number=query.round.number,
        )


def without_details(error: Exception) -> FedcladeError:
    """Return the error that a private client reports to the server in place of another error.

    There are only four texts, except for the texts of a ConfigError and of a NotDisclosedError,
    which depend on the query and on settings alone. All other texts may contain numbers that were
    counted or computed from the client's data.
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
