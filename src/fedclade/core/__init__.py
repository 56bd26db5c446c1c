"""What all rooms speak.

Errors, random keys, vectors of parameters, queries and replies, updates, the tree, and aggregation. Every other room
may import it; it imports none. It knows nothing of how clients are trained or clustered, or where a run is kept.
"""

from fedclade.core.aggregate import inter_group, mean
from fedclade.core.arguments import check_arguments, checked, defaults, known_arguments
from fedclade.core.clients import Clients, Workers
from fedclade.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EngineError,
    FedcladeError,
    MissingExtraError,
    ModelError,
    PolicyError,
    PrivacyError,
    RunError,
    RunInterrupted,
    TreeError,
    UpdateError,
    import_extra,
    require,
    shown,
    unknown,
)
from fedclade.core.events import Event
from fedclade.core.files import (
    appear,
    bring_to_disk,
    make_folder,
    owner_only,
    remove,
    sha256_of,
    take_place,
    write_tensors,
    write_text,
)
from fedclade.core.local import LARGEST, LocalSpec
from fedclade.core.params import Layout, Slot, check_module
from fedclade.core.queries import (
    Ask,
    Evaluation,
    EvaluationQuery,
    Handlers,
    Query,
    R,
    Round,
    Split,
    SubspaceQuery,
    UpdateQuery,
)
from fedclade.core.registry import ClientRegistry, DataSpec, Task
from fedclade.core.tree import Group, Node, ParameterTree
from fedclade.core.updates import DROPPED_OUT, LARGEST_NORM, NOT_ASKED, TOO_LATE, Sums, Updates, row_norms

__all__ = [
    "DROPPED_OUT",
    "LARGEST",
    "LARGEST_NORM",
    "NOT_ASKED",
    "TOO_LATE",
    "Ask",
    "CheckpointError",
    "ClientRegistry",
    "Clients",
    "ConfigError",
    "DataError",
    "DataSpec",
    "EngineError",
    "Evaluation",
    "EvaluationQuery",
    "Event",
    "FedcladeError",
    "Group",
    "Handlers",
    "Layout",
    "LocalSpec",
    "MissingExtraError",
    "ModelError",
    "Node",
    "ParameterTree",
    "PolicyError",
    "PrivacyError",
    "Query",
    "R",
    "Round",
    "RunError",
    "RunInterrupted",
    "Slot",
    "Split",
    "SubspaceQuery",
    "Sums",
    "Task",
    "TreeError",
    "UpdateError",
    "UpdateQuery",
    "Updates",
    "Workers",
    "appear",
    "bring_to_disk",
    "check_arguments",
    "check_module",
    "checked",
    "defaults",
    "import_extra",
    "inter_group",
    "known_arguments",
    "make_folder",
    "mean",
    "owner_only",
    "remove",
    "require",
    "row_norms",
    "sha256_of",
    "shown",
    "take_place",
    "unknown",
    "write_tensors",
    "write_text",
]
