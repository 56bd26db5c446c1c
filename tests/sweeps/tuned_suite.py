"""A small suite whose methods are tuned, for tests: two clients with a table of numbers each."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from fedclade.config import Scenario, read_scenarios

FILES = ("clinics/a.csv", "clinics/b.csv")

SUITE = """
rounds = 2
evaluate_every = 1
evaluate_validation = true
engine = "loop"
seeds = 2
first_seed = 5
model = { name = "mlp", hidden = 4 }

[tuning]
seed = 7
step_sizes = [0.02, 0.1]

[tuning.settings]
finetune = { epochs = [2, 3] }

[algorithms]
fedavg = {}
finetune = {}

[sets.clinics]
task.name = "regression"
data = { files = "clinics/*.csv", target = "y", validation_fraction = 0.2 }

[sets.clinics.source]
about = "two clinics"
licence = "CC0"
address = "https://example.org/clinics"
"""


def write_suite(folder: Path, text: str = SUITE) -> Path:
    """Write the data of the suite to a folder, and the suite with its checksums; return its path."""
    generator = np.random.default_rng(0)
    checksums: list[str] = []
    for shift, name in enumerate(FILES):
        x = generator.normal(size=(60, 2))
        y = x[:, 0] * (1 + shift) + 0.1 * generator.normal(size=60)
        lines = [f"{a:.4f},{b:.4f},{c:.4f}" for (a, b), c in zip(x, y, strict=True)]
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(["p,q,y", *lines]) + "\n", encoding="utf-8")
        checksums.append(f'"{name}" = "{hashlib.sha256(path.read_bytes()).hexdigest()}"')
    suite = folder / "small.toml"
    table = "\n".join(["[sets.clinics.source.sha256]", *checksums])
    suite.write_text(f"{text}\n{table}\n", encoding="utf-8")
    return suite


def scenarios_in(folder: Path) -> list[Scenario]:
    """Write the suite to a folder, and read it."""
    return read_scenarios(write_suite(folder))
