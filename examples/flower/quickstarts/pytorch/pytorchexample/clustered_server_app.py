"""ServerApp of the PyTorch quickstart."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from fedclade.flower import ClusteredStrategy

from pytorchexample.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train a model with all clients, and save it."""
    num_rounds = context.run_config["num-server-rounds"]
    fraction_evaluate = context.run_config["fraction-evaluate"]
    lr = context.run_config["learning-rate"]

    arrays = ArrayRecord(Net().state_dict())
    strategy = ClusteredStrategy("cfl", eps1=2.0, eps2=3.0, fraction_evaluate=fraction_evaluate)
    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": lr}),
        num_rounds=num_rounds,
    )
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")
    strategy.run.save(context.run_config["clusters-folder"], replace=True)
