"""Replicated clustering (``rcfl``): clusters found by a test on replicated updates of clients.

Read :mod:`~fedclade.algorithms.rcfl.method` first, which contains the algorithm. A client divides
its data into disjoint splits and makes one update from each split
(:mod:`~fedclade.algorithms.rcfl.data_splits`). A statistical test compares these updates within and
between clients (:mod:`~fedclade.algorithms.rcfl.replicate_test`, which also offers the test as a
split criterion of CFL). :mod:`~fedclade.algorithms.rcfl.changed_data` detects clients whose data
changed. :mod:`~fedclade.algorithms.rcfl.cohorts` runs the rounds of federations with so many
clients that only some of them can be queried.
"""

from fedclade.algorithms.rcfl.method import ReplicatedCFL, ReplicatedState

__all__ = ["ReplicatedCFL", "ReplicatedState"]
