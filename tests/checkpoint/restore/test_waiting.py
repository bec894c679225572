"""State that waits on the host after a restore: whoever uses it finds what stock torch shows.

Stock torch, which loads at once, is the judge: of bits, and of where each state is when it is read.
"""

from __future__ import annotations

import copy
import io
import random
import threading
from collections import defaultdict

import pytest
import torch
from judging import raw
from torch.optim import Optimizer

import residency
from residency._checkpoint._restore import _fill


class WithHistory(Optimizer):
    """Steps along the mean of its last gradients, which it keeps in a list."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    history = [*state.get("history", ())[-2:], parameter.grad.clone()]
                    state["history"] = history
                    state["mean"] = torch.stack(history).mean(0)
                    parameter.sub_(state["mean"], alpha=group["lr"])


class ScheduleFree(Optimizer):
    """Exchanges parameters and state in `train` and `eval`, as pytorch_optimizer's classes do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "train_mode": True})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state.setdefault("z", parameter.clone())
                    state["z"].sub_(parameter.grad, alpha=group["lr"])
                    parameter.lerp_(state["z"], 0.25)

    @torch.no_grad()
    def exchange(self, weight, to):
        for group in self.param_groups:
            for parameter in group["params"] if group["train_mode"] != to else ():
                if "z" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["z"], weight)
            group["train_mode"] = to

    def eval(self):
        self.exchange(-0.5, False)

    def train(self):
        self.exchange(1 / 3, True)


KINDS = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9),
    "history": WithHistory,
    "schedule-free": ScheduleFree,
}


class Run:
    """Is a model with its optimizer; what is drawn for stock torch is drawn for ours, too."""

    def __init__(self, device, kind, *, parks=False):
        torch.manual_seed(0)
        self.device, self.parks, self.kind = device, parks, kind
        self.model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).to(device)
        self.optimizer = KINDS[kind](self.model.parameters())
        self.num_steps = 0

    @property
    def state(self):
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self, call=None):
        self.num_steps += 1
        generator = torch.Generator().manual_seed(self.num_steps)
        data = torch.randn(4, 5, generator=generator).to(self.device)
        self.model(data).square().mean().backward()
        (call or self.optimizer.step)()
        self.optimizer.zero_grad()

    def load(self, other):
        self.model.load_state_dict(other.model.state_dict())
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        self.num_steps = 2

    def park(self):
        if self.parks:
            residency.park(self.model)

    def unpark(self):
        if self.parks:
            residency.unpark(self.model)

    def read(self):
        found = [p.detach().cpu().clone() for p in self.model.parameters()]
        for parameter in self.model.parameters():
            for key, value in self.optimizer.state[parameter].items():
                for each in value if isinstance(value, list) else [value]:
                    found.append((key, each.device.type, each.cpu().clone()))
        return found


def copied(run, draw):
    run.model, run.optimizer = copy.deepcopy((run.model, run.optimizer))


def pickled(run, draw):
    file = io.BytesIO()
    torch.save((run.model, run.optimizer), file)
    file.seek(0)
    run.model, run.optimizer = torch.load(file, weights_only=False)


def shallow(run, draw):
    run.optimizer = copy.copy(run.optimizer)


def scaled(run, draw):
    for values in run.optimizer.state.values():
        for key in [k for k, v in values.items() if isinstance(v, torch.Tensor) and v.dim()]:
            values[key] = values[key] * 0.5


def reset(run, draw):
    for parameter in run.model.parameters():
        for key, value in run.optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor) and value.dim() and draw.random() < 0.7:
                run.optimizer.state[parameter][key] = torch.zeros_like(parameter)


def cleared(run, draw):
    run.optimizer.state.pop(run.model[draw.randrange(2)].weight, None)


def renewed(run, draw):
    run.optimizer.state = defaultdict(dict, {k: dict(v) for k, v in run.optimizer.state.items()})


def replaced(run, draw):
    layer = run.model[draw.randrange(2)]
    before, made = layer.weight, torch.nn.Parameter(layer.weight.detach().clone())
    if before in run.optimizer.state:
        run.optimizer.state[made] = run.optimizer.state.pop(before)
    layer.weight = made
    parameters = run.optimizer.param_groups[0]["params"]
    parameters[:] = [made if p is before else p for p in parameters]


def handed_on(run, draw):
    other = KINDS[run.kind](run.model.parameters())
    other.state = run.optimizer.state
    run.optimizer = other


def reloaded(run, draw):
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def grown(run, draw):
    run.extra = torch.nn.Parameter(torch.ones(3, device=run.device))
    run.optimizer.add_param_group({"params": [run.extra]})


def evaluated(run, draw):
    if run.kind == "schedule-free":
        run.optimizer.eval()
        run.optimizer.train()


def stepped_with_closure(run, draw):
    run.step(lambda: run.optimizer.step(lambda: 0.0))


