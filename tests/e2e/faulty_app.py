"""The example's app, with clients that do on command what real ones do by accident.

A client holds its answer of round R as long as there is a file ``hold-R`` in its folder, and answers NaN in round R if
there is ``spoil-R``. Copied into an app's folder in place of ``fedclade_app.py``.
"""

import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

from fedclade.flower import client_app_from_config, server_app_from_config

server = server_app_from_config()
honest = client_app_from_config()
client = ClientApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    """Train, and keep the answer back or spoil it if told to."""
    folder, asked = Path(str(context.node_config["folder"])), message.content["fedclade"]["round"]
    reply = honest(message, context)
    if (hold := folder / f"hold-{asked}").exists():
        (folder / f"holding-{asked}").touch()
        while hold.exists():
            time.sleep(0.1)
    if (folder / f"spoil-{asked}").exists():
        vectors = reply.content["vectors"]
        assert isinstance(vectors, ArrayRecord)
        vectors["update"].data = np.full(len(vectors["update"].data) // 4, np.nan, "<f4").tobytes()
    return reply


@client.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate, as asked."""
    return honest(message, context)


@client.query()
def query(message: Message, context: Context) -> Message:
    """Answer, as asked."""
    return honest(message, context)
