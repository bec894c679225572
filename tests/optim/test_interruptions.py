"""An exception anywhere in a step: what is stepped is stepped wholly, the rest is untouched, and
the exception says which. The same at every allocation of the device."""

import interruptions
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import residency
from residency._transfer import lending

SHAPES = ((40, 30), (33,), (), (2100,), (16, 16))
NUM_LINES = 20
BUCKET = 6000  # (2100,) is cut, the others share units
OPTIONS = {
    "AdamW": {},
    "SGD": {"momentum": 0.9},
    "NAdam": {},
    "Rprop": {},
}


class Bench:
    """Runs of one optimizer that are alike but for the disturbance."""

    def __init__(self, lab, *, name="AdamW", dtype=torch.float32, **settings):
        self.lab = lab
        self.name = name
        self.dtype = dtype
        self.settings = {"bucket": BUCKET, "slots": 3, **settings}

    def build(self, steps):
        parameters = self.lab.parameters(shapes=SHAPES, dtype=self.dtype)
        made = getattr(torch.optim, self.name)(parameters, lr=1e-2, **OPTIONS[self.name])
        residency.offload_optimizer(made, **self.settings)
        self.lab.take_steps(made, parameters, range(steps), missing=False)
        self.lab.set_gradients(parameters, steps, missing=False)
        return made, parameters

    def after(self, steps):
        """Returns parameters and state after an undisturbed run."""
        return snapshot(*self.build(steps))


def snapshot(optimizer, parameters):
    """Returns, for each parameter, its bytes and those of its state."""
    return [
        (
            p.detach().cpu().clone(),
            {
                k: v.detach().cpu().clone() if isinstance(v, torch.Tensor) else v
                for k, v in dict(optimizer.state.get(p, {})).items()
            },
        )
        for p in parameters
    ]


def is_same(left, right):
    (p, state), (q, other) = left, right
    return (
        torch.equal(p, q)
        and list(state) == list(other)
        and all(
            torch.equal(v, other[k]) if isinstance(v, torch.Tensor) else v == other[k]
            for k, v in state.items()
        )
    )


def judge(bench, optimizer, parameters, error, before, after):
    """Checks what a failed step left, and that the rest of the step is the undisturbed one."""
    assert not lending
    where = getattr(bench, "where", "")
    now = snapshot(optimizer, parameters)
    stepped = {id(p) for p in getattr(error, "stepped_parameters", ())}
    in_part = {id(p) for p in getattr(error, "parameters_in_part", ())}
    if not hasattr(error, "__notes__"):  # before the first part, or when all was over
        is_over = not is_same(now[0], before[0])
        stepped = {id(p) for p in parameters if is_over}
    for index, p in enumerate(parameters):
        if id(p) in in_part:
            continue
        expected = after if id(p) in stepped else before
        assert is_same(now[index], expected[index]), (where, index, id(p) in stepped)
    assert len(optimizer.state_dict()["state"]) <= len(parameters)
    # Those that were stepped sit out: for the others, a step now is the one that was missed.
    for p in parameters:
        if id(p) in stepped | in_part:
            p.grad = None
    seen = []
    handle = register_optimizer_step_pre_hook(lambda *_: seen.append("step"))
    optimizer.step()
    handle.remove()
    assert seen == ["step"], where  # such a hook makes steps wait for the copies of a save
    assert torch.is_grad_enabled(), where
    now = snapshot(optimizer, parameters)
    for index, p in enumerate(parameters):
        if id(p) not in in_part:
            assert is_same(now[index], after[index]), (where, index)


class Allocations(TorchFunctionMode):
    """Counts the operations that make a tensor on the device; one of them finds no room."""

    def __init__(self, fail_at=None):
        super().__init__()
        self.count = 0
        self._fail_at = fail_at

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if not storages_of(made) <= storages_of((args, kwargs)):
            self.count += 1
            if self.count == self._fail_at:
                raise torch.OutOfMemoryError(f"no room for {func.__name__}")
        return made


def storages_of(values):
    tensors = [t for t in tree_leaves(values) if isinstance(t, torch.Tensor)]
    return {
        t.untyped_storage().data_ptr()
        for t in tensors
        if t.device.type not in ("cpu", "meta") and t.numel()
    }


CASES = {
    "later": {},
    "one slot": {"slots": 1},
    "first": {"steps": 0},
    "SGD first": {"steps": 0, "name": "SGD"},
    "Rprop first": {"steps": 0, "name": "Rprop"},
    "NAdam": {"name": "NAdam"},
    "resident": {"resident": 12_000},
    "resident first": {"resident": 12_000, "steps": 0},
    "masters": {"master_weights": True, "dtype": torch.bfloat16},
    "masters first": {"master_weights": True, "dtype": torch.bfloat16, "steps": 0},
}


@pytest.mark.sim_device(schedule="late")
@pytest.mark.parametrize("case", CASES)
def test_an_exception_at_any_line_of_a_step_leaves_every_parameter_whole(lab, case):
    case = dict(CASES[case])
    steps = case.pop("steps", 2)
    bench = Bench(lab, **case)
    before, after = bench.after(steps), bench.after(steps + 1)
    count = interruptions.count_lines(bench.build(steps)[0].step)
    held = None
    for line in interruptions.spread(count, NUM_LINES, seed=len(case)):
        optimizer, parameters = bench.build(steps)
        raised = (KeyboardInterrupt, torch.OutOfMemoryError)[line % 2]("here")
        bench.where = interruptions.interrupted_at(line, optimizer.step, raised)
        raised.__traceback__ = None
        judge(bench, optimizer, parameters, raised, before, after)
        notes = getattr(raised, "__notes__", [])
        assert not any("in the middle" in note for note in notes), (bench.where, notes)
        del optimizer, parameters, raised
        torch.accelerator.synchronize()
        if held is None:
            held = torch.accelerator.memory_allocated()
        assert torch.accelerator.memory_allocated() <= held


@pytest.mark.sim_device(schedule="late")
@pytest.mark.parametrize("case", CASES)
def test_a_device_without_room_at_any_allocation_leaves_what_the_error_says(lab, case):
    case = dict(CASES[case])
    steps = case.pop("steps", 2)
    bench = Bench(lab, **case)
    before, after = bench.after(steps), bench.after(steps + 1)
    optimizer, parameters = bench.build(steps)
    with Allocations() as counted:
        optimizer.step()
    num_failures = 0
    for number in interruptions.spread(counted.count, NUM_LINES, seed=1):
        optimizer, parameters = bench.build(steps)
        try:
            with Allocations(fail_at=number):
                optimizer.step()
            continue  # it was one of a trial, which may fail
        except torch.OutOfMemoryError as error:
            raised = error.with_traceback(None)
        num_failures += 1
        bench.where = f"allocation {number}"
        judge(bench, optimizer, parameters, raised, before, after)
        del optimizer, parameters, raised
    assert num_failures > 1
