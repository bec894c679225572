"""Programs that save in signal handlers and while they end, as tasks of a warm process."""

from __future__ import annotations

import atexit
import faulthandler
import random
import signal
import threading
import time
from typing import Any

import torch
import torch._dynamo  # torch imports these two at a first step
import torch.distributed.checkpoint
from torch import nn
from warm_process import Log, Task, serve

import residency
from residency import sim

TENSORS = 30


def state_of(number: int, more: dict[str, Any]) -> dict[str, Any]:
    return {"mark": torch.full((50,), float(number)), **more}


def handled(request: dict[str, Any], log: Log) -> None:
    """Saves while a handler that saves, too, comes at random moments; judges all that it was told.

    The handler does what a program might do on SIGTERM. What is refused to it is done by the flag.
    """
    faulthandler.dump_traceback_later(request["patience"], exit=True)
    chance = random.Random(request["life"])
    more: dict[str, Any] = {f"t{i}": torch.ones(50) for i in range(TENSORS)}
    if request["offload"]:
        device = torch.device(sim.enable("64MiB", schedule=request["schedule"]))
        net = nn.Linear(64, 64).to(device)
        optimizer = torch.optim.AdamW(net.parameters())
        residency.offload_optimizer(optimizer, bucket="4KiB")
        net(torch.ones(2, 64, device=device)).square().mean().backward()
        optimizer.step()
        more |= {"net": net, "optimizer": optimizer}
    folders = [request["folder"], f"{request['folder']}-other"]
    both = [residency.Checkpointer(folder, **request["options"]) for folder in folders]
    mine = both[0]
    made: list[tuple[int, residency.Save]] = []
    said: list[str] = []  # what was refused
    counts = dict.fromkeys(("calls", "inner", "rung"), 0)
    numbers = iter(range(1, 1 << 30))
    is_inside = is_wanted = False

    def save(which: int) -> residency.Save:
        number = next(numbers)
        made.append((which, both[which].save(number, state_of(number, more))))
        return made[-1][1]

    def handle(*_: object) -> None:
        nonlocal is_inside, is_wanted
        if is_inside:
            return
        is_inside = True
        counts["rung"] += 1
        try:
            act = chance.choice(["save", "save", "save", "wait", "last", "other", "snapshot"])
            if act == "snapshot":
                residency.snapshot(more).wait()
            elif act == "wait":
                mine.wait()
            elif act == "last" and made:
                made[-1][1].wait()
            else:
                saved = save(1 if act == "other" else 0)
                counts["inner"] += 1
                if chance.random() < 0.5:
                    saved.wait()
        except residency.RefusedError as error:
            said.append(str(error))
            is_wanted = True
        finally:
            is_inside = False

    signal.signal(signal.SIGALRM, handle)
    for _ in range(request["saves"]):
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-4, 1e-2))
        saved = save(0)
        counts["calls"] += 1
        if chance.random() < 0.3:
            saved.wait()
        elif chance.random() < 0.2:
            mine.wait()
        if is_wanted:
            is_wanted = False
            save(0)
        if request["offload"] and chance.random() < 0.2:
            net(torch.ones(2, 64, device=device)).square().mean().backward()
            optimizer.step()
    signal.setitimer(signal.ITIMER_REAL, 0)
    for checkpointer in both:
        checkpointer.close()
    for which, saved in made:
        saved.wait()
        word = "skipped" if saved.is_skipped else "published"
        assert repr(saved).endswith(f"{word}>"), saved
        assert saved.is_skipped or saved.step in both[which].steps(), (saved, counts)
    for folder in folders:
        reader = residency.Checkpointer(folder)
        for step in reader.steps():
            mark = torch.zeros(50)
            reader.restore({"mark": mark}, step=step, strict=False, rng=False)
            assert bool((mark == step).all()), (folder, step, mark)
    assert all("inside of a" in each for each in said), said
    log("handled", refused=len(said), **counts)


def ending(request: dict[str, Any], log: Log) -> None:
    """Saves while the interpreter ends, in the ways that the request names, and logs each call."""
    faulthandler.dump_traceback_later(request["patience"], exit=True)
    checkpointer = residency.Checkpointer(request["folder"], **request["options"])
    is_over = threading.Event()

    def save(number: int, waits: bool) -> None:
        saved = checkpointer.save(number, state_of(number, {}))
        log("saved", step=number)
        if waits:
            saved.wait()
            log("done", step=number)

    def save_late(number: int, waits: bool) -> None:
        is_over.wait()  # of the main thread, whose end waits for this one
        save(number, waits)

    for number, (where, waits) in enumerate(request["saves"], start=1):
        if where == "before":
            save(number, waits)
        elif where == "exit":
            atexit.register(save, number, waits)
        elif where == "threading":
            # Python's own place for it, which its executors have; there is no public way.
            threading._register_atexit(save, number, waits)  # type: ignore[attr-defined]
        else:
            threading.Thread(target=save_late, args=(number, waits)).start()
    if request["close"]:
        atexit.register(checkpointer.close)
    delay = request["delay"]

    def open_late() -> None:
        threading.main_thread().join()
        time.sleep(delay)
        is_over.set()

    threading.Thread(target=open_late).start()


TASKS: dict[str, Task] = {"handled": handled, "ending": ending}


if __name__ == "__main__":
    serve(TASKS)
