"""Local training and evaluation of simulated clients."""

from fedclade.engine.clients import SimulatedClients

__all__ = ["SimulatedClients"]
