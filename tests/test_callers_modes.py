"""Every public call under each of the modes that a caller may have switched on.

The judge is the same call on the same run with no mode: parameters, states, files and what comes
later must have the same bits. Steps, whose arithmetic a mode may change, are compared with the
stock optimizer's under the same mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import residency
from residency._errors import ResidencyError
from residency._units import parse_bytes


class CountFunctions(TorchFunctionMode):
    """Counts what passes, as a logger does, and passes it on."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class CountOperations(TorchDispatchMode):
    """Counts operators, as a profiler of memory or of flops does."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def default_device(device: Any) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


Mode = Callable[[torch.device], AbstractContextManager[Any]]

MODES: dict[str, Mode] = {
    "default device": default_device,
    "default device meta": lambda device: default_device("meta"),
    "device context": lambda device: device,  # type: ignore[dict-item, return-value]
    "device context meta": lambda device: torch.device("meta"),  # type: ignore[dict-item, return-value]
    "inference mode": lambda device: torch.inference_mode(),
    "no gradients": lambda device: torch.no_grad(),
    "deterministic": lambda device: deterministic(),
    "float64 by default": lambda device: default_dtype(torch.float64),
    "bfloat16 by default": lambda device: default_dtype(torch.bfloat16),
    "autocast": lambda device: torch.autocast(device.type, torch.bfloat16),
    "autocast of the host": lambda device: torch.autocast("cpu", torch.bfloat16),
    "function mode": lambda device: CountFunctions(),
    "dispatch mode": lambda device: CountOperations(),
}


class Run:
    """A small model that trains on its own random numbers."""

    def __init__(
        self, device: torch.device, folder: Path, *, kind: str = "adamw", offload: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.device, self.folder = device, folder
        self.model = nn.Sequential(nn.Linear(24, 40), nn.BatchNorm1d(40), nn.Linear(40, 8))
        for parameter in self.model.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        self.model.register_buffer("empty", torch.zeros(0))
        self.model.to(device)
        self.optimizer: Any = make_optimizer(kind, self.model.parameters())
        if offload:
            residency.offload_optimizer(self.optimizer, bucket="4KiB")
        self.count = 0

    @property
    def state(self) -> dict[str, Any]:
        extra = {"seen": self.count, "mask": torch.arange(5, device="cpu"), 3: b"x" * 5000}
        return {"model": self.model, "optimizer": self.optimizer, "extra": extra}

    def set_gradients(self) -> None:
        self.count += 1
        generator = torch.Generator().manual_seed(self.count)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(self.device)

    def train(self, steps: int = 2) -> None:
        for _ in range(steps):
            self.set_gradients()
            self.optimizer.step()

    def bits(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()
        }
        for index, parameter in enumerate(self.model.parameters()):
            for key, value in dict(self.optimizer.state.get(parameter, {})).items():
                is_tensor = isinstance(value, Tensor)
                found[f"{index}.{key}"] = value.detach().cpu().clone() if is_tensor else value
        found["groups"] = [
            {k: v for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]
        return found


class Lion(torch.optim.Optimizer):
    """A class outside of torch, so that its separability is tried out."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                mean = state["mean"]
                parameter.add_((mean * 0.9 + parameter.grad * 0.1).sign_(), alpha=-group["lr"])
                mean.lerp_(parameter.grad, 0.01)


def make_optimizer(kind: str, parameters: Any) -> torch.optim.Optimizer:
    if kind == "lion":
        return Lion(parameters)
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-2)


