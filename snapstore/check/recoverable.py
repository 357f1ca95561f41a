"""Recover the content of a damaged record.

In: a RecordScan. Out: the revision that follows a damaged one, taken from the index, from an earlier revision or from
the manifests, and a message that says which. Nothing is written: repair/ does that.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec

from ..catalog.config import read_unproven
from ..catalog.history import FIRST_SEQ
from ..catalog.read_twice import read_small, tried
from ..context import Context
from ..errors import FormatError
from ..format import records
from ..format.keys import manifest_key, parse_record_key
from ..format.manifests import manifest
from ..format.manifests.manifest import Manifest, ManifestHeader
from ..format.manifests.rank_checks import read_children
from ..format.manifests.tensor_layout import check_layouts
from ..format.records import ABORTED, COMMITTED, FORGOTTEN, RANKS, ManifestList, ManifestRef, Snapshot
from ..storage.base import ObjectStore
from .damaged_packs import check_tree
from .report import stand_in
from .scan_records import RecordScan, has_all

#: If the store's date of a record differs by less from the date in it, the store got it from its save [s].
DATES_AGREE_S = 3600.0


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
    joined = scan.pages.joined.get(lost.run)
    of_page = joined.record_of(lost.id) if joined is not None else None
    for before in range(lost.revision - 1, -1, -1):
        earlier_key = msgspec.structs.replace(lost, revision=before).key
        is_joined = of_page is not None and of_page.revision == before
        earlier = (
            of_page if is_joined else tried(context.store, partial(read_small, context.store, Snapshot, earlier_key))
        )
        if earlier is not None:
            return _after(context, scan, earlier, lost.revision) or _reconstructed(context, scan, key, earlier)
    return None if lost.revision else _reconstructed(context, scan, key, None)


def _after(context: Context, scan: RecordScan, earlier: Snapshot, revision: int) -> tuple[Snapshot, str] | None:
    """Return what follows a damaged `revision`, given the last revision before it that can be read.

    Nothing tells what the damaged revision said: it may have forgotten, unforgotten or tagged the snapshot.

    - The snapshot comes back if everything that it needs is there. Then it gets a tag, so that no policy forgets it
      before a person has looked.
    - If it was committed and something is missing, a rewrite (recode, compact, repair) has replaced its manifests,
      and only the lost revision names the new ones. Return None then: a new revision would hide the lost one if a copy
      of it is put back. The same holds if it was forgotten and more than one revision is lost: it may have been
      unforgotten, then rewritten.
    - If it was aborted or swept, only a copy from another repository can have followed: return None too.
    - It does not get a tag that another snapshot of the run has now: a lost revision took that tag off.
    """
    if earlier.state not in (COMMITTED, FORGOTTEN):
        return None
    tags = _tags_left(scan, earlier)
    kept = msgspec.structs.replace(earlier, revision=revision, tags=tags)
    whence = f"its record is written again from revision {earlier.revision}; what came later is undone"
    if not has_all(context, scan.sizes, earlier):
        rewritten = earlier.state == COMMITTED or earlier.revision < revision - 1
        return None if rewritten else (kept.revised(), whence)
    tag = _repair_tag(earlier.id)
    back = kept.revised(state=COMMITTED, tags=sorted({*tags, tag}))
    return back, f"{whence}, and it is tagged {tag!r}: look at it"


def _tags_left(scan: RecordScan, earlier: Snapshot) -> list[str]:
    """Return the tags of a revision that no other snapshot of its run has now."""
    others = [s for s in scan.ruling.values() if s.run == earlier.run and s.id != earlier.id]
    moved = {tag for other in others for tag in other.tags}
    return [tag for tag in earlier.tags if tag not in moved]


def _reconstructed(
    context: Context, scan: RecordScan, key: str, earlier: Snapshot | None
) -> tuple[Snapshot, str] | None:
    """Return the record of a snapshot whose damaged revision is only known by the manifests that were written for it.

    Args:
        earlier: the last revision before it that can be read.
    """
    for made in _manifests_of(context, scan, stand_in(key), earlier):
        found = tried(context.store, partial(_read_manifests, context, made, earlier))
        if found is None:
            continue
        refs, manifests = found
        if earlier is None or earlier.state == ABORTED or not earlier.write_id:
            record, whence = _record_of(context, scan, key, earlier, made, refs, manifests)
        else:
            record = msgspec.structs.replace(
                earlier,
                revision=stand_in(key).revision,
                state=COMMITTED,
                manifests=refs,
                manifest_list=made.manifest_list or msgspec.UNSET,
                tags=sorted({*_tags_left(scan, earlier), _repair_tag(earlier.id)}),
                depth=max(m.header.depth for m in manifests),
                chunks=sum(m.header.chunks for m in manifests),
                policy="",
                reason="",
            )
            whence = (
                f"its record is reconstructed from its manifests and from revision {earlier.revision}; what came later "
                "is undone"
            )
        if stand_in(key).revision:  # a copy may have written it, and nothing tells whether that verified the chunks
            record = msgspec.structs.replace(record, unproven=context.config.uuid)
        if has_all(context, scan.sizes, record):
            return record.revised(), f"{whence}; it is tagged {_repair_tag(record.id)!r}: look at it"
    return None


def _record_of(
    context: Context,
    scan: RecordScan,
    key: str,
    begun: Snapshot | None,
    made: _Made,
    refs: list[ManifestRef],
    manifests: Sequence[Manifest],
) -> tuple[Snapshot, str]:
    """Return the record of a snapshot of which only manifests and packs are left, and what of it is missing.

    Args:
        begun: the first record of its copy, which has its place in the order of the run.
    """
    stand = stand_in(key)
    is_placed = begun is not None and begun.seq > 0  # the fence of a save has no place
    record = msgspec.structs.replace(
        stand,
        state=COMMITTED,
        seq=begun.seq if begun is not None and is_placed else _free_seq(context.store, scan, key),
        manifests=refs,
        manifest_list=made.manifest_list or msgspec.UNSET,
        tags=[_repair_tag(stand.id)],
        created=context.store.stat(key).modified_s,
        depth=max(m.header.depth for m in manifests),
        chunks=sum(m.header.chunks for m in manifests),
        logical_bytes=sum(ref.logical_bytes for ref in refs),
        stored_bytes=sum(made.sizes.values()),
        reason=records.RECONSTRUCTED,
        features=[RANKS] if any(m.header.world_size for m in manifests) else [],
    )
    guesses = "its date and its stored size" if is_placed else "its order, its date and its stored size"
    return record, (
        "its record is reconstructed from its manifests, without parent, metrics, metadata and tags; "
        f"{guesses} are guesses"
    )


def _read_manifests(
    context: Context, made: _Made, earlier: Snapshot | None
) -> tuple[list[ManifestRef], list[Manifest]]:
    """Return the references of a record to the manifests of one whole state, and all of these manifests.

    A rewrite writes only the manifests that change: the record keeps the others of the revision before.

    Raises:
        FormatError, IntegrityError, NotFoundError: they are damaged, or hold no whole state.
    """
    store, seed = context.store, context.engines.digest_seed
    found = [manifest.read_bytes(store, key[-64:], size) for key, size in made.sizes.items()]
    named = {manifest.ref_of(data).sha256: data for data in found}
    for data in found:
        header = manifest.decode_header(manifest.header_bytes(data), "manifest")
        for child in header.children:
            named.pop(child.sha256, None)
    refs = [manifest.ref_of(data) for data in named.values()]
    if earlier is not None and earlier.state in (COMMITTED, FORGOTTEN) and not made.manifest_list:
        new = {(ref.part, ref.rank): ref for ref in refs}
        refs = [new.pop((ref.part, ref.rank), ref) for ref in earlier.manifests] + list(new.values())
    roots = [
        manifest.checked(named[ref.sha256], ref, seed) if ref.sha256 in named else manifest.read(store, ref, seed)
        for ref in refs
    ]
    for ref, root in zip(refs, roots, strict=True):
        check_layouts(root, ref.key)
        if not made.manifest_list and root.header.snapshot != made.snapshot:
            raise FormatError(f"{ref.key}: was written for another snapshot, and the record has no list of manifests")
    held = sum(ref.logical_bytes for ref in refs)
    if earlier is not None and earlier.manifests and held != earlier.logical_bytes:
        raise FormatError(f"{earlier.key}: {earlier.logical_bytes} bytes, later manifests hold {held}")
    children = [m for ref, root in zip(refs, roots, strict=True) for m in read_children(store, ref, root, seed)]
    check_tree(context, [*roots, *children], with_pages=True)
    return refs, [*roots, *children]


@dataclass(frozen=True, slots=True)
class _Made:
    """The manifests that one session has written for one revision of a record.

    Attributes:
        snapshot: id of the snapshot.
        sizes: key -> size of the manifests, in the order of ranks and parts [bytes]. They are the ones that the
            session's list of manifests names, or else those whose headers name session and revision.
        manifest_list: SHA-256 of the list; "": there is none.
    """

    snapshot: bytes
    sizes: Mapping[str, int]
    manifest_list: str


def _manifests_of(context: Context, scan: RecordScan, lost: Snapshot, earlier: Snapshot | None) -> list[_Made]:
    """Return the manifests written for a snapshot after a revision, up to the lost one: those for the last one first.

    A revision may have several: if a rewrite comes too late, its manifests stay until a gc deletes them. All hold the
    same state.
    """
    store, sizes, after = context.store, scan.sizes, -1 if earlier is None else earlier.revision
    known = {ref.key: ref for snapshot in scan.ruling.values() for ref in snapshot.manifests}
    found: dict[tuple[int, str], list[tuple[int, int, str]]] = {}
    lists: dict[tuple[int, str], tuple[str, ManifestList]] = {}
    for key, size in sizes.items():
        if not key.startswith("manifests/"):
            continue
        head: ManifestHeader | ManifestList | None
        if key in known:
            head = tried(store, partial(context.index.header, known[key]))
        else:
            head = _read_head(store, key, size, lost.id)
        if head is None or head.snapshot.hex() != lost.id or not after < head.revision <= lost.revision:
            continue
        session = head.revision, head.save_id.hex()
        if not head.revision and session[1] != lost.id:  # only the save itself writes for revision 0
            continue
        if isinstance(head, ManifestList):
            lists[session] = key[-64:], head
        else:
            found.setdefault(session, []).append((head.rank, head.sequence, key))
    snapshot, made = bytes.fromhex(lost.id), list[_Made]()
    for session in sorted(found.keys() | lists.keys(), reverse=True):
        if session in lists:
            name, head = lists[session]
            of_list = {key: sizes.get(key, 0) for key in map(manifest_key, head.sha256s)}
            made.append(_Made(snapshot, of_list, name))
        else:
            made.append(_Made(snapshot, {key: sizes[key] for _, _, key in sorted(found[session])}, ""))
    return made


def _read_head(store: ObjectStore, key: str, size_bytes: int, snapshot_id: str) -> ManifestHeader | ManifestList | None:
    """Return the header of a manifest, or a list of manifests, if it was written for a snapshot; else None.

    A header by itself proves nothing: one wrong answer may be that of another manifest. So it is read again if it names
    another snapshot, and else compared with the SHA-256 of the manifest, unless the rest of the manifest is damaged.
    """
    for _ in range(2):
        head = tried(store, partial(read_unproven, store, key, size_bytes))
        if head is not None and head.snapshot.hex() == snapshot_id:
            data = tried(store, partial(manifest.read_bytes, store, key[-64:], size_bytes))
            if data is None:
                return head
            if records.is_list(data):
                return records.decode(data, ManifestList, key)
            return manifest.decode_header(manifest.header_bytes(data), key)
    return None


def _free_seq(store: ObjectStore, scan: RecordScan, key: str) -> int:
    """Return a seq for a snapshot whose record is damaged: a free number at its place in the run.

    Damaged records at the same place get free numbers in their order. If there is no such place, or no free number at
    it, the damaged records of the run get its first free numbers, by age. A fence has neither a date nor a number.
    """
    prefix = key.rpartition("/")[0] + "/"
    dates: dict[str, float] = {}  # id -> when the store got its first record
    for info in store.list(prefix):
        if parse_record_key(info.key) is not None:
            name = stand_in(info.key).id
            dates[name] = min(dates.get(name, math.inf), info.modified_s)
    of_run = [s for s in scan.ruling.values() if s.key.startswith(prefix) and (s.state != ABORTED or s.seq)]
    taken = {s.seq for s in of_run}
    dated = sorted((dates.get(stand_in(k).id, math.inf), k) for k in {key, *scan.unreadable} if k.startswith(prefix))
    place_of = _Places(of_run, dates)
    places = {k: place_of(date, stand_in(k).step) for date, k in dated}
    if (place := places[key]) is not None:
        beside = [k for k in places if places[k] == place]
        at = (sorted(beside) if place.by_step else beside).index(key)
        if place.low < 0:  # before the first one, as close to it as possible
            last = (n for n in range(place.high - 1, -1, -1) if n not in taken)
            here = list(itertools.islice(last, len(beside)))[::-1]
        else:
            end = records.MAX_COUNTED if place.high < 0 else place.high
            here = list(itertools.islice((n for n in range(place.low + 1, end) if n not in taken), len(beside)))
        if at < len(here):
            return here[at]
    free = (n for n in itertools.count(min({FIRST_SEQ, *taken})) if n not in taken)
    return next(itertools.islice(free, list(places).index(key), None))


class _SeqBounds(NamedTuple):
    """A place in the order of a run.

    Attributes:
        low, high: the seqs of the snapshots before and after it; -1: there is none.
        by_step: the step, not the date, has told it.
    """

    low: int
    high: int
    by_step: bool


class _Places:
    """Finds the place of a damaged record in its run, by its date and its step.

    A copy is dated by its save, other snapshots by the store, as damaged records are. If no snapshot has the same date
    by its writer and by the store, the store's dates are not those of the saves. A program that writes over a record
    renews its date. So where the date only says that the record is the last, numbers are missing, and its step belongs
    among them, it gets one of these.

    Args:
        dates: id -> when the store got the first record of each snapshot.
    """

    def __init__(self, of_run: Sequence[Snapshot], dates: Mapping[str, float]) -> None:
        self._known = known = sorted((s for s in of_run if s.state != ABORTED and not s.is_reconstructed), key=_seq)
        agree = {s.id for s in known if abs(dates.get(s.id, math.inf) - s.created) < DATES_AGREE_S + s.total_s}
        self._dates = sorted((dates[s.id] if s.id in agree else s.created, s.seq) for s in known) if agree else []
        self._highest = [-1, *itertools.accumulate((seq for _, seq in self._dates), max)]
        taken = {s.seq for s in of_run}
        lows = [(FIRST_SEQ - 1, -1), *((s.seq, s.step) for s in known)]
        self._gaps = [
            (low, step, s)
            for (low, step), s in zip(lows, known, strict=False)
            if any(n not in taken for n in range(low + 1, s.seq))
        ]

    def __call__(self, date: float, step: int) -> _SeqBounds | None:
        """Return the place of a record with a date by the store; None: nothing tells it."""
        low = self._highest[bisect.bisect_left(self._dates, (date, -1))]
        later = range(bisect.bisect_right(self._dates, (date, records.MAX_COUNTED)), len(self._dates))
        high = next((self._dates[i][1] for i in later if self._dates[i][1] > low), -1)
        if high >= 0:
            return _SeqBounds(low, high, False)
        for before, from_step, s in reversed(self._gaps):
            if from_step <= step <= s.step:
                return _SeqBounds(before, s.seq, True)
        if self._dates:
            return _SeqBounds(low, -1, False)
        is_last = bool(self._known) and step >= self._known[-1].step
        return _SeqBounds(self._known[-1].seq, -1, False) if is_last else None


def _seq(s: Snapshot) -> int:
    return s.seq


def _repair_tag(snapshot_id: str) -> str:
    """Return a tag for a snapshot whose record is partly guessed; no other snapshot of its run takes it over."""
    return f"repaired-{snapshot_id[:8]}"
