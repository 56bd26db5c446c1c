"""The stacked engine gives the updates of the loop, whatever the model, the sizes and the local training."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from fedclade import LocalTraining
from fedclade.core import IGNORED, rng
from fedclade.core.params import Layout
from fedclade.models import MODELS, LoRA, Parts, build_model, freeze
from fedclade.training.auto import objection
from fedclade.training.jobs import Job, Workload
from fedclade.training.loop import LoopEngine
from fedclade.training.stacked import CannotStack, StackedEngine
from fedclade.training.stacking.batches import joined
from fedclade.training.stacking.stacked_module import StackedModule
from fedclade.training.stacking.stacked_parameter import FEW_ROWS

WORDS, PLACES, OUTPUTS = 11, 5, 4
SIZES, ROWS = (7, 10, 23, 2, 10), (0, 1, 0, 1, 1)
"""Less than a batch of 5 and a bit, whole batches only, a ragged one; sizes not in order; two models."""

SPECS = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "weight decay": {"weight_decay": 0.1},
    "proximal": {"mu": 0.5},
    "clipped": {"clip_norm": 0.2},
    "all but clipped": {"momentum": 0.5, "weight_decay": 0.05, "mu": 0.2},
    "all": {"epochs": 3, "momentum": 0.5, "weight_decay": 0.05, "mu": 0.2, "clip_norm": 0.2},
}


class Everything(nn.Module):
    """BatchNorm, dropout of nothing, tied weights, a residual connection and an embedding: predicts every place."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width, padding_idx=0)
        self.mix = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0)
        self.output = nn.Linear(width, WORDS, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.dropout(torch.relu(self.mix(x)))
        return self.output(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Sequences(nn.Module):
    """A recurrent layer of any kind over ``[n, T, features]``, and its last states."""

    def __init__(
        self, kind: type[nn.LSTM | nn.GRU], batch_first: bool, bias: bool = True, dropout: float = 0
    ) -> None:
        super().__init__()
        self.recurrent = kind(
            3, 4, num_layers=2, batch_first=batch_first, bias=bias, dropout=dropout
        )
        self.output = nn.Linear(8, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        states, last = self.recurrent(x if self.recurrent.batch_first else x.transpose(0, 1))
        last = last[0] if isinstance(last, tuple) else last
        mean = states.mean(1 if self.recurrent.batch_first else 0)
        return self.output(torch.cat((mean, last[0]), -1))


class Shared(nn.Module):
    """One layer used twice, and one whose output the loss does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        return self.twice(torch.tanh(self.twice(x)))


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, OUTPUTS))
    module[0].requires_grad_(False)
    return module


def resting() -> nn.Module:
    """A frozen body in evaluation mode, behind which a head trains."""
    body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))
    body[1].running_mean.fill_(0.3)
    return nn.Sequential(
        body.eval().requires_grad_(False), nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5)
    )


class Backbone(nn.Module):
    """What may rest in a backbone, layers that have no stacked form among it, and a head of which a part rests."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.layers = nn.ModuleList(
            [nn.Linear(4, 6), nn.LayerNorm(6), nn.MultiheadAttention(6, 2, batch_first=True)]
        )
        self.recurrent = nn.GRU(6, 5, bidirectional=True, batch_first=True)
        self.norms = nn.ModuleList([nn.InstanceNorm1d(10, affine=True), nn.BatchNorm1d(10)])
        self.twice = nn.Linear(10, 10)
        self.head = nn.Linear(10, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        linear, norm, attention = self.layers
        x = torch.cat([self.token.expand(len(x), -1, -1), norm(linear(x))], 1)
        x = self.recurrent(attention(x, x, x)[0])[0].transpose(1, 2)
        for layer in self.norms:
            x = layer(x)
        return self.head(torch.tanh(self.twice(self.twice(x.mean(2)))))


def backbone() -> nn.Module:
    module = Backbone()
    freeze(
        module,
        [
            "token",
            "layers",
            "recurrent",
            "norms.0",
            "norms.1.r*",
            "norms.1.n*",
            "twice.weight",
            "head.bias",
        ],
    )
    return module


def adapted() -> nn.Module:
    attention = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, dropout=0.0)
    module = nn.Sequential(attention, nn.Flatten(), nn.Dropout(0.2), nn.Linear(12, OUTPUTS))
    return Parts(adapter=LoRA(targets=("linear*", "3"), rank=2, alpha=2.0)).applied(module)


def images() -> nn.Module:
    return nn.Sequential(
        *(
            nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
        ),
        *(nn.Conv2d(4, 4, 3, padding="same", groups=2), nn.GroupNorm(2, 4), nn.ReLU()),
        *(
            nn.ConvTranspose2d(4, 2, 2, stride=2),
            nn.Flatten(),
            nn.LayerNorm(72),
            nn.Linear(72, OUTPUTS),
        ),
    )


def signals() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv1d(2, 4, 3, dilation=2), nn.BatchNorm1d(4, affine=False), nn.Tanh()),
        *(
            nn.ConvTranspose1d(4, 2, 3),
            nn.LayerNorm((2, 8), bias=False),
            nn.Flatten(),
            nn.Linear(16, OUTPUTS),
        ),
    )


