"""Clustered federated learning as a Flower app, which is configured in ``pyproject.toml``."""

from fedclade.flower import client_app_from_config, server_app_from_config

server = server_app_from_config()
client = client_app_from_config()
