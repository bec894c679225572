"""One capacity for several processes: what one reserves is gone for the others, and comes back
however it ends.

The processes are real. Each evaluates the lines that it is sent and answers one line of JSON, so
that every wait is for an answer.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from residency_sim._share import share_folder

pytestmark = pytest.mark.sim

MIB = 1 << 20
CAPACITY = 64 * MIB
SMALL_SEGMENT = 2 * MIB
PATIENCE_SECONDS = 60.0
HEADER = struct.Struct("=QQ")
SLOT = struct.Struct("=qQ")

WORKER = """
import contextlib, gc, json, os, random, sys
import torch
from residency import InvalidArgumentError, sim

accelerator, held = torch.accelerator, {}

def enable(share, capacity="64MiB"):
    sim.enable(capacity, share=share)

def start_anew():
    held.clear()
    if sim.is_enabled():
        accelerator.empty_cache()
        sim.enable()

def hold(name, num_bytes):
    held[name] = torch.empty(num_bytes, dtype=torch.uint8, device="sim")

def drop(name):
    del held[name]

def drop_and_release(name):
    drop(name)
    accelerator.empty_cache()

def info():
    return list(accelerator.get_memory_info())

def forked(action, leave):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(2, 1)
        try:
            answer = repr(action())
        except Exception as error:
            answer = str(error)
        os.write(writer, answer.encode())
        leave()
    os.close(writer)
    with os.fdopen(reader) as answers:
        answer = answers.read()
    return [answer, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]

def stress(seed, num_rounds):
    random.seed(seed)
    num_refused = 0
    for number in range(num_rounds):
        if held and random.random() < 0.45:
            drop_and_release(random.choice(sorted(held)))
        else:
            try:
                hold(number, random.randrange(1, 24 << 20))
            except torch.OutOfMemoryError:
                num_refused += 1
        free, total = info()
        assert 0 <= free <= total - accelerator.memory_reserved(), (free, total)
    held.clear()
    accelerator.empty_cache()
    return num_refused

print("ready", flush=True)
for line in sys.stdin:
    try:
        answer = {"value": eval(line)}
    except Exception as error:
        answer = {"error": type(error).__name__, "message": str(error)}
        del error
    gc.collect()
    print(json.dumps(answer), flush=True)
"""


class Refusal(Exception):
    """A process raised; the text begins with the exception's name."""


class Process:
    """A process that uses the simulated accelerator."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "RESIDENCY_SIM_SHARE": "", **environment},
        )
        self.pid = self._process.pid
        self._num_answers_due = 0
        self._is_plain = not environment

    def _read(self) -> str:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], PATIENCE_SECONDS)
        assert readable, "a process did not answer"
        line: str = self._process.stdout.readline()
        assert line, "a process ended"
        return line

    def wait_until_ready(self) -> None:
        assert self._read() == "ready\n"

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        self._num_answers_due += 1

    def has_answered(self) -> bool:
        return bool(select.select([self._process.stdout], [], [], 0.0)[0])

    def receive(self) -> Any:
        answer = json.loads(self._read())
        self._num_answers_due -= 1
        if "error" in answer:
            raise Refusal(f"{answer['error']}: {answer['message']}")
        return answer["value"]

    def ask(self, line: str) -> Any:
        self.send(line)
        return self.receive()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(PATIENCE_SECONDS)

    def end(self) -> int:
        """Lets the process end as a program does; returns its status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(PATIENCE_SECONDS)

    def can_serve_again(self) -> bool:
        is_idle = self._process.poll() is None and self._num_answers_due == 0
        return self._is_plain and is_idle

    def clean_up(self) -> None:
        if self._process.poll() is None:
            self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


Start = Callable[..., list[Process]]
_numbers = itertools.count()


def _file(name: str) -> Path:
    return Path(share_folder()) / f"residency-sim-{os.geteuid()}-{name}"


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-{os.getpid()}_{next(_numbers)}"
    yield name
    _file(name).unlink(missing_ok=True)


