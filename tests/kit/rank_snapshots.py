"""Snapshots of several ranks, written straight into a store: packs, child manifests, roots and a record, all valid.

`RankWriter(store).save(state, world=3)` needs no ranks and no save path. It stores each array in boxes, which `rows`,
`columns`, `strided` or any function of (shape, rank, world) give. Chunks that an earlier save of the writer has stored
are referred to; others become deltas to the chunk at the same place of the last save. `manifests_of` reads all
manifests of a snapshot back, and `assembled` puts the arrays together from their boxes alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kit.forge import difference, forge_blob
from snapstore.catalog.needed_keys import all_manifests
from snapstore.chunks.reader import ChunkReader, whole
from snapstore.engine.cpu import EncodedChunk, HostEncoded
from snapstore.errors import AlreadyExistsError
from snapstore.format import hashing, records
from snapstore.format.blobs import pack
from snapstore.format.keys import manifest_key, pack_key
from snapstore.format.manifests import boxes, manifest
from snapstore.format.manifests.chunk_table import ChunkTable
from snapstore.format.manifests.delta_chain import Link, Place, table_of
from snapstore.format.manifests.manifest import Box, Manifest, ManifestContents, TensorEntry
from snapstore.format.manifests.rank_checks import entries_by_path, match_entries
from snapstore.format.records import RANKS, Config, ManifestRef, Snapshot
from snapstore.storage.base import ObjectStore

BoxSpec = tuple[tuple[int, ...], tuple[int, ...]]
Cutter = Callable[[tuple[int, ...], int, int], list[BoxSpec]]
State = Mapping[str, Mapping[str, np.ndarray]]
#: Boxes smaller than this lie inline.
INLINE_BYTES = 256


def _share(size: int, rank: int, world: int) -> tuple[int, int]:
    """Return (start, size) of a rank's share of a dimension, as torch.chunk cuts it."""
    step = -(-size // world)
    start = min(rank * step, size)
    return start, min(start + step, size) - start


def rows(shape: tuple[int, ...], rank: int, world: int) -> list[BoxSpec]:
    """Cut as Shard(0) does; a scalar is rank 0's."""
    if not shape:
        return [((), ())] if rank == 0 else []
    start, size = _share(shape[0], rank, world)
    return [((start, *(0 for _ in shape[1:])), (size, *shape[1:]))] if size and math.prod(shape) else []


def columns(shape: tuple[int, ...], rank: int, world: int) -> list[BoxSpec]:
    """Cut as Shard(1) does; an array of fewer than two dimensions as `rows` does."""
    if len(shape) < 2:
        return rows(shape, rank, world)
    start, size = _share(shape[1], rank, world)
    return [((0, start, *(0 for _ in shape[2:])), (shape[0], size, *shape[2:]))] if size and math.prod(shape) else []


def strided(shape: tuple[int, ...], rank: int, world: int) -> list[BoxSpec]:
    """Give every world-th pair of rows to a rank, each a box of its own."""
    if not shape:
        return rows(shape, rank, world)
    starts = range(2 * rank, shape[0], 2 * world)
    rest = (*(0 for _ in shape[1:]),)
    return [((at, *rest), (min(2, shape[0] - at), *shape[1:])) for at in starts] if math.prod(shape) else []


@dataclass
class _Child:
    """The child manifest of one part and rank while it is made."""

    entries: list[TensorEntry] = field(default_factory=list)
    chains: list[list[Link]] = field(default_factory=list)
    inline: bytearray = field(default_factory=bytearray)


class RankWriter:
    """Writes snapshots of several ranks into a store that holds a repository.

    Args:
        max_depth: the most deltas in a chain.
    """

    def __init__(self, store: ObjectStore, *, max_depth: int = 3) -> None:
        self.store, self.max_depth = store, max_depth
        config = records.decode(store.get("config"), Config, "config")
        self.chunk_bytes, self.seed = config.chunk_bytes, config.digest_seed
        self._chains: dict[bytes, list[Link]] = {}
        self._data: dict[bytes, np.ndarray] = {}
        self._last: dict[tuple[Any, ...], bytes] = {}  # (part, name, strip, place) -> digest
        self.sizes: dict[str, int] = {}
        self.seq = -1

    def save(
        self,
        state: State,
        *,
        world: int = 2,
        step: int = 0,
        cut: Cutter = rows,
        own: Mapping[str, Sequence[Any]] | None = None,
        changes: Callable[[ManifestContents], ManifestContents] = lambda contents: contents,
        **record: Any,
    ) -> Snapshot:
        """Commit a snapshot run@step.

        Args:
            state: part -> name -> array. The part "" names the others.
            own: part -> for each rank a plain value that is its own; key "own" of the part.
            changes: is applied to every manifest before it is written.
        """
        save_id, own = records.new_id(), own or {}
        refs, self.seq = [], self.seq + 1
        for part in state:
            children = []
            for rank in range(world):
                child = _Child()
                self._add(child, save_id, part, rank, state[part], lambda shape, r=rank: cut(shape, r, world))
                tree = ["own", [own[part][rank]]] if part in own else None
                if child.entries or tree:
                    contents = self._contents(save_id, rank, part, child, tree, world)
                    children.append(self.put_manifest(changes(contents)))
            refs.append(self.put_manifest(changes(self._root(save_id, part, state, own, children, world))))
        return self.commit(save_id, refs, step=step, **record)

    def commit(self, save_id: str, refs: Sequence[ManifestRef], **changes: Any) -> Snapshot:
        """Create the record of some root manifests."""
        headers = [manifest.decode_header(self.store.get(ref.key), ref.key) for ref in refs]
        fields: dict[str, Any] = {
            "id": save_id, "run": "ranks", "step": 0, "seq": self.seq, "state": "committed",
            "write_id": records.new_id(), "manifests": list(refs), "features": [RANKS], "created": 1.7e9,
            "logical_bytes": sum(ref.logical_bytes for ref in refs), "depth": max(h.depth for h in headers),
        }  # fmt: skip
        snapshot = Snapshot(**(fields | changes))
        self.store.put(snapshot.key, records.encode(snapshot))
        return snapshot

    def put_manifest(self, contents: ManifestContents) -> ManifestRef:
        """Put a manifest, and return its reference; nothing checks it."""
        data = manifest.encode(contents)
        head = data[: 24 + int.from_bytes(data[12:16], "little")]
        name = hashlib.sha256(data).hexdigest()
        with suppress(AlreadyExistsError):
            self.store.put(manifest_key(name), data)
        return ManifestRef(
            part=contents.part, rank=contents.rank, sha256=name, header_sha256=hashlib.sha256(head).hexdigest(),
            size_bytes=len(data), logical_bytes=contents.logical_bytes,
        )  # fmt: skip

    # -- one part of one rank

    def _add(
        self,
        child: _Child,
        save_id: str,
        part: str,
        rank: int,
        arrays: Mapping[str, np.ndarray],
        boxes_of: Callable[[tuple[int, ...]], list[BoxSpec]],
    ) -> None:
        """Cut arrays into boxes and chunks, and put the pack of the new ones."""
        new: list[tuple[bytes, bytes, list[Link]]] = []  # digest, blob, the chain below it
        digests: list[bytes] = []
        for name, array in arrays.items():
            held, place = [], None
            for offsets, sizes in boxes_of(array.shape):
                view = array[tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))]
                data = np.ascontiguousarray(view).reshape(-1).view(np.uint8)
                if data.size < INLINE_BYTES:
                    at, size = place or (len(child.inline), 0)
                    place, child.inline = (at, size + data.size), child.inline + data.tobytes()
                    held.append(Box(tuple(offsets), tuple(sizes), len(digests), 0))
                    continue
                start = boxes.strip_start(offsets, sizes, array.itemsize)
                lengths = boxes.cut(start, data.size, self.chunk_bytes).tolist()
                held.append(Box(tuple(offsets), tuple(sizes), len(digests), len(lengths)))
                at = 0
                for length in lengths:
                    strip = part, name, offsets[1:], sizes[1:], start + at
                    digests.append(self._chunk(data[at : at + length], strip, new))
                    at += length
            if held:
                path = [part, name] if part else [name]
                form = (tuple(path), "array", array.dtype.str, array.shape, False, None)
                child.entries.append(TensorEntry(*form, tuple(held), place))
        self._put_pack(save_id, rank, part, new)
        child.chains = [self._chains[digest] for digest in digests]

    def _chunk(self, chunk: np.ndarray, strip: tuple[Any, ...], new: list[tuple[bytes, bytes, list[Link]]]) -> bytes:
        """Return the digest of a chunk; a new one becomes a blob in `new`."""
        digest = hashing.digest(chunk, self.seed)
        base = self._last.get(strip)
        self._last[strip] = digest
        if digest in self._chains:
            return digest
        self._data[digest] = chunk.copy()
        below = self._chains.get(base, []) if base else []
        if base and below and len(below) <= self.max_depth and self._data[base].size == chunk.size:
            blob = forge_blob(difference(chunk, self._data[base]), digest, base)
        else:
            blob, below = forge_blob(chunk, digest, None), []
        self._chains[digest] = [Link(int(bool(below)), digest, chunk.size, None, digest), *below]
        new.append((digest, blob, below))
        return digest

    def _put_pack(self, save_id: str, rank: int, part: str, new: Sequence[tuple[bytes, bytes, list[Link]]]) -> None:
        if not new:
            return
        writer = pack.PackWriter(bytes.fromhex(save_id), rank, 0, part)
        made = [EncodedChunk(memoryview(bytearray(blob)), False, np.empty(0, np.uint8)) for _, blob, _ in new]
        offsets = writer.extend(HostEncoded.of(made), 0, len(made)).tolist()
        data = bytes(writer.seal())
        name = hashlib.sha256(data).hexdigest()
        self.store.put(pack_key(name), data)
        self.sizes[name] = len(data)
        places = {
            digest: Place(name, offset, len(blob)) for (digest, blob, _), offset in zip(new, offsets, strict=True)
        }
        for digest, _, _ in new:
            self._chains[digest] = [
                Link(link.kind, link.digest, link.size, link.place or places[link.key], b"")
                for link in self._chains[digest]
            ]

    def _contents(self, save_id: str, rank: int, part: str, child: _Child, tree: Any, world: int) -> ManifestContents:
        numbers: dict[str, int] = {}
        table = table_of(child.chains, numbers) if child.chains else ChunkTable.empty()
        return ManifestContents(
            save_id=bytes.fromhex(save_id), rank=rank, sequence=0, part=part, chunk_bytes=self.chunk_bytes,
            digest_seed=self.seed, tree=tree, tensors=child.entries, inline=bytes(child.inline), table=table,
            packs=list(numbers), pack_sizes=[self.sizes[name] for name in numbers], features=[RANKS],
            world_size=world, logical_bytes=int(table.lengths.sum(dtype=np.int64)) + len(child.inline),
        )  # fmt: skip

    def _root(
        self,
        save_id: str,
        part: str,
        state: State,
        own: Mapping[str, Sequence[Any]],
        children: Sequence[ManifestRef],
        world: int,
    ) -> ManifestContents:
        headers = [manifest.decode_header(self.store.get(child.key), child.key) for child in children]
        names = list(state[part])
        nodes: list[Any] = [["array", number] for number in range(len(names))]
        entries = [
            TensorEntry((part, name) if part else (name,), "array", a.dtype.str, tuple(a.shape), False, None, (), None)
            for name, a in state[part].items()
        ]
        if part in own:
            names, nodes = [*names, "own"], [*nodes, ["rank", 0]]
        if not part:
            others = [name for name in state if name]
            names, nodes = [*others, *names], [*(["part", name] for name in others), *nodes]
        return ManifestContents(
            save_id=bytes.fromhex(save_id), rank=0, sequence=2 if part else 1, part=part, chunk_bytes=self.chunk_bytes,
            digest_seed=self.seed, tree=["dict", names, nodes], tensors=entries, inline=b"",
            table=ChunkTable.empty(),
            packs=(packs := list(dict.fromkeys(name for header in headers for name in header.pack_names))),
            pack_sizes=[self.sizes[name] for name in packs], features=[RANKS], world_size=world,
            children=list(children), logical_bytes=sum(child.logical_bytes for child in children),
            depth=max((header.depth for header in headers), default=0),
        )  # fmt: skip


