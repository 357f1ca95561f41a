"""A small TCP proxy before an S3 server that cuts, stalls, changes or answers single requests.

    with Proxy("127.0.0.1:17480") as proxy:
        proxy.fault(lambda method, target: method == "PUT", lose_answer(), times=1)
        ... AWS_ENDPOINT_URL_S3=proxy.url ...

It knows just enough of HTTP/1.1 to tell requests apart. Each connection has a thread; all of them end with the proxy.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import BinaryIO, Literal

from kit.socket_server import SocketServer, fields_of, read_head

How = Literal["reset", "close", "stall"]
Match = Callable[[str, str], bool]


@dataclass(frozen=True)
class Fault:
    """A fault of one request."""

    answer: bytes | None = None  # sent in place of the server's, which never sees the request
    before: Callable[[], object] | None = None  # called before the request goes on
    request_bytes: int | None = None  # only so many bytes of the request's body go on, then `how`
    response_bytes: int | None = None  # only so many bytes of the answer's body go on; -1: not even its head
    how: How = "reset"
    replace: tuple[bytes, bytes] = (b"", b"")  # (old, new) in the head of the answer


def answer(status: int, code: str) -> Fault:
    """Return a fault in which the server refuses."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
    head = f"HTTP/1.1 {status} Injected\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return Fault(answer=head.encode() + body)


def lose_answer(how: How = "reset") -> Fault:
    """Return a fault in which the server does what is asked, and its answer is lost."""
    return Fault(response_bytes=-1, how=how)


@dataclass
class _Rule:
    match: Match
    fault: Fault
    left: int
    fired: int = 0


@dataclass
class Proxy(SocketServer):
    """Attributes: requests, (method, target) of all that came."""

    upstream: str
    requests: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        host, port = self.upstream.rsplit(":", 1)
        self._address = host, int(port)
        self._rules: list[_Rule] = []

    def fault(self, match: Match, fault: Fault, *, times: int = 1) -> _Rule:
        """Apply a fault to the next `times` requests that match."""
        rule = _Rule(match, fault, times)
        with self._lock:
            self._rules.append(rule)
        return rule

    def heal(self) -> None:
        """Remove all faults."""
        with self._lock:
            self._rules.clear()

    def _decide(self, method: str, target: str) -> Fault:
        with self._lock:
            self.requests.append((method, target))
            for rule in self._rules:
                if rule.left > 0 and rule.match(method, target):
                    rule.left -= 1
                    rule.fired += 1
                    return rule.fault
        return Fault()

    def serve(self, client: socket.socket) -> None:
        """Relay requests until one side closes the connection."""
        with (
            suppress(OSError), client, socket.create_connection(self._address) as server,
            self.connected(client, server), client.makefile("rb") as requests, server.makefile("rb") as answers,
        ):  # fmt: skip
            while self._relay(client, server, requests, answers):
                pass

    def _relay(self, client: socket.socket, server: socket.socket, requests: BinaryIO, answers: BinaryIO) -> bool:
        """Relay one request and its answer; return whether the connection stays open."""
        head = read_head(requests)
        if not head:
            return False
        method, target = head.split(b" ", 2)[:2]
        fault = self._decide(method.decode(), target.decode())
        if fault.answer is not None:
            client.sendall(fault.answer)
            return False
        if fault.before is not None:
            fault.before()
        fields = fields_of(head)
        if fields.pop("expect", ""):
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"expect:")]
            head = b"\r\n".join(lines)
        server.sendall(head)
        if not self._copy(requests, server, int(fields.get("content-length", 0)), fault.request_bytes):
            return self._end(client, fault.how)
        head = read_head(answers)
        if fault.response_bytes == -1:
            return self._end(client, fault.how)
        client.sendall(head.replace(*fault.replace) if fault.replace[0] else head)
        if method == b"HEAD" or head.split(b" ", 2)[1] in (b"204", b"304"):
            return bool(head)
        fields = fields_of(head)
        if fields.get("transfer-encoding") == "chunked":
            return self._copy_chunks(answers, client, fault)
        if not self._copy(answers, client, int(fields.get("content-length", 0)), fault.response_bytes):
            return self._end(client, fault.how)
        return bool(head)

    def _copy(self, source: BinaryIO, target: socket.socket, size: int, limit: int | None) -> bool:
        """Pass on a body; return whether all of it was passed on."""
        allowed = size if limit is None else min(limit, size)
        done = 0
        while done < allowed and (piece := source.read(min(64 * 1024, allowed - done))):
            target.sendall(piece)
            done += len(piece)
        return done == size

    def _copy_chunks(self, source: BinaryIO, target: socket.socket, fault: Fault) -> bool:
        """Pass on a chunked body, up to a limit that counts the size lines too; return whether all was passed on."""
        left = fault.response_bytes
        while True:
            line = source.readline()
            size = int(line.split(b";")[0], 16)
            chunk = line + source.read(size + 2)
            if left is not None and len(chunk) > left:
                target.sendall(chunk[:left])
                return self._end(target, fault.how)
            left = left if left is None else left - len(chunk)
            target.sendall(chunk)
            if not size:
                return True

    def _end(self, client: socket.socket, how: How) -> bool:
        if how == "stall":
            self.over.wait()
        if how == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            client.shutdown(socket.SHUT_RDWR)
        client.close()
        return False
