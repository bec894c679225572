"""The books of a dry run over random journals, beside a plain re-reading of the same."""

import random
import struct

import pytest

from residency._dryrun._books import ACTIVATIONS, GATHERED, KINDS, OTHER, Books
from residency._dryrun._launch import with_owners

OWNED = ("parameters", "gradients", "optimizer state")
NAMES = ("set up", "forward", "backward", "optimizer step", "save")


class Device:
    """A plain allocator, which remembers what it did and what was held after each deed."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.journal: list[tuple[int, ...]] = []
        self.live: dict[int, int] = {}
        self.reserved = 0

    def act(self) -> None:
        if self.live and self.chance.random() < 0.48:
            address = self.chance.choice(list(self.live))
            size = -self.live.pop(address)
        else:
            address = self.chance.choice([a for a in range(0, 1 << 20, 512) if a not in self.live])
            size = self.live[address] = 512 * self.chance.randint(1, 50)
        self.reserved = max(self.reserved, sum(self.live.values()))
        self.journal.append((address, size, abs(size), self.reserved, 0))

    def take(self) -> bytes:
        taken = b"".join(struct.pack("5q", *entry) for entry in self.journal)
        self.journal = []
        return taken


@pytest.mark.parametrize("seed", range(60))
def test_peaks_and_owners_are_those_of_a_plain_reading(seed: int) -> None:
    chance = random.Random(seed)
    device = Device(chance)
    books = Books(device.take)
    expected: dict[str, int] = {}
    reserved: dict[str, int] = {}
    for _ in range(chance.randint(1, 12)):
        name = chance.choice(NAMES)
        peak = sum(device.live.values())
        for _ in range(chance.choice([0, 3, 40, 700])):
            device.act()
            peak = max(peak, sum(device.live.values()))
        expected[name] = max(expected.get(name, 0), peak)
        reserved[name] = max(reserved.get(name, 0), device.reserved)
        owned = {a: chance.choice(OWNED) for a in device.live if chance.random() < 0.3}
        books.close(name, lambda owned=owned: owned)
        assert books.held == sum(device.live.values())
        last = {point[0]: point for point in books.timeline}
        if last:
            assert sum(books.timeline[-1][1:-1]) == books.held
    for name, phase in books.phases.items():
        assert phase.peak_allocated == expected[name]
        assert phase.peak_reserved == reserved[name]
        assert sum(phase.at_peak.values()) == phase.peak_allocated
        assert all(size >= 0 for size in phase.at_peak.values())
    assert all(min(point[1:]) >= 0 for point in books.timeline)


def test_a_block_is_what_owns_it_at_the_end_of_its_phase() -> None:
    device = Device(random.Random(1))
    books = Books(device.take)

    def made(address: int, size: int) -> None:
        device.journal.append((address, size, abs(size), 10_000, 0))

    made(0, 1000)
    books.close("set up", lambda: {0: "parameters"})
    made(512, 2000)  # saved for backward
    made(1024, 500)  # a workspace, which stays
    books.close("forward", lambda: {0: "parameters"})
    made(2048, 1000)
    made(512, -2000)
    owned = {0: "parameters", 2048: "gradients"}
    books.close("backward", lambda: owned)
    made(4096, 3000)
    books.close("optimizer step", lambda: owned | {4096: "optimizer state"})
    phases = books.phases
    assert phases["forward"].at_peak[ACTIVATIONS] == 2500
    assert phases["backward"].at_peak == {
        "parameters": 1000, GATHERED: 0, "gradients": 1000, "optimizer state": 0,
        ACTIVATIONS: 2500, OTHER: 0,
    }  # fmt: skip
    assert phases["optimizer step"].at_peak == {
        "parameters": 1000, GATHERED: 0, "gradients": 1000, "optimizer state": 3000,
        ACTIVATIONS: 0, OTHER: 500,
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_a_kind_is_that_of_a_block_and_not_of_its_address(seed: int) -> None:
    chance = random.Random(seed)
    device = Device(chance)
    books = Books(device.take)
    live: dict[int, tuple[int, str]] = {}  # bytes, and what owns them at the ends of phases
    known: set[int] = set()  # addresses whose block was there when a phase ended
    for number in range(8):
        moments: list[dict[int, tuple[int, str]]] = [dict(live)]
        known = set(live)
        kinds_then: list[set[int]] = [set(known)]
        for _ in range(chance.randint(1, 12)):
            address = 512 * chance.randrange(4)  # few of them, so that they are used again
            if address in live:
                size = -live.pop(address)[0]
                known.discard(address)
            else:
                size = 512 * chance.randint(1, 50)
                live[address] = (size, chance.choice(OWNED))
            device.journal.append((address, size, abs(size), 1 << 20, 0))
            moments.append(dict(live))
            kinds_then.append(set(known))
        name = f"{number}/forward"
        owned = {address: kind for address, (_, kind) in live.items()}
        books.close(name, lambda owned=owned: owned)
        sizes = [sum(size for size, _ in moment.values()) for moment in moments]
        peak = sizes.index(max(sizes))
        expected: dict[str, int] = {}
        for address, (size, kind) in moments[peak].items():
            is_same = all(m.get(address) is moments[peak][address] for m in moments[peak:])
            is_owned = address in kinds_then[peak] or is_same
            found = kind if is_owned else ACTIVATIONS
            expected[found] = expected.get(found, 0) + size
        at_peak = {kind: size for kind, size in books.phases[name].at_peak.items() if size}
        assert at_peak == expected


def test_what_is_gathered_and_let_go_inside_a_pass_has_its_kind() -> None:
    device = Device(random.Random(1))
    books = Books(device.take)

    def made(address: int, size: int) -> None:
        device.journal.append((address, size, abs(size), 10_000, 0))

    made(0, 100)
    with books.making(GATHERED):
        made(512, 2000)
    made(1024, 300)
    with books.making("gradients", [1024, 4096]):
        made(2048, 700)
    made(512, -2000)
    made(512, 50)  # the address of what was gathered
    books.close("forward", lambda: {0: "parameters", 512: "optimizer state"})
    assert books.phases["forward"].at_peak == {
        "parameters": 100, GATHERED: 2000, "gradients": 1000, "optimizer state": 0,
        ACTIVATIONS: 0, OTHER: 0,
    }  # fmt: skip
    made(4096, 10)
    books.close("backward", dict)
    assert books.phases["backward"].at_peak["optimizer state"] == 50


def test_what_a_module_has_gathered_for_the_moment_stays_gathered() -> None:
    device = Device(random.Random(1))
    books = Books(device.take)
    with books.making(GATHERED):
        device.journal.append((0, 512, 512, 10_000, 0))
    books.close("forward", lambda: {0: "parameters"})
    assert books.phases["forward"].at_peak[GATHERED] == 512


def test_what_a_load_brings_is_what_it_becomes() -> None:
    device = Device(random.Random(0))
    books = Books(device.take)
    sizes = {0: 512, 512: 1024, 2048: 2048, 4096: 512}
    device.journal = [(address, size, size, 4096, 0) for address, size in sizes.items()]
    device.journal.append((4096, -512, 512, 4096, 0))  # staged in the load, and let go
    books.close("load", dict)
    assert books.phases["load"].at_peak[OTHER] == 4096
    device.journal = [(8192, 512, 512, 8192, 0)]
    books.close("between phases", lambda: {0: "parameters", 512: "optimizer state"})
    found = books.phases["load"]
    assert found.peak_allocated == sum(found.at_peak.values()) == 4096
    assert found.at_peak["parameters"] == 512
    assert found.at_peak["optimizer state"] == 1024
    assert found.at_peak[OTHER] == 2048 + 512
    assert books.phases["between phases"].at_peak["optimizer state"] == 1024
    kinds = ("parameters", "optimizer state", OTHER)
    shown = [
        [point[0], *(point[1 + KINDS.index(kind)] for kind in kinds)]
        for point in with_owners(books.timeline, books.owned)
    ]
    assert shown == [
        [0, 512, 0, 0], [1, 512, 1024, 0], [2, 512, 1024, 2048], [3, 512, 1024, 2560],
        [4, 512, 1024, 2048], [5, 512, 1024, 2560],
    ]  # fmt: skip


def test_a_load_with_a_higher_peak_says_what_that_one_has() -> None:
    device = Device(random.Random(0))
    books = Books(device.take)
    for number, size in enumerate((512, 1024)):
        device.journal.append((4096 * number, size, size, 4096, 0))
        books.close("load", dict)
        device.journal.append((4096 * number + 2048, 512, 512, 8192, 0))
    books.close("forward", lambda: {0: "parameters", 4096: "optimizer state"})
    found = books.phases["load"].at_peak
    assert [found[name] for name in ("parameters", "optimizer state", OTHER)] == [512, 1024, 512]


def test_activations_of_one_network_outlive_the_step_of_the_other() -> None:
    journal = [struct.pack("5q", 512, 1024, 1024, 1024, 0)]  # the generator's
    books = Books(lambda: journal.pop() if journal else b"")
    kinds = []
    for name in ("forward", "optimizer step", "backward", "optimizer step", "evaluate"):
        books.close(name, dict, num_optimizers=2)
        at_peak = books.phases[name].at_peak
        kinds.append([kind for kind, num_bytes in at_peak.items() if num_bytes])
    assert kinds == [[ACTIVATIONS]] * 4 + [[OTHER]]


def test_steps_of_several_optimizers_one_after_another_are_one_visit() -> None:
    books = Books(bytes)
    for _ in range(2):
        for name in ("forward", "backward", "between phases", *("optimizer step",) * 3):
            books.close(name, dict)
        for _ in range(4):
            books.close("between phases", dict)
            books.close("optimizer step", dict)
    visits = {name: phase.visits for name, phase in books.phases.items()}
    assert visits == {"forward": 2, "backward": 2, "between phases": 2, "optimizer step": 2}
