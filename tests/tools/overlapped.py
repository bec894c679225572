"""Trainings that an overlapped step is judged by, and what may come between two of their steps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import residency
from residency._optim._offload_record import record_of
from residency._optim._overlap import Ahead

WIDTH, BUCKET = 64, 24 << 10

CLASSES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


class Net(nn.Module):
    """Layers whose passes take far more memory than their parameters."""

    def __init__(self, *, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)
        )
        self.head = nn.Linear(WIDTH, 7)
        self._use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            if self._use_reentrant is None or not self.training:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self._use_reentrant)
        return self.head(x).float().square().mean()


def ahead_of(optimizer: torch.optim.Optimizer) -> Ahead:
    record = record_of(optimizer)
    assert record is not None
    assert record.on_host.ahead is not None
    return record.on_host.ahead


class Run:
    """A training of random lengths, each time the same."""

    def __init__(
        self,
        device: torch.device,
        how: str,
        make: Callable[[Any], torch.optim.Optimizer] = CLASSES["adamw"],
        *,
        dtype: torch.dtype = torch.float32,
        master_weights: bool = False,
        use_reentrant: bool | None = None,
        bucket: int = BUCKET,
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = Net(use_reentrant=use_reentrant).to(device, dtype)
        self.optimizer = make(self.model.parameters())
        if how != "resident":
            residency.offload_optimizer(
                self.optimizer,
                bucket=bucket,
                slots=2,
                overlap=how in {"overlap", "auto"},
                resident="auto" if how == "auto" else 0,
                master_weights=master_weights,
            )
        self._numbers = torch.Generator().manual_seed(1)
        self.losses: list[Tensor] = []

    @property
    def ahead(self) -> Ahead:
        return ahead_of(self.optimizer)

    def batch(self) -> Tensor:
        length = int(torch.randint(200, 800, (1,), generator=self._numbers))
        made = torch.randn(length, WIDTH, generator=self._numbers)
        # Not from pageable memory, for whose copy the host waits, and so for the step.
        return made.to(self.model.head.weight.dtype).pin_memory().to(self.device, non_blocking=True)

    def accumulate(self, num_batches: int = 1) -> None:
        for _ in range(num_batches):
            loss = self.model(self.batch())
            loss.backward()
            self.losses.append(loss.detach())

    def step(self, *, num_batches: int = 1, is_skipped: bool = False) -> None:
        self.accumulate(num_batches)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if not is_skipped:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def bits(self) -> list[Tensor]:
        state = self.optimizer.state_dict()["state"]
        values = [v for each in state.values() for v in each.values() if isinstance(v, Tensor)]
        return [each.detach().cpu().clone() for each in [*self.model.parameters(), *values]]


def check_same(one: Run, other: Run, *, but_masters: bool = False) -> None:
    losses = [[each.item() for each in run.losses] for run in (one, other)]
    assert losses[0] == losses[1]
    if but_masters:
        pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    else:
        pairs = zip(one.bits(), other.bits(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def evaluate(run: Run) -> None:
    run.model.eval()
    with torch.no_grad():
        run.losses.append(run.model(run.batch()))
    run.model.train()


def _read(run: Run) -> None:
    run.losses += [v["exp_avg"].sum().cpu() for v in run.optimizer.state.values()]


def _write(run: Run) -> None:
    for values in run.optimizer.state.values():
        values["exp_avg"].mul_(0.5)


def _assign(run: Run) -> None:
    for values in run.optimizer.state.values():
        values["exp_avg"] = values["exp_avg"] * 2


def _load(run: Run) -> None:
    run.optimizer.load_state_dict(run.optimizer.state_dict())


def _save(run: Run) -> None:
    kept = residency.snapshot({"optimizer": run.optimizer})
    run.step()
    tree = kept.wait().tree["optimizer"]
    run.losses += [v["exp_avg"].sum().cpu() for v in tree["state"].values()]


def _park(run: Run) -> None:
    with residency.parked(run.model):
        torch.full((100_000,), 7.0, device=run.device)


def _freeze_one(run: Run) -> None:
    run.model.head.weight.requires_grad_(requires_grad=False)
    run.step()
    run.model.head.weight.requires_grad_(requires_grad=True)


def _new_memory(run: Run) -> None:
    with torch.no_grad():
        run.model.first.weight.data = run.model.first.weight.data.clone()


def _accumulate_more(run: Run) -> None:
    run.step(num_batches=4)


def _skip(run: Run) -> None:
    run.step(is_skipped=True)


BETWEEN = [
    evaluate,
    _read,
    _write,
    _assign,
    _load,
    _save,
    _park,
    _freeze_one,
    _new_memory,
    _accumulate_more,
    _skip,
]