OWN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "everything": (Everything, (PLACES,)),
    "shared": (Shared, (4,)),
    "frozen": (frozen, (4,)),
    "resting": (resting, (2, 6, 6)),
    "backbone": (backbone, (3, 4)),
    "adapted": (adapted, (3, 4)),
    "images": (images, (2, 6, 6)),
    "signals": (signals, (2, 10)),
    "lstm, time first": (lambda: Sequences(nn.LSTM, batch_first=False), (5, 3)),
    "lstm without bias": (lambda: Sequences(nn.LSTM, batch_first=True, bias=False), (5, 3)),
    "gru": (lambda: Sequences(nn.GRU, batch_first=True), (5, 3)),
    "gru, time first, without bias": (
        lambda: Sequences(nn.GRU, batch_first=False, bias=False),
        (5, 3),
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, OUTPUTS)),
        (4,),
    ),
    "dropout between layers": (lambda: Sequences(nn.LSTM, batch_first=True, dropout=0.3), (5, 3)),
    "a layer alone": (lambda: nn.Linear(4, OUTPUTS), (4,)),
}

BUILT: dict[str, dict[str, object]] = {
    "mclr": {"input_shape": (4,)},
    "mlp": {"input_shape": (4,), "arguments": {"hidden": 6}},
    "cnn": {"input_shape": (1, 16, 16), "arguments": {"hidden": 4}},
    "lenet": {"input_shape": (1, 12, 12)},
    "cifar_cnn": {"input_shape": (2, 8, 8), "arguments": {"width": 2}},
    "lstm": {
        "input_shape": (PLACES,),
        "vocabulary_size": WORDS,
        "arguments": {"embedding": 3, "hidden": 4},
    },
    "vector_lstm": {"input_shape": (PLACES, 3), "arguments": {"hidden": 4, "dense": 5}},
    "lstm language": {
        "input_shape": (PLACES,),
        "vocabulary_size": WORDS,
        "arguments": {"embedding": 3, "hidden": 4},
    },
}


def world(name: str, dtype: torch.dtype, sizes: Sequence[int] = SIZES, rows: Sequence[int] = ROWS):
    """Return a module, its two models, and what makes its clients' jobs afresh."""
    torch.manual_seed(0)
    language = name in ("lstm language", "everything")
    if name in OWN:
        build, shape = OWN[name]
        module = build()
    else:
        task = "language" if language else "classification"
        model, _, _ = name.partition(" ")
        module = build_model(
            model, outputs=WORDS if language else OUTPUTS, task=task, **BUILT[name]
        )
        shape = BUILT[name]["input_shape"]
    module = module.to(dtype)
    layout = Layout.of(module)
    models = layout.flatten(module).repeat(2, 1)
    models[:, : layout.n_parameters] += 0.1 * torch.randn(2, layout.n_parameters, dtype=dtype)
    tokens = any(isinstance(layer, nn.Embedding) for layer in module.modules())
    clients = []
    for n in sizes:
        x = torch.randint(WORDS, (n, *shape)) if tokens else torch.randn(n, *shape, dtype=dtype)
        y = torch.randint(WORDS if language else OUTPUTS, (n, PLACES) if language else (n,))
        clients.append((x, y))

    def jobs(seed: int = 0, anchor: int | None = None) -> list[Job]:
        return [
            Job(c, rows[c], x, y, rng.torch_generator(seed, "t", c), anchor)
            for c, (x, y) in enumerate(clients)
        ]

    return module, layout, models, jobs


