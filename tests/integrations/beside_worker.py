"""Other packages that move bytes between host and device in the same run, in one process in which
the simulator is CUDA: the run ends at the bits of one without them, or is refused by name.

test_beside.py reads what became of each case.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl.models.activation_offloading import OffloadActivations
from worker_cases import Cases, optional, take_device

import residency
from residency import RefusedError

torchao_optim: Any = optional("torchao.optim")
case = Cases()
Beside = Callable[[torch.nn.Module], AbstractContextManager[Any]]
_CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    vocab_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
)
_NUM_STEPS = 4


def adapted_model() -> torch.nn.Module:
    torch.manual_seed(0)
    model = LlamaForCausalLM(_CONFIG).cuda()
    model.enable_input_require_grads()
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"])).cuda()


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def values_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert [n for n in expected if not torch.equal(found[n], expected[n])] == []


def trained(model: torch.nn.Module, optimizer: Any, beside: Beside, folder: Path | None) -> None:
    """Takes the steps, with a save after each."""
    draws = torch.Generator().manual_seed(3)
    checkpointer = None if folder is None else residency.Checkpointer(folder)
    with nullcontext() if checkpointer is None else checkpointer:
        for step in range(1, _NUM_STEPS + 1):
            ids = torch.randint(0, 256, (2, 32), generator=draws).cuda()
            with beside(model):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            if checkpointer is not None:
                checkpointer.save(step, {"model": model, "optimizer": optimizer})


def judged(beside: Beside) -> None:
    """Trains stock, and offloaded with saves beside the other; restores the newest save."""
    stock = adapted_model()
    trained(stock, adamw(stock), lambda _: nullcontext(), None)
    expected = values_of(stock)
    with tempfile.TemporaryDirectory() as folder:
        model = adapted_model()
        optimizer = residency.offload_optimizer(adamw(model), bucket="64KiB")
        trained(model, optimizer, beside, Path(folder))
        assert_same(values_of(model), expected)
        fresh = adapted_model()
        state = {"model": fresh, "optimizer": residency.offload_optimizer(adamw(fresh))}
        with residency.Checkpointer(folder) as checkpointer:
            checkpointer.restore(state)
        assert_same(values_of(fresh), expected)


@case
def activations_that_trl_offloads() -> None:
    judged(lambda model: OffloadActivations(use_streams=False))


@case
def activations_that_trl_offloads_on_a_stream_of_its_own() -> None:
    judged(lambda model: OffloadActivations(use_streams=True))


@contextmanager
def swapped(model: torch.nn.Module) -> Iterator[None]:
    """Keeps frozen weights of layers on the host but for the layer that computes, as the trainers
    do that swap blocks: they exchange the ``data`` of parameters in hooks.
    """
    layers = [each for each in model.modules() if type(each).__name__ == "LlamaDecoderLayer"]
    frozen = [[p for p in layer.parameters() if not p.requires_grad] for layer in layers]
    homes = {p: p.data.to("cpu").pin_memory() for each in frozen for p in each}

    def bring(index: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            for parameter in frozen[index]:
                parameter.data = homes[parameter].cuda(non_blocking=True)

        return hook

    def take(index: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            for parameter in frozen[index]:
                parameter.data = homes[parameter]

        return hook

    for index, layer in enumerate(layers):
        take(index)()
        layer.register_forward_pre_hook(bring(index))
        layer.register_forward_hook(take(index))
        layer.register_full_backward_pre_hook(bring(index))
        layer.register_full_backward_hook(take(index))
    yield


@case
def frozen_layers_that_are_swapped_to_the_host() -> None:
    seen: list[torch.nn.Module] = []

    def once(model: torch.nn.Module) -> AbstractContextManager[None]:
        if model in seen:
            return nullcontext()
        seen.append(model)
        return swapped(model)

    judged(once)
    frozen = [p for p in seen[0].parameters() if not p.requires_grad]
    assert sum(p.is_cpu for p in frozen) == 3 * 9  # of three layers, between steps


def steps_of_torchao(model: torch.nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 128, generator=torch.Generator().manual_seed(step))
        model(x.cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def small_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 8)).cuda()


def torchao_run() -> tuple[torch.nn.Module, Any]:
    model = small_model()
    return model, torchao_optim.CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW)


@case
def the_optimizer_that_torchao_offloads_is_refused() -> None:
    model, optimizer = torchao_run()
    steps_of_torchao(model, optimizer, range(2))
    before = torch.cuda.memory_allocated()
    with pytest.raises(
        RefusedError, match=r"CPUOffloadOptimizer has no attribute state.*torch\.opt"
    ):
        residency.offload_optimizer(optimizer)
    with pytest.raises(RefusedError, match=r"CPUOffloadOptimizer has no .* park its model alone"):
        residency.park(optimizer)
    assert torch.cuda.memory_allocated() == before
    residency.park(model)
    residency.unpark(model)
    steps_of_torchao(model, optimizer, range(2, 3))


@case
def a_run_with_the_optimizer_that_torchao_offloads_is_saved_and_restored_by_two_calls() -> None:
    stock, optimizer = torchao_run()
    steps_of_torchao(stock, optimizer, range(6))
    expected = values_of(stock)
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer = torchao_run()
        steps_of_torchao(model, optimizer, range(3))
        with residency.Checkpointer(folder) as checkpointer:
            checkpointer.save(3, {"model": model, "optimizer": optimizer})
        model, optimizer = torchao_run()
        before = values_of(model)
        with residency.Checkpointer(folder) as checkpointer:
            with pytest.raises(RefusedError, match="restore its model first"):
                checkpointer.restore({"model": model, "optimizer": optimizer})
            assert_same(values_of(model), before)
            model = small_model()  # without the hooks of the other optimizer
            checkpointer.restore({"model": model})
            optimizer = torchao_optim.CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW)
            checkpointer.restore({"optimizer": optimizer})
        steps_of_torchao(model, optimizer, range(3, 6))
    assert_same(values_of(model), expected)


def main(folder: Path) -> None:
    take_device("1GiB", face="cuda", check_races=True)
    case.run(folder / "case0.json")


if __name__ == "__main__":
    main(Path(sys.argv[4]))
