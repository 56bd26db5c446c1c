from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedclade import LocalTraining
from fedclade.core import ClientWork, Layout, Nothing, Round, SplitPart
from fedclade.tasks import FittedTask
from fedclade.training import SimulatedClients
from fedclade.training.blocks import JUDGED, stretch
from fedclade.training.jobs import Job, PrivateSteps, Workload
from tests.tiny import FEATURES, LABELS, federation_of, linear, simulated

TIMES, IDS, SIZES = 3.0, range(4), [40] * 4


def round_with(lr: float) -> Round:
    return Round(1, LocalTraining(batch_size=4, lr=lr))


def work_on_part(longest: float = TIMES, size: int = 20) -> ClientWork:
    part = SplitPart(place=0, count=2, size=size, longest=longest)
    return ClientWork(data=part, store=Nothing())


def loss_of(
    module: nn.Module, model: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor
) -> float:
    Layout.of(module).load(model, module)
    with torch.no_grad():
        return float(FittedTask().mean_loss(module.eval()(inputs), targets))


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize(("lr", "longer"), [(0.01, {True}), (0.8, {True, False}), (10.0, {False})])
def test_an_update_is_sent_longer_where_that_lowers_the_loss_of_its_part(
    lr: float, longer: set[bool], engine: str
):
    federation = federation_of([0, 1, 2, 3], SIZES)
    clients, params = simulated(federation, linear(), engine)
    this_round, found = round_with(lr), set[bool]()
    plain = clients.train(
        IDS, params[None], [0] * 4, this_round, work_on_part(longest=1.0)
    ).required_deltas
    sent = clients.train(IDS, params[None], [0] * 4, this_round, work_on_part()).required_deltas
    for client in IDS:
        inputs, targets = federation.examples(client, "train")
        part = work_on_part().data.of_client(len(targets), client, seed=0, number=1)
        losses = [
            loss_of(linear(), params + times * plain[client], inputs[part], targets[part])
            for times in (1.0, TIMES)
        ]
        found.add(losses[1] < losses[0])
        expected = plain[client] * (TIMES if losses[1] < losses[0] else 1.0)
        torch.testing.assert_close(sent[client], expected)
    assert found == longer


def test_buffers_are_sent_as_they_are():
    module = nn.Sequential(nn.Linear(FEATURES, LABELS), nn.BatchNorm1d(LABELS))
    clients, params = simulated(federation_of([0], [40]), module)
    this_round, parameters = round_with(0.01), Layout.of(module).n_parameters
    plain, sent = (
        clients.train([0], params[None], [0], this_round, work_on_part(longest)).required_deltas[0]
        for longest in (1.0, TIMES)
    )
    torch.testing.assert_close(sent[:parameters], TIMES * plain[:parameters])
    assert len(plain[parameters:])
    assert torch.equal(sent[parameters:], plain[parameters:])


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), 3e38])
def test_an_update_that_diverges_stays_as_it_is(spoilt: float):
    """Also one that would overflow only if it were longer."""
    federation, module = federation_of([0], [40]), linear()
    layout, (x, y) = Layout.of(module), federation.examples(0, "train")
    job = Job(0, 0, x, y, torch.Generator().manual_seed(0))
    work = Workload(module, layout, layout.flatten(module)[None], [job], LocalTraining(), 0.1)
    moved = torch.full((1, layout.size), spoilt)
    stretch(work, moved, TIMES, chunk=100)
    assert torch.equal(moved.nan_to_num(1.0), torch.full((1, layout.size), spoilt).nan_to_num(1.0))


class Flattening(nn.Module):
    """Takes examples that lie side by side in memory; notes how many it gets at once, and whether they are to train."""

    def __init__(self) -> None:
        super().__init__()
        self.output, self.seen = nn.Linear(FEATURES, LABELS), list[tuple[int, bool]]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((len(x), self.training))
        return self.output(x.view(-1).view(len(x), -1))


def test_a_module_gets_few_examples_at_once_and_contiguous_ones():
    module = Flattening()
    federation = federation_of([0], [3 * JUDGED])
    layout, (x, y) = Layout.of(module), federation.examples(0, "train")
    job = Job(0, 0, x, y, torch.Generator().manual_seed(0))
    work = Workload(module, layout, layout.flatten(module)[None], [job], LocalTraining(), 0.1)
    stretch(work, torch.zeros(1, layout.size), TIMES, chunk=100)
    assert [count for count, _ in module.seen[-6:]] == [100, 100, 56] * 2
    assert max(count for count, _ in module.seen) == 100
    assert not any(training for _, training in module.seen)


def test_examples_that_are_private_choose_nothing():
    federation, module = federation_of([0], [40]), linear()
    clients = SimulatedClients(federation, module, engine="loop", private=PrivateSteps(1.0, 0.0))
    params = Layout.of(module).flatten(module)
    alike = [
        clients.train([0], params[None], [0], round_with(0.01), work_on_part(times))
        for times in (1.0, TIMES)
    ]
    assert torch.equal(alike[0].required_deltas, alike[1].required_deltas)


def test_examples_from_all_over_a_part_decide():
    """The first quarter, all of one label or two, would be better off with a longer update; all together are not."""
    federation = federation_of([0], [4 * JUDGED])
    (client,) = federation.clients
    ordered = client.train[torch.argsort(federation.examples(0, "train")[1], stable=True).numpy()]
    federation = replace(federation, clients=(replace(client, train=ordered),))
    clients, params = simulated(federation, linear())
    inputs, targets = federation.examples(0, "train")
    this_round = Round(1, LocalTraining(batch_size=64, lr=6.0))
    everything = SplitPart(place=0, count=1, longest=1.0)
    work = ClientWork(data=everything, store=Nothing())
    longer = ClientWork(data=replace(everything, longest=TIMES), store=Nothing())
    plain = clients.train([0], params[None], [0], this_round, work).required_deltas
    at = [
        [
            loss_of(linear(), params + times * plain[0], inputs[some], targets[some])
            for times in (1.0, TIMES)
        ]
        for some in (slice(JUDGED), slice(None))
    ]
    assert at[0][1] < at[0][0]
    assert at[1][1] > at[1][0]
    again = clients.train([0], params[None], [0], this_round, longer).required_deltas
    assert torch.equal(again, plain)
