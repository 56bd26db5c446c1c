"""The algorithms, by the names that configs use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedclade.algorithms.base import Algorithm, Event, RoundLog, State
from fedclade.algorithms.cfl import CFL
from fedclade.algorithms.fedavg import FedAvg, Local, Oracle
from fedclade.algorithms.fl_hc import FLHC
from fedclade.arguments import check_arguments
from fedclade.errors import ConfigError, unknown

__all__ = [
    "ALGORITHMS",
    "CFL",
    "FLHC",
    "Algorithm",
    "Event",
    "FedAvg",
    "Local",
    "Oracle",
    "RoundLog",
    "State",
    "build_algorithm",
]


@dataclass(frozen=True)
class Entry:
    """An algorithm of the library, and a line about it for people."""

    algorithm: type[Algorithm]
    summary: str


ALGORITHMS: Mapping[str, Entry] = {
    "fedavg": Entry(FedAvg, "one model for all clients; FedProx with local.mu > 0"),
    "local": Entry(Local, "no federation: every client on its own"),
    "oracle": Entry(Oracle, "FedAvg within the true clusters, the best to hope for"),
    "cfl": Entry(CFL, "recursive optimal bi-partition by cosine similarity (Sattler et al. 2019)"),
    "fl_hc": Entry(FLHC, "one step of hierarchical clustering of all updates (Briggs et al. 2020)"),
}


def build_algorithm(
    name: str, options: Mapping[str, Any] | None = None, true_clusters: Mapping[int, int] | None = None
) -> Algorithm:
    """Build an algorithm from its name and hyper-parameters.

    Parameters
    ----------
    name
        One of :data:`ALGORITHMS`.
    options
        Its hyper-parameters; what is left out keeps its default.
    true_clusters
        Handed to the ``oracle``, and to nobody else.

    Raises
    ------
    ConfigError
        If the name or an option is unknown, a value is out of range, or the oracle is asked for and no truth is known.
    """
    if name not in ALGORITHMS:
        raise ConfigError(unknown("algorithm", name, ALGORITHMS))
    algorithm = ALGORITHMS[name].algorithm
    options = check_arguments(f"algorithm {name!r}", algorithm, options or {})
    if algorithm is not Oracle:
        return algorithm(**options)
    if true_clusters is None:
        raise ConfigError("algorithm 'oracle' needs data whose true clusters are known; set data.shift")
    return Oracle(true_clusters)
