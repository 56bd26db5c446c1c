"""Load forecasting: 60 homes forecast their electricity use of the next hour from the last 24.

Each home follows one of three daily patterns: people at work, people at home, an electric car at
night. The server does not know which; ``rcfl`` finds the groups from the model updates.

python examples/households.py
"""

import numpy as np
from torch import nn

import fedclade
from fedclade.report.page import write_report

HOURS, PAST = 24 * 28, 24
PATTERNS = {
    "at work": [(7, 2.0, 1.0), (19, 3.0, 2.0)],
    "at home": [(12, 5.0, 1.5)],
    "electric car": [(2, 2.0, 3.0)],
}
"""Peaks of each pattern: hour of the day, width in hours, and height in kW."""


def usage(peaks: list[tuple[int, float, float]], draw: np.random.Generator) -> np.ndarray:
    """Return the load of a home in kW, for each hour of four weeks."""
    hour = np.arange(HOURS) % 24
    apart = [np.minimum(abs(hour - at), 24 - abs(hour - at)) for at, _, _ in peaks]
    load = 0.4 + sum(
        high * np.exp(-((d / wide) ** 2)) for d, (_, wide, high) in zip(apart, peaks, strict=True)
    )
    return load * draw.uniform(0.95, 1.05) + 0.1 * draw.normal(size=HOURS)


def examples(load: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the examples of a home: inputs ``[n, 26]`` and targets ``[n]``.

    The inputs are noisy measurements of the last 24 hours, and the hour of the day as sine and
    cosine. The target is the load of the next hour.
    """
    starts = np.arange(HOURS - PAST)
    hour = 2 * np.pi * (starts + PAST) / 24
    past = load[starts[:, None] + np.arange(PAST)] + 0.5 * np.random.default_rng(0).normal(
        size=(len(starts), PAST)
    )
    return np.column_stack([past, np.sin(hour), np.cos(hour)]).astype(np.float32), load[
        PAST:
    ].astype(np.float32)


def households(homes: int = 60, seed: int = 0) -> fedclade.Federation:
    """Return a federation of homes, with the last week of each home as test data."""
    draw, clients, truth = np.random.default_rng(seed), {}, {}
    for i in range(homes):
        pattern = i % len(PATTERNS)
        x, y = examples(usage([*PATTERNS.values()][pattern], draw))
        clients[f"home-{i}"] = ((x[:-168], y[:-168]), (x[-168:], y[-168:]))
        truth[f"home-{i}"] = pattern
    return fedclade.federation(clients, "regression", name="households", true_clusters=truth)


def network(seed: int) -> nn.Module:
    """Return the initial model: a small multilayer perceptron."""
    return fedclade.build_model(
        "mlp", input_shape=(PAST + 2,), outputs=1, seed=seed, arguments={"hidden": 32}
    )


if __name__ == "__main__":
    local, task = fedclade.LocalTraining(batch_size=32, lr=0.02), fedclade.Task(metrics=["mae"])
    for name in ("fedavg", "rcfl"):
        run = fedclade.simulate(name, network, households(), rounds=20, local=local, task=task)
        print(
            f"{name:7} {run.summary['clusters']['found']} clusters, mae {run.summary['mae']['mean']:.3f} kW"
        )
        print("report:", write_report(run, f"households-{name}.html"))
