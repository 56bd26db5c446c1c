"""What lies between the server and clients: privacy, permutation, sketches, encodings, faults, traffic, retries.

Each wraps clients and is clients itself. Runs and the network put them together; algorithms do not know of them.
"""

from fedclade.channel.encoding import ENCODINGS, ErrorFeedback, check_encoding, decode, encode, encoded_bytes
from fedclade.channel.faults import Faults, FaultyClients
from fedclade.channel.ledger import Budget, Ledger
from fedclade.channel.privacy import DifferentialPrivacy, PrivateClients, keyed_noise, private_client, refusal
from fedclade.channel.replicates import ReplicatingClients
from fedclade.channel.retry import AttendedClients
from fedclade.channel.signature import CountSketch, Permutation, PermutedClients, ProjectedClients, Signature
from fedclade.channel.streaming import StreamedClients, Tally
from fedclade.channel.traffic import Meter, MeteredClients

__all__ = [
    "ENCODINGS",
    "AttendedClients",
    "Budget",
    "CountSketch",
    "DifferentialPrivacy",
    "ErrorFeedback",
    "Faults",
    "FaultyClients",
    "Ledger",
    "Meter",
    "MeteredClients",
    "Permutation",
    "PermutedClients",
    "PrivateClients",
    "ProjectedClients",
    "ReplicatingClients",
    "Signature",
    "StreamedClients",
    "Tally",
    "check_encoding",
    "decode",
    "encode",
    "encoded_bytes",
    "keyed_noise",
    "private_client",
    "refusal",
]
