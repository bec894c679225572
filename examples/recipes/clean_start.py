"""A sweep in which each trial starts on a clean device, and says who holds what the last one left.

python examples/recipes/clean_start.py [--optuna]
"""

import sys

import torch
from torch import nn

import residency

if not torch.accelerator.is_available():
    residency.sim.enable("256MiB")  # a simulated device; compiled once, for about a minute
device = torch.accelerator.current_accelerator()
memory = torch.accelerator.memory_allocated
history = []


def mib(num_bytes):
    return f"{num_bytes / 2**20:.2f} MiB"


class Run:
    """A training whose callback knows it, as callbacks of trainers do: a reference cycle."""

    def __init__(self, lr):
        self.model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 1)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, foreach=False)
        self.on_step = [self.note]

    def note(self, loss):
        history.append(loss)  # the loss has its graph, and the graph has the model

    def train(self):
        for _ in range(2):
            loss = self.model(torch.randn(16, 2048, device=device)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            for call in self.on_step:
                call(loss)
        return loss.item()


def trial(lr):
    return Run(lr).train()


def start_clean():
    """Frees unused memory; raises with the names of all holders that are left."""
    residency.reclaim(errors=True)
    held = residency.holders("1MiB")
    if held:
        raise RuntimeError("the device is not clean:\n  " + "\n  ".join(map(str, held)))


def stock_sweep(num_trials):
    for number in range(num_trials):
        try:
            trial(lr=0.001)
        except torch.OutOfMemoryError:
            print(f"stock: out of memory in trial {number} of {num_trials}", end="")
            break
    print(f", {mib(memory())} left behind")


def clean_sweep(num_trials):
    began = []
    for number in range(num_trials):
        start_clean()
        began.append(memory())
        trial(lr=0.001 * number)
        history.clear()  # the list that was named
    return began


def clean_optuna(num_trials):
    """Makes the same sweep as a study of Optuna's."""
    import optuna

    began = []

    def objective(each):
        began.append(memory())
        return trial(lr=each.suggest_float("lr", 0, 0.01))

    def after(study, frozen):
        history.clear()
        start_clean()

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(objective, n_trials=num_trials, callbacks=[after])
    return began


def main():
    stock_sweep(num_trials=9)
    try:
        start_clean()
    except RuntimeError as error:
        print(error)
    history.clear()
    start_clean()
    began = clean_optuna(9) if "--optuna" in sys.argv else clean_sweep(9)
    print(f"clean starts: {len(began)} trials, which began with {mib(max(began))} at most")
    assert began == [0] * 9


if __name__ == "__main__":
    main()
