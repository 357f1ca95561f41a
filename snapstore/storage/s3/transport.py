"""How requests reach a server: botocore's HTTP session, with a deadline for each; no connection in doubt is used again.

In: requests that botocore has signed. Out: its answers, with bodies that end in time and are no larger than allowed.

- A connection is used again only after an answer that S3 gives to a request that went out whole. After any other
  (1xx, a redirect, a refusal before the body was sent) a late answer would become the next request's.
- Bodies that are not streamed are read here, up to `ANSWER_LIMIT_BYTES`.

botocore has no interface for this. Used of it and of urllib3, all there since botocore 1.36: the session's table of
pool classes, and methods of connections and pools that botocore or urllib3 themselves override.
"""

from __future__ import annotations

import fcntl
import http.client
import re
import socket
import sys
import termios
import threading
from collections.abc import Iterator
from typing import Any

from botocore import awsrequest
from botocore import exceptions as aws
from urllib3.exceptions import ConnectTimeoutError

from .deadline import SLOWEST_BYTES_PER_S, Deadline, in_time

#: A page of a thousand of the longest names takes 4 MB; answers to other requests are smaller.
ANSWER_LIMIT_BYTES = 8 * 1024**2
PIECE_BYTES = 64 * 1024
#: What S3 answers to requests that it has read whole.
_LEAVES_IN_ORDER = {200, 204, 206, 404}
_MAX_LINES, _MAX_LINE_BYTES = 100, 64 * 1024  # as http.client has them
_NOT_IN_HEADERS = re.compile(rb"[\r\n\0]")


class OddAnswerError(aws.HTTPClientError):
    """An answer that S3 does not give to such a request; the same request may get a better one."""

    fmt = "{why}"

    def __init__(self, why: str) -> None:
        super().__init__(why=why)
        self.why = why


class UnsendableError(aws.BotoCoreError):
    """A request that no header can carry: a credential or an option holds the end of a line."""


class _Current(threading.local):
    """Of the request that this thread sends."""

    deadline: Deadline | None = None
    body: _Body | None = None  # until botocore has given it to its caller


_current = _Current()


def _unsent_bytes(sock: socket.socket) -> int:
    """What was sent, and waits in the kernel for a slow line; 0 where it does not tell."""
    try:
        return int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError:
        return 0


class _Watched:
    """What our connections do besides; a mixin before botocore's."""

    leaves_in_order = False

    def _new_conn(self) -> socket.socket:
        deadline, connect = _current.deadline, super()._new_conn  # type: ignore[misc]
        if deadline is None:
            return connect()  # type: ignore[no-any-return]
        try:
            sock: socket.socket = in_time(connect, deadline.left_s(), socket.socket.close)
        except TimeoutError:
            raise ConnectTimeoutError(self, "no connection in time") from None
        deadline.guard(sock)
        return sock

    def request(self, *args: Any, **options: Any) -> Any:
        self.leaves_in_order = False
        sock = getattr(self, "sock", None)
        if sock is not None and _current.deadline is not None:
            _current.deadline.guard(sock)
        return super().request(*args, **options)  # type: ignore[misc]

    def send(self, data: Any) -> None:
        if hasattr(data, "read"):  # urllib3 1 has files sent by http.client, whole
            while piece := data.read(PIECE_BYTES):
                self.send(piece)
            return
        if _current.deadline is not None:
            _current.deadline.allow(len(data))
        super().send(data)  # type: ignore[misc]

    def getresponse(self) -> Any:
        sock: socket.socket | None = getattr(self, "sock", None)
        if sock is not None and _current.deadline is not None and (queued := _unsent_bytes(sock)):
            _current.deadline.allow(queued)  # a slow line: there is no answer before these have left
            self.timeout: float = self.timeout + queued / SLOWEST_BYTES_PER_S
            sock.settimeout((sock.gettimeout() or 0) + queued / SLOWEST_BYTES_PER_S)  # which urllib3 1 has set already
        response = super().getresponse()  # type: ignore[misc]
        sent_whole = not getattr(self, "_response_received", False)  # else the answer came in place of "go on"
        if not sent_whole and response.status < 300:
            response.close()
            raise http.client.HTTPException("success, of a request whose body was not sent")
        framed_once = not {"transfer-encoding", "content-length"} <= {name.lower() for name in response.headers}
        self.leaves_in_order = response.status in _LEAVES_IN_ORDER and sent_whole and framed_once
        return response

    def _consume_headers(self, fp: Any) -> None:
        """Those after a 100; botocore's own never returns when the connection ends among them."""
        for _ in range(_MAX_LINES):
            line = fp.readline(_MAX_LINE_BYTES)
            if line in (b"\r\n", b"\n"):
                return
            if not line.endswith(b"\n"):
                break
        raise http.client.RemoteDisconnected("headers without end")


