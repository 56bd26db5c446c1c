"""ClientApp of the scikit-learn quickstart. It is the same with FedAvg and with clusters."""

import warnings

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.metrics import log_loss

from sklearnexample.task import LABELS, create_model, get_model_params, load_data, set_model_params

app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    """Train the received model on local data."""
    model = create_model(context.run_config["penalty-strength"])
    set_model_params(model, msg.content["arrays"].to_numpy_ndarrays())

    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    inputs, labels, _, _ = load_data(partition_id, num_partitions)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few iterations do not converge
        model.fit(inputs, labels)

    metrics = {
        "train_logloss": log_loss(labels, model.predict_proba(inputs), labels=LABELS),
        "num-examples": len(inputs),
    }
    content = RecordDict(
        {"arrays": ArrayRecord(get_model_params(model)), "metrics": MetricRecord(metrics)}
    )
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Evaluate the received model on local data."""
    model = create_model(context.run_config["penalty-strength"])
    set_model_params(model, msg.content["arrays"].to_numpy_ndarrays())

    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    _, _, inputs, labels = load_data(partition_id, num_partitions)

    metrics = {
        "test_logloss": log_loss(labels, model.predict_proba(inputs), labels=LABELS),
        "accuracy": model.score(inputs, labels),
        "num-examples": len(inputs),
    }
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)
