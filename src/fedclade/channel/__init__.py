"""Channel between server and clients: privacy, permutation, sketches, faults, limits and retries.

It also contains encodings, adversaries and traffic counts. Most parts are middleware, a function
``(query, ask) -> reply``; ``compose.py`` has their order for clients and for the server. Runs and
the network import this package; algorithms do not depend on it.
"""

from fedclade.channel.accounting import (
    SENSITIVITY,
    Budget,
    Ledger,
    Release,
    composed_epsilon,
    multiplier_for,
    share_at_random,
)
from fedclade.channel.adversary import Adversary
from fedclade.channel.central import Answering, CentralPrivacy, NoisySums
from fedclade.channel.compose import arrived, client_side, received, server_side
from fedclade.channel.encoding import (
    ENCODINGS,
    ErrorFeedback,
    check_encoding,
    decode,
    encode,
    encoded_bytes,
)
from fedclade.channel.example_privacy import (
    ExamplePrivacy,
    Mechanism,
    PrivateExamples,
    StepLedger,
    booked_steps,
    check_local,
    mechanism_of,
    noisy_steps,
    privatizing,
    sampling_rate,
)
from fedclade.channel.limits import Aggregating, Limiting
from fedclade.channel.lying import Lying
from fedclade.channel.matching_parts import MatchingParts
from fedclade.channel.middleware import Channel, Middleware
from fedclade.channel.opposing import OpposingUpdates
from fedclade.channel.privacy import (
    DifferentialPrivacy,
    Privatizing,
    Withholding,
    booked,
    keyed_noise,
    refusal,
    system_normal,
    system_uniform,
)
from fedclade.channel.retry import AWAY, Absence, FaultInjection, Faults, Retrying
from fedclade.channel.signature import (
    CountSketch,
    Nothing,
    Permutation,
    Permuting,
    Replicating,
    Selection,
    Signature,
    SignSketch,
    Sketch,
    Sketching,
    Unpacking,
)
from fedclade.channel.streaming import Streaming
from fedclade.channel.traffic import Meter, Timing, Traffic

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
