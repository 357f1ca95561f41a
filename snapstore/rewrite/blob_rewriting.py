"""Blobs: look up single blobs in the footers of packs, and read, share and move them. For recode and compact.

In: the references of manifests. Out: footer entries, stored bytes, and the places of blobs that need not be written,
because a pack of a committed snapshot holds them already, byte for byte.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Self

import numpy as np
import numpy.typing as npt

from ..arrays import Column
from ..catalog.history import View
from ..catalog.read_twice import read_twice
from ..chunks.bad_sectors import read_around
from ..context import Context
from ..engine.base import Engine
from ..errors import DAMAGE, IntegrityError, NotFoundError
from ..format.blobs import blob, pack
from ..format.blobs.pack import ENTRY
from ..format.keys import pack_key
from ..format.manifests.chunk_table import ChunkTable
from ..format.manifests.delta_chain import BlobKey, Place
from ..format.manifests.manifest import Manifest
from ..format.records import ManifestRef, Snapshot
from ..storage import progress
from ..text import log, strip_hint
from ..threads import Threads
from .base import Rewriting, StaleManifest, Work
from .stored_blobs import Duplicates, StoredBlobs, batches, digests_of, lengths_of, names_of, parse, stored_of


class BlobRewriting(Rewriting):
    """A rewriting that reads the footers of packs, and shares blobs between snapshots. Use as a context manager.

    Attributes:
        bytes_read: stored bytes read to move, share or recode blobs.
    """

    def __init__(self, context: Context, engine: Engine, *, states: Sequence[str], dry_run: bool) -> None:
        super().__init__(context, engine, states=states, dry_run=dry_run)
        self.bytes_read = 0
        self._readers = Threads(engine.readers)
        self._listings: dict[str, npt.NDArray[np.void]] = {}
        self._duplicates: Duplicates | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._readers.close()

    @abstractmethod
    def stale(self, m: Manifest, entries: npt.NDArray[np.void]) -> Column:
        """Return the indices of a manifest's references that have to change; none: the manifest stays."""

    @abstractmethod
    def stays(self, name: str, entries: npt.NDArray[np.void]) -> Column:
        """Return which blobs of a pack are not rewritten, and may be shared, (n,) bool."""

    def parts(self, ruling: Snapshot, view: View) -> list[StaleManifest]:
        """Read all manifests of a snapshot that hold chunks, and the footers of their packs."""
        return [self._part(ref) for ref in self.data_refs(ruling)]

    def _part(self, ref: ManifestRef) -> StaleManifest:
        m = self.sized_manifest(ref)
        entries = self._entries_of(m.table, m.header.pack_names, ref.key)
        return StaleManifest(ref, m, self.stale(m, entries), entries)

    def published(self, work: Work) -> None:
        """Let later snapshots share the new blobs."""
        super().published(work)
        if self._duplicates is not None:
            self._duplicates.newer.update({name: work.places[key] for name, key in work.named.items()})

    # -- footers

    def _entries_of(self, table: ChunkTable, packs: Sequence[str], where: str) -> npt.NDArray[np.void]:
        """Return the footer entry of every blob that a table refers to, (m,) ENTRY.

        Raises:
            IntegrityError, FormatError: a footer is damaged, or contradicts the table.
        """
        entries = np.zeros(len(table.ref_packs), ENTRY)
        for number, name in enumerate(packs):
            own = np.flatnonzero(table.ref_packs == number)
            if len(own):  # a root also names the packs of its children
                entries[own] = self.entries_at(name, table.ref_offsets[own])
        same = (entries["length"] == table.ref_lengths) & (
            entries["raw_bytes"] == np.repeat(table.lengths, table.ref_counts)
        )
        same &= entries["transform"] == table.ref_kinds
        same &= (digests_of(entries) == table.ref_digests).all(axis=1)
        if not same.all():
            name = packs[int(table.ref_packs[np.argmin(same)])]
            raise IntegrityError(f"{pack_key(name)}: its footer does not fit {where}; run 'snapstore check'")
        return entries

    def entries_at(self, name: str, offsets: Column) -> npt.NDArray[np.void]:
        """Return the footer entries of a pack's blobs at some offsets.

        Raises:
            IntegrityError, FormatError: the footer is damaged, or lacks one.
        """
        listing = self.listing(name)
        found = np.minimum(np.searchsorted(listing["offset"], offsets), len(listing) - 1)
        if len(found) and (found.min() < 0 or (listing["offset"][found] != offsets).any()):
            raise IntegrityError(f"{pack_key(name)}: its footer lacks a blob; run 'snapstore check --read-data'")
        return np.asarray(listing[found])

    def listing(self, name: str) -> npt.NDArray[np.void]:
        """Return all footer entries of a pack, by offset.

        Raises:
            IntegrityError, FormatError: the pack or its footer is damaged.
        """
        if name not in self._listings:
            try:
                read = partial(pack.read_listing, self.store, pack_key(name), self.sizes[name])
                entries = read_twice(self.store, read).entries
            except NotFoundError as error:
                raise IntegrityError(f"{strip_hint(error)}: a pack is missing; run 'snapstore check'") from error
            if not np.isin(entries["element_size"], (1, 2, 4, 8)).all():
                raise IntegrityError(f"{pack_key(name)}: a blob of no element size; run 'snapstore check'")
            self._listings[name] = entries[np.argsort(entries["offset"], kind="stable")]
        return self._listings[name]

    # -- share

    def add(self, work: Work, made: StoredBlobs, keys: Sequence[BlobKey], before: Sequence[int]) -> list[int]:
        """Pack new blobs; a blob that is stored already, byte for byte, is shared.

        Args:
            before: stored bytes of the blob that each replaces.

        Returns:
            The numbers of the blobs that were packed.
        """
        shared = self._shared(work, made)
        work.places.update({keys[i]: place for i, place in shared.items()})
        new = [i for i in range(len(keys)) if i not in shared]
        if new:
            rest = made if not shared else made.take(np.array(new))
            work.pack(rest, [keys[i] for i in new], [before[i] for i in new], self.engine)
        return new

    def _shared(self, work: Work, made: StoredBlobs) -> dict[int, Place]:
        """Return the places of the blobs that are stored already: by a rewrite that died, or by this one.

        The name of a blob only claims which chunk it decodes to, so the bytes are compared. Its pack must be `safe`.
        """
        if work.marked is None:
            return {}
        if self._duplicates is None:
            self._duplicates = Duplicates(self._stored_entries(work))
        found = self._duplicates.find(made.entries)
        safe = self.safe(work, {place.pack for place in found.values()})
        found = {i: place for i, place in found.items() if place.pack in safe}
        places = list(found.values())
        offsets, lengths = np.array([p.offset for p in places]), np.array([p.length for p in places])
        try:
            blobs = self.read([place.pack for place in places], offsets, lengths) if places else []
        except DAMAGE as error:
            log.warning("blobs that are stored already are written again: %s", error)
            return {}
        begin = made.entries["offset"].tolist()
        return {
            i: place
            for (i, place), data in zip(found.items(), blobs, strict=True)
            if data == made.blobs[begin[i] : begin[i] + place.length].data
        }

    def _stored_entries(self, work: Work) -> Iterator[tuple[str, npt.NDArray[np.void]]]:
        """Yield (pack, entries) of the blobs in committed snapshots' packs that stay as they are."""
        snapshots = work.view.snapshots()
        packs = {name for snapshot in snapshots for ref in snapshot.manifests for name in self.packs_of(ref)}
        for name in sorted(packs):
            with suppress(*DAMAGE):  # the rewrite of a snapshot that needs the pack reports it
                listing = self.listing(name)
                yield name, listing[self.stays(name, listing)]
            work.claim.heartbeat()

    # -- read, move

    def read(self, packs: Sequence[str], offsets: Column, lengths: Column) -> list[memoryview]:
        """Read the stored bytes of blobs.

        Raises:
            IntegrityError: a pack is missing, or two reads of it failed.
        """
        numbers = {name: number for number, name in enumerate(dict.fromkeys(packs))}
        names = list(numbers)
        offsets, lengths = offsets.astype(np.int64), lengths.astype(np.int64)
        reads, positions, size = pack.plan_reads(np.array([numbers[name] for name in packs]), offsets, lengths)
        stored = np.empty(size, np.uint8).data
        self.bytes_read += size
        progress.advance(size)

        def fill(some: Sequence[pack.RangeRead]) -> None:
            for one in some:
                room = stored[one.position : one.position + one.length]
                try:
                    self.store.get_range(pack_key(names[one.pack]), one.offset, one.length, room)
                except NotFoundError as error:
                    raise IntegrityError(f"{strip_hint(error)}: a pack is missing; run 'snapstore check'") from error

        def read(one: pack.RangeRead) -> None:
            read_around(fill, [one], (offsets, lengths, positions))

        read_twice(self.store, lambda: self._readers.start(read, reads)())
        return [stored[at : at + length] for at, length in zip(positions.tolist(), lengths.tolist(), strict=True)]

    def read_parsed(
        self, places: Sequence[Place], entries: npt.NDArray[np.void]
    ) -> Iterator[tuple[memoryview, blob.Header, str]]:
        """Yield every blob's stored bytes, its checked header, and its name for an error."""
        blobs = self.read([place.pack for place in places], entries["offset"], entries["length"])
        for name, place, data in zip(names_of(entries), places, blobs, strict=True):
            where = f"{pack_key(place.pack)} at {place.offset}"
            yield data, parse(data, name, where), where

    def move(self, work: Work, places: Sequence[Place], entries: npt.NDArray[np.void]) -> int:
        """Copy blobs into new packs as they are; their checksums are verified.

        Returns:
            The bytes written; blobs that are shared instead do not count.
        """
        written = 0
        for batch in batches(entries["length"], self.engine):
            own, rows = [places[i] for i in batch.tolist()], entries[batch]
            made = stored_of([data for data, _, _ in self.read_parsed(own, rows)])
            lengths = lengths_of(rows)
            written += sum(lengths[i] for i in self.add(work, made, own, lengths))
        return written
