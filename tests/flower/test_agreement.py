"""The same config and seed give the same clusters and parameters in a simulation and over a grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedclade import Aggregation, LocalTraining, ModelError, Run, Signature, simulate
from fedclade.algorithms import ALGORITHMS as REGISTERED
from fedclade.algorithms import (
    APFL,
    CFL,
    FLHC,
    FLUX,
    IFCA,
    OCFL,
    PACFL,
    Algorithm,
    Auto,
    CLoVE,
    Ditto,
    FedAvg,
    FedDrift,
    FedEM,
    FedGroup,
    FedRC,
    FedRep,
    FedSoft,
    FeSEM,
    FineTune,
    FlexCFL,
    Local,
    PerFedAvg,
    PFedMe,
    ReplicatedCFL,
    Scaffold,
    StoCFL,
    build_algorithm,
)
from fedclade.channel.signature import Permutation
from fedclade.core.params import Layout
from fedclade.flower.signing import secret_model, seed_of
from fedclade.models import LoRA
from tests.tiny import FEATURES, LABELS, federation_of, perceptron

from .grids import ALL_ALLOWED, federated, grid_of

TRUTH = (0, 1, 0, 1, 0, 1)
LOCAL = LocalTraining(batch_size=20, lr=0.5)
"""Three steps a round: a dozen runs of each kind would show no more with many."""
SECRET = "0123456789abcdef" * 4

ALGORITHMS: dict[str, Algorithm] = {
    "fedavg": FedAvg(),
    "local": Local(),
    "oracle": build_algorithm("oracle", true_clusters=dict(enumerate(TRUTH))),
    "cfl": CFL(split_rounds=(2, 3), eps2=1e-6),
    "cfl by gradients": CFL(split_rounds=(2,), eps2=1e-6, similarity="gradients", fallback=True),
    "cfl by a test": CFL(criterion="replicated", level=0.5),
    "rcfl": ReplicatedCFL(level=0.5, check_every=3),
    "rcfl, personal": ReplicatedCFL(level=0.5, personalize=True, fallback=True),
    "auto": Auto(level=0.5, check_every=3, budget=6.0),
    "fl_hc": FLHC(rounds_before=2, n_clusters=2),
    "fedgroup": FedGroup(groups=2),
    "flexcfl": FlexCFL(groups=2, pretrain_steps=4),
    "ifca": IFCA(clusters=2, restarts=2),
    "ifca by gradients": IFCA(clusters=2, average="gradients"),
    "fedsoft": FedSoft(selection=3),
    "clove": CLoVE(clusters=2, stable_rounds=1),
    "ocfl": OCFL(method="hdbscan", min_cluster_size=2),
    "fesem": FeSEM(clusters=2),
    "feddrift": FedDrift(step_rounds=1, delta=0.2),
    "fedem": FedEM(clusters=2),
    "fedrc": FedRC(clusters=2),
    "pacfl": PACFL(n_clusters=2),
    "stocfl": StoCFL(tau=0.3, anchor_epochs=3),
    "flux": FLUX(earliest=1, latest=2),
    "ditto": Ditto(),
    "apfl": APFL(adaptive=True),
    "pfedme": PFedMe(),
    "per_fedavg": PerFedAvg(variant="HF"),
    "scaffold": Scaffold(),
    "finetune": FineTune(),
}


WITH_PARTS = ("fedper", "fedrep", "lg_fedavg", "fedbn")


def with_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    return {"local": LOCAL, "rounds": 4, "evaluate_every": 2, "signature": Signature(), **settings}


def both(
    algorithm: Algorithm, model: Any = perceptron, sizes: Sequence[int] = (60,) * 6, **settings: Any
) -> tuple[Run, Run]:
    """Run a simulation and the same over a grid."""
    settings = with_defaults(settings)
    federation = federation_of(TRUTH, sizes)
    parts = {key: settings[key] for key in ("freeze", "personal", "adapter") if key in settings}
    there = federated(
        grid_of(federation, model, ALL_ALLOWED, **parts), algorithm, model, **settings
    )
    return simulate(algorithm, model, federation, engine="loop", device="cpu", **settings), there


def same(here: Run, there: Run) -> None:
    """Check that two runs found the same clusters by the same steps, with the same models."""
    assert [(n.members, n.parent, n.born, n.split_in) for n in there.tree.nodes] == [
        (n.members, n.parent, n.born, n.split_in) for n in here.tree.nodes
    ]
    for ours, theirs in zip(here.tree.nodes, there.tree.nodes, strict=True):
        torch.testing.assert_close(theirs.params, ours.params, rtol=0, atol=1e-6)
        torch.testing.assert_close(theirs.model, ours.model, rtol=0, atol=1e-6)
    assert there.events == _numbers(here.events)
    assert there.summary["accuracy"] == here.summary["accuracy"]
    assert there.summary["steps"] == here.summary["steps"]


def _numbers(value: Any) -> Any:
    """Return an event, or a part of it, whose numbers may differ by rounding."""
    if isinstance(value, dict):
        return {key: _numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_numbers(entry) for entry in value]
    return pytest.approx(value, abs=1e-5) if isinstance(value, float) else value


SWITCHED = {
    "cfl at the stationary point": CFL(
        split_rounds=(2,), eps2=1e-6, compared_at="stationary", children_start="own_mean"
    ),
    "cfl with clusters that stop": CFL(
        eps1=0.4, eps2=0.5, similarity="gradients", stop_done_clusters=True
    ),
    "fl_hc that keeps updates": FLHC(
        rounds_before=2, linkage="centroid", n_clusters=2, keep_updates=True
    ),
    "fedgroup whose newcomers go on": FedGroup(
        groups=2, pretrain_scale=1, mu=0.1, newcomer_training="remaining_epochs"
    ),
    "fedrep with a last fit": FedRep(head_epochs=1, last_fit=4),
    "fedgroup that redraws": FedGroup(groups=2, pretrain_scale=1, rac=True, rac_redraws=True),
}
"""Methods with other settings than the papers' defaults, that ask clients for more, or for something else."""


