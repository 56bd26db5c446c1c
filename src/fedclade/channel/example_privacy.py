"""Differential privacy of single training examples by DP-SGD (Abadi et al. 2016, Algorithm 1).

Each step takes a Poisson sample of a client's examples, clips the gradient of each example, and
adds noise to the sum. Momentum and Adam, proximal terms, decay, later steps, the updates of a round
and their means are computed from such noisy sums alone. So the guarantee covers all results of
training that a client sends, towards the server and all other parties.

Two data sets of a client are neighbours if they differ in one example that counts in one of them
and adds nothing to any sum in the other. This is the relation "add or remove one", except that the
number of examples |D_i|, which is reported anyway, stays the same. The ledger of steps below states
the joint cost of all steps. Parts of the data on which a round trains separately are disjoint, so
together they cost as much as one of them. Amplification by the sampling of clients is not claimed.

Not covered are quantities without noise: |D_i|, scores on validation and test data, and whether a
client replies. Training losses, subspaces, sums of the data and similar statistics are withheld or
refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from fedclade.channel.accounting import (
    SENSITIVITY,
    Budget,
    Ledger,
    check_budget,
    read_entries,
    write_entries,
)
from fedclade.channel.central import CentralPrivacy
from fedclade.channel.privacy import (
    DifferentialPrivacy,
    Privatizing,
    Withholding,
    keyed_noise,
    refusal,
)
from fedclade.core import (
    Ask,
    ConfigError,
    Evaluation,
    EvaluationQuery,
    Round,
    UpdateQuery,
    Updates,
    alone,
    checked,
    import_extra,
    require,
)

# Privacy accounting of the noisy steps of one client: the joint ε at δ for one of its examples, and
# the file that counts the steps.

GRID = 1e-3
"""Grid of the privacy losses: rounding up to it makes ε an upper bound, by about 0.1 %."""

Steps = Mapping[tuple[float, float], int]
"""Number of steps by sampling rate q and noise multiplier σ."""


def epsilon_of_steps(
    steps: Steps, delta: float, releases: Mapping[float, int] | None = None
) -> float:
    """Return the joint ε of a client's steps at δ, for one of its examples.

    A step is a Gaussian mechanism of multiplier σ on a Poisson sample: each example is in the
    sample with probability q, and adds at most C to the sum. ``dp-accounting`` composes the privacy
    loss distributions of the steps, for an example that counts in one of two data sets and adds
    nothing in the other.

    Parameters
    ----------
    steps
        Number of steps by (q, σ). Without steps ε is 0; with a σ of 0 it is infinite.
    delta
        δ, in (0, 1).
    releases
        Number of whole updates that the client also sent, by noise multiplier; see
        :func:`~fedclade.channel.accounting.epsilon_of`. Replacing one example can move a whole
        update by two clip norms, as replacing all data can.

    Returns
    -------
    float
        ε, rounded up.

    Raises
    ------
    ConfigError
        If δ is out of range.
    MissingExtraError
        If ``dp-accounting`` is not installed.
    """
    require(("delta", delta, 0 < delta < 1, "greater than 0 and less than 1"))
    import_extra("dp_accounting", "dp-accounting", "privacy", "stating ε")
    counted = tuple(sorted((rate, sigma, n) for (rate, sigma), n in steps.items() if n))
    whole = tuple(sorted((z, n) for z, n in (releases or {}).items() if n))
    if any(sigma == 0 for _, sigma, _ in counted) or any(z == 0 for z, _ in whole):
        return math.inf
    return _epsilon(counted, whole, delta) if counted or whole else 0.0


@lru_cache(maxsize=1024)
def _epsilon(
    steps: tuple[tuple[float, float, int], ...],
    releases: tuple[tuple[float, int], ...],
    delta: float,
) -> float:
    accounting = import_extra("dp_accounting", "dp-accounting", "privacy", "stating ε")
    least = min([*(sigma for _, sigma, _ in steps), *(z / SENSITIVITY for z, _ in releases)])
    # With little noise, privacy losses are as large as 1/σ². A coarser grid keeps the number of its
    # points the same.
    grid = GRID * max(1.0, (0.5 / least) ** 2)
    accountant = accounting.pld.PLDAccountant(value_discretization_interval=grid)
    for rate, sigma, count in steps:
        event = accounting.PoissonSampledDpEvent(rate, accounting.GaussianDpEvent(sigma))
        accountant.compose(event, count)
    for z, count in releases:
        accountant.compose(accounting.GaussianDpEvent(z / SENSITIVITY), count)
    return float(accountant.get_epsilon(delta))


@dataclass(frozen=True)
class StepEntry:
    """Noisy steps of one round of a run, with one sampling rate and noise multiplier."""

    run: str
    round: int
    noise_multiplier: float
    rate: float
    steps: int

    def __post_init__(self) -> None:
        z = self.noise_multiplier
        n = self.steps
        right = z >= 0 and math.isfinite(z) and 0 < self.rate <= 1
        if not (right and isinstance(n, int) and n > 0):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"{n!r} steps of rate {self.rate!r} with noise multiplier {z!r}")


@dataclass(frozen=True)
class StepLedger:
    """Ledger of one client's noisy steps over all its runs, as a JSON file.

    It behaves as :class:`~fedclade.channel.accounting.Ledger`: steps are booked before they are
    taken.

    Parameters
    ----------
    path
        The JSON file.
    budget
        Largest ε at δ that the client may spend; None for no limit.
    beside
        Ledger of the client's whole updates under client-level privacy. A whole update costs each
        example as much as it costs the client, so it counts here too.
    """

    path: Path
    budget: Budget | None = None
    beside: Ledger | None = None

    def entries(self) -> tuple[StepEntry, ...]:
        """Read the booked steps; raises a PrivacyError if the file is damaged."""
        return read_entries(self.path, StepEntry)

    def spent(self, delta: float) -> float:
        """Return the ε of all booked steps at δ.

        Raises as :func:`epsilon_of_steps` and :meth:`entries`.
        """
        return self._epsilon(self.entries(), delta)

    def book(
        self, noise_multiplier: float, rates: Mapping[float, int], run: str, number: int
    ) -> None:
        """Book steps before they are taken. If this raises an error, nothing may leave the client.

        Parameters
        ----------
        noise_multiplier
            σ of the steps.
        rates
            Number of steps by sampling rate.
        run, number
            Name of the run, and number of its round.

        Raises
        ------
        PrivacyError
            If the file is damaged, or the steps would exceed the budget.
        OSError
            If the file cannot be written.
        """
        with alone(self.path):
            entries = {(e.run, e.round, e.noise_multiplier, e.rate): e for e in self.entries()}
            for rate, steps in rates.items():
                key = run, number, noise_multiplier, rate
                before = entries[key].steps if key in entries else 0
                entries[key] = StepEntry(*key, steps=before + steps)
            check_budget(self.budget, lambda delta: self._epsilon(entries.values(), delta))
            write_entries(self.path, entries.values())

    def _epsilon(self, entries: Iterable[StepEntry], delta: float) -> float:
        counted = Counter[tuple[float, float]]()
        for entry in entries:
            counted[entry.rate, entry.noise_multiplier] += entry.steps
        return epsilon_of_steps(counted, delta, self.beside.counted() if self.beside else None)


Rates = Mapping[float, int]
"""Number of one client's noisy steps by sampling rate.

