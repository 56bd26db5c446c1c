"""Local differential privacy of clients: updates are clipped and get noise before they leave.

The guarantee is local: it holds against the server and all other parties that read the traffic. It
protects all the data of a client: with any other data, everything that the server receives of the
client's *updates* would be almost as likely (ε, δ). This is the neighbouring relation "replace all
data of one client". The relation "add or remove a client", which is usual where a trusted server
adds the noise, would have half the sensitivity, but has no meaning here, since the server knows
which clients participate.

Not covered are the number of a client's examples (|D_i| is the weight of its update), its scores on
validation and test data, and whether it replies. Training losses, subspaces and sums of the data
would also reveal its data, so they are withheld or refused.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade.channel.accounting import LEVELS, Ledger, epsilon_of
from fedclade.channel.middleware import Middleware
from fedclade.core import (
    ConfigError,
    DataQuery,
    EvaluationQuery,
    Query,
    Round,
    TrainQuery,
    Updates,
    about,
    check_declared,
    check_settings,
    checked,
    document_settings,
    in_range,
    require,
    rng,
    setting,
)

# Queries that private clients refuse: all that reveal their training data without noise.


class Withholding(Middleware):
    """Middleware of private clients that refuses all queries but those for updates and for scores.

    Queries for scores on validation and test data pass; queries for scores on training data are
    refused. A query is also refused if its class does not declare what its replies reveal.
    """

    def before(self, query: Any) -> Any:
        """Return the query unchanged, or refuse it.

        Raises
        ------
        ConfigError
            If the query's class does not declare what its replies disclose, or the reply would
            reveal training data without noise.
        """
        check_declared(type(query))
        if isinstance(query, TrainQuery):
            return query
        if isinstance(query, EvaluationQuery):
            if query.split == "train":
                raise refusal_to_reveal("training losses (losses of models on their training data)")
            return query
        if query.mechanism != "public":
            reveals = query.reveals if isinstance(query, DataQuery) else ""
            raise refusal_to_reveal(reveals or described_class(query))
        return query


_COVERED = ("sizes", "losses", "norms", "deltas")
"""Columns that leave a private client: the noisy update, its norm, and the number of examples.

Losses are replaced by NaN.
"""


def withhold_losses(updates: Updates) -> Updates:
    """Remove from updates the data to which no noise is added.

    Training losses are replaced by NaN, and columns that a method adds to updates are removed.
    """
    added = {name: None for name in updates.columns if name not in _COVERED}
    withheld = torch.full_like(updates.losses, math.nan)
    return updates.with_columns(**{**added, "losses": withheld})


def described_class(query: Query[Any]) -> str:
    """Describe for an error message what replies to a query disclose, and name its class."""
    return f"{query.discloses} (a {type(query).__name__})"


def refusal_to_reveal(what: str) -> ConfigError:
    """Return the error for a query that asks private clients for a quantity without noise.

    Parameters
    ----------
    what
        The quantity that clients do not reveal, such as ``training losses``.
    """
    return ConfigError(
        f"clients with differential privacy do not reveal {what}, because no noise would be added "
        "to the reply; choose an algorithm and settings that need only updates, or remove "
        "privacy.clip_norm"
    )


class Noise(Protocol):
    """Source of noise: a function ``(size, client, now, what)``.

    It returns ``size`` standard normal numbers, float64, for what a client sends: ``updates`` or
    ``gradients``.
    """

    def __call__(self, size: int, client: int, now: Round, what: str, /) -> torch.Tensor:
        """Return noise for one client in one round."""
        ...


Book = Callable[[int, Round], None]
"""Function of a client id and a round that counts a release before the client trains.

