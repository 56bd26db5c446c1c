"""Twelve hospitals, each with a CSV file, predict which patients will be readmitted.

The example writes made-up files and the config ``hospitals.toml``, runs the config and writes a
report. With real files you need only the config: fedclade run hospitals.toml

In six hospitals older patients are readmitted more often, in the other six younger patients; the
server does not know which. Some cells are empty, and one column, which the config excludes,
identifies the patient.

python examples/hospitals.py [FOLDER]

FOLDER is hospitals-example by default. A folder of an earlier run of this script is replaced.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

CONFIG = """
rounds = 15
algorithm.name = "rcfl"
model.name = "mlp"
local = { optimizer = "adam", lr = 0.01, batch_size = 16, epochs = 2 }
task = { name = "binary", metrics = ["auroc", "f1"] }

[data]
files = "hospitals/*.csv"
target = "readmitted"
exclude = ["patient"]
missing = "mean"
"""


def write_hospitals(folder: Path, hospitals: int = 12, patients: int = 200, seed: int = 0) -> Path:
    """Write the CSV files of the hospitals and the config; return the path of the config."""
    draw = np.random.default_rng(seed)
    # Patient numbers and empty cells have a generator of their own, so that the other columns do
    # not depend on them.
    added = np.random.default_rng([seed, 1])
    (folder / "hospitals").mkdir(parents=True, exist_ok=True)
    for i in range(hospitals):
        age, bmi = draw.normal(60, 12, patients), draw.normal(27, 4, patients)
        ward = draw.choice(["cardiology", "surgery", "geriatrics"], patients)
        risk = (1 if i % 2 else -1) * (age - 60) / 8 + (bmi - 27) / 6 + (ward == "surgery")
        readmitted = draw.random(patients) < 1 / (1 + np.exp(-1.5 * risk))
        columns = [
            [f"H{i:02}-{number:04}" for number in added.permutation(10_000)[:patients]],
            age.round(1),
            with_empty_cells(bmi.round(1), 0.08, added),
            with_empty_cells(ward, 0.03, added),
            np.where(readmitted, "yes", "no"),
        ]
        rows = zip(*columns, strict=True)
        lines = ["patient,age,bmi,ward,readmitted", *(",".join(map(str, row)) for row in rows)]
        (folder / "hospitals" / f"hospital-{i:02}.csv").write_text("\n".join(lines) + "\n")
    config = folder / "hospitals.toml"
    config.write_text(CONFIG)
    return config


def with_empty_cells(column: np.ndarray, share: float, draw: np.random.Generator) -> np.ndarray:
    """Return a column as strings, of which about the given share are empty."""
    return np.where(draw.random(len(column)) < share, "", column.astype(str))


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "hospitals-example")
    if folder.exists():
        if not (folder / "hospitals.toml").exists():
            sys.exit(
                f"{folder} exists, and is not from an earlier run of this script; name another"
            )
        shutil.rmtree(folder)
    config = write_hospitals(folder)
    for command in (
        ["run", str(config), "--out", str(folder / "run")],
        ["report", str(folder / "run")],
    ):
        subprocess.run([sys.executable, "-m", "fedclade", *command], check=True)
