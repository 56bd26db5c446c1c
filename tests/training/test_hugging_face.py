"""Models and data sets of Hugging Face: small ones, with random parameters, in every engine."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from fedclade import Federation, LocalTraining, LoRA, export_adapter, federation, simulate
from fedclade.core import Layout
from fedclade.models import load_adapter
from fedclade.training.stacking.stacked_module import StackedModule

WORDS, LENGTH = 40, 8
LOCAL = LocalTraining(batch_size=6, lr=0.2)
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(
        vocab_size=WORDS, intermediate_size=16, max_position_embeddings=16, **sizes, **NO_DROPOUT
    )
    return BertForSequenceClassification(config)


def gpt2(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    ends = {"bos_token_id": 1, "eos_token_id": 1}
    config = GPT2Config(
        vocab_size=WORDS, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes, **ends
    )
    return GPT2LMHeadModel(config)


def tokens(client: int, length: int = LENGTH, n: int = 16) -> torch.Tensor:
    draw = torch.Generator().manual_seed(client)
    return torch.randint(WORDS, (n, length), generator=draw)


def classified() -> Federation:
    def rows(client: int) -> Dataset:
        ids = tokens(client)
        mask = torch.arange(LENGTH) < 2 + ids[:, :1] % LENGTH
        return Dataset.from_dict(
            {
                "text": len(ids) * ["a text"],
                "input_ids": ids.tolist(),
                "attention_mask": mask.long().tolist(),
                "label": (ids[:, 0] % 2).tolist(),
            }
        )

    return federation({f"c{k}": rows(k) for k in range(3)})


def continued() -> Federation:
    data = {f"c{k}": tokens(k, LENGTH + 1) for k in range(3)}
    pairs = {name: (ids[:, :-1], ids[:, 1:]) for name, ids in data.items()}
    return federation(pairs, "language", labels=WORDS)


def model_of(make: Any, data: Federation, engine: str) -> torch.Tensor:
    run = simulate(
        "fedavg", make, data, rounds=2, engine=engine, local=LOCAL, references=False, seed=1
    )
    return run.tree.nodes[0].model


@pytest.mark.parametrize("engine", ["workers", "stacked", "auto"])
@pytest.mark.parametrize(("make", "data"), [(bert, classified()), (gpt2, continued())])
def test_every_engine_is_the_loop(make: Any, data: Federation, engine: str):
    expected = model_of(make, data, "loop")
    assert torch.allclose(model_of(make, data, engine), expected, atol=1e-6)
    assert not torch.equal(expected, Layout.of(make(1)).flatten(make(1)))


def test_the_tokenized_columns_are_the_inputs():
    structure = classified().pool.structure
    assert structure is not None
    assert structure.names == ("input_ids", "attention_mask")


def test_positions_of_one_row_are_those_of_all_rows():
    """A module embeds positions [1, T], and adds the result to a batch."""

    class WithPositions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(5, 3), nn.Embedding(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.words(x) + self.places(torch.arange(4)[None])

    module = WithPositions()
    layout = Layout.of(module)
    models = torch.randn(2, layout.size, generator=torch.Generator().manual_seed(0))
    stacked = StackedModule(module, layout)
    stacked.load(models, [0, 1])
    stacked.bind(0, 2)
    x = torch.arange(24).view(6, 4) % 5
    got = stacked.forward(x)
    for client in range(2):
        layout.load(models[client], module)
        rows = slice(3 * client, 3 * client + 3)
        assert torch.allclose(got[rows], module(x[rows]))


def test_the_dense_layer_of_gpt2_is_that_of_each_client():
    module = nn.Sequential(Conv1D(4, 3), nn.ReLU())  # 3 inputs, 4 outputs
    layout = Layout.of(module)
    models = torch.randn(2, layout.size, generator=torch.Generator().manual_seed(0))
    stacked = StackedModule(module, layout)
    stacked.load(models, [0, 1])
    stacked.bind(0, 2)
    x = torch.randn(6, 5, 3)
    got = stacked.forward(x)
    for client in range(2):
        layout.load(models[client], module)
        rows = slice(3 * client, 3 * client + 3)
        assert torch.allclose(got[rows], module(x[rows]), atol=1e-6)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize(
    ("make", "data", "targets", "train"),
    [
        (bert, classified(), ("*query", "*value"), ("classifier*",)),
        (gpt2, continued(), ("*c_attn", "*c_fc"), ()),
    ],
)
def test_peft_loads_an_exported_adapter(
    make: Any, data: Federation, targets: Any, train: Any, engine: str, tmp_path: Path
):
    base = make(1)
    adapter = LoRA(targets=targets, rank=2, train=train)
    run = simulate(
        "fedavg",
        copy.deepcopy(base),
        data,
        rounds=2,
        engine=engine,
        adapter=adapter,
        local=LOCAL,
        references=False,
    )
    folder = export_adapter(run, tmp_path / "adapter", client=0)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()
    ours = load_adapter(folder, base).eval()
    ids = tokens(9)
    with torch.no_grad():
        expected = ours(input_ids=ids).logits
        assert torch.allclose(theirs(input_ids=ids).logits, expected, atol=1e-6)
        assert not torch.allclose(base.eval()(input_ids=ids).logits, expected, atol=1e-6)
