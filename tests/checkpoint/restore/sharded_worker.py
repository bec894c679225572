"""One rank of test_sharded.py: saves and restores sharded runs, on the same number of ranks and on
another. It shares the models and runs of the optimizers' worker, and its arguments.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "optim"))
sys.path.insert(0, str(Path(__file__).parents[2] / "sim"))

import maker
from distributed_worker import NUM_RANKS, Run, assert_same, layers, sharded, whole_vectors
from worker_cases import Cases

from residency import sim
from residency._checkpoint._restore._state import restore_state

PHASE, FOLDER = sys.argv[3], Path(sys.argv[4])
cases = {name: Cases() for name in ("one", "two", "back")}
one, two, back = cases.values()


def state_of(run: Run) -> dict[str, object]:
    return {"model": run.model, "optimizer": run.optimizer, "scheduler": run.scheduler}


def write(run: Run, name: str) -> None:
    part = maker.Part(state_of(run), rank=dist.get_rank())
    (FOLDER / f"{name}-{dist.get_rank()}.pickle").write_bytes(pickle.dumps(part))
    dist.barrier()


def read_into(run: Run, name: str) -> None:
    files = sorted(FOLDER.glob(f"{name}-*.pickle"))
    parts = [pickle.loads(file.read_bytes()) for file in files]
    saved = maker.write(FOLDER / f"{name}-for-{PHASE}-{dist.get_rank()}", *parts)
    place = {"rank": dist.get_rank(), "world_size": NUM_RANKS}
    restore_state(state_of(run), saved, staging="64KiB", rng=False, **place)


def wide():
    return sharded(make_layers=whole_vectors)


def scrambled(make_model, **settings):
    """A run of other values, which a restore must all replace."""
    run = Run(make_model, **settings)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(-3)
    return run


@one
@two
def a_run_restored_on_as_many_ranks_ends_at_the_bits_of_an_undisturbed_one() -> None:
    for offloads in ((False, False), (True, True), (False, True), (True, False)):
        undisturbed = Run(sharded, offload=False)
        undisturbed.train(range(5))
        run = Run(sharded, offload=offloads[0])
        run.train(range(3))
        name = f"same-{NUM_RANKS}-{offloads[0]}-{offloads[1]}"
        write(run, name)
        resumed = scrambled(sharded, offload=offloads[1])
        read_into(resumed, name)
        assert_same(resumed, run)
        resumed.train(range(3, 5))
        assert_same(resumed, undisturbed)


@one
@two
def runs_are_written_for_another_number_of_ranks() -> None:
    for offload in (False, True):
        run = Run(wide, offload=offload)
        run.feed(range(3))
        write(run, f"from-{NUM_RANKS}-{offload}")


def _restores_from(num_ranks: int) -> None:
    for saver in (False, True):
        for reader in (False, True):
            undisturbed = Run(wide, offload=False)
            undisturbed.feed(range(3))
            resumed = scrambled(wide, offload=reader)
            read_into(resumed, f"from-{num_ranks}-{saver}")
            assert_same(resumed, undisturbed)
            for run in (resumed, undisturbed):
                run.feed(range(3, 5))
            assert_same(resumed, undisturbed)


@two
def a_save_of_one_rank_is_restored_on_two() -> None:
    _restores_from(1)


@back
def a_save_of_two_ranks_is_restored_on_one() -> None:
    _restores_from(2)


@back
def a_sharded_save_fills_a_model_that_is_whole() -> None:
    whole = whole_vectors()
    parts = [pickle.loads(f.read_bytes()) for f in sorted(FOLDER.glob("from-2-False-*.pickle"))]
    saved = maker.write(FOLDER / "whole", *parts)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.zero_()
    restore_state({"model": whole}, saved, rng=False)
    expected = Run(wide, offload=False)
    expected.feed(range(3))
    pairs = zip(whole.parameters(), expected.model.parameters(), strict=True)
    for mine, sharded_one in pairs:
        assert torch.equal(mine.cpu(), sharded_one.full_tensor().cpu())


@two
def a_whole_save_fills_uneven_and_empty_shards() -> None:
    whole = layers()
    saved = maker.write(FOLDER / f"plain-{dist.get_rank()}", maker.Part({"model": whole}))
    model = scrambled(sharded, offload=False).model
    place = {"rank": dist.get_rank(), "world_size": NUM_RANKS}
    restore_state({"model": model}, saved, rng=False, **place)
    for mine, expected in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine.full_tensor().cpu(), expected.cpu())


def main(own_rank: int) -> None:
    torch.set_num_threads(1)
    sim.enable("1GiB", schedule="late", check_races=True)
    store = dist.FileStore(str(FOLDER / f"store-{PHASE}"), NUM_RANKS)
    dist.init_process_group("cpu:gloo,sim:simccl", store=store, rank=own_rank, world_size=NUM_RANKS)
    cases[PHASE].run(FOLDER / f"{PHASE}{own_rank}.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