def by_loop(module, layout, models, jobs, spec: LocalTraining, lr: float) -> tuple[Tensor, Tensor]:
    return LoopEngine().train(Workload(module, layout, models, jobs, spec, lr))


def assert_same(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Each client's update is within a relative error of that of the loop, and so is its loss."""
    bound = 1e-4 if expected[0].dtype == torch.float32 else 1e-10
    errors = (got[0] - expected[0]).norm(dim=1) / expected[0].norm(dim=1)
    assert errors.max() < bound
    assert got[0].dtype == expected[0].dtype
    assert got[1].dtype == torch.float64
    torch.testing.assert_close(got[1], expected[1], rtol=1e-5, atol=0)


def assert_as_the_loop(name: str, dtype: torch.dtype, **settings) -> None:
    module, layout, models, jobs = world(name, dtype)
    spec = LocalTraining(**{"epochs": 2, "batch_size": 5, "lr": 0.3, **settings})
    expected = by_loop(module, layout, models, jobs(), spec, 0.2)
    assert_same(
        StackedEngine().train(Workload(module, layout, models, jobs(), spec, 0.2)), expected
    )


def test_every_model_of_the_library_is_tried():
    assert {name.partition(" ")[0] for name in BUILT} == set(MODELS)


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [("plain", torch.float32), ("all but clipped", torch.float64), ("all", torch.float64)],
    ids=["plain", "all but clipped", "all"],
)
@pytest.mark.parametrize("name", [*BUILT, *OWN])
def test_updates_are_those_of_the_loop(name, spec, dtype):
    assert_as_the_loop(name, dtype, **SPECS[spec])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", ["mlp", "images", "lstm language", "everything", "backbone"])
def test_so_are_those_of_any_local_training(name, spec):
    """Models with every kind of parameter: of dense layers, convolutions, embeddings, normalisation, frozen ones."""
    assert_as_the_loop(name, torch.float64, **SPECS[spec])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", ["lstm", "lstm language", "gru"])
