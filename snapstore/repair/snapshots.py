"""heal: manifests that refer to damaged packs, made anew from what is intact.

In: a snapshot, and the damage (damage.py). Out: new packs, new manifests and the next revision of its record, under a
session, by the rules of a recode (docs/design/protocol.md, "Repair"). Of a chunk that needs a lost blob, another chain
of a committed snapshot that gives the same digest is taken, from whichever of its references on there is one; intact
blobs of damaged packs are copied. Each new chain is rebuilt from where it lies before it is written down: the digest
decides. What cannot be healed keeps its references, so that nothing is worse than it was.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from ..arrays import Bytes
from ..catalog.history import View
from ..catalog.needed_keys import all_needed_keys
from ..catalog.read_twice import answers
from ..check.damaged_packs import DamagedPacks, lost_rows, unbuilt
from ..chunks import limits
from ..chunks.uploader import put_once
from ..context import Context
from ..errors import DAMAGE, CapabilityError, ConflictError, IntegrityError, SnapstoreError, StorageError
from ..format import blob, manifest
from ..format.keys import pack_key, record_key
from ..format.manifest import COLUMNS, MAX_CHAIN, ChunkTable, Manifest, part_name
from ..format.pack import ENTRY, PackWriter
from ..format.records import COMMITTED, FORGOTTEN, ManifestRef, Snapshot
from ..protocol.claim import Claim
from ..text import counted

log = logging.getLogger("snapstore")
#: How often a snapshot that others revise meanwhile is begun again.
ATTEMPTS = 20
#: So many chains are remembered of every chunk that is sought, in case gc wants the first.
CHAINS_KEPT = 3


@dataclass(frozen=True, slots=True)
class _Ref:
    """One blob of a chain, and where it lies."""

    kind: int
    pack: str
    offset: int
    length: int
    digest: bytes


Chain = list[_Ref]


@dataclass(slots=True)
class _Part:
    """A manifest, and what is to become of it."""

    ref: ManifestRef
    manifest: Manifest
    chains: dict[int, Chain] = field(default_factory=dict)  # row -> what to refer to
    without: set[int] = field(default_factory=set)  # rows whose blobs were lost and are not missed
    lost: set[int] = field(default_factory=set)  # rows that nothing gives


@dataclass(slots=True)
class Healing:
    """What became of a snapshot, or would.

    Attributes:
        snapshot: its revision now.
        elsewhere: chunks that another chain gives.
        copied: intact blobs copied out of damaged packs.
        lost: what stays lost, in words; empty: nothing.
    """

    snapshot: Snapshot
    elsewhere: int
    copied: int
    lost: str

    @property
    def changes(self) -> bool:
        """Whether there is anything to publish."""
        return self.elsewhere + self.copied > 0


class Healer:
    """Heals snapshots of one repository, one after the other; what they share is copied once.

    Args:
        affected: id -> SHA-256 of the manifests that refer to damaged packs.
    """

    def __init__(self, context: Context, packs: DamagedPacks, affected: Mapping[str, Sequence[str]]) -> None:
        self._context = context
        self._store, self._index, self._engines, self._packs = context.store, context.index, context.engines, packs
        self._affected = {name: set(refs) for name, refs in affected.items()}
        self._pack_bytes = context.options.pack_bytes
        self._sizes: dict[str, int] = {}  # of packs, by name
        self._chains: dict[bytes, list[Chain]] = {}  # digest -> intact chains that give it
        self._lost: set[bytes] = set()  # digests whose blobs were lost
        self._budget = limits.Budget(context.store)
        self._copies: dict[tuple[str, int], _Ref] = {}  # place of a blob in a damaged pack -> where its copy lies

    def find_chains(self, snapshots: Iterable[Snapshot], view: View) -> None:
        """Look for chains of committed snapshots that give what some snapshots have lost."""
        wanted: set[bytes] = set()
        for snapshot in snapshots:
            with suppress(*DAMAGE):  # revised meanwhile, and collected
                for part in self._parts(snapshot):
                    table, lost = part.manifest.table, self._packs.lost(part.manifest)
                    refs = table.refs_of(lost_rows(part.manifest, lost))
                    wanted.update(digest.tobytes() for digest in table.ref_digests[refs])
                    self._lost.update(digest.tobytes() for digest in table.ref_digests[lost])
        if not wanted:
            return
        names = np.frombuffer(b"".join(sorted(wanted)), "V16")
        for snapshot in view.snapshots():
            for ref in snapshot.manifests:
                try:
                    self._add_chains(manifest.read(self._store, ref, self._engines.digest_seed), names)
                except DAMAGE:
                    continue
                except StorageError:
                    answers(self._store)

    def _add_chains(self, m: Manifest, wanted: npt.NDArray[np.void]) -> None:
        """The chains of one manifest that give wanted digests, from their reference on."""
        table = m.table
        found = np.flatnonzero(np.isin(np.ascontiguousarray(table.ref_digests).view("V16").reshape(-1), wanted))
        if not len(found):
            return
        lost, names = self._packs.lost(m), m.header.pack_names
        ends = table.starts[1:][np.searchsorted(table.starts[1:], found, "right")]
        for first, end in zip(found.tolist(), ends.tolist(), strict=True):
            chains = self._chains.setdefault(table.ref_digests[first].tobytes(), [])
            if lost[first:end].any() or len(chains) >= CHAINS_KEPT:
                continue
            chain = _chain(table, names, range(first, end))
            if all(other[0] != chain[0] for other in chains):
                chains.append(chain)
        self._sizes.update(zip(names, m.header.pack_size_list, strict=True))

    def _parts(self, snapshot: Snapshot) -> list[_Part]:
        """Those of a snapshot's manifests that refer to damaged packs."""
        parts = []
        for ref in snapshot.manifests:
            if ref.sha256 in self._affected[snapshot.id]:
                m = manifest.read(self._store, ref, self._engines.digest_seed)
                self._sizes.update(zip(m.header.pack_names, m.header.pack_size_list, strict=True))
                parts.append(_Part(ref, m))
        return parts

    # -- one snapshot

    def plan(self, snapshot: Snapshot, view: View) -> Healing:
        """What healing a snapshot would do."""
        return self._healing(snapshot, self._planned(snapshot, self._held(view)))

    def heal(self, snapshot: Snapshot) -> Healing | None:
        """Publish what heals a snapshot, again if another process revises it meanwhile.

        Returns:
            What became of it; None: it needs no healing any more.

        Raises:
            ConflictError: others keep revising it.
            IntegrityError, FormatError, NotFoundError: it was damaged further while we looked, or rewritten with its
                damage.
        """
        for _ in range(ATTEMPTS):
            view = self._index.refresh()
            ruling = view.get(snapshot.id)
            if view.is_unknown(snapshot.id):
                raise ConflictError(f"{snapshot.ref}: its record can no longer be read; repair again")
            if ruling is None or ruling.state not in (COMMITTED, FORGOTTEN):
                return None  # swept meanwhile
            self._look_at_new(snapshot, ruling, view)
            if {ref.sha256 for ref in ruling.manifests}.isdisjoint(self._affected[snapshot.id]):
                return None  # healed, or recoded, by another process
            try:
                return self._rewritten(ruling)
            except ConflictError as error:
                log.info("repair: %s is begun again: %s", ruling.ref, error)
        raise ConflictError(f"{snapshot.ref}: other processes keep revising it; repair again")

    def _look_at_new(self, snapshot: Snapshot, ruling: Snapshot, view: View) -> None:
        """Manifests that another process has published since: they may refer to damaged packs too, or to copies.

        Raises:
            IntegrityError: what was lost has been copied into a pack that nobody suspects (by a rewrite that had looked
                for notes before ours were put).
        """
        known, affected = {ref.sha256 for ref in snapshot.manifests}, self._affected[snapshot.id]
        for ref in (ref for ref in ruling.manifests if ref.sha256 not in known | affected):
            m = manifest.read(self._store, ref, self._engines.digest_seed)
            if self._packs.within(m).any():
                affected.add(ref.sha256)
                self.find_chains([ruling], view)
            names = np.frombuffer(b"".join(sorted(self._lost)), "V16")
            held = np.isin(np.ascontiguousarray(m.table.ref_digests).view("V16").reshape(-1), names)
            rows = np.setdiff1d(lost_rows(m, held), lost_rows(m, self._packs.lost(m)))
            for error in unbuilt(self._context, m, rows.tolist()).values() if len(rows) else ():
                if isinstance(error, CapabilityError):
                    raise error
                raise IntegrityError(f"{ref.key}: was written while this repair looked, and is damaged too: {error}")

    def _healing(self, snapshot: Snapshot, parts: Sequence[_Part]) -> Healing:
        lost = [
            f"{counted(len(part.lost), 'chunk')} of {part_name(part.manifest.header.part)}"
            for part in parts
            if part.lost
        ]
        elsewhere = sum(len(part.without & part.chains.keys()) for part in parts)
        return Healing(snapshot, elsewhere, sum(len(self._to_copy(part)) for part in parts), ", ".join(lost))

    def _is_bad(self, ref: _Ref) -> bool:
        return pack_key(ref.pack) in self._packs

    def _to_copy(self, part: _Part) -> dict[tuple[str, int], _Ref]:
        """The blobs of a part's new chains that lie in damaged packs, by place."""
        return {(r.pack, r.offset): r for chain in part.chains.values() for r in chain if self._is_bad(r)}

    def _held(self, view: View) -> set[str]:
        """Those packs of the chains found that committed snapshots need, by name."""
        packs = {ref.pack for chains in self._chains.values() for chain in chains for ref in chain}
        packs |= {ref.pack for ref in self._copies.values()}
        wanted = {pack_key(name): name for name in packs}
        held: set[str] = set()
        for _, keys in all_needed_keys(self._index, view.snapshots()):
            if len(held) == len(wanted):
                break
            if not isinstance(keys, SnapstoreError):
                held |= {wanted[key] for key in keys & wanted.keys()}
        there = self._store.sizes([pack_key(name) for name in held]) if held else {}
        return {name for name in held if pack_key(name) in there}

    def _planned(self, snapshot: Snapshot, usable: set[str]) -> list[_Part]:
        """What is to become of a snapshot's manifests; every new chain has been rebuilt from where it lies now."""
        parts = self._parts(snapshot)
        for part in parts:
            m = part.manifest
            table, names = m.table, m.header.pack_names
            within, lost = self._packs.within(m), self._packs.lost(m)
            ways: dict[int, Iterator[Chain]] = {}
            for row in lost_rows(m, within).tolist():
                refs = range(int(table.starts[row]), int(table.starts[row + 1]))
                bad = next((i for i, ref in enumerate(refs) if lost[ref]), None)
                chain = _chain(table, names, refs)
                ways[row] = iter([chain]) if bad is None else self._ways(chain, bad, usable)
                if bad is not None:
                    part.without.add(row)
            left = list(ways)
            while left:
                for row in left:
                    part.chains[row] = next(ways[row], [])
                    if not part.chains[row]:
                        del part.chains[row]
                        part.lost.add(row)
                tried = [row for row in left if row in part.chains]
                work = sum(int(m.table.lengths[row]) * len(part.chains[row]) for row in tried)
                self._budget.spend(work, f"repair of {snapshot.ref}")
                failed = unbuilt(self._context, self._remade(part), tried) if tried else {}
                if lack := next((error for error in failed.values() if isinstance(error, CapabilityError)), None):
                    raise lack
                left = list(failed)
        return parts

    def _ways(self, chain: Chain, bad: int, usable: set[str]) -> Iterator[Chain]:
        """Chains that do without a bad blob: from some reference on, another one that gives the same digest."""
        for first in range(bad, -1, -1):
            for other in self._chains.get(chain[first].digest, ()):
                if all(ref.pack in usable or self._is_bad(ref) for ref in other) and first + len(other) <= MAX_CHAIN:
                    yield chain[:first] + other

    def _remade(self, part: _Part) -> Manifest:
        """The manifest with its new chains."""
        m = part.manifest
        rows = np.array(sorted(part.chains), np.int64)
        chains = [part.chains[row] for row in rows.tolist()]
        refs = list(itertools.chain.from_iterable(chains))
        numbers = {name: number for number, name in enumerate(m.header.pack_names)}
        counts = np.array([len(chain) for chain in chains], np.int64)
        columns: dict[str, object] = {
            "digests": m.table.digests[rows], "ref_counts": counts, "ref_kinds": [ref.kind for ref in refs],
            "ref_packs": [numbers.setdefault(ref.pack, len(numbers)) for ref in refs],
            "ref_offsets": [ref.offset for ref in refs], "ref_lengths": [ref.length for ref in refs],
            "ref_digests": np.frombuffer(b"".join(ref.digest for ref in refs), np.uint8).reshape(-1, 16),
            "ref_starts": np.zeros(len(refs)), "ref_sizes": np.repeat(m.table.lengths[rows], counts),
        }  # fmt: skip
        new = ChunkTable(**{name: np.asarray(columns[name], dtype) for name, (dtype, _) in COLUMNS.items()})
        order = np.arange(len(m.table))
        order[rows] = len(m.table) + np.arange(len(rows))
        table = ChunkTable.concatenate([m.table, new]).take(order)
        used, ref_packs = np.unique(table.ref_packs, return_inverse=True)
        table.ref_packs = ref_packs.astype(np.uint32)
        names = list(numbers)
        packs = [names[number] for number in used.tolist()]
        header = msgspec.structs.replace(
            m.header, packs=bytes.fromhex("".join(packs)), refs=len(table.ref_kinds),
            pack_sizes=np.array([self._sizes[name] for name in packs], "<u8").tobytes(),
            depth=int(table.depths.max(initial=0)),
        )  # fmt: skip
        return Manifest(header, m.tree, m.tensors, m.inline, table)

    def _rewritten(self, ruling: Snapshot) -> Healing:
        """New packs, new manifests and the next revision; nothing, if they would change nothing.

        Raises:
            ConflictError: the revision is taken, or a gc has given this session up; nothing was changed.
        """
        key = record_key(ruling.run, ruling.step, ruling.id, ruling.revision + 1)
        with Claim(self._context, key, "repair", lambda _: ruling.revised()) as claim:
            marked = claim.marked()
            view = self._index.refresh()
            now = view.get(ruling.id)
            if now is None or now.key != ruling.key:
                raise ConflictError("another process has revised it")
            held = set() if marked is None else {name for name in self._held(view) if pack_key(name) not in marked}
            parts = self._planned(ruling, held)
            done = self._healing(ruling, parts)
            if not done.changes:
                return done
            copier = _Copier(claim, self._pack_bytes)
            copies = {place: ref for place, ref in self._copies.items() if ref.pack in held}
            refs = {ref.sha256: ref for ref in ruling.manifests}
            headers: dict[str, bytes] = {}
            sizes: dict[str, int] = {}  # of new manifests
            depth = grown = 0
            for part in parts:
                if not part.chains:
                    continue
                bad = self._to_copy(part)
                copies |= copier.copy(part.manifest, [ref for place, ref in bad.items() if place not in copies])
                self._sizes.update(copier.sizes)
                for row, chain in part.chains.items():
                    part.chains[row] = [copies.get((ref.pack, ref.offset), ref) for ref in chain]
                ref, data = _encoded(claim, part.ref, self._remade(part))
                put_once(claim, ref.key, data)
                sizes[ref.key] = len(data)
                refs[part.ref.sha256], headers[ref.sha256] = ref, manifest.header_bytes(data)
                grown += ref.size_bytes - part.ref.size_bytes
                depth = max(depth, manifest.decode_header(data, ref.key).depth)
            claim.confirm(sizes | {pack_key(name): size for name, size in copier.sizes.items()})
            claim.heartbeat()
            done.snapshot = ruling.revised(
                manifests=list(refs.values()), depth=max(depth, ruling.depth),
                stored_bytes=max(0, ruling.stored_bytes + grown + sum(copier.sizes.values())),
            )  # fmt: skip
            claim.publish(done.snapshot)
        self._index.add(done.snapshot, headers)
        self._copies |= copies
        return done


