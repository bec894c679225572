"""What keeps a tensor on the device is named as its user knows it; the search changes nothing."""

from __future__ import annotations

import collections
import gc
import sys
import threading
import weakref
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from holding import MIB, NUM_ELEMENTS, Make, only

import residency
from residency._memory._holders._holders import find_holders
from residency.types import Holder

pytestmark = pytest.mark.sim_device(schedule="late")  # it asks the device for nothing but figures


def test_nothing_on_the_device_has_no_holder(device: torch.device) -> None:
    assert residency.holders(0) == []


def test_a_local_of_a_running_function_is_named(make: Make) -> None:
    def train() -> Holder:
        state_dict = {"model": {"w": make()}}
        assert state_dict
        return only()

    holder = train()
    name = "test_a_local_of_a_running_function_is_named.<locals>.train() local 'state_dict'"
    assert holder.path == f"{name} ['model']['w']"
    assert str(holder) == f"1.00 MiB  {holder.path}"
    assert (holder.num_bytes, holder.kind, holder.others) == (MIB, "tensor", ())
    assert (holder.shape, holder.dtype, holder.num_tensors) == ((NUM_ELEMENTS,), "float32", 1)


def test_another_threads_locals_and_the_targets_of_threads_are_named(make: Make) -> None:
    is_running, go_on = threading.Event(), threading.Event()

    def work(batch: Any) -> None:
        is_running.set()
        go_on.wait(60)

    thread = threading.Thread(target=work, args=([make()],), name="loader")
    thread.start()
    is_running.wait(60)
    try:
        holder = only()
    finally:
        go_on.set()
        thread.join()
    assert holder.path.startswith("thread 'loader': ")
    assert holder.path.endswith(".<locals>.work() local 'batch' [0]")


def test_weak_references_do_not_hold(make: Make) -> None:
    tensor = make()
    table = weakref.WeakValueDictionary({"a": tensor})
    reference = weakref.ref(tensor)
    assert only().path == "test_weak_references_do_not_hold() local 'tensor'"
    del tensor
    assert residency.holders() == []
    assert not table
    assert reference() is None


def test_parameters_gradients_and_states_go_by_the_models_names(device: torch.device) -> None:
    layers = [torch.nn.Linear(512, 512, bias=False), torch.nn.BatchNorm1d(1 << 18)]
    model = torch.nn.Sequential(collections.OrderedDict(zip(("up", "norm"), layers, strict=True)))
    model.to(device)
    layers.clear()
    optimizer = torch.optim.Adam([model.up.weight], foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    here = "test_parameters_gradients_and_states_go_by_the_models_names() local"
    assert {(holder.path, holder.kind) for holder in residency.holders()} == {
        (f"{here} 'model'.up.weight", "parameter"),
        (f"{here} 'model'.up.weight.grad", "gradient"),
        (f"{here} 'model'.norm.weight", "parameter"),
        (f"{here} 'model'.norm.weight.grad", "gradient"),
        (f"{here} 'model'.norm.bias", "parameter"),
        (f"{here} 'model'.norm.bias.grad", "gradient"),
        (f"{here} 'model'.norm.running_mean", "buffer"),
        (f"{here} 'model'.norm.running_var", "buffer"),
        (f"{here} 'optimizer'.state['up.weight']['exp_avg']", "optimizer state"),
        (f"{here} 'optimizer'.state['up.weight']['exp_avg_sq']", "optimizer state"),
    }
    del model, parameter
    assert f"{here} 'optimizer'.param_groups[0]['params'][0]" in {
        holder.path for holder in residency.holders()
    }
    assert f"{here} 'optimizer'.state[param_groups[0]['params'][0]]['exp_avg']" in {
        holder.path for holder in residency.holders()
    }


def test_what_a_part_of_a_model_keeps_goes_by_the_parts_name(make: Make) -> None:
    model = torch.nn.Sequential(collections.OrderedDict(inner=torch.nn.Identity()))
    vars(model.inner)["cache"] = [make()]
    here = "test_what_a_part_of_a_model_keeps_goes_by_the_parts_name() local"
    assert only().path == f"{here} 'model'.inner.cache[0]"


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x + 1)
        ctx.scaled = x * 2
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def test_what_an_operation_saved_for_backward_is_named_with_it(make: Make) -> None:
    weight = make().requires_grad_()
    loss = (weight * 2).sin().sum()
    here = "test_what_an_operation_saved_for_backward_is_named_with_it() local"
    assert {(holder.path, holder.kind) for holder in residency.holders()} == {
        (f"{here} 'weight'", "tensor"),
        (f"saved by SinBackward0 for {here} 'loss'", "autograd"),
    }
    loss.backward()  # which lets go of them
    assert {holder.path for holder in residency.holders()} == {
        f"{here} 'weight'",
        f"{here} 'weight'.grad",
    }
    weight.grad = None
    del loss
    loss = Square.apply(weight).sum()
    paths = {holder.path for holder in residency.holders()}
    assert f"saved by SquareBackward for {here} 'loss'" in paths
    assert f"{here} 'loss' graph's SquareBackward.scaled" in paths
    assert len(paths) == 3
    assert loss.requires_grad


