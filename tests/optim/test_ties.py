"""Entries of the state that share bytes go on to share them, whatever is done to the optimizer: the
plain one, which runs the same random program beside, says which do."""

import copy
import io
import random

import pytest
import torch

import residency
from residency._transfer import lending

CLASSES = {
    "AdamW": (torch.optim.AdamW, {"foreach": False}, ("exp_avg", "exp_avg_sq")),
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}, ("exp_avg", "exp_avg_sq")),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "foreach": False}, ("momentum_buffer",)),
    "Adagrad": (torch.optim.Adagrad, {"foreach": True}, ("sum",)),
}
NUM_PARAMETERS = 4
RESIDENT = [0, 0, 1200, 2200, "1MiB"]
BUCKETS = [700, 2000, "1MiB"]


class World:
    """One of two runs of a program; the options are those of ours."""

    def __init__(self, lab, kind, is_ours, chance):
        make, settings, self.keys = CLASSES[kind]
        self.lab, self.is_ours, self.chance = lab, is_ours, chance
        self.parameters = lab.parameters(shapes=((8, 8),) * NUM_PARAMETERS)
        self.optimizer = make(self.parameters, lr=1e-2, **settings)
        self.num_steps = 0

    def offload(self):
        options = {
            "resident": self.chance.choice(RESIDENT),
            "bucket": self.chance.choice(BUCKETS),
            "slots": self.chance.choice([1, 3]),
            "pin": self.chance.choice([True, False]),
        }
        if self.is_ours:
            residency.offload_optimizer(self.optimizer, **options)

    def state(self, index):
        return self.optimizer.state[self.parameters[index]]

    def entries(self):
        return [
            (f"{index}.{key}", value)
            for index, parameter in enumerate(self.parameters)
            for key, value in dict(self.optimizer.state.get(parameter, {})).items()
            if isinstance(value, torch.Tensor)
        ]

    def step(self):
        missing = self.chance.choice([False, True])
        self.lab.take_steps(self.optimizer, self.parameters, [self.num_steps], missing=missing)
        self.num_steps += 1

    def on_and_off(self):
        if self.is_ours:
            residency.onload_optimizer(self.optimizer)
            check_distinct_objects(self)
        if self.chance.random() < 0.5:
            self.step()
        self.offload()

    def load(self):
        saved = self.optimizer.state_dict()
        how = self.chance.choice(["itself", "a copy", "a file", "exchanged"])
        if how == "a copy":
            saved = copy.deepcopy(saved)
        elif how == "a file":
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            saved = torch.load(file)
        elif how == "exchanged":
            states = saved["state"]
            states[0], states[1] = states[1], states[0]
        self.optimizer.load_state_dict(saved)

    def two(self):
        return self.chance.sample(range(NUM_PARAMETERS), 2)

    def exchange(self):
        state = self.optimizer.state
        p, q = (self.parameters[index] for index in self.two())
        state[p], state[q] = state[q], state[p]

    def swap(self):
        (p, q), key = self.two(), self.chance.choice(self.keys)
        one, two = self.state(p), self.state(q)
        one[key], two[key] = two[key], one[key]

    def one_tensor(self):
        (p, q), key = self.two(), self.chance.choice(self.keys)
        self.state(p)[key] = self.state(q)[self.chance.choice([key, self.keys[0]])]

    def one_in_a_parameter(self):
        (p, _), (first, last) = self.two(), (self.keys[0], self.keys[-1])
        self.state(p)[last] = self.state(p)[first]

    def one_counter(self):
        p, q = self.two()
        if "step" in self.state(q):
            self.state(p)["step"] = self.state(q)["step"]

    def turned(self):
        (p, q), key = self.two(), self.chance.choice(self.keys)
        self.state(p)[key] = self.state(q)[key].t()

    def part(self):
        (p, q), key = self.two(), self.chance.choice(self.keys)
        value = self.state(q)[key]
        start = value.storage_offset() + 5
        self.state(p)["mine"] = value.as_strided((25,), (1,), start)

    def column(self):
        (p, q), key = self.two(), self.chance.choice(self.keys)
        self.state(p)["mine"] = self.state(q)[key][:, 2:5]

    def two_offsets(self):
        """Makes windows of one tensor that nobody has afterwards."""
        (p, q), key = self.two(), self.chance.choice(self.keys)
        distance = self.chance.choice([16, 24, 1])
        flat = torch.linspace(0.1, 1.0, 64 + distance).to(self.parameters[p].device)
        self.state(p)["whole"] = flat
        whole = self.state(p)["whole"]
        self.state(q)[key] = whole[distance:].view(8, 8)
        self.state(p)[key] = whole[:64].view(8, 8)
        del whole, self.state(p)["whole"]

    def part_ways(self):
        (p, _), key = self.two(), self.chance.choice(self.keys)
        self.state(p)[key] = self.state(p)[key].clone()
        self.state(p).pop("mine", None)

    def assign_whole(self):
        p, _ = self.two()
        values = dict(self.state(p))
        self.optimizer.state[self.parameters[p]] = values

    def pop_and_set(self):
        p, q = self.two()
        taken = self.optimizer.state.pop(self.parameters[p])
        self.optimizer.state[self.parameters[p]] = self.optimizer.state.pop(self.parameters[q])
        self.optimizer.state[self.parameters[q]] = taken

    def snapshot(self):
        """Keeps what later steps write, and compares it after the first of them."""
        expected = [(name, value.cpu().clone()) for name, value in self.entries()]
        self.kept, is_kept = None, self.chance.random() < 0.5
        if self.is_ours:
            self.kept = residency.snapshot({"o": self.optimizer})
        self.step()
        if self.is_ours and not is_kept:
            taken = self.kept.tree["o"]["state"]
            for name, value in expected:
                index, key = name.split(".")
                assert bits(taken[int(index)][key]) == bits(value), name
            self.kept = None

    def park(self):
        if self.is_ours:
            residency.park(self.optimizer)
            residency.unpark(self.optimizer)

    def write(self):
        found = self.entries()
        _, value = self.chance.choice([each for each in found if each[1].dim()])
        value.mul_(0.5)


