"""A class' own `train` and `eval`, which expect the state beside the parameters, offloaded.

The plain optimizer is the judge. The class here is written as pytorch_optimizer's are.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch.optim import Optimizer

import residency

SHAPES = ((64, 48), (33,), (), (7, 5, 3), (1000,))


class ScheduleFree(Optimizer):
    """Exchanges parameters and state outside of a step; a step in eval mode is refused."""

    def __init__(self, params, lr=0.05, *, train_mode=False):
        super().__init__(params, {"lr": lr, "train_mode": train_mode})
        self.num_exchanges = 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("not in train mode")
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["z"] = parameter.clone()
                    state["seen"] = torch.zeros_like(parameter)
                state["seen"].addcmul_(parameter.grad, parameter.grad)
                state["z"].addcdiv_(
                    parameter.grad, state["seen"].sqrt().add(1e-8), value=-group["lr"]
                )
                parameter.lerp_(state["z"], 0.25)
        return loss

    @torch.no_grad()
    def _exchange(self, weight, to):
        for group in self.param_groups:
            for parameter in group["params"] if group["train_mode"] != to else ():
                state = self.state[parameter]
                if "z" in state:
                    parameter.data.lerp_(state["z"], weight)
                    state["z"].data.add_(0.001)  # not to be seen by a version
                    state["times"] = state.get("times", 0) + 1
                    state["last"] = parameter.clone()
            group["train_mode"] = to
        self.num_exchanges += 1
        return self.num_exchanges

    def eval(self):
        return self._exchange(-0.5, False)

    def train(self, mode=True):
        return self._exchange(1 / 3, True) if mode else self.eval()


def made(lab, *, offload, **settings):
    parameters = lab.parameters(shapes=SHAPES)
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.02}]
    optimizer = ScheduleFree(groups)
    if offload:
        residency.offload_optimizer(optimizer, bucket=5000, **settings)
    return optimizer, parameters


@pytest.mark.parametrize("seed", range(8))
def test_random_programs_have_the_bits_of_the_plain_optimizer(lab, tmp_path, seed):
    draw = random.Random(seed)
    resident = draw.choice((0, 0, 10_000, "1GiB"))
    program = draw.choices(("train", "eval", "step", "save", "restore", "snapshot"), k=12)
    results = []
    for offload in (False, True):
        settings = {"resident": resident} if offload else {}
        optimizer, parameters = made(lab, offload=offload, **settings)
        returned, kept, number, is_saved = [], [], 0, False
        state = {"model": torch.nn.ParameterList(parameters), "optimizer": optimizer}
        with residency.Checkpointer(tmp_path / str(offload)) as checkpointer:
            for action in ("train", "step", *program):
                number += 1
                if action in ("train", "eval"):
                    returned.append(getattr(optimizer, action)())
                elif action == "step" and optimizer.param_groups[0]["train_mode"]:
                    lab.take_steps(optimizer, parameters, [number])
                elif action == "save":
                    is_saved = True
                    save = checkpointer.save(number, state)
                    if not offload:  # a plain one's `eval` knows nothing of the copies
                        save.wait()
                elif action == "restore" and is_saved:
                    checkpointer.restore(state)
                elif action == "snapshot":
                    kept.append(residency.snapshot(state))
                    if not offload:
                        kept[-1].wait()
        results.append((lab.read(optimizer, parameters), returned))
    lab.assert_equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_one_that_is_not_in_train_mode_yet_is_offloaded_and_its_own_error_stays(lab):
    optimizer, parameters = made(lab, offload=True)
    assert not optimizer.param_groups[0]["train_mode"]
    with pytest.raises(RuntimeError, match="not in train mode"):
        lab.take_steps(optimizer, parameters, [0])
    assert optimizer.train(mode=True) == 1
    lab.take_steps(optimizer, parameters, [0])
    assert optimizer.statistics().home_bytes > 0


def test_masters_are_exchanged_in_place_of_their_rounded_parameters(lab):
    low = lab.parameters(shapes=SHAPES, dtype=torch.bfloat16)
    full = [torch.nn.Parameter(p.detach().float()) for p in low]
    optimizer, stock = ScheduleFree(low), ScheduleFree(full)
    residency.offload_optimizer(optimizer, bucket=5000, master_weights=True)
    for action in ("train", "step", "eval", "train", "step", "eval"):
        if action == "step":
            for a, b in zip(low, full, strict=True):
                a.grad = torch.full_like(a, 0.125)
                b.grad = a.grad.float()
        for each in (optimizer, stock):
            getattr(each, action)()
        for a, b in zip(low, full, strict=True):
            assert torch.equal(a.cpu(), b.cpu().bfloat16())
            assert torch.equal(optimizer.state[a].get("master_weight", b).cpu(), b.detach().cpu())


def test_the_device_has_the_state_of_one_parameter_at_a_time(lab):
    optimizer, parameters = made(lab, offload=True)
    optimizer.train()
    lab.take_steps(optimizer, parameters, [0])
    for parameter in parameters:
        parameter.grad = None
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    optimizer.eval()
    torch.accelerator.synchronize()
    largest = max(p.numel() * p.element_size() for p in parameters)
    peak = torch.accelerator.max_memory_allocated() - before
    assert peak <= 4 * (largest + 512)  # z, seen, what the class clones, what its step rounds up
    assert torch.accelerator.memory_allocated() == before


def test_a_device_without_room_leaves_all_as_it_was(lab, monkeypatch):
    optimizer, parameters = made(lab, offload=True)
    optimizer.train()
    lab.take_steps(optimizer, parameters, [0])
    before = lab.read(optimizer, parameters)

    def full(*_):
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(residency._device, "unfilled_bytes", full)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.eval()
    lab.assert_equal(before, lab.read(optimizer, parameters))
    assert optimizer.eval() == 2


def test_a_class_without_them_gets_none(lab):
    parameters = lab.parameters(shapes=SHAPES)
    optimizer = residency.offload_optimizer(torch.optim.AdamW(parameters))
    assert not hasattr(optimizer, "train")
    assert not hasattr(optimizer, "eval")


class Together(Optimizer):
    """Reads the first parameter of its first group, whichever parameter it steps."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        first = self.param_groups[0]["params"][0]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] * first.numel())


def test_a_step_that_fails_with_one_parameter_is_refused_with_where_and_why(lab):
    parameters = lab.parameters(shapes=SHAPES)
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    with pytest.raises(residency.RefusedError, match=r"IndexError: .*, in step.*couples"):
        residency.offload_optimizer(Together(groups))
