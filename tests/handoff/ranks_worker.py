"""One rank of test_ranks.py: ranks that hand over together, each with a device of its own."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))
from worker_cases import Cases

from residency import HandOffError, hand_off, memory_state, sim

pair = Cases()
NUM_RANKS, FOLDER = int(sys.argv[2]), Path(sys.argv[4])
MIB = 1 << 20


def make_model() -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(*(nn.Linear(1792, 1792, bias=False) for _ in range(3))).to("sim")


def whole(model: nn.Module, before: list[torch.Tensor]) -> bool:
    now = list(model.parameters())
    return all(p.device.type == "sim" for p in now) and all(
        torch.equal(one.cpu(), other) for one, other in zip(now, before, strict=True)
    )


def wait_for(name: str) -> None:
    deadline = time.monotonic() + 60
    while not (FOLDER / name).exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def need_of_all() -> int:
    return memory_state().capacity - 2 * MIB


@pair
def all_have_their_bytes_before_one_enters() -> None:
    model = make_model()
    before = [p.detach().cpu().clone() for p in model.parameters()]
    with hand_off(need_of_all(), park=[model], group=dist.group.WORLD, timeout=60) as freed:
        assert freed.free >= need_of_all()
        assert freed.parked > 30 * MIB
    assert whole(model, before)


@pair
def a_group_that_has_no_backend_for_the_host_agrees_on_the_device() -> None:
    model = make_model()
    group = dist.new_group(backend="simccl")
    with hand_off(need_of_all(), park=[model], group=group, timeout=60) as freed:
        assert freed.free >= need_of_all()
    dist.destroy_process_group(group)


@pair
def what_the_groups_first_collective_takes_is_not_among_the_bytes_that_were_proven() -> None:
    model = make_model()
    communicator: list[torch.Tensor] = []
    real = dist.all_gather

    def all_gather(*args: Any, **options: Any) -> Any:
        if not communicator:
            communicator.append(torch.ones(16 * MIB, dtype=torch.uint8, device="sim"))
        return real(*args, **options)

    need = need_of_all() - 16 * MIB
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather", all_gather)
        with hand_off(need, park=[model], group=dist.group.WORLD, timeout=60):
            assert communicator
            assert memory_state().free >= need


@pair
def one_that_is_short_makes_all_raise_and_all_are_whole() -> None:
    model = make_model()
    before = [p.detach().cpu().clone() for p in model.parameters()]
    kept = torch.ones(64 * MIB, dtype=torch.uint8, device="sim") if dist.get_rank() == 1 else None
    with (
        pytest.raises(HandOffError) as caught,
        hand_off(need_of_all(), park=[model], group=dist.group.WORLD, timeout=60),
    ):
        pytest.fail("the body must not run")
    if kept is None:
        assert "rank 1 lacks" in str(caught.value)
    else:
        assert "too few" in str(caught.value)
    assert whole(model, before)


@pair
def one_whose_bytes_do_not_come_back_makes_all_raise_and_all_retry() -> None:
    model = make_model()
    before = [p.detach().cpu().clone() for p in model.parameters()]
    sizes = [need_of_all() - 2 * MIB] * (dist.get_rank() == 0)
    taken: list[torch.Tensor] = []
    with (
        pytest.raises(HandOffError) as caught,
        hand_off(need_of_all(), park=[model], group=dist.group.WORLD, timeout=1),
    ):
        taken.extend(torch.ones(size, dtype=torch.uint8, device="sim") for size in sizes)
    assert "are not free again" in str(caught.value) or "rank 0 lacks" in str(caught.value)
    taken.clear()
    caught.value.retry()
    assert whole(model, before)


@pair
def one_that_fails_for_another_reason_makes_all_raise() -> None:
    model = make_model()
    before = [p.detach().cpu().clone() for p in model.parameters()]
    peer = FOLDER / "nobody.sock" if dist.get_rank() == 1 else None
    with (
        pytest.raises(HandOffError, match=r"rank 1 failed|No process asked"),
        hand_off(
            need_of_all(),
            park=[model],
            group=dist.group.WORLD,
            timeout=60 if peer is None else 1,
            peer=peer,
        ),
    ):
        pytest.fail("the body must not run")
    assert whole(model, before)


@pair
def one_that_is_gone_is_told_with_the_reason() -> None:
    model = make_model()
    before = [p.detach().cpu().clone() for p in model.parameters()]
    group = dist.new_group(backend="gloo")
    dist.barrier(group)  # connects them
    if dist.get_rank() == 1:
        dist.destroy_process_group(group)
        del group
        gc.collect()
        (FOLDER / "gone").touch()
        return
    wait_for("gone")
    with (
        pytest.raises(HandOffError, match=r"^A rank of the group is gone: .*\w"),
        hand_off(need_of_all(), park=[model], group=group, timeout=60),
    ):
        pytest.fail("the body must not run")
    assert whole(model, before)


@pair
def one_that_does_not_come_is_noticed() -> None:
    """The last case: gloo closes its connections after a timeout."""
    model = make_model()
    before = [p.detach().cpu().clone() for p in model.parameters()]
    if dist.get_rank() == 1:
        wait_for("noticed")
        return
    with (
        pytest.raises(HandOffError, match=r"Not all ranks of the group came within 6 s"),
        hand_off(need_of_all(), park=[model], group=dist.group.WORLD, timeout=0.5),
    ):
        pytest.fail("the body must not run")
    assert whole(model, before)
    (FOLDER / "noticed").touch()
    with (
        pytest.raises(HandOffError, match=r"not in step\. Make a new group"),
        hand_off(need_of_all(), park=[model], group=dist.group.WORLD, timeout=30),
    ):
        pytest.fail("the body must not run")
    assert whole(model, before)


def main(own_rank: int) -> None:
    torch.set_num_threads(1)
    sim.enable("256MiB", schedule="late", check_races=True)
    store = dist.FileStore(str(FOLDER / "store"), NUM_RANKS)
    dist.init_process_group("cpu:gloo,sim:simccl", store=store, rank=own_rank, world_size=NUM_RANKS)
    pair.run(FOLDER / f"pair{own_rank}.json")
    # A thread of gloo's that still ends an abandoned collective needs the GIL, which the end of the
    # interpreter keeps while it waits for that thread (torch 2.13).
    world = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    gc.collect()
    assert world() is None, "the group is kept until the interpreter ends"


if __name__ == "__main__":
    main(int(sys.argv[1]))
