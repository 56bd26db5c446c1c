"""Clients in other processes and on other machines: the engine ``ray``.

An actor is a worker process on any machine of a Ray cluster. It has a shard of the federation (some
of the clients), and trains and evaluates these clients in the same way as a run in a single
process. Runs import this package. Ray itself is imported only when it is needed.
"""

from fedclade.training.remote.actor import Setup
from fedclade.training.remote.clients import RayClients, here, taken_by
from fedclade.training.remote.cluster import Actors, Cluster, actors_from

__all__ = ["Actors", "Cluster", "RayClients", "Setup", "actors_from", "here", "taken_by"]
