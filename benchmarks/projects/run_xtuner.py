"""XTuner's own ``TrainEngine``: ``KIND`` is plain, stock (``swap_optimizer=True``) or ours.

Real are the engine with its ``train_step``, ``clip_grad_norm``, ``step_optimizer``, ``save_dcp``,
``load_dcp`` and ``put_optimizer_to_device``, ``SwapAdamW``, the configs, and a Qwen3 model of three
layers under FSDP2. The engine that resumes is built with another rate, which a load has to replace.

With a third argument it is another run: ``twice`` resumes, saves and resumes again, at one rate;
``RANK`` of two ranks saves and loads in two engines.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.projects.lab import (
    BUCKET,
    NUM_STEPS,
    Picture,
    differing,
    enable,
    interrupted,
    local_copy,
    meet,
    write,
)
from benchmarks.projects.rows import RESUMED
from benchmarks.projects.stand_ins import StandIns

STAND_INS = StandIns(
    "ray flash_attn flash_attn_interface deep_ep grouped_gemm fla torchvision liger_kernel "
    "torch_npu timm sentencepiece pkg_resources tilelang cv2 tvm"
)
RATE, RATE_OF_THE_FRESH, FALLS_BY = 1e-3, 7e-3, 0.9
VOCABULARY, NUM_TOKENS = 512, 64


def _model_config() -> Any:
    from xtuner.v1.model.dense.qwen3 import Qwen3DenseConfig
    from xtuner.v1.module import MHAConfig

    attention = MHAConfig(
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        qk_norm=True,
        attn_impl="eager_attention",
    )
    return Qwen3DenseConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        num_hidden_layers=3,
        hidden_size=256,
        intermediate_size=1024,
        rms_norm_eps=1e-6,
        hidden_act="silu",
        compile_cfg=False,
        attention=attention,
    )


def _optimizer_config(kind: str, rate: float) -> Any:
    if kind == "ours":
        from residency.integrations.xtuner import OffloadedAdamWConfig

        return OffloadedAdamWConfig(lr=rate, bucket=BUCKET)
    from xtuner.v1.config import AdamWConfig

    return AdamWConfig(lr=rate, swap_optimizer=kind == "stock")


class XtunerRun:
    """XTuner's engine, with a schedule as its trainer has one, or at one rate."""

    def __init__(self, kind: str, *, rate: float = RATE, scheduled: bool = True) -> None:
        from xtuner.v1.config import FSDPConfig
        from xtuner.v1.engine.train_engine import TrainEngine

        sharding = FSDPConfig(cpu_offload=False, torch_compile=False, recompute_ratio=0.0)
        config = _optimizer_config(kind, rate)
        self.engine = TrainEngine(model_cfg=_model_config(), optim_cfg=config, fsdp_cfg=sharding)
        self.optimizer = self.engine.optimizer
        torch.manual_seed(0)
        for parameter in self.engine.model.parameters():
            shape = parameter.shape
            values = torch.randn(shape) * 0.05 if len(shape) > 1 else torch.ones(shape)
            parts = values.chunk(dist.get_world_size())
            with torch.no_grad():
                parameter.to_local().copy_(parts[dist.get_rank()])
        self.schedule = self._schedule(-1) if scheduled else None

    def _schedule(self, last_epoch: int) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda epoch: FALLS_BY**epoch, last_epoch=last_epoch
        )

    def train(self, steps: range) -> list[float]:
        from xtuner.v1.data_proto import SequenceContext
        from xtuner.v1.loss.ce_loss import CELossConfig
        from xtuner.v1.model.base import ModelItem

        losses = []
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            ids = torch.randint(3, VOCABULARY, (1, NUM_TOKENS + 1), generator=generator)
            context = SequenceContext.from_input_ids((ids[:, :-1],), device="cuda")
            config = CELossConfig()
            loss = config.build(data={"shifted_labels": ids[:, 1:].to("cuda")}, sp_mesh=None)
            (loss,) = config.loss_ctx_cls.build_batches([loss])
            item = ModelItem(seq_ctx=context, loss_ctx={"lm": loss})
            info = self.engine.train_step([item])
            self.engine.step_optimizer(self.engine.clip_grad_norm())
            if self.schedule is not None:
                self.schedule.step()
            losses.append(float(info["total_loss"]))
        return losses

    def save(self, folder: Path) -> None:
        self.engine.save_dcp(folder)
        assert self.is_left_alone()

    def load(self, folder: Path) -> None:
        self.engine.load_dcp(folder)
        if self.schedule is not None:
            self.schedule = self._schedule(NUM_STEPS - 1)  # as XTuner's trainer resumes it

    def is_left_alone(self) -> bool:
        """Says whether the engine's own mover left an optimizer that lives on the host."""
        if not self.engine.optim_cfg.swap_optimizer:
            return True
        return not self.engine.put_optimizer_to_device("cpu")

    def picture(self) -> Picture:
        """Returns what ``state_dict`` says, which is what a save would hold."""
        found = {}
        states = self.optimizer.state_dict()["state"]
        for index, (name, parameter) in enumerate(self.engine.model.named_parameters()):
            found[name] = local_copy(parameter)
            for key, value in states.get(index, {}).items():
                if value is not None:  # of `SwapAdamW`: the state of a variant that is off
                    found[f"{name}.{key}"] = local_copy(value)
        return found

    def stepped_with(self) -> Picture:
        """Returns the moments that the next step takes, wherever they are."""
        own = vars(self.optimizer).get("_param_to_cpu_states_map", self.optimizer.state)
        return {
            f"{name}.{key}": local_copy(own[parameter][key])
            for name, parameter in self.engine.model.named_parameters()
            for key in ("exp_avg", "exp_avg_sq")
        }

    def rates(self) -> list[float]:
        """Returns the rates that the next step takes."""
        # `SwapAdamW` alone has this mapping from parameters to groups.
        own = vars(self.optimizer).get("_param_to_group_map")
        groups = self.optimizer.param_groups if own is None else own.values()
        return sorted({group["lr"] for group in groups})


