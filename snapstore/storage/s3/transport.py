"""Transport: botocore's HTTP session with a deadline for each request; no connection in doubt is reused.

In: requests that botocore has signed. Out: its answers, with bodies that end in time and are no larger than allowed.

- A connection is reused only after an answer that S3 gives to a request that was sent whole. After any other answer
  (1xx, a redirect, a refusal before the body was sent), a late answer would be read as the answer to the next request.
- Bodies that are not streamed are read here, up to `ANSWER_LIMIT_BYTES`.

botocore has no interface for this. The code relies on parts of botocore and urllib3 that exist since botocore 1.36: the
session's table of pool classes, and methods of connections and pools that botocore or urllib3 override themselves.
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

from .deadline import SLOWEST_BYTES_PER_S, Deadline, run_with_timeout

#: The most bytes of an answer. A page of a thousand of the longest names has 4 MB; other answers are smaller.
ANSWER_LIMIT_BYTES = 8 * 1024**2
PIECE_BYTES = 64 * 1024
#: The statuses of S3's answers to requests that it has read whole.
_REUSABLE_STATUS = {200, 204, 206, 404}
_MAX_LINES, _MAX_LINE_BYTES = 100, 64 * 1024  # the limits of http.client
_NOT_IN_HEADERS = re.compile(rb"[\r\n\0]")


class InvalidAnswerError(aws.HTTPClientError):
    """The answer is not one that S3 gives to such a request; a retry may get a better one."""

    fmt = "{why}"

    def __init__(self, why: str) -> None:
        super().__init__(why=why)
        self.why = why


class UnsendableError(aws.BotoCoreError):
    """The request cannot be sent: a credential or an option has characters that no header can carry."""


class _Current(threading.local):
    """The deadline and the body of the request that this thread sends."""

    deadline: Deadline | None = None
    body: _ResponseBody | None = None  # until botocore returns it to the caller


_current = _Current()


def _unsent_bytes(sock: socket.socket) -> int:
    """Return the number of written bytes that the kernel has not sent yet; 0 if the kernel does not tell."""
    try:
        return int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError:
        return 0


class _DeadlineConnection:
    """Puts a connection under the deadline of its request; a mixin before botocore's connections."""

    is_reusable = False

    def _new_conn(self) -> socket.socket:
        deadline, connect = _current.deadline, super()._new_conn  # type: ignore[misc]
        if deadline is None:
            return connect()  # type: ignore[no-any-return]
        try:
            sock: socket.socket = run_with_timeout(connect, deadline.left_s(), socket.socket.close)
        except TimeoutError:
            raise ConnectTimeoutError(self, "no connection in time") from None
        deadline.watch(sock)
        return sock

    def request(self, *args: Any, **options: Any) -> Any:
        self.is_reusable = False
        sock = getattr(self, "sock", None)
        if sock is not None and _current.deadline is not None:
            _current.deadline.watch(sock)
        return super().request(*args, **options)  # type: ignore[misc]

    def send(self, data: Any) -> None:
        if hasattr(data, "read"):  # urllib3 1 leaves files to http.client, which sends them whole
            while piece := data.read(PIECE_BYTES):
                self.send(piece)
            return
        if _current.deadline is not None:
            _current.deadline.allow(len(data))
        super().send(data)  # type: ignore[misc]

    def getresponse(self) -> Any:
        sock: socket.socket | None = getattr(self, "sock", None)
        if sock is not None and _current.deadline is not None and (queued := _unsent_bytes(sock)):
            _current.deadline.allow(queued)  # a slow line: the answer comes after these are sent
            self.timeout: float = self.timeout + queued / SLOWEST_BYTES_PER_S
            sock.settimeout((sock.gettimeout() or 0) + queued / SLOWEST_BYTES_PER_S)  # urllib3 1 has set it already
        response = super().getresponse()  # type: ignore[misc]
        sent_whole = not getattr(self, "_response_received", False)  # else it came in place of "100 Continue"
        if not sent_whole and response.status < 300:
            response.close()
            raise http.client.HTTPException("success, for a request whose body was not sent")
        framed_once = not {"transfer-encoding", "content-length"} <= {name.lower() for name in response.headers}
        self.is_reusable = response.status in _REUSABLE_STATUS and sent_whole and framed_once
        return response

    def _consume_headers(self, fp: Any) -> None:
        """Read the headers after a 100; botocore's own loop never ends if the connection ends among them."""
        for _ in range(_MAX_LINES):
            line = fp.readline(_MAX_LINE_BYTES)
            if line in (b"\r\n", b"\n"):
                return
            if not line.endswith(b"\n"):
                break
        raise http.client.RemoteDisconnected("headers without end")


