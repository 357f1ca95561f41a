"""Verify: decode blobs right after an engine has encoded them, and compare the results with the chunks' digests.

In: an encoded batch and its blobs. Out: nothing, or IntegrityError. Blobs are decoded as in a restore, from copies in
host memory. The copies of a batch are made while the caller encodes the next batch; they are decoded during the batch
after that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from ..arrays import Bytes, Column
from ..engine.base import Engine
from ..engine.batches import Chunks, DecodeBatch, EncodeBatch
from ..errors import DAMAGE, IntegrityError
from ..format.blobs.blob import ALIGNMENT, FULL
from ..format.blobs.pack import Encoded

#: Decoded chunks begin at multiples of this [bytes].
_ROOM_ALIGNMENT = 256


class Verifier:
    """Verifies the new blobs of a save or a rewrite, one batch at a time.

    Args:
        source: names the encoded data in the error: "does not decode to <source>".
        advice: for the error: the step that did not happen, and what to do.
    """

    def __init__(self, source: str, advice: str) -> None:
        self._source, self._advice = source, advice
        self._copying: _HostBlobs | None = None
        self._decoding: _HostBlobs | None = None

    def start(
        self, engine: Engine, batch: EncodeBatch, encoded: Encoded, *, first: int = 0, chosen: Column | None = None
    ) -> None:
        """Begin to copy blobs of this batch; begin to decode those of the previous batch; finish the one before it.

        Args:
            batch: the batch that the engine has encoded; its chunks are no longer read, but their bases are.
            first: the row in `batch` of the first blob of `encoded`.
            chosen: (k,) the numbers of the blobs of `encoded` to decode, ascending; None: all.

        Raises:
            IntegrityError: an earlier batch does not decode to its chunks.
        """
        if chosen is None:
            chosen = np.arange(len(encoded.entries))
        self._advance()
        if len(chosen):
            self._copying = _HostBlobs(engine, batch, encoded.entries[chosen], first + chosen)
            self._copying.start_copy(encoded, chosen)

    def _advance(self) -> None:
        """Finish the batch that is being decoded; begin to decode the one that is being copied."""
        if self._decoding is not None:
            try:
                self._decoding.finish()
            except DAMAGE as error:
                raise IntegrityError(
                    f"an encoded blob does not decode to {self._source} ({error}); {self._advice}, and test the memory "
                    "of this machine and its GPU"
                ) from error
            self._decoding = None  # frees its memory before the next batch takes some
        if self._copying is not None:
            self._copying.start_decode()
            self._decoding, self._copying = self._copying, None

    def finish(self) -> None:
        """Decode all blobs that were begun; then nothing reads the bases any more.

        Raises:
            IntegrityError: a blob does not decode to its chunk.
        """
        while self._copying is not None or self._decoding is not None:
            self._advance()

    def close(self) -> None:
        """Wait for what was begun, and ignore its result; then nothing uses its memory any more."""
        for batch in (self._decoding, self._copying):
            if batch is not None:
                batch.close()
        self._copying = self._decoding = None


class _HostBlobs:
    """Blobs of one batch, in host memory that the engine lends. After an interrupt, call `close`."""

    def __init__(self, engine: Engine, batch: EncodeBatch, entries: npt.NDArray[np.void], rows: Column) -> None:
        self._engine, self._digests, self._sizes = engine, batch.digests[rows], batch.chunks.lengths[rows]
        self._bases = _used(batch.bases.take(rows), entries["transform"] != FULL)
        self._lengths = entries["length"].astype(np.int64)
        self._ends = np.cumsum(self._lengths + -self._lengths % ALIGNMENT)
        self._offsets = self._ends - self._lengths - -self._lengths % ALIGNMENT
        self._buffer: Bytes | None = engine.buffer(int(self._ends[-1]))
        self._stored = self._buffer[: self._ends[-1]]
        self._waits: list[Callable[[], object]] = []

    def start_copy(self, encoded: Encoded, chosen: Column) -> None:
        """Begin to copy the blobs `chosen`."""
        buffer, self._buffer = self._buffer, None  # if an interrupt comes now, nobody can wait: it is not lent again
        begin = 0
        for run in np.split(chosen, np.flatnonzero(np.diff(chosen) != 1) + 1):
            end = begin + len(run)
            out = self._stored[int(self._offsets[begin]) : int(self._ends[end - 1])]
            self._waits.append(encoded.copy(int(run[0]), int(run[-1]) + 1, out))
            begin = end
        self._buffer = buffer

    def start_decode(self) -> None:
        """Wait for the copies; begin to decode them."""
        for wait in self._waits:
            wait()
        count, sizes = len(self._sizes), self._sizes
        ends = np.cumsum(sizes + -sizes % _ROOM_ALIGNMENT)
        starts = ends - sizes - -sizes % _ROOM_ALIGNMENT
        decode = DecodeBatch(
            self._stored,
            self._offsets,
            self._lengths,
            np.ones(count, np.int64),
            self._digests,
            Chunks([self._engine.empty(int(ends[-1]))], np.zeros(count, np.int64), starts, sizes),
            lambda i: f"new blob {i} of {count}",
            self._bases,
        )
        buffer, self._buffer = self._buffer, None  # as in `start_copy`
        self._waits = [self._engine.start_decode(decode)]
        self._buffer = buffer

    def finish(self) -> None:
        """Wait for the decoding.

        Raises:
            IntegrityError, FormatError: a blob does not decode to its chunk.
        """
        try:
            for wait in self._waits:
                wait()
        except Exception:
            self._give_back()
            raise
        self._give_back()

    def close(self) -> None:
        """Wait for what was begun, and ignore its result."""
        for wait in self._waits:
            with suppress(Exception):
                wait()
        self._give_back()

    def _give_back(self) -> None:
        self._waits = []
        buffer, self._buffer = self._buffer, None  # an interrupt here loses it; else it would be given back twice
        if buffer is not None:
            self._engine.give_back(buffer)


def _used(bases: Chunks, is_delta: Column) -> Chunks | None:
    """Return the bases of deltas, (k,), with only the memories that they lie in; None if there are none."""
    if not is_delta.any():
        return None
    used, which = np.unique(bases.which[is_delta], return_inverse=True)
    found = np.full(len(is_delta), -1, np.int64)
    found[is_delta] = which
    return Chunks([bases.memories[i] for i in used.tolist()], found, bases.starts, bases.lengths)
