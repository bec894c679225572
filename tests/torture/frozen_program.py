"""A random training over a frozen base that draws as it goes: resident, or streamed.

Both runs of a seed draw the same. Where the streamed run calls the library, the resident one, on
stock torch, does what the documentation says is the same.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import threading
from pathlib import Path
from typing import Any

import torch
from tests.torture.frozen_models import Net, some
from torch import nn
from training_programs import host_copy, noise

import residency

ACTIONS = (
    *("evaluate", "read", "load", "write", "restore", "park", "hand_off", "again", "failure"),
    *("thread", "lane", "away", "drop", "crossed", "copy", "hook", "snapshot"),
)


class Run:
    """Is one run of a seed."""

    def __init__(self, seed: int, device: torch.device, folder: Path, streamed: bool) -> None:
        self.chance = chance = random.Random(seed)
        self.device, self.folder, self.streamed = device, folder, streamed
        self.trace: list[tuple[str, Any]] = []
        self.log: list[str] = []
        self.stream: Any = None
        self.scratch: Any = torch.zeros(8, device=device)
        torch.manual_seed(seed)
        self.model = self.made()
        self.wrapped: Any = nn.Sequential(self.model) if some(chance, 0.2) else self.model
        self.begin()
        self.opt = self.optimizer()
        self.autocast = chance.choice([None, None, torch.bfloat16, torch.float16])
        if self.model.dtype is not torch.float32:
            self.autocast = None
        self.scaler = torch.amp.GradScaler(device.type, init_scale=16.0, enabled=some(chance, 0.3))
        if any(p.requires_grad and p.dtype is torch.float16 for p in self.model.parameters()):
            self.scaler = torch.amp.GradScaler(device.type, enabled=False)
        self.model.recompute = chance.choice(["", "", "plain", "reentrant"])
        self.log.append(f"{self.autocast} {self.scaler.is_enabled()} {self.model.recompute}")

    def made(self) -> Any:
        model = Net(self.chance)
        self.log.append(model.description)
        return model

    def names(self) -> list[str]:
        inner = isinstance(self.model.blocks[0], nn.ModuleDict)
        prefix = "" if self.wrapped is self.model else "0."
        return [
            f"{prefix}blocks.{i}" + (".inner" if inner else "")
            for i in range(len(self.model.blocks))
        ]

    def begin(self) -> None:
        """Moves the model to the device, or streams it."""
        chance = self.chance
        names: Any = self.names()
        if some(chance, 0.3):
            names = sorted(chance.sample(names, chance.randint(3, len(names))))
        slots, late = chance.choice([2, 2, 2, 3, 4]), some(chance, 0.2)
        if self.model.same and "inner" not in names[0] and some(chance, 0.5):
            names = None
        self.log.append(f"stream {names} {slots} late={late}")
        if not self.streamed or late:
            self.wrapped.to(self.device)
        if self.streamed:
            try:
                self.stream = residency.stream_frozen(self.wrapped, units=names, slots=slots)
            except residency.RefusedError as error:
                self.log.append(f"refused: {error}")
                self.stream = None
                self.wrapped.to(self.device)

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def optimizer(self) -> Any:
        kind, settings = self.chance.choice(
            [
                ("AdamW", {}),
                ("AdamW", {"fused": True}),
                ("SGD", {"momentum": 0.9}),
                ("AdamW", {"amsgrad": True}),
            ]
        )
        made = getattr(torch.optim, kind)(self.trained(), lr=0.01, **settings)
        offload, overlap = some(self.chance, 0.3), some(self.chance, 0.5)
        self.log.append(f"{kind} {settings} {offload=} {overlap=}")
        torch.backends.mha.set_fastpath_enabled(not (offload and overlap))  # its hooks end it
        if offload and self.streamed:
            residency.offload_optimizer(made, bucket=4096, overlap=overlap)
        return made

    def batch(self) -> torch.Tensor:
        size = self.chance.choice([1, 3, 8, 40])
        values = noise(self.chance.randrange(1 << 30), (size, self.model.width), self.model.dtype)
        values = values.pin_memory().to(self.device, non_blocking=True)
        return values.requires_grad_(self.model.recompute == "reentrant" or some(self.chance, 0.3))

    def call(self, x: torch.Tensor) -> torch.Tensor:
        kind = self.autocast or torch.bfloat16
        with torch.autocast(self.device.type, dtype=kind, enabled=self.autocast is not None):
            return self.wrapped(x)

    def way(self) -> None:
        """Draws which blocks run, and in which order."""
        chance, net = self.chance, self.model
        net.order, net.skip = list(range(len(net.blocks))), []
        if some(chance, 0.25):
            net.skip = chance.sample(net.order, chance.randint(1, len(net.order) - 1))
        if some(chance, 0.15):
            chance.shuffle(net.order)
        if some(chance, 0.2):
            net.order.insert(chance.randrange(len(net.order)), chance.choice(net.order))
        self.log.append(f"way {net.order} {net.skip}")

    def backward(self) -> None:
        chance = self.chance
        self.way()
        x = self.batch()
        y = self.call(x)
        if not y.requires_grad:
            return
        self.trace.append(("y", y.detach().clone()))
        kind = chance.choice(["plain"] * 4 + ["retain", "two", "grad", "between", "read", "inputs"])
        if self.model.recompute == "reentrant" and kind in {"retain", "two", "grad", "inputs"}:
            kind = "plain"  # stock torch refuses most of them
        self.log.append(f"backward {kind} of {x.shape[0]}")
        loss = self.scaler.scale(y.float().square().mean())
        if kind == "retain":
            loss.backward(retain_graph=True)
        elif kind == "two":
            self.scaler.scale(y.float().abs().mean()).backward(retain_graph=True)
        elif kind == "grad":
            found = torch.autograd.grad(
                loss, self.trained(), retain_graph=some(chance, 0.5), allow_unused=True
            )
            self.trace.append(("grad", host_copy(found)))
            return
        elif kind == "between":
            self.evaluate()
        elif kind == "read":
            self.read()
        if kind == "inputs":
            used = [p for p in self.trained() if some(chance, 0.5)]
            if used:
                loss.backward(inputs=used)
        else:
            loss.backward()
        self.trace.append(("loss", loss.detach().clone()))
        if x.grad is not None:
            self.trace.append(("x", x.grad.clone()))

    def iteration(self) -> None:
        chance = self.chance
        for _ in range(chance.choice([1, 1, 2, 3])):
            self.backward()
        self.finish()

    def finish(self) -> None:
        chance = self.chance
        clip, skip, none = some(chance, 0.4), some(chance, 0.1), some(chance, 0.6)
        self.trace.append(("g", host_copy([p.grad for p in self.trained()])))
        if not skip and any(p.grad is not None for p in self.trained()):
            if clip:
                self.scaler.unscale_(self.opt)
                self.trace.append(("norm", nn.utils.clip_grad_norm_(self.trained(), 0.5)))
            self.scaler.step(self.opt)
            self.scaler.update()
        elif self.scaler.is_enabled() and clip:
            pass
        self.opt.zero_grad(set_to_none=none)

    def evaluate(self) -> None:
        model, chance = self.model, self.chance
        before = model.training
        model.eval()
        guard = chance.choice([torch.no_grad, torch.inference_mode, contextlib.nullcontext])
        with guard():
            for _ in range(chance.choice([1, 3])):
                self.trace.append(("evaluation", self.call(self.batch()).detach().clone()))
        model.train(before)

    def read(self) -> None:
        self.trace.append(("state", host_copy(dict(self.model.state_dict()))))

    def load(self) -> None:
        saved = copy.deepcopy(self.model.state_dict())
        self.iteration()
        self.model.load_state_dict(saved)

    def write(self) -> None:
        frozen = [p for p in self.model.parameters() if not p.requires_grad and p.numel()]
        with torch.no_grad():
            for each in self.chance.sample(frozen, min(3, len(frozen))):
                each.mul_(0.5)

    def restore(self) -> None:
        place = self.folder / str(self.chance.randrange(1 << 40))
        more = self.chance.randint(0, 2)
        tree = {"m": self.model, "o": self.opt}
        if not self.streamed:
            kept = {key: copy.deepcopy(each.state_dict()) for key, each in tree.items()}
            for _ in range(more):
                self.iteration()
            for key, each in tree.items():
                each.load_state_dict(kept[key])
            return
        with residency.Checkpointer(place) as checkpointer:
            checkpointer.save(1, tree, rng=False)
            for _ in range(more):
                self.iteration()
            checkpointer.wait()
            assert checkpointer.restore(tree) == 1

    def snapshot(self) -> None:
        if self.streamed:
            found = residency.snapshot({"m": self.model}).tree["m"]
        else:
            found = host_copy(dict(self.model.state_dict()))
        self.iteration()
        self.trace.append(("snapshot", dict(found)))

    def park(self) -> None:
        size = self.chance.choice([1, 1 << 16])
        if self.streamed:
            with residency.parked(self.wrapped, self.opt):
                torch.ones(size, device=self.device).sum().item()
                if self.stream is not None:
                    assert self.stream.statistics().here_bytes == 0

    def hand_off(self) -> None:
        if self.streamed:
            with residency.hand_off("1KiB", park=[self.opt, self.wrapped]):
                torch.ones(100, device=self.device).sum().item()

    def end_stream(self) -> None:
        if self.stream is not None:
            self.stream.stop()
            assert self.stream.is_stopped
            self.stream.stop()
            self.stream = None

    def again(self) -> None:
        self.end_stream()
        where = self.chance.choice(["nothing", "device", "host"])
        between = some(self.chance, 0.3)
        if where == "device" or between:
            self.wrapped.to(self.device)
            if between:
                self.iteration()
        if where == "host" and self.streamed:
            self.wrapped.cpu()
        self.begin()

    def copy(self) -> None:
        self.end_stream()
        twin = copy.deepcopy(self.model)
        self.trace.append(("copy", host_copy(dict(twin.state_dict()))))
        self.begin()

    def failure(self) -> None:
        net, kind = self.model, self.chance.choice(["forward", "backward"])
        net.fail, net.fail_at = kind, self.chance.randrange(len(net.blocks))
        with contextlib.suppress(ZeroDivisionError):
            self.backward()
        net.fail = ""
        self.opt.zero_grad()

    def thread(self) -> None:
        errors: list[BaseException] = []

        def body() -> None:
            try:
                self.iteration()
            except BaseException as error:
                errors.append(error)

        worker = threading.Thread(target=body)
        worker.start()
        worker.join()
        if errors:
            raise errors[0]

    def lane(self) -> None:
        """Computes on a stream of the program's own."""
        lane = torch.Stream(device=self.device)
        lane.wait_stream(torch.accelerator.current_stream())
        with lane:
            self.backward()
        torch.accelerator.current_stream().wait_stream(lane)
        torch.accelerator.synchronize()
        self.finish()

    def away(self) -> None:
        if self.streamed and self.stream is not None:
            self.wrapped.to(self.device)  # moves nothing

    def drop(self) -> None:
        """Makes graphs that no backward pass uses."""
        for _ in range(self.chance.randint(1, 3)):
            self.way()
            self.call(self.batch())
        if some(self.chance, 0.3):
            gc.collect()

    def crossed(self) -> None:
        """Goes backward through two graphs, in either order."""
        graphs = []
        for _ in range(2):
            self.way()
            graphs.append(self.call(self.batch()).float().square().mean())
        if some(self.chance, 0.5):
            graphs.reverse()
        for loss in [sum(graphs)] if some(self.chance, 0.3) else graphs:
            if loss.requires_grad:
                loss.backward()
        del graphs, loss
        self.finish()

    def hook(self) -> None:
        """Reads weights in hooks of modules inside of the blocks."""
        seen: list[torch.Tensor] = []

        def forward(module: nn.Module, args: Any, output: Any) -> None:
            seen.append(module.weight.detach().float().sum())

        def backward(module: nn.Module, *gradients: Any) -> None:
            seen.append(gradients[1][0].detach().float().sum())

        linear = [m for m in self.model.blocks.modules() if type(m) is nn.Linear]
        handles = [m.register_forward_hook(forward) for m in linear]
        if not self.model.recompute:
            blocks = [m for m in self.model.blocks if not isinstance(m, nn.ModuleDict)]
            handles += [m.register_full_backward_hook(backward) for m in blocks]
        self.iteration()
        for handle in handles:
            handle.remove()
        self.trace.append(("hooks", host_copy(seen)))

    def check(self) -> None:
        """Holds the streamed run to the bound of the documentation."""
        if self.stream is None:
            return
        statistics = self.stream.statistics()
        assert statistics.here_bytes <= statistics.num_slots * statistics.slot_bytes, statistics
        assert statistics.num_late <= statistics.num_loads, statistics

    def all(self) -> Run:
        try:
            for _ in range(self.chance.randint(3, 8)):
                for _ in range(self.chance.choice([1, 2])):
                    self.iteration()
                    self.check()
                name = self.chance.choice(ACTIONS)
                self.log.append(name)
                getattr(self, name)()
                self.check()
            self.trace.append(("end", host_copy(list(self.model.parameters()))))
            self.trace = [(key, host_copy(value)) for key, value in self.trace]
            self.leave()
        except BaseException as error:
            error.add_note("\n".join([f"streamed={self.streamed}", *self.log]))
            raise
        return self

    def leave(self) -> None:
        """Lets go of everything, at times of the model without a stop."""
        if some(self.chance, 0.5):
            self.end_stream()
        del self.model, self.wrapped, self.opt, self.scaler, self.stream, self.scratch
