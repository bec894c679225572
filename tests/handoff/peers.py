"""One side of a hand-off, without torch, killed at a stage: a program of test_take_over.py."""

import os
import signal
import sys
from pathlib import Path

from residency._handoff._peer import (
    Deadline,
    ask_for_device,
    await_taker,
    remember_taker,
    return_and_stay,
)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def take(path: Path, stage: str) -> None:
    if stage == "before it connects":
        die()
    if stage == "before it states its need":
        import socket

        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            while connection.connect_ex(os.fspath(path)):
                pass
            die()
    link = ask_for_device(path, int(sys.argv[4]), Deadline(30))
    if stage == "after it stated its need":
        die()
    link.receive(Deadline(30), expected="ready")
    if stage == "with the bytes in hand":
        die()
    if stage == "forks, with the bytes in hand":
        if os.fork() == 0:
            Deadline(20).pause(20)
            os._exit(0)
        die()
    if stage == "sends nonsense":
        link._connection.sendall(b"\x00\xff nonsense\n")
        Deadline(30).pause(30)
    if stage == "never returns":
        sys.stdin.read()
    if stage.startswith("stays"):
        return_and_stay(path, link)
        sys.stdin.read()
        if stage == "stays, and fails":
            raise RuntimeError("of the engine's own")
        return
    link.send(returned=True)


def release(path: Path, stage: str) -> None:
    if stage == "while it listens":
        import threading

        threading.Timer(0.2, die).start()
    link, _ = await_taker(path, Deadline(30))
    if stage == "while it frees":
        die()
    if stage == "refuses":
        link.send(refused="1.00 GiB too few")
        return
    link.send(ready=1, pid=os.getpid())
    if stage == "after it proved the bytes":
        die()
    if stage == "does not wait":
        link.leave()
        sys.stdin.read()
        return
    link.receive(Deadline(30), expected="returned")
    if stage.startswith("stays"):
        remember_taker(path, link)
        sys.stdin.read()
        if stage == "stays, and fails":
            raise RuntimeError("of the trainer's own")


if __name__ == "__main__":
    {"take": take, "release": release}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
