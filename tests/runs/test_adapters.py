"""A small transformer, pretrained on Shakespeare, whose adapters learn ciphers: planted clusters of clients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedclade import (
    CFL,
    FLHC,
    LocalTraining,
    LoRA,
    Run,
    Signature,
    export_adapter,
    load_adapter,
    simulate,
)
from fedclade.core import Layout
from fedclade.data import ClientData, Federation, Pool

TEXT = """
shall i compare thee to a summers day thou art more lovely and more temperate rough winds do shake the darling
buds of may and summers lease hath all too short a date sometime too hot the eye of heaven shines and often is
his gold complexion dimmd and every fair from fair sometime declines by chance or natures changing course
untrimmd but thy eternal summer shall not fade nor lose possession of that fair thou owest nor shall death
brag thou wanderst in his shade when in eternal lines to time thou growest so long as men can breathe or eyes
can see so long lives this and this gives life to thee my mistress eyes are nothing like the sun coral is far
more red than her lips red if snow be white why then her breasts are dun if hairs be wires black wires grow on
her head i have seen roses damaskd red and white but no such roses see i in her cheeks and in some perfumes is
there more delight than in the breath that from my mistress reeks i love to hear her speak yet well i know
that music hath a far more pleasing sound i grant i never saw a goddess go my mistress when she walks treads
on the ground and yet by heaven i think my love as rare as any she belied with false compare
"""
LETTERS = " abcdefghijklmnopqrstuvwxyz"
LENGTH, WIDTH, EXAMPLES = 16, 32, 40
TRUTH = (0, 1, 0, 1, 0, 1)
ADAPTER = LoRA(targets=("q", "v", "fc*"), rank=4, alpha=8.0)
SETTINGS = {"adapter": ADAPTER, "local": LocalTraining(epochs=2, batch_size=20, lr=0.5), "seed": 1}


class Block(nn.Module):
    """Attention and a perceptron, each beside what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (
            each(y).unflatten(-1, (4, -1)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.fc2(torch.relu(self.fc1(self.norms[1](x))))


class Transformer(nn.Module):
    """Predicts the next letter at every place."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, len(LETTERS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.letters(tokens) + self.places(
            torch.arange(LENGTH, device=tokens.device).expand_as(tokens)
        )
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sequences(n: int, draw: np.random.Generator) -> Tensor:
    """Return pieces of the text, ``[n, LENGTH + 1]``."""
    text = torch.tensor([LETTERS.index(letter) for letter in " ".join(TEXT.split())])
    starts = torch.from_numpy(draw.integers(len(text) - LENGTH, size=n))
    return text[starts[:, None] + torch.arange(LENGTH + 1)]


@pytest.fixture(scope="module")
def pretrained() -> nn.Module:
    torch.manual_seed(0)
    model, draw = Transformer(), np.random.default_rng(0)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(100):
        some = sequences(32, draw)
        adam.zero_grad()
        loss = functional.cross_entropy(model(some[:, :-1]).flatten(0, 1), some[:, 1:].flatten())
        loss.backward()
        adam.step()
    assert loss < 2  # of log(27) = 3.3 nats
    return model


@pytest.fixture(scope="module")
def federation() -> Federation:
    """Clients write by one of two ciphers."""
    draw = np.random.default_rng(1)
    ciphers = [torch.from_numpy(draw.permutation(len(LETTERS))) for _ in range(2)]
    texts = torch.cat([ciphers[cluster][sequences(EXAMPLES, draw)] for cluster in TRUTH])
    parts = [
        np.split(np.arange(i * EXAMPLES, (i + 1) * EXAMPLES), [30, 30]) for i in range(len(TRUTH))
    ]
    clients = tuple(ClientData(i, f"c{i}", i, *part) for i, part in enumerate(parts))
    n = np.arange(len(texts))
    words = tuple(LETTERS)
    pool = Pool(
        "ciphers",
        texts[:, :-1],
        texts[:, 1:],
        0 * n,
        n,
        n[:0],
        len(LETTERS),
        "language",
        vocabulary=words,
    )
    return Federation(pool, clients, dict(enumerate(TRUTH)), "ciphers")


@pytest.fixture(scope="module")
def run(pretrained, federation) -> Run:
    settings = {"rounds": 2, "engine": "stacked", "signature": Signature(of="lora_B"), **SETTINGS}
    return simulate(CFL(split_rounds=(1,)), pretrained, federation, **settings)


def test_the_ciphers_are_found_by_b_alone(run, pretrained, federation):
    assert run.metric_rows[-1]["ari"] == 1.0
    of_b = [slot.stop - slot.start for slot in run.layout.parameters if "lora_B" in slot.name]
    assert run.tree.nodes[1].cached.shape[1] == sum(of_b)
    signature = Signature(of="lora_B")
    by_distance = FLHC(rounds_before=0, metric="cosine", linkage="average")
    found = simulate(
        by_distance,
        pretrained,
        federation,
        rounds=1,
        engine="stacked",
        signature=signature,
        **SETTINGS,
    )
    assert found.metric_rows[-1]["ari"] == 1.0


def test_stacked_clients_train_as_single_ones(run, pretrained, federation):
    settings = {"rounds": 2, "engine": "loop", "signature": Signature(of="lora_B"), **SETTINGS}
    alone = simulate(CFL(split_rounds=(1,)), pretrained, federation, **settings)
    assert run.tree.nodes
    for mine, theirs in zip(run.tree.nodes, alone.tree.nodes, strict=True):
        torch.testing.assert_close(mine.params, theirs.params, rtol=0, atol=1e-4)


def test_adapters_alone_travel(run, pretrained, federation):
    # of two blocks: q and v, fc1 and fc2
    pairs = 2 * (2 * 4 * (WIDTH + WIDTH) + 2 * 4 * (WIDTH + 2 * WIDTH))
    assert run.layout.size == pairs
    whole = simulate(
        "fedavg", pretrained, federation, rounds=1, engine="loop", local=SETTINGS["local"], seed=1
    )
    assert (
        whole.metric_rows[0]["bytes_up"] / run.metric_rows[0]["bytes_up"]
        == whole.layout.size / pairs
    )
    assert (
        whole.metric_rows[0]["bytes_down"] / run.metric_rows[0]["bytes_down"]
        == whole.layout.size / pairs
    )


def test_a_clients_adapter_goes_around_the_base_again(run, pretrained, tmp_path):
    module = load_adapter(export_adapter(run, tmp_path / "adapter", client=3), pretrained)
    layout = Layout.of(module)
    assert torch.equal(layout.flatten(module), run.tree.node_for(3).params)
    assert module.blocks[0].q.scaling == 8 / 4


def test_two_exports_of_an_adapter_are_the_same_bytes_and_leftovers_of_a_killed_one_go(
    run, tmp_path
):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / ".adapter.writing").mkdir()
    (tmp_path / "b" / ".adapter.writing" / "adapter_config.json").write_text("{")
    for name in ("a", "b", "c"):
        export_adapter(run, tmp_path / name / "adapter", client=3)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (
            len({(tmp_path / each / "adapter" / name).read_bytes() for each in ("a", "b", "c")})
            == 1
        )
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["adapter"]


def test_so_does_one_that_the_client_keeps(pretrained, federation, tmp_path):
    run = simulate("finetune", pretrained, federation, rounds=1, engine="stacked", **SETTINGS)
    module = load_adapter(export_adapter(run, tmp_path / "adapter", client=3), pretrained)
    assert torch.equal(Layout.of(module).flatten(module), run.kept[3]["model"])
    assert not torch.equal(run.kept[3]["model"], run.tree.nodes[0].params)
