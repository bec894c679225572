"""A dry run finds the memory that grows with each step, counts it, names it and reckons with it."""

from __future__ import annotations

import random
import re
import struct

import pytest
from tests.dryrun.facts import MIB, answered, facts, phase

from residency._dryrun._answer import below_first_line
from residency._dryrun._books import OTHER, Books
from residency._dryrun._growing import NUM_STEPS, Growing, GrowingPasses
from residency._dryrun._lasting import growth_line, line_of_passes, steps_that_fit
from residency._dryrun._owners import STATE


class Loop:
    """A training loop over a plain allocator: blocks that live for some rounds, or for ever."""

    def __init__(self) -> None:
        self.journal: list[tuple[int, ...]] = []
        self.next = 512
        self.held = 0
        self.ends: dict[int, list[tuple[int, int]]] = {}
        self.kinds: dict[int, str] = {}
        self.steps = 0
        self.training = 0
        self.books = Books(self.take)
        self.growing = Growing(self.books, lambda: (self.training, self.steps))

    def make(self, num_bytes: int, rounds: int | None, kind: str = OTHER) -> None:
        """Makes a block that is freed at the end of the round that is so many later, or never."""
        address, self.next = self.next, self.next + num_bytes
        self.held += num_bytes
        self.kinds[address] = kind
        self.journal.append((address, num_bytes, num_bytes, self.held, 0))
        if rounds is not None:
            self.ends.setdefault(self.steps + rounds, []).append((address, num_bytes))

    def step(self) -> None:
        """Ends a round: the step is made, and what the round let go of is freed."""
        self.books.close("optimizer step", lambda: self.kinds)
        self.steps += 1
        self.growing.look()
        for address, num_bytes in self.ends.pop(self.steps - 1, []):
            self.held -= num_bytes
            self.journal.append((address, -num_bytes, num_bytes, self.held, 0))

    def let_go(self) -> None:
        """Frees what passes let go of, which come as often as rounds do."""
        for address, num_bytes in self.ends.pop(self.steps, []):
            self.held -= num_bytes
            self.journal.append((address, -num_bytes, num_bytes, self.held, 0))
        self.ends = {at - 1: blocks for at, blocks in self.ends.items()}

    def take(self) -> bytes:
        taken = b"".join(struct.pack("5q", *entry) for entry in self.journal)
        self.journal = []
        return taken


@pytest.mark.parametrize("seed", range(24))
def test_what_each_round_leaves_is_found_and_what_a_loop_lets_go_of_is_not(seed: int) -> None:
    chance = random.Random(seed)
    loop = Loop()
    leak = 0 if seed % 3 == 0 else chance.randint(1, 8) * MIB
    rounds = NUM_STEPS + chance.randint(0, 6)
    for _ in range(chance.randint(0, 3)):  # trainings before, which end early
        for _ in range(chance.randint(1, 3)):
            loop.make(chance.randint(1, 9) * MIB, None)
            loop.step()
        loop.training += 1
    history = chance.random() < 0.5
    for number in range(rounds):
        if number == 0:
            loop.make(64 * MIB, None)  # caches, which are made once
        if history:
            loop.make(MIB, None, STATE)  # of an optimizer that keeps its last gradients
        for _ in range(chance.randint(0, 5)):
            loop.make(chance.randint(1, 40) * MIB, chance.randint(0, 1))
        if leak:
            loop.make(leak, None)
        loop.step()
    found = loop.growing.found
    if not leak:
        assert found is None
        return
    assert found is not None
    assert (found["bytes_per_step"], found["steps"]) == (leak, rounds)
    # A segment of 20 MiB has so many of them, or nothing else beside one of 10 MiB or more.
    in_segments = leak if leak <= MIB else 20 * MIB // (20 * MIB // leak)
    assert found["reserved_bytes_per_step"] == in_segments


def test_what_one_round_of_many_leaves_and_what_is_small_is_no_growth() -> None:
    once, small = Loop(), Loop()
    for number in range(20):
        if number % 4 == 2:
            once.make(8 * MIB, None)
        once.step()
        small.make(512, None)
        small.step()
    assert (once.growing.found, small.growing.found) == (None, None)


@pytest.mark.parametrize("seed", range(24))
def test_what_each_pass_of_an_evaluation_leaves_is_found(seed: int) -> None:
    chance = random.Random(seed)
    loop = Loop()
    passes = GrowingPasses(loop.books)
    for _ in range(chance.randint(0, 9)):  # a training with passes of a teacher
        loop.make(MIB, 0)
        passes.end_pass()
        loop.make(4 * MIB, None)
        loop.step()
        passes.begin_anew()
    leak = 0 if seed % 3 == 0 else chance.randint(1, 8) * MIB
    number = NUM_STEPS + chance.randint(0, 30)
    for at in range(number):
        if at == 0:
            loop.make(64 * MIB, None)
        if leak:
            loop.make(leak, None)
        loop.make(chance.randint(1, 40) * MIB, chance.randint(0, 1))
        passes.end_pass()
        loop.let_go()
    found = passes.found
    if not leak:
        assert found is None
        return
    assert found is not None
    assert (found["bytes_per_pass"], found["passes"]) == (leak, number)
    loop.step()
    passes.begin_anew()
    for _ in range(NUM_STEPS):  # a later evaluation that keeps less
        loop.make(MIB, None)
        passes.end_pass()
    assert passes.found == found


