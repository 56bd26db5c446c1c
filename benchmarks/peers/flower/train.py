"""FedAvg in Flower's simulation, with two actors of one core each."""

from __future__ import annotations

import os

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import torch
import work
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn import functional

run = work.Run()
task = run.task
client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train as in Flower's PyTorch examples: with a new module and optimizer for each message."""
    work.use_threads(1)
    model = work.module(task)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    model.train()
    data = torch.utils.data.TensorDataset(*work.client(int(context.node_config["partition-id"])))
    optimizer = torch.optim.SGD(model.parameters(), lr=work.LR)
    for x, y in torch.utils.data.DataLoader(data, work.BATCH, shuffle=True):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": len(data)}),
    }
    return Message(content=RecordDict(content), reply_to=message)


class Timed(FedAvg):
    """FedAvg that records the times of rounds."""

    def aggregate_train(self, *arguments: object, **named: object) -> object:
        """Aggregate, then record the time."""
        arrays, metrics = super().aggregate_train(*arguments, **named)
        run.round_over(arrays.to_torch_state_dict)
        return arrays, metrics


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    strategy = Timed(fraction_evaluate=0.0, min_available_nodes=task.clients)
    strategy.start(grid, ArrayRecord(work.module(task).state_dict()), num_rounds=task.rounds + 1)


run_simulation(
    server_app,
    client_app,
    num_supernodes=task.clients,
    backend_config={
        "init_args": {"num_cpus": 2, "include_dashboard": False},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    },
)
run.report("flwr")
