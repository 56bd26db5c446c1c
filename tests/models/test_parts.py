from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from fedclade.core import ConfigError, Layout
from fedclade.models import LoRA, Parts, freeze


def backbone_and_head() -> nn.ModuleDict:
    plain = nn.BatchNorm1d(2, affine=False)  # has no parameters that could be frozen
    body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), plain, nn.Dropout(0.5))
    return nn.ModuleDict({"body": body, "norm": nn.BatchNorm1d(2), "head": nn.Linear(2, 2)})


def test_what_is_frozen_rests_with_its_statistics():
    module = backbone_and_head()
    freeze(module, ["body.*"])
    layout = Layout.of(module)
    assert {slot.name.partition(".")[0] for slot in (*layout.parameters, *layout.buffers)} == {
        "norm",
        "head",
    }
    assert set(layout.frozen) == {name for name in module.state_dict() if name.startswith("body.")}
    assert set(layout.resting) == {"body", "body.0", "body.1", "body.2", "body.3"}


def test_a_layer_rests_of_which_all_buffers_match():
    module = backbone_and_head()
    freeze(module, ["norm.running_*", "norm.num_batches_tracked"])
    layout = Layout.of(module)
    assert layout.resting == ("norm",)
    assert "norm.weight" in {slot.name for slot in layout.parameters}
    assert "norm.running_mean" in layout.frozen


def test_a_layer_of_which_some_buffers_match_goes_on():
    module = backbone_and_head()
    freeze(module, ["norm.running_mean", "norm.weight"])
    layout = Layout.of(module)
    assert layout.resting == ()
    assert [*layout.frozen] == ["norm.weight"]


def test_a_tied_parameter_is_frozen_by_either_name():
    module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    module[1].weight = module[0].weight
    freeze(module, ["1.weight"])
    assert [*Layout.of(module).frozen] == ["0.weight"]


def test_parts_are_applied_to_a_copy():
    module = backbone_and_head()
    parts = Parts(freeze=("body",), personal=("head",))
    layout = parts.layout(parts.applied(module))
    assert [slot.name for slot in layout.personal] == ["head.weight", "head.bias"]
    assert {slot.name.partition(".")[0] for slot in layout.parameters} == {"norm"}
    assert all(p.requires_grad for p in module.parameters())
    assert Parts(personal=("head",)).applied(module) is module


def test_a_pattern_that_freezes_nothing_is_refused():
    with pytest.raises(
        ConfigError, match=r"model.freeze = 'boody.\*' matches no parameter .* mean 'body"
    ):
        Parts(freeze=("boody.*",)).applied(backbone_and_head())


def test_parts_of_a_section():
    section = {
        "name": "mlp",
        "hidden": 3,
        "freeze": ["a"],
        "adapter": {"targets": ["fc"], "rank": 2},
    }
    parts = Parts.of(section)
    assert parts == Parts(freeze=("a",), adapter=LoRA(targets=("fc",), rank=2))
    assert parts.as_dict().keys() == {"freeze", "adapter"}
    assert Parts.of(parts.as_dict()) == parts
    assert Parts().as_dict() == {}


@pytest.mark.parametrize(
    ("section", "text"),
    [
        (
            {"freeze": "head"},
            r"freeze of \[model\] should be a list with entries that are each a string, got 'head'",
        ),
        (
            {"adapter": {"targets": ["fc"], "ranks": 2}},
            "unknown key of model.adapter: 'ranks'.*rank",
        ),
        (
            {"adapter": {"targets": []}},
            "model.adapter.targets should be at least one pattern, such as 'fc",
        ),
        (
            {"adapter": {"targets": ["fc"], "rank": 0}},
            "model.adapter.rank should be at least 1, got 0",
        ),
        (
            {"adapter": {"targets": ["fc"], "alpha": 0.0}},
            "model.adapter.alpha should be greater than 0, got 0.0",
        ),
        (
            {"adapter": {"targets": ["fc"], "kind": "dora"}},
            "kind of model.adapter should be 'lora', got 'dora'",
        ),
    ],
)
def test_a_section_that_is_wrong_is_refused(section, text):
    with pytest.raises(ConfigError, match=text):
        Parts.of(section)


def test_adapters_add_nothing_at_first_and_are_what_is_trained():
    module = nn.ModuleDict(
        {"fc1": nn.Linear(3, 4), "fc2": nn.Linear(4, 4), "head": nn.Linear(4, 2)}
    )
    adapted = Parts(adapter=LoRA(targets=("fc*",), rank=2, train=("head",))).applied(module, seed=1)
    layout = Layout.of(adapted)
    assert [slot.name for slot in layout.parameters] == [
        *("fc1.lora_A.weight", "fc1.lora_B.weight", "fc2.lora_A.weight", "fc2.lora_B.weight"),
        *("head.weight", "head.bias"),
    ]
    assert [*layout.frozen] == [
        f"fc{k}.base_layer.{kind}" for k in (1, 2) for kind in ("weight", "bias")
    ]
    x = torch.randn(5, 3)
    assert torch.equal(adapted["fc1"](x), module["fc1"](x))
    with torch.no_grad():
        adapted["fc1"].lora_B.weight.fill_(1.0)
    product = torch.ones(4, 2) @ adapted["fc1"].lora_A.weight
    assert torch.allclose(adapted["fc1"](x), module["fc1"](x) + 16 / 2 * x @ product.T, atol=1e-5)