@pytest.fixture(scope="module")
def idle() -> Iterator[list[Process]]:
    """Processes of earlier tests: to start one takes a second, most of it torch's import."""
    processes: list[Process] = []
    yield processes
    for process in processes:
        process.clean_up()


@pytest.fixture
def start(idle: list[Process]) -> Iterator[Start]:
    started: list[Process] = []

    def start(count: int, *, is_fresh: bool = False, **environment: str) -> list[Process]:
        can_reuse = not is_fresh and not environment
        reused = [idle.pop() for _ in range(min(count, len(idle)) if can_reuse else 0)]
        fresh = [Process(environment) for _ in range(count - len(reused))]
        started.extend(reused + fresh)
        for process in fresh:
            process.wait_until_ready()
        return reused + fresh

    yield start
    for process in started:
        if process.can_serve_again():
            process.ask("start_anew()")
            idle.append(process)
        else:
            process.clean_up()


@pytest.fixture
def pair(start: Start, name: str) -> tuple[Process, Process]:
    """Two processes that share one device of 64 MiB."""
    first, second = start(2)
    for process in (first, second):
        process.ask(f"enable({name!r})")
    return first, second


def test_processes_starve_each_other_and_the_error_names_who_holds_what(
    pair: tuple[Process, Process], name: str
) -> None:
    first, second = pair
    second.ask(f"hold('a', {40 * MIB})")
    assert first.ask("info()") == second.ask("info()") == [24 * MIB, CAPACITY]
    first.ask(f"hold('a', {20 * MIB})")
    with pytest.raises(Refusal) as refusal:
        first.ask(f"hold('b', {10 * MIB})")
    message = str(refusal.value)
    assert message.startswith("OutOfMemoryError: sim out of memory. Tried to allocate 10.00 MiB.")
    assert "total capacity of 64.00 MiB of which 4.00 MiB is free." in message
    assert f"Process {second.pid} has 40.00 MiB memory in use." in message
    assert "This process has 20.00 MiB memory in use." in message
    assert str(first.pid) not in message
    # A cache is its process's own; emptied, it is anybody's.
    second.ask("drop('a')")
    with pytest.raises(Refusal, match="OutOfMemoryError"):
        first.ask(f"hold('b', {10 * MIB})")
    second.ask("accelerator.empty_cache()")
    first.ask(f"hold('b', {10 * MIB})")
    assert first.ask("info()") == second.ask("info()") == [34 * MIB, CAPACITY]
    assert _file(name).stat().st_mode & 0o777 == 0o600


def test_a_killed_process_gives_its_bytes_back_at_once(
    pair: tuple[Process, Process], start: Start, name: str
) -> None:
    first, second = pair
    second.ask(f"hold('a', {60 * MIB})")
    second.kill()
    first.ask(f"hold('a', {60 * MIB})")  # without anybody having asked for the figures before
    assert first.ask("info()") == [4 * MIB, CAPACITY]
    (third,) = start(1)
    third.ask(f"enable({name!r})")
    third.ask("hold('a', 10)")
    first.kill()
    assert third.ask("info()") == [CAPACITY - SMALL_SEGMENT, CAPACITY]
    assert third.end() == 0
    assert not _file(name).exists()


def test_a_process_that_ends_gives_its_bytes_back_and_the_last_one_removes_the_file(
    pair: tuple[Process, Process], name: str
) -> None:
    first, second = pair
    second.ask(f"hold('a', {60 * MIB})")
    assert first.ask("info()")[0] == 4 * MIB
    assert second.end() == 0
    assert first.ask("info()") == [CAPACITY, CAPACITY]
    assert _file(name).exists()
    assert first.end() == 0
    assert not _file(name).exists()


