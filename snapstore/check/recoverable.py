"""Salvage: what can still be said of a record that cannot be read.

In: a Survey. Out: the revision to follow the lost one, from the index, the revision before, or the manifests; and
where it comes from, in words. Writes nothing: that is repair.py's.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial

import msgspec

from ..catalog.config import read_manifest_header
from ..catalog.read_twice import tried
from ..context import Context
from ..format import manifest, records
from ..format.keys import parse_record_key, record_key
from ..format.manifest import Manifest
from ..format.records import COMMITTED, FORGOTTEN, ManifestRef, Snapshot
from .damaged_packs import check_tree
from .report import stand_in
from .scan import Survey


class Salvage:
    """Makes up for records that cannot be read."""

    def __init__(self, context: Context, survey: Survey) -> None:
        self._store, self._index, self._survey = context.store, context.index, survey

    def unmendable(self) -> set[str]:
        """Keys of the records that cannot be read, and of which nothing tells what they said."""
        return {key for key in self._survey.unreadable if self.record_for(key) is None}

    def record_for(self, key: str) -> tuple[Snapshot, str] | None:
        """The revision to follow one that cannot be read, and where it comes from."""
        cached = self._index.cached(key)
        if cached is not None:
            return cached.revised(), f"its record is written again, from the index, as revision {cached.revision + 1}"
        parsed = parse_record_key(key)
        assert parsed is not None
        run, step, name, revision = parsed
        for before in range(revision - 1, -1, -1):
            earlier_key = record_key(run, step, name, before)
            earlier = tried(self._store, partial(self._get, earlier_key))
            if earlier is not None:
                return self._after(earlier, revision)
        return None if revision else self._made_up(key)

    def _get(self, key: str) -> Snapshot:
        return records.decode(self._store.get(key), Snapshot, key)

    def _after(self, earlier: Snapshot, revision: int) -> tuple[Snapshot, str] | None:
        """What follows a revision that reads and one that does not.

        Nobody knows what the latter said: it may have forgotten the snapshot, or un-forgotten or tagged it. So it comes
        back, if it is all there, and no policy forgets it before somebody has looked. If it was committed and is not
        all there, it has been rewritten (recode, compact, heal), and only the lost revision names its manifests: any
        other would hide that one from whoever puts it back. So too if it was forgotten and more than one revision is
        lost: un-forgotten, then rewritten. A tag that another snapshot of the run has by now was taken off this one
        by what is lost.
        """
        ruling = self._survey.ruling.values()
        moved = {tag for s in ruling if s.run == earlier.run and s.id != earlier.id for tag in s.tags}
        kept = msgspec.structs.replace(
            earlier, revision=revision, tags=[tag for tag in earlier.tags if tag not in moved]
        )  # fmt: skip
        whence = f"its record is written again from revision {earlier.revision}; what came later is undone"
        if earlier.state not in (COMMITTED, FORGOTTEN) or not self._survey.has_all(earlier):
            rewritten = earlier.state == COMMITTED or (earlier.state == FORGOTTEN and earlier.revision < revision - 1)
            return None if rewritten else (kept.revised(), whence)
        tags = sorted({*kept.tags, _tag(earlier.id)})
        return kept.revised(state=COMMITTED, tags=tags), f"{whence}, and it is tagged {_tag(earlier.id)!r}: look at it"

    def _made_up(self, key: str) -> tuple[Snapshot, str] | None:
        """The record of a snapshot of which only manifests and packs are left."""
        stand = stand_in(key)
        sizes = self._manifests_of(stand.id)
        found = tried(self._store, partial(self._read_all, sizes)) if sizes else None
        if found is None:
            return None
        refs, manifests = found
        tags = [_tag(stand.id)]
        record = msgspec.structs.replace(
            stand, state=COMMITTED, seq=self._free_seq(key), manifests=refs, tags=tags,
            created=self._store.stat(key).modified_s, depth=max(m.header.depth for m in manifests),
            chunks=sum(m.header.chunks for m in manifests), logical_bytes=sum(ref.logical_bytes for ref in refs),
            stored_bytes=sum(ref.size_bytes for ref in refs), reason=records.RECONSTRUCTED,
        ).revised()  # fmt: skip
        if not self._survey.has_all(record):
            return None
        whence = (
            "its record is made up from its manifests, without parent, metrics, metadata and tags; its order, when it "
            "was created and its stored size are guessed"
        )
        return record, f"{whence}; it is tagged {tags[0]!r}: look at it"

    def _read_all(self, sizes: Mapping[str, int]) -> tuple[list[ManifestRef], list[Manifest]]:
        """The manifests of one whole state, and what a record says of them."""
        found = [manifest.read_bytes(self._store, key[-64:], size) for key, size in sizes.items()]
        refs = [manifest.ref_of(data) for data in found]
        seed = self._survey.digest_seed
        manifests = [manifest.checked(data, ref, seed) for data, ref in zip(found, refs, strict=True)]
        check_tree(manifests)
        return refs, manifests

    def _manifests_of(self, name: str) -> dict[str, int]:
        """Size of the manifests that a save has written, by key, in its order: by the id in their headers."""
        known = {ref.key for snapshot in self._survey.ruling.values() for ref in snapshot.manifests}
        found: list[tuple[int, int, str]] = []
        for key, size in self._survey.sizes.items():
            if not key.startswith("manifests/") or key in known:
                continue
            header = tried(self._store, partial(read_manifest_header, self._store, key, size))
            if header is not None and header.save_id.hex() == name:
                found.append((header.rank, header.sequence, key))
        return {key: self._survey.sizes[key] for _, _, key in sorted(found)}

    def _free_seq(self, key: str) -> int:
        """The order of a snapshot whose record is lost: of the numbers that its run lacks, by their ages."""
        prefix = key.rpartition("/")[0] + "/"
        taken = {s.seq for s in self._survey.ruling.values() if s.key.startswith(prefix)}
        infos = [info for info in self._store.list(prefix) if info.key in self._survey.unreadable]
        ages = [info.key for info in sorted(infos, key=lambda info: (info.modified_s, info.key))]
        free = (number for number in itertools.count() if number not in taken)
        return next(itertools.islice(free, ages.index(key) if key in ages else 0, None))


def _tag(snapshot_id: str) -> str:
    """Of a snapshot whose record had to be guessed at; no other snapshot of its run takes it away."""
    return f"repaired-{snapshot_id[:8]}"
