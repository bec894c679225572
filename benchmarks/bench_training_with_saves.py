"""Times the step after a save beside a step alone, in a loop that reads a number in each pass.

A decoder like Qwen3-0.6B's (28 layers of width 1,024, 151,936 words, 0.54e9 parameters in fp32 with
AdamW: 6.01 GiB) reads one number of its input, as Transformers does to make its mask. With the
copies of a save as they are queued today, and in turn (``RESIDENCY_COPIES_IN_TURN``). On a card the
host's clock counts, and a file is written; else the simulated clock of a dry run, for links that
serve in order of issue and for those that serve what is ready, and a snapshot is taken.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

import residency
from benchmarks import figures
from benchmarks.device import now
from residency import _device, sim
from residency._transfer import _lanes
from residency._units import format_bytes

WIDTH, LAYERS, WORDS, HEADS, INNER = 1024, 28, 151_936, 16, 3072
STEPS_BEFORE, SAVES, STEPS_BETWEEN = 3, 3, 5
# Of an H100: what its memory and its tensor cores do in practice.
MEMORY_RATE, OPERATION_RATE = 3_300_000_000_000, 400e12


class Block(nn.Module):
    """Attends to what came before, and has a gated layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, INNER, bias=False)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        """Takes and returns ``[batch, length, width]``."""
        batch, length, _ = value.shape
        heads = (
            self.qkv(self.before(value)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        )
        mixed = functional.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        value = value + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        inner = self.between(value)
        return value + self.down(functional.silu(self.gate(inner)) * self.up(inner))


class Decoder(nn.Module):
    """A language model that reads a number before its second block."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.last = nn.RMSNorm(WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        """Takes ``[batch, length]``; returns the loss."""
        value = self.words(words)
        for index, block in enumerate(self.blocks):
            if index == 1:
                words.min().item()
            value = block(value)
        logits = functional.linear(self.last(value), self.words.weight)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


class Training:
    """A training loop over one batch.

    Attributes:
        state: What is saved.
    """

    def __init__(self, device: torch.device, tokens: int) -> None:
        with torch.device("meta"):
            self._model = Decoder()
        self._model.to_empty(device=device)
        if not _device.is_simulated():
            with torch.no_grad():
                for parameter in self._model.parameters():
                    nn.init.normal_(parameter, std=0.02)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=True)
        self._words = torch.zeros((1, tokens), dtype=torch.long, device=device)
        self.state = {"model": self._model, "optimizer": self._optimizer}

    def step(self) -> float:
        """Takes a step; returns its seconds."""
        begin = now()
        with torch.autocast(self._words.device.type, torch.bfloat16):
            loss = self._model(self._words)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        loss.detach().item()
        return now() - begin

    @property
    def num_bytes(self) -> int:
        """The bytes that a save has."""
        return sum(3 * parameter.nbytes for parameter in self._model.parameters())


@contextlib.contextmanager
def saving(training: Training) -> Iterator[Callable[[int], Callable[[], object]]]:
    """Gives what begins a save and returns what waits for it."""
    if _device.is_simulated():
        yield lambda step: residency.snapshot(training.state).wait
        return
    with tempfile.TemporaryDirectory() as folder, residency.Checkpointer(folder, keep=1) as saves:
        saves.prepare(training.state)
        yield lambda step: saves.save(step, training.state).wait


def measure(name: str, device: torch.device, tokens: int, *, in_turn: bool) -> None:
    """Prints a line: a step alone, the step after a save, the call, and until all is on the host
    or, on a card, on the disk.
    """
    training = Training(device, tokens)
    with mock.patch.object(_lanes, "_IS_IN_TURN", in_turn), saving(training) as save:
        for _ in range(STEPS_BEFORE):
            training.step()
        alone, after, calls, durable = [], [], [], []
        for number in range(SAVES):
            alone += [training.step() for _ in range(STEPS_BETWEEN)]
            begin = now()
            wait = save(number)
            calls.append(now() - begin)
            after.append(training.step())
            wait()
            durable.append(now() - begin)
    one, next_one = statistics.median(alone), statistics.median(after)
    print(
        f"{name:34} {tokens:6}  {1e3 * one:7.1f}  {1e3 * next_one:7.1f}  {next_one / one:5.2f} x  "
        f"{1e3 * statistics.median(calls):6.1f}  {1e3 * statistics.median(durable):8.1f}",
        flush=True,
    )
    copies = training.num_bytes / figures.link_rates(device)[1]
    figures.show(
        "step after a save" + ", in turn" * in_turn,
        f"{next_one / one:.2f} x a step of {1e3 * one:.0f} ms",
        f"{max(1.0, copies / one):.2f}",
    )


def main() -> None:
    """Prints a table, for each number of tokens."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    tokens = parser.parse_args().tokens
    found = _device.accelerator()
    print(
        "ms                                 tokens    alone    after           call   until saved"
    )
    for each in tokens:
        for ready in (False, True) if found is None else (False,):
            for in_turn in (False, True):
                device, name = found, "a card"
                if found is None:
                    name = "link serves what is ready" if ready else "link serves in order"
                    clock = sim.Clock(
                        memory_bytes_per_second=MEMORY_RATE,
                        operations_per_second=OPERATION_RATE,
                        serves_ready=ready,
                    )
                    device = sim.enable(
                        "300GiB", schedule="eager", dry=True, workspaces=False, clock=clock
                    )
                assert device is not None
                measure(name + ", in turn" * in_turn, device, each, in_turn=in_turn)
    size = Training(torch.device("meta"), 1).num_bytes
    print(f"a save has {format_bytes(size)}")


if __name__ == "__main__":
    main()