def manifests_of(store: ObjectStore, snapshot: Snapshot) -> list[tuple[ManifestRef, Manifest]]:
    """Return all manifests of a snapshot, each root before its children."""
    return list(all_manifests(snapshot, lambda ref: manifest.read(store, ref, None)))


def assembled(context: Any, snapshot: Snapshot) -> dict[str, dict[str, np.ndarray]]:
    """Return part -> name -> array of a snapshot of several ranks, from the boxes of its children."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for ref in snapshot.manifests:
        root = manifest.read(context.store, ref, None)
        arrays = {str(e.path[-1]): np.zeros(e.shape, e.dtype) for e in root.tensors}
        for child in (manifest.read(context.store, ref, None) for ref in root.header.children):
            for entry, number in match_entries(entries_by_path(root), child.tensors):
                for (offsets, sizes), data in _box_data(context, child, entry) if number is not None else ():
                    room = tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))
                    arrays[str(entry.path[-1])][room] = data.view(entry.dtype).reshape(sizes)
        found[ref.part] = arrays
    return found


def _box_data(context: Any, m: Manifest, entry: TensorEntry) -> Iterator[tuple[BoxSpec, np.ndarray]]:
    """Yield the boxes of an entry with their bytes."""
    at = entry.inline[0] if entry.inline else 0
    for box in entry.boxes:
        nbytes = math.prod(box.sizes) * np.dtype(entry.dtype).itemsize
        if not box.chunks:
            yield (tuple(box.offsets), tuple(box.sizes)), np.frombuffer(m.inline, np.uint8, nbytes, at)
            at += nbytes
            continue
        chunks = []
        for row in range(box.first_chunk, box.first_chunk + box.chunks):
            chunks.append(np.empty(int(m.table.lengths[row]), np.uint8))
            for _ in ChunkReader(context).rebuild([whole(m.table, m.header.pack_names, row, chunks[-1])]):
                pass
        yield (tuple(box.offsets), tuple(box.sizes)), np.concatenate(chunks)
