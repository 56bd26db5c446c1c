"""Clustered federated learning as a Flower app; what it does is in the config, in ``pyproject.toml``."""

from fedclade.flower import client_app_from_config, server_app_from_config

server = server_app_from_config()
client = client_app_from_config()
