"""fedclade: clustered federated learning.

>>> import fedclade
>>> federation = fedclade.load_federation("digits", clients=8, shift="label_swap", clusters=2)
>>> run = fedclade.simulate("cfl", "mlp", federation, rounds=2)
>>> run.summary["clients"]
8
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Before torch starts its threads: those that wait for work should soon go to sleep. By default they
# spin for so long that, as soon as another process wants a core, each of the many short operations
# of a simulation waits for a thread that is not running. This many turns (of GNU's OpenMP, in
# torch's Linux builds) cost nothing on a quiet machine.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

from fedclade.algorithms import (
    APFL,
    CFL,
    FLHC,
    FLUX,
    IFCA,
    PACFL,
    Algorithm,
    Ditto,
    FedAvg,
    FedBN,
    FedBuff,
    FedDrift,
    FedEM,
    FedGroup,
    FedPer,
    FedRC,
    FedRep,
    FedSoft,
    FeSEM,
    FineTune,
    FlexCFL,
    LGFedAvg,
    Local,
    Oracle,
    PerFedAvg,
    PFedMe,
    ReplicatedCFL,
    RoundLog,
    Scaffold,
    State,
    StoCFL,
    log_of,
    move_clusters,
    train_clusters,
    train_root,
)
from fedclade.channel import Adversary, DifferentialPrivacy, ExamplePrivacy, Faults, Signature
from fedclade.clustering import Assignment, k_means
from fedclade.core import (
    Aggregation,
    CheckpointError,
    Clients,
    ConfigError,
    DataError,
    DataSpec,
    EngineError,
    Evaluation,
    Event,
    FedcladeError,
    LocalData,
    LocalStore,
    LocalTraining,
    MissingExtraError,
    ModelError,
    Node,
    ParameterTree,
    PrivacyError,
    Round,
    RowQuery,
    RunError,
    RunInterrupted,
    TreeError,
    UpdateError,
    Updates,
    draw_with,
    has_replied,
)
from fedclade.data import (
    DataSchema,
    Federation,
    Pool,
    View,
    federation,
    federation_from_frame,
    load_federation,
    one_client,
    pool_from_torch,
)
from fedclade.models import LoRA, build_model, load_adapter
from fedclade.runs import (
    FINISH,
    Callback,
    EarlyStopping,
    EndRecord,
    Newcomers,
    RoundRecord,
    Run,
    RunSettings,
    SplitRecord,
    assign,
    export_adapter,
    export_model,
    load_export,
    simulate,
    version_of,
)
from fedclade.tasks import Metric, ModelMixture, Task
from fedclade.trackers import MLflowTracker, TensorBoardTracker, WandbTracker
from fedclade.training import Actors

if TYPE_CHECKING:
    from fedclade.report import Comparison, compare
    from fedclade.sweeps import sweep

__version__ = version_of("fedclade")

draw_with("fedclade.report")

__all__ = [
    "APFL",
    "CFL",
    "FINISH",
    "FLHC",
    "FLUX",
    "IFCA",
    "PACFL",
    "Actors",
    "Adversary",
    "Aggregation",
    "Algorithm",
    "Assignment",
    "Callback",
    "CheckpointError",
    "Clients",
    "Comparison",
    "ConfigError",
    "DataError",
    "DataSchema",
    "DataSpec",
    "DifferentialPrivacy",
    "Ditto",
    "EarlyStopping",
    "EndRecord",
    "EngineError",
    "Evaluation",
    "Event",
    "ExamplePrivacy",
    "Faults",
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
    "FedcladeError",
    "Federation",
    "FineTune",
    "FlexCFL",
    "LGFedAvg",
    "LoRA",
    "Local",
    "LocalData",
    "LocalStore",
    "LocalTraining",
    "MLflowTracker",
    "Metric",
    "MissingExtraError",
    "ModelError",
    "ModelMixture",
    "Newcomers",
    "Node",
    "Oracle",
    "PFedMe",
    "ParameterTree",
    "PerFedAvg",
    "Pool",
    "PrivacyError",
    "ReplicatedCFL",
    "Round",
    "RoundLog",
    "RoundRecord",
    "RowQuery",
    "Run",
    "RunError",
    "RunInterrupted",
    "RunSettings",
    "Scaffold",
    "Signature",
    "SplitRecord",
    "State",
    "StoCFL",
    "Task",
    "TensorBoardTracker",
    "TreeError",
    "UpdateError",
    "Updates",
    "View",
    "WandbTracker",
    "__version__",
    "assign",
    "build_model",
    "compare",
    "export_adapter",
    "export_model",
    "federation",
    "federation_from_frame",
    "has_replied",
    "k_means",
    "load_adapter",
    "load_export",
    "load_federation",
    "log_of",
    "move_clusters",
    "one_client",
    "pool_from_torch",
    "simulate",
    "sweep",
    "train_clusters",
    "train_root",
]


def __getattr__(name: str) -> Any:
    """Import what is of the report, or of sweeps, when it is asked for: a simulation does without its packages."""
    rooms = {"Comparison": "report", "compare": "report", "sweep": "sweeps"}
    if name not in rooms:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"fedclade.{rooms[name]}"), name)
