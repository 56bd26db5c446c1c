from __future__ import annotations

import pytest
import torch
from torch import nn

from fedclade.core.errors import ConfigError, ModelError
from fedclade.core.params import Layout


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def test_parameters_come_first_and_buffers_behind_them():
    layout = Layout.of(batch_norm())
    assert layout.n_parameters == 3 * 2 + 2 + 2 + 2
    assert [slot.name for slot in layout.buffers] == [
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]
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
    # frozen, and in training mode: its statistics adapt, as is often wanted
    module[0].requires_grad_(not frozen)
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
    text = f"the vector of a model should have 3 entries, got shape \\({', '.join(map(str, shape))}"
    with pytest.raises(ModelError, match=text):
        Layout.of(module).load(torch.zeros(shape), module)


def test_a_module_without_trainable_parameters_is_refused():
    with pytest.raises(ModelError, match="Flatten has no trainable parameters"):
        Layout.of(nn.Flatten())


def test_parameters_of_several_types_are_refused():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    text = r"the trainable parameters of a model should all have the same type, got \['torch.float32', 'torch.f"
    with pytest.raises(ModelError, match=text):
        Layout.of(module)


def parted_module() -> nn.Module:
    """A body, a BatchNorm between, and a head whose weight is tied to a layer further down."""
    module = nn.ModuleDict(
        {
            "body": nn.Linear(2, 3),
            "bn": nn.BatchNorm1d(3),
            "head": nn.Linear(3, 3),
            "last": nn.Linear(3, 3),
        }
    )
    module["last"].weight = module["head"].weight
    return module


def test_personal_tensors_lie_in_a_vector_of_their_own():
    module = parted_module()
    layout = Layout.of(module, personal=("head", "*n.running_*"))
    assert [slot.name for slot in layout.personal] == [
        "head.weight",
        "head.bias",
        "bn.running_mean",
        "bn.running_var",
    ]
    assert [slot.start for slot in layout.personal] == [0, 9, 12, 15]
    assert layout.personal_size == 9 + 3 + 3 + 3
    assert [slot.name for slot in (*layout.parameters, *layout.buffers)] == [
        *("body.weight", "body.bias", "bn.weight", "bn.bias", "last.bias", "bn.num_batches_tracked")
    ]
    assert layout.size == layout.n_parameters + 1 == (6 + 3 + 3 + 3 + 3) + 1
    assert layout.full == Layout.of(module)
    assert layout.full.size == layout.size + layout.personal_size


def test_full_vectors_are_joined_and_taken_apart_again():
    module = parted_module()
    layout = Layout.of(module, personal=("head", "bn"))
    full = layout.full.flatten(module)
    shared, personal = layout.flatten(module), layout.flatten_personal(module)
    assert torch.equal(layout.joined(shared, personal), full)
    many = torch.arange(3.0 * layout.full.size).view(3, -1)
    assert torch.equal(layout.joined(*layout.parted(many)), many)
    for part, whole in zip(layout.parted(full), (shared, personal), strict=True):
        assert torch.equal(part, whole)


def test_where_nothing_is_personal_there_is_one_vector():
    module = parted_module()
    layout = Layout.of(module)
    assert layout.full is layout
    assert layout.personal_size == len(layout.flatten_personal(module)) == 0
    vector = layout.flatten(module)
    assert layout.joined(vector, vector[:0]) is vector
    assert layout.parted(vector)[0] is vector
    assert layout.parted(vector)[1].shape == (0,)


def test_a_tied_tensor_is_personal_by_any_of_its_names():
    layout = Layout.of(parted_module(), personal=("last.weight",))
    assert [slot.name for slot in layout.personal] == ["head.weight"]


def test_a_state_dict_has_what_is_personal_if_it_is_given():
    module = parted_module()
    layout = Layout.of(module, personal=("head",))
    shared, personal = torch.zeros(layout.size), torch.ones(layout.personal_size)
    names = set(module.state_dict())
    assert set(layout.state_dict(shared)) == names - {"head.weight", "head.bias", "last.weight"}
    module.load_state_dict(layout.state_dict(shared, personal))
    assert module["last"].weight.sum() == 9
    assert module["body"].weight.sum() == module["last"].bias.sum() == 0


def test_nothing_to_share_is_refused():
    with pytest.raises(
        ModelError,
        match="all trainable parameters of the model are personal, so clients share none with",
    ):
        Layout.of(batch_norm(), personal=("0", "1.weight", "1.bias"))


def test_a_pattern_for_nothing_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"model.personal = 'haed.\*' matches no parameter .*did you mean 'head.bias'",
    ):
        Layout.of(parted_module(), personal=("haed.*",))


def test_buffers_of_modules_at_rest_are_frozen():
    module = batch_norm()
    module[1].eval()
    layout = Layout.of(module)
    assert set(layout.frozen) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert layout.size == layout.n_parameters
    module.load_state_dict(layout.state_dict(layout.flatten(module)))
