"""Local training and evaluation of simulated clients."""

from fedclade.training.clients import SimulatedClients

__all__ = ["SimulatedClients"]
