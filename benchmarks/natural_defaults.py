"""Train natural federations (data sets with real clients) with the default step size.

For each data set and method, the script trains on the raw files, without columns and rows with
missing cells, and writes one line of JSON with the main metric and the largest growth of a client's
loss. Run it as

    python benchmarks/natural_defaults.py ../shared/data/natural --out results.jsonl
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd

from fedclade import FedcladeError
from fedclade.config import check_config

MOST_MISSING = 0.3
"""Share of missing cells above which a column is left out, instead of the rows."""

SETS: dict[str, dict[str, Any]] = {
    "heart": {"files": "heart/*.csv", "target": "target"},
    "exam": {
        "files": "exam/exam.csv",
        "client": "school",
        "target": "normexam",
        "drop": ["student"],
    },
    "landmine": {"files": "landmine/*.csv", "target": "mine"},
    "parkinsons": {
        "files": "parkinsons/parkinsons_updrs.csv",
        "client": "subject#",
        "target": "total_UPDRS",
        "drop": ["motor_UPDRS"],
    },
    "student": {"files": "student/*.csv", "target": "G3", "task": "regression"},
    "tcga_event": {
        "files": "tcga_brca/brca.csv",
        "client": "region",
        "target": "E",
        "task": "binary",
        "drop": ["pid", "T", "fold"],
    },
    "tcga_days": {
        "files": "tcga_brca/brca.csv",
        "client": "region",
        "target": "T",
        "task": "regression",
        "drop": ["pid", "E", "fold"],
    },
    "wisdm": {
        "files": "wisdm/wisdm.csv",
        "client": "user",
        "target": "class",
        "drop": ["UNIQUE_ID"],
    },
}
"""The section ``[data]`` of each data set, and the name of its task."""


def copy_without_missing(source: Path, pattern: str, out: Path) -> None:
    """Copy CSV files without columns with many missing cells, and then without incomplete rows."""
    files = sorted(source.glob(pattern))
    tables = [pd.read_csv(file, na_values=["?"]) for file in files]
    together = pd.concat(tables)
    kept = together.columns[together.isna().mean() <= MOST_MISSING]
    for file, table in zip(files, tables, strict=True):
        table[kept].dropna().to_csv(out / file.name, index=False)


def measure(name: str, method: str, source: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Train on one data set with one method; return the results, or the error."""
    data = {key: value for key, value in SETS[name].items() if key != "task"} | options
    with tempfile.TemporaryDirectory() as folder:
        copy_without_missing(source, data["files"], Path(folder))
        data["files"] = f"{folder}/{Path(data['files']).name}"
        raw: dict[str, Any] = {"algorithm": {"name": method}, "data": data}
        if "task" in SETS[name]:
            raw["task"] = {"name": SETS[name]["task"]}
        began = time.perf_counter()
        try:
            config = check_config(raw)
            run = config.run(config.federation(), device="cpu", progress=False)
        except FedcladeError as error:
            return {"set": name, "method": method, "error": str(error)[:300]}
    metric = run.summary["metrics"][0]["name"]
    losses = run.clients.pivot(index="round", columns="client", values="loss")
    return {
        "set": name,
        "method": method,
        **options,
        "metric": metric,
        "mean": run.summary[metric]["mean"],
        "least": run.summary[metric]["min"],
        "largest": run.summary[metric]["max"],
        "clusters": run.summary["clusters"]["found"],
        "first_loss": float(run.metrics["loss_mean"].iloc[0]),
        "last_loss": float(run.metrics["loss_mean"].iloc[-1]),
        "largest_growth": float((losses / losses.cummin()).max().max()),
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    """Measure all data sets, or the named ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="folder with the data sets")
    parser.add_argument(
        "--sets", nargs="*", default=list(SETS), help="names of data sets (default: all)"
    )
    parser.add_argument(
        "--methods",
        nargs="*",
        default=["fedavg", "rcfl"],
        help="methods to run (default: fedavg rcfl)",
    )
    parser.add_argument(
        "--unscaled", action="store_true", help="do not standardize inputs and targets"
    )
    parser.add_argument("--out", type=Path, help="file to which lines are appended")
    chosen = parser.parse_args()
    options = {}
    if chosen.unscaled:
        options = {"standardize": "none", "standardize_target": "none"}
    for name in chosen.sets:
        for method in chosen.methods:
            line = json.dumps(measure(name, method, chosen.source, options))
            print(line, flush=True)
            if chosen.out is not None:
                with chosen.out.open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
