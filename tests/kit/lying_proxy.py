"""A proxy before a real S3 server that answers one request of an operation wrongly, by a table of lies for each verb.

    with LyingProxy("127.0.0.1:17480", Random(seed), Memory()) as proxy:
        proxy.arm()             one of the next requests is lied to, once
        ... AWS_ENDPOINT_URL_S3=proxy.url ...
        proxy.disarm()

Requests go on as they are, the Host header too, which the client has signed. `LIES` holds everything that an answer can
get wrong; a lie that does not fit a request (a 404 for an object that is not there) waits for the next one. In the lies
of `EXCLUDED` the design trusts the store. A proxy that is opened again has a new address, and its client a cold index.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import BinaryIO

from kit.socket_server import fields_of, read_head
from kit.tcp_proxy import Proxy

#: A slow answer lasts this long; a client that still waits for it then counts as hanging.
HANGS_AFTER_S = 60.0
#: Time between two bytes of a slow answer: less than any client waits for the next byte.
DROP_EVERY_S = 0.25
#: Answers remembered of each kind of object, to be given in the place of others.
REMEMBERED = 50
#: A client that has followed a listing for so many pages counts as hanging.
PAGES = 200


@dataclass(frozen=True)
class Answer:
    """Head with its blank line, and body."""

    head: bytes
    body: bytes

    @property
    def status(self) -> int:
        """The status of HTTP."""
        return int(self.head.split(b" ", 2)[1]) if self.head else 0

    @property
    def wire(self) -> bytes:
        """The bytes to send."""
        return self.head + self.body

    def holding(self, body: bytes, *, length: int | None = None) -> Answer:
        """The same head about another body."""
        dropped = (b"content-length:", b"transfer-encoding:")
        lines = [line for line in self.head.split(b"\r\n")[:-2] if not line.lower().startswith(dropped)]
        lines.append(b"Content-Length: %d" % (len(body) if length is None else length))
        return Answer(b"\r\n".join([*lines, b"", b""]), body)


def answer(status: int, body: bytes = b"", *fields: str) -> Answer:
    """Return an answer of our own."""
    lines = [f"HTTP/1.1 {status} Said", *fields]
    if status >= 200 and status != 204:
        lines.append(f"Content-Length: {len(body)}")
    return Answer("\r\n".join([*lines, "", ""]).encode(), body)


def error(status: int, code: str) -> Answer:
    """Return an error as S3 gives it."""
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>a lie</Message></Error>"
    return answer(status, text.encode(), "Content-Type: application/xml")


PORTAL = answer(200, b"<html><body>Welcome to our wireless network</body></html>", "Content-Type: text/html")
ETAG = 'ETag: "d41d8cd98f00b204e9800998ecf8427e"'


class Memory:
    """Earlier answers, shared by several proxies."""

    def __init__(self) -> None:
        self.classes: set[tuple[str, str]] = set()  # (verb, kind) of all requests
        self._of_kind: dict[str, list[tuple[str, Answer]]] = {}
        self._latest: dict[tuple[str, str], Answer] = {}
        self._lock = threading.Lock()

    def keep(self, talk: Talk, given: Answer) -> None:
        """Keep an answer that holds an object or a listing."""
        if talk.verb not in ("GET", "LIST") or given.status not in (200, 206):
            return
        with self._lock:
            self._latest[talk.target, talk.range] = given
            if talk.verb == "GET":
                of_kind = self._of_kind.setdefault(talk.kind, [])
                of_kind.append((talk.target, given))
                del of_kind[:-REMEMBERED]

    def latest(self, talk: Talk) -> Answer | None:
        """Return the last answer to the same request."""
        with self._lock:
            return self._latest.get((talk.target, talk.range))

    def others(self, talk: Talk) -> list[Answer]:
        """Return answers about other objects of the same kind."""
        with self._lock:
            return [given for target, given in self._of_kind.get(talk.kind, []) if target != talk.target]


@dataclass
class Talk:
    """A request, and a way to get the server's answer.

    Attributes:
        verb: GET, HEAD, PUT, COPY, DELETE, BATCH (of deletes) or LIST.
        kind: of the object or the prefix: packs, snapshots, ...; "" of the whole repository.
        closes: whether the connection ends with the answer.
        pages: false pages of listings by token, shared with the proxy.
    """

    method: str
    target: str
    fields: dict[str, str]
    ask: Callable[[], Answer]
    random: Random
    memory: Memory
    pages: dict[str, Callable[[], Answer]]
    closes: bool = False
    _real: Answer | None = None

    @property
    def verb(self) -> str:
        """See the class."""
        if self.method == "GET":
            return "LIST" if "list-type=2" in self.target else "GET"
        if self.method == "PUT":
            return "COPY" if "x-amz-copy-source" in self.fields else "PUT"
        return "BATCH" if self.method == "POST" else self.method

    @property
    def kind(self) -> str:
        """See the class."""
        named = re.search(r"(?:/|%2F)(packs|manifests|snapshots|sessions|gc|policies|config)\b", self.target)
        return named[1] if named else ""

    @property
    def range(self) -> str:
        """The range of bytes."""
        return self.fields.get("range", "")

    @property
    def real(self) -> Answer:
        """The server's answer; the server does what the request asks for."""
        if self._real is None:
            self._real = self.ask()
        return self._real

    @property
    def token(self) -> str:
        """The token of a false page, if the request asks for one."""
        named = re.search(r"continuation-token=(lie-\d+)", self.target)
        return named[1] if named else ""


