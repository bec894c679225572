"""Training loops as people write them, for ``end_idioms.py``."""

import functools
import itertools
import threading

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from residency._dryrun._stopping import Stopping

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
stopping = Stopping(0)  # that of the run takes its place


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


def the_last_of_a_try():
    try:
        for _ in range(STEPS):
            try:
                for _ in range(STEPS):
                    step()
            finally:
                seen.append("epoch")
    except KeyboardInterrupt:
        seen.append("interrupted")
    seen.append("save")


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


LIBRARY = """
def look_ahead(batches):
    batches = iter(batches)
    batch = next(batches)
    for following in batches:
        yield batch
        batch = following
    yield batch
"""
exec(compile(LIBRARY, "<library>", "exec"))


def a_library_that_looks_ahead():
    for _ in range(STEPS):
        for batch in look_ahead(LOADER):  # noqa: F821 - made above
            step(batch=batch)
        evaluate()
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
        stopping.note_load(is_whole=True)
    seen.append("save")


def a_resume_in_the_loop():
    for _ in range(STEPS):
        for batch in LOADER:
            step(batch=batch)
            stopping.note_load(is_whole=True)
        seen.append("epoch")
    seen.append("save")


def resumes_without_end():
    while True:
        stopping.note_load(is_whole=True)
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


def samples_that_are_counted():
    for batch in LOADER:
        step(batch=batch)
    for _ in range(2):
        num_samples = sum(len(batch) for (batch,) in HELD_OUT)
        if num_samples != len(HELD_OUT.dataset) and torch.distributed.get_rank() == 0:
            seen.append(f"warn of {num_samples}")
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


def trained(steps):
    for _ in range(steps):
        step()
    else:
        seen.append("else")


def the_last_of_a_function():
    trained(STEPS)
    evaluate()


def a_training_and_another():
    for batch in LOADER:
        step(batch=batch)
    evaluate()
    for _ in range(STEPS):
        for batch in LOADER:
            step(batch=batch)
        evaluate()
    seen.append("save")


def stages_of_an_epoch():
    for _ in range(STEPS):
        for _ in range(STEPS):
            step(FIRST)
        for _ in range(STEPS):
            step(SECOND)
        seen.append("epoch")


def critics_of_two_optimizers():
    for _ in range(STEPS):
        for _ in range(5):
            step()
        step(SECOND)
        seen.append("generator")


def critics_of_two_trainings():
    critics_of_two_optimizers()
    critics_of_two_optimizers()


def an_endless_while_with_an_else():
    number = 0
    while number < STEPS:
        step()
        number += 1
    else:
        seen.append("else")


def cycles_in_a_zip():
    for batch, _ in zip(itertools.cycle(LOADER), range(STEPS)):
        step(batch=batch)
    seen.append("save")


def as_long_as_it_learns():
    losses = [1.0]
    while losses[-1] > 0.5:
        losses += [float(step(batch=batch) is None) for batch in LOADER]
        seen.append(f"average {sum(losses) / (len(losses) - 1)}")


def sweeps_without_end():
    while True:
        optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1)
        optimizers[:] = [optimizer]
        for _ in range(STEPS):
            step(optimizer)
            MODEL.weight.sum().backward()
            stopping.note_backward()
        seen.append("sweep")


def made_in_the_first_round():
    optimizer = None
    for _ in range(STEPS):
        if optimizer is None:
            optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1)
            optimizers[:] = [optimizer]
        step(optimizer)
    seen.append("save")


def rounds():
    for _ in range(STEPS):
        for batch in LOADER:
            step(batch=batch)
            yield "round"
        evaluate()
    seen.append("return")


def a_generator_that_trains():
    for each in rounds():
        seen.append(each)
    seen.append("save")


def epochs_around_a_map():
    for _ in range(STEPS):
        losses = list(map(step, [FIRST] * STEPS))
        seen.append(f"average {len(losses) / len(losses)}")


def returned():
    number = 0
    while True:
        for batch in LOADER:
            step(batch=batch)
            number += 1
            if number == STEPS:
                return number


def a_value_that_leaves_an_endless_loop():
    seen.append(f"returned {returned()}")


def steps_in_another_thread():
    for _ in range(STEPS):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    seen.append("save")


def epochs_in_threads():
    for _ in range(STEPS):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        evaluate()
    seen.append("save")


def phases_of_an_epoch():
    for _ in range(STEPS):
        for phase in ["train", "test"]:
            for batch in LOADER if phase == "train" else HELD_OUT:
                if phase == "train":
                    step(batch=batch)
                else:
                    seen.append("test")
    for _ in (1, 2, 3):
        step()


def a_loop_of_a_library():
    functools.reduce(lambda _, optimizer: step(optimizer), itertools.repeat(FIRST))


def keep(batch):
    kept[0] += 1 << 20
