"""Process ends: rank 0 notices within a second that the process of another rank has ended, however it ended.

In: a TCP connection from each other rank to rank 0. Out: the ranks whose connection is closed. The kernel closes it at
the end of the process, also after SIGKILL. A heartbeat cannot tell this so soon: a process that runs C code for minutes
sends none, so heartbeats are waited for much longer.

- A rank that closes its channel says so before, by a message (torch_ranks.py).
- A host without power and a network that is cut close no connection: there, heartbeats decide.
- If a proxy has closed the connection of a living rank, this rank connects again at its next heartbeat. Each heartbeat
  also sends a byte, since proxies close connections that are idle.
- A forked child closes its copy: else the connection would stay open until the child ends.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from ..errors import SnapstoreError
from ..text import log
from ..threads import after_fork_in_child, no_threads

#: A rank waits so long for rank 0 to accept its connection [s].
CONNECT_S = 10.0
#: The thread of rank 0 looks so often whether the channel is closed [s].
LOOK_S = 1.0
#: More connections than ranks: of ranks that connect again, and of strangers, which hold a place until they leave.
SPARE = 64
_RANK_BYTES = 4

_own: set[socket.socket] = set()  # the connections from this process to rank 0


def _close_in_child() -> None:
    for sock in [*_own]:
        sock.close()
    _own.clear()


after_fork_in_child(_close_in_child)


class Tie:
    """The connection of a rank to rank 0, which shows that its process lives.

    Args:
        attempt: identifies the attempt of the job; ASCII.
    """

    def __init__(self, host: str, port: int, attempt: str, rank: int) -> None:
        self._place, self._hello = (host, port), attempt.encode() + rank.to_bytes(_RANK_BYTES, "big")
        self._sock: socket.socket | None = None
        self._is_possible = True

    def renew(self) -> None:
        """Send a byte, or connect again if the connection was closed; if rank 0 cannot be reached, never again."""
        if self._sock is not None and not self._works(self._sock):
            self.close()
        if self._sock is None and self._is_possible:
            try:
                self._sock = socket.create_connection(self._place, CONNECT_S)
                _own.add(self._sock)
                self._sock.sendall(self._hello)
                self._sock.setblocking(False)
            except OSError as error:
                self.close()
                self._is_possible = False
                log.warning(
                    "rank 0 cannot be reached at %s, port %d (%s): if this process is killed, rank 0 notices it only "
                    "by missing heartbeats; let all TCP ports between the ranks be open",
                    *(*self._place, error),
                )

    @staticmethod
    def _works(sock: socket.socket) -> bool:
        try:
            with suppress(BlockingIOError):  # rank 0 is stopped
                sock.send(b"\0")
            return bool(sock.recv(1))
        except BlockingIOError:
            return True  # rank 0 sends nothing
        except OSError:
            return False

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._sock is not None:
            _own.discard(self._sock)
            self._sock.close()
            self._sock = None


class EndsListener:
    """Rank 0's end of the connections, and the thread that watches them from `start` to `close`.

    Args:
        attempt: as in `Tie`.
        count: of all ranks.
        told: called in the thread with the ranks whose connection is closed, after each change. It may raise
            SnapstoreError.

    Attributes:
        port: where the other ranks connect; they may do so before `start`.

    Raises:
        OSError: no port can be opened.
    """

    def __init__(self, attempt: str, count: int, told: Callable[[Collection[int]], object]) -> None:
        self._attempt, self._count, self._told = attempt.encode(), count, told
        self._server = _server(count + SPARE)
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]
        self._is_closed = self._is_started = False
        self._closed = set[int]()  # the ranks whose connection is closed
        self._open = dict[int, socket.socket]()  # by rank, its newest connection
        self._strangers = dict[socket.socket, bytes]()  # what each has sent

    def start(self) -> None:
        """Start the thread.

        Raises:
            CapabilityError: it cannot be started.
        """
        try:
            threading.Thread(target=self._run, name="snapstore-ends", daemon=True).start()
        except RuntimeError as error:
            raise no_threads() from error
        self._is_started = True

    def close(self) -> None:
        """Watch no longer; the thread closes the connections within a second."""
        self._is_closed = True
        if not self._is_started:
            self._server.close()

    def _run(self) -> None:
        with self._server, selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ, -1)
            while not self._is_closed:
                before = self._closed.copy()
                for key, _ in selector.select(LOOK_S):
                    sock = key.fileobj
                    if not isinstance(sock, socket.socket):
                        continue
                    if sock is self._server:
                        self._accept(selector)
                    elif sock in self._strangers:
                        self._greet(selector, sock)
                    else:
                        self._read(selector, sock, key.data)
                if self._closed != before:
                    with suppress(SnapstoreError):  # the channel is closed or broken: all ranks notice that
                        self._told(sorted(self._closed))
            for sock in (*self._strangers, *self._open.values()):
                sock.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            sock, _ = self._server.accept()
        except OSError:  # it has gone, or this process has too many open files: heartbeats remain
            time.sleep(LOOK_S)
            return
        if len(self._strangers) + len(self._open) >= self._count + SPARE:
            sock.close()
            return
        sock.setblocking(False)
        self._strangers[sock] = b""
        selector.register(sock, selectors.EVENT_READ)

    def _greet(self, selector: selectors.BaseSelector, sock: socket.socket) -> None:
        """Read the attempt and the rank of a new connection; close one of another job, or of no rank."""
        wanted = len(self._attempt) + _RANK_BYTES
        data = _received(sock, wanted - len(self._strangers[sock]))
        if data is None:
            return
        said = self._strangers[sock] = self._strangers[sock] + data
        if data and len(said) < wanted:
            return
        del self._strangers[sock]
        rank = int.from_bytes(said[-_RANK_BYTES:], "big")
        if len(said) < wanted or not said.startswith(self._attempt) or not 0 < rank < self._count:
            selector.unregister(sock)
            sock.close()
            return
        before, self._open[rank] = self._open.get(rank), sock
        if before is not None:
            selector.unregister(before)
            before.close()
        selector.modify(sock, selectors.EVENT_READ, rank)
        self._closed.discard(rank)

    def _read(self, selector: selectors.BaseSelector, sock: socket.socket, rank: int) -> None:
        if self._open.get(rank) is sock and _received(sock, 4096) == b"":
            selector.unregister(sock)
            sock.close()
            del self._open[rank]
            self._closed.add(rank)


def _server(backlog: int) -> socket.socket:
    """Return a server of all addresses of this host, on a free port."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # the kernel knows IPv6, and this host has switched it off
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def _received(sock: socket.socket, most: int) -> bytes | None:
    """Return the bytes that have come; b"" if the connection is closed, None if none have come."""
    try:
        return sock.recv(most)
    except (BlockingIOError, InterruptedError):
        return None
    except OSError:
        return b""
