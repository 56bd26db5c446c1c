"""DP-SGD: every engine gives the updates of the loop, and the loop those of Abadi et al. 2016, Algorithm 1."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedclade import ConfigError, ExamplePrivacy, LocalTraining, ModelError
from fedclade.core import IGNORED, MoreauEnvelope, rng
from fedclade.core.params import Layout
from fedclade.core.queries import Round
from fedclade.data.client_data import Stage
from fedclade.models import build_model
from fedclade.training import SimulatedClients
from fedclade.training.auto import build_engine
from fedclade.training.channels_last import ChannelsLastLoop
from fedclade.training.jobs import CannotTrainTogether, Job, PrivateSteps, Workload, generator_of
from fedclade.training.loop import LoopEngine
from fedclade.training.stacked import CannotStack, StackedEngine
from fedclade.training.vmap import CannotMapError, VmapEngine
from fedclade.training.workers import WorkersEngine
from tests.tiny import federation_of, linear
from tests.training.worlds import (
    LABELS,
    SIZES,
    SPECS,
    Counts,
    Scaled,
    Tied,
    features,
    perceptron,
    task_of,
)

PRIVATE = PrivateSteps(clip_norm=0.5, noise_multiplier=1.0)
ALL_AT_ONCE = LocalTraining(steps=1, batch_size=1000, lr=1.0)
"""One step of SGD on all examples of a client: each is in the sample with probability 1."""

ENGINES = {"loop": LoopEngine, "stacked": StackedEngine, "vmap": VmapEngine}


def images(channels: int = 1, side: int = 16) -> Tensor:
    return torch.randn(sum(SIZES), channels, side, side, generator=torch.Generator().manual_seed(2))


def group_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.Tanh()),
        *(nn.Conv2d(4, 4, 3, padding="same", groups=2, bias=False), nn.GroupNorm(1, 4), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(196, LABELS)),
    )


class Attending(nn.Module):
    """Layers whose inputs have a dimension for places, and attention whose parts are projected one by one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(2, 4), nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.output = nn.Linear(12, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x.view(-1, 3, 2)))
        return self.output((x + self.attention(x, torch.tanh(x), x)[0]).flatten(1))


MODULES = {
    "mclr": (lambda: build_model("mclr", input_shape=(6,), outputs=LABELS, seed=0), features),
    "mlp": (
        lambda: build_model(
            "mlp", input_shape=(6,), outputs=LABELS, seed=0, arguments={"hidden": 9}
        ),
        features,
    ),
    "cnn": (
        lambda: build_model(
            "cnn", input_shape=(1, 16, 16), outputs=LABELS, arguments={"hidden": 8}
        ),
        images,
    ),
    "GroupNorm": (group_norm, images),
    "attention": (Attending, features),
    "tied": (Tied, features),
}


def private(
    module: nn.Module, inputs: Tensor, spec: LocalTraining, steps: PrivateSteps = PRIVATE, **more
) -> Workload:
    """Return clients that train privately, in float64, so that engines differ by rounding alone, not by its kinks."""
    return replace(task_of(module.double(), inputs.double(), LABELS, spec, **more), private=steps)


def trained(engine: str, work: Workload) -> tuple[Tensor, Tensor]:
    return ENGINES[engine]().train(work.redrawn())


