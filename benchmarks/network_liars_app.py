"""Flower app of ``network_liars.py``.

The folder of each client contains a file with its data, and a file with its behaviour.
"""

from pathlib import Path

import numpy as np
import torch
from flwr.app import Context, Message, MessageType
from flwr.clientapp import ClientApp
from torch.utils.data import TensorDataset

from fedclade import Adversary, Federation, one_client
from fedclade.flower import client_app, server_app_from_config

LIES = {
    "honest": None,
    "10⁹ examples": Adversary(kind="false_size"),
    "1,000 times its update": Adversary(kind="scaled", factor=1000.0),
}
"""Behaviour of a client by the content of the file ``lies`` in its folder.

With any other content, the client does not train, but replies to all other requests.
"""


def data(context: Context) -> Federation:
    """Read a client's data."""
    with np.load(_folder(context) / "data.npz") as held:
        x, y, tests, labels = (
            torch.from_numpy(held[name]) for name in ("x", "y", "tests", "labels")
        )
        mean, std = map(float, held["scale"])
    key = int(context.node_config["partition-id"])
    train, test = TensorDataset(x, y), TensorDataset(tests, labels)
    return one_client(train, test, labels=10, name=f"client-{key}", key=key, mean=mean, std=std)


def answer(message: Message, context: Context) -> Message:
    """Reply to a message as the client's behaviour states.

    Raises
    ------
    TimeoutError
        If the message is a training request and the client does not train.
    """
    word = (_folder(context) / "lies").read_text(encoding="utf-8")
    if word not in LIES and message.metadata.message_type == MessageType.TRAIN:
        raise TimeoutError("not there")
    return client_app("mlp", data, device="cpu", adversary=LIES.get(word))(message, context)


def _folder(context: Context) -> Path:
    return Path(str(context.node_config["folder"]))


server = server_app_from_config()
client = ClientApp()
for decorate in (client.train(), client.evaluate(), client.query()):
    decorate(answer)
