"""The example's app, with clients that do on command what real ones do by accident, or on purpose.

A client holds its answer of round R as long as there is a file ``hold-R`` in its folder, and answers NaN in round R if
there is ``spoil-R``. With ``forge-R`` it signs with a key that is not its own, as another would who answers in its
name; with ``garble-R`` what it sends is no protobuf; with ``bloat-R`` its update names its one piece 2,000 times.
Copied into an app's folder in place of ``fedclade_app.py``.
"""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.supercore.inflatable.inflatable_object import add_header_to_object_body

from fedclade.flower import client_app_from_config, server_app_from_config
from fedclade.flower.signing import Key, key_of, signed
from fedclade.flower.wire import Content

server = server_app_from_config()
honest = client_app_from_config()
client = ClientApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    """Train, and keep the answer back or spoil it if told to."""
    folder = Path(str(context.node_config["folder"]))
    # some questions of a sum are of no round
    asked = Content.of(message.content).values.get("round", "none")
    reply = honest(message, context)
    if (hold := folder / f"hold-{asked}").exists():
        (folder / f"holding-{asked}").touch()
        while hold.exists():
            time.sleep(0.1)
    if (folder / f"spoil-{asked}").exists():
        vectors = reply.content["vectors"]
        assert isinstance(vectors, ArrayRecord)
        vectors["update"].data = np.full(len(vectors["update"].data) // 4, np.nan, "<f4").tobytes()
        reply.content = signed(reply.content, message, key_of(context))
    if (folder / f"forge-{asked}").exists():
        reply.content = signed(reply.content, message, Key.new())
    # The process of a ClientApp ends with its answer: what is done to Flower here is done to that alone.
    if (folder / f"garble-{asked}").exists():
        ConfigRecord.deflate = lambda self: add_header_to_object_body(b"\xff\xff\xff", self)  # type: ignore[method-assign]
    if (folder / f"bloat-{asked}").exists():
        Array.deflate = bloated  # type: ignore[method-assign]
    return reply


def bloated(array: Array) -> bytes:
    """Return an array that is said to be its first piece, 2,000 times."""
    told: dict[str, Any] = {"dtype": array.dtype, "shape": array.shape, "stype": array.stype}
    return add_header_to_object_body(
        json.dumps({**told, "arraychunk_ids": 2_000 * [0]}).encode(), array
    )


@client.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate, as asked."""
    return honest(message, context)


@client.query()
def query(message: Message, context: Context) -> Message:
    """Answer, as asked."""
    return honest(message, context)
