"""Training loops as people write them, each in a fork of its own, brought to their end on the CPU.

Prints a line of JSON for each: what was seen of it, and how it ended.
"""

import itertools
import json
import os
import sys

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from residency._dryrun._stopping import EnoughSeen, Stopping

torch.set_num_threads(1)
MODEL = torch.nn.Linear(4, 4)
OTHER = torch.nn.Linear(4, 4)
FIRST, SECOND = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (MODEL, OTHER))
LOADER = DataLoader(TensorDataset(torch.ones(40, 4)), batch_size=2)
HELD_OUT = DataLoader(TensorDataset(torch.ones(6, 4)), batch_size=2)
STEPS = 1000
seen: list[str] = []
optimizers: list[torch.optim.Optimizer] = []
kept: list[int] = []  # bytes on the device
stopping: Stopping


def step(optimizer=FIRST, batch=None):
    MODEL(torch.ones(2, 4) if batch is None else batch[0]).sum().backward()
    OTHER(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    seen.append("step")


def evaluate():
    seen.append(f"evaluate {sum(1 for _ in HELD_OUT)}")


def over_a_loader():
    for batch in LOADER:
        step(batch=batch)
    seen.append("save")


def epochs():
    for _ in range(STEPS):
        for batch in LOADER:
            step(batch=batch)
        evaluate()
    seen.append("save")


def steps_until_the_last():
    number = 0
    while number < STEPS:
        for batch in LOADER:
            step(batch=batch)
            number += 1
            if number == STEPS:
                break
    seen.append("save")


def next_of_an_iterator():
    batches = iter(LOADER)
    for _ in range(STEPS):
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(LOADER)
            batch = next(batches)
        step(batch=batch)
    seen.append("save")


def cycle():
    while True:
        yield from LOADER


def a_generator_that_cycles():
    batches = cycle()
    for _ in range(STEPS):
        step(batch=next(batches))
    seen.append("save")


def drawn():
    while True:
        yield (torch.ones(2, 4),)


def a_generator_as_a_loader():
    for batch in drawn():
        step(batch=batch)
    seen.append("save")


def no_loader():
    for _ in range(STEPS):
        step()
    evaluate()
    seen.append("save")


def a_counter():
    number = 0
    while number < STEPS:
        step()
        number += 1
    seen.append("save")


def forever():
    number = 0
    while True:
        if number % 2 == 0:
            evaluate()
        step()
        number += 1
        if number > STEPS:
            break
    seen.append("save")


def in_a_context():
    for _ in range(STEPS):
        with torch.autograd.set_detect_anomaly(True):
            step()
    seen.append(f"save {torch.is_anomaly_enabled()}")


def epochs_without_a_loader():
    for _ in range(STEPS):
        for _ in range(STEPS):
            step()
        evaluate()
    seen.append("save")


def train():
    for _ in range(STEPS):
        step()
    return "trained"


def a_function_of_its_own():
    for _ in range(STEPS):
        train()
        evaluate()
    seen.append("save")


def accumulation():
    for number, batch in enumerate(LOADER):
        MODEL(batch[0]).sum().backward()
        if number % 3 == 2:
            step()
    seen.append("save")


def accumulation_over_epochs():
    for _ in range(STEPS):
        for number, batch in enumerate(LOADER):
            MODEL(batch[0]).sum().backward()
            if number % 3 == 2:
                step()
    seen.append("save")


def pairs_of_loaders_over_epochs():
    for _ in range(STEPS):
        pairs = zip(HELD_OUT, LOADER, strict=False)
        for _, batch in pairs:
            step(batch=batch)
    seen.append("save")


def two_optimizers():
    for number in itertools.count():
        step(SECOND)
        if number % 5 == 4:
            step(FIRST)
            seen.append("generator")
    seen.append("save")


def a_progress_bar():
    from tqdm import tqdm

    for batch in tqdm(LOADER):
        step(batch=batch)
    seen.append("save")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(2 * STEPS, 4))


def a_stream():
    for batch in DataLoader(Stream(), batch_size=2):
        step(batch=[batch])
    seen.append("save")