def twice(kind: str, folder: Path) -> dict[str, Any]:
    """Resumes after three steps, saves after six, resumes again: all at one rate."""
    once, again = folder / f"once-{kind}", folder / f"again-{kind}"
    whole = XtunerRun(kind, scheduled=False)
    whole.train(range(NUM_STEPS))
    whole.save(once)
    moments = whole.stepped_with()
    resumed = XtunerRun(kind, scheduled=False)
    resumed.load(once)
    differ = {
        "moments that the first step after a load takes": differing(resumed.stepped_with(), moments)
    }
    ends = []
    for run in (whole, resumed):
        run.train(range(NUM_STEPS, 2 * NUM_STEPS))
        ends.append(run.picture())
    parameters = [{n: p[n] for n, _ in whole.engine.model.named_parameters()} for p in ends]
    differ["parameters three steps after a resume"] = differing(*parameters)
    differ["moments in the next save"] = differing(ends[1], ends[0])
    resumed.save(again)
    resumed = XtunerRun(kind, scheduled=False)
    resumed.load(again)
    for run in (whole, resumed):
        run.train(range(2 * NUM_STEPS, 3 * NUM_STEPS))
    parameters = [
        {n: local_copy(p) for n, p in run.engine.model.named_parameters()}
        for run in (resumed, whole)
    ]
    differ["parameters three steps after a second resume"] = differing(*parameters)
    return {"differ": differ}


def on_ranks(kind: str, folder: Path) -> dict[str, Any]:
    """Saves on two ranks and loads into fresh engines."""
    whole = XtunerRun(kind, scheduled=False)
    whole.train(range(NUM_STEPS))
    whole.save(folder / f"ranks-{kind}")
    moments = whole.stepped_with()
    resumed = XtunerRun(kind, scheduled=False)
    resumed.load(folder / f"ranks-{kind}")
    found, rank = resumed.stepped_with(), f"rank {dist.get_rank()} of two"
    others: list[Any] = [None, None]
    dist.all_gather_object(others, moments)
    differ = {f"{rank}: moments after a load": differing(found, moments)}
    num_other, count = differing(found, others[1 - dist.get_rank()])
    differ[f"{rank}: of these, the other rank's"] = [count - num_other, count]
    for run in (whole, resumed):
        run.train(range(NUM_STEPS, 2 * NUM_STEPS))
    differ[f"{rank}: {RESUMED}"] = differing(resumed.picture(), whole.picture())
    return {"differ": differ}


def main() -> None:
    kind, folder, *more = sys.argv[1:]
    enable()
    os.environ["XTUNER_USE_FA3"] = "0"  # flash attention 3
    STAND_INS.install()
    ray: Any = importlib.import_module("ray.util.placement_group")
    if "ray" in STAND_INS.used:
        ray.VALID_PLACEMENT_GROUP_STRATEGIES = {"PACK", "SPREAD"}  # XTuner asks for a set
    where = Path(folder)
    is_rank = bool(more) and more[0].isdigit()
    rank = int(more[0]) if is_rank else 0
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="2" if is_rank else "1")
    name = "-".join([kind, *(["ranks"] if is_rank else more)])
    meet(where, name, rank=rank, num_ranks=2 if is_rank else 1)
    if is_rank:
        result, name = on_ranks(kind, where), f"{kind}-rank{rank}"
    elif more:
        result = twice(kind, where)
    else:
        result = interrupted(
            lambda is_fresh: XtunerRun(kind, rate=RATE_OF_THE_FRESH if is_fresh else RATE),
            where,
            kind,
        )
    write(where, name, result, STAND_INS.used)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