def test_products_of_many_rows_are_summed_first(name, dtype):
    """10 examples of 5 places each are more rows than are added to the parameters one by one."""
    assert_as_the_loop(name, dtype, batch_size=10, weight_decay=0.1)
    assert PLACES * 10 > FEW_ROWS


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    batch_size=st.integers(1, 7),
    epochs=st.integers(1, 3),
    name=st.sampled_from(["mlp", "dropout", "lstm"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_sizes_and_batches_may_be_anything(sizes, batch_size, epochs, name, seed):
    module, layout, models, jobs = world(
        name, torch.float64, sizes, [c % 2 for c in range(len(sizes))]
    )
    spec = LocalTraining(epochs=epochs, batch_size=batch_size, lr=0.1)
    expected = by_loop(module, layout, models, jobs(seed), spec, 0.1)
    assert_same(
        StackedEngine().train(Workload(module, layout, models, jobs(seed), spec, 0.1)), expected
    )


@pytest.mark.parametrize("name", ["everything", "frozen", "lstm"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_anchor_may_be_another_model(name, momentum):
    module, layout, models, jobs = world(name, torch.float64)
    spec = LocalTraining(epochs=2, batch_size=5, mu=0.5, momentum=momentum)
    expected = by_loop(module, layout, models, jobs(anchor=1), spec, 0.1)
    assert_same(
        StackedEngine().train(Workload(module, layout, models, jobs(anchor=1), spec, 0.1)), expected
    )
    itself, _ = by_loop(module, layout, models, jobs(), spec, 0.1)
    pulled = [row != 1 for row in ROWS]
    assert torch.equal((itself != expected[0]).any(1), torch.tensor(pulled))


def test_the_order_of_the_jobs_does_not_matter():
    module, layout, models, jobs = world("everything", torch.float64)
    spec = LocalTraining(epochs=2, batch_size=5)
    expected, losses = StackedEngine().train(Workload(module, layout, models, jobs(), spec, 0.1))
    order = [3, 0, 4, 2, 1]
    shuffled = jobs()
    got = StackedEngine().train(
        Workload(module, layout, models, [shuffled[i] for i in order], spec, 0.1)
    )
    assert_same(got, (expected[order], losses[order]))


def test_an_engine_starts_every_round_afresh():
    """Other clients, another step size, with momentum before: nothing stays."""
    module, layout, models, jobs = world("everything", torch.float64)
    engine = StackedEngine()
    engine.train(
        Workload(module, layout, models, jobs(), LocalTraining(batch_size=5, momentum=0.9), 0.3)
    )
    engine.train(
        Workload(module, layout, models, jobs()[:2], LocalTraining(batch_size=3, mu=1.0), 0.3)
    )
    spec = LocalTraining(batch_size=5, momentum=0.5)
    expected = by_loop(module, layout, models, jobs(), spec, 0.1)
    assert_same(engine.train(Workload(module, layout, models, jobs(), spec, 0.1)), expected)


def test_a_client_that_diverges_spoils_no_other():
    module, layout, models, jobs = world("mlp", torch.float64)
    broken = jobs()
    broken[2] = replace(broken[2], inputs=torch.full_like(broken[2].inputs, torch.inf))
    others = [0, 1, 3, 4]
    engine = StackedEngine()
    for spec in (
        LocalTraining(batch_size=5, weight_decay=0.1),
        LocalTraining(batch_size=5, momentum=0.5),
    ):
        expected, losses = by_loop(module, layout, models, jobs(), spec, 0.1)
        broken = [
            replace(j, generator=fresh.generator) for j, fresh in zip(broken, jobs(), strict=True)
        ]
        got, got_losses = engine.train(Workload(module, layout, models, broken, spec, 0.1))
        assert got[2].isnan().any()
        assert_same((got[others], got_losses[others]), (expected[others], losses[others]))
        assert_same(
            engine.train(Workload(module, layout, models, jobs(), spec, 0.1)), (expected, losses)
        )


def test_padded_places_do_not_count():
    """Each client's loss is the mean over its own places that count, however many those are."""
    module, layout, models, jobs = world("lstm language", torch.float64)

    def padded() -> list[Job]:
        lengths = torch.arange(30) % PLACES + 1
        masks = [torch.arange(PLACES) >= lengths[: len(job.targets), None] for job in jobs()]
        return [
            replace(j, targets=j.targets.masked_fill(m, IGNORED))
            for j, m in zip(jobs(), masks, strict=True)
        ]

    spec = LocalTraining(batch_size=5)
    expected = by_loop(module, layout, models, padded(), spec, 0.1)
    assert_same(
        StackedEngine().train(Workload(module, layout, models, padded(), spec, 0.1)), expected
    )


def test_examples_that_lie_in_one_tensor_are_not_copied():
    everything = torch.arange(24.0).view(6, 2, 2)
    pieces = everything.split([1, 3, 2])
    rows, starts = joined([pieces[2], pieces[0], pieces[1]])
    assert (rows.data_ptr(), rows.tolist(), starts) == (
        everything.data_ptr(),
        everything.tolist(),
        [4, 0, 1],
    )
    rows, starts = joined([pieces[2], pieces[1]])
    assert torch.equal(rows, everything[1:])
    assert starts == [3, 0]


@pytest.mark.parametrize(
    "pieces",
    [
        [torch.ones(2, 3), torch.zeros(1, 3)],
        [*torch.arange(12.0).view(3, 4).T.split(2)],
        [torch.arange(12.0)[:4].view(2, 2), torch.arange(12.0)[5:9].view(2, 2)],
        [t.view(2, 2) for t in (torch.arange(12.0)[1:9]).split([4, 4])],
    ],
    ids=["apart", "not contiguous", "apart and shifted", "shifted"],
)
def test_examples_that_do_not_are_joined(pieces):
    rows, starts = joined(pieces)
    assert pieces
    for piece, start in zip(pieces, starts, strict=True):
        assert torch.equal(rows[start : start + len(piece)], piece)


def test_dropout_belongs_to_each_client():
    """A client draws its own masks, whoever trains with it; and the global generator is left alone."""
    module, layout, models, jobs = world("dropout", torch.float64)
    before = torch.get_rng_state()
    together, _ = StackedEngine().train(
        Workload(module, layout, models, jobs(), LocalTraining(batch_size=5), 0.1)
    )
    alone, _ = StackedEngine().train(
        Workload(module, layout, models, jobs()[2:3], LocalTraining(batch_size=5), 0.1)
    )
    torch.testing.assert_close(together[2:3], alone)
    assert torch.equal(torch.get_rng_state(), before)


def test_random_layers_that_are_not_stacked_draw_from_the_keys():
    module = nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.Dropout1d(0.5), nn.Flatten(), nn.Linear(4, OUTPUTS)
    )
    layout = Layout.of(module)
    _, _, _, jobs = world("mlp", torch.float32)
    models = layout.flatten(module).repeat(2, 1)
    torch.manual_seed(1)
    first, _ = StackedEngine().train(Workload(module, layout, models, jobs(), LocalTraining(), 0.1))
    torch.manual_seed(2)
    assert torch.equal(
        StackedEngine().train(Workload(module, layout, models, jobs(), LocalTraining(), 0.1))[0],
        first,
    )
    assert not torch.equal(
        StackedEngine().train(Workload(module, layout, models, jobs(seed=1), LocalTraining(), 0.1))[
            0
        ],
        first,
    )


class Counting(nn.Module):
    """Scales by a buffer; on request, counts in another how often it is called after so many times."""

    def __init__(self, counts: bool = False, after: int = 0) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.linear, self.counts, self.left = nn.Linear(4, OUTPUTS), counts, after
        if counts:
            self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.counts and self.training:
            self.left -= 1
            self.calls = self.calls + int(self.left < 0)
        return self.linear(x * self.scale)


def trained(
    module: nn.Module, models: Tensor | None = None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return what the engine and the loop give for clients with four features."""
    _, _, _, jobs = world("mlp", torch.float32)
    layout, spec = Layout.of(module), LocalTraining(batch_size=5)
    models = layout.flatten(module).repeat(2, 1) if models is None else models
    got = StackedEngine().train(Workload(module, layout, models, jobs(), spec, 0.1))
    return got, by_loop(module, layout, models, jobs(), spec, 0.1)


def test_a_users_own_buffer_is_shared():
    assert_same(*trained(Counting()))


def test_a_buffer_that_differs_between_the_models_cannot():
    module = Counting()
    layout = Layout.of(module)
    models = layout.flatten(module).repeat(2, 1)
    models[1, -1] = 5.0
    with pytest.raises(
        CannotStack, match=r"'scale' \(Counting\) is a buffer that differs between the models"
    ):
        trained(module, models)


@pytest.mark.parametrize("after", [0, 3], ids=["from the first step on", "later"])
def test_a_buffer_that_training_changes_cannot(after):
    with pytest.raises(
        CannotStack, match=r"'calls' \(Counting\) is a buffer that training changes"
    ):
        trained(Counting(counts=True, after=after))


class Holds(nn.Module):
    """A user's module with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.scale = nn.Parameter(torch.ones(4))
        self.linear = nn.Linear(4, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.inner.scale)


class Wrapped(nn.Linear):
    """May do anything in its forward."""


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, OUTPUTS))
    module[0].register_forward_hook(lambda *_: None)
    return module


def ties() -> nn.Module:
    """Hold a layer's weight a second time, where a forward of the user's could read it."""
    module = nn.Sequential(nn.Linear(4, OUTPUTS))
    module.register_parameter("again", module[0].weight)
    return module


def given_more(**more: Tensor | nn.Module) -> nn.Module:
    """Return a layer that has a stacked form, and something that this form does not have."""
    layer = nn.Linear(4, OUTPUTS)
    for name, value in more.items():
        if isinstance(value, nn.Parameter | nn.Module):
            setattr(layer, name, value)
        else:
            layer.register_buffer(name, value)
    return nn.Sequential(layer)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Holds(), r"'inner' \(Module\) has a parameter of its own, 'scale', but no stacked form"),
        (
            nn.Sequential(Wrapped(4, OUTPUTS)),
            r"'0' \(Wrapped\) has a parameter of its own, 'weight', but no stacked",
        ),
        (Wrapped(4, OUTPUTS), r"the module \(Wrapped\) has a parameter of its own, 'weight'"),
        (
            ties(),
            r"the module \(Sequential\) has a parameter of its own, 'again', but no stacked form",
        ),
        (
            given_more(scale=nn.Parameter(torch.ones(4))),
            r"'0' \(Linear\) has a parameter of its own, 'scale', but no",
        ),
        (
            given_more(scale=torch.ones(4)),
            r"'0' \(Linear\) has a buffer of its own, 'scale', but no stacked form",
        ),
        (
            given_more(inner=Holds().inner),
            r"'0.inner' \(Module\) has a parameter of its own, 'scale', but no stacked",
        ),
        (hooked(), r"'0' \(Linear\) has hooks"),
        (
            nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 4)),
            r"'0' \(BatchNorm1d\) cannot be stacked: the layer has the option momentum=None, but",
        ),
        (
            nn.LSTM(4, 4, bidirectional=True),
            r"the module \(LSTM\) cannot be stacked: the layer has the option bidirectional=True, but",
        ),
        (
            nn.LSTM(4, 4, proj_size=2),
            r"\(LSTM\) cannot be stacked: the layer has the option proj_size, but",
        ),
        (
            nn.Sequential(nn.Embedding(4, 4, max_norm=1.0)),
            r"'0' \(Embedding\) cannot be stacked: the layer has the option max_norm, which",
        ),
        (
            nn.Sequential(nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular")),
            r"'0' \(Conv1d\) cannot be stacked: the layer has the option padding_mode='circular', but",
        ),
    ],
)
def test_layers_that_cannot_are_named(module, message):
    with pytest.raises(CannotStack, match=message):
        trained(module)


