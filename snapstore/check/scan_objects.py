"""Scan packs and manifests, at one of the levels of check.py: the second half of a check and of a repair.

In: a RecordScan. Out: a ScanResult, which check.py reports and repair/repair.py acts on. Nothing is written; one
manifest is in memory at a time.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ..catalog.history import View
from ..catalog.needed_keys import all_manifests
from ..catalog.read_twice import read_small
from ..context import Context
from ..errors import (
    DAMAGE,
    CapabilityError,
    FormatError,
    IntegrityError,
    NotFoundError,
    SnapstoreError,
    StorageError,
    UnknownFormatError,
)
from ..format.blobs.chain_decode import ReferenceMismatchError
from ..format.keys import manifest_key, pack_key, quarantined_names, record_key
from ..format.manifests import manifest
from ..format.manifests.manifest import Manifest, manifest_name
from ..format.manifests.rank_checks import RankCheck, check_roots
from ..format.manifests.tensor_layout import check_layouts
from ..format.records import COMMITTED, FORGOTTEN, Lost, ManifestList, ManifestRef, Snapshot
from ..protocol.session import PROVE
from ..storage import progress
from ..text import some, strip_hint
from .damaged_packs import DamagedPacks, check_tree
from .report import COPY, DROP, GC, REPAIR, REPAIR_CHUNKS, CheckResult, Findings, stand_in
from .scan_records import RecordScan, read_again, read_failure
from .verify_chunks import ChunkRebuilder, tensor_of

#: The report names at most so many damaged chunks of a manifest, and counts the rest.
CHUNKS_NAMED = 20
_STATES = (COMMITTED, FORGOTTEN)


@dataclass(frozen=True, slots=True)
class ScanResult:
    """The result of a scan of a whole repository. Nobody changes it.

    Attributes:
        report: the problems, and which snapshots can be restored.
        records: the records, with the revisions that ruled and the objects that were there at the end of the scan.
        packs: the damaged packs, and which of their blobs are intact.
        need: damaged pack -> ids of all snapshots that refer to it.
        affected: snapshot id -> SHA-256 of those of its manifests that refer to damaged packs.
        without_manifest: id -> why, of the snapshots that lack a manifest.
        without_list: ids of the snapshots whose list of manifests is missing or damaged.
        recovered: packs in quarantine that are whole, or gone and needed by no snapshot.
        found_again: ids of the snapshots that lack a manifest by a note, but that lack none now or are collected.
        unneeded: keys of the packs and manifests that no committed snapshot needs; none if nothing can tell.
        proven: ids of the snapshots whose chains are proven, each link by its digest; none below level "restore".
    """

    report: CheckResult
    records: RecordScan
    packs: DamagedPacks
    need: Mapping[str, set[str]]
    affected: Mapping[str, Sequence[str]]
    without_manifest: Mapping[str, str]
    without_list: frozenset[str]
    recovered: frozenset[str]
    found_again: frozenset[str]
    unneeded: frozenset[str]
    proven: frozenset[str]


def scan_objects(
    context: Context,
    records: RecordScan,
    level: str,
    *,
    share: float = 1.0,
    subset: tuple[int, int] = (1, 1),
    max_decoded_bytes: int | None = None,
) -> ScanResult:
    """Read packs and manifests, as many as the level says; see `check` for the arguments.

    Raises:
        StorageError: the store does not answer; a single object that cannot be read is a problem.
    """
    return _ObjectScanner(context, records, level, max_decoded_bytes).scan(share, subset)


def why_recovered(sizes: Mapping[str, int], key: str) -> str:
    """Return why a pack need not stay in quarantine; `sizes` has the packs that are there."""
    return "it is intact" if key in sizes else "it is gone, and no snapshot needs it"


class _ObjectScanner:
    """Makes one ScanResult."""

    def __init__(self, context: Context, records: RecordScan, level: str, max_decoded_bytes: int | None) -> None:
        self._store, self._digest_seed = context.store, context.engines.digest_seed
        self._context, self._records, self._level = context, records, level
        self._rebuilder = ChunkRebuilder(context, max_decoded_bytes)
        self._findings = Findings(records.problems, records.notes)
        self._sizes, self._ruling = dict(records.sizes), dict(records.ruling)
        self._packs = DamagedPacks(context.store)
        for key, offsets in records.noted_blobs.items():
            for offset in offsets:
                self._packs.condemn(key, offset)
        self._proven: set[str] = set()
        self._unknown: set[str] = set()  # ids of snapshots that this release or this machine cannot read in full
        self._without_manifest: dict[str, str] = {}
        self._without_list: set[str] = set()
        self._affected: dict[str, list[str]] = {}
        self._need: dict[str, set[str]] = {}  # damaged pack -> ids of the snapshots that refer to it
        self._damages: dict[str, set[str]] = {}  # damaged pack -> ids of the snapshots that lose chunks by it

    def scan(self, share: float, subset: tuple[int, int]) -> ScanResult:
        """Read everything that the level asks for."""
        snapshots = View(self._ruling.values(), {}, []).snapshots(states=_STATES)
        rebuilt = snapshots[::-1] if self._level == "restore" else []
        proving = progress.through(rebuilt, lambda snapshot: snapshot.logical_bytes)  # they count from the beginning
        packs, packs_read = self._read_packs(share, subset)
        for snapshot in proving:
            with suppress(*DAMAGE):  # remembers the good chains, also chains of older snapshots
                manifests = (m for _, m in all_manifests(snapshot, self._read))
                failures = partial(self._rebuilder.failures, snapshot.ref, packs=self._packs, prove=True)
                if not [row for m in manifests for row in failures(m=m)]:
                    self._proven.add(snapshot.id)
        needed = set(self._records.quarantined)
        for snapshot in snapshots:
            keys = self._scan_snapshot(snapshot)
            if snapshot.state == COMMITTED:
                needed |= keys
        recovered = self._report_packs()
        found_again = self._report_found_again()
        unneeded = frozenset[str]() if self._stops_gc(needed) else frozenset(self._sizes.keys() - needed)
        report = self._report([self._ruling[snapshot.id] for snapshot in snapshots], unneeded)
        return ScanResult(
            report=replace(report, packs=packs, packs_read=packs_read),
            records=replace(self._records, ruling=self._ruling, sizes=self._sizes),
            packs=self._packs,
            need=self._need,
            affected=self._affected,
            without_manifest=self._without_manifest,
            without_list=frozenset(self._without_list),
            recovered=frozenset(recovered),
            found_again=frozenset(found_again),
            unneeded=unneeded,
            proven=frozenset(self._proven & {snapshot.id for snapshot in report.restorable}),
        )

    def _report(self, snapshots: Sequence[Snapshot], unneeded: frozenset[str]) -> CheckResult:
        """Return the problems, and which snapshots are restorable, damaged or unknown."""
        bad = {name for problem in self._findings.problems for name in problem.snapshots}
        doubtful = bad | self._unknown
        kept = [snapshot for snapshot in snapshots if snapshot.state in _STATES]
        for s in (s for s in kept if s.unproven):
            self._findings.note("record", s.key, f"{s.ref}: copied without verification; no save builds on it", PROVE)
        damaged, named = list(self._records.damaged), {s.id for s in self._records.damaged}
        unknown = [stand_in(key) for key in sorted(self._records.unknown)]
        return CheckResult(
            self._level,
            problems=self._findings.problems,
            notes=self._findings.notes,
            restorable=[s for s in kept if s.id not in doubtful],
            damaged=damaged + [s for s in kept if s.id in bad - named],
            unknown=unknown + [s for s in kept if s.id in self._unknown - bad],
            decoded_bytes=self._rebuilder.budget.spent_bytes,
            unneeded_bytes=sum(self._sizes[key] for key in unneeded),
        )

    def _stops_gc(self, needed: set[str]) -> bool:
        """Return whether gc would refuse or wait, or nothing tells which objects committed snapshots need."""
        records = self._records
        unclear = self._without_manifest.keys() | self._unknown
        if records.unknown or any(self._ruling[name].state == COMMITTED for name in unclear):
            return True
        kinds = {problem.kind for problem in self._findings.problems}
        absent = needed - self._sizes.keys() - records.quarantined
        return not kinds.isdisjoint(("config", "session")) or bool(records.unreadable or records.vanished or absent)

    # -- packs

    def _read_packs(self, share: float, subset: tuple[int, int]) -> tuple[int, int]:
        """Read packs whole, as many as the level says, and all that are in quarantine.

        Returns:
            The number of packs, and of those read.
        """
        packs, keys = sorted(key for key in self._sizes if key.startswith("packs/")), list[str]()
        if self._level != "metadata":
            number, count = subset
            keys = [key for key in packs if int(key[-8:], 16) % count == number - 1]
            if share < 1:
                wanted = max(1, round(share * len(keys))) if keys else 0
                keys = random.SystemRandom().sample(keys, wanted)  # the program's generator stays as it is
        chosen = sorted(self._records.quarantined.union(keys))
        for key in progress.through(chosen, lambda key: self._sizes.get(key, 0)):
            try:
                read_again(self._store, key, partial(self._read_pack, key))
            except NotFoundError:
                self._sizes.pop(key, None)  # its manifests tell whether that matters
            except DAMAGE as error:
                self._packs.why[key] = strip_hint(error)
        return len(packs), len(self._sizes.keys() & chosen)

    def _read_pack(self, key: str) -> None:
        """Read a pack whole; raise IntegrityError if its bytes do not match its name."""
        got = hashlib.sha256(self._store.get(key, limit_bytes=self._sizes.get(key, 0))).hexdigest()
        if not key.endswith(got):
            raise IntegrityError(f"{key}: SHA-256 is {got}: altered")

    def _report_packs(self) -> set[str]:
        """Add one finding for each damaged pack; return the packs that need not stay in quarantine."""
        quarantined = self._records.quarantined
        misbuilt = {key: f"{key}: holds blobs that do not rebuild their chunks" for key in self._packs.misbuilt}
        # If this scan has found the misbuilt blobs of a pack, the chunk problems name the snapshots that they damage.
        told = {name for problem in self._findings.problems for name in problem.snapshots}
        known = {
            key: why for key, why in misbuilt.items() if key in quarantined or self._damages.get(key, set()) - told
        }
        for key, why in sorted((known | self._packs.why).items()):
            self._report_pack(key, why)
        recovered = set(quarantined - self._packs.why.keys() - self._packs.misbuilt.keys())
        if self._level != "restore":  # only rebuilding tells which blobs a damaged note of quarantine names
            recovered -= quarantined_names(self._records.damaged_small)
        for key in sorted(recovered):
            message = f"{key}: need not stay in quarantine: {why_recovered(self._sizes, key)}"
            self._findings.note("pack", key, message, REPAIR)
        return recovered

    def _report_pack(self, key: str, why: str) -> None:
        lossy, need = sorted(self._damages.get(key, ())), self._need.get(key, ())
        if not need and key in self._records.quarantined:
            self._findings.note("pack", key, f"{why}; in quarantine, no snapshot needs it", f"{REPAIR} --purge")
            return
        hurt = sorted((self._ruling[name] for name in lossy), key=lambda s: (s.run, s.seq, s.id))
        message = f"{why}; snapshots that need it: {len(need)}, of which {len(lossy)} lose chunks"
        if hurt:
            message += f": {some([s.ref for s in hurt])}"
        command, instead = self._remedy(key)
        self._findings.problem("pack", key, message, lossy, command=command, instead=instead)

    def _remedy(self, key: str) -> tuple[str, str]:
        """Return the command to run about a damaged pack, and the help of its problem."""
        need, lossy = self._need.get(key, set()), self._damages.get(key, set())
        if need and key not in self._records.quarantined:
            return REPAIR, ""
        kept = {name for name in need if self._ruling[name].state == COMMITTED}
        if not kept:
            return GC, ""
        if kept.isdisjoint(lossy):
            return REPAIR, ""  # the intact blobs that they need have not been copied out yet
        again = "save the same content again"
        if key in self._packs.why:
            again += ", or put a copy of the pack back,"
        forgets = "forgets the snapshots that no save has stored again"
        return DROP, f"{forgets}; to keep them, {again} then run '{REPAIR} --apply'"

    # -- manifests

    def _scan_snapshot(self, snapshot: Snapshot) -> set[str]:
        """Check a snapshot's manifests and everything that they refer to; return the keys that it needs."""
        found, wrong = self._read_manifests(snapshot)
        while wrong and (now := self._newest_revision(snapshot)).key != snapshot.key:
            self._ruling[snapshot.id] = snapshot = now
            if snapshot.state not in _STATES:
                return set()
            found, wrong = self._read_manifests(snapshot)
        self._note_missing(snapshot, found, wrong)
        failed: dict[str, dict[int, SnapstoreError]] = {}
        if self._level == "restore":
            failed = {ref.sha256: self._rebuilder.failures(snapshot.ref, m, self._packs) for ref, m in found}
            if any(failed.values()) and (now := self._newest_revision(snapshot)).key != snapshot.key:
                # While its chunks were rebuilt, the snapshot was rewritten and a gc deleted the old packs.
                self._ruling[snapshot.id] = now
                return self._scan_snapshot(now) if now.state in _STATES else set()
        needed = set(snapshot.named_keys)
        self._check_list(snapshot)
        for ref, m in found:
            needed.update(child.key for child in m.header.children)
            keys = [pack_key(name) for name in m.header.pack_names]
            needed.update(keys)
            lost = self._packs.lost(m)
            for number in np.unique(m.table.ref_packs[lost]).tolist():
                self._damages.setdefault(keys[number], set()).add(snapshot.id)
            if not m.header.children:  # RankCheck compares the depth of a root with its children
                self._report_depth(snapshot, ref.key, m.header.depth, int(m.table.depths.max(initial=0)))
            self._report_chunks(snapshot, m, failed.pop(ref.sha256, {}))
            for key in (key for key in keys if key in self._packs):
                self._need.setdefault(key, set()).add(snapshot.id)
            if self._packs.within(m).any():
                self._affected.setdefault(snapshot.id, []).append(ref.sha256)
        roots = [m for ref, m in found if ref in snapshot.manifests]
        if not any(key.startswith("manifests/") for key in wrong):
            deepest = max((m.header.depth for m in roots), default=0)
            self._report_depth(snapshot, snapshot.key, snapshot.depth, deepest)
            try:
                check_roots((m.header for m in roots), snapshot.features, snapshot.key)
                check_tree(self._context, [m for _, m in found], with_pages=self._level == "restore")
            except FormatError as error:
                self._report_manifest(snapshot, snapshot.key, error)
        return needed

    def _check_list(self, snapshot: Snapshot) -> None:
        """Report a list of manifests that is missing or damaged, or that is not the snapshot's."""
        if not snapshot.manifest_list:
            return
        key = manifest_key(snapshot.manifest_list)
        try:
            read_again(self._store, key, partial(self._read_list, snapshot, key))
        except UnknownFormatError as error:
            self._findings.problem("manifest", key, f"{snapshot.ref}: {error}", command="")
        except DAMAGE as error:
            now = self._newest_revision(snapshot)
            if now.state not in _STATES or now.manifest_list != snapshot.manifest_list:
                return  # rewritten or swept since the manifests were read: a gc has deleted the old list
            self._without_list.add(snapshot.id)
            text = f"{snapshot.ref}: its list of manifests: {strip_hint(error)}; it restores, but no gc runs without it"
            self._findings.problem("manifest", key, text)

    def _read_list(self, snapshot: Snapshot, key: str) -> None:
        """Read a list of manifests; raise IntegrityError if it lists others than the snapshot's."""
        names = read_small(self._store, ManifestList, key)
        if (names.snapshot.hex(), names.sha256s) != (snapshot.id, [ref.sha256 for ref in snapshot.manifests]):
            raise IntegrityError(f"{key}: lists other manifests than {snapshot.key}")

    def _newest_revision(self, snapshot: Snapshot) -> Snapshot:
        """Return the revision that rules now; a rewrite, a repair or a gc may have added one since the scan began."""
        while True:
            key = record_key(snapshot.run, snapshot.step, snapshot.id, snapshot.revision + 1)
            try:
                snapshot = read_small(self._store, Snapshot, key)
            except (*DAMAGE, StorageError):
                return self._context.index.pages.newest(snapshot)

    def _read_manifests(
        self, snapshot: Snapshot
    ) -> tuple[list[tuple[ManifestRef, Manifest]], dict[str, SnapstoreError | str]]:
        """Return a snapshot's manifests that can be read, and key -> why of the other ones and of missing packs."""
        found, wrong = list[tuple[ManifestRef, Manifest]](), dict[str, SnapstoreError | str]()
        for ref in snapshot.manifests:
            try:
                found.append((ref, self._read_manifest(ref)))
            except DAMAGE as error:
                wrong[ref.key] = error
        for ref, root in [(ref, root) for ref, root in found if root.header.world_size]:
            self._read_children(ref, root, found, wrong)
        for _, m in found:
            keys = map(pack_key, m.header.pack_names)
            wrong.update({key: f"{key} is missing" for key in keys if not self._is_there(key)})
        return found, wrong

    def _read_children(
        self,
        ref: ManifestRef,
        root: Manifest,
        found: list[tuple[ManifestRef, Manifest]],
        wrong: dict[str, SnapstoreError | str],
    ) -> None:
        """Read the children of a root, and check that together they are one whole."""
        before = len(wrong)
        try:
            ranks = RankCheck(root, ref.key)
        except FormatError as error:
            wrong[ref.key] = error
            return
        for child in root.header.children:
            try:
                m = self._read(child)
                found.append((child, m))
                if len(wrong) == before:  # a missing child is reported already
                    ranks.add(m, child.key)
            except DAMAGE as error:
                wrong[child.key] = error
        if len(wrong) == before:
            try:
                ranks.finish()
            except FormatError as error:
                wrong[ref.key] = error

    def _read_manifest(self, ref: ManifestRef) -> Manifest:
        """Return a manifest that a record names.

        Raises:
            UnknownFormatError: only another release can read it.
            IntegrityError, NotFoundError: it is damaged, missing, or cannot be read though the store answers.
        """
        m = self._read(ref)
        try:
            check_layouts(m, ref.key)
        except FormatError as error:
            raise UnknownFormatError(str(error)) from error
        return m

    def _read(self, ref: ManifestRef) -> Manifest:
        """Return a manifest; raises as `_read_manifest` does."""
        try:
            with suppress(StorageError, IntegrityError, NotFoundError):  # one answer proves no damage
                return manifest.read(self._store, ref, self._digest_seed)
            return manifest.read(self._store, ref, self._digest_seed)
        except StorageError as error:
            raise read_failure(self._store, ref.key, error) from error
        except FormatError as error:  # its name is its SHA-256, so it is as written, by a release that knows more
            raise UnknownFormatError(str(error)) from error

    def _is_there(self, key: str) -> bool:
        """Return whether an object is listed, or was put since."""
        for _ in range(2):  # one answer that it is missing proves nothing
            if key not in self._sizes:
                with suppress(NotFoundError):
                    self._sizes[key] = self._store.stat(key).size_bytes
        return key in self._sizes

    def _note_missing(
        self,
        snapshot: Snapshot,
        found: Sequence[tuple[ManifestRef, Manifest]],
        wrong: Mapping[str, SnapstoreError | str],
    ) -> None:
        """Report manifests that cannot be read, and note packs that are missing or of another size."""
        for key, why in wrong.items():
            if key.startswith("manifests/"):
                self._report_manifest(snapshot, key, why)
        for _, m in found:
            keys = [pack_key(name) for name in m.header.pack_names]
            for key, size in zip(keys, m.header.pack_size_list, strict=True):
                if key in wrong:
                    self._packs.why.setdefault(key, str(wrong[key]))
                elif self._sizes[key] != size:
                    why = f"{key} has {self._sizes[key]} bytes, expected {size}: cut short or altered"
                    self._packs.why.setdefault(key, why)

    def _report_manifest(self, snapshot: Snapshot, key: str, error: SnapstoreError | str) -> None:
        why = strip_hint(f"{snapshot.ref}: {error}")
        if isinstance(error, UnknownFormatError):
            self._unknown.add(snapshot.id)
            self._findings.problem("manifest", key, f"{why}; it is intact, and another release can read it", command="")
            return
        self._without_manifest[snapshot.id] = why
        if snapshot.state == COMMITTED:
            instead = f"forgets the snapshot; to keep it, {COPY}"
            self._findings.problem("manifest", key, why, [snapshot.id], command=DROP, instead=instead)
        else:
            self._findings.problem("manifest", key, why, [snapshot.id], command=GC)

    def _report_depth(self, snapshot: Snapshot, key: str, depth: int, longest: int) -> None:
        """Report a depth, of a record or a manifest, that is not the number of deltas in the longest chain."""
        if depth != longest:
            kind = "record" if key == snapshot.key else "manifest"
            text = f"{snapshot.ref}: {key}: depth {depth}, expected {longest}, as in its longest chain"
            text += "; snapstore restores it, but another reader may refuse it"
            self._findings.problem(kind, key, text, command="")

    def _report_found_again(self) -> set[str]:
        """Note the snapshots that a note wrongly says lack a manifest; return their ids."""
        found = self._ruling.keys() & self._records.noted_lost - self._without_manifest.keys()
        for name in sorted(found):
            key = Lost(id=name, found=0, reason="").key
            message = f"{key}: {self._ruling[name].ref} has all its manifests again, or was collected"
            self._findings.note("gc", key, message, REPAIR)
        return found

    # -- chunks

    def _report_chunks(self, snapshot: Snapshot, m: Manifest, failed: Mapping[int, SnapstoreError]) -> None:
        """Report chunks that cannot be rebuilt, and condemn the newest blob of each, unless its reference is wrong."""
        part = m.header.part
        lacks = {row: error for row, error in failed.items() if isinstance(error, CapabilityError)}
        if lacks:  # this is no damage of a snapshot, but nothing proves that it is whole
            self._unknown.add(snapshot.id)
            lack = next(iter(lacks.values()))
            message = f"{snapshot.ref}: {manifest_name(m.header)} cannot be rebuilt on this machine: {lack}"
            self._findings.problem("chunk", part, message, command="")
        damaged = [(row, error) for row, error in failed.items() if row not in lacks]
        of_rank = f"rank {m.header.rank}: " if m.header.world_size else ""
        messages = [(f"{of_rank}{tensor_of(m, row)}: {error}", error) for row, error in damaged[:CHUNKS_NAMED]]
        if len(damaged) > CHUNKS_NAMED:
            messages.append((f"more chunks that are lost: {len(damaged) - CHUNKS_NAMED}", damaged[-1][1]))
        for message, error in messages:
            text, command = f"{snapshot.ref}: {message}", REPAIR_CHUNKS
            if isinstance(error, ReferenceMismatchError):
                text, command = f"{strip_hint(text)}; no repair helps: forget the snapshot", ""
            self._findings.problem("chunk", part, text, [snapshot.id], command=command)
        for row, error in damaged:
            if isinstance(error, ReferenceMismatchError):
                continue  # the manifest is wrong, and other snapshots may need the blob
            ref = int(m.table.starts[row])
            key = pack_key(m.header.pack_names[m.table.ref_packs[ref]])
            if isinstance(error, StorageError):  # the blob may be readable tomorrow: the pack is damaged, not the blob
                self._packs.why.setdefault(key, f"{key}: a blob cannot be read: {strip_hint(error)}")
            else:
                self._packs.condemn(key, int(m.table.ref_offsets[ref]))
