"""``resident=`` and the slots are bounds at every moment, whatever state comes and whenever."""

import copy

import pytest
import torch

import residency

SIZES = (500, 1000, 700, 300, 900)
NUM_BYTES = [-(-4 * size // 512) * 512 for size in SIZES]  # of one float32 state of each


class Late(torch.optim.Optimizer):
    """Makes a second state in its third step."""

    def __init__(self, parameters, lr=1e-2):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for g in self.param_groups for p in g["params"] if p.grad is not None):
            state = self.state[p]
            state["t"] = state.get("t", 0) + 1
            if "m" not in state:
                state["m"] = torch.zeros_like(p)
            if state["t"] == 3:
                state["slow"] = p.clone()
            state["m"].mul_(0.9).add_(p.grad)
            p.sub_(state["m"], alpha=1e-2)


def momentum_switched_on(lab, optimizer, parameters, step):
    if step == 2:
        optimizer.param_groups[0]["momentum"] = 0.9


def amsgrad_loaded(lab, optimizer, parameters, step):
    if step == 2:
        others = lab.parameters(shapes=[(size,) for size in SIZES])
        plain = torch.optim.AdamW(others, lr=1e-2, amsgrad=True)
        lab.take_steps(plain, others, range(2), missing=False)
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))


def user_key(lab, optimizer, parameters, step):
    if step == 2:
        for p in parameters:
            optimizer.state[p]["ema"] = torch.full(p.shape, 2.0)


def state_moved_and_cleared(lab, optimizer, parameters, step):
    if step == 2:
        for p in parameters[:2]:
            optimizer.state[p] = {k: v.clone() for k, v in optimizer.state[p].items()}
        optimizer.state.pop(parameters[2])


def nothing(lab, optimizer, parameters, step):
    pass


CASES = {
    "momentum switched on": (torch.optim.SGD, momentum_switched_on),
    "amsgrad loaded": (torch.optim.AdamW, amsgrad_loaded),
    "a key of the user's": (torch.optim.AdamW, user_key),
    "cleared": (torch.optim.AdamW, state_moved_and_cleared),
    "a state that comes later": (Late, nothing),
}


@pytest.mark.parametrize("resident", [0, 2048, 8192, 14_000, 1 << 20])
@pytest.mark.parametrize("case", CASES)
def test_state_that_stays_keeps_to_its_bound_after_every_step(lab, case, resident):
    results = [run(lab, case, None), run(lab, case, resident)]
    lab.assert_equal(*results)


def run(lab, case, resident):
    cls, change = CASES[case]
    parameters = lab.parameters(shapes=[(size,) for size in SIZES])
    torch.accelerator.synchronize()
    empty = torch.accelerator.memory_allocated()
    optimizer = cls(parameters, lr=1e-2)
    if resident is not None:
        residency.offload_optimizer(optimizer, bucket=4096, resident=resident)
    for step in range(5):
        change(lab, optimizer, parameters, step)
        lab.take_steps(optimizer, parameters, [step], missing=False)
        for p in parameters:
            p.grad = None
        torch.accelerator.synchronize()
        held = torch.accelerator.memory_allocated() - empty
        assert resident is None or held <= resident
        if resident == 1 << 20:  # room for all of it
            assert held >= optimizer.statistics().resident_bytes
    return lab.read(optimizer, parameters)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_state_that_comes_later_keeps_to_the_slots(lab, slots):
    num_bytes = 4 * 64 * 64
    parameters = lab.parameters(shapes=((64, 64),) * 8)
    optimizer = residency.offload_optimizer(Late(parameters), bucket=4 * num_bytes, slots=slots)
    for step in range(5):
        lab.set_gradients(parameters, step, missing=False)
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        optimizer.step()
        torch.accelerator.synchronize()
        assert torch.accelerator.max_memory_allocated() - before <= slots * 4 * num_bytes


@pytest.mark.parametrize("missing_bytes", [0, 1])
def test_states_stay_in_order_where_the_bound_has_room_for_their_last_byte(lab, missing_bytes):
    parameters = lab.parameters(shapes=[(size,) for size in SIZES[:2]])
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    lab.take_steps(optimizer, parameters, range(1), missing=False)
    residency.offload_optimizer(optimizer, resident=sum(NUM_BYTES[:2]) - missing_bytes)
    for step in (1, 2):
        places = [optimizer.state[p]["momentum_buffer"].device.type for p in parameters]
        assert places == [lab.device.type, "cpu" if missing_bytes else lab.device.type]
        lab.take_steps(optimizer, parameters, [step], missing=False)
