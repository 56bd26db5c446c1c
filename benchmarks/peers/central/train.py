"""Reference without federation: a plain torch module trains on the samples of a round.

It trains in large batches, as a practical limit of the machine.
"""

from __future__ import annotations

import torch
import work
from torch.nn import functional

run = work.Run()
batch = int(run.way.split()[1])
model = work.module(run.task)
optimizer = torch.optim.SGD(model.parameters(), lr=work.LR)
x, y = (
    torch.cat(parts)
    for parts in zip(*(work.client(k) for k in range(run.task.clients)), strict=True)
)
for _ in range(run.task.rounds + 1):
    for rows in torch.randperm(len(x)).split(batch):
        optimizer.zero_grad()
        functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    run.round_over(model.state_dict)
run.report("torch")