class _Copier:
    """Copies intact blobs out of damaged packs into new ones of a session.

    Attributes:
        sizes: of the new packs, by name.
    """

    def __init__(self, claim: Claim, pack_bytes: int) -> None:
        self._store, self._claim, self._pack_bytes = claim.store, claim, pack_bytes
        self.sizes: dict[str, int] = {}

    def copy(self, m: Manifest, refs: Iterable[_Ref]) -> dict[tuple[str, int], _Ref]:
        """Blobs of one part; where each lies now, durable on return."""
        copies: dict[tuple[str, int], _Ref] = {}
        held: list[tuple[_Ref, int]] = []
        writer: PackWriter | None = None

        def put() -> None:
            nonlocal writer
            if writer is None:
                return
            data = bytes(writer.seal())
            name = hashlib.sha256(data).hexdigest()
            put_once(self._claim, pack_key(name), data)
            self.sizes[name] = len(data)
            copies.update(
                {(r.pack, r.offset): _Ref(r.kind, name, offset, r.length, r.digest) for r, offset in held}
            )  # fmt: skip
            held.clear()
            writer = None
            self._claim.heartbeat()

        for ref in sorted(refs, key=lambda ref: (ref.pack, ref.offset)):
            where = f"{pack_key(ref.pack)} at {ref.offset}"
            (data,) = self._store.get_ranges(pack_key(ref.pack), [(ref.offset, ref.length)])
            if blob.parse(data, where).digest != ref.digest:
                raise IntegrityError(f"{where}: another blob than a moment ago")
            if writer is None:
                writer = PackWriter(
                    bytes.fromhex(self._claim.id), m.header.rank, len(self.sizes), m.header.part,
                    made_for=self._claim.made_for,
                )  # fmt: skip
            (offset,) = writer.extend(_Stored(data), 0, 1).tolist()
            held.append((ref, offset))
            if writer.size_bytes >= self._pack_bytes:
                put()
        put()
        return copies