class Forward(nn.Module):
    """A dense layer, and a forward of its own."""

    def __init__(self, of: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.of = nn.Linear(4, OUTPUTS), of

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self.linear, x)


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (
            lambda linear, x: linear(x - x.mean(0)),
            "gives different updates when several clients .*: its forward method mixes",
        ),
        (
            lambda linear, x: linear(x.unsqueeze(0).expand(4, -1, -1)).mean(0),
            "gives different updates when several clients",
        ),
        (
            lambda linear, x: functional.linear(x, linear.weight),
            "fails when several clients are trained together: .* must be Tensor",
        ),
        (
            lambda linear, x: linear(x)[:1].expand(len(x), -1),
            "gives different updates when several clients",
        ),
    ],
    ids=["batch mean", "batch not first", "reads the weights", "repeats the first"],
)
def test_a_forward_that_does_not_survive_folding_is_found_out(of, message):
    _, _, _, jobs = world("mlp", torch.float32)
    module = Forward(of)
    # as in a first round
    layout, one_model = (Layout.of(module), [replace(job, row=0) for job in jobs()])
    task = Workload(
        module, layout, layout.flatten(module)[None], one_model, LocalTraining(batch_size=5), 0.1
    )
    assert re.match(f"Forward {message}", str(objection(StackedEngine(), task)))


