"""Two processes hand a device over; whichever is killed, wherever, the other goes on or raises at
once, and has everything that it had.

The killed side is a real process that imports no torch, so that each stage costs a tenth of a
second.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from residency import HandOffError, hand_off, take_over
from residency._handoff._peer import Deadline, ask_for_device, await_taker
from residency._memory._state import measure

pytestmark = pytest.mark.sim_device(capacity="256MiB")

MIB = 1 << 20
SOON = 15.0  # far below the patience of 30 s with which the processes wait for each other
Start = Callable[..., "subprocess.Popen[bytes]"]


def make_model(device: torch.device) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(1792, 1792, bias=False) for _ in range(3))).to(device)


def bits(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().cpu().clone() for parameter in model.parameters()]


def need_of_all(device: torch.device) -> int:
    return measure(device).capacity - 2 * MIB


def whole(model: nn.Module, before: list[Tensor], device: torch.device) -> bool:
    is_back = all(parameter.device == device for parameter in model.parameters())
    return is_back and all(map(torch.equal, before, bits(model)))


@pytest.mark.parametrize(
    "stage", ["before it states its need", "after it stated its need", "sends nonsense"]
)
def test_a_taker_that_dies_early_leaves_the_releaser_whole(
    device: torch.device, path: Path, start: Start, stage: str
) -> None:
    model = make_model(device)
    before, started = bits(model), time.monotonic()
    start("take", stage, need_of_all(device))
    entered: list[bool] = []
    error: HandOffError | None = None
    try:
        with hand_off(0, park=[model], peer=path, timeout=30):
            entered.append(True)
    except HandOffError as caught:
        error = caught
    if stage == "before it states its need":
        assert error is not None
    if error is not None:  # else it had not died yet when it was told of its bytes
        assert not entered
        assert not error.is_parked
        assert "has ended" in str(error)
    assert whole(model, before, device)
    assert time.monotonic() - started < SOON


def test_a_taker_that_never_comes_ends_in_an_error_and_nothing_was_moved(
    device: torch.device, path: Path, start: Start
) -> None:
    model = make_model(device)
    before = bits(model)
    start("take", "before it connects")
    with (
        pytest.raises(HandOffError, match=r"No process asked for the device .* within 0\.5 s"),
        hand_off(need_of_all(device), park=[model], peer=path, timeout=0.5),
    ):
        pytest.fail("the body must not run")
    assert whole(model, before, device)
    assert not path.exists()


def test_a_taker_that_dies_with_the_bytes_gives_them_back(
    device: torch.device, path: Path, start: Start
) -> None:
    model = make_model(device)
    before, started = bits(model), time.monotonic()
    taker = start("take", "with the bytes in hand", need_of_all(device))
    with hand_off(0, park=[model], peer=path, timeout=30) as freed:
        assert freed.parked > 30 * MIB
        assert taker.wait(30) == -9
    assert whole(model, before, device)
    assert time.monotonic() - started < SOON


def test_a_taker_that_never_returns_does_not_hang_the_releaser(
    device: torch.device, path: Path, start: Start
) -> None:
    model = make_model(device)
    before = bits(model)
    start("take", "never returns", need_of_all(device))
    with hand_off(0, park=[model], peer=path, timeout=1):
        pass
    assert whole(model, before, device)  # its bytes are free all the same


@pytest.mark.parametrize("stage", ["while it listens", "while it frees"])
def test_a_releaser_that_dies_early_is_an_error_at_once(
    device: torch.device, path: Path, start: Start, stage: str
) -> None:
    releaser, started = start("release", stage), time.monotonic()
    if stage == "while it listens":
        releaser.wait(30)
        assert path.exists()  # nobody listens there any more
        reason, patience = "No process hands a device over", 0.3
    else:
        reason, patience = "has ended", 30.0
    with (
        pytest.raises(HandOffError, match=reason),
        take_over("1MiB", peer=path, timeout=patience),
    ):
        pytest.fail("the body must not run")
    assert time.monotonic() - started < SOON


def test_a_releaser_that_dies_after_its_proof_does_not_disturb_the_taker(
    device: torch.device, path: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    releaser = start("release", "after it proved the bytes")
    with take_over("1MiB", peer=path) as taken:
        assert taken.free == measure(device).free
        assert releaser.wait(30) == -9
    assert "has ended" in caplog.text


def test_a_refusal_reaches_the_taker_with_its_reason(
    device: torch.device, path: Path, start: Start
) -> None:
    start("release", "refuses")
    with (
        pytest.raises(HandOffError, match=r"refused: 1\.00 GiB too few"),
        take_over("1MiB", peer=path),
    ):
        pytest.fail("the body must not run")


def test_the_taker_looks_for_itself(device: torch.device, path: Path, start: Start) -> None:
    start("release", "proves what is not so")
    with (
        pytest.raises(HandOffError, match="a third process takes them"),
        take_over(measure(device).capacity + MIB, peer=path),
    ):
        pytest.fail("the body must not run")


def test_a_socket_that_a_killed_process_left_is_no_obstacle(
    device: torch.device, path: Path, start: Start
) -> None:
    start("release", "while it listens").wait(30)
    assert path.exists()
    taker = start("take", "as it should", 64 * MIB)
    with hand_off(0, peer=path, timeout=30) as freed:
        assert freed.free >= 64 * MIB
    assert taker.wait(30) == 0


def test_the_larger_need_counts_and_a_refusal_undoes_everything(
    device: torch.device, path: Path
) -> None:
    model = make_model(device)
    before = bits(model)
    kept = torch.ones(64 * MIB, dtype=torch.uint8, device=device)
    heard: list[str] = []

    def take() -> None:
        link = ask_for_device(path, need_of_all(device), Deadline(30))
        heard.append(link.receive(Deadline(30), expected="ready")["refused"])
        link.close()

    taker = threading.Thread(target=take)
    taker.start()
    with (
        pytest.raises(HandOffError, match="too few"),
        hand_off("1MiB", park=[model], peer=path, timeout=30),
    ):
        pytest.fail("the body must not run")
    taker.join()
    assert "too few" in heard[0]
    assert whole(model, before, device)
    del kept


def test_two_releasers_at_one_path_are_told_apart(device: torch.device, path: Path) -> None:
    came = threading.Event()

    def listen() -> None:
        link, need = await_taker(path, Deadline(30))
        assert need == 7
        link.close()
        came.set()

    first = threading.Thread(target=listen)
    first.start()
    while not path.exists():
        time.sleep(0.001)
    with pytest.raises(HandOffError, match="Another process is handing"):
        await_taker(path, Deadline(30))
    ask_for_device(path, 7, Deadline(30)).close()
    first.join()
    assert came.is_set()


def test_a_need_that_is_none_is_refused_by_the_releaser(path: Path) -> None:
    def ask() -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        while connection.connect_ex(os.fspath(path)):
            time.sleep(0.001)
        connection.sendall(b'{"need": -3}\n')
        connection.close()

    taker = threading.Thread(target=ask)
    taker.start()
    with pytest.raises(HandOffError, match="needs -3 bytes"):
        await_taker(path, Deadline(30))
    taker.join()


def test_a_taker_that_was_refused_keeps_its_cache(
    device: torch.device, path: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    cached = torch.ones(40 * MIB, dtype=torch.uint8, device=device)
    del cached
    reserved = measure(device).reserved
    start("release", "refuses")
    with pytest.raises(HandOffError, match="refused"), take_over("1MiB", peer=path):
        pytest.fail("the body must not run")
    assert measure(device).reserved == reserved
    assert caplog.text == ""


def test_a_taker_that_takes_too_long_is_named_in_the_log(
    device: torch.device, path: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    start("take", "never returns", MIB)
    with hand_off(0, peer=path, timeout=1):
        pass
    assert (
        "did not answer within 1 s; raise timeout= if it is slow. The device is taken back."
        in caplog.text
    )


def test_messages_that_no_reader_bears_are_refused(path: Path) -> None:
    for line in (b"[" * 60_000 + b"\n", b'{"need": 1' + b"0" * 400 + b"}\n"):

        def ask(line: bytes = line) -> None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            while connection.connect_ex(os.fspath(path)):
                time.sleep(0.001)
            connection.sendall(line)
            connection.close()

        taker = threading.Thread(target=ask)
        taker.start()
        with pytest.raises(HandOffError, match=r"sent b'\[\[|needs 1000"):
            await_taker(path, Deadline(30))
        taker.join()


def test_a_forked_child_does_not_hide_that_its_parent_died(
    device: torch.device, path: Path, start: Start
) -> None:
    taker = start("take", "forks, with the bytes in hand", MIB)
    started = time.monotonic()
    with hand_off(0, peer=path, timeout=30):
        assert taker.wait(30) == -9
    assert time.monotonic() - started < SOON


def test_a_lock_that_is_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    path.with_name(f"{path.name}.lock").symlink_to(precious)
    with pytest.raises(HandOffError, match="cannot be locked"):
        await_taker(path, Deadline(0))
    assert precious.read_text() == "kept"
