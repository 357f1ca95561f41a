"""Session: a save's standing in the protocol: announced before it reads, committed by one create-only record.

The order is the safety (docs/format.md and docs/design/protocol.md):

    begin     PUT sessions/<id>; only then LIST gc marks; only then LIST records: the bases are committed snapshots
              whose packs no mark names, so no gc can be deleting what this save will reference
    write     packs, then manifests (save.py), all durable before
    commit    create-only PUT of revision 0 of the record; a gc that gave this save up has created the same key as
              `aborted`, so exactly one of the two wins
    end       DELETE sessions/<id>

A crash between any two steps leaves either no record (gc reclaims the packs) or a committed snapshot. `Claim` is what
a rewrite has in common with a save: its record is the next revision of one that is there (rewrite.py).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Self

from . import records
from .confirm import confirmed
from .errors import (
    AlreadyExistsError,
    CapabilityError,
    ConflictError,
    FormatError,
    IntegrityError,
    NotFoundError,
    SnapstoreError,
    StorageError,
    StorageFullError,
)
from .index import Index
from .records import ABORTED, COMMITTED, Mark, Snapshot
from .storage import ObjectStore
from .view import View

log = logging.getLogger("snapstore")
COMMIT_ATTEMPTS = 4
#: No further attempt is begun after so long: each may take as long as the store's own time-outs.
COMMIT_S = 300.0
#: Ids of this process's saves that are over, but whose session could not be removed or whose commit is unclear: their
#: process lives, so only a gc of this process can know that it may fence them.
LEFT_OVER: set[str] = set()
HEARTBEAT_S = 60.0


def mark_keys(store: ObjectStore) -> list[str]:
    """Keys of the gc marks there are."""
    return [info.key for info in store.list("gc/") if _is_mark(info.key)]


def _is_mark(key: str) -> bool:
    return key.endswith(".mark")


def read_mark(store: ObjectStore, key: str) -> Mark | None:
    """A gc mark; None for one that has vanished meanwhile: it was finished or given up."""
    try:
        return records.decode(store.get(key, limit_bytes=MARK_LIMIT_BYTES), Mark, key)
    except NotFoundError:
        return None


#: A mark names each candidate in 32 bytes: 32 million objects.
MARK_LIMIT_BYTES = 1024 * 1024 * 1024


class Claim:
    """A record to be: announced to gcs before anything is read, created at the end, or given up for good.

    Use as a context manager. As long as it stands, no gc deletes what was put since; a gc that gives it up creates
    another record under its key first, so exactly one of the two wins. And the store keeps to the place that held the
    repository when this began (confirm.py): nothing is put where another volume is mounted since.

    Attributes:
        id: of the session; names what is put meanwhile.
        key: of the record to be.
        quarantined: packs that are known to be damaged, once `marked` has looked.
        verb: what it is for, in errors.
    """

    def __init__(self, store: ObjectStore, index: Index, key: str, verb: str) -> None:
        self.store, self.key, self.verb = store, key, verb
        self._place = ExitStack()
        parsed = records.parse_record_key(key)
        assert parsed is not None
        self.run, self.step, name, revision = parsed
        self.id = records.new_id() if revision else name
        self._session_key = f"sessions/{self.id}"
        self._last_beat = time.monotonic()
        self._unclear = False
        self.quarantined: set[str] = set()
        self._place.enter_context(confirmed(store, index))
        try:
            store.hold(self._session_key, records.encode(records.this_session(self.id, key)))
        except BaseException:
            self._release()
            raise

    def marked(self) -> set[str] | None:
        """What gcs want to delete; None if that cannot be told."""
        marked: set[str] = set()
        keys = [info.key for info in self.store.list("gc/")]
        self.quarantined = records.quarantined(keys)
        try:
            for key in filter(_is_mark, keys):
                mark = read_mark(self.store, key)
                marked |= mark.keys() if mark else set()
        except (IntegrityError, FormatError, StorageError) as error:
            text = "run=%s a gc mark cannot be read, %ss share nothing until a gc or a repair has removed it: %s"
            log.warning(text, self.run, self.verb, error)
            return None
        return marked

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._unclear:  # the session keeps our packs safe until a gc has fenced us
            LEFT_OVER.add(self.id)
            self._place.close()
        else:
            self._release()

    def _release(self) -> None:
        """End the session; failing to is no failure of the save: gc sees a dead, stale or left-over session."""
        try:
            self.store.release(self._session_key)
        except StorageError as error:
            LEFT_OVER.add(self.id)
            log.warning("session %s could not be removed: %s", self.id, error)
        finally:
            self._place.close()

    def heartbeat(self) -> None:
        """Tell gc that this save lives; cheap to call often."""
        if time.monotonic() - self._last_beat >= HEARTBEAT_S:
            self._last_beat = time.monotonic()
            try:
                self.store.touch(self._session_key)
            except NotFoundError as error:
                raise ConflictError(
                    f"{self.verb} {self.run}@{self.step}: its session is gone: a gc gave this {self.verb} up as dead; "
                    f"{self.verb} again"
                ) from error
            except StorageError as error:
                log.warning("run=%s step=%d a heartbeat failed, the next may not: %s", self.run, self.step, error)
            except CapabilityError as error:  # for good: asked once
                self._last_beat = math.inf
                log.warning(
                    "run=%s step=%d the store takes no heartbeats (%s): a gc on another host gives up a %s that takes "
                    "longer than its --fence-after, an hour by default", self.run, self.step, error, self.verb,
                )  # fmt: skip

    def publish(self, snapshot: Snapshot, instead: Callable[[str], Snapshot]) -> Snapshot:
        """Create the record.

        Args:
            instead: from the reason of a failure, the record that takes its place, so that it can never appear later.

        Raises:
            ConflictError: there is another one under its key; nothing was committed.
            StorageError: the store failed; nothing was committed, or nothing is known (the message says so).
        """
        failure: StorageError | None = None
        began = time.monotonic()
        for attempt in range(COMMIT_ATTEMPTS):
            if attempt and time.monotonic() - began > COMMIT_S:
                break
            if attempt:
                time.sleep(0.05 * 4**attempt)
            try:
                ruling = self._create(snapshot)
            except StorageError as error:
                if not self._unclear:
                    raise
                failure = error
                continue
            if ruling.write_id == snapshot.write_id:
                return snapshot  # maybe a response was lost; the commit was not
            raise ConflictError(
                f"{self.verb} {snapshot.ref}: {ruling.reason or 'another writer'} has created its record as "
                f"{ruling.state!r}; nothing of this {self.verb} was committed; {self.verb} again"
            )
        assert failure is not None
        self._take_back(snapshot, instead(f"commit failed: {failure}"[:500]), failure)
        return snapshot  # our own PUT had landed after all

    def _create(self, snapshot: Snapshot) -> Snapshot:
        """PUT the record; whatever the answer, what lies under the key decides, and is returned.

        Raises:
            StorageError: nothing was found there. It may still land, unless `_unclear` is false.
        """
        earlier, self._unclear = self._unclear, True
        try:
            self.store.put(snapshot.key, records.encode(snapshot))
            found = snapshot
        except (StorageError, AlreadyExistsError) as error:
            try:
                self.store.settle(f"snapshots/{self.run}/")  # what is there but not durable must not count
                found = records.decode(self.store.get(snapshot.key), Snapshot, snapshot.key)
            except NotFoundError:
                if isinstance(error, AlreadyExistsError):
                    raise StorageError(f"{snapshot.key}: reported as existing, then not found") from error
                if isinstance(error, StorageFullError):
                    self._unclear = earlier  # the store has answered: this PUT will not land later
                raise error from None
        self._unclear = False
        return found

    def _take_back(self, snapshot: Snapshot, instead: Snapshot, failure: StorageError) -> None:
        """Make sure that the failed commit can never appear later; returns only if it turns out to have landed."""
        try:
            ruling = self._create(instead)
        except StorageError:
            raise StorageError(
                f"{self.verb} {snapshot.ref}: the commit failed and could not be taken back ({failure}); "
                "whether it was committed shows when the store answers again ('snapstore log')"
            ) from failure
        if ruling.write_id != snapshot.write_id:
            raise failure


class Session(Claim):
    """One save in flight. Use as a context manager: an exception before the commit leaves no snapshot.

    Attributes:
        id: of the snapshot to be.
        bases: the snapshots this save may reference, the best first.
        parent: lineage: what this process restored or last committed.
    """

    def __init__(
        self, store: ObjectStore, index: Index, run: str, step: int, *, parent: str | None, also: Sequence[str] = ()
    ) -> None:
        super().__init__(store, index, records.record_key(run, step, records.new_id(), 0), "save")
        self._index = index
        try:
            marked = self.marked()
            view = index.refresh()
            self.parent, self.bases = self._choose(view, parent, also, marked)
            self.seq = view.next_seq(run)
        except BaseException:
            self._release()
            raise

    def _choose(
        self, view: View, parent: str | None, also: Sequence[str], marked: set[str] | None
    ) -> tuple[str | None, list[Snapshot]]:
        """Lineage and bases: the parent, the newest of the run, what the caller names; if no gc wants their packs."""
        newest = view.newest(self.run)
        first = parent or (newest.id if newest else None)
        bases: list[Snapshot] = []
        for name in [first, newest.id if newest else None, *also]:
            snapshot = view.get(name) if name else None
            if marked is None or snapshot is None or snapshot.state != COMMITTED or snapshot in bases:
                continue
            try:
                if marked.isdisjoint(needed_keys(self._index, snapshot)):
                    bases.append(snapshot)
                else:
                    log.info("run=%s base %s is being collected: not used", self.run, snapshot.ref)
            except (NotFoundError, IntegrityError, FormatError, StorageError) as error:
                log.warning("run=%s base %s is damaged and not used: %s", self.run, snapshot.ref, error)
        return first, bases

    def commit(self, **fields: Any) -> Snapshot:
        """Create the record; see `publish` for what it raises."""
        snapshot = Snapshot(
            id=self.id, run=self.run, step=self.step, seq=self.seq, state=COMMITTED, write_id=records.new_id(),
            parent=self.parent, bases=[base.id for base in self.bases], **fields,
        )  # fmt: skip
        return self.publish(snapshot, self._aborted)

    def _aborted(self, reason: str) -> Snapshot:
        return Snapshot(
            id=self.id, run=self.run, step=self.step, seq=self.seq, state=ABORTED, write_id=records.new_id(),
            reason=reason,
        )  # fmt: skip


def needed_keys(index: Index, snapshot: Snapshot) -> set[str]:
    """Keys of every manifest and pack that a snapshot needs."""
    ((_, keys),) = all_needed_keys(index, [snapshot])
    if isinstance(keys, SnapstoreError):
        raise keys
    return keys


def all_needed_keys(
    index: Index, snapshots: Sequence[Snapshot]
) -> Iterator[tuple[Snapshot, set[str] | SnapstoreError]]:
    """Of every snapshot its `needed_keys`, or what is wrong with a manifest; manifests are read several at a time."""
    headers = index.headers(ref for snapshot in snapshots for ref in snapshot.manifests)
    for snapshot in snapshots:
        keys: set[str] = set()
        wrong: SnapstoreError | None = None
        for ref in snapshot.manifests:
            header = next(headers)
            if isinstance(header, SnapstoreError):
                wrong = wrong or header
            else:
                keys.add(ref.key)
                keys.update(map(records.pack_key, header.pack_names))
        yield snapshot, wrong or keys
