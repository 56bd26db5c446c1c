"""ServerApp of the scikit-learn quickstart."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from sklearnexample.task import create_model, get_model_params

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train a model with all clients."""
    num_rounds = context.run_config["num-server-rounds"]
    model = create_model(context.run_config["penalty-strength"])

    arrays = ArrayRecord(get_model_params(model))
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=1.0)
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=num_rounds)
    print(result)
