"""The app of ``network_liars.py``: a client's data is a file in its folder, and so is how it lies, if it does."""

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
"""By what the file ``lies`` in a client's folder says; with any other word it does all but train."""


def data(context: Context) -> Federation:
    """Read a client's own data."""
    with np.load(_folder(context) / "data.npz") as held:
        x, y, tests, labels = (
            torch.from_numpy(held[name]) for name in ("x", "y", "tests", "labels")
        )
        mean, std = map(float, held["scale"])
    key = int(context.node_config["partition-id"])
    train, test = TensorDataset(x, y), TensorDataset(tests, labels)
    return one_client(train, test, labels=10, name=f"client-{key}", key=key, mean=mean, std=std)


def answer(message: Message, context: Context) -> Message:
    """Answer as an honest client does, or as a liar."""
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
