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
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from ..errors import StorageError
from . import ObjectInfo, missing
from .s3_client import FAILURES, Place, code_of, is_missing, make_client, send, status_of, translate

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
        self.place = f"{self.client.meta.endpoint_url} {self.url}"

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
            StorageError: it answers anything else, or nothing; its cause is botocore's error.
        """
        wanted = {"Bucket": self.bucket} | ({} if name is None else {"Key": self.prefix + name}) | options
        with self.failures(key, verb):
            try:
                return send(call, wanted, self.attempts)
            except ClientError as error:
                if name is not None and status_of(error) == 404 and code_of(error) == "404" and self._is_gone(name):
                    raise missing(key, self.url) from error  # an answer to HEAD, which has no word for it
                raise

    def _is_gone(self, key: str) -> bool:
        page = self.page(key, MaxKeys=1)
        return all(entry["Key"] != self.prefix + key for entry in page.get("Contents", []))

    def page(self, prefix: str, **options: Any) -> Answer:
        """One page of a listing."""
        page: Answer = self.ask(
            prefix or "/", "list", self.client.list_objects_v2, Prefix=self.prefix + prefix, **options
        )
        if "IsTruncated" not in page:  # botocore takes an answer without a body for an empty one
            raise self.no_listing(prefix, "the answer is empty")
        return page

    def stat(self, key: str) -> ObjectInfo:
        """Size, time and tag of `key`; NotFoundError when missing."""
        answer: Answer = self.ask(key, "stat", self.client.head_object, key)
        return info_of(key, answer, self.length_of(key, answer))

    def length_of(self, key: str, answer: Answer) -> int:
        """How long the server says that the body, or the object, is [bytes]."""
        length = answer.get("ContentLength")
        if not isinstance(length, int):
            raise StorageError(f"{key} in {self.url}: the server does not say how long it is; use another server")
        return length

    def no_listing(self, prefix: str, why: str) -> StorageError:
        """The error of a listing that cannot be believed."""
        return StorageError(
            f"{prefix or '/'} in {self.url}: cannot list: {why}; nothing can be told from such a listing, try again, "
            "or use another server (docs/s3.md)"
        )

    @contextmanager
    def failures(self, key: str, verb: str) -> Iterator[None]:
        """Turn botocore's errors into ours, with the name of the thing first."""
        try:
            yield
        except FAILURES as error:
            if isinstance(error, ClientError) and is_missing(error):
                raise missing(key, self.url) from error
            raise translate(f"{key} in {self.url}: cannot {verb}", error) from error


def info_of(key: str, entry: Answer, size_bytes: int) -> ObjectInfo:
    """What a HEAD or an entry of a listing says of an object; the time in whole seconds, since HEAD has no others."""
    return ObjectInfo(key, size_bytes, float(int(entry["LastModified"].timestamp())), entry.get("ETag", "").strip('"'))
