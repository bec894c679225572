"""The books of a dry run over random journals, beside a plain re-reading of the same."""

import random
import struct

import pytest

from residency._dryrun._books import ACTIVATIONS, KINDS, OTHER, Books

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
        owned = {a: chance.choice(KINDS[:3]) for a in device.live if chance.random() < 0.3}
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
        "parameters": 1000, "gradients": 1000, "optimizer state": 0, ACTIVATIONS: 2500, OTHER: 0
    }  # fmt: skip
    assert phases["optimizer step"].at_peak == {
        "parameters": 1000, "gradients": 1000, "optimizer state": 3000, ACTIVATIONS: 0, OTHER: 500
    }  # fmt: skip
