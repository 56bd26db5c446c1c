"""Replicated clustering (``rcfl``): clusters found by a test on replicates of clients' updates.

Read :mod:`~fedclade.algorithms.rcfl.method` first: it is the algorithm. A client makes several
updates from splits of its data (:mod:`~fedclade.algorithms.rcfl.data_splits`), and a test compares
them (:mod:`~fedclade.algorithms.rcfl.replicate_test`, which also has the test as a criterion of
CFL). :mod:`~fedclade.algorithms.rcfl.cohorts` has the rounds of federations with so many clients
that only a part of them can be queried.
"""

from fedclade.algorithms.rcfl.method import ReplicatedCFL, ReplicatedState

__all__ = ["ReplicatedCFL", "ReplicatedState"]