def loaded_while_parked(run, draw):
    saved = copy.deepcopy(run.optimizer.state_dict())
    run.park()
    run.optimizer.load_state_dict(saved)
    if draw.random() < 0.5:
        scaled(run, draw)
    run.unpark()


def looked_at_while_parked(run, draw):
    run.park()
    scaled(run, draw)
    run.unpark()


def offloaded_and_back(run, draw):
    if run.parks and run.kind != "history":
        residency.offload_optimizer(run.optimizer)
        if draw.random() < 0.5:
            residency.onload_optimizer(run.optimizer)
            return
        residency.onload_optimizer(run.optimizer)


def nothing(run, draw):
    pass


TOUCHES = (
    *(copied, pickled, shallow, scaled, reset, cleared, renewed, replaced, handed_on, reloaded),
    *(grown, evaluated, stepped_with_closure, loaded_while_parked, looked_at_while_parked),
    *(offloaded_and_back, nothing),
)


@pytest.fixture
def saved(tmp_path):
    """Returns a function that saves a trained run, and the run."""

    def make(device, kind, num_steps=2):
        run = Run(device, kind)
        for _ in range(num_steps):
            run.step()
        with residency.Checkpointer(tmp_path / kind) as checkpointer:
            checkpointer.save(1, run.state).wait()
        return run, tmp_path / kind

    return make


def resumed(device, kind, folder, *, num_before=0, eager=False):
    run = Run(device, kind, parks=True)
    for _ in range(num_before):
        run.step()
    with residency.Checkpointer(folder) as checkpointer:
        checkpointer.restore(run.state, eager=eager)
    run.num_steps = 2
    return run


def loaded(device, kind, first, *, num_before=0):
    run = Run(device, kind)
    for _ in range(num_before):
        run.step()
    run.load(first)
    return run


def assert_same(ours, stock):
    assert len(ours) == len(stock)
    for mine, theirs in zip(ours, stock, strict=True):
        if isinstance(mine, torch.Tensor):
            assert raw(mine) == raw(theirs)
        else:
            assert mine[:2] == theirs[:2]
            assert raw(mine[2]) == raw(theirs[2])


def lies_on(optimizer):
    """Returns the device types of the states of parameters, looked at without a use."""
    return {
        each.device.type
        for values in vars(optimizer)["state"].values()
        for key, value in values.items()
        if key != "step"
        for each in (value if isinstance(value, list) else [value])
    }


@pytest.mark.parametrize("touch", TOUCHES, ids=lambda touch: touch.__name__)
@pytest.mark.parametrize("kind", ["adamw", "history"])
def test_whoever_touches_the_state_finds_what_stock_shows(device, saved, kind, touch):
    first, folder = saved(device, kind)
    runs = resumed(device, kind, folder), loaded(device, kind, first)
    assert lies_on(runs[0].optimizer) == {"cpu"}
    for run in runs:
        touch(run, random.Random(1))
        run.step()
    assert_same(*(run.read() for run in runs))
    assert "state" not in vars(Optimizer)


@pytest.mark.parametrize("seed", range(24))
def test_random_programs_of_touches_have_the_bits_of_stock(device, saved, seed):
    draw = random.Random(seed)
    kind = draw.choice([*KINDS])
    touches = draw.choices(TOUCHES, k=draw.randint(2, 5))
    steps = [draw.random() < 0.4 for _ in touches]
    first, folder = saved(device, kind)
    num_before = draw.choice((0, 0, 1))
    runs = (
        resumed(device, kind, folder, num_before=num_before, eager=draw.random() < 0.1),
        loaded(device, kind, first, num_before=num_before),
    )
    for number, run in enumerate(runs):
        for index, (touch, has_step) in enumerate(zip(touches, steps, strict=True)):
            touch(run, random.Random(seed + index))
            if has_step:
                run.step()
            if index == 0 and number == 0 and draw.random() < 0.5:  # saved again while it waits
                with residency.Checkpointer(folder) as checkpointer:
                    checkpointer.save(2, run.state).wait()
                    checkpointer.restore(run.state)
        run.step()
    names = [touch.__name__ for touch in touches]
    try:
        assert_same(*(run.read() for run in runs))
    except AssertionError as error:
        raise AssertionError(f"{kind}, {num_before} steps before, {names}, {steps}") from error


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")  # torch's, on its first compile
@pytest.mark.parametrize("is_before", [False, True], ids=["after", "before"])
def test_a_compiled_step_takes_what_waits(device, saved, is_before):
    first, folder = saved(device, "adamw")
    found = []
    for is_ours in (True, False):
        torch._dynamo.reset()
        run = Run(device, "adamw")
        compiled = torch.compile(run.optimizer.step, backend="eager")
        if is_before:
            run.step(compiled)
        if is_ours:
            with residency.Checkpointer(folder) as checkpointer:
                checkpointer.restore(run.state)
        else:
            run.load(first)
        run.num_steps = 2
        for _ in range(2):
            run.step(compiled)
        # The compiler puts `step` onto the device when it compiles: anew after a load of torch's.
        found.append([each if isinstance(each, torch.Tensor) else each[2] for each in run.read()])
    assert_same(*found)


