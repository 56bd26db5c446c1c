"""ServerApp of the JAX quickstart."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from fedclade.flower import ClusteredStrategy

from jaxexample.task import create_params, get_params

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train a model with all clients."""
    num_rounds = context.run_config["num-server-rounds"]

    arrays = ArrayRecord(get_params(create_params()))
    strategy = ClusteredStrategy("fesem", clusters=2)
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=num_rounds)
    print(result)
    strategy.run.save(context.run_config["clusters-folder"], replace=True)
