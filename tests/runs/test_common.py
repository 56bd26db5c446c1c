from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedclade import (
    CFL,
    IFCA,
    ConfigError,
    FedAvg,
    LocalTraining,
    Oracle,
    Run,
    RunInterrupted,
    simulate,
)
from fedclade.core import ParameterTree
from fedclade.models import Parts
from fedclade.runs.small_clusters import with_common
from tests.tiny import federation_of, perceptron

TRUTH = (0, 1, 0, 1, 0, 1)
FEDERATION = federation_of(TRUTH, [20, 30, 40, 20, 60, 30])
ENTRIES = Parts(common="body").common_entries(perceptron(0))
ORACLE = Oracle(dict(enumerate(TRUTH)))


def run_of(algorithm, rounds: int = 1, **settings) -> Run:
    given = {"local": LocalTraining(epochs=1, batch_size=10, lr=0.2), "common": "body"} | settings
    return simulate(algorithm, perceptron, FEDERATION, rounds=rounds, **given)


def models_of(run: Run) -> torch.Tensor:
    return torch.stack([leaf.params for leaf in run.tree.leaves])


def test_after_a_round_the_body_is_that_of_fedavg_and_heads_are_the_clusters():
    common, alone, one = (
        models_of(run_of(ORACLE)),
        models_of(run_of(ORACLE, common=())),
        models_of(run_of(FedAvg())),
    )
    assert ENTRIES is not None
    assert 0 < ENTRIES.sum() < len(ENTRIES)
    torch.testing.assert_close(common[:, ENTRIES], one[:, ENTRIES].expand(2, -1))
    assert torch.equal(common[:, ~ENTRIES], alone[:, ~ENTRIES])
    assert not torch.allclose(alone[:, ENTRIES], one[:, ENTRIES].expand(2, -1), atol=1e-3)


@pytest.mark.parametrize(
    "algorithm", [ORACLE, CFL(split_rounds=(2, 3), eps2=1e-6), IFCA(clusters=3)]
)
def test_clusters_agree_in_what_is_common_after_every_round(algorithm):
    def agree(row: object, tree: ParameterTree) -> None:
        models = torch.stack([leaf.params for leaf in tree.leaves])
        assert torch.equal(models[:, ENTRIES], models[:1, ENTRIES].expand(len(models), -1))
        seen.append(len(models))

    seen: list[int] = []
    models = models_of(run_of(algorithm, 5, client_fraction=0.5, on_round=agree))
    assert len(seen) == 5
    assert seen[-1] > 1
    assert not torch.allclose(models[0, ~ENTRIES], models[1, ~ENTRIES], atol=1e-3)


def test_a_stream_and_a_resumed_run_are_the_same(tmp_path):
    whole = run_of(ORACLE, 4)
    with pytest.raises(RunInterrupted):
        run_of(ORACLE, 4, folder=tmp_path / "run", stop=lambda: True)
    assert torch.equal(models_of(run_of(ORACLE, 4, folder=tmp_path / "run")), models_of(whole))
    torch.testing.assert_close(models_of(run_of(ORACLE, 4, stream=True)), models_of(whole))
    assert Run.load(tmp_path / "run").config["model"]["common"] == "body"


def test_an_empty_leaf_is_moved_along_and_a_single_cluster_left_alone():
    sizes = {0: 1, 1: 3}
    tree = ParameterTree.star([(0,), (1,), ()], torch.zeros(2))
    tree = tree.with_model(1, torch.tensor([4.0, 4.0])).with_model(2, torch.tensor([8.0, 8.0]))
    moved = with_common(tree, torch.tensor([True, False]), sizes)
    assert [leaf.params.tolist() for leaf in moved.leaves] == [[7.0, 4.0], [7.0, 8.0], [7.0, 0.0]]
    one = ParameterTree.root_only((0, 1), torch.ones(2))
    assert with_common(one, torch.tensor([True, False]), sizes) is one


def test_what_is_common_is_chosen_by_names_and_leaves_something():
    module = perceptron(0)
    names = [name for name, _ in module.named_parameters()]
    first = Parts(common=(names[0],)).common_entries(module)
    assert first is not None
    assert int(first.sum()) == dict(module.named_parameters())[names[0]].numel()
    assert Parts().common_entries(module) is None
    with pytest.raises(
        ConfigError, match=r"model\.common makes all parameters common.*name fewer parameters"
    ):
        Parts(common=("*",)).common_entries(module)
    with pytest.raises(ConfigError, match=r"model\.common = .*'tail'.* matches no parameter"):
        Parts(common=("tail",)).common_entries(module)
    with pytest.raises(
        ConfigError, match=r"model\.common should be 'head', 'body' or 'norm'.*, got 'feet'"
    ):
        Parts(common="feet")
    only = replace(Parts(personal="body"), common="body").common_entries(module)
    assert only is None  # all of it stays with the clients


def test_permuted_updates_cannot_have_it():
    with pytest.raises(
        ConfigError, match=r"model\.common .*left out with privacy.permute = true.*'body'"
    ):
        run_of(ORACLE, permute=True)
