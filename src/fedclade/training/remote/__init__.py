"""Clients in other processes and on other machines: the engine ``ray``.

Actors of a Ray cluster each have a shard of the federation, and train and evaluate it as a single
process does. Runs import this package. Ray itself is imported only when it is needed.
"""

from fedclade.training.remote.actor import Setup
from fedclade.training.remote.clients import RayClients, here, taken_by
from fedclade.training.remote.cluster import Actors, Cluster, actors_from

__all__ = ["Actors", "Cluster", "RayClients", "Setup", "actors_from", "here", "taken_by"]
