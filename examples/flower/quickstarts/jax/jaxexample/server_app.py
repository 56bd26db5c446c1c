"""ServerApp of the JAX quickstart."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from jaxexample.task import create_params, get_params

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train a model with all clients."""
    num_rounds = context.run_config["num-server-rounds"]

    arrays = ArrayRecord(get_params(create_params()))
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=1.0)
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=num_rounds)
    print(result)