#: Returns the bytes to send; None if the lie does not fit the request.
Lie = Callable[[Talk], Answer | Iterator[bytes] | None]


# --- lies about objects ----------------------------------------------------------------------------------------------


def says(given: Answer, *, asks: bool = False, closes: bool = False) -> Lie:
    """Give always the same answer; `asks`: the server does the request all the same."""

    def lie(talk: Talk) -> Answer:
        talk.closes = closes
        if asks:
            talk.real
        return given

    return lie


def missing(talk: Talk) -> Answer | None:
    """Answer 404 for an object that is there."""
    if talk.real.status not in (200, 206):
        return None
    return Answer(error(404, "NoSuchKey").head, b"") if talk.method == "HEAD" else error(404, "NoSuchKey")


def another(talk: Talk) -> Answer | None:
    """Give the bytes of another object of the same kind; for a range, as many as asked."""
    others = [given for given in talk.memory.others(talk) if given.status == talk.real.status]
    if talk.real.status == 200 and others:
        return talk.random.choice(others)
    fit = [given for given in others if len(given.body) >= len(talk.real.body)]
    if talk.real.status != 206 or not fit:
        return None
    return talk.real.holding(talk.random.choice(fit).body[: len(talk.real.body)])


def earlier(talk: Talk) -> Answer | None:
    """Give an object that is gone, or the listing as it was."""
    given = talk.memory.latest(talk)
    if given is None or talk.real.body == given.body:
        return None
    return given if talk.verb == "LIST" or talk.real.status == 404 else None


