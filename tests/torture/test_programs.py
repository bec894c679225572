"""Runs random training programs beside the same programs on stock torch.

The actions are what loops do to an optimizer between its steps: they assign and exchange states,
keep and write them, add and replace parameters, load, save, park, and run out of memory.
"""

from __future__ import annotations

import gc
import io
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from training_programs import Program, compare, host_copy, noise, nothing_left, same, some

import residency

CAPACITY = 96 << 20

Entry = tuple[int, str]


def entries(program: Program, minimum: int = 1) -> list[Entry]:
    """Returns which tensors of the state have elements, but for counters."""
    found = []
    for index, parameter in enumerate(program.stock.parameters):
        for key, value in program.stock.optimizer.state.get(parameter, {}).items():
            tensor = isinstance(value, torch.Tensor) and value.shape == parameter.shape != ()
            if tensor and value.numel() >= minimum:
                found.append((index, key))
    return found


def pair(program: Program) -> tuple[Entry, Entry] | None:
    """Returns two entries of one shape and dtype, where there are two."""
    kinds: dict[Any, list[Entry]] = {}
    for index, key in entries(program):
        value = program.stock.optimizer.state[program.stock.parameters[index]][key]
        kinds.setdefault((value.dtype, tuple(value.shape), value.stride()), []).append((index, key))
    rich = [each for each in kinds.values() if len(each) > 1]
    return tuple(program.chance.sample(program.chance.choice(rich), 2)) if rich else None  # type: ignore[return-value]


def states(program: Program, *found: Entry) -> list[list[tuple[dict[str, Any], str]]]:
    return [
        [(world.optimizer.state[world.parameters[index]], key) for index, key in found]
        for world in program.worlds
    ]


def assign(program: Program, folder: Path) -> None:
    """Assigns a key, from either device, or a whole dict."""
    for entry in entries(program)[:1] and [program.chance.choice(entries(program))]:
        seed, whole, host = (
            program.chance.randrange(1 << 30),
            *(some(program.chance, 0.3) for _ in range(2)),
        )
        for world in program.worlds:
            state = world.optimizer.state[world.parameters[entry[0]]]
            old = state[entry[1]]
            made = torch.empty_like(old, device=program.device)
            made.copy_(noise(seed, tuple(old.shape), old.dtype).abs())
            if host and world is program.ours:
                made = made.cpu()
            if whole:
                fresh = dict(state) | {entry[1]: made}
                world.optimizer.state[world.parameters[entry[0]]] = fresh
            else:
                state[entry[1]] = made


def swap(program: Program, folder: Path) -> None:
    """Exchanges two entries, of one parameter or of two."""
    if found := pair(program):
        forget(program)  # an assignment ties nothing
        for (first, one), (second, two) in states(program, *found):
            first[one], second[two] = second[two], first[one]


def exchange(program: Program, folder: Path) -> None:
    """Exchanges the whole states of two parameters."""
    found = pair(program)
    if found and found[0][0] != found[1][0]:
        for world in program.worlds:
            state = world.optimizer.state
            one, two = (world.parameters[index] for index, _ in found)
            if one in state and two in state:
                state[one], state[two] = state[two], state[one]


def share(program: Program, folder: Path) -> None:
    """Gives an entry the value of another one: of a home, a tensor that another entry has."""
    found = pair(program)
    if found and not program.settings.get("fused"):
        mine, theirs = states(program, *found)
        for ((first, one), (second, two)), is_ours in ((mine, True), (theirs, False)):
            first[one] = second[two] if is_ours else second[two].clone()


WIDE = {torch.float32, torch.float64}
"""Dtypes whose kernels round alike in every layout on a CPU."""


def transpose(program: Program, folder: Path) -> None:
    """Assigns the same values in another layout."""
    parameters = program.stock.parameters
    found = [each for each in entries(program, 2) if parameters[each[0]].dtype in WIDE]
    if found and not program.settings.get("fused"):
        for ((state, key),) in states(program, program.chance.choice(found)):
            state[key] = (
                state[key].mT.contiguous().mT if state[key].dim() > 1 else state[key].clone()
            )


