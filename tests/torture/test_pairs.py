"""Saves and restores every class in reach that has ``state_dict``, beside torch's way: the object's
own ``state_dict``, a copy of it, and ``load_state_dict`` of a fresh object. What that brings back,
a restore brings back, or the save refuses the object by its name.
"""

from __future__ import annotations

import copy
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.torture import pair_cases
from torch import Tensor, nn
from training_programs import host_copy

import residency

# Not about the order of work, and of many classes.
pytestmark = [pytest.mark.whole, pytest.mark.sim_device(schedule="late")]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Lets foreign classes warn, and runs as written what they would compile."""
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        yield


def picture(value: Any) -> Any:
    """Returns what there is to see of an object, its tensors with the kind of their device."""
    if isinstance(value, Tensor):
        if isinstance(value, nn.parameter.UninitializedTensorMixin):
            return "lazy"
        return value.device.type, value.dtype, value.detach().cpu().clone()
    if isinstance(value, nn.Module):
        plain = (int, float, str, bool, list, Tensor, type(None))
        hidden = ("_defaults", "_cache", "_computed", "_forward_cache", "_load_hook")
        return {
            name: {
                key: picture(each)
                for key, each in {**vars(part), **part._parameters, **part._buffers}.items()
                if isinstance(each, plain) and not key.startswith(hidden)
            }
            for name, part in value.named_modules()
        }
    if isinstance(value, dict):
        return {str(key): picture(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [picture(each) for each in value]
    return value if isinstance(value, int | float | str | bool | None) else type(value).__name__


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.shape == right.shape and left.dtype == right.dtype and _bits(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right) or (left != left and right != right)


def _bits(left: Tensor, right: Tensor) -> bool:
    return left.contiguous().numpy().tobytes() == right.contiguous().numpy().tobytes()


def judge_object(case: pair_cases.Case, device: torch.device, folder: Path) -> str:
    """Compares a restored object with one that its own pair filled; says how it went."""
    saved = case.make()
    case.use(saved)
    stock, ours = case.make(), case.make()
    if not isinstance(stock, nn.modules.lazy.LazyModuleMixin):
        for each in (saved, stock, ours):
            each.to(device)
    try:
        stock.load_state_dict(copy.deepcopy(saved.state_dict()))
        expected = picture(stock)
    except Exception as error:
        expected = f"stock: {type(error).__name__}"
    with residency.Checkpointer(folder) as checkpointer:
        try:
            checkpointer.save(1, {"it": saved}).wait()
        except residency.RefusedError as error:
            is_named = "it" in str(error) and "Nothing was saved" in str(error)
            return f"refused: {error}" if is_named else f"REFUSED WITHOUT A NAME: {error}"
        checkpointer.restore({"it": ours})
    if isinstance(expected, str):
        return expected
    return "equal" if same(picture(ours), expected) else "DIFFERENT"


class Trained:
    """A model with an optimizer and a scheduler, a few steps on."""

    def __init__(self, make: Any, schedule: Any = None, *, offloaded: bool, where: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).to(where)
        self.optimizer = make(list(self.model.parameters()))
        self.scheduler = None if schedule is None else schedule(self.optimizer)
        if offloaded:
            residency.offload_optimizer(self.optimizer)
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    @property
    def state(self) -> dict[str, Any]:
        named = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {name: each for name, each in named.items() if each is not None}

    def train(self, begin: int, end: int) -> None:
        where = next(self.model.parameters()).device
        for index in range(begin, end):
            torch.manual_seed(index)

            def closure() -> Tensor:
                self.optimizer.zero_grad()
                loss = self.model(torch.randn(4, 8).to(where)).square().mean()
                loss.backward(create_graph=False)
                return loss

            closure()
            self.optimizer.step(closure)
            if self.scheduler is not None:
                values = [1.0] if "Plateau" in type(self.scheduler).__name__ else []
                self.scheduler.step(*values)

    def picture(self) -> Any:
        rates = [float(group.get("lr", 0)) for group in self.optimizer.param_groups]
        return host_copy(dict(self.model.state_dict())), rates


def judge_run(make: Any, schedule: Any, folder: Path, *, offloaded: bool, where: Any) -> str:
    """Compares a resumed run with stock's and with the uninterrupted one; says how it went."""

    def made() -> Trained:
        return Trained(make, schedule, offloaded=offloaded, where=where)

    try:
        first = made()
        first.train(0, 3)
        dicts = {name: copy.deepcopy(each.state_dict()) for name, each in first.state.items()}
        stock = made()
        for name, each in stock.state.items():
            each.load_state_dict(dicts[name])
        stock.train(3, 5)
    except Exception as error:
        return f"stock: {type(error).__name__}"
    ours = made()
    with residency.Checkpointer(folder) as checkpointer:
        try:
            checkpointer.save(1, first.state, rng=False).wait()
        except residency.RefusedError as error:
            return f"refused: {error}"
        checkpointer.restore(ours.state, rng=False)
    ours.train(3, 5)
    first.train(3, 5)
    if same(ours.picture(), stock.picture()):
        return "equal"
    return "as uninterrupted" if same(ours.picture(), first.picture()) else "DIFFERENT"


