"""FedAvg in fluke, with its own server and clients, and without evaluation."""

from __future__ import annotations

import vision  # noqa: F401  # isort: skip  (before fluke, which imports torchvision)

import torch
import work
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.server import Server
from fluke.utils import FederationObserver

run = work.Run()
work.use_threads(int(run.way.split()[0]))


class Clock(FederationObserver):
    """Observer that records the times of rounds."""

    def end_round(self, round: int) -> None:  # noqa: A002
        """Record the end of a round."""
        run.round_over(algorithm.server.model.state_dict)


FlukeENV().set_seed(0)
FlukeENV().set_device("cpu")
FlukeENV().set_inmemory(True)
FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, server=False, locals=False)
optimizer = OptimizerConfigurator(
    optimizer_cfg=DDict(name="SGD", lr=work.LR),
    scheduler_cfg=DDict(name="StepLR", step_size=1, gamma=1.0),
)
clients = []
for k in range(run.task.clients):
    data = FastDataLoader(*work.client(k), num_labels=10, batch_size=work.BATCH, shuffle=True)
    clients.append(Client(k, data, None, optimizer, torch.nn.CrossEntropyLoss(), local_epochs=1))
server = Server(work.module(run.task), None, clients, weighted=True)
algorithm = FedAVG(run.task.clients, None, None, clients=clients, server=server)
algorithm.set_callbacks(Clock())
algorithm.run(n_rounds=run.task.rounds + 1, eligible_perc=1.0)
run.report("fluke-fl")
