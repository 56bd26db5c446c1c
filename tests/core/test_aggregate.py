from __future__ import annotations

import torch

from fedclade.core.aggregate import inter_group, mean
from fedclade.core.updates import Sums, Updates


def test_clients_weigh_as_much_as_they_have_examples():
    """Eq. 2: (1·4 + 3·8) / 4 and (1·2 + 3·(−2)) / 4."""
    deltas = torch.tensor([[4.0, 2.0], [8.0, -2.0]])
    updates = Updates.received([0, 1], [1, 3], deltas, 2, torch.zeros(2), 1)
    assert mean(updates).tolist() == [(1 * 4 + 3 * 8) / 4, (1 * 2 + 3 * -2) / 4]
    assert mean(updates).dtype == torch.float32


def test_buffers_are_averaged_with_the_parameters():
    updates = Updates.received(
        [0, 1], [1, 1], torch.tensor([[0.0, 2.0], [0.0, 6.0]]), 1, torch.zeros(2), 1
    )
    assert mean(updates).tolist() == [0, (2 + 6) / 2]


def test_in_a_stream_the_mean_is_made_of_sums():
    """The same clients as above, in two groups of one: ((4, 2) + 3·(8, −2)) / 4."""
    sizes, none = torch.tensor([1.0, 3.0], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    sums = Sums(torch.tensor([[4.0, 2.0], [3 * 8.0, 3 * -2.0]]), torch.tensor([0, 1]))
    updates = Updates.of(
        ids=(0, 1), sizes=sizes, losses=none, norms=none, n_parameters=2, sums=sums
    )
    assert mean(updates).tolist() == [(1 * 4 + 3 * 8) / 4, (1 * 2 + 3 * -2) / 4]
    assert mean(updates).dtype == torch.float32


MODELS = torch.tensor([[3.0, 4.0, 100.0], [0.0, 2.0, -7.0], [0.0, 0.0, 5.0]])
"""Of three groups: two parameters and a buffer."""


def test_groups_move_along_the_others_directions_and_keep_their_buffers():
    """FedGroup Algorithm 2, line 22: the norms are 5, 2 and 0, and a model of zeros points nowhere."""
    moved = inter_group(MODELS, 0.5, 2)
    expected = torch.tensor(
        [
            [3 + 0.5 * 0, 4 + 0.5 * 1, 100],
            [0 + 0.5 * 3 / 5, 2 + 0.5 * 4 / 5, -7],
            [0 + 0.5 * (3 / 5 + 0), 0 + 0.5 * (4 / 5 + 1), 5],
        ]
    )
    torch.testing.assert_close(moved, expected)


def test_one_group_or_no_step_moves_nothing():
    assert torch.equal(inter_group(MODELS, 0.0, 2), MODELS)
    assert torch.equal(inter_group(MODELS[:1], 0.5, 2), MODELS[:1])
