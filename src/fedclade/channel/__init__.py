"""What lies between the server and clients: privacy, permutation, sketches, encodings, faults, traffic, retries.

Each is a function ``(query, ask) -> reply``; ``compose.py`` has the list of them, for clients and for the server. Runs
and the network import it; algorithms do not know of it.
"""

from fedclade.channel.absence import AWAY, Absence
from fedclade.channel.accounting import Release, composed_epsilon, share_at_random
from fedclade.channel.answering import Answering
from fedclade.channel.central import Aggregating, CentralPrivacy, check_local, mechanism
from fedclade.channel.compose import client_side, received, server_side, simulated_privacy
from fedclade.channel.encoding import ENCODINGS, ErrorFeedback, check_encoding, decode, encode, encoded_bytes
from fedclade.channel.faults import FaultInjection, Faults
from fedclade.channel.ledger import Budget, Ledger
from fedclade.channel.middleware import Channel, Middleware
from fedclade.channel.privacy import DifferentialPrivacy, Privatizing, booked, keyed_noise, refusal
from fedclade.channel.replicates import Replicating, Unpacking
from fedclade.channel.retry import Retrying
from fedclade.channel.signature import (
    CountSketch,
    Nothing,
    Permutation,
    Permuting,
    Selection,
    Signature,
    Sketch,
    Sketching,
)
from fedclade.channel.streaming import Streaming
from fedclade.channel.traffic import Meter, Timing, Traffic

__all__ = [
    "AWAY",
    "ENCODINGS",
    "Absence",
    "Aggregating",
    "Answering",
    "Budget",
    "CentralPrivacy",
    "Channel",
    "CountSketch",
    "DifferentialPrivacy",
    "ErrorFeedback",
    "FaultInjection",
    "Faults",
    "Ledger",
    "Meter",
    "Middleware",
    "Nothing",
    "Permutation",
    "Permuting",
    "Privatizing",
    "Release",
    "Replicating",
    "Retrying",
    "Selection",
    "Signature",
    "Sketch",
    "Sketching",
    "Streaming",
    "Timing",
    "Traffic",
    "Unpacking",
    "booked",
    "check_encoding",
    "check_local",
    "client_side",
    "composed_epsilon",
    "decode",
    "encode",
    "encoded_bytes",
    "keyed_noise",
    "mechanism",
    "received",
    "refusal",
    "server_side",
    "share_at_random",
    "simulated_privacy",
]