TIES = ["one_tensor", "one_in_a_parameter", "one_counter", "turned", "part", "column",
        "two_offsets"]  # fmt: skip
ACTIONS = [*TIES, "step", "step", "step", "on_and_off", "on_and_off", "load", "load", "exchange",
           "exchange", "swap", "part_ways", "assign_whole", "pop_and_set", "write",
           "write", "snapshot", "park"]  # fmt: skip


def check_distinct_objects(world):
    """Checks that what onload gives back is plain."""
    assert type(world.optimizer) in {kind for kind, _, _ in CLASSES.values()}
    assert all(v.device == world.lab.device for k, v in world.entries() if "step" not in k)


def spans_of(found):
    """Returns the bytes of each tensor: where they begin and end, and on which device."""
    spans = []
    for name, value in found:
        reach = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
        first = value.data_ptr()
        spans.append((name, str(value.device), first, first + (reach + 1) * value.element_size()))
    return spans


def ties(found):
    """Returns which tensors reach into each other's range, and how far apart they begin."""
    spans = spans_of(found)
    return {
        (a[0], b[0]): b[2] - a[2]
        for i, a in enumerate(spans)
        for b in spans[i + 1 :]
        if a[1] == b[1] and a[2] < b[3] and b[2] < a[3]
    }


def saved_ties(world):
    """Returns the ties in a copy of the state dict, and in a file of it."""
    saved = world.optimizer.state_dict()
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    results = []
    for tree in (copy.deepcopy(saved), torch.load(file)):
        found = [
            (f"{index}.{key}", value)
            for index, values in sorted(tree["state"].items())
            for key, value in values.items()
            if isinstance(value, torch.Tensor)
        ]
        results.append(ties(found))
    return results


def bits(tensor):
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist()


def compare(ours, plain, log):
    mine, theirs = ours.entries(), plain.entries()
    assert [n for n, _ in mine] == [n for n, _ in theirs], log
    assert ties(mine) == ties(theirs), log
    for (name, a), (_, b) in zip(mine, theirs, strict=True):
        assert bits(a) == bits(b), (name, log)
    for p, q in zip(ours.parameters, plain.parameters, strict=True):
        assert bits(p) == bits(q), log


def run(lab, seed):
    chance = random.Random(seed)
    kind = chance.choice(list(CLASSES))
    own = chance.random()
    ours, plain = (World(lab, kind, is_ours, random.Random(own)) for is_ours in (True, False))
    names = [chance.choice(TIES) for _ in range(chance.randint(0, 2))]
    names += ["offload", *[chance.choice(ACTIONS) for _ in range(chance.randint(3, 12))], "step"]
    log = [seed, kind]
    for world in (ours, plain):
        world.lab.take_steps(world.optimizer, world.parameters, [0], missing=False)
    for name in names:
        log.append(name)
        try:
            for world in (ours, plain):
                with torch.no_grad():
                    getattr(world, name)()
        except BaseException as error:
            error.add_note(str(log))
            raise
        if chance.random() < 0.6:
            compare(ours, plain, log)
        if chance.random() < 0.2:
            assert saved_ties(ours) == saved_ties(plain), log
    compare(ours, plain, log)