def test_the_librarys_own_looks_move_nothing(device, saved, tmp_path):
    _, folder = saved(device, "history")
    run = resumed(device, "history", folder)
    before = torch.accelerator.memory_allocated()
    with residency.Checkpointer(tmp_path / "again") as checkpointer:
        checkpointer.prepare(run.state)
        checkpointer.save(1, run.state).wait()
    residency.snapshot(run.state).wait()
    residency.park(run.optimizer)
    residency.unpark(run.optimizer)
    assert lies_on(run.optimizer) == {"cpu"}
    assert torch.accelerator.memory_allocated() <= before


def test_what_a_save_read_while_it_waited_goes_to_the_device_after_the_next_restore(
    device, saved, tmp_path
):
    first, folder = saved(device, "history")
    waiting = resumed(device, "history", folder)
    with residency.Checkpointer(tmp_path / "again") as checkpointer:
        checkpointer.save(1, waiting.state).wait()
    run, stock = resumed(device, "history", tmp_path / "again"), loaded(device, "history", first)
    run.step()
    stock.step()
    assert_same(run.read(), stock.read())


class CopiesItself(torch.optim.SGD):
    """Copies its attributes without a read of `state`."""

    def __getstate__(self):
        return dict(self.__dict__)


def test_a_class_that_could_use_its_state_unseen_gets_it_at_once(device, saved, tmp_path):
    KINDS["own"] = lambda params: CopiesItself(params, lr=0.1, momentum=0.9)
    try:
        first, folder = saved(device, "own")
        runs = resumed(device, "own", folder), loaded(device, "own", first)
        assert lies_on(runs[0].optimizer) == {device.type}
        for run in runs:
            copied(run, None)
            run.step()
        assert_same(*(run.read() for run in runs))
    finally:
        del KINDS["own"]


def test_two_threads_that_use_the_state_at_once_find_it(device, saved):
    first, folder = saved(device, "adamw")
    run, found = resumed(device, "adamw", folder), []
    barrier = threading.Barrier(4)

    def use():
        barrier.wait(60)
        found.append([v.device.type for v in run.optimizer.state[run.model[0].weight].values()])

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["cpu", device.type, device.type]] * 4
    stock = loaded(device, "adamw", first)
    for each in (run, stock):
        each.step()
    assert_same(run.read(), stock.read())


def test_an_optimizer_that_goes_unused_leaves_nothing_behind(device, saved):
    _, folder = saved(device, "adamw")
    run = resumed(device, "adamw", folder)
    assert "state" in vars(Optimizer)
    del run
    assert not Run(device, "sgd").optimizer.state  # whoever reads next takes the watch away
    assert "state" not in vars(Optimizer)


def test_without_room_at_the_first_use_the_error_says_what_to_do_and_all_is_whole(
    device, saved, monkeypatch
):
    first, folder = saved(device, "adamw")
    run, stock = resumed(device, "adamw", folder), loaded(device, "adamw", first)
    made = torch.empty_like

    def full(*args, **kwargs):
        if kwargs.get("device") == device:
            raise torch.OutOfMemoryError("no room")
        return made(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", full)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            run.optimizer.state_dict()
    assert "eager=True" in caught.value.__notes__[0]
    assert lies_on(run.optimizer) == {"cpu"}
    for each in (run, stock):
        each.step()
    assert_same(run.read(), stock.read())


def test_the_first_use_page_locks_no_more_than_twice_what_comes(
    device, saved, pinned_bytes, monkeypatch
):
    _, folder = saved(device, "adamw")
    run = resumed(device, "adamw", folder)
    comes = sum(2 * each.nbytes for each in run.model.parameters())
    before, taken = pinned_bytes(), []
    made = torch.empty_like

    def watched(*args, **kwargs):
        taken.append(pinned_bytes() - before)
        return made(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", watched)
        run.optimizer.state_dict()
    assert lies_on(run.optimizer) == {device.type}
    assert 0 < max(taken) <= max(2 * comes, _fill.ring_bytes_of(0, 1 << 20))
    assert pinned_bytes() == before


@pytest.mark.parametrize("kind", ["history", "adamw"])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("also_model", [False, True])
def test_what_a_save_read_while_it_was_parked_goes_to_the_device(
    device, tmp_path, kind, eager, also_model
):
    first = Run(device, kind)
    first.step()
    first.step()
    owners = [first.optimizer, *([first.model] if also_model else [])]
    with residency.Checkpointer(tmp_path) as checkpointer, residency.parked(*owners):
        checkpointer.save(1, first.state).wait()
    run = resumed(device, kind, tmp_path, eager=eager)
    stock = loaded(device, kind, first)
    assert_same(run.read(), stock.read())
    run.step()
    stock.step()
    assert_same(run.read(), stock.read())