def test_adapters_depend_on_the_seed_alone():
    module = nn.Sequential(nn.Linear(3, 4))
    parts = Parts(adapter=LoRA(targets=("0",)))
    state = torch.get_rng_state()
    one, same, other = (parts.applied(module, seed)[0].lora_A.weight for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("conv", "names 'body.conv', which is of type Conv2d"),
        ("body.conv", "names 'body.conv', which is of type Conv2d"),
        ("word*", "names 'words', which is of type Embedding"),
        ("norm", "names 'norm', which is of type LayerNorm"),
        ("attention", "names 'attention', which is of type MultiheadAttention"),
    ],
)
def test_a_target_that_names_another_layer_is_refused(target: str, told: str):
    layers = {
        **{
            "words": nn.Embedding(3, 4),
            "body": nn.ModuleDict({"conv": nn.Conv2d(1, 1, 1), "fc": nn.Linear(1, 1)}),
        },
        **{"norm": nn.LayerNorm(4), "attention": nn.MultiheadAttention(4, 1)},
    }
    whole = (
        f"targets = {target!r} {told}, "
        "but adapters can be added to nn.Linear, and Conv1D of transformers, only; such layers of the "
        "model: 'body.fc'"
    )
    with pytest.raises(ConfigError, match=f"{re.escape(whole)}$"):
        Parts(adapter=LoRA(targets=("fc", target))).applied(nn.ModuleDict(layers))
    with pytest.raises(ConfigError, match=r"transformers, only; such layers of the model: none$"):
        Parts(adapter=LoRA(targets=("0",))).applied(nn.Sequential(nn.Conv2d(1, 1, 1)))


def test_a_target_that_names_layers_of_several_kinds_means_the_dense_ones():
    module = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Linear(1, 1), nn.Linear(1, 1))
    adapted = Parts(adapter=LoRA(targets=("[01]",))).applied(module)
    assert [type(layer).__name__ for layer in adapted] == ["Conv2d", "LoRALinear", "Linear"]


def test_a_target_that_names_nothing_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"model\.adapter\.targets = 'fx' matches no dense layer of the model; did",
    ):
        Parts(adapter=LoRA(targets=("fx",))).applied(nn.ModuleDict({"fc": nn.Linear(1, 1)}))


def test_a_transformer_of_torch_sees_its_adapters_in_evaluation_too():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    adapted = Parts(adapter=LoRA(targets=("linear*",), rank=2)).applied(layer)
    with torch.no_grad():
        adapted.linear1.lora_B.weight.fill_(0.1)
    x = torch.randn(2, 3, 8)
    with torch.inference_mode():
        assert torch.allclose(adapted.eval()(x), adapted.train()(x), atol=1e-6)
        assert not torch.allclose(adapted(x), layer.eval()(x), atol=1e-3)


class Normed(nn.Module):
    """A layer, two normalisations, one of them at rest, and a head that shares no weight; then a tied one."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.rested = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4)
        self.rested.requires_grad_(False)
        self.head = nn.Linear(4, 4)
        if tied:
            self.head.weight = self.first.weight


NORM = (
    "norm.weight",
    "norm.bias",
    "norm.running_mean",
    "norm.running_var",
    "norm.num_batches_tracked",
)


@pytest.mark.parametrize(
    ("preset", "tied", "names"),
    [
        ("head", False, ("head.weight", "head.bias")),
        ("body", False, ("first.weight", "first.bias", *NORM)),
        ("norm", False, NORM),
        ("head", True, ("first.weight", "head.bias")),
        ("body", True, ("first.bias", *NORM)),
    ],
)
def test_one_word_names_the_head_the_body_or_all_normalisation(preset, tied, names):
    module = Normed(tied=tied)
    assert set(Parts(personal=preset).personal_names(module)) == set(names)
    assert {slot.name for slot in Parts(personal=preset).layout(module).personal} == set(names)


def test_a_word_that_is_none_of_these_and_norms_that_are_not_there_are_refused():
    with pytest.raises(
        ConfigError, match=r"model.personal should be 'head', 'body' or 'norm'.*, got 'heads'"
    ):
        Parts(personal="heads")
    with pytest.raises(
        ConfigError, match=r"model\.personal = .norm., but the model has no normalisation layer"
    ):
        Parts(personal="norm").personal_names(nn.Linear(2, 2))
