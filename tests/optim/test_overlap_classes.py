"""An overlapped step of many classes, in a loop as trainers write it: scaled losses that overflow,
a schedule, parameters without gradients, and gradients that are zeroed or dropped.
"""

from typing import Any

import pytest
import torch
from overlapped import Net, Run, check_same
from torch import nn

import residency

pytestmark = pytest.mark.sim

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("Adadelta", {}),
    ("Adafactor", {}),
    ("Adagrad", {"fused": True}),
    ("Adagrad", {"lr_decay": 0.01}),
    ("Adam", {"amsgrad": True, "fused": True}),
    ("Adam", {"foreach": True}),
    ("AdamW", {"fused": True}),
    ("AdamW", {"foreach": False, "maximize": True}),
    ("Adamax", {}),
    ("ASGD", {"t0": 2}),
    ("NAdam", {"decoupled_weight_decay": True}),
    ("RAdam", {}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("RMSprop", {"foreach": True}),
    ("Rprop", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {"momentum": 0.9, "fused": True}),
    ("SGD", {"momentum": 0.9, "dampening": 0.5, "foreach": True}),
    ("Muon", {}),
    ("NAdam", {"foreach": False}),
]


def made(name: str, settings: dict[str, Any], model: Net) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if name != "Muon" or p.dim() == 2]
    for each in model.parameters():
        each.requires_grad_(any(each is one for one in parameters))
    half = len(parameters) // 2
    groups = [{"params": parameters[:half]}, {"params": parameters[half:], "weight_decay": 0.1}]
    if name in {"ASGD", "Rprop"}:
        groups[1].pop("weight_decay")
    return getattr(torch.optim, name)(groups, lr=1e-3 if name == "Muon" else 1e-2, **settings)


def train(run: Run) -> None:
    """Takes ten steps, of which two overflow, with a save and an evaluation between."""
    scaler = torch.amp.GradScaler(run.device.type, init_scale=16.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 10)
    for index in range(10):
        run.model.layers[2][0].weight.requires_grad_(index % 4 != 3)
        loss = run.model(run.batch())
        scaler.scale(loss * (float("inf") if index in {4, 7} else 1.0)).backward()
        run.losses.append(loss.detach())
        scaler.unscale_(run.optimizer)
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        scaler.step(run.optimizer)
        scaler.update()
        scheduler.step()
        run.optimizer.zero_grad(set_to_none=index % 3 != 0)
        if index == 5:
            residency.snapshot({"o": run.optimizer}).wait()
        if index == 6:
            with torch.no_grad():
                run.losses.append(run.model(run.batch()))
    assert scaler.get_scale() == 4.0


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
@pytest.mark.parametrize("how", ["overlap", pytest.param("auto", marks=pytest.mark.whole)])
@pytest.mark.parametrize(
    ("name", "settings"), SETTINGS, ids=lambda each: each if isinstance(each, str) else None
)
def test_a_loop_of_a_trainer_ends_at_the_bits_of_a_resident_one(device, name, settings, how):
    runs = []
    for kind in ("resident", how):
        torch.manual_seed(0)
        run = Run(device, "resident")
        run.optimizer = made(name, settings, run.model)
        if kind != "resident":
            stays = "auto" if kind == "auto" else 0
            residency.offload_optimizer(
                run.optimizer, bucket="24KiB", slots=2, overlap=True, resident=stays
            )
        train(run)
        if kind != "resident":
            assert run.optimizer.statistics().copied_to_device_bytes > 0
        runs.append(run)
    check_same(runs[1], runs[0])
