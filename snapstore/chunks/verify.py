"""Verify: decode blobs right after an engine has encoded them, and compare the results with the chunks' digests.

In: an encoded batch and its blobs. Out: nothing, or IntegrityError. Blobs are decoded as in a restore, from copies in
host memory, while the caller goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np

from ..arrays import Bytes, Column
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
        self._wait: Callable[[], object] | None = None

    def start(
        self, engine: Engine, batch: EncodeBatch, encoded: Encoded, *, first: int = 0, chosen: Column | None = None
    ) -> None:
        """Finish the previous batch; begin to decode blobs of this one.

        Args:
            batch: the batch that the engine has encoded; its chunks are no longer read.
            first: the row in `batch` of the first blob of `encoded`.
            chosen: (k,) the numbers of the blobs of `encoded` to decode, ascending; None: all.

        Raises:
            IntegrityError: the previous batch does not decode to its chunks.
        """
        if chosen is None:
            chosen = np.arange(len(encoded.entries))
        if not len(chosen):
            return
        stored, offsets = _copied(encoded, chosen)
        rows, entries = first + chosen, encoded.entries[chosen]
        sizes, is_delta = batch.chunks.lengths[rows], entries["transform"] == DIFFERENCE
        ends = np.cumsum(sizes + -sizes % _ROOM_ALIGNMENT)
        outs = Chunks(
            [engine.empty(int(ends[-1]))], np.zeros(len(rows), np.int64), ends - sizes - -sizes % _ROOM_ALIGNMENT, sizes
        )
        bases = batch.bases.take(rows)
        bases = Chunks(bases.memories, np.where(is_delta, bases.which, -1), bases.starts, bases.lengths)
        lengths, ones = entries["length"].astype(np.int64), np.ones(len(rows), np.int64)
        self.finish()
        self._wait = engine.start_decode(
            DecodeBatch(
                stored,
                offsets,
                lengths,
                ones,
                batch.digests[rows],
                outs,
                lambda i: f"new blob {i} of {len(rows)}",
                bases if is_delta.any() else None,
            )
        )

    def finish(self) -> None:
        """Wait for the batch that was begun.

        Raises:
            IntegrityError: a blob does not decode to its chunk.
        """
        wait, self._wait = self._wait, None
        if wait is None:
            return
        try:
            wait()
        except DAMAGE as error:
            raise IntegrityError(
                f"an encoded blob does not decode to {self._source} ({error}); {self._advice}, and test the memory of "
                "this machine and its GPU"
            ) from error

    def close(self) -> None:
        """Wait for the batch that was begun, and ignore its result; then nothing uses its memory any more."""
        with suppress(Exception):
            self.finish()


def _copied(encoded: Encoded, chosen: Column) -> tuple[Bytes, Column]:
    """Copy blobs to host memory; return it, and the offset (k,) of each blob in it."""
    lengths = encoded.entries["length"][chosen].astype(np.int64)
    ends = np.cumsum(lengths + -lengths % ALIGNMENT)
    offsets = ends - lengths - -lengths % ALIGNMENT
    stored = np.empty(int(ends[-1]), np.uint8)
    waits, begin = [], 0
    for run in np.split(chosen, np.flatnonzero(np.diff(chosen) != 1) + 1):
        end = begin + len(run)
        span = slice(int(offsets[begin]), int(ends[end - 1]))
        waits.append(encoded.copy(int(run[0]), int(run[-1]) + 1, stored[span]))
        begin = end
    for wait in waits:
        wait()
    return stored, offsets
