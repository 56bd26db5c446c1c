"""Numbers of clients that must agree, and of shares that open a secret.

Server and clients compute the same numbers. At most c of the n clients on a list collude with the
server. The theorem of ``docs/secure-aggregation-protocol.md`` depends on the numbers that are
computed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

MOST_COMPLETE = 64
"""Longest list on which each client deals shares to all others, regardless of the settings."""

SECURITY_BITS = 64
"""Security bits: a sum on a sparse graph splits with a probability of at most 2⁻⁶⁴."""

LOSS_BITS = 10
GONE = 0.1
"""Share of clients that may drop out: some secret is then lost with probability at most 2⁻¹⁰."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Graph:
    """Rule by which clients deal shares to one another.

    Parameters
    ----------
    holders
        Number of other clients that each client draws and deals shares to; 0 if it deals to all
        clients, itself included.
    needed
        Number of shares that open a secret.
    """

    holders: int
    needed: int

    @classmethod
    def of(cls, clients: int, colluders: int, neighbours: int) -> Graph:
        """Return the graph on a list of ``clients`` clients, for the setting ``neighbours``.

        The graph is complete for 0 neighbours, on a short list, and if this number of neighbours
        cannot keep honest clients together.
        """
        if clients > MOST_COMPLETE and 0 < neighbours < clients - 1:
            needed = fewest_needed(clients, colluders, neighbours)
            if needed is not None:
                return cls(neighbours, needed)
        return cls(0, quorum(clients, colluders))


def quorum(clients: int, colluders: int) -> int:
    """Return the quorum T.

    If T of n clients have signed each of two statements, an honest client has signed both.
    """
    return (clients + colluders) // 2 + 1


def suspects(clients: int, insisting: int, colluders: int) -> int:
    """Return c', the number of clients that may sign two statements or help to unmask an update.

    If some clients on the list insist on sums, the others count among the colluders.
    """
    return colluders + (clients - insisting if insisting else 0)


def without_protection(min_honests: Mapping[int, int], colluders: int) -> list[int]:
    """Return the clients of a sum in which too few others insist on sums.

    Parameters
    ----------
    min_honests
        h of each client that insists on sums.
    colluders
        c, the number of these clients that may collude with the server.
    """
    return [client for client, least in min_honests.items() if len(min_honests) < colluders + least]


def too_few_insist(lacking: Sequence[int], min_honests: Mapping[int, int], colluders: int) -> str:
    """Describe a sum in which some clients have too little protection, for an error."""
    client = max(lacking, key=lambda each: min_honests[each])
    least = colluders + min_honests[client]
    return (
        f"with {len(min_honests)} clients that have secure-aggregation=true in their node config, "
        f"and client {client} takes part in sums with at least {least} (its min-honest, and "
        f"{colluders} that may collude); set secure-aggregation=true for more clients, or lower "
        "its min-honest"
    )


@lru_cache(maxsize=256)
def fewest_needed(clients: int, colluders: int, holders: int) -> int | None:
    """Return t, the least number of shares that keeps honest clients together; None if none does.

    It is the least t with :func:`log2_risk` of at most −64.
    """
    for needed in range(1, holders + 1):
        if log2_risk(clients, colluders, holders, needed=needed) <= -SECURITY_BITS:
            return needed
    return None


@lru_cache(maxsize=64)
def fewest_holders(clients: int, colluders: int) -> int:
    """Return k, the least number of holders with which a tenth of the clients may drop out."""
    for holders in range(2, clients - 1):
        needed = fewest_needed(clients, colluders, holders)
        if needed is not None and log2_loss(clients, holders, needed) <= -LOSS_BITS:
            return holders
    return clients - 1


def log2_risk(clients: int, colluders: int, holders: int, *, needed: int) -> float:
    """Return log₂ of a bound on the probability that a sum of only some honest clients is opened.

    With n clients, c colluders, k holders and t needed shares it is

        Σ_{s=1}^{⌊(n−c)/2⌋} C(n−c, s) · P[Hyp(n−1, s−1+c, k) ≥ t]^s ,

    the union over all sets of s honest clients, regardless of drop-outs: each client of a set would
    need t holders within the set or among colluders.
    """
    honest = clients - colluders
    sizes = np.arange(1, honest // 2 + 1)
    tails = log2_tails(clients - 1, sizes - 1 + colluders, holders, needed)
    possible = np.isfinite(tails)
    sizes = sizes[possible]
    tails = tails[possible]
    return _log2_sum((_log2_comb(np.array(honest), sizes) + sizes * tails)[None])[0]


def log2_loss(clients: int, holders: int, needed: int) -> float:
    """Return log₂ of a bound on the probability that a secret is lost.

    It is for a tenth of the clients dropping out: n · P[Hyp(n−1, n/10, k) > k − t].
    """
    gone = np.array([-(-clients // int(1 / GONE))])
    lost = log2_tails(clients - 1, gone, holders, holders - needed + 1)[0]
    return float(np.log2(clients) + lost)


def log2_tails(population: int, marked: NDArray[np.int64], drawn: int, least: int) -> Floats:
    """Return log₂ P[X ≥ ``least``] for each number of marked elements.

    X is the number of marked elements among ``drawn`` elements, drawn without replacement.
    """
    hits = np.arange(max(least, 0), drawn + 1)[None]
    marked = marked[:, None]
    terms = _log2_comb(marked, hits) + _log2_comb(population - marked, drawn - hits)
    return np.minimum(0.0, _log2_sum(terms) - _log2_comb(np.array(population), np.array(drawn)))


def _log2_comb(n: NDArray[np.int64], k: NDArray[np.int64]) -> Floats:
    """Return log₂ of binomial coefficients; −∞ for coefficients that are 0."""
    table = _log2_factorials(int(n.max()))
    there = (k >= 0) & (k <= n)
    k = np.where(there, k, 0)
    return np.where(there, table[n] - table[k] - table[n - k], -np.inf)


@lru_cache(maxsize=8)
def _log2_factorials(largest: int) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.log2(np.arange(1, largest + 1)))])


def _log2_sum(logarithms: Floats) -> Floats:
    """Return log₂ of the sum of each row, given the log₂ of its numbers."""
    if logarithms.shape[1] == 0:
        return np.full(len(logarithms), -np.inf)
    largest = logarithms.max(axis=1)
    shifted = logarithms - np.where(np.isfinite(largest), largest, 0.0)[:, None]
    with np.errstate(divide="ignore"):
        return np.where(np.isfinite(largest), largest, 0.0) + np.log2(np.exp2(shifted).sum(axis=1))
