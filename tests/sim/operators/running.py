"""Runs one sample on the host and on the device, in one layout or mode."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from comparing import Outcome, compare
from torch.utils import _pytree as pytree
from torch_tables import tensors_in

from residency import _device

LAYOUTS = ("contiguous", "strided", "transposed", "channels_last")

Call = Callable[[Any], Any]
Make = Callable[[torch.device], Any]


class NotApplicableError(Exception):
    """A sample that has nothing to show in this variant."""


def moved(value: Any, device: torch.device, layout: str = "contiguous") -> Any:
    """Returns a copy of a sample's value on the device, its tensors in the layout."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return _moved(leaf, device, layout)
        if isinstance(leaf, torch.device):
            return device if leaf.type == "cpu" else leaf
        return str(device) if isinstance(leaf, str) and leaf == "cpu" else leaf

    return pytree.tree_map(move, value)


def _moved(tensor: torch.Tensor, device: torch.device, layout: str) -> torch.Tensor:
    with torch.no_grad():
        if tensor.is_conj():  # the lazy bit goes along
            new = tensor.detach().conj().clone().to(device).conj()
        else:
            new = _laid_out(tensor.detach().clone().to(device), layout)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
    return new.requires_grad_(tensor.requires_grad)


def _laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "strided" and tensor.dim() and tensor.numel():
        wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1] + 1)
        wide[..., 1::2] = tensor
        return wide[..., 1::2]
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "channels_last" and tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    if layout == "channels_last" and tensor.dim() == 5:
        return tensor.contiguous(memory_format=torch.channels_last_3d)
    return tensor


def sample_on(sample: Any, device: torch.device, layout: str) -> Any:
    new = copy.copy(sample)
    given = (sample.input, tuple(sample.args), dict(sample.kwargs))
    new.input, new.args, new.kwargs = moved(given, device, layout)
    return new


# ------------------------------------------------------------------------------------ the calls


def plain(operator: Call) -> Call:
    return lambda sample: operator(sample.input, *sample.args, **sample.kwargs)


def in_place(operator: Call) -> Call:
    return lambda sample: (plain(operator)(sample), sample.input)


def into_out(operator: Call, *, is_empty: bool) -> Call:
    """Calls with ``out=``: tensors of the right size, or empty ones that the kernel resizes."""

    def call(sample: Any) -> Any:
        with torch.no_grad():
            expected = plain(operator)(sample)
            outs = tuple(
                tensor.new_empty(0) if is_empty else torch.ones_like(tensor)
                for tensor in tensors_in(expected)
            )
            torch.manual_seed(1)
            out = outs[0] if isinstance(expected, torch.Tensor) else outs
            operator(sample.input, *sample.args, **sample.kwargs, out=out)
        return outs

    return call


def on_stream(operator: Call, stream: torch.Stream) -> Call:
    def call(sample: Any) -> Any:
        used = tensors_in((sample.input, sample.args, sample.kwargs))
        if not any(tensor.device == stream.device for tensor in used):
            return plain(operator)(sample)
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            result = plain(operator)(sample)
        torch.accelerator.current_stream().wait_stream(stream)
        for tensor in [*used, *tensors_in(result)]:
            if tensor.device == stream.device:
                tensor.record_stream(stream)
        return result

    return call


