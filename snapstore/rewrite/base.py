"""Rewrite: give snapshots manifests that refer to other blobs, published as the next revision of each record.

In: snapshots, and a subclass of `Rewriting` that says which references go and makes what takes their place (recode.py,
compact.py). Out: new packs, new manifests, new revisions. Nothing is edited in place; what nobody needs any more is
gc's to delete. One snapshot after the other, each under a session of its own (docs/design/protocol.md, "Rewriting"):

    begin     PUT sessions/<id>, which names the next revision; only then LIST marks, only then LIST records: what is
              there already, byte for byte, and no gc wants, is shared
    write     new blobs, each verified before it is packed; then manifests; all durable before
    commit    LIST notes of quarantine: what lies in a damaged pack stays there, for repair; create-only PUT of the next
              revision; who loses, or finds a new note, reads again and repeats
    end       DELETE sessions/<id>

A crash between any two steps leaves the snapshot as it was or rewritten, and packs that nobody needs.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from ..arrays import Column
from ..catalog.history import View
from ..catalog.read_twice import read_twice
from ..chunks.uploader import Packs
from ..context import Context
from ..engine.base import Engine
from ..errors import DAMAGE, ConflictError, FormatError, IntegrityError, NotFoundError
from ..format import blob, manifest, pack, records
from ..format.delta_chain import Key, Place
from ..format.keys import pack_key, quarantined_names, record_key
from ..format.manifest import ChunkTable, Manifest
from ..format.pack import ENTRY
from ..format.records import ManifestRef, Snapshot
from ..protocol.claim import Claim
from ..protocol.revisions import retry_conflicts
from ..text import without_advice
from ..threads import Threads
from .stored_blobs import Stored, Twins, batches, digests_of, laid_out, lengths_of, names_of, parse

log = logging.getLogger("snapstore")


@dataclass(frozen=True, slots=True)
class Part:
    """A manifest, and what packs' footers say of the blobs that it refers to."""

    ref: ManifestRef
    manifest: Manifest
    entries: npt.NDArray[np.void]  # (m,) ENTRY of each reference
    stale: Column  # (k,) of the references: those whose blobs do not stay as they are and where they are


@dataclass(frozen=True, slots=True)
class Target:
    """What a part's chunk table is to become."""

    table: ChunkTable
    packs: Sequence[str]  # that `table.ref_packs` counts
    stale: Column  # (k,) references whose place is still to be filled in
    keys: Sequence[Key]  # (k,) which blob it is


@dataclass(slots=True)
class Work:
    """One snapshot under its session.

    Attributes:
        ruling: the snapshot as it is.
        view, marked: records and gc's candidates, both listed behind the session; None: candidates cannot be told.
        places: of blobs that were there already.
        new: blobs that this session has made: (number of its pack, offset, length).
        before: stored bytes of what each of them replaces.
        there: whether a pack was there when it was first looked for: behind the marks, so it stays while we write.
        named: the same blobs by their names.
    """

    claim: Claim
    ruling: Snapshot
    packs: Packs
    view: View
    marked: set[str] | None
    places: dict[Key, Place] = field(default_factory=dict)
    new: dict[Key, tuple[int, int, int]] = field(default_factory=dict)
    before: dict[Key, int] = field(default_factory=dict)
    there: dict[str, bool] = field(default_factory=dict)
    named: dict[bytes, Key] = field(default_factory=dict)

    def has(self, key: Key) -> bool:
        """Whether a blob has its place."""
        return key in self.places or key in self.new

    def pack(self, made: Stored, keys: Sequence[Key], before: Sequence[int], engine: Engine) -> None:
        """Pack new blobs."""
        numbers, offsets = self.packs.add(made, engine)
        lengths = lengths_of(made.entries)
        self.new.update(zip(keys, zip(numbers.tolist(), offsets.tolist(), lengths, strict=True), strict=True))
        self.before.update(zip(keys, before, strict=True))
        self.named.update(zip(names_of(made.entries), keys, strict=True))
        self.claim.heartbeat()

    def made(self) -> dict[Key, Place]:
        """Where the new blobs lie; their packs are durable."""
        return {key: Place(self.packs.names[n], offset, length) for key, (n, offset, length) in self.new.items()}


