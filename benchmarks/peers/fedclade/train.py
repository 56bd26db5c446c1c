"""FedAvg in fedclade, with the fastest engine, on its built-in model or on the plain module."""

from __future__ import annotations

import fedclade  # isort: skip  (before torch, whose threads then sleep while they wait)

import os

import work
from torch import Tensor

from fedclade.core.params import Layout
from fedclade.models import build_model

run = work.Run()
model = work.module(run.task)
if run.way == "its own model":
    start = model.state_dict().values()
    model = build_model(run.task.model, input_shape=(1, 28, 28), outputs=10)
    model.load_state_dict(dict(zip(model.state_dict(), start, strict=True)))
layout = Layout.of(model)
# Clients need test data; they use it only in the last round, see evaluate_every.
test = tuple(part[:1] for part in work.test_data())
federation = fedclade.federation(
    {str(k): (work.client(k), test) for k in range(run.task.clients)}, labels=10
)
rounds = run.task.rounds + 2  # the last round has an evaluation, and is not timed


def over(_: object, tree: fedclade.ParameterTree) -> None:
    """Record the time at which the model of a round is available."""

    def state() -> dict[str, Tensor]:
        vector = layout.unflatten(tree.leaves[0].params)
        return {name: vector[name] for name in model.state_dict()}

    run.round_over(state)


done = fedclade.simulate(
    "fedavg",
    model,
    federation,
    # Only the engine loop calls the module in each step, so that steps can be counted.
    engine="loop" if "PEERS_STEPS" in os.environ else "auto",
    device=work.device(),
    rounds=rounds,
    evaluate_every=rounds,
    local=fedclade.LocalTraining(epochs=1, batch_size=work.BATCH, lr=work.LR),
    on_round=over,
)
run.report("fedclade", engine=done.summary.get("engine"))
