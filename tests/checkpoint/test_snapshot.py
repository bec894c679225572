"""A snapshot holds the bytes of the moment of its call, whatever training does afterwards."""

from __future__ import annotations

import copy
import gc
from collections import OrderedDict, deque

import pytest
import torch
from torch import Tensor, nn

import residency
from residency import CheckpointError, InvalidArgumentError, RefusedError, _pinned, sim
from residency._transfer import _slab

BOTH = pytest.mark.parametrize("offload", [False, True], ids=["plain", "offloaded"])
DTYPES = [
    getattr(torch, name)
    for name in [
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex32",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ]
    if hasattr(torch, name)
]


@BOTH
@pytest.mark.parametrize("num_before", [0, 1, 3])
def test_a_snapshot_equals_the_moment_of_its_call(lab, offload, num_before):
    run = lab.run(offload=offload)
    for _ in range(num_before):
        run.step()
    expected = run.copy()
    snapshot = residency.snapshot(run.state)
    for _ in range(3):
        run.step()
    lab.same(snapshot.tree, expected)


@BOTH
def test_a_run_that_is_snapshotted_ends_at_the_bits_of_one_that_is_not(lab, offload):
    disturbed, alone = lab.run(offload=offload), lab.run(offload=False)
    snapshots, expected = [], []
    for _ in range(4):
        disturbed.step()
        snapshots.append(residency.snapshot(disturbed.state))  # the step has not run yet
        alone.step()
        expected.append(alone.copy())
    lab.same(disturbed.copy(), alone.copy())
    for snapshot, each in zip(snapshots, expected, strict=True):
        lab.same(snapshot.tree, each)


@BOTH
def test_a_snapshot_under_a_closure_is_that_of_before_its_step(lab, offload):
    run = lab.run(offload=offload)
    run.step(closure=True)
    expected = run.copy()
    snapshot = residency.snapshot(run.state)
    run.step(closure=True)
    run.step()
    lab.same(snapshot.tree, expected)


def test_a_closure_and_what_stands_behind_it_reach_the_step_of_a_class_that_takes_more(device):
    class Scaled(torch.optim.SGD):
        def step(self, closure=None, scale=1.0, *, bias=0.0):
            loss = closure()
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.sub_(parameter.grad * scale + bias)
                    self.state[parameter]["scale"] = scale  # a state that is no tensor
            return loss

    weight = torch.nn.Parameter(torch.ones(1 << 16, device=device))
    optimizer = Scaled([weight])

    def closure():
        weight.grad = torch.ones_like(weight)
        return 5

    snapshot = residency.snapshot({"weight": weight})  # under way, so that the step must wait
    assert optimizer.step(closure, 2.0, bias=1.0) == 5
    later = residency.snapshot({"weight": weight})
    assert optimizer.step(closure=closure, scale=3.0) == 5
    assert torch.equal(later.tree["weight"], torch.full((1 << 16,), -2.0))
    assert torch.equal(weight.detach().cpu(), torch.full((1 << 16,), -5.0))
    assert torch.equal(snapshot.tree["weight"], torch.ones(1 << 16))


@BOTH
def test_buffers_that_the_next_forward_changes_are_those_of_the_call(lab, offload):
    run = lab.run(offload=offload)
    run.step()
    expected = lab.copied(run.model.state_dict())
    snapshot = residency.snapshot({"model": run.model})
    for _ in range(3):
        run.forward()
    lab.same(snapshot.tree["model"], expected)


@BOTH
def test_a_snapshot_takes_no_device_memory(lab, offload):
    run = lab.run(offload=offload)
    run.step()
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    snapshot = residency.snapshot(run.state)
    snapshot.wait()
    assert torch.accelerator.max_memory_allocated() == before
    assert snapshot.is_done()


def test_the_state_of_an_offloaded_optimizer_is_handed_over_not_copied(lab, no_loans):
    def addresses(states):
        found = [v for state in states.values() for v in state.values() if v.dim()]
        return {value.data_ptr() for value in found}

    run = lab.run(offload=True)
    run.step()
    homes = addresses(run.optimizer.state)
    snapshot = residency.snapshot(run.state)
    run.step()
    tree = snapshot.tree
    assert addresses(tree["optimizer"]["state"]) == homes
    assert not addresses(run.optimizer.state) & homes
    del snapshot, tree
    gc.collect()
    assert no_loans()


def test_a_snapshot_takes_the_memory_of_the_next_step_and_the_next_snapshot_takes_none(
    lab, pinned_bytes
):
    run = lab.run(offload=True)
    run.step()
    snapshot = residency.snapshot({"optimizer": run.optimizer})
    before = pinned_bytes()
    expected = run.copy()["optimizer"]
    run.step()
    run.step()
    assert pinned_bytes() == before
    lab.same(snapshot.tree["optimizer"], expected)
    del snapshot
    gc.collect()
    again = residency.snapshot({"optimizer": run.optimizer})
    run.step()
    again.wait()
    assert pinned_bytes() == before


def test_a_dropped_snapshot_leaves_nothing_pinned_and_nothing_lent(lab, pinned_bytes, no_loans):
    run = lab.run(offload=True)
    run.step()
    torch.accelerator.synchronize()
    before = pinned_bytes()
    for is_waited_for in (False, True):
        snapshot = residency.snapshot({"model": run.model})
        if is_waited_for:
            snapshot.wait()
        del snapshot
        gc.collect()
        assert pinned_bytes() == before
    assert no_loans()


def test_ties_and_views_come_back_shared_and_are_copied_once(lab):
    base = torch.arange(64.0, device=lab.device)
    tree = {
        "whole": base,
        "again": base,
        "middle": base[16:32],
        "matrix": base.view(8, 8).t(),
        "apart": torch.ones(4, device=lab.device),
    }
    found = residency.snapshot(tree).tree
    lab.same(found, lab.copied(tree))
    start = found["whole"].data_ptr()
    assert [found[name].data_ptr() - start for name in ("again", "middle", "matrix")] == [0, 64, 0]
    found["middle"].fill_(-1)
    assert found["whole"][16:32].eq(-1).all()
    assert found["apart"].eq(1).all()


def test_a_snapshot_that_is_not_to_pin_takes_no_page_locked_memory(lab, pinned_bytes):
    tree = {"x": torch.arange(1000.0, device=lab.device)}
    before = pinned_bytes()
    snapshot = residency.snapshot(tree, pin=False).wait()
    assert pinned_bytes() == before
    assert not snapshot.tree["x"].is_pinned()
    lab.same(snapshot.tree, lab.copied(tree))


def test_only_the_span_of_a_small_view_is_copied(lab, pinned_bytes):
    large = torch.zeros(1 << 20, device=lab.device)
    before = pinned_bytes()
    snapshot = residency.snapshot({"small": large[1000:1010]})
    snapshot.wait()
    assert pinned_bytes() - before <= 512
    lab.same(snapshot.tree["small"], torch.zeros(10))


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.arange(12.0, device=d).view(3, 4).t(),
        lambda d: torch.arange(12.0, device=d).view(3, 4)[:, :2],
        lambda d: torch.arange(3.0, device=d).expand(5, 3),
        lambda d: torch.arange(3.0, device=d).view(3, 1).expand(3, 5),
        lambda d: torch.randn(2, 3, 4, 5).to(d).to(memory_format=torch.channels_last),
        lambda d: torch.tensor(2.5, device=d),
        lambda d: torch.empty(0, 3, device=d),
        lambda d: torch.empty(3, 0, 2, device=d),
        lambda d: torch.arange(40.0, device=d)[1::3],
    ],
    ids=[
        "transposed",
        "columns",
        "rows-expanded",
        "columns-expanded",
        "channels-last",
        "scalar",
        "empty",
        "hollow",
        "strided",
    ],
)
def test_every_layout_comes_back_equal(lab, make):
    value = make(lab.device)
    lab.same(residency.snapshot({"value": value}).tree["value"], value)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_with_its_bits(lab, dtype):
    data = torch.arange(192, dtype=torch.uint8)
    data = data % 2 if dtype is torch.bool else data
    value = data.view(dtype).to(lab.device)
    found = residency.snapshot({"value": value, "tail": value[3:7]}).tree
    lab.same(found["value"], value.cpu())
    lab.same(found["tail"], value.cpu()[3:7])