@pytest.mark.parametrize("engine", ["stacked", "vmap"])
@pytest.mark.parametrize("name", MODULES)
def test_engines_give_the_updates_of_the_loop(name, engine):
    make, inputs = MODULES[name]
    work = private(make(), inputs(), SPECS["plain"])
    expected, losses = trained("loop", work)
    found, same = trained(engine, work)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(same, losses, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("engine", ["stacked", "vmap"])
@pytest.mark.parametrize("spec", SPECS)
def test_engines_agree_on_momentum_decay_proximal_terms_and_clipping_of_noisy_gradients(
    spec, engine
):
    work = private(perceptron(), features(), SPECS[spec], anchors=[1, 0, 1, 0, 1])
    expected, _ = trained("loop", work)
    torch.testing.assert_close(trained(engine, work)[0], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("settings", [{"optimizer": "adam"}, {"momentum": 0.9, "keep_state": True}])
def test_other_optimizers_take_noisy_gradients_and_keep_their_state(settings):
    work = private(
        perceptron(), features(), LocalTraining(epochs=2, batch_size=10, lr=0.01, **settings)
    )
    loop, stacked = work.redrawn(), work.redrawn()
    expected, _ = LoopEngine().train(loop)
    torch.testing.assert_close(StackedEngine().train(stacked)[0], expected, rtol=1e-9, atol=1e-12)
    assert (
        loop.states.keys()
        == stacked.states.keys()
        == (set(range(5)) if work.spec.keep_state else set())
    )
    for client, kept in loop.states.items():
        assert kept.keys() == stacked.states[client].keys()
        for name, tensor in kept.items():
            torch.testing.assert_close(stacked.states[client][name], tensor, rtol=1e-9, atol=1e-12)
    if work.spec.keep_state:  # and go on with it
        again = replace(
            work, jobs=[replace(job, state=loop.states[job.client]) for job in work.jobs]
        )
        expected, _ = LoopEngine().train(again.redrawn())
        torch.testing.assert_close(
            StackedEngine().train(again.redrawn())[0], expected, rtol=1e-9, atol=1e-12
        )


def test_parameters_that_stay_count_in_no_norm_and_get_no_noise():
    work = replace(
        private(perceptron(), features(), SPECS["plain"]), fixed=frozenset({"0.weight", "0.bias"})
    )
    expected, _ = trained("loop", work)
    slot = next(s for s in work.layout.parameters if s.name == "0.weight")
    assert not expected[:, slot.start : slot.stop].any()
    torch.testing.assert_close(trained("stacked", work)[0], expected, rtol=1e-9, atol=1e-12)
    with pytest.raises(
        CannotTrainTogether, match="engine vmap cannot exclude parameters from training"
    ):
        trained("vmap", work)


def test_worker_processes_give_the_updates_of_the_loop():
    work = replace(task_of(perceptron(), features(), LABELS, SPECS["momentum"]), private=PRIVATE)
    expected, _ = trained("loop", work)
    for inside in ("loop", "stacked"):
        engine = WorkersEngine(inside)
        try:
            torch.testing.assert_close(
                engine.train(work.redrawn())[0], expected, rtol=1e-5, atol=1e-6
            )
        finally:
            engine.stop()


def one_by_one(module: nn.Module, work: Workload, job: Job, clip: float) -> Tensor:
    """Return the sum of the clipped gradients of all examples of a client, by a backward pass for each."""
    total = torch.zeros(work.layout.size, dtype=work.layout.dtype)
    for x, y in zip(job.inputs, job.targets, strict=True):
        work.layout.load(work.models[job.row], module)
        module.zero_grad()
        nn.functional.cross_entropy(module(x[None]), y[None]).backward()
        gradient = torch.cat([p.grad.flatten() for p in module.parameters()])
        total += gradient / max(1.0, float(gradient.norm()) / clip)
    return total


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["mlp", "GroupNorm", "attention"])
@pytest.mark.parametrize("clip", [0.01, 1.0, 1e6])
def test_a_step_is_the_sum_of_gradients_that_are_clipped_one_by_one(name, engine, clip):
    make, inputs = MODULES[name]
    work = private(make(), inputs(), ALL_AT_ONCE, PrivateSteps(clip, 0.0))
    updates, losses = trained(engine, work)
    assert work.jobs
    for job, update, loss in zip(work.jobs, updates, losses, strict=True):
        expected = one_by_one(work.module, work, job, clip)
        torch.testing.assert_close(-update * job.size, expected, rtol=1e-9, atol=1e-12)
        with torch.no_grad():
            assert float(loss) == pytest.approx(
                float(work.task.mean_loss(work.module(job.inputs), job.targets))
            )


@pytest.mark.parametrize("engine", ENGINES)
def test_without_one_example_a_sum_changes_by_the_clip_norm_at_most(engine):
    """The sensitivity that ε is computed with; for an example whose gradient is longer, it is reached."""
    work = private(perceptron(), features(), ALL_AT_ONCE)
    job, changes = work.jobs[0], list[float]()
    alone = [
        replace(job, inputs=x[None], targets=y[None])
        for x, y in zip(job.inputs, job.targets, strict=True)
    ]
    clip = float(
        torch.stack([one_by_one(work.module, work, one, math.inf).norm() for one in alone]).median()
    )
    work = replace(work, private=PrivateSteps(clip, 0.0))
    whole = -trained(engine, replace(work, jobs=[job]))[0][0] * job.size
    for left_out in range(job.size):
        kept = [k for k in range(job.size) if k != left_out]
        fewer = replace(job, inputs=job.inputs[kept], targets=job.targets[kept])
        changes.append(
            float((whole + trained(engine, replace(work, jobs=[fewer]))[0][0] * fewer.size).norm())
        )
    assert max(changes) == pytest.approx(clip, rel=1e-6)
    assert min(changes) < 0.9 * clip
    assert sum(change < clip * (1 - 1e-6) for change in changes) >= job.size // 3


def test_noise_is_that_of_the_multiplier_and_the_norm_over_the_expected_size():
    """On a model without a gradient, σC/(qn) = 2 · 0.5 / 10 of 50 steps add up, within 5 standard errors."""
    module = nn.Sequential(nn.Linear(200, LABELS, bias=False))
    inputs = torch.zeros(100, 200)
    spec = LocalTraining(steps=50, batch_size=10, lr=1.0)
    for engine in ENGINES:
        work = replace(task_of(module, inputs, LABELS, spec, [100]), private=PrivateSteps(0.5, 2.0))
        update = trained(engine, work)[0][0]
        assert float(update.std()) == pytest.approx(0.1 * math.sqrt(50), rel=5 / math.sqrt(2 * 800))


def job_of(size: int, seed: int = 0) -> Job:
    empty = torch.zeros(size, 1)
    return Job(0, 0, empty, empty, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("secret", [False, True])
def test_samples_are_poisson(secret):
    """Each example is in each of 2,000 samples with q = 20/300, alone: sizes have mean nq and variance nq(1−q)."""
    draws = replace(PRIVATE, secret=secret).draws(job_of(300), 20)
    samples = [draws.sample() for _ in range(2000)]
    sizes = torch.tensor([float(len(s)) for s in samples])
    q, n = 20 / 300, 300
    assert (draws.rate, draws.expected) == (q, pytest.approx(20))
    assert float(sizes.mean()) == pytest.approx(20, abs=5 * math.sqrt(n * q * (1 - q) / 2000))
    assert float(sizes.var()) == pytest.approx(n * q * (1 - q), rel=5 * math.sqrt(2 / 2000))
    often = torch.bincount(torch.cat(samples), minlength=n) / 2000
    assert float((often - q).abs().max()) < 5 * math.sqrt(q * (1 - q) / 2000)
    assert all(torch.equal(s, s.unique()) for s in samples[:20])


def test_a_client_with_less_than_a_batch_samples_all_it_has():
    draws = PRIVATE.draws(job_of(7), 20)
    assert (draws.rate, draws.expected, draws.sample().tolist()) == (1.0, 7, list(range(7)))


def test_what_is_keyed_repeats_and_what_is_secret_does_not():
    for steps, same in ((PRIVATE, True), (replace(PRIVATE, secret=True), False)):
        one, other = (steps.draws(job_of(1000), 100) for _ in range(2))
        assert torch.equal(one.sample(), other.sample()) is same
        noise = one.noise(torch.empty(1000))
        assert torch.equal(noise, other.noise(torch.empty(1000))) is same
        assert float(noise.std()) == pytest.approx(PRIVATE.clip_norm / 100, rel=5 / math.sqrt(2000))


@pytest.mark.parametrize(
    "change", [{"number": 2}, {"query": 1}, {"purpose": "beside"}, {"seed": 1}]
)
def test_each_query_draws_anew(change):
    """Also one more model that is trained in a round, whose plain training draws what the round's does."""
    first, second = (
        generator_of(replace(Round(1, ALL_AT_ONCE), **c), 3, PRIVATE) for c in ({}, change)
    )
    assert first.initial_seed() != second.initial_seed()


def test_without_privacy_a_client_draws_what_it_always_did():
    for purpose in ("train", "beside"):
        generator = generator_of(Round(4, ALL_AT_ONCE, 2, purpose), 3, None)
        assert generator.initial_seed() == rng.torch_seed(2, "train", 4, 3)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_that_samples_nobody_sends_noise_alone(engine):
    spec = LocalTraining(steps=1, batch_size=1, lr=1.0)
    work = private(perceptron(), torch.randn(2000, 6), spec, sizes=[2000])
    empty = next(s for s in range(50) if not len(PRIVATE.draws(job_of(2000, s), 1).sample()))
    work = replace(
        work, jobs=[replace(work.jobs[0], generator=torch.Generator().manual_seed(empty))]
    )
    updates, losses = trained(engine, work)
    noise = PRIVATE.draws(job_of(2000, empty), 1).noise(torch.empty(work.layout.n_parameters))
    torch.testing.assert_close(updates[0], -noise.double(), rtol=1e-6, atol=1e-8)
    assert losses.tolist() == [0.0]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_example_whose_gradient_has_no_norm_is_left_out(engine):
    inputs = features()
    inputs[3] = math.inf
    work = private(
        build_model("mclr", input_shape=(6,), outputs=LABELS),
        inputs,
        ALL_AT_ONCE,
        PrivateSteps(1.0, 0.0),
    )
    job = work.jobs[0]
    updates, losses = trained(engine, replace(work, jobs=[job]))
    assert losses.isfinite().all()
    others = [k for k in range(job.size) if k != 3]
    rest = replace(job, inputs=job.inputs[others], targets=job.targets[others])
    torch.testing.assert_close(
        -updates[0] * job.size, one_by_one(work.module, work, rest, 1.0), rtol=1e-9, atol=1e-12
    )


# Which engine


def test_auto_takes_an_engine_that_can(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDCLADE_CACHE_DIR", str(tmp_path))
    engine = build_engine("stacked")
    work = replace(task_of(perceptron(), features(), LABELS, SPECS["plain"]), private=PRIVATE)
    engine.train(work.redrawn())
    assert engine.name == "stacked"
    of_own = replace(
        task_of(perceptron(Scaled()), features(), LABELS, SPECS["plain"]), private=PRIVATE
    )
    with pytest.raises(
        ConfigError, match=r"engine 'stacked' cannot train this model.*'scale', but no stacked form"
    ):
        build_engine("stacked").train(of_own.redrawn())
    auto = build_engine("auto")
    expected, _ = trained("loop", of_own)
    torch.testing.assert_close(auto.train(of_own.redrawn())[0], expected, rtol=1e-4, atol=1e-6)
    assert auto.name in ("vmap", "workers", "loop")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.output = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.lstm(x.view(-1, 3, 2))[0][:, -1])


def test_layers_that_do_not_tell_examples_apart_are_left_to_others():
    work = replace(task_of(Recurrent(), features(), LABELS, SPECS["plain"]), private=PRIVATE)
    with pytest.raises(CannotStack, match=r"'lstm' .* computes a gradient for each example"):
        trained("stacked", work)
    expected, _ = trained("loop", work)
    torch.testing.assert_close(trained("vmap", work)[0], expected, rtol=1e-4, atol=1e-6)
    broken = replace(
        task_of(perceptron(Counts()), features(), LABELS, SPECS["plain"]), private=PRIVATE
    )
    with pytest.raises(
        CannotMapError, match=r"Sequential changes its buffers in training|torch.func.vmap"
    ):
        trained("vmap", broken)
    with pytest.raises(
        CannotTrainTogether, match="fuses optimizer steps, which DP-SGD does not allow"
    ):
        ChannelsLastLoop().train(work.redrawn())


def test_a_text_counts_as_one_example_of_the_places_that_count():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, LABELS))
    work = private(module, torch.randn(sum(SIZES), 3, 2), SPECS["plain"])
    targets = torch.randint(LABELS, (sum(SIZES), 3))
    targets[::3, 1:] = IGNORED
    jobs = [
        replace(job, targets=y)
        for job, y in zip(work.jobs, targets.split(list(SIZES)), strict=True)
    ]
    work = replace(work, jobs=jobs)
    expected, _ = trained("loop", work)
    for engine in ("stacked", "vmap"):
        torch.testing.assert_close(trained(engine, work)[0], expected, rtol=1e-9, atol=1e-12)