class _Stored:
    """One blob; see `pack.Encoded`."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.entries = np.frombuffer(blob.entry(data, 0), ENTRY)

    def copy(self, first: int, last: int, out: Bytes) -> Callable[[], object]:
        """Copy it, padded, at once."""
        out[: len(self._data)] = np.frombuffer(self._data, np.uint8)
        out[len(self._data) :] = 0
        return lambda: None


def _chain(table: ChunkTable, names: Sequence[str], refs: range) -> Chain:
    return [
        _Ref(
            int(table.ref_kinds[ref]), names[table.ref_packs[ref]], int(table.ref_offsets[ref]),
            int(table.ref_lengths[ref]), table.ref_digests[ref].tobytes(),
        )
        for ref in refs
    ]  # fmt: skip


def _encoded(claim: Claim, ref: ManifestRef, m: Manifest) -> tuple[ManifestRef, bytes]:
    """A manifest of this session."""
    data = manifest.encode(
        save_id=bytes.fromhex(claim.id), rank=m.header.rank, sequence=m.header.sequence, part=m.header.part,
        chunk_bytes=m.header.chunk_bytes, digest_seed=m.header.digest_seed, tree=m.tree, tensors=m.tensors,
        inline=m.inline, table=m.table, packs=m.header.pack_names, pack_sizes=m.header.pack_size_list,
        logical_bytes=m.header.logical_bytes,
        made_for=claim.made_for,
    )  # fmt: skip
    manifest.decode(data, ref.key)  # what no reader would take is not published
    return manifest.ref_of(data), data
