"""Work of a training query in messages.

The work of a query states from which model clients start, on which data and by which steps they
train, what they store and what they reply. A message describes the work by a few values that
clients know. So only work that consists of the parts in :mod:`fedclade.core.work`, of local rules,
and of steps that clients find by a name (:mod:`fedclade.flower.own_steps`) can be sent to clients.
What a client stores follows from the purpose of the query.
"""

from __future__ import annotations

from typing import Any

from fedclade.core import (
    AllData,
    ClientWork,
    ConfigError,
    Delta,
    DistanceToAnchor,
    FromServer,
    FromStored,
    Lasting,
    LocalModel,
    NoReply,
    Nothing,
    Reply,
    Splits,
    Start,
    Store,
    TrainQuery,
)
from fedclade.flower.own_steps import check_code_travels

KNOWN_DATA = (AllData, Splits)
"""Classes of training data that a message can describe."""


def stores_model(work: ClientWork) -> bool:
    """Return whether each client stores the trained model as its own."""
    return isinstance(work.store, LocalModel)


def shares_model(work: ClientWork) -> bool:
    """Return whether clients send the model that they store, in the form of model minus anchor."""
    return isinstance(work.reply, DistanceToAnchor)


def start_and_store(*, own: bool, purpose: str, in_splits: bool) -> tuple[Start, Store]:
    """Return from which model a client starts and what it stores.

    A message does not state either explicitly, so server and client derive both by this function.

    Parameters
    ----------
    own
        Whether the client stores the trained model as its own.
    purpose
        Purpose of the query. Only the regular training, ``train``, changes data that the client
        stores for later rounds.
    in_splits
        Whether the client trains separately on several disjoint parts of its data. Such training
        changes no stored data.

    Returns
    -------
    tuple[Start, Store]
        Model from which the client starts, and data that the client stores.
    """
    lasts = purpose == "train" and not in_splits
    if own:
        return FromStored(latest=not lasts), LocalModel(state=lasts)
    return FromServer(), Lasting() if lasts else Nothing()


def reply_of(*, own: bool, shares: bool) -> Reply:
    """Return the kind of reply to a training query.

    Parameters
    ----------
    own
        Whether the client stores the trained model as its own. If not, it replies with its update.
    shares
        Whether a client that stores the model also sends it, as the difference to its anchor.
    """
    if not own:
        return Delta()
    return DistanceToAnchor() if shares else NoReply()


def check_work_travels(query: TrainQuery) -> None:
    """Check that messages can describe the work of a training query, so that clients can do it.

    Raises
    ------
    ConfigError
        If messages cannot describe the work, so that it is possible in simulations only.
    """
    work = query.work
    check_code_travels(query)
    if type(work.data) not in KNOWN_DATA:
        raise _not_sent(
            work.data,
            "clients in a network can train only on their current data; run a simulation instead",
        )
    own = stores_model(work)
    if work.reply != reply_of(own=own, shares=shares_model(work)):
        raise _not_sent(
            work.reply,
            "clients in a network reply with their update (Delta) or, if they store a LocalModel, "
            "with DistanceToAnchor or NoReply; use one of these replies, or run a simulation",
        )
    purpose = query.round.purpose
    start, store = start_and_store(own=own, purpose=purpose, in_splits=work.splits is not None)
    expected: list[tuple[Start | Store, Start | Store]] = [(work.start, start)]
    # Clients store nothing after computing a gradient or training on splits of the data, whatever
    # the query's store is.
    if not work.is_gradient and (work.splits is None or own):
        expected.append((work.store, store))
    for stated, needed in expected:
        if stated != needed:
            raise _not_sent(
                stated,
                f"with the purpose {purpose!r} a client in a network uses {needed} in its place; use "
                f"{needed} in the query, or run a simulation",
            )


def _not_sent(part: Any, why: str) -> ConfigError:
    """Return the error for a part of a query's work that messages cannot describe."""
    return ConfigError(f"{type(part).__name__} runs in simulations only, since {why}")
