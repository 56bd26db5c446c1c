"""What is exported for a client is what it was served with, whatever the method."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedclade import LocalTraining, Run, simulate
from fedclade.algorithms import ALGORITHMS, build_algorithm
from fedclade.runs import export_model, load_export
from tests.tiny import FEATURES, LABELS, federation_of, perceptron

TRUTH = [0, 1, 2, 3] * 2

OPTIONS: dict[str, dict] = {
    "cfl": {"eps2": 1e-6, "split_rounds": (2,)},
    "rcfl": {"level": 0.5, "check_every": 2},
    "fl_hc": {"rounds_before": 1, "n_clusters": 2},
    "fedgroup": {"groups": 2},
    "flexcfl": {"groups": 2, "pretrain_steps": 2},
    "ifca": {"clusters": 2},
    "fesem": {"clusters": 2},
    "fedsoft": {"clusters": 2, "selection": 2},
    "fedem": {"clusters": 2},
    "fedrc": {"clusters": 2},
    "pacfl": {"n_clusters": 2},
    "stocfl": {"tau": 0.3, "anchor_epochs": 1},
    "flux": {"earliest": 1, "latest": 2},
    "apfl": {"adaptive": True},
    "per_fedavg": {"alpha": 0.3},
}
MORE = {
    "cfl, fall-back": ("cfl", {"eps2": 1e-6, "split_rounds": (2,), "fallback": True}),
    "rcfl, personal": ("rcfl", {"level": 0.5, "check_every": 2, "personalize": True, "fallback": True}),
    "per_fedavg, hessian": ("per_fedavg", {"alpha": 0.3, "variant": "HF", "adapt_steps": 3}),
}
METHODS = {**{name: (name, OPTIONS.get(name, {})) for name in ALGORITHMS}, **MORE}


def normed(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, LABELS))


FEDERATION = federation_of(TRUTH)


def ran(name: str, options: dict, model=perceptron, **settings) -> Run:
    settings = {"local": LocalTraining(epochs=2, batch_size=10, lr=0.3), "rounds": 3, "engine": "loop", **settings}
    algorithm = build_algorithm(name, options, dict(enumerate(TRUTH)))
    many = algorithm.initial_models > 1
    return simulate(algorithm, model if many else model(), FEDERATION, **settings)


def accuracy(module: nn.Module, client: int) -> float:
    x, y = FEDERATION.examples(client, "test")
    with torch.no_grad():
        return float((module.eval()(x).argmax(1) == y).double().mean())


@pytest.mark.parametrize("method", METHODS)
def test_every_client_of_every_method_gets_what_it_was_served_with(method, tmp_path):
    """Clients that have never trained, too, where a round has half of them."""
    name, options = METHODS[method]
    model = normed if name in ("fedbn", "fedem") else perceptron
    fraction = 1.0 if name == "private_choice" else 0.4
    more = {"fedbuff": {}, "rcfl": {"client_fraction": 1.0}}.get(name, {"client_fraction": fraction})
    run = ran(name, options, model, **more)
    served = {row["client"]: row for row in run.client_rows if row["round"] == run.summary["rounds"]}
    assert served.keys() == set(FEDERATION.ids)
    Run.load(run.save(tmp_path / "run"))
    for client, row in served.items():
        path = export_model(run, tmp_path / f"{client}.safetensors", client=client)
        module = load_export(path, model(seed=9))
        assert accuracy(module, client) == pytest.approx(row["accuracy"]), f"client {client}"
