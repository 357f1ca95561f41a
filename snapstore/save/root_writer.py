"""Root writer: the root manifests of a snapshot of several ranks.

In: the trees of all ranks as one, and the references and headers of their child manifests, all of them durable. Out:
one durable root manifest a part: the tree, every tensor with its whole shape and no bytes, the children in the order of
their ranks, and all packs that they use. Rank 0 calls it, last before the commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ..arrays import Column
from ..chunks.uploader import put_once
from ..context import Context
from ..errors import InvalidInputError
from ..format import manifest
from ..format.box_map import BoxMap
from ..format.chunk_table import ChunkTable
from ..format.manifest import ManifestHeader, TensorEntry, manifest_name, read_header
from ..format.records import RANKS, ManifestRef
from ..state.containers import shown
from ..state.tensors import TensorSpec
from ..state.tree_encode import pack
from ..text import some
from ..threads import Threads
from .bases import SessionLike
from .manifest_writer import Written
from .rank_state import PartTree

#: Headers that are read at once: of a large job thousands. Roots that are put at once.
READS_AT_ONCE, PUTS_AT_ONCE = 32, 8


def read_headers(context: Context, children: Sequence[ManifestRef]) -> dict[str, bytes]:
    """Return the bytes of each child up to the end of its header, by SHA-256.

    Raises:
        IntegrityError: a child is not the one that its rank has reported.
        StorageError, NotFoundError: it cannot be read.
    """

    def read(ref: ManifestRef) -> bytes:
        return read_header(context.store, ref.key, ref.size_bytes)

    with Threads(READS_AT_ONCE) as threads:
        found = threads.start(read, children)()
    return {ref.sha256: data for ref, data in zip(children, found, strict=True)}


def write_roots(
    context: Context,
    session: SessionLike,
    parts: Sequence[PartTree],
    children: Sequence[ManifestRef],
    headers: Mapping[str, bytes],
    world_size: int,
    orders: Mapping[tuple[int, str], Column],
) -> Written:
    """Store the root manifests; all of them are durable on return.

    Args:
        parts: of all ranks as one; the part "" first.
        children: of all ranks and parts.
        headers: of the children: their bytes up to the end of the header, by SHA-256.
        orders: the numbers among those of `parts` of each rank's tensors; see `orders_of`.

    Returns:
        The objects that were written, and the chunks of all children; `stored_bytes` counts the roots alone.

    Raises:
        IntegrityError: a child's header is not the one that its rank has reported.
        InvalidInputError: boxes of a tensor overlap, or leave a part of it out.
    """
    written, puts = Written(), list[tuple[str, bytes]]()
    for number, part in enumerate(parts):
        of_part = sorted((ref for ref in children if ref.part == part.name), key=lambda ref: ref.rank)
        found = [manifest.proven_header(headers[ref.sha256], ref) for ref in of_part]
        packs = {
            name: size for header in found for name, size in zip(header.pack_names, header.pack_size_list, strict=True)
        }
        contents = manifest.ManifestContents(
            save_id=bytes.fromhex(session.id),
            rank=0,
            sequence=len(parts) + number,
            part=part.name,
            chunk_bytes=context.config.chunk_bytes,
            digest_seed=context.engines.digest_seed,
            tree=msgspec.Raw(pack(part.tree)),
            tensors=[_entry(spec) for spec in part.specs],
            inline=b"",
            table=ChunkTable.empty(),
            packs=list(packs),
            pack_sizes=list(packs.values()),
            logical_bytes=sum(ref.logical_bytes for ref in of_part),
            features=[RANKS],
            world_size=world_size,
            children=of_part,
            box_map=_box_map(found, orders, part),
            depth=max((header.depth for header in found), default=0),
        )
        data = manifest.encode(contents)
        puts.append((written.note(data).key, data))
        written.chunks += sum(header.chunks for header in found)
    with Threads(PUTS_AT_ONCE) as threads:
        threads.start(lambda item: put_once(session, *item), puts)()
    session.heartbeat()
    return written


def _box_map(found: Sequence[ManifestHeader], orders: Mapping[tuple[int, str], Column], part: PartTree) -> bytes:
    """Return the packed box map of a part, from those in the headers of its children.

    Raises:
        InvalidInputError: boxes of a tensor overlap, or leave a part of it out.
    """
    maps = list[tuple[int, BoxMap, Column]]()
    for header in found:
        if header.box_map:  # a child of own values alone has none
            own = BoxMap.decode(header.box_map, manifest_name(header))
            maps.append((header.rank, own, orders[header.rank, header.part]))
    merged = BoxMap.merged(maps, len(part.specs))
    torn = [shown(spec.path) for i, spec in enumerate(part.specs) if merged.is_whole(i, spec.shape) is False]
    if torn:
        raise InvalidInputError(
            f"{some(torn, 5)}: the shards of the ranks overlap, or leave some of it out: check the offsets that the "
            "program gives them; nothing was committed"
        )
    return merged.encode()


def _entry(spec: TensorSpec) -> TensorEntry:
    form = (list(spec.path), spec.kind, spec.dtype, list(spec.shape))
    return TensorEntry(*form, spec.requires_grad, spec.tie, [], None)
