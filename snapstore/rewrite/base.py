"""Rewrite: publish new manifests of a snapshot, which refer to other blobs, as the next revision of its record.

In: snapshots, and a subclass of `Rewriting` that chooses the stale references and writes their replacements
(recode.py, compact.py, ../repair/heal.py). Out: new packs, new manifests, new revisions. Nothing is edited in
place; gc deletes what nobody needs any more. The snapshots are rewritten one after the other, each under a session of
its own (docs/design/protocol.md, "Rewriting"):

    begin     PUT sessions/<id>, which names the next revision; only then LIST marks, only then LIST records: a blob
              that is there already, byte for byte, and that no gc wants, is shared
    write     new blobs, each verified before it is packed; then manifests; all durable before the commit
    commit    LIST notes of quarantine: no blob of a damaged pack is moved, except by a repair; create-only PUT of the
              next revision; a rewrite that loses the race, or finds a new note, reads again and repeats
    end       DELETE sessions/<id>

A crash between any two steps leaves the snapshot either as it was or rewritten, and perhaps packs that no snapshot
needs, which gc deletes.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import numpy.typing as npt

from ..arrays import Column
from ..catalog.history import View
from ..catalog.needed_keys import data_refs
from ..catalog.read_twice import read_twice, tried
from ..chunks.uploader import PackUploader
from ..context import Context
from ..engine.base import Engine
from ..errors import DAMAGE, ConflictError, FormatError, IntegrityError
from ..format.blobs.pack import ENTRY
from ..format.keys import pack_key, quarantined_names, record_key
from ..format.manifests import manifest
from ..format.manifests.chunk_table import ChunkTable
from ..format.manifests.delta_chain import BlobKey, Chain, Link, Place, table_of
from ..format.manifests.manifest import Manifest
from ..format.records import ManifestRef, Snapshot
from ..protocol.claim import Claim
from ..protocol.revisions import is_ruling, retry_conflicts, same_content
from ..storage import progress
from ..text import counted, log
from .roots import ReplacedManifests, new_roots
from .shared_manifests import Replacements, beside, put_list
from .stored_blobs import StoredBlobs, lengths_of, names_of


@dataclass(frozen=True, slots=True)
class StaleManifest:
    """A manifest, and which of its references have to change.

    Attributes:
        stale: (k,) indices of the references whose blobs must be written again or moved.
        entries: (m,) ENTRY, the entry in its pack's footer for each reference; (0,) if no footer was read.
    """

    ref: ManifestRef
    manifest: Manifest
    stale: Column
    entries: npt.NDArray[np.void] = field(default_factory=lambda: np.zeros(0, ENTRY))


@dataclass(frozen=True, slots=True)
class NewTable:
    """The chunk table that a part gets.

    Attributes:
        packs: hex names of packs, which `table.ref_packs` indexes.
        stale: (k,) references whose place is not known before their packs are durable.
        keys: (k,) the blob that each of them needs.
    """

    table: ChunkTable
    packs: Sequence[str]
    stale: Column
    keys: Sequence[BlobKey]


@dataclass(slots=True)
class Work:
    """One snapshot under its session.

    Attributes:
        ruling: the ruling revision of the snapshot, which is rewritten.
        view: the records, listed after the session was announced.
        marked: keys of gc's candidates, listed after the session too; None: a mark could not be read.
        places: places of blobs that were there already; once the new packs are durable, of the new blobs too.
        new: blobs that this session has packed: (number of its pack, offset, stored bytes, stored bytes of the blob
            that it replaces).
        there: pack -> whether it was there when it was first looked for. That was after the marks were listed, so a
            pack that was there stays while this session writes.
        named: the new blobs by their names.
    """

    claim: Claim
    ruling: Snapshot
    packs: PackUploader
    view: View
    marked: set[str] | None
    places: dict[BlobKey, Place] = field(default_factory=dict)
    new: dict[BlobKey, tuple[int, int, int, int]] = field(default_factory=dict)
    there: dict[str, bool] = field(default_factory=dict)
    named: dict[bytes, BlobKey] = field(default_factory=dict)

    def has(self, key: BlobKey) -> bool:
        """Return whether a blob has a new place, or is packed."""
        return key in self.places or key in self.new

    def pack(self, made: StoredBlobs, keys: Sequence[BlobKey], before: Sequence[int], engine: Engine) -> None:
        """Pack new blobs."""
        numbers, offsets = self.packs.add(made, engine)
        columns = numbers.tolist(), offsets.tolist(), lengths_of(made.entries), before
        self.new.update(zip(keys, zip(*columns, strict=True), strict=True))
        self.named.update(zip(names_of(made.entries), keys, strict=True))
        self.claim.heartbeat()

    def lengths(self) -> dict[BlobKey, tuple[int, int]]:
        """Return, for every new blob, (stored bytes of the blob that it replaces, its own stored bytes)."""
        return {key: (before, length) for key, (_, _, length, before) in self.new.items()}


class Rewriting(ABC):
    """Rewrites snapshots of one repository.

    Attributes:
        rewritten: new revisions of the snapshots that changed (of a dry run: the revisions as they are).
        skipped: snapshots that needed nothing, or were forgotten or collected meanwhile.
        failed: (snapshot, why) of the snapshots that could not be rewritten; they are unchanged.
        made: the blobs encoded or moved: key -> stored bytes (before, after); in a dry run, after is unknown and 0.
        quarantined: keys of the packs that are known to be damaged. Recode and compact move nothing out of them: only
            rebuilding shows whether a blob gives its chunk, and a new pack would not be in quarantine.
        sizes: of packs, by name [bytes].
    """

    verb = "rewrite"

    def __init__(self, context: Context, engine: Engine, *, states: Sequence[str], dry_run: bool = False) -> None:
        self.context, self.store, self.index, self.engine = context, context.store, context.index, engine
        self._pack_bytes, self._states, self.dry_run = context.options.pack_bytes, states, dry_run
        self.quarantined = self._list_quarantined()
        self._view: View | None = None
        self.rewritten: list[Snapshot] = []
        self.skipped: list[Snapshot] = []
        self.failed: list[tuple[Snapshot, str]] = []
        self.made: dict[BlobKey, tuple[int, int]] = {}
        self.sizes: dict[str, int] = {}
        self._replacements = Replacements(context)
        self._needs: dict[str, frozenset[str]] = {}  # manifest -> packs
        self._places: dict[BlobKey, Place] = {}  # of blobs that this run has made or shared

    # -- a subclass decides

    @abstractmethod
    def parts(self, ruling: Snapshot, view: View) -> list[StaleManifest]:
        """Read the manifests of a snapshot that may change, and choose their stale references.

        Raises:
            IntegrityError, FormatError, NotFoundError: it is damaged.
        """

    def begin(self, work: Work, parts: Sequence[StaleManifest]) -> None:  # noqa: B027 (some need nothing)
        """Prepare to write the parts of one snapshot.

        The session is announced, and marks and records are listed; nothing is put yet.
        """

    @abstractmethod
    def write(self, work: Work, part: StaleManifest) -> NewTable | None:
        """Pack the blobs that a part lacks, and return its new table; None: the part does not change after all.

        Raises:
            IntegrityError, FormatError, NotFoundError: it is damaged.
        """

    def foresee(self, parts: Sequence[StaleManifest]) -> None:  # noqa: B027 (some know their numbers already)
        """Note what a run that is not dry would write for one snapshot."""

    def shared(self, work: Work, parts: Sequence[StaleManifest]) -> ReplacedManifests:
        """Return manifests that this rewrite has put for earlier snapshots, and that replace the snapshot's own."""
        refs = [*work.ruling.manifests, *(part.ref for part in parts)]
        return self._replacements.usable(work.view, work.marked, refs, lambda packs: self.safe(work, packs))

    def published(self, work: Work) -> None:
        """Let later snapshots build on the blobs that `work` has packed: its snapshot refers to them now."""
        self._places.update(work.places)

    # -- one snapshot

    def run(self, snapshots: Sequence[Snapshot]) -> None:
        """Rewrite snapshots. One that cannot be rewritten is noted; the others are rewritten."""
        for snapshot in progress.through(snapshots, lambda snapshot: snapshot.stored_bytes):
            try:
                self.rewrite_one(snapshot)
            except (*DAMAGE, ConflictError) as error:
                log.info("run=%s step=%d: %s failed: %s", snapshot.run, snapshot.step, self.verb, error)
                self.failed.append((snapshot, f"{snapshot.ref}: {error}"))

    def rewrite_one(self, snapshot: Snapshot) -> Snapshot | None:
        """Rewrite one snapshot, again if another process revises it meanwhile.

        Returns:
            The revision that rules now; None: the snapshot needs nothing, or is forgotten or collected.

        Raises:
            IntegrityError, FormatError, NotFoundError: it is damaged, and was not changed.
            ConflictError: other processes keep revising it.
        """
        return retry_conflicts(
            lambda: self._attempt(snapshot), lambda _: ConflictError("other processes keep revising it; try again")
        )

    def _attempt(self, snapshot: Snapshot) -> Snapshot | None:
        """Rewrite one snapshot as it is now.

        Raises:
            ConflictError: another process has revised it meanwhile.
        """
        view = self._latest_view()
        ruling = view.get(snapshot.id)
        if view.is_unknown(snapshot.id):
            raise IntegrityError("its record can no longer be read; run 'snapstore check'")
        view.require_last(snapshot)
        if ruling is None or ruling.state not in self._states:
            log.info("run=%s step=%d skipped: it is no longer there", snapshot.run, snapshot.step)
            self.skipped.append(ruling or snapshot)
            return None
        try:
            parts = self.parts(ruling, view)
            if not any(len(part.stale) for part in parts):
                self.skipped.append(ruling)
                return None
            if self.dry_run:
                self.foresee(parts)
                self.rewritten.append(ruling)
                return ruling
            revision = self._rewrite(ruling, parts)
        except ConflictError as error:
            log.info("run=%s step=%d begins again: %s", snapshot.run, snapshot.step, error)
            raise
        except DAMAGE as error:
            self._view = None
            if same_content(self._latest_view().get(ruling.id), ruling):
                raise
            raise ConflictError(str(error)) from error
        (self.skipped if revision is ruling else self.rewritten).append(revision)
        return revision

    def _latest_view(self) -> View:
        """Return the records as they are now; a dry run, which has no race to lose, lists them once."""
        if self._view is None or not self.dry_run:
            self._view = self.index.refresh()
        return self._view

    def data_refs(self, snapshot: Snapshot) -> list[ManifestRef]:
        """Return the references of the manifests that hold a snapshot's chunks.

        Raises:
            NotFoundError, IntegrityError, FormatError: a root manifest is missing or damaged, or two reads failed.
        """
        return read_twice(self.store, lambda: data_refs(self.index, snapshot))

    def manifest_of(self, ref: ManifestRef) -> Manifest:
        """Read a whole manifest of this repository.

        Raises:
            NotFoundError, IntegrityError, FormatError: it is missing, damaged or of another repository, or two reads
                failed.
        """
        return read_twice(self.store, lambda: manifest.read(self.store, ref, self.engine.digest_seed))

    def sized_manifest(self, ref: ManifestRef) -> Manifest:
        """Read a whole manifest, and note the sizes of its packs.

        Raises:
            NotFoundError, IntegrityError, FormatError: as `manifest_of` raises them; or it names a pack twice.
        """
        m = self.manifest_of(ref)
        names = m.header.pack_names
        if len(set(names)) < len(names):  # code that counts packs by their names would count them wrongly
            raise FormatError(f"{ref.key}: names a pack twice; no snapstore writes that")
        self.sizes.update(zip(names, m.header.pack_size_list, strict=True))
        return m

    def _rewrite(self, ruling: Snapshot, parts: Sequence[StaleManifest]) -> Snapshot:
        """Put new packs, new manifests and the next revision; return it, or `ruling` if nothing changes after all.

        Raises:
            ConflictError: the revision is taken, or a gc has fenced this session; nothing was changed.
        """
        started = time.monotonic()
        key = record_key(ruling.run, ruling.step, ruling.id, ruling.revision + 1)
        with Claim(self.context, key, self.verb, lambda _: ruling.revised()) as claim:
            marked = claim.marked()
            self._require_known_quarantine(claim.quarantined)
            view = self.index.refresh()
            if not is_ruling(view, ruling):
                raise ConflictError("another process has revised it")
            packs = PackUploader(claim, self._pack_bytes, max(p.manifest.header.chunk_bytes for p in parts))
            work = Work(claim, ruling, packs, view, marked)
            try:
                written = self._write_all(work, parts)
            except DAMAGE:
                claim.require_session()  # else a gc has fenced it, and deleted what it was about to read
                raise
            finally:
                packs.close()
                for buffer in packs.idle:
                    self.engine.give_back(buffer)
            if not written:
                return ruling
            headers = {ref.sha256: manifest.header_bytes(data) for ref, data in written.values() if data}
            revision = self._revised(work, parts, written, headers)
            sizes = {ref.key: len(data) for ref, data in written.values() if data}
            claim.confirm(sizes | dict(zip(map(pack_key, packs.names), packs.sizes, strict=True)))
            self._require_known_quarantine(self._list_quarantined())
            claim.publish(revision)
        self.index.add(revision, headers)
        self._replacements.note(revision, written)
        self.made.update(work.lengths())
        self.published(work)
        log.info(
            "run=%s step=%d %s: %s rewritten, total=%.2fs",
            ruling.run,
            ruling.step,
            self.verb,
            counted(len(work.new), "blob"),
            time.monotonic() - started,
        )
        return revision

    def _revised(
        self, work: Work, parts: Sequence[StaleManifest], written: ReplacedManifests, headers: dict[str, bytes]
    ) -> Snapshot:
        """Return the next revision of a record, which names the new manifests; put their list if it needs one."""
        ruling = work.ruling
        refs = [written[ref.sha256][0] if ref.sha256 in written else ref for ref in ruling.manifests]
        before = {ref.sha256: ref.size_bytes for ref in (*ruling.manifests, *(part.ref for part in parts))}
        grown = sum(after - before for before, after in work.lengths().values())
        grown += sum(ref.size_bytes - before[old] for old, (ref, data) in written.items() if data)
        depths = [manifest.decode_header(headers[sha256], "manifest").depth for sha256 in headers]
        depths += [part.manifest.header.depth for part in parts if part.ref.sha256 not in written]
        known = {*headers, *(part.ref.sha256 for part in parts)}
        depths += [self._depth(ref, ruling) for ref in refs if ref.sha256 not in known]
        name: str | msgspec.UnsetType = msgspec.UNSET
        if ruling.manifest_list or len(headers) < len(written):
            name = put_list(self.context, work.claim, refs, written)
        stored_bytes = max(0, ruling.stored_bytes + grown)
        return ruling.revised(manifests=refs, manifest_list=name, stored_bytes=stored_bytes, depth=max(depths))

    def _depth(self, ref: ManifestRef, ruling: Snapshot) -> int:
        """Return the depth of a manifest; if it is lost, that of the snapshot."""
        header = tried(self.store, lambda: self.index.header(ref))
        return header.depth if header else ruling.depth

    def _list_quarantined(self) -> set[str]:
        return quarantined_names(info.key for info in self.store.list("gc/")) | self.index.marks.packs()

    def _require_known_quarantine(self, quarantined: set[str]) -> None:
        """Raise ConflictError if a repair has found damaged packs since the stale references were chosen."""
        if not quarantined <= self.quarantined:
            self.quarantined |= quarantined
            raise ConflictError("a repair has found damaged packs")

    def in_quarantine(self, m: Manifest) -> Column:
        """Return which references of a manifest point into packs that are known to be damaged, (k,) bool."""
        damaged = np.array([pack_key(name) in self.quarantined for name in m.header.pack_names] or [False])
        return np.asarray(damaged[m.table.ref_packs])

    def _write_all(self, work: Work, parts: Sequence[StaleManifest]) -> ReplacedManifests:
        """Put the blobs that have no place yet, then the manifests; all are durable on return."""
        shared = self.shared(work, parts)
        replaced = beside(self.index, work.ruling, shared)
        parts = [part for part in parts if part.ref.sha256 not in replaced]
        self.begin(work, parts)
        targets: list[tuple[StaleManifest, NewTable]] = []
        for part in parts:
            work.packs.begin(part.manifest.header.rank, part.manifest.header.part)
            target = self.write(work, part) if len(part.stale) else None
            if target is not None:
                targets.append((part, target))
        work.packs.seal()
        work.packs.finish()
        self.sizes.update(zip(work.packs.names, work.packs.sizes, strict=True))
        work.places |= {key: Place(work.packs.names[n], at, length) for key, (n, at, length, _) in work.new.items()}
        written = {part.ref.sha256: self._new_manifest(work, part, target) for part, target in targets}
        written |= shared
        written |= new_roots(self.index, self.manifest_of, work.claim, work.ruling, written)
        work.packs.put_all([(ref.key, data) for ref, data in written.values() if data])
        work.claim.heartbeat()
        return written

    def _new_manifest(self, work: Work, part: StaleManifest, target: NewTable) -> tuple[ManifestRef, bytes]:
        """Encode a part's manifest with its new table, in which every stale reference points to the new place.

        Raises:
            IntegrityError: the new manifest decodes to other content.
        """
        table, m = target.table, part.manifest
        numbers = {name: number for number, name in enumerate(target.packs)}
        columns = {name: getattr(table, name).copy() for name in ("ref_packs", "ref_offsets", "ref_lengths")}
        new_places = [work.places[key] for key in target.keys]
        columns["ref_packs"][target.stale] = [numbers.setdefault(place.pack, len(numbers)) for place in new_places]
        columns["ref_offsets"][target.stale] = [place.offset for place in new_places]
        columns["ref_lengths"][target.stale] = [place.length for place in new_places]
        used, columns["ref_packs"] = np.unique(columns["ref_packs"], return_inverse=True)
        names = list(numbers)
        packs = [names[number] for number in used.tolist()]
        contents = replace(
            manifest.ManifestContents.of(part.manifest),
            save_id=bytes.fromhex(work.claim.id),
            table=replace(table, **columns),
            packs=packs,
            pack_sizes=[self.sizes[name] for name in packs],
            made_for=work.claim.made_for,
        )
        data = manifest.encode(contents)
        new = manifest.decode(data, part.ref.key)
        if new.content != m.content or not np.array_equal(new.table.digests, m.table.digests):
            raise IntegrityError(
                f"{part.ref.key}: its new manifest does not decode to the old content; test this machine's memory"
            )
        return msgspec.structs.replace(manifest.ref_of(data), unknown=part.ref.unknown), data

    # -- blobs and packs that are there already

    def reuse(self, work: Work, keys: Iterable[BlobKey]) -> None:
        """Give blobs the places where this run has put them for another snapshot, as far as those places are safe."""
        found = {key: self._places[key] for key in keys if key in self._places}
        safe = self.safe(work, {place.pack for place in found.values()})
        work.places.update({key: place for key, place in found.items() if place.pack in safe})

    def safe(self, work: Work, packs: set[str]) -> set[str]:
        """Return which packs new manifests may refer to: they stay, and are not known to be damaged."""
        return self.staying(work, {name for name in packs if pack_key(name) not in work.claim.quarantined})

    def staying(self, work: Work, packs: set[str]) -> set[str]:
        """Return which packs no gc deletes: committed snapshots need them, and no mark names them.

        They must also be there now, after the marks were listed: if the listed records lack the newest revision of a
        snapshot, a deleted pack would look needed.
        """
        if work.marked is None:
            return set()
        packs = {name for name in packs if pack_key(name) not in work.marked}
        if unseen := packs - work.there.keys():
            found = self.store.sizes([pack_key(name) for name in unseen])
            work.there.update({name: pack_key(name) in found for name in unseen})
        return self.needed(work.view, {name for name in packs if work.there[name]})

    def needed(self, view: View, packs: set[str]) -> set[str]:
        """Return which packs committed snapshots need."""
        found: set[str] = set()
        for snapshot in view.snapshots():
            for ref in snapshot.manifests:
                if len(found) == len(packs):
                    return found
                found |= packs & self.packs_of(ref)
        return found

    def packs_of(self, ref: ManifestRef) -> frozenset[str]:
        """Return the packs that a manifest needs; none if it cannot be read."""
        if ref.sha256 not in self._needs:
            header = tried(self.store, lambda: self.index.header(ref))
            packs = dict(zip(header.pack_names, header.pack_size_list, strict=True)) if header else {}
            self.sizes.update(packs)
            self._needs[ref.sha256] = frozenset(packs)
        return self._needs[ref.sha256]


