"""Reads from a bucket: whole objects and ranges, long ones by several requests at once.

In: keys and ranges. Out: all bytes, or an error; never fewer. If a body breaks off, the rest is requested from there. A
time limit holds for each body as a whole, so a server that sends a byte now and then cannot block a reader.
"""

from __future__ import annotations

import re
import time
from contextlib import closing
from typing import Any

import numpy as np

from ...errors import SnapstoreError, StorageError
from ...threads import Threads
from ..base import GET_LIMIT_BYTES, check_key, check_limit, range_memory, too_short
from .deadline import SLOWEST_BYTES_PER_S
from .failures import Failure, guarded, status_of
from .requests import Requests, S3Answer
from .retry import pause
from .transport import InvalidAnswerError

READ_PIECE_BYTES = 256 * 1024
#: A longer range is read by several requests at once: one connection gives 50 to 100 MB/s.
PIECE_BYTES = 8 * 1024 * 1024
#: A range that ends beyond this is read only after the object's size is known. All our objects are smaller.
STAT_FIRST_BYTES = 64 * 1024**3
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")


def split_range(length: int) -> list[tuple[int, int]]:
    """Return (start, length) of the pieces that a range is read in: equally long, each at most PIECE_BYTES."""
    count = -(-length // PIECE_BYTES)
    size = -(-length // count) if count else 1
    return [(start, min(size, length - start)) for start in range(0, length, size)]


class S3Reader:
    """The read operations of a store in a bucket, which `S3Store` inherits.

    Args:
        requests: to the bucket.
        threads: run the concurrent requests of one call.
        read_timeout_s: how long an attempt waits for an answer [s].
    """

    def __init__(self, requests: Requests, threads: Threads, read_timeout_s: float) -> None:
        self._requests, self._threads, self._read_timeout_s = requests, threads, read_timeout_s

    def get(self, key: str, *, limit_bytes: int = GET_LIMIT_BYTES) -> bytes:
        """Return all bytes of `key`; see `ObjectStore.get`."""
        check_key(key)
        answer: S3Answer = self._requests.ask(key, "read", self._get_whole, key)
        with self._requests.failures(key, "read"), closing(answer["Body"]):
            size_bytes = self._requests.length_of(key, answer)
            check_limit(key, self._requests.url, size_bytes, limit_bytes)
            view: memoryview = np.empty(size_bytes, np.uint8).data
            self._fill(key, 0, view, size_bytes, answer)
        return view.tobytes()

    def get_range(self, key: str, offset: int, length: int, into: memoryview | None = None) -> memoryview:
        """Return a range of `key`, a long one by several requests at once; see `ObjectStore.get_range`."""
        check_key(key)
        # `range_memory` refuses an impossible range, after `stat`: a missing object is the more important error.
        pieces = split_range(length) if 0 <= offset <= STAT_FIRST_BYTES - length else []
        last: S3Answer | None = None  # the answer to the last piece; it has the object's size, before memory is filled
        with self._requests.failures(key, "read"):
            if pieces:
                last, size_bytes = self._open_range(key, offset + pieces[-1][0], pieces[-1][1])
            else:
                size_bytes = self._requests.stat(key).size_bytes
            try:
                view = range_memory(key, self._requests.url, offset, length, size_bytes, into)
                self._read_pieces(key, offset, view, size_bytes, last)
            finally:
                if last is not None:
                    last["Body"].close()
        return view

    def _get_whole(self, **request: Any) -> S3Answer:
        answer: S3Answer = self._requests.client.get_object(**request)
        if "ContentRange" in answer:
            answer["Body"].close()
            raise InvalidAnswerError("a part of an object in answer to a request for all of it")
        return answer

    def _open_range(self, key: str, offset: int, length: int) -> tuple[S3Answer, int]:
        """Return (answer to a ranged GET, size of the object).

        Raises:
            IntegrityError: The object ends before the range begins.
        """

        def get(**request: Any) -> tuple[S3Answer, int]:
            answer: S3Answer = self._requests.client.get_object(**request)
            got = answer.get("ContentRange", "")
            match = _CONTENT_RANGE.fullmatch(got)
            first, last, size_bytes = map(int, match.groups()) if match else (-1, -1, -1)
            if (first, last) != (offset, min(offset + length, size_bytes) - 1):
                answer["Body"].close()
                raise InvalidAnswerError("another range than the requested one")
            return answer, size_bytes

        wanted = f"bytes={offset}-{offset + length - 1}"
        try:
            opened: tuple[S3Answer, int] = self._requests.ask(key, "read", get, key, Range=wanted)
        except SnapstoreError as error:
            if status_of(error) != 416:
                raise
            raise too_short(key, self._requests.url, offset, length, self._requests.stat(key).size_bytes) from error
        return opened

    def _read_pieces(self, key: str, offset: int, view: memoryview, size_bytes: int, last: S3Answer | None) -> None:
        """Fill `view` from `offset` on; `last` is the answer to its last piece, if that was requested already."""
        pieces = split_range(len(view))

        def read(piece: tuple[int, int]) -> None:
            start, length = piece
            with self._requests.failures(key, "read"):
                answer = last if piece == pieces[-1] else None
                self._fill(key, offset + start, view[start : start + length], size_bytes, answer)

        if len(pieces) > 1:
            self._threads.start(read, pieces[::-1])()
        else:
            for piece in pieces:
                read(piece)

    def _fill(self, key: str, offset: int, view: memoryview, size_bytes: int, answer: S3Answer | None) -> None:
        """Fill `view` from `offset` on; if a body breaks off, request the rest from there."""
        done = failures = 0
        ends_s = time.monotonic() + self._requests.attempts * self._read_timeout_s + len(view) / SLOWEST_BYTES_PER_S
        while done < len(view):
            if answer is None:  # its failures are final: `ask` has retried it
                answer, now_bytes = self._open_range(key, offset + done, len(view) - done)
                if now_bytes != size_bytes:
                    answer["Body"].close()
                    raise too_short(key, self._requests.url, offset, len(view), now_bytes)
            try:
                while done < len(view):
                    # not readinto: old releases of botocore lack it, and urllib3's readinto copies too
                    data = guarded(answer["Body"].read, min(READ_PIECE_BYTES, len(view) - done))
                    if not data:  # the answer has fewer bytes than its range
                        raise Failure("ShortBody", "the body broke off; check the network, then try again")
                    view[done : done + len(data)] = data
                    done += len(data)
                    failures = 0
            except Failure:
                failures += 1
                if failures >= self._requests.attempts:
                    raise
                if time.monotonic() > ends_s:
                    raise StorageError(
                        f"{key} in {self._requests.url} at {offset}+{len(view)}: only {done} bytes came within "
                        "the time limit; check the network and the server, then try again"
                    ) from Failure("LateBody", "")
                pause(failures)
            finally:
                answer["Body"].close()
                answer = None