def test_a_refusal_can_be_sent_from_one_process_to_another():
    refusal = CannotStack.of("inner", nn.Linear(1, 1), "has hooks")
    assert str(pickle.loads(pickle.dumps(refusal))) == str(refusal) == "'inner' (Linear) has hooks"


def test_nothing_is_drawn_where_the_module_cannot():
    _, _, _, jobs = world("mlp", torch.float32)
    given_jobs, module = jobs(), Holds()
    layout = Layout.of(module)
    with pytest.raises(CannotStack):
        StackedEngine().train(
            Workload(
                module,
                layout,
                layout.flatten(module).repeat(2, 1),
                given_jobs,
                LocalTraining(),
                0.1,
            )
        )
    for job, fresh in zip(given_jobs, jobs(), strict=True):
        assert torch.equal(job.generator.get_state(), fresh.generator.get_state())


def test_a_token_out_of_range_is_an_error():
    """It should not read the table of the next client."""
    module, layout, models, jobs = world("lstm", torch.float32)
    given_jobs = jobs()
    engine = StackedEngine()
    engine.train(Workload(module, layout, models, jobs(), LocalTraining(), 0.1))
    given_jobs[0].inputs[0, 0] = WORDS
    with pytest.raises(RuntimeError, match="index out of range"):
        engine.train(Workload(module, layout, models, given_jobs, LocalTraining(), 0.1))


@pytest.mark.parametrize("name", ["frozen", "resting", "backbone", "adapted"])
def test_what_is_frozen_is_there_once_for_any_number_of_clients(name):
    module, layout, models, _ = world(name, torch.float32)
    stacked = StackedModule(module, layout)
    frozen = {p.untyped_storage().data_ptr() for p in layout.frozen.values()}
    assert {p.untyped_storage().data_ptr() for p in stacked.module.parameters()} <= frozen
    taken = {}
    for n in (2, 20):
        stacked.load(models, [c % 2 for c in range(n)])
        stacked.bind(0, n)
        everyone = {p.everyone.untyped_storage() for p in stacked._parameters}
        taken[n] = sum(
            {s.data_ptr(): s.nbytes() for s in everyone if s.data_ptr() not in frozen}.values()
        )
    assert taken[20] - taken[2] == 18 * layout.size * 4
