"""Adapters in peft's format. The names and the config are those that peft 0.21 writes for the same model."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fedclade.core import Layout, ModelError
from fedclade.models import LoRA, Parts, load_adapter, save_adapter

OF_PEFT = {
    "base_model.model.blocks.0.fc1.lora_A.weight": (2, 8),
    "base_model.model.blocks.0.fc1.lora_B.weight": (16, 2),
    "base_model.model.blocks.1.fc1.lora_A.weight": (2, 8),
    "base_model.model.blocks.1.fc1.lora_B.weight": (16, 2),
    "base_model.model.head.bias": (11,),
    "base_model.model.head.weight": (11, 8),
}
"""``save_pretrained`` of ``LoraConfig(r=2, target_modules=["fc1"], modules_to_save=["head"])``."""

IN_MEMORY = {
    "base_model.model.blocks.0.fc1.lora_A.default.weight": (2, 8),
    "base_model.model.blocks.0.fc1.lora_B.default.weight": (16, 2),
    "base_model.model.blocks.1.fc1.lora_A.default.weight": (2, 8),
    "base_model.model.blocks.1.fc1.lora_B.default.weight": (16, 2),
    "base_model.model.head.modules_to_save.default.bias": (11,),
    "base_model.model.head.modules_to_save.default.weight": (11, 8),
}
"""What the trained parameters of that PeftModel are called, and so the slots of its layout."""


def base() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.ModuleDict({"fc1": nn.Linear(8, 16), "fc2": nn.Linear(16, 8)}) for _ in range(2)]
    return nn.ModuleDict({"blocks": nn.ModuleList(blocks), "head": nn.Linear(8, 11)})


def adapted() -> nn.Module:
    module = Parts(adapter=LoRA(targets=("fc1",), rank=2, alpha=4.0, train=("head",))).applied(
        base()
    )
    for parameter in module.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    return module


def trained(module: nn.Module) -> dict[str, torch.Tensor]:
    layout = Layout.of(module)
    return dict(layout.unflatten(layout.flatten(module)))


def test_an_adapter_is_written_with_the_names_of_peft(tmp_path):
    module = adapted()
    save_adapter(tmp_path, trained(module), 4.0)
    written = load_file(tmp_path / "adapter_model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in written.items()} == OF_PEFT
    assert torch.equal(written["base_model.model.head.bias"], module["head"].bias)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 4.0)
    assert config["target_modules"] == ["blocks.0.fc1", "blocks.1.fc1"]
    assert config["modules_to_save"] == ["head"]


def test_the_names_in_a_models_memory_become_those_of_a_file(tmp_path):
    save_adapter(tmp_path, {name: torch.zeros(shape) for name, shape in IN_MEMORY.items()}, 4.0)
    assert load_file(tmp_path / "adapter_model.safetensors").keys() == OF_PEFT.keys()


def test_an_adapter_written_and_loaded_is_the_same(tmp_path):
    module = adapted()
    save_adapter(tmp_path, trained(module), 4.0)
    again = load_adapter(tmp_path, base())
    assert again.state_dict().keys() == module.state_dict().keys()
    assert all(
        torch.equal(value, module.state_dict()[name]) for name, value in again.state_dict().items()
    )
    assert Layout.of(again) == Layout.of(module)
    assert again["blocks"][0]["fc1"].scaling == 4 / 2


def changed(folder, config=None, tensors=None) -> None:
    """Write an adapter of which something is changed."""
    save_adapter(folder, trained(adapted()), 4.0)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **(config or {})}))
    path = folder / "adapter_model.safetensors"
    kept = {**load_file(path), **(tensors or {})}
    save_file({name: tensor for name, tensor in kept.items() if tensor.numel()}, path)


@pytest.mark.parametrize(
    ("config", "tensors", "text"),
    [
        ({"peft_type": "IA3"}, {}, "has peft_type = 'IA3', expected 'LORA'"),
        ({"use_dora": True}, {}, "has use_dora = True, expected False"),
        ({"rank_pattern": {"fc1": 3}}, {}, r"has rank_pattern = \{'fc1': 3\}, expected \{\}"),
        ({"r": "two"}, {}, "no adapter can be read from .*: ValueError: .*'two'"),
        ({"target_modules": "fc.*"}, {}, r"should list its target_modules, got 'fc\.\*'"),
        (
            {},
            {"base_model.model.tail.weight": torch.ones(1)},
            "only one of the two has the trained parameter 'tail.weight'",
        ),
        (
            {},
            {"base_model.model.blocks.0.fc1.lora_B.weight": torch.ones(0)},
            "only one of the two has the trained parameter 'blocks.0.fc1.lora_B.weight'",
        ),
        (
            {},
            {"base_model.model.head.bias": torch.ones(3)},
            r"has head.bias of shape \(3,\), but the model's shape is \(11,\)",
        ),
    ],
)
def test_an_adapter_of_another_kind_or_model_is_refused(tmp_path, config, tensors, text):
    changed(tmp_path, config, tensors)
    with pytest.raises(ModelError, match=text):
        load_adapter(tmp_path, base())


def test_a_folder_without_an_adapter_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no adapter can be read from .*adapter_config.json"):
        load_adapter(tmp_path, base())


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        ({"head.weight": (2, 2)}, r"\[\]"),
        ({"a.lora_A.weight": (2, 3), "b.lora_A.weight": (3, 3)}, r"\[2, 3\]"),
    ],
)
def test_what_is_no_adapter_is_not_written(tmp_path, names, ranks):
    with pytest.raises(
        ModelError, match=f"low-rank pairs lora_A and lora_B of one rank, got ranks {ranks}"
    ):
        save_adapter(tmp_path, {name: torch.zeros(shape) for name, shape in names.items()}, 1.0)