class Rewriting(ABC):
    """One run over some snapshots. Use as a context manager.

    Attributes:
        rewritten: new revisions of the snapshots that needed it (of a dry run: as they are).
        skipped: those that needed nothing, or were forgotten or collected meanwhile.
        failed: (snapshot, why) of those that could not be rewritten; they are as they were.
        made: blobs made or moved, each once: stored bytes before and after (of a dry run: not known, 0).
        quarantined: keys of the packs that are known to be damaged. Nothing is moved out of them: whether a blob gives
            its chunk only rebuilding tells, and in a fresh pack nobody would suspect it.
    """

    verb = "rewrite"

    def __init__(self, context: Context, engine: Engine, *, states: Sequence[str], dry_run: bool) -> None:
        self.context, self.store, self.index, self.engine = context, context.store, context.index, engine
        self._pack_bytes, self._states, self.dry_run = context.options.pack_bytes, states, dry_run
        self.quarantined = self._notes()
        self.rewritten: list[Snapshot] = []
        self.skipped: list[Snapshot] = []
        self.failed: list[tuple[Snapshot, str]] = []
        self.made: dict[Key, tuple[int, int]] = {}
        self.bytes_read = 0
        self.sizes: dict[str, int] = {}  # of packs
        self._readers = Threads(engine.readers)
        self._listings: dict[str, npt.NDArray[np.void]] = {}
        self._needs: dict[str, frozenset[str]] = {}  # manifest -> packs
        self._places: dict[Key, Place] = {}  # of blobs that this run has made or shared
        self._twins: Twins | None = None

    def __enter__(self) -> Rewriting:
        return self

    def __exit__(self, *exc: object) -> None:
        self._readers.close()

    # -- what a subclass decides

    @abstractmethod
    def stale(self, m: Manifest, entries: npt.NDArray[np.void]) -> Column:
        """Which references of a manifest have to change, as indices; none: the manifest stays."""

    @abstractmethod
    def stays(self, name: str, entries: npt.NDArray[np.void]) -> Column:
        """Which blobs (n,) of a pack are as they shall be, and may be shared by whoever needs them."""

    @abstractmethod
    def write(self, work: Work, part: Part) -> Target | None:
        """Make what a part lacks, by `add`, and say what its table becomes; None: it stays after all.

        Raises:
            IntegrityError, FormatError, NotFoundError: it is damaged.
        """

    def published(self, work: Work) -> None:
        """The snapshot refers to what `work` has made: others may build on it."""
        made = work.made()
        self._places.update(work.places | made)
        if self._twins is not None:
            self._twins.newer.update({name: made[key] for name, key in work.named.items()})

    # -- one snapshot

    def run(self, snapshots: Iterable[Snapshot]) -> None:
        """Rewrite snapshots; one that cannot be is noted, and the others go on."""
        for snapshot in snapshots:
            try:
                self._rewrite_one(snapshot)
            except (*DAMAGE, ConflictError) as error:
                log.info("run=%s step=%d: %s failed: %s", snapshot.run, snapshot.step, self.verb, error)
                self.failed.append((snapshot, f"{snapshot.ref}: {error}"))

    def _rewrite_one(self, snapshot: Snapshot) -> None:
        """Rewrite one snapshot, again if another process revises it meanwhile.

        Raises:
            IntegrityError, FormatError, NotFoundError: it is damaged, and as it was.
            ConflictError: others keep revising it.
        """
        retry_conflicts(
            lambda: self._attempt(snapshot), lambda _: ConflictError("other processes keep revising it; try again")
        )

    def _attempt(self, snapshot: Snapshot) -> None:
        """Rewrite one snapshot as it is now.

        Raises:
            ConflictError: another process has revised it meanwhile.
        """
        ruling = self.index.refresh().get(snapshot.id)
        if ruling is None or ruling.state not in self._states:
            log.info("run=%s step=%d left alone: no longer there", snapshot.run, snapshot.step)
            self.skipped.append(ruling or snapshot)
            return
        try:
            parts = [self._part(ref) for ref in ruling.manifests]
            if not any(len(part.stale) for part in parts):
                self.skipped.append(ruling)
                return
            if self.dry_run:
                for part in parts:
                    self.made.update({place: (place.length, 0) for place in places_of(part)})
                self.rewritten.append(ruling)
                return
            revision = self._rewrite(ruling, parts)
            (self.skipped if revision is ruling else self.rewritten).append(revision)
        except ConflictError as error:
            log.info("run=%s step=%d begins again: %s", snapshot.run, snapshot.step, error)
            raise
        except DAMAGE as error:
            if _says_the_same(self.index.refresh().get(ruling.id), ruling):
                raise
            raise ConflictError(str(error)) from error

    def manifest_of(self, ref: ManifestRef) -> Manifest:
        """A whole manifest of this repository.

        Raises:
            IntegrityError, FormatError: it is damaged, cannot be read twice, or is another repository's.
        """
        return read_twice(self.store, lambda: manifest.read(self.store, ref, self.engine.digest_seed))

    def _part(self, ref: ManifestRef) -> Part:
        m = self.manifest_of(ref)
        names = m.header.pack_names
        if len(set(names)) < len(names):  # what counts packs by their names would count them wrongly
            raise FormatError(f"{ref.key}: names a pack twice; no snapstore writes that")
        self.sizes.update(zip(names, m.header.pack_size_list, strict=True))
        entries = self.entries_of(m.table, names, ref.key)
        return Part(ref, m, entries, self.stale(m, entries))

    def entries_of(self, table: ChunkTable, packs: Sequence[str], where: str) -> npt.NDArray[np.void]:
        """What packs' footers say of every blob that a table refers to, (m,) ENTRY.

        Raises:
            IntegrityError, FormatError: a footer is damaged, or says something else than the table.
        """
        entries = np.zeros(len(table.ref_packs), ENTRY)
        for number, name in enumerate(packs):
            own = np.flatnonzero(table.ref_packs == number)
            entries[own] = self.entries_at(name, table.ref_offsets[own])
        same = (entries["length"] == table.ref_lengths) & (entries["raw_bytes"] == table.ref_sizes)
        same &= entries["transform"] == table.ref_kinds
        same &= (digests_of(entries) == table.ref_digests).all(axis=1)
        if not same.all():
            name = packs[int(table.ref_packs[np.argmin(same)])]
            raise IntegrityError(f"{pack_key(name)}: its footer does not fit {where}; run 'snapstore check'")
        return entries

    def entries_at(self, name: str, offsets: Column) -> npt.NDArray[np.void]:
        """What a pack's footer says of its blobs at some offsets."""
        listing = self.listing(name)
        found = np.minimum(np.searchsorted(listing["offset"], offsets), len(listing) - 1)
        if len(found) and (found.min() < 0 or (listing["offset"][found] != offsets).any()):
            raise IntegrityError(f"{pack_key(name)}: its footer lacks a blob; run 'snapstore check --read-data'")
        return np.asarray(listing[found])

    def listing(self, name: str) -> npt.NDArray[np.void]:
        """What a pack's footer lists, by offset.

        Raises:
            IntegrityError, FormatError: the pack or its footer is damaged.
        """
        if name not in self._listings:
            try:
                read = partial(pack.read_listing, self.store, pack_key(name), self.sizes[name])
                entries = read_twice(self.store, read).entries
            except NotFoundError as error:
                raise IntegrityError(f"{without_advice(error)}: a pack is missing; run 'snapstore check'") from error
            if not np.isin(entries["element_size"], (1, 2, 4, 8)).all():
                raise IntegrityError(f"{pack_key(name)}: a blob of no element size; run 'snapstore check'")
            self._listings[name] = entries[np.argsort(entries["offset"], kind="stable")]
        return self._listings[name]

    def _rewrite(self, ruling: Snapshot, parts: Sequence[Part]) -> Snapshot:
        """New packs, new manifests and the next revision, or `ruling` if nothing changes after all.

        Raises:
            ConflictError: the revision is taken, or a gc has given this session up; nothing was changed.
        """
        started = time.monotonic()
        key = record_key(ruling.run, ruling.step, ruling.id, ruling.revision + 1)
        with Claim(self.context, key, self.verb, lambda _: ruling.revised()) as claim:
            marked = claim.marked()
            self._heed(claim.quarantined)
            view = self.index.refresh()
            if not _rules(view, ruling):
                raise ConflictError("another process has revised it")
            packs = Packs(claim, self._pack_bytes, max(p.manifest.header.chunk_bytes for p in parts))
            work = Work(claim, ruling, packs, view, marked)
            try:
                written = self._write_all(work, parts)
            finally:
                packs.close()
                for buffer in packs.idle:
                    self.engine.give_back(buffer)
            if not any(data for _, data in written):
                return ruling
            refs = [ref for ref, _ in written]
            made = {key: (work.before[key], length) for key, (_, _, length) in work.new.items()}
            grown = sum(after - before for before, after in made.values())
            grown += sum(ref.size_bytes for ref in refs) - sum(ref.size_bytes for ref in ruling.manifests)
            stored_bytes = max(0, ruling.stored_bytes + grown)
            headers = {ref.sha256: manifest.header_bytes(data) for ref, data in written if data}
            depth = max(
                manifest.decode_header(headers[ref.sha256], ref.key).depth if data else part.manifest.header.depth
                for part, (ref, data) in zip(parts, written, strict=True)
            )
            revision = ruling.revised(manifests=refs, stored_bytes=stored_bytes, depth=depth)
            sizes = {ref.key: len(data) for ref, data in written if data}
            claim.confirm(sizes | dict(zip(map(pack_key, packs.names), packs.sizes, strict=True)))
            self._heed(self._notes())
            claim.publish(revision)
        self.index.add(revision, headers)
        self.made.update(made)
        self.published(work)
        log.info(
            "run=%s step=%d %s: %d blobs rewritten, total=%.2fs", ruling.run, ruling.step, self.verb, len(work.new),
            time.monotonic() - started,
        )  # fmt: skip
        return revision

    def _notes(self) -> set[str]:
        return quarantined_names(info.key for info in self.store.list("gc/"))

    def _heed(self, noted: set[str]) -> None:
        """Raise ConflictError if a repair has found damaged packs since it was decided what is stale."""
        if not noted <= self.quarantined:
            self.quarantined |= noted
            raise ConflictError("a repair has found damaged packs")

    def in_quarantine(self, m: Manifest) -> Column:
        """Which references of a manifest point into packs that are known to be damaged, (k,) bool."""
        damaged = np.array([pack_key(name) in self.quarantined for name in m.header.pack_names] or [False])
        return np.asarray(damaged[m.table.ref_packs])

    def _write_all(self, work: Work, parts: Sequence[Part]) -> list[tuple[ManifestRef, bytes]]:
        """Put what has no place yet, then the manifests, all durable on return: of every part its manifest.

        The bytes are empty where it is the old one.
        """
        targets: list[Target | None] = []
        for part in parts:
            work.packs.begin(part.manifest.header.rank, part.manifest.header.part)
            targets.append(self.write(work, part) if len(part.stale) else None)
        work.packs.seal()
        work.packs.finish()
        self.sizes.update(zip(work.packs.names, work.packs.sizes, strict=True))
        places = work.places | work.made()
        written = [
            (part.ref, b"") if target is None else self._remap(work.claim, part, target, places)
            for part, target in zip(parts, targets, strict=True)
        ]
        for durable in [work.packs.start_put(ref.key, data) for ref, data in written if data]:
            durable()
        work.claim.heartbeat()
        return written

    def _remap(self, claim: Claim, part: Part, target: Target, places: dict[Key, Place]) -> tuple[ManifestRef, bytes]:
        """A part's manifest over its new table, every stale reference sent to its blob's place."""
        header, table = part.manifest.header, target.table
        numbers = {name: number for number, name in enumerate(target.packs)}
        columns = {name: getattr(table, name).copy() for name in ("ref_packs", "ref_offsets", "ref_lengths")}
        moved = [places[key] for key in target.keys]
        columns["ref_packs"][target.stale] = [numbers.setdefault(place.pack, len(numbers)) for place in moved]
        columns["ref_offsets"][target.stale] = [place.offset for place in moved]
        columns["ref_lengths"][target.stale] = [place.length for place in moved]
        used, columns["ref_packs"] = np.unique(columns["ref_packs"], return_inverse=True)
        names = list(numbers)
        packs = [names[number] for number in used.tolist()]
        m = part.manifest
        data = manifest.encode(
            save_id=bytes.fromhex(claim.id), rank=header.rank, sequence=header.sequence, part=header.part,
            chunk_bytes=header.chunk_bytes, digest_seed=header.digest_seed, tree=m.tree, tensors=m.tensors,
            inline=m.inline, table=replace(table, **columns), packs=packs,
            pack_sizes=[self.sizes[name] for name in packs], logical_bytes=header.logical_bytes,
            made_for=claim.made_for,
        )  # fmt: skip
        again, was = manifest.decode(data, part.ref.key), part.manifest
        if _said(again) != _said(was) or not np.array_equal(again.table.digests, was.table.digests):
            raise IntegrityError(f"{part.ref.key}: its new manifest says something else; test this machine's memory")
        return manifest.ref_of(data), data

    # -- what is there already

    def reuse(self, work: Work, keys: Iterable[Key]) -> None:
        """Give blobs the places where this run has put them already, for another snapshot, as far as that is safe."""
        found = {key: self._places[key] for key in keys if key in self._places}
        safe = self.safe(work, {place.pack for place in found.values()})
        work.places.update({key: place for key, place in found.items() if place.pack in safe})

    def add(self, work: Work, made: Stored, keys: Sequence[Key], before: Sequence[int]) -> list[int]:
        """Pack new blobs, but for those that lie somewhere already, byte for byte: these are shared.

        Args:
            before: stored bytes of what each replaces.

        Returns:
            Which of them were packed.
        """
        shared = self._shared(work, made)
        work.places.update({keys[i]: place for i, place in shared.items()})
        new = [i for i in range(len(keys)) if i not in shared]
        if new:
            rest = made if not shared else made.take(np.array(new))
            work.pack(rest, [keys[i] for i in new], [before[i] for i in new], self.engine)
        return new

    def _shared(self, work: Work, made: Stored) -> dict[int, Place]:
        """Which blobs a run that died has put somewhere, or this one for another snapshot; and where.

        A name is not enough: it says what a blob should decode to, and only its bytes, what it does. Its pack is as
        safe as those of a save's bases (`safe`).
        """
        if work.marked is None:
            return {}
        if self._twins is None:
            self._twins = Twins(self._listed(work))
        found = self._twins.find(made.entries)
        safe = self.safe(work, {place.pack for place in found.values()})
        found = {i: place for i, place in found.items() if place.pack in safe}
        places = list(found.values())
        offsets, lengths = np.array([p.offset for p in places]), np.array([p.length for p in places])
        try:
            blobs = self.read([place.pack for place in places], offsets, lengths) if places else []
        except DAMAGE as error:
            log.warning("blobs that were made before are made anew: %s", error)
            return {}
        begin = made.entries["offset"].tolist()
        return {
            i: place
            for (i, place), data in zip(found.items(), blobs, strict=True)
            if data == made.blobs[begin[i] : begin[i] + place.length].data
        }

    def _listed(self, work: Work) -> Iterator[tuple[str, npt.NDArray[np.void]]]:
        """(pack, entries) of all blobs that committed snapshots' packs hold and that are as they shall be."""
        snapshots = work.view.snapshots()
        packs = {name for snapshot in snapshots for ref in snapshot.manifests for name in self._packs_of(ref)}
        for name in sorted(packs):
            with suppress(*DAMAGE):  # if it matters, the snapshot that needs it fails
                listing = self.listing(name)
                yield name, listing[self.stays(name, listing)]
            work.claim.heartbeat()

    def safe(self, work: Work, packs: set[str]) -> set[str]:
        """Those of some packs that committed snapshots need, and neither a mark nor a quarantine names: they stay.

        And are there now, behind the marks: a listing that lacks a record would take one for needed that is gone.
        """
        held: set[str] = set()
        if work.marked is None:
            return held
        packs = {name for name in packs if pack_key(name) not in work.marked | work.claim.quarantined}
        if unseen := packs - work.there.keys():
            found = self.store.sizes([pack_key(name) for name in unseen])
            work.there.update({name: pack_key(name) in found for name in unseen})
        packs = {name for name in packs if work.there[name]}
        for snapshot in work.view.snapshots():
            for ref in snapshot.manifests:
                if len(held) == len(packs):
                    return held
                held |= packs & self._packs_of(ref)
        return held

    def _packs_of(self, ref: ManifestRef) -> frozenset[str]:
        """What a manifest needs; nothing if it cannot be read."""
        if ref.sha256 not in self._needs:
            packs: dict[str, int] = {}
            with suppress(*DAMAGE):
                header = read_twice(self.store, lambda: self.index.header(ref))
                packs = dict(zip(header.pack_names, header.pack_size_list, strict=True))
            self.sizes.update(packs)
            self._needs[ref.sha256] = frozenset(packs)
        return self._needs[ref.sha256]

    # -- blobs

    def read(self, packs: Sequence[str], offsets: Column, lengths: Column) -> list[memoryview]:
        """The stored bytes of blobs."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(packs))}
        names = list(numbers)
        offsets, lengths = offsets.astype(np.int64), lengths.astype(np.int64)
        reads, positions, size = pack.plan_reads(np.array([numbers[name] for name in packs]), offsets, lengths)
        stored = np.empty(size, np.uint8).data
        self.bytes_read += size

        def read(one: pack.Read) -> None:
            room = stored[one.position : one.position + one.length]
            try:
                self.store.get_ranges(pack_key(names[one.pack]), [(one.offset, one.length)], [room])
            except NotFoundError as error:
                raise IntegrityError(f"{without_advice(error)}: a pack is missing; run 'snapstore check'") from error

        read_twice(self.store, lambda: self._readers.start(read, reads)())
        return [stored[at : at + length] for at, length in zip(positions.tolist(), lengths.tolist(), strict=True)]

    def read_parsed(
        self, places: Sequence[Place], entries: npt.NDArray[np.void]
    ) -> Iterator[tuple[memoryview, blob.Header, str]]:
        """Of every blob its stored bytes, its checked header, and how to name it in an error."""
        blobs = self.read([place.pack for place in places], entries["offset"], entries["length"])
        for name, place, data in zip(names_of(entries), places, blobs, strict=True):
            where = f"{pack_key(place.pack)} at {place.offset}"
            yield data, parse(data, name, where), where

    def move(self, work: Work, places: Sequence[Place], entries: npt.NDArray[np.void]) -> int:
        """Copy blobs into new packs as they are; their checksums are verified.

        Returns:
            Bytes written: what is shared instead is not.
        """
        written = 0
        for batch in batches(entries["length"], self.engine):
            own, rows = [places[i] for i in batch.tolist()], entries[batch]
            laid, stored = laid_out(rows["length"])
            for (data, _, _), offset in zip(self.read_parsed(own, rows), laid.tolist(), strict=True):
                stored[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
            moved = np.zeros(len(rows), ENTRY)
            moved[:] = rows
            moved["offset"] = laid
            lengths = lengths_of(rows)
            written += sum(lengths[i] for i in self.add(work, Stored(moved, stored), own, lengths))
        return written


def _said(m: Manifest) -> bytes:
    """What a manifest says beside its chunks, packed: a NaN equals no other one."""
    return msgspec.msgpack.encode((m.tree, m.tensors, m.inline))


def places_of(part: Part) -> list[Place]:
    """Where the stale references of a part go to."""
    table, names = part.manifest.table, part.manifest.header.pack_names
    columns = (table.ref_packs, table.ref_offsets, table.ref_lengths)
    packs, offsets, lengths = (column[part.stale].tolist() for column in columns)
    return [Place(names[n], offset, length) for n, offset, length in zip(packs, offsets, lengths, strict=True)]


def _says_the_same(now: Snapshot | None, before: Snapshot) -> bool:
    """Whether a record is as it was, but for copies that attempts of ours have left when they failed (session.py)."""
    if now is None:
        return False
    copy = msgspec.structs.replace(now, revision=before.revision, write_id=before.write_id)
    return records.encode(copy) == records.encode(before)  # in bytes a NaN is itself


def _rules(view: View, snapshot: Snapshot) -> bool:
    ruling = view.get(snapshot.id)
    return ruling is not None and ruling.key == snapshot.key
