"""A server over raw sockets on loopback: a thread for each connection; all connections end with the server.

class Echo(SocketServer):
    def serve(self, client):
        with self.connected(client):
            client.sendall(client.recv(1))

with Echo() as server:
    ... server.url ...
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, Self


class SocketServer:
    """Listen from the start; accept connections from `__enter__` to `__exit__`.

    Attributes:
        listener: the listening socket.
        port, url: where it listens.
        connections: how many were accepted.
        over: set when the server ends.
    """

    def __init__(self) -> None:
        self.connections = 0
        self.over = threading.Event()
        self._lock = threading.RLock()
        self._sockets: set[socket.socket] = set()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def serve(self, client: socket.socket) -> None:
        """Talk to one client, in a thread of its own."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        with suppress(OSError):  # wakes accept
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        with self._lock:
            for one in self._sockets:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self.over.is_set():
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            with self._lock:
                self.connections += 1
            threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    @contextmanager
    def connected(self, *sockets: socket.socket) -> Iterator[None]:
        """Let these sockets send without delay and close when the server ends; a client that leaves is no error."""
        with self._lock:
            self._sockets.update(sockets)
        try:
            for one in sockets:
                with suppress(OSError):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with suppress(OSError, ValueError):
                yield
        finally:
            with self._lock:
                self._sockets.difference_update(sockets)
            for one in sockets:
                one.close()


def read_head(file: BinaryIO) -> bytes:
    """Read the head of an HTTP message, its blank line included; empty at the end of the connection."""
    lines = []
    while line := file.readline():
        lines.append(line)
        if line == b"\r\n":
            break
    return b"".join(lines)


def fields_of(head: bytes) -> dict[str, str]:
    """Return the fields of a head, by lower-case name."""
    lines = (line.decode("latin-1").split(":", 1) for line in head.split(b"\r\n")[1:] if b":" in line)
    return {name.strip().lower(): value.strip() for name, value in lines}
