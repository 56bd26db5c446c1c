"""Clients that are asked for several updates at once."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fedclade import LocalTraining
from fedclade.channel.middleware import Channel
from fedclade.channel.retry import FaultInjection, Faults
from fedclade.channel.signature import CountSketch, Replicating, Sketching
from fedclade.core import ClientWork, Nothing, SplitPart, Splits
from fedclade.core.queries import Round
from fedclade.core.updates import DROPPED_OUT, Updates
from tests.tiny import (
    Around,
    Attended,
    Metered,
    details,
    federation_of,
    perceptron,
    simulated,
    streamed,
)

SIZES = [20, 26, 31, 24]
ASKED = Round(2, LocalTraining(epochs=2, batch_size=10, lr=0.2), seed=5, purpose="replicate")
WORK = ClientWork(data=Splits(3), store=Nothing())
IDS, ROWS = [2, 0, 3], [0, 1, 0]


def world(sketch: CountSketch | None = None):
    clients, params = simulated(federation_of([0, 1, 0, 1], SIZES), perceptron())
    models = torch.stack([params, params + 0.1])
    return clients, Channel(clients, Replicating(sketch)), models


@pytest.mark.parametrize("dim", [None, 7])
@pytest.mark.parametrize("part_size", [0, 5])
def test_an_answer_is_the_mean_update_of_disjoint_parts_and_all_signatures(dim, part_size):
    clients, _, models = world()
    sketch = CountSketch(5, 92, dim) if dim else None
    local = ASKED.local.on_part(3, 5) if part_size else ASKED.local
    longest = ASKED.local.lr / local.lr
    parts = []
    for k in range(3):
        alone = replace(ASKED, local=local, purpose=f"replicate {k}")
        part = SplitPart(place=k, count=3, size=part_size, longest=longest)
        work = ClientWork(data=part, store=Nothing())
        parts.append(clients.train(IDS, models, ROWS, alone, work))
    expected = [sketch.apply(part.signatures) if sketch else part.signatures for part in parts]
    work = ClientWork(data=Splits(3, part_size), store=Nothing())
    updates = world(sketch)[1].train(IDS, models, ROWS, ASKED, work)
    assert updates.ids == tuple(IDS)
    assert torch.equal(updates.parts, torch.stack(expected, dim=1))
    mean = (
        sum(part.sizes[:, None] * part.required_deltas for part in parts)
        / sum(part.sizes for part in parts)[:, None]
    )
    torch.testing.assert_close(updates.required_deltas, mean.float())
    assert updates.n_parameters == 92
    assert updates.sizes.tolist() == [15.0 if part_size else SIZES[client] for client in IDS]
    torch.testing.assert_close(updates.losses, sum(part.losses for part in parts) / 3)
    torch.testing.assert_close(updates.norms, updates.required_deltas.double().norm(dim=1))


@pytest.mark.parametrize("part_size", [0, 5])
def test_of_parts_that_are_not_compared_the_mean_alone_travels(part_size):
    clients, _, models = world()
    sketch, splits = CountSketch(5, 92, 7), Splits(3, part_size)
    compared = ClientWork(data=splits, store=Nothing())
    not_compared = ClientWork(data=replace(splits, compared=False), store=Nothing())
    metered = Metered(Channel(clients, Replicating(sketch)))
    mean = Channel(metered).train(IDS, models, ROWS, ASKED, not_compared)
    assert mean.parts is None
    whole = world(sketch)[1].train(IDS, models, ROWS, ASKED, compared)
    assert torch.equal(mean.required_deltas, whole.required_deltas)
    assert metered.meter.bytes_up == len(IDS) * 92 * 4


def test_any_other_round_is_passed_on():
    clients, replicating, models = world(CountSketch(5, 92, 7))
    work = ClientWork(store=Nothing())
    assert torch.equal(
        replicating.train(IDS, models, ROWS, ASKED, work).required_deltas,
        clients.train(IDS, models, ROWS, ASKED, work).required_deltas,
    )


class Absent(Around):
    """Clients of whom one sends nothing of its second part."""

    def train(self, ids, models, assignment, this_round, work):
        updates = self.clients.train(ids, models, assignment, this_round, work)
        if (work.data.place, work.data.count) != (1, 3):
            return updates
        return replace(updates.select([2, 3]), left_out={0: "loss nan"})


def test_who_lacks_one_replicate_is_left_out():
    clients, _, models = world()
    updates = Channel(Absent(clients), Replicating(None)).train(IDS, models, ROWS, ASKED, WORK)
    assert (updates.ids, updates.left_out) == ((2, 3), {0: "loss nan"})
    assert updates.required_deltas.shape == (2, 92)
    assert updates.parts.shape == (2, 3, 92)


def test_a_run_that_streams_sums_the_means_and_keeps_the_signatures():
    clients, _, models = world()
    metered = Metered(Channel(clients, Replicating(sketch := CountSketch(5, 92, 7))))
    updates = streamed(Channel(metered, Sketching(sketch)), 1).train(IDS, models, ROWS, ASKED, WORK)
    whole = world(sketch)[1].train(IDS, models, ROWS, ASKED, WORK)
    assert torch.equal(updates.parts, whole.parts)
    assert torch.equal(updates.signatures, sketch.apply(whole.signatures))
    assert updates.deltas is None
    weighted = whole.sizes[:, None].float() * whole.required_deltas
    torch.testing.assert_close(
        updates.sums.groups, torch.stack([weighted[0] + weighted[2], weighted[1]])
    )
    assert updates.ids == tuple(IDS)
    assert metered.meter.bytes_up == len(IDS) * (92 + 3 * 7) * 4
    assert metered.meter.bytes_down == len(IDS) * models[0].nbytes


def test_faults_meet_answers_not_replicates_and_each_replicate_is_a_release():
    """Of those who drop out nothing comes, be they all; who is asked again sends again."""
    clients, _, models = world()
    faults = FaultInjection(Faults(dropout=0.5), dict(enumerate(range(4))), 92)
    faulty = Channel(clients, Replicating(None), faults)
    attended = Attended(faulty, tells_releases=True)
    updates = attended.train(IDS, models, ROWS, replace(ASKED, seed=3), WORK, require_all=True)
    events = {event.kind: details(event) for event in attended.told()}
    assert events["retried"]["clients"] >= 1
    assert set(updates.ids) | set(updates.left_out) == set(IDS)
    assert updates.parts.shape[1:] == (3, 92)
    assert events["released"]["clients"] == {str(client): 3 for client in sorted(updates.ids)}


def test_answers_of_nobody_are_joined_with_those_of_others():
    answer = world()[1].train(IDS, world()[2], ROWS, ASKED, WORK)
    nobody = Updates.of_nobody({1: DROPPED_OUT, 2: DROPPED_OUT}, torch.zeros(1, 92), 92)
    for joined in (nobody.concat(answer), answer.concat(nobody)):
        assert (joined.ids, joined.left_out) == (tuple(IDS), {1: DROPPED_OUT})
        assert torch.equal(joined.required_deltas, answer.required_deltas)
        assert torch.equal(joined.parts, answer.parts)


def test_equal_parts_stay_the_same_and_leave_the_rest_out():
    parts = [
        SplitPart(k, 3, size=4).of_client(14, key=7, seed=5, number=number).tolist()
        for number in (1, 2)
        for k in range(3)
    ]
    assert [len(part) for part in parts] == [4] * 6
    assert len({i for part in parts[:3] for i in part}) == 12
    assert parts[:3] == parts[3:]


def test_a_part_takes_its_share_of_the_steps():
    local = LocalTraining(steps=10, batch_size=5, lr=0.1)
    assert Splits(3).split(0, local)[1] == replace(local, steps=4)


@pytest.mark.parametrize(
    ("parts", "size", "batch", "smaller"),
    [
        (8, 600, 64, 8),
        (3, 100, 20, 7),
        (3, 100, 10, 4),
        (8, 40, 10, 4),
        (2, 150, 3, 3),
        (4, 25, 64, 16),
        (2, 41, 8, 6),
    ],
)
def test_an_equal_part_takes_as_many_steps_as_all_data_in_smaller_batches(
    parts, size, batch, smaller
):
    """By epochs, and by steps, of which it takes as many as pass its share of the examples; 41 leaves 1 of fours."""
    spec = LocalTraining(epochs=2, batch_size=batch, lr=0.1, momentum=0.5)
    splits = Splits(parts, size)
    made = splits.split(1, spec)[1]
    assert made == replace(spec, batch_size=smaller, lr=made.lr)
    assert made.lr == pytest.approx(0.1 * math.sqrt(smaller / batch))
    made = splits.split(1, replace(spec, epochs=None, steps=24))[1]
    assert (made.batch_size, made.steps) == (smaller, math.ceil(24 * batch / (smaller * parts)))