# What is refused


def test_layers_that_mix_examples_are_refused_with_advice():
    norm = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    with pytest.raises(
        ConfigError, match=r"layer '1' \(BatchNorm1d\) mixes the examples of a batch; use GroupNorm"
    ):
        SimulatedClients(federation_of([0]), norm, private=PRIVATE)
    norm[1].eval().requires_grad_(False)  # at rest it is a scale, and mixes nothing
    SimulatedClients(federation_of([0]), norm, private=PRIVATE)
    SimulatedClients(
        federation_of([0]), nn.Sequential(nn.GroupNorm(2, 6), nn.Linear(6, 4)), private=PRIVATE
    )


def test_buffers_that_training_changes_are_refused():
    work = replace(
        task_of(perceptron(Counts()), features(), LABELS, SPECS["plain"]), private=PRIVATE
    )
    with pytest.raises(
        ModelError,
        match=r"training changes buffer '1.calls' of Sequential, but DP-SGD adds no noise to",
    ):
        trained("loop", work)


@pytest.mark.parametrize("engine", ENGINES)
def test_rules_and_weights_are_refused(engine):
    work = private(perceptron(), features(), SPECS["plain"])
    with pytest.raises(
        ConfigError, match=r"does not support local rule .*; set privacy.level = 'client'"
    ):
        trained(engine, replace(work, rule=MoreauEnvelope(lam=1.0, steps=2, lr=0.1)))
    weighted = work.weighted({job.client: torch.ones(job.size) for job in work.jobs})
    with pytest.raises(ConfigError, match="does not support examples with different weights"):
        trained(engine, weighted)


def test_data_that_changes_during_a_run_is_refused():
    federation = federation_of([0, 1])
    changing = replace(federation, stages=(Stage(3, federation.clients),))
    with pytest.raises(
        ConfigError,
        match="needs data that stays the same, since the privacy loss of an example is not known",
    ):
        SimulatedClients(changing, linear(), private=PRIVATE)


def test_the_steps_of_a_privacy():
    steps = PrivateSteps.of(ExamplePrivacy(clip_norm=2.0, noise_multiplier=3.0), secret=True)
    assert steps == PrivateSteps(2.0, 3.0, secret=True)
    assert steps.as_trial() == PrivateSteps(2.0, 0.0)
    assert Layout.of(perceptron()).n_parameters > 0
