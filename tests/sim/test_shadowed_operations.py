"""Composite kernels that would shadow the fallback: all of this torch, against the list kept here.

A composite kernel allocates temporaries that CUDA's own kernel does not, and nothing says so. What
another version of torch adds shows here.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from residency import sim

pytestmark = pytest.mark.sim

LIST = Path(__file__).with_name("shadowed_operations.txt")
STRUCTURED = "CompositeExplicitAutogradNonFunctional"
COMPOSITE = ("CompositeExplicitAutograd", "CompositeImplicitAutograd")

_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


def _operations() -> list[str]:
    return [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]


def _listed() -> dict[str, str]:
    lines = [line for line in LIST.read_text().splitlines() if not line.startswith("#")]
    return {"aten::" + line.split()[0]: line.split(maxsplit=1)[1] for line in lines}


def _is_out_variant(name: str) -> bool:
    operation, _, overload = name.partition(".")
    arguments = torch._C._get_schema(operation, overload).arguments
    return any(a.kwarg_only and a.alias_info and a.alias_info.is_write for a in arguments)


def _structured() -> tuple[set[str], set[str]]:
    """Names with a structured kernel, and those of them that have no out variant of CPU's own."""
    names = [name for name in _operations() if _has_kernel(name, "CPU")]
    bases = {name.partition(".")[0] for name in names if _is_out_variant(name)}
    structured = {name for name in names if _has_kernel(name, STRUCTURED)}
    return structured, {
        name for name in structured if name.partition(".")[0].removesuffix("_") not in bases
    }


def test_every_shadowed_operation_is_on_the_fallback_or_accepted() -> None:
    sim.enable()
    structured, without_out = _structured()
    shadowed = without_out | {
        name
        for name in _operations()
        if _has_kernel(name, "CPU") and any(_has_kernel(name, key) for key in COMPOSITE)
    }
    # Has an out variant, and its composite kernel decomposes all the same.
    shadowed.add("aten::silu_backward")
    listed = _listed()
    assert len(structured) > 300
    assert shadowed - set(listed) == set(), "new in this torch: decide, and add them to the list"
    if torch.__version__.startswith("2.13"):
        assert set(listed) - shadowed == set(), "gone from this torch"
    for name in shadowed:
        assert _has_kernel(name, "PrivateUse1") == (listed[name] == "fallback"), name


@pytest.mark.parametrize("dry", [False, True])
def test_operations_put_on_the_fallback_take_their_outputs_and_nothing_else(dry: bool) -> None:
    sim.enable("1GiB", dry=dry, workspaces=False)
    values = torch.ones(256, 1024, device="sim")
    row, column = torch.ones(1024, device="sim"), torch.ones(256, device="sim")
    result = torch.empty_like(values)
    truths = torch.empty(1024, dtype=torch.bool, device="sim")
    for work in (
        lambda: torch.addr(values, column, row, out=result),
        lambda: torch.ops.aten.all.dims_out(values, [0], out=truths),
        lambda: torch.ops.aten.any.dims_out(values, [0], out=truths),
        lambda: torch.stack([values, values], out=torch.empty(0, device="sim")),
        lambda: torch.ops.aten.linalg__powsum(values, 2, [1]),
    ):
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        output = work()
        grown = torch.accelerator.memory_allocated() - before
        assert torch.accelerator.max_memory_allocated() - before == grown
        del output
    assert result.shape == (256, 1024)


@pytest.fixture(autouse=True)
def plain_device_afterwards() -> Iterator[None]:
    yield
    gc.collect()
    sim.enable()
