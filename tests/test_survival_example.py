"""The survival example: its loss and its score are those of plain loops, and it runs on the patients at hand."""

from __future__ import annotations

import math
import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import fedclade

EXAMPLE: dict[str, Any] = runpy.run_path(
    str(Path(__file__).parents[1] / "examples" / "survival.py"), run_name="survival"
)
# Found when the module is read: each test runs without the variable.
REAL_DATA = Path(
    os.environ.get("FEDCLADE_DATA_DIR") or Path(__file__).parents[2] / "shared" / "data"
)


def patients(seed: int, n: int = 30) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    times = torch.randint(1, 12, (n,), generator=draw).float()  # so that some are equal
    died = (torch.rand(n, generator=draw) > 0.4).float()
    return torch.randn(n, 1, generator=draw), {"time": times, "died": died}


def literal_cox(risk: Any, survival: Any) -> float:
    """Return Breslow's partial log-likelihood, divided by the number of deaths, by two loops."""
    total = 0.0
    times, died, risks = survival["time"].tolist(), survival["died"].tolist(), risk[:, 0].tolist()
    for i, time in enumerate(times):
        if died[i]:
            at_risk = [math.exp(risks[j]) for j, other in enumerate(times) if other >= time]
            total -= risks[i] - math.log(sum(at_risk))
    return total / max(1.0, sum(died))


def literal_concordance(risk: Any, survival: Any) -> float:
    right = pairs = 0.0
    times, died, risks = survival["time"].tolist(), survival["died"].tolist(), risk[:, 0].tolist()
    for i, time in enumerate(times):
        for j, other in enumerate(times):
            if died[i] and time < other:
                pairs += 1
                right += 1.0 if risks[i] > risks[j] else 0.5 if risks[i] == risks[j] else 0.0
    return right / pairs


@pytest.mark.parametrize("seed", range(5))
def test_loss_and_score_are_those_of_the_loops(seed: int):
    risk, survival = patients(seed)
    assert float(EXAMPLE["cox"](risk, survival)) == pytest.approx(
        literal_cox(risk, survival), rel=1e-5
    )
    rounded = risk.round()  # so that some are equal
    for each in (risk, rounded):
        assert EXAMPLE["concordance"](each, survival) == pytest.approx(
            literal_concordance(each, survival)
        )


def test_without_deaths_there_is_no_loss_and_no_score():
    risk, survival = patients(0)
    survival["died"] = torch.zeros(30)
    assert float(EXAMPLE["cox"](risk, survival)) == 0
    assert math.isnan(EXAMPLE["concordance"](risk, survival))


@pytest.mark.skipif(
    not REAL_DATA.is_dir(),
    reason="the real data is not here: set FEDCLADE_DATA_DIR to the folder that has it",
)
def test_it_runs_on_the_patients_of_six_regions():
    federation = EXAMPLE["regions"](REAL_DATA / "natural" / "tcga_brca" / "brca.csv")
    assert (len(federation), sum(federation.sizes.values())) == (6, 866)
    inputs = federation.pool.input_shape[0]
    run = fedclade.simulate(
        "fedavg",
        lambda seed: EXAMPLE["cox_model"](seed, inputs),
        federation,
        rounds=3,
        task=EXAMPLE["survival_task"](),
        engine="loop",
    )
    assert run.summary["concordance"]["clients"] == 6
