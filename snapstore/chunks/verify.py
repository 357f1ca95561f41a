"""Verify: decode blobs right after an engine has encoded them, and compare the results with the chunks' digests.

In: an encoded batch and its blobs. Out: nothing, or IntegrityError. Blobs are decoded as in a restore, from copies in
host memory. While the caller encodes the next batch, they are copied; during the batch after that, they are decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np

from ..arrays import Column
from ..engine.base import Engine
from ..engine.batches import Chunks, DecodeBatch, EncodeBatch
from ..errors import DAMAGE, IntegrityError
from ..format.blob import ALIGNMENT, DIFFERENCE
from ..format.pack import Encoded

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
        self._copying: _Copying | None = None
        self._decoding: Callable[[], object] | None = None

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
        if not len(chosen):
            return
        self._advance()
        self._copying = _Copying(engine, batch, encoded, first, chosen)

    def _advance(self) -> None:
        """Finish the batch that is being decoded; begin to decode the one that is being copied."""
        decoding, self._decoding = self._decoding, None
        if decoding is not None:
            try:
                decoding()
            except DAMAGE as error:
                raise IntegrityError(
                    f"an encoded blob does not decode to {self._source} ({error}); {self._advice}, and test the memory "
                    "of this machine and its GPU"
                ) from error
        copying, self._copying = self._copying, None
        if copying is not None:
            self._decoding = copying.start_decode()

    def finish(self) -> None:
        """Decode all blobs that were begun; then nothing reads the bases any more.

        Raises:
            IntegrityError: a blob does not decode to its chunk.
        """
        while self._copying is not None or self._decoding is not None:
            self._advance()

    def close(self) -> None:
        """Wait for what was begun, and ignore its result; then nothing uses its memory any more."""
        copying, decoding = self._copying, self._decoding
        self._copying = self._decoding = None
        if decoding is not None:
            with suppress(Exception):
                decoding()
        if copying is not None:
            with suppress(Exception):
                copying.close()


class _Copying:
    """Blobs of one batch on their way to host memory, which the engine lends."""

    def __init__(self, engine: Engine, batch: EncodeBatch, encoded: Encoded, first: int, chosen: Column) -> None:
        self._engine, rows = engine, first + chosen
        self._entries, self._digests = encoded.entries[chosen], batch.digests[rows]
        self._sizes, self._bases = batch.chunks.lengths[rows], batch.bases.take(rows)
        lengths = self._entries["length"].astype(np.int64)
        ends = np.cumsum(lengths + -lengths % ALIGNMENT)
        self._offsets = ends - lengths - -lengths % ALIGNMENT
        self._buffer = engine.buffer(int(ends[-1]))
        self._stored = self._buffer[: ends[-1]]
        self._waits, begin = list[Callable[[], object]](), 0
        for run in np.split(chosen, np.flatnonzero(np.diff(chosen) != 1) + 1):
            end = begin + len(run)
            out = self._stored[int(self._offsets[begin]) : int(ends[end - 1])]
            self._waits.append(encoded.copy(int(run[0]), int(run[-1]) + 1, out))
            begin = end

    def start_decode(self) -> Callable[[], object]:
        """Wait for the copies; begin to decode them. The returned call raises the first of DAMAGE."""
        self._wait()
        count, sizes, bases = len(self._sizes), self._sizes, self._bases
        ends = np.cumsum(sizes + -sizes % _ROOM_ALIGNMENT)
        outs = Chunks(
            [self._engine.empty(int(ends[-1]))],
            np.zeros(count, np.int64),
            ends - sizes - -sizes % _ROOM_ALIGNMENT,
            sizes,
        )
        is_delta = self._entries["transform"] == DIFFERENCE
        bases = Chunks(bases.memories, np.where(is_delta, bases.which, -1), bases.starts, bases.lengths)
        decoding = self._engine.start_decode(
            DecodeBatch(
                self._stored,
                self._offsets,
                self._entries["length"].astype(np.int64),
                np.ones(count, np.int64),
                self._digests,
                outs,
                lambda i: f"new blob {i} of {count}",
                bases if is_delta.any() else None,
            )
        )

        def finish() -> None:
            try:
                decoding()
            finally:
                self._engine.give_back(self._buffer)

        return finish

    def close(self) -> None:
        """Wait for the copies, and decode nothing."""
        self._wait()
        self._engine.give_back(self._buffer)

    def _wait(self) -> None:
        for wait in self._waits:
            wait()
