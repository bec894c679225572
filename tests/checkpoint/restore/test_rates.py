"""A rate comes back with its value, and stays what it is here: a number, or the tensor that it was.

Graphs that were captured and code that was compiled read the tensor of a rate, so that a restore
fills that one.
"""

import pytest
import torch

from residency import Checkpointer


@pytest.fixture
def checkpointer(tmp_path):
    with Checkpointer(tmp_path / "run") as made:
        yield made


def optimizer_with(rate):
    parameter = torch.nn.Parameter(torch.ones(3))
    return torch.optim.SGD([parameter], lr=rate)


@pytest.mark.parametrize("here", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
@pytest.mark.parametrize("saved", [0.5, torch.tensor(0.5)], ids=["saved_number", "saved_tensor"])
def test_a_rate_comes_back_as_what_it_is_here(checkpointer, saved, here):
    here = here.clone() if isinstance(here, torch.Tensor) else here
    checkpointer.save(1, {"optimizer": optimizer_with(saved)}).wait()
    optimizer = optimizer_with(here)
    checkpointer.restore({"optimizer": optimizer})
    rate = optimizer.param_groups[0]["lr"]
    assert type(rate) is type(here)
    assert float(rate) == 0.5
    if isinstance(here, torch.Tensor):
        assert rate is here
