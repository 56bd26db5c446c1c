"""Clustered federated learning over a network, on Flower: the algorithms of a simulation, unchanged.

>>> from fedclade.flower import client_app, server_app  # doctest: +SKIP
>>> server = server_app("cfl", "mlp", rounds=20, folder="runs/federation")  # doctest: +SKIP
>>> client = client_app("mlp", lambda context: my_data())  # doctest: +SKIP
"""

from fedclade.flower.requirement import check_flower

check_flower()  # before anything of Flower is imported

from fedclade.flower.client_app import client_app  # noqa: E402
from fedclade.flower.federate import Network, federate  # noqa: E402
from fedclade.flower.from_config import client_app_from_config, server_app_from_config  # noqa: E402
from fedclade.flower.grid_clients import GridClients  # noqa: E402
from fedclade.flower.local_grid import LocalGrid, LocalNode  # noqa: E402
from fedclade.flower.server_app import server_app  # noqa: E402

__all__ = [
    "GridClients",
    "LocalGrid",
    "LocalNode",
    "Network",
    "client_app",
    "client_app_from_config",
    "federate",
    "server_app",
    "server_app_from_config",
]