class _Pool:
    """A mixin before botocore's pools."""

    def _put_conn(self, conn: Any) -> None:
        if conn is not None and not conn.leaves_in_order:
            conn.close()  # it connects anew when it is used
        super()._put_conn(conn)  # type: ignore[misc]


_Plain: Any = awsrequest.AWSHTTPConnection
_Secure: Any = awsrequest.AWSHTTPSConnection
_PlainPool: Any = awsrequest.AWSHTTPConnectionPool
_SecurePool: Any = awsrequest.AWSHTTPSConnectionPool


class _PlainConnection(_Watched, _Plain):  # type: ignore[misc]
    pass


class _SecureConnection(_Watched, _Secure):  # type: ignore[misc]
    pass


class _Pools(_Pool, _PlainPool):  # type: ignore[misc]
    ConnectionCls = _PlainConnection


class _SecurePools(_Pool, _SecurePool):  # type: ignore[misc]
    ConnectionCls = _SecureConnection


class _Body:
    """An answer's body as urllib3 gives it, up to the request's deadline."""

    def __init__(self, raw: Any, deadline: Deadline) -> None:
        self._raw, self._deadline = raw, deadline

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def read(self, size_bytes: int) -> bytes:
        self._deadline.allow(size_bytes)
        try:
            data: bytes = self._raw.read(size_bytes)
        except Exception:
            self._check()
            raise
        if len(data) < size_bytes:
            self._check()
        return data

    def stream(self, *_: object, **__: object) -> Iterator[bytes]:
        """All of it, if it is an answer in words."""
        done = 0
        for piece in self._raw.stream(PIECE_BYTES):
            done += len(piece)
            if done > ANSWER_LIMIT_BYTES:
                raise OddAnswerError(f"a body of more than {ANSWER_LIMIT_BYTES} bytes")
            yield piece
        self._check()

    def close(self) -> None:
        self._deadline.end()
        self._raw.close()

    def _check(self) -> None:
        """A connection that was shut looks like the end of a body."""
        if self._deadline.expired:
            raise aws.ReadTimeoutError(endpoint_url="")


def hand_over_body(**_: object) -> None:
    """The caller of botocore has the body, and closes it."""
    _current.body = None


def close_body(**_: object) -> None:
    """Close the body that botocore keeps to itself, as where it cannot read the headers before it."""
    if _current.body is not None:
        _current.body.close()
    _current.body = None


class Session:
    """botocore's HTTP session, with an end to every request.

    Args:
        seconds: for a request and its answer, but for their bodies (`Deadline.allow`).
    """

    def __init__(self, session: Any, seconds: float) -> None:
        self._session, self._seconds = session, seconds
        session._pool_classes_by_scheme.update(http=_Pools, https=_SecurePools)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def send(self, request: Any) -> Any:
        """As botocore's; what has a body to stream is under the deadline until that is closed."""
        for value in request.headers.values():
            if _NOT_IN_HEADERS.search(value if isinstance(value, bytes) else str(value).encode()):
                raise UnsendableError
        streams, request.stream_output = request.stream_output, True
        _current.deadline = deadline = Deadline(self._seconds)
        try:
            response = self._session.send(request)
            response.raw = _current.body = _Body(response.raw, deadline)
            if not streams or response.status_code >= 300:
                response.content  # noqa: B018 - read, within its limits
                close_body()
        except BaseException:
            deadline.end()
            if deadline.expired:
                raise aws.ReadTimeoutError(endpoint_url="") from None
            raise
        finally:
            _current.deadline = None
        return response
