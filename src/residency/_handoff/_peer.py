"""How two processes on one machine hand a device over: over a Unix-domain socket, in lines of JSON.

The side that releases listens at a path, for the time of one hand-off; the side that takes over
connects and states the bytes that it needs. The kernel closes a dead process's socket, so each
side learns at once that the other is gone, and every wait has a deadline besides. Imports no torch.

[Note: the exchange]
    taking -> releasing   {"need": N, "pid": P}    before anything is freed
    releasing -> taking   {"ready": F, "pid": P}   N bytes are proven free; F are
    releasing -> taking   {"refused": "why"}       instead; everything is as it was
    taking -> releasing   {"returned": true, "stays": true}    what was taken is free again
    either way            {"leaves": true}         later: the process ends in good order,
                                                   or has to do with another one from now on

[Note: a dead peer] Both sides keep their connection until their next hand-off at the path, or their
end. So the next wait of either one learns that the other process was killed, or ended with an
error, when that happens: the connection is cut and nothing was said before. It raises once; the
wait after that is for a process that was started in its place.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import select
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from residency._errors import HandOffError, InvalidArgumentError
from residency._registries import WeakRegistry
from residency._system import in_forked_child, posix

_LONGEST_LINE = 65_536  # far more than a message has: what sends more is no peer
_LONGEST_PATH = 107  # bytes in sockaddr_un, less the closing zero
_PAUSE_SECONDS = 0.01  # between two tries; any few milliseconds work
_MOST_BYTES = 2**63  # no device has more, and the figures that torch takes are of 64 bits
_MOST_SECONDS = 1e8  # three years, which every wait of the system still takes
_MOST_MILLISECONDS = 2**31 - 1  # of one poll
_SUCCESSOR_SECONDS = 1.0  # one that asks tries again every `_PAUSE_SECONDS`


class Deadline:
    """The moment until which a wait may last."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """The seconds that are left; 0 at the least."""
        return max(0.0, self._end - time.monotonic())

    def pause(self, seconds: float = _PAUSE_SECONDS) -> bool:
        """Sleeps a moment; returns whether there is time left after it."""
        time.sleep(min(seconds, self.left))
        return self.left > 0


def check_timeout(timeout: float) -> float:
    """Returns a timeout in seconds.

    Raises:
        InvalidArgumentError: The timeout is not a number of seconds in range.
    """
    if (
        isinstance(timeout, bool)
        or not isinstance(timeout, int | float)
        or not 0 <= timeout <= _MOST_SECONDS
    ):
        raise InvalidArgumentError(
            f"timeout is {timeout!r}; expected seconds, from 0 to {_MOST_SECONDS:g}."
        )
    return float(timeout)


def check_path(path: str | os.PathLike[str]) -> Path:
    """Returns the path of a socket.

    Raises:
        InvalidArgumentError: The path cannot be that of a socket.
    """
    socket_path = Path(path)
    if len(os.fsencode(socket_path)) > _LONGEST_PATH:
        raise InvalidArgumentError(
            f"peer is {str(socket_path)!r}, {len(os.fsencode(socket_path))} bytes; the path of a "
            f"Unix-domain socket has at most {_LONGEST_PATH}. Give a shorter one."
        )
    if not socket_path.parent.is_dir():
        raise InvalidArgumentError(
            f"peer is {str(socket_path)!r}; there is no such directory; make it first."
        )
    if socket_path.exists() and not stat.S_ISSOCK(socket_path.stat().st_mode):
        raise InvalidArgumentError(
            f"peer is {str(socket_path)!r}, which is there and is no socket; give another path."
        )
    return socket_path


_links: WeakRegistry[Link] = WeakRegistry()


def _forget_links() -> None:
    """Lets go, in a forked child, of what would hide its parent's death from the other side."""
    for link in _links:
        link.forget()
    _takers.clear()
    _releasers.clear()


in_forked_child(_forget_links)


