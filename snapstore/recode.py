"""recode: rewrite what snapshots need into another codec, blob by blob; chains, dedup and digests stay as they are.

In: snapshots. Out: new packs, new manifests and the next revision of each record. Nothing is edited in place: a blob
that needs no change keeps its place, or moves as it is when most of its pack goes, and what nobody needs any more is
gc's to delete. One snapshot after the other, each under a session of its own (docs/design/protocol.md, "Recode"):

    begin     PUT sessions/<id>, which names the next revision; only then LIST marks, only then LIST records: what is
              there in the new codec, and no gc wants, is shared
    write     every blob once: read -> its source (the chunk, or chunk XOR base) -> encode -> decode again, compare ->
              label -> pack; then manifests; all durable before
    commit    create-only PUT of the next revision; who loses reads again and repeats
    end       DELETE sessions/<id>

A crash between any two steps leaves the snapshot as it was or recoded, and packs that nobody needs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import repeat

import msgspec
import numpy as np
import numpy.typing as npt

from . import blob, codecs, manifest, pack
from .blob import Column
from .digest import Bytes
from .engine import Chunks, DecodeBatch, EncodeBatch, Engine, Engines, default_threads
from .errors import ConflictError, FormatError, IntegrityError, NotFoundError
from .index import Index, View
from .manifest import Manifest
from .pack import ENTRY, Encoded, PackWriter
from .records import COMMITTED, FORGOTTEN, ManifestRef, Snapshot, human_bytes, pack_key, record_key
from .session import Claim
from .state.arrays import Memory
from .storage import ObjectStore
from .threads import Threads
from .writer import PACK_SLACK_BYTES, PUTS_IN_FLIGHT, put_once, puts_in_flight

log = logging.getLogger("snapstore")
#: What each choice of codec leaves as it is.
KEPT = {"portable": (codecs.RAW, codecs.ZSTD, codecs.DEFLATE), "ans": (codecs.RAW, codecs.ANS)}
#: How often a snapshot that others revise meanwhile is begun again.
ATTEMPTS = 20
#: A pack of which this share or more is to be rewritten is left altogether, so that gc can free it.
LEFT_ABOVE_SHARE = 0.5
_DAMAGE = (IntegrityError, FormatError, NotFoundError)
#: The bytes of a footer's entry that say which blob it is, wherever it lies: transform, element size, digest, base.
_NAME = np.array([16, 17, *range(32, 64)])


@dataclass(slots=True)
class RecodeResult:
    """What a recode did, or would do.

    Attributes:
        recoded: new revisions of the snapshots that needed it (of a dry run: as they are).
        skipped: those that needed nothing, or were forgotten or collected meanwhile.
        failed: (snapshot, why) of those that could not be recoded; they are as they were.
        blobs: blobs rewritten, each once; a few of them as they were, to free their pack.
        bytes_before, bytes_after: stored bytes of these blobs; of a dry run nothing is known of after, it is 0.
    """

    codec: str
    recoded: list[Snapshot] = field(default_factory=list)
    skipped: list[Snapshot] = field(default_factory=list)
    failed: list[tuple[Snapshot, str]] = field(default_factory=list)
    blobs: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    dry_run: bool = False


def recode(
    store: ObjectStore, index: Index, engines: Engines, snapshots: Sequence[Snapshot], *, codec: str, pack_bytes: int,
    states: tuple[str, ...] = (COMMITTED, FORGOTTEN), dry_run: bool = False,
) -> RecodeResult:  # fmt: skip
    """Rewrite snapshots; one that cannot be is reported, and the others go on.

    Args:
        codec: "portable" or "ans", see `SaveOptions`.
        states: a snapshot that is found in another one is left alone.

    Raises:
        CapabilityError: the GPU that a codec needs is not here; snapshots before it are recoded.
        StorageError: the store failed; likewise.
    """
    result = RecodeResult(codec, dry_run=dry_run)
    with _Recoding(store, index, engines, result, pack_bytes, states) as recoding:
        for snapshot in snapshots:
            try:
                recoding.recode(snapshot)
            except (*_DAMAGE, ConflictError) as error:
                log.warning("run=%s step=%d could not be recoded: %s", snapshot.run, snapshot.step, error)
                result.failed.append((snapshot, f"{snapshot.ref}: {error}"))
    return result


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a blob lies."""

    pack: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class _Listing:
    """The blobs of a pack, by offset."""

    entries: npt.NDArray[np.void]  # (n,) ENTRY
    goes: Column  # (n,) whether it is to lie elsewhere


