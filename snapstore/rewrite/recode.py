"""recode: rewrite the blobs of snapshots into another codec, one by one; chains, dedup and digests stay as they are.

In: snapshots. Out: their next revisions (base.py). A blob that needs no change keeps its place, or is copied unchanged
if most of its pack is rewritten. Every other blob: read -> decode to its source (the chunk, or its difference from a
base) -> encode -> decode, compare -> label -> pack.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..arrays import Column
from ..context import Context
from ..engine.base import Engine
from ..engine.batches import Chunks, EncodeBatch
from ..engine.cpu import default_threads
from ..errors import IntegrityError
from ..format.blobs import blob, codecs, planes
from ..format.blobs.pack import Encoded
from ..format.chunking import MAX_CHUNK_BYTES
from ..format.keys import pack_key
from ..format.manifests.delta_chain import Place
from ..format.manifests.manifest import Manifest
from ..format.records import COMMITTED, FORGOTTEN, Snapshot
from ..text import brief
from ..threads import Threads
from .base import NewTable, StaleManifest, Work, places_of
from .blob_rewriting import BlobRewriting
from .stored_blobs import NAME, StoredBlobs, batches, bytes_of, digests_of, lengths_of, names_of, verified

#: The codecs of blobs that each choice does not recode; a sparse delta cannot be decoded without its base.
KEPT = {
    "portable": (codecs.RAW, codecs.ZSTD, codecs.DEFLATE, codecs.SPARSE),
    "ans": (codecs.RAW, codecs.ANS, codecs.SPARSE),
}
#: A pack is emptied if this share of it or more is to be rewritten, so that gc can free it.
EMPTIED_ABOVE_SHARE = 0.5


@dataclass(slots=True)
class RecodeResult:
    """The result of a recode, or of a dry run.

    Attributes:
        recoded: new revisions of the snapshots that changed (of a dry run: the revisions as they are).
        skipped: snapshots that needed nothing, or were forgotten or collected meanwhile.
        failed: (snapshot, why) of the snapshots that could not be recoded; they are unchanged.
        unknown: the records that cannot be read or are gone (key: why); empty if references name the snapshots.
        blobs: blobs recoded or copied, each counted once; a few are copied unchanged, to free their pack.
        bytes_before, bytes_after: stored bytes of these blobs; `bytes_after` is 0 in a dry run.
    """

    codec: str
    recoded: list[Snapshot] = field(default_factory=list)
    skipped: list[Snapshot] = field(default_factory=list)
    failed: list[tuple[Snapshot, str]] = field(default_factory=list)
    blobs: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    dry_run: bool = False
    unknown: dict[str, str] = field(default_factory=dict)

    __repr__ = brief


def recode(
    context: Context,
    snapshots: Sequence[Snapshot],
    unknown: dict[str, str],
    *,
    codec: str,
    states: tuple[str, ...] = (COMMITTED, FORGOTTEN),
    dry_run: bool = False,
) -> RecodeResult:
    """Rewrite snapshots. One that cannot be rewritten is reported; the others are rewritten.

    Args:
        unknown: the records that cannot be read or are gone, for the result.
        codec: "portable" or "ans", see `SaveOptions`.
        states: a snapshot in another state is left alone.

    Raises:
        CapabilityError: this machine lacks the GPU that a codec needs; the snapshots before that are recoded.
        StorageError: the store failed; the snapshots before that are recoded.
    """
    engine: Engine = context.engines.for_ans() if codec == "ans" and not dry_run else context.engines.cpu
    try:
        with _Recoding(context, engine, codec, states, dry_run) as recoding:
            recoding.run(snapshots)
    finally:
        if engine is not context.engines.cpu:
            engine.close()
    before, after = zip(*recoding.made.values(), strict=True) if recoding.made else ((0,), (0,))
    return RecodeResult(
        codec,
        recoding.rewritten,
        recoding.skipped,
        recoding.failed,
        len(recoding.made),
        sum(before),
        sum(after),
        dry_run,
        unknown,
    )


class _Recoding(BlobRewriting):
    """Recodes the snapshots of one repository."""

    verb = "recode"

    def __init__(self, context: Context, engine: Engine, codec: str, states: tuple[str, ...], dry_run: bool) -> None:
        super().__init__(context, engine, states=states, dry_run=dry_run)
        self._kept = KEPT[codec]
        self._threads = Threads(context.engines.threads or default_threads())
        self._emptied: dict[str, bool] = {}  # pack -> whether all of its blobs move

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._threads.close()

    # -- choose

    def stale(self, m: Manifest, entries: npt.NDArray[np.void]) -> Column:
        """Return the references to blobs in another codec, and to blobs in packs that are emptied.

        Raises:
            IntegrityError: a pack in quarantine holds a blob in another codec.
        """
        emptied = np.array([self._is_emptied(name) for name in m.header.pack_names] or [False])
        goes, damaged = ~self._is_kept(entries), self.in_quarantine(m)
        if (goes & damaged).any():
            name = m.header.pack_names[m.table.ref_packs[np.argmax(goes & damaged)]]
            raise IntegrityError(
                f"{pack_key(name)}: is in quarantine, and its blobs stay as they are; run 'snapstore repair'"
            )
        return np.flatnonzero(goes | emptied[m.table.ref_packs] & ~damaged)

    def foresee(self, parts: Sequence[StaleManifest]) -> None:
        """Note the blobs that would be recoded or moved."""
        for part in parts:
            self.made.update({place: (place.length, 0) for place in places_of(part)})

    def stays(self, name: str, entries: npt.NDArray[np.void]) -> Column:
        """Return the blobs in the new codec, unless the pack is emptied."""
        return self._is_kept(entries) & (not self._is_emptied(name))

    def _is_kept(self, entries: npt.NDArray[np.void]) -> Column:
        """Return which blobs need no other codec, (n,) bool."""
        beyond = np.arange(8) >= entries["element_size"][:, None]
        kept: Column = np.isin(entries["codecs"], self._kept) | beyond
        return np.asarray(kept.all(axis=1))

    def _is_emptied(self, name: str) -> bool:
        if name not in self._emptied:
            entries = self.listing(name)
            goes, lengths = ~self._is_kept(entries), entries["length"].astype(np.int64)
            self._emptied[name] = bool(lengths[goes].sum() >= max(1, EMPTIED_ABOVE_SHARE * lengths.sum()))
        return self._emptied[name]

    # -- write

    def write(self, work: Work, part: StaleManifest) -> NewTable:
        """Pack every stale blob, unchanged or in the new codec."""
        m, entries, places = part.manifest, part.entries[part.stale], places_of(part)
        self.reuse(work, places)
        first = {place: i for i, place in reversed(list(enumerate(places))) if not work.has(place)}
        rows = np.array(sorted(first.values()), np.int64)
        rows = rows[np.lexsort((entries["offset"][rows], m.table.ref_packs[part.stale[rows]]))]  # by pack
        moves = self._is_kept(entries[rows])
        for how, chosen in ((self.move, rows[moves]), (self._recode, rows[~moves])):
            how(work, [places[i] for i in chosen.tolist()], entries[chosen])
        return NewTable(m.table, m.header.pack_names, part.stale, places)

    def _recode(self, work: Work, places: Sequence[Place], entries: npt.NDArray[np.void]) -> None:
        """Encode blobs in the new codec, in batches: a batch is read while earlier ones are encoded."""
        coding: deque[_Coding] = deque()

        def finish() -> None:
            begun = coding[0]
            self.add(work, self._finish(begun), begun.places, lengths_of(begun.entries))
            coding.popleft()

        try:
            for batch in batches(entries["raw_bytes"], self.engine):
                coding.append(self._start([places[i] for i in batch.tolist()], entries[batch]))
                work.claim.heartbeat()
                if len(coding) > self.engine.depth:
                    finish()
            while coding:
                finish()
        finally:
            for begun in coding:
                with suppress(Exception):
                    begun.wait()

    def _start(self, places: Sequence[Place], entries: npt.NDArray[np.void]) -> _Coding:
        """Read a batch of blobs, decode each to its source, and begin to encode the sources."""
        blobs = list(self.read_parsed(places, entries))
        lengths = entries["raw_bytes"].astype(np.int64)
        rooms = lengths + -lengths % 256
        starts = np.cumsum(rooms) - rooms
        for (_, header, where), length in zip(blobs, lengths.tolist(), strict=True):
            if header.raw_bytes != length or length > MAX_CHUNK_BYTES:
                raise IntegrityError(f"{where}: a blob of {header.raw_bytes} bytes, expected {length}, one chunk")
        plain = np.empty(int(rooms.sum()), np.uint8)

        def decode(i: int) -> int:
            data, header, where = blobs[i]
            out = plain[starts[i] : starts[i] + lengths[i]]
            # merge as floats, so that the planes of a difference are coded by their skew; `relabel` sets BYTES again
            layout = planes.ROTATED if header.transform == blob.DIFFERENCE else header.layout
            planes.merge(blob.decode_planes(data, header, where), out, layout)
            return layout

        layouts = np.array(self._threads.start(decode, range(len(blobs)))(), np.uint8)
        sources = Chunks([self.engine.upload(plain)], np.zeros(len(blobs), np.int64), starts, lengths)
        digests = self.engine.start_digests(sources)()
        wrong = (entries["transform"] == blob.FULL) & (digests != digests_of(entries)).any(axis=1)
        if wrong.any():
            raise IntegrityError(f"{blobs[int(np.argmax(wrong))][2]}: digest mismatch; run 'snapstore check --restore'")
        none = Chunks([], np.full(len(blobs), -1, np.int64), np.zeros(len(blobs), np.int64), lengths)
        batch = EncodeBatch(
            sources, digests, entries["element_size"], layouts, none, np.zeros_like(digests), np.zeros_like(lengths)
        )
        return _Coding(places, entries, batch, self.engine.start_encode(batch))

    def _finish(self, begun: _Coding) -> StoredBlobs:
        """Return the blobs of a batch, verified and labelled.

        Raises:
            IntegrityError: one does not decode to its source.
        """
        blobs = verified(self.engine, begun.batch, begun.wait())
        entries, offsets, lengths = blobs.entries, blobs.entries["offset"].tolist(), lengths_of(blobs.entries)
        bytes_of(entries)[:, NAME] = bytes_of(begun.entries)[:, NAME]
        for name, offset, length in zip(names_of(entries), offsets, lengths, strict=True):
            blob.relabel(blobs.blobs[offset : offset + length].data, name[0], name[2:18], name[18:])
        return blobs


@dataclass(frozen=True, slots=True)
class _Coding:
    """A batch that is being encoded: as if each source were a full chunk, until its blob is labelled."""

    places: Sequence[Place]
    entries: npt.NDArray[np.void]  # of the old blobs
    batch: EncodeBatch
    wait: Callable[[], Sequence[Encoded]]
