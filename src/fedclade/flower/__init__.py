"""Clustered federated learning over a network, with Flower and the algorithms of a simulation.

The package contains the Flower apps of server and clients, and the messages between them. Within
fedclade, only the command-line package may import this package, since Flower is an optional
dependency.

>>> from fedclade.flower import client_app, server_app  # doctest: +SKIP
>>> server = server_app("cfl", "mlp", rounds=20, folder="runs/federation")  # doctest: +SKIP
>>> client = client_app("mlp", lambda context: my_data())  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedclade.core import lazy_names
from fedclade.flower.requirement import check_flower

check_flower()  # before anything of Flower is imported

# An app of a client need not wait for the modules of the server, and no app for the local grid,
# which uses internals of Flower that may change between versions.
if TYPE_CHECKING:
    from fedclade.flower.client_app import client_app
    from fedclade.flower.continuation import continue_run
    from fedclade.flower.federate import federate
    from fedclade.flower.from_config import client_app_from_config
    from fedclade.flower.grid_clients import GridClients
    from fedclade.flower.local_grid import LocalGrid, LocalNode
    from fedclade.flower.network import Network
    from fedclade.flower.server_from_config import finish_run, server_app, server_app_from_config
    from fedclade.flower.strategy import ClusteredStrategy, part_of

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

if not TYPE_CHECKING:  # a type checker knows the names from the imports above
    __getattr__ = lazy_names(__name__)
