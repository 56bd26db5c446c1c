"""What is exported for a client is what it was served with, whatever the method."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fedclade import (
    CFL,
    FedEM,
    LocalTraining,
    LoRA,
    ModelError,
    ModelMixture,
    Run,
    RunError,
    export_adapter,
    export_model,
    load_export,
    simulate,
)
from fedclade.algorithms import ALGORITHMS, build_algorithm
from fedclade.tasks import mix_outputs
from tests.tiny import FEATURES, LABELS, federation_of, perceptron, task_federation

TRUTH = [0, 1, 2, 3] * 2

OPTIONS: dict[str, dict] = {
    "cfl": {"eps2": 1e-6, "split_rounds": (2,)},
    "rcfl": {"level": 0.5, "check_every": 2},
    "fl_hc": {"rounds_before": 1, "n_clusters": 2},
    "fedgroup": {"groups": 2},
    "flexcfl": {"groups": 2, "pretrain_steps": 2},
    "ifca": {"clusters": 2},
    "clove": {"clusters": 2},
    "ocfl": {"method": "hdbscan", "min_cluster_size": 2},
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
    "rcfl, personal": (
        "rcfl",
        {"level": 0.5, "check_every": 2, "personalize": True, "fallback": True},
    ),
    "per_fedavg, hessian": ("per_fedavg", {"alpha": 0.3, "variant": "HF", "adapt_steps": 3}),
}
METHODS = {**{name: (name, OPTIONS.get(name, {})) for name in ALGORITHMS}, **MORE}


def normed(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, LABELS)
    )


FEDERATION = federation_of(TRUTH)


def ran(name: str, options: dict, model=perceptron, **settings) -> Run:
    settings = {
        "local": LocalTraining(epochs=2, batch_size=10, lr=0.3),
        "rounds": 3,
        "engine": "loop",
        **settings,
    }
    algorithm = build_algorithm(name, options, dict(enumerate(TRUTH)))
    many = algorithm.requires.initial_models > 1
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
    more = {"fedbuff": {}, "rcfl": {"client_fraction": 1.0}}.get(
        name, {"client_fraction": fraction}
    )
    run = ran(name, options, model, **more)
    served = {
        row["client"]: row for row in run.client_rows if row["round"] == run.summary["rounds"]
    }
    assert served.keys() == set(FEDERATION.ids)
    run = Run.load(run.save(tmp_path / "run"))
    for client, row in served.items():
        path = export_model(run, tmp_path / f"{client}.safetensors", client=client)
        module = load_export(path, model(seed=9))
        assert accuracy(module, client) == pytest.approx(row["accuracy"]), f"client {client}"


def card_of(path: Path) -> dict:
    return json.loads(path.with_suffix(".json").read_text())


@pytest.fixture(scope="module")
def mixture_run() -> Run:
    """A run of FedEM, in which some clients have never trained."""
    run = ran("fedem", {"clusters": 3}, client_fraction=0.3)
    assert 0 < len(run.tree.stragglers.get(0, ())) < len(FEDERATION)
    return run


def test_a_mixture_is_one_state_dict_with_the_client_s_weights(mixture_run, tmp_path):
    path = export_model(mixture_run, tmp_path / "two.safetensors", client=2)
    tensors, leaves = load_file(path), mixture_run.tree.leaves
    assert torch.equal(tensors.pop("weights"), mixture_run.kept[2]["mixture"])
    assert len(leaves) == 3
    for number, leaf in enumerate(leaves):
        for name, tensor in mixture_run.layout.state_dict(leaf.model).items():
            assert torch.equal(tensors.pop(f"models.{number}.{name}"), tensor)
    assert not tensors


def test_the_card_of_a_mixture_says_what_it_is_and_loads_it_without_fedclade(
    mixture_run, tmp_path, monkeypatch
):
    path = export_model(mixture_run, tmp_path / "two.safetensors", client=2)
    card, page = card_of(path), path.with_suffix(".md").read_text()
    weights = mixture_run.kept[2]["mixture"].tolist()
    assert card["mixture"] == {"nodes": [1, 2, 3], "weights": weights, "task": "classification"}
    (row,) = [row for row in mixture_run.client_rows if (row["round"], row["client"]) == (3, 2)]
    assert (card["accuracy"]["clients"], card["accuracy"]["mean"]) == (
        1,
        pytest.approx(row["accuracy"]),
    )
    assert card["tensors"]["models.2.3.weight"] == {"shape": [LABELS, 8], "dtype": "float32"}
    assert card["tensors"]["weights"] == {"shape": [3], "dtype": "float64"}
    assert card["tensors"].keys() == load_file(path).keys()
    assert page.startswith("# Mixture of nodes 1, 2, 3 of a fedem run\n")
    assert (
        f"; a mixture of {weights[0]:.3g} × node 1, {weights[1]:.3g} × node 2, {weights[2]:.3g} × node 3 |"
        in page
    )
    monkeypatch.chdir(tmp_path)
    names = {"model": perceptron(seed=9)}
    for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        exec(compile(block, "card", "exec"), names)
    assert names["ModelMixture"] is not ModelMixture
    assert accuracy(names["mixture"], 2) == pytest.approx(row["accuracy"])


def test_a_model_of_the_mixture_has_no_score_of_its_own(mixture_run, tmp_path):
    """Nobody was served with it alone. A level of a client's path is a node's model, too."""
    of_node = export_model(mixture_run, tmp_path / "node.safetensors", node=1)
    assert card_of(of_node)["accuracy"] is None
    assert "mixture" not in card_of(of_node)
    trained = next(client for client in FEDERATION.ids if mixture_run.tree.leaf_of[client])
    of_leaf = export_model(mixture_run, tmp_path / "leaf.safetensors", client=trained, level=-1)
    assert "mixture" not in card_of(of_leaf)
    assert load_file(of_leaf).keys() == load_file(of_node).keys()


def test_a_run_that_is_continued_has_the_same_weights(tmp_path):
    settings = {"client_fraction": 0.3, "folder": tmp_path / "run"}
    whole = ran("fedem", {"clusters": 2}, client_fraction=0.3)
    ran("fedem", {"clusters": 2}, rounds=2, **settings)
    continued = ran("fedem", {"clusters": 2}, **settings)
    assert continued.kept.keys() == whole.kept.keys() == set(FEDERATION.ids)
    assert all(
        torch.equal(continued.kept[c]["mixture"], whole.kept[c]["mixture"]) for c in whole.kept
    )


@pytest.mark.parametrize(("task", "outputs"), [("binary", 0), ("multilabel", 3), ("regression", 0)])
def test_mixtures_of_every_task_predict_what_was_scored(task, outputs, tmp_path):
    federation = task_federation(task, [0, 1, 0, 1], outputs=outputs)

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        head = nn.Linear(FEATURES, max(outputs, 1))
        return head if outputs else nn.Sequential(head, nn.Flatten(0))

    local = LocalTraining(batch_size=10, lr=0.1)
    run = simulate(FedEM(clusters=2), model, federation, rounds=2, local=local, engine="loop")
    path = export_model(run, tmp_path / "one.safetensors", client=1)
    assert card_of(path)["mixture"]["task"] == task
    x, y = federation.examples(1, "test")
    with torch.no_grad():
        predicted = load_export(path, model(5))(x)
    right = (
        (predicted - y).abs() if task == "regression" else ((predicted > 0) == (y > 0.5)).double()
    )
    (row,) = [row for row in run.client_rows if (row["round"], row["client"]) == (2, 1)]
    assert float(right.mean()) == pytest.approx(
        row["mae" if task == "regression" else "accuracy"], abs=1e-6
    )


@pytest.mark.parametrize("task", ["classification", "binary", "regression"])
def test_the_module_predicts_what_evaluations_mix(task):
    models = [perceptron(seed) for seed in range(3)]
    mixture = ModelMixture(models[0], 3, task)
    weights = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    state = {
        f"models.{k}.{name}": t
        for k, model in enumerate(models)
        for name, t in model.state_dict().items()
    }
    mixture.load_state_dict({**state, "weights": weights})
    x = torch.randn(7, FEATURES)
    with torch.no_grad():
        expected = mix_outputs(
            task, torch.stack([model(x) for model in models]), weights.expand(7, 3)
        )
        torch.testing.assert_close(mixture(x), expected, rtol=0, atol=0)


# What a client is served with may be another node's model


def test_a_client_that_falls_back_gets_the_root_s_model(tmp_path):
    """Four clients of one distribution that are split all the same: the model of all is better on validation data."""
    federation, local = (
        federation_of([0] * 4, [12] * 4, validation=60),
        LocalTraining(epochs=2, batch_size=10, lr=0.3),
    )
    algorithm = CFL(eps2=1e-6, split_rounds=(1, 2), fallback=True)
    run = simulate(algorithm, perceptron(), federation, rounds=4, local=local, engine="loop")
    last = {row["client"]: row for row in run.client_rows if row["round"] == 4}
    client = next(
        client for client, row in last.items() if row["served_by"] != run.tree.leaf_of[client]
    )
    path = export_model(run, tmp_path / "served.safetensors", client=client)
    served = run.tree.nodes[last[client]["served_by"]]
    assert card_of(path)["node"] == served.id
    assert torch.equal(load_file(path)["1.bias"], run.layout.unflatten(served.model)["1.bias"])
    x, y = federation.examples(client, "test")
    module = load_export(path, perceptron(seed=9))
    assert float((module(x).argmax(1) == y).double().mean()) == pytest.approx(
        last[client]["accuracy"]
    )
    leaf = export_model(run, tmp_path / "leaf.safetensors", client=client, level=-1)
    assert card_of(leaf)["node"] == run.tree.leaf_of[client]


def test_a_client_that_was_not_evaluated_gets_its_leaf_s_model(tmp_path):
    run = ran("ifca", {"clusters": 2}, evaluate_clients=3)
    client = next(
        client
        for client in FEDERATION.ids
        if client not in {row["client"] for row in run.client_rows}
    )
    path = export_model(run, tmp_path / "leaf.safetensors", client=client)
    assert card_of(path)["node"] == run.tree.leaf_of[client]


# What cannot be exported


def test_weights_that_only_a_client_of_a_network_has_are_not_exported(mixture_run, tmp_path):
    there = replace(mixture_run, kept={}, config={**mixture_run.config, "network": {}})
    text = "client 2 is evaluated with a mixture of all models, but over a network only the client stores its weights"
    with pytest.raises(RunError, match=re.escape(text)):
        export_model(there, tmp_path / "two.safetensors", client=2)
    assert not list(tmp_path.iterdir())
    export_model(there, tmp_path / "node.safetensors", node=2)


@pytest.mark.parametrize("name", ["fedsoft", "ditto", "pfedme"])
def test_a_model_that_only_a_client_of_a_network_has_is_not_exported(name, tmp_path):
    run = ran(name, OPTIONS.get(name, {}), rounds=1)
    there = replace(run, kept={}, config={**run.config, "network": {}})
    with pytest.raises(
        RunError, match="no model of client 2: over a network, only the client stores its own model"
    ):
        export_model(there, tmp_path / "two.safetensors", client=2)


def test_a_client_without_weights_is_named(tmp_path):
    run = ran("fedrc", {"clusters": 2}, rounds=1, client_fraction=0.3, evaluate_clients=1)
    client = next(client for client in FEDERATION.ids if client not in run.kept)
    text = f"client {client} is evaluated with a mixture of all models, but this run has no weights of the client"
    with pytest.raises(RunError, match=re.escape(text)):
        export_model(run, tmp_path / "none.safetensors", client=client)


def test_weights_of_another_number_of_models_are_damaged(mixture_run, tmp_path):
    kept = {**mixture_run.kept, 2: {"mixture": torch.tensor([0.5, 0.5], dtype=torch.float64)}}
    with pytest.raises(RunError, match="the run is damaged: client 2 has 2 weights for 3 models"):
        export_model(replace(mixture_run, kept=kept), tmp_path / "two.safetensors", client=2)


def test_a_run_of_before_the_task_was_kept_is_told_apart(mixture_run, tmp_path):
    summary = {key: value for key, value in mixture_run.summary.items() if key != "task"}
    before = replace(mixture_run, summary=summary)
    with pytest.raises(
        RunError, match=r"did not record the kind of the task.* run its config\.toml again"
    ):
        export_model(before, tmp_path / "two.safetensors", client=2)
    named = replace(before, config={**before.config, "task": {"name": "classification"}})
    assert (
        card_of(export_model(named, tmp_path / "two.safetensors", client=2))["mixture"]["task"]
        == "classification"
    )


def test_no_one_adapter_is_a_mixture(tmp_path):
    lora = LoRA(targets=("1",), rank=2, train=("3.*",))
    run = ran("fedem", {"clusters": 2}, rounds=1, adapter=lora)
    text = "client 2 is evaluated with a mixture of 2 models, which cannot be exported as a single adapter"
    with pytest.raises(RunError, match=re.escape(text)):
        export_adapter(run, tmp_path / "adapter", client=2, alpha=1.0)
    assert not list(tmp_path.iterdir())


def test_a_mixture_of_a_method_of_one_s_own_is_one_too(mixture_run, tmp_path):
    """By the clients' weights; nothing that the run names is imported for that."""
    own = replace(mixture_run, config={**mixture_run.config, "algorithm": {"name": "gone:Method"}})
    assert "weights" in load_file(export_model(own, tmp_path / "two.safetensors", client=2))