def early_return():
    for number, batch in enumerate(LOADER):
        step(batch=batch)
        if number == STEPS:
            return
    seen.append("save")


def resumed():
    for _ in range(2):
        for batch in LOADER:
            step(batch=batch)
        stopping.resume()
    seen.append("save")


def a_resume_in_the_loop():
    for _ in range(STEPS):
        for batch in LOADER:
            step(batch=batch)
            stopping.resume()
        seen.append("epoch")
    seen.append("save")


def resumes_without_end():
    while True:
        stopping.resume()
        step()


def a_loop_that_comes_last():
    for _ in range(STEPS):
        step()


def steps_by_hand():
    for _ in range(STEPS):
        MODEL(torch.ones(2, 4)).sum().backward()
        stopping.note_backward()
        seen.append("step")
    seen.append("save")


def gradients_before_the_optimizer():
    for _ in range(STEPS):
        MODEL(torch.ones(2, 4)).sum().backward()
        stopping.note_backward()
    optimizers.append(FIRST)
    for batch in LOADER:
        step(batch=batch)
    seen.append("save")


def a_long_evaluation():
    for batch in LOADER:
        step(batch=batch)
    kept.append(0)
    many, more = (DataLoader(TensorDataset(torch.ones(STEPS, 4))) for _ in range(2))
    seen.append(f"evaluate {sum(1 for _ in many)}")
    seen.append(f"keep {sum(1 for _ in map(keep, more))}")
    seen.append("save")


def evaluations_with_workers():
    for batch in LOADER:
        step(batch=batch)
    data = TensorDataset(torch.ones(STEPS))
    many = DataLoader(data, num_workers=1, persistent_workers=True)
    for _ in range(2):
        for batch in LOADER:
            step(batch=batch)
        seen.append(f"evaluate {sum(1 for _ in many)}")
    seen.append("save")


def averages_over_batches():
    for _ in range(STEPS):
        losses = []
        for batch in LOADER:
            step(batch=batch)
            losses.append(1.0)
        seen.append(f"average {sum(losses) / len(losses)}")
    seen.append("save")


def folds():
    for _ in range(2):
        loader = DataLoader(TensorDataset(torch.ones(40, 4)), batch_size=2)
        optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1)
        optimizers[:] = [optimizer]
        for _ in range(STEPS):
            losses = [step(optimizer, batch) for batch in loader]
            seen.append(f"average {len(losses) / len(losses)}")
        seen.append("fold")
    seen.append("save")


def epochs_of_many_steps():
    batches = cycle()
    for _ in range(STEPS):
        for _ in range(STEPS):
            step(batch=next(batches))
        evaluate()
    seen.append("save")


def keep(batch):
    kept[0] += 1 << 20


IDIOMS = [
    over_a_loader, epochs, steps_until_the_last, next_of_an_iterator, a_generator_that_cycles,
    a_generator_as_a_loader, no_loader, a_counter, forever, in_a_context, epochs_without_a_loader,
    a_function_of_its_own, accumulation, two_optimizers, a_progress_bar, a_stream, early_return,
    resumed, a_resume_in_the_loop, resumes_without_end, a_loop_that_comes_last,
    steps_by_hand, gradients_before_the_optimizer, a_long_evaluation, accumulation_over_epochs,
    pairs_of_loaders_over_epochs, evaluations_with_workers, averages_over_batches,
    folds, epochs_of_many_steps,
]  # fmt: skip


def main():
    global stopping
    for idiom in IDIOMS:
        if os.fork():
            os.wait()
            continue
        if idiom.__name__ not in ("steps_by_hand", "gradients_before_the_optimizer"):
            optimizers[:] = [FIRST, SECOND] if "two" in idiom.__name__ else [FIRST]
        stopping = Stopping(2, optimizers, lambda: sum(kept))
        stopping.start()
        ended = "finished"
        try:
            idiom()
        except EnoughSeen:
            ended = "left"
        except Exception as error:
            ended = repr(error)
        found = {"name": idiom.__name__, "ended": ended, "steps": seen.count("step"), "seen": seen}
        found |= {"counted": stopping.num_steps, "was_cut": stopping.was_cut}
        print(json.dumps(found), flush=True)
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
