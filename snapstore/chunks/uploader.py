"""Packing: new blobs into packs, which are hashed and put in the background while the next one fills.

In: encoded blobs, in order. Out: durable packs, and of every blob in which of them it lies and where. Bounded in bytes;
runs in the thread of a save or a rewrite. Manifests take the same way out.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from ..arrays import Bytes, Column
from ..engine.base import Engine
from ..errors import AlreadyExistsError, IntegrityError, NotFoundError, StorageError
from ..format import blob
from ..format.keys import pack_key
from ..format.pack import Encoded, PackWriter
from ..protocol.claim import Claim
from ..storage.base import ObjectStore
from ..threads import Threads

#: Packs that are hashed and put while the next one fills: so many bytes at most (`pack_bytes` counts), but one pack
#: always, however large. So a save holds at most n + 1 buffers of `pack_bytes` and a slack, n = `puts_in_flight`: 8 + 1
#: at 32 MiB on a store that takes so many, 1 + 1 above 128 MiB. Idle ones are among them, as a new one is made only
#: when none is idle; one that had to grow is not kept.
PUT_BYTES_IN_FLIGHT = 256 * 1024 * 1024
PUTS_IN_FLIGHT = 2
#: Room in a pack's buffer for the blob that fills it and for the footer, or two chunks where they are larger; a larger
#: pack makes its buffer grow.
PACK_SLACK_BYTES = 2 * 1024 * 1024
#: How often an object is put that was there and then was not.
PUT_ATTEMPTS = 4
#: An object that is there already is compared in pieces of so many bytes.
COMPARED_BYTES = 4 * 1024 * 1024


class Packs:
    """The new packs of one session, filled one after the other.

    Attributes:
        names, sizes: of every pack begun, in this order: hex and [bytes]; "" and 0 until it is durable.
        idle: buffers of packs that have been put, for the engine that lent them.
    """

    def __init__(self, session: Claim, pack_bytes: int, chunk_bytes: int) -> None:
        store = session.store
        self._session, self._pack_bytes = session, pack_bytes
        self._buffer_bytes = pack_bytes + max(PACK_SLACK_BYTES, 2 * chunk_bytes)
        self.names: list[str] = []
        self.sizes: list[int] = []
        self.idle: list[Bytes] = []
        self._rank, self._part = 0, ""
        self._writer: PackWriter | None = None
        self._putters = Threads(puts_in_flight(pack_bytes, max(PUTS_IN_FLIGHT, store.puts_at_once)))
        self._puts: deque[tuple[int, Callable[[], list[tuple[str, int]]]]] = deque()

    def begin(self, rank: int, part: str) -> None:
        """What follows belongs to this part: packs never mix parts."""
        self.seal()
        self._rank, self._part = rank, part

    def hasten(self, puts: int) -> None:
        """Put as many packs at a time, if their bytes allow: an engine of a device fills them that fast."""
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
            (n,) int64, the number of each blob's pack among `names`, and its offset there.
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
        """Hash and put the pack that fills, as many at a time as there are threads for it."""
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
        ((self.names[number], self.sizes[number]),) = result()
        self._session.heartbeat()

    def finish(self) -> None:
        """Every pack that was sealed is durable."""
        while self._puts:
            self._await_put()

    def start_put(self, key: str, data: bytes) -> Callable[[], object]:
        """Begin to put a manifest; the call it returns waits until it is durable."""
        return self._putters.start(lambda item: put_once(self._session, *item), [(key, data)])

    def close(self) -> None:
        """End the threads; nothing is copied any more."""
        if self._writer is not None:
            with suppress(Exception):
                self._writer.settle()
        self._putters.close()


def put_once(claim: Claim, key: str, data: bytes | memoryview) -> None:
    """Put a content-addressed object; one that is there already must be this very one (a lost response, repeated).

    Its name covers the id of the session, so nobody but this save or rewrite has put it, and no gc deletes it.

    Raises:
        IntegrityError: what is there is not what its name says.
        StorageError: it comes and goes.
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
    """Raise IntegrityError unless an object is just this, NotFoundError when it is gone."""
    advice = "it was damaged or altered; run 'snapstore check', then save again"
    size_bytes = store.stat(key).size_bytes
    if size_bytes != len(data):
        raise IntegrityError(f"{key} in {store.url}: expected {len(data)} bytes, got {size_bytes}: {advice}")
    for start in range(0, size_bytes, COMPARED_BYTES):
        piece = data[start : start + COMPARED_BYTES]
        (found,) = store.get_ranges(key, [(start, len(piece))])
        if found != piece:
            raise IntegrityError(
                f"{key} in {store.url}: expected the {size_bytes} bytes that its name is the SHA-256 of, "
                f"got others from {start} on: {advice}"
            )


def puts_in_flight(pack_bytes: int, wanted: int) -> int:
    """How many packs may be hashed and put at once, beside the one that fills; see PUT_BYTES_IN_FLIGHT."""
    return max(1, min(wanted, PUT_BYTES_IN_FLIGHT // pack_bytes))