# Loading


def test_an_export_is_loaded_into_the_module_itself_in_evaluation_mode(tmp_path):
    run = ran("fedavg", {}, rounds=1)
    path = export_model(run, tmp_path / "root.safetensors", node=0)
    module = perceptron(seed=9)
    assert load_export(str(path), module) is module
    assert not module.training
    assert torch.equal(module[1].weight.flatten(), run.tree.nodes[0].params[: FEATURES * 8])
    save_file(perceptron(3).state_dict(), tmp_path / "other.safetensors")
    assert torch.equal(
        load_export(tmp_path / "other.safetensors", module)[1].weight, perceptron(3)[1].weight
    )


def test_what_cannot_be_loaded_is_named(mixture_run, tmp_path):
    path = export_model(mixture_run, tmp_path / "two.safetensors", client=2)
    with pytest.raises(
        ModelError,
        match=rf"the model in {re.escape(str(path))} does not fit into this Linear, which should have tensors of ",
    ):
        load_export(path, nn.Linear(2, 2))
    (tmp_path / "broken.safetensors").write_bytes(b"no tensors")
    for name in ("broken", "missing"):
        with pytest.raises(
            RunError, match=rf"cannot read the model in {re.escape(str(tmp_path / name))}"
        ):
            load_export(tmp_path / f"{name}.safetensors", perceptron())
