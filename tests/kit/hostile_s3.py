"""An S3 server over raw sockets, in this process, that answers honestly, or by a table of lies.

    with HostileS3() as server:
        server.lie("/case-1/", LIES["102, the answer late"], times=1)
        ... AWS_ENDPOINT_URL_S3=server.url ...

Honest answers come from a dict, as radosgw gives them: PUT (create-only, copies), GET (ranges), HEAD, DELETE, batches,
pages of a listing. A lie gets the connection and the honest answer, and sends whatever it likes.
"""

from __future__ import annotations

import hashlib
import random
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import BinaryIO
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from kit.socket_server import SocketServer, fields_of, read_head

PAGE = 3  # keys a page of a listing
SLOW_S = 0.2  # between two bytes of a trickle


@dataclass
class Request:
    method: str
    target: str
    fields: dict[str, str]
    body: bytes


@dataclass
class Wire:
    """A connection that a lie controls; `over` ends every wait when the server ends."""

    sock: socket.socket
    over: threading.Event
    request: Request

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def trickle(self, data: bytes, pause_s: float = SLOW_S) -> None:
        for i in range(len(data)):
            self.sock.sendall(data[i : i + 1])
            if self.over.wait(pause_s):
                return

    def stall(self) -> None:
        """Send nothing until the client has gone."""
        self.sock.settimeout(0.5)
        while not self.over.is_set():
            with suppress(TimeoutError):
                if not self.sock.recv(65536):
                    return


#: Gets the connection and the honest answer; returns whether the connection stays open.
Lie = Callable[[Wire, bytes], "bool | None"]


