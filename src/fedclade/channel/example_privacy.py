"""Differential privacy of single training examples: clients train by DP-SGD (Abadi et al. 2016, Algorithm 1).

Each step takes a Poisson sample of a client's examples, clips the gradient of each, and puts noise
on the sum. All else is made of what such steps give: momentum and Adam, proximal terms, decay,
every later step, the updates of a round and their means. So all that a client sends of its training
has the guarantee, towards the server and everybody else.

Neighbours are two data sets of a client that differ in one example, which counts in one of them and
in the other adds nothing to any sum: add or remove one, where the number of examples |D_i|, which
is told anyway, stays what it was. The ledger of steps below says what they cost together. Parts of
the data that a round trains on apart have no example in common, so they cost what one of them does.
Amplification by the choice of clients is not claimed.

Not covered is what no noise is put on: |D_i|, scores on validation and test data, and whether a
client answers. Training losses, subspaces, sums of the data and the like are withheld or refused.
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

# What noisy steps of one client cost together, in ε at δ for one of its examples; and the file that
# counts them.

GRID = 1e-3
"""Of the privacy losses: they are rounded up to its points, so that ε is an upper bound, of 0.1 % or so."""

Steps = Mapping[tuple[float, float], int]
"""How many steps there were of each sampling rate q and noise multiplier σ."""


def epsilon_of_steps(
    steps: Steps, delta: float, releases: Mapping[float, int] | None = None
) -> float:
    """Return the ε, for one example of a client, that its steps cost together, at a δ.

    A step is a Gaussian mechanism of multiplier σ on a Poisson sample: each example is in it with
    probability q, and adds at most C to the sum. ``dp-accounting`` composes their privacy loss
    distributions, for the example that counts in one of two data sets and adds nothing in the
    other.

    Parameters
    ----------
    steps
        Without one ε is 0, with a σ of 0 infinite.
    delta
        δ, in (0, 1).
    releases
        How many whole updates the client sent besides with each noise multiplier, see
        :func:`~fedclade.channel.accounting.epsilon_of`: with one example for another they lie two
        clip norms apart, too.

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
    # With little noise losses reach far, as 1/σ², and a grid of as many points is coarser.
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
    """The noisy steps of one round of a run, of one sampling rate and noise multiplier."""

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
    """One client's noisy steps, over all its runs, as a JSON file; as :class:`~fedclade.channel.accounting.Ledger` is.

    Steps are booked before they are taken. Whole updates in the ledger of client-level privacy,
    ``beside``, cost an example as much as they cost the client, and count here too.
    """

    path: Path
    budget: Budget | None = None
    beside: Ledger | None = None

    def entries(self) -> tuple[StepEntry, ...]:
        """Read what has been booked; raises a PrivacyError if the file is damaged."""
        return read_entries(self.path, StepEntry)

    def spent(self, delta: float) -> float:
        """Return the ε, at a δ, of all steps so far; raises as :func:`epsilon_of_steps` and :meth:`entries`."""
        return self._epsilon(self.entries(), delta)

    def book(
        self, noise_multiplier: float, rates: Mapping[float, int], run: str, number: int
    ) -> None:
        """Book steps that are about to be taken, in a round of a run, by rate; if this raises, nothing may leave.

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
"""How many noisy steps one client took at each rate, the probability with which a step samples an example."""


@checked()
@dataclass(frozen=True, kw_only=True)
class ExamplePrivacy:
    """DP-SGD on the client: how gradients of examples are clipped, how much noise a step gets, and the δ of ε.

    Parameters
    ----------
    clip_norm
        Largest L2 norm C of the gradient of one example, of all parameters that are trained
        together, in units of the gradient. A longer one is scaled down to it.
    noise_multiplier
        σ: the sum of a step's gradients gets noise of standard deviation σ·C on every entry, and is
        then divided by the expected size of the sample. With 0 gradients are only clipped, and ε is
        infinite.
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
        """Return what the ``[privacy]`` section of a config says: None if its level is another.

        A ConfigError without ``clip_norm``.
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
        """What a config says of it."""
        return {"level": self.level, **asdict(self)}

    def epsilon(self, rates: Rates) -> float:
        """Return ε of the steps of one client; raises as :func:`~fedclade.channel.example_privacy.epsilon_of_steps`."""
        return epsilon_of_steps(
            {(rate, self.noise_multiplier): steps for rate, steps in rates.items()}, self.delta
        )

    def spent(self, of_clients: Mapping[Any, Rates], releases: int) -> dict[str, Any]:
        """Return what a run's summary says, given each client's steps, and the most updates that one sent.

        ε and steps are those of the client that spent most; an ε of None is no bound.
        """
        each = [(self.epsilon(rates), sum(rates.values())) for rates in _largest(of_clients)]
        epsilon, steps = max(each, default=(0.0, 0))
        told = {"epsilon": epsilon if math.isfinite(epsilon) else None, **self.section}
        return {**told, "steps": steps, "releases": releases}


Mechanism = DifferentialPrivacy | ExamplePrivacy | CentralPrivacy
"""How clients are private: as a whole, each of their examples, or as a whole where only sums of them are seen."""


def mechanism_of(section: Mapping[str, Any]) -> Mechanism | None:
    """Return what the ``[privacy]`` section of a config says; None for no noise and no clipping."""
    return (
        CentralPrivacy.of(section) or ExamplePrivacy.of(section) or DifferentialPrivacy.of(section)
    )


def check_local(privacy: Mechanism | None) -> DifferentialPrivacy | ExamplePrivacy | None:
    """Return the privacy of a run over a network; a ConfigError if it needs sums that only a simulation can make."""
    if isinstance(privacy, CentralPrivacy):
        raise ConfigError(
            'privacy.model = "central" runs in a simulation alone, since over a network nobody puts noise on sums: the '
            "server would see single updates, or exact sums with network.secure_aggregation = true; set "
            'privacy.model = "local"'
        )
    return privacy


def noisy_steps(this_round: Round, examples: int) -> Counter[float]:
    """Return what a query to train costs a client of so many examples: how many steps, at which rate.

    Of several replicates it is one that has the smallest part's rate and the largest part's steps:
    parts are disjoint, so an example is in the steps of one of them, and no part costs more.
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
    """Return with which probability each example is in a step, so that a sample has ``batch_size`` in expectation."""
    return min(1.0, batch_size / max(1, examples))


