"""Measure how much limits on updates cost if all clients are honest.

The script runs the scenarios of the suite and two further partitions, with and without the limits
of ``[aggregate]``. The data are scikit-learn's digits, or with ``--data mnist`` the scenarios' own.
For each method it prints the accuracy without and with limits, the numbers of updates that were
left out, shortened, or whose weight was capped, the number of all updates, and the longest update
of the run without limits. The length is a multiple of the median in the cluster (clients that start
from the same model, at least three).

With ``--attack FACTOR`` the first client of each run multiplies its update by FACTOR and claims
``--claim`` examples. Accuracies are then those of all other clients, without limits and with an
honest first client, and with limits and the attack.

    python benchmarks/limits.py
    python benchmarks/limits.py --scenarios quantity-skew --methods fedavg cfl --rounds 20 --clip 3
    python benchmarks/limits.py --attack -10 --claim 1000000000
"""

from __future__ import annotations

import fedclade  # noqa: F401  # isort: skip  (before torch, whose threads then sleep while they wait)

import argparse
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median_low
from typing import Any
from unittest.mock import patch

import torch

from fedclade.channel import Limiting, Middleware
from fedclade.config import Config, read_scenario
from fedclade.core import Aggregation, ConfigError, Limits, TrainQuery, Updates, row_norms
from fedclade.data import Federation
from fedclade.runs import Run

SUITE = Path(__file__).parents[1] / "configs" / "suite"

SCENARIOS: Mapping[str, tuple[str, Sequence[str]]] = {
    **{
        name: (name, ())
        for name in ("iid", "label-swap", "label-permutation", "rotation", "label-groups")
    },
    **{name: (name, ()) for name in ("natural", "two-labels", "quantity-skew")},
    "dirichlet 0.1": ("iid", ("data.partition=dirichlet", "data.alpha=0.1")),
    "power law": ("iid", ("data.partition=power_law",)),
}
"""Scenarios: the file in the suite, and changes of its settings."""


@dataclass
class Acts(Middleware):
    """Middleware that measures updates, falsifies those of one client, and applies the limits.

    Parameters
    ----------
    limiting
        The limits; None for no limits.
    factor
        Factor of the malicious client's update.
    claim
        Number of examples that the malicious client claims; 0 for its true number.
    liar
        The malicious client, if any.
    sent
        Number of updates so far.
    longest
        Length of the longest update so far, as a multiple of the median: of the parameters, and of
        the buffers.
    """

    queries = (TrainQuery,)

    limiting: Limiting | None
    factor: float = 1.0
    claim: int = 0
    liar: int | None = None
    sent: int = 0
    longest: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def weights(self, sizes: Mapping[int, int]) -> Mapping[int, int]:
        """Return the weights of clients by the numbers of examples that they claim."""
        claimed = {
            client: self.claim if self.claim and client == self.liar else n
            for client, n in sizes.items()
        }
        return self.limiting.weights(claimed) if self.limiting else claimed

    def before(self, query: TrainQuery) -> TrainQuery:
        """Return the query that is sent on."""
        return self.limiting.before(query) if self.limiting else query

    def after(self, query: TrainQuery, reply: Updates) -> Updates:
        """Return the updates after measurement, falsification and limits."""
        if not query.work.sends_update:
            return reply
        updates = self.with_lie(query, reply)
        return self.limiting.after(query, updates) if self.limiting else updates

    def with_lie(self, query: TrainQuery, updates: Updates) -> Updates:
        """Measure the honest updates, and return the updates with that of the malicious client."""
        self.measure(updates, dict(zip(query.ids, query.models.start, strict=True)))
        if self.liar not in updates.ids or updates.deltas is None:
            return updates
        place = updates.ids.index(self.liar)
        sizes = updates.sizes.clone()
        deltas = updates.deltas.clone()
        deltas[place] *= self.factor
        sizes[place] = self.claim or sizes[place]
        norms = row_norms(deltas[:, : updates.n_parameters])
        return updates.with_columns(sizes=sizes, deltas=deltas, norms=norms)

    def measure(self, updates: Updates, rows: Mapping[int, int]) -> None:
        """Record the longest update, as a multiple of the median of updates from the same model."""
        self.sent += len(updates.ids)
        buffers = row_norms(updates.required_deltas[:, updates.n_parameters :])
        for part, norms in enumerate((updates.norms, buffers)):
            for row in set(rows.values()):
                mine = norms[
                    torch.tensor([rows[client] == row for client in updates.ids], dtype=torch.bool)
                ].tolist()
                if len(mine) >= 3 and (middle := median_low(mine)):
                    self.longest[part] = max(self.longest[part], max(mine) / middle)


def run(config: Config, federation: Federation, limits: Limits, **lie: Any) -> tuple[Run, Acts]:
    """Run a config with limits; return the run, and the middleware with its measurements."""
    acts: list[Acts] = []

    def within(_: Limits, n_parameters: int, sizes: Any) -> Acts:
        acts.append(Acts(Limiting(limits, n_parameters, sizes) if limits.limits else None, **lie))
        return acts[0]

    with patch.object(Limiting, "within", within):
        return config.run(federation, progress=False), acts[0]


