"""Examples with weights in every engine, and clients that train a mixture."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedclade import LocalTraining
from fedclade.core import IGNORED, ClientWork, Em, Layout, Mixture, Round
from fedclade.tasks import FittedTask
from fedclade.training import SimulatedClients
from fedclade.training.channels_last import ChannelsLastLoop
from fedclade.training.jobs import Workload
from fedclade.training.loop import LoopEngine
from fedclade.training.stacked import StackedEngine
from fedclade.training.vmap import VmapEngine
from fedclade.training.workers import WorkersEngine
from tests.tiny import federation_of, perceptron

from .worlds import LABELS, SIZES, TOKENS, features, task_of
from .worlds import perceptron as net

SPEC = LocalTraining(epochs=2, batch_size=10, lr=0.2, momentum=0.5)
MIXED = ClientWork(steps=Em(Mixture()))


class Places(nn.Module):
    """Predicts the next of some tokens at every place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(TOKENS, 5), nn.Linear(5, TOKENS)

    def forward(self, x):
        return self.output(self.embedding(x))


def weighted(work: Workload) -> Workload:
    draw = torch.Generator().manual_seed(7)
    return work.weighted({job.client: torch.rand(job.size, generator=draw) for job in work.jobs})


def of_labels() -> Workload:
    return weighted(task_of(net(), features(), LABELS, SPEC))


def of_weighted_labels() -> Workload:
    return replace(of_labels(), task=FittedTask(weights=torch.tensor([1.0, 2.0, 0.5, 3.0])))


def of_texts() -> Workload:
    torch.manual_seed(0)
    tokens = torch.randint(TOKENS, (sum(SIZES), 4), generator=torch.Generator().manual_seed(2))
    work = task_of(Places(), tokens, TOKENS, SPEC)
    jobs = [
        replace(job, targets=job.inputs.roll(-1, 1).index_fill(1, torch.tensor([3]), IGNORED))
        for job in work.jobs
    ]
    return weighted(replace(work, jobs=jobs))


@pytest.mark.parametrize("engine", [StackedEngine, VmapEngine, WorkersEngine, ChannelsLastLoop])
@pytest.mark.parametrize("work", [of_labels, of_weighted_labels, of_texts])
def test_every_engine_weighs_examples_as_the_loop_does(work, engine):
    expected, losses = LoopEngine().train(work())
    plain, _ = LoopEngine().train(
        replace(work(), jobs=[replace(job, weights=None) for job in work().jobs])
    )
    made = engine()
    got, theirs = made.train(work())
    if engine is WorkersEngine:
        made.stop()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(theirs, losses, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(plain, expected, atol=1e-3)


def test_a_step_is_that_of_the_weighted_sum_over_the_number_of_examples():
    work = of_labels()
    work = replace(work, jobs=work.jobs[2:3], spec=LocalTraining(batch_size=10))
    update, loss = LoopEngine().train(work)
    [job], module, layout = work.jobs, net(), Layout.of(net())
    layout.load(work.models[job.row], module)
    mean = (
        functional.cross_entropy(module(job.inputs), job.targets, reduction="none") * job.weights
    ).sum() / job.size
    mean.backward()
    gradient = torch.cat([p.grad.flatten() for p in module.parameters()])
    torch.testing.assert_close(update[0], -work.lr * gradient)
    assert float(loss) == pytest.approx(float(mean.detach()))


def trained(memory: int | None):
    clients = SimulatedClients(
        federation_of([0, 1, 2, 0, 1], [12, 40, 9, 40, 15]), perceptron(), "cpu", "loop", memory
    )
    start = clients.layout.flatten(perceptron())
    models = torch.stack([start, 1.1 * start, start - 0.1])
    for number in (1, 2):
        this = Round(number, LocalTraining(batch_size=4, lr=0.2))
        updates = clients.train(
            [4, 3, 2, 1, 0], models, [0] * 5, this, ClientWork(steps=Em(Mixture(by_label=True)))
        )
    return (
        updates,
        clients.store.tensors(),
        clients.evaluate([2, 0], models, [0, 0], "test", mixture=Mixture()),
    )


def test_the_size_of_blocks_changes_nothing_but_rounding():
    (whole, kept, scores), (blocks, theirs, same) = trained(None), trained(1)
    assert whole.ids == blocks.ids == (4, 3, 2, 1, 0)
    torch.testing.assert_close(blocks.deltas, whole.deltas)
    assert torch.equal(blocks.components, whole.components)
    assert kept.keys() == theirs.keys()
    for name, pi in kept.items():
        torch.testing.assert_close(theirs[name], pi)
        assert float(pi.sum()) == pytest.approx(1)
    torch.testing.assert_close(same.losses, scores.losses)


def test_a_round_that_is_put_again_starts_from_the_weights_before_it():
    clients = SimulatedClients(federation_of([0, 1]), perceptron(), engine="loop")
    start = clients.layout.flatten(perceptron())
    models = torch.stack([start, 1.5 * start])
    spec = LocalTraining(batch_size=4)
    clients.train([0, 1], models, [0, 0], Round(1, spec), MIXED)
    first, again = (clients.train([0, 1], models, [0, 0], Round(2, spec), MIXED) for _ in range(2))
    assert torch.equal(first.deltas, again.deltas)


def test_a_client_that_diverges_is_left_out_and_keeps_no_weights():
    clients = SimulatedClients(federation_of([0, 1]), perceptron(), engine="loop")
    models = torch.stack(
        [clients.layout.flatten(perceptron()), torch.full((clients.layout.size,), torch.nan)]
    )
    updates = clients.train([0, 1], models, [0, 0], Round(1, LocalTraining()), MIXED)
    assert updates.ids == ()
    assert updates.left_out.keys() == {0, 1}
    assert not clients.store
