"""`residency.optim`: the classes of torch.optim, made with their state on the host."""

from __future__ import annotations

import ast
import importlib
import inspect
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import residency
from residency import optim


def classes_of_torch() -> set[str]:
    return {
        name
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer
    }


def by_path(path: str) -> Any:
    """Imports a class as trainers do that take the path of one."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_every_class_of_torch_is_there_and_no_other() -> None:
    assert set(dir(optim)) == classes_of_torch() >= {"AdamW", "SGD", "Adafactor"}
    for name in classes_of_torch():
        made = by_path(f"residency.optim.{name}")
        assert made is getattr(optim, name)
        assert inspect.isclass(made)
        assert issubclass(made, getattr(torch.optim, name))
        assert made.__name__ == name
        options = inspect.signature(made).parameters
        assert {"bucket", "resident", "slots"} < options.keys()
        # SimpleTuner drops each option that this one does not name.
        assert {"self", *options} == inspect.signature(made.__init__).parameters.keys()
        assert inspect.signature(getattr(torch.optim, name)).parameters.keys() < options.keys()
    with pytest.raises(AttributeError, match=r"'AdamX'; it has .* ASGD, "):
        by_path("residency.optim.AdamX")


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adafactor", "NAdam"])
def test_what_a_class_makes_is_the_offloaded_optimizer(device: torch.device, name: str) -> None:
    def trained(make: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(16, 16).to(device)
        made = make([{"params": [model.weight], "lr": 0.05}, {"params": [model.bias]}])
        for _ in range(3):
            model(torch.ones(2, 16, device=device)).sum().backward()
            made.step()
            made.zero_grad()
        return [p.detach().cpu() for p in model.parameters()]

    def offloaded(groups: Any) -> Any:
        path = f"residency.optim.{name}"
        made = by_path(path)(groups, 0.1, weight_decay=0.1, bucket="1KiB", slots=2)
        assert isinstance(made, getattr(torch.optim, name))
        assert isinstance(made, residency.OffloadedOptimizer)
        assert isinstance(made, by_path(path))
        other = torch.optim.Rprop if name != "Rprop" else torch.optim.SGD
        assert not isinstance(made, getattr(optim, other.__name__))
        return made

    stock = getattr(torch.optim, name)
    plain = trained(lambda groups: stock(groups, 0.1, weight_decay=0.1))
    assert not isinstance(stock([torch.ones(1)]), by_path(f"residency.optim.{name}"))
    assert all(map(torch.equal, trained(offloaded), plain))


def made_as_by_kohya(kind: str, words: list[str], groups: Any, lr: float) -> tuple[str, Any]:
    """Makes an optimizer of command-line arguments as sd-scripts and musubi-tuner do."""
    options = {}
    for word in words:
        key, value = word.split("=")
        options[key] = ast.literal_eval(value)
    made = by_path(kind)
    return f"{made.__module__}.{made.__name__}", made(groups, lr=lr, **options)


@pytest.mark.parametrize("bucket", ["bucket='1KiB'", "bucket=1024"])
def test_options_are_taken_as_a_command_line_has_them(device: torch.device, bucket: str) -> None:
    words = [bucket, "resident='0'", "weight_decay=0.01", "betas=(0.9, 0.99)"]
    states = []
    for kind, own in (("residency.optim.AdamW", words), ("torch.optim.AdamW", words[2:])):
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 64).to(device)
        groups = [{"params": list(model.parameters()), "lr": 0.05}]
        name, optimizer = made_as_by_kohya(kind, own, groups, 0.1)
        assert name.startswith(kind.rpartition(".")[0])  # it stands in the metadata of a LoRA
        assert not hasattr(optimizer, "train")  # which is what a schedule-free one has
        for _ in range(2):
            model(torch.ones(2, 64, device=device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        states.append((optimizer.state_dict(), dict(model.state_dict())))
    (ours, weights), (stock, plain) = states
    assert all(torch.equal(weights[name].cpu(), plain[name].cpu()) for name in plain)
    assert ours["state"].keys() == stock["state"].keys()
    for index, state in stock["state"].items():
        assert all(torch.equal(ours["state"][index][k].cpu(), v.cpu()) for k, v in state.items())
    assert ours["param_groups"] == stock["param_groups"]


def test_options_of_neither_are_named_with_those_that_there_are() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3))]
    with pytest.raises(residency.InvalidArgumentError, match=r"'buket', 'eps_'.*bucket.*amsgrad"):
        by_path("residency.optim.AdamW")(parameters, eps_=1, buket="1KiB")


def test_a_subclass_is_refused_with_what_to_do() -> None:
    with pytest.raises(residency.InvalidArgumentError, match=r"Mine cannot .*offload_optimizer"):
        type("Mine", (by_path("residency.optim.AdamW"),), {})


def test_a_class_that_cannot_be_offloaded_is_refused_as_by_the_function() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3))]
    with pytest.raises(residency.RefusedError, match="LBFGS"):
        by_path("residency.optim.LBFGS")(parameters)


def test_the_class_of_offloaded_optimizers_says_what_to_call() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3))]
    with pytest.raises(residency.InvalidArgumentError, match=r"offload_optimizer.*optim\.AdamW"):
        residency.OffloadedOptimizer(parameters, lr=0.1)  # type: ignore[call-arg]
