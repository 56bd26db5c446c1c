"""Local training and evaluation of many simulated clients at once.

An engine is an implementation of local training: a reference loop over clients and batches, or a
faster form that trains clients in parallel. All engines give the same updates as the loop, up to
rounding.

Runs train through :class:`SimulatedClients`, or through :class:`RayClients` if clients are on other
machines. Algorithms do not import this package, since their clients may be simulated here or be
nodes of a network.
"""

from typing import TYPE_CHECKING

from fedclade.core import lazy_names

if TYPE_CHECKING:
    from fedclade.training.batch_rule import smallest_batch_for
    from fedclade.training.clients import SimulatedClients
    from fedclade.training.engine_names import ENGINES, REMOTE, check_engine
    from fedclade.training.input_hooks import unpack_inputs, with_hooks_for, with_input_hooks
    from fedclade.training.jobs import PrivateSteps
    from fedclade.training.memory import default_memory, return_freed_memory, updates_at_once
    from fedclade.training.remote import (
        Actors,
        Cluster,
        RayClients,
        Setup,
        actors_from,
        here,
        taken_by,
    )
    from fedclade.training.row_scores import INTERVAL_KINDS, ClientRows
    from fedclade.training.split_batches import split_batches
    from fedclade.training.store import OPTIMIZER, OWN_MODEL, PERSONAL, ClientStore
    from fedclade.training.threads import choose_device, choose_devices, float32_products
    from fedclade.training.unsent_buffers import note_unsent_buffers

__all__ = [
    "ENGINES",
    "INTERVAL_KINDS",
    "OPTIMIZER",
    "OWN_MODEL",
    "PERSONAL",
    "REMOTE",
    "Actors",
    "ClientRows",
    "ClientStore",
    "Cluster",
    "PrivateSteps",
    "RayClients",
    "Setup",
    "SimulatedClients",
    "actors_from",
    "check_engine",
    "choose_device",
    "choose_devices",
    "default_memory",
    "float32_products",
    "here",
    "note_unsent_buffers",
    "return_freed_memory",
    "smallest_batch_for",
    "split_batches",
    "taken_by",
    "unpack_inputs",
    "updates_at_once",
    "with_hooks_for",
    "with_input_hooks",
]

if not TYPE_CHECKING:  # a type checker knows the names from the imports above
    __getattr__ = lazy_names(__name__)
