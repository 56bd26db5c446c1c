"""Model, data and training of the JAX quickstart."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

HIDDEN = 32


def create_params(seed=0):
    """Return the initial parameters of a perceptron, as a tree of arrays."""
    first, second = jax.random.split(jax.random.PRNGKey(seed))
    return {
        "dense": {"kernel": jax.random.normal(first, (64, HIDDEN)) / 8, "bias": jnp.zeros(HIDDEN)},
        "head": {
            "kernel": jax.random.normal(second, (HIDDEN, 10)) / HIDDEN**0.5,
            "bias": jnp.zeros(10),
        },
    }


def get_params(params):
    """Return the parameters as a list of NumPy arrays."""
    return [np.array(leaf) for leaf in jax.tree_util.tree_leaves(params)]


def set_params(params, arrays):
    """Return a tree like ``params`` with other arrays."""
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(params), arrays)


def apply_model(params, images):
    """Return the logits of images ``[B, 64]``."""
    hidden = jax.nn.relu(images @ params["dense"]["kernel"] + params["dense"]["bias"])
    return hidden @ params["head"]["kernel"] + params["head"]["bias"]


@jax.jit
def measure(params, images, labels):
    """Return the mean loss and the accuracy."""
    logits = apply_model(params, images)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
    return losses.mean(), (logits.argmax(1) == labels).mean()


@jax.jit
def update(params, images, labels, lr):
    """Return the parameters after a step, and the loss before it."""
    loss, grads = jax.value_and_grad(lambda p: measure(p, images, labels)[0])(params)
    return jax.tree_util.tree_map(lambda p, g: p - lr * g, params, grads), loss


def train(params, trainset, batch_size, lr):
    """Train for an epoch; return the parameters and the mean loss."""
    images, labels = trainset
    losses = []
    for start in range(0, len(images) - batch_size + 1, batch_size):
        batch = slice(start, start + batch_size)
        params, loss = update(params, images[batch], labels[batch], lr)
        losses.append(float(loss))
    return params, float(np.mean(losses))


load_digits_once = cache(load_digits)


def load_data(partition_id, num_partitions):
    """Load the training and the test data of a client.

    Clients with an odd number use other labels for the digits. This is what clusters can find.
    """
    digits = load_digits_once()
    images = np.float32(digits.data[partition_id::num_partitions] / 16)
    labels = digits.target[partition_id::num_partitions]
    if partition_id % 2 == 1:
        labels = 9 - labels
    split = int(0.8 * len(images))
    return (images[:split], labels[:split]), (images[split:], labels[split:])