def test_views_of_other_dtypes_share_one_span(lab):
    base = torch.arange(8, dtype=torch.int32, device=lab.device)
    tree = {
        "halves": base[1:].view(torch.int16),
        "whole": base[2:],
        "bytes": base.view(torch.uint8),
    }
    expected = lab.copied(tree)
    found = residency.snapshot(tree).tree
    lab.same(found, expected)
    found["bytes"].zero_()
    assert not found["whole"].any()
    assert not found["halves"].any()


def test_plain_values_come_back_as_they_are_and_of_their_types(lab):
    numpy = pytest.importorskip("numpy")
    tree = {
        "none": None,
        "flags": [True, False],
        "numbers": (1, 2.5, float("inf"), 1 << 80, complex(1, -2)),
        "text": "é",
        "raw": (b"\x00\xff", bytearray(b"x"), bytes(range(256)) * 40),
        "sets": [{1, 2}, frozenset({3})],
        "queue": deque([1, 2]),
        "ordered": OrderedDict([("b", 1), ("a", 2)]),
        "keys": {1: "one", (2, 3): "pair", "$": 4},
        "kinds": [torch.float16, torch.device("cpu"), torch.Size([2, 3])],
        "scalar": numpy.float64(1.25),
    }
    found = residency.snapshot(tree).tree
    lab.same(found, tree)
    array = numpy.arange(6, dtype=">i2").reshape(2, 3)
    back = residency.snapshot({"array": array}).tree["array"]
    assert back.dtype == array.dtype
    assert (back == array).all()
    nan = residency.snapshot({"nan": float("nan")}).tree["nan"]
    assert nan != nan


