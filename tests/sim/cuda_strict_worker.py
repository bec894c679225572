"""What CUDA refuses and the host's kernels would do, in one process with the simulator as CUDA.

The operations that raise there by the documentation of `torch.use_deterministic_algorithms`, and
their neighbours that do not; figures and bounds of page-locked memory; a lost device.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from worker_cases import Cases

import residency
from residency import sim
from residency._checkpoint._restore._fill import Staging
from residency._memory import _phase
from residency._transfer import SlabArena

Run = Callable[[], object]

case = Cases()
MIB = 1 << 20


def randn(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, device="cuda", requires_grad=True)


def gradient(make: Callable[[], torch.Tensor]) -> Callable[[], Run]:
    """Returns what prepares a backward pass: the forward one runs before anything is asked."""

    def prepare() -> Run:
        result = make()
        return lambda: result.backward(torch.ones_like(result), retain_graph=True)

    return prepare


def call(run: Run) -> Callable[[], Run]:
    return lambda: run


def resized(size: int, num_dims: int, mode: str, **options: bool) -> Callable[[], Run]:
    sizes = (4,) * num_dims
    return gradient(lambda: functional.interpolate(randn(1, 2, *sizes), size, mode=mode, **options))


def padded(width: int, num_dims: int) -> Callable[[], Run]:
    padding = (width,) * (2 * num_dims)
    sizes = (4,) * num_dims
    return gradient(lambda: functional.pad(randn(1, 2, *sizes), padding, mode="reflect"))


def unpooled(layer: Callable[..., nn.Module], num_dims: int) -> Callable[[], Run]:
    value = torch.rand(1, 1, *(7,) * num_dims, device="cuda")
    return call(lambda: layer(3, 1)(value, torch.zeros_like(value, dtype=torch.long)))


def bags(mode: str) -> Callable[[], Run]:
    layer = nn.EmbeddingBag(4, 3, mode=mode).cuda()
    return gradient(lambda: layer(torch.randint(0, 3, (4, 3), device="cuda")))


def ctc() -> torch.Tensor:
    lengths = torch.full((2,), 20), torch.full((2,), 6)
    targets = torch.randint(1, 9, (2, 6), device="cuda")
    return functional.ctc_loss(randn(20, 2, 9).log_softmax(2), targets, *lengths)


def sampled(num_dims: int) -> Callable[[], Run]:
    sizes = (2,) * num_dims
    grid = torch.zeros(1, *sizes, num_dims)
    return gradient(
        lambda: functional.grid_sample(randn(1, 1, *sizes), grid.cuda(), align_corners=False)
    )


def scattered(how: str) -> Callable[[], Run]:
    return call(lambda: values().scatter_reduce(0, indices(), values(), how))


def values() -> torch.Tensor:
    return torch.tensor([3.0, 1.0, 2.0], device="cuda")


def indices() -> torch.Tensor:
    return torch.tensor([0, 0, 2], device="cuda")


def image_loss(reduction: str) -> Callable[[], Run]:
    target = torch.zeros(2, 5, 5, dtype=torch.long)
    return call(lambda: functional.nll_loss(randn(2, 3, 5, 5), target.cuda(), reduction=reduction))


def pooled(layer: nn.Module, num_dims: int) -> Callable[[], Run]:
    return gradient(lambda: layer(randn(1, 2, *(5,) * num_dims)))


# Name -> what CUDA's message names, and what makes the call.
REFUSED: dict[str, tuple[str, Callable[[], Callable[[], Run]]]] = {
    "AvgPool3d": ("avg_pool3d_backward_cuda", lambda: pooled(nn.AvgPool3d(2), 3)),
    "AdaptiveAvgPool2d": (
        "adaptive_avg_pool2d_backward_cuda",
        lambda: pooled(nn.AdaptiveAvgPool2d(3), 2),
    ),
    "AdaptiveAvgPool3d": (
        "adaptive_avg_pool3d_backward_cuda",
        lambda: pooled(nn.AdaptiveAvgPool3d(3), 3),
    ),
    "AdaptiveMaxPool2d": (
        "adaptive_max_pool2d_backward_cuda",
        lambda: pooled(nn.AdaptiveMaxPool2d(3), 2),
    ),
    "FractionalMaxPool2d": (
        "fractional_max_pool2d_backward_cuda",
        lambda: pooled(nn.FractionalMaxPool2d(2, output_ratio=0.5), 2),
    ),
    "FractionalMaxPool3d": (
        "fractional_max_pool3d_backward_cuda",
        lambda: pooled(nn.FractionalMaxPool3d(2, output_ratio=0.5), 3),
    ),
    "MaxUnpool1d": ("max_unpooling2d_forward_out", lambda: unpooled(nn.MaxUnpool1d, 1)),
    "MaxUnpool2d": ("max_unpooling2d_forward_out", lambda: unpooled(nn.MaxUnpool2d, 2)),
    "MaxUnpool3d": ("max_unpooling3d_forward_out", lambda: unpooled(nn.MaxUnpool3d, 3)),
    "interpolate linear": (
        "upsample_linear1d_backward_out_cuda",
        lambda: resized(12, 1, "linear"),
    ),
    "interpolate bilinear": (
        "upsample_bilinear2d_backward_out_cuda",
        lambda: resized(12, 2, "bilinear"),
    ),
    "interpolate bicubic": (
        "upsample_bicubic2d_backward_out_cuda",
        lambda: resized(12, 2, "bicubic"),
    ),
    "interpolate trilinear": (
        "upsample_trilinear3d_backward_out_cuda",
        lambda: resized(12, 3, "trilinear"),
    ),
    "interpolate bilinear, smoothed": (
        "upsample_bilinear2d_aa_backward_out_cuda",
        lambda: resized(3, 2, "bilinear", antialias=True),
    ),
    "interpolate bicubic, smoothed": (
        "upsample_bicubic2d_aa_backward_out_cuda",
        lambda: resized(3, 2, "bicubic", antialias=True),
    ),
    "ReflectionPad1d": ("reflection_pad1d_backward_out_cuda", lambda: padded(1, 1)),
    "ReflectionPad2d": ("reflection_pad2d_backward_cuda", lambda: padded(1, 2)),
    "ReflectionPad3d": ("reflection_pad3d_backward_out_cuda", lambda: padded(1, 3)),
    "NLLLoss of images": ("nll_loss2d_forward_out_cuda_template", lambda: image_loss("mean")),
    "CTCLoss": ("ctc_loss_backward_gpu", lambda: gradient(ctc)),
    "EmbeddingBag max": ("embedding_bag_backward_cuda_max", lambda: bags("max")),
    "put_": ("put_", lambda: call(lambda: values().put_(indices(), values()))),
    "put_ accumulate": (
        "put_",
        lambda: call(lambda: values().put_(indices(), values(), accumulate=True)),
    ),
    "put": ("put_", lambda: call(lambda: values().put(indices(), values(), accumulate=True))),
    "histc": (
        "_histc_cuda with floating point input",
        lambda: call(lambda: torch.histc(values(), min=0, max=3)),
    ),
    "bincount with weights": (
        "_bincount_cuda",
        lambda: call(lambda: torch.bincount(indices(), weights=values())),
    ),
    "median with indices": (
        "median CUDA with indices output",
        lambda: call(lambda: values().median(0)),
    ),
    "nanmedian with indices": (
        "median CUDA with indices output",
        lambda: call(lambda: values().nanmedian(0)),
    ),
    "grid_sample 2d": ("grid_sampler_2d_backward_cuda", lambda: sampled(2)),
    "grid_sample 3d": ("grid_sampler_3d_backward_cuda", lambda: sampled(3)),
    "cumsum": ("cumsum_cuda_kernel", lambda: call(lambda: values().cumsum(0))),
    "cumsum_": ("cumsum_cuda_kernel", lambda: call(lambda: values().cumsum_(0))),
    "cumsum out": (
        "cumsum_cuda_kernel",
        lambda: call(lambda: torch.cumsum(indices(), 0, dtype=torch.float, out=values())),
    ),
    "cumsum of integers as floats": (
        "cumsum_cuda_kernel",
        lambda: call(lambda: indices().cumsum(0, dtype=torch.float)),
    ),
    "cumsum of complex numbers": (
        "cumsum_cuda_kernel",
        lambda: call(lambda: values().to(torch.complex64).cumsum(0)),
    ),
    "scatter_reduce prod": ("scatter_reduce_cuda_prod_", lambda: scattered("prod")),
    "scatter_reduce_ prod": (
        "scatter_reduce_cuda_prod_",
        lambda: call(lambda: values().scatter_reduce_(0, indices(), values(), "prod")),
    ),
}

ACCEPTED: dict[str, Callable[[], Callable[[], Run]]] = {
    "AvgPool2d is deterministic": lambda: pooled(nn.AvgPool2d(2), 2),
    "MaxPool3d is deterministic": lambda: pooled(nn.MaxPool3d(2), 3),
    "interpolate nearest is deterministic": lambda: resized(12, 2, "nearest"),
    "interpolate bilinear takes another way": lambda: call(
        lambda: functional.interpolate(randn(1, 2, 4, 4), 12, mode="bilinear").sum().backward()
    ),
    "ReplicationPad2d is deterministic": lambda: gradient(
        lambda: functional.pad(randn(1, 2, 4, 4), (1, 1, 1, 1), mode="replicate")
    ),
    "NLLLoss of images without a reduction": lambda: image_loss("none"),
    "NLLLoss of rows": lambda: call(
        lambda: functional.nll_loss(randn(3, 4), torch.zeros(3, dtype=torch.long).cuda())
    ),
    "EmbeddingBag mean": lambda: bags("mean"),
    "bincount without weights": lambda: call(lambda: torch.bincount(indices())),
    "median without indices": lambda: call(lambda: values().median()),
    "cumsum of integers": lambda: call(lambda: indices().cumsum(0)),
    "cumsum of nothing": lambda: call(lambda: torch.empty(0, device="cuda").cumsum(0)),
    "scatter_reduce sum": lambda: scattered("sum"),
    "scatter_add_": lambda: call(lambda: values().scatter_add_(0, indices(), values())),
    "index_add_": lambda: call(lambda: values().index_add_(0, indices(), values())),
}


@contextmanager
def deterministic(*, warn_only: bool = False) -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def refuses(caller: str, run: Run) -> None:
    words = f"{caller} does not have a deterministic implementation"
    with deterministic(), pytest.raises(RuntimeError, match=f"^{words}"):
        run()
    with deterministic(warn_only=True), pytest.warns(UserWarning, match=words):
        run()
    run()


def accepts(run: Run) -> None:
    with deterministic():
        run()


def add_named(name: str, function: Callable[[], None]) -> None:
    function.__name__ = name
    case(function)


for name, (caller, prepare) in REFUSED.items():
    add_named(name, lambda caller=caller, prepare=prepare: refuses(caller, prepare()()))
for name, prepare in ACCEPTED.items():
    add_named(name, lambda prepare=prepare: accepts(prepare()()))


@case
def types_of_tensors_make_some() -> None:
    kind = torch.cuda.LongTensor
    made = [kind(2, 3), kind(torch.Size([6])), kind([1, 2, 3]), kind(np.ones(4, np.int64)), kind()]
    assert [each.numel() for each in made] == [6, 6, 3, 4, 0]
    assert {(each.dtype, each.device.type) for each in made} == {(torch.int64, "cuda")}
    assert made[2].tolist() == [1, 2, 3]
    assert kind(made[2]).data_ptr() == made[2].data_ptr()
    with pytest.raises(TypeError, match=r"expected torch.cuda.LongTensor \(got torch.LongTensor\)"):
        kind(torch.ones(1, dtype=torch.int64))
    host = torch.ones(2)
    assert host.type(torch.cuda.HalfTensor).type() == "torch.cuda.HalfTensor"
    assert isinstance(made[0], kind)
    assert not isinstance(host, torch.cuda.FloatTensor)
    assert not isinstance(made[0], torch.cuda.FloatTensor)
    with pytest.warns(UserWarning, match="deprecated"):
        torch.set_default_tensor_type("torch.cuda.DoubleTensor")
    assert torch.zeros(2).type() == nn.Linear(2, 2).weight.type() == "torch.cuda.DoubleTensor"
    made = [torch.Tensor([1.0]), torch.Tensor(2, 3), torch.Tensor(torch.Tensor(2))]
    assert {each.type() for each in made} == {"torch.cuda.DoubleTensor"}
    torch.set_default_tensor_type(torch.FloatTensor)
    assert torch.zeros(2).type() == torch.Tensor(2).type() == "torch.FloatTensor"


@case
def what_is_not_deterministic_is_refused_in_the_call_also_where_the_work_comes_late() -> None:
    side = torch.cuda.Stream()
    target, source, index = values(), values(), indices()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), deterministic(), pytest.raises(RuntimeError, match=r"^put_ does"):
        target.put_(index, source)
    torch.cuda.synchronize()


FIGURES = {
    **dict.fromkeys(
        ("allocations", "allocated_bytes", "active_requests", "active_bytes"),
        ("current", "peak", "allocated", "freed"),
    ),
    **dict.fromkeys(("host_alloc_time", "host_free_time"), ("total", "max", "min", "count", "avg")),
}


def host_figures(name: str) -> tuple[int, ...]:
    found = torch.cuda.host_memory_stats()
    return tuple(found[f"{name}.{figure}"] for figure in FIGURES[name])


@case
def libraries_are_there_in_each_build_of_torch() -> None:
    assert torch.backends.cudnn.is_available()
    assert torch.backends.cudnn.version() >= 9000
    assert torch.backends.cuda.is_flash_attention_available()
    with torch.backends.cudnn.flags(enabled=True, benchmark_limit=3):
        lstm = nn.LSTM(4, 4).cuda()
        assert lstm(torch.ones(2, 4, device="cuda"))[0].shape == (2, 4)


@case
def a_note_counts_what_the_limit_of_the_process_leaves() -> None:
    free, total = torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction((before + 64 * MIB) / total)
    assert free > 256 * MIB
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught, residency.phase("limited"):  # noqa: PT012 - one fits, two do not
            kept = [torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")]
            kept.append(torch.empty(30 * MIB, dtype=torch.uint8, device="cuda"))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    (note,) = caught.value.__notes__
    assert "30.00 MiB were asked for, and 6.00 MiB more were needed." in note
    assert "not allowed: raise torch's set_per_process_memory_fraction" in note
    assert "used outside of this process" not in note


@case
def every_documented_figure_of_pinned_memory_is_there() -> None:
    documented = {f"{name}.{figure}" for name, figures in FIGURES.items() for figure in figures}
    assert set(torch.cuda.host_memory_stats()) == documented | {"num_host_alloc", "num_host_free"}


@case
def figures_of_pinned_memory_follow_its_blocks() -> None:
    torch.cuda.synchronize()
    torch.accelerator.empty_host_cache()
    torch.cuda.reset_accumulated_host_memory_stats()
    torch.cuda.reset_peak_host_memory_stats()
    assert host_figures("allocations") == (0, 0, 0, 0)
    kept = torch.empty(5 * MIB, dtype=torch.uint8, pin_memory=True)
    other = torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
    assert host_figures("allocated_bytes") == (9 * MIB, 9 * MIB, 9 * MIB, 0)
    assert host_figures("active_requests") == (2, 2, 2, 0)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        target = other.to("cuda", non_blocking=True)
    del other
    assert host_figures("active_bytes")[0] == 9 * MIB  # the copy has yet to run
    side.synchronize()
    other = torch.empty(MIB, dtype=torch.uint8, pin_memory=True)  # the same block
    assert host_figures("active_bytes") == (9 * MIB, 9 * MIB, 10 * MIB, MIB)
    assert host_figures("allocations") == (2, 2, 2, 0)
    del other, target, kept
    assert host_figures("active_requests") == (0, 2, 3, 3)
    assert host_figures("allocated_bytes") == (9 * MIB, 9 * MIB, 9 * MIB, 0)
    torch.accelerator.empty_host_cache()
    assert host_figures("allocated_bytes") == (0, 9 * MIB, 9 * MIB, 9 * MIB)
    stats = torch.cuda.host_memory_stats()
    assert (stats["num_host_alloc"], stats["num_host_free"]) == (2, 2)
    assert host_figures("host_alloc_time") == host_figures("host_free_time") == (0, 0, 0, 2, 0)
    torch.cuda.reset_accumulated_host_memory_stats()
    torch.cuda.reset_peak_host_memory_stats()
    assert host_figures("allocated_bytes") == host_figures("active_bytes") == (0, 0, 0, 0)


@case
def page_locked_memory_is_bounded_by_the_machines() -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for num_bytes in (physical + 1, 1 << 44, (1 << 63) - 1):
        with pytest.raises(torch.AcceleratorError, match=r"^CUDA error: out of memory"):
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    assert torch.cuda.host_memory_stats()["active_bytes.current"] == 0
    assert torch.ones(4, device="cuda").sum() == 4  # such an error leaves the device as it was


@case
def dry_mode_refuses_what_is_not_deterministic_and_page_locks_as_another_machine_would() -> None:
    torch.cuda.synchronize()
    sim.enable("1GiB", dry=True)
    with deterministic(), pytest.raises(RuntimeError, match=r"^_bincount_cuda does"):
        torch.bincount(indices(), weights=values())
    large = torch.empty(1 << 44, dtype=torch.uint8, pin_memory=True)
    assert large.is_pinned()
    del large
    torch.accelerator.empty_host_cache()


def lose() -> None:
    values()[torch.tensor([5], device="cuda")]
    torch.cuda.synchronize()


@contextmanager
def lost() -> Iterator[None]:
    sim.enable("1GiB", device="cuda")
    with pytest.raises(torch.AcceleratorError):
        lose()
    try:
        yield
    finally:
        sim.enable("1GiB", device="cuda")


def dies(run: Run) -> None:
    with pytest.raises(torch.AcceleratorError, match="device-side assert triggered") as found:
        run()
    assert found.value.error_code == 710  # cudaErrorAssert


@case
def a_lost_device_answers_every_call_with_its_error() -> None:
    event, stream = torch.cuda.Event(), torch.cuda.Stream()
    event.record()
    with lost():
        for call in (
            event.record,
            event.query,
            event.synchronize,
            lambda: stream.wait_event(event),
            stream.query,
            stream.synchronize,
            torch.cuda.mem_get_info,
            torch.cuda.empty_cache,
            lambda: torch.empty(4, pin_memory=True),
            lambda: torch.ones(4, device="cuda"),
        ):
            dies(call)
        assert torch.cuda.memory_allocated() >= 0  # torch's own figures ask no device


@case
def the_error_of_a_lost_device_comes_through_the_library() -> None:
    arena = SlabArena()
    optimizer = torch.optim.SGD([values().requires_grad_()], lr=0.1, momentum=0.9)
    with lost():
        for call in (
            residency.memory_state,
            residency.reclaim,
            lambda: residency.reclaim("1MiB"),
            lambda: residency.hand_off("1MiB", timeout=60).__enter__(),
            lambda: arena.reserve([4096]),
            lambda: Staging(4096, pin=True),
            lambda: residency.offload_optimizer(optimizer).prime(),
        ):
            started = time.monotonic()
            dies(call)
            assert time.monotonic() - started < 20  # nobody waits for what cannot come


@case
def a_phase_lets_the_error_of_a_lost_device_pass_and_measures_no_more() -> None:
    kept = ValueError("the body's own")
    with lost(), pytest.raises(ValueError, match="own"), residency.phase("step"):
        raise kept
    _phase.boundaries.is_enabled = True


@case
def a_hand_off_whose_body_loses_the_device_says_so_and_keeps_what_was_parked() -> None:
    layer = nn.Linear(8, 8).cuda()
    before = layer.weight.detach().cpu()
    free = torch.cuda.mem_get_info()[0]
    started, need = time.monotonic(), free + torch.cuda.memory_reserved() - MIB
    with (
        pytest.raises(residency.HandOffError, match="device-side assert") as found,
        residency.hand_off(need, park=[layer], timeout=60),
    ):
        lose()
    assert time.monotonic() - started < 20
    sim.enable("1GiB", device="cuda")
    found.value.retry()
    assert torch.equal(layer.weight.detach().cpu(), before)


def main(folder: Path) -> None:
    sim.enable("1GiB", schedule="late", device="cuda")
    case.run(folder / "outcomes.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
