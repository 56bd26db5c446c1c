"""Model and data of the scikit-learn quickstart."""

from functools import cache

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

LABELS = np.arange(10)


def create_model(penalty_strength):
    """Return a logistic regression with initial parameters."""
    model = LogisticRegression(C=penalty_strength, max_iter=5, warm_start=True)
    model.classes_ = LABELS
    model.coef_ = np.zeros((10, 64))
    model.intercept_ = np.zeros(10)
    return model


def get_model_params(model):
    """Return the parameters of a model as arrays."""
    return [model.coef_, model.intercept_]


def set_model_params(model, params):
    """Set the parameters of a model."""
    model.coef_, model.intercept_ = params
    return model


load_digits_once = cache(load_digits)


def load_data(partition_id, num_partitions):
    """Load the training and the test data of a client.

    Clients with an odd number use other labels for the digits. This is what clusters can find.
    """
    digits = load_digits_once()
    inputs = digits.data[partition_id::num_partitions] / 16
    labels = digits.target[partition_id::num_partitions]
    if partition_id % 2 == 1:
        labels = 9 - labels
    split = int(0.8 * len(inputs))
    return inputs[:split], labels[:split], inputs[split:], labels[split:]
