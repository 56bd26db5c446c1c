"""Local differential privacy of clients: updates are clipped and get noise before they leave.

The guarantee is a local one: it holds against the server and all others that read the traffic. It
protects all the data of a client: with any other data, everything that the server sees of the
client's *updates* would be almost as likely (ε, δ). This is the relation of replacing a client's
data. Adding or removing a client, the usual relation where a trusted server adds the noise, would
have half the sensitivity, but has no meaning here, since the server knows which clients take part.

Not covered are the number of a client's examples (|D_i| is the weight of its update), its scores on
validation and test data, and whether it replies. Training losses, subspaces and sums of the data
would also reveal its data, so they are withheld or refused.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.channel.accounting import LEVELS, Ledger, epsilon_of
from fedclade.channel.middleware import Middleware
from fedclade.core import (
    Ask,
    ConfigError,
    DataQuery,
    Evaluation,
    EvaluationQuery,
    Query,
    R,
    Round,
    UpdateQuery,
    Updates,
    check_declared,
    checked,
    require,
    rng,
)

# Queries that private clients refuse: all that reveal their training data without noise.


class Withholding(Middleware):
    """Middleware that passes updates and most scores, and refuses all other queries.

    Scores on validation and test data pass, and scores on training data are refused. A query is
    also refused if its class does not declare what its replies reveal.
    """

    def __call__(self, query: Query[R], ask: Ask) -> R:
        """Send a query; raise a ConfigError if its class does not declare what it discloses."""
        check_declared(type(query))
        return super().__call__(query, ask)

    def evaluation(self, query: EvaluationQuery, ask: Ask) -> Evaluation:
        """Return scores on validation or test data; raise a ConfigError for training data."""
        if query.split == "train":
            raise refusal("training losses")
        return ask(query)

    def data(self, query: DataQuery[R], ask: Ask) -> R:
        """Return a reply that depends on no client's data; raise a ConfigError for others."""
        if query.mechanism != "public":
            raise refusal(query.reveals or described_class(query))
        return ask(query)

    def other(self, query: Query[Any], ask: Ask) -> Any:
        """Return a reply that depends on no client's data; raise a ConfigError for others."""
        if query.mechanism != "public":
            raise refusal(described_class(query))
        return ask(query)


def described_class(query: Query[Any]) -> str:
    """Describe a query for a refusal: what its replies disclose, and the name of its class."""
    return f"{query.discloses} (a {type(query).__name__})"


def refusal(what: str) -> ConfigError:
    """Return the error for a query to private clients about a quantity without noise."""
    return ConfigError(
        f"clients with differential privacy do not tell {what}, since no noise is put on that; "
        "take an algorithm that goes by updates alone, or leave out privacy.clip_norm"
    )


Noise = Callable[[int, int, Round, str], Tensor]
"""Source of noise: a function ``(size, client, round, what)``.

It returns ``size`` standard normal numbers, float64, for what a client sends: ``updates`` or
``gradients``.
"""

Book = Callable[[int, Round], None]
"""Function that is called before a client trains. Its errors keep the client from training."""


@checked()
@dataclass(frozen=True, kw_only=True)
class DifferentialPrivacy:
    """Settings of the Gaussian mechanism (Dwork and Roth 2014, appendix A) on whole updates.

    Parameters
    ----------
    clip_norm
        Largest L2 norm C of an update ``[S]``, parameters and buffers together, in parameter units.
        A longer update is scaled down to it.
    noise_multiplier
        z: every entry gets noise of standard deviation z·C. With 0 updates are only clipped, and ε
        is infinite.
    delta
        δ at which ε is stated, well below one over the number of clients.

    Raises
    ------
    ConfigError
        If a value is out of range; one line for each.
    """

    clip_norm: float
    noise_multiplier: float = 0.0
    delta: float = 1e-5

    def __post_init__(self) -> None:
        clip = self.clip_norm
        noise = self.noise_multiplier
        require(
            ("privacy.clip_norm", clip, 0 < clip < math.inf, "greater than 0 and finite"),
            ("privacy.noise_multiplier", noise, 0 <= noise < math.inf, "at least 0 and finite"),
            ("privacy.delta", self.delta, 0 < self.delta < 1, "greater than 0 and less than 1"),
        )

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> DifferentialPrivacy | None:
        """Return the settings in the ``[privacy]`` section of a config, or None if it has none.

        None is also returned for another level.

        Raises
        ------
        ConfigError
            If a value is out of range, the level is unknown, or ``noise_multiplier`` is set without
            the ``clip_norm`` that scales it.
        """
        level = section.get("level", LEVELS[0])
        require(("privacy.level", level, level in LEVELS, " or ".join(LEVELS)))
        if level != LEVELS[0]:
            return None
        if section.get("clip_norm") is not None:
            return cls(
                **{
                    field.name: section[field.name]
                    for field in fields(cls)
                    if field.name in section
                }
            )
        noise = section.get("noise_multiplier", 0.0)
        require(
            ("privacy.noise_multiplier", noise, noise == 0, "0 where privacy.clip_norm is not set")
        )
        return None

    @property
    def section(self) -> dict[str, Any]:
        """``[privacy]`` section of a config with these settings."""
        return asdict(self)

    def released(self, update: Tensor, normal: Tensor) -> Tensor:
        """Return the update ``[S]`` that leaves the client: clipped and with noise.

        An update that is not finite counts as zeros: to refuse it would reveal that training
        diverged on this data.

        Parameters
        ----------
        update
            The update as trained, ``[S]``.
        normal
            Standard normal numbers, float64 ``[S]``.
        """
        exact = update.double()
        if not bool(torch.isfinite(exact).all()):
            exact.zero_()
        norm = float(torch.linalg.vector_norm(exact))
        # The square of an entry beyond 1e154 overflows float64, so divide by the largest entry
        # first.
        if math.isinf(norm):
            exact /= exact.abs().max()
            exact *= self.clip_norm / float(torch.linalg.vector_norm(exact))
        else:
            exact *= self.clip_norm / max(norm, self.clip_norm)
        return exact.add_(normal.to(exact), alpha=self.noise_multiplier * self.clip_norm).to(
            update.dtype
        )

    def epsilon(self, releases: int) -> float:
        """Return ε after this number of releases of one client.

        Raises as :func:`~fedclade.channel.accounting.epsilon_of`.
        """
        return epsilon_of({self.noise_multiplier: releases}, self.delta)

    def spent(self, releases: int) -> dict[str, Any]:
        """Return the privacy entries of a run's summary.

        ``releases`` is the largest number of releases of one client. An ε of None means that there
        is no bound.
        """
        epsilon = self.epsilon(releases)
        said = {
            "epsilon": epsilon if math.isfinite(epsilon) else None,
            "level": "client",
            "towards": "everybody",
        }
        return {**said, **asdict(self), "releases": releases}


