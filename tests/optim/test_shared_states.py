"""An assignment into the state gives the value and ties nothing: a random program runs beside on a
plain optimizer, which is given a copy each time. Everything that could only be shared is refused.
"""

import copy
import io
import random

import pytest
import torch

import residency
from residency._storages import overlapping

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

    def given(self, value):
        """Returns a value to assign: on the plain optimizer, a copy has the value."""
        return value if self.is_ours else value.clone()

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
        value = self.state(q)[self.chance.choice([key, self.keys[0]])]
        self.state(p)[key] = self.given(value)

    def one_in_a_parameter(self):
        (p, _), (first, last) = self.two(), (self.keys[0], self.keys[-1])
        self.state(p)[last] = self.given(self.state(p)[first])

    def one_counter(self):
        p, q = self.two()
        if "step" in self.state(q):
            self.state(p)["step"] = self.given(self.state(q)["step"])

    def turned(self):
        (p, q), key = self.two(), self.chance.choice(self.keys)
        self.state(p)[key] = self.given(self.state(q)[key].t())

    def part(self):
        (p, q), key = self.two(), self.chance.choice(self.keys)
        value = self.state(q)[key]
        start = value.storage_offset() + 5
        self.state(p)["mine"] = self.given(value.as_strided((25,), (1,), start))

    def column(self):
        (p, q), key = self.two(), self.chance.choice(self.keys)
        self.state(p)["mine"] = self.given(self.state(q)[key][:, 2:5])

    def two_offsets(self):
        """Assigns windows of one tensor, one after the other."""
        (p, q), key = self.two(), self.chance.choice(self.keys)
        distance = self.chance.choice([16, 24, 1])
        flat = torch.linspace(0.1, 1.0, 64 + distance).to(self.parameters[p].device)
        self.state(p)["whole"] = self.given(flat)
        whole = self.chance.choice([flat, self.state(p)["whole"]])
        self.state(q)[key] = self.given(whole[distance:].view(8, 8))
        self.state(p)[key] = self.given(whole[:64].view(8, 8))
        del whole, self.state(p)["whole"]

    def one_in_a_load(self):
        saved = self.optimizer.state_dict()
        (p, q), key = self.two(), self.chance.choice(self.keys)
        saved["state"][p] = dict(saved["state"][p])
        saved["state"][p][key] = self.given(saved["state"][q][key])
        if "step" in saved["state"][q]:
            saved["state"][p]["step"] = self.given(saved["state"][q]["step"])
        self.optimizer.load_state_dict(saved)

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


ACTIONS = ["one_tensor", "one_in_a_parameter", "one_counter", "one_in_a_load", "turned", "part",
           "column", "two_offsets", "step", "step", "step", "on_and_off", "on_and_off", "load",
           "load", "exchange", "exchange", "swap", "assign_whole", "pop_and_set", "write", "write",
           "snapshot", "park"]  # fmt: skip


def check_distinct_objects(world):
    """Checks that what onload gives back is plain."""
    assert type(world.optimizer) in {kind for kind, _, _ in CLASSES.values()}
    assert all(v.device == world.lab.device for k, v in world.entries() if "step" not in k)


def bits(tensor):
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist()


def compare(ours, plain, log):
    mine, theirs = ours.entries(), plain.entries()
    assert [n for n, _ in mine] == [n for n, _ in theirs], log
    assert not overlapping([value for _, value in mine]), log
    for (name, a), (_, b) in zip(mine, theirs, strict=True):
        assert bits(a) == bits(b), (name, log)
    for p, q in zip(ours.parameters, plain.parameters, strict=True):
        assert bits(p) == bits(q), log


def run(lab, seed):
    chance = random.Random(seed)
    kind = chance.choice(list(CLASSES))
    own = chance.random()
    ours, plain = (World(lab, kind, is_ours, random.Random(own)) for is_ours in (True, False))
    names = ["offload", *[chance.choice(ACTIONS) for _ in range(chance.randint(3, 12))], "step"]
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
    compare(ours, plain, log)


@pytest.mark.parametrize("seed", range(0, 144, 12))
def test_an_entry_has_the_value_that_it_was_given_and_no_byte_of_another(lab, seed):
    for each in range(seed, seed + 12):
        run(lab, each)


PLACES = {"streamed": {}, "resident": {"resident": "1MiB"}, "cut": {"bucket": "1KiB"}}
PARTS = {
    "turned": lambda t: t.t(),
    "a window": lambda t: t.view(-1)[7:71],
    "columns": lambda t: t[:, 3:],
    "another dtype": lambda t: t.view(torch.int32),
}


