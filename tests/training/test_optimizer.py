from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedclade import ConfigError, LocalTraining
from fedclade.core.params import Layout
from fedclade.training.auto import build_engine
from fedclade.training.jobs import CannotTrainTogether, Engine
from fedclade.training.loop import LoopEngine
from fedclade.training.memory import bytes_per_client
from fedclade.training.optimizer import ELEMENT_WISE, LocalOptimizer, PlainSGD, clipping, per_client
from fedclade.training.stacked import CannotStack, StackedEngine
from fedclade.training.stacking.batches import Plan
from fedclade.training.vmap import CannotMapError, VmapEngine
from fedclade.training.workers import WorkersEngine
from tests.training.worlds import FEATURES, LABELS, SIZES, Tied, features, perceptron, task_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("largest", [0.3, 2.5, 100.0])
def test_each_client_is_clipped_as_torch_clips_it(largest, dtype):
    """Over tensors of any shape, a single number included; the three clients' norms are around 0.2, 2 and 20."""
    draw = torch.Generator().manual_seed(0)
    gradients = [
        torch.randn(3, *shape, generator=draw, dtype=dtype) for shape in ((2, 3), (4,), ())
    ]
    for gradient in gradients:
        gradient *= per_client(torch.tensor([0.1, 1.0, 10.0], dtype=dtype), gradient)
    scales = clipping(gradients, largest)
    assert len(scales) == 3
    for client in range(3):
        parameters = [nn.Parameter(torch.zeros_like(gradient[client])) for gradient in gradients]
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient[client].clone()
        nn.utils.clip_grad_norm_(parameters, largest)
        for p, gradient in zip(parameters, gradients, strict=True):
            torch.testing.assert_close(gradient[client] * scales[client], p.grad)


def test_what_is_not_finite_stays_with_its_client():
    scales = clipping([torch.tensor([[3.0, 4.0], [torch.nan, 1.0], [torch.inf, 1.0]])], 1.0)
    assert scales[0] == pytest.approx(1 / 5)
    assert scales[1].isnan()
    assert scales[2] == 0


