"""ClientApp of the JAX quickstart. It is the same with FedAvg and with clusters."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from jaxexample.task import create_params, get_params, load_data, measure, set_params
from jaxexample.task import train as jax_train

app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    """Train the received model on local data."""
    params = set_params(create_params(), msg.content["arrays"].to_numpy_ndarrays())

    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    trainset, _ = load_data(partition_id, num_partitions)

    lr = context.run_config["learning-rate"]
    batch_size = context.run_config["batch-size"]
    params, loss = jax_train(params, trainset, batch_size, lr)

    metrics = {"train_loss": loss, "num-examples": len(trainset[0])}
    content = RecordDict(
        {"arrays": ArrayRecord(get_params(params)), "metrics": MetricRecord(metrics)}
    )
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Evaluate the received model on local data."""
    params = set_params(create_params(), msg.content["arrays"].to_numpy_ndarrays())

    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    _, (images, labels) = load_data(partition_id, num_partitions)

    loss, accuracy = measure(params, images, labels)
    metrics = {"eval_loss": float(loss), "eval_acc": float(accuracy), "num-examples": len(images)}
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)
