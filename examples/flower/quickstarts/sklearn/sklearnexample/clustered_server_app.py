"""ServerApp of the scikit-learn quickstart."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from fedclade.flower import ClusteredStrategy

from sklearnexample.task import create_model, get_model_params

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train a model with all clients."""
    num_rounds = context.run_config["num-server-rounds"]
    model = create_model(context.run_config["penalty-strength"])

    arrays = ArrayRecord(get_model_params(model))
    strategy = ClusteredStrategy("fl_hc", n_clusters=2, rounds_before=1)
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=num_rounds)
    print(result)
    strategy.run.save(context.run_config["clusters-folder"], replace=True)