def half(talk: Talk) -> Answer | None:
    """Give half of the body, with a length that agrees."""
    return talk.real.holding(talk.real.body[: len(talk.real.body) // 2]) if _is_read(talk) else None


def cut_off(talk: Talk) -> Answer | None:
    """Give half of the body; then close the connection."""
    talk.closes = True
    body = talk.real.body
    return talk.real.holding(body[: len(body) // 2], length=len(body)) if _is_read(talk) else None


def _is_read(talk: Talk) -> bool:
    return talk.real.status in (200, 206) and bool(talk.real.body)


def other_length(talk: Talk) -> Answer | None:
    """Give another size in the answer to a HEAD."""
    length = int(fields_of(talk.real.head).get("content-length", 0))
    return talk.real.holding(b"", length=length // 2) if talk.real.status == 200 and length else None


def slow_body(talk: Talk) -> Iterator[bytes] | None:
    """Send the body slowly, a byte at a time."""
    if not talk.real.body:
        return None
    talk.closes = True
    return _dropwise(talk.real.holding(talk.real.body).wire, first=len(talk.real.holding(talk.real.body).head))


def slow_head(talk: Talk) -> Iterator[bytes] | None:
    """Send an endless head slowly, a byte at a time."""
    talk.closes = True
    return _dropwise(b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 100_000)


def endless_head(talk: Talk) -> Iterator[bytes] | None:
    """Send an endless head, line after line."""
    talk.closes = True
    return _lines(b"HTTP/1.1 200 OK\r\n", b"X-More: x\r\n")


def continues(talk: Talk) -> Iterator[bytes] | None:
    """Send 100 Continue without end."""
    talk.closes = True
    return _lines(b"", b"HTTP/1.1 100 Continue\r\n\r\n")


def _dropwise(data: bytes, first: int = 1) -> Iterator[bytes]:
    yield data[:first]
    for i in range(first, len(data)):
        time.sleep(DROP_EVERY_S)
        yield data[i : i + 1]


def _lines(first: bytes, line: bytes) -> Iterator[bytes]:
    yield first
    while True:
        time.sleep(DROP_EVERY_S)
        yield line


def informs_first(status: int, *, asks: bool) -> Lie:
    """Send an interim status, and then the server's answer; unless it `asks`, no answer at all."""

    def lie(talk: Talk) -> Iterator[bytes]:
        talk.closes = not asks
        real = talk.real if asks else None

        def pieces() -> Iterator[bytes]:
            yield answer(status).wire
            time.sleep(0.05)
            if real is not None:
                yield real.wire

        return pieces()

    return lie


# --- lies about listings ---------------------------------------------------------------------------------------------

_ENTRY = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)


def _listing(talk: Talk, entries: list[bytes], *, more: str = "", truncated: bytes = b"", count: int = 0) -> Answer:
    """Return the server's page with other entries and matching counts; `more`: the token of a next page."""
    body = _ENTRY.sub(b"", talk.real.body)
    for name, value in (("KeyCount", b"%d" % (len(entries) + count)), ("IsTruncated", truncated or b"false")):
        body = re.sub(rb"(<%b>)[^<]*" % name.encode(), rb"\g<1>" + value, body)
    token = f"<NextContinuationToken>{more}</NextContinuationToken>".encode() if more else b""
    return talk.real.holding(body.replace(b"</IsTruncated>", b"</IsTruncated>" + token + b"".join(entries), 1))


def _entries(talk: Talk) -> list[bytes]:
    return _ENTRY.findall(talk.real.body) if talk.real.status == 200 else []


def empty(talk: Talk) -> Answer | None:
    """Give an empty listing."""
    return _listing(talk, []) if _entries(talk) else None


def cut_short(talk: Talk) -> Answer | None:
    """Give the first half as if it were all."""
    entries = _entries(talk)
    return _listing(talk, entries[: len(entries) // 2]) if len(entries) > 1 else None


def one_missing(talk: Talk) -> Answer | None:
    """Leave one entry out."""
    entries = _entries(talk)
    if entries:
        entries.pop(talk.random.randrange(len(entries)))
        return _listing(talk, entries)
    return None


def other_count(talk: Talk) -> Answer | None:
    """Give fewer entries than the count says."""
    entries = _entries(talk)
    return _listing(talk, entries[: len(entries) // 2], count=1) if len(entries) > 1 else None


def odd_truncation(talk: Talk) -> Answer | None:
    """Say neither true nor false to whether the page is truncated."""
    entries = _entries(talk)
    odd = talk.random.choice([b" true ", b"maybe", b"TRUE", b""]) or b" "
    return _listing(talk, entries[: len(entries) // 2], truncated=odd, more=_token(talk)) if len(entries) > 1 else None


def token_at_the_end(talk: Talk) -> Answer | None:
    """Give the first half, not truncated, with a token for a next page."""
    entries = _entries(talk)
    return _listing(talk, entries[: len(entries) // 2], more=_token(talk)) if len(entries) > 1 else None


def _token(talk: Talk) -> str:
    return f"lie-{talk.random.randrange(10**12)}"


def second_page(what: str) -> Lie:
    """Give the first half; the next page holds the same, or nothing, or the same and another token, without end."""

    def lie(talk: Talk) -> Answer | None:
        entries = _entries(talk)
        first, token = entries[: len(entries) // 2], _token(talk)
        if not first:
            return None

        def following() -> Answer:
            if what != "endless":
                return _listing(talk, first if what == "again" else [])
            talk.pages[after := _token(talk)] = following
            return _listing(talk, first, more=after, truncated=b"true")

        talk.pages[token] = following
        return _listing(talk, first, more=token, truncated=b"true")

    return lie


# --- the table -------------------------------------------------------------------------------------------------------

_SLOW: dict[str, Lie] = {"slow head": slow_head, "endless head": endless_head, "endless 100s": continues}
#: The lies that cost a client seconds.
DRAGGING = frozenset({*_SLOW, "slow body", "endless"})
_NO_ANSWER: dict[str, Lie] = {
    "204": says(answer(204)), "102, then nothing": informs_first(102, asks=False),
    "103, then nothing": informs_first(103, asks=False), "portal": says(PORTAL), "empty 200": says(answer(200)),
    "500": says(error(500, "InternalError")),
}  # fmt: skip
LIES: dict[str, dict[str, Lie]] = {
    "GET": _NO_ANSWER | _SLOW | {
        "missing": missing, "another object": another, "still there": earlier, "half": half, "cut off": cut_off,
        "slow body": slow_body, "102 first": informs_first(102, asks=True), "103 first": informs_first(103, asks=True),
    },
    "HEAD": {
        "missing": missing, "other length": other_length, "204": says(answer(204)), "slow head": slow_head,
        "102, then nothing": informs_first(102, asks=False),
    },
    "LIST": _NO_ANSWER | _SLOW | {
        "empty": empty, "cut short": cut_short, "one missing": one_missing, "as it was": earlier,
        "other count": other_count, "odd truncation": odd_truncation, "token at the end": token_at_the_end,
        "page again": second_page("again"), "second page empty": second_page("empty"),
        "endless": second_page("endless"), "no bucket": says(error(404, "NoSuchBucket")),
        "no key": says(error(404, "NoSuchKey")), "cut off": cut_off, "slow body": slow_body,
        "102 first": informs_first(102, asks=True),
    },
    "PUT": _NO_ANSWER | _SLOW | {
        "412": says(error(412, "PreconditionFailed")), "412, stored": says(error(412, "PreconditionFailed"), asks=True),
        "nothing stored": says(answer(200, b"", ETAG)), "500, stored": says(error(500, "InternalError"), asks=True),
        "204, stored": says(answer(204), asks=True), "portal, stored": says(PORTAL, asks=True),
        "409": says(error(409, "ConditionalRequestConflict")), "404": says(error(404, "NoSuchKey")),
        "102 first": informs_first(102, asks=True), "103 first": informs_first(103, asks=True),
    },
    "COPY": _SLOW | {
        "error in a 200": says(answer(200, error(500, "InternalError").body, "Content-Type: application/xml")),
        "nothing touched": says(answer(200, b"<CopyObjectResult><ETag>&quot;d41d8cd9&quot;</ETag></CopyObjectResult>")),
        "missing": missing, "204": says(answer(204)), "portal": says(PORTAL),
    },
    "DELETE": _SLOW | {
        "nothing deleted": says(answer(204)), "200, nothing deleted": says(answer(200)), "portal": says(PORTAL),
        "404": says(error(404, "NoSuchKey")), "500, deleted": says(error(500, "InternalError"), asks=True),
        "102, then nothing": informs_first(102, asks=False),
    },
    "BATCH": _SLOW | {
        "nothing deleted": says(answer(200, b"<DeleteResult></DeleteResult>")), "portal": says(PORTAL),
        "empty 200": says(answer(200)), "500, deleted": says(error(500, "InternalError"), asks=True),
    },
}  # fmt: skip

#: (verb, lie, kind) in which the design trusts the store, unless `verify_writes="full"` confirms each write.
EXCLUDED: dict[tuple[str, str, str], str] = {
    ("PUT", "nothing stored", kind): "the default believes a store that says 200 with an ETag of a pack or a manifest "
    "and has nothing behind it, as it believes a disk about fsync (docs/reliability.md)"
    for kind in ("packs", "manifests")
}  # fmt: skip


SORTS = frozenset({"reads", "writes", "slow"})


def _sort_of(verb: str, lie: str) -> str:
    return "slow" if lie in DRAGGING else "reads" if verb in ("GET", "HEAD", "LIST") else "writes"


@dataclass
class Told:
    """A lie that was told. `hung`: whether a client waited until its end."""

    verb: str
    lie: str
    kind: str
    target: str
    hung: bool = False


@dataclass
class LyingProxy(Proxy):
    """See the module.

    Args:
        tell: called with every lie, when it is told; again if a client hangs on it.
        confirmed: whether the lies of `EXCLUDED` are told too, for clients that confirm their writes.
        sorts: of lies that are told: about "reads", about "writes", or "slow" ones, which cost seconds each.
    """

    random: Random = field(default_factory=Random)
    memory: Memory = field(default_factory=Memory)
    tell: Callable[[Told], None] = lambda told: None
    confirmed: bool = False
    sorts: frozenset[str] = SORTS

    def __post_init__(self) -> None:
        super().__post_init__()
        self._wait: int | None = None
        self._class: tuple[str, str] | None = None
        self._forced: tuple[str, str] | None = None
        self._pages: dict[str, Callable[[], Answer]] = {}

    def arm(self, one_in: int = 16) -> None:
        """Lie to one of the next `one_in` requests, or to one of the next few of a class, however rare it is."""
        with self._lock:
            self._wait = self.random.randrange(one_in)
            self._class = None
            if self.memory.classes and self.random.random() < 0.7:
                self._class = self.random.choice(sorted(self.memory.classes))
                self._wait = self.random.choice([0, 0, 1, 2, 3])

    def force(self, verb: str, lie: str) -> None:
        """Tell this lie to the next request of a verb that it fits, whatever `arm` has chosen."""
        with self._lock:
            self._forced = verb, lie

    def disarm(self) -> None:
        """Tell the truth from now on, unless a lie is forced."""
        with self._lock:
            self._wait = None

    def _relay(self, client: socket.socket, server: socket.socket, requests: BinaryIO, answers: BinaryIO) -> bool:
        head = read_head(requests)
        if not head:
            return False
        method, target = (word.decode() for word in head.split(b" ", 2)[:2])
        fields = fields_of(head)
        if fields.get("expect"):
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"expect:")]
            head = b"\r\n".join(lines)
        body = requests.read(int(fields.get("content-length", 0)))

        def ask() -> Answer:
            server.sendall(head + body)
            return _read_answer(answers, method)

        talk = Talk(method, target, fields, ask, self.random, self.memory, self._pages)
        if talk.token in self._pages:
            client.sendall(self._pages[talk.token]().wire)
            if len(self._pages) == PAGES:
                self.tell(Told(talk.verb, "endless", talk.kind, target, hung=True))
            return len(self._pages) < PAGES
        lie = self._lie_to(talk)
        if lie is None:
            client.sendall(talk.real.wire)
            self.memory.keep(talk, talk.real)
            return bool(talk.real.head)
        told, given = lie
        self.tell(told)
        if isinstance(given, Answer):
            client.sendall(given.wire if method != "HEAD" else given.head)
        else:
            self._drop(client, told, given)
        if talk.closes:
            self._end(client, "close")
        return not talk.closes

    def _lie_to(self, talk: Talk) -> tuple[Told, Answer | Iterator[bytes]] | None:
        with self._lock:
            self.memory.classes.add((talk.verb, talk.kind))
            for name in self._choices(talk):
                talk.closes = False
                given = LIES[talk.verb][name](talk)
                if given is not None:
                    self._wait = self._forced = None
                    return Told(talk.verb, name, talk.kind, talk.target), given
        return None

    def _choices(self, talk: Talk) -> list[str]:
        """Lies that may be told to a request, in the order in which they are tried."""
        if self._forced is not None:
            return [self._forced[1]] if self._forced[0] == talk.verb else []
        if self._wait is None or self._class not in (None, (talk.verb, talk.kind)):
            return []
        if self._wait > 0:
            self._wait -= 1
            return []
        names = [name for name in sorted(LIES.get(talk.verb, {})) if _sort_of(talk.verb, name) in self.sorts]
        names = [name for name in names if self.confirmed or (talk.verb, name, talk.kind) not in EXCLUDED]
        return self.random.sample(names, len(names))

    def _drop(self, client: socket.socket, told: Told, pieces: Iterator[bytes]) -> None:
        """Send piece by piece, until the client closes the connection or counts as hanging."""
        ends = time.monotonic() + HANGS_AFTER_S
        with suppress(OSError):
            for piece in pieces:
                client.sendall(piece)
                if time.monotonic() > ends:
                    told.hung = True
                    self.tell(told)
                    return


def _read_answer(answers: BinaryIO, method: str) -> Answer:
    """Read a whole answer; chunks are joined."""
    head = read_head(answers)
    while head.split(b" ", 2)[1:2] == [b"100"]:
        head = read_head(answers)
    if not head:
        raise ConnectionResetError("the server has closed the connection")
    fields = fields_of(head)
    if method == "HEAD" or head.split(b" ", 2)[1] in (b"204", b"304"):
        return Answer(head, b"")
    if fields.get("transfer-encoding") != "chunked":
        return Answer(head, answers.read(int(fields.get("content-length", 0))))
    body = b""
    while size := int(answers.readline().split(b";")[0], 16):
        body += answers.read(size)
        answers.readline()
    answers.readline()
    return Answer(head, b"").holding(body)
