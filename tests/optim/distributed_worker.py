"""One rank of test_distributed.py: runs every case and writes what became of each.

A case ends at the bits of the plain optimizer on the same ranks, which runs beside it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "sim"))
from worker_cases import Cases, GatedWriter, allocated_peak, take_device

import residency
from residency.testing import tested_device_type

NUM_RANKS, PHASE = int(sys.argv[2]), sys.argv[3]
FOLDER = Path(sys.argv[4])
DEVICE = tested_device_type()
BACKEND = "nccl" if DEVICE == "cuda" else "simccl"
BUCKET = 2048  # (33, 40) is cut, on two ranks too
cases = {name: Cases() for name in ("first", "second", "last", "four")}
first, second, last, four = cases.values()
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "NAdam": (torch.optim.NAdam, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Muon": (torch.optim.Muon, {}),
}
ELEMENT_WISE = [name for name in OPTIMIZERS if name != "Muon"]


# ------------------------------------------------------------------------------- what cases share


def layers() -> nn.Sequential:
    """Weights of 40, 7 and 1 rows: on two ranks, even, uneven and empty shards."""
    torch.manual_seed(0)
    modules = (nn.Linear(33, 40), nn.Linear(40, 7), nn.Linear(7, 1, bias=False))
    return nn.Sequential(*modules).to(DEVICE)


def whole_vectors() -> nn.Sequential:
    """As above, but a rank's elements are multiples of 32: CPU kernels may round the elements that
    fill no vector otherwise than the rest, and those would be others on another number of ranks.
    """
    torch.manual_seed(0)
    modules = (nn.Linear(32, 64), nn.Linear(64, 3, bias=False), nn.Linear(32, 1, bias=False))
    return nn.Sequential(*modules).to(DEVICE)


def sharded(
    shape: tuple[int, ...] | None = None,
    make_layers: Callable[[], nn.Sequential] = layers,
    **settings: Any,
) -> nn.Sequential:
    model = make_layers()
    shape = shape or (NUM_RANKS,)
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("replica", "shard")[-len(shape) :])
    for module in (*model, model):
        fully_shard(module, mesh=mesh, **settings)
    return model


class Run:
    """Is a model with an optimizer, offloaded or not."""

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        name: str = "AdamW",
        *,
        offload: bool,
        chosen: Callable[[nn.Module], Iterable[Tensor]] = nn.Module.parameters,
        **settings: Any,
    ) -> None:
        self.model = make_model()
        kind, arguments = OPTIMIZERS[name]
        parameters = list(chosen(self.model))
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 3e-3}]
        self.optimizer = kind(groups, lr=1e-2, **arguments)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 0.9**n)
        if offload:
            residency.offload_optimizer(self.optimizer, **{"bucket": BUCKET, **settings})

    @property
    def parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def train(self, steps: Iterable[int], *, clip: bool = False, missing: bool = False) -> None:
        """Steps on another batch on each rank."""
        for step in steps:
            torch.manual_seed(100 * step + dist.get_rank())
            self.model(torch.randn(4, 33).to(DEVICE)).float().square().sum().backward()
            if clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for index, parameter in enumerate(self.parameters if missing else ()):
                if (step + index) % 3 == 0:
                    parameter.grad = None
            self._step()

    def feed(self, steps: Iterable[int]) -> None:
        """Steps on the same gradients however many ranks there are."""
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for parameter in self.parameters:
                whole = torch.randn(parameter.shape, generator=generator).to(DEVICE)
                mesh, placements = parameter.device_mesh, parameter.placements
                parameter.grad = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            self._step()

    def _step(self) -> None:
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        # Reuses whatever the step freed: a copy that still reads it would carry this value home.
        torch.full((50_000,), 7.0, device=DEVICE)


def assert_same_tensor(ours: Any, theirs: Any, what: str) -> None:
    assert type(ours) is type(theirs), (what, type(ours), type(theirs))
    assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    if isinstance(ours, DTensor):
        assert ours.device_mesh == theirs.device_mesh, what
        assert ours.placements == theirs.placements, (what, ours.placements, theirs.placements)
        ours, theirs = ours.to_local(), theirs.to_local()
    assert torch.equal(ours.detach().cpu(), theirs.detach().cpu()), f"{what} differs"


def assert_same(ours: Run, theirs: Run) -> None:
    """Compares parameters, states, groups and schedulers, bit for bit."""
    assert ours.parameters
    for index, (mine, other) in enumerate(zip(ours.parameters, theirs.parameters, strict=True)):
        assert_same_tensor(mine, other, f"parameter {index}")
        assert (mine in ours.optimizer.state) == (other in theirs.optimizer.state), index
        values = dict(ours.optimizer.state.get(mine, {}))
        others = dict(theirs.optimizer.state.get(other, {}))
        assert list(values) == list(others), (index, list(values), list(others))
        for key, value in values.items():
            if isinstance(value, Tensor):
                assert_same_tensor(value, others[key], f"{key} of parameter {index}")
            else:
                assert value == others[key], (index, key)
    groups, others = (
        [{k: v for k, v in g.items() if k != "params"} for g in run.optimizer.param_groups]
        for run in (ours, theirs)
    )
    assert repr(groups) == repr(others)
    assert repr(ours.scheduler.state_dict()) == repr(theirs.scheduler.state_dict())


def both_train_alike(
    make_model: Callable[[], nn.Module],
    name: str = "AdamW",
    *,
    chosen: Callable[[nn.Module], Iterable[Tensor]] = nn.Module.parameters,
    train: dict[str, Any] | None = None,
    **settings: Any,
) -> Run:
    """Trains offloaded and plain, takes the offload back, and trains on; returns the former."""
    plain = Run(make_model, name, offload=False, chosen=chosen)
    ours = Run(make_model, name, offload=True, chosen=chosen, **settings)
    for run in (ours, plain):
        run.train(range(4), **(train or {}))
    assert_same(ours, plain)
    residency.onload_optimizer(ours.optimizer)
    assert_same(ours, plain)
    for run in (ours, plain):
        run.train(range(4, 5), **(train or {}))
    assert_same(ours, plain)
    return ours


def matrices(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.dim() == 2 and p.shape[0] > 1]


# ------------------------------------------------------------------------------------------ FSDP2


@first
@second
def every_kind_of_optimizer_on_uneven_and_empty_shards() -> None:
    for name in ELEMENT_WISE:
        both_train_alike(sharded, name)


@second
def settings_of_the_offload() -> None:
    for settings in (
        {"slots": 1},
        {"slots": 3, "bucket": 1 << 20},
        {"resident": 4096},
        {"resident": "1MiB"},
        {"pin": False},
    ):
        both_train_alike(sharded, "AdamW", **settings)


@first
@second
def clipped_and_missing_gradients() -> None:
    both_train_alike(sharded, "AdamW", train={"clip": True})
    both_train_alike(sharded, "AdamW", train={"missing": True})
    both_train_alike(sharded, "SGD", train={"clip": True, "missing": True}, resident=2048)


@second
def computing_in_bfloat16() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def make_model() -> nn.Module:
        return sharded(mp_policy=policy)

    for name in ("AdamW", "fused"):
        both_train_alike(make_model, name, train={"clip": True})


@first
@second
def muon_steps_whole_shards() -> None:
    both_train_alike(sharded, "Muon", chosen=matrices)
    both_train_alike(sharded, "Muon", chosen=matrices, slots=1, bucket=1 << 20)


@second
def adafactor_is_refused_before_anything_moves() -> None:
    optimizer = torch.optim.Adafactor(sharded().parameters())
    with pytest.raises(residency.RefusedError, match="Adafactor has DTensor parameters"):
        residency.offload_optimizer(optimizer)
    assert type(optimizer) is torch.optim.Adafactor


@first
@second
def parameters_that_fsdp_keeps_on_the_host_stream_nothing() -> None:
    def make_model() -> nn.Module:
        return sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))

    plain, ours = (Run(make_model, offload=offload) for offload in (False, True))
    for run in (ours, plain):
        run.train(range(3), clip=True)
    assert_same(ours, plain)
    assert ours.optimizer.statistics().copied_to_device_bytes == 0


@second
def states_of_shards_leave_the_device() -> None:
    ours = Run(sharded, offload=True)
    ours.train(range(1))
    for parameter in ours.parameters:
        state = ours.optimizer.state[parameter]
        for key in ("exp_avg", "exp_avg_sq"):
            local = state[key].to_local()
            assert local.is_cpu
            assert local.is_pinned() or not local.numel()
            assert local.shape == parameter.to_local().shape


# ---------------------------------------------------------------------- HSDP and tensor parallelism


@second
def replicas_of_shards() -> None:
    for shape in ((2, 1), (1, 2)):
        both_train_alike(lambda shape=shape: sharded(shape), "AdamW", train={"clip": True})


def block() -> nn.Sequential:
    """Its norm sees a part of the sequence on each rank, so its gradients are partial sums."""
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(33), nn.Linear(33, 48), nn.ReLU(), nn.Linear(48, 7)).to(
        DEVICE
    )


def tensor_parallel(mesh: Any = None) -> nn.Sequential:
    return parallelize_module(
        block(),
        mesh or init_device_mesh(DEVICE, (NUM_RANKS,)),
        {
            "0": SequenceParallel(sequence_dim=0),
            "1": ColwiseParallel(input_layouts=Shard(0)),
            "3": RowwiseParallel(),
        },
    )


@second
def tensor_parallel_with_partial_gradients() -> None:
    model = tensor_parallel()
    model(torch.randn(4, 33).to(DEVICE)).sum().backward()
    kinds = {type(p) for q in model.parameters() for p in q.grad.placements}
    assert Partial in kinds, "no gradient is a partial sum; the case shows nothing"
    assert {q.placements for q in model.parameters()} >= {(Replicate(),), (Shard(0),), (Shard(1),)}
    for name in ELEMENT_WISE:
        both_train_alike(tensor_parallel, name)
    both_train_alike(tensor_parallel, "AdamW", resident=4096, slots=1)
    both_train_alike(tensor_parallel, "Muon", chosen=matrices)


def two_dimensional() -> nn.Sequential:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("data", "tensor"))
    model = tensor_parallel(mesh["tensor"])
    for module in (model[0], model[1], model[3], model):
        fully_shard(module, mesh=mesh["data"])
    return model


@four
def shards_of_tensor_parallel_shards() -> None:
    for name in ("AdamW", "fused", "SGD"):
        both_train_alike(two_dimensional, name)


@four
def four_shards_and_two_replicas_of_two() -> None:
    for shape in ((4,), (2, 2)):
        both_train_alike(lambda shape=shape: sharded(shape), "AdamW", train={"clip": True})


# ---------------------------------------------------------------------------------- state dicts


def through_state_dict(options: StateDictOptions, name: str, source: bool, target: bool) -> None:
    """Continues a run from what torch's state-dict functions return of it."""
    expected = Run(sharded, name, offload=False)
    expected.train(range(5))
    before, after = (Run(sharded, name, offload=offload) for offload in (source, target))
    before.train(range(3))
    values, states = get_state_dict(before.model, before.optimizer, options=options)
    is_root = dist.get_rank() == 0 or not options.broadcast_from_rank0
    values, states = (values, states) if is_root else ({}, {})
    set_model_state_dict(after.model, values, options=options)
    set_optimizer_state_dict(after.model, after.optimizer, states, options=options)
    after.scheduler.load_state_dict(before.scheduler.state_dict())
    if options.full_state_dict:  # torch, with any optimizer: what was a tuple comes back as a list
        for group, original in zip(
            *(r.optimizer.param_groups for r in (after, before)), strict=True
        ):
            assert group["betas"] == list(original["betas"])
            group["betas"] = original["betas"]
    assert_same(after, before)
    after.train(range(3, 5))
    assert_same(after, expected)


