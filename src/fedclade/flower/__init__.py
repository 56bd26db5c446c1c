"""Clustered federated learning over a network, with Flower and the algorithms of a simulation.

The package contains the Flower apps of server and clients, and the messages between them. Within
fedclade, only the command-line package may import this package, since Flower is an optional
dependency.

>>> from fedclade.flower import client_app, server_app  # doctest: +SKIP
>>> server = server_app("cfl", "mlp", rounds=20, folder="runs/federation")  # doctest: +SKIP
>>> client = client_app("mlp", lambda context: my_data())  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedclade.flower.requirement import check_flower

check_flower()  # before anything of Flower is imported

from fedclade.flower.client_app import client_app  # noqa: E402
from fedclade.flower.continuation import continue_run  # noqa: E402
from fedclade.flower.federate import federate  # noqa: E402
from fedclade.flower.from_config import (  # noqa: E402
    client_app_from_config,
    finish_run,
    server_app,
    server_app_from_config,
)
from fedclade.flower.grid_clients import GridClients  # noqa: E402
from fedclade.flower.network import Network  # noqa: E402
from fedclade.flower.strategy import ClusteredStrategy, part_of  # noqa: E402

if TYPE_CHECKING:
    from fedclade.flower.local_grid import LocalGrid, LocalNode

__all__ = [
    "ClusteredStrategy",
    "GridClients",
    "LocalGrid",
    "LocalNode",
    "Network",
    "client_app",
    "client_app_from_config",
    "continue_run",
    "federate",
    "finish_run",
    "part_of",
    "server_app",
    "server_app_from_config",
]


def __getattr__(name: str) -> Any:
    """Import ``LocalGrid`` or ``LocalNode`` when the name is first used (PEP 562).

    Both classes are in a module that uses internals of Flower, which may change between versions.
    Apps do not need the classes, so an import of the package must not import that module.
    """
    if name in ("LocalGrid", "LocalNode"):
        from fedclade.flower import local_grid

        return getattr(local_grid, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
