"""All imports from private modules of Flower, in one place.

The public interface of ``flwr`` is in ``flwr.app``, ``flwr.clientapp`` and ``flwr.serverapp``. Any
minor version can move or change everything else. fedclade needs it to limit the size of a reply
before it is fetched (:mod:`fedclade.flower.exchange`), for a grid without a network
(:mod:`fedclade.flower.local_grid`), for Shamir's secret sharing, and for the mean of clients'
metrics. The extra ``flower`` therefore
allows only minor versions with which the tests have passed.

To allow another minor version: install it; run ``tests/flower/test_flwr_internals.py``, which names
each import that has moved and the modules that use it; correct the imports below; run
``tests/flower``; then raise the bound of ``flwr`` in ``pyproject.toml`` and ``BELOW`` in
:mod:`fedclade.flower.requirement`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedclade.core import lazy_names

# An app of a client needs one function, and should not wait for the modules of Flower's server.
if TYPE_CHECKING:
    from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
    from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
    from flwr.common.serde import message_from_proto, message_to_proto
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest
    from flwr.proto.runtime_pb2 import PullAppMessagesRequest
    from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
    from flwr.supercore.inflatable.inflatable_object import (
        get_object_body,
        get_object_head_values_from_object_content,
        iterate_object_tree,
    )
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
    from flwr.supercore.run import Run
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.superlink.grid import HttpGrid

__all__ = [
    "SUPERLINK_NODE_ID",
    "ConfirmMessageReceivedRequest",
    "ErrorCode",
    "HttpGrid",
    "ObjectTree",
    "PullAppMessagesRequest",
    "PullObjectRequest",
    "Run",
    "RuntimeHttpClient",
    "TaskIdentity",
    "aggregate_metricrecords",
    "combine_shares",
    "create_shares",
    "get_object_body",
    "get_object_head_values_from_object_content",
    "inflate_object_from_contents",
    "iterate_object_tree",
    "message_from_proto",
    "message_to_proto",
]

if not TYPE_CHECKING:  # a type checker knows the names from the imports above
    __getattr__ = lazy_names(__name__)