ENDS = [(True, True), (True, False), (False, True)]


@first
@second
def sharded_state_dicts() -> None:
    for name in ("AdamW", "fused", "SGD"):
        for ends in ENDS:
            through_state_dict(StateDictOptions(), name, *ends)


@second
def flat_state_dicts() -> None:
    for ends in ENDS:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        through_state_dict(options, "AdamW", *ends)


@second
def state_dicts_on_the_host() -> None:
    for ends in ENDS:
        through_state_dict(StateDictOptions(cpu_offload=True), "AdamW", *ends)


@second
def full_state_dicts() -> None:
    for ends in ENDS:
        through_state_dict(StateDictOptions(full_state_dict=True), "AdamW", *ends)


@second
def full_state_dicts_broadcast_from_one_rank() -> None:
    for cpu_offload in (False, True):
        for ends in ENDS:
            options = StateDictOptions(
                full_state_dict=True, broadcast_from_rank0=True, cpu_offload=cpu_offload
            )
            through_state_dict(options, "AdamW", *ends)


# ------------------------------------------------------------------------ distributed checkpoints


def app_state(run: Run) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(run.model),
        "optimizer": get_optimizer_state_dict(run.model, run.optimizer),
        "scheduler": run.scheduler.state_dict(),
    }


def restore(run: Run, folder: Path) -> None:
    state = app_state(run)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(run.model, state["model"])
    set_optimizer_state_dict(run.model, run.optimizer, optim_state_dict=state["optimizer"])
    run.scheduler.load_state_dict(state["scheduler"])


