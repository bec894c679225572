"""Ranks that come to a place find each other, and one that waits in vain names who did not come."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from residency import _ranks

LONG, NONE = 60.0, 0.0


@pytest.fixture
def place(monkeypatch):
    """Comes to a place as a rank, in a thread of its own."""
    pytest.importorskip("torch.distributed.distributed_c10d")
    of_thread = threading.local()
    store = dist.HashStore()
    monkeypatch.setattr(_ranks, "rank_and_world_size", lambda: of_thread.place)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: store)

    def come(rank, world_size, seconds, name="restore"):
        of_thread.place = rank, world_size
        return _ranks.absent_ranks(name, seconds=seconds)

    return come


@pytest.mark.parametrize("seed", range(5))
def test_ranks_that_all_come_find_each_other_whoever_gave_up_before(place, seed):
    """Each rank comes alone some times first, and names those that have not come as often."""
    chance = random.Random(seed)
    world_size = chance.choice([2, 3, 5])
    with ThreadPoolExecutor(world_size) as threads:
        for _ in range(4):
            for _ in range(chance.randrange(4)):
                alone = chance.randrange(world_size)
                absent = place(alone, world_size, NONE)
                assert absent
                assert alone not in absent
            met = [threads.submit(place, rank, world_size, LONG) for rank in range(world_size)]
            assert [each.result() for each in met] == [[]] * world_size


def test_ranks_that_wait_hear_at_once_that_one_gave_up(place, monkeypatch):
    is_there = threading.Event()
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: is_there.set())
    monkeypatch.setattr(_ranks, "time", clock)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(place, 1, 3, LONG)
        assert is_there.wait(LONG)
        assert place(0, 3, NONE) == [2]
        assert waiting.result() == [2]


def test_ranks_at_different_places_do_not_meet(place):
    assert place(0, 2, NONE, "restore") == [1]
    assert place(1, 2, NONE, "make a Checkpointer") == [0]


def test_ranks_that_are_started_anew_meet_whoever_waited_in_the_life_before(place, monkeypatch):
    """torchrun ends all ranks when one dies, and its store stays (static rendezvous, 2.13)."""

    class Terminated(BaseException):
        """Ends a rank at its wait, with no word to the others, as SIGTERM does."""

    def end(seconds):
        raise Terminated

    with monkeypatch.context() as patch:
        patch.setattr(_ranks, "time", SimpleNamespace(monotonic=time.monotonic, sleep=end))
        with pytest.raises(Terminated):
            place(0, 2, LONG)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with ThreadPoolExecutor(2) as threads:
        assert place(1, 2, NONE) == [0]  # alone, it does not meet the dead one
        met = [threads.submit(place, rank, 2, LONG) for rank in range(2)]
        assert [each.result() for each in met] == [[], []]
