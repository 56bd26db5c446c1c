"""Survival of patients with breast cancer in six regions, by a Cox model.

The data are 1,088 patients of The Cancer Genome Atlas, divided into regions and into training and
test patients as in FLamby (Ogier du Terrail et al. 2022, Fed-TCGA-BRCA). Download ``brca.csv`` from
the folder ``flamby/datasets/fed_tcga_brca`` of FLamby's repository, with a column ``region``, or
name the file by its path:

python examples/survival.py brca.csv
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.csv
import torch
from torch import Tensor, nn

import fedclade

NOT_INPUTS = ("pid", "E", "T", "fold", "region")
SEEDS = range(5)
METHODS = ("local", "fedavg", "ditto", "rcfl")


def cox(risk: Tensor, survival: dict[str, Tensor]) -> Tensor:
    """Return the negative partial log-likelihood of a batch (Cox 1972, Breslow's ties).

    Parameters
    ----------
    risk
        Logarithms of the relative risks, ``[B, 1]``.
    survival
        ``time`` in days ``[B]``, and ``died``: 1 if the patient died at this time, 0 if the patient
        lived at least until then.
    """
    order = survival["time"].argsort(descending=True)
    risk, died = risk[order, 0], survival["died"][order]
    at_risk = risk.logcumsumexp(0)  # patients 0 to i lived until the time of patient i
    times = survival["time"][order]
    # Patients with the same time are at risk at the same time.
    last = torch.searchsorted(-times, -times, right=True) - 1
    return -((risk - at_risk[last]) * died).sum() / died.sum().clamp(min=1)


def concordance(risk: Tensor, survival: dict[str, Tensor]) -> float:
    """Return Harrell's concordance index: the share of pairs that the risks order correctly.

    A pair counts if the patient with the shorter time died; equal risks count as half. The result
    is NaN if there is no such pair.
    """
    time, died = survival["time"], survival["died"] > 0
    is_pair = (time[:, None] < time) & died[:, None]
    order = (risk > risk.T).double() + 0.5 * (risk == risk.T)
    return float(order[is_pair].mean())


def regions(path: Path) -> fedclade.Federation:
    """Return the federation of regions, with the training and test patients of FLamby."""
    table = pyarrow.csv.read_csv(path)
    names = [name for name in table.column_names if name not in NOT_INPUTS]
    x = np.column_stack([table[name].to_numpy() for name in names]).astype(np.float32)
    y = {"time": table["T"].to_numpy(), "died": table["E"].to_numpy()}
    is_train = np.array(table["fold"].to_pylist()) == "train"
    region = table["region"].to_numpy()

    def part(rows: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        return x[rows], {name: values[rows].astype(np.float32) for name, values in y.items()}

    clients = {
        f"region {k}": (part((region == k) & is_train), part((region == k) & ~is_train))
        for k in np.unique(region).tolist()
    }
    return fedclade.federation(clients, name="tcga_brca", standardize="federated")


def survival_task() -> fedclade.Task:
    """Return the task: Cox's loss, and the concordance index."""
    index = fedclade.Metric("concordance", higher_is_better=True, share=True, whole=concordance)
    return fedclade.Task("regression", loss=cox, loss_over="batch", metrics=[index])


def cox_model(seed: int, inputs: int) -> nn.Module:
    """Return a linear model of the logarithm of the relative risk."""
    torch.manual_seed(seed)
    return nn.Linear(inputs, 1)


def main(path: Path) -> None:
    """Train by several methods, and print the mean concordance index of the regions' test patients."""
    federation = regions(path)
    model = partial(cox_model, inputs=federation.pool.input_shape[0])
    local = fedclade.LocalTraining(batch_size=64, lr=0.01, weight_decay=0.01)
    for method in METHODS:
        scores: list[float] = []
        for seed in SEEDS:
            run = fedclade.simulate(
                method,
                model,
                federation,
                rounds=30,
                seed=seed,
                local=local,
                task=survival_task(),
                evaluate_every=30,
                references=False,
                engine="loop",
            )
            scores.append(run.summary["concordance"]["mean"])
        print(f"{method:8} concordance {np.mean(scores):.3f} ± {np.std(scores):.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
