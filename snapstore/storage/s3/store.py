"""A bucket, or a prefix of one, as an object store: the key is the name below the prefix.

In: keys and buffers. Out: objects that are whole and never change. Any thread may call anything; a forked child makes
connections of its own.

Invariants, and what is lost without them:

- Every put says `If-None-Match: *`, so one of several racing writers wins. `prepare` refuses a server that ignores it.
- A put that was sent more than once may find its own object: 412 then means "taken, maybe by us". So the object is read
  back, and the put has succeeded if the bytes are the same. Only a 412 to the first attempt proves that another writer
  made the object.
- 409 says that a racing request is under way and nothing is decided: the put is repeated.
- After any other failure of a put it is unknown whether the object exists; the caller reads the key (`ObjectStore`).
- Retries are ours alone (failures.py; reader.py for bodies that break off). Connecting, sending, each read, and a body
  as a whole all have a time limit.
- A listing whose pages contradict each other is an error, never the end of the list.

The lock of an object is a locked file of this machine (lock_files.py). Other machines cannot see it: there, the
heartbeat decides.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import time
from base64 import b64encode
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from email.utils import parsedate_to_datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

from ...errors import AlreadyExistsError, CapabilityError, FormatError, NotFoundError, SnapstoreError, StorageError
from ...threads import Threads, when_dropped
from .. import sandbox_folders
from ..base import (
    Buffer,
    KeyOnly,
    ObjectInfo,
    ObjectStore,
    Skipping,
    already_exists,
    byte_view,
    check_key,
    check_prefix,
    is_key,
    not_empty,
)
from .client import RequestBody, parse_url
from .failures import Failure, code_of, guarded, refused, safe_code, status_of
from .lock_files import LivenessLocks
from .reader import S3Reader
from .requests import Requests
from .retry import pause

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

#: The most concurrent requests of one call.
READERS = 8
#: A request is repeated if connecting, or waiting for an answer, takes longer. Sending may take the first of them for
#: each piece of a body.
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10.0, 30.0
#: With an exponential back-off from 0.1 to 20 s, a request survives an outage of 35 s. If a server never answers, it
#: fails within eight minutes.
REQUEST_ATTEMPTS = 10
DELETE_BATCH = 1000  # keys in one request, S3's limit
#: Larger bodies are sent without a copy, and only after the server has accepted the headers (100 Continue).
SMALL_BODY_BYTES = 64 * 1024
#: Error codes of single keys of a batch after which a retry may help; "" is a key without an answer.
_RETRYABLE = {"InternalError", "SlowDown", "ServiceUnavailable", ""}
#: Statuses after which keys are deleted one by one: some servers have no batches (501, 405), or check the policy for
#: the bucket and not the objects (403, radosgw 16.2).
_NO_BATCHES = {403, 405, 501}
#: The same: the server wants a Content-MD5, which botocore no longer sends.
_NO_BATCH_CODES = {"MissingContentMD5", "InvalidRequest"}
#: `sizes` reads at most so many entries of a listing; it asks for the sizes of all other objects one by one.
LISTED_FOR_SIZES = 5000
#: `prepare` reads at most so many entries that make a prefix not empty: it may have a hundred million.
LISTED_FOR_PREPARE = 1000
#: Names in a sandbox: of a process that runs, was killed, or may not delete.
_SANDBOX = re.compile(r"\.trial-[0-9a-f]{16}/")


class S3Store(S3Reader, ObjectStore):
    """An `ObjectStore` in a bucket of S3, or of a server that speaks its protocol.

    Args:
        url: `s3://bucket[/prefix][?storage_class=NAME]`; everything else is the standard AWS configuration.
        connect_timeout_s, read_timeout_s: The time limits of an attempt, to connect and to get an answer [s].
        attempts: The most times that a request is sent.

    Raises:
        InvalidInputError: The URL is invalid, or the AWS configuration cannot be used.
    """

    puts_at_once = 8  # one connection gives 50 to 100 MB/s
    gets_at_once = 16  # each waits for the server; a chain of deltas has a range in each of many packs

    def __init__(
        self,
        url: str,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        read_timeout_s: float = READ_TIMEOUT_S,
        attempts: int = REQUEST_ATTEMPTS,
    ) -> None:
        where = parse_url(url)
        self._storage_class = where.storage_class
        times = {"connect_timeout_s": connect_timeout_s, "read_timeout_s": read_timeout_s}
        super().__init__(Requests(where, **times, attempts=attempts), Threads(READERS), read_timeout_s)
        when_dropped(self, self._threads.close).atexit = False  # the interpreter's exit does not wait for a server
        self._use(self._requests)

    def _use(self, requests: Requests) -> None:
        self._requests, self.url, self.place = requests, requests.url, requests.place
        self._liveness = LivenessLocks(self.place)

    def __repr__(self) -> str:
        return f"S3Store({self.url!r})"

    # --- writing ---

    def put(self, key: str, data: Buffer) -> None:
        """Create `key` durably; see `ObjectStore.put`.

        Raises:
            CapabilityError: The server has no conditional writes.
        """
        check_key(key)
        view = byte_view(data)
        options: dict[str, Any] = {}
        sha256 = _sha256_of(key, view)
        if self._client.meta.endpoint_url.startswith("https:"):  # over plain HTTP the signature carries it
            options["ChecksumSHA256"] = b64encode(bytes.fromhex(sha256)).decode()
            options["ChecksumAlgorithm"] = "SHA256"  # a bucket with Object Lock asks for this header too
        if self._storage_class and key.startswith("packs/"):
            options["StorageClass"] = self._storage_class
        sent = 0

        def send_body(**request: Any) -> Any:
            nonlocal sent
            sent += 1
            body: Any = (
                RequestBody(view, sha256) if len(view) > SMALL_BODY_BYTES else bytes(view)
            )  # a new one for each attempt
            return self._client.put_object(Body=body, **request)

        try:
            self._requests.ask(key, "write", send_body, key, IfNoneMatch="*", **options)
        except SnapstoreError as error:
            if status_of(error) != 412:
                raise
            if sent == 1 or not self._has_bytes(key, view):
                raise already_exists(key, self.url) from error

    def _has_bytes(self, key: str, view: memoryview) -> bool:
        """Return whether the object has exactly these bytes."""
        try:
            return self.get(key, limit_bytes=len(view)) == view
        except (NotFoundError, FormatError):
            return False

    def lock(self, key: str, data: Buffer) -> None:
        """Create `key`, with a locked file in this machine's cache until `release` or the end of this process."""
        check_key(key)
        begun = self._liveness.begin(key)
        try:
            self.put(key, data)
        except AlreadyExistsError:
            if begun:
                self._liveness.end(key)
            raise

    def touch(self, key: str) -> None:
        """Copy the object onto itself, which sets `modified_s` to now; see `ObjectStore.touch`."""
        check_key(key)
        self._requests.ask(
            key,
            "touch",
            self._client.copy_object,
            key,
            CopySource={"Bucket": self._requests.bucket, "Key": self._requests.prefix + key},
            MetadataDirective="REPLACE",
            Metadata={"touched": f"{time.time():.0f}"},
        )

    def release(self, key: str) -> None:
        """Delete `key` and drop its lock, even if the delete fails: then a gc sees that the session has ended."""
        try:
            self.delete([key])
        finally:
            self._liveness.unlock(key)

    def is_locked(self, key: str) -> bool | None:
        """Return whether a live process of this machine has the lock of `key`; None if there is no such lock file."""
        check_key(key)
        return self._liveness.is_alive(key)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete every key, a thousand per request; a missing one is not an error."""
        names = iter(keys)
        while batch := list(islice(names, DELETE_BATCH)):
            for key in batch:
                check_key(key)
            if len(batch) == 1:
                with suppress(NotFoundError):
                    self._requests.ask(batch[0], "delete", self._client.delete_object, batch[0])
            else:
                self._delete_batch(sorted(set(batch)))
            for key in batch:
                self._liveness.end(key)  # after the delete: nothing sees a live session without its lock

    def _delete_batch(self, keys: Sequence[str]) -> None:
        """Delete keys by one request; repeat it for keys that the server does not confirm, while a retry may help."""
        left = {self._requests.prefix + key: key for key in keys}
        for attempt in range(1, self._requests.attempts + 1):
            wanted = {"Objects": [{"Key": name} for name in left]}
            try:
                answer = self._requests.ask(
                    next(iter(left.values())), "delete", self._client.delete_objects, Delete=wanted
                )
            except SnapstoreError as error:
                if status_of(error) not in _NO_BATCHES and code_of(error) not in _NO_BATCH_CODES:
                    raise
                first, *rest = left.values()
                self.delete([first])  # alone: without permission, only one request is refused
                self._threads.start(lambda key: self.delete([key]), rest)()
                return
            errors = {entry.get("Key", ""): safe_code(entry.get("Code", "")) for entry in answer.get("Errors", [])}
            done = {entry.get("Key", "") for entry in answer.get("Deleted", [])}
            done |= {name for name, code in errors.items() if code == "NoSuchKey"}
            left = {name: key for name, key in left.items() if name not in done}
            if not left:
                return
            if not _RETRYABLE.issuperset(errors.get(name, "") for name in left):
                break
            pause(attempt)
        name, code = max(((n, errors.get(n, "")) for n in left), key=lambda entry: entry[1] not in _RETRYABLE)
        what = f"{left[name]} in {self.url}: cannot delete it and {len(left) - 1} more"
        raise refused(what, code or "no answer", 403 if code == "AccessDenied" else 500)

    # --- reading ---

    def stat(self, key: str) -> ObjectInfo:
        """Return size, time (whole seconds) and tag of `key`; see `ObjectStore.stat`."""
        check_key(key)
        return self._requests.stat(key)

    def sizes(self, keys: Collection[str]) -> dict[str, int]:
        """Return the size [bytes] of each key that has an object; a listing of their common folder gives several."""
        if len(keys) <= 1:
            return super().sizes(keys)
        for key in keys:
            check_key(key)
        folder = posixpath.commonpath([posixpath.dirname(key) for key in keys])
        wanted, listing = set(keys), self.list(folder and f"{folder}/")
        found = {info.key: info.size_bytes for info in islice(listing, LISTED_FOR_SIZES) if info.key in wanted}
        if next(listing, None) is not None:
            for sizes in self._threads.start(super().sizes, [[key] for key in wanted - found.keys()])():
                found |= sizes
        return found

    def list(self, prefix: str, key_only: KeyOnly | None = None) -> Iterator[ObjectInfo]:
        """Yield every object under `prefix`, in pages of 1,000; skip names that are not keys, which are not ours."""
        check_prefix(prefix)
        skips = key_only.skips if isinstance(key_only, Skipping) else None
        return (info for info in self._requests.listed(prefix, skips) if is_key(info.key))

    def now_s(self) -> float:
        """Return the server's time, by the Date header of an answer, in whole seconds [s since the epoch]."""
        try:
            return guarded(parsedate_to_datetime, self._requests.server_date()).timestamp()
        except Failure as failure:
            raise StorageError(
                f"{self.url}: responses have no valid Date header, which gc needs to recognise dead saves; use another "
                "S3 server or proxy"
            ) from failure

    def prepare(self) -> None:
        """Require an empty prefix, and a server that refuses a second put of a key."""
        keys = (info.key for info in self._requests.listed(""))
        others = (key for key in keys if key and not _SANDBOX.match(key))  # "": a console's mark of a folder
        if some := list(islice(others, LISTED_FOR_PREPARE)):
            raise not_empty(self.url, some, "choose an empty or a new prefix")
        with self.sandbox() as sandbox:
            sandbox.put("twice", b"first")
            try:
                sandbox.put("twice", b"second")
            except AlreadyExistsError:
                sandbox.touch("twice")  # a heartbeat is a copy; if the server cannot copy, a long save would look dead
                return
            raise CapabilityError(
                f"{self.url}: the server ignores If-None-Match and overwrites silently, so two writers would destroy "
                "each other's snapshots; use another server, or a newer release (docs/s3.md)"
            )

    @contextmanager
    def sandbox(self) -> Iterator[S3Store]:
        """Yield a store under a new prefix, emptied at the end; its name begins with a dot, so no listing shows it.

        A process that is killed leaves its prefix: the next one here removes its objects once they are old.
        """
        store = self._below(f".trial-{os.urandom(8).hex()}")
        try:
            yield store
        finally:
            with suppress(SnapstoreError):  # without permission to delete, some bytes remain
                mine = [*store.list("")]
                store.delete([info.key for info in mine])
                self._remove_sandboxes(max((info.modified_s for info in mine), default=0.0) - sandbox_folders.OLD_S)

    def _below(self, name: str) -> S3Store:
        store = copy(self)
        store._use(self._requests.below(name))
        return store

    def _remove_sandboxes(self, before_s: float) -> None:
        """Remove objects of sandboxes that were written before a time of the server's clock."""
        for info in self._requests.listed(".trial-"):
            if info.modified_s < before_s and (met := _SANDBOX.match(info.key)):
                self._below(met[0].rstrip("/")).delete([info.key[met.end() :]])

    def refuses_damage(self) -> bool:
        """Return whether the server compares a put's SHA-256 with the bytes (for `doctor`, in a sandbox)."""
        wrong = hashlib.sha256(b"other bytes").hexdigest()
        body: Any = RequestBody(memoryview(b"bytes"), wrong)
        checksum = b64encode(bytes.fromhex(wrong)).decode()
        place = {"Bucket": self._requests.bucket, "Key": f"{self._requests.prefix}damaged"}
        try:
            guarded(self._client.put_object, **place, Body=body, ChecksumSHA256=checksum)
        except Failure as failure:
            if failure.status:
                return failure.status == 400
            raise failure.as_error(f"{self.url}: cannot write") from failure
        return False

    @property
    def _client(self) -> S3Client:
        return self._requests.client


def _sha256_of(key: str, view: memoryview) -> str:
    """Return the SHA-256 in hex: the name of a pack or manifest, else computed.

    If a name were wrong, the server would refuse the bytes.
    """
    folder, _, name = key.partition("/")
    named = name.rpartition("/")[2]
    if folder in ("packs", "manifests") and re.fullmatch(r"[0-9a-f]{64}", named):
        return named
    return hashlib.sha256(view).hexdigest()
