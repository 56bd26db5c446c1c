"""What lies between the server and clients: privacy, permutation, sketches, encodings, faults, lies, traffic, retries.

Each is a function ``(query, ask) -> reply``; ``compose.py`` has the list of them, for clients and for the server. Runs
and the network import it; algorithms do not know of it.
"""

from fedclade.channel.absence import AWAY, Absence
from fedclade.channel.adversary import Adversary
from fedclade.channel.aggregating import Aggregating
from fedclade.channel.compose import arrived, client_side, received, server_side
from fedclade.channel.encoding import ENCODINGS, ErrorFeedback, check_encoding, decode, encode, encoded_bytes
from fedclade.channel.faults import FaultInjection, Faults
from fedclade.channel.ledger import Budget, Ledger
from fedclade.channel.limits import Limiting
from fedclade.channel.lying import Lying
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
    "Adversary",
    "Aggregating",
    "Budget",
    "Channel",
    "CountSketch",
    "DifferentialPrivacy",
    "ErrorFeedback",
    "FaultInjection",
    "Faults",
    "Ledger",
    "Limiting",
    "Lying",
    "Meter",
    "Middleware",
    "Nothing",
    "Permutation",
    "Permuting",
    "Privatizing",
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
    "arrived",
    "booked",
    "check_encoding",
    "client_side",
    "decode",
    "encode",
    "encoded_bytes",
    "keyed_noise",
    "received",
    "refusal",
    "server_side",
]