class Link:
    """The connection to the other process, from either side.

    Attributes:
        is_cut: Whether the other process was found to be gone.
        pid: Its number, as it says itself; None where it did not.
    """

    def __init__(self, connection: socket.socket, path: Path) -> None:
        self.is_cut = False
        self.pid: int | None = None
        self._connection = connection
        self._path = path
        self._received = b""
        _links.add(self)

    def send(self, **message: object) -> None:
        """Sends one message.

        Raises:
            HandOffError: The other process is gone.
        """
        try:
            self._connection.settimeout(None)  # a line fits the socket's buffer
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise self._gone() from error

    def receive(self, deadline: Deadline, *, expected: str) -> dict[str, Any]:
        """Returns the next message.

        Args:
            deadline: Until when to wait for it.
            expected: What the message is to have, or ``"refused"`` in its place.

        Raises:
            HandOffError: The other process is gone, took too long, or sent something else.
        """
        line = self._read_line(deadline)
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict) or not {expected, "refused"} & message.keys():
            raise HandOffError(
                f"The process at the other end of {self._path} sent {line[:60]!r}; expected a "
                f"message with {expected!r}. Let both sides use the same version of residency."
            )
        return message

    def check(self) -> None:
        """Looks whether the other process is still there.

        Raises:
            HandOffError: It has ended, or left.
        """
        try:
            if self.has_word() and not self._connection.recv(1, socket.MSG_PEEK):
                raise self._gone()
        except OSError as error:
            raise self._gone() from error

    def fileno(self) -> int:
        """Returns the number of the connection's file, by which it can be polled."""
        return self._connection.fileno()

    def has_word(self) -> bool:
        """Returns whether the other process has said something, or has ended."""
        poll = select.poll()  # a socket with a timeout waits, whatever flags `recv` is given
        poll.register(self, select.POLLIN)
        return bool(poll.poll(0))

    def left_well(self) -> bool:
        """Returns whether the other process said that it leaves, before it ended."""
        try:
            self.receive(Deadline(_SUCCESSOR_SECONDS), expected="leaves")
        except HandOffError:
            return False
        return True

    def close(self) -> None:
        """Ends the connection, which the other side sees."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # also for a fork that still has it
        self._connection.close()

    def leave(self) -> None:
        """Ends the connection in good order: the other side may wait for this process again."""
        with suppress(HandOffError):
            self.send(leaves=True)
        self.close()

    def forget(self) -> None:
        """Closes this process's copy alone; the connection is another process's."""
        self._connection.close()

    def _read_line(self, deadline: Deadline) -> bytes:
        while b"\n" not in self._received:
            if len(self._received) > _LONGEST_LINE:
                raise HandOffError(
                    f"The process at the other end of {self._path} sends no lines, so that it is "
                    "not one of residency. Give both sides a path of their own."
                )
            self._connection.settimeout(max(deadline.left, 1e-3))
            try:
                data = self._connection.recv(4096)
            except TimeoutError:
                raise HandOffError(
                    f"The process at the other end of {self._path} did not answer within "
                    f"{deadline.seconds:g} s; raise timeout= if it is slow."
                ) from None
            except OSError as error:
                raise self._gone() from error
            if not data:
                raise self._gone()
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _gone(self) -> HandOffError:
        self.is_cut = True
        return HandOffError(
            f"The process at the other end of {self._path} has ended, or left the hand-off."
        )


class _OpenLinks:
    """The links that stay open after a hand-off, the newest at each path. [Note: a dead peer]"""

    def __init__(self) -> None:
        self._links: dict[Path, Link] = {}

    def get(self, path: Path) -> Link | None:
        return self._links.get(path.absolute())

    def add(self, path: Path, link: Link) -> None:
        self.drop(path)
        self._links[path.absolute()] = link

    def drop(self, path: Path) -> None:
        before = self._links.pop(path.absolute(), None)
        if before is not None:
            before.leave()

    def drop_ended(self, path: Path) -> bool:
        """Forgets a process that has ended or left; returns whether it did so without a word."""
        link = self.get(path)
        is_dead = link is not None and not link.left_well()
        self.drop(path)
        return is_dead

    def clear(self) -> None:
        self._links.clear()

    def __iter__(self) -> Iterator[Link]:
        return iter(list(self._links.values()))


_takers = _OpenLinks()
_releasers = _OpenLinks()


def remember_taker(path: Path, link: Link) -> None:
    """Keeps the link to a process that had the device, which the next wait at the path looks at."""
    _takers.add(path, link)


def return_and_stay(path: Path, link: Link) -> None:
    """Tells the releasing process that the bytes are free again, and keeps the link.

    Raises:
        HandOffError: The other process is gone. The next wait at the path knows of it.
    """
    try:
        link.send(returned=True, stays=True)
    except HandOffError:
        _releasers.add(path, link)
        raise
    _releasers.add(path, link)


def _take_leave() -> None:
    """Tells those who may wait for this process that it has come to a good end."""
    # Python has an error that ended the process by then; without a word the other side raises.
    is_good = getattr(sys, "last_value", None) is None
    for link in (*_releasers, *_takers):
        if is_good:
            link.leave()
        else:
            link.close()


atexit.register(_take_leave)


def await_taker(path: Path, deadline: Deadline) -> tuple[Link, int]:
    """Waits for the process that takes the device over; the releasing side's beginning.

    Returns:
        The connection, and the bytes that the other side needs.

    Raises:
        HandOffError: No process came in time, another process listens there, or the message is
            invalid.
    """
    connection: socket.socket | None = None
    try:
        connection = _accepted(path, deadline)
        link = Link(connection, path)
        message = link.receive(deadline, expected="need")
        need, pid = message.get("need"), message.get("pid")
        if isinstance(need, bool) or not isinstance(need, int) or not 0 <= need < _MOST_BYTES:
            raise HandOffError(
                f"The process at the other end of {path} needs {str(need)[:40]} bytes, which is no "
                "number of bytes. Use the same version of residency on both sides."
            )
        link.pid = pid if isinstance(pid, int) else None
        _takers.drop(path)  # of the process that had the device before this one
        return link, need
    except BaseException:
        if connection is not None:
            connection.close()
        raise


def _accepted(path: Path, deadline: Deadline) -> socket.socket:
    with _sole_listener(path), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(os.fspath(path))
        except OSError as error:
            raise HandOffError(
                f"{path} cannot be listened at: {error}. Use a short path in a directory that you "
                "may write."
            ) from error
        try:
            path.chmod(0o600)  # no process can connect before listen()
            listener.listen(1)
            _await_connection(listener, path, deadline)
            return listener.accept()[0]
        finally:
            with suppress(FileNotFoundError):
                path.unlink()


def _await_connection(listener: socket.socket, path: Path, deadline: Deadline) -> None:
    """Waits until a process asks for the device.

    Raises:
        HandOffError: None came in time, or the one that had it before is dead.
    """
    former = _takers.get(path)
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    if former is not None:
        poll.register(former, select.POLLIN)
    while not _is_ready(poll, listener, deadline.left):
        if former is None or not former.has_word():
            if deadline.left:  # a poll of the longest time was over
                continue
            there = f" Process {former.pid}, which had it before, is there." if former else ""
            raise HandOffError(
                f"No process asked for the device at {path} within {deadline.seconds:g} s.{there} "
                "Start the other process, or raise timeout= if it is slow."
            )
        poll.unregister(former)
        pid, former = former.pid, None
        is_dead = _takers.drop_ended(path)  # what is said now is said once
        patience = min(_SUCCESSOR_SECONDS, deadline.left)
        if is_dead and not _is_ready(poll, listener, patience):
            raise HandOffError(
                f"Process {pid}, which had the device at {path} before, has ended, and no other "
                "asks for it. Start it again: the next hand_off waits for it."
            )


def _is_ready(poll: select.poll, listener: socket.socket, seconds: float) -> bool:
    """Waits for one of those that are polled; returns whether a process connects."""
    found = poll.poll(min(math.ceil(1000 * seconds), _MOST_MILLISECONDS))
    return listener.fileno() in [file for file, _ in found]


def ask_for_device(path: Path, need: int, deadline: Deadline) -> Link:
    """Connects to the releasing process and states the bytes; the taking side's beginning.

    Raises:
        HandOffError: No process listens there in time, the other process ended, or the one that
            handed the device over before is dead.
    """
    connection: socket.socket | None = None
    patience, dead = deadline, None
    try:
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.settimeout(max(patience.left, 1e-3))
                connection.connect(os.fspath(path))
                break
            except OSError as error:  # it does not listen yet: its hand-off is not that far
                connection.close()
                former = _releasers.get(path)
                # One that gave no number is of a version that ends a connection while it lives.
                if former and former.has_word() and _releasers.drop_ended(path) and former.pid:
                    dead = former.pid
                    patience = Deadline(min(_SUCCESSOR_SECONDS, deadline.left))
                if not patience.pause():
                    raise _nobody_hands_over(path, deadline, dead, error) from error
        link = Link(connection, path)
        link.send(need=need, pid=os.getpid())
        _releasers.drop(path)
        return link
    except BaseException:
        if connection is not None:
            connection.close()
        raise


def _nobody_hands_over(
    path: Path, deadline: Deadline, dead: int | None, error: OSError
) -> HandOffError:
    if dead is not None:
        return HandOffError(
            f"Process {dead}, which handed the device over at {path} before, has ended, and no "
            "other hands it over. Start it again: the next take_over waits for it."
        )
    former = _releasers.get(path)
    is_there = former is not None and former.pid is not None
    there = f" Process {former.pid}, which did before, is there." if former and is_there else ""
    return HandOffError(
        f"No process hands a device over at {path}; waited {deadline.seconds:g} s "
        f"({error}).{there} Call hand_off there, or raise timeout= here."
    )


@contextmanager
def _sole_listener(path: Path) -> Iterator[None]:
    """Makes this process the one that listens at a path, and removes what a killed one left."""
    fcntl = posix("fcntl", "a hand-off locks a file")
    lock_path = path.with_name(f"{path.name}.lock")  # stays; only its lock counts
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        # Of an object that closes it, whatever comes before the next line.
        file = os.fdopen(os.open(lock_path, flags, 0o600), "rb", buffering=0)
    except OSError as error:
        raise HandOffError(
            f"{lock_path} cannot be locked: {error}. Use a path in a directory that you may write."
        ) from error
    with file:
        lock = file.fileno()
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise HandOffError(
                f"Another process is handing a device over at {path}; give another path."
            ) from None
        with suppress(FileNotFoundError):
            path.unlink()
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a child that was forked meanwhile has it, too
