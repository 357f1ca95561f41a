"""Deadlines: every request to a server ends in time, whatever it waits for.

In: the sockets of requests. Out: at a request's deadline its connection is shut, so whatever waits for it (a handshake,
a status line, headers, a body, room to send) fails at once. Timeouts of single reads and writes cannot do that: a
server that sends one byte a second never exceeds them.

One daemon thread watches all requests of a process. It starts with the first request; a forked child starts its own.
Host lookup and connecting have no socket yet: they run in a thread that is abandoned if it is late
(`run_with_timeout`).
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  # socket.getaddrinfo imports it; see threads.py
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TypeVar

from ...threads import after_fork_in_child

T = TypeVar("T")

#: The lowest rate at which a body must move, in both directions [bytes/s].
SLOWEST_BYTES_PER_S = 32 * 1024


class Deadline:
    """The time limit of one request: `seconds` from now, and more for each piece of a body (`allow`).

    Any thread may call anything. Call `end` when the request is over, also after a failure.

    Attributes:
        expired: Whether the connection was shut.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self.ends_s, self.expired = seconds, time.monotonic() + seconds, False
        self._socket: socket.socket | None = None
        _watchdog.add(self)

    def left_s(self) -> float:
        """Return the time until the deadline, or 0."""
        return max(0.0, self.ends_s - time.monotonic())

    def allow(self, size_bytes: int) -> None:
        """Add the time for the next piece of a body; time that earlier pieces did not use is not kept."""
        self.ends_s = min(self.ends_s, time.monotonic() + self._seconds) + size_bytes / SLOWEST_BYTES_PER_S

    def watch(self, sock: socket.socket) -> None:
        """Shut the connection of `sock` at the deadline; stop watching an earlier connection of this request.

        A duplicate of the descriptor is kept: TLS detaches the socket from its object, and the number of a closed
        descriptor may be reused.
        """
        mine = socket.socket(sock.family, sock.type, sock.proto, fileno=socket.dup(sock.fileno()))
        with _watchdog.changed:
            before, self._socket = self._socket, mine
            if self.expired:
                self.shut()
        if before is not None:
            before.close()

    def shut(self) -> None:
        """Shut the connection (for the watchdog)."""
        self.expired = True
        if self._socket is not None:
            with suppress(OSError):  # the server has closed it
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._socket = None

    def end(self) -> None:
        """End the request. It is idempotent."""
        with _watchdog.changed:
            _watchdog.active.discard(self)
            before, self._socket = self._socket, None
        if before is not None:
            before.close()


class _Watchdog:
    """The thread that shuts connections at their deadlines."""

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
                with suppress(RuntimeError):  # at exit no thread can start: socket timeouts remain
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


def _restart_in_child() -> None:
    """Start with no requests in a forked child, which has none of its parent's requests or threads."""
    global _watchdog
    _watchdog = _Watchdog()


after_fork_in_child(_restart_in_child)


def run_with_timeout(work: Callable[[], T], seconds: float, discard: Callable[[T], object] = lambda result: None) -> T:
    """Run `work` in a thread and return its result; for calls that nothing can interrupt, such as a host lookup.

    Args:
        discard: Receives a result that comes too late.

    Raises:
        TimeoutError: `work` takes longer; its thread goes on alone.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
            future.set_exception(error)

    try:
        threading.Thread(target=run, name="snapstore-timeout", daemon=True).start()
    except RuntimeError:  # at exit no thread can start
        return work()
    if not wait([future], seconds).done:
        future.add_done_callback(lambda late: late.exception() or discard(late.result()))
        raise TimeoutError(f"took longer than {seconds:.0f} s")
    try:
        return future.result()
    finally:
        future = Future()  # an exception holds this frame: break the cycle, or it keeps the bytes of its request