@pytest.mark.whole
def test_what_killed_processes_leave_is_void_and_the_next_user_removes_it(
    pair: tuple[Process, Process], start: Start, name: str
) -> None:
    for process in pair:
        process.ask(f"hold('a', {30 * MIB})")
        process.kill()
    assert _file(name).exists()
    reuser, stranger = start(2)
    reuser.ask(f"enable({name!r}, '32MiB')")
    assert reuser.ask("info()") == [32 * MIB, 32 * MIB]
    reuser.kill()
    stranger.ask(f"enable({name + 'x'!r})")
    assert not _file(name).exists()
    assert stranger.end() == 0
    assert not _file(name + "x").exists()


def test_a_second_capacity_under_one_name_is_refused_and_changes_nothing(
    start: Start, name: str
) -> None:
    first, second = start(2, is_fresh=True)
    first.ask(f"enable({name!r}, '32MiB')")
    first.ask(f"enable({name!r})")  # alone, it may change its mind
    first.ask(f"hold('a', {10 * MIB})")
    with pytest.raises(Refusal, match=r"InvalidArgumentError: capacity is 32\.00 MiB.*64\.00 MiB"):
        second.ask(f"enable({name!r}, '32MiB')")
    assert second.ask("sim.is_enabled()") is False
    assert second.ask("torch._C._get_privateuse1_backend_name()") == "privateuseone"
    second.ask(f"enable({name!r})")
    for process in (first, second):
        with pytest.raises(Refusal, match="InvalidArgumentError: capacity is 1"):
            process.ask(f"enable({name!r}, '128MiB')")
        assert process.ask("info()") == [CAPACITY - 10 * MIB, CAPACITY]
    # One that is registered already, and refused, keeps the settings that it had.
    second.ask("enable(None, '1GiB')")
    with pytest.raises(Refusal, match="InvalidArgumentError"):
        second.ask(f"enable({name!r}, '128MiB')")
    assert second.ask("info()") == [1 << 30, 1 << 30]
    first.ask(f"enable({name!r}, '128MiB')")
    assert first.ask("info()") == [118 * MIB, 128 * MIB]


def test_what_a_process_holds_already_goes_along_if_there_is_room(
    pair: tuple[Process, Process], name: str
) -> None:
    first, second = pair
    first.ask("enable(None)")
    first.ask(f"hold('a', {40 * MIB})")
    assert second.ask("info()")[0] == CAPACITY
    second.ask(f"hold('a', {30 * MIB})")
    with pytest.raises(
        Refusal, match=r"InvalidArgumentError: 40\.00 MiB are in use here, .*34\.00"
    ):
        first.ask(f"enable({name!r})")
    second.ask("drop_and_release('a')")
    first.ask("hold('b', 10)")
    first.ask("drop('b')")  # cached, and no reason to refuse
    first.ask(f"enable({name!r})")
    assert second.ask("info()")[0] == 24 * MIB
    first.ask(f"enable({name + '-other'!r})")
    assert second.ask("info()")[0] == CAPACITY
    first.ask("enable(None)")
    assert not _file(name + "-other").exists()