def score(run: Run, liar: int | None) -> float:
    """Return the mean accuracy of the honest clients after the last round, in percent."""
    return 100 * mean(row["accuracy"] for row in run.client_rows if row["client"] != liar)


def counted(run: Run, sent: int) -> str:
    """Return how many updates limits left out, shortened and capped, and the number of updates."""
    texts = [
        text
        for event in run.events
        if event["kind"] == "limited"
        for text in event["clients"].values()
    ]
    out = sum(len(event["clients"]) for event in run.events if event["kind"] == "left_out")
    shortened, capped = (
        sum("shortened" in text for text in texts),
        sum("weight" in text for text in texts),
    )
    return f"{out:5d}{shortened:10d}{capped:8d}{sent:7d}"


def main() -> int:
    """Print a row for each scenario, method and seed; return 1 if a loss is above one point."""
    arguments = parse()
    logging.getLogger("fedclade").setLevel(logging.ERROR)
    limits = Limits(arguments.weight, arguments.norm, arguments.clip)
    print(f"accuracy in %, {arguments.rounds} rounds, {arguments.seeds} seeds; {limits}")
    print(
        f"{'':30}{'off':>7}{'on':>7}{'left out':>9}{'shortened':>10}{'capped':>8}{'of':>7}  longest / median"
    )
    worst = 0.0
    for name in arguments.scenarios:
        file, changes = SCENARIOS[name]
        for method in arguments.methods:
            worst = max(worst, one(name, file, changes, method, limits, arguments))
    print(f"at most {worst:.1f} points lost")
    return int(worst > 1)


def one(
    name: str,
    file: str,
    changes: Sequence[str],
    method: str,
    limits: Limits,
    arguments: argparse.Namespace,
) -> float:
    """Print a row of a scenario and a method for each seed; return the mean loss in points."""
    rows: list[tuple[float, float]] = []
    for seed in range(arguments.seeds):
        last = [
            f"rounds={arguments.rounds}",
            f"evaluate_every={arguments.rounds}",
            f"seed={seed}",
            "stream=false",
            "engine=loop",
        ]
        data = read_scenario(SUITE / f"{file}.toml").configs["fedavg"].data["name"]
        if data == "mnist" and arguments.data == "digits":
            last += ["data.name=digits", "data.samples_per_client=70", "data.test_samples=300"]
        try:
            config = read_scenario(SUITE / f"{file}.toml", [*changes, *last]).configs.get(method)
        except ConfigError as error:
            sys.exit(str(error))
        if config is None:  # scenarios without clusters do not have the oracle
            return 0.0
        federation = config.federation()
        liar = federation.ids[0] if arguments.attack is not None else None
        lie: Mapping[str, Any] = {
            "factor": arguments.attack or 1.0,
            "claim": arguments.claim,
            "liar": liar,
        }
        off, acts = run(config, federation, Limits())
        on, _ = run(config, federation, limits, **(lie if liar is not None else {}))
        rows.append((score(off, liar), score(on, liar)))
        seen = f"{acts.longest[0]:.1f}" + (
            f", buffers {acts.longest[1]:.1f}" if acts.longest[1] else ""
        )
        print(
            f"{name:18}{method:10}{seed:2d}{rows[-1][0]:7.1f}{rows[-1][1]:7.1f}    {counted(on, acts.sent)}  {seen}",
            flush=True,
        )
    return mean(before - after for before, after in rows)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--scenarios",
        nargs="+",
        choices=tuple(SCENARIOS),
        default=tuple(SCENARIOS),
        help="scenarios to run (default: all)",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        default=("fedavg", "oracle", "cfl", "rcfl", "ifca", "fedgroup"),
        help="methods to run (default: fedavg oracle cfl rcfl ifca fedgroup)",
    )
    parser.add_argument(
        "--data", choices=("digits", "mnist"), default="digits", help="data set (default: digits)"
    )
    parser.add_argument("--rounds", type=int, default=10, help="rounds of a run (default: 10)")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds (default: 1)")
    default = Aggregation().limits(untrusted=True)
    parser.add_argument(
        "--weight",
        type=float,
        default=default.largest_weight,
        help="value of largest_weight (default: as over a network)",
    )
    parser.add_argument(
        "--norm",
        type=float,
        default=default.largest_norm,
        help="value of largest_norm (default: as over a network)",
    )
    parser.add_argument(
        "--clip",
        type=float,
        default=default.clip_above,
        help="value of clip_above (default: as over a network)",
    )
    parser.add_argument(
        "--attack", type=float, help="factor by which the first client multiplies its update"
    )
    parser.add_argument(
        "--claim",
        type=int,
        default=0,
        help="number of examples that the first client claims; 0 for its true number (default: 0)",
    )
    parsed = parser.parse_args()
    if not all(each >= 1 for each in (parsed.weight, parsed.norm, parsed.clip)) or math.isnan(
        parsed.clip
    ):
        parser.error("limits should be at least 1")
    return parsed


if __name__ == "__main__":
    sys.exit(main())