def test_what_passes_leave_is_said_where_a_script_does_not_fit() -> None:
    growth = {"bytes_per_pass": 32 * MIB, "passes": 100, "names": ["outs"], "advice": "let go"}
    said = line_of_passes(facts(growth_of_passes=growth))
    assert said == (
        "held memory grows by 32.00 MiB with each forward pass without gradients, by 3.12 GiB in "
        "100 of them, in outs: let go"
    )
    for capacity in (3000, 5000):
        answer = answered([phase("evaluate", 4000, 0, 0, 0, 0)], capacity, growth_of_passes=growth)
        assert (said in below_first_line(answer)) is answer.is_too_large


@pytest.mark.parametrize(
    ("changed", "headroom", "steps"),
    [
        ({"is_cut": True}, 10 * MIB, 6 + 5),
        ({"is_cut": True}, 2 * MIB - 1, 6),
        ({"is_cut": True}, -1, None),  # it does not fit
        ({"is_cut": False}, 10 * MIB, None),  # it came to its end, and had room
        ({"is_cut": True, "growth": None}, 10 * MIB, None),
        ({"is_cut": True, "left_out": {"loops": [{"rounds": 6, "left": 4}]}}, 10 * MIB, None),
        ({"is_cut": True, "left_out": {"loops": [{"rounds": 6, "left": 9}]}}, 10 * MIB, 11),
        ({"is_cut": True, "left_out": {"loops": [{"rounds": 6, "left": None}]}}, 10 * MIB, 11),
    ],
)
def test_steps_that_fit_are_those_seen_and_what_the_rest_has_room_for(
    changed, headroom, steps
) -> None:
    grown = {"names": ["a", "b"], "advice": "let go of it", "steps": 6}
    sizes = {"bytes_per_step": 2 * MIB, "reserved_bytes_per_step": 2 * MIB}
    found = facts(growth=grown | sizes) | changed
    assert steps_that_fit(found, headroom) == steps
    line = "held memory grows by 2.00 MiB a step, in a, b: let go of it"
    assert growth_line(found) == (line if found["growth"] else None)


LEAK = """
import sys, torch
net = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(net.parameters())
kept = []
for _ in range(int(sys.argv[1])):
    out = net(torch.randn(4096, 512, device="cuda"))
    kept.append(out.detach())
    out.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.whole
def test_so_many_steps_fit_and_not_more(dry_run) -> None:
    options = ("--capacity", "760MiB")
    seen = dry_run(LEAK, "1000000", options=options)
    said = re.match(r"fits for about (\d+) steps", seen.errors)
    assert said is not None, seen.errors
    number = int(said[1])
    assert seen.answer["growth"]["bytes_per_step"] == 8 * MIB
    assert seen.answer["steps_that_fit"] == number
    assert "8.00 MiB a step, in __main__.kept: let go of it, or keep it on the host" in seen.errors
    for rounds, fits in ((number, True), (number + 2, False)):
        whole = dry_run(LEAK, str(rounds), options=(*options, "--steps", "0"))
        assert whole.answer["fits"] == fits, whole.errors


EVALUATING = """
import torch
from torch.utils.data import DataLoader
net = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(net.parameters())
def evaluate():
    outs = []
    with torch.no_grad():
        for x in DataLoader(torch.zeros(80 * 64, 512), batch_size=64):
            outs.append(net(x.cuda()).repeat(64, 1))
    return torch.cat(outs).argmax(-1)
for _ in range(2):
    net(torch.randn(64, 512).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    evaluate()
"""


@pytest.mark.whole
def test_an_evaluation_that_keeps_its_outputs_is_named(dry_run) -> None:
    outcome = dry_run(EVALUATING, options=("--capacity", "1GiB", "--fit"))
    said = (
        "held memory grows by 8.00 MiB with each forward pass without gradients, by 640.00 MiB in "
        "80 of them, in evaluate() local 'outs': let go of it, or keep it on the host"
    )
    assert said in outcome.errors
    assert outcome.answer["growth_of_passes"]["passes"] == 80
    assert outcome.answer["fit"] == []  # gradient checkpointing is for passes with gradients


TWO = """
import sys, torch
def make():
    return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(8)))
model, reference = make().cuda(), make().to(sys.argv[1])
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    x = torch.randn(64, 1024)
    with torch.no_grad():
        target = reference(x.to(sys.argv[1])).cuda()
    (model(x.cuda()) - target).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.whole
@pytest.mark.parametrize(("capacity", "is_enough"), [("640MiB", True), ("610MiB", False)])
def test_a_second_model_is_named_where_its_bytes_are_enough(dry_run, capacity, is_enough) -> None:
    outcome = dry_run(TWO, "cuda", options=("--capacity", capacity))
    assert (outcome.status, outcome.answer["fits"]) == (1, False), outcome.errors
    remedy = outcome.answer["remedy"]
    if not is_enough:
        assert remedy is None
        return
    assert "a second model of the same shapes, __main__.reference, beside __main__.model" in remedy
    assert f"this would have made room there: {remedy}" in outcome.errors
    assert dry_run(TWO, "cpu", options=("--capacity", capacity)).answer["fits"]


KEPT = """
import torch
kept = []
for seed in range(24):
    net = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(5):
        net(torch.randn(8, 1024).cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    kept.append(net.eval()){cpu}
"""


@pytest.mark.parametrize("cpu", ["", "; net.cpu()"])
def test_models_that_a_loop_of_seeds_keeps_are_counted(dry_run, cpu: str) -> None:
    outcome = dry_run(KEPT.format(cpu=cpu), options=("--capacity", "640MiB", "--others", "0B"))
    growth = outcome.answer["growth_of_trainings"]
    if cpu:
        assert growth is None
        return
    assert growth["bytes_per_training"] == 4 * (1024 * 1024 + 1024)
    assert "kept" in growth["names"][0]
    assert "with each training (about" in outcome.errors
