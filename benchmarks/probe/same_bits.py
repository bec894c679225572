"""Probes of exactness: a streamed step beside the plain one, on this device's own kernels.

A kernel may take another path by sizes, strides and alignment. So parameters have odd shapes, and
some have gradients with other strides than their own, which sends a whole ``foreach`` group of the
plain optimizer to the slow path.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim

import residency
from benchmarks.probe.probed import ProbedDevice
from residency._units import MIB

_SHAPES = ((33,), (), (128, 40), (7, 5, 3), (1000,))
_CASES: tuple[tuple[type[optim.Optimizer], dict[str, Any]], ...] = (
    (optim.AdamW, {}),
    (optim.AdamW, {"foreach": False}),
    (optim.AdamW, {"fused": True}),
    (optim.AdamW, {"amsgrad": True}),
    (optim.Adam, {}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (optim.RMSprop, {"centered": True}),
    (optim.Adagrad, {}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.Adamax, {}),
    (optim.Adadelta, {}),
    (optim.Rprop, {}),
    (optim.ASGD, {}),
    (optim.Adafactor, {}),
    (optim.Muon, {}),
)


_SMALL_CASES = (*_CASES[:3], _CASES[-1])
_NUM_STEPS = 4


def steps(bench: ProbedDevice) -> None:
    """Compares parameters and states after some steps, for each class that is offloaded."""
    for dtype in (torch.float32, torch.bfloat16):
        for is_mixed in (False, True):
            for cls, options in bench.pick(_CASES, _SMALL_CASES):
                if is_mixed and (cls is optim.Muon or options.get("fused")):
                    continue  # takes matrices alone; is refused by CUDA's kernels
                settings = ", ".join(f"{name}={value}" for name, value in options.items())
                of_dtype = str(dtype).removeprefix("torch.") + ", mixed strides" * is_mixed
                what = f"{cls.__name__}({settings}) {of_dtype}"
                run = partial(_trained, bench, cls, options, dtype, is_mixed)
                bench.attempt(what, lambda run=run: _is_same(run(False), run(True)))  # type: ignore[misc]


def _trained(
    bench: ProbedDevice,
    cls: type[optim.Optimizer],
    options: dict[str, Any],
    dtype: torch.dtype,
    is_mixed: bool,
    is_offloaded: bool,
) -> list[Tensor]:
    """Returns the parameters and states that a few steps end at, on the host."""
    parameters = _parameters(bench, dtype, is_mixed)
    if cls is optim.Muon:
        parameters = [parameter for parameter in parameters if parameter.dim() == 2]
    optimizer = cls(parameters, lr=1e-2, **options)  # type: ignore[call-arg]
    if is_offloaded:
        residency.offload_optimizer(optimizer, bucket=bench.pick("2MiB", "64KiB"))
    for seed in range(_NUM_STEPS):
        generator = torch.Generator().manual_seed(seed)
        for parameter in parameters:
            grad = torch.randn(parameter.shape, generator=generator)
            parameter.grad = grad.to(bench.device, dtype)  # contiguous, whatever its parameter is
        optimizer.step()
        torch.full((MIB,), 7.0, device=bench.device)  # what a missing wait would let through
    states = [value for p in parameters for value in dict(optimizer.state[p]).values()]
    return [torch.as_tensor(value).detach().cpu() for value in (*parameters, *states)]


def _parameters(bench: ProbedDevice, dtype: torch.dtype, is_mixed: bool) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    large = (bench.pick(2049, 65), bench.pick(1000, 100))
    made = [torch.randn(shape, generator=generator) for shape in (large, *_SHAPES)]
    if is_mixed:
        image = torch.randn(8, 4, 3, 3, generator=generator)
        made.append(image.to(memory_format=torch.channels_last))
    return [nn.Parameter(tensor.to(bench.device, dtype)) for tensor in made]


def _is_same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(
        one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))
        for one, other in zip(some, others, strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def scaled_steps(bench: ProbedDevice) -> None:
    """Compares fused steps under a ``GradScaler``, one of which it leaves out."""
    plain, streamed = _scaled(bench, False), _scaled(bench, True)
    bench.check(_is_same(plain, streamed), "GradScaler, fused, one step left out")


def _scaled(bench: ProbedDevice, is_offloaded: bool) -> list[Tensor]:
    torch.manual_seed(0)
    width = bench.pick(512, 64)
    model = nn.Linear(width, width).to(bench.device)
    optimizer = optim.AdamW(model.parameters(), fused=True)
    if is_offloaded:
        residency.offload_optimizer(optimizer, bucket="256KiB")
    scaler = torch.amp.GradScaler(bench.device.type)
    for value in (1.0, 1.0, 6e4, 1.0):  # 6e4 squared is infinite in float16
        with torch.autocast(bench.device.type, torch.float16):
            loss = model(torch.full((8, width), value, device=bench.device)).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [parameter.detach().cpu() for parameter in model.parameters()]