def moved(link: Link, work: Work) -> Link:
    """Return a link; if its blob moves, without a place, which is known only once the new pack is durable."""
    return replace(link, place=None, key=link.place) if link.place and work.has(link.place) else link


def target_of(m: Manifest, rows: Column, chains: Sequence[Chain]) -> NewTable:
    """Return a manifest's table with other chains in some rows."""
    numbers = {name: number for number, name in enumerate(m.header.pack_names)}
    rest = np.setdiff1d(np.arange(len(m.table)), rows)
    joined = ChunkTable.concatenate([m.table.take(rest), table_of(chains, numbers)])
    order = np.argsort(np.concatenate([rest, rows]))
    links = [link for chain in chains for link in chain]
    which = np.full(len(joined.ref_kinds), -1, np.int64)  # which of the links each reference is
    which[len(which) - len(links) :] = np.arange(len(links))
    which[len(which) - len(links) :][[link.place is not None for link in links]] = -1
    which = which[joined.refs_of(order)]
    stale = np.flatnonzero(which >= 0)
    return NewTable(joined.take(order), list(numbers), stale, [links[i].key for i in which[stale].tolist()])


def places_of(part: StaleManifest) -> list[Place]:
    """Return where the stale references of a part point."""
    table, names = part.manifest.table, part.manifest.header.pack_names
    columns = (table.ref_packs, table.ref_offsets, table.ref_lengths)
    packs, offsets, lengths = (column[part.stale].tolist() for column in columns)
    return [Place(names[n], offset, length) for n, offset, length in zip(packs, offsets, lengths, strict=True)]