class _Pool:
    """Reuses only connections that are in order; a mixin before botocore's pools."""

    def _put_conn(self, conn: Any) -> None:
        if conn is not None and not conn.is_reusable:
            conn.close()  # it connects again at its next use
        super()._put_conn(conn)  # type: ignore[misc]


class _PlainConnection(_DeadlineConnection, awsrequest.AWSHTTPConnection):  # type: ignore[misc]
    pass


class _SecureConnection(_DeadlineConnection, awsrequest.AWSHTTPSConnection):  # type: ignore[misc]
    pass


class _Pools(_Pool, awsrequest.AWSHTTPConnectionPool):
    ConnectionCls = _PlainConnection


class _SecurePools(_Pool, awsrequest.AWSHTTPSConnectionPool):
    ConnectionCls = _SecureConnection


class _ResponseBody:
    """The body of an answer, as urllib3 returns it, under the request's deadline."""

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
        """Yield a whole body, in pieces; for bodies that are not an object's bytes.

        Raises:
            InvalidAnswerError: It has more than ANSWER_LIMIT_BYTES.
        """
        done = 0
        for piece in self._raw.stream(PIECE_BYTES):
            done += len(piece)
            if done > ANSWER_LIMIT_BYTES:
                raise InvalidAnswerError(f"a body of more than {ANSWER_LIMIT_BYTES} bytes")
            yield piece
        self._check()

    def close(self) -> None:
        self._deadline.end()
        self._raw.close()

    def _check(self) -> None:
        """Raise if the connection was shut at the deadline, which looks like the end of a body."""
        if self._deadline.expired:
            raise aws.ReadTimeoutError(endpoint_url="")


def hand_over_body(**_: object) -> None:
    """Forget the body that botocore returned: the caller closes it."""
    _current.body = None


def close_body(**_: object) -> None:
    """Close a body that botocore does not return, as when it cannot parse the headers."""
    if _current.body is not None:
        _current.body.close()
    _current.body = None


class HttpSession:
    """botocore's HTTP session, with a deadline for every request.

    Args:
        seconds: The time limit of a request and its answer; their bodies add to it (`Deadline.allow`).
    """

    def __init__(self, session: Any, seconds: float) -> None:
        self._session, self._seconds = session, seconds
        session._pool_classes_by_scheme.update(http=_Pools, https=_SecurePools)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def send(self, request: Any) -> Any:
        """Send a request as botocore does; a streamed body is under the deadline until it is closed."""
        for value in request.headers.values():
            if _NOT_IN_HEADERS.search(value if isinstance(value, bytes) else str(value).encode()):
                raise UnsendableError
        streams, request.stream_output = request.stream_output, True
        _current.deadline = deadline = Deadline(self._seconds)
        try:
            response = self._session.send(request)
            response.raw = _current.body = _ResponseBody(response.raw, deadline)
            if not streams or response.status_code >= 300:
                response.content  # noqa: B018 - reads the body, within its limits
                close_body()
        except BaseException:
            deadline.end()
            if deadline.expired:
                raise aws.ReadTimeoutError(endpoint_url="") from None
            raise
        finally:
            _current.deadline = None
        return response