def answer(status: int, body: bytes = b"", reason: str = "OK", **fields: str) -> bytes:
    """Return the bytes of an answer."""
    fields = {"Content-Length": str(len(body)), "Date": formatdate(usegmt=True)} | {
        name.replace("_", "-"): value for name, value in fields.items()
    }
    lines = [f"HTTP/1.1 {status} {reason}", *(f"{name}: {value}" for name, value in fields.items() if value), "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


PORTAL = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body>Please sign in to this network</body></html>"
XHTML = b"<html xmlns='http://www.w3.org/1999/xhtml'><body><p>Please sign in</p></body></html>"


def error(status: int, code: str) -> bytes:
    body = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode()
    return answer(status, body, "No", Content_Type="application/xml")


@dataclass
class _Rule:
    part: str
    lie: Lie
    left: int
    method: str
    stored: bool
    after: int = 0
    fired: int = 0


@dataclass
class HostileS3(SocketServer):
    """Attributes: objects, by bucket/name; touched, how often each was copied onto itself; seen, (method, target)."""

    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    touched: dict[str, int] = field(default_factory=dict)
    seen: list[tuple[str, str]] = field(default_factory=list)
    knows_start_after: bool = True

    def __post_init__(self) -> None:
        super().__init__()
        self._rules: list[_Rule] = []

    def lie(
        self, part: str, lie: Lie, *, times: int = 10**9, method: str = "", stored: bool = False, after: int = 0
    ) -> _Rule:
        """Answer the next `times` requests whose target, or x-lie header, contains `part` by a lie.

        Args:
            method: only requests of this method; "": all.
            stored: do first what the request asks for; else a request that writes does nothing.
            after: how many of these requests are answered honestly first.
        """
        rule = _Rule(part, lie, times, method, stored, after)
        with self._lock:
            self._rules.append(rule)
        return rule

    def honest(self, part: str) -> None:
        """Tell no more lies about `part`."""
        with self._lock:
            self._rules = [rule for rule in self._rules if rule.part != part]

    def serve(self, client: socket.socket) -> None:
        """Answer requests until one side closes the connection."""
        with self.connected(client), client.makefile("rb") as file:
            while self._one(client, file):
                pass

    def _one(self, sock: socket.socket, file: BinaryIO) -> bool:
        head = read_head(file)
        line = head.partition(b"\r\n")[0].decode("latin-1").split()
        if len(line) < 3:
            return False
        fields = fields_of(head)
        request = Request(line[0], line[1], fields, b"")
        with self._lock:
            self.seen.append((request.method, request.target))
            rule = self._rule_of(request)
        if rule is not None and getattr(rule.lie, "before_body", False):
            return bool(rule.lie(Wire(sock, self.over, request), b"")) and "expect" in fields
        if "expect" in fields:
            sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.body = file.read(int(fields.get("content-length", 0)))
        if len(request.body) < int(fields.get("content-length", 0)):
            return False
        if rule is None:
            sock.sendall(self.answer_to(request))
            return True
        honest = self.answer_to(request) if rule.stored or request.method in ("GET", "HEAD") else error(500, "Told")
        return bool(rule.lie(Wire(sock, self.over, request), honest))

    def _rule_of(self, request: Request) -> _Rule | None:
        text = unquote(request.target) + "\n" + request.fields.get("x-lie", "")
        for rule in self._rules:
            if rule.left > 0 and rule.part in text and rule.method in ("", request.method):
                if rule.after:
                    rule.after -= 1
                    return None
                rule.left -= 1
                rule.fired += 1
                return rule
        return None

    # --- the honest server ---

    def answer_to(self, request: Request) -> bytes:
        """Return the answer of an honest server."""
        parts = urlsplit(request.target)
        name = unquote(parts.path).lstrip("/")
        query = {key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        with self._lock:
            if request.method == "POST" and "delete" in query:
                return self._delete_batch(name, request)
            if "/" not in name:
                return self._page(name, query)
            act = {"PUT": self._put, "GET": self._get, "HEAD": self._get, "DELETE": self._delete}[request.method]
            return act(name, request)

    def _put(self, name: str, request: Request) -> bytes:
        source = request.fields.get("x-amz-copy-source")
        if source:
            if name not in self.objects:
                return error(404, "NoSuchKey")
            data = self.objects[name][0]
            self.objects[name] = data, time.time()
            self.touched[name] = self.touched.get(name, 0) + 1
            body = f"<CopyObjectResult><ETag>{etag(data)}</ETag><LastModified>{iso(time.time())}</LastModified>"
            return answer(200, f"{body}</CopyObjectResult>".encode())
        if "if-none-match" in request.fields and name in self.objects:
            return error(412, "PreconditionFailed")
        self.objects[name] = request.body, time.time()
        return answer(200, ETag=etag(request.body))

    def _get(self, name: str, request: Request) -> bytes:
        if name not in self.objects:
            reply = error(404, "NoSuchKey")
            return reply if request.method == "GET" else reply.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
        data, when = self.objects[name]
        more = {"ETag": etag(data), "Last_Modified": formatdate(when, usegmt=True), "Accept_Ranges": "bytes"}
        if request.method == "HEAD":
            return answer(200, **more, Content_Length=str(len(data)))
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", request.fields.get("range", ""))
        if match is None:
            return answer(200, data, **more)
        first, last = int(match[1]), min(int(match[2]), len(data) - 1)
        if first >= len(data):
            return error(416, "InvalidRange")
        return answer(206, data[first : last + 1], **more, Content_Range=f"bytes {first}-{last}/{len(data)}")

    def _delete(self, name: str, _: Request) -> bytes:
        self.objects.pop(name, None)
        return answer(204)

    def _delete_batch(self, bucket: str, request: Request) -> bytes:
        names = re.findall(r"<Key>(.*?)</Key>", request.body.decode())
        for name in names:
            self.objects.pop(f"{bucket}/{name}", None)
        entries = "".join(f"<Deleted><Key>{escape(name)}</Key></Deleted>" for name in names)
        return answer(200, f"<DeleteResult>{entries}</DeleteResult>".encode())

    def _page(self, bucket: str, query: dict[str, str]) -> bytes:
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
        here = {
            name.removeprefix(f"{bucket}/"): at for name, at in self.objects.items() if name.startswith(f"{bucket}/")
        }
        begin = max(unquote(after), query.get("start-after", "") if self.knows_start_after else "")
        names = sorted(name for name in here if name.startswith(prefix) and name > begin)
        count = min(PAGE, int(query.get("max-keys", PAGE)))
        return answer(200, page_of({name: here[name] for name in names[:count]}, prefix, token=after,
                                   following=quote(names[count - 1]) if len(names) > count else ""))  # fmt: skip


def page_of(
    objects: dict[str, tuple[bytes, float]], prefix: str, *, token: str = "", following: str = "", **replaced: str
) -> bytes:
    """Return a page of a listing; `replaced`: elements by name, "" to leave one out."""
    fields = {
        "Name": "bucket", "Prefix": quote(prefix), "MaxKeys": str(PAGE), "EncodingType": "url",
        "KeyCount": str(len(objects)), "IsTruncated": "true" if following else "false", "ContinuationToken": token,
        "NextContinuationToken": following,
    } | replaced  # fmt: skip
    elements = [f"<{name}>{text}</{name}>" for name, text in fields.items() if text]
    elements += [
        f"<Contents><Key>{quote(name)}</Key><LastModified>{iso(when)}</LastModified><ETag>{escape(etag(data))}</ETag>"
        f"<Size>{len(data)}</Size><StorageClass>STANDARD</StorageClass></Contents>"
        for name, (data, when) in objects.items()
    ]
    return ('<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            + "".join(elements) + "</ListBucketResult>").encode()  # fmt: skip


def etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def iso(when: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(when))


# --- lies ---


def says(data: bytes, *, goes_on: bool = True) -> Lie:
    """Send these bytes in place of the answer; `goes_on`: the connection stays open."""

    def lie(wire: Wire, _: bytes) -> bool:
        wire.send(data)
        return goes_on

    return lie


def first(data: bytes, later_s: float = 0.3) -> Lie:
    """Send these bytes, and later the honest answer: a client that reuses the connection takes it for the next one."""

    def lie(wire: Wire, honest: bytes) -> bool:
        wire.send(data)
        wire.over.wait(later_s)
        wire.send(honest)
        return True

    return lie


def trickles(data: bytes = b"") -> Lie:
    """Send the honest answer, or other bytes without end, one byte at a time."""

    def lie(wire: Wire, honest: bytes) -> None:
        while not wire.over.is_set():
            wire.trickle(data or honest)
            if not data:
                return

    return lie


def repeats(data: bytes) -> Lie:
    """Send these bytes without end, 50 times in each 10 ms."""

    def lie(wire: Wire, _: bytes) -> None:
        while not wire.over.is_set():
            wire.send(data * 50)
            wire.over.wait(0.01)

    return lie


def changed(change: Callable[[bytes, bytes], bytes], *, goes_on: bool = True) -> Lie:
    """Send the honest answer with its (head, body) changed."""

    def lie(wire: Wire, honest: bytes) -> bool:
        head, _, body = honest.partition(b"\r\n\r\n")
        wire.send(change(head, body))
        return goes_on

    return lie


def then_stalls(part: Callable[[bytes], bytes]) -> Lie:
    """Send a part of the honest answer, and then nothing."""

    def lie(wire: Wire, honest: bytes) -> None:
        wire.send(part(honest))
        wire.stall()

    return lie


def mutates(seed: int) -> Lie:
    """Send the honest answer with some bytes changed, dropped, doubled or cut off."""
    chance = random.Random(seed)
    goes_on = chance.random() < 0.5

    def lie(wire: Wire, honest: bytes) -> bool:
        data = bytearray(honest)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(data) + 1) if chance.random() < 0.3 else chance.randrange(min(len(data), 300) + 1)
            end = min(len(data), at + chance.choice((0, 1, 1, 2, 9)))
            new = chance.choice((b"", b"0", b"-", b" ", b"\r\n", b"\0", b"\xff", b"9" * 9, bytes(data[at:end]) * 2))
            data[at:end] = new
        wire.send(bytes(data))
        return goes_on

    return lie


def before_body(lie: Lie) -> Lie:
    """Tell a lie before the request's body is read."""
    lie.before_body = True  # type: ignore[attr-defined]
    return lie


def _field(name: str, value: str) -> Callable[[bytes, bytes], bytes]:
    """Replace a field of the head; "": leave it out."""

    def change(head: bytes, body: bytes) -> bytes:
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(f"{name.lower()}:".encode())]
        lines += [f"{name}: {value}".encode()] if value else []
        return b"\r\n".join(lines) + b"\r\n\r\n" + body

    return change


def _status(line: bytes) -> Callable[[bytes, bytes], bytes]:
    return lambda head, body: b"\r\n".join([line, *head.split(b"\r\n")[1:]]) + b"\r\n\r\n" + body


_MORE = b"HTTP/1.1 100 Continue\r\n\r\n"
_INTERIM = {status: f"HTTP/1.1 {status} Wait\r\n\r\n".encode() for status in (101, 102, 103, 199)}

#: Lies that need no time. Each is told once, and always.
LIES: dict[str, Lie] = {
    **{f"{status}, the answer late": first(text) for status, text in _INTERIM.items()},
    **{f"{status} alone": says(text) for status, text in _INTERIM.items()},
    "100, and the answer": first(_MORE, 0.0),
    "100 without end of its headers": says(_MORE[:-2], goes_on=False),
    **{f"{status} and a page": says(answer(status, PORTAL, Content_Type="text/html"))
       for status in (200, 201, 202, 203, 206, 226, 300, 302, 303, 305, 307, 308, 400, 401, 402, 407, 418, 502, 599)},
    **{f"{status} and no body": says(answer(status))
       for status in (200, 201, 202, 203, 205, 206, 300, 302, 304, 500, 999)},
    "200 and XHTML": says(answer(200, XHTML)),
    "200 and a page with an ETag": says(answer(200, PORTAL, ETag='"portal"', Server="nginx")),
    "200 and an error": says(answer(200, error(500, "InternalError").partition(b"\r\n\r\n")[2])),
    "200 of another kind": says(answer(200, b"<ListAllMyBucketsResult><Buckets/></ListAllMyBucketsResult>")),
    "404 and a page": says(answer(404, PORTAL)),
    "404 and no body": says(answer(404)),
    "nothing": says(b"", goes_on=False),
    "an empty line": says(b"\r\n\r\n", goes_on=False),
    "no HTTP": says(b"SSH-2.0-OpenSSH_9.9\r\n", goes_on=False),
    "HTTP/9.9": changed(_status(b"HTTP/9.9 200 OK")),
    "a status of letters": changed(_status(b"HTTP/1.1 abc OK")),
    "a status of a million": changed(_status(b"HTTP/1.1 1000000 OK")),
    "a status line without end": says(b"HTTP/1.1 200 " + b"x" * 70_000, goes_on=False),
    "a header without end": says(b"HTTP/1.1 200 OK\r\nx: " + b"x" * 70_000, goes_on=False),
    "200 headers": says(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200 + b"\r\n", goes_on=False),
    "a header that is none": changed(lambda head, body: head + b"\r\n\xff\xfe\x00 none\r\n\r\n" + body, goes_on=False),
    **{f"Content-Length: {value or 'none'}": changed(_field("Content-Length", value), goes_on=False)
       for value in ("", "-1", "abc", "1" * 30, "1" * 5000, "5, 5", "0", "1e3", " ", "99999999")},
    "chunks without an end": changed(_field("Transfer-Encoding", "chunked"), goes_on=False),
    "chunks of nonsense": changed(lambda h, _: _field("Transfer-Encoding", "chunked")(h, b"z\r\n\r\n"), goes_on=False),
    "a body cut short": changed(lambda head, body: head + b"\r\n\r\n" + body[: len(body) // 2], goes_on=False),
    "a longer body": changed(lambda head, body: head + b"\r\n\r\n" + body + b"more than was said"),
    "a compressed body": changed(_field("Content-Encoding", "gzip")),
    **{f"Last-Modified: {value or 'none'}": changed(_field("Last-Modified", value))
       for value in ("", "yesterday", "0")},
    "no ETag": changed(_field("ETag", "")),
    **{f"Content-Range: {value or 'none'}": changed(_field("Content-Range", value))
       for value in ("", "bytes */5", "bytes 1-2/3", "bytes -1-2/3", "bytes 0-4/x", "bytes 0-4/" + "9" * 5000)},
    "an answer before the body": before_body(says(answer(200, ETag='"x"'))),
    "a refusal before the body": before_body(says(error(503, "SlowDown"))),
}  # fmt: skip

#: Lies that keep a client waiting.
SLOW: dict[str, Lie] = {
    "endless silence": then_stalls(lambda honest: b""),
    "the body is not read": before_body(then_stalls(lambda honest: b"")),
    "a byte now and then": trickles(),
    "a header now and then": trickles(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 90),
    "endless 100s": repeats(_MORE),
    "100 now and then": trickles(_MORE),
    "a 100 that never ends": before_body(trickles(b"HTTP/1.1 100 Continue\r\nx: y\r\n")),
    "headers without end": repeats(b"x"),
    "a head and no body": then_stalls(lambda honest: honest.partition(b"\r\n\r\n")[0] + b"\r\nx-y: z"),
    "half a body": then_stalls(lambda honest: honest[: -(len(honest.partition(b"\r\n\r\n")[2]) // 2) or None][:-1]),
    "a body without end": then_stalls(lambda _: b"HTTP/1.1 200 OK\r\nETag: \"x\"\r\n\r\n<ListBucketResult>"),
    "an endless body": repeats(b"HTTP/1.1 200 OK\r\n\r\n" + b"<a>" * 1000),
}  # fmt: skip