@dataclass(frozen=True)
class PrivateExamples(Withholding):
    """Lets clients that train by DP-SGD send their updates, and nothing of their training data without noise.

    The noise itself is put on by what trains them. ``book`` is called with a round and a client's
    steps before it trains, once for all parts of its data; what it raises keeps the update back.
    """

    sizes: Mapping[int, int]
    book: Callable[[Round, Rates], None] | None = None

    def updates(self, query: UpdateQuery, ask: Ask) -> Updates:
        """Return updates without losses; raise a ConfigError if they would come of other than noisy steps."""
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
        """Return scores on validation or test data; raise a ConfigError on training data, by which mixtures weigh."""
        if query.mixture is not None:
            raise refusal("training losses")
        return super().evaluation(query, ask)


def privatizing(
    privacy: Mechanism | None, sizes: Mapping[int, int], keys: Mapping[int, int]
) -> Withholding | None:
    """Return what makes simulated clients of these sizes and keys private; None without privacy.

    Noise on sums is not put on here: clients only withhold what is no update.
    """
    if isinstance(privacy, DifferentialPrivacy):
        return Privatizing(privacy, keyed_noise(keys))
    if isinstance(privacy, ExamplePrivacy):
        return PrivateExamples(sizes)
    return Withholding() if privacy else None


def booked_steps(
    privacy: ExamplePrivacy, ledger: StepLedger, run: str, sizes: Mapping[int, int]
) -> PrivateExamples:
    """Return what makes a real client book its steps before it takes them; beyond its budget it takes none."""
    return PrivateExamples(
        sizes, lambda r, rates: ledger.book(privacy.noise_multiplier, rates, run, r.number)
    )


def _largest(of_clients: Mapping[Any, Rates]) -> list[Rates]:
    """Return the spending of few clients of which one cost the most.

    Of those with the same numbers of steps, in the order of their rates, it is the one with the
    largest rates: the smallest client. Entry by entry, so it is at least what any of them spent.
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
