"""Session: a save's standing in the protocol: announced before it reads, committed by one create-only record.

The order is the safety (docs/format.md and docs/design/protocol.md):

    begin     PUT sessions/<id>; only then LIST gc marks; only then LIST records: the bases are committed snapshots
              whose packs no mark names, so no gc can be deleting what this save will reference
    write     packs, then manifests (save.py), all durable before
    commit    create-only PUT of revision 0 of the record; a gc that gave this save up has created the same key as
              `aborted`, so exactly one of the two wins
    end       DELETE sessions/<id>

A crash between any two steps leaves either no record (gc reclaims the packs) or a committed snapshot.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

from . import records
from .errors import (
    AlreadyExistsError,
    ConflictError,
    FormatError,
    IntegrityError,
    NotFoundError,
    StorageError,
    StorageFullError,
)
from .index import Index, View
from .records import ABORTED, COMMITTED, Mark, Snapshot
from .storage import ObjectStore

log = logging.getLogger("snapstore")
COMMIT_ATTEMPTS = 4
HEARTBEAT_S = 60.0


def read_marks(store: ObjectStore) -> Iterator[Mark]:
    """Every gc mark there is; one that vanishes while we look was finished or given up."""
    for info in store.list("gc/"):
        if info.key.endswith(".mark"):
            try:
                data = store.get(info.key, limit_bytes=MARK_LIMIT_BYTES)
            except NotFoundError:
                continue
            yield records.decode(data, Mark, info.key)


#: A mark names each candidate in 32 bytes: 32 million objects.
MARK_LIMIT_BYTES = 1024 * 1024 * 1024


class Session:
    """One save in flight. Use as a context manager: an exception before the commit leaves no snapshot.

    Attributes:
        id: of the snapshot to be.
        bases: the snapshots this save may reference, the best first.
        parent: lineage: what this process restored or last committed.
    """

    def __init__(
        self, store: ObjectStore, index: Index, run: str, step: int, *, parent: str | None, also: Sequence[str] = ()
    ) -> None:
        self.store, self.run, self.step = store, run, step
        self.id = records.new_id()
        self.key = records.record_key(run, step, self.id, 0)
        self._index = index
        self._session_key = f"sessions/{self.id}"
        self._last_beat = time.monotonic()
        self._unclear = False
        store.hold(self._session_key, records.encode(records.this_session(self.id, self.key)))
        try:
            marked: set[str] = set()
            for mark in read_marks(store):
                marked |= mark.keys()
            view = index.refresh()
            self.parent, self.bases = self._choose(view, parent, also, marked)
            self.seq = 1 + max((s.seq for s in view.snapshots(run, states=None)), default=-1)
        except BaseException:
            self._release()
            raise

    def _choose(
        self, view: View, parent: str | None, also: Sequence[str], marked: set[str]
    ) -> tuple[str | None, list[Snapshot]]:
        """Lineage and bases: the parent, the newest of the run, what the caller names; if no gc wants their packs."""
        newest = view.newest(self.run)
        first = parent or (newest.id if newest else None)
        bases: list[Snapshot] = []
        for name in [first, newest.id if newest else None, *also]:
            snapshot = view.get(name) if name else None
            if snapshot is None or snapshot.state != COMMITTED or snapshot in bases:
                continue
            try:
                if marked.isdisjoint(needed_keys(self._index, snapshot)):
                    bases.append(snapshot)
                else:
                    log.info("run=%s base %s is being collected: not used", self.run, snapshot.ref)
            except (NotFoundError, IntegrityError, FormatError) as error:
                log.warning("run=%s base %s is damaged and not used: %s", self.run, snapshot.ref, error)
        return first, bases

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._unclear:  # else the session keeps our packs safe until a gc has fenced us
            self._release()

    def _release(self) -> None:
        """End the session; failing to is no failure of the save: gc sees a dead or stale session."""
        try:
            self.store.release(self._session_key)
        except StorageError as error:
            log.warning("session %s could not be removed: %s", self.id, error)

    def heartbeat(self) -> None:
        """Tell gc that this save lives; cheap to call often."""
        if time.monotonic() - self._last_beat >= HEARTBEAT_S:
            self._last_beat = time.monotonic()
            try:
                self.store.touch(self._session_key)
            except NotFoundError as error:
                raise ConflictError(
                    f"save {self.run}@{self.step}: its session is gone: a gc gave this save up as dead; save again"
                ) from error

    def commit(self, **fields: Any) -> Snapshot:
        """Create the record.

        Raises:
            ConflictError: a gc fenced this save; nothing was committed.
            StorageError: the store failed; nothing was committed, or nothing is known (the message says so).
        """
        snapshot = Snapshot(
            id=self.id, run=self.run, step=self.step, seq=self.seq, state=COMMITTED, write_id=records.new_id(),
            parent=self.parent, bases=[base.id for base in self.bases], **fields,
        )  # fmt: skip
        failure: StorageError | None = None
        for attempt in range(COMMIT_ATTEMPTS):
            if attempt:
                time.sleep(0.05 * 4**attempt)
            self._unclear = True
            try:
                self._create(snapshot)
            except StorageFullError:
                self._unclear = False  # the store has answered: this PUT will not land later
                raise
            except StorageError as error:
                failure = error
                continue
            self._unclear = False
            return snapshot
        assert failure is not None
        self._abort(snapshot, failure)
        return snapshot  # our own PUT had landed after all

    def _create(self, snapshot: Snapshot) -> None:
        """PUT the record; whatever the answer, what lies under the key decides."""
        try:
            self.store.put(snapshot.key, records.encode(snapshot))
        except (StorageError, AlreadyExistsError) as error:
            try:
                self.store.settle(f"snapshots/{self.run}/")  # what is there but not durable must not count
                found = records.decode(self.store.get(snapshot.key), Snapshot, snapshot.key)
            except NotFoundError:
                if isinstance(error, StorageError):
                    raise error from None
                raise StorageError(f"{snapshot.key}: reported as existing, then not found") from error
            if found.write_id == snapshot.write_id:
                return  # the response was lost, the commit was not
            self._unclear = False
            raise ConflictError(
                f"save {snapshot.ref}: {found.reason or 'another writer'} has created its record as "
                f"{found.state!r}; nothing of this save was committed; save again"
            ) from error

    def _abort(self, snapshot: Snapshot, failure: StorageError) -> None:
        """Make sure that the failed commit can never appear later; returns only if it turns out to have landed."""
        aborted = Snapshot(
            id=self.id, run=self.run, step=self.step, seq=self.seq, state=ABORTED, write_id=records.new_id(),
            reason=f"commit failed: {failure}"[:500],
        )  # fmt: skip
        try:
            self._create(aborted)
        except ConflictError:
            found = records.decode(self.store.get(snapshot.key), Snapshot, snapshot.key)
            if found.write_id == snapshot.write_id:
                return
        except StorageError:
            raise StorageError(
                f"save {snapshot.ref}: the commit failed and could not be taken back ({failure}); "
                "whether it was committed shows when the store answers again ('snapstore log')"
            ) from failure
        self._unclear = False
        raise failure


def needed_keys(index: Index, snapshot: Snapshot) -> set[str]:
    """Keys of every manifest and pack that a snapshot needs."""
    keys: set[str] = set()
    for ref in snapshot.manifests:
        keys.add(ref.key)
        keys.update(map(records.pack_key, index.header(ref).pack_names))
    return keys
