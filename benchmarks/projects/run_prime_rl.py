"""Prime-rl's own optimizer factory, scheduler and checkpoints: ``KIND`` is plain, stock or ours.

Real are ``setup_optimizer``, ``CPUOffloadOptimizer`` (stock), ``CheckpointManager`` with its
``AppState``, and ``setup_scheduler``. The trainers' ``main`` is not run: it needs vLLM. The model
is six linear layers under FSDP2.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.projects.lab import BUCKET, Picture, enable, interrupted, local_copy, meet, write
from benchmarks.projects.stand_ins import StandIns
from residency.integrations.prime_rl import offload_built_by

STAND_INS = StandIns(
    "dion wandb vllm verifiers renderers torchtitan fla ring_flash_attn deep_ep flash_attn "
    "tilelang prime openai zmq torchvision"
)
WIDTH, DEPTH, RATE = 512, 6, 1e-2


class PrimeRun:
    """A model with what prime-rl builds for it, saves and loads."""

    def __init__(self, kind: str) -> None:
        from prime_rl.configs.trainer import AdamWConfig, LinearSchedulerConfig
        from prime_rl.trainer import ckpt, optim, scheduler

        torch.manual_seed(0)
        layers = [m for _ in range(DEPTH) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self.model = nn.Sequential(*layers).to("cuda")
        mesh = init_device_mesh("cuda", (torch.distributed.get_world_size(),))
        for layer in self.model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        setup: Any = optim.setup_optimizer
        if kind == "ours":
            setup = offload_built_by(setup, bucket=BUCKET)
        config = AdamWConfig(lr=RATE, max_norm=1.0)
        named = list(self.model.named_parameters())
        self.optimizer, _ = setup(
            config,
            named,
            None,
            cpu_offload=kind == "stock",
            full_offload_config=None,
            model=self.model,
        )
        schedule = LinearSchedulerConfig(warmup_steps=2, decay_steps=6)
        self.schedule = scheduler.setup_scheduler(self.optimizer, schedule, 10, RATE)
        self.progress = ckpt.Progress()
        self._ckpt = ckpt
        self._base = getattr(self.optimizer, "base_optimizer", self.optimizer)

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            rows = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)).to("cuda")
            found = self.model(rows)
            loss = found.square().mean() + found.mean()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.progress.step = step
            self.progress.total_tokens += len(rows)
            losses.append(loss.item())
        return losses

    def _manager(self, folder: Path) -> Any:
        from prime_rl.configs.trainer import CheckpointConfig

        return self._ckpt.setup_ckpt_manager(folder, CheckpointConfig(interval=1))

    def save(self, folder: Path) -> None:
        held = (self.model, [self.optimizer], self.schedule, self.progress)
        self._manager(folder).save(3, *held)

    def load(self, folder: Path) -> None:
        held = (self.model, [self.optimizer], self.schedule, self.progress)
        self._manager(folder).load(3, *held)

    def picture(self) -> Picture:
        found = {n: local_copy(p) for n, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for key, value in self._base.state.get(parameter, {}).items():
                found[f"{name}.{key}"] = local_copy(value)
        return found

    def rates(self) -> list[float]:
        progress = dataclasses.astuple(self.progress)
        return [*(group["lr"] for group in self._base.param_groups), *map(float, progress)]


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    enable()
    STAND_INS.install()
    meet(folder, kind)
    from prime_rl.utils import logger

    logger.setup_logger("warning")
    result = interrupted(lambda is_fresh: PrimeRun(kind), folder, kind)
    write(folder, kind, result, STAND_INS.used)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