@pytest.mark.parametrize("source", ["share", "RESIDENCY_SIM_SHARE"])
def test_a_name_that_is_none_is_refused_before_anything_is_loaded(source: str) -> None:
    code = (
        "import os, sys\n"
        "from residency import InvalidArgumentError, sim\n"
        "names = ['a/b', '..', 'a b', 'x' * 65, 'a\\n', 'n\\u00e4me', *map(eval, sys.argv[1:])]\n"
        "for name in names:\n"
        "    try:\n"
        "        if 'share' == os.environ['SOURCE']:\n"
        "            sim.enable(share=name)\n"
        "        else:\n"
        "            os.environ['RESIDENCY_SIM_SHARE'] = name\n"
        "            sim.enable()\n"
        "        print('accepted', repr(name))\n"
        "    except InvalidArgumentError as error:\n"
        "        assert str(error).startswith(os.environ['SOURCE'] + ' is '), error\n"
        "assert not sim.is_enabled() and 'residency_sim_core' not in sys.modules\n"
    )
    # An empty variable is one that is not set.
    more = ["''", "7", "b'x'"] if source == "share" else []
    done = subprocess.run(
        [sys.executable, "-c", code, *more],
        env={**os.environ, "SOURCE": source},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("", 0), done.stderr


def test_the_environment_gives_the_name_unless_the_call_does(start: Start, name: str) -> None:
    (first,) = start(1, RESIDENCY_SIM_SHARE=name)
    (second,) = start(1)
    first.ask("enable(None)")
    second.ask("enable(None)")
    first.ask(f"hold('a', {30 * MIB})")
    assert second.ask("info()")[0] == CAPACITY
    second.ask(f"enable({name!r})")
    assert second.ask("info()")[0] == 34 * MIB
    first.ask(f"enable({name + '-other'!r})")
    assert second.ask("info()")[0] == CAPACITY


def test_a_forked_child_is_refused_the_device_and_costs_its_parent_nothing(
    pair: tuple[Process, Process], name: str
) -> None:
    first, second = pair
    first.ask(f"hold('a', {30 * MIB})")
    for action in ("hold('b', 10)", "info()"):
        answer, status = first.ask(f"forked(lambda: {action}, lambda: sys.exit(3))")
        assert "'spawn'" in answer
        assert status == 3
    # What it inherited is not its own to give back.
    action = "(held.clear(), accelerator.empty_cache())"
    assert first.ask(f"forked(lambda: {action}, lambda: os._exit(0))") == ["(None, None)", 0]
    assert first.ask("info()") == second.ask("info()") == [34 * MIB, CAPACITY]
    action = f"(enable({name!r}), info()[0])"
    answer, status = first.ask(f"forked(lambda: {action}, lambda: sys.exit(0))")
    assert "'spawn'" in answer
    assert status == 0
    assert second.ask("info()") == [34 * MIB, CAPACITY]
    assert _file(name).exists()


def test_a_child_forked_before_the_device_is_used_takes_a_place_of_its_own(
    start: Start, name: str
) -> None:
    first, second = start(2, is_fresh=True)
    first.ask(f"enable({name!r})")
    second.ask(f"enable({name!r})")
    second.ask(f"hold('a', {30 * MIB})")
    answer, status = first.ask("forked(lambda: hold('b', 10), lambda: sys.exit(0))")
    assert "'spawn'" in answer  # it has no place yet
    assert status == 0
    action = f"(enable({name!r}), info()[0])"
    answer, status = first.ask(f"forked(lambda: {action}, lambda: sys.exit(0))")
    assert (answer, status) == (f"(None, {CAPACITY - 30 * MIB})", 0)
    assert second.ask("info()") == [CAPACITY - 30 * MIB, CAPACITY]


def test_a_killed_parent_gives_its_bytes_back_while_its_forked_child_lives(
    pair: tuple[Process, Process],
) -> None:
    first, second = pair
    first.ask(f"hold('a', {30 * MIB})")
    child = first.ask("os.fork() or os.execlp('sleep', 'sleep', '60')")
    sleeper = first.ask("os.fork() or __import__('time').sleep(60)")
    try:
        first.kill()
        assert second.ask("info()") == [CAPACITY, CAPACITY]
    finally:
        for pid in (child, sleeper):
            os.kill(pid, signal.SIGKILL)


def _used_bytes(name: str) -> int:
    table = _file(name).read_bytes()
    return sum(num_bytes for pid, num_bytes in SLOT.iter_unpack(table[HEADER.size :]) if pid)


@pytest.mark.whole
def test_processes_at_once_never_hold_more_than_the_capacity(
    pair: tuple[Process, Process], name: str
) -> None:
    for seed, process in enumerate(pair):
        process.send(f"stress({seed}, 200)")
    highest = 0
    for process in pair:
        while not process.has_answered():
            highest = max(highest, _used_bytes(name))
    assert CAPACITY // 2 < highest <= CAPACITY
    assert all(process.receive() > 0 for process in pair)  # each met the other's bytes
    assert pair[0].ask("info()") == [CAPACITY, CAPACITY]
