"""Stands in for vLLM, which needs a GPU: an ``LLM`` whose memory is another process's.

Written from what ``VLLMGeneration`` of trl 1.16.0 calls in the mode "colocate". The process has
blocks of the same simulated device, by the name of its share; which tokens come out follows from
the bits of the weights that were synced.
"""

from __future__ import annotations

import zlib
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from residency import sim
from residency._demo._child import Child, answer, messages

VOCABULARY = 16  # of tests' tokenizers
WEIGHTS_SHARE = 4  # the weights are a fourth of what it takes


class EngineOutOfMemory(RuntimeError):
    """What vLLM raises as an error of its worker's."""


class LLM:
    """An engine, awake when it is made, as vLLM's."""

    settings: ClassVar[dict[str, Any]] = {}  # share, capacity and bytes of the device

    def __init__(self, enable_sleep_mode: bool, **others: Any) -> None:
        self._child = Child("vllm_stand_in", "obey")
        self.num_bytes = self.settings["num_bytes"]
        self.ask("begin", share=self.settings["share"], capacity=self.settings["capacity"])
        self.weights: dict[str, Tensor] = {}
        self.awake: set[str] = set()
        self.held_at_wakes: list[int] = []
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self._load))
        worker = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        self.llm_engine = SimpleNamespace(model_executor=worker)
        self.wake_up()

    def ask(self, order: str, **arguments: Any) -> None:
        self._child.send(order=order, **arguments)
        if "missing" in (found := self._child.receive()):
            raise EngineOutOfMemory(found["missing"])

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.held_at_wakes.append(torch.accelerator.memory_reserved())
        for tag in tags or ["weights", "kv_cache"]:
            if tag not in self.awake:
                weights = self.num_bytes // WEIGHTS_SHARE
                size = weights if tag == "weights" else self.num_bytes - weights
                self.ask("take", tag=tag, num_bytes=size)
                self.awake.add(tag)

    def sleep(self, level: int) -> None:
        assert level == 2
        self.ask("drop")
        self.awake.clear()
        self.weights.clear()

    def _load(self, named: list[tuple[str, Tensor]]) -> None:
        assert "weights" in self.awake
        self.weights |= {name: value.detach().cpu().clone() for name, value in named}

    def reset_prefix_cache(self) -> None: ...

    def generate(self, prompts: Any, sampling_params: Any, use_tqdm: bool) -> list[Any]:
        assert self.awake == {"weights", "kv_cache"}
        assert self.weights, "the weights were dropped, and not synced again"
        bits = 0
        for name in sorted(self.weights):
            bits = zlib.crc32(self.weights[name].numpy().tobytes(), bits)
        return [
            self._output(row["prompt_token_ids"], bits + 7919 * index, sampling_params.max_tokens)
            for index, row in enumerate(prompts)
        ]

    @staticmethod
    def _output(prompt: list[int], seed: int, num_tokens: int) -> Any:
        tokens = [3 + (seed >> shift) % (VOCABULARY - 3) for shift in range(num_tokens)]
        logprobs = [{token: SimpleNamespace(rank=1, logprob=-1.0)} for token in tokens]
        made = SimpleNamespace(token_ids=tokens, logprobs=logprobs)
        return SimpleNamespace(prompt_token_ids=prompt, outputs=[made])

    def end(self) -> None:
        self._child.end()


class SamplingParams(SimpleNamespace):
    pass


def obey() -> None:
    """Is the engine's process."""
    blocks: list[Tensor] = []
    for order in messages():
        name = order.pop("order")
        found: dict[str, Any] = {}
        if name == "begin":
            sim.enable(
                order["capacity"], share=order["share"], device="cuda", context=0, workspaces=False
            )
        elif name == "take":
            try:
                blocks.append(torch.empty(order["num_bytes"], dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError as error:
                found = {"missing": str(error).partition("\n")[0]}
        else:
            blocks.clear()
            torch.cuda.empty_cache()
        answer(**found)
