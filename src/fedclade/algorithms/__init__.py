"""Federated algorithms, one module for each paper, and the base classes of algorithms.

An algorithm decides in every round which clients train which models, and how the server updates the
clusters. Runs, configs, the network and the papers import this package; it imports only
:mod:`fedclade.clustering` and :mod:`fedclade.core`, and sends all queries to clients through
:class:`~fedclade.core.Clients`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedclade.core import lazy_names

if TYPE_CHECKING:
    from fedclade.algorithms.apfl import APFL
    from fedclade.algorithms.auto import MODEL_KINDS, Auto
    from fedclade.algorithms.base import Algorithm, OneCohort, OwnModels, OwnState, RoundLog, State
    from fedclade.algorithms.cfl import CFL, CFLState
    from fedclade.algorithms.clove import CLoVE
    from fedclade.algorithms.cluster_update import (
        ClusterUpdate,
        log_of,
        move_clusters,
        train_clusters,
        train_root,
    )
    from fedclade.algorithms.descriptor_query import DescriptorQuery
    from fedclade.algorithms.ditto import Ditto
    from fedclade.algorithms.fedavg import (
        FedAvg,
        FedBN,
        FedPer,
        FedRep,
        FineTune,
        LGFedAvg,
        Local,
        Oracle,
    )
    from fedclade.algorithms.fedbuff import FedBuff
    from fedclade.algorithms.feddrift import FedDrift
    from fedclade.algorithms.fedem import FedEM, FedRC
    from fedclade.algorithms.fedgroup import FedGroup
    from fedclade.algorithms.fedsoft import FedSoft
    from fedclade.algorithms.fesem import FeSEM
    from fedclade.algorithms.fl_hc import FLHC
    from fedclade.algorithms.flexcfl import FlexCFL
    from fedclade.algorithms.flux import FLUX, without_labels
    from fedclade.algorithms.ifca import IFCA
    from fedclade.algorithms.method import Family, Method, Paper
    from fedclade.algorithms.ocfl import OCFL
    from fedclade.algorithms.pacfl import PACFL
    from fedclade.algorithms.per_fedavg import PerFedAvg
    from fedclade.algorithms.pfedme import PFedMe
    from fedclade.algorithms.private_choice import PrivateChoice
    from fedclade.algorithms.rcfl import ReplicatedCFL
    from fedclade.algorithms.registry import (
        ALGORITHMS,
        METHODS,
        TRUTH,
        algorithm_class,
        build_algorithm,
        describe,
        method_named,
        method_of_run,
        options_of,
    )
    from fedclade.algorithms.requires import EvaluatedModels, Requires, RunFacts
    from fedclade.algorithms.scaffold import Scaffold
    from fedclade.algorithms.shift_query import ShiftQuery
    from fedclade.algorithms.split_criterion import ExaminedCluster, ProposedSplit, SplitCriterion
    from fedclade.algorithms.stocfl import StoCFL
    from fedclade.algorithms.subspace_query import SubspaceQuery
    from fedclade.core import Event

__all__ = [
    "ALGORITHMS",
    "APFL",
    "CFL",
    "FLHC",
    "FLUX",
    "IFCA",
    "METHODS",
    "MODEL_KINDS",
    "OCFL",
    "PACFL",
    "TRUTH",
    "Algorithm",
    "Auto",
    "CFLState",
    "CLoVE",
    "ClusterUpdate",
    "DescriptorQuery",
    "Ditto",
    "EvaluatedModels",
    "Event",
    "ExaminedCluster",
    "Family",
    "FeSEM",
    "FedAvg",
    "FedBN",
    "FedBuff",
    "FedDrift",
    "FedEM",
    "FedGroup",
    "FedPer",
    "FedRC",
    "FedRep",
    "FedSoft",
    "FineTune",
    "FlexCFL",
    "LGFedAvg",
    "Local",
    "Method",
    "OneCohort",
    "Oracle",
    "OwnModels",
    "OwnState",
    "PFedMe",
    "Paper",
    "PerFedAvg",
    "PrivateChoice",
    "ProposedSplit",
    "ReplicatedCFL",
    "Requires",
    "RoundLog",
    "RunFacts",
    "Scaffold",
    "ShiftQuery",
    "SplitCriterion",
    "State",
    "StoCFL",
    "SubspaceQuery",
    "algorithm_class",
    "build_algorithm",
    "describe",
    "log_of",
    "method_named",
    "method_of_run",
    "move_clusters",
    "options_of",
    "train_clusters",
    "train_root",
    "without_labels",
]

if not TYPE_CHECKING:  # a type checker knows the names from the imports above
    __getattr__ = lazy_names(__name__)