def test_what_the_host_holds_is_copied_at_the_call(lab):
    tree = {"host": torch.ones(100), "list": [1], "dict": {"a": 1}}
    snapshot = residency.snapshot(tree)
    tree["host"].zero_()
    tree["list"].append(2)
    tree["dict"]["a"] = 2
    lab.same(snapshot.tree, {"host": torch.ones(100), "list": [1], "dict": {"a": 1}})


def test_a_scaler_and_whatever_has_a_state_dict_are_saved_without_a_wait(lab):
    class Loader:
        def __init__(self):
            self.position = 3

        def state_dict(self):
            return {"position": self.position, "epoch": 1}

        def load_state_dict(self, state):
            self.position = state["position"]

    scaler = torch.amp.GradScaler(lab.device.type, init_scale=8.0)
    fresh = residency.snapshot({"scaler": scaler}).tree["scaler"]
    scaler.scale(torch.ones(1, device=lab.device))
    tree = residency.snapshot({"scaler": scaler, "loader": Loader()}).tree
    assert tree == {"scaler": scaler.state_dict(), "loader": {"position": 3, "epoch": 1}}
    assert fresh == {**scaler.state_dict(), "scale": 8.0}


class Strange(Tensor):
    """Has no storage of its own."""

    @staticmethod
    def __new__(cls, inner):
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.eye(3).to_sparse(), r"extra\.bad is a torch\.sparse_coo"),
        (lambda: torch.empty(2, device="meta"), r"extra\.bad is .*meta"),
        (lambda: Strange(torch.ones(2)), r"extra\.bad is a Strange"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), r"extra\.bad is a lazy conjugate"),
        (object, r"extra\.bad is a builtins\.object"),
        (lambda: (x for x in ()), r"extra\.bad is a builtins\.generator"),
    ],
    ids=["sparse", "meta", "wrapper", "conjugate", "object", "generator"],
)
def test_what_has_no_place_in_a_snapshot_is_refused_by_name(lab, make, words, no_loans):
    run = lab.run(offload=True)
    run.step()
    expected = run.copy()
    with pytest.raises(RefusedError, match=words):
        residency.snapshot({**run.state, "extra": {"good": 1, "bad": make()}})
    assert no_loans()
    lab.same(run.copy(), expected)


def test_two_tensors_with_one_name_are_refused(lab):
    one = torch.ones(1)
    with pytest.raises(RefusedError, match=r"the name 'a\.b'"):
        residency.snapshot({"a": {"b": one}, "a.b": one.clone()})


def test_a_word_that_verify_does_not_know_is_refused(lab):
    with pytest.raises(InvalidArgumentError, match="expected 'gate' or 'full'"):
        residency.snapshot({}, verify="some")


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, on the import
def test_names_of_wrappers_are_not_part_of_names(lab):
    model = nn.Linear(2, 2).to(lab.device)
    compiled = torch.compile(copy.deepcopy(model))
    tree = residency.snapshot({"model": nn.DataParallel(model), "compiled": compiled}).tree
    assert list(tree["model"]) == list(tree["compiled"]) == ["weight", "bias"]


