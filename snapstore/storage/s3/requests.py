"""Requests about the objects below one prefix of a bucket, sent again while that may help; their failures are ours.

In: keys. Out: botocore's answers, believed only as far as they hang together. Any thread may ask; a forked child makes
connections of its own.

- Missing is what the server calls NoSuchKey, or, where an answer has no body (HEAD), what a listing does not show: a
  proxy's 404 must not make a live session look ended.
- An answer that lacks what it must say (a page without its end, an object without its length) is an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ...errors import StorageError
from ..base import ObjectInfo, missing
from .client import Failure, Place, make_client, send
from .listing import Listing, Page, read_page

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

#: Connections that are kept open; more callers than these wait for one.
CONNECTIONS = 32

Answer = Mapping[str, Any]  # to a GET: "Body" is a stream, "ContentRange" where it lies


class Requests:
    """What one store asks its server.

    Attributes:
        url: of the prefix.
        place: the same with the endpoint: a mirror elsewhere has the same URL.
        prefix: empty, or ends in `/`.
        attempts: of every request.
    """

    def __init__(self, where: Place, *, connect_timeout_s: float, read_timeout_s: float, attempts: int) -> None:
        self.url, self.bucket, self.prefix, self.attempts = where.url, where.bucket, where.prefix, attempts
        self._options: dict[str, Any] = {
            "connections": CONNECTIONS, "connect_timeout_s": connect_timeout_s, "read_timeout_s": read_timeout_s,
        }  # fmt: skip
        self._connected = os.getpid(), make_client(**self._options)
        self.place = f"{_without_user(self.client.meta.endpoint_url)} {self.url}"

    def below(self, name: str) -> Requests:
        """The same of the objects under `<prefix><name>/`."""
        requests = copy(self)
        requests.url, requests.place = f"{self.url}/{name}", f"{self.place}/{name}"
        requests.prefix = f"{self.prefix}{name}/"
        return requests

    @property
    def client(self) -> S3Client:
        """This process's."""
        pid, client = self._connected
        if pid != os.getpid():  # a forked child must not share its parent's connections
            client = make_client(**self._options)
            self._connected = os.getpid(), client
        return client

    def ask(self, key: str, verb: str, call: Callable[..., Any], name: str | None = None, **options: Any) -> Any:
        """The answer to a request about `key`, sent again while that may help.

        Args:
            name: the object that the request names, if it names one.

        Raises:
            NotFoundError: the server says that there is none.
            StorageError: it answers anything else, or nothing; its cause is a Failure.
        """
        wanted = {"Bucket": self.bucket} | ({} if name is None else {"Key": self.prefix + name}) | options
        with self.failures(key, verb):
            try:
                return send(call, wanted, self.attempts)
            except Failure as failure:
                if verb == "stat" and failure.status == 404 and failure.code == "404" and self._is_gone(key):
                    raise missing(key, self.url) from failure  # an answer to HEAD, which has no word for it
                raise

    def _is_gone(self, key: str) -> bool:
        return all(info.key != key for info in self.listed(key))

    def listed(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose name starts with `prefix`, by its name below ours.

        Raises:
            StorageError: a page fails, contradicts itself or an earlier one, or the listing does not go on.
        """
        listing, token = Listing(), ""
        while True:

            def page(**request: Any) -> tuple[Iterator[ObjectInfo], str]:
                page, _ = self._page(**request)
                return listing.add(page), page.token or ""

            options = {"Prefix": self.prefix + prefix} | ({"ContinuationToken": token} if token else {})
            objects, token = self.ask(prefix or "/", "list", page, **options)
            for info in objects:
                yield replace(info, key=info.key.removeprefix(self.prefix))
            if not token:
                return

    def clock(self) -> str:
        """The Date of an answer, to the cheapest listing."""

        def date(**request: Any) -> str:
            return self._page(**request)[1]

        return str(self.ask("/", "ask for the time", date, Prefix=f"{self.prefix}config", MaxKeys=1))

    def _page(self, **request: Any) -> tuple[Page, str]:
        """(a page of a listing, the Date of the answer)."""
        answer: Answer = self.client.list_objects_v2(**request)
        page = read_page(answer.get("Page", b""), request["Prefix"], request.get("ContinuationToken", ""))
        return page, str(answer["ResponseMetadata"].get("HTTPHeaders", {}).get("date", ""))

    def stat(self, key: str) -> ObjectInfo:
        """Size, time and tag of `key`; NotFoundError when missing."""
        answer: Answer = self.ask(key, "stat", self.client.head_object, key)
        modified = answer.get("LastModified")
        if not isinstance(modified, datetime):
            raise StorageError(f"{key} in {self.url}: the server does not say when it was written; use another server")
        size_bytes = self.length_of(key, answer)
        return ObjectInfo(key, size_bytes, float(int(modified.timestamp())), answer.get("ETag", "").strip('"'))

    def length_of(self, key: str, answer: Answer) -> int:
        """How long the server says that the body, or the object, is [bytes]."""
        length = answer.get("ContentLength")
        if not isinstance(length, int) or not 0 <= length < 2**63:
            raise StorageError(f"{key} in {self.url}: the server does not say how long it is; use another server")
        return length

    @contextmanager
    def failures(self, key: str, verb: str) -> Iterator[None]:
        """Turn failures into errors of ours, with the name of the thing first."""
        try:
            yield
        except Failure as failure:
            if failure.is_missing and verb != "write":
                raise missing(key, self.url) from failure
            raise failure.under(f"{key} in {self.url}: cannot {verb}") from failure


def _without_user(endpoint: str) -> str:
    """An endpoint without the user and the password that it may hold; nothing sends them."""
    scheme, separator, rest = endpoint.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