@pytest.mark.parametrize("name", SWITCHED)
def test_what_is_switched_on_runs_over_a_grid_as_in_a_simulation(name: str):
    algorithm = SWITCHED[name]
    part = algorithm.requires.personal
    personal = {"personal": part} if part else {}
    here, there = both(algorithm, local=replace(LOCAL, epochs=2, reshuffle=False), **personal)
    same(here, there)
    assert there.summary["bytes_up"] == here.summary["bytes_up"]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_runs_over_a_grid_as_in_a_simulation(name: str):
    same(*both(ALGORITHMS[name]))


def test_every_algorithm_is_among_them():
    """But for the baselines with parts of their own, which come below, and those that a network refuses by name."""
    names = {name.partition(" ")[0].rstrip(",") for name in ALGORITHMS}
    assert names | {*WITH_PARTS} | {"fedbuff", "private_choice"} == {*REGISTERED}


@pytest.mark.parametrize("name", WITH_PARTS)
def test_parts_of_a_model_stay_with_clients_as_in_a_simulation(name: str):
    kind = REGISTERED[name].algorithm
    model = layer_normed if name == "fedbn" else perceptron
    here, there = both(kind(), model, personal=kind().requires.personal)
    same(here, there)
    assert here.kept.keys() == set(range(6))


@pytest.mark.parametrize("name", ["rcfl", "cfl by a test", "fedavg"])
def test_clients_have_any_number_of_examples(name: str):
    """Equal parts leave some of them out, which the server takes no offence at."""
    same(*both(ALGORITHMS[name], sizes=(61, 67, 71, 73, 79, 83)))


@pytest.mark.parametrize("name", ["cfl", "fedgroup", "ifca", "ditto", "fedrc"])
def test_a_client_fraction_draws_the_same_clients(name: str):
    same(*both(ALGORITHMS[name], client_fraction=0.5))


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("cfl", "median"),
        ("cfl", "multi_krum"),
        ("cfl", "geometric_median"),
        ("fesem", "multi_krum"),
        ("scaffold", "geometric_median"),
        ("fedrc", "median"),
    ],
)
def test_robust_rules_are_the_same(name: str, rule: Any):
    same(*both(ALGORITHMS[name], aggregate=Aggregation(rule=rule, mixing=name == "cfl")))


@pytest.mark.parametrize("stream", [False, True])
def test_limits_are_the_same(stream: bool):
    tight = Aggregation(largest_weight=1.0, largest_norm=1.15, clip_above=1.02)
    projected = Signature(kind="projected", dim=16)
    here, there = both(
        ALGORITHMS["cfl"], aggregate=tight, signature=projected, stream=stream, rounds=2
    )
    assert "limited" in {event["kind"] for event in here.events}
    if stream:  # which measures by what has arrived so far
        return
    same(here, there)


@pytest.mark.parametrize("name", ["cfl", "fl_hc", "fedavg", "rcfl", "fedrc"])
def test_so_do_projected_signatures_and_a_stream(name: str):
    same(*both(ALGORITHMS[name], signature=Signature(kind="projected", dim=16)))
    here, there = both(ALGORITHMS[name], signature=Signature(kind="projected", dim=16), stream=True)
    same(here, there)
    assert there.config["stream"] is True


@pytest.mark.parametrize("kind", ["full", "projected"])
@pytest.mark.parametrize("name", ["cfl", "rcfl"])
def test_so_do_signatures_of_some_parameters(name: str, kind: str):
    here, there = both(ALGORITHMS[name], signature=Signature(kind=kind, dim=16, of=["3.*"]))
    same(here, there)
    output = sum(
        slot.stop - slot.start for slot in here.layout.parameters if slot.name.startswith("3.")
    )
    assert here.tree.nodes[1:]
    for node in here.tree.nodes[1:]:
        assert node.cached.shape[1] == (16 if kind == "projected" else output)


def test_a_frozen_part_is_sent_to_nobody():
    here, there = both(FedAvg(), freeze=["1"])
    same(here, there)
    assert [slot.name for slot in there.layout.parameters] == ["3.weight", "3.bias"]


