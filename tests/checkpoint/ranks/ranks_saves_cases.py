"""Saves of sharded and replicated runs, restored on as many ranks and on others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_lab import (
    DEVICE,
    NUM_RANKS,
    Run,
    assert_same,
    layers,
    sharded,
    tensor_parallel,
    two_dimensional,
    whole_vectors,
)
from ranks_lab import (
    ACROSS,
    BOTH_WAYS,
    FOLDER,
    PHASE,
    after,
    assert_equal,
    four,
    local,
    one,
    picture,
    published_files,
    saved_while_training,
    scrambled,
    state_of,
    two,
    wide,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel

import residency

# ------------------------------------------------------------------------------------------ FSDP2


@two
def every_save_of_shards_is_its_moment_and_resumes_at_the_same_bits() -> None:
    saved_while_training(sharded, "fsdp")


@four
def replicas_of_shards_come_back_on_all_of_them() -> None:
    saved_while_training(lambda: sharded((2, 2)), "hsdp", ACROSS[:1])
    found = published_files(FOLDER / "hsdp-4-True-False", 3)
    written = {name for name in found if name.startswith("model-")}
    assert written == {f"model-rank-0000{rank}-of-00004.safetensors" for rank in (0, 1)}


@two
def stages_of_a_pipeline_have_their_own_shards_of_one_name() -> None:
    rank = dist.get_rank()
    mine = [DeviceMesh("cpu", [each]) for each in (0, 1)][rank]

    def stage(value: float, size: int) -> nn.Module:
        linear = nn.Linear(size, 1, bias=False)
        nn.init.constant_(linear.weight, value)
        return fully_shard(nn.Sequential(linear), mesh=mine)  # type: ignore[return-value]

    for name, sizes in (("alike", (2, 2)), ("other-shapes", (2, 3))):
        with residency.Checkpointer(FOLDER / f"stages-{name}") as checkpointer:
            checkpointer.save(1, {"model": stage(10.0 + rank, sizes[rank])}).wait()
            fresh = stage(0.0, sizes[rank])
            checkpointer.restore({"model": fresh})
        found = fresh[0].weight.full_tensor()  # type: ignore[index]
        assert found.eq(10.0 + rank).all(), found


@two
def tensor_parallel_parameters_come_back() -> None:
    saved_while_training(tensor_parallel, "tp", ACROSS)


@four
def shards_in_two_dimensions_come_back() -> None:
    saved_while_training(two_dimensional, "two-dimensional", ACROSS[1:])


@two
def ranks_save_what_each_has_under_names_of_its_own() -> None:
    rank = dist.get_rank()
    linear = nn.Linear(2, 3 + rank)
    nn.init.constant_(linear.weight, 7.0 + rank)
    with residency.Checkpointer(FOLDER / "own-names") as checkpointer:
        state = {f"stage{rank}": linear, f"view{rank}": [linear.weight.detach()[1:]], "both": rank}
        checkpointer.save(1, state).wait()


@after
def one_rank_finds_what_each_had() -> None:
    folder = FOLDER / "own-names"
    for rank in (0, 1):
        fresh, other = nn.Linear(2, 3 + rank), nn.Linear(2, 3 + rank)
        residency.load_into(fresh, folder, name=f"stage{rank}")
        state = {f"stage{rank}": other, f"view{rank}": [torch.zeros(2 + rank, 2)], "both": None}
        residency.Checkpointer(folder).restore(state, rng=False)
        for found in (fresh.weight, other.weight, state[f"view{rank}"][0]):  # type: ignore[index]
            assert found.eq(7.0 + rank).all()
        assert state["both"] == 0


@one
@two
def runs_are_saved_for_another_number_of_ranks() -> None:
    for offload in (False, True):
        run = Run(wide, offload=offload)
        run.feed(range(3))
        with residency.Checkpointer(FOLDER / f"wide-{NUM_RANKS}-{offload}") as checkpointer:
            checkpointer.save(3, state_of(run))
            run.feed(range(3, 5))


def _restores_from(num_ranks: int, ways: tuple[tuple[bool, bool], ...] = BOTH_WAYS) -> None:
    for saver, reader in ways:
        undisturbed = Run(wide, offload=False)
        undisturbed.feed(range(3))
        resumed = scrambled(wide, offload=reader)
        with (
            residency.Checkpointer(FOLDER / f"wide-{num_ranks}-{saver}") as checkpointer,
            pytest.warns(UserWarning, match="another number of ranks"),
        ):
            checkpointer.restore(state_of(resumed))
        assert_same(resumed, undisturbed)
        for run in (resumed, undisturbed):
            run.feed(range(3, 5))
        assert_same(resumed, undisturbed)


@two
def a_save_of_one_rank_is_restored_on_two() -> None:
    _restores_from(1)


@after
def a_save_of_two_ranks_is_restored_on_one() -> None:
    _restores_from(2)


@four
def a_save_of_two_ranks_is_restored_on_four() -> None:
    _restores_from(2, ACROSS[:1])


@after
def a_save_of_shards_fills_a_model_that_is_whole() -> None:
    whole, expected = whole_vectors(), Run(wide, offload=False)
    expected.feed(range(3))
    with residency.Checkpointer(FOLDER / "wide-2-True") as checkpointer:
        checkpointer.restore({"model": whole}, rng=False)
    for mine, other in zip(whole.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(mine.cpu(), other.full_tensor().cpu())


@one
@two
def a_whole_save_fills_uneven_and_empty_shards() -> None:
    whole, folder = layers(), FOLDER / "whole"
    if PHASE == "one":
        with residency.Checkpointer(folder) as checkpointer:
            checkpointer.save(0, {"model": whole})
        return
    model = scrambled(sharded, offload=False).model
    with residency.Checkpointer(folder) as checkpointer:
        checkpointer.restore({"model": model}, rng=False)
    for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine.full_tensor().cpu(), other.cpu())


# -------------------------------------------------------------------------------------------- DDP


def replicated(broadcast_buffers: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(33, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    return DistributedDataParallel(
        nn.Sequential(*layers).to(DEVICE), broadcast_buffers=broadcast_buffers
    )


@two
def what_all_ranks_have_is_written_once() -> None:
    for offload in (False, True):
        folder = FOLDER / f"ddp-{offload}"
        undisturbed, run = (Run(replicated, offload=each) for each in (False, offload))
        undisturbed.train(range(4))
        run.train(range(2))
        with residency.Checkpointer(folder) as checkpointer:
            state = {**state_of(run), "own": torch.tensor([dist.get_rank()])}
            checkpointer.save(2, state)
        owned = {"own-rank-00001-of-00002.safetensors", "rng-rank-00001-of-00002.safetensors"}
        assert {name for name in published_files(folder, 2) if "-rank-00001" in name} == owned
        resumed = scrambled(replicated, offload=not offload)
        state = {**state_of(resumed), "own": torch.tensor([-1])}
        with residency.Checkpointer(folder) as checkpointer:
            checkpointer.restore(state)
        assert state["own"].item() == dist.get_rank()
        resumed.train(range(2, 4))
        assert_same(resumed, undisturbed)
        for mine, other in zip(resumed.model.buffers(), undisturbed.model.buffers(), strict=True):
            assert torch.equal(mine.cpu(), other.cpu())


@two
def states_of_a_part_of_the_parameters_are_each_ranks_own() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"m": model, "o": optimizer.optim}
    before = {p: value["exp_avg"].clone() for p, value in optimizer.optim.state.items()}
    with residency.Checkpointer(FOLDER / "zero") as checkpointer:
        checkpointer.save(1, state).wait()
        for value in optimizer.optim.state.values():
            value["exp_avg"].zero_()
        checkpointer.restore(state)
    assert before
    for parameter, expected in before.items():
        assert torch.equal(optimizer.optim.state[parameter]["exp_avg"], expected)


@two
def replicas_of_a_part_of_the_ranks_are_each_parts_own() -> None:
    rank = dist.get_rank()
    groups = [dist.new_group([each]) for each in (0, 1)]

    def stage(value: float) -> nn.Module:
        linear = nn.Linear(2 + rank, 1, bias=False)
        nn.init.constant_(linear.weight, value)
        return DistributedDataParallel(linear, process_group=groups[rank])

    with residency.Checkpointer(FOLDER / "parts") as checkpointer:
        checkpointer.save(1, {"m": stage(10.0 + rank)}).wait()
        fresh = stage(0.0)
        checkpointer.restore({"m": fresh})
    assert fresh.module.weight.eq(10.0 + rank).all()  # type: ignore[union-attr,operator]


@two
def a_replica_that_rank_0_does_not_have_is_refused_and_the_next_save_works() -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    whole = {"m": model, "o": optimizer}
    with residency.Checkpointer(FOLDER / "lacking") as checkpointer:
        save = checkpointer.save(1, {"m": model} if dist.get_rank() == 0 else whole)
        with pytest.raises(residency.ResidencyError, match="alike on all ranks"):
            save.wait()
        assert checkpointer.steps() == []
        checkpointer.save(2, whole).wait()
        assert checkpointer.restore(whole) == 2


@two
def shards_in_the_state_of_one_rank_alone_are_refused_and_the_next_save_works() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(4, 4)))
    with residency.Checkpointer(FOLDER / "shards-of-one") as checkpointer:
        state = {"m": model} if dist.get_rank() == 0 else {"n": 1}
        with pytest.raises(residency.ResidencyError, match="each rank that has a part of it"):
            checkpointer.save(1, state).wait()
        assert checkpointer.steps() == []
        checkpointer.save(2, {"m": model}).wait()
        assert checkpointer.restore({"m": model}) == 2


@two
def buffers_that_ranks_do_not_share_are_written_by_each() -> None:
    run = Run(lambda: replicated(False), offload=False)
    run.train(range(2))
    expected = picture(run)
    means: list[Any] = [None, None]
    dist.all_gather_object(means, expected["module.1.running_mean"].tolist())
    assert means[0] != means[1], "the ranks have the same buffers; the case shows nothing"
    with residency.Checkpointer(FOLDER / "ddp-apart") as checkpointer:
        checkpointer.save(2, state_of(run))
        resumed = scrambled(lambda: replicated(False), offload=False)
        checkpointer.restore(state_of(resumed))
    assert_equal(picture(resumed), expected)


@after
def a_save_of_replicas_fills_a_model_that_is_not_wrapped() -> None:
    def plain() -> nn.Module:
        return replicated().module

    resumed = scrambled(plain, offload=False)
    state = {**state_of(resumed), "own": torch.tensor([-1])}
    with (
        residency.Checkpointer(FOLDER / "ddp-True") as checkpointer,
        pytest.warns(UserWarning, match="another number of ranks"),
    ):
        checkpointer.restore(state)
    assert state["own"].item() == 0
    assert resumed.scheduler.last_epoch == 2


# ----------------------------------------------------------------------------- each rank's own part


@two
def every_rank_has_its_own_random_numbers_back() -> None:
    torch.manual_seed(7 + dist.get_rank())
    torch.rand(3)
    with residency.Checkpointer(FOLDER / "rng") as checkpointer:
        checkpointer.save(0, {"step": 0})
        expected = torch.rand(5), torch.rand(5, device=DEVICE).cpu()
        checkpointer.restore({"step": 0})
        found = torch.rand(5), torch.rand(5, device=DEVICE).cpu()
    assert all(map(torch.equal, found, expected))
    drawn: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(drawn, expected[0].tolist())
    assert drawn[0] != drawn[1]


@two
def a_partial_sum_is_refused_on_every_rank_and_the_next_save_works() -> None:
    mesh = dist.device_mesh.init_device_mesh(DEVICE, (NUM_RANKS,))
    value = DTensor.from_local(torch.ones(3, device=DEVICE), mesh, [Partial()])
    with residency.Checkpointer(FOLDER / "partial") as checkpointer:
        with pytest.raises(residency.RefusedError, match="x is a DTensor with partial sums"):
            checkpointer.save(0, {"x": value})
        checkpointer.save(1, {"x": value.redistribute(placements=[dist.tensor.Replicate()])})
    assert checkpointer.steps() == [1]


# --------------------------------------------------------------------------------- read by others


@two
def stock_and_own_readers_of_dcp_read_every_tensor() -> None:
    from residency.integrations.dcp import ResidencyStorageReader

    for make_model, name in ((sharded, "fsdp"), (tensor_parallel, "tp")):
        run = Run(make_model, offload=False)
        run.train(range(3))
        folder = FOLDER / f"{name}-2-True-False" / "step-00000003"
        expected = tensors_of(run)
        for reader in (dcp.HuggingFaceStorageReader(str(folder)), ResidencyStorageReader(folder)):
            found = tensors_of(run)
            for tensor in flat(found):
                tensor.detach().zero_()
            dcp.load(found, storage_reader=reader)
            for mine, other in zip(flat(found), flat(expected), strict=True):
                assert torch.equal(local(mine), local(other))


def tensors_of(run: Run) -> dict[str, Any]:
    """Returns copies of what the state dicts of torch's own functions hold, as DCP names it."""
    states = get_optimizer_state_dict(run.model, run.optimizer)["state"]
    return {
        "model": {n: v.clone() for n, v in get_model_state_dict(run.model).items()},
        "optimizer": {
            "state": {n: {k: v.clone() for k, v in s.items()} for n, s in states.items()}
        },
    }


def flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [t for v in value.values() for t in flat(v)]
