"""What is packed comes out as it was; large tensors are not copied on the way."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch import nn

from fedclade.training.remote.actor import SMALL, packed, unpacked

cloudpickle = pytest.importorskip("ray.cloudpickle")


def passed(thing):
    return unpacked(packed(thing, cloudpickle.CloudPickler))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3,), (300, 400)])
def test_tensors_keep_type_shape_and_entries(dtype, shape):
    tensor = torch.rand(shape).mul(100).to(dtype)
    there = passed({"one": tensor})["one"]
    assert there.dtype == dtype
    assert torch.equal(there, tensor)


def test_modules_keep_tied_weights_and_what_they_require():
    module = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200), nn.BatchNorm1d(200))
    module[1].weight = module[0].weight
    module[0].bias.requires_grad_(False)
    there = passed(module)
    assert there[1].weight is there[0].weight
    assert [p.requires_grad for p in there.parameters()] == [
        p.requires_grad for p in module.parameters()
    ]
    before, after = module.state_dict(), there.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_large_arrays_lie_outside_the_message_and_arrays_that_were_one_stay_one():
    large, small = torch.rand(SMALL), np.arange(10)
    message = packed([large, small, small], cloudpickle.CloudPickler)
    assert len(message.message) < SMALL
    assert [array.nbytes for array in message.arrays] == [large.nbytes]
    first, one, other = unpacked(message)
    assert one is other
    assert first.data_ptr() == message.arrays[0].ctypes.data
    assert unpacked(message, copies=True)[0].data_ptr() != first.data_ptr()


def test_functions_of_a_script_are_packed_too():
    by = 3
    assert passed(lambda x: by * x)(2) == 6
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(lambda x: by * x)
