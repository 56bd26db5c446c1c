"""Communication channel between the server and its clients.

The channel contains differential privacy, the permutation of model vectors, sketches of updates,
simulated faults and adversaries, limits, retries, encodings and traffic counts. Most of these are
middleware: objects that change queries on their way to clients and replies on their way back.
``compose.py`` defines the order of the middleware at the client and at the server. Simulated runs
and networks import this package; algorithms must not.
"""

from typing import TYPE_CHECKING

from fedclade.core import lazy_names

if TYPE_CHECKING:
    from fedclade.channel.accounting import (
        SENSITIVITY,
        Budget,
        Ledger,
        Release,
        check_accounting,
        composed_epsilon,
        multiplier_for,
        share_at_random,
    )
    from fedclade.channel.adversary import Adversary
    from fedclade.channel.central import Answering, CentralPrivacy
    from fedclade.channel.compose import arrived, client_side, received, server_side
    from fedclade.channel.encoding import (
        DENSE_ENCODINGS,
        ENCODINGS,
        ErrorFeedback,
        check_encoding,
        decode,
        encode,
        encoded_bytes,
        tensor_from_bytes,
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
    from fedclade.channel.noisy_sums import NoisySums
    from fedclade.channel.opposing import OpposingUpdates
    from fedclade.channel.own_middleware import (
        build_middleware,
        check_middleware,
        describe_middleware,
    )
    from fedclade.channel.privacy import (
        DifferentialPrivacy,
        Privatizing,
        Withholding,
        booked,
        keyed_noise,
        refusal_to_reveal,
        system_normal,
        system_uniform,
    )
    from fedclade.channel.reply_memory import (
        Remembering,
        ReplyMemory,
        build_remembered,
        is_repeatable,
    )
    from fedclade.channel.retry import AWAY, Absence, FaultInjection, Faults, Retrying
    from fedclade.channel.signature import (
        CountSketch,
        NoSketch,
        Permutation,
        Permuting,
        Replicating,
        Selection,
        Signature,
        SignSketch,
        Sketch,
        Sketching,
        pack_parts,
        unpack_parts,
    )
    from fedclade.channel.streaming import Streaming
    from fedclade.channel.traffic import Meter, StepCounting, Timing, Traffic
    from fedclade.channel.weighing import Weighing, check_weights

__all__ = [
    "AWAY",
    "DENSE_ENCODINGS",
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
    "NoSketch",
    "NoisySums",
    "OpposingUpdates",
    "Permutation",
    "Permuting",
    "PrivateExamples",
    "Privatizing",
    "Release",
    "Remembering",
    "Replicating",
    "ReplyMemory",
    "Retrying",
    "Selection",
    "SignSketch",
    "Signature",
    "Sketch",
    "Sketching",
    "StepCounting",
    "StepLedger",
    "Streaming",
    "Timing",
    "Traffic",
    "Weighing",
    "Withholding",
    "arrived",
    "booked",
    "booked_steps",
    "build_middleware",
    "build_remembered",
    "check_accounting",
    "check_encoding",
    "check_local",
    "check_middleware",
    "check_weights",
    "client_side",
    "composed_epsilon",
    "decode",
    "describe_middleware",
    "encode",
    "encoded_bytes",
    "is_repeatable",
    "keyed_noise",
    "mechanism_of",
    "multiplier_for",
    "noisy_steps",
    "pack_parts",
    "privatizing",
    "received",
    "refusal_to_reveal",
    "sampling_rate",
    "server_side",
    "share_at_random",
    "system_normal",
    "system_uniform",
    "tensor_from_bytes",
    "unpack_parts",
]

if not TYPE_CHECKING:  # a type checker knows the names from the imports above
    __getattr__ = lazy_names(__name__)
