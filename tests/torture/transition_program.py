"""A training program in two copies: one that is moved about, and one on stock torch.

The judge of transitions does things to the first and compares it with the second.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import residency

MIB = 1 << 20
PACKAGE = str(Path(residency.__file__).parent)
WIDTH_IN = 24


class Net(nn.Module):
    """Has ties, views of one storage, buffers of each kind, batch norm and a transposed weight."""

    def __init__(self, width: int, device: torch.device | str, *, frozen: bool) -> None:
        """Makes the tensors where they stay, so that views stay views."""
        super().__init__()
        with torch.device(device):
            self.first = nn.Linear(WIDTH_IN, width)
            self.norm = nn.BatchNorm1d(width)
            self.second = nn.Linear(width, width)
            self.third = nn.Linear(width, width, bias=False)
            self.third.weight = self.second.weight
            flat = torch.zeros(2 * width)
            self.scale = nn.Parameter(flat[:width])
            self.shift = nn.Parameter(flat[width:])
            self.turned = nn.Parameter(torch.zeros(width, 8).t())
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.brief = nn.Parameter(torch.zeros(width, dtype=torch.bfloat16))
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mask", torch.ones(width), persistent=False)
            self.register_buffer("window", self.first.weight.detach()[1:3])
        self.first.bias.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Uses every parameter and changes buffers."""
        hidden = self.norm(self.first(x)).relu() * self.mask * self.scale + self.shift
        hidden = self.third(self.second(hidden).tanh()) + self.brief.float()
        self.seen += 1
        return hidden @ self.turned.t()


def tensors_of(net: nn.Module) -> dict[str, torch.Tensor]:
    """Returns every parameter and buffer under every name."""
    found = dict(net.named_parameters(remove_duplicate=False))
    found.update(net.named_buffers(remove_duplicate=False))
    return found


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def assert_same(name: str, ours: Any, stock: Any) -> None:
    """Compares trees: tensors by their bytes, dtypes, shapes and strides."""
    if isinstance(stock, torch.Tensor):
        assert isinstance(ours, torch.Tensor), name
        assert (ours.dtype, ours.shape) == (stock.dtype, stock.shape), name
        assert torch.equal(raw(ours), raw(stock)), f"{name}: other bytes"
    elif isinstance(stock, dict):
        assert list(ours) == list(stock) or set(ours) == set(stock), name
        for key in stock:
            assert_same(f"{name}.{key}", ours[key], stock[key])
    elif isinstance(stock, (list, tuple)):
        assert len(ours) == len(stock), name
        for index, (one, other) in enumerate(zip(ours, stock, strict=True)):
            assert_same(f"{name}[{index}]", one, other)
    else:
        assert ours == stock or (ours != ours and stock != stock), name


class Interrupted:
    """Raises KeyboardInterrupt after so many calls in the package, where a signal may arrive."""

    def __init__(self, after: int) -> None:
        """Counts calls and returns from C, after which Python looks for signals."""
        self.left = after

    def __call__(self, frame: Any, event: str, _argument: Any) -> None:
        """Counts one event of the profiler."""
        if event not in ("call", "c_return") or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        if frame.f_code.co_name in ("__del__", "<lambda>"):
            return
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    def run(self, action: Callable[[], Any]) -> bool:
        """Runs the action; says whether it was interrupted."""
        hook = sys.unraisablehook
        sys.unraisablehook = lambda _: None
        sys.setprofile(self)
        try:
            action()
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
            sys.unraisablehook = hook
        return False


