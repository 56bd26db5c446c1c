"""Stacked attention is that of the loop, whatever its options; so are transformers, where they take a batch first."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedclade.training import auto
from fedclade.training.auto import build_engine, objection
from fedclade.training.jobs import Workload
from fedclade.training.loop import LoopEngine
from fedclade.training.stacked import CannotStack, StackedEngine
from tests.training.worlds import LABELS, SIZES, SPECS, TOKENS, task_of

PLACES, WIDTH, HEADS = 5, 8, 2

Use = Callable[[nn.MultiheadAttention, Tensor], Tensor]


class Attends(nn.Module):
    """Attention over the places of an example, used in some way; then their mean."""

    def __init__(self, use: Use, **options) -> None:
        super().__init__()
        self.use = use
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True, **options})
        self.output = nn.Linear(WIDTH, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.use(self.attention, x).mean(1))


def output(attention: nn.MultiheadAttention, x: Tensor, **options) -> Tensor:
    return attention(x, x, x, need_weights=False, **options)[0]


def with_weights(attention: nn.MultiheadAttention, x: Tensor, **options) -> Tensor:
    """Return what depends on the weights too, averaged over heads or not."""
    y, weights = attention(x, x, x, **options)
    return y + (weights if weights.dim() == 3 else weights[:, 0] - weights[:, 1]) @ x


def between(attention: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """Let the first places look at the others, with keys and values of widths of their own."""
    return attention(x[:, :2], x[:, 2:, :3], x[:, 2:, :4])[0]


def earlier(x: Tensor) -> Tensor:
    return torch.ones(PLACES, PLACES, dtype=torch.bool).triu(1)


def of_each(x: Tensor) -> Tensor:
    """Return numbers to add for every example, head and pair of places, ``[n·heads, places, places]``."""
    pairs = x[..., :HEADS].transpose(1, 2).unsqueeze(-1) - x[..., :1].transpose(1, 2).unsqueeze(-2)
    return pairs.flatten(0, 1)


def some(x: Tensor) -> Tensor:
    """Return which places are padding: never the first."""
    return (x[..., 0] > 0.3) & (torch.arange(PLACES) > 0)


def all_or_none(x: Tensor) -> Tensor:
    """Return which places are padding: in some examples all of them, in the others none."""
    return (x[:, 0, :1] > 0).expand(-1, PLACES)


USES: dict[str, tuple[Use, dict[str, object]]] = {
    "self": (output, {}),
    "without bias": (output, {"bias": False}),
    "weights": (with_weights, {}),
    "weights of each head": (lambda a, x: with_weights(a, x, average_attn_weights=False), {}),
    "cross": (lambda a, x: a(x[:, :2], x[:, 2:], x[:, 2:])[0], {}),
    "cross without bias": (
        lambda a, x: a(x[:, :2], x[:, 2:], x[:, 1:4], need_weights=False)[0],
        {"bias": False},
    ),
    "other widths": (between, {"kdim": 3, "vdim": 4}),
    "other widths without bias": (between, {"kdim": 3, "vdim": 4, "bias": False}),
    "causal": (lambda a, x: output(a, x, attn_mask=earlier(x), is_causal=True), {}),
    "causal with weights": (lambda a, x: with_weights(a, x, attn_mask=earlier(x)), {}),
    "a mask for each": (lambda a, x: output(a, x, attn_mask=of_each(x)), {}),
    "padding": (lambda a, x: output(a, x, key_padding_mask=some(x)), {}),
    "padding with weights": (
        lambda a, x: with_weights(a, x, key_padding_mask=some(x).to(x.dtype) * -2),
        {},
    ),
    "both masks": (lambda a, x: output(a, x, key_padding_mask=some(x), attn_mask=earlier(x)), {}),
    "all padding": (lambda a, x: output(a, x, key_padding_mask=all_or_none(x)), {}),
    "dropout": (output, {"dropout": 0.3}),
    "dropout with weights": (with_weights, {"dropout": 0.3}),
    "dropout and all padding": (
        lambda a, x: output(a, x, key_padding_mask=all_or_none(x)),
        {"dropout": 0.3},
    ),
}


class Text(nn.Module):
    """A small transformer over tokens; token 0 is padding."""

    def __init__(
        self, layers: int = 1, expand: bool = True, padding: bool = False, **options
    ) -> None:
        super().__init__()
        options = {"dropout": 0.0, "batch_first": True, **options}
        self.words, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(PLACES, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 12, **options)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.output, self.expand, self.padding = nn.Linear(WIDTH, LABELS), expand, padding

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(PLACES)
        x = self.words(tokens) + self.places(places.expand_as(tokens) if self.expand else places)
        if not self.padding:
            return self.output(self.encoder(x).mean(1))
        padding = tokens == 0
        x = self.encoder(x, src_key_padding_mask=padding).masked_fill(padding.unsqueeze(-1), 0)
        return self.output(x.sum(1) / (~padding).sum(1, keepdim=True).clamp(min=1))


class Decodes(nn.Module):
    """A decoder layer: attention to itself and to something else."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, 12, dropout=0, batch_first=True)
        self.output = nn.Linear(WIDTH, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.decoder(x[:, :3], x[:, 3:]).mean(1))