def test_optimizers_over_several_modules_keep_their_states_apart(lab):
    first, second = nn.Linear(2, 2).to(lab.device), nn.Linear(2, 2).to(lab.device)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1.0, momentum=0.5)
    for parameter in (*first.parameters(), *second.parameters()):
        parameter.grad = torch.randn(parameter.shape).to(lab.device)
    optimizer.step()
    tree = residency.snapshot({"both": [first, second], "optimizer": optimizer}).tree
    lab.same(tree["optimizer"], lab.copied(optimizer.state_dict()))


@pytest.mark.sim
@pytest.mark.sim_device(schedule="late", check_races=False)  # the checker would find it first
@pytest.mark.parametrize("write", ["row", "data", "storage"])
def test_full_verification_finds_a_writer_that_passes_no_gate(lab, write):
    """Its write comes after the first sums and before the copy, which runs late."""
    device = lab.device
    table = torch.zeros(3000, 64, device=device)
    other = torch.zeros(10, device=device)
    holder = nn.Module()
    holder.register_parameter("table", nn.Parameter(table))
    holder.register_parameter("other", nn.Parameter(other))
    snapshot = residency.snapshot({"model": holder}, verify="full")
    if write == "row":
        holder.table.data[1234] = 1.0
    elif write == "data":
        holder.table.data.add_(1.0)
    else:
        holder.table.detach()[2999, 63:].untyped_storage().fill_(1)
    torch.accelerator.current_stream().synchronize()
    with pytest.raises(
        CheckpointError, match=r"model\.table was written while it was being copied"
    ):
        snapshot.wait()


def test_full_verification_passes_what_was_not_written_or_passed_the_gate(lab):
    run = lab.run(offload=False)
    run.step()
    expected = run.copy()
    snapshot = residency.snapshot(run.state, verify="full")
    run.step()
    with residency.mutating(*run.model.parameters(), *run.model.buffers()):
        for tensor in (*run.model.parameters(), *run.model.buffers()):
            tensor.detach().zero_()
    lab.same(snapshot.tree, expected)


def test_a_foreign_writer_that_says_so_comes_after_the_copies(lab):
    weight = nn.Parameter(torch.ones(1000, device=lab.device))
    holder = nn.Module()
    holder.register_parameter("weight", weight)
    snapshot = residency.snapshot({"model": holder})
    with residency.mutating(weight):
        weight.detach().zero_()
    lab.same(snapshot.tree["model"]["weight"], torch.ones(1000))


def test_a_state_that_a_snapshot_keeps_may_be_written_at_once(device: torch.device) -> None:
    model = torch.nn.Linear(8, 8).to(device)
    optimizer = residency.offload_optimizer(torch.optim.AdamW(model.parameters()))
    model(torch.ones(2, 8, device=device)).sum().backward()
    optimizer.step()
    before = optimizer.state[model.weight]["exp_avg"].clone()
    snapshot = residency.snapshot({"optimizer": optimizer})
    snapshot.wait()
    state = optimizer.state[model.weight]["exp_avg"]
    with residency.mutating(state):
        state.zero_()
    optimizer.state[model.bias]["exp_avg"].zero_()
    assert not optimizer.state[model.weight]["exp_avg"].any()
    taken = snapshot.tree["optimizer"]["state"]
    assert any(torch.equal(value["exp_avg"], before) for value in taken.values())


@pytest.mark.sim
def test_snapshots_one_after_the_other_page_lock_memory_once(device, monkeypatch):
    def figures() -> tuple[int, int]:
        found = sim.pinned_memory_stats()
        return found["pinned_bytes.current"], found["num_pinned"]

    tree = {name: torch.ones(100_000 * name, device=device) for name in range(1, 6)}
    residency.snapshot(tree).wait()
    gc.collect()
    before = figures()
    for _ in range(3):
        taken = residency.snapshot(tree).wait()
        assert all(torch.equal(taken.tree[name], tree[name].cpu()) for name in tree)
        del taken
        assert figures() == before
    residency.snapshot({name: tensor[:-1] for name, tensor in tree.items()}).wait()
    assert figures() == before  # smaller ones lie in the same slabs
    _pinned._empty_host_cache()  # torch.accelerator.empty_host_cache, where torch has it
    assert figures()[0] < before[0]
    residency.snapshot(tree).wait()
    # Where the host has no room, what torch keeps is given back before anything is refused.
    room = iter([0])
    monkeypatch.setattr(_slab, "available_host_bytes", lambda: next(room, 1 << 30))
    residency.snapshot({"larger": torch.ones(10_000_000, device=device)}).wait()
    assert figures()[0] <= 64 << 20
