"""GRPO of TRL with its own ``VLLMGeneration``, and an engine that stands in for vLLM's, in one
process in which the simulator is CUDA; the engine's process shares the device.

test_trl_engine.py reads what became of each case.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import pytest
import torch
import trl
import vllm_stand_in
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers_lab import assert_same, set_up_process, tiny_model, tokenizer, weights
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer
from worker_cases import Cases

import residency
from residency import sim
from residency.integrations.trl import EngineHandOff, hand_off_to_engine

case = Cases()
MIB = 1 << 20
CAPACITY = 256 * MIB
WORDS = [f"w{index}" for index in range(vllm_stand_in.VOCABULARY - 3)]
SHARE = f"trl-{os.getpid()}"


def model() -> Any:
    return tiny_model(
        vocab_size=vllm_stand_in.VOCABULARY, hidden_size=512, intermediate_size=1536, head_dim=64
    )


STATE_BYTES = 2 * sum(p.nbytes for p in model().parameters())  # AdamW's moments


@contextmanager
def engine_of(num_bytes: int) -> Iterator[None]:
    """TRL finds the stand-in where it looks for vLLM."""
    settings = {"share": SHARE, "capacity": CAPACITY, "num_bytes": num_bytes}
    llm, found = vllm_stand_in.LLM, {"is_vllm_available": lambda *given: True}
    made = {"LLM": llm, "SamplingParams": vllm_stand_in.SamplingParams, **found}
    with (
        mock.patch.dict(vars(vllm_generation), made),
        mock.patch.dict(vars(grpo_trainer), found),
        mock.patch.dict(llm.settings, settings),
    ):
        yield


def variety(completions: list[str], **others: Any) -> list[float]:
    return [float(len(set(each))) for each in completions]


def trainer_of(folder: str, **settings: Any) -> Any:
    torch.manual_seed(1)
    rows = datasets.Dataset.from_dict({"prompt": [" ".join(WORDS[i : i + 3]) for i in range(8)]})
    given: dict[str, Any] = {
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 4,
        "learning_rate": 1e-3,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": True,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    return trl.GRPOTrainer(
        model(),
        args=trl.GRPOConfig(output_dir=folder, **{**given, **settings}),
        processing_class=tokenizer(WORDS),
        reward_funcs=variety,
        train_dataset=rows,
    )


@contextmanager
def made(num_bytes: int, **settings: Any) -> Iterator[Any]:
    gc.collect()  # the trainer before
    torch.accelerator.empty_cache()
    AcceleratorState._reset_state(True)
    # TRL writes there which rank this is, and accelerate would make a group of one.
    environment = mock.patch.dict(os.environ)
    with environment, tempfile.TemporaryDirectory() as folder, engine_of(num_bytes):
        trainer = trainer_of(folder, **settings)
        try:
            yield trainer
        finally:
            trainer.vllm_generation.llm.end()


@contextmanager
def flushes() -> Iterator[list[int]]:
    """Counts how often the allocator's cache is emptied."""
    calls: list[int] = []
    empty = torch.accelerator.empty_cache

    def counted() -> None:
        calls.append(torch.accelerator.memory_reserved() - torch.accelerator.memory_allocated())
        empty()

    with mock.patch.object(torch.accelerator, "empty_cache", counted):  # in CUDA's place as well
        yield calls


def stock_run() -> tuple[dict[str, Tensor], int]:
    """The weights of a run with a small engine, and the most that a wake-up found reserved."""
    with made(4 * MIB) as trainer:
        trainer.train()
        return weights(trainer.model), max(trainer.vllm_generation.llm.held_at_wakes)


def stock_has_no_room(need: int) -> bool:
    with made(need) as trainer, pytest.raises(vllm_stand_in.EngineOutOfMemory):
        trainer.train()
    return True


@case
def an_engine_wakes_beside_the_trainer_where_stock_code_has_no_room_and_the_bits_are_the_same() -> (
    None
):
    expected, held = stock_run()
    # Half of the optimizer's state is too much beside it.
    need = CAPACITY - held + STATE_BYTES // 2
    need -= need % vllm_stand_in.WEIGHTS_SHARE
    assert stock_has_no_room(need)
    with made(need) as trainer:
        handed = hand_off_to_engine(trainer)
        trainer.train()
        assert_same(weights(trainer.model), expected)
        done = handed.statistics()
        assert need <= done.need_bytes <= need + 2 * 2 * MIB  # of two blocks, each in segments
        assert done.num_hand_offs == 3
        # Before the first step there is no state.
        assert STATE_BYTES // 2 <= done.parked_bytes <= 2 * (STATE_BYTES + 64 * 512)
        states = trainer.optimizer.optimizer.state.values()
        assert all(each["exp_avg"].is_cuda for each in states)
        handed.remove()