NAMES = {False: "plain", True: "offloaded"}


def folder_of(num_ranks: int, name: str, offload: bool) -> Path:
    return FOLDER / f"{num_ranks}-{name}-{NAMES[offload]}"


def vectors_sharded() -> nn.Sequential:
    return sharded(make_layers=whole_vectors)


def resumes(name: str, num_ranks_before: int) -> None:
    """Resumes what so many ranks saved after three steps, and compares after six."""
    expected = Run(vectors_sharded, name, offload=False)
    expected.feed(range(6))
    for source in NAMES:
        for target in NAMES:
            run = Run(vectors_sharded, name, offload=target)
            restore(run, folder_of(num_ranks_before, name, source))
            run.feed(range(3, 6))
            assert_same(run, expected)


def save(name: str) -> None:
    for offload in NAMES:
        run = Run(vectors_sharded, name, offload=offload)
        run.feed(range(3))
        dcp.save(app_state(run), checkpoint_id=folder_of(NUM_RANKS, name, offload))


@first
@second
def checkpoints_are_resumed_on_as_many_ranks() -> None:
    for name in ("AdamW", "fused", "SGD"):
        save(name)
        resumes(name, NUM_RANKS)


@second
def checkpoints_of_one_rank_are_resumed_on_two() -> None:
    for name in ("AdamW", "fused", "SGD"):
        resumes(name, 1)