def tied(lab, make, dtype=torch.float32):
    """Returns a plain AdamW in which two parameters' ``exp_avg`` are made of one tensor."""
    parameters = lab.parameters(shapes=((16, 16), (16, 16), (16, 16)), dtype=dtype)
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    lab.take_steps(optimizer, parameters, [0], missing=False)
    first, other = (optimizer.state[p] for p in parameters[:2])
    other["exp_avg"] = make(first["exp_avg"])
    return optimizer, parameters


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["offload", "load", "saved and restored"])
def test_one_tensor_under_two_names_comes_apart(lab, tmp_path, way, dtype, place):
    place = {**place, "master_weights": dtype is torch.bfloat16}
    results = []
    for make in (torch.clone, lambda tensor: tensor):
        optimizer, parameters = tied(lab, make, dtype)
        states = [optimizer.state[p] for p in parameters]
        counter = make(states[0]["step"])
        states[1]["step"] = counter
        if way == "offload":
            residency.offload_optimizer(optimizer, **place)
        else:
            fresh = torch.optim.AdamW(parameters, lr=1e-2)
            residency.offload_optimizer(fresh, **place)
            if way == "load":
                fresh.load_state_dict(optimizer.state_dict())
            else:
                if dtype is torch.bfloat16:
                    pytest.skip("a plain optimizer's save has no master weights")
                with residency.Checkpointer(tmp_path / str(len(results))) as checkpointer:
                    checkpointer.save(1, {"optimizer": optimizer}).wait()
                    checkpointer.restore({"optimizer": fresh})
            optimizer = fresh
        lab.take_steps(optimizer, parameters, range(1, 4))
        found = [v for p in parameters for v in optimizer.state[p].values()]
        assert not overlapping(found)
        results.append(lab.read(optimizer, parameters))
    lab.assert_equal(*results)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("way", ["offload", "load"])
def test_columns_of_one_tensor_share_no_byte_and_are_states_as_any_other(lab, way, place):
    results = []
    for make in (torch.clone, lambda tensor: tensor):
        parameters = lab.parameters(shapes=((16, 16), (16, 16)))
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        lab.take_steps(optimizer, parameters, [0], missing=False)
        whole = torch.linspace(0, 1, 512, device=lab.device).view(16, 32)
        for parameter, columns in zip(parameters, (whole[:, :16], whole[:, 16:]), strict=True):
            optimizer.state[parameter]["exp_avg"] = make(columns)
        if way == "offload":
            residency.offload_optimizer(optimizer, **place)
        else:
            saved = optimizer.state_dict()
            optimizer = residency.offload_optimizer(torch.optim.AdamW(parameters, lr=1e-2), **place)
            optimizer.load_state_dict(saved)
        lab.take_steps(optimizer, parameters, range(1, 4), missing=False)
        results.append(lab.read(optimizer, parameters))
    lab.assert_equal(*results)


@pytest.mark.parametrize("master_weights", [False, True])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("make", PARTS.values(), ids=PARTS)
def test_states_that_share_a_part_are_refused_at_the_offload(lab, make, place, master_weights):
    optimizer, parameters = tied(lab, make)
    values = [dict(optimizer.state[p]) for p in parameters]
    with pytest.raises(
        residency.RefusedError, match=r"\['exp_avg'\] share a part.*Nothing was moved.*clone"
    ):
        residency.offload_optimizer(optimizer, master_weights=master_weights, **place)
    assert type(optimizer) is torch.optim.AdamW
    after = [optimizer.state[p] for p in parameters]
    pairs = [(a[k], v) for a, b in zip(after, values, strict=True) for k, v in b.items()]
    assert all(now is before for now, before in pairs)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("part", ["turned", "another dtype"])
def test_states_that_share_a_part_are_refused_by_a_load(lab, part, place):
    optimizer, parameters = tied(lab, PARTS[part])
    saved = optimizer.state_dict()
    fresh = torch.optim.AdamW(parameters)
    residency.offload_optimizer(fresh, **place)
    lab.take_steps(fresh, parameters, [0], missing=False)
    before = lab.read(fresh, parameters)
    with pytest.raises(residency.RefusedError, match=r"share a part.*Nothing was loaded"):
        fresh.load_state_dict(saved)
    lab.assert_equal(lab.read(fresh, parameters), before)


REPLACEMENTS = {
    "share_memory_": lambda t: t.share_memory_(),
    "data": lambda t: setattr(t, "data", torch.full_like(t, 0.25)),
    "set_": lambda t: t.set_(torch.full_like(t, 0.25)),
    "data of other strides": lambda t: setattr(t, "data", torch.full_like(t, 0.25).t()),
    "data with gaps": lambda t: setattr(t, "data", t.new_full((16, 32), 0.25)[:, ::2]),
    "data that is another state": None,
}