The sampling rate is the probability with which a step samples an example.
"""


@checked()
@dataclass(frozen=True, kw_only=True)
class ExamplePrivacy:
    """Settings of DP-SGD on clients: clip norm, noise, and the δ at which ε is stated.

    Parameters
    ----------
    clip_norm
        Largest L2 norm C of the gradient of one example, over all parameters that are trained
        together, in units of the gradient. A longer gradient is scaled down to it.
    noise_multiplier
        σ: the sum of a step's gradients gets noise of standard deviation σ·C on every entry, and is
        then divided by the expected size of the sample. With 0, gradients are only clipped, and ε
        is infinite.
    delta
        δ, well below one over the number of a client's examples.

    Raises
    ------
    ConfigError
        If a value is out of range; one line for each.
    """

    level: ClassVar[str] = "example"

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
    def of(cls, section: Mapping[str, Any]) -> ExamplePrivacy | None:
        """Return the settings in the ``[privacy]`` section of a config, or None for another level.

        Raises
        ------
        ConfigError
            If the section has this level but no ``clip_norm``, or a value is out of range.
        """
        if section.get("level") != cls.level:
            return None
        clip = section.get("clip_norm")
        require(
            (
                "privacy.clip_norm",
                clip,
                clip is not None,
                "a number where privacy.level = 'example'",
            )
        )
        return cls(
            **{field.name: section[field.name] for field in fields(cls) if field.name in section}
        )

    @property
    def section(self) -> dict[str, Any]:
        """``[privacy]`` section of a config with these settings."""
        return {"level": self.level, **asdict(self)}

    def epsilon(self, rates: Rates) -> float:
        """Return the ε of one client's steps.

        Raises as :func:`~fedclade.channel.example_privacy.epsilon_of_steps`.
        """
        return epsilon_of_steps(
            {(rate, self.noise_multiplier): steps for rate, steps in rates.items()}, self.delta
        )

    def spent(self, of_clients: Mapping[Any, Rates], releases: int) -> dict[str, Any]:
        """Return the privacy entries of a run's summary.

        ε and the number of steps are those of the client that spent most. An ε of None means that
        there is no bound.

        Parameters
        ----------
        of_clients
            Steps of each client.
        releases
            Largest number of updates that one client sent.
        """
        each = [(self.epsilon(rates), sum(rates.values())) for rates in _largest(of_clients)]
        epsilon, steps = max(each, default=(0.0, 0))
        told = {"epsilon": epsilon if math.isfinite(epsilon) else None, **self.section}
        return {**told, "steps": steps, "releases": releases}


Mechanism = DifferentialPrivacy | ExamplePrivacy | CentralPrivacy
"""Any privacy mechanism: client level, example level, or client level with noise on sums only."""


def mechanism_of(section: Mapping[str, Any]) -> Mechanism | None:
    """Return the mechanism in the ``[privacy]`` section of a config.

    None means neither noise nor clipping.
    """
    return (
        CentralPrivacy.of(section) or ExamplePrivacy.of(section) or DifferentialPrivacy.of(section)
    )


def check_local(privacy: Mechanism | None) -> DifferentialPrivacy | ExamplePrivacy | None:
    """Return the privacy mechanism of a run over a network.

    Raises
    ------
    ConfigError
        If the mechanism needs noise on sums, which only a simulation can add.
    """
    if isinstance(privacy, CentralPrivacy):
        raise ConfigError(
            'privacy.model = "central" runs in a simulation alone, since over a network nobody puts noise on sums: the '
            "server would see single updates, or exact sums with network.secure_aggregation = true; set "
            'privacy.model = "local"'
        )
    return privacy


def noisy_steps(this_round: Round, examples: int) -> Counter[float]:
    """Return the number of noisy steps by sampling rate that a training query costs a client.

    With several replicates, the result is a bound for one of them: the sampling rate of the
    smallest part and the number of steps of the largest part. Parts are disjoint, so an example
    takes part in the steps of only one replicate, and no part costs more.

    Parameters
    ----------
    this_round
        The round of the query.
    examples
        Number of the client's training examples.
    """
    count = this_round.replicates if this_round.part is None else this_round.part[1]
    parted = this_round.part is not None or count > 1
    if parted and this_round.drawn_from is not None:
        examples = min(examples, this_round.drawn_from)
    smallest, largest = (
        this_round.part_size or max(1, n) for n in (examples // count, -(-examples // count))
    )
    smallest, largest = (smallest, largest) if parted else (examples, examples)
    spec = this_round.of_part(0).spec if this_round.replicates > 1 else this_round.spec
    steps = spec.steps_with(largest)
    if this_round.personal_epochs:
        steps += spec.in_epochs(this_round.personal_epochs).steps_with(largest)
    return Counter({sampling_rate(spec.batch_size, smallest): steps})


def sampling_rate(batch_size: int, examples: int) -> float:
    """Return the probability that an example is in a step.

    The expected size of a sample is then ``batch_size``, or all examples if there are fewer.
    """
    return min(1.0, batch_size / max(1, examples))


@dataclass(frozen=True)
class PrivateExamples(Withholding):
    """Middleware of DP-SGD clients: passes updates, and refuses queries for data without noise.

    The noise itself is added by the training. ``book`` is called with a round and a client's steps
    before the client trains, once for all parts of its data. If ``book`` raises an error, the
    client does not train.
    """

    sizes: Mapping[int, int]
    book: Callable[[Round, Rates], None] | None = None

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return updates without losses.

        Raises
        ------
        ConfigError
            If the updates would result from anything but noisy steps.
        """
        if query.kind == "gradients":
            raise refusal("gradients over all their examples")
        if query.mixture is not None:
            raise refusal("the models of a mixture")
        if query.round.rule is not None:
            raise ConfigError(
                f"local rule {query.round.rule.name} takes other steps than those of DP-SGD, whose "
                "noise is counted; take an algorithm without a rule, or privacy.level = 'client'"
            )
        if query.data_rounds is not None:
            raise refusal("updates from the data of several rounds")
        if self.book is not None and query.round.part in (
            None,
            (0, (query.round.part or (0, 0))[1]),
        ):
            for client in query.ids:
                self.book(query.round, noisy_steps(query.round, self.sizes[client]))
        updates = ask(query)
        return replace(updates, losses=torch.full_like(updates.losses, math.nan))

    def evaluation(self, query: EvaluationQuery, ask: Ask) -> Evaluation:
        """Return scores on validation or test data.

        Raises
        ------
        ConfigError
            If training losses are requested, also by the weights of a mixture.
        """
        if query.mixture is not None:
            raise refusal("training losses")
        return super().evaluation(query, ask)


