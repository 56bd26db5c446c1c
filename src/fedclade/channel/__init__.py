"""What lies between the server and clients: privacy, permutation, sketches, encodings, faults, lies, traffic, retries.

Each is a function ``(query, ask) -> reply``; ``compose.py`` has the list of them, for clients and for the server. Runs
and the network import it; algorithms do not know of it.
"""

from fedclade.channel.absence import AWAY, Absence
from fedclade.channel.accounting import Release, composed_epsilon, share_at_random
from fedclade.channel.adversary import Adversary
from fedclade.channel.aggregating import Aggregating
from fedclade.channel.answering import Answering
from fedclade.channel.central import CentralPrivacy, NoisySums
from fedclade.channel.compose import arrived, client_side, received, server_side
from fedclade.channel.encoding import ENCODINGS, ErrorFeedback, check_encoding, decode, encode, encoded_bytes
from fedclade.channel.example_privacy import (
    ExamplePrivacy,
    Mechanism,
    PrivateExamples,
    booked_steps,
    check_local,
    mechanism_of,
    noisy_steps,
    privatizing,
    sampling_rate,
)
from fedclade.channel.faults import FaultInjection, Faults
from fedclade.channel.ledger import SENSITIVITY, Budget, Ledger, multiplier_for
from fedclade.channel.limits import Limiting
from fedclade.channel.lying import Lying
from fedclade.channel.matching_parts import MatchingParts
from fedclade.channel.middleware import Channel, Middleware
from fedclade.channel.opposing import OpposingUpdates
from fedclade.channel.privacy import (
    DifferentialPrivacy,
    Privatizing,
    booked,
    keyed_noise,
    system_normal,
    system_uniform,
)
from fedclade.channel.replicates import Replicating, Unpacking
from fedclade.channel.retry import Retrying
from fedclade.channel.signature import (
    CountSketch,
    Nothing,
    Permutation,
    Permuting,
    Selection,
    Signature,
    SignSketch,
    Sketch,
    Sketching,
)
from fedclade.channel.step_ledger import StepLedger
from fedclade.channel.streaming import Streaming
from fedclade.channel.traffic import Meter, Timing, Traffic
from fedclade.channel.withholding import Withholding, refusal

__all__ = [
    "AWAY",
    "ENCODINGS",
    "SENSITIVITY",
    "Absence",
    "Adversary",
    "Aggregating",
    "Answering",
    "Budget",
    "CentralPrivacy",
    "Channel",
    "CountSketch",
    "DifferentialPrivacy",
    "ErrorFeedback",
    "ExamplePrivacy",
    "FaultInjection",
    "Faults",
    "Ledger",
    "Limiting",
    "Lying",
    "MatchingParts",
    "Mechanism",
    "Meter",
    "Middleware",
    "NoisySums",
    "Nothing",
    "OpposingUpdates",
    "Permutation",
    "Permuting",
    "PrivateExamples",
    "Privatizing",
    "Release",
    "Replicating",
    "Retrying",
    "Selection",
    "SignSketch",
    "Signature",
    "Sketch",
    "Sketching",
    "StepLedger",
    "Streaming",
    "Timing",
    "Traffic",
    "Unpacking",
    "Withholding",
    "arrived",
    "booked",
    "booked_steps",
    "check_encoding",
    "check_local",
    "client_side",
    "composed_epsilon",
    "decode",
    "encode",
    "encoded_bytes",
    "keyed_noise",
    "mechanism_of",
    "multiplier_for",
    "noisy_steps",
    "privatizing",
    "received",
    "refusal",
    "sampling_rate",
    "server_side",
    "share_at_random",
    "system_normal",
    "system_uniform",
]
