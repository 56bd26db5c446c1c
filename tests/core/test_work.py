"""What clients do in a training query, stated by a value."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from fedclade import LocalTraining
from fedclade.core import (
    OWN,
    ClientWork,
    ConfigError,
    ControlVariates,
    DistanceToAnchor,
    FromStored,
    FullGradient,
    LocalModel,
    Made,
    Models,
    NoReply,
    Proximal,
    Round,
    Splits,
    Steps,
    Sums,
    TrainQuery,
    UpdateError,
    Updates,
)
from fedclade.training import SimulatedClients
from tests.tiny import federation_of, linear, simulated

ROUND = Round(1, LocalTraining(batch_size=10))
VECTORS = torch.zeros(2, 3)


def test_a_proximal_term_needs_an_anchor_only_if_it_pulls():
    assert Proximal(0.1).needs_anchor
    assert not Proximal(0.0).needs_anchor
    assert Proximal(0.0).settings(LocalTraining(mu=0.5)).mu == 0


@pytest.mark.parametrize(
    ("work", "part"),
    [
        (ClientWork(steps=Proximal(0.1)), "Proximal"),
        (ClientWork(steps=ControlVariates()), "ControlVariates"),
        (ClientWork(reply=DistanceToAnchor()), "DistanceToAnchor"),
    ],
)
def test_work_with_an_anchor_is_refused_without_rows_of_anchors(work, part):
    with pytest.raises(ConfigError, match=f"{part} in a client's work needs an anchor"):
        TrainQuery([0], Models(VECTORS, [0]), ROUND, work)


def test_a_row_of_ones_own_is_refused_without_a_start_from_it():
    with pytest.raises(ConfigError, match=r"whose row is OWN needs .* set start = FromStored\(\)"):
        TrainQuery([0], Models(VECTORS, [OWN]), ROUND, ClientWork(store=LocalModel()))
    TrainQuery([0], Models(VECTORS, [OWN]), ROUND, ClientWork(start=FromStored()))


def test_a_gradient_leaves_the_client_whatever_the_reply():
    assert ClientWork(steps=FullGradient(), reply=NoReply()).sends_update
    assert not ClientWork(reply=NoReply()).sends_update


def test_all_data_is_one_part():
    assert ClientWork().split_count == 1
    assert ClientWork(data=Splits(3)).split_count == 3


@dataclass(frozen=True)
class Counting(Steps):
    """Trains as usual, and sends and stores a number."""

    column: str = "count"
    stored: str = "rounds"

    def run(self, trainer):
        made = trainer.train()
        before = trainer.stored(self.stored)
        rounds = [torch.ones(1) if each is None else each + 1 for each in before]
        count = torch.stack(rounds)
        return Made(
            made.moved, made.losses, columns={self.column: count}, stored={self.stored: count}
        )


@pytest.mark.parametrize("memory", [None, 1])
def test_steps_of_ones_own_add_columns_and_store_tensors(memory):
    federation = federation_of([0, 1, 0], [20, 30, 25])
    clients = SimulatedClients(federation, module := linear(), engine="loop", memory=memory)
    params = clients.layout.flatten(module)
    work = ClientWork(steps=Counting())
    for number in (1, 2):
        this_round = Round(number, ROUND.local)
        updates = clients.train([2, 0, 1], params[None], [0] * 3, this_round, work)
        assert updates.column("count").tolist() == [[number]] * 3
    few = updates.select([1, 2])
    again = few.concat(updates.select([0]))
    assert again.column("count").tolist() == [[2]] * 3


def test_steps_cannot_take_a_name_of_the_library():
    clients, params = simulated(federation_of([0, 1]), linear())
    with pytest.raises(ConfigError, match="cannot add a column named 'norms'"):
        clients.train([0], params[None], [0], ROUND, ClientWork(steps=Counting(column="norms")))
    with pytest.raises(ConfigError, match="cannot store a tensor named 'personal'"):
        clients.train([0], params[None], [0], ROUND, ClientWork(steps=Counting(stored="personal")))


def test_a_column_that_has_not_arrived_is_named():
    clients, params = simulated(federation_of([0, 1]), linear())
    updates = clients.train([0], params[None], [0], ROUND)
    with pytest.raises(UpdateError, match="the updates have no column 'count'"):
        updates.column("count")


def test_sums_without_signatures_are_joined():
    def sums_of(client: int) -> Updates:
        one = torch.ones(1, dtype=torch.float64)
        return Updates.of(
            ids=(client,),
            sizes=one,
            losses=one,
            norms=one,
            n_parameters=3,
            sums=Sums(torch.ones(1, 3), torch.zeros(1, dtype=torch.int64)),
            sketches=torch.zeros(1, 0),
        )

    both = sums_of(0).concat(sums_of(1))
    assert both.ids == (0, 1)
    assert both.sketches is not None
    assert both.sketches.shape == (2, 0)