@pytest.mark.races
@pytest.mark.parametrize("seed", range(0, 144, 12))
def test_ties_of_entries_are_those_of_the_plain_optimizer(lab, seed):
    for each in range(seed, seed + 12):
        run(lab, each)


def tied_bfloat16(lab, make):
    parameters = lab.parameters(shapes=((8, 8), (8, 8)), dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(parameters)
    lab.take_steps(optimizer, parameters, [0], missing=False)
    first, other = (optimizer.state[p] for p in parameters)
    other["exp_avg"] = make(first["exp_avg"])
    return optimizer, parameters


def test_one_tensor_of_two_parameters_with_masters_is_converted_once(lab):
    optimizer, parameters = tied_bfloat16(lab, lambda t: t)
    residency.offload_optimizer(optimizer, master_weights=True)
    first, other = (optimizer.state[p]["exp_avg"] for p in parameters)
    assert first is other
    assert first.dtype == torch.float32


def test_views_that_would_be_converted_for_masters_are_refused_and_nothing_moves(lab):
    optimizer, parameters = tied_bfloat16(lab, torch.t)
    with pytest.raises(residency.RefusedError, match=r"'exp_avg'.* share bytes.*master weight"):
        residency.offload_optimizer(optimizer, master_weights=True)
    first, other = (optimizer.state[p]["exp_avg"] for p in parameters)
    assert first.device == other.device == lab.device
    assert first.data_ptr() == other.data_ptr()
    optimizer.step()


def test_a_load_that_is_refused_for_its_ties_changes_nothing(lab):
    optimizer, parameters = tied_bfloat16(lab, torch.t)
    saved = copy.deepcopy(optimizer.state_dict())
    fresh = torch.optim.AdamW(parameters)
    residency.offload_optimizer(fresh, master_weights=True)
    lab.take_steps(fresh, parameters, [0], missing=False)
    before = lab.read(fresh, parameters)
    with pytest.raises(residency.RefusedError, match="share bytes"):
        fresh.load_state_dict(saved)
    lab.assert_equal(lab.read(fresh, parameters), before)


@pytest.mark.parametrize("resident", [0, "1MiB"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_buffers_round_as_in_a_list_in_which_some_parameters_have_none_yet(lab, dtype, resident):
    results = []
    for offload in (False, True):
        parameters = lab.parameters(dtype=dtype)
        optimizer = torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, foreach=True)
        if offload:
            residency.offload_optimizer(optimizer, bucket=3000, resident=resident)
        for step in range(3):
            lab.set_gradients(parameters, step, missing=False)
            for parameter in parameters[2 * step + 2 :]:
                parameter.grad = None
            optimizer.step()
        results.append(lab.read(optimizer, parameters))
    lab.assert_equal(*results)


@pytest.mark.parametrize("start", [0, 1000])
@pytest.mark.parametrize("bucket", [2048, "1MiB"])
def test_states_that_share_bytes_move_together_off_memory_that_is_lent_for_good(lab, start, bucket):
    runs = []
    for is_ours in (False, True):
        parameters = lab.parameters(shapes=((4000,), (1000,)))
        optimizer = torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, foreach=False)
        lab.take_steps(optimizer, parameters, [0], missing=False)
        whole = optimizer.state[parameters[0]]["momentum_buffer"]
        optimizer.state[parameters[1]]["momentum_buffer"] = whole[start : start + 1000]
        if is_ours:
            residency.offload_optimizer(optimizer, bucket=bucket)
        lab.take_steps(optimizer, parameters, [1], missing=False)
        lent = [optimizer.state[p]["momentum_buffer"] for p in parameters] if is_ours else []
        before = [tensor.clone() for tensor in lent]
        for index, tensor in enumerate(lent):
            lending.lend(tensor, index, is_lasting=True)
        try:
            lab.take_steps(optimizer, parameters, [2, 3], missing=False)
        finally:
            for index, tensor in enumerate(lent):
                lending.give_back(tensor, index)
        assert all(map(torch.equal, lent, before))
        whole, part = (optimizer.state[p]["momentum_buffer"] for p in parameters)
        assert part.data_ptr() - whole.data_ptr() == 4 * start
        runs.append(lab.read(optimizer, parameters))
    lab.assert_equal(*runs)


@pytest.mark.parametrize("resident", [0, 3000])
@pytest.mark.parametrize("is_large_first", [True, False])
@pytest.mark.parametrize("without_gradient", [None, 0, 1])
def test_windows_that_overlap_stay_so_though_they_are_assigned_one_after_the_other(
    lab, resident, is_large_first, without_gradient
):
    runs = []
    for is_ours in (False, True):
        parameters = lab.parameters(shapes=((300,), (128,), (50,)))
        optimizer = torch.optim.AdamW(parameters, lr=1e-2, foreach=False)
        lab.take_steps(optimizer, parameters, [0], missing=False)
        if is_ours:
            residency.offload_optimizer(optimizer, bucket=700, slots=1, resident=resident)
        both = torch.zeros(404, device=lab.device)
        windows = [(0, "exp_avg", both[:300]), (1, "exp_avg", both[276:])]
        for index, key, window in windows if is_large_first else reversed(windows):
            optimizer.state[parameters[index]][key] = window
        for step in range(1, 5):
            lab.set_gradients(parameters, step, missing=False)
            if without_gradient is not None:
                parameters[without_gradient].grad = None
            optimizer.step()
        large, small = (optimizer.state[p]["exp_avg"] for p in parameters[:2])
        assert small.data_ptr() - large.data_ptr() == 4 * 276
        runs.append(lab.read(optimizer, parameters))
    lab.assert_equal(*runs)


@pytest.mark.parametrize("num_windows", [2, 3])
def test_a_window_joins_all_whose_bytes_it_has_and_what_callers_were_shown_follows(
    lab, num_windows
):
    runs = []
    for is_ours in (False, True):
        parameters = lab.parameters(shapes=((100,),) * num_windows)
        optimizer = torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, foreach=False)
        lab.take_steps(optimizer, parameters, [0], missing=False)
        if is_ours:
            residency.offload_optimizer(optimizer)
        both = torch.arange(300.0, device=lab.device)
        shown = []
        # The last one overlaps both of the others, which have no byte in common.
        for parameter, start in zip(parameters, (0, 150, 75), strict=False):
            optimizer.state[parameter]["momentum_buffer"] = both[start : start + 100]
            shown.append(optimizer.state[parameter]["momentum_buffer"])
        lab.take_steps(optimizer, parameters, [1, 2], missing=False)
        for parameter, tensor in zip(parameters, shown, strict=True):
            assert torch.equal(tensor, optimizer.state[parameter]["momentum_buffer"])
        runs.append(lab.read(optimizer, parameters))
    lab.assert_equal(*runs)


