"""A bucket, or a prefix of one, as an object store: the key is the name below the prefix.

In: keys and buffers. Out: objects that are whole and never change. Any thread may call anything; a forked child makes
connections of its own.

Invariants, and what is lost without them:

- Every put says `If-None-Match: *`: of racing writers one wins. A backend that ignores it is refused by `prepare`.
- A put that was sent more than once may meet itself: 412 then means "taken, maybe by us", so the object is read back,
  and if its bytes are ours the put has succeeded. Only a first answer of 412 is another's object for certain.
- 409 says that a racing request is under way and nothing is decided: the put is repeated.
- A put that fails otherwise leaves it open what is under the key; the caller looks (`ObjectStore`, session.py).
- One layer of retries, ours (s3_client.py, s3_requests.py; of bodies that break off s3_reading.py). Every wait has an
  end: of connecting, sending, reading, and of a body as a whole.
- A listing whose pages do not hang together is an error, never the end of the list.

A held object's sign of life is a file of this machine (signs.py); elsewhere nobody knows, and the heartbeat decides.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import time
import weakref
from base64 import b64encode
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import copy
from email.utils import parsedate_to_datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

from ...errors import (
    AlreadyExistsError,
    CapabilityError,
    FormatError,
    InvalidInputError,
    NotFoundError,
    SnapstoreError,
    StorageError,
)
from ...threads import Threads
from ..base import (
    GET_LIMIT_BYTES,
    Buffer,
    ObjectInfo,
    byte_view,
    check_key,
    check_prefix,
    is_key,
    sizes_one_by_one,
    taken,
)
from .client import Body, Failure, check_storage_class, guarded, parse, pause, refused, safe_code, status_of
from .liveness import Signs
from .reader import Reader
from .requests import Requests

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

#: Requests of one `get_range` under way at once.
READERS = 8
#: A server that says nothing for so long is asked again. Sending has the first one a piece of a body.
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10.0, 30.0
#: The first and nine more, with pauses that double from 0.1 to 20 s: these bridge 35 s without a server, and one that
#: never answers fails a request within eight minutes.
ATTEMPTS = 10
DELETE_BATCH = 1000  # what S3 takes in one request
#: Bodies above this size are sent without a copy, and after the server has said that it wants them.
SMALL_BODY_BYTES = 64 * 1024
#: What a server says of single keys of a batch that may be tried again; "": nothing at all.
_PASSING = {"InternalError", "SlowDown", "ServiceUnavailable", ""}
#: Some servers know no batches (501, 405), or ask the policy about the bucket, not the objects (403, radosgw 16.2).
_ONE_BY_ONE = {403, 405, 501}
#: Sizes of many objects come from a listing of so many entries at most; of those beyond it they are asked one by one.
LISTED_FOR_SIZES = 5000
#: Names that a trial has left behind where nobody may delete.
_TRIAL = re.compile(r"\.trial-[0-9a-f]{16}/")


class S3Store:
    """An `ObjectStore` in a bucket of S3, or of a server that speaks its protocol.

    Args:
        url: `s3://bucket[/prefix][?storage_class=NAME]`; everything else is the standard AWS configuration.
        storage_class: of packs, as in the URL.
        connect_timeout_s, read_timeout_s, attempts: when to give up on a request.

    Raises:
        InvalidInputError: no such URL, or a configuration that cannot be used.
    """

    puts_at_once = 8  # one connection gives 50 to 100 MB/s

    def __init__(
        self, url: str, *, storage_class: str | None = None, connect_timeout_s: float = CONNECT_TIMEOUT_S,
        read_timeout_s: float = READ_TIMEOUT_S, attempts: int = ATTEMPTS,
    ) -> None:  # fmt: skip
        where = parse(url)
        self._storage_class = check_storage_class(storage_class) or where.storage_class
        self._threads, self._read_timeout_s = Threads(READERS), read_timeout_s
        weakref.finalize(self, self._threads.close).atexit = False  # an exit waits for no server
        self._use(
            Requests(where, connect_timeout_s=connect_timeout_s, read_timeout_s=read_timeout_s, attempts=attempts)
        )

    def _use(self, requests: Requests) -> None:
        self._requests, self.url, self.place = requests, requests.url, requests.place
        self._reader = Reader(requests, self._threads, self._read_timeout_s)
        self._signs = Signs(self.place)

    def __repr__(self) -> str:
        return f"S3Store({self.url!r})"

    # --- writing ---

    def put(self, key: str, data: Buffer) -> None:
        """Create `key` durably; see `ObjectStore.put`. CapabilityError where the server knows no conditional writes."""
        check_key(key)
        view = byte_view(data)
        options: dict[str, Any] = {}
        sha256 = _sha256_of(key, view)
        if self._client.meta.endpoint_url.startswith("https:"):  # of plain HTTP the signature carries the SHA-256
            options["ChecksumSHA256"] = b64encode(bytes.fromhex(sha256)).decode()
        if self._storage_class and key.startswith("packs/"):
            options["StorageClass"] = self._storage_class
        sent = 0

        def send_body(**request: Any) -> Any:
            nonlocal sent
            sent += 1
            body: Any = Body(view, sha256) if len(view) > SMALL_BODY_BYTES else bytes(view)  # each from its start
            return self._client.put_object(Body=body, **request)

        try:
            self._requests.ask(key, "write", send_body, key, IfNoneMatch="*", **options)
        except SnapstoreError as error:
            if status_of(error) != 412:
                raise
            if sent == 1 or not self._holds(key, view):
                raise taken(key, self.url) from error

    def _holds(self, key: str, view: memoryview) -> bool:
        """Whether the object has just these bytes."""
        try:
            return self.get(key, limit_bytes=len(view)) == view
        except (NotFoundError, FormatError):
            return False

    def lock(self, key: str, data: Buffer) -> None:
        """`put` with a locked file in this machine's cache, which ends with `release` or with this process."""
        check_key(key)
        begun = self._signs.begin(key)
        try:
            self.put(key, data)
        except AlreadyExistsError:
            if begun:
                self._signs.end(key)
            raise

    def touch(self, key: str) -> None:
        """Copy the object onto itself, which renews its time; NotFoundError when it is gone."""
        check_key(key)
        self._requests.ask(
            key, "touch", self._client.copy_object, key,
            CopySource={"Bucket": self._requests.bucket, "Key": self._requests.prefix + key},
            MetadataDirective="REPLACE", Metadata={"touched": f"{time.time():.0f}"},
        )  # fmt: skip

    def release(self, key: str) -> None:
        """Delete `key` and its sign of life."""
        self.delete([key])

    def is_locked(self, key: str) -> bool | None:
        """Whether a live process of this machine holds `key`; None if none of this machine has ever said so."""
        check_key(key)
        return self._signs.alive(key)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove every key, a thousand a request; missing ones are fine."""
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
                self._signs.end(key)  # in this order no one sees a session that is there but dead

    def _delete_batch(self, keys: Sequence[str]) -> None:
        """One request; what the server does not say it deleted is tried again, where that may help."""
        left = {self._requests.prefix + key: key for key in keys}
        for attempt in range(1, self._requests.attempts + 1):
            wanted = {"Objects": [{"Key": name} for name in left]}
            try:
                answer = self._requests.ask(
                    next(iter(left.values())), "delete", self._client.delete_objects, Delete=wanted
                )
            except SnapstoreError as error:
                if status_of(error) not in _ONE_BY_ONE:
                    raise
                first, *rest = left.values()
                self.delete([first])  # alone: where nobody may delete, the first refusal is the last request
                self._threads.start(lambda key: self.delete([key]), rest)()
                return
            errors = {entry.get("Key", ""): safe_code(entry.get("Code", "")) for entry in answer.get("Errors", [])}
            done = {entry.get("Key", "") for entry in answer.get("Deleted", [])}
            done |= {name for name, code in errors.items() if code == "NoSuchKey"}
            left = {name: key for name, key in left.items() if name not in done}
            if not left:
                return
            if not _PASSING.issuperset(errors.get(name, "") for name in left):
                break
            pause(attempt)
        name, code = max(((n, errors.get(n, "")) for n in left), key=lambda entry: entry[1] not in _PASSING)
        what = f"{left[name]} in {self.url}: cannot delete it and {len(left) - 1} more"
        raise refused(what, code or "no word of it", 403 if code == "AccessDenied" else 500)

    # --- reading ---

    def get(self, key: str, *, limit_bytes: int = GET_LIMIT_BYTES) -> bytes:
        """All bytes of `key`; see `ObjectStore.get`."""
        check_key(key)
        return self._reader.get(key, limit_bytes=limit_bytes)

    def get_range(self, key: str, offset: int, length: int, into: memoryview | None = None) -> memoryview:
        """Return a range of `key`, a long one by several requests at once; see `ObjectStore.get_range`."""
        check_key(key)
        return self._reader.get_range(key, offset, length, into)

    def stat(self, key: str) -> ObjectInfo:
        """Size and time of `key`, the time in whole seconds; NotFoundError when missing."""
        check_key(key)
        return self._requests.stat(key)

    def sizes(self, keys: Collection[str]) -> dict[str, int]:
        """The size of each that is there: of several from a listing of the folder that they share, if it is short."""
        if len(keys) <= 1:
            return sizes_one_by_one(self, keys)
        folder = posixpath.commonpath(keys)
        wanted, listing = set(keys), self.list(folder and f"{folder}/")
        found = {info.key: info.size_bytes for info in islice(listing, LISTED_FOR_SIZES) if info.key in wanted}
        if next(listing, None) is not None:
            rest = [[key] for key in wanted - found.keys()]
            for sizes in self._threads.start(lambda keys: sizes_one_by_one(self, keys), rest)() if rest else ():
                found |= sizes
        return found

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object under `prefix`, in pages of 1,000; names that are no keys are somebody else's and left out."""
        check_prefix(prefix)
        return (info for info in self._requests.listed(prefix) if is_key(info.key))

    def now_s(self) -> float:
        """The server's clock, by the Date of an answer, in whole seconds [s since the epoch]."""
        try:
            return guarded(parsedate_to_datetime, self._requests.clock()).timestamp()
        except Failure as failure:
            raise StorageError(
                f"{self.url}: the server's answers carry no readable Date; its clock is needed"
            ) from failure

    def sync(self, prefix: str) -> None:
        """Nothing to do: what a server lists is durable."""
        check_prefix(prefix)

    def pinned(self) -> AbstractContextManager[None]:
        """Nothing to do: a bucket's name means one bucket."""
        return nullcontext()

    def clean(self) -> int:
        """Nothing to do: a put that died leaves nothing."""
        return 0

    def prepare(self) -> None:
        """See `ObjectStore.prepare`: the prefix is empty, and a second put of a key is refused."""
        if not all(_TRIAL.match(info.key) for info in self._requests.listed("")):
            raise InvalidInputError(f"{self.url}: is not empty and no repository; choose an empty or a new prefix")
        with self.sandbox() as trial:
            trial.put("twice", b"first")
            try:
                trial.put("twice", b"second")
            except AlreadyExistsError:
                trial.touch("twice")  # heartbeats are copies; of a server without them a long save would look dead
                return
            raise CapabilityError(
                f"{self.url}: the server ignores If-None-Match and overwrites in silence, so two writers would destroy "
                "each other's snapshots; use another server, or a newer release of it (docs/s3.md)"
            )

    @contextmanager
    def sandbox(self) -> Iterator[S3Store]:
        """See `ObjectStore.trial`: a prefix that begins with a dot, which no listing of ours shows."""
        store, name = copy(self), f".trial-{os.urandom(8).hex()}"
        store._use(self._requests.below(name))
        try:
            yield store
        finally:
            with suppress(SnapstoreError):  # where nobody may delete, some bytes stay
                store.delete([info.key for info in store.list("")])

    def refuses_damage(self) -> bool:
        """Whether the server compares a put's SHA-256 with the bytes it got; for `doctor`, in a trial."""
        wrong = hashlib.sha256(b"other bytes").hexdigest()
        body: Any = Body(memoryview(b"bytes"), wrong)
        checksum = b64encode(bytes.fromhex(wrong)).decode()
        place = {"Bucket": self._requests.bucket, "Key": f"{self._requests.prefix}damaged"}
        try:
            guarded(self._client.put_object, **place, Body=body, ChecksumSHA256=checksum)
        except Failure as failure:
            if failure.status:
                return failure.status == 400
            raise failure.under(f"{self.url}: cannot write") from failure
        return False

    @property
    def _client(self) -> S3Client:
        return self._requests.client


def _sha256_of(key: str, view: memoryview) -> str:
    """In hex. Packs and manifests are named by it; were a name wrong, the server would refuse the bytes."""
    folder, _, name = key.partition("/")
    named = name.rpartition("/")[2]
    if folder in ("packs", "manifests") and re.fullmatch(r"[0-9a-f]{64}", named):
        return named
    return hashlib.sha256(view).hexdigest()
