"""Local training and evaluation of many clients at once, by a reference loop or faster engines.

All engines give the same updates as the loop, up to rounding. Runs import this package, through
:class:`SimulatedClients`, or :class:`RayClients` for clients on other machines. Algorithms do not
import it, since clients may be elsewhere.
"""

from fedclade.training.auto import ENGINES, REMOTE, check_engine
from fedclade.training.batch_rule import smallest_batch_for
from fedclade.training.clients import SimulatedClients
from fedclade.training.jobs import PrivateSteps
from fedclade.training.memory import default_memory, memory_bytes, updates_at_once
from fedclade.training.remote import Actors, Cluster, RayClients, Setup, actors_from, here, taken_by
from fedclade.training.store import OPTIMIZER, OWN_MODEL, PERSONAL, ClientStore
from fedclade.training.threads import choose_device, float32_products
from fedclade.training.unsent_buffers import note_unsent_buffers

__all__ = [
    "ENGINES",
    "OPTIMIZER",
    "OWN_MODEL",
    "PERSONAL",
    "REMOTE",
    "Actors",
    "ClientStore",
    "Cluster",
    "PrivateSteps",
    "RayClients",
    "Setup",
    "SimulatedClients",
    "actors_from",
    "check_engine",
    "choose_device",
    "default_memory",
    "float32_products",
    "here",
    "memory_bytes",
    "note_unsent_buffers",
    "smallest_batch_for",
    "taken_by",
    "updates_at_once",
]
