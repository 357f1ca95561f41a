"""Moving: write one snapshot of another repository into packs and manifests of this one, blob by blob.

In: the manifests of a snapshot in its source, and the chunks that the destination has (`Bases`). Out: durable packs and
manifests in the destination, with the same content. Blobs are copied as they are stored. The source's packs are read
whole and compared with the SHA-256 in their names; every blob is parsed, and compared with the reference in its
manifest. A chunk that a base has is only referenced, as in a save, and so is the rest of its chain.

These hashes and names only say that the blobs are those of the source. `verify` shows that they are the chunks of their
digests: it rebuilds each chunk of which a blob was copied from the source's blobs, and compares the digests of all
chunks of its chain. Then the chunk is right on the chain in the destination too, whose older blobs were proven before.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
import numpy as np

from ..arrays import Column
from ..catalog.read_twice import read_object_twice
from ..check.damaged_packs import DamagedPacks
from ..check.verify_chunks import ChunkRebuilder, tensor_of
from ..chunks.uploader import PackUploader
from ..context import Context
from ..errors import DAMAGE, CapabilityError, FormatError, IntegrityError, NotFoundError
from ..format.blobs import blob
from ..format.hashing import keyed_checksum
from ..format.keys import pack_key
from ..format.manifests import manifest
from ..format.manifests.chunk_table import COLUMNS, ChunkTable, spans
from ..format.manifests.delta_chain import digest_strings
from ..format.manifests.manifest import Manifest
from ..format.records import ManifestRef
from ..rewrite.stored_blobs import batches, stored_of
from ..save.known_chunks import AnySession, Bases
from ..save.manifest_writer import Written
from ..storage import progress
from ..storage.base import ObjectStore
from ..text import strip_hint
from ..threads import Threads

#: The most packs of the source that are read ahead while others are put, and the most bytes of these packs.
READ_AHEAD, READ_AHEAD_BYTES = 4, 128 * 1024 * 1024
#: About so many bytes are decoded between two heartbeats of a copy.
VERIFIED_AT_ONCE_BYTES = 256 * 1024 * 1024
#: A place is (pack << OFFSET_BITS) + offset: packs are smaller, since they are read whole.
OFFSET_BITS = 40
#: Columns of a chunk table with a row for each reference.
_PER_REF = tuple(name for name in COLUMNS if name.startswith("ref_") and name != "ref_counts")


@dataclass(slots=True)
class _ManifestCopy:
    """A manifest that is being copied.

    Attributes:
        refs: (k,) references of the new chains, in order: a number below the manifest's number of references is one of
            the manifest's own; a higher one, less that number, is one of the bases.
        counts: (n,) number of references of each chunk.
        own: (j,) the references in `refs` that are the manifest's own; their blobs are copied.
        keys: (j,) the places of these blobs in the source.
        is_child: whether a root before it names it as a child.
    """

    ref: ManifestRef
    manifest: Manifest
    refs: Column
    counts: Column
    own: Column
    keys: Column
    is_child: bool = False


@dataclass(slots=True)
class Moved:
    """The objects that a copy has put.

    Attributes:
        top: the manifests that the record names.
        below: the children of roots, if several ranks have saved the snapshot.
        sizes: size of every object put, by key [bytes].
        read_bytes: bytes read of packs and manifests of the source.
        blobs: number of blobs copied.
    """

    top: Written = field(default_factory=Written)
    below: Written = field(default_factory=Written)
    sizes: dict[str, int] = field(default_factory=dict)
    read_bytes: int = 0
    blobs: int = 0


def move(
    context: Context,
    session: AnySession,
    source: Context,
    manifests: Sequence[tuple[ManifestRef, Manifest]],
    bases: Bases,
    *,
    verify: bool = True,
) -> Moved:
    """Copy the blobs of one snapshot, and write its manifests; all of it is durable on return.

    Args:
        context: the destination.
        source: the repository with the packs of the manifests.
        manifests: of the snapshot: each root, then its children.
        bases: the chunks of the destination that may be referenced.
        verify: rebuild each chunk of which a blob was copied, before the manifests are written.

    Raises:
        IntegrityError, FormatError: a pack of the source is missing or damaged, or contradicts a manifest; the error
            names it. Or a chunk is not that of its digest.
        CapabilityError: this machine cannot rebuild a chunk.
        UnreadObjectError: the source withholds a pack, though it answers.
        StorageError: one of the stores failed.
    """
    chunk_bytes = max((m.header.chunk_bytes for _, m in manifests), default=0)
    packs = PackUploader(session, context.options.pack_bytes, chunk_bytes)
    prover = replace(source, engines=context.engines) if verify else None  # saves of the source wait for its engines
    mover = _Mover(context, session, source.store, bases, packs, prover)
    try:
        mover.move_blobs(manifests)
        mover.verify()
        mover.write_manifests()
    finally:
        packs.close()
        for buffer in packs.idle:
            context.engines.cpu.give_back(buffer)
    return mover.moved


class _Known:
    """The references of the bases, to be found by digest."""

    def __init__(self, bases: Bases) -> None:
        table = bases.table
        rows = np.repeat(np.arange(len(table)), table.ref_counts)
        refs = np.flatnonzero(bases.usable[rows]) if len(rows) else np.zeros(0, np.int64)
        keys = digest_strings(table.ref_digests[refs])
        order = np.argsort(keys, kind="stable")
        self._refs, self._keys = refs[order], keys[order]
        self._lengths, self._ends = table.lengths[rows], table.starts[1:][rows]

    def cuts(self, table: ChunkTable) -> tuple[Column, Column, Column]:
        """Find, for each chain of another repository, the first link that the bases have too.

        From there on the new chain uses the chain in the bases, if that has no more links than the rest of the old
        chain: so no restore takes longer than in the source.

        Returns:
            For each chunk: (number of links of its own, first reference of the bases after them, number of these).
        """
        own = table.ref_counts.astype(np.int64)
        none = np.zeros(len(table), np.int64)
        if not len(self._keys) or not len(table):
            return own, none, none
        wanted = digest_strings(table.ref_digests)
        at = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        refs = self._refs[at]
        rows = np.repeat(np.arange(len(table)), own)
        numbers = np.arange(len(wanted))
        follow = self._ends[refs] - refs
        fits = (self._keys[at] == wanted) & (self._lengths[refs] == table.lengths[rows])
        fits &= follow <= table.starts[1:][rows] - numbers
        first = np.minimum.reduceat(np.where(fits, numbers, len(wanted)), table.starts[:-1])
        found = np.flatnonzero(first < len(wanted))
        base, count = none.copy(), none.copy()
        base[found], count[found] = refs[first[found]], follow[first[found]]
        own[found] = first[found] - table.starts[found]
        return own, base, count


class _Mover:
    """Copies one snapshot."""

    def __init__(
        self,
        context: Context,
        session: AnySession,
        source: ObjectStore,
        bases: Bases,
        packs: PackUploader,
        prover: Context | None,
    ) -> None:
        self._context, self._session, self._source, self._bases, self._packs = context, session, source, bases, packs
        self._prover = prover
        self.moved = Moved()
        self._parts: list[_ManifestCopy] = []
        self._names: dict[str, int] = {}  # packs of the source
        self._sizes: list[int] = []
        self._keys = self._places = np.zeros(0, np.int64)  # of all blobs: their places in the source, and here
        self._checksums = np.zeros(0, np.uint64)  # of all blobs, as they were copied

    # -- blobs

    def move_blobs(self, manifests: Sequence[tuple[ManifestRef, Manifest]]) -> None:
        """Copy the blobs that the destination lacks; pack each with other blobs of a manifest that needs it."""
        known = _Known(self._bases)
        children: set[str] = set()
        for ref, m in manifests:
            self._parts.append(self._part(ref, m, known))
            self._parts[-1].is_child = ref.sha256 in children
            children.update(child.sha256 for child in m.header.children)
        self.moved.read_bytes = sum(ref.size_bytes for ref, _ in manifests)
        joined = np.concatenate([part.keys for part in self._parts] or [np.zeros(0, np.int64)])
        self._keys, firsts = np.unique(joined, return_index=True)
        self._places, self._checksums = np.zeros(len(self._keys), np.int64), np.zeros(len(self._keys), np.uint64)
        ends = np.cumsum([len(part.keys) for part in self._parts])
        of = np.searchsorted(ends, firsts, "right")
        names = list(self._names)
        self._require_packs(names, np.unique(self._keys >> OFFSET_BITS).tolist())
        self._require_decodable()
        with Threads(READ_AHEAD) as readers:
            for number, part in enumerate(self._parts):
                chosen = np.flatnonzero(of == number)
                if not len(chosen):
                    continue
                self._packs.begin(part.manifest.header.rank, part.manifest.header.part)
                refs = part.own[firsts[chosen] - (ends[number] - len(part.keys))]
                groups = self._keys[chosen] >> OFFSET_BITS
                for pack, data in self._read_packs(np.unique(groups).tolist(), names, readers):
                    self.moved.read_bytes += len(data)
                    progress.advance(len(data))
                    here = groups == pack
                    self._move(part.manifest.table, refs[here], chosen[here], data, pack_key(names[pack]))
                    self._session.heartbeat()
        self._packs.seal()
        self._packs.finish()
        self.moved.blobs = len(self._keys)
        self.moved.sizes = dict(zip(map(pack_key, self._packs.names), self._packs.sizes, strict=True))

    def _require_decodable(self) -> None:
        """Try to rebuild one chunk before the first put: a machine that lacks the codec would put all blobs in vain.

        Raises:
            CapabilityError: this machine cannot rebuild it.
        """
        if self._prover is None:
            return
        for part in [part for part in self._parts if len(part.own)][:1]:
            rows, none = _rows_of(part)[:1], np.zeros(len(part.manifest.table.ref_kinds), np.uint64)
            with suppress(*DAMAGE):  # found again once the packs have been compared with their names
                rebuilder = ChunkRebuilder(self._prover, None)
                read_object_twice(self._source, partial(_require_proven, rebuilder, part, rows, none))

    def verify(self) -> None:
        """Rebuild the chunks of which a blob was copied; compare the digests of all chunks of their chains.

        Raises:
            IntegrityError: a chunk cannot be rebuilt, or is not that of its digest, by two reads.
            CapabilityError: this machine cannot rebuild one.
        """
        if self._prover is None:
            return
        rebuilder = ChunkRebuilder(self._prover, None)
        for part in self._parts:
            table, rows = part.manifest.table, _rows_of(part)
            ends = np.cumsum(table.lengths[rows] * table.ref_counts[rows].astype(np.int64))
            checksums = np.zeros(len(table.ref_kinds), np.uint64)
            checksums[part.own] = self._checksums[np.searchsorted(self._keys, part.keys)]
            for some in np.split(rows, np.flatnonzero(np.diff(ends // VERIFIED_AT_ONCE_BYTES)) + 1):
                read_object_twice(self._source, partial(_require_proven, rebuilder, part, some, checksums))
                self._session.heartbeat()

    def _require_packs(self, names: Sequence[str], packs: Sequence[int]) -> None:
        """Look before the first put whether the source has the packs: a copy that fails leaves what it has put.

        Raises:
            IntegrityError: one is missing, or damaged.
        """
        found = self._source.sizes([pack_key(names[n]) for n in packs])
        for n in packs:
            if found.get(pack_key(names[n])) != self._sizes[n]:
                self._pack_of(names[n], self._sizes[n])  # raises, unless the answer was wrong

    def _part(self, ref: ManifestRef, m: Manifest, known: _Known) -> _ManifestCopy:
        """Choose, for each chunk, the links of its chain that are copied, and the links of the bases that follow."""
        table = m.table
        own, base, follow = known.cuts(table)
        starts, counts = np.empty(2 * len(table), np.int64), np.empty(2 * len(table), np.int64)
        starts[0::2], starts[1::2] = table.starts[:-1], len(table.ref_kinds) + base
        counts[0::2], counts[1::2] = own, follow
        refs = spans(starts, counts)
        moved = refs[refs < len(table.ref_kinds)]
        for name, size in m.own_packs.items():
            if size >> OFFSET_BITS:
                raise FormatError(f"{ref.key}: {pack_key(name)} of {size} bytes; no snapstore writes such a pack")
            if self._names.setdefault(name, len(self._names)) == len(self._sizes):
                self._sizes.append(size)
        numbers = np.array([self._names.get(name, 0) for name in m.header.pack_names] or [0], np.int64)
        keys = (numbers[table.ref_packs[moved]] << OFFSET_BITS) + table.ref_offsets[moved].astype(np.int64)
        return _ManifestCopy(ref, m, refs, own + follow, moved, keys)

    def _read_packs(self, packs: Sequence[int], names: Sequence[str], readers: Threads) -> Iterator[tuple[int, bytes]]:
        """Yield (number, bytes) of packs of the source; read some packs ahead."""
        ahead: deque[tuple[int, Callable[[], list[bytes]]]] = deque()
        for pack in packs:
            while ahead and (
                len(ahead) >= READ_AHEAD
                or sum(self._sizes[other] for other, _ in ahead) + self._sizes[pack] > READ_AHEAD_BYTES
            ):
                number, read = ahead.popleft()
                yield number, read()[0]
            ahead.append((pack, readers.start(lambda n: self._pack_of(names[n], self._sizes[n]), [pack])))
        for number, read in ahead:
            yield number, read()[0]

    def _pack_of(self, name: str, size_bytes: int) -> bytes:
        return read_object_twice(self._source, lambda: self._read_pack(name, size_bytes))

    def _read_pack(self, name: str, size_bytes: int) -> bytes:
        """Read a pack of the source, and compare it with its name.

        Raises:
            IntegrityError: it is missing, or damaged.
        """
        key = pack_key(name)
        try:
            data = self._source.get(key, limit_bytes=size_bytes)
        except NotFoundError as error:
            raise IntegrityError(f"{strip_hint(error)}: a pack is missing; run 'snapstore check' there") from error
        except FormatError as error:
            raise IntegrityError(f"{key} in {self._source.url}: larger than the {size_bytes} bytes recorded") from error
        if len(data) != size_bytes or (got := hashlib.sha256(data).hexdigest()) != name:
            found = f"{len(data)} bytes" if len(data) != size_bytes else f"bytes with the SHA-256 {got}"
            raise IntegrityError(
                f"{key} in {self._source.url}: expected {size_bytes} bytes with the SHA-256 in its name, got {found}: "
                "the pack is damaged; run 'snapstore check --read-data' there"
            )
        return data

    def _move(self, table: ChunkTable, refs: Column, chosen: Column, data: bytes, where: str) -> None:
        """Pack some blobs of one pack of the source.

        Args:
            table, refs: the references to them, (n,).
            chosen: their positions among all blobs, (n,).
            data: the bytes of the pack.
            where: its key, for errors.
        """
        rows = np.searchsorted(table.starts, refs, "right") - 1
        stored, engine = memoryview(data), self._context.engines.cpu
        for batch in batches(table.ref_lengths[refs], engine):
            found = []
            for ref, row in zip(refs[batch].tolist(), rows[batch].tolist(), strict=True):
                offset = int(table.ref_offsets[ref])
                one = stored[offset : offset + int(table.ref_lengths[ref])]
                _compare(blob.parse(one, f"{where} at {offset}"), table, ref, row, f"{where} at {offset}")
                found.append(one)
            self._checksums[chosen[batch]] = [keyed_checksum(one) for one in found]
            numbers, offsets = self._packs.add(stored_of(found), engine)
            self._places[chosen[batch]] = (numbers << OFFSET_BITS) + offsets

    # -- manifests

    def write_manifests(self) -> None:
        """Put the manifests, children before their roots; put their list if some belong to other snapshots."""
        puts: list[tuple[str, bytes]] = []
        renamed: dict[str, ManifestRef] = {}
        for part in sorted(self._parts, key=lambda part: not part.is_child):
            contents = self._contents(part)
            if part.manifest.header.children:
                contents = self._root(part, contents, renamed)
            written = self.moved.below if part.is_child else self.moved.top
            puts += written.add(self._session, manifest.encode(contents), self._bases.manifests)
            ref = msgspec.structs.replace(written.manifests[-1], unknown=part.ref.unknown)
            written.manifests[-1] = renamed[part.ref.sha256] = ref
        self._packs.put_all(puts + self.moved.top.add_list(self._session))
        self.moved.sizes |= self.moved.below.sizes | self.moved.top.sizes

    def _contents(self, part: _ManifestCopy) -> manifest.ManifestContents:
        """Return the contents of a manifest in the destination."""
        m, bases = part.manifest, self._bases
        columns = {
            name: np.concatenate([getattr(m.table, name), getattr(bases.table, name)])[part.refs] for name in _PER_REF
        }
        is_own = part.refs < len(m.table.ref_kinds)
        places = self._places[np.searchsorted(self._keys, part.keys)]
        numbers, offsets = columns["ref_packs"].astype(np.int64) + len(self._packs.names), columns["ref_offsets"]
        numbers[is_own], offsets[is_own] = places >> OFFSET_BITS, places & ((1 << OFFSET_BITS) - 1)
        used, numbers = np.unique(numbers, return_inverse=True)
        names, sizes = [*self._packs.names, *bases.packs], [*self._packs.sizes, *bases.pack_sizes]
        columns |= {"ref_packs": numbers.astype(np.uint32), "ref_counts": part.counts.astype(np.uint16)}
        return replace(
            manifest.ManifestContents.of(m),
            save_id=bytes.fromhex(self._session.id),
            made_for=self._session.made_for,
            table=replace(m.table, **columns),
            packs=[names[n] for n in used.tolist()],
            pack_sizes=[sizes[n] for n in used.tolist()],
        )

    def _root(
        self, part: _ManifestCopy, contents: manifest.ManifestContents, renamed: dict[str, ManifestRef]
    ) -> manifest.ManifestContents:
        """Return the contents of a root, with the children as they are in the destination and all of their packs."""
        packs = dict(zip(contents.packs, contents.pack_sizes, strict=True))  # its own come first
        depth = int(contents.table.depths.max(initial=0))
        below = self.moved.below.manifests_by_name
        children = [renamed[child.sha256] for child in part.manifest.header.children]
        for child in children:
            header = below[child.sha256].header
            depth = max(depth, header.depth)
            packs.update(zip(header.pack_names, header.pack_size_list, strict=True))
        names, sizes = list(packs), list(packs.values())
        return replace(contents, packs=names, pack_sizes=sizes, children=children, depth=depth)


def _rows_of(part: _ManifestCopy) -> Column:
    """Return the chunks of which a blob is copied, ascending."""
    return np.unique(np.searchsorted(part.manifest.table.starts, part.own, "right") - 1)


def _require_proven(rebuilder: ChunkRebuilder, part: _ManifestCopy, rows: Column, checksums: Column) -> None:
    """Rebuild some chunks of a manifest of the source, from the bytes that were copied: they are read a second time.

    Raises:
        IntegrityError: a chunk cannot be rebuilt, or one of its chain is not that of its digest.
        CapabilityError: this machine cannot rebuild one.
    """
    m = part.manifest
    some = replace(m, table=m.table.take(rows))
    known, packs = checksums[m.table.refs_of(rows)], DamagedPacks(rebuilder.store)
    for row, error in rebuilder.failures(part.ref.key, some, packs, prove=True, checksums=known).items():
        what = tensor_of(m, int(rows[row]))
        if isinstance(error, CapabilityError):
            raise CapabilityError(
                f"{what}: cannot be verified on this machine: {strip_hint(error)}; copy on a machine that can, or "
                "without verification (--no-verify, verify=False)"
            ) from error
        raise IntegrityError(
            f"{what}: its stored bytes are not the content of its digest ({strip_hint(error)}): they are damaged or "
            "forged; nothing of this snapshot was copied; run 'snapstore check --restore' there"
        ) from error


def _compare(header: blob.Header, table: ChunkTable, ref: int, row: int, where: str) -> None:
    """Compare a blob with the reference to it.

    Raises:
        IntegrityError: it is another blob.
    """
    kind = int(table.ref_kinds[ref])
    base = table.ref_digests[ref + 1].tobytes() if kind != blob.FULL else blob.NO_BASE
    got = (header.transform, header.digest, header.base, header.raw_bytes, blob.length_of(header))
    expected = (kind, table.ref_digests[ref].tobytes(), base, int(table.lengths[row]), int(table.ref_lengths[ref]))
    if got != expected:
        raise IntegrityError(f"{where}: the blob does not match the manifest; run 'snapstore check --read-data' there")
