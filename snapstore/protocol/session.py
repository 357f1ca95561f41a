"""Session: a save's standing in the protocol: announced before it reads, committed by one create-only record.

The order is the safety (docs/format.md and docs/design/protocol.md):

    begin     PUT sessions/<id>; only then LIST gc marks, twice; only then LIST records: the bases are committed
              snapshots whose packs no mark names, so no gc can be deleting what this save will reference
    write     packs, then manifests (save.py), all durable before
    commit    GET sessions/<id>: no gc has given this save up, and none has overlooked it; then a create-only PUT of
              revision 0 of the record, which is read back; a gc that gives a save up creates the same key as
              `aborted`, so exactly one of the two wins
    end       a save that has put something and commits nothing creates the key as `aborted`: its packs are explained;
              DELETE sessions/<id>

A crash between any two steps leaves either no record (gc reclaims the packs) or a committed snapshot. `Claim` is what
a rewrite has in common with a save: its record is the next revision of one that is there (rewrite.py).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Self

from ..catalog.history import View
from ..catalog.needed_keys import needed_keys
from ..catalog.read_twice import listed
from ..context import Context
from ..errors import (
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
from ..format import manifest, records
from ..format.keys import parse_record_key, quarantined_names, record_key
from ..format.manifest import ManifestHeader
from ..format.records import ABORTED, COMMITTED, MAX_OBJECT_BYTES, MadeFor, Snapshot
from .marks import is_mark, read_mark
from .same_repository import confirmed
from .this_process import this_session

log = logging.getLogger("snapstore")
COMMIT_ATTEMPTS = 4
#: No further attempt is begun after so long: each may take as long as the store's own time-outs.
COMMIT_S = 300.0
#: Ids of this process's saves that are over, but whose session could not be removed or whose commit is unclear: their
#: process lives, so only a gc of this process can know that it may fence them.
LEFT_OVER: set[str] = set()
HEARTBEAT_S = 60.0


class Claim:
    """A record to be: announced to gcs before anything is read, created at the end, or given up for good.

    Use as a context manager. As long as it stands, no gc deletes what was put since; a gc that gives it up creates
    another record under its key first, so exactly one of the two wins. And the store keeps to the place that held the
    repository when this began (confirm.py): nothing is put where another volume is mounted since.

    Args:
        instead: from the reason of a failure, the record that takes the place of the one to be: it can never appear
            later, and what was put for it is explained.

    Attributes:
        id: of the session; names what is put meanwhile.
        key: of the record to be.
        made_for: the same, as packs and manifests say it.
        written: keys of the packs and manifests that were put for it, or may have been.
        quarantined: packs that are known to be damaged, once `marked` has looked.
        verb: what it is for, in errors.
    """

    def __init__(
        self, context: Context, key: str, verb: str, instead: Callable[[str], Snapshot]
    ) -> None:  # fmt: skip
        self._context = context
        self.store, self.key, self.verb, self._instead = context.store, key, verb, instead
        self._place = ExitStack()
        parsed = parse_record_key(key)
        assert parsed is not None
        self.run, self.step, name, revision = parsed
        self.made_for = MadeFor(bytes.fromhex(name), revision)
        self.id = records.new_id() if revision else name
        self.written: set[str] = set()
        self._session_key = f"sessions/{self.id}"
        self._announced = records.encode(this_session(self.id, key))
        self._last_beat = time.monotonic()
        self._unclear = False
        self._decided = False  # a record lies under the key, whosoever
        self.quarantined: set[str] = set()
        config = self._place.enter_context(confirmed(context))
        try:
            if config is not None and context.index.digest_seed not in (None, config.digest_seed):
                raise StorageError(
                    f"{context.store.url}: config has another digest seed than when this repository was opened: it was "
                    f"replaced or repaired; nothing was written; open the repository again, then {verb} again"
                )
            context.store.hold(self._session_key, self._announced)
        except BaseException:
            self._release()
            raise

    def marked(self) -> set[str] | None:
        """What gcs want to delete; None if that cannot be told."""
        marked: set[str] = set()
        keys = list(listed(self.store, "gc/"))
        self.quarantined = quarantined_names(keys)
        try:
            for key in filter(is_mark, keys):
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
        try:
            if self.written and not self._decided:
                LEFT_OVER.add(self.id)  # the session keeps our packs safe, and explained, until a gc has fenced us
                if not self._unclear:  # else it was tried
                    self._give_up(f"{self.verb} failed: {exc[1]}"[:500])
            if self._decided or not self.written:
                LEFT_OVER.discard(self.id)
                self._release()
        finally:
            self._place.close()

    def _give_up(self, reason: str) -> None:
        """Explain what was put by a record that commits nothing; where there is no room for one, take it away."""
        with suppress(SnapstoreError):
            try:
                self._create(self._instead(reason))
            except StorageFullError:  # the store has answered: our record can no longer appear, and nobody else needs
                self.store.delete(sorted(self.written))  # what is ours alone
                for prefix in ("packs/", "manifests/"):
                    self.store.settle(prefix)  # a power loss must not bring it back, unexplained
                self.written &= self.store.sizes(self.written).keys()

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
            except NotFoundError:
                self._require_session()
            except StorageError as error:
                log.warning("run=%s step=%d a heartbeat failed, the next may not: %s", self.run, self.step, error)
            except CapabilityError as error:  # for good: asked once
                self._last_beat = math.inf
                log.warning(
                    "run=%s step=%d the store takes no heartbeats (%s): a gc on another host gives up a %s that takes "
                    "longer than its --fence-after, an hour by default", self.run, self.step, error, self.verb,
                )  # fmt: skip

    def _require_session(self) -> None:
        """Raise ConflictError unless the session is still there: a gc that looked since it was put has seen it.

        Raises:
            StorageError: it cannot be read.
        """
        for again in (True, False):  # one wrong answer must not cost a save
            try:
                if self.store.get(self._session_key, limit_bytes=MAX_OBJECT_BYTES) == self._announced:
                    return
            except (NotFoundError, FormatError, IntegrityError):
                continue
            except StorageError:
                if not again:
                    raise
        raise ConflictError(
            f"{self.verb} {self.run}@{self.step}: its session is gone: a gc gave this {self.verb} up as dead; nothing "
            f"was committed; {self.verb} again"
        )

    def confirm(self, sizes: Mapping[str, int]) -> None:
        """Look whether packs and manifests that were put are there.

        Args:
            sizes: of each, by key [bytes].

        Raises:
            ConflictError: a gc has given this up, and deleted them; nothing was committed.
            StorageError: one is missing, or of another size; nothing was committed.
        """
        absent = dict(sizes)
        for _ in range(2):
            found = self.store.sizes(list(absent))
            absent = {key: size for key, size in absent.items() if found.get(key) != size}
            if not absent:
                return
        self._require_session()  # else a gc has deleted them
        key, size = next(iter(absent.items()))
        raise StorageError(
            f"{key} in {self.store.url}: was put and is not there: expected {size} bytes, got "
            f"{found.get(key, 'none')}; so are {len(absent)} of {len(sizes)} objects; nothing was committed; "
            f"{self.verb} again"
        )

    def publish(self, snapshot: Snapshot) -> Snapshot:
        """Create the record, and read it back.

        Raises:
            ConflictError: there is another one under its key, or a gc has given this up; nothing was committed.
            StorageError: the store failed; nothing was committed, or nothing is known (the message says so).
        """
        self._require_session()
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
        self._take_back(snapshot, self._instead(f"commit failed: {failure}"[:500]), failure)
        return snapshot  # our own PUT had landed after all

    def _create(self, snapshot: Snapshot) -> Snapshot:
        """PUT the record; whatever the answer, what lies under the key decides, and is returned.

        Raises:
            StorageError: nothing that can be read was found there. It may still land, unless `_unclear` is false.
        """
        earlier, self._unclear = self._unclear, True
        data, failure = records.encode(snapshot), None
        try:
            self.store.put(snapshot.key, data)
        except (StorageError, AlreadyExistsError) as error:
            failure = error
            self.store.settle(f"snapshots/{self.run}/")  # what is there but not durable must not count
        try:
            got = self.store.get(snapshot.key, limit_bytes=MAX_OBJECT_BYTES)
            found = snapshot if got == data else records.decode(got, Snapshot, snapshot.key)
        except (NotFoundError, FormatError, IntegrityError) as error:
            if isinstance(failure, StorageFullError) and isinstance(error, NotFoundError):
                self._unclear = earlier  # the store has answered: this PUT will not land later
            if isinstance(failure, StorageError):
                raise failure from None
            said = "reported as existing" if failure else "stored"
            raise StorageError(f"{snapshot.key}: {said}, then not found as it was put: {error}") from error
        self._unclear, self._decided = False, True
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

    def __init__(self, context: Context, run: str, step: int, *, parent: str | None, also: Sequence[str] = ()) -> None:
        self._context = context
        self.seq = 0
        super().__init__(context, record_key(run, step, records.new_id(), 0), "save", self._aborted)
        self._index = context.index
        try:
            marked = self.marked()
            view = context.index.refresh()
            self.parent, self.bases = self._choose(view, parent, also, marked)
            self.seq = view.next_seq(run)
            if not self.bases:
                self._compare_seed(view)
        except BaseException:
            self._release()
            raise

    def _compare_seed(self, view: View) -> None:
        """Without bases, whose seeds are compared anyway, compare that of the oldest snapshot.

        Raises:
            FormatError: config is another repository's, as far as can be told.
        """
        refs = [ref for snapshot in view.snapshots() for ref in snapshot.manifests][:1]
        for header in self._index.headers(refs):
            if self._index.digest_seed is not None and isinstance(header, ManifestHeader):
                manifest.check_seed(header, self._index.digest_seed, refs[0].key)

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
        return self.publish(snapshot)

    def _aborted(self, reason: str) -> Snapshot:
        return Snapshot(
            id=self.id, run=self.run, step=self.step, seq=self.seq, state=ABORTED, write_id=records.new_id(),
            reason=reason,
        )  # fmt: skip
