"""Requests about the objects below one prefix of a bucket, with retries; their failures become errors of snapstore.

In: keys. Out: botocore's answers, checked for consistency. Any thread may send requests; a forked child makes
connections of its own.

- An object is missing if the server says NoSuchKey, or, for answers without a body (HEAD), if a listing does not show
  it. A proxy's 404 must not make a live session look ended.
- If the credentials are refused, they are read once more, as a new process would, and the request is sent again. So a
  process goes on after its keys have been exchanged. Each request does so at most once.
- An answer without a required field (a page without its end, an object without its length) is an error.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ...errors import StorageError
from ...threads import after_fork_in_child
from ..base import ObjectInfo, not_found
from .client import BucketUrl, credentials_of, make_client, renew_credentials
from .failures import CREDENTIAL_CODES, Failure, code_of
from .listing import Listing, Page, read_page
from .retry import send

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

#: One thread at a time reads credentials once more; see client.py for the fork.
_RENEWING = threading.Lock()
#: The end of the name of a directory bucket, whose listings have no order.
DIRECTORY_BUCKET = "--x-s3"
after_fork_in_child(_RENEWING._at_fork_reinit)  # type: ignore[attr-defined]

S3Answer = Mapping[str, Any]  # to a GET: "Body" is a stream, "ContentRange" its place in the object


class Requests:
    """The requests of one store to its server.

    Attributes:
        url: The URL of the prefix.
        place: The URL with the endpoint: a mirror elsewhere has the same URL.
        prefix: Empty, or ends in `/`.
        attempts: The most times that a request is sent.
    """

    def __init__(self, where: BucketUrl, *, connect_timeout_s: float, read_timeout_s: float, attempts: int) -> None:
        self.url, self.bucket, self.prefix, self.attempts = where.url, where.bucket, where.prefix, attempts
        self._make_client = partial(make_client, connect_timeout_s, read_timeout_s)
        self._connected = os.getpid(), self._make_client()
        self._credentials_place = ""  # where they were read once more
        self.place = f"{_without_user(self.client.meta.endpoint_url)} {self.url}"

    def below(self, name: str) -> Requests:
        """Return the requests for the objects under `<prefix><name>/`."""
        requests = copy(self)
        requests.url, requests.place = f"{self.url}/{name}", f"{self.place}/{name}"
        requests.prefix = f"{self.prefix}{name}/"
        return requests

    @property
    def client(self) -> S3Client:
        """The client of this process."""
        pid, client = self._connected
        if pid != os.getpid():  # a forked child must not share its parent's connections
            client = self._make_client()
            self._connected = os.getpid(), client
        return client

    def ask(self, key: str, verb: str, call: Callable[..., Any], name: str | None = None, **options: Any) -> Any:
        """Send a request about `key` and return the answer; send it again while a retry, or other keys, may help.

        Args:
            name: The object that the request names, if it names one.

        Raises:
            NotFoundError: The server says that the object is missing.
            StorageError: Any other failure; its cause is a Failure.
        """
        wanted = {"Bucket": self.bucket} | ({} if name is None else {"Key": self.prefix + name}) | options
        with self.failures(key, verb):
            try:
                return self._send(call, wanted)
            except Failure as failure:
                is_bare = verb == "stat" and failure.code == str(failure.status)  # an answer to HEAD has no error code
                if is_bare and failure.status == 404 and all(info.key != key for info in self.listed(key)):
                    raise not_found(key, self.url) from failure
                if is_bare and failure.status in (400, 401, 403) and self._renew_by_listing(key):
                    return self._send(call, wanted)
                raise

    def _send(self, call: Callable[..., Any], wanted: Mapping[str, Any]) -> Any:
        used = credentials_of(self.client)
        try:
            return send(call, wanted, self.attempts)
        except Failure as failure:
            if not failure.is_of_credentials:
                raise
        with _RENEWING:
            if credentials_of(self.client) is used:  # else another thread has read them since
                self._credentials_place = renew_credentials(self.client)
        try:
            return send(call, wanted, self.attempts)
        except Failure as failure:
            if failure.is_of_credentials:
                failure.place = self._credentials_place
            raise

    def _renew_by_listing(self, key: str) -> bool:
        """Return whether the credentials were refused, and were read once more: a listing says why it is refused."""
        used = credentials_of(self.client)
        try:
            next(self.listed(key), None)
        except StorageError as error:
            if code_of(error) in CREDENTIAL_CODES:
                raise
        return credentials_of(self.client) is not used

    def listed(self, prefix: str, skips: Callable[[str], str] | None = None) -> Iterator[ObjectInfo]:
        """Yield every object whose name starts with `prefix`; its key is its name below our prefix.

        Args:
            skips: see `Skipping`.

        Raises:
            StorageError: A page fails, or contradicts itself or an earlier one.
        """
        listing, token, last, ascends = Listing(), "", "", not self.bucket.endswith(DIRECTORY_BUCKET)
        while True:

            def page(**request: Any) -> tuple[Iterator[ObjectInfo] | None, str]:
                page, _ = self._page(**request)
                if any(info.key <= request.get("StartAfter", "") for info in page.objects):
                    return None, ""  # this server does not know it
                return listing.add(page), page.token or ""

            options = {"Prefix": self.prefix + prefix}
            after = skips(last) if skips is not None and token and ascends else ""
            if after > last:  # the next page would show what is not needed
                options["StartAfter"] = self.prefix + after
            elif token:
                options["ContinuationToken"] = token
            objects, following = self.ask(prefix or "/", "list", page, **options)
            if objects is None:
                skips = None
                continue
            for info in objects:
                key = info.key.removeprefix(self.prefix)
                ascends, last = ascends and key > last, key
                yield replace(info, key=key)
            if not following:
                return
            token = following

    def server_date(self) -> str:
        """Return the Date header of the answer to the cheapest listing."""
        _, date = self.ask("/", "ask for the time", self._page, Prefix=f"{self.prefix}config", MaxKeys=1)
        return str(date)

    def _page(self, **request: Any) -> tuple[Page, str]:
        """Return (a page of a listing, the Date header of the answer)."""
        answer: S3Answer = self.client.list_objects_v2(**request)
        page = read_page(answer.get("Page", b""), request["Prefix"], request.get("ContinuationToken", ""))
        return page, str(answer["ResponseMetadata"].get("HTTPHeaders", {}).get("date", ""))

    def stat(self, key: str) -> ObjectInfo:
        """Return size, time and tag of `key`; see `ObjectStore.stat`."""
        answer: S3Answer = self.ask(key, "stat", self.client.head_object, key)
        modified = answer.get("LastModified")
        if not isinstance(modified, datetime):
            raise StorageError(
                f"{key} in {self.url}: the response has no valid Last-Modified header; use another S3 server"
            )
        size_bytes = self.length_of(key, answer)
        return ObjectInfo(key, size_bytes, float(int(modified.timestamp())), answer.get("ETag", "").strip('"'))

    def length_of(self, key: str, answer: S3Answer) -> int:
        """Return the length of the body, or of the object, that the answer states [bytes].

        Raises:
            StorageError: The answer has no valid length.
        """
        length = answer.get("ContentLength")
        if not isinstance(length, int) or not 0 <= length < 2**63:
            raise StorageError(
                f"{key} in {self.url}: the response has no valid Content-Length header; use another S3 server"
            )
        return length

    @contextmanager
    def failures(self, key: str, verb: str) -> Iterator[None]:
        """Turn a Failure into an error of snapstore, with the name of the thing first."""
        try:
            yield
        except Failure as failure:
            if failure.status == 404 and failure.code == "NoSuchKey" and verb != "write":
                raise not_found(key, self.url) from failure  # any other 404 may come from a proxy
            raise failure.as_error(f"{key} in {self.url}: cannot {verb}") from failure


def _without_user(endpoint: str) -> str:
    """Return an endpoint without a user and password, which are never sent."""
    scheme, separator, rest = endpoint.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