def test_adapters_alone_travel():
    here, there = both(
        ALGORITHMS["cfl"], adapter=LoRA(targets=("1",), rank=2), signature=Signature(of="lora_B")
    )
    same(here, there)
    assert [slot.name for slot in there.layout.parameters] == ["1.lora_A.weight", "1.lora_B.weight"]


def test_clients_with_another_base_are_not_waited_for():
    with pytest.raises(ModelError, match="the values of its frozen parameters, which are not sent"):
        both(FedAvg(), freeze=["1"], seed=5)  # which draws another base than the clients' seed 0


@pytest.mark.parametrize("name", ["cfl", "ifca"])
def test_what_clusters_have_in_common_is_averaged_over_all(name: str):
    here, there = both(ALGORITHMS[name], common="body", client_fraction=0.5)
    same(here, there)
    bodies = torch.stack([leaf.params for leaf in there.tree.leaves])[
        :, : here.layout.parameters[1].stop
    ]
    assert len(bodies) > 1
    assert torch.equal(bodies, bodies[:1].expand_as(bodies))


@pytest.mark.parametrize(
    "name", ["cfl", "cfl by gradients", "rcfl", "ifca", "ditto", "apfl", "scaffold", "fedrep"]
)
def test_what_is_personal_stays_with_the_clients(name: str):
    algorithm = FedRep(head_epochs=2) if name == "fedrep" else ALGORITHMS[name]
    here, there = both(algorithm, personal="head", client_fraction=0.5)
    same(here, there)
    assert there.kept == {}
    assert here.kept.keys() == set(range(6))


def test_another_personal_part_is_another_model():
    with pytest.raises(ModelError, match="the server's model differs from the clients' model"):
        federated(
            grid_of(federation_of(TRUTH), perceptron, personal="body"),
            FedAvg(),
            perceptron,
            personal="head",
        )


def test_the_proximal_term_pulls_to_the_same_anchor():
    same(*both(FedAvg(), local=LocalTraining(epochs=2, batch_size=20, lr=0.1, mu=0.5)))


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedem"])
def test_optimizers_go_on_where_they_were_in_the_rounds_before(name: str):
    options = {"betas": (0.5, 0.9)}
    local = LocalTraining(
        steps=3, batch_size=10, lr=0.05, optimizer="adam", options=options, keep_state=True
    )
    here, there = both(ALGORITHMS[name], local=local)
    same(here, there)
    settings = with_defaults({"local": replace(local, keep_state=False)})
    anew = simulate(
        ALGORITHMS[name], perceptron, federation_of(TRUTH, (60,) * 6), engine="loop", **settings
    )
    assert not torch.allclose(anew.tree.nodes[-1].params, here.tree.nodes[-1].params, atol=1e-3)


class Normed(nn.Module):
    """A model with buffers, which travel but are not compared."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.output = (
            nn.Linear(FEATURES, 8),
            nn.BatchNorm1d(8),
            nn.Linear(8, LABELS),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.norm(self.hidden(x)).relu())


def normed(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Normed()


def layer_normed(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.Linear(8, LABELS))


def test_buffers_travel_too():
    here, there = both(ALGORITHMS["cfl"], normed)
    same(here, there)
    # the running variance has moved
    assert not torch.equal(there.tree.nodes[0].params[-8:], torch.ones(8))


@pytest.mark.parametrize("name", ["cfl", "scaffold", "ditto"])
def test_last_batches_of_one_example_are_joined_on_both_sides(name: str):
    """BatchNorm cannot be trained on them; client 5 has no more than one example."""
    sizes, unlimited = (
        (21, 40, 41, 61, 22, 1),
        {f"largest_{what}": math.inf for what in ("weight", "norm")},
    )
    settings = {
        "local": LocalTraining(batch_size=20, lr=0.1),
        "aggregate": Aggregation(**unlimited),
    }
    same(*both(ALGORITHMS[name], normed, sizes, rounds=2, **settings))


@pytest.mark.parametrize("name", ["cfl", "fl_hc", "fedgroup"])
def test_clients_with_a_secret_find_the_same_clusters(name: str, tmp_path: Path):
    """The server's models are those of a simulation that begins with the secret model, once P is undone."""
    (tmp_path / "secret").write_text(SECRET)
    federation, algorithm = federation_of(TRUTH), ALGORITHMS[name]
    grid = grid_of(federation, config={"secret-file": str(tmp_path / "secret")})
    there = federated(grid, algorithm, permute=True, local=LOCAL)

    module, seed = perceptron(), seed_of(SECRET)
    layout = Layout.of(module)
    layout.load(secret_model(perceptron, layout, seed), module)
    here = simulate(
        algorithm, module, federation, local=LOCAL, rounds=4, engine="loop", device="cpu"
    )
    permutation = Permutation(seed, layout.size, layout.n_parameters)
    same(here, replace(there, tree=there.tree.map_vectors(permutation.invert, permutation.invert)))
    # but for P, they differ
    assert not torch.allclose(there.tree.nodes[0].params, here.tree.nodes[0].params, atol=0.1)