def test_a_leaf_that_its_graph_alone_keeps_is_named_with_the_graph(make: Make) -> None:
    loss = make().requires_grad_().sum()  # which saves nothing
    here = "test_a_leaf_that_its_graph_alone_keeps_is_named_with_the_graph() local"
    assert only().path == f"leaf of the graph of {here} 'loss'"
    assert loss.requires_grad


def test_a_gradient_whose_model_is_gone_goes_by_what_keeps_its_parameter(
    device: torch.device,
) -> None:
    model = torch.nn.Linear(1024, 1024, bias=False).to(device)
    model(torch.ones(1, 1024, device=device)).sum().backward()
    kept = list(model.parameters())
    del model
    here = "test_a_gradient_whose_model_is_gone_goes_by_what_keeps_its_parameter() local"
    paths = {holder.path for holder in residency.holders() if holder.num_bytes == 4 << 20}
    assert paths == {f"{here} 'kept' [0]", f"{here} 'kept' [0].grad"}
    assert kept


def test_hooks_on_saved_tensors_are_not_called(make: Make) -> None:
    unpacked = []
    weight = make().requires_grad_()
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: {"packed": tensor}, lambda packed: unpacked.append(1) or packed["packed"]
    )
    with hooks:
        loss = (weight * 2).sin().sum()
    here = "test_hooks_on_saved_tensors_are_not_called() local"
    paths = {holder.path for holder in residency.holders()}
    assert f"packed by SinBackward0 for {here} 'loss' ['packed']" in paths
    assert not unpacked
    assert loss.requires_grad


def test_bytes_that_only_cpp_holds_are_told(make: Make) -> None:
    future: Any = torch.futures.Future()
    future.set_result(make())  # its Python object lives with the C++ tensor
    cpp = "held by C++ or autograd, not reachable from Python"
    assert (only().path, only().kind) == (cpp, "c++")
    gc.freeze()  # now that object is not to be seen: what the allocator has beyond the rest tells
    try:
        tensor = make()
        assert [(holder.path, holder.kind, holder.num_bytes) for holder in residency.holders()] == [
            (cpp, "c++", MIB),
            ("test_bytes_that_only_cpp_holds_are_told() local 'tensor'", "tensor", MIB),
        ]
    finally:
        gc.unfreeze()
    assert future.done()
    assert tensor.numel() == NUM_ELEMENTS


def test_frozen_objects_are_found(make: Make) -> None:
    kept = [{"a": make()}]
    gc.freeze()
    try:
        assert only().path == "test_frozen_objects_are_found() local 'kept' [0]['a']"
    finally:
        gc.unfreeze()
    assert kept


