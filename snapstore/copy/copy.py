"""Copy: put snapshots of one repository into another one, each under a session there, and commit them one by one.

In: snapshots of the source, parents before their children. Out: records of the same ids in the destination, with other
manifests (moving.py). A copy is a writer like any other (docs/design/protocol.md, "Copies"):

    begin     create revision 0 as `aborted`, if the destination does not know the id; then PUT a session for the next
              revision, and only then LIST marks and records: chunks that are there, and that no gc is about to delete,
              are not sent again
    write     blobs, unchanged; each pack of the source is compared with the SHA-256 in its name; each chunk of which a
              blob was copied is rebuilt, and its digest compared; then manifests
    commit    check that the packs and manifests are there; create-only PUT of the next revision, `committed`

So a gc that fences a copy creates the same key as the copy, and so do two copies of one snapshot: exactly one wins. An
interrupted copy leaves packs that no snapshot needs and that its session or its record explains; the next copy goes on
with the snapshots that are not there yet. A copy that finds the source damaged deletes its packs. The source is only
read. A snapshot that is rewritten meanwhile is read again; one whose bytes a gc has deleted is an error. Without
verification the record says so (`unproven`), and no save builds on the copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec

from ..catalog.history import View, is_dropped
from ..catalog.needed_keys import all_manifests
from ..catalog.read_twice import read_object_twice
from ..context import Context
from ..errors import (
    DAMAGE,
    AlreadyExistsError,
    CapabilityError,
    ConflictError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    SnapstoreError,
    UnreadObjectError,
    UnreadRecordError,
)
from ..format.keys import record_key
from ..format.manifests import manifest
from ..format.manifests.manifest import Manifest
from ..format.records import ABORTED, COMMITTED, FORGOTTEN, SWEPT, ManifestRef, Snapshot
from ..protocol import tags
from ..protocol.claim import Claim
from ..protocol.forget import unforget
from ..protocol.liveness import aborted
from ..protocol.notes import has_bytes, in_need_of_quarantined, remove_note
from ..protocol.revisions import create, retry_conflicts, same_content
from ..protocol.same_repository import confirmed
from ..protocol.session import SaveSession
from ..save.known_chunks import load_bases
from ..storage import progress
from ..text import brief, human_bytes, log
from .moving import Moved, move

#: The errors of a snapshot that cannot be copied, though both stores answer; the others can be.
UNCOPIED = (*DAMAGE, UnreadObjectError, CapabilityError)
#: The reason in the first record of a copy, in the destination.
COPY_BEGUN = "a copy of it has begun"


@dataclass(slots=True)
class CopyResult:
    """The result of a copy, or of a dry run.

    Attributes:
        url: URL of the destination.
        copied: the new snapshots there (of a dry run: those of the source).
        present: snapshots that were there already, by the destination's records.
        left_out: snapshots that the destination has forgotten, and that were not named. One that a repair there has
            dropped because it was damaged is copied.
        failed: (snapshot of the source, why) for each that could not be copied; nothing of these was committed.
        unknown: key -> why, of records of the source that cannot be read or are gone; at most an older one was copied.
        read_bytes: bytes read of packs and manifests of the source.
        stored_bytes: bytes of the packs and manifests put into the destination.
        blobs: number of blobs copied.
    """

    url: str
    copied: list[Snapshot] = field(default_factory=list)
    present: list[Snapshot] = field(default_factory=list)
    left_out: list[Snapshot] = field(default_factory=list)
    failed: list[tuple[Snapshot, str]] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    read_bytes: int = 0
    stored_bytes: int = 0
    blobs: int = 0
    dry_run: bool = False

    __repr__ = brief


def copy(
    source: Context,
    target: Context,
    snapshots: Sequence[Snapshot],
    unknown: dict[str, str],
    *,
    named: bool,
    dry_run: bool = False,
    verify: bool = True,
) -> CopyResult:
    """Copy snapshots into another repository. One that cannot be copied is noted; the others are copied.

    Args:
        snapshots: of the source.
        unknown: for the result.
        named: also copy snapshots that the destination has forgotten.
        verify: as in `Copier`.

    Raises:
        InvalidInputError: the two are one repository, or their digests have different seeds.
        StorageError: one of the stores does not answer; the snapshots before that are copied.
    """
    require_same_seed(source, target)
    copier = Copier(source, target)
    copier.is_one_pass, copier.verify = True, verify
    result = copier.result
    result.unknown, result.dry_run = unknown, dry_run
    with source.index.one_write(), target.index.one_write():
        for snapshot in progress.through(in_order(snapshots), partial(_work_bytes, verify=verify)):
            try:
                copier.copy(snapshot, named=named)
            except (*UNCOPIED, AlreadyExistsError, ConflictError) as error:  # a new session may be "taken"
                log.info("run=%s step=%d: copy failed: %s", snapshot.run, snapshot.step, error)
                result.failed.append((snapshot, f"{snapshot.ref}: {str(error).removeprefix(f'{snapshot.ref}: ')}"))
    return result


def _work_bytes(snapshot: Snapshot, *, verify: bool) -> int:
    """Return about how many bytes a copy reads of a snapshot, and rebuilds, if the snapshots before it are there."""
    new = snapshot.logical_bytes * snapshot.new_chunks // max(snapshot.chunks, 1)
    return snapshot.stored_bytes + (new if verify else 0)


def require_same_seed(source: Context, target: Context) -> None:
    """Check that the digests of two repositories can be compared; see docs/design/digest-seed.md.

    Raises:
        InvalidInputError: they cannot, or there is one repository only.
    """
    if source.config.uuid == target.config.uuid:
        raise InvalidInputError(f"{target.store.url}: is the repository to copy from, or a copy of its files")
    if source.config.digest_seed != target.config.digest_seed:
        raise InvalidInputError(
            f"{target.store.url}: its digests have another seed than those of {source.store.url}, so no chunk can be "
            "copied as it is; copy into a new place, which takes the seed over (or make one: 'snapstore init --like "
            f"{source.store.url}'), or restore each snapshot and save it there"
        )


def in_order(snapshots: Iterable[Snapshot]) -> list[Snapshot]:
    """Return snapshots by run and in the order of saves, but each after its parent and its bases."""
    chosen = {s.id: s for s in sorted(snapshots, key=lambda s: (s.run, s.seq, s.id))}
    done: dict[str, Snapshot] = {}
    for first in chosen.values():
        stack, seen = [first.id], {first.id}
        while stack:
            snapshot = chosen[stack[-1]]
            before = [name for name in (snapshot.parent, *snapshot.bases) if name in chosen and name not in done]
            if before := [name for name in before if name and name not in seen]:  # forged records may form a circle
                seen.update(before)
                stack += before
            else:
                done[stack.pop()] = snapshot
    return list(done.values())


class CopySession(SaveSession):
    """The session of a copy: a claim to the next revision of a record. It chooses bases as a save does.

    Args:
        there: the ruling record in the destination. If it is committed, the copy uses its chunks that are not lost.
        source: the snapshot in its source, `unproven` as its copy will be.
        near: ids of snapshots that are likely to share chunks with it.
        before: the records of the destination, as they were listed before.
    """

    def __init__(self, context: Context, there: Snapshot, source: Snapshot, near: Sequence[str], before: View) -> None:
        key = record_key(there.run, there.step, there.id, there.revision + 1)
        Claim.__init__(self, context, key, "copy", lambda _: there.revised())
        known = [s for name in (source.parent, *source.bases, *near) if name and (s := before.get(name)) is not None]
        self._index, self._there, self._also = context.index, there, [there.id, *(s.id for s in known)]
        self._is_of_run = all(s.run == there.run for s in known)
        self.parent = source.parent if before.get(source.parent or "") is not None else None
        self.usable_bases: list[Snapshot] = []
        self.others, self.manifests = set(), {}
        self.seq, self._trusted = 0, source.unproven  # a copy without verification builds on others of its source

    def _look(self) -> None:
        """Choose bases. The copy has its number, so one listing suffices.

        Raises:
            ConflictError: another process has revised the record, so this copy could not be committed.
        """
        marked = self.marked()
        view = self._index.refresh(self.run if self._is_of_run else None)
        ruling = view.get(self._there.id)
        if ruling is not None and ruling.revision > self._there.revision:
            raise ConflictError("another process has revised its record in the destination")
        self._choose(view, marked)
        if not self.usable_bases:
            self._compare_seed()

    @contextmanager
    def taking_back(self) -> Iterator[None]:
        """Delete what was put if the source turns out to be damaged: each further attempt would leave as much.

        Nothing else needs it. The record of the session explains objects that stay, or are stored late.
        """
        try:
            yield
        except UNCOPIED:
            with suppress(SnapstoreError):
                self.store.delete(sorted(self.written))
            raise


def tags_to_copy(here: View, there: View, snapshot: Snapshot) -> list[str]:
    """Return the tags that a copy gets: not those of a later snapshot that the source does not know."""

    def keeps(s: Snapshot) -> bool:
        return here.get(s.id) is None and not here.is_unknown(s.id) and s.created > snapshot.created

    return here.tags_for(there, snapshot, keeps)


class Copier:
    """Copies snapshots from one open repository into another one.

    Args:
        watch: called often during a copy; if it raises, the copy ends, and nothing of it is committed.
        tags_of: returns the tags that a copy gets, and takes from other snapshots of the destination. Its arguments:
            the records of the source, those of the destination, the snapshot of the source.
        is_later: returns whether a snapshot that only the destination has is later than one of the source.
        takes_tags: take the tags of a copy from other snapshots of the destination.

    Attributes:
        result: the result so far.
        is_one_pass: whether all copies are made in one pass: then snapshots that are there need one listing together.
        verify: whether to rebuild each chunk that is copied and compare its digest. Then only snapshots of the
            destination that were proven are bases, and one that was copied without verification is copied again.
    """

    def __init__(
        self,
        source: Context,
        target: Context,
        watch: Callable[[], object] | None = None,
        tags_of: Callable[[View, View, Snapshot], list[str]] = tags_to_copy,
        is_later: Callable[[Snapshot, Snapshot], bool] = lambda there, snapshot: there.created > snapshot.created,
        takes_tags: bool = True,
    ) -> None:
        self._source, self._target, self._watch, self._tags_of = source, target, watch, tags_of
        self._is_later, self._takes_tags = is_later, takes_tags
        self.is_one_pass, self.verify = False, True
        self._listed: tuple[View, View] | None = None  # the records of both stores, as this pass has listed them
        self.result = CopyResult(target.store.url)
        self._last: dict[str, Snapshot] = {}  # run -> the snapshot that was copied last, or was there
        self._manifests: dict[str, Manifest] = {}  # of the snapshot that was copied last, by SHA-256

    def announce(self, snapshots: Iterable[Snapshot], here: View, there: View) -> None:
        """Create the first record of each copy, unless the destination knows the snapshot or its number is not certain.

        Args:
            here, there: the records of the source, and those of the destination.

        Raises:
            StorageError: the destination failed.
        """
        begun: list[Snapshot] = []
        with confirmed(self._target):
            for snapshot in snapshots:
                if there.get(snapshot.id) is None:
                    with suppress(*DAMAGE, UnreadObjectError):  # of a record there, which `copy` reports
                        begun.append(self.begin(snapshot, here, there, begun))

    def begin(self, snapshot: Snapshot, here: View, there: View, begun: Sequence[Snapshot] = ()) -> Snapshot:
        """Create the first record of a copy, which the destination does not know; return the record that is there then.

        Args:
            here, there: the records of the source, and those of the destination.
            begun: records that were created in the destination since `there` was listed.

        Raises:
            IntegrityError, FormatError: its record in the destination is damaged or gone, or so is that of a later
                snapshot, which says where the copy belongs.
            UnreadRecordError: such a record cannot be read now.
            StorageError: the destination failed.
        """
        there.require_record(snapshot.id)
        record = create(self._target, self._begun(snapshot, here, there, begun))
        self._target.index.add(record)
        return record

    def copy(self, snapshot: Snapshot, *, named: bool) -> Snapshot | None:
        """Copy one snapshot as it is now, unless it is there and seems to be whole.

        Args:
            named: copy it even if the destination has forgotten it; and if it is there, look whether its packs and
                manifests are. Without this, only the notes of a repair there count.

        Returns:
            The snapshot in the destination; None: it is forgotten there, and not `named`; or this is a dry run.

        Raises:
            IntegrityError, FormatError, NotFoundError: it is damaged in the source, or was collected there; nothing was
                committed.
            CapabilityError: this machine cannot rebuild one of its chunks, so it cannot verify the copy.
            ConflictError: other processes keep revising it; or a gc of the destination fenced this copy as dead.
            UnreadObjectError: its record, in one of the stores, cannot be read now, or the source withholds its bytes.
            StorageError: one of the stores failed.
        """
        with confirmed(self._source), self._target.store.pinned():
            return retry_conflicts(
                lambda: self._attempt(snapshot, named),
                lambda error: ConflictError(f"{snapshot.ref}: other processes keep revising it: {error}; copy again"),
            )

    def _attempt(self, snapshot: Snapshot, named: bool) -> Snapshot | None:
        """Try once to copy a snapshot; raise ConflictError if another process has revised it, here or there."""
        earlier, self._listed = self._listed, None
        here, before = views = earlier or (self._source.index.refresh(), self._target.index.refresh())
        ruling = _ruling(here, snapshot)
        there = before.get(snapshot.id)
        before.require_record(snapshot.id)
        if there is not None:
            before.require_last(there)
        if there is not None and (there.run, there.step) != (ruling.run, ruling.step):
            raise IntegrityError(f"{there.key} in {self._target.store.url}: has the same id, but is another snapshot")
        names = self._tags_of(here, before, ruling)
        if there is not None and there.state == COMMITTED and self._seems_whole(there, named):
            self._keep(views, is_unchanged={*names} <= {*there.tags})
            return self._present(names, there)
        if there is not None and there.state in (FORGOTTEN, SWEPT) and not named and not is_dropped(there):
            self._keep(views)
            self.result.left_out.append(there)
            return None
        if self.result.dry_run:
            self._keep(views)
            self.result.copied.append(ruling)
            return None
        if earlier is not None:
            return self._attempt(snapshot, named)  # a copy is made of the records as they are now
        if there and there.state == FORGOTTEN and not is_dropped(there) and self._seems_whole(there, named):
            try:
                there = unforget(self._target, f"id:{there.id}")
            except (NotFoundError, InvalidInputError) as error:  # it was collected, or brought back, since
                raise ConflictError(str(error)) from error
            return self._present(names, there)
        try:
            return self._copied(ruling, there, views, names)
        except DAMAGE as error:
            if same_content(self._source.index.refresh().get(ruling.id), ruling):
                raise
            raise ConflictError(str(error)) from error  # it was rewritten or collected while we read it

    def _keep(self, views: tuple[View, View], *, is_unchanged: bool = True) -> None:
        """Keep the records that show that nothing is to be done, for the next snapshot of the same pass."""
        self._listed = views if self.is_one_pass and is_unchanged else None

    def _seems_whole(self, there: Snapshot, named: bool) -> bool:
        """Return whether a committed snapshot of the destination needs no copy; look for its objects if it is named."""
        if self.verify and there.unproven:
            return False
        return has_bytes(self._target, there) if named else not in_need_of_quarantined(self._target, [there])

    def _present(self, names: Sequence[str], there: Snapshot) -> Snapshot:
        """Give a snapshot that is there some tags, and return it."""
        lacking = [] if self.result.dry_run else [name for name in names if name not in there.tags]
        try:
            for name in lacking:
                there = tags.tag(self._target, f"id:{there.id}", name)
        except (NotFoundError, InvalidInputError) as error:  # it was forgotten since, or has too many tags
            ruling = self._target.index.refresh().get(there.id)
            if ruling is not None and ruling.state == COMMITTED:
                raise
            raise ConflictError(str(error)) from error
        if all(copied.id != there.id for copied in self.result.copied):  # else this copy has put it there
            self.result.present.append(there)
        self._last[there.run] = there
        return there

    def _copied(self, ruling: Snapshot, known: Snapshot | None, views: tuple[View, View], names: list[str]) -> Snapshot:
        """Copy the blobs of a snapshot, and commit it in the destination with some tags.

        Args:
            known: its record there; if it is committed, its bytes there are lost, and it keeps its tags.
            views: the records of the source, and those of the destination.
        """
        started = time.monotonic()
        ruling = msgspec.structs.replace(ruling, unproven=msgspec.UNSET if self.verify else self._source.config.uuid)
        found = list(all_manifests(ruling, self._read))
        with confirmed(self._target):
            there = known or self.begin(ruling, *views)
            if known is None and there.state == COMMITTED:
                raise ConflictError("another process has copied it")
            if _is_fence(there):
                there = msgspec.structs.replace(there, seq=self._begun(ruling, *views).seq)
            near = [self._last[ruling.run].id] if ruling.run in self._last else []
            with CopySession(self._target, there, ruling, near, views[1]) as session:
                session.watch = self._watch
                bases = load_bases(self._target, session, self._manifests)
                with session.taking_back():
                    moved = move(self._target, session, self._source, found, bases, verify=self.verify)
                record = self._record(ruling, there, moved)
                kept = there.tags if there.state == COMMITTED else []  # others may have the tags of a dropped one
                record = msgspec.structs.replace(record, tags=[*dict.fromkeys([*kept, *names])])
                session.confirm(moved.sizes)
                session.publish(record)
            self._target.index.add(record, moved.top.headers | moved.below.headers)
            self._note(record, moved)
            if known is not None:
                remove_note(self._target.store, record)
            if names and self._takes_tags:
                record = tags.take(self._target, names, record, views[1])
        text = "run=%s step=%d copied to %s: %s read, %s stored, total=%.2fs"
        sizes = human_bytes(moved.read_bytes), human_bytes(sum(moved.sizes.values()))
        log.info(text, record.run, record.step, self._target.store.url, *sizes, time.monotonic() - started)
        return record

    def _read(self, ref: ManifestRef) -> Manifest:
        seed = self._source.config.digest_seed
        return read_object_twice(self._source.store, lambda: manifest.read(self._source.store, ref, seed))

    def _record(self, ruling: Snapshot, there: Snapshot, moved: Moved) -> Snapshot:
        """Return the record of a copy: that of the source, in its place in the destination."""
        place = {name: getattr(there, name) for name in ("run", "step", "seq", "revision")}
        return msgspec.structs.replace(ruling, **place).revised(
            state=COMMITTED,
            reason="",
            policy="",
            manifests=moved.top.manifests,
            manifest_list=moved.top.manifest_list,
            depth=max(moved.top.depth, moved.below.depth),
            stored_bytes=sum(moved.sizes.values()),
        )

    def _begun(self, ruling: Snapshot, here: View, view: View, begun: Sequence[Snapshot] = ()) -> Snapshot:
        """Return the first record of a copy; its seq gives the copy its place in the order of the run.

        It comes after all snapshots that are there, unless a later one is there, or its copy has begun: one that is
        later in the source, or, if the source does not know it, by `is_later`. A copy keeps its distance from a later
        one, so that the snapshots between the two find numbers too. A mirror of a run has the numbers of the source; a
        run that went on in the destination keeps its order.

        Raises:
            IntegrityError, UnreadRecordError: a later snapshot is there, and its number is not known, since its record
                is damaged or gone, or cannot be read now.
        """
        numbers = {s.id: s.seq for s in here.snapshots(ruling.run, states=None)}
        after_all = 1 + max(numbers.values(), default=ruling.seq)
        later = {name: seq for name, seq in numbers.items() if (seq, name) > (ruling.seq, ruling.id)}
        unknown = view.unknown_ids(ruling.run)
        there = view.snapshots(ruling.run, states=None) + [known for _, known in unknown.values() if known is not None]
        there = [s for s in (*there, *begun) if not _is_fence(s)]
        for s in there:
            is_only_there = s.id not in numbers and s.state != ABORTED  # a fence has neither a date nor a number
            if is_only_there and self._is_later(s, ruling):
                later[s.id] = ruling.seq + 1 if here.is_unknown(s.id) else after_all
        found = {s.id: s.seq for s in there if s.id in later}
        for name, (key, known) in unknown.items():
            if name in later and known is None:
                kind = UnreadRecordError if key in view.unread else IntegrityError
                raise kind(f"it belongs before {key} in the destination, which cannot be read or is gone")
        if found:
            end = min(found.values())
            before = max((s.seq for s in there if s.id not in later and s.seq < end), default=-1)
            seq = min(number - (later[name] - ruling.seq) for name, number in found.items())
            seq = max(0, min(max(seq, before + 1), end - 1))
        else:
            seq = view.next_seq(ruling.run, max([ruling.seq, *(s.seq + 1 for s in begun if s.run == ruling.run)]))
        return msgspec.structs.replace(aborted(ruling.run, ruling.step, ruling.id, COPY_BEGUN), seq=seq)

    def _note(self, record: Snapshot, moved: Moved) -> None:
        self.result.copied.append(record)
        self.result.read_bytes += moved.read_bytes
        self.result.stored_bytes += sum(moved.sizes.values())
        self.result.blobs += moved.blobs
        self._last[record.run] = record
        self._manifests = moved.top.manifests_by_name | moved.below.manifests_by_name


def _is_fence(s: Snapshot) -> bool:
    """Return whether a record has no place in the order of its run: a fence, or a repair that gave the snapshot up."""
    return s.state == ABORTED and not s.seq


def _ruling(view: View, snapshot: Snapshot) -> Snapshot:
    """Return the ruling record of a snapshot of the source.

    Raises:
        IntegrityError: it is damaged or gone, or a later one is.
        UnreadRecordError: it cannot be read now.
        NotFoundError: its bytes are gone.
    """
    view.require_record(snapshot.id)
    ruling = view.get(snapshot.id)
    if ruling is None or ruling.state not in (COMMITTED, FORGOTTEN):
        raise NotFoundError(f"was {ruling.state if ruling else 'removed'} meanwhile; nothing of it was copied")
    view.require_last(ruling)
    return ruling