class Program:
    """Is the pair of programs, and what may be done to it."""

    def __init__(self, chance: random.Random, device: torch.device, folder: Path) -> None:
        """Builds both sides with the same bytes."""
        self.chance, self.device, self.folder = chance, device, folder
        self.log: list[str] = []
        width = chance.choice([16, 40, 200, 520])
        frozen = chance.random() < 0.3
        self.stock = Net(width, "cpu", frozen=frozen)
        self.ours = Net(width, device, frozen=frozen)
        with torch.no_grad():
            for name, tensor in tensors_of(self.stock).items():
                if name not in ("seen", "mask", "window") and tensor.is_floating_point():
                    tensor.uniform_(0.1, 0.9) if "running" in name else tensor.normal_(0, 0.2)
            for name, tensor in tensors_of(self.ours).items():
                tensor.copy_(tensors_of(self.stock)[name])
        kind = chance.choice(["AdamW", "SGD", "Adagrad", "NAdam"])
        options: dict[str, Any] = {"lr": 1e-2, "foreach": chance.random() < 0.5}
        if kind == "SGD":
            options["momentum"] = 0.9
        self.optimizer = getattr(torch.optim, kind)(self.ours.parameters(), **options)
        self.plain = getattr(torch.optim, kind)(self.stock.parameters(), **options)
        self.offloaded = False
        self.identity = {name: id(p) for name, p in self.ours.named_parameters()}
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.snapshots: list[tuple[residency.types.Snapshot, Any]] = []
        self.saves: dict[int, Any] = {}
        self.unsure: dict[int, Any] = {}
        self.next_step = 1
        self.calls: dict[str, list[Any]] = {"ours": [], "stock": []}
        self.checkpointer = residency.Checkpointer(
            folder / "saves", max_in_flight=chance.choice([1, 2])
        )
        self.depth = 0

    @property
    def state(self) -> dict[str, Any]:
        """Is what is saved."""
        return {"net": self.ours, "optimizer": self.optimizer}

    def truth(self) -> dict[str, Any]:
        """Copies the stock side's state."""
        return copy.deepcopy({"net": self.stock.state_dict(), "optimizer": self.plain.state_dict()})

    # What is checked.

    def account(self) -> residency.types.MemoryState:
        """Adds the classes up, and compares them with torch's and the device's figures."""
        gc.collect(0)
        gc.disable()  # what a collection frees between two figures would set them apart
        for _ in range(200):  # a save in flight frees what was parked under it when it has read it
            state = residency.memory_state()
            free, capacity = torch.accelerator.get_memory_info()
            held = torch.accelerator.memory_allocated()
            reserved = torch.accelerator.memory_reserved()
            if (state.held, state.free, state.reserved) == (held, free, reserved):
                break
        gc.enable()
        classes = state.classes()
        assert sum(classes.values()) == state.capacity == capacity, classes
        assert min(classes.values()) >= 0, classes
        assert state.free == free, (state.free, free)
        assert state.held == held, classes
        assert state.reserved == reserved, classes
        return state

    def compare(self) -> None:
        """Compares everything that both sides have, wherever it is now."""
        self.account()
        for name, tensor in tensors_of(self.stock).items():
            mine = tensors_of(self.ours)[name]
            assert_same(name, mine, tensor)
            assert mine.stride() == tensor.stride(), name
            assert mine.requires_grad == tensor.requires_grad, name
            assert (mine.grad is None) == (tensor.grad is None), f"{name}.grad"
            if tensor.grad is not None:
                assert_same(f"{name}.grad", mine.grad, tensor.grad)
        assert {name: id(p) for name, p in self.ours.named_parameters()} == self.identity
        assert self.ours.third.weight is self.ours.second.weight
        places = [self.ours.scale.untyped_storage(), self.ours.shift.untyped_storage()]
        assert places[0].data_ptr() == places[1].data_ptr(), "views no longer share"
        places = [self.ours.first.weight.untyped_storage(), self.ours.window.untyped_storage()]
        assert places[0].data_ptr() == places[1].data_ptr(), "a buffer no longer shares"
        assert_same("optimizer", self.optimizer.state_dict(), self.plain.state_dict())
        assert self.calls["ours"] == self.calls["stock"]

    def home(self) -> None:
        """Brings everything back and sees that it is there."""
        for owner in self.chance.sample(self.owners(), len(self.owners())):
            residency.unpark(owner)
        away = [n for n, t in tensors_of(self.ours).items() if t.device.type == "cpu"]
        away += [
            f"{n}.grad"
            for n, p in self.ours.named_parameters()
            if p.grad is not None and p.grad.device.type == "cpu"
        ]
        assert not away, f"still parked: {away}"

    def owners(self) -> list[Any]:
        """Returns what is parked, each for itself."""
        parts = [self.ours.first, self.ours.second, self.ours.norm]
        return [self.ours, *parts, self.optimizer]

    def is_home(self) -> bool:
        """Says whether nothing is on the host."""
        return all(t.device.type != "cpu" for t in tensors_of(self.ours).values())

    # What is done to both.

    def forward(self) -> None:
        """Makes a loss whose backward pass is pending."""
        if not self.is_home() or len(self.pending) > 1:
            return
        training = self.chance.random() < 0.8
        self.ours.train(training)
        self.stock.train(training)
        x = torch.randn(4, WIDTH_IN)
        ours = self.ours(x.to(self.device)).square().mean()
        stock = self.stock(x).square().mean()
        assert_same("loss", ours, stock)
        self.pending.append((ours, stock))

    def backward(self) -> None:
        """Runs one pending backward pass."""
        if not self.pending or not self.is_home():
            return
        ours, stock = self.pending.pop(self.chance.randrange(len(self.pending)))
        try:
            stock.backward()
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match="modified by an inplace"):
                ours.backward()
            if "modified by an inplace" not in str(error):
                raise
            self.pending.clear()
            self.zero()
            self.calls["ours"].clear()
            self.calls["stock"].clear()
            return
        ours.backward()

    def step(self) -> None:
        """Steps both; a step over what is parked is refused."""
        if all(p.grad is None for p in self.stock.parameters()):
            return
        used = [p for p in self.ours.parameters() if p.requires_grad]
        used += [p.grad for p in used if p.grad is not None]
        if any(tensor.device.type == "cpu" for tensor in used) or self.has_parked_state():
            with pytest.raises(residency.RefusedError, match="parked on the host"):
                self.optimizer.step()
            return
        self.optimizer.step()
        self.plain.step()

    def has_parked_state(self) -> bool:
        """Says whether the optimizer's state is on the host, beside what stock keeps there."""
        return not self.offloaded and any(
            isinstance(value, torch.Tensor) and value.device.type == "cpu"
            for state in self.optimizer.state.values()
            for key, value in state.items()
            if key not in ("step", "mu_product", "eta", "mu")
        )

    def zero(self) -> None:
        """Clears gradients in one of the two ways."""
        to_none = self.chance.random() < 0.7
        self.optimizer.zero_grad(set_to_none=to_none)
        self.plain.zero_grad(set_to_none=to_none)

    def write(self) -> None:
        """Writes a tensor in place, wherever it is, in a block that says so."""
        name = self.chance.choice(["first.weight", "scale", "turned", "norm.running_mean", "mask"])
        mine, other = tensors_of(self.ours)[name], tensors_of(self.stock)[name]
        with residency.mutating(mine), torch.no_grad():
            mine.mul_(0.5)
        with torch.no_grad():
            other.mul_(0.5)

    def hook(self) -> None:
        """Registers hooks on a parameter and a module, parked or not."""
        number = len(self.calls["stock"]) + self.chance.randrange(1000)
        for side, net in (("ours", self.ours), ("stock", self.stock)):
            calls = self.calls[side]

            def note(grad: torch.Tensor, calls: list[Any] = calls) -> None:
                calls.append((number, tuple(grad.shape)))

            def after(p: torch.Tensor, calls: list[Any] = calls) -> None:
                calls.append((number, "accumulated", tuple(p.shape)))

            net.scale.register_hook(note)
            net.second.weight.register_post_accumulate_grad_hook(after)

    def host_forward(self) -> None:
        """Evaluates a wholly parked module over host inputs; over device inputs it is an error."""
        if any(t.device.type != "cpu" for t in tensors_of(self.ours).values()):
            return
        self.ours.eval()
        self.stock.eval()
        x = torch.randn(3, WIDTH_IN)
        with torch.no_grad():
            assert_same("host output", self.ours(x), self.stock(x))
            with pytest.raises(RuntimeError) as caught:
                self.ours(x.to(self.device))
        notes = "".join(getattr(caught.value, "__notes__", []))
        assert "unpark" in notes, (str(caught.value), notes)

    def duplicate(self) -> None:
        """Copies a module by deepcopy, pickle or torch.save, in whatever state it is."""
        for tensor in self.stock.parameters():
            if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
                return
        how = self.chance.choice(["deepcopy", "pickle", "save"])
        if how == "deepcopy":
            twin = copy.deepcopy(self.ours)
        elif how == "pickle":
            twin = pickle.loads(pickle.dumps(self.ours))
        else:
            stream = io.BytesIO()
            torch.save(self.ours, stream)
            stream.seek(0)
            twin = torch.load(stream, weights_only=False)
        for name, tensor in tensors_of(self.stock).items():
            assert_same(f"{how} {name}", tensors_of(twin)[name], tensor)
        assert twin.third.weight is twin.second.weight
        assert residency.unpark(twin) >= 0
        if any(tensor.device.type == "cpu" for tensor in twin.parameters()):
            return  # a copy of what is parked is a module of the host
        with torch.no_grad():
            for tensor in twin.parameters():
                tensor.fill_(3.0)
        residency.park(twin)
        residency.unpark(twin)
        for tensor in twin.parameters():
            assert bool(
                (raw(tensor.float()) == raw(torch.full_like(tensor.cpu().float(), 3))).all()
            )