def three(lab):
    parameters = lab.parameters(shapes=((16, 16), (16, 16), (16, 16)))
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    residency.offload_optimizer(optimizer)
    lab.take_steps(optimizer, parameters, [0], missing=False)
    return optimizer, parameters


@pytest.mark.parametrize("replace", REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_a_state_that_was_shown_and_put_over_other_memory_is_refused(lab, tmp_path, replace):
    optimizer, parameters = three(lab)
    lab.set_gradients(parameters, 1, missing=False)
    p, q, _ = parameters
    expected = [optimizer.state[p]["exp_avg"].clone(), *(each.detach().clone() for each in (p, q))]
    shown = optimizer.state[p]["exp_avg"]
    if replace is None:
        shown.data = optimizer.state[q]["exp_avg"]
    else:
        replace(shown)
    given = shown.clone()
    error = r"'exp_avg'.*other memory.*Nothing was changed.*assign"
    with residency.Checkpointer(tmp_path) as checkpointer:
        for call in (
            optimizer.step,
            lambda: optimizer.state[p]["exp_avg_sq"],
            lambda: dict(optimizer.state[p]),
            optimizer.state_dict,
            lambda: checkpointer.save(1, {"optimizer": optimizer}),
            lambda: residency.snapshot({"optimizer": optimizer}),
        ):
            with pytest.raises(residency.RefusedError, match=error):
                call()
        assert checkpointer.steps() == []
    home = optimizer.state.peek(p).homes_by_key["exp_avg"].tensor
    for value, before in zip((home, p, q), expected, strict=True):
        assert torch.equal(value.detach(), before)
    optimizer.state[p]["exp_avg"] = shown  # as the error says
    assert torch.equal(optimizer.state[p]["exp_avg"], given)
    optimizer.step()


@pytest.mark.parametrize("way", ["load", "restore", "deleted"])
def test_a_state_over_other_memory_goes_with_what_takes_its_place(lab, tmp_path, way):
    optimizer, parameters = three(lab)
    plain = lab.read(optimizer, parameters)
    saved = copy.deepcopy(optimizer.state_dict())
    with residency.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"optimizer": optimizer}).wait()
        optimizer.state[parameters[0]]["exp_avg"].share_memory_()
        if way == "load":
            optimizer.load_state_dict(saved)
        elif way == "restore":
            checkpointer.restore({"optimizer": optimizer})
        else:
            del optimizer.state[parameters[0]]["exp_avg"]
            optimizer.state[parameters[0]] = saved["state"][0]
    lab.assert_equal(lab.read(optimizer, parameters), plain)
    lab.take_steps(optimizer, parameters, [1], missing=False)


def test_one_mapping_of_two_parameters_is_refused_and_nothing_is_changed(lab, tmp_path):
    optimizer, parameters = three(lab)
    saved = copy.deepcopy(optimizer.state_dict())
    lab.set_gradients(parameters, 1, missing=False)
    p, q, _ = parameters
    with residency.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"optimizer": optimizer}).wait()
        optimizer.state[p] = optimizer.state[q]
        before = lab.read(optimizer, parameters)
        for call in (
            optimizer.step,
            lambda: optimizer.load_state_dict(saved),
            lambda: checkpointer.save(2, {"optimizer": optimizer}),
            lambda: checkpointer.restore({"optimizer": optimizer}),
            lambda: residency.snapshot({"optimizer": optimizer}),
        ):
            with pytest.raises(residency.ResidencyError, match=r"one mapping.*Nothing was.*dict\("):
                call()
            lab.assert_equal(lab.read(optimizer, parameters), before)
        assert checkpointer.steps() == [1]
    optimizer.state[p] = dict(optimizer.state[q])  # as the error says
    optimizer.step()
    assert torch.equal(*(optimizer.state[each]["step"] for each in (p, q)))


def test_one_mapping_of_two_parameters_is_refused_at_the_offload(lab):
    parameters = lab.parameters(shapes=((16, 16), (16, 16)))
    optimizer = torch.optim.AdamW(parameters)
    lab.take_steps(optimizer, parameters, [0], missing=False)
    optimizer.state[parameters[0]] = optimizer.state[parameters[1]]
    with pytest.raises(residency.RefusedError, match=r"one mapping.*Nothing was moved"):
        residency.offload_optimizer(optimizer)
    assert type(optimizer) is torch.optim.AdamW
    optimizer.step()


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
