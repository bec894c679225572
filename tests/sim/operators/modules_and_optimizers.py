"""Torch's modules and optimizers on the host and on the device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from running import Bench, NotApplicableError, judge, moved
from torch_tables import reseed, spread

_SHAPES = [(7, 5), (64, 33), (3, 4, 5), (11,), (), (0,)]
_MATRICES = [(7, 5), (64, 33), (16, 16)]
_NUM_STEPS = 3


def run_module(
    info: Any, dtype: torch.dtype, variant: str, bench: Bench, most: int
) -> Iterator[tuple[str, str, Any]]:
    """Runs forward and backward in the mode ``train`` or ``eval``; compares buffers, too."""
    if dtype not in info.dtypes:
        return
    is_training = variant == "train"
    reseed()
    inputs = info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=True, training=is_training
    )
    given = [i for i in inputs if i.forward_input is not None]
    is_lazy = issubclass(info.module_cls, torch.nn.modules.lazy.LazyModuleMixin)
    for sample in spread(given, most):

        def make(device: torch.device, sample: Any = sample) -> Any:
            torch.manual_seed(3)
            made = sample.constructor_input
            module = info.module_cls(*made.args, **made.kwargs).train(is_training)
            module = (module if is_lazy else module.to(dtype)).to(device)
            args, kwargs = moved((sample.forward_input.args, sample.forward_input.kwargs), device)
            parameters = [] if is_lazy else list(module.parameters())
            return SimpleNamespace(module=module, input=parameters, args=args, kwargs=kwargs)

        def call(made: Any) -> Any:
            return made.module(*made.args, **made.kwargs), list(made.module.buffers())

        yield judge(bench, call, make, grad=True)


def run_optimizer(
    info: Any, dtype: torch.dtype, variant: str, bench: Bench, most: int
) -> Iterator[tuple[str, str, Any]]:
    """Steps in the implementation that the variant names; compares parameters and state."""
    if info.only_supports_sparse_grads:
        return
    if variant != "loop" and variant not in info.supported_impls:
        raise NotApplicableError
    options: dict[str, bool] = {variant: True}
    if variant == "loop":
        options = {"foreach": False} if "foreach" in info.supported_impls else {}
    inputs = [
        i
        for i in info.optim_inputs_func(device="cpu")
        if not {"capturable", "differentiable"} & i.kwargs.keys() and "capturable" not in i.desc
    ]
    groups = (False, True) if info.supports_param_groups else (False,)
    for given, in_groups in spread(list(itertools.product(inputs, groups)), most):

        def make(device: torch.device, given: Any = given) -> Any:
            shapes = _MATRICES if info.optim_cls is torch.optim.Muon else _SHAPES
            if info.optim_cls is torch.optim.Adafactor:
                shapes = [shape for shape in shapes if shape != (0,)]  # it divides by the number
            generator = torch.Generator().manual_seed(11)
            parameters = [
                torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype).to(device))
                for s in shapes
            ]
            kwargs = {**moved(given.kwargs, device), **options}
            return SimpleNamespace(input=parameters, args=(), kwargs=kwargs)

        def call(made: Any, in_groups: bool = in_groups) -> Any:
            return _stepped(info, made.input, made.kwargs, in_groups)

        yield judge(bench, call, make, grad=False)


def _stepped(
    info: Any, parameters: list[torch.nn.Parameter], kwargs: Any, in_groups: bool
) -> list[torch.Tensor]:
    given: list[Any] = list(parameters)
    if in_groups:
        given = [{"params": parameters[:2], "lr": 0.003}, {"params": parameters[2:]}]
    optimizer = info.optim_cls(given, **kwargs)
    generator = torch.Generator().manual_seed(13)
    for _ in range(_NUM_STEPS):
        targets = [torch.randn(p.shape, generator=generator).to(p) for p in parameters]

        def closure(targets: list[torch.Tensor] = targets) -> torch.Tensor:
            optimizer.zero_grad()
            pairs = zip(parameters, targets, strict=True)
            loss = torch.stack([((p - t) ** 2).sum() for p, t in pairs]).sum()
            loss.backward()
            return loss

        if info.step_requires_closure:
            optimizer.step(closure)
            continue
        for parameter, target in zip(parameters, targets, strict=True):
            parameter.grad = target
        optimizer.step()
    state = [
        value if isinstance(value, torch.Tensor) else torch.tensor(value)
        for entries in optimizer.state_dict()["state"].values()
        for _, value in sorted(entries.items())
        if isinstance(value, torch.Tensor | float | int)
    ]
    return [*(p.detach() for p in parameters), *state]
