"""Security parameters of secure aggregation.

The module computes how many clients must agree to a sum, and how many shares reconstruct a secret
of a client. Server and clients compute the same numbers. At most c of the n clients on a list
collude with the server. The theorem of ``docs/secure-aggregation-protocol.md`` depends on the
numbers that are computed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

MOST_COMPLETE = 64
"""Largest number of clients in a sum in which each client always deals shares to all clients."""

SECURITY_BITS = 64
"""Security bits, which limit the probability of an attack to 2⁻⁶⁴.

If clients deal shares only to some clients, a malicious server may unmask a sum of only some of the
honest clients with at most this probability.
"""

LOSS_BITS = 10
GONE = 0.1
"""Share of clients that may drop out.

If this share of clients drops out, a secret is lost with a probability of at most 2⁻¹⁰
(:data:`LOSS_BITS`).
"""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Graph:
    """Rule by which the clients of a sum deal shares of their secrets to one another.

    Parameters
    ----------
    holders
        Number of other clients that each client draws and deals shares to; 0 if each client deals
        to all clients, itself included (a complete graph).
    needed
        Number of shares that reconstruct a secret.
    """

    holders: int
    needed: int

    @classmethod
    def of(cls, clients: int, colluders: int, neighbours: int) -> Graph:
        """Return the rule for dealing shares in a sum.

        Clients deal to all clients if ``neighbours`` is 0, if there are few clients, or if with
        this number of neighbours a server could unmask a sum of only some honest clients.

        Parameters
        ----------
        clients
            Number of clients of the sum.
        colluders
            Number of clients that may collude with the server.
        neighbours
            Number of other clients to which each client deals shares, the setting
            ``network.secure_neighbours``; 0 for all clients.
        """
        if clients > MOST_COMPLETE and 0 < neighbours < clients - 1:
            needed = fewest_needed(clients, colluders, neighbours)
            if needed is not None:
                return cls(neighbours, needed)
        return cls(0, quorum(clients, colluders))


def quorum(clients: int, colluders: int) -> int:
    """Return the quorum T: the number of clients that must sign a statement about a sum.

    If T of n clients have signed each of two statements, at least one honest client has signed both
    statements. Honest clients sign only one, so a server cannot obtain two sums.
    """
    return (clients + colluders) // 2 + 1


def suspects(clients: int, insisting: int, colluders: int) -> int:
    """Return c', the number of clients of a sum that do not protect the other clients.

    Such clients may sign two contradictory statements, or help to unmask an update. They are the
    colluders, and, if some clients insist on secure aggregation, all clients that do not.

    Parameters
    ----------
    clients
        Number of clients of the sum.
    insisting
        Number of clients that insist on secure aggregation.
    colluders
        c, the number of clients that may collude with the server.
    """
    if not insisting:
        return colluders
    return colluders + clients - insisting


def without_protection(min_honests: Mapping[int, int], colluders: int) -> list[int]:
    """Return the clients of a sum that demand more honest clients than the sum has.

    Parameters
    ----------
    min_honests
        h, the number of honest clients that each client demands, for all clients of the sum that
        insist on secure aggregation.
    colluders
        c, the number of these clients that may collude with the server.
    """
    return [client for client, least in min_honests.items() if len(min_honests) < colluders + least]


def too_few_insist(lacking: Sequence[int], min_honests: Mapping[int, int], colluders: int) -> str:
    """Return a part of the error for a sum that has fewer honest clients than a client demands.

    The text names the client with the largest unmet demand, and the remedy.

    Parameters
    ----------
    lacking
        Clients that demand more honest clients than the sum has.
    min_honests
        Number of honest clients that each client demands, for all clients of the sum that insist on
        secure aggregation.
    colluders
        Number of clients that may collude with the server.
    """
    client = max(lacking, key=lambda each: min_honests[each])
    least = colluders + min_honests[client]
    return (
        f"with {len(min_honests)} clients that have secure-aggregation=true in their node config, "
        f"since client {client} joins only sums with at least {least} (its min-honest, and "
        f"{colluders} that may collude); set secure-aggregation=true for more clients, or lower "
        "its min-honest"
    )


@lru_cache(maxsize=256)
def fewest_needed(clients: int, colluders: int, holders: int) -> int | None:
    """Return t, the smallest secure number of shares that reconstruct a secret.

    The result is None if no number is secure.

    With t shares, a server can unmask a sum of only some honest clients with a probability of at
    most 2⁻⁶⁴ (:func:`log2_risk`).

    Parameters
    ----------
    clients
        Number of clients of the sum.
    colluders
        Number of clients that may collude with the server.
    holders
        Number of clients that receive shares of a secret.
    """
    for needed in range(1, holders + 1):
        if log2_risk(clients, colluders, holders, needed=needed) <= -SECURITY_BITS:
            return needed
    return None


@lru_cache(maxsize=64)
def fewest_holders(clients: int, colluders: int) -> int:
    """Return k, the smallest number of holders of a client's shares that is secure and robust.

    With k holders, a secret is lost only with a small probability if a tenth of the clients drops
    out (:func:`log2_loss`).

    Parameters
    ----------
    clients
        Number of clients of the sum.
    colluders
        Number of clients that may collude with the server.
    """
    for holders in range(2, clients - 1):
        needed = fewest_needed(clients, colluders, holders)
        if needed is not None and log2_loss(clients, holders, needed) <= -LOSS_BITS:
            return holders
    return clients - 1


def log2_risk(clients: int, colluders: int, holders: int, *, needed: int) -> float:
    """Return log₂ of a bound on the probability that a server unmasks a sum of some honest clients.

    A sum must contain all honest clients that have sent masked vectors, and not only some of them.
    With n clients, c colluders, k holders of each client's shares, and t needed shares, the bound
    is

        Σ_{s=1}^{⌊(n−c)/2⌋} C(n−c, s) · P[Hyp(n−1, s−1+c, k) ≥ t]^s ,

    a union bound over all sets of s honest clients, regardless of drop-outs: each client of such a
    set would need t holders within the set or among the colluders. C(n, s) is a binomial
    coefficient. Hyp(N, K, k) is the number of marked elements among k elements that are drawn from
    N elements, K of which are marked.
    """
    honest = clients - colluders
    sizes = np.arange(1, honest // 2 + 1)
    tails = log2_tails(clients - 1, sizes - 1 + colluders, holders, needed)
    possible = np.isfinite(tails)
    sizes = sizes[possible]
    tails = tails[possible]
    return _log2_sum((_log2_comb(np.array(honest), sizes) + sizes * tails)[None])[0]


def log2_loss(clients: int, holders: int, needed: int) -> float:
    """Return log₂ of a bound on the probability that the secret of some client is lost.

    A secret is lost if too few of its holders reply. If a tenth of the n clients drops out, each
    secret has k holders, and t shares are needed, the bound is n · P[Hyp(n−1, n/10, k) > k − t].
    Hyp(N, K, k) is the number of marked elements among k elements that are drawn from N elements, K
    of which are marked.
    """
    gone = np.array([-(-clients // int(1 / GONE))])
    lost = log2_tails(clients - 1, gone, holders, holders - needed + 1)[0]
    return float(np.log2(clients) + lost)


def log2_tails(population: int, marked: NDArray[np.int64], drawn: int, least: int) -> Floats:
    """Return log₂ of upper tail probabilities of hypergeometric distributions.

    For each number of ``marked`` elements in a population, it is log₂ P[X ≥ ``least``], where X is
    the number of marked elements among ``drawn`` elements that are drawn without replacement.
    """
    hits = np.arange(max(least, 0), drawn + 1)[None]
    marked = marked[:, None]
    terms = _log2_comb(marked, hits) + _log2_comb(population - marked, drawn - hits)
    return np.minimum(0.0, _log2_sum(terms) - _log2_comb(np.array(population), np.array(drawn)))


def _log2_comb(n: NDArray[np.int64], k: NDArray[np.int64]) -> Floats:
    """Return log₂ of the binomial coefficients C(n, k); −∞ for coefficients that are 0."""
    table = _log2_factorials(int(n.max()))
    there = (k >= 0) & (k <= n)
    k = np.where(there, k, 0)
    return np.where(there, table[n] - table[k] - table[n - k], -np.inf)


@lru_cache(maxsize=8)
def _log2_factorials(largest: int) -> Floats:
    """Return log₂ of the factorials from 0! to ``largest``!."""
    return np.concatenate([[0.0], np.cumsum(np.log2(np.arange(1, largest + 1)))])


def _log2_sum(logarithms: Floats) -> Floats:
    """Return log₂ of the sum over each row of numbers, given log₂ of the numbers."""
    # The largest number of a row is factored out, so that no power of two overflows.
    if logarithms.shape[1] == 0:
        return np.full(len(logarithms), -np.inf)
    largest = logarithms.max(axis=1)
    shifted = logarithms - np.where(np.isfinite(largest), largest, 0.0)[:, None]
    with np.errstate(divide="ignore"):
        return np.where(np.isfinite(largest), largest, 0.0) + np.log2(np.exp2(shifted).sum(axis=1))
