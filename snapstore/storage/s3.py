"""A bucket, or a prefix of one, as an object store: the key is the name below the prefix.

In: keys and buffers. Out: objects that are whole and never change. Any thread may call anything; a forked child makes
connections of its own.

Invariants, and what is lost without them:

- Every put says `If-None-Match: *`: of racing writers one wins. A backend that ignores it is refused by `prepare`.
- A put that was sent more than once may meet itself: 412 then means "taken, maybe by us", so the object is read back,
  and if its bytes are ours the put has succeeded. Only a first answer of 412 is another's object for certain.
- 409 says that a racing request is under way and nothing is decided: the put is repeated.
- A put that fails otherwise leaves it open what is under the key; the caller looks (`ObjectStore`, session.py).
- Missing is what the server calls NoSuchKey, or, where an answer has no body (HEAD), what a listing does not show: a
  proxy's 404 must not make a live session look ended.
- One layer of retries, ours (s3_client.py). A body that breaks off is asked for again from where it broke. Every wait
  has an end: of connecting, sending, reading, and of a body as a whole.
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from copy import copy
from email.utils import parsedate_to_datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from botocore.exceptions import ClientError, IncompleteReadError

from ..errors import (
    AlreadyExistsError,
    CapabilityError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    SnapstoreError,
    StorageError,
)
from ..threads import Threads
from . import (
    GET_LIMIT_BYTES,
    Buffer,
    ObjectInfo,
    byte_view,
    check_into,
    check_key,
    check_prefix,
    check_range,
    is_key,
    sizes_one_by_one,
)
from .ranges import Piece, plan_pieces
from .s3_client import (
    BODY_FAILURES,
    FAILURES,
    check_storage_class,
    code_of,
    is_missing,
    make_client,
    parse,
    pause,
    refused,
    send,
    status_of,
    translate,
)
from .signs import Signs

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

#: Requests of one `get_ranges` under way at once.
READERS = 8
#: Connections that are kept open; more callers than these wait for one.
CONNECTIONS = 32
#: A server that says nothing for so long is asked again. Sending has the first one a piece of a body.
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10.0, 30.0
#: The first and nine more, with pauses that double from 0.1 to 20 s: these bridge 35 s without a server, and one that
#: never answers fails a request within six minutes.
ATTEMPTS = 10
#: A body must come at this rate at least, over all its attempts [bytes/s].
SLOWEST_BYTES_PER_S = 32 * 1024
DELETE_BATCH = 1000  # what S3 takes in one request
#: Bodies above this size are sent without a copy, and after the server has said that it wants them.
SMALL_BODY_BYTES = 64 * 1024
#: http.client asks for 16 KiB at a time; larger pieces cost fewer calls. Each must leave within CONNECT_TIMEOUT_S.
BODY_PIECE_BYTES = 256 * 1024
READ_PIECE_BYTES = 1024 * 1024
#: Of ranges that claim to end further out than any of our objects, the object's size is asked for first.
ASK_FIRST_BYTES = 64 * 1024**3
#: What a server says of single keys of a batch that may be tried again; "": nothing at all.
_PASSING = {"InternalError", "SlowDown", "ServiceUnavailable", ""}
#: Some servers know no batches (501, 405), or ask the policy about the bucket, not the objects (403, radosgw 16.2).
_ONE_BY_ONE = {403, 405, 501}
#: Sizes of many objects come from a listing of so many entries at most; of those beyond it they are asked one by one.
LISTED_FOR_SIZES = 5000
#: Names that a trial has left behind where nobody may delete.
_TRIAL = re.compile(r"\.trial-[0-9a-f]{16}/")

_Answer = Mapping[str, Any]  # to a GET: "Body" is a stream, "ContentRange" where it lies


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
        place = parse(url)
        self.url = place.url
        self._bucket, self._prefix = place.bucket, place.prefix
        self._storage_class = check_storage_class(storage_class) or place.storage_class
        self._read_timeout_s, self._attempts = read_timeout_s, attempts
        self._client_options: dict[str, Any] = {
            "connections": CONNECTIONS, "connect_timeout_s": connect_timeout_s, "read_timeout_s": read_timeout_s,
        }  # fmt: skip
        self._connected = os.getpid(), make_client(**self._client_options)
        self.place = f"{self._client.meta.endpoint_url} {self.url}"
        self._signs = Signs(self.place)
        self._readers = Threads(READERS)
        weakref.finalize(self, self._readers.close).atexit = False  # an exit waits for no server

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
            body: Any = _Body(view, sha256) if len(view) > SMALL_BODY_BYTES else bytes(view)  # each from its start
            return self._client.put_object(Body=body, **request)

        try:
            self._ask(key, "write", send_body, key, IfNoneMatch="*", **options)
        except SnapstoreError as error:
            cause = error.__cause__
            if not isinstance(cause, ClientError) or status_of(cause) != 412:
                raise
            if sent == 1 or not self._holds(key, view):
                raise AlreadyExistsError(
                    f"{key} in {self.url}: expected a free name, found an object; read it to see whose it is"
                ) from error

    def _holds(self, key: str, view: memoryview) -> bool:
        """Whether the object has just these bytes."""
        try:
            return self.get(key, limit_bytes=len(view)) == view
        except (NotFoundError, FormatError):
            return False

    def hold(self, key: str, data: Buffer) -> None:
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
        self._ask(
            key, "touch", self._client.copy_object, key,
            CopySource={"Bucket": self._bucket, "Key": self._prefix + key}, MetadataDirective="REPLACE",
            Metadata={"touched": f"{time.time():.0f}"},
        )  # fmt: skip

    def release(self, key: str) -> None:
        """Delete `key` and its sign of life."""
        self.delete([key])

    def is_held(self, key: str) -> bool | None:
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
                    self._ask(batch[0], "delete", self._client.delete_object, batch[0])
            else:
                self._delete_batch(sorted(set(batch)))
            for key in batch:
                self._signs.end(key)  # in this order no one sees a session that is there but dead

    def _delete_batch(self, keys: Sequence[str]) -> None:
        """One request; what the server does not say it deleted is tried again, where that may help."""
        left = {self._prefix + key: key for key in keys}
        for attempt in range(1, self._attempts + 1):
            wanted = {"Objects": [{"Key": name} for name in left]}
            try:
                answer = self._ask(next(iter(left.values())), "delete", self._client.delete_objects, Delete=wanted)
            except SnapstoreError as error:
                if not isinstance(error.__cause__, ClientError) or status_of(error.__cause__) not in _ONE_BY_ONE:
                    raise
                first, *rest = left.values()
                self.delete([first])  # alone: where nobody may delete, the first refusal is the last request
                self._readers.start(lambda key: self.delete([key]), rest)()
                return
            errors = {e["Key"]: e.get("Code", "") for e in answer.get("Errors", [])}
            done = {entry["Key"] for entry in answer.get("Deleted", [])}
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
        answer: _Answer = self._ask(key, "read", self._client.get_object, key)
        with self._failures(key, "read"), closing(answer["Body"]):
            size_bytes = self._length_of(key, answer)
            if size_bytes > limit_bytes:
                raise FormatError(
                    f"{key} in {self.url}: expected at most {limit_bytes} bytes, got {size_bytes}; "
                    "this is no object of that kind, run 'snapstore check'"
                )
            view: memoryview = np.empty(size_bytes, np.uint8).data
            self._fill(key, 0, view, size_bytes, answer)
        return view.tobytes()

    def get_ranges(
        self, key: str, ranges: Sequence[tuple[int, int]], into: Sequence[memoryview] | None = None
    ) -> list[memoryview]:
        """One view per range; see `ObjectStore.get_ranges`. Neighbours are read together, long ranges in pieces."""
        check_key(key)
        if any(offset < 0 or length < 0 for offset, length in ranges):
            self.stat(key)  # a missing object is the graver news
        for offset, length in ranges:
            check_range(key, offset, length)
        pieces: list[Piece] = []
        last: tuple[Piece, _Answer] | None = None  # its answer says how long the object is, before anything is written
        if ranges and max(offset + length for offset, length in ranges) <= ASK_FIRST_BYTES:
            pieces = plan_pieces(ranges)
        with self._failures(key, "read"):
            if pieces:
                answer, size_bytes = self._open_range(key, pieces[-1].offset, pieces[-1].length)
                last = pieces[-1], answer
            else:
                size_bytes = self.stat(key).size_bytes
            try:
                for offset, length in ranges:
                    if offset + length > size_bytes:
                        raise self._short(key, offset, length, size_bytes)
                check_into(key, ranges, into)
                # not bytearrays: those would be zeroed first
                views = into if into is not None else [np.empty(length, np.uint8).data for _, length in ranges]
                self._read_pieces(key, pieces or plan_pieces(ranges), views, size_bytes, last)
            finally:
                if last is not None:
                    last[1]["Body"].close()
        return list(views)

    def stat(self, key: str) -> ObjectInfo:
        """Size and time of `key`, the time in whole seconds; NotFoundError when missing."""
        check_key(key)
        response: _Answer = self._ask(key, "stat", self._client.head_object, key)
        return ObjectInfo(key, self._length_of(key, response), float(int(response["LastModified"].timestamp())))

    def sizes(self, keys: Collection[str]) -> dict[str, int]:
        """The size of each that is there: of several from a listing of the folder that they share, if it is short."""
        if len(keys) <= 1:
            return sizes_one_by_one(self, keys)
        folder = posixpath.commonpath(keys)
        wanted, listing = set(keys), self.list(folder and f"{folder}/")
        found = {info.key: info.size_bytes for info in islice(listing, LISTED_FOR_SIZES) if info.key in wanted}
        if next(listing, None) is not None:
            rest = [[key] for key in wanted - found.keys()]
            for sizes in self._readers.start(lambda keys: sizes_one_by_one(self, keys), rest)() if rest else ():
                found |= sizes
        return found

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object under `prefix`, in pages of 1,000; names that are no keys are somebody else's and left out."""
        check_prefix(prefix)
        return self._list(prefix)

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        options: dict[str, Any] = {}
        while True:
            page = self._page(prefix, **options)
            for entry in page.get("Contents", []):
                key = entry["Key"].removeprefix(self._prefix)
                if is_key(key) and entry["Key"].startswith(self._prefix + prefix):
                    # Whole seconds, as HEAD gives them.
                    yield ObjectInfo(key, entry["Size"], float(int(entry["LastModified"].timestamp())))
            if page["IsTruncated"] is False:
                return
            token = page.get("NextContinuationToken")
            if not token or token == options.get("ContinuationToken"):
                raise self._no_listing(prefix, "there is more, and the server does not say where")
            options = {"ContinuationToken": token}

    def now_s(self) -> float:
        """The server's clock, by the Date of an answer, in whole seconds [s since the epoch]."""
        answer: _Answer = self._page("config", MaxKeys=1)
        date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
        try:
            return parsedate_to_datetime(date).timestamp()
        except (TypeError, ValueError) as error:
            raise StorageError(
                f"{self.url}: the server's answers carry no readable Date; its clock is needed"
            ) from error

    def settle(self, prefix: str) -> None:
        """Nothing to do: what a server lists is durable."""
        check_prefix(prefix)

    def clean(self) -> int:
        """Nothing to do: a put that died leaves nothing."""
        return 0

    def prepare(self) -> None:
        """See `ObjectStore.prepare`: the prefix is empty, and a second put of a key is refused."""
        names = [entry["Key"].removeprefix(self._prefix) for entry in self._page("").get("Contents", [])]
        if not all(_TRIAL.match(name) for name in names):
            raise InvalidInputError(f"{self.url}: is not empty and no repository; choose an empty or a new prefix")
        with self.trial() as trial:
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
    def trial(self) -> Iterator[S3Store]:
        """See `ObjectStore.trial`: a prefix that begins with a dot, which no listing of ours shows."""
        store, name = copy(self), f".trial-{os.urandom(8).hex()}"
        store.url, store.place, store._prefix = f"{self.url}/{name}", f"{self.place}/{name}", f"{self._prefix}{name}/"
        store._signs = Signs(store.place)
        try:
            yield store
        finally:
            with suppress(SnapstoreError):  # where nobody may delete, some bytes stay
                store.delete([info.key for info in store.list("")])

    def refuses_damage(self) -> bool:
        """Whether the server compares a put's SHA-256 with the bytes it got; for `doctor`, in a trial."""
        wrong = hashlib.sha256(b"other bytes").hexdigest()
        body: Any = _Body(memoryview(b"bytes"), wrong)
        checksum = b64encode(bytes.fromhex(wrong)).decode()
        try:
            self._client.put_object(
                Bucket=self._bucket, Key=f"{self._prefix}damaged", Body=body, ChecksumSHA256=checksum
            )
        except ClientError as error:
            return status_of(error) == 400
        except FAILURES as error:
            raise translate(f"{self.url}: cannot write", error) from error
        return False

    # --- requests ---

    @property
    def _client(self) -> S3Client:
        pid, client = self._connected
        if pid != os.getpid():  # a forked child must not share its parent's connections
            client = make_client(**self._client_options)
            self._connected = os.getpid(), client
        return client

    def _ask(
        self, key: str, verb: str, call: Callable[..., Any], name: str | None = None, **options: Any
    ) -> Any:  # fmt: skip
        """The answer to a request about `key`, sent again while that may help.

        Args:
            name: the object that the request names, if it names one.
        """
        wanted = {"Bucket": self._bucket} | ({} if name is None else {"Key": self._prefix + name}) | options
        with self._failures(key, verb):
            try:
                return send(call, wanted, self._attempts)
            except ClientError as error:
                if name is not None and status_of(error) == 404 and code_of(error) == "404" and self._is_gone(name):
                    raise self._missing(key) from error  # an answer to HEAD, which has no word for it
                raise

    def _is_gone(self, key: str) -> bool:
        page = self._page(key, MaxKeys=1)
        return all(entry["Key"] != self._prefix + key for entry in page.get("Contents", []))

    def _page(self, prefix: str, **options: Any) -> _Answer:
        """One page of a listing."""
        page: _Answer = self._ask(
            prefix or "/", "list", self._client.list_objects_v2, Prefix=self._prefix + prefix, **options
        )
        if "IsTruncated" not in page:  # botocore takes an answer without a body for an empty one
            raise self._no_listing(prefix, "the answer is empty")
        return page

    def _length_of(self, key: str, answer: _Answer) -> int:
        length = answer.get("ContentLength")
        if not isinstance(length, int):
            raise StorageError(f"{key} in {self.url}: the server does not say how long it is; use another server")
        return length

    def _open_range(self, key: str, offset: int, length: int) -> tuple[_Answer, int]:
        """(answer to a ranged GET, size of the object); IntegrityError when the object ends before the range begins."""
        wanted = f"bytes={offset}-{offset + length - 1}"
        try:
            answer: _Answer = self._ask(key, "read", self._client.get_object, key, Range=wanted)
        except SnapstoreError as error:
            if not isinstance(error.__cause__, ClientError) or status_of(error.__cause__) != 416:
                raise
            raise self._short(key, offset, length, self.stat(key).size_bytes) from error
        got = answer.get("ContentRange", "")
        span, _, size = got.removeprefix("bytes ").partition("/")
        size_bytes = int(size) if size.isdecimal() else -1
        if span != f"{offset}-{min(offset + length, size_bytes) - 1}":
            answer["Body"].close()
            raise StorageError(
                f"{key} in {self.url} at {offset}+{length}: the server answered with another range ({got or 'all'}); "
                "use another server (docs/s3.md)"
            )
        return answer, size_bytes

    def _read_pieces(
        self, key: str, pieces: Sequence[Piece], views: Sequence[memoryview], size_bytes: int,
        last: tuple[Piece, _Answer] | None,
    ) -> None:  # fmt: skip
        """Fill the views; `last` is a piece whose answer is here already."""

        def read(piece: Piece) -> None:
            share = piece.shares[0]
            whole = len(piece.shares) == 1
            view = views[share.which][share.start :][: share.length] if whole else np.empty(piece.length, np.uint8).data
            answer = last[1] if last is not None and piece is last[0] else None
            with self._failures(key, "read"):
                self._fill(key, piece.offset, view, size_bytes, answer)
            for share in () if whole else piece.shares:
                views[share.which][share.start :][: share.length] = view[share.at :][: share.length]

        if len(pieces) > 1:
            self._readers.start(read, pieces[::-1])()
        else:
            for piece in pieces:
                read(piece)

    def _fill(self, key: str, offset: int, view: memoryview, size_bytes: int, answer: _Answer | None) -> None:
        """Fill `view` with what begins at `offset`; a body that breaks off is asked for again from there."""
        done = failures = 0
        ends_s = time.monotonic() + self._attempts * self._read_timeout_s + len(view) / SLOWEST_BYTES_PER_S
        while done < len(view):
            if answer is None:  # its failures are final: they have been tried often enough
                answer, now_bytes = self._open_range(key, offset + done, len(view) - done)
                if now_bytes != size_bytes:
                    answer["Body"].close()
                    raise self._short(key, offset, len(view), now_bytes)
            try:
                while done < len(view):
                    if time.monotonic() > ends_s:
                        raise StorageError(
                            f"{key} in {self.url} at {offset}+{len(view)}: only {done} bytes came in the time there "
                            "is; check the network and the server, then try again"
                        )
                    count = answer["Body"].readinto(view[done : done + READ_PIECE_BYTES])
                    if not count:  # of an answer that says less than its range
                        raise IncompleteReadError(actual_bytes=done, expected_bytes=len(view))
                    done += count
                    failures = 0
            except BODY_FAILURES:
                failures += 1
                if failures >= self._attempts:
                    raise
                pause(failures)
            finally:
                answer["Body"].close()
                answer = None

    # --- errors ---

    def _missing(self, key: str) -> NotFoundError:
        return NotFoundError(f"{key} in {self.url}: expected an object, found none; run 'snapstore check'")

    def _no_listing(self, prefix: str, why: str) -> StorageError:
        return StorageError(
            f"{prefix or '/'} in {self.url}: cannot list: {why}; nothing can be told from such a listing, try again, "
            "or use another server (docs/s3.md)"
        )

    def _short(self, key: str, offset: int, length: int, size_bytes: int) -> IntegrityError:
        return IntegrityError(
            f"{key} in {self.url} at {offset}+{length}: expected all {length} bytes, "
            f"got an object of {size_bytes} bytes; run 'snapstore check'"
        )

    @contextmanager
    def _failures(self, key: str, verb: str) -> Iterator[None]:
        """Turn botocore's errors into ours, with the name of the thing first."""
        try:
            yield
        except FAILURES as error:
            if isinstance(error, ClientError) and is_missing(error):
                raise self._missing(key) from error
            raise translate(f"{key} in {self.url}: cannot {verb}", error) from error


class _Body:
    """A buffer as a file that botocore can send, once, without copying it."""

    def __init__(self, view: memoryview, sha256: str) -> None:
        self._view, self._at = view, 0
        self.sha256 = sha256  # for the signer (s3_client.py)

    def __len__(self) -> int:
        return len(self._view)

    def read(self, size: int | None = -1) -> memoryview | bytes:
        """The next piece; larger than asked for, since http.client asks for 16 KiB at a time."""
        if size is None or size < 0:
            return bytes(self._view[self._at :])
        piece = self._view[self._at :][:BODY_PIECE_BYTES]
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As of a file."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._view)}[whence]
        return self._at

    def tell(self) -> int:
        """As of a file."""
        return self._at


def _sha256_of(key: str, view: memoryview) -> str:
    """In hex. Packs and manifests are named by it; were a name wrong, the server would refuse the bytes."""
    folder, _, name = key.partition("/")
    named = name.rpartition("/")[2]
    if folder in ("packs", "manifests") and re.fullmatch(r"[0-9a-f]{64}", named):
        return named
    return hashlib.sha256(view).hexdigest()
