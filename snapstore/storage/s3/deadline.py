"""Deadlines: every request to a server ends in time, whatever it waits for.

In: the sockets that requests use. Out: at the deadline of a request its connection is shut, so that whatever waits for
it (a handshake, a status line, headers, a body, room to send) fails at once. Time-outs of single reads and writes
cannot do that: a server that gives a byte a second meets each of them.

One thread watches all requests of a process. It starts with the first request and is a daemon; a forked child starts
its own. Looking a host up and connecting have no socket yet: they run in a thread that is left behind (`in_time`).
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  # socket.getaddrinfo imports it, which no thread of ours may be the first to do
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

#: Bodies must move at this rate at least, in both directions [bytes/s].
SLOWEST_BYTES_PER_S = 32 * 1024


class Deadline:
    """When one request must be over: `seconds` from now, and more for each piece of a body (`allow`).

    Any thread may call anything; `end` exactly then when the request is over, and at once on failure.

    Attributes:
        expired: whether its connection was shut.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self.ends_s, self.expired = seconds, time.monotonic() + seconds, False
        self._socket: socket.socket | None = None
        _watchdog.add(self)

    def left_s(self) -> float:
        """Until the deadline, or 0."""
        return max(0.0, self.ends_s - time.monotonic())

    def allow(self, size_bytes: int) -> None:
        """Give the next piece of a body its time. What earlier pieces did not need is not kept: a stall is one."""
        self.ends_s = min(self.ends_s, time.monotonic() + self._seconds) + size_bytes / SLOWEST_BYTES_PER_S

    def guard(self, sock: socket.socket) -> None:
        """Shut the connection of `sock` at the deadline, in place of an earlier one's.

        A duplicate is kept: TLS takes the socket away from its object, and a closed one's number may be another's.
        """
        mine = socket.socket(sock.family, sock.type, sock.proto, fileno=socket.dup(sock.fileno()))
        with _watchdog.changed:
            before, self._socket = self._socket, mine
            if self.expired:
                self.shut()
        if before is not None:
            before.close()

    def shut(self) -> None:
        """Shut the connection; for the watchdog."""
        self.expired = True
        if self._socket is not None:
            with suppress(OSError):  # the other end has closed it
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._socket = None

    def end(self) -> None:
        """The request is over; may be repeated."""
        with _watchdog.changed:
            _watchdog.active.discard(self)
            before, self._socket = self._socket, None
        if before is not None:
            before.close()


class _Watchdog:
    """The thread that shuts connections."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.active: set[Deadline] = set()
        self._wakes_s = 0.0
        self._thread: threading.Thread | None = None

    def add(self, deadline: Deadline) -> None:
        with self.changed:
            self.active.add(deadline)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="snapstore-deadlines", daemon=True)
                with suppress(RuntimeError):  # no threads any more, as at exit: time-outs of sockets remain
                    thread.start()
                    self._thread = thread
            elif deadline.ends_s < self._wakes_s:
                self.changed.notify()

    def _run(self) -> None:
        with self.changed:
            while True:
                now = time.monotonic()
                for deadline in [one for one in self.active if one.ends_s <= now]:
                    self.active.discard(deadline)
                    deadline.shut()
                self._wakes_s = min((one.ends_s for one in self.active), default=now + threading.TIMEOUT_MAX / 2)
                self.changed.wait(self._wakes_s - now)


_watchdog = _Watchdog()


def _begin_again() -> None:
    """In a forked child: its parent's requests are none of its own, and its parent's thread is not there."""
    global _watchdog
    _watchdog = _Watchdog()


os.register_at_fork(after_in_child=_begin_again)


def in_time(work: Callable[[], T], seconds: float, too_late: Callable[[T], object] = lambda result: None) -> T:
    """The result of `work`, which runs in a thread; for calls that nothing can interrupt, such as of a resolver.

    Args:
        too_late: gets a result that comes after its time.

    Raises:
        TimeoutError: it takes longer; the thread goes on alone.
    """
    lock, done = threading.Lock(), threading.Event()
    results: list[T] = []
    failures: list[BaseException] = []
    left = False

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - raised where the result is waited for
            failures.append(error)
        else:
            with lock:
                results.append(result)
                late = left
            if late:
                too_late(result)
        done.set()

    try:
        threading.Thread(target=run, name="snapstore-in-time", daemon=True).start()
    except RuntimeError:  # no threads any more, as at exit
        return work()
    done.wait(seconds)
    with lock:
        left = True
        if results:
            return results[0]
    if failures:
        raise failures.pop()
    raise TimeoutError(f"took longer than {seconds:.0f} s")
