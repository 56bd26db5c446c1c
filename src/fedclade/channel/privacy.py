"""Differential privacy of a client: its update is clipped, and noise is added, before it leaves.

The guarantee is a local one: it holds against the server, and whoever reads along. What is
protected is all the data of a client: were it any other data, all that the server sees of its
*updates* would be almost as likely (ε, δ). That is the relation of replacing a client's data.
Adding or removing a client, the usual relation where a trusted server adds the noise, would have
half the sensitivity, but means nothing here, since the server knows who takes part. It is not
covered: how many examples a client has (|D_i| weighs its update), its scores on validation and test
data, and whether it answers. Training losses, subspaces and sums of the data would tell of it as
well, so they are withheld or refused.
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

# What private clients do not tell, however it is asked for: all of their training data that no
# noise is put on.


class Withholding(Middleware):
    """Lets clients give updates, and scores on validation or test data; what else is asked for is refused.

    So is every class of queries that does not declare what its replies reveal.
    """

    def __call__(self, query: Query[R], ask: Ask) -> R:
        """Put a query; raise a ConfigError if its class does not declare what it discloses."""
        check_declared(type(query))
        return super().__call__(query, ask)

    def evaluation(self, query: EvaluationQuery, ask: Ask) -> Evaluation:
        """Return scores on validation or test data; raise a ConfigError on training data."""
        if query.split == "train":
            raise refusal("training losses")
        return ask(query)

    def data(self, query: DataQuery[R], ask: Ask) -> R:
        """Return a reply that does not depend on any client's data; raise a ConfigError otherwise."""
        if query.mechanism != "public":
            raise refusal(query.reveals or described_class(query))
        return ask(query)

    def other(self, query: Query[Any], ask: Ask) -> Any:
        """Return a reply that does not depend on any client's data; raise a ConfigError otherwise."""
        if query.mechanism != "public":
            raise refusal(described_class(query))
        return ask(query)


def described_class(query: Query[Any]) -> str:
    """Return what replies to a query disclose, and the name of its class."""
    return f"{query.discloses} (a {type(query).__name__})"


def refusal(what: str) -> ConfigError:
    """Return the error of asking private clients for what no noise is put on."""
    return ConfigError(
        f"clients with differential privacy do not tell {what}, since no noise is put on that; "
        "take an algorithm that goes by updates alone, or leave out privacy.clip_norm"
    )


Noise = Callable[[int, int, Round, str], Tensor]
"""Gives so many standard normal numbers, float64, to a client for what it sends (``updates`` or ``gradients``)."""

Book = Callable[[int, Round], None]
"""Called before a client trains; what it raises keeps the client from training."""


@checked()
@dataclass(frozen=True, kw_only=True)
class DifferentialPrivacy:
    """The Gaussian mechanism (Dwork and Roth 2014, appendix A) on whole updates, and the δ at which ε is stated.

    Parameters
    ----------
    clip_norm
        Largest L2 norm C of an update ``[S]``, parameters and buffers together, in parameter units.
        A longer one is scaled down to it.
    noise_multiplier
        z: every entry gets noise of standard deviation z·C. With 0 updates are only clipped, and ε
        is infinite.
    delta
        δ, well below one over the number of clients.

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
        """Return what the ``[privacy]`` section of a config says: None without ``clip_norm``, or of another level.

        Noise without a norm that it is measured by raises a ConfigError.
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
        """What a config says of it."""
        return asdict(self)

    def released(self, update: Tensor, normal: Tensor) -> Tensor:
        """Return what leaves the client of an update ``[S]``, given as many standard normal numbers, float64.

        An update that is not finite counts as zeros: to refuse it would reveal that training
        diverged on this data.
        """
        exact = update.double()
        if not bool(torch.isfinite(exact).all()):
            exact.zero_()
        norm = float(torch.linalg.vector_norm(exact))
        # the square of an entry beyond 1e154 overflows float64: divide by the largest first
        if math.isinf(norm):
            exact /= exact.abs().max()
            exact *= self.clip_norm / float(torch.linalg.vector_norm(exact))
        else:
            exact *= self.clip_norm / max(norm, self.clip_norm)
        return exact.add_(normal.to(exact), alpha=self.noise_multiplier * self.clip_norm).to(
            update.dtype
        )

    def epsilon(self, releases: int) -> float:
        """Return ε after so many releases of one client; raises as :func:`~fedclade.channel.accounting.epsilon_of`."""
        return epsilon_of({self.noise_multiplier: releases}, self.delta)

    def spent(self, releases: int) -> dict[str, Any]:
        """Return what a run's summary says of the client that released most, so many times: ε None is no bound."""
        epsilon = self.epsilon(releases)
        said = {
            "epsilon": epsilon if math.isfinite(epsilon) else None,
            "level": "client",
            "towards": "everybody",
        }
        return {**said, **asdict(self), "releases": releases}


@dataclass(frozen=True)
class Privatizing(Withholding):
    """Lets clients send clipped and noisy updates and gradients only, and neither training losses, subspaces nor sums.

    Their training losses are NaN: withheld. What they keep (no updates travel) stays as it is.
    Noise is that of :func:`keyed_noise` in a simulation, and of :func:`system_noise` on a real
    client.

    An update is booked before its client trains. So a client whose training fails, or whose process
    is stopped meanwhile, has spent as much as one that replies, and failures cannot be used to
    query it for free.
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
    """Return the noise of a simulation: it belongs to seed, round, query and the client's key, so that a run repeats.

    Whoever knows the seed can take it off again. It shows what privacy costs, and protects nobody.
    """

    def noise(size: int, client: int, this_round: Round, what: str) -> Tensor:
        key = this_round.number, this_round.query, keys[client]
        draw = rng.generator(this_round.seed, f"dp noise of {what} in {this_round.purpose}", *key)
        return torch.from_numpy(draw.standard_normal(size))

    return noise


def system_noise(size: int, client: int, this_round: Round, what: str) -> Tensor:
    """Return the noise of a real client: 52 random bits of the operating system for each number, and nothing else.

    Not from the run's seed, since the server knows that and could subtract the noise. Nor from a
    generator with a seed of its own: torch's seeds its generator on the CPU with 32 bits, few
    enough to try all of them.
    """
    return system_normal(size)


def system_normal(size: int) -> Tensor:
    """Return standard normal numbers of the operating system, float64."""
    return torch.from_numpy(scipy.special.ndtri(system_uniform(size)))


def system_uniform(size: int) -> NDArray[Any]:
    """Return numbers of the operating system, uniform in (0, 1), of 52 random bits each, float64."""
    words = np.frombuffer(secrets.token_bytes(8 * size), dtype=np.uint64)
    return ((words >> np.uint64(12)) + 0.5) * 2.0**-52


def booked(privacy: DifferentialPrivacy, ledger: Ledger, run: str) -> Privatizing:
    """Return what makes a real client private: noise from the operating system, each release booked before it leaves.

    The ledger is the client's own, and notes ``run`` with each release; with a budget it refuses
    what would exceed it.
    """
    return Privatizing(
        privacy, system_noise, lambda _, r: ledger.book(privacy.noise_multiplier, run, r.number)
    )