def task(
    build: Callable[[], nn.Module], spec: str = "plain", dtype: torch.dtype = torch.float64
) -> Workload:
    torch.manual_seed(0)
    module = build().to(dtype)
    draw = torch.Generator().manual_seed(1)
    if isinstance(module, Text):
        inputs = torch.randint(TOKENS, (sum(SIZES), PLACES), generator=draw)
        inputs[:, 0] = 1  # no text is all padding
    else:
        inputs = torch.randn(sum(SIZES), PLACES, WIDTH, generator=draw, dtype=dtype)
    return task_of(module, inputs, LABELS, SPECS[spec])


def assert_as_the_loop(build: Callable[[], nn.Module], spec: str, dtype: torch.dtype) -> None:
    expected, losses = LoopEngine().train(task(build, spec, dtype))
    got, mean_losses = StackedEngine().train(task(build, spec, dtype))
    errors = (got - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.max() < (1e-4 if dtype == torch.float32 else 1e-10)
    torch.testing.assert_close(mean_losses, losses, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("spec", ["plain", "everything"])
@pytest.mark.parametrize("name", USES)
def test_attention_is_that_of_the_loop(name, spec, dtype):
    use, options = USES[name]
    assert_as_the_loop(lambda: Attends(use, **options), spec, dtype)


TRANSFORMERS: dict[str, Callable[[], nn.Module]] = {
    "text": Text,
    "two layers, padding": lambda: Text(layers=2, padding=True),
    "norm first, gelu, no bias": lambda: Text(
        norm_first=True, activation="gelu", bias=False, padding=True
    ),
    "decoder": Decodes,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_transformer_is_that_of_the_loop(name, spec, dtype):
    assert_as_the_loop(TRANSFORMERS[name], spec, dtype)


def test_dropout_of_a_transformer_belongs_to_each_client():
    """It is not that of the loop, where attention leaves its output in another order in memory; but no one else's."""
    together, _ = StackedEngine().train(task(lambda: Text(dropout=0.3)))
    alone = task(lambda: Text(dropout=0.3))
    one, _ = StackedEngine().train(replace(alone, jobs=alone.jobs[1:2]))
    torch.testing.assert_close(together[1:2], one)
    without, _ = StackedEngine().train(task(Text))
    assert (together - without).norm() > 0.1 * without.norm()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: Attends(output, batch_first=False),
            r"'attention' \(MultiheadAttention\) cannot be stacked: the layer has the option batch_first=False, but",
        ),
        (
            lambda: Attends(output, add_bias_kv=True),
            r"\(MultiheadAttention\) cannot be stacked: the layer has the option add_bias_kv=True, but",
        ),
        (
            lambda: Attends(output, add_zero_attn=True),
            r"\(MultiheadAttention\) cannot be stacked: the layer has the option add_zero_attn=True, but",
        ),
        (
            lambda: Text(batch_first=False),
            r"'encoder.layers.0.self_attn' \(MultiheadAttention\) cannot be stacked: the layer has the option "
            "batch_first=False",
        ),
    ],
)
def test_what_cannot_be_stacked_is_refused(build, message):
    with pytest.raises(CannotStack, match=message):
        StackedEngine().train(task(build))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: Attends(lambda a, x: a(x[0], x[0], x[0])[0].expand_as(x)),
            r"should have shape \[batch, length, width\], got .*8",
        ),
        (
            lambda: Text(expand=False),
            r"fails when several clients are trained together: shape .* is invalid",
        ),
    ],
)
def test_what_fails_on_clients_together_is_found_out(build, message):
    assert re.search(message, str(objection(StackedEngine(), task(build))))


@pytest.mark.parametrize(
    "build", [lambda: Attends(output, batch_first=False), lambda: Text(expand=False)]
)
def test_auto_trains_it_all_the_same(build, monkeypatch):
    monkeypatch.setattr(auto, "fastest", lambda engines, task: next(iter(engines)))
    engine = build_engine("auto")
    got, _ = engine.train(task(build))
    expected, _ = LoopEngine().train(task(build))
    assert engine.name in ("vmap", "loop")
    torch.testing.assert_close(got, expected)
