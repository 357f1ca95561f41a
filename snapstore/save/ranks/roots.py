"""Root writer: the root manifests of a snapshot of several ranks.

In: the merged trees of all ranks, and the references and headers of their child manifests, all of them durable. Out:
one durable root manifest per part: the tree, every tensor with its whole shape and no bytes, the children in the order
of their ranks, and all packs that they use; or, if a part has not changed, the root of a base. A large tree lies in
pages, which are chunks of the root itself: pages that the root of a base has cost nothing. Rank 0 calls it right before
the commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...arrays import Column
from ...chunks.uploader import put_once
from ...context import Context
from ...distributed.messages import Report
from ...errors import InvalidInputError
from ...format.chunking import PAGED_BYTES
from ...format.manifests import manifest
from ...format.manifests.box_map import BoxMap
from ...format.manifests.manifest import Manifest, ManifestContents, ManifestHeader, manifest_name, read_header
from ...format.manifests.tensor_layout import check_ties
from ...format.records import RANKS, ManifestRef
from ...state.tree.encode import pack
from ...state.values.containers import shown
from ...text import some
from ...threads import Pending, Threads, when_dropped
from ..chunk_columns import Rows
from ..chunk_writer import ChunkWriter
from ..known_chunks import AnySession, Bases, load_bases
from ..manifest_writer import PartLayout, Written, add_tree, contents_of, entry_of
from ..near_children import NearChildren
from .merged_trees import PartTree

#: Headers that are read at once (a large job has thousands; one Python process sends about 600 requests a second), and
#: roots that are put at once.
READS_AT_ONCE, PUTS_AT_ONCE = 64, 8


class ChildHeaders:
    """Reads the headers of child manifests in the background, as soon as their ranks have reported.

    Call sequence: `start` for some manifests, again for others; `result`; at any time `give_up`.
    """

    def __init__(self, context: Context) -> None:
        self._store, self._threads = context.store, Threads(READS_AT_ONCE)
        self._pending: list[tuple[Sequence[ManifestRef], Pending[bytes]]] = []
        self._given_up = False
        when_dropped(self, self._threads.close).atexit = False

    def start(self, children: Sequence[ManifestRef]) -> None:
        """Begin to read the headers of manifests, which are durable."""
        self._pending.append((children, self._threads.start(self._read, children)))

    def result(self) -> dict[str, bytes]:
        """Wait, and return the bytes of each child up to the end of its header, by SHA-256; they are not verified yet.

        Raises:
            StorageError, NotFoundError, IntegrityError: one cannot be read.
        """
        return {ref.sha256: data for refs, found in self._pending for ref, data in zip(refs, found(), strict=True)}

    def give_up(self) -> None:
        """Begin no more reads, and do not wait for the running ones."""
        self._given_up = True

    def _read(self, ref: ManifestRef) -> bytes:
        return b"" if self._given_up else read_header(self._store, ref.key, ref.size_bytes)


def children_of(reports: Mapping[int, Report]) -> list[ManifestRef]:
    """Return the child manifests of all ranks and parts."""
    return [ref.whole(rank) for rank, report in reports.items() for ref in report.manifests or ()]


def write_roots(
    context: Context,
    session: AnySession,
    parts: Sequence[PartTree],
    reports: Mapping[int, Report],
    headers: Mapping[str, bytes],
    orders: Mapping[tuple[int, str], Column],
    cached: Mapping[str, Manifest],
) -> Written:
    """Store the root manifests and the pages of large trees; all of it is durable on return.

    Args:
        parts: of all ranks, merged; the part "" first.
        reports: of all ranks, whose child manifests are durable.
        headers: the bytes of each child up to the end of its header, by SHA-256.
        orders: by rank and part, the numbers of its tensors in the merged part; see `orders_of`.
        cached: manifests in memory, by SHA-256; the roots of the bases are read if they are not among them.

    Returns:
        The objects that were written here, and the counts of all ranks.

    Raises:
        IntegrityError: a child's header is not the one that its rank has reported; or a page does not decode.
        InvalidInputError: boxes of a tensor overlap, or leave a part of it out.
        StorageError: the store failed.
    """
    children = {ref: manifest.proven_header(headers[ref.sha256], ref) for ref in children_of(reports)}
    changed = {ref.part for ref, header in children.items() if header.save_id.hex() == session.id}
    trees, bases = [pack(part.tree) for part in parts], Bases()
    if len(changed) < len(parts) or any(len(tree) >= PAGED_BYTES for tree in trees):
        bases = load_bases(context, session, cached, NearChildren((), 0, 1))  # reads only the roots of the bases
    written, roots = _write_trees(context, session, parts, trees, bases)
    puts = list[tuple[str, bytes]]()
    for number, root in enumerate(roots):
        of_part = sorted((ref for ref in children if ref.part == root.part), key=lambda ref: ref.rank)
        found = [children[ref] for ref in of_part]
        packs = dict(zip(root.packs, root.pack_sizes, strict=True))  # its table counts these
        for header in found:
            packs.update(zip(header.pack_names, header.pack_size_list, strict=True))
        contents = replace(
            root,
            sequence=len(parts) + number,
            packs=list(packs),
            pack_sizes=list(packs.values()),
            logical_bytes=root.logical_bytes + sum(ref.logical_bytes for ref in of_part),
            features=[RANKS, *root.features],
            world_size=len(reports),
            children=of_part,
            box_map=_box_map(found, orders, parts[number]),
            depth=max((header.depth for header in found), default=0),
        )
        puts += written.add(session, manifest.encode(contents), bases.manifests)
        written.chunks += sum(header.chunks for header in found)
    written.new_chunks += sum(report.new_chunks for report in reports.values())
    written.stored_bytes += sum(report.stored_bytes for report in reports.values())
    _put_all(context, session, written, puts + written.add_list(session))
    return written


def _put_all(context: Context, session: AnySession, written: Written, puts: Sequence[tuple[str, bytes]]) -> None:
    """Put manifests; all that was written is durable on return."""
    with Threads(PUTS_AT_ONCE) as threads:
        threads.start(lambda item: put_once(session, *item), puts)()
    if context.options.verify_writes == "full":
        session.confirm(written.sizes)
    session.heartbeat()


def _write_trees(
    context: Context, session: AnySession, parts: Sequence[PartTree], trees: Sequence[bytes], bases: Bases
) -> tuple[Written, list[ManifestContents]]:
    """Store the pages of large trees; return the objects, and the contents of each part's root manifest."""
    with ChunkWriter(context, session, bases, full=True) as chunks:
        layouts = list[PartLayout]()
        for part, tree in zip(parts, trees, strict=True):
            layouts.append(PartLayout(part.name, entries=list(map(entry_of, part.specs)), first_row=chunks.rows))
            chunks.begin_part(part.name)
            add_tree(chunks, layouts[-1], part.tree, tree)
            chunks.end_part()
        check_ties({layout.part: layout.entries for layout in layouts})
        chunks.finish()
        rows = Rows.concatenate(chunks.done)
        return Written.of_chunks(chunks), [contents_of(context, session, chunks, rows, layout) for layout in layouts]


def _box_map(found: Sequence[ManifestHeader], orders: Mapping[tuple[int, str], Column], part: PartTree) -> bytes:
    """Return the packed box map of a part, from those in the headers of its children.

    Raises:
        InvalidInputError: boxes of a tensor overlap, or leave a part of it out.
    """
    maps = list[tuple[int, BoxMap, Column]]()
    for header in found:
        if header.box_map:  # a child that has only a rank's own values has no map
            own = BoxMap.decode(header.box_map, manifest_name(header))
            maps.append((header.rank, own, orders[header.rank, header.part]))
    merged = BoxMap.merged(maps, len(part.specs))
    torn = [shown(part.specs[number].path) for number in merged.torn([spec.shape for spec in part.specs])]
    if torn:
        raise InvalidInputError(
            f"{some(torn, 5)}: the shards of the ranks overlap, or leave some of it out: check the offsets that the "
            "program gives them; nothing was committed"
        )
    return merged.encode()