class Unused(nn.Module):
    """A layer whose output the loss does not reach: what decays everywhere else leaves it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.layer(x)
        return x


RULES = {
    "nesterov": {"momentum": 0.9, "options": {"nesterov": True}},
    "dampening": {"momentum": 0.9, "weight_decay": 0.1, "options": {"dampening": 0.5}},
    "amsgrad": {
        "optimizer": "adam",
        "weight_decay": 0.1,
        "options": {"amsgrad": True, "betas": (0.8, 0.9)},
    },
    "centered": {"optimizer": "rmsprop", "momentum": 0.5, "options": {"centered": True}},
    **{
        name: {"optimizer": name}
        for name in sorted(kind.__name__.lower() for kind in ELEMENT_WISE - {torch.optim.SGD})
    },
    "asgd": {"optimizer": "asgd", "options": {"lambd": 1.0}},
    "rprop": {"optimizer": "rprop", "weight_decay": None},
}
MODULES = {
    "ragged": perceptron,
    "ragged, with BatchNorm": lambda: perceptron(nn.BatchNorm1d(8)),
    "tied": Tied,
    "not reached": lambda: perceptron(Unused()),
}


def both(
    spec: LocalTraining, module: Callable[[], nn.Module] = perceptron
) -> tuple[Tensor, Tensor]:
    """Return the updates of the stacked engine and of the loop, in float64."""
    sizes = [n for n in SIZES if n != 1]  # of which BatchNorm takes no batch
    work = [
        task_of(module().double(), features(sizes, torch.float64), LABELS, spec, sizes)
        for _ in range(2)
    ]
    (got, losses), (expected, of_loop) = StackedEngine().train(work[0]), LoopEngine().train(work[1])
    torch.testing.assert_close(losses, of_loop, rtol=1e-9, atol=0)
    return got, expected


@pytest.mark.parametrize(
    ("rule", "module"),
    # A bias before BatchNorm has a gradient of rounding alone, of which Rprop takes the sign.
    [(r, m) for r in RULES for m in MODULES if not (r == "rprop" and "BatchNorm" in m)],
)
def test_stacked_steps_are_those_of_the_loop(rule, module):
    """Clients of 3, 4, 1 and 4 batches, so that they have taken different numbers of steps after the first epoch."""
    spec = LocalTraining(
        **{"epochs": 3, "batch_size": 11, "lr": 0.02, "weight_decay": 0.1, **RULES[rule]}
    )
    got, expected = both(spec, MODULES[module])
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_another_optimizer_gives_other_updates(rule):
    """Others than plain SGD, and than the same optimizer without the options, by more than a thousandth."""
    common = {"epochs": 3, "batch_size": 11, "lr": 0.02, "weight_decay": 0.1}
    got, _ = both(LocalTraining(**{**common, **RULES[rule]}))
    without = {key: value for key, value in RULES[rule].items() if key != "options"}
    others = [LocalTraining(**common)]
    if "options" in RULES[rule]:
        others.append(LocalTraining(**{**common, **without}))
    for other in others:
        updates, _ = both(other)
        assert ((got - updates).norm(dim=1) > 1e-3 * updates.norm(dim=1)).all()


@pytest.mark.parametrize("rule", ["adam", "nesterov", "adagrad"])
@pytest.mark.parametrize(
    "more", [{"mu": 0.5}, {"clip_norm": 0.2}, {"mu": 0.5, "clip_norm": 0.2}], ids=str
)
def test_the_proximal_term_and_clipping_come_before_the_step(rule, more):
    spec = LocalTraining(**{"epochs": 2, "batch_size": 11, "lr": 0.02, **RULES[rule], **more})
    got, expected = both(spec)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)
    without, _ = both(replace(spec, mu=0.0, clip_norm=None))
    assert not torch.allclose(got, without, rtol=1e-3)


COUNTS = [
    {"steps": 3},
    {"steps": 9},
    {"steps": 9, "optimizer": "adam"},
    {"steps": 9, "momentum": 0.9, "mu": 0.5},
]


@pytest.mark.parametrize("spec", COUNTS, ids=str)
@pytest.mark.parametrize("module", MODULES)
def test_steps_go_on_through_epochs_that_begin_at_different_times(spec, module):
    got, expected = both(LocalTraining(batch_size=11, **spec), MODULES[module])
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)


def test_so_many_steps_as_epochs_have_are_the_same():
    sizes = (20, 16)
    epochs, steps = (
        LocalTraining(batch_size=10, **count) for count in ({"epochs": 3}, {"steps": 6})
    )
    for engine in (LoopEngine(), StackedEngine(), VmapEngine()):
        of = [
            engine.train(task_of(perceptron(), features(sizes), LABELS, spec, sizes))
            for spec in (epochs, steps)
        ]
        assert torch.equal(of[0][0], of[1][0])
        assert torch.equal(of[0][1], of[1][1])


def test_vmap_takes_so_many_steps():
    spec = LocalTraining(steps=7, batch_size=10)
    got, expected = (
        e.train(task_of(perceptron(), features(), LABELS, spec))
        for e in (VmapEngine(), LoopEngine())
    )
    torch.testing.assert_close(got, expected)


def test_clients_with_as_many_batches_are_one_band():
    assert Plan.of((40, 38, 21), 20, True).edges == [0, 3]
    assert Plan.of((40, 38, 12), 20, True).edges == [0, 2, 3]
    assert Plan.of((40, 38, 12), 20, True, steps=(5, 5, 5)).edges == [0, 3]


@pytest.mark.parametrize("name", ["adafactor", "muon", f"{__name__}:Own"])
def test_an_optimizer_that_looks_at_whole_tensors_takes_the_loop(name):
    spec = LocalTraining(optimizer=name, lr=0.01)
    work = task_of(nn.Linear(FEATURES, LABELS, bias=False), features(), LABELS, spec)
    with pytest.raises(CannotStack, match=f"optimizer {name} is not known to treat each entry"):
        StackedEngine().train(work)
    with pytest.raises(CannotMapError, match=f"optimizer {name} changes parameters in place"):
        VmapEngine().train(work)
    auto = build_engine("auto")
    updates, _ = auto.train(work)
    assert auto.name == "loop"
    plain, _ = LoopEngine().train(task_of(work.module, features(), LABELS, LocalTraining(lr=0.01)))
    assert ((updates - plain).norm(dim=1) > 0.01 * plain.norm(dim=1)).all()


class Own(torch.optim.Adam):
    """A subclass may do anything."""


def test_what_it_keeps_of_every_entry_is_counted_as_memory():
    assert [
        len(LocalOptimizer(0.1, kind=kind).states)
        for kind in (torch.optim.Adam, torch.optim.Adagrad)
    ] == [2, 1]
    module, batch = nn.Linear(FEATURES, LABELS), torch.zeros(1, FEATURES)
    layout = Layout.of(module)
    sgd, adam = (
        bytes_per_client(module, layout, batch, LocalTraining(optimizer=name))
        for name in ("sgd", "adam")
    )
    assert adam - sgd == layout.size * 4


def test_the_forward_pass_may_be_of_lower_precision():
    spec = LocalTraining(batch_size=10, epochs=2, precision="bfloat16")
    updates, losses = LoopEngine().train(task_of(perceptron(), features(), LABELS, spec))
    whole, of_whole = LoopEngine().train(
        task_of(perceptron(), features(), LABELS, replace(spec, precision="float32"))
    )
    assert updates.dtype == torch.float32
    errors = (updates - whole).norm(dim=1) / whole.norm(dim=1)
    assert (errors > 1e-4).all()
    assert (errors < 0.02).all()
    torch.testing.assert_close(losses, of_whole, rtol=1e-2, atol=0)
    mapped, _ = VmapEngine().train(task_of(perceptron(), features(), LABELS, spec))
    torch.testing.assert_close(mapped, updates, rtol=0.1, atol=2e-3)
    stacked, _ = StackedEngine().train(task_of(perceptron(), features(), LABELS, spec))
    torch.testing.assert_close(stacked, updates, rtol=0.1, atol=2e-3)


KEPT = {
    **{name: rule for name, rule in RULES.items() if name != "rprop"},
    "momentum": {"momentum": 0.9},
    "momentum, clipped": {"momentum": 0.9, "clip_norm": 0.2},
}


def rounds(
    engines: Sequence[Engine], spec: LocalTraining, cohorts: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Return the updates of some rounds, in each of which some clients train and keep what their optimizers did."""
    states: dict[int, dict[str, Tensor]] = {}
    updates: list[Tensor] = []
    for engine, cohort in zip(engines, cohorts, strict=True):
        work = task_of(perceptron().double(), features(dtype=torch.float64), LABELS, spec)
        jobs = [replace(work.jobs[k], state=states.get(k)) for k in cohort]
        work = replace(work, jobs=jobs)
        updates.append(engine.train(work)[0])
        states |= work.states
    return updates