@dataclass(frozen=True)
class Privatizing(Withholding):
    """Middleware that clips updates and gradients, adds noise, and refuses other queries.

    Training losses, subspaces and sums of the data are refused, and the training losses of updates
    are NaN: withheld. If no updates travel, so that clients store what they train, models are not
    changed.

    An update is booked before its client trains. So a client whose training fails, or whose process
    is stopped meanwhile, has spent as much as one that replies, and failures cannot be used to
    query it for free.

    Parameters
    ----------
    privacy
        Clip norm and noise.
    noise
        Source of the noise: :func:`keyed_noise` in a simulation, :func:`system_noise` on a real
        client.
    book
        Called with each client before it trains; None to book nothing.
    """

    privacy: DifferentialPrivacy
    noise: Noise
    book: Book | None = None

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return updates, clipped and with noise."""
        this_round = query.round
        if query.kind == "train" and not this_round.sends_updates:
            updates = ask(query)
            return replace(updates, losses=torch.full_like(updates.losses, math.nan))
        if self.book is not None:
            for client in query.ids:
                self.book(client, this_round)
        updates = ask(query)
        what = "updates" if query.kind == "train" else "gradients"
        sent = torch.empty_like(updates.required_deltas)
        for row, client, update in zip(sent, updates.ids, updates.required_deltas, strict=True):
            row.copy_(
                self.privacy.released(update, self.noise(len(update), client, this_round, what))
            )
        sizes = [int(size) for size in updates.sizes.tolist()]
        unknown = torch.zeros_like(updates.losses)
        received = Updates.received(
            updates.ids, sizes, sent, updates.n_parameters, unknown, this_round.number
        )
        withheld = torch.full_like(received.losses, math.nan)
        return replace(
            received, losses=withheld, left_out={**updates.left_out, **received.left_out}
        )


def keyed_noise(keys: Mapping[int, int]) -> Noise:
    """Return the source of noise of a simulation, which makes runs repeatable.

    The noise depends on seed, round, query and the client's key. Anyone that knows the seed can
    subtract it. It shows the cost of privacy, and protects no client.
    """

    def noise(size: int, client: int, this_round: Round, what: str) -> Tensor:
        key = this_round.number, this_round.query, keys[client]
        draw = rng.generator(this_round.seed, f"dp noise of {what} in {this_round.purpose}", *key)
        return torch.from_numpy(draw.standard_normal(size))

    return noise


def system_noise(size: int, client: int, this_round: Round, what: str) -> Tensor:
    """Return the noise of a real client, from 52 random bits of the operating system per number.

    The run's seed is not used, since the server knows it and could subtract the noise. A generator
    with a seed of its own is not used either: torch seeds its CPU generator with 32 bits, few
    enough to try all of them.
    """
    return system_normal(size)


def system_normal(size: int) -> Tensor:
    """Return standard normal numbers ``[size]`` from the operating system, float64."""
    return torch.from_numpy(scipy.special.ndtri(system_uniform(size)))


def system_uniform(size: int) -> NDArray[Any]:
    """Return numbers ``[size]`` uniform in (0, 1) from the operating system, float64.

    Each is made from 52 random bits.
    """
    words = np.frombuffer(secrets.token_bytes(8 * size), dtype=np.uint64)
    return ((words >> np.uint64(12)) + 0.5) * 2.0**-52


def booked(privacy: DifferentialPrivacy, ledger: Ledger, run: str) -> Privatizing:
    """Return the privacy middleware of a client that is not simulated.

    Its noise comes from the operating system. Each release is booked before it leaves. The ledger
    belongs to the client and records ``run`` with each release. With a budget, it refuses releases
    that would exceed the budget.
    """
    return Privatizing(
        privacy, system_noise, lambda _, r: ledger.book(privacy.noise_multiplier, run, r.number)
    )