def write(program: Program, folder: Path) -> None:
    """Writes an entry in place, or a kept reference to one."""
    factor = program.chance.random() + 0.5
    if program.ours.kept and some(program.chance, 0.5):
        which = program.chance.randrange(len(program.ours.kept))
        for world in program.worlds:
            world.kept[which][1].mul_(factor)
    elif found := entries(program):
        for ((state, key),) in states(program, program.chance.choice(found)):
            state[key].mul_(factor)


def keep(program: Program, folder: Path) -> None:
    """Keeps a reference to an entry, or a view of it."""
    if found := entries(program):
        entry, view = program.chance.choice(found), some(program.chance, 0.5)
        (mine,), (theirs,) = states(program, entry)
        if mine[0][mine[1]].device.type != "cpu":
            return
        for world, (state, key) in zip(program.worlds, (mine, theirs), strict=True):
            value = state[key]
            world.kept.append((str(entry), value[: (len(value) + 1) // 2] if view else value))


def forget(program: Program, folder: Path | None = None) -> None:
    for world in program.worlds:
        world.kept.clear()


def share_memory(program: Program, folder: Path) -> None:
    """Shares the memory of a home, which is refused until it is assigned."""
    if found := entries(program):
        ((state, key),), _ = states(program, program.chance.choice(found))
        if state[key].device.type == "cpu":
            forget(program)
            shared = state[key].share_memory_()
            with pytest.raises(residency.RefusedError):
                state[key]
            state[key] = shared


def set_data(program: Program, folder: Path) -> None:
    """Assigns other bytes to a parameter, at times in another layout."""
    turn = some(program.chance, 0.3) and not program.settings.get("fused")
    if not program.tied:
        index = program.chance.randrange(len(program.ours.parameters))
        for world in program.worlds:
            data = world.parameters[index].data * 0.5
            turn = turn and data.dtype in WIDE
            world.parameters[index].data = (
                data.mT.contiguous().mT if turn and data.dim() > 1 else data
            )


def replace(program: Program, folder: Path) -> None:
    """Puts a new parameter in the place of one, with its state or without."""
    index, move = program.chance.randrange(len(program.ours.parameters)), some(program.chance, 0.7)
    for world in program.worlds:
        old = world.parameters[index]
        new = torch.nn.Parameter(old.detach().clone())
        for group in world.optimizer.param_groups:
            group["params"] = [new if each is old else each for each in group["params"]]
        state = world.optimizer.state.pop(old, None)
        if move and state is not None:
            world.optimizer.state[new] = state
        world.parameters[index] = new
    program.tied = program.tied and index not in {0, len(program.ours.parameters) - 1}


def add_group(program: Program, folder: Path) -> None:
    shape = (program.chance.choice([1, 33]), program.chance.choice([5, 65]))
    seed, tensor = (
        program.chance.randrange(1 << 30),
        isinstance(program.settings["lr"], torch.Tensor),
    )
    if program.tied:
        return
    for world in program.worlds:
        world.schedulers.clear()
        world.add(seed, shape, torch.float32, False)
        group = {"params": [world.parameters[-1]]} | ({} if tensor else {"lr": 0.003})
        world.optimizer.add_param_group(group)


def remove_group(program: Program, folder: Path) -> None:
    groups = program.ours.optimizer.param_groups
    if len(groups) > 1 and not program.tied:
        which = program.chance.randrange(len(groups))
        for world in program.worlds:
            world.schedulers.clear()
            gone = world.optimizer.param_groups.pop(which)["params"]
            for parameter in gone:
                world.optimizer.state.pop(parameter, None)
            ids = {id(each) for each in gone}
            world.parameters = [each for each in world.parameters if id(each) not in ids]


def requires_grad(program: Program, folder: Path) -> None:
    index = program.chance.randrange(len(program.ours.parameters))
    for world in program.worlds:
        world.parameters[index].requires_grad_(not world.parameters[index].requires_grad)


def hooks(program: Program, folder: Path) -> None:
    """Counts the calls of the hooks of both state dicts, and changes what one returns."""
    calls: list[list[str]] = []
    forget(program)
    for world in program.worlds:
        seen: list[str] = []
        optimizer = world.optimizer
        handles = [
            optimizer.register_state_dict_pre_hook(lambda o, s=seen: s.append("pre")),
            optimizer.register_state_dict_post_hook(
                lambda o, d, s=seen: s.append("post") or {**d, "more": 1}
            ),
            optimizer.register_load_state_dict_pre_hook(lambda o, d, s=seen: s.append("load")),
            optimizer.register_load_state_dict_post_hook(lambda o, s=seen: s.append("loaded")),
            optimizer.register_step_pre_hook(lambda o, a, k, s=seen: s.append("step")),
            optimizer.register_step_post_hook(lambda o, a, k, s=seen: s.append("stepped")),
        ]
        saved = host_copy(optimizer.state_dict())
        assert saved.pop("more") == 1
        world.load(saved)
        optimizer.step()
        for handle in handles:
            handle.remove()
        calls.append(seen)
    assert calls[0] == calls[1], calls


def through_file(program: Program, folder: Path) -> None:
    """Loads a state dict of either world into either, through a file of torch.save."""
    forget(program)
    source = program.chance.choice(program.worlds)
    target = program.chance.choice(["cpu", str(program.device)])
    buffer = io.BytesIO()
    torch.save(source.optimizer.state_dict(), buffer)
    for world in program.worlds:
        buffer.seek(0)
        weights = not isinstance(program.settings["lr"], torch.Tensor)
        loaded = torch.load(buffer, map_location=target, weights_only=weights)
        world.load(loaded)


def on_and_off(program: Program, folder: Path) -> None:
    """Takes the state back to the device, steps there at times, and offloads anew."""
    forget(program)
    residency.onload_optimizer(program.ours.optimizer)
    assert type(program.ours.optimizer) is getattr(torch.optim, program.name)
    compare(program)
    if some(program.chance, 0.5):
        program.step()
    program.offload()


def park(program: Program, folder: Path) -> None:
    """Parks and brings back the model, or the optimizer, or both."""
    forget(program)
    owners = [program.ours.module(), program.ours.optimizer]
    program.chance.shuffle(owners)
    owners = owners[: program.chance.randint(1, 2)]
    for world in program.worlds:
        for scheduler in world.schedulers[:]:
            del scheduler
    for owner in owners:
        residency.park(owner, pin=some(program.chance, 0.7))
    if any(isinstance(owner, torch.nn.Module) for owner in owners):
        assert all(p.device.type == "cpu" for p in program.ours.parameters)
    compare(program)
    program.chance.shuffle(owners)
    for owner in owners:
        residency.unpark(owner)
    assert all(p.device == torch.device(program.device) for p in program.ours.parameters)


def snapshot(program: Program, folder: Path) -> None:
    """Takes a snapshot, trains on, and compares it with the moment of the call."""
    world = program.stock
    expected = host_copy(
        {"m": dict(world.module().state_dict()), "o": world.optimizer.state_dict()}
    )
    tree = {"m": program.ours.module(), "o": program.ours.optimizer}
    taken = residency.snapshot(tree, pin=some(program.chance, 0.7))
    for _ in range(program.chance.randint(1, 3)):
        program.gradients()
        for each in program.worlds:
            each.optimizer.step()
    compare(program)
    found = {"m": dict(taken.tree["m"]), "o": taken.tree["o"]}
    for tree in (found, expected):  # torch's own load sets it as a default of later groups
        for group in tree["o"]["param_groups"]:
            group.pop("differentiable", None)
    same(found, expected, "snapshot")


def checkpoint(program: Program, folder: Path) -> None:
    """Saves, trains on, and restores; the stock run loads its own copies."""
    if program.tied:
        return
    world = program.stock
    weights, saved = (
        host_copy([p.data for p in world.parameters]),
        host_copy(world.optimizer.state_dict()),
    )
    tree = {"m": program.ours.module(), "o": program.ours.optimizer}
    place = folder / str(program.chance.randrange(1 << 40))
    with residency.Checkpointer(place) as checkpointer:
        checkpointer.save(1, tree)
        for _ in range(program.chance.randint(0, 2)):
            program.gradients()
            for each in program.worlds:
                each.optimizer.step()
        compare(program)
        forget(program)  # a load of torch's makes new tensors
        checkpointer.wait()
        assert checkpointer.restore(tree) == 1
    for parameter, value in zip(world.parameters, weights, strict=True):
        parameter.data.copy_(value)
    rates = [group["lr"] for group in world.optimizer.param_groups]
    world.load(saved)
    # A restore fills a rate that is a tensor, which may be the one of `defaults`, in place.
    for rate, group in zip(rates, world.optimizer.param_groups, strict=True):
        if isinstance(rate, torch.Tensor):
            group["lr"] = rate.copy_(group["lr"])


def fill(program: Program) -> list[torch.Tensor]:
    """Takes all device memory but a random rest."""
    gc.collect()
    torch.accelerator.empty_cache()
    ballast = []
    for size in (8 << 20, 1 << 20, 64 << 10, 4096, 512):
        while True:
            try:
                ballast.append(torch.empty(size, dtype=torch.uint8, device=program.device))
            except torch.OutOfMemoryError:
                break
    del ballast[len(ballast) - program.chance.randint(0, min(30, len(ballast))) :]
    return ballast


def after_all(program: Program) -> dict[str, Any]:
    """Gives our parameters the values of the stock run, and returns the state to load."""
    for mine, theirs in zip(program.ours.parameters, program.stock.parameters, strict=True):
        mine.copy_(theirs)
    return host_copy(program.stock.optimizer.state_dict())


def out_of_memory(program: Program, folder: Path) -> None:
    """Steps with next to no room, then the rest of the same step."""
    if not program.alone or program.tied:
        return
    program.gradients()
    before = host_copy(program.stock.values())
    program.stock.optimizer.step()
    optimizer, parameters = program.ours.optimizer, program.ours.parameters
    ballast = fill(program)
    try:
        optimizer.step()
    except torch.OutOfMemoryError as error:
        ballast.clear()
        stepped = {id(p) for p in getattr(error, "stepped_parameters", ())}
        parts = {id(p) for p in getattr(error, "parameters_in_part", ())}
        now, after = host_copy(program.ours.values()), host_copy(program.stock.values())
        program.log.append(f"out of memory: {len(stepped)} stepped, {len(parts)} in part")
        same(now["groups"], before["groups"], "groups after out of memory")
        for index, parameter in enumerate(parameters):
            if id(parameter) not in parts:
                should = after if id(parameter) in stepped else before
                for what in ("parameters", "state"):
                    where = f"{what} {index} after out of memory"
                    if should is before and not before["state"][index] and what == "state":
                        continue
                    same(now[what][index], should[what][index], where)
        if parts:
            forget(program)
            program.ours.load(after_all(program))
        else:
            done = [(each, each.grad) for each in parameters if id(each) in stepped]
            for parameter, _ in done:
                parameter.grad = None
            optimizer.step()
            for parameter, gradient in done:  # the stock run has it still
                parameter.grad = gradient
    ballast.clear()


ACTIONS: dict[str, Callable[[Program, Path], None]] = {
    each.__name__: each
    for each in (
        *(assign, swap, exchange, share, transpose, write, keep, share_memory, set_data, replace),
        *(add_group, remove_group, requires_grad, hooks, through_file, on_and_off, park, snapshot),
        *(checkpoint, out_of_memory),
    )
}
STEPS = {
    "step": Program.step,
    "closure": Program.closure,
    "clipped": Program.clipped,
    "scaled": Program.scaled,
    "schedule": Program.schedule,
}


def run(program: Program, folder: Path) -> None:
    names = [*STEPS, *STEPS, "step", "step", *ACTIONS]
    try:
        for name in program.chance.choices(names, k=program.chance.randint(4, 16)):
            program.log.append(name)
            if name in STEPS:
                STEPS[name](program)
            else:
                with torch.no_grad():
                    ACTIONS[name](program, folder)
            if some(program.chance, 0.3):
                compare(program)
        compare(program)
    except BaseException as error:
        error.add_note("\n".join(program.log))
        raise


@pytest.mark.sim_device(capacity=CAPACITY)
def test_a_program_is_that_of_stock_torch(
    sim_device: torch.device, torture: Callable[..., None], tmp_path: Path
) -> None:
    def judge(chance: random.Random) -> None:
        with nothing_left(chance):
            run(Program(chance, sim_device), tmp_path)

    torture(judge)


@pytest.mark.sim_device(capacity=CAPACITY)
def test_programs_of_two_threads(
    sim_device: torch.device, torture: Callable[..., None], tmp_path: Path
) -> None:
    def judge(chance: random.Random) -> None:
        errors: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                run(Program(random.Random(seed), sim_device, alone=False), tmp_path)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(chance.random(),)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            raise error

    torture(judge)