COHORTS = [0, 1, 2, 3], [0, 2, 4], [0, 1, 2, 3, 4]
"""Some have taken more steps than others when they come together again."""


@pytest.mark.parametrize("rule", KEPT)
def test_what_an_optimizer_keeps_comes_back_whichever_engine_had_it(rule):
    spec = LocalTraining(**{"batch_size": 11, "lr": 0.02, "keep_state": True, **KEPT[rule]})
    expected = rounds([LoopEngine()] * 3, spec, COHORTS)
    for engines in ([StackedEngine()] * 3, [LoopEngine(), StackedEngine(), LoopEngine()]):
        for got, one in zip(rounds(engines, spec, COHORTS), expected, strict=True):
            torch.testing.assert_close(got, one, rtol=1e-6, atol=1e-9)
    anew = rounds([LoopEngine()] * 3, replace(spec, keep_state=False), COHORTS)
    assert torch.equal(anew[0], expected[0])
    assert not torch.allclose(anew[2], expected[2], rtol=1e-3)


def test_a_state_is_by_parameter_and_nobody_elses():
    spec = LocalTraining(optimizer="adam", keep_state=True, batch_size=11)
    for engine in (LoopEngine(), StackedEngine()):
        work = task_of(perceptron(), features(), LABELS, spec)
        engine.train(work)
        assert set(work.states) == {0, 1, 2, 3, 4}
        assert work.states[2]["0.weight.exp_avg"].shape == (8, FEATURES)
        assert [float(work.states[k]["0.weight.step"]) for k in range(5)] == [3, 3, 1, 1, 4]
        assert {name.rpartition(".")[0] for name in work.states[0]} == {
            "0.weight",
            "0.bias",
            "2.weight",
            "2.bias",
        }
        before = {name: tensor.clone() for name, tensor in work.states[2].items()}
        again = replace(work.redrawn(), jobs=[replace(work.jobs[2], state=work.states[2])])
        engine.train(again)
        assert all(torch.equal(work.states[2][name], tensor) for name, tensor in before.items())
        assert float(again.states[2]["0.weight.step"]) == 2
    plain = task_of(perceptron(), features(), LABELS, LocalTraining(keep_state=True))
    StackedEngine().train(plain)
    assert set(map(len, plain.states.values())) == {0}