def report(found: dict[str, str]) -> None:
    """Prints how each went, and fails with those that went wrong."""
    for name, said in found.items():
        print(f"{name}: {said.partition(chr(10))[0][:150]}")
    wrong = {name: said for name, said in found.items() if said[:2].isupper()}
    assert not wrong, wrong


def told(judge: Callable[[], str]) -> str:
    try:
        return judge()
    except Exception as error:
        traceback.print_exc()
        return f"ERROR {type(error).__name__}: {error}"


def test_modules_come_back_as_by_their_own_pair(device: torch.device, tmp_path: Path) -> None:
    cases = pair_cases.module_cases()
    report(
        {
            case.name: told(partial(judge_object, case, device, tmp_path / str(index)))
            for index, case in enumerate(cases)
        }
    )


def judge_values(make: Any, folder: Path, *, offloaded: bool, where: Any) -> bool:
    """Returns whether a restore alone, without a step, brings every value back."""
    saved, ours = (Trained(make, offloaded=offloaded, where=where) for _ in range(2))
    saved.train(0, 3)
    with residency.Checkpointer(folder) as checkpointer:
        checkpointer.save(1, saved.state, rng=False).wait()
        checkpointer.restore(ours.state, rng=False)
    found, expected = (
        [picture(each.state_dict()) for each in run.state.values()] for run in (ours, saved)
    )
    return same(found, expected)


# They keep matrices in columns, which a save has in rows: with the same values, products with them
# round otherwise, on processors whose kernels do so (LoRARite: an EPYC's, and not a Xeon's).
IN_COLUMNS = ("pytorch_optimizer.LoRARite", "pytorch_optimizer.SPlus")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("offloaded", [False, True], ids=["plain", "offloaded"])
def test_optimizers_go_on_as_by_their_own_pair(
    offloaded: bool, device: torch.device, tmp_path: Path
) -> None:
    found = {}
    for name, make in pair_cases.optimizer_classes(own_pairs_alone=offloaded):
        judge = partial(judge_run, make, None, tmp_path / name, offloaded=offloaded, where=device)
        found[name] = told(judge)
        if name in IN_COLUMNS:
            assert found.pop(name) in ("equal", "DIFFERENT")
            values = tmp_path / f"{name}.values"
            assert judge_values(make, values, offloaded=offloaded, where=device), name
    report(found)
    assert sum(said == "equal" for said in found.values()) > (1 if offloaded else 60)


def test_schedulers_go_on_as_by_their_own_pair(device: torch.device, tmp_path: Path) -> None:
    def make(parameters: list[nn.Parameter]) -> Any:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    found = {}
    for name, schedule in pair_cases.scheduler_cases():
        judge = partial(judge_run, make, schedule, tmp_path / name, offloaded=False, where=device)
        found[name] = told(judge)
    report(found)
    assert set(found.values()) == {"equal"}