If the function raises an error, the client does not train.
"""


@checked()
@document_settings
@dataclass(frozen=True, kw_only=True)
class DifferentialPrivacy:
    """Settings of the Gaussian mechanism (Dwork and Roth 2014, appendix A) on whole updates.

    Raises
    ------
    ConfigError
        If a value is out of range; one line for each.
    """

    clip_norm: float = field(
        metadata=about(
            doc="""Largest L2 norm C of an update ``[S]``, parameters and buffers together, in parameter
        units. A longer update is scaled down to it.""",
            allowed=in_range("(0, inf)", "greater than 0 and finite"),
        )
    )
    noise_multiplier: float = setting(
        0.0,
        in_range("[0, inf)", "at least 0 and finite"),
        doc="""z: every entry gets noise of standard deviation z·C. With 0 updates are only clipped,
        and ε is infinite.""",
    )
    delta: float = setting(
        1e-5,
        in_range("(0, 1)", "greater than 0 and less than 1"),
        doc="δ at which ε is stated, well below one over the number of clients.",
    )

    def __post_init__(self) -> None:
        check_settings(self, "privacy")

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> DifferentialPrivacy | None:
        """Return the settings in the ``[privacy]`` section of a config.

        The result is None if the section sets no ``clip_norm``, or if its level is ``example``.

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
            ("privacy.noise_multiplier", noise, noise == 0, "0 if privacy.clip_norm is not set")
        )
        return None

    @property
    def section(self) -> dict[str, Any]:
        """``[privacy]`` section of a config with these settings of client-level privacy."""
        return asdict(self)

    def released(self, update: torch.Tensor, normal: torch.Tensor) -> torch.Tensor:
        """Return the update that leaves the client: clipped and with noise.

        An update that is not finite counts as zeros: to refuse the update would reveal that
        training diverged on this data.

        Parameters
        ----------
        update
            The update as trained, ``[S]`` (one number for each parameter and buffer).
        normal
            Standard normal numbers, float64 ``[S]``, which are scaled to the noise.
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
        """Return the joint ε after a number of releases of one client.

        The method raises the errors of :func:`~fedclade.channel.accounting.epsilon_of`.
        """
        return epsilon_of({self.noise_multiplier: releases}, self.delta)

    def spent(self, releases: int) -> dict[str, Any]:
        """Return the privacy entries of a run's summary, by name.

        An ε of None means that there is no bound.

        Parameters
        ----------
        releases
            Largest number of updates that any client released.
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

    Queries for training losses, subspaces and sums of the data are refused, and the training losses
    of updates are replaced by NaN. If clients store the models that they train and send no updates,
    nothing is clipped and no noise is added.

    An update is booked before its client trains. So a client whose training fails, or whose process
    is stopped meanwhile, has spent as much of its budget as a client that replies, and failures
    cannot be used to query a client for free.

    Parameters
    ----------
    privacy
        Clip norm and noise.
    noise
        Source of the noise: :func:`keyed_noise` in a simulation, :func:`system_noise` on a real
        client.
    book
        Function that is called with each client before it trains, to record its release; None to
        record nothing.
    """

    privacy: DifferentialPrivacy
    noise: Noise
    book: Book | None = None

    def before(self, query: Any) -> Any:
        """Count the updates that a query requests towards the clients' budgets; return the query.

        The method raises the errors of :class:`Withholding` for queries whose replies cannot be
        made private.
        """
        query = super().before(query)
        if isinstance(query, TrainQuery) and self.book is not None and query.work.sends_update:
            for client in query.ids:
                self.book(client, query.round)
        return query

    def after(self, query: Any, reply: Any) -> Any:
        """Return updates clipped and with noise; replies to other queries are unchanged."""
        if not isinstance(query, TrainQuery):
            return reply
        updates: Updates = reply
        if not query.work.sends_update:
            return withhold_losses(updates)
        what = "gradients" if query.work.is_gradient else "updates"
        sent = torch.empty_like(updates.required_deltas)
        for row, client, update in zip(sent, updates.ids, updates.required_deltas, strict=True):
            noise = self.noise(len(update), client, query.round, what)
            row.copy_(self.privacy.released(update, noise))
        sizes = [int(size) for size in updates.sizes.tolist()]
        unknown = torch.zeros_like(updates.losses)
        received = Updates.received(
            updates.ids, sizes, sent, updates.n_parameters, unknown, query.round.number
        )
        left_out = {**updates.left_out, **received.left_out}
        return replace(withhold_losses(received), left_out=left_out)


def keyed_noise(keys: Mapping[int, int]) -> Noise:
    """Return a source of reproducible noise for simulations.

    The noise depends on the seed, the round, the query and the client's key. Any party that knows
    the seed can subtract the noise. So the noise demonstrates the cost of privacy, and protects no
    client.

    Parameters
    ----------
    keys
        Key of each client, by client id.
    """

    def noise(size: int, client: int, this_round: Round, what: str) -> torch.Tensor:
        key = this_round.number, this_round.query, keys[client]
        draw = rng.generator(this_round.seed, f"dp noise of {what} in {this_round.purpose}", *key)
        return torch.from_numpy(draw.standard_normal(size))

    return noise


def system_noise(size: int, client: int, this_round: Round, what: str) -> torch.Tensor:
    """Return noise for a real client: ``size`` standard normal numbers from the operating system.

    The run's seed is not used, since the server knows the seed and could subtract the noise. A
    generator with another seed is not used either: torch seeds its CPU generator with 32 bits, few
    enough for an attacker to try all seeds. The other parameters are those of every source of noise
    (``Noise``), and are ignored.
    """
    return system_normal(size)


def system_normal(size: int) -> torch.Tensor:
    """Return standard normal numbers ``[size]`` from the operating system, float64."""
    from scipy.special import ndtri

    return torch.from_numpy(ndtri(system_uniform(size)))


def system_uniform(size: int) -> NDArray[Any]:
    """Return random numbers ``[size]``, uniform in (0, 1), from the operating system, float64.

    Each number is made from 52 random bits.
    """
    words = np.frombuffer(secrets.token_bytes(8 * size), dtype=np.uint64)
    return ((words >> np.uint64(12)) + 0.5) * 2.0**-52


def booked(privacy: DifferentialPrivacy, ledger: Ledger, run: str) -> Privatizing:
    """Return the privacy middleware of a real (not simulated) client.

    The noise comes from the operating system. Each release is booked in the client's ledger before
    it leaves the client. If the ledger has a budget, releases that would exceed the budget are
    refused.

    Parameters
    ----------
    privacy
        Clip norm and noise.
    ledger
        Ledger of the client's releases.
    run
        Name of the run, which the ledger records with each release.
    """
    return Privatizing(
        privacy, system_noise, lambda _, r: ledger.book(privacy.noise_multiplier, run, r.number)
    )