def test_worker_processes_keep_no_state():
    work = task_of(
        perceptron(), features(), LABELS, LocalTraining(optimizer="adam", keep_state=True)
    )
    with pytest.raises(
        CannotTrainTogether, match="worker processes cannot return the state of optimizers"
    ):
        WorkersEngine().train(work)
    with pytest.raises(
        ConfigError,
        match="engine 'workers' cannot train this model: worker processes cannot return the state of",
    ):
        build_engine("workers").train(work)


class Remembers(torch.optim.SGD):
    """Keeps something else than tensors."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["words"] = ["a"]


def test_what_is_no_number_cannot_be_kept():
    work = task_of(
        perceptron(),
        features(),
        LABELS,
        LocalTraining(optimizer=Remembers, lr=0.1, keep_state=True),
    )
    with pytest.raises(
        ConfigError,
        match=r"optimizer Remembers has a list in its state \('words'\), .* local.keep_state = false",
    ):
        LoopEngine().train(work)


def test_the_state_of_what_stays_fixed_is_left_out():
    """Where parts train in turn, each leaves its own."""
    spec, fixed = (
        LocalTraining(optimizer="adam", batch_size=11, keep_state=True),
        frozenset({"0.weight", "0.bias"}),
    )
    updates: list[Tensor] = []
    for engine in (LoopEngine(), StackedEngine()):
        work = task_of(perceptron().double(), features(dtype=torch.float64), LABELS, spec)
        engine.train(work)
        jobs = [replace(job, state=work.states[job.client]) for job in work.redrawn().jobs]
        head = replace(work, jobs=jobs, fixed=fixed, states={})
        updates.append(engine.train(head)[0])
        assert {name.rpartition(".")[0] for name in head.states[0]} == {"2.weight", "2.bias"}
        assert float(head.states[0]["2.weight.step"]) == 6
    torch.testing.assert_close(updates[1], updates[0], rtol=1e-6, atol=1e-9)


def test_clients_of_many_sizes_have_one_optimizer(monkeypatch):
    """Calling one for each size takes longer than its step, with small models."""
    made: list[int] = []
    make = LocalOptimizer.torch_optimizer

    def counted(
        self: LocalOptimizer, parameters: Sequence[nn.Parameter], fused: bool = False
    ) -> torch.optim.Optimizer:
        made.append(len(parameters))
        return make(self, parameters, fused)

    monkeypatch.setattr(LocalOptimizer, "torch_optimizer", counted)
    sizes, spec = (50, 40, 30, 20), LocalTraining(optimizer="adagrad", batch_size=10, epochs=2)
    assert len(LocalOptimizer.of(spec, 0.1).states) == 1
    made.clear()
    StackedEngine().train(task_of(perceptron(), features(sizes), LABELS, spec, sizes))
    assert made == [4 * len(sizes)]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-3])
def test_plain_steps_are_those_of_torch_to_the_last_bit(momentum: float, weight_decay: float):
    """Also of a parameter that gets a gradient only now and then, and of one that gets none."""
    draw = torch.Generator().manual_seed(0)
    begun = [torch.randn(size, generator=draw) for size in ((7, 5), (5,), (3,))]
    rule = LocalOptimizer(lr=0.1, momentum=momentum, weight_decay=weight_decay)
    ours, theirs = ([nn.Parameter(value.clone()) for value in begun] for _ in range(2))
    optimizers = [rule.for_one_client(ours), rule.torch_optimizer(theirs)]
    assert isinstance(optimizers[0], PlainSGD)
    for number in range(6):
        gradients = [torch.randn(value.shape, generator=draw) for value in begun]
        for parameters, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            parameters[0].grad = gradients[0].clone()
            if number % 2:
                parameters[1].grad = gradients[1].clone()
            optimizer.step()
    for mine, others, before in zip(ours, theirs, begun, strict=True):
        assert torch.equal(mine, others)
        assert torch.equal(mine, before) == (len(before) == 3)