@last
def checkpoints_of_two_ranks_are_resumed_on_one() -> None:
    for name in ("AdamW", "fused", "SGD"):
        resumes(name, 2)


@first
@second
def an_asynchronous_save_has_the_values_of_its_step() -> None:
    folder = FOLDER / f"{NUM_RANKS}-asynchronous"
    run = Run(sharded, offload=True)
    run.feed(range(3))
    writer = GatedWriter(folder)
    saving = dcp.async_save(app_state(run), storage_writer=writer)
    run.feed(range(3, 6))
    writer.may_write.set()
    saving.result()
    for target in NAMES:
        resumed = Run(sharded, offload=target)
        restore(resumed, folder)
        resumed.feed(range(3, 6))
        assert_same(resumed, run)


# ------------------------------------------------------------------------------ templates of loads


@first
@second
def the_template_that_torch_makes_takes_one_bucket() -> None:
    for slots in (1, 2, 3):
        run = Run(sharded, "fused", offload=True, slots=slots)
        locals_ = [p.to_local() for p in run.parameters]
        gradients = sum(-(-t.numel() * t.element_size() // 512) * 512 for t in locals_)
        peak = allocated_peak(lambda run=run: get_optimizer_state_dict(run.model, run.optimizer))
        assert gradients < peak <= gradients + BUCKET, (gradients, peak)


@first
@second
def a_primed_template_takes_no_device_memory_and_is_filled_by_a_load() -> None:
    for name in ("AdamW", "fused", "SGD"):
        folder = FOLDER / f"{NUM_RANKS}-primed-{name}"
        expected = Run(sharded, name, offload=True)
        expected.feed(range(3))
        dcp.save(app_state(expected), checkpoint_id=folder)
        expected.feed(range(3, 6))
        run = Run(sharded, name, offload=True)
        before = [p.full_tensor().clone() for p in run.parameters]
        counters = copy.deepcopy(run.scheduler.state_dict())

        def template(run: Run = run) -> None:
            run.optimizer.prime()
            get_optimizer_state_dict(run.model, run.optimizer)

        assert allocated_peak(template) == 0
        assert all(p.grad is None for p in run.parameters)
        assert all(map(torch.equal, before, [p.full_tensor() for p in run.parameters]))
        for parameter in run.parameters:
            for value in run.optimizer.state[parameter].values():
                local = value.to_local() if isinstance(value, DTensor) else value
                assert local.is_cpu
                assert not local.count_nonzero()
        assert run.scheduler.state_dict() == counters
        restore(run, folder)
        run.feed(range(3, 6))
        assert_same(run, expected)


@second
def a_primed_optimizer_that_loads_nothing_steps_as_a_fresh_one() -> None:
    for name in ("AdamW", "SGD"):
        plain, ours = (Run(sharded, name, offload=offload) for offload in (False, True))
        ours.optimizer.prime()
        for run in (ours, plain):
            run.train(range(3))
        assert_same(ours, plain)


@first
@second
def masters_of_shards_equal_masters_on_the_device_and_go_through_dcp() -> None:
    def low() -> nn.Sequential:
        return sharded(make_layers=lambda: layers().to(torch.bfloat16))

    def backward(model: nn.Module, step: int) -> None:
        torch.manual_seed(10 * step + dist.get_rank())
        batch = torch.randn(4, 33).to(DEVICE, torch.bfloat16)
        model(batch).square().sum().backward()

    ours = Run(low, offload=True, master_weights=True)
    plain = low()
    masters = [nn.Parameter(p.detach().float()) for p in plain.parameters()]
    groups = [{"params": masters[:2]}, {"params": masters[2:], "lr": 3e-3}]
    reference = torch.optim.AdamW(groups, lr=1e-2)
    for step in range(3):
        backward(ours.model, step)
        ours.optimizer.step()
        ours.optimizer.zero_grad()
        backward(plain, step)
        for parameter, master in zip(plain.parameters(), masters, strict=True):
            master.grad = parameter.grad.float()
        reference.step()
        plain.zero_grad()
        with torch.no_grad():
            for parameter, master in zip(plain.parameters(), masters, strict=True):
                parameter.copy_(master)
    resumed = Run(low, offload=True, master_weights=True)
    resumed.model.load_state_dict(ours.model.state_dict())
    saved = get_optimizer_state_dict(ours.model, ours.optimizer)
    set_optimizer_state_dict(resumed.model, resumed.optimizer, optim_state_dict=saved)
    for run in (ours, resumed):
        for parameter, other, master in zip(
            run.parameters, plain.parameters(), masters, strict=True
        ):
            assert torch.equal(parameter.to_local().cpu(), other.to_local().cpu())
            state = run.optimizer.state[parameter]
            assert state["master_weight"].placements == parameter.placements
            assert torch.equal(state["master_weight"].to_local(), master.detach().to_local().cpu())
            moments = reference.state[master]["exp_avg"].to_local().cpu()
            assert torch.equal(state["exp_avg"].to_local(), moments)


def main(own_rank: int) -> None:
    torch.set_num_threads(1)
    take_device("1GiB", schedule="late", check_races=True)
    store = dist.FileStore(str(FOLDER / f"store-{PHASE}"), NUM_RANKS)
    dist.init_process_group(
        f"cpu:gloo,{DEVICE}:{BACKEND}", store=store, rank=own_rank, world_size=NUM_RANKS
    )
    cases[PHASE].run(FOLDER / f"{PHASE}{own_rank}.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
