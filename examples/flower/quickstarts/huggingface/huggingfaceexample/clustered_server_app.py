"""ServerApp of the Hugging Face quickstart."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from fedclade.flower import ClusteredStrategy

from huggingfaceexample.task import get_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train a model with all clients, and save it."""
    num_rounds = context.run_config["num-server-rounds"]
    fraction = context.run_config["fraction-train"]

    model = get_model()
    strategy = ClusteredStrategy("fl_hc", n_clusters=2, rounds_before=1, fraction_train=fraction)
    result = strategy.start(
        grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=num_rounds
    )
    model.load_state_dict(result.arrays.to_torch_state_dict())
    model.save_pretrained("final_model")
    strategy.run.save(context.run_config["clusters-folder"], replace=True)
