"""Where an optimizer's state is after a restore: at once with ``eager``, else at its first use."""

from __future__ import annotations

import pytest
import torch

import residency


class WithHistory(torch.optim.Optimizer):
    """Steps along the mean of its last gradients, which it keeps in a list."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["seen"] = torch.zeros_like(parameter)
                    state["history"] = []
                history = state["history"] = [*state["history"][-2:], parameter.grad.clone()]
                state["seen"].add_(parameter.grad)
                mean = torch.stack(history).mean(0)  # fails where one of them is elsewhere
                parameter.sub_(mean + 0.01 * state["seen"], alpha=group["lr"])


def training(device, *, offload):
    torch.manual_seed(3)
    model = torch.nn.ParameterList(torch.randn(5 + i).to(device) for i in range(3))
    optimizer = WithHistory(model)
    if offload:
        residency.offload_optimizer(optimizer, bucket=512)
    return model, optimizer


def step(model, optimizer, number):
    for index, parameter in enumerate(model):
        parameter.grad = torch.full_like(parameter, 0.5 * number + index)
    optimizer.step()


def history_devices(optimizer, state=None):
    states = (optimizer.state if state is None else state).values()
    return {each.device for values in states for each in values["history"]}


@pytest.mark.parametrize("offload", [False, True], ids=["plain", "offloaded"])
@pytest.mark.parametrize("eager", [False, True], ids=["first step", "at once"])
def test_state_and_tensors_within_its_lists_are_where_the_next_step_needs_them(
    device, tmp_path, offload, eager
):
    model, optimizer = training(device, offload=offload)
    with residency.Checkpointer(tmp_path) as checkpointer:
        for number in range(4):
            step(model, optimizer, number)
        checkpointer.save(4, {"model": model, "optimizer": optimizer}).wait()
        step(model, optimizer, 4)
        resumed, other = training(device, offload=offload)
        checkpointer.restore({"model": resumed, "optimizer": other}, eager=eager)
    # A plain optimizer's state waits on the host: it takes no device memory before its first use.
    waits = not eager and not offload
    looked_at = vars(other)["state"]  # without a use
    assert history_devices(other, looked_at) == {torch.device("cpu") if waits else device}
    step(resumed, other, 4)
    assert history_devices(other) == {device}
    for mine, theirs in zip(resumed, model, strict=True):
        assert torch.equal(mine, theirs)
        for a, b in zip(
            other.state[mine]["history"], optimizer.state[theirs]["history"], strict=True
        ):
            assert torch.equal(a, b)
        assert torch.equal(other.state[mine]["seen"].cpu(), optimizer.state[theirs]["seen"].cpu())
