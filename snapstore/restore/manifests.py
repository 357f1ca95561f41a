"""Manifests: read and check the manifests of a record, read the trees that they store, and limit the decoding.

In: a snapshot, or its manifests. Out: manifests, and the parts that they store, each with its whole tree. A tree of
64 KiB or more lies in pages, which are decoded first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..chunks import limits
from ..chunks.reader import ChunkReader, Wanted
from ..context import Context
from ..errors import FormatError
from ..format.manifests import manifest
from ..format.manifests.chunk_table import ChunkTable
from ..format.manifests.manifest import Box, Manifest, TensorEntry, part_name
from ..format.manifests.tensor_layout import check_layouts, spec_of
from ..format.records import Snapshot
from ..state.fill.selection import parts_needed
from ..state.tree.decode import Decoded, unpack_nodes, unpacked_bytes
from ..state.values.classes import Types
from ..state.values.tensors import Node, StoredPart
from ..storage.base import ObjectStore
from ..text import human_bytes, log


def read_manifests(
    store: ObjectStore, digest_seed: int, snapshot: Snapshot, keys: str | Sequence[str] | None = None
) -> list[Manifest]:
    """Read and check the manifests whose parts `keys` can match; return them, the root part first."""
    names = parts_needed([ref.part for ref in snapshot.manifests], keys)
    manifests = [manifest.read(store, ref, digest_seed) for ref in snapshot.manifests if ref.part in names]
    for m in manifests:
        check_layouts(m, part_name(m.header.part))
    return manifests


def stored_parts(context: Context, manifests: Sequence[Manifest], what: str) -> list[StoredPart]:
    """Return the parts that manifests store, each with its whole tree; trees in pages are read.

    Args:
        what: names the snapshot in errors.

    Raises:
        CapabilityError: the pages do not fit into memory, or take more decoding than their stored bytes explain.
        IntegrityError, FormatError: a page is damaged, an entry is no page, or the pages of a tree do not unpack.
    """
    return [part_of(m, tree_of(context, m, what)) for m in manifests]


def tree_of(context: Context, m: Manifest, what: str) -> Node:
    """Return the whole tree of a manifest. Raises as `stored_parts` does."""
    pages = pages_of(m)
    return m.tree if pages is None else unpack_nodes(read_pages(context, m, pages, what))


def part_of(m: Manifest, tree: Node) -> StoredPart:
    """Return the part that a manifest stores, with its whole tree."""
    return StoredPart(m.header.part, tree, [spec_of(entry) for entry in m.tensors])


def decoding_of(what: str, types: Types | None = None) -> Decoded:
    """Return a Decoded that counts the memory of values in large trees, and refuses more than the machine has."""
    pending = 0

    def spend(nbytes: int) -> None:
        nonlocal pending
        pending += nbytes
        if pending >= limits.SMALL_BYTES:
            limits.require_memory(pending, f"{what}: restoring its plain values")
            pending = 0  # taken from here on

    return Decoded(spend, types)


def pages_of(m: Manifest) -> Sequence[TensorEntry] | None:
    """Return the pages of a part's tree; None if it lies in the manifest.

    Raises:
        FormatError: it names entries that are no pages.
    """
    if type(m.tree) is not list or m.tree[:1] != ["pages"]:
        return None
    if [type(field) for field in m.tree] != [str, int, int] or not 0 <= m.tree[1] < m.tree[1] + m.tree[2]:
        raise FormatError(f"{part_name(m.header.part)}: the pages of its tree are not named by two numbers")
    pages = m.tensors[m.tree[1] : m.tree[1] + m.tree[2]]
    if len(pages) != m.tree[2] or any(page.kind != "page" or len(page.boxes) != 1 for page in pages):
        raise FormatError(f"{part_name(m.header.part)}: the pages of its tree are not among its tensors")
    return pages


def read_pages(context: Context, m: Manifest, pages: Sequence[TensorEntry], what: str) -> memoryview:
    """Return the joined bytes of pages, if the machine has the memory to unpack them. Raises as `stored_parts` does."""
    what = f"{what}: reading the plain values of {part_name(m.header.part)}"
    rows = np.concatenate([box.first_chunk + np.arange(box.chunks) for page in pages for box in page.boxes])
    lengths = m.table.lengths[rows].astype(np.int64)
    limits.require_memory(int(lengths.sum()), what)
    require_decoding(context.store, [(m, page) for page in pages], f"{what},")
    packed = np.empty(int(lengths.sum()), np.uint8)
    wanted = Wanted(m.table, m.header.pack_names, rows, packed, np.cumsum(lengths) - lengths)
    for _ in ChunkReader(context, counts=False).rebuild([wanted]):  # plain values: few bytes, before any tensor
        pass
    limits.require_memory(unpacked_bytes(packed), what)
    return packed.data


def require_decoding(store: ObjectStore, tensors: Sequence[tuple[Manifest, TensorEntry]], what: str) -> None:
    """Check that tensors take no more decoding than their stored bytes explain: long chains may share blobs.

    Raises:
        CapabilityError: they take more.
    """
    decoded = sum(decoded_bytes(m.table, box) for m, entry in tensors for box in entry.boxes)
    spend_decoding(store, decoded, sum(spec_of(entry).nbytes for _, entry in tensors), what)


def spend_decoding(store: ObjectStore, decoded: int, nbytes: int, what: str) -> None:
    """Check that chunks of `nbytes` may take `decoded` bytes of decoding. Raises as `require_decoding` does."""
    what = f"{what} {human_bytes(nbytes)}"
    log.info("%s: %s to decode", what, human_bytes(decoded))
    limits.Budget(store).spend(decoded, what, free_bytes=limits.MAX_DEPTH_UNASKED * nbytes)


def decoded_bytes(table: ChunkTable, box: Box) -> int:
    """Return how many bytes are decoded for a box, in all links of its chains."""
    rows = slice(box.first_chunk, box.first_chunk + box.chunks)
    return int((table.lengths[rows].astype(np.int64) * table.ref_counts[rows]).sum())
