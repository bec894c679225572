"""Host memory that a state gave up may still be written by its last copy home."""

import itertools

import pytest
import torch

import residency


# The state that went has its own wait, which does not count for the others.
@pytest.mark.parametrize(("gone", "new"), list(itertools.permutations(range(3), 2)))
def test_a_new_state_is_not_overwritten_by_a_copy_home_of_one_that_went(lab, gone, new):
    parameters = lab.parameters(shapes=[(64, 64)] * 3)
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    residency.offload_optimizer(optimizer, bucket=lab.bucket)
    lab.take_steps(optimizer, parameters, range(3), missing=False)
    del optimizer.state[parameters[gone]]
    optimizer.state[parameters[new]]["noise"] = torch.full((64, 64), 7.0)
    torch.accelerator.synchronize()
    assert optimizer.state[parameters[new]]["noise"].eq(7.0).all()
