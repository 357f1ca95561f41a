"""Claim: the steps of a save or a rewrite, from its session to its record.

A claim names the record that it will create: a save's is revision 0, a rewrite's is the next revision of a record that
exists. The order of its steps is what makes it safe (docs/format.md and docs/design/protocol.md):

    begin     PUT sessions/<id>; only then LIST gc marks, twice; only then LIST records
    write     packs, then manifests, all durable before the commit
    commit    GET sessions/<id>: if it is there, every gc has seen this claim and none has fenced it; then a create-only
              PUT of the record, which is read back; a gc that fences a claim creates the same key, so exactly one wins
    end       a claim that has put something and commits nothing creates the key itself, as `aborted` or as a copy of
              the previous revision: that record explains its packs; DELETE sessions/<id>

A crash between any two steps leaves either no record (gc deletes the packs) or a committed one.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Self

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
    lasting,
)
from ..format import records
from ..format.keys import parse_record_key, quarantined_names
from ..format.records import MAX_OBJECT_BYTES, MadeFor, Snapshot
from ..text import log, printable
from .liveness import orphaned_sessions, this_session
from .notes import marked_keys
from .same_repository import confirmed

COMMIT_ATTEMPTS = 4
#: No further attempt begins after this time: each may take as long as the store's own time-outs.
COMMIT_S = 300.0
HEARTBEAT_S = 60.0
UNKNOWN = "whether it was committed is unknown: run 'snapstore log' once the store answers again"


class Putter:
    """Puts packs and manifests for one record, while a session protects and explains them.

    The store refuses every place but the one that held the repository when the session began (same_repository.py), so
    nothing is put on a volume that was mounted later.

    Attributes:
        id: of the session; packs and manifests carry it.
        made_for: the record's id and revision, as packs and manifests state it.
        written: keys of the packs and manifests that were put, or may have been.
        quarantined: keys of the packs in quarantine, or known to be damaged; empty before they are looked for.
        watch: called with every heartbeat; what it raises ends the work.
    """

    def __init__(self, context: Context, verb: str, session_id: str, made_for: MadeFor) -> None:
        self._context, self.store, self.verb = context, context.store, verb
        self.id, self.made_for = session_id, made_for
        self._same_repository = ExitStack()
        self.written: set[str] = set()
        self.quarantined: set[str] = set()
        self.watch: Callable[[], object] | None = None

    def heartbeat(self) -> None:
        """Call `watch`, which raises if the work must end; cheap to call often."""
        if self.watch is not None:
            self.watch()

    def require_session(self) -> None:
        """Raise ConflictError if a gc is known to have fenced the session; this base class knows of none."""

    def confirm(self, sizes: Mapping[str, int]) -> None:
        """Check that the store has the packs and manifests that were put.

        Args:
            sizes: the size of each, by key [bytes].

        Raises:
            ConflictError: a gc has fenced the session and deleted them; nothing was committed.
            StorageError: one is missing or has another size; nothing was committed.
        """
        absent = dict(sizes)
        for _ in range(2):
            found = self.store.sizes(list(absent))
            absent = {key: size for key, size in absent.items() if found.get(key) != size}
            if not absent:
                return
        self.require_session()  # else a gc has deleted them
        key, size = next(iter(absent.items()))
        raise StorageError(
            f"{key} in {self.store.url}: was put, but is not there: expected {size} bytes, got "
            f"{found.get(key, 'none')}; {len(absent)} of {len(sizes)} objects are missing or cut; nothing was "
            f"committed; {self.verb} again"
        )


class Claim(Putter):
    """The right to create one record: announced before anything is read, and kept until the record exists.

    Use as a context manager: `with` announces it. While a claim stands, no gc deletes what was put for it. A gc that
    fences the claim first creates another record under its key, so exactly one of the two wins.

    Args:
        key: of the record to create.
        verb: what the claim is for, in errors.
        substitute: takes the reason of a failure, and returns the record that takes the key instead. Then the intended
            record can never appear, and a record explains the packs that were put for it.

    Attributes:
        shared: whether other processes may have put objects for this claim: ranks of the same job.
    """

    def __init__(self, context: Context, key: str, verb: str, substitute: Callable[[str], Snapshot]) -> None:
        parsed = parse_record_key(key)
        assert parsed is not None
        self.run, self.step, snapshot_id, revision = parsed
        session_id = records.new_id() if revision else snapshot_id
        super().__init__(context, verb, session_id, MadeFor(bytes.fromhex(snapshot_id), revision, self.run, self.step))
        self._substitute = substitute
        self._session_key, self._key = f"sessions/{self.id}", key
        self._announced = records.encode(this_session(self.id, key))
        self._last_beat = time.monotonic()
        self._is_announced = False  # True: the session exists, or may exist
        self._may_land = False  # True: the outcome of a PUT of the record is unknown
        self._found: Snapshot | None = None  # the record that the key has, of this process or of another one
        self.shared = False

    @property
    def is_unclear(self) -> bool:
        """Return whether the record may be committed later, although `publish` has failed."""
        return self._may_land and self._found is None

    def marked(self) -> set[str] | None:
        """Set `quarantined`, and return the keys that gcs want to delete; None if a mark cannot be read."""
        keys = list(listed(self.store, "gc/"))
        self.quarantined = quarantined_names(keys) | self._context.index.marks.packs()
        try:
            return marked_keys(self.store, keys)
        except (IntegrityError, FormatError, StorageError) as error:
            text = "run=%s a gc mark cannot be read; every %s stores all in full until a gc or repair removes it: %s"
            log.warning(text, self.run, self.verb, error)
            return None

    def __enter__(self) -> Self:
        """Announce the session.

        The constructor does not: after a Ctrl-C between constructor and `with`, nothing would end the session.
        """
        try:
            config = self._same_repository.enter_context(confirmed(self._context))
            if config is not None and config.digest_seed != self._context.config.digest_seed:
                raise lasting(
                    StorageError(
                        f"{self.store.url}: config has another digest seed than when this repository was opened: it "
                        f"was replaced or repaired; nothing was written; open the repository again, then {self.verb} "
                        "again"
                    )
                )
            self._is_announced = True
            self.store.lock(self._session_key, self._announced)
            self._look()
        except BaseException:
            self._release()
            raise
        return self

    def _look(self) -> None:
        """Read what the claim builds on, after the session is announced."""

    def __exit__(self, *exc: object) -> None:
        try:
            self._end(exc[1])
        except BaseException as error:  # Ctrl-C: try again, or the session stays locked until this process ends
            self._end(error)
            raise
        finally:
            self._same_repository.close()

    def _end(self, error: object) -> None:
        """End the session if a record explains the objects of this claim, or if one can be created; may be repeated.

        Args:
            error: the exception that ended the claim, or None.
        """
        if (self.written or self.shared) and self._found is None:
            orphaned_sessions.add(self.id)  # the session protects and explains our packs until a gc has fenced it
            # If `publish` has failed, it has tried this already, unless Ctrl-C has ended it.
            if not self._may_land or not isinstance(error, Exception):
                self._abandon(printable(f"{self.verb} failed: {error}")[:500])
        if self._found is not None or not (self.written or self.shared):
            orphaned_sessions.discard(self.id)
            self._release()

    def _abandon(self, reason: str) -> None:
        """Create the substitute record, which explains what was put; if the store is full, delete what was put."""
        with suppress(SnapstoreError):
            try:
                self._create(self._substitute(reason))
            except StorageFullError:
                if self._may_land:  # an earlier PUT of our record has no answer yet: it may still be stored
                    return
                self.store.delete(sorted(self.written))  # no other record needs what only this claim has put
                for prefix in ("packs/", "manifests/"):
                    self.store.sync(prefix)  # a power loss must not bring it back, unexplained
                self.written &= self.store.sizes(self.written).keys()

    def _release(self) -> None:
        """End the session. Its failure does not fail the save: gc sees a dead, stale or orphaned session."""
        try:
            if self._is_announced:
                self.store.release(self._session_key)
        except SnapstoreError as error:
            orphaned_sessions.add(self.id)
            log.warning("session %s could not be removed: %s", self.id, error)
        finally:
            self._same_repository.close()

    def heartbeat(self) -> None:
        """Tell gcs that this process lives; cheap to call often."""
        super().heartbeat()
        if time.monotonic() - self._last_beat >= HEARTBEAT_S:
            self._last_beat = time.monotonic()
            try:
                self.store.touch(self._session_key)
            except NotFoundError:
                self.require_session()
            except StorageError as error:
                log.warning("run=%s step=%d a heartbeat failed; the next may succeed: %s", self.run, self.step, error)
            except CapabilityError as error:  # the store will never take heartbeats: stop trying
                self._last_beat = math.inf
                log.warning(
                    "run=%s step=%d the store takes no heartbeats (%s): a gc on another host fences a %s that takes "
                    "longer than its --fence-after, an hour by default",
                    self.run,
                    self.step,
                    error,
                    self.verb,
                )

    def require_session(self) -> None:
        """Check that the session is still there: then every gc that began after it has seen it.

        Raises:
            ConflictError: the session is gone.
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
            f"{self.verb} {self.run}@{self.step}: its session is gone: a gc fenced this {self.verb} as dead; nothing "
            f"was committed; {self.verb} again"
        )

    def publish(self, snapshot: Snapshot) -> Snapshot:
        """Create the record, read it back and return it.

        Raises:
            ConflictError: another record has its key, or a gc has fenced this claim; nothing was committed.
            StorageError: the store failed; the message says that nothing was committed, or that this is not known.
        """
        self.require_session()
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
                if not self._may_land:
                    raise
                failure = error
                continue
            except SnapstoreError as error:  # the save is wanted no more: its watch has ended a pause between requests
                if not self._may_land:
                    raise
                raise of_unknown_outcome(error) from error
            if ruling.write_id == snapshot.write_id:  # a response may have been lost; the commit was not
                ruling = self._looked(snapshot)
            if self._is_of(snapshot, ruling):
                return snapshot
            raise ConflictError(
                f"{self.verb} {snapshot.ref}: its record exists already as {ruling.state!r} "
                f"({ruling.reason or 'by another writer'}); nothing of this {self.verb} was committed; "
                f"{self.verb} again"
            )
        assert failure is not None
        self._withdraw(snapshot, self._substitute(f"commit failed: {failure}"[:500]), failure)
        return snapshot  # our own PUT had landed after all

    def _create(self, snapshot: Snapshot) -> Snapshot:
        """PUT a record under the key; return the record that the key holds after that, whatever the PUT answered.

        Raises:
            StorageError: the key holds no readable record. The PUT may still land, unless `_may_land` is false.
        """
        earlier, self._may_land = self._may_land, True
        data, failure = records.encode(snapshot), None
        try:
            self.store.put(snapshot.key, data)
        except (StorageError, AlreadyExistsError) as error:
            failure = error
            # A record that is there but not durable must not count: this fails if the put could not fsync its folder.
            self.store.sync(f"snapshots/{self.run}/")
        try:
            got = self.store.get(snapshot.key, limit_bytes=MAX_OBJECT_BYTES)
            found = snapshot if got == data else records.decode(got, Snapshot, snapshot.key)
        except (NotFoundError, FormatError, IntegrityError) as error:
            joined = self._context.index.pages.joined_as(snapshot) if isinstance(error, NotFoundError) else None
            if joined is not None:  # a gc has fenced this claim, and joined the record: its key is free again
                self._may_land, self._found = False, joined
                return joined
            if isinstance(failure, StorageFullError) and isinstance(error, NotFoundError):
                self._may_land = earlier  # the store has answered: this PUT will not land later
            if isinstance(failure, StorageError):
                raise failure from None
            answer = "reported as existing" if failure else "stored"
            raise StorageError(f"{snapshot.key}: {answer}, but the read-back differs: {error}") from error
        self._may_land, self._found = False, found
        return found

    def _looked(self, snapshot: Snapshot) -> Snapshot:
        """Return which record counts after ours was stored under the key: if the key was free, a page may rule.

        A gc's fence may have been joined and deleted. A joiner leaves alone what a session announces, so a save asks
        for its session and for the next page. Whoever has no session any more, or revises a record, lists pages, too.

        Raises:
            StorageError: the store failed: the outcome is unknown.
        """
        if not self._context.index.pages.exist:
            return snapshot
        for attempt in range(1, COMMIT_ATTEMPTS + 1):
            try:
                is_there = not snapshot.revision and self._has_session()
                joined = self._context.index.pages.look(self.run, list_too=not is_there)
                if is_there and joined is not None and not joined.makes_void(snapshot):
                    return snapshot
                return self._in_pages(snapshot)
            except SnapstoreError as error:
                if attempt == COMMIT_ATTEMPTS or not isinstance(error, StorageError):
                    self._may_land, self._found = True, None
                    raise of_unknown_outcome(error) from error
                time.sleep(0.05 * 4 ** (attempt - 1))
        raise AssertionError("unreachable")

    def _is_of(self, snapshot: Snapshot, ruling: Snapshot) -> bool:
        """Return whether a ruling record is ours, or follows ours: nobody else commits revision 0 of a save."""
        follows = not snapshot.revision and ruling.revision > 0 and ruling.state != records.ABORTED
        return follows or ruling.write_id == snapshot.write_id

    def _has_session(self) -> bool:
        """Return whether one answer shows the session."""
        try:
            return self.store.get(self._session_key, limit_bytes=MAX_OBJECT_BYTES) == self._announced
        except (NotFoundError, FormatError, IntegrityError):
            return False

    def _in_pages(self, found: Snapshot) -> Snapshot:
        """Return the record that rules, if a page makes void the one that was found under the key; else that one.

        Raises:
            IntegrityError: a page is damaged, so it is not known.
            StorageError: the store failed.
        """
        joined = self._context.index.pages.look(self.run)
        if joined is None or (not joined.damaged and not joined.makes_void(found)):
            return found
        self._context.index.pages.require_whole(self.run)
        return joined.record_of(found.id) or found.revised()

    def settle(self) -> Snapshot:
        """Return the record that the key of a claim holds which has ended; make sure that it has one.

        Raises:
            StorageError: the store failed: it is still unclear.
        """
        if self._found is None:
            with confirmed(self._context):
                self._create(self._substitute("the attempt had no answer"))
            orphaned_sessions.discard(self.id)
            self._release()
        assert self._found is not None
        self._found = self._in_pages(self._found)
        return self._found

    def has_record(self) -> bool:
        """Return whether the key has a record, which may not be durable.

        Raises:
            StorageError: the store failed.
        """
        try:
            self.store.stat(self._key)
        except NotFoundError:
            return False
        return True

    def discard(self) -> None:
        """Delete what an aborted claim has put: no record needs it. A failure costs only space, until the next gc."""
        if self._found is not None and self._found.state == records.ABORTED:
            with suppress(SnapstoreError):
                self.store.delete(sorted(self.written))

    def _withdraw(self, snapshot: Snapshot, substitute: Snapshot, failure: StorageError) -> None:
        """Make sure that the failed commit can never appear later. Return only if it turns out to have landed."""
        try:
            ruling = self._in_pages(self._create(substitute))
        except SnapstoreError:
            self._may_land, self._found = True, None
            raise StorageError(
                f"{self.verb} {snapshot.ref}: the commit failed and could not be rolled back ({failure}); {UNKNOWN}"
            ) from failure
        if not self._is_of(snapshot, ruling):
            raise failure
        self._found = ruling


def of_unknown_outcome(error: SnapstoreError) -> StorageError:
    """Return an error as one of a save that may be committed: it says so, and never that nothing was committed."""
    if isinstance(error, StorageError) and UNKNOWN in str(error):
        return error
    told = copy.copy(error) if isinstance(error, StorageError) else StorageError()
    told.args = (f"{str(error).partition('; nothing was')[0]}; {UNKNOWN}",)
    told.retryable = error.retryable
    return told