@case
def where_the_bytes_are_free_nothing_moves_and_no_cache_is_emptied() -> None:
    with made(4 * MIB) as trainer:
        with flushes() as stock:
            trainer.train()
        assert len(stock) == 3 + 1  # before each sync, and one of the Trainer's at the beginning
        handed = hand_off_to_engine(trainer, "8MiB")
        with flushes() as calls:
            trainer.train()
        assert len(calls) == 1
        assert handed.statistics().num_hand_offs == 3
        assert handed.statistics().freed_bytes == 0
        handed.remove()


@case
def an_offloaded_optimizer_costs_nothing_to_park() -> None:
    from residency.integrations.transformers import ResidencyCallback

    expected, held = stock_run()
    need = CAPACITY - held + STATE_BYTES // 2
    need -= need % vllm_stand_in.WEIGHTS_SHARE
    with made(need) as trainer:
        trainer.add_callback(ResidencyCallback(bucket="1MiB"))
        handed = hand_off_to_engine(trainer)
        trainer.train()
        assert_same(weights(trainer.model), expected)
        assert handed.statistics().parked_bytes == 0
        handed.remove()


@case
def bytes_that_cannot_be_reached_are_an_error_before_the_engine_takes_any() -> None:
    with made(4 * MIB) as trainer:
        handed = hand_off_to_engine(trainer, CAPACITY)
        with pytest.raises(residency.HandOffError, match="too few") as caught:
            trainer.train()
        assert "vllm_gpu_memory_utilization" in " ".join(caught.value.__notes__)
        assert not trainer.vllm_generation.llm.awake
        handed.remove()


@case
def a_wake_up_that_fails_brings_back_what_was_parked() -> None:
    with made(4 * MIB) as trainer:
        trainer.train()
        state = [v for s in trainer.optimizer.optimizer.state.values() for v in s.values()]
        before = [value.detach().cpu().clone() for value in state]
        llm = trainer.vllm_generation.llm
        # More than the hand-off was told of.
        llm.num_bytes, held = 2 * CAPACITY, torch.accelerator.memory_allocated()
        handed = hand_off_to_engine(trainer, CAPACITY - held + STATE_BYTES // 2)
        with pytest.raises(vllm_stand_in.EngineOutOfMemory):
            trainer.train()
        assert handed.statistics().parked_bytes >= STATE_BYTES // 2
        assert all(value.is_cuda for value in state if value.dim())
        assert all(map(torch.equal, before, (value.cpu() for value in state)))
        handed.remove()


@case
def removed_it_leaves_trls_functions_as_they_were() -> None:
    with made(4 * MIB) as trainer:
        generation, flush = trainer.vllm_generation, vllm_generation.empty_cache
        before = dict(vars(generation)), dict(vars(generation.llm))
        handed = hand_off_to_engine(trainer, "1MiB")
        assert vllm_generation.empty_cache is not flush
        with pytest.raises(residency.RefusedError, match=r"already.*remove\(\)"):
            hand_off_to_engine(trainer, "1MiB")
        with flushes() as calls:
            vllm_generation.empty_cache()  # of an engine that nobody hands anything
        assert len(calls) == 1
        handed.remove()
        handed.remove()
        assert (vars(generation), vars(generation.llm)) == before
        assert vllm_generation.empty_cache is flush


@case
def engines_that_cannot_be_handed_anything_are_refused_with_the_setting() -> None:
    version = f"trl {trl.__version__}"
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(folder, use_vllm=False)
        with pytest.raises(ValueError, match="use_vllm=True") as caught:
            hand_off_to_engine(trainer)
        assert version in str(caught.value)
    with made(4 * MIB) as trainer:
        generation = trainer.vllm_generation
        with pytest.raises(residency.InvalidArgumentError, match="need"):
            hand_off_to_engine(trainer, "4 GB")
        for name, value, says in (
            ("mode", "server", "vllm_mode"),
            ("enable_sleep_mode", False, "vllm_enable_sleep_mode=True"),
            ("_llm_weights_sleeping", False, "before training, or pass need="),
            ("accelerator", None, f"{version} has no VLLMGeneration.accelerator"),
            ("llm", object(), f"{version} has no VLLMGeneration.llm.wake_up"),
        ):
            with (
                mock.patch.object(generation, name, value),
                pytest.raises(residency.RefusedError, match=says),
            ):
                hand_off_to_engine(trainer)
        assert isinstance(hand_off_to_engine(trainer), EngineHandOff)


def main(folder: Path) -> None:
    set_up_process()
    sim.enable(CAPACITY, share=SHARE, device="cuda", context=0, workspaces=False, check_races=True)
    logging.getLogger("residency").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    case.run(folder / "case0.json")


if __name__ == "__main__":
    main(Path(sys.argv[4]))