def forward_mode(operator: Call) -> Call:
    def call(sample: Any) -> Any:
        generator = torch.Generator().manual_seed(5)

        def dual(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not leaf.dtype.is_floating_point:
                return leaf
            tangent = torch.randn(leaf.shape, generator=generator).to(leaf.dtype).to(leaf.device)
            return forward_ad.make_dual(leaf.detach(), tangent)

        with forward_ad.dual_level():
            value, args, kwargs = pytree.tree_map(dual, (sample.input, sample.args, sample.kwargs))
            parts = [
                forward_ad.unpack_dual(o) for o in tensors_in(operator(value, *args, **kwargs))
            ]
        return [part for pair in parts for part in (pair.primal, pair.tangent)]

    return call


def gradients(sample: Any, result: Any, *, create_graph: bool = False) -> list[Any]:
    """Returns the gradients of a call, from random ones of its results."""
    process = getattr(sample, "output_process_fn_grad", None)
    targets = [t for t in tensors_in(process(result) if process else result) if t.requires_grad]
    wanted = [
        t
        for t in tensors_in((sample.input, sample.args, sample.kwargs))
        if t.requires_grad and t.is_leaf
    ]
    if not targets or not wanted:
        return []
    generator = torch.Generator().manual_seed(7)
    seeds = [torch.randn(t.shape, generator=generator).to(t.dtype).to(t.device) for t in targets]
    return list(
        torch.autograd.grad(targets, wanted, seeds, allow_unused=True, create_graph=create_graph)
    )


# Autograd numbers what it records, each thread for itself, and adds the parts of a gradient in the
# order of the numbers. A device's first backward pass records on a thread of autograd's, so the
# host's must not on the one of the forward pass, or the two would add in another order.
_BACKWARD = ThreadPoolExecutor(1)


def twice_differentiated(operator: Call) -> Call:
    def call(sample: Any) -> Any:
        result = plain(operator)(sample)
        first = _BACKWARD.submit(gradients, sample, result, create_graph=True).result()
        if not any(g is not None and g.requires_grad for g in first):
            raise NotApplicableError
        sample.output_process_fn_grad = None  # what is differentiated now are gradients
        return [g for g in first if g is not None]

    return call


# ----------------------------------------------------------------------------------- the device


class Bench:
    """The device under test, and what it held before a sample."""

    def __init__(self, device: torch.device, *, is_dry: bool) -> None:
        self.device = device
        self.is_dry = is_dry
        self.side = torch.Stream(device=device)
        a = torch.ones(8, 8, device=device, requires_grad=True)
        (a @ a).sum().backward()  # the workspaces, of this thread and of backward's
        del a
        self._rest = -1

    def settle(self) -> int:
        """Returns the bytes in use once backward's threads have let go of the last sample."""
        _device.finish_backward(self.device)
        # it differentiates one call at a time, and lets go of one before it takes the next
        _BACKWARD.submit(_device.finish_backward, self.device).result()
        if torch.accelerator.memory_allocated() != self._rest:
            gc.collect()
            self._rest = torch.accelerator.memory_allocated()
        return self._rest

    def run(self, call: Call, make: Make, *, grad: bool) -> Outcome:
        rest = self.settle()
        sample = make(self.device)
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        outcome = run(call, sample, grad=grad)
        torch.accelerator.synchronize()
        outcome.peak_bytes = torch.accelerator.max_memory_allocated() - rest
        if not self.is_dry:
            outcome.on_host = [None if t is None else t.detach().cpu() for t in outcome.tensors]
        return outcome


def run(call: Call, sample: Any, *, grad: bool) -> Outcome:
    torch.manual_seed(1)
    result = call(sample)
    found = tensors_in(result)
    if any(t.layout != torch.strided or t.is_nested or t.is_quantized for t in found):
        raise NotApplicableError
    return Outcome([*found, *(gradients(sample, result) if grad else [])])


def judge(bench: Bench, call: Call, make: Make, *, grad: bool) -> tuple[str, str, Outcome | None]:
    """Runs a sample on both; returns how they compare, where, and the device's outcome."""
    host_device = torch.device("cpu")
    try:
        host = run(call, make(host_device), grad=grad)
    except Exception as error:  # what the host refuses says nothing about the device
        return "skipped", _first_line(error), None
    try:
        found = bench.run(call, make, grad=grad)
    except Exception as error:
        return "error", _first_line(error), None
    if bench.is_dry:
        return "equal", "", found
    status, detail = compare(host, found)
    if status != "equal":  # `empty` and its like: is the host equal to itself?
        again = run(call, make(host_device), grad=grad)
        again.on_host = again.tensors
        if compare(host, again)[0] != "equal":
            return "skipped", "undefined on the host", found
    return status, detail, found


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
