from __future__ import annotations

import pytest
import torch

from fedclade import LocalSpec
from fedclade.clients import MeteredClients, Round, Updates
from fedclade.errors import UpdateError
from tests.tiny import ScriptedClients


def received(deltas, ids=(4, 7), number=3) -> Updates:
    deltas = torch.as_tensor(deltas, dtype=torch.float32)
    return Updates.received(ids, [10, 30], deltas, 2, torch.tensor([0.5, 0.25]), number)


def test_received_keeps_what_came_and_cuts_signatures_to_the_parameters():
    updates = received([[1, 2, 9], [3, 4, 9]])
    assert updates.ids == (4, 7)
    assert updates.sizes.tolist() == [10, 30]
    assert updates.sizes.dtype == torch.float64
    assert updates.signatures.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_an_update_that_is_not_finite_names_client_round_and_how_much_of_it(bad):
    text = (
        "round 3: the update of client 7 has 2 of 3 entries that are NaN or infinite; its training diverged: "
        "lower local.lr, or look at the client's data"
    )
    with pytest.raises(UpdateError, match=text):
        received([[1, 2, 3], [bad, 4, bad]])


@pytest.mark.parametrize(("shape", "shown"), [((3, 2), r"\(3, 2\)"), ((2,), r"\(2,\)"), ((2, 2, 1), r"\(2, 2, 1\)")])
def test_there_must_be_one_row_for_each_client(shape, shown):
    with pytest.raises(UpdateError, match=f"round 3: expected 2 updates, got a tensor of shape {shown}"):
        received(torch.zeros(shape))


def test_of_picks_members_in_their_order_and_leaves_out_who_did_not_answer():
    part = received([[1, 2], [3, 4]]).of([7, 5, 4])
    assert part.ids == (7, 4)
    assert part.deltas.tolist() == [[3, 4], [1, 2]]
    assert part.signatures.tolist() == [[3, 4], [1, 2]]
    assert part.sizes.tolist() == [30, 10]
    assert part.losses.tolist() == [0.25, 0.5]


def test_of_nobody_is_empty():
    assert received([[1, 2], [3, 4]]).of([5]).ids == ()


def test_joined_puts_others_behind():
    both = received([[1, 2], [3, 4]]).joined(received([[5, 6], [7, 8]], ids=(1, 2)))
    assert both.ids == (4, 7, 1, 2)
    assert both.deltas.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert both.signatures.shape == (4, 2)
    assert both.sizes.tolist() == [10, 30, 10, 30]
    assert both.losses.tolist() == [0.5, 0.25, 0.5, 0.25]


def test_the_step_size_of_a_round_decays_from_the_second_on():
    spec = LocalSpec(lr=0.4, lr_decay=0.5)
    assert [Round(number, spec).lr for number in (1, 2, 3)] == [0.4, 0.4 * 0.5, 0.4 * 0.5**2]


def test_what_the_server_draws_belongs_to_seed_purpose_and_round():
    spec = LocalSpec()
    draws = [
        Round(1, spec, 5).generator("cohort").integers(2**62),
        Round(2, spec, 5).generator("cohort").integers(2**62),
        Round(1, spec, 6).generator("cohort").integers(2**62),
        Round(1, spec, 5).generator("other").integers(2**62),
    ]
    assert len(set(draws)) == 4
    assert Round(1, spec, 5).generator("cohort").integers(2**62) == draws[0]


def test_the_meter_counts_models_down_and_updates_up():
    """Two clients train a model of 3 float32 entries, then one of them sends a gradient."""
    meter = MeteredClients(ScriptedClients({0: [1, 2, 3], 1: [1, 2, 3]}))
    this_round = Round(1, LocalSpec())
    before = meter.readings()
    meter.train([0, 1], torch.zeros(1, 3), [0, 0], this_round)
    assert (meter.readings()["bytes_down"], meter.readings()["bytes_up"]) == (2 * 3 * 4, 2 * 3 * 4)
    meter.gradients([1], torch.zeros(1, 3), [0], this_round)
    meter.evaluate([0, 1], torch.zeros(1, 3), [0, 0], "test")
    used = meter.since(before, seconds=5.0)
    assert (used["bytes_down"], used["bytes_up"]) == (2 * 3 * 4, 2 * 3 * 4 + 3 * 4)
    assert used["seconds"] == 5.0
    assert used["seconds_server"] == 5.0 - used["seconds_train"] - used["seconds_evaluate"]
    assert used["seconds_train"] > 0
    assert used["seconds_evaluate"] > 0


def test_a_second_model_travels_where_the_proximal_term_pulls_to_another_one():
    """Of two clients, one is pulled to the model that it starts from, and one to another of 3 float32 entries."""
    meter = MeteredClients(ScriptedClients({0: [1, 2, 3], 1: [1, 2, 3]}))
    for mu, models_down in ((0.5, 3), (0.0, 2)):
        before = meter.readings()
        meter.train([0, 1], torch.zeros(2, 3), [0, 1], Round(1, LocalSpec(mu=mu)), anchors=[0, 0])
        assert meter.since(before, seconds=1.0)["bytes_down"] == models_down * 3 * 4


def test_the_meter_passes_ids_and_sizes_on():
    meter = MeteredClients(ScriptedClients({3: [1], 1: [2]}, {3: 5, 1: 6}))
    assert meter.ids == (3, 1)
    assert meter.sizes == {3: 5, 1: 6}