def same(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    assert list(left) == list(right)
    return [
        name
        for name, value in left.items()
        if not (
            value.dtype == right[name].dtype and torch.equal(value, right[name])
            if isinstance(value, Tensor)
            else repr(value) == repr(right[name])
        )
    ]


# What is called under the mode, on a run that has stepped twice; each leaves the run able to go on.


def call_save(run: Run) -> None:
    with residency.Checkpointer(run.folder / "saves") as checkpointer:
        checkpointer.prepare(run.state)
        checkpointer.save(1, run.state).wait()
        checkpointer.save(2, run.state).wait()


def call_restore(run: Run) -> None:
    with residency.Checkpointer(run.folder / "before") as checkpointer:
        checkpointer.restore(run.state)


def call_snapshot(run: Run) -> None:
    taken = residency.snapshot(run.state)
    taken.wait()
    assert taken.tree["extra"]["mask"].tolist() == list(range(5))


def call_full_check(run: Run) -> None:
    with residency.Checkpointer(run.folder / "full", verify="full") as checkpointer:
        checkpointer.save(1, run.state).wait()


def call_offload(run: Run) -> None:
    residency.onload_optimizer(run.optimizer)
    residency.offload_optimizer(run.optimizer, bucket="4KiB", resident="2KiB")


def call_prime(run: Run) -> None:
    run.optimizer.prime()
    run.optimizer.statistics()


def call_state_dict(run: Run) -> None:
    run.optimizer.load_state_dict(run.optimizer.state_dict())


def call_load_own(run: Run) -> None:
    residency.load_into(run.model, run.folder / "before" / "step-00000000" / "model.safetensors")


def call_load_pickle(run: Run) -> None:
    residency.load_into(run.model, run.folder / "model.pt")


def call_park(run: Run) -> None:
    residency.park(run.model)
    assert all(p.device.type == "cpu" for p in run.model.parameters())
    residency.unpark(run.model)


def call_hand_off(run: Run) -> None:
    state = residency.memory_state()
    need = state.capacity - state.outside - parse_bytes("5MiB")
    with residency.hand_off(need, park=[run.optimizer, run.model]):
        pass


def call_seeing(run: Run) -> None:
    with residency.record(run.folder / "run.jsonl"), residency.phase("look"):
        residency.memory_state()
        residency.holders(1)
    residency.reclaim()
    with residency.mutating(*run.model.parameters()):
        pass


LONG = ("seeing", "load_pickle", "full_check")  # in the second tier
CALLS: dict[str, Callable[[Run], None]] = {
    name.removeprefix("call_"): value
    for name, value in list(globals().items())
    if name.startswith("call_")
}
NEED_OFFLOAD = ("offload", "prime")


def outcome(
    call: Callable[[Run], None],
    mode: Mode,
    device: torch.device,
    folder: Path,
    *,
    kind: str = "adamw",
    is_offloaded: bool = True,
) -> dict[str, Any]:
    """Trains, calls under the mode, trains on, saves and restores; returns all bits at the end."""
    folder.mkdir()
    run = Run(device, folder, kind=kind, offload=is_offloaded)
    run.train()
    with residency.Checkpointer(folder / "before") as checkpointer:
        checkpointer.save(0, run.state).wait()
    torch.save(run.model.state_dict(), folder / "model.pt")
    entered = mode(device)
    with entered:
        call(run)
    run.train()
    with residency.Checkpointer(folder / "after") as checkpointer:
        checkpointer.save(7, run.state).wait()
        other = Run(device, folder, kind=kind)
        checkpointer.restore(other.state)
    other.count = run.count
    run.train(1)
    other.train(1)
    bits = run.bits()
    assert same(bits, other.bits()) == []
    return bits


@pytest.mark.sim_device(schedule="late")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.whole] * (name in LONG)) for name in CALLS],
)
def test_a_call_does_the_same_under_every_mode(
    name: str, device: torch.device, tmp_path: Path
) -> None:
    kind = "lion" if name in NEED_OFFLOAD else "adamw"
    for is_offloaded in (True,) if name in (*NEED_OFFLOAD, "seeing") else (True, False):

        def bits(mode: Mode, label: str, is_offloaded: bool = is_offloaded) -> dict[str, Any]:
            folder = tmp_path / f"{label}, {is_offloaded}"
            return outcome(CALLS[name], mode, device, folder, kind=kind, is_offloaded=is_offloaded)

        plain = bits(lambda device: nullcontext(), "none")
        # A search for holders takes a second; what it makes of its own is the same under the rest.
        labels = ["default device", "dispatch mode"] if name == "seeing" else list(MODES)
        found = {label: same(plain, bits(MODES[label], label)) for label in labels}
        assert not any(found.values()), found


@pytest.mark.sim_device(schedule="late")
@pytest.mark.parametrize("kind", ["adamw", "sgd", "lion"])
def test_steps_under_a_mode_are_the_stock_optimizers(
    kind: str, device: torch.device, tmp_path: Path
) -> None:
    """The first step, which makes the state, and a later one, both under the mode; then one
    without it, which the stock optimizer cannot take after inference mode: there it has no mode.
    """
    for label, mode in MODES.items():
        bits = []
        for is_offloaded in (False, True):
            entered = mode if is_offloaded or label != "inference mode" else MODES["no gradients"]
            run = Run(device, tmp_path, kind=kind, offload=is_offloaded)
            try:
                for _ in range(2):
                    run.set_gradients()
                    with entered(device):
                        run.optimizer.step()
                run.train(1)
            except RuntimeError as error:
                if isinstance(error, ResidencyError) or is_offloaded:
                    raise
                break  # the stock optimizer cannot: a host scalar that was made on meta
            bits.append(run.bits())
        else:
            assert same(*bits) == [], label
            continue
        assert "meta" in label


@pytest.mark.sim_device(schedule="late")
def test_a_model_that_was_made_in_inference_mode_is_saved_restored_and_parked(
    device: torch.device, tmp_path: Path
) -> None:
    with torch.inference_mode():
        model = nn.Linear(40, 30).to(device)
    before = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    for entered in (nullcontext(), torch.inference_mode()):
        with entered, residency.Checkpointer(tmp_path / type(entered).__name__) as checkpointer:
            checkpointer.save(1, {"model": model}).wait()
            with torch.inference_mode():
                for parameter in model.parameters():
                    parameter.zero_()
            checkpointer.restore({"model": model})
            residency.park(model)
            residency.unpark(model)
            taken = residency.snapshot({"model": model})
            taken.wait()
        assert same(before, {n: v.cpu().clone() for n, v in model.state_dict().items()}) == []
        assert same(before, dict(taken.tree["model"])) == []
