"""Uploader: packs new blobs; while one pack fills, earlier ones are hashed and put in the background.

In: encoded blobs, in order. Out: durable packs, and the pack and offset of each blob. The bytes in flight are bounded.
It runs in the thread of a save or a rewrite. It puts manifests too.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from ..arrays import Bytes, Column
from ..engine.base import Engine
from ..errors import AlreadyExistsError, IntegrityError, NotFoundError, StorageError
from ..format.blobs import blob
from ..format.blobs.pack import Encoded, PackWriter
from ..format.keys import pack_key
from ..protocol.claim import Putter
from ..storage.base import ObjectStore
from ..threads import Pending, Threads

#: At most this many bytes of packs are hashed and put while the next pack fills, but always one pack. Each pack counts
#: as `pack_bytes`. So a save holds at most n + 1 buffers of `pack_bytes` plus a slack, with n = `puts_in_flight`: 8 + 1
#: for 32 MiB, if the store takes that many puts at once; 1 + 1 above 128 MiB. Idle buffers are counted: a new one is
#: made only if none is idle. A buffer that had to grow is not kept.
PUT_BYTES_IN_FLIGHT = 256 * 1024 * 1024
PUTS_IN_FLIGHT = 2
#: Space in a pack's buffer for its last blob and the footer, or for two chunks if they are larger [bytes]. If a pack
#: needs more, its buffer grows.
PACK_SLACK_BYTES = 2 * 1024 * 1024
#: How often a put is tried again when the store reports an object and then does not find it.
PUT_ATTEMPTS = 4
#: While a put runs, the session gets a heartbeat this often [s], or less often: `Claim.heartbeat`.
BEAT_S = 15.0
#: An object that exists already is compared in pieces of this size.
COMPARED_BYTES = 4 * 1024 * 1024


class PackUploader:
    """The new packs of one session, filled one after the other.

    Attributes:
        names, sizes: hex name and size [bytes] of each pack, in order; "" and 0 until the pack is durable.
        idle: buffers of packs that have been put; the caller gives them back to the engine that lent them.
    """

    def __init__(self, session: Putter, pack_bytes: int, chunk_bytes: int) -> None:
        store = session.store
        self._session, self._pack_bytes = session, pack_bytes
        self._buffer_bytes = pack_bytes + max(PACK_SLACK_BYTES, 2 * chunk_bytes)
        self.names: list[str] = []
        self.sizes: list[int] = []
        self.idle: list[Bytes] = []
        self._rank, self._part = 0, ""
        self._writer: PackWriter | None = None
        self._putters = Threads(puts_in_flight(pack_bytes, max(PUTS_IN_FLIGHT, store.puts_at_once)))
        self._puts: deque[tuple[int, Pending[tuple[str, int]]]] = deque()

    def begin(self, rank: int, part: str) -> None:
        """Begin or continue a part: packs never mix parts."""
        if (rank, part) != (self._rank, self._part):
            self.seal()
            self._rank, self._part = rank, part

    def hasten(self, puts: int) -> None:
        """Allow this many puts at once, if their bytes allow it: an engine may fill packs that fast."""
        more = puts_in_flight(self._pack_bytes, puts)
        if self._putters.count < more:
            self.finish()
            self._putters.close()
            self._putters = Threads(more)

    def add(self, encoded: Encoded, engine: Engine) -> tuple[Column, Column]:
        """Put blobs into packs.

        Args:
            engine: lends the packs' buffers.

        Returns:
            For each blob the index of its pack in `names`, and its offset in the pack, both (n,) int64.
        """
        entries = encoded.entries
        ends = (entries["offset"] + entries["length"] + blob.ALIGNMENT - 1) // blob.ALIGNMENT * blob.ALIGNMENT
        numbers, offsets = np.empty(len(entries), np.int64), np.empty(len(entries), np.int64)
        first = 0
        while first < len(entries):
            writer = self._writer or self._open(engine)
            needed = self._pack_bytes - writer.size_bytes + int(entries["offset"][first])
            last = min(int(np.searchsorted(ends, needed)) + 1, len(entries))
            offsets[first:last] = writer.extend(encoded, first, last)
            numbers[first:last] = len(self.names) - 1
            if writer.size_bytes >= self._pack_bytes:
                self.seal()
            first = last
        return numbers, offsets

    def _open(self, engine: Engine) -> PackWriter:
        """Begin the next pack."""
        buffer = self.idle.pop() if self.idle else engine.buffer(self._buffer_bytes)
        save_id = bytes.fromhex(self._session.id)
        made_for = self._session.made_for
        self._writer = PackWriter(save_id, self._rank, len(self.names), self._part, buffer, made_for=made_for)
        self.names.append("")
        self.sizes.append(0)
        return self._writer

    def seal(self) -> None:
        """Begin to hash and put the current pack, once a thread is free."""
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        while len(self._puts) >= self._putters.count:
            self._await_put()
        self._puts.append((len(self.names) - 1, self._putters.start(self._put, [writer])))

    def _put(self, writer: PackWriter) -> tuple[str, int]:
        data = writer.seal()
        name = hashlib.sha256(data).hexdigest()
        put_once(self._session, pack_key(name), data)
        if not writer.grown:
            self.idle.append(writer.buffer)
        return name, len(data)

    def _await_put(self) -> None:
        number, result = self._puts.popleft()
        while not result.ready(BEAT_S):  # a slow network may take an hour for a pack: gcs must see that this lives
            self._session.heartbeat()
        ((self.names[number], self.sizes[number]),) = result()
        self._session.heartbeat()

    def finish(self) -> None:
        """Wait until every sealed pack is durable."""
        while self._puts:
            self._await_put()

    def put_all(self, manifests: Sequence[tuple[str, bytes]]) -> None:
        """Put manifests (key, bytes) and make them durable."""
        self._putters.start(lambda item: put_once(self._session, *item), manifests)()

    def close(self) -> None:
        """Wait for copies and puts; end the threads."""
        if self._writer is not None:
            with suppress(Exception):
                self._writer.sync()
        self._putters.close()


def put_once(claim: Putter, key: str, data: bytes | memoryview) -> None:
    """Put a content-addressed object. If it exists already, compare it: a response was lost, and the put repeated.

    The object holds the session's id, and its name is its hash. So only this save or rewrite can have put it, and no gc
    deletes it.

    Raises:
        IntegrityError: the existing object has other bytes.
        StorageError: the store failed; or it reports the object as existing and then does not find it.
    """
    store = claim.store
    claim.written.add(key)
    for _ in range(PUT_ATTEMPTS):
        try:
            store.put(key, data)
            return
        except AlreadyExistsError:
            with suppress(NotFoundError):  # deleted meanwhile
                _check_same(store, key, memoryview(data))
                return
    raise StorageError(
        f"{key} in {store.url}: reported as existing and then not found, {PUT_ATTEMPTS} times; "
        "nothing but 'snapstore gc' may delete objects here"
    )


def _check_same(store: ObjectStore, key: str, data: memoryview) -> None:
    """Raise IntegrityError if an object has other bytes, NotFoundError if it is gone."""
    advice = "it was damaged or altered; run 'snapstore check', then save again"
    size_bytes = store.stat(key).size_bytes
    if size_bytes != len(data):
        raise IntegrityError(f"{key} in {store.url}: expected {len(data)} bytes, got {size_bytes}: {advice}")
    for start in range(0, size_bytes, COMPARED_BYTES):
        piece = data[start : start + COMPARED_BYTES]
        found = store.get_range(key, start, len(piece))
        if found != piece:
            raise IntegrityError(
                f"{key} in {store.url}: expected {size_bytes} bytes with the SHA-256 in its name, "
                f"got other bytes from offset {start}: {advice}"
            )


def puts_in_flight(pack_bytes: int, wanted: int) -> int:
    """Return how many packs may be hashed and put at once while another one fills; see PUT_BYTES_IN_FLIGHT."""
    return max(1, min(wanted, PUT_BYTES_IN_FLIGHT // pack_bytes))
