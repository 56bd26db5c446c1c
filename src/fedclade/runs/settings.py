"""What a run over simulated clients and one over a network have in common: their settings, checked in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypedDict

from fedclade.algorithms import Algorithm, describe
from fedclade.channel import DifferentialPrivacy, Signature, refusal
from fedclade.core import ConfigError, LocalTraining, checked, require

Stream = bool | Literal["auto"]
Every = int | Literal["auto"]


@checked()
@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings of a run, those that :func:`fedclade.simulate` and :func:`fedclade.flower.federate` share.

    Parameters
    ----------
    local
        Local training.
    rounds
        Communication rounds, at least 1.
    seed
        Keys every random draw: the same seed gives the same run, bit for bit on the same machine.
    client_fraction
        Share of every cluster that trains in a round, in (0, 1]; C of FedAvg.
    evaluate_every
        Evaluate on the clients' test data after every so many rounds, and after the last.
    target
        Accuracy in (0, 1]; the run reports when it was reached.
    signature
        What clients are compared by; the whole update by default.
    stream
        Whether the server keeps no updates, only their sums and signatures, which must then be projected. Results do
        not depend on it beyond rounding. ``auto``: if the updates of all clients would take more than a quarter of
        ``memory``, signatures are projected, and the algorithm can do with that.
    memory
        What the data and the training of a round may take, in bytes or as ``"2GB"``; by default a quarter of the
        machine's or the GPU's memory. Where clients need more, they train in several blocks. In a network: what the
        updates may take.
    min_clients
        A cluster of which fewer clients answer in a round keeps its model, and is not split.
    permute
        Let clients shuffle what they send by a permutation that the server does not know (CFL eqs. 45, 46). In a
        network: whether the clients share a secret that gives the permutation.
    privacy
        How clients clip their updates, and how much noise they add; None for neither. In a network only clients can do
        that, and the run notes it.
    checkpoint_every
        Rounds between checkpoints in the run's folder. ``auto``: as often as costs less than 2 % of the run; 0: only
        when the run stops early.

    Raises
    ------
    ConfigError
        If a value is out of range; one line for each.
    """

    local: LocalTraining = field(default_factory=LocalTraining)
    rounds: int = 20
    seed: int = 0
    client_fraction: float = 1.0
    evaluate_every: int = 1
    target: float | None = None
    signature: Signature = field(default_factory=Signature)
    stream: Stream = "auto"
    memory: int | str | None = None
    min_clients: int = 1
    permute: bool = False
    privacy: DifferentialPrivacy | None = None
    checkpoint_every: Every = "auto"

    def __post_init__(self) -> None:
        share, every = "greater than 0 and at most 1", self.checkpoint_every
        require(
            ("rounds", self.rounds, self.rounds >= 1, "at least 1"),
            ("seed", self.seed, self.seed >= 0, "at least 0"),
            ("client_fraction", self.client_fraction, 0 < self.client_fraction <= 1, share),
            ("evaluate_every", self.evaluate_every, self.evaluate_every >= 1, "at least 1"),
            ("target.accuracy", self.target, self.target is None or 0 < self.target <= 1, share),
            ("min_clients", self.min_clients, self.min_clients >= 1, "at least 1"),
            ("stream", self.stream, self.stream in (True, False, "auto"), "true, false or 'auto'"),
            (
                *("checkpoint_every", every),
                every == "auto" if isinstance(every, str) else every >= 0,
                "a number of rounds, 0 for none, or 'auto'",
            ),
        )

    def check_algorithm(self, algorithm: Algorithm) -> None:
        """Check that an algorithm can run with these settings.

        Raises
        ------
        ConfigError
            If the run should stream, and the algorithm needs the updates of single clients or signatures are full; if
            clients are private, and the algorithm asks them for more than updates. One line for each.
        MissingExtraError
            If clients are private and ``dp-accounting`` is not installed.
        """
        name = type(algorithm).__name__
        problems: list[str] = []
        if self.stream is True and algorithm.needs_updates:
            problems.append(f"stream = true: {name} needs the updates of single clients; set stream = false")
        if self.stream is True and self.signature.kind == "full":
            problems.append(
                "stream = true: signatures of kind 'full' take as much memory as the updates; set signature.kind = "
                "'projected'"
            )
        if self.privacy and algorithm.asks_for:
            problems.append(str(refusal(f"{algorithm.asks_for} that {name} asks for")))
        if problems:
            raise ConfigError("\n".join(problems))
        if self.privacy:
            self.privacy.epsilon(1)

    def as_config(
        self, algorithm: Algorithm, engine: str, data: Mapping[str, Any], model: str, **more: Any
    ) -> dict[str, Any]:
        """Return what is noted as the config of a run that was given none: these settings, and sections besides."""
        top = ("rounds", "seed", "client_fraction", "evaluate_every", "min_clients")
        return {
            **{name: getattr(self, name) for name in top},
            "engine": engine,
            "stream": self.stream,
            "local": asdict(self.local),
            "algorithm": describe(algorithm),
            "data": data,
            "model": {"name": model},
            "signature": asdict(self.signature),
            "target": {"accuracy": self.target},
            "privacy": {"permute": self.permute, **(asdict(self.privacy) if self.privacy else {})},
            **more,
        }


class RunOptions(TypedDict, total=False):
    """The fields of :class:`RunSettings` as options of a function; None is as if left out."""

    local: LocalTraining | None
    rounds: int
    seed: int
    client_fraction: float
    evaluate_every: int
    target: float | None
    signature: Signature | None
    stream: Stream
    memory: int | str | None
    min_clients: int
    permute: bool
    privacy: DifferentialPrivacy | None
    checkpoint_every: Every


def settings_from(settings: RunSettings | None, options: RunOptions) -> RunSettings:
    """Return settings with what was given besides as options, which come first."""
    return replace(settings or RunSettings(), **{key: value for key, value in options.items() if value is not None})