@dataclass(frozen=True, slots=True)
class _Part:
    """A manifest, and which of its references are to be replaced: to blobs in another codec, or in packs to be left."""

    ref: ManifestRef
    manifest: Manifest
    stale: Column  # (k,) of the references
    entries: npt.NDArray[np.void]  # (k,) ENTRY of each
    names: list[bytes]  # (k,) and which blob it is
    moves: Column  # (k,) whether the blob may stay as it is

    @property
    def lengths(self) -> list[int]:
        """Stored bytes of the blobs, (k,)."""
        lengths: list[int] = self.entries["length"].tolist()
        return lengths


class _Recoding:
    """One run over some snapshots."""

    def __init__(
        self, store: ObjectStore, index: Index, engines: Engines, result: RecodeResult, pack_bytes: int,
        states: tuple[str, ...],
    ) -> None:  # fmt: skip
        self._store, self._index, self._result, self._pack_bytes = store, index, result, pack_bytes
        self._states, self._kept = states, KEPT[result.codec]
        self._engine: Engine = engines.cpu
        if result.codec == "ans" and not result.dry_run:
            self._engine = _cuda_engine(engines)
        self._close_engine = self._engine is not engines.cpu
        self._readers, self._threads = Threads(self._engine.readers), Threads(engines.threads or default_threads())
        self._listings: dict[str, _Listing] = {}
        self._sizes: dict[str, int] = {}  # of packs
        self._needs: dict[str, frozenset[str]] = {}  # manifest -> packs
        self._places: dict[bytes, _Place] = {}  # of blobs in the new codec that committed snapshots held
        self._looked = False  # whether those that were there before are among them
        self._sound: set[bytes] = set()  # those of them that were read, or made here
        self._made: dict[bytes, tuple[int, int]] = {}  # blob -> stored bytes before and after

    def __enter__(self) -> _Recoding:
        return self

    def __exit__(self, *exc: object) -> None:
        self._readers.close()
        self._threads.close()
        if self._close_engine:
            self._engine.close()

    # -- one snapshot

    def recode(self, snapshot: Snapshot) -> None:
        """Rewrite one snapshot, again if another process revises it meanwhile.

        Raises:
            IntegrityError, FormatError, NotFoundError: it is damaged, and as it was.
            ConflictError: others keep revising it.
        """
        made: set[bytes] = set()
        for _ in range(ATTEMPTS):
            ruling = self._index.refresh().get(snapshot.id)
            if ruling is None or ruling.state not in self._states:
                log.info("run=%s step=%d left alone: no longer there", snapshot.run, snapshot.step)
                self._result.skipped.append(ruling or snapshot)
                return
            try:
                parts = [self._part(ref) for ref in ruling.manifests]
                if not any(len(part.stale) for part in parts):
                    self._result.skipped.append(ruling)
                    return
                if self._result.dry_run:
                    self._count({n: (size, 0) for p in parts for n, size in zip(p.names, p.lengths, strict=True)})
                    self._result.recoded.append(ruling)
                    return
                self._result.recoded.append(self._rewrite(ruling, parts, made))
                return
            except ConflictError as error:
                log.info("run=%s step=%d is begun again: %s", snapshot.run, snapshot.step, error)
            except _DAMAGE:
                if self._rules(self._index.refresh(), ruling):
                    raise
        raise ConflictError("other processes keep revising it; try again")

    def _rules(self, view: View, snapshot: Snapshot) -> bool:
        ruling = view.get(snapshot.id)
        return ruling is not None and ruling.key == snapshot.key

    def _count(self, blobs: dict[bytes, tuple[int, int]]) -> None:
        """Note the stored bytes of blobs, before and after; each once, however often a lost race had it made."""
        for name, (before, after) in blobs.items():
            earlier = self._made.get(name)
            self._made[name] = before, after
            self._result.blobs += earlier is None
            self._result.bytes_before += before - (earlier[0] if earlier else 0)
            self._result.bytes_after += after - (earlier[1] if earlier else 0)

    def _part(self, ref: ManifestRef) -> _Part:
        """A manifest, and what packs' footers say of the blobs that it refers to."""
        m = manifest.read(self._store, ref)
        table, names = m.table, m.header.pack_names
        self._sizes.update(zip(names, m.header.pack_size_list, strict=True))
        entries, goes = np.zeros(len(table.ref_packs), ENTRY), np.zeros(len(table.ref_packs), bool)
        for number, name in enumerate(names):
            listing, own = self._listing(name), np.flatnonzero(table.ref_packs == number)
            offsets = table.ref_offsets[own]
            found = np.minimum(np.searchsorted(listing.entries["offset"], offsets), len(listing.entries) - 1)
            if len(own) and (found.min() < 0 or (listing.entries["offset"][found] != offsets).any()):
                raise IntegrityError(f"{pack_key(name)}: its footer lacks a blob; run 'snapstore check --read-data'")
            entries[own], goes[own] = listing.entries[found], listing.goes[found]
        same = (entries["length"] == table.ref_lengths) & (entries["raw_bytes"] == table.ref_sizes)
        same &= entries["transform"] == table.ref_kinds
        same &= (_digests(entries) == table.ref_digests).all(axis=1)
        if not same.all():
            name = names[int(table.ref_packs[np.argmin(same)])]
            raise IntegrityError(f"{pack_key(name)}: its footer does not fit {ref.key}; run 'snapstore check'")
        stale = np.flatnonzero(goes)
        entries = entries[stale]
        return _Part(ref, m, stale, entries, _names(entries), self._is_kept(entries))

    def _listing(self, name: str) -> _Listing:
        """What a pack's footer lists.

        Raises:
            IntegrityError, FormatError: the pack or its footer is damaged.
        """
        if name not in self._listings:
            try:
                entries = pack.read_listing(self._store, pack_key(name), self._sizes[name]).entries
            except NotFoundError as error:
                raise IntegrityError(f"{error}: a pack is missing; run 'snapstore check'") from error
            if not np.isin(entries["element_size"], (1, 2, 4, 8)).all():
                raise IntegrityError(f"{pack_key(name)}: a blob of no element size; run 'snapstore check'")
            entries = entries[np.argsort(entries["offset"], kind="stable")]
            goes, lengths = ~self._is_kept(entries), entries["length"].astype(np.int64)
            goes |= lengths[goes].sum() >= max(1, LEFT_ABOVE_SHARE * lengths.sum())
            self._listings[name] = _Listing(entries, goes)
        return self._listings[name]

    def _is_kept(self, entries: npt.NDArray[np.void]) -> Column:
        """Which blobs need no other codec, (n,)."""
        beyond = np.arange(8) >= entries["element_size"][:, None]
        kept: Column = np.isin(entries["codecs"], self._kept) | beyond
        return np.asarray(kept.all(axis=1))

    def _rewrite(self, ruling: Snapshot, parts: Sequence[_Part], made: set[bytes]) -> Snapshot:
        """New packs, new manifests and the next revision; `made` collects the blobs that were new by it.

        Raises:
            ConflictError: the revision is taken, or a gc has given this session up; nothing was changed.
        """
        started = time.monotonic()
        lengths = {name: length for part in parts for name, length in zip(part.names, part.lengths, strict=True)}
        with Claim(self._store, record_key(ruling.run, ruling.step, ruling.id, ruling.revision + 1)) as claim:
            marked = claim.marked()
            view = self._index.refresh()
            if not self._rules(view, ruling):
                raise ConflictError("another process has revised it")
            places = self._reusable(view, marked, lengths.keys())
            new, written = self._write(claim, parts, places)
            self._count({name: (lengths[name], place.length) for name, place in new.items()})
            made |= new.keys()
            refs = [ref for ref, _ in written]
            grown = sum(self._made[name][1] - self._made[name][0] for name in made)
            grown += sum(ref.size_bytes for ref in refs) - sum(ref.size_bytes for ref in ruling.manifests)
            revision = ruling.revised(manifests=refs, stored_bytes=max(0, ruling.stored_bytes + grown))
            claim.publish(revision, lambda _: ruling.revised())
        self._index.add(revision, {ref.sha256: manifest.header_bytes(data) for ref, data in written if data})
        places.update(new)
        self._places.update(places)
        self._sound |= new.keys()
        log.info(
            "run=%s step=%d recoded to %s: %d blobs, %s -> %s, total=%.2fs", ruling.run, ruling.step,
            self._result.codec, len(new), human_bytes(sum(lengths[name] for name in new)),
            human_bytes(sum(place.length for place in new.values())), time.monotonic() - started,
        )  # fmt: skip
        return revision

    def _write(
        self, claim: Claim, parts: Sequence[_Part], places: dict[bytes, _Place]
    ) -> tuple[dict[bytes, _Place], list[tuple[ManifestRef, bytes]]]:
        """Put the blobs that have no place yet, then the manifests; all durable on return.

        Returns:
            Where the new blobs lie, and of every part its manifest; no bytes where it is the old one.
        """
        packs = _Packs(self._store, claim, self._engine, self._pack_bytes)
        try:
            for part in parts:
                packs.begin(part.manifest.header.rank, part.manifest.header.part)
                for encoded, names in self._encode(claim, part, {*places, *packs.names}):
                    packs.add(encoded, names)
                packs.seal()
            packs.finish()
            self._sizes.update(packs.sizes)
            written = [self._remap(claim, part, places | packs.places) for part in parts]
            packs.put_all([(ref.key, data) for ref, data in written if data])
        finally:
            packs.close()
        return packs.places, written

    def _remap(self, claim: Claim, part: _Part, places: dict[bytes, _Place]) -> tuple[ManifestRef, bytes]:
        """A part's manifest with every stale reference sent to its blob's new place."""
        m, table = part.manifest, part.manifest.table
        if not len(part.stale):
            return part.ref, b""
        numbers = {name: number for number, name in enumerate(m.header.pack_names)}
        moved = [places[name] for name in part.names]
        columns = {name: getattr(table, name).copy() for name in ("ref_packs", "ref_offsets", "ref_lengths")}
        columns["ref_packs"][part.stale] = [numbers.setdefault(place.pack, len(numbers)) for place in moved]
        columns["ref_offsets"][part.stale] = [place.offset for place in moved]
        columns["ref_lengths"][part.stale] = [place.length for place in moved]
        used, columns["ref_packs"] = np.unique(columns["ref_packs"], return_inverse=True)
        names = list(numbers)
        packs = [names[number] for number in used.tolist()]
        data = manifest.encode(
            save_id=bytes.fromhex(claim.id), rank=m.header.rank, sequence=m.header.sequence, part=m.header.part,
            chunk_bytes=m.header.chunk_bytes, tree=m.tree, tensors=m.tensors, inline=m.inline,
            table=dataclasses.replace(table, **columns), packs=packs, pack_sizes=[self._sizes[name] for name in packs],
            logical_bytes=m.header.logical_bytes,
        )  # fmt: skip
        sha256 = hashlib.sha256(data).hexdigest()
        return msgspec.structs.replace(part.ref, sha256=sha256, size_bytes=len(data)), data

    # -- what is there already

    def _reusable(self, view: View, marked: set[str] | None, wanted: Iterable[bytes]) -> dict[bytes, _Place]:
        """Where blobs lie that are in the new codec already: made for another snapshot, or by a recode that died.

        Their packs are as safe as those of a save's bases: snapshots that were committed when this session had been
        announced and marks had been listed need them, and no mark names them.
        """
        if marked is None:
            return {}
        if not self._looked:
            self._places, self._looked = self._twins(view), True
        found = {name: self._places[name] for name in wanted if name in self._places}
        held = self._held(view, {place.pack for place in found.values()})
        found = {n: place for n, place in found.items() if place.pack in held and pack_key(place.pack) not in marked}
        unread = [name for name in found if name not in self._sound]
        for batch in _batches(np.array([found[name].length for name in unread]), self._engine):
            names = [unread[i] for i in batch.tolist()]
            self._sound.update(self._intact(names, [found[name] for name in names]))
        return {name: place for name, place in found.items() if name in self._sound}

    def _twins(self, view: View) -> dict[bytes, _Place]:
        """All blobs in the new codec that committed snapshots hold."""
        packs = {pack for snapshot in view.snapshots() for ref in snapshot.manifests for pack in self._packs_of(ref)}
        places: dict[bytes, _Place] = {}
        for name in sorted(packs):
            with suppress(*_DAMAGE):  # if it matters, the snapshot that needs it fails
                listing = self._listing(name)
                kept = listing.entries[~listing.goes]
                offsets, lengths = kept["offset"].tolist(), kept["length"].tolist()
                places.update(zip(_names(kept), map(_Place, repeat(name), offsets, lengths), strict=False))
        return places

    def _held(self, view: View, packs: set[str]) -> set[str]:
        """Those of some packs that committed snapshots need."""
        held: set[str] = set()
        for snapshot in view.snapshots():
            for ref in snapshot.manifests:
                if len(held) == len(packs):
                    return held
                held |= packs & self._packs_of(ref)
        return held

    def _packs_of(self, ref: ManifestRef) -> frozenset[str]:
        """What a manifest needs; nothing if it cannot be read."""
        if ref.sha256 not in self._needs:
            packs: dict[str, int] = {}
            with suppress(*_DAMAGE):
                header = self._index.header(ref)
                packs = dict(zip(header.pack_names, header.pack_size_list, strict=True))
            self._sizes.update(packs)
            self._needs[ref.sha256] = frozenset(packs)
        return self._needs[ref.sha256]

    def _intact(self, names: list[bytes], places: list[_Place]) -> Iterator[bytes]:
        """Those blobs whose stored bytes are what they should be."""
        keys = [place.pack for place in places]
        try:
            blobs = self._read(keys, np.array([p.offset for p in places]), np.array([p.length for p in places]))
        except _DAMAGE as error:
            log.warning("blobs that were recoded before are made anew: %s", error)
            return
        for name, place, data in zip(names, places, blobs, strict=True):
            try:
                _parse(data, name, f"{pack_key(place.pack)} at {place.offset}")
                yield name
            except _DAMAGE as error:
                log.warning("a blob that was recoded before is made anew: %s", error)

    # -- blobs

    def _read(self, packs: Sequence[str], offsets: Column, lengths: Column) -> list[memoryview]:
        """The stored bytes of blobs."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(packs))}
        names = list(numbers)
        offsets, lengths = offsets.astype(np.int64), lengths.astype(np.int64)
        reads, positions, size = pack.plan_reads(np.array([numbers[name] for name in packs]), offsets, lengths)
        stored = np.empty(size, np.uint8).data

        def read(one: pack.Read) -> None:
            room = stored[one.position : one.position + one.length]
            try:
                self._store.get_ranges(pack_key(names[one.pack]), [(one.offset, one.length)], [room])
            except NotFoundError as error:
                raise IntegrityError(f"{error}: a pack is missing; run 'snapstore check'") from error

        self._readers.start(read, reads)()
        return [stored[at : at + length] for at, length in zip(positions.tolist(), lengths.tolist(), strict=True)]

    def _encode(self, claim: Claim, part: _Part, have: set[bytes]) -> Iterator[tuple[Encoded, list[bytes]]]:
        """The blobs of a part that are not had yet, moved or in the new codec, by their old places, in batches."""
        first = {name: i for i, name in reversed(list(enumerate(part.names))) if name not in have}
        rows = np.array(sorted(first.values()), np.int64)
        rows = rows[np.lexsort((part.entries["offset"][rows], part.manifest.table.ref_packs[part.stale[rows]]))]
        moved, rows = rows[part.moves[rows]], rows[~part.moves[rows]]
        for batch in _batches(part.entries["length"][moved], self._engine):
            yield self._move(part, moved[batch])
            claim.heartbeat()
        coding: deque[_Coding] = deque()
        try:
            for batch in _batches(part.entries["raw_bytes"][rows], self._engine):
                coding.append(self._start(part, rows[batch]))
                claim.heartbeat()
                if len(coding) > self._engine.depth:
                    yield self._finish(coding)
            while coding:
                yield self._finish(coding)
        finally:
            for begun in coding:
                with suppress(Exception):
                    begun.wait()

    def _stored(self, part: _Part, rows: Column) -> tuple[list[bytes], list[memoryview], list[str]]:
        """A batch of blobs: which they are, their stored bytes, and how to name each in an error."""
        entries, packs = part.entries[rows], part.manifest.header.pack_names
        keys = [packs[number] for number in part.manifest.table.ref_packs[part.stale[rows]].tolist()]
        wheres = [f"{pack_key(key)} at {at}" for key, at in zip(keys, entries["offset"].tolist(), strict=True)]
        blobs = self._read(keys, entries["offset"], entries["length"])
        return [part.names[i] for i in rows.tolist()], blobs, wheres

    def _move(self, part: _Part, rows: Column) -> tuple[Encoded, list[bytes]]:
        """Blobs as they are."""
        names, blobs, wheres = self._stored(part, rows)
        entries = part.entries[rows]
        entries["offset"], stored = _laid_out(entries["length"])
        for name, data, where, offset in zip(names, blobs, wheres, entries["offset"].tolist(), strict=True):
            _parse(data, name, where)
            stored[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        return _Stored(entries, stored), names

    def _start(self, part: _Part, rows: Column) -> _Coding:
        """Read a batch of blobs, decode each to its source, begin to encode these."""
        names, blobs, wheres = self._stored(part, rows)
        entries = part.entries[rows]
        lengths = entries["raw_bytes"].astype(np.int64)
        rooms = lengths + -lengths % 256
        places = np.cumsum(rooms) - rooms
        plain = np.empty(int(rooms.sum()), np.uint8)

        def decode(i: int) -> int:
            header = _parse(blobs[i], names[i], wheres[i])
            out = plain[places[i] : places[i] + lengths[i]]
            if header.raw_bytes != out.size:
                raise IntegrityError(f"{wheres[i]}: a blob of {header.raw_bytes} bytes, expected {out.size}")
            blob.decode_source(blobs[i], header, out, wheres[i])
            return header.layout

        layouts = np.array(self._threads.start(decode, range(len(rows)))(), np.uint8)
        memory = _moved(self._engine, plain)
        sources = Chunks([memory], np.zeros(len(rows), np.int64), places, lengths)
        digests = self._engine.start_digests(sources)()
        wrong = (entries["transform"] == blob.FULL) & (digests != _digests(entries)).any(axis=1)
        if wrong.any():
            raise IntegrityError(f"{wheres[int(np.argmax(wrong))]}: digest mismatch; run 'snapstore check --restore'")
        none = Chunks([], np.full(len(rows), -1, np.int64), np.zeros(len(rows), np.int64), lengths)
        batch = EncodeBatch(
            sources, digests, entries["element_size"], layouts, none, np.zeros_like(digests), np.zeros_like(lengths)
        )
        return _Coding(names, batch, self._engine.start_encode(batch))

    def _finish(self, coding: deque[_Coding]) -> tuple[Encoded, list[bytes]]:
        """The blobs of the batch that was begun first, verified and labelled.

        Raises:
            IntegrityError: one does not decode to what was encoded.
        """
        begun = coding[0]
        made = begun.wait()
        coding.popleft()
        entries = np.zeros(len(begun.names), ENTRY)
        entries[:] = np.concatenate([e.entries for e in made])
        offsets, stored = _laid_out(entries["length"])
        entries["offset"], ends, first = offsets, [*offsets[1:].tolist(), stored.size], 0
        for encoded in made:
            last = first + len(encoded.entries)
            encoded.copy(0, last - first, stored[offsets[first] : ends[last - 1]])()
            first = last
        self._engine.recycle(made)
        batch = begun.batch
        again = self._engine.empty(int(batch.chunks.starts[-1] + batch.chunks.lengths[-1]))
        outs = Chunks([again], batch.chunks.which, batch.chunks.starts, batch.chunks.lengths)
        ones = np.ones(len(entries), np.int64)
        decode = DecodeBatch(stored, offsets, entries["length"].astype(np.int64), ones, batch.digests, outs, _new_blob)
        try:
            self._engine.start_decode(decode)()
        except _DAMAGE as error:
            raise IntegrityError(
                f"what was encoded does not decode to what it was made of ({error}); nothing was changed; try again, "
                "and test the memory of this machine and its GPU"
            ) from error
        _bytes_of(entries)[:, _NAME] = np.frombuffer(b"".join(begun.names), np.uint8).reshape(-1, len(_NAME))
        for name, offset, length in zip(begun.names, offsets.tolist(), entries["length"].tolist(), strict=True):
            blob.relabel(stored[offset : offset + length].data, name[0], name[2:18], name[18:])
        return _Stored(entries, stored), begun.names


@dataclass(frozen=True, slots=True)
class _Coding:
    """A batch whose blobs are being encoded: as if each source were a full chunk, until they are labelled."""

    names: list[bytes]
    batch: EncodeBatch
    wait: Callable[[], Sequence[Encoded]]


@dataclass(frozen=True, slots=True)
class _Stored:
    """Blobs in host memory, one after the other; see `pack.Encoded`."""

    entries: npt.NDArray[np.void]
    blobs: Bytes

    def copy(self, first: int, last: int, out: Bytes) -> Callable[[], object]:
        """Copy blobs, with their padding, into `out`, at once."""
        begin = int(self.entries["offset"][first])
        out[:] = self.blobs[begin : begin + out.size]
        return lambda: None


class _Packs:
    """The new packs of one session: hashed and put in the background while the next one fills.

    Attributes:
        names: blobs that are in a pack, durable or not yet.
        places: where they lie, once it is.
        sizes: of the packs.
    """

    def __init__(self, store: ObjectStore, claim: Claim, engine: Engine, pack_bytes: int) -> None:
        self._store, self._claim, self._engine, self._pack_bytes = store, claim, engine, pack_bytes
        self.names: set[bytes] = set()
        self.places: dict[bytes, _Place] = {}
        self.sizes: dict[str, int] = {}
        self._rank, self._part, self._sequence = 0, "", 0
        self._writer: PackWriter | None = None
        self._held: list[tuple[bytes, int, int]] = []  # blob, offset and length in the pack that fills
        self._putters = Threads(puts_in_flight(pack_bytes, PUTS_IN_FLIGHT))
        self._free: list[Bytes] = []
        self._puts: deque[tuple[list[tuple[bytes, int, int]], Callable[[], list[tuple[str, int]]]]] = deque()

    def begin(self, rank: int, part: str) -> None:
        """Packs never mix parts."""
        self._rank, self._part = rank, part

    def add(self, encoded: Encoded, names: Sequence[bytes]) -> None:
        """Put blobs into packs."""
        for i, name in enumerate(names):
            writer = self._writer or self._open()
            (offset,) = writer.extend(encoded, i, i + 1).tolist()
            self._held.append((name, offset, int(encoded.entries["length"][i])))
            if writer.size_bytes >= self._pack_bytes:
                self.seal()
        self.names.update(names)

    def _open(self) -> PackWriter:
        buffer = self._free.pop() if self._free else self._engine.buffer(self._pack_bytes + PACK_SLACK_BYTES)
        self._writer = PackWriter(bytes.fromhex(self._claim.id), self._rank, self._sequence, self._part, buffer)
        self._sequence += 1
        return self._writer

    def seal(self) -> None:
        """Begin to put the pack that fills, as many at a time as there are threads for it."""
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        held, self._held = self._held, []
        while len(self._puts) >= self._putters.count:
            self._await_put()
        self._puts.append((held, self._putters.start(self._put, [writer])))

    def _put(self, writer: PackWriter) -> tuple[str, int]:
        data = writer.seal()
        name = hashlib.sha256(data).hexdigest()
        put_once(self._store, pack_key(name), data)
        if not writer.grown:
            self._free.append(writer.buffer)
        return name, len(data)

    def _await_put(self) -> None:
        held, wait = self._puts.popleft()
        ((pack_name, size),) = wait()
        self.sizes[pack_name] = size
        self.places.update({name: _Place(pack_name, offset, length) for name, offset, length in held})
        self._claim.heartbeat()

    def finish(self) -> None:
        """Every pack is durable."""
        while self._puts:
            self._await_put()

    def put_all(self, objects: Sequence[tuple[str, bytes]]) -> None:
        """Put manifests; durable on return."""
        self._putters.start(lambda item: put_once(self._store, *item), objects)()
        self._claim.heartbeat()

    def close(self) -> None:
        """End the threads."""
        self._putters.close()
        for buffer in self._free:
            self._engine.give_back(buffer)


def _bytes_of(entries: npt.NDArray[np.void]) -> Bytes:
    """Entries as they are stored, (n, 96); a view."""
    return entries.view(np.uint8).reshape(-1, ENTRY.itemsize)


def _digests(entries: npt.NDArray[np.void]) -> Bytes:
    """Digests of the chunks, (n, 16)."""
    return _bytes_of(np.ascontiguousarray(entries))[:, 32:48]


def _names(entries: npt.NDArray[np.void]) -> list[bytes]:
    """Which blob each entry is, wherever it lies."""
    joined = _bytes_of(np.ascontiguousarray(entries))[:, _NAME].tobytes()
    return [joined[i : i + len(_NAME)] for i in range(0, len(joined), len(_NAME))]


def _parse(data: memoryview, name: bytes, where: str) -> blob.Header:
    """The header of a blob that is the one wanted.

    Raises:
        FormatError, IntegrityError: it is damaged, or another one.
    """
    header = blob.parse(data, where)
    if bytes([header.transform, header.element_size]) + header.digest + header.base != name:
        raise IntegrityError(f"{where}: not the blob that the pack's footer says; run 'snapstore check --read-data'")
    return header


def _laid_out(lengths: Column) -> tuple[npt.NDArray[np.int64], Bytes]:
    """(offsets, zeroed memory) of blobs, one after the other."""
    rooms = (lengths.astype(np.int64) + blob.ALIGNMENT - 1) // blob.ALIGNMENT * blob.ALIGNMENT
    return np.cumsum(rooms) - rooms, np.zeros(int(rooms.sum()), np.uint8)


def _batches(sizes: Column, engine: Engine) -> Iterator[Column]:
    """Runs of indices whose sizes [bytes] an engine takes at a time."""
    ends = np.cumsum(sizes, dtype=np.int64)
    first = 0
    while first < len(ends):
        before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, before + engine.batch_bytes, "right"))
        last = min(max(last, first + 1), first + engine.batch_chunks)
        yield np.arange(first, last)
        first = last


def _new_blob(number: int) -> str:
    return f"new blob {number}"


def _cuda_engine(engines: Engines) -> Engine:
    """An engine that codes in ANS, on the current CUDA device.

    Raises:
        CapabilityError: there is none, or it lacks a library; the message says what to install.
    """
    from .cuda import engine_for, require

    require()
    import torch

    return engine_for(torch.cuda.current_device(), "ans", engines.cpu)


def _moved(engine: Engine, plain: Bytes) -> Memory:
    """Bytes of the host where an engine works."""
    memory = engine.empty(plain.size)
    if isinstance(memory, np.ndarray):
        return plain
    import torch

    memory.copy_(torch.from_numpy(plain))
    torch.cuda.current_stream(memory.device).synchronize()
    return memory
