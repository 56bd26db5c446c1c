from __future__ import annotations

import pytest
import torch
from torch import nn

from fedclade.core.errors import ModelError
from fedclade.core.params import Layout


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def test_parameters_come_first_and_buffers_behind_them():
    layout = Layout.of(batch_norm())
    assert layout.n_parameters == 3 * 2 + 2 + 2 + 2
    assert [slot.name for slot in layout.buffers] == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert layout.size == layout.n_parameters + 2 + 2 + 1


def test_a_vector_loaded_and_flattened_again_is_the_same():
    module = batch_norm()
    layout = Layout.of(module)
    vector = torch.arange(layout.size, dtype=torch.float32)
    layout.load(vector, module)
    assert torch.equal(layout.flatten(module), vector)
    assert module[0].bias.tolist() == [6, 7]
    assert module[1].running_var.tolist() == [14, 15]


def test_whole_number_buffers_are_rounded_when_loaded():
    module = batch_norm()
    layout = Layout.of(module)
    vector = layout.flatten(module)
    vector[-1] = 2.6
    layout.load(vector, module)
    assert module[1].num_batches_tracked.dtype == torch.int64
    assert int(module[1].num_batches_tracked) == 3


def test_tied_weights_have_one_place():
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    module[1].weight = module[0].weight
    layout = Layout.of(module)
    assert layout.size == 4 * 4
    layout.load(torch.ones(16), module)
    assert module[1].weight.sum() == 16
    assert layout.tied == (("1.weight", "0.weight"),)


def test_a_state_dict_has_all_of_the_modules_names_and_is_a_copy():
    module = batch_norm()
    module.append(nn.Linear(2, 2, bias=False))
    module.append(nn.Linear(2, 2, bias=False))
    module[3].weight = module[2].weight
    layout = Layout.of(module)
    vector = torch.arange(layout.size, dtype=torch.float32)
    state = layout.state_dict(vector)
    assert set(state) == set(module.state_dict())
    assert state["1.num_batches_tracked"].dtype == torch.int64
    vector.zero_()
    module.load_state_dict(state)
    assert torch.equal(layout.flatten(module), torch.arange(layout.size, dtype=torch.float32))


def test_frozen_parameters_are_in_no_vector_and_in_every_state_dict():
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1), nn.Linear(3, 2))
    module[0].requires_grad_(False)
    module[2].weight = module[0].weight  # tied to a frozen one
    layout = Layout.of(module)
    assert [slot.name for slot in layout.parameters] == ["1.weight", "1.bias", "2.bias"]
    assert layout.n_parameters == layout.size == 2 + 1 + 2
    state = layout.state_dict(torch.arange(5.0))
    assert set(state) == set(module.state_dict())
    assert torch.equal(state["0.weight"], module[0].weight)
    assert torch.equal(state["2.weight"], module[0].weight)
    module.load_state_dict(state)
    assert torch.equal(layout.flatten(module), torch.arange(5.0))


def body_and_head() -> nn.Sequential:
    body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    return nn.Sequential(body, nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(2, 2))


def resting(module: nn.Module) -> set[str]:
    layout = Layout.of(module)
    layout.set_training(module.eval())  # as engines do between rounds
    return {name for name, part in module.named_modules() if not part.training}


def test_what_was_in_eval_stays_so_while_the_rest_trains():
    module = body_and_head()
    module[1].eval()
    assert resting(module) == {"1"}


def test_a_frozen_part_in_eval_stays_so_even_if_all_is_in_eval():
    module = body_and_head().eval()
    module[0].requires_grad_(False)
    assert resting(module) == {"0", "0.0", "0.1", "0.2"}


@pytest.mark.parametrize("frozen", [True, False])
def test_all_trains_that_was_not_put_in_eval_or_was_with_all_the_rest(frozen):
    module = body_and_head().train(frozen)
    module[0].requires_grad_(not frozen)  # frozen, and in training mode: its statistics adapt, as is often wanted
    assert resting(module) == set()


def test_buffers_that_are_not_saved_stay_out():
    module = nn.Linear(2, 1)
    module.register_buffer("scratch", torch.zeros(5), persistent=False)
    assert Layout.of(module).size == 2 + 1


def test_flatten_copies():
    module = nn.Linear(2, 1)
    vector = Layout.of(module).flatten(module)
    vector.zero_()
    assert module.weight.abs().sum() > 0


def test_unflatten_gives_views_of_floats():
    layout = Layout.of(nn.Linear(2, 1))
    vector = torch.zeros(3)
    layout.unflatten(vector)["bias"].fill_(5.0)
    assert vector.tolist() == [0, 0, 5]


@pytest.mark.parametrize("shape", [(2,), (4,), (1, 3)])
def test_a_vector_of_another_shape_is_refused(shape):
    module = nn.Linear(2, 1)
    text = f"a vector of 3 entries was expected, got shape \\({', '.join(map(str, shape))}"
    with pytest.raises(ModelError, match=text):
        Layout.of(module).load(torch.zeros(shape), module)


def test_a_module_without_trainable_parameters_is_refused():
    with pytest.raises(ModelError, match="Flatten has no trainable parameters"):
        Layout.of(nn.Flatten())


def test_parameters_of_several_types_are_refused():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    text = r"parameters should share one type, got \['torch.float32', 'torch.float64'\]; cast the model first"
    with pytest.raises(ModelError, match=text):
        Layout.of(module)