def privatizing(
    privacy: Mechanism | None, sizes: Mapping[int, int], keys: Mapping[int, int]
) -> Withholding | None:
    """Return the privacy middleware of simulated clients, or None without privacy.

    With central privacy, noise is added to sums elsewhere
    (:class:`~fedclade.channel.central.NoisySums`). Clients then only refuse queries for anything
    but updates and scores.

    Parameters
    ----------
    privacy
        The mechanism.
    sizes, keys
        Number of training examples and key of each client.
    """
    if isinstance(privacy, DifferentialPrivacy):
        return Privatizing(privacy, keyed_noise(keys))
    if isinstance(privacy, ExamplePrivacy):
        return PrivateExamples(sizes)
    return Withholding() if privacy else None


def booked_steps(
    privacy: ExamplePrivacy, ledger: StepLedger, run: str, sizes: Mapping[int, int]
) -> PrivateExamples:
    """Return the middleware of a real client that books its steps before it takes them.

    Beyond its budget the client takes no steps.
    """
    return PrivateExamples(
        sizes, lambda r, rates: ledger.book(privacy.noise_multiplier, rates, run, r.number)
    )


def _largest(of_clients: Mapping[Any, Rates]) -> list[Rates]:
    """Return a few spendings, of which one costs at least as much as any client's.

    Clients with the same step counts, in the order of their rates, are replaced by the
    entry-by-entry maximum of their rates. That is usually the smallest client, and never less than
    any of them spent.
    """
    found: dict[tuple[int, ...], list[float]] = {}
    for rates in of_clients.values():
        ordered = sorted(rates.items(), reverse=True)
        key = tuple(steps for _, steps in ordered)
        before = found.get(key, [0.0] * len(key))
        found[key] = [max(mine, rate) for mine, (rate, _) in zip(before, ordered, strict=True)]
    summed: list[Rates] = []
    for steps, rates in found.items():
        counted = Counter[float]()
        for rate, number in zip(rates, steps, strict=True):
            counted[rate] += number
        summed.append(counted)
    return summed