class SecondStateLater(torch.optim.Optimizer):
    """Momentum, and from a parameter's step ``age`` on a sum of it, which is one state more."""

    def __init__(self, parameters, age):
        super().__init__(
            [{"params": [p], "age": a} for p, a in zip(parameters, age, strict=True)], {}
        )

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["num"], state["momentum"] = 0, torch.zeros_like(p)
                state["num"] += 1
                state["momentum"].mul_(0.9).add_(p.grad)
                p.sub_(state["momentum"], alpha=0.1)
                if state["num"] >= group["age"]:
                    state.setdefault("sum", torch.zeros_like(p)).add_(state["momentum"])
                    p.sub_(state["sum"], alpha=0.01)


@pytest.mark.parametrize(("part", "room"), [(slice(None), "4KiB"), (slice(100, 300), "3KiB")])
@pytest.mark.parametrize("age", [(4, 4), (4, 9), (9, 4)])
def test_states_that_share_bytes_leave_the_device_together_when_one_of_them_grows(
    lab, age, part, room
):
    runs = []
    for is_ours in (False, True):
        parameters = lab.parameters(shapes=((400,), (len(range(400)[part]),)))
        optimizer = SecondStateLater(parameters, age)
        lab.take_steps(optimizer, parameters, [0], missing=False)
        shared = optimizer.state[parameters[0]]["momentum"][part]
        optimizer.state[parameters[1]]["momentum"] = shared
        if is_ours:
            residency.offload_optimizer(optimizer, resident=room)
            assert not any(optimizer.state[p]["momentum"].is_cpu for p in parameters)
        lab.take_steps(optimizer, parameters, range(1, 7), missing=False)
        runs.append(lab.read(optimizer, parameters))
        if is_ours:
            assert all(optimizer.state[p]["momentum"].is_cpu for p in parameters)
    lab.assert_equal(*runs)
