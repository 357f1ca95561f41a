"""Recover the content of a damaged record.

In: a RecordScan. Out: the revision that follows a damaged one, taken from the index, from an earlier revision or from
the manifests, and a message that says which. Nothing is written: repair/ does that.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial

import msgspec

from ..catalog.config import read_unproven
from ..catalog.history import FIRST_SEQ
from ..catalog.read_twice import tried
from ..context import Context
from ..format import manifest, records
from ..format.keys import manifest_key
from ..format.manifest import Manifest
from ..format.rank_checks import read_children
from ..format.records import COMMITTED, FORGOTTEN, RANKS, ManifestList, ManifestRef, Snapshot
from ..format.tensor_layout import check_layouts
from ..storage.base import ObjectStore
from .damaged_packs import check_tree
from .report import stand_in
from .scan_records import RecordScan, has_all


def recover_record(context: Context, scan: RecordScan, key: str) -> tuple[Snapshot, str] | None:
    """Return the revision that follows a damaged one, and a message that says where it comes from; None: there is none.

    Raises:
        StorageError: the store does not answer at all.
    """
    found = _recover(context, scan, key)
    if found is None:
        return None
    record, whence = found
    seqs = [s.seq for s in scan.ruling.values() if s.run == record.run]
    if record.seq <= records.highest_seq([*seqs, record.seq]):
        return found
    seq = _free_seq(context.store, scan, key)
    return msgspec.structs.replace(record, seq=seq), f"{whence}; its seq is {seq} in place of {record.seq}, a guess"


def _recover(context: Context, scan: RecordScan, key: str) -> tuple[Snapshot, str] | None:
    """Return what `recover_record` returns, with the seq as it was recorded."""
    if key in scan.misnumbered:
        only = scan.misnumbered[key]
        tags = sorted({*only.tags, _repair_tag(only.id)}) if only.state == COMMITTED else only.tags
        return only.revised(tags=tags), f"its record is written again as revision {only.revision + 1}"
    cached = context.index.cached(key)
    if cached is not None:
        return cached.revised(), f"its record is written again, from the index, as revision {cached.revision + 1}"
    lost = stand_in(key)
    for before in range(lost.revision - 1, -1, -1):
        earlier_key = msgspec.structs.replace(lost, revision=before).key
        earlier = tried(context.store, partial(_read_record, context.store, earlier_key))
        if earlier is not None:
            return _after(context, scan, earlier, lost.revision)
    return None if lost.revision else _reconstructed(context, scan, key)


def _read_record(store: ObjectStore, key: str) -> Snapshot:
    return records.decode(store.get(key, limit_bytes=records.MAX_OBJECT_BYTES), Snapshot, key)


def _after(context: Context, scan: RecordScan, earlier: Snapshot, revision: int) -> tuple[Snapshot, str] | None:
    """Return what follows a damaged `revision`, given the last revision before it that can be read.

    Nothing tells what the damaged revision said: it may have forgotten, unforgotten or tagged the snapshot.

    - The snapshot comes back if everything that it needs is there. Then it gets a tag, so that no policy forgets it
      before a person has looked.
    - If it was committed and something is missing, a rewrite (recode, compact, repair) has replaced its manifests,
      and only the lost revision names the new ones. Return None then: a new revision would hide the lost one if a copy
      of it is put back. The same holds if it was forgotten and more than one revision is lost: it may have been
      unforgotten, then rewritten.
    - It does not get a tag that another snapshot of the run has now: a lost revision took that tag off.
    """
    others = [s for s in scan.ruling.values() if s.run == earlier.run and s.id != earlier.id]
    moved = {tag for other in others for tag in other.tags}
    tags = [tag for tag in earlier.tags if tag not in moved]
    kept = msgspec.structs.replace(earlier, revision=revision, tags=tags)
    whence = f"its record is written again from revision {earlier.revision}; what came later is undone"
    if earlier.state not in (COMMITTED, FORGOTTEN) or not has_all(context, scan.sizes, earlier):
        rewritten = earlier.state == COMMITTED or (earlier.state == FORGOTTEN and earlier.revision < revision - 1)
        return None if rewritten else (kept.revised(), whence)
    tag = _repair_tag(earlier.id)
    back = kept.revised(state=COMMITTED, tags=sorted({*tags, tag}))
    return back, f"{whence}, and it is tagged {tag!r}: look at it"


def _reconstructed(context: Context, scan: RecordScan, key: str) -> tuple[Snapshot, str] | None:
    """Return the record of a snapshot of which only manifests and packs are left."""
    stand = stand_in(key)
    sizes, manifest_list = _manifests_of(context, scan, stand.id)
    read = partial(_read_manifests, context, sizes)
    found = tried(context.store, read) if sizes else None
    if found is None:
        return None
    refs, manifests = found
    several = any(m.header.world_size for m in manifests)
    tag = _repair_tag(stand.id)
    record = msgspec.structs.replace(
        stand,
        state=COMMITTED,
        seq=_free_seq(context.store, scan, key),
        manifests=refs,
        manifest_list=manifest_list or msgspec.UNSET,
        tags=[tag],
        created=context.store.stat(key).modified_s,
        depth=max(m.header.depth for m in manifests),
        chunks=sum(m.header.chunks for m in manifests),
        logical_bytes=sum(ref.logical_bytes for ref in refs),
        stored_bytes=sum(sizes.values()),
        reason=records.RECONSTRUCTED,
        features=[RANKS] if several else [],
    ).revised()
    if not has_all(context, scan.sizes, record):
        return None
    whence = (
        "its record is reconstructed from its manifests, without parent, metrics, metadata and tags; its order, its "
        "date and its stored size are guesses"
    )
    return record, f"{whence}; it is tagged {tag!r}: look at it"


def _read_manifests(context: Context, sizes: Mapping[str, int]) -> tuple[list[ManifestRef], list[Manifest]]:
    """Return the references of a record to the manifests of one whole state, and all of these manifests."""
    store, seed = context.store, context.engines.digest_seed
    found = [manifest.read_bytes(store, key[-64:], size) for key, size in sizes.items()]
    named = {manifest.ref_of(data).sha256: data for data in found}
    for data in found:
        header = manifest.decode_header(manifest.header_bytes(data), "manifest")
        for child in header.children:
            named.pop(child.sha256, None)
    refs = [manifest.ref_of(data) for data in named.values()]
    roots = [manifest.checked(data, ref, seed) for data, ref in zip(named.values(), refs, strict=True)]
    for ref, root in zip(refs, roots, strict=True):
        check_layouts(root, ref.key)
    children = [m for ref, root in zip(refs, roots, strict=True) for m in read_children(store, ref, root, seed)]
    check_tree(context, [*roots, *children], with_pages=True)
    return refs, [*roots, *children]


def _manifests_of(context: Context, scan: RecordScan, save_id: str) -> tuple[dict[str, int], str]:
    """Return (key -> size of the manifests of a save in the order of ranks and parts [bytes], SHA-256 of their list).

    They are the manifests that the save's list of manifests names, or else those whose headers name the save.
    """
    store, sizes = context.store, scan.sizes
    known = {ref.key: ref for snapshot in scan.ruling.values() for ref in snapshot.manifests}
    found: list[tuple[int, int, str]] = []
    for key, size in sizes.items():
        if not key.startswith("manifests/"):
            continue
        read = partial(read_unproven, store, key, size)
        head = tried(store, partial(context.index.header, known[key]) if key in known else read)
        if head is None or head.save_id.hex() != save_id:
            continue
        if isinstance(head, ManifestList):
            return {name: sizes.get(name, 0) for name in map(manifest_key, head.sha256s)}, key[-64:]
        found.append((head.rank, head.sequence, key))
    return {key: sizes[key] for _, _, key in sorted(found)}, ""


def _free_seq(store: ObjectStore, scan: RecordScan, key: str) -> int:
    """Return a seq for a snapshot whose record is damaged: the damaged records get the run's free numbers, by age."""
    prefix = key.rpartition("/")[0] + "/"
    taken = {s.seq for s in scan.ruling.values() if s.key.startswith(prefix)}
    infos = [info for info in store.list(prefix) if info.key in scan.unreadable]
    by_age = [info.key for info in sorted(infos, key=lambda info: (info.modified_s, info.key))]
    free = (number for number in itertools.count(min({FIRST_SEQ, *taken})) if number not in taken)
    return next(itertools.islice(free, by_age.index(key) if key in by_age else 0, None))


def _repair_tag(snapshot_id: str) -> str:
    """Return a tag for a snapshot whose record is partly guessed; no other snapshot of its run takes it over."""
    return f"repaired-{snapshot_id[:8]}"
