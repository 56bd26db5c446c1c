"""fedclade: clustered federated learning.

>>> import fedclade
>>> federation = fedclade.load_federation("digits", clients=8, shift="label_swap", clusters=2)
>>> run = fedclade.simulate("cfl", "mlp", federation, rounds=2)
>>> run.summary["clients"]
8
"""

import os

# Before torch starts its threads: those that wait for work should soon go to sleep. By default they spin for so long
# that, as soon as another process wants a core, each of the many short operations of a simulation waits for a thread
# that is not running. This many turns (of GNU's OpenMP, in torch's Linux builds) cost nothing on a quiet machine.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

from fedclade.algorithms import (
    CFL,
    FLHC,
    IFCA,
    PACFL,
    Algorithm,
    Ditto,
    FedAvg,
    FedGroup,
    FeSEM,
    FineTune,
    Local,
    Oracle,
    ReplicatedCFL,
)
from fedclade.channel.faults import Faults
from fedclade.channel.privacy import DifferentialPrivacy
from fedclade.channel.signature import Signature
from fedclade.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EngineError,
    FedcladeError,
    MissingExtraError,
    ModelError,
    PrivacyError,
    RunError,
    RunInterrupted,
    TreeError,
    UpdateError,
)
from fedclade.core.local import LocalSpec
from fedclade.core.tree import Node, ParameterTree
from fedclade.data import Federation, Pool, load_federation, one_client, pool_from_torch
from fedclade.runs.ensemble import PathEnsemble, evaluate_paths, path_weights
from fedclade.runs.history import version_of
from fedclade.runs.newcomers import Newcomers, assign
from fedclade.runs.simulation import simulate
from fedclade.runs.store import Run, export_model

__version__ = version_of("fedclade")

__all__ = [
    "CFL",
    "FLHC",
    "IFCA",
    "PACFL",
    "Algorithm",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DifferentialPrivacy",
    "Ditto",
    "EngineError",
    "Faults",
    "FeSEM",
    "FedAvg",
    "FedGroup",
    "FedcladeError",
    "Federation",
    "FineTune",
    "Local",
    "LocalSpec",
    "MissingExtraError",
    "ModelError",
    "Newcomers",
    "Node",
    "Oracle",
    "ParameterTree",
    "PathEnsemble",
    "Pool",
    "PrivacyError",
    "ReplicatedCFL",
    "Run",
    "RunError",
    "RunInterrupted",
    "Signature",
    "TreeError",
    "UpdateError",
    "__version__",
    "assign",
    "evaluate_paths",
    "export_model",
    "load_federation",
    "one_client",
    "path_weights",
    "pool_from_torch",
    "simulate",
]