def test_everyone_else_who_keeps_a_tensor_is_told_too(make: Make) -> None:
    tensor = make()
    listed = [tensor]
    table = {"x": listed, "view": tensor[:10]}
    holder = only()
    here = "test_everyone_else_who_keeps_a_tensor_is_told_too() local"
    assert holder.path == f"{here} 'tensor'"
    assert set(holder.others) == {f"{here} 'listed' [0]", f"{here} 'table' ['view']"}
    assert holder.num_tensors == 2
    assert table


def test_a_function_that_called_a_search_can_let_go(make: Make) -> None:
    gc.disable()
    try:

        def inner() -> None:
            residency.holders()

        tensor = make()
        reference = weakref.ref(tensor)
        inner()
        names = locals()  # the user's own dict of locals stays as it was
        inner()
        assert names["tensor"] is tensor
        del names["tensor"], names, tensor
        assert reference() is None
    finally:
        gc.enable()


class Hostile:
    """Breaks, and tells, whenever a line of its own is run."""

    called: ClassVar[list[str]] = []

    def __init__(self, tensor: Any) -> None:
        object.__setattr__(self, "tensor", tensor)

    def _break(self, *_: Any) -> Any:
        Hostile.called.append("called")
        raise SystemError("a search ran this")

    __getattr__ = __getattribute__ = __eq__ = __repr__ = __str__ = __len__ = _break
    __bool__ = __iter__ = __getitem__ = __instancecheck__ = __setattr__ = _break
    __class__ = property(_break)  # type: ignore[assignment]
    state_dict = property(_break)

    def __hash__(self) -> int:
        return 1


class HostileTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        Hostile.called.append("torch function")
        raise SystemError("a search ran this")

    grad = device = shape = property(Hostile._break)  # type: ignore[assignment]


class HostileMeta(type):
    def __getattribute__(cls, name: str) -> Any:
        Hostile.called.append(name)
        raise SystemError("a search ran this")


def test_no_line_of_a_users_object_is_run(make: Make) -> None:
    hostile_class = HostileMeta("Odd", (), {})
    tensor = torch.Tensor._make_subclass(HostileTensor, make())
    kept = [
        Hostile(make()),
        {Hostile(None): make()},
        type.__call__(hostile_class),
        tensor,
    ]
    Hostile.called.clear()
    paths = {holder.path for holder in residency.holders()}
    assert not Hostile.called
    here = "test_no_line_of_a_users_object_is_run() local"
    assert len(kept) == 4
    assert paths == {
        f"{here} 'kept' [0].tensor",
        f"{here} 'kept' [1][<Hostile>]",
        f"{here} 'tensor'",
    }


def test_storages_below_the_size_are_left_out_and_the_largest_comes_first(
    device: torch.device,
) -> None:
    sizes = (300, 100, 200)
    kept = [torch.ones(size, dtype=torch.uint8, device=device) for size in sizes]
    assert [holder.num_bytes for holder in residency.holders(150)] == [300, 200]
    assert [holder.num_bytes for holder in residency.holders("100B")] == [300, 200, 100]
    assert kept


def test_a_size_or_a_device_that_means_nothing_is_refused(device: torch.device) -> None:
    with pytest.raises(residency.InvalidArgumentError, match="min_bytes is '1 GB'"):
        residency.holders("1 GB")
    with pytest.raises(residency.InvalidArgumentError, match="device is 'cpu'"):
        residency.holders(device="cpu")


def test_a_search_that_may_take_no_time_says_what_it_did_not_come_to(make: Make) -> None:
    kept = [[[[make()]]]]
    (holder,) = find_holders(kept[0][0][0][0].device, MIB, seconds=-1.0)
    assert "the search did not come to" in holder.path


def test_names_in_the_calling_frame_survive_a_tracer(make: Make) -> None:
    tensor = make()
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        assert only().kind == "tensor"
    finally:
        sys.settrace(before)
    assert tensor.numel() == NUM_ELEMENTS
